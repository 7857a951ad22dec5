"""Every golden of every original, converted by the command line itself, gives the original's losses and memories."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "conversion"))

import convert  # noqa: E402  (conversion/ is a folder of scripts, not an installed package)
import kimiyoung_pytorch  # noqa: E402
import layout  # noqa: E402
from txl_hf import TransfoXLForCausalLM, TransfoXLForSequenceClassification  # noqa: E402

FIXTURES = REPOSITORY / "tests" / "fixtures" / "conversion"
SHARED = REPOSITORY.parent / "shared" / "golden"
TOLERANCE = 1e-4


def golden(path):
    """Return the path of a golden file or folder: the copy in fixtures/, else the one in ../shared, else skip."""
    for root in (FIXTURES, SHARED):
        if (root / path).exists():
            return root / path
    pytest.skip(f"../shared/golden/{path} is not at hand")


def run_cli(family, checkpoint, output, *options):
    """Run conversion/convert.py in a process of its own."""
    command = [sys.executable, REPOSITORY / "conversion" / "convert.py", "--from", family, "--checkpoint", checkpoint]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [*map(str, command), "--output", str(output), *map(str, options)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )


def convert_golden(family, checkpoint, output, *options):
    result = run_cli(family, checkpoint, output, *options)
    assert result.returncode == 0, result.stderr
    assert {"config.json", "model.safetensors", "README.md"} <= {path.name for path in output.iterdir()}
    assert [path.name for path in output.parent.iterdir() if path.name.startswith(".")] == []
    return result


def length_options(config, mem_len):
    same_length = "--same-length" if config["same_length"] else "--no-same-length"
    return ["--mem-len", mem_len, "--clamp-len", config["clamp_len"], same_length]


@torch.no_grad()
def check_segments(model, tensors, segments):
    """Feed the stream segment by segment and compare losses and memories with the original's."""
    stream = tensors["stream"]
    length = (stream.shape[1] - 1) // segments
    mems = None
    for k in range(segments):
        inputs, targets = stream[:, k * length : (k + 1) * length], stream[:, k * length + 1 : (k + 1) * length + 1]
        out = model(inputs, mems=mems, shift_labels=targets)
        mems = out.mems
        torch.testing.assert_close(out.losses, tensors[f"seg{k}.nll"], atol=TOLERANCE, rtol=0)
        for layer in range(model.config.n_layer):
            if f"seg{k}.mems.{layer}" in tensors:
                torch.testing.assert_close(mems[layer], tensors[f"seg{k}.mems.{layer}"], atol=TOLERANCE, rtol=0)


