"""The operation: eager against the fp64 loop over (i, j); every other backend against eager, with every gradient."""

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils import logging

import oracle
from txl_hf.attention_transfo_xl import (
    RELATIVE_ATTENTION_FUNCTIONS,
    AttentionInputs,
    _fastest,
    relative_attention,
    relative_shift,
    tiled_relative_attention,
)

SHAPES = {
    "B2-H2-L5-M7-D8": (2, 2, 5, 7, 8),
    "B1-H3-L1-M9-D6": (1, 3, 1, 9, 6),
    "B2-H1-L7-M0-D5": (2, 1, 7, 0, 5),
    "B1-H2-L11-M3-D41": (1, 2, 11, 3, 41),
}


def draw(shape, dtype=torch.float32, seed=0, masked=False):
    B, H, L, M, D = shape
    K = M + L
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    tensors = {
        "query": normal(B, H, L, D),
        "key": normal(B, H, K, D),
        "value": normal(B, H, K, D),
        "rel_key": normal(H, K, D),
        "content_bias": normal(H, D),
        "position_bias": normal(H, D),
        "rel_bias": normal(H, K),
    }
    key_mask = (torch.rand(B, K, generator=generator) > 0.3) if masked else None
    return tensors, key_mask


@pytest.mark.parametrize("window", [None, 0, 4], ids=lambda w: f"window{w}")
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_eager_is_the_loop_over_i_and_j(shape, masked, window):
    tensors, key_mask = draw(shape, torch.float64, masked=masked)
    K = shape[2] + shape[3]
    expected, expected_probabilities = oracle.relative_attention(
        tensors["query"],
        tensors["key"],
        tensors["value"],
        lambda h, distance: tensors["rel_key"][h, K - 1 - distance],
        tensors["content_bias"],
        tensors["position_bias"],
        lambda h, distance: tensors["rel_bias"][h, K - 1 - distance],
        key_mask,
        window,
    )
    output, probabilities = relative_attention(**tensors, key_mask=key_mask, window=window)
    # The softmax runs in fp32 whatever comes in.
    torch.testing.assert_close(output, expected, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(probabilities, expected_probabilities, atol=2e-7, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [None, 3], ids=lambda w: f"window{w}")
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("implementation", [name for name in RELATIVE_ATTENTION_FUNCTIONS if name != "eager"])
def test_backend_agrees_with_eager_in_outputs_and_gradients(implementation, shape, masked, window, dtype):
    """A fast path may be off by at most twice what eager is off in the same dtype, measured against fp64."""
    results = {}
    for name, kind in (("exact", torch.float64), ("eager", dtype), (implementation, dtype)):
        tensors, key_mask = draw(shape, dtype, masked=masked)
        tensors = {k: t.detach().to(kind).requires_grad_() for k, t in tensors.items()}
        output, _ = relative_attention(
            **tensors, key_mask=key_mask, window=window, implementation="eager" if name == "exact" else name
        )
        cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(dtype).to(kind)
        gradients = torch.autograd.grad(output, list(tensors.values()), cotangent)
        results[name] = dict(zip(["output", *tensors], [output, *gradients], strict=True))

    def error(name, quantity):
        exact = results["exact"][quantity].double()
        return (results[name][quantity].double() - exact).norm() / exact.norm().clamp(min=1e-30)

    floor = {torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    for quantity in results["exact"]:
        assert error(implementation, quantity) <= max(2 * error("eager", quantity), floor), quantity


CPU_SHAPES = SHAPES | {"B3-H2-L6-M0-D1": (3, 2, 6, 0, 1), "B1-H1-L1-M0-D3": (1, 1, 1, 0, 3)}


def tile_by_tile(tensors, key_mask=None, window=None, dropout=0.0):
    """What the default does where tiles are large, at any size."""
    tensors = {name: tensor for name, tensor in tensors.items() if name != "rel_bias"}
    options = {"key_mask": key_mask, "window": window, "dropout": dropout}
    inputs = AttentionInputs(**tensors, scaling=tensors["query"].shape[-1] ** -0.5, **options)
    return tiled_relative_attention(inputs)[0]


@pytest.mark.parametrize("window", [None, 0, 4], ids=lambda w: f"window{w}")
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("shape", CPU_SHAPES.values(), ids=CPU_SHAPES)
def test_tiles_are_the_loop_over_i_and_j(shape, masked, window):
    """In fp64 to the last digits, outputs and every gradient; a few queries see nothing but themselves."""
    tensors, key_mask = draw(shape, torch.float64, masked=masked)
    del tensors["rel_bias"]
    K = shape[2] + shape[3]
    expected, _ = oracle.relative_attention(
        tensors["query"],
        tensors["key"],
        tensors["value"],
        lambda h, distance: tensors["rel_key"][h, K - 1 - distance],
        tensors["content_bias"],
        tensors["position_bias"],
        None,
        key_mask,
        window,
    )
    actual = tile_by_tile(tensors, key_mask, window)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves = list(tensors.values())
    of_expected = torch.autograd.grad(expected, leaves, cotangent, materialize_grads=True)
    of_actual = torch.autograd.grad(actual, leaves, cotangent)
    for name, exact, gradient in zip(tensors, of_expected, of_actual, strict=True):
        torch.testing.assert_close(gradient, exact, atol=1e-12, rtol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("products", ["onednn", "mkl"])
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
def test_large_tiles_agree_with_eager(products, masked):
    """The sizes at which the default takes them: with gradient and without, with oneDNN's products and MKL's."""
    tensors, key_mask = draw((2, 2, 191, 800, 41), masked=masked)
    del tensors["rel_bias"]
    assert _fastest(AttentionInputs(**tensors, scaling=1.0)) == "txl_tiles"
    arguments, results = {"key_mask": key_mask, "window": 600 if masked else None}, {}
    for name in ("eager", "auto"):
        with torch.backends.mkldnn.flags(enabled=products == "onednn"):
            output, _ = relative_attention(**tensors, **arguments, implementation=name)
            results[name] = [output, *torch.autograd.grad(output.square().sum(), list(tensors.values()))]
    for quantity, a, b in zip(["output", *tensors], results["auto"], results["eager"], strict=True):
        assert (a - b).norm() <= 5e-6 * b.norm(), quantity
    with torch.no_grad():
        output, _ = relative_attention(**tensors, **arguments, implementation="auto")
    torch.testing.assert_close(output, results["auto"][0])


def test_tiles_drop_probabilities_like_eager_and_replay():
    """Every probability is dropped by itself, the rest scaled; the gradient is that of what was kept."""
    tensors, _ = draw((1, 2, 5, 4, 9), torch.float64)
    del tensors["rel_bias"]
    # With the unit vectors for values, what comes out are the probabilities.
    tensors["value"] = torch.eye(9, dtype=torch.float64).expand(1, 2, 9, 9).clone()
    probabilities = tile_by_tile(tensors)
    torch.manual_seed(3)
    dropped = tile_by_tile(tensors, dropout=0.4)
    kept = (dropped != 0) / 0.6
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
def test_sdpa_without_gradient(shape, window, masked):
    """On CPU a query with gradient takes eager's path, so the fused one is compared here."""
    tensors, key_mask = draw(shape, masked=masked)
    tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    expected, _ = relative_attention(**tensors, key_mask=key_mask, window=window)
    actual, _ = relative_attention(**tensors, key_mask=key_mask, window=window, implementation="sdpa")
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    gradients = []
    for implementation in ("eager", "sdpa"):
        # The query stays without gradient, so that PyTorch's own backward is run.
        leaves = {name: t.clone().requires_grad_(name != "query") for name, t in tensors.items()}
        output, _ = relative_attention(**leaves, key_mask=key_mask, window=window, implementation=implementation)
        output.square().sum().backward()
        gradients.append({name: leaf.grad for name, leaf in leaves.items() if name != "query"})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("shape", list(SHAPES.values())[::2], ids=list(SHAPES)[::2])
def test_flex_attention_without_gradient(shape, masked):
    tensors, key_mask = draw(shape, masked=masked)
    tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    with torch.no_grad():
        expected, _ = relative_attention(**tensors, key_mask=key_mask, window=4)
        actual, _ = relative_attention(**tensors, key_mask=key_mask, window=4, implementation="flex_attention")
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_fallback_warns_once(caplog):
    logging.get_logger("transformers").propagate = True
    tensors, _ = draw((1, 1, 3, 2, 8))
    for _ in range(2):
        relative_attention(**tensors, implementation="flex_attention", dropout=0.1)
    warnings = [record.message for record in caplog.records if "dropout of probabilities" in record.message]
    assert len(warnings) == 1 and "'flex_attention' falls back to 'auto'" in warnings[0]


def test_dropout_drops_probabilities_and_keeps_their_mean():
    tensors, _ = draw((1, 2, 4, 3, 8))
    tensors["value"] = torch.ones_like(tensors["value"])
    torch.manual_seed(0)
    outputs = torch.stack([relative_attention(**tensors, dropout=0.5)[0] for _ in range(500)])
    assert outputs.std(0).min() > 0.1
    assert abs(outputs.mean() - 1) < 0.02


def test_unknown_backend_is_named():
    tensors, _ = draw((1, 1, 2, 0, 4))
    with pytest.raises(ValueError, match="'flash'.*auto, eager, sdpa, txl_tiles, flex_attention, txl_triton"):
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


@pytest.mark.parametrize("implementation", [name for name in RELATIVE_ATTENTION_FUNCTIONS if name != "eager"])
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
