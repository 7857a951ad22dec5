"""`generate` by a graph a token: the texts are those of its loop.

On a CPU a tape of the tests takes the place of CUDA's graphs. It plays operators and no Python, and refuses to record
what reads a number.
"""

import logging

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import MaxTimeCriteria

from models import small_model
from txl_hf.kernels import captured, decoding
from txl_hf.kernels.decoding import LOOK_EVERY, TOKENS_BEFORE
from txl_hf.transfo_xl.attention_transfo_xl import OPERATORS
from txl_hf.transfo_xl.cache_transfo_xl import CACHE_NAME, MemoryCache


def write(model, ids, tokens=40, seed=3, **options):
    torch.manual_seed(seed)
    options = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 60, "eos_token_id": None} | options
    return model.generate(ids, **options)


def loop(model, ids, **options):
    """By transformers' loop."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OPERATORS, "decode", None)
        return write(model, ids, **options)


CHOICES = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 0},
    "top-k": {"do_sample": True, "top_k": 5, "temperature": 0.8},
    "nucleus": {"do_sample": True, "top_k": 0, "top_p": 0.7, "temperature": 1.3},
    "min-p": {"do_sample": True, "top_k": 0, "min_p": 0.05, "renormalize_logits": True},
}


@pytest.mark.parametrize("options", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("mem_len", [12, 80], ids=lambda m: f"M{m}")
def test_texts_are_those_of_the_loop(tape, make_ids, options, rows, mem_len):
    """With a memory that becomes full, and one that stays partly empty."""
    model, ids = small_model(mem_len=mem_len).eval(), make_ids(rows, 7)
    found = write(model, ids, **options)
    assert tape.recorded == 1 and tape.runs == 40 - 1 - TOKENS_BEFORE
    assert torch.equal(found, loop(model, ids, **options))
    assert found.shape == (rows, 47) and len(found.unique()) > 3


@pytest.mark.parametrize(
    "changes",
    [
        {"initial_memory": "zeros"},
        {"attn_type": 1},
        {"pre_lnorm": True, "same_length": True},
        {"gating": "gru", "clamp_len": 4},
        {"decay_len": 3, "clamp_len": 5},
        {"cutoffs": [], "div_val": 1},
    ],
    ids=str,
)
def test_any_model(tape, make_ids, changes):
    model, ids = small_model(**changes).eval(), make_ids(2, 9)
    assert torch.equal(write(model, ids, do_sample=True), loop(model, ids, do_sample=True))
    assert tape.runs > 0


def test_padding_in_front_of_a_text_is_seen_by_none_of_its_tokens(tape, make_ids):
    model, ids = small_model(mem_len=12).eval(), make_ids(3, 8)
    mask = torch.ones(3, 8, dtype=torch.long)
    mask[0, :5], mask[1, :2] = 0, 0
    found = write(model, ids, attention_mask=mask)
    assert tape.runs > 0
    assert torch.equal(found, loop(model, ids, attention_mask=mask))
    alone = write(model, ids[:1, 5:])
    assert torch.equal(found[0, 8:], alone[0, 3:])


@torch.no_grad()
def test_a_text_goes_on_from_mems_and_within_lengths_of_its_own(tape, make_ids):
    model, ids = small_model(mem_len=12).eval(), make_ids(2, 8)
    mems = model(make_ids(2, 12, seed=1)).mems
    found = write(model, ids, mems=mems)
    assert tape.runs > 0 and torch.equal(found, loop(model, ids, mems=mems))
    assert not torch.equal(found, write(model, ids))


@pytest.mark.parametrize("streams", [False, True])
def test_texts_end_with_their_tokens_and_the_host_looks_seldom(tape, make_ids, monkeypatch, streams):
    """All of them, at different places, none of which the host looks at; what was written behind them is cut off."""
    model, ids = small_model(mem_len=12).eval(), make_ids(1 if streams else 4, 5)
    options = {"do_sample": True, "top_k": 0, "eos_token_id": [7, 11, 20, 30, 41]}
    looks, has_ended = [], decoding.Texts.has_ended
    monkeypatch.setattr(decoding.Texts, "has_ended", lambda texts: looks.append(texts._written) or has_ended(texts))
    streamed = []
    streamer = type("Streamer", (), {"put": lambda self, ids: streamed.append(ids.clone()), "end": lambda self: None})
    given, lengths = {"streamer": streamer()} if streams else {}, set()
    for seed in range(3):
        looks.clear()
        streamed.clear()
        found = write(model, ids, tokens=200, seed=seed, **options, **given)
        expected = loop(model, ids, tokens=200, seed=seed, **options)
        assert torch.equal(found, expected)
        written = found.shape[1] - ids.shape[1]
        lengths.add(written)
        every = 1 if streams else LOOK_EVERY
        # At the first token, after so many each time, and at the end.
        assert len(looks) == 2 + -(-(written - 1) // every)
        if streams:
            assert torch.equal(torch.cat([part.flatten() for part in streamed]), expected[0])
    assert len(lengths) > 1 and max(lengths) < 200


class HostCalls(TorchDispatchMode):
    """Counts replays of graphs, and the operators that the host calls beside them, without views."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += not function.is_view
        return function(*args, **kwargs or {})

    def counted(self, record):
        def recorded(step, device):
            run = record(step, device)
            self.calls = 0

            def replay():
                before, result = self.calls, run()
                self.calls = before + 1
                return result

            return replay

        return recorded


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 5, "temperature": 0.8}], ids=["greedy", "top-k"])
def test_the_host_calls_a_graph_and_little_else_for_a_token(tape, make_ids, monkeypatch, options):
    """At most three calls a token, of which the looks for the end are some."""
    host = HostCalls()
    monkeypatch.setitem(captured.RECORDERS, "cpu", host.counted(tape))
    monkeypatch.setattr(decoding, "why_not_captured", lambda *given: None)
    model, ids = small_model(mem_len=12).eval(), make_ids(2, 5)
    with host:
        write(model, ids, tokens=200, eos_token_id=[99], **options)
    assert tape.runs > 150 and tape.runs <= host.calls <= 3 * tape.runs


