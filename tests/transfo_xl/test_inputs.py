"""Keyword arguments: what nothing reads is an error, what transformers hands to every model is none."""

import inspect

import pytest
import torch
from torch.nn import functional as F
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from txl_hf import (
    MemoryLengths,
    TransfoXLForCausalLM,
    TransfoXLForSequenceClassification,
    TransfoXLForTokenClassification,
    TransfoXLModel,
)
from txl_hf.transfo_xl.masks_transfo_xl import packed_starts

HEADS = [
    TransfoXLModel,
    TransfoXLForCausalLM,
    TransfoXLForSequenceClassification,
    TransfoXLForTokenClassification,
]


@pytest.mark.parametrize("model_class", HEADS)
@pytest.mark.parametrize("name", ["mem", "position_id", "attention_masks", "hidden_states"])
def test_a_keyword_that_nothing_reads_is_named(make_model, make_ids, model_class, name):
    model, ids = make_model(model_class=model_class), make_ids(1, 4)
    with pytest.raises(TypeError, match=f"nothing reads: {name}$"):
        model(ids, **{name: ids})
    # Nothing is lost where nothing was asked for.
    model(ids, **{name: None})


@pytest.mark.parametrize("model_class", [TransfoXLModel, TransfoXLForSequenceClassification])
def test_a_keyword_of_another_head_is_named(make_model, make_ids, model_class):
    with pytest.raises(TypeError, match="nothing reads: shift_labels$"):
        make_model(model_class=model_class)(make_ids(1, 4), shift_labels=make_ids(1, 4))


@pytest.mark.parametrize("model_class", HEADS)
def test_what_transformers_hands_over_passes(make_model, make_ids, model_class):
    model, ids = make_model("eager", model_class=model_class), make_ids(1, 4)
    with torch.no_grad():
        expected = model(ids)[0]
        outputs = model(
            ids,
            position_ids=torch.arange(7, 11)[None],
            cache_position=torch.arange(4),
            token_type_ids=torch.zeros_like(ids),
            cu_seq_lens_q=torch.tensor([0, 4], dtype=torch.int32),
            cu_seq_lens_k=torch.tensor([0, 4], dtype=torch.int32),
            max_length_q=4,
            max_length_k=4,
            seq_idx=torch.zeros(1, 4, dtype=torch.int32),
            is_causal=True,
            output_attentions=True,
            output_hidden_states=True,
            return_dict=True,
        )
    assert torch.equal(outputs[0], expected) and len(outputs.attentions) == 2 and len(outputs.hidden_states) == 3


def test_bidirectional_attention_is_refused(make_model, make_ids):
    with pytest.raises(ValueError, match="is_causal=False"):
        make_model()(make_ids(1, 4), is_causal=False)


# --- packed batches --------------------------------------------------------------------------------------------------


def test_where_documents_begin_is_read_from_what_the_flattening_collator_writes():
    texts = [list(range(5)), [7], list(range(3)), list(range(4))]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True, return_tensors="pt")
    batch = collate([{"input_ids": text} for text in texts])
    expected = torch.zeros(1, 13, dtype=torch.bool)
    expected[0, [5, 6, 9]] = True
    names = [name for name in inspect.signature(packed_starts).parameters if name in batch]
    assert len(names) == 4
    for name in names:
        starts = packed_starts((1, 13), torch.device("cpu"), **{name: batch[name]})
        assert torch.equal(starts, expected), name


def test_positions_of_padding_say_nothing():
    """As everyone counts them under a mask: cumsum - 1, and anything where there is padding."""
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    assert not packed_starts((2, 6), torch.device("cpu"), mask, position_ids=positions).any()
    assert packed_starts((2, 6), torch.device("cpu"), position_ids=positions).any()


