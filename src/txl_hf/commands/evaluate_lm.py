"""Score a text with a Transformer-XL: every token once, at any memory length.

    txl-evaluate --model wt103 --data data/wikitext-103 --segment_length 64 --memory_length 640 \\
        --clamp_len 400 --same_length true
    txl-evaluate --model demo-output --data book.txt --memory_length 0 64 128 --output result.json
    txl-evaluate --model wt103 --data data/wikitext-103 --memory_length 150 300 450 640 \\
        --clamp_len 400 --same_length true --plot curve.png
    txl-evaluate --model wt103 --data data/wikitext-103 --sliding_window 640 --max_tokens 1000

`--data` is a folder of `txl-prepare`, of which `--split` is read, or a UTF-8 text file, which is tokenised with
the model's tokenizer or with `--tokenizer`. Several values of `--memory_length` are scored one after the other.
Where the data was prepared with `--document_end`, each document is read without those before it, or `--document_end`
says it here, and `--document_end none` reads all as one text. `--dynamic RATE` lets the weights follow the text, and
`--cache` mixes in what followed similar states: `tune_lm.py` chooses both. `--sliding_window N` scores the text in the
vanilla way: the last N tokens are read anew for every token, without memory. It stands alone, or beside the memory
lengths that are given.

A model that `txl-train` has scored is scored likewise: lengths, `--batch_size` and `--document_end` that are not given
are those of its results.json, so that one model has one figure. With `--dynamic` or `--cache` it is one stream, which
these follow from end to end.

The figures appear as a table, line by line as they are found. `--json` prints the result as JSON instead, and
`--output` writes the same JSON into a file, from the first figure on. The result has for each length the negative
log-likelihood, perplexity and bits of a token, perplexity per word and bits per character of the text (words and
characters as `txl-prepare` counts them), and all settings that these figures depend on. An infinite perplexity,
for which JSON has no number, is null, and so are figures of words or characters where more than a thousandth of these
have no token.

`curves` are the columns of the paper's ablation (Tables 6 and 10), for memories and for windows: the perplexity `init`
at the attention length of training (`null` where that is not among the lengths), the `best` one, and
`attention_length`, the shortest length whose perplexity is the best one to the decimals that the paper prints.
"""

import argparse
import dataclasses
import datetime
import json
import math
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedTokenizerBase

from ..command_line import (
    CommandParser,
    add_scoring_options,
    at_least_one,
    check_files,
    hub_or_folder,
    one_line_errors,
)
from ..data.corpora import SPLITS
from ..data.loading import (
    check_vocabulary,
    find_device,
    find_tokenizer,
    load_config,
    load_language_model,
    load_tokenizer,
)
from ..data.texts import TokenisedText, read_document_end, read_prepared, read_raw
from ..evaluation.cards import RESULTS, origin, read_results
from ..evaluation.continuous_cache import ContinuousCache
from ..evaluation.dynamic import DynamicEvaluation
from ..evaluation.language_model import LanguageModelEvaluation, evaluate_caches, figures
from ..evaluation.reading import LENGTHS, Reading
from ..files import whole_file, write_text
from ..transfo_xl.configuration_transfo_xl import TransfoXLConfig
from ..transfo_xl.modeling_transfo_xl import TransfoXLForCausalLM

MEMORY, WINDOW = "memory", "sliding window"


