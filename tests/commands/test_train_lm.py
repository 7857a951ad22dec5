"""`txl-train`: steps against a loop by hand, optimisers, resuming, processes, refusals, a user's commands."""

import dataclasses
import json
import math
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("accelerate")
pytest.importorskip("datasets")

import pyarrow
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from datasets import Dataset, DatasetDict, load_from_disk
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import compile_fx, metrics
from torch._inductor import config as inductor
from torch._inductor.async_compile import AsyncCompile
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from host_reads import count_host_reads
from models import small_config
from scripts import run_script
from train_lm_process import MODEL, RECIPE, run
from txl_hf import (
    TokenStream,
    TransfoXLConfig,
    TransfoXLForCausalLM,
    TransfoXLModel,
    TransfoXLTokenizer,
    commands,
    evaluate_language_model,
)
from txl_hf.commands import recipe as recipes
from txl_hf.commands import report
from txl_hf.commands import train_lm as command
from txl_hf.commands.recipe import parse_arguments, write_smoke_data
from txl_hf.data.streams import RolledStream
from txl_hf.memories import memory_of
from txl_hf.training import trainer
from txl_hf.training.arguments import TransfoXLTrainingArguments
from txl_hf.training.checkpoints import last_checkpoint
from txl_hf.training.optimizers import make_lamb, make_optimizer
from txl_hf.training.trainer import TransfoXLTrainer
from txl_hf.transfo_xl import adaptive_transfo_xl

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A small real text, prepared; its training split is short, so that runs come to its end."""
    folder = tmp_path_factory.mktemp("corpus")
    write_smoke_data(folder / "all")
    splits = load_from_disk(folder / "all")
    shorter = {"train": splits["train"].select(range(4 * 9 * 8 + 1)), "validation": splits["validation"]}
    DatasetDict(shorter | {"test": splits["test"]}).flatten_indices().save_to_disk(folder / "data")
    AutoTokenizer.from_pretrained(folder / "all").save_pretrained(folder / "data")
    return folder / "data"


@pytest.fixture
def drawn():
    """That a run's plot is drawn."""


