"""Choose dynamic evaluation's rate and a continuous cache on the validation text; then use the test text once.

    python examples/tune_lm.py --model wt2 --data data/wikitext-2 --rate 0.003 0.01 0.03 --cache_size 500 2000
    python examples/tune_lm.py --model wt2 --data data/wikitext-2 --rate 3e-4 1e-3 3e-3 --epsilon 0.01 0.03 \\
        --statistics 50000 --output tuned.json --plot tuned.png

`--data` is a folder of `prepare_corpus.py`. Every rate, decay and epsilon is tried on the validation text, and in each
of these readings every cache: all sizes, weights and temperatures with one another. With `--statistics N` the steps
are divided by what the gradients are on N tokens of the training text, which are read once; without, they are those of
plain gradient descent, whose rates are larger. A value at the end of the ones tried may not be the best there is,
which is said.

Lengths and documents are as in `evaluate_lm.py`: what is not given is as the model was scored in training, or as the
data was prepared. The text is one stream, as in the papers, unless `--batch_size` says otherwise: of ten streams a
cache and the weights would each see a tenth.

Then the model alone, the best rate, the best cache and the best pair of both score the test text, each once and in a
reading of its own; where two of these are the same settings, in one. The perplexities are shown and plotted;
`--output` has all points, with the settings and seconds of each (those of the statistics apart, as
`statistics_seconds`), as JSON: what is known after each reading, and `complete` after the last. Where the weights
diverge there is no point; `diverged` says where that was.
"""

import argparse
import dataclasses
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from txl_hf import ContinuousCache, DynamicEvaluation, GradientStatistics, TransfoXLForCausalLM
from txl_hf.command_line import CommandParser, add_scoring_options, check_files, one_line_errors
from txl_hf.commands.evaluate_lm import (
    check_number,
    check_statistics,
    describe,
    find_document_end,
    readings,
    take_lengths_of_training,
)
from txl_hf.data.loading import check_vocabulary, find_device, load_config, load_language_model
from txl_hf.data.texts import read_prepared
from txl_hf.evaluation.dynamic import Diverged, parameters_of
from txl_hf.evaluation.language_model import LanguageModelEvaluation, evaluate_caches
from txl_hf.evaluation.reading import Reading
from txl_hf.files import whole_file, write_text

DEFAULTS = {
    "decay": [0.0],
    "epsilon": [1e-5],
    "cache_weight": [0.05, 0.1, 0.2],
    "cache_temperature": [0.01, 0.03, 0.1, 0.3, 1.0],
}
# What an option is of.
NEEDS = {
    "decay": "rate",
    "statistics": "rate",
    "epsilon": "statistics",
    "parameters": "rate",
    "cache_weight": "cache_size",
    "cache_temperature": "cache_size",
}


