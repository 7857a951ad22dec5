"""A text of several documents through training, evaluation and the commands: each is read without those before it."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("accelerate")
pytest.importorskip("datasets")

from accelerate.state import AcceleratorState, GradientState
from test_trainer import compare, sharded
from transformers import AutoTokenizer

import tune_lm
from models import small_model
from train_lm_process import RECIPE
from trainer_process import DocumentStream, make_arguments, make_model, make_text, read_losses, run
from txl_hf import (
    ContinuousCache,
    DynamicEvaluation,
    MemoryLengths,
    TokenStream,
    TransfoXLConfig,
    TransfoXLTrainer,
    evaluate_language_model,
    token_losses,
)
from txl_hf.commands import evaluate_lm as evaluate
from txl_hf.commands import prepare_corpus as prepare
from txl_hf.commands import train_lm as command
from txl_hf.memories import memory_of

END = 0


def make_documents(lengths=(7, 1, 12, 30, 2, 9, 18, 5), seed=0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(1, 60, (length,), generator=generator) for length in lengths]
    return [torch.cat([text, torch.tensor([END])]) for text in texts]


@torch.no_grad()
def losses_alone(model, documents, segment_length: int, following) -> torch.Tensor:
    """Each document by itself, segment by segment; its last token predicts the first of the document that follows."""
    losses = []
    for document, after in zip(documents, following, strict=True):
        memory, targets = {}, torch.cat([document[1:], after[:1]])
        parts = zip(document.split(segment_length), targets.split(segment_length), strict=True)
        for part, labels in parts:
            part = part[: len(labels)]
            outputs = model(part[None], shift_labels=labels[None], **memory)
            memory = memory_of(outputs)
            losses.append(outputs.losses[0])
    return torch.cat(losses)


@pytest.mark.parametrize("told", ["token", "places"])
def test_each_token_costs_what_it_costs_in_its_document_alone(told):
    # The memory covers any document, so that it does not matter where segments are cut.
    model, documents = small_model(mem_len=40).eval(), make_documents()
    text = torch.cat(documents)
    ends = torch.tensor([len(document) for document in documents]).cumsum(0).tolist()
    options = {"document_end": END if told == "token" else ends}
    expected = losses_alone(model, documents, 100, [*documents[1:], documents[0]])[:-1]
    for settings in ({"segment_length": 8}, {"segment_length": 100}, {"segment_length": 3, "ext_len": 5}):
        losses = token_losses(model, text, memory_length=40, **settings, **options)
        torch.testing.assert_close(losses, expected, atol=2e-5, rtol=2e-5)
    result = evaluate_language_model(model, text, 8, 40, **options)
    assert result.nll == pytest.approx(expected.mean().item(), rel=1e-6)
    assert result.document_end == END if told == "token" else result.document_end.startswith("8 places, ")
    assert evaluate_language_model(model, text, 8, 40).document_end is None
    # Weights that do not move, and a cache of no weight, change nothing.
    adapted = token_losses(
        model, text, 8, 40, dynamic=DynamicEvaluation(0.0), cache=ContinuousCache(5, 0.0, 1.0), **options
    )
    torch.testing.assert_close(adapted, expected, atol=2e-5, rtol=2e-5)


def test_streams_that_begin_within_a_document():
    model, text = small_model(mem_len=40).eval(), torch.cat(make_documents())
    found = token_losses(model, text, 6, 40, batch_size=3, document_end=END)
    streams = [stream for stream in torch.tensor_split(text, 3)]
    expected = torch.cat([token_losses(model, stream, 6, 40, document_end=END) for stream in streams])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    # A window of tokens that are read anew, as a model without a memory is evaluated.
    window = {"memory_length": 0, "ext_len": 39, "same_length": False}
    anew = token_losses(model, text, 1, document_end=END, **window)
    torch.testing.assert_close(anew, token_losses(model, text, 6, 40, document_end=END), atol=2e-5, rtol=2e-5)
    zeros = small_model(mem_len=40, initial_memory="zeros").eval()
    zeros.load_state_dict(model.state_dict())
    torch.testing.assert_close(token_losses(zeros, text, 1, document_end=END, **window), anew, atol=2e-5, rtol=2e-5)


BAD = {
    "a token beyond the vocabulary": ({"document_end": 61}, {}, r"document_end=61 .*\[0, 61\)"),
    "a negative token": ({"document_end": -1}, {}, "document_end=-1 is no token id"),
    "places beyond the text": ({"document_end": [5, 93]}, {}, "document_end holds 93.* 1 to 92 "),
    "a document before the text": ({"document_end": [0, 5]}, {}, "document_end holds 0"),
    "places that go back": ({"document_end": [5, 3]}, {}, "ascend"),
    "zeros before each document": ({"document_end": END}, {"initial_memory": "zeros"}, "initial_memory='zeros'"),
    "positions of the segment": ({"document_end": END}, {"attn_type": 2, "mem_len": 0}, "attn_type=2"),
}


@pytest.mark.parametrize("options, changes, message", BAD.values(), ids=BAD)
def test_ends_that_will_not_do(options, changes, message):
    with pytest.raises(ValueError, match=message):
        token_losses(small_model(**changes), torch.cat(make_documents()), 8, **options)


# --- training --------------------------------------------------------------------------------------------------------


def make_trainer(path, document_end=END, model=None, text=None, **changes) -> TransfoXLTrainer:
    text = make_text(301) if text is None else text
    stream = TokenStream(text, 5, 4, document_end=document_end)
    held_out = TokenStream(make_text(101, seed=1), 5, 4, keep_remainder=True, document_end=document_end)
    arguments = make_arguments(path, **({"max_steps": 8} | changes))
    return TransfoXLTrainer(model or make_model(mem_len=30), arguments, train_dataset=stream, eval_dataset=held_out)


def losses_of(trainer: TransfoXLTrainer) -> list[float]:
    return [logs["loss"] for logs in trainer.state.log_history if "loss" in logs]


def test_a_training_begins_documents_and_resumes_in_the_middle_of_them(tmp_path):
    trainer = make_trainer(tmp_path / "run", save_strategy="steps", save_steps=5)
    trainer.train()
    plain = make_trainer(tmp_path / "plain", None, max_steps=3)
    plain.train()
    assert losses_of(trainer)[:3] != losses_of(plain)
    resumed = make_trainer(tmp_path / "run")
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-5"))
    assert losses_of(resumed)[-3:] == losses_of(trainer)[-3:]
    for other in (None, 3, [10, 20]):
        with pytest.raises(ValueError, match=r"'documents': 0.*'documents': (None|3|'2 places)"):
            make_trainer(tmp_path / "run", other).train(str(tmp_path / "run" / "checkpoint-5"))
    # The streams of the evaluation follow one another without a gap, so that each of its tokens is in one document.
    stream = TokenStream(make_text(101, seed=1), 25, 4, document_end=END)
    items = [stream[row] for row in range(4)]
    batch = {name: torch.stack([item[name] for item in items]) for name in items[0]}
    with torch.no_grad():
        expected = trainer.model.eval()(**batch, lengths=MemoryLengths(mem_len=30)).losses
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.mean().item(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharding", [{"ddp_find_unused_parameters": False}, sharded("FULL_STATE_DICT")], ids=["ddp", "fsdp2"]
)
def test_two_processes_begin_the_documents_of_one(tmp_path, sharding):
    """Of a model with gates; also when they go on in the middle of a document."""
    arguments = {
        "stream": DocumentStream, "model": {"gating": "gru", "mem_len": 12}, "tokens": 301, "max_steps": 12,
        "eval_strategy": "steps", "eval_steps": 6, "save_strategy": "steps", "save_steps": 6,
    }  # fmt: skip
    assert run(output=tmp_path / "one", **arguments) == [0]
    arguments |= {"processes": 2, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, **sharding}
    assert run(output=tmp_path / "two", **arguments) == [0, 0]
    expected, found = read_losses(tmp_path / "one"), read_losses(tmp_path / "two")
    compare(found, expected)
    shutil.rmtree(tmp_path / "two" / "checkpoint-12")
    (tmp_path / "two" / "losses.jsonl").unlink()
    assert run(output=tmp_path / "two", resume=True, **arguments) == [0, 0]
    compare(read_losses(tmp_path / "two"), [line for line in expected if line[1] > 6])


def test_a_model_that_cannot_begin_them_is_refused_before_the_first_step(tmp_path):
    trainer = make_trainer(tmp_path, model=make_model(initial_memory="zeros"))
    with pytest.raises(ValueError, match="document_end and the text of (train|eval)_dataset .*initial_memory='zeros'"):
        trainer.train()


# --- commands --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A small real text, each of whose lines is a document."""
    folder = tmp_path_factory.mktemp("text")
    lines = Path(sys.modules["argparse"].__file__).read_text(encoding="utf-8").splitlines(keepends=True)
    for name, part in {"train": lines[:300], "valid": lines[300:360], "test": lines[360:420]}.items():
        (folder / f"{name}.txt").write_text("".join(part), encoding="utf-8")
    options = ["--corpus", "text", "--input", str(folder), "--num_proc", "1"]
    prepare.main([*options, "--output", str(folder / "data"), "--document_end", "<eos>"])
    with pytest.raises(SystemExit, match="<never> is no token of the vocabulary"):
        prepare.main([*options, "--output", str(folder / "none"), "--document_end", "<never>"])
    with pytest.raises(SystemExit, match="<pad> is not in the train text"):
        prepare.main([*options, "--output", str(folder / "none"), "--document_end", "<pad>"])
    assert not (folder / "none").exists()
    return folder / "data"


