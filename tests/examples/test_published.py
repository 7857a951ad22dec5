"""The way of a published checkpoint, on a server of one's own: broken connections, damaged files, and the figure."""

import json
import pickle
import shutil
import sys
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import published
from goldens import golden
from txl_hf import evaluate_language_model

WORDS = ["<eos>", "<unk>", *(f"w{i}" for i in range(118))]


class Server(ThreadingHTTPServer):
    """Serves a folder, with ranges. `breaks`: how many connections end after 1,000 bytes; `requests`: of them; `tags`:
    whether a file has one for its version, or its date alone."""

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.breaks, self.requests, self.status = folder, 0, [], None
        self.ranges, self.tags = True, True
        self.address = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        server, path = self.server, self.server.folder / self.path.lstrip("/")
        given = self.headers.get("Range")
        server.requests.append((self.path, given))
        if server.status or not path.is_file():
            return self.send_error(server.status or 404)
        data = path.read_bytes()
        name = "ETag" if server.tags else "Last-Modified"
        tag = f'"{hash(data)}"' if server.tags else f"Fri, 27 Nov 2026 10:00:{hash(data) % 60:02d} GMT"
        start = int(given.removeprefix("bytes=").rstrip("-")) if given and server.ranges else 0
        if self.headers.get("If-Range", tag) != tag:
            start = 0
        if start >= len(data) > 0:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(data)}")
            self.end_headers()
            return None
        self.send_response(206 if start else 200)
        self.send_header(name, tag)
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if server.breaks and len(data) - start > 1000:
            server.breaks -= 1
            data = data[: start + 1000]
        self.wfile.write(data[start:])
        return None


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The golden of WikiText-103's kind as the authors' server has the real one, and the text to evaluate it with."""
    monkeypatch.setattr(published, "PAUSE", 0.0)
    release = tmp_path / "served" / "tf_wt103"
    source = golden("kimiyoung_tf/tf_wt103_like")
    (release / "data").mkdir(parents=True)
    (release / "model").mkdir()
    for path in source.iterdir():
        if path.name == "checkpoint" or path.name.startswith("model.ckpt"):
            shutil.copyfile(path, release / "model" / path.name)
    shutil.copyfile(source / "corpus-info.json", release / "data" / "corpus-info.json")
    (release / "data" / "cache.pkl").write_bytes(pickled_corpus(monkeypatch))
    (tmp_path / "test.tokens").write_text("w1 w2 w3 w5 w8 w13 w21 w34\n" * 12)
    with Server(tmp_path / "served") as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def pickled_corpus(monkeypatch) -> bytes:
    """cache.pkl as the original's data_utils.py writes it, of which the vocabulary counts."""
    module = types.ModuleType("data_utils")
    for name in ("Corpus", "Vocab"):
        setattr(module, name, type(name, (), {"__module__": "data_utils"}))
    monkeypatch.setitem(sys.modules, "data_utils", module)
    corpus = module.Corpus()
    corpus.vocab, corpus.dataset = module.Vocab(), "wt103"
    vars(corpus.vocab).update(
        idx2sym=WORDS, sym2idx={word: i for i, word in enumerate(WORDS)}, special=["<eos>"], lower_case=False
    )
    return pickle.dumps(corpus, protocol=2)


def main(server: Server, tmp_path: Path, *options: str | Path):
    published.main(
        ["wt103", "--output", str(tmp_path / "checkpoints"), "--server", server.address, *map(str, options)]
    )


@pytest.mark.parametrize("vocabulary", ["vocab.pkl", "vocab.bin"])
def test_the_copy_of_the_hub_has_its_vocabulary_under_either_name(server, tmp_path, capsys, vocabulary):
    source = golden("hf_legacy/wt103_like")
    for name in ("config.json", "pytorch_model.bin"):
        shutil.copyfile(source / name, server.folder / name)
    words = [*WORDS[:98], "<formula>"]
    symbols = {"idx2sym": words, "sym2idx": {word: i for i, word in enumerate(words)}}
    (server.folder / vocabulary).write_bytes(pickle.dumps(symbols, protocol=2))
    arguments = ["--output", str(tmp_path / "checkpoints"), "--server", server.address]
    published.main(["transfo-xl-wt103", *arguments, "--data", str(tmp_path / "test.tokens")])
    folder = tmp_path / "checkpoints" / "transfo-xl-wt103"
    names = {"config.json", "pytorch_model.bin", vocabulary}
    assert {path.name for path in (folder / "download").iterdir()} == {*names, "SHA256SUMS"}
    assert set(published.read_sums(folder / "download" / "SHA256SUMS")) == names
    assert "transfo-xl-wt103: perplexity" in capsys.readouterr().out
    asked = len(server.requests)
    published.main(["transfo-xl-wt103", *arguments])
    assert len(server.requests) == asked, "what is there is not asked for again"


