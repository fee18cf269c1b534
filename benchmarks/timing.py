"""Timing of rivals under the same conditions."""

import argparse
import dataclasses
import sys
import time

import numpy as np


def seconds(function) -> float:
    """The wall time of one call; `function` must return finished results."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def alternated(functions: dict, repeats: int, warm_up: int = 1) -> dict:
    """Times functions in turns, so that a slow spell hits all of them.

    Args:
        functions: Name to a function without arguments, or to a `Rival`.
        repeats: Number of timed rounds.
        warm_up: Number of rounds before them.

    Returns:
        Name to the seconds of each round.
    """
    times = {name: [] for name in functions}
    for round_ in range(warm_up + repeats):
        for name, function in functions.items():
            # A rival measures in its own process, without the way to it.
            measure = getattr(
                function, "seconds", lambda f=function: seconds(f)
            )
            elapsed = measure()
            if round_ >= warm_up:
                times[name].append(elapsed)
    return {name: np.array(values) for name, values in times.items()}


class Table:
    """A Markdown table that prints each row as soon as it is known."""

    def __init__(self, **columns):
        """Prints the header.

        Args:
            **columns: Name of a column to its width.
        """
        self._widths = columns
        self.add(**{name: name for name in columns})
        rule = "|".join("-" * (width + 2) for width in columns.values())
        print(f"|{rule}|", flush=True)

    def add(self, **cells):
        """Prints a row of strings; columns that are not given stay empty."""
        row = [cells.get(n, "").ljust(w) for n, w in self._widths.items()]
        print(f"| {' | '.join(row)} |", flush=True)


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user asked for on the command line."""

    quick: bool
    only: str
    repeats: int

    def wants(self, case: str) -> bool:
        """Whether a case is to be run."""
        return self.only in case

    def size(self, full: int, quick: int) -> int:
        """One of two sizes."""
        return quick if self.quick else full


def options(description: str, repeats: int = 5) -> Options:
    """Reads the command line of a script.

    Args:
        description: The script's docstring, of which the first line is shown.
        repeats: Timed rounds unless the user says another number.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes, to see it run"
    )
    parser.add_argument(
        "--only", default="", help="run the cases whose name contains this"
    )
    parser.add_argument("--repeats", type=int, help="timed rounds")
    chosen = parser.parse_args()
    if chosen.repeats is None:
        chosen.repeats = 1 if chosen.quick else repeats
    return Options(chosen.quick, chosen.only, chosen.repeats)


def skipped(case: str, reason):
    """Says on the standard error, beside the table, what is not measured."""
    print(f"skipped: {case}: {reason}", file=sys.stderr, flush=True)
