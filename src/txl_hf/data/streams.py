"""Text as parallel streams of contiguous segments, for training with memory."""

import functools
import hashlib
import zlib
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset


class TokenStream(Dataset):
    """A text cut into G = `batch_size` streams, and each stream into contiguous segments of S = `segment_length`.

    Item `step * G + row` is segment `step` of stream `row`. Read in order in batches of G, row b of a batch continues
    in row b of the next, so that the memory of a step belongs to the segments of the next. With several processes and
    accumulation see `check_loader`.

    An item is {"input_ids", "shift_labels"}, each (e + L,) int64; shift_labels[i] is the token after input_ids[i], so
    that the last token of a segment predicts the first of the next. The first e ≤ `ext_len` tokens are those before
    the segment, read again with the label -100. Streams follow one another in the text without a gap. L = S, and the
    end of the text, less than one segment per stream, is not read, unless:

    * `keep_remainder`, for evaluation: every token but the first is a label of exactly one item. The last segments are
      shorter; streams that are one token shorter than others end in the input 0 with the label -100.
    * `varlen_seed`, the original's `--varlen`: L changes from step to step, for all streams together. Less than one
      token per stream is not read. Every epoch has the lengths of the first in another order, so that all have the
      same number of steps, on which schedules and resuming depend.

    Args:
        token_ids: N token ids: a list, an array, a CPU tensor, a memory-mapped array, a column of Arrow or of a
            `datasets.Dataset` with one token a row, or another sequence with slices, which is read item by item.
        segment_length: S ≥ 1.
        batch_size: G ≥ 1, the streams of one optimiser step: rows per process × processes × accumulation steps.
        ext_len: extended context ≥ 0. With memory it must be the model's `config.ext_len`, which keeps tokens that are
            read again out of the memory. S gives half losses (Table 6 of the paper): gradients cross 2 S tokens, of
            which the second half has labels.
        varlen_seed: seed of lengths that vary: L is normal with deviation 5 around S, or around S / 2 in one step of
            twenty, within [5, S + 15]; the last ends with the text. None: L = S.
        document_end: the token that ends each document, or the places behind their last tokens in ascending order.
            Items then have `resets`, (e + L,) bool, True where a document begins, whose first token is still a label
            of the token before it. None: the text is one document.

    Attributes:
        steps: segments per stream and epoch.
        dropped_tokens: tokens at the end of the text that are in no segment, neither as input nor as label.
        fingerprint: length and checksum of the text, so that a memory is not resumed with another text.
        documents: the token of `document_end`, or number and hash of its places; None without it.

    Raises:
        ValueError: the text is no sequence of integers, or too short for one segment per stream; a size is out of
            range; or `document_end` is neither a token nor places in the text.
    """

    def __init__(
        self,
        token_ids,
        segment_length: int,
        batch_size: int,
        *,
        keep_remainder: bool = False,
        ext_len: int = 0,
        varlen_seed: int | None = None,
        document_end: int | Sequence[int] | np.ndarray | None = None,
    ):
        check_sizes(segment_length=segment_length, batch_size=batch_size)
        check_sizes(least=0, ext_len=ext_len)
        token_ids = open_tokens(token_ids)
        segment_length, batch_size, ext_len = int(segment_length), int(batch_size), int(ext_len)
        self.token_ids = token_ids
        self.segment_length = segment_length
        self.batch_size = batch_size
        self.ext_len = ext_len
        self.varlen_seed = varlen_seed
        self.document_end = check_document_end(document_end, len(token_ids))
        self.documents = describe_document_end(self.document_end)
        # The last token of the text is a label only.
        labels = len(token_ids) - 1
        self._streams = cut_streams(labels, batch_size)
        shortest = 1 if keep_remainder or varlen_seed is not None else segment_length
        if len(self._streams[-1]) < shortest:
            segment = f" of at least one segment of segment_length={segment_length}" if shortest > 1 else ""
            raise ValueError(
                f"the text has {len(token_ids)} tokens, but batch_size={batch_size} streams{segment} need "
                f"{batch_size * shortest + 1}"
            )
        longest = len(self._streams[0 if keep_remainder else -1])
        # Where the segments end. With a remainder, the last may end behind the text.
        self._ends: range | np.ndarray
        if varlen_seed is None:
            self._ends = range(segment_length, longest + (segment_length if keep_remainder else 1), segment_length)
        else:
            self._ends = varying_ends(longest, segment_length, varlen_seed)
            self._lengths = np.diff(self._ends, prepend=0)
        self.steps = len(self._ends)
        if not keep_remainder:
            self._streams = cut_streams(int(self._ends[-1]) * batch_size, batch_size)
        self.dropped_tokens = labels - self._streams[-1].stop

    @functools.cached_property
    def fingerprint(self) -> str:
        return text_fingerprint(self.token_ids)

    def set_epoch(self, epoch: int):
        """Order varying lengths as in epoch `epoch` ≥ 0. `Trainer` calls this at each epoch, also one that it resumes,
        and so does a loader of `Accelerator.prepare`; one of `skip_first_batches` counts from 0: call its `set_epoch`.
        """
        if self.varlen_seed is not None:
            lengths = self._lengths
            if epoch > 0:
                lengths = np.random.default_rng([self.varlen_seed, epoch]).permutation(lengths)
            self._ends = lengths.cumsum()

    def __len__(self) -> int:
        return self.steps * self.batch_size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of a TokenStream of {len(self)}")
        return self._read(*divmod(index, self.batch_size), rows=1)[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """The items of a batch, for `DataLoader`; consecutive rows of a step are read into one tensor."""
        (step, row), rows = divmod(indices[0], self.batch_size), len(indices)
        consecutive = [*indices] == list(range(indices[0], indices[0] + rows)) and row + rows <= self.batch_size
        if consecutive and 0 <= step < self.steps and type(self).__getitem__ is TokenStream.__getitem__:
            return self._read(step, row, rows)
        items = [self[index] for index in indices]
        if len({len(item["input_ids"]) for item in items}) > 1:
            raise ValueError(
                "a batch of this TokenStream has rows of different lengths: with keep_remainder, ext_len or "
                "varlen_seed not all steps have one length, so read it step by step, as TransfoXLTrainer does: in "
                f"order, in batches whose size divides that of the stream, {self.batch_size}"
            )
        return items

    def _read(self, step: int, row: int, rows: int) -> list[dict[str, Tensor]]:
        """The items of `rows` rows of a step, from `row` on."""
        begin, end = self.segment(step)
        reread = min(begin, self.ext_len)
        shape = rows, reread + end - begin
        # Behind the end of a stream the input is 0.
        items = {"input_ids": torch.zeros(shape, dtype=torch.int64), "shift_labels": torch.full(shape, -100)}
        if self.document_end is not None:
            items["resets"] = torch.zeros(shape, dtype=torch.bool)
        for place, stream in enumerate(self._streams[row : row + rows]):
            first, stop = stream.start + begin - reread, min(stream.start + end, stream.stop)
            tokens = read_tokens(self.token_ids, first, stop + 1)
            items["input_ids"][place, : stop - first] = tokens[:-1]
            items["shift_labels"][place, reread : stop - first] = tokens[reread + 1 :]
            if self.document_end is not None:
                items["resets"][place, : stop - first] = document_starts(
                    self.token_ids, self.document_end, first, stop
                )
        return [dict(zip(items, values, strict=True)) for values in zip(*items.values(), strict=True)]

    def segment(self, step: int) -> tuple[int, int]:
        """Where segment `step`, in [0, `steps`), begins and ends in every stream, in tokens, in the present epoch."""
        begin = self._ends[step - 1] if step else 0
        return int(begin), min(int(self._ends[step]), len(self._streams[0]))


class RolledStream(TokenStream):
    """A stream whose rows begin, in every epoch, at random places of their texts and wrap around (NVIDIA's --roll)."""

    def __init__(self, *args, roll_seed: int, **kwargs):
        super().__init__(*args, **kwargs)
        self.roll_seed = roll_seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int):
        self.length = self.steps * self.segment_length
        self.shifts = np.random.default_rng([self.roll_seed, epoch]).integers(self.length, size=self.batch_size)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        step, row = divmod(index, self.batch_size)
        begin = (step * self.segment_length + int(self.shifts[row])) % self.length
        end = begin + self.segment_length + 1
        start = row * self.length
        tokens = read_tokens(self.token_ids, start + begin, start + min(end, self.length))
        if end > self.length:
            tokens = torch.cat([tokens, read_tokens(self.token_ids, start, start + end - self.length)])
        return as_item(tokens, self.segment_length)


