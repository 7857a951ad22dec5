"""The mask of a memory travels beside it: whoever loses it hears of it, and nothing hidden spreads."""

import copy
import io
import json
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch.nn import functional as F
from transformers import DynamicCache, GenerationConfig, StaticCache
from transformers.cache_utils import DynamicLayer

import txl_hf
from models import BACKENDS
from txl_hf import MemoryLengths, TransfoXLModel
from txl_hf.kernels.static_cache import StaticMemoryCache
from txl_hf.memories import mask_overflow, memory_of, real_states
from txl_hf.transfo_xl.cache_transfo_xl import MemoryCache


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.fixture
def padded(make_model, make_ids):
    """A model, its memory of a padded batch, a next segment, and the logits that are right for it."""
    model, ids = make_model(), make_ids(3, 5)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
    more = make_ids(3, 4, seed=1)
    with torch.no_grad():
        memory = memory_of(model(ids, attention_mask=mask))
        return model, memory, more, model(more, **memory).logits


@torch.no_grad()
def test_the_mask_of_a_padded_batch_is_handed_out_beside_nan(padded, make_ids):
    model, memory, more, _ = padded
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]).bool()
    assert torch.equal(memory["mems_mask"], real)
    for states in memory["mems"]:
        assert states[~real].isnan().all() and states[real].isfinite().all()
    # Once what was padded is forgotten, there is no mask any more, as there is none where nothing was padded.
    later = model(make_ids(3, 6), **memory)
    assert later.mems_mask is None and later.mems[0].isfinite().all()
    assert model(more, attention_mask=torch.ones_like(more)).mems_mask is None


def save_and_load(states):
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def all_reduce(states):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        states = states.clone()
        dist.all_reduce(states)
        return states
    finally:
        dist.destroy_process_group()


def quantized(states):
    scale = states.abs().amax() / 127
    return (states / scale).round().to(torch.int8) * scale


ROWS = torch.arange(3)
# What is done to mems on the way, each giving back what it was given, to some digits.
OPERATIONS = {
    "times one": (lambda x: x * 1.0, 0),
    "minus zero": (lambda x: x - 0.0, 0),
    "half and twice": (lambda x: x * 0.5 * 2, 0),
    "clone": (torch.clone, 0),
    "half": (lambda x: x.half(), 1e-2),
    "bf16": (lambda x: x.bfloat16(), 1e-1),
    "double": (lambda x: x.double(), 0),
    "float8_e4m3fn": (lambda x: x.to(torch.float8_e4m3fn), 1.0),
    "float8_e5m2": (lambda x: x.to(torch.float8_e5m2), 2.0),
    "float8_e4m3fnuz": (lambda x: x.to(torch.float8_e4m3fnuz), 1.0),
    "numpy": (lambda x: torch.from_numpy(np.array(x.numpy())), 0),
    "json": (lambda x: torch.tensor(json.loads(json.dumps(x.tolist()))), 1e-6),
    "torch.save": (save_and_load, 0),
    "pickle": (lambda x: pickle.loads(pickle.dumps(x)), 0),
    "safetensors": (lambda x: load(save({"x": x}))["x"], 0),
    "average of two": (lambda x: (x + x) / 2, 0),
    "lerp": (lambda x: torch.lerp(x, x, 0.5), 1e-6),
    "cat": (lambda x: torch.cat(x.split(1)), 0),
    "index_select": (lambda x: x.index_select(0, ROWS), 0),
    "where": (lambda x: torch.where(torch.ones_like(x) > 0, x, 0), 0),
    "masked_fill": (lambda x: x.masked_fill(torch.zeros_like(x) > 0, 1), 0),
    "clamp": (lambda x: x.clamp(-1e9, 1e9), 0),
    "round": (lambda x: (x * 1e6).round() / 1e6, 1e-5),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=1), 0),
    "deepcopy": (copy.deepcopy, 0),
    "relu": (lambda x: x.relu() - (-x).relu(), 0),
    "compiled": (torch.compile(lambda x: x * 1.0 + 0.0, backend="aot_eager"), 0),
    "plus zero": (lambda x: x + 0, 0),
    "plus zero in floating point": (lambda x: x + 0.0, 0),
    "sum": (lambda x: torch.stack([x, torch.zeros_like(x)]).sum(0), 0),
    "mean": (lambda x: torch.stack([x, x]).mean(0), 0),
    "all-reduce": (all_reduce, 0),
    "index_add": (lambda x: torch.zeros_like(x).index_add(0, ROWS, x), 0),
    "scatter_add": (
        lambda x: torch.zeros_like(x).scatter_add(0, torch.zeros_like(x).long() + ROWS[:, None, None], x),
        0,
    ),
    "sparse": (lambda x: x.to_sparse().to_dense(), 0),
    "twice negated": (lambda x: (x * -1) * -1, 0),
}
# These spread what is in a row, or in all: NaN comes out of them, and nothing is plausible.
SPREADING = {
    "one-hot product": lambda x: torch.einsum("rb,bmd->rmd", torch.eye(3), x),
    "quantized with a scale of all": quantized,
}


