"""Attention in both directions: eager against the fp64 loop over (i, j), every backend that has it against eager."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

import oracle
from models import refusal
from txl_hf.kernels import attention_blocks
from txl_hf.transfo_xl.attention_transfo_xl import BACKENDS, AttentionInputs, choose_backend, relative_attention

# (B, H, L, memory, Dh)
SHAPES = {
    "B2-H2-L5-M0-D8": (2, 2, 5, 0, 8),
    "B1-H3-L1-M4-D6": (1, 3, 1, 4, 6),
    "B2-H1-L1-M0-D5": (2, 1, 1, 0, 5),
    "B1-H2-L13-M6-D41": (1, 2, 13, 6, 41),
}
# The kernels of `txl_triton` run in an interpreter: tests/kernels/test_triton.py.
ELSEWHERE = ("auto", "eager", "txl_triton")
BOTH_WAYS = [name for name, backend in BACKENDS.items() if backend.both_ways and name not in ELSEWHERE]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(attention_blocks, "BLOCK_QUERIES", 3)
    monkeypatch.setattr(attention_blocks, "BLOCK_SCORES", 1)


@pytest.fixture(autouse=True)
def no_compilation_of_another_test():
    torch._dynamo.reset()


def draw(shape, future, dtype=torch.float64, distances=None, seed=0):
    """Tensors by name with a row for each distance, or for `distances` and those of the future."""
    B, H, L, M, D = shape
    K, generator = M + L, torch.Generator().manual_seed(seed)
    n = (K if distances is None else min(K, distances)) + future
    sizes = {"query": (B, H, L, D), "key": (B, H, K, D), "value": (B, H, K, D), "rel_key": (H, n, D)}
    sizes |= {"content_bias": (H, D), "position_bias": (H, D), "rel_bias": (H, n)}
    return {
        name: torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for name, size in sizes.items()
    }


def draw_masks(shape, seed=0):
    """Keys that are masked on both sides and within; documents, and the first key of each query's."""
    B, _, L, M, _ = shape
    generator = torch.Generator().manual_seed(seed)
    key_mask = torch.rand(B, M + L, generator=generator) > 0.3
    key_mask[:, 0] = key_mask[:, -1] = False
    begins = torch.rand(B, L, generator=generator) > 0.7
    place = torch.arange(M, M + L).expand(B, L)
    first_key = torch.where(begins, place, 0).cummax(1).values
    document = torch.cat([torch.zeros(B, M, dtype=torch.long), begins.cumsum(1)], 1)
    return key_mask, first_key, document


