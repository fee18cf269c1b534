"""Rivals: each runs in a process of its own, in turns with the other.

So neither has the other's thread pools or compiled code, and the peak of
memory is that of one of them, taken in another fresh process. Idle rivals
must not spin: set `OMP_WAIT_POLICY=passive`, as `make bench` does.
"""

import contextlib
import multiprocessing
import os
import traceback

import keras
import numpy as np
from memory import extra_memory
from timing import Table, alternated, seconds, skipped

COLUMNS = {
    "backend": 10,
    "case": 34,
    "shape": 22,
    "dtype": 8,
    "peer": 27,
    "ours ms": 8,
    "peer ms": 8,
    "ratio": 6,
    "ours MiB": 8,
    "peer MiB": 8,
    "MiB ratio": 9,
}


# Rivals are on a GPU at the same time: none may take all of its memory.
_SHARES_A_GPU = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
}
# Chunks of malloc of their own; TensorFlow without the pool of oneDNN.
_RETURNS_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "1048576",
    "TF_ENABLE_ONEDNN_OPTS": "0",
}


class RivalError(Exception):
    """What went wrong in the process of a rival."""


class Rival:
    """A function that another process makes and runs.

    Args:
        make: A function of the script's module, called in the new process;
            returns a function without arguments whose results are finished.
        *arguments: Arguments of `make`, which can be pickled.
        backend: Keras backend of the process; None: that of this one.
    """

    def __init__(self, make, *arguments, backend: str | None = None):
        self._order = make, arguments
        self._environment = {
            "KERAS_BACKEND": backend or keras.backend.backend(),
            **_SHARES_A_GPU,
        }

    def for_memory(self):
        """The same rival, whose freed memory goes back at once."""
        rival = Rival(self._order[0], *self._order[1])
        rival._environment = {**self._environment, **_RETURNS_MEMORY}
        return rival

    def __enter__(self):
        context = multiprocessing.get_context("spawn")
        self._pipe, end = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(end, *self._order), daemon=True
        )
        before = dict(os.environ)
        os.environ.update(self._environment)
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        end.close()
        return self

    def __exit__(self, *_):
        self._process.terminate()
        self._process.join()
        self._pipe.close()

    def ready(self):
        """Waits until the function is made."""
        self._ask("ready")

    def seconds(self) -> float:
        """The wall time of one call, measured where it runs."""
        return self._ask("seconds")

    def extra_memory(self) -> int | None:
        """See `memory.extra_memory`."""
        return self._ask("extra_memory")

    def _ask(self, question):
        try:
            self._pipe.send(question)
            is_error, answer = self._pipe.recv()
        except (EOFError, OSError):
            raise RivalError("its process died, perhaps of memory") from None
        if is_error:
            raise RivalError(answer)
        return answer


def _serve(pipe, make, arguments):
    try:
        function = make(*arguments)
        answers = {
            "ready": lambda: None,
            "seconds": lambda: seconds(function),
            "extra_memory": lambda: extra_memory(function),
        }
        while True:
            question = pipe.recv()
            pipe.send((False, answers[question]()))
    except EOFError:
        pass
    except Exception as error:
        if not isinstance(error, ImportError):
            traceback.print_exc()
        pipe.send((True, f"{type(error).__name__}: {error}".splitlines()[0]))


def comparison_table() -> Table:
    """The table of most scripts; ratios above 1 are in our favour."""
    return Table(**COLUMNS)


def compare(
    table: Table,
    options,
    case: str,
    ours: Rival,
    peer_name: str,
    peer: Rival | None,
    *,
    shape: str,
    dtype: str = "float32",
):
    """Measures two rivals in turns and adds a row.

    Ratios are the peer's time, or memory, by ours; that of the times is the
    median over the rounds. A row that cannot be run is skipped with a message.

    Args:
        table: From `comparison_table`.
        options: The `Options` of the script.
        case: Name of the row, by which `--only` finds it.
        ours: Our rival.
        peer_name: What the peer is.
        peer: The other one, or None where there is none.
        shape: The shape, as text.
        dtype: The dtype.
    """
    if not options.wants(case):
        return
    cells = {
        "backend": keras.backend.backend(),
        "case": case,
        "shape": shape,
        "dtype": dtype,
        "peer": peer_name,
    }
    rivals = {"ours": ours}
    if peer is not None:
        rivals["peer"] = peer
    try:
        table.add(**cells, **measured(options, rivals))
    except RivalError as error:
        skipped(f"{case} / {peer_name}", error)


def measured(options, rivals: dict) -> dict:
    """The cells of rivals named "ours" and, if there is one, "peer"."""
    with contextlib.ExitStack() as running:
        for rival in rivals.values():
            running.enter_context(rival).ready()
        times = alternated(rivals, options.repeats)
    memory = {}
    for name, rival in rivals.items():
        with rival.for_memory() as fresh:
            memory[name] = fresh.extra_memory()
    cells = {
        f"{name} ms": f"{1000 * np.median(values):.4g}"
        for name, values in times.items()
    }
    for name, held in memory.items():
        if held is not None:
            cells[f"{name} MiB"] = f"{held / 2**20:.4g}"
    if "peer" in rivals:
        cells["ratio"] = f"{np.median(times['peer'] / times['ours']):.2f}"
        # Below a MiB the count of pages says nothing.
        if None not in memory.values() and min(memory.values()) >= 2**20:
            share = memory["peer"] / memory["ours"]
            cells["MiB ratio"] = f"{share:.2f}"
    return cells
