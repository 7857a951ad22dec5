"""Relative attention on CPU, one tile of scores at a time, because a tile fits the processor's cache.

The shift is a view of the scores by distance. The backward pass writes the gradient of the scores once, into a buffer
with two views, the shifted and the unshifted tile.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..transfo_xl.attention_transfo_xl import (
    AttentionInputs,
    Backend,
    add_bias,
    eager_relative_attention,
    first_repeated,
    needs_gradient,
    register,
)
from .operators import add_products, draw_and_drop, is_by_intel, is_plain, products, products_are_single, scale_of

# A tile of several heads. More queries hide more keys; fewer queries or scores take less time than waking the threads;
# more scores exceed the 32 MB that malloc keeps, so that it returns the memory to the system each time.
TILE_QUERIES, TILE_SCORES = 256, 1 << 21
# Scores of a head from which oneDNN multiplies one head at a time; with fewer, the set-up takes most of the time.
SINGLE_SCORES = 1 << 18
# Scores of a head from which tiles are used, because fewer are faster all at once.
LARGE = 1 << 14
# Numbers in a row's keys from which, for a single query, plain products are faster than the fused attention: they take
# a tenth less time, in bf16 less than half. On Intel's CPUs they take longer, in bf16 twice as long.
MANY = {torch.float32: 1 << 20, torch.bfloat16: 1 << 16}


def tiled_relative_attention(inputs: AttentionInputs) -> tuple[Tensor, None]:
    """softmax(content_query·key + shifted (position_query·rel_key + rel_bias) + hidden)·value, tile by tile, with the
    queries q + u and q + v scaled; `rel_bias` gets no gradient.

    Differentiable once: with `create_graph=True` the backward pass raises a RuntimeError.
    """
    query, key, rel_key, rel_bias = inputs.query, inputs.key, inputs.rel_key, inputs.rel_bias
    assert rel_key is not None, "`_why_not_tiles` refuses other positions"
    found = inputs.hidden_keys()
    if found is None:
        hidden = query.new_zeros(1, query.shape[2], 1)
    else:
        hidden = query.new_zeros(found[:, 0].shape).masked_fill_(found[:, 0], -torch.inf)
    content_query = _scaled(query, inputs.content_bias, inputs.scaling)
    position_query = _scaled(query, inputs.position_bias, inputs.scaling)
    states = (content_query, position_query, key, inputs.value)
    trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*states, rel_key))
    K, L = key.shape[2], query.shape[2]
    # L - 1 rows more than given, because the shift moves a row by up to L - 1 places.
    n = K if trained else min(K, rel_key.shape[1] + L - 1)
    rel_key = first_repeated(rel_key, n)
    if rel_bias is not None:
        rel_bias = first_repeated(rel_bias.to(query.dtype) * inputs.scaling, n)
    attend = _TileByTile.apply if trained else _attend
    return attend(*states, rel_key, rel_bias, hidden, inputs.dropout), None


def _scaled(query: Tensor, bias: Tensor | None, scaling: float) -> Tensor:
    """(query + bias) · scaling, in one pass over the queries."""
    if bias is None or scaling == 1:
        return add_bias(query, bias) * scaling
    return torch.add(bias[:, None].to(query.dtype) * scaling, query, alpha=scaling)


def _why_not_tiles(inputs: AttentionInputs) -> str | None:
    query, rel_key = inputs.query, inputs.rel_key
    if query.device.type != "cpu":
        return f"the tensors are on {query.device.type}, not on a CPU"
    if query.dtype == torch.float16:
        return "tiles are not computed in torch.float16"
    if rel_key is None or (inputs.rel_bias is not None and inputs.rel_bias.requires_grad):
        return "tiles are for relative positions, and learn no score per distance"
    tensors = (query, inputs.key, inputs.value, rel_key)
    if not is_plain(*tensors):
        return "a loop over heads and rows is no graph, and nothing for torch.func or forward mode"
    if len({states.dtype for states in tensors}) > 1:
        return "the tensors are of several types"
    if torch.is_autocast_enabled("cpu") and query.dtype != torch.get_autocast_dtype("cpu"):
        return "tiles know nothing of autocast"
    return None


def _tiles_pay(inputs: AttentionInputs) -> bool:
    """Whether tiles are faster than other attention.

    In bf16, where a product takes less time than a pass over the scores, the fused attention is faster without a
    gradient, and eager attention with one on AMD's CPUs.
    """
    query = inputs.query
    if not query.is_cpu or query.shape[2] * inputs.key.shape[2] < LARGE:
        return False
    trained = needs_gradient(query) or inputs.dropout > 0
    return query.dtype == torch.float32 or (query.dtype == torch.bfloat16 and trained and is_by_intel())


def _is_long_row(inputs: AttentionInputs) -> bool:
    """Whether each row has one query for many keys, on a CPU not made by Intel; False in a graph, which would be bound
    to the number of keys. A row's keys count alone, because in bf16 its results must not depend on other rows."""
    query, key = inputs.query, inputs.key
    if not query.is_cpu or query.shape[2] > 1 or query.dtype not in MANY:
        return False
    many = inputs.rel_key is not None and is_plain(query, key) and key.numel() >= MANY[query.dtype] * len(key)
    return many and not is_by_intel()