@pytest.mark.parametrize("operation, tolerance", OPERATIONS.values(), ids=OPERATIONS)
@torch.no_grad()
def test_what_is_done_to_mems_on_the_way_loses_no_mask(padded, operation, tolerance):
    model, memory, more, expected = padded
    mems = tuple(operation(states) for states in memory["mems"])
    close(model(more, mems=mems, mems_mask=memory["mems_mask"]).logits, expected, max(2e-5, tolerance))
    with pytest.raises(ValueError, match="mems hold NaN, in row 0 at state 0 first.*mems_mask=outputs.mems_mask"):
        model(more, mems=mems)


@pytest.mark.parametrize("operation", SPREADING.values(), ids=SPREADING)
@torch.no_grad()
def test_what_spreads_padding_is_heard_of(padded, operation):
    model, memory, more, _ = padded
    mems = tuple(operation(states) for states in memory["mems"])
    with pytest.raises(ValueError, match="mems_mask"):
        model(more, mems=mems)
    assert model(more, mems=mems, mems_mask=memory["mems_mask"]).logits.isnan().any()
    # Hidden states may hold anything, so that whoever needs numbers puts some there first.
    filled = tuple(states.nan_to_num(0) for states in memory["mems"])
    mems = tuple(operation(states) for states in filled)
    close(model(more, mems=mems, mems_mask=memory["mems_mask"]).logits, padded[3], 5e-2)


@torch.no_grad()
def test_a_lost_mask_is_nan_where_numbers_are_not_looked_at(padded, monkeypatch):
    """As on a GPU, which nothing waits for."""
    model, memory, more, expected = padded
    monkeypatch.setattr("txl_hf.transfo_xl.masks_transfo_xl.can_look", lambda tensor, gpu=False: False)
    monkeypatch.setattr("txl_hf.transfo_xl.memory_transfo_xl.can_look", lambda tensor, gpu=False: False)
    logits = model(more, mems=memory["mems"]).logits
    assert logits[[0, 2]].isnan().all()
    close(logits[1], expected[1])
    # There a mask that hides nothing stays a mask.
    close(model(more, attention_mask=torch.ones_like(more)).logits, model(more).logits)


@torch.no_grad()
def test_a_frame_of_minus_zeros_is_a_frame(make_model, make_ids):
    model = make_model(model_class=TransfoXLModel)
    frames = torch.zeros(1, 4, 16)
    plus, minus = model(inputs_embeds=frames), model(inputs_embeds=-frames)
    assert minus.mems_mask is None
    ids = make_ids(1, 3)
    assert torch.equal(
        model(ids, **memory_of(minus)).last_hidden_state, model(ids, **memory_of(plus)).last_hidden_state
    )


