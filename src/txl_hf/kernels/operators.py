"""The model's operators, faster: matrix products on CPU by oneDNN where MKL is slow, projections that compute no
gradient for the memory, and dropout that draws four fates out of one random number.

PyTorch multiplies fp32 matrices on x86 with MKL. On CPUs of other makers than Intel, MKL leaves AVX-512 unused, and
oneDNN, which PyTorch also carries, is faster, for one row as for a thousand: by a third on an AMD that takes two turns
for 512 bits (Zen 4), twice as fast on later ones. It takes longer to begin, so that what is small is left to MKL. On
Intel's, MKL multiplies as fast, and wants no matrix brought into another layout before. In bf16 PyTorch asks oneDNN by
itself, but for a single row not in the way that takes the least time.

Layers are plain `nn.Linear`, as quantisation, adapters and offloading expect them; `linear`, which the model calls,
takes the faster product where a layer is nothing more.

PyTorch's dropout on CPU draws each element's fate by itself, one after the other, which can be a fifth of a training
step; a third of that is left here. And behind a ReLU nothing is kept but the result, which the next layer keeps
anyway."""

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
# oneDNN takes some 10 µs to begin, and MKL one or two: where a matrix has no more numbers than the one, and a product
# fewer multiplications than the other, MKL has ended by then. A larger matrix may have to come from memory first.
SMALL_MATRIX = 1 << 16
FEW_MULTIPLICATIONS = 1 << 20
# A dropout draw has 16 bits, so that a probability is met to 2**-16.
DRAWS = 2**16


def _has_onednn() -> bool:
    # The operator is what torch.compile calls for a linear layer; not every build of PyTorch has it.
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@functools.cache
def _onednn_is_faster() -> bool:
    return _has_onednn() and torch.backends.cpu.get_cpu_capability() == "AVX512" and not is_by_intel()


@functools.cache
def is_by_intel() -> bool:
    """Whether the CPU's maker is the one that MKL asks for."""
    return "GenuineIntel" in _cpu()


@functools.cache
def _takes_two_turns() -> bool:
    """Whether the CPU is of AMD's family 25 (Zen 3 and 4), which multiplies 512 bits in two turns if at all."""
    return bool(re.search(r"AuthenticAMD\ncpu family\s*: 25\n", _cpu()))


def _cpu() -> str:
    """The operating system's description of the CPU, or of the first of several."""
    description = Path("/proc/cpuinfo")
    return description.read_text().partition("\n\n")[0] if description.exists() else platform.processor()


def bf16_is_faster() -> bool:
    """Whether this CPU multiplies matrices of bf16 in less time than those of fp32.

    With AMX it does. AVX512_BF16 alone is faster than fp32 by oneDNN, on AMD's, and slower than MKL's on Intel's.
    """
    return torch.cpu._is_amx_tile_supported() or (torch.cpu._is_avx512_bf16_supported() and not is_by_intel())


def reads_columns_sooner(row: Tensor) -> bool:
    """Whether the product of one such row, (…, 1, k), with a matrix that comes from memory, (…, k, n), takes less time
    where the n numbers of each of its rows lie side by side than where the k of each column do.

    MKL's does on Intel's CPUs in fp32, a quarter of the time for 8 matrices of 64 × 2,049; and those that lie the
    other way it multiplies as they are in half the time that it takes with their transposes.
    """
    return row.is_cpu and row.dtype == torch.float32 and is_by_intel()


def _onednn_takes(*tensors: Tensor) -> bool:
    """Whether oneDNN computes a product of these: plain fp32 tensors, not empty, on a CPU where it is faster.

    `torch.backends.mkldnn.flags(enabled=False)` turns it off.
    """
    # Under torch.compile `is_plain` is False, so that a graph never traces the checks behind it.
    if not is_plain(*tensors) or not _onednn_is_faster():
        return False
    if not torch.backends.mkldnn.enabled or torch.is_autocast_enabled("cpu"):
        return False
    return all(tensor.is_cpu and tensor.dtype == torch.float32 and tensor.numel() > 0 for tensor in tensors)