@pytest.mark.parametrize(
    ("mask", "positions", "starts"),
    [
        ([1, 1, 1, 0, 1, 1, 1, 1], [0, 1, 2, 0, 0, 1, 2, 3], [4]),
        ([1, 1, 1, 0, 1, 1, 1, 1], [0, 1, 2, 3, 0, 1, 2, 3], [4]),
        ([1, 1, 0, 0, 1, 1, 0, 1], [5, 6, 1, 1, 0, 1, 1, 0], [4, 7]),
        ([1, 0, 1, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 2, 0, 1], [2, 6]),
        ([0, 0, 1, 1, 0, 1, 1, 1], [7, 7, 0, 1, 1, 2, 3, 4], []),
        ([0, 0, 1, 1, 0, 1, 1, 1], [0, 1, 2, 3, 4, 5, 6, 7], []),
        ([1, 1, 1, 0, 1, 1, 1, 1], [0, 1, 2, 0, 3, 4, 5, 6], []),
    ],
    ids=["at 0", "counted", "twice", "documents of a token", "cumsum", "counted within a document", "at 0 within one"],
)
def test_positions_may_restart_behind_padding(mask, positions, starts):
    found = packed_starts((1, 8), torch.device("cpu"), torch.tensor([mask]), position_ids=torch.tensor([positions]))
    assert found[0].nonzero().flatten().tolist() == starts


@pytest.mark.parametrize("shape", [(2, 8), (1, 5), (8,)], ids=str)
def test_a_mask_of_another_shape_is_named_beside_positions(make_model, make_ids, shape):
    with pytest.raises(ValueError, match="attention_mask is .*needs"):
        make_model()(make_ids(1, 8), attention_mask=torch.ones(shape).long(), position_ids=torch.arange(8)[None])


@torch.no_grad()
def test_a_document_behind_padding_is_as_it_is_alone(make_model, make_ids):
    model, ids = make_model(mem_len=20), make_ids(1, 8)
    mask, positions = torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1]]), torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3]])
    found = model(ids, attention_mask=mask, position_ids=positions).logits[:, 4:]
    torch.testing.assert_close(found, model(ids[:, 4:]).logits, atol=1e-5, rtol=1e-5)


BAD_DOCUMENTS = {
    "positions that jump": ({"position_ids": torch.tensor([[0, 1, 5, 6]])}, "position_ids leave out positions"),
    "positions of another length": (
        {"position_ids": torch.arange(5)},
        r"position_ids are \(5,\).*\(2, 4\) or \(1, 4\)",
    ),
    "positions that are no integers": ({"position_ids": torch.arange(4.0)}, "position_ids are .*float32"),
    "seq_idx of three rows": ({"seq_idx": torch.zeros(3, 4, dtype=torch.int)}, r"seq_idx are \(3, 4\)"),
    "ends of documents in two rows": ({"cu_seq_lens_q": torch.tensor([0, 4])}, "cu_seq_lens_q .* 2 rows.*single row"),
}


@pytest.mark.parametrize("keywords, message", BAD_DOCUMENTS.values(), ids=BAD_DOCUMENTS)
def test_bad_documents(make_model, make_ids, keywords, message):
    with pytest.raises(ValueError, match=message):
        make_model()(make_ids(2, 4), **keywords)


ENDS = r"cu_seq_lens_[qk] is \[.* for 8 tokens, but must begin with 0"
BAD_ROWS = {
    "ends of documents that do not begin with 0": ({"cu_seq_lens_q": torch.tensor([2, 8])}, ENDS),
    "ends of documents that fall": ({"cu_seq_lens_k": torch.tensor([0, 5, 3, 8])}, ENDS),
    "ends of documents before the row": ({"cu_seq_lens_q": torch.tensor([0, -3, 8])}, ENDS),
    "ends of documents behind the row": ({"cu_seq_lens_q": torch.tensor([0, 3, 9])}, ENDS),
    "no ends of documents": ({"cu_seq_lens_q": torch.tensor([], dtype=torch.int)}, ENDS),
    "a mask of the numbers of documents": (
        {"attention_mask": torch.tensor([[1, 1, 2, 2, 2, 3, 3, 0]])},
        "attention_mask holds 3.*resets or seq_idx",
    ),
    "a mask below 0": ({"attention_mask": torch.tensor([[-1, 1, 1, 1, 1, 1, 1, 1]])}, "attention_mask holds -1"),
}


