"""The shell commands of the examples' page and of the README, as they are typed, one after the other.

Each page has a folder of its own that looks like a clone, with small texts where it names a corpus. What is typed gets
further options, for the sake of time; as they come last, they win.
"""

import re
import shlex
import tomllib
from glob import glob
from pathlib import Path

import pytest
import yaml

pytest.importorskip("accelerate")
pytest.importorskip("datasets")
pytest.importorskip("peft")

from accelerate.commands.launch import launch_command_parser

from scripts import run_script

ROOT = Path(__file__).parents[1]
TRAINING = "--n_layer 1 --d_model 16 --n_head 2 --d_head 8 --d_inner 16 --cutoffs --tgt_len 8 --mem_len 8"
TRAINING += " --batch_size 4 --max_steps 2 --warmup_steps 1 --eval_batch_size 2 --eval_memory_lengths 0 8"
# A line of the table of txl-evaluate.
FIGURES = re.compile(r"^ +memory( +[\d.-]+){8}$", re.MULTILINE)
# Further options, by script.
SHORTER = {
    "prepare_corpus.py": "",
    "txl-prepare": "",
    "txl-train": TRAINING,
    "txl-evaluate": "--max_tokens 60",
    "txl-generate": "--max_new_tokens 20",
    "train_lm.py": TRAINING,
    "evaluate_lm.py": "--max_tokens 60",
    "tune_lm.py": "--max_tokens 60 --max_test_tokens 60",
    "accelerate_loop.py": "--steps 2 --segment_length 8 --batch_size 2",
    "lora.py": "--steps 2 --segment_length 8",
    "classification.py": "--epochs 1 --max_length 16",
    "streaming_generation.py": "--max_new_tokens 5",
    "music_events.py": "--steps 2 --layers 1 --width 16 --segment_length 8 --memory_length 8 --batch_size 2",
    "document_resets.py": "--epochs 1 --segment_length 8 --batch_size 2 --rounds 1",
    "genome_labels.py": "--window 32 --memory 32 --batch_size 4 --width 16",
    "memory_agent.py": "--steps 128 --num_envs 4 --window 16 --width 16 --episodes 4",
    "memory_probe.py": "--offsets 4 --observations 500 --streams 2 --window 16 --width 16",
}


