"""Reads pickles without running anything they say, for the tokenizer's legacy vocabularies and for the converters.

A pickle is a program for a small stack machine, and the standard machine imports and calls whatever the program
names. [`Machine`] knows the same instructions but imports nothing, calls nothing and sets no attribute: a class or
function is only a [`Name`], of those that the originals' files hold. Where the program calls one of the names in
`Machine.builders` (OrderedDict, Counter, set and the like), a function of this module makes the plain value it stands
for; where it calls any other, the result is a [`StandIn`], which keeps the attributes and can do nothing.

A few bytes of a pickle can build huge objects. So the machine counts its instructions, and in bytes what it builds,
copies, hashes and walks; a pickle that asks for more than `MAX_BYTES` and its own size is refused. Keys of
dictionaries and members of sets are texts and numbers alone, because a tuple is hashed anew each time; and not many
large numbers, because those can be made to collide.

Three formats are read: a bare pickle (`vocab.pkl`, `cache.pkl`), the zip archives of torch >= 1.6, and the
concatenated pickles that torch wrote before.
"""

import codecs
import functools
import mmap
import os
import pickletools
import re
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

MAX_BYTES = 512 << 20  # beside the size of the file; a vocabulary of a million words takes 450 MiB
MAX_STEPS = 1 << 25  # the same vocabulary takes 8 million
MAX_CONSTANT = 8 << 20  # bytes; longer texts, which are pickled arrays of numbers, are left in the file
MAX_NUMBER_KEYS = 1 << 15  # an optimizer's state has one for each parameter
STACK_STEP = 1024  # values of the stack that are counted at a time

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle in a file of torch < 1.6
LEGACY_PROTOCOL = 1001

# Bytes that an entry of each container takes in CPython, with the room that growth leaves unused.
LIST_ITEM, DICT_ITEM, SET_ITEM, MEMO_ITEM, STAND_IN = 16, 72, 112, 104, 400

# The classes and functions that the originals' files name: by module or, because copies of the originals' sources lie
# elsewhere, by the last part of the module or the class's name.
_KNOWN = re.compile(
    r"""(?x)
    builtins\.(bool|bytes|dict|float|frozenset|int|list|long|object|set|slice|str|tuple|unicode)
    | _codecs\.encode | copy_reg\._reconstructor | copyreg\._reconstructor | functools\.partial | argparse\.Namespace
    | collections\.\w+ | pathlib\.\w+
    | (torch|numpy|apex|re|regex|sacremoses|transformers|tokenizers|pytorch_transformers)(\.\w+)*\.\w+
    | __main__\.\w+
    | (\w+\.)*(mem_transformer|data_utils|vocabulary|fp16_opt|proj_adaptive_softmax|adaptive_softmax)\.\w+
    | (\w+\.)*utils(\.\w+)*\.\w+
    | (\w+\.)+(Corpus|LM1BCorpus|Vocab|OpenAIVocab|MemTransformerLM|AdaptiveEmbedding|ProjectedAdaptiveLogSoftmax
      |PositionalEmbedding|PositionwiseFF|DecoderLayer|RelLearnableDecoderLayer|RelPartialLearnableDecoderLayer
      |MultiHeadAttn|RelMultiHeadAttn|RelLearnableMultiHeadAttn|RelPartialLearnableMultiHeadAttn)
    """
)


class UnsafePickleError(ValueError):
    """The file is no pickle, is damaged, or calls something that is refused. The message is one line."""


def shown(value: object) -> str:
    """The beginning of a text for an error message, without control characters; of anything else, the type."""
    if isinstance(value, str):
        return repr(value[:60])[1:-1] + ("…" if len(value) > 60 else "")
    return f"a {type(value).__name__}"