# --- what is hidden spreads nowhere ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["mems_mask", "attention_mask"])
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_hidden_memory_may_hold_anything(make_model, make_ids, backend, garbage, how):
    """A row that is told to start afresh does so, now and later, whatever its memory was."""
    model, more = make_model(backend), make_ids(2, 4, seed=1)
    mems = model(make_ids(2, 3)).mems
    broken = tuple(states.clone() for states in mems)
    for states in broken:
        states[0] = garbage
    real = torch.tensor([[False] * 3, [True] * 3])
    if how == "mems_mask":
        given = {"mems_mask": real}
    else:
        # On CPU, NaN without a mask of its own would be refused first.
        mask = torch.cat([real, torch.ones(2, 4, dtype=torch.bool)], 1)
        given = {"attention_mask": mask.long(), "mems_mask": torch.ones(2, 3, dtype=torch.bool)}
    found = model(more, mems=broken, **given)
    fresh, other = model(more[:1]), model(more[1:], mems=tuple(states[1:] for states in mems))
    close(found.logits, torch.cat([fresh.logits, other.logits]))
    later = make_ids(2, 2, seed=2)
    found = model(later, **memory_of(found))
    close(found.logits[:1], model(later[:1], **memory_of(fresh)).logits)
    close(found.logits[1:], model(later[1:], **memory_of(other)).logits)


@pytest.mark.parametrize(
    "make_cache",
    [MemoryCache, lambda config: DynamicCache(), lambda config: StaticCache(config, 32), StaticMemoryCache],
    ids=["MemoryCache", "DynamicCache", "StaticCache", "StaticMemoryCache"],
)
@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_hidden_keys_of_a_cache_may_hold_anything(make_model, make_ids, backend, make_cache):
    """An overflow was projected before a mask hid it; the row that starts afresh does so from now on."""
    model, first, more, later = make_model(backend), make_ids(2, 3), make_ids(2, 2, seed=1), make_ids(2, 2, seed=2)
    cache = make_cache(model.config)
    model(first, past_key_values=cache, use_cache=True)
    whole = model(first[1:]).mems
    for layer in cache.layers:
        # What a static cache has before the text is zeros, which nothing has overflowed.
        layer.keys[0, :, -3:], layer.values[0, :, -3:] = torch.nan, torch.inf
    mask = torch.tensor([[0] * 3 + [1] * 2, [1] * 5])
    found = model(more, past_key_values=cache, attention_mask=mask, use_cache=True)
    fresh, other = model(more[:1]), model(more[1:], mems=whole)
    close(found.logits, torch.cat([fresh.logits, other.logits]))
    found = model(later, past_key_values=cache, use_cache=True)
    expected = [model(later[:1], mems=fresh.mems).logits, model(later[1:], mems=other.mems).logits]
    close(found.logits, torch.cat(expected))


def test_hiding_keys_of_a_cache_leaves_those_of_a_backward_pass(make_model, make_ids):
    model, ids = make_model(), make_ids(2, 3)
    found = []
    for hides in (False, True):
        outputs = model(ids, use_cache=True)
        with torch.no_grad():
            mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]) if hides else None
            model(ids[:, :1], past_key_values=outputs.past_key_values, attention_mask=mask)
        found.append(torch.autograd.grad(outputs.logits.sum(), model.transformer.layers[0].self_attn.k_proj.weight))
    close(*found)


def test_keys_that_inference_mode_made_can_be_hidden_outside_it(make_model, make_ids):
    model, first, more = make_model(), make_ids(2, 3), make_ids(2, 1, seed=1)
    caches = DynamicCache(), DynamicCache()
    with torch.inference_mode():
        model(first, past_key_values=caches[0])
    with torch.no_grad():
        model(first, past_key_values=caches[1])
        mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
        close(*(model(more, past_key_values=cache, attention_mask=mask).logits for cache in caches))


