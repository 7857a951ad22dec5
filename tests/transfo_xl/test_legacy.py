"""Random models of transformers 4.35: what it saves loads here, and computes, remembers, differentiates and writes the
same.

The legacy side runs in its own environment (`legacy_python`), once for all models.
"""

import json
import random
import subprocess

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

MODELS = 40
PROMPT = 5

LEGACY = """
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import TransfoXLConfig, TransfoXLLMHeadModel, TransfoXLModel

root = Path(sys.argv[1])
for case in json.loads((root / "cases.json").read_text()):
    torch.manual_seed(case["seed"])
    folder, config = root / str(case["seed"]), TransfoXLConfig(**case["config"])
    model = (TransfoXLLMHeadModel if case["head"] else TransfoXLModel)(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(folder, safe_serialization=case["safetensors"])
    outputs, mems = {}, None
    for k, length in enumerate(case["lengths"]):
        ids = torch.randint(config.vocab_size, (2, length))
        before, output = mems, model(ids, mems=mems, output_hidden_states=True, output_attentions=True)
        outputs[f"{k}.ids"], outputs[f"{k}.output"] = ids, output[0]
        for kind in ("hidden_states", "attentions"):
            outputs |= {f"{k}.{kind}.{i}": states for i, states in enumerate(output[kind])}
        outputs |= {f"{k}.mems.{i}": states.transpose(0, 1) for i, states in enumerate(output.mems or ())}
        mems = output.mems
    outputs["loss"] = loss = (
        model(ids, mems=before, labels=ids).losses.mean() if case["head"] else output[0].square().mean()
    )
    loss.backward()
    if case["head"]:
        text = model.generate(ids[:1, :5], max_new_tokens=12, return_dict_in_generate=True, output_scores=True)
        best = [scores[0].topk(2).values for scores in text.scores]
        # How many tokens there are before the first that was chosen by a hair.
        outputs["sure"] = torch.tensor([*(i for i, (a, b) in enumerate(best) if a - b < 1e-3), len(best)][0])
        outputs["text"] = text.sequences
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in outputs.items()}, folder / "outputs")
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
    model.save_pretrained(folder / "gradients")
"""


def draw_case(seed: int) -> dict:
    """Every field that decides what a legacy model computes."""
    draw = random.Random(seed)
    vocab_size, bins = draw.choice([23, 57, 99]), draw.choice([1, 1, 2, 3, 4, 6])
    cutoffs, div_val = sorted(draw.sample(range(1, vocab_size), bins - 1)), draw.choice([1, 1, 2, 3, 4])
    d_model = draw.choice([8, 12, 22, 32])
    d_embed = draw.choice([d_model, 7, 20, 64])
    mem_len = draw.choice([0, 1, 2, 5, 9, 14])
    config = {
        "vocab_size": vocab_size,
        "cutoffs": cutoffs,
        "div_val": div_val,
        "d_model": d_model,
        "d_embed": max(d_embed, div_val ** (bins - 1)),
        "n_head": draw.choice([1, 2, 3]),
        "d_head": draw.choice([1, 3, 5, 8]),
        "d_inner": draw.choice([1, 7, 33]),
        "n_layer": draw.choice([1, 2, 3]),
        "pre_lnorm": draw.random() < 0.4,
        "mem_len": mem_len,
        # Without a memory the legacy model then hides every key, and so takes the mean of all, those to come included.
        "same_length": mem_len > 0 and draw.random() < 0.5,
        "clamp_len": draw.choice([-1, 0, 1, 3, 6, 50]),
        "untie_r": draw.random() < 0.5,
        "layer_norm_epsilon": draw.choice([1e-5, 1e-12, 0.1]),
        "eos_token_id": draw.choice([0, vocab_size - 1, None]),
        "tie_word_embeddings": draw.random() < 0.7,
        "tie_projs": draw.choices([False, True], k=bins),
    }
    return {
        "seed": seed,
        "config": config,
        "lengths": [*draw.choices([1, 2, 7, 20], k=3), 6],
        "safetensors": draw.random() < 0.5,
        "head": draw.random() < 0.8,
    }


@pytest.fixture(scope="module")
def legacy_models(legacy_python, tmp_path_factory):
    root = tmp_path_factory.mktemp("random")
    (root / "cases.json").write_text(json.dumps([draw_case(seed) for seed in range(MODELS)]))
    subprocess.run([legacy_python, "-W", "ignore", "-c", LEGACY, root], check=True, timeout=300)
    return root


def check(actual: torch.Tensor, expected: torch.Tensor, scale: float = 0.0, tolerance: float = 2e-5):
    """Relative to the largest entry, or to `scale`."""
    assert actual.shape == expected.shape
    error = (actual - expected).abs().max() / max(expected.abs().max(), scale, 1e-6)
    assert error <= tolerance, f"relative error {error:.2e}"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("seed", range(MODELS))
def test_random_legacy_model(legacy_models, tmp_path, seed, backend):
    case, folder = draw_case(seed), legacy_models / str(seed)
    expected = load_file(folder / "outputs")
    model = (AutoModelForCausalLM if case["head"] else AutoModel).from_pretrained(folder, attn_implementation=backend)
    mems = None
    for k in range(len(case["lengths"])):
        ids = expected[f"{k}.ids"]
        before = mems
        output = model(ids, mems=mems, output_hidden_states=True, output_attentions=backend == "eager")
        check(output[0], expected[f"{k}.output"])
        found = {"hidden_states": output.hidden_states, "attentions": output.attentions, "mems": output.mems}
        for kind, tensors in found.items():
            for i, states in enumerate(tensors or ()):
                check(states, expected[f"{k}.{kind}.{i}"])
        mems = output.mems
    loss = model(ids, mems=before, labels=ids).loss if case["head"] else output[0].square().mean()
    check(loss, expected["loss"])

    loss.backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
    model.save_pretrained(tmp_path / "gradients")
    gradients, legacy = (load_file(root / "gradients/model.safetensors") for root in (tmp_path, folder))
    # Sums that cancel are as exact as what they are sums of.
    scale = 1e-3 * max(gradient.abs().max() for gradient in legacy.values())
    for name, gradient in gradients.items():
        check(gradient, legacy[name], scale, tolerance=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [seed for seed in range(MODELS) if draw_case(seed)["head"]])
def test_random_legacy_model_writes_the_same(legacy_models, seed):
    folder = legacy_models / str(seed)
    expected = load_file(folder / "outputs")
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = expected["text"][:, :PROMPT]
    text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12)
    end = PROMPT + expected["sure"].item()
    assert torch.equal(text[:, :end], expected["text"][:, :end])
