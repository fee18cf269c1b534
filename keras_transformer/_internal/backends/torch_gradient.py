"""Functions of PyTorch with a gradient of their own."""

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(context, forward, backward, *tensors):
        output, saved = forward(*tensors)
        leaves, context.structure = tree_flatten(saved)
        context.save_for_backward(*leaves)
        context.backward_function = backward
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context, gradient):
        saved = tree_unflatten(context.saved_tensors, context.structure)
        return None, None, *context.backward_function(saved, gradient)


def with_gradient(forward, backward, *tensors):
    """The outputs of `forward(*tensors)`, with a gradient of its own.

    Args:
        forward: Takes the tensors; returns the output and what `backward`
            needs, any structure of tensors.
        backward: Takes the second of these and the gradient of the output;
            returns one gradient for each tensor, None where there is none.
        *tensors: All tensors that the two functions read: a gradient with
            respect to one that is closed over would be lost.
    """
    return _WithGradient.apply(forward, backward, *tensors)
