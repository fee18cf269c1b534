"""Which executor an attention call runs on, and why.

The choice is made from what is known when the call is traced: shapes, dtype,
device, the structure of the mask, and which arguments are given.
"""

import dataclasses

from keras_transformer._internal.backends import backend
from keras_transformer._internal.kernels import Kernel
from keras_transformer.masks import Mask
from keras_transformer.masks.lowering import Lowering, lower
from keras_transformer.masks.pairs import foreign_rule

IMPLEMENTATIONS = ("auto", "dense", "blockwise", "fused")

# Pairs of slots from which on a dense residual costs a kernel more than blocks
# do.
_RESIDUAL_UP_TO = 1 << 20


@dataclasses.dataclass(frozen=True)
class Call:
    """What the choice depends on.

    Args:
        batch, query_length, key_length: Sizes; None where unknown.
        num_heads: Number of query heads.
        key_dim, value_dim: Widths of a head.
        dtype: Of the query.
        device: `"cpu"`, `"gpu"` or `"tpu"`.
        mask: The mask.
        has_padding, has_slots: Whether these are given.
        attention_mask: Its shape, of four axes, or None.
        bias: None, `"array"` or `"scheme"`.
        alibi: Whether the scheme is `ALiBi`.
        soft_cap, sinks, dropout, scores: Whether each is asked for.
    """

    batch: int | None
    query_length: int | None
    key_length: int | None
    num_heads: int
    key_dim: int
    value_dim: int
    dtype: str
    device: str
    mask: Mask
    has_padding: bool = False
    has_slots: bool = False
    attention_mask: tuple | None = None
    bias: str | None = None
    alibi: bool = False
    soft_cap: bool = False
    sinks: bool = False
    dropout: bool = False
    scores: bool = False

    @property
    def has_attention_mask(self) -> bool:
        return self.attention_mask is not None

    @property
    def is_half(self) -> bool:
        return self.dtype in ("float16", "bfloat16")

    @property
    def pairs(self) -> int:
        """How many pairs of slots a head has; 0 where that is unknown."""
        return (self.query_length or 0) * (self.key_length or 0)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The executor of a call.

    Args:
        executor: `"fused"`, `"blockwise"` or `"dense"`.
        kernel: The `Kernel`, when fused.
        lowering: What it takes of the mask, when fused.
        residual_shape: Shape of the boolean array that the executor reads
            beside its flags; None when there is none.
        refusals: Executor or kernel to the reason why it was not taken.
    """

    executor: str
    kernel: Kernel | None = None
    lowering: Lowering | None = None
    residual_shape: tuple | None = None
    refusals: dict = dataclasses.field(default_factory=dict)


def choose(call: Call, implementation: str = "auto") -> Choice:
    """The executor of a call.

    Args:
        call: The call.
        implementation: One of `IMPLEMENTATIONS`.

    Returns:
        A `Choice`.

    Raises:
        ValueError: If the implementation that is asked for cannot take the
            call.
    """
    refusals = {}
    fused = _first_kernel(call, refusals)
    blockwise = _blockwise_refusal(call)
    if blockwise is not None:
        refusals["blockwise"] = blockwise
    if implementation == "fused" and fused is None:
        names = [kernel.name for kernel in backend.KERNELS] or ["fused"]
        reasons = [f"{name}: {refusals[name]}" for name in names]
        _fail(implementation, "; ".join(reasons))
    if implementation == "blockwise" and blockwise is not None:
        _fail(implementation, blockwise)
    executor = implementation
    if implementation == "auto":
        executor = _best(call, fused, refusals)
    if executor == "fused":
        return dataclasses.replace(fused, refusals=refusals)
    if executor == "blockwise":
        return Choice("blockwise", refusals=refusals)
    shape = _residual_shape(call, call.mask)
    return Choice("dense", residual_shape=shape, refusals=refusals)


def _fail(implementation, reason):
    raise ValueError(
        f'implementation="{implementation}" cannot be honoured: {reason}. Use '
        'implementation="auto" or "dense".'
    )


def _first_kernel(call, refusals):
    """The first kernel that takes the call; notes why others do not."""
    if not backend.KERNELS:
        refusals["fused"] = backend.NO_KERNELS
    for kernel in backend.KERNELS:
        refusal, lowering = _common_refusal(call, kernel), None
        if refusal is None:
            # Kernels count positions from 0 for queries and keys alike.
            aligned = (
                not call.has_slots
                and call.query_length == call.key_length
                and call.query_length is not None
            )
            lowering = lower(call.mask, kernel.flags if aligned else ())
            if not kernel.adds_to_flags and (
                lowering.residual is not None
                or call.has_padding
                or call.has_attention_mask
                or call.bias
            ):
                lowering = lower(call.mask, ())
            refusal = kernel.refusal(call, lowering)
        if refusal is None:
            shape = None
            if not kernel.skips:
                shape = _residual_shape(call, lowering.residual)
            return Choice("fused", kernel, lowering, shape)
        refusals[kernel.name] = refusal
    return None


def _common_refusal(call, kernel):
    if call.scores:
        return "attention scores were asked for"
    if call.dropout:
        return "dropout on the weights is left to the other executors"
    for name in ("soft_cap", "sinks"):
        if getattr(call, name) and name not in kernel.options:
            return f"it has no `{name}`"
    foreign = foreign_rule(call.mask) if kernel.skips else None
    if foreign is not None:
        return f"{foreign!r} is no rule of the library that it could inline"
    return None


def _blockwise_refusal(call):
    if call.scores:
        return "attention scores were asked for"
    if call.query_length is None or call.key_length is None:
        return "lengths must be known when the call is traced"
    if not call.pairs:
        return "there is nothing to compute"
    if call.has_slots:
        return "slots are given, and tiles are planned for slots from 0"
    if call.has_attention_mask:
        return (
            "`attention_mask` is an array as large as the scores; a `Mask` "
            "such as Explicit or Documents can be planned"
        )
    if call.bias == "array":
        return (
            "`bias` is an array as large as the scores; a position scheme "
            "such as ALiBi can be evaluated tile by tile"
        )
    return None


def _best(call, fused, refusals):
    """The fastest executor among those that can take the call."""
    by_blocks = "blockwise" not in refusals
    if fused is not None:
        shape = fused.residual_shape
        # Blocks of a residual that differs between queries can be skipped.
        costly = (
            shape is not None
            and shape[-2] != 1
            and call.pairs >= _RESIDUAL_UP_TO
        )
        if not (costly and by_blocks):
            if by_blocks:
                refusals["blockwise"] = "the kernel is faster"
            refusals["dense"] = "the kernel is faster"
            return "fused"
        refusals[fused.kernel.name] = (
            f"its residual {fused.lowering.residual!r} would be a dense array"
        )
    if by_blocks and call.pairs >= backend.BLOCKS_FROM:
        refusals["dense"] = "its memory grows with the square of the length"
        return "blockwise"
    if by_blocks:
        refusals["blockwise"] = "the sequences are short"
    return "dense"


def _residual_shape(call, residual):
    """The shape of the booleans that say who may attend to whom."""
    shape = _shape_of_rules(call, residual)
    if call.attention_mask is None or shape is None:
        return call.attention_mask or shape
    return tuple(
        None if None in sizes else max(sizes)
        for sizes in zip(shape, call.attention_mask, strict=True)
    )


def _shape_of_rules(call, residual):
    if residual is None or residual.is_full:
        if not call.has_padding and not call.has_slots:
            return None
        return call.batch, 1, 1, call.key_length
    by_batch = call.has_padding or call.has_slots or residual.data_names
    return (
        call.batch if by_batch else 1,
        residual.num_heads or 1,
        call.query_length,
        call.key_length,
    )
