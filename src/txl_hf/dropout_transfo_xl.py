"""Dropout behind a ReLU, which keeps of both what the next layer keeps anyway: the result."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .linear_transfo_xl import is_wrapped, takes_part_plainly

__all__ = ["relu_and_drop"]


def relu_and_drop(states: Tensor, dropout: nn.Module) -> Tensor:
    """`dropout(states.relu())`, for states (…) of any shape.

    Where it is trained, PyTorch would keep the result of the ReLU and what was dropped, and read both backward. But
    the result is 0 exactly where either of them has made it so, and there the gradient is 0.
    """
    drops = type(dropout) is nn.Dropout and dropout.training and 0 < dropout.p < 1
    if drops and not is_wrapped(dropout) and takes_part_plainly(states):
        return _ReluAndDrop.apply(states, dropout.p)
    return dropout(states.relu())


class _ReluAndDrop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, p):
        result = F.dropout(states.relu(), p, training=True)
        ctx.save_for_backward(result)
        ctx.scale = 1 / (1 - p)
        return result

    @staticmethod
    def backward(ctx, grad):
        (result,) = ctx.saved_tensors
        return torch.ops.aten.native_dropout_backward(grad, result != 0, ctx.scale), None