def main(argv: list[str] | None = None):
    with one_line_errors():
        options = parse_arguments(argv)
        check_files(options)
        run(options)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_scoring_options(parser, "folder of prepare_corpus.py", "perplexity on the validation text by rate")
    parser.add_argument("--memory_length", type=int, nargs=1, metavar="LENGTH", help="(the model's mem_len)")
    parser.add_argument("--rate", type=float, nargs="*", default=[], help="rates of dynamic evaluation to try")
    parser.add_argument("--decay", type=float, nargs="+", help=f"decays to try ({shown('decay')})")
    parser.add_argument("--statistics", type=int, help="tokens of the training text to take statistics from (none)")
    parser.add_argument("--epsilon", type=float, nargs="+", help=f"of --statistics, to try ({shown('epsilon')})")
    parser.add_argument("--parameters", help="names of the parameters that follow, a regular expression (all)")
    parser.add_argument("--cache_size", type=int, nargs="*", default=[], help="sizes of caches to try")
    parser.add_argument("--cache_weight", type=float, nargs="+", help=f"({shown('cache_weight')})")
    parser.add_argument("--cache_temperature", type=float, nargs="+", help=f"({shown('cache_temperature')})")
    parser.add_argument("--max_tokens", type=int, help="tune on the beginning of the validation text only")
    parser.add_argument("--max_test_tokens", type=int, help="test on the beginning of the test text only")
    options = parser.parse_args(argv)
    if not options.rate and not options.cache_size:
        parser.error("nothing to tune: give --rate, --cache_size or both")
    for name in ("max_tokens", "max_test_tokens", "statistics"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    for name, needed in NEEDS.items():
        if getattr(options, name) is not None and not getattr(options, needed):
            parser.error(f"--{name} does nothing without --{needed}: give both or neither")
    for name, values in DEFAULTS.items():
        setattr(options, name, getattr(options, name) or values)
    options.split, options.device, options.sliding_window = "validation", find_device(options.device), []
    return options


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options that figures depend on, for JSON: all but places."""
    places = ("model", "data", "output", "plot", "device")
    return {name: value for name, value in vars(options).items() if name not in places}


def shown(name: str) -> str:
    return " ".join(f"{value:g}" for value in DEFAULTS[name])


def run(options: argparse.Namespace):
    for path in filter(None, (options.output, options.plot)):
        path.parent.mkdir(parents=True, exist_ok=True)
    asked = settings_of(options)
    take_lengths_of_training(options, follows=True)
    config = load_config(options.model)
    [(_, reading)] = readings(options, config)
    texts = {split: read_prepared(options.data, split) for split in ("train", "validation", "test")}
    check_statistics(options.statistics or 0, texts["train"])
    check_vocabulary(texts["validation"].tokenizer, options.data, options.model, config)
    read_of_validation = texts["validation"].beginning(options.max_tokens)
    validation, test = read_of_validation.token_ids, texts["test"].token_ids[: options.max_test_tokens]
    # Before hours on the one: the other may be too short.
    for split, token_ids in (("validation", validation), ("test", test)):
        if len(token_ids) <= options.batch_size:
            raise ValueError(
                f"--batch_size {options.batch_size} streams need more tokens than that, and of the {split} text "
                f"{len(token_ids)} are read"
            )
    model = load_language_model(options.model, dtype=getattr(torch, options.dtype))
    model.to(options.device)
    document_end = find_document_end(options, texts["validation"])
    reading = dataclasses.replace(reading, document_end=document_end)
    training = None if options.statistics is None else texts["train"].token_ids[: options.statistics]
    # Before all that takes long: a setting may be out of range, or name no parameter.
    if options.rate:
        parameters_of(model, options.parameters)
    dynamic_ways = [
        DynamicEvaluation(rate, decay, epsilon, training, options.parameters)
        for rate, decay, epsilon in itertools.product(options.rate, options.decay, options.epsilon)
    ]
    caches = [None] + [
        ContinuousCache(size, weight, temperature)
        for size, weight, temperature in itertools.product(
            options.cache_size, options.cache_weight, options.cache_temperature
        )
    ]
    statistics_seconds = None
    if training is not None:
        started = time.perf_counter()
        try:
            statistics = GradientStatistics.of(
                model, training, **reading.settings(), document_end=document_end, parameters=options.parameters
            )
        except ValueError as error:
            raise ValueError(f"--statistics {options.statistics}: {error}") from None
        dynamic_ways = [dataclasses.replace(way, statistics=statistics) for way in dynamic_ways]
        statistics_seconds = time.perf_counter() - started
    report = describe(model, read_of_validation, options)
    report |= {
        "complete": False,
        "options": asked,
        "statistics_seconds": statistics_seconds,
        "validation": [],
        "test": [],
        "diverged": [],
    }
    points = []
    for dynamic in [None, *dynamic_ways]:
        try:
            found = read(model, validation, dynamic, caches, reading)
        except Diverged as error:
            note_divergence(report, "validation", dynamic, error)
        else:
            points += found
            report["validation"] += [point.row() for point in found]
            print_points("validation", [best_of(found, lambda point: point.cache is None), best_of(found)])
        keep(report, options.output)
    chosen = choose(points)
    if options.rate and "dynamic" not in chosen:
        print(
            "note: the weights have diverged at every --rate, so that nothing dynamic is evaluated: try smaller ones"
        )
    for kind, point in chosen.items():
        warn_of_an_end(kind, point, options, math.ceil(len(validation) / options.batch_size))
    tested: dict[Point, Point] = {}
    for kind, point in chosen.items():
        try:
            # Each is read by itself, so that its seconds are its own; two of the same settings are one.
            scored = tested.get(point) or read(model, test, point.dynamic, [point.cache], reading)[0]
            tested[point] = scored
        except Diverged as error:
            note_divergence(report, f"test {kind}", point.dynamic, error)
        else:
            row = {"kind": kind} | scored.row()
            report["test"].append(row)
            figures = f"perplexity {scored.result.perplexity:.3f}, {row['bits_per_token']:.4f} bits a token"
            print(f"test {kind}: {figures}, with {in_words(scored)}", flush=True)
        keep(report, options.output)
    report["complete"] = True
    keep(report, options.output)
    if options.plot is not None:
        plot(points, options.plot)


@dataclasses.dataclass(frozen=True, eq=False)
class Point:
    """The score of one pair of settings; `seconds` are those of the reading that it was found in."""

    dynamic: DynamicEvaluation | None
    cache: ContinuousCache | None
    result: LanguageModelEvaluation
    seconds: float

    def row(self) -> dict[str, Any]:
        figures = {"perplexity": self.result.perplexity, "bits_per_token": self.result.bits_per_token}
        described = figures | dataclasses.asdict(self.result) | {"seconds": self.seconds}
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in described.items()
        }


def read(
    model: TransfoXLForCausalLM,
    token_ids,
    dynamic: DynamicEvaluation | None,
    caches: list[ContinuousCache | None],
    reading: Reading,
) -> list[Point]:
    started = time.perf_counter()
    results = evaluate_caches(model, token_ids, reading=reading, caches=caches, dynamic=dynamic)
    seconds = time.perf_counter() - started
    for result in results:
        check_number(result)
    return [Point(dynamic, cache, result, seconds) for cache, result in zip(caches, results, strict=True)]


def note_divergence(report: dict[str, Any], where: str, dynamic: DynamicEvaluation | None, error: Diverged):
    print(f"{where}: {error}", flush=True)
    report["diverged"].append({"where": where, "dynamic": dynamic and dynamic.describe()})


def keep(report: dict[str, Any], path: Path | None):
    """The results so far, as a whole file."""
    if path is not None:
        write_text(path, json.dumps(report, indent=2, allow_nan=False) + "\n")


def best_of(points: list[Point], among=lambda point: True) -> Point:
    return min(filter(among, points), key=lambda point: point.result.nll)


def choose(points: list[Point]) -> dict[str, Point]:
    """The best point of each kind that was tried; the model alone may be the best."""
    chosen = {
        "static": best_of(points, lambda point: point.dynamic is None and point.cache is None),
        "dynamic": best_of(points, lambda point: point.cache is None),
        "cache": best_of(points, lambda point: point.dynamic is None),
        "both": best_of(points),
    }
    tried = {"static": True, "dynamic": any(point.dynamic for point in points)}
    tried["cache"] = any(point.cache for point in points)
    tried["both"] = tried["dynamic"] and tried["cache"]
    return {kind: point for kind, point in chosen.items() if tried[kind]}


def print_points(split: str, points: list[Point]):
    for point in dict.fromkeys(points):
        figures = f"perplexity {point.result.perplexity:.3f} ({point.seconds:.0f} s)"
        print(f"{split} {in_words(point)}: {figures}", flush=True)


def in_words(point: Point) -> str:
    """The settings of a point."""
    dynamic, cache = point.dynamic, point.cache
    words = "static weights" if dynamic is None else f"rate {dynamic.learning_rate:g}"
    if dynamic is not None and dynamic.decay > 0:
        words += f", decay {dynamic.decay:g}"
    if dynamic is not None and dynamic.statistics is not None:
        words += f", epsilon {dynamic.epsilon:g}"
    if cache is not None:
        words += f", cache of {cache.size}, weight {cache.weight:g}, temperature {cache.temperature:g}"
    return words


def warn_of_an_end(kind: str, point: Point, options: argparse.Namespace, tokens: int):
    """A value at the end of those tried may not be the best there is, unless there is none beyond it.

    Args:
        tokens: of a stream of the validation text; a longer cache holds no more.
    """
    if kind == "dynamic" and point.dynamic is None:
        print(f"note: no --rate of those tried is better than none: try smaller ones than {min(options.rate):g}")
    if kind == "cache" and point.cache is None:
        # A weight of 0 is no cache.
        weights = [weight for weight in options.cache_weight if weight > 0]
        instead = f"smaller ones than {min(weights):g}" if weights else "one above 0"
        print(f"note: no --cache_weight of those tried is better than none: try {instead}")
    best: dict[str, float] = {}
    if (dynamic := point.dynamic) is not None:
        best |= {"rate": dynamic.learning_rate, "decay": dynamic.decay, "epsilon": dynamic.epsilon}
    if (cache := point.cache) is not None:
        best |= {"cache_size": cache.size, "cache_weight": cache.weight, "cache_temperature": cache.temperature}
    # A decay of 1 without statistics goes all the way back.
    most = {"cache_size": tokens} | ({} if options.statistics else {"decay": 1.0})
    for name, value in best.items():
        tried = getattr(options, name)
        low = value == min(tried) and value > (1 if name == "cache_size" else 0)
        high = value == max(tried) and value < most.get(name, math.inf)
        if len(set(tried)) > 1 and (low or high):
            print(f"note: the best --{name} for {kind} is {value:g}, at the end of those tried: try beyond it")


def plot(points: list[Point], path: Path):
    """Perplexity by rate, without a cache and with the best one."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    chosen = choose(points)
    for name, color, cache in (("no cache", "C0", None), ("best cache", "C1", True)):
        if cache and "cache" not in chosen:
            continue
        kept = [point for point in points if (point.cache is not None) == bool(cache)]
        static = best_of(kept, lambda point: point.dynamic is None)
        axes.axhline(static.result.perplexity, color=color, linestyle=":", label=f"static, {name}")
        for decay in sorted({point.dynamic.decay for point in kept if point.dynamic}):
            at = [point for point in kept if point.dynamic and point.dynamic.decay == decay]
            rates = sorted({point.dynamic.learning_rate for point in at if point.dynamic})
            best = [best_of(at, lambda point, r=rate: point.dynamic.learning_rate == r) for rate in rates]
            curve = [(rate, point.result.perplexity) for rate, point in zip(rates, best, strict=True)]
            axes.plot(*zip(*curve, strict=True), marker="o", color=color, label=f"decay {decay:g}, {name}")
    if "dynamic" in chosen:
        axes.set_xscale("log")
    axes.set_xlabel("rate")
    axes.set_ylabel("perplexity on the validation text")
    axes.grid(alpha=0.3)
    axes.legend()
    with whole_file(path) as aside:
        figure.savefig(aside, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
