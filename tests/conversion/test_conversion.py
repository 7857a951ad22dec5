"""Every golden of every original, converted by the command line itself, gives the original's losses and memories."""

import ast
import contextlib
import io
import json
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_conversion_remi import variables_of
from test_conversion_tf import write_bundle
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from goldens import golden
from scripts import run_script
from txl_hf import (
    TransfoXLConfig,
    TransfoXLForCausalLM,
    TransfoXLForSequenceClassification,
    TransfoXLTokenizer,
)
from txl_hf.conversion import command_line, kimiyoung_pytorch, layout, torch_file, vocabulary
from txl_hf.files import UNFINISHED_PREFIX

REPOSITORY = Path(__file__).parents[2]
TOLERANCE = 1e-4


def run_cli(family, checkpoint, output, *options):
    """Run conversion/convert.py in a process of its own."""
    command = [REPOSITORY / "conversion" / "convert.py", "--from", family, "--checkpoint", checkpoint]
    return run_script(*command, "--output", output, *options)


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


@torch.no_grad()
def test_nvidia_golden_saved_while_wrapped_for_several_gpus(tmp_path):
    folder = golden("nvidia_pytorch/nv_large_like")
    saved = torch_file.load(folder / "checkpoint_best.pt")
    state = {f"module.{name}": tensor.read() for name, tensor in saved["model_state"].items()}
    torch.save({"model_config": saved["model_config"], "model_state": state}, tmp_path / "checkpoint_last.pt")
    config = json.loads((folder / "golden.json").read_text())
    arguments = ["--from", "nvidia", "--checkpoint", tmp_path, "--output", tmp_path / "out"]
    arguments += ["--mem-len", config["eval_len"][2]]
    assert command_line.main([str(argument) for argument in arguments]) == 0
    model = TransfoXLForCausalLM.from_pretrained(tmp_path / "out").eval()
    check_segments(model, load_file(folder / "golden.safetensors"), config["segments"])


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
    arguments = command_line.parse_arguments(["--from", "kimiyoung-pytorch", "--checkpoint", "x", "--output", "y"])
    model_config = command_line.build_config(checkpoint, arguments)
    layout.check_complete(checkpoint.tensors, model_config)
    command_line.write_model(tmp_path, model_config, checkpoint)
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


