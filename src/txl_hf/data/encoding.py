"""The token ids of a text, for any tokenizer: one way for preparing and evaluating, so that figures agree."""

import unicodedata
from collections import Counter
from collections.abc import Iterable
from io import StringIO
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..transfo_xl.tokenization_transfo_xl_backend import WORD_MODES, check_lines
from .corpora import LINES
from .midi import is_midi_tokenizer, load_midi_tokenizer

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

    from ..transfo_xl.tokenization_transfo_xl import TransfoXLTokenizer

__all__ = [
    "LINE_FEED",
    "characters_without_tokens",
    "check_symbols_of",
    "document_end_token",
    "encode_bytes",
    "encode_lines",
    "encode_text",
    "ends_lines",
    "fill_special_tokens",
    "find_tokenizer",
    "has_tokenizer",
    "load_tokenizer",
    "reads_streams",
]

LINE_FEED = 10


def load_tokenizer(name: str | Path, **options) -> Any:
    """The tokenizer of a folder or on the Hub, one of transformers or of MidiTok.

    Args:
        options: of transformers' `from_pretrained`: `revision`, `trust_remote_code`.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    if is_midi_tokenizer(name):
        return load_midi_tokenizer(name)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"the tokenizer of {name} cannot be read: {' '.join(str(error).split())}") from error


def find_tokenizer(name: str | Path) -> Any:
    """The same, or None where there is none.

    Raises:
        ValueError: there is one that cannot be read.
    """
    if Path(name).is_dir() and not has_tokenizer(name):
        return None
    try:
        return load_tokenizer(name)
    except ValueError:
        # What is on the Hub has come by now.
        if has_tokenizer(name):
            raise
        return None


def has_tokenizer(name: str | Path) -> bool:
    """Whether a folder, or what has come of a repository on the Hub, has a file of a tokenizer, of transformers or of
    MidiTok.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError

    from ..transfo_xl.tokenization_transfo_xl import TransfoXLTokenizer

    files = ("tokenizer_config.json", "tokenizer.json", *TransfoXLTokenizer.vocab_files_names.values())
    if Path(name).is_dir():
        return any(Path(name, file).exists() for file in files)
    try:
        return any(isinstance(try_to_load_from_cache(str(name), file), str) for file in files)
    except HFValidationError:
        return False


def check_symbols_of(model: str | Path, tokenizer: Any, data: Any) -> None:
    """Check that a text has the symbols that a model learned; one of the two may have more behind those of both.

    Args:
        model: its folder or name on the Hub; without a tokenizer there, nothing is known of its symbols.
        tokenizer: the text's.
        data: what the text is called.

    Raises:
        ValueError: a symbol is another one, which is named; or the model's tokenizer cannot be read.
    """
    if (trained_with := find_tokenizer(model)) is None:
        return
    symbols, expected = _list_symbols(tokenizer), _list_symbols(trained_with)
    for index, (found, wanted) in enumerate(zip(symbols, expected, strict=False)):
        if found != wanted:
            raise ValueError(
                f"{data} has another vocabulary than {model}: {len(symbols)} symbols instead of {len(expected)}, and "
                f"id {index} is {found!r} instead of {wanted!r}"
            )


def _list_symbols(tokenizer: Any) -> list[str]:
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        return tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    # One of MidiTok.
    vocabulary = tokenizer.vocab_model or tokenizer.vocab
    return sorted(vocabulary, key=vocabulary.get)


def ends_lines(tokenizer: Any) -> bool:
    """Whether a line ends in a token instead of its line feed: so it does in vocabularies of words that have one."""
    if getattr(tokenizer, "mode", None) not in WORD_MODES:
        return False
    return tokenizer.line_ends or tokenizer.eos_token is not None


