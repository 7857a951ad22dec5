"""What `txl-evaluate` does: a text scored with memories and windows, and what is said and written of it."""

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
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ..data.loading import (
    check_symbols_of,
    find_device,
    find_tokenizer,
    load_config,
    load_language_model,
    load_tokenizer,
)
from ..data.streams import check_sizes
from ..data.texts import TokenisedText, read_document_end, read_prepared, read_raw
from ..files import whole_file, write_text
from ..kernels.attention_triton import fastest_attention
from ..transfo_xl.configuration_transfo_xl import TransfoXLConfig
from ..transfo_xl.memory_transfo_xl import MemoryLengths
from ..transfo_xl.modeling_transfo_xl import TransfoXLForCausalLM
from .cards import RESULTS, origin, read_results
from .continuous_cache import ContinuousCache
from .dynamic import DynamicEvaluation
from .language_model import LENGTHS, LanguageModelEvaluation, evaluate_language_model, figures

__all__ = [
    "check_number",
    "check_protocol",
    "check_vocabulary",
    "describe",
    "find_document_end",
    "protocols",
    "run",
    "take_lengths_of_training",
]

MEMORY, WINDOW = "memory", "sliding window"


def run(options: argparse.Namespace):
    """Score the text with each memory length and each sliding window; each figure is kept when it is there."""
    if not options.progress:
        transformers.logging.disable_progress_bar()
    options.device = find_device(options.device)
    take_lengths_of_training(options, follows=options.dynamic is not None or options.cache is not None)
    config = load_config(options.model)
    planned = protocols(options, config)
    for settings in planned:
        check_protocol(config, clamp_len=options.clamp_len, **settings)
    adaptation = read_adaptation(options)
    text = read_text(options)
    if len(text.token_ids) == 0:
        raise ValueError(f"{options.data} is empty: it has no token")
    check_vocabulary(text, config, options.model, options.data)
    text = text.beginning(options.max_tokens)
    if config.initial_memory == "empty":
        tell_unused_memory(planned, len(text.token_ids), options.batch_size)
    model = load_language_model(options.model, dtype=getattr(torch, options.dtype))
    model.to(options.device)
    if model.device.type == "cuda" and model.dtype != torch.float32:
        model.set_attn_implementation(fastest_attention(config.n_head, config.d_head, model.device) or "auto")
    report = {**describe(model, text, options), "results": [], "curves": {}}
    try:
        for settings in planned:
            report["results"].append(score(model, text, options, **settings, **adaptation))
            report["curves"] = curves(report["results"], config)
            if not options.json:
                print_row(report["results"], text)
            if options.output is not None:
                options.output.parent.mkdir(parents=True, exist_ok=True)
                write_text(options.output, json.dumps(report, indent=2, allow_nan=False) + "\n")
    finally:
        # Stopped or refused half-way, what has been found is not lost.
        if options.json and report["results"]:
            print(json.dumps(report, indent=2, allow_nan=False))
    if not options.json:
        print_curves(report["curves"])
    if options.plot is not None:
        plot(report, options.plot)


