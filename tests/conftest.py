"""Set-up of every test process. One process runs one backend."""

import os
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Threads that wait by spinning slow down everything on busy cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# JAX compiles each shape once, also across processes.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache/jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import keras
import pytest


@pytest.fixture(autouse=True)
def _fixed_seed():
    keras.utils.set_random_seed(0)


def pytest_report_header():
    return f"keras backend: {keras.backend.backend()}"