class Mine(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"repetition_penalty": 1.2}, "RepetitionPenaltyLogitsProcessor may compute with Python"),
        ({"logits_processor": LogitsProcessorList([Mine()])}, "Mine may compute with Python"),
        ({"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(1e9)])}, "MaxTimeCriteria is to be asked"),
        ({"return_dict_in_generate": True}, "returns more than the texts"),
        ({"prefill_chunk_size": 3}, "cuts the prompt"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_what_needs_the_host_is_launched_with_one_line_of_log(tape, make_ids, monkeypatch, caplog, options, reason):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.INFO, "txl_hf")
    model, ids = small_model(mem_len=12).eval(), make_ids(2, 5)
    found, expected = write(model, ids, **options), loop(model, ids, **options)
    if "return_dict_in_generate" in options:
        found, expected = found.sequences, expected.sequences
    assert tape.recorded == 0 and torch.equal(found, expected)
    said = [record.message for record in caplog.records if record.name.endswith("decoding")]
    assert len(said) == 1 and said[0].startswith("tokens are launched kernel by kernel: ") and reason in said[0]


def test_what_the_caller_chose_is_left_alone(tape, make_ids):
    """Beams, a cache of the caller's or none, few tokens; a hooked model."""
    model, ids = small_model(mem_len=12).eval(), make_ids(2, 5)
    cache = MemoryCache(model.config)
    write(model, ids, **{CACHE_NAME: cache})
    assert cache.get_seq_length() == 44
    write(model, ids, num_beams=2)
    write(model, ids, tokens=5)
    write(model, ids, use_cache=False)
    model.transformer.layers[0].register_forward_hook(lambda *_: None)
    write(model, ids)
    assert tape.recorded == 0


def test_a_graph_that_cannot_be_captured_is_done_without(tape, make_ids, monkeypatch, caplog):
    """The model reads a number."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    decoding.logger.warning_once.cache_clear()
    model, ids = small_model(mem_len=12).eval(), make_ids(2, 5)
    forward = type(model.transformer).forward

    def forward_that_waits(self, *args, **kwargs):
        outputs = forward(self, *args, **kwargs)
        assert outputs.last_hidden_state.sum().item() < 1e9
        return outputs

    monkeypatch.setattr(type(model.transformer), "forward", forward_that_waits)
    found = write(model, ids, do_sample=True)
    assert tape.runs == 0 and "no graph of them was captured: operation not permitted" in caplog.text
    assert torch.equal(found, loop(model, ids, do_sample=True))


def test_scores_that_are_nan_are_an_error_as_in_the_loop(tape, make_ids):
    model = small_model(mem_len=12).eval()
    torch.nn.init.constant_(model.transformer.layers[1].mlp.up_proj.weight, torch.nan)
    for generate in (write, loop):
        with pytest.raises(RuntimeError, match="probability tensor contains either"):
            generate(model, make_ids(2, 5), do_sample=True)
    assert tape.recorded == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", CHOICES.values(), ids=CHOICES)
def test_texts_on_a_gpu(make_ids, monkeypatch, options):
    model, ids = small_model(mem_len=12).eval().cuda(), make_ids(3, 7).cuda()
    seen, record = [], captured.RECORDERS["cuda"]
    monkeypatch.setitem(captured.RECORDERS, "cuda", lambda step, device: seen.append(1) or record(step, device))
    found = write(model, ids, **options)
    assert seen and torch.equal(found, loop(model, ids, **options))
