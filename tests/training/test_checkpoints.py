"""Checkpoints of both trainers, from anyone and after any damage: nothing runs, and the last good one is found."""

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from enum import Enum, IntEnum
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed.checkpoint
import yaml

pytest.importorskip("accelerate")
pytest.importorskip("datasets")

from accelerate.state import AcceleratorState, GradientState
from datasets import DatasetDict, load_from_disk
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from transformers import AutoTokenizer, TrainerCallback

from trainer_process import make_arguments, make_model, make_text
from txl_hf import TokenStream, TransfoXLTrainer
from txl_hf.commands import train_lm as command
from txl_hf.commands.recipe import parse_arguments, write_smoke_data
from txl_hf.training import checkpoints
from txl_hf.training.checkpoints import (
    MANIFEST_NAME,
    checkpoint_problem,
    last_checkpoint,
    remove_old_checkpoints,
)
from txl_hf.training.memory import MEMS_NAME

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
    "eval_steps": 4,
    "eval_batch_size": 2,
    "eval_tgt_len": 200,
    "save_steps": 2,
    "logging_steps": 1,
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
            command.main(self.argv(*options))

    def resume(self) -> int:
        with fresh_accelerate():
            arguments, begun = parse_arguments(self.argv("--resume")), StepsFrom()
            trainer = command.make_trainer(arguments, command.prepare(arguments))
            trainer.add_callback(begun)
            trainer.train(resume_from_checkpoint=True)
            return begun.step


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
    run = json.loads((checkpoint / MANIFEST_NAME).read_text())["run"]
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST_NAME]
    described = {path.relative_to(checkpoint).as_posix(): checkpoints._describe(path) for path in files}
    (checkpoint / MANIFEST_NAME).write_text(json.dumps({"run": run, "files": described}))


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
    [
        pytest.param("pickle", True, marks=pytest.mark.slow),
        ("zip", False),
        pytest.param("legacy", False, marks=pytest.mark.slow),
    ],
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
        monkeypatch.setattr("txl_hf.training.trainer.checkpoint_problem", lambda folder: None)
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


@pytest.fixture
def shards(tmp_path) -> Path:
    """The list of the shards of a checkpoint, as torch writes it."""
    state = {"weight": torch.randn(3, 2), "step": torch.tensor(4), "rates": [0.1], "half": torch.ones(2).bfloat16()}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "shards", no_dist=True)
    return tmp_path / "shards" / ".metadata"


def test_a_list_of_shards_is_read(shards):
    checkpoints._check_readable(shards, ".metadata")