@pytest.mark.parametrize(
    "make_cache",
    [MemoryCache, lambda config: DynamicCache(), lambda config: StaticCache(config, 32), StaticMemoryCache],
    ids=["ours", "full", "static", "ring"],
)
@pytest.mark.parametrize("hidden", ["padding", "a document"])
@torch.no_grad()
def test_what_is_hidden_stays_so_after_a_call_of_a_shorter_memory(make_model, make_ids, hidden, make_cache):
    """The cache holds more keys than such a call reads, for later ones."""
    model, first, more, found = make_model(), make_ids(2, 6), make_ids(2, 4, seed=1), []
    mask, given = {}, {}
    if hidden == "padding":
        mask = {"attention_mask": torch.tensor([[0, 0, 0, 0, 1, 1], [1] * 6])}
    else:
        given = {"resets": torch.tensor([[True], [False]])}
    other = first.clone()
    other[0, : 4 if mask else 6] = 59
    for ids in (first, other):
        cache = make_cache(model.config)
        model(ids, past_key_values=cache, **mask)
        model(more[:, :1], past_key_values=cache, lengths=MemoryLengths(mem_len=2), **given)
        model(more[:, 1:2], past_key_values=cache, lengths=MemoryLengths(mem_len=3))
        found.append(model(more[:, 2:], past_key_values=cache).logits)
    close(*found)


@pytest.mark.parametrize("make_cache", [MemoryCache, lambda config: StaticCache(config, 32), StaticMemoryCache])
def test_generate_goes_on_from_a_cache_that_overflowed_in_what_is_hidden(make_model, make_ids, make_cache):
    model, ids, more = make_model(), make_ids(2, 8), make_ids(2, 3, seed=1)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 60}
    cache = make_cache(model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    for layer in cache.layers:
        layer.keys[0, :, -6:], layer.values[0, :, -6:] = torch.nan, torch.inf
    mask = torch.tensor([[0] * 8 + [1] * 3, [1] * 11])
    inputs = {"input_ids": torch.cat([ids, more], 1), "attention_mask": mask, "past_key_values": cache}
    text = model.generate(**inputs, **options, disable_compile=True)
    assert torch.equal(text[:1, 8:], model.generate(more[:1], **options))


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_in_embeddings_may_hold_anything(make_model, make_ids, backend, garbage):
    model, ids = make_model(backend), make_ids(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    embeds = model.get_input_embeddings()(ids).detach()
    with torch.no_grad():
        expected = model(inputs_embeds=embeds, attention_mask=mask)
        later = model(ids, **memory_of(expected)).logits
    embeds = embeds.masked_fill(mask[..., None] == 0, garbage).requires_grad_(backend != "flex_attention")
    found = model(inputs_embeds=embeds, attention_mask=mask)
    close(found.logits[mask.bool()], expected.logits[mask.bool()])
    with torch.no_grad():
        close(model(ids, **memory_of(found)).logits, later)
    if embeds.requires_grad:
        found.logits[mask.bool()].sum().backward()
        assert embeds.grad.isfinite().all()


@torch.no_grad()
def test_states_that_overflowed_leave_the_memory(make_model, make_ids):
    model, ids = make_model(), make_ids(2, 4)
    mems = model(ids).mems
    assert mask_overflow(mems) is None
    mems[1][0, 2, 5] = torch.inf
    mask = mask_overflow(mems)
    assert torch.equal(mask, torch.tensor([[True, True, False, True], [True] * 4]))
    assert torch.equal(mask_overflow(mems, ~mask), torch.zeros(2, 4, dtype=torch.bool))
    # Where they are NaN too, the error names what gives the mask.
    with pytest.raises(ValueError, match="the states overflowed: txl_hf.mask_overflow"):
        model(ids, mems=(mems[0].masked_fill(~mask[..., None], torch.nan), *mems[1:]))
    assert txl_hf.mask_overflow is mask_overflow
    assert model(ids, mems=mems, mems_mask=mask).logits.isfinite().all()
    assert torch.equal(real_states(mems), torch.ones(2, 4, dtype=torch.bool)) and real_states(mems, mask) is mask


# --- what attention_mask means ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [3, 4, 6, 8, 9, 11])
@torch.no_grad()
def test_columns_of_a_mask_are_those_of_the_last_keys(make_model, make_ids, columns):
    """Whatever the numbers in the memory: it may be all zeros or have none; keys without a column are as they were."""
    model, ids = make_model(initial_memory="zeros"), make_ids(2, 3)
    context = torch.tensor([[1, 1, 0, 1, 1, 1], [1] * 6])
    memory = memory_of(model(make_ids(2, 6, seed=1), attention_mask=context))
    mask = torch.ones(2, columns, dtype=torch.long)
    # Not in front, where it would be padding.
    mask[1, max(0 if columns == 3 else 1, columns - 5)] = 0
    everything = torch.ones(2, 9, dtype=torch.long)
    shown = min(columns, 9)
    everything[:, 9 - shown :] = mask[:, -shown:]
    zeros = {"mems": tuple(torch.zeros_like(states) for states in memory["mems"]), "mems_mask": None}
    for given in (memory, zeros):
        expected = model(ids, **given, attention_mask=everything)
        found = model(ids, **given, attention_mask=mask)
        assert torch.equal(found.logits, expected.logits)


@torch.no_grad()
def test_without_zeros_before_the_text_a_mask_has_the_segment_or_all_keys(make_model, make_ids):
    model, ids = make_model(), make_ids(2, 3)
    memory = memory_of(model(make_ids(2, 4)))
    for columns in (4, 5, 6, 8):
        with pytest.raises(ValueError, match=rf"attention_mask is \(2, {columns}\).*\(2, 3\) or \(2, 7\)$"):
            model(ids, **memory, attention_mask=torch.ones(2, columns).long())
    full = memory_of(model(make_ids(2, 6)))
    with pytest.raises(ValueError, match=r"\(2, 3\) or \(2, 9\) or more columns"):
        model(ids, **full, attention_mask=torch.ones(2, 5).long())
    model(ids, **full, attention_mask=torch.ones(2, 20).long())


@torch.no_grad()
def test_a_mask_and_that_of_the_memory_hide_together(make_model, make_ids):
    model, ids = make_model("eager"), make_ids(1, 2)
    mems = model(make_ids(1, 4)).mems
    attended = model(
        ids,
        mems=mems,
        mems_mask=torch.tensor([[False, True, True, True]]),
        attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1]]),
        output_attentions=True,
    )
    assert torch.equal(attended.attentions[0][0, 0, 0] > 0, torch.tensor([False, True, False, True, True, False]))
    assert torch.equal(attended.mems_mask, torch.tensor([[False, True, False, True, True, True]]))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float])
