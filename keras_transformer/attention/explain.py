"""Which executor each attention call of a model runs on, and why.

`explain` traces one call of a layer or model under a `Recorder`.
"""

import collections.abc
import dataclasses
import inspect
import math
import re

import keras
from keras import ops

from keras_transformer._internal import checks
from keras_transformer._internal.backends import backend
from keras_transformer.attention.blockwise import block_sizes
from keras_transformer.attention.recording import Recorder, recording
from keras_transformer.masks.tiles import static_plan

_COLUMNS = ("layer", "executor", "flags", "residual", "bytes", "tiles")


def explain(
    layer_or_model, shapes, *, training: bool = False, print_fn=None, **options
):
    """Prints how each attention of a call would be computed, and why so.

    One row for each call of `dot_product_attention`: the executor, the flags
    that a kernel takes of the mask, the rest of the mask that it reads as
    booleans and their bytes, and the tiles of the blockwise executor. Below
    it stands why each other executor was refused. Equal layers that follow
    each other in a stack share a row.

    The call is traced, not computed, and the layer or model stays as it is.
    (On PyTorch, a model with an operation that the device `"meta"` does not
    have is computed on zeros, its attention left out.) Attention inside of a
    function that is compiled already is not seen. The steps of `generate`
    attend to caches, so other executors may run there.

    Args:
        layer_or_model: A built layer or model with attention of this library.
        shapes: Shapes, the batch included. For a functional model that of its
            input, or a list, or a dict from the inputs' names. For a layer
            that of its first call argument, or a dict from the names of call
            arguments: those that end with `mask` are boolean; with `ids`,
            `positions` or `length` int32; all others have the layer's dtype.
            A `keras.KerasTensor` in place of a shape names another dtype.
        training: Whether dropout is active.
        print_fn: Takes the text; None: `print`.
        **options: Further call arguments, passed as they are, such as
            `use_causal_mask=True`.

    Returns:
        An `Explanation`: a sequence of `ExplainedCall`, one for each call,
        that prints as the table.

    Raises:
        ValueError: If the layer is not built, or has no attention of this
            library; or as the call would, for an `implementation` that cannot
            be honoured or for data that is missing: then naming the layer.

    Example:

    ```python
    layer = MultiHeadAttention(8, mask=Causal() & SlidingWindow(512))
    layer.build((2, 4096, 256))
    rows = explain(layer, {"query": (2, 4096, 256), "padding_mask": (2, 4096)})
    rows[0].executor  # "blockwise"
    rows[0].refusals["dense"]
    ```
    """
    _check_built(layer_or_model)
    checks.boolean(training=training)
    specs = _call_specs(layer_or_model, shapes)
    if training:
        options["training"] = True
    # A traced tensor need not be where the real one would be.
    recorder = Recorder(backend.device_of(ops.zeros((1,))))

    def call(*tensors):
        recorder.begin()
        args, kwargs = keras.tree.pack_sequence_as(specs, tensors)
        layer_or_model(*args, **kwargs, **options)

    # Seeds and statistics are updated in the scope only.
    with keras.StatelessScope(collect_losses=True), recording(recorder):
        try:
            backend.traced(call, *keras.tree.flatten(specs))
        except Exception:
            # Keras wraps what is raised inside of layers.
            if recorder.refusal is None:
                raise
            raise ValueError(recorder.refusal) from None
    if not recorder.noted:
        raise ValueError(
            "`layer_or_model` must contain attention of this library: "
            "`MultiHeadAttention`, a block with it, or a layer that calls "
            f"`dot_product_attention`. Received: {layer_or_model!r}, whose "
            "call reaches none."
        )
    explanation = Explanation([_explained(*noted) for noted in recorder.noted])
    (print if print_fn is None else print_fn)(str(explanation))
    return explanation


