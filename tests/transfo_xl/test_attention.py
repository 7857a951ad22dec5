"""The operation: eager against the fp64 loop over (i, j); every other backend against eager, with every gradient."""

import collections
import functools
import itertools
import operator
import re
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode
from transformers import AttentionInterface
from transformers.utils import logging

import oracle
from attention_maps import attention_terms
from models import refusal
from txl_hf.kernels import attention_cpu, attention_triton, operators
from txl_hf.kernels.attention_cpu import tiled_relative_attention
from txl_hf.kernels.attention_gpu import attend_on_gpu
from txl_hf.kernels.operators import scale_of
from txl_hf.transfo_xl import attention_transfo_xl as attention
from txl_hf.transfo_xl import memory_transfo_xl
from txl_hf.transfo_xl.attention_transfo_xl import (
    BACKENDS as ALL_BACKENDS,
)
from txl_hf.transfo_xl.attention_transfo_xl import (
    AttentionInputs,
    Backend,
    choose_backend,
    hidden_keys,
    relative_attention,
    relative_shift,
)

SHAPES = {
    "B2-H2-L5-M7-D8": (2, 2, 5, 7, 8),
    "B1-H3-L1-M9-D6": (1, 3, 1, 9, 6),
    "B2-H1-L7-M0-D5": (2, 1, 7, 0, 5),
    "B1-H2-L11-M3-D41": (1, 2, 11, 3, 41),
}


def draw(shape, dtype=torch.float32, seed=0, masked=False, distances=None):
    """Random inputs of a backend. With fewer `distances` than K, all further ones share the first row."""
    B, H, L, M, D = shape
    K = M + L
    n = K if distances is None else min(K, distances)
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    tensors = {
        "query": normal(B, H, L, D),
        "key": normal(B, H, K, D),
        "value": normal(B, H, K, D),
        "rel_key": normal(H, n, D),
        "content_bias": normal(H, D),
        "position_bias": normal(H, D),
        "rel_bias": normal(H, n),
    }
    key_mask = (torch.rand(B, K, generator=generator) > 0.3) if masked else None
    return tensors, key_mask


@pytest.mark.parametrize("distances", [None, 1, 4], ids=lambda n: f"distances{n}")
@pytest.mark.parametrize("window", [None, 0, 4], ids=lambda w: f"window{w}")
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_eager_is_the_loop_over_i_and_j(shape, masked, window, distances):
    tensors, key_mask = draw(shape, torch.float64, masked=masked, distances=distances)
    expected, expected_probabilities = oracle.attention_of(tensors, key_mask, window)
    output, probabilities = relative_attention(**tensors, key_mask=key_mask, window=window)
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(probabilities, expected_probabilities, atol=1e-12, rtol=1e-12)


def test_scores_of_distances_alone_are_those_beside_keys_that_are_zero():
    """As ALiBi has them."""
    tensors, key_mask = draw(SHAPES["B2-H2-L5-M7-D8"], torch.float64, masked=True)
    zeros = tensors | {"rel_key": torch.zeros_like(tensors["rel_key"])}
    expected, _ = relative_attention(**zeros, key_mask=key_mask)
    actual, _ = relative_attention(**(tensors | {"rel_key": None}), key_mask=key_mask)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


def plain_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """A function as transformers' AttentionInterface asks for it."""
    probabilities = ((query * scaling) @ key.transpose(-1, -2) + attention_mask).softmax(-1)
    plain_attention.called_by.append(module)
    return (probabilities @ value).transpose(1, 2).contiguous(), probabilities


@pytest.mark.parametrize("options", [{}, {"attn_type": 2, "mem_len": 0}, {"same_length": True}], ids=str)
def test_a_function_that_a_user_has_registered_works(make_model, make_ids, monkeypatch, options):
    monkeypatch.setitem(AttentionInterface._global_mapping, "mine", plain_attention)
    monkeypatch.setattr(plain_attention, "called_by", [], raising=False)
    model, ids, mask = make_model(**options), make_ids(2, 7), torch.ones(2, 7)
    mask[0, :3] = 0
    expected = model(ids, attention_mask=mask).logits[1]
    model.set_attn_implementation("mine")
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[1], expected, atol=1e-5, rtol=1e-5)
    assert plain_attention.called_by == [layer.self_attn for layer in model.transformer.layers]


@pytest.mark.parametrize("name", ["paged|eager", "nobody's"])
def test_other_functions_are_refused_by_name(make_model, name):
    with pytest.raises(ValueError, match=f"attn_implementation=[\"']{re.escape(name)}[\"']"):
        make_model().set_attn_implementation(name)


