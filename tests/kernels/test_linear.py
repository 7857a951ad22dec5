"""Products by oneDNN: equal to PyTorch's own, forward and backward, wherever they stand in for them."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from txl_hf.kernels import operators as linear
from txl_hf.kernels.operators import _onednn_takes, product
from txl_hf.kernels.operators import linear as project


def project_after(memory, segment, first, second):
    return linear.linear_after(memory, segment, [first, second])


@pytest.fixture(autouse=True)
def onednn(monkeypatch):
    """oneDNN's products, also on a CPU where they do not pay, and of small matrices; how often they were taken."""
    if not linear._has_onednn():
        pytest.skip("this build of PyTorch has no product by oneDNN")
    taken = []
    monkeypatch.setattr(linear, "_onednn_is_faster", lambda: True)
    monkeypatch.setattr(linear, "FEW_MULTIPLICATIONS", 0)
    onednn_product = linear._onednn_product
    monkeypatch.setattr(linear, "_onednn_product", lambda *args: taken.append(args) or onednn_product(*args))
    return taken


def operands(*shape, n=7, dtype=torch.float32, bias=True):
    generator = torch.Generator().manual_seed(0)
    sizes = [shape, (n, shape[-1])] + [(n,)] * bias
    return [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("shape", [(5,), (1, 5), (2, 3, 41), (0, 5), (33, 1), (128, 41), (129, 41)], ids=str)
def test_product_is_linear(shape, bias, onednn):
    tensors = operands(*shape, bias=bias)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    actual, expected = product(*tensors), nn.functional.linear(*exact)
    assert len(onednn) == (1 if actual.numel() else 0)
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)
    cotangent = torch.randn(expected.shape, dtype=torch.float64)
    of_actual = torch.autograd.grad(actual, tensors, cotangent.float())
    of_expected = torch.autograd.grad(expected, exact, cotangent)
    assert len(onednn) == (3 if actual.numel() else 0)
    for a, b in zip(of_actual, of_expected, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("n", [1, 7])
@pytest.mark.parametrize("shape", [(5,), (1, 5), (4, 5), (2, 3, 5), (1, 1, 5), (2, 100, 5)], ids=str)
def test_what_comes_out_may_be_changed_in_place(shape, n):
    """As what adapters do: `result += update`."""
    gradients = []
    for function in (product, nn.functional.linear):
        tensors = operands(*shape, n=n)
        result = function(*tensors)
        result += 1
        result *= 2
        gradients.append(torch.autograd.grad(result.square().sum(), tensors))
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected)


def test_operands_may_lie_in_any_order(onednn):
    wide = torch.randn(6, 8, 10)
    for a, b in ((wide[:, :, 3], wide[0, :5, :8]), (wide[0].t(), wide[1, :, :8].t()), (wide[1], wide[2, ::2])):
        torch.testing.assert_close(product(a, b), a @ b.t())
    assert len(onednn) == 3


@pytest.mark.parametrize("trained", [0, 1, 2], ids=["input", "weight", "bias"])
def test_only_what_is_trained_gets_a_gradient(trained):
    tensors = operands(3, 5)
    for i, tensor in enumerate(tensors):
        tensor.requires_grad_(i == trained)
    product(*tensors).sum().backward()
    assert [tensor.grad is not None for tensor in tensors] == [i == trained for i in range(3)]


def test_second_derivatives_and_function_transforms(onednn):
    a, b, bias = operands(4, 5)
    found = []
    for function in (product, nn.functional.linear):
        (first,) = torch.autograd.grad(function(a, b, bias).pow(3).sum(), a, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [a, b]))
        assert onednn
    actual, second = found
    for x, y in zip(actual, second, strict=True):
        torch.testing.assert_close(x, y)
    per_row = torch.func.vmap(torch.func.grad(lambda row: product(row, b, bias).square().sum()))(a.detach())
    (expected,) = torch.autograd.grad(product(a, b, bias).square().sum(), a)
    torch.testing.assert_close(per_row, expected)