def train(recipe: Path, *options: str):
    try:
        command.main([str(recipe), *options])
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def test_what_was_prepared_is_remembered_by_the_commands(prepared, tmp_path, capsys):
    information = json.loads((prepared / "corpus.json").read_text())
    assert information["document_end"] == 0 and information["splits"]["test"]["documents"] == 60
    recipe = tmp_path / "recipe.yaml"
    settings = {"cutoffs": [], "div_val": 1, "max_steps": 4, "eval_steps": 4, "save_steps": 2, "data": str(prepared)}
    recipe.write_text(yaml.safe_dump(RECIPE | settings))
    train(recipe, "--output", str(tmp_path / "run"))
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["test"]["document_end"] == 0
    train(recipe, "--output", str(tmp_path / "one"), "--document_end", "none", "--gating", "gru")
    assert TransfoXLConfig.from_pretrained(tmp_path / "one").gating == "gru"
    assert json.loads((tmp_path / "one" / "results.json").read_text())["test"]["document_end"] is None
    # Another half of the run would read another text.
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    with pytest.raises(SystemExit, match="'documents': 0"):
        train(recipe, "--output", str(tmp_path / "run"), "--resume", "--document_end", "none")
    for changes, message in (
        (["--initial_memory", "zeros"], "initial_memory='zeros'.*--document_end none"),
        (["--roll"], "--roll .*--document_end none"),
        (["--document_end", "<never>"], "--document_end <never> is no token"),
    ):
        with pytest.raises(SystemExit, match=message):
            train(recipe, "--output", str(tmp_path / "refused"), *changes)

    evaluated = ["--model", str(tmp_path / "run"), "--data", str(prepared), "--segment_length", "64", "--json"]
    capsys.readouterr()
    evaluate.main([*evaluated, "--batch_size", "8"])
    [found] = json.loads(capsys.readouterr().out)["results"]
    assert found["nll"] == pytest.approx(results["test"]["nll"], rel=1e-5) and found["document_end"] == 0
    evaluate.main([*evaluated, "--document_end", "none"])
    [as_one] = json.loads(capsys.readouterr().out)["results"]
    assert as_one["document_end"] is None and as_one["nll"] != found["nll"]
    for data in (prepared, prepared.parent / "test.txt"):
        with pytest.raises(SystemExit, match="--document_end <pad> is not in the text: leave it out"):
            evaluate.main([*evaluated, "--data", str(data), "--document_end", "<pad>"])