@pytest.mark.parametrize("keys", [37, 1 << 14])
@pytest.mark.parametrize("implementation", [*ALL_BACKENDS, "entered", "registered"])
def test_one_query_takes_keys_in_another_order(implementation, keys, monkeypatch):
    """As a static cache has them, whatever the default finds fastest for so many. A backend that knows of no order, as
    one that a user has entered among ours, is given none."""
    monkeypatch.setitem(ALL_BACKENDS, "entered", Backend("entered", lambda inputs: pytest.fail("knows of no order")))
    monkeypatch.setitem(AttentionInterface._global_mapping, "registered", plain_attention)
    monkeypatch.setattr(plain_attention, "called_by", [], raising=False)
    tensors, _ = draw((1, 2, 1, keys - 1, 8))
    tensors = {name: tensor.detach() for name, tensor in tensors.items() if name != "rel_bias"}
    order = torch.randperm(keys, generator=torch.Generator().manual_seed(1))
    moved = tensors | {name: tensors[name][:, :, order] for name in ("key", "value")}
    expected, _ = relative_attention(**tensors, implementation="eager")
    found, _ = relative_attention(**moved, order=order, implementation=implementation)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("poisoned", range(6))
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_documents_in_another_order_are_kept_apart(implementation, poisoned):
    """Of whatever document the key is that is not finite."""
    tensors, _ = draw((1, 2, 1, 5, 8))
    tensors = {name: tensor.detach() for name, tensor in tensors.items() if name != "rel_bias"}
    tensors["key"][:, :, poisoned] = torch.nan
    masks = {"key_mask": torch.tensor([[True, True, True, True, False, True]]), "first_key": torch.tensor([[2]])}
    order = torch.tensor([3, 5, 0, 2, 4, 1])
    moved = tensors | {name: tensors[name][:, :, order] for name in ("key", "value")}
    expected, _ = relative_attention(**tensors, **masks, implementation=implementation)
    found, _ = relative_attention(**moved, **masks, order=order, implementation=implementation)
    assert expected.isnan().any() == (poisoned in (2, 3, 5))
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize(("heads", "rows"), [(1, 1), (3, 1), (1, 4), (3, 4)])
def test_a_row_times_a_matrix_is_no_product_in_a_graph(heads, rows):
    """A compiler joins it to what surrounds it; all else is left to the machine's products."""
    found = []

    def look(graph, inputs):
        found.extend(node for node in graph.graph.nodes if node.target in (torch.matmul, operator.matmul))
        return graph

    a, b = torch.randn(2, heads, rows, 5), torch.randn(2, heads, 5, 7)
    product = torch.compile(operators.matmul, backend=look, fullgraph=True, dynamic=False)
    torch.testing.assert_close(product(a, b), a @ b)
    assert len(found) == (0 if rows == 1 else 1)


def test_flex_attention_wants_wide_heads_on_a_gpu():
    def query(L, D):
        return torch.zeros(1, 2, L, D, device="cuda")

    with FakeTensorMode(), torch.no_grad():
        assert "8 wide" in refusal("flex_attention", AttentionInputs(*[query(20, 8)] * 3, scaling=1.0))
        assert refusal("flex_attention", AttentionInputs(*[query(8, 16)] * 3, scaling=1.0)) is None


