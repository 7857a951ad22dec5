"""Train on compound words, events of several attributes each, and write music with what was learned.

    txl-prepare --corpus midi --input midi-files --tokens compound --transpose 5 --output data/compound
    python examples/music/compound.py --data data/compound --output runs/compound --pieces 3

An event of MidiTok's CPWord is a bar, a position or a note, with an id for each of its attributes: a note has its
pitch, loudness, length and instrument in one step, where REMI takes four. The embeddings of an event's attributes are
added up; each attribute of the next event has a softmax of its own, which is told the attributes chosen before it, so
that a length can depend on the pitch (Hsiao et al., 2021, https://arxiv.org/abs/2101.02402, choose the family first
alike). The transformer is one without tokens, `TransfoXLModel` with `vocab_size=0`; its memory begins anew with each
piece.
"""

import argparse
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import get_cosine_schedule_with_warmup, set_seed

from generate import draw, to_score
from pieces import CHANNELS
from txl_hf import TokenStream, TransfoXLConfig, TransfoXLModel
from txl_hf.command_line import CommandParser, at_least_one, at_least_zero, not_negative, one_line_errors, positive
from txl_hf.data.loading import EVENTS, is_midi_tokenizer, load_midi_tokenizer
from txl_hf.files import whole_folder
from txl_hf.memories import memory_of
from txl_hf.midi.pieces import boundary_tokens

with one_line_errors():
    from miditok import MusicTokenizer


# What tells a note from others that begin at the same time, in this order.
NOTE = ("Pitch", "Program")
DRUMS = "Program_-1"
# Events of a piece, at most.
LONGEST = 10_000


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of txl-prepare --tokens compound")
    parser.add_argument("--output", type=Path, required=True, help="a new folder for weights, tokenizer and pieces")
    parser.add_argument("--steps", type=at_least_one, default=1000, help="(%(default)s)")
    parser.add_argument("--width", type=at_least_one, default=128, help="d_model, a multiple of 8 (%(default)s)")
    parser.add_argument("--layers", type=at_least_one, default=4, help="(%(default)s)")
    parser.add_argument("--segment_length", type=at_least_one, default=64, help="events (%(default)s)")
    parser.add_argument("--memory_length", type=at_least_zero, default=192, help="events (%(default)s)")
    parser.add_argument("--batch_size", type=at_least_one, default=8, help="streams (%(default)s)")
    parser.add_argument("--learning_rate", type=positive, default=2e-3, help="(%(default)s)")
    parser.add_argument("--pieces", type=at_least_one, default=1, help="to write (%(default)s)")
    parser.add_argument("--bars", type=at_least_one, default=16, help="of each (%(default)s)")
    parser.add_argument("--temperature", type=not_negative, default=1.0, help="0: the likeliest (%(default)s)")
    parser.add_argument("--seed", type=at_least_zero, default=0, help="(%(default)s)")
    return parser.parse_args(arguments)


class CompoundModel(nn.Module):
    """A Transformer-XL over events of A attributes.

    Args:
        config: of a model without tokens.
        sizes: of the vocabulary of each attribute.
    """

    def __init__(self, config: TransfoXLConfig, sizes: list[int]):
        super().__init__()
        self.transformer = TransfoXLModel(config)
        self.tables = nn.ModuleList(nn.Embedding(size, config.d_model) for size in sizes)
        self.norm = nn.LayerNorm(config.d_model)
        self.heads = nn.ModuleList(nn.Linear(config.d_model, size) for size in sizes)

    def read(self, events: Tensor, **memory: Any):
        """(B, L, A) events → the states (B, L, D) that predict the events after them, and the memory."""
        embeds = sum(table(events[..., i]) for i, table in enumerate(self.tables))
        outputs = self.transformer(inputs_embeds=embeds, **memory)
        return outputs.last_hidden_state, memory_of(outputs)

    def losses(self, states: Tensor, targets: Tensor) -> Tensor:
        """(B, L, D) states and the (B, L, A) events that follow → nats of each attribute, (A,), means over events."""
        found = []
        for i, (table, head) in enumerate(zip(self.tables, self.heads, strict=True)):
            found.append(F.cross_entropy(head(self.norm(states)).flatten(0, -2), targets[..., i].flatten()))
            states = states + table(targets[..., i])
        return torch.stack(found)

    def choose(self, state: Tensor, allowed, temperature: float) -> list[int]:
        """An event, attribute after attribute, from a state (D,); `allowed` masks the ids of the next attribute. At
        temperature 0 the likeliest is taken."""
        event: list[int] = []
        for table, head in zip(self.tables, self.heads, strict=True):
            scores = head(self.norm(state))
            scores = scores.masked_fill(~allowed(event).to(scores.device), -math.inf)
            chosen = scores.argmax() if temperature == 0 else torch.multinomial((scores / temperature).softmax(0), 1)
            event.append(int(chosen))
            state = state + table(torch.tensor(event[-1], device=state.device))
        return event


