"""Dynamic evaluation by several processes, each of which reads some of the streams."""

import os
from pathlib import Path

import torch
from accelerate import Accelerator

from txl_hf import DynamicEvaluation, TransfoXLConfig, TransfoXLForCausalLM, token_losses

SETTINGS = {"learning_rate": 0.02, "decay": 0.2, "epsilon": 0.1}


def build() -> TransfoXLForCausalLM:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_embed": 16, "n_head": 2, "d_head": 8, "d_inner": 24, "n_layer": 2, "mem_len": 6}
    return TransfoXLForCausalLM(TransfoXLConfig(vocab_size=40, cutoffs=[9, 20], div_val=2, init_std=0.3, **sizes))


def losses(accelerator: Accelerator | None = None) -> torch.Tensor:
    """Of three streams that are not equally long, with statistics."""
    ids = torch.randint(40, (80,), generator=torch.Generator().manual_seed(1))
    dynamic = DynamicEvaluation(**SETTINGS, statistics=ids[:50])
    return token_losses(build(), ids, 5, batch_size=3, warm_up=2, dynamic=dynamic, accelerator=accelerator)


def save_losses(folder: Path):
    os.environ["ACCELERATE_USE_CPU"] = "true"
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    torch.save(losses(accelerator), folder / f"{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()
