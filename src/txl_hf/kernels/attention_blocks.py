"""Relative attention in both directions, a block of queries at a time, so that memory grows linearly with the length.

A block is eager attention with the rows of `rel_key` for its distances, n + r - 1 of them for r queries and n keys;
(b) + (d) of all queries at once would be (B, H, L, K + L - 1). With a gradient, the backward pass computes each block
again, so that no probabilities are kept. Blocks run on every device and in every dtype, compiled or not.
"""

import functools

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..transfo_xl.attention_transfo_xl import AttentionInputs, Backend, eager_relative_attention, register
from . import attention_triton  # Its kernels are registered first, so that "auto" prefers them on a GPU.

# Scores of a block, because more exceed the caches of a CPU; its fewest queries, because thinner products are slow.
BLOCK_SCORES, BLOCK_QUERIES = 1 << 22, 64


def blockwise_relative_attention(inputs: AttentionInputs) -> tuple[Tensor, None]:
    """Attention with `future`, block by block."""
    (B, H, L, _), K = inputs.query.shape, inputs.key.shape[2]
    inputs = attention_triton.of_every_distance(inputs, spare=1)
    rows = max(BLOCK_QUERIES, BLOCK_SCORES // (B * H * K))
    blocks = [slice(start, min(start + rows, L)) for start in range(0, L, rows)]
    if len(blocks) == 1:
        return _attended(inputs, blocks[0]), None
    if torch.is_grad_enabled():
        replay = functools.partial(checkpoint, _attended, use_reentrant=False, preserve_rng_state=inputs.dropout > 0)
        return torch.cat([replay(inputs, queries) for queries in blocks], dim=2), None
    first = _attended(inputs, blocks[0])
    # In the output projection's layout; one allocation, so that malloc can reuse the memory of each block's scores.
    attended = first.new_empty(B, L, H, first.shape[-1]).transpose(1, 2)
    attended[:, :, blocks[0]] = first
    for queries in blocks[1:]:
        attended[:, :, queries] = _attended(inputs, queries)
    return attended, None


def _attended(inputs: AttentionInputs, queries: slice) -> Tensor:
    """The result of some queries with the keys that they may see; `inputs` have a row per distance and a spare one."""
    K, future = inputs.key.shape[2], inputs.future
    assert future is not None, "of both directions"
    before = K - inputs.query.shape[2]
    start, stop = before + queries.start, before + queries.stop
    first = 0 if inputs.window is None else max(0, start - inputs.window)
    keys = slice(first, min(K, stop + future))
    # Row c belongs to distance K - c. Rows missing at the end belong to keys beyond `future`, which are hidden.
    distances = slice(K - stop + keys.start, K - start + keys.stop)
    hidden, bias, rel_key, rel_bias = inputs.hidden_keys(queries), inputs.score_bias, inputs.rel_key, inputs.rel_bias
    block = AttentionInputs(
        inputs.query[:, :, queries],
        inputs.key[:, :, keys],
        inputs.value[:, :, keys],
        inputs.scaling,
        inputs.dropout,
        None if rel_key is None else rel_key[:, distances],
        inputs.content_bias,
        inputs.position_bias,
        None if rel_bias is None else rel_bias[:, distances],
        hidden=None if hidden is None else hidden[..., keys],
        future=min(distances.stop, K + future + 1) - distances.start - (keys.stop - keys.start) - 1,
        score_bias=None if bias is None else bias[:, :, queries, keys],
    )
    return eager_relative_attention(block)[0]


def _why_not_blocks(inputs: AttentionInputs) -> str | None:
    return "blocks are for attention in both directions" if inputs.future is None else None


def _blocks_pay(inputs: AttentionInputs) -> bool:
    """Whether there are more scores than a block has."""
    (B, H, L, _), K = inputs.query.shape, inputs.key.shape[2]
    return B * H * L * K > BLOCK_SCORES


register(
    Backend("txl_blocks", blockwise_relative_attention, why_not=_why_not_blocks, suits=_blocks_pay, both_ways=True)
)
