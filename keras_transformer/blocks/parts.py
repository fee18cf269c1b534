"""What the encoder and the decoder block have in common."""

import inspect
from functools import partial

import keras

from keras_transformer import positions
from keras_transformer._internal import checks
from keras_transformer._internal.seeds import part_seed
from keras_transformer._internal.serialization import (
    deserialize,
    deserialize_shared,
    dtype_config,
    serialize,
    serialize_shared,
)
from keras_transformer._internal.sublayers import built_norm, run
from keras_transformer.attention import MultiHeadAttention
from keras_transformer.attention.arguments import fail_unread
from keras_transformer.blocks.residual import PLACEMENTS, ResidualBranch
from keras_transformer.feed_forward import FeedForward, GatedFeedForward
from keras_transformer.masks import Mask

# The constructor arguments that both blocks take.
OPTIONS = (
    "intermediate_dim",
    "num_heads",
    "key_dim",
    "value_dim",
    "num_key_value_heads",
    "mask",
    "position",
    "dropout",
    "attention_dropout",
    "attention_bias",
    "activation",
    "use_bias",
    "normalization",
    "layer_norm_epsilon",
    "norm_placement",
    "feed_forward",
    "attention",
    "layer_scale",
    "stochastic_depth",
    "kernel_initializer",
    "bias_initializer",
    "seed",
)
# Of those, the ones that hold a layer which several blocks may share.
_PARTS = ("position", "feed_forward", "attention")
# And the ones that a given attention layer has of its own.
_OF_ATTENTION = (
    "key_dim",
    "value_dim",
    "num_key_value_heads",
    "attention_dropout",
    "attention_bias",
)
_DEFAULT_EPSILON = 1e-5


def set_options(block, arguments: dict, default_mask: Mask):
    """Checks the common arguments and keeps each as an attribute.

    Args:
        block: The block under construction.
        arguments: Name to value; names that are no option are passed over.
        default_mask: The mask where None is given.
    """
    options = {name: arguments[name] for name in OPTIONS}
    checks.positive_int(intermediate_dim=options["intermediate_dim"])
    checks.positive_int(num_heads=options["num_heads"])
    for name, names in (
        ("normalization", ("layer_norm", "rms_norm")),
        ("feed_forward", ("dense", "gated")),
    ):
        if isinstance(options[name], str) and options[name] not in names:
            checks.fail(f"one of {list(names)} or a layer", name, options[name])
    checks.one_of(PLACEMENTS, norm_placement=options["norm_placement"])
    checks.positive(layer_norm_epsilon=options["layer_norm_epsilon"])
    checks.positive(layer_scale=options["layer_scale"], optional=True)
    checks.boolean(use_bias=options["use_bias"])
    if options["attention_bias"] is not None:
        checks.boolean(attention_bias=options["attention_bias"])
    for name in ("dropout", "attention_dropout", "stochastic_depth"):
        if options[name] is not None:
            checks.rate(**{name: options[name]})
    options["mask"] = mask_or_default(default_mask, mask=options["mask"])
    options["normalization"] = deserialize(options["normalization"])
    for name in _PARTS:
        options[name] = deserialize_shared(options[name], block.name)
    _check_given_layers(options, default_mask)
    options["position"] = positions.get(
        options["position"], causal=options["mask"].lookahead == 0
    )
    if getattr(options["position"], "acts_on", None) == "embeddings":
        checks.fail(
            "a scheme that acts on queries and keys or on scores",
            "position",
            options["position"],
            "Give this one to `PositionalEmbedding`.",
        )
    for name in ("kernel_initializer", "bias_initializer"):
        options[name] = keras.initializers.get(options[name])
    if options["activation"] is not None:
        options["activation"] = keras.activations.get(options["activation"])
    for name, value in options.items():
        setattr(block, name, value)


def mask_or_default(default: Mask, **argument) -> Mask:
    """The mask that an argument means, checked; None means `default`."""
    ((name, mask),) = argument.items()
    mask = deserialize(mask)
    if mask is not None and not isinstance(mask, Mask):
        checks.fail("a Mask or None", name, mask, "For an array: Explicit.")
    return default if mask is None else mask


def _check_given_layers(options, default_mask):
    """An argument that a given layer has of its own must not differ."""

    def check(layer, name, plain):
        if options[name] != plain:
            checks.fail(
                f"left at {plain!r} with `{layer}` given as a layer",
                name,
                options[name],
                "Set it in the layer.",
            )

    feed_forward, attention = options["feed_forward"], options["attention"]
    if isinstance(feed_forward, keras.layers.Layer):
        check("feed_forward", "activation", None)
        width = options["intermediate_dim"]
        check(
            "feed_forward",
            "intermediate_dim",
            getattr(feed_forward, "intermediate_dim", width),
        )
    if isinstance(options["normalization"], keras.layers.Layer):
        check("normalization", "layer_norm_epsilon", _DEFAULT_EPSILON)
    if attention is None:
        return
    if not isinstance(attention, keras.layers.Layer):
        checks.fail("a layer or None", "attention", attention)
    check("attention", "mask", default_mask)
    check("attention", "position", None)
    heads = options["num_heads"]
    check("attention", "num_heads", getattr(attention, "num_heads", heads))


