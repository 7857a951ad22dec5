"""Loading: legacy checkpoints, our folders in other processes and in transformers 4.35, devices, damaged files."""

import copy
import json
import os
import shutil
import subprocess
import traceback
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    QuantoConfig,
)
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import AutoHfQuantizer, HfQuantizer

from goldens import golden
from scripts import run_script
from txl_hf import (
    TransfoXLConfig,
    TransfoXLForCausalLM,
    TransfoXLForSequenceClassification,
    TransfoXLForTokenClassification,
    TransfoXLModel,
    TransfoXLPreTrainedModel,
)
from txl_hf.transfo_xl.layout_transfo_xl import NEEDED, NEEDED_WITHOUT_HEAD, CheckpointError

REPOSITORY = Path(__file__).parents[2]
IMPLEMENTATIONS = ["eager", "sdpa"]
IDS = torch.arange(1, 25).view(2, 12)
VECTORS = torch.arange(168.0).sin().view(2, 12, 7)

# Loaded tensors lie in the file, at other alignments, so that vectorised sums may differ in the last bit.
LAST_BIT = {"rtol": 1e-6, "atol": 1e-6}


def assert_equal_to(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5):
    """Relative to the largest entry."""
    assert actual.shape == expected.shape
    error = (actual.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error <= tolerance, f"relative error {error:.2e}"


@torch.no_grad()
def outputs_of(model) -> dict[str, torch.Tensor]:
    """Two segments, so that the memory counts."""
    model.eval()
    segments = [{"input_ids": ids} for ids in (IDS, IDS.flip(1))]
    if model.config.vocab_size == 0:
        segments = [{"inputs_embeds": VECTORS}, {"inputs_embeds": VECTORS.flip(1)}]
    first = model(**segments[0], attention_mask=torch.ones_like(IDS))
    second = model(**segments[1], mems=first.mems, attention_mask=torch.ones_like(IDS))
    outputs = {"logits": torch.stack([first.logits, second.logits])}
    return outputs | {f"mems.{i}": states for i, states in enumerate(second.mems or ())}


# ---- legacy checkpoints --------------------------------------------------------------------------------------------

LEGACY = ["wt103_like_safetensors", "wt103_like", "enwik8_like", "div1_adaptive", "tied_bias_pre_lnorm"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", LEGACY)
def test_legacy_language_model(name, implementation):
    folder = golden(f"hf_legacy/{name}")
    expected = load_file(folder / "golden.safetensors")
    layout = json.loads((folder / "golden.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=implementation).eval()
    assert type(model) is TransfoXLForCausalLM
    mems = None
    for k in range(layout["segments"]):
        ids = expected["input_ids"][:, k * layout["segment_length"] : (k + 1) * layout["segment_length"]]
        wanted = {"output_hidden_states": True, "output_attentions": implementation == "eager"}
        with torch.no_grad():
            outputs = model(ids, mems=mems, **wanted)
        mems = outputs.mems
        assert_equal_to(outputs.logits, expected[f"seg{k}.logits"])
        for i, states in enumerate(mems):
            assert_equal_to(states, expected[f"seg{k}.mems.{i}"])
        for i, states in enumerate(outputs.hidden_states):
            assert_equal_to(states, expected[f"seg{k}.hidden.{i}"])
        if k == 1 and implementation == "eager":
            for i, probabilities in enumerate(outputs.attentions):
                assert_equal_to(probabilities, expected[f"seg1.attentions.{i}"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_legacy_classifier(implementation):
    folder = golden("hf_legacy/seq_classification")
    expected = load_file(folder / "golden.safetensors")
    auto = AutoModelForSequenceClassification
    model = auto.from_pretrained(folder, attn_implementation=implementation).eval()
    assert type(model) is TransfoXLForSequenceClassification
    with torch.no_grad():
        outputs = model(expected["input_ids"], output_hidden_states=True)
    assert_equal_to(outputs.logits, expected["seg0.logits"])
    for i, states in enumerate(outputs.mems):
        assert_equal_to(states, expected[f"seg0.mems.{i}"])
    for i, states in enumerate(outputs.hidden_states):
        assert_equal_to(states, expected[f"seg0.hidden.{i}"])


@pytest.mark.parametrize("prompt", [1, 5, 20])
@pytest.mark.parametrize("name", LEGACY)
def test_legacy_greedy_text(name, prompt):
    folder = golden(f"hf_legacy/{name}")
    expected = load_file(folder / "golden.safetensors")[f"greedy.prompt{prompt}"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = expected[:, :prompt]
    text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    # The goldens end where two tokens nearly tie.
    torch.testing.assert_close(text[:, : expected.shape[1]], expected)


@pytest.mark.parametrize("name", LEGACY)
def test_legacy_beams(name):
    folder = golden(f"hf_legacy/{name}")
    expected = load_file(folder / "golden.safetensors")["beam3.prompt5"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    options = {"num_beams": 3, "max_new_tokens": 12, "do_sample": False}
    if name == "div1_adaptive":
        # Its best beam is short. transformers 4.35 divided a beam's sum of log-probabilities by its length with the
        # prompt, 5 divides it by the length without, which favours long beams: a matter of `generate`, not of the
        # model. Undivided, the sums are those of 4.35 and order these beams as it did.
        options["length_penalty"] = 0.0
    ids = expected[:, :5]
    beams = model.generate(
        ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_scores=True, **options
    )
    length = expected.shape[1]
    torch.testing.assert_close(beams.sequences[:, :length], expected)
    assert (beams.sequences[:, length:] == model.config.eos_token_id).all()
    if name == "div1_adaptive":
        with torch.no_grad():
            log_probs = model.eval()(expected).logits[0, 4:-1].gather(-1, expected[0, 5:, None])
        assert beams.sequences_scores[0].item() == pytest.approx(log_probs.sum().item(), rel=1e-5)


@pytest.mark.parametrize("name", [*LEGACY, "seq_classification"])
def test_legacy_base_model(name):
    folder = golden(f"hf_legacy/{name}")
    expected = load_file(folder / "golden.safetensors")
    length = json.loads((folder / "golden.json").read_text())["segment_length"]
    model = AutoModel.from_pretrained(folder).eval()
    assert type(model) is TransfoXLModel
    with torch.no_grad():
        states = model(expected["input_ids"][:, :length]).last_hidden_state
    assert_equal_to(states, expected["seg0.hidden.3"])


def test_legacy_tensors_are_written_back(tmp_path):
    folder = golden("hf_legacy/wt103_like_safetensors")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    ours, legacy = load_file(tmp_path / "model.safetensors"), load_file(folder / "model.safetensors")
    # The frequencies of the sinusoids are no weights.
    assert set(ours) == set(legacy) - {"transformer.pos_emb.inv_freq"}
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, legacy[name], rtol=0, atol=0)


# ---- a published configuration -------------------------------------------------------------------------------------

PUBLISHED = {
    "adaptive": True,
    "architectures": ["TransfoXLLMHeadModel"],
    "attn_type": 0,
    "clamp_len": 1000,
    "cutoffs": [20000, 40000, 200000],
    "d_embed": 1024,
    "d_head": 64,
    "d_inner": 4096,
    "d_model": 1024,
    "div_val": 4,
    "dropatt": 0.0,
    "dropout": 0.1,
    "eos_token_id": 0,
    "ext_len": 0,
    "init": "normal",
    "init_range": 0.01,
    "init_std": 0.02,
    "layer_norm_epsilon": 1e-05,
    "mem_len": 1600,
    "model_type": "transfo-xl",
    "n_head": 16,
    "n_layer": 18,
    "n_token": 267735,
    "pre_lnorm": False,
    "proj_init_std": 0.01,
    "same_length": True,
    "sample_softmax": -1,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 250}},
    "tgt_len": 128,
    "tie_projs": [False, True, True, True],
    "tie_weight": True,
    "untie_r": True,
    "vocab_size": 267735,
}


def test_published_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is TransfoXLConfig
    for name, value in PUBLISHED.items():
        if name not in ("tie_weight", "task_specific_params"):
            assert getattr(config, name) == value, name
    assert config.tie_word_embeddings
    assert config.initial_memory == "zeros" and config.same_length_counts_self
    config.save_pretrained(tmp_path / "again")
    assert AutoConfig.from_pretrained(tmp_path / "again").to_diff_dict() == config.to_diff_dict()


def test_published_config_without_tied_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | {"tie_weight": False}))
    assert not AutoConfig.from_pretrained(tmp_path).tie_word_embeddings


def test_published_config_builds_the_published_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    # What transformers 4.35 counts for the same file.
    assert sum(parameter.numel() for parameter in model.parameters()) == 285_205_322


# ---- what we save, read by others ----------------------------------------------------------------------------------

SMALL = {"d_model": 32, "d_embed": 32, "n_head": 4, "d_head": 8, "d_inner": 48, "n_layer": 2, "vocab_size": 99}
SMALL |= {"cutoffs": [10, 50, 80], "div_val": 2, "mem_len": 8, "clamp_len": 6, "init_std": 0.2, "proj_init_std": 0.2}
SMALL |= {"tgt_len": 12}
CONFIGS = {
    "div4": {"d_embed": 64, "d_model": 64, "div_val": 4},
    "div2-embed-narrower": {"d_embed": 16},
    "no-cutoffs": {"cutoffs": [], "div_val": 1, "same_length": False},
    "shared-biases": {"untie_r": False},
    "pre-lnorm": {"pre_lnorm": True},
    "div1-cutoffs": {"div_val": 1},
    "div1-projections": {"div_val": 1, "d_embed": 16},
    "div1-projections-no-cutoffs": {"div_val": 1, "d_embed": 16, "cutoffs": []},
    "untied-projections": {"tie_projs": [False] * 4},
    "untied-embeddings": {"tie_word_embeddings": False, "clamp_len": -1},
    "classifier": {"num_labels": 3, "pad_token_id": 0},
}
# What only the PyTorch original knows beside us.
OWN_CONFIGS = {
    "learned-relative": {"attn_type": 1},
    "absolute": {"attn_type": 2, "mem_len": 0, "cutoffs": [], "div_val": 1},
    "learned-absolute": {"attn_type": 3, "mem_len": 0, "cutoffs": [], "div_val": 1},
    "empty-memory": {"initial_memory": "empty", "same_length_counts_self": False},
    "gated": {"gating": "gru", "initial_memory": "empty"},
    "vectors": {"vocab_size": 0, "input_size": 7, "num_labels": 3},
}


def build(name: str = "div2-embed-narrower", **changes):
    torch.manual_seed(0)
    config = TransfoXLConfig(**(SMALL | (CONFIGS | OWN_CONFIGS)[name] | changes))
    heads = {"classifier": TransfoXLForSequenceClassification, "vectors": TransfoXLForTokenClassification}
    model = heads.get(name, TransfoXLForCausalLM)(config)
    for parameter in model.parameters():
        # Biases start at zero, where nobody would notice that they were lost.
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


READER = """
import sys
sys.path.insert(0, sys.argv[1])
if sys.argv[2] == "without-package":
    # An entry of None makes importing fail as for a package that is not installed.
    sys.modules["txl_hf"] = sys.modules["triton"] = None
elif sys.argv[2] == "with-package":
    import txl_hf
from contextlib import suppress
from pathlib import Path
import torch
from safetensors.torch import save_file
import transformers

IDS = torch.arange(1, 25).view(2, 12)
VECTORS = torch.arange(168.0).sin().view(2, 12, 7)
heads = {"classifier": "AutoModelForSequenceClassification", "vectors": "AutoModelForTokenClassification"}
options = {"trust_remote_code": True} if sys.argv[2] == "without-package" else {}
legacy = sys.argv[2] == "transformers-4.35"
for folder in Path(sys.argv[3]).iterdir():
    auto = getattr(transformers, heads.get(folder.name, "AutoModelForCausalLM"))
    model = auto.from_pretrained(folder, **options).eval()
    segments = [{"input_ids": IDS}, {"input_ids": IDS.flip(1)}]
    if folder.name == "vectors":
        segments = [{"inputs_embeds": VECTORS}, {"inputs_embeds": VECTORS.flip(1)}]
    # The legacy model has no mask.
    mask = {} if legacy else {"attention_mask": torch.ones_like(IDS)}
    with torch.no_grad():
        first = model(**segments[0], **mask)
        second = model(**segments[1], mems=first.mems, **mask)
    logits = [getattr(output, "logits", None) for output in (first, second)]
    if logits[0] is None:
        logits = [first.prediction_scores, second.prediction_scores]
    outputs = {"logits": torch.stack(logits)}
    for i, states in enumerate(second.mems or ()):
        outputs[f"mems.{i}"] = (states.transpose(0, 1) if legacy else states).contiguous()
    save_file(outputs, folder / "outputs.safetensors")
"""


@pytest.fixture(scope="module", params=[pytest.param("with-package", marks=pytest.mark.slow), "without-package"])
def read_folders(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param) / "folders"
    for name in CONFIGS | OWN_CONFIGS:
        build(name).save_pretrained(root / name)
    where = REPOSITORY / "src" if request.param == "with-package" else root
    process = run_script("-c", READER, where, request.param, root, only_torch=True)
    assert process.returncode == 0, process.stderr
    return root


@pytest.mark.parametrize("name", CONFIGS | OWN_CONFIGS)
def test_saved_folder_in_another_process(read_folders, name):
    actual, expected = load_file(read_folders / name / "outputs.safetensors"), outputs_of(build(name))
    for key, tensor in expected.items():
        torch.testing.assert_close(actual[key], tensor, **LAST_BIT)


def test_folder_of_a_derived_class_brings_the_code_that_it_names(tmp_path):
    """As a class of a script: its own code cannot be saved, so what loads is what it is derived from."""
    folder, model = tmp_path / "folders" / "derived", build()
    model.__class__ = type("Derived", (TransfoXLForCausalLM,), {"__module__": "__main__"})
    model.save_pretrained(folder)
    process = run_script("-c", READER, tmp_path, "without-package", tmp_path / "folders", only_torch=True)
    assert process.returncode == 0, process.stderr
    for key, tensor in outputs_of(model).items():
        torch.testing.assert_close(load_file(folder / "outputs.safetensors")[key], tensor, **LAST_BIT)


@pytest.fixture(scope="module")
def legacy_folders(legacy_python, tmp_path_factory):
    root = tmp_path_factory.mktemp("legacy") / "folders"
    for name in CONFIGS:
        build(name).save_pretrained(root / name)
    command = [legacy_python, "-c", READER, root, "transformers-4.35", root]
    environment = os.environ | {"HF_HOME": str(root.parent / "home")}
    subprocess.run(command, check=True, env=environment, stdin=subprocess.DEVNULL, timeout=300)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_saved_folder_in_transformers_4_35(legacy_folders, name):
    actual, expected = load_file(legacy_folders / name / "outputs.safetensors"), outputs_of(build(name))
    for key, tensor in expected.items():
        assert_equal_to(actual[key], tensor)


# ---- checkpoints that are not what they should be ------------------------------------------------------------------

LOADERS = [AutoModelForCausalLM, TransfoXLForCausalLM, AutoModel]


@pytest.fixture
def damage(tmp_path):
    """Save a model, change its tensors by a function, and return the folder."""

    def change_tensors(change, name="div2-embed-narrower"):
        build(name).save_pretrained(tmp_path / "model")
        tensors = load_file(tmp_path / "model" / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
        return tmp_path / "model"

    return change_tensors


# (on disk, what the message must name)
TENSORS = [
    ("transformer.layers.1.dec_attn.qkv_net.weight", r"layers\.1\..*(qkv_net|v_proj)"),
    ("transformer.layers.0.pos_ff.layer_norm.bias", r"layers\.0\..*layer_norm\.bias"),
    ("transformer.word_emb.emb_layers.2.weight", r"emb_layers\.2\.weight"),
    ("crit.out_layers.1.bias", r"out_layers\.1\.bias"),
    ("crit.cluster_weight", r"cluster"),
]


@pytest.mark.parametrize("loader", LOADERS, ids=lambda loader: loader.__name__)
@pytest.mark.parametrize("tensor, named", TENSORS, ids=[name for name, _ in TENSORS])
def test_missing_tensor_is_named(damage, loader, tensor, named):
    folder = damage(lambda tensors: tensors.pop(tensor))
    if loader is AutoModel and tensor.startswith("crit."):
        loader.from_pretrained(folder)  # which has no softmax
    else:
        with pytest.raises(ValueError, match=named):
            loader.from_pretrained(folder)


@pytest.mark.parametrize("architectures", [["TransfoXLForCausalLM"], ["TransfoXLLMHeadModel"], None])
def test_a_softmax_that_lacks_its_only_tensor_of_its_own_is_named(damage, architectures):
    """All else is tied. It is no new head, unless nothing says that there was one."""
    folder = damage(lambda tensors: tensors.pop("crit.out_layers.0.bias"), "no-cutoffs")
    config = json.loads((folder / "config.json").read_text()) | {"architectures": architectures}
    (folder / "config.json").write_text(json.dumps(config))
    if architectures is None:
        assert AutoModelForCausalLM.from_pretrained(folder).lm_head.out_layers[0].bias.count_nonzero() == 0
    else:
        with pytest.raises(CheckpointError, match=r"lacks lm_head\.out_layers\.0\.bias"):
            AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("loader", LOADERS, ids=lambda loader: loader.__name__)
@pytest.mark.parametrize("tensor, named", TENSORS[:4], ids=[name for name, _ in TENSORS[:4]])
def test_misshapen_tensor_is_named(damage, loader, tensor, named):
    folder = damage(lambda tensors: tensors.update({tensor: tensors[tensor][:-3].clone()}))
    if loader is AutoModel and tensor.startswith("crit."):
        loader.from_pretrained(folder)
    else:
        with pytest.raises(ValueError, match=named):
            loader.from_pretrained(folder)


def test_tensors_that_a_state_dict_lacks_are_named():
    model = build()
    state = model.state_dict()
    whole = TransfoXLForCausalLM.from_pretrained(None, config=model.config, state_dict=state)
    torch.testing.assert_close(outputs_of(whole), outputs_of(model), **LAST_BIT)
    part = {name: tensor for name, tensor in state.items() if "layers.1.mlp_layer_norm" not in name}
    with pytest.raises(CheckpointError, match=r"^the state_dict lacks .*layers\.1\.mlp_layer_norm\.bias"):
        TransfoXLForCausalLM.from_pretrained(None, config=model.config, state_dict=part)
    # An empty one asks for a model that is new as a whole.
    TransfoXLForCausalLM.from_pretrained(None, config=model.config, state_dict={}, dtype=torch.float32)


def test_misshapen_head_can_be_replaced(tmp_path):
    build("classifier").save_pretrained(tmp_path)
    loader = AutoModelForSequenceClassification
    with pytest.raises(ValueError, match="score"):
        loader.from_pretrained(tmp_path, num_labels=7)
    model, info = loader.from_pretrained(
        tmp_path, num_labels=7, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert model.score.weight.shape == (7, 32)
    assert {name for name, *_ in info["mismatched_keys"]} == {"score.weight"}


@pytest.mark.parametrize("rows", [4, 5, 49])
def test_joined_tensors_that_do_not_fit_are_named(rows):
    """Parts are as many as they should be, whatever can be divided."""
    model = build()
    state = {"transformer.layers.0.dec_attn.qkv_net.weight": torch.zeros(rows, 16)}
    with pytest.raises(RuntimeError, match=r"size mismatch for transformer\.layers\.0\.self_attn\.v_proj\.weight"):
        model.load_state_dict(state, strict=False)


@pytest.mark.parametrize("untie_r", [True, False])
def test_a_legacy_state_dict_loads_as_it_is(tmp_path, untie_r):
    """With the frequencies of the sinusoids, and a copy of shared biases in each layer."""
    model = build(untie_r=untie_r)
    model.save_pretrained(tmp_path)
    other = type(model)(model.config)
    state = load_file(tmp_path / "model.safetensors") | {"transformer.pos_emb.inv_freq": torch.zeros(8)}
    # A pickle has tied tensors twice.
    state |= {name: tensor for name, tensor in model.state_dict().items() if name in model.all_tied_weights_keys}
    if not untie_r:
        shared = state["transformer.r_w_bias"], state["transformer.r_r_bias"]
        for i in range(model.config.n_layer):
            for name, bias in zip(("r_w_bias", "r_r_bias"), shared, strict=True):
                state[f"transformer.layers.{i}.dec_attn.{name}"] = bias
    other.load_state_dict(state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    with pytest.raises(RuntimeError, match='Unexpected key.*"transformer.nothing"'):
        other.load_state_dict(state | {"transformer.nothing": torch.zeros(1)})


@pytest.mark.parametrize("loader", LOADERS, ids=lambda loader: loader.__name__)
@pytest.mark.parametrize("left", [-500, 20, 0], ids=["tail-lost", "header-lost", "empty"])
def test_truncated_file_is_named(tmp_path, loader, left):
    build().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(CheckpointError, match=f"{tmp_path.name}: its weights are damaged or no tensors: download"):
        loader.from_pretrained(tmp_path)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "torch-1.5"])
@pytest.mark.parametrize("content", [slice(0), slice(-500), slice(2000), b"<html>", b"version https://git-lfs"])
def test_truncated_pickle_is_refused(tmp_path, content, zipped):
    model = build()
    model.config.save_pretrained(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=zipped)
    path.write_bytes(path.read_bytes()[content] if isinstance(content, slice) else content)
    with pytest.raises((CheckpointError, RuntimeError, IndexError), match="damaged|Stream|corrupted|out of range"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


class Program:
    def __reduce__(self):
        return os.system, ("touch pwned",)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "torch-1.5"])
def test_pickle_with_a_program_is_refused_without_advice_to_run_it(tmp_path, zipped, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build().config.save_pretrained(tmp_path)
    state = {"transformer.r_w_bias": Program()}
    torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="its weights are damaged or no tensors: download them again") as error:
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "weights_only" not in "".join(traceback.format_exception(error.value))
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("change", [{"vocab_size": 130}, {"d_model": 40}], ids=["vocabulary", "width"])
def test_a_wrong_size_is_named_where_tied_weights_are_stored_twice(tmp_path, change):
    model = build()
    model.config.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path / "saved")
    state = load_file(tmp_path / "saved" / "model.safetensors")
    for name in [name for name in state if ".emb_layers." in name]:
        state[name.replace("transformer.word_emb.emb_layers", "crit.out_layers")] = state[name].clone()
    torch.save(state, tmp_path / "pytorch_model.bin")
    AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"does not fit the model: .* is \(\d+, \d+\), not"):
        AutoModelForCausalLM.from_pretrained(tmp_path, **change)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **change, ignore_mismatched_sizes=True)
    assert loaded(IDS).logits.isfinite().all()


