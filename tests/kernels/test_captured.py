"""Segments that are alike are read by one graph: the losses are those of segments that are launched one by one.

On a CPU a recorder of the tests takes the place of CUDA's.
"""

import contextlib
import copy
import functools
import gc
import logging
import math
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from models import small_model
from recorder import Recorder, let_the_host_wait
from txl_hf import ContinuousCache, DynamicEvaluation, TransfoXLForCausalLM, evaluate_language_model, token_losses
from txl_hf.evaluation import reading
from txl_hf.kernels import captured
from txl_hf.kernels.captured import MOST_GRAPHS, SEGMENTS_BEFORE, why_not_captured
from txl_hf.transfo_xl.attention_transfo_xl import BACKENDS as ALL_BACKENDS
from txl_hf.transfo_xl.attention_transfo_xl import Backend
from txl_hf.transfo_xl.cache_transfo_xl import CACHE_NAME
from txl_hf.transfo_xl.positions_transfo_xl import POSITIONS

VOCAB_SIZE = 20


def tiny_model(**changes) -> TransfoXLForCausalLM:
    sizes = {"vocab_size": VOCAB_SIZE, "cutoffs": [5, 10], "mem_len": 12, "init_std": 0.5}
    return small_model(**(sizes | changes)).eval()


def text(length: int) -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length))


