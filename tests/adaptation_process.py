"""Dynamic evaluation and a cache by several processes, each of which reads some of the streams."""

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from txl_hf import DynamicEvaluation, GradientStatistics, TransfoXLConfig, TransfoXLForCausalLM, token_losses

SETTINGS = {"learning_rate": 0.02, "decay": 0.2, "epsilon": 0.1}


def build() -> TransfoXLForCausalLM:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_embed": 16, "n_head": 2, "d_head": 8, "d_inner": 24, "n_layer": 2, "mem_len": 6}
    return TransfoXLForCausalLM(TransfoXLConfig(vocab_size=40, cutoffs=[9, 20], div_val=2, init_std=0.3, **sizes))


def losses(accelerator: Accelerator | None = None, **settings: Any) -> torch.Tensor:
    """Of three streams that are not equally long; by default with dynamic evaluation and statistics."""
    ids = torch.randint(40, (80,), generator=torch.Generator().manual_seed(1))
    settings = settings or {"dynamic": DynamicEvaluation(**SETTINGS, statistics=ids[:50])}
    return token_losses(build(), ids, 5, batch_size=3, warm_up=2, accelerator=accelerator, **settings)


def save_losses(folder: Path, **settings: Any):
    accelerator = _accelerator()
    torch.save(losses(accelerator, **settings), folder / f"{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


def statistics(accelerator: Accelerator | None = None) -> GradientStatistics:
    ids = torch.randint(40, (50,), generator=torch.Generator().manual_seed(1))
    return GradientStatistics.of(build(), ids, 5, batch_size=3, accelerator=accelerator)


def save_statistics(folder: Path):
    accelerator = _accelerator()
    torch.save(statistics(accelerator).roots, folder / f"{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


def save_divergence(folder: Path):
    """Write the error of each process where the losses of the second one alone are not finite."""
    accelerator, model = _accelerator(), build()
    # The tokens of the first stream have losses without this table.
    model.get_parameter("transformer.embed_tokens.emb_layers.2.weight").data.fill_(torch.nan)
    ids = torch.cat([torch.arange(20) % 9, 20 + torch.arange(20)])
    try:
        token_losses(model, ids, 5, batch_size=2, dynamic=DynamicEvaluation(0.5), accelerator=accelerator)
    except ValueError as error:
        (folder / f"{accelerator.process_index}.txt").write_text(str(error))
    accelerator.end_training()


def _accelerator() -> Accelerator:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    return accelerator