def test_a_batch_without_rows_may_have_a_mask(make_model, dtype):
    model, ids = make_model(), torch.zeros(0, 6, dtype=torch.long)
    outputs = model(ids, labels=ids, attention_mask=torch.ones(0, 6, dtype=dtype))
    assert outputs.loss == 0 and outputs.mems[0].shape[0] == 0


@torch.no_grad()
def test_masks_of_ones_and_zeros_in_floating_point_are_taken(make_model, make_ids):
    """As PEFT writes them before the columns of its prompts."""
    model, ids = make_model(), make_ids(2, 4)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    assert torch.equal(model(ids, attention_mask=mask.float()).logits, model(ids, attention_mask=mask).logits)


# --- where the mask goes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["greedy", "beams", "no cache", "static", "lookup", "embeddings"])
def test_generate_goes_on_from_a_padded_memory(make_model, make_ids, kind):
    """Padding in the memory stays hidden at every step, in every beam and copy."""
    model = make_model(mem_len=12)
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=60)
    rows = 1 if kind == "lookup" else 2
    context, prompt = make_ids(rows, 4, seed=1), make_ids(rows, 3, seed=2)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])[:rows]
    with torch.no_grad():
        memory = memory_of(model(context, attention_mask=mask))
        alone = memory_of(model(context[:1, 2:]))
    options = {"max_new_tokens": 4, "do_sample": False} | {
        "beams": {"num_beams": 3, "num_return_sequences": 2},
        "no cache": {"use_cache": False},
        "static": {"cache_implementation": "static", "disable_compile": True},
        "lookup": {"prompt_lookup_num_tokens": 2},
    }.get(kind, {})
    inputs = (lambda ids: {"inputs_embeds": model.get_input_embeddings()(ids)}) if kind == "embeddings" else None
    inputs = inputs or (lambda ids: {"inputs": ids})
    text = model.generate(**inputs(prompt), **memory, **options)
    expected = model.generate(**inputs(prompt[:1]), **alone, **options)
    assert torch.equal(text[: len(expected)], expected)
    with pytest.raises(ValueError, match="mems_mask"):
        model.generate(**inputs(prompt), mems=memory["mems"], **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@torch.no_grad()
def test_a_memory_kept_in_another_precision_goes_on(padded, dtype):
    model, memory, more, expected = padded
    kept = {"mems": tuple(states.to(dtype) for states in memory["mems"]), "mems_mask": memory["mems_mask"]}
    outputs = model(more, **kept)
    close(outputs.logits, expected, 0.2)
    assert outputs.mems[0].dtype == torch.float32
    cached = model(more, **kept, use_cache=True)
    close(cached.logits, outputs.logits)


@torch.no_grad()
def test_changing_the_mask_of_an_output_changes_no_input(make_model, make_ids):
    model, ids = make_model(), make_ids(2, 4)
    mask = torch.tensor([[False, True, True, True], [True] * 4])
    outputs = model(ids, attention_mask=mask)
    outputs.mems_mask[1] = False
    assert mask[1].all()
    fresh = model(ids[1:])
    close(model(ids, **memory_of(outputs)).logits[1:], fresh.logits)


@torch.no_grad()
def test_values_put_into_a_cache_are_those_it_goes_on_with(make_model, make_ids):
    model, ids, more = make_model(), make_ids(2, 4), make_ids(2, 1, seed=1)
    caches = [model(ids, use_cache=True).past_key_values for _ in range(2)]
    for cache in caches:
        # So that there is a buffer with room.
        model(more, past_key_values=cache)
    for layer in caches[0].layers:
        layer.values = torch.zeros_like(layer.values)
    for layer in caches[1].layers:
        layer.keys, layer.values = layer.keys.clone(), torch.zeros_like(layer.values)
    found, expected = (model(more, past_key_values=cache).logits for cache in caches)
    assert torch.equal(found, expected)


@torch.no_grad()
def test_dropout_of_positions_is_drawn_anew_at_every_step_of_a_cache(make_model, make_ids):
    """Rollouts of reinforcement learning decode in training mode without gradients."""
    model, ids = make_model(dropout=0.5).train(), make_ids(1, 1)
    cache = model(make_ids(1, 4), use_cache=True).past_key_values
    drawn = []
    model.transformer.position_dropout.register_forward_hook(lambda *args: drawn.append(args[-1]))
    for _ in range(2):
        model(ids, past_key_values=cache)
    assert len(drawn) == 2 and not torch.equal(drawn[0][-4:], drawn[1][-4:])


# --- tokens that are taken back --------------------------------------------------------------------------------------

HIDDEN = {
    "padding": {"attention_mask": torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1], [1] * 8])},
    "documents": {"resets": torch.arange(8) == torch.tensor([[6], [-1]])},
}


