"""Perplexity and bits per token of a text, read segment by segment with memory."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..data.streams import check_sizes, describe_document_end
from ..transfo_xl.modeling_transfo_xl import TransfoXLForCausalLM
from .continuous_cache import ContinuousCache, History
from .dynamic import DynamicEvaluation, adapting, following
from .reading import Reader, Reading, Segment, Text, device_of, evaluating


@dataclass(frozen=True)
class LanguageModelEvaluation:
    """The negative log-likelihood of a text under a model, and the settings that it depends on.

    Attributes:
        nll: mean negative log-likelihood of a token, in nats.
        tokens: the number of scored tokens.
        text_tokens: the number of tokens of the text, with those that were read and not scored.
        segment_length, memory_length, batch_size, warm_up, ext_len, clamp_len, same_length: of this evaluation.
        dynamic: `DynamicEvaluation.describe` of its dynamic evaluation. None: a static one.
        cache: `ContinuousCache.describe` of its cache. None: the model alone.
        document_end: the token that ends documents, or the number of places that end them, with a hash. None: one
            document.
    """

    nll: float
    tokens: int
    text_tokens: int
    segment_length: int
    memory_length: int
    batch_size: int
    warm_up: int
    ext_len: int
    clamp_len: int
    same_length: bool
    dynamic: dict[str, Any] | None = None
    cache: dict[str, Any] | None = None
    document_end: int | str | None = None

    @property
    def perplexity(self) -> float:
        """exp(nll) of a token; infinite where that exceeds a float."""
        return perplexity(self.nll)

    @property
    def bits_per_token(self) -> float:
        """nll in bits: bits per character of a character-level model, whose text spells no special token."""
        return bits(self.nll)

    def perplexity_per_word(self, words: int) -> float:
        """Perplexity per word, which compares models whose tokens are not the same, from the number of words of the
        whole text. Tokens that were read and not scored are assumed to have the mean loss. Raises a ValueError unless
        `words` is a positive integer."""
        check_sizes(words=words)
        return perplexity(self.nll * self.text_tokens / words)

    def bits_per_character(self, characters: int) -> float:
        """Bits per character, from the number of characters (or bytes) of the whole text, as `perplexity_per_word`."""
        check_sizes(characters=characters)
        return self.bits_per_token * self.text_tokens / characters


def perplexity(nll: float) -> float:
    """exp of a mean negative log-likelihood in nats; infinite where that exceeds a float."""
    return math.inf if nll > 709 else math.exp(nll)


def bits(nll: float) -> float:
    """A negative log-likelihood in nats, in bits."""
    return nll / math.log(2)


def figures(nll: float, prefix: str = "") -> dict[str, float]:
    """A mean negative log-likelihood in nats as `perplexity` and `bits_per_token`, behind a prefix."""
    return {f"{prefix}perplexity": perplexity(nll), f"{prefix}bits_per_token": bits(nll)}


def evaluate_language_model(
    model: TransfoXLForCausalLM,
    token_ids,
    segment_length: int,
    memory_length: int | None = None,
    batch_size: int = 1,
    *,
    warm_up: int = 0,
    ext_len: int | None = None,
    clamp_len: int | None = None,
    same_length: bool | None = None,
    dynamic: DynamicEvaluation | None = None,
    cache: ContinuousCache | None = None,
    document_end: int | Sequence[int] | np.ndarray | None = None,
    accelerator: Any = None,
    progress: bool = False,
    memory: Mapping[str, Any] | None = None,
) -> LanguageModelEvaluation:
    """Score a text with memory.

    The text is cut into `batch_size` contiguous streams whose lengths differ by one at most. Every token but the first
    of each stream is scored exactly once. Each stream starts without history, so that more streams are faster and
    score a little worse.

    The memory is projected keys and values; with `ext_len`, hidden states, and the `ext_len` tokens before each
    segment are read again. With `segment_length=1`, `memory_length=0`, `ext_len = n - 1` and `same_length=False` that
    is the vanilla protocol of the paper's section 4.5: a sliding window of n tokens, computed anew for every token.

    Args:
        model: on any device, in any mode, which is restored at the end, also after an error. Nothing is written to a
            model in evaluation mode, so that threads can share it, but not with `dynamic`. On a GPU CUDA graphs read
            segments of one shape: PyTorch raises an error in a thread that draws random numbers there while a capture
            begins.
        token_ids: N token ids, N > batch_size: a list, an array, a CPU tensor, a memory-mapped array or another
            sequence with slices.
        segment_length: L ≥ 1, tokens scored in one pass and stream. With `same_length` on a GPU a pass reads several
            segments, up to 1,024 tokens, because no loss depends on L there.
        memory_length: M ≥ 0, states remembered per layer. None: the model's `mem_len`.
        batch_size: B ≥ 1, streams read in parallel.
        warm_up: tokens at the start of each stream that are not scored; the first never is. They fill the memory, and
            `dynamic` and `cache` learn from them.
        ext_len, clamp_len, same_length: as in the configuration. None: the model's.
        dynamic: let the weights follow the text. They are restored at the end, bit for bit, also after an error; until
            then the model belongs to this call alone. The memory is hidden states.
        cache: mix in the tokens that followed similar states earlier in the stream. The weights of `dynamic` follow
            the model's own loss.
        document_end: where documents end, as in `TokenStream`: nothing before a document is seen from within it. Its
            first token is scored after the last one before it. What `dynamic` and `cache` have learned stays. None:
            the text is one.
        accelerator: an `accelerate.Accelerator` whose processes share the streams. All must call this, and all get the
            result of the whole text. None: this process reads all streams.
        progress: show a progress bar, of this process's streams.
        memory: memory before the first segment: `mems` and `mems_mask`, or `past_key_values`, with a row for each
            stream of this process, as `txl_hf.load_memory` returns; of `mems` the last `memory_length` states. The
            first token of a stream is not scored even then. None: nothing.

    Raises:
        ValueError: the text is empty, leaves nothing to score, is no sequence of integers, or holds an id outside the
            vocabulary; there are more streams than tokens; a size is out of range; or `document_end` is neither a
            token nor places in the text, or the model has no place where one could begin (see `resets`); or the model
            is wrapped for several devices.
    """
    lengths = (segment_length, memory_length, batch_size, warm_up, ext_len, clamp_len, same_length)
    reading = Reading(*lengths, document_end, accelerator, progress, memory)
    return evaluate_caches(model, token_ids, reading, [cache], dynamic)[0]


def evaluate_caches(
    model: TransfoXLForCausalLM,
    token_ids,
    reading: Reading,
    caches: Sequence[ContinuousCache | None],
    dynamic: DynamicEvaluation | None = None,
) -> list[LanguageModelEvaluation]:
    """`evaluate_language_model` with each of one or more caches (None: without one), while the text is read once."""
    text = Text(model, token_ids, reading)
    reading = text.reading
    with _losses(model, text, dynamic, caches) as losses:
        # On the device until the text is read, so that the host never waits for it.
        totals = sum(
            # On the CPU for Apple's GPUs, which have no fp64.
            (
                torch.stack([(part.cpu() if part.is_mps else part).double().sum() for part in parts])
                for parts in losses
            ),
            start=torch.zeros((), dtype=torch.float64),
        )
        if reading.accelerator is not None:
            totals = reading.accelerator.reduce(totals, "sum")
    return [
        LanguageModelEvaluation(
            nll=total / text.tokens,
            tokens=text.tokens,
            text_tokens=len(token_ids),
            dynamic=None if dynamic is None else dynamic.describe(),
            cache=None if cache is None else cache.describe(),
            document_end=describe_document_end(text.document_end),
            warm_up=reading.warm_up,
            **reading.settings(),
        )
        for cache, total in zip(caches, totals.tolist(), strict=True)
    ]


def token_losses(
    model: TransfoXLForCausalLM,
    token_ids,
    segment_length: int,
    memory_length: int | None = None,
    batch_size: int = 1,
    *,
    dynamic: DynamicEvaluation | None = None,
    cache: ContinuousCache | None = None,
    **settings: Any,
) -> Tensor:
    """The loss of each token of a text; arguments and errors are those of `evaluate_language_model`, which returns
    their mean.

    Returns:
        (n,) fp32 on the CPU, in every process: the negative log-likelihoods in nats of the n scored tokens, in text
        order: all but the first `max(warm_up, 1)` of each of the `batch_size` streams, which `numpy.array_split` cuts
        alike. With one stream and no warm-up they are those of `token_ids[1:]`.
    """
    text = Text(model, token_ids, Reading(segment_length, memory_length, batch_size, **settings))
    accelerator = text.reading.accelerator
    with _losses(model, text, dynamic, [cache]) as losses:
        # On the device until the text is read, so that the host never waits for it.
        result = text.in_order(torch.cat([part for (part,) in losses], dim=1).cpu())
        return result if accelerator is None else accelerator.reduce(result.to(device_of(model)), "sum").cpu()


@contextmanager
def _losses(
    model: TransfoXLForCausalLM,
    text: Text,
    dynamic: DynamicEvaluation | None,
    caches: Sequence[ContinuousCache | None],
) -> Iterator[Iterator[list[Tensor]]]:
    """For each segment its (B, L) losses with each cache, 0 where nothing is scored."""
    if not isinstance(dynamic, DynamicEvaluation | None):
        raise ValueError(f"dynamic={dynamic!r} must be a DynamicEvaluation: DynamicEvaluation(0.01), say")
    for cache in caches:
        if not isinstance(cache, ContinuousCache | None):
            raise ValueError(f"cache={cache!r} must be a ContinuousCache: ContinuousCache(2000, 0.1, 0.01), say")
    bar = tqdm(total=text.share_tokens, unit="token", desc="evaluate", disable=not text.reading.progress)
    if dynamic is None:
        with evaluating(model), torch.no_grad(), bar:
            may_join = all(cache is None for cache in caches)
            yield _mix(Reader(model, text.reading).losses(text, may_join), caches, bar)
    else:
        with adapting(model, dynamic, text) as adaptation, following(model), bar:
            yield _mix(adaptation.losses(text), caches, bar)


def _mix(
    scored: Iterable[tuple[Segment, Tensor, Tensor]], caches: Sequence[ContinuousCache | None], bar: tqdm
) -> Iterator[list[Tensor]]:
    history = History(caches)
    for segment, hidden_states, losses in scored:
        bar.update(segment.scored)
        yield history.mix(segment, hidden_states, losses)
