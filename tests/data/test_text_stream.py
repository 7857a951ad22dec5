"""Documents packed into rows as they come: nothing lost, nothing held back, resumed and shared out bit for bit."""

import copy
import json

import accelerate
import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainingArguments

from txl_hf import TextStream, TransfoXLTokenizer, TransfoXLTrainer

S, G = 8, 4
TEXTS = [f"document {number}\n" + f"line {number * 7 % 11} of it\n" * (number * 5 % 13) for number in range(60)]


@pytest.fixture(scope="module")
def tokenizer():
    return TransfoXLTokenizer.train_from_iterator(TEXTS, mode="whitespace", line_ends=True)


class StopAt(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def rows_of(items: list[dict], rows: int) -> list[list[int]]:
    """The labels of each row, one after the other, after its first token."""
    tokens: list[list[int]] = [[] for _ in range(rows)]
    for number, item in enumerate(items):
        row = tokens[number % rows]
        row += item["input_ids"][:1].tolist() if not row else []
        row += [label for label in item["shift_labels"].tolist() if label != -100]
    return tokens


def equal(items: list[dict], others: list[dict]) -> bool:
    return len(items) == len(others) and all(
        torch.equal(one[name], other[name]) for one, other in zip(items, others, strict=True) for name in one
    )


def test_every_document_is_whole_in_one_row_and_none_is_lost(tokenizer):
    items = list(TextStream(TEXTS, tokenizer, S, G, keep_remainder=True))
    rows = [f" {tokenizer.decode(row)} " for row in rows_of(items, G)]
    for text in TEXTS:
        assert sum(f" {tokenizer.decode(tokenizer(text)['input_ids'])} " in row for row in rows) == 1
    assert sum(len(row.split()) for row in rows) == sum(len(tokenizer(text)["input_ids"]) for text in TEXTS)
    # Documents of a row in their order, and rows of about one length.
    for row in rows:
        numbers = [
            int(word) for before, word in zip(row.split(), row.split()[1:], strict=False) if before == "document"
        ]
        assert numbers == sorted(numbers)
    lengths = [len(row.split()) for row in rows]
    assert max(lengths) - min(lengths) < 2 * max(len(text.split()) for text in TEXTS)


def test_segments_of_a_row_are_contiguous(tokenizer):
    items = list(TextStream(TEXTS, tokenizer, S, G))
    assert len(items) % G == 0 and len(items) > 20 * G
    for item, following in zip(items, items[G:], strict=False):
        assert torch.equal(item["input_ids"][1:], item["shift_labels"][:-1])
        assert item["shift_labels"][-1] == following["input_ids"][0]
        assert item["input_ids"].dtype == torch.int64 and len(item["input_ids"]) == S


def test_no_more_is_read_than_the_next_step_needs(tokenizer):
    read = 0

    def texts():
        nonlocal read
        for text in TEXTS * 1000:
            read += 1
            yield text

    stream = iter(TextStream(texts, tokenizer, S, G))
    for step in range(20):
        for _ in range(G):
            next(stream)
        assert sum(len(TEXTS[number % 60].split()) for number in range(read)) < (step + 1) * G * (S + 1) + 8 * 60


@pytest.mark.parametrize("step", [1, 17, 40])
def test_resumed_bit_for_bit_by_skipping(tokenizer, step):
    """Ninety steps read the sixty documents more than twice."""

    def loader():
        return DataLoader(TextStream(TEXTS, tokenizer, S, G, epochs=None), batch_size=G)

    expected = [batch for _, batch in zip(range(90), loader(), strict=False)]
    resumed = accelerate.skip_first_batches(loader(), step)
    assert equal([batch for _, batch in zip(range(90 - step), resumed, strict=False)], expected[step:])


def test_every_epoch_begins_anew_and_has_its_own_order(tokenizer):
    texts = Dataset.from_dict({"body": TEXTS}).to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=10)
    twice = TextStream(texts, tokenizer, S, 1, column="body", epochs=2, keep_remainder=True)
    [row] = rows_of(list(twice), 1)
    assert rows_of(list(twice), 1) == [row], "the second iteration is the first"
    once = TextStream(texts, tokenizer, S, 1, column="body", keep_remainder=True)
    epochs = []
    for epoch in (0, 1):
        once.set_epoch(epoch)
        epochs += rows_of(list(once), 1)
    assert row == epochs[0] + epochs[1]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1])