@torch.no_grad()
def test_padding_in_a_cache_that_keeps_its_keys_elsewhere(make_model, make_ids):
    """As a quantised one does, whose keys are a tensor without dimensions to ask for."""

    class Elsewhere(DynamicLayer):
        def update(self, key_states, value_states, *args, **kwargs):
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
                self.kept = key_states[:, :, :0], value_states[:, :, :0]
            self.kept = tuple(
                torch.cat(pair, dim=2) for pair in zip(self.kept, (key_states, value_states), strict=True)
            )
            return self.kept

        def get_seq_length(self):
            return self.kept[0].shape[2] if self.is_initialized else 0

    model = make_model(mem_len=6, initial_memory="empty")
    cache = DynamicCache()
    cache.layers = [Elsewhere() for _ in range(model.config.n_layer)]
    expected = model(make_ids(2, 8), **HIDDEN["padding"])
    found = model(make_ids(2, 8), past_key_values=cache, use_cache=True, **HIDDEN["padding"])
    close(found.logits, expected.logits)


@torch.no_grad()
def test_a_memory_outlives_the_text_that_is_taken_back(make_model, make_ids):
    """A cache without any text counted as a new one, and lost the memory that it had begun from."""
    model, draft, token = make_model(mem_len=20), make_ids(1, 3), make_ids(1, 1)
    mems = model(make_ids(1, 8)).mems
    cache = model(draft, mems=mems, use_cache=True).past_key_values
    cache.crop(-3)
    for length in (1, 2):
        expected = model(token, mems=mems)
        close(model(token, past_key_values=cache, use_cache=True).logits, expected.logits)
        mems = expected.mems
        assert cache.get_seq_length() == length


