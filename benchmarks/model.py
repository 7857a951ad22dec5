"""Training, streaming evaluation and decoding beside other implementations of the same size.

    python benchmarks/model.py --peer-python OTHER_ENVIRONMENT/bin/python      # the workloads with a bar, on a CPU
    python benchmarks/model.py --device cuda --workloads train-nvidia-base     # fp32 weights, bf16 autocast
    python benchmarks/model.py --workloads decode-wt103-640-trained --trained MODEL DATA   # trained, prepared
    python benchmarks/model.py --list

Contenders are processes that take turns: each repeat runs every contender once, so that whatever else the machine
does falls on all of them. First the gate: every contender with our weights must give the losses of `ours-eager`, in
training after optimiser steps too (without dropout, and on a GPU for some rows of the batch), or write its text with
its probabilities; one that does not is not timed, and the program fails when the others are done.

    ours                  the defaults; evaluation and decoding with the memory projected once; when it evaluates, the
                          softmax scores several segments at once, and on a GPU one graph reads each, as in
                          evaluate_language_model
    ours-step             evaluation with the loss of each segment before the next, launched one by one
    ours-mems             evaluation with the memory as hidden states
    ours-eager, …         another attn_implementation; eager evaluates with hidden states and is what all must equal
    ours-…-compile        training with each layer through torch.compile, with the backend named before if there is one
    ours-…-graphs         and the kernels of a step launched together, as `txl-train` does with small steps
    ours-static           decoding with generate's static cache, which is compiled on a GPU
    ours-graph            decoding as generate does it on a GPU where nothing is said: a captured graph a token
    ours-bf16             in bf16, or trained under autocast, beside others in fp32; the gate lets it be off by more
    ours-int8             the layers' weights in int8, by torchao, for decoding; likewise
    legacy                transformers 4.35.2, in the interpreter that --peer-python names; fp32 (TF32 on a GPU)
    legacy-autocast       the same under autocast, where that works
    gpt2                  what a user would pick instead: GPT-2 of the same size with SDPA; no memory in training
    x-transformers        lucidrains' decoder of the same size with memory (T5's relative bias, pre-norm, GELU), where
                          it is installed and there are no cutoffs
    x-transformers-rotary the same with rotary positions and fused attention
    floor                 our layers with plain causal SDPA: absolute positions, no relative term

A turn is an optimiser step (forward, backward, clipping, step), a segment, or `generate`; on a GPU several, after
one that does not count. Peak memory is that of the contender's own process in a turn behind the others, over what it
held before it had a model. Rows go to `results/model.csv`.
"""

import argparse
import copy
import itertools
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import harness

SCRIPT = __file__
ENWIK8 = {
    "vocab_size": 204,
    "cutoffs": [],
    "div_val": 1,
    "d_model": 512,
    "d_embed": 512,
    "n_head": 8,
    "d_head": 64,
    "d_inner": 2048,
    "n_layer": 12,
    "clamp_len": -1,
    "same_length": False,
    "untie_r": True,
    "dropout": 0.0,
    "eos_token_id": None,
    # Weights so large that attention is far from uniform, and an error in it would show.
    "init_std": 0.05,
}
WT103 = ENWIK8 | {
    "vocab_size": 267735,
    "cutoffs": [20000, 40000, 200000],
    "d_model": 410,
    "d_embed": 410,
    "n_head": 10,
    "d_head": 41,
    "d_inner": 2100,
    "n_layer": 16,
}
NVIDIA = WT103 | {
    "cutoffs": [19997, 39997, 199997],
    "d_model": 512,
    "d_embed": 512,
    "n_head": 8,
    "d_head": 64,
    "d_inner": 2048,
    "untie_r": False,
}
LARGE = {"d_model": 1024, "d_embed": 1024, "n_head": 16, "d_head": 64, "d_inner": 4096, "n_layer": 18, "div_val": 4}
MODELS = {
    "enwik8": ENWIK8,
    "enwik8-large": ENWIK8
    | {"d_model": 1024, "d_embed": 1024, "n_head": 8, "d_head": 128, "d_inner": 3072, "n_layer": 24},
    "wt103": WT103,
    "wt103-large": WT103 | LARGE,
    "nvidia-base": NVIDIA,
    "nvidia-large": NVIDIA | LARGE,
    "wikitext2": ENWIK8
    | {"vocab_size": 33278, "d_model": 400, "d_embed": 400, "n_head": 10, "d_head": 40, "d_inner": 900, "n_layer": 16},
    "smoke": ENWIK8
    | {"vocab_size": 60, "cutoffs": [20, 40], "n_layer": 2, "d_model": 32, "d_embed": 32, "n_head": 2, "d_head": 16}
    | {"d_inner": 64, "init_std": 0.3},
}
# Of attention probabilities, in the recipe.
DROPATT = {"nvidia-large": 0.2, "wikitext2": 0.2}
DROPOUT = {
    "wikitext2": 0.2,
    "enwik8": 0.1,
    "enwik8-large": 0.15,
    "wt103-large": 0.2,
    "nvidia-base": 0.1,
    "nvidia-large": 0.2,
}
REFERENCE = "ours-eager"
# Contenders that compute in another type than the rest of their run.
TYPES = {"ours-bf16": "bf16", "ours-int8": "int8"}
X_TRANSFORMERS = ["x-transformers", "x-transformers-rotary"]
CPU = {
    "train": ["ours", "ours-eager", "legacy", "gpt2", *X_TRANSFORMERS, "floor"],
    "evaluate": ["ours", "ours-step", "ours-mems", "ours-eager", "legacy", *X_TRANSFORMERS, "floor"],
    "decode": ["ours", "ours-eager", "legacy", "gpt2", "floor"],
}
BACKENDS = ["ours", "ours-sdpa", "ours-txl_triton", "ours-flex_attention"]
CUDA = {
    "train": [
        *BACKENDS,
        "ours-compile",
        "ours-txl_triton-compile",
        "ours-txl_triton-graphs",
        "ours-txl_triton-compile-graphs",
        "ours-eager",
        "legacy",
        "legacy-autocast",
        "gpt2",
        *X_TRANSFORMERS,
        "floor",
    ],
    "evaluate": [*BACKENDS, "ours-step", "ours-mems", "ours-eager", "legacy", *X_TRANSFORMERS, "floor"],
    "decode": ["ours", "ours-static", "ours-eager", "legacy", "gpt2", "floor"],
}


