"""The paper's ablation (Tables 6, 7 and 10, Figure 4b): recurrence × encoding × loss, trained alike and tabulated.

    python examples/paper/ablation.py                          # the miniature of Tables 6 and 10, three seeds
    python examples/paper/ablation.py --shuffled               # Table 7: what is left of it in shuffled sentences
    python examples/paper/ablation.py --rows recurrence-ours-full none-ours-full --seeds 0
    python examples/paper/ablation.py --smoke --output build/ablation

All rows see the same text in the same order and take equally many optimiser steps, so that a row with half losses has
half as many targets, and one with longer segments more; each row of `rows.csv` says both. Rows named `-longer` and
`-shorter` have the steps that make targets equal instead. A run that was stopped goes on where it was: the same
command again. Models are kept in `--work`, results in `--output`: `rows.csv`, `curves.csv` (perplexity by attention
length), `curves.png` and `curves_shuffled.png`, and `log.txt`. The tables, with the paper's figures beside ours and
what holds of its orders, are printed.

Attention length n is, with recurrence, a memory of n that each query sees exactly (`same_length`); without, a window
of n tokens of which the last quarter is scored (with `--exact` the last one). All lengths score the same tokens; the
test text is scored at two of them.
"""

import argparse
import dataclasses
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

# One thread a process; read by torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import matplotlib
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import harness
from contenders import ROWS, Row, count_parameters, losses_of, make_model, segments, sizes_of
from miniature import (
    MINIATURE,
    RESULTS,
    SHUFFLED,
    Corpus,
    MiniatureParser,
    Sizes,
    describe,
    prepare,
    shuffle_sentences,
)
from study import keep_options, options_that_differ
from txl_hf import TokenStream, TransfoXLForCausalLM, evaluate_language_model
from txl_hf.command_line import at_least_one, at_least_zero, one_line_errors
from txl_hf.evaluation.language_model import perplexity
from txl_hf.files import whole_file, write_text

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402 -- after the choice of what draws.

# Rows that stand in Tables 6 and 10 and beside them; what Table 8 compares with has no attention length.
TABLE = [name for name, row in ROWS.items() if row.kind == "transfo-xl"]
TABLE_6 = {name: row.paper for name, row in ROWS.items()}
TABLE_7 = {"recurrence-ours-full": "25.2", "recurrence-shaw-full": "25.7", "none-ours-full": "27.1"}
CONTROL = list(TABLE_7)
# Panels of `curves.png`. The rows that are in none have another number of steps, or the same line as one of these.
PANELS = {
    "encodings without recurrence": ["none-ours-full", "none-shaw-full", "none-vaswani-full", "none-al-rfou-full"],
    "recurrence": ["recurrence-ours-full", "recurrence-shaw-full", "recurrence-vaswani-full", "none-ours-full"],
    "half losses": [
        "recurrence-ours-half",
        "none-ours-half",
        "none-shaw-half",
        "none-vaswani-half",
        "none-al-rfou-half",
    ],
    "longer segments (Table 10)": [
        "recurrence-ours-full",
        "none-ours-full-176",
        "none-ours-full-176-shorter",
        "recurrence-ours-half",
        "none-ours-half-172",
        "none-ours-half-172-shorter",
    ],
}
# (better, worse) by the best perplexity in Table 6.
ORDERS = [
    ("recurrence-ours-full", "none-ours-full"),
    ("recurrence-ours-full", "recurrence-shaw-full"),
    ("recurrence-ours-full", "recurrence-ours-half"),
    ("recurrence-ours-full", "recurrence-ours-half-longer"),
    ("none-ours-full", "none-shaw-full"),
    ("none-ours-full", "none-ours-half"),
    ("none-ours-full", "none-ours-half-longer"),
    ("none-shaw-full", "none-shaw-half"),
    ("none-shaw-full", "none-shaw-half-longer"),
    ("none-ours-half", "none-shaw-half"),
    ("none-shaw-half", "none-vaswani-half"),
    ("none-vaswani-half", "none-al-rfou-half"),
    # Table 10: a longer segment does not make up for the memory.
    ("recurrence-ours-full", "none-ours-full-176"),
    ("recurrence-ours-full", "none-ours-full-176-shorter"),
    ("recurrence-ours-half", "none-ours-half-172"),
    ("recurrence-ours-half", "none-ours-half-172-shorter"),
    # Section 4.2: absolute positions need half losses. Section 3.3: and cannot have recurrence.
    ("none-vaswani-half", "none-vaswani-full"),
    ("none-vaswani-half-longer", "none-vaswani-full"),
    ("none-al-rfou-half", "none-al-rfou-full"),
    ("none-al-rfou-half-longer", "none-al-rfou-full"),
    ("none-vaswani-full", "recurrence-vaswani-full"),
]
# Columns of `made_with`.
OPTIONS = ("shaw", "window", *describe(MINIATURE))
SAVE_EVERY = 60


