"""No option is inert: every constructor argument acts and is saved.

A table gives, for each argument, a value that is not its default, what it
must change, and what else has to be set for it to act. A function as a value
makes it anew. What an option changes:

* `"outputs"`: what the same weights give;
* `"training"`: the same in training, and only then;
* `"weights"`: which weights there are;
* `"initial"`: the values they start with;
* a function that takes both layers and the inputs and asserts something.
"""

import inspect
import json
import zlib

import keras
import numpy as np
import pytest

from tests.numerics import to_numpy

_plain = {}


def assert_complete(callable_, table):
    """Asserts that a table has every argument of a constructor."""
    parameters = inspect.signature(callable_).parameters
    skipped = ("self", "kwargs", "block_options")
    assert set(table) == {name for name in parameters if name not in skipped}


def cases(table):
    return pytest.mark.parametrize("name", list(table))


def check_option(make, base, option, name, inputs, again):
    """Asserts that one option acts and survives.

    Args:
        make: From arguments to a layer or model.
        base: Arguments that all have in common.
        option: (value, effect) or (value, effect, further arguments).
        name: Name of the argument.
        inputs: Positional arguments of the call.
        again: From a layer or model to one made of its JSON configuration.
    """
    value, effect, *extra = option
    value = value() if inspect.isfunction(value) else value
    base = {**base, **(extra[0] if extra else {})}

    def made(arguments):
        keras.utils.set_random_seed(0)
        layer = make(**arguments)
        if not layer.built:
            layer(*inputs)
        return layer

    # Its weights are set below by their paths, so one serves all options.
    key = (make, repr(base))
    if key not in _plain or effect == "initial":
        _plain[key] = made(base)
    plain, changed = _plain[key], made({**base, name: value})
    rebuilt = again(changed)
    if effect == "weights":
        assert shapes(plain) != shapes(changed)
    elif effect == "initial":
        assert shapes(plain) == shapes(changed)
        pairs = zip(plain.get_weights(), changed.get_weights(), strict=True)
        assert any((a != b).any() for a, b in pairs)
    elif effect in ("outputs", "training"):
        assert shapes(plain) == shapes(changed)
        randomize(plain)
        randomize(changed)
        same_inference = close(plain(*inputs), changed(*inputs))
        if effect == "outputs":
            assert not same_inference
        else:
            assert same_inference
            assert not close(
                plain(*inputs, training=True), changed(*inputs, training=True)
            )
    else:
        effect(plain, changed, inputs)
    assert shapes(rebuilt) == shapes(changed)
    if effect in ("outputs", "weights"):
        randomize(changed)
        randomize(rebuilt)
        assert close(rebuilt(*inputs), changed(*inputs))


def layer_again(inputs):
    """The `again` of a layer."""

    def again(layer):
        config = json.loads(json.dumps(layer.get_config()))
        rebuilt = type(layer).from_config(config)
        assert saved(rebuilt.get_config()) == saved(config)
        rebuilt(*inputs)
        return rebuilt

    return again


def saved(config):
    """The configuration, without what only tells objects apart."""
    if not isinstance(config, dict):
        return config
    return {
        key: saved(value)
        for key, value in config.items()
        if key != "shared_part"
    }


def model_again(model):
    """The `again` of a functional model."""
    config = json.loads(json.dumps(model.get_config()))
    return keras.Model.from_config(config)


def shapes(layer):
    return sorted(
        (weight.path.split("/", 1)[-1], tuple(weight.shape))
        for weight in layer.trainable_weights
    )


def randomize(layer):
    """Gives each weight values that depend on its path alone."""
    for weight in layer.trainable_weights:
        path = weight.path.split("/", 1)[-1]
        generator = np.random.default_rng(zlib.crc32(path.encode()))
        weight.assign(0.3 * generator.normal(size=weight.shape))


def close(first, second):
    return np.allclose(to_numpy(first), to_numpy(second), atol=1e-5)
