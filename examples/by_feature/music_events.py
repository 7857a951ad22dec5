"""Train on events with several attributes each, music-like: embeddings that are added up, given as `inputs_embeds`.

    python examples/by_feature/music_events.py --events melody.csv --output melody-model.pt
    accelerate launch --config_file examples/launch/one_gpu.yaml examples/by_feature/music_events.py --events …
    python examples/by_feature/music_events.py --smoke

Each line of the CSV file is an event: pitch, duration and velocity, each a small whole number. What is added to a
model of tokens: an event goes in as the sum of the embeddings of its attributes, and each attribute of the next event
is predicted. Pitch takes the model's own embedding and softmax (its loss comes from `shift_labels`), the other two a
table and a linear layer each. The loop is a plain one of accelerate that carries the memory.
"""

import argparse
import math
import os
from pathlib import Path

import common
from txl_hf.command_line import at_least_one, existing_file, new_path, one_line_errors, positive

PARSER = common.Parser(__doc__)
PARSER.add_argument(
    "--events", type=existing_file, required=True, help="a CSV file without heading; its last tenth is held out"
)
PARSER.add_argument("--output", type=new_path, required=True, help="a new file for the weights")
PARSER.add_argument("--layers", type=at_least_one, default=4, help="(%(default)s)")
PARSER.add_argument("--width", type=at_least_one, default=128, help="d_model, a multiple of 8 (%(default)s)")
PARSER.add_argument("--segment_length", type=at_least_one, default=64, help="events (%(default)s)")
PARSER.add_argument("--memory_length", type=at_least_one, default=256, help="events (%(default)s)")
PARSER.add_argument("--batch_size", type=at_least_one, default=16, help="parallel streams of events (%(default)s)")
PARSER.add_argument("--steps", type=at_least_one, default=2000, help="(%(default)s)")
PARSER.add_argument("--learning_rate", type=positive, default=1e-3, help="(%(default)s)")

if __name__ == "__main__":
    PARSER.refuse_first()

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from tqdm import tqdm

from txl_hf import TokenStream, TransfoXLConfig, TransfoXLForCausalLM
from txl_hf.data.streams import check_loader

with one_line_errors():
    from accelerate import Accelerator
    from accelerate.utils import set_seed

ATTRIBUTES = ("pitch", "duration", "velocity")


def smoke(folder: Path) -> list[str | Path]:
    """Phrases of 64 events, each on one of eight chords, at a pace and a loudness of its own."""
    generator, phrases = np.random.default_rng(0), []
    chords = [generator.choice(12, 4, replace=False) for _ in range(8)]
    for _ in range(300):
        pitch = generator.choice(chords[generator.integers(8)], 64)
        duration = generator.integers(6) + generator.integers(2, size=64)
        phrases.append(np.stack([pitch, duration, np.full(64, generator.integers(4))], axis=1))
    np.savetxt(folder / "events.csv", np.concatenate(phrases), fmt="%d", delimiter=",")
    sizes = ["--layers", "2", "--width", "48", "--segment_length", "8", "--memory_length", "32", "--steps", "250"]
    return ["--events", folder / "events.csv", "--output", folder / "music.pt", "--learning_rate", "1e-2", *sizes]


class MusicModel(nn.Module):
    """A Transformer-XL over pitches, with a table and a linear layer for each further attribute."""

    def __init__(self, config: TransfoXLConfig, sizes: list[int]):
        super().__init__()
        self.lm = TransfoXLForCausalLM(config)
        tables = [nn.Embedding(size, config.d_model) for size in sizes[1:]]
        self.tables = nn.ModuleList(tables)
        self.heads = nn.ModuleList(nn.Linear(config.d_model, size) for size in sizes[1:])
        for table in tables:
            nn.init.normal_(table.weight, 0.0, config.init_std)

    def embed(self, events: Tensor) -> Tensor:
        """(B, L, 3) → (B, L, D). The model's embedding multiplies what it looks up by √D, which `inputs_embeds` are
        not multiplied by again: what is added to it has to be on that scale, or it is hardly heard."""
        embeds = self.lm.get_input_embeddings()(events[..., 0])
        for i, table in enumerate(self.tables, start=1):
            embeds = embeds + table(events[..., i]) * math.sqrt(embeds.shape[-1])
        return embeds

    def forward(self, events: Tensor, targets: Tensor, mems: tuple[Tensor, ...] | None = None):
        """Events and those that follow them, both (B, L, 3) → nats per event of each attribute, (3,), and the mems."""
        outputs = self.lm(
            inputs_embeds=self.embed(events), shift_labels=targets[..., 0], mems=mems, output_hidden_states=True
        )
        states, losses = outputs.hidden_states[-1], [outputs.loss]
        for i, head in enumerate(self.heads, start=1):
            losses.append(F.cross_entropy(head(states).flatten(0, 1), targets[..., i].flatten()))
        return torch.stack(losses), outputs.mems


