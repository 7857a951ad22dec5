"""The Triton kernels against eager and the fp64 loop over (i, j): outputs and every gradient, on a CPU in Triton's
interpreter and on a GPU where there is one; and compiled for several where there is none.

Tiles are made small, so that short sequences span several. Memory that the kernels ask for uninitialised is NaN, and
bits are ones, which drop nothing.
"""

import ast
import csv
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton is not installed: pip install txl-hf[triton]")

from transformers import ParakeetEncoder, ParakeetEncoderConfig

import hub_kernel
import oracle
import txl_hf.kernels.attention_triton as kernels
import txl_hf.kernels.softmax as adaptive
import txl_hf.kernels.softmax_triton as softmax_kernels
from models import random_softmax, small_config
from sass import overwritten_operands
from txl_hf.conformer import use_relative_attention
from txl_hf.kernels import attention_blocks
from txl_hf.kernels.static_cache import Ring, StaticMemoryCache
from txl_hf.kernels.steps import compile_layers
from txl_hf.transfo_xl.attention_transfo_xl import BACKENDS as ALL_BACKENDS
from txl_hf.transfo_xl.attention_transfo_xl import (
    AttentionInputs,
    choose_backend,
    eager_relative_attention,
    hidden_keys,
    hide,
)

DEVICE = "cpu" if kernels.INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def blocks_of_few_logits(monkeypatch):
    """The losses of the small models here are computed block by block, as those of large ones are."""
    monkeypatch.setattr("txl_hf.transfo_xl.adaptive_transfo_xl.FEW_LOGITS", -1)


# Where the interpreter does not run the kernels a GPU has to: then `-m gpu` selects every test of this file.
if not kernels.INTERPRETED:
    pytestmark = [
        pytest.mark.gpu,
        pytest.mark.skipif(
            not torch.cuda.is_available(),
            reason="without a GPU the kernels need TRITON_INTERPRET=1 before txl_hf is imported",
        ),
    ]
NAMES = ("query", "key", "value", "rel_key", "content_bias", "position_bias", "rel_bias")
# B, H, L, m, Dh; tile; window; which keys are masked; which optional tensors are None.
CASES = {
    "B2-H2-L5-m7-D38": ((2, 2, 5, 7, 38), 16, None, False, ()),
    "B1-H2-L1-m0-D41": ((1, 2, 1, 0, 41), 16, None, False, ()),
    "B2-H1-L1-m100-D64-masked": ((2, 1, 1, 100, 64), 16, None, True, ()),
    "B1-H2-L63-m7-D41": ((1, 2, 63, 7, 41), 16, None, False, ("rel_bias",)),
    "B1-H1-L65-m64-D38-window5-masked": ((1, 1, 65, 64, 38), 16, 5, True, ()),
    "B2-H1-L65-m0-D64-window0": ((2, 1, 65, 0, 64), 32, 0, False, ("position_bias",)),
    "B1-H1-L130-m100-D64": ((1, 1, 130, 100, 64), 32, None, False, ("rel_bias",)),
    "B1-H1-L130-m7-D128-masked": ((1, 1, 130, 7, 128), 64, None, True, ("content_bias", "rel_bias")),
    "B1-H1-L40-m64-D41-window1000": ((1, 1, 40, 64, 41), 16, 1000, True, ("content_bias", "position_bias")),
    "B2-H2-L33-m20-D16-absolute": ((2, 2, 33, 20, 16), 16, 30, False, ("rel_key", "position_bias", "rel_bias")),
    "B2-H2-L17-m0-D8": ((2, 2, 17, 0, 8), 16, None, True, ()),
}
# What hides keys, as options of `aot_triton.py`.
HIDDEN = {
    "keys": ("--masked",),
    "far": ("--window", "100"),
    "documents": ("--documents",),
    "all with biases": ("--masked", "--window", "100", "--documents", "--bias"),
    "nothing of the future": ("--future", "191"),
    "some of the future": ("--future", "64", "--masked", "--window", "100", "--documents", "--bias"),
    "any pair": ("--future", "191", "--any-mask"),
}
# B, H, L, m, Dh; future; window; which keys or pairs are masked; the chance of a document; which tensors are None.
BOTH_WAYS = {
    "B2-H2-L5-m7-D38-all": ((2, 2, 5, 7, 38), 4, None, False, 0, ()),
    "B1-H2-L37-m6-D41-3-all-masks": ((1, 2, 37, 6, 41), 3, 20, True, 0.1, ()),
    "B1-H1-L50-m0-D16-all-documents": ((1, 1, 50, 0, 16), 49, None, True, 0.1, ("rel_bias",)),
    "B1-H1-L19-m20-D16-more-absolute": ((1, 1, 19, 20, 16), 30, 5, False, 0, ("rel_key", "position_bias", "rel_bias")),
    "B2-H2-L21-m3-D8-all-any": ((2, 2, 21, 3, 8), 20, None, "any", 0, ()),
    "B2-H1-L17-m0-D16-9-any": ((2, 1, 17, 0, 16), 9, 2, "any", 0, ("content_bias",)),
}
LONG_BOTH_WAYS = {
    "B1-H2-L200-m0-D64-all": ((1, 2, 200, 0, 64), 199, None, True, 0, ("rel_bias",)),
    "B1-H1-L130-m100-D128-64-documents": ((1, 1, 130, 100, 128), 64, 100, False, 0.02, ("rel_bias",)),
    "B2-H2-L100-m0-D41-all-any": ((2, 2, 100, 0, 41), 99, None, "any", 0, ()),
    "B2-H1-L1-m40-D16-0": ((2, 1, 1, 40, 16), 0, None, True, 0, ()),
}
LONG_CASES = {
    "B2-H3-L130-m100-D41-masked": ((2, 3, 130, 100, 41), 16, None, True, ()),
    "B1-H2-L200-m300-D64-window77": ((1, 2, 200, 300, 64), 64, 77, True, ("rel_bias",)),
    "B1-H1-L63-m1000-D128": ((1, 1, 63, 1000, 128), 64, None, False, ("rel_bias",)),
}


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fill new tensors with NaN, and bits with ones, so that a value that no kernel writes is seen."""

    class Torch:
        def __getattr__(self, name):
            return getattr(torch, name)

        def empty(self, *args, **kwargs):
            tensor = torch.empty(*args, **kwargs)
            return torch.full_like(tensor, torch.nan if tensor.is_floating_point() else -1)

        def empty_like(self, tensor):
            return torch.full_like(tensor, torch.nan)

    monkeypatch.setattr(kernels, "torch", Torch())


@pytest.fixture(params=["two kernels", "one kernel"])
def backward_kernels(request, monkeypatch):
    """The kernels of the backward pass: those in use, and the one that benchmarks/attention_kernel.py can time."""
    monkeypatch.setattr(kernels, "ONE_BACKWARD_KERNEL", request.param == "one kernel")


def draw(shape, missing=(), masked=False, seed=0, future=None):
    B, H, L, m, D = shape
    K = m + L
    n = K + (future or 0)
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, H, L, D), (B, H, K, D), (B, H, K, D), (H, n, D), (H, D), (H, D), (H, n)]
    tensors = {
        name: None if name in missing else torch.randn(size, generator=generator, dtype=torch.float64)
        for name, size in zip(NAMES, shapes, strict=True)
    }
    key_mask = (torch.rand(B, K, generator=generator) > 0.3).to(DEVICE) if masked else None
    cotangent = torch.randn(B, H, L, D, generator=generator, dtype=torch.float64)
    return tensors, key_mask, cotangent


def exact_scores(inputs):
    """By another way than eager's: a gather in place of the shift."""
    query, key, rel_key = inputs.query, inputs.key, inputs.rel_key
    L, K = query.shape[-2], key.shape[-2]
    content = (query if inputs.content_bias is None else query + inputs.content_bias[:, None]) @ key.transpose(-1, -2)
    position = torch.zeros_like(content)
    if rel_key is not None:
        biased = query if inputs.position_bias is None else query + inputs.position_bias[:, None]
        position = biased @ rel_key.transpose(-1, -2)
        position = position if inputs.rel_bias is None else position + inputs.rel_bias[:, None]
        row = torch.arange(L - 1, -1, -1)[:, None] + torch.arange(K)
        row = row.clamp(max=rel_key.shape[1] - 1).to(position.device)
        position = position.gather(-1, row.expand(*position.shape[:2], L, K))
    return content * inputs.scaling + hide(position * inputs.scaling, inputs)


