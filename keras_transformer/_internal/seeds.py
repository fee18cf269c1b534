"""Seeds of the parts of a layer or a model."""

import zlib


def part_seed(seed: int | None, name: str) -> int | None:
    """A seed for the part called `name`: equal seeds drop equal units."""
    if seed is None:
        return None
    return seed + zlib.crc32(name.encode()) % 2**16