def options_config(block) -> dict:
    """The common arguments as JSON."""
    config = {name: getattr(block, name) for name in OPTIONS}
    for name in ("mask", "normalization"):
        config[name] = serialize(config[name])
    for name in _PARTS:
        config[name] = serialize_shared(config[name])
    for name in ("kernel_initializer", "bias_initializer"):
        config[name] = keras.initializers.serialize(config[name])
    if block.activation is not None:
        config["activation"] = keras.activations.serialize(block.activation)
    return {**config, **dtype_config(block)}


def build_attention(block, name: str, query_shape, value_shape, **options):
    """A built multi-head attention with the options of `block`."""
    rate, bias = block.attention_dropout, block.attention_bias
    layer = MultiHeadAttention(
        block.num_heads,
        block.key_dim,
        value_dim=block.value_dim,
        num_key_value_heads=block.num_key_value_heads,
        dropout=block.dropout if rate is None else rate,
        use_bias=block.use_bias if bias is None else bias,
        kernel_initializer=block.kernel_initializer,
        bias_initializer=block.bias_initializer,
        seed=part_seed(block.seed, name),
        dtype=block.dtype_policy,
        name=name,
        **options,
    )
    layer.build(query_shape, value_shape)
    return layer


def build_self_attention(block, input_shape, has_other: bool = False):
    """The self-attention that `block.attention` is, or that is made.

    Args:
        block: The block under construction.
        input_shape: Shape of what it attends over.
        has_other: Whether the block also makes a cross-attention.
    """
    if block.attention is None:
        return build_attention(
            block,
            "self_attention",
            input_shape,
            input_shape,
            mask=block.mask,
            position=block.position,
        )
    for name in () if has_other else _OF_ATTENTION:
        if getattr(block, name) is not None:
            checks.fail(
                "left at None with `attention` given as a layer",
                name,
                getattr(block, name),
                "Set it in the layer.",
            )
    if not block.attention.built:
        block.attention.build(input_shape)
    return block.attention


def build_feed_forward(block, input_shape):
    """The feed-forward network that `block.feed_forward` names or is."""
    kinds = {"dense": FeedForward, "gated": GatedFeedForward}
    layer = block.feed_forward
    if not isinstance(layer, keras.layers.Layer):
        checks.one_of(kinds, feed_forward=layer)
        default = {"dense": "relu", "gated": "silu"}[layer]
        layer = kinds[layer](
            block.intermediate_dim,
            activation=block.activation or default,
            use_bias=block.use_bias,
            kernel_initializer=block.kernel_initializer,
            bias_initializer=block.bias_initializer,
            dtype=block.dtype_policy,
            name="feed_forward",
        )
    if not layer.built:
        layer.build(input_shape)
    return layer


def build_branch(block, name: str, input_shape):
    """The built residual connection around a sub-layer of `block`."""
    layer = ResidualBranch(
        placement=block.norm_placement,
        normalization=block.normalization,
        epsilon=block.layer_norm_epsilon,
        dropout=block.dropout,
        layer_scale=block.layer_scale,
        stochastic_depth=block.stochastic_depth,
        seed=part_seed(block.seed, name),
        dtype=block.dtype_policy,
        name=name,
    )
    layer.build(input_shape)
    return layer


def build_shared_norm(block, input_shape):
    """The one norm of a parallel block, or None in other blocks."""
    if block.norm_placement != "parallel":
        return None
    return built_norm(
        block,
        block.normalization,
        block.layer_norm_epsilon,
        "norm",
        input_shape,
    )


def feed_forward_call(layer, padding_mask, training):
    """The feed-forward network as a function of its inputs alone.

    A given layer gets those of the call arguments that it takes: a mixture of
    experts counts real tokens only, most layers know of no padding.
    """
    arguments = {"padding_mask": padding_mask, "training": training}
    taken = inspect.signature(layer.call).parameters
    arguments = {k: v for k, v in arguments.items() if k in taken}
    return partial(run, layer, **arguments)


def mask_data(block, attentions, **data) -> list:
    """For each attention of a block, the data that its mask reads.

    A given attention layer without a `mask` gets all.

    Raises:
        ValueError: If data are given that no attention reads.
    """
    given = {name: value for name, value in data.items() if value is not None}
    parts = []
    for attention in attentions:
        mask = getattr(attention, "mask", None)
        names = mask.data_names if isinstance(mask, Mask) else given
        parts.append({k: v for k, v in given.items() if k in names})
    for name in given:
        if not any(name in part for part in parts):
            fail_unread(name, block.mask, f"block {block.name!r}")
    return parts


def run_sublayers(stream, sublayers, shared_norm, training):
    """Passes the residual stream through the sub-layers of a block.

    Args:
        stream: (batch, length, model_dim).
        sublayers: Pairs of a residual branch and the function inside it.
        shared_norm: The norm of a parallel block, or None.
        training: Whether dropout is active.
    """
    normalized = None if shared_norm is None else run(shared_norm, stream)
    for branch, function in sublayers:
        inputs = branch.enter(stream) if normalized is None else normalized
        stream = branch.leave(stream, function(inputs), training)
    return stream
