"""What the builders have in common."""

import keras

from keras_transformer import positions
from keras_transformer._internal import checks
from keras_transformer._internal.seeds import part_seed
from keras_transformer._internal.sublayers import copied_layer, copy_of
from keras_transformer.blocks import Unembedding
from keras_transformer.masks import Mask


def model_inputs(names, required, optional) -> dict:
    """The inputs of a functional model.

    Args:
        names: Names of the inputs, as the caller gave them.
        required: Names that must be among them.
        optional: Names that may be.

    Returns:
        Name to `keras.Input`, in the order of `names`.
    """
    names = (names,) if isinstance(names, str) else tuple(names)
    known = [*required, *optional]
    if len(set(names)) < len(names) or not set(required) <= set(names) <= set(
        known
    ):
        checks.fail(
            f"different names out of {known}, with {list(required)}",
            "inputs",
            names,
        )
    inputs = {}
    for name in names:
        inputs[name] = keras.Input(
            () if name == "prefix_length" else (None,),
            dtype="bool" if name.endswith("padding_mask") else "int32",
            name=name,
        )
    return inputs


def block_data(block, inputs: dict, position) -> dict:
    """The inputs of a model that a block's attention reads."""
    data = {
        name: tensor
        for name, tensor in inputs.items()
        if name not in ("token_ids", "positions")
        and (
            name == "padding_mask"
            or block.attention is not None
            or name in block.mask.data_names
        )
    }
    if "positions" in inputs and (position or block.attention) is not None:
        data["positions"] = inputs["positions"]
    return data


def check_read(inputs: dict, masks: list, position, attention):
    """Refuses inputs that no part would read, and masks that lack theirs.

    Args:
        inputs: Name to input.
        masks: The masks of the blocks.
        position: The scheme, or None.
        attention: A layer that the caller gave in place of the blocks' own,
            which may read anything, or None.
    """
    if attention is not None:
        return
    read = set().union(*(mask.data_names for mask in masks))
    cures = {
        "segment_ids": "Add `Documents()` to `mask`.",
        "prefix_length": "Add `Prefix()` to `mask`.",
    }
    for name in sorted(read - set(inputs)):
        checks.fail(
            f"such that they hold {name!r}, which `mask` reads",
            "inputs",
            tuple(inputs),
        )
    for name, cure in cures.items():
        if name in inputs and name not in read:
            checks.fail(
                f"free of {name!r}, which `mask` does not read",
                "inputs",
                tuple(inputs),
                cure,
            )
    if "positions" in inputs and position is None:
        checks.fail(
            "free of 'positions' with `position=None`",
            "inputs",
            tuple(inputs),
        )


def functional_model(inputs: dict, outputs, name):
    """The model, called with the one tensor when it has one input."""
    if len(inputs) == 1:
        (inputs,) = inputs.values()
    return keras.Model(inputs, outputs, name=name)


def split_position(position, masks: list, max_length: int | None):
    """A `position` as (scheme for the embedder, scheme for the blocks).

    One of them is None. All blocks of a stack get the same object, so that a
    trained bias is one table per stack.
    """
    causal = all(mask.lookahead == 0 for mask in masks)
    scheme = positions.get(position, causal=causal, max_length=max_length)
    if scheme is None or scheme.acts_on == "embeddings":
        return scheme, None
    return None, scheme


def fresh(position):
    """A scheme of its own with the same settings; names pass unchanged."""
    if isinstance(position, keras.layers.Layer):
        return type(position).from_config(
            {**position.get_config(), "name": f"{position.name}_decoder"}
        )
    return position


def masks_of(num_layers: int, default: Mask, **argument) -> list:
    """One mask per block, from one mask for all or a sequence of them."""
    ((name, mask),) = argument.items()
    if mask is None:
        mask = default
    if isinstance(mask, Mask):
        return [mask] * num_layers
    masks = list(mask) if isinstance(mask, list | tuple) else []
    if len(masks) != num_layers:
        checks.fail(
            f"a Mask, or a sequence of {num_layers}, one per block",
            name,
            mask,
        )
    return masks


def stack(block_class, masks: list, name: str, options: dict) -> list:
    """A block for each mask; layers in `options` are copied for each."""
    blocks = []
    for index, mask in enumerate(masks):
        block_name = f"{name}_{index}"
        own = {
            "mask": mask,
            "name": block_name,
            **options,
            "seed": part_seed(options["seed"], block_name),
        }
        for key in ("kernel_initializer", "bias_initializer"):
            if key in own:
                own[key] = copy_of(own[key], block_name)
        for key in ("feed_forward", "attention"):
            if isinstance(own.get(key), keras.layers.Layer):
                own[key] = _own_layer(own[key], key, block_name)
        blocks.append(block_class(**own))
    return blocks


def _own_layer(layer, name, block_name):
    """A copy for one block: with a seed of its own, where it has one."""
    config = {**layer.get_config(), "name": name}
    if config.get("seed") is not None:
        config["seed"] = part_seed(config["seed"], block_name)
    return type(layer).from_config(config)


def tied_unembedding(embedding, token_ids, dtype, **options):
    """The de-embedding with the embedder's table, as a function.

    The table enters the graph here, as the embedder's first output, so that
    `model.summary()` shows the output that comes last: the embeddings.
    """
    table = embedding(token_ids, table=True)
    layer = Unembedding(embedding, dtype=dtype, name="unembedding", **options)
    return lambda inputs: layer(inputs, table)


def final_norm(options: dict, name: str):
    """The norm after a stack, or the identity where blocks end with one."""
    if options["norm_placement"] == "post":
        return lambda inputs: inputs
    return norm(options, name)


def norm(options: dict, name: str):
    """A norm of the kind that the blocks use."""
    normalization = options["normalization"]
    epsilon = options["layer_norm_epsilon"]
    if isinstance(normalization, keras.layers.Layer):
        return copied_layer(normalization, name)
    checks.one_of(("layer_norm", "rms_norm"), normalization=normalization)
    kinds = {
        "layer_norm": keras.layers.LayerNormalization,
        "rms_norm": keras.layers.RMSNormalization,
    }
    return kinds[normalization](
        epsilon=epsilon, dtype=options["dtype"], name=name
    )
