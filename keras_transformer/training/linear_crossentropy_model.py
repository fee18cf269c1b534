"""A language model in training, which never holds its logits."""

import keras
from keras import ops

from keras_transformer._internal import checks
from keras_transformer._internal.serialization import register, serialize
from keras_transformer.blocks import Unembedding
from keras_transformer.training.linear_crossentropy import linear_crossentropy


@register
class LinearCrossentropyModel(keras.Model):
    """Trains a model of logits on its cross-entropy, without the logits.

    It wraps a functional model that ends with an `Unembedding` and shares all
    of its weights. `fit`, `evaluate`, `train_on_batch` and `test_on_batch`
    take the same token ids, integer targets and sample weights as the wrapped
    model would, and compute the loss by `linear_crossentropy`. The wrapped
    model itself stays as it is: generate, predict and deploy with that.

    The loss of a batch is the sum of the weighted losses over the sum of the
    weights: what the wrapped model has with `LabelSmoothedCrossentropy`, or
    with Keras's loss and `reduction="mean_with_sample_weight"`. Losses that
    layers add are added. Without label smoothing, `exp(loss)` is the
    perplexity.

    Args:
        model: A functional model whose one output is that of an
            `Unembedding`, tied or not.
        label_smoothing: Share of the probability that is spread evenly.

    Call arguments:
        inputs: What the wrapped model takes.
        training: Whether dropouts are active.

    Returns:
        The inputs of the wrapped model's last layer: the vectors, and the
        table if it is tied. (`predict` gives the logits.)

    Raises:
        ValueError: If the model does not end with an `Unembedding`, or if
            this model is compiled with a loss or with metrics.

    Example:

    ```python
    model = decoder_only(1000, num_layers=2, model_dim=64, num_heads=4,
                         intermediate_dim=256)
    trained = LinearCrossentropyModel(model)
    trained.compile("adam")
    inputs, targets, weights = next_token_pairs(rows)
    trained.fit(inputs, targets, sample_weight=weights)
    result = generate(model, [[1, 2, 3]], max_new_tokens=5)
    ```
    """

    def __init__(self, model, *, label_smoothing: float = 0.0, **kwargs):
        checks.rate(label_smoothing=label_smoothing)
        trunk, unembedding = _without_last_layer(model)
        super().__init__(**kwargs)
        self.model = model
        self.label_smoothing = label_smoothing
        # In closures: the layers belong to the wrapped model.
        self._trunk = lambda inputs, training: trunk(inputs, training=training)
        self._unembedding = lambda: unembedding
        mask_weights = _MaskWeights()
        self._mask_weights = lambda vectors: mask_weights(vectors)
        self.built = True

    def call(self, inputs, training=None):
        return self._trunk(inputs, training)

    def compile(self, optimizer="rmsprop", loss=None, **kwargs):
        """As in Keras, without a loss and without metrics.

        Args:
            optimizer: As in Keras.
            loss: Must be None, since the model brings its own.
            **kwargs: As in Keras, without metrics.
        """
        if loss is not None or kwargs.get("loss_weights") is not None:
            checks.fail(
                "None here, since the model brings its own", "loss", loss
            )
        for name in ("metrics", "weighted_metrics"):
            if kwargs.get(name):
                checks.fail(
                    "None here, since they would need the logits",
                    name,
                    kwargs[name],
                    f"Compile {self.model.name!r} with them and evaluate it: "
                    "the weights are the same.",
                )
        super().compile(optimizer, **kwargs)

    def compile_from_config(self, config):
        config = keras.saving.deserialize_keras_object(config)
        self.compile(**config)
        self.optimizer.build(self.trainable_variables)

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        if y is None:
            checks.fail("given: the targets", "y", y)
        vectors, *tables = keras.tree.flatten(y_pred)
        weights = self._mask_weights(vectors)
        if sample_weight is not None:
            weights = weights * _for_tokens(sample_weight)
        unembedding = self._unembedding()
        dtype = unembedding.compute_dtype
        loss = linear_crossentropy(
            ops.cast(vectors, dtype),
            tables[0] if tables else unembedding._kernel,
            y,
            weights,
            bias=unembedding._bias if unembedding.use_bias else None,
            transposed=bool(tables),
            soft_cap=unembedding.soft_cap,
            label_smoothing=self.label_smoothing,
            reduction="mean_with_sample_weight",
            training=training,
        )
        loss = _Loss(name="loss")(loss[None], loss[None])
        for extra in self.losses:
            loss += ops.cast(ops.sum(extra), loss.dtype)
        return loss

    def predict(self, *args, **kwargs):
        """The logits, from the wrapped model."""
        return self.model.predict(*args, **kwargs)

    def predict_on_batch(self, *args, **kwargs):
        """The logits, from the wrapped model."""
        return self.model.predict_on_batch(*args, **kwargs)

    def get_config(self):
        return {
            **super().get_config(),
            "model": serialize(self.model),
            "label_smoothing": self.label_smoothing,
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        model = keras.saving.deserialize_keras_object(
            config["model"], custom_objects=custom_objects
        )
        return cls(**{**config, "model": model})


class _Loss(keras.losses.Loss):
    """Its predictions; Keras divides a loss among the replicas."""

    def call(self, y_true, y_pred):
        return y_pred


class _MaskWeights(keras.layers.Layer):
    """1 for tokens that count and 0 for those that Keras's mask hides."""

    def __init__(self):
        super().__init__(name="mask_weights", autocast=False, dtype="float32")
        self.supports_masking = True
        self.built = True

    def call(self, inputs, mask=None):
        if mask is None:
            return ops.ones_like(inputs[..., 0], dtype="float32")
        return ops.cast(mask, "float32")


def _without_last_layer(model):
    """A model of what enters the last layer of `model`, and that layer."""
    functional = getattr(model, "_functional", None) or model
    if (
        not hasattr(functional, "_nodes_by_depth")
        or len(functional.outputs) != 1
    ):
        checks.fail(
            "a functional or sequential keras.Model of one output",
            "model",
            model,
        )
    # Keras gives access to a graph by these private names only.
    layer, node_index, _ = functional.outputs[0]._keras_history
    if not isinstance(layer, Unembedding):
        checks.fail(
            "a model that ends with an Unembedding",
            "model",
            model,
            f"Its last layer is {type(layer).__name__} {layer.name!r}.",
        )
    node = layer._inbound_nodes[node_index]
    trunk = keras.Model(functional._inputs_struct, list(node.input_tensors))
    return trunk, layer


def _for_tokens(sample_weight):
    """Weights that fit (batch, length); those of rows get an axis."""
    weights = ops.cast(sample_weight, "float32")
    return weights[:, None] if len(weights.shape) == 1 else weights
