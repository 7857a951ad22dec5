"""An agent that reads step by step, in windows and at once, in processes with a part of the rows each."""

from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from models import small_config
from txl_hf import TransfoXLModel
from txl_hf.memories import memory_of

ROWS, STEPS = 4, 18
WAYS = {"stepped": [1] * STEPS, "windowed": [5, 1, 9, 3], "packed": [STEPS]}


def build() -> TransfoXLModel:
    torch.manual_seed(0)
    return TransfoXLModel(small_config(vocab_size=0, input_size=5, gating="gru", same_length=True))


def episodes() -> tuple[Tensor, Tensor]:
    """Observations (ROWS, STEPS, 5), and where episodes begin in them: nowhere, at the first, several in a row."""
    observations = torch.randn(ROWS, STEPS, 5, generator=torch.Generator().manual_seed(1))
    resets = torch.zeros(ROWS, STEPS, dtype=torch.bool)
    resets[1, 0] = resets[1, 11] = resets[2, 6:9] = resets[3, 17] = True
    return observations, resets


def read(model: TransfoXLModel | DistributedDataParallel, rows: slice, lengths: list[int]) -> tuple[Tensor, list]:
    """The states of these rows, (n, STEPS, D), and the gradients of the sum of their squares, within windows."""
    memory, states, start = {}, [], 0
    model.zero_grad()
    for length in lengths:
        window, last = slice(start, start + length), start + length == STEPS
        observations, resets = (each[rows, window] for each in episodes())
        with nullcontext() if last or isinstance(model, TransfoXLModel) else model.no_sync():
            outputs = model(inputs_embeds=observations, resets=resets, **memory)
            outputs.last_hidden_state.square().sum().backward()
        memory, start = memory_of(outputs), start + length
        states.append(outputs.last_hidden_state.detach())
    return torch.cat(states, 1), [parameter.grad.clone() for parameter in model.parameters()]


def save_all(folder: Path):
    """Save `{way: (states, gradients)}` of this process. Gradients are the mean over the processes."""
    dist.init_process_group("gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    model, part = DistributedDataParallel(build()), ROWS // processes
    rows = slice(rank * part, (rank + 1) * part)
    torch.save({way: read(model, rows, lengths) for way, lengths in WAYS.items()}, folder / f"{rank}.pt")
    dist.barrier()
