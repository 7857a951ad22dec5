"""The legacy tokenizer's pickled vocabularies, `vocab.pkl` and `vocab.bin`. Nothing in a pickle is ever executed."""

import os
from itertools import islice
from pathlib import Path

from ..transfo_xl.tokenization_transfo_xl_backend import check_symbols
from .unpickle import UnsafePickleError, load, shown


def read_vocab_pickle(path: str | os.PathLike) -> list[str]:
    """The symbols of a legacy `vocab.pkl` or `vocab.bin`, in the order of the ids, with `repair_symbols`. Raises a
    ValueError that says in one line why the file is no vocabulary.
    """
    try:
        state = load(path)
    except (UnsafePickleError, OSError) as error:
        reason = str(error).removeprefix(f"{Path(path).name}: ")
        raise ValueError(f"{path}: not loaded as a vocabulary: {reason}.") from None
    found = type(state).__name__
    if isinstance(state, dict):
        symbols = state.get("idx2sym")
        if symbols is None and isinstance(state.get("sym2idx"), dict):
            symbols = order_symbols(state["sym2idx"], str(path))
        if isinstance(symbols, list):
            return repair_symbols(check_symbols(symbols, str(path)))
        found = f"a dict with the keys {[shown(key) for key in islice(state, 8)]}"
    raise ValueError(f"{path}: holds {found}, not a legacy vocabulary, which is a dict with idx2sym or sym2idx.")


def order_symbols(ids: dict, source: str) -> list:
    """The symbols of a dict from symbols to ids, in the order of the ids. Raises a ValueError, which names the
    `source`, where the ids of n symbols are not the numbers from 0 to n - 1, each of them once.
    """
    if not all(type(number) is int for number in ids.values()) or sorted(ids.values()) != list(range(len(ids))):
        raise ValueError(f"{source} does not number its {len(ids)} symbols from 0 on, each once")
    return sorted(ids, key=ids.__getitem__)


def repair_symbols(symbols: list[str]) -> list[str]:
    """The symbols decoded as UTF-8 if all of them were UTF-8 that was read as Latin-1; else unchanged.

    The originals' Python 2 pickled bytes, which the published `transfo-xl-wt103` took for Latin-1: it holds
    `'EnquÃªtes` for `'Enquêtes`, and thousands of words more that no text would ever match.
    """
    try:
        return [symbol.encode("latin-1").decode("utf-8") for symbol in symbols]
    except UnicodeError:
        return symbols