@pytest.mark.parametrize("keywords, message", BAD_ROWS.values(), ids=BAD_ROWS)
def test_bad_documents_of_one_row(make_model, make_ids, keywords, message):
    with pytest.raises(ValueError, match=message):
        make_model()(make_ids(1, 8), **keywords)


def test_what_is_behind_the_last_document_is_apart(make_model, make_ids):
    """As collators leave it that pad a packed row to a multiple of so many tokens."""
    found = packed_starts((1, 8), torch.device("cpu"), cu_seq_lens_q=torch.tensor([0, 3, 6]))
    assert found.nonzero().tolist() == [[0, 3], [0, 6]]


@pytest.mark.parametrize(
    ("mask", "documents", "ends", "starts"),
    [
        ([1, 1, 1, 1, 0, 0], [0, 0, 0, 0, -1, -1], [0, 4], []),
        ([0, 0, 1, 1, 1, 1], [-1, -1, 0, 0, 0, 0], [0, 2, 6], []),
        ([1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1], [0, 2, 6], [4]),
        ([1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1], [0, 4, 6], [4]),
        ([1, 1, 0, 1, 1, 1], [0, 0, -1, 1, 2, 2], [0, 2, 3, 4, 6], [3, 4]),
    ],
    ids=["right", "left", "of the next", "of the one before", "of none"],
)
def test_padding_is_no_document(mask, documents, ends, starts):
    """It would take the memory of a row that goes on; and what begins in it begins at the next real token."""
    mask, cpu = torch.tensor([mask]), torch.device("cpu")
    for given in ({"seq_idx": torch.tensor([documents])}, {"cu_seq_lens_q": torch.tensor(ends)}):
        assert packed_starts((1, 6), cpu, mask, **given)[0].nonzero().flatten().tolist() == starts


@torch.no_grad()
@pytest.mark.parametrize("told_by", ["seq_idx", "cu_seq_lens_q"])
def test_a_row_padded_on_the_right_goes_on_from_what_is_real(make_model, make_ids, told_by):
    model, mask = make_model(mem_len=8), torch.tensor([[1, 1, 1, 1, 0, 0]])
    given = {"seq_idx": torch.tensor([[0, 0, 0, 0, -1, -1]]), "cu_seq_lens_q": torch.tensor([0, 4])}
    output = model(make_ids(1, 6), attention_mask=mask, **{told_by: given[told_by]})
    assert torch.equal(output.mems_mask, mask.bool())


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, *(pytest.param(other, marks=pytest.mark.slow) for other in (torch.int32, torch.int16))],
    ids=str,
)
@pytest.mark.parametrize(
    "changes",
    [{}, *(pytest.param(c, marks=pytest.mark.slow) for c in ({"cutoffs": [], "div_val": 1}, {"output_logits": True}))],
    ids=str,
)
@pytest.mark.parametrize("name", ["labels", pytest.param("shift_labels", marks=pytest.mark.slow)])
def test_labels_may_be_any_integers(make_model, make_ids, dtype, changes, name):
    model, ids = make_model(n_layer=1, **changes), make_ids(2, 5)
    expected = model(ids, **{name: ids}).losses
    assert torch.equal(model(ids, **{name: ids.to(dtype)}).losses, expected)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")(ids, **{name: ids.to(dtype)}).losses
    torch.testing.assert_close(compiled, expected, atol=1e-5, rtol=1e-5)


# --- generate and Trainer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [3, torch.tensor([3, 4]), (3, 4)], ids=str)
def test_lengths_that_are_none_are_named(make_model, make_ids, lengths):
    """As a column of a data set may be called."""
    model, ids = make_model(), make_ids(2, 4)
    for call in (model, model.transformer, model.generate):
        with pytest.raises(
            ValueError, match=f"must be a txl_hf.MemoryLengths, not a {type(lengths).__name__}; a column"
        ):
            call(ids, lengths=lengths)