@pytest.mark.parametrize("variant", [None, "ema"])
def test_shards_take_the_place_of_one_file(tmp_path, variant):
    """Which would be loaded in place of them."""
    old, new = build(), build()
    torch.nn.init.normal_(old.transformer.embed_tokens.emb_layers[0].weight)
    old.save_pretrained(tmp_path, variant=variant)
    new.save_pretrained(tmp_path, variant=variant, max_shard_size="20KB")
    found = AutoModelForCausalLM.from_pretrained(tmp_path, variant=variant)
    torch.testing.assert_close(outputs_of(found), outputs_of(new), **LAST_BIT)
    old.save_pretrained(tmp_path, variant=variant)
    found = AutoModelForCausalLM.from_pretrained(tmp_path, variant=variant)
    torch.testing.assert_close(outputs_of(found), outputs_of(old), **LAST_BIT)


@pytest.mark.parametrize("variant", [None, "ema"])
def test_an_adapter_leaves_the_file_that_took_the_place_of_shards(tmp_path, variant):
    peft = pytest.importorskip("peft")
    build().save_pretrained(tmp_path, variant=variant, max_shard_size="20KB")
    build().save_pretrained(tmp_path, variant=variant)
    assert not list(tmp_path.glob("*.index*.json"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, variant=variant)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path, variant=variant)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, variant=variant)
    torch.testing.assert_close(outputs_of(again), outputs_of(build()), **LAST_BIT)


