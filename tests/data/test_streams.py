"""TokenStream: contiguous, step-major, nothing lost but one remainder; loaders that keep it so."""

import pickle
import time

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader

from txl_hf import TokenStream, evaluate_language_model
from txl_hf.data.streams import check_loader, open_tokens, varying_ends


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


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 5), st.sampled_from([None, 0, 1]))
# The longer rows have a segment more, for their last token.
@example(labels=11, segment_length=5, batch_size=2, varlen_seed=None)
def test_evaluation_trims_no_token(labels, segment_length, batch_size, varlen_seed):
    batch_size = min(batch_size, labels)
    stream = TokenStream(range(labels + 1), segment_length, batch_size, keep_remainder=True, varlen_seed=varlen_seed)
    batches = list(DataLoader(stream, batch_size=batch_size))
    rows = torch.cat([batch["shift_labels"] for batch in batches], dim=1)
    inputs = torch.cat([batch["input_ids"] for batch in batches], dim=1)
    assert rows[rows != -100].tolist() == list(range(1, labels + 1))
    assert torch.equal(inputs[rows != -100], rows[rows != -100] - 1)
    assert (rows != -100).sum(1).max() - (rows != -100).sum(1).min() <= 1
    assert ((rows == -100).nonzero()[:, 1] == rows.shape[1] - 1).all(), "padding ends a stream"
    assert stream.dropped_tokens == 0


def test_segments_of_varying_length():
    """The original's --varlen: contiguous, one length a step, others with another seed."""
    stream = TokenStream(range(20001), segment_length=40, batch_size=4, varlen_seed=1)
    batches = list(DataLoader(stream, batch_size=4))
    rows = torch.cat([batch["input_ids"] for batch in batches], dim=1)
    assert torch.equal(rows, torch.arange(20000).view(4, -1))
    lengths = [batch["input_ids"].shape[1] for batch in batches]
    assert len(lengths) == stream.steps and max(lengths) <= 55 and min(lengths[:-1]) >= 5
    halves = [length for length in lengths[:-1] if length < 28]
    assert 0 < len(halves) < len(lengths) / 8 and len(set(lengths)) > 10
    again = TokenStream(range(20001), 40, 4, varlen_seed=1)
    other = TokenStream(range(20001), 40, 4, varlen_seed=2)
    assert [len(again[4 * i]["input_ids"]) for i in range(again.steps)] == lengths
    assert [len(other[4 * i]["input_ids"]) for i in range(other.steps)] != lengths
    # Where the two means lie ten deviations apart, one segment in twenty is half as long.
    many = np.diff(varying_ends(10**6, 100, seed=0))[:-1]
    assert 0.04 < (many < 75).mean() < 0.06 and many[many < 75].mean() == pytest.approx(50, abs=1)
    assert many.max() == 115
    # A run that is resumed under another version reads on where it was.
    assert varying_ends(700, 100, seed=0).tolist() == [96, 193, 291, 393, 498, 597, 700]


@pytest.mark.parametrize("keep_remainder", [False, True])
def test_every_epoch_varies_in_its_own_way(keep_remainder):
    """With as many steps, on which schedules and resuming depend; a stream made anew agrees."""
    options = {"varlen_seed": 1, "keep_remainder": keep_remainder}
    stream, lengths = TokenStream(range(2003), 40, 4, **options), []
    for epoch in (0, 1, 2, 1, 0):
        stream.set_epoch(epoch)
        batches = list(DataLoader(stream, batch_size=4))
        labels = torch.cat([batch["shift_labels"] for batch in batches], dim=1)
        inputs = torch.cat([batch["input_ids"] for batch in batches], dim=1)
        text = torch.arange(1, 2003 if keep_remainder else 2001)
        assert torch.equal(labels[labels != -100], text) and torch.equal(inputs[labels != -100], text - 1)
        lengths.append([batch["input_ids"].shape[1] for batch in batches])
        again = TokenStream(range(2003), 40, 4, **options)
        again.set_epoch(epoch)
        assert [len(again[4 * i]["input_ids"]) for i in range(again.steps)] == lengths[-1]
    assert lengths[0] == lengths[4] != lengths[1] == lengths[3] != lengths[2] != lengths[0]
    assert len({len(epoch) for epoch in lengths}) == 1


