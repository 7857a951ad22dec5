"""Relative attention on CPU, one tile of scores at a time: that of one head of one row of the batch.

A tile stays in the processor's cache from its first product to its last. The scores of position come with a spare
column, so that the shift is another view of them (see `relative_shift`). In the backward pass the gradient of the
scores is written once, into a buffer that is the shifted tile and the unshifted one at the same time.
"""

import itertools

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .linear_transfo_xl import product

__all__ = ["attend_tile_by_tile"]


def attend_tile_by_tile(
    content_query: Tensor,
    position_query: Tensor,
    key: Tensor,
    value: Tensor,
    rel_key: Tensor,
    hidden: Tensor,
    dropout: float,
) -> Tensor:
    """softmax(content_query·key + shifted position_query·rel_key + hidden)·value.

    Args:
        content_query, position_query: (B, H, L, Dh), q + u and q + v, scaled.
        key, value: (B, H, K, Dh).
        rel_key: (H, K + 1, Dh), W_R R with a spare distance in front.
        hidden: (B or 1, L, n), n ≤ K: minus infinity where a query does not see one of the last n keys, else 0.
        dropout: probability of dropping an attention probability.

    Returns:
        (B, H, L, Dh). It can be differentiated once.
    """
    inputs = (content_query, position_query, key, value, rel_key)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return _TileByTile.apply(*inputs, hidden, dropout)
    return _attend(*inputs, hidden, dropout)


def _attend(content_query, position_query, key, value, rel_key, hidden, dropout, saved: list | None = None) -> Tensor:
    """What `attend_tile_by_tile` returns; for each tile, `saved` takes the probabilities and what dropout kept."""
    B, H, L, Dh = content_query.shape
    # In memory it lies as the output projection reads it.
    attended = content_query.new_empty(B, L, H, Dh).transpose(1, 2)
    for b, h in itertools.product(range(B), range(H)):
        scores = product(content_query[b, h], key[b, h].contiguous())
        scores += _shift(product(position_query[b, h], rel_key[h]))
        scores[:, -hidden.shape[-1] :] += hidden[b % len(hidden)]
        probabilities = dropped = scores.softmax(dim=-1)
        kept = None
        if dropout > 0:
            dropped, kept = torch.native_dropout(probabilities, dropout, True)
        attended[b, h] = product(dropped, value[b, h].contiguous().t())
        if saved is not None:
            saved += [probabilities, kept]
    return attended


class _TileByTile(torch.autograd.Function):
    @staticmethod
    def forward(ctx, content_query, position_query, key, value, rel_key, hidden, dropout):
        saved: list[Tensor | None] = []
        inputs = (content_query, position_query, key, value, rel_key)
        attended = _attend(*inputs, hidden, dropout, saved)
        ctx.save_for_backward(*inputs, attended, *saved)
        ctx.dropout = dropout
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        content_query, position_query, key, value, rel_key, attended, *saved = ctx.saved_tensors
        (B, H, L, Dh), K = content_query.shape, key.shape[2]
        grad_content_query, grad_position_query = (grad.new_empty(B, L, H, Dh).transpose(1, 2) for _ in range(2))
        grad_key, grad_value = (grad.new_empty(B, K, H, Dh).transpose(1, 2) for _ in range(2))
        grad_rel_key = grad.new_zeros(H, Dh, K + 1)
        # What the shift leaves out is 0: the spare entries of the first row, and those of the others, which are the
        # hidden future of the rows above.
        grad_position_scores = grad.new_zeros(L, K + 1)
        grad_scores = _shift(grad_position_scores)
        tiles = itertools.product(range(B), range(H))
        for (b, h), probabilities, kept in zip(tiles, saved[::2], saved[1::2], strict=True):
            grad_attended, dropped = grad[b, h].contiguous(), probabilities
            grad_probabilities = product(grad_attended, value[b, h].contiguous())
            if kept is not None:
                scale = kept / (1 - ctx.dropout)
                grad_probabilities *= scale
                dropped = probabilities * scale
            # The mean of the probabilities' gradients under the probabilities, as the softmax subtracts it.
            grad_probabilities -= (grad_attended * attended[b, h]).sum(dim=-1, keepdim=True)
            torch.mul(probabilities, grad_probabilities, out=grad_scores)
            grad_value[b, h] = product(grad_attended.t(), dropped.t()).t()
            grad_key[b, h] = product(content_query[b, h].t(), grad_scores.t()).t()
            grad_content_query[b, h] = product(grad_scores, key[b, h].contiguous().t())
            grad_rel_key[h] += product(position_query[b, h].t(), grad_position_scores.t())
            grad_position_query[b, h] = product(grad_position_scores, rel_key[h].t())
        return grad_content_query, grad_position_query, grad_key, grad_value, grad_rel_key.transpose(1, 2), None, None


def _shift(scores: Tensor) -> Tensor:
    """(L, K + 1) → (L, K), a view of the same numbers that is contiguous again."""
    L, K = scores.shape[0], scores.shape[1] - 1
    return scores.view(-1)[L:].view(L, K)
