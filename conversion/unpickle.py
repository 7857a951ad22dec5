"""Read pickles and PyTorch files without running anything they say.

A pickle is a program for a small stack machine, and the standard machine imports and calls whatever the program
names. This one knows the same instructions but imports and calls nothing: a class or function is only ever a *name*.
Where the program calls one of the names in `BUILDERS` (tensors, OrderedDict, Counter, set and the like), a function
of this module makes the plain value it stands for; where it calls any other name, the result is a `StandIn` that keeps
the arguments and attributes and can do nothing.

Three kinds of file are understood, as the originals wrote them over the years: a bare pickle (`vocab.pkl`,
`cache.pkl`), the zip archives of torch >= 1.6, and the concatenated pickles that torch wrote before that. Tensors are
not read until `StoredTensor.read` asks for them, one at a time.
"""

import io
import math
import mmap
import pickletools
import struct
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # what torch < 1.6 pickles first
LEGACY_PROTOCOL = 1001
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


class UnsafePickleError(ValueError):
    """The file is no pickle, is damaged, or asks for something that is refused. The message is one line."""


@dataclass(frozen=True, eq=False)
class Name:
    """A class or function the pickle names: never imported."""

    module: str
    name: str

    def __str__(self):
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class StandIn:
    """An object of a class that is not on the allow-list: what the pickle said about it, and nothing else.

    `attributes` holds what would have become `__dict__`; `items` and `entries` what would have been appended or set.
    """

    name: Name
    args: tuple = ()
    attributes: dict = field(default_factory=dict)
    items: list = field(default_factory=list)
    entries: dict = field(default_factory=dict)

    def __repr__(self):
        return f"<stand-in for {self.name}>"


@dataclass(eq=False)
class Storage:
    """A flat piece of memory that tensors are views of; `start` and the bytes are known once the file is laid out."""

    dtype: torch.dtype
    key: str
    numel: int
    first: int = 0  # element at which this view of the storage begins (torch < 0.4 shared storages that way)
    file: "StorageFile | None" = None


@dataclass(eq=False)
class StoredTensor:
    """A tensor still in its file. `stride` and `offset` count elements of the storage."""

    storage: Storage
    offset: int
    shape: tuple
    stride: tuple

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.dtype

    @property
    def place(self) -> tuple:
        """What tells whether two tensors of one file are the same memory."""
        return (self.storage.key, self.storage.first + self.offset, self.shape, self.stride)

    def read(self) -> torch.Tensor:
        """Return the tensor, contiguous, in memory of its own.

        Raises UnsafePickleError if the file has not enough bytes for it.
        """
        if math.prod(self.shape) == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        last = self.offset + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        # The first condition keeps out tensors blown up from a few bytes by strides of 0.
        if math.prod(self.shape) > self.storage.numel or last >= self.storage.numel:
            raise UnsafePickleError(f"a tensor of shape {list(self.shape)} does not fit its storage")
        flat = torch.frombuffer(self.storage.file.read(self.storage), dtype=self.dtype)
        return flat.as_strided(self.shape, self.stride, self.offset).contiguous()


def load(path: str | Path) -> object:
    """Return the object pickled in `path`: plain values, lists, dicts, `StandIn`s and `StoredTensor`s.

    Raises UnsafePickleError with a one-line reason for anything but a whole, uncompressed file of the three kinds.
    """
    path = Path(path)
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            raise UnsafePickleError(f"{path.name} is empty")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _load_archive(path, data) if data[:4] == b"PK\x03\x04" else _load_stream(path, data)
    except UnsafePickleError as error:
        raise UnsafePickleError(f"{path.name}: {error}") from None
    except zipfile.BadZipFile as error:  # its directory is at the end
        raise UnsafePickleError(f"{path.name} is truncated or damaged ({error}): copy or download it again") from None
    except Exception as error:  # damaged bytes make the standard readers fail in a dozen ways
        raise UnsafePickleError(f"{path.name} cannot be read as a pickle ({_one_line(error)})") from None


def _one_line(error):
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


class StorageFile:
    """Where the bytes of each storage lie in the file. `places`: key -> (first byte, number of bytes)."""

    def __init__(self, path):
        self.path = path
        self.places = {}

    def read(self, storage: "Storage") -> bytearray:
        """Return the bytes of `storage` as a bytearray of its own."""
        if storage.key not in self.places:
            raise UnsafePickleError(f"storage {storage.key} is missing from the file")
        begin, length = self.places[storage.key]
        begin += storage.first * storage.dtype.itemsize
        wanted = storage.numel * storage.dtype.itemsize
        if storage.first * storage.dtype.itemsize + wanted > length:
            raise UnsafePickleError(f"storage {storage.key} is shorter than it says")
        data = bytearray(wanted)
        # Read, not mapped: pages of a mapping would count as memory on top of the tensors.
        with self.path.open("rb") as file:
            file.seek(begin)
            file.readinto(data)
        return data


