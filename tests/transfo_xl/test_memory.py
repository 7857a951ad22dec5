"""Segment-level recurrence: mems, past_key_values, masks, padding and every way of cutting a text."""

import contextlib
import copy
import pickle
import re
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

import oracle
from models import COMPILERS, refusal, small_config
from txl_hf import MemoryLengths, TransfoXLForCausalLM
from txl_hf.kernels import operators
from txl_hf.kernels.static_cache import StaticMemoryCache
from txl_hf.transfo_xl.attention_transfo_xl import (
    BACKENDS as ALL_BACKENDS,
)
from txl_hf.transfo_xl.attention_transfo_xl import (
    AttentionInputs,
    attend,
)
from txl_hf.transfo_xl.cache_transfo_xl import (
    CACHE_NAME,
    MemoryCache,
    decoding_state_of,
    text_length,
)
from txl_hf.transfo_xl.positions_transfo_xl import sinusoids_of_distances

VARIANTS = {
    "plain": {},
    "zeros": {"initial_memory": "zeros"},
    "pre_lnorm": {"pre_lnorm": True, "initial_memory": "zeros"},
    "same_length": {"same_length": True},
    "same_length-besides-self": {"same_length": True, "same_length_counts_self": False},
    "clamp": {"clamp_len": 3},
    "decay": {"decay_len": 4},
    "decay-clamp": {"decay_len": 3, "clamp_len": 5},
    "tied-biases": {"untie_r": False},
    "shaw": {"attn_type": 1},
    "shaw-clamp-zeros": {"attn_type": 1, "clamp_len": 4, "initial_memory": "zeros"},
    "wide-heads": {"n_head": 3, "d_head": 7},
    "gated": {"gating": "gru", "gate_bias": 0.5},
}
# "auto" is one of the others.
BACKENDS = [name for name in ALL_BACKENDS if name != "auto"]


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Every backend that can run on a CPU; the others are skipped for the reason that they give themselves."""
    query = torch.zeros(1, 2, 5, 8, requires_grad=True)
    inputs = AttentionInputs(query, query, query, scaling=1.0, rel_key=query[0])
    if reason := refusal(request.param, inputs):
        pytest.skip(f"{request.param}: {reason}")
    return request.param


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS)
def variant(request):
    return request.param


def segments(ids, length):
    return ids.split(length, dim=1)


def memory_of(outputs):
    """Arguments that pass the memory to the next segment; none at first."""
    return {} if outputs is None else {"mems": outputs.mems, "mems_mask": outputs.mems_mask}


def rows_of(memory, rows):
    mask = memory["mems_mask"]
    return {
        "mems": tuple(states[rows] for states in memory["mems"]),
        "mems_mask": None if mask is None else mask[rows],
    }


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@torch.no_grad()
def test_model_is_the_papers_equations(make_model, make_ids, variant, backend):
    model = make_model(backend, **variant)
    reference = oracle.ReferenceModel(model)
    mems = reference_mems = None
    for ids in segments(make_ids(2, 14), 5):
        output = model(ids, mems=mems)
        expected, reference_mems = reference(ids, reference_mems)
        close(output.logits.double(), expected, 2e-5)
        mems = output.mems
        for states, reference_states in zip(mems, reference_mems, strict=True):
            close(states.double(), reference_states, 2e-5)


@pytest.mark.parametrize(
    "changes", [{}, {"pre_lnorm": True}, {"clamp_len": 2, "div_val": 1}, {"gating": "gru"}], ids=str
)
@pytest.mark.parametrize("same_length", [False, True], ids=["all", "same_length"])
@pytest.mark.parametrize("attn_type", [2, 3], ids=["vaswani", "al-rfou"])
@torch.no_grad()
def test_baselines_without_recurrence_are_their_equations(
    make_model, make_ids, attn_type, same_length, changes, backend
):
    model = make_model(backend, attn_type=attn_type, mem_len=0, same_length=same_length, **changes)
    for length in (1, 4, 5):
        ids = make_ids(2, length)
        output = model(ids)
        close(output.logits.double(), oracle.ReferenceModel(model)(ids)[0], 2e-5)
        assert output.mems is None


@torch.no_grad()
def test_projected_memory_equals_mems_at_every_step(make_model, make_ids, variant, backend):
    model = make_model(backend, **variant)
    mems = cache = None
    for ids in make_ids(2, 23).split([5, 1, 1, 4, 1, 9, 1, 1], dim=1):
        with_mems = model(ids, mems=mems)
        cached = model(ids, past_key_values=cache, use_cache=True)
        close(cached.logits, with_mems.logits)
        mems, cache = with_mems.mems, cached.past_key_values
        assert cached.mems is None and with_mems.past_key_values is None
        assert all(layer.keys.shape[2] <= model.config.mem_len for layer in cache.layers)


@pytest.mark.parametrize(
    "make_cache",
    [lambda c: DynamicCache(), lambda c: StaticCache(config=c, max_cache_len=7), StaticMemoryCache],
    ids=["full", "static", "ring"],
)
@torch.no_grad()
def test_other_caches_of_transformers_equal_mems(make_model, make_ids, variant, make_cache):
    """A cache that never forgets is cut to the memory; a static one starts with masked slots; a ring goes round."""
    model = make_model(**variant)
    mems, cache = None, make_cache(model.config)
    for ids in make_ids(2, 33).split([5, 1, 1, 4, 1, 9, *[1] * 9, 3], dim=1):
        with_mems = model(ids, mems=mems)
        close(model(ids, past_key_values=cache).logits, with_mems.logits)
        mems = with_mems.mems


@torch.no_grad()
def test_a_cache_of_nothing_but_keys_and_values_goes_on(make_model, make_ids):
    """As another program may have filled it."""
    model = make_model()
    first, more = make_ids(2, 5).split([4, 1], dim=1)
    cache = model(first, use_cache=True).past_key_values
    bare = DynamicCache([(layer.keys.clone(), layer.values.clone()) for layer in cache.layers])
    expected = model(more, past_key_values=cache).logits
    assert torch.equal(model(more, past_key_values=bare).logits, expected)


@torch.no_grad()
def test_cache_starts_from_mems(make_model, make_ids, variant):
    model = make_model(**variant)
    first, *rest = segments(make_ids(2, 16), 4)
    mems = model(first).mems
    cache = None
    for step, ids in enumerate(rest):
        expected = model(ids, mems=mems)
        actual = model(ids, mems=mems if step == 0 else None, past_key_values=cache, use_cache=True)
        close(actual.logits, expected.logits)
        mems, cache = expected.mems, actual.past_key_values


@torch.no_grad()
def test_a_static_cache_is_filled_up_to_the_memory_and_no_further(make_model, make_ids):
    """With masked states before the mems that it starts from: a compiled step has one number of keys."""
    model = make_model("eager")
    first, more, last = make_ids(2, 8).split([4, 3, 1], dim=1)
    mems, cache = model(first).mems, StaticMemoryCache(model.config)
    expected = model(more, mems=mems)
    actual = model(more, mems=mems, past_key_values=cache, output_attentions=True)
    assert {attention.shape[-1] for attention in actual.attentions} == {model.config.mem_len + 3}
    close(actual.logits, expected.logits)
    close(model(last, past_key_values=cache).logits, model(last, mems=expected.mems).logits)


@pytest.mark.parametrize("make_cache", [lambda c: StaticCache(config=c, max_cache_len=7), StaticMemoryCache])
@torch.no_grad()
def test_attentions_of_a_static_cache_are_in_order_of_time(make_model, make_ids, make_cache):
    """At any step, whether or not those before it handed them out too."""
    model = make_model("eager")
    caches = make_cache(model.config), MemoryCache(model.config)
    for step, ids in enumerate(make_ids(2, 19).split([8, *[1] * 8, 2, 1], dim=1)):
        found, expected = (
            model(ids, past_key_values=cache, output_attentions=step not in (3, 4, 7)) for cache in caches
        )
        close(found.logits, expected.logits)
        for attention, other in zip(found.attentions or (), expected.attentions or (), strict=True):
            close(attention[..., -other.shape[-1] :], other)
            assert not attention[..., : -other.shape[-1]].any()


@torch.no_grad()
def test_a_cache_may_have_more_layers_than_have_run(make_model, make_ids):
    """As where a draft is written by the first layers alone: the others hold nothing that a mask could clear."""
    model = make_model(n_layer=2)
    deeper = DynamicCache(config=make_model(n_layer=3).config)
    first, more = make_ids(2, 5).split([4, 1], dim=1)
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    cache = model(first, use_cache=True).past_key_values
    model(first, past_key_values=deeper)
    expected = model(more, past_key_values=cache, attention_mask=mask).logits
    assert len(deeper.layers) == 3 and not deeper.layers[2].is_initialized
    assert torch.equal(model(more, past_key_values=deeper, attention_mask=mask).logits, expected)


@given(
    cuts=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    shape=st.sampled_from(["plain", "pre_lnorm", "clamp", "shaw", "tied-biases"]),
    cached=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_any_segmentation_gives_the_same_logits_while_memory_covers_it(cuts, shape, cached):
    torch.manual_seed(0)
    changes = VARIANTS[shape] | {"mem_len": sum(cuts), "initial_memory": "empty"}
    model = TransfoXLForCausalLM(small_config(**changes)).eval()
    ids = torch.randint(61, (2, sum(cuts)))
    with torch.no_grad():
        whole = model(ids).logits
        mems, cache, parts = None, None, []
        for part in ids.split(cuts, dim=1):
            output = model(part, past_key_values=cache, use_cache=True) if cached else model(part, mems=mems)
            mems, cache = output.mems, output.past_key_values
            parts.append(output.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-5, rtol=2e-5)


@torch.no_grad()
def test_same_length_makes_segmentation_irrelevant_beyond_the_memory(make_model, make_ids):
    """Every query sees the same keys wherever the text is cut, in the first layer; so one layer is exact."""
    model = make_model(same_length=True, n_layer=1)
    ids = make_ids(2, 24)
    results = []
    for length in (1, 3, 8):
        mems, parts = None, []
        for part in segments(ids, length):
            output = model(part, mems=mems)
            mems = output.mems
            parts.append(output.logits)
        results.append(torch.cat(parts, 1))
    close(results[0], results[1])
    close(results[0], results[2])


@pytest.mark.parametrize("counts_self, expected", [(True, 6), (False, 7)])
@torch.no_grad()
def test_same_length_keeps_so_many_keys(make_model, make_ids, counts_self, expected):
    """Quirk 2: mem_len keys, the query's own among them, or mem_len besides it."""
    model = make_model(
        "eager", same_length=True, same_length_counts_self=counts_self, initial_memory="zeros", init_std=0.1
    )
    attentions = model(make_ids(1, 9), output_attentions=True).attentions
    assert ((attentions[0] > 0).sum(-1) == expected).all()


