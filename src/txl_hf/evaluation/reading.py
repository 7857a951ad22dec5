"""A text read with memory: in streams, segment by segment, with the loss of each token in its place."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..data.streams import check_document_end, check_sizes, cut_streams, document_starts, open_tokens, read_tokens
from ..kernels.captured import SegmentsAlike, why_not_captured
from ..memories import latest_states, memory_of
from ..transfo_xl.cache_transfo_xl import CACHE_NAME
from ..transfo_xl.configuration_transfo_xl import TransfoXLConfig
from ..transfo_xl.memory_transfo_xl import MemoryLengths
from ..transfo_xl.modeling_transfo_xl import TransfoXLForCausalLM

# Tokens of the text, and losses, that are copied between the host and a device at once.
TOKENS_MOVED = 2**20
# Short segments are scored together, because the softmax reads all of its tables, up to hundreds of MB, each time; and
# read together where that changes no loss, while the scores of a layer take at most `MOST_BYTES` in fp32.
TOKENS_AT_ONCE, MOST_BYTES = 1024, 2**30
# The settings that reproduce a figure; `txl-train` saves them beside its figures.
LENGTHS = ("segment_length", "memory_length", "ext_len", "clamp_len", "same_length", "batch_size")


@dataclass(frozen=True)
class Reading:
    """Arguments of `evaluate_language_model` except model, text, `dynamic` and `cache`, whose sizes are checked."""

    segment_length: int
    memory_length: int | None = None
    batch_size: int = 1
    warm_up: int = 0
    ext_len: int | None = None
    clamp_len: int | None = None
    same_length: bool | None = None
    document_end: int | Sequence[int] | np.ndarray | None = None
    accelerator: Any = None
    progress: bool = False
    memory: Mapping[str, Any] | None = None

    def __post_init__(self):
        check_sizes(segment_length=self.segment_length, batch_size=self.batch_size)
        check_sizes(least=0, warm_up=self.warm_up)

    def of(self, config: TransfoXLConfig) -> "Reading":
        """The same reading with the configuration's lengths in place of None. Raises a ValueError for a length out of
        range, and for memory, documents or segments that the model's positions do not allow."""
        filled = self.lengths.of(config)
        given = f"segment_length={self.segment_length} with ext_len={filled.ext_len}"
        config.positions.check_segment(self.segment_length + filled.ext_len, config, given)
        if self.document_end is not None:
            config.check_documents("document_end and the text", filled.mem_len)
        lengths = {name: getattr(filled, name) for name in ("ext_len", "clamp_len", "same_length")}
        return replace(self, memory_length=filled.mem_len, **lengths)

    @property
    def lengths(self) -> MemoryLengths:
        """The lengths as an argument of a call of the model."""
        return MemoryLengths(self.memory_length, self.ext_len, self.clamp_len, self.same_length)

    def settings(self) -> dict[str, Any]:
        """The values of `LENGTHS`, by name."""
        return {name: getattr(self, name) for name in LENGTHS}


class Segment(NamedTuple):
    """The tokens of one pass, of B streams.

    Attributes:
        begin: column of the first target, which is the number of targets before it in each stream.
        input_ids: (B, e + L); the first e are read again and have no labels.
        labels, targets: (B, L), the next tokens, and those that are scored; -100 elsewhere.
        resets: (B, e + L) bool, True where a document begins; None where the text is one.
        scored, labels_of_all: the numbers of targets, and of labels in all processes, at least one.
    """

    begin: int
    input_ids: Tensor
    labels: Tensor
    targets: Tensor
    resets: Tensor | None
    scored: int
    labels_of_all: int


