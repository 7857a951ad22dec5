"""The attention operation alone: every backend against plain attention, which has no relative positions.

    python benchmarks/attention_kernel.py            # bf16 on a GPU (under three minutes), fp32 on a CPU
    python benchmarks/attention_kernel.py --sweep    # the best tiles of each kernel on a GPU, see attention_tiles.py
    TRITON_INTERPRET=1 python benchmarks/attention_kernel.py --smoke --output FILE     # the script itself, on a CPU

First the gate: outputs and gradients of every contender with relative positions against fp64, at most twice as far off
as eager in the same dtype; nothing is timed if one fails. Then forward, and forward with backward, interleaved:

    txl_triton       the kernels (on a GPU)
    one_backward     the same with one kernel for all gradients (only with --contenders)
    flex_attention   PyTorch's FlexAttention, compiled (on a GPU; on a CPU with --contenders, forward alone)
    auto             what the model does by default: on a CPU the fastest of tiles, eager and sdpa_relative
    sdpa_relative    scaled_dot_product_attention with (b) + (d) as its mask
    eager            the reference (on a CPU; its L × K tensors fill a GPU at these sizes)
    sdpa             scaled_dot_product_attention, causal to the lower right: the floor, what flash attention reaches

A GPU sleeps before each call until the host has queued it, so launches cost nothing, and inputs rotate through
copies larger than its cache. TFLOP/s count the floor's products over visible pairs (two forward, five backward) for
every contender, so that they compare as times do. A row per shape, mode and contender goes to
`results/attention_kernel.csv`.
"""

import argparse
import sys
import time

import torch
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

import harness
import txl_hf.kernels.attention_triton as kernels
from txl_hf.transfo_xl.attention_transfo_xl import relative_attention

# Name: B, H, L, m, Dh.
SHAPES = {f"nvidia-base-B{B}": (B, 8, 192, 192, 64) for B in (32, 64, 128, 256)}
SHAPES |= {f"nvidia-large-B{B}": (B, 16, 384, 384, 64) for B in (8, 32)}
SHAPES |= {f"enwik8-base-B{B}": (B, 8, 512, 512, 64) for B in (8, 32)}
SHAPES |= {"enwik8-large-B8": (8, 8, 768, 768, 128), "wt103-base-B60": (60, 10, 150, 150, 41)}
SHAPES |= {f"long-m{m}": (4, 8, 512, m, 64) for m in (2048, 4096, 8192, 16384)}
CPU_SHAPES = {
    "enwik8-base-train": (2, 8, 512, 512, 64),
    "enwik8-base-m2048": (1, 8, 128, 2048, 64),
    "enwik8-base-m3800": (1, 8, 128, 3800, 64),
    "wt103-base-train": (2, 10, 150, 150, 41),
    "wt103-base-m640": (1, 10, 64, 640, 41),
} | {f"growth-m{m}": (1, 8, 128, m, 64) for m in (8192, 16384)}
GATE_SHAPES = [(2, 2, 192, 192, 64), (2, 2, 150, 150, 41), (1, 2, 65, 300, 64), (1, 2, 130, 7, 128)]
SMOKE_SHAPES = {"smoke": (1, 2, 20, 30, 16)}


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


def relative(implementation, one_backward_kernel=False):
    def attend(inputs):
        # Read in the backward pass, which ends before another contender is called.
        kernels.ONE_BACKWARD_KERNEL = one_backward_kernel
        return relative_attention(*inputs, implementation=implementation)[0]

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
    visible = torch.ones(L, K, dtype=torch.bool, device=query.device).tril(K - L)
    return F.softmax(scores.masked_fill(~visible, -torch.inf), -1) @ value


CONTENDERS = {
    "txl_triton": relative("txl_triton"),
    "one_backward": relative("txl_triton", one_backward_kernel=True),
    "flex_attention": relative("flex_attention"),
    "auto": relative("auto"),
    "sdpa_relative": relative("sdpa"),
    "eager": relative("eager"),
    "sdpa": plain,
}
DEFAULT = {
    "cuda": ["txl_triton", "flex_attention", "sdpa_relative", "sdpa"],
    "cpu": ["auto", "eager", "sdpa"],
}


def differentiate(attend, inputs, cotangent):
    output = attend(inputs)
    needed = inputs[:3] if attend is plain else inputs
    return output, *torch.autograd.grad(output, needed, cotangent)