@torch.no_grad()
def test_initial_memory_is_attended_to_or_not(make_model, make_ids):
    """Quirk 1: zero states take a share of the softmax, and an empty memory has no keys."""
    ids = make_ids(1, 3)
    zeros = make_model("eager", initial_memory="zeros")(ids, output_attentions=True)
    empty = make_model("eager", initial_memory="empty")(ids, output_attentions=True)
    assert zeros.attentions[0].shape == (1, 2, 3, 6 + 3) and (zeros.attentions[0][..., :6] > 0).all()
    assert empty.attentions[0].shape == (1, 2, 3, 3)
    assert zeros.mems[0].shape == (1, 6, 16) and empty.mems[0].shape == (1, 3, 16)


@pytest.mark.parametrize("attn_type", [0, 1])
@torch.no_grad()
def test_ext_len_stays_out_of_the_memory(make_model, make_ids, attn_type):
    """Quirk 9: with ext_len the next segment repeats the last positions."""
    ids = make_ids(2, 15)
    plain = make_model(attn_type=attn_type, mem_len=30, max_klen=40)
    extended = make_model(attn_type=attn_type, mem_len=30, max_klen=40, ext_len=3)
    whole = plain(ids).logits
    first = extended(ids[:, :8])
    assert first.mems[0].shape[1] == 5
    second = extended(ids[:, 5:], mems=first.mems)
    close(second.logits, whole[:, 5:])
    assert second.mems[0].shape[1] == 12


# --- padding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padded_rows_equal_unpadded_ones(make_model, make_ids, variant, backend, side):
    model = make_model(backend, **variant | {"initial_memory": "empty"})
    ids, length, pad = make_ids(2, 5), 5, 3
    alone = model(ids).logits
    padding = torch.full((2, pad), 60)
    parts = [padding, ids] if side == "left" else [ids, padding]
    mask = torch.cat([torch.full_like(part, part is ids) for part in parts], 1)
    padded = model(torch.cat(parts, 1), attention_mask=mask)
    real = slice(pad, None) if side == "left" else slice(0, length)
    close(padded.logits[:, real], alone)


@pytest.mark.parametrize("label", ["labels", "shift_labels"])
@pytest.mark.parametrize("changes", [{}, {"cutoffs": [], "div_val": 1}], ids=str)
def test_what_padding_would_predict_is_no_loss(make_model, make_ids, changes, label):
    """A row's losses are those that it has alone, wherever it is padded: its first token has nothing before it."""
    model, ids = make_model(**changes), make_ids(3, 7)
    mask = torch.ones_like(ids)
    mask[0, :3], mask[1, :1], mask[2, 5:] = 0, 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    if label == "shift_labels":
        labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    found = model(ids, attention_mask=mask, **{label: labels})
    expected = []
    for row, real in zip(ids, mask.bool(), strict=True):
        alone = model(row[real][None], labels=row[real][None])
        losses = torch.zeros(found.losses.shape[1])
        begins = int(real.int().argmax())
        losses[begins : begins + alone.losses.shape[1]] = alone.losses[0]
        expected.append(losses)
    expected = torch.stack(expected)
    torch.testing.assert_close(found.losses, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.loss, expected.sum() / (3 + 5 + 4), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("how", ["segment", "memory+segment", "whole", "none"])
@torch.no_grad()
def test_padding_never_leaks_from_the_memory(make_model, make_ids, backend, how):
    """Padding of the first segment stays hidden, whether or not later masks hide it."""
    model = make_model(backend, mem_len=4)
    real = make_ids(1, 11, seed=1)
    other = make_ids(1, 11, seed=2)
    ids = torch.cat([torch.cat([torch.full((1, 2), 60), real[:, :9]], 1), other])
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    alone, batch = None, None
    seen = 0
    for length in (3, 4, 2, 2):
        segment = ids[:, seen : seen + length]
        given = {
            "segment": mask[:, seen : seen + length],
            "memory+segment": mask[:, max(0, seen - 4) : seen + length],
            "whole": mask[:, : seen + length],
            "none": mask[:, :length] if seen == 0 else None,
        }[how]
        batch = model(segment, **memory_of(batch), attention_mask=given)
        start = max(0, seen - 2)
        alone = model(real[:, start : seen + length - 2], **memory_of(alone))
        close(batch.logits[:1, -alone.logits.shape[1] :], alone.logits)
        seen += length


@pytest.mark.parametrize("how", ["segment", "memory+segment", "whole", "none"])
@pytest.mark.parametrize(
    "make_cache",
    [lambda c: None, lambda c: DynamicCache(), lambda c: StaticCache(config=c, max_cache_len=7), StaticMemoryCache],
    ids=["ours", "full", "static", "ring"],
)
@pytest.mark.parametrize("name", ["plain", "zeros", "shaw"])
@torch.no_grad()
def test_padding_never_leaks_from_a_cache(make_model, make_ids, name, make_cache, how):
    """A cache remembers what was masked as mems do, whether or not later masks say so."""
    model = make_model(**VARIANTS[name])
    ids = make_ids(2, 15)
    mask = torch.ones_like(ids)
    mask[0, :2], mask[1, 5] = 0, 0
    memory, cache, seen = {}, make_cache(model.config), 0
    for length in (4, 3, 1, 1, 4, 2):
        segment, segment_mask = ids[:, seen : seen + length], mask[:, seen : seen + length]
        memory_length = min(6, seen)
        given = {
            "segment": segment_mask,
            "memory+segment": torch.cat([torch.ones(2, memory_length, dtype=torch.long), segment_mask], 1),
            "whole": mask[:, : seen + length],
            "none": segment_mask if not segment_mask.all() else None,
        }[how]
        expected = model(segment, **memory, attention_mask=segment_mask)
        actual = model(segment, past_key_values=cache, attention_mask=given, use_cache=True)
        close(actual.logits[segment_mask.bool()], expected.logits[segment_mask.bool()])
        memory, cache, seen = memory_of(expected), actual.past_key_values, seen + length


@pytest.mark.parametrize(
    ("hidden", "make_cache"),
    [
        pytest.param("filler", lambda c: StaticCache(config=c, max_cache_len=7), marks=pytest.mark.slow),
        pytest.param("filler", StaticMemoryCache, marks=pytest.mark.slow),
        pytest.param("padding", StaticMemoryCache, marks=pytest.mark.slow),
        pytest.param("whole text", StaticMemoryCache, marks=pytest.mark.slow),
        pytest.param("a document", StaticMemoryCache, marks=pytest.mark.slow),
        ("a token", StaticMemoryCache),
    ],
)
@torch.no_grad()
@pytest.mark.parametrize("backend", COMPILERS)
def test_a_compiled_step_knows_what_is_hidden_in_a_static_cache(make_model, make_ids, hidden, make_cache, backend):
    """The filler of a short prompt, earlier padding, what `resets` forgot, a row that has ended: now and later."""
    torch.compiler.reset()
    model = make_model(n_layer=1)
    prompt = make_ids(2, 3 if hidden in ("filler", "whole text") else 8)
    mask = torch.ones_like(prompt)
    if hidden in ("padding", "whole text"):
        mask[0, : prompt.shape[1] - 2] = 0
    caches = make_cache(model.config), MemoryCache(model.config)
    for cache in caches:
        model(prompt, past_key_values=cache, attention_mask=None if mask.all() else mask)
    compiled = torch.compile(model.forward, backend=backend, fullgraph=True)
    for step in range(5):
        ids, given = make_ids(2, 1, seed=step), {}
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        if hidden == "whole text":
            given["attention_mask"] = mask
        elif hidden == "a token":
            given["attention_mask"] = torch.tensor([[int(step not in (1, 2))], [1]])
        elif hidden == "a document":
            given["resets"] = torch.tensor([[step == 2], [False]])
        found, expected = (
            call(ids, past_key_values=c, **given) for call, c in zip((compiled, model), caches, strict=True)
        )
        real = given.get("attention_mask", mask)[:, -1:].bool()
        close(found.logits[real], expected.logits[real])
        if step == 3:
            # A step that is not compiled goes on from what the compiled ones remember.
            for cache in caches:
                model(ids, past_key_values=cache)
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)


