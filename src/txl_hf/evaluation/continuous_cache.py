"""A continuous cache (Grave et al., 2017, https://arxiv.org/abs/1612.04426): tokens that followed similar states."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor

from ..data.streams import check_sizes
from ..transfo_xl.modeling_transfo_xl import TransfoXLForCausalLM
from .reading import Segment


@dataclass(frozen=True)
class ContinuousCache:
    """A mixture of the model's probabilities with those of the tokens that followed similar states in the same text.

    With hₜ the state that enters the softmax to predict token t + 1,

        p = (1 - λ) p_model + λ p_cache,    p_cache(w) ∝ Σ exp(θ hₜ·hᵢ) over i in [t - size, t) whose next token is w

    (equations 2 to 4 and 6). Nothing is learned. The first token of a text has the model's probability, because there
    is no state before it.

    Args:
        size: ≥ 1, the number of past positions in the cache, perhaps far more than in the memory: each costs one
            state.
        weight: λ in [0, 1).
        temperature: θ ≥ 0; it multiplies. With 0, p_cache is the share that a token had of the last `size`.

    Raises:
        ValueError: a number is out of range.
    """

    size: int
    weight: float
    temperature: float

    def __post_init__(self):
        check_sizes(size=self.size)
        if not (isinstance(self.weight, Real) and 0 <= self.weight < 1):
            raise ValueError(f"weight={self.weight!r} must be a number at least 0 and below 1")
        if not (isinstance(self.temperature, Real) and 0 <= self.temperature < math.inf):
            raise ValueError(f"temperature={self.temperature!r} must be a finite number at least 0")

    def describe(self) -> dict[str, float | int]:
        """The settings, for JSON."""
        return asdict(self)

    @contextmanager
    def processor(self, model: TransfoXLForCausalLM) -> Iterator["CacheLogitsProcessor"]:
        """A logits processor for `generate`, whose cache holds the states of the prompt and of the tokens written:

            with ContinuousCache(500, 0.1, 1.0).processor(model) as processor:
                model.generate(prompt, logits_processor=[processor])

        A hook collects the states, so that nothing else may call the model meanwhile.
        """
        processor = CacheLogitsProcessor(self, model)
        try:
            yield processor
        finally:
            processor.close()

    def mix(self, log_model: Tensor, log_cache: Tensor) -> Tensor:
        """log p, from log p_model and log p_cache of the same tokens; log p_model where log p_cache is NaN (empty)."""
        log_weight = math.log(self.weight) if self.weight > 0 else -math.inf
        mixed = torch.logaddexp(log_model + math.log1p(-self.weight), log_cache + log_weight)
        return torch.where(log_cache.isnan(), log_model, mixed)


class History:
    """The last states of B streams that are read side by side, with the tokens that followed them, for several caches.
    None among these is no cache: the losses are the model's."""

    def __init__(self, caches: Sequence[ContinuousCache | None]):
        self._caches = caches
        self._size = max((cache.size for cache in caches if cache is not None), default=0)
        self._states: Tensor | None = None
        self._tokens: Tensor | None = None

    def mix(self, segment: Segment, hidden_states: Tensor, losses: Tensor) -> list[Tensor]:
        """For each cache the (B, L) losses of the mixture, 0 where unscored, from (B, L, D) states that predict the
        targets and (B, L) fp32 losses of the model; appends the segment."""
        if self._size == 0:
            return [losses] * len(self._caches)
        states, labels = hidden_states.float(), segment.labels.to(hidden_states.device)
        if self._states is None or self._tokens is None:
            self._states, self._tokens = states[:, :0], labels[:, :0]
        keys = torch.cat([self._states, states], dim=1)
        tokens = torch.cat([self._tokens, labels], dim=1)
        looked_at, finite = _finite(keys)
        # Without autocast of the caller, which would multiply fp32 states in half precision.
        with torch.autocast(states.device.type, enabled=False):
            products = states @ looked_at.transpose(1, 2)
        followed = tokens[:, None] == labels[..., None]
        log_probs = {
            (size, temperature): _log_cache(products * temperature, followed, finite, size)
            for size, temperature in {(cache.size, cache.temperature) for cache in self._caches if cache is not None}
        }
        self._states, self._tokens = keys[:, -self._size :], tokens[:, -self._size :]
        unscored = segment.targets.to(losses.device) == -100
        return [
            losses
            if cache is None
            else -cache.mix(-losses, log_probs[cache.size, cache.temperature].to(losses.device)).masked_fill(
                unscored, 0
            )
            for cache in self._caches
        ]


def _finite(states: Tensor) -> tuple[Tensor, Tensor]:
    """(B, n, D) states with zeros for non-finite ones, as after an overflow; and (B, n) bool, True where finite."""
    finite = states.isfinite().all(-1)
    return states.masked_fill(~finite[..., None], 0), finite


