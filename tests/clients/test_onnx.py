"""`txl-export`, and onnxruntime on what it writes: torch's figures, and generate's text, with the memory carried."""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from models import small_config
from txl_hf import TransfoXLForCausalLM, TransfoXLTokenizer, commands
from txl_hf.integrations import onnx_export

GENERATE = Path(__file__).parents[2] / "examples" / "generate_onnx.py"
WORDS = [f"word{i}" for i in range(59)]
KINDS = {
    "cutoffs": {"initial_memory": "zeros", "same_length": True, "clamp_len": 9},
    "one softmax": {"cutoffs": [], "div_val": 1, "initial_memory": "empty"},
}


@pytest.fixture(scope="module", params=KINDS)
def folders(request, tmp_path_factory):
    """A model, and what is exported of it."""
    folder = tmp_path_factory.mktemp("onnx")
    torch.manual_seed(0)
    tokenizer = TransfoXLTokenizer.from_symbols(["<eos>", "<unk>", *WORDS], mode="whitespace")
    config = small_config(vocab_size=len(tokenizer), mem_len=12, tgt_len=8, **KINDS[request.param])
    TransfoXLForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    commands.export(["--model", str(folder / "model"), "--output", str(folder / "onnx")])
    return folder / "model", folder / "onnx"


def test_a_text_costs_the_same_segment_after_segment(folders):
    model = TransfoXLForCausalLM.from_pretrained(folders[0])
    session = onnxruntime.InferenceSession(folders[1] / "segment.onnx")
    text = torch.randint(61, (3, 40), generator=torch.Generator().manual_seed(1))
    mems = None
    begin = model.config.mem_len if model.config.initial_memory == "zeros" else 0
    carried = [np.zeros((3, begin, model.config.d_model), np.float32)] * model.config.n_layer
    for segment in text.split([1, 9, 4, 25, 1], dim=1):
        expected = model(segment, mems=mems)
        mems = expected.mems
        given = {f"mems.{i}": states for i, states in enumerate(carried)}
        logits, *carried = session.run(None, {"input_ids": segment.numpy(), **given})
        assert np.allclose(logits, expected.logits.detach().numpy(), atol=1e-4)
        assert carried[0].shape == tuple(mems[0].shape)


def test_a_memory_as_long_as_the_segment_of_the_graph(make_model, tmp_path):
    """Sizes that are equal where it is made would be one in it."""
    make_model(n_layer=1, mem_len=3).save_pretrained(tmp_path / "model")
    commands.export(["--model", str(tmp_path / "model"), "--output", str(tmp_path / "onnx")])


@pytest.mark.parametrize("mem_len", [1, 2, 5])
def test_a_graph_says_no_other_length_of_memory_than_it_returns(mem_len, make_model, tmp_path):
    """onnxruntime warns of it in each call."""
    make_model(mem_len=mem_len, n_layer=1).save_pretrained(tmp_path / "model")
    onnx_export.export(str(tmp_path / "model"), tmp_path / "graphs")
    for name in ("step", "segment"):
        logits, *states = onnx.load(tmp_path / "graphs" / f"{name}.onnx", load_external_data=False).graph.output
        assert [output.type.tensor_type.shape.dim[1].dim_param for output in states] == ["new_memory"]


def test_every_token_of_a_model_that_reads_some_again_is_remembered(make_model, tmp_path):
    make_model(n_layer=1, mem_len=12, ext_len=8).save_pretrained(tmp_path / "model")
    commands.export(["--model", str(tmp_path / "model"), "--output", str(tmp_path / "onnx")])
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "segment.onnx")
    text, carried = torch.arange(10)[None], np.zeros((1, 0, 16), np.float32)
    for part in text.split([4, 5, 1], dim=1):
        logits, carried = session.run(None, {"input_ids": part.numpy(), "mems.0": carried})
    assert carried.shape[1] == 10 and json.loads((tmp_path / "onnx" / "config.json").read_text())["ext_len"] == 0
    whole = make_model(n_layer=1, mem_len=12)(text).logits
    assert np.allclose(logits[0, -1], whole[0, -1].detach().numpy(), atol=1e-4)


def test_the_example_writes_what_generate_writes(folders, capsys, monkeypatch):
    prompt = " ".join(WORDS[i % 59] for i in range(0, 200, 7))
    model, tokenizer = TransfoXLForCausalLM.from_pretrained(folders[0]), TransfoXLTokenizer.from_pretrained(folders[0])
    ids, mems = tokenizer(prompt, return_tensors="pt")["input_ids"], None
    for segment in ids.split(8, dim=1):
        outputs = model(segment, mems=mems)
        mems = outputs.mems
    written = [int(outputs.logits[0, -1].argmax())]
    while len(written) < 20:
        outputs = model(torch.tensor([written[-1:]]), mems=mems)
        mems = outputs.mems
        written.append(int(outputs.logits[0, -1].argmax()))
    arguments = ["--model", str(folders[1]), "--prompt", prompt, "--max_new_tokens", "20"]
    monkeypatch.setattr(sys, "argv", [str(GENERATE), *arguments])
    runpy.run_path(str(GENERATE), run_name="__main__")
    assert capsys.readouterr().out.split() == tokenizer.decode([*ids[0], *written]).split()
    # Drawn, it is another text, and the same one for the same seed; next to no temperature draws the likeliest.
    texts = []
    for seed, temperature in (("1", "1"), ("1", "1"), ("2", "1"), ("1", "1e-40")):
        monkeypatch.setattr(sys, "argv", [str(GENERATE), *arguments, "--seed", seed, "--temperature", temperature])
        runpy.run_path(str(GENERATE), run_name="__main__")
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert texts[3].split() == tokenizer.decode([*ids[0], *written]).split()


