r"""Relative attention (Transformer-XL, Section 3.3) behind one signature for every backend.

The score of query i for key j is, in the paper's letters,

    A_ij = q_i·k_j  +  q_i·W_R R_(i-j)  +  u·k_j  +  v·W_R R_(i-j)
           (a)         (b)                (c)        (d)

With `query` = q, `key` = k, `rel_key` = W_R R, `content_bias` = u and `position_bias` = v, the terms (a) + (c) are
(q + u)·k and (b) + (d) are (q + v)·W_R R. The latter depend on i - j alone, so they are computed once per distance and
shifted into place (Appendix B).

Shapes: B batch, H heads, Dh head width, L queries (the segment), K = m + L keys (memory, then segment).
"""

import contextlib
import functools
import math
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from .attention_transfo_xl_cpu import attend_tile_by_tile
from .attention_transfo_xl_inputs import (
    AttentionInputs,
    first_repeated,
    hidden_keys,
    keep_documents_apart,
    visible_keys,
)
from .attention_transfo_xl_triton import triton_relative_attention, why_not_triton
from .linear_transfo_xl import is_by_intel, is_plain, is_transformed, reads_columns_sooner

__all__ = [
    "RELATIVE_ATTENTION_FUNCTIONS",
    "AttentionInputs",
    "AttentionTerms",
    "attention_terms",
    "check_implementation",
    "fastest_attention",
    "follows_order",
    "hidden_keys",
    "relative_attention",
    "relative_shift",
    "visible_keys",
    "why_not",
]

logger = logging.get_logger(__name__)

# Numbers of queries and keys that FlexAttention is compiled for, where PyTorch has eight: a memory that grows has one
# after the other, and whatever came after the last would hold L × K numbers.
FLEX_LENGTHS = 64
FLEX_WIDTH_ON_CPU = 32


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