def failing(contenders, shapes, device, dtype) -> dict[str, str]:
    """Contenders that raise, or are more than twice as far from fp64 as eager, with the reason."""
    names = ("output without gradient", "output", "query", "key", "value", "rel_key", "content_bias", "position_bias")
    # On a CPU it has no backward.
    forward_only = [CONTENDERS["flex_attention"]] if device == "cpu" else []
    wrong: dict[str, str] = {}
    for shape in shapes:
        inputs, cotangent = draw(shape, dtype, device)
        doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
        truth = differentiate(exact, doubles, cotangent.double())
        truth = (truth[0], *truth)

        def errors(attend, inputs=inputs, cotangent=cotangent, truth=truth):
            with torch.no_grad():
                results = [attend(inputs)]
            if attend not in forward_only:
                results += differentiate(attend, inputs, cotangent)
            return [((r.double() - t).norm() / t.norm()).item() for r, t in zip(results, truth, strict=False)]

        eager = errors(CONTENDERS["eager"])
        for name in contenders:
            if name in ("eager", "sdpa") or name in wrong:
                continue
            try:
                found = errors(CONTENDERS[name])
            except Exception as error:
                # One that cannot run takes nobody's row but its own.
                wrong[name] = describe(error)
                print(f"gate {shape} {name}: FAILED: {wrong[name]}", flush=True)
                continue
            # Where eager is exact by chance, what rounding alone can do.
            least = torch.finfo(dtype).eps / 2
            bad = [n for n, e, limit in zip(names, found, eager, strict=False) if not e <= max(2 * limit, least)]
            if bad:
                wrong[name] = ", ".join(bad)
            worst = max(e / limit for e, limit in zip(found, eager, strict=False))
            verdict = f"FAILED: {', '.join(bad)}" if bad else "passes"
            print(f"gate {shape} {name}: {verdict}, at most {worst:.2f} of eager's error", flush=True)
    return wrong