@dataclasses.dataclass(frozen=True)
class Job:
    """One run: a row with a seed, on the text as it is or shuffled."""

    row: Row
    seed: int
    sizes: Sizes
    work: Path
    shuffled: bool = False
    exact: bool = False

    @property
    def folder(self) -> Path:
        text = "shuffled-" if self.shuffled else ""
        return self.work / f"{text}{self.row.name}-{self.seed}"

    def corpus(self) -> Corpus:
        corpus = prepare(self.work / "corpus", self.sizes)
        if not self.shuffled:
            return corpus
        tgt_len, _ = segments(self.row, self.sizes)
        return shuffle_sentences(corpus, self.sizes.streams, tgt_len, self.sizes.steps)


def main(argv: list[str] | None = None):
    options = parse_arguments(argv)
    transformers.logging.disable_progress_bar()
    with one_line_errors():
        sizes = options.sizes
        if options.steps is not None:
            sizes = dataclasses.replace(sizes, steps=options.steps)
        names = options.rows or (CONTROL if options.shuffled else TABLE)
        jobs = [
            Job(
                dataclasses.replace(ROWS[name], shaw=options.shaw or ROWS[name].shaw),
                seed,
                sizes_of(ROWS[name], sizes),
                options.work,
                options.shuffled,
                options.exact,
            )
            for seed in options.seeds
            for name in names
        ]
        run(jobs, options.output, options.workers)
        report(options.output)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = MiniatureParser(__doc__, RESULTS)
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--seeds", type=at_least_zero, nargs="+", default=[0, 1, 2], help="(%(default)s)")
    parser.add_argument("--steps", type=at_least_one, help="optimiser steps of a run (those of the sizes)")
    parser.add_argument("--shuffled", action="store_true", help="Table 7: shuffle the sentences of the texts")
    parser.add_argument(
        "--shaw", choices=["code", "paper"], help="with the terms (c) and (d), as the code, or without"
    )
    parser.add_argument("--exact", action="store_true", help="windows of which only the last token is scored")
    parser.add_argument(
        "--workers", type=at_least_one, default=1, help="runs at a time, one thread each (%(default)s)"
    )
    return parser.parse_study(argv)


def run(jobs: list[Job], output: Path, workers: int):
    """Train and score what is not in the results yet; each run's rows are written when it is done.

    Raises:
        ValueError: the results have a run that was made with other options, of whatever seed: a table has the mean.
    """
    rows = harness.read(output / "rows.csv")
    done = {(row["row"], row["seed"], row["text"]) for row in rows}
    corpus = jobs[0].corpus()
    for job in jobs:
        today = {name: str(value) for name, value in made_with(job).items()}
        for found in rows:
            alike = (found["row"], found["text"]) == (job.row.name, corpus.name)
            if alike and (changed := options_that_differ({name: found[name] for name in today}, today)):
                run = f"{job.row.name}, seed {found['seed']}"
                raise ValueError(f"{output} has {run} of other options: {changed}; name another --output")
    left = [job for job in jobs if key(job, corpus) not in done]
    say(f"{len(jobs) - len(left)} of {len(jobs)} runs are done", output)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for row, curve in pool.map(train_and_score, left):
            harness.append(output / "curves.csv", curve)
            harness.append(output / "rows.csv", [row])
            init, best, length = (row[name] or "–" for name in ("init", "best", "length"))
            say(f"{row['row']}, seed {row['seed']}: {init}, best {best} @ {length}", output)


def say(line: str, output: Path):
    """Print a line, and keep it in `log.txt`."""
    print(line, flush=True)
    output.mkdir(parents=True, exist_ok=True)
    with (output / "log.txt").open("a", encoding="utf-8") as log:
        log.write(f"{line}\n")


def key(job: Job, corpus: Corpus) -> tuple[str, str, str]:
    return job.row.name, str(job.seed), corpus.name


def made_with(job: Job) -> dict[str, Any]:
    """The columns of a row that say how it was trained and scored."""
    return {"shaw": job.row.shaw, "window": "exact" if job.exact else "quarter", **describe(job.sizes)}


# ---- training ---------------------------------------------------------------------------------------------------


