"""Padding masks: the one that Keras carries, and those that a caller gives."""

from keras import ops


def combined_padding(*masks):
    """The conjunction of padding masks, or None where there is none.

    Keras hands over the mask attached to a tensor as `mask` when a layer is
    called with one tensor and as `<argument>_mask` when with several; a layer
    passes both names, and what the caller gave, to this function.

    Args:
        *masks: Each None or (batch, length); True marks a real token.

    Returns:
        None or a boolean tensor (batch, length).
    """
    combined = None
    for mask in masks:
        if mask is None:
            continue
        mask = ops.cast(mask, "bool")
        combined = mask if combined is None else combined & mask
    return combined
