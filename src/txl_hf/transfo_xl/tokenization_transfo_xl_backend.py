"""The tokenizer's modes, each a pipeline of the `tokenizers` library, and how a text is split without a vocabulary."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import StringIO, TextIOBase
from itertools import chain
from os import PathLike
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import Unigram, WordLevel

from .tokenization_transfo_xl_moses import moses_decoder, moses_normalizers, moses_pre_tokenizer

LINE_END_MODES = ("moses", "whitespace")
WORD_MODES = (*LINE_END_MODES, "lm1b")
MODES = (*WORD_MODES, "characters", "bytes")


# UTF-16 surrogates, halves of a character, which a Python string may contain and UTF-8 may not.
HALVES = re.compile("[\ud800-\udfff]")


def check_symbols(symbols: list, source: str) -> None:
    """Raises ValueError unless a vocabulary has symbols, strings of whole characters, each of them once.

    Args:
        symbols (`list`): the vocabulary in the order of the ids.
        source (`str`): where it comes from, for the error.
    """
    if not symbols:
        raise ValueError(f"{source}: the vocabulary is empty.")
    for symbol in symbols:
        if not isinstance(symbol, str):
            raise ValueError(f"{source}: a symbol must be a string, not a {type(symbol).__name__}.")
        if HALVES.search(symbol):
            raise ValueError(f"{source}: the symbol {symbol!r:.60} has half a character, which UTF-8 cannot hold.")
    if len(set(symbols)) < len(symbols):
        symbol, count = Counter(symbols).most_common(1)[0]
        raise ValueError(f"{source}: the symbol {symbol!r:.60} occurs {count} times; every symbol has one id.")


def read_vocab_text(path: str | PathLike) -> list[str]:
    """The symbols of a legacy `vocab.txt`: the first word of each line, in the order of the ids.

    Raises:
        ValueError: the file is no UTF-8 text or has no symbols. Symbols that occur twice keep their first id, as in
            the legacy tokenizer.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # a byte-order mark is no part of the first symbol
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a UTF-8 text file with one symbol a line.") from error
    symbols = list(dict.fromkeys(words[0] for line in text.split("\n") if (words := line.split())))
    check_symbols(symbols, str(path))
    return symbols


# Readers of old vocabularies, by the name of the file. The installed package adds those of `vocab.pkl` and
# `vocab.bin`, which are pickles.
VOCABULARY_READERS: dict[str, Callable[[str | PathLike], list[str]]] = {"vocab.txt": read_vocab_text}


def read_vocabulary(path: str | PathLike, name: str) -> list[str]:
    """The symbols of an old vocabulary in the order of the ids; `name` is a key of `VOCABULARY_READERS`.

    Raises:
        ValueError: the file cannot be read, or only by the package, which is not imported.
    """
    if name not in VOCABULARY_READERS:
        raise ValueError(
            f"{path} is a pickle, which the code beside a model does not read: pip install txl-hf and import txl_hf, "
            "which reads it without running it; save_pretrained then writes tokenizer.json in its place"
        )
    return VOCABULARY_READERS[name](path)


def check_mode(mode: str) -> None:
    """Raises ValueError where `mode` is none of `MODES`."""
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is unknown; it is one of {', '.join(map(repr, MODES))}")


def open_lines(path: str | PathLike, mode: str | None) -> TextIOBase:
    """A UTF-8 text file, opened to be read line by line as a mode needs it (None: another kind of tokenizer).

    A byte-order mark, which editors and Project Gutenberg put at the beginning, is skipped, and a carriage return ends
    a line like a line feed. Mode `"bytes"` keeps all bytes, and line feeds alone end lines.
    """
    return open(path, encoding="utf-8" if mode == "bytes" else "utf-8-sig", newline=_newline(mode))


def lines_of(text: str, mode: str | None) -> list[str]:
    """The lines of a text, each with its end, as `open_lines` gives those of a file."""
    return list(StringIO(text, newline=_newline(mode)))


def _newline(mode: str | None) -> str | None:
    return "\n" if mode == "bytes" else None