def test_an_adapter_leaves_one_file_beside_shards(tmp_path):
    """Which somebody else wrote: it is loaded before them."""
    peft = pytest.importorskip("peft")
    build().save_pretrained(tmp_path)
    build().save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    shutil.copytree(tmp_path / "shards", tmp_path, dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()


def test_tensors_that_are_not_tied_stay_so_when_the_vocabulary_grows(damage):
    """A checkpoint may have both of what its configuration ties, and they may differ."""
    name = "transformer.word_emb.emb_layers.0.weight"
    folder = damage(lambda tensors: tensors.update({"crit.out_layers.0.weight": tensors[name] + 1}), "no-cutoffs")
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = model.lm_head.out_layers[0].weight.detach().clone()
    model.resize_token_embeddings(len(expected) + 2)
    assert torch.equal(model.lm_head.out_layers[0].weight[: len(expected)], expected)


@pytest.mark.slow
def test_code_is_read_from_a_folder_of_any_name(tmp_path):
    """Of which PyTorch's names of operators are made."""
    folder = tmp_path / "my größe (copy)'s"
    build().save_pretrained(folder)
    script = (
        "import sys; sys.modules['txl_hf'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "print(model.dummy_inputs['input_ids'].shape, type(model).__name__)"
    )
    process = run_script("-c", script, folder, HF_HOME=str(tmp_path / "home"))
    assert process.stdout.endswith("TransfoXLForCausalLM\n"), process.stderr


class Driver(TransfoXLPreTrainedModel):
    """A model of one's own around the backbone."""

    def __init__(self, config):
        super().__init__(config)
        self.transformer = TransfoXLModel(config)
        self.head = torch.nn.Linear(config.d_model, 2)
        self.post_init()


class ActorCritic(TransfoXLForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.value = torch.nn.Linear(config.d_model, 1)
        self.post_init()


class Wider(TransfoXLModel):
    def __init__(self, config):
        super().__init__(config)
        self.extra = torch.nn.Linear(config.d_model, 2)
        self.post_init()


class Labeller(TransfoXLPreTrainedModel):
    """Its head has the name of our softmax."""

    def __init__(self, config):
        super().__init__(config)
        self.transformer = TransfoXLModel(config)
        self.lm_head = torch.nn.Linear(config.d_model, 2)
        self.post_init()


class Adapted(TransfoXLForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.transformer.layers[1].mlp.adapter = torch.nn.Linear(config.d_model, config.d_model)
        self.post_init()


NEW = {
    Driver: "head",
    ActorCritic: "value",
    Wider: "extra",
    Labeller: "lm_head",
    Adapted: "transformer.layers.1.mlp.adapter",
}


@pytest.mark.parametrize("model_class", NEW)
def test_a_class_of_ones_own_begins_from_a_pretrained_folder(tmp_path, model_class):
    """Its modules are new, as transformers reports; what ours lack is an error."""
    build().save_pretrained(tmp_path)
    model, info = model_class.from_pretrained(tmp_path, output_loading_info=True)
    name = NEW[model_class]
    assert info["missing_keys"] == {f"{name}.weight", f"{name}.bias"}
    assert model.get_submodule(name).weight.std() > 0
    torch.testing.assert_close(model.base_model(IDS).mems, build().transformer(IDS).mems, **LAST_BIT)
    torch.testing.assert_close(model_class.from_pretrained(tmp_path).base_model(IDS).mems, model.base_model(IDS).mems)
    model.save_pretrained(tmp_path / "again")
    again = model_class.from_pretrained(tmp_path / "again").get_submodule(name)
    assert torch.equal(again.weight, model.get_submodule(name).weight)
    state = load_file(tmp_path / "model.safetensors")
    del state["transformer.layers.1.pos_ff.layer_norm.bias"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks \S*layers\.1\.mlp_layer_norm\.bias; ignore_mismatched_sizes"):
        model_class.from_pretrained(tmp_path)
    model_class.from_pretrained(tmp_path, ignore_mismatched_sizes=True)


class OwnConfig(TransfoXLConfig):
    model_type = "own-xl"


class OwnType(TransfoXLForCausalLM):
    config_class = OwnConfig


@pytest.mark.parametrize("loader", [OwnType, TransfoXLForCausalLM, TransfoXLForTokenClassification, TransfoXLModel])
@pytest.mark.parametrize("model_type", ["own-xl", "another", None])
def test_a_model_type_of_ones_own_has_the_layout_of_ours(tmp_path, loader, model_type):
    """A model that began from a folder of ours was written in a layout by which no class read it."""
    expected = build()
    expected.save_pretrained(tmp_path / "ours")
    OwnType.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "own")
    assert (
        load_file(tmp_path / "own" / "model.safetensors").keys()
        == load_file(tmp_path / "ours" / "model.safetensors").keys()
    )
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    assert config.pop("model_type") == "own-xl"
    (tmp_path / "own" / "config.json").write_text(
        json.dumps(config | ({"model_type": model_type} if model_type else {}))
    )
    model = loader.from_pretrained(tmp_path / "own").eval()
    torch.testing.assert_close(model(IDS).mems, expected(IDS).mems, **LAST_BIT)
    # Folders of older versions have the names in memory.
    tensors = {name: tensor.clone() for name, tensor in expected.state_dict().items()}
    save_file(tensors, tmp_path / "own" / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(loader.from_pretrained(tmp_path / "own")(IDS).mems, expected(IDS).mems, **LAST_BIT)


def test_every_tensor_of_our_own_models_is_needed():
    for name in CONFIGS | OWN_CONFIGS:
        model = build(name)
        for key in model.state_dict():
            assert NEEDED.match(key) or key.startswith("score."), key
        for key in model.transformer.state_dict():
            assert NEEDED_WITHOUT_HEAD.match(key), key


def test_mismatched_sizes_are_ignored_where_that_is_asked_for(tmp_path):
    """Tensors that are missing go with those that have another shape."""
    build("classifier").save_pretrained(tmp_path / "classifier")
    loader, anew = TransfoXLForTokenClassification, {"ignore_mismatched_sizes": True}
    model = loader.from_pretrained(tmp_path / "classifier", num_labels=5, **anew)
    assert model.score.weight.shape == (5, 32) and not model.score.bias.any()
    build().save_pretrained(tmp_path / "words")
    more = {"cutoffs": [10, 50, 80, 90], "tie_projs": None}
    with pytest.raises(CheckpointError, match=r"does not fit the model: .*emb_layers\.3\.weight is .*; ignore_mism"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "words", **more)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "words", **more, **anew).eval()
    assert len(model.lm_head.out_layers) == 5 and model(IDS).logits.isfinite().all()


def test_a_whole_head_may_be_missing(tmp_path):
    build().save_pretrained(tmp_path)
    model, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {"score.weight"}
    expected = build()
    torch.testing.assert_close(model.transformer(IDS).mems, expected.transformer(IDS).mems, **LAST_BIT)


def test_foreign_tensors_are_reported(damage):
    folder = damage(lambda tensors: tensors.update({"transformer.layers.7.foreign": torch.zeros(2)}))
    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert info["unexpected_keys"] == {"transformer.layers.7.foreign"}


# ---- other lengths, types, devices ---------------------------------------------------------------------------------


@pytest.mark.parametrize("loader", LOADERS, ids=lambda loader: loader.__name__)
def test_lengths_change_while_loading(tmp_path, loader):
    build().save_pretrained(tmp_path)
    model = loader.from_pretrained(tmp_path, mem_len=20, clamp_len=15, same_length=False).eval()
    assert (model.config.mem_len, model.config.clamp_len, model.config.same_length) == (20, 15, False)
    with torch.no_grad():
        expected = build(mem_len=20, clamp_len=15, same_length=False)(IDS)
        outputs = model(IDS)
    assert outputs.mems[0].shape[1] == 20
    torch.testing.assert_close(outputs.mems, expected.mems, **LAST_BIT)


def test_every_weight_has_a_storage_of_its_own(tmp_path):
    """Of queries, keys and values too, which are one tensor on disk: safetensors would not load into parts of one."""
    saved = build()
    saved.save_pretrained(tmp_path)
    model = TransfoXLForCausalLM.from_pretrained(tmp_path)
    assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in model.parameters())
    save_model(model, tmp_path / "whole.safetensors")
    again = TransfoXLForCausalLM(saved.config)
    load_model(again, tmp_path / "whole.safetensors")
    assert all(map(torch.equal, again.parameters(), saved.parameters()))


@pytest.mark.parametrize("name", ["learned-relative", "learned-absolute"])
def test_learned_positions_outlive_another_length(tmp_path, name):
    build(name).save_pretrained(tmp_path)
    rows = build(name).transformer.r_emb
    lengths = {"mem_len": 30} if name == "learned-relative" else {"tgt_len": 40}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **lengths).eval()
    torch.testing.assert_close(model.transformer.r_emb, rows, rtol=0, atol=0)
    mems = model(IDS).mems
    assert name == "learned-absolute" or mems[0].shape[1] == 30
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    torch.testing.assert_close(again(IDS).logits, model(IDS).logits, **LAST_BIT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["div2-embed-narrower", "div1-projections", "no-cutoffs", "learned-relative"])
def test_narrow_types(tmp_path, name, dtype):
    build(name).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    outputs = outputs_of(model)
    assert outputs["logits"].dtype == torch.float32  # log-probabilities are
    # Three and eleven bits of mantissa through two layers and a softmax.
    assert_equal_to(outputs["logits"], outputs_of(build(name))["logits"], 0.1 if dtype is torch.bfloat16 else 0.02)
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    torch.testing.assert_close(outputs_of(again), outputs, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["div4", "div2-embed-narrower", "no-cutoffs", "div1-projections", "learned-relative"])
def test_shards(tmp_path, name):
    build(name).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(outputs_of(model), outputs_of(build(name)), **LAST_BIT)


@pytest.mark.parametrize("tied", [True, False])
def test_a_state_dict_of_ones_own_loses_nothing_but_copies(tmp_path, tied):
    """Gathered from shards, tied tensors are copies of one another; those of a head that was trained are not."""
    model = build()
    if not tied:  # as PEFT leaves a head that it has trained in full and merged
        model.config.tie_word_embeddings = False
        model.lm_head = copy.deepcopy(model.lm_head)
        torch.nn.init.normal_(model.lm_head.out_layers[0].weight)
        torch.nn.init.normal_(model.lm_head.out_projs[1].weight)
    gathered = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=gathered)
    written = load_file(tmp_path / "model.safetensors")
    assert tied or all(f"crit.out_layers.{i}.weight" in written for i in range(4))
    assert tied or "crit.out_projs.1" in written
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(outputs_of(again), outputs_of(model), **LAST_BIT)