class OrderOfItsEpoch:
    epoch = 0

    def set_epoch(self, epoch: int):
        self.epoch = epoch

    def __iter__(self):
        for number in range(len(TEXTS)):
            yield TEXTS[(7 * number + self.epoch) % len(TEXTS)]


def test_a_copy_begins_anew_and_leaves_the_stream_where_it_is(tokenizer):
    """As an evaluation of the training stream reads it, also before the training that goes on from a checkpoint."""
    stream = TextStream(OrderOfItsEpoch(), tokenizer, S, G)
    first = list(stream)
    stream.set_epoch(3)
    items = list(stream)
    reading, found = iter(stream), []
    for _ in items:
        found.append(next(reading))
        if len(found) == 2 * G:
            read = stream.documents_read
            assert equal(list(copy.copy(stream)), first)
            assert stream.documents_read == read and read["epoch"] == 3
    assert equal(found, items)


def test_a_document_ends_where_a_tokenizer_can_say_so():
    characters = TransfoXLTokenizer.train_from_iterator(["abc"], mode="characters", eos_token="<eos>")
    items = list(TextStream(["ab", "c"], characters, 2, 1, keep_remainder=True))
    assert characters.convert_ids_to_tokens(rows_of(items, 1)[0]) == ["a", "b", "<eos>", "c", "<eos>"]


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ("one text", {}, "texts is one str"),
        (iter(TEXTS), {}, "read once only"),
        ([], {}, "no document"),
        ([{"body": "a"}], {}, "document 0 of texts has no text in the column 'text': choose one of body"),
        (["a", 5], {}, "document 1 of texts is no string or mapping, but int"),
        (TEXTS, {"epochs": 0}, "epochs=0"),
    ],
)
def test_what_cannot_be_read_is_said(tokenizer, texts, options, message):
    with pytest.raises(ValueError, match=message):
        list(TextStream(texts, tokenizer, S, G, **options))


def test_what_is_left_behind_the_last_whole_step_is_told(tokenizer, caplog):
    """Of texts of very different lengths that is most: the rows of the short ones end first."""
    texts = [" ".join(TEXTS), *TEXTS[9:12]]
    whole = list(TextStream(texts, tokenizer, S, G, keep_remainder=True))
    stream = TextStream(texts, tokenizer, S, G)
    items = list(stream)
    tokens = [sum(map(len, rows_of(read, G))) for read in (whole, items)]
    assert stream.dropped_tokens == tokens[0] - tokens[1] > tokens[0] / 2
    assert f"a TextStream leaves out {stream.dropped_tokens:,} tokens" in caplog.text
    caplog.clear()
    again = TextStream(texts, tokenizer, S, G, keep_remainder=True)
    assert len(list(again)) == len(whole) and again.dropped_tokens == 0 and not caplog.text


@pytest.mark.parametrize(
    ("texts", "keep_remainder", "found"),
    [(["a " * 20], False, "shortest has 0 tokens, and 9 are"), (["a"] * G, True, "longest has 1 tokens, and 2 are")],
    ids=["steps", "remainder"],
)
def test_texts_that_fill_no_step_are_refused(texts, keep_remainder, found):
    tokenizer = TransfoXLTokenizer.from_symbols(["a"], mode="whitespace")
    with pytest.raises(ValueError, match=f"fills no step: of batch_size={G} rows the {found}"):
        list(TextStream(texts, tokenizer, S, G, keep_remainder=keep_remainder))


@pytest.mark.parametrize("eos_token", [None, "<eos>"])
@pytest.mark.parametrize("texts", [["", ""], ["", " "]], ids=["empty", "spaces"])
@pytest.mark.parametrize("options", [{}, {"epochs": None}], ids=["once", "again-and-again"])
def test_documents_without_a_token_are_no_text(options, texts, eos_token):
    """Nor are ends of documents alone; a row that is given none would wait for ever."""
    tokenizer = TransfoXLTokenizer.from_symbols(
        ["a", *filter(None, [eos_token])], mode="whitespace", eos_token=eos_token
    )
    with pytest.raises(ValueError, match="texts has no text: the tokenizer makes no token of its 2 document"):
        next(iter(TextStream(texts, tokenizer, S, G, **options)))