def trained(row: str, options: argparse.Namespace, seed: int = 0) -> tuple[Any, Corpus, str]:
    """A row's model for another study, trained if it is not there yet; its text; and what the two are called."""
    job = Job(ROWS[row], seed, sizes_of(ROWS[row], options.sizes), options.work)
    corpus = job.corpus()
    return train(job, corpus)[0], corpus, f"{row} of the miniature, {corpus.name}"


def train_and_score(job: Job) -> tuple[dict, list[dict]]:
    """The row of a run for `rows.csv`, and its lines for `curves.csv`."""
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    corpus = job.corpus()
    model, spent = train(job, corpus)
    curve = score(model, job, corpus) if job.row.kind == "transfo-xl" else []
    tgt_len, ext_len = segments(job.row, job.sizes)
    targets = job.sizes.steps * job.sizes.streams * tgt_len
    points = {row["length"]: row["perplexity"] for row in curve if row["protocol"] == protocol(job.row)}
    best = min(points.values(), default=math.nan)
    # As the paper: the shortest length that is as good as the best, to the decimals that are printed.
    shortest = min((n for n in points if round(points[n], 2) == round(best, 2)), default=0)
    init = tgt_len + ext_len if has_init(job.row, job.sizes.segment) else 0
    tested = {
        n: perplexity_at(model, corpus.texts["test"], protocol(job.row), n, job)
        for n in {shortest, init} & set(points)
    }
    row = {
        **harness.origin("cpu", "fp32", torch.get_num_threads()),
        **harness.versions(),
        "text": corpus.name,
        "row": job.row.name,
        "seed": job.seed,
        "parameters": count_parameters(model),
        "tgt_len": tgt_len,
        "ext_len": ext_len,
        "targets": targets,
        "init": points.get(init, ""),
        "best": best if points else "",
        "length": shortest or "",
        "test_init": tested.get(init, ""),
        "test_best": tested.get(shortest, ""),
        "processor_seconds": round(spent),
        "targets_per_second": round(targets / spent),
        **made_with(job),
    }
    return row, curve


def train(job: Job, corpus: Corpus) -> tuple[Any, float]:
    """The trained model and its seconds of processor time; from where an earlier call was stopped, if one was.

    Raises:
        ValueError: what that one began has other options.
    """
    row, sizes, folder = job.row, job.sizes, job.folder
    finished, state_path = folder / "seconds.txt", folder / "state.pt"
    keep_options(folder / "options.json", begun_with(row, sizes, corpus))
    if finished.exists():
        return AutoModelForCausalLM.from_pretrained(folder), float(finished.read_text())
    torch.manual_seed(job.seed)
    tgt_len, ext_len = segments(row, sizes)
    stream = TokenStream(corpus.texts["train"], tgt_len, sizes.streams, ext_len=ext_len)
    model = make_model(row, sizes, len(corpus.tokenizer))
    optimizer = torch.optim.Adam(model.parameters(), lr=sizes.learning_rate, betas=(0.9, 0.98))
    first, mems, before = 0, None, 0.0
    if state_path.exists():
        state = torch.load(state_path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, mems, before = state["step"], state["mems"], state["seconds"]
    started, saved = time.process_time(), time.monotonic()
    model.train()
    for step in range(first, sizes.steps):
        if step % stream.steps == 0:
            mems = None
        begin = step % stream.steps * sizes.streams
        items = [stream[index] for index in range(begin, begin + sizes.streams)]
        batch = {name: torch.stack([item[name] for item in items]) for name in items[0]}
        for group in optimizer.param_groups:
            group["lr"] = sizes.learning_rate * schedule(step / sizes.steps)
        losses, mems = losses_of(model, **batch, mems=mems)
        loss = losses.sum() / (batch["shift_labels"] != -100).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if not math.isfinite(loss.item()):
            raise FloatingPointError(f"the loss of {row.name} is {loss.item()} at step {step}")
        if time.monotonic() - saved > SAVE_EVERY:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1, "mems": mems}
            save_state({**state, "seconds": before + time.process_time() - started}, state_path)
            saved = time.monotonic()
    spent = before + time.process_time() - started
    model.eval().save_pretrained(folder)
    write_text(finished, str(spent))
    state_path.unlink(missing_ok=True)
    return model, spent


def begun_with(row: Row, sizes: Sizes, corpus: Corpus) -> dict[str, Any]:
    """The settings in which a run that goes on must equal the one that was stopped."""
    return {"text": corpus.name, "files": corpus.files, "shaw": row.shaw, **describe(sizes)}


def schedule(done: float) -> float:
    """Warm-up over the first tenth of training, then cosine decay to a twentieth."""
    return min(1, 10 * done + 0.001) * (0.05 + 0.95 * math.cos(math.pi / 2 * done) ** 2)


