"""Loss of a language model's vectors, forward and backward.

    KERAS_BACKEND=jax python benchmarks/training.py [--quick]

`training.linear_crossentropy`, which never holds the logits, beside logits
and Keras's sparse cross-entropy, both with the mean that training takes.
Gradients are those of the vectors and of the table. Then a whole training
step of one model, with and without `LinearCrossentropyModel`. Ratios above 1
are in our favour.
"""

import blocks
import execution
import keras
import numpy as np
from keras import ops
from rivals import Rival, compare, comparison_table
from timing import options

from keras_transformer import training


def _tensors(batch, length, width, vocabulary, dtype):
    generator = np.random.default_rng(0)
    targets = generator.integers(vocabulary, size=(batch, length))
    return (
        execution.random_tensor((batch, length, width), dtype),
        execution.random_tensor((vocabulary, width), dtype, seed=1),
        ops.convert_to_tensor(targets.astype("int32")),
    )


def ours(*shape_and_dtype):
    """Without the logits."""

    def loss(vectors, table, targets):
        return training.linear_crossentropy(
            vectors,
            table,
            targets,
            transposed=True,
            reduction="mean_with_sample_weight",
        )

    tensors = _tensors(*shape_and_dtype)
    return execution.gradient_runner(loss, 2, None, *tensors)


def dense(*shape_and_dtype):
    """With the logits."""

    def loss(vectors, table, targets):
        logits = ops.matmul(vectors, ops.transpose(table))
        losses = ops.sparse_categorical_crossentropy(
            targets, ops.cast(logits, "float32"), from_logits=True
        )
        return ops.mean(losses)

    tensors = _tensors(*shape_and_dtype)
    return execution.gradient_runner(loss, 2, None, *tensors)


def model_step(sizes):
    """A training step of our model, without its logits."""
    model = training.LinearCrossentropyModel(blocks.our_model(sizes))
    model.compile(
        optimizer=keras.optimizers.Adam(1e-4),
        jit_compile=keras.backend.backend() != "torch",
    )
    return blocks.batch_step(model, sizes)


def main(chosen):
    """Prints the table."""
    table = comparison_table()
    batch, length = chosen.size(8, 2), chosen.size(512, 16)
    width, vocabulary = chosen.size(512, 16), chosen.size(32_000, 100)
    for dtype in ("float32", "bfloat16"):
        arguments = batch, length, width, vocabulary, dtype
        compare(
            table,
            chosen,
            f"loss, {vocabulary} tokens",
            Rival(ours, *arguments),
            "logits and their loss",
            Rival(dense, *arguments),
            shape=f"{batch} x {length} x {width}",
            dtype=dtype,
        )
    sizes = blocks.QUICK if chosen.quick else blocks.Sizes()
    compare(
        table,
        chosen,
        "training step",
        Rival(model_step, sizes),
        "ours, logits and their loss",
        Rival(blocks.ours, sizes),
        shape=sizes.shape,
    )


if __name__ == "__main__":
    main(options(__doc__))
