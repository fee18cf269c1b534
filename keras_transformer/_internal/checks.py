"""Argument checks with one wording for every error.

Each check takes one keyword argument, whose name is the argument's name, so
that the message and the code cannot disagree.
"""

import math
import numbers


def fail(expected: str, name: str, value, cure: str = ""):
    """Raises the uniform `ValueError`.

    Args:
        expected: What the argument must be, as in "a positive integer".
        name: The argument's name.
        value: What came.
        cure: What to do, when that is not obvious.
    """
    raise ValueError(
        f"`{name}` must be {expected}. Received: {name}={value!r}."
        + (f" {cure}" if cure else "")
    )


def is_integer(value) -> bool:
    """Whether `value` is an integer of Python or NumPy, not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_real(value):
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def positive_int(optional=False, **argument):
    """Requires an integer of at least 1; `optional` also takes None."""
    ((name, value),) = argument.items()
    if optional and value is None:
        return
    if not is_integer(value) or value < 1:
        fail("a positive integer" + " or None" * optional, name, value)


def non_negative_int(**argument):
    """Requires an integer of at least 0."""
    ((name, value),) = argument.items()
    if not is_integer(value) or value < 0:
        fail("an integer of at least 0", name, value)


def positive(optional=False, **argument):
    """Requires a finite number above 0; `optional` also takes None."""
    ((name, value),) = argument.items()
    if optional and value is None:
        return
    if not _is_real(value) or not 0 < value < math.inf:
        fail("a finite number above 0" + " or None" * optional, name, value)


def rate(**argument):
    """Requires a number in [0, 1), as dropout rates are."""
    ((name, value),) = argument.items()
    if not _is_real(value) or not 0 <= value < 1:
        fail("a rate in [0, 1)", name, value)


def boolean(**argument):
    """Requires True or False."""
    ((name, value),) = argument.items()
    if not isinstance(value, bool):
        fail("True or False", name, value)


def one_of(choices, **argument):
    """Requires one of `choices`."""
    ((name, value),) = argument.items()
    if value not in choices:
        fail(f"one of {list(choices)}", name, value)