def seconds(call, device) -> float:
    if device == "cpu":
        return harness.seconds(call, device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # Some three milliseconds, in which the host queues everything.
    torch.cuda._sleep(5_000_000)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def measure(shape, mode, contenders, device, dtype, budget, fewest=20) -> dict[str, dict]:
    """Seconds of each contender's calls, interleaved, and the memory it needs beyond its inputs."""
    B, H, L, m, D = shape
    size = 2 * B * H * D * (2 * L + 2 * (m + L))
    copies = max(1, min(8, -(-(2**28) // size))) if device == "cuda" else 1
    sets = [draw(shape, dtype, device, seed) for seed in range(copies)]

    def call(attend, number):
        inputs, cotangent = sets[number % copies]
        if mode == "forward":
            with torch.no_grad():
                return attend(inputs)
        return differentiate(attend, inputs, cotangent)

    found = {}
    for name in contenders:
        for number in range(3):
            call(CONTENDERS[name], number)
        harness.synchronize(device)
        harness.reset_peak(device)
        before = torch.cuda.memory_allocated() / 2**20 if device == "cuda" else harness.resident_mib()
        call(CONTENDERS[name], 0)
        found[name] = {"times": [], "peak_mib": harness.peak_mib(device) - before}
    start, number = time.perf_counter(), 0
    while number < fewest or (time.perf_counter() - start < budget and number < 200):
        for name in contenders:
            attend = CONTENDERS[name]
            found[name]["times"].append(seconds(lambda attend=attend, number=number: call(attend, number), device))
        number += 1
    return found


def floor_flops(shape, mode) -> float:
    B, H, L, m, D = shape
    pairs = B * H * (L * m + L * (L + 1) / 2)
    return 2 * D * pairs * (2 if mode == "forward" else 7)


def compare(shapes, contenders, device, dtype, budget, fewest, keep) -> bool:
    """Measure, and hand the rows of each shape and mode to `keep` when they are there; whether all are."""
    complete = True
    columns = "{:18} {:9} {:14} {:>9} {:>9} {:>9} {:>8} {:>8} {:>8}"
    print(columns.format("shape", "mode", "contender", "ms p20", "p50", "p80", "TFLOP/s", "of sdpa", "MiB"))
    for shape_name, shape in shapes.items():
        for mode in ("forward", "both"):
            # On a CPU it has no backward.
            able = [name for name in contenders if (name, device, mode) != ("flex_attention", "cpu", "both")]
            try:
                found = measure(shape, mode, able, device, dtype, budget, fewest)
            except Exception as error:
                # One that there is no room for leaves the others theirs.
                print(f"{shape_name} {mode}: FAILED: {describe(error)}", flush=True)
                complete = False
                continue
            floor = harness.quantiles(found["sdpa"]["times"])[1]
            rows = []
            for name, result in found.items():
                low, middle, high = harness.quantiles(result["times"])
                row = {
                    "shape": shape_name,
                    **dict(zip(("B", "H", "L", "m", "Dh"), shape, strict=True)),
                    "mode": "forward" if mode == "forward" else "forward+backward",
                    "contender": name,
                    "repeats": len(result["times"]),
                    "ms_p20": round(low * 1e3, 4),
                    "ms_p50": round(middle * 1e3, 4),
                    "ms_p80": round(high * 1e3, 4),
                    "tflops": harness.significant(floor_flops(shape, mode) / middle / 1e12),
                    "of_sdpa": round(floor / middle, 3),
                    "peak_mib": round(result["peak_mib"], 1),
                }
                rows.append(row)
                figures = (row[column] for column in ("ms_p20", "ms_p50", "ms_p80", "tflops", "of_sdpa", "peak_mib"))
                print(columns.format(shape_name, mode, name, *figures), flush=True)
            keep(rows)
    return complete


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def insist_on_triton(device, dtype) -> None:
    reason = kernels.why_not_triton(torch.empty(1, 1, 1, 64, dtype=dtype, device=device))
    if reason:
        sys.exit(f"error: txl_triton would fall back: {reason}")


def insist_on_shapes(names, known) -> None:
    if unknown := set(names) - known.keys():
        sys.exit(f"error: there is no shape {', '.join(sorted(unknown))}, but {', '.join(known)}")


def sweep_tiles(arguments) -> int:
    # It imports this module.
    import attention_tiles

    insist_on_triton(arguments.device, harness.torch_dtype(arguments.dtype))
    insist_on_shapes(arguments.shapes or (), attention_tiles.SHAPES)
    if arguments.output == harness.RESULTS / "attention_kernel.csv":
        arguments.output = harness.RESULTS / "attention_tiles.csv"
    return attention_tiles.sweep(arguments)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_arguments(parser, "attention_kernel.csv", budget=2.0)
    parser.add_argument("--shapes", nargs="+", metavar="SHAPE", help="only these")
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, help="whose rows to write; sdpa is always timed"
    )
    parser.add_argument("--sweep", action="store_true", help="find the best tiles instead")
    arguments = parser.parse_args(given)
    harness.complete(arguments)
    device, dtype = arguments.device, harness.torch_dtype(arguments.dtype)
    if arguments.sweep:
        return sweep_tiles(arguments)
    wanted = arguments.contenders or DEFAULT[device]
    contenders = list(dict.fromkeys([*wanted, "sdpa"]))
    on_triton = {"txl_triton", "one_backward"}
    if on_triton.intersection(contenders):
        insist_on_triton(device, dtype)

    chosen = arguments.shapes or (SHAPES if device == "cuda" else CPU_SHAPES)
    insist_on_shapes(chosen, SHAPES | CPU_SHAPES)
    shapes = SMOKE_SHAPES if arguments.smoke else {name: (SHAPES | CPU_SHAPES)[name] for name in chosen}
    wrong = failing(contenders, shapes.values() if arguments.smoke else GATE_SHAPES, device, dtype)
    contenders = [name for name in contenders if name not in wrong]
    origin = harness.origin(device, arguments.dtype, arguments.threads) | harness.versions()
    origin["triton"] = kernels.triton.__version__ if on_triton.intersection(contenders) else ""

    def keep(rows):
        # A row of the floor from one process beside that of another would be two runs.
        if kept := [origin | row for row in rows if row["contender"] in wanted]:
            harness.append(arguments.output, kept)

    complete = compare(shapes, contenders, device, dtype, arguments.seconds, 2 if arguments.smoke else 20, keep)
    return int(bool(wrong) or not complete)


if __name__ == "__main__":
    sys.exit(main())
