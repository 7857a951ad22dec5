"""Documents that begin inside a segment: each has the losses, the memory and the gradients that it has alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DataCollatorWithFlattening, DynamicCache, StaticCache, Trainer, TrainingArguments

from models import BACKENDS, SMALL
from txl_hf import (
    MemoryLengths,
    TransfoXLConfig,
    TransfoXLForCausalLM,
    TransfoXLForTokenClassification,
)
from txl_hf.kernels.static_cache import StaticMemoryCache
from txl_hf.memories import memory_of
from txl_hf.transfo_xl.attention_transfo_xl import BACKENDS as ALL_BACKENDS
from txl_hf.transfo_xl.attention_transfo_xl import AttentionInputs, keep_documents_apart
from txl_hf.transfo_xl.cache_transfo_xl import MemoryCache

ENCODINGS = {
    "plain": {},
    "tied-biases": {"untie_r": False},
    "clamp": {"clamp_len": 3},
    "decay": {"decay_len": 3, "clamp_len": 4},
    "same_length": {"same_length": True},
    "pre_lnorm": {"pre_lnorm": True},
    "shaw": {"attn_type": 1},
    "shaw-clamp": {"attn_type": 1, "clamp_len": 4},
    "no-memory": {"mem_len": 0},
}


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def resets_of(documents, length):
    """(1, length) bool for documents of so many tokens in a row."""
    starts = torch.tensor(documents).cumsum(0)
    resets = torch.zeros(1, length, dtype=torch.bool)
    resets[0, starts[starts < length]] = True
    return resets


def read(model, ids, targets, resets, lengths, cached=False, **options):
    """The losses of each token of a row, read in segments of these lengths, and the memory after it."""
    past, losses, start = {}, [], 0
    for length in lengths:
        part = slice(start, start + length)
        outputs = model(
            ids[:, part],
            shift_labels=targets[:, part],
            resets=None if resets is None else resets[:, part],
            use_cache=cached,
            **past,
            **options,
        )
        past = {"past_key_values": outputs.past_key_values} if cached else memory_of(outputs)
        losses.append(outputs.losses)
        start += length
    return torch.cat(losses, 1)[0], past


def cut(total, lengths):
    """Segment lengths that end with a text of `total` tokens."""
    ends, reached = [], 0
    for length in lengths:
        ends.append(min(length, total - reached))
        reached += ends[-1]
        if reached == total:
            return ends
    return [*ends, total - reached]


def alone(model, ids, targets, documents, lengths, **options):
    """The result of `read` for each document by itself, cut where the segments of the whole row end."""
    losses, start, memory = [], 0, {}
    borders = torch.tensor(lengths).cumsum(0).tolist()
    for document in documents:
        stop = start + document
        inside = [start, *(border for border in borders if start < border < stop), stop]
        parts = [b - a for a, b in zip(inside, inside[1:], strict=False)]
        found, memory = read(model, ids[:, start:stop], targets[:, start:stop], None, parts, **options)
        losses.append(found)
        start = stop
    return torch.cat(losses), memory


@given(
    documents=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    encoding=st.sampled_from(sorted(ENCODINGS)),
    cached=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_documents_in_a_row_are_as_they_are_alone(documents, lengths, encoding, cached):
    """Wherever documents and segments end; the memory after the row is that of the last document."""
    torch.manual_seed(0)
    model = TransfoXLForCausalLM(TransfoXLConfig(**(SMALL | ENCODINGS[encoding]))).eval()
    total = sum(documents)
    lengths, ids, targets = cut(total, lengths), torch.randint(60, (1, total)), torch.randint(60, (1, total))
    with torch.no_grad():
        losses, past = read(model, ids, targets, resets_of(documents, total), lengths, cached)
        expected, memory = alone(model, ids, targets, documents, lengths)
    close(losses, expected, 2e-5)
    if memory and not cached:
        real = past["mems"][0].shape[1] if past["mems_mask"] is None else int(past["mems_mask"].sum())
        for states, expected_states in zip(past["mems"], memory["mems"], strict=True):
            assert states.shape[1] == min(6, total) and expected_states.shape[1] == real
            close(states[:, states.shape[1] - real :], expected_states, 2e-5)


@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_those_of_each_document_alone(make_model, make_ids, backend, encoding):
    documents, lengths = [4, 1, 7, 2, 6], [9, 11]
    model, ids, targets = make_model(backend, **encoding), make_ids(1, 20), make_ids(1, 20, seed=1)
    gradients = []
    for losses, _ in (
        read(model, ids, targets, resets_of(documents, 20), lengths),
        alone(model, ids, targets, documents, lengths),
    ):
        model.zero_grad()
        losses.sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for found, expected in zip(*gradients, strict=True):
        close(found, expected, 2e-5)


@torch.no_grad()
def test_large_segments_take_the_tiles_of_the_cpu(make_model, make_ids):
    documents, lengths = [100, 250, 1, 300, 149], [400, 400]
    model, ids, targets = make_model(mem_len=400), make_ids(1, 800), make_ids(1, 800, seed=1)
    losses, _ = read(model, ids, targets, resets_of(documents, 800), lengths)
    close(losses, alone(model, ids, targets, documents, lengths)[0], 2e-5)


@torch.no_grad()
def test_rows_begin_documents_of_their_own_beside_padding(make_model, make_ids):
    model, ids = make_model(), make_ids(3, 8)
    memory = memory_of(model(make_ids(3, 4, seed=1)))
    mask = torch.ones(3, 8, dtype=torch.long)
    mask[0, 6:] = 0
    resets = torch.zeros(3, 8, dtype=torch.bool)
    resets[1, 5], resets[2, 0] = True, True
    found = model(ids, **memory, attention_mask=mask, resets=resets)
    row = lambda i: {"mems": tuple(states[i : i + 1] for states in memory["mems"])}  # noqa: E731
    close(found.logits[:1, :6], model(ids[:1, :6], **row(0)).logits)
    close(found.logits[1:2, :5], model(ids[1:2, :5], **row(1)).logits)
    close(found.logits[1:2, 5:], model(ids[1:2, 5:]).logits)
    close(found.logits[2:], model(ids[2:]).logits)
    # What a row that begins afresh remembered may hold anything.
    for states in memory["mems"]:
        states[2] = torch.nan
    broken = memory | {"mems_mask": torch.ones(3, 4, dtype=torch.bool)}
    again = model(ids, **broken, attention_mask=mask, resets=resets).logits
    close(again[mask.bool()], found.logits[mask.bool()])


@pytest.mark.parametrize("changes", [{}, {"same_length": True}, {"attn_type": 1}, {"gating": "gru"}], ids=str)
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_what_a_document_cannot_compute_stays_in_it(make_model, make_ids, backend, garbage, changes):
    """A stream that overflowed goes on with its next document, now and later; of the one before, all is NaN."""
    model, ids, later = make_model(backend, **changes), make_ids(2, 8), make_ids(2, 4, seed=1)
    memory = memory_of(model(make_ids(2, 4, seed=2)))
    clean = model(ids[1:], mems=tuple(states[1:] for states in memory["mems"]))
    for states in memory["mems"]:
        states[0, 1:] = garbage
    resets = torch.zeros(2, 8, dtype=torch.bool)
    resets[0, 3] = True
    found = model(ids, **memory, resets=resets)
    fresh = model(ids[:1, 3:])
    assert found.logits[0, :3].isnan().all()
    close(found.logits[:1, 3:], fresh.logits)
    close(found.logits[1:], clean.logits)
    found = model(later, **memory_of(found)).logits
    close(found[:1], model(later[:1], **memory_of(fresh)).logits)
    close(found[1:], model(later[1:], **memory_of(clean)).logits)


@pytest.mark.parametrize(
    "make_cache",
    [MemoryCache, lambda config: DynamicCache(), lambda config: StaticCache(config, 32), StaticMemoryCache],
    ids=["MemoryCache", "DynamicCache", "StaticCache", "StaticMemoryCache"],
)
@pytest.mark.parametrize("begins", [0, 1])
@torch.no_grad()
def test_what_a_document_cannot_compute_leaves_a_cache_with_it(make_model, make_ids, begins, make_cache):
    """As with mems: from the next call on, where nothing begins, only the mask of the cache tells of it."""
    model, first, second, third = make_model(), make_ids(2, 4), make_ids(2, 3, seed=1), make_ids(2, 1, seed=2)
    cache = make_cache(model.config)
    model(first, past_key_values=cache)
    for layer in cache.layers:
        layer.keys[0, :, -2:], layer.values[0, :, -2:] = torch.nan, torch.inf
    resets = torch.zeros(2, 3, dtype=torch.bool)
    resets[0, begins] = True
    found = model(second, past_key_values=cache, resets=resets).logits
    fresh, other = model(second[:1, begins:]), model(second[1:], mems=model(first[1:]).mems)
    assert found[0, :begins].isnan().all()
    close(found[:1, begins:], fresh.logits)
    close(found[1:], other.logits)
    for _ in range(3):
        found = model(third, past_key_values=cache).logits
        fresh, other = (model(third[i : i + 1], mems=row.mems) for i, row in enumerate((fresh, other)))
        close(found, torch.cat([fresh.logits, other.logits]))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_on_a_cpu_keys_are_copied_only_where_one_is_not_finite(device):
    """Elsewhere nobody may ask."""
    key, value = torch.randn(2, 2, 7, 4, device=device), torch.randn(2, 2, 7, 4, device=device)
    first_key = torch.full((2, 3), 5, device=device)
    inputs = AttentionInputs(key[:, :, :3], key, value, scaling=1.0, first_key=first_key)
    kept, broken = keep_documents_apart(inputs)
    assert (kept is inputs and broken is None) == (device == "cpu")
    for number in (torch.nan, torch.inf, -torch.inf):
        value[1, 0, 2, 3] = number
        kept, broken = keep_documents_apart(inputs)
        assert broken.shape == (2, 1, 3, 1)
        if device == "cpu":
            assert not kept.value[1, :, 2].any() and not broken.any()
            assert torch.equal(kept.value[0], value[0])


@torch.no_grad()
def test_a_cache_keeps_its_room_where_documents_begin(make_model, make_ids):
    """Keys that a document hides are cleared in place; moving them would make the next token copy all keys."""
    model, cache = make_model(mem_len=9), MemoryCache(make_model(mem_len=9).config)
    model(make_ids(2, 4), past_key_values=cache)
    buffers = [layer._buffers[0].data_ptr() for layer in cache.layers]
    for begins in (True, False, True):
        resets = torch.tensor([[False], [begins]])
        model(make_ids(2, 1), past_key_values=cache, resets=resets)
    assert [layer._buffers[0].data_ptr() for layer in cache.layers] == buffers
    assert all(layer._room == 9 - 3 for layer in cache.layers)


@torch.no_grad()
def test_a_vector_that_is_not_finite_stays_in_its_document(make_model, make_ids):
    """As a sensor that failed in one episode gives it; attention that is asked for is NaN where nothing is right."""
    model, ids = make_model(), make_ids(1, 9)
    frames = model.get_input_embeddings()(ids)
    frames[0, 4] = torch.nan
    resets = resets_of([3, 3, 3], 9)
    found = model(inputs_embeds=frames, resets=resets, output_attentions=True)
    close(found.logits[:, :4], model(ids[:, :4], resets=resets[:, :4]).logits)
    assert found.logits[0, 4:6].isnan().all() and found.attentions[1][0, :, 4:6].isnan().all()
    close(found.logits[:, 6:], model(ids[:, 6:]).logits)


@pytest.mark.parametrize("backend", ["sdpa", "txl_tiles"])
def test_queries_that_are_not_finite_change_none_before_them(make_model, make_ids, backend):
    """The shift reads the beginning of the next query's scores, which is hidden, whatever is there."""
    model, ids = make_model(backend, n_layer=3), make_ids(1, 9)
    frames = model.get_input_embeddings()(ids).detach()
    frames[0, 4] = torch.inf
    found = model(inputs_embeds=frames, resets=resets_of([4, 5], 9)).logits
    close(found[:, :4], model(ids[:, :4]).logits)
    assert found[:, 4:].isnan().all()


