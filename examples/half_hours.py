"""Half an hour on two cores: recipes beside one another at equal seconds, each model read in four ways.

    python examples/half_hours.py --texts texts
    python examples/half_hours.py --texts texts --only wikitext-2 --seeds 0
    python examples/half_hours.py --smoke --only ptb --contenders recipe --seeds 0 --output build/half_hours

--texts holds the folders `wikitext-2`, `ptb` and `wikipedia-long`, with the files that `txl-prepare` reads, and
`warandpeace` with `warandpeace.txt`. Before a text is begun, steps of its first contender and of those that are to run
are timed, each in a process of its own, in turn; those whose steps are the same work, with another schedule, say, as
one. Of each step its fastest turn counts; the machine should then have nothing else to do. The first contender trains
for the steps of its recipe, the others for as many as take the same seconds (in `warandpeace` for the steps of
theirs). Seconds are of training alone, without validation and checkpoints. Once the steps are known it does not matter
how fast they are done: several runs can go on at once (`--jobs`).

A model then scores the test text alone, with dynamic evaluation, with a continuous cache and with both, in one stream;
`tune_lm.py` chooses their settings on the validation text. One of `warandpeace` scores it alone.

Some contenders train in halves of equal seconds, the second from the model of the first: so a schedule of streams or
of segments is tried, beside halves that differ in the learning rate alone.

`--share 0.2` compares more contenders in less time: each trains for a fifth of those seconds, with a fifth of its
warm-up, and scores the test text alone, at one memory length.

    python examples/half_hours.py --texts texts --share 0.2 --output examples/results/shares --work build/shares

A run that was stopped goes on where it was, and what is done is not done again, whatever machine did it: the same
command. To do it again on this one, name another --output. What was begun or done with other options than those of
today is refused, and so are seconds of a step that another machine took. Models are kept in `--work`, results in
`--output`: `rows.csv`, with the commit and the command of each run, and the page `README.md`.
"""

import argparse
import json
import math
import multiprocessing
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import torch
from transformers import TrainerCallback

import harness
import tune_lm
import txl_hf.commands.train_lm as training
from harness import with_range
from study import StudyParser, options_that_differ
from txl_hf.command_line import at_least_zero, one_line_errors
from txl_hf.commands.recipe import RECIPE, Arguments, read_recipe
from txl_hf.commands.recipe import parse_arguments as parse_training
from txl_hf.commands.report import PRECISIONS
from txl_hf.evaluation.cards import RESULTS
from txl_hf.files import write_text
from txl_hf.training.memory import MemoryLength
from txl_hf.training.trainer import TransfoXLTrainer

ROOT = Path(__file__).resolve().parents[1]
OUTPUT, WORK = ROOT / "examples" / "results" / "half_hours", ROOT / "build" / "half_hours"
WRITTEN = """\
Written by `examples/half_hours.py`, which says how, from `rows.csv`. Seconds of training are the steps by what one
took with all threads and nothing else running: half an hour where the first recipes were made, more on a slower
machine. Behind ± is half of what lies between the lowest and the highest seed. The commands are those of each
contender's first seed, without `python examples/` in front."""
KINDS = ("static", "dynamic", "cache", "both")
# transformers' HfArgumentParser writes to the fields of the classes that it reads.
PARSING = threading.Lock()
# How often it is a contender's turn to be timed, and by how many steps, behind some that are slower. Of each step the
# fastest turn counts: a virtual machine's neighbours only slow it down, and may do so in most of a contender's turns.
TURNS, TIMED, UNTIMED = 5, 25, 5
TUNED = "tuned.json"
# Options that change figures but not the work of a step: contenders that differ in them alone are timed as one.
FREE = {"learning_rate", "weight_decay", "lr_scheduler_type", "lr_scheduler_kwargs"}
# Options of a run that its figures do not depend on, or that its folder is named after.
PLACES = {"data", "output", "seed", "resume", "model_name_or_path"}
# Between the commands of a run that is trained in pieces.
AND = " && "
# Two steps of a training for each that is timed, which stands between them. Without a warm-up, which may be longer.
PLANNED = 2 * TIMED
TIMING = ["--max_steps", str(PLANNED), "--warmup_steps", "0"]


