"""The scripts of examples/by_feature: the command of each docstring, what it reports and writes, what is refused."""

import argparse
import csv
import gzip
import importlib
import json
import re
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from scripts import run_script
from txl_hf import TransfoXLForCausalLM, TransfoXLTokenizer, evaluate_language_model

pytest.importorskip("accelerate")
pytest.importorskip("datasets")
pytest.importorskip("peft")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "by_feature"
SCRIPTS = [
    "accelerate_loop",
    "classification",
    "document_resets",
    "genome_labels",
    "long_memory",
    "lora",
    "memory_agent",
    "memory_probe",
    "memory_tokens",
    "music_events",
    "saved_memory",
    "streaming_generation",
    "through_memory",
    "trained_memory",
    "watch_agent",
]


def test_all_scripts_are_tested():
    assert SCRIPTS == sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "common")


# --- the commands ----------------------------------------------------------------------------------------------------


def smoke(name: str, tmp_path: Path, *further: str | Path) -> str:
    """The output of the docstring's trial command."""
    commands = re.findall(
        r"^    (python .*--smoke)$", (FOLDER / f"{name}.py").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(commands) == 1
    python, *command = shlex.split(commands[0])
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = run_script(*command, *further, cwd=ROOT, TMPDIR=str(temporary))
    assert process.returncode == 0, process.stderr
    assert "Traceback" not in process.stderr
    assert list(temporary.iterdir()) == [], "what it made for the trial is gone"
    return process.stdout


def figures(pattern: str, text: str) -> list[float]:
    match = re.search(pattern, text)
    assert match, text
    return [float(group) for group in match.groups()]


def test_lora(tmp_path):
    printed = smoke("lora", tmp_path, "--output", tmp_path / "adapter")
    before, after = figures(r"([\d.]+) before, ([\d.]+) after", printed)
    assert after < before - 0.05
    assert figures(r"differ by (\S+) at most", printed)[0] <= 1e-6
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert adapter and all("lora_" in name for name in adapter), "the adapter alone"
    assert any(tensor.abs().max() > 0 for name, tensor in adapter.items() if "lora_B" in name), "trained"


@pytest.mark.slow
def test_classification(tmp_path):
    printed = smoke("classification", tmp_path, "--output", tmp_path / "classifier")
    accuracy, commonest = figures(r"accuracy ([\d.]+)%; always the commonest label: ([\d.]+)%", printed)
    assert accuracy > commonest + 10
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "classifier")
    texts = ["return self.name", "The name of the file that is read, or None."]
    with torch.no_grad():
        labels = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits.argmax(-1)
    assert [model.config.id2label[label] for label in labels.tolist()] == ["code", "prose"]


@pytest.mark.slow
def test_streaming_generation(tmp_path):
    printed = smoke("streaming_generation", tmp_path)
    assert printed.count("\n> ") == 4
    # The last token generated is the only one that nothing has read.
    length, read = figures(r"A text of (\d+) tokens; the model has read (\d+)\.", printed)
    assert read == length - 1 > 4 * 80


@pytest.mark.slow
def test_saved_memory(tmp_path):
    printed = smoke("saved_memory", tmp_path, "--memory", tmp_path / "novel.safetensors")
    assert figures(r"Read (\d+) tokens in [\d.]+ s;", printed)[0] > 10_000
    size = (tmp_path / "novel.safetensors").stat().st_size
    assert f"novel.safetensors has {size:,} bytes." in printed
    answers = re.findall(r"^> (def |class |import )$", printed, re.MULTILINE)
    assert answers == ["def ", "class ", "import "]