def test_flex_attention_is_of_no_double_precision_on_a_cpu(ran):
    tensors = {name: tensor.detach().double() for name, tensor in draw((1, 2, 4, 3, 8))[0].items()}
    expected, _ = relative_attention(**tensors, implementation="auto")
    actual, _ = relative_attention(**tensors, implementation="flex_attention")
    assert ran[: len(ran) // 2] == ran[len(ran) // 2 :] and torch.equal(actual, expected)
    given = {name: tensors[name] for name in ("query", "key", "value")}
    reason = refusal("flex_attention", AttentionInputs(**given, scaling=1.0))
    assert reason == "FlexAttention computes nothing in torch.float64 on CPU"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        narrow = {name: tensor.to(dtype) for name, tensor in given.items()}
        assert refusal("flex_attention", AttentionInputs(**narrow, scaling=1.0)) is None


def test_flex_attention_is_compiled_for_no_single_query():
    tensors, _ = draw((1, 1, 1, 6, 16))
    assert "for each number of keys" in refusal(
        "flex_attention", AttentionInputs(*(tensors[name] for name in ("query", "key", "value")), scaling=1.0)
    )


@pytest.mark.parametrize("given", [(), ("rel_key",), ("rel_bias",), ("rel_key", "rel_bias")], ids=str)
def test_triton_has_no_scores_of_distances_alone(given):
    tensors, _ = draw(SHAPES["B2-H2-L5-M7-D8"])
    inputs = AttentionInputs(*(tensors[name] for name in ("query", "key", "value")), scaling=1.0)
    reason = refusal("txl_triton", inputs._replace(**{name: tensors[name] for name in given}))
    assert ("a score per distance" in (reason or "")) == (given == ("rel_bias",))


# "auto" is one of the others; which one is tested below.
BACKENDS = [name for name in ALL_BACKENDS if name not in ("auto", "eager")]
# Wide enough for every backend; the last one spans several tiles of a kernel.
GPU_SHAPES = {
    "B2-H2-L5-M7-D16": (2, 2, 5, 7, 16),
    "B1-H3-L1-M9-D38": (1, 3, 1, 9, 38),
    "B1-H2-L11-M3-D41": (1, 2, 11, 3, 41),
    "B2-H2-L130-M100-D64": (2, 2, 130, 100, 64),
}


@pytest.fixture
def ran(monkeypatch):
    """The names of the backends in the order in which they are called."""
    called = []

    def spy(name, function):
        return lambda inputs: called.append(name) or function(inputs)

    for name, function in ALL_BACKENDS.items():
        monkeypatch.setitem(ALL_BACKENDS, name, replace(function, run=spy(name, function.run)))
    return called


@pytest.fixture(autouse=True)
def no_compilation_of_another_test():
    """More than eight shapes of one function are left uncompiled by torch."""
    torch._dynamo.reset()


def differentiate(implementation, tensors, **options):
    """The output and the gradient of every tensor, by name."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    output, _ = relative_attention(**leaves, **options, implementation=implementation)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(output)
    return {"output": output} | dict(zip(leaves, torch.autograd.grad(output, leaves.values(), cotangent), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [None, 3], ids=lambda w: f"window{w}")
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize(
    "without", [(), ("rel_bias",), ("rel_key", "position_bias")], ids=["bias", "no-bias", "bias-alone"]
)
@pytest.mark.parametrize("implementation", BACKENDS)
def test_backend_agrees_with_eager_in_outputs_and_gradients(
    implementation, without, masked, window, dtype, device, ran
):
    """A fast path may be off by at most twice what eager is off in the same dtype, measured against fp64.

    In the mean over shapes and draws, because a bias has so few numbers that chance alone is off by more. Where the
    backend cannot take these inputs, its own reason is why the test is skipped.
    """
    errors = collections.defaultdict(list)
    shapes = (SHAPES if device == "cpu" else GPU_SHAPES).values()
    for shape, seed, distances in itertools.product(shapes, (0, 1), (None, 4)):
        tensors, key_mask = draw(shape, dtype, seed, masked, distances)
        tensors = {name: tensor.to(device) for name, tensor in tensors.items() if name not in without}
        options = {"key_mask": None if key_mask is None else key_mask.to(device), "window": window}
        if reason := refusal(implementation, AttentionInputs(**tensors, **options, scaling=1.0)):
            pytest.skip(reason)
        exact = differentiate("eager", {name: tensor.double() for name, tensor in tensors.items()}, **options)
        ran.clear()
        for name in ("eager", implementation):
            for quantity, value in differentiate(name, tensors, **options).items():
                assert value.dtype == dtype and value.isfinite().all()
                norm = exact[quantity].norm().clamp(min=1e-30)
                errors[name, quantity].append(((value.double() - exact[quantity]).norm() / norm).item())
        assert ran == ["eager", implementation]
    floor = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    for quantity in exact:
        error, of_eager = (statistics.mean(errors[name, quantity]) for name in (implementation, "eager"))
        assert error <= max(2 * of_eager, floor), quantity


@pytest.mark.parametrize("intel", [True, False], ids=["intel", "others"])
@pytest.mark.parametrize(
    ("shape", "dtype", "needs_gradient", "without", "expected", "by_others"),
    [
        ((2, 2, 5, 7, 8), torch.float32, True, (), "eager", "eager"),
        ((2, 2, 5, 7, 8), torch.float32, False, (), "sdpa", "sdpa"),
        ((2, 2, 5, 7, 8), torch.float32, True, ("rel_key",), "sdpa", "sdpa"),
        ((1, 1, 400, 0, 8), torch.float32, True, ("rel_bias",), "txl_tiles", "txl_tiles"),
        ((1, 1, 400, 0, 8), torch.float32, False, ("rel_bias",), "txl_tiles", "txl_tiles"),
        ((1, 1, 400, 0, 8), torch.float32, True, (), "eager", "eager"),
        ((1, 1, 400, 0, 8), torch.bfloat16, True, ("rel_bias",), "txl_tiles", "eager"),
        ((1, 1, 400, 0, 8), torch.bfloat16, False, ("rel_bias",), "sdpa", "sdpa"),
        ((1, 1, 1, 400, 8), torch.float32, False, (), "sdpa", "sdpa"),
        ((1, 8, 1, 2047, 64), torch.float32, False, (), "sdpa", "txl_row"),
        ((2, 8, 1, 1023, 64), torch.float32, False, (), "sdpa", "sdpa"),
        ((2, 2, 1, 1023, 64), torch.bfloat16, False, ("rel_bias",), "sdpa", "txl_row"),
        ((2, 8, 1, 1023, 64), torch.float16, False, ("rel_bias",), "sdpa", "sdpa"),
        ((8, 1, 1, 255, 64), torch.bfloat16, False, ("rel_bias",), "sdpa", "sdpa"),
        ((1, 8, 1, 2047, 64), torch.float32, False, ("rel_key",), "sdpa", "sdpa"),
    ],
    ids=str,
)
def test_the_default_on_a_cpu_is_what_is_fastest_there(
    shape, dtype, needs_gradient, without, expected, by_others, intel, ran, monkeypatch
):
    monkeypatch.setattr(attention_cpu, "is_by_intel", lambda: intel)
    tensors, _ = draw(shape, dtype)
    tensors = {name: t.detach().requires_grad_(needs_gradient) for name, t in tensors.items() if name not in without}
    relative_attention(**tensors, implementation="auto")
    assert ran == ["auto", expected if intel else by_others]


def test_no_graph_is_bound_to_how_many_keys_are_many():
    graphs = CompileCounter()
    attend = torch.compile(functools.partial(relative_attention, implementation="auto"), backend=graphs, dynamic=True)
    for K in (100, 1000):
        tensors = {name: tensor.detach() for name, tensor in draw((1, 8, 1, K - 1, 64), torch.bfloat16)[0].items()}
        with torch.no_grad():
            attend(**tensors)
    assert graphs.frame_count == 1


def test_a_graph_of_few_keys_hides_those_that_are_out_of_the_window():
    """As `txl-export` writes one: traced while the window sees all keys there are."""

    def hidden(keys):
        return hidden_keys(1, keys.shape[0], 5, None, keys.device)

    traced = torch.jit.trace(hidden, torch.zeros(4))
    assert traced(torch.zeros(9)).flatten().tolist() == [True] * 3 + [False] * 6


@pytest.mark.parametrize(
    ("capability", "rocm", "dtype", "width", "length", "expected"),
    [
        ((8, 0), None, torch.bfloat16, 64, 5, "txl_triton"),
        ((9, 0), None, torch.float16, 41, 5, "txl_triton"),
        ((10, 0), None, torch.bfloat16, 128, 1, "txl_triton"),
        ((9, 0), None, torch.float32, 64, 5, "sdpa"),
        ((9, 0), None, torch.bfloat16, 136, 5, "sdpa"),
        ((7, 5), None, torch.float16, 64, 5, "sdpa"),
        ((7, 5), None, torch.float16, 64, 1, "eager"),
        ((9, 4), "6.4", torch.bfloat16, 64, 5, "sdpa"),
    ],
    ids=str,
)
def test_the_default_on_a_gpu(monkeypatch, capability, rocm, dtype, width, length, expected):
    """By what a device says of itself: the tensors have one and no numbers."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", rocm)
    monkeypatch.setattr(attention_triton, "why_triton_cannot_begin", lambda: None)
    with FakeTensorMode():
        query, key, value = (
            torch.empty(2, 2, n, width, dtype=dtype, device="cuda:0") for n in (length, length + 3, length + 3)
        )
        rel_key = torch.empty(2, length + 3, width, dtype=dtype, device="cuda:0")
        inputs = AttentionInputs(query, key, value, width**-0.5, rel_key=rel_key)
        assert attention.choose_backend(inputs).name == expected
        # A compiler that is not there.
        monkeypatch.setattr(attention_triton, "why_triton_cannot_begin", lambda: "Triton cannot begin")
        assert attention.choose_backend(inputs).name == ("eager" if length == 1 else "sdpa")


