"""On a GPU the host runs ahead: nothing waits for a number; the sizes of the bins are there before they are needed."""

import warnings

import pytest
import torch

from txl_hf.transfo_xl.attention_transfo_xl import relative_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
BACKENDS = ["auto", "txl_triton"]
# PyTorch's other warning, that it does not notice all, comes once a process.
SYNCHRONIZED = "called a synchronizing"


@pytest.fixture
def count_waits():
    """A function that runs another one and says how often the host waited for the GPU."""

    def count(function) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                function()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum(SYNCHRONIZED in str(warning.message) for warning in caught)

    return count


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("changes", [{}, {"div_val": 1}, {"cutoffs": [], "div_val": 1}], ids=str)
def test_a_training_step_waits_for_nothing(make_model, make_ids, count_waits, changes, backend):
    model = make_model(backend, **changes).cuda().train()
    ids = make_ids(2, 8).cuda()
    mems = model(ids).mems

    def step():
        model(ids, mems=mems, labels=ids).loss.backward()

    step()
    assert count_waits(step) == 0


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_a_decoding_step_waits_for_nothing(make_model, make_ids, count_waits, backend):
    model = make_model(backend).cuda()
    ids = make_ids(2, 8).cuda()
    cache = model(ids, use_cache=True).past_key_values

    def step():
        model(ids[:, :1], past_key_values=cache, use_cache=True, logits_top_k=1)

    step()
    assert count_waits(step) == 0


def test_the_kernels_forward_and_backward_are_captured_in_a_graph_and_replayed():
    """With dropout too: the seed is drawn on the device, so that every replay has another mask."""
    tensors = [torch.randn(2, 2, 40, 16, device="cuda", requires_grad=True) for _ in range(3)]
    rel_key = torch.randn(2, 40, 16, device="cuda", requires_grad=True)

    def step(dropout):
        output, _ = relative_attention(*tensors, rel_key, dropout=dropout, implementation="txl_triton")
        return output, *torch.autograd.grad(output.square().sum(), [*tensors, rel_key])

    for dropout in (0.0, 0.5):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            expected = step(dropout)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step(dropout)
        replays = []
        for _ in range(2):
            graph.replay()
            replays.append([tensor.clone() for tensor in captured])
        if dropout:
            assert not torch.equal(replays[0][0], replays[1][0])
        else:
            for actual, value in zip(replays[1], expected, strict=True):
                torch.testing.assert_close(actual, value, atol=1e-5, rtol=1e-5)