def test_what_onednn_is_not_asked(onednn):
    a, b, _ = operands(3, 5)
    assert _onednn_takes(a, b)
    assert not _onednn_takes(a.double(), b.double()) and not _onednn_takes(a.to("meta"), b.to("meta"))
    with torch.autocast("cpu", torch.bfloat16):
        assert product(a, b).dtype == torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False):
        assert not _onednn_takes(a, b)
        assert torch.equal(product(a, b), a @ b.t())
    assert not onednn


@pytest.mark.parametrize(("rows", "n", "takes"), [(1, 256, 0), (15, 256, 0), (16, 256, 1), (1, 257, 1), (0, 8, 0)])
def test_small_products_are_mkl_s(rows, n, takes, onednn, monkeypatch):
    monkeypatch.setattr(linear, "FEW_MULTIPLICATIONS", 1 << 20)
    a, b = torch.randn(rows, 256), torch.randn(n, 256)
    torch.testing.assert_close(product(a, b), a @ b.t(), atol=1e-4, rtol=1e-4)
    assert len(onednn) == takes


@pytest.mark.parametrize("around", ["vmap", "jvp", "forward mode"])
def test_what_a_transform_takes_part_in_is_not_plain(around):
    """And what it does not is: a checkpoint that recomputes it elsewhere is to draw the same dropout."""
    a, other = torch.randn(3, 5), torch.randn(3, 5)
    found = []

    def ask(x):
        found.extend([linear.is_plain(x), linear.is_plain(x, other), linear.is_plain(other)])
        return x

    if around == "vmap":
        torch.func.vmap(ask)(a)
    elif around == "jvp":
        torch.func.jvp(ask, (a,), (a,))
    else:
        with forward_ad.dual_level():
            ask(forward_ad.make_dual(a, other))
    assert found == [False, False, True]


def layer_and_states():
    torch.manual_seed(0)
    return nn.Linear(5, 7), torch.randn(2, 3, 5)


def test_a_plain_layer_is_projected_by_onednn(onednn):
    layer, states = layer_and_states()
    torch.testing.assert_close(project(layer, states), layer(states))
    assert len(onednn) == 1

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, states):
            return project(self.layer, states)

    traced = torch.jit.trace(Around(), states)
    compiled = torch.compile(project, backend="eager", fullgraph=True)
    torch.testing.assert_close(traced(states), layer(states))
    torch.testing.assert_close(compiled(layer, states), layer(states))


def hook_forward(layer):
    layer.register_forward_hook(lambda module, inputs, output: output + 100)


def hook_before(layer):
    layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 100,))


def hook_everywhere(layer):
    return nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output + 100)


def replace_forward(layer):
    """As `accelerate` does to load a layer's weights when it is called."""
    forward = layer.forward
    layer.forward = lambda states: forward(states) + 100


def parametrize(layer):
    class Larger(nn.Module):
        def forward(self, weight):
            return weight + 100

    nn.utils.parametrize.register_parametrization(layer, "weight", Larger())


@pytest.mark.parametrize("wrap", [hook_forward, hook_before, hook_everywhere, replace_forward, parametrize])
def test_a_layer_that_someone_wrapped_is_called(wrap, onednn):
    layer, states = layer_and_states()
    plain = layer(states)
    handle = wrap(layer)
    try:
        result = project(layer, states)
        assert torch.equal(result, layer(states)) and not torch.allclose(result, plain, atol=1)
    finally:
        if handle is not None:
            handle.remove()
    assert not onednn


def test_a_hook_on_gradients_is_called():
    layer, states = layer_and_states()
    seen = []
    layer.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].shape))
    project(layer, states).sum().backward()
    assert seen == [(2, 3, 7)]


LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "r_proj", "o_proj", "up_proj", "down_proj", "clusters")


def linear_layers(model):
    return {name: module for name, module in model.named_modules() if name.rpartition(".")[2] in LINEAR_LAYERS}