@torch.no_grad()
def test_without_a_beginning_nothing_is_different(make_model, make_ids, monkeypatch):
    model, ids, seen = make_model(), make_ids(2, 6), []
    attend = ALL_BACKENDS["auto"]
    monkeypatch.setitem(
        ALL_BACKENDS, "auto", replace(attend, run=lambda inputs: seen.append(inputs) or attend.run(inputs))
    )
    expected = model(ids)
    found = model(ids, resets=torch.zeros(2, 6, dtype=torch.bool))
    assert torch.equal(found.logits, expected.logits) and found.mems_mask is None
    assert all(inputs.first_key is None and inputs.key_mask is None for inputs in seen)


@torch.no_grad()
def test_tokens_that_are_read_again_tell_again_where_they_begin(make_model, make_ids):
    """With ext_len the end of a segment stays out of the memory, and so do the documents that begin there."""
    ids, targets = make_ids(1, 14), make_ids(1, 14, seed=1)
    resets = resets_of([7, 7], 14)
    model, plain = make_model(mem_len=30), make_model(mem_len=30)
    expected, _ = read(plain, ids, targets, resets, [14])
    lengths = MemoryLengths(ext_len=3)
    first = model(ids[:, :8], resets=resets[:, :8], lengths=lengths)
    assert first.mems[0].shape[1] == 5 and first.mems_mask is None
    second = model(ids[:, 5:], shift_labels=targets[:, 5:], resets=resets[:, 5:], **memory_of(first), lengths=lengths)
    close(second.losses[0], expected[5:])
    # All of a short segment is read again: nothing has been remembered or forgotten.
    third = model(ids[:, 11:], resets=resets_of([1, 2], 3), **memory_of(second), lengths=lengths)
    torch.testing.assert_close(third.mems, second.mems, atol=0, rtol=0, equal_nan=True)
    assert torch.equal(third.mems_mask, second.mems_mask)


