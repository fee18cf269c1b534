"""Timing of rivals under the same conditions."""

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
        functions: Name to a function without arguments.
        repeats: Number of timed rounds.
        warm_up: Number of rounds before them.

    Returns:
        Name to the seconds of each round.
    """
    times = {name: [] for name in functions}
    for round_ in range(warm_up + repeats):
        for name, function in functions.items():
            elapsed = seconds(function)
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
