"""Relative attention on CPU, one tile of scores at a time: that of one head of one row of the batch.

A tile stays in the processor's cache from its first product to its last. The shift is another view of the scores of
position, and in the backward pass the gradient of the scores is written once, into a buffer that is the shifted tile
and the unshifted one at the same time.
"""

import itertools

import torch
from torch import Tensor

from .dropout_transfo_xl import draw_and_drop, scale_of
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
        rel_key: (H, K, Dh), W_R R with the furthest distance first.
        hidden: (B or 1, L, n), n ≤ K: minus infinity where a query does not see one of the last n keys, else 0.
        dropout: probability of dropping an attention probability.

    Returns:
        (B, H, L, Dh). It can be differentiated once; with `create_graph=True` the backward pass is a RuntimeError.
    """
    inputs = (content_query, position_query, key, value, rel_key)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return _TileByTile.apply(*inputs, hidden, dropout)
    return _attend(*inputs, hidden, dropout)


def _attend(content_query, position_query, key, value, rel_key, hidden, dropout, saved: list | None = None) -> Tensor:
    """What `attend_tile_by_tile` returns; for each tile, `saved` takes the probabilities and what dropout kept."""
    (B, H, L, Dh), K = content_query.shape, key.shape[2]
    # In memory it lies as the output projection reads it.
    attended = content_query.new_empty(B, L, H, Dh).transpose(1, 2)
    for h, b in itertools.product(range(H), range(B)):
        scores = product(content_query[b, h], key[b, h].contiguous())
        # The shift: row i starts L - 1 - i entries late; what it reads of the next row is a hidden future.
        scores += product(position_query[b, h], rel_key[h].contiguous()).as_strided((L, K), (K - 1, 1), L - 1)
        scores[:, -hidden.shape[-1] :] += hidden[b % len(hidden)]
        probabilities = dropped = scores.softmax(dim=-1)
        kept = None
        if dropout > 0:
            dropped, kept = draw_and_drop(probabilities, dropout)
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
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True needs attn_implementation='eager' for inputs of this size")
        content_query, position_query, key, value, rel_key, attended, *saved = ctx.saved_tensors
        (B, H, L, Dh), K = content_query.shape, key.shape[2]
        grad_content_query, grad_position_query = (grad.new_empty(B, L, H, Dh).transpose(1, 2) for _ in range(2))
        grad_key, grad_value = (grad.new_empty(B, K, H, Dh).transpose(1, 2) for _ in range(2))
        grad_rel_key = grad.new_zeros(H, Dh, K)
        # With a spare column, what the shift leaves out of a row is the hidden future of the row above, where all
        # gradients are 0, or lies before the first row.
        grad_position_scores = grad.new_zeros(L, K + 1)
        grad_scores = grad_position_scores.view(-1)[L:].view(L, K)
        tiles = itertools.product(range(H), range(B))
        for (h, b), probabilities, kept in zip(tiles, saved[::2], saved[1::2], strict=True):
            grad_attended, dropped = grad[b, h].contiguous(), probabilities
            grad_probabilities = product(grad_attended, value[b, h].contiguous())
            if kept is not None:
                scale = kept * scale_of(ctx.dropout)
                grad_probabilities *= scale
                dropped = probabilities * scale
            # The mean of the probabilities' gradients under the probabilities, as the softmax subtracts it.
            grad_probabilities -= (grad_attended * attended[b, h]).sum(dim=-1, keepdim=True)
            torch.mul(probabilities, grad_probabilities, out=grad_scores)
            grad_value[b, h] = product(grad_attended.t(), dropped.t()).t()
            grad_key[b, h] = product(content_query[b, h].t(), grad_scores.t()).t()
            grad_content_query[b, h] = product(grad_scores, key[b, h].contiguous().t())
            grad_rel_key[h] += product(position_query[b, h].t(), grad_position_scores.t())[:, 1:]
            grad_position_query[b, h] = product(grad_position_scores[:, 1:], rel_key[h].contiguous().t())
        return grad_content_query, grad_position_query, grad_key, grad_value, grad_rel_key.transpose(1, 2), None, None