@pytest.fixture(autouse=True)
def plots(request, monkeypatch):
    """Where a test does not ask for it, drawing would be a third of a run of seconds."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(report, "plot", lambda log, path, metric: path.touch())


@pytest.fixture
def recipe(tmp_path) -> Path:
    return write_recipe(tmp_path / "recipe.yaml")


def write_recipe(path: Path, **changes) -> Path:
    settings = {name: value for name, value in (RECIPE | changes).items() if value is not None}
    path.write_text(yaml.safe_dump(settings))
    return path


def train(*argv: str | Path):
    """`train_lm.py *argv` in this process."""
    try:
        command.main([str(argument) for argument in argv])
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def after_steps(monkeypatch, call):
    """Call a function of the trainer after each part of a step."""

    def training_step(self, *batch, original=TransfoXLTrainer.training_step):
        loss = original(self, *batch)
        call(self)
        return loss

    monkeypatch.setattr(TransfoXLTrainer, "training_step", training_step)


def read_log(output: Path, name: str = "loss") -> list[float]:
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


# --- steps -----------------------------------------------------------------------------------------------------------


def learning_rate(step: int) -> float:
    if step < RECIPE["warmup_steps"]:
        return RECIPE["learning_rate"] * step / RECIPE["warmup_steps"]
    progress = (step - RECIPE["warmup_steps"]) / (RECIPE["max_steps"] - RECIPE["warmup_steps"])
    return RECIPE["learning_rate"] * (1 + math.cos(math.pi * progress)) / 2


def losses_by_hand(corpus: Path, document_end: int | None = None) -> tuple[list[float], TransfoXLForCausalLM]:
    """All streams in one batch; Adam, clipping, warm-up and cosine; memory begins anew at the end of the text."""
    set_seed(1111)
    model = TransfoXLForCausalLM(
        TransfoXLConfig(vocab_size=len(AutoTokenizer.from_pretrained(corpus)), **MODEL, d_embed=16)
    ).train()
    optimizer = torch.optim.Adam(model.parameters())
    text = load_from_disk(corpus)["train"].with_format("numpy")["token_ids"][:]
    stream = TokenStream(text, 8, 4, document_end=document_end)
    assert stream.steps == 9
    losses, memory = [], {}
    for step in range(RECIPE["max_steps"]):
        if step % stream.steps == 0:
            memory = {}
        items = [stream[step % stream.steps * 4 + row] for row in range(4)]
        outputs = model(**{name: torch.stack([item[name] for item in items]) for name in items[0]}, **memory)
        memory = memory_of(outputs)
        optimizer.zero_grad()
        outputs.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.param_groups[0]["lr"] = learning_rate(step)
        optimizer.step()
        losses.append(outputs.loss.item())
    return losses, model


@pytest.fixture(scope="module")
def by_hand(corpus):
    return losses_by_hand(corpus)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_steps_are_those_of_a_loop_by_hand(tmp_path, recipe, corpus, by_hand, parts):
    output = tmp_path / "output"
    train(recipe, "--data", corpus, "--output", output, "--gradient_accumulation_steps", parts)
    np.testing.assert_allclose(read_log(output), by_hand[0], rtol=1e-5)
    np.testing.assert_allclose(read_log(output, "learning_rate"), [learning_rate(step) for step in range(12)])
    assert read_log(output, "tokens")[-1] == 12 * 4 * 8


@pytest.mark.parametrize("parts", [1, 2])
def test_documents_are_read_without_what_came_before_them(tmp_path, recipe, corpus, by_hand, parts):
    text = load_from_disk(corpus)["train"]["token_ids"][:]
    end = max(set(text), key=text.count)
    shutil.copytree(corpus, tmp_path / "documents")
    (tmp_path / "documents" / "corpus.json").write_text(json.dumps({"document_end": end}))
    output = tmp_path / "output"
    options = ["--data", tmp_path / "documents", "--gradient_accumulation_steps", parts]
    train(recipe, "--output", output, *options)
    model = AutoModelForCausalLM.from_pretrained(output)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == end, "there a text is over"
    expected, _ = losses_by_hand(corpus, end)
    assert read_log(output) == pytest.approx(expected, abs=1e-5)
    assert abs(expected[1] - by_hand[0][1]) > 1e-4, "memory counts"


def test_what_a_run_leaves(tmp_path, corpus, by_hand, drawn):
    """The best model, loadable and scored as it says, at several memory lengths; a log and a plot."""
    output = tmp_path / "output"
    recipe = write_recipe(tmp_path / "recipe.yaml", eval_steps=12, eval_memory_lengths=[0, 30])
    train(recipe, "--data", corpus, "--output", output)
    model = AutoModelForCausalLM.from_pretrained(output)
    for name, parameter in by_hand[1].named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=1e-3, atol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert len(tokenizer) == model.config.vocab_size
    results = json.loads((output / "results.json").read_text())
    text = load_from_disk(corpus)["test"]["token_ids"][:]
    for memory_length, result in zip([None, 0, 30], [results["test"], *results["memory_lengths"]], strict=True):
        expected = evaluate_language_model(model, text, 64, memory_length, batch_size=8)
        assert result["nll"] == pytest.approx(expected.nll) and result["memory_length"] == expected.memory_length
        assert result["perplexity"] == pytest.approx(expected.perplexity)
    assert results["model"]["parameters"] == model.num_parameters() and results["model"]["attn_type"] == 0
    assert {"versions", "commit"} <= set(results)
    assert read_log(output, "validation_loss") == [pytest.approx(results["validation"]["nll"])]
    card = ModelCard.load(output / "README.md")
    scores = {result.dataset_split: result.metric_value for result in card.data.eval_results[::2]}
    assert scores["test"] == pytest.approx(results["test"]["perplexity"], rel=1e-4)
    assert card.data.eval_results[0].dataset_name == "data"
    assert (output / "training.png").read_bytes().startswith(b"\x89PNG")
    assert not list(output.glob("_unfinished*")) and not (output / "best").exists()


def test_the_best_model_is_kept(tmp_path, recipe, corpus):
    """At a learning rate that is far too high the first validation is the best one."""
    output = tmp_path / "output"
    train(
        recipe,
        "--data",
        corpus,
        "--output",
        output,
        "--lr_scheduler_type",
        "constant_with_warmup",
        "--learning_rate",
        "3",
    )
    validation = read_log(output, "validation_loss")
    assert len(validation) == 3 and min(validation) < validation[-1]
    assert json.loads((output / "results.json").read_text())["validation"]["nll"] == pytest.approx(min(validation))


def test_text_stays_on_the_disk(tmp_path):
    """Reading a segment of a memory-mapped text of 40 MB allocates next to nothing."""
    for split in ("train", "validation", "test"):
        text = np.zeros(10_000_000 if split == "train" else 100, dtype=np.int32)
        Dataset.from_dict({"token_ids": text}).save_to_disk(tmp_path / split)
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "validation", "test"]}))
    AutoTokenizer.from_pretrained(write_tokenizer(tmp_path / "tokenizer")).save_pretrained(tmp_path)
    arguments = parse_arguments(
        [str(write_recipe(tmp_path / "recipe.yaml", cutoffs=None)), "--data", str(tmp_path), "--output", "x"]
    )
    before = pyarrow.total_allocated_bytes()
    _, corpus = command.load_data(tmp_path)
    command.check_texts(corpus, TransfoXLConfig(vocab_size=10, cutoffs=[]), arguments.data)
    stream = TokenStream(corpus["train"].with_format("numpy")["token_ids"], 100, 8)
    assert stream[len(stream) - 1]["input_ids"].shape == (100,)
    assert pyarrow.total_allocated_bytes() - before < 1_000_000


def write_tokenizer(folder: Path) -> Path:
    from txl_hf import TransfoXLTokenizer

    TransfoXLTokenizer.train_from_iterator(["a b c"], mode="whitespace").save_pretrained(folder)
    return folder


def test_documents_are_not_rolled(tmp_path, recipe, corpus):
    shutil.copytree(corpus, tmp_path / "documents")
    (tmp_path / "documents" / "corpus.json").write_text('{"document_end": 0}')
    with pytest.raises(SystemExit, match="--roll goes together with neither .* documents, which --document_end none"):
        train(recipe, "--data", tmp_path / "documents", "--output", tmp_path / "output", "--roll", "true")


def test_rolled_streams():
    """Every epoch begins elsewhere, each stream at a place of its own, and reads all of every stream in its order."""
    text = np.arange(4 * 40)
    stream = RolledStream(text, 8, 4, roll_seed=0)
    begins = []
    for epoch in range(3):
        stream.set_epoch(epoch)
        for row in range(4):
            items = [stream[step * 4 + row] for step in range(stream.steps)]
            inputs = torch.cat([item["input_ids"] for item in items])
            labels = torch.cat([item["shift_labels"] for item in items])
            # The last token of a text is a label only, which takes a segment from each stream here.
            own = torch.arange(row * 32, row * 32 + 32)
            assert inputs.sort().values.equal(own)
            assert labels.equal(own[(inputs - row * 32 + 1) % 32])
            assert inputs[1:].equal(labels[:-1])
            begins.append(int(inputs[0]) % 32)
    assert len(set(begins)) > 6


def test_learning_rates_of_embeddings_and_of_short_segments(tmp_path, corpus, monkeypatch):
    """The tables learn twice as fast; every step as fast as its segment is long."""
    rates, lengths = [], []
    step = torch.optim.Adam.step

    def recorded(self, *args, **kwargs):
        rates.append([group["lr"] for group in self.param_groups])
        return step(self, *args, **kwargs)

    items = TokenStream.__getitems__

    def measured(self, indices):
        found = items(self, indices)
        lengths.append(int((found[0]["shift_labels"] != -100).sum()))
        return found

    monkeypatch.setattr(torch.optim.Adam, "step", recorded)
    monkeypatch.setattr(TokenStream, "__getitems__", measured)
    recipe = write_recipe(
        tmp_path / "recipe.yaml", varlen=True, ext_len=4, mem_len=0, max_steps=4, scale_lr_by_length=True
    )
    train(recipe, "--data", corpus, "--output", tmp_path / "output", "--embedding_lr_factor", "2", "--max_steps", "12")
    expected = [learning_rate(i) * lengths[i] / 8 for i in range(4)]
    assert len(set(lengths)) > 2
    np.testing.assert_allclose([rate[0] for rate in rates[:4]], expected)
    np.testing.assert_allclose([rate[1] for rate in rates], [2 * rate[0] for rate in rates])


@pytest.mark.parametrize("initial_memory", ["zeros", "empty"])
def test_a_memory_that_grows(tmp_path, corpus, monkeypatch, capsys, initial_memory):
    """From one state, over the first two thirds of 9 steps, to all 12; what is saved remembers as many."""
    lengths = []

    def recorded(self, *batch):
        lengths.append([memory["mems"][0].shape[1] for memory in self._memory.memories if memory])

    settings = {"mem_len": 12, "tgt_len": 8, "max_steps": 9, "eval_steps": 3, "initial_memory": initial_memory}
    recipe = write_recipe(tmp_path / "recipe.yaml", gradient_accumulation_steps=2, mem_warmup_ratio=2 / 3, **settings)
    output = tmp_path / "output"
    after_steps(monkeypatch, recorded)
    train(recipe, "--data", corpus, "--output", output)
    assert "without the validations and what a longer memory will cost" in capsys.readouterr().err
    assert lengths[1::2] == [[length] * 2 for length in (1, 2, 4, 6, 8, 10, 12, 12, 12)]
    assert TransfoXLConfig.from_pretrained(output).mem_len == 12


def test_a_new_model_has_embeddings_as_wide_as_its_states(recipe, corpus):
    arguments = parse_arguments([str(recipe), "--smoke"])
    for given, width in (({}, 1024), ({"d_model": 32}, 32), ({"d_model": 32, "d_embed": 16}, 16)):
        config = command.make_config(arguments._replace(config=given), AutoTokenizer.from_pretrained(corpus))
        assert config.d_embed == width


@pytest.mark.parametrize("average", ["none", "ema", "equal"])
def test_a_step_reads_no_number_of_a_tensor(tmp_path, corpus, monkeypatch, average):
    """On a GPU the host would wait for it."""
    counts = count_host_reads(monkeypatch, TransfoXLTrainer, "training_step")
    recipe = write_recipe(tmp_path / "recipe.yaml", scale_lr_by_length=True, varlen=True, max_steps=3, average=average)
    train(recipe, "--data", corpus, "--output", tmp_path / "output")
    assert counts == [0, 0, 0]


@pytest.mark.parametrize("kind", ["ema", "equal"])
def test_averages(tmp_path, recipe, corpus, monkeypatch, kind):
    """From a step on; what is validated and saved is the average."""
    weights = []
    step = torch.optim.Adam.step

    def recorded(self, *args, **kwargs):
        step(self, *args, **kwargs)
        weights.append([parameter.detach().clone() for group in self.param_groups for parameter in group["params"]])

    monkeypatch.setattr(torch.optim.Adam, "step", recorded)
    output = tmp_path / "output"
    options = [
        "--average",
        kind,
        "--average_start",
        "3",
        "--ema_decay",
        "0.7",
        "--max_steps",
        "6",
        "--eval_steps",
        "6",
    ]
    train(recipe, "--data", corpus, "--output", output, *options)
    expected = weights[3]
    for count, step_weights in enumerate(weights[4:], start=1):
        keep = 0.7 if kind == "ema" else count / (count + 1)
        expected = [keep * old + (1 - keep) * new for old, new in zip(expected, step_weights, strict=True)]
    model = AutoModelForCausalLM.from_pretrained(output)
    optimizer = make_optimizer(model, parse_arguments([str(recipe), "--smoke"]).training)
    found = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left.detach(), right)


def test_fine_tuning(tmp_path, recipe, corpus):
    """From what a run left, with other lengths and dropout; the architecture is that of the checkpoint."""
    train(recipe, "--data", corpus, "--output", tmp_path / "first")
    short = tmp_path / "short.yaml"
    short.write_text(
        "max_steps: 2\nmem_len: 20\ndropout: 0.3\nlr_scheduler_type: constant_with_warmup\nlearning_rate: 0\n"
    )
    options = ["--data", corpus, "--model_name_or_path", tmp_path / "first"]
    train(short, *options, "--output", tmp_path / "second")
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("first", "second")]
    assert models[1].config.mem_len == 20 and models[1].config.dropout == 0.3
    for left, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert left.equal(right)


def test_what_holds_no_whole_model_is_named(tmp_path, recipe, corpus, capsys):
    """The way out that is told of an adapter is one."""
    train(recipe, "--data", corpus, "--output", tmp_path / "first")
    options = [recipe, "--data", corpus, "--output", tmp_path / "second", "--model_name_or_path"]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    get_peft_model(base, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    said = refused(capsys, *options, tmp_path / "adapter")
    assert "adapter is an adapter: give a whole model" in said
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().save_pretrained(tmp_path / "whole")
    AutoTokenizer.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "whole")
    train(*options, tmp_path / "whole", "--max_steps", "1")


def test_a_model_that_is_nowhere_or_lacks_weights_is_named(tmp_path, recipe, corpus, capsys):
    """As `txl-evaluate` names them. The softmax of a base model would be made anew."""
    options = [recipe, "--data", corpus, "--output", tmp_path / "second", "--model_name_or_path"]
    said = refused(capsys, *options, "nowhere")
    assert "--model_name_or_path nowhere does not load: there is no such folder here, and as a name on the Hub" in said
    train(recipe, "--data", corpus, "--output", tmp_path / "first")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "first").base_model
    base.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "base")
    assert "base is no whole language model: its weights lack lm_head" in refused(capsys, *options, tmp_path / "base")
    assert not (tmp_path / "second" / "recipe.yaml").exists()


def test_fine_tuning_is_resumed(tmp_path, recipe, corpus):
    """The losses of the run that was not cut, from a model that was loaded and a checkpoint on top of it."""
    train(recipe, "--data", corpus, "--output", tmp_path / "first")
    short = write_recipe(
        tmp_path / "short.yaml", lr_scheduler_type="constant_with_warmup", save_steps=2, logging_steps=1
    )
    argv = [short, "--data", corpus, "--model_name_or_path", tmp_path / "first", "--output"]
    train(*argv, tmp_path / "whole", "--max_steps", "6")
    train(*argv, tmp_path / "cut", "--max_steps", "4")
    train(*argv, tmp_path / "cut", "--max_steps", "6", "--resume")
    losses = read_log(tmp_path / "whole")
    assert read_log(tmp_path / "cut") == losses and len(losses) == 6


def test_half_losses_read_again_as_much_as_the_checkpoints_segments_have(tmp_path, recipe, corpus):
    train(recipe, "--data", corpus, "--output", tmp_path / "first")
    short = tmp_path / "short.yaml"
    short.write_text("max_steps: 3\nlogging_steps: 1\nloss: half\n")
    options = [short, "--data", corpus, "--model_name_or_path", tmp_path / "first", "--output"]
    train(*options, tmp_path / "silent")
    train(*options, tmp_path / "told", "--tgt_len", RECIPE["tgt_len"])
    assert read_log(tmp_path / "silent") == read_log(tmp_path / "told")
    for name in ("silent", "told"):
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name).config.ext_len == RECIPE["tgt_len"]
    message = "reads tgt_len=8 tokens again: leave out --ext_len 4"
    with pytest.raises(SystemExit, match=message):
        train(*options, tmp_path / "other", "--ext_len", 4)


# --- optimisers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lamb_is_that_of_nvidia(weight_decay, compiled, monkeypatch):
    """lamb.py's formula in fp64: no bias correction, the norm of the weights up to 10, a trust ratio in any case."""
    generator = torch.Generator().manual_seed(0)
    # Norms below 10, above it, and 0.
    parameters = [torch.nn.Parameter(scale * torch.randn(30, 5, generator=generator)) for scale in (0.1, 20.0, 0.0)]
    expected = [parameter.detach().double() for parameter in parameters]
    means, squares = ([torch.zeros(30, 5, dtype=torch.float64) for _ in parameters] for _ in range(2))
    graphs = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=graphs))
    optimizer = make_lamb(parameters, compiled, lr=0.01, betas=(0.9, 0.999), eps=1e-6, weight_decay=weight_decay)
    for step in range(20):
        # A schedule changes it at every step, for which nothing is compiled again.
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
        for i, parameter in enumerate(parameters):
            parameter.grad = torch.randn(30, 5, generator=generator)
            gradient = parameter.grad.double()
            means[i] = 0.9 * means[i] + 0.1 * gradient
            squares[i] = 0.999 * squares[i] + 0.001 * gradient**2
            update = means[i] / (squares[i].sqrt() + 1e-6) + weight_decay * expected[i]
            norm = expected[i].norm().clamp(0, 10)
            ratio = norm / (update.norm() + 1e-6) if norm > 0 and update.norm() > 0 else 1.0
            expected[i] = expected[i] - 0.01 / (1 + step) * ratio * update
        optimizer.step()
        for parameter, right in zip(parameters, expected, strict=True):
            assert float((parameter.detach() - right).norm() / right.norm()) < 1e-5
    # The second graph is for the norms that the first step has stored.
    assert graphs.frame_count == (2 if compiled else 0)


