"""Speed of greedy generation beside KerasHub's GPT-2 of the same weights.

    KERAS_BACKEND=jax python benchmarks/decode.py [--quick]

Both models have the same shapes and random weights. Speeds are medians of
alternated runs, the ratio is the median over the rounds; tokens count where
the user asked for them, so many for each row. KerasHub knows only a common
last position: its shorter prompts run on to it.
"""

import argparse
import dataclasses

import keras
import keras_hub
import numpy as np
from timing import Table, alternated, seconds

from keras_transformer.decoding import generate
from keras_transformer.models import decoder_only

COLUMNS = {
    "backend": 10,
    "case": 44,
    "unit": 8,
    "ours": 6,
    "KerasHub": 8,
    "ratio": 6,
    "same_text": 9,
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Shapes of the models and of what they are asked for."""

    num_layers: int = 6
    model_dim: int = 512
    num_heads: int = 8
    vocabulary_size: int = 16_000
    max_length: int = 320
    prompt_length: int = 64
    uneven_lengths: tuple = (2, 20, 50, 100, 150, 150, 150, 150)
    new_tokens: int = 128
    repeats: int = 5


QUICK = Sizes(
    num_layers=2,
    model_dim=64,
    num_heads=4,
    vocabulary_size=500,
    max_length=64,
    prompt_length=8,
    uneven_lengths=(2, 5, 8, 8),
    new_tokens=16,
    repeats=2,
)


def gelu(inputs):
    """The approximation that GPT-2 uses."""
    return keras.activations.gelu(inputs, approximate=True)


def models(sizes):
    """Our model and KerasHub's with the same random weights."""
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=sizes.vocabulary_size,
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        hidden_dim=sizes.model_dim,
        intermediate_dim=4 * sizes.model_dim,
        dropout=0.0,
        max_sequence_length=sizes.max_length,
    )
    theirs = keras_hub.models.GPT2CausalLM(backbone=backbone)
    theirs.compile(sampler="greedy")
    ours = decoder_only(
        sizes.vocabulary_size,
        num_layers=sizes.num_layers,
        model_dim=sizes.model_dim,
        num_heads=sizes.num_heads,
        intermediate_dim=4 * sizes.model_dim,
        max_length=sizes.max_length,
        position="learned",
        activation=gelu,
    )
    embedding = ours.get_layer("embedding")
    embedding.position.set_weights(backbone.position_embedding.get_weights())
    (table,) = backbone.token_embedding.get_weights()
    for weight in embedding.weights:
        if tuple(weight.shape) == table.shape:
            weight.assign(table)
    for index, block in enumerate(backbone.transformer_layers):
        _copy(ours.get_layer(f"decoder_{index}"), block)
    _copy(ours.get_layer("final_norm"), backbone.layer_norm)
    return ours, theirs


def _copy(ours, theirs):
    for weight, value in zip(ours.weights, theirs.get_weights(), strict=True):
        # KerasHub's attention kernels have an axis of heads.
        weight.assign(np.reshape(value, weight.shape))


def random_prompts(sizes, lengths):
    """Rows of random tokens."""
    generator = np.random.default_rng(0)
    return [
        generator.integers(1, sizes.vocabulary_size, length).tolist()
        for length in lengths
    ]


def our_run(model, prompts, new_tokens):
    """A function that generates with our model."""
    return lambda: generate(model, prompts, max_new_tokens=new_tokens).tokens


def their_run(model, prompts, new_tokens):
    """A function that generates with KerasHub's model."""
    longest = max(map(len, prompts)) + new_tokens
    tokens = np.zeros((len(prompts), longest), "int32")
    is_prompt = np.zeros((len(prompts), longest), "int32")
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        is_prompt[row, : len(prompt)] = 1
    inputs = {"token_ids": tokens, "padding_mask": is_prompt}

    def run():
        outputs = model.generate(dict(inputs), stop_token_ids=None)
        return keras.ops.convert_to_numpy(outputs["token_ids"])

    return run


def share_of_same_tokens(ours, theirs, prompts, new_tokens) -> float:
    """How many of the new tokens are the same in both texts."""
    same = [
        ours[row, len(prompt) + i] == theirs[row, len(prompt) + i]
        for row, prompt in enumerate(prompts)
        for i in range(new_tokens)
    ]
    return float(np.mean(same))


def main(sizes):
    """Runs all cases and prints the table."""
    backend = keras.backend.backend()
    ours, theirs = models(sizes)
    new, table = sizes.new_tokens, Table(**COLUMNS)

    def runs(lengths):
        prompts = random_prompts(sizes, lengths)
        return prompts, {
            "ours": our_run(ours, prompts, new),
            "theirs": their_run(theirs, prompts, new),
        }

    for what, length in (
        ("first call", sizes.prompt_length),
        ("then, of a length nearby", sizes.prompt_length - 3),
        ("then, of a length beyond", sizes.prompt_length + 3),
    ):
        _, functions = runs([length])
        mine, peer = (seconds(f) for f in functions.values())
        table.add(
            backend=backend,
            case=f"{what}: {length} + {new}",
            unit="s",
            ours=f"{mine:.1f}",
            KerasHub=f"{peer:.1f}",
            ratio=f"{peer / mine:.2f}",
        )

    longest = max(sizes.uneven_lengths)
    batch = len(sizes.uneven_lengths)
    uneven = ", ".join(map(str, sizes.uneven_lengths))
    for case, lengths in (
        (f"{sizes.prompt_length}", [sizes.prompt_length]),
        (f"{batch} x {longest}", [longest] * batch),
        (uneven, sizes.uneven_lengths),
    ):
        prompts, functions = runs(lengths)
        texts = [function() for function in functions.values()]
        same = share_of_same_tokens(*texts, prompts, new)
        times = alternated(functions, sizes.repeats, warm_up=0)
        count = len(prompts) * new
        table.add(
            backend=backend,
            case=f"{case} + {new}",
            unit="tokens/s",
            ours=f"{count / np.median(times['ours']):.0f}",
            KerasHub=f"{count / np.median(times['theirs']):.0f}",
            ratio=f"{np.median(times['theirs'] / times['ours']):.2f}",
            same_text=f"{same:.0%}",
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes, to see it run"
    )
    main(QUICK if parser.parse_args().quick else Sizes())