def _log_cache(scores: Tensor, followed: Tensor, finite: Tensor, size: int) -> Tensor:
    """log p_cache of the target of each query, (B, L); NaN where no position is in the cache.

    Args:
        scores: (B, L, n + L), of the L queries with the n positions before them and with one another.
        followed: the same shape, bool: whether the query's target followed. finite: (B, n + L) bool, of the states.
    """
    length, before = scores.shape[1], scores.shape[2] - scores.shape[1]
    # Query l is position n + l, and its cache holds positions n + l - size to n + l - 1.
    band = torch.ones(length, before + length, dtype=torch.bool, device=scores.device)
    band = band.tril(before - 1).triu(before - size)
    scores = scores.masked_fill(~(band & finite[:, None]), -math.inf)
    return scores.masked_fill(~followed, -math.inf).logsumexp(-1) - scores.logsumexp(-1)


class CacheLogitsProcessor(LogitsProcessor):
    """Mixes the scores of `generate` with a cache; `ContinuousCache.processor` makes it.

    It supports greedy search and sampling from `input_ids`, in one call of `generate` at a time. A text that begins
    with the last one continues it; any other is a new text. Positions that `attention_mask` hides, or whose next token
    it hides, are left out. A token that an earlier processor has set to -inf stays there.
    """

    def __init__(self, cache: ContinuousCache, model: TransfoXLForCausalLM):
        self._cache = cache
        self._hook = model.transformer.register_forward_hook(self._remember, with_kwargs=True)
        # The last text (B, n), and the states (B, k, D) of its last k <= size + 1 tokens, NaN where they are hidden.
        self._text: Tensor | None = None
        self._states: Tensor | None = None
        self._forget_new()

    def close(self):
        """Remove the hook from the model, and drop all states."""
        self._hook.remove()
        self._text = self._states = None
        self._forget_new()

    def _forget_new(self):
        # The states of the calls since the last token, their number of positions, and the mask of the last call.
        self._new: Tensor | None = None
        self._count, self._mask = 0, None

    # A compiled forward would keep tensors in the memory of its graph.
    @torch.compiler.disable
    def _remember(self, transformer: nn.Module, args: tuple, kwargs: dict[str, Any], outputs: Any):
        self._mask = kwargs.get("attention_mask")
        # A copy, because a captured graph writes its outputs to the same memory at every call.
        states = _hide(outputs[0].detach().to(torch.float32, copy=True), self._mask)
        self._count += states.shape[1]
        if self._new is not None and len(self._new) == len(states):
            states = torch.cat([self._new, states], dim=1)
        self._new = states[:, -self._cache.size - 1 :]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V) log-probabilities of the mixture, -inf where `scores` are, for the next token of a text, (B, n).
        Raises a RuntimeError unless the model has computed one state for each token of the text or of its
        continuation."""
        states, finite = _finite(self._states_of(input_ids))
        log_model = scores.log_softmax(-1)
        looked_at = finite[:, :-1] & finite[:, 1:]
        if looked_at.shape[1] == 0:
            return log_model
        with torch.autocast(states.device.type, enabled=False):
            products = torch.einsum("bnd,bd->bn", states[:, :-1], states[:, -1]) * self._cache.temperature
        # A softmax over no position is NaN, which `mix` reads as an empty cache.
        shares = products.masked_fill(~looked_at, -math.inf).softmax(-1)
        cached = torch.zeros_like(log_model, dtype=torch.float32)
        cached.scatter_add_(1, input_ids[:, -shares.shape[1] :], shares)
        cached = cached.masked_fill(~looked_at.any(-1, keepdim=True), math.nan)
        return self._cache.mix(log_model, cached.log()).masked_fill(scores == -math.inf, -math.inf)

    def _states_of(self, input_ids: Tensor) -> Tensor:
        """(B, k, D) states of the last k <= size + 1 tokens of the text, NaN where they are hidden."""
        states, count, mask, length = self._new, self._count, self._mask, input_ids.shape[1]
        self._forget_new()
        if states is not None and count != length and self._text is not None and self._states is not None:
            known = self._text.shape[1]
            if count == length - known and torch.equal(self._text, input_ids[:, :known]):
                states, count = torch.cat([self._states, states.to(self._states.device)], dim=1), length
        if states is None or count != length or len(states) != len(input_ids):
            raise RuntimeError(
                f"the model has computed {count} states for a text of {length} tokens: a continuous cache goes with "
                "greedy search and sampling from input_ids, within `with cache.processor(model)`, and not with beam "
                "search, assisted generation or other calls of the model meanwhile"
            )
        states = _hide(states.to(input_ids.device), mask)
        self._text, self._states = input_ids, states[:, -self._cache.size - 1 :]
        return self._states


def _hide(states: Tensor, mask: Tensor | None) -> Tensor:
    """(B, n, D) states with NaN where a mask (B, m) is 0; their last columns are the same position."""
    if mask is None:
        return states
    known = min(states.shape[1], mask.shape[1])
    hidden = torch.zeros(states.shape[:2], dtype=torch.bool, device=states.device)
    hidden[:, -known:] = mask[:, -known:].to(states.device) == 0
    return states.masked_fill(hidden[..., None], math.nan)