@pytest.mark.parametrize("given", [False, True])
def test_what_the_configuration_no_longer_ties_is_written(tmp_path, given):
    """PEFT unties all tables where it trains one of them, and they still share their memory."""
    model = build()
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path, state_dict=model.state_dict() if given else None)
    written = load_file(tmp_path / "model.safetensors")
    assert all(f"crit.out_layers.{i}.weight" in written for i in range(4))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.lm_head.out_layers[0].weight is not again.get_input_embeddings().emb_layers[0].weight
    torch.testing.assert_close(outputs_of(again), outputs_of(model), **LAST_BIT)


PLACEMENTS = {
    "roomy": {"device_map": "auto"},
    "tight": {"device_map": "auto", "max_memory": {"cpu": 40_000}},
    "disk": {"device_map": {"": "disk"}},
}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", ["div4", "div2-embed-narrower", "no-cutoffs", "shared-biases", "untied-embeddings"])
def test_device_map(tmp_path, name, placement):
    pytest.importorskip("accelerate")
    build(name).save_pretrained(tmp_path)
    options = PLACEMENTS[placement] | {"offload_folder": tmp_path / "offload"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    # Where all fits on one device there is no map to speak of.
    assert ("disk" in getattr(model, "hf_device_map", {}).values()) == (placement != "roomy")
    expected = build(name)
    torch.testing.assert_close(outputs_of(model), outputs_of(expected), **LAST_BIT)
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    torch.testing.assert_close(model.generate(IDS, **options), expected.generate(IDS, **options))
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    torch.testing.assert_close(outputs_of(again), outputs_of(expected), **LAST_BIT)


def test_an_offloaded_model_whose_queries_and_keys_lie_in_two_shards_is_saved_with_them_apart_or_not_at_all(tmp_path):
    """transformers joins what lies in one shard, and would leave a part out without a word."""
    pytest.importorskip("accelerate")
    build("no-cutoffs").save_pretrained(tmp_path / "saved")
    options = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "offload"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **options)
    with pytest.raises(RuntimeError, match="save_original_format=False"):
        model.save_pretrained(tmp_path / "again", max_shard_size="6KB")
    model.save_pretrained(tmp_path / "again", max_shard_size="6KB", save_original_format=False)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    torch.testing.assert_close(outputs_of(again), outputs_of(build("no-cutoffs")), **LAST_BIT)


