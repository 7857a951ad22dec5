"""The wheel, made from the sdist, converts, loads, writes and trains outside of a clone."""

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

import house
import txl_hf
from goldens import golden
from midi_files import write_folder
from txl_hf import command_line

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "txl_hf"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Distributions whose module has another name.
MODULES = {"pyyaml": "yaml"}
BUILD = """
import sys
from setuptools import build_meta

print(getattr(build_meta, "build_" + sys.argv[1])(sys.argv[2]))
"""
USE = """
import json, sys
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import txl_hf

model = AutoModelForCausalLM.from_pretrained("converted")
written = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, min_new_tokens=5)
stream = txl_hf.TokenStream(torch.arange(60) % 50, segment_length=6, batch_size=2)
arguments = TrainingArguments("trained", max_steps=2, per_device_train_batch_size=2, report_to=[], save_strategy="no")
trainer = txl_hf.TransfoXLTrainer(model, arguments, train_dataset=stream)
trainer.train()
trainer.save_model("trained")
again = AutoModelForCausalLM.from_pretrained("trained", trust_remote_code=True)
print(json.dumps({
    "file": txl_hf.__file__,
    "versions": [txl_hf.__version__, version("txl-hf")],
    "typed": Path(txl_hf.__file__).with_name("py.typed").exists(),
    "written": written.shape[1],
    "steps": trainer.state.global_step,
    "trained": sum(p.numel() for p in again.parameters()),
}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from the sdist, and that from what git has."""
    folder = tmp_path_factory.mktemp("wheel")
    clone, unpacked = folder / "clone", folder / "unpacked"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.split("\0"):
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, clone / name)

    def build(what: str, source: Path) -> Path:
        command = [sys.executable, "-c", BUILD, what, folder]
        run = subprocess.run(command, cwd=source, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-2000:]
        return folder / run.stdout.splitlines()[-1]

    with tarfile.open(build("sdist", clone)) as archive:
        # Early versions of Python 3.11 do not ask.
        archive.extractall(unpacked, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    [source] = unpacked.iterdir()
    assert {"LICENSE", "README.md", "pyproject.toml"} <= {path.name for path in source.iterdir()}
    return build("wheel", source)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """An environment with the wheel alone; what it needs comes from the environment at hand."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True)
    # Paths in a .pth file: the .pth files in there, which would bring the clone, are not read.
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "at_hand.pth").write_text("\n".join(path for path in sys.path if Path(path).name == "site-packages"))
    return folder


def run(folder: Path, *command) -> str:
    """The output of a command that runs outside of the clone."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    return process.stdout


def test_the_wheel_converts_loads_writes_and_trains(installed, tmp_path):
    checkpoint = golden("kimiyoung_pytorch/word_adaptive_div2_proj.model.pt")
    convert = [installed / "bin" / "txl-convert", "--from", "kimiyoung-pytorch", "--checkpoint", checkpoint]
    run(tmp_path, *convert, "--output", tmp_path / "converted")
    found = json.loads(run(tmp_path, installed / "bin" / "python", "-c", USE).splitlines()[-1])
    assert Path(found["file"]).is_relative_to(installed)
    assert found["versions"] == [txl_hf.__version__] * 2
    assert found["typed"] and found["written"] == 8 and found["steps"] == 2 and found["trained"] > 0


def test_the_wheel_prepares_midi_files(installed, tmp_path):
    """The program of examples that `txl-prepare` imports by its name."""
    source = write_folder(tmp_path / "midi", 3, bars=1)
    options = ["--corpus", "midi", "--input", source, "--output", tmp_path / "data", "--num_proc", "1"]
    assert "holds midi with a vocabulary of" in run(tmp_path, installed / "bin" / "txl-prepare", *options)


def test_every_command_says_how_it_is_used(installed, tmp_path):
    [metadata] = importlib.metadata.distributions(name="txl-hf", path=[str(next(installed.rglob("site-packages")))])
    commands = [entry.name for entry in metadata.entry_points if entry.group == "console_scripts"]
    assert set(commands) == set(PROJECT["scripts"])
    for command in commands:
        assert "usage: " in run(tmp_path, installed / "bin" / command, "--help")


def test_pip_takes_the_installed_package_for_what_an_extra_lacks(installed):
    """So commands may say `pip install "txl-hf[train]"` wherever it came from: no index is asked for it."""
    ask = [sys.executable, "-m", "pip", "--python", installed / "bin" / "python", "install", "--no-index", "--dry-run"]
    process = subprocess.run([*ask, "txl-hf[train]"], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    assert "Would install" not in process.stdout


def test_what_is_missing_is_named_with_the_extra_that_has_it():
    """Every module of an extra, and by pip's name where it is in none."""
    for extra in PROJECT["optional-dependencies"].keys() - {"convert", "dev", "docs"}:
        lines = PROJECT["optional-dependencies"][extra]
        for module in modules(lines) - modules(PROJECT["dependencies"]) - {"txl-hf"}:
            expected = {f"txl-hf[{extra}]", "txl-hf[train]" if module == "accelerate" else ""}
            assert command_line.REQUIREMENTS[module] in expected
    named = {requirement.partition("[")[2].rstrip("]") for requirement in command_line.REQUIREMENTS.values()} - {""}
    assert named <= PROJECT["optional-dependencies"].keys()


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("yaml", ': pip install "txl-hf[train]"'),
        ("lm_eval.api", ': pip install "txl-hf[lm-eval]"'),
        ("peft", ": pip install peft"),
        ("nothing_of_the_kind", ""),
        ("txl_hf.midi", ": pip install -e . in the folder of the clone"),
    ],
)
def test_what_to_install(module, said, monkeypatch):
    def refuse():
        with pytest.raises(SystemExit) as end, command_line.one_line_errors():
            raise ModuleNotFoundError("no", name=module)
        return end.value.code

    assert refuse() == f"error: {module} is not installed{said}"
    # A clone whose `src` is on the path alone.
    monkeypatch.setattr(command_line, "distribution", lambda name: importlib.metadata.distribution("no-" + name))
    if "[" in said:
        said = said.replace("txl-hf", ".") + " in the folder of the clone"
    assert refuse() == f"error: {module} is not installed{said}"