def test_a_memory_is_trained_and_reading_behind_none_is_the_evaluation(script, checkpoint, tmp_path, capsys):
    module, path = script("trained_memory"), tmp_path / "rows.csv"
    (tmp_path / "text").write_text("abcdefghij,\n" * 100)
    model, tokenizer = TransfoXLForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    with torch.no_grad():
        # Of a new model's size, weights would make every text as likely, whatever the memory.
        for weights in model.parameters():
            weights.mul_(8)
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "model")
    options = ["--model", str(tmp_path / "model"), "--text", str(tmp_path / "text"), "--output", str(path)]
    options += ["--states", "8", "--steps", "30", "--segment_length", "16", "--memory_length", "0", "24"]
    module.main(options)
    with path.open() as file:
        nats = {(row["memory"], int(row["memory_length"])): float(row["nats"]) for row in csv.DictReader(file)}
    assert nats["trained + read", 0] < nats["read", 0] - 0.005
    ids = tokenizer((tmp_path / "text").read_text())["input_ids"]
    for length in (0, 24):
        expected = evaluate_language_model(model, ids[len(ids) * 9 // 10 :], 16, length).nll
        assert nats["read", length] == pytest.approx(expected, abs=1e-3)


def test_prompts_are_answered_from_a_text_that_was_read_once(script, checkpoint, tmp_path, monkeypatch, capsys):
    """By another call of the script, without the text, as a model answers that reads all of it."""
    module, text = script("saved_memory"), "abcdefghij,\n" * 9
    (tmp_path / "text").write_text(text)
    options = ["--model", str(checkpoint), "--memory", str(tmp_path / "memory")]

    def run(*further: str) -> str:
        monkeypatch.setattr(sys, "argv", ["saved_memory.py", *options, *further])
        module.main()
        return capsys.readouterr().out

    assert run("--text", str(tmp_path / "text")).startswith("Read 108 tokens in")
    found = run("--prompt", "ab", "j", "--max_new_tokens", "5")
    model, tokenizer = TransfoXLForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    expected = ""
    for prompt in ("ab", "j"):
        mems = None
        ids, new = (tokenizer(each, return_tensors="pt")["input_ids"] for each in (text, prompt))
        with torch.no_grad():
            for segment in ids.split(32, dim=1):
                mems = model(segment, mems=mems).mems
        written = model.generate(new, mems=mems, max_new_tokens=5, do_sample=False)
        expected += f"> {prompt}\n{tokenizer.decode(written[0])}\n"
    assert found == expected


@pytest.mark.slow
def test_long_memory(tmp_path):
    smoke("long_memory", tmp_path, "--contenders", "recipe", "sink", "--output", tmp_path / "rows.csv")
    rows = list(csv.DictReader((tmp_path / "rows.csv").open(newline="")))
    found = {(row["reading"], int(row["memory_length"])): float(row["nll"]) for row in rows}
    assert len(found) == 18
    # Within the distances of training nothing decays.
    assert found["recipe, decay_len", 64] == found["recipe", 64] != found["sink", 64]
    assert found["recipe, decay_len", 256] != found["recipe", 256]
    draw = ["--draw", tmp_path / "rows.csv", tmp_path / "curves.png"]
    assert run_script(FOLDER / "long_memory.py", *draw, cwd=tmp_path).returncode == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_through_memory(tmp_path):
    printed = smoke("through_memory", tmp_path, "--output", tmp_path / "rows.csv")
    detached, kept = (figures(rf"k={k}, seed 1: ([\d.]+) right", printed)[0] for k in (1, 3))
    assert kept > detached + 0.3
    rows = list(csv.DictReader((tmp_path / "rows.csv").open(newline="")))
    assert [(row["segments"], float(row["accuracy"])) for row in rows] == [("1", detached), ("3", kept)]
    assert len((FOLDER / "through_memory.py").read_text().splitlines()) <= 150


@pytest.mark.slow
def test_memory_tokens(tmp_path):
    printed = smoke("memory_tokens", tmp_path, "--output", tmp_path / "rows.csv")
    [right] = figures(r"tokens, seed 1: ([\d.]+) right over 3 segments", printed)
    rows = list(csv.DictReader((tmp_path / "rows.csv").open(newline="")))
    assert [row["memory"] for row in rows] == ["tokens", "states"]
    assert right == float(rows[0]["accuracy"]) > 0.9
    assert len((FOLDER / "memory_tokens.py").read_text().splitlines()) <= 150


def test_memory_tokens_are_the_only_way_from_segment_to_segment(script):
    """The loss of the last of five segments has gradients in the first one, through its memory alone."""
    module = script("memory_tokens")
    torch.manual_seed(0)
    model = module.MemoryTokens(3)
    loss, right = module.copy(model, 6, 5)
    assert 0 <= right <= 1 and loss.item() > 1
    assert all(torch.autograd.grad(loss, vectors, retain_graph=True)[0].any() for vectors in model.parameters())
    ids = torch.randint(module.SYMBOLS, (2, 5))
    logits, memory = model(ids, None)
    assert logits.shape == (2, 5, module.SYMBOLS + 2) and memory.shape == (2, 3, 64)
    again, later = model(ids, memory)
    assert not torch.allclose(again, logits) and later.shape == memory.shape


def test_tokens_are_asked_for_again_at_their_distance(script, make_model):
    """And a step of k segments is the mean over their targets, with gradients through the memory but the last."""
    module = script("through_memory")
    segments = module.Copying(3, 7, torch.Generator().manual_seed(0)).segments(4)
    read, asked = (torch.cat(parts, dim=1) for parts in zip(*(next(segments) for _ in range(5)), strict=True))
    assert (asked[:, :7] == -100).all() and torch.equal(asked[:, 7:], read[:, :13])
    model = make_model(vocab_size=4, cutoffs=[], div_val=1, mem_len=30)
    parts = list(zip(read.split(4, dim=1), asked.split(4, dim=1), strict=True))
    loss, memory = module.step(model, iter(parts), 5, {})
    whole = model(read, shift_labels=asked).loss
    torch.testing.assert_close(loss, whole)
    weight = model.transformer.layers[0].self_attn.v_proj.weight
    found, expected = (torch.autograd.grad(each, weight)[0] for each in (loss, whole))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert not any(states.requires_grad for states in memory["mems"])


@pytest.mark.slow
def test_accelerate_loop(tmp_path):
    """It learns, and is scored; the loop is short enough to be read."""
    printed = smoke("accelerate_loop", tmp_path)
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", printed)]
    assert len(losses) == 12 and losses[-1] < losses[0]
    assert re.search(r"held-out bits per character: [\d.]+, of \d+ characters", printed)
    assert len((FOLDER / "accelerate_loop.py").read_text().splitlines()) <= 150


def test_accelerate_loop_goes_on_with_its_memory(tmp_path, script, monkeypatch, capsys):
    def losses(*options: str | Path) -> list[str]:
        try:
            script("accelerate_loop").main(["--smoke", *map(str, options)])
        finally:
            AcceleratorState._reset_state(True)
            GradientState._reset_state()
        return re.findall(r"step \d+: loss [\d.]+", capsys.readouterr().out)

    whole = losses("--output", tmp_path / "whole")
    show = Accelerator.print

    def killed(self, line):
        show(self, line)
        if line.startswith("step 9:"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Accelerator, "print", killed)
        losses("--output", tmp_path / "killed")
    capsys.readouterr()
    assert losses("--output", tmp_path / "killed", "--resume") == whole[6:] and len(whole) == 12


def test_music_events(tmp_path):
    printed = smoke("music_events", tmp_path, "--output", tmp_path / "music.pt")
    without = figures(r"\n +0 +([\d.]+) +([\d.]+) +([\d.]+)", printed)
    with_memory = figures(r"\n +32 +([\d.]+) +([\d.]+) +([\d.]+)", printed)
    assert with_memory[0] < without[0] - 0.03 and with_memory[1] < without[1] - 0.03
    saved = torch.load(tmp_path / "music.pt")
    assert saved["config"]["mem_len"] == 32 and "tables.0.weight" in saved["weights"]


@pytest.mark.slow
def test_document_resets(tmp_path):
    printed = smoke("document_resets", tmp_path, "--output", tmp_path / "model", "--row", tmp_path / "row.csv")
    alone, together, difference, _, shown = figures(
        r"([\d.]+) read alone.*\n +([\d.]+) read together; .* than (\S+)\n"
        r" +([\d.]+) read together without resets, up to (\S+) off",
        printed,
    )
    assert difference < 1e-4 and abs(together - alone) < 2e-4
    assert shown > 1e-3, "what is not reset shows"
    assert (tmp_path / "model" / "model.safetensors").is_file()
    packed, padded = figures(r"training: (\d+) packed, (\d+) padded", printed)
    assert packed > 0 and padded > 0
    [row] = csv.DictReader((tmp_path / "row.csv").open(newline=""))
    assert float(row["packed_tokens_per_second"]) == packed and row["hardware"] and row["date"]


@pytest.mark.slow
def test_genome_labels(tmp_path):
    printed = smoke("genome_labels", tmp_path, "--output", tmp_path / "labels")
    results = json.loads((tmp_path / "labels" / "results.json").read_text())
    # Each of the 9,609 bases, 32 places behind its own, is in one of the parts.
    learned, held_out = figures(r"(\d+) bases to learn from; (\d+) held out", printed)
    assert learned == round(0.8 * (9609 + 32)) - 32 and held_out == 9609 - learned == results["held_out_bases"]
    for name in ("window by window", "with memory"):
        [mean] = figures(rf"F1 {name}: none [\d.]+, \+ [\d.]+, - [\d.]+, mean ([\d.]+)", printed)
        assert mean == pytest.approx(results[name]["mean"], abs=6e-4) and mean > 0.1
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "labels" / "model")
    assert model.config.id2label == {0: "none", 1: "+", 2: "-"} and model.config.mem_len == 64


@pytest.mark.slow
def test_memory_agent(tmp_path):
    """On a task that needs no package."""
    printed = smoke("memory_agent", tmp_path, "--output", tmp_path / "whole")
    assert re.search(r"recall-transfo-xl-1: -?[01]\.\d+ on 8 held-out episodes", printed)
    folder = tmp_path / "whole" / "recall-transfo-xl-1"
    assert {"checkpoint.pt", "result.json"} <= {path.name for path in folder.iterdir()}
    assert any(path.name.startswith("events.out.tfevents") for path in folder.iterdir())


def test_memory_probe(tmp_path):
    smoke("memory_probe", tmp_path, "--output", tmp_path / "probe.csv")
    rows = list(csv.DictReader((tmp_path / "probe.csv").open(newline="")))
    assert [row["memory"] for row in rows] == ["transfo-xl", "gru", "lstm"]
    for row in rows:
        reached = row["reached"] == "True"
        assert reached == (float(row["right"]) >= 0.95) == (int(row["observations"]) < 20_000)
    assert rows[0]["reached"] == "True"


def test_a_memory_without_the_observation_that_is_asked_for_stays_at_chance(script, tmp_path):
    """The present observation counts: 5 of them reach 4 back, which 4 do not."""
    module = script("memory_probe")
    given = [str(word) for word in module.smoke(tmp_path)]
    right = [
        module.probe(module.PARSER.parse_args([*given, "--memory_length", length]), "transfo-xl", 4, 1)["right"]
        for length in ("4", "5")
    ]
    assert right[0] < 0.35 and right[1] >= 0.95


def test_an_agent_goes_on_with_the_options_that_it_was_begun_with(tmp_path, script, monkeypatch):
    smoke("memory_agent", tmp_path, "--output", tmp_path / "whole")
    options = ["--num_envs", "8", "--window", "16", "--width", "24", "--block", "2"]
    output = ["--env", "recall", "--output", tmp_path / "whole", "--resume"]
    said = refused(script, monkeypatch, "memory_agent", *output, *options)
    assert "was begun with other options: num_envs was 4 and is 8, width was 16 and is 24; keep to those" in said


# --- what they are made of -------------------------------------------------------------------------------------------


@pytest.fixture
def script(monkeypatch):
    """A script as a fresh module: `script("lora")`."""

    def load(name: str):
        monkeypatch.syspath_prepend(FOLDER)
        for module in (name, "common"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        return importlib.import_module(name)

    yield load
    AcceleratorState._reset_state(reset_partial_state=True)
    for name in (*SCRIPTS, "common"):
        sys.modules.pop(name, None)


def test_a_story_told_in_turns_is_that_told_by_hand(script, make_model, capsys):
    """Also when the text is much longer than the memory."""
    tokenizer = TransfoXLTokenizer.from_symbols([chr(ord("A") + i) for i in range(60)], mode="characters")
    model = make_model(vocab_size=60, mem_len=8, eos_token_id=None)
    story, expected, mems, unread = script("streaming_generation").Story(model, tokenizer), [], None, []
    for prompt in ("HELLO", "", "THERE", "AGAINANDAGAIN"):
        told = story.go_on(prompt, max_new_tokens=6, do_sample=False)
        assert told == capsys.readouterr().out.rstrip("\n"), "it was printed as it was generated"
        unread += tokenizer(prompt)["input_ids"] if prompt else []
        expected += unread[-len(prompt) :] if prompt else []
        for _ in range(6):
            with torch.no_grad():
                outputs = model(torch.tensor([unread]), mems=mems)
            mems, unread = outputs.mems, outputs.logits[:, -1].argmax(-1).tolist()
            expected += unread
        assert story.text[0].tolist() == expected


def test_a_story_is_read_with_its_line_ends(script, make_model):
    """Also where the model would pad by them."""
    symbols = ["<eos>", "<unk>", *"abcdefgh"]
    tokenizer = TransfoXLTokenizer.from_symbols(symbols, mode="whitespace", line_ends=True)
    model = make_model(vocab_size=10, cutoffs=[], div_val=1, mem_len=20, eos_token_id=None, pad_token_id=0)
    story = script("streaming_generation").Story(model, tokenizer)
    story.go_on("a b\nc\n\nd e f", max_new_tokens=6, do_sample=False)
    expected = tokenizer("a b\nc\n\nd e f")["input_ids"]
    for _ in range(6):
        with torch.no_grad():
            expected.append(int(model(torch.tensor([expected])).logits[0, -1].argmax()))
    assert story.text[0].tolist() == expected


@pytest.mark.parametrize("batch_size", [1, 3, 20])
def test_segments_hold_every_document_once_and_in_order(script, batch_size):
    lengths = [5, 2, 17, 8, 4, 9, 13, 2, 7]
    documents = list(torch.arange(100, 100 + sum(lengths)).split(lengths))
    seen, open_rows = {}, [-1] * batch_size
    for batch in script("document_resets").segments(documents, 4, batch_size):
        rows = zip(
            *(batch[name].tolist() for name in ("document", "starts", "input_ids", "shift_labels")), strict=True
        )
        for row, (document, starts, inputs, labels) in enumerate(rows):
            if document >= 0:
                assert starts == (document != open_rows[row]), "a row starts afresh with its document, and only then"
                length = sum(label != -100 for label in labels)
                inputs, labels = inputs[:length], labels[:length]
                assert labels == [token + 1 for token in inputs]
                seen.setdefault(document, inputs[:1]).extend(labels)
            else:
                assert set(labels) == {-100}
            open_rows[row] = document
    assert [seen[i] for i in range(len(lengths))] == [document.tolist() for document in documents]


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_documents_together_cost_what_each_costs_alone(script, make_model, make_ids, attn_implementation):
    """Of lengths that end in the middle of segments, at their ends, and after one token; longer than the memory."""
    model = make_model(attn_implementation, mem_len=7)
    documents = [make_ids(1, length, seed=length)[0] for length in (5, 2, 17, 31, 4, 9, 13, 3, 26)]
    settings = {"segment_length": 4, "same_length": True}
    alone = torch.tensor([evaluate_language_model(model, ids, **settings).bits_per_token for ids in documents])
    module = script("document_resets")
    torch.testing.assert_close(module.cost(model, documents, 4), alone, rtol=1e-5, atol=1e-5)
    assert (module.cost(model, documents, 4, resets=False) - alone).abs().max() > 0.01


def test_packing_and_padding_read_the_same_documents(script, make_model, make_ids):
    """Each token but the very first is learned from; padded, but for the first of each document."""
    module, documents = script("document_resets"), [make_ids(1, length, seed=length)[0] for length in (5, 2, 17, 9)]
    packed, padded = list(module.packed(documents, 4, 2)), list(module.segments(documents, 4, 2))
    count = lambda batches: sum(int((batch["shift_labels"] != -100).sum()) for batch in batches)  # noqa: E731
    assert count(packed) == 33 - 1 and count(padded) == 33 - 4
    assert sum(int(batch["resets"].sum()) for batch in packed) == 3
    assert set(module.compare(make_model(), documents, 4, 2, rounds=1)) == {"packed", "padded"}
    # In the padded way a document starts without memory too.
    model, memory, losses = make_model(mem_len=40), {}, torch.zeros(4)
    for batch in padded:
        with torch.no_grad():
            outputs = model(**module.with_memory_columns(batch, memory), **memory)
        memory, read = module.memory_of(outputs), batch["document"] >= 0
        losses.index_add_(0, batch["document"][read], outputs.losses.sum(1)[read])
    alone = [model(ids[None], labels=ids[None]).losses.sum().item() for ids in documents]
    torch.testing.assert_close(losses, torch.tensor(alone), rtol=1e-4, atol=1e-4)


def test_attributes_of_events_have_one_scale(script, make_config):
    module = script("music_events")
    torch.manual_seed(0)
    model = module.MusicModel(make_config(vocab_size=40, cutoffs=[], div_val=1, d_model=64, d_embed=64), [40, 30, 20])
    events = torch.stack([torch.randint(size, (4, 50)) for size in (40, 30, 20)], dim=-1)
    whole = model.embed(events)
    assert whole.shape == (4, 50, 64)
    scales = []
    for attribute in range(3):
        other = events.clone()
        other[..., attribute] = other[..., attribute].flip(0)
        scales.append((model.embed(other) - whole).std().item())
    assert max(scales) / min(scales) < 1.3


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A model of characters, without training."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = TransfoXLTokenizer.train_from_iterator(["abcdefghij,\n"], mode="characters", unk_token="<unk>")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        config = importlib.import_module("common").small_config(len(tokenizer), width=16)
        sys.modules.pop("common")
    TransfoXLForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def refused(script, monkeypatch, name: str, *arguments: str | Path) -> str:
    """The one-line error of `main()`."""
    module = script(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        module.main()
    assert isinstance(stopped.value.code, str), "sys.exit prints a string on stderr, with status 1"
    assert stopped.value.code.startswith("error: ") and "\n" not in stopped.value.code
    return stopped.value.code


SOURCES = {"lora": "--text", "classification": "--data", "music_events": "--events", "document_resets": "--documents"}
SHORT = {
    "lora": ("abc", "the text has 2 tokens, but batch_size=8 streams"),
    "classification": ("text,label\nabc,good\nabd,bad\n", "has 2 texts and 2 labels"),
    "music_events": ("60,4,3\n61,4,3\n", "the text has 2 tokens, but batch_size=16 streams"),
    "document_resets": ("a", "is too short: 1 token"),
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("content", ["missing", "empty", "short"])
def test_a_bad_source_is_refused_before_any_work(script, monkeypatch, checkpoint, tmp_path, name, content):
    path = tmp_path / "source.csv"
    if content != "missing":
        path.write_text(SHORT[name][0] if content == "short" else "")
    model = [] if name == "music_events" else ["--model", checkpoint]
    said = refused(script, monkeypatch, name, *model, SOURCES[name], path, "--output", tmp_path / "output")
    expected = {"missing": "does not exist", "empty": "", "short": SHORT[name][1]}[content]
    assert expected in said
    assert "source.csv" in said or content == "short"
    assert {path.name for path in tmp_path.iterdir()} <= {"source.csv"}, "nothing is written"


@pytest.mark.parametrize("name", SOURCES)
def test_an_output_that_exists_is_left_alone(script, monkeypatch, checkpoint, tmp_path, name):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "source.csv").touch()
    model = [] if name == "music_events" else ["--model", checkpoint]
    arguments = [*model, SOURCES[name], tmp_path / "source.csv", "--output", tmp_path / "thesis"]
    assert "thesis exists: choose another" in refused(script, monkeypatch, name, *arguments)


ROWS = [f"film {number}, {'lovely' if number % 2 else 'dull'}" for number in range(12)]


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("a.csv", ["text,label", *(f"{row},0" for row in ROWS)], "line 2 ends a row of 3, not 2 fields: what has a"),
        ("a.csv", ["label,text", *(f"{number},film,{number}" for number in range(12))], "line 2 ends a row of 3, not"),
        ("a.csv", ["text,label", "film,1", "film"], "line 3 ends a row of 1, not 2 fields$"),
        ("a.csv", ["text,label", "film,1", '"a "good" film",1'], "line 3: ',' expected after"),
        ("a.csv", ["text,label,text", "film,1,film"], "two columns are called text"),
        ("a.jsonl", ['{"text": "film", "label": 1}', "", "[1, 2]"], "line 3 is no object"),
        ("a.jsonl", ['{"text": ["film"], "label": 1}'], "line 1 is no object whose text and label"),
        ("a.jsonl", ['{"text": "film", "label": 1}', "{"], "line 2: Expecting property name"),
    ],
)
def test_a_row_that_is_not_like_the_others_is_named(script, tmp_path, name, lines, message):
    """Half of each text was left out without a word, or taken for its label, where it has a comma."""
    (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(ValueError, match=f"{name} cannot be read as .*: {message}"):
        script("classification").read(tmp_path / name)


@pytest.mark.parametrize("name", ["classification", "lora", "document_resets", "music_events", "genome_labels"])
def test_numbers_that_train_nothing_are_refused(script, capsys, name):
    """Before anything is loaded: of `--epochs -1` Trainer makes a classifier that has learned nothing."""
    parser = script(name).PARSER
    counts = [
        action.option_strings[0]
        for action in parser._actions
        if action.dest
        in ("epochs", "steps", "rank", "batch_size", "max_length", "passes", "layers", "width", "window")
    ]
    assert len(counts) >= 2
    for option in [*counts, "--learning_rate"]:
        with pytest.raises(SystemExit):
            parser.parse_args([option, "-1"])
        assert re.search(f"argument {option.replace('_', '.')}: '-1' has to be a", capsys.readouterr().err)


def test_rows_without_a_text_are_counted(script, capsys, tmp_path):
    rows = "".join(f"{'' if i % 3 == 0 else 'word'},{'ab'[i % 2]}\n" for i in range(30))
    (tmp_path / "data.csv").write_text("text,label\n" + rows)
    assert script("classification").read(tmp_path / "data.csv").num_rows == {"train": 16, "test": 4}
    assert "10 of 30 rows are left out: they have no text, or no label" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,stars\nabc,good\n", "has no column label"),
        ("text,label\n" + "abc,good\n" * 12, "has 12 texts and 1 labels"),
        ("text,label\n", "has 0 texts and 0 labels"),
        ('text,label\n"abc,good\n', "cannot be read as CSV"),
    ],
    ids=["column", "one label", "no row", "broken"],
)
def test_data_that_cannot_be_classified(script, monkeypatch, checkpoint, tmp_path, content, message):
    (tmp_path / "data.csv").write_text(content)
    arguments = ["--model", checkpoint, "--data", tmp_path / "data.csv", "--output", tmp_path / "output"]
    said = refused(script, monkeypatch, "classification", *arguments)
    assert message in said and "data.csv" in said


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_texts_and_labels_are_as_they_are_written(script, tmp_path, suffix):
    """A label may be called None or NA, or begin with a nought, and where there is none there is no text."""
    module, path = script("classification"), tmp_path / f"data{suffix}"
    rows = [{"text": text, "label": label} for label in ("None", "NA", "01") for text in ("007", "1e5", "NA", "x, y")]
    if suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, ["text", "label"])
            writer.writeheader()
            writer.writerows([*rows, {"text": "unlabelled", "label": ""}])
    else:
        lines = map(json.dumps, [*rows, {"text": "unlabelled", "label": None}])
        path.write_text("\n".join(lines), encoding="utf-8-sig")
    data = module.read(path)
    names = data["train"].features["label"].names
    found = [(row["text"], names[row["label"]]) for split in data.values() for row in split]
    assert sorted(found) == sorted((row["text"], row["label"]) for row in rows)


