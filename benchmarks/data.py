"""Time items and batches of a `TokenStream` over Arrow folders of growing length.

    python benchmarks/data.py --device cpu [--tokens 10000000 100000000 1000000000]

Each text is a folder as `datasets.save_to_disk` leaves it, written in batches of 1,000 rows as its writers do, so that
the longest has a million pieces. The contender is the same column read through `datasets`, at random places; equality
of the items comes first. Rows go to `benchmarks/results/data.csv`.
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, load_from_disk

import harness
from txl_hf import TokenStream
from txl_hf.data.streams import read_tokens

ROWS, SEGMENT, STREAMS = 1000, 192, 64


def write(folder: Path, tokens: int) -> Dataset:
    """A text of so many tokens, whose values tell their places apart."""
    Dataset.from_dict({"token_ids": np.zeros(1, dtype=np.int32)}).save_to_disk(folder)
    [file] = folder.glob("*.arrow")
    with pa.ipc.open_stream(file) as reader:
        schema = reader.schema
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for start in range(0, tokens, ROWS):
            piece = (np.arange(start, start + ROWS) % 9973).astype(np.int32)
            writer.write_batch(pa.record_batch([pa.array(piece)], schema=schema))
    return load_from_disk(str(folder))


def milliseconds(calls: list) -> float:
    found = []
    for call in calls:
        start = time.perf_counter()
        call()
        found.append(1000 * (time.perf_counter() - start))
    return statistics.median(found)


def measure(tokens: int, folder: Path) -> dict:
    column = write(folder, tokens).with_format("numpy")["token_ids"]
    start = time.perf_counter()
    stream = TokenStream(column, SEGMENT, STREAMS)
    opened = time.perf_counter() - start
    chance = random.Random(0)
    places = [chance.randrange(len(stream)) for _ in range(200)]
    starts = [chance.randrange(tokens - SEGMENT - 1) for _ in range(10)]
    for place in starts:
        assert torch.equal(
            read_tokens(stream.token_ids, place, place + SEGMENT), read_tokens(column, place, place + SEGMENT)
        )
    steps = [chance.randrange(stream.steps) * STREAMS for _ in range(50)]
    return {
        "tokens": tokens,
        "open_s": round(opened, 3),
        "item_ms": round(milliseconds([lambda i=i: stream[i] for i in places]), 4),
        "batch_ms": round(
            milliseconds([lambda i=i: stream.__getitems__(list(range(i, i + STREAMS))) for i in steps]), 3
        ),
        "datasets_item_ms": round(
            milliseconds([lambda i=i: read_tokens(column, i, i + SEGMENT + 1) for i in starts]), 3
        ),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[10_000_000, 100_000_000, 1_000_000_000])
    parser.add_argument("--folder", type=Path, help="where there is room for the texts, 4 bytes a token")
    options = parser.parse_args()
    origin = {**harness.origin("cpu", "", torch.get_num_threads()), **harness.versions()}
    for tokens in options.tokens:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            row = measure(tokens, Path(folder) / "text")
        print(row)
        harness.append(harness.RESULTS / "data.csv", [{**origin, **row}])


if __name__ == "__main__":
    main()