@dataclasses.dataclass(frozen=True)
class ExplainedCall:
    """How one call of `dot_product_attention` is computed.

    Args:
        layer: Path of the attention layer; None for a call outside of one.
        implementation: What was asked for.
        executor: `"fused"`, `"blockwise"` or `"dense"`.
        kernel: Name of the kernel, when fused.
        flags: What the kernel takes of the mask itself, by name.
        residual: What else of the mask is read; None: nothing, or tile by
            tile by the blockwise executor.
        residual_shape: Shape of the booleans that are made of it, which
            broadcast to (batch, heads, query, key); None where there are
            none, as in a kernel that asks the mask itself.
        residual_bytes: Their size.
        block_sizes: Queries and keys of a tile, when blockwise.
        density: Share of the tiles that is computed.
        density_is_bound: Whether the data of the batch may lower it.
        refusals: Each other executor or kernel to why it was not taken.
    """

    layer: str | None
    implementation: str
    executor: str
    kernel: str | None = None
    flags: dict = dataclasses.field(default_factory=dict)
    residual: str | None = None
    residual_shape: tuple | None = None
    residual_bytes: int = 0
    block_sizes: tuple | None = None
    density: float | None = None
    density_is_bound: bool = False
    refusals: dict = dataclasses.field(default_factory=dict)

    def _cells(self):
        executor = self.kernel or self.executor
        if self.implementation != "auto":
            executor += " (asked for)"
        flags = ", ".join(f"{k}={v}" for k, v in self.flags.items())
        residual = tiles = "-"
        if self.residual is not None:
            residual = self.residual
        if self.residual_shape is not None:
            residual += f" {self.residual_shape}"
        if self.block_sizes is not None:
            tiles = "{} x {}, ".format(*self.block_sizes)
            tiles += "at most " * self.density_is_bound
            tiles += f"{self.density:.1%} computed"
        size = f"{self.residual_bytes:,}"
        return [executor, flags or "-", residual, size, tiles]


class Explanation(collections.abc.Sequence):
    """The calls of one run of a layer or model; prints as a table.

    Args:
        calls: A list of `ExplainedCall`.
    """

    def __init__(self, calls):
        self._calls = tuple(calls)

    def __len__(self):
        return len(self._calls)

    def __getitem__(self, index):
        return self._calls[index]

    def __repr__(self):
        runs = _runs(self._calls)
        table = [list(_COLUMNS)]
        table += [[_label(run), *run[0]._cells()] for run in runs]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width)
                for cell, width in zip(row, widths, strict=True)
            ).rstrip()
            for row in table
        ]
        text = [lines[0], "-" * max(map(len, lines))]
        for line, run in zip(lines[1:], runs, strict=True):
            text.append(line)
            for name, reason in run[0].refusals.items():
                text.append(f"  not {name}: {reason}")
        return "\n".join(text)


def _check_built(layer):
    if not isinstance(layer, keras.layers.Layer):
        checks.fail("a layer or a model", "layer_or_model", layer)
    if not layer.built:
        raise ValueError(
            f"Layer {layer.name!r} must be built before `explain`: call it "
            "once, or `build(input_shape)`."
        )


