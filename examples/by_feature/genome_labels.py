"""Label each base of a genome: in a gene of the + strand, of the - strand, or between genes; with memory, and without.

    python examples/by_feature/genome_labels.py --fasta ecoli.fna --genes ecoli.gff3 --output genome-labels
    python examples/by_feature/genome_labels.py --smoke

The genome is FASTA, its genes are the CDS rows of GFF3, as NCBI and ENA give them out; either may end in .gz. The last
part of it is held out. Two models like each other learn from the rest, in windows of `--window` bases: one reads the
chromosome from end to end with memory, the other each window by itself. Then both label the held-out part, the first
in one pass with memory, and their F1 is printed and written to results.json. The model with memory is kept in `model`:
`TransfoXLForTokenClassification`, whose tokens `encode` makes.

What is added to a model of tokens:
(1) a base is read as the `ORDER` bases that end with it and its position modulo 3, because genes have a period of
    three, which sinusoids of Transformer-XL, the shortest of them 6.3 long, have not;
(2) the label of a base is asked `--lookahead` bases later, because the model sees nothing that follows; without memory
    as many bases before a window are read with it, so that no base is labelled unseen;
(3) where a sequence of several begins, everything is forgotten (`resets`).
"""

import argparse
import gzip
import json
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import common
from txl_hf.command_line import at_least_one, at_least_zero, existing_file, new_path, one_line_errors, positive

PARSER = common.Parser(__doc__)
PARSER.add_argument("--fasta", type=existing_file, required=True, help="the genome")
PARSER.add_argument(
    "--genes", type=existing_file, required=True, help="its genes: GFF3, of which the CDS rows are read"
)
PARSER.add_argument("--output", type=new_path, required=True, help="a new folder for the model and results.json")
PARSER.add_argument("--held_out", type=float, default=0.2, help="the last part, to label (%(default)s)")
PARSER.add_argument("--window", type=at_least_one, default=128, help="bases in a window (%(default)s)")
PARSER.add_argument("--memory", type=at_least_zero, default=256, help="bases that each layer remembers (%(default)s)")
PARSER.add_argument(
    "--lookahead", type=at_least_zero, default=32, help="bases read before one is labelled (%(default)s)"
)
PARSER.add_argument(
    "--passes", type=at_least_one, default=1, help="how often the genome is learned from (%(default)s)"
)
PARSER.add_argument("--batch_size", type=at_least_one, default=32, help="places that are read at once (%(default)s)")
PARSER.add_argument("--width", type=at_least_one, default=64, help="d_model (%(default)s)")
PARSER.add_argument("--learning_rate", type=positive, default=2e-3, help="at most (%(default)s)")
PARSER.add_argument("--seed", type=at_least_zero, default=1, help="of the first weights (%(default)s)")

if __name__ == "__main__":
    PARSER.refuse_first()

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from txl_hf import TransfoXLForTokenClassification
from txl_hf.files import whole_folder
from txl_hf.memories import memory_of

LABELS = ["none", "+", "-"]
# What GFF3 has for a strand that is not known, or none.
UNKNOWN = ["?", "."]
ORDER = 4
# Of each position modulo 3: all words of four letters, and one for those that hold another letter or none.
WORDS = 4**ORDER + 1
IGNORED = -100


def smoke(folder: Path) -> list[str | Path]:
    """A plasmid of the plague's bacterium, whole."""
    plasmid = Path(__file__).parent / "genome" / "NC_005816"
    sizes = ["--window", "64", "--memory", "64", "--passes", "6", "--batch_size", "8", "--width", "32"]
    files: list[str | Path] = ["--fasta", plasmid.with_suffix(".fna"), "--genes", plasmid.with_suffix(".gff3")]
    return [*files, "--output", folder / "output", *sizes]


# --- the genome ------------------------------------------------------------------------------------------------------


class Genome(NamedTuple):
    """Sequences behind one another, (n,) each: tokens, the label that is asked at each of them, where one begins."""

    tokens: Tensor
    labels: Tensor
    begins: Tensor

    def part(self, start: int, stop: int) -> "Genome":
        return Genome(*(each[start:stop] for each in self))


