"""Whether the layers of a training are compiled, and its steps launched as CUDA graphs."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.utils._triton import has_triton

from ..kernels.attention_triton import why_triton_cannot_begin
from ..kernels.captured import MOST_TOKENS, RECORDERS, why_not_kernels_alone
from .arguments import TransfoXLTrainingArguments


def should_compile_layers(arguments: TransfoXLTrainingArguments, device: torch.device, model: Any) -> bool:
    """`compile_layers` if it is set. None: True on a GPU on which Triton runs, because the compiled kernels are
    Triton's, unless the whole model is compiled, or a module of the model has been hooked or replaced by others.
    """
    if arguments.compile_layers is not None:
        return arguments.compile_layers
    usual = device.type == "cuda" and not arguments.torch_compile
    usual = usual and why_not_kernels_alone(getattr(model, "transformer", model)) is None
    return usual and has_triton() and why_triton_cannot_begin() is None


def should_capture_steps(
    arguments: TransfoXLTrainingArguments,
    accelerator: Accelerator,
    model: nn.Module,
    document_end: Any | None,
    tokens: int,
) -> bool:
    """`cuda_graphs` if it is set. None: whether steps can be captured and Python is slower than the GPU.

    Args:
        model: behind its wrappers. document_end: token that ends a document of the text; None: it is one.
        tokens: number of tokens that a step, or a micro-batch of it, reads.

    Raises:
        ValueError: `cuda_graphs` is True and steps cannot be captured; the message says why.
    """
    if arguments.cuda_graphs is False:
        return False
    reason = _why_not(arguments, accelerator, model, document_end)
    if arguments.cuda_graphs and reason:
        raise ValueError(f"--cuda_graphs: {reason}")
    return arguments.cuda_graphs or (reason is None and tokens <= MOST_TOKENS)


def _why_not(
    arguments: TransfoXLTrainingArguments, accelerator: Accelerator, model: Any, document_end: Any | None
) -> str | None:
    if accelerator.device.type not in RECORDERS:
        return f"there are no graphs on {accelerator.device.type}"
    if accelerator.distributed_type is not DistributedType.NO:
        return f"under {accelerator.distributed_type.value} gradients are exchanged while they are computed"
    if arguments.torch_compile:
        return "the whole model is compiled, with graphs if its backend makes some"
    if document_end is not None:
        return "the host has to know at each step whether a document ends in it (--document_end none)"
    if arguments.gradient_checkpointing:
        return "the host has to know what a layer draws that is computed twice (--gradient_checkpointing)"
    if arguments.backprop_segments > 1:
        return "gradients go through the memory of several segments (--backprop_segments)"
    return why_not_kernels_alone(getattr(model, "transformer", model))
