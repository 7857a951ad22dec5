r"""Relative attention (Transformer-XL, Section 3.3) behind one signature for every backend.

The score of query i for key j is, in the paper's letters,

    A_ij = q_i·k_j  +  q_i·W_R R_(i-j)  +  u·k_j  +  v·W_R R_(i-j)
           (a)         (b)                (c)        (d)

With `query` = q, `key` = k, `rel_key` = W_R R, `content_bias` = u and `position_bias` = v, the terms (a) + (c) are
(q + u)·k and (b) + (d) are (q + v)·W_R R. The latter depend on i - j alone, so they are computed once per distance and
shifted into place (Appendix B).

Shapes: B batch, H heads, Dh head width, L queries (the segment), K = m + L keys (memory, then segment).
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from transformers.utils import logging

from .attention_transfo_xl_cpu import attend_tile_by_tile
from .attention_transfo_xl_triton import triton_relative_attention, why_not_triton

__all__ = ["RELATIVE_ATTENTION_FUNCTIONS", "relative_attention", "relative_shift", "visible_keys"]

logger = logging.get_logger(__name__)


def relative_shift(scores: Tensor) -> Tensor:
    """Align scores per distance with keys (Appendix B): another view of the same numbers, without a copy.

    Args:
        scores: (..., L, K + 1); column c belongs to distance K - c, and column 0 is spare: it makes each row of K
            entries start one entry earlier than the row above it.

    Returns:
        (..., L, K) whose entry (i, j) is `scores[..., i, j + L - i]`, the score of distance i + (K - L) - j.
        Entries of keys after the query, j > i + K - L, are meaningless.
    """
    L, K = scores.shape[-2], scores.shape[-1] - 1
    return scores.flatten(-2)[..., L:].unflatten(-1, (L, K))


def visible_keys(
    query_length: int, key_length: int, window: int | None, key_mask: Tensor | None, device: torch.device
) -> Tensor:
    """Which key each query may attend to.

    Args:
        query_length: L. key_length: K.
        window: furthest distance seen; None: every key up to the query.
        key_mask: (B, K) bool, False for padding; None: no padding.

    Returns:
        (B or 1, 1, L, K) bool. A query always sees itself, so that no softmax is empty: what a padded query computes
        is never read.
    """
    query_position = torch.arange(key_length - query_length, key_length, device=device)[:, None]
    distance = query_position - torch.arange(key_length, device=device)
    visible = distance >= 0
    if window is not None:
        visible = visible & (distance <= window)
    visible = visible[None, None]
    if key_mask is not None:
        visible = (visible & key_mask[:, None, None, :]) | (distance == 0)
    return visible


def eager_relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rel_key: Tensor | None,
    content_bias: Tensor | None,
    position_bias: Tensor | None,
    rel_bias: Tensor | None,
    key_mask: Tensor | None,
    window: int | None,
    scaling: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """The reference: every score is materialised, so the probabilities can be returned."""
    scores = (_add_bias(query, content_bias) * scaling) @ key.transpose(-1, -2)
    if rel_key is not None:
        scores = scores + _position_scores(query, rel_key, position_bias, rel_bias, scaling)
    scores = _hide(scores, window, key_mask)
    probabilities = F.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    probabilities = F.dropout(probabilities, dropout, training=dropout > 0)
    return probabilities @ value, probabilities


def sdpa_relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rel_key: Tensor | None,
    content_bias: Tensor | None,
    position_bias: Tensor | None,
    rel_bias: Tensor | None,
    key_mask: Tensor | None,
    window: int | None,
    scaling: float,
    dropout: float,
) -> tuple[Tensor, None]:
    """PyTorch's scaled_dot_product_attention, with (b) + (d) as its additive mask; on CPU what is faster than that."""
    if rel_key is not None and rel_bias is None and _pays_tile_by_tile(query, key):
        attended = _cpu_relative_attention(
            query, key, value, rel_key, content_bias, position_bias, key_mask, window, scaling, dropout
        )
        return attended, None
    if rel_key is not None and query.device.type == "cpu" and torch.is_grad_enabled() and query.requires_grad:
        # With a mask that needs a gradient, PyTorch has no fused path on CPU, and its plain one is slower than ours.
        arguments = (query, key, value, rel_key, content_bias, position_bias, rel_bias, key_mask, window)
        return eager_relative_attention(*arguments, scaling, dropout)[0], None
    if rel_key is None:
        mask = visible_keys(query.shape[-2], key.shape[-2], window, key_mask, query.device)
    else:
        mask = _hide(_position_scores(query, rel_key, position_bias, rel_bias, scaling), window, key_mask)
    query = _add_bias(query, content_bias)
    return F.scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout, scale=scaling), None


def _pays_tile_by_tile(query: Tensor, key: Tensor) -> bool:
    """Small tiles are done sooner all at once, and half precision has faster products for that."""
    return (
        query.device.type == "cpu"
        and query.dtype == torch.float32
        and query.shape[2] * key.shape[2] >= 1 << 17
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch.is_autocast_enabled("cpu")
    )


def _cpu_relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rel_key: Tensor,
    content_bias: Tensor | None,
    position_bias: Tensor | None,
    key_mask: Tensor | None,
    window: int | None,
    scaling: float,
    dropout: float,
) -> Tensor:
    """One head of one row of the batch at a time, so that its scores stay in the processor's cache."""
    L, K = query.shape[2], key.shape[2]
    maskless = window is None and key_mask is None
    visible = visible_keys(L, L if maskless else K, window, key_mask, query.device)[:, 0]
    hidden = query.new_zeros(visible.shape).masked_fill_(~visible, -torch.inf)
    content_query, position_query = (_add_bias(query, bias) * scaling for bias in (content_bias, position_bias))
    return attend_tile_by_tile(content_query, position_query, key, value, rel_key, hidden, dropout)


