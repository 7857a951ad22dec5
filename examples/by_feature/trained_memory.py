"""A memory that is trained: states fitted to a text by gradient, scored on later chapters beside read states.

    python examples/by_feature/trained_memory.py --model demo-output --text novel.txt --output rows.csv
    python examples/by_feature/trained_memory.py --smoke

The model stays as it is; the parameters are `mems`, --states of them in each layer. They begin as the states of as
many tokens that the model reads, and learn from segments of the first four fifths of the text, drawn at random, each
read behind these states alone. The last tenth is scored in order, one stream, with memories of --memory_length states:

    read            the states of the tokens before a segment, as always
    trained + read  the trained states in front of them; at 0 the trained states alone
"""

import math
from pathlib import Path

import common
from txl_hf.command_line import at_least_one, at_least_zero, existing_file, hub_or_folder, new_path, one_line_errors

PARSER = common.Parser(__doc__)
PARSER.add_argument("--model", type=hub_or_folder, required=True, help="a checkpoint: a folder, or a name on the Hub")
PARSER.add_argument("--text", type=existing_file, required=True, help="UTF-8 text to learn from and to score")
PARSER.add_argument("--output", type=new_path, required=True, help="a new CSV file, with a row for each reading")
PARSER.add_argument("--states", type=at_least_one, default=64, help="of the trained memory (%(default)s)")
PARSER.add_argument("--steps", type=at_least_one, default=1000, help="of training (%(default)s)")
PARSER.add_argument("--batch_size", type=at_least_one, default=16, help="segments in a step (%(default)s)")
PARSER.add_argument("--learning_rate", type=float, default=1e-2, help="(%(default)g)")
PARSER.add_argument("--segment_length", type=at_least_one, default=64, help="(%(default)s)")
PARSER.add_argument("--memory_length", type=at_least_zero, nargs="+", default=[0, 64, 128, 256, 640])
PARSER.add_argument("--tokens", type=at_least_one, default=20_000, help="to score at most (%(default)s)")
PARSER.add_argument("--seed", type=at_least_zero, default=0, help="of the segments that are drawn (%(default)s)")

if __name__ == "__main__":
    PARSER.refuse_first()

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from txl_hf import MemoryLengths


def smoke(folder: Path) -> list[str | Path]:
    (folder / "text").write_text(common.standard_library("argparse"), encoding="utf-8")
    files: list[str | Path] = ["--text", folder / "text", "--output", folder / "rows.csv"]
    sizes = ["--steps", "60", "--states", "16", "--memory_length", "0", "32", "--segment_length", "32"]
    return ["--model", common.tiny_checkpoint(folder), *files, *sizes, "--tokens", "2000"]


def fit(model, ids: Tensor, options) -> tuple[Tensor, ...]:
    """The trained memory: n_layer tensors (1, states, D)."""
    L, generator = options.segment_length, torch.Generator().manual_seed(options.seed)
    length = MemoryLengths(mem_len=options.states)
    with torch.no_grad():
        begun = model(ids[None, : options.states], lengths=length).mems
    memory = nn.ParameterList([nn.Parameter(states.clone()) for states in begun])
    optimizer = torch.optim.Adam(memory.parameters(), lr=options.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    for step in range(options.steps):
        starts = torch.randint(len(ids) - L, (options.batch_size,), generator=generator)
        segments = torch.stack([ids[start : start + L + 1] for start in starts])
        mems = tuple(states.expand(options.batch_size, -1, -1) for states in memory)
        loss = model(segments[:, :-1], mems=mems, shift_labels=segments[:, 1:], lengths=length).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % (-(-options.steps // 10)) == 0:
            print(f"step {step}: {loss.item():.4f} nats", flush=True)
    return tuple(states.detach() for states in memory)


@torch.no_grad()
def score(model, ids: Tensor, trained: tuple[Tensor, ...] | None, memory_length: int, segment_length: int) -> float:
    """Mean nats of all tokens but the first, read in segments behind `trained` and the last `memory_length` states."""
    front = 0 if trained is None else trained[0].shape[1]
    # The segment's own states come back too, so that they can be put behind those that were read.
    lengths = MemoryLengths(mem_len=front + memory_length + segment_length)
    read: tuple[Tensor, ...] | None = None
    total = 0.0
    for inputs, targets in zip(ids[:-1].split(segment_length), ids[1:].split(segment_length), strict=True):
        parts = [part for part in (trained, read) if part is not None]
        mems = tuple(torch.cat(layer, dim=1) for layer in zip(*parts, strict=True)) or None
        outputs = model(inputs[None], mems=mems, shift_labels=targets[None], lengths=lengths, output_logits=False)
        total += outputs.losses.sum().item()
        behind = outputs.mems[0].shape[1] - front
        kept = min(memory_length, behind)
        read = tuple(states[:, states.shape[1] - kept :] for states in outputs.mems)
    return total / (len(ids) - 1)


def main(arguments: list[str] | None = None):
    options = common.parse_arguments(PARSER, smoke, arguments)
    with one_line_errors():
        model, tokenizer = common.load(AutoModelForCausalLM, options.model)
        model.eval().requires_grad_(False)
        ids = torch.as_tensor(tokenizer(common.read_text(options.text), add_special_tokens=False)["input_ids"])
        learned, scored = ids[: len(ids) * 4 // 5], ids[len(ids) * 9 // 10 :][: options.tokens + 1]
        if len(learned) <= max(options.segment_length, options.states) or len(scored) < 2:
            raise ValueError(f"{options.text} has {len(ids)} tokens, too few for segments of {options.segment_length}")
        trained = fit(model, learned, options)
        rows = []
        for length in options.memory_length:
            for name, front in (("read", None), ("trained + read", trained)):
                nats = score(model, scored, front, length, options.segment_length)
                row = {"memory": name, "memory_length": length, "nats": f"{nats:.4f}"}
                rows.append(row | {"perplexity": f"{math.exp(nats):.2f}", "tokens": len(scored) - 1})
                print(f"{name:15} {length:5}  {nats:.4f} nats  perplexity {math.exp(nats):.2f}", flush=True)
        common.write_rows(options.output, rows)


if __name__ == "__main__":
    main()
