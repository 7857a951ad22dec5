"""Every bad input gets an error that names it."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import DynamicCache, StaticCache

from txl_hf import (
    MemoryLengths,
    TransfoXLConfig,
    TransfoXLForCausalLM,
    TransfoXLForSequenceClassification,
    TransfoXLForTokenClassification,
)
from txl_hf.kernels.static_cache import StaticMemoryCache
from txl_hf.transfo_xl.cache_transfo_xl import MemoryCache

BAD_CONFIGS = {
    "odd d_model": ({"d_model": 15}, "d_model=15"),
    "decreasing cutoffs": ({"cutoffs": [30, 9]}, r"cutoffs=\[30, 9\]"),
    "repeated cutoffs": ({"cutoffs": [9, 9]}, r"cutoffs=\[9, 9\]"),
    "cutoffs beyond the vocabulary": ({"cutoffs": [9, 61]}, r"vocab_size=61; cutoffs=\[\] makes one bin"),
    "negative cutoff": ({"cutoffs": [-1, 9]}, "cutoffs"),
    "no width left": ({"div_val": 5}, "div_val=5.*bin 2.*d_embed=16"),
    "sampled softmax": ({"sample_softmax": 100}, "sample_softmax=100"),
    "decay of learned positions": ({"decay_len": 9, "attn_type": 1}, "decay_len=9 goes with attn_type=0, not 1"),
    "unknown attn_type": ({"attn_type": 4}, "attn_type=4"),
    "memory without recurrence": ({"attn_type": 2, "mem_len": 5}, "mem_len=5"),
    "unknown initial memory": ({"initial_memory": "full"}, "initial_memory='full'"),
    "unknown init": ({"init": "xavier"}, "init='xavier'"),
    "negative memory": ({"mem_len": -1}, "mem_len=-1"),
    "no layers": ({"n_layer": 0}, "n_layer=0"),
    "epsilon that is no number": ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon=nan"),
    "negative epsilon": ({"layer_norm_epsilon": -1.0}, r"layer_norm_epsilon=-1\.0"),
    "infinite weights": ({"init_std": float("inf")}, "init_std=inf"),
    "end of text outside the vocabulary": ({"eos_token_id": 10**9}, r"eos_token_id=1000000000.*\[0, 61\)"),
    "one of several ends outside": ({"eos_token_id": [3, 61]}, r"eos_token_id=\[3, 61\].*\[0, 61\)"),
    "padding outside the vocabulary": ({"pad_token_id": -1}, "pad_token_id=-1"),
    "dropout that is no number": ({"dropout": float("nan")}, "dropout=nan"),
    "dropout beyond 1": ({"dropout": 1.5}, "dropout=1.5"),
    "heads that do not fill the width": ({"attn_type": 3, "mem_len": 0, "d_head": 7}, "d_head=7.*d_model=16"),
    "wrong tie_projs": ({"tie_projs": [False, True]}, "tie_projs.*3 bins"),
    "fewer tokens than none": ({"vocab_size": -1}, "vocab_size=-1 must be at least 0"),
    "no positions": ({"attn_type": 1, "max_klen": 0}, "max_klen=0 must be at least 1"),
    "no positions by default": ({"attn_type": 1, "tgt_len": 0, "mem_len": 0}, "tgt_len . ext_len . mem_len.* all 0"),
    "a width that is no integer, by its other name": ({"hidden_size": 8.0}, r"hidden_size=8\.0 must be an integer"),
    "layers that are a word": ({"num_hidden_layers": "2"}, "num_hidden_layers='2' must be an integer"),
    "a vocabulary that is no number": ({"n_token": True}, "n_token=True must be an integer"),
    "vectors of no width": ({"vocab_size": 0, "input_size": 0}, "input_size=0 must be at least 1"),
    "vectors beside tokens": ({"input_size": 8}, "input_size=8.*vocab_size=61"),
    "unknown gates": ({"gating": "lstm"}, "gating='lstm' must be None or 'gru'"),
    "gates that are always open": ({"gate_bias": float("inf")}, "gate_bias=inf"),
}


@pytest.mark.parametrize("changes, message", BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_a_configuration_that_will_not_do_is_named(make_config, changes, message):
    with pytest.raises(ValueError, match=message):
        make_config(**changes)


def test_an_unknown_problem_is_named(make_config):
    """By transformers 5.17 itself, whose type of the field lists them."""
    with pytest.raises((ValueError, StrictDataclassFieldValidationError), match="problem_type.*ranking"):
        make_config(problem_type="ranking")


@pytest.mark.parametrize("problem_type", ["regression", "multi_label_classification"])
def test_a_head_that_tells_one_class_of_each_token_has_no_other_problem(make_config, problem_type):
    with pytest.raises(ValueError, match=f"one class of each token, but problem_type='{problem_type}'"):
        TransfoXLForTokenClassification(make_config(problem_type=problem_type))
    TransfoXLForTokenClassification(make_config(problem_type="single_label_classification"))


def test_labels_of_one_class_teach_nothing(make_config):
    model = TransfoXLForTokenClassification(make_config(num_labels=1)).eval()
    ids = torch.ones(2, 5, dtype=torch.long)
    assert model(ids).logits.shape == (2, 5, 1), "which a loss of one's own may take for numbers"
    with pytest.raises(ValueError, match="labels of num_labels=1 teach nothing"):
        model(ids, labels=torch.zeros_like(ids))


def test_overriding_with_a_bad_value(make_model, tmp_path):
    make_model().save_pretrained(tmp_path)
    with pytest.raises(StrictDataclassFieldValidationError, match="mem_len"):
        TransfoXLConfig.from_pretrained(tmp_path, mem_len="long")


def mems_of(length=3, batch=2, width=16, layers=2, dtype=torch.float32):
    return tuple(torch.randn(batch, length, width, dtype=dtype) for _ in range(layers))


BAD_INPUTS = (
    {
        "neither ids nor embeds": ({"input_ids": None}, "exactly one of input_ids and inputs_embeds"),
        "both ids and embeds": (
            {"inputs_embeds": torch.zeros(2, 5, 16)},
            "exactly one of input_ids and inputs_embeds",
        ),
        "no tokens": (
            {"input_ids": torch.zeros(2, 0, dtype=torch.long)},
            r"input_ids are \(2, 0\).*at least one token",
        ),
        "ids of one dimension": (
            {"input_ids": torch.zeros(5, dtype=torch.long)},
            r"input_ids are \(5,\), not \(B, L\)",
        ),
        "embeds of two dimensions": (
            {"input_ids": None, "inputs_embeds": torch.zeros(5, 16)},
            r"\(5, 16\), not \(B, L, D\)",
        ),
        "narrow embeds": ({"input_ids": None, "inputs_embeds": torch.zeros(2, 5, 8)}, "8 wide, not d_model=16"),
        "mems of fewer layers": ({"mems": mems_of(layers=1)}, "mems hold 1 layers.*n_layer=2"),
        "mems in one tensor": (
            {"mems": torch.zeros(2, 2, 3, 16)},
            r"mems are one tensor, \(2, 2, 3, 16\), not a tuple .*: give tuple\(mems\)",
        ),
        "mems of another width": ({"mems": mems_of(width=8)}, r"mems\[0\] is \(2, 3, 8\).*\(2, m, 16\)"),
        "mems of another batch": ({"mems": mems_of(batch=3)}, r"mems\[0\] is \(3, 3, 16\)"),
        "mems that are no states": ({"mems": tuple(m.int() for m in mems_of())}, r"mems\[0\] is torch.int32"),
        "a mask without its mems": (
            {"mems_mask": torch.ones(2, 3, dtype=torch.bool)},
            "mems_mask .* without the mems",
        ),
        "a mask of other mems": (
            {"mems": mems_of(), "mems_mask": torch.ones(2, 4, dtype=torch.bool)},
            r"mems_mask is \(2, 4\).*\(2, 3\) bool",
        ),
        "a memory's mask of numbers": (
            {"mems": mems_of(), "mems_mask": torch.ones(2, 3)},
            "mems_mask .*float32.* bool",
        ),
        "padding without its mask": (
            {"mems": tuple(m.index_fill(1, torch.tensor(1), torch.nan) for m in mems_of())},
            "mems hold NaN, in row 0 at state 1 first, but no mems_mask",
        ),
        "a mask that is added": (
            {"attention_mask": torch.tensor([[0.0, -torch.inf, 0.0, 0.0, 0.0]] * 2)},
            "attention_mask is torch.float32.*added",
        ),
        "a mask that is added and hides nothing": ({"attention_mask": torch.zeros(2, 5)}, "attention_mask.*added"),
        "mems too long": ({"mems": mems_of(length=7)}, "7 states.*6"),
        "mask too short": ({"attention_mask": torch.ones(2, 4)}, r"attention_mask is \(2, 4\).*\(2, 5\)"),
        "mask too long": ({"attention_mask": torch.ones(2, 9)}, r"attention_mask is \(2, 9\).*\(2, 5\)"),
        "mask between": ({"attention_mask": torch.ones(2, 7), "mems": mems_of()}, r"\(2, 5\) or \(2, 8\)"),
        "mask of another batch": ({"attention_mask": torch.ones(1, 5)}, r"attention_mask is \(1, 5\)"),
        "mask of four dimensions": ({"attention_mask": torch.ones(2, 1, 5, 5)}, r"\(2, 1, 5, 5\)"),
        "labels beyond the vocabulary": ({"labels": torch.full((2, 5), 61)}, r"labels holds 61.*\[0, 61\)"),
        "labels below": ({"labels": torch.full((2, 5), -1)}, "labels holds -1"),
        "labels that are no ids": ({"labels": torch.zeros(2, 5)}, "labels are torch.float32, not token ids"),
        "labels of another shape": ({"labels": torch.zeros(2, 4, dtype=torch.long)}, r"labels are \(2, 4\)"),
        "labels of a longer text": ({"labels": torch.zeros(2, 6, dtype=torch.long)}, r"labels are \(2, 6\).*\(2, 5\)"),
        "labels that are bits": (
            {"labels": torch.zeros(2, 5, dtype=torch.bool)},
            "labels are torch.bool, not token ids",
        ),
        "shift_labels of another shape": (
            {"shift_labels": torch.zeros(2, 4, dtype=torch.long)},
            r"shift_labels are \(2, 4\)",
        ),
    }
    | {
        f"{name} that are a list": ({name: [[1] * 5] * 2}, rf"^{name} must be a torch.Tensor, not builtins.list$")
        for name in ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids", "seq_idx")
    }
    | {
        "vectors of NumPy": (
            {"input_ids": None, "inputs_embeds": torch.zeros(2, 5, 16).numpy()},
            "inputs_embeds must be a torch.Tensor, not numpy.ndarray",
        ),
        "mems of NumPy": (
            {"mems": tuple(states.numpy() for states in mems_of())},
            r"mems\[0\] must be a torch.Tensor, not numpy.ndarray",
        ),
        "a memory's mask that is a list": (
            {"mems": mems_of(), "mems_mask": [[True] * 3] * 2},
            "mems_mask must be a torch.Tensor, not builtins.list",
        ),
    }
)


@pytest.mark.parametrize("changes, message", BAD_INPUTS.values(), ids=BAD_INPUTS)
@pytest.mark.parametrize("bins", [{}, {"cutoffs": [], "div_val": 1}], ids=["cutoffs", "no-cutoffs"])
def test_an_input_that_will_not_do_is_named(make_model, make_ids, bins, changes, message):
    with pytest.raises(ValueError, match=message):
        make_model(**bins)(**({"input_ids": make_ids(2, 5)} | changes))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"inputs_embeds": torch.randn(5, 16)}, r"inputs_embeds are \(5, 16\)"),
        ({"input_ids": torch.zeros(2, 5, 1, dtype=torch.long)}, r"input_ids are \(2, 5, 1\)"),
        ({"input_ids": torch.zeros(2, 5, dtype=torch.long), "inputs_embeds": torch.randn(2, 5, 16)}, "exactly one of"),
        ({}, "exactly one of"),
    ],
    ids=["vectors", "ids", "both", "none"],
)
def test_inputs_that_will_not_do_are_named_before_labels(make_model, inputs, message):
    with pytest.raises(ValueError, match=message):
        make_model()(**inputs, labels=torch.arange(5))


@pytest.mark.parametrize("name", ["input_ids", "inputs_embeds", "attention_mask"])
@pytest.mark.parametrize(
    "head", [TransfoXLForCausalLM, TransfoXLForSequenceClassification, TransfoXLForTokenClassification]
)
def test_a_list_is_named_beside_labels_too(make_model, make_ids, head, name):
    """A head looks at what counts before the model does."""
    ids = make_ids(2, 5)
    labels = ids[:, 0] % 2 if head is TransfoXLForSequenceClassification else ids % 2
    given = {"input_ids": None if name == "inputs_embeds" else ids, name: [[1] * 5] * 2}
    with pytest.raises(ValueError, match=rf"^{name} must be a torch.Tensor, not builtins.list$"):
        make_model(model_class=head, pad_token_id=60)(**given, labels=labels)


@pytest.mark.parametrize("bins", [{}, {"cutoffs": [], "div_val": 1}], ids=["cutoffs", "no-cutoffs"])
@pytest.mark.parametrize("token", [61, -1])
def test_ids_outside_the_vocabulary(make_model, bins, token):
    with pytest.raises(IndexError, match=f"input_ids holds {token}"):
        make_model(**bins)(torch.tensor([[1, token]]))


@pytest.mark.parametrize("name", ["input_ids", pytest.param("labels", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "bins",
    [{}, pytest.param({"cutoffs": [], "div_val": 1}, marks=pytest.mark.slow)],
    ids=["cutoffs", "no-cutoffs"],
)
def test_a_compiled_call_looks_at_ids_and_labels(make_model, make_ids, bins, name):
    """A cluster takes an id that is not its own for its first or last."""
    torch.compiler.reset()
    model, ids = make_model(n_layer=1, **bins), make_ids(1, 4)
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
    given = {"input_ids": ids, "labels": ids}
    torch.testing.assert_close(compiled(**given).loss, model(**given).loss)
    for token in (61, -5):
        with pytest.raises(RuntimeError, match=rf"{name} outside the vocabulary \[0, 61\)"):
            compiled(**given | {name: torch.cat([ids[:, :3], torch.tensor([[token]])], 1)})


def test_compiled_calls_of_vmap_look_at_no_ids(make_model, make_ids):
    torch.compiler.reset()
    model, ids = make_model(n_layer=1).requires_grad_(False), make_ids(6, 4).view(3, 2, 4)
    many = torch.func.vmap(lambda ids: model(ids, use_cache=False).logits)
    compiled = torch.compile(many, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids), many(ids))


def test_memory_given_twice_or_to_a_model_without(make_model, make_ids):
    model = make_model()
    ids = make_ids(2, 3)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="mems or past_key_values"):
        model(ids, mems=model(ids).mems, past_key_values=cache)
    with pytest.raises(ValueError, match=r"attention_mask is \(2, 4\).*\(2, 3\) or \(2, 6\)"):
        model(ids, past_key_values=cache, attention_mask=torch.ones(2, 4))
    short = make_model(mem_len=0)
    with pytest.raises(ValueError, match="mems were given, but mem_len=0"):
        short(ids, mems=mems_of())
    with pytest.raises(ValueError, match="past_key_values.*mem_len=0"):
        short(ids, past_key_values=cache)


@pytest.mark.parametrize(
    "make_cache",
    [MemoryCache, lambda config: DynamicCache(), lambda config: StaticCache(config, 7), StaticMemoryCache],
    ids=["MemoryCache", "DynamicCache", "StaticCache", "StaticMemoryCache"],
)
@pytest.mark.parametrize(("rows", "batch"), [(2, 1), (1, 2), (3, 2)], ids=str)
@torch.no_grad()
def test_a_cache_of_another_number_of_rows_is_refused(make_model, make_ids, make_cache, rows, batch):
    """A row alone would be written into all of them."""
    model = make_model()
    cache = make_cache(model.config)
    model(make_ids(rows, 5), past_key_values=cache)
    before = [layer.keys.clone() for layer in cache.layers]
    message = f"past_key_values hold a memory of {rows} rows, but this batch has {batch}: .*reorder_cache"
    for length in (1, 3):
        with pytest.raises(ValueError, match=message):
            model(make_ids(batch, length), past_key_values=cache)
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))
    cache.reorder_cache(torch.arange(batch) % rows)
    assert model(make_ids(batch, 1), past_key_values=cache).logits.shape == (batch, 1, 61)


CACHES = {
    "MemoryCache": MemoryCache,
    "DynamicCache": lambda config: DynamicCache(config=config),
    "StaticCache": lambda config: StaticCache(config, config.mem_len + 1),
    "StaticMemoryCache": StaticMemoryCache,
}


@pytest.mark.parametrize("make_cache", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("is_filled", [False, True], ids=["empty", "filled"])
@torch.no_grad()
def test_a_cache_of_less_than_the_memory_of_the_call_is_refused(make_model, make_ids, make_cache, is_filled):
    """The call would read without the states that the cache does not keep, and mems would grow without end."""
    model, ids, longer = make_model(), make_ids(1, 5), MemoryLengths(mem_len=9)
    cache = make_cache(model.config)
    if is_filled:
        model(ids, past_key_values=cache)
    with pytest.raises(
        ValueError, match=r"past_key_values keep 6 keys, but this call has mem_len=9: .*\(model.config, 9\)"
    ):
        model(ids, past_key_values=cache, lengths=longer)
    if not is_filled:
        with pytest.raises(ValueError, match="keep 6 keys"):
            model.generate(ids, past_key_values=cache, lengths=longer, max_new_tokens=3)
    shorter = model(ids, past_key_values=cache, lengths=MemoryLengths(mem_len=4))
    assert shorter.logits.isfinite().all()


@pytest.mark.parametrize("make_cache", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layer": 1}, "have 2 layers, but the model has n_layer=1"),
        ({"n_layer": 3}, "have 2 layers, but the model has n_layer=3"),
        ({"n_head": 2, "d_head": 8}, "hold keys of 4 heads of 4, but the model has n_head=2 and d_head=8"),
    ],
    ids=["fewer-layers", "more-layers", "other-heads"],
)
@torch.no_grad()
def test_a_cache_of_another_model_is_refused(make_model, make_ids, make_cache, changes, message):
    """As its mems would be: of fewer layers, it was read without a word."""
    model, ids = make_model(n_layer=2, n_head=4, d_head=4), make_ids(1, 5)
    cache = model(ids, past_key_values=make_cache(model.config)).past_key_values
    other = make_model(**{"n_layer": 2, "n_head": 4, "d_head": 4} | changes)
    with pytest.raises(ValueError, match=f"past_key_values {message}"):
        other(ids, past_key_values=cache)


@pytest.mark.parametrize("make_cache", CACHES.values(), ids=CACHES)
@torch.no_grad()
def test_a_cache_of_another_type_is_refused(make_model, make_ids, make_cache):
    """But for a growing one where autocast begins or ends: it holds the wider type from then on."""
    model, ids = make_model(), make_ids(1, 5)
    cache = model(ids, past_key_values=make_cache(model.config)).past_key_values
    with torch.autocast("cpu", torch.bfloat16):
        if not cache.is_compileable:
            assert model(ids, past_key_values=cache).logits.isfinite().all()
        else:
            with pytest.raises(
                ValueError, match="hold keys of torch.float32, but the model computes in torch.bfloat16"
            ):
                model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="hold keys of torch.float32, but the model computes in torch.bfloat16 here"):
        make_model().bfloat16()(ids, past_key_values=cache)
    cache = make_cache(model.config)
    with torch.autocast("cpu", torch.bfloat16):
        model(ids, past_key_values=cache)
        model(ids, past_key_values=cache)
    if cache.is_compileable:
        with pytest.raises(ValueError, match="hold keys of torch.bfloat16, but the model computes in torch.float32"):
            model(ids, past_key_values=cache)
    else:
        assert model(ids, past_key_values=cache).logits.isfinite().all()


@pytest.mark.parametrize("make_cache", CACHES.values(), ids=CACHES)
def test_a_static_cache_is_not_taken_out_of_inference_mode(make_model, make_ids, make_cache):
    model, ids = make_model(), make_ids(1, 5)
    cache = make_cache(model.config)
    with torch.inference_mode():
        model(ids, past_key_values=cache)
    if cache.is_compileable:
        with pytest.raises(ValueError, match="filled within torch.inference_mode"), torch.no_grad():
            model(ids, past_key_values=cache)
    else:
        with torch.no_grad():
            assert model(ids, past_key_values=cache).logits.isfinite().all()


def test_classes_that_a_classifier_does_not_have(make_model, make_ids):
    model = make_model(model_class=TransfoXLForSequenceClassification, num_labels=3, pad_token_id=60)
    with pytest.raises(ValueError, match=r"labels .*5.*\[0, 3\)"):
        model(make_ids(2, 4), labels=torch.tensor([1, 5]))
    assert model(make_ids(2, 4), labels=torch.tensor([1, -100])).loss.isfinite()


def test_classifier_without_a_way_to_see_padding(make_model, make_ids):
    model = make_model(model_class=TransfoXLForSequenceClassification)
    assert model(make_ids(1, 5)).logits.shape == (1, 2)
    with pytest.raises(ValueError, match="attention_mask.*pad_token_id"):
        model(make_ids(2, 5))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.zeros(3, dtype=torch.long), r"labels are \(3,\), but 2 rows need \(2,\), or \(2, 4\)"),
        (torch.zeros(2, 5, dtype=torch.long), r"labels are \(2, 5\), but 2 rows need"),
        ([0, 1], "labels must be a torch.Tensor, not builtins.list"),
    ],
    ids=["of another batch", "of tokens", "a list"],
)
def test_labels_that_a_classifier_of_texts_cannot_have(make_model, make_ids, labels, message):
    model = make_model(model_class=TransfoXLForSequenceClassification, num_labels=4, pad_token_id=0)
    with pytest.raises(ValueError, match=message):
        model(make_ids(2, 5), labels=labels)


@pytest.mark.parametrize(
    ("problem", "labels", "message"),
    [
        ("regression", torch.ones(2), r"labels are \(2,\), but 2 rows need \(2, 2\)"),
        ("regression", torch.ones(2, 1), r"labels are \(2, 1\), but 2 rows need \(2, 2\)"),
        ("multi_label_classification", torch.ones(2), r"2 rows need \(2, 2\)"),
        ("single_label_classification", torch.ones(2, 2), r"2 rows need \(2,\)$"),
        ("single_label_classification", torch.ones(2), "labels are torch.float32, but classes are integers"),
        (None, torch.tensor([True, False]), "labels are torch.bool, but classes are integers"),
    ],
)
def test_labels_that_do_not_fit_the_problem(make_model, make_ids, problem, labels, message):
    """One number would be fitted to all outputs, or one row's label to an output of every row."""
    model = make_model(
        model_class=TransfoXLForSequenceClassification, num_labels=2, problem_type=problem, pad_token_id=0
    )
    with pytest.raises(ValueError, match=message):
        model(make_ids(2, 5), labels=labels)