@pytest.mark.parametrize(("weight_decay", "moved"), [(0.0, 44), (0.1, 48)])
def test_a_compiled_update_of_lamb_moves_44_or_48_bytes_for_each_weight(monkeypatch, weight_decay, moved):
    """Inductor counts them while it generates code, which is then neither built nor run."""
    weights = [torch.nn.Parameter(torch.ones(400, 300)), torch.nn.Parameter(torch.ones(500))]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = make_lamb(weights, compiled=True, lr=0.01, weight_decay=weight_decay)
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *args, **kwargs: lambda *arguments: None)
    monkeypatch.setattr(compile_fx, "inductor_metrics_log", Mock())
    torch._dynamo.reset()
    metrics.reset()
    with inductor.patch(fx_graph_cache=False):
        optimizer.step()
    assert metrics.num_bytes_accessed / sum(weight.numel() for weight in weights) == pytest.approx(moved, abs=0.1)


@pytest.mark.parametrize("told", [False, True])
def test_the_trainer_compiles_lamb_with_the_layers(tmp_path, monkeypatch, told):
    graphs = CompileCounterWithBackend("eager")
    monkeypatch.setattr(trainer, "compile_layers", lambda model: None)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=graphs))
    given = {"optimizer": "lamb", "compile_layers": told, "max_steps": 1, "save_strategy": "no", "report_to": "none"}
    arguments = TransfoXLTrainingArguments(str(tmp_path), use_cpu=True, per_device_train_batch_size=4, **given)
    text = TokenStream(torch.arange(100) % 50, segment_length=5, batch_size=4)
    TransfoXLTrainer(TransfoXLForCausalLM(small_config()), arguments, train_dataset=text).train()
    # A graph for each group: the tables of embeddings have their own.
    assert graphs.frame_count == (2 if told else 0)


def optimization(tmp_path, **changes) -> TransfoXLTrainingArguments:
    return parse_arguments([str(write_recipe(tmp_path / "recipe.yaml", **changes)), "--smoke"]).training


@pytest.mark.parametrize(("name", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)])
def test_adam_has_its_decay_in_the_gradient_and_adamw_beside_it(tmp_path, make_model, name, kind):
    model = make_model()
    arguments = optimization(tmp_path, optimizer=name, weight_decay=0.1, adam_beta2=0.98, adam_epsilon=1e-5)
    optimizer = make_optimizer(model, arguments)
    assert type(optimizer) is kind
    for group in optimizer.param_groups:
        assert (group["weight_decay"], group["betas"], group["eps"]) == (0.1, (0.9, 0.98), 1e-5)
        assert group["fused"]
    parameters = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(parameters) == sorted(map(id, model.parameters()))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_model_of_vectors_has_an_optimiser_too(tmp_path, name):
    model = TransfoXLModel(small_config(vocab_size=0, input_size=5))
    optimizer = make_optimizer(model, optimization(tmp_path, optimizer=name))
    parameters = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(parameters) == sorted(map(id, model.parameters()))


@pytest.mark.parametrize("name", ["seed", "warmup_steps", "mem_len"])
def test_what_may_be_zero(tmp_path, name):
    recipe = write_recipe(tmp_path / "recipe.yaml", **{name: 0})
    found = parse_arguments([str(recipe), "--data", "d", "--output", "o"])
    assert 0 in [found.config.get(name), getattr(found.training, name, None)]


def test_muon_is_for_the_matrices_of_the_layers(tmp_path, make_model):
    """Its steps are orthogonal, and as long as AdamW's; everything else has AdamW, and nothing is left out."""
    model = make_model(init_std=0.02)
    arguments = optimization(tmp_path, optimizer="muon", learning_rate=0.01, weight_decay=0.0, embedding_lr_factor=0.5)
    optimizer = make_optimizer(model, arguments)
    parameters = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(parameters) == sorted(map(id, model.parameters()))
    matrices, *rest = optimizer.param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kinds = {names[id(parameter)].split(".")[-2] for parameter in matrices["params"]}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "r_proj", "up_proj", "down_proj"}
    assert [group["lr"] for group in rest] == [0.01, 0.005] and not any(group["use_muon"] for group in rest)
    weight = model.transformer.layers[0].mlp.up_proj.weight
    before = weight.detach().clone()
    model(torch.arange(10)[None], labels=torch.arange(10)[None]).loss.backward()
    gradient = torch.linalg.svdvals(weight.grad)
    optimizer.step()
    singular = torch.linalg.svdvals(before - weight.detach())
    assert singular[0] / singular[8] < 2 < gradient[0] / gradient[8], "nine targets, each of them counts as much"
    assert 0.0005 < (before - weight.detach()).square().mean().sqrt().item() < 0.005


# --- resuming --------------------------------------------------------------------------------------------------------

MEMORY = {
    "roll": True,
    "mem_warmup_ratio": 0.8,
    "average": "ema",
    "ema_decay": 0.7,
    "optimizer": "lamb",
    "gradient_accumulation_steps": 2,
}
EXTENDED = {
    "varlen": True,
    "ext_len": 4,
    "mem_len": 0,
    "scale_lr_by_length": True,
    "average": "equal",
    "optimizer": "muon",
    "lr_scheduler_type": "warmup_stable_decay",
    "lr_scheduler_kwargs": {"num_decay_steps": 3, "decay_type": "linear"},
    "word_dropout": 0.1,
    "input_dropout": 0.2,
    "output_dropout": 0.2,
    "ar": 0.2,
    "tar": 0.1,
}


def comparable_log(output: Path) -> list[dict]:
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines]