def exact_relative_attention(inputs, kept=None):
    """Dropout by a mask that is given."""
    probabilities = F.softmax(exact_scores(inputs), -1)
    if kept is not None:
        probabilities = probabilities * kept / (1 - inputs.dropout)
    return probabilities @ inputs.value, probabilities


class WithoutProbabilities(torch.autograd.Function):
    """Attention whose gradient takes from the output what eager takes from the probabilities: their mean gradient.

    A kernel that keeps no probabilities has no other way. Where a query sees few keys, differences of nearly equal
    numbers are all of the gradient, and this rounds about twice as much of them away.
    """

    @staticmethod
    def forward(ctx, scores, value):
        normalizer = scores.logsumexp(-1, keepdim=True)
        output = (scores - normalizer).exp() @ value
        ctx.save_for_backward(scores, value, output, normalizer)
        return output

    @staticmethod
    def backward(ctx, cotangent):
        scores, value, output, normalizer = ctx.saved_tensors
        probabilities = (scores - normalizer).exp()
        mean = (cotangent * output).sum(-1, keepdim=True)
        gradient = probabilities * (cotangent @ value.transpose(-1, -2) - mean)
        return gradient, probabilities.transpose(-1, -2) @ cotangent


def attention_without_probabilities(inputs):
    return WithoutProbabilities.apply(exact_scores(inputs), inputs.value), None


def prepare(tensors, dtype, scaling=0.3, **options):
    """AttentionInputs of a dtype on the device that is tested, from tensors by name; all of them ask for gradients."""
    leaves = {
        name: None if tensor is None else tensor.to(DEVICE, dtype).detach().requires_grad_()
        for name, tensor in tensors.items()
    }
    return AttentionInputs(**leaves, scaling=scaling, **options)


def leaves_of(inputs):
    return {name: getattr(inputs, name) for name in NAMES if getattr(inputs, name) is not None}


def differentiate(attention, tensors, cotangent, dtype, **options):
    """The output and the gradients by name."""
    inputs = prepare(tensors, dtype, **options)
    output, _ = attention(inputs)
    leaves = leaves_of(inputs)
    gradients = torch.autograd.grad(output, list(leaves.values()), cotangent.to(DEVICE, dtype))
    return {"output": output.detach()} | dict(zip(leaves, gradients, strict=True))


def errors(results, exact):
    return {
        name: ((results[name].double() - value.double()).norm() / value.double().norm().clamp(min=1e-30)).item()
        for name, value in exact.items()
    }


def begin_documents(shape, chance, seed=0):
    """first_key, (B, L), where a document begins at each token of the segment with this chance."""
    B, _, L, m, _ = shape
    begins = torch.rand(B, L, generator=torch.Generator().manual_seed(seed)) < chance
    return torch.where(begins, torch.arange(m, m + L), 0).cummax(dim=1).values.to(DEVICE)


def draw_hidden(shape, future, seed=0):
    """Which keys a query does not see, in no order; some queries see nothing."""
    B, _, L, m, _ = shape
    hidden = torch.rand(B, 1, L, m + L, generator=torch.Generator().manual_seed(seed)) > 0.5
    hidden |= torch.arange(m + L) > torch.arange(m, m + L)[:, None] + future
    hidden[-1, :, :: L - 2] = True
    return hidden.to(DEVICE)


def assert_within_budget(shape, window, masked, missing, dtype, first_key=None, future=None):
    """Against fp64, at most twice what eager is off in the same dtype; in fp32, where the kernels round as PyTorch
    does, or what it is off without keeping probabilities.

    On a GPU a kernel adds the shares of K keys, and of K distances, in fp32 one after another, as every attention does
    that keeps no probabilities, and cuBLAS does not: there the error may be ε √2K, as far as so many roundings walk.
    """
    tensors, key_mask, cotangent = draw(shape, missing, masked is True, future=future)
    # All start from what the dtype can represent.
    tensors = {name: None if tensor is None else tensor.to(dtype).double() for name, tensor in tensors.items()}
    cotangent = cotangent.to(dtype).double()
    options = {"key_mask": key_mask, "window": window, "scaling": shape[-1] ** -0.5, "first_key": first_key}
    options |= {"future": future, "hidden": draw_hidden(shape, future) if masked == "any" else None}
    exact = differentiate(exact_relative_attention, tensors, cotangent, torch.float64, **options)
    # A query that sees nothing has scores whose exponentials no sum of them is told apart from.
    peers = [eager_relative_attention]
    peers += [attention_without_probabilities] * (dtype == torch.float32 and masked != "any")
    inexact = [errors(differentiate(attention, tensors, cotangent, dtype, **options), exact) for attention in peers]
    result = differentiate(kernels.triton_relative_attention, tensors, cotangent, dtype, **options)
    assert all(tensor.dtype == dtype for tensor in result.values())
    walked = 1e-6 if kernels.INTERPRETED else max(1e-6, torch.finfo(dtype).eps * (2 * (shape[2] + shape[3])) ** 0.5)
    floor = {torch.float32: walked, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    # A gradient that is zero, as with one visible key, has no relative error.
    exact = {name: tensor for name, tensor in exact.items() if tensor.norm() > 1e-9}
    for name, error in errors(result, exact).items():
        expected = max(found[name] for found in inexact)
        assert error <= max(2 * expected, floor), f"{name}: {error:.2e}, in PyTorch {expected:.2e}"
    assert all(tensor.isfinite().all() for tensor in result.values())


@pytest.mark.usefixtures("backward_kernels")
@pytest.mark.parametrize(
    "backward_kernels", ["two kernels", pytest.param("one kernel", marks=pytest.mark.slow)], indirect=True
)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case[0][-1] == 128 else ()) for case in CASES.values()],
    ids=CASES,
)
def test_output_and_gradients_agree_with_eager(case, monkeypatch):
    shape, tile, window, masked, missing = case
    monkeypatch.setattr(kernels, "LARGEST_TILE", tile)
    assert_within_budget(shape, window, masked, missing, torch.float32)


@pytest.mark.usefixtures("backward_kernels")
@pytest.mark.parametrize(
    "name, chance",
    [
        ("B2-H2-L5-m7-D38", 0.5),
        ("B2-H1-L1-m100-D64-masked", 1.0),
        ("B1-H1-L65-m64-D38-window5-masked", 0.1),
        pytest.param("B2-H1-L65-m0-D64-window0", 1.0, marks=pytest.mark.slow),
        pytest.param("B1-H1-L130-m100-D64", 0.05, marks=pytest.mark.slow),
        pytest.param("B2-H2-L33-m20-D16-absolute", 0.1, marks=pytest.mark.slow),
        ("B2-H2-L17-m0-D8", 0.3),
    ],
)
def test_documents_that_begin_inside_a_segment_agree_with_eager(name, chance, monkeypatch):
    """With every other mask: padding, a window, neither; at the first token, at each and at some."""
    shape, tile, window, masked, missing = CASES[name]
    monkeypatch.setattr(kernels, "LARGEST_TILE", tile)
    first_key = begin_documents(shape, chance)
    assert first_key.any()
    assert_within_budget(shape, window, masked, missing, torch.float32, first_key)


