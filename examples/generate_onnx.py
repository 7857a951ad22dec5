"""Continue a text with onnxruntime, without torch: what `txl-export` wrote, its memory carried from call to call.

    txl-export --model demo-output --output demo-onnx
    python examples/generate_onnx.py --model demo-onnx --prompt "def main(" --max_new_tokens 200

`pip install onnxruntime tokenizers` is all that it needs. The prompt is read in segments by `segment.onnx`, each with
the memory of those before it; then `step.onnx` reads one token after the other. The most probable token is taken, or,
with `--temperature`, one is drawn.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

try:
    import numpy as np
    import onnxruntime
    from tokenizers import Tokenizer
except ModuleNotFoundError as error:
    # Written here, since this script is to run where the package is not installed.
    sys.exit(f"error: {error.name} is not installed: pip install onnxruntime tokenizers")


class Reader:
    """A text that is read on and on; `logits` are the log-probabilities (vocabulary,) of what follows.

    Args:
        folder: what `txl-export` wrote.
    """

    def __init__(self, folder: Path):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.segment_length = config["tgt_len"]
        self.segment, self.step = (
            onnxruntime.InferenceSession(folder / name, providers=["CPUExecutionProvider"])
            for name in ("segment.onnx", "step.onnx")
        )
        begin = config["mem_len"] if config["initial_memory"] == "zeros" else 0
        self.mems = [np.zeros((1, begin, config["d_model"]), np.float32) for _ in range(config["n_layer"])]

    def read(self, token_ids: list[int]) -> None:
        for start in range(0, len(token_ids), self.segment_length):
            part = token_ids[start : start + self.segment_length]
            graph = self.step if len(part) == 1 else self.segment
            given = {f"mems.{i}": states for i, states in enumerate(self.mems)}
            logits, *self.mems = graph.run(None, {"input_ids": np.array([part], np.int64), **given})
            self.logits = logits[0, -1]


def write(reader: Reader, count: int, temperature: float, seed: int) -> Iterator[int]:
    """The tokens that follow, each as soon as it is chosen."""
    chance = np.random.default_rng(seed)
    for _ in range(count):
        if temperature == 0:
            token = int(reader.logits.argmax())
        else:
            # The largest of the scores, each with noise of a Gumbel distribution, is a draw from their softmax. Where
            # the temperature is next to none, the likeliest stays at 0, and the others are far below.
            with np.errstate(over="ignore"):
                scores = (reader.logits - reader.logits.max()).astype(np.float64) / temperature
            token = int((scores + chance.gumbel(size=len(scores))).argmax())
        yield token
        reader.read([token])


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of txl-export")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max_new_tokens", "--max-new-tokens", type=int, default=100, help="(%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the most probable token (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    options = parser.parse_args(argv)
    if options.max_new_tokens < 1:
        parser.error(f"--max_new_tokens {options.max_new_tokens} has to be at least 1")
    if not 0 <= options.temperature < float("inf"):
        parser.error(f"--temperature {options.temperature} has to be 0 or more")
    if options.seed < 0:
        parser.error(f"--seed {options.seed} has to be 0 or more")
    for name in ("tokenizer.json", "segment.onnx", "step.onnx"):
        if not (options.model / name).exists():
            sys.exit(f"error: --model {options.model} has no {name}: write a folder with txl-export")
    try:
        tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
        reader = Reader(options.model)
    except Exception as error:
        # Each library has errors of its own for a file that is damaged.
        sys.exit(f"error: --model {options.model} is damaged: {' '.join(str(error).split())}")
    try:
        token_ids = tokenizer.encode(options.prompt).ids
    except Exception as error:
        # It has no token for a symbol.
        sys.exit(f"error: --prompt cannot be read: {error}")
    if not token_ids:
        parser.error("--prompt is empty")
    reader.read(token_ids)
    for token in write(reader, options.max_new_tokens, options.temperature, options.seed):
        token_ids.append(token)
    print(tokenizer.decode(token_ids, skip_special_tokens=False))


if __name__ == "__main__":
    main()
