r"""Relative attention (Transformer-XL, Section 3.3) behind one signature for every backend.

The score of query i for key j is, in the paper's letters,

    A_ij = q_i·k_j  +  q_i·W_R R_(i-j)  +  u·k_j  +  v·W_R R_(i-j)
           (a)         (b)                (c)        (d)

With `query` = q, `key` = k, `rel_key` = W_R R, `content_bias` = u and `position_bias` = v, the terms (a) + (c) are
(q + u)·k and (b) + (d) are (q + v)·W_R R. The latter depend on i - j alone, so they are computed once per distance and
shifted into place (Appendix B).

Shapes: B batch, H heads, Dh head width, L queries (the segment), K = m + L keys (memory, then segment).

`BACKENDS` has all implementations; `OPERATORS` has the model's other operations that the package computes faster.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.utils import logging

from .masks_transfo_xl import can_look

logger = logging.get_logger(__name__)

# Shapes that FlexAttention is compiled for; PyTorch's limit is 8, which a growing memory exceeds.
FLEX_LENGTHS = 64
FLEX_WIDTH_ON_CPU = 32
# Kinds of devices without autocast. PyTorch 2.11 cannot compile `torch.amp.is_autocast_available`.
WITHOUT_AUTOCAST = ("meta", "lazy", "vulkan", "fpga")


class AttentionInputs(NamedTuple):
    """The arguments of `relative_attention` as a backend takes them.

    Args:
        query: (B, H, L, Dh). key, value: (B, H, K, Dh), K ≥ L; the queries are the last L of the K keys' positions.
        scaling: factor of all scores.
        dropout: probability of dropping an attention probability.
        rel_key: (H, n, Dh), n ≤ K, W_R R: row c belongs to distance n - 1 - c, and the first row also to every further
            distance. None: no term depends on the distance.
        content_bias: (H, Dh), u. position_bias: (H, Dh), v.
        rel_bias: (H, n), a learned score per distance, rows as in `rel_key`.
        key_mask: (B, K) bool, False where a key is not attended to.
        window: the furthest distance a query sees; None: all keys up to itself.
        future: how many keys after itself a query sees, as in encoders: the last `future` rows of `rel_key` and
            `rel_bias` belong to the distances -1 … -future. None: no key after itself.
        first_key: (B, L) int, never decreasing: the first key that a query sees, of its document. None: 0.
        order: (K,) int, with L = 1: the place in time, 0 the oldest, of each key and value of a cache that overwrites
            its oldest. Distances, mask and first key are in order of time. None: keys and values are too.
        hidden: the result of `hidden_keys` for these inputs; None: not computed yet. With `future` any (B or 1, 1, L,
            K) bool; a query that sees nothing takes the mean of all values.
        score_bias: (B or 1, H or 1, L, K), with `future` alone: added to the scores, not scaled.
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
    future: int | None = None
    score_bias: Tensor | None = None

    def hidden_keys(self, queries: slice = slice(None)) -> Tensor | None:
        """`hidden_keys` of these inputs, or of some of their queries."""
        if self.hidden is not None:
            return self.hidden[:, :, queries]
        lengths = self.query.shape[2], self.key.shape[2]
        window, key_mask, device, future = self.window, self.key_mask, self.query.device, self.future
        return hidden_keys(*lengths, window, key_mask, device, self.first_key, self.order, future, queries)


