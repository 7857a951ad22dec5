"""The attention operation alone: `txl_triton` against plain attention, which has no relative positions.

    python benchmarks/attention_kernel.py            # on a machine with a GPU: under three minutes
    python benchmarks/attention_kernel.py --sweep    # other tiles, warps and stages of each kernel on one shape
    TRITON_INTERPRET=1 python benchmarks/attention_kernel.py --smoke     # the script itself, on a CPU

First the gate: outputs and gradients of every contender with relative positions against fp64, at most twice as far off
as eager in bf16; nothing is timed if one fails. Then forward, and forward with backward, in bf16, contenders
interleaved:

    txl_triton      the kernels
    sdpa_relative   scaled_dot_product_attention with (b) + (d) as its mask: the fallback
    sdpa            scaled_dot_product_attention, causal to the lower right: the floor, what flash attention reaches

The GPU sleeps before each call until the host has queued it, so launches cost nothing, and inputs rotate through
copies larger than its cache. TFLOP/s count the floor's products over visible pairs (two forward, five backward) for
every contender, so that they compare as times do. A row per shape, mode and contender goes to
`results/attention_kernel.csv`.
"""

import argparse
import csv
import datetime
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

import txl_hf.attention_transfo_xl_triton as kernels
from txl_hf.attention_transfo_xl import (
    eager_relative_attention,
    sdpa_relative_attention,
    visible_keys,
)

RESULTS = Path(__file__).parent / "results" / "attention_kernel.csv"
# Name: B, H, L, m, Dh.
SHAPES = {f"nvidia-base-B{B}": (B, 8, 192, 192, 64) for B in (32, 64, 128, 256)}
SHAPES |= {f"nvidia-large-B{B}": (B, 16, 384, 384, 64) for B in (8, 32)}
SHAPES |= {f"enwik8-base-B{B}": (B, 8, 512, 512, 64) for B in (8, 32)}
SHAPES |= {"wt103-base-B60": (60, 10, 150, 150, 41)}
SHAPES |= {f"long-m{m}": (4, 8, 512, m, 64) for m in (2048, 4096, 8192, 16384)}
GATE_SHAPES = [(2, 2, 192, 192, 64), (2, 2, 150, 150, 41), (1, 2, 65, 300, 64), (1, 2, 130, 7, 128)]
SMOKE_SHAPES = {"smoke": (1, 2, 20, 30, 16)}
TILES = [
    (64, 64, 4, 1),
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    (64, 64, 8, 1),
    (64, 64, 8, 2),
    (64, 64, 8, 3),
    (32, 64, 4, 2),
]


def draw(shape, dtype, device, seed=0):
    """query … position_bias as a layer has them: heads side by side for each position."""
    B, H, L, m, D = shape
    K = m + L
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size):
        return torch.randn(size, generator=generator, device=device).to(dtype)

    projected = [normal(B, n, H, D).transpose(1, 2) for n in (L, K, K)]
    inputs = [*projected, normal(K, H, D).transpose(0, 1), normal(H, D), normal(H, D)]
    return [tensor.requires_grad_() for tensor in inputs], normal(B, H, L, D)


def relative(backend):
    def attend(inputs):
        return backend(*inputs, None, None, None, inputs[0].shape[-1] ** -0.5, 0.0)[0]

    return attend


def plain(inputs):
    query, key, value = inputs[:3]
    # Both biases and rel_key have no part in it; the gradient of nothing is not asked for.
    mask = causal_lower_right(query.shape[-2], key.shape[-2])
    return F.scaled_dot_product_attention(query, key, value, mask)


def exact(inputs):
    """(a) … (d) with a softmax in fp64; eager's is in fp32."""
    query, key, value, rel_key, content_bias, position_bias = inputs
    L, K = query.shape[-2], key.shape[-2]
    scores = (query + content_bias[:, None]) @ key.transpose(-1, -2)
    row = (torch.arange(L - 1, -1, -1)[:, None] + torch.arange(K)).clamp(max=K - 1).to(query.device)
    position = (query + position_bias[:, None]) @ rel_key.transpose(-1, -2)
    scores = (scores + position.gather(-1, row.expand_as(position))) * query.shape[-1] ** -0.5
    visible = visible_keys(L, K, None, None, query.device)
    return F.softmax(scores.masked_fill(~visible, -torch.inf), -1) @ value


CONTENDERS = {
    "txl_triton": relative(kernels.triton_relative_attention),
    "sdpa_relative": relative(sdpa_relative_attention),
    "sdpa": plain,
}


def differentiate(attend, inputs, cotangent):
    output = attend(inputs)
    needed = inputs[:3] if attend is plain else inputs
    return output, *torch.autograd.grad(output, needed, cotangent)


def passes_gate(device, shapes) -> bool:
    names = ("output", "query", "key", "value", "rel_key", "content_bias", "position_bias")
    good = True
    for shape in shapes:
        inputs, cotangent = draw(shape, torch.bfloat16, device)
        doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
        truth = differentiate(exact, doubles, cotangent.double())

        def errors(attend, inputs=inputs, cotangent=cotangent, truth=truth):
            results = differentiate(attend, inputs, cotangent)
            return [((r.double() - t).norm() / t.norm()).item() for r, t in zip(results, truth, strict=True)]

        eager = errors(relative(eager_relative_attention))
        for name in ("txl_triton", "sdpa_relative"):
            found = errors(CONTENDERS[name])
            bad = [n for n, e, limit in zip(names, found, eager, strict=True) if not e <= max(2 * limit, 4e-3)]
            good &= not bad
            worst = max(e / limit for e, limit in zip(found, eager, strict=True))
            verdict = f"FAILED: {', '.join(bad)}" if bad else "passes"
            print(f"gate {shape} {name}: {verdict}, at most {worst:.2f} of eager's error", flush=True)
    return good


