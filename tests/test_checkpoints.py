"""Checkpoints of both trainers, from anyone and after any damage: nothing runs, and the last good one is found."""

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("accelerate")
pytest.importorskip("datasets")

from accelerate.state import AcceleratorState, GradientState
from transformers import TrainerCallback

import train_lm
from lm_arguments import parse_arguments, write_smoke_data
from trainer_process import make_arguments, make_model, make_text
from txl_hf import TokenStream, TransfoXLTrainer, checkpoints
from txl_hf.checkpoints import MANIFEST_NAME, checkpoint_problem

RECIPE = {
    "n_layer": 1,
    "d_model": 8,
    "n_head": 1,
    "d_head": 8,
    "d_inner": 8,
    "dropout": 0.1,
    "tgt_len": 8,
    "mem_len": 8,
    "batch_size": 2,
    "max_steps": 4,
    "eval_every": 4,
    "eval_batch_size": 2,
    "eval_tgt_len": 200,
    "save_every": 2,
    "log_every": 1,
    "average": "ema",
}


@contextmanager
def fresh_accelerate() -> Iterator[None]:
    try:
        yield
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


class ScriptRun:
    """examples/train_lm.py; `resume` goes on as `--resume` would, and returns the step that it goes on from."""

    def __init__(self, output: Path, data: Path):
        self.output, self.data = output, data

    def argv(self, *options: str) -> list[str]:
        recipe = self.data / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(RECIPE))
        return [str(recipe), "--data", str(self.data), "--output", str(self.output), *options]

    def train(self, *options: str):
        with fresh_accelerate():
            train_lm.main(self.argv(*options))

    def resume(self) -> int:
        with fresh_accelerate():
            training = train_lm.Training(parse_arguments(self.argv("--resume")))
            training.accelerator.end_training()
            return training.step


class StepsFrom(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        self.step = state.global_step


class TrainerRun:
    """TransfoXLTrainer, likewise."""

    def __init__(self, output: Path, data: Path):
        self.output = output

    def train(self, resume: bool = False, seed: int = 0, max_steps: int = 4, tokens: int = 301, **changes) -> int:
        begun = StepsFrom()
        settings = {"max_steps": max_steps, "save_strategy": "steps", "save_steps": 2, **changes}
        TransfoXLTrainer(
            make_model(dropout=0.1),
            make_arguments(self.output, **settings),
            train_dataset=TokenStream(make_text(tokens, seed=seed), 5, 4),
            callbacks=[begun],
        ).train(resume_from_checkpoint=resume)
        return begun.step

    def resume(self) -> int:
        return self.train(resume=True)


@pytest.fixture(scope="module", params=[ScriptRun, TrainerRun], ids=["train_lm", "TransfoXLTrainer"])
def trained(request, tmp_path_factory):
    """A run of each trainer with the checkpoints 2 and 4."""
    folder = tmp_path_factory.mktemp("trained")
    write_smoke_data(folder / "data")
    run = request.param(folder / "output", folder / "data")
    run.train()
    return run


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained.output, tmp_path / "output")
    return type(trained)(tmp_path / "output", getattr(trained, "data", None))


def sign(checkpoint: Path):
    """Let the manifest say what the files are now, as whoever plants something would."""
    manifest = json.loads((checkpoint / MANIFEST_NAME).read_text())
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST_NAME]
    manifest["files"] = {path.relative_to(checkpoint).as_posix(): checkpoints._describe(path) for path in files}
    (checkpoint / MANIFEST_NAME).write_text(json.dumps(manifest))


# --- nothing runs ----------------------------------------------------------------------------------------------------


class Hostile:
    """Unpickled, it makes a folder."""

    def __init__(self, marker: Path):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


FORMATS: dict[str, Callable] = {
    "pickle": lambda bad, path: path.write_bytes(pickle.dumps(bad, protocol=2)),
    "zip": lambda bad, path: torch.save({"state": bad}, path),
    "legacy": lambda bad, path: torch.save(bad, path, _use_new_zipfile_serialization=False),
}
# What one of the libraries would read if it were there.
ADDED = [
    "custom_checkpoint_0.pkl",
    "custom_checkpoint_1.pkl",
    "pytorch_model.bin",
    "scheduler.bin",
    "sampler.bin",
    "scaler.pt",
    "adapter_model.bin",
    "average.pt",
]


@pytest.mark.parametrize(
    ("format", "checked"),
    [("pickle", True), ("zip", False), pytest.param("legacy", False, marks=pytest.mark.slow)],
    ids=["checked", "unchecked", "unchecked-legacy"],
)
def test_nothing_in_a_checkpoint_runs(run, tmp_path, monkeypatch, format, checked):
    """Whichever file holds a pickle that would, with the right sizes and checksums; also where it gets past the check
    before loading, because then the loaders themselves refuse it."""
    marker, checkpoint = tmp_path / "ran", run.output / "checkpoint-4"
    shutil.rmtree(run.output / "checkpoint-2")
    present = {path.name for path in checkpoint.iterdir() if path.suffix not in (".py", ".md")}
    names = sorted(present | set(ADDED))
    assert len(names) > 8
    whole = tmp_path / "whole"
    shutil.copytree(checkpoint, whole)
    FORMATS[format](Hostile(marker), tmp_path / "hostile")
    with suppress(Exception):
        torch.load(tmp_path / "hostile", weights_only=False)
    assert marker.exists(), "it is hostile"
    marker.rmdir()
    if not checked:
        monkeypatch.setattr(checkpoints, "checkpoint_problem", lambda folder: None)
        monkeypatch.setattr("txl_hf.trainer.checkpoint_problem", lambda folder: None)
    for name in names:
        shutil.copyfile(tmp_path / "hostile", checkpoint / name)
        if name == "pytorch_model.bin":
            (checkpoint / "model.safetensors").unlink()
        if name != MANIFEST_NAME:
            sign(checkpoint)
        with suppress(Exception) if name == "training_args.bin" or not checked else pytest.raises(ValueError):
            run.resume()
        assert not marker.exists(), name
        shutil.rmtree(checkpoint)
        shutil.copytree(whole, checkpoint)
    assert checkpoint_problem(checkpoint) is None