@pytest.mark.parametrize("name, prefix", [("wt103_like", ""), ("tied_bias_pre_lnorm", "transformer.")])
@torch.no_grad()
def test_transformers_golden_without_its_head(name, prefix, tmp_path):
    """As TransfoXLModel saves itself, or with the names of a model that has a head."""
    folder = golden(f"hf_legacy/{name}")
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    state = {name: tensor for name, tensor in state.items() if name.startswith("transformer.")}
    (tmp_path / "legacy").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "legacy")
    state = {prefix + name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    torch.save(state, tmp_path / "legacy" / "pytorch_model.bin")
    arguments = ["--from", "transformers", "--checkpoint", tmp_path / "legacy", "--output", tmp_path / "out"]
    assert command_line.main([str(argument) for argument in arguments]) == 0
    model = AutoModel.from_pretrained(tmp_path / "out").eval()
    tensors, facts = load_file(folder / "golden.safetensors"), json.loads((folder / "golden.json").read_text())
    out = model(tensors["input_ids"][:, : facts["segment_length"]])
    expected = tuple(tensors[f"seg0.mems.{layer}"] for layer in range(model.config.n_layer))
    torch.testing.assert_close(out.mems, expected, atol=TOLERANCE, rtol=0)
    assert "AutoModel.from_pretrained" in (tmp_path / "out" / "README.md").read_text()


def legacy_shards(folder, path, kind):
    """Copy a legacy folder to `path` with its weights in two files, as a small max_shard_size writes them."""
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    path.mkdir()
    shutil.copy(folder / "config.json", path)
    stem, save = {"bin": ("pytorch_model", torch.save), "safetensors": ("model", save_file)}[kind]
    if kind == "safetensors":
        state = {name: tensor.clone() for name, tensor in state.items()}
    names = list(state)
    weight_map = {name: f"{stem}-0000{1 + (i % 2)}-of-00002.{kind}" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save({name: state[name] for name in names if weight_map[name] == shard}, path / shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / f"{stem}.{kind}.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("kind", ["bin", "safetensors"])
def test_weights_in_several_files(kind, tmp_path):
    folder = golden("hf_legacy/wt103_like")
    legacy_shards(folder, tmp_path / "shards", kind)
    for checkpoint, output in ((folder, "whole"), (tmp_path / "shards", "joined")):
        arguments = ["--from", "transformers", "--checkpoint", checkpoint, "--output", tmp_path / output]
        assert command_line.main([str(argument) for argument in arguments]) == 0
    whole, joined = (load_file(tmp_path / output / "model.safetensors") for output in ("whole", "joined"))
    assert whole.keys() == joined.keys() and all(torch.equal(whole[name], joined[name]) for name in whole)


def test_tensors_of_two_files_are_not_the_same_memory(tmp_path, capfd):
    """Each file counts its storages from 0: a projection of its own lies where the other file has the embedding's."""
    folder, name = golden("hf_legacy/wt103_like"), "crit.out_projs.1"
    legacy_shards(folder, tmp_path / "shards", "bin")
    for part in (tmp_path / "shards").glob("*.bin"):
        part.unlink()
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    projection = state["transformer.word_emb.emb_projs.1"]
    files = [{"transformer.word_emb.emb_projs.1": projection}, {name: projection + 1}, state]
    for written in ("transformer.word_emb.emb_projs.1", name):
        del state[written]
    for i, tensors in enumerate(files):
        torch.save(tensors, tmp_path / "shards" / f"pytorch_model-{i:05}-of-00003.bin")
    line = refusal(capfd, tmp_path, "transformers", tmp_path / "shards")
    assert f"{name} is not equal to the weight that the settings tie it to" in line


def test_a_part_of_the_weights_that_is_not_there_is_told_by_its_tensors(tmp_path, capfd):
    legacy_shards(golden("hf_legacy/wt103_like"), tmp_path / "shards", "bin")
    (tmp_path / "shards" / "pytorch_model-00002-of-00002.bin").unlink()
    line = refusal(capfd, tmp_path, "transformers", tmp_path / "shards")
    assert "the checkpoint has no" in line or "leaves out a layer" in line


# ---- vocabularies ----


@pytest.mark.parametrize("name", ["cache.pt", "cache.pkl"])
def test_pytorch_golden_corpus(name):
    expected = json.loads(golden("kimiyoung_pytorch_corpus/expected.json").read_text())
    symbols, dataset = vocabulary.read_corpus(golden(f"kimiyoung_pytorch_corpus/{name}"))
    assert symbols.symbols == expected["idx2sym"] and dataset == "wt2"
    assert (symbols.mode, symbols.lower_case, symbols.eos_token) == ("whitespace", False, "<eos>")


@pytest.mark.parametrize("name", ["cache.pt", "cache.pkl"])
def test_pytorch_golden_corpus_through_the_command_line(name, tmp_path, monkeypatch):
    expected = json.loads(golden("kimiyoung_pytorch_corpus/expected.json").read_text())
    corpus = golden(f"kimiyoung_pytorch_corpus/{name}")
    write_module(tmp_path / "model.pt", monkeypatch, n_token=len(expected["idx2sym"]))
    result = convert_golden("kimiyoung-pytorch", tmp_path / "model.pt", tmp_path / "out", "--corpus", corpus)
    assert "no tokenizer" not in result.stdout
    tokenizer = TransfoXLTokenizer.from_pretrained(tmp_path / "out")
    ids = expected["train_first_200"]
    lines = " ".join(expected["idx2sym"][i] for i in ids).split(" <eos>")
    assert [i for line in lines for i in [*tokenizer.encode(line), 0]][: len(ids)] == ids
    model = TransfoXLForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.config.vocab_size, model.config.eos_token_id) == (len(expected["idx2sym"]), 0)
    check_generates(model.eval())


@pytest.mark.parametrize("name", ["cache.pt", "cache.pkl"])
def test_pytorch_golden_corpus_alone(name, tmp_path):
    expected = json.loads(golden("kimiyoung_pytorch_corpus/expected.json").read_text())
    result = run_cli("kimiyoung-pytorch", golden(f"kimiyoung_pytorch_corpus/{name}"), tmp_path / "out")
    assert result.returncode == 0, result.stderr
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == expected["idx2sym"]
    assert (tokenizer.eos_token, tokenizer.unk_token) == ("<eos>", "<unk>")


def test_corpus_of_another_size_is_warned_of(tmp_path, capfd, monkeypatch):
    write_corpus(tmp_path / "cache.pt", monkeypatch, ["a", "<eos>"], "wt103")
    module = str(golden("kimiyoung_pytorch/word_adaptive_div2_proj.model.pt"))
    arguments = ["--checkpoint", module, "--corpus", str(tmp_path / "cache.pt"), "--output", str(tmp_path / "out")]
    assert command_line.main(["--from", "kimiyoung-pytorch", *arguments]) == 0
    assert "2 symbols, the model 120: another corpus?" in capfd.readouterr().err


def test_corpus_with_more_symbols_than_the_model_is_refused(tmp_path, capfd, monkeypatch):
    write_corpus(tmp_path / "cache.pt", monkeypatch, [*map(str, range(120)), "<eos>"], "wt103")
    module = str(golden("kimiyoung_pytorch/word_adaptive_div2_proj.model.pt"))
    arguments = ["--checkpoint", module, "--corpus", str(tmp_path / "cache.pt"), "--output", str(tmp_path / "out")]
    assert command_line.main(["--from", "kimiyoung-pytorch", *arguments]) == 1
    assert "121 symbols, the model only 120" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


TEXTS = {
    "wt103": (["<eos>", "a", "b", "<unk>"], "a b x", [1, 2, 3], 0),
    "lm1b": (["</S>", "<S>", "<UNK>", "a", "b"], "a b x", [1, 3, 4, 2, 1], 1),
    "text8": (["_", "a", "b", "c"], "a bc", [1, 0, 2, 3], None),
    "enwik8": (["32", "97", "98", "65"], "a bA", [1, 0, 2, 3], None),
}


@pytest.mark.parametrize("lower_case", [False, True])
@pytest.mark.parametrize("dataset", TEXTS)
def test_tokenizer_of_each_corpus(dataset, lower_case, tmp_path, monkeypatch):
    """Lower case is the originals' default, also of enwik8, whose symbols are the numbers of bytes to them."""
    symbols, text, ids, eos_token_id = TEXTS[dataset]
    write_corpus(tmp_path / "cache.pt", monkeypatch, symbols, dataset, lower_case)
    write_module(tmp_path / "model.pt", monkeypatch, n_token=len(symbols))
    arguments = ["--checkpoint", str(tmp_path), "--corpus", str(tmp_path), "--output", str(tmp_path / "out")]
    assert command_line.main(["--from", "kimiyoung-pytorch", *arguments]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer(text)["input_ids"] == ids
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.eos_token_id == eos_token_id
    written = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert isinstance(tokenizer.decode(written[0]), str)


@pytest.mark.parametrize(
    ("dataset", "delimiter", "mode"),
    [
        ("mine", "", "characters"),
        ("ptb", "", "characters"),
        ("text8", None, "characters"),
        ("mine", None, "whitespace"),
    ],
)
def test_the_delimiter_of_a_corpus_decides_what_a_symbol_is(dataset, delimiter, mode, tmp_path, monkeypatch):
    """Characters of a data set of one's own became words, each of them unknown."""
    write_corpus(tmp_path / "cache.pt", monkeypatch, ["<eos>", "a", "b", "<unk>"], dataset, delimiter=delimiter)
    symbols, _ = vocabulary.read_corpus(tmp_path)
    assert symbols.mode == mode
    tokenizer = TransfoXLTokenizer.from_symbols(symbols.symbols, mode=symbols.mode)
    assert tokenizer("abx")["input_ids"] == ([1, 2, 3] if mode == "characters" else [3])


def test_a_delimiter_that_no_mode_splits_at_is_refused(tmp_path, capfd, monkeypatch):
    write_corpus(tmp_path / "cache.pt", monkeypatch, ["<eos>", "a"], "mine", delimiter=",")
    line = refusal(capfd, tmp_path, "kimiyoung-pytorch", tmp_path / "cache.pt")
    assert "cache.pt holds a vocabulary of text that is split at ','; a tokenizer here splits at white space" in line


@pytest.mark.parametrize("name", ["cased", "lower"])
def test_legacy_tokenizer_alone(name, tmp_path):
    folder = golden(f"tokenizer/{name}")
    result = run_cli("transformers", folder, tmp_path / "out")
    assert result.returncode == 0, result.stderr
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for line in json.loads((folder / "expected.json").read_text()):
        assert tokenizer(line["text"])["input_ids"] == line["ids"]
        assert tokenizer.decode(line["ids"]) == line["decoded"]


def test_legacy_tokenizer_comes_along(tmp_path):
    folder = tmp_path / "legacy"
    shutil.copytree(golden("hf_legacy/wt103_like"), folder)
    for path in golden("tokenizer/cased").iterdir():
        shutil.copy(path, folder / path.name)
    convert_golden("transformers", folder, tmp_path / "out")
    expected = json.loads((folder / "expected.json").read_text())
    tokenizer = TransfoXLTokenizer.from_pretrained(tmp_path / "out")
    assert all(tokenizer(line["text"])["input_ids"] == line["ids"] for line in expected[:20])
    card = (tmp_path / "out" / "README.md").read_text()
    assert "AutoTokenizer.from_pretrained" in card and "`legacy` (pytorch_model.bin)" in card


def test_how_a_legacy_model_writes_comes_along(tmp_path):
    folder = tmp_path / "legacy"
    shutil.copytree(golden("hf_legacy/wt103_like"), folder)
    said = {"do_sample": True, "temperature": 0.7, "eos_token_id": [0, 3], "transformers_version": "4.35.2"}
    (folder / "generation_config.json").write_text(json.dumps(said))
    convert_golden("transformers", folder, tmp_path / "out")
    generation = TransfoXLForCausalLM.from_pretrained(tmp_path / "out").generation_config
    assert (generation.do_sample, generation.temperature, generation.eos_token_id) == (True, 0.7, [0, 3])


def test_how_a_model_writes_that_says_so_in_its_configuration_comes_along(tmp_path, capfd):
    """As older folders have it; what these leave to the model, as its end of a text, stays the model's."""
    folder = tmp_path / "legacy"
    shutil.copytree(golden("hf_legacy/wt103_like"), folder)
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["eos_token_id"]
    config |= {"do_sample": True, "top_k": 20, "bad_words_ids": [[3]]}
    (folder / "config.json").write_text(json.dumps(config))
    convert_golden("transformers", folder, tmp_path / "out")
    generation = TransfoXLForCausalLM.from_pretrained(tmp_path / "out").generation_config
    assert (generation.do_sample, generation.top_k, generation.bad_words_ids) == (True, 20, [[3]])
    assert generation.eos_token_id == 0
    config["cache_implementation"] = "none"
    (folder / "config.json").write_text(json.dumps(config))
    line = refusal(capfd, tmp_path, "transformers", folder)
    assert "config.json cannot be used, mend it: " in line


@pytest.mark.parametrize("content", ["{", "[]", '{"cache_implementation": "none"}', '{"max_new_tokens": "many"}'])
def test_refuses_a_generation_config_that_says_nothing(content, tmp_path, capfd):
    folder = tmp_path / "legacy"
    shutil.copytree(golden("hf_legacy/wt103_like"), folder)
    (folder / "generation_config.json").write_text(content)
    line = refusal(capfd, tmp_path, "transformers", folder)
    assert "generation_config.json cannot be used, mend it: " in line


def pickle_class(monkeypatch, module, name):
    """Return a class that pickles as `module.name`, of a module that is not there when the pickle is read."""
    if module not in sys.modules:
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    made = type(name, (torch.nn.Module,) if module == "mem_transformer" else (), {"__module__": module})
    setattr(sys.modules[module], name, made)
    return made


def write_corpus(path, monkeypatch, symbols, dataset, lower_case=False, delimiter=None):
    """Pickle a corpus as the originals do; `path` is cache.pt or cache.pkl."""
    corpus = pickle_class(monkeypatch, "data_utils", "Corpus")()
    corpus.vocab = pickle_class(monkeypatch, "vocabulary_of_the_original", "Vocab")()
    corpus.dataset = dataset
    corpus.vocab.idx2sym, corpus.vocab.lower_case, corpus.vocab.delimiter = symbols, lower_case, delimiter
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(corpus, path) if path.suffix == ".pt" else path.write_bytes(pickle.dumps(corpus, protocol=2))


def write_module(path, monkeypatch, n_token, d_model=8, n_head=2, d_head=4, d_inner=6):
    """Pickle a module with the parts and attributes of the PyTorch original's."""
    new = pickle_class(monkeypatch, "mem_transformer", "Part")
    nn = torch.nn

    def part(attributes=(), **children):
        module = new()
        for name, value in {**dict(attributes), **children}.items():
            setattr(module, name, value)
        return module

    attention = part(
        {"pre_lnorm": False},
        qkv_net=nn.Linear(d_model, 3 * n_head * d_head, bias=False),
        r_net=nn.Linear(d_model, n_head * d_head, bias=False),
        o_net=nn.Linear(n_head * d_head, d_model, bias=False),
        layer_norm=nn.LayerNorm(d_model),
        dropatt=nn.Dropout(0.0),
    )
    feed_forward = part(
        CoreNet=nn.Sequential(nn.Linear(d_model, d_inner), nn.ReLU(), nn.Dropout(), nn.Linear(d_inner, d_model)),
        layer_norm=nn.LayerNorm(d_model),
    )
    embedding, softmax = nn.Embedding(n_token, d_model), nn.Linear(d_model, n_token)
    softmax.weight = embedding.weight
    sizes = {"n_head": n_head, "d_head": d_head, "n_layer": 1, "d_embed": d_model, "attn_type": 0}
    lengths = {"tgt_len": 4, "ext_len": 0, "mem_len": 6, "clamp_len": -1, "same_length": False, "sample_softmax": -1}
    torch.save(
        part(
            sizes | lengths,
            r_w_bias=nn.Parameter(torch.randn(n_head, d_head)),
            r_r_bias=nn.Parameter(torch.randn(n_head, d_head)),
            word_emb=part({"cutoffs": [n_token], "div_val": 1}, emb_layers=nn.ModuleList([embedding])),
            drop=nn.Dropout(0.1),
            layers=nn.ModuleList([part(dec_attn=attention, pos_ff=feed_forward)]),
            crit=part(out_layers=nn.ModuleList([softmax])),
        ),
        path,
    )


# ---- refusals ----


def refusal(capfd, tmp_path, family, checkpoint, *options):
    """Run the command line, which must refuse in one line and leave nothing; return the line."""
    before = sorted(tmp_path.iterdir())
    arguments = ["--from", family, "--checkpoint", checkpoint, "--output", tmp_path / "new" / "out", *options]
    assert command_line.main([str(argument) for argument in arguments]) == 1
    lines = capfd.readouterr().err.splitlines()
    lines = [line for line in lines if line.startswith("txl-convert: ")]
    assert len(lines) == 1
    assert not (tmp_path / "new" / "out").exists()
    assert [path for path in sorted(tmp_path.iterdir()) if path not in before and path.name != "new"] == []
    assert not (tmp_path / "new").exists() or list((tmp_path / "new").iterdir()) == []
    return lines[0]


@pytest.mark.parametrize(
    "options", [("--corpus", "nowhere"), ("--mem-len", "5"), ("--clamp-len", "9"), ("--same-length",)]
)
def test_a_vocabulary_alone_has_no_use_for_options_of_a_model(tmp_path, capfd, monkeypatch, options):
    """Whoever gives them has named the wrong folder."""
    write_corpus(tmp_path / "data" / "cache.pt", monkeypatch, ["<eos>", "a"], "wt103")
    line = refusal(capfd, tmp_path, "kimiyoung-pytorch", tmp_path / "data", *options)
    assert f"{options[0]} is for a model, and {tmp_path / 'data'} holds a vocabulary alone" in line
    arguments = ["--from", "kimiyoung-pytorch", "--checkpoint", tmp_path / "data", "--output", tmp_path / "out"]
    assert command_line.main([str(argument) for argument in arguments]) == 0
    assert "a tokenizer: there was a vocabulary alone, and no model" in capfd.readouterr().out


def test_a_mode_without_a_vocabulary_is_refused(tmp_path, capfd, monkeypatch):
    write_module(tmp_path / "model.pt", monkeypatch, n_token=5)
    line = refusal(capfd, tmp_path, "kimiyoung-pytorch", tmp_path / "model.pt", "--tokenizer-mode", "bytes")
    assert "--tokenizer-mode bytes is for a vocabulary, and there is none at hand: give it with --corpus" in line
    config = TransfoXLConfig(vocab_size=9, cutoffs=[], div_val=1, d_model=8, d_embed=8, n_head=2, d_head=4, n_layer=1)
    TransfoXLForCausalLM(config).save_pretrained(tmp_path / "model")
    line = refusal(capfd, tmp_path, "transformers", tmp_path / "model", "--tokenizer-mode", "moses")
    assert line.endswith("--tokenizer-mode moses is for a vocabulary, and there is none at hand")


@pytest.mark.parametrize("family", command_line.FAMILIES)
def test_refuses_what_is_not_there(family, tmp_path, capfd):
    assert "does not exist; expected" in refusal(capfd, tmp_path, family, tmp_path / "nothing")


@pytest.mark.parametrize("family", sorted(command_line.FAMILIES.keys() - {"transformers"}))
def test_refuses_a_folder_of_shards(family, tmp_path, capfd):
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for i in (1, 2):
        (folder / f"pytorch_model-0000{i}-of-00002.bin").write_bytes(b"x")
    line = refusal(capfd, tmp_path, family, folder)
    assert "expected" in line and ("pytorch_model-00001-of-00002.bin" in line or family in ("kimiyoung-tf", "remi"))


@pytest.mark.parametrize("family", ["kimiyoung-pytorch", "nvidia"])
@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "cannot be read as a pickle"),
        (b"\x89HDF\r\n\x1a\n" + bytes(99), "cannot be read as a pickle"),
        (b"\x1f\x8b\x08" + bytes(99), "is a packed file; unpack it first: expected"),
        (b"model.pt".ljust(257, b"\0") + b"ustar" + bytes(250), "is a packed file; unpack it first: expected"),
        (b"PK\x05\x06" + bytes(18), "cannot be read as a pickle"),
        (b"\x10\x00\x00\x00\x00\x00\x00\x00{}              ", "cannot be read as a pickle"),
    ],
    ids=["empty", "lfs", "hdf5", "gzip", "tar", "empty zip", "safetensors"],
)
def test_refuses_other_file_types(family, content, found, tmp_path, capfd):
    (tmp_path / "model.pt").write_bytes(content)
    assert found in refusal(capfd, tmp_path, family, tmp_path / "model.pt")