class Text:
    """The streams of a text, which of them this process reads, and which tokens are scored. All ids are checked here,
    because the last segment of a long text is hours away: errors are those of `evaluate_language_model`.

    Attributes:
        reading: with the model's lengths in place of None.
        share: the streams that this process reads.
        length: labels of the longest stream.
        unscored: tokens at the start of a stream that are not scored.
        tokens, share_tokens: the number of scored tokens, of all processes and of this one.
    """

    def __init__(self, model: TransfoXLForCausalLM, token_ids, reading: Reading):
        if isinstance(model, DataParallel | DistributedDataParallel):
            raise ValueError(
                f"the model is wrapped in {type(model).__name__}: give model.module, as accelerator.unwrap_model does"
            )
        reading, vocab_size = reading.of(model.config), model.config.vocab_size
        batch_size, warm_up, accelerator = reading.batch_size, reading.warm_up, reading.accelerator
        token_ids = open_tokens(token_ids)
        if len(token_ids) < batch_size:
            raise ValueError(f"batch_size={batch_size} streams are more than the text has tokens ({len(token_ids)})")
        self.token_ids, self.reading = token_ids, reading
        self.document_end = check_document_end(reading.document_end, len(token_ids))
        if isinstance(self.document_end, int) and self.document_end >= vocab_size:
            raise ValueError(f"document_end={self.document_end} lies outside the vocabulary [0, {vocab_size})")
        self.unscored = max(warm_up, 1)
        self._streams = cut_streams(len(token_ids), batch_size)
        self.length = len(self._streams[0]) - 1
        self.tokens = self._scored(self._streams, 0, self.length)
        if self.tokens == 0:
            unscored = f"the first warm_up={warm_up} tokens" if warm_up > 1 else "the first token"
            raise ValueError(
                f"nothing to score: the text has {len(token_ids)} tokens, and {unscored} of each of the "
                f"batch_size={batch_size} streams are not scored"
            )
        processes = 1 if accelerator is None else accelerator.num_processes
        index = 0 if accelerator is None else accelerator.process_index
        first, stop = batch_size * index // processes, batch_size * (index + 1) // processes
        # A process without a stream gets an empty one, because a sharded model needs as many passes in all processes.
        self.share = self._streams[first:stop] or [range(0)]
        self.share_tokens = self._scored(self.share, 0, self.length)
        self._before = self._scored(self._streams[:first], 0, self.length)
        for start in range(0, len(token_ids), TOKENS_MOVED):
            ids = read_tokens(token_ids, start, min(start + TOKENS_MOVED, len(token_ids))).numpy()
            outside = (ids < 0) | (ids >= vocab_size)
            if outside.any():
                at = int(outside.argmax())
                raise ValueError(f"token_ids[{start + at}] is {ids[at]}, outside the vocabulary [0, {vocab_size})")

    def segments(self, device: torch.device, joined: int = 1) -> Iterator[Segment]:
        """All passes, each over `joined` segments; in each up to `ext_len` tokens are read again."""
        segment_length, ext_len = self.reading.segment_length * joined, self.reading.ext_len or 0
        # A whole number of segments, so that no segment is cut by the end of a piece.
        at_once = max(1, TOKENS_MOVED // (len(self.share) * segment_length)) * segment_length
        for start in range(0, self.length, at_once):
            stop = min(start + at_once, self.length)
            first = max(0, start - ext_len)
            rows = torch.full((len(self.share), stop + 1 - first), -100)
            document_end = self.document_end
            starts = None if document_end is None else torch.zeros_like(rows[:, :-1], dtype=torch.bool)
            for i, stream in enumerate(self.share):
                if part := stream[first : stop + 1]:
                    rows[i, : len(part)] = read_tokens(self.token_ids, part.start, part.stop)
                if starts is not None and document_end is not None and (part := stream[first:stop]):
                    starts[i, : len(part)] = document_starts(self.token_ids, document_end, part.start, part.stop)
            rows, starts = rows.to(device), None if starts is None else starts.to(device)
            for begin in range(start, stop, segment_length):
                end = min(begin + segment_length, stop)
                labels = targets = rows[:, begin + 1 - first : end + 1 - first]
                if begin + 1 < self.unscored:
                    targets = labels.clone()
                    targets[:, : self.unscored - 1 - begin] = -100
                read = slice(max(0, begin - ext_len) - first, end - first)
                yield Segment(
                    begin,
                    rows[:, read].clamp(min=0),
                    labels,
                    targets,
                    None if starts is None else starts[:, read],
                    self._scored(self.share, begin, end),
                    _labels(self._streams, begin, end),
                )

    def in_order(self, losses: Tensor) -> Tensor:
        """(tokens,) losses of all scored tokens in text order, 0 for those of other processes, from (B, length) losses
        of the targets of each stream of this process."""
        result, start = torch.zeros(self.tokens), self._before
        for stream, row in zip(self.share, losses, strict=True):
            # The target of column c is token c + 1 of its stream.
            scored = row[self.unscored - 1 : max(0, len(stream) - 1)]
            result[start : start + len(scored)] = scored
            start += len(scored)
        return result

    def _scored(self, streams: list[range], begin: int, end: int) -> int:
        """The number of scored targets in the columns [begin, end) of these streams."""
        return _labels(streams, max(begin, self.unscored - 1), end)


class Reader:
    """Reads a text with a model, segment after segment, each with the memory of those before.

    Body and softmax are called apart, because the softmax of several segments can be computed together; both under the
    accelerator's autocast. A sharded model (FSDP2) is called as a whole, because it gathers its weights only in its
    own forward. On a GPU CUDA graphs (`alike`) read segments of one shape, once the memory is full.

    Args:
        reading: its lengths and its accelerator are used.
        projected: the memory is projected keys and values, which is faster than hidden states; not with `ext_len`.
    """

    def __init__(self, model: TransfoXLForCausalLM, reading: Reading, projected: bool = True):
        peft_config = getattr(model, "active_peft_config", None)
        if getattr(peft_config, "is_prompt_learning", False):
            raise ValueError(
                f"{type(peft_config).__name__} puts a prompt before every segment, which a text read with memory "
                "does not have: evaluate model.base_model, or an adapter of another kind"
            )
        self.model = model
        self.whole = isinstance(model, FSDPModule)
        reading = reading.of(model.config)
        self._lengths, self._accelerator = reading.lengths, reading.accelerator
        self._projected = projected and reading.ext_len == 0
        if not self._projected and CACHE_NAME in (reading.memory or {}):
            raise ValueError(
                "memory has past_key_values, but dynamic evaluation and ext_len go on from hidden states: give mems"
            )
        # A copy, because calls write into a cache, and the caller's must not change.
        memory = latest_states(dict(reading.memory or {}), reading.memory_length or 0)
        self._memory: dict[str, Any] = copy.deepcopy(memory)
        self.alike = SegmentsAlike(model.transformer, reading.memory_length or 0)

    def read(self, segment: Segment) -> Tensor:
        """(B, L, D), the states that enter the softmax and predict the targets of the segment."""
        ids, resets = segment.input_ids, segment.resets
        states = self.alike.read(ids, resets)
        if states is None:
            states = self._launch(ids, resets)
            self.alike.saw(ids, self._memory.get(CACHE_NAME), self._launch)
        return states[:, -segment.targets.shape[1] :]

    def _launch(self, input_ids: Tensor, resets: Tensor | None = None) -> Tensor:
        """(B, e + L, D), the states of a segment, which joins the memory."""
        with self._autocast():
            outputs = self.model.transformer(input_ids, **self._arguments(resets))
        self._remember(outputs)
        return outputs.last_hidden_state

    def read_and_score(self, segments: Sequence[Segment], targets: Tensor) -> tuple[list[Tensor], Tensor]:
        """The states of segments, as of `read`, and (B, n) fp32 losses of all their targets, 0 where one is -100."""
        # Targets are sorted before the layers run, so that the host does not wait for the counts of targets by bin.
        by_bin = self.model.lm_head.sort_targets(targets.flatten())
        states = [self.read(segment) for segment in segments]
        # A single tensor is not passed to `cat`, which would copy it.
        predicting = (states[0] if len(states) == 1 else torch.cat(states, dim=1)).flatten(0, 1)
        with self._autocast():
            losses = self.model.lm_head(predicting, targets.to(predicting.device).flatten(), by_bin=by_bin)
        return states, losses.view(targets.shape)

    def _read_and_score_whole(self, segment: Segment) -> tuple[Tensor, Tensor]:
        """`read_and_score` of one segment, by a forward of the whole model."""
        length = segment.targets.shape[1]
        shift_labels = torch.full_like(segment.input_ids, -100)
        shift_labels[:, -length:] = segment.targets
        outputs = self.model(
            segment.input_ids,
            shift_labels=shift_labels,
            output_logits=False,
            output_hidden_states=True,
            **self._arguments(segment.resets),
        )
        self._remember(outputs)
        return outputs.hidden_states[-1][:, -length:], outputs.losses[:, -length:]

    def losses(self, text: Text, may_join: bool = False) -> Iterator[tuple[Segment, Tensor, Tensor]]:
        """Each segment with the (B, L, D) states that predict its targets and their (B, L) fp32 losses, 0 if
        unscored. `may_join`: whether several segments may be one."""
        if self.whole:
            for segment in text.segments(device_of(self.model)):
                yield segment, *self._read_and_score_whole(segment)
            return
        joined = self._joined(text.reading) if may_join else 1
        segments = text.segments(device_of(self.model), joined)
        # By the batch of all processes, so that all score equally often, however many streams each has.
        at_once = max(1, TOKENS_AT_ONCE // (text.reading.batch_size * text.reading.segment_length * joined))
        while group := list(islice(segments, at_once)):
            targets = torch.cat([segment.targets for segment in group], dim=1)
            states, losses = self.read_and_score(group, targets)
            yield from zip(group, states, losses.split([part.shape[1] for part in states], dim=1), strict=True)

    def _joined(self, reading: Reading) -> int:
        """The number of segments that a pass reads. With `same_length` a token sees as many keys in a segment of any
        length, so that a CUDA graph reads several short ones, with a fraction of the launches of each."""
        rows, length, memory = reading.batch_size, reading.segment_length, reading.memory_length or 0
        heads, joined = self.model.config.n_head, TOKENS_AT_ONCE // (rows * length)
        while joined > 1 and 4 * rows * heads * joined * length * (memory + joined * length) > MOST_BYTES:
            joined //= 2
        same = reading.same_length and memory > 0 and reading.document_end is None
        if joined <= 1 or not same or not self._projected:
            return 1
        ids = torch.empty((rows, joined * length), dtype=torch.long, device=device_of(self.model))
        return 1 if why_not_captured(self.model.transformer, ids) else joined

    def _arguments(self, resets: Tensor | None) -> dict[str, Any]:
        options = {"lengths": self._lengths, "use_cache": self._projected, "return_dict": True}
        return {**options, "resets": resets, **self._memory}

    def _remember(self, outputs: Any):
        cache = outputs.get(CACHE_NAME)
        self._memory = memory_of(outputs) if cache is None else {CACHE_NAME: cache}

    def _autocast(self) -> AbstractContextManager:
        """A new context for each call, because autocast caches casts of weights, which may change between segments."""
        return nullcontext() if self._accelerator is None else self._accelerator.autocast()


def device_of(model: TransfoXLForCausalLM) -> torch.device:
    """The device of a model's inputs: the CPU where the weights are offloaded (meta) between calls."""
    return torch.device("cpu") if model.device.type == "meta" else model.device


@contextmanager
def evaluating(model: TransfoXLForCausalLM) -> Iterator[None]:
    """The model in evaluation mode. Nothing is written to one that is in it already, so that threads can share it."""
    # Modes are restored by module, because parts of a model may be frozen in a mode of their own.
    in_training = [module for module in model.modules() if module.training]
    try:
        for module in in_training:
            module.training = False
        yield
    finally:
        for module in in_training:
            module.training = True


def _labels(streams: list[range], begin: int, end: int) -> int:
    """The number of labels in the columns [begin, end) of these streams."""
    return sum(max(0, min(end, len(stream) - 1) - begin) for stream in streams)