def test_a_checkpoint_is_fetched_converted_and_evaluated_over_broken_connections(server, tmp_path, capsys):
    server.breaks = 3
    main(server, tmp_path, "--data", tmp_path / "test.tokens")
    folder = tmp_path / "checkpoints" / "wt103"
    for path in (server.folder / "tf_wt103").rglob("*.*"):
        assert (folder / "download" / path.relative_to(server.folder / "tf_wt103")).read_bytes() == path.read_bytes()
    # Each broken connection went on from where it was.
    assert len([given for _, given in server.requests if given]) == 3
    said = capsys.readouterr().out
    assert "wt103: perplexity" in said and "published 18.3 (paper, Table 1)" in said
    [row] = json.loads((folder / "result.json").read_text())["results"]
    assert (row["segment_length"], row["memory_length"], row["clamp_len"]) == (128, 1600, 1000)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    ids = [*(WORDS.index(f"w{i}") for i in (1, 2, 3, 5, 8, 13, 21, 34)), 0] * 12
    assert row["nll"] == pytest.approx(evaluate_language_model(model, ids, 128, 1600).nll, rel=1e-5)
    # What is there is not made again.
    server.requests.clear()
    main(server, tmp_path, "--data", tmp_path / "test.tokens")
    assert server.requests == []


def test_a_result_of_other_options_is_not_printed_as_todays(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(published, "download", lambda *_: None)
    monkeypatch.setattr(published, "convert", lambda *_: None)
    asked = []
    row = {"perplexity": 20.0, "tokens": 9, "segment_length": 1, "memory_length": 2, "clamp_len": 3, "same_length": 1}

    def evaluate(command):
        asked.append(command)
        result.write_text(json.dumps({"results": [row], "data": "test.tokens"}))

    monkeypatch.setattr("txl_hf.commands.evaluate_lm.main", evaluate)
    result = tmp_path / "checkpoints" / "wt103" / "result.json"
    result.parent.mkdir(parents=True)
    # One of which nobody knows what it was evaluated with is made again.
    result.write_text("{}")
    text = tmp_path / "test.tokens"
    for _ in range(2):
        main(server, tmp_path, "--data", text)
        assert "wt103: perplexity 20.0000" in capsys.readouterr().out and len(asked) == 1
    for changed, said in (
        (["--data", tmp_path / "other.tokens"], "data was .*test.tokens and is .*other.tokens"),
        (["--data", text, "--batch_size", "4"], "batch_size was 1 and is 4"),
        (["--data", text, "--max_tokens", "50"], "max_tokens was None and is 50"),
    ):
        with pytest.raises(SystemExit, match=f"^error: .*result.json is of other options: {said}; delete it"):
            main(server, tmp_path, *changed)
    result.unlink()
    main(server, tmp_path, "--data", text, "--batch_size", "4")
    assert len(asked) == 2


def test_a_file_that_is_not_what_was_recorded_is_refused(server, tmp_path, monkeypatch):
    monkeypatch.setattr(published, "convert", lambda *_: None)
    main(server, tmp_path)
    folder = tmp_path / "checkpoints" / "wt103" / "download"
    damaged = folder / "model" / "model.ckpt-0.data-00000-of-00001"
    recorded = (folder / "SHA256SUMS").read_text()
    data = bytearray(damaged.read_bytes())
    data[500] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(SystemExit, match=r"model.ckpt-0.data-00000-of-00001 has the SHA-256 .* is recorded in"):
        main(server, tmp_path)
    damaged.unlink()
    (server.folder / "tf_wt103" / "model" / damaged.name).write_bytes(data)
    with pytest.raises(SystemExit, match="Remove it to fetch it again"):
        main(server, tmp_path)
    assert (folder / "SHA256SUMS").read_text() == recorded


def test_damage_on_the_first_way_is_found_by_the_converter(server, tmp_path, capsys):
    path = server.folder / "tf_wt103" / "model" / "model.ckpt-0.data-00000-of-00001"
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)
    with pytest.raises(SystemExit):
        main(server, tmp_path)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("txl-convert: ") and "checksum" in error.lower()
    assert not (tmp_path / "checkpoints" / "wt103" / "model").exists()