@dataclass(frozen=True)
class Workload:
    """`segment` tokens and rows in a turn; in decoding, tokens to write after a full memory and one token.

    Args:
        sampled: tokens are drawn from the 40 best at temperature 1, of a softmax whose biases make words as probable
            as they are frequent: with random weights alone, the best would all be in the first bin.
        trained: the weights are those of `--trained`, and so is the text that is gone on with. The floor is left out:
            its layers would have learnt nothing, and which bins the softmax computes depends on what it is given.
        clamp: distances beyond it share one position, as where published results were read; -1: all differ.
        same_length: each token sees `memory` tokens before it, so that the segment may have any length.
    """

    task: str
    model: str
    memory: int
    segment: int
    batch: int = 1
    dropout: bool = False
    gpu: bool = True
    sampled: bool = False
    trained: bool = False
    clamp: int = -1
    same_length: bool = False

    @property
    def config(self) -> dict:
        dropout = {"dropout": DROPOUT[self.model], "dropatt": DROPATT.get(self.model, 0.0)} if self.dropout else {}
        lengths = {"mem_len": self.memory, "clamp_len": self.clamp, "same_length": self.same_length}
        return MODELS[self.model] | lengths | dropout

    @property
    def optimizer(self) -> str:
        if self.task != "train":
            return ""
        return "LAMB" if self.model.startswith("nvidia") else "Adam"


# Those that have a bar on a CPU, in the order of the table.
WORKLOADS = {
    "train-enwik8": Workload("train", "enwik8", 512, 512, 2, gpu=False),
    "train-enwik8-dropout": Workload("train", "enwik8", 512, 512, 2, dropout=True, gpu=False),
    "train-wt103": Workload("train", "wt103", 150, 150, 2, gpu=False),
    "evaluate-enwik8-2048": Workload("evaluate", "enwik8", 2048, 128, gpu=False),
    "evaluate-enwik8-3800": Workload("evaluate", "enwik8", 3800, 128, gpu=False),
    "evaluate-enwik8-3800-clamped": Workload("evaluate", "enwik8", 3800, 128, gpu=False, clamp=1000),
    "evaluate-wt103-640": Workload("evaluate", "wt103", 640, 64, gpu=False),
    "decode-enwik8-512": Workload("decode", "enwik8", 512, 64, gpu=False),
    "decode-enwik8-2048": Workload("decode", "enwik8", 2048, 64, gpu=False),
    "decode-enwik8-2048-clamped": Workload("decode", "enwik8", 2048, 64, gpu=False, clamp=820),
    "decode-wt103-640": Workload("decode", "wt103", 640, 64, gpu=False),
    "decode-wt103-640-sampled": Workload("decode", "wt103", 640, 64, gpu=False, sampled=True),
    "decode-wt103-640-trained": Workload("decode", "wt103", 640, 64, gpu=False, sampled=True, trained=True),
    # For a GPU, the most important first.
    "train-nvidia-base": Workload("train", "nvidia-base", 192, 192, 256, dropout=True),
    "train-nvidia-large": Workload("train", "nvidia-large", 384, 384, 128, dropout=True),
    "train-nvidia-base-b64": Workload("train", "nvidia-base", 192, 192, 64, dropout=True),
    "train-nvidia-large-b32": Workload("train", "nvidia-large", 384, 384, 32, dropout=True),
    "train-enwik8-b22": Workload("train", "enwik8", 512, 512, 22, dropout=True),
    "train-enwik8-large-b8": Workload("train", "enwik8-large", 768, 768, 8, dropout=True),
    "train-wikitext2-b32": Workload("train", "wikitext2", 150, 150, 32, dropout=True),
    "train-wt103-large-b16": Workload("train", "wt103-large", 384, 384, 16, dropout=True),
    "evaluate-enwik8-large-3800": Workload("evaluate", "enwik8-large", 3800, 128),
    "evaluate-wt103-large-1600": Workload("evaluate", "wt103-large", 1600, 128),
    "decode-wt103-large-1600": Workload("decode", "wt103-large", 1600, 64),
    "decode-enwik8-large-3800": Workload("decode", "enwik8-large", 3800, 64),
}
for batch in (1, 16, 32):
    WORKLOADS |= {
        f"evaluate-nvidia-base-640-b{batch}": Workload("evaluate", "nvidia-base", 640, 64, batch),
        f"evaluate-nvidia-large-1600-b{batch}": Workload("evaluate", "nvidia-large", 1600, 128, batch),
        f"decode-nvidia-base-640-b{batch}": Workload("decode", "nvidia-base", 640, 64, batch),
    }