def build_backend(
    symbols: list[str],
    mode: str,
    lower_case: bool,
    unk_token,
    specials,
    as_published: bool = False,
    added: Iterable[AddedToken] = (),
) -> Tokenizer:
    """A tokenizer of the `tokenizers` library whose symbol `symbols[i]` has id i.

    Args:
        symbols, mode, lower_case, unk_token: as for `TransfoXLTokenizer.from_symbols`.
        specials: the special tokens, None among them skipped; those that are no symbols get ids after the symbols.
        as_published: read a given alphabet as the originals wrote their data, `_` for a space and lines without ends.
        added: tokens that were added to the vocabulary, special ones among them, in the order of their ids, which come
            before those of other special tokens.

    Raises:
        ValueError: in mode `"bytes"`, a symbol is neither a byte's number nor a special token.
    """
    names = symbols
    if mode == "bytes":
        names = [_byte_character(symbol, specials) for symbol in symbols]
    vocabulary = {name: index for index, name in enumerate(names)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="" if unk_token is None else str(unk_token)))
    specials, added = [token for token in specials if token is not None], list(added)
    special_names = set(map(str, specials))
    outside = [name for name in map(str, specials) if name not in vocabulary]
    outside += [str(token) for token in added if not token.special and str(token) not in special_names]
    steps = []
    backend.pre_tokenizer = _pre_tokenizer(mode)
    if mode == "moses":
        backend.decoder = moses_decoder(symbols, outside)
    elif mode == "characters":
        backend.decoder = decoders.Fuse()
        if as_published and "_" in vocabulary and " " not in vocabulary:
            steps.append(normalizers.Replace(" ", "_"))
            backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("_", " ")])
    elif mode == "bytes":
        if as_published and _BYTE_CHARACTERS["10"] not in vocabulary:
            steps.append(normalizers.Replace("\n", ""))
        backend.decoder = decoders.ByteLevel()
    set_steps(backend, mode, lower_case, specials, last=steps)
    special = {
        str(token): token if isinstance(token, AddedToken) else AddedToken(token, normalized=False)
        for token in specials
    }
    for token in added:
        if str(token) in special:
            backend.add_special_tokens([special[str(token)]])
        else:
            backend.add_tokens([as_written(token, mode)])
    backend.add_special_tokens(list(special.values()))
    return backend


