"""The fused kernels of a CUDA GPU beside the dense executor.

    KERAS_BACKEND=torch python benchmarks/gpu.py [--quick] [--only TEXT]

For each mask and dtype: the kernel's outputs and gradients against the dense
executor in float32, as the largest difference over the largest number; then
both in turns, forward and backward, in the same dtype. Where no kernel takes
the call, the reasons go to the standard error, and the row is that of what
`implementation="auto"` takes instead. Ratios above 1 are in favour of the
kernel.
"""

import dataclasses
import os
import sys

from rivals import Rival, RivalError, measured
from timing import Table, options, skipped

# Rivals run on the same GPU as this process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

import attention
import execution
import keras
import numpy as np
from keras import ops

from keras_transformer import MultiHeadAttention, explain

COLUMNS = {
    "backend": 10,
    "mask": 24,
    "length": 6,
    "dtype": 8,
    "executor": 28,
    "outputs": 8,
    "gradients": 9,
    "ours ms": 8,
    "peer ms": 8,
    "ratio": 6,
    "ours MiB": 8,
    "peer MiB": 8,
    "MiB ratio": 9,
}


def has_gpu() -> bool:
    """Whether the backend sees a CUDA GPU."""
    match execution.BACKEND:
        case "jax":
            return execution.jax.default_backend() == "gpu"
        case "tensorflow":
            return bool(execution.tf.config.list_physical_devices("GPU"))
        case "torch":
            return execution.torch.cuda.is_available()


def results(case, implementation):
    """Outputs and gradients as float64 arrays."""
    outputs, gradients = attention.ours(case, implementation)()
    return [
        ops.convert_to_numpy(ops.cast(tensor, "float32")).astype("float64")
        for tensor in (outputs, *gradients)
    ]


def largest_errors(case, implementation):
    """Largest differences from the dense executor in float32."""
    exact = dataclasses.replace(case, dtype="float32")
    expected = results(exact, "dense")
    received = results(case, implementation)
    outputs, *gradients = (
        np.abs(ours - theirs).max() / np.abs(theirs).max()
        for ours, theirs in zip(received, expected, strict=True)
    )
    return outputs, max(gradients)


def executor_of(case):
    """What to ask for, and the executor or kernel that this gives."""
    options = {
        "num_heads": case.heads,
        "key_dim": case.dim,
        "num_key_value_heads": case.key_value_heads,
        "mask": case.mask,
        "dtype": case.dtype,
    }
    shapes = {"query": (1, case.length, case.heads * case.dim)}
    if case.documents:
        shapes["segment_ids"] = (1, case.length)
    for asked in ("fused", "auto"):
        layer = MultiHeadAttention(**options, implementation=asked)
        layer.build(shapes["query"])
        try:
            (call,) = explain(layer, shapes, print_fn=lambda text: None)
        except ValueError as error:
            skipped(f"{case}, {asked}", error)
            continue
        return asked, call.kernel or call.executor
    return "auto", "unknown"


def main(chosen):
    """Prints the table."""
    if not has_gpu():
        sys.exit(
            f"benchmarks/gpu.py needs a CUDA GPU that {execution.BACKEND} can "
            "see. Received: none. Install the backend's CUDA build, or run "
            "benchmarks/attention.py for the CPU."
        )
    table = Table(**COLUMNS)
    length, window = chosen.size(4096, 256), chosen.size(512, 32)
    for name, rules in (
        ("causal", {}),
        ("causal, 8 heads on 2", {"key_value_heads": 2}),
        (f"causal, window {window}", {"window": window}),
        ("causal, 8 documents", {"documents": 8}),
    ):
        for dtype in ("bfloat16", "float32"):
            if not chosen.wants(name):
                continue
            case = attention.Case(length, dtype=dtype, **rules)
            asked, executor = executor_of(case)
            outputs, gradients = largest_errors(case, asked)
            cells = {
                "backend": keras.backend.backend(),
                "mask": name,
                "length": str(length),
                "dtype": dtype,
                "executor": executor,
                "outputs": f"{outputs:.1e}",
                "gradients": f"{gradients:.1e}",
            }
            rivals = {
                "ours": Rival(attention.ours, case, asked),
                "peer": Rival(attention.ours, case, "dense"),
            }
            try:
                cells |= measured(chosen, rivals)
            except RivalError as error:
                skipped(f"{name}, {dtype}: times", error)
            table.add(**cells)


if __name__ == "__main__":
    main(options(__doc__, repeats=20))
