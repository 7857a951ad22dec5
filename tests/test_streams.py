"""TokenStream: contiguous, step-major, nothing lost but one remainder."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from txl_hf import TokenStream


@st.composite
def sizes(draw) -> tuple[int, int, int]:
    """(tokens, segment_length, batch_size) of texts that are long enough."""
    segment_length, batch_size = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    needed = segment_length * batch_size + 1
    return draw(st.integers(needed, 6 * needed)), segment_length, batch_size


@settings(deadline=None)
@given(sizes())
def test_each_row_reads_on_where_it_stopped(size):
    tokens, segment_length, batch_size = size
    stream = TokenStream(range(tokens), segment_length, batch_size)
    batches = list(DataLoader(stream, batch_size=batch_size))

    assert len(batches) == stream.steps
    inputs = torch.cat([batch["input_ids"] for batch in batches], dim=1)
    labels = torch.cat([batch["shift_labels"] for batch in batches], dim=1)
    assert torch.equal(labels, inputs + 1)
    assert torch.equal(inputs.flatten(), torch.arange(inputs.numel())), "the streams follow one another without a gap"


@settings(deadline=None)
@given(sizes())
def test_only_a_remainder_is_dropped(size):
    tokens, segment_length, batch_size = size
    stream = TokenStream(range(tokens), segment_length, batch_size)
    read = {int(token) for item in stream for tokens in item.values() for token in tokens}
    assert stream.dropped_tokens == tokens - len(read) < batch_size * segment_length


def test_the_shortest_text():
    stream = TokenStream([5, 6, 7, 8, 9], segment_length=2, batch_size=2)
    assert [item["input_ids"].tolist() for item in stream] == [[5, 6], [7, 8]]
    assert [item["shift_labels"].tolist() for item in stream] == [[6, 7], [8, 9]]
    assert (len(stream), stream.steps, stream.dropped_tokens) == (2, 1, 0)


def test_every_kind_of_text(tmp_path):
    tokens = list(range(50))
    np.array(tokens, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    kinds = {
        "list": tokens,
        "tuple": tuple(tokens),
        "array": np.array(tokens, dtype=np.int32),
        "tensor": torch.tensor(tokens),
        "memory-mapped": np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="r"),
    }
    for kind, token_ids in kinds.items():
        item = TokenStream(token_ids, segment_length=8, batch_size=2)[3]
        assert item["input_ids"].tolist() == list(range(32, 40)), kind
        assert {tensor.dtype for tensor in item.values()} == {torch.int64}, kind


def test_items_are_copies():
    tokens = torch.arange(20)
    TokenStream(tokens, segment_length=4, batch_size=2)[0]["input_ids"].fill_(-1)
    assert torch.equal(tokens, torch.arange(20))


@pytest.mark.parametrize(
    ("token_ids", "segment_length", "batch_size", "message"),
    [
        ([], 4, 1, "the text is empty"),
        (range(4), 4, 1, r"has 4 tokens.*segment_length=4 need 5"),
        (range(40), 4, 100, r"has 40 tokens, but batch_size=100 streams.*need 401"),
        (range(40), 0, 1, "segment_length=0"),
        (range(40), 4, 0, "batch_size=0"),
        (range(40), 4, -1, "batch_size=-1"),
        (range(40), 4.0, 1, "segment_length=4.0"),
        (np.zeros((8, 8), dtype=np.int64), 4, 1, "2 dimensions"),
        (np.zeros(40), 4, 1, "float64"),
        ("characters, not ids", 4, 1, "sequence of integers"),
    ],
)
def test_bad_input_is_named(token_ids, segment_length, batch_size, message):
    with pytest.raises(ValueError, match=message):
        TokenStream(token_ids, segment_length, batch_size)


@pytest.mark.parametrize("index", [-1, 4])
def test_items_outside_the_stream(index):
    with pytest.raises(IndexError, match=f"item {index} of a TokenStream of 4"):
        TokenStream(range(17), segment_length=4, batch_size=2)[index]
