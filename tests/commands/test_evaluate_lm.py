"""The command that scores a text: its JSON is what evaluate_language_model gives, its errors are one line."""

import dataclasses
import importlib.metadata
import io
import json
import math
import os
import pickle
import shutil
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import torch
import transformers
from datasets import load_from_disk
from transformers import AutoModelForCausalLM, AutoTokenizer

import prepare_corpus
import txl_hf
from fuzz import ADDED, Hostile
from goldens import golden
from models import small_model
from scripts import run_script
from txl_hf import TransfoXLConfig, TransfoXLForCausalLM, TransfoXLTokenizer, evaluate_language_model
from txl_hf.commands import evaluate_lm as evaluate_lm
from txl_hf.data import loading
from txl_hf.evaluation import cards
from txl_hf.evaluation.cards import weights_digest

SCRIPT = Path(__file__).parents[2] / "examples" / "evaluate_lm.py"


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A small real text in three files, laid out as WikiText is."""
    source = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text(encoding="utf-8").splitlines(keepends=True)
    folder = tmp_path_factory.mktemp("text")
    for name, lines in {"train": source[:400], "valid": source[400:450], "test": source[450:500]}.items():
        (folder / f"wiki.{name}.tokens").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def corpus(text, tmp_path_factory) -> Path:
    """The text as prepare_corpus.py leaves it."""
    return prepare(tmp_path_factory, "wikitext-2", text)


@pytest.fixture(scope="module")
def model(corpus, tmp_path_factory) -> Path:
    return save_model(AutoTokenizer.from_pretrained(corpus), tmp_path_factory.mktemp("model"))


def prepare(tmp_path_factory, name: str, path: Path) -> Path:
    output = tmp_path_factory.mktemp("prepared") / name
    prepare_corpus.main(["--corpus", name, "--input", str(path), "--output", str(output), "--num_proc", "1"])
    return output


def save_model(tokenizer: TransfoXLTokenizer, folder: Path) -> Path:
    size = len(tokenizer)
    model = small_model(
        vocab_size=size, cutoffs=[size // 2], div_val=1, mem_len=12, tgt_len=8, init_std=0.5, eos_token_id=None
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def saved_by_torch(value) -> bytes:
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def run(capsys, *arguments: str | Path) -> dict:
    capsys.readouterr()
    evaluate_lm.main([*map(str, arguments), "--json"])
    return json.loads(capsys.readouterr().out)


def test_the_command_as_typed(corpus, model, tmp_path):
    """Every setting given; what is printed is what is written and what evaluate_language_model says."""
    settings = "--split validation --segment_length 6 --memory_length 0 20 --clamp_len 9 --same_length true"
    command = [SCRIPT, "--model", model, "--data", corpus, *settings.split()]
    command += "--batch_size 3 --warm_up 4 --device cpu --dtype float32 --json --progress --output".split()
    process = run_script(*command, tmp_path / "new" / "result.json")
    assert process.returncode == 0, process.stderr
    assert "evaluate: 100%" in process.stderr
    written = json.loads((tmp_path / "new" / "result.json").read_text())
    assert json.loads(process.stdout) == written
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["result.json"]

    loaded = AutoModelForCausalLM.from_pretrained(model)
    tokens = load_from_disk(corpus)["validation"]["token_ids"][:]
    for memory_length, row in zip((0, 20), written["results"], strict=True):
        expected = evaluate_language_model(
            loaded, tokens, 6, memory_length, batch_size=3, warm_up=4, clamp_len=9, same_length=True
        )
        assert row["nll"] == pytest.approx(expected.nll, rel=1e-6)
        assert row["perplexity"] == pytest.approx(expected.perplexity, rel=1e-5)
        assert row["tokens"] == expected.tokens == len(tokens) - 12
        assert (row["segment_length"], row["memory_length"], row["clamp_len"], row["same_length"]) == (
            6,
            memory_length,
            9,
            True,
        )
        assert (row["batch_size"], row["warm_up"], row["protocol"]) == (3, 4, "memory")
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
    assert written["results"][0]["nll"] != written["results"][1]["nll"]
    assert (written["model"], written["split"], written["corpus"]) == (str(model), "validation", "wikitext-2")
    assert (written["dtype"], written["initial_memory"]) == ("float32", "empty")
    assert written["versions"] == {
        "txl-hf": txl_hf.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    assert "commit" in written


def test_the_origin_of_a_package_that_is_on_the_path_but_not_installed(monkeypatch):
    """A training ended without its results."""

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert cards.origin()["versions"]["txl-hf"] == txl_hf.__version__


def test_prepared_and_raw_text_give_the_same_figures(text, corpus, model, capsys):
    prepared = run(capsys, "--model", model, "--data", corpus)
    raw = run(capsys, "--model", model, "--data", text / "wiki.test.tokens")
    timed = ("seconds", "tokens_per_second")
    [prepared_row], [raw_row] = (
        [{k: v for k, v in row.items() if k not in timed} for row in result["results"]] for result in (prepared, raw)
    )
    assert prepared_row == raw_row
    assert (prepared["words"], prepared["characters"]) == (raw["words"], raw["characters"])
    # A word is a token here, and the model's own lengths are the defaults.
    assert raw_row["perplexity_per_word"] == pytest.approx(raw_row["perplexity"])
    total = raw_row["nll"] * raw_row["text_tokens"] / math.log(2)
    assert raw_row["bits_per_character"] == pytest.approx(total / len((text / "wiki.test.tokens").read_text()))
    assert (raw_row["segment_length"], raw_row["memory_length"]) == (8, 12)


@pytest.mark.parametrize(
    "as_saved", [pickle.dumps, pytest.param(saved_by_torch, marks=pytest.mark.slow)], ids=["pickle", "torch"]
)
def test_a_pickle_in_place_of_any_file_does_not_run(corpus, model, tmp_path, capsys, as_saved):
    """In each file that the command reads of a model and of a prepared text, and in those that it might look for."""
    mark = tmp_path / "mark"
    hostile = as_saved({"idx2sym": [Hostile(mark)], "model_state": Hostile(mark)})
    for source in (model, corpus):
        # Not the code of the model, which the command does not read.
        names = [path.relative_to(source) for path in source.rglob("*") if path.is_file() and path.suffix != ".py"]
        for name in [*names, *map(Path, ADDED)]:
            copies = {folder: tmp_path / "copies" / folder.name for folder in (model, corpus)}
            for folder, copy in copies.items():
                shutil.copytree(folder, copy)
            if name.name == "pytorch_model.bin":
                (copies[model] / "model.safetensors").unlink()
            (copies[source] / name).write_bytes(hostile)
            try:
                evaluate_lm.main(["--model", str(copies[model]), "--data", str(copies[corpus]), "--json"])
            except SystemExit as end:
                assert "weights_only=False" not in str(end.code), name
            assert not mark.exists(), name
            shutil.rmtree(tmp_path / "copies")
    capsys.readouterr()


@pytest.mark.parametrize("options", [[], ["--dynamic", "0.01"]], ids=["static", "dynamic"])
def test_a_model_that_computes_no_numbers_has_no_figures(corpus, model, tmp_path, options):
    """They were null, which stands for an infinite perplexity."""
    shutil.copytree(model, tmp_path / "model")
    broken = TransfoXLForCausalLM.from_pretrained(model)
    with torch.no_grad():
        broken.transformer.layers[0].self_attn.q_proj.weight[0, 0] = math.nan
    broken.save_pretrained(tmp_path / "model")
    with pytest.raises(SystemExit, match="error: .*(no numbers|no finite loss)"):
        evaluate_lm.main(["--model", str(tmp_path / "model"), "--data", str(corpus), "--json", *options])


@pytest.mark.parametrize("name", ["enwik8", "text8"])
def test_prepared_and_raw_streams_give_the_same_figures(name, tmp_path, tmp_path_factory, capsys):
    folder = tmp_path / name
    folder.mkdir()
    data = "Zoë, the end.\n" * 90 if name == "enwik8" else "all the world is a stage " * 60
    for part in ("train", "valid", "test"):
        # Bytes may end within a character.
        (folder / f"{part}.txt.raw").write_bytes(data.encode()[: -12 if part == "test" else None])
    corpus = prepare(tmp_path_factory, name, folder)
    model = save_model(AutoTokenizer.from_pretrained(corpus), tmp_path / "model")
    prepared = run(capsys, "--model", model, "--data", corpus)
    raw = run(capsys, "--model", model, "--data", folder / "test.txt.raw")
    for figure in ("nll", "tokens", "bits_per_character", "perplexity_per_word"):
        assert prepared["results"][0][figure] == raw["results"][0][figure]
    assert raw["results"][0]["bits_per_character"] == pytest.approx(raw["results"][0]["bits_per_token"])


def test_sliding_window_beside_memory(corpus, model, capsys):
    command = f"--model {model} --data {corpus} --memory_length 12 --sliding_window 1 5 --max_tokens 60"
    result = run(capsys, *command.split())
    assert [row["protocol"] for row in result["results"]] == ["memory", "sliding window", "sliding window"]
    assert result["words"] is None and result["results"][0]["perplexity_per_word"] is None
    loaded = AutoModelForCausalLM.from_pretrained(model).eval()
    loaded.reset_memory_length(0)
    tokens = torch.tensor(load_from_disk(corpus)["test"]["token_ids"][:60])
    for window, row in zip((1, 5), result["results"][1:], strict=True):
        with torch.no_grad():
            windows = [tokens[max(0, end - window) : end + 1][None] for end in range(1, 60)]
            losses = [loaded(ids[:, :-1], shift_labels=ids[:, 1:]).losses[0, -1] for ids in windows]
        assert row["tokens"] == 59 and row["ext_len"] == window - 1
        assert row["nll"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


def test_sliding_window_alone_reads_no_memory(corpus, model, capsys):
    result = run(capsys, *f"--model {model} --data {corpus} --sliding-window 5 --max-tokens 40".split())
    assert [row["protocol"] for row in result["results"]] == ["sliding window"]
    assert list(result["curves"]) == ["sliding window"]


def test_the_curve_has_the_columns_of_the_paper(corpus, model, tmp_path, capsys):
    """init at the lengths of training, the best, and the shortest length that rounds to it; and a picture."""
    command = f"--model {model} --data {corpus} --memory_length 0 4 12 20 --sliding_window 4 8 --max_tokens 80"
    result = run(capsys, *command.split(), "--plot", tmp_path / "curve.png")
    for protocol, lengths, trained in (("memory", (0, 4, 12, 20), 12), ("sliding window", (4, 8), 8)):
        rows = [row["perplexity"] for row in result["results"] if row["protocol"] == protocol]
        points = dict(zip(lengths, rows, strict=True))
        curve = result["curves"][protocol]
        assert curve["init"] == points[trained]
        assert curve["best"] == min(rows)
        assert curve["attention_length"] == min(n for n in points if f"{points[n]:.2f}" == f"{min(rows):.2f}")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_trained_model_has_the_figure_of_its_training(corpus, model, tmp_path, capsys):
    """Lengths without an option are those of results.json beside the model."""
    copy = shutil.copytree(model, tmp_path / "model")
    loaded, tokens = AutoModelForCausalLM.from_pretrained(model), load_from_disk(corpus)["test"]["token_ids"][:]
    lengths = {"segment_length": 5, "memory_length": 7, "ext_len": 2, "clamp_len": 6, "same_length": True}
    expected = evaluate_language_model(loaded, tokens, batch_size=3, **lengths)
    (copy / "results.json").write_text(json.dumps({"test": dataclasses.asdict(expected)}))
    evaluate_lm.main(["--model", str(copy), "--data", str(corpus), "--json"])
    printed = capsys.readouterr()
    [row] = json.loads(printed.out)["results"]
    assert row["nll"] == pytest.approx(expected.nll, rel=1e-6)
    assert {name: row[name] for name in lengths} == lengths and row["batch_size"] == 3
    assert "as training scored it (results.json): --segment_length 5, --memory_length 7" in printed.err
    assert "--batch_size 3, as one text" in printed.err
    asked = ["--memory_length", 0, 4, "--batch_size", 1, "--same_length", "false"]
    rows = run(capsys, "--model", copy, "--data", corpus, *asked)["results"]
    assert [row["memory_length"] for row in rows] == [0, 4] and {row["batch_size"] for row in rows} == {1}
    assert {(row["segment_length"], row["clamp_len"], row["same_length"]) for row in rows} == {(5, 6, False)}
    for follows in (["--cache", 5, 0.1, 0.1], ["--dynamic", 0.1]):
        # From end to end: in three streams a third of the text each.
        [row] = run(capsys, "--model", copy, "--data", corpus, *follows)["results"]
        assert (row["segment_length"], row["batch_size"]) == (5, 1)
    options = ["--model", copy, "--data", corpus, "--sliding_window", 9, "--max_tokens", 30, "--json"]
    evaluate_lm.main([*map(str, options)])
    printed = capsys.readouterr()
    [window] = json.loads(printed.out)["results"]
    assert window["protocol"] == "sliding window" and window["ext_len"] == 8
    # What a window has of its own is not said.
    assert "(results.json): --clamp_len 6, --batch_size 3, as one text" in printed.err
    (copy / "results.json").write_text("[]")
    [row] = run(capsys, "--model", copy, "--data", corpus)["results"]
    assert (row["segment_length"], row["memory_length"], row["batch_size"]) == (8, 12, 1)


def test_a_memory_longer_than_in_training_may_decay(corpus, model, capsys):
    loaded, tokens = AutoModelForCausalLM.from_pretrained(model), load_from_disk(corpus)["test"]["token_ids"][:]
    found = []
    for decay_len in (-1, 3):
        loaded.config.decay_len = decay_len
        found.append(evaluate_language_model(loaded, tokens, segment_length=8, memory_length=30).nll)
    report = run(capsys, "--model", model, "--data", corpus, "--memory_length", 30, "--decay_len", 3)
    assert report["decay_len"] == 3 and report["results"][0]["nll"] == pytest.approx(found[1], rel=1e-6)
    assert found[0] != found[1]


def test_statistics_are_of_no_more_than_the_training_text(corpus, model):
    options = ["--model", str(model), "--data", str(corpus), "--dynamic", "0.1", "--statistics", "1000000"]
    with pytest.raises(SystemExit, match="error: --statistics 1000000 is more than the training text has: "):
        evaluate_lm.main(options)


def test_a_checkpoint_in_the_place_of_a_model_is_named(corpus, tmp_path):
    (tmp_path / "checkpoint_files.json").write_text("{}")
    with pytest.raises(SystemExit, match="is a checkpoint of a run, to --resume it: give the folder of the run"):
        evaluate_lm.main(["--model", str(tmp_path), "--data", str(corpus)])


def test_whose_figures_they_are_is_told_by_the_weights_and_not_by_times(corpus, model, tmp_path, capsys):
    """A copy may have its files in another order, and as a Hub's folder it has."""
    copy = shutil.copytree(model, tmp_path / "model")
    lengths = dict.fromkeys(("segment_length", "memory_length", "batch_size", "clamp_len", "ext_len"), 3)
    results = {"test": lengths | {"same_length": False}, "weights": weights_digest(copy)}
    (copy / "results.json").write_text(json.dumps(results))
    os.utime(copy / "results.json", (time.time() - 60,) * 2)
    [row] = run(capsys, "--model", copy, "--data", corpus)["results"]
    assert {name: row[name] for name in lengths} == lengths
    loaded = AutoModelForCausalLM.from_pretrained(copy)
    next(loaded.parameters()).data.add_(1)
    loaded.save_pretrained(copy)
    os.utime(copy / "results.json", (time.time() + 60,) * 2)
    evaluate_lm.main(["--model", str(copy), "--data", str(corpus), "--json"])
    printed = capsys.readouterr()
    assert "results.json is not used: it is of other weights, or not txl-train's" in printed.err
    assert json.loads(printed.out)["results"][0]["segment_length"] == 8


