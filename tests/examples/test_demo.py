"""The demo end to end in miniature: what it writes, what it refuses, and that an interrupted one leaves nothing."""

import csv
import importlib
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

import txl_hf  # noqa: F401 -- registers Transformer-XL with the Auto classes
from scripts import run_script, start_script

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
TINY = ["--layers", "1", "--width", "32"]
OUTPUT = {"config.json", "model.safetensors", "tokenizer.json", "README.md", "memory_length.png", "continuation.txt"}
LENGTHS = ["0", "32", "64", "128", "256", "512", "1024", "2048"]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A small real text."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    source = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text(encoding="utf-8")
    path.write_text(source[:40_000], encoding="utf-8")
    return path


def run(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess:
    return run_script(DEMO, *arguments, cwd=cwd, timeout=300)


def memory_table(stdout: str) -> dict[str, float]:
    """Bits per character by memory length, as printed."""
    rows = (line.split() for line in stdout.splitlines())
    return {row[0]: float(row[1]) for row in rows if len(row) == 3 and row[0] in LENGTHS}


def test_the_whole_demo(text, tmp_path):
    process = run("--text", text, "--steps", "3", *TINY, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "Traceback" not in process.stderr
    assert list(memory_table(process.stdout)) == LENGTHS
    assert "Trained for 3 steps, 3,072 characters." in process.stdout
    assert "with txl_hf and without it: equal" in process.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["demo-output"]

    folder = tmp_path / "demo-output"
    names = {path.name for path in folder.iterdir()}
    assert names > OUTPUT
    assert "modeling_transfo_xl.py" in names, "the code travels with the model"
    assert (folder / "memory_length.png").read_bytes().startswith(b"\x89PNG")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("def f():\n    return 1\n")["input_ids"]) == "def f():\n    return 1\n"
    messages = [{"role": "user", "content": "def f():"}, {"role": "assistant", "content": "    return 1"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "def f():\n    return 1\n"
    card, bits = ModelCard.load(folder / "README.md"), memory_table(process.stdout)["128"]
    assert "AutoTokenizer" in card.text and "`mem_len=128, clamp_len=-1, same_length=False`" in card.text
    figures = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert figures["bits_per_token"] == pytest.approx(bits, abs=5e-4)
    assert "txl-generate demo-output --prompt" in process.stdout
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id is not None


def test_interrupted_it_leaves_nothing(text, tmp_path):
    """At the progress bar's word of bits."""
    errors, output = tmp_path / "errors", tmp_path / "output"
    output.mkdir()
    command = [DEMO, "--text", text, "--minutes", "10", *TINY]
    process = start_script(*command, streams=[Path(os.devnull), Path(os.devnull), errors], cwd=output)
    deadline = time.monotonic() + 120
    while not errors.exists() or "bits" not in errors.read_text():
        assert time.monotonic() < deadline, errors.read_text()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 130
    said = errors.read_text()
    assert "Interrupted; no output was written." in said
    assert "Traceback" not in said
    assert list(output.iterdir()) == []


@pytest.fixture
def demo(monkeypatch):
    """The script as a module; what it changes in this process is put back."""
    monkeypatch.syspath_prepend(DEMO.parent)
    threads, handlers = (
        torch.get_num_threads(),
        {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)},
    )
    yield importlib.import_module("demo")
    torch.set_num_threads(threads)
    transformers.logging.enable_progress_bar()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_second_run_replaces_the_output_of_the_first(demo, tmp_path):
    for name in ("demo-output", "scratch/output"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "memory_length.png").write_text(name)
    (tmp_path / "demo-output" / "stale").touch()
    demo.check_output(tmp_path / "demo-output")
    demo.replace(tmp_path / "demo-output", tmp_path / "scratch" / "output", tmp_path / "scratch")
    assert [path.read_text() for path in (tmp_path / "demo-output").iterdir()] == ["scratch/output"]


def test_the_readme_has_committed_figures():
    root = DEMO.parents[1]
    with open(root / "examples" / "results" / "demo.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    latest = rows[-1]["date"]
    bits = {row["memory_length"]: row["bits_per_character"] for row in rows if row["date"] == latest}
    assert list(bits) == LENGTHS
    said = (
        f"on {latest}, held-out text took {bits['0']} bits a character with the memory taken away, {bits['128']} with "
        f"the memory of training, 128, and {bits['2048']} with one of 2,048"
    )
    assert said in " ".join((root / "README.md").read_text(encoding="utf-8").split())


def call(demo, monkeypatch, *arguments: str | Path):
    """main() with these arguments, in this process."""
    monkeypatch.setattr(sys, "argv", ["demo.py", *map(str, arguments)])
    demo.main(*demo.read_command_line())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is too short: 0 characters"),
        (b"short", "is too short: 5 characters"),
        (b"\xff\xfe\x00\x01" * 9999, "is not a UTF-8 text"),
        (b"abc\x00" * 9999, "contains zero bytes"),
    ],
    ids=["missing", "empty", "short", "other encoding", "binary"],
)
def test_a_bad_text_is_refused_in_one_line(content, message, demo, monkeypatch, tmp_path):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit) as stopped:
        call(demo, monkeypatch, "--text", path, "--output", tmp_path / "demo-output")
    assert stopped.value.code.startswith("error: ") and "\n" not in stopped.value.code
    assert message in stopped.value.code and f"--text {path} " in stopped.value.code
    assert not (tmp_path / "demo-output").exists()


def test_a_text_without_a_character_to_learn_is_refused_in_one_line(demo, monkeypatch, tmp_path):
    (tmp_path / "text.txt").write_text("".join(map(chr, range(0x4E00, 0x4E00 + 18_000))))
    with pytest.raises(SystemExit, match="^error: no symbol occurs at least min_freq=10 times"):
        call(demo, monkeypatch, "--text", tmp_path / "text.txt", "--output", tmp_path / "demo-output", "--steps", "1")


@pytest.mark.slow
def test_bits_of_a_text_that_is_unknown_are_not_called_bits_per_character(demo, monkeypatch, tmp_path, capsys):
    rare = "".join(chr(0x4E00 + 7 * i % 8000) + "a" for i in range(10_000))
    (tmp_path / "text.txt").write_text(rare)
    call(
        demo, monkeypatch, "--text", tmp_path / "text.txt", "--output", tmp_path / "demo-output", "--steps", "1", *TINY
    )
    said = capsys.readouterr()
    assert "held-out bits per symbol (1,99" in said.out and "bits per character" not in said.out
    assert "<unk> stands for 1,000 characters" in said.err


def test_a_folder_of_somebody_else_is_not_replaced(text, demo, monkeypatch, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").touch()
    with pytest.raises(SystemExit, match="thesis exists and is no output of this demo"):
        call(demo, monkeypatch, "--text", text, "--output", tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--steps", "-1"],
        ["--minutes", "0"],
        ["--minutes", "nan"],
        ["--layers", "0"],
        ["--width", "12"],
        ["--width", "-8"],
    ],
    ids=" ".join,
)
def test_bad_sizes_are_refused(arguments, text, demo, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        call(demo, monkeypatch, "--text", text, *arguments)
    assert "sizes and times must be positive" in capsys.readouterr().err


@pytest.mark.slow
def test_memory_helps(tmp_path):
    """As `make demo` runs it, for one minute."""
    process = run("--minutes", "1", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    bits = memory_table(process.stdout)
    assert bits["0"] > bits["32"] > bits["64"] > bits["128"]
