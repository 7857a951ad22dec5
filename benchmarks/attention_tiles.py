"""The tiles of the Triton kernels: which is the fastest on this GPU.

    python benchmarks/attention_kernel.py --sweep     # under ninety seconds on a GPU with 16 cores beside it
    python benchmarks/attention_kernel.py --sweep --shapes evaluation-128 enwik8-large

Each candidate is first compiled and held against fp64 (the gate of `attention_kernel`), many at a time in processes of
their own; Triton keeps what they compiled. Those that pass are timed one after the other, each kernel by itself, in
several rounds. A row per shape, kernel and candidate goes to `results/attention_tiles.csv`; the last lines are what to
write into the table of this GPU's tiles: for each kernel and width the tile whose times, relative to the best of each
shape, have the smallest product.
"""

import collections
import concurrent.futures
import contextlib
import io
import math
import multiprocessing
import os
import time

import torch

import attention_kernel
import harness
import txl_hf.kernels.attention_triton as kernels

# Name: B, H, L, m, Dh.
TRAINING_SHAPES = {
    "nvidia-base": (256, 8, 192, 192, 64),
    "nvidia-large": (32, 16, 384, 384, 64),
    "enwik8-large": (8, 8, 768, 768, 128),
}
EVALUATION_SHAPES = {f"evaluation-{Dh}": (16, 8, 128, 3800, Dh) for Dh in (64, 128)}
SHAPES = TRAINING_SHAPES | EVALUATION_SHAPES
SMOKE_SHAPES = {"smoke": (1, 1, 20, 12, 16)}
# L, m.
GATE_LENGTHS, SMOKE_GATE_LENGTHS = (150, 90), (18, 9)
# Queries, at most as many as keys; keys; warps; stages. A product of 64 queries occupies four warps: with eight, some
# products are computed twice.
NARROW = [(64, 64, 4, stages) for stages in (1, 2, 3)] + [(64, 64, 8, stages) for stages in (1, 2)]
NARROW += [(64, 128, 4, 1), (64, 128, 8, 1), (64, 128, 8, 2), (128, 128, 8, 1), (32, 64, 4, 2), (32, 32, 4, 2)]
WIDE = [(64, 64, 4, stages) for stages in (1, 2, 3)] + [(64, 64, 8, stages) for stages in (1, 2)]
WIDE += [(64, 128, 8, 1), (128, 128, 8, 1), (32, 64, 4, 1), (32, 64, 4, 2), (32, 64, 8, 1), (32, 64, 8, 2)]
WIDE += [(32, 32, 4, 1), (32, 32, 4, 2), (32, 32, 8, 2)]
CANDIDATES = {64: NARROW, 128: WIDE}
SMOKE_CANDIDATES = {64: [(16, 16, 4, 1), (16, 32, 4, 1)]}
KERNELS = ("forward", "backward_query", "backward_key")


def width_of(shape: tuple[int, ...]) -> int:
    return 128 if shape[-1] > 64 else 64


@contextlib.contextmanager
def use(kernel: str, width: int, tile: tuple[int, int, int, int]):
    """The tile takes the place of the kernel's own, whatever the dtype."""
    tables = (kernels._TILES, kernels._BLACKWELL_TILES, kernels._REGISTER_TILES, kernels._FP32_TILES)
    own = [table[kernel][width] for table in tables]
    for table in tables:
        table[kernel][width] = tile
    try:
        yield
    finally:
        for table, before in zip(tables, own, strict=True):
            table[kernel][width] = before


def try_out(kernel: str, width: int, tile: tuple[int, ...], shape: tuple[int, ...], device, dtype) -> str:
    """Compile and check, in a process of its own: why the tile cannot be used, or an empty string."""
    said = io.StringIO()
    try:
        with use(kernel, width, tile), contextlib.redirect_stdout(said):
            wrong = attention_kernel.failing(["txl_triton"], [shape], device, dtype)
    # Whatever a compiler may say of a tile that it cannot make: the others go on.
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return said.getvalue().strip().splitlines()[-1] if wrong else ""