def test_refuses_a_zipped_release(tmp_path, capfd):
    with zipfile.ZipFile(tmp_path / "release.zip", "w") as archive:
        archive.writestr("LM-TFM/model.pt", bytes(99))
    line = refusal(capfd, tmp_path, "kimiyoung-pytorch", tmp_path / "release.zip")
    assert "a zip archive with 0 data.pkl records, where torch.save writes one: a packed release?" in line


def test_refuses_another_family(tmp_path, capfd):
    nvidia, module = golden("nvidia_pytorch/nv_large_like"), "kimiyoung_pytorch/word_adaptive_div2_proj.model.pt"
    line = refusal(capfd, tmp_path, "kimiyoung-pytorch", nvidia / "checkpoint_best.pt")
    assert "--from nvidia" in line
    assert "MemTransformerLM; expected" in refusal(capfd, tmp_path, "nvidia", golden(module))


def test_refuses_an_output_that_is_not_empty(tmp_path, capfd):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    arguments = ["--from", "nvidia", "--checkpoint", "x", "--output", str(tmp_path / "out")]
    assert command_line.main(arguments) == 1
    assert "not empty" in capfd.readouterr().err
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


CHANGES = {
    "missing": lambda state: state.pop("transformer.layers.1.pos_ff.CoreNet.3.bias"),
    "left over": lambda state: state.update({"transformer.layers.1.dec_attn.extra": torch.ones(2)}),
    "unknown": lambda state: state.update({"optimizer.step": torch.ones(1)}),
    "shape": lambda state: state.update({"crit.cluster_weight": torch.ones(2, 2)}),
    "untied": lambda state: state.update({"crit.out_projs.1": torch.ones(32, 16)}),
}
NAMED = {
    "missing": "no tensor for transformer.layers.1.pos_ff.CoreNet.3.bias",
    "left over": "transformer.layers.1.dec_attn.extra, which the model has not",
    "unknown": "optimizer.step, which the model has not",
    "shape": "crit.cluster_weight has shape [2, 2] where [3, 32] was expected",
    "untied": "crit.out_projs.1 is not equal",
}