# --- padding in front of a text that zero states precede -----------------------------------------------------------

ZEROS = {
    "plain": {},
    "same_length": {"same_length": True},
    "pre_lnorm": {"pre_lnorm": True},
    "clamp": {"clamp_len": 3},
    "decay": {"decay_len": 3},
    "shaw": {"attn_type": 1},
    "gated": {"gating": "gru", "gate_bias": 0.5},
    "ext_len": {"ext_len": 2},
}


def padded_rows(make_ids, lengths, width):
    """Texts of these lengths, padded on the left to a width; the tokens of the padding are none of the texts'."""
    texts = [make_ids(1, length, seed=length) for length in lengths]
    ids = torch.cat([F.pad(text, (width - text.shape[1], 0), value=60) for text in texts])
    mask = torch.cat([F.pad(torch.ones_like(text), (width - text.shape[1], 0)) for text in texts])
    return texts, ids, mask


@pytest.mark.parametrize("cuts", [[11], [4, 7], [1, 4, 6], [3, 1, 1, 6], [6, 1, 4]], ids=str)
@pytest.mark.parametrize("reads", ["mems", "cache", "static", "whole masks"])
@pytest.mark.parametrize("backend", ["eager", "sdpa", "txl_tiles"])
@pytest.mark.parametrize("changes", ZEROS.values(), ids=ZEROS)
@torch.no_grad()
def test_a_row_behind_padding_equals_the_row_alone_with_zeros_before_it(
    make_model, make_ids, changes, backend, reads, cuts
):
    """Whatever it is batched with, in whichever segment it begins, and in all that follows."""
    if reads != "mems" and "ext_len" in changes:
        pytest.skip("ext_len is for mems")
    model = make_model(backend, initial_memory="zeros", mem_len=6, **changes)
    for layer in model.transformer.layers:
        layer.self_attn_layer_norm.bias.normal_()
    texts, ids, mask = padded_rows(make_ids, (11, 7, 2, 4), 11)
    memory, seen, found = {}, 0, []
    if reads in ("cache", "static"):
        make = MemoryCache if reads == "cache" else StaticMemoryCache
        memory["past_key_values"] = make(model.config)
    for length in cuts:
        # With ext_len the last tokens are read again; their logits are those of the first time.
        again = min(seen, changes.get("ext_len", 0))
        columns = slice(0 if reads == "whole masks" else seen - again, seen + length)
        outputs = model(ids[:, seen - again : seen + length], attention_mask=mask[:, columns], **memory)
        found.append(outputs.logits[:, again:])
        memory = memory_of(outputs) if reads in ("mems", "whole masks") else memory
        seen += length
    found = torch.cat(found, dim=1)
    for row, text in enumerate(texts):
        past, seen = {}, ids.shape[1] - text.shape[1]
        begins, alone = seen, []
        ends = torch.tensor(cuts).cumsum(0).tolist()
        for end in (end for end in ends if end > begins):
            again = min(seen - begins, changes.get("ext_len", 0))
            outputs = model(ids[row : row + 1, seen - again : end], **past)
            alone.append(outputs.logits[:, again:])
            past, seen = memory_of(outputs), end
        close(found[row, begins:], torch.cat(alone, dim=1)[0])