def commands(page: str) -> list[list[str]]:
    """The commands of a page's `bash` blocks, in order, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    joined = "".join(blocks).replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in joined.splitlines()]
    return [line for line in lines if line]


FRONT_PAGE = [words for words in commands("README.md") if words[0].startswith("txl-")]


def write_texts(folder: Path):
    """The files that the pages take for granted."""
    lines = [f" the {word} of {word[::-1]} is near the sea \n" for word in "abbey bridge castle dome abbey".split()]
    (folder / "wikitext-2").mkdir()
    for split, repetitions in (("train", 60), ("valid", 12), ("test", 12)):
        (folder / "wikitext-2" / f"wiki.{split}.tokens").write_text("".join(lines) * repetitions)
    (folder / "book.txt").write_text("".join(lines) * 30)
    reviews = [f"the {line.split()[1]} was {'good' if i % 2 else 'bad'},{i % 2}" for i, line in enumerate(lines * 4)]
    (folder / "reviews.csv").write_text("\n".join(["text,label", *reviews]) + "\n")
    (folder / "melody.csv").write_text("".join(f"{i * 5 % 12},{i % 4},{i % 3}\n" for i in range(400)))
    (folder / "letters").mkdir()
    for i in range(4):
        (folder / "letters" / f"{i}.txt").write_text("".join(lines) * 2)


SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def started_as(command: str) -> list[str]:
    """Arguments of python that do what the installed command does."""
    module, _, function = SCRIPTS[command].partition(":")
    return ["-c", f"import sys; from {module} import {function}; sys.exit({function}())"]


def type_all(typed: list[list[str]], folder: Path) -> str:
    """Run the commands and return their output. `*` is expanded as by a shell; WikiText-2 is a local folder."""
    printed = ""
    for program, *words in typed:
        script, *options = words if program == "python" else (program, *words)
        options = [path for word in options for path in (glob(word, root_dir=folder) if "*" in word else [word])]
        if "wikitext-2" in options and "--input" not in options:
            options += ["--input", "wikitext-2"]
        options += SHORTER[Path(script).name].split()
        start = [script] if program == "python" else started_as(script)
        process = run_script(*start, *options, cwd=folder, input="the abbey\n")
        assert process.returncode == 0, process.args + [process.stdout[-2000:] + process.stderr[-4000:]]
        assert "Traceback" not in process.stderr
        printed += process.stdout
    return printed


@pytest.fixture
def clone(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    write_texts(tmp_path)
    return tmp_path


def test_examples(clone):
    typed = [words for words in commands("examples/README.md") if words[0] == "python"]
    assert {Path(words[1]).name for words in typed} == {name for name in SHORTER if name.endswith(".py")}
    printed = type_all(typed, clone)
    assert len(FIGURES.findall(printed)) == 6, "three memory lengths of each of two models"
    for output in (
        "runs/wikitext-2",
        "runs/book",
        "runs/book-words",
        "book-lora",
        "classifier",
        "melody-model.pt",
        "letters-model",
        "runs/agents",
        "plasmid-labels",
        "probe.csv",
    ):
        assert (clone / output).exists()


def test_the_commands_of_the_front_page(clone):
    assert [words[0] for words in FRONT_PAGE] == ["txl-prepare", "txl-train", "txl-generate", "txl-evaluate"]
    printed = type_all(FRONT_PAGE, clone)
    assert len(FIGURES.findall(printed)) == 3 and "\nIt was" in printed
    assert (clone / "runs" / "book" / "model.safetensors").exists()


def test_launches(monkeypatch):
    """Those for other machines are read as accelerate and the script would read them."""
    monkeypatch.chdir(ROOT)
    from txl_hf.commands.recipe import parse_arguments

    typed = [words[words.index("accelerate") :] for words in commands("examples/README.md") if "accelerate" in words]
    assert len(typed) == 6
    outputs = []
    for words in typed:
        launch = launch_command_parser().parse_args(words[2:])
        assert Path(launch.config_file).is_file() and Path(launch.training_script).name == "train_lm.py"
        arguments = parse_arguments(launch.training_script_args)
        outputs.append(arguments.training.output_dir)
        processes = launch.num_processes or yaml.safe_load(Path(launch.config_file).read_text())["num_processes"]
        assert arguments.data.batch_size % processes == 0, "the streams of a step are shared out among processes"
    alone = [
        words[words.index("--output") + 1]
        for words in commands("examples/README.md")
        if words[0] == "python" and "--output" in words
    ]
    assert not set(outputs) & set(alone), "a run would find the output of another command"


# Pages whose commands take other programs or long: tests/clients types what they show, here their options are checked.
ELSEWHERE = ("docs/clients.md", "docs/commands.md", "docs/music.md")


def test_commands_that_are_typed_elsewhere_have_the_options_they_show():
    shown: dict[str, str] = {}

    def options_of(command: str) -> str:
        """The output of `--help`, with underscores; each command runs once."""
        if command not in shown:
            process = run_script(*(started_as(command) if command in SCRIPTS else [ROOT / command]), "--help")
            assert process.returncode == 0, process.stderr
            shown[command] = process.stdout.replace("-", "_")
        return shown[command]

    for words in (words for page in ELSEWHERE for words in commands(page)):
        command = words[1] if words[0] == "python" else words[0]
        if command in SCRIPTS or command.startswith("examples/music"):
            options = {word.partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}
            assert [option for option in options if option not in options_of(command)] == [], words
    checked = {Path(command).name for command in shown}
    assert {"txl-serve", "txl-export", "txl-prepare", "txl-train", "generate.py", "measures.py"} <= checked


def test_options_that_replace_those_of_others_exist():
    """The second column of docs/coming-from.md."""
    page = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    here = " ".join(re.findall(r"^\|[^|]+\|([^|]+)\|", page, re.MULTILINE))
    named = set(re.findall(r"--([a-z][\w-]+)", here))
    commands = [("txl-train", "--help-all"), ("txl-prepare", "--help"), ("txl-evaluate", "--help")]
    shown = "".join(run_script(*started_as(command), option).stdout for command, option in commands)
    assert len(named) > 12 and {name for name in named if f"--{name}" not in shown} == set()


def test_every_other_command_is_one_that_tests_run():
    """make: tests/examples/test_demo.py and this suite; pip: the Makefile does it."""
    pages = ["README.md", *(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
    pages = [page for page in pages if page not in ELSEWHERE]
    rest = [words for page in pages for words in commands(page) if words not in FRONT_PAGE]
    assert {words[0] for words in rest} == {"make", "pip"}
    assert ["pip", "install", "."] in rest