def test_the_default_on_a_gpu_under_autocast_and_torch_func(monkeypatch):
    """Products are what counts, and torch.func maps over no operator of ours."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    chosen = []

    def choose(query):
        chosen.append(attention_triton.is_default(query))
        return query.sum()

    with FakeTensorMode():
        query = torch.empty(2, 1, 3, 16, device="cuda:0")
        with monkeypatch.context() as patch:
            # `torch.autocast` turns itself off where there is no GPU.
            patch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
            choose(query)
        choose(query)
        torch.func.vmap(choose)(query.bfloat16())
    assert chosen == [True, False, False]


@pytest.mark.parametrize("distances", [None, 4], ids=lambda n: f"distances{n}")
@pytest.mark.parametrize("missing", [(), ("rel_bias",), ("position_bias",), ("rel_key", "rel_bias")], ids=str)
@pytest.mark.parametrize("window", [None, 4], ids=lambda w: f"window{w}")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_terms_are_the_four_of_the_equation(shape, window, missing, distances):
    """Each entry by the loop over i and j, and their sum is what eager's softmax sees."""
    tensors, key_mask = draw(shape, torch.float64, masked=True, distances=distances)
    tensors = {name: tensor.detach() for name, tensor in tensors.items() if name not in missing}
    query, key = tensors["query"], tensors["key"]
    (B, H, L, Dh), K = query.shape, key.shape[2]
    terms = attention_terms(AttentionInputs(**tensors, scaling=Dh**-0.5, key_mask=key_mask, window=window))
    zero, n = torch.zeros(H, max(K, Dh), dtype=torch.float64), K if distances is None else min(K, distances)
    for b, h, i, j in itertools.product(range(B), range(H), range(L), range(K)):
        distance = K - L + i - j
        if distance < 0 or (window is not None and distance > window) or not (key_mask[b, j] or distance == 0):
            expected = [0.0] * 4
        else:
            row = max(0, n - 1 - distance)
            k, r = key[b, h, j], tensors["rel_key"][h, row] if "rel_key" in tensors else zero[h, :Dh]
            u, v = tensors["content_bias"][h], tensors.get("position_bias", zero[:, :Dh])[h]
            learned = tensors.get("rel_bias", zero)[h, row]
            q = query[b, h, i]
            expected = [x.item() / Dh**0.5 for x in (q @ k, q @ r, u @ k, v @ r + learned)]
        actual = [term[b, h, i, j].item() for term in terms[:4]]
        assert actual == pytest.approx(expected, abs=1e-12)
    _, probabilities = relative_attention(**tensors, key_mask=key_mask, window=window)
    summed = sum(terms[:4]).masked_fill(~terms.visible, -torch.inf).softmax(-1)
    if missing != ("rel_key", "rel_bias"):
        torch.testing.assert_close(summed, probabilities, atol=1e-12, rtol=1e-12)


CPU_SHAPES = SHAPES | {"B3-H2-L6-M0-D1": (3, 2, 6, 0, 1), "B1-H1-L1-M0-D3": (1, 1, 1, 0, 3)}


