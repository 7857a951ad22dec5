"""Perplexity and bits per token of a text, read segment by segment with memory."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from tqdm.auto import tqdm

from .modeling_transfo_xl import TransfoXLForCausalLM
from .streams import check_sizes, check_tokens, read_tokens

__all__ = ["LanguageModelEvaluation", "evaluate_language_model", "perplexity"]

# The softmax reads all of its tables, hundreds of MB for a large vocabulary, however few tokens it has to score. So it
# waits until several short segments have been read.
TOKENS_AT_ONCE = 1024


@dataclass(frozen=True)
class LanguageModelEvaluation:
    """What a text costs under a model, and the settings that the figure depends on.

    Attributes:
        nll: mean negative log-likelihood of a token, in nats.
        tokens: how many tokens were scored.
        text_tokens: how many tokens the text has, those that were read only included.
        segment_length, memory_length, batch_size, warm_up, ext_len, clamp_len, same_length: as they were in this
            evaluation.
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

    @property
    def perplexity(self) -> float:
        """exp(nll) of a token; infinite where that exceeds a float."""
        return perplexity(self.nll)

    @property
    def bits_per_token(self) -> float:
        """nll in bits: bits per character of a character-level model."""
        return self.nll / math.log(2)

    def perplexity_per_word(self, words: int) -> float:
        """Perplexity per word, which compares models whose tokens are not the same.

        Args:
            words: how many words the whole text has. Tokens that were read only are taken to cost as much as the
                others.

        Raises:
            ValueError: `words` is no positive integer.
        """
        check_sizes(words=words)
        return perplexity(self.nll * self.text_tokens / words)

    def bits_per_character(self, characters: int) -> float:
        """Bits per character of a model whose tokens are not characters.

        Args:
            characters: how many characters (or bytes) the whole text has, as `words` of `perplexity_per_word`.

        Raises:
            ValueError: `characters` is no positive integer.
        """
        check_sizes(characters=characters)
        return self.bits_per_token * self.text_tokens / characters


