"""Steps of the same shapes are launched together: losses, gradients and memory are those of steps launched one by one.

On a CPU a recorder of the tests takes the place of CUDA's.
"""

import logging
import math
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType

from host_reads import count_host_reads
from recorder import Recorder, let_the_host_wait
from txl_hf import token_losses
from txl_hf.kernels import captured, steps
from txl_hf.kernels.softmax import fixed_capacities
from txl_hf.kernels.steps import STEPS_BEFORE, CapturedSteps, Forward, compile_layers
from txl_hf.memories import latest_states
from txl_hf.training.regularization import RegularizationArguments, regularize
from txl_hf.training.steps import should_capture_steps
from txl_hf.transfo_xl import adaptive_transfo_xl

PLAIN = {"cutoffs": [], "div_val": 1}
DROPOUTS = RegularizationArguments(
    word_dropout=0.2, input_dropout=0.3, attention_dropout=0.2, mlp_dropout=0.2, output_dropout=0.3, ar=0.2, tar=0.1
)


def no_context():
    return torch.autocast("cpu", enabled=False)


def train(forward, model, texts, mem_len, chunks=1):
    """The losses, penalties, gradients and memories of steps over several texts, of the chunks in turn."""
    found, memories = [], [{} for _ in range(chunks)]
    for number, ids in enumerate(texts):
        inputs, chunk = {"input_ids": ids, "shift_labels": ids.roll(-1, 1)}, number % chunks
        nll, penalty, memory = forward(inputs, memories[chunk])
        memories[chunk] = latest_states(memory, mem_len)
        (nll / ids.numel() + penalty).backward()
        gradients = [None if weight.grad is None else weight.grad.clone() for weight in model.parameters()]
        model.zero_grad()
        states = [state.clone() for state in memories[chunk].get("mems", ())]
        found.append([nll.detach().clone(), penalty.detach().clone(), gradients, states])
    return found


def lengths_of(make_ids, *lengths, device="cpu"):
    return [make_ids(2, length, seed=seed).to(device) for seed, length in enumerate(lengths)]


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("mem_len", [0, 6])
def test_steps_of_several_lengths_and_chunks_are_those_that_are_launched(
    make_model, make_ids, recorder, mem_len, chunks
):
    texts = lengths_of(make_ids, *[7, 7, 5, 7, 5, 7, 7, 5, 7, 5, 5, 7, 7, 7, 5, 5] * 2)
    model = make_model("eager", mem_len=mem_len, **PLAIN).train()
    expected = train(Forward(model, no_context), model, texts, mem_len, chunks)
    graphs = CapturedSteps(Forward(model, no_context))
    found = train(graphs, model, texts, mem_len, chunks)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    # Of the forward pass and of the backward pass.
    assert recorder.recorded == 2 * len(graphs.graphs) >= 4 and recorder.runs >= 32


BINS = {"cutoffs": [9, 30], "div_val": 2}


@pytest.mark.parametrize("changes", [BINS, BINS | {"div_val": 1}], ids=str)
def test_steps_with_bins_of_any_numbers_of_targets_are_those_that_are_launched(
    make_model, make_ids, recorder, monkeypatch, changes
):
    """A graph is used again where all bins have the same capacities. Every fourth text has the head's tokens alone."""
    monkeypatch.setattr(adaptive_transfo_xl, "FEW_LOGITS", -1)
    texts = lengths_of(make_ids, *[29, 29, 23, 29] * 8)
    texts[1::4] = [ids % 9 for ids in texts[1::4]]
    model = make_model("eager", **changes).train()
    expected = train(Forward(model, no_context), model, texts, 6)
    graphs = CapturedSteps(Forward(model, no_context), steps_before=1)
    found = train(graphs, model, texts, 6)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    capacities = {kind[-1] for kind in graphs.graphs}
    assert len(capacities) >= 3 and recorder.runs >= 32
    # Graphs of the same shapes read the same places.
    assert len(graphs._places) == len({shapes for shapes, _ in graphs.graphs}) < len(graphs.graphs)


def test_steps_of_few_logits_with_bins_are_launched_beside_graphs(make_model, make_ids, recorder, monkeypatch):
    """A last segment of a text may be as short."""
    monkeypatch.setattr(adaptive_transfo_xl, "FEW_LOGITS", 61 * 40)
    texts = lengths_of(make_ids, *[29, 29, 29, 5] * 6)
    model = make_model("eager", **BINS).train()
    graphs = CapturedSteps(Forward(model, no_context), steps_before=0)
    expected = train(Forward(model, no_context), model, texts, 6)
    torch.testing.assert_close(train(graphs, model, texts, 6), expected, atol=1e-6, rtol=1e-5)
    assert {shapes[0][0] for shapes, _ in graphs.graphs} == {(2, 29)}