@dataclass(frozen=True)
class Contender:
    """A recipe with options; `name` is what the table calls it.

    Args:
        before: options over those of `options` for the first half of its seconds; the second half trains its model
            further. None: it trains in one piece.
    """

    name: str
    recipe: str
    options: str = ""
    before: str | None = None

    @property
    def first_half(self) -> "Contender | None":
        if self.before is None:
            return None
        return Contender(f"{self.name}, first half", self.recipe, f"{self.options} {self.before}".strip())

    @property
    def pieces(self) -> tuple["Contender", ...]:
        """The trainings, in their order."""
        return tuple(filter(None, (self.first_half, self)))


@dataclass(frozen=True)
class Text:
    """A corpus, how it is prepared from `--texts`, and who trains on it, the first for the steps of its recipe.

    Args:
        characters: the tokens are characters, measured in bits; otherwise they are words, measured by perplexity.
        tuning: options of `tune_lm.py`; none: models are scored alone.
        equal_seconds: the others train for as many seconds as the first, or for the steps of their recipes.
    """

    preparation: str
    contenders: tuple[Contender, ...]
    characters: bool = False
    tuning: str = ""
    equal_seconds: bool = True

    @property
    def measure(self) -> str:
        return "Bits a character" if self.characters else "Perplexity"

    def measured(self, nats: float) -> float:
        return nats / math.log(2) if self.characters else math.exp(nats)


