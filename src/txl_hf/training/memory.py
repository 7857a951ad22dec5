"""The memory of all streams between the steps of a training, their place in the text, and the file of both."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import TrainerCallback

from ..memories import MASK, memory_of_tensors, named_tensors, with_mask

# File of a checkpoint: `named_tensors` of all streams, by the number of their layer alone.
MEMS_NAME, PREFIX = "mems.safetensors", ""


@dataclass
class StreamMemory:
    """The memory of each micro-batch of a step, and its position in the text.

    Attributes:
        memories: for each micro-batch `mems` and `mems_mask` of its rows on this process; {} before the text.
        epoch, step: steps of this epoch were read.
        micro_batch: the next one.
    """

    memories: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    epoch: int = 0
    step: int = 0
    micro_batch: int = 0

    @property
    def current(self) -> dict[str, Any]:
        return self.memories[self.micro_batch]

    def replace(self, memory: dict[str, Any]):
        """Store the memory of the current micro-batch and advance to the next one."""
        self.memories[self.micro_batch] = memory
        self.micro_batch = (self.micro_batch + 1) % len(self.memories)
        self.step += self.micro_batch == 0

    def next_epoch(self) -> "StreamMemory":
        """No memory, at the beginning of the next epoch."""
        return StreamMemory([{} for _ in self.memories], self.epoch + 1)

    def save(self, folder: Path, accelerator: Accelerator, position: dict[str, Any], writes: bool):
        """Write the memory of all streams, (G, m, D) for each layer, or no layer. All processes must call this.

        Args:
            position: more of the position, and the settings for `check_settings`.
            writes: whether this process writes the file.
        """
        tensors = {}
        if self.step > 0 and self.memories[0]:
            # With a mask everywhere, because all processes gather the same tensors.
            parts = [named_tensors(with_mask(memory), PREFIX) for memory in self.memories]
            tensors = {name: _gathered([part[name] for part in parts], accelerator) for name in parts[0]}
            if tensors[MASK].all():
                del tensors[MASK]
        if writes:
            position = {"epoch": self.epoch, "step": self.step, **position}
            save_file(tensors, folder / MEMS_NAME, metadata={"position": json.dumps(position)})

    @classmethod
    def load(cls, folder: Path, accelerator: Accelerator, micro_batches: int, streams: int) -> "StreamMemory":
        """The memory of this process's rows, from a checkpoint. Of A `micro_batches` of G `streams`, number a has the
        rows [aG/A, (a + 1)G/A) of all processes.
        """
        position = read_position(folder)
        rows = streams // (micro_batches * accelerator.num_processes)
        starts = [(a * accelerator.num_processes + accelerator.process_index) * rows for a in range(micro_batches)]
        with safe_open(folder / MEMS_NAME, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            parts = [{name: slices[name][start : start + rows] for name in slices} for start in starts]
        parts = [{name: tensor.to(accelerator.device) for name, tensor in part.items()} for part in parts]
        memories = [memory_of_tensors(part, PREFIX) for part in parts]
        return cls(memories, position["epoch"], position["step"])


class MemoryLength(TrainerCallback):
    """A memory that grows from 1 state to `mem_len` over a part of all steps.

    Args:
        trainer: a `TransfoXLTrainer`, whose `memory_length` it sets. ratio: the part, from 0 to 1.
    """

    def __init__(self, trainer: Any, ratio: float):
        if not trainer.model.config.mem_len:
            raise ValueError(f"--mem_warmup_ratio {ratio:g} grows no memory, as mem_len is 0: leave it out")
        self.trainer, self.ratio = trainer, ratio

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        growing = self.ratio * state.max_steps
        mem_len = model.config.mem_len
        # At least 1, because a step without memory would begin a new text.
        grown = max(1, int(mem_len * state.global_step / growing)) if state.global_step < growing else None
        self.trainer.memory_length = grown


def _gathered(parts: list[Tensor], accelerator: Accelerator) -> Tensor:
    """Tensors of the micro-batches of all processes, joined in the order of the streams."""
    # Booleans as bytes, which every backend exchanges.
    dtype = torch.uint8 if parts[0].dtype == torch.bool else parts[0].dtype
    return torch.cat([accelerator.gather(part.to(dtype).contiguous()) for part in parts]).to("cpu", parts[0].dtype)


def read_position(folder: Path) -> dict[str, Any]:
    """The position in a file of `StreamMemory.save`. Raises a ValueError for other files."""
    with safe_open(folder / MEMS_NAME, "pt") as file:
        position = json.loads((file.metadata() or {}).get("position", "null"))
        names = set(file.keys()) - {MASK}
        if not isinstance(position, dict) or {str(layer) for layer in range(len(names))} != names:
            raise ValueError(f"it is damaged ({MEMS_NAME} says no position, or holds other tensors than layers)")
    return position


def check_settings(folder: Path, settings: dict[str, Any]):
    """Raise a ValueError where a checkpoint is of another text, layout, model or optimizer."""
    saved = read_position(folder)
    # "read" is compared when the text is read again.
    names = {*saved, *settings} - {"epoch", "step", "read"}
    differing = sorted(name for name in names if saved.get(name) != settings.get(name))
    if differing:
        then, now = ({name: each.get(name) for name in differing} for each in (saved, settings))
        raise ValueError(
            f"{folder} is of a training with {then}, but this one has {now}: resume with the same text, batch size, "
            "lengths, seed, model and optimizer"
        )
