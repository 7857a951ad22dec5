"""The card of a model: how it is loaded, what it is for, and what it scored."""

import ast
import re

import pytest
from huggingface_hub import EvalResult, ModelCard

from txl_hf import TransfoXLForCausalLM, TransfoXLForSequenceClassification, TransfoXLModel
from txl_hf.evaluation.cards import is_generated, to_results, write_model_card


@pytest.mark.parametrize(
    ("head", "auto_class", "task"),
    [
        (TransfoXLForCausalLM, "AutoModelForCausalLM", "text-generation"),
        (TransfoXLForSequenceClassification, "AutoModelForSequenceClassification", "text-classification"),
        (TransfoXLModel, "AutoModel", "feature-extraction"),
    ],
)
@pytest.mark.parametrize("tokenizer", [False, True])
def test_a_card_says_how_to_load_and_what_for(make_model, tmp_path, head, auto_class, task, tokenizer):
    if tokenizer:
        (tmp_path / "tokenizer_config.json").write_text("{}")
    path = tmp_path / "README.md"
    write_model_card(path, make_model(model_class=head), "user/name", ["mine"], license="mit", origin="From afar.")
    card = ModelCard.load(path)
    assert (card.data.library_name, card.data.pipeline_tag, card.data.license) == ("transformers", task, "mit")
    assert card.data.tags == ["transformer-xl", "transfo-xl", "mine"] and card.data.get("base_model") is None
    assert f'{auto_class}.from_pretrained("user/name", trust_remote_code=True)' in card.text
    assert ('AutoTokenizer.from_pretrained("user/name"' in card.text) is tokenizer
    assert ("mems=outputs.mems" in card.text) is (auto_class == "AutoModelForCausalLM")
    assert "\n\nFrom afar.\n\n" in card.text and "{" not in card.text and "\n\n\n" not in card.text
    assert is_generated(path)


def test_names_mean_themselves(make_model, tmp_path):
    folder = tmp_path / 'x"); import os; os.system("id"); ("\n# [a](b) <script> `c` {{ config }}'
    folder.mkdir()
    write_model_card(folder / "README.md", make_model())
    card = (folder / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", card, re.S)
    (call,) = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    assert call.args[0].value == folder.name
    page = card.replace(code, "")
    assert "<script>" not in page and "](b)" not in page and "{{" not in page
    assert len([line for line in page.splitlines() if line.startswith("#")]) == 1


@pytest.mark.parametrize(
    ("source", "base_model"),
    [("user/base", "user/base"), ("user/name", None), ("", None), ("./folder", None), ("/no/such/folder", None)],
)
def test_the_base_model_is_the_name_on_the_hub_that_was_loaded(make_model, tmp_path, monkeypatch, source, base_model):
    monkeypatch.chdir(tmp_path)
    model = make_model()
    model.name_or_path = source
    write_model_card(tmp_path / "README.md", model, "user/name")
    assert ModelCard.load(tmp_path / "README.md").data.get("base_model") == base_model
    (tmp_path / "user" / "base").mkdir(parents=True)
    write_model_card(tmp_path / "README.md", model, "user/name")
    assert ModelCard.load(tmp_path / "README.md").data.get("base_model") is None


def test_results_are_the_model_index(make_model, tmp_path):
    results = to_results({"test": {"perplexity": 7.54321, "bits_per_token": None, "memory_length": 8}}, "text8")
    assert [(result.metric_type, result.metric_value) for result in results] == [("perplexity", 7.5432)]
    write_model_card(tmp_path / "README.md", make_model(), "user/name", model_name="name", eval_results=results)
    [found] = ModelCard.load(tmp_path / "README.md").data.eval_results
    assert isinstance(found, EvalResult) and found.dataset_args == {"memory_length": 8}
    assert (found.dataset_name, found.dataset_split, found.metric_value) == ("text8", "test", 7.5432)


def test_a_card_without_its_last_line_is_somebodys_own(make_model, tmp_path):
    path = tmp_path / "README.md"
    assert not is_generated(path)
    write_model_card(path, make_model())
    path.write_text(path.read_text().replace("<!-- Written by", "By"))
    assert not is_generated(path)


def test_saving_a_model_writes_no_card(make_model, tmp_path):
    make_model().save_pretrained(tmp_path)
    assert not (tmp_path / "README.md").exists() and (tmp_path / "model.safetensors").exists()