@pytest.mark.parametrize(
    "make_cache",
    [
        MemoryCache,
        lambda config: DynamicCache(),
        lambda config: DynamicCache(config=config),
        lambda config: StaticCache(config, 10),
        StaticMemoryCache,
    ],
    ids=["ours", "full", "sliding", "static", "ring"],
)
@pytest.mark.parametrize("copied", [False, True])
@torch.no_grad()
def test_rows_of_a_cache_are_picked_with_their_masks(make_model, make_ids, copied, make_cache):
    """Reordered, selected or repeated, every row keeps the padding that it started from."""
    model = make_model(mem_len=9)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
    memory = memory_of(model(make_ids(3, 4, seed=1), attention_mask=mask))
    ids, more = make_ids(3, 2, seed=2), make_ids(6, 1, seed=3)
    after = memory_of(model(ids, **memory))
    picks = {
        "reorder_cache": (torch.tensor([2, 0, 1]), [2, 0, 1]),
        "batch_select_indices": (torch.tensor([2, 0]), [2, 0]),
        "batch_repeat_interleave": (2, [0, 0, 1, 1, 2, 2]),
    }
    for method, (argument, rows) in picks.items():
        cache = make_cache(model.config)
        model(ids, **memory, past_key_values=cache)
        if type(cache) is StaticCache and method != "reorder_cache":
            # All that its layers can.
            method, argument = "reorder_cache", torch.tensor(rows)
        if copied:
            cache = pickle.loads(pickle.dumps(copy.deepcopy(cache)))
        getattr(cache, method)(argument)
        expected = model(more[: len(rows)], **rows_of(after, rows))
        close(model(more[: len(rows)], past_key_values=cache).logits, expected.logits)


@pytest.mark.parametrize("name", ["keys", "values"])
@torch.no_grad()
def test_keys_or_values_that_are_set_are_those_that_the_next_token_sees(make_model, make_ids, name):
    """Of the two one alone: what lies in the buffer, with room behind it, is not what was set."""
    model = make_model()
    cache = MemoryCache(model.config)
    for seed in range(3):
        model(make_ids(2, 2, seed=seed), past_key_values=cache)
    layer = cache.layers[0]
    other = {"keys": "values", "values": "keys"}[name]
    kept = getattr(layer, other).clone()
    setattr(layer, name, torch.full_like(getattr(layer, name), 7.0))
    found = dict(zip(("keys", "values"), layer.update(*[kept[:, :, :1]] * 2), strict=True))
    assert (found[name][:, :, :-1] == 7).all() and torch.equal(found[other][:, :, :-1], kept)
    assert getattr(layer, name).shape[2] == min(kept.shape[2] + 1, model.config.mem_len)


@pytest.mark.parametrize("made_in", [contextlib.nullcontext, torch.inference_mode])
def test_a_cache_reads_weights_that_an_actor_was_sent(make_model, make_ids, made_in):
    """In inference mode a tensor counts no versions, and old distances would be scored with new weights."""
    sent = make_model(seed=1).state_dict()
    with made_in():
        model = make_model()
    with torch.inference_mode():
        cache = MemoryCache(model.config)
        model(make_ids(2, 4), past_key_values=cache)
        model.load_state_dict(sent)
        anew = copy.deepcopy(cache)
        anew.decoding_state.distances = None
        found, expected = (model(make_ids(2, 1, seed=1), past_key_values=read).logits for read in (cache, anew))
    torch.testing.assert_close(found, expected)


class DerivedCache(DynamicCache):
    """As other programs derive theirs."""


@pytest.mark.parametrize(
    ("copied", "compiles"),
    [(False, False), (True, False), *(pytest.param(copied, True, marks=pytest.mark.slow) for copied in (False, True))],
)
@torch.no_grad()
def test_rows_of_any_cache_are_picked_with_their_masks(make_model, make_ids, copied, compiles):
    """Of a derived class, and where the call was compiled. What picks them keeps no cache alive."""
    torch.compiler.reset()
    model, ids, more = make_model(n_layer=1), make_ids(2, 4), make_ids(2, 1, seed=1)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    expected = model(more, **rows_of(memory_of(model(ids, attention_mask=mask)), [1, 0])).logits
    read = torch.compile(model, backend="eager") if compiles else model
    cache = DerivedCache(config=model.config)
    read(ids, attention_mask=mask, past_key_values=cache)
    if copied:
        cache = pickle.loads(pickle.dumps(copy.deepcopy(cache)))
    cache.reorder_cache(torch.tensor([1, 0]))
    close(read(more, past_key_values=cache).logits, expected)
    there = weakref.ref(cache)
    del cache
    # What was compiled may hold it.
    assert compiles or there() is None


@torch.no_grad()
def test_rows_that_were_picked_without_their_masks_are_refused(make_model, make_ids):
    model = make_model()
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    cache = model(make_ids(2, 4), attention_mask=mask, use_cache=True).past_key_values
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:1], layer.values[:1]
    with pytest.raises(
        ValueError, match="past_key_values hold a memory of 2 rows, but this batch has 1.*reorder_cache"
    ):
        model(make_ids(1, 1), past_key_values=cache)


def len_of(memory, model):
    """How many states precede the next segment."""
    mems = memory.get("mems") or model.init_mems(1)
    return mems[0].shape[1]