def test_without_varying_lengths_all_epochs_are_the_same():
    stream = TokenStream(range(201), 40, 2)
    before = [item["input_ids"] for item in stream]
    stream.set_epoch(3)
    assert all(map(torch.equal, before, [item["input_ids"] for item in stream]))


@settings(deadline=None)
@given(sizes(), st.integers(0, 12), st.booleans(), st.sampled_from([None, 0]))
def test_extended_context_is_read_again(size, ext_len, keep_remainder, varlen_seed):
    """The tokens before a segment come with it, as far as the stream has any, and without labels."""
    tokens, segment_length, batch_size = size
    options = {"keep_remainder": keep_remainder, "varlen_seed": varlen_seed}
    plain = list(DataLoader(TokenStream(range(tokens), segment_length, batch_size, **options), batch_size))
    stream = TokenStream(range(tokens), segment_length, batch_size, ext_len=ext_len, **options)
    extended = list(DataLoader(stream, batch_size))
    assert len(extended) == len(plain)
    read = plain[0]["input_ids"][:, :0]
    for before, item in zip(plain, extended, strict=True):
        reread = read[:, max(0, read.shape[1] - ext_len) :]
        assert torch.equal(item["input_ids"], torch.cat([reread, before["input_ids"]], dim=1))
        labels = torch.cat([torch.full_like(reread, -100), before["shift_labels"]], dim=1)
        assert torch.equal(item["shift_labels"], labels)
        read = torch.cat([read, before["input_ids"]], dim=1)


def test_extended_context_gives_the_evaluation_of_the_text(make_model, make_ids):
    """Read by hand with memory, every token costs what `evaluate_language_model` says."""
    model, text = make_model(ext_len=4, mem_len=9), make_ids(1, 60)[0]
    stream = TokenStream(text, 5, 2, ext_len=4, keep_remainder=True)
    mems, losses = None, []
    for batch in DataLoader(stream, batch_size=2):
        with torch.no_grad():
            outputs = model(**batch, mems=mems)
        mems = outputs.mems
        losses.append(outputs.losses[batch["shift_labels"] != -100])
    # The one stream's last label is the other's first token, which the evaluation does not score.
    expected = sum(
        evaluate_language_model(model, part, segment_length=5).nll * (len(part) - 1) for part in (text[:31], text[30:])
    )
    assert torch.cat(losses).sum().item() == pytest.approx(expected, rel=1e-5)


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


def test_memory_mapped_arrow(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"token": list(range(50))}).save_to_disk(tmp_path / "corpus")
    corpus = datasets.load_from_disk(tmp_path / "corpus")
    for column in (corpus["token"], corpus.with_format("numpy")["token"]):
        stream = TokenStream(column, segment_length=8, batch_size=2)
        assert stream[3]["input_ids"].tolist() == list(range(32, 40))


def test_items_are_copies():
    tokens = torch.arange(20)
    item = TokenStream(tokens, segment_length=4, batch_size=2)[0]
    item["shift_labels"].fill_(-100)
    assert torch.equal(item["input_ids"], torch.arange(4))
    item["input_ids"].fill_(-1)
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


@pytest.mark.parametrize("ext_len", [-1, 1.0, None])
def test_extended_context_out_of_range(ext_len):
    with pytest.raises(ValueError, match=f"ext_len={ext_len} must be an integer of at least 0"):
        TokenStream(range(40), 4, 1, ext_len=ext_len)


@pytest.mark.parametrize("index", [-1, 4])
def test_items_outside_the_stream(index):
    with pytest.raises(IndexError, match=f"item {index} of a TokenStream of 4"):
        TokenStream(range(17), segment_length=4, batch_size=2)[index]


@pytest.mark.parametrize("indices", [[-1], [-2, -1], [-1, 0], [3, 4], [4]], ids=str)
def test_batches_outside_the_stream(indices):
    stream = TokenStream(range(17), segment_length=4, batch_size=2)
    outside = next(index for index in indices if not 0 <= index < 4)
    with pytest.raises(IndexError, match=f"item {outside} of a TokenStream of 4"):
        stream.__getitems__(indices)


# --- loaders ---------------------------------------------------------------------------------------------------------


def prepared(stream, batch_size, num_processes=1, process_index=0, split_batches=False, **options):
    data_loader = pytest.importorskip("accelerate.data_loader")
    return data_loader.prepare_data_loader(
        DataLoader(stream, batch_size=batch_size, **options),
        num_processes=num_processes,
        process_index=process_index,
        split_batches=split_batches,
        put_on_device=False,
    )


