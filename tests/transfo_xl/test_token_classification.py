"""A class for every token of a text of any length."""

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForTokenClassification, pipeline

from txl_hf import TransfoXLForCausalLM, TransfoXLForTokenClassification, TransfoXLTokenizer
from txl_hf.memories import memory_of


@pytest.fixture
def model(make_model):
    return make_model(model_class=TransfoXLForTokenClassification, num_labels=3)


def test_the_loss_is_the_mean_over_the_labels_that_count(model, make_ids):
    ids, labels = make_ids(2, 5), torch.tensor([[0, 1, 2, -100, 1], [2, -100, -100, -100, -100]])
    outputs = model(ids, labels=labels)
    assert outputs.logits.shape == (2, 5, 3)
    expected = F.cross_entropy(outputs.logits[labels != -100], labels[labels != -100])
    torch.testing.assert_close(outputs.loss, expected)
    assert outputs.losses.shape == labels.shape and (outputs.losses[labels == -100] == 0).all()
    torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=10).loss, expected / 2)
    nothing = model(ids, labels=torch.full_like(labels, -100)).loss
    nothing.backward()
    assert nothing == 0


def test_a_model_in_fp64_computes_its_loss_in_it(model, make_ids):
    model, labels = model.double(), torch.randint(3, (2, 5))
    embeds = model.transformer.embed_tokens(make_ids(2, 5)).detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda embeds: model(inputs_embeds=embeds, labels=labels).loss, embeds)


@torch.no_grad()
def test_a_long_text_is_labelled_segment_by_segment_with_memory(make_model, make_ids):
    """While the memory covers the text, wherever it is cut."""
    model, ids = make_model(model_class=TransfoXLForTokenClassification, num_labels=3, mem_len=30), make_ids(2, 23)
    memory, parts = {}, []
    for segment in ids.split([5, 1, 9, 8], dim=1):
        outputs = model(segment, **memory)
        memory = memory_of(outputs)
        parts.append(outputs.logits)
    torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits, atol=1e-5, rtol=1e-5)


def test_saved_and_loaded_and_begun_from_a_language_model(model, make_model, make_ids, tmp_path):
    ids = make_ids(2, 6)
    model.save_pretrained(tmp_path / "labels")
    loaded = AutoModelForTokenClassification.from_pretrained(tmp_path / "labels").eval()
    assert type(loaded) is TransfoXLForTokenClassification
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    base = make_model(seed=5)
    base.save_pretrained(tmp_path / "base")
    begun = AutoModelForTokenClassification.from_pretrained(tmp_path / "base", num_labels=4).eval()
    assert isinstance(base, TransfoXLForCausalLM) and begun.score.out_features == 4
    with torch.no_grad():
        assert torch.equal(begun.transformer(ids).last_hidden_state, base.transformer(ids).last_hidden_state)


def test_pipeline(make_model):
    tokenizer = TransfoXLTokenizer.train_from_iterator(["the cat sat"] * 3, mode="whitespace", unk_token="<unk>")
    model = make_model(model_class=TransfoXLForTokenClassification, vocab_size=len(tokenizer), cutoffs=[], div_val=1)
    found = pipeline("token-classification", model=model, tokenizer=tokenizer, ignore_labels=[])("the cat")
    assert [entity["word"] for entity in found] == ["the", "cat"]
    assert all(entity["entity"] in ("LABEL_0", "LABEL_1") for entity in found)


BAD_LABELS = {
    "beyond the classes": (torch.full((2, 5), 3), r"labels holds 3.*\[0, 3\)"),
    "of a longer text": (torch.zeros(2, 6, dtype=torch.long), r"labels are \(2, 6\), but the inputs are \(2, 5\)"),
    "that are no classes": (torch.zeros(2, 5), "labels are torch.float32"),
    "that are bits": (torch.zeros(2, 5, dtype=torch.bool), "labels are torch.bool, not token ids or classes"),
    "that are a list": ([[0] * 5] * 2, "labels must be a torch.Tensor, not builtins.list"),
}


@pytest.mark.parametrize("labels, message", BAD_LABELS.values(), ids=BAD_LABELS)
def test_bad_labels(model, make_ids, labels, message):
    with pytest.raises(ValueError, match=message):
        model(make_ids(2, 5), labels=labels)
