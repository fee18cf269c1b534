"""The one place that touches a backend.

`backend` is the module for the backend that Keras runs on. The modules have
the same names: `KERNELS` (and `NO_KERNELS`, the reason, where there are none),
`device_of`, `is_concrete`, `current_trace`, `traced`, `with_gradient`,
`random_halves`, `BLOCKS_FROM`, `TILE_SIZES`, `write_token`, `compiled`,
`for_one_run`, `while_loop`, `TAKES_WEIGHTS`, `RUNS_STEP_BY_STEP` and
`no_gradients`. Where loops are compiled there is `pulled_back`, elsewhere
`attention_by_rows`.
"""

import importlib

import keras

_SUPPORTED = ("jax", "tensorflow", "torch")

if keras.backend.backend() not in _SUPPORTED:
    raise ImportError(
        f"keras_transformer runs on the Keras backends {_SUPPORTED}. Received: "
        f"KERAS_BACKEND={keras.backend.backend()!r}. Set KERAS_BACKEND to one "
        "of them before the first import of keras."
    )

backend = importlib.import_module(
    f"keras_transformer._internal.backends.{keras.backend.backend()}"
)
