"""The tokens of a text, of a folder of `txl-prepare` or of a file: one way for any tokenizer, so figures agree."""

import dataclasses
import json
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import StringIO
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..transfo_xl.tokenization_transfo_xl import TransfoXLTokenizer
from ..transfo_xl.tokenization_transfo_xl_backend import check_lines, open_lines
from .corpora import LINES, check_is_text, count_batch, count_stream
from .loading import EVENTS, ends_lines, find_tokenizer

if TYPE_CHECKING:
    from datasets import DatasetDict

# In a folder of txl-prepare: the files, counts and conventions of its text.
INFORMATION = "corpus.json"
# Counts of characters that have no token, and that the unknown token stands for.
PASSED, UNKNOWN = "characters_without_token", "characters_unknown"
LINE_FEED = 10


def encode_lines(tokenizer: PreTrainedTokenizerBase, lines: Iterable[str]) -> np.ndarray:
    """The ids of lines, (N,) int64, with `eos_token` after each line if `ends_lines` is True. Each line, with its end,
    is tokenised by itself: a tokenizer that puts a space before a text puts one before each line."""
    if getattr(tokenizer, "mode", None) is not None and hasattr(tokenizer, "encode_lines"):
        return tokenizer.encode_lines(lines, ends_lines(tokenizer))
    check_lines(lines)
    lines = list(lines)
    if not lines:
        return np.empty(0, dtype=np.int64)
    ids = tokenizer(lines, add_special_tokens=False, verbose=False)["input_ids"]
    return np.fromiter(chain.from_iterable(ids), dtype=np.int64)


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> np.ndarray:
    """The ids of a text, as `encode_lines` over its lines: (N,) int64. Only line feeds end a line."""
    return encode_lines(tokenizer, StringIO(text, newline="\n").readlines())


def reads_streams(tokenizer: Any) -> bool:
    """Whether `encode_bytes` reads files for this tokenizer: its symbols are bytes without the line feed, and it has
    no unknown token, as those of enwik8 and text8.
    """
    mode = getattr(tokenizer, "mode", None)
    if mode not in ("bytes", "characters") or tokenizer.unk_token is not None:
        return False
    symbols = set(tokenizer.symbols) - set(tokenizer.all_special_tokens)
    if mode == "bytes":
        # `lower_case` needs whole characters, and some have several bytes.
        return str(LINE_FEED) not in symbols and not tokenizer.lower_case
    return chr(LINE_FEED) not in symbols and all(len(symbol) == 1 and symbol.isascii() for symbol in symbols)


def encode_bytes(tokenizer: TransfoXLTokenizer, text: bytes) -> np.ndarray:
    """The ids of a stream of bytes without its line feeds, as the originals read enwik8 and text8: (N,) int32. Raises
    a ValueError for a byte that is not in the vocabulary."""
    specials = set(tokenizer.all_special_tokens)
    ids = {symbol: index for index, symbol in enumerate(tokenizer.symbols) if symbol not in specials}
    symbols = map(str, range(256))
    if tokenizer.mode == "characters":
        # Each byte is normalised as the tokenizer normalises a text: a space of text8 becomes `_`.
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


def document_end_token(tokenizer: Any, token: str) -> int:
    """The id of the token that ends each document. Raises a ValueError if it is not in the vocabulary."""
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else tokenizer.vocab
    if getattr(tokenizer, "mode", None) == "bytes":
        # The token may be given by the byte's number, as in the vocabulary ("10"), or as the character itself.
        vocabulary = {symbol: index for index, symbol in enumerate(tokenizer.symbols)}
        vocabulary |= {chr(byte): vocabulary[str(byte)] for byte in range(128) if str(byte) in vocabulary} | vocabulary
    if token not in vocabulary:
        shown = token if token.isprintable() else repr(token)
        raise ValueError(f"--document_end {shown} is no token of the vocabulary")
    return vocabulary[token]


@dataclasses.dataclass(frozen=True)
class TokenisedText:
    """A tokenised text; `words` and `characters` are counts of the whole, None where they are not known (`whole`)."""

    token_ids: Any
    tokenizer: Any
    corpus: str | None = None
    words: int | None = None
    characters: int | None = None
    document_end: int | None = None

    def beginning(self, tokens: int | None) -> "TokenisedText":
        """The first `tokens` tokens, whose words and characters are not known; None: the whole."""
        if tokens is None or tokens >= len(self.token_ids):
            return self
        return dataclasses.replace(self, token_ids=self.token_ids[:tokens], words=None, characters=None)


def read_prepared(folder: Path, split: str) -> TokenisedText:
    if not (folder / INFORMATION).is_file():
        raise ValueError(f"{folder} has no {INFORMATION}: it is no folder of txl-prepare")
    with _damage(folder / INFORMATION):
        information = json.loads((folder / INFORMATION).read_text(encoding="utf-8"))
        corpus, (words, characters) = information["corpus"], whole(information["splits"][split])
    tokenizer = find_tokenizer(str(folder))
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer: prepare the text again with txl-prepare")
    dataset = load_splits(folder)[split]
    if EVENTS in dataset.column_names:
        raise ValueError(f"{folder} has compound tokens, which are no one text: see examples/music/compound.py")
    return TokenisedText(dataset.with_format("numpy")["token_ids"], tokenizer, corpus, words, characters)


