"""Checkpoints of a training with memory, complete or absent.

A checkpoint is a folder whose name begins with `UNFINISHED_PREFIX` until it is on the disk (`finish_checkpoint`). Its
manifest names the run that wrote it and each of its files with size and CRC-32.

A checkpoint may come from anyone, and nothing in it is executed: pickles are read as data before any library reads
them (`checkpoint_problem`), and `data_only` makes `torch.load` refuse everything else.
"""

import codecs
import json
import os
import pickle
import re
import secrets
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..files import MANIFEST_NAME, UNFINISHED_PREFIX, move_into_place, write_text
from ..legacy.unpickle import Dictionary, Reader, UnsafePickleError
from .memory import MEMS_NAME, read_position

logger = logging.get_logger(__name__)

# File beside the checkpoints with the name of the run that writes there now.
RUN_NAME = "run.json"
# Pickles that nothing reads.
NEVER_READ = ("training_args.bin",)
# Classes in the pickles of DeepSpeed's shards: loss scalers, and the stage by which the state is sharded.
DEEPSPEED_RECORDS = {
    "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
}
# Names in the list of shards that torch.distributed.checkpoint pickles.
SHARD_RECORDS = re.compile(
    rf"""(?x)
    torch\.({"|".join(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))}|Size)
    | pathlib(\._local)?\.(Posix|Windows)Path | torch\.serialization\._get_layout
    | torch\.distributed\.checkpoint\.filesystem\._StorageInfo
    | torch\.distributed\.checkpoint\.metadata\.(BytesStorageMetadata|ChunkStorageMetadata|Metadata|MetadataIndex
      |StorageMeta|TensorProperties|TensorStorageMetadata)
    """
)
MEMORY_FORMATS = f"{_MEM_FORMAT_ENCODING.__module__}.{_MEM_FORMAT_ENCODING.__name__}"
# Function by which early versions of Python 3.11 pickle a member of an enumeration.
GETATTR = "builtins.getattr"

# --- which checkpoint ------------------------------------------------------------------------------------------------


def begin_run(output_dir: str | os.PathLike, checkpoint: str | os.PathLike | None = None) -> str:
    """Record the run that writes to a directory from now on, that of the checkpoint or a new one; returns its name."""
    run = secrets.token_hex(8) if checkpoint is None else _read_manifest(Path(checkpoint))["run"]
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    write_text(Path(output_dir) / RUN_NAME, json.dumps({"run": run}) + "\n")
    return run


def list_checkpoints(output_dir: str | os.PathLike) -> list[tuple[int, Path]]:
    """The checkpoints of a directory with their steps, in the order of the steps, not of their times."""
    paths = filter(Path.is_dir, Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
    found = [(re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name), path) for path in paths]
    return sorted((int(match[1]), path) for match, path in found if match)


def last_checkpoint(output_dir: str | os.PathLike) -> str | None:
    """The usable checkpoint with the most steps, of the run that writes to a directory, or None; a warning names each
    that is passed over."""
    for _, path in reversed(list_checkpoints(output_dir)):
        problem = checkpoint_problem(path)
        if problem is None and not _is_of_current_run(path):
            problem = "it is of an earlier run in this directory; to go on from it, name it"
        if problem is None:
            return str(path)
        logger.warning(f"skipping {path}: {problem}")
    return None


def remove_old_checkpoints(output_dir: str | os.PathLike, limit: int | None, keep: Iterable[str | os.PathLike | None]):
    """Remove checkpoints but those to `keep` until `limit` are left: first those of earlier runs, then those with the
    fewest steps. None or 0: no limit."""
    kept = {Path(path).resolve() for path in keep if path is not None}
    checkpoints = [path for _, path in list_checkpoints(output_dir)]
    # Stable: within a run in the order of steps.
    candidates = [path for path in sorted(checkpoints, key=_is_of_current_run) if path.resolve() not in kept]
    if limit:
        for path in candidates[: max(0, len(checkpoints) - limit)]:
            shutil.rmtree(path, ignore_errors=True)


def _is_of_current_run(checkpoint: Path) -> bool:
    """Whether a checkpoint is of the run that writes to its directory; True where no run is named."""
    try:
        run = json.loads((checkpoint.parent / RUN_NAME).read_text(encoding="utf-8"))["run"]
    except (OSError, ValueError, TypeError, KeyError):
        return True
    try:
        return _read_manifest(checkpoint)["run"] == run
    except ValueError:
        return False


# --- whole, and data alone -------------------------------------------------------------------------------------------


