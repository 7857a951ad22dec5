"""How time and memory grow with the memory's length, the segment's length and the length of the text.

    python benchmarks/growth.py

One process, one model. In `memory` the segment is 128 and M runs from 256 to 16k; in `segment` M is 512 and L runs up
to 2k; in `text` a long text is streamed with M = 512, and a row is one stretch of it. Peak memory is what a step needs
beyond what the process held before (weights, not counting; a projected memory, counting). Exponents are slopes of a
line through log seconds (or MiB) over log length: `all` sizes, and the `last` three, where constants weigh less.
Equality is checked by `model.py` and the suite; here it is that a segment's losses are finite and equal eager's at
the smallest size.
"""

import argparse
import itertools
import sys

import numpy as np

import harness
import model as models

MEMORY = {"task": ("evaluate", "train"), "lengths": [256, 512, 1024, 2048, 4096, 8192, 16384], "segment": 128}
SEGMENT = {"task": ("evaluate", "train"), "lengths": [64, 128, 256, 512, 1024, 2048], "memory": 512}
TEXT = {"stretches": 8, "tokens": 2048, "memory": 512, "segment": 128}
# Below it a figure is noise.
RESOLUTION = {"seconds_p50": 1e-9, "peak_mib": 1.0}
SMOKE = (
    {"task": ("evaluate", "train"), "lengths": [8, 16, 32], "segment": 8},
    {"task": ("evaluate",), "lengths": [8, 16, 32], "memory": 8},
    {"stretches": 3, "tokens": 64, "memory": 8, "segment": 8},
)


