"""Products by oneDNN: equal to PyTorch's own, forward and backward, wherever they stand in for them."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from txl_hf.linear_transfo_xl import Linear, _onednn_takes, product


def operands(*shape, n=7, dtype=torch.float32, bias=True):
    generator = torch.Generator().manual_seed(0)
    sizes = [shape, (n, shape[-1])] + [(n,)] * bias
    return [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("shape", [(5,), (1, 5), (2, 3, 41), (0, 5), (33, 1), (128, 41), (129, 41)], ids=str)
def test_product_is_linear(shape, bias):
    tensors = operands(*shape, bias=bias)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    actual, expected = product(*tensors), nn.functional.linear(*exact)
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)
    cotangent = torch.randn(expected.shape, dtype=torch.float64)
    of_actual = torch.autograd.grad(actual, tensors, cotangent.float())
    of_expected = torch.autograd.grad(expected, exact, cotangent)
    for a, b in zip(of_actual, of_expected, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)


def test_operands_may_lie_in_any_order():
    wide = torch.randn(6, 8, 10)
    for a, b in ((wide[:, :, 3], wide[0, :5, :8]), (wide[0].t(), wide[1, :, :8].t()), (wide[1], wide[2, ::2])):
        torch.testing.assert_close(product(a, b), a @ b.t())


@pytest.mark.parametrize("trained", [0, 1, 2], ids=["input", "weight", "bias"])
def test_only_what_is_trained_gets_a_gradient(trained):
    tensors = operands(3, 5)
    for i, tensor in enumerate(tensors):
        tensor.requires_grad_(i == trained)
    product(*tensors).sum().backward()
    assert [tensor.grad is not None for tensor in tensors] == [i == trained for i in range(3)]


def test_second_derivatives_and_function_transforms():
    a, b, bias = operands(4, 5)
    for function in (product, nn.functional.linear):
        (first,) = torch.autograd.grad(function(a, b, bias).pow(3).sum(), a, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), [a, b])
        if function is product:
            actual = second
    for x, y in zip(actual, second, strict=True):
        torch.testing.assert_close(x, y)
    per_row = torch.func.vmap(torch.func.grad(lambda row: product(row, b, bias).square().sum()))(a.detach())
    (expected,) = torch.autograd.grad(product(a, b, bias).square().sum(), a)
    torch.testing.assert_close(per_row, expected)


def test_what_onednn_is_not_asked():
    a, b, _ = operands(3, 5)
    if not _onednn_takes(a, b):
        pytest.skip("PyTorch's own products are used on this machine")
    assert not _onednn_takes(a.double(), b.double()) and not _onednn_takes(a.to("meta"), b.to("meta"))
    with torch.autocast("cpu", torch.bfloat16):
        assert product(a, b).dtype == torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False):
        assert not _onednn_takes(a, b)
        assert torch.equal(product(a, b), a @ b.t())


def test_a_layer_is_still_a_linear_layer():
    layer = Linear(5, 7)
    traced = torch.jit.trace(layer, torch.randn(2, 5))
    states = torch.randn(4, 5)
    assert isinstance(layer, nn.Linear)
    torch.testing.assert_close(traced(states), layer(states))


@pytest.mark.parametrize("moved", [0, 1, 2], ids=["input", "weight", "bias"])
@pytest.mark.parametrize("how", ["dual", "func"])
def test_forward_mode(moved, how):
    """Also without gradients of parameters, where no graph would notice that a derivative got lost."""
    tensors = [tensor.detach() for tensor in operands(3, 5)]
    tangent = torch.randn_like(tensors[moved])

    def function(tensor):
        return product(*tensors[:moved], tensor, *tensors[moved + 1 :])

    if how == "func":
        _, derivative = torch.func.jvp(function, (tensors[moved],), (tangent,))
    else:
        with forward_ad.dual_level():
            derivative = forward_ad.unpack_dual(function(forward_ad.make_dual(tensors[moved], tangent))).tangent
    # Affine in each operand, so that any step is as good as a small one.
    expected = function(tensors[moved] + tangent) - function(tensors[moved])
    torch.testing.assert_close(derivative, expected, atol=1e-5, rtol=1e-5)