def modules(requirements: list[str]) -> set[str]:
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}
    return {MODULES.get(name, name) for name in names}


def imports_at_once(*paths: Path) -> set[Path]:
    """The files of the package that are imported with these, themselves among them."""
    found, waiting = set(), list(paths)
    while waiting:
        path = waiting.pop()
        if path in found or not path.exists():
            continue
        found.add(path)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ImportFrom):
                continue
            module = node.module or ""
            if node.level:
                folder = path.parents[node.level - 1]
            elif module.partition(".")[0] == "txl_hf":
                folder, module = PACKAGE, module.partition(".")[2]
            else:
                continue
            # `from . import x` imports a module too, and importing one imports the `__init__` of each folder above it.
            for name in (module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)):
                parts = [part for part in name.split(".") if part]
                steps = [folder.joinpath(*parts[:i]) for i in range(len(parts) + 1)]
                waiting += [step / "__init__.py" for step in steps] + [step.with_suffix(".py") for step in steps]
    return found


def test_whatever_is_imported_is_declared():
    """Imports of the public names and the converters are dependencies; all others belong to an extra."""
    wanted = {"at once": set(), "later": set()}
    converters = set((ROOT / "conversion").glob("*.py"))
    first = imports_at_once(PACKAGE / "__init__.py", *converters)
    assert PACKAGE / "kernels" / "softmax.py" in first and PACKAGE / "training" / "trainer.py" not in first
    for path in house.sources():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            at_once = path in first and node in tree.body
            wanted["at once" if at_once else "later"] |= {name.split(".")[0] for name in names}

    at_hand = sys.stdlib_module_names | {"txl_hf"} | modules(PROJECT["dependencies"])
    optional = PROJECT["optional-dependencies"]
    extras = modules([line for name in optional.keys() - {"dev", "docs"} for line in optional[name]])
    extras |= {"pydantic", "starlette"}  # What FastAPI is made of.
    assert wanted["at once"] - at_hand == set()
    assert wanted["later"] - at_hand - extras == set()