@pytest.mark.parametrize("names", [["position_ids"], ["seq_idx"], ["cu_seq_lens_q", "cu_seq_lens_k"], None])
@torch.no_grad()
def test_what_the_flattening_collator_writes_are_resets(make_model, make_ids, names):
    model, texts = make_model(), [make_ids(1, length, seed=length)[0].tolist() for length in (5, 1, 7)]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True, return_tensors="pt")
    batch = dict(collate([{"input_ids": text} for text in texts]))
    told = (
        {name: batch[name] for name in names} if names else {name: batch[name] for name in batch if name != "labels"}
    )
    found = model(**(told | {"input_ids": batch["input_ids"]})).logits
    expected = torch.cat([model(torch.tensor([text])).logits for text in texts], 1)
    close(found, expected)


@pytest.mark.parametrize("told", [{"position_ids": [0, 1, 2, 0, 1, 2, 3, 4]}, {"seq_idx": [0] * 3 + [1] * 5}])
@pytest.mark.parametrize("head", [TransfoXLForCausalLM, TransfoXLForTokenClassification], ids=lambda h: h.__name__)
def test_trainer_keeps_the_columns_that_tell_where_documents_begin(make_model, make_ids, tmp_path, head, told):
    model, ids = make_model(model_class=head), make_ids(2, 8)
    labels = ids % 2
    rows = [{"input_ids": ids[i].tolist(), "labels": labels[i].tolist(), **told} for i in range(2)]
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True)
    loss = Trainer(model, arguments, eval_dataset=Dataset.from_list(rows)).evaluate()["eval_loss"]
    assert loss == pytest.approx(model(ids, labels=labels, resets=resets_of([3, 5], 8).expand(2, -1)).loss.item())
    assert loss != pytest.approx(model(ids, labels=labels).loss.item())


