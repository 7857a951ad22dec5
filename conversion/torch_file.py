"""Files of `torch.save`, read without running their pickles; each tensor when `StoredTensor.read` asks for it."""

import functools
import math
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import torch

from txl_hf.legacy.unpickle import Inert, Reader, Record, StandIn, UnsafePickleError, shown, stand_in
from txl_hf.legacy.unpickle import load as load_pickle

MAX_DIMENSIONS = 8

STORAGE_DTYPES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


def load(path: str | Path) -> Any:
    """Return the object pickled in `path`, with `StoredTensor`s for tensors. Raises UnsafePickleError, as the load of
    `txl_hf.legacy.unpickle`.
    """
    return load_pickle(path, functools.partial(_TorchReader, StorageFile(Path(path))))


class StorageFile:
    """The places of storages in the file. `places`: key of a storage -> Record."""

    def __init__(self, path: Path):
        self.path = path
        self.places: dict[str, Record] = {}
        self.checked: set[str] = set()

    def place(self, storage: "Storage") -> int:
        """Return the offset of `storage` in the file, after a check of its size and checksum."""
        if storage.key not in self.places:
            raise UnsafePickleError(f"storage {shown(storage.key)} is missing from {self.path.name}")
        record, width = self.places[storage.key], storage.dtype.itemsize
        if (storage.first + storage.numel) * width > record.length:
            raise UnsafePickleError(f"storage {shown(storage.key)} in {self.path.name} is shorter than it says")
        if record.name not in self.checked:
            end = record.begin + record.length
            with self.map() as data, memoryview(data) as view, view[record.begin : end] as content:
                intact = record.is_intact(content)
            if not intact:
                raise UnsafePickleError(
                    f"{self.path.name} is damaged: the checksum of record {shown(record.name)} does not match; copy "
                    "or download it again"
                )
            self.checked.add(record.name)
        return record.begin + storage.first * width

    def map(self) -> mmap.mmap:
        """Return the file as a mapping, a new one for each tensor, because pages of one that stays count as memory."""
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


@dataclass(eq=False)
class Storage(Inert):
    """A flat piece of memory that tensors are views of; its place in the file is known after the pickle was read."""

    dtype: torch.dtype
    key: str
    numel: int
    file: StorageFile
    first: int = 0  # element at which this view of the storage begins (torch < 0.4 shared storages that way)


@dataclass(eq=False)
class StoredTensor(Inert):
    """A tensor still in its file. `stride` and `offset` count elements of the storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.dtype

    @property
    def place(self) -> tuple:
        """A key of the tensor's memory: two tensors of one file with equal places are the same memory."""
        return (self.storage.key, self.storage.first + self.offset, self.shape, self.stride)

    def read(self) -> torch.Tensor:
        """Return a contiguous copy. Raises UnsafePickleError if its bytes in the file are too few or damaged."""
        numel = math.prod(self.shape)
        if numel == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        span = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        # The first condition refuses tensors that strides of 0 enlarge from a few bytes.
        if numel > self.storage.numel or self.offset + span > self.storage.numel:
            raise UnsafePickleError(f"a tensor of shape {list(self.shape)} does not fit its storage")
        file, width = self.storage.file, self.dtype.itemsize
        begin, content = file.place(self.storage) + self.offset * width, file.map()
        if len(content) < begin + span * width:
            raise UnsafePickleError(f"{file.path.name} is cut off")
        array: np.ndarray = np.ndarray(
            self.shape,
            f"<u{width}",
            buffer=content,
            offset=begin,
            strides=[step * width for step in self.stride],
        )
        return torch.from_numpy(array.copy(order="C")).view(self.dtype)


# ---- what torch writes in pickles ----


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_hooks: Any) -> StoredTensor | StandIn:
    if isinstance(storage, StandIn):  # pickled without torch.save: the bytes are a pickle inside the pickle
        return stand_in("torch.Tensor")()
    shape, stride = tuple(shape), tuple(stride)
    numbers = (offset, *shape, *stride)
    if not isinstance(storage, Storage) or not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
        raise UnsafePickleError("a tensor with a storage, shape or stride of the wrong kind")
    if len(shape) != len(stride) or len(shape) > MAX_DIMENSIONS:
        raise UnsafePickleError(f"a tensor with {len(shape)} dimensions and {len(stride)} strides")
    return StoredTensor(storage, offset, shape, stride)


def _parameter(tensor: Any, *_rest: Any) -> StoredTensor:
    if not isinstance(tensor, StoredTensor):
        raise UnsafePickleError("a parameter made of something that is no tensor")
    return tensor


class _TorchReader(Reader):
    """A reader that also builds tensors, whose storages are in `storages`."""

    builders: ClassVar[dict[str, Callable]] = Reader.builders | {
        "torch.Size": tuple,
        "torch._utils._rebuild_tensor": _tensor,
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_parameter": _parameter,
        "torch.nn.parameter.Parameter": _parameter,
    }

    def __init__(self, storages: StorageFile, file: BinaryIO):
        super().__init__(file)
        self.storages = storages
        self.dtypes: dict[str, torch.dtype] = {}  # of each storage, for torch's old file format

    def persistent_load(self, identity: Any) -> type[StandIn] | Storage:
        match identity:
            case ("module", type() as kind, *_):  # torch < 1.6 kept the source of each class beside it
                return kind
            case ("storage", type() as kind, str(key), _, int(numel), *view) if issubclass(kind, StandIn):
                return self.storage(kind.name, key, numel, view[0] if view else None)
        raise UnsafePickleError("a reference outside the file that torch does not write")

    def storage(self, kind: str, key: str, numel: int, view: Any) -> Storage:
        dtype, first = STORAGE_DTYPES.get(kind.removeprefix("torch.").removeprefix("cuda.")), 0
        if dtype is None:
            raise UnsafePickleError(f"a storage of the unknown kind {shown(kind)}")
        if view is not None:
            _, first, numel = view
        if not (type(first) is int and type(numel) is int and 0 <= first < 2**62 and 0 <= numel < 2**62):
            raise UnsafePickleError("a storage of an impossible size")
        self.dtypes[key] = dtype
        return Storage(dtype, key, numel, self.storages, first)

    def place_records(self, records: dict[str, Record]) -> None:
        self.storages.places = records

    def place_stream(self, file: BinaryIO) -> None:
        keys = Reader(file).load()
        if not (isinstance(keys, list) and all(isinstance(key, str) for key in keys)):
            raise UnsafePickleError("no list of storages after the pickle")
        begin, end = file.tell(), os.fstat(file.fileno()).st_size
        for key in keys:
            if key not in self.dtypes:
                raise UnsafePickleError(f"storage {shown(key)} belongs to no tensor")
            file.seek(begin)
            (numel,) = struct.unpack("<q", file.read(8))
            begin, length = begin + 8, numel * self.dtypes[key].itemsize
            if numel < 0 or begin + length > end:
                raise UnsafePickleError(f"storage {shown(key)} is cut off")
            self.storages.places[key] = Record(key, begin, length, checksum=0)
            begin += length