def cut_streams(tokens: int, batch_size: int) -> list[range]:
    """The tokens of each stream. The first are one token longer than the others, where the text does not divide."""
    shorter, longer = divmod(tokens, batch_size)
    starts = [row * shorter + min(row, longer) for row in range(batch_size + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def as_item(tokens: Tensor, length: int) -> dict[str, Tensor]:
    """An item of `TokenStream` of so many inputs from (n + 1,) tokens, n ≤ length, or none; padded by 0 and -100."""
    inputs, labels = tokens[:-1], tokens[1:]
    behind = (0, length - len(inputs))
    return {"input_ids": F.pad(inputs, behind), "shift_labels": F.pad(labels, behind, value=-100)}


def describe_stream(stream) -> dict[str, Any]:
    """The attributes of a data set that identify its text and how it is cut; with the step, a position in it."""
    cuts = ("batch_size", "segment_length", "ext_len", "varlen_seed", "roll_seed", "steps")
    return {name: getattr(stream, name) for name in (*cuts, "fingerprint", "documents") if hasattr(stream, name)}


def check_document_end(
    document_end: int | Sequence[int] | np.ndarray | None, text_tokens: int
) -> int | np.ndarray | None:
    """`document_end` as an int or as (documents,) int64. Raises a ValueError for neither a token nor places."""
    if document_end is None:
        return None
    if isinstance(document_end, int | np.integer) and not isinstance(document_end, bool):
        if document_end < 0:
            raise ValueError(f"document_end={document_end} is no token id")
        return int(document_end)
    ends = np.asarray(document_end)
    if ends.ndim != 1 or (ends.size and ends.dtype.kind not in "iu") or (np.diff(ends) <= 0).any():
        raise ValueError("document_end must be a token id, or the places where documents end, integers that ascend")
    if ends.size and (ends[0] < 1 or ends[-1] > text_tokens):
        place = ends[0] if ends[0] < 1 else ends[-1]
        raise ValueError(
            f"document_end holds {place}, but documents end behind their last tokens: at 1 to {text_tokens} in this "
            "text"
        )
    return ends.astype(np.int64)


def describe_document_end(document_end: int | np.ndarray | None) -> int | str | None:
    """`document_end` for JSON: the token, or the number of places and their hash."""
    if document_end is None or isinstance(document_end, int):
        return document_end
    digest = hashlib.blake2b(document_end.astype("<i8").tobytes(), digest_size=8)
    return f"{len(document_end)} places, {digest.hexdigest()}"


def document_starts(token_ids, document_end: int | np.ndarray, start: int, stop: int) -> Tensor:
    """(stop - start,) bool: True for those of the tokens [start, stop) of a text that begin a document.
    `document_end` is as `check_document_end` returns it."""
    starts = np.zeros(stop - start, dtype=bool)
    if not isinstance(document_end, int):
        inside = slice(*np.searchsorted(document_end, (start, stop)))
        starts[document_end[inside] - start] = True
        return torch.from_numpy(starts)
    # A token begins a document if the token before it ends one; the first token of the text has none before it.
    before = read_tokens(token_ids, max(0, start - 1), max(0, stop - 1)).numpy()
    starts[len(starts) - len(before) :] = before == document_end
    return torch.from_numpy(starts)


def varying_ends(length: int, segment_length: int, seed: int) -> np.ndarray:
    """The ends of segments of varying lengths, (steps,) int64, of which the last is `length`."""
    generator = np.random.default_rng(seed)
    ends = np.zeros(0, dtype=np.int64)
    while (reached := ends[-1] if len(ends) else 0) < length:
        draws = 1 + 2 * (length - reached) // segment_length
        means = np.where(generator.random(draws) < 0.95, segment_length, segment_length / 2)
        lengths = np.clip(generator.normal(means, 5).astype(np.int64), 5, segment_length + 15)
        ends = np.concatenate([ends, reached + lengths.cumsum()])
    steps = int(np.searchsorted(ends, length)) + 1
    ends = ends[:steps]
    ends[-1] = length
    return ends


def check_loader(
    loader: DataLoader,
    *,
    num_processes: int = 1,
    process_index: int = 0,
    accumulation_steps: int = 1,
    batch_size: int | None = None,
) -> None:
    """Raise a ValueError that names the fix unless a loader keeps the streams of its dataset together.

    Batch k of process p must hold the rows of micro-batch a = k mod A of step k // A, as memory carried from step to
    step needs it: rows aG/A + pR, …, aG/A + (p + 1)R - 1 with R = G / (P A), the items from (kP + p)R on. The first
    batches of the loader's batch sampler are compared; of an iterable dataset, which has none, only their size.

    Args:
        loader: over a dataset with step-major items, as accelerate or Trainer prepared it, before skipping.
        num_processes, process_index: P and p. accumulation_steps: A. batch_size: G. None: the dataset's.
    """
    dataset: Any = loader.dataset
    if type(dataset).__name__ == "IterableDatasetShard":
        # accelerate's wrapper has the loader's batch size; G is an attribute of the dataset inside.
        dataset = dataset.dataset
    streams = dataset.batch_size if batch_size is None else batch_size
    rows, left = divmod(streams, num_processes * accumulation_steps)
    layout = f"{num_processes} process(es) × {accumulation_steps} accumulation step(s)"
    if left:
        raise ValueError(
            f"the stream has batch_size={streams}, which {layout} cannot share: make it a multiple of "
            f"{num_processes * accumulation_steps}"
        )
    if getattr(loader, "persistent_workers", False) and hasattr(dataset, "set_epoch"):
        raise ValueError(
            "workers that outlive an epoch would read the next ones as the first: set persistent_workers=False "
            "(dataloader_persistent_workers in TrainingArguments)"
        )
    cure = (
        f"{rows} rows per process × {layout} must be the stream's batch_size={streams}: set the loader's batch size "
        f"to {rows} (per_device_train_batch_size or per_device_eval_batch_size in TrainingArguments), with "
        f"split_batches=True to {rows * num_processes}"
    )
    if isinstance(dataset, IterableDataset):
        # accelerate's dispatcher splits a batch after it was loaded.
        right = rows * num_processes if getattr(loader, "split_batches", False) else rows
        if loader.batch_size not in (None, right):
            raise ValueError(f"the loader's batch size is {loader.batch_size}, but {cure}")
        return
    for k, indices in enumerate(islice(loader.batch_sampler or [[0]], 256)):
        first, batch = (k * num_processes + process_index) * rows, list(indices)
        if batch != list(range(batch[0], batch[0] + len(batch))) or not getattr(loader, "in_order", True):
            raise ValueError(
                "the loader shuffles, but memory needs segments in their order: use shuffle=False and in_order=True, "
                "or train_sampling_strategy='sequential' in TrainingArguments"
            )
        if batch != list(range(first, first + rows)):
            raise ValueError(
                f"batch {k} of process {process_index} holds items {batch[0]} to {batch[-1]} instead of {first} to "
                f"{first + rows - 1}, so that rows would go on with the memory of others: {cure}"
            )


def read_tokens(token_ids, start: int, stop: int) -> Tensor:
    """Tokens [start, stop) of a text as int64, a copy. Raises a ValueError unless all are integers."""
    tokens = _as_array(token_ids[start:stop])
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        shape = "" if tokens.ndim == 1 else f" in {tokens.ndim} dimensions"
        raise ValueError(
            f"token_ids must be one sequence of integers, but tokens {start} to {stop - 1} hold {tokens.dtype}{shape}"
        )
    return torch.from_numpy(tokens.astype(np.int64))


def text_fingerprint(token_ids) -> str:
    """A text's length and the CRC-32 of all its tokens: half a second for 100 million, read once from the disk."""
    length, checksum, at_once = len(token_ids), 0, 1 << 20
    for start in range(0, length, at_once):
        tokens = read_tokens(token_ids, start, min(length, start + at_once)).numpy()
        checksum = zlib.crc32(tokens.astype("<i4").data, checksum)
    return f"{length} tokens, CRC-32 {checksum:08x}"


def open_tokens(token_ids) -> Any:
    """A text as it is, or `ArrowTokens` for a column of Arrow or of a `datasets.Dataset`. Raises a ValueError unless
    it is a sequence of integers, at least one: of a list or tuple all are read; others have one type for all."""
    source, name = getattr(token_ids, "source", None), getattr(token_ids, "column_name", None)
    table = getattr(source, "data", None)
    # With indices, as after `shuffle`, or a custom format, the dataset's rows are not those of its table.
    plain = getattr(source, "_indices", True) is None and getattr(source, "_format_type", None) != "custom"
    if name is not None and table is not None and plain:
        token_ids = ArrowTokens(table.column(name), token_ids)
    elif hasattr(token_ids, "num_chunks"):
        token_ids = ArrowTokens(token_ids, token_ids)
    if len(token_ids) == 0:
        raise ValueError("the text is empty: token_ids holds no token")
    read_tokens(token_ids, 0, len(token_ids) if isinstance(token_ids, list | tuple) else 1)
    return token_ids


class ArrowTokens:
    """The integers of a `pyarrow.ChunkedArray`, read from memory or from a disk without a copy of all.

    A slice is found among the chunks by bisection, because `Dataset` compares it with all of them, which are as many
    as the writer had batches: a million in a text of a billion tokens.

    Args:
        column: N integers.
        source: the argument of `open_tokens`, which is pickled in place of the integers.

    Raises:
        ValueError: they are not all integers.
    """

    def __init__(self, column, source):
        self._source = source
        self._chunks = [chunk for chunk in column.chunks if len(chunk)]
        self._ends = np.cumsum([len(chunk) for chunk in self._chunks])
        if column.null_count or not str(column.type).removeprefix("u").startswith("int"):
            nulls = f" with {column.null_count} missing" if column.null_count else ""
            raise ValueError(f"token_ids must be one sequence of integers, but the column holds {column.type}{nulls}")

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._chunks else 0

    def __getitem__(self, index: slice | int) -> Any:
        """A view or a copy of a slice, as an array; a single token as a number."""
        if not isinstance(index, slice):
            place = range(len(self))[index]
            return self._read(place, place + 1)[0]
        start, stop, step = index.indices(len(self))
        return self._read(start, stop)[::step] if start < stop else np.zeros(0, dtype=np.int64)

    def _read(self, start: int, stop: int) -> np.ndarray:
        first, last = np.searchsorted(self._ends, [start, stop - 1], side="right")
        parts = [chunk.to_numpy(zero_copy_only=True) for chunk in self._chunks[first : last + 1]]
        offset = int(self._ends[first - 1]) if first else 0
        tokens = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return tokens[start - offset : stop - offset]

    def __reduce__(self):
        # Pickles `source`, because a dataset pickles the names of its files, and a column its contents.
        return open_tokens, (self._source,)


def _as_array(tokens) -> np.ndarray:
    # NumPy converts True among integers to 1, and an empty list to floats.
    if isinstance(tokens, list | tuple) and (not tokens or {bool, np.bool_} & set(map(type, tokens))):
        return np.zeros(len(tokens), bool if tokens else np.int64)
    try:
        return np.asarray(tokens.cpu() if isinstance(tokens, Tensor) else tokens)
    except ValueError:
        # NumPy raises a ValueError for sequences of different lengths.
        return np.asarray([None])


def check_sizes(*, least: int = 1, **sizes: int) -> None:
    """Raise a ValueError that names the size that is not an integer of at least `least`; bools are refused too."""
    for name, size in sizes.items():
        if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < least:
            raise ValueError(f"{name}={size!r} must be an integer of at least {least}")
