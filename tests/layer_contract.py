"""The promises that every public layer keeps, checked in one place."""

import inspect
import json

import keras
import numpy as np
from keras import ops

from tests.numerics import randomize_weights, to_numpy


def check_layer(layer_class, init_kwargs, inputs, *, output_shape, num_weights):
    """Asserts configuration, shapes, weights, dtype policy and saving.

    Args:
        layer_class: The layer under test.
        init_kwargs: Constructor arguments.
        inputs: Name to array, as passed to the layer.
        output_shape: Expected shape of the output.
        num_weights: Expected number of trainable weights.
    """
    layer = layer_class(**init_kwargs)
    _check_config(layer, layer_class)
    output = layer(**inputs)
    assert tuple(ops.shape(output)) == tuple(output_shape)
    assert len(layer.trainable_weights) == num_weights
    _check_symbolic(layer_class, init_kwargs, inputs, output)
    _check_half_precision(layer_class, init_kwargs, inputs)
    _check_rebuilt(layer, layer_class, inputs)


def _check_config(layer, layer_class):
    config = layer.get_config()
    parameters = inspect.signature(layer_class.__init__).parameters
    names = {name for name in parameters if name not in ("self", "kwargs")}
    assert names <= set(config), f"not in get_config: {names - set(config)}"
    assert all(hasattr(layer, name) for name in names)
    # Through JSON, as a saved file goes: tuples come back as lists.
    through_json = json.loads(json.dumps(config))
    again = layer_class.from_config(through_json).get_config()
    assert json.dumps(again, sort_keys=True) == json.dumps(
        config, sort_keys=True
    )


def _check_symbolic(layer_class, init_kwargs, inputs, output):
    symbolic = {}
    for name, value in inputs.items():
        # None batch and, where there is one, None length.
        shape = (None,) * min(2, value.ndim - 1) + value.shape[2:]
        if value.ndim < 3:
            shape = (None,) * value.ndim
        symbolic[name] = keras.KerasTensor(shape, dtype=str(value.dtype))
    result = layer_class(**init_kwargs)(**symbolic)
    assert len(result.shape) == output.ndim
    for symbolic_size, size in zip(result.shape, output.shape, strict=True):
        assert symbolic_size in (None, size)
    assert result.shape[-1] == output.shape[-1]
    assert result.dtype == keras.backend.standardize_dtype(output.dtype)


def _check_half_precision(layer_class, init_kwargs, inputs):
    layer = layer_class(**init_kwargs, dtype="mixed_bfloat16")
    output = layer(**inputs)
    assert keras.backend.standardize_dtype(output.dtype) == "bfloat16"
    assert np.isfinite(to_numpy(output)).all()
    assert {w.dtype for w in layer.weights if "float" in w.dtype} <= {"float32"}


def _check_rebuilt(layer, layer_class, inputs):
    randomize_weights(layer)
    rebuilt = layer_class.from_config(layer.get_config())
    rebuilt.build_from_config(layer.get_build_config())
    assert [weight.path.split("/", 1)[-1] for weight in rebuilt.weights] == [
        weight.path.split("/", 1)[-1] for weight in layer.weights
    ]
    rebuilt.set_weights(layer.get_weights())
    np.testing.assert_allclose(
        to_numpy(rebuilt(**inputs)), to_numpy(layer(**inputs)), rtol=1e-6
    )
