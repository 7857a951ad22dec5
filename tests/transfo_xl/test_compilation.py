"""Layers compiled one by one: one graph for all of them, with the losses and gradients of none."""

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.testing import CompileCounterWithBackend

from txl_hf.kernels.steps import compile_layers, uncompiled
from txl_hf.training import steps
from txl_hf.training.arguments import TransfoXLTrainingArguments
from txl_hf.training.regularization import RegularizationArguments, regularize
from txl_hf.training.steps import should_compile_layers


@pytest.mark.parametrize("backend", ["eager", pytest.param("sdpa", marks=pytest.mark.slow)])
def test_one_graph_serves_all_layers_in_training_and_evaluation_runs_without(make_model, make_ids, backend):
    torch.compiler.reset()
    plain, compiled = (make_model(backend, n_layer=3).train() for _ in range(2))
    graphs = CompileCounterWithBackend("aot_eager")
    compile_layers(compiled, graphs)
    assert plain.state_dict().keys() == compiled.state_dict().keys()
    memories: list[dict] = [{}, {}]
    for step in range(3):
        ids = make_ids(2, 7, seed=step)
        outputs = [
            model(ids, shift_labels=ids, **memory) for model, memory in zip((plain, compiled), memories, strict=True)
        ]
        torch.testing.assert_close(outputs[1].losses, outputs[0].losses, atol=1e-5, rtol=1e-5)
        memories = [{"mems": output.mems} for output in outputs]
        for model, output in zip((plain, compiled), outputs, strict=True):
            model.zero_grad()
            output.loss.backward()
        for (name, one), (_, other) in zip(plain.named_parameters(), compiled.named_parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad, atol=1e-5, rtol=1e-4, msg=name)
        # Without a memory, with some of it, with all of it.
        assert graphs.frame_count <= step + 1
    with uncompiled(), torch.no_grad():
        compiled.eval()(make_ids(1, 5))
    assert graphs.frame_count <= 3


@torch.no_grad()
@pytest.mark.parametrize("initial_memory", [pytest.param("empty", marks=pytest.mark.slow), "zeros"])
def test_segments_of_several_lengths_go_on_from_a_memory_under_a_mask(make_model, make_ids, initial_memory):
    """A second length has numbers in the graph's place of lengths."""
    torch.compiler.reset()
    model = make_model(n_layer=1, mem_len=5, initial_memory=initial_memory)
    compiled, memory = torch.compile(model, backend="eager"), {}
    for length in (4, 6, 5, 3):
        ids, mask = make_ids(2, length, seed=length), torch.ones(2, length, dtype=torch.long)
        mask[0, 0] = 0
        expected, found = (each(ids, attention_mask=mask, **memory) for each in (model, compiled))
        torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-5)
        memory = {"mems": expected.mems, "mems_mask": expected.mems_mask}


def test_the_compiled_backward_pass_multiplies_no_gradient_of_the_memory(make_model, make_ids):
    """Two rows of 24 tokens after 24 of memory: keys and values have 96 rows, of which 48 take a gradient further."""
    torch.compiler.reset()
    shapes = []

    def record(graph, inputs):
        products = [node for node in graph.graph.nodes if node.target is torch.ops.aten.mm.default]
        shapes.append([tuple(node.meta["val"].shape) for node in products])
        return boxed_nop(graph, inputs)

    model = make_model("eager", n_layer=1, mem_len=24).train()
    ids = make_ids(2, 48)
    mems = model(ids[:, :24]).mems
    compile_layers(model, aot_autograd(fw_compiler=boxed_nop, bw_compiler=record))
    model(ids[:, 24:], mems=mems, labels=ids[:, 24:]).loss.backward()
    (products,) = shapes
    of_inputs = [shape for shape in products if shape[1] == model.config.d_model and shape[0] > model.config.d_inner]
    # Of queries, keys, values, the output and the first feed-forward layer.
    assert of_inputs == 5 * [(48, 16)]


def test_layers_are_compiled_on_a_gpu_unless_something_else_is(tmp_path, monkeypatch, make_model):
    model = make_model("auto")

    def chosen(told=None, whole=False, device="cuda"):
        arguments = TransfoXLTrainingArguments(str(tmp_path), use_cpu=True, compile_layers=told, torch_compile=whole)
        return should_compile_layers(arguments, torch.device(device), model)

    monkeypatch.setattr(steps, "has_triton", lambda: False)
    assert not chosen() and chosen(True)
    monkeypatch.setattr(steps, "has_triton", lambda: True)
    monkeypatch.setattr(steps, "why_triton_cannot_begin", lambda: "Triton cannot begin: there is no gcc")
    assert not chosen() and chosen(True)
    monkeypatch.setattr(steps, "why_triton_cannot_begin", lambda: None)
    assert chosen()
    assert not chosen(False)
    assert not chosen(device="cpu") and chosen(True, device="cpu")
    assert not chosen(whole=True)
    # Masks of locked dropouts are drawn outside of layers.
    regularize(model, RegularizationArguments(0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2))
    assert chosen()
    model.transformer.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert not chosen() and chosen(True)
