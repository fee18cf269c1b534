"""Top-k routing of tokens to experts, and the loss that balances it.

Letters: `n` tokens, `k` experts a token, `e` experts, `d` model features.
"""

from keras import ops


def route(logits, top_k: int, normalize_top_k: bool):
    """Chooses the experts of each token and their weights.

    Args:
        logits: `(n, e)`, float32.
        top_k: Experts a token.
        normalize_top_k: Whether the weights of a token sum to 1; otherwise
            they are the probabilities among all experts.

    Returns:
        A tuple of the weights `(n, k)`, the expert ids `(n, k)` and the
        probabilities `(n, e)`.
    """
    probabilities = ops.softmax(logits, axis=-1)
    # A stable sort, not `top_k`: PyTorch's breaks ties at random, and tokens
    # of zeros tie, so that the backends would disagree.
    expert_ids = ops.argsort(-logits, axis=-1)[:, :top_k]
    expert_ids = ops.cast(expert_ids, "int32")
    weights = ops.take_along_axis(probabilities, expert_ids, axis=-1)
    if normalize_top_k:
        weights = weights / ops.sum(weights, axis=-1, keepdims=True)
    return weights, expert_ids, probabilities


def load_balancing_loss(probabilities, expert_ids, padding_mask=None):
    """The product of each expert's share of tokens and mean probability.

    `num_experts * sum_e(share_e * probability_e)`, where the share counts each
    of a token's experts. It is `top_k` when the experts are used evenly.

    Reference: [Fedus et al., 2021](https://arxiv.org/abs/2101.03961),
    equations 4 to 6, and its extension to `top_k` experts as in Mixtral.

    Args:
        probabilities: `(n, e)`.
        expert_ids: `(n, k)`.
        padding_mask: `(n,)`, True for real tokens. The others do not count.

    Returns:
        A scalar.
    """
    num_experts = probabilities.shape[-1]
    chosen = ops.sum(
        ops.one_hot(expert_ids, num_experts, dtype=probabilities.dtype), axis=1
    )
    if padding_mask is None:
        share = ops.mean(chosen, axis=0)
        probability = ops.mean(probabilities, axis=0)
    else:
        real = ops.cast(padding_mask, probabilities.dtype)[:, None]
        num_real = ops.maximum(ops.sum(real), 1.0)
        share = ops.sum(real * chosen, axis=0) / num_real
        # `where`, since 0 times a padded token's NaN would be NaN.
        counted = ops.where(real > 0, probabilities, 0.0)
        probability = ops.sum(counted, axis=0) / num_real
    return num_experts * ops.sum(share * probability)


def group_by_expert(expert_ids, num_experts: int):
    """Lays out the tokens in blocks, each of which has one expert.

    No token is dropped and shapes do not depend on the routing: the number of
    blocks, below `3 * num_experts`, suffices for the worst distribution. The
    rows are at most half as many again as the `n * k` needed, where computing
    all experts for all tokens takes `n * e`.

    Args:
        expert_ids: `(n, k)`.
        num_experts: Number of experts.

    Returns:
        A tuple of `tokens`, `(num_blocks, block_size)`: the token of each row,
        counted from 1, and 0 for an empty row; `experts`, `(num_blocks,)`;
        and `rows`, `(n, k)`: where in the flattened blocks each choice is.
    """
    num_tokens, top_k = ops.shape(expert_ids)
    num_choices = num_tokens * top_k
    # An expert leaves at most one block partly filled, so blocks of half the
    # mean load waste at most a third of the rows.
    block_size = num_choices // (2 * num_experts) + 1
    num_blocks = (num_choices + num_experts * (block_size - 1)) // block_size

    choices = ops.reshape(expert_ids, (-1,))
    is_of_expert = ops.one_hot(choices, num_experts, dtype="int32")
    counts = ops.cumsum(is_of_expert, axis=0)
    place_in_expert = ops.sum(is_of_expert * counts, axis=1) - 1
    loads = ops.sum(is_of_expert, axis=0)
    num_blocks_of = (loads + block_size - 1) // block_size
    last_block = ops.cumsum(num_blocks_of)
    first_block = last_block - num_blocks_of
    rows = ops.take(first_block, choices) * block_size + place_in_expert

    choice_tokens = ops.arange(num_choices, dtype="int32") // top_k + 1
    tokens = ops.scatter(
        rows[:, None], choice_tokens, (num_blocks * block_size,)
    )
    blocks = ops.arange(num_blocks, dtype="int32")
    experts = ops.sum(
        ops.cast(blocks[:, None] >= last_block[None, :], "int32"), axis=1
    )
    # Blocks after the last used one have empty rows; any expert serves them.
    experts = ops.minimum(experts, num_experts - 1)
    return (
        ops.reshape(tokens, (num_blocks, block_size)),
        experts,
        ops.reshape(rows, (num_tokens, top_k)),
    )