@pytest.fixture(params=["large-tiles", "small-tiles"])
def tiles(request, monkeypatch):
    """Tiles as they are, of which small inputs have one or two, or so small that there are many of each row."""
    if request.param == "small-tiles":
        monkeypatch.setattr(attention_cpu, "TILE_QUERIES", 2)
        monkeypatch.setattr(attention_cpu, "TILE_SCORES", 7)


def tile_by_tile(tensors, key_mask=None, window=None, dropout=0.0):
    """Attention in tiles, at any size, where the default takes them for large ones only."""
    tensors = {name: tensor for name, tensor in tensors.items() if name != "rel_bias"}
    options = {"key_mask": key_mask, "window": window, "dropout": dropout}
    inputs = AttentionInputs(**tensors, scaling=tensors["query"].shape[-1] ** -0.5, **options)
    return tiled_relative_attention(inputs)[0]


@pytest.mark.parametrize("distances", [None, 1, 4], ids=lambda n: f"distances{n}")
@pytest.mark.parametrize("window", [None, 0, 4], ids=lambda w: f"window{w}")
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("shape", CPU_SHAPES.values(), ids=CPU_SHAPES)
def test_tiles_are_the_loop_over_i_and_j(shape, masked, window, distances, tiles):
    """In fp64 to the last digits, outputs, without a gradient too, and every gradient; a few queries see nothing but
    themselves."""
    tensors, key_mask = draw(shape, torch.float64, masked=masked, distances=distances)
    del tensors["rel_bias"]
    expected, _ = oracle.attention_of(tensors, key_mask, window)
    actual = tile_by_tile(tensors, key_mask, window)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(tile_by_tile(tensors, key_mask, window), expected, atol=1e-12, rtol=1e-12)
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves = list(tensors.values())
    of_expected = torch.autograd.grad(expected, leaves, cotangent, materialize_grads=True)
    of_actual = torch.autograd.grad(actual, leaves, cotangent)
    for name, exact, gradient in zip(tensors, of_expected, of_actual, strict=True):
        torch.testing.assert_close(gradient, exact, atol=1e-12, rtol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


# Several tiles of queries, the oldest of which has fewer than the others; and one.
@pytest.mark.parametrize(("L", "m"), [(591, 400), (131, 1000), (131, 2000)])
@pytest.mark.parametrize("products", ["onednn", "mkl"])
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("distances", [None, 300], ids=lambda n: f"distances{n}")
def test_large_tiles_agree_with_eager(distances, products, masked, L, m, monkeypatch):
    """The sizes at which the default takes them: with gradient and without, with oneDNN's products and MKL's."""
    if products == "onednn" and not operators._has_onednn():
        pytest.skip("this build of PyTorch has no product by oneDNN")
    monkeypatch.setattr(operators, "_onednn_is_faster", lambda: products == "onednn")
    monkeypatch.setattr(operators, "_takes_two_turns", lambda: False)
    tensors, key_mask = draw((2, 3, L, m, 41), masked=masked, distances=distances)
    one_head_at_a_time = attention_cpu._is_single(tensors["query"], tensors["key"])
    assert one_head_at_a_time == (products == "onednn" and L * (m + L) > 1 << 18)
    del tensors["rel_bias"]
    for name in ("key", "value"):
        # As the model has them, the heads of a token one behind the other.
        together = tensors[name].detach().transpose(1, 2).contiguous()
        tensors[name] = together.transpose(1, 2).requires_grad_()
    assert choose_backend(AttentionInputs(**tensors, scaling=1.0)).name == "txl_tiles"
    arguments, results = {"key_mask": key_mask, "window": 600 if masked else None}, {}
    for name in ("eager", "auto"):
        output, _ = relative_attention(**tensors, **arguments, implementation=name)
        results[name] = [output, *torch.autograd.grad(output.square().sum(), list(tensors.values()))]
    for quantity, a, b in zip(["output", *tensors], results["auto"], results["eager"], strict=True):
        assert (a - b).norm() <= 5e-6 * b.norm(), quantity
    with torch.no_grad():
        output, _ = relative_attention(**tensors, **arguments, implementation="auto")
    torch.testing.assert_close(output, results["auto"][0])


@pytest.mark.parametrize(("L", "distances", "multiplied"), [(1, 4, 4), (3, 4, 6), (3, 8, 9), (9, 4, 9)])
def test_a_score_that_distances_share_is_computed_once(L, distances, multiplied, monkeypatch):
    """For a single query by the default, for more by tiles, which shift them by up to L - 1 keys."""
    tensors, _ = draw((1, 2, L, 9 - L, 8), distances=distances)
    tensors = {name: tensor.detach() for name, tensor in tensors.items() if name != "rel_bias"}
    expected, _ = relative_attention(**tensors, implementation="eager")
    columns = []

    def watch(module, name, of):
        whole = getattr(module, name)
        monkeypatch.setattr(module, name, lambda a, b, *room: columns.append(of(b)) or whole(a, b, *room))

    watch(attention.OPERATORS, "matmul", lambda b: b.shape[-1])
    watch(attention_cpu, "products", lambda b: b.shape[-2])
    implementation = "auto" if L == 1 else "txl_tiles"
    found, _ = relative_attention(**tensors, implementation=implementation)
    torch.testing.assert_close(found, expected)
    # Of a tile: by distance, by key, and of the values.
    assert columns == ([multiplied] if L == 1 else [multiplied, 9, 8])


def test_keys_are_copied_where_that_is_sooner_than_to_read_them():
    """Those of heads that lie among one another are, for several tiles or for oneDNN; rows and columns never are."""
    rows, columns = torch.randn(3, 5, 8), torch.randn(3, 8, 5).transpose(1, 2)
    among = torch.randn(5, 3, 8).transpose(0, 1)
    tile, read_of = attention_cpu.TILE_QUERIES, attention_cpu._to_be_read
    for L, single in ((tile, False), (tile + 1, False), (1, True)):
        assert all(read_of(states, L, single) is states for states in (rows, columns))
        read = read_of(among, L, single)
        assert (read is among) == (L == tile) and torch.equal(read, among)


def test_tiles_drop_probabilities_like_eager_and_replay(tiles):
    """Every probability is dropped by itself, the rest scaled; the gradient is that of what was kept."""
    tensors, _ = draw((1, 2, 5, 4, 9), torch.float64)
    del tensors["rel_bias"]
    # With the unit vectors for values, what comes out are the probabilities.
    tensors["value"] = torch.eye(9, dtype=torch.float64).expand(1, 2, 9, 9).clone()
    probabilities = tile_by_tile(tensors)
    torch.manual_seed(3)
    dropped = tile_by_tile(tensors, dropout=0.4)
    kept = (dropped != 0) * scale_of(0.4)
    assert 0 < kept.count_nonzero() < probabilities.count_nonzero()
    torch.testing.assert_close(dropped, probabilities * kept)
    leaves = [tensors[name] for name in ("query", "key", "rel_key", "content_bias", "position_bias")]
    cotangent = torch.linspace(-1, 1, dropped.numel(), dtype=torch.float64).view_as(dropped)
    actual = torch.autograd.grad(dropped, leaves, cotangent)
    expected = torch.autograd.grad(probabilities, leaves, cotangent * kept)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)
    torch.manual_seed(3)
    assert torch.equal(tile_by_tile(tensors, dropout=0.4), dropped)


