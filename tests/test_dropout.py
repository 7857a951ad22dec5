"""Dropout behind a ReLU: what PyTorch draws and derives, with less kept."""

import pytest
import torch
from torch import nn

from txl_hf.dropout_transfo_xl import relu_and_drop


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
def test_dropout_behind_a_relu_keeps_its_result_alone(device):
    """It draws what PyTorch draws, has PyTorch's first and second derivatives, and lets NaN through."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(40, 30, dtype=torch.float64, generator=generator)
    states[0, 0] = torch.nan
    states = states.to(device).requires_grad_()
    weights = torch.randn(40, 30, dtype=torch.float64, generator=generator).to(device).requires_grad_()
    dropout = nn.Dropout(0.3)

    def found(function):
        torch.manual_seed(0)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
            result = function()
        [grad] = torch.autograd.grad(result, states, weights, create_graph=True)
        [second] = torch.autograd.grad(grad.square().sum(), weights)
        return (result, grad, second), [saved.data_ptr() for saved in kept]

    ours, kept = found(lambda: relu_and_drop(states, dropout))
    expected, all_kept = found(lambda: dropout(states.relu()))
    assert ours[0][0, 0].isnan()
    for one, other in zip(ours, expected, strict=True):
        # A gradient of NaN is nobody's.
        torch.testing.assert_close(one[1:], other[1:], rtol=1e-12, atol=0)
    assert torch.equal(ours[0][1:], expected[0][1:])
    assert 0.6 < (ours[0][1:] == 0).double().mean() < 0.7, "half by the ReLU, three tenths of the rest"
    assert kept == [ours[0].data_ptr()] and len(all_kept) > 1


def test_dropout_that_is_not_trained_or_somebodys_own_is_called():
    states = torch.randn(4, 3, requires_grad=True)
    for dropout in (nn.Dropout(0.5).eval(), nn.Dropout(0.0), nn.Dropout(1.0), nn.Identity()):
        assert torch.equal(relu_and_drop(states, dropout), dropout(states.relu()))
    hooked, calls = nn.Dropout(0.5), []
    hooked.register_forward_hook(lambda *arguments: calls.append(arguments))
    relu_and_drop(states, hooked)
    assert len(calls) == 1