def check_generates(model):
    prompt = torch.arange(3)[None]
    # Eight in all: no further do the learned absolute positions of attn_type 3 reach.
    written = model.generate(prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert written.shape == (1, 8)


@pytest.mark.parametrize("name", ["tf_wt103_like", "tf_enwik8_like", "tf_lm1b_like", "tf_tied_bias"])
def test_tensorflow_golden(name, tmp_path):
    folder = golden(f"kimiyoung_tf/{name}")
    config = json.loads((folder / "golden.json").read_text())
    convert_golden("kimiyoung-tf", folder, tmp_path / "out", *length_options(config, config["mem_len"]))
    model = TransfoXLForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert model.config.layer_norm_epsilon == 1e-12
    check_segments(model, load_file(folder / "golden.safetensors"), config["segments"])
    check_generates(model)


@pytest.mark.parametrize("name", ["nv_large_like", "nv_base_like"])
def test_nvidia_golden(name, tmp_path):
    folder = golden(f"nvidia_pytorch/{name}")
    config = json.loads((folder / "golden.json").read_text())
    convert_golden("nvidia", folder, tmp_path / "out", "--mem-len", config["eval_len"][2])
    model = TransfoXLForCausalLM.from_pretrained(tmp_path / "out").eval()
    check_segments(model, load_file(folder / "golden.safetensors"), config["segments"])
    check_generates(model)


@pytest.mark.parametrize("name", ["word_adaptive_div2_proj", "word_adaptive_div1", "char_base"])
def test_pytorch_golden_module(name, tmp_path):
    config = json.loads(golden(f"kimiyoung_pytorch/{name}.json").read_text())
    convert_golden("kimiyoung-pytorch", golden(f"kimiyoung_pytorch/{name}.model.pt"), tmp_path / "out")
    model = TransfoXLForCausalLM.from_pretrained(tmp_path / "out").eval()
    check_segments(model, io_tensors(name), config["segments"])
    check_generates(model)


STATE_DICTS = [
    "div1_embed_ne_model",
    "pre_lnorm_longer_eval",
    "shaw_attn_type1",
    "absolute_attn_type2_nomem",
    "alrfou_attn_type3_nomem",
]


@pytest.mark.parametrize("name", STATE_DICTS)
def test_pytorch_golden_state_dict(name, tmp_path):
    """The goldens without a pickled module: their state dict through the same table and checks."""
    model, config = convert_state_dict(name, tmp_path)
    check_segments(model, io_tensors(name), config["segments"])
    check_generates(model)


@torch.no_grad()
def test_pytorch_golden_extended_context(tmp_path):
    """Quirk 9: the original keeps too much after segment 0, so that segment 1 starts from the golden's memories."""
    model, config = convert_state_dict("ext_len", tmp_path)
    tensors, length, ext_len = io_tensors("ext_len"), config["tgt_len"], config["ext_len"]
    stream, mems = tensors["stream"], None
    for k in range(config["segments"]):
        start = max(0, k * length - ext_len)
        inputs, targets = stream[:, start : (k + 1) * length], stream[:, start + 1 : (k + 1) * length + 1]
        out = model(inputs, mems=mems, shift_labels=targets)
        mems = out.mems
        torch.testing.assert_close(out.losses[:, -length:], tensors[f"seg{k}.nll"], atol=TOLERANCE, rtol=0)
        expected = tuple(tensors[f"seg{k}.mems.{layer}"] for layer in range(model.config.n_layer))
        if k == 0:
            mems = expected
        torch.testing.assert_close(mems, expected, atol=TOLERANCE, rtol=0)


def io_tensors(name):
    tensors = load_file(golden(f"kimiyoung_pytorch/{name}.safetensors"))
    return {key.removeprefix("io."): tensor for key, tensor in tensors.items() if key.startswith("io.")}


def convert_state_dict(name, tmp_path):
    config = json.loads(golden(f"kimiyoung_pytorch/{name}.json").read_text())
    tensors = load_file(golden(f"kimiyoung_pytorch/{name}.safetensors"))
    sources = [
        layout.Source(key.removeprefix("state."), tuple(tensor.shape), lambda tensor=tensor: tensor)
        for key, tensor in tensors.items()
        if key.startswith("state.")
    ]
    known = "n_layer n_head d_head d_embed attn_type tgt_len ext_len mem_len clamp_len same_length cutoffs div_val"
    fields = {field: config[field] for field in [*known.split(), "pre_lnorm"]}
    if config["eval_len"]:
        fields["tgt_len"], fields["ext_len"], fields["mem_len"] = config["eval_len"]
    checkpoint = kimiyoung_pytorch.from_state(sources, fields, origin="a golden")
    arguments = convert.parse_arguments(["--from", "kimiyoung-pytorch", "--checkpoint", "x", "--output", "y"])
    model_config = convert.build_config(checkpoint, arguments)
    layout.check_complete(checkpoint.tensors, model_config)
    convert.write_model(tmp_path, model_config, checkpoint)
    return TransfoXLForCausalLM.from_pretrained(tmp_path).eval(), config


LEGACY = ["wt103_like", "wt103_like_safetensors", "tied_bias_pre_lnorm", "div1_adaptive", "enwik8_like"]


@pytest.mark.parametrize("name", LEGACY)
@torch.no_grad()
def test_transformers_golden(name, tmp_path):
    folder = golden(f"hf_legacy/{name}")
    convert_golden("transformers", folder, tmp_path / "out")
    model = TransfoXLForCausalLM.from_pretrained(tmp_path / "out").eval()
    tensors, facts = load_file(folder / "golden.safetensors"), json.loads((folder / "golden.json").read_text())
    length, mems = facts["segment_length"], None
    for k in range(facts["segments"]):
        out = model(tensors["input_ids"][:, k * length : (k + 1) * length], mems=mems)
        mems = out.mems
        torch.testing.assert_close(out.logits, tensors[f"seg{k}.logits"], atol=TOLERANCE, rtol=0)
        expected = tuple(tensors[f"seg{k}.mems.{layer}"] for layer in range(model.config.n_layer))
        torch.testing.assert_close(mems, expected, atol=TOLERANCE, rtol=0)
    written = model.generate(tensors["input_ids"][:1, :5], max_new_tokens=24, do_sample=False)
    assert written[0].tolist() == tensors["greedy.prompt5"][0].tolist()


@torch.no_grad()
def test_transformers_golden_classifier(tmp_path):
    folder = golden("hf_legacy/seq_classification")
    convert_golden("transformers", folder, tmp_path / "out")
    model = TransfoXLForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    tensors = load_file(folder / "golden.safetensors")
    out = model(tensors["input_ids"])
    torch.testing.assert_close(out.logits, tensors["seg0.logits"], atol=TOLERANCE, rtol=0)