@pytest.mark.usefixtures("backward_kernels")
@pytest.mark.parametrize("case", BOTH_WAYS.values(), ids=BOTH_WAYS)
def test_both_directions_agree_with_eager(case, monkeypatch):
    """With padding on both sides and within, windows, documents; any mask, where a query may see nothing."""
    assert_both_ways_within_budget(case, torch.float32, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_both_directions_stay_within_twice_the_error_of_eager(dtype):
    assert_within_budget((2, 2, 40, 9, 16), None, "any", (), dtype, future=39)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", (BOTH_WAYS | LONG_BOTH_WAYS).values(), ids=BOTH_WAYS | LONG_BOTH_WAYS)
def test_both_directions_of_long_sequences_agree_with_eager(case, dtype, monkeypatch):
    assert_both_ways_within_budget(case, dtype, monkeypatch)


def assert_both_ways_within_budget(case, dtype, monkeypatch):
    shape, future, window, masked, chance, missing = case
    monkeypatch.setattr(kernels, "LARGEST_TILE", 16)
    first_key = begin_documents(shape, chance) if chance else None
    assert_within_budget(shape, window, masked, missing, dtype, first_key, future)


@pytest.mark.parametrize("padded", [False, True])
def test_an_encoder_of_transformers_takes_the_kernels(padded, monkeypatch):
    """Where `"auto"` prefers them, as on a GPU in half precision; outputs and gradients are transformers' own."""
    config = ParakeetEncoderConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, subsampling_conv_channels=4
    )
    torch.manual_seed(0)
    encoder, ran = ParakeetEncoder(config).eval().to(DEVICE), []
    # 8 times 21 frames and 3 more, of which the second row has half.
    features = torch.randn(2, 171, config.num_mel_bins, device=DEVICE)
    mask = torch.arange(171, device=DEVICE) < torch.tensor([[171], [80]], device=DEVICE) if padded else None
    frames = encoder(features, attention_mask=mask).last_hidden_state.shape[1]
    real = torch.arange(frames) < torch.tensor([[frames], [10 if padded else frames]])

    def differentiated():
        output = encoder(features, attention_mask=mask).last_hidden_state[real]
        encoder.zero_grad()
        output.sin().sum().backward()
        return [output.detach(), *(parameter.grad for parameter in encoder.parameters())]

    expected = differentiated()
    monkeypatch.setattr(kernels, "is_default", lambda query: True)
    attend = kernels.triton_relative_attention
    watched = replace(ALL_BACKENDS["txl_triton"], run=lambda inputs: ran.append(inputs.hidden) or attend(inputs))
    monkeypatch.setitem(ALL_BACKENDS, "txl_triton", watched)
    use_relative_attention(encoder)
    torch.testing.assert_close(differentiated(), expected, atol=1e-5, rtol=1e-5)
    assert len(ran) == 1 and (ran[0] is not None) == padded


@torch.no_grad()
def test_the_default_takes_the_kernels_before_blocks(monkeypatch):
    monkeypatch.setattr(kernels, "is_default", lambda query: True)
    monkeypatch.setattr(attention_blocks, "BLOCK_SCORES", 1)
    inputs = prepare(draw((1, 1, 5, 0, 8), future=4)[0], torch.float32, future=4)
    assert choose_backend(inputs).name == "txl_triton"
    for options, reason in (
        ({"score_bias": torch.zeros(1, 1, 5, 5, device=DEVICE)}, "score_bias"),
        ({"order": torch.arange(5, device=DEVICE)}, "in order of time"),
    ):
        refused = inputs._replace(**options)
        assert reason in ALL_BACKENDS["txl_triton"].refusal(refused)
    assert choose_backend(inputs._replace(score_bias=torch.zeros(1, 1, 5, 5, device=DEVICE))).name == "txl_blocks"


@pytest.mark.parametrize("missing", [(), ("rel_bias",), ("rel_key", "position_bias", "rel_bias")], ids=str)
@pytest.mark.parametrize("window", [None, 38, 20], ids=lambda window: f"window{window}")
@pytest.mark.parametrize("hides", ["nothing", "mask", "documents"])
@torch.no_grad()
def test_one_query_reads_the_slots_of_a_ring(missing, window, hides, monkeypatch):
    """The oldest key lies in any slot, the last one among them, whose key every query saw that knew of no order."""
    monkeypatch.setattr(kernels, "LARGEST_TILE", 16)
    tensors, key_mask, _ = draw((2, 2, 1, 39, 41), missing, masked=hides == "mask")
    first_key = torch.tensor([[3], [30]], device=DEVICE) if hides == "documents" else None
    for newest in (0, 7, 38, 39):
        order = (torch.arange(40) - 1 - newest).remainder(40).to(DEVICE)
        options = {"key_mask": key_mask, "window": window, "first_key": first_key, "order": order}
        inputs = prepare(tensors, torch.float32, **options)
        assert ALL_BACKENDS["txl_triton"].refusal(inputs) is None
        found, expected = kernels.triton_relative_attention(inputs)[0], eager_relative_attention(inputs)[0]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    with torch.enable_grad():
        assert "in order of time" in ALL_BACKENDS["txl_triton"].refusal(inputs)


@torch.no_grad()
def test_a_static_cache_turns_under_the_kernels(make_model, make_ids, monkeypatch):
    """No key is moved for a token: each is written into the slot of the one that is forgotten."""
    ids, found = make_ids(2, 20).to(DEVICE), []
    monkeypatch.setattr(Ring, "unroll", lambda ring, layers: setattr(ring, "is_turning", False))
    for backend in ("eager", "txl_triton"):
        model = make_model(backend).to(DEVICE).eval()
        cache = StaticMemoryCache(model.config)
        parts = [model(part, past_key_values=cache).logits for part in (ids[:, :4], *ids[:, 4:].split(1, 1))]
        assert cache.ring.turned == 16
        found.append(torch.cat(parts, dim=1))
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)


