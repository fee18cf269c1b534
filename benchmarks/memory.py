"""How much memory a call needs at its peak."""

import contextlib
import ctypes
import gc
import pathlib
import re

import keras

_PROCESS = pathlib.Path("/proc/self")


def extra_memory(function) -> int | None:
    """Bytes at the peak of a call, beyond what was held before it.

    On a GPU the backend's own counters are read; JAX's peak is that of the
    whole process, which therefore should do nothing else. On a CPU it is the
    resident memory of the process as Linux counts it; None elsewhere.

    Args:
        function: Returns finished results. It is called twice: what it keeps,
            compiled code for one, counts as held.
    """
    counters = _gpu_counters() or _resident_counters()
    if counters is None:
        return None
    in_use, reset_peak, peak = counters
    function()
    gc.collect()
    reset_peak()
    before = in_use()
    function()
    return max(0, peak() - before)


def _resident_counters():
    def status(name):
        lines = (_PROCESS / "status").read_text()
        return 1024 * int(re.search(rf"{name}:\s+(\d+)", lines)[1])

    def reset_peak():
        # Freed memory that malloc keeps would hide what the call needs.
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        (_PROCESS / "clear_refs").write_text("5")

    try:
        reset_peak()
    except OSError:
        return None
    return lambda: status("VmRSS"), reset_peak, lambda: status("VmHWM")


def _gpu_counters():
    match keras.backend.backend():
        case "jax":
            import jax

            device = jax.devices()[0]
            if device.platform != "gpu":
                return None
            return (
                lambda: device.memory_stats()["bytes_in_use"],
                lambda: None,
                lambda: device.memory_stats()["peak_bytes_in_use"],
            )
        case "tensorflow":
            import tensorflow as tf

            if not tf.config.list_physical_devices("GPU"):
                return None
            config = tf.config.experimental
            return (
                lambda: config.get_memory_info("GPU:0")["current"],
                lambda: config.reset_memory_stats("GPU:0"),
                lambda: config.get_memory_info("GPU:0")["peak"],
            )
        case "torch":
            import torch

            if not torch.cuda.is_available():
                return None
            return (
                torch.cuda.memory_allocated,
                torch.cuda.reset_peak_memory_stats,
                torch.cuda.max_memory_allocated,
            )
