"""Checks of the settings of `RoPEScaling`."""

import numpy as np

from keras_transformer._internal import checks


def checked_settings(kind, settings, defaults):
    """The complete settings of a kind, as plain hashable values.

    Args:
        kind: A kind of `RoPEScaling`.
        settings: Those given, by name.
        defaults: All names of the kind; `...` marks those without default.
    """
    for name, value in settings.items():
        if name not in defaults:
            names = list(defaults)
            checks.fail(f"a setting of {kind!r}, one of {names}", name, value)
    complete = {}
    for name, default in defaults.items():
        value = settings.get(name, default)
        if value is ...:
            checks.fail(f"given for {kind!r}", name, None)
        complete[name] = _checked_setting(name, value, default)
    if kind in _CHECKS:
        _CHECKS[kind](complete)
    return complete


def _checked_setting(name, value, default):
    if default is None and value is None:
        return None
    if name in ("short_factor", "long_factor"):
        if not isinstance(value, list | tuple | np.ndarray) or not len(value):
            checks.fail("a list of numbers, one a pair", name, value)
        for number in value:
            checks.positive(**{name: number})
        return tuple(float(number) for number in value)
    if name == "truncate":
        checks.boolean(truncate=value)
        return value
    if name in ("original_max_length", "max_length"):
        checks.positive_int(**{name: value})
        return int(value)
    checks.positive(**{name: value})
    return float(value)


def _check_yarn(settings):
    mscales = [settings["mscale"], settings["mscale_all_dim"]]
    if mscales.count(None) == 1:
        checks.fail(
            "given together with `mscale_all_dim`, or neither",
            "mscale",
            settings["mscale"],
        )
    if settings["attention_factor"] and mscales[0]:
        checks.fail(
            "None where `mscale` is given, which it would replace",
            "attention_factor",
            settings["attention_factor"],
        )
    if settings["beta_fast"] <= settings["beta_slow"]:
        checks.fail(
            f"above `beta_slow`, {settings['beta_slow']}",
            "beta_fast",
            settings["beta_fast"],
        )


def _check_llama3(settings):
    low = settings["low_frequency_factor"]
    high = settings["high_frequency_factor"]
    if high <= low:
        checks.fail(
            f"above `low_frequency_factor`, {low}",
            "high_frequency_factor",
            high,
        )


def _check_longrope(settings):
    names = ("factor", "max_length", "attention_factor")
    given = [name for name in names if settings[name] is not None]
    if len(given) != 1:
        checks.fail(
            "given, or else `max_length` or `attention_factor`: exactly one",
            "factor",
            settings["factor"],
            f"Given are: {given}.",
        )
    if len(settings["short_factor"]) != len(settings["long_factor"]):
        checks.fail(
            f"as long as `short_factor`, {len(settings['short_factor'])}",
            "long_factor",
            settings["long_factor"],
        )


_CHECKS = {
    "yarn": _check_yarn,
    "llama3": _check_llama3,
    "longrope": _check_longrope,
}