@dataclass(frozen=True)
class Backend:
    """An implementation of relative attention.

    Args:
        name: the value of `attn_implementation`.
        run: `AttentionInputs` → the attended values (B, H, L, Dh), and the probabilities (B, H, L, K) or None.
        why_not: `AttentionInputs` → the reason why `"auto"` has to compute these, or None.
        suits: `AttentionInputs` → whether `"auto"` chooses this backend for these.
        follows_order: whether it takes `AttentionInputs.order`.
        needs_hidden: whether it reads `AttentionInputs.hidden`.
        captures: whether a CUDA graph may contain it.
        both_ways: whether it takes `AttentionInputs.future`.
    """

    name: str
    run: Callable[[AttentionInputs], tuple[Tensor, Tensor | None]]
    why_not: Callable[[AttentionInputs], str | None] | None = None
    suits: Callable[[AttentionInputs], bool] | None = None
    follows_order: bool = False
    needs_hidden: bool = True
    captures: bool = False
    both_ways: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"attn_implementation={self.name!r} computes the attention of Transformer-XL alone")

    def refusal(self, inputs: AttentionInputs) -> str | None:
        """The reason why the backend cannot compute these inputs, or None."""
        if inputs.order is not None and not self.follows_order:
            return "it takes keys in order of time"
        if inputs.future is not None and not self.both_ways:
            return "it computes causal attention alone"
        return None if self.why_not is None else self.why_not(inputs)


def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rel_key: Tensor | None = None,
    content_bias: Tensor | None = None,
    position_bias: Tensor | None = None,
    *,
    scaling: float | None = None,
    implementation: str = "eager",
    module: nn.Module | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Multi-head attention with relative positions.

    Args:
        query, key, value, rel_key, content_bias, position_bias, and `options`: see `AttentionInputs`.
        scaling: by default Dh ** -0.5.
        implementation: the name of a backend. Inputs that it refuses go to `"auto"`, with one warning.
        module: the layer's attention, for a function of `AttentionInterface`.

    Returns:
        The attended values (B, H, L, Dh), and the probabilities (B, H, L, K) where the backend has them, else None.

    Raises:
        ValueError: no backend has this name.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    positions: dict[str, Any] = {"rel_key": rel_key, "content_bias": content_bias, "position_bias": position_bias}
    return attend(AttentionInputs(query, key, value, scaling, **positions, **options), implementation, module)


def attend(
    inputs: AttentionInputs, implementation: str, module: nn.Module | None = None
) -> tuple[Tensor, Tensor | None]:
    """`relative_attention` of inputs in one record."""
    backend = BACKENDS.get(implementation) or find_backend(implementation, module)
    special = backend.why_not is not None or inputs.order is not None or inputs.future is not None
    if special and (reason := backend.refusal(inputs)):
        logger.warning_once(f"attn_implementation={implementation!r} falls back to 'auto': {reason}")
        backend = BACKENDS["auto"]
    if inputs.first_key is None or inputs.future is not None:
        return backend.run(inputs)
    inputs, broken = keep_documents_apart(inputs)
    attended, probabilities = backend.run(inputs)
    if broken is None:
        return attended, probabilities
    attended = attended.masked_fill(broken, torch.nan)
    return attended, None if probabilities is None else probabilities.masked_fill(broken, torch.nan)


def relative_shift(scores: Tensor) -> Tensor:
    """Align scores per distance with keys (Appendix B): another view of the same numbers, without a copy.

    Args:
        scores: (..., L, K + 1); column c belongs to distance K - c. Column 0 is spare: rows of K + 1 numbers, read as
            rows of K, begin one column further left for each query.

    Returns:
        (..., L, K) whose entry (i, j) is `scores[..., i, j + L - i]`, the score of distance i + (K - L) - j;
        meaningless where j > i + K - L. With f more columns, of distances -1 … -f: (..., L, K + f), meaningless for
        keys more than f after the query, and in the last f columns.
    """
    L, K = scores.shape[-2], scores.shape[-1] - 1
    return scores.flatten(-2)[..., L:].unflatten(-1, (L, K))