def test_a_length_that_was_not_evaluated_has_no_init(corpus, model, capsys):
    result = run(capsys, *f"--model {model} --data {corpus} --memory_length 3 --max_tokens 40".split())
    assert result["curves"]["memory"]["init"] is None


def test_the_figures_are_a_table_and_json_is_asked_for(corpus, model, capsys):
    evaluate_lm.main([*f"--model {model} --data {corpus} --memory_length 4 12 --max_tokens 40".split()])
    head, first, second, curve = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["protocol", "length", "segment", "perplexity"]
    assert first.split()[:2] == ["memory", "4"] and second.split()[:2] == ["memory", "12"]
    assert curve.startswith("memory: perplexity") and "at the length of training" in curve
    assert run(capsys, *f"--model {model} --data {corpus} --max_tokens 40".split())["results"]


def test_what_was_found_before_an_interruption_is_kept(corpus, model, monkeypatch, tmp_path, capsys):
    """In the file and on standard output, as whole JSON."""
    evaluate = evaluate_lm.evaluate_caches

    def interrupted(loaded, token_ids, reading, *settings):
        if reading.lengths.mem_len == 8:
            raise KeyboardInterrupt
        return evaluate(loaded, token_ids, reading, *settings)

    monkeypatch.setattr(evaluate_lm, "evaluate_caches", interrupted)
    command = f"--model {model} --data {corpus} --memory_length 4 8 12 --max_tokens 40 --json"
    command += f" --output {tmp_path}/result.json"
    with pytest.raises(SystemExit) as stopped:
        evaluate_lm.main(command.split())
    assert stopped.value.code == "stopped"
    kept = json.loads((tmp_path / "result.json").read_text())
    assert [row["memory_length"] for row in kept["results"]] == [4]
    assert json.loads(capsys.readouterr().out) == kept