def test_numbers_as_labels_stay_whole_beside_a_missing_one(script, tmp_path):
    rows = [{"text": f"{i}", "label": i % 2} for i in range(12)] + [{"text": "unlabelled", "label": None}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = script("classification").read(tmp_path / "data.jsonl")
    assert data["train"].features["label"].names == ["0", "1"]


@pytest.mark.parametrize("content", ["pitch,duration,velocity\n1,2,3\n", "1,2\n3,4\n", "1,2,-3\n"])
def test_events_that_are_none(script, monkeypatch, tmp_path, content):
    (tmp_path / "events.csv").write_text(content)
    arguments = ["--events", tmp_path / "events.csv", "--output", tmp_path / "music.pt"]
    assert "events.csv" in refused(script, monkeypatch, "music_events", *arguments)


def test_a_story_needs_a_model_and_a_beginning(script, monkeypatch, checkpoint):
    assert "nowhere does not load" in refused(script, monkeypatch, "streaming_generation", "--model", "nowhere")
    arguments = ["--model", checkpoint, "--prompt", ""]
    assert "the first prompt is empty" in refused(script, monkeypatch, "streaming_generation", *arguments)


@pytest.mark.parametrize("wrong", ["-1", "nan", "inf", "warm"])
def test_what_is_no_temperature_is_refused(script, monkeypatch, capsys, wrong):
    """Below 0, and nan, wrote the likeliest tokens."""
    monkeypatch.setattr(sys, "argv", ["streaming_generation.py", "--model", "nowhere", "--temperature", wrong])
    with pytest.raises(SystemExit):
        script("streaming_generation").main()
    assert f"--temperature: '{wrong}' has to be a number, at least 0, and finite" in capsys.readouterr().err


def test_an_error_as_a_user_sees_it(checkpoint, tmp_path):
    arguments = ["--model", checkpoint, "--documents", "missing.txt", "--output", "output"]
    process = run_script(FOLDER / "document_resets.py", *arguments, cwd=tmp_path)
    assert process.returncode == 1 and process.stdout == ""
    assert process.stderr == "error: --documents missing.txt does not exist\n"
    assert list(tmp_path.iterdir()) == []


# --- labels of a genome ----------------------------------------------------------------------------------------------

PLASMID = FOLDER / "genome" / "NC_005816"


def table(*genes: str) -> str:
    """GFF3 with a row for each gene: `table("one 3 9 +")`."""
    rows = (gene.split() for gene in genes)
    return "".join(f"{name}\tX\tCDS\t{first}\t{last}\t.\t{strand}\t0\tID=x\n" for name, first, last, strand in rows)


def test_genes_of_the_plasmid_begin_and_end_with_their_codons(script):
    """Read from the strand that the labels name, between the places that they name."""
    module = script("genome_labels")
    [(name, bases)] = module.read_sequences(PLASMID.with_suffix(".fna")).items()
    labels = module.read_labels(PLASMID.with_suffix(".gff3"), {name: len(bases)})[name]
    assert name == "NC_005816.1" and len(bases) == len(labels) == 9609
    runs, lengths = torch.unique_consecutive(labels, return_counts=True)
    genes = []
    for label, end, length in zip(runs.tolist(), lengths.cumsum(0).tolist(), lengths.tolist(), strict=True):
        if label != 0:
            gene = bases[end - length : end]
            genes.append(gene if label == 1 else gene.translate(str.maketrans("ACGT", "TGCA"))[::-1])
    # Ten genes; the first two overlap, and the last two.
    assert len(genes) == 8
    assert {gene[:3] for gene in genes} <= {"ATG", "GTG", "TTG"} and {gene[-3:] for gene in genes} <= {"TAA", "TGA"}


def test_a_base_is_read_as_the_word_that_ends_with_it_and_its_place_in_a_codon(script):
    module = script("genome_labels")
    tokens = module.encode("acgtNacgta".upper(), lookahead=2)
    words, places = tokens % module.WORDS, tokens // module.WORDS
    assert places.tolist() == [0, 1, 2] * 4
    digits = lambda word: sum("ACGT".index(base) * 4**i for i, base in enumerate(word))  # noqa: E731
    none = module.WORDS - 1
    assert words.tolist() == [none] * 3 + [digits("ACGT")] + [none] * 4 + [digits("ACGT"), digits("CGTA"), none, none]
    assert module.encode("TTTT")[3] == 255 < none


def test_a_gene_of_an_unknown_strand_is_of_neither_label(script, tmp_path):
    """GFF3 has ? and . for it."""
    (tmp_path / "a.gff3").write_text(table("one 1 2 +", "one 3 4 ?", "one 6 6 .", "one 7 7 -"), encoding="utf-8")
    found = script("genome_labels").read_labels(tmp_path / "a.gff3", {"one": 8})["one"]
    assert found.tolist() == [1, 1, -100, -100, 0, -100, 2, 0]


def test_a_genome_that_is_cut_off_is_named(script, tmp_path):
    path = tmp_path / "cut.fna.gz"
    path.write_bytes(gzip.compress(b">one\n" + b"ACGT" * 1000)[:-20])
    with pytest.raises(ValueError, match="cut.fna.gz cannot be read"):
        script("genome_labels").read_sequences(path)


def test_every_base_is_labelled_once_later_and_forgotten_where_a_sequence_begins(script, tmp_path):
    module = script("genome_labels")
    with gzip.open(tmp_path / "two.fna.gz", "wt") as file:
        file.write(">one a note\nACGTA\nCGT\n\n>two\nGGGCC\n")
    # Of both strands; around the end of a circle; a row that is no gene; and bases behind the table.
    rows = table("one 2 4 +", "one 4 5 -", "two 5 6 -") + "two\tX\tregion\t1\t5\t.\t?\t.\tID=é\n##FASTA\n>one\nACGT\n"
    (tmp_path / "two.gff3").write_text("##gff-version 3\n" + rows, encoding="utf-8")
    genome = module.read_genome(tmp_path / "two.fna.gz", tmp_path / "two.gff3", lookahead=3)
    assert genome.labels.tolist() == [-100] * 3 + [0, 1, 1, -100, 2, 0, 0, 0] + [-100] * 3 + [2, 0, 0, 0, 2]
    assert genome.begins.nonzero().flatten().tolist() == [0, 11] and len(genome.tokens) == 19
    assert torch.equal(genome.tokens[:11], module.encode("ACGTACGT", 3))
    batches = list(module.windows(genome, 4, 2))
    assert [batch["input_ids"].shape for batch in batches] == [(2, 4), (2, 4), (2, 1)]
    assert torch.equal(torch.cat([batch["input_ids"] for batch in batches], 1).flatten(), genome.tokens[:18])
    assert torch.equal(torch.cat([batch["resets"] for batch in batches], 1).flatten(), genome.begins[:18])


def test_labels_of_a_pass_with_memory_are_those_of_the_whole(script):
    module = script("genome_labels")
    options = argparse.Namespace(seed=1, width=16, window=16, lookahead=5)
    model = module.make_model(options, memory=400)
    torch.nn.init.normal_(model.score.weight, std=3.0)
    whole = module.read_genome(PLASMID.with_suffix(".fna"), PLASMID.with_suffix(".gff3"), 5).part(4500, 4850)
    found = module.confusion(model, whole, options)
    with torch.no_grad():
        given = model(whole.tokens[None]).logits[0].argmax(-1)
    expected = torch.tensor([[int(((whole.labels == a) & (given == b)).sum()) for b in range(3)] for a in range(3)])
    assert torch.equal(found, expected) and found.sum() == 350 and (found > 0).sum() >= 4
    scores = module.f1_of(torch.tensor([[8, 2, 0], [4, 6, 0], [0, 0, 0]]))
    assert scores == pytest.approx({"none": 16 / 22, "+": 12 / 18, "-": 0, "mean": (16 / 22 + 12 / 18) / 3})


@pytest.mark.parametrize("memory", [0, 16])
def test_no_base_is_labelled_that_was_not_read(script, memory):
    """Without memory a quarter of the labels were of bases before their window."""
    module = script("genome_labels")
    options = argparse.Namespace(seed=1, width=16, window=8, lookahead=5)
    reread = module.reread_by(module.make_model(options, memory), options)
    places = torch.arange(40)
    genome = module.Genome(places, torch.where(places < 5, -100, places - 5), places < 0)
    asked = []
    for batch in module.windows(genome, 8, 1, reread):
        labels = batch["labels"][batch["labels"] != -100]
        assert memory or torch.isin(labels, batch["input_ids"]).all()
        asked += labels.tolist()
    assert asked == list(range(35)), "each once"


GENOMES = {
    "no name": ("ACGT\n", table("one 1 3 +"), r"fna:1: 'ACGT' is neither a name"),
    "no bases": (">one\n\n", table("one 1 3 +"), "fna holds no bases"),
    "numbers": (">one\nAC3T\n", table("one 1 3 +"), "fna:2: 'AC3T' is neither"),
    "twice": (">one\nACGT\n>one\nACGT\n", table("one 1 3 +"), "fna:3: a sequence needs a name of its own, not 'one'"),
    "another genome": (">one\nACGT\n", table("two 1 3 +"), "gff3:1 is of two, but the sequences are one"),
    "behind the end": (">one\nACGT\n", table("one 5 6 +"), "gff3:1: 5 to 6 does not lie in 4 bases"),
    "longer than all": (">one\nACGT\n", table("one 2 6 +"), "gff3:1: 2 to 6 does not lie in 4 bases"),
    "backwards": (">one\nACGT\n", table("one 3 2 +"), "gff3:1: 3 to 2 does not lie"),
    "no strand": (">one\nACGT\n", table("one 1 2 x"), "gff3:1 is no row of GFF3"),
    "spaces": (">one\nACGT\n", "one X CDS 1 2 . + 0 ID=x\n", "gff3:1 is no row of GFF3"),
    "no genes": (">one\nACGT\n", "##gff-version 3\n", "gff3 holds no row of type CDS"),
    "short": (">one\nACGT\n", table("one 1 3 +"), "has 29 places to learn from, but --batch_size 32"),
}


@pytest.mark.parametrize(("fasta", "genes", "message"), GENOMES.values(), ids=GENOMES)
def test_genomes_that_cannot_be_read(script, monkeypatch, tmp_path, fasta, genes, message):
    (tmp_path / "x.fna").write_text(fasta)
    (tmp_path / "x.gff3").write_text(genes)
    files = ["--fasta", tmp_path / "x.fna", "--genes", tmp_path / "x.gff3"]
    said = refused(script, monkeypatch, "genome_labels", *files, "--output", tmp_path / "labels")
    assert re.search(message, said) and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--held_out", "0.00001"), "no base to label: hold out more"),
        (("--lookahead", "5000", "--window", "64"), "--lookahead 5000 leaves no base to learn from"),
        (("--width", "2"), "d_head=0 must be at least 1"),
    ],
)
def test_what_labels_nothing_or_no_model_has_labels_no_genome(script, monkeypatch, tmp_path, option, message):
    (tmp_path / "x.fna").write_text(">one\n" + "ACGT" * 300 + "\n")
    (tmp_path / "x.gff3").write_text(table("one 1 90 +"))
    files = ["--fasta", tmp_path / "x.fna", "--genes", tmp_path / "x.gff3", "--batch_size", 2, "--lookahead", 0]
    said = refused(script, monkeypatch, "genome_labels", *files, "--output", tmp_path / "labels", *option)
    assert re.search(message, said) and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("option", ["--lookahead", "--memory", "--seed"])
