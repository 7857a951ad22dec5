"""What is wrong with files of weights that cannot be read, or that torch would load all the same."""

import json
import mmap
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .unpickle_transfo_xl import (
    Machine,
    Name,
    StandIn,
    UnsafePickleError,
    checksum_differs,
    read_directory,
    shown,
)
from .unpickle_transfo_xl import load as load_pickle

__all__ = ["file_problems", "packing_problem", "weight_files"]


class _Listing(Machine):
    """Runs the pickle of a checkpoint for its errors alone; its tensors become stand-ins."""

    def refer(self, identity: object) -> StandIn:
        return StandIn(Name("torch", "Storage"))


def weight_files(name: str | os.PathLike | None, subfolder: str = "", variant: str | None = None) -> list[str]:
    """The files in a folder that `from_pretrained` may read weights from; none where the name is of no folder."""
    if name is None or not os.path.isdir(name):
        return []
    folder, suffix = Path(name, subfolder), f".{variant}" if variant else ""
    patterns = ["adapter_model.safetensors"]
    for stem, kind in (("pytorch_model", "bin"), ("model", "safetensors")):
        patterns += [f"{stem}{suffix}.{kind}", f"{stem}{suffix}-*.{kind}", f"{stem}.{kind}.index{suffix}.json"]
    return sorted(str(path) for pattern in patterns for path in folder.glob(pattern))


def file_problems(files: Iterable[str]) -> list[str]:
    """What is wrong with files of weights, one sentence each that begins with the file."""
    return [f"{file}: {problem}" for file in files if (problem := _file_problem(file)) is not None]


def _file_problem(file: str) -> str | None:
    if not Path(file).exists():
        # transformers names a file that it looked for in vain.
        return None
    if file.endswith(".json"):
        return _index_problem(file)
    if file.endswith(".safetensors"):
        try:
            with safe_open(file, "pt"):
                return None
        except (SafetensorError, OSError) as error:
            return f"truncated or damaged ({error}): copy or download it again"
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        try:
            load_pickle(file, _Listing())
        except UnsafePickleError as problem:
            reason = str(problem).removeprefix(f"{Path(file).name}: ").removeprefix(f"{Path(file).name} ")
        except OSError as problem:
            reason = str(problem)
        else:
            reason = f"torch raises {type(error).__name__}"
        return f"truncated or damaged, or no checkpoint: {reason}"
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        return "no checkpoint, which is a dictionary of tensors"
    return None


def _index_problem(file: str) -> str | None:
    """What is wrong with the list of weights in several files."""
    try:
        index = json.loads(Path(file).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        return f"truncated or damaged ({error}): copy or download it again"
    parts = [index.get(name) for name in ("metadata", "weight_map")] if isinstance(index, dict) else []
    if not all(isinstance(part, dict) for part in parts) or not parts:
        return "no index of weights, which is a JSON object with the objects metadata and weight_map"
    return None


def packing_problem(file: str) -> str | None:
    """What is wrong with an archive that torch would map all the same, and load as weights whatever is there."""
    try:
        if file.endswith(".safetensors") or not zipfile.is_zipfile(file):
            return None
    except zipfile.BadZipFile as error:  # from the question itself, which loading would ask again
        return f"truncated or damaged ({error}): copy or download it again"
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            records = read_directory(Path(file), data)
        except UnsafePickleError as error:
            return f"{error}; unpack it and write it with torch.save"
        except (zipfile.BadZipFile, ValueError, struct.error):
            return None  # loading the file will say what is wrong
        with memoryview(data) as content:
            for record in records.values():
                with content[record.begin : record.begin + record.length] as part:
                    if checksum_differs(zlib.crc32(part), record.checksum):
                        return (
                            f"damaged: the checksum of record {shown(record.name)} does not match; download it again"
                        )
    return None