@pytest.mark.parametrize("documents", [False, True], ids=["one", "documents"])
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("window", [None, 0, 4], ids=lambda w: f"window{w}")
@pytest.mark.parametrize("future", [0, 2, "all"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("implementation", ["eager", "txl_blocks"])
def test_both_directions_are_the_loop_over_i_and_j(implementation, shape, future, window, masked, documents):
    future = shape[2] - 1 if future == "all" else future
    key_mask, first_key, document = draw_masks(shape)
    options = {"key_mask": key_mask} if masked else {}
    known = options | ({"document_of": lambda b, j: document[b, j]} if documents else {})
    options |= {"first_key": first_key} if documents else {}
    for distances in (None, 2):
        tensors = draw(shape, future, distances=distances)
        expected, probabilities = oracle.attention_of(tensors, window=window, future=future, **known)
        found = relative_attention(**tensors, window=window, future=future, **options, implementation=implementation)
        torch.testing.assert_close(found[0], expected, atol=1e-12, rtol=1e-12)
        if implementation == "eager":
            torch.testing.assert_close(found[1], probabilities, atol=1e-12, rtol=1e-12)


def differentiate(implementation, tensors, **options):
    """The output and the gradient of every tensor, by name."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    output, _ = relative_attention(**leaves, **options, implementation=implementation)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return {"output": output} | dict(zip(leaves, torch.autograd.grad(output, leaves.values(), cotangent), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("limited", [False, True], ids=["full", "limited"])
@pytest.mark.parametrize(
    "without", [(), ("rel_bias",), ("rel_key", "position_bias")], ids=["all", "no-bias", "bias-alone"]
)
@pytest.mark.parametrize("implementation", BOTH_WAYS)
def test_backends_agree_with_eager_in_outputs_and_gradients(implementation, without, limited, dtype):
    """Off by at most twice what eager is off in the same type, against fp64, in the mean over shapes and draws."""
    errors = {}
    for shape, seed in itertools.product(SHAPES.values(), (0, 1)):
        future = min(2, shape[2] - 1) if limited else shape[2] - 1
        tensors = {name: t for name, t in draw(shape, future, dtype, seed=seed).items() if name not in without}
        options = {"future": future}
        if limited:
            key_mask, first_key, _ = draw_masks(shape, seed)
            options |= {"window": 4, "key_mask": key_mask, "first_key": first_key}
        given = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        if reason := refusal(implementation, AttentionInputs(**given, **options, scaling=1.0)):
            pytest.skip(reason)
        exact = differentiate("eager", {name: tensor.double() for name, tensor in tensors.items()}, **options)
        for name in ("eager", implementation):
            for quantity, value in differentiate(name, tensors, **options).items():
                assert value.dtype == dtype and value.isfinite().all()
                error = (value.double() - exact[quantity]).norm() / exact[quantity].norm().clamp(min=1e-30)
                errors.setdefault((quantity, name), []).append(error)
    floor = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    for quantity in exact:
        error, of_eager = (torch.stack(errors[quantity, name]).mean() for name in (implementation, "eager"))
        assert error <= max(2 * of_eager, floor), quantity


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "txl_blocks"])
def test_any_mask_and_scores_besides_are_taken(implementation):
    """As streaming encoders and XLNet have them: a mask of chunks, a score for every pair. A query that sees nothing
    takes the mean of all values."""
    shape = (2, 2, 7, 2, 8)
    tensors = draw(shape, 6)
    hidden = torch.rand(2, 1, 7, 9, generator=torch.Generator().manual_seed(0)) > 0.6
    hidden[1, :, 3] = True
    tensors["score_bias"] = torch.randn(2, 2, 7, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = differentiate(implementation, tensors, hidden=hidden, future=6)
    torch.testing.assert_close(found["output"][1, :, 3], tensors["value"][1].mean(1))
    # Scores of keys times queries, in no order of distances.
    distance = torch.arange(2, 9)[:, None] - torch.arange(9)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    rows = {name: leaves[name][:, 8 - distance] for name in ("rel_key", "rel_bias")}
    content = leaves["query"] + leaves["content_bias"][:, None]
    position = leaves["query"] + leaves["position_bias"][:, None]
    by_distance = (torch.einsum("bhid,hijd->bhij", position, rows["rel_key"]) + rows["rel_bias"]) * 8**-0.5
    mask = (by_distance + leaves["score_bias"]).masked_fill(hidden, torch.finfo(torch.float64).min)
    scores = content @ leaves["key"].transpose(-1, -2) * 8**-0.5 + mask
    output = scores.softmax(-1) @ leaves["value"]
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    expected = [output, *torch.autograd.grad(output, leaves.values(), cotangent)]
    torch.testing.assert_close(list(found.values()), expected, atol=1e-10, rtol=1e-10)


def test_blocks_drop_probabilities_and_compute_them_again_alike():
    tensors = draw((1, 2, 13, 0, 8), 12)
    torch.manual_seed(0)
    with_gradient = differentiate("txl_blocks", tensors, future=12, dropout=0.5)
    torch.manual_seed(0)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    monolith, _ = relative_attention(**leaves, future=12, implementation="eager", dropout=0.5)
    assert not torch.allclose(with_gradient["output"], monolith), "other numbers for other shapes"
    # A directional derivative under the same seed, by differences.
    direction = torch.randn(1, 2, 13, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    cotangent = torch.randn(monolith.shape, generator=torch.Generator().manual_seed(1)).double()

    def along(step):
        torch.manual_seed(0)
        moved = tensors | {"key": tensors["key"] + step * direction}
        return (relative_attention(**moved, future=12, implementation="txl_blocks", dropout=0.5)[0] * cotangent).sum()

    slope = (along(1e-5) - along(-1e-5)) / 2e-5
    torch.testing.assert_close((with_gradient["key"] * direction).sum(), slope, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("implementation", [name for name, backend in BACKENDS.items() if not backend.both_ways])
def test_a_backend_of_one_direction_says_so_and_the_default_computes(implementation, caplog):
    tensors = draw((1, 2, 5, 0, 8), 4)
    expected, _ = relative_attention(**tensors, future=4)
    logging.enable_propagation()
    found, _ = relative_attention(**tensors, future=4, implementation=implementation)
    logging.disable_propagation()
    assert f"'{implementation}' falls back to 'auto': it computes causal attention alone" in caplog.text
    torch.testing.assert_close(found, expected)


def test_blocks_refuse_causal_attention():
    inputs = AttentionInputs(*[torch.zeros(1, 1, 4, 8)] * 3, scaling=1.0)
    assert "both directions" in refusal("txl_blocks", inputs)


def test_the_default_takes_blocks_for_what_is_more_than_one(monkeypatch):
    monkeypatch.setattr(attention_blocks, "BLOCK_SCORES", 5000)
    short, long = (AttentionInputs(*[torch.zeros(1, 1, L, 8)] * 3, scaling=1.0, future=L - 1) for L in (70, 71))
    assert [choose_backend(inputs).name for inputs in (short, long)] == ["sdpa", "txl_blocks"]


def test_memory_of_blocks_grows_with_the_length():
    """Twice the length takes at most 2.6 times the memory, where the scores alone would take four times it. The C
    library is told to give back what was freed: it would keep parts of it between the results of the blocks."""
    code = """
import torch
import txl_hf
from peak_memory import forget_peak, peak_memory, resident_memory
from txl_hf.kernels import attention_blocks
from txl_hf.transfo_xl.attention_transfo_xl import relative_attention

attention_blocks.BLOCK_SCORES = 1

def used(L, differentiated):
    query, key, value = (torch.randn(1, 2, L, 16, requires_grad=differentiated) for _ in range(3))
    rel_key = torch.randn(2, 2 * L - 1, 16, requires_grad=differentiated)
    forget_peak()
    before = resident_memory()
    output, _ = relative_attention(query, key, value, rel_key, future=L - 1, implementation="txl_blocks")
    if differentiated:
        output.sum().backward()
    return peak_memory() - before

used(500, True)
print(*(used(L, differentiated) for differentiated in (False, True) for L in (1500, 3000)))
"""
    settings = {"PYTHONPATH": str(Path(oracle.__file__).parent), "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=True)
    forward, longer, backward, longer_backward = map(int, result.stdout.split())
    assert forward < backward < 2 * 1500 * 2999 * 4 / 4, "a quarter of (b) + (d) of all queries"
    assert longer < 2.6 * forward and longer_backward < 2.6 * backward