def test_a_model_reads_documents_with_the_kernels(make_model, make_ids, monkeypatch):
    """Nothing falls back to another backend."""
    ids, results, seen = make_ids(2, 12).to(DEVICE), [], []
    resets = torch.zeros(2, 12, dtype=torch.bool, device=DEVICE)
    resets[[0, 0, 1, 1], [0, 3, 7, 8]] = True
    attend = kernels.triton_relative_attention
    watched = replace(ALL_BACKENDS["txl_triton"], run=lambda inputs: seen.append(inputs.first_key) or attend(inputs))
    monkeypatch.setitem(ALL_BACKENDS, "txl_triton", watched)
    for backend in ("eager", "txl_triton"):
        model, memory, losses = make_model(backend, gating="gru").to(DEVICE), {}, []
        for part, begins in zip(ids.split(6, 1), resets.split(6, 1), strict=True):
            outputs = model(part, resets=begins, labels=part, **memory)
            memory = {"mems": outputs.mems, "mems_mask": outputs.mems_mask}
            losses.append(outputs.losses)
        torch.cat(losses).sum().backward()
        results.append([*losses, *(parameter.grad for parameter in model.parameters())])
    assert len(seen) == 4 and all(first_key is not None for first_key in seen)
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("hides", ["mask", "reset inside"])
@torch.no_grad()
def test_a_model_with_the_kernels_reads_nothing_of_a_hidden_memory_that_is_nan(make_model, make_ids, hides):
    model, ids = make_model("txl_triton").to(DEVICE), make_ids(2, 6).to(DEVICE)
    mems = model(make_ids(2, 4, seed=1).to(DEVICE)).mems
    real = torch.ones(2, 4, dtype=torch.bool, device=DEVICE)
    expected = model(ids[1:], mems=tuple(states[1:] for states in mems)).logits
    for states in mems:
        states[0] = torch.nan
    begin, resets = 0, None
    if hides == "mask":
        real[0] = False
    else:
        begin, resets = 2, torch.zeros(2, 6, dtype=torch.bool, device=DEVICE)
        resets[0, begin] = True
    found = model(ids, mems=mems, mems_mask=real, resets=resets).logits
    torch.testing.assert_close(found[1:], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[:1, begin:], model(ids[:1, begin:]).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chance", [0.01, 0.2])
@pytest.mark.parametrize("case", (CASES | LONG_CASES).values(), ids=CASES | LONG_CASES)
def test_long_rows_of_documents_agree_with_eager(case, chance, dtype, monkeypatch):
    shape, tile, window, masked, missing = case
    monkeypatch.setattr(kernels, "LARGEST_TILE", tile)
    assert_within_budget(shape, window, masked, missing, dtype, begin_documents(shape, chance))


@pytest.mark.parametrize("future", [None, 63], ids=lambda future: f"future{future}")
def test_tiles_of_other_documents_are_not_read(future, monkeypatch):
    """Two documents that fill tiles, after a memory: NaN in one of them, or in the memory, is never multiplied."""
    monkeypatch.setattr(kernels, "LARGEST_TILE", 16)
    shape = (1, 1, 64, 32, 16)
    first_key = torch.tensor([[32] * 32 + [64] * 32], device=DEVICE)
    for poisoned, clean in ((slice(0, 64), slice(64, 96)), (slice(64, 96), slice(32, 64))):
        tensors, _, cotangent = draw(shape, future=future)
        for name in ("key", "value"):
            tensors[name][:, :, poisoned] = torch.nan
        # Of queries and their gradients, those of the segment.
        tensors["query"][:, :, max(0, poisoned.start - 32) : poisoned.stop - 32] = torch.nan
        result = differentiate(
            kernels.triton_relative_attention, tensors, cotangent, torch.float32, first_key=first_key, future=future
        )
        for name in ("output", "query"):
            assert result[name][:, :, clean.start - 32 : clean.stop - 32].isfinite().all(), name
        for name in ("key", "value"):
            assert result[name][:, :, clean].isfinite().all(), name


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", (CASES | LONG_CASES).values(), ids=CASES | LONG_CASES)
def test_long_sequences_and_low_precision_agree_with_eager(case, dtype, monkeypatch):
    shape, tile, window, masked, missing = case
    monkeypatch.setattr(kernels, "LARGEST_TILE", tile)
    assert_within_budget(shape, window, masked, missing, dtype)


@pytest.mark.usefixtures("backward_kernels")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("D", [pytest.param(38, marks=pytest.mark.slow), 41, pytest.param(64, marks=pytest.mark.slow)])
def test_low_precision_stays_within_twice_the_error_of_eager(D, dtype):
    assert_within_budget((2, 2, 63, 40, D), 50, True, (), dtype)


@pytest.mark.parametrize("future", [None, 7], ids=lambda future: f"future{future}")
@pytest.mark.parametrize("window", [None, 4], ids=lambda w: f"window{w}")
def test_output_is_the_loop_over_i_and_j(window, future, monkeypatch):
    monkeypatch.setattr(kernels, "LARGEST_TILE", 16)
    shape = (1, 2, 19, 6, 5)
    tensors, key_mask, _ = draw(shape, masked=True, future=future)
    expected, _ = oracle.attention_of(tensors, key_mask.cpu(), window, future or 0)
    options = {"key_mask": key_mask, "window": window, "scaling": shape[-1] ** -0.5, "future": future}
    output, probabilities = kernels.triton_relative_attention(prepare(tensors, torch.float32, **options))
    assert probabilities is None
    torch.testing.assert_close(output.cpu().double(), expected, atol=2e-6, rtol=2e-6)


@pytest.fixture
def drawn_bits(monkeypatch):
    """Whatever is drawn for dropout while the test runs."""
    drawn, operator = [], kernels.dropout_bits_op
    monkeypatch.setattr(kernels, "dropout_bits_op", lambda *args: drawn.append(operator(*args)) or drawn[-1])
    return drawn


def unpacked(bits, K):
    """Bits (B, H, L, words) of 32 to a word as booleans (B, H, L, K)."""
    return (bits[..., None] >> torch.arange(32, device=bits.device) & 1).flatten(-2)[..., :K].bool()


@pytest.mark.usefixtures("backward_kernels")
@pytest.mark.parametrize(
    "shape, tile, window, masked, chance, future",
    [
        ((2, 2, 23, 18, 16), 16, 30, False, 0.0, None),
        ((2, 1, 37, 98, 24), 64, None, True, 0.1, None),
        ((1, 2, 37, 5, 16), 16, 30, True, 0.05, 20),
        ((1, 1, 37, 5, 16), 16, 30, "any", 0, 20),
    ],
    ids=["window", "mask-and-documents", "future", "future-of-any-mask"],
)
def test_dropout_differentiates_through_the_bits_that_it_drew(
    shape, tile, window, masked, chance, future, drawn_bits, monkeypatch
):
    monkeypatch.setattr(kernels, "LARGEST_TILE", tile)
    tensors, key_mask, cotangent = draw(shape, masked=masked is True, future=future)
    first_key = begin_documents(shape, chance) if chance else None
    options = {"window": window, "scaling": 0.125, "dropout": 0.3, "key_mask": key_mask, "first_key": first_key}
    options |= {"future": future, "hidden": draw_hidden(shape, future) if masked == "any" else None}
    result = differentiate(kernels.triton_relative_attention, tensors, cotangent, torch.float32, **options)
    kept = unpacked(drawn_bits[0], shape[2] + shape[3])
    exact_attention = functools.partial(exact_relative_attention, kept=kept)
    exact = differentiate(exact_attention, tensors, cotangent, torch.float64, **options)
    assert max(errors(result, exact).values()) < 2e-6


def test_dropout_repeats_what_it_dropped_with_the_seed_of_pytorch():
    tensors, _, _ = draw((1, 2, 7, 6, 16))
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(kernels.triton_relative_attention(prepare(tensors, torch.float32, dropout=0.3))[0])
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_bits_of_dropout_depend_on_the_position_alone_and_drop_their_share(monkeypatch):
    B, H, L, K = shape = (2, 2, 20, 205)
    first_key = begin_documents((B, H, L, K - L, 0), 0.02)
    visible = ~hidden_keys(L, K, 180, None, DEVICE, first_key).expand(shape)
    masks = []
    for tile in ((16, 128), (32, 256)):
        monkeypatch.setattr(kernels, "_DROPOUT_TILE", dict(zip(("BLOCK_M", "BLOCK_N"), tile, strict=True)))
        bits = kernels.dropout_bits_op(torch.tensor([3], device=DEVICE), first_key.int(), shape, 180, None, 0.25)
        masks.append(unpacked(bits, K))
    assert torch.equal(masks[0][visible], masks[1][visible])
    kept = masks[0]

    def close(found, share):
        return abs(found.float().mean() - share) < 5 * (share * (1 - share) / found.numel()) ** 0.5

    assert close(kept[visible], 0.75)
    # Rows, columns, heads and batch rows each have a mask of their own, and so has each bit of a word.
    for dimension, distance in [(0, 1), (1, 1), (2, 1), *((3, 2**n) for n in range(7))]:
        n = shape[dimension] - distance
        same = kept.narrow(dimension, 0, n) == kept.narrow(dimension, distance, n)
        both = visible.narrow(dimension, 0, n) & visible.narrow(dimension, distance, n)
        assert close(same[both], 0.75**2 + 0.25**2), (dimension, distance)


def test_bits_of_dropout_are_drawn_for_keys_after_the_query_too(monkeypatch):
    monkeypatch.setattr(kernels, "_DROPOUT_TILE", {"BLOCK_M": 16, "BLOCK_N": 64})
    bits = kernels.dropout_bits_op(torch.tensor([3], device=DEVICE), None, (1, 1, 128, 128), None, 127, 0.25)
    # Those that are not drawn are ones. Without a future the first queries see nothing of these keys.
    assert 0.7 < unpacked(bits, 128)[:, :, :16, 64:].float().mean() < 0.8


def test_everything_dropped_is_zero():
    tensors, _, cotangent = draw((1, 1, 5, 3, 8))
    result = differentiate(kernels.triton_relative_attention, tensors, cotangent, torch.float32, dropout=1.0)
    assert all((tensor == 0).all() for tensor in result.values())


@pytest.mark.parametrize("columns", ["side by side", pytest.param("apart", marks=pytest.mark.slow)])
def test_strided_inputs_give_what_contiguous_ones_do(columns, monkeypatch):
    """Heads split off a projection, a memory that is a slice of a buffer, rel_key transposed, a broadcast gradient,
    and columns that are not side by side."""
    monkeypatch.setattr(kernels, "LARGEST_TILE", 16)
    # Heads of another width would be copied before a kernel sees them.
    shape = B, H, L, m, D = 2, 2, 21, 12, 32
    tensors, key_mask, _ = draw(shape, masked=True)
    contiguous = prepare(tensors, torch.float32, key_mask=key_mask, window=17, scaling=0.2)

    def strided(tensor):
        buffer = torch.full((B, 50, H, D), torch.nan, device=DEVICE)
        view = buffer[:, 7 : 7 + tensor.shape[2]].transpose(1, 2)
        view.copy_(tensor.detach())
        return view.requires_grad_()

    def apart(tensor):
        return tensor.detach().mT.contiguous().mT.requires_grad_()

    relaid = strided if columns == "side by side" else apart
    odd = contiguous._replace(
        query=relaid(contiguous.query),
        key=relaid(contiguous.key),
        value=relaid(contiguous.value),
        rel_key=contiguous.rel_key.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(),
        # Columns that are not side by side have to be copied.
        content_bias=contiguous.content_bias.detach().T.contiguous().T.requires_grad_(),
    )
    results = []
    for inputs in (contiguous, odd):
        output, _ = kernels.triton_relative_attention(inputs)
        results.append([output, *torch.autograd.grad(output.sum(), list(leaves_of(inputs).values()))])
    # On a GPU the gradients of rel_key and the biases are added up in any order; the interpreter knows one.
    tolerance = 0 if kernels.INTERPRETED else 1e-6
    for expected, result in zip(*results, strict=True):
        atol = tolerance * expected.abs().max().item()
        torch.testing.assert_close(result, expected, atol=atol, rtol=tolerance)


@pytest.mark.parametrize("future", [None, 10], ids=lambda future: f"future{future}")
def test_deterministic_gradients_are_the_same_gradients(future, monkeypatch):
    monkeypatch.setattr(kernels, "LARGEST_TILE", 16)
    # Two programs share three blocks of queries.
    monkeypatch.setattr(kernels, "_partial_sums", lambda H, K, D: 2)
    shape = (1, 2, 38, 9, 16) if future is None else (1, 1, 33, 0, 8)
    tensors, key_mask, cotangent = draw(shape, masked=True, future=future)
    options = {"key_mask": key_mask, "window": 20, "scaling": 0.25, "future": future}
    monkeypatch.setattr(kernels, "ONE_BACKWARD_KERNEL", True)
    launch, launched = kernels._launch_backward_key, []
    monkeypatch.setattr(kernels, "_launch_backward_key", lambda *args: launched.append(0) or launch(*args))
    expected = differentiate(kernels.triton_relative_attention, tensors, cotangent, torch.float32, **options)
    assert not launched
    torch.use_deterministic_algorithms(True)
    try:
        results = [
            differentiate(kernels.triton_relative_attention, tensors, cotangent, torch.float32, **options)
            for _ in range(2)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    # The one kernel has sums that only atomic additions make.
    assert len(launched) == 2
    for name, value in expected.items():
        assert torch.equal(results[0][name], results[1][name])
        torch.testing.assert_close(results[0][name], value, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("backward_kernels")
@pytest.mark.parametrize("wanted", [("query",), ("value",), ("rel_key",), ("content_bias", "rel_bias")], ids="-".join)
def test_gradients_of_some_inputs_only(wanted):
    tensors, _, cotangent = draw((1, 2, 9, 4, 8))
    expected = differentiate(kernels.triton_relative_attention, tensors, cotangent, torch.float32)
    inputs = prepare(tensors, torch.float32)
    for name, leaf in leaves_of(inputs).items():
        leaf.requires_grad_(name in wanted)
    output, _ = kernels.triton_relative_attention(inputs)
    leaves = [getattr(inputs, name) for name in wanted]
    for name, gradient in zip(wanted, torch.autograd.grad(output, leaves, cotangent.to(output)), strict=True):
        torch.testing.assert_close(gradient, expected[name])


def test_autocast_computes_in_its_dtype():
    tensors, _, _ = draw((1, 2, 9, 4, 8))
    inputs = prepare(tensors, torch.float32)
    expected, _ = kernels.triton_relative_attention(inputs)
    with torch.autocast(DEVICE, torch.bfloat16):
        output, _ = kernels.triton_relative_attention(inputs)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, atol=0.05, rtol=0.05)
    assert torch.autograd.grad(output.sum(), inputs.query)[0].dtype == torch.float32


@pytest.mark.parametrize("dropout, future", [(0.0, None), (0.2, None), (0.2, 8)])
def test_compiles_in_one_graph(dropout, future):
    shape = (1, 2, 9, 4, 8)
    tensors, key_mask, cotangent = draw(shape, masked=True, future=future)
    options = {"key_mask": key_mask, "window": 6, "dropout": dropout, "first_key": begin_documents(shape, 0.3)}
    options |= {} if future is None else {"future": future, "hidden": draw_hidden(shape, future)}
    compiled = torch.compile(kernels.triton_relative_attention, backend="aot_eager", fullgraph=True)
    results = []
    for attention in (kernels.triton_relative_attention, compiled):
        torch.manual_seed(0)
        results.append(differentiate(attention, tensors, cotangent, torch.float32, **options))
    for expected, result in zip(results[0].values(), results[1].values(), strict=True):
        torch.testing.assert_close(result, expected)


def test_the_folder_of_make_kernel_computes_the_same_by_itself(tmp_path):
    """Imported as the `kernels` library does, beside the package, whose operators stay what they were."""
    hub_kernel.main(["--output", str(tmp_path)])
    build = tmp_path / "build" / "torch-universal"
    metadata = json.loads((build / "metadata.json").read_text())
    assert metadata["backend"] == {"type": "cuda"} and metadata["python-depends"] == []
    spec = importlib.util.spec_from_file_location(metadata["id"], build / "__init__.py")
    sys.modules[metadata["id"]] = kernel = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernel)
    shape, future = (2, 2, 9, 4, 8), 8
    options = {"future": future, "hidden": draw_hidden(shape, future), "scaling": 0.3}
    tensors, _, cotangent = draw(shape, future=future)

    def of_folder(inputs):
        assert inputs.key_mask is None and inputs.window is None
        return kernel.relative_attention(**leaves_of(inputs), **options), None

    attentions = (eager_relative_attention, of_folder, kernels.triton_relative_attention)
    expected, *results = (differentiate(attend, tensors, cotangent, torch.float32, **options) for attend in attentions)
    for found in results:
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="score_bias"):
        kernel.relative_attention(
            *[torch.zeros(1, 1, 2, 8, device=DEVICE)] * 3, future=1, score_bias=torch.zeros(2, 2)
        )
    text = "\n".join(path.read_text(encoding="utf-8") for path in build.rglob("*.py"))
    imported = {*re.findall(r"^ *(?:import|from) (\w+)[\w.]*(?: (?:as|import) .*)?$", text, re.MULTILINE)}
    assert imported - {*sys.stdlib_module_names} == {"torch", "triton"}, "neither the package nor transformers"


