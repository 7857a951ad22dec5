"""Read a long text once, keep what the model remembers of it in a file, and answer prompts from that file.

    python examples/by_feature/saved_memory.py --model demo-output --text novel.txt --memory novel.safetensors
    python examples/by_feature/saved_memory.py --model demo-output --memory novel.safetensors --prompt "He" "She"
    python examples/by_feature/saved_memory.py --smoke

With --text the file is written, with --prompt it is read; each can be a process of its own, on another machine. What
is added to plain generation are `save_memory` and `load_memory`, whose result goes into `generate` as it is.
"""

import time
from pathlib import Path

import common
from txl_hf.command_line import at_least_one, existing_file, hub_or_folder, one_line_errors

PARSER = common.Parser(__doc__)
PARSER.add_argument("--model", type=hub_or_folder, required=True, help="a checkpoint: a folder, or a name on the Hub")
PARSER.add_argument("--memory", type=Path, required=True, help="the file of the memory")
PARSER.add_argument("--text", type=existing_file, help="UTF-8 text to read; without one the file has to be there")
PARSER.add_argument("--prompt", nargs="+", default=[], help="each is answered behind the text, by itself")
PARSER.add_argument("--max_new_tokens", type=at_least_one, default=100, help="of an answer (%(default)s)")

if __name__ == "__main__":
    PARSER.refuse_first()

import torch
from transformers import AutoModelForCausalLM

from txl_hf import load_memory, save_memory
from txl_hf.memories import memory_of


def smoke(folder: Path) -> list[str | Path]:
    (folder / "novel.txt").write_text(common.standard_library("textwrap"), encoding="utf-8")
    files: list[str | Path] = ["--text", folder / "novel.txt", "--memory", folder / "novel.safetensors"]
    return ["--model", common.tiny_checkpoint(folder), *files, "--prompt", "def ", "class ", "import "]


@torch.no_grad()
def read(model, ids: torch.Tensor):
    """The outputs for the last segment of (1, n) ids, each of which it reads once."""
    memory: dict = {}
    for segment in ids.split(model.config.tgt_len, dim=1):
        outputs = model(segment, logits_to_keep=1, **memory)
        memory = memory_of(outputs)
    return outputs


def main():
    options = common.parse_arguments(PARSER, smoke)
    with one_line_errors():
        model, tokenizer = common.load(AutoModelForCausalLM, options.model)

        def encode(text: str) -> torch.Tensor:
            return tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]

        if options.text is not None:
            ids, started = encode(common.read_text(options.text)), time.perf_counter()
            save_memory(options.memory, model, read(model, ids))
            seconds, size = time.perf_counter() - started, options.memory.stat().st_size
            print(f"Read {ids.shape[1]} tokens in {seconds:.1f} s; {options.memory.name} has {size:,} bytes.")
        memory = load_memory(options.memory, model)
        for prompt in options.prompt:
            settings = {"max_new_tokens": options.max_new_tokens, "do_sample": False}
            written = model.generate(encode(prompt), **settings, **memory)
            print(f"> {prompt}\n{tokenizer.decode(written[0])}")


if __name__ == "__main__":
    main()
