"""How far back a memory reaches, and how soon it learns to: name what was shown k observations before, by supervision.

    python examples/by_feature/memory_probe.py --output probe.csv
    python examples/by_feature/memory_probe.py --offsets 64 --memories transfo-xl --output probe.csv
    python examples/by_feature/memory_probe.py --smoke

Before an agent is trained for hours, this says within minutes whether its memory can learn what the task asks for,
without the chance of exploration and returns. The agents are those of `memory_agent.py`, of as many parameters. An
endless stream of one of four things at a time is read in windows, each with the memory of the last; the loss is that
of the right answer under the policy. A row of the output is a memory, an offset and a seed: how many observations were
read until 95 % of the answers in the last 20 windows were right, or the share that was right when `--observations` had
been read.
"""

import argparse
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import common
from memory_agent import MEMORIES, count, make_agent
from txl_hf.command_line import at_least_one, new_path, one_line_errors, positive

THINGS = 4
REACHED, WINDOWS = 0.95, 20

PARSER = common.Parser(__doc__)
PARSER.add_argument("--offsets", type=at_least_one, nargs="+", default=[4, 8, 16, 32, 64], help="(4 8 16 32 64)")
PARSER.add_argument(
    "--memories", choices=MEMORIES, nargs="+", default=["transfo-xl", "gru", "lstm"], help="(but none)"
)
PARSER.add_argument("--seeds", type=int, nargs="+", default=[1], help="(1)")
PARSER.add_argument("--output", type=new_path, required=True, metavar="CSV")
PARSER.add_argument("--observations", type=at_least_one, default=500_000, help="at most, of a row (%(default)s)")
PARSER.add_argument("--streams", type=at_least_one, default=8, help="read side by side (%(default)s)")
PARSER.add_argument("--window", type=at_least_one, default=128, help="(%(default)s)")
PARSER.add_argument("--memory_length", type=at_least_one, help="as in memory_agent.py (the longest offset + 1)")
PARSER.add_argument("--width", type=at_least_one, default=64, help="of the Transformer-XL (%(default)s)")
PARSER.add_argument("--layers", type=at_least_one, default=1, help="(%(default)s)")
PARSER.add_argument("--learning_rate", type=positive, default=1e-3, help="(%(default)s)")


def smoke(folder: Path) -> list[str | Path]:
    sizes = ["--offsets", "4", "--window", "32", "--width", "32", "--observations", "20000", "--learning_rate", "3e-3"]
    return ["--output", folder / "probe.csv", *sizes]


def probe(options: argparse.Namespace, memory: str, offset: int, seed: int) -> dict[str, object]:
    """The row of a memory that learns to name what was shown `offset` observations before."""
    torch.manual_seed(seed)
    length = options.memory_length or max(options.offsets) + 1
    agent = make_agent(
        argparse.Namespace(memory=memory, width=options.width, layers=options.layers, memory_length=length),
        features=THINGS,
        actions=THINGS,
    )
    optimizer = torch.optim.Adam(agent.parameters(), lr=options.learning_rate, eps=1e-5)
    shown, state = torch.randint(THINGS, (options.streams, offset)), dict[str, Any]()
    resets = torch.zeros(options.streams, options.window, dtype=torch.bool)
    right, read, share = deque[float](maxlen=WINDOWS), 0, 0.0
    while read < options.observations and share < REACHED:
        shown = torch.cat([shown[:, -offset:], torch.randint(THINGS, resets.shape)], 1)
        answers, seen = shown[:, : options.window], F.one_hot(shown[:, offset:], THINGS).float()
        policy, _, state = agent(seen, resets, state)
        # No gradient enters the last window: what the Transformer-XL remembers has none already.
        state = {name: kept.detach() if isinstance(kept, Tensor) else kept for name, kept in state.items()}
        optimizer.zero_grad()
        (-policy.log_prob(answers)).mean().backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        read += answers.numel()
        right.append((policy.logits.argmax(-1) == answers).float().mean().item())
        share = sum(right) / len(right) if len(right) == WINDOWS else 0.0
    return {
        "memory": memory, "offset": offset, "seed": seed, "parameters": count(agent), "memory_length": length,
        "streams": options.streams, "window": options.window, "learning_rate": options.learning_rate,
        "observations": read, "right": round(sum(right) / len(right), 4), "reached": share >= REACHED,
    }  # fmt: skip


def main():
    options = common.parse_arguments(PARSER, smoke)
    with one_line_errors():
        cases = [
            (memory, offset, seed)
            for memory in options.memories
            for offset in options.offsets
            for seed in options.seeds
        ]
        rows = []
        for case in cases:
            rows.append(probe(options, *case))
            found = "found after" if rows[-1]["reached"] else f"{rows[-1]['right']:.3f} right after"
            print(f"{case[0]:>11} {case[1]:3} back: {found} {rows[-1]['observations']} observations", flush=True)
            common.write_rows(options.output, rows)


if __name__ == "__main__":
    main()