# ---- adapters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["div2-embed-narrower", "learned-relative"])
def test_lora(tmp_path, name):
    peft = pytest.importorskip("peft")
    build(name).save_pretrained(tmp_path / "base")

    def load_base():
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base")

    model = peft.get_peft_model(load_base(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 2  # two matrices for each of two projections in each of two layers
    optimizer = torch.optim.SGD(trained, lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        assert all(parameter.grad is not None for parameter in trained)
        optimizer.step()
    expected = outputs_of(model)
    assert (expected["logits"] - outputs_of(load_base())["logits"]).abs().max() > 1e-3

    model.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(load_base(), tmp_path / "adapter")
    torch.testing.assert_close(outputs_of(loaded), expected, **LAST_BIT)
    merged = loaded.merge_and_unload()
    assert_equal_to(outputs_of(merged)["logits"], expected["logits"])
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(outputs_of(again), outputs_of(merged), **LAST_BIT)


def test_one_table_trained_in_full_is_merged_and_saved(tmp_path):
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["q_proj"], "modules_to_save": ["emb_layers.0"]}
    model = peft.get_peft_model(build("div2-embed-narrower"), peft.LoraConfig(**options))
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(outputs_of(again), outputs_of(merged), **LAST_BIT)


@pytest.mark.parametrize("name", ["div2-embed-narrower", "div1-projections"])
def test_lora_on_all_linear_layers(name):
    """PEFT wraps whatever is an `nn.Linear`: nothing may be one in name alone."""
    peft = pytest.importorskip("peft")
    expected = outputs_of(build(name))
    model = peft.get_peft_model(build(name), peft.LoraConfig(r=2, target_modules="all-linear"))
    torch.testing.assert_close(outputs_of(model), expected)  # B starts at zero
    model(IDS, labels=IDS).loss.backward()


def test_an_adapter_is_saved_without_the_card_of_a_whole_model(tmp_path):
    peft = pytest.importorskip("peft")
    build().save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "adapter")
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert "adapter_model.safetensors" in names and "README.md" not in names


# ---- the names of the PyTorch original -----------------------------------------------------------------------------

ORIGINALS = ["shaw_attn_type1", "absolute_attn_type2_nomem", "alrfou_attn_type3_nomem", "word_adaptive_div2_proj"]


@torch.no_grad()
def original_losses(model, golden_io, layout) -> list[torch.Tensor]:
    losses, mems, length = [], None, layout["tgt_len"]
    for k in range(layout["segments"]):
        segment = golden_io["io.stream"][:, k * length : (k + 1) * length + 1]
        outputs = model.eval()(segment[:, :-1], mems=mems, shift_labels=segment[:, 1:])
        mems = outputs.mems
        losses.append(outputs.losses)
    return losses


@pytest.mark.parametrize("name", ORIGINALS)
def test_names_of_the_original(tmp_path, name):
    """Its state dict loads as it is, but for the prefix and the order of the clusters, and is saved in our layout."""
    layout = json.loads(golden(f"kimiyoung_pytorch/{name}.json").read_text())
    tensors = load_file(golden(f"kimiyoung_pytorch/{name}.safetensors"))
    state = {}
    for key, tensor in tensors.items():
        if key.startswith("state."):
            key = key.removeprefix("state.")
            flipped = tensor.flip(0).contiguous() if key.startswith("crit.cluster") else tensor
            state[key if key.startswith("crit.") else f"transformer.{key}"] = flipped
    fields = {
        key: layout[key] for key in layout if key not in ("n_token", "tie_weight", "eval_len", "segments", "batch")
    }
    fields |= {"vocab_size": layout["n_token"], "untie_r": False, "initial_memory": "empty"}
    TransfoXLConfig(**fields).save_pretrained(tmp_path)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})

    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    model.save_pretrained(tmp_path / "again")
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert not [key for key in saved if ".q_net." in key or ".kv_net." in key]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    for loaded in (model, again):
        for k, losses in enumerate(original_losses(loaded, tensors, layout)):
            assert_equal_to(losses, tensors[f"io.seg{k}.nll"])