def test_operator_keeps_its_promises_to_pytorch():
    """Schema, shapes and strides without computing, and gradients under tracing, as PyTorch's own checks see them."""
    tensors, key_mask, _ = draw((2, 2, 6, 3, 8), masked=True)
    inputs = [tensor.to(DEVICE, torch.float32).requires_grad_() for tensor in tensors.values()]
    first_key = begin_documents((2, 2, 6, 3, 8), 0.3).int()
    torch.library.opcheck(
        kernels.relative_attention_op, (*inputs, key_mask, first_key, None, None, None, 5, None, 0.3, 0.0, None)
    )
    inputs = [
        tensor.to(DEVICE, torch.float32).requires_grad_() for tensor in draw((2, 2, 6, 3, 8), future=5)[0].values()
    ]
    apart = [tensor.detach().mT.contiguous().mT.requires_grad_() for tensor in inputs[:3]]
    seen = kernels._pack(draw_hidden((2, 2, 6, 3, 8), 5)[:, 0])
    torch.library.opcheck(
        kernels.relative_attention_op, (*apart, *inputs[3:], None, None, None, *seen, None, 5, 0.3, 0.0, None)
    )
    seed = torch.tensor([1], device=DEVICE)
    torch.library.opcheck(kernels.dropout_bits_op, (seed, first_key, (2, 2, 6, 9), 5, None, 0.3))


def test_says_why_it_cannot_be_used(monkeypatch):
    def query(D=8, dtype=torch.float32):
        return torch.zeros(1, 1, 2, D, dtype=dtype, device=DEVICE)

    assert kernels.why_not_triton(query()) is None
    assert "129" in kernels.why_not_triton(query(D=129))
    assert "float64" in kernels.why_not_triton(query(dtype=torch.float64))
    with pytest.raises(ValueError, match="float64"):
        kernels.triton_relative_attention(AttentionInputs(*[query(dtype=torch.float64)] * 3, scaling=1.0))
    with pytest.raises(ValueError, match="scaling is 0"):
        kernels.triton_relative_attention(AttentionInputs(*[query()] * 3, scaling=0.0))
    with monkeypatch.context() as patch:
        patch.setattr(kernels.triton, "__version__", "3.3.1+cu126")
        assert "3.3.1+cu126 is older than 3.4" in kernels.why_not_triton(query())
        patch.setattr(kernels.triton, "__version__", "3.10.0")
        assert kernels.why_not_triton(query()) is None
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    assert "cpu" in kernels.why_not_triton(query().cpu())
    monkeypatch.setattr(kernels, "triton", None)
    assert "not installed" in kernels.why_not_triton(query())


