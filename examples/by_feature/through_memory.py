"""Gradients through the memory: learn to copy from further back than a segment and its memory together are long.

    python examples/by_feature/through_memory.py --output through-memory.csv
    python examples/by_feature/through_memory.py --smoke

Each token is the one that was read --distance tokens before, in a text of random tokens. A layer sees the segment and
M states before it, so that from further back than both a token comes in two hops: a lower layer has to leave it in a
state, M back at most, where the upper layer finds it. Where the memory is detached, no loss says so to the lower layer
(--segments 1); where it keeps its graph for k segments, `detach_mems=False`, one does. Each k reads as many tokens, so
that k = 1 takes k times as many steps. The accuracy is of a text that nothing has learned from.
"""

import time
from pathlib import Path
from typing import Any, NamedTuple

import common
from txl_hf.command_line import at_least_one, new_path, positive

PARSER = common.Parser(__doc__)
PARSER.add_argument("--output", type=new_path, help="a new CSV file, with a row for each training")
PARSER.add_argument("--segments", type=at_least_one, nargs="+", default=[1, 3], help="each k (1 3)")
PARSER.add_argument("--seeds", type=at_least_one, nargs="+", default=[1, 2, 3], help="(1 2 3)")
PARSER.add_argument("--distance", type=at_least_one, default=24, help="(%(default)s)")
PARSER.add_argument("--memory", type=at_least_one, default=16, help="M (%(default)s)")
PARSER.add_argument("--segment_length", type=at_least_one, default=8, help="(%(default)s)")
PARSER.add_argument("--tokens", type=at_least_one, default=120_000, help="of all rows, to learn from (%(default)s)")
PARSER.add_argument("--rows", type=at_least_one, default=32, help="texts that are read together (%(default)s)")
PARSER.add_argument("--learning_rate", type=positive, default=3e-3, help="at its highest (%(default)s)")


def check(options):
    """Raise a ValueError for options that do not go together."""
    if options.output is None:
        raise ValueError("--output is missing")
    reach, furthest = options.segment_length - 1 + options.memory, 2 * options.memory
    if not reach < options.distance <= furthest:
        raise ValueError(
            f"--distance {options.distance} is no two hops: it must be more than {reach}, which a layer sees, and at "
            f"most {furthest}, twice --memory"
        )


if __name__ == "__main__":
    PARSER.refuse_first(check)

import torch
from torch import Tensor

from txl_hf import TransfoXLForCausalLM
from txl_hf.memories import memory_of

SYMBOLS = 4


def smoke(folder: Path) -> list[str | Path]:
    sizes = ["--memory", "8", "--segment_length", "4", "--distance", "12", "--tokens", "60000", "--seeds", "1"]
    return ["--output", folder / "through-memory.csv", *sizes]


class Copying(NamedTuple):
    """Texts of random tokens, of which each is asked for again `distance` tokens later.

    Attributes:
        rows, distance: so many texts, and so far back. chance: draws them.
    """

    rows: int
    distance: int
    chance: torch.Generator

    def segments(self, length: int):
        """Without an end: (rows, length) tokens, and targets, the tokens `distance` before; -100 before the text."""
        behind = torch.full((self.rows, self.distance), -100)
        while True:
            read = torch.randint(SYMBOLS, (self.rows, length), generator=self.chance)
            behind = torch.cat([behind, read], dim=1)
            yield read, behind[:, :length]
            behind = behind[:, length:]


def step(model: TransfoXLForCausalLM, segments, k: int, memory: dict) -> tuple[Tensor, dict]:
    """The mean loss of k segments, each with the memory of the one before and its graph; the memory of the last."""
    losses, targets = torch.zeros(()), 0
    for number, (read, asked) in zip(range(1, k + 1), segments, strict=False):
        outputs = model(read, shift_labels=asked, detach_mems=number == k, **memory)
        losses, targets = losses + outputs.losses.sum(), targets + int((asked != -100).sum())
        memory = memory_of(outputs)
    return losses / max(targets, 1), memory


def train(options, k: int, seed: int) -> TransfoXLForCausalLM:
    torch.manual_seed(seed)
    length, memory = options.segment_length, dict[str, Any]()
    config = common.small_config(SYMBOLS, 64, mem_len=options.memory, tgt_len=length, init_std=0.05)
    model = TransfoXLForCausalLM(config)
    steps = -(-options.tokens // (options.rows * length * k))
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, steps, pct_start=0.05)
    segments = Copying(options.rows, options.distance, torch.Generator().manual_seed(seed)).segments(length)
    for _ in range(steps):
        loss, memory = step(model, segments, k, memory)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def accuracy(model: TransfoXLForCausalLM, options, seed: int) -> float:
    """Of the likeliest tokens, in 32 segments behind as many as the distance takes."""
    length, memory, right = options.segment_length, dict[str, Any](), []
    chance = torch.Generator().manual_seed(2**31 + seed)
    segments = Copying(options.rows, options.distance, chance).segments(length)
    warm_up = -(-options.distance // length)
    for number, (read, asked) in zip(range(warm_up + 32), segments, strict=False):
        outputs = model.eval()(read, **memory)
        memory = memory_of(outputs)
        if number >= warm_up:
            right.append((outputs.logits.argmax(-1) == asked).double().mean())
    return float(torch.stack(right).mean())


def main():
    options = common.parse_arguments(PARSER, smoke)
    rows = []
    for seed in options.seeds:
        for k in options.segments:
            started = time.perf_counter()
            found = accuracy(train(options, k, seed), options, seed)
            seconds = time.perf_counter() - started
            print(f"k={k}, seed {seed}: {found:.4f} right ({1 / SYMBOLS} by chance), {seconds:.0f} s", flush=True)
            sizes = {name: getattr(options, name) for name in ("distance", "memory", "segment_length", "tokens")}
            figures = {"accuracy": f"{found:.4f}", "seconds": f"{seconds:.0f}"}
            rows.append({"segments": k, "seed": seed, **sizes, **figures})
    common.write_rows(options.output, rows)


if __name__ == "__main__":
    main()