def test_all_lengths_are_checked_before_the_text_is_read_with_any(corpus, model, monkeypatch, tmp_path):
    """A refused one costs nothing of what the others would have found."""
    monkeypatch.delattr(evaluate_lm, "evaluate_caches")
    config = {**json.loads((model / "config.json").read_text()), "attn_type": 3, "mem_len": 0, "max_klen": 8}
    TransfoXLForCausalLM(TransfoXLConfig(**config)).save_pretrained(tmp_path)
    message = fails("--model", tmp_path, "--data", corpus, "--sliding_window", 4, 9)
    assert "reads 9 tokens at once" in message and "max_klen=8" in message
    assert "mem_len=3 must be 0" in fails("--model", tmp_path, "--data", corpus, "--memory_length", 0, 3)
    assert "segment_length=-1" in fails("--model", model, "--data", corpus, "--segment_length", "-1")


@pytest.mark.parametrize("option", [("segment_length", "3"), ("ext_len", "5"), ("same_length", "true")], ids=str)
def test_lengths_that_a_window_alone_does_not_have(corpus, model, option, capsys):
    name, value = option
    options = ["--model", model, "--data", corpus, "--sliding_window", "8", f"--{name}", value]
    with pytest.raises(SystemExit):
        evaluate_lm.main([str(each) for each in options])
    assert f"--{name} is of an evaluation with memory: name its lengths too" in capsys.readouterr().err


