"""PyTorch's attention on a GPU by the kernel that suits additive masks."""

import contextlib
import threading
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..transfo_xl.attention_transfo_xl import OPERATORS, widened

_CHOOSING_KERNEL = threading.Lock()


def attend_on_gpu(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """PyTorch's attention by its memory-efficient kernel, which takes an additive mask and heads whose width is a
    multiple of eight. Not by cuDNN's kernel, whose plan for every number of keys takes longer than the attention."""
    width = query.shape[-1]
    query, key, value = widened(-width % 8, query, key, value)
    # A lock, because `sdpa_kernel` chooses for all threads of the process; a compiled graph contains its own choice.
    choosing = contextlib.nullcontext() if torch.compiler.is_compiling() else _CHOOSING_KERNEL
    with choosing, sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return F.scaled_dot_product_attention(query, key, value, mask, **options)[..., :width]


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """PyTorch's function of this name; on a GPU `attend_on_gpu`."""
    attend = attend_on_gpu if query.is_cuda else F.scaled_dot_product_attention
    return attend(query, key, value, mask, **options)


OPERATORS.scaled_dot_product_attention = scaled_dot_product_attention