def test_folders_are_left_as_they_were(tmp_path):
    """Loading writes nothing beside what it reads."""
    folder = tmp_path / "copy"
    shutil.copytree(golden("hf_legacy/wt103_like_safetensors"), folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    AutoModelForCausalLM.from_pretrained(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


class _Halve(ConversionOps):
    """As torchao's and Quanto's quantizers do, it takes the first tensor that it is given and no other."""

    def convert(self, input_dict, full_layer_name=None, **kwargs):
        value = next(iter(input_dict.values()))
        return {full_layer_name: (value[0] if isinstance(value, list) else value) / 2}


class _Quantizer(HfQuantizer):
    requires_calibration = False
    is_trainable = False

    def is_serializable(self):
        return True

    def param_needs_quantization(self, model, param_name, **kwargs):
        return param_name.endswith("_proj.weight")

    def get_quantize_ops(self):
        return _Halve()


def test_quantizers_get_every_projection(make_model, tmp_path, monkeypatch):
    model = make_model()
    model.save_pretrained(tmp_path)
    config = QuantoConfig()
    monkeypatch.setattr(
        AutoHfQuantizer, "from_config", lambda *args, **kwargs: _Quantizer(config, pre_quantized=False)
    )
    quantized = TransfoXLForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    for name, parameter in model.named_parameters():
        factor = 2 if name.endswith("_proj.weight") else 1
        torch.testing.assert_close(factor * quantized.get_parameter(name), parameter)


def test_a_quantised_model_is_saved_with_its_projections_apart(make_model, tmp_path):
    """Each has scales of its own, for which a joined tensor has no place."""
    model = make_model()
    expected = outputs_of(model)
    model.hf_quantizer = _Quantizer(QuantoConfig(), pre_quantized=True)
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    for name in ("q_proj", "k_proj", "v_proj"):
        assert f"transformer.layers.0.self_attn.{name}.weight" in written
    torch.testing.assert_close(outputs_of(TransfoXLForCausalLM.from_pretrained(tmp_path)), expected, **LAST_BIT)


def test_a_file_is_no_folder_to_save_to(make_model, tmp_path):
    path = tmp_path / "model"
    path.touch()
    with pytest.raises(NotADirectoryError, match="save_directory='.*model' is a file: name a folder"):
        make_model().save_pretrained(path)