@pytest.mark.parametrize("skipped", [0, 2])
@pytest.mark.parametrize("split_batches", [False, True])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_rows_stay_together_over_processes_and_accumulation(num_processes, accumulation_steps, split_batches, skipped):
    rows = 2
    stream = TokenStream(range(201), 5, rows * num_processes * accumulation_steps)
    streams = torch.arange(stream.steps * 5 * stream.batch_size).view(stream.batch_size, -1)
    for process_index in range(num_processes):
        batch_size = rows * num_processes if split_batches else rows
        loader = prepared(stream, batch_size, num_processes, process_index, split_batches)
        check_loader(
            loader,
            num_processes=num_processes,
            process_index=process_index,
            accumulation_steps=accumulation_steps,
        )
        if skipped:
            from accelerate import skip_first_batches

            loader = skip_first_batches(loader, skipped * accumulation_steps)
        batches = [batch["input_ids"] for batch in loader]
        assert len(batches) == (stream.steps - skipped) * accumulation_steps
        for micro in range(accumulation_steps):
            first = (micro * num_processes + process_index) * rows
            read = torch.cat(batches[micro::accumulation_steps], dim=1)
            assert torch.equal(read, streams[first : first + rows, skipped * 5 :])


@pytest.mark.parametrize(
    ("loader", "layout", "message"),
    [
        ({"batch_size": 8, "shuffle": True}, {}, "shuffles.*shuffle=False"),
        ({"batch_size": 4}, {}, "items 0 to 3 instead of 0 to 7, .*set the loader's batch size to 8"),
        ({"batch_size": 8}, {"accumulation_steps": 2}, "set the loader's batch size to 4"),
        ({"batch_size": 8}, {"num_processes": 2}, "set the loader's batch size to 4 .*split_batches=True to 8"),
        ({"batch_size": 8}, {"num_processes": 3}, "make it a multiple of 3"),
        ({"batch_size": 8, "num_workers": 1, "in_order": False}, {}, "shuffles.*in_order=True"),
        ({"batch_size": 8, "num_workers": 1, "persistent_workers": True}, {}, "set persistent_workers=False"),
    ],
)
def test_loaders_that_break_continuity_name_the_fix(loader, layout, message):
    stream = TokenStream(range(401), 5, 8)
    for process_index in range(layout.get("num_processes", 1)):
        prepare = prepared if "num_processes" in layout else DataLoader
        options = {"num_processes": 2, "process_index": process_index} if prepare is prepared else {}
        with pytest.raises(ValueError, match=message):
            check_loader(prepare(stream, **loader, **options), process_index=process_index, **layout)


@pytest.mark.parametrize("indices", [[4, 5, 6, 7], [4, 5], [6, 7], [5]], ids=str)
def test_rows_of_a_step_are_read_as_one_table(monkeypatch, indices):
    """All rows or those of a process, and not item by item."""
    stream = TokenStream(range(41), 5, 4)
    expected = [stream[index] for index in indices]
    monkeypatch.setattr(TokenStream, "__getitem__", None)
    for item, same in zip(stream.__getitems__(indices), expected, strict=True):
        assert all(map(torch.equal, item.values(), same.values())) and item.keys() == same.keys()


def test_half_losses_are_those_of_segments_after_as_much_context():
    stream = TokenStream(range(401), 5, 4, ext_len=5)
    assert stream[4]["input_ids"].tolist() == list(range(10))
    assert stream[4]["shift_labels"].tolist() == [-100] * 5 + [6, 7, 8, 9, 10]