@pytest.mark.parametrize("document_end", ["none", "the"])
def test_one_model_has_one_figure(prepared, tmp_path, capsys, document_end):
    """That of the end of its training, whatever the lengths and documents of that were."""
    recipe, output = tmp_path / "recipe.yaml", tmp_path / "model"
    settings = {"cutoffs": [], "div_val": 1, "max_steps": 2, "eval_steps": 2, "data": str(prepared)}
    settings |= {"eval_batch_size": 3, "eval_tgt_len": 7, "eval_mem_len": 20, "eval_clamp_len": 9}
    recipe.write_text(yaml.safe_dump(RECIPE | settings | {"eval_same_length": True}))
    train(recipe, "--output", str(output), "--document_end", document_end)
    results = json.loads((output / "results.json").read_text())
    for split in ("validation", "test"):
        capsys.readouterr()
        evaluate.main(["--model", str(output), "--data", str(prepared), "--split", split, "--json"])
        [found] = json.loads(capsys.readouterr().out)["results"]
        figures = {name: results[split].pop(name) for name in ("nll", "perplexity", "bits_per_token")}
        assert {name: found[name] for name in figures} == pytest.approx(figures, rel=1e-6)
        assert {name: found[name] for name in results[split]} == results[split]
    # The last split is the test text. What a cache follows is one stream, unless streams are asked for.
    static = tune(prepared, output, tmp_path, "--batch_size", "3")["test"][0]
    assert static["nll"] == pytest.approx(figures["nll"], rel=1e-6)
    assert tune(prepared, output, output)["test"][0]["batch_size"] == 1


@pytest.mark.parametrize("options", [[], ["--document_end", "none"], ["--memory_length", "4", "--ext_len", "2"]])
def test_what_is_tuned_is_read_as_it_is_evaluated(prepared, tmp_path, capsys, options):
    """A folder without results.json, of data whose documents are known."""
    size = len(AutoTokenizer.from_pretrained(prepared))
    model = small_model(
        vocab_size=size, cutoffs=[], div_val=1, mem_len=12, tgt_len=8, init_std=0.5, initial_memory="empty"
    )
    model.save_pretrained(tmp_path / "model")
    capsys.readouterr()
    evaluate.main(["--model", str(tmp_path / "model"), "--data", str(prepared), "--json", *options])
    [found] = json.loads(capsys.readouterr().out)["results"]
    settings = ("segment_length", "memory_length", "ext_len", "clamp_len", "same_length", "batch_size", "document_end")
    static = tune(prepared, tmp_path / "model", tmp_path, *options)["test"][0]
    assert {name: static[name] for name in settings} == {name: found[name] for name in settings}
    assert static["nll"] == pytest.approx(found["nll"], rel=1e-6)


def tune(data: Path, model: Path, folder: Path, *options: str) -> dict:
    cache = ["--cache_size", "10", "--cache_weight", "0.1", "--cache_temperature", "0.1"]
    tune_lm.main(
        ["--model", str(model), "--data", str(data), "--output", str(folder / "tuned.json"), *cache, *options]
    )
    return json.loads((folder / "tuned.json").read_text())