def test_numbers_below_zero_label_no_genome(script, option, tmp_path, capsys):
    (tmp_path / "x").touch()
    files = ["--fasta", str(tmp_path / "x"), "--genes", str(tmp_path / "x"), "--output", str(tmp_path / "labels")]
    with pytest.raises(SystemExit):
        script("genome_labels").PARSER.parse_args([*files, option, "-2"])
    assert f"{option}: '-2' has to be a whole number, at least 0" in capsys.readouterr().err


# --- the agent with a memory -----------------------------------------------------------------------------------------


def agent_options(module, folder: Path, *further: str):
    sizes = ["--num_envs", "4", "--window", "10", "--width", "16", "--steps", "240", "--block", "2", "--episodes", "4"]
    return module.PARSER.parse_args(["--env", "recall", "--output", str(folder), *sizes, *further])


@pytest.mark.parametrize("memory", ["transfo-xl", "gru", "lstm", "none"])
def test_an_agent_learns_from_windows_what_it_did_step_by_step(script, tmp_path, memory):
    module = script("memory_agent")
    run = module.Run(agent_options(module, tmp_path, "--memory", memory))
    run.begin_block()
    begun = []
    for _ in range(4):
        rollout, _ = run.play()
        assert rollout.observations.shape == (4, 10, 4)
        assert run.learn(rollout)["first_ratio"] < 1e-5
        begun += rollout.resets[0].nonzero()[:, 0].tolist()
    assert begun == [0, 0], "two episodes of 20 steps, in four windows of 10"
    wanted = module.count(module.Run(agent_options(module, tmp_path / "other")).agent)
    assert abs(module.count(run.agent) - wanted) < 0.05 * wanted


