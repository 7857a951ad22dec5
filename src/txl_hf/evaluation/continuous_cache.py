"""A continuous cache (Grave et al., 2017, https://arxiv.org/abs/1612.04426): what followed similar states before."""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor

from ..data.streams import check_sizes
from ..transfo_xl.modeling_transfo_xl import TransfoXLForCausalLM
from .reading import Segment

__all__ = ["CacheLogitsProcessor", "ContinuousCache", "History"]


@dataclass(frozen=True)
class ContinuousCache:
    """How the model's probabilities are mixed with those of what followed similar states in the same text.

    With hₜ the state that enters the softmax to predict token t + 1,

        p = (1 - λ) p_model + λ p_cache,    p_cache(w) ∝ Σ exp(θ hₜ·hᵢ) over i in [t - size, t) whose next token is w

    (equations 2 to 4 and 6). Nothing is learned, and the weights stay as they are. The first token of a text, before
    which there is nothing to look at, has the model's probability. Of a segment only the probabilities of the targets
    are computed, in one product of its states with those before.

    Args:
        size: ≥ 1, below 2⁶², how many positions are looked at. It may be far longer than the memory: a position costs
            one state.
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
        if self.size >= 2**62:
            raise ValueError(f"size={self.size!r} must be below 2**62, which is more than any text has")
        if not (isinstance(self.weight, Real) and 0 <= self.weight < 1):
            raise ValueError(f"weight={self.weight!r} must be a number at least 0 and below 1")
        if not (isinstance(self.temperature, Real) and 0 <= self.temperature < math.inf):
            raise ValueError(f"temperature={self.temperature!r} must be a finite number at least 0")

    def describe(self) -> dict[str, float | int]:
        """The settings, for JSON."""
        return asdict(self)

    @contextmanager
    def processor(self, model: TransfoXLForCausalLM) -> Iterator["CacheLogitsProcessor"]:
        """For `generate`, with the states of the prompt and of what it writes:

            with ContinuousCache(500, 0.1, 1.0).processor(model) as processor:
                model.generate(prompt, logits_processor=[processor])

        While it is open, `generate` tells it every state that it computes; other calls of the model it does not hear.
        """
        processor = CacheLogitsProcessor(self, model)
        try:
            yield processor
        finally:
            processor.close()

    def mix(self, log_model: Tensor, log_cache: Tensor) -> Tensor:
        """log p, from log p_model and log p_cache of the same tokens; where that is NaN, the cache holds nothing."""
        log_weight = math.log(self.weight) if self.weight > 0 else -math.inf
        mixed = torch.logaddexp(log_model + math.log1p(-self.weight), log_cache + log_weight)
        return torch.where(log_cache.isnan(), log_model, mixed)


class History:
    """The last states of B streams that are read side by side, with the tokens that followed them.

    Several caches can look at the same states, which costs little more than one of them if sizes and temperatures are
    the same.
    """

    def __init__(self, caches: Sequence[ContinuousCache]):
        self._caches = caches
        self._size = max(cache.size for cache in caches)
        self._states: Tensor | None = None
        self._tokens: Tensor | None = None

    def mix(self, segment: Segment, hidden_states: Tensor, losses: Tensor) -> list[Tensor]:
        """For each cache the (B, L) losses of the mixture, 0 where unscored; the segment is remembered.

        Args:
            hidden_states: (B, L, D), the states that predict the targets. losses: (B, L) fp32, the model's.
        """
        states, labels = hidden_states.float(), segment.labels.to(hidden_states.device)
        if self._states is None or self._tokens is None:
            self._states, self._tokens = states[:, :0], labels[:, :0]
        keys = torch.cat([self._states, states], dim=1)
        tokens = torch.cat([self._tokens, labels], dim=1)
        looked_at, finite = _finite(keys)
        with _full_precision(states):
            products = states @ looked_at.transpose(1, 2)
        followed = tokens[:, None] == labels[..., None]
        log_probs = {
            (size, temperature): _log_cache(products * temperature, followed, finite, size)
            for size, temperature in {(cache.size, cache.temperature) for cache in self._caches}
        }
        self._states, self._tokens = keys[:, -self._size :], tokens[:, -self._size :]
        unscored = segment.targets.to(losses.device) == -100
        return [
            -cache.mix(-losses, log_probs[cache.size, cache.temperature].to(losses.device)).masked_fill(unscored, 0)
            for cache in self._caches
        ]


def _full_precision(states: Tensor) -> torch.autocast:
    """Without autocast of the caller, which would multiply fp32 states in half precision."""
    return torch.autocast(states.device.type, enabled=False)


def _finite(states: Tensor) -> tuple[Tensor, Tensor]:
    """(B, n, D) states with zeros for those that are not finite, as an overflow leaves them; and (B, n), which are."""
    finite = states.isfinite().all(-1)
    return states.masked_fill(~finite[..., None], 0), finite


def _log_cache(scores: Tensor, followed: Tensor, finite: Tensor, size: int) -> Tensor:
    """log p_cache of the target of each query, (B, L); NaN where there is nothing to look at.

    Args:
        scores: (B, L, n + L), of the L queries with the n positions before them and with one another.
        followed: the same shape, bool: whether the position was followed by the query's target.
        finite: (B, n + L) bool, the positions that can be looked at.
    """
    length, before = scores.shape[1], scores.shape[2] - scores.shape[1]
    # Query l is position n + l and looks at those from n + l - size to n + l - 1.
    band = torch.ones(length, before + length, dtype=torch.bool, device=scores.device)
    band = band.tril(before - 1).triu(before - size)
    scores = scores.masked_fill(~(band & finite[:, None]), -math.inf)
    return scores.masked_fill(~followed, -math.inf).logsumexp(-1) - scores.logsumexp(-1)


class CacheLogitsProcessor(LogitsProcessor):
    """Mixes the scores of `generate` with a cache; `ContinuousCache.processor` makes it.

    A position that `attention_mask` masks, or whose next token it masks, is not looked at, and a token that a
    processor before has ruled out stays so. Rows may be reordered, as beam search does: each is known by its tokens,
    and where several have the same, by its place. A text that does not continue the one before is a new one. Threads
    may share it: each hears what its own `generate` computes, and nothing else.
    """

    def __init__(self, cache: ContinuousCache, model: TransfoXLForCausalLM):
        self._cache = cache
        self._module: nn.Module | None = model.transformer
        self._here = _Hearing()
        # Of whichever thread: a dialogue may be continued in another.
        self._last: _Read | None = None

    def close(self):
        """Let go of the model and of all states."""
        self._module, self._here, self._last = None, _Hearing(), None

    def listen(self, model: nn.Module, beams: int) -> Callable[[Tensor, Tensor | None], None]:
        """What a loop of `generate` is to tell the states of each of its forwards, and their mask.

        Args:
            beams: among how many rows side by side the loop may reorder; 1: it keeps all in their places.

        Raises:
            RuntimeError: the processor is closed.
            ValueError: it is another model's.
        """
        if self._module is None:
            raise RuntimeError("the processor has not heard the model: use it within `with cache.processor(model)`")
        if model.transformer is not self._module:
            raise ValueError(
                "the processor belongs to another model: open one for this model with `cache.processor(model)`; a "
                "continuous cache does not go with assisted generation"
            )
        # What a loop that was stopped between a forward and its token has left.
        self._here.heard, self._here.mask, self._here.count, self._here.beams = None, None, 0, beams
        return self._hear

    # A compiled forward would not write to what belongs to a thread.
    @torch.compiler.disable
    def _hear(self, hidden_states: Tensor, attention_mask: Tensor | None):
        """Remember (B, L, D) states; of the mask (B, n), the last L columns are theirs."""
        here, keep, length = self._here, self._cache.size + 1, hidden_states.shape[1]
        # A copy, as a captured graph writes what it returns to the same place at every call.
        states = hidden_states[:, -keep:].detach().to(torch.float32, copy=True)
        real = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
        here.mask = None if attention_mask is None else attention_mask[:, -keep:].to(states.device).bool()
        if here.mask is not None:
            real = here.mask[:, -states.shape[1] :]
        here.count += length
        if here.heard is not None:
            states, real = (torch.cat(parts, dim=1) for parts in zip(here.heard, (states, real), strict=True))
        here.heard = states[:, -keep:], real[:, -keep:]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """
        Args:
            input_ids: (B, n), the text so far. scores: (B, V), of its next token.

        Returns:
            (B, V) log-probabilities of the mixture; -inf where `scores` are.
        """
        states, real = self._catch_up(input_ids)
        log_model = scores.log_softmax(-1)
        # At what an overflow has left nothing can be looked up.
        states, finite = _finite(states)
        looked_at = real[:, :-1] & real[:, 1:] & finite[:, :-1]
        if looked_at.shape[1] == 0:
            return log_model
        with _full_precision(states):
            products = torch.einsum("bnd,bd->bn", states[:, :-1], states[:, -1]) * self._cache.temperature
        # Where a row has nothing to look at, this is NaN, as the mixture expects it.
        shares = products.masked_fill(~looked_at, -math.inf).softmax(-1)
        cached = torch.zeros_like(log_model, dtype=torch.float32)
        cached.scatter_add_(1, input_ids[:, -shares.shape[1] :], shares)
        cached = cached.masked_fill(~looked_at.any(-1, keepdim=True), math.nan)
        return self._cache.mix(log_model, cached.log()).masked_fill(scores == -math.inf, -math.inf)

    def _catch_up(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(B, k, D) states of the last k ≤ size + 1 tokens of the text, and (B, k) whether these are real."""
        here, keep = self._here, self._cache.size + 1
        if here.heard is None:
            raise RuntimeError(
                "the processor has not heard the model: generate tells it the states where it samples or searches by "
                "beams, but a continuous cache does not go with assisted generation or a loop of one's own"
            )
        (states, real), count, mask = here.heard, here.count, here.mask
        here.heard, here.count = None, 0
        if count > input_ids.shape[1]:
            raise ValueError(
                f"the model computed {count} states for a text of {input_ids.shape[1]} tokens: a continuous cache "
                "needs the tokens of the text, so give generate input_ids, not inputs_embeds"
            )
        for before in (here.read, self._last):
            rows = None if before is None else _rows_of(input_ids[:, :-count], before.text, here.beams)
            if before is not None and rows is not None:
                states = torch.cat([before.states.index_select(0, rows).to(states.device), states], dim=1)
                real = torch.cat([before.real.index_select(0, rows).to(real.device), real], dim=1)
                break
        if mask is not None:
            # It may hide what was real to an earlier call, as the padding that ends a reply before others do.
            known = min(mask.shape[1], real.shape[1])
            real = torch.cat([real[:, : real.shape[1] - known], real[:, -known:] & mask[:, -known:]], dim=1)
        # Of a model on several devices, the last layer may lie elsewhere.
        states, real = states.to(input_ids.device), real.to(input_ids.device)
        here.read = self._last = _Read(input_ids, states[:, -keep:], real[:, -keep:])
        return here.read.states, here.read.real