@pytest.mark.parametrize("regularized", [False, True])
@pytest.mark.parametrize(
    "changes",
    [{"d_head": 6}, {"d_head": 16, "untie_r": False}, {"attn_type": 1}, {"gating": "gru", "d_head": 10}],
    ids=str,
)
def test_weights_are_cast_and_padded_together_for_the_steps_of_a_graph(
    make_model, make_ids, recorder, regularized, changes
):
    """As autocast casts them; heads that are padded with zeros have the same scores, and gradients no padding."""
    model = make_model("eager", **PLAIN | changes).train()
    regularizer = regularize(model, DROPOUTS) if regularized else None
    forward = Forward(model, lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False), regularizer)
    texts, found = lengths_of(make_ids, *[7, 5] * 6), []
    for steps_of in (forward, graphs := CapturedSteps(forward, dtype=torch.bfloat16)):
        torch.manual_seed(3)
        found.append(train(steps_of, model, texts, 6))
        # What is read is what the optimizer has written.
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1 if steps_of is forward else 1.5)
    assert recorder.runs > 0 and graphs._gradients.products is not None
    torch.testing.assert_close(found[1], found[0], atol=2e-3, rtol=2e-2)
    found = []
    for steps_of in (forward, graphs):
        torch.manual_seed(3)
        found.append(train(steps_of, model, texts[:4], 6))
    torch.testing.assert_close(found[1], found[0], atol=2e-3, rtol=2e-2)


def test_weights_of_which_some_are_frozen_are_cast_one_by_one(make_model):
    model = make_model("eager", **PLAIN).train()
    forward = Forward(model, no_context)
    assert steps.Gradients(forward, torch.bfloat16).products is not None
    assert steps.Gradients(forward).products is None
    model.transformer.layers[0].self_attn.q_proj.requires_grad_(False)
    assert steps.Gradients(forward, torch.bfloat16).products is None


def test_a_graph_is_made_of_the_fourth_step_of_its_shapes_and_there_are_only_so_many(
    make_model, make_ids, recorder, monkeypatch
):
    monkeypatch.setattr(steps, "MOST_GRAPHS", 1)
    model = make_model("eager", mem_len=0, **PLAIN).train()
    graphs = CapturedSteps(Forward(model, no_context))
    train(graphs, model, lengths_of(make_ids, *[5] * STEPS_BEFORE), 0)
    assert recorder.recorded == 0
    train(graphs, model, lengths_of(make_ids, 5), 0)
    assert (recorder.recorded, recorder.runs) == (2, 2)
    train(graphs, model, lengths_of(make_ids, *[7] * 6), 0)
    assert (recorder.recorded, recorder.runs) == (2, 2)


def test_gradients_of_graphs_and_of_launched_chunks_add_up(make_model, make_ids, recorder):
    """A chunk of a shape that has no graph yet comes behind, between and before others that have one."""
    model = make_model("eager", mem_len=0, **PLAIN).train()
    plain = Forward(model, no_context)
    graphs = CapturedSteps(plain, steps_before=1)
    sevens, fives, threes = (lengths_of(make_ids, *[length] * 6) for length in (7, 5, 3))
    train(graphs, model, [*sevens[:2], *fives[:2]], 0)
    assert len(graphs.graphs) == 2
    steps_of = [[sevens[2], threes[0], fives[2]], [threes[1], fives[3], sevens[3]], [fives[4], sevens[4]]]
    for number, ids in enumerate(steps_of):
        found = []
        for forward in (plain, graphs):
            for chunk in ids:
                nll, penalty, _ = forward({"input_ids": chunk, "shift_labels": chunk.roll(-1, 1)}, {})
                (nll + penalty).backward()
            found.append([weight.grad.clone() for weight in model.parameters()])
            # As optimisers do, or as those who write zeros.
            model.zero_grad(set_to_none=number != 1)
        torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("regularized", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"initial_memory": "zeros"},
        {"same_length": True, "clamp_len": 4},
        {"gating": "gru"},
        {"untie_r": False},
        {"decay_len": 4},
        BINS,
    ],
    ids=str,
)
def test_the_host_reads_no_number(make_model, make_ids, monkeypatch, changes, regularized):
    """A captured step cannot wait for the host to read a number; the backward pass neither."""
    monkeypatch.setattr(adaptive_transfo_xl, "FEW_LOGITS", -1)
    model = make_model("sdpa", **PLAIN | changes).train()
    forward = Forward(model, no_context, regularize(model, DROPOUTS) if regularized else None)
    counts = count_host_reads(monkeypatch, Forward, "forward", everything=True)
    learned = count_host_reads(monkeypatch, torch.Tensor, "backward", everything=True)
    with fixed_capacities((5, 10) if "cutoffs" in changes else None):
        train(forward, model, lengths_of(make_ids, 7, 7, 5), 6)
    assert counts == learned == [0, 0, 0]


