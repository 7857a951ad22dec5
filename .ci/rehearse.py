"""The end of `.ci/release`, with the environment that it made of the wheel: the notes of the version, the README's
snippets against the suite's Hub, its commands for a text of one's own, the Space, and the results of models in both
forms that the Hub reads, the `model-index` of a card and `.eval_results/*.yaml`. The Hub shows the second form for
data sets that are its benchmarks, which none of these is yet.

    python .ci/rehearse.py build/release
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import yaml
from huggingface_hub import (
    EvalResultEntry,
    ModelCard,
    RepoCard,
    eval_result_entries_to_yaml,
    parse_eval_result_entries,
)

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))
from hub_published import hub_with, write_published  # noqa: E402 -- found on the path that the line above extends.

README = (ROOT / "README.md").read_text(encoding="utf-8")
SHORTER = {"txl-train": "--max_steps 2 --n_layer 1 --eval_batch_size 2", "txl-generate": "--max_new_tokens 20"}
AGENTS = ROOT / "examples" / "results" / "agents"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def run(folder: Path, *command: str, **environment: str) -> str:
    """The output of a command of the environment with the wheel, away from the clone."""
    program = folder / "venv" / "bin" / command[0]
    home = {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | environment
    process = subprocess.run(
        [program, *command[1:]], cwd=folder, env=os.environ | home, capture_output=True, text=True
    )
    if process.returncode:
        sys.exit(f"{shlex.join(command)}: {process.stdout[-500:]}{process.stderr[-2000:]}")
    return process.stdout


def check_notes() -> None:
    """The first section of the changelog is of this version with a date, or not released yet, and says something."""
    [version] = re.findall(r'^__version__ = "(.*)"$', (ROOT / "src/txl_hf/__init__.py").read_text(), re.MULTILINE)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heading, notes = re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", changelog, re.DOTALL | re.MULTILINE)[0]
    if not re.fullmatch(rf"Unreleased|{re.escape(version)} - \d{{4}}-\d\d-\d\d", heading) or "\n* " not in notes:
        sys.exit(f"CHANGELOG.md begins with {heading!r}: it needs notes of 'Unreleased' or '{version} - YYYY-MM-DD'")


def try_snippets(folder: Path) -> None:
    """The first block without a network, with the output that stands under it; the published model from a Hub."""
    first, published = blocks("python")[:2]
    if (printed := run(folder, "python", "-c", first)) != blocks("text")[0]:
        sys.exit(f"README's first block prints {printed}")
    with hub_with(write_published(folder / "published")) as hub:
        run(folder, "python", "-c", published, **hub.environment())


def try_commands(folder: Path) -> Path:
    """Type the README's commands for a text of one's own; returns the folder of the model."""
    (folder / "book.txt").write_text(README * 3, encoding="utf-8")
    typed = [shlex.split(line) for line in "".join(blocks("bash")).splitlines() if line.startswith("txl-")]
    for words in typed:
        run(folder, *words, *SHORTER.get(words[0], "").split())
    return folder / typed[1][typed[1].index("--output") + 1]


def write_results(model: Path) -> None:
    """Write the results of a model's card as `.eval_results/card.yaml` too, and read both again."""
    card = ModelCard.load(model / "README.md").data.eval_results or []
    entries = [
        EvalResultEntry(
            dataset_id=result.dataset_type,
            task_id=result.metric_type,
            value=result.metric_value,
            notes=" ".join(filter(None, (result.metric_name, result.dataset_split))),
        )
        for result in card
    ]
    path = model / ".eval_results" / "card.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(eval_result_entries_to_yaml(entries)), encoding="utf-8")
    found = parse_eval_result_entries(yaml.safe_load(path.read_text(encoding="utf-8")))
    if not card or found != entries:
        sys.exit(f"the results of {model} are not the same in both forms")


def check_space(folder: Path) -> None:
    card = RepoCard.load(folder / "README.md").data
    if card.sdk != "gradio":
        sys.exit(f"the card of the Space says {card}")
    compile((folder / card.app_file).read_text(encoding="utf-8"), card.app_file, "exec")


if __name__ == "__main__":
    release = Path(sys.argv[1]).resolve()
    check_notes()
    try_snippets(release)
    models = [try_commands(release)]
    models += [shutil.copytree(path, release / path.name) for path in sorted(AGENTS.glob("repeat_previous_*"))]
    for model in models:
        write_results(model)
    check_space(Path(shutil.copytree(ROOT / "examples" / "space", release / "space")))
