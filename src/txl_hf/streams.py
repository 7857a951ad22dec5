"""Text as parallel streams of contiguous segments, for training with memory."""

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["TokenStream"]


class TokenStream(Dataset):
    """A text cut into G = `batch_size` streams, and each stream into contiguous segments of S = `segment_length`.

    Items are step-major: item `step * G + row` is segment `step` of stream `row`. Read in order in batches of G, row b
    of one batch continues in row b of the next, so that the memory of one step belongs to the segments of the next.

    An item is {"input_ids", "shift_labels"}, each (S,) int64; shift_labels[i] is the token after input_ids[i], so that
    the last token of a segment predicts the first of the next one. Streams follow one another in the text without a
    gap. What is left at the end, less than one segment per stream, is not read.

    Args:
        token_ids: N token ids: a list, an array, a CPU tensor, a memory-mapped array or whatever slices alike. It is
            read item by item, never copied as a whole.
        segment_length: S ≥ 1.
        batch_size: G ≥ 1, the streams of one optimiser step: rows per process × processes × accumulation steps.

    Attributes:
        steps: segments per stream.
        dropped_tokens: tokens at the end of the text that are in no segment, neither as input nor as label.

    Raises:
        ValueError: the text is not a sequence of integers, or too short for one segment per stream; or a size is
            below 1.
    """

    def __init__(self, token_ids, segment_length: int, batch_size: int):
        check_sizes(segment_length=segment_length, batch_size=batch_size)
        check_tokens(token_ids)
        needed = batch_size * segment_length + 1
        if len(token_ids) < needed:
            raise ValueError(
                f"the text has {len(token_ids)} tokens, but batch_size={batch_size} streams of at least one segment "
                f"of segment_length={segment_length} need {needed}"
            )
        self.token_ids = token_ids
        self.segment_length = segment_length
        self.batch_size = batch_size
        # The very last token is a label only.
        self.steps = (len(token_ids) - 1) // (batch_size * segment_length)
        self.dropped_tokens = len(token_ids) - 1 - len(self) * segment_length

    def __len__(self) -> int:
        return self.steps * self.batch_size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of a TokenStream of {len(self)}")
        step, row = divmod(index, self.batch_size)
        start = (row * self.steps + step) * self.segment_length
        tokens = read_tokens(self.token_ids, start, start + self.segment_length + 1)
        return {"input_ids": tokens[:-1], "shift_labels": tokens[1:]}


def read_tokens(token_ids, start: int, stop: int) -> Tensor:
    """Tokens [start, stop) of a text as int64, a copy."""
    return torch.from_numpy(np.asarray(token_ids[start:stop]).astype(np.int64))


def check_tokens(token_ids) -> None:
    """Raise a ValueError unless the text is a sequence of at least one integer."""
    if len(token_ids) == 0:
        raise ValueError("the text is empty: token_ids holds no token")
    first = np.asarray(token_ids[:1])
    if first.ndim != 1 or first.dtype.kind not in "iu":
        shape = "" if first.ndim == 1 else f" in {first.ndim} dimensions"
        raise ValueError(f"token_ids must be one sequence of integers, but holds {first.dtype}{shape}")


def check_sizes(**sizes: int) -> None:
    """Raise a ValueError that names the size that is not a positive integer."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}={size!r} must be an integer of at least 1")