# What an evaluation with `same_length` reads in a pass where its segments are short.
WORKLOADS["evaluate-nvidia-base-640-long"] = Workload("evaluate", "nvidia-base", 640, 1024, same_length=True)
SMOKE = {
    "smoke-train": Workload("train", "smoke", 8, 8, 2),
    "smoke-evaluate": Workload("evaluate", "smoke", 8, 8, 2),
    "smoke-decode": Workload("decode", "smoke", 8, 32),
}
# The module that a contender's process needs, by the beginning of its name; for ours `txl_hf.evaluation.reading`.
LIBRARIES = {
    "legacy": "transformers.models.transfo_xl.modeling_transfo_xl",
    "gpt2": "transformers.models.gpt2.modeling_gpt2",
    "x": "x_transformers",
}
# The legacy model decodes a quarter of the tokens: they all cost the same.
LEGACY_SHARE = 4
CHECKED_TOKENS = 8
# On a GPU eager attention would not fit with every row.
CHECKED_ROWS = {"cpu": 64, "cuda": 4}
WARM_UP = {"cpu": 1, "cuda": 3}
STEPS = {"cpu": {"train": 1, "evaluate": 1, "decode": 1}, "cuda": {"train": 4, "evaluate": 20, "decode": 1}}
# The mean NLL of a segment may differ by so much; Adam and LAMB make much of small differences between gradients.
# What 8 bits do to weights is no error: there the gate asks whether it is the same model, and the row says the rest.
TOLERANCE = {"fp32": {"train": 1e-3, "evaluate": 1e-4, "decode": 1e-4}, "int8": {"decode": 1e-1}}
# In half precision. What is decoded is compared token by token, where the others have means: a logit of bf16 from 8 on
# is a multiple of 0.0625, and from 4 on of half of that.
COARSE = {"train": 3e-2, "evaluate": 3e-2, "decode": 1e-1}
# Segments that are launched before a graph reads others: as `captured` has it, and known where legacy is alone.
LAUNCHED = 12
# What may differ from a workload's configuration in that of a trained model.
FREE = {"mem_len", "clamp_len", "dropout", "dropatt", "init_std", "eos_token_id"}


