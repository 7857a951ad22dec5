"""The layers of a model compiled one by one: all are alike, so that one graph serves them all, in a fraction of the
time that the whole model takes, whose graph repeats them.
"""

from contextlib import AbstractContextManager

import torch
from torch.utils._triton import has_triton

from ..modeling_transfo_xl import TransfoXLForCausalLM
from .arguments import Arguments

__all__ = ["compile_layers", "should_compile_layers", "uncompiled"]


def should_compile_layers(arguments: Arguments, dynamo_backend: str | None) -> bool:
    """What `--compile_layers` says; by default on a GPU that Triton runs on, of which the compiled kernels are, unless
    all is compiled, or dropouts are put around layers.

    Args:
        dynamo_backend: what the whole model is compiled with; "no" or None: it is not.
    """
    chosen = arguments.run.compile_layers
    if chosen is not None:
        return chosen
    whole = (dynamo_backend or "no").lower() != "no"
    usual = not whole and not any(vars(arguments.regularization).values())
    return usual and torch.cuda.is_available() and has_triton()


def compile_layers(model: TransfoXLForCausalLM, backend: str = "inductor") -> None:
    """Compile each layer of a Transformer-XL in place; parameters keep their names."""
    for layer in model.transformer.layers:
        layer.compile(backend=backend)


def uncompiled() -> AbstractContextManager:
    """Within it compiled layers run as they are written: an evaluation has lengths of its own to compile for."""
    return torch.compiler.set_stance("force_eager")