@given(L=st.integers(1, 9), m=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_shift_aligns_every_distance(L, m):
    K = m + L
    distances = torch.arange(K, -1, -1).expand(L, K + 1)
    shifted = relative_shift(distances.float())
    for i in range(L):
        for j in range(i + m + 1):
            assert shifted[i, j] == i + m - j


@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("window", [None, 3], ids=lambda w: f"window{w}")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_sdpa_without_gradient(shape, window, masked, ran):
    """PyTorch's fused path on CPU, which it leaves where the mask needs a gradient."""
    tensors, key_mask = draw(shape, masked=masked)
    tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    expected, _ = relative_attention(**tensors, key_mask=key_mask, window=window)
    actual, _ = relative_attention(**tensors, key_mask=key_mask, window=window, implementation="sdpa")
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert ran == ["eager", "sdpa"]


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "masked"), [("B2-H2-L5-M7-D8", True), ("B2-H1-L7-M0-D5", False)], ids=["masked", "no memory"]
)
def test_flex_attention_without_gradient(shape, masked, ran):
    tensors, key_mask = draw(SHAPES[shape], masked=masked)
    tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    with torch.no_grad():
        expected, _ = relative_attention(**tensors, key_mask=key_mask, window=4)
        actual, _ = relative_attention(**tensors, key_mask=key_mask, window=4, implementation="flex_attention")
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert ran == ["eager", "flex_attention"]


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
@pytest.mark.slow
@pytest.mark.parametrize("memory", [16, 32])
@pytest.mark.parametrize("width", [5, 8, 16, 17])
def test_flex_attention_of_narrow_heads_reads_what_was_written(width, memory):
    """Of 24 and 40 keys PyTorch's own is wrong in most calls, and NaN in some."""
    tensors = {name: tensor.detach() for name, tensor in draw((2, 2, 8, memory, width))[0].items()}
    with torch.no_grad():
        expected, _ = relative_attention(**tensors)
        for _ in range(8):
            actual, _ = relative_attention(**tensors, implementation="flex_attention")
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
@pytest.mark.slow
def test_flex_attention_is_compiled_for_a_memory_that_grows():
    """PyTorch gives up compiling after so many lengths, eight by default, and computes what L × K numbers hold."""
    torch.compiler.reset()
    # Its name in PyTorch 2.6, and since.
    names = ("fail_on_cache_limit_hit", "fail_on_recompile_limit_hit")
    fails = next(name for name in reversed(names) if hasattr(torch._dynamo.config, name))
    with torch._dynamo.config.patch(cache_size_limit=1, **{fails: True}), torch.no_grad():
        for memory in (3, 4):
            tensors = {name: tensor.detach() for name, tensor in draw((1, 1, 3, memory, 8))[0].items()}
            expected, _ = relative_attention(**tensors)
            actual, _ = relative_attention(**tensors, implementation="flex_attention")
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_fallback_warns_once(caplog, ran):
    logging.get_logger("transformers").propagate = True
    tensors, _ = draw((1, 1, 3, 2, 8))
    for _ in range(2):
        relative_attention(**tensors, implementation="flex_attention", dropout=0.1)
    warnings = [record.message for record in caplog.records if "dropout of probabilities" in record.message]
    assert len(warnings) == 1 and "'flex_attention' falls back to 'auto'" in warnings[0]
    assert ran == ["auto", "eager"] * 2