@settings(deadline=None)
@given(sizes(), st.integers(0, 7), st.booleans(), st.booleans())
def test_a_batch_read_at_once_is_its_items(size, ext_len, keep_remainder, varying):
    tokens, segment_length, batch_size = size
    options = {"ext_len": ext_len, "keep_remainder": keep_remainder, "varlen_seed": 3 if varying else None}
    stream = TokenStream(range(tokens), segment_length, batch_size, **options)
    half = max(1, batch_size // 2)
    batches = [list(range(first, first + half)) for first in range(0, len(stream) - half + 1, half)]
    for indices in [*batches, [len(stream) - 1, 0]]:
        items = [stream[index] for index in indices]
        if len({len(item["input_ids"]) for item in items}) > 1:
            with pytest.raises(ValueError, match="rows of different lengths"):
                stream.__getitems__(indices)
            continue
        for found, item in zip(stream.__getitems__(indices), items, strict=True):
            assert all(torch.equal(found[name], expected) for name, expected in item.items())


@pytest.mark.parametrize("lengths", [{"ext_len": 4}, {"varlen_seed": 1}, {"keep_remainder": True}], ids=str)
def test_a_batch_of_several_lengths_is_refused(lengths):
    """As a loader that shuffles, plain Trainer's, puts one together at some step of an epoch."""
    stream = TokenStream(range(407), 8, 5, **lengths)
    indices = [next(i for i in range(len(stream)) if len(stream[i]["input_ids"]) != len(stream[0]["input_ids"])), 0]
    with pytest.raises(
        ValueError, match=f"has rows of different lengths: with .*{next(iter(lengths))}.* as TransfoXLTrainer does"
    ):
        next(iter(DataLoader(stream, batch_sampler=[indices])))


def test_a_kind_of_stream_that_has_items_of_its_own_is_read_by_them():
    class Masked(TokenStream):
        def __getitem__(self, index):
            return {**super().__getitem__(index), "index": index}

    assert [item["index"] for item in Masked(range(401), 5, 8).__getitems__([8, 9])] == [8, 9]


def written_in_pieces(tokens: int, rows: int):
    """A column as it comes from a writer with so many rows a batch, all of them views of one."""
    pyarrow = pytest.importorskip("pyarrow")
    piece = pyarrow.array(np.arange(rows, dtype=np.int32))
    return pyarrow.chunked_array([piece] * (tokens // rows))


def test_an_arrow_column_is_read_as_what_it_holds():
    datasets = pytest.importorskip("datasets")
    column = written_in_pieces(1000, 7)
    expected = column.to_numpy()
    tokens = open_tokens(column)
    assert len(tokens) == len(expected) and tokens[13] == 6 and tokens[-1] == expected[-1]
    for places in (slice(0, 7), slice(3, 40), slice(-9, None), slice(5, 5), slice(6, 30, 4), slice(900, 2000)):
        assert tokens[places].tolist() == expected[places].tolist()
    assert pickle.loads(pickle.dumps(tokens))[3:40].tolist() == expected[3:40].tolist()
    dataset = datasets.Dataset.from_dict({"token_ids": expected})
    for text in (dataset["token_ids"], dataset.with_format("numpy")["token_ids"]):
        assert type(open_tokens(text)).__name__ == "ArrowTokens"
    # Its rows are in another order than those of its table.
    shuffled = dataset.shuffle(seed=0).with_format("numpy")
    assert TokenStream(shuffled["token_ids"], 5, 2)[0]["input_ids"].tolist() == shuffled[:5]["token_ids"].tolist()
    stream, same = TokenStream(column, 5, 8), TokenStream(expected, 5, 8)
    assert all(torch.equal(stream[i]["input_ids"], same[i]["input_ids"]) for i in range(len(stream)))


def test_an_arrow_column_of_anything_but_integers_is_refused():
    pyarrow = pytest.importorskip("pyarrow")
    for values, what in (([1, None], "int64 with 1 missing"), ([1.0, 2.0], "double"), ([[1], [2]], "list<")):
        with pytest.raises(ValueError, match=f"one sequence of integers, but the column holds {what}"):
            TokenStream(pyarrow.chunked_array([values]), 1, 1)


def test_an_item_of_a_long_column_costs_what_it_costs_of_a_short_one():
    """40 million tokens written in 40,000 pieces: 41 ms an item once, more with every piece."""

    def seconds(stream: TokenStream) -> float:
        found = []
        for index in range(0, len(stream), len(stream) // 100):
            start = time.perf_counter()
            stream[index]
            found.append(time.perf_counter() - start)
        return min(found)

    short, long = (TokenStream(written_in_pieces(tokens, 1000), 192, 64) for tokens in (100_000, 40_000_000))
    assert seconds(long) < min(3e-4, 3 * seconds(short))


@pytest.mark.parametrize(
    "token_ids",
    [[1, 2.7, 3], [1, "2", 3], [1, float("nan"), 3], [1, None, 3], [1, True, 3], [1, [2], 3], [[1], [2], [3]]],
    ids=str,
)
def test_a_list_with_anything_but_integers_is_refused(token_ids):
    with pytest.raises(ValueError, match="token_ids must be one sequence of integers"):
        TokenStream(token_ids, 1, 1)


@pytest.mark.parametrize("changed", [0, 4_500, 50_000, 1_500_000, 1_999_999])
def test_another_text_of_the_same_length_has_another_fingerprint(changed):
    """Wherever one token differs, and however the text is kept."""
    text = np.zeros(2_000_000, np.int64)
    other = text.copy()
    other[changed] = 1
    assert TokenStream(text, 5, 1).fingerprint != TokenStream(other, 5, 1).fingerprint
    assert TokenStream(other, 5, 1).fingerprint == TokenStream(other.astype(np.uint16), 5, 2).fingerprint
    assert TokenStream(other[:9], 5, 1).fingerprint == TokenStream(other[:9].tolist(), 5, 1).fingerprint


def test_what_turns_out_to_be_no_integer_is_refused_where_it_is_read():
    class Text:
        """Floats behind integers, as a file may hold them; too long to be looked at as a whole."""

        def __len__(self):
            return 100_000

        def __getitem__(self, places):
            return ([1] * 5002 + [2.5] + [1] * 94_997)[places]

    stream = TokenStream(Text(), 5, 1)
    stream[0]
    with pytest.raises(ValueError, match="tokens 5000 to 5005 hold float64"):
        stream[1000]


def test_sizes_of_numpy_are_sizes_and_truth_values_are_none():
    stream = TokenStream(range(401), np.int64(5), np.int32(8), ext_len=np.int16(2))
    assert torch.equal(stream[0]["input_ids"], TokenStream(range(401), 5, 8, ext_len=2)[0]["input_ids"])
    assert type(stream.batch_size) is int and type(stream.segment_length) is int
    for sizes in [(True, 8), (5, True), (5, np.True_), (5, 8.0)]:
        with pytest.raises(ValueError, match="must be an integer of at least 1"):
            TokenStream(range(401), *sizes)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_prepared_loaders_tell_the_stream_its_epoch(num_processes):
    """Also a loader that skips, once it is told of the epoch; workers that are forked anew hear of it too."""
    accelerate = pytest.importorskip("accelerate")
    stream = TokenStream(range(1001), 20, 4, varlen_seed=0)

    def lengths(loader):
        return [batch["input_ids"].shape[1] for batch in loader]

    expected = []
    for epoch in range(3):
        stream.set_epoch(epoch)
        expected.append([len(stream[4 * step]["input_ids"]) for step in range(stream.steps)])
    assert expected[0] != expected[1] != expected[2]
    for workers in (0, 1):
        loader = prepared(stream, 4 // num_processes, num_processes, num_workers=workers)
        assert [lengths(loader) for _ in range(3)] == expected
    resumed = accelerate.skip_first_batches(loader, 2)
    resumed.set_epoch(1)
    assert lengths(resumed) == expected[1][2:]


@pytest.mark.parametrize(
    ("loader", "accumulation_steps", "message"),
    [
        ({"batch_size": 4}, 1, "batch size is 4, but 8 rows .*batch_size=8: set the loader's batch size to 8"),
        ({"batch_size": 8}, 2, "set the loader's batch size to 4"),
    ],
)
def test_loaders_of_iterable_datasets(loader, accumulation_steps, message):
    class Iterable(torch.utils.data.IterableDataset):
        batch_size = 8

        def __iter__(self):
            return iter(())

    check_loader(DataLoader(Iterable(), batch_size=8, num_workers=1))
    check_loader(DataLoader(Iterable(), batch_size=4), accumulation_steps=2)
    check_loader(DataLoader(Iterable(), batch_size=None))
    with pytest.raises(ValueError, match=message):
        check_loader(DataLoader(Iterable(), **loader), accumulation_steps=accumulation_steps)


@pytest.mark.parametrize("dispatch_batches", [False, True])
@pytest.mark.parametrize("split_batches", [False, True])
def test_loaders_of_iterable_datasets_on_two_processes(split_batches, dispatch_batches):
    data_loader = pytest.importorskip("accelerate.data_loader")

    class Iterable(torch.utils.data.IterableDataset):
        batch_size = 8

        def __iter__(self):
            return iter(())

    def check(batch_size, accumulation_steps):
        loader = data_loader.prepare_data_loader(
            DataLoader(Iterable(), batch_size=batch_size),
            device=torch.device("cpu"),
            num_processes=2,
            process_index=1,
            split_batches=split_batches,
            put_on_device=True,
            dispatch_batches=dispatch_batches,
        )
        check_loader(loader, num_processes=2, process_index=1, accumulation_steps=accumulation_steps)

    for accumulation_steps in (1, 2):
        right = 8 // accumulation_steps // (1 if split_batches else 2)
        check(right, accumulation_steps)
        for wrong in (right * 2, right // 2 if right > 2 else right * 4):
            with pytest.raises(ValueError, match="batch_size=8: set the loader's batch size to"):
                check(wrong, accumulation_steps)


@pytest.mark.parametrize("kind", ["token", "ends"])
@pytest.mark.parametrize("ext_len", [0, 2])
def test_items_say_where_documents_begin(kind, ext_len):
    """Also in what a stream reads again, and where a document ends with a segment or a stream."""
    text = [5, 6, 0, 7, 8, 9, 4, 0, 0, 3, 1, 2, 0, 5, 5, 5, 0, 1, 1, 1, 2]
    ends = [place + 1 for place, token in enumerate(text) if token == 0]
    document_end = 0 if kind == "token" else ends
    stream = TokenStream(text, 4, 2, ext_len=ext_len, keep_remainder=True, document_end=document_end)
    places = TokenStream(list(range(len(text))), 4, 2, ext_len=ext_len, keep_remainder=True)
    for item, place in zip(
        (stream[i] for i in range(len(stream))), (places[i] for i in range(len(places))), strict=True
    ):
        real = place["shift_labels"] != -100
        expected = torch.tensor([int(p) in ends for p in place["input_ids"]])
        assert item["resets"].dtype == torch.bool and item["resets"].shape == item["input_ids"].shape
        assert torch.equal(item["resets"][real], expected[real])


def test_documents_of_a_stream_are_read_as_they_are_alone(make_model):
    """A training step with memory and resets against each document by itself."""
    from txl_hf.memories import memory_of

    model = make_model(mem_len=20)
    text = torch.randint(1, 60, (37,), generator=torch.Generator().manual_seed(0))
    text[[8, 9, 21, 30]] = 0
    stream = TokenStream(text, 6, 1, document_end=0)
    memory, losses = {}, []
    with torch.no_grad():
        for item in (stream[i] for i in range(len(stream))):
            outputs = model(**{name: tensor[None] for name, tensor in item.items()}, **memory)
            memory = memory_of(outputs)
            losses.append(outputs.losses)
        starts = [0, 9, 10, 22, 31, 36]
        alone = [
            model(text[None, a:b], shift_labels=text[None, a + 1 : b + 1]).losses
            for a, b in zip(starts, starts[1:], strict=False)
        ]
    torch.testing.assert_close(torch.cat(losses, 1), torch.cat(alone, 1), atol=1e-5, rtol=1e-5)


def test_a_list_that_is_read_token_by_token_has_documents():
    """Before its first token there is none, of which a list does not say the type."""
    stream = TokenStream([1, 3, 2, 4], 1, 1, document_end=3)
    assert [stream[i]["resets"].tolist() for i in range(3)] == [[False], [False], [True]]


@pytest.mark.parametrize("document_end", [True, 1.5, [3, 3], [[1]], ["a"]])
def test_ends_of_documents_that_are_none(document_end):
    with pytest.raises(ValueError, match="document_end must be a token id, or the places"):
        TokenStream(list(range(20)), 4, 2, document_end=document_end)


@pytest.mark.parametrize("accumulation_steps", [1, 200])
def test_a_loader_is_asked_for_its_first_batches_alone(accumulation_steps):
    """Of a long text there are too many to look at all."""
    stream, asked = TokenStream(range(120_001), 1, 400), []

    class Batches(BatchSampler):
        def __iter__(self):
            for batch in super().__iter__():
                asked.append(batch)
                yield batch

    loader = DataLoader(stream, batch_sampler=Batches(range(len(stream)), 400 // accumulation_steps, False))
    check_loader(loader, accumulation_steps=accumulation_steps)
    assert len(asked) == 256


@pytest.mark.parametrize(("ends", "place"), [([0, 5, 9], 0), ([3, 5, 21], 21), ([21], 21)])
def test_ends_of_documents_outside_the_text_are_named(ends, place):
    with pytest.raises(ValueError, match=f"document_end holds {place}, .* at 1 to 20 in this text"):
        TokenStream(list(range(20)), 4, 2, document_end=ends)
    TokenStream(list(range(20)), 4, 2, document_end=[1, 5, 20])
