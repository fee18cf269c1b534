"""What one backend computes from saved models; see `test_backends.py`.

`python -m tests.parity.one_backend FOLDER` opens the models in `FOLDER` and
writes what it finds to `FOLDER/<backend>.npz`.
"""

import pathlib
import sys

import keras
import numpy as np

from keras_transformer.decoding import Greedy, Sample, generate
from tests.numerics import to_numpy

TOKENS = np.random.default_rng(1).integers(1, 29, (3, 7), "int32")
SOURCES = np.random.default_rng(2).integers(1, 29, (3, 5), "int32")
IS_REAL = np.arange(5) < np.array([[5], [3], [4]])
INPUTS = {
    "decoder": TOKENS,
    "translator": {
        "encoder_token_ids": SOURCES,
        "encoder_padding_mask": IS_REAL,
        "decoder_token_ids": TOKENS,
    },
    "classifier": {"token_ids": SOURCES, "padding_mask": IS_REAL},
}
PROMPTS = {
    "decoder": ([[7, 3, 11], [5], [2, 2, 9, 4, 1, 6]], {}),
    "translator": (
        {"encoder_token_ids": [[3, 8, 1, 6], [9, 4], [5]]},
        {"start_token": 2},
    ),
}


def measured(folder):
    """Outputs, gradients and generated tokens, as a dict of arrays."""
    results = {}
    for name, inputs in INPUTS.items():
        model = keras.models.load_model(folder / f"{name}.keras")
        outputs = model.predict(inputs, verbose=0)
        results[f"{name}/outputs"] = outputs
        cotangent = np.random.default_rng(3).normal(size=outputs.shape)
        gradients = weight_gradients(model, inputs, cotangent.astype("float32"))
        for weight, gradient in zip(
            model.trainable_weights, gradients, strict=True
        ):
            results[f"{name}/gradient of {weight.path}"] = gradient
    for name, (prompts, options) in PROMPTS.items():
        model = keras.models.load_model(folder / f"{name}.keras")
        for decoder in (Greedy(), Sample(0.8, top_k=9)):
            result = generate(
                model, prompts, max_new_tokens=8, decoder=decoder, **options
            )
            kind = type(decoder).__name__
            results[f"{name}/tokens of {kind}"] = result.tokens
    return results


def weight_gradients(model, inputs, cotangent):
    """Gradients of `sum(outputs * cotangent)` for the trainable weights."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        state = [weight.value for weight in model.non_trainable_variables]

        def loss(weights):
            outputs, _ = model.stateless_call(weights, state, inputs)
            return (outputs * cotangent).sum()

        weights = [weight.value for weight in model.trainable_variables]
        gradients = jax.jit(jax.grad(loss))(weights)
    elif backend == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(inputs) * cotangent)
        weights = [weight.value for weight in model.trainable_variables]
        gradients = tape.gradient(loss, weights)
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
    else:
        import torch

        outputs = model(keras.tree.map_structure(torch.as_tensor, inputs))
        (outputs * torch.as_tensor(cotangent)).sum().backward()
        gradients = [w.value.grad for w in model.trainable_variables]
    return [to_numpy(gradient) for gradient in gradients]


if __name__ == "__main__":
    target = pathlib.Path(sys.argv[1])
    np.savez(target / keras.backend.backend(), **measured(target))