def _onednn_product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    if not (b.is_contiguous() or b.t().is_contiguous()):
        # oneDNN has fast kernels for these two layouts only.
        b = b.contiguous()
    if 1 < a.numel() // a.shape[-1] <= FEW_ROWS and b.shape[0] < b.shape[1] and b.is_contiguous():
        # oneDNN reorders its second operand at every call: better the few rows than the matrix.
        transposed = torch.ops.mkldnn._linear_pointwise.default(b, a.reshape(-1, a.shape[-1]), None, "none", [], "")
        result = transposed.t().clone(memory_format=torch.contiguous_format)
        result = result if bias is None else result.add_(bias)
        return result if a.dim() == 2 else result.view(*a.shape[:-1], b.shape[0])
    return torch.ops.mkldnn._linear_pointwise.default(a, b, bias, "none", [], "")


def _onednn_takes_row(a: Tensor, b: Tensor, bias: Tensor | None) -> bool:
    """Whether the product is of one row of plain bf16, on a CPU of Intel that has AMX for it. PyTorch's own product
    refuses shapes that do not fit."""
    tensors = (a, b) if bias is None else (a, b, bias)
    if not is_plain(*tensors) or not (_has_onednn() and is_by_intel() and torch.cpu._is_amx_tile_supported()):
        return False
    if not torch.backends.mkldnn.enabled or torch.is_autocast_enabled("cpu"):
        return False
    if not all(tensor.is_cpu and tensor.dtype == torch.bfloat16 and tensor.numel() > 0 for tensor in tensors):
        return False
    fits = b.dim() == 2 and a.shape[-1:] == b.shape[1:] and (bias is None or bias.shape == b.shape[:1])
    return fits and a.numel() == a.shape[-1]


