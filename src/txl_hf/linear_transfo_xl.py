"""Matrix products on CPU by oneDNN.

PyTorch multiplies fp32 matrices on x86 with MKL. On CPUs of other makers than Intel, MKL leaves AVX-512 unused, and
oneDNN, which PyTorch also carries, is twice as fast, for one row as for a thousand.

Layers are plain `nn.Linear`, so that whoever quantises, adapts or offloads them finds what he looks for; it is their
caller who takes the faster product (`project`).
"""

import functools

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as all_modules

__all__ = ["product", "project"]

FEW_ROWS = 128


@functools.cache
def _onednn_has_avx512() -> bool:
    # The operator is what torch.compile calls for a linear layer; not every build of PyTorch has it.
    has_product = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_product and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _onednn_takes(*tensors: Tensor) -> bool:
    """Whether a product goes to oneDNN: plain fp32 tensors on a CPU with AVX-512, in eager and reverse mode.

    `torch.backends.mkldnn.flags(enabled=False)` turns it off.
    """
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and _onednn_has_avx512()
        and bool(torch.backends.mkldnn.enabled)
        and not torch.is_autocast_enabled("cpu")
        and all(map(_is_plain, tensors))
    )


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.is_cpu
        and tensor.dtype == torch.float32
        and tensor.numel() > 0
        and forward_ad.unpack_dual(tensor).tangent is None
    )


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
    if not _onednn_takes(*tensors):
        return nn.functional.linear(a, b, bias)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        # What the function returns may be changed in place, which PyTorch refuses for a view made within it.
        rows = _DifferentiableProduct.apply(a.reshape(-1, a.shape[-1]), b, bias)
        return rows if a.dim() == 2 else rows.view(*a.shape[:-1], b.shape[0])
    return _onednn_product(a, b, bias)


def project(layer: nn.Module, states: Tensor) -> Tensor:
    """`layer(states)`, by `product` where that is the same.

    A layer that has been replaced (quantised, adapted), hooked or given another forward (offloaded) is called.

    Args:
        layer: a linear layer, (…, k) → (…, n). states: (…, k).

    Returns:
        (…, n).
    """
    if type(layer) is nn.Linear and not torch.compiler.is_compiling() and not _is_wrapped(layer):
        return product(states, layer.weight, layer.bias)
    return layer(states)


def _is_wrapped(layer: nn.Linear) -> bool:
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
