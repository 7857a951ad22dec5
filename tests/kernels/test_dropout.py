"""Dropout on CPU, and behind a ReLU: as often as asked, with its derivatives, and little kept."""

import pytest
import torch
from torch import nn

from txl_hf.kernels import operators
from txl_hf.kernels.operators import draw_and_drop, scale_of


def drop(states, module):
    return operators.dropout(module, states)


def relu_and_drop(states, module):
    return operators.relu_dropout(module, states)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 1.0])
def test_as_many_are_dropped_as_asked_and_the_rest_keeps_the_mean(p, dtype):
    """Of each fate two in a row, and two that lie four apart: draws of one number, and of two."""
    states = torch.full((1111, 333), 2.0, dtype=dtype)
    torch.manual_seed(0)
    left, kept = draw_and_drop(states, p)
    assert torch.equal(left, states * scale_of(p) * kept)
    deviation = (p * (1 - p) / states.numel()) ** 0.5
    assert abs((~kept).double().mean() - p) < 2**-15 + 5 * deviation
    for distance in (1, 2, 3, 4):
        first, second = kept.flatten()[:-distance], kept.flatten()[distance:]
        assert abs((~first & ~second).double().mean() - p**2) < 2**-14 + 5 * deviation
    assert scale_of(p) == (0 if p == 1 else pytest.approx(1 / (1 - p), rel=1e-4))
    torch.manual_seed(0)
    assert torch.equal(draw_and_drop(states, p)[1], kept)
    assert not torch.equal(draw_and_drop(states, p)[1], kept) or p in (1e-6, 1.0)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")],
        ),
    ],
)
@pytest.mark.parametrize("function", [drop, relu_and_drop])
def test_dropout_has_the_derivatives_of_what_it_computes_and_keeps_little(function, device):
    """Its result and both derivatives are those of a product with what it drew, and NaN passes; what is kept is a
    tensor, of a byte an element, or the result that the next layer keeps anyway."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(40, 30, dtype=torch.float64, generator=generator)
    states[0, 0] = torch.nan
    states = states.to(device).requires_grad_()
    weights = torch.randn(40, 30, dtype=torch.float64, generator=generator).to(device).requires_grad_()

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
        ours = function(states, nn.Dropout(0.3))
    assert ours[0, 0].isnan()
    positive = states.relu() if function is relu_and_drop else states
    # What is 0 was dropped, or makes no difference.
    left = (ours != 0).double() * (scale_of(0.3) if device == "cpu" else 1 / 0.7)
    expected = positive * left
    found = []
    for result in (ours, expected):
        [grad] = torch.autograd.grad((result * weights)[1:].sum(), states, create_graph=True)
        [second] = torch.autograd.grad(grad.square().sum(), weights)
        found.append((result[1:], grad, second))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
    dropped = (ours[1:] == 0).double().mean()
    assert 0.6 < dropped < 0.7 if function is relu_and_drop else 0.25 < dropped < 0.35
    if function is relu_and_drop:
        assert [saved.data_ptr() for saved in kept] == [ours.data_ptr()]
    else:
        assert [saved.dtype for saved in kept] == [torch.bool]


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_behind_a_relu_a_graph_keeps_one_mask(p):
    """It drops as often as asked, keeps the mean, has the derivative of what it computed, and lets NaN pass."""
    torch.compiler.reset()
    torch.manual_seed(0)
    states, weights = torch.randn(300, 333), torch.randn(300, 333)
    states[0, 0] = torch.nan
    states.requires_grad_()
    dropout, kept = nn.Dropout(p), []
    compiled = torch.compile(lambda states: relu_and_drop(states, dropout), backend="aot_eager", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
        left = compiled(states)
    assert [saved.dtype for saved in kept] == [torch.bool] and left[0, 0].isnan()
    scale = (left != 0) / (1 - p)
    torch.testing.assert_close(left[1:], (states.relu() * scale)[1:])
    [gradient] = torch.autograd.grad((left * weights)[1:].sum(), states)
    torch.testing.assert_close(gradient[1:], (weights * scale)[1:])
    dropped = 1 - (left[1:] != 0).sum() / (states[1:] > 0).sum()
    assert abs(dropped - p) < 5 * (p * (1 - p) / 50_000) ** 0.5


def test_dropout_that_is_not_trained_or_somebodys_own_is_called():
    states = torch.randn(4, 3, requires_grad=True)
    for dropout in (nn.Dropout(0.5).eval(), nn.Dropout(0.0), nn.Dropout(1.0), nn.Identity()):
        assert torch.equal(relu_and_drop(states, dropout), dropout(states.relu()))
        assert torch.equal(drop(states, dropout), dropout(states))
    hooked, calls = nn.Dropout(0.5), []
    hooked.register_forward_hook(lambda *arguments: calls.append(arguments))
    relu_and_drop(states, hooked)
    drop(states, hooked)
    assert len(calls) == 2
    torch.compiler.reset()
    torch.compile(relu_and_drop, backend="eager")(states, hooked)
    assert len(calls) == 3