def read_events(path: Path) -> Tensor:
    """(N, 3) int64."""
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty")
    try:
        events = np.loadtxt(path, delimiter=",", dtype=np.int64, ndmin=2)
    except ValueError as error:
        raise ValueError(f"{path} holds no events: {error}") from error
    if events.shape[1] != len(ATTRIBUTES) or events.min() < 0:
        raise ValueError(f"each line of {path} must be three whole numbers from 0 on: {', '.join(ATTRIBUTES)}")
    return torch.from_numpy(events)


def train(accelerator: Accelerator, model, events: Tensor, stream: TokenStream, arguments: argparse.Namespace):
    # A stream cuts one sequence of numbers into segments: here it is the numbers of the events.
    loader = DataLoader(stream, batch_size=arguments.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    check_loader(loader, num_processes=accelerator.num_processes, process_index=accelerator.process_index)
    events = events.to(accelerator.device)
    model.train()
    bar = tqdm(total=arguments.steps, desc="train", disable=not accelerator.is_main_process)
    step = 0
    while step < arguments.steps:
        mems = None
        for batch in loader:
            losses, mems = model(events[batch["input_ids"]], events[batch["shift_labels"]], mems)
            accelerator.backward(losses.sum())
            accelerator.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            bar.set_postfix_str(f"{losses.sum().item():.2f} nats per event", refresh=False)
            bar.update()
            step += 1
            if step == arguments.steps:
                break


@torch.no_grad()
def evaluate(model: MusicModel, events: Tensor, segment_length: int, memory_length: int) -> Tensor:
    """Bits per event of each attribute, (3,)."""
    device = model.lm.device
    trained_with = model.lm.config.mem_len
    model.eval().lm.reset_memory_length(memory_length)
    mems, total = None, torch.zeros(len(ATTRIBUTES), device=device)
    for start in range(0, len(events) - 1, segment_length):
        segment = events[None, start : start + segment_length + 1].to(device)
        losses, mems = model(segment[:, :-1], segment[:, 1:], mems)
        total += losses * (segment.shape[1] - 1)
    model.lm.reset_memory_length(trained_with)
    return total.cpu() / (len(events) - 1) / math.log(2)


def main():
    arguments = common.parse_arguments(PARSER, smoke)
    set_seed(0)
    # Told by hand, because `accelerate launch` does not say that there is no GPU to processes that share the work.
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    with one_line_errors():
        events = read_events(arguments.events)
        held_out = len(events) // 10
        rows = arguments.batch_size * accelerator.num_processes
        stream = TokenStream(np.arange(len(events) - held_out), arguments.segment_length, rows)
        if held_out < 2:
            raise ValueError(f"{arguments.events} has {len(events)} events: at least 20, of which a tenth is held out")
        sizes = (events.max(dim=0).values + 1).tolist()
        lengths = {"mem_len": arguments.memory_length, "tgt_len": arguments.segment_length}
        model = MusicModel(common.small_config(sizes[0], arguments.width, n_layer=arguments.layers, **lengths), sizes)
    # Where it cannot be made, nothing has been trained for nothing.
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    train(accelerator, model, events, stream, arguments)

    accelerator.print(f"Held-out bits per event ({held_out} events)")
    accelerator.print(f"{'memory':>8}" + "".join(f"{attribute:>10}" for attribute in ATTRIBUTES))
    for memory_length in (0, arguments.memory_length):
        bits = evaluate(model, events[-held_out:], arguments.segment_length, memory_length)
        accelerator.print(f"{memory_length:>8}" + "".join(f"{figure:10.2f}" for figure in bits))
    if accelerator.is_main_process:
        aside = arguments.output.with_name(f".{arguments.output.name}")
        torch.save({"config": model.lm.config.to_dict(), "weights": model.state_dict()}, aside)
        os.replace(aside, arguments.output)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
