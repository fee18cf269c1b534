"""Planning which blocks of a mask hold work, beside PyTorch's and splash's.

    python benchmarks/masks.py [--quick]

Peers are `create_block_mask` of PyTorch's `flex_attention`, which makes the
whole mask, and `process_mask` of JAX's splash attention, where they are
installed; they are asked for lengths that they can do. Blocks of 128 (splash:
512). Planning does not depend on the backend. Ratios above 1 are in our
favour.
"""

import numpy as np
from rivals import Rival, compare, comparison_table
from timing import options

from keras_transformer import (
    Causal,
    Documents,
    Global,
    PerHead,
    Prefix,
    SlidingWindow,
    Strided,
)

MASKS = {
    "causal": Causal(),
    "causal, window 512": Causal() & SlidingWindow(512),
    "causal, window and global": Causal() & (SlidingWindow(512) | Global(64)),
    "causal, strided": Causal() & (SlidingWindow(512) | Strided(512)),
    "prefix": Causal() | Prefix(),
    "two kinds of heads": PerHead([Causal(), Causal() & SlidingWindow(512)]),
    "causal, 64 documents": Causal() & Documents(),
}


def ours(name, length, block_size=128):
    """Our plan."""
    data = {}
    if name == "prefix":
        data["prefix_length"] = np.array(length // 4)
    if "documents" in name:
        slots = np.arange(length, dtype="int32")
        data["segment_ids"] = (slots * 64 // length)[None]
    return lambda: MASKS[name].plan(length, block_size=block_size, **data)


def flexs(name, length):
    """PyTorch's block mask; by broadcasting, not compiled."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    documents = torch.arange(length) * 64 // length

    def rule(batch, head, query, key):
        allowed = key <= query
        if "window" in name:
            allowed = allowed & (query - key < 512)
        if "documents" in name:
            allowed = allowed & (documents[query] == documents[key])
        return allowed

    return lambda: create_block_mask(
        rule, None, None, length, length, device="cpu"
    )


def splashs(name, length):
    """The information that JAX's splash attention makes of a mask."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape = (length, length)
    mask = splash.CausalMask(shape)
    if "window" in name:
        mask = splash.LocalMask(shape, window_size=(511, 0), offset=0)
    masks = splash.MultiHeadMask([mask])
    information = splash.splash_attention_mask_info

    def process():
        # It remembers its last answers.
        information._process_mask.cache_clear()
        information.process_mask(masks, (512, 512))

    return process


def main(chosen):
    """Prints the table."""
    table = comparison_table()
    for name in MASKS:
        length = chosen.size(1_000_000, 4096)
        compare(
            table,
            chosen,
            name,
            Rival(ours, name, length),
            "",
            None,
            shape=f"{length} x {length}",
            dtype="",
        )
    flex, splash = chosen.size(16_384, 1024), chosen.size(32_768, 1024)
    for name, length, peer, make, block_size, backend in (
        ("causal", flex, "create_block_mask", flexs, 128, "torch"),
        ("causal, window 512", flex, "create_block_mask", flexs, 128, "torch"),
        (
            "causal, 64 documents",
            flex,
            "create_block_mask",
            flexs,
            128,
            "torch",
        ),
        ("causal", splash, "splash process_mask", splashs, 512, "jax"),
        (
            "causal, window 512",
            splash,
            "splash process_mask",
            splashs,
            512,
            "jax",
        ),
    ):
        compare(
            table,
            chosen,
            name,
            Rival(ours, name, length, block_size),
            peer,
            Rival(make, name, length, backend=backend),
            shape=f"{length} x {length}",
            dtype="",
        )


if __name__ == "__main__":
    main(options(__doc__))
