"""A memory that is saved goes on, in any process, as the one that was not; any other file is refused."""

import json
import random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import txl_hf
from hub_server import HubServer
from scripts import run_script
from txl_hf import MemoryLengths, StaticMemoryCache, TransfoXLForCausalLM, TransfoXLForTokenClassification
from txl_hf.data import memory_files
from txl_hf.memories import memory_of
from txl_hf.transfo_xl.cache_transfo_xl import CACHE_NAME

KINDS = ["mems", "cache", "static"]
PADDED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9])
# A new process goes on from each file of a folder, and writes what the model says.
GO_ON = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM
import txl_hf

folder = Path(sys.argv[1])
model, ids = AutoModelForCausalLM.from_pretrained(folder / "model"), torch.load(folder / "ids.pt")
with torch.no_grad():
    for path in folder.glob("*.memory"):
        torch.save(model(ids, **txl_hf.load_memory(path, model)).logits, path.with_suffix(".logits"))
"""


def read(model, kind: str, ids: torch.Tensor, **given):
    """The outputs of a model for the last of the segments that it reads, of 4 tokens each."""
    if kind == "static":
        given["past_key_values"] = StaticMemoryCache(model.config)
    mask = given.pop("attention_mask", None)
    with torch.no_grad():
        for i in range(0, ids.shape[1], 4):
            masks = {} if mask is None else {"attention_mask": mask[:, i : i + 4]}
            outputs = model(ids[:, i : i + 4], use_cache=kind != "mems", **given, **masks)
            given = going_on(outputs)
    return outputs


def going_on(outputs) -> dict:
    return memory_of(outputs) or {CACHE_NAME: outputs[CACHE_NAME]}


def steps_after(model, memory: dict, ids: torch.Tensor) -> list[torch.Tensor]:
    """The logits of three calls that go on from a memory: a token, a segment, a token."""
    found = []
    with torch.no_grad():
        for part in ids.split([1, 4, 1], dim=1):
            outputs = model(part, use_cache=CACHE_NAME in memory, **memory)
            memory = going_on(outputs)
            found.append(outputs.logits)
    return found


def test_another_process_goes_on_bit_for_bit(make_model, make_ids, tmp_path):
    model = make_model(initial_memory="zeros", same_length=True)
    model.save_pretrained(tmp_path / "model")
    torch.save(make_ids(2, 6, seed=1), tmp_path / "ids.pt")
    expected = {}
    for kind in KINDS:
        outputs = read(model, kind, make_ids(2, 9))
        txl_hf.save_memory(tmp_path / f"{kind}.memory", model, outputs)
        with torch.no_grad():
            expected[kind] = model(make_ids(2, 6, seed=1), **going_on(outputs)).logits
    process = run_script("-c", GO_ON, tmp_path)
    assert process.returncode == 0, process.stderr
    for kind in KINDS:
        assert torch.equal(torch.load(tmp_path / f"{kind}.logits"), expected[kind]), kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("masked", [False, True], ids=["real", "padded"])
@pytest.mark.parametrize("initial_memory", ["zeros", "empty"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_loaded_goes_on_as_what_was_saved(
    kind, initial_memory, masked, dtype, make_model, make_ids, device, tmp_path
):
    model = make_model(mem_len=6, initial_memory=initial_memory).to(device, dtype)
    given = {"attention_mask": PADDED.to(device)} if masked else {}
    outputs = read(model, kind, make_ids(2, 9).to(device), **given)
    txl_hf.save_memory(tmp_path / "memory", model, outputs)
    loaded = txl_hf.load_memory(tmp_path / "memory", model)
    assert loaded.keys() == ({"mems", "mems_mask"} if kind == "mems" else {CACHE_NAME})
    ids = make_ids(2, 6, seed=1).to(device)
    found, expected = steps_after(model, loaded, ids), steps_after(model, going_on(outputs), ids)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert found[0].isfinite().all()


def test_a_cache_that_has_read_less_than_it_holds_or_written_tokens_goes_on(make_model, make_ids, tmp_path):
    model = make_model(mem_len=12, eos_token_id=None)
    for kind in ("cache", "static"):
        given = {} if kind == "cache" else {"past_key_values": StaticMemoryCache(model.config)}
        options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
        outputs = model.generate(make_ids(1, 5), **given, **options)
        txl_hf.save_memory(tmp_path / kind, model, outputs)
        loaded = txl_hf.load_memory(tmp_path / kind, model)
        # Each has seen all but the last token.
        assert loaded[CACHE_NAME].get_seq_length() == outputs.past_key_values.get_seq_length() == 8
        text = torch.cat([outputs.sequences, make_ids(1, 3, seed=1)], dim=1)
        found = model.generate(text, **loaded, **options).sequences
        assert torch.equal(found, model.generate(text, past_key_values=outputs.past_key_values, **options).sequences)
        assert torch.equal(found, model.generate(text, **options).sequences)


def test_generate_answers_prompts_from_a_saved_memory(make_model, make_ids, tmp_path):
    model = make_model(mem_len=30, eos_token_id=None)
    ids, options = make_ids(1, 14), {"max_new_tokens": 5, "do_sample": False}
    txl_hf.save_memory(tmp_path / "memory", model, read(model, "mems", ids[:, :12]))
    memory = txl_hf.load_memory(tmp_path / "memory", model)
    for beams in (1, 3):
        found = model.generate(ids[:, 12:], num_beams=beams, **memory, **options)
        assert torch.equal(found[:, 2:], model.generate(ids, num_beams=beams, **options)[:, 14:])


@pytest.mark.parametrize("kind", ["mems", "cache"])
@pytest.mark.parametrize("ext_len", [0, 3])
def test_evaluations_go_on_from_a_memory(kind, ext_len, make_model, make_ids, tmp_path):
    model = make_model(mem_len=40)
    ids = make_ids(1, 30)[0]
    txl_hf.save_memory(tmp_path / "memory", model, read(model, kind, ids[None, :16]))
    memory = txl_hf.load_memory(tmp_path / "memory", model)
    given = {"segment_length": 4, "memory_length": 40, "ext_len": ext_len, "memory": memory}
    if kind == "cache" and ext_len:
        with pytest.raises(ValueError, match="memory has past_key_values, but dynamic evaluation and ext_len go on"):
            txl_hf.token_losses(model, ids[16:], **given)
        return
    expected = txl_hf.token_losses(model, ids, segment_length=4, memory_length=40)[16:]
    for _ in range(2):
        # The second time too: it is continued in a copy.
        found = txl_hf.token_losses(model, ids[16:], **given)
        assert torch.allclose(found, expected, atol=1e-5)
    assert txl_hf.evaluate_language_model(model, ids[16:], **given).nll == pytest.approx(expected.mean().item(), 1e-5)
    if kind == "mems":
        still = txl_hf.DynamicEvaluation(learning_rate=0.0)
        found = txl_hf.token_losses(model, ids[16:], **given, dynamic=still)
        assert torch.allclose(found, expected, atol=1e-5)


def test_an_evaluation_with_a_shorter_memory_goes_on_from_the_latest_states(make_model, make_ids):
    model, ids = make_model(mem_len=12), make_ids(1, 20)
    memory = going_on(read(model, "mems", ids[:, :12]))
    cut = {"mems": tuple(states[:, -5:] for states in memory["mems"])}
    found, expected = (
        txl_hf.token_losses(model, ids[0, 12:], segment_length=4, memory_length=5, memory=given)
        for given in (memory, cut)
    )
    assert torch.equal(found, expected)
    alone = txl_hf.token_losses(model, ids[0, 12:], segment_length=4, memory_length=5)
    assert not torch.allclose(found, alone, atol=1e-3)


# --- whose it is -----------------------------------------------------------------------------------------------------


def test_the_memory_of_another_decay_is_refused(make_model, make_ids, tmp_path):
    """States depend on it, and no argument of a call replaces it."""
    model, ids = make_model(decay_len=4), make_ids(1, 9)
    txl_hf.save_memory(tmp_path / "memory", model, model(ids))
    model.config.decay_len = -1
    with pytest.raises(ValueError, match="with the fingerprint"):
        txl_hf.load_memory(tmp_path / "memory", model)


def test_another_models_memory_is_refused_and_both_are_named(make_model, make_ids, tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path / "reader")
    model = TransfoXLForCausalLM.from_pretrained(tmp_path / "reader")
    txl_hf.save_memory(tmp_path / "memory", model, read(model, "mems", make_ids(1, 8)))
    weights, heads, deeper = make_model(), make_model(n_head=4, d_head=4), make_model(n_layer=3)
    with torch.no_grad():
        weights.transformer.layers[1].mlp.down_proj.weight[3, 4] *= 1.1
    for other, size in ((weights, 2), (heads, 2), (deeper, 3)):
        said = (
            rf"memory is the memory of reader \(2 layers of 16\), with the fingerprint \w{{16}}, but this model is "
            rf"TransfoXLForCausalLM \({size} layers of 16\), with \w{{16}}: load the model"
        )
        with pytest.raises(ValueError, match=said):
            txl_hf.load_memory(tmp_path / "memory", other)


def test_the_same_body_goes_on_whatever_its_head_lengths_and_type(make_model, make_ids, tmp_path):
    model = make_model()
    expected = read(model, "mems", make_ids(1, 8)).mems
    txl_hf.save_memory(tmp_path / "memory", model, {"mems": expected})
    labels = make_model(model_class=TransfoXLForTokenClassification)
    labels.transformer.load_state_dict(model.transformer.state_dict())
    narrow, longer = make_model().to(torch.bfloat16), make_model(mem_len=20, tgt_len=9, dropout=0.1)
    for other in (labels, narrow, longer, model.transformer):
        memory = txl_hf.load_memory(tmp_path / "memory", other)
        assert all(torch.equal(*pair) for pair in zip(memory["mems"], expected, strict=True))
        assert memory["mems_mask"] is None and memory["mems"][0].dtype == torch.float32
        assert other(make_ids(1, 3), **memory)[0].isfinite().all()


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(make_model, make_ids, tmp_path):
    """The model, and the file of a padded cache."""
    model = make_model(initial_memory="zeros")
    outputs = read(model, "cache", make_ids(2, 9), attention_mask=PADDED)
    txl_hf.save_memory(tmp_path / "memory", model, outputs)
    return model, tmp_path / "memory"


def test_a_damaged_or_truncated_file_is_refused(saved):
    model, path = saved
    whole, draw = path.read_bytes(), random.Random(0)
    cut = [whole[:length] for length in (0, 7, 100, len(whole) // 2, len(whole) - 1)]
    flipped = []
    for place in draw.sample(range(len(whole)), 300):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << draw.randrange(8)
        flipped.append(bytes(damaged))
    for content in [*cut, whole + b"more", *flipped]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match="memory (is damaged|holds no memory that)"):
            txl_hf.load_memory(path, model)
    path.write_bytes(whole)
    txl_hf.load_memory(path, model)


def test_a_file_of_another_kind_or_a_later_version_is_refused(saved, tmp_path):
    model, path = saved
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="its memory_format is None, and txl_hf.save_memory writes 1"):
        txl_hf.load_memory(tmp_path / "model" / "model.safetensors", model)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    counts = {"mem_len": 6, "length": 15, "initial_length": 6, "projected": 10}
    assert json.loads(metadata["memory"])["counts"] == counts
    save_file(load_file(path), path, metadata | {"memory_format": "2"})
    with pytest.raises(ValueError, match="its memory_format is 2, and txl_hf.save_memory writes 1"):
        txl_hf.load_memory(path, model)
    with pytest.raises(FileNotFoundError):
        txl_hf.load_memory(tmp_path / "nothing", model)


def test_a_file_is_written_whole_or_not_at_all(saved, monkeypatch, make_ids):
    model, path = saved
    before, save = path.read_bytes(), memory_files.save_file

    def fails(tensors, file, **more):
        save(tensors, file, **more)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memory_files, "save_file", fails)
    with pytest.raises(OSError, match=r"No space left on device: .*memory"):
        txl_hf.save_memory(path, model, read(model, "mems", make_ids(1, 8)))
    assert path.read_bytes() == before and [each.name for each in path.parent.iterdir()] == ["memory"]


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ({"logits": None}, "outputs, a dict, hold neither mems nor past_key_values"),
        ({"mems": None, "mems_mask": torch.ones(1, 3)}, "outputs, a dict, hold neither mems nor past_key_values"),
        (torch.ones(1, 3), "outputs, a Tensor, hold neither mems nor past_key_values"),
        ({"past_key_values": "cache"}, "past_key_values are of type str"),
    ],
)
def test_outputs_without_a_memory_are_refused(outputs, said, make_model, tmp_path):
    with pytest.raises(ValueError, match=said):
        txl_hf.save_memory(tmp_path / "memory", make_model(), outputs)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_cache_and_one_of_transformers_are_refused(make_model, tmp_path):
    from transformers import DynamicCache

    model = make_model()
    for cache in (txl_hf.MemoryCache(model.config), DynamicCache()):
        with pytest.raises(ValueError, match=f"a {type(cache).__name__}, are no filled MemoryCache or Static"):
            txl_hf.save_memory(tmp_path / "memory", model, {"past_key_values": cache})


def test_states_that_layers_share_are_saved(make_model, tmp_path):
    """safetensors itself refuses tensors of one storage."""
    model, states = make_model(), torch.ones(1, 4, 16)
    txl_hf.save_memory(tmp_path / "memory", model, {"mems": (states[:, :3], states[:, :3])})
    loaded = txl_hf.load_memory(tmp_path / "memory", model)["mems"]
    assert torch.equal(loaded[1], states[:, :3])
    assert model(torch.ones(1, 2, dtype=torch.long), mems=loaded, lengths=MemoryLengths(mem_len=3)).logits is not None


# --- the Hub ---------------------------------------------------------------------------------------------------------

PUSH = """
import sys, torch, txl_hf
from huggingface_hub import upload_file
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
model.push_to_hub("user/reader")
with torch.no_grad():
    txl_hf.save_memory("book.safetensors", model, model(torch.arange(9)[None]))
upload_file(path_or_fileobj="book.safetensors", path_in_repo="book.safetensors", repo_id="user/reader")
"""
PULL = """
import sys, torch, txl_hf
from huggingface_hub import hf_hub_download
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("user/reader")
memory = txl_hf.load_memory(hf_hub_download("user/reader", "book.safetensors"), model)
with torch.no_grad():
    torch.save(model(torch.arange(5)[None], **memory).logits, sys.argv[1])
"""


def test_a_memory_lies_on_the_hub_beside_its_model(make_model, tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path / "model")
    with HubServer({"hf_token": "user"}) as hub:
        for i, command in enumerate([(PUSH, tmp_path / "model"), (PULL, tmp_path / "logits")]):
            home = str(tmp_path / f"home-{i}")
            (tmp_path / str(i)).mkdir()
            environment = hub.environment("hf_token") | {"HF_HOME": home}
            process = run_script("-c", *command, cwd=tmp_path / str(i), only_torch=True, **environment)
            assert process.returncode == 0, process.stderr
    with torch.no_grad():
        mems = model(torch.arange(9)[None]).mems
        expected = model(torch.arange(5)[None], mems=mems).logits
    assert torch.equal(torch.load(tmp_path / "logits"), expected)