def train_until_saved(run):
    """As Ctrl-C ends it, behind its first checkpoint."""
    save = run.save

    def save_and_stop():
        save()
        raise KeyboardInterrupt

    run.save = save_and_stop
    with pytest.raises(KeyboardInterrupt):
        run.train()


def test_an_agent_goes_on_as_if_it_had_not_been_stopped(script, tmp_path, capsys):
    module = script("memory_agent")
    module.Run(agent_options(module, tmp_path / "whole")).train()
    stopped = module.Run(agent_options(module, tmp_path / "stopped"))
    train_until_saved(stopped)
    assert stopped.update == 2
    with pytest.raises(ValueError, match="holds no finished run"):
        module.tabulate(tmp_path / "stopped")
    said = capsys.readouterr().out
    assert re.search(r"^recall-transfo-xl-1 goes on with --resume: 2 updates, return -?[01]\.\d+$", said, re.MULTILINE)
    module.Run(agent_options(module, tmp_path / "stopped", "--resume")).train()
    names = ("curve", "held_out")
    whole, resumed = (
        json.loads((tmp_path / name / "recall-transfo-xl-1" / "result.json").read_text())
        for name in ("whole", "stopped")
    )
    assert [whole[name] for name in names] == [resumed[name] for name in names] and len(whole["curve"]) == 3
    with pytest.raises(ValueError, match="recall-transfo-xl-1 exists: go on with --resume"):
        module.Run(agent_options(module, tmp_path / "whole"))
    module.tabulate(tmp_path / "whole")
    assert "recall  transfo-xl" in capsys.readouterr().out
    [row] = csv.DictReader((tmp_path / "whole" / "agents.csv").open(newline=""))
    assert row["memory"] == "transfo-xl" and row["gamma"] == "0.99"
    returns = list(csv.DictReader((tmp_path / "whole" / "curves.csv").open(newline="")))
    assert [(int(each["steps"]), float(each["return"])) for each in returns] == [
        (steps, pytest.approx(reached, abs=1e-4)) for steps, reached in whole["curve"]
    ]
    assert (tmp_path / "whole" / "agents.png").stat().st_size > 5000