def test_every_layer_is_a_plain_linear_one(make_model):
    """Quantisers ask `type(module) is nn.Linear`: bitsandbytes replaced nothing and reported success."""
    layers = linear_layers(make_model())
    assert len(layers) == 2 * 7 + 1
    assert all(type(layer) is nn.Linear for layer in layers.values())


@torch.no_grad()
def test_dynamic_quantisation_quantises_every_layer(make_model, make_ids):
    model, ids = make_model(), make_ids(2, 5)
    expected = model(ids).logits
    with warnings.catch_warnings():
        # torch.ao.quantization is deprecated, and still what many use.
        warnings.simplefilter("ignore", DeprecationWarning)
        quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    kinds = {type(layer) for layer in linear_layers(quantized).values()}
    assert kinds == {torch.ao.nn.quantized.dynamic.Linear}
    logits = quantized(ids).logits
    assert not torch.equal(logits, expected)
    torch.testing.assert_close(logits, expected, atol=0.5, rtol=0.5)


def test_adalora_trains(make_model, make_ids, onednn):
    """PEFT's layer adds to the output of the one that it wraps, in place."""
    peft = pytest.importorskip("peft")
    config = peft.AdaLoraConfig(target_modules=["q_proj", "v_proj"], init_r=4, target_r=2, total_step=10)
    model = peft.get_peft_model(make_model().train(), config)
    ids = make_ids(2, 5)
    model(input_ids=ids, labels=ids).loss.backward()
    adapted = [p for name, p in model.named_parameters() if "lora_E" in name]
    assert onednn and adapted and all(p.grad is not None for p in adapted)


class EightBits(nn.Module):
    """As bitsandbytes replaces layers: no `nn.Linear`, weights that are no floats."""

    def __init__(self, layer):
        super().__init__()
        scale = layer.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.weight = nn.Parameter((layer.weight / scale).round().to(torch.int8), requires_grad=False)
        self.bias = layer.bias

    def forward(self, states):
        return nn.functional.linear(states, self.weight * self.scale, self.bias)


def test_replaced_layers_do_the_work_in_training_and_decoding(make_model, make_ids):
    model = make_model()
    ids = make_ids(2, 5)
    replaced = copy.deepcopy(model)
    rounded = copy.deepcopy(model)
    for name, layer in linear_layers(model).items():
        replaced.set_submodule(name, EightBits(layer))
        eight = EightBits(layer)
        rounded.get_submodule(name).weight.data = eight.weight * eight.scale
    loss, expected = replaced(ids, labels=ids).loss, rounded(ids, labels=ids).loss
    torch.testing.assert_close(loss, expected)
    assert not torch.equal(loss, model(ids, labels=ids).loss)
    loss.backward()
    assert replaced.transformer.embed_tokens.emb_layers[0].weight.grad.norm() > 0
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(replaced.generate(ids, **options), rounded.generate(ids, **options))


@pytest.mark.parametrize("moved", [0, 1, 2], ids=["input", "weight", "bias"])
@pytest.mark.parametrize("how", ["dual", "func"])
def test_forward_mode(moved, how):
    """Also without gradients of parameters, where no graph would notice that a derivative got lost."""
    tensors = [tensor.detach() for tensor in operands(3, 5)]
    tangent = torch.randn_like(tensors[moved])

    def function(tensor):
        return product(*tensors[:moved], tensor, *tensors[moved + 1 :])

    if how == "func":
        _, derivative = torch.func.jvp(function, (tensors[moved],), (tangent,))
    else:
        with forward_ad.dual_level():
            derivative = forward_ad.unpack_dual(function(forward_ad.make_dual(tensors[moved], tangent))).tangent
    # Affine in each operand, so that any step is as good as a small one.
    expected = function(tensors[moved] + tangent) - function(tensors[moved])
    torch.testing.assert_close(derivative, expected, atol=1e-5, rtol=1e-5)


# --- memory and segment ----------------------------------------------------------------------------------------------


def layers_and_states(dtype=torch.float64, memory_length=5):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 4, bias=False, dtype=dtype) for _ in range(2)]
    memory, segment = (torch.randn(2, n, 6, dtype=dtype) for n in (memory_length, 3))
    return layers, memory, segment.requires_grad_()


