"""Sub-layers, made and built in one step under the parent's dtype policy."""

import keras

from keras_transformer._internal import checks
from keras_transformer._internal.decoding_scope import current_scope
from keras_transformer._internal.seeds import part_seed
from keras_transformer._internal.serialization import part_policy


def built_dense(
    parent,
    units: int,
    name: str,
    input_shape,
    *,
    use_bias: bool = True,
    kernel_initializer="glorot_uniform",
    bias_initializer="zeros",
):
    """A built `keras.layers.Dense` called `name` inside `parent`."""
    layer = keras.layers.Dense(
        units,
        use_bias=use_bias,
        kernel_initializer=copy_of(kernel_initializer, name),
        bias_initializer=copy_of(bias_initializer, name),
        dtype=part_policy(parent, name),
        name=name,
    )
    layer.build(input_shape)
    return layer


def built_norm(parent, normalization, epsilon, name: str, input_shape):
    """A built normalisation over the last axis.

    Args:
        parent: The layer that will hold it.
        normalization: `"layer_norm"`, `"rms_norm"`, or a layer, of which a
            copy is made.
        epsilon: Added to the variance; ignored when a layer is given.
        name: Name of the new layer.
        input_shape: Shape of what it will normalise.
    """
    options = {"name": name, "dtype": parent.dtype_policy}
    if normalization == "layer_norm":
        layer = keras.layers.LayerNormalization(epsilon=epsilon, **options)
    elif normalization == "rms_norm":
        layer = keras.layers.RMSNormalization(epsilon=epsilon, **options)
        # Keras's RMSNormalization warns that it would drop an implicit mask;
        # here the surrounding layer carries the mask past it.
        layer.supports_masking = True
    elif isinstance(normalization, keras.layers.Layer):
        layer = copied_layer(normalization, name)
    else:
        checks.fail(
            '"layer_norm", "rms_norm" or a layer',
            "normalization",
            normalization,
        )
    layer.build(input_shape)
    return layer


def run(layer, *args, **kwargs):
    """Calls a sub-layer; in a lean decoding step by its `call` alone.

    `Layer.__call__` converts, casts, checks and carries masks. The driver
    asks for lean steps only where none of it changes anything, on the backend
    that would pay for it at every token.
    """
    scope = current_scope()
    if scope is not None and scope.lean:
        return layer.call(*args, **kwargs)
    return layer(*args, **kwargs)


def copied_layer(layer, name: str):
    """A fresh layer with the same configuration under another name."""
    return type(layer).from_config({**layer.get_config(), "name": name})


def copy_of(initializer, name: str):
    """A fresh initializer for the weight called `name`.

    Two weights of one shape must not start equal because their initializer
    has a seed, so the seed is shifted by the name.
    """
    if not isinstance(initializer, keras.initializers.Initializer):
        return initializer
    config = initializer.get_config()
    if checks.is_integer(config.get("seed")):
        config["seed"] = part_seed(config["seed"], name)
    return type(initializer).from_config(config)