def eager_relative_attention(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """The reference: every score is materialised, so the probabilities can be returned."""
    query = add_bias(inputs.query, inputs.content_bias) * inputs.scaling
    scores = OPERATORS.matmul(query, inputs.key.transpose(-1, -2))
    if inputs.future is None:
        by_distance = position_scores(inputs)
        scores = hide(scores if by_distance is None else scores + by_distance, inputs)
    else:
        # An additive mask, so that a query that sees nothing has the same gradients as in transformers' encoders.
        scores = scores + additive_mask(inputs)
    wide = torch.promote_types(scores.dtype, torch.float32)
    probabilities = F.softmax(scores, dim=-1, dtype=wide).to(inputs.value.dtype)
    if inputs.dropout > 0:
        probabilities = F.dropout(probabilities, inputs.dropout)
    return OPERATORS.matmul(probabilities, inputs.value), probabilities


def position_scores(inputs: AttentionInputs) -> Tensor | None:
    """The scores that depend on distances, (B, H, L, K); None: none does."""
    query, rel_key, rel_bias = inputs.query, inputs.rel_key, inputs.rel_bias
    (B, _, L, _), K = query.shape, inputs.key.shape[2]
    # The spare column repeats a row, which takes less time than zeros.
    columns = K + (inputs.future or 0) + 1
    if rel_key is None:
        if rel_bias is None:
            return None
        scores = first_repeated(rel_bias, columns).to(query.dtype)[:, None].expand(-1, L, -1) * inputs.scaling
        return in_order(relative_shift(scores)[..., :K], inputs).repeat(B, 1, 1, 1)
    shifts = L > 1 or inputs.future is not None
    if shifts:
        rel_key = first_repeated(rel_key, columns)
        rel_bias = None if rel_bias is None else first_repeated(rel_bias, columns)
    # One product for each head, whatever the batch, because all rows share the distances.
    queries = (add_bias(query, inputs.position_bias) * inputs.scaling).transpose(0, 1).flatten(1, 2)
    scores = OPERATORS.matmul(queries, rel_key.transpose(1, 2)).unflatten(1, (B, L))
    if rel_bias is not None:
        scores = scores + rel_bias[:, None, None].to(scores.dtype) * inputs.scaling
    if shifts:
        return relative_shift(scores)[..., :K].transpose(0, 1)
    # The scores are repeated instead of the rows, because reading a row takes longer than its product.
    return in_order(first_repeated(scores, K, dim=-1), inputs).transpose(0, 1)


def in_order(by_time: Tensor, inputs: AttentionInputs) -> Tensor:
    """Scores (…, L, K), whose keys are in order of time, for keys in the order in which they are stored."""
    return by_time if inputs.order is None else by_time.index_select(-1, inputs.order)


def add_bias(query: Tensor, bias: Tensor | None) -> Tensor:
    """query + bias, (B, H, L, Dh) and (H, Dh)."""
    return query if bias is None else query + bias[:, None].to(query.dtype)


def hide(scores: Tensor, inputs: AttentionInputs) -> Tensor:
    """The scores (B, H, L, K) plus `score_bias`, minus infinity where a key is not seen; with `future` the lowest
    number of their type, so that a query that sees nothing has equal scores."""
    if inputs.score_bias is not None:
        scores = scores + inputs.score_bias
    hidden = inputs.hidden_keys() if inputs.hidden is None else inputs.hidden
    if hidden is not None:
        lowest = -torch.inf if inputs.future is None else torch.finfo(scores.dtype).min
        scores[..., scores.shape[-1] - hidden.shape[-1] :].masked_fill_(hidden, lowest)
    return scores


def first_repeated(states: Tensor, length: int, dim: int = 1) -> Tensor:
    """(…, n, …) with the first of the n repeated until there are `length`; unchanged where n ≥ length."""
    missing = length - states.shape[dim]
    if missing <= 0:
        return states
    shape = list(states.shape)
    shape[dim] = missing
    return torch.cat([states.narrow(dim, 0, 1).expand(shape), states], dim)


def hidden_keys(
    query_length: int,
    key_length: int,
    window: int | None,
    key_mask: Tensor | None,
    device: torch.device,
    first_key: Tensor | None = None,
    order: Tensor | None = None,
    future: int | None = None,
    queries: slice = slice(None),
) -> Tensor | None:
    """Which of the last keys each query does not attend to, in the order in which keys and values are stored.

    Args:
        query_length: L. key_length: K. window, key_mask, first_key, order, future: see `AttentionInputs`.
        queries: a range of the L queries; others than all need `future`.

    Returns:
        (B or 1, 1, L, n) bool, a row for each of the `queries`, for the last n keys (n = L where the future alone is
        hidden); None: nothing is hidden. A query always sees itself, so that no softmax is empty.
    """
    if window is None and key_mask is None and first_key is None:
        if query_length == 1 or (future is not None and future >= query_length - 1):
            return None
        if future is None:
            return torch.ones(query_length, query_length, dtype=torch.bool, device=device).triu(1)[None, None]
    keys = torch.arange(key_length, device=device)
    query_position = torch.arange(key_length - query_length, key_length, device=device)[queries, None]
    distance = query_position - keys
    hidden = distance < -(future or 0)
    hidden = (hidden if window is None else hidden | (distance > window))[None, None]
    if first_key is not None:
        hidden = hidden | (keys < first_key[:, None, queries, None])
        if future:
            # The first position of each key's document; no document begins before the queries.
            begins = F.pad(first_key, (key_length - query_length, 0))
            hidden = hidden | (begins[:, None, None, :] > query_position)
    if key_mask is not None:
        hidden = (hidden | ~key_mask[:, None, None, :]) & (distance != 0)
    return hidden if order is None else hidden.index_select(-1, order)


def keep_documents_apart(inputs: AttentionInputs) -> tuple[AttentionInputs, Tensor | None]:
    """The inputs with zeros for keys and values that are not finite, because hidden ones too would make the output of
    other documents NaN (0 × NaN); and (B, 1, L, 1) bool, which queries see one and get NaN; None: none does."""
    key, value, first_key = inputs.key, inputs.value, inputs.first_key
    assert first_key is not None, "documents begin"
    # A sum as the check, because it reads each number once and writes none.
    if can_look(key) and math.isfinite(key.detach().sum()) and math.isfinite(value.detach().sum()):
        return inputs, None
    L, K = inputs.query.shape[2], key.shape[2]
    broken = ~(key.isfinite() & value.isfinite()).all(dim=-1).all(dim=1)
    hidden = broken[:, None, :, None]
    if inputs.order is not None:
        # In order of time, like mask and first keys.
        broken = broken.index_copy(1, inputs.order, broken)
    seen = broken if inputs.key_mask is None else broken & inputs.key_mask
    # The number of broken keys before each key; the number in a query's range is a difference of two.
    before = F.pad(seen.cumsum(dim=1), (1, 0))
    last = torch.arange(K - L, K, device=key.device).expand(len(key), L)
    first = first_key if inputs.window is None else torch.maximum(first_key, last - inputs.window)
    sees = before.gather(1, last + 1) > before.gather(1, first.expand_as(last).long())
    inputs = inputs._replace(key=key.masked_fill(hidden, 0), value=value.masked_fill(hidden, 0))
    return inputs, sees[:, None, :, None]


def additive_mask(inputs: AttentionInputs) -> Tensor:
    """(b) + (d), scaled, (B, H, L, K); minus infinity where a key is not seen."""
    by_distance = position_scores(inputs)
    if by_distance is not None:
        return hide(by_distance, inputs)
    (B, H, L, _), K = inputs.query.shape, inputs.key.shape[2]
    return hide(inputs.query.new_zeros(B, 1, L, K), inputs).expand(B, H, L, K)


def sdpa_relative_attention(inputs: AttentionInputs) -> tuple[Tensor, None]:
    """PyTorch's `scaled_dot_product_attention`, with (b) + (d) as its mask."""
    query, mask = add_bias(inputs.query, inputs.content_bias), additive_mask(inputs)
    options = {"dropout_p": inputs.dropout, "scale": inputs.scaling}
    return OPERATORS.scaled_dot_product_attention(query, inputs.key, inputs.value, mask, **options), None


def widened(missing: int, *heads: Tensor) -> tuple[Tensor, ...]:
    """Heads, (…, Dh), with `missing` zeros more, which change no score."""
    return tuple(F.pad(states, (0, missing)) for states in heads) if missing else heads


def flex_relative_attention(inputs: AttentionInputs) -> tuple[Tensor, None]:
    """PyTorch's FlexAttention, compiled, with (b) + (d) as a captured L × K tensor."""
    bias = additive_mask(inputs)

    def add_bias_of_distance(score, b, h, i, j):
        return score + bias[b, h, i, j]

    query = add_bias(inputs.query, inputs.content_bias)
    width = query.shape[-1]
    # On CPU PyTorch 2.13 reads uninitialised memory where heads of 16 or fewer numbers meet 24, 40, 56, … keys.
    missing = FLEX_WIDTH_ON_CPU - width if query.device.type == "cpu" and width <= 16 else 0
    states = widened(missing, query, inputs.key, inputs.value)
    options = {"score_mod": add_bias_of_distance, "scale": inputs.scaling}
    if torch.compiler.is_compiling():
        return _compiled_flex_attention()(*states, **options)[..., :width], None
    limit = max(FLEX_LENGTHS, torch._dynamo.config.cache_size_limit)
    with torch._dynamo.config.patch(cache_size_limit=limit):
        return _compiled_flex_attention()(*states, **options)[..., :width], None


@functools.cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


def _why_not_flex(inputs: AttentionInputs) -> str | None:
    query, kind = inputs.query, inputs.query.device.type
    if inputs.dropout > 0:
        return "FlexAttention has no dropout of probabilities"
    if query.shape[2] == 1:
        return "it compiles for each number of keys, and decoding has a new one at each token"
    if kind == "cpu" and needs_gradient(query):
        return "FlexAttention has no backward on CPU"
    if kind == "cpu" and query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"FlexAttention computes nothing in {query.dtype} on CPU"
    if kind == "cuda" and query.shape[-1] < 16:
        return f"heads are {query.shape[-1]} wide, and FlexAttention wants 16 at least on a GPU"
    return None


def needs_gradient(query: Tensor) -> bool:
    return torch.is_grad_enabled() and query.requires_grad


def auto_relative_attention(inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
    """The default: the first registered kernel that suits these inputs, otherwise PyTorch's own attention."""
    return choose_backend(inputs).run(inputs)


def choose_backend(inputs: AttentionInputs) -> Backend:
    """The backend that `"auto"` stands for."""
    for backend in BACKENDS.values():
        if backend.suits is not None and backend.suits(inputs) and backend.refusal(inputs) is None:
            return backend
    query = inputs.query
    if query.device.type == "cpu":
        # PyTorch's fused path on CPU takes no mask that needs a gradient. With dropout the choice ignores gradients,
        # because checkpointing runs forward first without one and must draw alike.
        trained = inputs.rel_key is not None and (needs_gradient(query) or inputs.dropout > 0)
        return BACKENDS["eager" if trained else "sdpa"]
    # Eager for one query, because plain products of few scores are as fast, and need no plan for each number of keys.
    return BACKENDS["eager" if query.shape[2] == 1 else "sdpa"]


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("auto", auto_relative_attention, follows_order=True, captures=True, both_ways=True),
        Backend("eager", eager_relative_attention, follows_order=True, captures=True, both_ways=True),
        Backend("sdpa", sdpa_relative_attention, follows_order=True, captures=True, both_ways=True),
        Backend("flex_attention", flex_relative_attention, why_not=_why_not_flex, follows_order=True, both_ways=True),
    )
}
# In a copy of this file beside weights: the kernels of the package, if it was imported first. An attribute identifies
# them, because their class is the package's `Backend`.
BACKENDS |= {name: entry for name, entry in ALL_ATTENTION_FUNCTIONS.items() if hasattr(entry, "suits")}


