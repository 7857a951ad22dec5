"""Habits of those who come from other models: tables of one's own, shifted labels, the legacy class's names, and calls
that fail."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BatchEncoding, Trainer, TrainingArguments

from txl_hf import (
    MemoryLengths,
    TransfoXLForCausalLM,
    TransfoXLForSequenceClassification,
    TransfoXLForTokenClassification,
)
from txl_hf.kernels.static_cache import StaticMemoryCache
from txl_hf.transfo_xl import adaptive_transfo_xl as adaptive
from txl_hf.transfo_xl import modeling_transfo_xl as modeling
from txl_hf.transfo_xl.cache_transfo_xl import MemoryCache

ONE_TABLE = {"cutoffs": [], "div_val": 1}


@pytest.fixture
def warnings_of(monkeypatch):
    """The warnings that are given once."""
    found = []
    for module in (modeling, adaptive):
        monkeypatch.setattr(module.logger, "warning_once", lambda message, *_: found.append(message))
    return found


# --- tables of one's own ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_a_table_of_ones_own_is_used_tied_and_saved(make_model, make_ids, tmp_path, tied):
    model, ids = make_model(tie_word_embeddings=tied, **ONE_TABLE), make_ids(2, 5)
    table, before = nn.Embedding(61, 16), model.lm_head.out_layers[0].weight
    model.set_input_embeddings(table)
    assert model.get_input_embeddings().emb_layers[0].weight is table.weight
    assert (model.lm_head.out_layers[0].weight is table.weight) == tied
    assert tied or model.lm_head.out_layers[0].weight is before
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(TransfoXLForCausalLM.from_pretrained(tmp_path)(ids).logits, expected)


@torch.no_grad()
def test_an_output_layer_of_ones_own_is_used_and_saved(make_model, make_ids, tmp_path):
    model, ids = make_model(tie_word_embeddings=False, **ONE_TABLE), make_ids(2, 5)
    layer = nn.Linear(16, 61)
    model.set_output_embeddings(layer)
    states = model.transformer(ids).last_hidden_state
    expected = layer(states).log_softmax(-1)
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)
    model.save_pretrained(tmp_path)
    loaded = TransfoXLForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(ids).logits, expected, atol=1e-5, rtol=1e-5)
    loaded.resize_token_embeddings(70)
    assert loaded(ids).logits.shape[-1] == 70


@pytest.mark.parametrize("changes", [{}, ONE_TABLE | {"d_embed": 8}, ONE_TABLE], ids=["bins", "projection", "size"])
def test_a_table_that_does_not_fit_is_refused_and_the_model_is_as_it_was(make_model, make_ids, changes):
    model, ids = make_model(**changes), make_ids(2, 5)
    expected = model(ids).logits
    with pytest.raises(ValueError, match=r"set_input_embeddings was given a table of \(60, 16\).*resize_token"):
        model.set_input_embeddings(nn.Embedding(60, 16))
    with pytest.raises(ValueError, match=r"set_output_embeddings was given a table of \(60, 16\)"):
        model.set_output_embeddings(nn.Linear(16, 60))
    assert torch.equal(model(ids).logits, expected)


# --- labels and outputs ----------------------------------------------------------------------------------------------


def test_labels_that_are_shifted_already_are_told_of(make_model, make_ids, warnings_of):
    model, text = make_model().train(), make_ids(2, 9)
    model(text, labels=text)
    model(text[:, :-1], shift_labels=text[:, 1:])
    model(torch.ones_like(text), labels=torch.ones_like(text))
    assert not warnings_of
    model(text[:, :-1], labels=text[:, 1:])
    assert len(warnings_of) == 1 and "give them as shift_labels" in warnings_of[0]


def test_modules_and_ties_have_their_legacy_names(make_model, make_config):
    model = make_model()
    assert model.crit is model.lm_head and model.transformer.word_emb is model.transformer.embed_tokens
    assert not [name for name in model.state_dict() if "crit" in name or "word_emb" in name]
    assert model.config.tie_weight and not make_config(tie_weight=False).tie_word_embeddings
    model.config.tie_weight = False
    assert not model.config.tie_word_embeddings and "tie_weight" not in model.config.to_dict()


def test_logits_come_beside_a_loss_in_evaluation_mode_where_they_are_small(
    make_model, make_ids, monkeypatch, warnings_of
):
    model, ids = make_model(), make_ids(2, 6)
    expected = model(ids).logits
    outputs = model(ids, labels=ids)
    torch.testing.assert_close(outputs.logits, expected)
    assert outputs.prediction_scores is outputs.logits
    assert model(ids, labels=ids, output_logits=False).logits is None and model.train()(ids, labels=ids).logits is None
    model.eval()
    monkeypatch.setattr(modeling, "MOST_LOGITS", 2 * 5 * 61 * 4 - 1)
    assert model(ids, labels=ids).logits is None
    assert len(warnings_of) == 1 and "output_logits=True" in warnings_of[0]
    torch.testing.assert_close(model(ids, labels=ids).loss, outputs.loss)


def test_plain_trainer_has_metrics_of_a_model_with_cutoffs(make_model, make_ids, tmp_path):
    """As run_clm.py computes them; it ended in an IndexError after the training."""
    items = [{"input_ids": ids, "labels": ids} for ids in make_ids(4, 8)]
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True)

    def accuracy(given):
        predictions, labels = given
        return {"accuracy": float((predictions[:, :-1] == labels[:, 1:]).mean())}

    trainer = Trainer(
        make_model(),
        arguments,
        eval_dataset=items,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: (
            logits[0] if isinstance(logits, tuple) else logits
        ).argmax(-1),
    )
    assert 0 <= trainer.evaluate()["eval_accuracy"] <= 1


@torch.no_grad()
def test_what_was_asked_for_is_the_last_output_where_a_batch_is_padded(make_model, make_ids):
    model, ids = make_model(), make_ids(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    for asked in ({"output_attentions": True}, {"output_hidden_states": True}):
        for labels in (None, ids):
            last = model(ids, attention_mask=mask, labels=labels, **asked)[-1]
            assert isinstance(last, tuple) and len(last) == 2 + ("output_hidden_states" in asked)


# --- calls that fail -------------------------------------------------------------------------------------------------

WRONG = {
    "labels outside": {"labels": torch.full((2, 3), 61)},
    "labels below": {"labels": torch.full((2, 3), -7)},
    "labels of another shape": {"labels": torch.zeros(2, 4, dtype=torch.long)},
    "labels of floats": {"labels": torch.zeros(2, 3)},
    "shift_labels outside": {"shift_labels": torch.full((2, 3), 99)},
    "a list of labels": {"labels": [[1, 2, 3]]},
    "num_items_in_batch": {"labels": torch.zeros(2, 3, dtype=torch.long), "num_items_in_batch": "many"},
    "logits_to_keep": {"logits_to_keep": torch.tensor([0, 7])},
    "logits_to_keep of a name": {"logits_to_keep": "all"},
    "a mask of another width": {"attention_mask": torch.ones(2, 2)},
    "a mask of documents": {"attention_mask": torch.tensor([[1, 1, 2], [1, 2, 3]])},
    "resets of another shape": {"resets": torch.zeros(2, 4, dtype=torch.bool)},
    "positions that leave some out": {"position_ids": torch.tensor([[0, 2, 3], [0, 1, 2]])},
    "lengths": {"lengths": 3},
    "lengths below nought": {"lengths": MemoryLengths(mem_len=-1)},
    "a memory beside the cache": {"mems": (torch.zeros(2, 1, 16),) * 2},
    "a memory's mask beside the cache": {"mems_mask": torch.ones(2, 1, dtype=torch.bool)},
    "an unknown keyword": {"mem": None, "memories": 3},
    "two inputs": {"inputs_embeds": torch.zeros(2, 3, 16)},
    "no causal attention": {"is_causal": False},
}


@torch.no_grad()
def test_a_cache_of_a_call_that_ended_inside_the_layers_is_refused(make_model, make_ids):
    model, cache = make_model(), MemoryCache(make_model().config)
    model(make_ids(2, 4), past_key_values=cache)
    hook = model.transformer.layers[1].register_forward_pre_hook(lambda *_: exec("raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        model(make_ids(2, 3), past_key_values=cache)
    hook.remove()
    with pytest.raises(ValueError, match="ended inside the layers"):
        model(make_ids(2, 3), past_key_values=cache)
    cache.reset()
    again = model(make_ids(2, 3), past_key_values=cache).logits
    torch.testing.assert_close(again, model(make_ids(2, 3)).logits)


@torch.no_grad()
def test_a_cache_that_was_cropped_by_a_tensor_is_whole(make_model, make_ids):
    """Assisted decoding of transformers 5.17 counts the tokens to remove by a tensor."""
    model, ids, read = make_model(), make_ids(1, 9), []
    for removed in (-2, torch.tensor(-2)):
        cache = MemoryCache(model.config)
        cache.activate_past_recording()
        model(ids, past_key_values=cache)
        cache.crop(removed)
        read.append(model(ids[:, -2:], past_key_values=cache).logits)
    assert torch.equal(*read)


@pytest.mark.parametrize("make_cache", [MemoryCache, StaticMemoryCache])
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@torch.no_grad()
def test_a_call_that_raises_leaves_cache_model_and_configuration_as_they_were(make_model, make_ids, wrong, make_cache):
    model, text, more = make_model(), make_ids(2, 5), make_ids(2, 3, seed=1)
    cache, expected = make_cache(model.config), make_cache(model.config)
    for each in (cache, expected):
        model(text, past_key_values=each)
    config, weights = copy.deepcopy(model.config.to_dict()), copy.deepcopy(model.state_dict())
    with pytest.raises((ValueError, TypeError, IndexError)):
        model(more, past_key_values=cache, **wrong)
    assert model.config.to_dict() == config
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    found = model(more, past_key_values=cache).logits
    assert torch.equal(found, model(more, past_key_values=expected).logits)


CLASSES = {"labels": torch.tensor([0, 1])}
OF_CLASSIFIERS = {
    "a class outside": (TransfoXLForSequenceClassification, {"labels": torch.tensor([0, 9])}),
    "classes of another shape": (TransfoXLForSequenceClassification, {"labels": torch.zeros(3, dtype=torch.long)}),
    "classes of floats": (TransfoXLForSequenceClassification, {"labels": torch.zeros(2)}),
    "a number of items": (TransfoXLForSequenceClassification, CLASSES | {"num_items_in_batch": "many"}),
    "rows that may be padded": (TransfoXLForSequenceClassification, {"attention_mask": None}),
    "a token's class outside": (TransfoXLForTokenClassification, {"labels": torch.full((2, 3), 9)}),
    "labels of another shape": (TransfoXLForTokenClassification, {"labels": torch.zeros(2, 4, dtype=torch.long)}),
    "labels of floats": (TransfoXLForTokenClassification, {"labels": torch.zeros(2, 3)}),
    "items of tokens": (
        TransfoXLForTokenClassification,
        {"labels": torch.zeros(2, 3, dtype=torch.long), "num_items_in_batch": [3]},
    ),
}


@pytest.mark.parametrize("make_cache", [MemoryCache, StaticMemoryCache])
@pytest.mark.parametrize(("head", "wrong"), OF_CLASSIFIERS.values(), ids=OF_CLASSIFIERS)
@torch.no_grad()
def test_a_call_of_a_classifier_that_raises_leaves_its_cache(make_model, make_ids, head, wrong, make_cache):
    model, text, more = make_model(model_class=head, num_labels=3), make_ids(2, 5), make_ids(2, 3, seed=1)
    cache, expected = make_cache(model.config), make_cache(model.config)
    given = {"attention_mask": torch.ones(2, 3)}
    for each in (cache, expected):
        model(text, attention_mask=torch.ones(2, 5), past_key_values=each)
    with pytest.raises(ValueError):
        model(more, past_key_values=cache, **given | wrong)
    found = model(more, past_key_values=cache, **given).logits
    assert torch.equal(found, model(more, past_key_values=expected, **given).logits)


def test_an_early_exit_is_refused_before_anything_is_changed(make_model, make_ids):
    """transformers writes the number of layers into the model's configuration, and leaves it there after an error."""
    model = make_model(n_layer=3)
    with pytest.raises(ValueError, match="assistant_early_exit drafts with the first layers"):
        model.generate(make_ids(1, 6), assistant_early_exit=1, max_new_tokens=2)
    assert model.config.n_layer == 3


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        ([1, 2, 3], "input_ids must be a torch.Tensor, not builtins.list"),
        (np.array([[1, 2, 3]]), "input_ids must be a torch.Tensor, not numpy.ndarray"),
        (BatchEncoding({"input_ids": torch.tensor([[1, 2]])}), "input_ids must be .*BatchEncoding"),
        (torch.tensor([1, 2, 3]), r"input_ids are \(3,\), but generate needs a batch of texts, \(B, L\)"),
    ],
    ids=["list", "numpy", "encoding", "one-text"],
)
def test_generate_names_inputs_that_are_no_batch(make_model, inputs, named):
    with pytest.raises(ValueError, match=named):
        make_model().generate(inputs, max_new_tokens=1)


def test_generate_names_embeddings_that_are_no_batch(make_model):
    model = make_model()
    with pytest.raises(ValueError, match=rf"inputs_embeds are \(3, {model.config.d_model}\).*\(B, L, D\)"):
        model.generate(inputs_embeds=torch.zeros(3, model.config.d_model), max_new_tokens=1)