def main(given: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_arguments(parser, "model.csv", budget=60.0)
    parser.add_argument("--peer-python", help="interpreter with transformers 4.35.2; without it there is no legacy")
    parser.add_argument(
        "--trained", nargs=2, metavar=("MODEL", "DATA"), help="a trained model and its prepared text, for `-trained`"
    )
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS, *SMOKE], metavar="WORKLOAD")
    parser.add_argument("--contenders", nargs="+", help="only these")
    parser.add_argument("--list", action="store_true", help="list the workloads")
    parser.add_argument("--worker", nargs=3, metavar=("CONTENDER", "WORKLOAD", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.list:
        for name, workload in WORKLOADS.items():
            print(f"{name:30} {workload}")
        return
    if arguments.worker:
        harness.prepare(arguments)
        return work(*arguments.worker, arguments)
    harness.complete(arguments)
    chosen = arguments.workloads or [
        name
        for name, workload in WORKLOADS.items()
        if workload.gpu == (arguments.device == "cuda") and (arguments.trained or not workload.trained)
    ]
    if arguments.smoke:
        chosen = arguments.workloads or list(SMOKE)
    if bool(arguments.trained) != any((WORKLOADS | SMOKE)[name].trained for name in chosen):
        parser.error("--trained goes with a workload whose name ends in -trained, and such a workload with --trained")
    evaluated = [name for name in chosen if (WORKLOADS | SMOKE)[name].task == "evaluate"]
    if evaluated and "gpt2" in (arguments.contenders or ()):
        parser.error(f"gpt2 has no memory to evaluate with: leave it out of --contenders, or run {evaluated[0]} apart")
    print(harness.FLOP_FORMULA)
    peak = harness.matmul_peak(arguments.device, arguments.dtype)
    print(f"peak: {peak / 1e12:.4g} TFLOP/s measured in a matrix product in {arguments.dtype}\n")
    wrong = [error for name in chosen for error in compare(name, peak, arguments)]
    if wrong:
        sys.exit("\n".join(f"error: {error}" for error in wrong))


def compare(name: str, peak: float, arguments: argparse.Namespace) -> list[str]:
    """Measure a workload; returns what is wrong with those that did not pass the gate and were left out."""
    workload = (WORKLOADS | SMOKE)[name]
    names = list(dict.fromkeys([*chosen_contenders(workload, arguments), REFERENCE]))
    with tempfile.TemporaryDirectory() as folder:
        try:
            ids = save(workload, folder, arguments.trained)
        except ValueError as error:
            sys.exit(f"error: {error}")
        contenders = {contender: start(contender, name, folder, arguments) for contender in names}
        try:
            checks = harness.ask_all(contenders, "check")
            differences, wrong = gate(workload.task, checks, arguments.dtype)
            unwanted = set() if REFERENCE in chosen_contenders(workload, arguments) else {REFERENCE}
            for contender in unwanted | wrong.keys():
                contenders.pop(contender).stop()
            turns = harness.take_turns(contenders, arguments.seconds, *arguments.repeats)
            peaks = harness.ask_all(contenders, "peak")
        except harness.ContenderError as error:
            sys.exit(f"error: {error}")
        finally:
            for contender in contenders.values():
                contender.stop()
    shares = harness.bin_shares(ids, workload.config["cutoffs"], workload.config["vocab_size"])
    rows = []
    for contender, answers in turns.items():
        row = harness.origin(arguments.device, arguments.dtype, arguments.threads)
        row |= {key: checks[contender][key] for key in ("torch", "transformers")}
        row |= describe(name, workload, contender, checks[contender])
        row |= speed(answers, turns.get("legacy"))
        row |= utilisation(workload, contender, shares, row["tokens_per_second_p50"], peak)
        row["nll_difference"] = f"{differences[contender]:.1e}" if contender in differences else ""
        row["peak_mib"] = round(peaks[contender]["peak_mib"], 1)
        rows.append(row)
        figures = f"{row['tokens_per_second_p50']:>10} tokens/s {row['times_legacy_p50'] or '-':>6}× legacy"
        figures += f" {row['peak_mib']:>9} MiB  MFU {row['mfu']:<7} NLL ± {row['nll_difference'] or '-':8}"
        if "token_ms_p50" in row:
            figures += f" {row['token_ms_p50']} ms a token, p99 {row['token_ms_p99']}"
        print(f"{name:26} {contender:16} {figures}", flush=True)
    if rows:
        harness.append(arguments.output, rows)
    return list(wrong.values())


def chosen_contenders(workload: Workload, arguments: argparse.Namespace) -> list[str]:
    if arguments.contenders:
        return arguments.contenders
    names = (CPU if arguments.device == "cpu" else CUDA)[workload.task]
    # Without an adaptive softmax, as GPT-2 and x-transformers are, a large vocabulary makes another model.
    return [
        name
        for name in names
        if (arguments.peer_python or not name.startswith("legacy"))
        and (name not in ("gpt2", *X_TRANSFORMERS) or not workload.config["cutoffs"])
        and (name not in X_TRANSFORMERS or find_spec("x_transformers"))
        and (name != "floor" or not workload.trained)
    ]


def save(workload: Workload, folder: str, trained: tuple[str, str] | None = None):
    """The model that all contenders load, and the tokens that they read.

    Args:
        trained: folders of a model and of a text, which a trained workload takes and any other leaves alone.

    Raises:
        ValueError: the workload is trained, and there is no trained model, or one of another size.
    """
    import torch
    import transformers

    from txl_hf import TransfoXLConfig, TransfoXLForCausalLM

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = TransfoXLConfig(**workload.config)
    length = workload.memory + 1 if workload.task == "decode" else 4 * workload.segment
    # Token 0 stands for padding in generate.
    if workload.trained:
        if trained is None:
            raise ValueError("a trained workload goes on with a model: name its folder and the text's, by --trained")
        model, text = load_trained(config, workload, *trained)
        ids = text[text != 0][: workload.batch * length].view(workload.batch, length)
    else:
        model = TransfoXLForCausalLM(config)
        if workload.sampled:
            learn_frequencies(model)
        ids = harness.draw_ids(config.vocab_size, (workload.batch, length)).clamp(min=1)
    model.save_pretrained(folder)
    torch.save(ids, f"{folder}/ids.pt")
    return ids


def load_trained(config, workload: Workload, folder: str, data: str):
    """A trained model that remembers and goes on as the workload's, and the tokens of its test text.

    Raises:
        ValueError: it is of another size, or begins with another memory than legacy transformers.
    """
    import torch

    from txl_hf import TransfoXLForCausalLM
    from txl_hf.data.texts import read_prepared

    model = TransfoXLForCausalLM.from_pretrained(folder)
    for name in sorted({*workload.config, "initial_memory"} - FREE):
        found, wanted = getattr(model.config, name), getattr(config, name)
        if found != wanted:
            raise ValueError(f"--trained {folder} has {name}={found}, where the workload has {wanted}")
    model.config.mem_len, model.config.clamp_len = config.mem_len, config.clamp_len
    # No text ends before all have written as much.
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model, torch.as_tensor(read_prepared(Path(data), "test").token_ids[:])


def learn_frequencies(model):
    """Give the softmax the biases that make tokens, and bins, as probable as they are frequent."""
    import torch

    head, config = model.lm_head, model.config
    frequencies = harness.token_frequencies(config.vocab_size)
    of_layers = frequencies.log().split([len(layer.bias) for layer in head.out_layers])
    of_bins = [frequencies[start:end].sum().log() for start, end, _ in config.bins[1:]]
    with torch.no_grad():
        for layer, logarithms in zip(head.out_layers, of_layers, strict=True):
            layer.bias.copy_(logarithms)
        head.clusters.bias.copy_(torch.stack(of_bins))


def start(contender: str, workload: str, folder: str, arguments: argparse.Namespace) -> harness.Contender:
    python = arguments.peer_python if contender.startswith("legacy") else sys.executable
    options = ["--device", arguments.device, "--dtype", arguments.dtype, "--threads", str(arguments.threads)]
    return harness.Contender([python, SCRIPT, *options, "--worker", contender, workload, folder])


def has_our_weights(contender: str) -> bool:
    """Whether a contender loads our model, and so has its relative positions and has to give its losses."""
    return contender.startswith(("ours", "legacy"))


def gate(task: str, checks: dict[str, dict], dtype: str) -> tuple[dict[str, float], dict[str, str]]:
    """How far each contender's losses are from the reference's, and what is wrong with those that are too far."""
    if REFERENCE not in checks:
        sys.exit("error: without ours-eager there is nothing to compare with")
    reference, differences, wrong = checks[REFERENCE], {}, {}
    for name, found in checks.items():
        if not has_our_weights(name):
            continue
        kind = TYPES.get(name, dtype)
        tolerance = TOLERANCE.get(kind, COARSE)[task]
        pairs = list(zip(found["nll"], reference["nll"], strict=True))
        if task == "decode" and found["text"] != reference["text"]:
            if kind == "fp32":
                wrong[name] = f"{name} writes another text: {found['text']} for {reference['text']}"
                continue
            # Rounding may decide between two tokens; up to there the probabilities must agree.
            equal = [a == b for a, b in zip(found["text"], reference["text"], strict=True)]
            pairs = pairs[: equal.index(False) + 1]
        differences[name] = max(abs(a - b) for a, b in pairs)
        # One by one, because nothing is larger than what is not a number.
        if not all(abs(a - b) <= tolerance for a, b in pairs):
            wrong[name] = f"{name} has other losses than {REFERENCE}: {found['nll']} for {reference['nll']}"
    return differences, wrong


def describe(name: str, workload: Workload, contender: str, check: dict) -> dict:
    return {
        "workload": name,
        "contender": contender,
        "memory": workload.memory,
        "segment": workload.segment,
        "batch": workload.batch,
        "clamp": workload.clamp if workload.clamp > 0 else "",
        "dropout": workload.config["dropout"],
        "dropatt": workload.config.get("dropatt", 0.0),
        "optimizer": check["optimizer"],
        "warmup_s": round(check["warmup_s"], 2),
        "prefill_tokens_per_second": check.get("prefill_tokens_per_second", ""),
    }


def speed(answers: list[dict], legacy: list[dict] | None) -> dict:
    rates = [answer["tokens"] / answer["seconds"] for answer in answers]
    row = {
        f"tokens_per_second_p{percent}": harness.significant(rate)
        for percent, rate in zip((20, 50, 80), harness.quantiles(rates), strict=True)
    }
    # Round by round, so that a slow minute of the machine counts on both sides.
    ratios = [mine * other["seconds"] / other["tokens"] for mine, other in zip(rates, legacy or [], strict=False)]
    row["times_legacy_p50"] = harness.significant(harness.quantiles(ratios)[1], 3) if ratios else ""
    row["repeats"] = len(rates)
    if "gaps" in answers[0]:
        gaps = [1e3 * gap for answer in answers for gap in answer["gaps"]]
        row["first_token_ms"] = harness.significant(harness.quantiles([1e3 * a["first"] for a in answers])[1])
        row["token_ms_p50"], row["token_ms_p99"] = map(harness.significant, harness.quantiles(gaps, (50, 99)))
    return row


def utilisation(workload: Workload, contender: str, shares: list[float], rate: float, peak: float) -> dict:
    """Least operations of the model, whatever the contender computes, and their share of the measured peak."""
    config, memory = workload.config, workload.memory
    relative = has_our_weights(contender)
    if contender == "gpt2" and workload.task == "train":
        memory = 0
    segment = 1 if workload.task == "decode" else workload.segment
    flops = harness.flops_per_token(config, segment, memory, workload.batch, workload.task, shares, relative)
    return {
        "gflop_per_token": harness.significant(flops / 1e9),
        "peak_tflops": harness.significant(peak / 1e12),
        "mfu": harness.significant(flops * rate / peak, 3),
    }


# ---- what a contender does; this half also runs under transformers 4.35 -----------------------------------------


def work(contender: str, name: str, folder: str, arguments: argparse.Namespace):
    import torch
    import transformers

    workload, device, kind = (WORKLOADS | SMOKE)[name], arguments.device, contender.partition("-")[0]
    transformers.utils.logging.set_verbosity_error()
    # Before the memory is looked at, because libraries are no part of a model.
    import_module(LIBRARIES.get(kind, "txl_hf.evaluation.reading"))
    before = harness.resident_mib() if device == "cpu" else 0.0
    task = begin(contender, workload, folder, arguments)
    steps, first_steps, warm = STEPS[device][workload.task], WARM_UP[device], False
    if workload.task == "evaluate" and device == "cuda":
        # Until the memory is full and a graph reads. And as many segments, whether they are scored together or not.
        first_steps, steps = -(-task.opening // task.together), max(2, -(-steps // task.together))

    def check() -> dict:
        start = time.perf_counter()
        values = task.check(CHECKED_ROWS[device])
        harness.synchronize(device)
        return {
            **values,
            **harness.versions(),
            "warmup_s": time.perf_counter() - start,
            "optimizer": type(task.optimizer).__name__ if workload.task == "train" else "",
        }

    def turn() -> dict:
        nonlocal warm
        if not warm:
            # Of another size than what the gate saw, without a memory, with one.
            for _ in range(first_steps):
                task.step()
            warm = True
        elif device == "cuda":
            task.step()
        harness.synchronize(device)
        start = time.perf_counter()
        tokens, details = 0, {}
        for _ in range(steps):
            done, details = task.step()
            tokens += done
        harness.synchronize(device)
        # What a turn does not count (copying a cache) it says.
        spent = time.perf_counter() - start - details.pop("apart", 0.0)
        if device == "cuda":
            # For the others, who are on the same card.
            torch.cuda.empty_cache()
        return {"seconds": spent, "tokens": tokens, **details}

    def peak() -> dict:
        # After all turns: what memory has been given back is slower to use again.
        harness.reset_peak(device)
        for _ in range(steps):
            task.step()
        harness.synchronize(device)
        return {"peak_mib": harness.peak_mib(device) - before}

    harness.serve({"check": check, "turn": turn, "peak": peak})


def begin(contender: str, workload: Workload, folder: str, arguments: argparse.Namespace):
    """The task of a contender with its model, before the first step."""
    import torch

    torch.manual_seed(2)
    model = load(contender, workload, folder, arguments)
    ids = torch.load(f"{folder}/ids.pt").to(arguments.device)
    task = {"train": Train, "evaluate": Evaluate, "decode": Decode}[workload.task](contender, model, ids, workload)
    # Legacy transformers fails under autocast where there are cutoffs.
    dtype = TYPES.get(contender, arguments.dtype)
    mixed = dtype != "fp32" and workload.task == "train" and contender != "legacy"
    task.dtype = harness.torch_dtype(dtype) if mixed else None
    task.autocast = torch.autocast(arguments.device, task.dtype or torch.bfloat16, enabled=mixed)
    return task


def load(contender: str, workload: Workload, folder: str, arguments: argparse.Namespace):
    config = workload.config
    if contender.startswith("legacy"):
        from transformers import TransfoXLLMHeadModel

        return TransfoXLLMHeadModel.from_pretrained(folder).to(arguments.device)
    if contender == "gpt2":
        model = gpt2(config, workload.memory + workload.segment)
    elif contender in X_TRANSFORMERS:
        model = x_transformers(config, workload, rotary=contender.endswith("rotary"))
    elif contender == "floor":
        model = floor(config)
        if workload.sampled:
            learn_frequencies(model)
    else:
        from txl_hf import TransfoXLForCausalLM
        from txl_hf.kernels.steps import compile_layers

        variant, compiled = re.fullmatch(r"ours-?(.*?)-?(compile)?-?(graphs)?", contender).group(1, 2)
        implementation = None if variant in ("", "step", "mems", "static", "graph", *TYPES.values()) else variant
        model = TransfoXLForCausalLM.from_pretrained(folder, attn_implementation=implementation)
        if compiled:
            compile_layers(model)
        if contender == "ours-int8":
            from torchao.quantization import Int8WeightOnlyConfig, quantize_

            # The softmax reads its tables itself.
            quantize_(model.transformer, Int8WeightOnlyConfig())
            return model
    # Training keeps fp32 weights and runs under autocast.
    dtype = "fp32" if workload.task == "train" else TYPES.get(contender, arguments.dtype)
    return model.to(arguments.device, harness.torch_dtype(dtype))


def gpt2(config: dict, positions: int):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": config["d_model"], "n_head": config["n_head"], "n_inner": config["d_inner"]}
    dropout = {"resid_pdrop": config["dropout"], "embd_pdrop": config["dropout"], "attn_pdrop": 0.0}
    tokens = {"vocab_size": config["vocab_size"], "bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(
        GPT2Config(n_layer=config["n_layer"], n_positions=positions, **sizes, **dropout, **tokens),
    )


def x_transformers(config: dict, workload: Workload, rotary: bool):
    """x-transformers' decoder with memory, called as ours is; its softmax is a table of its own, not the input's."""
    import torch
    from x_transformers import Decoder, TransformerWrapper

    class Remembering(torch.nn.Module):
        def __init__(self, wrapper):
            super().__init__()
            self.wrapper = wrapper

        def forward(self, ids, mems=None, labels=None):
            logits, mems = self.wrapper(ids, mems=mems, return_mems=True)
            losses = torch.nn.functional.cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="none")
            return SimpleNamespace(mems=mems, losses=losses)

    positions = {"rotary_pos_emb": True, "attn_flash": True} if rotary else {"rel_pos_bias": True}
    dropout = {"attn_dropout": 0.0, "ff_dropout": config["dropout"], "layer_dropout": 0.0}
    layers = Decoder(
        dim=config["d_model"],
        depth=config["n_layer"],
        heads=config["n_head"],
        attn_dim_head=config["d_head"],
        ff_mult=config["d_inner"] / config["d_model"],
        **positions,
        **dropout,
    )
    lengths = {"max_seq_len": workload.segment, "max_mem_len": workload.memory}
    return Remembering(TransformerWrapper(num_tokens=config["vocab_size"], attn_layers=layers, **lengths))


def floor(config: dict):
    """Our layers with plain causal attention over memory and segment, the least that any positions can cost.

    It is the baseline with sinusoids added to the input, given a memory all the same.
    """
    from txl_hf import TransfoXLConfig, TransfoXLForCausalLM
    from txl_hf.transfo_xl.attention_transfo_xl import BACKENDS, Backend

    class FloorConfig(TransfoXLConfig):
        def check_lengths(self, mem_len: int, **lengths: int):
            super().check_lengths(mem_len=0, memory=mem_len, **lengths)

    # It does nothing that a graph would leave out.
    BACKENDS["floor"] = Backend("floor", plain_attention, captures=True)
    model = TransfoXLForCausalLM(FloorConfig(**config | {"attn_type": 2}))
    model.set_attn_implementation("floor")
    return model


def plain_attention(inputs):
    """A backend: see `eager_relative_attention`."""
    import torch
    from torch.nn.attention.bias import causal_lower_right

    L, K = inputs.query.shape[2], inputs.key.shape[2]
    # One token sees everything; as many queries as keys have a mask that needs no tensor.
    mask = causal_lower_right(L, K) if 1 < L < K else None
    attend = torch.nn.functional.scaled_dot_product_attention
    options = {"dropout_p": inputs.dropout, "is_causal": 1 < L == K, "scale": inputs.scaling}
    return attend(inputs.query, inputs.key, inputs.value, mask, **options), None


class Train:
    """A step is forward, backward, clipping and the optimiser, with the memory of the step before."""

    def __init__(self, contender: str, model, ids, workload: Workload):
        self.contender, self.model, self.ids, self.segment = contender, model, ids, workload.segment
        self.optimizer = make_optimizer(workload.optimizer, model, "compile" in contender)
        self.count = 0
        self._begin()

    def check(self, rows: int) -> dict:
        """Mean NLL of three steps, without dropout, for some rows."""
        import torch

        self.model.eval()
        losses = [self._step(self.ids[:rows]).item() for _ in range(3)]
        self.model.train()
        self._begin()
        if "compile" in self.contender:
            # Having seen two batch sizes, torch would compile for all of them.
            torch.compiler.reset()
        return {"nll": losses}

    def _begin(self):
        """The text, with no memory and, where it makes graphs, with none of them."""
        self.mems, self.graphs, self.memory = None, None, {}

    def step(self) -> tuple[int, dict]:
        self._step(self.ids)
        return len(self.ids) * self.segment, {}

    def _step(self, ids):
        start = self.count % 4 * self.segment
        ids = ids[:, start : start + self.segment]
        self.count += 1
        if self.contender.endswith("graphs"):
            from txl_hf.kernels.steps import CapturedSteps, Forward

            if self.graphs is None:
                # The steps that warm up, and those that are checked, are few. `dtype` as the trainer gives it.
                self.graphs = CapturedSteps(Forward(self.model, lambda: self.autocast), 0, self.dtype)
            targets = ids.roll(-1, 1)
            targets[:, -1] = -100
            total, _, self.memory = self.graphs({"input_ids": ids, "shift_labels": targets}, self.memory)
            return self._learn(total / (ids.numel() - len(ids)))
        with self.autocast:
            if self.contender == "gpt2":
                loss = self.model(ids, labels=ids).loss
            else:
                output = self.model(ids, mems=self.mems, labels=ids)
                self.mems, loss = output.mems, output.losses.float().mean()
        return self._learn(loss)

    def _learn(self, loss):
        import torch

        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.25)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def make_optimizer(name: str, model, compiled: bool):
    """The recipe's; AdamW where there is no pytorch_optimizer, as the row then says."""
    import torch

    if name == "LAMB":
        from txl_hf.training.optimizers import make_lamb

        try:
            return make_lamb([*model.parameters()], compiled, lr=2.5e-4, eps=1e-6)
        except ImportError:
            return torch.optim.AdamW(model.parameters(), lr=2.5e-4, fused=True)
    return torch.optim.Adam(model.parameters(), lr=2.5e-4, fused=True)


class Evaluate:
    """A step is one segment with a full memory, or as many as `evaluate_language_model` reads between two losses."""

    def __init__(self, contender: str, model, ids, workload: Workload):
        self.model, self.ids, self.workload = model.eval(), ids, workload
        self.count, self.past, self.reader = 0, {}, None
        # The others have their memory as states.
        self.cached = contender not in ("ours-mems", "ours-eager", *X_TRANSFORMERS)
        self.cached = self.cached and not contender.startswith("legacy")
        self.together = 1
        if self.cached and contender != "ours-step":
            from txl_hf.evaluation.reading import TOKENS_AT_ONCE

            self.together = max(1, TOKENS_AT_ONCE // (workload.batch * workload.segment))
            self.reader = self._begin()

    @property
    def opening(self) -> int:
        """Segments that fill the memory, and those behind them until a graph reads the next."""
        return -(-self.workload.memory // self.workload.segment) + LAUNCHED

    def check(self, rows: int) -> dict:
        """Mean NLL of some segments, for some rows; on a GPU until some were read by a graph."""
        ids, segments = self.ids[:rows], 4 + (self.opening if self.ids.is_cuda else 0)
        if self.reader is None:
            losses = [self._loss(ids) for _ in range(segments)]
        else:
            from txl_hf.kernels.captured import why_not_captured

            losses = [loss for _ in range(segments) for loss in self._losses(ids, 1)]
            if why_not_captured(self.model.transformer, ids) is None and not self.reader.alike.is_captured:
                sys.exit("no graph of a segment was captured, which is what is to be measured")
            self.reader = self._begin()
        self.past = {}
        return {"nll": [loss.item() for loss in losses]}

    def step(self) -> tuple[int, dict]:
        if self.reader is None:
            self._loss(self.ids)
        else:
            self._losses(self.ids, self.together)
        return self.together * len(self.ids) * self.workload.segment, {}

    def _begin(self):
        from txl_hf.evaluation.reading import Reader, Reading

        return Reader(self.model, Reading(self.workload.segment))

    def _loss(self, ids):
        import torch

        ids = self._next(ids)
        with torch.no_grad():
            if self.cached:
                output = self.model(ids, labels=ids, use_cache=True, output_logits=False, **self.past)
                self.past = {"past_key_values": output.past_key_values}
            else:
                # The peers compute the loss alone too.
                alone = {"output_logits": False} if type(self.model).__module__.startswith("txl_hf") else {}
                output = self.model(ids, labels=ids, **alone, **self.past)
                self.past = {"mems": output.mems}
        return output.losses.float().mean()

    def _losses(self, ids, segments: int) -> list:
        """Mean NLL of each of the next segments, which the softmax scores together."""
        import torch

        from txl_hf.evaluation.reading import Segment

        read = []
        for _ in range(segments):
            part = self._next(ids)
            # As the others, who shift their labels, none of the last token.
            targets = torch.nn.functional.pad(part[:, 1:], (0, 1), value=-100)
            read.append(Segment(0, part, targets, targets, None, targets.numel(), targets.numel()))
        with torch.no_grad():
            _, losses = self.reader.read_and_score(read, torch.cat([segment.targets for segment in read], dim=1))
        tokens = len(ids) * (self.workload.segment - 1)
        return [loss.sum() / tokens for loss in losses.chunk(segments, dim=1)]

    def _next(self, ids):
        start = self.count % 4 * self.workload.segment
        self.count += 1
        return ids[:, start : start + self.workload.segment]


class Stopwatch:
    """A streamer for generate that notes when each token came; reading it waits for the GPU."""

    def __init__(self):
        self.times = []

    def put(self, tokens):
        self.times.append(time.perf_counter())

    def end(self):
        pass


class Decode:
    """A step is `generate` after a prompt that has been read: memories hold as many tokens as they can.

    The first token after the prompt is given, so that rounding does not begin another text before any is compared.
    """

    def __init__(self, contender: str, model, ids, workload: Workload):
        self.contender, self.model, self.prompt = contender, model.eval(), ids[:, :-1]
        # Beside a memory as states `generate` is given what comes after it alone.
        self.from_states = contender in ("ours-static", "ours-graph")
        self.text = ids[:, -1:] if self.from_states else ids
        self.tokens = workload.segment // LEGACY_SHARE if contender.startswith("legacy") else workload.segment
        self.options = {"do_sample": True, "top_k": 40, "temperature": 1.0} if workload.sampled else {}

    def check(self, rows: int) -> dict:
        """The first tokens of the greedy text and their NLL; how fast the prompt is read, at the second time."""
        self._read()
        self._wait()
        begin = time.perf_counter()
        self.past = self._read()
        self._wait()
        prefill = self.prompt.numel() / (time.perf_counter() - begin)
        new = min(CHECKED_TOKENS, self.tokens)
        text = self._generate(new)[0, -new:].tolist()
        found = self._generate(new, return_dict_in_generate=True, output_scores=True)
        if found.sequences[0, -new:].tolist() != text:
            sys.exit(f"{self.contender} writes another text when asked for scores")
        nll = [-scores[0].float().log_softmax(-1).max().item() for scores in found.scores]
        return {"text": text, "nll": nll, "prefill_tokens_per_second": harness.significant(prefill)}

    def step(self) -> tuple[int, dict]:
        watch = Stopwatch()
        begin = time.perf_counter()
        past = self._copy()
        self._wait()
        apart = time.perf_counter() - begin
        begin = time.perf_counter()
        self._generate(self.tokens, past, streamer=watch, **self.options)
        # The first time is the prompt's.
        times = watch.times[1:]
        gaps = [after - before for before, after in itertools.pairwise(times)]
        return len(self.prompt) * self.tokens, {"apart": apart, "first": times[0] - begin, "gaps": gaps}

    def _read(self) -> dict:
        """The memory of the prompt."""
        import torch

        legacy = self.contender.startswith("legacy")
        keep = {} if legacy else {"logits_to_keep": 1}
        if not legacy and not self.from_states:
            keep["use_cache"] = True
        with torch.no_grad():
            output = self.model(self.prompt, **keep)
        if self.from_states:
            is_static = self.contender == "ours-static"
            return {"mems": output.mems} | ({"cache_implementation": "static"} if is_static else {})
        return {"past_key_values": output.mems if legacy else output.past_key_values}

    def _copy(self) -> dict:
        return self.past if self.from_states else copy.deepcopy(self.past)

    def _generate(self, new: int, past: dict | None = None, **options):
        return self.model.generate(
            self.text, **(past or self._copy()), max_new_tokens=new, pad_token_id=0, **{"do_sample": False, **options}
        )

    def _wait(self):
        harness.synchronize(self.prompt.device.type)


if __name__ == "__main__":
    main()