def main(given: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_arguments(parser, "growth.csv", budget=6.0)
    parser.add_argument("--model", choices=models.MODELS, default="enwik8")
    arguments = parser.parse_args(given)
    if not arguments.smoke and list(arguments.repeats) == [5, 20]:
        arguments.repeats = (3, 10)
    harness.complete(arguments)
    name = "smoke" if arguments.smoke else arguments.model
    over_memory, over_segment, text = SMOKE if arguments.smoke else (MEMORY, SEGMENT, TEXT)
    model = build(models.MODELS[name], arguments)
    difference = gate(model, over_memory["lengths"][0], over_memory["segment"], arguments.dtype)

    origin = harness.origin(arguments.device, arguments.dtype, arguments.threads)
    origin |= harness.versions() | {"model": name}

    def keep(rows: list[dict]):
        harness.append(arguments.output, [origin | row | {"nll_difference": f"{difference:.1e}"} for row in rows])

    for task in over_memory["task"]:
        sizes = [(m, over_memory["segment"]) for m in over_memory["lengths"]]
        keep(grow("memory", task, model, sizes, arguments))
    for task in over_segment["task"]:
        sizes = [(over_segment["memory"], length) for length in over_segment["lengths"]]
        keep(grow("segment", task, model, sizes, arguments))
    keep(read_text(model, text, arguments))


def build(config: dict, arguments: argparse.Namespace):
    import torch

    from txl_hf import TransfoXLConfig, TransfoXLForCausalLM

    torch.manual_seed(0)
    model = TransfoXLForCausalLM(TransfoXLConfig(**config, mem_len=1))
    return model.to(arguments.device, harness.torch_dtype(arguments.dtype))


def evaluation(model, memory: int, segment: int):
    """Yields the mean loss of one segment after the other, with a full memory."""
    import torch

    model.eval()
    model.reset_memory_length(memory)
    past = None
    ids = harness.draw_ids(model.config.vocab_size, (4, 1, segment)).to(model.device)
    for piece in itertools.cycle(ids):
        with torch.no_grad():
            output = model(piece, labels=piece, use_cache=True, output_logits=False, past_key_values=past)
        past = output.past_key_values
        yield output.losses.float().mean().item()


def training(model, memory: int, segment: int):
    """Yields the loss of one forward and backward after the other, with a full memory."""
    model.train()
    model.reset_memory_length(memory)
    mems = None
    ids = harness.draw_ids(model.config.vocab_size, (4, 1, segment)).to(model.device)
    for piece in itertools.cycle(ids):
        output = model(piece, labels=piece, mems=mems)
        mems = output.mems
        output.loss.backward()
        model.zero_grad()
        yield output.losses.float().mean().item()


def gate(model, memory: int, segment: int, dtype: str) -> float:
    chosen = model.config._attn_implementation
    losses = {}
    for implementation in (chosen, "eager"):
        model.set_attn_implementation(implementation)
        for make in (evaluation, training):
            steps = make(model, memory, segment)
            losses[implementation, make] = np.mean([next(steps) for _ in range(4)])
    model.set_attn_implementation(chosen)
    reference = losses["eager", training]
    differences = [abs(loss - reference) for loss in losses.values()]
    tolerance = models.TOLERANCE["fp32"]["evaluate"] if dtype == "fp32" else models.COARSE["evaluate"]
    if not all(difference <= tolerance for difference in differences):
        sys.exit(f"error: {chosen} and eager, training and evaluation have other losses: {list(losses.values())}")
    return float(max(differences))


def grow(axis: str, task: str, model, sizes: list[tuple[int, int]], arguments: argparse.Namespace) -> list[dict]:
    rows = []
    for memory, segment in sizes:
        harness.reset_peak(arguments.device)
        before = held(arguments.device)
        steps = {"evaluate": evaluation, "train": training}[task](model, memory, segment)
        next(steps)
        times = harness.interleave(
            {"step": lambda steps=steps: next(steps)}, arguments.device, arguments.seconds, *arguments.repeats
        )["step"]
        peak = harness.peak_mib(arguments.device) - before
        steps.close()
        length = memory if axis == "memory" else segment
        row = {"axis": axis, "task": task, "memory": memory, "segment": segment, "length": length}
        row |= {
            f"seconds_p{p}": harness.significant(s)
            for p, s in zip((20, 50, 80), harness.quantiles(times), strict=True)
        }
        rows.append(row | {"peak_mib": round(peak, 1), "repeats": len(times)})
    return with_exponents(rows, "peak_mib", "seconds_p50")


def held(device: str) -> float:
    if device == "cuda":
        import torch

        return torch.cuda.memory_allocated() / 2**20
    return harness.resident_mib()


def with_exponents(rows: list[dict], *columns: str) -> list[dict]:
    lengths = np.log([row["length"] for row in rows])
    for column in columns:
        values = np.log([max(row[column], RESOLUTION[column]) for row in rows])
        fits = {"all": np.polyfit(lengths, values, 1)[0], "last": np.polyfit(lengths[-3:], values[-3:], 1)[0]}
        for name, slope in fits.items():
            for row in rows:
                row[f"{column.removesuffix('_p50')}_exponent_{name}"] = round(float(slope), 3)
    first = rows[0]
    print(
        f"{first['axis']:8} {first['task']:9} {first['length']} … {rows[-1]['length']}: "
        + ", ".join(f"{key} {value}" for key, value in first.items() if "exponent" in key),
        flush=True,
    )
    return rows


def read_text(model, text: dict, arguments: argparse.Namespace) -> list[dict]:
    """Seconds per token in each stretch of one long text."""
    harness.reset_peak(arguments.device)
    steps = evaluation(model, text["memory"], text["segment"])
    next(steps)
    rows = []
    for stretch in range(text["stretches"]):
        passes = text["tokens"] // text["segment"]
        times = [harness.seconds(lambda: next(steps), arguments.device) / text["segment"] for _ in range(passes)]
        row = {"axis": "text", "task": "evaluate", "memory": text["memory"], "segment": text["segment"]}
        row |= {"length": (stretch + 1) * text["tokens"], "repeats": passes}
        row |= {
            f"seconds_p{p}": harness.significant(s)
            for p, s in zip((20, 50, 80), harness.quantiles(times), strict=True)
        }
        rows.append(row | {"peak_mib": round(held(arguments.device), 1)})
    return with_exponents(rows, "seconds_p50", "peak_mib")


if __name__ == "__main__":
    main()