def test_dropout_drops_probabilities_and_keeps_their_mean():
    tensors, _ = draw((1, 2, 4, 3, 8))
    tensors["value"] = torch.ones_like(tensors["value"])
    torch.manual_seed(0)
    outputs = torch.stack([relative_attention(**tensors, dropout=0.5)[0] for _ in range(500)])
    assert outputs.std(0).min() > 0.1
    assert abs(outputs.mean() - 1) < 0.02


def test_threads_choose_a_kernel_one_after_the_other(monkeypatch):
    """The choice is of the whole process, and puts back what it has found: in the midst of another, the other's."""
    inside, most = [], []

    def attend(*args, **kwargs):
        inside.append(args)
        time.sleep(0.05)
        most.append(len(inside))
        return inside.pop()[0]

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    states = torch.zeros(1, 1, 2, 8)
    with ThreadPoolExecutor(4) as threads:
        for call in [threads.submit(attend_on_gpu, states, states, states, states) for _ in range(4)]:
            call.result()
    assert most == [1] * 4
    assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.cudnn_sdp_enabled()


def test_unknown_backend_is_named():
    tensors, _ = draw((1, 1, 2, 0, 4))
    with pytest.raises(ValueError, match="'flash'.*auto, eager, .*, txl_triton, txl_blocks, txl_tiles, txl_row"):
        relative_attention(**tensors, implementation="flash")


def test_tiles_refuse_a_second_derivative():
    """A gradient that is no function of the inputs any more would pass for a constant one."""
    query, key, value = (torch.randn(1, 1, 400, 8, requires_grad=True) for _ in range(3))
    rel_key = torch.randn(1, 400, 8)
    attended, _ = relative_attention(query, key, value, rel_key, implementation="auto")
    with pytest.raises(RuntimeError, match="attn_implementation='eager'"):
        torch.autograd.grad(attended.sum(), query, create_graph=True)
    attended, _ = relative_attention(query, key, value, rel_key, implementation="eager")
    (gradient,) = torch.autograd.grad(attended.sum(), query, create_graph=True)
    gradient.square().sum().backward()
    assert query.grad.norm() > 0


@pytest.mark.parametrize("everywhere", [False, True], ids=["forward", "forward-and-backward"])
def test_tiles_train_in_bf16_under_autocast(everywhere, ran, monkeypatch):
    """Projections under autocast go to tiles; tensors of two types go to eager, where autocast casts them."""
    monkeypatch.setattr(attention_cpu, "is_by_intel", lambda: True)
    tensors, _ = draw((2, 2, 300, 300, 16), torch.bfloat16)
    del tensors["rel_bias"]
    results = {}
    for name in ("eager", "auto"):
        with torch.autocast("cpu", torch.bfloat16):
            output, _ = relative_attention(**tensors, implementation=name)
        with torch.autocast("cpu", torch.bfloat16, enabled=everywhere):
            gradients = torch.autograd.grad(output.float().square().sum(), list(tensors.values()))
        results[name] = [output, *gradients]
    assert ran == ["eager", "auto", "txl_tiles"]
    for quantity, a, b in zip(["output", *tensors], results["auto"], results["eager"], strict=True):
        assert a.dtype == torch.bfloat16 and (a - b).norm() <= 2e-2 * b.norm(), quantity
    ran.clear()
    with torch.autocast("cpu", torch.bfloat16):
        relative_attention(**tensors | {"key": tensors["key"].float()}, implementation="auto")
    assert ran == ["auto", "eager"]