@dataclass(frozen=True, eq=False, slots=True)
class Name:
    """A class or function that the pickle names; it is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class StandIn:
    """An object of a class that is not built: of its contents in the pickle only those of `__dict__`."""

    name: Name
    attributes: dict[Any, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<stand-in for {shown(str(self.name))}>"


# ---- files ----


class Record(NamedTuple):
    """A record of a zip archive: its bytes in the file, and their CRC-32."""

    name: str
    begin: int
    length: int
    checksum: int


class Stream:
    """The bytes of a mapping from `position` to `end`, read as `pickletools` reads a file."""

    def __init__(self, data: mmap.mmap, position: int, end: int):
        self.data = data
        self.position = position
        self.end = end

    def read(self, length: int) -> bytes:
        if length > MAX_CONSTANT:
            raise UnsafePickleError(f"a constant of {length} bytes")
        begin, self.position = self.position, min(self.position + length, self.end)
        return self.data[begin : self.position]

    def readline(self) -> bytes:
        found = self.data.find(b"\n", self.position, min(self.end, self.position + MAX_CONSTANT))
        if found < 0:
            raise UnsafePickleError("cannot be read as a pickle (a line without end)")
        return self.read(found + 1 - self.position)


def load(path: str | os.PathLike, machine: "Machine | None" = None) -> Any:
    """The object pickled in a file: plain values, lists, dicts and [`StandIn`]s, or what `machine` builds besides.

    Raises:
        UnsafePickleError: in one line that names the file, why it has none of the three formats, or what is refused.
    """
    path = Path(path)
    machine = machine or Machine()
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise UnsafePickleError(f"{path.name} is empty")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        with data:
            machine.budget += len(data)
            archive = data[:4] == b"PK\x03\x04"
            return _load_archive(path, data, machine) if archive else _load_stream(data, machine)
    except UnsafePickleError as error:
        raise UnsafePickleError(f"{path.name}: {error}") from None
    except zipfile.BadZipFile as error:  # its directory is at the end
        raise UnsafePickleError(f"{path.name} is truncated or damaged ({error}): copy or download it again") from None
    except Exception as error:  # damaged bytes make the standard readers fail in a dozen ways
        reason = " ".join(f"{type(error).__name__}: {shown(str(error))}".split())
        raise UnsafePickleError(f"{path.name} cannot be read as a pickle ({reason})") from None
    finally:
        machine.clear()  # a traceback keeps the machine alive


def _load_archive(path: Path, data: mmap.mmap, machine: "Machine") -> Any:
    records = read_directory(path, data)
    pickles = [name for name in records if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise UnsafePickleError(
            f"a zip archive with {len(pickles)} data.pkl records, where torch.save writes one: a packed release?"
        )
    root = pickles[0].removesuffix("data.pkl")
    order = records.get(f"{root}byteorder")
    if order is not None and data[order.begin : order.begin + order.length] != b"little":
        raise UnsafePickleError("written on a big-endian machine")
    place = f"{root}data/"
    machine.place_records({name[len(place) :]: record for name, record in records.items() if name.startswith(place)})
    record = records[pickles[0]]
    if not is_intact(data, record):
        raise UnsafePickleError("record data.pkl is damaged: its checksum does not match")
    return machine.run(Stream(data, record.begin, record.begin + record.length))


def read_directory(path: Path, data: mmap.mmap) -> dict[str, Record]:
    """The records of a zip archive by name. Raises an UnsafePickleError for one that is compressed (it could unpack to
    any size), encrypted or cut off, and a BadZipFile for a damaged archive.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return {info.filename: _record(data, info) for info in archive.infolist()}
    except (UnsafePickleError, zipfile.BadZipFile, OSError):
        raise
    except Exception as error:  # damaged numbers in a directory raise errors of many types
        raise zipfile.BadZipFile(shown(str(error))) from None