def test_generate_takes_lengths_of_its_own(make_model, make_ids):
    model, ids = make_model(eos_token_id=None), make_ids(2, 9)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 60}
    for mem_len in (0, 3, 9):
        configured = make_model(mem_len=mem_len, eos_token_id=None)
        text = model.generate(ids, lengths=MemoryLengths(mem_len=mem_len), **options)
        assert torch.equal(text, configured.generate(ids, **options))
    with pytest.raises(ValueError, match="mem"):
        model.generate(ids, mem=ids, **options)


def test_accumulated_batches_of_a_classifier_weigh_as_one(make_model, tmp_path):
    """`Trainer` leaves the division to models that take the number of items."""
    items = [{"input_ids": torch.arange(3) + i, "labels": i % 2} for i in range(4)]
    norms = []
    for rows, steps in ((4, 1), (1, 4)):
        arguments = TrainingArguments(
            output_dir=tmp_path,
            max_steps=1,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=steps,
            logging_steps=1,
            max_grad_norm=1e9,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        model = make_model(model_class=TransfoXLForSequenceClassification, pad_token_id=60)
        trainer = Trainer(model, arguments, train_dataset=items)
        trainer.train()
        norms.append(trainer.state.log_history[0]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_the_number_of_items_divides_the_loss_of_a_classifier(make_model, make_ids):
    model = make_model(model_class=TransfoXLForSequenceClassification, pad_token_id=60)
    ids, labels = make_ids(3, 5), torch.tensor([0, 1, 1])
    outputs = model(ids, labels=labels, num_items_in_batch=6)
    expected = F.cross_entropy(outputs.logits, labels, reduction="sum") / 6
    torch.testing.assert_close(outputs.loss, expected)


def test_ignored_labels_of_a_classifier_count_nowhere(make_model, make_ids):
    model = make_model(model_class=TransfoXLForSequenceClassification, pad_token_id=60)
    ids, labels = make_ids(3, 5), torch.tensor([-100, 1, -100])
    expected = F.cross_entropy(model(ids).logits[1:2], labels[1:2])
    for given in ({}, {"num_items_in_batch": 1}, {"num_items_in_batch": torch.tensor(1)}):
        torch.testing.assert_close(model(ids, labels=labels, **given).loss, expected)
    nothing = model(ids, labels=torch.full_like(labels, -100)).loss
    nothing.backward()
    assert nothing == 0 and all(parameter.grad.eq(0).all() for parameter in model.parameters())


@pytest.mark.parametrize("nothing", [0, torch.tensor(0)], ids=["number", "tensor"])
def test_a_step_without_any_label_has_a_loss_of_zero(make_model, make_ids, nothing):
    """As `Trainer` counts them."""
    heads = (TransfoXLForCausalLM, TransfoXLForTokenClassification, TransfoXLForSequenceClassification)
    for head in heads:
        model, ids = make_model(model_class=head, pad_token_id=60), make_ids(3, 5)
        labels = torch.full((3,) if head is heads[-1] else (3, 5), -100)
        loss = model(ids, labels=labels, num_items_in_batch=nothing).loss
        loss.backward()
        assert loss == 0, head


def test_the_number_of_items_divides_the_loss_of_several_labels(make_model, make_ids):
    model = make_model(model_class=TransfoXLForSequenceClassification, pad_token_id=60)
    ids, labels = make_ids(3, 5), torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    outputs = model(ids, labels=labels, num_items_in_batch=12)
    expected = F.binary_cross_entropy_with_logits(outputs.logits, labels) / 2
    torch.testing.assert_close(outputs.loss, expected)


def test_a_number_that_is_not_counted_is_a_number_all_the_same(make_model, make_ids):
    """As in the evaluation of any regression by `Trainer`, which takes -100.0 for no label where it counts."""
    model = make_model(model_class=TransfoXLForSequenceClassification, pad_token_id=60, num_labels=1)
    ids, labels = make_ids(4, 5), torch.tensor([-100.0, 1.0, 2.0, 3.0])
    outputs = model(ids, labels=labels, num_items_in_batch=3)
    torch.testing.assert_close(outputs.loss, F.mse_loss(outputs.logits[:, 0], labels))