def describe(model: TransfoXLForCausalLM, text: TokenisedText, options: argparse.Namespace) -> dict[str, Any]:
    """What all figures have in common."""
    return {
        "model": options.model,
        "parameters": model.num_parameters(),
        "initial_memory": model.config.initial_memory,
        "same_length_counts_self": model.config.same_length_counts_self,
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
    """Where `txl-train` scored the model, score it likewise but for what is asked for: one model has one figure.

    Args:
        follows: a cache or the weights are to follow the text. In many streams each sees a part of it, and so they are
            not taken: it is one.
    """
    path = Path(options.model, RESULTS)
    try:
        found = read_results(Path(options.model))["test"]
        lengths = {name: int(found[name]) for name in LENGTHS}
        document_end = found.get("document_end")
    except (ValueError, KeyError, TypeError, AttributeError):
        # Of another origin, or no folder.
        lengths, document_end = {}, None
        if path.is_file():
            print(f"{path} is not used: it is of other weights, or not txl-train's", file=sys.stderr)
    shown = []
    if lengths and options.document_end is None and (document_end is None or isinstance(document_end, int)):
        # The token's id: the vocabulary is the model's.
        options.document_end = "none" if document_end is None else document_end
        shown = ["as one text" if document_end is None else f"in documents that end with token {document_end}"]
    taken = {name: value for name, value in lengths.items() if getattr(options, name) is None}
    if options.sliding_window:
        taken.pop("memory_length", None)
    if follows:
        taken.pop("batch_size", None)
    # A window is read by itself.
    unread = ("segment_length", "ext_len") if options.sliding_window and not options.memory_length else ()
    for name, value in taken.items():
        setattr(options, name, {"memory_length": [value], "same_length": str(bool(value)).lower()}.get(name, value))
    options.batch_size = 1 if options.batch_size is None else options.batch_size
    check_sizes(batch_size=options.batch_size)
    shown = [f"--{name} {taken[name]}" for name in taken if name not in ("same_length", *unread)] + shown
    if shown:
        print(f"as training scored it ({RESULTS}): {', '.join(shown)}", file=sys.stderr)


def find_document_end(options: argparse.Namespace, text: TokenisedText) -> int | None:
    """The token that ends each document: as asked for or as training had it, else as the data was prepared.

    Raises:
        ValueError: the one that was asked for is not in the vocabulary, or not in the text.
    """
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
    """Raise a ValueError where the statistics are to be taken from more than the training text."""
    if tokens > len(train.token_ids):
        raise ValueError(f"--statistics {tokens} is more than the training text has: {len(train.token_ids)}")


# ---- protocols --------------------------------------------------------------------------------------------------


def protocols(options: argparse.Namespace, config: TransfoXLConfig) -> list[dict[str, Any]]:
    """What each evaluation sets."""
    same_length = None if options.same_length is None else options.same_length == "true"
    with_memory = [
        {
            "protocol": MEMORY,
            "segment_length": config.tgt_len if options.segment_length is None else options.segment_length,
            "memory_length": memory_length,
            "ext_len": options.ext_len,
            "same_length": same_length,
        }
        for memory_length in options.memory_length or ([] if options.sliding_window else [config.mem_len])
    ]
    # What a query sees is the window itself: same_length would take it away.
    windows = [
        {
            "protocol": WINDOW,
            "segment_length": 1,
            "memory_length": 0,
            "ext_len": window - 1,
            "same_length": False,
        }
        for window in options.sliding_window
    ]
    return with_memory + windows


def check_protocol(
    config: TransfoXLConfig, segment_length: int, memory_length: int, ext_len: int | None, clamp_len: int | None, **_
):
    """Raise a ValueError for lengths that the model cannot be read with, before it is read with others."""
    check_sizes(segment_length=segment_length)
    filled = MemoryLengths(memory_length, ext_len, clamp_len).of(config)
    lengths = {"segment_length": segment_length, "memory_length": memory_length, "ext_len": ext_len}
    given = ", ".join(f"{name}={value}" for name, value in lengths.items() if value is not None)
    config.positions.check_segment(segment_length + filled.ext_len, config, given)


def read_adaptation(options: argparse.Namespace) -> dict[str, Any]:
    """What is asked for beside the model as it stands: `dynamic` and `cache`."""
    found: dict[str, Any] = {"dynamic": None, "cache": None}
    if options.cache is not None:
        size, weight, temperature = options.cache
        try:
            found["cache"] = ContinuousCache(int(size) if size.is_integer() else size, weight, temperature)
        except ValueError as error:
            raise ValueError(f"--cache {size:g} {weight:g} {temperature:g}: {error}") from None
    if options.dynamic is not None:
        given = {name: getattr(options, name) for name in ("decay", "epsilon", "parameters")}
        settings = {name: value for name, value in given.items() if value is not None}
        if options.statistics is not None:
            if not options.data.is_dir():
                raise ValueError(f"--statistics needs a folder of txl-prepare, which {options.data} is not")
            train = read_prepared(options.data, "train")
            check_statistics(options.statistics, train)
            settings["statistics"] = train.token_ids[: options.statistics]
        found["dynamic"] = DynamicEvaluation(options.dynamic, **settings)
    return found


def tell_unused_memory(planned: list[dict[str, Any]], tokens: int, streams: int) -> None:
    """Say where all memories give one figure, as no segment follows another."""
    # The first token of a stream is no target.
    longest = -(-tokens // streams) - 1
    if any(settings["memory_length"] and longest <= settings["segment_length"] for settings in planned):
        fewer = "" if streams == 1 else "--batch_size 1, or "
        print(
            f"no memory is used: each of {streams} stream(s) has {longest} tokens, no more than a segment. Try {fewer}"
            "a smaller --segment_length",
            file=sys.stderr,
        )


def score(
    model: TransfoXLForCausalLM, text: TokenisedText, options: argparse.Namespace, protocol: str, **settings
) -> dict[str, Any]:
    started = time.perf_counter()
    result = evaluate_language_model(
        model,
        text.token_ids,
        batch_size=options.batch_size,
        warm_up=options.warm_up,
        clamp_len=options.clamp_len,
        document_end=text.document_end,
        progress=options.progress,
        **settings,
    )
    seconds = time.perf_counter() - started
    check_number(result)
    speed = {"seconds": seconds, "tokens_per_second": result.tokens / seconds}
    described = {"protocol": protocol} | measures(result, text) | dataclasses.asdict(result) | speed
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in described.items()
    }


def check_number(result: LanguageModelEvaluation):
    """
    Raises:
        ValueError: the model computed something else than numbers, which no figure shows.
    """
    if math.isnan(result.nll):
        raise ValueError("the model computes losses that are no numbers (NaN) for this text")


def measures(result: LanguageModelEvaluation, text: TokenisedText) -> dict[str, float | None]:
    return {
        "nll": result.nll,
        **figures(result.nll),
        "perplexity_per_word": result.perplexity_per_word(text.words) if text.words else None,
        "bits_per_character": result.bits_per_character(text.characters) if text.characters else None,
    }


# ---- what is said -----------------------------------------------------------------------------------------------


def attention_length(row: dict[str, Any]) -> int:
    """How far back a token sees: the memory, or all of the window."""
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


def print_row(results: list[dict[str, Any]], text: TokenisedText):
    """The newest line of the table, and its head before the first."""
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
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
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
    plt.close(figure)


# ---- what is scored ---------------------------------------------------------------------------------------------


def read_text(options: argparse.Namespace) -> TokenisedText:
    if options.data.is_dir():
        if options.tokenizer is not None:
            raise ValueError(f"--tokenizer is for a text file: {options.data} has been tokenised")
        text = read_prepared(options.data, options.split)
        return dataclasses.replace(text, document_end=find_document_end(options, text))
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else find_tokenizer(options.model)
    if tokenizer is None:
        raise ValueError(f"{options.model} has no tokenizer: name one with --tokenizer")
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError(
            f"{options.tokenizer or options.model} reads music: --data {options.data} must be a folder of txl-prepare"
        )
    text = read_raw(options.data, tokenizer)
    return dataclasses.replace(text, document_end=find_document_end(options, text))


def check_vocabulary(text: TokenisedText, config: PreTrainedConfig, model: str, data: Path):
    """Raise a ValueError unless the text's symbols are the model's, of this name and configuration."""
    if len(text.tokenizer) > config.vocab_size:
        raise ValueError(
            f"{data} has a vocabulary of {len(text.tokenizer)}, which does not fit {model} with one of "
            f"{config.vocab_size}"
        )
    check_symbols_of(model, text.tokenizer, data)