def as_written(token: str | AddedToken, mode: str | None) -> str | AddedToken:
    """An added token that matches a text as it is written; in mode `"moses"`, whose rules change text and tokens.

    The library would normalise the token as a text of its own, `co.` to `co .`, but within a text `co.` stays.
    """
    if mode != "moses":
        return token
    options = (
        {} if isinstance(token, str) else {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip")}
    )
    return AddedToken(str(token), normalized=False, special=False, **options)


def set_steps(
    backend: Tokenizer, mode: str, lower_case: bool, specials: list, line_end: str | None = None, last: Sequence = ()
) -> None:
    """Set the normalizer of a tokenizer, and in mode `"moses"` its pre-tokenizer, which has the special tokens.

    Args:
        backend, mode, lower_case, specials: as for `build_backend`.
        line_end: the symbol that a line feed becomes, in the modes of words; None: white space.
        last: normalizers after all others.

    Raises:
        ValueError: the mode's texts have no lines, or the Moses rules would split `line_end`.
    """
    steps: list[normalizers.Normalizer] = [normalizers.Lowercase()] if lower_case else []
    if line_end is not None and mode not in LINE_END_MODES:
        reason = "a text is one sentence" if mode == "lm1b" else "a line feed is a symbol like others"
        raise ValueError(f"line_ends is for the modes {' and '.join(map(repr, LINE_END_MODES))}; in {mode!r} {reason}")
    if mode == "moses":
        if line_end is not None and not re.fullmatch(r"<\w+>", line_end):
            raise ValueError(f"line_ends in mode 'moses' needs an eos_token such as '<eos>', not {line_end!r}")
        steps += moses_normalizers([] if lower_case else specials, line_end)
        backend.pre_tokenizer = moses_pre_tokenizer(specials, lower_case)
    elif mode in WORD_MODES:
        # Spaces for four characters at which Python, and so the originals, split and `WhitespaceSplit` does not.
        steps.append(normalizers.Replace(Regex("[\x1c-\x1f]"), " "))
        if line_end is not None:
            steps.append(normalizers.Replace("\n", f" {line_end} "))
    steps += last
    backend.normalizer = normalizers.Sequence(steps) if steps else None


def _pre_tokenizer(mode: str) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer of a mode, without special tokens, which `set_steps` adds to that of the Moses rules."""
    if mode == "moses":
        return moses_pre_tokenizer([], lower_case=False)
    if mode in WORD_MODES:
        return pre_tokenizers.WhitespaceSplit()
    characters = pre_tokenizers.FixedLength(length=1)
    if mode == "characters":
        return characters
    return pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), characters])


# A text that modes split differently: a two-byte letter, a sign beside letters, white space, a joiner, an apostrophe.
_TELLTALE = "é+a @-@ it's"


def modes_of(backend: Tokenizer) -> list[str]:
    """The modes that split a text as a tokenizer does (`"whitespace"` and `"lm1b"` together); empty: none does."""

    def split(pre_tokenizer) -> list[str]:
        return [symbol for symbol, _ in pre_tokenizer.pre_tokenize_str(_TELLTALE)]

    if backend.pre_tokenizer is None:
        return []
    found = split(backend.pre_tokenizer)
    return [mode for mode in MODES if split(_pre_tokenizer(mode)) == found]


def _byte_characters() -> dict[str, str]:
    # ByteLevel writes printable Latin-1 bytes as themselves and the others as the characters from 256 on.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return {str(byte): chr(byte if byte in printable else next(others)) for byte in range(256)}


_BYTE_CHARACTERS = _byte_characters()
BYTE_SYMBOLS = {character: byte for byte, character in _BYTE_CHARACTERS.items()}


def _byte_character(symbol: str, specials) -> str:
    if symbol in _BYTE_CHARACTERS:
        return _BYTE_CHARACTERS[symbol]
    if symbol in map(str, specials):
        return symbol
    raise ValueError(f"symbols: {symbol!r} is no byte; in mode 'bytes' a symbol is a decimal number '0' … '255'")


def split_symbols(backend: Tokenizer, text: str) -> list[str]:
    """The symbols of a text without special tokens as they are written, in the vocabulary or not."""
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    return [symbol for symbol, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


def spelling_backend(backend: Tokenizer) -> Tokenizer:
    """A tokenizer that splits a text as another does, and whose tokens are the symbols as they are written."""
    # Unigram, because it returns unknown symbols unchanged, where WordLevel returns its unknown token.
    speller = Tokenizer(Unigram([("", 0.0)], unk_id=0))
    speller.normalizer, speller.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    speller.post_processor = backend.post_processor
    speller.add_tokens(list(backend.get_added_tokens_decoder().values()))
    return speller


def specials_pattern(specials: Iterable[str]) -> re.Pattern:
    """A pattern whose `split` gives text and special tokens in turn; longer special tokens match first."""
    longest_first = sorted(specials, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def count_symbols(lines, mode: str, lower_case: bool, specials: list[str]) -> Counter:
    """How often each symbol, each special token too, occurs in lines or batches of lines."""
    backend = build_backend([], mode, lower_case, None, specials)
    splitters: dict[str, Callable[[str], Iterable[str]]] = {
        "whitespace": str.split,
        "lm1b": str.split,
        "characters": list,
        "bytes": lambda text: map(str, text.encode()),
        "moses": lambda text: split_symbols(backend, text),
    }
    split = splitters[mode]
    lower = normalizers.Lowercase().normalize_str if lower_case else str
    between = specials_pattern(specials)
    counter: Counter[str] = Counter()
    for line in chain.from_iterable(map(flatten, lines)):
        for index, part in enumerate(between.split(line)):
            counter.update([part] if index % 2 else split(lower(part)))
    return counter


def check_lines(lines) -> None:
    """Raises ValueError where `lines` is one string, whose items are characters, or a dict, whose items are keys."""
    if isinstance(lines, str):
        raise ValueError("lines is one string; pass its lines, for instance text.splitlines(keepends=True)")
    if isinstance(lines, Mapping):
        raise ValueError(f"lines is a {type(lines).__name__} with the keys {list(lines)!r:.99}; pass one of its texts")


def flatten(text) -> Iterator[str]:
    """The strings in a string, a batch of strings, a batch of batches …, in their order.

    Raises:
        ValueError: an item is neither a string nor a batch.
    """
    if isinstance(text, str):
        yield text
    elif isinstance(text, Iterable) and not isinstance(text, Mapping | bytes):
        for item in text:
            yield from flatten(item)
    else:
        raise ValueError(
            f"a line is a string, which {text!r:.99} of type {type(text).__name__} is not; of a data set pass the "
            "column with its texts, for instance dataset['text']"
        )
