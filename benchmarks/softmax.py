"""The adaptive softmax alone: the loss of hidden states, and its gradients.

    python benchmarks/softmax.py --peer-python OTHER_ENVIRONMENT/bin/python

    ours     `AdaptiveLogSoftmax.forward`: a target costs the head and its own bin
    full     log-probabilities of the whole vocabulary, of which the targets' are picked
    legacy   transformers 4.35.2, in the interpreter that --peer-python names

Contenders are processes that take turns. First the gate: mean loss and the norm of the gradient of the hidden states,
against `full`. Peak memory is that of a contender's own process during its turns, over what it held before them.
"""

import argparse
import sys
import tempfile
from dataclasses import replace

import harness
import model as models

SCRIPT = __file__
# Model, rows, tokens in a row, whether gradients are wanted.
CPU = {
    "wt103-evaluate": ("wt103", 1, 64, False),
    "wt103-train": ("wt103", 2, 150, True),
    "nvidia-large-train": ("nvidia-large", 1, 384, True),
}
CUDA = {
    "nvidia-base-train-b256": ("nvidia-base", 256, 192, True),
    "nvidia-large-train-b32": ("nvidia-large", 32, 384, True),
    "wt103-train-b60": ("wt103", 60, 150, True),
    "wt103-evaluate": ("wt103", 1, 64, False),
}
SMOKE = {"smoke": ("smoke", 2, 9, True)}
SIZES = CPU | CUDA | SMOKE
REFERENCE = "full"
CHECKED_ROWS = 2


def main(given: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_arguments(parser, "softmax.csv", budget=25.0)
    parser.add_argument("--peer-python", help="interpreter with transformers 4.35.2; without it there is no legacy")
    parser.add_argument("--sizes", nargs="+", choices=SIZES)
    parser.add_argument("--worker", nargs=3, metavar=("CONTENDER", "SIZE", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.worker:
        harness.prepare(arguments)
        return work(*arguments.worker, arguments)
    harness.complete(arguments)
    default = SMOKE if arguments.smoke else CPU if arguments.device == "cpu" else CUDA
    for size in arguments.sizes or default:
        compare(size, arguments)


def compare(size: str, arguments: argparse.Namespace):
    name, rows, length, backward = SIZES[size]
    names = ["ours", REFERENCE, *(["legacy"] if arguments.peer_python else [])]
    with tempfile.TemporaryDirectory() as folder:
        models.save(workload(name, rows, length), folder)
        contenders = {contender: start(contender, size, folder, arguments) for contender in names}
        try:
            checks = harness.ask_all(contenders, "check")
            gate(checks, arguments.dtype)
            turns = harness.take_turns(contenders, arguments.seconds, *arguments.repeats)
            peaks = harness.ask_all(contenders, "peak")
        finally:
            for contender in contenders.values():
                contender.stop()
    table = []
    for contender, answers in turns.items():
        row = harness.origin(arguments.device, arguments.dtype, arguments.threads)
        row |= {key: checks[contender][key] for key in ("torch", "transformers")}
        row |= {"size": size, "contender": contender, "tokens": rows * length, "backward": backward}
        times = [1e3 * answer["seconds"] for answer in answers]
        row |= {
            f"ms_p{p}": harness.significant(t) for p, t in zip((20, 50, 80), harness.quantiles(times), strict=True)
        }
        row |= {"repeats": len(times), "peak_mib": round(peaks[contender]["peak_mib"], 1)}
        if "legacy" in turns:
            ratios = [a["seconds"] / b["seconds"] for a, b in zip(turns["legacy"], answers, strict=True)]
            row["times_legacy_p50"] = harness.significant(harness.quantiles(ratios)[1], 3)
        row["nll_difference"] = f"{abs(checks[contender]['loss'] - checks[REFERENCE]['loss']):.1e}"
        table.append(row)
        print(f"{size:24} {contender:8} {row['ms_p50']:>9} ms {row['peak_mib']:>9} MiB", flush=True)
    harness.append(arguments.output, table)


def workload(name: str, rows: int, length: int) -> models.Workload:
    """One layer, because only what comes after it is used."""
    models.MODELS[f"{name}-softmax"] = models.MODELS[name] | {"n_layer": 1, "d_inner": 1}
    return replace(models.Workload("train", f"{name}-softmax", 0, length, rows))


def start(contender: str, size: str, folder: str, arguments: argparse.Namespace) -> harness.Contender:
    python = arguments.peer_python if contender == "legacy" else sys.executable
    options = ["--device", arguments.device, "--dtype", arguments.dtype, "--threads", str(arguments.threads)]
    return harness.Contender([python, SCRIPT, *options, "--worker", contender, size, folder])


def gate(checks: dict[str, dict], dtype: str):
    if REFERENCE not in checks:
        sys.exit(f"error: without {REFERENCE} there is nothing to compare with")
    tolerance = 1e-5 if dtype == "fp32" else 1e-2
    for name, check in checks.items():
        for quantity in ("loss", "gradient"):
            mine, right = check[quantity], checks[REFERENCE][quantity]
            if not abs(mine - right) <= tolerance * abs(right):
                sys.exit(f"error: {name} has another {quantity} than {REFERENCE}: {mine} for {right}")


def work(contender: str, size: str, folder: str, arguments: argparse.Namespace):
    import torch

    name, rows, length, backward = SIZES[size]
    device = arguments.device
    model = models.load("legacy" if contender == "legacy" else "ours", workload(name, rows, length), folder, arguments)
    autocast = torch.autocast(device, harness.torch_dtype(arguments.dtype), enabled=arguments.dtype != "fp32")
    ids = torch.load(f"{folder}/ids.pt")[:, :length].to(device)
    hidden = torch.randn(rows, length, model.config.d_model, generator=torch.Generator().manual_seed(3)).to(device)

    def losses(hidden, ids):
        if contender == "ours":
            return model.lm_head(hidden.flatten(0, 1), ids.flatten())
        if contender == "full":
            return -model.lm_head.log_prob(hidden).gather(-1, ids[..., None])
        # It shifts: the first label and the last state count for nothing.
        padded = torch.cat([hidden, hidden[:, :1]], 1), torch.cat([ids[:, :1], ids], 1)
        return model.crit(*padded)

    def step(rows: int = rows):
        inputs = hidden[:rows].detach().requires_grad_(backward)
        with torch.set_grad_enabled(backward), autocast:
            loss = losses(inputs, ids[:rows]).float().mean()
        if backward:
            loss.backward()
            model.zero_grad()
        return loss.item(), inputs.grad.norm().item() if backward else 0.0

    def check() -> dict:
        loss, gradient = step(CHECKED_ROWS)
        return {"loss": loss, "gradient": gradient, **harness.versions()}

    before = None

    def turn() -> dict:
        nonlocal before
        if before is None:
            harness.reset_peak(device)
            before = harness.resident_mib() if device == "cpu" else torch.cuda.memory_allocated() / 2**20
            step()
        spent = harness.seconds(step, device)
        if device == "cuda":
            torch.cuda.empty_cache()
        return {"seconds": spent}

    harness.serve({"check": check, "turn": turn, "peak": lambda: {"peak_mib": harness.peak_mib(device) - before}})


if __name__ == "__main__":
    main()
