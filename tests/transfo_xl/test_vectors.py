"""A model without tokens, which reads vectors."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments

from txl_hf import (
    TransfoXLConfig,
    TransfoXLForCausalLM,
    TransfoXLForSequenceClassification,
    TransfoXLForTokenClassification,
    TransfoXLModel,
)
from txl_hf.memories import memory_of

VECTORS = {"vocab_size": 0, "cutoffs": [], "input_size": 5}


@pytest.fixture
def make_backbone(make_model):
    """`make_backbone(input_size=None)`."""
    return lambda *args, **changes: make_model(*args, model_class=TransfoXLModel, **(VECTORS | changes))


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "changes", [{}, {"cutoffs": [0, 0], "div_val": 4}, {"tie_projs": [True]}, {"eos_token_id": 3}]
)
def test_what_describes_tables_describes_nothing(make_config, changes):
    """Also as it stands in the configuration of a model with tokens."""
    config = make_config(**(VECTORS | changes))
    assert config.bins == config.cutoffs == config.tie_projs == [] and config.eos_token_id is None
    assert TransfoXLConfig.from_dict(config.to_dict()).to_diff_dict() == config.to_diff_dict()
    published = TransfoXLConfig(n_layer=1)
    published.vocab_size = 0
    assert not any("embed_tokens" in name for name, _ in TransfoXLModel(published).named_parameters())


def test_there_is_no_table_and_a_projection_only_where_a_width_is_given(make_backbone, make_model):
    layers = make_model(model_class=TransfoXLModel).layers
    count = sum(parameter.numel() for parameter in layers.parameters())
    assert make_backbone(input_size=None).num_parameters() == count
    # As wide as the model is a width too.
    for width in (5, 16):
        model = make_backbone(input_size=width)
        assert model.num_parameters() == count + 16 * width + 16
        assert (model.get_input_embeddings().bias == 0).all() and 0.2 < model.get_input_embeddings().weight.std() < 0.4


@pytest.mark.parametrize("attn_type", [0, 1, 2, 3])
@pytest.mark.parametrize("input_size", [None, 5])
@pytest.mark.parametrize(
    "head",
    [TransfoXLModel, TransfoXLForTokenClassification, TransfoXLForSequenceClassification],
    ids=lambda h: h.__name__,
)
def test_every_parameter_gets_a_gradient(make_model, head, input_size, attn_type):
    """Otherwise DistributedDataParallel stops."""
    recurrence = {"attn_type": attn_type, "mem_len": 6 if attn_type < 2 else 0}
    model = make_model(model_class=head, **(VECTORS | recurrence | {"input_size": input_size})).train()
    outputs = model(inputs_embeds=torch.randn(2, 5, input_size or 16))
    outputs[0].sum().backward()
    learned = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert learned == []


@torch.no_grad()
def test_vectors_are_read_as_embeddings_are(make_model, make_backbone):
    """The same layers and the same vectors: segments, memory, cache and masks too."""
    with_table = make_model(model_class=TransfoXLModel)
    model = make_backbone(input_size=5)
    model.layers.load_state_dict(with_table.layers.state_dict())
    vectors, mask = torch.randn(2, 11, 5), torch.ones(2, 11, dtype=torch.long)
    mask[0, :3] = 0
    resets = torch.zeros(2, 11, dtype=torch.bool)
    resets[1, 4] = True
    embeds = F.linear(vectors, model.embed_vectors.weight, model.embed_vectors.bias)
    vectors[0, :3] = torch.nan
    options = {"attention_mask": mask, "resets": resets}
    expected, found = with_table(inputs_embeds=embeds, **options), model(inputs_embeds=vectors, **options)
    close(found.last_hidden_state[1], expected.last_hidden_state[1])
    close(found.last_hidden_state[0, 3:], expected.last_hidden_state[0, 3:])
    for cached in (False, True):
        past, parts = {}, []
        for part, columns in zip(vectors[1:].split([4, 1, 6], 1), resets[1:].split([4, 1, 6], 1), strict=True):
            outputs = model(inputs_embeds=part, resets=columns, use_cache=cached, **past)
            past = {"past_key_values": outputs.past_key_values} if cached else memory_of(outputs)
            parts.append(outputs.last_hidden_state)
        close(torch.cat(parts, 1)[0, 4:], found.last_hidden_state[1, 4:])


def test_padding_that_is_nan_has_no_gradient(make_backbone):
    model, vectors = make_backbone(), torch.randn(2, 4, 5)
    vectors[0, :2] = torch.nan
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    outputs = model(inputs_embeds=vectors, attention_mask=mask).last_hidden_state
    outputs[mask.bool()].sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@torch.no_grad()
def test_vectors_come_in_any_floating_point_type(make_backbone):
    model, vectors = make_backbone(), torch.randn(2, 4, 5)
    expected = model(inputs_embeds=vectors)
    assert torch.equal(model(inputs_embeds=vectors.double()).last_hidden_state, expected.last_hidden_state)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(inputs_embeds=vectors)
    assert mixed.mems[0].dtype == torch.bfloat16 and mixed.last_hidden_state.dtype == torch.float32
    half = model.bfloat16()(inputs_embeds=vectors)
    # Without a layer that projects them, too.
    layers, wide = make_backbone(input_size=None), torch.randn(2, 4, 16)
    found = layers(inputs_embeds=wide.double())
    assert torch.equal(found.last_hidden_state, layers(inputs_embeds=wide).last_hidden_state)
    assert half.mems[0].dtype == half.last_hidden_state.dtype == torch.bfloat16
    assert model.init_mems(3)[0].shape == (3, 0, 16) and model.init_mems(3)[0].dtype == torch.bfloat16


def test_saved_loaded_and_begun_from_another_model(make_model, make_backbone, tmp_path):
    model, vectors = make_backbone(gating="gru"), torch.randn(2, 4, 5)
    model.save_pretrained(tmp_path / "vectors")
    loaded = AutoModel.from_pretrained(tmp_path / "vectors").eval()
    with torch.no_grad():
        assert torch.equal(loaded(inputs_embeds=vectors)[0], model(inputs_embeds=vectors)[0])
    begun = TransfoXLForTokenClassification.from_pretrained(tmp_path / "vectors", num_labels=4)
    assert torch.equal(begun.transformer.embed_vectors.weight, model.embed_vectors.weight)
    # The layers of a language model, without its table.
    language_model = make_model()
    language_model.save_pretrained(tmp_path / "language")
    layers = TransfoXLModel.from_pretrained(tmp_path / "language", vocab_size=0).eval()
    embeds = torch.randn(2, 4, 16)
    with torch.no_grad():
        assert torch.equal(layers(inputs_embeds=embeds)[0], language_model.transformer(inputs_embeds=embeds)[0])


def test_trainer_trains_it_with_gradient_checkpointing(make_model, tmp_path):
    model = make_model(model_class=TransfoXLForTokenClassification, **VECTORS)
    texts = [{"inputs_embeds": torch.randn(6, 5), "labels": torch.randint(2, (6,))} for _ in range(8)]
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=2,
        report_to=[],
        gradient_checkpointing=True,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    before = model.transformer.embed_vectors.weight.clone()
    Trainer(model=model, args=arguments, train_dataset=texts).train()
    assert not torch.equal(model.transformer.embed_vectors.weight, before)


@pytest.mark.parametrize("input_size", [None, 5])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_layers_have_gradients_and_the_callers_vectors_none(make_model, use_reentrant, input_size):
    model = make_model(model_class=TransfoXLForTokenClassification, **(VECTORS | {"input_size": input_size})).train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    vectors = torch.randn(2, 6, input_size or 16)
    model(inputs_embeds=vectors, labels=torch.ones(2, 6, dtype=torch.long)).loss.backward()
    assert not vectors.requires_grad and all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    "model_class", [TransfoXLModel, pytest.param(TransfoXLForTokenClassification, marks=pytest.mark.slow)]
)
def test_checkpointing_leaves_nothing_behind_and_one_graph(make_model, model_class):
    # Graphs of earlier tests count towards the limit of those of one forward.
    torch.compiler.reset()
    model = make_model(model_class=model_class, **(VECTORS | {"input_size": None, "n_layer": 1})).train()
    vectors = torch.randn(2, 6, 16)
    model.gradient_checkpointing_enable()
    plain, compiled = model(inputs_embeds=vectors)[0], torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(inputs_embeds=vectors)[0], plain)
    model.gradient_checkpointing_disable()
    assert not model.requires_grad_(False)(inputs_embeds=vectors)[0].requires_grad


@pytest.mark.parametrize("head", [TransfoXLForTokenClassification, TransfoXLForSequenceClassification])
def test_trainer_hands_the_vectors_to_the_metrics(make_model, head, tmp_path):
    model = make_model(model_class=head, **VECTORS)
    labels = torch.tensor(1) if head is TransfoXLForSequenceClassification else torch.ones(6, dtype=torch.long)
    texts = [{"inputs_embeds": torch.randn(6, 5), "labels": labels} for _ in range(3)]
    arguments = TrainingArguments(
        str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True, include_for_metrics=["inputs"]
    )
    seen = []
    trainer = Trainer(
        model, arguments, eval_dataset=texts, compute_metrics=lambda given: seen.append(given.inputs) or {}
    )
    trainer.evaluate()
    assert np.array_equal(seen[0], torch.stack([text["inputs_embeds"] for text in texts]).numpy())


def test_adapters_reach_what_is_frozen(make_backbone):
    model = make_backbone()
    model.requires_grad_(False)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    assert model.train()(inputs_embeds=torch.randn(1, 3, 5)).last_hidden_state.requires_grad


@pytest.mark.slow
def test_compiles(make_backbone):
    model, vectors = make_backbone(), torch.randn(2, 4, 5)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        close(compiled(inputs_embeds=vectors).last_hidden_state, model(inputs_embeds=vectors).last_hidden_state)


BAD_INPUTS = {
    "ids": ({"input_ids": torch.zeros(1, 3, dtype=torch.long)}, "input_ids .*vocab_size=0.* inputs_embeds"),
    "nothing": ({}, "give inputs_embeds"),
    "another width": ({"inputs_embeds": torch.zeros(1, 3, 16)}, "16 wide, not input_size=5"),
    "integers": ({"inputs_embeds": torch.zeros(1, 3, 5, dtype=torch.long)}, "inputs_embeds are torch.int64"),
}


@pytest.mark.parametrize("inputs, message", BAD_INPUTS.values(), ids=BAD_INPUTS)
def test_bad_inputs(make_backbone, inputs, message):
    with pytest.raises(ValueError, match=message):
        make_backbone()(**inputs)


def test_what_needs_tokens_says_so(make_config, make_backbone):
    config = make_config(**VECTORS)
    with pytest.raises(ValueError, match="TransfoXLForCausalLM predicts tokens, but vocab_size=0"):
        TransfoXLForCausalLM(config)
    with pytest.raises(ValueError, match="vocab_size=0"):
        AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="vocab_size=0 .* no token embeddings to resize"):
        make_backbone().resize_token_embeddings(10)
