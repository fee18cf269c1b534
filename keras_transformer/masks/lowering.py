"""What a kernel takes of a mask as flags, and the exact rest."""

import dataclasses

from keras_transformer.masks.algebra import And
from keras_transformer.masks.batch import Documents, Padding
from keras_transformer.masks.mask import Mask
from keras_transformer.masks.order import SlidingWindow


@dataclasses.dataclass(frozen=True)
class Lowering:
    """A mask as flags of a kernel; the mask is the flags and the residual.

    Args:
        is_causal: Whether the kernel ands `k <= q`.
        window: None, or `(left, right)`: it ands `-left <= k - q <= right`.
        documents: Whether it ands that segment ids are equal.
        padding: Whether it requires a padding mask, which it ands.
        residual: What it does not cover, a mask, or None.
    """

    is_causal: bool = False
    window: tuple[int, int] | None = None
    documents: bool = False
    padding: bool = False
    residual: Mask | None = None

    @property
    def flags(self) -> dict:
        """The flags that are set, by name."""
        flags = {name: getattr(self, name) for name in FLAGS}
        return {name: value for name, value in flags.items() if value}


FLAGS = ("is_causal", "window", "documents", "padding")


def lower(mask: Mask, flags) -> Lowering:
    """Peels off what `flags` can say; nothing of the mask is dropped.

    Args:
        mask: The mask, in slots that count from 0.
        flags: Names of the flags that a kernel has, of `FLAGS`.

    Returns:
        A `Lowering`.
    """
    rest, found = [], {}
    parts = mask.masks if isinstance(mask, And) else [mask]
    for part in parts:
        if part.is_full:
            continue
        if part.is_causal_only and "is_causal" in flags:
            found["is_causal"] = True
        elif isinstance(part, SlidingWindow) and "window" in flags:
            left, right = found.get("window", (part.lookback, part.lookahead))
            found["window"] = (
                min(left, part.lookback),
                min(right, part.lookahead),
            )
        elif isinstance(part, Documents) and "documents" in flags:
            found["documents"] = True
        elif isinstance(part, Padding) and "padding" in flags:
            found["padding"] = True
        else:
            rest.append(part)
    if rest:
        found["residual"] = And(rest) if len(rest) > 1 else rest[0]
    return Lowering(**found)