class _Read(NamedTuple):
    """A text (B, n), and of its last k tokens the states (B, k, D) and whether they are real (B, k)."""

    text: Tensor
    states: Tensor
    real: Tensor


class _Hearing(threading.local):
    """What one thread has heard since its last token: `count` states, of which the last are kept, with the end of the
    last mask; and what it read.
    Its loop reorders rows among `beams` side by side."""

    def __init__(self) -> None:
        self.heard: tuple[Tensor, Tensor] | None = None
        self.mask: Tensor | None = None
        self.count = 0
        self.beams = 1
        self.read: _Read | None = None


def _rows_of(text: Tensor, before: Tensor, beams: int) -> Tensor | None:
    """For each row of a text the row of the one before that was this text; None where there is none.

    Rows with the same tokens can have other pasts, by their memory or padding. A row's own is that in its place, or
    else that of a beam of the same prompt.
    """
    if before.shape[1] != text.shape[1]:
        return None
    same = (text[:, None] == before).all(-1)
    if not bool(same.any(1).all()):
        return None
    rows, others = (torch.arange(len(ids), device=text.device) for ids in (text, before))
    place, prompt = rows[:, None] == others, rows[:, None] // beams == others // beams
    return (same * (1 + place.int() + prompt.int())).argmax(1)