@torch.no_grad()
def test_a_cache_that_never_forgets_begins_documents_too(make_model, make_ids):
    model, ids, targets = make_model(), make_ids(1, 12), make_ids(1, 12, seed=1)
    documents, lengths = [5, 3, 4], [4, 1, 1, 1, 5]
    expected, _ = alone(model, ids, targets, documents, lengths)
    cache, start, losses = DynamicCache(), 0, []
    for length in lengths:
        part = slice(start, start + length)
        resets = resets_of(documents, 12)[:, part]
        outputs = model(ids[:, part], shift_labels=targets[:, part], resets=resets, past_key_values=cache)
        losses.append(outputs.losses)
        start += length
    close(torch.cat(losses, 1)[0], expected)


def test_generate_goes_on_with_the_last_document_of_a_prompt(make_model, make_ids):
    model, ids = make_model(eos_token_id=None, pad_token_id=60), make_ids(1, 9)
    options = {"max_new_tokens": 8, "do_sample": False}
    text = model.generate(ids, resets=resets_of([4, 5], 9), **options)
    assert torch.equal(text[:, 4:], model.generate(ids[:, 4:], **options))


BAD_RESETS = {
    "of another shape": ({}, torch.ones(2, 4).bool(), r"resets are \(2, 4\).*\(2, 5\) bool"),
    "of a longer text": ({}, torch.ones(2, 6).bool(), r"resets are \(2, 6\).*\(2, 5\) bool"),
    "of one row": ({}, torch.ones(5).bool(), r"resets are \(5,\).*\(2, 5\) bool"),
    "of another type": ({}, torch.ones(2, 5), "resets are .*float32.* bool"),
    "of integers": ({}, torch.ones(2, 5).long(), "resets are .*int64.* bool"),
    "that are a list": ({}, [[True] * 5] * 2, "resets must be a torch.Tensor, not builtins.list"),
    "of NumPy": ({}, np.ones((2, 5), bool), "resets must be a torch.Tensor, not numpy.ndarray"),
    "absolute positions": ({"attn_type": 2, "mem_len": 0}, torch.ones(2, 5).bool(), "resets .*attn_type=2"),
    "learned absolute positions": ({"attn_type": 3, "mem_len": 0}, torch.ones(2, 5).bool(), "resets .*attn_type=3"),
    "zeros before the text": ({"initial_memory": "zeros"}, torch.ones(2, 5).bool(), "initial_memory='zeros'.*'empty'"),
}


@pytest.mark.parametrize("changes, resets, message", BAD_RESETS.values(), ids=BAD_RESETS)
def test_bad_resets(make_model, make_ids, changes, resets, message):
    with pytest.raises(ValueError, match=message):
        make_model(**changes)(make_ids(2, 5), resets=resets)


@pytest.mark.parametrize("changes", [{"attn_type": 2, "mem_len": 0}, {"initial_memory": "zeros"}], ids=str)
@torch.no_grad()
def test_what_cannot_begin_documents_can_say_that_none_begins(make_model, make_ids, changes):
    """An error names the argument that begins a document, if it is not `resets`."""
    model, ids, none = make_model(**changes), make_ids(1, 5), torch.zeros(1, 5, dtype=torch.bool)
    expected = model(ids).logits
    assert torch.equal(model(ids, resets=none, position_ids=torch.arange(5)[None]).logits, expected)
    with pytest.raises(ValueError, match="^resets and seq_idx tell of documents"):
        model(ids, resets=none, seq_idx=torch.tensor([[0, 0, 1, 1, 1]]))