WORDS = (
    "--batch_size 1 --memory_length 300 --segment_length 100 --max_tokens 50000 --cache_temperature 0.003 0.01 0.03"
)
# Of a text of a million words the best rate was the largest of the others, and the best cache the smallest.
FEWER_WORDS = f"{WORDS} --rate 0.01 0.02 0.03 0.05 --cache_size 500 1000 2000 --cache_weight 0.1 0.15 0.2"
MORE_WORDS = f"{WORDS} --rate 0.005 0.01 0.02 0.03 --cache_size 2000 4000 --cache_weight 0.1 0.15 0.2 0.3"
# As many characters as WikiText-2 has words: following the whole test text would take an hour.
CHARACTERS = (
    "--batch_size 1 --memory_length 512 --segment_length 128 --rate 0.003 0.01 0.03 --cache_size 2000 4000 "
    "--cache_weight 0.1 0.2 --cache_temperature 0.1 0.3 --max_tokens 250000 --max_test_tokens 250000"
)
# Half an hour of a recipe for minutes. Its softmax has a second bin for the 3,500 characters that are rare.
LONG = "--max_steps 10000 --mem_len 256 --eval_steps 2500 --eval_mem_len 256 --eval_memory_lengths 0 256 --cutoffs 128"
MORE_CHARACTERS = "--optimizer muon --batch_size 32 --weight_decay 0.1"
# The recipe of WikiText-2 before: 109.8 after its 5,000 steps.
FIRST_WORDS = (
    "--bf16 false --optimizer adamw --batch_size 16 --learning_rate 2e-3 --weight_decay 0.01 "
    "--warmup_steps 200 --max_steps 5000"
)
TEXTS = {
    "wikitext-2": Text(
        "--corpus wikitext-2 --input {texts}/wikitext-2",
        (
            Contender("first recipe", "wikitext2_small", f"{FIRST_WORDS} --dropout 0.1"),
            Contender("recipe", "wikitext2_small"),
            Contender("in fp32", "wikitext2_small", "--bf16 false"),
            Contender("without Muon", "wikitext2_small", "--optimizer adamw"),
            Contender("with 16 streams", "wikitext2_small", "--batch_size 16 --learning_rate 2e-3"),
            Contender("with a weight decay of 0.01", "wikitext2_small", "--weight_decay 0.01"),
            Contender("stable, then down", "wikitext2_small", "--lr_scheduler_type warmup_stable_decay"),
            Contender("memory that grows", "wikitext2_small", "--mem_warmup_ratio 0.5"),
            Contender("in halves", "wikitext2_small", before="--lr_scheduler_type constant_with_warmup"),
            Contender(
                "in halves, of 16 and 32 streams",
                "wikitext2_small",
                before="--lr_scheduler_type constant_with_warmup --batch_size 16 --learning_rate 2e-3",
            ),
            Contender(
                "in halves, of segments of 50 and 100",
                "wikitext2_small",
                before="--lr_scheduler_type constant_with_warmup --tgt_len 50",
            ),
        ),
        tuning=MORE_WORDS,
    ),
    "ptb": Text(
        "--corpus ptb --input {texts}/ptb",
        (
            Contender("first recipe", "wikitext2_small", f"{FIRST_WORDS} --dropout 0.3"),
            Contender("recipe", "wikitext2_small", "--dropout 0.3 --weight_decay 0.3"),
        ),
        tuning=FEWER_WORDS,
    ),
    "wikipedia-long": Text(
        "--corpus text --input {texts}/wikipedia-long --mode characters",
        (
            Contender("recipe", "characters_small", f"{LONG} --bf16 false"),
            Contender("bf16", "characters_small", LONG),
            Contender("Muon", "characters_small", f"{LONG} --optimizer muon"),
            Contender("Muon, 32 streams", "characters_small", f"{LONG} {MORE_CHARACTERS}"),
            Contender(
                "Muon, 32 streams, stable, then down",
                "characters_small",
                f"{LONG} {MORE_CHARACTERS} --lr_scheduler_type warmup_stable_decay",
            ),
            Contender(
                "Muon, 32 streams, memory that grows",
                "characters_small",
                f"{LONG} {MORE_CHARACTERS} --mem_warmup_ratio 0.5",
            ),
            Contender(
                "Muon, 32 streams, in halves",
                "characters_small",
                f"{LONG} {MORE_CHARACTERS}",
                before="--lr_scheduler_type constant_with_warmup",
            ),
            Contender(
                "Muon, in halves, of 12 and 32 streams",
                "characters_small",
                f"{LONG} {MORE_CHARACTERS}",
                before="--lr_scheduler_type constant_with_warmup --batch_size 12",
            ),
            Contender(
                "Muon, 32 streams, in halves, of segments of 32 and 64",
                "characters_small",
                f"{LONG} {MORE_CHARACTERS}",
                before="--lr_scheduler_type constant_with_warmup --tgt_len 32",
            ),
        ),
        characters=True,
        tuning=CHARACTERS,
    ),
    "warandpeace": Text(
        "--corpus text --input {texts}/warandpeace/warandpeace.txt --mode characters",
        (
            # What stood for a CPU before the recipe: settings of enwik8_base, without dropout.
            Contender(
                "as enwik8_base",
                "characters_small",
                "--pre_lnorm false --untie_r false --init_std 0.02 --proj_init_std 0.01 --optimizer adam "
                "--weight_decay 0 --adam_beta2 0.999 --learning_rate 1e-3 --warmup_steps 0 --max_grad_norm 0.25",
            ),
            Contender("recipe", "characters_small"),
        ),
        characters=True,
        equal_seconds=False,
    ),
}
SMALL = (
    "--n_layer 1 --d_model 16 --d_embed 16 --n_head 2 --d_head 8 --d_inner 16 --cutoffs --div_val 1 --tgt_len 16 "
    "--mem_len 16 --batch_size 4 --max_steps 8 --warmup_steps 1 --eval_steps 8 --eval_batch_size 2 --eval_tgt_len 16 "
    "--eval_mem_len 16 --eval_memory_lengths --logging_steps 4 --save_steps 8"
)
SMALL_TUNING = "--batch_size 1 --rate 0.01 --cache_size 20 --cache_weight 0.1 --cache_temperature 0.1 --max_tokens 300"