def test_a_machine_without_a_compiler_does_without(monkeypatch, caplog):
    """Triton builds a module in C before its first launch: many images have no gcc, or no headers of Python. Where it
    can, a line of log says that kernels will be compiled."""
    said = []
    caplog.set_level("INFO", logger=kernels.__name__)

    class Driver:
        def get_current_target(self):
            if said:
                raise RuntimeError(said[0])

    query = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=(1, 1, 2, 64))
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    # Without what it remembers, which other tests go on with.
    monkeypatch.setattr(kernels, "_try_driver", functools.cache(kernels._try_driver.__wrapped__))
    # TorchDynamo asks too, of a GPU that is there, and of the one that is chosen.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(kernels.triton, "runtime", SimpleNamespace(driver=SimpleNamespace(active=Driver())))

    def answer(x):
        return x + (1 if kernels.why_triton_cannot_begin() is None else 2)

    for sentence in (None, "Failed to find C compiler."):
        kernels._try_driver.cache_clear()
        said[:] = filter(None, [sentence])
        assert kernels.why_not_triton(query) == (sentence and f"Triton cannot begin: {sentence}")
        assert caplog.text.count("Triton compiles kernels at their first call") == 1
        # A layer that is compiled asks too, and stays one graph.
        torch.compiler.reset()
        compiled = torch.compile(answer, backend="eager", fullgraph=True)
        assert compiled(torch.zeros(())) == (2 if sentence else 1)


def test_fp32_is_multiplied_as_pytorch_is_told():
    before = torch.get_float32_matmul_precision()
    try:
        for setting, expected in (("highest", "ieee"), ("high", "tf32")):
            torch.set_float32_matmul_precision(setting)
            assert kernels._precision(torch.float32) == expected
            assert kernels._precision(torch.bfloat16) == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)


def test_more_blocks_of_queries_than_a_grid_has_room_for(monkeypatch):
    """Then a program takes several."""
    monkeypatch.setattr(kernels, "LARGEST_TILE", 16)
    tensors, key_mask, cotangent = draw((1, 2, 40, 9, 16), masked=True)
    options = {"key_mask": key_mask, "window": 30}
    expected = differentiate(kernels.triton_relative_attention, tensors, cotangent, torch.float32, **options)
    monkeypatch.setattr(kernels, "MOST_PROGRAMS", 2)
    result = differentiate(kernels.triton_relative_attention, tensors, cotangent, torch.float32, **options)
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, atol=1e-5, rtol=1e-5)


def test_rows_that_are_too_far_apart_to_count_are_brought_together():
    """A kernel counts numbers within a head in 32 bits, and 16,384 keys with the batch behind them are more."""
    for keys, same in ((16_000, True), (16_384, False)):
        far = torch.empty(keys, 128, 16, 64, device="meta").permute(1, 2, 0, 3)
        assert (kernels._rows_in_order(far) is far) == same
        assert [part.stride(2) for part in kernels._empty_gradients(far)] == [128 * 16 * 64 if same else 64]


def test_heads_of_any_width_are_read_sixteen_numbers_at_a_time(monkeypatch):
    """41 numbers would be read one by one."""
    seen = []
    operator = kernels.relative_attention_op
    monkeypatch.setattr(kernels, "relative_attention_op", lambda *args: seen.append(args) or operator(*args))
    tensors, _, _ = draw((1, 2, 5, 4, 41))
    output, _ = kernels.triton_relative_attention(prepare(tensors, torch.float32))
    assert output.shape[-1] == 41
    assert {tensor.shape[-1] for tensor in seen[0][:6]} == {48}


def test_no_length_is_compiled_for():
    """Triton would compile anew for numbers that are divisible by 16, unless it is told which they are."""
    lengths, found = {"B", "H", "L", "K", "words", "masks", "window", "future", "threshold"}, 0
    for function in ast.walk(ast.parse(Path(kernels.__file__).read_text(encoding="utf-8"))):
        for decorator in getattr(function, "decorator_list", []):
            if ast.unparse(decorator).startswith("triton.jit("):
                named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in decorator.keywords}
                taken = {argument.arg for argument in function.args.args} & lengths
                assert taken == set(named["do_not_specialize"]), function.name
                found += 1
    assert found == 4


def test_the_package_lives_without_triton():
    """Its kernels are there by name, and say what is missing."""
    code = """
import sys
sys.modules["triton"] = None
import torch, txl_hf
from txl_hf.kernels.attention_triton import why_not_triton
print(why_not_triton(torch.zeros(1, 1, 2, 8)))
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.stdout == "Triton is not installed\n", process.stderr[-2000:]


@pytest.mark.parametrize(
    "options",
    [
        (),
        pytest.param(("--documents",), marks=pytest.mark.slow),
        pytest.param(
            ("--dropout", "0.1", "--masked", "--bias", "--window", "100", "--documents"), marks=pytest.mark.slow
        ),
    ],
    ids=["plain", "documents", "everything"],
)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_compiles_for_sm_90_without_a_gpu(options, dtype, kernel_cache):
    """Everything from autograd down to Triton's argument binding, and what the machine code uses."""
    rows = compiled(kernel_cache, dtype, *options)
    drawing = [row for row in rows if row["kernel"] == "dropout"]
    attending = [row for row in rows if row["kernel"] != "dropout"]
    assert len(attending) == 3 and len(drawing) == (1 if "--dropout" in options else 0)
    assert all(row["spills"] == 0 and row["registers"] <= 128 for row in drawing), drawing
    for row in attending:
        print(row)
        assert row["tensor_core"] >= 16
        # Half of a multiprocessor's 227 KiB: two programs, as many as the registers of the leanest kernel allow.
        assert row["shared"] <= 113 * 1024
        assert row["stack"] <= (512 if row["kernel"] == "backward_query" else 256 if options else 0)
        if not options:
            assert not row["serialized"]


