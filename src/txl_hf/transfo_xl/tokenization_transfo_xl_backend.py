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
from transformers.convert_slow_tokenizer import bytes_to_unicode

from .tokenization_transfo_xl_moses import moses_decoder, moses_normalizers, moses_pre_tokenizer

LINE_END_MODES = ("moses", "whitespace")
WORD_MODES = (*LINE_END_MODES, "lm1b")
MODES = (*WORD_MODES, "characters", "bytes")


# UTF-16 surrogates, halves of a character, which a Python string may contain and UTF-8 may not.
HALVES = re.compile("[\ud800-\udfff]")


def check_symbols(symbols: list, source: str) -> list[str]:
    """The symbols of a vocabulary. Raises a ValueError, which names their `source`, unless each is a string of
    whole characters and occurs once, and there is one at least."""
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
    return symbols


def read_vocab_text(path: str | PathLike) -> list[str]:
    """The symbols of a legacy `vocab.txt`: the first word of each line, its first occurrence alone. Raises a
    ValueError for a file that is no UTF-8 text or has no symbols."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a UTF-8 text file with one symbol a line.") from error
    words = (line.split() for line in text.split("\n"))
    return check_symbols(list(dict.fromkeys(line[0] for line in words if line)), str(path))


# Readers of old vocabularies. The installed package adds that of pickles, `vocab.pkl` and `vocab.bin`.
VOCABULARY_READERS: dict[str, Callable[[str | PathLike], list[str]]] = {"text": read_vocab_text}


def read_vocabulary(pickle_file: str | PathLike | None, text_file: str | PathLike | None) -> list[str]:
    """The symbols of the legacy file that is given. Raises a ValueError where none is, or for a file that cannot be
    read, as a pickle cannot without the package."""
    kind, path = ("text", text_file) if pickle_file is None else ("pickle", pickle_file)
    if path is None:
        raise ValueError(
            "TransfoXLTokenizer needs a vocabulary: tokenizer.json or a legacy vocab.pkl, .bin or .txt; "
            "build one with TransfoXLTokenizer.train_from_iterator or .from_symbols"
        )
    if kind not in VOCABULARY_READERS:
        raise ValueError(
            f"{path} is a pickle, which the code beside a model does not read: pip install txl-hf and import txl_hf, "
            "which reads it without running it; save_pretrained then writes tokenizer.json in its place"
        )
    return VOCABULARY_READERS[kind](path)


def check_mode(mode: str) -> None:
    """Raises ValueError where `mode` is none of `MODES`."""
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is unknown; it is one of {', '.join(map(repr, MODES))}")


def open_lines(path: str | PathLike, mode: str | None, opener: Callable = open) -> TextIOBase:
    """A UTF-8 text file, opened by `opener` (`open`, `gzip.open`), for a mode or (None) another kind of tokenizer: a
    byte-order mark is skipped, and a carriage return ends a line, too, except in mode `"bytes"`, which keeps both."""
    return opener(path, "rt", encoding="utf-8" if mode == "bytes" else "utf-8-sig", newline=_newline(mode))


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
    specials: Iterable = (),
    added: Iterable = (),
    as_published: bool = False,
) -> Tokenizer:
    """A tokenizer of the `tokenizers` library whose symbol `symbols[i]` has id i, with the steps of a mode.

    Args:
        symbols, mode, lower_case, unk_token, as_published: as for `TransfoXLTokenizer`.
        specials: the special tokens, which the steps leave whole; none is added to the vocabulary.
        added: other tokens that were added to it, which the decoder leaves apart.
    """
    specials = [str(token) for token in specials]
    names = [_byte_character(symbol, specials) for symbol in symbols] if mode == "bytes" else symbols
    vocabulary = {name: index for index, name in enumerate(names)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="" if unk_token is None else str(unk_token)))
    backend.pre_tokenizer = _pre_tokenizer(mode)
    last = []
    if mode == "moses":
        outside = {*specials} - vocabulary.keys() | {*map(str, added)}
        backend.decoder = moses_decoder(symbols, sorted(outside))
    elif mode == "characters":
        backend.decoder = decoders.Fuse()
        if as_published and "_" in vocabulary and " " not in vocabulary:
            last = [normalizers.Replace(" ", "_")]
            backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("_", " ")])
    elif mode == "bytes":
        backend.decoder = decoders.ByteLevel()
        if as_published and _BYTE_CHARACTERS["10"] not in vocabulary:
            last = [normalizers.Replace("\n", "")]
    set_steps(backend, mode, lower_case, specials, last=last)
    return backend


def as_written(token: str | AddedToken, mode: str) -> AddedToken:
    """An added token that matches a text as it is written in mode `"moses"`, too, whose rules would change the token
    (`co.` to `co .`), but not the same word in a text (`co. is`)."""
    token = AddedToken(token) if isinstance(token, str) else token
    return AddedToken(**token.__getstate__() | {"normalized": False}) if mode == "moses" else token


def set_steps(
    backend: Tokenizer, mode: str, lower_case: bool, specials: list, line_end: str | None = None, last: Sequence = ()
) -> None:
    """Set the normalizer of a tokenizer, and in mode `"moses"` its pre-tokenizer, which has the special tokens.

    Args:
        backend, mode, lower_case, specials: as for `build_backend`.
        line_end: the symbol that a line feed becomes; None: white space. Raises a ValueError where the mode's texts
            have no lines, or the Moses rules would split the symbol.
        last: normalizers after all others.
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


# The character that the pre-tokenizer ByteLevel writes for each byte, by its decimal number.
_BYTE_CHARACTERS = {str(byte): character for byte, character in bytes_to_unicode().items()}
BYTE_SYMBOLS = {character: byte for byte, character in _BYTE_CHARACTERS.items()}


def _byte_character(symbol: str, specials: list[str]) -> str:
    if symbol in _BYTE_CHARACTERS:
        return _BYTE_CHARACTERS[symbol]
    if symbol in specials:
        return symbol
    raise ValueError(f"symbols: {symbol!r} is no byte; in mode 'bytes' a symbol is a decimal number '0' … '255'")


def split_symbols(backend: Tokenizer, text: str) -> list[str]:
    """The symbols of a text without special tokens as they are written, in the vocabulary or not."""
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    return [symbol for symbol, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


def spelling_backend(backend: Tokenizer) -> Tokenizer:
    """A tokenizer that splits a text as another does, and whose tokens are the symbols as they are written."""
    # Unigram returns unknown symbols unchanged, where WordLevel returns its unknown token.
    speller = Tokenizer(Unigram([("", 0.0)], unk_id=0))
    speller.normalizer, speller.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    speller.post_processor = backend.post_processor
    speller.add_tokens(list(backend.get_added_tokens_decoder().values()))
    return speller


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
    # `split` gives text and special tokens in turn; longer special tokens match first.
    between = re.compile(f"({'|'.join(map(re.escape, sorted(specials, key=len, reverse=True))) or '(?!)'})")
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
    """The strings in a string, a batch of strings, a batch of batches …. Raises a ValueError for any other item."""
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