def test_both_graphs_have_their_weights_in_one_file(folders):
    """Each once: what a graph has of its own is small."""
    places = []
    for name in ("segment", "step"):
        tensors = onnx.load(folders[1] / f"{name}.onnx", load_external_data=False).graph.initializer
        entries = [{entry.key: entry.value for entry in tensor.external_data} for tensor in tensors]
        assert {entry["location"] for entry in entries if entry} == {"weights.data"}
        assert all(len(tensor.raw_data) < 1024 for tensor in tensors)
        places.append({(int(entry["offset"]), int(entry["length"])) for entry in entries if entry})
    model = TransfoXLForCausalLM.from_pretrained(folders[0])
    large = [parameter for parameter in model.parameters() if parameter.nbytes >= 1024]
    assert len(places[0] & places[1]) >= 0.9 * len(large) > 0
    together = sum(length for _, length in places[0] | places[1])
    assert together == pytest.approx(sum(parameter.nbytes for parameter in large), rel=0.2)
    assert (folders[1] / "weights.data").stat().st_size < together + 4096 * len(places[0] | places[1])


def test_a_graph_of_another_model_is_found_out(folders):
    model = TransfoXLForCausalLM.from_pretrained(folders[0]).requires_grad_(False)
    next(model.parameters()).add_(0.1)
    with pytest.raises(ValueError, match=r"segment.onnx: logits differs by .* but 1e-04 is allowed"):
        onnx_export.check_graph(model, folders[1] / "segment.onnx", ((1, 3),))


def test_what_cannot_be_exported_is_said_and_nothing_written(folders, make_model, tmp_path):
    make_model(mem_len=0).save_pretrained(tmp_path / "model")
    for model, output, message in (
        (tmp_path / "model", tmp_path / "out", "has mem_len=0"),
        (folders[0], folders[1], "exists: choose another folder"),
        (tmp_path, tmp_path / "out", "does not load"),
    ):
        with pytest.raises(SystemExit) as end:
            commands.export(["--model", str(model), "--output", str(output)])
        assert message in end.value.code and "\n" not in end.value.code
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_of_miditok_is_written_too(make_model, tmp_path, capsys):
    """Which has one file alone."""
    tokenizer = pytest.importorskip("miditok").REMI()
    make_model(vocab_size=len(tokenizer), cutoffs=[], div_val=1, mem_len=4).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    commands.export(["--model", str(tmp_path / "model"), "--output", str(tmp_path / "out")])
    assert "no tokenizer" not in capsys.readouterr().err and (tmp_path / "out" / "tokenizer.json").exists()


def test_a_model_without_tokenizer_is_written_without_one_and_that_is_said(make_model, tmp_path, capsys):
    make_model(n_layer=1, mem_len=4).save_pretrained(tmp_path / "model")
    commands.export(["--model", str(tmp_path / "model"), "--output", str(tmp_path / "out")])
    assert "no tokenizer was found with " in capsys.readouterr().err
    assert not (tmp_path / "out" / "tokenizer_config.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "1", "--seed", "-1"], "--seed -1 has to be 0 or more"),
        (["--prompt", "Grüße"], "--prompt cannot be read: .*"),
        (["--model", "damaged"], "--model .*damaged is damaged: .+"),
    ],
    ids=["seed", "prompt", "model"],
)
def test_what_cannot_be_gone_on_with_is_one_line(options, message, folders, tmp_path, monkeypatch, capsys):
    if options[0] == "--model":
        shutil.copytree(folders[1], tmp_path / "damaged")
        (tmp_path / "damaged" / "step.onnx").write_bytes(b"no graph")
        options = ["--model", str(tmp_path / "damaged")]
    if options[0] == "--prompt":
        # A tokenizer without a token for what it does not know.
        shutil.copytree(folders[1], tmp_path / "strict")
        TransfoXLTokenizer.from_symbols([*"abc \n"], mode="characters").save_pretrained(tmp_path / "strict")
        options = ["--model", str(tmp_path / "strict"), *options]
    monkeypatch.setattr(sys, "argv", [str(GENERATE), "--model", str(folders[1]), "--prompt", "word1", *options])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(GENERATE), run_name="__main__")
    said = str(end.value.code) + capsys.readouterr().err
    assert re.search(message, said) and "Traceback" not in said


@pytest.mark.parametrize("missing", ["tokenizer.json", "segment.onnx", "step.onnx"])
def test_a_folder_that_is_no_export_is_one_line(missing, tmp_path, monkeypatch):
    for name in {"tokenizer.json", "segment.onnx", "step.onnx"} - {missing}:
        (tmp_path / name).touch()
    monkeypatch.setattr(sys, "argv", [str(GENERATE), "--model", str(tmp_path), "--prompt", "word1"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(GENERATE), run_name="__main__")
    assert end.value.code == f"error: --model {tmp_path} has no {missing}: write a folder with txl-export"