class EventGrammar:
    """Which events may come next: shapes that the corpus has, in an order that MidiTok's graph of token types allows.

    Args:
        tokenizer: MidiTok's CPWord.
        shapes: the types of the attributes of each kind of event.
    """

    def __init__(self, tokenizer: MusicTokenizer, shapes: set[tuple[str, ...]]):
        self.tokenizer, self.shapes, self.graph = tokenizer, shapes, tokenizer.tokens_types_graph
        self.names = [sorted(vocabulary, key=vocabulary.get) for vocabulary in tokenizer.vocab]
        self.kind, self.bars, self.position = "BOS", 0, -1
        # What notes may be of: the instruments so far and drums, once there is no channel of MIDI for another.
        self.programs = {name for names in self.names for name in names if name.startswith("Program")}
        self.used: set[str] = set()
        # Notes that begin now, each as what tells it from others, and how many have each of that. One that begins
        # twice would be one.
        self.begun: set[frozenset[str]] = set()
        self.counts = Counter[str]()
        self.positions = 4 * tokenizer.config.max_num_pos_per_beat

    def shape(self, event: list[int]) -> tuple[str, ...]:
        return tuple(self.type_of(names[index]) for names, index in zip(self.names, event, strict=False))

    @staticmethod
    def type_of(name: str) -> str:
        """The type of a token; what an event is, a note or a matter of time, is the value of its family."""
        return name if name.startswith("Family") else name.split("_")[0]

    def kind_of(self, shape: tuple[str, ...]) -> str:
        """The kind of an event: the first of its types that the graph knows."""
        return next(kind for kind in shape[1:] if kind != "Ignore" and kind in self.graph)

    def allowed(self, event: list[int]) -> Tensor:
        """(V,) bool: which ids the attribute after those of an event may have."""
        begun = self.shape(event)
        place = len(begun)
        follows = {"Bar"} if self.kind == "BOS" else self.graph[self.kind]
        types = {
            shape[place]
            for shape in self.shapes
            if shape[:place] == begun and self.kind_of(shape) in follows and self._in_time(shape)
        }
        chosen = {names[index] for names, index in zip(self.names, event, strict=False)}
        return torch.tensor([self._fits(name, types) and self._is_new(chosen, name) for name in self.names[place]])

    def _in_time(self, shape: tuple[str, ...]) -> bool:
        return "Position" not in shape or self.position + 1 < self.positions

    def _fits(self, name: str, types: set[str]) -> bool:
        kind, value = name.split("_", 1)
        in_time = kind != "Position" or self.position < int(value) < self.positions
        return self.type_of(name) in types and in_time

    def _is_new(self, chosen: set[str], name: str) -> bool:
        """Whether there can be a note with this attribute, besides those chosen, that does not begin now already."""
        if not name.startswith(NOTE):
            return True
        if name.startswith("Program") and name not in self.programs:
            return False
        note = frozenset(other for other in chosen if other.startswith(NOTE)) | {name}
        if len(note) == 1 and self.programs:
            # By its pitch alone it can be of any program.
            return self.counts[name] < len(self.programs)
        return note not in self.begun

    def advance(self, event: list[int]):
        self.kind = self.kind_of(self.shape(event))
        chosen = [names[index] for names, index in zip(self.names, event, strict=True)]
        if note := frozenset(name for name in chosen if name.startswith(NOTE)):
            self.begun.add(note)
            self.counts.update(note)
        else:
            self.begun.clear()
            self.counts.clear()
        for name in chosen:
            kind, value = name.split("_", 1)
            if kind == "Program" and name != DRUMS:
                self.used.add(name)
                if len(self.used) == CHANNELS:
                    self.programs &= self.used | {DRUMS}
            if kind == "Bar":
                self.bars, self.position = self.bars + 1, -1
            elif kind == "Position":
                self.position = int(value)
            elif kind == "TimeSig":
                self.positions = int(value.split("/")[0]) * self.tokenizer.config.max_num_pos_per_beat


# --- data, training, scores ------------------------------------------------------------------------------------------


def read_data(folder: Path) -> tuple[dict[str, Tensor], MusicTokenizer]:
    """The events (N, A) of each split, and the tokenizer.

    Raises:
        ValueError: the folder is none of txl-prepare with compound tokens.
    """
    from datasets import load_from_disk

    if not is_midi_tokenizer(folder):
        raise ValueError(f"--data {folder} is no folder of txl-prepare --corpus midi")
    splits = load_from_disk(str(folder))
    if EVENTS not in splits["train"].column_names:
        raise ValueError(
            f"--data {folder} has plain tokens, which txl-train trains on: prepare with --tokens compound"
        )
    arrays = {name: np.stack(split.with_format("numpy")[EVENTS][:]) for name, split in splits.items()}
    return {name: torch.from_numpy(array.astype(np.int64)) for name, array in arrays.items()}, load_midi_tokenizer(
        folder
    )


def piece_ends(events: Tensor, end: list[int]) -> np.ndarray:
    """Behind which events pieces end."""
    return 1 + np.flatnonzero((events.numpy() == np.array(end)).all(axis=1))


