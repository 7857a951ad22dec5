"""The page of examples/browser in headless Chromium: it writes what torch writes, from an exported model."""

import functools
import html
import re
import shutil
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlencode

import torch

from models import small_model
from txl_hf import TransfoXLTokenizer, commands

BROWSER = Path(__file__).parents[2] / "examples" / "browser"
PROMPT = "A prompt that is longer than a segment, in 2 Cases"
ASKED = {"prompt": PROMPT, "tokens": 15, "temperature": 0}


class Quiet(SimpleHTTPRequestHandler):
    extensions_map = SimpleHTTPRequestHandler.extensions_map | {".mjs": "text/javascript", ".wasm": "application/wasm"}

    def log_message(self, *_):
        pass


def test_the_page_writes_what_torch_writes(tmp_path):
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokenizer = TransfoXLTokenizer.from_symbols(
        ["<unk>", *letters, " "], mode="characters", unk_token="<unk>", lower_case=True
    )
    sizes = {"cutoffs": [], "div_val": 1, "mem_len": 20, "tgt_len": 10, "eos_token_id": None}
    model = small_model(vocab_size=len(tokenizer), **sizes).eval()
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    shutil.copytree(BROWSER, tmp_path / "page", ignore=shutil.ignore_patterns("node_modules", "model"))
    subprocess.run(["npm", "install", "--silent", "--no-audit"], cwd=tmp_path / "page", check=True)
    commands.export(["--model", str(tmp_path / "saved"), "--output", str(tmp_path / "page" / "model")])

    tokens, mems = tokenizer(PROMPT)["input_ids"], None
    for part in torch.tensor([tokens]).split(10, dim=1):
        outputs = model(part, mems=mems)
        mems = outputs.mems
    for _ in range(15):
        # What is no character is no text.
        outputs.logits[..., tokenizer.unk_token_id] = -torch.inf
        tokens.append(int(outputs.logits[0, -1].argmax()))
        outputs = model(torch.tensor([tokens[-1:]]), mems=mems)
        mems = outputs.mems

    server = ThreadingHTTPServer(("localhost", 0), functools.partial(Quiet, directory=str(tmp_path / "page")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://localhost:{server.server_address[1]}/?{urlencode(ASKED)}"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=60000", "--dump-dom"]
    command = ["chromium", *options, f"--user-data-dir={tmp_path}/profile", address]
    page = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    server.shutdown()
    found = re.search(r'<body data-text="([^"]*)"', page)
    assert found, re.findall(r'id="status"[^>]*>([^<]*)<', page)
    assert html.unescape(found[1]) == PROMPT + tokenizer.decode(tokens[-15:])
