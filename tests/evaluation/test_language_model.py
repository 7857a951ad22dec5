"""evaluate_language_model: every token scored once, whatever the segments, and the model left as it was."""

import contextlib
import dataclasses
import math
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models import small_model
from txl_hf import TransfoXLConfig, TransfoXLForCausalLM, evaluate_language_model, token_losses
from txl_hf.evaluation import language_model as evaluation
from txl_hf.evaluation import reading

VOCAB_SIZE = 20


def tiny_model(**changes) -> TransfoXLForCausalLM:
    one_bin = {"vocab_size": VOCAB_SIZE, "cutoffs": [], "div_val": 1}
    sizes = {"mem_len": 64, "tgt_len": 128, "dropout": 0.1, "init_std": 0.5}
    return small_model(**(one_bin | sizes | changes))


def text(length: int) -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def losses_of_one_forward(model: TransfoXLForCausalLM, token_ids: torch.Tensor) -> torch.Tensor:
    """(N - 1,) losses of one forward over the whole text."""
    return model.eval()(token_ids[None, :-1], shift_labels=token_ids[None, 1:]).losses[0]


MODEL = tiny_model()


@settings(max_examples=30, deadline=None)
@given(length=st.integers(2, 60), segment_length=st.integers(1, 70))
def test_any_segmentation_scores_like_one_forward(length, segment_length):
    expected = losses_of_one_forward(MODEL, text(length)).double().mean().item()
    result = evaluate_language_model(MODEL, text(length), segment_length)
    assert result.nll == pytest.approx(expected, rel=1e-5)
    assert result.tokens == length - 1