def _record(data: mmap.mmap, info: zipfile.ZipInfo) -> Record:
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.file_size != info.compress_size:
        raise UnsafePickleError(
            f"record {shown(info.filename)} of the zip archive is compressed or encrypted, which torch.save never "
            "does: another program packed the file again"
        )
    header = data[info.header_offset : info.header_offset + 30]
    if len(header) < 30:
        raise UnsafePickleError(f"record {shown(info.filename)} is cut off")
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    begin = info.header_offset + 30 + name_length + extra_length
    if begin + info.file_size > len(data):
        raise UnsafePickleError(f"record {shown(info.filename)} is cut off")
    return Record(info.filename, begin, info.file_size, info.CRC)


def is_intact(data: mmap.mmap, record: Record) -> bool:
    """Whether a record has its CRC-32. torch writes 0 where checksums are switched off."""
    with memoryview(data) as view, view[record.begin : record.begin + record.length] as content:
        return record.checksum == 0 or record.checksum == zlib.crc32(content)


def _load_stream(data: mmap.mmap, machine: "Machine") -> Any:
    stream = Stream(data, 0, len(data))
    first = machine.run(stream)
    if type(first) is not int or first != LEGACY_MAGIC:
        return first
    version = machine.run(stream)
    if type(version) is not int or version != LEGACY_PROTOCOL:
        raise UnsafePickleError("an unknown version of torch's old file format")
    system = machine.run(stream)
    if not (isinstance(system, dict) and system.get("little_endian") is True):
        raise UnsafePickleError("written on a big-endian machine")
    value = machine.run(stream)
    machine.place_stream(stream)
    return value


# ---- what a pickle may build ----


def _pairs(machine: "Machine", pairs: Any = (), *_: Any) -> dict:
    """A dictionary of a mapping, or of pairs of a key and a value."""
    built: dict[Any, Any] = {}
    for pair in pairs.items() if isinstance(pairs, dict) else machine.walk(pairs):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise UnsafePickleError("a dictionary made of something else than pairs")
        machine.pay(DICT_ITEM)
        built[machine.key(pair[0])] = pair[1]
    return built


def _set(machine: "Machine", items: Any = ()) -> set:
    return {machine.member(item) for item in machine.walk(items)}


def _encode(machine: "Machine", text: Any, encoding: Any = "latin1") -> bytes | StandIn:
    # Python 3 writes bytes this way in old protocols; other codecs (zip, hex, ...) are refused.
    if isinstance(text, StandIn):
        return text
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1", "utf-8"):
        raise UnsafePickleError("bytes in an encoding that pickle never uses")
    machine.pay(4 * len(text) + 64)
    return text.encode(encoding)


# ---- the machine ----

_CONSTANTS = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING BINBYTES"
    " SHORT_BINBYTES BINBYTES8 BYTEARRAY8 UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8".split()
)
_MARK: Any = object()
# Instructions that push a new value.
_PUSHED: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "MARK": lambda: _MARK,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}
# Instructions whose constant may be long: the bytes of the length that it begins with.
_LENGTHS = {"BINSTRING": 4, "BINBYTES": 4, "BINUNICODE": 4, "BINBYTES8": 8, "BYTEARRAY8": 8, "BINUNICODE8": 8}
_LONG_CONSTANT = Name("builtins", "bytes")


_known = functools.lru_cache(maxsize=1024)(_KNOWN.fullmatch)
_Instructions: TypeAlias = dict[int, tuple[str, Callable | None, Callable | None, int | None]]


def _read_string(file: Any) -> str:
    """A string of Python 2 in the protocol of text, decoded as Latin-1 as in the other protocols; `pickletools`
    decodes ASCII alone.

    Raises:
        ValueError: it is not in quotes, or the line does not end.
    """
    line = file.readline()
    text = line[:-1].rstrip(b"\r")
    if line[-1:] != b"\n" or len(text) < 2 or text[:1] not in (b"'", b'"') or text[:1] != text[-1:]:
        raise ValueError("a string without its quotes or the end of its line")
    return codecs.escape_decode(text[1:-1])[0].decode("latin-1")


