"""Recipes trained on a GPU as far as the time goes, towards published figures: Penn Treebank's and WikiText-2's.

    python examples/prepare_corpus.py --corpus ptb --input PTB --output data/ptb
    python examples/prepare_corpus.py --corpus wikitext-2 --output data/wikitext-2
    python benchmarks/gpu_train.py --data data --output runs --minutes 60

The same command goes on where the last one ran out of time, or was killed; what is done is not done again. Each part
is a run of `examples/train_lm.py` in a process of its own, with the recipe as it stands, in a folder of its own under
--output. A finished part is a row of `gpu_train.csv` there, with what it scores on the test text and the published
figure; the exit status is 3 while there is more to do. `--parts` names others, such as wt103_base, which take days.
`--smoke` runs every part for a few steps, without data, on any device.

A machine with torch, transformers, accelerate and pyarrow alone lacks `datasets`, with the `dill` and `multiprocess`
that it needs: wheels of them in the folder `.whl` beside the sources do. The recipes train with Adam and need no
pytorch_optimizer. A checkpoint holds the model and Adam's two moments, some 300 MB.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import gpu
import harness

ROOT = Path(__file__).parents[1]
# So often that little is lost, and so seldom that a checkpoint's second does not count.
SAVE_EVERY = 500
# Seconds that a run may take to end after it was asked to.
GRACE = 30
# What train_lm.py imports and datasets does.
PACKAGES = ("torch", "transformers", "accelerate", "pyarrow", "datasets", "dill", "multiprocess")


@dataclass(frozen=True)
class Part:
    """A recipe, the corpus it is for, what is published of its test text, and the part whose model it goes on from."""

    recipe: str
    corpus: str
    published: float | None = None
    metric: str = "perplexity"
    after: str | None = None


# The 54.52 of the paper comes after both parts of Penn Treebank. Reproductions of WikiText-2 report 63.13 to 63.43.
PARTS = [
    Part("ptb", "ptb"),
    Part("ptb_average", "ptb", 54.52, after="ptb"),
    Part("wikitext2", "wikitext-2", 63.1),
    Part("wt103_base", "wikitext-103", 24.0),
    Part("wt103_large", "wikitext-103", 18.3),
    Part("nvidia_base", "wikitext-103", 23.24),
    Part("nvidia_large", "wikitext-103", 18.17),
    Part("lm1b_base", "lm1b", 23.5),
    Part("lm1b_large", "lm1b", 21.8),
    Part("enwik8_base", "enwik8", 1.06, "bits_per_token"),
    Part("enwik8_medium", "enwik8", 1.03, "bits_per_token"),
    Part("enwik8_large", "enwik8", 0.99, "bits_per_token"),
    Part("text8_large", "text8", 1.08, "bits_per_token"),
]
# Those that a GPU trains in hours.
SHORT = ["ptb", "ptb_average", "wikitext2"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with what prepare_corpus.py wrote: ptb, wikitext-2, …")
    parser.add_argument("--output", type=Path, required=True, help="folder for the runs and their rows")
    parser.add_argument("--minutes", type=float, default=60.0, help="when to stop (%(default)s)")
    names = [part.recipe for part in PARTS]
    parser.add_argument("--parts", nargs="+", choices=names, default=SHORT, help="in this order (%(default)s)")
    parser.add_argument("--smoke", action="store_true", help="each part for a few steps, without data")
    arguments = parser.parse_args(argv)
    parts = [part for name in arguments.parts for part in PARTS if part.recipe == name]
    gpu.check_packages(parser, PACKAGES)
    if not arguments.smoke:
        check_data(parser, arguments.data, parts)
    end = time.monotonic() + 60 * arguments.minutes
    for part in parts:
        status = train(part, arguments, end)
        if status != 0:
            return status
        print(report(part, arguments.output), flush=True)
    return 0


def check_data(parser: argparse.ArgumentParser, data: Path | None, parts: list[Part]):
    """End with an error that names the folder that is missing."""
    if data is None:
        parser.error("--data is missing: name the folder of the prepared corpora, or try all with --smoke")
    for part in parts:
        if not (data / part.corpus).is_dir():
            parser.error(
                f"{data / part.corpus} is missing: prepare_corpus.py --corpus {part.corpus} --output "
                f"{data / part.corpus} writes it"
            )


def train(part: Part, arguments: argparse.Namespace, end: float) -> int:
    """The status of a part: 0 where it is done, 3 where the time was up, else what its process returned."""
    if (arguments.output / part.recipe / "results.json").exists():
        return 0
    left = end - time.monotonic()
    if left > 0:
        print(f"\n== {part.recipe}, {left / 60:.0f} minutes left", flush=True)
        status = gpu.run(command_of(part, arguments), gpu.environment(), left, grace=GRACE)
        if status is not None:
            return status
    print(f"out of time in {part.recipe}; the same command goes on", flush=True)
    return 3


def command_of(part: Part, arguments: argparse.Namespace) -> list[str]:
    folder = ROOT / "examples"
    command = [sys.executable, str(folder / "train_lm.py"), str(folder / "recipes" / f"{part.recipe}.yaml")]
    command += ["--output", str(arguments.output / part.recipe), "--resume", "--save_steps", str(SAVE_EVERY)]
    if part.after is not None:
        command += ["--model_name_or_path", str(arguments.output / part.after)]
    return [*command, "--smoke"] if arguments.smoke else [*command, "--data", str(arguments.data / part.corpus)]


def report(part: Part, output: Path) -> str:
    """The score of a finished part in one line; the first call also appends it to the table."""
    import torch

    results = json.loads((output / part.recipe / "results.json").read_text())
    table = output / "gpu_train.csv"
    if all(row["recipe"] != part.recipe for row in harness.read(table)):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        row = {"recipe": part.recipe, "published": part.published or ""}
        for split in ("validation", "test"):
            row[f"{split}_perplexity"] = f"{results[split]['perplexity']:.2f}"
            row[f"{split}_bits_per_token"] = f"{results[split]['bits_per_token']:.3f}"
        origin = harness.origin(device, "", torch.get_num_threads()) | {"commit": results["commit"] or ""}
        harness.append(table, [origin | harness.versions() | row])
    found, judged = results["test"][part.metric], ""
    if part.published is not None:
        judged = f", published {part.published}: {'met' if harness.meets(found, part.published) else 'missed'}"
    return f"{part.recipe}: test {part.metric.replace('_', ' ')} {found:.3f}{judged}"


if __name__ == "__main__":
    sys.exit(main())