def test_autocast_of_fp32_operands_trains():
    """As where a replaced projection returns fp32 under autocast."""
    gradients = {}
    for implementation in ("auto", "eager"):
        tensors, _ = draw((1, 2, 400, 0, 8))
        del tensors["rel_bias"]
        with torch.autocast("cpu", torch.bfloat16):
            attended, _ = relative_attention(**tensors, implementation=implementation)
        assert attended.dtype == torch.bfloat16
        gradients[implementation] = torch.autograd.grad(attended.float().square().sum(), tensors.values())
    for actual, expected in zip(gradients["auto"], gradients["eager"], strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("implementation", [name for name in ALL_BACKENDS if name != "eager"])
@pytest.mark.parametrize("asked", ["call", "configuration"])
def test_attentions_come_from_eager_whatever_the_backend(make_model, make_ids, implementation, asked):
    ids = make_ids(2, 5)
    expected = make_model("eager")(ids, output_attentions=True)
    model = make_model(implementation)
    if asked == "configuration":
        model.config.output_attentions = True
        model.config.validate()
    outputs = model(ids, **({"output_attentions": True} if asked == "call" else {}))
    assert model.config._attn_implementation == implementation
    for actual, probabilities in zip(outputs.attentions, expected.attentions, strict=True):
        assert torch.equal(actual, probabilities)
    assert torch.equal(outputs.logits, expected.logits)


ENCODINGS = {
    "relative": {},
    "tied-biases-same_length": {"untie_r": False, "same_length": True},
    "zeros-clamped": {"initial_memory": "zeros", "clamp_len": 3},
    "decayed": {"decay_len": 2},
    "one-softmax": {"cutoffs": [], "div_val": 1},
    "shaw": {"attn_type": 1},
    "vaswani": {"attn_type": 2, "mem_len": 0},
    "al-rfou": {"attn_type": 3, "mem_len": 0},
}


@pytest.mark.parametrize("implementation", ["auto", pytest.param("txl_tiles", marks=pytest.mark.slow)])
@pytest.mark.parametrize("changes", ENCODINGS.values(), ids=ENCODINGS)
def test_fp64_computes_in_fp64(make_model, make_ids, changes, implementation):
    """To the last digits, and so well that finite differences agree with every gradient."""
    model = make_model(implementation, **changes).double()
    ids = make_ids(1, 8)
    mems = model(ids[:, :4]).mems
    with torch.no_grad():
        reference = oracle.ReferenceModel(model)
        _, reference_mems = reference(ids[:, :4])
        logits, _ = reference(ids[:, 4:], reference_mems)
        torch.testing.assert_close(model(ids[:, 4:], mems=mems).logits, logits, atol=1e-12, rtol=1e-12)
    names = [name for name, _ in model.named_parameters()]

    def losses(*parameters):
        arguments = {"mems": mems, "labels": ids[:, 4:]}
        return torch.func.functional_call(
            model, dict(zip(names, parameters, strict=True)), (ids[:, 4:],), arguments, tie_weights=True
        ).losses

    parameters = [parameter.detach().requires_grad_() for _, parameter in model.named_parameters()]
    assert torch.autograd.gradcheck(losses, parameters, fast_mode=True)


@pytest.mark.parametrize("width", [38, 41, 64])
def test_on_a_gpu_pytorchs_attention_gets_heads_of_eights_and_never_cudnn(monkeypatch, width):
    """The function that a GPU calls has the outputs and gradients of PyTorch's, called here on a CPU."""
    attend, seen = F.scaled_dot_product_attention, []

    def look(query, key, value, *args, **options):
        seen.append((torch.backends.cuda.cudnn_sdp_enabled(), {states.shape[-1] for states in (query, key, value)}))
        return attend(query, key, value, *args, **options)

    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 2, 5, width), (2, 2, 9, width), (2, 2, 9, width), (2, 2, 5, 9)]
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    results = []
    for function in (attend, attend_on_gpu):
        monkeypatch.setattr(F, "scaled_dot_product_attention", look)
        output = function(*inputs, dropout_p=0.0, scale=0.2)
        results.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert seen == [(False, {width + -width % 8})]
    if width != 38:
        return
    compiled = torch.compile(attend_on_gpu, fullgraph=True, backend="aot_eager")
    monkeypatch.undo()
    torch.testing.assert_close(compiled(*inputs, dropout_p=0.0, scale=0.2), results[0][0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "first_key", [None, torch.tensor([[0, 0, 4, 4], [1, 2, 3, 5]])], ids=["one text", "documents"]
)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("future", [None, 1, 3])
def test_a_query_sees_the_real_keys_of_its_document_up_to_itself_and_always_itself(window, masked, first_key, future):
    key_mask = torch.arange(14).view(2, 7) % 3 != 0 if masked else None
    hidden = hidden_keys(4, 7, window, key_mask, torch.device("cpu"), first_key, future=future)
    hidden = torch.zeros(1, 1, 4, 1, dtype=torch.bool) if hidden is None else hidden
    # Columns in front that are left out hide nothing.
    hidden = F.pad(hidden, (7 - hidden.shape[-1], 0)).expand(2, 1, 4, 7)
    for b, i, j in itertools.product(range(2), range(4), range(7)):
        place = i + 3
        seen = place - j <= (7 if window is None else window) and j - place <= (future or 0)
        if first_key is not None:
            seen = seen and j >= first_key[b, i]
            # A key after the query may be of a later document.
            seen = seen and (j <= place or first_key[b, j - 3] <= place)
        seen = (seen and (key_mask is None or key_mask[b, j])) or j == place
        assert bool(hidden[b, 0, i, j]) is not bool(seen), (b, i, j)
    assert hidden_keys(1, 7, None, None, torch.device("cpu")) is None


def test_gradients_by_torch_func_of_an_input_that_tiles_would_take():
    tensors, _ = draw((1, 1, 400, 0, 8))
    query, rest = tensors.pop("query"), {name: t for name, t in tensors.items() if name != "rel_bias"}

    def loss(query, implementation):
        return relative_attention(query, **rest, implementation=implementation)[0].square().sum()

    eager, auto = (torch.func.grad(loss)(query, name) for name in ("eager", "auto"))
    torch.testing.assert_close(auto, eager, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["auto", "eager", "sdpa", "txl_tiles"])
def test_layers_share_what_is_hidden(make_model, make_ids, monkeypatch, implementation):
    model = make_model(attn_implementation=implementation, n_layer=3)
    calls = []
    for module in (memory_transfo_xl, attention):
        monkeypatch.setattr(module, "hidden_keys", lambda *args: calls.append(args) or hidden_keys(*args))
    ids, mask = make_ids(2, 5), torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    model(ids, attention_mask=mask)
    assert len(calls) == 1
