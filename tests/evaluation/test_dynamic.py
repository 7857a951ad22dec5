"""Dynamic evaluation: the formulas by hand, no token that pays for a later one, and weights that come back."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch

import adaptation_process
import launcher
from txl_hf import (
    ContinuousCache,
    DynamicEvaluation,
    GradientStatistics,
    TransfoXLForCausalLM,
    evaluate_language_model,
    token_losses,
)
from txl_hf.evaluation import dynamic as adaptation
from txl_hf.evaluation.dynamic import Diverged

RATE = 0.05


def parameters_of(model: TransfoXLForCausalLM) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def moved(model: TransfoXLForCausalLM, found: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not torch.equal(parameter, found[name])}


def assert_restored(model: TransfoXLForCausalLM, found: dict[str, torch.Tensor]):
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, found[name]) and torch.equal(tensor.signbit(), found[name].signbit()), name


def by_hand(
    model: TransfoXLForCausalLM,
    streams: torch.Tensor,
    segment_length: int,
    dynamic: DynamicEvaluation,
    statistics: torch.Tensor | None = None,
) -> torch.Tensor:
    """(B, n - 1) losses of streams (B, n): the formulas of the docstring, on a copy of the model."""
    model = copy.deepcopy(model).eval()
    theta = [parameter for name, parameter in model.named_parameters() if re.search(dynamic.parameters or "", name)]
    theta_0 = [parameter.detach().clone() for parameter in theta]

    def segments(text):
        mems = None
        for start in range(0, text.shape[1] - 1, segment_length):
            part = text[:, start : start + segment_length + 1]
            outputs = model(part[:, :-1], shift_labels=part[:, 1:], mems=mems)
            mems = outputs.mems
            yield outputs.losses.detach(), torch.autograd.grad(outputs.losses.mean(), theta)

    squares = [torch.zeros_like(parameter) for parameter in theta]
    for _, gradients in segments(statistics) if statistics is not None else ():
        squares = [square + gradient**2 for square, gradient in zip(squares, gradients, strict=True)]
    losses = []
    for part, gradients in segments(streams):
        losses.append(part)
        with torch.no_grad():
            for parameter, start, gradient, square in zip(theta, theta_0, gradients, squares, strict=True):
                back = dynamic.decay * (start - parameter)
                step = dynamic.learning_rate * gradient
                if statistics is not None:
                    back = (dynamic.decay * square.sqrt()).clamp(max=1) * (start - parameter)
                    step = step / (square.sqrt() + dynamic.epsilon)
                parameter += back - step
    return torch.cat(losses, dim=1)


@pytest.mark.parametrize("settings", [{}, {"cutoffs": [], "div_val": 1}, {"mem_len": 0}, {"attn_type": 1}], ids=str)
@pytest.mark.parametrize(
    ("with_statistics", "batch_size"), [(False, 3), (True, 3), pytest.param(True, 1, marks=pytest.mark.slow)]
)
def test_the_formulas(make_model, make_ids, settings, with_statistics, batch_size):
    model, ids = make_model(**settings).double(), make_ids(1, 66)[0]
    training = make_ids(1, 45, seed=1)[0] if with_statistics else None
    dynamic = DynamicEvaluation(RATE, decay=0.3, epsilon=0.5, statistics=training)
    streams = [None if text is None else text.view(batch_size, -1) for text in (ids, training)]
    expected = by_hand(model, streams[0], 5, dynamic, streams[1])
    found = token_losses(model, ids, 5, batch_size=batch_size, dynamic=dynamic)
    torch.testing.assert_close(found, expected.flatten().float(), rtol=1e-6, atol=1e-6)
    static = token_losses(model, ids, 5, batch_size=batch_size)
    assert (found - static).abs().max() > 1e-2, "the weights moved"
    result = evaluate_language_model(model, ids, 5, batch_size=batch_size, dynamic=dynamic)
    assert result.nll == pytest.approx(found.double().mean().item(), rel=1e-6)
    assert result.dynamic == dynamic.describe()


@pytest.mark.parametrize(
    "reading",
    [
        {"memory_length": 7, "clamp_len": 4},
        {"memory_length": 7, "ext_len": 2},
        {"memory_length": 7, "same_length": True},
        {"memory_length": 7, "document_end": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"parameters": r"layers\.1\."}, marks=pytest.mark.slow),
        pytest.param({"dtype": torch.bfloat16}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_statistics_are_taken_once_for_many_readings(make_model, make_ids, settings, reading):
    """Those of all parameters serve some of them too."""
    model, ids, training = make_model(initial_memory="empty"), make_ids(1, 66)[0], make_ids(1, 45, seed=1)[0]
    model.to(settings.get("dtype", torch.float32))
    lengths = {"segment_length": 5, "batch_size": 3, **reading}
    weights = parameters_of(model)
    taken = GradientStatistics.of(model, training, **lengths)
    assert_restored(model, weights)
    for rate in (RATE, RATE / 3):
        chosen = {"decay": 0.3, "epsilon": 0.5, "parameters": settings.get("parameters")}
        expected = DynamicEvaluation(rate, **chosen, statistics=training)
        dynamic = DynamicEvaluation(rate, **chosen, statistics=taken)
        losses = token_losses(model, ids, **lengths, dynamic=dynamic)
        assert torch.equal(losses, token_losses(model, ids, **lengths, dynamic=expected))
        assert dynamic.describe() == expected.describe() and dynamic.describe()["statistics"] == 45
    assert_restored(model, weights)
    without = {"segment_length": 5, "memory_length": 7, "batch_size": 3}
    other = GradientStatistics.of(model, training, **without)
    names = taken.roots.keys()
    assert any(not torch.equal(taken.roots[name], other.roots[name]) for name in names), "the lengths count"


@pytest.mark.parametrize(
    ("reading", "message"),
    [
        ({"segment_length": 6}, "taken with segment_length=5, and the text is read with segment_length=6:"),
        ({"batch_size": 2}, "taken with batch_size=3, and .* with batch_size=2:"),
        (
            {"memory_length": 9, "clamp_len": 2},
            "taken with memory_length=7, clamp_len=-1, and .* memory_length=9, clamp_len=2:",
        ),
        ({"ext_len": 1}, "taken with ext_len=0"),
        ({"same_length": True}, "taken with same_length=False"),
        ({"document_end": 7}, "taken with documents=False, and .* with documents=True:"),
        ({"document_end": [20, 40]}, "taken with documents=False, and .* with documents=True:"),
    ],
    ids=str,
)
def test_statistics_of_other_lengths_are_refused(make_model, make_ids, reading, message):
    """They served any reading: of segments ten times as long, say, at a rate that is then of another size."""
    model, ids = make_model(initial_memory="empty"), make_ids(1, 66)[0]
    lengths = {"segment_length": 5, "memory_length": 7, "batch_size": 3}
    taken = GradientStatistics.of(model, ids, **lengths)
    assert "tensor" not in repr(taken)
    with pytest.raises(ValueError, match=f"^statistics: they were {message}"):
        token_losses(model, ids, **lengths | reading, dynamic=DynamicEvaluation(RATE, statistics=taken))


def test_statistics_of_documents_serve_documents_however_they_are_told(make_model, make_ids):
    model, text = make_model(initial_memory="empty"), make_ids(1, 66)[0]
    places = (text == text[9]).nonzero()[:, 0] + 1
    taken = GradientStatistics.of(model, make_ids(1, 45, seed=1)[0], 5, 7, document_end=int(text[9]))
    dynamic = DynamicEvaluation(RATE, statistics=taken)
    told = [token_losses(model, text, 5, 7, document_end=end, dynamic=dynamic) for end in (int(text[9]), places)]
    assert torch.equal(*told)
    with pytest.raises(ValueError, match="taken with documents=True, and the text is read with documents=False:"):
        token_losses(model, text, 5, 7, dynamic=dynamic)


def test_statistics_are_taken_once_for_prompt_after_prompt(make_model, make_ids):
    model, training = make_model(initial_memory="empty"), make_ids(1, 45, seed=1)[0]
    weights = parameters_of(model)
    taken = GradientStatistics.of(model, training, 5, 7)
    for seed in (2, 3):
        prompt, found = make_ids(1, 21, seed=seed)[0], []
        for statistics in (training, taken):
            with DynamicEvaluation(RATE, epsilon=0.5, statistics=statistics).adapted_to(model, prompt, 5, 7):
                found.append(parameters_of(model))
            assert_restored(model, weights)
        assert all(torch.equal(found[0][name], found[1][name]) for name in weights)
        assert any(not torch.equal(found[0][name], weights[name]) for name in weights), "they have followed"
    several = GradientStatistics.of(model, training, 5, 7, batch_size=3)
    with pytest.raises(ValueError, match="taken with batch_size=3, and the text is read with batch_size=1"):
        with DynamicEvaluation(RATE, statistics=several).adapted_to(model, prompt, 5, 7):
            pass
    assert_restored(model, weights)


def test_statistics_of_another_model_or_of_other_parameters(make_model, make_ids):
    model, ids = make_model(), make_ids(1, 40)[0]
    some = GradientStatistics.of(model, ids, 5, parameters=r"layers\.1\.")
    assert some.roots and all("layers.1." in name for name in some.roots)
    with pytest.raises(
        ValueError, match=r"^statistics: transformer\.\S+, of shape \(.*\) in the model, is not in them"
    ):
        token_losses(model, ids, 5, dynamic=DynamicEvaluation(RATE, statistics=some))
    other = GradientStatistics.of(make_model(d_inner=20), ids, 5)
    with pytest.raises(
        ValueError, match=r"mlp\.up_proj\.weight, of shape .* in the model, is of shape \(20, 16\) there"
    ):
        token_losses(model, ids, 5, dynamic=DynamicEvaluation(RATE, statistics=other))


@pytest.mark.parametrize(
    ("dtype", "atol", "last_bits"),
    [pytest.param(torch.float32, 1e-5, 1e-6, marks=pytest.mark.slow), (torch.float64, 1e-6, 0.0)],
    ids=str,
)
def test_rate_0_is_a_static_evaluation(make_model, make_ids, dtype, atol, last_bits):
    """Computed in fp64, bit for bit one that remembers states too (fp32 rounds one loss otherwise on an AMD EPYC); a
    static evaluation remembers them projected."""
    model, ids = make_model().to(dtype), make_ids(1, 90)[0]
    mems, losses = None, []
    for start in range(0, 44, 7):
        part = ids.view(2, -1)[:, start : start + 8]
        outputs = model(part[:, :-1], shift_labels=part[:, 1:], mems=mems)
        mems = outputs.mems
        losses.append(outputs.losses.detach().float())
    static = token_losses(model, ids, 7, batch_size=2)
    for dynamic in (DynamicEvaluation(0.0), DynamicEvaluation(0.0, decay=0.5, statistics=ids[:40])):
        found = token_losses(model, ids, 7, batch_size=2, dynamic=dynamic)
        torch.testing.assert_close(found, torch.cat(losses, dim=1).flatten(), rtol=0, atol=last_bits)
        torch.testing.assert_close(found, static, rtol=0, atol=atol)
        result = evaluate_language_model(model, ids, 7, batch_size=2, dynamic=dynamic)
        assert result.nll == pytest.approx(static.double().mean().item(), abs=1e-6)
        warmed = token_losses(model, ids, 7, batch_size=2, warm_up=9, dynamic=dynamic)
        assert torch.equal(warmed, found.view(2, -1)[:, 8:].flatten())


@pytest.mark.parametrize("warm_up", [5, 9, 30])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_weights_follow_a_warm_up(make_model, make_ids, batch_size, warm_up):
    """Whether it ends with a segment or within one."""
    model, ids = make_model(), make_ids(1, 41 * batch_size)[0]
    options = {"batch_size": batch_size, "dynamic": DynamicEvaluation(RATE, epsilon=1.0, statistics=ids[:30])}
    whole = token_losses(model, ids, 8, **options).view(batch_size, -1)
    warmed = token_losses(model, ids, 8, warm_up=warm_up, **options).view(batch_size, -1)
    assert torch.equal(warmed, whole[:, warm_up - 1 :])
    result = evaluate_language_model(model, ids, 8, warm_up=warm_up, **options)
    assert result.nll == pytest.approx(warmed.double().mean().item(), rel=1e-6)


@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("cache", [None, ContinuousCache(12, 0.3, 0.5)], ids=["alone", "cache"])
@pytest.mark.parametrize("with_statistics", [False, True])
def test_no_token_changes_its_own_loss_or_an_earlier_one(make_model, make_ids, with_statistics, cache, batch_size):
    """Nor one of its segment but through the memory and the text, as ever: those that are later change nothing. In
    another stream it changes what comes after its segment."""
    model, ids = make_model(), make_ids(1, 41 * batch_size)[0]
    statistics = make_ids(1, 60, seed=1)[0] if with_statistics else None
    dynamic = DynamicEvaluation(RATE, epsilon=1.0, statistics=statistics)

    def losses(streams):
        found = token_losses(model, streams.flatten(), 8, batch_size=batch_size, dynamic=dynamic, cache=cache)
        return found.view(batch_size, -1)

    streams = ids.view(batch_size, -1)
    expected, own = losses(streams), batch_size // 2
    for changed in (9, 16, 25, 40):
        other = streams.clone()
        other[own, changed:] = (other[own, changed:] + 1) % 60
        found = losses(other)
        for stream in range(batch_size):
            # Loss i is that of token i + 1.
            first = changed - 1 if stream == own else (changed - 1) // 8 * 8 + 8
            assert torch.equal(found[stream, :first], expected[stream, :first])
            assert (found[stream, first:] != expected[stream, first:]).all()


def test_what_a_text_repeats_becomes_cheaper(make_model, make_ids):
    model, ids = make_model(), make_ids(1, 12)[0].repeat(12)
    static = evaluate_language_model(model, ids, 6)
    assert evaluate_language_model(model, ids, 6, dynamic=DynamicEvaluation(0.1)).nll < static.nll - 1


class Stop(BaseException):
    pass


@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt, Stop])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_gradients_and_mode_come_back(make_model, make_ids, error, dtype):
    model, ids = make_model(dropout=0.5).to(dtype).train(), make_ids(1, 60)[0]
    # A weight of -0, which a sum with 0 would lose, and a gradient that is someone else's.
    with torch.no_grad():
        model.transformer.layers[0].mlp.up_proj.weight[0] = -0.0
    model.transformer.layers[1].eval()
    parameter = model.transformer.layers[0].mlp.up_proj.weight
    parameter.grad = torch.ones_like(parameter)
    found, modes = parameters_of(model), [module.training for module in model.modules()]
    name = next(name for name, other in model.named_parameters() if other is parameter)
    seen = []

    def watch(*_):
        seen.append(not torch.equal(parameter, found[name]))
        if error is not None and len(seen) == 9:
            raise error

    hook = model.transformer.register_forward_hook(watch)
    dynamic = DynamicEvaluation(RATE, decay=0.1, epsilon=1.0, statistics=ids[:21])
    if error is None:
        token_losses(model, ids, 5, dynamic=dynamic)
    else:
        with pytest.raises(error):
            token_losses(model, ids, 5, dynamic=dynamic)
    hook.remove()
    # Four segments of statistics and the first of the text are read by the weights as they were.
    assert not any(seen[:5]) and all(seen[5:]) and len(seen) >= 9
    assert_restored(model, found)
    assert torch.equal(parameter.grad, torch.ones_like(parameter))
    assert sum(other.grad is not None for other in model.parameters()) == 1
    assert [module.training for module in model.modules()] == modes


def test_dropout_is_off(make_model, make_ids):
    model, ids, dynamic = make_model(dropout=0.5, dropatt=0.5), make_ids(1, 40)[0], DynamicEvaluation(RATE)
    expected = token_losses(model.eval(), ids, 5, dynamic=dynamic)
    assert torch.equal(token_losses(model.train(), ids, 5, dynamic=dynamic), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_in_any_mode_of_the_caller(make_model, make_ids, mode):
    model, ids = make_model(), make_ids(1, 40)[0]
    dynamic = DynamicEvaluation(RATE, epsilon=1.0, statistics=make_ids(1, 30)[0])
    expected = token_losses(model, ids, 5, dynamic=dynamic)
    with mode():
        assert torch.equal(token_losses(model, ids, 5, dynamic=dynamic), expected)
        assert not torch.is_grad_enabled()
        with dynamic.adapted_to(model, ids, 5):
            assert not torch.is_grad_enabled()


@pytest.mark.parametrize("statistics", [None, 30], ids=["plain", "statistics"])
def test_within_the_autocast_of_the_caller(make_model, make_ids, statistics):
    """It keeps casts of weights, which change."""
    model, ids = make_model(), make_ids(1, 40)[0]
    dynamic = DynamicEvaluation(RATE, epsilon=1.0, statistics=None if statistics is None else ids[:statistics])
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        static, expected = token_losses(model, ids, 5), token_losses(model, ids, 5, dynamic=dynamic)
        with dynamic.adapted_to(model, ids, 5):
            adapted = token_losses(model, ids, 5)
    assert (static - expected).abs().max() > 1e-2 and (static - adapted).abs().max() > 1e-2
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(token_losses(model, ids, 5, dynamic=dynamic), expected)
        with dynamic.adapted_to(model, ids, 5):
            assert torch.equal(token_losses(model, ids, 5), adapted)
        assert torch.equal(token_losses(model, ids, 5), static)


def test_small_steps_of_a_model_in_half_precision_add_up(make_model, make_ids):
    """Each is lost in a weight of 8 bits; together they are not."""
    ids = make_ids(1, 12)[0].repeat(12)
    model = make_model().bfloat16()
    static = evaluate_language_model(model, ids, 6).nll
    dynamic = DynamicEvaluation(4e-3)
    expected = static - evaluate_language_model(make_model(), ids, 6, dynamic=dynamic).nll
    assert expected > 0.1
    assert static - evaluate_language_model(model, ids, 6, dynamic=dynamic).nll == pytest.approx(expected, rel=0.15)


def test_only_named_parameters_follow(make_model, make_ids):
    model, ids = make_model().double(), make_ids(1, 40)[0]
    dynamic = DynamicEvaluation(RATE, parameters=r"layers\.1\.")
    found = parameters_of(model)
    with dynamic.adapted_to(model, ids, 5):
        assert moved(model, found) == {name for name in found if "layers.1." in name}
    assert_restored(model, found)
    expected = by_hand(model, ids[None], 5, dynamic)
    torch.testing.assert_close(token_losses(model, ids, 5, dynamic=dynamic), expected[0].float())


def test_a_tied_parameter_goes_by_each_of_its_names(make_model, make_ids):
    model, ids = make_model(), make_ids(1, 40)[0]
    found = parameters_of(model)
    tables = {name for name in found if "emb_layers" in name}
    for pattern in ("lm_head.*weight", "emb_layers"):
        with DynamicEvaluation(RATE, parameters=pattern).adapted_to(model, ids, 5):
            assert tables <= moved(model, found)
        assert_restored(model, found)


def test_an_adapter_follows_alone(make_model, make_ids):
    peft = pytest.importorskip("peft")
    model, ids = make_model(), make_ids(1, 60)[0]
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    found = parameters_of(adapted)
    with DynamicEvaluation(RATE).adapted_to(adapted, ids, 5):
        assert moved(adapted, found) == {name for name in found if "lora" in name}
    assert_restored(adapted, found)


def test_generate_after_adapting_to_a_prompt(make_model, make_ids):
    """As if the weights had been trained on it by hand; afterwards they are as before."""
    # Steps so large let the roundings of fp32 grow.
    model, prompt = make_model().double(), make_ids(1, 12).repeat(1, 10)
    found, before = parameters_of(model), model.generate(prompt, max_new_tokens=12, do_sample=False)
    trained = copy.deepcopy(model)
    mems = None
    for start in range(0, 119, 6):
        part = prompt[:, start : start + 7]
        outputs = trained(part[:, :-1], shift_labels=part[:, 1:], mems=mems)
        mems = outputs.mems
        parameters = list(trained.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(outputs.loss, parameters), strict=True):
            parameter.data -= 0.2 * gradient
    with DynamicEvaluation(0.2).adapted_to(model, prompt[0], 6) as adapted:
        assert adapted is model
        for (name, parameter), expected in zip(model.named_parameters(), trained.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected, msg=name)
        after = model.generate(prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(after, trained.generate(prompt, max_new_tokens=12, do_sample=False))
    assert not torch.equal(after, before)
    assert_restored(model, found)
    with pytest.raises(ZeroDivisionError), DynamicEvaluation(0.2).adapted_to(model, prompt[0], 6):
        raise ZeroDivisionError
    assert_restored(model, found)


def test_nested_adaptations_restore_what_each_found(make_model, make_ids):
    """Also where they follow with the same weights, and where a static evaluation is between them."""
    model, ids = make_model(), make_ids(1, 30)[0]
    found, static = parameters_of(model), token_losses(model, ids, 4)
    with DynamicEvaluation(RATE).adapted_to(model, ids, 4):
        outer = parameters_of(model)
        adapted = token_losses(model, ids, 4)
        with DynamicEvaluation(RATE, parameters=r"layers\.1\.").adapted_to(model, ids[:20], 4):
            assert moved(model, outer) == {name for name in found if "layers.1." in name}
        assert_restored(model, outer)
        token_losses(model, ids, 4, dynamic=DynamicEvaluation(RATE))
        assert torch.equal(token_losses(model, ids, 4), adapted) and not torch.equal(adapted, static)
    assert_restored(model, found)
    assert torch.equal(token_losses(model, ids, 4), static)


def test_two_processes_agree_with_one(tmp_path):
    started = launcher.start(adaptation_process.save_losses, 2, folder=tmp_path)
    assert launcher.join(started) == [0, 0]
    expected = adaptation_process.losses()
    for rank in (0, 1):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(torch.load(tmp_path / "0.pt"), torch.load(tmp_path / "1.pt"))


def test_statistics_that_two_processes_take_are_those_of_one(tmp_path):
    started = launcher.start(adaptation_process.save_statistics, 2, folder=tmp_path)
    assert launcher.join(started) == [0, 0]
    expected = adaptation_process.statistics()
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found.keys() == expected.roots.keys()
        for name, root in expected.roots.items():
            torch.testing.assert_close(found[name], root, rtol=1e-4, atol=1e-5)


def test_where_one_process_diverges_none_waits_for_it(tmp_path):
    started = launcher.start(adaptation_process.save_divergence, 2, folder=tmp_path)
    assert launcher.join(started) == [0, 0]
    for rank in (0, 1):
        assert "no finite loss in the segment at token 0" in (tmp_path / f"{rank}.txt").read_text()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": -1.0}, "learning_rate=-1.0 must be a finite number at least 0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"learning_rate": 1.0, "decay": float("inf")}, "decay=inf"),
        ({"learning_rate": 1.0, "decay": 24.0}, "decay=24.0 must be at most 1 without statistics"),
        ({"learning_rate": 1.0, "epsilon": 0.0}, "epsilon=0.0 must be a finite number above 0"),
        ({"learning_rate": 1.0, "parameters": "("}, r"parameters='\(' is no regular expression"),
        ({"learning_rate": "0.01"}, "learning_rate='0.01' must be a finite number"),
        ({"learning_rate": 1.0, "parameters": ["lora"]}, r"parameters=\['lora'\] must be a regular expression"),
        ({"learning_rate": 1.0, "statistics": 5}, "statistics are of type int: give the token ids"),
        ({"learning_rate": 1.0, "statistics": {"a": torch.ones(1)}}, "of type dict: .*GradientStatistics.of"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        DynamicEvaluation(**settings)


def test_statistics_that_are_not_finite_are_refused(make_model):
    """Of words that the text to be read has not: its own losses are finite."""
    model, training = make_model(), torch.arange(20, 60)
    model.transformer.embed_tokens.emb_layers[-1].weight.data[-5:] = torch.nan
    with pytest.raises(ValueError, match="statistics: no finite loss in the segment at token 5 of the training text"):
        GradientStatistics.of(model, training, 5)


@pytest.mark.parametrize("rate", [0.0, RATE])
def test_a_model_that_computes_nothing_finite_is_not_blamed_on_the_rate(make_model, make_ids, rate):
    model = make_model()
    model.lm_head.out_layers[0].bias.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="at token 0 of the text, with the weights as they began") as raised:
        token_losses(model, make_ids(1, 20)[0], 5, dynamic=DynamicEvaluation(rate))
    assert not isinstance(raised.value, Diverged)


@pytest.mark.parametrize("saved", [None, ["lm_head"]], ids=["adapter", "adapter and head"])
def test_an_adapter_that_takes_no_part_is_refused(make_model, make_ids, saved):
    """Its figure would be that of a static evaluation."""
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["q_proj"], "modules_to_save": saved}
    adapted = peft.get_peft_model(make_model(), peft.LoraConfig(**options))
    adapted.merge_adapter()
    with pytest.raises(ValueError, match="losses depend on none of the .* parameters .*parameters='lora'.* is merged"):
        token_losses(adapted, make_ids(1, 20)[0], 5, dynamic=DynamicEvaluation(RATE, parameters="lora"))


def test_layers_in_parts_are_refused(make_model, make_ids, monkeypatch):
    """Also where the whole model is in none, so that a static evaluation needs nothing of it."""

    class Sharded(torch.nn.LayerNorm):
        pass

    model = make_model()
    model.transformer.layers[1].__class__ = type("Layer", (type(model.transformer.layers[1]), Sharded), {})
    monkeypatch.setattr(adaptation, "FSDPModule", Sharded)
    with pytest.raises(ValueError, match="which FSDP keeps in parts"):
        token_losses(model, make_ids(1, 20)[0], 5, dynamic=DynamicEvaluation(RATE))


@pytest.mark.parametrize("statistics", [None, 30])
def test_a_last_step_that_diverges_is_not_kept_for_what_follows(make_model, make_ids, statistics):
    """No segment comes after it, whose losses would tell: `generate` would go on with numbers that are none."""
    model, ids = make_model(), make_ids(1, 30)[0]
    found = parameters_of(model)
    dynamic = DynamicEvaluation(1e30, statistics=None if statistics is None else ids[:statistics])
    instead = "a smaller one" if statistics is None else "a smaller one or a larger epsilon"
    with pytest.raises(Diverged, match=f"^no finite logits after .* learning_rate=1e\\+30 .* so give {instead}$"):
        with dynamic.adapted_to(model, ids[:6], 5):
            pytest.fail("the prompt is one segment, and the step on it diverges")
    assert_restored(model, found)


def test_layers_that_pass_no_gradient_are_refused(make_model, make_ids):
    """Gradients of all that comes before them would be others, with no more than a warning."""
    quantized = torch.ao.quantization.quantize_dynamic(make_model(), {torch.nn.Linear})
    with pytest.raises(ValueError, match=r"transformer\.layers\.0\.\S+ is quantised .*quantize_dynamic.* no gradient"):
        token_losses(quantized, make_ids(1, 20)[0], 5, dynamic=DynamicEvaluation(RATE))


def test_what_cannot_be_done_is_named(make_model, make_ids):
    model, ids = make_model(), make_ids(1, 40)[0]
    for evaluate in (token_losses, evaluate_language_model):
        with pytest.raises(ValueError, match=r"dynamic=0.01 must be a DynamicEvaluation: DynamicEvaluation\(0.01\)"):
            evaluate(model, ids, 5, dynamic=0.01)
        with pytest.raises(ValueError, match=r"cache=\(2000, 0.1, 0.01\) must be a ContinuousCache"):
            evaluate(model, ids, 5, cache=(2000, 0.1, 0.01))
    with pytest.raises(ValueError, match="parameters='lora' is found in the name of no parameter"):
        token_losses(model, ids, 5, dynamic=DynamicEvaluation(RATE, parameters="lora"))
    with pytest.raises(ValueError, match="statistics: the text is empty"):
        token_losses(model, ids, 5, dynamic=DynamicEvaluation(RATE, statistics=[]))
    with pytest.raises(ValueError, match=r"statistics: token_ids\[1\] is 61, outside the vocabulary"):
        token_losses(model, ids, 5, dynamic=DynamicEvaluation(RATE, statistics=[3, 61, 4]))
    for kind in (torch.float16, torch.float32):
        accelerator = SimpleNamespace(num_processes=1, process_index=0, mixed_precision="fp16")
        with pytest.raises(ValueError, match="small gradients in float16: take bfloat16 or float32"):
            others = {} if kind == torch.float16 else {"accelerator": accelerator}
            token_losses(make_model().to(kind), ids, 5, dynamic=DynamicEvaluation(RATE), **others)
    found = parameters_of(model)
    for statistics, instead in ((None, "a smaller one"), (ids, "a smaller one or a larger epsilon")):
        with pytest.raises(ValueError, match=f"at token 5 of .* learning_rate=1e\\+30 .* so give {instead}$"):
            token_losses(model, ids, 5, dynamic=DynamicEvaluation(1e30, statistics=statistics))
        assert_restored(model, found)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        token_losses(model, ids, 5, dynamic=DynamicEvaluation(RATE))