def _instructions(kind: type["Machine"]) -> _Instructions:
    """The table {first byte: (name, reader of the argument, method, width of the length before the argument)}."""
    table = {}
    for opcode in pickletools.opcodes:
        name = opcode.name
        method = getattr(kind, "push_new" if name in _CONSTANTS else f"op_{name.lower()}", None)
        if name in _PUSHED:
            method = functools.partial(_push, _PUSHED[name])
        reader = opcode.arg.reader if opcode.arg is not None else None
        table[ord(opcode.code)] = (name, _read_string if name == "STRING" else reader, method, _LENGTHS.get(name))
    return table


def _push(make: Callable[[], Any], machine: "Machine", _: Any) -> None:
    machine.push_new(make())


class Machine:
    """Runs pickles; the method named after an instruction, in lower case behind `op_`, carries it out.

    A subclass can add `builders`, and override `refer`, `place_records` and `place_stream`.
    """

    builders: dict[str, Callable] = {
        "collections.OrderedDict": _pairs,
        "collections.Counter": lambda machine, counts=None, *_: _pairs(machine, counts or ()),
        "collections.defaultdict": lambda machine, factory=None, pairs=(): _pairs(machine, pairs),
        "builtins.dict": _pairs,
        "builtins.list": lambda machine, items=(): list(machine.walk(items)),
        "builtins.tuple": lambda machine, items=(): tuple(machine.walk(items)),
        "builtins.set": _set,
        "builtins.frozenset": _set,
        "builtins.bytes": lambda machine: b"",  # an empty one in protocols below 3; with arguments it is refused
        "_codecs.encode": _encode,
    }
    instructions: _Instructions = {}
    # Types besides the containers on which a pickle may set attributes.
    described: tuple[type, ...] = ()

    def __init_subclass__(cls) -> None:
        cls.instructions = _instructions(cls)

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.budget = MAX_BYTES
        self.steps = MAX_STEPS
        self.number_keys = MAX_NUMBER_KEYS

    def refer(self, identity: Any) -> Any:
        """The object that a persistent id stands for."""
        raise UnsafePickleError("it refers to objects outside itself, which no vocabulary does")

    def place_records(self, records: dict[str, Record]) -> None:
        """Stores the places of an archive's records, by their names below `data/`, before the pickle is run."""

    def place_stream(self, stream: Stream) -> None:
        """Reads the storages behind the pickle in torch's old format."""

    def run(self, stream: Stream) -> Any:
        """The value of the pickle at the position of `stream`, which is then the first byte behind the pickle."""
        self.clear()
        data, end, stack, instructions = stream.data, stream.end, self.stack, self.instructions
        height = 0
        while stream.position < end:
            code = data[stream.position]
            stream.position += 1
            if len(stack) > height:
                height += STACK_STEP
                self.pay(LIST_ITEM * STACK_STEP)
            if code == 0x2E:  # STOP
                value = self.take()
                if self.stack:
                    raise UnsafePickleError("the pickle ends in the middle of a value")
                self.clear()
                return value
            if code not in instructions:
                raise ValueError(f"no instruction has the number {code}")
            name, reader, step, width = instructions[code]
            self.steps -= 1
            if self.steps < 0:
                raise UnsafePickleError(f"a pickle of more than {MAX_STEPS} instructions")
            if step is None:
                raise UnsafePickleError(f"cannot be read as a pickle (instruction {name}, which no original writes)")
            if width is not None and self.skip_long(width, stream):
                continue
            step(self, reader(stream) if reader is not None else None)
        raise ValueError("it ends too early")

    def clear(self) -> None:
        self.stack, self.memo = [], {}

    def skip_long(self, width: int, stream: Stream) -> bool:
        """Steps over a constant that is too long to be a name or a symbol; a stand-in takes its place."""
        begin = stream.position
        length = int.from_bytes(stream.read(width), "little")
        if length <= MAX_CONSTANT:
            stream.position = begin
            return False
        stream.position += length
        if stream.position > stream.end:
            raise ValueError(f"a constant of {length} bytes in a shorter file")
        self.pay(STAND_IN)
        self.stack.append(StandIn(_LONG_CONSTANT))
        return True

    # The budget
    def pay(self, amount: int) -> None:
        """Counts bytes that are built, copied, hashed or walked."""
        self.budget -= amount
        if self.budget < 0:
            raise UnsafePickleError("the pickle would unpack to more than it holds")

    def push_new(self, value: Any) -> None:
        self.pay(sys.getsizeof(value))
        self.stack.append(value)

    def walk(self, values: Any) -> Iterable[Any]:
        """The items of a list, a tuple or a set, counted as a copy."""
        if not isinstance(values, list | tuple | set | frozenset | dict):
            raise UnsafePickleError(f"a {type(values).__name__} where a list should be")
        self.pay(64 + LIST_ITEM * len(values))
        return values

    def key(self, value: Any) -> Any:
        """`value` if it may be a dictionary's key, whose hash takes time in proportion to its length."""
        if type(value) is str:
            self.pay(len(value))
        elif type(value) is int or type(value) is bool:
            self.number_keys -= not -257 < value < 1 << 16
            # Hashes are taken modulo 2^61 - 1: larger numbers collide, and so can many smaller ones in a table.
            if self.number_keys < 0 or not -(1 << 60) < value < 1 << 60:
                raise UnsafePickleError("numbers as dictionary keys that no original has")
        elif value is not None:
            kind = "tuples" if isinstance(value, tuple | frozenset) else f"a {type(value).__name__}"
            raise UnsafePickleError(f"it has {kind} for keys, which nothing has that is read here")
        return value

    def member(self, value: Any) -> Any:
        self.pay(SET_ITEM)
        return self.key(value)

    # The stack
    def top(self) -> Any:
        """The last value, which stays on the stack."""
        if self.stack[-1] is _MARK:
            raise UnsafePickleError("a mark where a value should be")
        return self.stack[-1]

    def take(self) -> Any:
        """The last value, removed from the stack."""
        value = self.top()
        del self.stack[-1]
        return value

    def take_to_mark(self) -> list[Any]:
        """The values behind the last mark, removed together with the mark."""
        values: list[Any] = []
        while self.stack:
            value = self.stack.pop()
            if value is _MARK:
                return values[::-1]
            values.append(value)
        raise UnsafePickleError("a mark is missing")

    def op_proto(self, _: Any) -> None:
        """Nothing: the protocol's number, and the framing."""

    op_frame = op_proto

    def op_pop(self, _: Any) -> None:
        self.stack.pop()

    def op_pop_mark(self, _: Any) -> None:
        self.take_to_mark()

    def op_dup(self, _: Any) -> None:
        self.stack.append(self.top())

    # The memo
    def op_memoize(self, _: Any) -> None:
        self.op_put(len(self.memo))

    def op_put(self, index: int) -> None:
        # Indices must be dense: an int is its own hash, so that chosen ones could collide.
        if not 0 <= index <= 4 * len(self.memo) + 1024:
            raise UnsafePickleError(f"a memo with a place {index} but only {len(self.memo)} values")
        self.pay(MEMO_ITEM)
        self.memo[index] = self.top()

    op_binput = op_long_binput = op_put

    def op_get(self, index: int) -> None:
        self.stack.append(self.memo[index])

    op_binget = op_long_binget = op_get

    # Containers
    def op_list(self, _: Any) -> None:
        self.push_new(self.take_to_mark())

    def op_append(self, _: Any) -> None:
        self.extend([self.take()])

    def op_appends(self, _: Any) -> None:
        self.extend(self.take_to_mark())

    def extend(self, values: list[Any]) -> None:
        target = self.top()
        if isinstance(target, StandIn):
            return
        if not isinstance(target, list):
            raise UnsafePickleError("an append to something that is no list")
        self.pay(LIST_ITEM * len(values))
        target.extend(values)

    def op_tuple(self, _: Any) -> None:
        self.push_new(tuple(self.take_to_mark()))

    def op_tuple1(self, _: Any) -> None:
        self.push_new((self.take(),))

    def op_tuple2(self, _: Any) -> None:
        self.push_new((self.take(), self.take())[::-1])

    def op_tuple3(self, _: Any) -> None:
        self.push_new((self.take(), self.take(), self.take())[::-1])

    def op_dict(self, _: Any) -> None:
        values = self.take_to_mark()
        self.push_new({})
        self.assign(values)

    def op_setitem(self, _: Any) -> None:
        value, key = self.take(), self.take()
        self.assign([key, value])

    def op_setitems(self, _: Any) -> None:
        self.assign(self.take_to_mark())

    def assign(self, values: list[Any]) -> None:
        target = self.top()
        if isinstance(target, StandIn):
            return
        if not isinstance(target, dict) or len(values) % 2:
            raise UnsafePickleError("keys and values set on something that is no dictionary")
        self.pay(DICT_ITEM * (len(values) // 2))
        for key, value in zip(values[::2], values[1::2], strict=True):
            target[self.key(key)] = value

    def op_additems(self, _: Any) -> None:
        values, target = self.take_to_mark(), self.top()
        if not isinstance(target, set):
            raise UnsafePickleError("members added to something that is no set")
        target.update([self.member(value) for value in values])

    def op_frozenset(self, _: Any) -> None:
        self.push_new(frozenset([self.member(value) for value in self.take_to_mark()]))

    # Names and objects
    def op_global(self, names: str) -> None:
        module, _, name = names.partition(" ")
        self.name(module, name)

    def op_stack_global(self, _: Any) -> None:
        name, module = self.take(), self.take()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise UnsafePickleError("a class name that is no text")
        self.name(module, name)

    def name(self, module: str, name: str) -> None:
        module = "builtins" if module == "__builtin__" else module
        if len(module) + len(name) > 200 or "." in name or _known(f"{module}.{name}") is None:
            raise UnsafePickleError(
                f"it holds {shown(module)}.{shown(name)}, which is no part of a checkpoint or vocabulary; nothing was "
                "run"
            )
        self.pay(STAND_IN)
        self.stack.append(Name(module, name))

    def op_reduce(self, _: Any) -> None:
        args, callee = self.take(), self.take()
        self.construct(callee, args)

    op_newobj = op_reduce

    def op_newobj_ex(self, _: Any) -> None:
        keywords, args, callee = self.take(), self.take(), self.take()
        self.construct(callee, args)
        self.set_attributes(keywords)

    def construct(self, callee: Any, args: Any) -> None:
        if not isinstance(callee, Name) or not isinstance(args, tuple):
            raise UnsafePickleError("a call of something that is no plain class or function name")
        self.pay(STAND_IN)
        build = self.builders.get(str(callee))
        if build is None:
            self.stack.append(StandIn(callee))
            return
        try:
            self.stack.append(build(self, *args))
        except UnsafePickleError:
            raise
        except (TypeError, ValueError, AttributeError) as error:
            raise UnsafePickleError(f"{callee} with arguments it cannot have ({shown(str(error))})") from None

    def op_build(self, _: Any) -> None:
        self.set_attributes(self.take())

    def set_attributes(self, state: Any) -> None:
        """Stores the attributes of a stand-in. Those of plain values are ignored, and no attribute is ever set."""
        target = self.top()
        if not isinstance(target, (StandIn, dict, set, list, *self.described)):
            raise UnsafePickleError("attributes set on something that has none")
        if not isinstance(target, StandIn):
            return
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        for part in parts:  # (attributes of __dict__, attributes of __slots__)
            if isinstance(part, dict):
                self.pay(DICT_ITEM * len(part))
                target.attributes.update(part)

    def op_binpersid(self, _: Any) -> None:
        self.stack.append(self.refer(self.take()))


Machine.instructions = _instructions(Machine)