@dataclass(frozen=True)
class Run:
    """A contender with a seed, where it works, and for which share of its seconds it trains."""

    text: str
    contender: Contender
    seed: int
    work: Path
    smoke: bool
    share: float = 1.0

    @property
    def folder(self) -> Path:
        name = "".join(letter if letter.isalnum() else "-" for letter in self.contender.name)
        return self.work / f"{self.text}-{name}-{self.seed}"

    @property
    def pieces(self) -> tuple["Run", ...]:
        """The trainings, in their order, each from the model of the one before."""
        return tuple(replace(self, contender=piece) for piece in self.contender.pieces)

    @property
    def data(self) -> Path:
        return self.work / "data" / self.text

    @property
    def key(self) -> tuple[str, str, str]:
        """Its name in `rows.csv`."""
        return self.text, self.contender.name, str(self.seed)

    def training(self, output: Path, *more: str) -> list[str]:
        """The options of `txl-train`."""
        recipe = ROOT / "examples" / "recipes" / f"{self.contender.recipe}.yaml"
        options = [*shlex.split(self.contender.options), *(shlex.split(SMALL) if self.smoke else []), *more]
        places = ["--data", str(self.data), "--output", str(output)]
        return [str(recipe), *places, "--seed", str(self.seed), *options]

    def tuning(self) -> list[str]:
        """The options of `tune_lm.py`; none where the model is scored alone."""
        if not TEXTS[self.text].tuning or self.share < 1:
            return []
        options = SMALL_TUNING if self.smoke else TEXTS[self.text].tuning
        places = ["--model", self.folder, "--data", self.data, "--output", self.folder / TUNED]
        return [*map(str, places), *shlex.split(options)]


def main(argv: list[str] | None = None):
    options = parse_arguments(argv)
    with one_line_errors():
        runs = [
            Run(text, contender, seed, options.work, options.smoke, options.share)
            for seed in options.seeds
            for text in options.only
            for contender in TEXTS[text].contenders
            if contender.name in options.contenders
        ]
        done = {key(row): row for row in harness.read(options.output / "rows.csv")}
        left = [run for run in runs if run.key not in done]
        print(f"{len(runs) - len(left)} of {len(runs)} runs are done in {options.output}", flush=True)
        for run in runs:
            if row := done.get(run.key):
                print(f"  {', '.join(run.key)}: {row['date']}, {row['processor']}", flush=True)
                check_done(run, row, options.output)
        for run in left:
            prepare(run, options.texts)
            time_steps(run, options.contenders)
            check_begun(run)
        threads = max(1, torch.get_num_threads() // options.jobs)
        with ThreadPoolExecutor(options.jobs) as jobs:
            trained = {jobs.submit(train, run, threads): run for run in left}
            for job in as_completed(trained):
                job.result()
                harness.append(options.output / "rows.csv", rows_of(trained[job], threads))
                write_text(options.output / "README.md", page(harness.read(options.output / "rows.csv")))
        print((options.output / "README.md").read_text(encoding="utf-8"))


def training_arguments(options: list[str]) -> Arguments:
    """The settings of `txl-train` by these options."""
    with PARSING:
        return parse_training(options)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = StudyParser(__doc__, OUTPUT, WORK)
    parser.add_argument("--texts", type=Path, help="folder of the texts")
    parser.add_argument("--only", nargs="+", choices=TEXTS, default=list(TEXTS), help="texts (all)")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help="those of these names (all)")
    parser.add_argument("--seeds", type=at_least_zero, nargs="+", default=[0, 1, 2], help="(%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, which share the threads (%(default)s)")
    parser.add_argument("--share", type=float, default=1.0, help="of the seconds, to compare sooner (%(default)g)")
    options = parser.parse_study(argv)
    if not 0 < options.share <= 1:
        parser.error(f"--share {options.share:g} must be above 0 and at most 1")
    if options.share < 1 and (options.output.resolve() == OUTPUT or options.work.resolve() == WORK):
        parser.error(f"--share {options.share:g} is not the whole time: name other folders with --output and --work")
    names = sorted({contender.name for text in options.only for contender in TEXTS[text].contenders})
    options.contenders = options.contenders or names
    if unknown := set(options.contenders) - set(names):
        parser.error(f"--contenders {sorted(unknown)}: of {', '.join(options.only)} there are {', '.join(names)}")
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs} must be at least 1")
    if options.texts is None and not options.smoke:
        parser.error("--texts is missing: name the folder of the texts, or try the script with --smoke")
    return options


