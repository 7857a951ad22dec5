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

from .configuration_transfo_xl import TransfoXLConfig
from .modeling_transfo_xl import TransfoXLForCausalLM
from .streams import check_sizes, check_tokens, read_tokens

__all__ = ["LanguageModelEvaluation", "evaluate_language_model", "perplexity", "token_losses"]

# The softmax reads all of its tables, hundreds of MB for a large vocabulary, however few tokens it has to score. So it
# waits until several short segments have been read.
TOKENS_AT_ONCE = 1024
# Between the host and a device the text and its losses move in pieces of so many tokens.
TOKENS_MOVED = 2**20


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
    text = _Text(token_ids, segment_length, batch_size, warm_up, accelerator, model.config.vocab_size)
    with _reading(model, text, memory_length, ext_len, clamp_len, same_length, progress) as (config, losses):
        # Not read before the end, so that an accelerator need not wait for the processor.
        total = torch.zeros((), dtype=torch.float64, device=model.device)
        for _, part in losses:
            total += part.double().sum().to(total.device)
        if accelerator is not None:
            total = accelerator.reduce(total, "sum")
        return LanguageModelEvaluation(
            nll=total.item() / text.tokens,
            tokens=text.tokens,
            text_tokens=len(token_ids),
            segment_length=segment_length,
            memory_length=config.mem_len,
            batch_size=batch_size,
            warm_up=warm_up,
            ext_len=config.ext_len,
            clamp_len=config.clamp_len,
            same_length=config.same_length,
        )


def token_losses(
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
) -> Tensor:
    """What each token of a text costs; `evaluate_language_model` is the mean of it.

    Args:
        model, token_ids, …: all as in `evaluate_language_model`.

    Returns:
        (n,) fp32 on the CPU: the negative log-likelihoods in nats of the n scored tokens, in text order. These are all
        tokens but the first `max(warm_up, 1)` of each of the `batch_size` streams, which `numpy.array_split` cuts
        alike: `token_ids[1:]` with one stream and no warm-up. Every process gets the whole.

    Raises:
        ValueError: as `evaluate_language_model`.
    """
    text = _Text(token_ids, segment_length, batch_size, warm_up, accelerator, model.config.vocab_size)
    result = torch.zeros(text.tokens)
    with _reading(model, text, memory_length, ext_len, clamp_len, same_length, progress) as (_, losses):
        for begin, part in _on_host(losses):
            text.place(result, begin, part)
        if accelerator is not None:
            # Piece by piece, as a device need not have room for the whole.
            for piece in result.split(TOKENS_MOVED):
                piece.copy_(accelerator.reduce(piece.to(model.device), "sum"))
    return result


