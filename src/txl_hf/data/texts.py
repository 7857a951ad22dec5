"""A text as tokens: of a folder that `txl-prepare` wrote, or of a file."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..transfo_xl.tokenization_transfo_xl_backend import open_lines
from .corpora import check_is_text, count_batch, count_stream
from .encoding import (
    characters_without_tokens,
    document_end_token,
    encode_bytes,
    encode_lines,
    find_tokenizer,
    reads_streams,
)
from .midi import EVENTS

if TYPE_CHECKING:
    from datasets import DatasetDict
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "INFORMATION",
    "TokenisedText",
    "count_passed",
    "load_splits",
    "read_document_end",
    "read_prepared",
    "read_raw",
    "whole",
]

# What a folder of txl-prepare says of its text.
INFORMATION = "corpus.json"
# Its characters that have no token, and those that the unknown token stands for.
PASSED, UNKNOWN = "characters_without_token", "characters_unknown"


@dataclasses.dataclass(frozen=True)
class TokenisedText:
    """A tokenised text; `words` and `characters` are those of the whole, None where they are not known, or where so
    many have no token, or the unknown one, that a figure of each would be off by a thousandth.
    """

    token_ids: Any
    tokenizer: Any
    corpus: str | None = None
    words: int | None = None
    characters: int | None = None
    document_end: int | None = None

    def beginning(self, tokens: int | None) -> TokenisedText:
        """The first so many tokens, of which words and characters were not counted; None: the whole."""
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
    return TokenisedText(
        token_ids=dataset.with_format("numpy")["token_ids"],
        tokenizer=tokenizer,
        corpus=corpus,
        words=words,
        characters=characters,
    )


def load_splits(folder: Path) -> DatasetDict:
    """The splits of a folder as `datasets` wrote them; token ids stay on the disk.

    Raises:
        ValueError: a split has no rows, or a file is damaged.
        FileNotFoundError: a file is not there.
    """
    # Of an extra, which a text file does without.
    from datasets import load_from_disk

    try:
        with _damage(folder):
            return load_from_disk(str(folder))
    except IndexError as error:
        # This is how it meets a split without rows.
        raise ValueError(f"{folder}: the text of a split is empty") from error


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Names what was being read in an error over what is in it."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
        reason = f"{type(error).__name__}: {error}"
    except OSError as error:
        if error.errno is not None or isinstance(error, FileNotFoundError):
            raise
        # Of pyarrow, where a file ends too early.
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


def count_passed(tokenizer: Any, lines: Iterable[str], text: str) -> dict[str, int]:
    """How many characters of lines have no token or an unknown one, if any, for `corpus.json`; it is said to stderr.

    Args:
        text: what it is called.
    """
    passed, unknown, spelled = characters_without_tokens(tokenizer, lines)
    found = {}
    if passed:
        found[PASSED] = passed.total()
        often = ", ".join(f"{char!r} ({count:,})" for char, count in passed.most_common(6))
        print(
            f"{text}: {passed.total():,} characters have no token and are passed over: {often}. Where they are more "
            "than a thousandth, no figure per character or per word is given",
            file=sys.stderr,
        )
    if unknown:
        found[UNKNOWN] = unknown
        print(
            f"{text}: {tokenizer.unk_token} stands for {unknown:,} characters, of what the vocabulary lacks. Where "
            "they are more than a thousandth, no figure per character is given",
            file=sys.stderr,
        )
    if spelled:
        often = ", ".join(f"{token} ({count:,})" for token, count in spelled.most_common())
        print(
            f"{text}: special tokens stand in it as one token each, not as their characters: {often}. Figures per "
            "token are not quite those per character",
            file=sys.stderr,
        )
    return found


def whole(counts: Mapping[str, int]) -> tuple[int | None, int | None]:
    """Words and characters of a text, None where they are more than its tokens are of, by over a thousandth.

    Where a token stands for any unknown word, perplexities per word are published all the same.
    """
    words, characters = counts.get("words"), counts.get("characters")
    limit = (characters or 0) / 1000
    if counts.get(PASSED, 0) > limit:
        return None, None
    return words, None if counts.get(PASSED, 0) + counts.get(UNKNOWN, 0) > limit else characters


def read_document_end(folder: Path, tokenizer: Any, given: str | None) -> int | None:
    """The token that ends each document of a folder of `txl-prepare`; None where it is one text.

    Args:
        given: what `--document_end` says: a token instead of the one that was written, or "none". None: nothing.

    Raises:
        ValueError: the token is not in the vocabulary, or what says so in the folder is damaged.
    """
    if given is not None:
        return None if given == "none" else document_end_token(tokenizer, given)
    if not (path := folder / INFORMATION).is_file():
        return None
    with _damage(path):
        found = json.loads(path.read_text(encoding="utf-8")).get("document_end")
        if not (found is None or type(found) is int and 0 <= found < len(tokenizer)):
            raise ValueError(f"document_end is {found!r}, which is no token")
    return found