@one_line_errors()
def main(argv: list[str] | None = None):
    options = parse_arguments(argv)
    check_files(options)
    run(options)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_scoring_options(parser, "folder of txl-prepare, or a text file", "perplexity by attention length")
    add, on_terminal = parser.add_argument, sys.stderr.isatty()
    add("--split", choices=SPLITS, help="of a folder of txl-prepare (test)")
    add("--tokenizer", type=hub_or_folder, help="folder or Hub name, for a text file (the model's)")
    add("--memory_length", type=int, nargs="+", help="one or more (the model's mem_len, without --sliding_window)")
    add("--decay_len", type=int, help="of a memory longer than in training (the model's)")
    add("--sliding_window", type=at_least_one, nargs="+", default=[], help="window lengths to score")
    add("--warm_up", type=int, default=0, help="tokens of each stream read but not scored (%(default)s)")
    add("--dynamic", type=float, metavar="RATE", help="let the weights follow the text at this rate")
    add("--decay", type=float, help="of --dynamic: draw them back (0.0)")
    add("--epsilon", type=float, help="of --dynamic with --statistics (1e-05)")
    add("--statistics", type=at_least_one, help="of --dynamic: tokens of the training text to take them from")
    add("--parameters", help="of --dynamic: names of the parameters that follow, a regular expression")
    sizes = ("SIZE", "WEIGHT", "TEMPERATURE")
    add("--cache", type=float, nargs=3, metavar=sizes, help="mix in a continuous cache; see tune_lm.py")
    add("--max_tokens", type=at_least_one, help="score the beginning of the text only")
    add("--json", action="store_true", help="print the result as JSON instead of a table")
    bar = "show a progress bar (where standard error is a terminal)"
    add("--progress", action=argparse.BooleanOptionalAction, default=on_terminal, help=bar)
    options = parser.parse_args(argv)
    for name in ("decay", "epsilon", "statistics", "parameters"):
        if options.dynamic is None and getattr(options, name) is not None:
            parser.error(f"--{name} is of dynamic evaluation: give its rate too, with --dynamic")
    if options.sliding_window and not options.memory_length:
        for name in ("segment_length", "ext_len", "same_length"):
            if getattr(options, name) is not None:
                parser.error(f"--{name} is of an evaluation with memory: name its lengths too, with --memory_length")
    if options.epsilon is not None and options.statistics is None:
        parser.error("--epsilon does nothing without --statistics")
    if options.split is not None and options.data.is_file():
        parser.error(f"--split is of a folder of txl-prepare: {options.data} is one text, which is scored as a whole")
    options.split = options.split or "test"
    return options


def run(options: argparse.Namespace):
    """Score the text with each memory length and each sliding window, and write each figure as soon as it is found."""
    if not options.progress:
        transformers.logging.disable_progress_bar()
    options.device = find_device(options.device)
    take_lengths_of_training(options, follows=options.dynamic is not None or options.cache is not None)
    config = load_config(options.model)
    planned = readings(options, config)
    dynamic, cache = read_dynamic(options), read_cache(options)
    text = read_text(options)
    if len(text.token_ids) == 0:
        raise ValueError(f"{options.data} is empty: it has no token")
    check_vocabulary(text.tokenizer, options.data, options.model, config)
    text = text.beginning(options.max_tokens)
    changes = {} if options.decay_len is None else {"decay_len": options.decay_len}
    model = load_language_model(options.model, dtype=getattr(torch, options.dtype), **changes)
    model.to(options.device)
    report = {**describe(model, text, options), "results": [], "curves": {}}
    try:
        for protocol, reading in planned:
            reading = dataclasses.replace(
                reading, warm_up=options.warm_up, document_end=text.document_end, progress=options.progress
            )
            report["results"].append({"protocol": protocol, **score(model, text, reading, dynamic, cache)})
            report["curves"] = curves(report["results"], config)
            if not options.json:
                print_row(report["results"])
            if options.output is not None:
                options.output.parent.mkdir(parents=True, exist_ok=True)
                write_text(options.output, json.dumps(report, indent=2, allow_nan=False) + "\n")
    finally:
        # Earlier figures are printed even after an error or Ctrl-C.
        if options.json and report["results"]:
            print(json.dumps(report, indent=2, allow_nan=False))
    if not options.json:
        print_curves(report["curves"])
    if options.plot is not None:
        plot(report, options.plot)


def describe(model: TransfoXLForCausalLM, text: TokenisedText, options: argparse.Namespace) -> dict[str, Any]:
    """The settings that all figures have in common, for JSON."""
    return {
        "model": options.model,
        "parameters": model.num_parameters(),
        "initial_memory": model.config.initial_memory,
        "same_length_counts_self": model.config.same_length_counts_self,
        "decay_len": model.config.decay_len,
        "attn_type": model.config.attn_type,
        "attn_implementation": model.config._attn_implementation,
        "data": str(options.data),
        "corpus": text.corpus,
        "split": options.split if text.corpus else None,
        "words": text.words,
        "characters": text.characters,
        "device": torch.cuda.get_device_name(model.device)
        if model.device.type == "cuda"
        else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "dtype": options.dtype,
        **origin(),
        "date": datetime.date.today().isoformat(),
    }