@pytest.mark.parametrize("change", CHANGES)
def test_names_the_tensor_that_is_wrong(change, tmp_path, capfd):
    folder = golden("hf_legacy/wt103_like")
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    CHANGES[change](state)
    (tmp_path / "legacy").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "legacy")
    torch.save(state, tmp_path / "legacy" / "pytorch_model.bin")
    assert NAMED[change] in refusal(capfd, tmp_path, "transformers", tmp_path / "legacy")


STOPPED = """
import os, runpy, signal, sys, time
from txl_hf import TransfoXLForCausalLM

number = int(sys.argv.pop())
# Under nohup, which tests may run under, nobody hears SIGHUP.
signal.getsignal(number) == signal.SIG_IGN and signal.signal(number, signal.SIG_DFL)

def stop(*arguments, **options):
    os.kill(os.getpid(), number)
    time.sleep(60)

TransfoXLForCausalLM.save_pretrained = stop
sys.argv.pop(0)
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_stopped_conversion_leaves_no_output(how, tmp_path):
    options = ["--from", "transformers", "--checkpoint", str(golden("hf_legacy/wt103_like"))]
    options += ["--output", str(tmp_path / "out")]
    script = str(REPOSITORY / "conversion" / "convert.py")
    result = run_script("-c", STOPPED, script, *options, int(how))
    left = list(tmp_path.iterdir())
    if how != signal.SIGKILL:
        assert (result.returncode, result.stderr.splitlines()[-1], left) == (1, "txl-convert: interrupted", [])
        return
    assert result.returncode == -how and not (tmp_path / "out").exists()
    assert [path.name.startswith(UNFINISHED_PREFIX) for path in left] == [True]
    assert command_line.main(options) == 0 and (tmp_path / "out" / "model.safetensors").exists()


def test_others_may_read_what_was_written(tmp_path):
    arguments = ["--from", "transformers", "--checkpoint", str(golden("hf_legacy/wt103_like"))]
    assert command_line.main([*arguments, "--output", str(tmp_path / "out")]) == 0
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert modes == {(tmp_path / "out" / "config.json").stat().st_mode}


def test_a_failed_write_leaves_nothing(tmp_path, capfd, monkeypatch):
    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TransfoXLForCausalLM, "save_pretrained", full_disk)
    line = refusal(capfd, tmp_path, "nvidia", golden("nvidia_pytorch/nv_large_like"))
    assert "No space left" in line


@pytest.mark.parametrize("wrapped", [False, True], ids=["root", "in module"])
def test_a_module_nested_in_itself_ends(wrapped, tmp_path, capfd, monkeypatch):
    module = pickle_class(monkeypatch, "mem_transformer", "Part")()
    parts = {"word_emb": module, "layers": module, **({"module": module} if wrapped else {})}
    module.__dict__["_modules"] = parts
    torch.save(module, tmp_path / "model.pt")
    assert "parts" in refusal(capfd, tmp_path, "kimiyoung-pytorch", tmp_path / "model.pt")


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
@given(data=st.data())
def test_150_mutated_checkpoints_end_in_one_line_or_a_model(data, tmp_path_factory):
    """Damage to the goldens' pickles, where hyper-parameters, shapes and names are."""
    tmp_path = tmp_path_factory.mktemp("mutated")
    family = data.draw(st.sampled_from(["kimiyoung-pytorch", "nvidia"]))
    path = {
        "kimiyoung-pytorch": golden("kimiyoung_pytorch/word_adaptive_div2_proj.model.pt"),
        "nvidia": golden("nvidia_pytorch/nv_large_like/checkpoint_best.pt"),
    }[family]
    content = bytearray(path.read_bytes())
    start = content.index(b"\x80\x02")
    for _ in range(data.draw(st.integers(1, 3))):
        position = start + data.draw(st.integers(0, 10_000))
        content[position] = data.draw(st.integers(0, 255))
    (tmp_path / "model.pt").write_bytes(content)
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        arguments = ["--from", family, "--checkpoint", str(tmp_path / "model.pt"), "--output", str(tmp_path / "out")]
        status = command_line.main(arguments)
    if status == 0:
        assert (tmp_path / "out" / "model.safetensors").exists()
    else:
        assert len(errors.getvalue().splitlines()) == 1
        assert [entry.name for entry in tmp_path.iterdir()] == ["model.pt"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(value, tmp_path, capfd):
    folder = golden("hf_legacy/wt103_like")
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    name = "transformer.word_emb.emb_layers.1.weight"  # tied: the file has a copy
    state[name][1, 1] = value
    (tmp_path / "legacy").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "legacy")
    torch.save({name: tensor.clone() for name, tensor in state.items()}, tmp_path / "legacy" / "pytorch_model.bin")
    line = refusal(capfd, tmp_path, "transformers", tmp_path / "legacy")
    assert f"1 of the {state[name].numel()} numbers in {name} are NaN or infinite" in line
    options = ["--from", "transformers", "--checkpoint", str(tmp_path / "legacy"), "--output", str(tmp_path / "out")]
    assert command_line.main([*options, "--allow-non-finite"]) == 0
    assert f"warning: 1 of the {state[name].numel()} numbers in {name}" in capfd.readouterr().err


