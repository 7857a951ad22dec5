"""What every attention backend is given, and which keys a query sees of it.

Shapes: B batch, H heads, Dh head width, L queries (the segment), K = m + L keys (memory, then segment).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .linear_transfo_xl import is_plain

__all__ = ["AttentionInputs", "first_repeated", "hidden_keys", "keep_documents_apart", "visible_keys"]


class AttentionInputs(NamedTuple):
    """The arguments of `relative_attention`, as its backends take them: one tuple, read by name.

    Args:
        query: (B, H, L, Dh). key, value: (B, H, K, Dh), K ≥ L; the queries are the last L of the K keys' positions.
        scaling: factor of all scores.
        dropout: probability of dropping an attention probability.
        rel_key: (H, n, Dh), n ≤ K, W_R R with the furthest distance first: row c belongs to distance n - 1 - c, and
            the first one to all that are further too, as `clamp_len` has it. None: no term depends on the distance.
        content_bias: (H, Dh), u. position_bias: (H, Dh), v.
        rel_bias: (H, n), a learned score per distance, rows as in `rel_key`.
        key_mask: (B, K) bool, False where a key is padding.
        window: the furthest distance a query sees; None: all keys up to itself.
        first_key: (B, L) int, the first key that a query sees: where its document begins. It never decreases along a
            row, nor exceeds the query's own key. None: 0.
        order: (K,) int, with L = 1: the place in time of each key and value, where these lie in another order;
            distances, mask, window and first key are in order of time. None: keys and values are too.
        hidden: what `hidden_keys` says of these, which layers share; None: it has not been asked.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    dropout: float = 0.0
    rel_key: Tensor | None = None
    content_bias: Tensor | None = None
    position_bias: Tensor | None = None
    rel_bias: Tensor | None = None
    key_mask: Tensor | None = None
    window: int | None = None
    first_key: Tensor | None = None
    order: Tensor | None = None
    hidden: Tensor | None = None

    def hidden_keys(self) -> Tensor | None:
        """See the function."""
        if self.hidden is not None:
            return self.hidden
        lengths = self.query.shape[2], self.key.shape[2]
        return hidden_keys(*lengths, self.window, self.key_mask, self.query.device, self.first_key, self.order)

    def of_every_distance(self) -> "AttentionInputs":
        """The same with a row for each of the K distances in `rel_key` and `rel_bias`."""
        K = self.key.shape[2]
        both = (self.rel_key, self.rel_bias)
        rel_key, rel_bias = (None if rows is None else first_repeated(rows, K) for rows in both)
        return self._replace(rel_key=rel_key, rel_bias=rel_bias)


def first_repeated(states: Tensor, length: int, dim: int = 1) -> Tensor:
    """(…, n, …) with the first of the n repeated until there are `length`, or as it is where there are."""
    missing = length - states.shape[dim]
    if missing <= 0:
        return states
    shape = list(states.shape)
    shape[dim] = missing
    return torch.cat([states.narrow(dim, 0, 1).expand(shape), states], dim)


def visible_keys(
    query_length: int,
    key_length: int,
    window: int | None,
    key_mask: Tensor | None,
    device: torch.device,
    first_key: Tensor | None = None,
) -> Tensor:
    """Which key each query may attend to.

    Args:
        query_length: L. key_length: K.
        window: furthest distance seen; None: every key up to the query.
        key_mask: (B, K) bool, False for padding; None: no padding.
        first_key: (B, L), the first key that a query sees; None: 0.

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
    if first_key is not None:
        visible = visible & (torch.arange(key_length, device=device) >= first_key[:, None, :, None])
    if key_mask is not None:
        visible = (visible & key_mask[:, None, None, :]) | (distance == 0)
    return visible


def hidden_keys(
    query_length: int,
    key_length: int,
    window: int | None,
    key_mask: Tensor | None,
    device: torch.device,
    first_key: Tensor | None = None,
    order: Tensor | None = None,
) -> Tensor | None:
    """Which of the last keys each query does not attend to, in the order that keys and values have.

    Arguments: see `visible_keys`, and for `order` `AttentionInputs`.

    Returns:
        (B or 1, 1, L, n) bool of the last n keys, since a future alone is hidden in the last L columns; None: nothing
        is hidden.
    """
    if window is None and key_mask is None and first_key is None:
        if query_length == 1:
            return None
        return torch.ones(query_length, query_length, dtype=torch.bool, device=device).triu(1)[None, None]
    hidden = ~visible_keys(query_length, key_length, window, key_mask, device, first_key)
    return hidden if order is None else hidden.index_select(-1, order)


def keep_documents_apart(inputs: AttentionInputs) -> tuple[AttentionInputs, Tensor | None]:
    """Let a document see nothing of what is not finite in the one before: under a weight of 0 NaN would stay NaN.

    Returns:
        The inputs with zeros for keys and values that are not finite; and (B, 1, L, 1) bool, which queries see such a
        key, so that nothing right can be computed for them. None where no document begins, and on a CPU where there is
        no such key.
    """
    key, value, first_key = inputs.key, inputs.value, inputs.first_key
    if first_key is None:
        return inputs, None
    # Sums read each number once and write none. One of finite numbers that is not finite itself only costs the time.
    if key.is_cpu and is_plain(key, value) and all(math.isfinite(part.detach().sum()) for part in (key, value)):
        return inputs, None
    L, K = inputs.query.shape[2], key.shape[2]
    broken = ~(key.isfinite() & value.isfinite()).all(dim=-1).all(dim=1)
    hidden = broken[:, None, :, None]
    if inputs.order is not None:
        # From here on in order of time, as mask and first keys are.
        broken = broken.index_copy(1, inputs.order, broken)
    seen = broken if inputs.key_mask is None else broken & inputs.key_mask
    # How many of them lie before each key, so that those from the first that a query sees are a difference.
    before = torch.nn.functional.pad(seen.cumsum(dim=1), (1, 0))
    last = torch.arange(K - L, K, device=key.device).expand(len(key), L)
    first = first_key if inputs.window is None else torch.maximum(first_key, last - inputs.window)
    sees = before.gather(1, last + 1) > before.gather(1, first.expand_as(last).long())
    inputs = inputs._replace(key=key.masked_fill(hidden, 0), value=value.masked_fill(hidden, 0))
    return inputs, sees[:, None, :, None]
