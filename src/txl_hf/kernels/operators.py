"""Faster operators of the model: products on CPU by oneDNN, projections without a gradient for the memory, dropout.

PyTorch multiplies fp32 matrices on x86 with MKL, which uses AVX-512 on Intel's CPUs alone. On others oneDNN, which
PyTorch contains too, is faster, for one row as for a thousand: by a third on an AMD that splits operations of 512 bits
in two (Zen 4), twice as fast on later ones. In bf16 PyTorch uses oneDNN itself; a single row has a faster form here.

PyTorch's dropout on CPU draws a random number for each element, which can take a fifth of a training step; drawing one
for four elements takes a third of that.
"""

import functools
import math
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.modules import module as all_modules

from ..transfo_xl.attention_transfo_xl import OPERATORS, working_dtype

FEW_ROWS = 128
# Up to so many numbers in a matrix, and below so many multiplications, MKL is used: it ends before oneDNN, which takes
# 10 µs, has started. A larger matrix may have to be read from memory first.
SMALL_MATRIX = 1 << 16
FEW_MULTIPLICATIONS = 1 << 20
# Values of a dropout draw, which has 16 bits: a probability is exact to 2**-16.
DRAWS = 2**16


def _has_onednn() -> bool:
    # torch.compile's operator for a linear layer, which some builds of PyTorch lack.
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@functools.cache
def _onednn_is_faster() -> bool:
    return _has_onednn() and torch.backends.cpu.get_cpu_capability() == "AVX512" and not is_by_intel()


@functools.cache
def is_by_intel() -> bool:
    """Whether the CPU is made by Intel, which MKL checks too."""
    return "GenuineIntel" in _cpu()


@functools.cache
def _takes_two_turns() -> bool:
    """Whether the CPU is of AMD's family 25: Zen 3, without AVX-512, or Zen 4, which splits 512 bits in two."""
    return bool(re.search(r"AuthenticAMD\ncpu family\s*: 25\n", _cpu()))


def _cpu() -> str:
    """The operating system's description of the CPU, or of the first of several."""
    description = Path("/proc/cpuinfo")
    return description.read_text().partition("\n\n")[0] if description.exists() else platform.processor()


def bf16_is_faster() -> bool:
    """Whether this CPU multiplies matrices of bf16 in less time than those of fp32.

    True with AMX. AVX512_BF16 alone is faster than oneDNN's fp32 on AMD's CPUs, slower than MKL's on Intel's.
    """
    return torch.cpu._is_amx_tile_supported() or (torch.cpu._is_avx512_bf16_supported() and not is_by_intel())


def reads_columns_sooner(row: Tensor) -> bool:
    """Whether a row, (…, 1, k), times a matrix, (…, k, n), takes less time where the matrix is row-major.

    True for MKL on Intel's CPUs in fp32: a quarter of the time for 8 matrices of 64 × 2,049. With a column-major
    matrix, a @ b takes half the time of bᵀ @ aᵀ there.
    """
    return row.is_cpu and row.dtype == torch.float32 and is_by_intel()


def _onednn_takes(*tensors: Tensor) -> bool:
    """Whether oneDNN computes a product of these fp32 tensors."""
    # `is_plain` first, because under torch.compile it is False, so that a graph never traces the other checks.
    return is_plain(*tensors) and _onednn_is_faster() and _may_take(torch.float32, *tensors)


def _may_take(dtype: torch.dtype, *tensors: Tensor) -> bool:
    """Whether oneDNN, which `torch.backends.mkldnn.flags` may turn off, computes with tensors of this dtype."""
    if not torch.backends.mkldnn.enabled or torch.is_autocast_enabled("cpu"):
        return False
    return all(tensor.is_cpu and tensor.dtype == dtype and tensor.numel() > 0 for tensor in tensors)


def _onednn_product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    if not (b.is_contiguous() or b.t().is_contiguous()):
        # oneDNN has fast kernels for these two layouts only.
        b = b.contiguous()
    if 1 < a.numel() // a.shape[-1] <= FEW_ROWS and b.shape[0] < b.shape[1] and b.is_contiguous():
        # The few rows come second, because oneDNN reorders its second operand at every call.
        transposed = torch.ops.mkldnn._linear_pointwise.default(b, a.reshape(-1, a.shape[-1]), None, "none", [], "")
        result = transposed.t().clone(memory_format=torch.contiguous_format)
        result = result if bias is None else result.add_(bias)
        return result if a.dim() == 2 else result.view(*a.shape[:-1], b.shape[0])
    return torch.ops.mkldnn._linear_pointwise.default(a, b, bias, "none", [], "")