def test_a_part_of_another_version_is_not_continued(server, tmp_path):
    """The part stays as it was cut off; the server's file changes; what arrives is the new one, whole."""
    path, part = server.folder / "big", tmp_path / "big.part"
    path.write_bytes(b"a" * 5000)
    server.breaks = 1
    assert published.receive(f"{server.address}/big", part) is False and part.stat().st_size == 1000
    path.write_bytes(b"b" * 4000)
    published.fetch(f"{server.address}/big", part)
    assert part.read_bytes() == b"b" * 4000


@pytest.mark.parametrize(
    ("lacking", "asked"),
    [("tags", [None, "bytes=1000-", "bytes=2000-"]), ("ranges", [None, "bytes=1000-"])],
    ids=["a date", "all of it again"],
)
def test_a_server_that_names_no_version_has_a_date_and_one_without_ranges_sends_all_again(
    server, tmp_path, lacking, asked
):
    path, part = server.folder / "big", tmp_path / "big.part"
    path.write_bytes(bytes(range(250)) * 20)
    server.breaks = len(asked) - 1
    setattr(server, lacking, False)
    published.fetch(f"{server.address}/big", part)
    assert part.read_bytes() == path.read_bytes()
    assert [given for _, given in server.requests] == asked


def test_a_part_that_is_whole_already_is_taken(server, tmp_path):
    """Killed between the last byte and the rename."""
    path, part = server.folder / "big", tmp_path / "big.part"
    path.write_bytes(b"a" * 5000)
    published.fetch(f"{server.address}/big", part)
    part.with_name("big.part.etag").write_text(f'"{hash(path.read_bytes())}"')
    published.fetch(f"{server.address}/big", part)
    assert part.read_bytes() == path.read_bytes() and not part.with_name("big.part.etag").exists()


def test_what_the_server_refuses_is_one_line(server, tmp_path):
    (server.folder / "tf_wt103" / "data" / "cache.pkl").unlink()
    with pytest.raises(SystemExit, match="^error: http.*cache.pkl cannot be fetched: the server says 404 Not Found$"):
        main(server, tmp_path)
    server.status, server.requests = 503, []
    with pytest.raises(SystemExit, match="503.*; the same command goes on from byte 0$"):
        main(server, tmp_path)
    assert len(server.requests) == published.ATTEMPTS


# What legacy transformers' own slow test asks of the published model: from this prompt, greedily, up to 200 tokens.
PROMPT = """33 1297 2 1 1009 4 1109 11739 4762 358 5 25 245 22 1706 17 20098 5 3215 21 37 1110 3 13 1041 4 24 603 490 2
71477 20098 104447 2 20961 1 2604 4 1 329 3 6224 831 16002 2 8 603 78967 29546 23 803 20 25 416 5 8 232 4 277 6 1855
4601 3 29546 54 8 3609 5 57211 49 4 1 277 18 8 1755 15691 3 341 25 416 693 42573 71 17 401 94 31 17919 2 29546 7873 18
1 435 23 11011 755 5 5167 3 7983 98 84 2 29546 3267 8 3609 4 1 4865 1075 2 6087 71 6 346 8 5854 3 29546 824 1400 1868
2 19 160 2 311 8 5496 2 20920 17 25 15097 3 24 24 0"""
CONTINUATION = """33 1 142 1298 188 2 29546 113 8 3654 4 1 1109 7136 833 3 13 1645 4 29546 11 104 7 1 1109 532 7129 2
10 83507 2 1162 1123 2 6 7245 10 2 5 11 104 7 1 1109 532 7129 2 10 24 24 10 22 10 13 770 5863 4 7245 10"""


@pytest.mark.network
def test_the_published_model_generates_what_legacy_transformers_recorded(tmp_path):
    """A gigabyte from the Hub; for whoever has a network: `pytest -m network`."""
    published.main(["transfo-xl-wt103", "--output", str(tmp_path)])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "transfo-xl-wt103" / "model").eval()
    prompt = torch.tensor([[int(i) for i in PROMPT.split()]])
    output = model.generate(prompt, max_length=200, do_sample=False)
    assert output[0, prompt.shape[1] :].tolist() == [int(i) for i in CONTINUATION.split()]