def test_a_library_that_is_missing_is_named_with_what_to_install(corpus, model, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    message = fails("--model", model, "--data", corpus, "--plot", tmp_path / "curve.png")
    assert "matplotlib" in message and 'pip install "txl-hf[train]"' in message


def test_what_cannot_be_plotted_is_said_before_the_text_is_read(corpus, model, monkeypatch, tmp_path):
    monkeypatch.delattr(evaluate_lm, "evaluate_caches")
    given = ("--model", model, "--data", corpus)
    path = tmp_path / "curve.png"
    message = fails(*given, "--output", path, "--plot", tmp_path / "sub" / ".." / "curve.png")
    assert "--output" in message and "--plot" in message and "same file" in message
    for name in ("curve.pgn", "curve"):
        message = fails(*given, "--plot", tmp_path / name)
        assert name in message and "png" in message
    assert not list(tmp_path.iterdir())


def test_sub_words_are_compared_by_words(text, tmp_path, tmp_path_factory, capsys):
    """Characters of the same text: another perplexity per token, and words and characters to compare by."""
    lines = [
        line for split in ("train", "test") for line in (text / f"wiki.{split}.tokens").read_text().splitlines(True)
    ]
    tokenizer = TransfoXLTokenizer.train_from_iterator(lines, mode="characters", unk_token="<unk>")
    model = save_model(tokenizer, tmp_path / "model")
    result = run(capsys, "--model", model, "--data", text / "wiki.test.tokens")
    [row], test = result["results"], (text / "wiki.test.tokens").read_text()
    assert row["text_tokens"] == result["characters"] == len(test)
    assert result["words"] == len(test.split()) + test.count("\n")
    assert row["bits_per_character"] == pytest.approx(row["bits_per_token"])
    assert row["perplexity_per_word"] == pytest.approx(math.exp(row["nll"] * len(test) / result["words"]))


@pytest.mark.parametrize(
    ("alphabet", "unk_token", "text"),
    [
        ("абвгд ", None, "баг гад вдаг"),
        ("acdefé ", None, "café décade"),
        ("abcd ", "<unk>", "a bad cab\nnot dad"),
        ("abcd ", None, "a bad cab dad"),
    ],
)
def test_an_alphabet_without_line_feed_reads_its_characters(tmp_path, capsys, alphabet, unk_token, text):
    """Those of enwik8 and text8 are bytes, and others are not."""
    symbols = [*([unk_token] if unk_token else ()), *alphabet]
    tokenizer = TransfoXLTokenizer.from_symbols(symbols, mode="characters", unk_token=unk_token)
    model = save_model(tokenizer, tmp_path / "model")
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    [row] = run(capsys, "--model", model, "--data", tmp_path / "text.txt")["results"]
    ids = tokenizer(text)["input_ids"]
    expected = evaluate_language_model(AutoModelForCausalLM.from_pretrained(model), ids, row["segment_length"])
    assert row["text_tokens"] == len(text) and row["nll"] == pytest.approx(expected.nll, rel=1e-6)


def test_a_legacy_checkpoint_with_a_tokenizer_beside_it(text, tmp_path, capsys):
    """Weights that legacy transformers wrote; it reads at most as many symbols as it has."""
    checkpoint = golden("hf_legacy/wt103_like_safetensors")
    vocab_size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    lines = (text / "wiki.train.tokens").read_text().splitlines(keepends=True)
    tokenizer = TransfoXLTokenizer.train_from_iterator(lines, mode="whitespace", max_size=vocab_size - 2)
    tokenizer.save_pretrained(tmp_path)
    result = run(capsys, "--model", checkpoint, "--data", text / "wiki.test.tokens", "--tokenizer", tmp_path)
    ids = tokenizer.encode_file(text / "wiki.test.tokens", add_eos=True)
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint)
    expected = evaluate_language_model(loaded, ids, loaded.config.tgt_len)
    assert result["results"][0]["nll"] == pytest.approx(expected.nll, rel=1e-6)
    assert result["initial_memory"] == "zeros"