@pytest.mark.parametrize("changes", [{}, {"same_length": True}, {"pre_lnorm": True}], ids=str)
def test_generate_writes_for_a_padded_row_what_it_writes_for_the_row_alone(make_model, make_ids, changes):
    model = make_model(initial_memory="zeros", mem_len=6, **changes)
    texts, ids, mask = padded_rows(make_ids, (9, 5, 1), 9)
    for options in ({}, {"num_beams": 2}, {"cache_implementation": "static"}, {"use_cache": False}):
        options |= {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 60}
        written = model.generate(ids, attention_mask=mask, **options)[:, 9:]
        for row, text in enumerate(texts):
            assert torch.equal(model.generate(text, **options)[0, text.shape[1] :], written[row])


@pytest.mark.parametrize("changes", [{}, {"pre_lnorm": True}], ids=str)
@pytest.mark.parametrize("read", [2, 4, 6])
def test_generate_goes_on_from_padding_before_zeros(make_model, make_ids, changes, read):
    """With the mask of the whole text beside the memory of its first part, from mems as from a cache."""
    model = make_model(initial_memory="zeros", mem_len=6, **changes)
    texts, ids, mask = padded_rows(make_ids, (6, 5, 1), 9)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 60}
    first = {"input_ids": ids[:, :read], "attention_mask": mask[:, :read]}
    memory = memory_of(model(**first))
    written = [model.generate(ids[:, read:], attention_mask=mask, **memory, **options)[:, 9 - read :]]
    for cache in (MemoryCache(model.config), StaticMemoryCache(model.config)):
        with torch.no_grad():
            model(**first, past_key_values=cache)
        written.append(model.generate(ids, attention_mask=mask, past_key_values=cache, **options)[:, 9:])
    for row, text in enumerate(texts):
        alone = model.generate(text, **options)[0, text.shape[1] :]
        assert all(torch.equal(of_batch[row], alone) for of_batch in written)


@pytest.mark.parametrize("make_cache", [MemoryCache, StaticMemoryCache])
@torch.no_grad()
def test_a_row_that_begins_anew_in_a_cache_sees_zero_states_or_is_refused(make_model, make_ids, make_cache):
    """With `pre_lnorm` the key of a zero state is that of the norm's bias, and was taken to be zero."""
    mask = torch.ones(2, 6 + 3)
    mask[0, :6] = 0
    for pre_lnorm in (False, True):
        model = make_model(initial_memory="zeros", mem_len=6, pre_lnorm=pre_lnorm)
        for layer in model.transformer.layers:
            layer.self_attn_layer_norm.bias.normal_()
        cache, kept = make_cache(model.config), make_cache(model.config)
        for each in (cache, kept):
            model(make_ids(2, 4), past_key_values=each)
        new = make_ids(2, 3, seed=1)
        if pre_lnorm:
            with pytest.raises(ValueError, match="begins a text behind keys that past_key_values hold already"):
                model(new, attention_mask=mask, past_key_values=cache)
            assert torch.equal(model(new, past_key_values=cache).logits, model(new, past_key_values=kept).logits)
        else:
            found = model(new, attention_mask=mask, past_key_values=cache).logits
            close(found[:1], model(new[:1]).logits)


def test_padding_before_zeros_gets_no_gradient_and_gives_none(make_model, make_ids):
    model = make_model(initial_memory="zeros", mem_len=6).train()
    (text, *_), ids, mask = padded_rows(make_ids, (5, 9), 9)
    gradients = []
    for inputs in (
        {"input_ids": text, "labels": text},
        {"input_ids": ids[:1], "attention_mask": mask[:1], "labels": ids[:1]},
    ):
        model.zero_grad()
        model(**inputs).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        close(gradients[1][name], gradient)