@pytest.mark.parametrize(
    "changes", [MEMORY, pytest.param(EXTENDED, marks=pytest.mark.slow)], ids=["memory", "extended-context"]
)
def test_killed_and_resumed_is_bit_for_bit_the_uninterrupted_run(tmp_path, corpus, changes):
    """Killed after some steps, and while it writes; dropout on. Every line of the log but for the speed."""
    chance = random.Random(0)
    recipe = write_recipe(
        tmp_path / "recipe.yaml", dropout=0.2, dropatt=0.1, eval_steps=4, save_steps=3, logging_steps=2, **changes
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run([recipe, "--data", corpus, "--output", whole]) == [0]
    argv = [recipe, "--data", corpus, "--output", killed, "--resume"]
    for _ in range(3):
        [code] = run(argv, kill_at=chance.randrange(2, 30))
        assert code == -signal.SIGKILL
    assert run(argv) == [0]
    assert comparable_log(killed) == comparable_log(whole)
    assert (killed / "results.json").read_text() == (whole / "results.json").read_text()
    # Validations at 4, 8 and 12, and a line of training with each, every 2 steps and with every checkpoint.
    assert [line["step"] for line in comparable_log(whole)] == [2, 3, 4, 4, 6, 8, 8, 9, 10, 12, 12]


def test_a_card_without_figures_is_written_again(tmp_path, recipe, corpus, monkeypatch):
    """Killed as it is written, a run goes on there: results.json, which says that all is done, comes behind it."""
    argv = [recipe, "--data", corpus, "--output", tmp_path / "output", "--resume"]
    with monkeypatch.context() as patched:
        patched.setattr(report, "write_model_card", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(*argv)
    train(*argv)
    scored = json.loads((tmp_path / "output" / "results.json").read_text())
    results = ModelCard.load(tmp_path / "output" / "README.md").data.eval_results
    assert results[-1].metric_value == pytest.approx(scored["test"]["bits_per_token"], rel=1e-3)


def test_what_a_killed_run_left_unfinished_goes(tmp_path, corpus):
    output = tmp_path / "output"
    recipe = write_recipe(tmp_path / "recipe.yaml", max_steps=4, save_steps=2, eval_steps=2)
    train(recipe, "--data", corpus, "--output", output)
    for name in ("_unfinished-9", "_unfinished-replaced-x"):
        (output / name).mkdir()
    (output / "_unfinished-1-log.jsonl").touch()
    (output / "checkpoint-4").rename(output / "_unfinished-9" / "checkpoint-4")
    train(recipe, "--data", corpus, "--output", output, "--resume", "--max_steps", "6", "--save_total_limit", "9")
    assert sorted(path.name for path in output.glob("checkpoint-*")) == [f"checkpoint-{step}" for step in (2, 4, 6)]
    assert not list(output.glob("_unfinished*")) and len(read_log(output)) == 6


def test_settings_of_an_optimiser_are_those_that_are_asked_for(tmp_path, corpus, capsys):
    """A checkpoint has its own in it; what a run is told and writes down is what it does."""
    recipe = write_recipe(tmp_path / "recipe.yaml", max_steps=4, save_steps=4)
    losses = {}
    for name, options in {"same": [], "other": ["--weight_decay", "9"]}.items():
        train(recipe, "--data", corpus, "--output", tmp_path / name)
        train(recipe, "--data", corpus, "--output", tmp_path / name, "--resume", "--max_steps", "8", *options)
        losses[name] = read_log(tmp_path / name)
    assert losses["same"][:5] == losses["other"][:5] and len(losses["other"]) == 8
    assert losses["same"][5] != losses["other"][5]
    said = capsys.readouterr().err
    assert "from step 4 on weight_decay is 9.0, until then" in said
    written = yaml.safe_load((tmp_path / "other" / "recipe.yaml").read_text())
    assert (written["weight_decay"], written["max_steps"]) == (9.0, 8)


def test_an_average_is_not_left_behind(tmp_path, corpus, capsys):
    """The best loss so far is of the average, so a run without the average must not compare its losses with it."""
    recipe = write_recipe(tmp_path / "recipe.yaml", max_steps=4, save_steps=4, average="equal")
    train(recipe, "--data", corpus, "--output", tmp_path / "output")
    options = ["--data", corpus, "--output", tmp_path / "output", "--resume", "--max_steps", "8"]
    for other in ("none", "ema"):
        said = refused(capsys, recipe, *options, "--average", other)
        assert (
            f"is of a training with {{'average': 'equal'}}, but this one has {{'average': '{other}'}}: resume" in said
        )
    train(recipe, *options)


@pytest.mark.parametrize(
    "changed",
    [
        ["--pre_lnorm", "True"],
        pytest.param(["--optimizer", "lamb"], marks=pytest.mark.slow),
        pytest.param(["--tie_word_embeddings", "False"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_weights_of_the_same_shapes_are_no_other_models(tmp_path, corpus, capsys, changed):
    """Nor another optimiser's moments. What is as it was, though it was not said, may be said."""
    recipe = write_recipe(tmp_path / "recipe.yaml", max_steps=4, save_steps=4)
    argv = [recipe, "--data", corpus, "--output", tmp_path / "output"]
    train(*argv)
    before = (tmp_path / "output" / "recipe.yaml").read_text()
    said = refused(capsys, *argv, "--resume", "--max_steps", "6", *changed)
    assert f"is of a training with {{'{changed[0][2:]}': " in said and "resume with the same text" in said
    assert (tmp_path / "output" / "recipe.yaml").read_text() == before and (
        tmp_path / "output" / "results.json"
    ).exists()
    same = ["--pre_lnorm", "False", "--untie_r", "True", "--attn_type", "0", "--d_embed", str(RECIPE["d_model"])]
    train(*argv, "--resume", "--max_steps", "6", *same)


def test_a_checkpoint_that_was_put_elsewhere_is_replaced_and_left_there(tmp_path, corpus):
    recipe = write_recipe(tmp_path / "recipe.yaml", max_steps=4, save_steps=2, eval_steps=2, save_total_limit=1)
    argv = [recipe, "--data", corpus, "--output", tmp_path / "output"]
    train(*argv)
    (tmp_path / "output" / "checkpoint-4").rename(tmp_path / "elsewhere")
    (tmp_path / "output" / "checkpoint-4").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "output" / "checkpoint-6").symlink_to(tmp_path / "nowhere")
    train(*argv, "--resume", "--max_steps", "6")
    found = {path.name: path.is_symlink() for path in (tmp_path / "output").glob("checkpoint-*")}
    assert (
        found == {"checkpoint-4": True, "checkpoint-6": False}
        and (tmp_path / "elsewhere" / "model.safetensors").exists()
    )


def test_a_shorter_memory_goes_on_from_the_end_of_the_longer_one(tmp_path, corpus):
    recipe = write_recipe(tmp_path / "recipe.yaml", max_steps=4, save_steps=4)
    for mem_len in ("3", "0"):
        output = tmp_path / f"to-{mem_len}"
        train(recipe, "--data", corpus, "--output", output)
        train(recipe, "--data", corpus, "--output", output, "--resume", "--max_steps", "6", "--mem_len", mem_len)
        assert len(read_log(output)) == 6 and (output / "results.json").exists()


def test_fewer_steps_than_were_done(tmp_path, recipe, corpus, capsys):
    argv = [recipe, "--data", corpus, "--output", tmp_path / "output"]
    train(*argv, "--max_steps", "6")
    files = {name: (tmp_path / "output" / name).read_bytes() for name in ("recipe.yaml", "results.json", "log.jsonl")}
    message = refused(capsys, *argv, "--resume", "--max_steps", "4")
    assert "4 steps are fewer than the 6 that" in message and message.endswith("give 6 or more")
    assert files == {name: (tmp_path / "output" / name).read_bytes() for name in files}


def test_resuming_what_is_done_or_was_never_begun(tmp_path, recipe, corpus, capsys):
    argv = [recipe, "--data", corpus, "--output", tmp_path / "output", "--resume"]
    train(*argv)
    first, log = capsys.readouterr().out, (tmp_path / "output" / "log.jsonl").read_text()
    train(*argv)
    again = capsys.readouterr().out
    assert first.endswith(again) and again.startswith("validation: perplexity ")
    assert (tmp_path / "output" / "log.jsonl").read_text() == log
    # Longer, it goes on.
    train(*argv, "--max_steps", "15")
    assert len(read_log(tmp_path / "output")) == 15


RESUMED = ["--resume", "--eval_steps", "100", "--lr_scheduler_type", "constant_with_warmup"]


def test_an_extended_run_keeps_the_best_model_of_its_first_part(tmp_path, recipe, corpus):
    output = tmp_path / "output"
    argv = [recipe, "--data", corpus, "--output", output, *RESUMED]
    train(*argv, "--max_steps", "6")
    train(*argv, "--max_steps", "8", "--learning_rate", "0.5")
    first, last = read_log(output, "validation_loss")
    assert json.loads((output / "results.json").read_text())["validation"]["nll"] == pytest.approx(first)
    assert first < last


def test_an_extended_run_that_is_killed_in_its_last_validation_makes_up_for_it(tmp_path, recipe, corpus, monkeypatch):
    """The resumed run validates again, and does not take the first part's results for its own."""
    output = tmp_path / "output"
    argv = [recipe, "--data", corpus, "--output", output, *RESUMED]
    train(*argv, "--max_steps", "6")

    with monkeypatch.context() as patch:
        patch.setattr(report.RunReport, "on_evaluate", stopped)
        with pytest.raises(SystemExit, match="stopped"):
            train(*argv)
    train(*argv)
    first, last = read_log(output, "validation_loss")
    assert json.loads((output / "results.json").read_text())["validation"]["nll"] == pytest.approx(last)
    assert last < first


class Killed(BaseException):
    """In the place of a signal that ends a process."""


def train_and_kill_at(step: int, *argv):
    """`train`, as if killed before this step; whether its validation came about has to be seen to."""

    def training_step(self, *batch, original=TransfoXLTrainer.training_step):
        if self.state.global_step == step:
            raise Killed
        return original(self, *batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransfoXLTrainer, "training_step", training_step)
        with pytest.raises(Killed):
            train(*argv)


def check_best(output: Path, step: int):
    """The model in the folder has the loss of the validation of this step, the lowest of all."""
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    assert min(losses, key=losses.__getitem__) == step
    results = json.loads((output / "results.json").read_text())
    assert results["validation"]["nll"] == pytest.approx(losses[step], rel=1e-5)


# With these the steps that follow are worse.
WORSE = ["--lr_scheduler_type", "constant_with_warmup", "--warmup_steps", "0", "--learning_rate", "0.3"]


@pytest.mark.parametrize("average", ["none", "ema"])
def test_a_run_that_was_killed_ends_with_its_best_model(tmp_path, corpus, monkeypatch, average):
    """Each model that is the best so far is a checkpoint; of an average, its own. Also in a folder that was moved, and
    where the run is killed again as it saves its model.
    """
    output, moved = tmp_path / "output", tmp_path / "moved"
    recipe = write_recipe(
        tmp_path / "recipe.yaml", eval_steps=2, save_steps=100, lr_scheduler_type="constant_with_warmup"
    )
    argv = [recipe, "--data", corpus, "--average", average, "--ema_decay", "0.5", "--resume", "--output"]
    train(*argv, output, "--max_steps", "4")
    train_and_kill_at(7, *argv, output, "--max_steps", "8")
    assert (output / "checkpoint-6").is_dir()
    output.rename(moved)
    with monkeypatch.context() as patch:
        patch.setattr(command, "save_best", stopped)
        with pytest.raises(SystemExit, match="stopped"):
            train(*argv, moved, "--max_steps", "12", *WORSE)
    assert not (moved / "results.json").exists()
    train(*argv, moved, "--max_steps", "12", *WORSE)
    check_best(moved, 6)


def stopped(*args, **kwargs):
    raise KeyboardInterrupt


def test_a_run_goes_on_in_other_chunks_with_the_same_steps(tmp_path, recipe, corpus):
    argv = [recipe, "--data", corpus, "--lr_scheduler_type", "constant_with_warmup", "--output"]
    train(*argv, tmp_path / "whole")
    train(*argv, tmp_path / "cut", "--max_steps", "3")
    train(*argv, tmp_path / "cut", "--gradient_accumulation_steps", "2", "--resume")
    for value in ("loss", "grad_norm"):
        found, expected = (read_log(tmp_path / name, value) for name in ("cut", "whole"))
        np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_streams_that_were_rolled_go_on_where_they_were(tmp_path, capsys, recipe, corpus):
    """Another seed, or none, would begin them elsewhere."""
    argv = [recipe, "--data", corpus, "--output", tmp_path / "output", "--resume", "--max_steps"]
    train(*argv, "3", "--roll", "true", "--seed", "1")
    settings = (tmp_path / "output" / "recipe.yaml").read_text()
    for options, now in (["--roll", "true", "--seed", "2"], 2), (["--seed", "1"], None):
        message = refused(capsys, *argv, "6", *options)
        assert f"with {{'roll_seed': 1}}, but this one has {{'roll_seed': {now}}}: " in message
    assert (tmp_path / "output" / "recipe.yaml").read_text() == settings


def test_checkpoints_that_are_kept(tmp_path, recipe, corpus):
    output = tmp_path / "output"
    train(recipe, "--data", corpus, "--output", output, "--save_steps", "2", "--save_total_limit", "3")
    assert sorted(path.name for path in output.glob("checkpoint-*")) == [
        "checkpoint-10",
        "checkpoint-12",
        "checkpoint-8",
    ]
    # The last one is damaged, so that the one before it is resumed.
    (output / "checkpoint-12" / "optimizer.pt").write_bytes(b"")
    assert last_checkpoint(output) == str(output / "checkpoint-10")


# --- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [*(pytest.param(changes, marks=pytest.mark.slow) for changes in ({}, MEMORY)), EXTENDED],
    ids=["plain", "memory", "extended-context"],
)
def test_two_processes_give_the_losses_of_one(tmp_path, corpus, changes):
    quiet = {name: 0.0 for name in changes if name.endswith("dropout")}
    changes = changes | quiet | {"gradient_accumulation_steps": 1}
    # Of three streams of the validation one process has one, and the other two.
    recipe = write_recipe(tmp_path / "recipe.yaml", save_steps=5, eval_batch_size=3, **changes)
    for processes, name in ((1, "one"), (2, "two")):
        argv = [recipe, "--data", corpus, "--output", tmp_path / name, "--max_steps", "10"]
        assert set(run(argv, processes)) == {0}
    for value in ("loss", "grad_norm", "validation_loss", "tokens"):
        found, expected = (read_log(tmp_path / name, value) for name in ("two", "one"))
        np.testing.assert_allclose(found, expected, rtol=1e-4 if value == "grad_norm" else 1e-5, err_msg=value)
    # Memory is saved in the order of the streams: another number of processes goes on with it.
    shutil.copytree(tmp_path / "two", tmp_path / "changed")
    shutil.rmtree(tmp_path / "changed" / "checkpoint-10")
    argv = [recipe, "--data", corpus, "--output", tmp_path / "changed", "--max_steps", "10", "--resume"]
    assert run(argv) == [0]
    np.testing.assert_allclose(read_log(tmp_path / "changed"), read_log(tmp_path / "one"), rtol=1e-5)


@pytest.mark.parametrize(
    "sharded",
    [
        "fsdp2",
        pytest.param(
            "deepspeed",
            marks=pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"),
        ),
    ],
)
@pytest.mark.slow
def test_sharded_over_two_processes(tmp_path, corpus, sharded):
    """The losses of one process, a whole model at the end, and it resumes. One of them validates nothing."""
    recipe = write_recipe(tmp_path / "recipe.yaml", eval_batch_size=1)
    argv = [recipe, "--data", corpus, "--max_steps", "10", "--output"]
    train(*argv, tmp_path / "one")
    assert run([*argv, tmp_path / "two"], 2, sharded=sharded) == [0, 0]
    parts = {"fsdp2": "rng_state_1.pth", "deepspeed": "*zero_pp_rank_1_*optim_states.pt"}
    assert list((tmp_path / "two" / "checkpoint-10").rglob(parts[sharded])), "of the second process"
    shutil.rmtree(tmp_path / "two" / "checkpoint-10")
    for value in ("loss", "validation_loss"):
        found, expected = (read_log(tmp_path / name, value) for name in ("two", "one"))
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=value)
    assert run([*argv, tmp_path / "two", "--resume"], 2, sharded=sharded) == [0, 0]
    np.testing.assert_allclose(read_log(tmp_path / "two"), read_log(tmp_path / "one"), rtol=1e-5)
    results = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two")]
    assert results[1]["test"]["nll"] == pytest.approx(results[0]["test"]["nll"], rel=1e-4)


def test_lamb_is_refused_where_weights_are_sharded(recipe, tmp_path, make_model):
    """At its first step PyTorch has no clamp in place of a norm of all parts."""
    arguments = TransfoXLTrainingArguments(str(tmp_path), optimizer="lamb", use_cpu=True, save_strategy="no")
    sharded = TransfoXLTrainer(make_model(), arguments)
    sharded.is_fsdp_enabled = True
    with pytest.raises(ValueError, match="--optimizer lamb needs whole weights, which FSDP does not keep: use adam"):
        sharded.create_optimizer()


def test_folders_that_are_the_present_one_are_named(tmp_path, corpus, monkeypatch):
    """Their names are in the card, of which an empty one would be none."""
    recipe = write_recipe(tmp_path / "recipe.yaml", max_steps=1, n_layer=1)
    (tmp_path / "a run").mkdir()
    monkeypatch.chdir(tmp_path / "a run")
    train(recipe, "--data", corpus, "--output", ".")
    card = ModelCard.load("README.md")
    assert card.data.model_name == "a run" and "\n# a run\n" in card.text
    monkeypatch.chdir(corpus)
    train(recipe, "--data", ".", "--output", tmp_path / "another")
    results = ModelCard.load(tmp_path / "another" / "README.md").data.eval_results
    assert {result.dataset_name for result in results} == {corpus.name}


@pytest.mark.parametrize(
    "options",
    [["--gradient_checkpointing"], ["--bf16"]],
    ids=lambda options: options[0],
)
def test_options_that_change_no_loss(tmp_path, recipe, corpus, by_hand, options):
    train(recipe, "--data", corpus, "--output", tmp_path / "output", *options)
    rtol = 0.02 if "--bf16" in options else 1e-4
    np.testing.assert_allclose(read_log(tmp_path / "output"), by_hand[0], rtol=rtol)


@pytest.mark.parametrize(("has_gpu", "has_bf16"), [(True, True), (True, False), (False, True), (False, False)])
def test_what_is_chosen_where_nobody_says_anything(monkeypatch, recipe, has_gpu, has_bf16):
    """On a GPU a process reads ahead, and batches are copied while it computes."""
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16 or including_emulation)
    monkeypatch.setattr(recipes, "bf16_is_faster", lambda: has_bf16)
    values = {"optimizer": None}
    recipes._choose(values, set())
    assert values["bf16"] is has_bf16 and values["optimizer"] == "adam"
    assert values.get("accelerator_config") == ({"non_blocking": True} if has_gpu else None)
    recipes._choose(told := {"optimizer": None}, {"bf16"})
    assert "bf16" not in told


@pytest.mark.parametrize(("has_bf16", "precision", "rtol"), [(True, "bf16", 0.02), (False, "fp32", 1e-4)])
def test_a_cpu_trains_in_bf16_if_it_has_it(
    tmp_path, monkeypatch, capsys, recipe, corpus, by_hand, has_bf16, precision, rtol
):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    monkeypatch.setattr(recipes, "bf16_is_faster", lambda: has_bf16)
    train(recipe, "--data", corpus, "--output", tmp_path / "output")
    assert f"on 1 × cpu in {precision}: " in capsys.readouterr().err
    losses = read_log(tmp_path / "output")
    np.testing.assert_allclose(losses, by_hand[0], rtol=rtol)
    assert np.allclose(losses, by_hand[0], rtol=1e-4, atol=0) is not has_bf16


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is another")
@pytest.mark.slow
def test_a_large_tensor_gets_the_memory_of_the_one_before():
    """In a process of its own: the setting is the whole process's."""
    program = """
import resource, torch
from txl_hf.commands.train_lm import keep_freed_memory

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(16):
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(pages())
keep_freed_memory()
pages()
print(pages())
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    otherwise, kept = map(int, result.stdout.split())
    # Of the tensors before those that are counted, the first one or two are in new memory.
    assert kept < otherwise / 100


@pytest.mark.slow
def test_a_compiled_run_has_the_losses_of_another(tmp_path, corpus, monkeypatch):
    """A layer, steps without memory and with all of it, and a validation in segments as long as theirs. A captured
    graph overwrites what it has returned, and would compute with a mask that hides nothing."""
    returned, step = [], TransfoXLTrainer.training_step
    masks = []

    def overwriting(self, *batch):
        for states in returned:
            states.fill_(math.nan)
        return step(self, *batch)

    def recorded(outputs, compiled):
        memory = memory_of(outputs, compiled)
        returned[:] = memory["mems"]
        masks.append(memory["mems_mask"])
        return memory

    lengths = {"tgt_len": 8, "mem_len": 8, "eval_tgt_len": 8}
    recipe = write_recipe(tmp_path / "recipe.yaml", n_layer=1, max_steps=3, eval_steps=3, **lengths)
    torch.compiler.reset()
    train(recipe, "--data", corpus, "--output", tmp_path / "plain")
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "memory_of", recorded)
        patch.setattr(TransfoXLTrainer, "training_step", overwriting)
        options = ["--torch_compile", "True", "--torch_compile_backend", "aot_eager"]
        train(recipe, "--data", corpus, "--output", tmp_path / "compiled", *options)
    assert masks == 3 * [None]
    for value in ("loss", "validation_loss"):
        plain, compiled = (read_log(tmp_path / name, value) for name in ("plain", "compiled"))
        assert len(plain) == (3 if value == "loss" else 1)
        np.testing.assert_allclose(compiled, plain, rtol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], marks=pytest.mark.slow),
        pytest.param(["--gradient_accumulation_steps", "2"], marks=pytest.mark.slow),
        ["--dropout", "0.2", "--bf16"],
        ["--cutoffs", "5", "12", "--bf16"],
    ],
    ids=str,
)
def test_a_captured_run_has_the_losses_of_another(tmp_path, corpus, recorder, monkeypatch, options):
    monkeypatch.setattr(adaptive_transfo_xl, "FEW_LOGITS", -1)
    lengths = {"tgt_len": 8, "mem_len": 12, "eval_tgt_len": 8}
    recipe = write_recipe(tmp_path / "recipe.yaml", n_layer=2, max_steps=8, cutoffs=[], div_val=1, **lengths)
    given = recipe, "--data", corpus, *options, "--output"
    train(*given, tmp_path / "plain", "--cuda_graphs", "False")
    evaluating = recorder.recorded
    train(*given, tmp_path / "captured")
    assert recorder.recorded > 2 * evaluating
    for value in ("loss", "validation_loss", "grad_norm"):
        plain, found = (read_log(tmp_path / name, value) for name in ("plain", "captured"))
        np.testing.assert_allclose(found, plain, rtol=1e-4)


def test_while_the_memory_grows_no_step_is_captured(tmp_path, corpus, recorder):
    lengths = {"tgt_len": 4, "mem_len": 12, "eval_mem_len": 0, "mem_warmup_ratio": 0.5}
    recipe = write_recipe(tmp_path / "recipe.yaml", n_layer=1, max_steps=24, cutoffs=[], div_val=1, **lengths)
    given = recipe, "--data", corpus, "--output"
    train(*given, tmp_path / "plain", "--cuda_graphs", "False")
    evaluating = recorder.recorded
    train(*given, tmp_path / "captured")
    assert recorder.recorded == 2 * evaluating + 2
    plain, found = (read_log(tmp_path / name) for name in ("plain", "captured"))
    np.testing.assert_allclose(found, plain, rtol=1e-4)


def test_a_step_of_several_segments_reads_as_much_more_text_and_is_not_captured(tmp_path, corpus, recorder):
    """Evaluations read segments of tgt_len as before."""
    recipe = write_recipe(tmp_path / "recipe.yaml", n_layer=1, max_steps=8, cutoffs=[], div_val=1, tgt_len=8)
    given, tokens = (recipe, "--data", corpus, "--output"), []
    train(*given, tmp_path / "1", "--cuda_graphs", "False")
    evaluating = recorder.recorded
    train(*given, tmp_path / "3", "--backprop_segments", "3")
    assert recorder.recorded == 2 * evaluating
    tokens = [read_log(tmp_path / name, "tokens")[-1] for name in ("1", "3")]
    assert tokens[1] == 3 * tokens[0] > 0


# --- refusals --------------------------------------------------------------------------------------------------------


def refused(capsys, *argv: str | Path) -> str:
    """The one line with which a run ends before it begins."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        train(*argv)
    message = exit.value.code if isinstance(exit.value.code, str) else capsys.readouterr().err.strip()
    assert exit.value.code and message.startswith("error: ") and "\n" not in message
    return message


@pytest.mark.parametrize(
    ("ended_by", "message"),
    [
        (KeyboardInterrupt(), "stopped: the same command with --resume goes on from the last checkpoint"),
        (OSError(28, "No space left on device"), "error: No space left on device"),
    ],
)
def test_what_ends_a_run_is_said_in_one_line(tmp_path, recipe, corpus, monkeypatch, ended_by, message):
    """And the run goes on from where it was."""

    def fails(*args, **kwargs):
        raise ended_by

    argv = [recipe, "--data", corpus, "--output", tmp_path / "output", "--resume"]
    with monkeypatch.context() as patch:
        patch.setattr(report.RunReport, "on_evaluate", fails)
        with pytest.raises(SystemExit) as exit:
            train(*argv, "--save_steps", "4")
    assert exit.value.code == message
    assert (tmp_path / "output" / "checkpoint-4").exists()
    train(*argv)
    assert len(read_log(tmp_path / "output")) == 12


def test_a_run_saves_and_stops_on_sigterm_and_goes_on_later(tmp_path, recipe, corpus, monkeypatch):
    argv = [recipe, "--data", corpus, "--output", tmp_path / "output", "--resume"]

    def ask(self):
        managers = [each.jit_manager for each in self.callback_handler.callbacks if hasattr(each, "jit_manager")]
        managers[0].is_checkpoint_requested |= self.state.global_step == 3

    with monkeypatch.context() as patch:
        after_steps(patch, ask)
        with pytest.raises(SystemExit, match="stopped: the same command with --resume goes on"):
            train(*argv)
    assert [path.name for path in (tmp_path / "output").glob("checkpoint-*")] == ["checkpoint-4"]
    train(*argv)
    assert len(read_log(tmp_path / "output")) == 12


def test_a_full_disk_is_said_in_one_line(tmp_path, recipe, corpus, monkeypatch):
    """torch and safetensors have errors of their own for it."""
    save = torch.save

    def full(state, path, **options):
        save(state, "/dev/full")

    argv = [recipe, "--data", corpus, "--output", tmp_path / "output", "--resume", "--save_steps", "3"]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(SystemExit, match=f"error: {tmp_path / 'output'} cannot be written, as on a disk that is"):
            train(*argv)
    train(*argv)
    assert len(read_log(tmp_path / "output")) == 12


def test_other_settings_on_resuming_are_said_and_written_down(tmp_path, capsys, recipe, corpus):
    """And those of a run that is done stay what they were."""
    output = tmp_path / "output"
    argv = [recipe, "--data", corpus, "--output", output]

    def resume(*options) -> str:
        capsys.readouterr()
        train(*argv, "--resume", *options)
        return capsys.readouterr().err

    def written() -> dict:
        return yaml.safe_load((output / "recipe.yaml").read_text())

    train(*argv, "--max_steps", "6")
    said = resume("--learning_rate", "0.002")
    assert "from step 6 on learning_rate is 0.002, until then 0.01\n" in said
    assert "from step 6 on max_steps is 12, until then 6\n" in said and said.count("until then") == 2
    assert written()["learning_rate"] == 0.002 and len(read_log(output)) == 12
    assert "until then" not in resume(), "the run is done"
    assert written()["learning_rate"] == 0.002
    assert "until then" not in resume("--learning_rate", "0.002")


def test_a_second_run_in_the_same_folder_is_refused_until_the_first_is_gone(tmp_path, capsys, recipe, corpus):
    argv, output = [recipe, "--data", corpus, "--output", tmp_path / "output"], tmp_path / "output"
    output.mkdir()
    hold = (
        "import filelock as f, sys, time; f = f.FileLock(sys.argv[1]); f.acquire(); print(flush=True); time.sleep(99)"
    )
    with subprocess.Popen([sys.executable, "-c", hold, output / "run.lock"], stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        for options in ([], ["--resume"]):
            message = refused(capsys, *argv, *options)
            assert (
                message == f"error: another process is writing to {output}: wait for its end, or choose another folder"
            )
        assert [path.name for path in output.iterdir()] == ["run.lock"]
        other.kill()
    train(*argv)
    assert (output / "results.json").exists()


def test_a_hopeless_learning_rate_is_named(tmp_path, recipe, corpus):
    with pytest.raises(SystemExit, match="error: the loss is nan before step .: lower --learning_rate"):
        train(
            recipe, "--data", corpus, "--output", tmp_path / "output", "--learning_rate", "1e30", "--save_steps", "1"
        )
    last = max((tmp_path / "output").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    steps = [step for step, loss in enumerate(read_log(tmp_path / "output"), start=1) if math.isfinite(loss)]
    assert last.name == f"checkpoint-{steps[-1]}", "none takes the place of one that can be gone on from"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval_every": 5}, "sets 'eval_every', which is --eval_steps now"),
        (
            {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"x": 1}},
            "--lr_scheduler_type cosine with --lr_scheduler_kwargs",
        ),
        ({"learnin_rate": 1.0}, "sets 'learnin_rate', which does not exist; the closest name is 'learning_rate'"),
        ({"batch_size": "many"}, "invalid int value: 'many'"),
        ({"batch_size": 0}, "--batch_size is 0, but must be at least 1"),
        ({"optimizer": "sgd"}, "invalid choice: 'sgd'"),
        ({"max_steps": None}, "set one of --max_steps and --num_train_epochs"),
        ({"max_steps": None, "num_train_epochs": 0.0}, "--num_train_epochs is 0.0, but must be above 0, and finite"),
        ({"max_steps": None, "num_train_epochs": -1.5}, "--num_train_epochs is -1.5, but must be above 0, and finite"),
        (
            {"max_steps": None, "num_train_epochs": math.inf},
            "--num_train_epochs is inf, but must be above 0, and finite",
        ),
        ({"average": "ema", "average_start": 12}, "--average_start is 12, but must be less than all 12 steps"),
        ({"word_dropout": 1.5}, "word_dropout=1.5 must be at least 0 and less than 1"),
        ({"cutoffs": [100, 600]}, "has 502 tokens, fewer than the recipe's cutoffs [100, 600]"),
        (
            {"gradient_accumulation_steps": 3},
            "has batch_size=4, which 1 process(es) × 3 accumulation step(s) cannot share: make it a multiple of 3",
        ),
        ({"mem_warmup_ratio": 1.5}, "--mem_warmup_ratio is 1.5, but must be from 0 to 1"),
        ({"mem_warmup_ratio": 0.5, "mem_len": 0}, "--mem_warmup_ratio 0.5 grows no memory, as mem_len is 0"),
        ({"roll": True, "varlen": True}, "--roll goes together with neither --varlen, nor --ext_len"),
        ({"tgt_len": 80}, "the text has 289 tokens, but batch_size=4 streams of at least one segment"),
        ({"learning_rate": -1e-3}, "Invalid learning rate: -0.001"),
        ({"learning_rate": math.nan}, "Invalid learning rate: nan"),
        ({"adam_epsilon": -1.0}, "Invalid epsilon value: -1.0"),
        ({"adam_beta2": 2.0}, "Invalid beta parameter at index 1: 2.0"),
        ({"average": "ema", "ema_decay": 1.5}, "--ema_decay is 1.5, but must be at least 0 and below 1"),
        ({"average_start": 3}, "--average_start 3 is of --average ema and equal: set it to 0"),
        ({"gate_bias": 3.0}, "--gate_bias 3 is of --gating gru: leave it out"),
        ({"embedding_lr_factor": -1.0}, "--embedding_lr_factor is -1, but must be at least 0"),
        ({"weight_decay": -0.1}, "Invalid weight_decay value: -0.1"),
        ({"loss": "half", "ext_len": 4}, "--loss half reads tgt_len=8 tokens again: leave out --ext_len 4"),
        (
            {"attn_type": 3, "mem_len": 0, "eval_tgt_len": 8, "eval_ext_len": 2},
            "reads 10 tokens at once, but the model learned max_klen=8 absolute positions",
        ),
        # As many as the text has: a file of Python, and each version has its own.
        ({"eval_batch_size": 2000}, "the validation text has {} tokens, too few for --eval_batch_size 2000"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_are_refused(tmp_path, capsys, corpus, changes, message):
    recipe = write_recipe(tmp_path / "recipe.yaml", **changes)
    message = message.format(len(load_from_disk(corpus)["validation"]))
    assert message in refused(capsys, recipe, "--data", corpus, "--output", tmp_path / "output")
    assert not (tmp_path / "output" / "recipe.yaml").exists()


def test_a_memory_in_evaluation_that_the_model_cannot_have_is_refused_before_training(tmp_path, capsys, corpus):
    """Typed, it is an error; the recipe's own is left out, as it is another encoding's."""
    recipe = write_recipe(tmp_path / "recipe.yaml", attn_type=2, mem_len=0, eval_mem_len=12)
    argv = [recipe, "--data", corpus, "--output", tmp_path / "output"]
    for options in (["--eval_mem_len", "4"], ["--eval-memory-lengths", "4"]):
        message = refused(capsys, *argv, *options)
        assert "attn_type=2 has absolute positions and no recurrence: mem_len=4 must be 0" in message
    assert not (tmp_path / "output").exists()
    train(*argv, "--max_steps", "1")
    assert json.loads((tmp_path / "output" / "results.json").read_text())["test"]["memory_length"] == 0


@pytest.mark.parametrize(
    ("set_by", "typed", "steps"),
    [
        ({"max_steps": 9}, ["--num_train_epochs", "0.5"], -1),
        ({"max_steps": 9}, ["--num-train-epochs=2"], -1),
        ({"max_steps": None, "num_train_epochs": 3.0}, ["--max_steps", "4"], 4),
        ({"max_steps": 9}, ["--max_steps", "4"], 4),
        ({"max_steps": 9}, [], 9),
    ],
)
def test_steps_on_the_command_line_replace_the_epochs_of_a_recipe_and_the_reverse(tmp_path, set_by, typed, steps):
    found = parse_arguments([str(write_recipe(tmp_path / "recipe.yaml", **set_by)), "--smoke", *typed])
    assert found.training.max_steps == steps
    assert ("max_steps" in found.settings) is (steps > 0) is ("num_train_epochs" not in found.settings)


def test_both_numbers_on_the_command_line_are_one_too_many(capsys, recipe):
    message = refused(capsys, recipe, "--smoke", "--max_steps", "4", "--num_train_epochs", "1")
    assert message == "error: set one of --max_steps and --num_train_epochs"


def test_a_run_of_steps_goes_on_for_epochs(tmp_path, recipe, corpus):
    """Its recipe then says epochs alone, and it is one that can be given again."""
    output = tmp_path / "output"
    train(recipe, "--data", corpus, "--output", output, "--max_steps", "4")
    # Nine steps each.
    train(recipe, "--data", corpus, "--output", output, "--num_train_epochs", "1", "--resume")
    assert [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()][-1]["step"] == 9
    written = yaml.safe_load((output / "recipe.yaml").read_text())
    assert written["num_train_epochs"] == 1.0 and "max_steps" not in written
    again = parse_arguments([str(output / "recipe.yaml"), "--resume"]).training
    assert (again.max_steps, again.num_train_epochs) == (-1, 1.0)


def test_a_schedule_on_the_command_line_leaves_out_the_details_of_the_recipes(tmp_path):
    schedule = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-3}}
    recipe = str(write_recipe(tmp_path / "recipe.yaml", **schedule))
    assert parse_arguments([recipe, "--smoke"]).training.lr_scheduler_kwargs == {"min_lr": 1e-3}
    assert not parse_arguments(
        [recipe, "--smoke", "--lr_scheduler_type", "constant_with_warmup"]
    ).training.lr_scheduler_kwargs


def test_command_lines_that_are_refused(tmp_path, capsys, recipe, corpus):
    missing = tmp_path / "missing"
    assert f"the recipe {missing} cannot be read: No such file" in refused(capsys, missing, "--smoke")
    assert "unrecognized arguments: --learnin_rate 1" in refused(capsys, recipe, "--learnin_rate", "1")
    assert refused(capsys, recipe, "--eval-every", "1").endswith("(it is --eval_steps now)")
    assert "--data is missing: name a folder" in refused(capsys, recipe, "--output", "x")
    assert "--output is missing" in refused(capsys, recipe, "--data", corpus)
    for data in (missing, recipe):
        said = refused(capsys, recipe, "--data", data, "--output", missing)
        assert f"--data {data} is no folder of txl-prepare" in said
    (tmp_path / "broken.yaml").write_text("a: [1")
    assert "is no YAML" in refused(capsys, tmp_path / "broken.yaml", "--smoke")
    (tmp_path / "list.yaml").write_text("- 1")
    assert "must hold lines 'name: value'" in refused(capsys, tmp_path / "list.yaml", "--smoke")


def test_help_shows_options_of_ours_and_those_that_a_recipe_sets(capsys, recipe):
    pages = {}
    for argv in (["--help"], ["--help-all"], [recipe, "--help"]):
        with pytest.raises(SystemExit) as exit:
            train(*argv)
        assert exit.value.code == 0
        pages[argv[-1], len(argv)] = " ".join(capsys.readouterr().out.split())
    for page in pages.values():
        for shown in ("--eval_mem_len", "--output ", "--learning_rate", "--n_layer", "--word_dropout", "--max_steps"):
            assert shown in page
    assert "--hub_model_id" not in pages["--help", 1] and "--hub_model_id" in pages["--help-all", 1]
    assert "Learning rate at its highest. (default: 0.00025)" in pages["--help", 1]
    assert "Learning rate at its highest. (default: 0.01)" in pages["--help", 2], "what will hold"


def test_options_of_our_own_are_few():
    groups = [group for group in recipes.GROUPS if group is not TransfoXLTrainingArguments]
    own = {entry.name for group in groups for entry in dataclasses.fields(group)}
    added = {entry.name for entry in dataclasses.fields(TransfoXLTrainingArguments)}
    assert len(own | (added - {entry.name for entry in dataclasses.fields(TrainingArguments)})) <= 45


def test_what_a_run_says(tmp_path, capsys, recipe, corpus, monkeypatch):
    """A run prints its plan, the expected time, its losses, and at the end the folder."""
    train(recipe, "--data", corpus, "--output", tmp_path / "output", "--eval_steps", "100")
    printed = capsys.readouterr()
    assert (
        "training 0.0 M parameters on 1 × cpu in fp32: 12 steps of 32 tokens, 1.3 epochs of a text of 289 tokens\n"
        in printed.err
    )
    assert "1/12" not in printed.err and printed.out.count("'perplexity': ") == 12, "no bar in a file"
    assert re.search(
        r"expected time: 0:00:\d\d more, at [\d,]+ tokens a second, without the validations\n", printed.err
    )
    options = ["--data", corpus, "--output", tmp_path / "bar", "--disable_tqdm", "false"]
    train(recipe, *options)
    assert "1/12" in capsys.readouterr().err
    *_, where, last = printed.out.splitlines()
    output = tmp_path / "output"
    assert where.endswith(f"M parameters, is in {output}; its figures are in {output / 'results.json'}")
    assert last == f'to write with it: txl-generate {output} --prompt "…"'


@pytest.mark.parametrize("package", ["datasets", "yaml"])
def test_a_missing_package_is_named_in_one_line(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    for name in ("train_lm", "recipe", "report"):
        monkeypatch.delitem(sys.modules, f"txl_hf.commands.{name}")
    with pytest.raises(SystemExit, match=r'is not installed: pip install "txl-hf\[train\]"'):
        commands.train(["--help"])


def test_corpora_that_are_refused(tmp_path, capsys, recipe, corpus):
    splits = load_from_disk(corpus)

    def message(**changed) -> str:
        folder = tmp_path / f"data-{len(list(tmp_path.iterdir()))}"
        present = {name: split for name, split in {**splits, **changed}.items() if split is not None}
        DatasetDict(present).save_to_disk(folder)
        AutoTokenizer.from_pretrained(corpus).save_pretrained(folder)
        return refused(capsys, recipe, "--data", folder, "--output", tmp_path / "output")

    def text(*ids: int) -> Dataset:
        return Dataset.from_dict({"token_ids": np.array(ids, dtype=np.int32)})

    assert "has no split 'test', only 'train', 'validation'" in message(test=None)
    assert "holds token ids from 1 to 502, outside the vocabulary [0, 502)" in message(test=text(*[1] * 9, 502))
    (tmp_path / "plain").mkdir()
    assert "error: " in refused(capsys, recipe, "--data", tmp_path / "plain", "--output", tmp_path / "output")


def test_models_that_are_refused(tmp_path, capsys, recipe, corpus, make_model):
    make_model().save_pretrained(tmp_path / "small")
    options = ["--data", corpus, "--output", tmp_path / "output", "--model_name_or_path"]
    plain = tmp_path / "plain.yaml"
    plain.write_text("max_steps: 2")
    message = refused(capsys, plain, *options, tmp_path / "small")
    assert f"has a vocabulary of 502, which does not fit {tmp_path / 'small'} with one of 61" in message
    make_model(vocab_size=502, cutoffs=[100, 300]).save_pretrained(tmp_path / "fits")
    message = refused(capsys, plain, *options, tmp_path / "fits", "--d_model", "20")
    assert f"--d_model is 20, but 16 in {tmp_path / 'fits'}: leave it out" in message
    other = TransfoXLTokenizer.train_from_iterator([" ".join(map(str, range(500)))], mode="whitespace")
    other.save_pretrained(tmp_path / "fits")
    message = refused(capsys, plain, *options, tmp_path / "fits")
    assert f"--data {corpus} has another vocabulary than {tmp_path / 'fits'}: 502 symbols" in message
    assert "missing" in refused(capsys, plain, *options, tmp_path / "missing")


def test_folders_that_are_refused(tmp_path, capsys, recipe, corpus):
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("Years of work.")
    options = ["--data", corpus, "--max_steps", "2", "--output"]
    for choice in ([], ["--resume"]):
        assert f"--output {other} exists and is not from" in refused(capsys, recipe, *options, other, *choice)
    assert (other / "thesis.txt").exists()
    output = tmp_path / "output"
    train(recipe, *options, output, "--save_steps", "1")
    assert "is in use: go on with --resume, or remove it" in refused(capsys, recipe, *options, output)
    # What goes wrong leaves it alone; a checkpoint of other streams is not for this run.
    settings = (output / "recipe.yaml").read_text()
    message = refused(capsys, recipe, *options, output, "--resume", "--d_inner", "20", "--max_steps", "4")
    assert f"is of a training with {{'d_inner': {RECIPE['d_inner']}}}, but this one has {{'d_inner': 20}}: " in message
    message = refused(capsys, recipe, *options, output, "--resume", "--batch_size", "2", "--max_steps", "4")
    assert "'batch_size': 4" in message and "resume with the same text, batch size" in message
    assert (output / "recipe.yaml").read_text() == settings


# --- a user ----------------------------------------------------------------------------------------------------------


def test_the_commands_that_a_user_types(tmp_path):
    """A text of one's own is prepared, trained on, and the run goes on where it was."""
    source = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text(encoding="utf-8")
    (tmp_path / "text.txt").write_text(source[:40_000], encoding="utf-8")

    def python(script: str, *argv: str | Path) -> subprocess.CompletedProcess:
        return run_script(EXAMPLES / script, *argv, cwd=tmp_path)

    prepared = python("prepare_corpus.py", "--corpus", "text", "--input", "text.txt", "--output", "data")
    assert prepared.returncode == 0, prepared.stderr
    recipe = write_recipe(tmp_path / "recipe.yaml")
    first = python("train_lm.py", recipe, "--data", "data", "--output", "output")
    assert first.returncode == 0 and "test: perplexity " in first.stdout, first.stderr
    assert "Traceback" not in first.stderr and "Warning" not in first.stderr, first.stderr
    scored = python("evaluate_lm.py", "--model", "output", "--data", "data", "--json")
    [found], trained = json.loads(scored.stdout)["results"], json.loads((tmp_path / "output/results.json").read_text())
    assert found["nll"] == pytest.approx(trained["test"]["nll"], rel=1e-6), "one figure for one model"
    wrong = python("train_lm.py", recipe, "--data", "data", "--output", "output")
    assert wrong.returncode != 0
    assert wrong.stderr == "error: --output output is in use: go on with --resume, or remove it\n"


@pytest.mark.parametrize(
    ("name", "written", "message"),
    [
        ("corpus.json", "{", "corpus.json is damaged (JSONDecodeError: "),
        ("corpus.json", "[1]", "corpus.json is damaged (AttributeError: "),
        (
            "corpus.json",
            '{"document_end": "x"}',
            "corpus.json is damaged (ValueError: document_end is 'x', which is no",
        ),
        (
            "corpus.json",
            '{"document_end": 100000}',
            "document_end is 100000, which is no token): prepare the text again",
        ),
        ("dataset_dict.json", "{", "data is damaged (JSONDecodeError: "),
        ("train/state.json", "{}", "data is damaged (KeyError: '_data_files'): prepare the text again"),
        ("train/data-00000-of-00001.arrow", None, "data is damaged (Expected to be able to read "),
    ],
)
def test_a_damaged_text_is_named(tmp_path, capsys, corpus, recipe, name, written, message):
    data = shutil.copytree(corpus, tmp_path / "data")
    if written is None:
        os.truncate(data / name, 500)
    else:
        (data / name).write_text(written)
    assert message in refused(capsys, recipe, "--data", data, "--output", tmp_path / "output")