def _load_archive(path, data):
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: info for info in archive.infolist()}
    pickles = [name for name in records if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise UnsafePickleError(
            f"a zip archive with {len(pickles)} data.pkl records, where torch.save writes one: a packed release?"
        )
    root = pickles[0].removesuffix("data.pkl")
    if f"{root}constants.pkl" in records:
        raise UnsafePickleError("a TorchScript program, not a file written by torch.save")
    if f"{root}byteorder" in records:
        begin, length = _record(data, records[f"{root}byteorder"])
        if data[begin : begin + length] != b"little":
            raise UnsafePickleError("written on a big-endian machine")
    file = StorageFile(path)
    for name, info in records.items():
        if name.startswith(f"{root}data/"):
            file.places[name.removeprefix(f"{root}data/")] = _record(data, info)
    begin, length = _record(data, records[pickles[0]])
    return _Machine(file, length).run(io.BytesIO(data[begin : begin + length]))


def _record(data, info):
    """Return (first byte, length) of a zip record.

    torch stores its records uncompressed; a compressed one could unpack to any size.
    """
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.file_size != info.compress_size:
        raise UnsafePickleError(f"record {info.filename} is compressed or encrypted, which torch.save never does")
    header = data[info.header_offset : info.header_offset + 30]
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    begin = info.header_offset + 30 + name_length + extra_length
    if begin + info.file_size > len(data):
        raise UnsafePickleError(f"record {info.filename} is cut off")
    return begin, info.file_size


def _load_stream(path, data):
    file = StorageFile(path)
    first = _Machine(file, len(data)).run(data)
    if first != LEGACY_MAGIC:
        return first
    if _Machine(file, len(data)).run(data) != LEGACY_PROTOCOL:
        raise UnsafePickleError("an unknown version of torch's old file format")
    system = _Machine(file, len(data)).run(data)
    if not (isinstance(system, dict) and system.get("little_endian") is True):
        raise UnsafePickleError("written on a big-endian machine")
    machine = _Machine(file, len(data))
    value = machine.run(data)
    keys = _Machine(file, len(data)).run(data)
    if not (isinstance(keys, list) and all(isinstance(key, str) for key in keys)):
        raise UnsafePickleError("no list of storages after the pickle")
    position = data.tell()
    for key in keys:
        if key not in machine.dtypes:
            raise UnsafePickleError(f"storage {key} belongs to no tensor")
        (numel,) = struct.unpack("<q", data[position : position + 8])
        length = numel * machine.dtypes[key].itemsize
        if numel < 0 or position + 8 + length > len(data):
            raise UnsafePickleError(f"storage {key} is cut off")
        file.places[key] = (position + 8, length)
        position += 8 + length
    return value


# ---- what a pickle may build ----


def _tensor(storage, offset, shape, stride, *_hooks):
    if isinstance(storage, StandIn):  # pickled without torch.save: the bytes are a pickle inside the pickle
        return StandIn(Name("torch", "Tensor"))
    shape, stride = tuple(shape), tuple(stride)
    numbers = (offset, *shape, *stride)
    if not isinstance(storage, Storage) or not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
        raise UnsafePickleError("a tensor with a storage, shape or stride of the wrong kind")
    if len(shape) != len(stride) or len(shape) > MAX_DIMENSIONS:
        raise UnsafePickleError(f"a tensor with {len(shape)} dimensions and {len(stride)} strides")
    return StoredTensor(storage, offset, shape, stride)


def _parameter(tensor, *_rest):
    if not isinstance(tensor, StoredTensor):
        raise UnsafePickleError("a parameter made of something that is no tensor")
    return tensor


def _pairs(pairs=()):
    return dict(pairs) if isinstance(pairs, dict) else {_key(key): value for key, value in pairs}


def _counter(counts=None, *_):
    return _pairs(counts or ())


def _defaultdict(_factory=None, pairs=()):
    return _pairs(pairs)


def _set(items=()):
    return {_key(item) for item in items}


def _encode(text, encoding="latin1"):
    # Python 3 writes bytes this way in old protocols; every other codec (zip, hex, ...) stays out of reach.
    if encoding not in ("latin1", "latin-1", "utf-8"):
        raise UnsafePickleError("bytes in an encoding that pickle never uses")
    return text.encode(encoding)


BUILDERS = {
    "collections.OrderedDict": _pairs,
    "collections.Counter": _counter,
    "collections.defaultdict": _defaultdict,
    "builtins.set": _set,
    "__builtin__.set": _set,
    "builtins.frozenset": _set,
    "__builtin__.frozenset": _set,
    "_codecs.encode": _encode,
    "__builtin__.bytes": lambda: b"",  # an empty one in protocols below 3; with arguments it is refused
    "torch.Size": lambda sizes=(): tuple(sizes),
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch.nn.parameter.Parameter": _parameter,
}


def _key(value):
    """Return `value` if it may be a dictionary key or a member of a set.

    Tuples in tuples may not: hashing a deep one overflows the C stack.
    """
    if isinstance(value, tuple):
        if not all(part is None or isinstance(part, str | bytes | int | float) for part in value):
            raise UnsafePickleError("a nested tuple as a dictionary key")
    elif isinstance(value, list | dict | set | frozenset | bytearray):
        raise UnsafePickleError(f"a {type(value).__name__} as a dictionary key")
    return value


# ---- the machine ----

_CONSTANTS = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING BINBYTES"
    " SHORT_BINBYTES BINBYTES8 BYTEARRAY8 UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8".split()
)
_MARK = object()


