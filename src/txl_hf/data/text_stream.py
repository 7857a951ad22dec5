"""A text that is tokenised and packed into rows while it is read: for corpora larger than the disk or the memory."""

import copy
import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
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

    Items are step-major, as those of `TokenStream`: {"input_ids", "shift_labels"}, each (S,) int64, and row b of one
    step continues in row b of the next. Each document goes as a whole to the row with the fewest characters so far,
    the first of equals. Every process computes the rows of all documents from their order and lengths, and tokenises
    only those of its own rows and the first of an epoch. Memory holds the unread rest of a document or a few for each
    row. The documents of a row follow one another without a gap; each ends in `eos_token` where the tokenizer has one.

    `state_dict` and `load_state_dict` resume after a whole number of steps, bit for bit, with as many processes;
    documents that were read are read again, but not tokenised. Reading from the beginning and skipping batches, as
    `Trainer` and `accelerate.skip_first_batches` do, gives the same. (Plain `Trainer` skips within one epoch, and so
    needs `epochs=None`.) A loader of accelerate reads a batch ahead, so that the state is of a step later.

    One iterator reads a stream at a time; `copy.copy(stream)` is the same stream at its beginning.

    Args:
        texts: an iterable that can be iterated over again, or a function that returns an iterator: of strings, or of
            mappings with a string in `column`. Each is a document.
        tokenizer: the model's, any of transformers.
        segment_length: S ≥ 1.
        batch_size: G ≥ 1, the rows of one optimiser step: rows per process × processes × accumulation steps.
        column: key of the text in a mapping.
        epochs: how often the texts are read; their `set_epoch` is called, if there is one. None: without end, so that
            the number of training steps decides.
        keep_remainder: yield the last, incomplete step too: rows without tokens hold the input 0 with the label -100.
            Otherwise the stream ends before it, and a warning gives the number of tokens left.
        num_processes, process_index, accumulation_steps: yield the rows of this process alone, in the order of its
            micro-batches, for a loop whose loader is not sharded again; needs `epochs=None`, as processes would not
            end together. `Trainer` shards its loader: leave them at their defaults.

    Attributes:
        step: steps that have been yielded whole.
        dropped_tokens: at the end, tokens of this process's rows that are in no segment; 0 before the end.

    Raises:
        ValueError: a size is out of range, `texts` can be read once only, or rows cannot be shared; while reading: a
            document is not a string, or the documents of an epoch have no tokens or do not fill one step.
        RuntimeError: an iterator is used after another one was begun or a state was loaded.
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
        num_processes: int = 1,
        process_index: int = 0,
        accumulation_steps: int = 1,
    ):
        check_sizes(
            segment_length=segment_length,
            batch_size=batch_size,
            num_processes=num_processes,
            accumulation_steps=accumulation_steps,
        )
        check_sizes(least=0, process_index=process_index)
        if epochs is not None:
            check_sizes(epochs=epochs)
        if isinstance(texts, str | bytes | Mapping):
            raise ValueError(f"texts is one {type(texts).__name__}: give an iterable of documents")
        if not callable(texts) and iter(texts) is texts:
            raise ValueError(
                "texts can be read once only, but epochs and resuming read it again: give a function that opens it"
            )
        if num_processes > 1 and epochs is not None:
            raise ValueError(f"epochs={epochs}: processes would not end together; with num_processes, set epochs=None")
        rows, left = divmod(batch_size, num_processes * accumulation_steps)
        if left or process_index >= num_processes:
            raise ValueError(
                f"process {process_index} of {num_processes} with {accumulation_steps} accumulation step(s) cannot "
                f"have a share of batch_size={batch_size} rows: make it a multiple of "
                f"{num_processes * accumulation_steps}"
            )
        self.texts = texts
        self.tokenizer = tokenizer
        self.segment_length = int(segment_length)
        self.batch_size = int(batch_size)
        self.column = column
        self.epochs = epochs
        self.keep_remainder = keep_remainder
        per_step = batch_size // accumulation_steps
        firsts = [a * per_step + process_index * rows for a in range(accumulation_steps)]
        self.rows = [row for first in firsts for row in range(first, first + rows)]
        self._first_epoch = 0
        self._loaded = False
        self._expected: Mapping[str, int] | None = None
        self._readings = 0
        self._begin()

    def _begin(self) -> None:
        self.step = 0
        # Position: the epoch, the number of documents read in it, and their CRC-32.
        self._epoch, self._documents, self._checksum = self._first_epoch, 0, 0
        self._characters = [0] * self.batch_size
        self._tokens = {row: np.empty(0, dtype=np.int64) for row in self.rows}
        self.dropped_tokens = 0

    def __copy__(self) -> "TextStream":
        """The same stream at its beginning. Reading one neither moves the other nor sets the epoch of its texts."""
        copied = type(self).__new__(type(self))
        copied.__dict__ |= self.__dict__ | {"_first_epoch": 0, "_loaded": False, "_expected": None}
        if hasattr(self.texts, "set_epoch"):
            copied.texts = copy.copy(self.texts)
        copied._begin()
        return copied

    @functools.cached_property
    def fingerprint(self) -> str:
        """`text_fingerprint` of the first document's tokens, which other texts or tokenizers change."""
        [text] = islice(copy.copy(self)._read_documents(), 1)
        return text_fingerprint(self._encode(text))

    def set_epoch(self, epoch: int) -> None:
        """The next iteration's first reading of the texts counts as epoch `epoch`; `Trainer` calls this."""
        if not self._loaded:
            self._first_epoch = int(epoch)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if get_worker_info() is not None:
            raise ValueError(
                "each worker would read all rows, and none could say how far: set num_workers to 0 "
                "(dataloader_num_workers in TrainingArguments)"
            )
        if not self._loaded:
            self._begin()
        self._loaded = False
        self._readings += 1
        reading = self._readings
        documents = self._read_documents()
        while True:
            for row in self.rows:
                self._fill(row, documents)
            lengths = [len(self._tokens[row]) - 1 for row in self.rows]
            if max(lengths) < 1 or (min(lengths) < self.segment_length and not self.keep_remainder):
                self._end()
                return
            segments = (self._tokens[row][: self.segment_length + 1] for row in self.rows)
            items = [as_item(torch.tensor(tokens), self.segment_length) for tokens in segments]
            for item in items[:-1]:
                yield item
                self._check_reading(reading)
            # The state is advanced before the last item, so that after that item it is the state after the whole step.
            for row in self.rows:
                self._tokens[row] = self._tokens[row][self.segment_length :]
            self.step += 1
            yield items[-1]
            self._check_reading(reading)

    def _end(self) -> None:
        """Count the tokens behind the last whole step, and warn of them."""
        left = [len(tokens) for tokens in self._tokens.values()]
        if self.step == 0:
            which, found, needed = "shortest", min(left), self.segment_length + 1
            if self.keep_remainder:
                which, found, needed = "longest", max(left), 2
            raise ValueError(
                f"texts fills no step: of batch_size={self.batch_size} rows the {which} has {found} tokens, and "
                f"{needed} are needed; give more text, fewer rows or shorter segments"
            )
        # The first token left in a row was the last label, so it does not count.
        self.dropped_tokens = sum(tokens - 1 for tokens in left if tokens)
        if self.dropped_tokens:
            logger.warning_once(
                f"a TextStream leaves out {self.dropped_tokens:,} tokens, which are behind its {self.step:,} steps of "
                f"{len(left)} rows of segment_length={self.segment_length}: they are read with keep_remainder=True"
            )

    def _check_reading(self, reading: int) -> None:
        if reading != self._readings:
            raise RuntimeError(
                "the stream was begun again, or another state loaded, since this iterator began: read "
                "copy.copy(stream) beside it"
            )

    def _fill(self, row: int, documents: Iterator[str]) -> None:
        """Read documents until a row has a segment and the token after it, or no document is left."""
        while len(self._tokens[row]) <= self.segment_length:
            if (text := next(documents, None)) is None:
                return
            given_to = min(range(self.batch_size), key=self._characters.__getitem__)
            self._characters[given_to] += len(text)
            if given_to in self._tokens:
                self._tokens[given_to] = np.concatenate([self._tokens[given_to], self._encode(text)])

    def _encode(self, text: str) -> np.ndarray:
        ids = encode_text(self.tokenizer, text)
        end = self.tokenizer.eos_token_id
        return ids if end is None or (len(ids) and ids[-1] == end) else np.append(ids, end)

    # --- documents ---------------------------------------------------------------------------------------------------

    def _read_documents(self) -> Iterator[str]:
        """The documents from the position (`_epoch`, `_documents`) on, which is advanced.

        Raises:
            ValueError: the documents do not have the expected checksum, there is none, or one is not a string.
        """
        while self.epochs is None or self._epoch < self._first_epoch + self.epochs:
            if hasattr(self.texts, "set_epoch"):
                self.texts.set_epoch(self._epoch)
            resumed_at, self._documents, self._checksum = self._documents, 0, 0
            has_text = False
            for document in self.texts() if callable(self.texts) else self.texts:
                text = self._text(document)
                # A line feed separates documents in the checksum.
                self._checksum = zlib.crc32(f"{text}\n".encode(errors="surrogatepass"), self._checksum)
                self._documents += 1
                # Every process tokenises until a token is not an end, so that all notice an epoch without text.
                has_text = has_text or bool((self._encode(text) != self.tokenizer.eos_token_id).any())
                self._compare(ended=False)
                if self._documents > resumed_at:
                    yield text
            self._compare(ended=True)
            if self._documents == 0:
                raise ValueError("texts has no document")
            if not has_text:
                raise ValueError(
                    f"texts has no text: the tokenizer makes no token of its {self._documents} document(s)"
                )
            if self.epochs is not None and self._epoch + 1 >= self._first_epoch + self.epochs:
                # Counts stay, because the rows still hold tokens of this epoch.
                return
            self._epoch, self._documents, self._checksum = self._epoch + 1, 0, 0

    def _compare(self, ended: bool) -> None:
        """Compare the documents read with those of `expect`, once there are as many. Raises a ValueError."""
        expected = self._expected
        if expected is None or expected["epoch"] != self._epoch or not expected["documents"]:
            return
        if not ended and expected["documents"] > self._documents:
            return
        self._expected = None
        if (expected["documents"], expected["checksum"]) != (self._documents, self._checksum):
            raise ValueError(
                f"the state is of other texts: the first {expected['documents']} documents of epoch {self._epoch} are "
                "not those that it has read; give the same, in the same order"
            )

    def _text(self, document) -> str:
        text = document.get(self.column) if isinstance(document, Mapping) else document
        if not isinstance(text, str):
            where = f"document {self._documents} of texts"
            if isinstance(document, Mapping):
                have = ", ".join(map(str, document))
                raise ValueError(
                    f"{where} has no text in the column {self.column!r}: choose one of {have} with column"
                )
            raise ValueError(f"{where} is no string or mapping, but {type(document).__name__}")
        return text

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def documents_read(self) -> dict[str, int]:
        """Epoch, number and CRC-32 of the documents read so far, for `expect`; JSON can hold it."""
        return {"epoch": self._epoch, "documents": self._documents, "checksum": self._checksum}

    def expect(self, documents_read: Mapping[str, int]) -> None:
        """Compare this reading with `documents_read` of another one: a ValueError, once as many are read, if they
        differ."""
        self._expected = dict(documents_read)

    def state_dict(self) -> dict[str, Any]:
        """The position in the text, for `load_state_dict`, in types that JSON can hold."""
        return {
            "text": self.fingerprint,
            "segment_length": self.segment_length,
            "step": self.step,
            "first_epoch": self._first_epoch,
            "read": self.documents_read,
            "characters": list(self._characters),
            "rows": {str(row): tokens.tolist() for row, tokens in self._tokens.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a state; with several processes, each takes the state of the process with the same rows.

        Raises:
            ValueError: the state is of other texts, sizes or rows. Where the first document is the same, other texts
                are noticed when the stream is read.
        """
        if (length := state["segment_length"]) != self.segment_length:
            raise ValueError(f"the state has segment_length={length}, the stream {self.segment_length}")
        if (batch_size := len(state["characters"])) != self.batch_size:
            raise ValueError(f"the state has {batch_size} rows, the stream batch_size={self.batch_size}")
        if (rows := [int(row) for row in state["rows"]]) != self.rows:
            raise ValueError(
                f"the state is of rows {rows}, the stream of {self.rows}: go on with as many processes and "
                "accumulation steps, each with its own state"
            )
        if state["text"] != self.fingerprint:
            raise ValueError("the state is of other texts or symbols: their first document has other tokens")
        self.step, self._first_epoch = state["step"], state["first_epoch"]
        self._epoch, self._documents, self._checksum = (
            state["read"][name] for name in ("epoch", "documents", "checksum")
        )
        self.expect(state["read"])
        self._characters = list(state["characters"])
        self._tokens = {int(row): np.asarray(ids, dtype=np.int64) for row, ids in state["rows"].items()}
        self._readings += 1
        self._loaded = True
