"""Checkpoints of a training with memory: they are whole or not there, and hold what each stream remembers.

A checkpoint is written aside, into a folder whose name begins with `UNFINISHED_PREFIX`; `finish_checkpoint` gives it
its name when it is complete.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

__all__ = [
    "UNFINISHED_PREFIX",
    "checkpoint_problem",
    "finish_checkpoint",
    "last_checkpoint",
    "load_mems",
    "save_mems",
]

logger = logging.get_logger(__name__)

MEMS_NAME = "mems.safetensors"
# Written last: the files of a complete checkpoint and their sizes.
MANIFEST_NAME = "checkpoint_files.json"
# Uploads of an output directory leave out what begins so.
UNFINISHED_PREFIX = "_unfinished"


def last_checkpoint(output_dir: str | os.PathLike) -> str | None:
    """The complete checkpoint of the most steps in a directory, or None. Incomplete ones are warned of."""
    checkpoints = []
    for pattern in (f"{PREFIX_CHECKPOINT_DIR}-*", f"{UNFINISHED_PREFIX}-*/{PREFIX_CHECKPOINT_DIR}-*"):
        for path in Path(output_dir).glob(pattern):
            if match := re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name):
                checkpoints.append((int(match[1]), path))
    # Stable, so that of two with the same steps the renamed one comes first.
    for _, path in sorted(checkpoints, key=lambda checkpoint: -checkpoint[0]):
        problem = checkpoint_problem(path)
        if problem is None:
            return str(path)
        logger.warning(f"skipping {path}: {problem}")
    return None


def checkpoint_problem(folder: Path) -> str | None:
    """Why training cannot go on from a checkpoint, or None."""
    if not folder.is_dir():
        return "it does not exist"
    try:
        sizes = json.loads((folder / MANIFEST_NAME).read_text())
    except (OSError, ValueError):
        return f"it is incomplete, or not of a training with memory ({MANIFEST_NAME} is missing)"
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            return f"it is incomplete ({name} is missing or truncated)"
    if MEMS_NAME not in sizes:
        return "it holds the model only (save_only_model=True)"
    return None


def finish_checkpoint(written: Path, final: Path):
    """Give a checkpoint that is written its list of files and its name; then remove what is unfinished beside it."""
    sizes = {
        path.relative_to(written).as_posix(): path.stat().st_size for path in written.rglob("*") if path.is_file()
    }
    (written / MANIFEST_NAME).write_text(json.dumps(sizes, indent=1))
    if final.exists():
        # From an earlier run. A folder cannot take the place of another in one go; killed in between,
        # `last_checkpoint` finds the new one where it was written.
        os.replace(final, written.parent / "replaced")
    os.replace(written, final)
    for leftover in final.parent.glob(f"{UNFINISHED_PREFIX}-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def save_mems(folder: Path, layers: Sequence[Tensor], position: dict[str, Any]):
    """Write what all streams remember.

    Args:
        layers: (G, m, D) for each layer, row g that of stream g; none at the beginning of the text.
        position: where the training is in its text, and what that depends on.
    """
    tensors = {str(layer): states.cpu() for layer, states in enumerate(layers)}
    save_file(tensors, folder / MEMS_NAME, metadata={"position": json.dumps(position)})


def load_mems(
    folder: Path, position: dict[str, Any], starts: Iterable[int], rows: int, device: torch.device
) -> list[tuple[Tensor, ...] | None]:
    """The mems of streams [start, start + rows) for each start; None at the beginning of the text.

    Raises:
        ValueError: they are those of another position, or of another text or layout.
    """
    with safe_open(folder / MEMS_NAME, "pt") as file:
        saved = json.loads(file.metadata()["position"])
        if saved != position:
            raise ValueError(
                f"{folder} is from a stream at {saved}, but the training would go on at {position}: resume with the "
                "same text, batch size and lengths"
            )
        layers = [file.get_slice(str(layer)) for layer in range(len(file.keys()))]
        return [tuple(states[i : i + rows].to(device) for states in layers) or None for i in starts]