def test_an_agent_that_was_finished_within_a_block_learns_further(script, tmp_path):
    module = script("memory_agent")
    module.Run(agent_options(module, tmp_path, "--steps", "120")).train()
    run = module.Run(agent_options(module, tmp_path, "--steps", "200", "--resume"))
    assert run.update == 3 and run.options.block == 2
    result = run.folder / "result.json"
    assert result.exists()
    train_until_saved(run)
    assert not result.exists(), "it is not done any more"
    run = module.Run(agent_options(module, tmp_path, "--steps", "200", "--resume"))
    run.train()
    result = json.loads((run.folder / "result.json").read_text())
    assert run.update == 5 and result["steps"] == 200
    # A run in which no episode has ended.
    (run.folder / "result.json").write_text(json.dumps(result | {"curve": []}))
    module.tabulate(run.folder.parent)
    assert (run.folder.parent / "agents.png").exists()


def test_an_agent_is_saved_with_its_card_and_plays_on(script, tmp_path):
    """One held-out episode, whose return is that of the run."""
    run = script("memory_agent").Run(agent_options(script("memory_agent"), tmp_path, "--episodes", "1"))
    run.train()
    result, folder = json.loads((run.folder / "result.json").read_text()), run.folder / "agent"
    loaded = AutoModelForTokenClassification.from_pretrained(folder)
    assert AutoModel.from_pretrained(folder).config.num_labels == 4
    observations, resets = torch.eye(4)[[0, 2, 1, 3, 3]][None], torch.zeros(1, 5, dtype=torch.bool)
    with torch.no_grad():
        logits = loaded(inputs_embeds=observations).logits.log_softmax(-1)
        torch.testing.assert_close(logits, run.agent(observations, resets, {})[0].logits, atol=1e-5, rtol=1e-5)
    module = script("watch_agent")
    attended, returned = module.watch(loaded, module.Environments("recall", 1))
    assert returned == pytest.approx(result["held_out"], abs=1e-6)
    torch.testing.assert_close(attended.sum(-1), torch.ones(20))
    assert attended[0, 0] == 1 and (attended[1, :2] > 0).all() and not attended[1, 2:].any(), "the present one first"
    [measured] = ModelCard.load(folder / "README.md").data.eval_results
    assert (measured.dataset_name, measured.metric_value) == ("recall", round(result["held_out"], 4))