def key(row: dict[str, str]) -> tuple[str, str, str]:
    return row["text"], row["contender"], row["seed"]


# --- runs ------------------------------------------------------------------------------------------------------------


def prepare(run: Run, texts: Path | None):
    if run.data.exists():
        return
    options = TEXTS[run.text].preparation.format(texts=texts)
    if run.smoke:
        # Prose enough for some steps.
        kind = "characters" if TEXTS[run.text].characters else "whitespace"
        options = shlex.join(["--corpus", "text", "--input", str(ROOT / "README.md"), "--mode", kind])
    start("prepare_corpus.py", [*shlex.split(options), "--output", str(run.data)])


def train(run: Run, threads: int):
    """Train and tune, unless that is done."""
    for piece, options in trainings(run):
        if not (piece.folder / RESULTS).exists():
            start("train_lm.py", [*options, "--resume"], threads)
    if run.tuning() and not read_tuned(run).get("complete"):
        (run.folder / TUNED).unlink(missing_ok=True)
        start("tune_lm.py", run.tuning(), threads)


def check_done(run: Run, row: dict[str, str], output: Path):
    """Refuse a row of another share, or of other options than today's. Of what its recipe's file said it says nothing.

    Raises:
        ValueError: with the share or the options of the row.
    """
    name = ", ".join(run.key)
    if (share := float(row.get("share") or 1)) != run.share:
        raise ValueError(f"{output} has {name} of --share {share:g}, not {run.share:g}: name another --output")
    commands = [shlex.split(command)[1:] for command in row["command"].split(AND)]
    if len(commands) != len(run.pieces) or not all(map(is_training, commands, run.pieces)):
        given = AND.join(shlex.join(behind_seed(command)) for command in commands)
        raise ValueError(f"{output} has {name} of other options, {given}: name another --output, or take its rows out")


def is_training(given: list[str], piece: Run) -> bool:
    """Whether options of `txl-train` are those of a run of one piece, for however many steps."""
    today = piece.training(piece.folder)
    options, before = behind_seed(today), behind_seed(given)
    # Behind them stand the steps and what a share adds.
    steps = before[len(options) :]
    same = Path(given[0]).name == Path(today[0]).name and before[: len(options)] == options
    return same and steps[:1] in ([], ["--max_steps"])


def behind_seed(options: list[str]) -> list[str]:
    return options[options.index("--seed") + 2 :]


def check_begun(run: Run):
    """Refuse what has been begun in a run's folder with other options than today's, which made other figures.

    Raises:
        ValueError: with the options that differ.
    """
    for piece, options in trainings(run):
        if (piece.folder / RECIPE).exists():
            check_options(piece.folder, read_recipe(piece.folder / RECIPE), training_arguments(options).settings)
    if tuned := read_tuned(run):
        check_options(
            run.folder / TUNED, tuned.get("options", {}), tune_lm.settings_of(tune_lm.parse_arguments(run.tuning()))
        )