@pytest.fixture
def warnings_anew(monkeypatch):
    """Reset warnings that appear once, and let the test see them."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    captured.logger.warning_once.cache_clear()


def replays(labels: int, segment_length: int, memory_length: int, initial: int = 0) -> int:
    """How many segments of a text a graph reads: not those that fill the memory, nor the first alike, nor a short
    one at the end."""
    full = math.ceil((memory_length - initial) / segment_length)
    # The first has no equal before it, whether it fills the memory or not.
    launched = max(full, 2) - 1 + SEGMENTS_BEFORE + graphs(segment_length, memory_length)
    return max(0, labels // segment_length - launched)


def graphs(segment_length: int, memory_length: int) -> int:
    """How many graphs there are: each writes its keys behind those of the one before."""
    return min(MOST_GRAPHS, math.ceil(memory_length / segment_length))


MODEL = tiny_model()


@settings(max_examples=15, deadline=None)
@given(
    length=st.integers(40, 300),
    segment_length=st.integers(1, 15),
    memory_length=st.integers(1, 14),
    batch_size=st.integers(1, 3),
    clamp_len=st.sampled_from([-1, 5]),
    same_length=st.booleans(),
)
def test_losses_are_those_of_segments_that_are_launched(length, segment_length, memory_length, batch_size, **lengths):
    arguments = text(length), segment_length, memory_length, batch_size
    # In fp64, because the order of sums differs between passes over one segment and over several.
    model = copy.deepcopy(MODEL).double()
    expected = token_losses(model, *arguments, **lengths)
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(captured.RECORDERS, "cpu", recorder)
        # So that texts as short have several passes with `same_length`.
        patch.setattr(reading, "TOKENS_AT_ONCE", 12)
        found = token_losses(model, *arguments, **lengths)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    labels = math.ceil(length / batch_size) - 1
    # With `same_length` a pass reads several segments.
    joined = max(1, 12 // (batch_size * segment_length)) if lengths["same_length"] else 1
    assert recorder.runs == replays(labels, segment_length * joined, memory_length)
    assert recorder.recorded in {0, graphs(segment_length * joined, memory_length)}
    assert bool(recorder.runs) <= bool(recorder.recorded)


@pytest.mark.parametrize("changes", [{"initial_memory": "zeros"}, {"attn_type": 1}, {"pre_lnorm": True}], ids=str)
@pytest.mark.parametrize("backend", ["auto", "eager", "sdpa"])
def test_any_model_and_backend(recorder, changes, backend):
    model, ids = tiny_model(**changes), text(200)
    model.set_attn_implementation(backend)
    found = token_losses(model, ids, 5)
    initial = 12 if "initial_memory" in changes else 0
    assert recorder.runs >= replays(199, 5, 12, initial) > 0
    del captured.RECORDERS["cpu"]
    torch.testing.assert_close(found, token_losses(model, ids, 5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("initial_memory", ["empty", "zeros"])
@pytest.mark.parametrize("counts_self", [True, False])
@pytest.mark.parametrize("attn_type", [0, 1])
@pytest.mark.parametrize("pieces", [{}, {"batch_size": 3, "warm_up": 7, "clamp_len": 5}], ids=["one", "three"])
def test_with_same_length_a_pass_reads_several_segments(
    recorder, monkeypatch, initial_memory, counts_self, attn_type, pieces
):
    """Each token sees as many keys in a segment of any length, so that no loss changes; results name the segment."""
    monkeypatch.setattr(reading, "TOKENS_AT_ONCE", 48)
    model = tiny_model(
        same_length=True, same_length_counts_self=counts_self, initial_memory=initial_memory, attn_type=attn_type
    ).double()
    forward, lengths = type(model.transformer).forward, []

    def counted(self, input_ids, *args, **kwargs):
        lengths.append(input_ids.shape[1])
        return forward(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(type(model.transformer), "forward", counted)
    ids, joined = text(1000), 48 // pieces.get("batch_size", 1) // 5 * 5
    found, result = token_losses(model, ids, 5, **pieces), evaluate_language_model(model, ids, 5, **pieces)
    assert set(lengths[:4]) == {joined} and recorder.runs > 0 and result.segment_length == 5
    del captured.RECORDERS["cpu"]
    lengths.clear()
    torch.testing.assert_close(found, token_losses(model, ids, 5, **pieces), rtol=0, atol=1e-6)
    assert max(lengths) == 5


@pytest.mark.parametrize("use_cache", [False, True], ids=["states", "keys"])
def test_with_same_length_a_pass_reads_several_segments_behind_a_given_memory(recorder, monkeypatch, use_cache):
    """The memory is shorter than the longest, and of states some are padding."""
    monkeypatch.setattr(reading, "TOKENS_AT_ONCE", 48)
    model, before = tiny_model(same_length=True).double(), text(14).view(2, 7)
    mask = torch.ones_like(before)
    if not use_cache:
        mask[0, :3] = 0
    with torch.no_grad():
        memory = model(before, attention_mask=mask, use_cache=use_cache)
    memory = {CACHE_NAME: memory[CACHE_NAME]} if use_cache else {"mems": memory.mems, "mems_mask": memory.mems_mask}
    found = token_losses(model, text(900), 4, batch_size=2, memory=memory)
    assert recorder.runs > 0
    del captured.RECORDERS["cpu"]
    expected = token_losses(model, text(900), 4, batch_size=2, memory=memory)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert not torch.allclose(expected, token_losses(model, text(900), 4, batch_size=2))


@pytest.mark.parametrize(
    ("changes", "arguments"),
    [
        ({}, {}),
        ({}, {"same_length": True, "cache": ContinuousCache(50, 0.3, 0.2)}),
        ({}, {"same_length": True, "dynamic": DynamicEvaluation(0.01)}),
        ({}, {"same_length": True, "document_end": 3}),
        ({}, {"same_length": True, "ext_len": 2}),
        ({}, {"same_length": True, "memory_length": 0}),
    ],
    ids=["no-same-length", "cache", "dynamic", "documents", "ext_len", "no-memory"],
)
def test_a_pass_reads_one_segment_where_more_could_change_a_loss(recorder, monkeypatch, changes, arguments):
    model = tiny_model(**changes)
    seen, segments = [], reading.Text.segments
    monkeypatch.setattr(
        reading.Text, "segments", lambda text, device, joined=1: seen.append(joined) or segments(text, device, joined)
    )
    token_losses(model, text(100), 5, **arguments)
    assert seen == [1]


@pytest.mark.parametrize(("rows", "joined"), [(1, 16), (3, 5), (16, 1), (400, 1)])
def test_scores_of_a_pass_take_at_most_a_gibibyte(recorder, monkeypatch, rows, joined):
    """For B rows, H heads, L tokens and m + L keys: 4·B·H·L·(m + L) bytes."""
    reader = reading.Reader(MODEL, given := reading.Reading(64, 12, rows, same_length=True).of(MODEL.config))
    assert reader._joined(given) == joined
    heads = MODEL.config.n_head
    monkeypatch.setattr(reading, "MOST_BYTES", 4 * heads * 256 * (12 + 256))
    assert reader._joined(given) == {1: 4, 3: 2}.get(rows, 1)
    # A segment may be as long as the user says, however short the text is.
    assert reader._joined(replace(given, segment_length=10**12)) == 1


@pytest.mark.parametrize("segment_length", [1, 2, 3, 5, 7, 12, 17])
def test_graphs_write_where_the_next_ones_read(tape, segment_length):
    """Operators alone run again, on the addresses that they had: also those that move the memory to the front."""
    found = token_losses(MODEL, text(40 * segment_length + 3), segment_length)
    del captured.RECORDERS["cpu"]
    expected = token_losses(MODEL, text(40 * segment_length + 3), segment_length)
    assert tape.recorded == graphs(segment_length, 12)
    assert tape.runs == replays(40 * segment_length + 2, segment_length, 12) > 2 * tape.recorded
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_states_of_earlier_segments_stay_what_they_were(recorder):
    """A cache of states keeps them, where a graph writes each time to the same place."""
    cache = ContinuousCache(50, 0.3, 0.2)
    found = token_losses(MODEL, text(200), 5, cache=cache)
    assert recorder.runs > 0
    del captured.RECORDERS["cpu"]
    torch.testing.assert_close(found, token_losses(MODEL, text(200), 5, cache=cache), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "arguments", [{"document_end": 3}, {"ext_len": 2}, {"memory_length": 0}], ids=lambda given: next(iter(given))
)
def test_what_differs_from_segment_to_segment_is_launched(recorder, arguments):
    found = token_losses(MODEL, text(300), 5, **arguments)
    assert recorder.recorded == 0
    del captured.RECORDERS["cpu"]
    assert torch.equal(found, token_losses(MODEL, text(300), 5, **arguments))


def test_hooks_are_called_for_every_segment(recorder):
    model, called = tiny_model(), []
    model.transformer.layers[1].mlp.register_forward_hook(lambda *_: called.append(1))
    token_losses(model, text(201), 5)
    assert len(called) == 40 and recorder.recorded == 0
    # Those of transformers, which a call for hidden states leaves behind, are its own.
    model = tiny_model()
    model(text(4)[None], output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    token_losses(model, text(201), 5)
    assert recorder.runs > 0


def test_a_backend_of_ones_own_is_called_for_every_segment(recorder, monkeypatch):
    called, eager = [], ALL_BACKENDS["eager"]

    def attend(inputs):
        called.append(1)
        return eager.run(inputs)

    # By a name of its own, and in the place of another.
    for name in ("counting", "eager"):
        called.clear()
        monkeypatch.setitem(ALL_BACKENDS, name, Backend(name, attend))
        model = tiny_model()
        model.set_attn_implementation(name)
        token_losses(model, text(201), 5)
        assert len(called) == 40 * model.config.n_layer and recorder.recorded == 0


class Counting(torch.nn.Linear):
    pass


@pytest.mark.usefixtures("recorder")
def test_says_why_segments_are_launched(monkeypatch):
    ids = text(6)[None]
    assert why_not_captured(MODEL.transformer, ids) is None
    assert "no graphs on meta" in why_not_captured(MODEL.transformer, ids.to("meta"))
    with torch.device("cpu"):
        assert why_not_captured(MODEL.transformer, ids) is None
    with FlopCounterMode(display=False):
        assert "mode of PyTorch's" in why_not_captured(MODEL.transformer, ids)
    assert "9000 tokens" in why_not_captured(MODEL.transformer, torch.zeros(9, 1000, dtype=torch.long))
    model = tiny_model()
    model.transformer.layers[0].mlp.up_proj.__class__ = Counting
    assert "layers.0.mlp.up_proj is a Counting of test_captured" in why_not_captured(model.transformer, ids)
    model = tiny_model()
    model.transformer.layers[1].to("meta")
    assert "on meta" in why_not_captured(model.transformer, ids)
    model = tiny_model()
    model.transformer.layers[1].mlp.forward = model.transformer.layers[1].mlp.forward
    assert "layers.1.mlp has a forward of its own" in why_not_captured(model.transformer, ids)
    monkeypatch.setitem(POSITIONS, 0, type("Mine", (POSITIONS[0],), {"__module__": "mine"}))
    assert "Mine, which encodes positions" in why_not_captured(tiny_model().transformer, ids)


def test_a_graph_that_cannot_be_captured_is_done_without(monkeypatch, caplog, warnings_anew):
    monkeypatch.setitem(captured.RECORDERS, "cpu", Recorder(fails=True))
    found = token_losses(MODEL, text(200), 5)
    assert "launched one by one, as no graph of them was captured: operation not permitted" in caplog.text
    monkeypatch.delitem(captured.RECORDERS, "cpu")
    torch.testing.assert_close(found, token_losses(MODEL, text(200), 5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("capture", [1, 2])
def test_a_capture_that_fails_inside_the_layers_leaves_the_memory_as_it_was(
    monkeypatch, tape, caplog, warnings_anew, capture
):
    """As for want of memory: the layers before have taken the segment in, those behind have not."""
    model, forward, captures = tiny_model(), type(MODEL.transformer.layers[1]).forward, []

    def record(step, device):
        captures.append(1)
        return tape(step, device)

    def forward_that_fails(self, *args, **kwargs):
        if self is model.transformer.layers[1] and len(captures) == capture:
            captures.append(1)
            raise RuntimeError("out of memory")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model.transformer.layers[1]), "forward", forward_that_fails)
    monkeypatch.setitem(captured.RECORDERS, "cpu", record)
    found = token_losses(model, text(200), 5)
    assert "no graph of them was captured: out of memory" in caplog.text and tape.runs == 0
    del captured.RECORDERS["cpu"]
    torch.testing.assert_close(found, token_losses(model, text(200), 5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("segment_length", [5, 15])
def test_a_memory_of_a_wider_type_than_the_segments_is_read_by_graphs(tape, segment_length):
    """Under autocast keys are bf16, and a memory that was made without it is fp32."""
    accelerator = SimpleNamespace(
        num_processes=1,
        process_index=0,
        autocast=functools.partial(torch.autocast, "cpu", torch.bfloat16),
        reduce=lambda x, kind: x,
    )
    with torch.no_grad():
        memory = {CACHE_NAME: MODEL(text(12)[None], use_cache=True)[CACHE_NAME]}
    arguments = {"memory": memory, "accelerator": accelerator}
    found = token_losses(MODEL, text(400), segment_length, **arguments)
    assert tape.runs > 0
    del captured.RECORDERS["cpu"]
    expected = token_losses(MODEL, text(400), segment_length, **arguments)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", [(3, 5), (8, 5), (30, 5), (5, 30, 5)], ids=str)
@pytest.mark.parametrize("before", [11, 25])
@torch.no_grad()
def test_a_segment_of_another_length_ends_the_graphs(tape, lengths, before):
    """Also a longer one than fits into the buffers."""
    pieces = text(5 * before + sum(lengths))[None].split([5] * before + list(lengths), dim=1)

    def states():
        reader = reading.Reader(MODEL, reading.Reading(5))
        return [reader.read(reading.Segment(0, ids, ids, ids, None, 1, 1)) for ids in pieces]

    found = states()
    assert (tape.runs > 0) == (before > 20)
    del captured.RECORDERS["cpu"]
    torch.testing.assert_close(found, states(), rtol=1e-4, atol=1e-5)


def read_until_captured(model, ids) -> reading.Reader:
    """A reader that has read a segment, (1, L), as often as it takes to try a graph."""
    reader = reading.Reader(model, reading.Reading(5))
    before = math.ceil(model.config.mem_len / ids.shape[1]) - 1 + SEGMENTS_BEFORE
    for _ in range(before + graphs(ids.shape[1], model.config.mem_len)):
        reader.read(reading.Segment(0, ids, ids, ids, None, ids.numel(), ids.numel()))
    return reader


@torch.no_grad()
def test_nothing_outlives_a_reader(monkeypatch):
    """A graph has the memory of a segment's states, and nobody looks for cycles before that is wanted again."""

    def record(step, device):
        states = step()
        return lambda: states

    monkeypatch.setitem(captured.RECORDERS, "cpu", record)
    gc.disable()
    try:
        reader = read_until_captured(MODEL, text(5)[None])
        assert reader.alike.is_captured
        cache = weakref.ref(reader._memory[CACHE_NAME])
        del reader
        assert cache() is None
    finally:
        gc.enable()