def make_model(sizes: list[int], options: argparse.Namespace) -> CompoundModel:
    config = TransfoXLConfig(
        vocab_size=0,
        cutoffs=[],
        d_model=options.width,
        n_head=4,
        d_head=options.width // 4,
        d_inner=4 * options.width,
        n_layer=options.layers,
        tgt_len=options.segment_length,
        mem_len=options.memory_length,
        same_length=False,
        clamp_len=-1,
        initial_memory="empty",
        pre_lnorm=True,
        dropout=0.1,
        dropatt=0.0,
    )
    return CompoundModel(config, sizes)


def train(model: CompoundModel, events: Tensor, ends: np.ndarray, options: argparse.Namespace):
    # A stream cuts one sequence of numbers into segments: here it is the numbers of the events.
    numbers = np.arange(len(events))
    stream = TokenStream(numbers, options.segment_length, options.batch_size, document_end=ends)
    loader = DataLoader(stream, batch_size=options.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, options.steps // 10, options.steps)
    model.train()
    bar = tqdm(total=options.steps, desc="train")
    while bar.n < options.steps:
        memory: dict[str, Any] = {}
        for _, batch in zip(range(options.steps - bar.n), loader, strict=False):
            states, memory = model.read(events[batch["input_ids"]], resets=batch["resets"], **memory)
            loss = model.losses(states, events[batch["shift_labels"]]).sum()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            bar.set_postfix_str(f"{loss.item():.2f} nats per event", refresh=False)
            bar.update()


@torch.no_grad()
def score(model: CompoundModel, events: Tensor, ends: np.ndarray, memory_length: int) -> Tensor:
    """Bits of each attribute of an event, (A,), of pieces that are read one after the other, each afresh."""
    trained_with = model.transformer.config.mem_len
    model.eval().transformer.reset_memory_length(memory_length)
    length = model.transformer.config.tgt_len
    total, count = torch.zeros(len(model.heads)), 0
    for piece in torch.tensor_split(events, torch.from_numpy(ends[:-1])):
        memory: dict[str, Any] = {}
        for begin in range(0, len(piece) - 1, length):
            targets = piece[None, begin + 1 : begin + length + 1]
            states, memory = model.read(piece[None, begin : begin + targets.shape[1]], **memory)
            total += model.losses(states, targets) * targets.shape[1]
            count += targets.shape[1]
    model.transformer.reset_memory_length(trained_with)
    return total / count / math.log(2)


@torch.no_grad()
def write(
    model: CompoundModel, tokenizer: MusicTokenizer, shapes: set, options: argparse.Namespace, longest: int
) -> list[list[int]]:
    """The events of a piece of so many bars, `longest` at most."""
    model.eval()
    begin, _ = boundary_tokens(tokenizer)
    grammar, events = EventGrammar(tokenizer, shapes), [begin]
    memory: dict[str, Any] = {}
    while len(events) <= longest:
        states, memory = model.read(torch.tensor([[events[-1]]]), **memory)
        event = model.choose(states[0, -1], grammar.allowed, options.temperature)
        grammar.advance(event)
        if grammar.bars > options.bars:
            break
        events.append(event)
    return events[1:]


def main(arguments: list[str] | None = None):
    options = parse_arguments(arguments)
    with one_line_errors():
        set_seed(options.seed)
        if options.output.exists():
            raise ValueError(f"--output {options.output} exists: choose another folder")
        splits, tokenizer = read_data(options.data)
        begin, end = boundary_tokens(tokenizer)
        ends = {name: piece_ends(events, end) for name, events in splits.items()}
        model = make_model(tokenizer.len, options)
        train(model, splits["train"], ends["train"], options)
        print(f"Bits of each attribute of an event of the test split ({len(splits['test']):,} events)")
        attributes = sorted(tokenizer.vocab_types_idx.items(), key=lambda pair: pair[1])
        named = {place: name for name, place in reversed(attributes)}
        print(f"{'memory':>8}" + "".join(f"{named[i]:>10}" for i in range(len(named))) + f"{'event':>10}")
        for memory_length in (0, options.memory_length):
            bits = score(model, splits["test"], ends["test"], memory_length)
            print(f"{memory_length:>8}" + "".join(f"{figure:10.3f}" for figure in [*bits, bits.sum()]))
        grammar = EventGrammar(tokenizer, set())
        kinds = {grammar.shape(event) for event in splits["train"].unique(dim=0).tolist() if event not in (begin, end)}
        with whole_folder(options.output) as folder:
            config = model.transformer.config.to_dict()
            torch.save({"config": config, "weights": model.state_dict()}, folder / "model.pt")
            tokenizer.save_pretrained(folder)
            (folder / "shapes.json").write_text(json.dumps(sorted(kinds)))
            for i in range(1, options.pieces + 1):
                events = write(model, tokenizer, kinds, options, LONGEST)
                if len(events) == LONGEST:
                    print(f"piece {i} is cut short, as {LONGEST:,} events have fewer than --bars {options.bars}.")
                music = to_score(tokenizer, events)
                music.dump_midi(folder / f"piece-{i}.mid")
                draw(music, folder / f"piece-{i}.png", f"piece {i}")
    print(f"{options.output} has the model and {options.pieces} piece(s).")


if __name__ == "__main__":
    main()