@pytest.mark.parametrize("task", ["repeat_previous_medium", "repeat_previous_hard"])
def test_the_committed_agents_do_what_their_cards_say(task, tmp_path):
    """In another process, which draws what one of them attends to."""
    pytest.importorskip("popgym")
    folder = ROOT / "examples" / "results" / "agents" / task
    [measured] = ModelCard.load(folder / "README.md").data.eval_results
    watch = [FOLDER / "watch_agent.py", "--agent", folder, "--env", task, "--output", tmp_path / "seen.png"]
    process = run_script(*watch, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert figures(r"return ([\d.]+)", process.stdout) == [pytest.approx(measured.metric_value, abs=0.02)]
    assert (tmp_path / "seen.png").stat().st_size > 5000


def test_fewer_steps_than_an_agent_has_done_are_refused(script, tmp_path):
    module = script("memory_agent")
    module.Run(agent_options(module, tmp_path, "--steps", "120")).train()
    with pytest.raises(ValueError, match="--steps 40 are fewer than the 120 that .*recall-transfo-xl-1 has done"):
        module.Run(agent_options(module, tmp_path, "--steps", "40", "--resume"))


def test_agents_of_other_settings_are_no_seeds_of_one(script, tmp_path):
    module = script("memory_agent")
    module.Run(agent_options(module, tmp_path, "--seed", "1")).train()
    module.Run(agent_options(module, tmp_path, "--seed", "2", "--gamma", "0.9")).train()
    with pytest.raises(ValueError, match="recall-transfo-xl with gamma 0.99 and 0.9, which are no seeds of one agent"):
        module.tabulate(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--minibatches", "0"], "argument --minibatches: '0' has to be a whole number, at least 1"),
        (["--episodes", "none"], "argument --episodes: 'none' has to be a whole number"),
        (["--window", "1", "--num_envs", "4"], "--window 1 leaves a minibatch one observation"),
        (["--gamma", "1.5"], "--gamma 1.5 must lie between 0 and 1"),
        (["--gamma", "nan"], "--gamma nan must lie between 0 and 1"),
        (["--gae_lambda", "-0.5"], "--gae_lambda -0.5 must lie between 0 and 1"),
        (["--gae_lambda", "1.01"], "--gae_lambda 1.01 must lie between 0 and 1"),
        (["--clip", "0"], "argument --clip: '0' has to be a number above 0, and finite"),
        (["--clip", "nan"], "argument --clip: 'nan' has to be a number above 0, and finite"),
        (["--entropy", "-0.1"], "--entropy -0.1 must be at least 0, and finite"),
        (["--entropy", "inf"], "--entropy inf must be at least 0, and finite"),
    ],
)
def test_numbers_of_an_agent_are_checked(script, capsys, tmp_path, options, message):
    module = script("memory_agent")
    given = ["--env", "recall", "--output", str(tmp_path / "agents"), *options]
    try:
        module.check(module.PARSER.parse_args(given))
    except (ValueError, SystemExit) as error:
        assert message in f"{error} {capsys.readouterr().err}"
    else:
        pytest.fail("nothing was refused")


