"""The published model's place on the Hub, taken by a small one: a vocab.pkl, and no code beside the weights."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from goldens import golden
from hub_server import HubServer
from models import small_model
from txl_hf import TransfoXLTokenizer

PUBLISHED = "transfo-xl/transfo-xl-wt103"
AUTHORS, USER = "hf_token_of_authors", "hf_token_of_user"
UPLOAD = """
import sys
from huggingface_hub import create_repo, upload_folder

create_repo(sys.argv[1])
upload_folder(repo_id=sys.argv[1], folder_path=sys.argv[2])
"""


def write_published(folder: Path) -> Path:
    """Write the small model to a folder, as legacy transformers published its own."""
    vocabulary = golden("tokenizer/cased")
    size = len(TransfoXLTokenizer.from_pretrained(vocabulary))
    small_model(
        vocab_size=size, cutoffs=[100, 400], mem_len=32, clamp_len=24, same_length=True, initial_memory="zeros"
    ).save_pretrained(folder / "model")
    for path in [*(folder / "model").glob("*.safetensors"), *(folder / "model").glob("*.json"), *vocabulary.iterdir()]:
        if path.name not in ("expected.json", "special_tokens_map.json"):
            (folder / path.name).write_bytes(path.read_bytes())
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(re.sub(r'"auto_map": \{[^}]*\},', "", text))
    return folder


@contextmanager
def hub_with(folder: Path) -> Iterator[HubServer]:
    """A Hub with the model of a folder under the published name; `USER` may push to `user/…`."""
    with HubServer({USER: "user", AUTHORS: "transfo-xl"}) as hub:
        # A process of its own, because `huggingface_hub` asks once where the Hub is.
        command = [sys.executable, "-c", UPLOAD, PUBLISHED, folder]
        subprocess.run(command, env=os.environ | hub.environment(AUTHORS), check=True)
        yield hub
