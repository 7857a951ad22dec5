"""How long a command takes to begin, beside the libraries that it needs.

    python benchmarks/startup.py --device cpu

Processes take turns. `libraries` imports torch and the base class of transformers' models, `libraries of training`
accelerate and datasets too; no command that computes can begin before. Of `txl-train`, which trains a model of
nothing, the seconds are those until its first line; `txl-evaluate` scores 16 tokens with such a model, `txl-prepare`
cuts a short text into characters, and `--help` is what a look at the options takes: these are timed to their end.
Rows go to `benchmarks/results/startup.csv`.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import harness
from txl_hf import TransfoXLConfig, TransfoXLForCausalLM

RECIPE = Path(__file__).resolve().parents[1] / "examples" / "recipes" / "characters_small.yaml"
LIBRARIES = "import torch; from transformers import PreTrainedModel"
COMMAND = "import sys; from txl_hf.commands import {}; {}(sys.argv[1:])"


def write_inputs(folder: Path):
    config = TransfoXLConfig(vocab_size=256, cutoffs=[], div_val=1, d_model=8, d_embed=8, n_head=1, n_layer=1)
    TransfoXLForCausalLM(config).save_pretrained(folder / "model")
    (folder / "text.txt").write_text("All happy families are alike.\n" * 100)


def commands(folder: Path, turn: int) -> dict[str, list[str]]:
    """Arguments of `python -c` for each contender."""
    data = str(folder / f"data{turn}")
    text = ["--corpus", "text", "--mode", "characters", "--input", str(folder / "text.txt"), "--output", data]
    evaluate = ["--model", str(folder / "model"), "--data", data, "--max_tokens", "16"]
    prepare, train, score = (COMMAND.format(name, name) for name in ("prepare", "train", "evaluate"))
    return {
        "txl-prepare": [prepare, *text],
        "libraries": [LIBRARIES],
        "libraries of training": [f"{LIBRARIES}; import accelerate, datasets"],
        "txl-train --help": [train, "--help"],
        "txl-train": [train, str(RECIPE), "--smoke"],
        "txl-evaluate": [score, *evaluate],
    }


def seconds(arguments: list[str], first_line: bool) -> float:
    """Until the first line that a process prints, or its end.

    Raises:
        RuntimeError: it failed.
    """
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-c", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        if first_line:
            process.stdout.readline()
            passed = time.perf_counter() - start
        process.communicate()
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(f"{arguments} failed: {errors.read()}")
    return passed if first_line else time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu"])
    parser.add_argument("--turns", type=int, default=7, help="after one that is not counted (%(default)s)")
    options = parser.parse_args()
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder))
        for turn in range(options.turns + 1):
            for name, arguments in commands(Path(folder), turn).items():
                times.setdefault(name, []).append(seconds(arguments, first_line=name == "txl-train"))
    origin = {**harness.origin("cpu", "", torch.get_num_threads()), **harness.versions()}
    rows = []
    for name, found in times.items():
        p20, median, p80 = (round(value, 2) for value in harness.quantiles(found[1:]))
        rows.append(
            {**origin, "contender": name, "turns": options.turns, "p20_s": p20, "seconds": median, "p80_s": p80}
        )
        print(f"{name:22} {median:6.2f} s ({p20} to {p80})")
    harness.append(harness.RESULTS / "startup.csv", rows)


if __name__ == "__main__":
    main()
