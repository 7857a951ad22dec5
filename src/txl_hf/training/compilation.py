"""The layers of a model compiled one by one: all are alike, so that one graph serves them all, in a fraction of the
time that the whole model takes, whose graph repeats them.
"""

from contextlib import AbstractContextManager

import torch
from accelerate import Accelerator
from torch.utils._triton import has_triton

from ..kernels.attention_triton import why_triton_cannot_begin
from ..transfo_xl.modeling_transfo_xl import TransfoXLForCausalLM
from .arguments import Arguments

__all__ = ["compile_layers", "is_compiled", "should_compile_layers", "uncompiled"]


def is_compiled(accelerator: Accelerator) -> bool:
    """Whether accelerate compiles the whole model, as `--dynamo_backend` or `accelerate launch` says."""
    return accelerator.state.dynamo_plugin.backend.value.lower() != "no"


def should_compile_layers(arguments: Arguments, whole: bool) -> bool:
    """What `--compile_layers` says; by default on a GPU that Triton runs on, of which the compiled kernels are, unless
    all is compiled (`whole`), or dropouts are put around layers.
    """
    chosen = arguments.run.compile_layers
    if chosen is not None:
        return chosen
    usual = not whole and not any(vars(arguments.regularization).values())
    return usual and torch.cuda.is_available() and has_triton() and why_triton_cannot_begin() is None


def compile_layers(model: TransfoXLForCausalLM, backend: str = "inductor") -> None:
    """Compile each layer of a Transformer-XL in place; parameters keep their names."""
    for layer in model.transformer.layers:
        layer.compile(backend=backend)


def uncompiled() -> AbstractContextManager:
    """Within it compiled layers run as they are written: an evaluation has lengths of its own to compile for."""
    return torch.compiler.set_stance("force_eager")
