"""Quantisers find the linear layers of the model, and it goes on saying nearly the same."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig, TorchAoConfig

from models import small_model
from txl_hf import evaluate_language_model

LAYERS = 2
PER_LAYER = ("q_proj", "k_proj", "v_proj", "r_proj", "o_proj")
SIZES = {"d_model": 64, "d_embed": 64, "d_head": 32, "d_inner": 128, "n_layer": LAYERS, "init_std": 0.1}


@pytest.fixture(scope="module", params=[{"cutoffs": [], "div_val": 1}, {"cutoffs": [9, 30], "div_val": 2}])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("quantised") / "model"
    small_model(vocab_size=61, **SIZES, **request.param).save_pretrained(path)
    return path


@pytest.fixture
def text():
    return torch.randint(61, (300,), generator=torch.Generator().manual_seed(0))


def nll(model, text) -> float:
    return evaluate_language_model(model, text, segment_length=20).nll


def replaced(model, kind) -> list[str]:
    return [name for name, module in model.transformer.named_modules() if isinstance(module, kind)]


def check(model, folder, text, rel: float):
    assert nll(model, text) == pytest.approx(nll(AutoModelForCausalLM.from_pretrained(folder), text), rel=rel)
    written = model.generate(text[None, :5], max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert written.shape == (1, 9)


def check_saved(model, path, text):
    """A model that is saved and loaded, once and twice, has the same losses."""
    for again in (path / "once", path / "twice"):
        model.save_pretrained(again)
        loaded = AutoModelForCausalLM.from_pretrained(again, device_map="cpu")
        assert nll(loaded, text) == pytest.approx(nll(model, text), rel=1e-6)
        model = loaded


@pytest.mark.parametrize("bits", [8, 4])
def test_bitsandbytes(folder, text, tmp_path, bits):
    import bitsandbytes

    config = BitsAndBytesConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map="cpu")
    kind = bitsandbytes.nn.Linear8bitLt if bits == 8 else bitsandbytes.nn.Linear4bit
    found = replaced(model, kind)
    for layer in range(LAYERS):
        assert {name for name in PER_LAYER if any(f"layers.{layer}." in f and f.endswith(name) for f in found)} == set(
            PER_LAYER
        )
    check(model, folder, text, rel=0.02 if bits == 8 else 0.1)
    check_saved(model, tmp_path, text)


def test_torchao(folder, text, tmp_path):
    from torchao.quantization import Int8WeightOnlyConfig

    config = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    layers = [module for module in model.transformer.modules() if type(module) is nn.Linear]
    kinds = {type(module.weight.data).__name__ for module in layers}
    assert len(layers) >= LAYERS * len(PER_LAYER) and kinds == {"Int8Tensor"}
    check(model, folder, text, rel=0.02)
    check_saved(model, tmp_path, text)


def test_torchao_of_a_model_that_is_there(folder, text):
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = AutoModelForCausalLM.from_pretrained(folder)
    quantize_(model.transformer, Int8DynamicActivationInt8WeightConfig())
    layers = [module for module in model.transformer.modules() if type(module) is nn.Linear]
    kinds = {type(module.weight.data).__name__ for module in layers}
    assert len(layers) >= LAYERS * len(PER_LAYER) and kinds == {"Int8Tensor"}
    check(model, folder, text, rel=0.03)


def test_quanto(folder, text):
    from optimum.quanto import QLinear, freeze, qint8, quantize

    model = AutoModelForCausalLM.from_pretrained(folder)
    # Of the layers alone: the softmax reads its tables and clusters itself.
    quantize(model.transformer, weights=qint8)
    freeze(model.transformer)
    assert len(replaced(model, QLinear)) >= LAYERS * len(PER_LAYER)
    check(model, folder, text, rel=0.02)


def test_quanto_while_loading(folder, text):
    from optimum.quanto import QLinear

    config = QuantoConfig(weights="int8")
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    assert len(replaced(model, QLinear)) >= LAYERS * len(PER_LAYER)
    check(model, folder, text, rel=0.02)


def test_dynamic_quantisation_of_torch(folder, text):
    model = torch.ao.quantization.quantize_dynamic(AutoModelForCausalLM.from_pretrained(folder), {nn.Linear})
    assert len(replaced(model, torch.ao.nn.quantized.dynamic.Linear)) >= LAYERS * len(PER_LAYER)
    check(model, folder, text, rel=0.03)