def fill_special_tokens(
    config: "PreTrainedConfig | GenerationConfig", tokenizer: Any, document_end: int | None = None
) -> None:
    """Set those of `bos_token_id`, `eos_token_id` and `pad_token_id` that a configuration leaves open.

    `eos_token_id` is where `generate` takes a text to be over: the token that ends documents, otherwise the
    tokenizer's `eos_token`. Where that ends each line (`ends_lines`), it stays open: a heading or an empty line would
    be all that is written. `pad_token_id` stays open where that token stands in texts too, as their beginning or the
    end of their lines: without an `attention_mask`, `generate` would hide it in a prompt.

    Args:
        config: of a model or of its generation; what it says already stays.
        tokenizer: one of transformers or of MidiTok.
        document_end: the token that ends each document of the training text, if one does.
    """
    found = {name: getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    in_texts = {found["bos_token_id"], found["eos_token_id"]}
    if document_end is not None or ends_lines(tokenizer):
        found["eos_token_id"] = document_end
    # Where padding is what ends a text, generate hides none of it.
    if found["pad_token_id"] in in_texts - {found["eos_token_id"]}:
        found["pad_token_id"] = None
    for name, token in found.items():
        if token is not None and getattr(config, name) is None:
            setattr(config, name, token)


def encode_lines(
    tokenizer: "PreTrainedTokenizerBase", lines: Iterable[str], add_eos: bool | None = None
) -> np.ndarray:
    """The ids of lines, one after the other.

    Args:
        tokenizer: that of a Transformer-XL, or any other of transformers.
        lines: the lines, each with its end. Each is tokenised by itself: a tokenizer that puts a space before a text
            puts one before each line.
        add_eos: end each line with `eos_token`; for a `TransfoXLTokenizer` only. None: where `ends_lines` says so.

    Returns:
        (N,) int64.

    Raises:
        ValueError: `lines` is one string.
    """
    if getattr(tokenizer, "mode", None) is not None and hasattr(tokenizer, "encode_lines"):
        return tokenizer.encode_lines(lines, ends_lines(tokenizer) if add_eos is None else add_eos)
    check_lines(lines)
    lines = list(lines)
    if not lines:
        return np.empty(0, dtype=np.int64)
    ids = tokenizer(lines, add_special_tokens=False, verbose=False)["input_ids"]
    return np.fromiter(chain.from_iterable(ids), dtype=np.int64)


def encode_text(tokenizer: "PreTrainedTokenizerBase", text: str) -> np.ndarray:
    """The ids of a text, as `encode_lines` over its lines: (N,) int64. Only line feeds end a line."""
    return encode_lines(tokenizer, StringIO(text, newline="\n").readlines())


def characters_without_tokens(tokenizer: Any, lines: Iterable[str]) -> tuple[Counter[str], int, Counter[str]]:
    """How often each character occurs that has no token; how many there are that `unk_token` stands for where the
    text does not spell it; and how often the text spells each special token, where all others are a character or a
    byte each. Without `unk_token` a tokenizer may pass over what it lacks, in silence.

    White space is passed over by many that read words, and what is not to be seen by some: neither is counted. Nor is
    what has a token by itself and was joined to others, as an accent is; nor anything of a `TransfoXLTokenizer`, which
    refuses what it lacks, nor of a tokenizer in Python, which does not say what its tokens are of.

    Args:
        lines: as `encode_lines` takes them.
    """
    passed: Counter[str] = Counter()
    spelled: Counter[str] = Counter()
    mode, unknown = getattr(tokenizer, "mode", None), 0
    refuses = mode is not None
    if not getattr(tokenizer, "is_fast", False) or (refuses and tokenizer.unk_token is None):
        return passed, unknown, spelled
    specials = () if mode in (None, *WORD_MODES) else tokenizer.all_special_ids
    lines = iter(lines)
    while batch := list(islice(lines, LINES)):
        encoded = tokenizer(batch, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        for line, places, ids in zip(batch, encoded["offset_mapping"], encoded["input_ids"], strict=True):
            end = 0
            for (start, stop), token in zip(places, ids, strict=True):
                if token == tokenizer.unk_token_id and line[start:stop] != tokenizer.unk_token:
                    unknown += stop - start
                elif token in specials:
                    spelled[line[start:stop]] += 1
                if not refuses:
                    passed.update(line[end:start])
                end = max(end, stop)
            if not refuses:
                passed.update(line[end:])
    seen = {char: count for char, count in passed.items() if not _is_passed_over(tokenizer, char)}
    return Counter(seen), unknown, spelled


def _is_passed_over(tokenizer: Any, char: str) -> bool:
    """Whether it matters little that a character is between tokens."""
    if char.isspace() or unicodedata.category(char) in ("Cc", "Cf"):
        return True
    return bool(tokenizer(char, add_special_tokens=False)["input_ids"])


def document_end_token(tokenizer: Any, token: str) -> int:
    """The id of the token that ends each document; the tokenizer is one of transformers or of MidiTok.

    Raises:
        ValueError: it is not in the vocabulary.
    """
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else tokenizer.vocab
    if getattr(tokenizer, "mode", None) == "bytes":
        # By its number, as among the symbols, or as the character that it is.
        vocabulary = {symbol: index for index, symbol in enumerate(tokenizer.symbols)}
        vocabulary |= {chr(byte): vocabulary[str(byte)] for byte in range(128) if str(byte) in vocabulary} | vocabulary
    if token not in vocabulary:
        shown = token if token.isprintable() else repr(token)
        raise ValueError(f"--document_end {shown} is no token of the vocabulary")
    return vocabulary[token]


def reads_streams(tokenizer: Any) -> bool:
    """Whether its vocabulary is like those of enwik8 and text8: bytes but the line feed, and no token for any other.
    `encode_bytes` reads a file for it.
    """
    mode = getattr(tokenizer, "mode", None)
    if mode not in ("bytes", "characters") or tokenizer.unk_token is not None:
        return False
    symbols = set(tokenizer.symbols) - set(tokenizer.all_special_tokens)
    if mode == "bytes":
        # A letter of several bytes is lower-cased as a whole.
        return str(LINE_FEED) not in symbols and not tokenizer.lower_case
    return chr(LINE_FEED) not in symbols and all(len(symbol) == 1 and symbol.isascii() for symbol in symbols)


def encode_bytes(tokenizer: "TransfoXLTokenizer", text: bytes) -> np.ndarray:
    """The ids of a stream of bytes without its line feeds, as the originals read enwik8 and text8.

    Returns:
        (N,) int32.

    Raises:
        ValueError: a byte is not in the vocabulary.
    """
    specials = set(tokenizer.all_special_tokens)
    ids = {symbol: index for index, symbol in enumerate(tokenizer.symbols) if symbol not in specials}
    symbols = map(str, range(256))
    if tokenizer.mode == "characters":
        # As the tokenizer changes them first: a space of text8 is `_`, and letters may be lower-cased.
        normalizer = tokenizer.backend_tokenizer.normalizer
        symbols = map(chr if normalizer is None else lambda byte: normalizer.normalize_str(chr(byte)), range(128))
    table = np.full(256, -1, dtype=np.int32)
    for byte, symbol in enumerate(symbols):
        table[byte] = ids.get(symbol, -1)
    data = np.frombuffer(text, dtype=np.uint8)
    data = data[data != LINE_FEED]
    ids = table[data]
    if (ids < 0).any():
        raise ValueError(
            f"byte {data[ids.argmin()]} is not in the vocabulary of {len(tokenizer)} symbols, which is closed: leave "
            f"it out of the text, or train on what txl-prepare --corpus text --mode {tokenizer.mode} writes"
        )
    return ids
