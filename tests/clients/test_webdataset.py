"""A `TextStream` over the shards of webdataset, which are read as they come."""

from pathlib import Path

import pytest
import torch
import webdataset

from txl_hf import TextStream, TransfoXLTokenizer

S, G = 8, 4
TEXTS = [f"document {number}\n" + f"line {number * 7 % 11} of it\n" * (number * 5 % 13) for number in range(60)]


@pytest.fixture
def tokenizer():
    return TransfoXLTokenizer.train_from_iterator(TEXTS, mode="whitespace", line_ends=True)


@pytest.fixture
def shards(tmp_path):
    """Three archives of twenty texts each."""
    for shard in range(3):
        with webdataset.TarWriter(str(tmp_path / f"{shard}.tar")) as archive:
            for number in range(20 * shard, 20 * shard + 20):
                archive.write({"__key__": f"{number:04}", "txt": TEXTS[number]})
    return str(tmp_path / "{0..2}.tar")


def equal(items: list[dict], others: list[dict]) -> bool:
    return len(items) == len(others) and all(
        torch.equal(one[name], other[name]) for one, other in zip(items, others, strict=True) for name in one
    )


def test_shards_are_read_as_their_texts_are(shards, tokenizer):
    """Also where a reading goes on behind the steps of another."""
    expected = list(TextStream(TEXTS, tokenizer, S, G, keep_remainder=True))
    texts = webdataset.WebDataset(shards, shardshuffle=False).decode()
    stream = TextStream(texts, tokenizer, S, G, column="txt", keep_remainder=True)
    items = []
    for item in stream:
        items.append(item)
        if len(items) == 5 * G:
            break
    resumed = TextStream(texts, tokenizer, S, G, column="txt", keep_remainder=True)
    resumed.expect(stream.documents_read)
    items += list(resumed)[len(items) :]
    assert len(items) > 10 * G and equal(items, expected)


def test_no_more_is_read_than_is_needed(shards, tokenizer):
    """Of a corpus that no disk holds, an archive is opened when those before it have been read."""
    Path(shards.replace("{0..2}", "2")).unlink()
    texts = webdataset.WebDataset(shards, shardshuffle=False).decode()
    stream = iter(TextStream(texts, tokenizer, S, G, column="txt"))
    first = [next(stream) for _ in range(10 * G)]
    assert equal(first, list(TextStream(TEXTS, tokenizer, S, G))[: 10 * G])
    with pytest.raises(FileNotFoundError, match="2.tar"):
        list(stream)