def fails(*arguments: str | Path) -> str:
    with pytest.raises(SystemExit) as error:
        evaluate_lm.main([*map(str, arguments)])
    assert str(error.value).startswith("error: ") and "\n" not in str(error.value)
    return str(error.value)


def test_what_is_missing_or_empty_is_named(text, corpus, model, tmp_path):
    assert "nowhere does not exist" in fails("--model", model, "--data", tmp_path / "nowhere")
    assert f"--model {tmp_path / 'nowhere'} does not exist" in fails("--model", tmp_path / "nowhere", "--data", corpus)
    lost = ["--tokenizer", f"{tmp_path}/nowhere"]
    assert f"--tokenizer {tmp_path / 'nowhere'} does not exist" in fails("--model", model, "--data", corpus, *lost)
    (tmp_path / "bare").mkdir()
    for bare in (tmp_path / "bare", "nobody/bare"):
        message = fails("--model", model, "--data", text / "wiki.test.tokens", "--tokenizer", bare)
        assert f"the tokenizer of {bare} cannot be read: " in message
    (tmp_path / "empty.txt").write_text(" \n")
    assert "empty.txt is empty" in fails("--model", model, "--data", tmp_path / "empty.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert "is not UTF-8 text" in fails("--model", model, "--data", tmp_path / "latin.txt")
    assert "no folder of txl-prepare" in fails("--model", model, "--data", model)
    assert "has been tokenised" in fails("--model", model, "--data", corpus, "--tokenizer", model)
    (tmp_path / "result.json").write_text("mine")
    assert "result.json exists" in fails("--model", model, "--data", corpus, "--output", tmp_path / "result.json")
    assert (tmp_path / "result.json").read_text() == "mine"


@pytest.mark.parametrize("device", ["gpu", "cpu:x"])
def test_a_device_that_is_not_there_is_named(corpus, model, device):
    assert fails("--model", model, "--data", corpus, "--device", device).startswith(f"error: --device {device}: ")


def test_a_name_that_is_no_folder_is_said_before_the_hub_is_asked(corpus, monkeypatch, capsys):
    """Which takes half a minute where there is no network."""

    def ask(name):
        said.append(capsys.readouterr().err)
        raise OSError("no network")

    said: list[str] = []
    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", ask)
    message = fails("--model", "nobody/modle", "--data", corpus)
    assert said == ["nobody/modle is no folder here: looking for it on the Hub\n"]
    assert "there is no such folder here" in message and "no network" in message


def test_a_model_without_its_softmax_has_no_figure(corpus, model, tmp_path):
    """It would be made anew, and be another one each time."""
    shutil.copytree(model, tmp_path / "model")
    transformer = TransfoXLForCausalLM.from_pretrained(model).transformer
    (tmp_path / "model" / "model.safetensors").unlink()
    transformer.save_pretrained(tmp_path / "model")
    message = fails("--model", tmp_path / "model", "--data", corpus)
    assert "is no whole language model: its weights lack lm_head." in message


def test_settings_that_cannot_be_are_named(corpus, model):
    assert "warm_up=-1" in fails("--model", model, "--data", corpus, "--warm_up", "-1")
    assert "nothing to score" in fails("--model", model, "--data", corpus, "--max_tokens", "1")
    assert "mem_len=-2" in fails("--model", model, "--data", corpus, "--memory_length", "-2")
    for name in ("segment_length", "batch_size"):
        assert f"{name}=0 must be an integer of at least 1" in fails(
            "--model", model, "--data", corpus, f"--{name}", "0"
        )


def test_a_cache_is_of_numbers(corpus, model, capsys):
    options = ["--model", model, "--data", corpus, "--max_tokens", "30", "--cache"]
    assert run(capsys, *options, "2e3", "0.1", "0.1")["results"][0]["cache"]["size"] == 2000
    assert "--cache 2.5 0.1 0.1: size=2.5 must be an integer of at least 1" in fails(*options, "2.5", "0.1", "0.1")
    assert "--cache 10 1 0.1: weight=1.0 must be a number" in fails(*options, "10", "1", "0.1")
    with pytest.raises(SystemExit):
        evaluate_lm.main([*map(str, options), "many", "0.1", "0.1"])
    assert "--cache: invalid float value: 'many'" in capsys.readouterr().err


def test_a_split_of_a_file_is_refused(text, model, capsys):
    with pytest.raises(SystemExit):
        evaluate_lm.main(["--model", str(model), "--data", str(text / "wiki.test.tokens"), "--split", "validation"])
    assert "error: --split is of a folder of txl-prepare: " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--statistics", "100"], "--statistics is of dynamic evaluation: give its rate too, with --dynamic"),
        (["--decay", "0"], "--decay is of dynamic evaluation"),
        (["--epsilon", "1e-5"], "--epsilon is of dynamic evaluation"),
        (["--parameters", "lora"], "--parameters is of dynamic evaluation"),
        (
            ["--dynamic", "0.1", "--statistics", "-5"],
            "argument --statistics: '-5' has to be a whole number",
        ),
        (["--dynamic", "0.1", "--statistics", "0"], "argument --statistics: '0' has to be a whole number"),
        (["--dynamic", "0.1", "--epsilon", "1"], "--epsilon does nothing without --statistics"),
    ],
)
def test_options_of_dynamic_evaluation_that_cannot_be_are_named(corpus, model, capsys, options, message):
    with pytest.raises(SystemExit):
        evaluate_lm.main(["--model", str(model), "--data", str(corpus), *options])
    assert f"error: {message}" in capsys.readouterr().err.splitlines()[-1]