def finish_checkpoint(written: Path, final: Path, run: str):
    """Write a checkpoint's manifest, rename the checkpoint, and remove unfinished folders beside it."""
    files = {path.relative_to(written).as_posix(): _describe(path) for path in written.rglob("*") if path.is_file()}
    (written / MANIFEST_NAME).write_text(json.dumps({"run": run, "files": files}, indent=1), encoding="utf-8")
    move_into_place(written, final)
    remove_unfinished(final.parent)


def remove_unfinished(folder: Path, files: bool = False):
    """Remove what killed processes left: folders, and files too where no other process writes (`files`)."""
    for leftover in folder.glob(f"{UNFINISHED_PREFIX}-*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        elif files:
            leftover.unlink(missing_ok=True)


def checkpoint_problem(folder: Path) -> str | None:
    """The reason why training cannot resume from a checkpoint; None: all its files were read and are intact."""
    if not folder.is_dir():
        return "it does not exist"
    try:
        files = _read_manifest(folder)["files"]
        for name, expected in files.items():
            file = folder / name
            if not file.is_file() or file.stat().st_size != expected["size"]:
                return f"it is incomplete ({name} is missing or truncated)"
            if _describe(file) != expected:
                return f"it is damaged ({name} is not what was written)"
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name not in NEVER_READ:
                _check_readable(path, path.relative_to(folder).as_posix())
        if MEMS_NAME not in files:
            return "it holds the model only (save_only_model=True)"
        read_position(folder)
    except ValueError as error:
        return str(error)
    except OSError as error:
        return f"it cannot be read ({error})"
    return None


@contextmanager
def data_only() -> Iterator[None]:
    """A context in which `torch.load` of any library calls no function that a pickle names."""
    names = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    os.environ[names[0]] = "1"
    try:
        with safe_globals(), torch.serialization.safe_globals(_plain_classes()):
            yield
    finally:
        del os.environ[names[0]]
        os.environ.update(before)


def _describe(path: Path) -> dict[str, int]:
    """Size and CRC-32 of a file."""
    checksum = 0
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            checksum = zlib.crc32(part, checksum)
    return {"size": path.stat().st_size, "crc32": checksum}


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises a ValueError that says what is wrong with it."""
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
        whole = all({"size", "crc32"} <= entry.keys() for entry in manifest["files"].values())
    except OSError as error:
        raise ValueError(f"it is incomplete, or not of a training with memory ({MANIFEST_NAME} is missing)") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is damaged ({MANIFEST_NAME} is no list of files with checksums)") from error
    if not whole or not isinstance(manifest.get("run"), str):
        raise ValueError(f"it is damaged ({MANIFEST_NAME} names no run, or a file without a checksum)")
    return manifest


def _check_readable(path: Path, name: str):
    """Raise a ValueError for a file that is not in the format of its suffix, or holds more than data."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt"):
                pass
        elif path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix in (".pt", ".pth", ".bin", ".pkl", ".ckpt"):
            with data_only():
                # On "meta" only the structure is read.
                torch.load(path, map_location="meta", weights_only=True)
        elif path.name.endswith(".metadata"):
            with path.open("rb") as file:
                _ShardsReader(file).load()
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"it is damaged, or holds more than data ({name} cannot be read)") from error


def _memory_format(kind: Any, name: Any) -> str:
    """In place of `getattr`, for members of the memory formats alone."""
    if getattr(kind, "name", None) != MEMORY_FORMATS or name not in _MEM_FORMAT_ENCODING.__members__:
        raise UnsafePickleError("getattr of anything but a memory format is no record of shards")
    return name


class _ShardsReader(Reader):
    """Reads the list of shards of torch.distributed.checkpoint, and refuses any but its records, because torch then
    reads it by `pickle.load`.
    """

    known = SHARD_RECORDS
    builders: ClassVar[dict[str, Callable]] = {
        "collections.OrderedDict": Dictionary,
        MEMORY_FORMATS: int,
        GETATTR: _memory_format,
    }


def _plain_classes() -> list:
    """Classes in the pickles of accelerate and DeepSpeed that transformers' `safe_globals` leaves out."""
    # A run with DeepSpeed has loaded these.
    classes = [
        getattr(sys.modules[module], name)
        for module, names in DEEPSPEED_RECORDS.items()
        for name in names
        if module in sys.modules
    ]
    return [*classes, codecs.encode, (_member, GETATTR)]


def _member(kind: Any, name: str) -> Enum:
    """In place of `getattr`: the member of an enumeration, and of nothing else."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"{name!r} is no member of an enumeration")
    return kind[name]