def perplexity(nll: float) -> float:
    """exp of a mean negative log-likelihood in nats; infinite where that exceeds a float."""
    return math.inf if nll > 709 else math.exp(nll)


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
    accelerator: Any = None,
    progress: bool = False,
) -> LanguageModelEvaluation:
    """Score a text with memory.

    The text is cut into `batch_size` contiguous streams whose lengths differ by one at most. Every token but the first
    of each stream is scored exactly once. Each stream starts without history, so that more streams are faster and
    score a little worse.

    The memory is kept as projected keys and values. A model with `ext_len` reads the `ext_len` tokens before each
    segment again, as in its training, and keeps its memory as hidden states. With `segment_length=1`,
    `memory_length=0`, `ext_len = n - 1` and `same_length=False` that is the vanilla protocol, which the paper's
    evaluation speed is measured against (section 4.5): a sliding window of n tokens, computed anew for every token.

    Args:
        model: on any device, in any mode. Mode and settings are afterwards as they were before, also after an error.
        token_ids: N token ids, N > batch_size: a list, an array, a CPU tensor, a memory-mapped array or whatever
            slices alike.
        segment_length: L ≥ 1, tokens scored in one pass and stream.
        memory_length: M ≥ 0, states remembered per layer. None: the model's `mem_len`.
        batch_size: B ≥ 1, streams read in parallel.
        warm_up: tokens at the start of each stream that fill the memory and are not scored; the first never is.
        ext_len, clamp_len, same_length: as in the configuration. None: the model's.
        accelerator: an `accelerate.Accelerator` whose processes share the streams out among them. All must call this,
            and all get the result of the whole text. None: this process reads all streams.
        progress: show a progress bar, of this process's streams.

    Raises:
        ValueError: the text is empty, leaves nothing to score, is no sequence of integers, or holds an id outside the
            vocabulary; there are more streams than tokens; or a size is out of range.
    """
    check_sizes(segment_length=segment_length, batch_size=batch_size)
    check_sizes(least=0, warm_up=warm_up)
    check_tokens(token_ids)
    if len(token_ids) < batch_size:
        raise ValueError(f"batch_size={batch_size} streams are more than the text has tokens ({len(token_ids)})")
    streams = _streams(len(token_ids), batch_size)
    tokens = _scored_tokens(streams, warm_up)
    if tokens == 0:
        first = f"the first warm_up={warm_up} tokens" if warm_up > 1 else "the first token"
        raise ValueError(
            f"nothing to score: the text has {len(token_ids)} tokens, and {first} of each of the "
            f"batch_size={batch_size} streams are not scored"
        )
    share = streams if accelerator is None else _share(streams, accelerator.num_processes, accelerator.process_index)
    # All processes take as many passes, which a sharded model needs.
    length = streams[0].stop - streams[0].start - 1
    _check_vocabulary(token_ids, model.config.vocab_size)
    with (
        _settings(
            model, mem_len=memory_length, ext_len=ext_len, clamp_len=clamp_len, same_length=same_length
        ) as config,
        tqdm(total=_scored_tokens(share, warm_up), unit="token", desc="evaluate", disable=not progress) as bar,
        torch.no_grad(),
    ):
        total = torch.zeros((), dtype=torch.float64, device=model.device)
        scored = _read(model, _passes(token_ids, share, length, segment_length, config.ext_len, warm_up))
        # As many passes at a time in every process, whichever streams it has.
        while group := list(islice(scored, max(1, TOKENS_AT_ONCE // (batch_size * segment_length)))):
            hidden_states, targets = (torch.cat(parts) for parts in zip(*group, strict=True))
            if isinstance(model, FSDPModule):
                # After a forward the shards of the softmax, which is about to be called by itself, are apart again.
                model.unshard()
            # Not read before the end, so that an accelerator need not wait for the processor.
            total += model.lm_head(hidden_states, targets).double().sum().to(total.device)
            bar.update(len(targets))
        if accelerator is not None:
            total = accelerator.reduce(total, "sum")
        return LanguageModelEvaluation(
            nll=total.item() / tokens,
            tokens=tokens,
            text_tokens=len(token_ids),
            segment_length=segment_length,
            memory_length=config.mem_len,
            batch_size=batch_size,
            warm_up=warm_up,
            ext_len=config.ext_len,
            clamp_len=config.clamp_len,
            same_length=config.same_length,
        )


def _read(model: TransfoXLForCausalLM, passes: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """The hidden states (n, D) that predict the n scored tokens of each pass, and these tokens, (n,)."""
    memory: dict[str, Any] = {}
    nowhere = torch.empty(0, dtype=torch.long, device=model.device)
    for input_ids, shift_labels in passes:
        outputs = model(
            input_ids=input_ids.to(model.device),
            use_cache=model.config.ext_len == 0,
            output_hidden_states=True,
            logits_to_keep=nowhere,
            **memory,
        )
        memory = {name: outputs[name] for name in ("mems", "past_key_values") if outputs.get(name) is not None}
        shift_labels = shift_labels.flatten()
        # Found on the host, where the tokens are, so that it need not wait for an accelerator.
        places = (shift_labels != -100).nonzero()[:, 0]
        hidden_states = outputs.hidden_states[-1].flatten(0, 1)
        yield (
            hidden_states.index_select(0, places.to(hidden_states.device)),
            shift_labels[places].to(hidden_states.device),
        )


def _streams(text_tokens: int, batch_size: int) -> list[range]:
    """Where each stream is in the text. The first are one token longer than the others, where it does not divide."""
    shorter, longer = divmod(text_tokens, batch_size)
    starts = [row * shorter + min(row, longer) for row in range(batch_size + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _scored_tokens(streams: list[range], warm_up: int) -> int:
    return sum(max(0, len(stream) - max(warm_up, 1)) for stream in streams)


def _share(streams: list[range], num_processes: int, process_index: int) -> list[range]:
    """The streams of one process; where there are fewer than processes, for some of them one without tokens."""
    first, stop = (len(streams) * index // num_processes for index in (process_index, process_index + 1))
    return streams[first:stop] or [range(0)]


def _passes(
    token_ids, streams: list[range], length: int, segment_length: int, ext_len: int, warm_up: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """input_ids and shift_labels of each pass, both (B, e + L) with e ≤ ext_len tokens that are read again.

    Streams with fewer than `length` labels end in a padding that nothing after it reads.
    """
    for begin in range(0, length, segment_length):
        end = min(begin + segment_length, length)
        reread = max(0, begin - ext_len)
        rows = torch.full((len(streams), end + 1 - reread), -100)
        for row, stream in zip(rows, streams, strict=True):
            part = stream[reread : end + 1]
            if part:
                row[: len(part)] = read_tokens(token_ids, part.start, part.stop)
        shift_labels = rows[:, 1:].clone()
        shift_labels[:, : max(begin, warm_up - 1) - reread] = -100
        yield rows[:, :-1].clamp(min=0), shift_labels


@contextmanager
def _settings(model: TransfoXLForCausalLM, **settings: int | bool | None) -> Iterator:
    """The model in evaluation mode with other settings, those that are not None; yields its configuration."""
    config = model.config
    found = {name: getattr(config, name) for name in settings}
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        for name, value in settings.items():
            if value is not None:
                setattr(config, name, value)
        config.validate_architecture()
        yield config
    finally:
        for name, value in found.items():
            setattr(config, name, value)
        # Module by module: parts of a model may be frozen in a mode of their own.
        for module, training in modes.items():
            module.training = training


def _check_vocabulary(token_ids, vocab_size: int, chunk: int = 1 << 20) -> None:
    """Before the first pass, because the last segment of a long text is hours away."""
    for start in range(0, len(token_ids), chunk):
        ids = np.asarray(token_ids[start : start + chunk])
        outside = (ids < 0) | (ids >= vocab_size)
        if outside.any():
            position = int(outside.argmax())
            raise ValueError(
                f"token_ids[{start + position}] is {ids[position]}, outside the vocabulary [0, {vocab_size})"
            )