def test_a_vocabulary_that_does_not_fit_is_named(text, corpus, model, tmp_path):
    lines = (text / "wiki.train.tokens").read_text().splitlines(keepends=True)
    for max_size, name in ((None, "all"), (50, "few")):
        tokenizer = TransfoXLTokenizer.train_from_iterator(lines, mode="whitespace", max_size=max_size)
        save_model(tokenizer, tmp_path / name)
    assert "which does not fit" in fails("--model", tmp_path / "few", "--data", corpus)
    tokenizer = TransfoXLTokenizer.from_symbols(["<eos>", "other", "words"], mode="whitespace", unk_token=None)
    tokenizer.save_pretrained(tmp_path / "other")
    message = fails("--model", model, "--data", text / "wiki.test.tokens", "--tokenizer", tmp_path / "other")
    assert "is not in the vocabulary" in message
    tokenizer = TransfoXLTokenizer.from_symbols(["<eos>", "<unk>", "words"], mode="whitespace")
    tokenizer.save_pretrained(tmp_path / "another")
    message = fails("--model", model, "--data", text / "wiki.test.tokens", "--tokenizer", tmp_path / "another")
    assert "another vocabulary" in message and "id 2 is 'words' instead of" in message


def test_a_model_of_another_kind_is_named(corpus, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert "is a gpt2, not a Transformer-XL" in fails("--model", tmp_path, "--data", corpus)


@pytest.mark.parametrize("written", ["{", "{}", "[]", '{"corpus": "text", "splits": {}}'])
def test_a_damaged_description_of_a_text_is_named(corpus, model, tmp_path, written):
    shutil.copytree(corpus, tmp_path / "data")
    (tmp_path / "data" / "corpus.json").write_text(written)
    message = fails("--model", model, "--data", tmp_path / "data")
    assert f"{tmp_path / 'data' / 'corpus.json'} is damaged (" in message and "prepare the text again" in message