@torch.no_grad()
def test_a_graph_that_projects_weights_anew_is_not_taken(monkeypatch):
    """They are written to meanwhile. Who is launched next would find what was recorded alone."""
    model = tiny_model()

    def record(step, device):
        model.transformer.layers[1].self_attn.r_proj.weight.mul_(1.1)
        step()
        return step

    monkeypatch.setitem(captured.RECORDERS, "cpu", record)
    reader = read_until_captured(model, text(5)[None])
    assert not reader.alike.is_captured
    state = reader._memory[CACHE_NAME].decoding_state
    assert state.distances is None and not state.rel_keys


@torch.no_grad()
def test_a_graph_casts_weights_itself(monkeypatch):
    """Autocast's cache is of the process: other calls would find casts in it that a capture never computed."""
    seen = []

    def record(step, device):
        seen.append(torch.is_autocast_cache_enabled())
        return step

    monkeypatch.setitem(captured.RECORDERS, "cpu", record)
    read_until_captured(MODEL, text(5)[None])
    assert seen == [False] * graphs(5, MODEL.config.mem_len) and torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("fails", [False, True])
def test_other_threads_draw_from_the_generator_as_soon_as_capturing_has_begun(monkeypatch, fails):
    """Of CUDA's generator and its graph, what takes their place has what is asked of them."""
    found = []

    class State(str):
        def clone_state(self):
            return State(f"{self} aside")

    generator = SimpleNamespace(state=State("drawing"))
    generator.graphsafe_get_state = lambda: generator.state
    generator.graphsafe_set_state = functools.partial(setattr, generator, "state")

    def begin(graph, pool, capture_error_mode):
        found.append((generator.state, pool, capture_error_mode))
        if fails:
            raise RuntimeError("no memory")

    monkeypatch.setattr(torch.cuda, "default_generators", [generator])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", begin)
    graph = object.__new__(captured._UndrawnGraph)
    with pytest.raises(RuntimeError, match="no memory") if fails else contextlib.nullcontext():
        graph.capture_begin("pool", capture_error_mode="thread_local")
    assert found == [("drawing aside", "pool", "thread_local")] and generator.state == "drawing"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGPU:
    @pytest.mark.parametrize("backend", ["auto", "txl_triton", "eager"])
    @pytest.mark.parametrize(
        "changes",
        [{}, {"cutoffs": [], "div_val": 1}, {"clamp_len": 5}, {"decay_len": 3}, {"same_length": True}],
        ids=str,
    )
    def test_losses_are_those_of_segments_that_are_launched(self, monkeypatch, changes, backend):
        monkeypatch.setattr(reading, "TOKENS_AT_ONCE", 20)
        model, ids = tiny_model(**changes).cuda(), text(400)
        model.set_attn_implementation(backend)
        record, recorded = captured.RECORDERS["cuda"], []
        monkeypatch.setitem(
            captured.RECORDERS, "cuda", lambda *given, **shared: recorded.append(1) or record(*given, **shared)
        )
        found = token_losses(model, ids, 5, batch_size=2)
        assert recorded
        monkeypatch.delitem(captured.RECORDERS, "cuda")
        torch.testing.assert_close(found, token_losses(model, ids, 5, batch_size=2), rtol=1e-4, atol=1e-4)

    def test_a_failed_capture_leaves_the_stream_the_generator_and_the_memory(self, monkeypatch, caplog, warnings_anew):
        model, ids = tiny_model().cuda(), text(400)
        expected = token_losses(model, ids, 5)
        stream = torch.cuda.current_stream()
        hidden = let_the_host_wait(monkeypatch, model)
        assert torch.equal(token_losses(model, ids, 5), expected)
        assert "no graph of them was captured" in caplog.text
        assert torch.cuda.current_stream() == stream and len(hidden) >= 80
        assert torch.rand(2, device="cuda").isfinite().all()

    @torch.no_grad()
    def test_the_host_waits_for_nothing(self):
        model = tiny_model().cuda()
        reader = reading.Reader(model, reading.Reading(5))
        ids = text(5)[None].cuda()
        segment = reading.Segment(0, ids, ids, ids, None, 5, 5)
        for _ in range(SEGMENTS_BEFORE + 6 + MOST_GRAPHS):
            before = reader.read(segment)
        assert reader.alike.is_captured
        torch.cuda.set_sync_debug_mode("error")
        try:
            after = reader.read(segment)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert before.data_ptr() != after.data_ptr()

    def test_threads_share_a_model_and_the_generator(self):
        model, ids = tiny_model().cuda(), text(2000)
        lengths = [2, 7, 12, None]
        expected = [evaluate_language_model(model, ids, 5, length).nll for length in lengths]
        torch.manual_seed(0)
        drawn = [torch.rand(1, device="cuda") for _ in range(2000)]
        torch.manual_seed(0)
        again, refused = [], 0
        with ThreadPoolExecutor(len(lengths)) as pool:
            found = [pool.submit(evaluate_language_model, model, ids, 5, length) for length in lengths]
            for _ in drawn:
                try:
                    again.append(torch.rand(1, device="cuda"))
                except RuntimeError as error:
                    # A capture is beginning.
                    assert "Offset increment outside graph capture" in str(error)
                    refused += 1
            assert [result.result().nll for result in found] == pytest.approx(expected, rel=1e-4)
        # None is left out; those that were drawn while a capture began may have come twice.
        different = list(dict.fromkeys(torch.cat(again).tolist()))
        print(f"{refused} refused, {len(again) - len(different)} twice")
        assert different == list(dict.fromkeys(torch.cat(drawn).tolist()))[: len(different)]
        assert len(different) > 0.9 * len(drawn)
