"""What the library knows of a backend's fused kernel."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A fused attention kernel.

    Args:
        name: The backend's own name of it.
        flags: What of a mask it takes itself: names of `masks.lowering.FLAGS`.
        refusal: Takes a `Call` and its `Lowering`; returns why the kernel
            cannot take the call exactly, or None.
        run: Takes query, key, value, the call's `Lowering` and `allowed`,
            `bias`, `scale` and `soft_cap` by name; returns the outputs.
            `allowed` is None or booleans; where the kernel skips blocks, it
            is the `Pairs` of the whole mask. `bias` is None or an array;
            where the kernel takes ALiBi, it is the bias of distance 1,
            (heads,), with the positions of queries and of keys.
        skips: Whether it skips the blocks that the mask forbids.
        adds_to_flags: Whether it takes booleans or a bias beside its flags.
        options: What it takes beside the mask, of `"soft_cap"`, `"sinks"`
            and `"alibi"`; a call without any needs none.
    """

    name: str
    flags: frozenset
    refusal: Callable
    run: Callable
    skips: bool = False
    adds_to_flags: bool = True
    options: frozenset = frozenset()