def test_what_cannot_be_captured_is_launched_and_a_warning_says_why(make_model, make_ids, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    steps.logger.warning_once.cache_clear()
    monkeypatch.setitem(captured.RECORDERS, "cpu", Recorder(fails=True))
    model, texts = make_model("eager", **PLAIN).train(), lengths_of(make_ids, *[5] * 8)
    expected = train(Forward(model, no_context), model, texts, 6)
    torch.testing.assert_close(train(CapturedSteps(Forward(model, no_context)), model, texts, 6), expected)
    assert "launched kernel by kernel" in caplog.text and "not permitted" in caplog.text


def test_where_nothing_can_be_captured_the_host_waits_for_no_numbers_of_bins(make_model, make_ids, monkeypatch):
    monkeypatch.setattr(adaptive_transfo_xl, "FEW_LOGITS", -1)
    monkeypatch.setitem(captured.RECORDERS, "cpu", Recorder(fails=True))
    counted, count = [], steps.capacities_of_bins
    monkeypatch.setattr(steps, "capacities_of_bins", lambda *given: counted.append(1) or count(*given))
    model = make_model("eager", **BINS).train()
    train(CapturedSteps(Forward(model, no_context)), model, lengths_of(make_ids, *[29] * 9), 6)
    assert len(counted) < 9


def test_where_no_room_is_left_no_more_is_captured(make_model, make_ids, recorder, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    steps.logger.warning_once.cache_clear()
    rooms = iter([True, False])
    monkeypatch.setattr(steps, "has_room", lambda device: next(rooms))
    model, texts = make_model("eager", mem_len=0, **PLAIN).train(), lengths_of(make_ids, *[5, 7] * 8)
    expected = train(Forward(model, no_context), model, texts, 0)
    graphs = CapturedSteps(Forward(model, no_context))
    torch.testing.assert_close(train(graphs, model, texts, 0), expected)
    assert recorder.recorded == 2 and len(graphs.graphs) == 1 and "memory of the GPU" in caplog.text


def test_there_is_room_for_activations_of_graphs_beside_those_of_others(monkeypatch):
    """In GiB: of 80, 10 stay, a step has needed 30 more, which PyTorch has kept, and 3 more."""
    gib = {"memory_allocated": 10, "max_memory_allocated": 40, "memory_reserved": 43}
    for name, value in gib.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value * 2**30)
    for free, has_room in ((80 - 43, True), (27, True), (26, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free * 2**30, 80 * 2**30))
        assert steps.has_room(torch.device("cuda")) == has_room
    assert steps.has_room(torch.device("cpu"))


@pytest.mark.parametrize(
    ("reason", "changes", "given"),
    [
        ("no graphs on meta", {}, {"device": torch.device("meta")}),
        ("MULTI_CPU", {}, {"distributed_type": DistributedType.MULTI_CPU}),
        ("whole model is compiled", {}, {"torch_compile": True}),
        ("--gradient_checkpointing", {}, {"gradient_checkpointing": True}),
        ("--backprop_segments", {}, {"backprop_segments": 2}),
        ("flex_attention", {"attn_implementation": "flex_attention"}, {}),
        ("--document_end none", {}, {"document_end": 3}),
        (None, {}, {}),
    ],
    ids=str,
)
def test_what_cannot_be_captured_is_launched_or_refused_with_the_reason(make_model, recorder, reason, changes, given):
    given = {
        "device": torch.device("cpu"),
        "distributed_type": DistributedType.NO,
        "torch_compile": False,
        "gradient_checkpointing": False,
        "backprop_segments": 1,
        "document_end": None,
    } | given
    accelerator = SimpleNamespace(
        device=given["device"],
        distributed_type=given["distributed_type"],
    )
    backend = changes.pop("attn_implementation", "eager")
    model = make_model(backend, **(PLAIN | changes))

    def captures(cuda_graphs, tokens=captured.MOST_TOKENS):
        told = {name: given[name] for name in ("torch_compile", "gradient_checkpointing", "backprop_segments")}
        run = SimpleNamespace(cuda_graphs=cuda_graphs, **told)
        return should_capture_steps(run, accelerator, model, given["document_end"], tokens)

    assert not captures(False)
    # By default, where it can be and helps.
    assert captures(None) == (reason is None) and not captures(None, captured.MOST_TOKENS + 1)
    if reason is None:
        assert captures(True, captured.MOST_TOKENS + 1)
    else:
        with pytest.raises(ValueError, match=f"--cuda_graphs: .*{reason}"):
            captures(True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGPU:
    @staticmethod
    def forward_of(model, arguments=None):
        """In bf16, as `txl-train` has it."""
        regularizer = regularize(model, arguments) if arguments is not None else None
        return Forward(model, lambda: torch.autocast("cuda", torch.bfloat16), regularizer)

    @pytest.mark.parametrize("compiled", [False, True])
    @pytest.mark.parametrize("backend", ["auto", "txl_triton"])
    @pytest.mark.parametrize("regularized", [False, True])
    def test_steps_are_those_that_are_launched_with_the_same_masks(
        self, make_model, make_ids, backend, regularized, compiled
    ):
        changes = PLAIN if regularized else PLAIN | {"dropout": 0.1, "dropatt": 0.1}
        models = [make_model(backend, **changes).cuda().train() for _ in range(2)]
        torch.compiler.reset()
        forwards = [self.forward_of(model, DROPOUTS if regularized else None) for model in models]
        if compiled:
            # Of both: what Inductor draws is not what PyTorch draws.
            for model in models:
                compile_layers(model)
        texts = lengths_of(make_ids, *[7, 5] * 10, device="cuda")
        graphs, found = CapturedSteps(forwards[1]), []
        for forward, model in zip((forwards[0], graphs), models, strict=True):
            torch.manual_seed(3)
            found.append(train(forward, model, texts, 6))
        torch.testing.assert_close(found[1], found[0], atol=2e-3, rtol=2e-2)
        assert len(graphs.graphs) >= 2
        # The masks differ from step to step.
        assert len({round(float(nll), 4) for nll, *_ in found[1]}) == len(texts)

    def test_steps_with_bins_are_those_that_are_launched(self, make_model, make_ids, monkeypatch):
        monkeypatch.setattr(adaptive_transfo_xl, "FEW_LOGITS", -1)
        model = make_model("auto", **BINS).cuda().train()
        texts, forward = lengths_of(make_ids, *[29] * 12, device="cuda"), self.forward_of(model)
        graphs = CapturedSteps(forward, steps_before=1, dtype=torch.bfloat16)
        found = [train(steps_of, model, texts, 6) for steps_of in (forward, graphs)]
        torch.testing.assert_close(found[1], found[0], atol=2e-3, rtol=2e-2)
        assert graphs.graphs

    def test_evaluations_between_steps_take_nothing_from_them(self, make_model, make_ids):
        """Where the graph of an evaluation ends, PyTorch takes memory of its stream away, and streams go round."""
        found, texts = [], lengths_of(make_ids, *[1600] * 10, device="cuda")
        for kind in (Forward, CapturedSteps):
            model = make_model("txl_triton", **PLAIN).cuda().train()
            forward = self.forward_of(model)
            forward = kind(forward) if kind is CapturedSteps else forward
            found.append(train(forward, model, texts[:5], 6))
            for _ in range(34 if kind is CapturedSteps else 0):
                token_losses(model.eval(), texts[0][0, :80], 5)
                torch.cuda.empty_cache()
                model.train()
            found[-1] += train(forward, model, texts[5:], 6)
        torch.testing.assert_close(found[1], found[0], atol=2e-3, rtol=2e-2)

    def test_a_failed_capture_leaves_the_stream_and_the_generator(self, make_model, make_ids, monkeypatch):
        model = make_model(**PLAIN, dropout=0.1).cuda().train()
        graphs, stream = CapturedSteps(self.forward_of(model)), torch.cuda.current_stream()
        seen = let_the_host_wait(monkeypatch, model)
        found = train(graphs, model, lengths_of(make_ids, *[5] * 9, device="cuda"), 6)
        assert not graphs.graphs and len(seen) >= 9
        assert all(math.isfinite(nll) for nll, *_ in found)
        assert torch.cuda.current_stream() == stream and torch.rand(2, device="cuda").isfinite().all()