def flex_relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rel_key: Tensor | None,
    content_bias: Tensor | None,
    position_bias: Tensor | None,
    rel_bias: Tensor | None,
    key_mask: Tensor | None,
    window: int | None,
    scaling: float,
    dropout: float,
) -> tuple[Tensor, None]:
    """PyTorch's FlexAttention, compiled, with (b) + (d) as a captured L × K tensor."""
    if rel_key is None:
        bias = query.new_zeros(*query.shape[:3], key.shape[2])
    else:
        bias = _position_scores(query, rel_key, position_bias, rel_bias, scaling)
    bias = _hide(bias, window, key_mask)

    def add_bias(score, b, h, i, j):
        return score + bias[b, h, i, j]

    query = _add_bias(query, content_bias)
    return _compiled_flex_attention()(query, key, value, score_mod=add_bias, scale=scaling), None


@functools.cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


def _why_not_flex(query: Tensor, dropout: float) -> str | None:
    if dropout > 0:
        return "FlexAttention has no dropout of probabilities"
    if query.device.type == "cpu" and torch.is_grad_enabled() and query.requires_grad:
        return "FlexAttention has no backward on CPU"
    return None


def _with_fallback(name: str, function: Callable, why_not: Callable[[Tensor, float], str | None]) -> Callable:
    """A backend that hands over to sdpa, with one warning, what it cannot do."""

    @functools.wraps(function)
    def attend(query: Tensor, *args):
        reason = why_not(query, args[-1])
        if reason is None:
            return function(query, *args)
        logger.warning_once(f"attn_implementation={name!r} falls back to 'sdpa': {reason}")
        return sdpa_relative_attention(query, *args)

    return attend


def _add_bias(query: Tensor, bias: Tensor | None) -> Tensor:
    return query if bias is None else query + bias[:, None].to(query.dtype)


def _position_scores(
    query: Tensor, rel_key: Tensor, position_bias: Tensor | None, rel_bias: Tensor | None, scaling: float
) -> Tensor:
    """(b) + (d), or (b) and a learned score per distance: (B, H, L, K)."""
    B, _, L, _ = query.shape
    if L > 1:
        # Whatever the spare column holds: a row that is there already takes less time than zeros.
        rel_key = torch.cat([rel_key[:, :1], rel_key], dim=1)
        rel_bias = None if rel_bias is None else F.pad(rel_bias, (1, 0))
    # One product for each head, whatever the batch: the distances are everybody's.
    queries = (_add_bias(query, position_bias) * scaling).transpose(0, 1).flatten(1, 2)
    scores = torch.bmm(queries, rel_key.transpose(1, 2)).unflatten(1, (B, L))
    if rel_bias is not None:
        scores = scores + rel_bias[:, None, None].to(scores.dtype) * scaling
    return (relative_shift(scores) if L > 1 else scores).transpose(0, 1)


def _hide(scores: Tensor, window: int | None, key_mask: Tensor | None) -> Tensor:
    """Set the scores (B, H, L, K) of keys that a query does not see to minus infinity, in place."""
    L, K = scores.shape[-2:]
    if window is not None or key_mask is not None:
        return scores.masked_fill_(~visible_keys(L, K, window, key_mask, scores.device), -torch.inf)
    if L > 1:
        future = torch.ones(L, L, dtype=torch.bool, device=scores.device).triu(1)
        scores[..., K - L :].masked_fill_(future, -torch.inf)
    return scores


RELATIVE_ATTENTION_FUNCTIONS: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "eager": eager_relative_attention,
    "sdpa": sdpa_relative_attention,
    "flex_attention": _with_fallback("flex_attention", flex_relative_attention, _why_not_flex),
    "txl_triton": _with_fallback("txl_triton", triton_relative_attention, lambda query, _: why_not_triton(query)),
}


def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rel_key: Tensor | None = None,
    content_bias: Tensor | None = None,
    position_bias: Tensor | None = None,
    *,
    rel_bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    window: int | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    implementation: str = "eager",
) -> tuple[Tensor, Tensor | None]:
    """Multi-head attention with relative positions; the queries are the last L of the K keys' positions.

    Args:
        query: (B, H, L, Dh). key, value: (B, H, K, Dh), K ≥ L.
        rel_key: (H, K, Dh), W_R R with the furthest distance first: row c belongs to distance K - 1 - c.
            None: attention without positions (the absolute baselines add theirs to the hidden states).
        content_bias: (H, Dh), u. position_bias: (H, Dh), v.
        rel_bias: (H, K), a learned score per distance, rows as in `rel_key`; takes the place of v·W_R R in the
            encoding after Shaw et al.
        key_mask: (B, K) bool, False where a key is padding.
        window: the furthest distance a query sees; None: all keys up to itself.
        scaling: factor of all scores, by default Dh ** -0.5.
        dropout: probability of dropping an attention probability.
        implementation: a name in `RELATIVE_ATTENTION_FUNCTIONS`.

    Returns:
        The attended values (B, H, L, Dh), and the probabilities (B, H, L, K) where the backend has them, else None.

    Raises:
        ValueError: `implementation` is unknown.
    """
    if implementation not in RELATIVE_ATTENTION_FUNCTIONS:
        raise ValueError(
            f"attn_implementation={implementation!r} is not one of {', '.join(RELATIVE_ATTENTION_FUNCTIONS)}"
        )
    return RELATIVE_ATTENTION_FUNCTIONS[implementation](
        query,
        key,
        value,
        rel_key,
        content_bias,
        position_bias,
        rel_bias,
        key_mask,
        window,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        dropout,
    )
