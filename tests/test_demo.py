"""The demo end to end in miniature: what it writes, what it refuses, and that an interrupted one leaves nothing."""

import importlib
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import txl_hf  # noqa: F401 -- registers Transformer-XL with the Auto classes

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"
TINY = ["--layers", "1", "--width", "32"]
OUTPUT = {"config.json", "model.safetensors", "tokenizer.json", "README.md", "memory_length.png", "continuation.txt"}
LENGTHS = ["0", "16", "32", "64", "128", "256"]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A small real text."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    source = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text(encoding="utf-8")
    path.write_text(source[:40_000], encoding="utf-8")
    return path


def run(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, DEMO, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300)


def memory_table(stdout: str) -> dict[str, float]:
    """Bits per character by memory length, as printed."""
    rows = (line.split() for line in stdout.splitlines())
    return {row[0]: float(row[1]) for row in rows if len(row) == 3 and row[0] in LENGTHS}


def test_the_whole_demo(text, tmp_path):
    process = run("--text", text, "--steps", "3", *TINY, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "Traceback" not in process.stderr
    assert list(memory_table(process.stdout)) == LENGTHS
    assert "with txl_hf and without it: equal" in process.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["demo-output"]

    folder = tmp_path / "demo-output"
    names = {path.name for path in folder.iterdir()}
    assert names > OUTPUT
    assert "modeling_transfo_xl.py" in names, "the code travels with the model"
    assert (folder / "memory_length.png").read_bytes().startswith(b"\x89PNG")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("def f():\n    return 1\n")["input_ids"]) == "def f():\n    return 1\n"
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == len(tokenizer)

    # A second run replaces the first.
    (folder / "stale").touch()
    process = run("--text", text, "--steps", "1", *TINY, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert {path.name for path in folder.iterdir()} == names
    assert [path.name for path in tmp_path.iterdir()] == ["demo-output"]


@pytest.mark.parametrize("moment", ["imports", "train"])
def test_interrupted_it_leaves_nothing(moment, text, tmp_path):
    process = subprocess.Popen(
        [sys.executable, DEMO, "--text", text, "--minutes", "10", *TINY],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONVERBOSE": "1" if moment == "imports" else ""},
    )
    # The progress bar speaks of bits when training is under way; PYTHONVERBOSE of every import.
    sign = "import 'torch" if moment == "imports" else "bits"
    said = ""
    while sign not in said:
        said += process.stderr.read(1)
        assert process.poll() is None, said
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted; no output was written." in said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def demo_main(monkeypatch):
    """main() of the demo in this process, as a function of its arguments."""
    monkeypatch.syspath_prepend(DEMO.parent)
    main = importlib.import_module("demo").main
    threads = torch.get_num_threads()

    def call(*arguments: str | Path):
        monkeypatch.setattr(sys, "argv", ["demo.py", *map(str, arguments)])
        main()

    yield call
    torch.set_num_threads(threads)
    transformers.logging.enable_progress_bar()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory"),
        (b"", "is too short: 0 characters"),
        (b"short", "is too short: 5 characters"),
        (b"\xff\xfe\x00\x01" * 9999, "is not a UTF-8 text"),
        (b"abc\x00" * 9999, "contains zero bytes"),
    ],
    ids=["missing", "empty", "short", "other encoding", "binary"],
)
def test_a_bad_text_is_refused_in_one_line(content, message, demo_main, tmp_path):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit) as stopped:
        demo_main("--text", path, "--output", tmp_path / "demo-output")
    assert stopped.value.code.startswith("error: ") and "\n" not in stopped.value.code
    assert message in stopped.value.code and "text.txt" in stopped.value.code
    assert not (tmp_path / "demo-output").exists()


def test_a_folder_of_somebody_else_is_not_replaced(text, demo_main, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").touch()
    with pytest.raises(SystemExit, match="thesis exists and is no output of this demo"):
        demo_main("--text", text, "--output", tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter").exists()


@pytest.mark.slow
def test_memory_helps(tmp_path):
    """As `make demo` runs it, for one minute."""
    process = run("--minutes", "1", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    bits = memory_table(process.stdout)
    assert bits["0"] > bits["16"] > bits["64"] > bits["128"]