class _Text:
    """Where the streams of a text are, which of them this process reads, and which tokens are scored.

    Attributes:
        share: the streams that this process reads.
        length: labels of the longest stream.
        tokens, share_tokens: how many tokens are scored, and how many of them by this process.
    """

    def __init__(
        self, token_ids, segment_length: int, batch_size: int, warm_up: int, accelerator: Any, vocab_size: int
    ):
        check_sizes(segment_length=segment_length, batch_size=batch_size)
        check_sizes(least=0, warm_up=warm_up)
        check_tokens(token_ids)
        if len(token_ids) < batch_size:
            raise ValueError(f"batch_size={batch_size} streams are more than the text has tokens ({len(token_ids)})")
        self.token_ids, self.segment_length, self.batch_size = token_ids, segment_length, batch_size
        self._unscored = max(warm_up, 1)
        streams = _streams(len(token_ids), batch_size)
        self.tokens = self._scored(streams)
        if self.tokens == 0:
            unscored = f"the first warm_up={warm_up} tokens" if warm_up > 1 else "the first token"
            raise ValueError(
                f"nothing to score: the text has {len(token_ids)} tokens, and {unscored} of each of the "
                f"batch_size={batch_size} streams are not scored"
            )
        processes = 1 if accelerator is None else accelerator.num_processes
        index = 0 if accelerator is None else accelerator.process_index
        first, stop = len(streams) * index // processes, len(streams) * (index + 1) // processes
        # Where there are fewer streams than processes, some have one without tokens, as all take as many passes, which
        # a sharded model needs.
        self.share = streams[first:stop] or [range(0)]
        self.share_tokens = self._scored(self.share)
        self.length = len(streams[0]) - 1
        self._before = self._scored(streams[:first])
        _check_vocabulary(token_ids, vocab_size)

    def _scored(self, streams: list[range]) -> int:
        return sum(max(0, len(stream) - self._unscored) for stream in streams)

    def passes(self, ext_len: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Of each pass the column where it begins, input_ids (B, e + L) and targets (B, L).

        The first e ≤ ext_len inputs are read again. A target is -100 where it is not scored; streams with fewer than
        `length` labels end in a padding that nothing after it reads.
        """
        for begin in range(0, self.length, self.segment_length):
            end = min(begin + self.segment_length, self.length)
            first = max(0, begin - ext_len)
            rows = torch.full((len(self.share), end + 1 - first), -100)
            for row, stream in zip(rows, self.share, strict=True):
                part = stream[first : end + 1]
                if part:
                    row[: len(part)] = read_tokens(self.token_ids, part.start, part.stop)
            targets = rows[:, begin + 1 - first :].clone()
            targets[:, : max(0, self._unscored - 1 - begin)] = -100
            yield begin, rows[:, :-1].clamp(min=0), targets

    def place(self, result: Tensor, begin: int, losses: Tensor):
        """Put (B, n) losses of the targets `begin` … of each stream where they belong among all scored tokens."""
        start = self._before
        for stream, row in zip(self.share, losses, strict=True):
            scored = max(0, len(stream) - self._unscored)
            # The target of column c is token c + 1.
            skipped = begin + 1 - self._unscored
            row = row[max(0, -skipped) : scored - skipped] if scored > skipped else row[:0]
            result[start + max(0, skipped) :][: len(row)] = row
            start += scored


@contextmanager
def _reading(
    model: TransfoXLForCausalLM,
    text: _Text,
    memory_length: int | None,
    ext_len: int | None,
    clamp_len: int | None,
    same_length: bool | None,
    progress: bool,
) -> Iterator[tuple[TransfoXLConfig, Iterator[tuple[int, Tensor]]]]:
    """The configuration that the text is read with, and of each part of it the column where it begins and (B, n)
    losses, 0 where nothing is scored."""
    with (
        _settings(
            model, mem_len=memory_length, ext_len=ext_len, clamp_len=clamp_len, same_length=same_length
        ) as config,
        tqdm(total=text.share_tokens, unit="token", desc="evaluate", disable=not progress) as bar,
        torch.no_grad(),
    ):
        yield config, _score(model, text, config.ext_len, bar)


def _score(model: TransfoXLForCausalLM, text: _Text, ext_len: int, bar: tqdm) -> Iterator[tuple[int, Tensor]]:
    read = _read(model, text.passes(ext_len))
    # As many passes at a time in every process, whichever streams it has.
    while group := list(islice(read, max(1, TOKENS_AT_ONCE // (text.batch_size * text.segment_length)))):
        begins, parts, labels = zip(*group, strict=True)
        hidden_states, targets = torch.cat(parts, dim=1), torch.cat(labels, dim=1)
        if isinstance(model, FSDPModule):
            # After a forward the shards of the softmax, which is about to be called by itself, are apart again.
            model.unshard()
        losses = model.lm_head(hidden_states.flatten(0, 1), targets.to(hidden_states.device).flatten())
        bar.update(int((targets != -100).sum()))
        yield begins[0], losses.view(targets.shape)


def _read(
    model: TransfoXLForCausalLM, passes: Iterable[tuple[int, Tensor, Tensor]]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Of each pass the column where it begins, the hidden states (B, L, D) that predict its targets, and these."""
    memory: dict[str, Any] = {}
    nowhere = torch.empty(0, dtype=torch.long, device=model.device)
    for begin, input_ids, targets in passes:
        outputs = model(
            input_ids=input_ids.to(model.device),
            use_cache=model.config.ext_len == 0,
            output_hidden_states=True,
            logits_to_keep=nowhere,
            **memory,
        )
        memory = {name: outputs[name] for name in ("mems", "past_key_values") if outputs.get(name) is not None}
        yield begin, outputs.hidden_states[-1][:, -targets.shape[1] :], targets


def _on_host(losses: Iterable[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    """The same parts on the CPU, many at a time, so that a device is not waited for at each."""
    group: list[tuple[int, Tensor]] = []
    for begin, part in losses:
        group.append((begin, part))
        if part.shape[0] * (begin + part.shape[1] - group[0][0]) >= TOKENS_MOVED:
            yield group[0][0], torch.cat([part for _, part in group], dim=1).cpu()
            group = []
    if group:
        yield group[0][0], torch.cat([part for _, part in group], dim=1).cpu()


def _streams(text_tokens: int, batch_size: int) -> list[range]:
    """Where each stream is in the text. The first are one token longer than the others, where it does not divide."""
    shorter, longer = divmod(text_tokens, batch_size)
    starts = [row * shorter + min(row, longer) for row in range(batch_size + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


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