class _Tile(NamedTuple):
    """Some queries of some heads of batch row `b`, and the number of keys, from the oldest, up to the last query."""

    heads: slice
    b: int
    queries: slice
    keys: int


def _is_single(content_query: Tensor, key: Tensor) -> bool:
    """Whether each tile has one head with all its queries."""
    return content_query.shape[2] * key.shape[2] >= SINGLE_SCORES and products_are_single(content_query)


def _tiles(B: int, H: int, L: int, K: int, single: bool) -> Iterator[_Tile]:
    """All tiles; for each choice of heads and row, the tile of the last queries, which has all keys, comes first."""
    # All queries of a single head, because oneDNN multiplies one pair of matrices with threads of its own.
    rows = L if single else min(L, TILE_QUERIES)
    groups = H if single else -(-H * rows * K // TILE_SCORES)
    n_head = max(1, -(-H // groups))
    for h in range(0, H, n_head):
        for b in range(B):
            for stop in range(L, 0, -rows):
                yield _Tile(slice(h, min(h + n_head, H)), b, slice(max(0, stop - rows), stop), K - L + stop)


def _attend(
    content_query, position_query, key, value, rel_key, rel_bias, hidden, dropout, saved: list | None = None
) -> Tensor:
    """The attended values, (B, H, L, Dh); `saved` receives each tile's probabilities and the mask of its dropout.

    Args:
        content_query, position_query: (B, H, L, Dh), q + u and q + v, scaled. key, value: (B, H, K, Dh).
        rel_key, rel_bias: (H, n, Dh) and (H, n) or None, scaled, n ≤ K, the furthest distance first; if n < K, the
            first L rows are equal.
        hidden: (B or 1, L, k), k ≤ K: minus infinity where a query does not see one of the last k keys, else 0.
    """
    (B, H, L, Dh), K, n = content_query.shape, key.shape[2], rel_key.shape[1]
    # In the layout that the output projection reads.
    attended = content_query.new_empty(B, L, H, Dh).transpose(1, 2)
    single = _is_single(content_query, key)
    # A sum reads each number once. If a sum of finite numbers overflows, only the slower branch runs.
    finite = math.isfinite(position_query.detach().sum())
    by_distance_room = scores_room = None
    for heads, b, queries, keys in _tiles(B, H, L, K, single):
        if keys == K:
            tile_key, tile_value, distances = (
                _to_be_read(states, L, single) for states in (key[b, heads], value[b, heads], rel_key[heads])
            )
            tile_value = tile_value.transpose(1, 2)
            if saved is None and not single and scores_room is None:
                # The first tile is the largest. One allocation for both, because malloc would return the second of two
                # to the system, and new memory is slow at the first touch.
                size = len(tile_key) * min(L, TILE_QUERIES) * K
                by_distance_room, scores_room = content_query.new_empty(2, size)
        near = min(n, keys)
        by_distance = products(position_query[b, heads, queries], distances[:, n - near :], by_distance_room)
        if rel_bias is not None:
            by_distance += rel_bias[heads, None, n - near :]
        scores = products(content_query[b, heads, queries], tile_key[:, :keys], scores_room)
        if near < keys:
            scores[..., :-near] += by_distance[..., :1]
        scores[..., -near:] += _shifted(by_distance)
        # The columns of `hidden` for the keys of the tile.
        seen = hidden[b % len(hidden), queries, : max(0, hidden.shape[-1] - (L - queries.stop))]
        hideable = scores[..., keys - seen.shape[-1] :]
        if finite:
            hideable += seen
        else:
            # Filled, ten times slower, because the shift brings NaN from the next query, and NaN - ∞ is NaN.
            hideable.masked_fill_(seen != 0, -torch.inf)
        probabilities = dropped = torch.softmax(scores, dim=-1, out=scores)
        kept = None
        if dropout > 0:
            dropped, kept = draw_and_drop(probabilities, dropout)
        attended[b, heads, queries] = products(dropped, tile_value[..., :keys])
        if saved is not None:
            saved += [probabilities, kept]
    return attended


def _to_be_read(states: Tensor, L: int, single: bool) -> Tensor:
    """States, (n, K, Dh), copied to be contiguous if oneDNN multiplies them (`single`) or several tiles read them; one
    tile reads them strided, because a copy takes longer."""
    copied = (single or L > TILE_QUERIES) and not (states[0].is_contiguous() or states[0].t().is_contiguous())
    return states.contiguous() if copied else states


def _shifted(by_distance: Tensor) -> Tensor:
    """Scores by distance, (n, L, K), furthest first, as scores by key: row i starts at entry L - 1 - i. Its entries
    from the next row belong to later keys, which are hidden."""
    n, L, K = by_distance.shape
    return by_distance.as_strided((n, L, K), (L * K, K - 1, 1), L - 1)


class _TileByTile(torch.autograd.Function):
    @staticmethod
    def forward(ctx, content_query, position_query, key, value, rel_key, rel_bias, hidden, dropout):
        saved: list[Tensor | None] = []
        inputs = (content_query, position_query, key, value, rel_key)
        attended = _attend(*inputs, rel_bias, hidden, dropout, saved)
        ctx.save_for_backward(*inputs, *saved)
        ctx.dropout = dropout
        ctx.single = _is_single(content_query, key)
        return attended

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True needs attn_implementation='eager' for inputs of this size")
        content_query, position_query, key, value, rel_key, *saved = ctx.saved_tensors
        (B, H, L, Dh), K = content_query.shape, key.shape[2]
        grad_content_query, grad_position_query = (grad.new_empty(B, L, H, Dh).transpose(1, 2) for _ in range(2))
        grad_key, grad_value = (grad.new_empty(B, K, H, Dh).transpose(1, 2) for _ in range(2))
        # Sums over tiles in fp32, also where the tiles are in bf16.
        wide = torch.promote_types(grad.dtype, torch.float32)
        grad_rel_key = grad.new_zeros(H, Dh, K, dtype=wide)
        for tile, probabilities, kept in zip(_tiles(B, H, L, K, ctx.single), saved[::2], saved[1::2], strict=True):
            heads, b, queries, keys = tile
            if keys == K:
                tile_key, tile_value, distances = (
                    _to_be_read(states, L, ctx.single) for states in (key[b, heads], value[b, heads], rel_key[heads])
                )
                tile_key, distances = tile_key.transpose(1, 2), distances.transpose(1, 2)
                of_key, of_value = (grad.new_zeros(len(tile_key), Dh, K, dtype=wide) for _ in range(2))
            grad_attended, dropped = grad[b, heads, queries].contiguous(), probabilities
            grad_probabilities = products(grad_attended, tile_value[:, :keys])
            if kept is not None:
                scale = kept * scale_of(ctx.dropout)
                grad_probabilities *= scale
                dropped = probabilities * scale
            grad_scores, grad_position_scores = _scores_and_by_distance(grad_probabilities)
            # In place, because new memory of this size is slow at the first touch.
            torch._softmax_backward_data(
                grad_probabilities, probabilities, -1, probabilities.dtype, grad_input=grad_probabilities
            )
            grad_scores.copy_(grad_probabilities)
            queried = content_query[b, heads, queries].transpose(1, 2)
            add_products(of_value[..., :keys], grad_attended.transpose(1, 2), dropped.transpose(1, 2))
            add_products(of_key[..., :keys], queried, grad_scores.transpose(1, 2))
            grad_content_query[b, heads, queries] = products(grad_scores, tile_key[..., :keys])
            queried = position_query[b, heads, queries].transpose(1, 2)
            add_products(grad_rel_key[heads, :, K - keys :], queried, grad_position_scores.transpose(1, 2))
            grad_position_query[b, heads, queries] = products(grad_position_scores, distances[..., K - keys :])
            if queries.start == 0:
                grad_key[b, heads], grad_value[b, heads] = of_key.transpose(1, 2), of_value.transpose(1, 2)
        grad_rel_key = grad_rel_key.transpose(1, 2).to(grad.dtype)
        return grad_content_query, grad_position_query, grad_key, grad_value, grad_rel_key, None, None, None


def _scores_and_by_distance(like: Tensor) -> tuple[Tensor, Tensor]:
    """Two views, (n, L, K) each, of one buffer with a spare column: scores by key, and by distance (`_shifted`).

    Entries by distance that are no key of their row are hidden later keys of the row above, whose gradients are 0, or
    precede the first row and are set to 0 here.
    """
    n, L, K = like.shape
    buffer = like.new_empty(n, L * (K + 1))
    buffer[:, :L] = 0
    return buffer[:, L:].view(n, L, K), buffer.view(n, L, K + 1)[..., 1:]


register(Backend("txl_tiles", tiled_relative_attention, why_not=_why_not_tiles, suits=_tiles_pay))
register(Backend("txl_row", eager_relative_attention, suits=_is_long_row, follows_order=True, captures=True))