@contextmanager
def open_text(path: Path) -> Iterator[IO[str]]:
    """The text of a file, which may be compressed. Raises a ValueError that names it where it is broken."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def read_sequences(path: Path) -> dict[str, str]:
    """{name: bases} of a FASTA file."""
    sequences: dict[str, list[str]] = {}
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if line.startswith(">"):
                name = line[1:].split(maxsplit=1)[0] if line[1:].strip() else ""
                if not name or name in sequences:
                    raise ValueError(f"{path}:{number}: a sequence needs a name of its own, not {name!r}")
                sequences[name] = []
            elif line.strip():
                if not sequences or not (line.strip().isascii() and line.strip().isalpha()):
                    raise ValueError(f"{path}:{number}: {line.strip()[:20]!r} is neither a name (>…) nor bases")
                sequences[name].append(line.strip().upper())
    if empty := [name for name, lines in sequences.items() if not lines]:
        raise ValueError(f"{path} holds no bases of {empty[0]}")
    if not sequences:
        raise ValueError(f"{path} holds no bases")
    return {name: "".join(lines) for name, lines in sequences.items()}


def read_labels(path: Path, lengths: dict[str, int]) -> dict[str, Tensor]:
    """{name: (n,) numbers in LABELS} for sequences of these lengths; IGNORED where genes of both strands lie, or one
    of an unknown strand.

    A gene that goes on behind the end of its sequence goes on at its beginning: chromosomes are circles.
    """
    strands = {name: torch.zeros(len(LABELS), length, dtype=torch.bool) for name, length in lengths.items()}
    genes = 0
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if line.startswith("##FASTA"):
                break
            fields = line.rstrip("\n").split("\t")
            if line.startswith("#") or not line.strip() or (len(fields) == 9 and fields[2] != "CDS"):
                continue
            if (
                len(fields) != 9
                or not (fields[3].isdecimal() and fields[4].isdecimal())
                or fields[6] not in LABELS[1:] + UNKNOWN
            ):
                raise ValueError(f"{path}:{number} is no row of GFF3: it needs nine columns, two numbers and a strand")
            name, first, last = fields[0], int(fields[3]), int(fields[4])
            if name not in lengths:
                raise ValueError(f"{path}:{number} is of {name}, but the sequences are {', '.join(lengths)}"[:200])
            if not 1 <= first <= min(last, lengths[name]) or last - first >= lengths[name]:
                raise ValueError(f"{path}:{number}: {first} to {last} does not lie in {lengths[name]} bases")
            bases = torch.arange(first - 1, last) % lengths[name]
            # Of a strand that is not known it may be either's.
            for strand in LABELS[1:] if fields[6] in UNKNOWN else [fields[6]]:
                strands[name][LABELS.index(strand), bases] = True
            genes += 1
    if not genes:
        raise ValueError(f"{path} holds no row of type CDS")
    return {name: found.long().argmax(0).masked_fill(found.sum(0) > 1, IGNORED) for name, found in strands.items()}


def encode(sequence: str, lookahead: int = 0) -> Tensor:
    """(n + lookahead,) tokens of n bases: see (1) above. The last ones stand for what follows: nothing."""
    letters = torch.frombuffer(bytearray(sequence, "ascii"), dtype=torch.uint8)
    table = torch.full((256,), 4)
    table[list(b"ACGT")] = torch.arange(4)
    bases = F.pad(table[letters.long()], (ORDER - 1, lookahead), value=4).unfold(0, ORDER, 1)
    words = (bases * 4 ** torch.arange(ORDER)).sum(-1).masked_fill((bases == 4).any(-1), WORDS - 1)
    return words + WORDS * (torch.arange(len(words)) % 3)


def read_genome(fasta: Path, genes: Path, lookahead: int) -> Genome:
    """All sequences of the files. Each base is labelled once, `lookahead` tokens after its own."""
    sequences = read_sequences(fasta)
    labels = read_labels(genes, {name: len(sequence) for name, sequence in sequences.items()})
    parts = []
    for name, sequence in sequences.items():
        tokens = encode(sequence, lookahead)
        begins = torch.arange(len(tokens)) == 0
        parts.append(Genome(tokens, F.pad(labels[name], (lookahead, 0), value=IGNORED), begins))
    return Genome(*(torch.cat(each) for each in zip(*parts, strict=True)))


def windows(genome: Genome, length: int, rows: int, reread: int = 0) -> Iterator[dict[str, Tensor]]:
    """Calls of the model, (rows, reread + length) each: as many places of the genome, which are read on from call to
    call. What is read again is asked no label."""
    steps = len(genome.tokens) // rows
    tokens, labels, begins = (each[: rows * steps].view(rows, steps) for each in genome)
    for start in range(0, steps, length):
        again = min(start, reread)
        part = slice(start - again, start + length)
        asked = labels[:, part].clone()
        asked[:, :again] = IGNORED
        yield {"input_ids": tokens[:, part], "labels": asked, "resets": begins[:, part]}


# --- the models ------------------------------------------------------------------------------------------------------


def make_model(options: argparse.Namespace, memory: int) -> TransfoXLForTokenClassification:
    torch.manual_seed(options.seed)
    return TransfoXLForTokenClassification(
        common.small_config(
            3 * WORDS,
            width=options.width,
            mem_len=memory,
            tgt_len=options.window,
            id2label=dict(enumerate(LABELS)),
            label2id={label: i for i, label in enumerate(LABELS)},
        )
    )


def reread_by(model: TransfoXLForTokenClassification, options: argparse.Namespace) -> int:
    """Bases before a window that are read with it: those that its first labels are of, where no memory has them."""
    return options.lookahead if model.config.mem_len == 0 else 0


def train(model: TransfoXLForTokenClassification, genome: Genome, options: argparse.Namespace):
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    calls = -(-(len(genome.tokens) // options.batch_size) // options.window) * options.passes
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, calls, pct_start=0.1)
    reread = reread_by(model, options)
    bar = tqdm(total=calls, unit="window", desc=f"memory of {model.config.mem_len}")
    for _ in range(options.passes):
        memory: dict = {}
        for batch in windows(genome, options.window, options.batch_size, reread):
            outputs = model(**batch, **memory)
            outputs.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            memory = memory_of(outputs)
            bar.update()
            if bar.n % 20 == 0:
                bar.set_postfix_str(f"loss {outputs.loss.item():.3f}")
    bar.close()


@torch.no_grad()
def confusion(model: TransfoXLForTokenClassification, genome: Genome, options: argparse.Namespace) -> Tensor:
    """(labels, labels), how many bases of each label (rows) were given each (columns), in one pass over the genome."""
    model.eval()
    counts, memory = torch.zeros(len(LABELS) ** 2, dtype=torch.long), dict[str, Tensor]()
    for batch in windows(genome, options.window, 1, reread_by(model, options)):
        labels = batch.pop("labels")
        outputs = model(**batch, **memory)
        memory = memory_of(outputs)
        asked = labels != IGNORED
        pairs = labels[asked] * len(LABELS) + outputs.logits.argmax(-1)[asked]
        counts += pairs.bincount(minlength=len(counts))
    return counts.view(len(LABELS), len(LABELS))


def f1_of(counts: Tensor) -> dict[str, float]:
    """The F1 of each label, of bases, and their mean."""
    right, sizes = counts.diag(), counts.sum(0) + counts.sum(1)
    scores = (2 * right / sizes.clamp(min=1)).tolist()
    return {**dict(zip(LABELS, scores, strict=True)), "mean": sum(scores) / len(scores)}


def main():
    options = common.parse_arguments(PARSER, smoke)
    with one_line_errors():
        if not 0 < options.held_out < 1:
            raise ValueError(f"--held_out {options.held_out} must lie between 0 and 1")
        genome = read_genome(options.fasta, options.genes, options.lookahead)
        border = round(len(genome.tokens) * (1 - options.held_out))
        learned, held_out = genome.part(0, border), genome.part(border, None)
        if border < options.batch_size * options.window:
            raise ValueError(
                f"{options.fasta} has {border} places to learn from, but --batch_size {options.batch_size} of them "
                f"need a --window of {options.window} each"
            )
        bases, held_out_bases = (int((part.labels != IGNORED).sum()) for part in (learned, held_out))
        if not bases:
            raise ValueError(f"--lookahead {options.lookahead} leaves no base to learn from: give a shorter one")
        if not held_out_bases:
            raise ValueError(f"--held_out {options.held_out} of {options.fasta} has no base to label: hold out more")
        # What it refuses, it refuses before the other one is trained.
        make_model(options, options.memory)
    print(f"{bases} bases to learn from; {held_out_bases} held out.")
    results: dict = {"held_out_bases": held_out_bases}
    with whole_folder(options.output) as folder:
        for name, memory in (("window by window", 0), ("with memory", options.memory)):
            started = time.perf_counter()
            model = make_model(options, memory)
            train(model, learned, options)
            scores = f1_of(confusion(model, held_out, options))
            seconds = time.perf_counter() - started
            results[name] = {**scores, "seconds": round(seconds, 1)}
            print(f"F1 {name}: " + ", ".join(f"{label} {score:.3f}" for label, score in scores.items()))
        model.save_pretrained(folder / "model")
        (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