def save_state(state: dict, path: Path):
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as aside:
        torch.save(state, aside)


# ---- scores -----------------------------------------------------------------------------------------------------


def protocol(row: Row) -> str:
    return "memory" if row.recurrence else "window"


def score(model: TransfoXLForCausalLM, job: Job, corpus: Corpus) -> list[dict]:
    """Validation perplexity at each attention length; with relative positions and no recurrence also with memory."""
    sizes, row = job.sizes, job.row
    lengths = sorted({max(1, round(n * sizes.segment)) for n in sizes.lengths})
    protocols = [protocol(row)]
    if not row.recurrence and row.encoding in (0, 1):
        protocols.append("memory")
    return [
        {
            "text": corpus.name,
            "row": row.name,
            "seed": job.seed,
            "steps": sizes.steps,
            "protocol": kind,
            "length": length,
            "perplexity": perplexity_at(model, corpus.texts["validation"], kind, length, job),
        }
        for kind in protocols
        for length in lengths
        if kind == "memory" or length <= (model.config.max_klen or length)
    ]


def perplexity_at(model: TransfoXLForCausalLM, token_ids, kind: str, length: int, job: Job) -> float:
    """Perplexity to four decimals, of the same tokens whatever the length: those after the longest one in a stream."""
    sizes, settings = job.sizes, dict[str, Any]()
    if kind == "memory":
        # Absolute positions with recurrence count within a segment, which must be as long as in training.
        relative = job.row.encoding < 2
        segment = max(1, sizes.segment // 4) if relative else sizes.segment
        settings = {"segment_length": segment, "memory_length": length, "ext_len": 0, "same_length": relative}
    else:
        segment = 1 if job.exact else max(1, length // 4)
        settings = {"segment_length": segment, "memory_length": 0, "ext_len": length - segment, "same_length": False}
    result = evaluate_language_model(
        model, token_ids, batch_size=sizes.evaluation_streams, warm_up=sizes.longest, clamp_len=-1, **settings
    )
    return round(perplexity(result.nll), 4)


# ---- tables -----------------------------------------------------------------------------------------------------


def report(output: Path):
    """Print the tables, and draw the curves, from the rows."""
    rows = harness.read(output / "rows.csv")
    texts = dict.fromkeys(row["text"] for row in rows)
    parts = [
        f"### {text}\n\n{table(chosen, TABLE_7 if SHUFFLED in text else TABLE_6)}\n\n{orders(chosen)}\n"
        for text in texts
        if (chosen := of(rows, text))
    ]
    print("\n".join(parts))
    # An LSTM and a GPT-2 have none.
    if curves := harness.read(output / "curves.csv"):
        plot(curves, output)


def of(rows: list[dict[str, str]], text: str) -> list[dict[str, str]]:
    """The rows of one text that have an attention length, in the order of the tables.

    Raises:
        ValueError: rows of one name, whose mean a table has, were made with different options.
    """
    names = list(ROWS)
    chosen = [row for row in rows if row["text"] == text and row["best"]]
    firsts: dict[str, dict[str, str]] = {}
    for row in chosen:
        first = firsts.setdefault(row["row"], row)
        if changed := options_that_differ(*({name: each[name] for name in OPTIONS} for each in (first, row))):
            seeds = f"seeds {first['seed']} and {row['seed']}"
            raise ValueError(
                f"{row['row']} has {seeds} of different options: {changed}; remove the rows of one of them"
            )
    return sorted(chosen, key=lambda row: (names.index(row["row"]), int(row["seed"])))


def values(rows: Iterable[dict[str, str]], name: str, column: str) -> list[float]:
    return [float(row[column]) for row in rows if row["row"] == name and row[column]]


def inits(rows: Iterable[dict[str, str]], name: str) -> list[float]:
    """The perplexities at the attention length of training; none where it is not among the lengths, as in the paper.

    Committed rows of such a name still have there what they reach at the length of the other rows.
    """
    return values((row for row in rows if has_init(ROWS[name], int(row["segment"]))), name, "init")


def has_init(row: Row, segment: int) -> bool:
    """Whether a row is trained at the length of the others, which is among those that are scored."""
    return training_length(row, segment) == segment


def training_length(row: Row, segment: int) -> int:
    """Words of a row's own segments, where those of the table have so many."""
    return sum(segments(row, dataclasses.replace(MINIATURE, segment=segment)))


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def table(rows: list[dict[str, str]], papers: Mapping[str, str] = TABLE_6) -> str:
    """The paper's columns; and the paper's own init / best @ attention length, or perplexity in Table 7."""
    head = ["row", "seeds", "targets", "init", "best", "at", "beyond", "test", "paper"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in dict.fromkeys(row["row"] for row in rows):
        chosen = [row for row in rows if row["row"] == name]
        cells = [
            name,
            str(len(chosen)),
            f"{int(chosen[0]['targets']):,}",
            harness.with_range(inits(chosen, name), 2),
            harness.with_range(values(chosen, name, "best"), 2),
            ", ".join(dict.fromkeys(row["length"] for row in chosen)),
            gain_beyond(chosen, name),
            harness.with_range(values(chosen, name, "test_best"), 2),
            papers.get(name, "–"),
        ]
        # Within a figure no line breaks.
        cells = [cell if ", " in cell else cell.replace(" ", "\u202f") for cell in cells]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def gain_beyond(rows: list[dict[str, str]], name: str) -> str:
    """How much perplexity falls beyond the attention length of training, and for how many of a row's seeds it does."""
    longer = [int(row["length"]) > training_length(ROWS[name], int(row["segment"])) for row in rows]
    # What a shorter length gains is no gain beyond it.
    found = zip(inits(rows, name), values(rows, name, "best"), longer, strict=False)
    gains = [(init - best) * further for init, best, further in found]
    return f"{f'{mean(gains):+.2f}' if gains else '–'} ({sum(longer)} of {len(longer)})"


def spread_of(*rows: list[float]) -> float | None:
    """The widest range over the seeds of a row; None where one has a single seed, and may lie anywhere in its own."""
    return max(max(seeds) - min(seeds) for seeds in rows) if min(map(len, rows)) > 1 else None


def orders(rows: list[dict[str, str]]) -> str:
    """For each of the paper's pairwise orders whether ours are in that order."""
    lines = []
    for better, worse in ORDERS:
        ours, others = values(rows, better, "best"), values(rows, worse, "best")
        if ours and others:
            difference = mean(others) - mean(ours)
            said = verdict(difference, spread_of(ours, others))
            lines.append(f"* {better} before {worse}: {said} ({difference:+.2f})")
    return (
        "Orders of the paper, by the best perplexity. An order holds where the means differ by more than the seeds of "
        "either row do:\n\n"
    ) + "\n".join(lines)


def verdict(difference: float, spread: float | None) -> str:
    if spread is None:
        return "holds with one seed" if difference > 0 else "does not hold with one seed"
    if abs(difference) <= spread:
        return "within the spread of the seeds"
    return "holds" if difference > 0 else "does not hold"


def plot(curves: list[dict[str, str]], output: Path):
    """Perplexity by attention length (Figure 4b): a picture a text, the mean over the seeds, and their range."""
    points: dict[tuple[str, str], dict[int, list[float]]] = {}
    for row in curves:
        if row["protocol"] == protocol(ROWS[row["row"]]):
            by_length = points.setdefault((row["text"], row["row"]), {})
            by_length.setdefault(int(row["length"]), []).append(float(row["perplexity"]))
    for text in dict.fromkeys(text for text, _ in points):
        panels = {"sentences shuffled": CONTROL} if SHUFFLED in text else PANELS
        found = {title: [name for name in names if (text, name) in points] for title, names in panels.items()}
        found = {title: names for title, names in found.items() if names}
        if not found:
            continue
        columns = min(2, len(found))
        lines = -(-len(found) // columns)
        size = (5.5 * columns, 5.5 * lines)
        figure, axes = plt.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)
        for axis in axes.flat[len(found) :]:
            axis.set_axis_off()
        for axis, (title, names) in zip(axes.flat, found.items(), strict=False):
            for name in names:
                lengths, seeds = zip(*sorted(points[text, name].items()), strict=True)
                style = "-" if ROWS[name].recurrence else "--"
                [line] = axis.plot(lengths, list(map(mean, seeds)), style, marker="o", label=name)
                axis.fill_between(
                    lengths, list(map(min, seeds)), list(map(max, seeds)), color=line.get_color(), alpha=0.2
                )
            axis.set_title(title, fontsize=15)
            axis.set_xlabel("attention length, tokens", fontsize=14)
            axis.set_ylabel("validation perplexity", fontsize=14)
            axis.tick_params(labelsize=13)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=12, loc="upper center", bbox_to_anchor=(0.5, -0.17), frameon=False)
        output.mkdir(parents=True, exist_ok=True)
        figure.savefig(output / ("curves_shuffled.png" if SHUFFLED in text else "curves.png"), dpi=120)
        plt.close(figure)


if __name__ == "__main__":
    main()