@pytest.mark.parametrize(
    "others", [TEXTS[:1] + TEXTS[:0:-1], TEXTS[:3], [*TEXTS[:3], "another", *TEXTS[4:]]], ids=["order", "fewer", "one"]
)
def test_texts_that_begin_alike_are_refused_when_they_are_read(tokenizer, others):
    """As a training resumes, which reads from the beginning and skips batches."""
    stream = TextStream(TEXTS, tokenizer, S, G, epochs=None)
    for _ in zip(range(2 * G), stream, strict=False):
        pass
    resumed = TextStream(others, tokenizer, S, G, epochs=None)
    resumed.expect(json.loads(json.dumps(stream.documents_read)))
    with pytest.raises(ValueError, match="the state is of other texts: the first . documents of epoch 0 are not"):
        for _ in zip(range(200), resumed, strict=False):
            pass


@pytest.mark.parametrize("same", [True, False], ids=["same", "other"])
def test_texts_that_were_read_to_their_end_are_compared_too(tokenizer, same):
    """The rows still hold their tokens when the last document has been read."""
    texts = ["\n".join(TEXTS[start::G]) for start in range(G)]
    stream = TextStream(texts, tokenizer, S, G, keep_remainder=True)
    items = list(stream)
    reading = iter(stream)
    for _ in range(len(items) - G):
        next(reading)
    assert stream.documents_read["documents"] == G and stream.documents_read["epoch"] == 0
    resumed = TextStream(texts if same else [*texts[:-1], texts[-1] + " more"], tokenizer, S, G, keep_remainder=True)
    resumed.expect(json.loads(json.dumps(stream.documents_read)))
    if same:
        assert equal(list(resumed), items)
        return
    with pytest.raises(ValueError, match="the state is of other texts: the first . documents of epoch 0 are not"):
        list(resumed)
    assert list(resumed), "what a refusal has compared is not expected again"


def test_two_iterators_read_apart(tokenizer):
    stream = TextStream(TEXTS, tokenizer, S, G)
    first, second = iter(stream), iter(stream)
    items = [next(first) for _ in range(G + 1)]
    assert equal([*items, *first], list(second))


def test_workers_are_refused(tokenizer):
    """Of what one has read no checkpoint could say anything, and `datasets` shuffles otherwise in one."""
    with pytest.raises(ValueError, match="set num_workers to 0"):
        list(DataLoader(TextStream(TEXTS, tokenizer, S, G), batch_size=G, num_workers=1))


def test_what_was_read_is_expected_once(tokenizer):
    """Where the documents are the same, a stream reads on, over the ends of epochs."""
    stream = TextStream(TEXTS, tokenizer, S, G, epochs=None)
    items = [item for _, item in zip(range(90 * G), stream, strict=False)]
    assert stream.documents_read["epoch"] == 1
    again = TextStream(TEXTS, tokenizer, S, G, epochs=None)
    again.expect(stream.documents_read)
    assert equal([item for _, item in zip(range(90 * G), again, strict=False)], items)
    assert again.documents_read == stream.documents_read


def test_other_texts_are_not_gone_on_with(tokenizer, make_model, tmp_path):
    arguments = TrainingArguments(
        tmp_path, max_steps=2, per_device_train_batch_size=G, save_steps=1, report_to="none", use_cpu=True
    )
    model = make_model(vocab_size=len(tokenizer), cutoffs=[], div_val=1)
    TransfoXLTrainer(model, arguments, train_dataset=TextStream(TEXTS, tokenizer, S, G)).train()
    other = TextStream(TEXTS[1:], tokenizer, S, G)
    with pytest.raises(ValueError, match="resume with the same text"):
        TransfoXLTrainer(model, arguments, train_dataset=other).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-1")
        )


def test_trainer_trains_with_memory_and_resumes(tokenizer, make_model, tmp_path):
    """The losses of a run that was interrupted are those of one that was not."""
    losses = {}
    for name, stops in {"whole": [6], "resumed": [3, 6]}.items():
        model = make_model(vocab_size=len(tokenizer), cutoffs=[], div_val=1)
        for stop in stops:
            arguments = TrainingArguments(
                tmp_path / name,
                max_steps=6,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                learning_rate=1e-2,
                save_steps=3,
                logging_steps=1,
                report_to="none",
                use_cpu=True,
                disable_tqdm=True,
            )
            texts = Dataset.from_dict({"text": TEXTS}).to_iterable_dataset(num_shards=2)
            trainer = TransfoXLTrainer(model, arguments, train_dataset=TextStream(texts, tokenizer, S, G))
            if stop < 6:
                trainer.add_callback(StopAt(stop))
            trainer.train(resume_from_checkpoint=True if stop == 6 and len(stops) > 1 else None)
        losses[name] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses["whole"]) == 6 and losses["resumed"] == losses["whole"]