def eager_relative_attention(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """The reference: every score is materialised, so the probabilities can be returned."""
    scores, by_distance = _content_scores(inputs), _position_scores(inputs)
    scores = _hide(scores if by_distance is None else scores + by_distance, inputs)
    wide = torch.promote_types(scores.dtype, torch.float32)
    probabilities = F.softmax(scores, dim=-1, dtype=wide).to(inputs.value.dtype)
    if inputs.dropout > 0:
        probabilities = F.dropout(probabilities, inputs.dropout)
    return _product(probabilities, inputs.value), probabilities


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, (…, L, n) of (…, L, k) and (…, k, n).

    One row reads all of b for little arithmetic. In a graph it is written as what a compiler can make one kernel of
    with all that follows, where a product would be a kernel of its own. And on a CPU keys are read row after row, each
    for one number, which takes a fifth less time than as columns, in bf16 half of it; but see `reads_columns_sooner`.
    """
    if a.shape[-2] > 1:
        return a @ b
    if not torch.compiler.is_compiling():
        by_rows = a.is_cpu and b.stride(-2) == 1 and not reads_columns_sooner(a)
        return (b.transpose(-1, -2) @ a.transpose(-1, -2)).transpose(-1, -2) if by_rows else a @ b
    wide = torch.promote_types(a.dtype, torch.float32)
    return (a.transpose(-1, -2).to(wide) * b.to(wide)).sum(dim=-2, keepdim=True).to(a.dtype)


class AttentionTerms(NamedTuple):
    """The score of each query for each key as the sum of what it is made of: (B, H, L, K) each, 0 where not visible.

    Args:
        content: (a), q_i·k_j. position: (b), q_i·W_R R. content_bias: (c), u·k_j.
        position_bias: (d), v·W_R R, or the learned score per distance.
        visible: (B or 1, 1, L, K) bool, which key each query may attend to. The attention probabilities are the
            softmax over visible keys of the terms' sum.
    """

    content: Tensor
    position: Tensor
    content_bias: Tensor
    position_bias: Tensor
    visible: Tensor


def attention_terms(inputs: AttentionInputs) -> AttentionTerms:
    """The four terms of A_ij (Section 3.3) one by one, scaled; what `inputs` lacks is 0. See `relative_attention`.

    A model's inputs are what a backend of one's own is called with: enter it in `RELATIVE_ATTENTION_FUNCTIONS`.
    """
    (B, H, L, _), K = inputs.query.shape, inputs.key.shape[2]
    visible = visible_keys(L, K, inputs.window, inputs.key_mask, inputs.query.device, inputs.first_key)
    visible = _in_order(visible, inputs)
    # What is left of the scores where the queries are zeros is what the biases give.
    biases = inputs._replace(query=torch.zeros_like(inputs.query))
    found = (
        _content_scores(inputs._replace(content_bias=None)),
        _position_scores(inputs._replace(position_bias=None, rel_bias=None)),
        _content_scores(biases),
        _position_scores(biases),
    )
    nothing = inputs.query.new_zeros(B, H, L, K)
    a, b, c, d = (nothing if scores is None else scores.masked_fill(~visible, 0) for scores in found)
    return AttentionTerms(content=a, position=b, content_bias=c, position_bias=d, visible=visible)


def sdpa_relative_attention(inputs: AttentionInputs) -> tuple[Tensor, None]:
    """PyTorch's scaled_dot_product_attention, with (b) + (d) as its additive mask."""
    query, mask = _add_bias(inputs.query, inputs.content_bias), _additive_mask(inputs)
    attend = _attend_on_gpu if query.is_cuda else F.scaled_dot_product_attention
    return attend(query, inputs.key, inputs.value, mask, dropout_p=inputs.dropout, scale=inputs.scaling), None


_CHOOSING_KERNEL = threading.Lock()


def _attend_on_gpu(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options) -> Tensor:
    """PyTorch's attention by the kernel that takes an additive mask as it comes.

    cuDNN plans anew for every number of keys, which takes longer than the attention; the other fused kernel wants
    heads of a multiple of eight numbers, and for others all scores would be written out in fp32 several times.
    """
    width = query.shape[-1]
    query, key, value = _widened(-width % 8, query, key, value)
    # PyTorch keeps the choice for the whole process, and puts back what it found at the end. A graph has it inside.
    choosing = contextlib.nullcontext() if torch.compiler.is_compiling() else _CHOOSING_KERNEL
    with choosing, sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        attended = F.scaled_dot_product_attention(query, key, value, mask, **options)
    return attended[..., :width]


def _widened(missing: int, *heads: Tensor) -> tuple[Tensor, ...]:
    """Heads with so many zeros more, which change no score."""
    return tuple(F.pad(states, (0, missing)) for states in heads) if missing else heads


def tiled_relative_attention(inputs: AttentionInputs) -> tuple[Tensor, None]:
    """On CPU, one head of one row of the batch at a time, so that its scores stay in the processor's cache.

    Raises:
        ValueError: there is no rel_key.
    """
    query, rel_key = inputs.query, inputs.rel_key
    if rel_key is None:
        raise ValueError("tiles are for relative positions, and there is no rel_key")
    found = inputs.hidden_keys()
    if found is None:
        hidden = query.new_zeros(1, query.shape[2], 1)
    else:
        hidden = query.new_zeros(found[:, 0].shape).masked_fill_(found[:, 0], -torch.inf)
    content_query, position_query = (
        _add_bias(query, bias, inputs.scaling) for bias in (inputs.content_bias, inputs.position_bias)
    )
    attended = attend_tile_by_tile(
        content_query, position_query, inputs.key, inputs.value, rel_key, hidden, inputs.dropout
    )
    return attended, None


def _why_not_tiled(inputs: AttentionInputs) -> str | None:
    if inputs.query.device.type != "cpu":
        return f"the tensors are on {inputs.query.device.type}, not on a CPU"
    if inputs.query.dtype == torch.float16:
        return "tiles are not computed in torch.float16"
    if inputs.rel_key is None or inputs.rel_bias is not None:
        return "tiles are for sinusoidal relative positions only"
    if not is_plain(inputs.query, inputs.key, inputs.value, inputs.rel_key):
        return "a loop over heads and rows is no graph, and nothing for torch.func or forward mode"
    if len({states.dtype for states in (inputs.query, inputs.key, inputs.value, inputs.rel_key)}) > 1:
        return "the tensors are of several types"
    if torch.is_autocast_enabled("cpu") and inputs.query.dtype != torch.get_autocast_dtype("cpu"):
        return "tiles know nothing of autocast"
    return None


def flex_relative_attention(inputs: AttentionInputs) -> tuple[Tensor, None]:
    """PyTorch's FlexAttention, compiled, with (b) + (d) as a captured L × K tensor."""
    bias = _additive_mask(inputs)

    def add_bias(score, b, h, i, j):
        return score + bias[b, h, i, j]

    query = _add_bias(inputs.query, inputs.content_bias)
    width = query.shape[-1]
    # On CPU PyTorch 2.13 reads what nobody wrote where heads of 16 or fewer numbers meet 24, 40, 56, … keys.
    missing = FLEX_WIDTH_ON_CPU - width if query.device.type == "cpu" and width <= 16 else 0
    states = _widened(missing, query, inputs.key, inputs.value)
    graph = torch.compiler.is_compiling()
    with contextlib.nullcontext() if graph else _compiling_for_many_lengths():
        attended = _compiled_flex_attention()(*states, score_mod=add_bias, scale=inputs.scaling)
    return attended[..., :width], None


def _compiling_for_many_lengths() -> contextlib.AbstractContextManager:
    config = torch._dynamo.config
    # The limit's name in PyTorch 2.6, by which newer versions know it too.
    return config.patch(cache_size_limit=max(FLEX_LENGTHS, config.cache_size_limit))


@functools.cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


_FLEX_ON_CPU = (torch.float32, torch.bfloat16, torch.float16)


def _why_not_flex(inputs: AttentionInputs) -> str | None:
    if inputs.dropout > 0:
        return "FlexAttention has no dropout of probabilities"
    if inputs.query.shape[2] == 1:
        return "it compiles for each number of keys, and of a single query there is a new one at each token"
    if inputs.query.device.type == "cpu" and _needs_gradient(inputs.query):
        return "FlexAttention has no backward on CPU"
    if inputs.query.device.type == "cpu" and inputs.query.dtype not in _FLEX_ON_CPU:
        return f"FlexAttention computes nothing in {inputs.query.dtype} on CPU"
    if inputs.query.device.type == "cuda" and inputs.query.shape[-1] < 16:
        return f"heads are {inputs.query.shape[-1]} wide, and FlexAttention wants 16 at least on a GPU"
    return None


def auto_relative_attention(inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
    """The default: PyTorch's fused attention, and on CPU whatever is fastest there for these inputs."""
    return RELATIVE_ATTENTION_FUNCTIONS[_fastest(inputs)](inputs)


def _fastest(inputs: AttentionInputs) -> str:
    query, tensors = inputs.query, (given for given in inputs if isinstance(given, Tensor))
    if not torch.compiler.is_compiling() and is_transformed(*tensors):
        # PyTorch's fused attention has no tangent, and what vmap maps over does not say whether it needs a gradient.
        return "eager"
    if query.device.type != "cpu":
        # One query has so few scores that plain products do, without a plan for every number of keys.
        return "eager" if query.shape[2] == 1 else "sdpa"
    if inputs.rel_key is None:
        return "sdpa"
    # A checkpoint goes through dropout without a gradient first, and must draw as it does with one.
    trained = _needs_gradient(query) or inputs.dropout > 0
    # Small tiles are done sooner all at once.
    large = query.shape[2] * inputs.key.shape[2] >= 1 << 14
    if large and why_not("txl_tiles", inputs) is None and _tiles_pay(query.dtype, trained):
        return "txl_tiles"
    # With a mask that needs a gradient, PyTorch has no fused path on CPU, and its plain one is slower than ours.
    return "eager" if trained or _is_read_plainly(query, inputs.key) else "sdpa"


# From how many numbers of a row's keys on plain products read them sooner for a single query than the fused attention
# does: in a tenth less time, and in bf16 in less than half of it. On Intel's CPUs they take more, in bf16 twice it.
_MANY = {torch.float32: 1 << 20, torch.bfloat16: 1 << 16}


def _is_read_plainly(query: Tensor, key: Tensor) -> bool:
    """Whether each row has one query for many keys.

    A graph is not asked, which would be bound to how many there are. And rows are not counted together: in bf16 a text
    would be read otherwise beside others than alone.
    """
    many = _MANY.get(query.dtype, math.inf)
    return query.shape[2] == 1 and is_plain(query, key) and key.numel() >= many * len(key) and not is_by_intel()


def _tiles_pay(dtype: torch.dtype, trained: bool) -> bool:
    """Whether large tiles are faster than the alternatives in this type.

    In bf16 a product takes less time than a pass over the scores: without a gradient the fused attention is faster,
    and with one eager was so on AMD's CPUs.
    """
    return dtype == torch.float32 or (dtype == torch.bfloat16 and trained and is_by_intel())


def _needs_gradient(query: Tensor) -> bool:
    return torch.is_grad_enabled() and query.requires_grad


def _add_bias(query: Tensor, bias: Tensor | None, scaling: float = 1.0) -> Tensor:
    """(query + bias) · scaling, in one pass over the queries."""
    if bias is None:
        return query if scaling == 1 else query * scaling
    bias = bias[:, None].to(query.dtype)
    return query + bias if scaling == 1 else torch.add(bias * scaling, query, alpha=scaling)


def _content_scores(inputs: AttentionInputs) -> Tensor:
    """(a) + (c): (B, H, L, K)."""
    query = _add_bias(inputs.query, inputs.content_bias) * inputs.scaling
    return _product(query, inputs.key.transpose(-1, -2))


def _position_scores(inputs: AttentionInputs) -> Tensor | None:
    """(b) + (d), or (b) and a score per distance, or that alone: (B, H, L, K). None: nothing tells of distances."""
    query, rel_key, rel_bias = inputs.query, inputs.rel_key, inputs.rel_bias
    (B, _, L, _), K = query.shape, inputs.key.shape[2]
    if rel_key is None:
        if rel_bias is None:
            return None
        scores = first_repeated(rel_bias, K + 1).to(query.dtype)[:, None].expand(-1, L, -1) * inputs.scaling
        return _in_order(relative_shift(scores), inputs).repeat(B, 1, 1, 1)
    if L > 1:
        # Whatever the spare column holds: a row that is there already takes less time than zeros.
        rel_key = first_repeated(rel_key, K + 1)
        rel_bias = None if rel_bias is None else first_repeated(rel_bias, K + 1)
    # One product for each head, whatever the batch: the distances are everybody's.
    queries = (_add_bias(query, inputs.position_bias) * inputs.scaling).transpose(0, 1).flatten(1, 2)
    scores = _product(queries, rel_key.transpose(1, 2)).unflatten(1, (B, L))
    if rel_bias is not None:
        scores = scores + rel_bias[:, None, None].to(scores.dtype) * inputs.scaling
    if L > 1:
        return relative_shift(scores).transpose(0, 1)
    # Of a single query it is the scores that are repeated: reading a row takes longer than its product.
    return _in_order(first_repeated(scores, K, dim=-1), inputs).transpose(0, 1)


def _in_order(by_time: Tensor, inputs: AttentionInputs) -> Tensor:
    """Scores (…, L, K) of the keys in order of time, for the keys as they lie."""
    return by_time if inputs.order is None else by_time.index_select(-1, inputs.order)


def _additive_mask(inputs: AttentionInputs) -> Tensor:
    """What is added to the scores of contents: (B, H, L, K), scaled; minus infinity where a key is not seen."""
    by_distance = _position_scores(inputs)
    if by_distance is not None:
        return _hide(by_distance, inputs)
    (B, H, L, _), K = inputs.query.shape, inputs.key.shape[2]
    return _hide(inputs.query.new_zeros(B, 1, L, K), inputs).expand(B, H, L, K)


def _hide(scores: Tensor, inputs: AttentionInputs) -> Tensor:
    """Set the scores (B, H, L, K) of keys that a query does not see to minus infinity, in place."""
    hidden = inputs.hidden_keys()
    if hidden is not None:
        scores[..., scores.shape[-1] - hidden.shape[-1] :].masked_fill_(hidden, -torch.inf)
    return scores


def _why_not_triton(inputs: AttentionInputs) -> str | None:
    if inputs.rel_key is None and inputs.rel_bias is not None:
        return "its kernels take a score per distance beside a key per distance only"
    return why_not_triton(inputs.query)


def fastest_attention(heads: int, width: int, device: torch.device | str = "cuda") -> str | None:
    """What a command takes for heads so wide, in half precision: kernels of Triton on a GPU that they run on, which
    are compiled first; None: the default."""
    if not torch.cuda.is_available():
        return None
    query = torch.empty(1, heads, 1, width, dtype=torch.bfloat16, device=device)
    return "txl_triton" if why_not_triton(query) is None else None


RELATIVE_ATTENTION_FUNCTIONS: dict[str, Callable[[AttentionInputs], tuple[Tensor, Tensor | None]]] = {
    "auto": auto_relative_attention,
    "eager": eager_relative_attention,
    "sdpa": sdpa_relative_attention,
    "txl_tiles": tiled_relative_attention,
    "flex_attention": flex_relative_attention,
    "txl_triton": triton_relative_attention,
}

# Under these names backends take fewer distances than keys; those that users enter are given all.
_OURS = tuple(RELATIVE_ATTENTION_FUNCTIONS)

_WHY_NOT: dict[str, Callable[[AttentionInputs], str | None]] = {
    "txl_tiles": _why_not_tiled,
    "flex_attention": _why_not_flex,
    "txl_triton": _why_not_triton,
}


def why_not(implementation: str, inputs: AttentionInputs) -> str | None:
    """The reason why a backend cannot take these inputs, so that the default does; None if it can."""
    if inputs.order is not None and not follows_order(implementation):
        return "it takes keys in order of time"
    return _WHY_NOT[implementation](inputs) if implementation in _WHY_NOT else None


def check_implementation(name: str):
    """Raise a ValueError unless this is a backend of ours, or a function that a user has registered in transformers'
    `AttentionInterface`. Transformers' own there take a mask to be of padding alone, and leave out the distances."""
    if name in RELATIVE_ATTENTION_FUNCTIONS:
        return
    known = ", ".join(RELATIVE_ATTENTION_FUNCTIONS)
    if name not in ALL_ATTENTION_FUNCTIONS:
        raise ValueError(f"attn_implementation={name!r} is not one of {known}, nor registered in AttentionInterface")
    if ALL_ATTENTION_FUNCTIONS[name].__module__.startswith("transformers."):
        raise ValueError(f"attn_implementation={name!r} knows no relative positions: use one of {known}")


def follows_order(implementation: str) -> bool:
    """Whether a backend takes keys that are not in order of time, `order`: ours that add up scores, and those of users
    in `AttentionInterface`, who are given the sum. What users enter among ours may know nothing of it."""
    return implementation in _FOLLOW_ORDER or implementation not in RELATIVE_ATTENTION_FUNCTIONS


_FOLLOW_ORDER = ("auto", "eager", "sdpa", "flex_attention")


def _registered_attention(
    function: Callable, inputs: AttentionInputs, module: nn.Module | None
) -> tuple[Tensor, Tensor | None]:
    attended, probabilities = function(
        module,
        _add_bias(inputs.query, inputs.content_bias),
        inputs.key,
        inputs.value,
        _additive_mask(inputs),
        dropout=inputs.dropout,
        scaling=inputs.scaling,
        is_causal=False,
    )
    return attended.transpose(1, 2), probabilities


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
    first_key: Tensor | None = None,
    order: Tensor | None = None,
    hidden: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    implementation: str = "eager",
    module: nn.Module | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Multi-head attention with relative positions; the queries are the last L of the K keys' positions.

    Args:
        query: (B, H, L, Dh). key, value: (B, H, K, Dh), K ≥ L.
        rel_key: (H, n, Dh), n ≤ K, W_R R with the furthest distance first: row c belongs to distance n - 1 - c, and
            the first one to all that are further too, as `clamp_len` has it. None: attention without positions (the
            absolute baselines add theirs to the hidden states).
        content_bias: (H, Dh), u. position_bias: (H, Dh), v.
        rel_bias: (H, n), a learned score per distance, rows as in `rel_key`; takes the place of v·W_R R in
            `attn_type=1`, as in the authors' code; the paper gives the encoding of Shaw et al. (a) and (b) alone.
        key_mask: (B, K) bool, False where a key is padding.
        window: the furthest distance a query sees; None: all keys up to itself.
        first_key: (B, L) int, the first key that a query sees, because a document begins there: it never decreases
            along a row, nor exceeds the query's own key. None: 0.
        order: (K,) int, with L = 1: the place in time of each key and value, 0 the oldest, where these lie in another
            order, as in a ring; `rel_key`, mask and first key are in order of time. Where a backend takes none
            (`follows_order`), the default does. None: keys and values are in order of time.
        hidden: what `hidden_keys` says of mask, window, first keys and order, where many layers share them. None: it
            is asked here, by backends that want to know.
        scaling: factor of all scores, by default Dh ** -0.5.
        dropout: probability of dropping an attention probability.
        implementation: a name in `RELATIVE_ATTENTION_FUNCTIONS`. What a backend cannot do (`why_not`) goes to the
            default, `"auto"`, with one warning. Or the name of a function of your own in transformers'
            `AttentionInterface`: its mask is (b) + (d), (B, H, L, K), minus infinity where a key is not seen.
        module: the layer's attention, which such a function is called with.

    Returns:
        The attended values (B, H, L, Dh), and the probabilities (B, H, L, K) where the backend has them, else None.

    Raises:
        ValueError: `implementation` is unknown, or one of transformers' own that takes no scores of distances.
    """
    check_implementation(implementation)
    inputs = AttentionInputs(
        query,
        key,
        value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        dropout=dropout,
        rel_key=rel_key,
        content_bias=content_bias,
        position_bias=position_bias,
        rel_bias=rel_bias,
        key_mask=key_mask,
        window=window,
        first_key=first_key,
        order=order,
        hidden=hidden,
    )
    inputs, broken = keep_documents_apart(inputs)
    attended, probabilities = _attend(implementation, inputs, module)
    if broken is None:
        return attended, probabilities
    attended = attended.masked_fill(broken, torch.nan)
    return attended, None if probabilities is None else probabilities.masked_fill(broken, torch.nan)


def _attend(implementation: str, inputs: AttentionInputs, module: nn.Module | None) -> tuple[Tensor, Tensor | None]:
    if implementation not in RELATIVE_ATTENTION_FUNCTIONS:
        return _registered_attention(ALL_ATTENTION_FUNCTIONS[implementation], inputs, module)
    if reason := why_not(implementation, inputs):
        logger.warning_once(f"attn_implementation={implementation!r} falls back to 'auto': {reason}")
        implementation = "auto"
    if implementation not in _OURS:
        inputs = inputs.of_every_distance()
    return RELATIVE_ATTENTION_FUNCTIONS[implementation](inputs)