def take_lengths_of_training(options: argparse.Namespace, follows: bool) -> None:
    """Take the lengths that are not given from the results.json of `txl-train`, so that one model has one figure. With
    a cache or dynamic evaluation (`follows`) `batch_size` is 1: several streams would learn from one part each."""
    try:
        found = read_results(Path(options.model))["test"]
        lengths, document_end = {name: int(found[name]) for name in LENGTHS}, found.get("document_end")
    except (ValueError, KeyError, TypeError, AttributeError):
        # results.json is missing, of other weights or of another program.
        lengths, document_end = {}, None
        if (path := Path(options.model, RESULTS)).is_file():
            print(f"{path} is not used: it is of other weights, or not txl-train's", file=sys.stderr)
    shown = []
    if lengths and options.document_end is None and (document_end is None or isinstance(document_end, int)):
        # The token's id is the model's, whose vocabulary the text was prepared with.
        options.document_end = "none" if document_end is None else document_end
        shown = ["as one text" if document_end is None else f"in documents that end with token {document_end}"]
    taken = {name: value for name, value in lengths.items() if getattr(options, name) is None}
    if options.sliding_window:
        taken.pop("memory_length", None)
    if follows:
        taken.pop("batch_size", None)
    # A sliding window does not read these two.
    unread = ("segment_length", "ext_len") if options.sliding_window and not options.memory_length else ()
    for name, value in taken.items():
        setattr(options, name, {"memory_length": [value], "same_length": str(bool(value)).lower()}.get(name, value))
    options.batch_size = 1 if options.batch_size is None else options.batch_size
    shown = [f"--{name} {taken[name]}" for name in taken if name not in ("same_length", *unread)] + shown
    if shown:
        print(f"as training scored it ({RESULTS}): {', '.join(shown)}", file=sys.stderr)


def find_document_end(options: argparse.Namespace, text: TokenisedText) -> int | None:
    """The token that ends each document: from --document_end, from training, or else from the data. Raises a
    ValueError if that of --document_end is not in the vocabulary, or not in the text."""
    if isinstance(options.document_end, int):
        return options.document_end
    found = read_document_end(options.data, text.tokenizer, options.document_end)
    if None not in (found, options.document_end) and not (np.asarray(text.token_ids[:]) == found).any():
        raise ValueError(
            f"--document_end {options.document_end} is not in the text: leave it out, or read the text as one with "
            "--document_end none"
        )
    return found


def check_statistics(tokens: int, train: TokenisedText) -> None:
    """Raise a ValueError if the statistics would need more tokens than the training text has."""
    if tokens > len(train.token_ids):
        raise ValueError(f"--statistics {tokens} is more than the training text has: {len(train.token_ids)}")


def readings(options: argparse.Namespace, config: TransfoXLConfig) -> list[tuple[str, Reading]]:
    """The readings of a text, each with the name of its protocol: the memory lengths, then the sliding windows. Raises
    a ValueError if the model cannot be read with one of them."""
    same_length = None if options.same_length is None else options.same_length == "true"
    segment_length = config.tgt_len if options.segment_length is None else options.segment_length
    memories = options.memory_length or ([] if options.sliding_window else [config.mem_len])
    common = {"batch_size": options.batch_size, "clamp_len": options.clamp_len}
    with_memory = Reading(segment_length, ext_len=options.ext_len, same_length=same_length, **common)
    found = [(MEMORY, dataclasses.replace(with_memory, memory_length=length)) for length in memories]
    # A query sees the whole window; same_length would hide a part of it.
    found += [
        (WINDOW, Reading(1, 0, ext_len=window - 1, same_length=False, **common)) for window in options.sliding_window
    ]
    for _, reading in found:
        reading.of(config)
    return found


def read_cache(options: argparse.Namespace) -> ContinuousCache | None:
    """The cache of --cache."""
    if options.cache is None:
        return None
    size, weight, temperature = options.cache
    try:
        return ContinuousCache(int(size) if size.is_integer() else size, weight, temperature)
    except ValueError as error:
        raise ValueError(f"--cache {size:g} {weight:g} {temperature:g}: {error}") from None


def read_dynamic(options: argparse.Namespace) -> DynamicEvaluation | None:
    """The dynamic evaluation of --dynamic and its options."""
    if options.dynamic is None:
        return None
    given = {name: getattr(options, name) for name in ("decay", "epsilon", "parameters")}
    settings = {name: value for name, value in given.items() if value is not None}
    if options.statistics is not None:
        if not options.data.is_dir():
            raise ValueError(f"--statistics needs a folder of txl-prepare, which {options.data} is not")
        train = read_prepared(options.data, "train")
        check_statistics(options.statistics, train)
        settings["statistics"] = train.token_ids[: options.statistics]
    return DynamicEvaluation(options.dynamic, **settings)