class _Machine:
    """Runs one pickle of at most `size` bytes.

    Instructions are decoded by `pickletools.genops`, which executes nothing; the method named after an instruction, in
    lower case behind `op_`, carries it out.
    """

    def __init__(self, file, size):
        self.file = file
        self.stack = []
        self.memo = {}
        self.dtypes = {}  # storage key -> dtype, for torch's old file format
        self.budget = size

    def run(self, stream):
        """Run the pickle at the position of `stream` (a BytesIO or mmap) and return its value.

        The stream is left at the first byte behind the pickle.
        """
        for opcode, argument, _ in pickletools.genops(stream):
            if opcode.name in _CONSTANTS:
                self.stack.append(argument)
            elif opcode.name == "STOP":
                break
            else:
                step = getattr(self, f"op_{opcode.name.lower()}", None)
                if step is None:
                    raise UnsafePickleError(f"instruction {opcode.name}, which no original writes, is refused")
                step(argument)
        value = self.take()
        if self.stack:
            raise UnsafePickleError("the pickle ends in the middle of a value")
        return value

    def take(self):
        value = self.stack.pop()
        if value is _MARK:
            raise UnsafePickleError("a mark where a value should be")
        return value

    def top(self):
        if self.stack[-1] is _MARK:
            raise UnsafePickleError("a mark where a value should be")
        return self.stack[-1]

    def take_to_mark(self):
        index = len(self.stack) - 1
        while index >= 0 and self.stack[index] is not _MARK:
            index -= 1
        if index < 0:
            raise UnsafePickleError("a mark is missing")
        values = self.stack[index + 1 :]
        del self.stack[index:]
        return values

    def pay(self, values):
        """Count what is copied: a few bytes of pickle could otherwise copy one long list again and again."""
        self.budget -= len(values) if isinstance(values, str | bytes | list | tuple | dict | set) else 0
        if self.budget < 0:
            raise UnsafePickleError("the pickle would unpack to more than it holds")

    # The version and the framing change nothing
    def op_proto(self, _):
        pass

    def op_frame(self, _):
        pass

    # The stack and the memo
    def op_none(self, _):
        self.stack.append(None)

    def op_newtrue(self, _):
        self.stack.append(True)

    def op_newfalse(self, _):
        self.stack.append(False)

    def op_mark(self, _):
        self.stack.append(_MARK)

    def op_pop(self, _):
        self.stack.pop()

    def op_pop_mark(self, _):
        self.take_to_mark()

    def op_dup(self, _):
        self.stack.append(self.top())

    def op_memoize(self, _):
        self.memo[len(self.memo)] = self.top()

    def op_put(self, index):
        self.memo[index] = self.top()

    op_binput = op_long_binput = op_put

    def op_get(self, index):
        self.stack.append(self.memo[index])

    op_binget = op_long_binget = op_get

    # Containers
    def op_empty_list(self, _):
        self.stack.append([])

    def op_list(self, _):
        self.stack.append(self.take_to_mark())

    def op_append(self, _):
        self.extend([self.take()])

    def op_appends(self, _):
        self.extend(self.take_to_mark())

    def extend(self, values):
        target = self.top()
        target = target.items if isinstance(target, StandIn) else target
        if not isinstance(target, list):
            raise UnsafePickleError("an append to something that is no list")
        target.extend(values)

    def op_empty_tuple(self, _):
        self.stack.append(())

    def op_tuple(self, _):
        self.stack.append(tuple(self.take_to_mark()))

    def op_tuple1(self, _):
        self.stack.append((self.take(),))

    def op_tuple2(self, _):
        second, first = self.take(), self.take()
        self.stack.append((first, second))

    def op_tuple3(self, _):
        third, second, first = self.take(), self.take(), self.take()
        self.stack.append((first, second, third))

    def op_empty_dict(self, _):
        self.stack.append({})

    def op_dict(self, _):
        values = self.take_to_mark()
        self.stack.append({})
        self.assign(values)

    def op_setitem(self, _):
        value, key = self.take(), self.take()
        self.assign([key, value])

    def op_setitems(self, _):
        self.assign(self.take_to_mark())

    def assign(self, values):
        target = self.top()
        target = target.entries if isinstance(target, StandIn) else target
        if not isinstance(target, dict) or len(values) % 2:
            raise UnsafePickleError("keys and values set on something that is no dictionary")
        for key, value in zip(values[::2], values[1::2], strict=True):
            target[_key(key)] = value

    def op_empty_set(self, _):
        self.stack.append(set())

    def op_additems(self, _):
        values, target = self.take_to_mark(), self.top()
        if not isinstance(target, set):
            raise UnsafePickleError("members added to something that is no set")
        target.update(_key(value) for value in values)

    def op_frozenset(self, _):
        self.stack.append(frozenset(_key(value) for value in self.take_to_mark()))

    # Names and objects
    def op_global(self, names):
        module, _, name = names.partition(" ")
        self.stack.append(Name(module, name))

    def op_stack_global(self, _):
        name, module = self.take(), self.take()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise UnsafePickleError("a class name that is no text")
        self.stack.append(Name(module, name))

    def op_reduce(self, _):
        args, callee = self.take(), self.take()
        self.construct(callee, args)

    op_newobj = op_reduce

    def op_newobj_ex(self, _):
        keywords, args, callee = self.take(), self.take(), self.take()
        self.construct(callee, args)
        if isinstance(self.top(), StandIn) and isinstance(keywords, dict):
            self.top().attributes.update(keywords)

    def op_obj(self, _):
        callee, *args = self.take_to_mark()
        self.construct(callee, tuple(args))

    def op_inst(self, names):
        args = tuple(self.take_to_mark())
        self.op_global(names)
        self.construct(self.take(), args)

    def construct(self, callee, args):
        if not isinstance(callee, Name) or not isinstance(args, tuple):
            raise UnsafePickleError("a call of something that is no plain class or function name")
        build = BUILDERS.get(str(callee))
        if build is None:
            self.stack.append(StandIn(callee, args))
            return
        for argument in args:
            self.pay(argument)
        try:
            self.stack.append(build(*args))
        except (TypeError, ValueError, AttributeError) as error:
            raise UnsafePickleError(f"{callee} with arguments it cannot have ({_one_line(error)})") from None

    def op_build(self, _):
        state, target = self.take(), self.top()
        if isinstance(target, StandIn):
            parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
            for part in parts:  # (attributes of __dict__, attributes of __slots__)
                if isinstance(part, dict):
                    target.attributes.update(part)
        # Attributes of the plain values (the version numbers on a state dict, hooks of a tensor) mean nothing here.
        elif not isinstance(target, dict | set | list | StoredTensor):
            raise UnsafePickleError("attributes set on something that has none")

    def op_binpersid(self, _):
        identity = self.take()
        match identity:
            case ("module", Name() as name, *_):  # torch < 1.6 kept the source of each class beside it
                self.stack.append(name)
            case ("storage", Name(module="torch" | "torch.cuda", name=kind), str(key), _, int(numel), *view):
                self.stack.append(self.storage(kind, key, numel, view[0] if view else None))
            case _:
                raise UnsafePickleError("a reference outside the file that torch does not write")

    def storage(self, kind, key, numel, view):
        if kind not in STORAGE_DTYPES:
            raise UnsafePickleError(f"a storage of the unknown kind {kind}")
        dtype, first = STORAGE_DTYPES[kind], 0
        if view is not None:
            _, first, numel = view
        if not (type(first) is int and type(numel) is int and 0 <= first < 2**62 and 0 <= numel < 2**62):
            raise UnsafePickleError("a storage of an impossible size")
        self.dtypes[key] = dtype
        return Storage(dtype, key, numel, first, self.file)
