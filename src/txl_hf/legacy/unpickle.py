"""Reads pickles as data, for the tokenizer's legacy vocabularies and for the converters.

A pickle is a program that names classes and functions, calls them and sets attributes. [`Reader`] is Python's own
unpickler with another `find_class`, so that no name leads to anything real: each becomes a class made for that name in
this load. Called, it returns the plain value that the name stands for (`Reader.builders`: a dictionary for an
OrderedDict), or else a [`StandIn`], which keeps the attributes and can do nothing. Names of which the originals' files
hold none are refused.

The unpickler calls `__setstate__` of an object and sets attributes only where there is none. So all that a pickle can
get hold of is of Python's plain types, which have no attributes, or derived from [`Inert`]. Beyond that the files are
not guarded against: as with `pickle.load`, a small one can take much memory or time, or end the process by a key that
is nested too deeply.

Three formats are read: a bare pickle (`vocab.pkl`, `cache.pkl`), the zip archives of torch >= 1.6, and the
concatenated pickles that torch wrote before.
"""

import copyreg
import io
import os
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle in a file of torch < 1.6
LEGACY_PROTOCOL = 1001
LONGEST_NAME = 200  # of a module and a class

# The classes and functions that the originals' files name: by module or, because copies of the originals' sources lie
# elsewhere, by the last part of the module or the class's name.
_KNOWN = re.compile(
    r"""(?x)
    builtins\.(bool|float|int|long|object|slice|str|unicode)
    | copy_reg\._reconstructor | copyreg\._reconstructor | functools\.partial | argparse\.Namespace
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


# ---- what a pickle may build ----


class Inert:
    """An object on which a pickle sets nothing."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        """Does nothing with the attributes in `state`."""


class Dictionary(Inert, dict):
    """An OrderedDict, a Counter or a defaultdict, whose attributes are left out."""

    __slots__ = ()


class StandIn(Inert):
    """An object of a class that is not built: of its contents in the pickle only those of `__dict__`.

    `name` is that of the class, with its module.
    """

    __slots__ = ("attributes",)
    name: ClassVar[str]
    attributes: dict[Any, Any]

    def __new__(cls, *_arguments: Any, **_keywords: Any) -> Any:
        instance = super().__new__(cls)
        instance.attributes = {}
        return instance

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        for part in parts:  # (attributes of __dict__, attributes of __slots__)
            if isinstance(part, dict):
                self.attributes.update(part)

    def _ignore(self, *_: Any) -> None:
        """Leaves out the entries of a class that is derived from a list, a dictionary or a set."""

    extend = __setitem__ = add = _ignore

    def __repr__(self) -> str:
        return f"<stand-in for {shown(self.name)}>"


def stand_in(name: str, build: Callable | None = None) -> type[StandIn]:
    """A new class in place of the class or function `name`. Called, it returns what `build` does, or an instance."""
    members: dict[str, Any] = {"__slots__": (), "name": name}
    if build is not None:
        members["__new__"] = lambda _, *arguments: build(*arguments)
    return type(name.rpartition(".")[2], (StandIn,), members)


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    # Python 3 writes bytes this way in old protocols; other codecs (zip, hex, ...) are refused.
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1", "utf-8"):
        raise UnsafePickleError("bytes in an encoding that pickle never uses")
    return text.encode(encoding)


# ---- files ----


class Record(NamedTuple):
    """A record of a zip archive: its bytes in the file, and their CRC-32."""

    name: str
    begin: int
    length: int
    checksum: int

    def is_intact(self, content: bytes | memoryview) -> bool:
        """Whether the record's bytes have its CRC-32. torch writes 0 where checksums are switched off."""
        return self.checksum in (0, zlib.crc32(content))


class Reader(pickle.Unpickler):
    """Reads one pickle of a file, with the names `module.name` in `builders` and those that `known` matches."""

    known: ClassVar[re.Pattern] = _KNOWN
    builders: ClassVar[dict[str, Callable]] = {
        "collections.OrderedDict": Dictionary,
        "collections.Counter": Dictionary,
        "collections.defaultdict": lambda _factory=None, *pairs: Dictionary(*pairs),
        "builtins.dict": Dictionary,
        "builtins.list": list,
        "builtins.tuple": tuple,
        "builtins.set": set,
        "builtins.frozenset": frozenset,
        "builtins.bytes": lambda: b"",  # an empty one in protocols below 3; with arguments it is refused
        "_codecs.encode": _encode,
    }

    def __init__(self, file: BinaryIO):
        # The unpickler would take the objects of these codes from a cache that all unpicklers share. The registry has
        # no public name, so mypy does not know it.
        if copyreg._extension_registry:  # type: ignore[attr-defined]
            raise UnsafePickleError(
                "this process has codes for classes (copyreg.add_extension), by which a pickle would reach them: read "
                "it in another process"
            )
        super().__init__(file, encoding="latin1")  # strings of Python 2, see `repair_symbols`

    def find_class(self, module: str, name: str) -> type[StandIn]:
        module = "builtins" if module == "__builtin__" else module
        path = f"{module}.{name}"
        known = len(path) <= LONGEST_NAME and (path in self.builders or self.known.fullmatch(path))
        if "." in name or not known:
            raise UnsafePickleError(
                f"it holds {shown(module)}.{shown(name)}, which is no part of a checkpoint or vocabulary; nothing was "
                "run"
            )
        return stand_in(path, self.builders.get(path))

    def persistent_load(self, identity: Any) -> Any:
        """The object that a persistent id stands for."""
        raise UnsafePickleError("it refers to objects outside itself, which no vocabulary does")

    def place_records(self, records: dict[str, Record]) -> None:
        """Stores the places of an archive's storages, by their keys."""

    def place_stream(self, file: BinaryIO) -> None:
        """Reads the places of the storages that follow the pickle in torch's old format."""


def load(path: str | os.PathLike, reader: Callable[[BinaryIO], Reader] = Reader) -> Any:
    """The object pickled in a file: plain values, lists, dicts and [`StandIn`]s, or what `reader` builds besides.

    Raises:
        UnsafePickleError: in one line that names the file, why it has none of the three formats, or what is refused.
    """
    path = Path(path)
    with path.open("rb") as file:
        begin = file.peek(4)
        if not begin:
            raise UnsafePickleError(f"{path.name} is empty")
        try:
            return _load_archive(file, reader) if begin.startswith(b"PK\x03\x04") else _load_stream(file, reader)
        except UnsafePickleError as error:
            raise UnsafePickleError(f"{path.name}: {error}") from None
        # The directory is at the end of an archive; a damaged one may name a version of zip that does not exist.
        except (zipfile.BadZipFile, NotImplementedError) as error:
            raise UnsafePickleError(
                f"{path.name} is truncated or damaged ({error}): copy or download it again"
            ) from None
        except Exception as error:  # damaged bytes make the standard readers fail in a dozen ways
            reason = " ".join(f"{type(error).__name__}: {shown(str(error))}".split())
            raise UnsafePickleError(f"{path.name} cannot be read as a pickle ({reason})") from None


def _load_archive(file: BinaryIO, reader: Callable[[BinaryIO], Reader]) -> Any:
    with zipfile.ZipFile(file) as archive:
        records = {info.filename: _record(file, info) for info in archive.infolist()}
    pickles = [name for name in records if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise UnsafePickleError(
            f"a zip archive with {len(pickles)} data.pkl records, where torch.save writes one: a packed release?"
        )
    root = pickles[0].removesuffix("data.pkl")
    order = records.get(f"{root}byteorder")
    if order is not None and _content(file, order) != b"little":
        raise UnsafePickleError("written on a big-endian machine")
    content = _content(file, records[pickles[0]])
    if not records[pickles[0]].is_intact(content):
        raise UnsafePickleError("record data.pkl is damaged: its checksum does not match")
    place, unpickler = f"{root}data/", reader(io.BytesIO(content))
    unpickler.place_records({name[len(place) :]: found for name, found in records.items() if name.startswith(place)})
    return unpickler.load()


def _record(file: BinaryIO, info: zipfile.ZipInfo) -> Record:
    """The place of a record. Raises an UnsafePickleError for one that is compressed, encrypted or cut off."""
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.file_size != info.compress_size:
        raise UnsafePickleError(
            f"record {shown(info.filename)} of the zip archive is compressed or encrypted, which torch.save never "
            "does: another program packed the file again"
        )
    file.seek(info.header_offset)
    header = file.read(30)
    if len(header) < 30:
        raise UnsafePickleError(f"record {shown(info.filename)} is cut off")
    name_length, extra_length = struct.unpack("<HH", header[26:])
    begin = info.header_offset + 30 + name_length + extra_length
    if begin + info.file_size > file.seek(0, os.SEEK_END):
        raise UnsafePickleError(f"record {shown(info.filename)} is cut off")
    return Record(info.filename, begin, info.file_size, info.CRC)


def _content(file: BinaryIO, record: Record) -> bytes:
    file.seek(record.begin)
    return file.read(record.length)


def _load_stream(file: BinaryIO, reader: Callable[[BinaryIO], Reader]) -> Any:
    first = reader(file).load()
    if first != LEGACY_MAGIC:
        return first
    if reader(file).load() != LEGACY_PROTOCOL:
        raise UnsafePickleError("an unknown version of torch's old file format")
    system = reader(file).load()
    if not (isinstance(system, dict) and system.get("little_endian") is True):
        raise UnsafePickleError("written on a big-endian machine")
    unpickler = reader(file)
    value = unpickler.load()
    unpickler.place_stream(file)
    return value