def _onednn_takes_row(a: Tensor, b: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN computes a product of one row of plain bf16: on Intel's CPUs with AMX. False for shapes that do
    not fit, because PyTorch's own product raises the error."""
    tensors = (a, b) if bias is None else (a, b, bias)
    if not is_plain(*tensors) or not (_has_onednn() and is_by_intel() and torch.cpu._is_amx_tile_supported()):
        return False
    if not _may_take(torch.bfloat16, *tensors):
        return False
    fits = b.dim() == 2 and a.shape[-1:] == b.shape[1:] and (bias is None or bias.shape == b.shape[:1])
    return fits and a.numel() == a.shape[-1]


def _onednn_row(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """a·bᵀ + bias of one row, as b·aᵀ: two thirds of the time, because oneDNN reorders the second operand alone."""
    row = a.reshape(1, -1)
    if bias is None:
        column = torch.ops.mkldnn._linear_pointwise.default(b, row, None, "none", [], "")
    else:
        column = torch.ops.mkldnn._linear_pointwise.binary(b, bias[:, None], row, None, "add")
    return column.view(*a.shape[:-1], b.shape[0])


class _DifferentiableProduct(torch.autograd.Function):
    """`product` by oneDNN, differentiable any number of times."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a, b, bias):
        # a: (rows, k).
        return _onednn_product(a, b, bias)

    @staticmethod
    def setup_context(ctx, inputs, output):
        a, b, _ = inputs
        ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        of_a, of_b, of_bias = ctx.needs_input_grad
        return (
            product(grad, b.t()) if of_a else None,
            product(grad.t(), a.t()) if of_b else None,
            grad.sum(0) if of_bias else None,
        )


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a·bᵀ + bias.

    Args:
        a: (…, k). b: (n, k). bias: (n,) or None.

    Returns:
        (…, n).
    """
    tensors = (a, b) if bias is None else (a, b, bias)
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if a.dtype == torch.bfloat16 and not differentiated and _onednn_takes_row(a, b, bias):
        return _onednn_row(a, b, bias)
    is_small = b.numel() <= SMALL_MATRIX and a.numel() * b.shape[0] < FEW_MULTIPLICATIONS
    if is_small or not _onednn_takes(*tensors):
        return nn.functional.linear(a, b, bias)
    if differentiated:
        # Rows are viewed outside the function, because a view made within may not be changed in place later.
        rows = _DifferentiableProduct.apply(a.reshape(-1, a.shape[-1]), b, bias)
        return rows if a.dim() == 2 else rows.view(*a.shape[:-1], b.shape[0])
    return _onednn_product(a, b, bias)


def products_are_single(states: Tensor) -> bool:
    """Whether `products` of such states, (…), are faster one pair of matrices at a time: by oneDNN, whose operator
    takes one pair, where it has twice MKL's speed."""
    return _onednn_takes(states) and not _takes_two_turns()


def products(a: Tensor, b: Tensor, room: Tensor | None = None) -> Tensor:
    """a·bᵀ for each pair of matrices, outside of autograd.

    Args:
        a: (N, r, k). b: (N, c, k).
        room: memory for the result, of as many numbers or more; oneDNN does not use it.

    Returns:
        (N, r, c), contiguous.
    """
    if _is_single(a, b):
        return product(a[0], b[0])[None]
    shape = len(a), a.shape[1], b.shape[1]
    return torch.bmm(a, b.transpose(1, 2), out=None if room is None else room[: math.prod(shape)].view(shape))


def add_products(total: Tensor, a: Tensor, b: Tensor):
    """Add `products(a, b)` to total, (N, r, c), in place; total may have a wider dtype."""
    if _is_single(a, b) or total.dtype != a.dtype:
        total += products(a, b)
    else:
        total.baddbmm_(a, b.transpose(1, 2))


def _is_single(a: Tensor, b: Tensor) -> bool:
    return len(a) == 1 and _onednn_takes(a, b)


def linear(layer: nn.Module, states: Tensor) -> Tensor:
    """`layer(states)`, by `product` unless the layer is replaced (quantised, adapted), hooked or offloaded.

    Args:
        layer: a linear layer, (…, k) → (…, n). states: (…, k).

    Returns:
        (…, n).
    """
    if type(layer) is nn.Linear and not torch.compiler.is_compiling() and not is_wrapped(layer):
        return product(states, layer.weight, layer.bias)
    return layer(states)


def linear_after(memory: Tensor | None, states: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """`linear` of [memory, states] by two layers, or of the states by any number of layers, which on a GPU is one
    product, because that saves launches. No gradient is computed for the rows of a memory that needs none.

    Args:
        memory: (B, m, k) or None. states: (B, L, k). layers: two linear layers, (…, k) → (…, n).

    Returns:
        (B, m + L, n) of each layer.
    """
    are_bare = torch.is_grad_enabled() and all(
        type(layer) is nn.Linear and layer.bias is None and not is_wrapped(layer) for layer in layers
    )
    if memory is None or memory.shape[1] == 0:
        return _linear_of_several(states, layers, are_bare)
    dtype = working_dtype(states)
    memory, states = memory.to(dtype), states.to(dtype)
    if are_bare and states.requires_grad and not memory.requires_grad:
        # One dtype for all, so that autocast casts nothing within the function.
        weights: list[Any] = [
            layer.weight if layer.weight.dtype == dtype else layer.weight.to(dtype) for layer in layers
        ]
        if torch.compiler.is_compiling():
            return list(_ProjectionInAGraph.apply(memory, states, *weights))
        if is_plain(memory, states, *weights):
            return list(_ProjectionAfterMemory.apply(memory, states, *weights)[:2])
    joined = torch.cat([memory, states], dim=1)
    return [linear(layer, joined) for layer in layers]


def _linear_of_several(states: Tensor, layers: Sequence[nn.Module], are_bare: bool) -> list[Tensor]:
    if are_bare and _multiplies_batches(states):
        # Only with gradients, because joining reads all weights again, which a row of decoding cannot make up for.
        weights: list[Any] = [layer.weight for layer in layers]
        if torch.compiler.is_compiling() or is_plain(states, *weights):
            return list(product(states, torch.cat(weights)).split([len(weight) for weight in weights], dim=-1))
    return [linear(layer, states) for layer in layers]


def is_plain(*tensors: Tensor) -> bool:
    """Whether the call is eager and the tensors are plain: no subclasses, no transforms of torch.func, no tangents.

    A tensor under vmap does not show whether it needs a gradient, and the package's operators have no forward mode.
    Tensors are checked only while a transform or forward mode is active.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    transforms = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    if transforms and is_transformed(*tensors):
        return False
    return all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)


def is_transformed(*tensors: Tensor) -> bool:
    """Whether torch.func maps over or differentiates one of the tensors, or one has a tangent."""
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if transformed and any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
        return True
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


class _ProjectionAfterMemory(torch.autograd.Function):
    """Two projections of memory and segment, without a gradient for the memory.

    The joined states are a result too, so that a second derivative reaches the segment through them.
    """

    @staticmethod
    def forward(ctx, memory, segment, first, second):
        joined = torch.cat([memory, segment], dim=1)
        ctx.save_for_backward(joined, first, second)
        ctx.set_materialize_grads(False)
        ctx.segment_length = segment.shape[1]
        return product(joined, first), product(joined, second), joined

    @staticmethod
    def backward(ctx, *gradients):
        joined, *weights = ctx.saved_tensors
        *of_results, of_joined = gradients
        of_segment = None if of_joined is None else of_joined[:, -ctx.segment_length :]
        of_weights: list[Tensor | None] = []
        for grad, weight, needed in zip(of_results, weights, ctx.needs_input_grad[2:], strict=True):
            if grad is not None:
                of_segment = _add_product(of_segment, grad[:, -ctx.segment_length :], weight)
            wanted = needed and grad is not None
            of_weights.append(product(grad.flatten(0, 1).t(), joined.flatten(0, 1).t()) if wanted else None)
        return None, of_segment, *of_weights


class _ProjectionInAGraph(torch.autograd.Function):
    """`_ProjectionAfterMemory` for torch.compile, which differentiates once. Joined before the projections, because a
    join of keys and values after them copies, as does splitting their gradients."""

    @staticmethod
    def forward(ctx, memory, segment, first, second):
        joined = torch.cat([memory, segment], dim=1)
        ctx.save_for_backward(joined, first, second)
        ctx.segment_length = segment.shape[1]
        return joined @ first.t(), joined @ second.t()

    @staticmethod
    def backward(ctx, of_keys, of_values):
        joined, first, second = ctx.saved_tensors
        of_segment = _add_product(None, of_keys[:, -ctx.segment_length :], first)
        of_segment = _add_product(of_segment, of_values[:, -ctx.segment_length :], second)
        rows = joined.flatten(0, 1)
        return None, of_segment, of_keys.flatten(0, 1).t() @ rows, of_values.flatten(0, 1).t() @ rows


def _add_product(total: Tensor | None, rows: Tensor, matrix: Tensor) -> Tensor:
    """total + (B, L, n) · (n, k), where the rows of the batch are not contiguous."""
    if not _multiplies_batches(rows):
        share = product(rows.reshape(-1, rows.shape[-1]), matrix.t()).view(*rows.shape[:2], -1)
        return share if total is None else total + share
    matrix = matrix.expand(len(rows), -1, -1)
    return torch.bmm(rows, matrix) if total is None else torch.baddbmm(total, rows, matrix)


def _multiplies_batches(rows: Tensor) -> bool:
    """Whether strided rows are multiplied as a batch: on a GPU, where a contiguous copy takes longer."""
    return not rows.is_cpu


def is_wrapped(layer: nn.Module) -> bool:
    """Whether other code changes a layer: the layer has hooks, or a forward of its own."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return bool("forward" in vars(layer) or hooks or all_modules._has_any_global_hook())


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, (…, L, n) of (…, L, k) and (…, k, n).

    One row is a sum in a graph, so that the compiler fuses it with what follows. On a CPU a column-major b (keys) is
    multiplied as bᵀ @ aᵀ, which takes a fifth less time, in bf16 half of it, unless `reads_columns_sooner`.
    """
    if a.shape[-2] > 1:
        return a @ b
    if torch.compiler.is_compiling():
        wide = torch.promote_types(a.dtype, torch.float32)
        return (a.transpose(-1, -2).to(wide) * b.to(wide)).sum(dim=-2, keepdim=True).to(a.dtype)
    by_rows = a.is_cpu and b.stride(-2) == 1 and not reads_columns_sooner(a)
    return (b.transpose(-1, -2) @ a.transpose(-1, -2)).transpose(-1, -2) if by_rows else a @ b


def keep_layout(rel_key: Tensor) -> Tensor:
    """(H, n, Dh), in the layout that a product with one query reads fastest."""
    if torch.compiler.is_compiling() or not reads_columns_sooner(rel_key):
        return rel_key.contiguous()
    return rel_key.transpose(1, 2).contiguous().transpose(1, 2)


def dropout(module: nn.Module, states: Tensor) -> Tensor:
    """`module(states)`, for states (…) of any shape. It draws other numbers than PyTorch, from the same generator."""
    if module.training and states.is_cpu and _drops(module) and is_plain(states):
        return _Drop.apply(states, module.p)
    return module(states)


def relu_dropout(module: nn.Module, states: Tensor) -> Tensor:
    """`module(states.relu())`, for states (…) of any shape. Training saves the result alone, because it is 0 exactly
    where the gradient is 0; PyTorch would save the result of the ReLU and the dropout mask."""
    # Without a gradient too, because checkpointing runs forward first without one, and must draw the same.
    if module.training and _drops(module) and is_plain(states):
        return _ReluAndDrop.apply(states, module.p)
    if module.training and torch.compiler.is_compiling() and _drops(module):
        # One mask of ReLU and dropout for the backward pass of a graph; `~(states <= 0)` keeps NaN.
        kept = (torch.rand(states.shape, device=states.device) >= module.p) & ~(states <= 0)
        return torch.where(kept, states / (1 - module.p), 0)
    return dropout(module, states.relu())


def _drops(module: nn.Module) -> TypeGuard[nn.Dropout]:
    """Whether the module is PyTorch's own dropout, without hooks, with 0 < p < 1."""
    return type(module) is nn.Dropout and 0 < module.p < 1 and not is_wrapped(module)


def draw_and_drop(states: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Dropout with probability p in (0, 1] on CPU, without a gradient.

    Returns:
        The result, states · kept · `scale_of(p)`, (…), and kept, (…) bool.
    """
    count = states.numel()
    numbers = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    kept = numbers.view(torch.int16)[:count].view(states.shape) > _dropped_draws(p) - DRAWS // 2 - 1
    return (states * scale_of(p)).mul_(kept), kept


def scale_of(p: float) -> float:
    """The factor of the entries that `draw_and_drop` keeps, which preserves the mean."""
    return DRAWS / (DRAWS - _dropped_draws(p)) if p < 1 else 0.0


def _dropped_draws(p: float) -> int:
    """How many of the DRAWS values drop an element: at least one, and all only where p = 1."""
    return min(max(round(p * DRAWS), 1), DRAWS - 1) if p < 1 else DRAWS


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, p):
        result, kept = draw_and_drop(states, p)
        ctx.save_for_backward(kept)
        ctx.scale = scale_of(p)
        return result

    @staticmethod
    def backward(ctx, grad):
        (kept,) = ctx.saved_tensors
        return (grad * ctx.scale).mul_(kept), None


class _ReluAndDrop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, p):
        if states.is_cpu:
            result, ctx.scale = draw_and_drop(states.relu(), p)[0], scale_of(p)
        else:
            result, ctx.scale = F.dropout(states.relu(), p, training=True), 1 / (1 - p)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, grad):
        (result,) = ctx.saved_tensors
        return torch.ops.aten.native_dropout_backward(grad, result != 0, ctx.scale), None


for name in ("linear", "linear_after", "product", "matmul", "keep_layout", "dropout", "relu_dropout"):
    setattr(OPERATORS, name, globals()[name])