def check_options(path: Path, before: dict[str, Any], today: dict[str, Any]):
    before, today = ({name: each[name] for name in each.keys() - PLACES} for each in (before, today))
    if changed := options_that_differ(before, today):
        raise ValueError(f"{path} is of other options: {changed}; delete it, or name another --work")


def read_tuned(run: Run) -> dict[str, Any]:
    """The rows that `tune_lm.py` has written, which may be a part of all; none before it has begun."""
    path = run.folder / TUNED
    return json.loads(path.read_text()) if path.exists() else {}


def start(script: str, options: list[str], threads: int | None = None):
    """Run an example in a process of its own, with as many threads as told.

    Raises:
        ValueError: it failed, and has said why.
    """
    print(f"$ {script} {shlex.join(options)}", flush=True)
    environment = os.environ if threads is None else {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if subprocess.run([sys.executable, ROOT / "examples" / script, *options], env=environment).returncode:
        raise ValueError(f"{script} failed: the lines above say why")


def trainings(run: Run) -> list[tuple[Run, list[str]]]:
    """The pieces of a run, each with all its options of `txl-train`."""
    pieces = zip(run.pieces, steps_of(run), strict=True)
    return [(piece, piece.training(piece.folder, *steps)) for piece, steps in pieces]


def steps_of(run: Run) -> list[list[str]]:
    """Options for each piece of a run, by which a contender trains for as many seconds as the first, or for a share of
    them, and goes on with the model of the piece before."""
    text, seconds = TEXTS[run.text], step_seconds(run)
    first = text.contenders[0] if text.equal_seconds else run.contender
    planned = planned_steps(training_arguments(replace(run, contender=first).training(run.folder)))
    share, found = run.share / len(run.pieces), []
    for before, piece in zip((None, *run.pieces), run.pieces, strict=False):
        steps = round(planned * share * seconds[first.name] / seconds[piece.contender.name])
        options = ["--max_steps", str(max(1, steps))]
        if share < 1:
            warmup = training_arguments(piece.training(piece.folder)).training.warmup_steps
            options += ["--warmup_steps", str(round(warmup * share))]
        if run.share < 1:
            options.append("--eval_memory_lengths")
        if before is not None:
            options += ["--model_name_or_path", str(before.folder)]
        found.append(options)
    return found


def planned_steps(arguments: Arguments) -> int:
    """For how many steps a contender trains."""
    steps = arguments.training.max_steps
    assert steps > 0, "a recipe that says for how many epochs"
    return steps


def time_steps(run: Run, names: list[str]):
    """Time steps of the first contender of a run's text and of those of these names; once, for all seeds.

    Raises:
        ValueError: some were timed before, and not all of these, or with other options.
    """
    first, *others = TEXTS[run.text].contenders
    chosen = [first, *(each for each in others if each.name in names)]
    contenders = [piece for each in chosen for piece in each.pieces]
    measured = timed(run)
    if not measured.exists():
        options = {each.name: timing_options(run, each) for each in contenders}
        works = {
            name: json.dumps({key: given[key] for key in given if key not in FREE}) for name, given in options.items()
        }
        turns: dict[str, list[list[float]]] = {work: [] for work in works.values()}
        for work in [*turns] * TURNS:
            each = next(each for each in contenders if works[each.name] == work)
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                turns[work].append(process.submit(seconds_of_steps, replace(run, contender=each)).result())
        found = {name: {"turns": turns[works[name]], "options": given} for name, given in options.items()}
        write_text(measured, json.dumps(found, indent=1) + "\n")
    found = json.loads(measured.read_text())
    if missing := [each.name for each in contenders if not isinstance(found.get(each.name), dict)]:
        raise ValueError(
            f"{measured} has no time with options of {', '.join(missing)}: delete it, and they are timed in turn"
        )
    for each in contenders:
        check_options(measured, found[each.name]["options"], timing_options(run, each))


def timing_options(run: Run, contender: Contender) -> dict[str, Any]:
    """The command by which a contender is timed, without the paths of the run."""
    arguments = training_arguments(replace(run, contender=contender).training(run.work / "timed", *TIMING))
    options = {name: value for name, value in arguments.settings.items() if name not in PLACES}
    # Seconds of one machine are not those of another.
    return {"processor": harness.processor(), **options}


def timed(run: Run) -> Path:
    return run.work / f"{run.text}.json"


def step_seconds(run: Run) -> dict[str, float]:
    """Of the contenders of a run's text: the mean of the steps, each as in its fastest turn."""
    found = json.loads(timed(run).read_text())
    return {name: statistics.fmean(map(min, zip(*each["turns"], strict=True))) for name, each in found.items()}


class Timer(TrainerCallback):
    """Seconds of steps spread over a training, each for the part of it around that step: a memory that grows is as
    long in their mean as over all steps."""

    def __init__(self, trainer: TransfoXLTrainer):
        self.trainer = trainer
        self.seconds: list[float] = []
        self.growth = next(
            (each for each in trainer.callback_handler.callbacks if isinstance(each, MemoryLength)), None
        )

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if self.growth is not None:
            # The memory that the next step finds is left by this one.
            step = min(max(0, 2 * (len(self.seconds) - UNTIMED + 1) + 1), PLANNED - 1)
            place = SimpleNamespace(global_step=step, max_steps=PLANNED)
            self.growth.on_step_begin(args, place, control, model=model)
        self.since = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.perf_counter() - self.since)
        control.should_training_stop = len(self.seconds) == UNTIMED + TIMED


