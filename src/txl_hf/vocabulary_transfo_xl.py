# Copyright 2026 The txl-hf authors. Licensed under the Apache License, Version 2.0.
"""The legacy tokenizer's vocabularies: `vocab.txt`, and `vocab.pkl` or `vocab.bin`, which are pickles.

Nothing in a pickle is ever executed.
"""

import pickle
import re
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from io import BytesIO
from pathlib import Path
from typing import ClassVar


def read_vocab_text(path) -> list[str]:
    """The symbols of a legacy `vocab.txt`: the first word of each line, in the order of the ids.

    Args:
        path (`str` or `os.PathLike`): the file.

    Raises:
        ValueError: the file is no UTF-8 text or has no symbols. Symbols that occur twice keep their first id, as in
            the legacy tokenizer.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a UTF-8 text file with one symbol a line.") from error
    symbols = list(dict.fromkeys(words[0] for line in text.split("\n") if (words := line.split())))
    check_symbols(symbols, str(path))
    return symbols


class _Inert:
    """Stands for an object of the legacy tokenizer that its vocabulary file also holds; does nothing."""

    def __init__(self, *args, **kwargs):
        pass

    def __setstate__(self, state):
        pass


# The python implementation: the C one takes any memory that an index in the file asks for.
class _VocabularyUnpickler(pickle._Unpickler):
    containers = {
        ("builtins", "dict"): dict,
        ("builtins", "list"): list,
        ("builtins", "set"): set,
        ("builtins", "tuple"): tuple,
        ("builtins", "int"): int,
        ("builtins", "long"): int,
        ("collections", "OrderedDict"): OrderedDict,
        ("collections", "Counter"): Counter,
        ("collections", "defaultdict"): defaultdict,
    }
    # What pickled legacy tokenizers are known to hold. They are never imported.
    inert = re.compile(
        r"(re|regex|regex\._regex_core)$|(sacremoses|transformers|tokenizers|pytorch_transformers)(\.|$)"
    )

    def find_class(self, module: str, name: str):
        module = "builtins" if module == "__builtin__" else module
        if (module, name) in self.containers:
            return self.containers[module, name]
        if self.inert.match(module) and "." not in name:
            return _Inert
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which is no part of a vocabulary; nothing was run")

    def persistent_load(self, pid):
        raise pickle.UnpicklingError("it refers to objects outside itself, which no vocabulary does")

    # Hashing a tuple within a tuple, and so on, overflows the interpreter's stack: no key or member may be one.
    dispatch: ClassVar[dict[int, Callable]] = dict(pickle._Unpickler.dispatch)

    def load_setitem(self):
        _check_hashable(self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self):
        _check_hashable(self.stack[::2])
        super().load_setitems()

    def load_additems(self):
        _check_hashable(self.stack)
        super().load_additems()

    def load_frozenset(self):
        _check_hashable(self.stack)
        super().load_frozenset()

    def load_dict(self):
        _check_hashable(self.stack[::2])
        super().load_dict()

    def load_reduce(self):
        for argument in self.stack[-1]:
            if isinstance(argument, list | tuple):
                members = [item[0] if isinstance(item, list | tuple) and len(item) == 2 else item for item in argument]
                _check_hashable(members)
        super().load_reduce()

    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.ADDITEMS[0]] = load_additems
    dispatch[pickle.FROZENSET[0]] = load_frozenset
    dispatch[pickle.DICT[0]] = load_dict
    dispatch[pickle.REDUCE[0]] = load_reduce


def _check_hashable(keys: Iterable) -> None:
    if any(isinstance(key, tuple | frozenset) for key in keys):
        raise pickle.UnpicklingError("it has tuples for keys, which no vocabulary has")


_TORCH_MAGIC = 0x1950A86A20F9469CFC6C


def read_vocab_pickle(path) -> list[str]:
    """The symbols of a legacy `vocab.pkl` or `vocab.bin`, in the order of the ids. Executes nothing in the file.

    Pickles and both formats of `torch.save` are read with an allow-list of containers; the legacy tokenizer's own
    objects become inert stand-ins, anything else is refused. Symbols come with `repair_symbols`.

    Args:
        path (`str` or `os.PathLike`): the file.

    Raises:
        ValueError: in one line, what the file holds and should not, or that it is no vocabulary.
    """
    try:
        state = _unpickle(Path(path).read_bytes())
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path}: not loaded as a vocabulary: {reason:.300}.") from None
    if isinstance(state, dict):
        symbols = state.get("idx2sym")
        if symbols is None and isinstance(state.get("sym2idx"), dict):
            symbols = list(state["sym2idx"])
        if isinstance(symbols, list):
            check_symbols(symbols, str(path))
            return repair_symbols(symbols)
    found = f"a dict with the keys {sorted(map(str, state))[:8]}" if isinstance(state, dict) else type(state).__name__
    raise ValueError(f"{path}: holds {found}, not a legacy vocabulary, which is a dict with idx2sym or sym2idx.")


def repair_symbols(symbols: list[str]) -> list[str]:
    """The symbols as they were written, where all of them are UTF-8 that was read as Latin-1; else as they are.

    The originals' Python 2 pickled bytes, which the published `transfo-xl-wt103` took for Latin-1: it holds
    `'EnquÃªtes` for `'Enquêtes`, and thousands of words more that no text would ever match.
    """
    try:
        return [symbol.encode("latin-1").decode("utf-8") for symbol in symbols]
    except UnicodeError:
        return symbols


def _unpickle(data: bytes):
    if data[:2] == b"PK":
        with zipfile.ZipFile(BytesIO(data)) as archive:
            entries = [entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")]
            if len(entries) != 1 or entries[0].compress_type != zipfile.ZIP_STORED:
                raise ValueError("a zip archive, but not one of torch.save")
            data = archive.read(entries[0])
    stream = BytesIO(data)
    # The strings of Python 2 are bytes, which Latin-1 keeps as they are.
    state = _VocabularyUnpickler(stream, encoding="latin-1").load()
    if state == _TORCH_MAGIC and isinstance(state, int):
        for _ in ("protocol version", "system", "object"):
            state = _VocabularyUnpickler(stream, encoding="latin-1").load()
    return state


def check_symbols(symbols: list, source: str) -> None:
    """Checks that a vocabulary has symbols, that they are strings, and each of them once.

    Args:
        symbols (`list`): the vocabulary in the order of the ids.
        source (`str`): where it comes from, for the error.

    Raises:
        ValueError: what is wrong with it.
    """
    if not symbols:
        raise ValueError(f"{source}: the vocabulary is empty.")
    for symbol in symbols:
        if not isinstance(symbol, str):
            raise ValueError(f"{source}: a symbol must be a string, not {type(symbol).__name__} ({symbol!r:.60}).")
    if len(set(symbols)) < len(symbols):
        symbol, count = Counter(symbols).most_common(1)[0]
        raise ValueError(f"{source}: the symbol {symbol!r} occurs {count} times; every symbol has one id.")