@given(
    steps=st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from(["nothing", "segment", "all"]), st.booleans()),
        min_size=2,
        max_size=6,
    ),
    shape=st.sampled_from(["plain", "zeros", "same_length", "pre_lnorm", "shaw-clamp-zeros"]),
    seed=st.integers(0, 100),
)
@settings(max_examples=40, deadline=None)
def test_mems_and_a_cache_agree_whatever_is_masked_and_picked(steps, shape, seed):
    """They keep what was masked in different ways; the rows may be picked anew before any segment.

    Only a cache of a model with `pre_lnorm` has no zero states to put in front of a text that begins later: an error.
    """
    torch.manual_seed(seed)
    model = TransfoXLForCausalLM(small_config(**VARIANTS[shape])).eval()
    memory, cache = {}, None
    with torch.no_grad():
        for layer in model.transformer.layers:
            # The key of a zero state is zero no more.
            layer.self_attn_layer_norm.bias.normal_()
        for length, masked, picks in steps:
            if picks and cache is not None:
                rows = torch.randint(3, (3,))
                memory = rows_of(memory, rows)
                cache.reorder_cache(rows)
            m = len_of(memory, model)
            widths = {"nothing": 0, "segment": length, "all": m + length}
            mask = None
            if width := widths[masked]:
                # Some texts begin behind padding, or only in the segment.
                begins = torch.randint(-width, m + 1 if masked == "all" else width, (3, 1))
                mask = (torch.rand(3, width) < 0.7) & (torch.arange(width) >= begins)
            ids = torch.randint(61, (3, length))
            with_mems = model(ids, **memory, attention_mask=mask)
            try:
                cached = model(ids, past_key_values=cache, attention_mask=mask, use_cache=True)
            except ValueError as error:
                assert shape == "pre_lnorm" and "begins a text behind keys" in str(error)
                return
            real = torch.ones(3, length, dtype=torch.bool) if mask is None else mask[:, -length:]
            close(cached.logits[real], with_mems.logits[real], 2e-5)
            memory, cache = memory_of(with_mems), cached.past_key_values


@torch.no_grad()
def test_reset_forgets_the_text_with_its_mask(make_model, make_ids):
    model, ids = make_model(), make_ids(2, 4)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    cache = model(ids, mems=model(ids).mems, attention_mask=mask, use_cache=True).past_key_values
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(model(ids, past_key_values=cache).logits, model(ids).logits)


@torch.no_grad()
def test_mask_of_the_whole_text_while_initial_zeros_remain(make_model, make_ids):
    """The memory is longer than the text then, and the mask shorter than the keys."""
    model = make_model(initial_memory="zeros", mem_len=9)
    ids = make_ids(2, 14)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    memory, seen = {}, 0
    for length in (4, 3, 1, 6):
        segment = ids[:, seen : seen + length]
        expected = model(segment, **memory, attention_mask=mask[:, seen : seen + length])
        close(model(segment, **memory, attention_mask=mask[:, : seen + length]).logits, expected.logits)
        memory, seen = memory_of(expected), seen + length
    with pytest.raises(ValueError, match=r"attention_mask is \(2, 2\).*\(2, n\) with n from 3 to 12 or more"):
        model(ids[:, :3], **memory, attention_mask=torch.ones(2, 2))


def test_mask_that_hides_nothing_is_dropped_on_cpu(make_model, make_ids, monkeypatch):
    """So that attention hides the future alone; a mask that hides something stays."""
    model, seen = make_model(), []
    monkeypatch.setattr(
        "txl_hf.transfo_xl.modeling_transfo_xl.attend",
        lambda inputs, *others: seen.append(inputs.key_mask) or attend(inputs, *others),
    )
    ids, mask = make_ids(2, 4), torch.ones(2, 4)
    mems = model(ids, attention_mask=mask).mems
    model(ids, mems=mems)
    assert all(key_mask is None for key_mask in seen)
    mask[0, 0] = 0
    model(ids, **memory_of(model(ids, attention_mask=mask)))
    assert torch.equal(seen[-1], torch.tensor([[False] + [True] * 7, [True] * 8]))


@torch.no_grad()
def test_masked_memory_starts_a_row_afresh_for_good(make_model, make_ids):
    """A document boundary or an episode's end: say it once, with zeros over the memory."""
    model = make_model()
    before, first, second = make_ids(2, 4, 1), make_ids(2, 3, 2), make_ids(2, 2, 3)
    mems = model(before).mems
    mask = torch.ones(2, 4 + 3, dtype=torch.long)
    mask[0, :4] = 0
    output = model(first, mems=mems, attention_mask=mask)
    close(output.logits[:1], model(first[:1]).logits)
    close(output.logits[1:], model(first[1:], mems=tuple(m[1:] for m in mems)).logits)
    fresh = model(first[:1])
    close(
        model(second, **memory_of(output)).logits[:1],
        model(second[:1], mems=fresh.mems).logits,
    )


@torch.no_grad()
def test_garbage_in_padding_changes_nothing(make_model, make_ids, variant, backend):
    model = make_model(backend, **variant)
    ids = make_ids(3, 8)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    mask[1, 2:5] = 0
    embeds = model.get_input_embeddings()(ids)
    noisy = embeds.masked_fill(mask[..., None] == 0, 1e4)
    first = model(inputs_embeds=embeds, attention_mask=mask)
    second = model(inputs_embeds=noisy, attention_mask=mask)
    keep = mask.bool()
    close(second.logits[keep], first.logits[keep])
    more = make_ids(3, 4, seed=5)
    close(model(more, **memory_of(second)).logits, model(more, **memory_of(first)).logits)