def _onednn_row(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """a·bᵀ + bias of one row, as b·aᵀ: the matrix is read as it lies, in two thirds of the time, and is not brought
    into the layout of a second operand first."""
    row = a.reshape(1, -1)
    if bias is None:
        column = torch.ops.mkldnn._linear_pointwise.default(b, row, None, "none", [], "")
    else:
        column = torch.ops.mkldnn._linear_pointwise.binary(b, bias[:, None], row, None, "add")
    return column.view(*a.shape[:-1], b.shape[0])


class _DifferentiableProduct(torch.autograd.Function):
    """`product` by oneDNN; its gradients are products again, so that it can be differentiated any number of times."""

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
        # A view made within the function may not be changed in place later, so that the rows are viewed outside.
        rows = _DifferentiableProduct.apply(a.reshape(-1, a.shape[-1]), b, bias)
        return rows if a.dim() == 2 else rows.view(*a.shape[:-1], b.shape[0])
    return _onednn_product(a, b, bias)


def products_are_single(states: Tensor) -> bool:
    """Whether `products` of such states, (…), are faster of one pair of matrices at a time: oneDNN's operator takes no
    more, and makes up for that where MKL has half its speed."""
    return _onednn_takes(states) and not _takes_two_turns()


def products(a: Tensor, b: Tensor, room: Tensor | None = None) -> Tensor:
    """a·bᵀ for each pair of matrices, outside of autograd.

    Args:
        a: (N, r, k). b: (N, c, k).
        room: memory for the result, as many numbers or more, which oneDNN does without.

    Returns:
        (N, r, c), contiguous.
    """
    if _is_single(a, b):
        return product(a[0], b[0])[None]
    shape = len(a), a.shape[1], b.shape[1]
    return torch.bmm(a, b.transpose(1, 2), out=None if room is None else room[: math.prod(shape)].view(shape))


def add_products(total: Tensor, a: Tensor, b: Tensor):
    """Add `products(a, b)` to total, (N, r, c), in place; total may be of a wider type."""
    if _is_single(a, b) or total.dtype != a.dtype:
        total += products(a, b)
    else:
        total.baddbmm_(a, b.transpose(1, 2))


def _is_single(a: Tensor, b: Tensor) -> bool:
    return len(a) == 1 and _onednn_takes(a, b)


def rounded(states: Tensor) -> tuple[Tensor, Tensor]:
    """The states, (…), for sums and norms; and in the type that products of them are computed in, for all products.

    Both are the same where that is their own type. Under autocast each product would round them for itself, and bring
    its gradient back to their type before it is added to the others.
    """
    dtype = working_dtype(states)
    if dtype == states.dtype or not takes_part_plainly(states):
        return states, states.to(dtype)
    return _Rounded.apply(states, dtype)


class _Rounded(torch.autograd.Function):
    """See `rounded`: the gradient of what is narrower is widened while it is added, and not before."""

    @staticmethod
    def forward(ctx, states, dtype):
        ctx.set_materialize_grads(False)
        ctx.dtype = states.dtype
        return states.view_as(states), states.to(dtype)

    @staticmethod
    def backward(ctx, grad, grad_of_narrow):
        if grad is None or grad_of_narrow is None:
            only = grad_of_narrow if grad is None else grad
            return None if only is None else only.to(ctx.dtype), None
        return grad + grad_of_narrow, None


def linear(layer: nn.Module, states: Tensor) -> Tensor:
    """`layer(states)`, by `product` where that is the same.

    A layer that has been replaced (quantised, adapted), hooked or given another forward (offloaded) is called.

    Args:
        layer: a linear layer, (…, k) → (…, n). states: (…, k).

    Returns:
        (…, n).
    """
    if type(layer) is nn.Linear and not torch.compiler.is_compiling() and not is_wrapped(layer):
        return product(states, layer.weight, layer.bias)
    return layer(states)


def linear_after(memory: Tensor | None, states: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """`linear` of [memory, states] by two layers, or of the states by any number of layers: in one product, where that
    is a launch less of many.

    Where the memory needs no gradient, none is computed for its rows, also where torch.compile traces; under autocast
    both are joined in its type.

    Args:
        memory: (B, m, k) or None. states: (B, L, k). layers: two linear layers, (…, k) → (…, n).

    Returns:
        (B, m + L, n) of each layer.
    """
    are_bare = torch.is_grad_enabled() and all(
        type(layer) is nn.Linear and layer.bias is None and not is_wrapped(layer) for layer in layers
    )
    if memory is None or memory.shape[1] == 0:
        if are_bare and _multiplies_batches(states):
            # A row of decoding would read all weights once more, to join them.
            several: list[Any] = [layer.weight for layer in layers]
            if torch.compiler.is_compiling() or is_plain(states, *several):
                return list(product(states, torch.cat(several)).split([len(weight) for weight in several], dim=-1))
        return [linear(layer, states) for layer in layers]
    dtype = working_dtype(states)
    memory, states = memory.to(dtype), states.to(dtype)
    if are_bare and states.requires_grad and not memory.requires_grad:
        # With all in one type, autocast casts nothing within.
        weights: list[Any] = [
            layer.weight if layer.weight.dtype == dtype else layer.weight.to(dtype) for layer in layers
        ]
        if torch.compiler.is_compiling():
            return list(_ProjectionInAGraph.apply(memory, states, *weights))
        if is_plain(memory, states, *weights):
            return list(_ProjectionAfterMemory.apply(memory, states, *weights)[:2])
    joined = torch.cat([memory, states], dim=1)
    return [linear(layer, joined) for layer in layers]


def takes_part_plainly(states: Tensor, *others: Tensor) -> bool:
    """Whether a gradient of these states is wanted in reverse mode, and all are plain: see `is_plain`."""
    return torch.is_grad_enabled() and states.requires_grad and is_plain(states, *others)


def is_plain(*tensors: Tensor) -> bool:
    """Whether this runs eagerly, with tensors that are nothing more: no subclasses, torch.func or tangents.

    What vmap maps over does not say whether it needs a gradient, and no operator of ours has a tangent. Where nobody
    transforms or differentiates forward, no tensor is asked for that.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    transforms = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    if transforms and is_transformed(*tensors):
        return False
    return all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)


def is_transformed(*tensors: Tensor) -> bool:
    """Whether torch.func maps over one of them or differentiates it, or it has a tangent."""
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if transformed and any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
        return True
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


class _ProjectionAfterMemory(torch.autograd.Function):
    """Two projections of memory and segment, of which the memory gets no gradient.

    The joined states are a result too, so that a second derivative finds where they came from.
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
    """The same for torch.compile, which differentiates once and drops what nobody wants.

    Were memory and segment projected apart, keys and values would be joined, and their gradients parted, in copies.
    """

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
    """total + (B, L, n) · (n, k), of rows that lie apart in memory."""
    if not _multiplies_batches(rows):
        share = product(rows.reshape(-1, rows.shape[-1]), matrix.t()).view(*rows.shape[:2], -1)
        return share if total is None else total + share
    matrix = matrix.expand(len(rows), -1, -1)
    return torch.bmm(rows, matrix) if total is None else torch.baddbmm(total, rows, matrix)


def _multiplies_batches(rows: Tensor) -> bool:
    """Whether rows that lie apart are multiplied there: on a GPU, where bringing them together takes longer."""
    return not rows.is_cpu


def is_wrapped(layer: nn.Module) -> bool:
    """Whether anybody but us has to do with a layer: it is hooked, or has been given another forward."""
    return bool(
        "forward" in vars(layer)
        or layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or all_modules._global_forward_hooks
        or all_modules._global_forward_pre_hooks
        or all_modules._global_backward_hooks
        or all_modules._global_backward_pre_hooks
    )


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, (…, L, n) of (…, L, k) and (…, k, n).

    One row reads all of b for little arithmetic. In a graph it is written so that a compiler makes one kernel of it
    and all that follows. On a CPU keys are read row after row, each for one number, which takes a fifth less time
    than as columns, in bf16 half of it; but see `reads_columns_sooner`.
    """
    if a.shape[-2] > 1:
        return a @ b
    if torch.compiler.is_compiling():
        wide = torch.promote_types(a.dtype, torch.float32)
        return (a.transpose(-1, -2).to(wide) * b.to(wide)).sum(dim=-2, keepdim=True).to(a.dtype)
    by_rows = a.is_cpu and b.stride(-2) == 1 and not reads_columns_sooner(a)
    return (b.transpose(-1, -2) @ a.transpose(-1, -2)).transpose(-1, -2) if by_rows else a @ b


def keep_layout(rel_key: Tensor) -> Tensor:
    """(H, n, Dh), laid out as one query reads it in the least time."""
    if torch.compiler.is_compiling() or not reads_columns_sooner(rel_key):
        return rel_key.contiguous()
    return rel_key.transpose(1, 2).contiguous().transpose(1, 2)


def dropout(module: nn.Module, states: Tensor) -> Tensor:
    """`module(states)`, for states (…) of any shape. It draws from PyTorch's generator, but not as PyTorch does."""
    if module.training and states.is_cpu and _drops(module) and is_plain(states):
        return _Drop.apply(states, module.p)
    return module(states)


def relu_dropout(module: nn.Module, states: Tensor) -> Tensor:
    """`module(states.relu())`, for states (…) of any shape.

    Where it is trained, PyTorch would keep the result of the ReLU and what was dropped, and read both backward. But
    the result is 0 exactly where either of them has made it so, and there the gradient is 0.
    """
    # Without a gradient too: a checkpoint draws first without one, and then the same with one.
    if module.training and _drops(module) and is_plain(states):
        return _ReluAndDrop.apply(states, module.p)
    if module.training and torch.compiler.is_compiling() and _drops(module):
        # One mask for the backward pass of a graph, not one of each; NaN is not below 0.
        kept = (torch.rand(states.shape, device=states.device) >= module.p) & ~(states <= 0)
        return torch.where(kept, states / (1 - module.p), 0)
    return dropout(module, states.relu())


def _drops(module: nn.Module) -> TypeGuard[nn.Dropout]:
    """Whether it is PyTorch's own dropout, without hooks, and drops some numbers and not all."""
    return type(module) is nn.Dropout and 0 < module.p < 1 and not is_wrapped(module)


def draw_and_drop(states: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Dropout with probability p in (0, 1] on CPU, without a gradient.

    Returns:
        What is left, (…), and where it is: (…) bool. The one is states times the other times `scale_of(p)`.
    """
    count = states.numel()
    numbers = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    kept = numbers.view(torch.int16)[:count].view(states.shape) > _dropped_draws(p) - DRAWS // 2 - 1
    return (states * scale_of(p)).mul_(kept), kept


def scale_of(p: float) -> float:
    """By what `draw_and_drop` multiplies what it keeps, so that the mean stays."""
    return DRAWS / (DRAWS - _dropped_draws(p)) if p < 1 else 0.0


def _dropped_draws(p: float) -> int:
    """How many of the DRAWS that are possible drop an element: some, and not all but where p = 1."""
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


for name in ("linear", "linear_after", "product", "matmul", "keep_layout", "dropout", "relu_dropout", "rounded"):
    setattr(OPERATORS, name, globals()[name])
