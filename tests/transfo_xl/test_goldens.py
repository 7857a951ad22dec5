"""The originals' models, from their own weights, and what their configurations may hold.

The PyTorch original's: token losses and memories, segment by segment. Its state dicts have the names of the legacy
layout, less the prefix `transformer.`; clusters stand in reverse order (quirk 3 of docs/quirks.md).
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from goldens import golden
from txl_hf import TransfoXLConfig, TransfoXLForCausalLM
from txl_hf.transfo_xl.positions_transfo_xl import sinusoid

LEGACY = golden("hf_legacy/wt103_like_safetensors")
NAMES = [
    "absolute_attn_type2_nomem",
    "alrfou_attn_type3_nomem",
    "char_base",
    "div1_embed_ne_model",
    "ext_len",
    "pre_lnorm_longer_eval",
    "shaw_attn_type1",
    "word_adaptive_div1",
    "word_adaptive_div2_proj",
]
SAME_NAME = (
    "cutoffs d_model d_embed n_head d_head d_inner div_val pre_lnorm n_layer mem_len clamp_len same_length attn_type "
    "tie_projs tgt_len ext_len dropout"
).split()


@pytest.fixture(params=NAMES)
def original(request):
    """(constructor arguments, tensors) of a golden of the PyTorch original."""
    path = golden(f"kimiyoung_pytorch/{request.param}.json")
    return json.loads(path.read_text()), load_file(path.with_suffix(".safetensors"))


def load(arguments, tensors, folder, backend):
    config = {name: arguments[name] for name in SAME_NAME}
    config |= {"vocab_size": arguments["n_token"], "untie_r": False, "initial_memory": "empty"}
    TransfoXLConfig(**config).save_pretrained(folder)
    state = {}
    for name, tensor in tensors.items():
        if name.startswith("state."):
            name = name.removeprefix("state.")
            clusters = name.startswith("crit.cluster")
            name = name if name.startswith("crit.") else f"transformer.{name}"
            state[name] = tensor.flip(0).contiguous() if clusters else tensor
    save_file(state, folder / "model.safetensors")
    model, info = TransfoXLForCausalLM.from_pretrained(folder, attn_implementation=backend, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    if arguments["eval_len"]:
        model.reset_memory_length(arguments["eval_len"][2])
    return model.eval()


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@torch.no_grad()
def test_token_losses_and_memories(original, tmp_path, backend):
    arguments, tensors = original
    model = load(arguments, tensors, tmp_path, backend)
    length = (arguments["eval_len"] or [arguments["tgt_len"]])[0]
    stream, mems = tensors["io.stream"], None
    for k in range(arguments["segments"]):
        extended = arguments["ext_len"] if k > 0 else 0
        start = k * length - extended
        end = (k + 1) * length
        output = model(stream[:, start:end], mems=mems, shift_labels=stream[:, start + 1 : end + 1])
        expected = tensors[f"io.seg{k}.nll"]
        torch.testing.assert_close(output.losses[:, extended:], expected, rtol=2e-5, atol=1e-6)
        mems = output.mems
        if k == 0 and arguments["ext_len"]:
            # Quirk 9: the original keeps more states after its first segment; the next one starts from its own.
            mems = tuple(tensors[f"io.seg0.mems.{i}"] for i in range(arguments["n_layer"]))
        for i, states in enumerate(mems or ()):
            expected = tensors[f"io.seg{k}.mems.{i}"]
            torch.testing.assert_close(states, expected, rtol=2e-5, atol=2e-5 * expected.abs().max().item())


def test_frequencies_are_rounded_as_the_originals():
    """They keep theirs in their checkpoints; in fp32 the order of the operations shows at long distances."""
    frequencies = load_file(LEGACY / "model.safetensors")["transformer.pos_emb.inv_freq"]
    distances = torch.arange(2000.0)
    angles = torch.outer(distances, frequencies)
    encoded = sinusoid(distances, 2 * len(frequencies))
    torch.testing.assert_close(encoded, torch.cat([angles.sin(), angles.cos()], dim=-1), rtol=0, atol=0)


# ---- configurations of legacy transformers -------------------------------------------------------------------------


@pytest.fixture
def legacy_folder(tmp_path):
    """The golden with other fields in its config.json: `legacy_folder(init_std=1)`."""

    def make(**changes):
        folder = shutil.copytree(LEGACY, tmp_path / "legacy", dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
        return folder

    return make


@torch.no_grad()
def test_configuration_that_asks_for_attentions(legacy_folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(legacy_folder(output_attentions=True)).eval()
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    expected = load_file(LEGACY / "golden.safetensors")
    length = expected["seg0.logits"].shape[1]
    for loaded in (model, again):
        first = loaded(expected["input_ids"][:, :length])
        second = loaded(expected["input_ids"][:, length : 2 * length], mems=first.mems)
        for i, probabilities in enumerate(second.attentions):
            torch.testing.assert_close(probabilities, expected[f"seg1.attentions.{i}"], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("field", ["init_std", "init_range", "proj_init_std", "layer_norm_epsilon"])
def test_whole_numbers(legacy_folder, field):
    assert getattr(AutoConfig.from_pretrained(legacy_folder(**{field: 1})), field) == 1


@pytest.mark.parametrize("tied", [False, True])
def test_one_entry_of_tie_projs_is_that_of_the_first_bin(make_model, tied):
    model = make_model(tie_projs=[tied], tie_word_embeddings=False)
    assert model.config.tie_projs == [tied, False, False]
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    assert (inputs.weight is outputs.weight) == (inputs.emb_projs[0].weight is outputs.out_projs[0].weight) == tied