def test_padding_gets_no_gradient(make_model, make_ids, backend):
    model = make_model(backend)
    ids = make_ids(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    labels = ids.clone()
    labels[0, :4] = -100  # the first real token, too, would be predicted from padding
    model(inputs_embeds=embeds, attention_mask=mask, labels=labels).loss.backward()
    assert torch.isfinite(embeds.grad).all()
    assert (embeds.grad[0, :3] == 0).all() and (embeds.grad[0, 3:5] != 0).any()


@given(pads=st.lists(st.integers(0, 5), min_size=2, max_size=4), mem_len=st.integers(1, 8), cached=st.booleans())
@settings(max_examples=30, deadline=None)
def test_any_left_padding_changes_nothing(pads, mem_len, cached):
    torch.manual_seed(0)
    model = TransfoXLForCausalLM(small_config(mem_len=mem_len)).eval()
    total = 10
    ids = torch.randint(61, (len(pads), total))
    mask = torch.arange(total) >= torch.tensor(pads)[:, None]
    with torch.no_grad():
        batch, past = [], {}
        for start, end in ((0, 6), (6, 7), (7, 10)):
            output = model(ids[:, start:end], attention_mask=mask[:, :end], use_cache=cached, **past)
            past = {"past_key_values": output.past_key_values} if cached else memory_of(output)
            batch.append(output.logits)
        batch = torch.cat(batch, 1)
        for row, pad in enumerate(pads):
            past, alone = {}, []
            for start, end in ((pad, 6), (6, 7), (7, 10)):
                output = model(ids[row : row + 1, start:end], use_cache=cached, **past)
                past = {"past_key_values": output.past_key_values} if cached else memory_of(output)
                alone.append(output.logits)
            torch.testing.assert_close(batch[row, pad:], torch.cat(alone, 1)[0], atol=2e-5, rtol=2e-5)


# --- the contract's details ------------------------------------------------------------------------------------------


@torch.no_grad()
def test_mems_are_the_inputs_of_the_layers(make_model, make_ids):
    model = make_model()
    output = model(make_ids(2, 9), output_hidden_states=True)
    assert len(output.mems) == 2 and len(output.hidden_states) == 3
    for states, hidden in zip(output.mems, output.hidden_states, strict=False):
        assert torch.equal(states, hidden[:, -6:])
    base = model.transformer(make_ids(2, 9))
    assert torch.equal(base.last_hidden_state, output.hidden_states[-1])


@torch.no_grad()
def test_the_initial_memory_of_each_layer_may_be_filled_by_itself(make_model, make_ids):
    model = make_model(initial_memory="zeros")
    mems, saved = model.init_mems(2), model(make_ids(2, 6)).mems
    for states, other in zip(mems, saved, strict=True):
        states.copy_(other)
    assert all(torch.equal(states, other) for states, other in zip(mems, saved, strict=True))


@pytest.mark.parametrize(
    "layers, mem_len, length, same_length, reach",
    [
        (2, 8, 8, False, 2 * 8 + 7),
        (3, 4, 4, False, 3 * 4 + 3),
        (3, 8, 4, False, 3 * 8 + 3),
        # One segment more than a multiple is the bound, n × (mem_len + L − 1).
        (3, 5, 4, False, 3 * 8),
        (2, 4, 8, False, 19),
        (3, 4, 4, True, 3 * 3),
    ],
)
def test_the_last_token_of_a_segment_sees_as_far_back_as_the_page_says(
    layers, mem_len, length, same_length, reach, make_model, make_ids
):
    model = make_model(n_layer=layers, mem_len=mem_len, same_length=same_length, clamp_len=-1).double()
    segments = -(-(reach + 2) // length)
    ids = make_ids(1, segments * length)

    def last(changed):
        tokens, mems = ids.clone(), None
        if changed is not None:
            tokens[0, -1 - changed] = (tokens[0, -1 - changed] + 1) % 10
        for segment in tokens.split(length, 1):
            outputs = model(segment, mems=mems)
            mems = outputs.mems
        return outputs.logits[0, -1]

    with torch.no_grad():
        assert not torch.equal(last(reach), last(None)) and torch.equal(last(reach + 1), last(None))


def test_no_gradient_reaches_the_segment_before(make_model, make_ids):
    """SG of the paper: what is remembered is a constant of the next segment's loss, in training too."""
    model = make_model().train()
    embeds = model.get_input_embeddings()(make_ids(2, 5)).detach().requires_grad_()
    first = model(inputs_embeds=embeds, output_hidden_states=True)
    assert all(hidden.requires_grad for hidden in first.hidden_states)
    assert not any(states.requires_grad for states in first.mems)
    second = model(make_ids(2, 6, seed=1), mems=first.mems, labels=make_ids(2, 6, seed=1))
    [gradient] = torch.autograd.grad(second.loss, embeds, retain_graph=True, allow_unused=True)
    assert gradient is None
    # Without SG there would be one: the memory counts.
    mems = tuple(hidden[:, -6:] for hidden in first.hidden_states[:-1])
    with_gradient = model(make_ids(2, 6, seed=1), mems=mems, labels=make_ids(2, 6, seed=1))
    torch.testing.assert_close(with_gradient.loss, second.loss)
    [gradient] = torch.autograd.grad(with_gradient.loss, embeds)
    assert gradient.abs().max() > 0


@pytest.mark.parametrize("masked", [False, True], ids=["real", "padded"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"pre_lnorm": True}, {"attn_type": 1}, {"gating": "gru"}, {"clamp_len": 3}],
    ids=["plain", "pre_lnorm", "shaw", "gated", "clamp"],
)
@pytest.mark.parametrize("lengths", [(4, 4, 4), (3, 9), (1, 5, 6)], ids=str)
def test_gradients_through_the_memory_are_those_of_one_long_segment(
    make_model, make_ids, backend, changes, masked, lengths
):
    """As long as it holds all of the text. Detached they are others."""
    model, ids = make_model(backend, mem_len=12, **changes).double().train(), make_ids(2, 13)
    mask = torch.ones_like(ids)
    if masked:
        mask[0, :2] = 0
    targets = torch.where(mask[:, :-1] == 1, ids[:, 1:], -100)

    def gradients(lengths, **options):
        model.zero_grad()
        parts, memory, loss = (each[:, :12].split(lengths, dim=1) for each in (ids, targets, mask)), {}, 0
        for tokens, labels, real in zip(*parts, strict=True):
            output = model(tokens, shift_labels=labels, attention_mask=real, **memory, **options)
            memory, loss = memory_of(output), loss + output.losses.sum()
        loss.backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    expected = gradients((12,))
    close(gradients(lengths, detach_mems=False), expected, 1e-9)
    with pytest.raises(AssertionError):
        close(gradients(lengths), expected, 1e-3)


def test_memory_keeps_its_graph_through_a_gradient_checkpoint_and_where_a_segment_is_the_memory(make_model, make_ids):
    model, ids = make_model(mem_len=4).double().train(), make_ids(2, 8)
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        embeds = model.get_input_embeddings()(ids[:, :4]).detach().requires_grad_()
        first = model(inputs_embeds=embeds, detach_mems=False)
        assert all(states.requires_grad for states in first.mems)
        loss = model(ids[:, 4:], mems=first.mems, labels=ids[:, 4:]).loss
        found += torch.autograd.grad(loss, embeds)
        with torch.no_grad():
            embeds.zero_()
        assert first.mems[0].abs().min() > 0, "the caller's states are not the memory"
    assert found[0].abs().max() > 0
    close(found[1], found[0], 1e-9)


@pytest.mark.parametrize(
    "make_cache",
    [
        lambda config: None,
        lambda config: DynamicCache(),
        lambda config: StaticCache(config=config, max_cache_len=7),
        StaticMemoryCache,
    ],
    ids=["MemoryCache", "DynamicCache", "StaticCache", "StaticMemoryCache"],
)
def test_no_gradient_reaches_the_segment_before_through_a_cache(make_model, make_ids, make_cache):
    """Its keys and values are constants of the next segment's loss, as the states of mems are."""
    model = make_model().train()
    embeds = model.get_input_embeddings()(make_ids(2, 11)).detach().requires_grad_()
    segments = [(embeds[:, cut], make_ids(2, 11)[:, cut]) for cut in (slice(0, 5), slice(5, 10), slice(10, 11))]
    found = []
    for mems in (True, False):
        past, gradients = {} if mems else {"past_key_values": make_cache(model.config)}, []
        for vectors, labels in segments:
            output = model(inputs_embeds=vectors, shift_labels=labels, use_cache=not mems, **past)
            past = {"mems": output.mems} if mems else {"past_key_values": output.past_key_values}
            # The graph of a segment is gone before the next one's loss.
            gradients += torch.autograd.grad(output.loss, embeds)
        found.append(gradients)
    for cached, expected in zip(*reversed(found), strict=True):
        torch.testing.assert_close(cached, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "make_cache",
    [
        pytest.param(MemoryCache, marks=pytest.mark.slow),
        StaticMemoryCache,
        pytest.param(lambda config: StaticCache(config=config, max_cache_len=9), marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
@pytest.mark.parametrize("backend", COMPILERS)
def test_a_compiled_call_with_a_cache_may_have_gradients_on(make_model, make_ids, make_cache, backend):
    model, found = make_model(n_layer=1), []
    for call in (model, torch.compile(model, backend=backend)):
        cache = make_cache(model.config)
        outputs = [call(ids, past_key_values=cache).logits for ids in make_ids(2, 3).split(1, dim=1)]
        found.append(torch.cat(outputs, dim=1))
    close(*found)


def test_keys_that_a_cache_is_given_with_gradients_learn(make_model, make_ids):
    """As the prefixes of PEFT's prefix tuning do."""
    model = make_model()
    prefix = torch.randn(2, 2, 2, 2, 3, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    cache = DynamicCache([tuple(layer) for layer in prefix])
    output = model(make_ids(2, 4), past_key_values=cache, labels=make_ids(2, 4))
    [gradient] = torch.autograd.grad(output.loss, prefix)
    assert (gradient.abs().amax(dim=(2, 3, 4, 5)) > 0).all()


def test_a_backward_pass_finds_the_keys_that_a_later_call_hides(make_model, make_ids):
    model, gradients = make_model(), []
    for goes_on in (False, True):
        output = model(make_ids(2, 4), labels=make_ids(2, 4), use_cache=True)
        if goes_on:
            mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
            with torch.no_grad():
                model(make_ids(2, 1), attention_mask=mask, past_key_values=output.past_key_values, use_cache=True)
        gradients.append(torch.autograd.grad(output.loss, tuple(model.parameters()), materialize_grads=True))
    for found, expected in zip(*gradients, strict=True):
        assert torch.equal(found, expected)


def test_inputs_are_never_modified(make_model, make_ids):
    model = make_model().train()
    ids = make_ids(2, 5)
    mems = model(ids).mems
    labels = ids.clone()
    labels[0, 1:] = -100
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, :3] = 0
    given = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    copies = {name: tensor.clone() for name, tensor in given.items()}
    mem_copies = [states.clone() for states in mems]
    model(mems=mems, **given).loss.backward()
    model(mems=mems, **given, use_cache=True)
    assert all(torch.equal(given[name], copies[name]) for name in given)
    assert all(torch.equal(a, b) for a, b in zip(mems, mem_copies, strict=True))


def test_memory_lengths_change_after_training(make_model, make_ids):
    model = make_model(initial_memory="zeros")
    ids = make_ids(1, 9)
    with torch.no_grad():
        assert model(ids).mems[0].shape[1] == 6
        model.reset_memory_length(11)
        assert model(ids).mems[0].shape[1] == 11
        # The name of transformers: the memory and the query's own key.
        assert model.config.sliding_window == 12
        model.reset_memory_length(0)
        output = model(ids, use_cache=True)
        assert output.mems is None and output.past_key_values is None
        assert model.init_mems(3) is None
    with pytest.raises(ValueError, match="mem_len=-1"):
        model.reset_memory_length(-1)
    with pytest.raises(ValueError, match="attn_type=2"):
        make_model(attn_type=2, mem_len=0).reset_memory_length(5)


@torch.no_grad()
def test_lengths_that_are_set_on_a_model_are_its_configurations(make_model, make_ids):
    """The originals' evaluation sets `model.clamp_len` and `model.same_length`; here they changed nothing."""
    names, ids = ("mem_len", "ext_len", "clamp_len", "same_length"), make_ids(1, 20)
    settings = dict(zip(names, (5, 0, 3, True), strict=True))
    model, expected = make_model(mem_len=8), make_model(**settings)
    assert not torch.equal(model(ids[:, 9:], mems=model(ids[:, :9]).mems).logits, expected(ids[:, 9:]).logits)
    for each in (model, model.transformer):
        for name, value in settings.items():
            setattr(each, name, value)
            assert getattr(model, name) == getattr(model.transformer, name) == getattr(model.config, name) == value
        first, right = model(ids[:, :9]), expected(ids[:, :9])
        assert torch.equal(model(ids[:, 9:], mems=first.mems).logits, expected(ids[:, 9:], mems=right.mems).logits)
    with pytest.raises(ValueError, match="ext_len=-1"):
        model.transformer.ext_len = -1
    assert model.config.ext_len == 0


LENGTHS = {
    "shorter": {"mem_len": 3},
    "longer": {"mem_len": 11, "same_length": True},
    "none": {"mem_len": 0, "same_length": True},
    "clamped": {"clamp_len": 2},
    "extended": {"ext_len": 2},
}


@pytest.mark.parametrize("initial_memory", ["empty", "zeros"])
@pytest.mark.parametrize("attn_type", [0, 1])
@pytest.mark.parametrize("changes", LENGTHS.values(), ids=LENGTHS)
@torch.no_grad()
def test_lengths_of_a_call_are_those_of_a_model_configured_so(
    make_model, make_ids, changes, attn_type, initial_memory
):
    options = {"attn_type": attn_type, "max_klen": 11, "initial_memory": initial_memory}
    model, configured = make_model(**options), make_model(**options | changes)
    found, lengths = model.config.to_dict(), MemoryLengths(**changes)
    for use_cache in [False] if "ext_len" in changes else [False, True]:
        expected = actual = {}
        for ids in make_ids(2, 19).split([5, 1, 1, 4, 8], dim=1):
            memory, expected_memory = (
                {name: outputs.get(name) for name in ("mems", "past_key_values")} for outputs in (actual, expected)
            )
            expected = configured(ids, use_cache=use_cache, **expected_memory)
            actual = model(ids, use_cache=use_cache, lengths=lengths, **memory)
            assert torch.equal(actual.logits, expected.logits)
    assert model.config.to_dict() == found


@torch.no_grad()
def test_a_cache_takes_the_distances_of_each_call(make_model, make_ids):
    """Projected positions are kept on the cache, but not those of another clamp_len."""
    model, ids = make_model(), make_ids(2, 8)
    first, more = ids.split([6, 2], dim=1)
    cache = model(first, use_cache=True).past_key_values
    clamped = MemoryLengths(clamp_len=2)
    expected = model(more, mems=model(first).mems, lengths=clamped).logits
    close(model(more, past_key_values=cache, lengths=clamped).logits, expected)


@pytest.mark.parametrize("use_cache", [False, True], ids=["mems", "cache"])
@torch.no_grad()
def test_distances_that_share_a_key_are_projected_once(make_model, make_ids, use_cache):
    model, lengths = make_model(mem_len=30), MemoryLengths(clamp_len=4)
    rows, past = [], {}
    model.transformer.layers[1].self_attn.r_proj.register_forward_hook(
        lambda _, inputs, __: rows.append(len(inputs[0]))
    )
    for ids in make_ids(2, 40).split([2, 20, 18], dim=1):
        outputs = model(ids, lengths=lengths, use_cache=use_cache, **past)
        past = {name: outputs[name] for name in ("mems", "past_key_values") if name in outputs}
    assert rows == ([5] if use_cache else [2, 5, 5])


@torch.no_grad()
def test_dropout_draws_for_each_distance_even_where_they_share_a_key(make_model, make_ids):
    """In training, and where the dropouts alone are, to draw several answers."""
    model, rows = make_model(clamp_len=4, dropout=0.5), []
    model.transformer.layers[1].self_attn.r_proj.register_forward_hook(lambda _, inputs, __: rows.append(inputs[0]))
    for part in (model, model.transformer.position_dropout):
        model.eval()
        part.train()
        model(make_ids(2, 20))
    for positions in rows:
        assert len(positions) == 20 and len(positions.unique(dim=0)) > 10


@pytest.mark.parametrize("how", ["alone in training", "replaced"])
@torch.no_grad()
def test_the_dropout_of_distances_is_called_with_a_cache_too(make_model, make_ids, how):
    model, drawn = make_model(dropout=0.5), []
    if how == "replaced":
        model.transformer.position_dropout = torch.nn.AlphaDropout(0.5)
    else:
        model.transformer.position_dropout.train()
    model.transformer.position_dropout.register_forward_hook(lambda *args: drawn.append(args[2]))
    cache = MemoryCache(model.config)
    for ids in make_ids(2, 3).split(1, dim=1):
        model(ids, past_key_values=cache)
    assert len(drawn) == 3


@pytest.mark.parametrize("make_cache", [MemoryCache, lambda config: DynamicCache(), StaticMemoryCache])
@pytest.mark.parametrize("how", ["written to", "others", "copied", "pickled"])
@torch.no_grad()
def test_an_episode_after_an_update_has_the_distances_of_the_new_weights(make_model, make_ids, how, make_cache):
    """As an agent plays that learns in between: keys of old weights leave the memory, and so do its distances."""
    model, cache = make_model(), make_cache(make_model().config)
    model(make_ids(2, 5), past_key_values=cache)
    if how == "copied":
        cache = copy.deepcopy(cache)
    if how == "pickled":
        cache = pickle.loads(pickle.dumps(cache))
    for layer in model.transformer.layers:
        weight = layer.self_attn.r_proj.weight
        if how == "others":
            layer.self_attn.r_proj.weight = torch.nn.Parameter(1.3 * weight)
        else:
            weight.mul_(1.3)
    memory, begins = {}, torch.ones(2, 1, dtype=torch.bool)
    for ids in make_ids(2, 10, seed=1).split([1, 1, 5, 3], dim=1):
        expected = model(ids, **memory)
        given = {} if memory else {"resets": begins}
        close(model(ids, past_key_values=cache, **given).logits, expected.logits)
        memory = memory_of(expected)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_of_an_optimiser_projects_distances_anew(make_model, make_ids, fused):
    """A fused one, as `Trainer` takes by default, writes to weights without another version of them."""
    model, cache = make_model(), MemoryCache(make_model().config)
    with torch.no_grad():
        model(make_ids(2, 5), past_key_values=cache)
    # Once pickled, a cache knows no weights and projects anew.
    other = pickle.loads(pickle.dumps(cache))
    model(make_ids(2, 5), labels=make_ids(2, 5)).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=0.3, fused=fused).step()
    more = make_ids(2, 1, seed=1)
    with torch.no_grad():
        close(model(more, past_key_values=cache).logits, model(more, past_key_values=other).logits)


@pytest.mark.parametrize("how", ["as it is", "without dropout", "spread by accelerate"])
@torch.no_grad()
def test_distances_are_kept_where_their_dropout_does_nothing(make_model, make_ids, how):
    model, cache = make_model(), MemoryCache(make_model().config)
    if how == "without dropout":
        model.transformer.position_dropout = torch.nn.Identity()
    if how == "spread by accelerate":
        add_hook_to_module(model.transformer.position_dropout, AlignDevicesHook("cpu"))
    model(make_ids(2, 3), past_key_values=cache)
    assert sorted(cache.decoding_state.rel_keys) == [0, 1]


@torch.no_grad()
def test_distances_projected_under_autocast_do_not_outlive_it(make_model, make_ids):
    model, cache = make_model(), MemoryCache(make_model().config)
    with torch.autocast("cpu", torch.bfloat16):
        mems = model(make_ids(2, 1)).mems
        model(make_ids(2, 1), past_key_values=cache)
    # Enough to take the first keys out of every layer's memory.
    for ids in make_ids(2, 40, seed=1).split(1, dim=1):
        expected = model(ids, mems=mems)
        logits, mems = model(ids, past_key_values=cache).logits, expected.mems
    torch.testing.assert_close(logits, expected.logits, atol=2e-6, rtol=1e-6)


@torch.no_grad()
def test_distances_are_projected_once_for_many_calls(make_model, make_ids):
    """For the texts that go on from copies of a cache, too; one that needs more leaves the others theirs."""
    model, calls = make_model(), []
    for layer in model.transformer.layers:
        layer.self_attn.r_proj.register_forward_hook(lambda *args: calls.append(args))
    cache = model(make_ids(2, 5), use_cache=True).past_key_values
    for text in (cache, copy.deepcopy(cache), cache):
        for ids in make_ids(2, 10).split(1, dim=1):
            model(ids, past_key_values=text)
    assert len(calls) == 2
    model(make_ids(2, 40), past_key_values=copy.deepcopy(cache))
    assert len(calls) == 4
    model(make_ids(2, 1), past_key_values=cache)
    assert len(calls) == 4


@pytest.mark.parametrize("by_columns", [False, True])
@torch.no_grad()
def test_distances_lie_as_a_token_reads_them(make_model, make_ids, by_columns, monkeypatch):
    """By columns on Intel's CPUs, in whatever memory one row's product with them takes the least time."""
    monkeypatch.setattr(operators, "reads_columns_sooner", lambda row: by_columns)
    model, memory = make_model(), {}
    cache = MemoryCache(model.config)
    for ids in make_ids(2, 20).split([7, 1, 1, 5, 6], dim=1):
        expected = model(ids, **memory)
        close(model(ids, past_key_values=cache).logits, expected.logits)
        memory = memory_of(expected)
        for keys in decoding_state_of(cache).rel_keys.values():
            assert (keys.transpose(1, 2) if by_columns else keys).is_contiguous()


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@torch.no_grad()
def test_same_length_without_a_memory_reads_the_whole_segment(make_model, make_ids, backend):
    ids = make_ids(2, 9)
    for attn_type in (0, 1, 2, 3):
        limited, plain = (
            make_model(backend, attn_type=attn_type, mem_len=0, tgt_len=9, same_length=same_length)
            for same_length in (True, False)
        )
        assert torch.equal(limited(ids).logits, plain(ids).logits)


def test_threads_share_a_model_with_lengths_of_their_own(make_model, make_ids):
    model, ids = make_model(), make_ids(2, 40)

    def read(mem_len):
        with torch.no_grad():
            mems, parts = None, []
            for segment in segments(ids, 4):
                outputs = model(segment, mems=mems, lengths=MemoryLengths(mem_len=mem_len))
                mems = outputs.mems
                parts.append(outputs.logits)
            return torch.cat(parts, 1)

    choices = [0, 2, 6, 9] * 5
    expected = {mem_len: read(mem_len) for mem_len in set(choices)}
    with ThreadPoolExecutor(4) as threads:
        for mem_len, actual in zip(choices, threads.map(read, choices), strict=True):
            assert torch.equal(actual, expected[mem_len])


def test_lengths_that_do_not_fit_the_model_are_refused(make_model, make_ids):
    with pytest.raises(ValueError, match="mem_len=-1 must not be negative"):
        make_model()(make_ids(1, 3), lengths=MemoryLengths(mem_len=-1))
    with pytest.raises(ValueError, match="attn_type=2.*mem_len=4 must be 0"):
        make_model(attn_type=2, mem_len=0)(make_ids(1, 3), lengths=MemoryLengths(mem_len=4))


@pytest.mark.parametrize("length", [True, 4.0, "4", torch.tensor(4), [4]], ids=repr)
@pytest.mark.parametrize("name", ["mem_len", "ext_len", "clamp_len"])
def test_a_length_is_an_integer(name, length):
    with pytest.raises(ValueError, match=rf"{name}={re.escape(repr(length))} must be an integer"):
        MemoryLengths(**{name: length})
    assert MemoryLengths(**{name: np.int64(4)}) == MemoryLengths(**{name: 4})


@pytest.mark.parametrize("same_length", ["false", "", 0, 1], ids=repr)
def test_same_length_is_true_or_false(same_length):
    with pytest.raises(ValueError, match=f"same_length={same_length!r} must be True or False"):
        MemoryLengths(same_length=same_length)


def test_learned_positions_keep_their_rows_when_lengths_change(make_model, make_ids, tmp_path):
    model = make_model(attn_type=1)
    assert model.transformer.r_emb.shape == (2, 5 + 6, 2, 8)
    model.save_pretrained(tmp_path)
    longer = TransfoXLForCausalLM.from_pretrained(tmp_path, mem_len=20).eval()
    assert longer.config.mem_len == 20 and longer.transformer.r_emb.shape == model.transformer.r_emb.shape
    ids = make_ids(1, 8)
    with torch.no_grad():
        close(longer(ids).logits, model(ids).logits)
        longer(make_ids(1, 30))


@pytest.mark.parametrize("attn_type", [2, 3])
@torch.no_grad()
def test_absolute_baselines_count_from_the_last_real_token(make_model, make_ids, attn_type):
    model = make_model(attn_type=attn_type, mem_len=0, tgt_len=12, clamp_len=5)
    ids = make_ids(4, 7)
    alone = model(ids).logits
    padded, mask = torch.full((4, 11), 60), torch.zeros(4, 11)
    for row, behind in enumerate((0, 1, 2, 4)):
        padded[row, 4 - behind : 11 - behind], mask[row, 4 - behind : 11 - behind] = ids[row], 1
    logits = model(padded, attention_mask=mask).logits
    for row, behind in enumerate((0, 1, 2, 4)):
        close(logits[row, 4 - behind : 11 - behind], alone[row])
    assert model(ids, use_cache=True).past_key_values is None
    if attn_type == 3:
        with pytest.raises(ValueError, match="13 tokens.*max_klen=12"):
            model(make_ids(1, 13))


def test_positions_are_counted_in_fp32_in_every_dtype():
    """Quirk 11: in bf16 position 301 would become 300."""
    embeds = torch.zeros(1, 1, 16, dtype=torch.bfloat16)
    sinusoids = sinusoids_of_distances(402, embeds, clamp_len=-1)
    assert sinusoids.dtype == torch.bfloat16
    expected = oracle.sinusoid(301, 16)
    close(sinusoids[402 - 1 - 301].double(), expected, 4e-3)
    assert not torch.equal(sinusoids[402 - 1 - 301], sinusoids[402 - 1 - 300])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_half_precision_follows_fp32(make_model, make_ids, backend, dtype):
    exact = make_model(backend, init_std=0.1, proj_init_std=0.1)
    half = make_model(backend, init_std=0.1, proj_init_std=0.1).to(dtype)
    mems = half_mems = None
    for ids in segments(make_ids(2, 12), 4):
        expected, actual = exact(ids, mems=mems), half(ids, mems=half_mems)
        torch.testing.assert_close(actual.logits, expected.logits, atol=0.1, rtol=0.05)
        mems, half_mems = expected.mems, actual.mems
        assert half_mems[0].dtype == dtype


AUTOCAST = [torch.bfloat16, torch.float16]


def trained_under_autocast(model, parts, dtype, keep, mask=None):
    """Losses and gradients of segments in turn, with mems as `keep(outputs, mems)` makes them of the last ones."""
    mems, found = None, {}
    for i, ids in enumerate(parts):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            outputs = model(ids, mems=mems, shift_labels=ids, attention_mask=mask, output_hidden_states=True)
        outputs.loss.backward()
        mems = keep(outputs, mems)
        found |= {f"{i}.losses": outputs.losses.detach(), f"{i}.states": outputs.hidden_states[-1].detach()}
    return found | {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("dtype", AUTOCAST, ids=str)
@pytest.mark.parametrize("attn_type", [0, 1])
@pytest.mark.parametrize("mem_len", [3, 5, 12], ids=["shorter", "as-long", "longer"])
def test_under_autocast_the_memory_is_in_its_type_and_nothing_else_changes(
    make_model, make_ids, mem_len, attn_type, dtype
):
    """Bit for bit: each product would round the same states again."""

    def as_returned(outputs, mems):
        assert {states.dtype for states in outputs.mems} == {dtype}
        return outputs.mems

    def as_they_entered(outputs, mems):
        assert {states.dtype for states in outputs.hidden_states[:-1]} == {dtype}
        entered = [states.detach().float() for states in outputs.hidden_states[:-1]]
        before = mems or [states[:, :0] for states in entered]
        return tuple(torch.cat(pair, dim=1)[:, -mem_len:] for pair in zip(before, entered, strict=True))

    parts = segments(make_ids(3, 17), 5)
    changes = {"mem_len": mem_len, "attn_type": attn_type}
    found, expected = (
        trained_under_autocast(make_model(**changes).train(), parts, dtype, keep)
        for keep in (as_returned, as_they_entered)
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", AUTOCAST, ids=str)
@pytest.mark.parametrize("changes", [{}, {"mem_len": 3}, {"attn_type": 1}, {"pre_lnorm": True}], ids=str)
def test_under_autocast_a_model_follows_fp32(make_model, make_ids, changes, dtype):
    """Losses and gradients as closely as a model whose weights have autocast's type, but for a fifth."""
    parts, found = segments(make_ids(3, 17), 5), []
    for cast, autocast in ((torch.float32, None), (torch.float32, dtype), (dtype, None)):
        model = make_model(**changes).train().to(cast)
        numbers = trained_under_autocast(model, parts, autocast, lambda outputs, mems: outputs.mems)
        losses = [value.flatten() for name, value in numbers.items() if name.endswith("losses")]
        gradients = [value.float().flatten() for name, value in numbers.items() if not name[0].isdigit()]
        found.append([torch.cat(losses), torch.cat(gradients)])
    for exact, automatic, half in zip(*found, strict=True):
        assert 0 < (automatic - exact).norm() <= 1.2 * (half - exact).norm()


@pytest.mark.parametrize("changes", [{"pre_lnorm": True}, {"gating": "gru"}], ids=str)
@torch.no_grad()
def test_a_memory_that_is_normalised_first_keeps_what_autocast_computes_a_norm_of(make_model, make_ids, changes):
    with torch.autocast("cpu", torch.bfloat16):
        outputs = make_model(**changes)(make_ids(2, 5), output_hidden_states=True)
    for states, entered in zip(outputs.mems, outputs.hidden_states, strict=False):
        assert torch.equal(states, entered) and states.dtype == torch.float32


def test_under_autocast_a_memory_in_fp32_gets_the_gradient_of_one_in_fp32(make_model, make_ids):
    model = make_model().train()
    states = torch.randn(2, 4, 16).requires_grad_()
    mask = torch.ones(2, 4, dtype=torch.bool)
    mask[0, :2] = False
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(make_ids(2, 5), mems=(states, states), mems_mask=mask, labels=make_ids(2, 5)).loss
    [gradient] = torch.autograd.grad(loss, states)
    assert gradient.dtype == torch.float32 and gradient[0, 2:].norm() > 0 == gradient[0, :2].norm()


@pytest.mark.parametrize("dtype", AUTOCAST, ids=str)
@torch.no_grad()
def test_a_memory_goes_on_in_and_out_of_autocast(make_model, make_ids, dtype):
    """Masked too, into caches, and with zeros before the text."""
    model, (first, second, third) = make_model(initial_memory="zeros"), segments(make_ids(2, 12), 4)
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])
    with torch.autocast("cpu", dtype):
        narrow = model(first, attention_mask=mask)
    wide = tuple(states.float() for states in narrow.mems)
    assert narrow.mems[0].dtype == dtype and narrow.mems[0][0, :4].isnan().any() and narrow.mems_mask is not None
    for make_cache in (lambda config: None, MemoryCache, StaticMemoryCache):
        found, expected = (
            model(second, mems=mems, mems_mask=narrow.mems_mask, past_key_values=make_cache(model.config))
            for mems in (narrow.mems, wide)
        )
        assert torch.equal(found.logits, expected.logits)
        if found.mems is not None:
            assert found.mems[0].dtype == torch.float32
            with torch.autocast("cpu", dtype):
                again = model(third, mems=found.mems, mems_mask=found.mems_mask)
            assert again.mems[0].dtype == dtype and again.logits.isfinite().all()


@torch.no_grad()
def test_dropout_is_where_the_original_has_it(make_model, make_ids):
    """Embedding, positions, attention output, feed-forward twice, final; attention probabilities by dropatt."""
    import torch.nn as nn

    model = make_model(dropout=0.1).train()
    calls = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    model(make_ids(1, 3))
    layer = ["self_attn", "mlp", "mlp"]
    per_layer = [f"transformer.layers.{i}.{part}.dropout" for i in range(2) for part in layer]
    first = ["transformer.input_dropout", "transformer.position_dropout"]
    assert calls == first + per_layer + ["transformer.output_dropout"]
    drops = make_model(dropatt=0.5).train()
    assert not torch.equal(drops(make_ids(1, 5)).logits, drops(make_ids(1, 5)).logits)


@torch.no_grad()
@pytest.mark.parametrize("how", ["p", "eval", "Identity"])
def test_dropout_is_off_where_its_modules_are(make_model, make_ids, how):
    """TRL sets their p to 0: that of the probabilities stayed, and the first loss of DPO was not ln 2."""
    model, ids = make_model(dropout=0.3, dropatt=0.3).train(), make_ids(2, 5)
    expected = model.eval()(ids).logits
    for module in [*model.train().modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, torch.nn.Dropout):
                if how == "Identity":
                    setattr(module, name, torch.nn.Identity())
                else:
                    child.p, child.training = (0, True) if how == "p" else (child.p, False)
    assert model.training and torch.equal(model(ids).logits, expected)


def test_a_segment_that_is_the_memory_is_not_copied_but_for_what_may_be_the_callers(make_model, make_ids):
    model = make_model(mem_len=5)
    embeds = model.get_input_embeddings()(make_ids(2, 5)).detach()
    first = model(inputs_embeds=embeds, output_hidden_states=True)
    expected = [states.clone() for states in first.mems]
    assert first.mems[1].data_ptr() == first.hidden_states[1].data_ptr()
    embeds.zero_()
    for states, before in zip(first.mems, expected, strict=True):
        assert torch.equal(states, before)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_call_takes_the_cache_by_either_name(name):
    """transformers 5.24 calls `cache` what was `past_key_values`."""
    model = TransfoXLForCausalLM(small_config()).eval()
    ids = torch.arange(24).view(2, 12) % model.config.vocab_size
    first = model(ids[:, :7], use_cache=True)
    second = model(ids[:, 7:], **{name: first[CACHE_NAME]})
    with_mems = model(ids[:, 7:], mems=model(ids[:, :7]).mems)
    torch.testing.assert_close(second.logits, with_mems.logits)
    assert second[CACHE_NAME] is first[CACHE_NAME]
    cache = MemoryCache(model.config)
    model.generate(ids, **{name: cache}, attention_mask=torch.ones_like(ids), max_new_tokens=3, min_new_tokens=3)
    assert text_length(cache) == ids.shape[1] + 2


@pytest.mark.parametrize(
    "old", [(), ((torch.zeros(1),) * 2,) * 2, EncoderDecoderCache(DynamicCache(), DynamicCache())]
)
def test_what_is_no_cache_of_a_decoder_is_named(make_model, make_ids, old):
    """As older versions of transformers had caches, for instance."""
    model, ids = make_model(), make_ids(2, 5)
    message = f"past_key_values are of type {type(old).__name__}: give what a call with use_cache=True returned"
    with pytest.raises(ValueError, match=message):
        model(ids, past_key_values=old)
    with pytest.raises(ValueError, match=message):
        model.generate(ids, past_key_values=old, max_new_tokens=2)


def test_one_cache_by_two_names_is_refused():
    model = TransfoXLForCausalLM(small_config()).eval()
    ids = torch.zeros(1, 3, dtype=torch.long)
    cache = MemoryCache(model.config)
    with pytest.raises(ValueError, match="two names of one thing: give one of them"):
        model(ids, past_key_values=cache, cache=cache)
