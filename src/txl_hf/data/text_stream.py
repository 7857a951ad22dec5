"""A text that is tokenised and packed into rows while it is read: for corpora larger than the disk or the memory."""

import copy
import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .streams import as_item, check_sizes, text_fingerprint
from .texts import encode_text

logger = logging.get_logger(__name__)


class TextStream(IterableDataset):
    """G = `batch_size` rows of documents, tokenised as they are read, cut into segments of S = `segment_length`.

    Items are those of `TokenStream`: {"input_ids", "shift_labels"}, each (S,) int64, and row b of one step continues
    in row b of the next. Each document goes as a whole to the row with the fewest characters so far, the first of
    equals, and ends in `eos_token` where the tokenizer has one. Memory holds a few documents for each row.

    Processes share the rows by their loader, as `Trainer` and accelerate prepare it. A reading resumes bit for bit by
    skipping steps from the beginning, as `Trainer` and `accelerate.skip_first_batches` do; `expect` then compares the
    texts. (Plain `Trainer` skips within one epoch, and so needs `epochs=None`.)

    Args:
        texts: documents, an iterable that can be iterated over again or a function that returns an iterator: strings,
            or mappings with a string in `column`.
        tokenizer: the model's, any of transformers.
        segment_length: S ≥ 1.
        batch_size: G ≥ 1, the rows of one optimiser step: rows per process × processes × accumulation steps.
        column: key of the text in a mapping.
        epochs: how often the texts are read; their `set_epoch` is called, if there is one. None: without end, so that
            the number of training steps decides.
        keep_remainder: yield the last, incomplete step too, in which rows without tokens hold the input 0 with the
            label -100. Otherwise a warning gives the number of tokens left.

    Attributes:
        documents_read: epoch, number and CRC-32 of the documents that the last iterator has read in that epoch.
        dropped_tokens: at the end, tokens that are in no segment; 0 before the end.

    Raises:
        ValueError: a size is out of range, or `texts` can be read once only; while reading: a document is not a
            string, the documents of an epoch have no tokens or do not fill one step, or they are not those expected.
    """

    def __init__(
        self,
        texts: Iterable | Callable[[], Iterator],
        tokenizer: PreTrainedTokenizerBase,
        segment_length: int,
        batch_size: int,
        *,
        column: str = "text",
        epochs: int | None = 1,
        keep_remainder: bool = False,
    ):
        check_sizes(segment_length=segment_length, batch_size=batch_size)
        if epochs is not None:
            check_sizes(epochs=epochs)
        if isinstance(texts, str | bytes | Mapping):
            raise ValueError(f"texts is one {type(texts).__name__}: give an iterable of documents")
        if not callable(texts) and iter(texts) is texts:
            raise ValueError(
                "texts can be read once only, but epochs and resuming read it again: give a function that opens it"
            )
        self.texts = texts
        self.tokenizer = tokenizer
        self.segment_length = int(segment_length)
        self.batch_size = int(batch_size)
        self.column = column
        self.epochs = epochs
        self.keep_remainder = keep_remainder
        self.dropped_tokens = 0
        self._first_epoch = 0
        self._expected: Mapping[str, int] | None = None
        self.documents_read = {"epoch": 0, "documents": 0, "checksum": 0}

    def __copy__(self) -> "TextStream":
        """The same stream at its first epoch. Reading one neither moves the other nor sets the epoch of its texts."""
        copied = type(self).__new__(type(self))
        copied.__dict__ |= self.__dict__ | {"_first_epoch": 0, "_expected": None}
        if hasattr(self.texts, "set_epoch"):
            copied.texts = copy.copy(self.texts)
        return copied

    @functools.cached_property
    def fingerprint(self) -> str:
        """`text_fingerprint` of the first document's tokens, which other texts or tokenizers change."""
        [(_, tokens)] = islice(copy.copy(self)._read_documents(), 1)
        return text_fingerprint(tokens)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration's first reading of the texts counts as epoch `epoch`; `Trainer` calls this."""
        self._first_epoch = int(epoch)

    def expect(self, documents_read: Mapping[str, int]) -> None:
        """Raise a ValueError, once as many are read, if the documents are not those of another `documents_read`."""
        self._expected = dict(documents_read)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if get_worker_info() is not None:
            raise ValueError(
                "each worker would read all rows, and none could say how far: set num_workers to 0 "
                "(dataloader_num_workers in TrainingArguments)"
            )
        self.dropped_tokens = 0
        length, documents = self.segment_length, self._read_documents()
        characters = [0] * self.batch_size
        rows = [np.empty(0, dtype=np.int64) for _ in characters]
        for step in count():
            for row in range(self.batch_size):
                # Until the row has a segment and the token after it.
                while len(rows[row]) <= length and (document := next(documents, None)) is not None:
                    text, tokens = document
                    given_to = min(range(self.batch_size), key=characters.__getitem__)
                    characters[given_to] += len(text)
                    rows[given_to] = np.concatenate([rows[given_to], tokens])
            lengths = [len(row) - 1 for row in rows]
            if max(lengths) < 1 or (min(lengths) < length and not self.keep_remainder):
                self._end(step, lengths)
                return
            for row, tokens in enumerate(rows):
                yield as_item(torch.tensor(tokens[: length + 1]), length)
                rows[row] = tokens[length:]

    def _end(self, steps: int, lengths: list[int]) -> None:
        """Count the tokens behind the last whole step, and warn of them. `lengths`: labels that each row still has, -1
        where it has no token."""
        if steps == 0:
            which, found, needed = "shortest", min(lengths) + 1, self.segment_length + 1
            if self.keep_remainder:
                which, found, needed = "longest", max(lengths) + 1, 2
            raise ValueError(
                f"texts fills no step: of batch_size={self.batch_size} rows the {which} has {found} tokens, and "
                f"{needed} are needed; give more text, fewer rows or shorter segments"
            )
        self.dropped_tokens = sum(max(0, length) for length in lengths)
        if self.dropped_tokens:
            logger.warning_once(
                f"a TextStream leaves out {self.dropped_tokens:,} tokens, which are behind its {steps:,} steps of "
                f"{self.batch_size} rows of segment_length={self.segment_length}: they are read with "
                "keep_remainder=True"
            )

    def _read_documents(self) -> Iterator[tuple[str, np.ndarray]]:
        """The documents of all epochs, with their tokens; `documents_read` is advanced."""
        for epoch in islice(count(self._first_epoch), self.epochs):
            if hasattr(self.texts, "set_epoch"):
                self.texts.set_epoch(epoch)
            documents = checksum = 0
            has_text = False
            for document in self.texts() if callable(self.texts) else self.texts:
                text = self._text(document, documents)
                # A line feed separates documents in the checksum.
                documents, checksum = documents + 1, zlib.crc32(f"{text}\n".encode(errors="surrogatepass"), checksum)
                self.documents_read = {"epoch": epoch, "documents": documents, "checksum": checksum}
                self._compare(ended=False)
                tokens, end = encode_text(self.tokenizer, text), self.tokenizer.eos_token_id
                if end is not None and (len(tokens) == 0 or tokens[-1] != end):
                    tokens = np.append(tokens, end)
                has_text = has_text or bool((tokens != end).any())
                yield text, tokens
            self._compare(ended=True)
            if documents == 0:
                raise ValueError("texts has no document")
            if not has_text:
                raise ValueError(f"texts has no text: the tokenizer makes no token of its {documents} document(s)")

    def _compare(self, ended: bool) -> None:
        """Compare the documents read with those of `expect`, once there are as many."""
        expected, found = self._expected, self.documents_read
        if expected is None or expected["epoch"] != found["epoch"] or not expected["documents"]:
            return
        if ended or expected["documents"] <= found["documents"]:
            self._expected = None
            if expected != found:
                raise ValueError(
                    f"the state is of other texts: the first {expected['documents']} documents of epoch "
                    f"{found['epoch']} are not those that it has read; give the same, in the same order"
                )

    def _text(self, document: Any, number: int) -> str:
        """The text of a document. Raises a ValueError with its number where it has none."""
        text = document.get(self.column) if isinstance(document, Mapping) else document
        if isinstance(text, str):
            return text
        where = f"document {number} of texts"
        if isinstance(document, Mapping):
            have = ", ".join(map(str, document))
            raise ValueError(f"{where} has no text in the column {self.column!r}: choose one of {have} with column")
        raise ValueError(f"{where} is no string or mapping, but {type(document).__name__}")