def register(backend: Backend) -> None:
    """Add a backend to `BACKENDS`, and to transformers' `AttentionInterface`, where copies of this file find it."""
    BACKENDS[backend.name] = backend
    AttentionInterface.register(backend.name, backend)


def find_backend(name: str, module: nn.Module | None = None) -> Backend:
    """The backend of this name, or one of a user's function in `AttentionInterface`, with `additive_mask` as its mask.

    Raises:
        ValueError: no backend has the name, or the function is transformers' own, which would leave out the distances.
    """
    if name in BACKENDS:
        return BACKENDS[name]
    if name not in ALL_ATTENTION_FUNCTIONS:
        if name.startswith("txl_"):
            raise ValueError(
                f"attn_implementation={name!r} is a kernel of the package: pip install txl-hf, and import txl_hf"
            )
        raise ValueError(
            f"attn_implementation={name!r} is not one of {', '.join(BACKENDS)}, nor registered in AttentionInterface"
        )
    function = ALL_ATTENTION_FUNCTIONS[name]
    if hasattr(function, "suits"):
        return function
    if function.__module__.startswith("transformers."):
        raise ValueError(f"attn_implementation={name!r} knows no relative positions: use one of {', '.join(BACKENDS)}")

    def run(inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        query, mask = add_bias(inputs.query, inputs.content_bias), additive_mask(inputs)
        options = {"dropout": inputs.dropout, "scaling": inputs.scaling, "is_causal": False}
        attended, probabilities = function(module, query, inputs.key, inputs.value, mask, **options)
        return attended.transpose(1, 2), probabilities

    return Backend(name, run, follows_order=True, both_ways=True)


def working_dtype(states: Tensor) -> torch.dtype:
    """The type in which products of these states, (…), are computed: autocast's where it is on, else their own."""
    device = states.device.type
    autocasts = device not in WITHOUT_AUTOCAST and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocasts else states.dtype


class Operators:
    """The model's other operations in their plain form; `txl_hf.kernels` sets faster ones with the same results."""

    @staticmethod
    def linear(layer: nn.Module, states: Tensor) -> Tensor:
        """(…, k) → (…, n) by a linear layer, which may be quantised, adapted or offloaded."""
        return layer(states)

    @staticmethod
    def linear_after(memory: Tensor | None, states: Tensor, layers: list[nn.Module]) -> list[Tensor]:
        """[memory, states], (B, m, k) and (B, L, k), by each of the linear layers: (B, m + L, n) each."""
        if memory is not None:
            states = torch.cat([memory.to(states.dtype), states], dim=1)
        return [layer(states) for layer in layers]

    # (…, k), (n, k) and (n,) → (…, n).
    product: Callable[..., Tensor] = staticmethod(F.linear)
    # (…, L, k) and (…, k, n) → (…, L, n).
    matmul: Callable[..., Tensor] = staticmethod(torch.matmul)
    scaled_dot_product_attention: Callable[..., Tensor] = staticmethod(F.scaled_dot_product_attention)

    @staticmethod
    def keep_layout(rel_key: Tensor) -> Tensor:
        """(H, n, Dh) in the layout in which a cache stores it, for many products with one query."""
        return rel_key.contiguous()

    # Losses of many logits, block by block: see `AdaptiveLogSoftmax.nll`. None: all logits at once.
    sort_targets: Callable[..., Any] | None = None
    nll: Callable[..., Tensor] | None = None
    # `generate` by a CUDA graph, see `GenerationMixin._sample`. None, or a result of None: by transformers' loop.
    decode: Callable[..., Tensor | None] | None = None
    # Log-probabilities of which the best are exact, see `AdaptiveLogSoftmax.log_prob`. None: all are.
    log_prob: Callable[..., Tensor] | None = None
    # M + 1 → a layer of `MemoryCache`.
    cache_layer: Callable[[int], Any] = DynamicSlidingWindowLayer
    # (configuration, M) → the cache of `cache_implementation="static"`. None: transformers' own.
    static_cache: Callable[..., Any] | None = None

    @staticmethod
    def loop_options(processors: Any, config: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Further arguments of the model in a loop of `generate`: `logits_top_k` where few tokens can be chosen."""
        return {}

    @staticmethod
    def dropout(module: nn.Module, states: Tensor) -> Tensor:
        """`module(states)`, (…)."""
        return module(states)

    @staticmethod
    def relu_dropout(module: nn.Module, states: Tensor) -> Tensor:
        """`module(states.relu())`, (…)."""
        return module(states.relu())


OPERATORS = Operators()
