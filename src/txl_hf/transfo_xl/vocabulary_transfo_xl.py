# Copyright 2026 The txl-hf authors. Licensed under the Apache License, Version 2.0.
"""The legacy tokenizer's vocabularies: `vocab.txt`, and `vocab.pkl` or `vocab.bin`, which are pickles.

Nothing in a pickle is ever executed.
"""

import os
import re
from collections import Counter
from itertools import islice
from pathlib import Path

from .unpickle_transfo_xl import UnsafePickleError, load, shown

__all__ = ["HALVES", "check_symbols", "order_symbols", "read_vocab_pickle", "read_vocab_text", "repair_symbols"]

# Halves of a character in UTF-16, which a string of Python may have and no text in UTF-8.
HALVES = re.compile("[\ud800-\udfff]")


def read_vocab_text(path: str | os.PathLike) -> list[str]:
    """The symbols of a legacy `vocab.txt`: the first word of each line, in the order of the ids.

    Args:
        path (`str` or `os.PathLike`): the file.

    Raises:
        ValueError: the file is no UTF-8 text or has no symbols. Symbols that occur twice keep their first id, as in
            the legacy tokenizer.
    """
    try:
        # Editors put a byte-order mark at the beginning, which is no part of the first symbol.
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a UTF-8 text file with one symbol a line.") from error
    symbols = list(dict.fromkeys(words[0] for line in text.split("\n") if (words := line.split())))
    check_symbols(symbols, str(path))
    return symbols


def read_vocab_pickle(path: str | os.PathLike) -> list[str]:
    """The symbols of a legacy `vocab.pkl` or `vocab.bin`, in the order of the ids. Executes nothing in the file.

    Pickles and both formats of `torch.save` are read by `unpickle_transfo_xl`. Symbols come with `repair_symbols`.

    Args:
        path (`str` or `os.PathLike`): the file.

    Raises:
        ValueError: in one line, what the file holds and should not, or that it is no vocabulary.
    """
    try:
        state = load(path)
    except (UnsafePickleError, OSError) as error:
        reason = str(error).removeprefix(f"{Path(path).name}: ")
        raise ValueError(f"{path}: not loaded as a vocabulary: {reason}.") from None
    if isinstance(state, dict):
        symbols = state.get("idx2sym")
        if symbols is None and isinstance(state.get("sym2idx"), dict):
            symbols = order_symbols(state["sym2idx"], str(path))
        if isinstance(symbols, list):
            check_symbols(symbols, str(path))
            return repair_symbols(symbols)
    found = type(state).__name__
    if isinstance(state, dict):
        found = f"a dict with the keys {[shown(key) for key in islice(state, 8)]}"
    raise ValueError(f"{path}: holds {found}, not a legacy vocabulary, which is a dict with idx2sym or sym2idx.")


def order_symbols(ids: dict, source: str) -> list:
    """The symbols of a dict from symbols to ids, in the order of the ids.

    Args:
        ids (`dict`): the id of each symbol.
        source (`str`): where it comes from, for the error.

    Raises:
        ValueError: the ids are not the numbers from 0 to one less than there are symbols, each of them once.
    """
    if not all(type(number) is int for number in ids.values()) or sorted(ids.values()) != list(range(len(ids))):
        raise ValueError(f"{source} does not number its {len(ids)} symbols from 0 on, each once")
    return sorted(ids, key=ids.__getitem__)


def repair_symbols(symbols: list[str]) -> list[str]:
    """The symbols as they were written, where all of them are UTF-8 that was read as Latin-1; else as they are.

    The originals' Python 2 pickled bytes, which the published `transfo-xl-wt103` took for Latin-1: it holds
    `'EnquÃªtes` for `'Enquêtes`, and thousands of words more that no text would ever match.
    """
    try:
        return [symbol.encode("latin-1").decode("utf-8") for symbol in symbols]
    except UnicodeError:
        return symbols


def check_symbols(symbols: list, source: str) -> None:
    """Checks that a vocabulary has symbols, that they are strings of whole characters, and each of them once.

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
            raise ValueError(f"{source}: a symbol must be a string, not {shown(symbol)}.")
        if HALVES.search(symbol):
            raise ValueError(f"{source}: the symbol '{shown(symbol)}' has half a character, which UTF-8 cannot hold.")
    if len(set(symbols)) < len(symbols):
        symbol, count = Counter(symbols).most_common(1)[0]
        raise ValueError(f"{source}: the symbol '{shown(symbol)}' occurs {count} times; every symbol has one id.")