@pytest.mark.parametrize("hidden", ["nothing", *(pytest.param(name, marks=pytest.mark.slow) for name in HIDDEN)])
@pytest.mark.parametrize(
    "width", [64, pytest.param(48, marks=pytest.mark.slow), pytest.param(128, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("dropout", ["0.0", pytest.param("0.1", marks=pytest.mark.slow)])
def test_no_product_reads_what_was_written_over(width, hidden, dropout, kernel_cache):
    """On an H200 the queries of all tiles but the first were others, wherever no mask hid a key."""
    rows = compiled(kernel_cache, "bfloat16", "--widths", str(width), "--dropout", dropout, *HIDDEN.get(hidden, ()))
    assert len(rows) == (4 if float(dropout) else 3)
    assert all(row["overwritten"] == 0 for row in rows), rows


@pytest.mark.slow
@pytest.mark.parametrize("dropout", ["0.0", "0.1"])
def test_one_kernel_for_all_gradients_starts_on_sm_90(dropout, kernel_cache):
    options = ("--one-backward-kernel", "--dropout", dropout, "--widths", "64", "128")
    rows = [row for row in compiled(kernel_cache, "bfloat16", *options) if row["kernel"].startswith("backward")]
    assert [row["kernel"] for row in rows] == ["backward_query"] * 2
    for row in rows:
        print(row)
        assert row["overwritten"] == 0 and not row["serialized"]
        assert row["shared"] <= 227 * 1024


def test_a_product_that_reads_what_was_written_over_is_found():
    loop = """
        /*0010*/ {first} ;
        /*0020*/ HGMMA.64x64x16.F32.BF16 R56, R132, gdesc[UR8], R56 ;
        /*0030*/ {then} ;
        /*0040*/ @!P0 BRA 0x10 ;
    """
    harmless, weights = "FADD R8, R132, R133", "F2FP.BF16.F32.PACK_AB R134, R61, R60"
    assert overwritten_operands(loop.format(first=harmless, then=weights)) == 1
    assert overwritten_operands(loop.format(first=harmless, then="LDS.128 R130, [R2]")) == 2
    assert overwritten_operands(loop.format(first=weights, then=weights)) == 0
    assert overwritten_operands(loop.format(first=harmless, then="ISETP.GT.AND P0, PT, R132, R5, PT")) == 0
    assert overwritten_operands(loop.format(first=harmless, then="STS.128 [R132], R132")) == 0


@pytest.mark.slow
@pytest.mark.parametrize("width", [38, 40, 41])
def test_heads_of_odd_widths_are_padded_so_that_they_spill_no_more_than_others_on_sm_90(width, kernel_cache):
    """As 10 heads of 380 (Penn Treebank's model) and of 410 (WikiText-103's) are."""
    rows = compiled(kernel_cache, "bfloat16", "--widths", str(width))
    assert len(rows) == 3 and {row["width"] for row in rows} == {width}
    for row in rows:
        # The gradient of queries spills at any width, and is the faster for having no more warps.
        assert row["stack"] <= (512 if row["kernel"] == "backward_query" else 0) and row["tensor_core"] >= 16, row


@pytest.mark.slow
@pytest.mark.parametrize("capability, kibibytes", [(80, 99), (86, 99), (89, 99), (90, 227), (100, 227), (120, 99)])
def test_a_program_fits_on_every_gpu(kernel_cache, capability, kibibytes):
    """With everything that it can be asked for: one that wants more shared memory does not start. An A100 has more."""
    options = ("--dropout", "0.1", "--masked", "--bias", "--window", "100", "--documents", "--widths", "64", "128")
    rows = compiled(kernel_cache, "bfloat16", *options, "--capability", str(capability))
    assert len(rows) == 8
    for row in rows:
        print(row)
        assert row["shared"] <= kibibytes * 1024
        # Where it cannot do with 255, the compiler may give a kernel 32 and keep all else in memory.
        assert row["registers"] > 48


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory):
    """Where the kernels of all tests are that are compiled for a GPU, those of other workers too."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "kernels"


def compiled(folder, *options):
    """The rows that `aot_triton.py` prints with these dtypes and options."""
    script = Path(__file__).parents[1] / "aot_triton.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": str(Path(kernels.__file__).parents[2])}
    command = [sys.executable, "-W", "ignore", script, "--dtypes", *options]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(not kernels.INTERPRETED, reason="on a GPU the sweep itself is run")
def test_sweep_times_the_tiles_that_are_right(tmp_path, monkeypatch, capsys):
    """More queries than keys would need three blocks of distances, and the shift has two."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import attention_kernel
    import attention_tiles

    good, bad = (16, 16, 4, 1), (32, 16, 4, 1)
    monkeypatch.setattr(attention_tiles, "SMOKE_CANDIDATES", {64: [good, bad]})
    output = tmp_path / "tiles.csv"
    # Twice as exact as eager, where fp32 is as exact or half so, by the CPU: the gate is for tiles that are wrong.
    options = ["--sweep", "--smoke", "--device", "cpu", "--dtype", "fp16", "--threads", "1", "--output", str(output)]
    assert attention_kernel.main(options) == 0
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = ("kernel", "block_m", "block_n")
    assert [tuple(row[name] for name in columns) for row in rows] == [
        (name, "16", "16") for name in ("forward", "backward_query", "backward_key")
    ]
    printed = capsys.readouterr().out
    for name in ("forward", "backward_query", "backward_key"):
        assert f"{name} 64 {bad} is left out" in printed
        assert f'"{name}": {{64: {good}}}' in printed


@pytest.mark.skipif(not kernels.INTERPRETED, reason="on a GPU the sweep itself is run")
def test_sweep_keeps_what_was_measured_before_it_was_stopped(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import attention_kernel
    import attention_tiles

    def measure(shape, *_):
        if shape[0] == 2:
            raise KeyboardInterrupt
        return {("forward", (16, 16, 4, 1)): [1.0, 1.0]}

    monkeypatch.setattr(attention_tiles, "SMOKE_SHAPES", {"first": (1, 1, 20, 12, 16), "second": (2, 1, 20, 12, 16)})
    monkeypatch.setattr(attention_tiles, "usable", lambda *_: {})
    monkeypatch.setattr(attention_tiles, "measure", measure)
    output = tmp_path / "tiles.csv"
    with pytest.raises(KeyboardInterrupt):
        attention_kernel.main(["--sweep", "--smoke", "--device", "cpu", "--threads", "1", "--output", str(output)])
    with output.open(newline="") as file:
        assert [row["shape"] for row in csv.DictReader(file)] == ["first"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden", ["nothing", "keys", "far", "documents"])
@pytest.mark.parametrize("shape", [(4, 8, 192, 192, 64), (2, 10, 150, 150, 41), (1, 4, 384, 384, 128)], ids=str)
def test_training_shapes_on_a_gpu(shape, hidden, dtype):
    """With the tiles of training, of which the compiler makes other programs than of small ones."""
    documents = begin_documents(shape, 0.02) if hidden == "documents" else None
    assert_within_budget(shape, 100 if hidden == "far" else None, hidden == "keys", (), dtype, documents)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 8, 192, 192, 64), (1, 4, 384, 384, 128)], ids=str)
def test_dropout_of_training_shapes_on_a_gpu(shape, dtype, drawn_bits):
    tensors, _, cotangent = draw(shape)
    tensors = {name: tensor.to(dtype).double() for name, tensor in tensors.items()}
    cotangent, options = cotangent.to(dtype).double(), {"scaling": shape[-1] ** -0.5, "dropout": 0.2}
    result = differentiate(kernels.triton_relative_attention, tensors, cotangent, dtype, **options)
    attention = functools.partial(exact_relative_attention, kept=unpacked(drawn_bits[0], shape[2] + shape[3]))
    exact = differentiate(attention, tensors, cotangent, torch.float64, **options)
    inexact = errors(differentiate(attention, tensors, cotangent, dtype, **options), exact)
    for name, error in errors(result, exact).items():
        assert error <= 2 * inexact[name], name


@pytest.mark.gpu
def test_memory_is_linear_in_the_number_of_keys():
    L, D = 2048, 64
    peaks = []
    for m in (2048, 8192 - 2048):
        tensors, _, cotangent = draw((1, 2, L, m, D))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        differentiate(kernels.triton_relative_attention, tensors, cotangent, torch.bfloat16, scaling=0.125)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    # One head's L × K scores in bf16 would be 32 MiB.
    assert peaks[1] - peaks[0] < 2**24


# --- the softmax -----------------------------------------------------------------------------------------------------

BINS = {
    "div2": {"cutoffs": [9, 30], "div_val": 2},
    "div1": {"cutoffs": [9, 30], "div_val": 1},
    "no-cutoffs": {"cutoffs": [], "div_val": 1},
}
ALL_BINS = [3, 44, 9, 60, 8, 29, 30, 0, 31, 12, 3]
# Bins; targets; whether logits are kept for the backward pass, capacities of the bins, as in a graph.
SOFTMAX_CASES = {
    "div2-of-all-bins": ("div2", ALL_BINS, True),
    "div2-of-all-bins-computed-again": ("div2", ALL_BINS, False),
    "div2-some-ignored": ("div2", [-100, 44, 9, -100, 8, -100, 30], True),
    "div2-empty": ("div2", [], False),
    "div1-some-ignored": ("div1", [-100, 44, 9, -100, 8, -100, 30], False),
    "div1-some-ignored-capacities": ("div1", [-100, 44, 9, -100, 8, -100, 30], True, (4, 7)),
    "div2-of-all-bins-capacities-computed-again": ("div2", ALL_BINS, False, (5, 9)),
    "no-cutoffs": ("no-cutoffs", ALL_BINS, True),
    "no-cutoffs-computed-again": ("no-cutoffs", [7, -100, 44], False),
}
# So that nothing is kept, and blocks are narrow.
LITTLE_ROOM = {"MAX_KEPT_LOGITS": -1, "BLOCK_LOGITS": 99, "MIN_BLOCK_WIDTH": 16, "GPU_BYTES": 99}


@pytest.fixture
def count_fused(monkeypatch):
    """A function that turns the kernels of the softmax on or off, with small tiles, and returns which are called."""

    def turn(on):
        calls = []

        def counted(name):
            operator = getattr(softmax_kernels, name)

            def call(*arguments):
                calls.append(name)
                return operator(*arguments)

            return call

        monkeypatch.setattr(adaptive, "fuses", lambda states: on and states.dtype != torch.float64)
        for name in ("add_statistics", "write_gradient"):
            monkeypatch.setattr(adaptive, name, counted(name))
        return calls

    for name, value in (("COLUMNS", 32), ("TILE", (4, 32)), ("ROW_CHUNKS", 2)):
        monkeypatch.setattr(softmax_kernels, name, value)
    return turn


def softmax_of(changes, dtype=torch.float32):
    return random_softmax(small_config(**changes)).to(DEVICE, dtype)


def losses_and_gradients(softmax, targets, dtype=torch.float32, autocast=None):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(len(targets), 16, generator=generator).to(DEVICE, dtype).requires_grad_()
    softmax.zero_grad()
    with torch.autocast(DEVICE, autocast, enabled=autocast is not None):
        losses = softmax(hidden, torch.tensor(targets, dtype=torch.long, device=DEVICE))
    (losses * torch.linspace(0.5, 2, len(targets), device=DEVICE)).sum().backward()
    return {"losses": losses, "hidden": hidden.grad} | {name: p.grad for name, p in softmax.named_parameters()}


@pytest.mark.parametrize("case", SOFTMAX_CASES.values(), ids=SOFTMAX_CASES)
def test_fused_losses_and_every_gradient_are_those_of_pytorch(count_fused, monkeypatch, case):
    bins, targets, kept, *capacities = case
    for name, value in ({} if kept else LITTLE_ROOM).items():
        monkeypatch.setattr(adaptive, name, value)
    empty = softmax_kernels.padded_empty_like

    def poisoned(logits):
        memory = empty(logits)
        softmax_kernels.with_padding(memory).fill_(torch.nan)
        return memory

    monkeypatch.setattr(adaptive, "padded_empty_like", poisoned)
    softmax = softmax_of(BINS[bins])
    count_fused(False)
    expected = losses_and_gradients(softmax, targets)
    calls = count_fused(True)
    with adaptive.fixed_capacities(*capacities or [None]):
        actual = losses_and_gradients(softmax, targets)
    assert calls.count("add_statistics") == calls.count("write_gradient") >= len(softmax.config.bins)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("rows", [slice(0, 16), slice(3, 16), slice(3, 37), slice(39, 40)], ids=str)
def test_products_of_a_bin_are_of_sixteens_of_words(rows):
    table = torch.arange(120.0).view(40, 3)
    padded, count = softmax_kernels.padded_rows(table[rows]), rows.stop - rows.start
    assert len(padded) % 16 == 0 and len(padded) < count + 16
    assert torch.equal(padded[:count], table[rows]) and not padded[count:].any()
    logits = softmax_kernels.padded_product(torch.eye(3)[:2], table, rows)
    assert torch.equal(logits, table[rows].T[:2]) and softmax_kernels.with_padding(logits).shape == (2, len(padded))


def test_words_of_other_bins_have_no_part_in_a_gradient(count_fused):
    """Also those that a product reads because they follow, and that are not finite."""
    softmax, found = softmax_of({"cutoffs": [9, 30], "div_val": 1}), []
    with torch.no_grad():
        softmax.out_layers[0].weight[10] = torch.nan
    for on in (False, True):
        count_fused(on)
        found.append(losses_and_gradients(softmax, [3, 8, 0, 5]))
    assert found[0]["hidden"].isfinite().all()
    torch.testing.assert_close(found[1]["hidden"], found[0]["hidden"], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("autocast", "kept"), [(False, True), (True, False)], ids=["parameters", "autocast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fused_narrow_types_are_as_exact_as_pytorchs(count_fused, monkeypatch, dtype, autocast, kept):
    """Losses and gradients, against fp64, may be off by twice what PyTorch's operators in the same type are off."""
    for name, value in ({} if kept else LITTLE_ROOM).items():
        monkeypatch.setattr(adaptive, name, value)
    changes = {"vocab_size": 71, "cutoffs": [40], "div_val": 1}
    targets = torch.randint(71, (19,), generator=torch.Generator().manual_seed(2)).tolist()
    outer = torch.float32 if autocast else dtype
    narrow = softmax_of(changes, outer)
    count_fused(False)
    exact = losses_and_gradients(softmax_of(changes, outer).double(), targets, torch.float64)

    def errors(on):
        calls = count_fused(on)
        found = losses_and_gradients(narrow, targets, outer, dtype if autocast else None)
        assert bool(calls) == on and found["losses"].dtype == torch.float32
        return {name: ((found[name].double() - x).norm() / x.norm()).item() for name, x in exact.items()}

    plain = errors(False)
    for name, error in errors(True).items():
        assert error <= 2 * plain[name] + 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize("dropatt", [0.0, 0.2])
def test_what_txl_train_puts_together_on_a_gpu(make_model, make_ids, count_fused, dropatt):
    """Kernels of attention in compiled layers and those of the softmax, under autocast: off from fp32 by at most twice
    what the same is off with neither compilation nor the softmax's kernels."""
    torch.compiler.reset()
    ids, graphs = make_ids(2, 5).to(DEVICE), CompileCounterWithBackend("aot_eager")

    def differentiated(autocasts, together):
        model = make_model("txl_triton", dropatt=dropatt).to(DEVICE).train()
        mems = tuple(torch.randn(2, 2, 6, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE))
        calls = count_fused(together)
        if together:
            compile_layers(model, graphs)
        torch.manual_seed(0)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocasts):
            outputs = model(ids, mems=mems, shift_labels=ids)
        outputs.loss.backward()
        assert bool(calls) == together
        return {"losses": outputs.losses} | {name: parameter.grad for name, parameter in model.named_parameters()}

    exact = differentiated(False, False)
    plain, together = (errors(differentiated(True, on), exact) for on in (False, True))
    assert graphs.frame_count == 1
    for name, error in together.items():
        assert error <= 2 * plain[name] + 1e-3, name


def test_words_that_a_bias_forbids_cost_the_kernels_nothing(count_fused):
    """Not even where a whole block holds no other."""
    results = []
    for on in (False, True):
        softmax = softmax_of(BINS["no-cutoffs"])
        with torch.no_grad():
            softmax.out_layers[0].bias[32:] = -torch.inf
        count_fused(on)
        results.append(losses_and_gradients(softmax, [3, 20, 1]))
    for name, expected in results[0].items():
        assert results[1][name].isfinite().all()
        torch.testing.assert_close(results[1][name], expected, atol=1e-5, rtol=1e-4)


def test_targets_may_be_a_slice_of_others(count_fused):
    """Of every other one, which without bins the kernels get as it is."""
    softmax, every = softmax_of(BINS["no-cutoffs"]), torch.arange(12, device=DEVICE)
    count_fused(True)
    hidden = torch.randn(6, 16).to(DEVICE)
    results = []
    for targets in (every[::2].contiguous(), every[::2]):
        softmax.zero_grad()
        losses = softmax(hidden, targets)
        losses.sum().backward()
        results.append([losses, *(parameter.grad for parameter in softmax.parameters())])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=0, rtol=0)


def test_kept_logits_survive_the_backward_pass(count_fused):
    softmax, calls = softmax_of(BINS["no-cutoffs"]), count_fused(True)
    hidden = torch.randn(3, 16).to(DEVICE).requires_grad_()
    loss = softmax(hidden, torch.tensor([3, 44, 9]).to(DEVICE)).sum()
    (first,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (second,) = torch.autograd.grad(loss, hidden)
    assert torch.equal(first, second) and calls == ["add_statistics", "write_gradient", "write_gradient"]


@pytest.mark.slow
def test_the_kernels_of_the_softmax_compile_for_sm_90_without_a_gpu(kernel_cache):
    rows = compiled(kernel_cache, "bfloat16", "--softmax")
    assert [row["kernel"] for row in rows] == ["statistics", "gradient"]
    assert all(row["spills"] == 0 and row["registers"] <= 128 for row in rows), rows


def test_the_softmax_takes_its_kernels_on_a_gpu_alone():
    states = torch.zeros(2, 8)
    assert not softmax_kernels.fuses(states)
    if DEVICE == "cuda":
        assert all(softmax_kernels.fuses(states.to(DEVICE, dtype)) for dtype in (torch.float32, torch.bfloat16))
        assert not softmax_kernels.fuses(states.to(DEVICE, torch.float64))
