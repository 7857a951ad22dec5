"""Dropout on CPU, where drawing takes longer than dropping: four draws out of one random number.

PyTorch draws each element's fate by itself, one after the other, which can be a fifth of a training step; a third of
that is left. And behind a ReLU nothing is kept but what the next layer keeps anyway: the result.
"""

from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .linear_transfo_xl import is_plain, is_wrapped

__all__ = ["does_nothing", "draw_and_drop", "drop", "relu_and_drop", "scale_of"]

# A draw has 16 bits, so that a probability is met to 2**-16.
DRAWS = 2**16


def drop(states: Tensor, dropout: nn.Module) -> Tensor:
    """`dropout(states)`, for states (…) of any shape. It draws from PyTorch's generator, but not as PyTorch does."""
    if not dropout.training and _is_ours(dropout):
        return states
    if _is_drawn_here(states, dropout) and states.is_cpu:
        return _Drop.apply(states, dropout.p)
    return dropout(states)


def does_nothing(dropout: nn.Module) -> bool:
    """Whether it hands on what it is given, as is known of PyTorch's own. Hooks do not count: accelerate's only move
    tensors."""
    return type(dropout) is nn.Identity or (type(dropout) is nn.Dropout and not dropout.training)


def relu_and_drop(states: Tensor, dropout: nn.Module) -> Tensor:
    """`drop(states.relu(), dropout)`, for states (…) of any shape.

    Where it is trained, PyTorch would keep the result of the ReLU and what was dropped, and read both backward. But
    the result is 0 exactly where either of them has made it so, and there the gradient is 0.
    """
    if _is_drawn_here(states, dropout):
        return _ReluAndDrop.apply(states, dropout.p)
    if torch.compiler.is_compiling() and _drops(dropout):
        # One mask for the backward pass of a graph, not one of each; NaN is not below 0.
        kept = (torch.rand(states.shape, device=states.device) >= dropout.p) & ~(states <= 0)
        return torch.where(kept, states / (1 - dropout.p), 0)
    return drop(states.relu(), dropout)


def _is_drawn_here(states: Tensor, dropout: nn.Module) -> bool:
    # Without a gradient too: a checkpoint draws first without one, and then the same with one.
    return _drops(dropout) and is_plain(states)


def _drops(dropout: nn.Module) -> TypeGuard[nn.Dropout]:
    """Whether it is ours and drops some and not all."""
    return dropout.training and _is_ours(dropout) and 0 < dropout.p < 1


def _is_ours(dropout: nn.Module) -> TypeGuard[nn.Dropout]:
    """Whether it is PyTorch's own, and nobody but us has to do with it."""
    return type(dropout) is nn.Dropout and not is_wrapped(dropout)


def draw_and_drop(states: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Dropout with probability p in (0, 1] on CPU, without a gradient.

    Returns:
        What is left, (…), and where it is: (…) bool. The one is states times the other times `scale_of(p)`.
    """
    count = states.numel()
    numbers = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    kept = numbers.view(torch.int16)[:count].view(states.shape) > _dropped_draws(p) - DRAWS // 2 - 1
    return (states * scale_of(p)).mul_(kept), kept


def scale_of(p: float) -> float:
    """By what `draw_and_drop` multiplies what it keeps, so that the mean stays."""
    return DRAWS / (DRAWS - _dropped_draws(p)) if p < 1 else 0.0


def _dropped_draws(p: float) -> int:
    """How many of the DRAWS that are possible drop an element: some, and not all but where p = 1."""
    return min(max(round(p * DRAWS), 1), DRAWS - 1) if p < 1 else DRAWS


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, p):
        result, kept = draw_and_drop(states, p)
        ctx.save_for_backward(kept)
        ctx.scale = scale_of(p)
        return result

    @staticmethod
    def backward(ctx, grad):
        (kept,) = ctx.saved_tensors
        return (grad * ctx.scale).mul_(kept), None


class _ReluAndDrop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, p):
        if states.is_cpu:
            result, ctx.scale = draw_and_drop(states.relu(), p)[0], scale_of(p)
        else:
            result, ctx.scale = F.dropout(states.relu(), p, training=True), 1 / (1 - p)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, grad):
        (result,) = ctx.saved_tensors
        return torch.ops.aten.native_dropout_backward(grad, result != 0, ctx.scale), None