def joined(memory, segment, first, second):
    states = torch.cat([memory, segment], dim=1)
    return first(states), second(states)


@pytest.mark.parametrize("memory_length", [0, 1, 5])
@pytest.mark.parametrize("batched", [False, True], ids=["rows-brought-together", "batched"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_projections_after_a_memory_are_those_of_the_concatenation(monkeypatch, dtype, batched, memory_length):
    """Also as a GPU multiplies rows that lie apart."""
    monkeypatch.setattr(linear, "_multiplies_batches", lambda rows: batched)
    layers, memory, segment = layers_and_states(dtype, memory_length)
    inputs = [segment, *(layer.weight for layer in layers)]
    results = []
    for function in (joined, project_after):
        outputs = function(memory, segment, *layers)
        loss = (outputs[0].square() * outputs[1]).sum()
        results.append([*outputs, *torch.autograd.grad(loss, inputs)])
    assert ("AfterMemory" in str(outputs[0].grad_fn)) == (memory_length > 0)
    tolerance = {"atol": 0.1, "rtol": 0.05} if dtype == torch.bfloat16 else {"atol": 1e-6, "rtol": 1e-5}
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, **tolerance)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("batched", [False, True], ids=["rows-brought-together", "batched"])
def test_projections_after_a_memory_are_the_same_in_a_graph(monkeypatch, batched, frozen):
    monkeypatch.setattr(linear, "_multiplies_batches", lambda rows: batched)
    torch.compiler.reset()
    layers, memory, segment = layers_and_states()
    layers[1].requires_grad_(not frozen)
    inputs = [segment, *(layer.weight for layer in layers if layer.weight.requires_grad)]
    compiled = torch.compile(project_after, backend="aot_eager", fullgraph=True)
    results = []
    for function in (joined, compiled):
        outputs = function(memory, segment, *layers)
        loss = (outputs[0].square() * outputs[1]).sum()
        results.append([*outputs, *torch.autograd.grad(loss, inputs)])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


def test_projections_after_a_memory_can_be_differentiated_twice():
    layers, memory, segment = layers_and_states()
    weights = [layer.weight for layer in layers]
    # A function of the projections that is not linear, so that each order of derivatives needs all of them.
    torch.autograd.gradgradcheck(
        lambda segment, *_: [out.square() for out in project_after(memory, segment, *layers)],
        (segment, *weights),
    )


def test_under_autocast_memory_and_segment_are_joined_in_its_type():
    layers, memory, segment = layers_and_states(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected, outputs = joined(memory, segment, *layers), project_after(memory, segment, *layers)
        frozen = project_after(memory, segment.detach(), *layers)
    for one, other, third in zip(expected, outputs, frozen, strict=True):
        assert other.dtype == torch.bfloat16
        torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)
        torch.testing.assert_close(third, other, atol=0.02, rtol=0.02)
    gradients = torch.autograd.grad(sum(out.float().sum() for out in outputs), [segment, layers[0].weight])
    assert [gradient.dtype for gradient in gradients] == 2 * [torch.float32]


def test_a_memory_with_a_gradient_and_layers_that_others_have_changed_are_projected_as_they_are():
    layers, memory, segment = layers_and_states()
    memory.requires_grad_()
    torch.autograd.grad(project_after(memory, segment, *layers)[1].sum(), memory)
    memory = memory.detach()
    layers[1].register_forward_hook(lambda module, args, output: 2 * output)
    torch.compiler.reset()
    for function in (project_after, torch.compile(project_after, backend="eager")):
        torch.testing.assert_close(function(memory, segment, *layers)[1], layers[1](torch.cat([memory, segment], 1)))


def test_frozen_projections_get_no_gradient():
    layers, memory, segment = layers_and_states()
    layers[0].requires_grad_(False)
    sum(out.sum() for out in project_after(memory, segment, *layers)).backward()
    assert layers[0].weight.grad is None and layers[1].weight.grad.norm() > 0 < segment.grad.norm()


@pytest.mark.parametrize(
    ("amx", "avx512_bf16", "intel", "faster"),
    [
        (True, True, True, True),
        (False, True, True, False),
        (False, True, False, True),
        (False, False, True, False),
        (False, False, False, False),
    ],
)
def test_where_a_cpu_multiplies_bf16_faster(monkeypatch, amx, avx512_bf16, intel, faster):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(linear, "is_by_intel", lambda: intel)
    assert linear.bf16_is_faster() is faster


@pytest.mark.parametrize(
    ("vendor", "family", "single"),
    [("AuthenticAMD", 25, False), ("AuthenticAMD", 26, True), ("GenuineIntel", 25, True)],
)
def test_one_pair_of_matrices_at_a_time_where_onednn_is_much_faster(monkeypatch, vendor, family, single):
    description = (
        f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: 17\nmodel name\t: AMD EPYC"
    )
    monkeypatch.setattr(linear, "_cpu", lambda: description)
    # Without its cache, which has this machine's answer.
    monkeypatch.setattr(linear, "_takes_two_turns", linear._takes_two_turns.__wrapped__)
    assert linear.products_are_single(torch.ones(2, 3)) is single
    assert not linear.products_are_single(torch.ones(2, 3, dtype=torch.bfloat16))


@pytest.fixture
def rows(monkeypatch):
    """oneDNN's products of one row in bf16, also on a CPU where they do not pay; how often they were taken."""
    # Its operator raises there. `product` asks it where there is AMX, of which these CPUs have none.
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN multiplies no bf16 on this CPU")
    taken = []
    monkeypatch.setattr(linear, "is_by_intel", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    onednn_row = linear._onednn_row
    monkeypatch.setattr(linear, "_onednn_row", lambda *args: taken.append(args) or onednn_row(*args))
    return taken


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("shape", [(41,), (1, 64), (1, 1, 41)], ids=str)
@torch.no_grad()
def test_a_row_in_bf16_is_the_matrix_times_a_column(shape, bias, rows):
    tensors = operands(*shape, n=130, dtype=torch.bfloat16, bias=bias)
    result = product(*tensors)
    assert len(rows) == 1 and result.shape == (*shape[:-1], 130) and result.dtype == torch.bfloat16
    exact = nn.functional.linear(*(tensor.double() for tensor in tensors))
    # Rounded once, behind the bias: half a unit in the last place of numbers below 32.
    torch.testing.assert_close(result.double(), exact, atol=0.0626, rtol=0)
    result += 1


def test_other_rows_go_where_they_went(rows):
    """With a gradient, under autocast, of several rows, of none, in fp32, or where oneDNN is turned off; and what does
    not fit goes to PyTorch, which says so."""
    tensors = operands(1, 41, dtype=torch.bfloat16)
    product(*tensors).sum().backward()
    with torch.no_grad():
        for shape in ((2, 41), (0, 41)):
            product(*operands(*shape, dtype=torch.bfloat16))
        product(*operands(1, 41))
        with torch.autocast("cpu", torch.bfloat16):
            product(*tensors)
        with torch.backends.mkldnn.flags(enabled=False):
            product(*tensors)
        row, matrix, _ = tensors
        with pytest.raises(RuntimeError, match="expanded size"):
            product(row, matrix, row.new_zeros(3))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            product(row[:, 1:], matrix)
    assert not rows


@pytest.mark.parametrize(
    ("intel", "dtype", "sooner"),
    [(True, torch.float32, True), (False, torch.float32, False), (True, torch.bfloat16, False)],
)
def test_where_a_row_reads_columns_sooner(monkeypatch, intel, dtype, sooner):
    monkeypatch.setattr(linear, "is_by_intel", lambda: intel)
    assert linear.reads_columns_sooner(torch.zeros(1, 3, dtype=dtype)) is sooner
    assert not linear.reads_columns_sooner(torch.zeros(1, 3, dtype=dtype, device="meta"))