def load_splits(folder: Path) -> "DatasetDict":
    """The splits of a folder as `datasets` wrote them; token ids stay on the disk. Raises a ValueError for a split
    without rows and for a damaged file."""
    # `datasets` is in an extra, which a text file does not need.
    from datasets import load_from_disk

    try:
        with _damage(folder):
            return load_from_disk(str(folder))
    except IndexError as error:
        # datasets raises an IndexError for a split without rows.
        raise ValueError(f"{folder}: the text of a split is empty") from error


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Turn an error about the contents of a file or folder into a ValueError that names it."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
        reason = f"{type(error).__name__}: {error}"
    except OSError as error:
        if error.errno is not None or isinstance(error, FileNotFoundError):
            raise
        # pyarrow raises an OSError without errno where a file ends too early.
        reason = str(error)
    else:
        return
    raise ValueError(f"{path} is damaged ({reason}): prepare the text again")


def read_raw(path: Path, tokenizer: PreTrainedTokenizerBase) -> TokenisedText:
    """A file as txl-prepare would read it for this tokenizer."""
    if reads_streams(tokenizer):
        stream = path.read_bytes() if tokenizer.mode == "bytes" else path.read_bytes().strip()
        counts, token_ids = count_stream(stream), encode_bytes(tokenizer, stream)
        return TokenisedText(token_ids, tokenizer, words=counts["words"], characters=counts["characters"])
    try:
        with open_lines(path, getattr(tokenizer, "mode", None)) as file:
            lines = file.readlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    check_is_text(path, lines, getattr(tokenizer, "mode", None))
    [words], [characters], _ = count_batch(lines).values()
    if words == 0:
        raise ValueError(f"{path} is empty: it has no word")
    token_ids = encode_lines(tokenizer, lines)
    counts = {"words": words + len(lines), "characters": characters} | count_passed(tokenizer, lines, str(path))
    known_words, known_characters = whole(counts)
    return TokenisedText(token_ids, tokenizer, words=known_words, characters=known_characters)


def read_document_end(folder: Path, tokenizer: Any, given: str | None) -> int | None:
    """The token that ends each document of a folder of `txl-prepare`; None where it is one text. `given`, the value of
    `--document_end`, is a token in place of the one in the folder, or "none"; None without it."""
    if given is not None:
        return None if given == "none" else document_end_token(tokenizer, given)
    if not (path := folder / INFORMATION).is_file():
        return None
    with _damage(path):
        found = json.loads(path.read_text(encoding="utf-8")).get("document_end")
        if not (found is None or type(found) is int and 0 <= found < len(tokenizer)):
            raise ValueError(f"document_end is {found!r}, which is no token")
    return found


def count_passed(tokenizer: Any, lines: Iterable[str], text: str) -> dict[str, int]:
    """Counts of the characters without a token and with the unknown one, if any, for `corpus.json`, and on stderr,
    where `text` names the text."""
    passed, unknown = characters_without_tokens(tokenizer, lines)
    if passed:
        often = ", ".join(f"{char!r} ({count:,})" for char, count in passed.most_common(6))
        print(
            f"{text}: {passed.total():,} characters have no token and are passed over: {often}. Where they are more "
            "than a thousandth, no figure per character or per word is given",
            file=sys.stderr,
        )
    if unknown:
        print(
            f"{text}: {tokenizer.unk_token} stands for {unknown:,} characters, of what the vocabulary lacks. Where "
            "they are more than a thousandth, no figure per character is given",
            file=sys.stderr,
        )
    return {name: count for name, count in ((PASSED, passed.total()), (UNKNOWN, unknown)) if count}


def characters_without_tokens(tokenizer: Any, lines: Iterable[str]) -> tuple[Counter[str], int]:
    """The characters of lines that have no token of their own: how often each occurs that no token covers, and how
    many the unknown token stands for, where the text does not spell it.

    Not counted are white space and invisible characters; a character that has a token by itself and was joined to
    others, as an accent is; anything of a `TransfoXLTokenizer` without `unk_token`, which refuses what it lacks; and
    anything of a tokenizer in Python, which has no offsets.
    """
    passed: Counter[str] = Counter()
    unknown, refuses = 0, getattr(tokenizer, "mode", None) is not None
    if not getattr(tokenizer, "is_fast", False) or (refuses and tokenizer.unk_token is None):
        return passed, unknown
    lines = iter(lines)
    while batch := list(islice(lines, LINES)):
        encoded = tokenizer(batch, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        for line, places, ids in zip(batch, encoded["offset_mapping"], encoded["input_ids"], strict=True):
            end = 0
            for (start, stop), token in zip(places, ids, strict=True):
                if token == tokenizer.unk_token_id and line[start:stop] != tokenizer.unk_token:
                    unknown += stop - start
                if not refuses:
                    passed.update(line[end:start])
                end = max(end, stop)
            if not refuses:
                passed.update(line[end:])
    for char in list(passed):
        invisible = char.isspace() or unicodedata.category(char) in ("Cc", "Cf")
        if invisible or tokenizer(char, add_special_tokens=False)["input_ids"]:
            del passed[char]
    return passed, unknown


def whole(counts: Mapping[str, int]) -> tuple[int | None, int | None]:
    """Words and characters of a text; None where more than a thousandth of the characters have no token, or, for
    characters, the unknown one. Words may be unknown, because published perplexities per word count unknown words.
    """
    words, characters = counts.get("words"), counts.get("characters")
    limit = (characters or 0) / 1000
    if counts.get(PASSED, 0) > limit:
        return None, None
    return words, None if counts.get(PASSED, 0) + counts.get(UNKNOWN, 0) > limit else characters
