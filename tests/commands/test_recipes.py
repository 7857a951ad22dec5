"""Every recipe of examples/recipes in miniature, and what they say."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("accelerate")
pytest.importorskip("datasets")

from accelerate.state import AcceleratorState, GradientState

from txl_hf import TransfoXLConfig, TransfoXLForCausalLM, regularize
from txl_hf.commands import report
from txl_hf.commands import train_lm as command
from txl_hf.commands.recipe import parse_arguments

RECIPES = sorted((Path(__file__).parents[2] / "examples" / "recipes").glob("*.yaml"))
# Millions of parameters. The paper counts 257 for wt103_large, which has 285 (so have its checkpoints), and 460 for
# lm1b_base; NVIDIA counts 247 for nvidia_large, without embeddings. PTB's model had a matrix less in each layer.
PUBLISHED = {
    "wt103_base": 151, "wt103_large": 285, "enwik8_base": 41, "enwik8_medium": 88, "enwik8_large": 277,
    "text8_large": 277, "wt103_ablation": 129, "lm1b_ablation": 271,
    "lm1b_base": 358, "lm1b_large": 838, "ptb": 24.04 + 16 * 0.38**2, "ptb_average": 24.04 + 16 * 0.38**2,
    "ptb_quarter": 24.04 + 16 * 0.38**2,
    "wikitext2": 37.7, "nvidia_base": 192, "nvidia_large": 247 + 38.3,
}  # fmt: skip
VOCABULARIES = {
    "wt103": 267_735, "enwik8": 204, "text8": 27, "lm1b": 793_471, "ptb": 10_000, "wikitext2": 33_278,
    "nvidia": 267_735,
}  # fmt: skip


# Those of nobody's results.
SMALL = {"wikitext2_small", "wikipedia_small", "characters_small", "words_small", "music_small"}


def test_all_recipes_are_there():
    assert {path.stem for path in RECIPES} == {*PUBLISHED, *SMALL}


@pytest.fixture(autouse=True)
def plots(monkeypatch):
    """test_train_lm.py looks at one; drawing would be a third of a run of seconds."""
    monkeypatch.setattr(report, "plot", lambda log, path, metric: path.touch())


def smoke(recipe: Path, *options: str):
    try:
        command.main([str(recipe), "--smoke", *options])
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def test_a_trial_says_that_its_folder_is_gone(capsys):
    [recipe] = [path for path in RECIPES if path.stem == "characters_small"]
    smoke(recipe)
    *_, said, _, last = capsys.readouterr().out.splitlines()
    assert last == "this was a trial: its folder is removed now; name one with --output to keep it"
    assert not Path(re.search(r"M parameters, is in ([^;]+);", said)[1]).exists()


# Of each kind of text and of softmax there is another one in the quick suite: a trial shrinks what has a size.
SIBLINGS = {
    "enwik8_medium", "enwik8_large", "text8_large", "lm1b_large", "lm1b_ablation", "wt103_large", "wt103_ablation",
    "nvidia_large", "ptb", "ptb_quarter", "wikitext2_small", "words_small", "enwik8_base", "wikipedia_small",
    "wikitext2",
}  # fmt: skip


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(path, marks=pytest.mark.slow if path.stem in SIBLINGS else ()) for path in RECIPES],
    ids=lambda path: path.stem,
)
def test_smoke(tmp_path, recipe, capsys):
    """A few steps with all of its options, to a model with results at every length that it names."""
    output = tmp_path / "output"
    smoke(recipe, "--output", str(output))
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    results = json.loads((output / "results.json").read_text())
    settings = yaml.safe_load(recipe.read_text())
    assert len(results["memory_lengths"]) == len(settings.get("eval_memory_lengths", []))
    assert f"test: {settings['metric']} {results['test'][settings['metric']]:.3f}" in capsys.readouterr().out
    config = TransfoXLForCausalLM.from_pretrained(output).config
    for name in ("div_val", "untie_r", "initial_memory", "same_length_counts_self", "dropout", "dropatt"):
        assert getattr(config, name) == settings.get(name, getattr(TransfoXLConfig(), name)), name
    assert len(config.cutoffs) == len(settings.get("cutoffs", []))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_whole_model_has_the_published_size(name):
    """With the vocabulary of its corpus, and without making its weights."""
    [recipe] = [path for path in RECIPES if path.stem == name]
    arguments = parse_arguments([str(recipe), "--data", "data", "--output", "output"])
    vocab_size = next(size for corpus, size in VOCABULARIES.items() if name.startswith(corpus))
    config = command.make_config(arguments, range(vocab_size))
    with torch.device("meta"):
        parameters = TransfoXLForCausalLM(config).num_parameters()
    assert parameters == pytest.approx(PUBLISHED[name] * 1e6, rel=0.005)


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(path, marks=pytest.mark.slow if path.stem in SIBLINGS else ()) for path in RECIPES],
    ids=lambda path: path.stem,
)
def test_the_first_steps_have_a_gradient_at_full_depth(recipe):
    """With all that the recipe drops: what a few layers bear sixteen may not."""
    arguments = parse_arguments([str(recipe), "--data", "data", "--output", "output"])
    for name, width in {"d_model": 16, "d_embed": 16, "n_head": 2, "d_head": 8, "d_inner": 16, "cutoffs": []}.items():
        arguments.config[name] = width
    config = command.make_config(arguments, range(60))
    for seed in range(3):
        torch.manual_seed(seed)
        model = TransfoXLForCausalLM(config).train()
        regularize(model, arguments.regularization)
        ids = torch.randint(60, (8, 12))
        model(ids, labels=ids).loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_what_it_reproduces(recipe):
    comment = "".join(line for line in recipe.read_text().splitlines(True) if line.startswith("#"))
    own = "book.txt --mode [a-z]+( --max_size [0-9]+)?"
    assert re.search(rf"prepare_corpus.py --corpus [a-z0-9-]+( --input ({own}|midi-files .*))?\n", comment)
    assert recipe.stem in SMALL or re.search(r"[Pp]ublished|reproduction", comment)


@pytest.mark.parametrize("attn_type", [2, 3])
@pytest.mark.parametrize("loss", ["full", "half"])
def test_baselines_without_recurrence_by_a_recipe_with_memory(tmp_path, attn_type, loss):
    """The recipe's memory of 640 in evaluation is not theirs. What was trained stands beside its scores."""
    [recipe] = [path for path in RECIPES if path.stem == "wt103_base"]
    options = ["--attn_type", str(attn_type), "--mem_len", "0", "--loss", loss, "--output", str(tmp_path / "output")]
    smoke(recipe, *options)
    results = json.loads((tmp_path / "output" / "results.json").read_text())
    config = TransfoXLForCausalLM.from_pretrained(tmp_path / "output").config
    assert results["test"]["memory_length"] == 0 and config.attn_type == attn_type
    assert results["model"] == {
        "attn_type": attn_type,
        "parameters": TransfoXLForCausalLM(config).num_parameters(),
        "tgt_len": 16,
        "mem_len": 0,
        "ext_len": 16 if loss == "half" else 0,
        "loss": loss,
    }
    assert set(results["versions"]) == {"txl-hf", "transformers", "torch"} and "commit" in results


def test_an_empty_list_on_the_command_line_takes_back_the_recipes():
    recipe = next(str(path) for path in RECIPES if path.stem == "wt103_base")
    assert parse_arguments([recipe, "--smoke"]).config["cutoffs"]
    assert parse_arguments([recipe, "--smoke", "--cutoffs"]).config["cutoffs"] == []
