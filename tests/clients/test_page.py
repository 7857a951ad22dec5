"""The Python blocks of docs/clients.md run as they stand, one after the other, beside a small model as the demo's."""

import os
import re
import subprocess
import sys
from pathlib import Path

from models import small_model
from txl_hf import TransfoXLTokenizer

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"


def test_every_python_block_runs(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 6
    specials = {"eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    letters = "abcdefghijklmnopqrstuvwxyz0123456789():_ \n"
    tokenizer = TransfoXLTokenizer.from_symbols([*specials.values(), *letters], mode="characters", **specials)
    sizes = {"d_model": 32, "d_embed": 32, "d_head": 16, "eos_token_id": 0, "pad_token_id": 2}
    small_model(vocab_size=len(tokenizer), cutoffs=[20], mem_len=128, tgt_len=64, **sizes).save_pretrained(
        tmp_path / "demo-output"
    )
    tokenizer.save_pretrained(tmp_path / "demo-output")
    (tmp_path / "page.py").write_text("\n".join(blocks))
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stdout[-500:] + run.stderr[-3000:]