def seconds_of_steps(run: Run) -> list[float]:
    """Of steps spread over a training, as `Timer` has them."""
    with tempfile.TemporaryDirectory() as scratch:
        arguments = training_arguments(run.training(Path(scratch) / "timed", *TIMING))
        prepared = training.prepare(arguments)
        trainer = training.make_trainer(arguments, prepared)
        timer = Timer(trainer)
        trainer.add_callback(timer)
        trainer.train()
    return timer.seconds[UNTIMED:]


# --- results ---------------------------------------------------------------------------------------------------------


def rows_of(run: Run, threads: int) -> list[dict[str, Any]]:
    """The results of a run with so many threads, a row for each way of reading.

    Raises:
        ValueError: the recipe has changed since the run began.
    """
    check_begun(run)
    results = json.loads((run.folder / RESULTS).read_text())
    options = {piece.contender.name: options for piece, options in trainings(run)}
    steps = {name: planned_steps(training_arguments(given)) for name, given in options.items()}
    seconds = step_seconds(run)
    took = sum(count * seconds[name] for name, count in steps.items())
    command = AND.join(shlex.join(["train_lm.py", *given]) for given in options.values())
    last = training_arguments(options[run.contender.name]).training
    common = {
        **harness.origin("cpu", PRECISIONS[last.mixed_precision], threads),
        **harness.versions(),
        "commit": results["commit"],
        "text": run.text,
        "contender": run.contender.name,
        "seed": run.seed,
        "share": run.share,
        "steps": sum(steps.values()),
        "seconds_of_step": round(took / sum(steps.values()), 4),
        "train_seconds": round(took),
        "parameters": results["model"]["parameters"],
        "command": command.replace(f"{ROOT}{os.sep}", ""),
    }
    if not run.tuning():
        return [{**common, "kind": "static", **figures(results["validation"]["nll"], results["test"]["nll"])}]
    tuned = read_tuned(run)
    rows = []
    for test in tuned["test"]:
        settings = {"dynamic": test["dynamic"], "cache": test["cache"]}
        chosen = [row for row in tuned["validation"] if {name: row[name] for name in settings} == settings]
        rows.append(
            {
                **common,
                "threads": tuned["threads"],
                "kind": test["kind"],
                **figures(chosen[0]["nll"], test["nll"]),
                "test_tokens": test["text_tokens"],
                "test_seconds": round(test["seconds"], 1),
                "settings": json.dumps({name: value for name, value in settings.items() if value}),
                "tuning": shlex.join(["tune_lm.py", *run.tuning()]).replace(f"{ROOT}{os.sep}", ""),
            }
        )
    return rows