def seconds(call) -> float:
    if not torch.cuda.is_available():
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # Some three milliseconds, in which the host queues everything.
    torch.cuda._sleep(5_000_000)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def measure(shape, mode, contenders, device, budget) -> dict[str, dict]:
    """Seconds of each contender's calls, interleaved, and the memory it needs beyond its inputs."""
    B, H, L, m, D = shape
    size = 2 * B * H * D * (2 * L + 2 * (m + L))
    copies = max(1, min(8, -(-(2**28) // size))) if device == "cuda" else 1
    sets = [draw(shape, torch.bfloat16, device, seed) for seed in range(copies)]

    def call(attend, number):
        inputs, cotangent = sets[number % copies]
        if mode == "forward":
            with torch.no_grad():
                return attend(inputs)
        return differentiate(attend, inputs, cotangent)

    found = {}
    for name, attend in contenders.items():
        for number in range(3):
            call(attend, number)
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call(attend, 0)
            found[name] = {"times": [], "peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20}
        else:
            found[name] = {"times": [], "peak_mib": 0.0}
    start, number = time.perf_counter(), 0
    while number < 20 or (time.perf_counter() - start < budget and number < 200):
        for name, attend in contenders.items():
            found[name]["times"].append(seconds(lambda attend=attend, number=number: call(attend, number)))
        number += 1
    return found


def floor_flops(shape, mode) -> float:
    B, H, L, m, D = shape
    pairs = B * H * (L * m + L * (L + 1) / 2)
    return 2 * D * pairs * (2 if mode == "forward" else 7)


def quantiles(times: list[float]) -> list[float]:
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return [cuts[1], statistics.median(times), cuts[7]]


def origin(device) -> dict:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "triton": kernels.triton.__version__,
    }


def compare(shapes, device, budget) -> list[dict]:
    rows = []
    columns = "{:18} {:9} {:14} {:>9} {:>9} {:>9} {:>8} {:>8} {:>8}"
    print(columns.format("shape", "mode", "contender", "ms p20", "p50", "p80", "TFLOP/s", "of sdpa", "MiB"))
    for shape_name, shape in shapes.items():
        for mode in ("forward", "both"):
            found = measure(shape, mode, CONTENDERS, device, budget)
            floor = statistics.median(found["sdpa"]["times"])
            for name, result in found.items():
                low, middle, high = quantiles(result["times"])
                row = {
                    "shape": shape_name,
                    **dict(zip(("B", "H", "L", "m", "Dh"), shape, strict=True)),
                    "mode": "forward" if mode == "forward" else "forward+backward",
                    "contender": name,
                    "repeats": len(result["times"]),
                    "ms_p20": round(low * 1e3, 4),
                    "ms_p50": round(middle * 1e3, 4),
                    "ms_p80": round(high * 1e3, 4),
                    "tflops": round(floor_flops(shape, mode) / middle / 1e12, 1),
                    "of_sdpa": round(floor / middle, 3),
                    "peak_mib": round(result["peak_mib"], 1),
                }
                rows.append(row)
                figures = (row[column] for column in ("ms_p20", "ms_p50", "ms_p80", "tflops", "of_sdpa", "peak_mib"))
                print(columns.format(shape_name, mode, name, *figures), flush=True)
    return rows


def sweep(shape, device, budget) -> None:
    """Each kernel with other tiles, the others as they are; a tile that does not fit is passed over."""
    width = 128 if shape[-1] > 64 else 64
    for kernel, mode in (("forward", "forward"), ("backward_query", "both"), ("backward_key", "both")):
        chosen = kernels._TILES[kernel][width]
        for tile in TILES:
            kernels._TILES[kernel][width] = tile
            try:
                times = measure(shape, mode, {"txl_triton": CONTENDERS["txl_triton"]}, device, budget)["txl_triton"]
                result = f"{statistics.median(times['times']) * 1e3:.3f} ms"
            except kernels.triton.runtime.errors.OutOfResources as error:
                result = str(error)
            print(f"{kernel:15} {tile} {mode}: {result}{'  (chosen)' if tile == chosen else ''}", flush=True)
        kernels._TILES[kernel][width] = chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--seconds", type=float, default=2.0, help="for one shape and mode")
    parser.add_argument("--sweep", action="store_true", help="time other tiles on the first of the shapes")
    parser.add_argument("--smoke", action="store_true", help="run the script on a tiny shape; writes nothing")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reason = kernels.why_not_triton(torch.empty(1, 1, 1, 64, dtype=torch.bfloat16, device=device))
    if reason or (device == "cpu" and not arguments.smoke):
        print(f"nothing measured: {reason or 'no GPU'}")
        return 0

    shapes = SMOKE_SHAPES if arguments.smoke else {name: SHAPES[name] for name in arguments.shapes}
    if not passes_gate(device, shapes.values() if arguments.smoke else GATE_SHAPES):
        return 1
    if arguments.sweep:
        sweep(next(iter(shapes.values())), device, arguments.seconds)
        return 0
    rows = [origin(device) | row for row in compare(shapes, device, 0 if arguments.smoke else arguments.seconds)]
    if not arguments.smoke:
        arguments.output.parent.mkdir(exist_ok=True)
        with arguments.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