@settings(max_examples=30, deadline=None)
@given(length=st.integers(2, 60), segment_length=st.integers(1, 20), data=st.data())
def test_streams_of_uneven_length_are_scored_to_the_end(length, segment_length, data):
    batch_size = data.draw(st.integers(1, length - 1))
    streams = [torch.from_numpy(stream) for stream in np.array_split(text(length).numpy(), batch_size)]
    losses = torch.cat([losses_of_one_forward(MODEL, stream) for stream in streams if len(stream) > 1])
    result = evaluate_language_model(MODEL, text(length), segment_length, batch_size=batch_size)
    assert result.tokens == len(losses) == length - batch_size
    assert result.nll == pytest.approx(losses.double().mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"initial_memory": "zeros"},
        {"same_length": True},
        {"same_length": True, "same_length_counts_self": False, "clamp_len": 5},
        {"attn_type": 1},
        {"attn_type": 2, "mem_len": 0},
        {"attn_type": 3, "mem_len": 0},
        {"cutoffs": [5, 10], "div_val": 2},
        {"ext_len": 5},
    ],
    ids=str,
)
def test_equals_a_loop_over_mems(settings):
    model, token_ids = tiny_model(**{"mem_len": 7} | settings).eval(), text(40)
    ext_len, losses, mems = model.config.ext_len, [], None
    for start in range(0, 39, 6):
        reread = max(0, start - ext_len)
        segment = token_ids[reread : start + 7]
        with torch.no_grad():
            outputs = model(segment[None, :-1], shift_labels=segment[None, 1:], mems=mems)
        mems = outputs.mems
        losses.append(outputs.losses[0, start - reread :])
    expected = torch.cat(losses)
    result = evaluate_language_model(model, token_ids, segment_length=6)
    assert result.tokens == len(expected) == 39
    assert result.nll == pytest.approx(expected.double().mean().item(), rel=1e-5)
    torch.testing.assert_close(token_losses(model, token_ids, segment_length=6), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("memory_length", [0, 5, 64])
def test_memory_length_sets_what_is_seen(memory_length):
    """One token at a time sees exactly its memory and itself: in one layer, a window of the text."""
    model, token_ids, expected = tiny_model(n_layer=1), text(30), []
    for end in range(1, len(token_ids)):
        window = token_ids[max(0, end - memory_length - 1) : end + 1]
        expected.append(losses_of_one_forward(model, window)[-1])
    result = evaluate_language_model(model, token_ids, segment_length=1, memory_length=memory_length)
    assert result.nll == pytest.approx(torch.stack(expected).double().mean().item(), rel=1e-5)
    assert result.memory_length == memory_length


@pytest.mark.parametrize("settings", [{}, {"initial_memory": "zeros"}, {"attn_type": 2, "mem_len": 0}], ids=str)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_sliding_window_protocol(settings, batch_size):
    """ext_len = n - 1 without memory computes every token again from its n last ones."""
    model, window, expected = tiny_model(**settings), 5, []
    alone = tiny_model(**settings | {"mem_len": 0})
    for stream in text(30).chunk(batch_size):
        expected += [
            losses_of_one_forward(alone, stream[max(0, end - window) : end + 1])[-1] for end in range(1, len(stream))
        ]
    protocol = {"segment_length": 1, "memory_length": 0, "ext_len": window - 1}
    result = evaluate_language_model(model, text(30), batch_size=batch_size, **protocol)
    assert result.nll == pytest.approx(torch.stack(expected).double().mean().item(), rel=1e-5)
    assert (result.ext_len, model.config.ext_len) == (4, 0)


@settings(max_examples=30, deadline=None)
@given(
    length=st.integers(2, 60),
    segment_length=st.integers(1, 20),
    ext_len=st.sampled_from([0, 0, 3, 25]),
    data=st.data(),
)
def test_warm_up_is_read_and_not_scored(length, segment_length, ext_len, data):
    batch_size = data.draw(st.integers(1, length - 1))
    streams = [torch.from_numpy(stream) for stream in np.array_split(text(length).numpy(), batch_size)]
    warm_up = data.draw(st.integers(0, len(streams[0]) - 1))
    losses = torch.cat([losses_of_one_forward(MODEL, row)[max(warm_up - 1, 0) :] for row in streams if len(row) > 1])
    result = evaluate_language_model(
        MODEL, text(length), segment_length, batch_size=batch_size, warm_up=warm_up, ext_len=ext_len
    )
    assert (result.tokens, result.text_tokens, result.warm_up) == (len(losses), length, warm_up)
    assert result.nll == pytest.approx(losses.double().mean().item(), rel=1e-5)
    found = token_losses(MODEL, text(length), segment_length, batch_size=batch_size, warm_up=warm_up, ext_len=ext_len)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-5)