class ByName(pickle.Pickler):
    """Writes the members of enumerations as early versions of Python 3.11 do."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_list_of_shards_of_an_early_python_3_11_is_read(shards, protocol):
    """Debian 12 comes with one."""
    with shards.open("rb") as file:
        listed = pickle.load(file)
    with shards.open("wb") as file:
        ByName(file, protocol).dump(listed)
    assert b"getattr" in shards.read_bytes()
    checkpoints._check_readable(shards, ".metadata")


@pytest.mark.parametrize("name, whole", [("gradients", True), ("mro", False), ("__init__", False)])
def test_a_state_of_deepspeed_of_an_early_python_3_11_is_read(tmp_path, monkeypatch, name, whole):
    """And nothing but members of enumerations is found that way."""
    kind = IntEnum("ZeroStageEnum", "gradients weights", module="deepspeed.runtime.zero.config")
    module = ModuleType("deepspeed.runtime.zero.config")
    module.ZeroStageEnum = kind
    for part in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero"):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    monkeypatch.setitem(sys.modules, module.__name__, module)

    class Stage:
        def __reduce__(self):
            return getattr, (kind, name)

    torch.save({"zero_stage": Stage(), "step": torch.tensor(3)}, tmp_path / "states.pt")
    with nullcontext() if whole else pytest.raises(ValueError, match="holds more than data .*states.pt"):
        checkpoints._check_readable(tmp_path / "states.pt", "states.pt")
    if whole:
        with checkpoints.data_only():
            assert torch.load(tmp_path / "states.pt")["zero_stage"] is kind.gradients


def alter_class() -> bytes:
    """A pickle that sets an attribute of a class that lists of shards name."""
    return b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n(dVhurt\nI1\nsb."


HARMFUL = {
    "a call": pickle.dumps(Hostile(Path("never-made")), protocol=2),
    "a class altered": alter_class(),
    "a name of torch": b"ctorch\nload\n(Vfile\ntR.",
    "a name inside a name": b"\x80\x04\x8c\x05torch\x8c\x0cSize.__add__\x93.",
    "an attribute of a class": (
        b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\nMetadataIndex\nV__init__\ntR."
    ),
    "an attribute of an enumeration": (
        b"c__builtin__\ngetattr\n(ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nVmro\ntR."
    ),
    "a member of an enumeration altered": (
        b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n(I0\ntR(dVhurt\nI1\nsb."
    ),
    "an attribute of a text": b"cbuiltins\ngetattr\n(Vtext\nVformat\ntR.",
    "nothing": b"",
}


@pytest.mark.parametrize("content", HARMFUL.values(), ids=HARMFUL)
def test_a_list_of_shards_holds_nothing_else(shards, content):
    shards.write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata cannot be read"):
        checkpoints._check_readable(shards, ".metadata")
    assert not hasattr(torch.distributed.checkpoint.metadata.MetadataIndex, "hurt")
    assert not Path("never-made").exists()


def test_a_shard_runs_nothing(tmp_path):
    """A list may name nothing but records, and what these hold be pickles: only the loader refuses those."""
    marker, state = tmp_path / "ran", {"weight": torch.zeros(3), "step": 0}
    hostile = {"weight": torch.ones(3), "step": Hostile(marker)}
    torch.distributed.checkpoint.save(hostile, checkpoint_id=tmp_path / "shards", no_dist=True)
    checkpoints._check_readable(tmp_path / "shards" / ".metadata", ".metadata")
    with checkpoints.data_only(), pytest.raises(CheckpointException, match="(?i)weights.only"):
        torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path / "shards", no_dist=True)
    assert not marker.exists()
    torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path / "shards", no_dist=True)
    assert marker.exists(), "it is hostile"


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(checkpoints.logger, "warning", found.append)
    return found


def zero(path: Path):
    """As after a power cut: the right size, and nothing written."""
    path.write_bytes(bytes(path.stat().st_size))


def flip(path: Path):
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable] = {
    "missing": Path.unlink,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "zeroed": zero,
    "one-bit": flip,
}


@pytest.mark.parametrize(
    "damage",
    [pytest.param(name, marks=pytest.mark.slow if name in ("zeroed", "one-bit") else ()) for name in DAMAGE],
)
def test_any_damaged_file_is_named_and_the_checkpoint_before_it_taken(run, warnings, damage):
    checkpoint = run.output / "checkpoint-4"
    for path in sorted(path for path in checkpoint.iterdir() if path.is_file()):
        content = path.read_bytes()
        DAMAGE[damage](path)
        assert last_checkpoint(run.output) == str(run.output / "checkpoint-2"), path.name
        # Damage to the manifest may read as damage to what it lists.
        assert str(checkpoint) in warnings[-1] and (path.name in warnings[-1] or path.name == MANIFEST_NAME)
        assert "weights_only" not in warnings[-1]
        path.write_bytes(content)
    assert last_checkpoint(run.output) == str(checkpoint)


@pytest.mark.parametrize(
    "manifest", ["[]", "null", '"x"', "{}", '{"files": {"a": 3}, "run": "b"}', "[" * 5000, "\0" * 9]
)
def test_a_manifest_of_another_kind_is_named(run, warnings, manifest):
    (run.output / "checkpoint-4" / MANIFEST_NAME).write_text(manifest)
    assert last_checkpoint(run.output) == str(run.output / "checkpoint-2")
    assert MANIFEST_NAME in warnings[0]


def test_damage_to_a_name_in_the_manifest_is_noticed(run, warnings):
    manifest = run.output / "checkpoint-4" / MANIFEST_NAME
    manifest.write_text(manifest.read_text().replace("model.safetensors", "modem.safetensors"))
    assert last_checkpoint(run.output) == str(run.output / "checkpoint-2")
    assert "(modem.safetensors is missing or truncated)" in warnings[0]


def test_a_memory_that_another_program_wrote_is_named(run, warnings):
    for tensors, metadata in [({"0": torch.ones(1)}, None), ({"a": torch.ones(1)}, {"position": "{}"})]:
        save_file(tensors, run.output / "checkpoint-4" / MEMS_NAME, metadata=metadata)
        sign(run.output / "checkpoint-4")
        assert last_checkpoint(run.output) == str(run.output / "checkpoint-2")
        assert MEMS_NAME in warnings[-1]


def test_a_run_goes_on_before_what_is_damaged(run, warnings):
    zero(run.output / "checkpoint-4" / "model.safetensors")
    assert run.resume() == 2
    shutil.rmtree(run.output / "checkpoint-2")
    zero(next((run.output / "checkpoint-4").glob("optimizer.*")))
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        run.resume()


def test_all_is_on_the_disk_before_a_checkpoint_has_its_name(tmp_path, monkeypatch):
    synced, renamed = set(), {}
    fsync, replace = os.fsync, os.replace

    def synced_now(descriptor):
        synced.add(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def renamed_now(source, target):
        renamed[str(target)] = {str(path) for path in Path(source).rglob("*")} | {str(source)}
        assert renamed[str(target)] <= synced
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced_now)
    monkeypatch.setattr(os, "replace", renamed_now)
    TrainerRun(tmp_path, tmp_path).train(max_steps=2)
    assert len(renamed[str(tmp_path / "checkpoint-2")]) > 8 and str(tmp_path) in synced


# --- which run, which text -------------------------------------------------------------------------------------------


def test_no_clock_decides_which_checkpoint_stays(run):
    """Older checkpoints are of a later time: set back, copied, restored."""
    for step in (2, 4):
        os.utime(run.output / f"checkpoint-{step}", (2**32, 2**32))
    if isinstance(run, TrainerRun):
        run.train(resume=True, max_steps=6, save_total_limit=2)
    else:
        run.train("--resume", "--max_steps", "6", "--save_total_limit", "1")
    # That of the fourth step is the best, or one of the last two.
    assert sorted(path.name for path in run.output.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]


def test_a_second_run_in_a_folder_goes_on_from_its_own_checkpoints(tmp_path, warnings, monkeypatch):
    first, second = TrainerRun(tmp_path, tmp_path), TrainerRun(tmp_path, tmp_path)
    first.train()
    second.train(max_steps=2)
    assert second.train(resume=True, max_steps=3) == 2
    assert "checkpoint-4: it is of an earlier run" in warnings[0]
    # One that was stopped before its first takes none.
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TransfoXLTrainer, "training_step", stop)
        second.train()
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        second.train(resume=True)
    # The earlier run's go first, whatever their steps, and what was just written stays.
    for step in (2, 4):
        assert (tmp_path / f"checkpoint-{step}").exists()
    second.train(max_steps=2, save_total_limit=1)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def stop(*args, **kwargs):
    raise KeyboardInterrupt


def test_what_is_to_be_kept_is_kept(tmp_path):
    for step in range(5):
        (tmp_path / f"checkpoint-{step}").mkdir()
    remove_old_checkpoints(tmp_path, 2, keep=[tmp_path / "checkpoint-1", None])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-4"]
    remove_old_checkpoints(tmp_path, None, keep=[])
    assert len(list(tmp_path.iterdir())) == 2


def test_a_checkpoint_leaves_files_that_another_program_is_writing(tmp_path):
    """txl-evaluate with its --output beside the checkpoints, for one."""
    other, killed = tmp_path / f"{checkpoints.UNFINISHED_PREFIX}-7-result.json", tmp_path / "_unfinished-3"
    other.touch()
    for folder in (killed, tmp_path / "written"):
        folder.mkdir()
        (folder / "part").touch()
    checkpoints.finish_checkpoint(tmp_path / "written", tmp_path / "checkpoint-4", run="mine")
    assert other.exists() and not killed.exists()


def test_what_is_of_no_run_is_removed_first(tmp_path):
    run = checkpoints.begin_run(tmp_path)
    (tmp_path / "written").mkdir()
    checkpoints.finish_checkpoint(tmp_path / "written", tmp_path / "checkpoint-1", run)
    for step in (2, 3):
        (tmp_path / f"checkpoint-{step}").mkdir()
    remove_old_checkpoints(tmp_path, 1, keep=[])
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


def test_what_cannot_be_removed_stops_no_run(tmp_path):
    """As a link in a checkpoint's place, of which the owner knows why."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoint-1").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    for step in (2, 3):
        (tmp_path / f"checkpoint-{step}").mkdir()
    remove_old_checkpoints(tmp_path, 1, keep=[])
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-3"]
    assert (tmp_path / "elsewhere").is_dir()
    (tmp_path / f"{checkpoints.UNFINISHED_PREFIX}-link").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / f"{checkpoints.UNFINISHED_PREFIX}-folder").mkdir()
    (tmp_path / "written").mkdir()
    checkpoints.finish_checkpoint(tmp_path / "written", tmp_path / "checkpoint-4", run="mine")
    assert (tmp_path / "checkpoint-4" / MANIFEST_NAME).exists()
    assert not (tmp_path / f"{checkpoints.UNFINISHED_PREFIX}-folder").exists()


def test_another_text_of_the_same_length_is_refused(run, tmp_path):
    with pytest.raises(ValueError, match="fingerprint.*resume with the same text"):
        if isinstance(run, TrainerRun):
            run.train(resume=True, seed=1)
        else:
            splits = load_from_disk(run.data)
            train = splits["train"].select([1, 0, *range(2, len(splits["train"]))]).flatten_indices()
            DatasetDict({**splits, "train": train}).save_to_disk(tmp_path / "other")
            AutoTokenizer.from_pretrained(run.data).save_pretrained(tmp_path / "other")
            run.data = tmp_path / "other"
            run.resume()
