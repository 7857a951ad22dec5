"""Parts that the scripts beside this one share: errors in one line, whole output folders, and what `--smoke` runs on.

It imports nothing slow before it is needed, so that a script can look at its command line first.
"""

import argparse
import atexit
import csv
import math
import shlex
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from txl_hf.command_line import CommandParser, one_line_errors
from txl_hf.files import whole_file

if TYPE_CHECKING:
    from txl_hf import TransfoXLConfig


class Parser(CommandParser):
    """The options of a script, `--smoke` among them."""

    def __init__(self, description: str):
        super().__init__(description=description.splitlines()[0])
        self.add_argument("--smoke", action="store_true", help="a trial run of seconds on a small model and text")

    def refuse_first(self, check: Callable[[argparse.Namespace], object] | None = None):
        """End a script whose command line is wrong before it imports what takes seconds. `--smoke` fills it in later.

        Args:
            check: raises a ValueError for options that do not go together.
        """
        if "--smoke" not in sys.argv:
            options = self.parse_args()
            if check is not None:
                with one_line_errors():
                    check(options)


def parse_arguments(
    parser: Parser, smoke: Callable[[Path], list[str | Path]], arguments: list[str] | None = None
) -> argparse.Namespace:
    """The arguments of the command line. `--smoke` stands for those that `smoke` returns for a temporary folder, with
    the files that they name; further ones take precedence."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--smoke" not in arguments:
        return parser.parse_args(arguments)
    import transformers

    transformers.set_seed(0)
    transformers.logging.disable_progress_bar()
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    stand_for = [str(argument) for argument in smoke(Path(folder.name))]
    print(f"--smoke: {parser.prog} {shlex.join(stand_for)}")
    return parser.parse_args([*stand_for, *arguments])


def load(model_class, path: str, **changes):
    """The model and the tokenizer of a folder or of a repository on the Hub."""
    from transformers import AutoTokenizer

    try:
        return model_class.from_pretrained(path, **changes), AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} does not load: {error}") from error


def read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a UTF-8 text") from None
    if not text.strip():
        raise ValueError(f"{path} is empty")
    return text


def write_rows(path: Path, rows: Sequence[dict], columns: Sequence[str] = ()) -> None:
    """Write rows as CSV, whole or not at all; `columns`: by default those of the first row."""
    with whole_file(path) as aside, aside.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns or list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def standard_library(name: str) -> str:
    """The source of a module of Python's standard library."""
    return Path(sysconfig.get_path("stdlib"), f"{name}.py").read_text(encoding="utf-8")


def small_config(vocab_size: int, width: int = 48, **changes) -> "TransfoXLConfig":
    """A model that learns on a CPU: normalised first, without cutoffs, and with nothing before a text."""
    from txl_hf import TransfoXLConfig

    settings = {
        "cutoffs": [],
        "div_val": 1,
        "d_model": width,
        "d_embed": width,
        "n_head": 4,
        "d_head": width // 4,
        "d_inner": 2 * width,
        "n_layer": 2,
        "mem_len": 64,
        "tgt_len": 32,
        "clamp_len": -1,
        "same_length": False,
        "initial_memory": "empty",
        "pre_lnorm": True,
        "dropout": 0.0,
        "eos_token_id": None,
    }
    return TransfoXLConfig(vocab_size=vocab_size, **(settings | changes))


def tiny_checkpoint(folder: Path, steps: int = 150) -> Path:
    """A character-level model that has read a little Python: enough to see the scripts at work."""
    import torch
    from torch.utils.data import DataLoader

    from txl_hf import TokenStream, TransfoXLForCausalLM, TransfoXLTokenizer

    lines = standard_library("argparse").splitlines(keepends=True)
    tokenizer = TransfoXLTokenizer.train_from_iterator(lines, mode="characters", unk_token="<unk>")
    model = TransfoXLForCausalLM(small_config(len(tokenizer)))
    stream = TokenStream(tokenizer.encode_lines(lines), model.config.tgt_len, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    mems, bits = None, 0.0
    for _, batch in zip(range(steps), DataLoader(stream, batch_size=stream.batch_size), strict=False):
        outputs = model(**batch, mems=mems)
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mems, bits = outputs.mems, outputs.loss.item() / math.log(2)
    print(f"A tiny model of Python's source, trained for {steps} steps: {bits:.2f} bits per character.")
    model.save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    return folder / "tiny"