def _call_specs(layer, shapes):
    """The call's arguments as `KerasTensor`s: a tuple and a dict."""
    if isinstance(layer, keras.Model) and getattr(layer, "inputs", None):
        return (_input_specs(layer, shapes),), {}
    parameters = inspect.signature(layer.call).parameters.values()
    kinds = [p.kind for p in parameters]
    names = [
        p.name
        for p in parameters
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if not isinstance(shapes, dict):
        shapes = {names[0]: shapes}
    unknown = [name for name in shapes if name not in names]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        unknown = []
    if unknown or names[0] not in shapes:
        checks.fail(
            f"a shape, or a dict with {names[0]!r} whose names are call "
            f"arguments of {layer.name!r}, {names}",
            "shapes",
            shapes,
        )
    specs = {
        name: _spec(name, shape, _dtype_of(name, layer))
        for name, shape in shapes.items()
    }
    return (specs.pop(names[0]),), specs


def _input_specs(model, shapes):
    """What a functional model is called with, as `KerasTensor`s."""
    # Only a `Sequential` has no `input`; it takes one tensor.
    structure = getattr(model, "input", model.inputs[0])
    inputs = keras.tree.flatten(structure)
    names = [tensor.name for tensor in inputs]
    if isinstance(structure, dict):
        names = keras.tree.flatten({name: name for name in structure})
    if isinstance(shapes, dict):
        given = shapes
    elif _is_shape(shapes):
        given = {names[0]: shapes}
    elif isinstance(shapes, (list, tuple)) and len(shapes) == len(inputs):
        # In the order in which the model lists its inputs.
        order = names if not isinstance(structure, dict) else list(structure)
        given = dict(zip(order, shapes, strict=True))
    else:
        given = {}
    if set(given) != set(names):
        checks.fail(
            f"a shape for each input of model {model.name!r}, {names}",
            "shapes",
            shapes,
        )
    specs = [
        _spec(name, given[name], tensor.dtype)
        for name, tensor in zip(names, inputs, strict=True)
    ]
    return keras.tree.pack_sequence_as(structure, specs)


def _is_shape(value):
    return hasattr(value, "shape") or (
        isinstance(value, (list, tuple)) and all(map(checks.is_integer, value))
    )


def _spec(name, shape, dtype):
    if hasattr(shape, "shape"):
        dtype = keras.backend.standardize_dtype(shape.dtype)
        shape = tuple(shape.shape)
    if not _is_shape(shape) or any(size < 1 for size in shape):
        checks.fail(
            f"a tuple of positive integers for {name!r}, batch included",
            "shapes",
            shape,
        )
    return keras.KerasTensor(tuple(map(int, shape)), dtype=dtype, name=name)


def _dtype_of(name, layer):
    if name.endswith("mask"):
        return "bool"
    if name.endswith(("ids", "positions", "length")):
        return "int32"
    return layer.compute_dtype


def _explained(layer, implementation, call, choice):
    """The `ExplainedCall` of what a recorder noted."""
    found = {}
    if choice.executor == "blockwise":
        lengths = call.query_length, call.key_length
        sizes = block_sizes(call.mask, *lengths)
        found["block_sizes"] = sizes
        found["density"] = static_plan(call.mask, *lengths, *sizes).density
        found["density_is_bound"] = bool(
            call.has_padding or call.mask.data_names
        )
    if choice.kernel is not None:
        found["kernel"] = choice.kernel.name
        found["flags"] = choice.lowering.flags
    if choice.residual_shape is not None or (
        choice.kernel is not None and choice.kernel.skips
    ):
        found["residual"] = _residual(call, choice)
    if choice.residual_shape is not None:
        found["residual_shape"] = tuple(choice.residual_shape)
        found["residual_bytes"] = math.prod(choice.residual_shape)
    return ExplainedCall(
        layer,
        implementation,
        choice.executor,
        refusals=_refusals(implementation, choice),
        **found,
    )


def _residual(call, choice):
    """The parts of the residual, all of which must allow a pair."""
    mask = call.mask if choice.kernel is None else choice.lowering.residual
    parts = [] if mask is None or mask.is_full else [_short(repr(mask))]
    parts += ["padding_mask"] * call.has_padding
    parts += ["attention_mask"] * call.has_attention_mask
    parts += ["slots"] * call.has_slots
    return ", ".join(parts) or None


def _short(text):
    return text if len(text) <= 60 else f"{text[:57]}..."


def _refusals(implementation, choice):
    """Why each other executor was not taken, also if it never was asked."""
    taken = choice.executor
    kernels = [kernel.name for kernel in backend.KERNELS] or ["fused"]
    if choice.kernel is not None:
        taken = choice.kernel.name
    reason = f"{taken} comes first"
    if implementation != "auto":
        reason = f"{implementation} was asked for"
    return {
        name: choice.refusals.get(name, reason)
        for name in (*kernels, "blockwise", "dense")
        if name != taken
    }


def _runs(calls):
    """Lists of calls that differ only in the number of their layer."""
    runs, last = [], {}
    for call in calls:
        kind = re.sub(r"\d+", "#", call.layer or "")
        run = last.get(kind)
        if not run or dataclasses.replace(call, layer=run[0].layer) != run[0]:
            run = []
            runs.append(run)
            last[kind] = run
        run.append(call)
    return runs


def _label(run):
    first, last = (call.layer or "(no layer)" for call in (run[0], run[-1]))
    if len(run) == 1:
        return first
    if first == last:
        return f"{first} ({len(run)} calls)"
    return f"{first} ... {last} ({len(run)})"