def test_a_flipped_bit_is_refused(tmp_path, capfd):
    data = bytearray((golden("nvidia_pytorch/nv_large_like") / "checkpoint_best.pt").read_bytes())
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        info = max(archive.infolist(), key=lambda info: info.file_size)
    data[info.header_offset + 200 + info.file_size // 2] ^= 0x40
    (tmp_path / "checkpoint_best.pt").write_bytes(data)
    assert "does not match" in refusal(capfd, tmp_path, "nvidia", tmp_path / "checkpoint_best.pt")


def test_the_cache_of_the_hub_is_a_folder_of_links(tmp_path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    shutil.copy(golden("tokenizer/vocab.txt"), blobs / "9f2e")
    (snapshot / "vocab.txt").symlink_to("../../blobs/9f2e")
    arguments = ["--from", "transformers", "--checkpoint", str(snapshot), "--output", str(tmp_path / "out")]
    assert command_line.main(arguments) == 0


@pytest.mark.parametrize("target", ["empty", "nowhere"])
def test_an_output_that_is_a_link_is_refused_before_the_work(target, tmp_path, capfd):
    (tmp_path / "empty").mkdir()
    (tmp_path / "out").symlink_to(target)
    assert command_line.main(["--from", "nvidia", "--checkpoint", "none", "--output", str(tmp_path / "out")]) == 1
    assert f"out is a link to {target}" in capfd.readouterr().err


def test_names_cannot_speak_to_a_terminal(tmp_path, capfd):
    folder = golden("hf_legacy/wt103_like")
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    state["\x1b[2J\x1b]0;owned\x07"] = torch.ones(1)
    (tmp_path / "legacy").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "legacy")
    torch.save(state, tmp_path / "legacy" / "pytorch_model.bin")
    assert refusal(capfd, tmp_path, "transformers", tmp_path / "legacy").isprintable()


def test_names_stay_names_in_the_card(tmp_path):
    """Of the output, in a title and in code; of the checkpoint, in a code span."""
    output = tmp_path / 'x"); import os; os.system("id"); ("\n# [a](b) <script> `c` {config}'
    checkpoint = tmp_path / "d` <img src=x> [e](f)"
    shutil.copytree(golden("hf_legacy/enwik8_like"), checkpoint)
    arguments = ["--from", "transformers", "--checkpoint", str(checkpoint), "--output", str(output)]
    assert command_line.main(arguments) == 0
    card = (output / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", card, re.S)
    (call,) = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    assert call.args[0].value == output.name
    page = card.replace(code, "")
    assert "<script>" not in page and "](b)" not in page and "`d? <img src=x> [e](f)`" in page
    headings = [line for line in page.splitlines() if line.startswith("#")]
    assert len(headings) == 1 and "{config}" not in page and "converted, values unchanged" in page


# ---- the Hub ----


class FakeHub:
    """Records what HfApi is asked for; `fails` stands for a refused upload."""

    calls, fails = [], False

    def create_repo(self, repository, exist_ok):
        self.calls.append(repository)

    def upload_folder(self, repo_id, folder_path):
        assert (folder_path / "model.safetensors").exists()
        if self.fails:
            raise ConnectionError("no network\nat all")
        self.calls.append(repo_id)


@pytest.mark.parametrize("fails", [False, True], ids=["uploaded", "refused"])
def test_push_to_hub_after_the_local_save(fails, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(command_line, "HfApi", FakeHub)
    monkeypatch.setattr(FakeHub, "fails", fails)
    monkeypatch.setattr(FakeHub, "calls", [])
    arguments = ["--from", "nvidia", "--checkpoint", str(golden("nvidia_pytorch/nv_large_like"))]
    assert command_line.main([*arguments, "--output", str(tmp_path / "out"), "--push-to-hub", "me/xl"]) == int(fails)
    assert FakeHub.calls == ["me/xl"] * (1 if fails else 2)
    assert 'from_pretrained("me/xl", trust_remote_code=True)' in (tmp_path / "out" / "README.md").read_text()
    if fails:
        assert "is complete, but was not uploaded: no network at all" in capfd.readouterr().err.splitlines()[-1]


# ---- what docs/conversion.md shows ----


def test_commands_of_the_page_on_conversion(tmp_path, monkeypatch):
    """The page's command for each family, word for word, in a folder laid out as it says."""
    page = REPOSITORY / "docs" / "conversion.md"
    commands = re.findall(r"^txl-convert .*$", page.read_text(), re.M)
    sources = {
        "transformers": golden("hf_legacy/wt103_like"),
        "kimiyoung-pytorch": golden("kimiyoung_pytorch/word_adaptive_div2_proj.model.pt"),
        "kimiyoung-tf": golden("kimiyoung_tf/tf_wt103_like"),
        "remi": tmp_path / "remi",
        "nvidia": golden("nvidia_pytorch/nv_large_like/checkpoint_best.pt"),
    }
    monkeypatch.chdir(tmp_path)
    script = str(REPOSITORY / "conversion" / "convert.py")
    symbols = ["<eos>", "<unk>", *(f"word{i}" for i in range(118))]
    write_bundle(tmp_path / "remi" / "model", variables_of())
    seen = set()
    for command in commands:
        words = shlex.split(command)
        options = dict(zip(words[1::2], words[2::2], strict=True))
        checkpoint = Path(options["--checkpoint"])
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.symlink_to(sources[options["--from"]])
        if "--corpus" in options:
            corpus = Path(options["--corpus"])
            write_corpus(corpus if corpus.suffix else corpus / "cache.pkl", monkeypatch, symbols, "wt103")
        result = run_script(script, *words[1:])
        assert result.returncode == 0, result.stderr
        check_generates(AutoModelForCausalLM.from_pretrained(options["--output"]).eval())
        seen.add(options["--from"])
    assert seen == command_line.FAMILIES.keys()


@pytest.mark.slow
def test_peak_memory_is_at_most_twice_the_checkpoint(tmp_path):
    def convert(name, **sizes):
        """The most memory that a conversion takes, and the size of its checkpoint."""
        config = TransfoXLConfig(cutoffs=[], div_val=1, n_layer=4, mem_len=16, **sizes)
        state = {name: torch.randn(shape) for name, shape in layout.legacy_tensors(config).items()}
        state["crit.out_layers.0.weight"] = state["transformer.word_emb.emb_layers.0.weight"]
        config.save_pretrained(tmp_path / name)
        torch.save(state, tmp_path / name / "pytorch_model.bin")
        options = [
            "--from",
            "transformers",
            "--checkpoint",
            str(tmp_path / name),
            "--output",
            str(tmp_path / f"{name}-out"),
        ]
        script = (
            "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True);"
            "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)"
        )
        command = [sys.executable, str(REPOSITORY / "conversion" / "convert.py"), *options]
        result = subprocess.run([sys.executable, "-c", script, *command], capture_output=True, text=True, check=True)
        return int(result.stdout.splitlines()[-1]), (tmp_path / name / "pytorch_model.bin").stat().st_size

    # What the libraries and a pass through all of the converter take is not the checkpoint's.
    idle, small = convert("small", vocab_size=100, d_model=16, d_embed=16, n_head=2, d_head=8, d_inner=16)
    used, large = convert("large", vocab_size=150_000)
    assert used - idle < 2 * (large - small), (used, idle, large, small)