def test_one_class_of_many_possible_is_a_number_in_a_row(make_model, make_ids):
    options = {"num_labels": 1, "problem_type": "multi_label_classification", "pad_token_id": 0}
    model = make_model(model_class=TransfoXLForSequenceClassification, **options)
    with pytest.raises(ValueError, match=r"labels are \(2,\), but 2 rows need \(2, 1\)"):
        model(make_ids(2, 5), labels=torch.ones(2))
    assert model(make_ids(2, 5), labels=torch.ones(2, 1)).loss.isfinite()


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.bool, torch.float32])
def test_ids_of_another_type(make_model, make_ids, dtype):
    with pytest.raises(ValueError, match=f"input_ids are {dtype}, not torch.long or torch.int"):
        make_model()(make_ids(1, 5).to(dtype))


def test_unknown_backend(make_model):
    for name in ("flash_attention_2", "nope"):
        with pytest.raises(
            ValueError, match=f"attn_implementation='{name}'.* one of auto, eager, sdpa, flex_attention"
        ):
            make_model().set_attn_implementation(name)


@pytest.mark.parametrize("name", ["auto", "eager", "sdpa", "txl_tiles", "txl_triton"])
def test_every_backend_can_be_chosen_when_loading_and_later(make_model, make_ids, tmp_path, name):
    model = make_model()
    with torch.no_grad():
        expected = model(make_ids(1, 4)).logits
        model.set_attn_implementation(name)
        torch.testing.assert_close(model(make_ids(1, 4)).logits, expected, atol=1e-5, rtol=1e-5)
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path, attn_implementation=name).eval()
        assert loaded.config._attn_implementation == name
        torch.testing.assert_close(loaded(make_ids(1, 4)).logits, expected, atol=1e-5, rtol=1e-5)