def figures(validation: float, test: float) -> dict[str, float]:
    """In nats a token, with so many digits that a perplexity of 1,000 has its two decimals right."""
    return {"validation": round(validation, 8), "test": round(test, 8)}


def page(rows: list[dict[str, str]]) -> str:
    """The tables, of all seeds, and the commands."""
    # Rows that are older than shares are of the whole time.
    shares = sorted({float(row.get("share") or 1) for row in rows})
    half = "Half" if shares == [1] else f"{', '.join(f'{share:.0%}' for share in shares)} of half"
    parts = [f"# {half} an hour on two cores", WRITTEN]
    for text in dict.fromkeys(row["text"] for row in rows):
        chosen = [row for row in rows if row["text"] == text]
        read = chosen[0].get("test_tokens")
        scored = f"the test text, {int(read):,} tokens" if read else "the test text"
        parts += [f"## {text}", f"{TEXTS[text].measure} of {scored}; {about(chosen)}.", table(chosen)]
        parts.append("\n".join(["```bash", *dict.fromkeys(commands(chosen)), "```"]))
    return "\n\n".join(parts) + "\n"


def table(rows: list[dict[str, str]]) -> str:
    """Of one text: a line for each contender, a column for each way of reading; seconds where one machine took all."""
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    text = TEXTS[rows[0]["text"]]
    lines = [f"| contender | seeds | steps | seconds | {' | '.join(kinds)} |", "|---" * (4 + len(kinds)) + "|"]
    for name in dict.fromkeys(row["contender"] for row in rows):
        own = [row for row in rows if row["contender"] == name]
        static = [row for row in own if row["kind"] == "static"]
        cells = [name, str(len(static))]
        cells.append(with_range([float(row["steps"]) for row in static], 0))
        cells.append(with_range([float(row["train_seconds"]) for row in static], 0) if of_one_machine(static) else "–")
        for kind in kinds:
            values = [text.measured(float(row["test"])) for row in own if row["kind"] == kind]
            cells.append(with_range(values, 3 if text.characters else 2))
        lines.append(f"| {' | '.join(cells)} |")
    if rows[0].get("test_seconds") and of_one_machine(rows):
        reading = [[float(row["test_seconds"]) for row in rows if row["kind"] == kind] for kind in kinds]
        seconds = [f"{statistics.median(values):.0f} s" for values in reading]
        lines.append(f"| *to read the test text* | | | | {' | '.join(seconds)} |")
    return "\n".join(lines)


def of_one_machine(rows: list[dict[str, str]]) -> bool:
    return len({row["processor"] for row in rows}) <= 1


def about(rows: list[dict[str, str]]) -> str:
    """Of one text: where it was trained and read; for each contender, where that was not the same."""
    places: dict[str, list[str]] = {}
    for row in rows:
        threads = f"read by {row['threads']} thread{'' if row['threads'] == '1' else 's'}"
        place = f"{row['processor']}, {threads}, torch {row['torch']}, {row['date']}, commit {row['commit']}"
        if row["contender"] not in places.setdefault(place, []):
            places[place].append(row["contender"])
    if len(places) == 1:
        return next(iter(places))
    apart = "; ".join(f"{' and '.join(names)}: {place}" for place, names in places.items())
    return f"{apart}. Seconds of different machines do not compare"


def commands(rows: list[dict[str, str]]) -> list[str]:
    """Those of the first seed of each contender."""
    seeds: dict[str, str] = {}
    first = [row for row in rows if seeds.setdefault(row["contender"], row["seed"]) == row["seed"]]
    return [
        command for row in first for name in ("command", "tuning") if row.get(name) for command in row[name].split(AND)
    ]


if __name__ == "__main__":
    main()