def score(
    model: TransfoXLForCausalLM,
    text: TokenisedText,
    reading: Reading,
    dynamic: DynamicEvaluation | None,
    cache: ContinuousCache | None,
) -> dict[str, Any]:
    """The figures of one reading, with their settings and seconds; None in the place of infinity."""
    started = time.perf_counter()
    [result] = evaluate_caches(model, text.token_ids, reading, [cache], dynamic)
    seconds = time.perf_counter() - started
    check_number(result)
    row = {
        "nll": result.nll,
        **figures(result.nll),
        "perplexity_per_word": result.perplexity_per_word(text.words) if text.words else None,
        "bits_per_character": result.bits_per_character(text.characters) if text.characters else None,
        **dataclasses.asdict(result),
        "seconds": seconds,
        "tokens_per_second": result.tokens / seconds,
    }
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }


def check_number(result: LanguageModelEvaluation):
    """Raise a ValueError if the mean loss is NaN."""
    if math.isnan(result.nll):
        raise ValueError("the model computes losses that are no numbers (NaN) for this text")


def attention_length(row: dict[str, Any]) -> int:
    """The number of tokens that a token sees: the length of the memory, or of the window."""
    return row["memory_length"] if row["protocol"] == MEMORY else row["ext_len"] + 1


def curves(results: list[dict[str, Any]], config: TransfoXLConfig) -> dict[str, dict[str, Any]]:
    """The paper's columns for each protocol: `init`, `best` and the shortest length that is as good as the best."""
    trained = {MEMORY: config.mem_len, WINDOW: config.tgt_len + config.ext_len}
    found = {}
    for protocol, length in trained.items():
        points = {
            attention_length(row): row["perplexity"]
            for row in results
            if row["protocol"] == protocol and row["perplexity"] is not None
        }
        if points:
            best = min(points.values())
            shortest = min(n for n, value in points.items() if round(value, 2) == round(best, 2))
            found[protocol] = {"init": points.get(length), "best": best, "attention_length": shortest}
    return found


def print_row(results: list[dict[str, Any]]):
    """Print the newest row of the table, and the header before the first row."""
    row = results[-1]
    columns = {
        "protocol": row["protocol"],
        "length": attention_length(row),
        "segment": row["segment_length"],
        "perplexity": row["perplexity"],
        "bits/token": row["bits_per_token"],
        "ppl/word": row["perplexity_per_word"],
        "bits/char": row["bits_per_character"],
        "tokens": row["tokens"],
        "tokens/s": round(row["tokens_per_second"]),
    }
    if len(results) == 1:
        print("  ".join(f"{name:>14}" if name == "protocol" else f"{name:>10}" for name in columns))
    cells = (
        "-" if value is None else f"{value:.3f}" if isinstance(value, float) else value for value in columns.values()
    )
    print("  ".join(f"{cell:>14}" if i == 0 else f"{cell:>10}" for i, cell in enumerate(cells)), flush=True)


def print_curves(found: dict[str, dict[str, Any]]):
    for protocol, curve in found.items():
        at_training = "" if curve["init"] is None else f"{curve['init']:.2f} at the length of training, "
        print(
            f"{protocol}: perplexity {at_training}{curve['best']:.2f} at best, from length {curve['attention_length']}"
        )


def plot(report: dict[str, Any], path: Path):
    """Perplexity by attention length, as the paper's Figure 4."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for protocol in report["curves"]:
        rows = [row for row in report["results"] if row["protocol"] == protocol and row["perplexity"] is not None]
        points = sorted((attention_length(row), row["perplexity"]) for row in rows)
        axes.plot(*zip(*points, strict=True), marker="o", label=protocol)
    axes.set_xlabel("attention length (tokens)")
    axes.set_ylabel("perplexity")
    axes.set_title(f"{report['model']} on {report['data']}", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as aside:
        figure.savefig(aside, dpi=150)


def read_text(options: argparse.Namespace) -> TokenisedText:
    if options.data.is_dir():
        if options.tokenizer is not None:
            raise ValueError(f"--tokenizer is for a text file: {options.data} has been tokenised")
        text = read_prepared(options.data, options.split)
    else:
        name = options.tokenizer or options.model
        tokenizer = load_tokenizer(name) if options.tokenizer else find_tokenizer(name)
        if tokenizer is None:
            raise ValueError(f"{name} has no tokenizer: name one with --tokenizer")
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ValueError(f"{name} reads music: --data {options.data} must be a folder of txl-prepare")
        text = read_raw(options.data, tokenizer)
    return dataclasses.replace(text, document_end=find_document_end(options, text))


if __name__ == "__main__":
    main()