def test_an_agent_may_do_without_discount_and_entropy(script, tmp_path):
    module = script("memory_agent")
    for share in ("0", "1"):
        options = ["--gamma", share, "--gae_lambda", share, "--entropy", "0"]
        module.check(module.PARSER.parse_args(["--env", "recall", "--output", str(tmp_path / "agents"), *options]))


def test_what_is_added_to_a_checkpoint_has_a_seed(script, monkeypatch, checkpoint, tmp_path):
    """The classifier and the adapter, whose weights Trainer does not draw."""
    data = tmp_path / "data.CSV"
    data.write_text("text,label\n" + "".join(f"word {i},{i % 2}\n" for i in range(20)) + "   ,0\n")
    drawn = []

    class Drawn(Exception):
        pass

    def keep(model, *arguments, **options):
        drawn.append({name: weights.clone() for name, weights in model.named_parameters()})
        raise Drawn

    for name, trainer, options in (
        ("classification", "Trainer", ["--data", data]),
        ("lora", "TransfoXLTrainer", ["--text", data, "--segment_length", "4", "--batch_size", "1"]),
    ):
        for attempt in ("one", "two"):
            module = script(name)
            torch.manual_seed(len(drawn))
            monkeypatch.setattr(module, trainer, keep)
            given = [name, "--model", checkpoint, *options, "--output", tmp_path / attempt]
            monkeypatch.setattr(sys, "argv", [str(word) for word in given])
            with pytest.raises(Drawn):
                module.main()
        one, two = drawn[-2:]
        assert all(torch.equal(weights, two[name]) for name, weights in one.items()), name
    assert len(script("classification").read(data)["train"]) == 16, "a text of spaces alone is none"


@pytest.mark.parametrize(
    ("task", "package", "message"),
    [
        ("repeat_previous", "popgym.envs.repeat_previous", "is POPGym's: pip install popgym"),
        ("MiniGrid-MemoryS7-v0", "minigrid.wrappers", "is MiniGrid's: pip install minigrid"),
    ],
)
def test_tasks_that_are_not_installed_are_named(script, tmp_path, monkeypatch, task, package, message):
    parts = package.split(".")
    for count in range(len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[: count + 1]), None)
    said = refused(script, monkeypatch, "memory_agent", "--env", task, "--output", tmp_path / "agents")
    assert f"--env {task} {message}" in said and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("task", "features", "actions"),
    [
        ("repeat_previous", 4, 4),
        ("repeat_previous_medium", 4, 4),
        ("repeat_previous_hard", 4, 4),
        ("count_recall", 4, 27),
        ("autoencode", 6, 4),
        ("position_cartpole", 2, 2),
    ],
)
def test_tasks_of_popgym(script, task, features, actions):
    pytest.importorskip("popgym")
    environments = script("memory_agent").Environments(task, 3)
    assert (environments.features, environments.actions) == (features, actions)
    first = environments.reset([(7, i) for i in range(3)])
    assert first.shape == (3, features) and torch.equal(first, environments.reset([(7, i) for i in range(3)]))
    begun = []
    for step in range(160):
        observations, rewards, begins, ended = environments.step(torch.full((3,), step % actions))
        assert observations.shape == (3, features) and rewards.abs().max() <= 1
        assert [each is not None for each in ended] == begins.tolist()
        begun.append(begins)
    assert torch.stack(begun).any(0).all()


def name_card(seen: list[torch.Tensor], length: int) -> int:
    """The card that was shown `length` - 1 observations before."""
    return int(seen[-length].argmax()) if len(seen) >= length else 0


def count_cards(seen: list[torch.Tensor]) -> int:
    """How often the colour that is asked for has been dealt, the card on top included."""
    return sum(int(each[:2].argmax() == seen[-1][2:].argmax()) for each in seen)


def say_backwards(seen: list[torch.Tensor]) -> int:
    """Of the 52 cards that were shown, the last first."""
    said = len(seen) - 52
    return int(seen[51 - said][2:].argmax()) if said >= 0 else 0


@pytest.mark.parametrize(
    ("task", "answer", "remembered"),
    [
        ("repeat_previous", partial(name_card, length=4), 4),
        ("repeat_previous_medium", partial(name_card, length=32), 32),
        ("repeat_previous_hard", partial(name_card, length=64), 64),
        ("count_recall", count_cards, 51),
        ("autoencode", say_backwards, 103),
    ],
)
def test_a_perfect_memory_has_the_return_1_and_one_observation_less_has_not(script, task, answer, remembered):
    """The tasks are as the script's docstring has them."""
    pytest.importorskip("popgym")
    environments = script("memory_agent").Environments(task, 8)
    for length in (remembered, remembered - 1):
        seen = [[each] for each in environments.reset([(7, i) for i in range(8)])]
        ended = [None]
        while ended[0] is None:
            observations, _, _, ended = environments.step(torch.tensor([answer(each[-length:]) for each in seen]))
            for each, observation in zip(seen, observations, strict=True):
                each.append(observation)
        assert (min(ended) > 1 - 1e-6) == (length == remembered)
