"""A column of Arrow as a text: sliced in the same time wherever the slice lies and whatever wrote the column."""

import mmap
import os
from typing import Any

import numpy as np

__all__ = ["ArrowTokens", "MappedTokens", "open_tokens"]


def open_tokens(token_ids) -> Any:
    """What is read as a text: an Arrow column, also one of a `datasets.Dataset`, as `ArrowTokens`; a memory-mapped
    file as `MappedTokens`; all else as it is.

    A dataset reads a slice through its format and its table, which look for it among all of the column's pieces: as
    many as its writer had batches, a million in a text of a billion tokens.
    """
    source, name = getattr(token_ids, "source", None), getattr(token_ids, "column_name", None)
    table = getattr(source, "data", None)
    # With indices, as after `shuffle`, or another function for its format, its rows are not those of the table.
    plain = getattr(source, "_indices", True) is None and getattr(source, "_format_type", None) != "custom"
    if name is not None and table is not None and plain:
        return ArrowTokens(table.column(name), token_ids)
    if isinstance(token_ids, np.memmap):
        return token_ids.view(MappedTokens)
    return ArrowTokens(token_ids, token_ids) if hasattr(token_ids, "num_chunks") else token_ids


class MappedTokens(np.memmap):
    """Part of a memory-mapped file, which another process of this machine opens for itself: numpy would hand it a
    copy, as it does where the file is gone."""

    def __reduce__(self):
        # What was written to a private copy is in no file.
        is_part = self.ndim == 1 and self.flags.c_contiguous and self.mode != "c"
        if not is_part or self.filename is None or not os.path.exists(self.filename):
            return super().__reduce__()
        # A slice has the offset of what it was cut from; where it begins itself, its address says.
        begin = self.offset - self.offset % mmap.ALLOCATIONGRANULARITY
        place = self.ctypes.data - np.frombuffer(self._mmap, np.uint8).ctypes.data
        return _map, (self.filename, self.dtype, begin + place, len(self))


def _map(filename: str, dtype: np.dtype, offset: int, length: int) -> MappedTokens:
    return np.memmap(filename, dtype, "r", offset, (length,)).view(MappedTokens)


class ArrowTokens:
    """The integers of a `pyarrow.ChunkedArray`, which stay where they are, in memory or on a disk.

    Args:
        column: N integers.
        source: what `open_tokens` made it of, to be opened again in another process.

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
        if step < 0:
            raise ValueError(f"a text is read forwards, but the slice {index} has step={step}")
        return self._read(start, stop)[::step] if start < stop else np.zeros(0, dtype=np.int64)

    def _read(self, start: int, stop: int) -> np.ndarray:
        first, last = np.searchsorted(self._ends, [start, stop - 1], side="right")
        parts = [chunk.to_numpy(zero_copy_only=True) for chunk in self._chunks[first : last + 1]]
        offset = int(self._ends[first - 1]) if first else 0
        tokens = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return tokens[start - offset : stop - offset]

    def __reduce__(self):
        # A dataset is pickled by the names of its files, and its columns by their contents.
        return open_tokens, (self._source,)