def test_a_pass_that_only_the_longer_streams_have_is_theirs_alone():
    """Of six tokens and twice five, in segments of four."""
    streams = text(16).split([6, 5, 5])
    expected = torch.cat([losses_of_one_forward(MODEL, stream) for stream in streams])
    torch.testing.assert_close(token_losses(MODEL, text(16), 4, batch_size=3), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ext_len", [0, 3])
@torch.no_grad()
def test_a_model_read_as_a_whole_scores_alike(ext_len):
    """As where it is sharded, with tokens that are read again."""
    given = reading.Reading(5, batch_size=2, ext_len=ext_len)
    found = []
    for whole in (False, True):
        reader = reading.Reader(MODEL.eval(), given)
        reader.whole = whole
        found.append(list(reader.losses(reading.Text(MODEL, text(23), given))))
    assert len(found[0]) == 3
    for (_, states, losses), (_, same_states, same_losses) in zip(*found, strict=True):
        torch.testing.assert_close(same_states, states, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(same_losses, losses, rtol=1e-5, atol=1e-5)


class Processes:
    """Process `process_index` of an accelerate run, whose part is left as it is, for the test to sum up."""

    def __init__(self, num_processes: int, process_index: int):
        self.num_processes, self.process_index = num_processes, process_index

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "sum"
        return tensor

    autocast = contextlib.nullcontext


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 60), st.integers(1, 9), st.integers(1, 5), st.integers(0, 3), st.data())
def test_processes_share_the_streams(length, segment_length, num_processes, ext_len, data):
    """Together they score what one does, in as many passes each, also where there are fewer streams than processes."""
    batch_size = data.draw(st.integers(1, min(7, length - 1)))
    arguments = (MODEL, text(length), segment_length, 8, batch_size)
    parts, losses, passes = [], [], []
    hook = MODEL.transformer.register_forward_hook(lambda *_: passes.append(None))
    try:
        for index in range(num_processes):
            accelerator = Processes(num_processes, index)
            parts.append(evaluate_language_model(*arguments, ext_len=ext_len, accelerator=accelerator))
            losses.append(token_losses(*arguments, ext_len=ext_len, accelerator=accelerator))
    finally:
        hook.remove()
    whole = evaluate_language_model(*arguments, ext_len=ext_len)
    assert sum(part.nll for part in parts) == pytest.approx(whole.nll, rel=1e-5)
    assert {dataclasses.replace(part, nll=0.0) for part in parts} == {dataclasses.replace(whole, nll=0.0)}
    torch.testing.assert_close(sum(losses), token_losses(*arguments, ext_len=ext_len), rtol=1e-5, atol=1e-5)
    assert len(passes) == 2 * num_processes * -(-(-(-length // batch_size) - 1) // segment_length)


@pytest.mark.parametrize("accelerator", [None, Processes(1, 0)], ids=["alone", "process"])
@pytest.mark.parametrize("ext_len", [0, 6])
def test_a_long_text_moves_piece_by_piece(monkeypatch, accelerator, ext_len):
    """To the device; its losses move once."""
    protocol = {"segment_length": 4, "batch_size": 3, "warm_up": 7, "ext_len": ext_len}
    expected = token_losses(MODEL, text(90), **protocol)
    monkeypatch.setattr(reading, "TOKENS_AT_ONCE", 24)
    monkeypatch.setattr(reading, "TOKENS_MOVED", 30)
    moves = count_moves(monkeypatch)
    found = token_losses(MODEL, text(90), **protocol, accelerator=accelerator)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    # Of the eight segments, two are in a piece of the text and in a call of the softmax. Processes exchange the losses
    # where the model is.
    assert moves == {
        "txl_hf.evaluation.reading": 4 + 4,
        "txl_hf.evaluation.language_model": 1 if accelerator is None else 1 + 2,
    }


def count_moves(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each of the modules that read a text says where a tensor is to be."""
    counts: Counter[str] = Counter()

    def counted(move):
        def moved(tensor, *args, **options):
            caller = sys._getframe(1).f_globals["__name__"]
            if caller in (evaluation.__name__, reading.__name__):
                counts[caller] += 1
            return move(tensor, *args, **options)

        return moved

    for name in ("to", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name)))
    return counts


def test_settings_of_the_evaluation_only():
    configured = tiny_model(mem_len=6, clamp_len=3, same_length=True)
    expected = evaluate_language_model(configured, text(50), segment_length=4)
    model = tiny_model()
    result = evaluate_language_model(model, text(50), segment_length=4, memory_length=6, clamp_len=3, same_length=True)
    assert result == expected
    assert (result.clamp_len, result.same_length, result.segment_length, result.batch_size) == (3, True, 4, 1)
    assert result != evaluate_language_model(model, text(50), segment_length=4)


def test_measures_agree():
    result = evaluate_language_model(MODEL, text(30), segment_length=8, batch_size=3)
    assert result.perplexity == pytest.approx(math.exp(result.nll))
    assert result.bits_per_token == pytest.approx(result.nll / math.log(2))
    # As many words as tokens: the same, although the first tokens are not scored.
    assert result.perplexity_per_word(30) == pytest.approx(result.perplexity)
    assert result.bits_per_character(30) == pytest.approx(result.bits_per_token)
    assert result.perplexity_per_word(10) == pytest.approx(result.perplexity**3)
    assert result.bits_per_character(90) == pytest.approx(result.bits_per_token / 3)
    with pytest.raises(ValueError, match="words=0"):
        result.perplexity_per_word(0)
    with pytest.raises(ValueError, match="characters=2.5"):
        result.bits_per_character(2.5)


def test_perplexity_of_a_hopeless_model_is_infinite_and_of_a_broken_one_nan():
    result = evaluate_language_model(MODEL, text(30), segment_length=8)
    hopeless = dataclasses.replace(result, nll=1e3)
    assert hopeless.perplexity == math.inf == hopeless.perplexity_per_word(1)
    broken = dataclasses.replace(hopeless, nll=math.nan)
    assert math.isnan(broken.perplexity) and math.isnan(broken.perplexity_per_word(1))


def test_every_kind_of_text(tmp_path):
    tokens = text(30)
    tokens.numpy().astype(np.uint16).tofile(tmp_path / "tokens.bin")
    memory_mapped = np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="r")
    expected = evaluate_language_model(MODEL, tokens, segment_length=8)
    for token_ids in (tokens.tolist(), tokens.numpy(), memory_mapped):
        assert evaluate_language_model(MODEL, token_ids, segment_length=8) == expected


@pytest.mark.parametrize("fails", [False, True], ids=["scored", "failed"])
def test_the_model_is_left_as_it_was(fails):
    model = tiny_model(dropout=0.5).train()
    model.transformer.layers[0].eval()
    modes = [module.training for module in model.modules()]
    config = model.config.to_dict()
    token_ids = torch.tensor([1, 2, VOCAB_SIZE]) if fails else text(30)
    with pytest.raises(ValueError, match=str(VOCAB_SIZE)) if fails else contextlib.nullcontext():
        evaluate_language_model(model, token_ids, 8, memory_length=3, ext_len=2, clamp_len=2, same_length=True)
    assert [module.training for module in model.modules()] == modes
    assert model.config.to_dict() == config


def test_the_model_is_left_as_it_was_by_an_error_half_way(monkeypatch):
    model = tiny_model().train()
    monkeypatch.setattr(model.transformer, "forward", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluate_language_model(model, text(30), 8, memory_length=3)
    assert model.training and model.config.mem_len == 64


@pytest.mark.parametrize("settings", [{}, {"ext_len": 2}, {"cutoffs": [5, 10], "div_val": 2}], ids=str)
def test_nothing_is_written_to_a_model_in_evaluation_mode(monkeypatch, settings):
    model = tiny_model(**settings).eval()
    hooks = [len(module._forward_hooks) for module in model.modules()]

    def refuse(self, name, value):
        raise AssertionError(f"{name} of {type(self).__name__} was set to {value!r}")

    monkeypatch.setattr(torch.nn.Module, "__setattr__", refuse)
    monkeypatch.setattr(TransfoXLConfig, "__setattr__", refuse)
    evaluate_language_model(model, text(30), 8, memory_length=3, clamp_len=2, same_length=True)
    assert [len(module._forward_hooks) for module in model.modules()] == hooks


def test_threads_share_a_model():
    """Each with a memory of its own, while a third calls the model with its own settings."""
    model, token_ids = tiny_model(mem_len=16).eval(), text(400)
    lengths = [0, 2, 16, None]
    expected = [evaluate_language_model(model, token_ids, 5, length) for length in lengths]
    assert len({result.nll for result in expected}) == 3
    with torch.no_grad():
        logits = model(token_ids[None, :30]).logits
    with ThreadPoolExecutor(len(lengths) + 1) as pool:
        evaluations = [pool.submit(evaluate_language_model, model, token_ids, 5, length) for length in lengths]
        with torch.no_grad():
            while not all(evaluation.done() for evaluation in evaluations):
                torch.testing.assert_close(model(token_ids[None, :30]).logits, logits, rtol=0, atol=0)
    assert [evaluation.result() for evaluation in evaluations] == expected
    assert model.config.mem_len == 16


def test_a_model_with_an_adapter():
    """PEFT's wrapper is read through, with the adapter."""
    peft = pytest.importorskip("peft")
    model, token_ids = tiny_model(), text(40)
    static = evaluate_language_model(model, token_ids, 8)
    settings = peft.LoraConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, settings)
    expected = losses_of_one_forward(adapted, token_ids).double().mean().item()
    result = evaluate_language_model(adapted, token_ids, 8)
    assert result.nll == pytest.approx(expected, rel=1e-5)
    assert abs(result.nll - static.nll) > 1e-3
    prompted = peft.get_peft_model(tiny_model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match="PromptTuningConfig puts a prompt before every segment"):
        evaluate_language_model(prompted, token_ids, 8)


@pytest.mark.parametrize("settings", [{}, {"cutoffs": [5, 10], "div_val": 2}], ids=str)
def test_a_model_whose_weights_are_elsewhere_between_calls(settings):
    """accelerate's hooks bring them."""
    model, token_ids = tiny_model(**settings), text(40)
    expected = evaluate_language_model(model, token_ids, 8)
    accelerate = pytest.importorskip("accelerate")
    offloaded = accelerate.cpu_offload(model)
    assert {parameter.device.type for parameter in offloaded.parameters()} == {"meta"}
    assert evaluate_language_model(offloaded, token_ids, 8) == expected


def test_the_model_is_left_as_it_was_by_settings_it_cannot_have():
    model = tiny_model(attn_type=2, mem_len=0)
    with pytest.raises(ValueError, match="attn_type=2"):
        evaluate_language_model(model, text(30), 8, memory_length=3)
    assert model.config.mem_len == 0


@pytest.mark.parametrize(
    ("token_ids", "arguments", "message"),
    [
        ([], {}, "the text is empty"),
        ([3], {}, "nothing to score: the text has 1 tokens"),
        ([3, 4], {"batch_size": 3}, r"batch_size=3 streams are more than the text has tokens \(2\)"),
        ([3, 4], {"batch_size": 2}, "nothing to score"),
        ([3, 4], {"batch_size": 0}, "batch_size=0"),
        ([3, 4], {"segment_length": 0}, "segment_length=0"),
        ([3, 4], {"memory_length": -1}, "mem_len=-1"),
        ([3, 4], {"ext_len": -1}, "ext_len=-1"),
        ([3, 4], {"warm_up": -1}, "warm_up=-1"),
        ([3, 4, 5], {"warm_up": 3}, "nothing to score: the text has 3 tokens, and the first warm_up=3 tokens"),
        ([3, 4, VOCAB_SIZE], {}, r"token_ids\[2\] is 20, outside the vocabulary \[0, 20\)"),
        ([3, -4, 2], {}, r"token_ids\[1\] is -4, outside the vocabulary"),
        ([0.5, 1.5], {}, "sequence of integers, but tokens 0 to 1 hold float64"),
    ],
)
def test_bad_input_is_named(token_ids, arguments, message):
    for function in (evaluate_language_model, token_losses):
        with pytest.raises(ValueError, match=message):
            function(MODEL, token_ids, **{"segment_length": 4} | arguments)


def test_a_wrapped_model_is_refused():
    with pytest.raises(ValueError, match="wrapped in DataParallel: .*unwrap_model"):
        evaluate_language_model(torch.nn.DataParallel(small_model()), [1, 2, 3], 2)


def test_progress_counts_scored_tokens(capsys):
    evaluate_language_model(MODEL, text(30), segment_length=8, batch_size=3, progress=True)
    assert "27/27" in capsys.readouterr().err
    evaluate_language_model(MODEL, text(30), segment_length=8)
    assert capsys.readouterr().err == ""


def test_a_model_that_has_diverged_is_nan_not_a_lost_mask():
    """With ext_len the memory goes from segment to segment as hidden states, which are NaN then."""
    model = tiny_model(ext_len=2, mem_len=6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    assert math.isnan(evaluate_language_model(model, text(30), segment_length=4).nll)
