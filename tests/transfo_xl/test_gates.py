"""GTrXL's gates: `test_memory.py` has them among its variants, in every backend, with mems and cache."""

import pytest
import torch
from safetensors.torch import load_file

import oracle
from models import SMALL, small_config
from txl_hf import TransfoXLConfig, TransfoXLForCausalLM, TransfoXLModel
from txl_hf.transfo_xl.layout_transfo_xl import CheckpointError
from txl_hf.transfo_xl.modeling_transfo_xl import TransfoXLGate

GATED = {"gating": "gru", "gate_bias": 0.7}
# No ties, so that a parameter has one name.
UNTIED = {"tie_word_embeddings": False, "tie_projs": [False] * 3}
ENCODINGS = {
    "relative": {},
    "shared biases": {"untie_r": False, "pre_lnorm": True},
    "shaw": {"attn_type": 1},
    "vaswani": {"attn_type": 2, "mem_len": 0},
    "al-rfou": {"attn_type": 3, "mem_len": 0},
    "second relu": {"mlp_output_relu": True},
}


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("changes", ENCODINGS.values(), ids=ENCODINGS)
def test_outputs_and_all_gradients_are_those_of_the_papers_equations(make_model, make_ids, changes):
    model = make_model("eager", **(GATED | UNTIED | changes)).double()
    for name, parameter in model.named_parameters():
        if name.endswith("_gate.bias"):
            torch.nn.init.normal_(parameter)
    ids = make_ids(1, 8)
    reference, memory, reference_memory = oracle.ReferenceModel(model), None, None
    for tensor in reference.parameters.values():
        tensor.requires_grad_()
    losses = reference_losses = 0
    for part in ids.split(4, 1):
        outputs = model(part, mems=memory)
        expected, reference_memory = reference(part, reference_memory)
        close(outputs.logits, expected, 1e-11)
        memory = outputs.mems
        reference_memory = reference_memory and [states.detach() for states in reference_memory]
        losses, reference_losses = losses + outputs.logits.cos().sum(), reference_losses + expected.cos().sum()
    names = [name for name, _ in model.named_parameters()]
    found = torch.autograd.grad(losses, list(model.parameters()))
    wanted = torch.autograd.grad(reference_losses, [reference.parameters[name] for name in names], allow_unused=True)
    for name, gradient, expected in zip(names, found, wanted, strict=True):
        close(gradient, torch.zeros_like(gradient) if expected is None else expected, 1e-10)
        assert "_gate" not in name or gradient.abs().max() > 1e-6, name


@torch.no_grad()
def test_a_gated_layer_begins_near_the_identity():
    """Section 3.2: with b_g above 0 what enters a layer leaves it nearly as it was, until it has learned more."""
    torch.manual_seed(0)
    states = torch.randn(2, 7, 64)
    sizes = {"d_model": 64, "d_embed": 64, "init_std": 0.02, "vocab_size": 0, "mem_len": 8}

    def distance(**changes):
        model = TransfoXLModel(small_config(**(sizes | changes)))
        return ((model(inputs_embeds=states)[0] - states).norm() / states.norm()).item()

    # Each of the four gates keeps 1 - z of its input, z = σ(-b_g).
    kept = (1 - torch.sigmoid(torch.tensor(-2.0)).item()) ** 4
    assert distance(gating="gru") == pytest.approx(1 - kept, rel=0.05)
    assert distance(gating="gru", gate_bias=8.0) < 0.002 < distance(gating="gru", gate_bias=4.0) < 0.08
    assert distance(gating="gru", gate_bias=0.0) > 0.9


def test_gates_begin_as_the_configuration_says():
    model = TransfoXLForCausalLM(small_config(gating="gru", gate_bias=1.5))
    gates = [module for module in model.modules() if isinstance(module, TransfoXLGate)]
    assert len(gates) == 2 * model.config.n_layer
    assert all((gate.bias == 1.5).all() and 0.2 < gate.x_proj.weight.std() < 0.4 for gate in gates)
    assert TransfoXLConfig().gating is None and TransfoXLConfig().gate_bias == 2.0
    plain = TransfoXLForCausalLM(small_config())
    width, layers = SMALL["d_model"], SMALL["n_layer"]
    assert model.num_parameters() - plain.num_parameters() == layers * 2 * (6 * width**2 + width)
    assert not any("gate" in name for name, _ in plain.named_parameters())


def test_what_is_normalised_does_not_depend_on_pre_lnorm(make_model, make_ids):
    first, second = (make_model(gating="gru", pre_lnorm=pre_lnorm) for pre_lnorm in (False, True))
    assert first.config.pre_lnorm and torch.equal(first(make_ids(1, 5)).logits, second(make_ids(1, 5)).logits)


def test_on_disk_gates_lie_beside_the_legacy_tensors(make_model, make_ids, tmp_path):
    model, ids = make_model(**GATED), make_ids(2, 6)
    model.save_pretrained(tmp_path / "gated")
    saved = load_file(tmp_path / "gated" / "model.safetensors")
    gates = {name for name in saved if "gate" in name}
    tensors = ("bias", "candidate_proj.weight", "x_proj.weight", "y_proj.weight")
    places = [f"transformer.layers.{i}.{part}.gate" for i in range(2) for part in ("dec_attn", "pos_ff")]
    assert gates == {f"{place}.{name}" for place in places for name in tensors}
    plain = make_model(pre_lnorm=True)
    plain.save_pretrained(tmp_path / "plain")
    assert set(load_file(tmp_path / "plain" / "model.safetensors")) == set(saved) - gates
    loaded = TransfoXLForCausalLM.from_pretrained(tmp_path / "gated").eval()
    assert loaded.config.gate_bias == 0.7
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    # In memory, as Trainer resumes.
    model.load_state_dict(saved, strict=False)
    # A checkpoint without gates is not silently given random ones.
    with pytest.raises(CheckpointError, match=r"lacks .*self_attn_gate.bias"):
        TransfoXLForCausalLM.from_pretrained(tmp_path / "plain", gating="gru")


def test_generate_and_its_cache(make_model, make_ids):
    model, ids = make_model(**GATED, eos_token_id=None, pad_token_id=60), make_ids(2, 5)
    options = {"max_new_tokens": 9, "do_sample": False}
    text = model.generate(ids, **options)
    memory, written = {}, ids
    for _ in range(9):
        outputs = model(written[:, -1:] if memory else ids, **memory)
        memory = {"mems": outputs.mems}
        written = torch.cat([written, outputs.logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(text, written)


def test_gradient_checkpointing_and_half_precision(make_model, make_ids):
    model, ids, gradients = make_model(**GATED).train(), make_ids(2, 6), []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for expected, found in zip(*gradients, strict=True):
        assert torch.equal(expected, found)
    exact, model = model.eval()(ids).logits, model.bfloat16()
    outputs = model(ids)
    assert outputs.mems[0].dtype == torch.bfloat16 and (outputs.logits - exact).abs().mean() < 0.1