def usable(candidates: dict[int, list], gate_shapes: dict[int, tuple], device, dtype) -> dict[tuple, list]:
    """By kernel and width, the candidates that compile and are right."""
    good = collections.defaultdict(list)
    workers = min(16, os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
        waiting = {
            (kernel, width, tile): pool.submit(try_out, kernel, width, tile, shape, device, dtype)
            for width, shape in gate_shapes.items()
            for kernel in KERNELS
            for tile in candidates[width]
        }
        for (kernel, width, tile), future in waiting.items():
            try:
                reason = future.result()
            except concurrent.futures.process.BrokenProcessPool:
                reason = "the compiler took its process down"
            if reason:
                print(f"{kernel} {width} {tile} is left out: {reason}", flush=True)
            else:
                good[kernel, width].append(tile)
    return good


def calls(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> dict:
    """Each kernel alone, by name, on tensors of its own."""
    inputs, d_output = attention_kernel.draw(shape, dtype, device)
    tensors = [tensor.detach() for tensor in inputs]
    scaling = shape[-1] ** -0.5
    arguments = (*tensors, *[None] * 8, scaling, 0.0)
    output, log_sum = kernels.relative_attention_op(*arguments, None)
    shared = kernels._shared_arguments(*arguments) | kernels._backward_arguments(log_sum, d_output, scaling)
    d_query, d_key, d_value = (torch.empty_like(tensor) for tensor in tensors[:3])
    by_distance, needed = (*tensors[3:], None), [True, True, True, False]
    return {
        "forward": lambda: kernels.relative_attention_op(*arguments, None),
        "backward_query": lambda: kernels._launch_backward_query(shared, output, d_query, by_distance, needed),
        "backward_key": lambda: kernels._launch_backward_key(shared, d_key, d_value),
    }


def measure(shape: tuple[int, ...], good: dict[tuple, list], device, dtype, rounds: int) -> dict[tuple, list[float]]:
    """Seconds by kernel and tile. The first round is a warm-up; a tile four times behind the best has had its turn."""
    width, times = width_of(shape), collections.defaultdict(list)
    for kernel, call in calls(shape, device, dtype).items():
        tiles = good[kernel, width]
        if not tiles or (kernel != "forward" and shape in EVALUATION_SHAPES.values()):
            continue
        for number in range(rounds + 1):
            for tile in tiles:
                with use(kernel, width, tile):
                    seconds = attention_kernel.seconds(call, device)
                if number:
                    times[kernel, tile].append(seconds)
            if number == 1:
                best = min(times[kernel, tile][0] for tile in tiles)
                tiles = [tile for tile in tiles if times[kernel, tile][0] < 4 * best]
    return times


def results(name: str, shape: tuple[int, ...], times: dict[tuple, list[float]], own: dict[str, dict]) -> list[dict]:
    """Rows of one shape, the fastest tile of each kernel first; `own` are those that are in use."""
    middle = {key: harness.quantiles(seconds)[1] for key, seconds in times.items()}
    rows = []
    for (kernel, tile), seconds in sorted(middle.items(), key=lambda item: (KERNELS.index(item[0][0]), item[1])):
        best = min(other for (its_kernel, _), other in middle.items() if its_kernel == kernel)
        row = {"shape": name} | dict(zip(("B", "H", "L", "m", "Dh"), shape, strict=True)) | {"kernel": kernel}
        row |= dict(zip(("block_m", "block_n", "warps", "stages"), tile, strict=True))
        row |= {"ms_p50": round(seconds * 1e3, 4), "of_best": round(best / seconds, 3)}
        rows.append(row | {"repeats": len(times[kernel, tile])})
        used = "  (in use)" if tile == own[kernel][width_of(shape)] else ""
        print(f"{name:16} {kernel:15} {tile!s:18} {row['ms_p50']:10.4f} ms {row['of_best']:6.3f}{used}", flush=True)
    return rows


def print_choice(rows: list[dict]) -> None:
    behind: dict = collections.defaultdict(lambda: collections.defaultdict(float))
    for row in rows:
        tile = tuple(row[column] for column in ("block_m", "block_n", "warps", "stages"))
        behind[row["kernel"], width_of((row["Dh"],))][tile] -= math.log(row["of_best"])
    for kernel in KERNELS:
        best = {width: min(tiles, key=tiles.get) for (name, width), tiles in behind.items() if name == kernel}
        print(f'        "{kernel}": {best},')


def sweep(arguments) -> int:
    device, dtype = arguments.device, harness.torch_dtype(arguments.dtype)
    shapes, candidates, lengths = SHAPES, CANDIDATES, GATE_LENGTHS
    if arguments.smoke:
        shapes, candidates, lengths = SMOKE_SHAPES, SMOKE_CANDIDATES, SMOKE_GATE_LENGTHS
    elif arguments.shapes:
        shapes = {name: SHAPES[name] for name in arguments.shapes}
    began = time.perf_counter()
    gate_shapes = {width_of(shape): (1, 2, *lengths, shape[-1]) for shape in shapes.values()}
    good = usable(candidates, gate_shapes, device, dtype)
    print(f"compiled and checked in {time.perf_counter() - began:.0f} s", flush=True)
    origin = harness.origin(device, arguments.dtype, arguments.threads) | harness.versions()
    origin["triton"] = kernels.triton.__version__
    own, rows = kernels._tiles(torch.device(device), dtype), []
    for name, shape in shapes.items():
        times = measure(shape, good, device, dtype, 2 if arguments.smoke else 10)
        if found := results(name, shape, times, own):
            harness.append(arguments.output, [origin | row for row in found])
            rows += found
    print(f"\n{time.perf_counter() - began:.0f} s in all. For the tables of tiles in kernels/attention_triton.py:")
    print_choice(rows)
    # Nothing to choose from: every candidate was left out.
    return 0 if rows else 1
