"""Shared by the benchmarks: machine and versions, contenders that take turns, peak memory, FLOPs and CSV rows.

It also runs under transformers 4.35, in the processes of the legacy contender.
"""

import contextlib
import csv
import ctypes
import datetime
import functools
import gc
import itertools
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
# Fits the share of WikiText-103's tokens that its 20,000 most frequent words make up, 93 %.
ZIPF_EXPONENT, ZIPF_SHIFT = 1.2, 2.7
# Turns of a loop, some tenths of a millisecond: longer than a thread waits for the others' part of a product, shorter
# than it waits for one whose core another program has.
SPIN_COUNT = 10_000


# ---- where, when and with what ----------------------------------------------------------------------------------


def processor() -> str:
    """The processor's name with its family and model: virtual machines call all generations `AMD EPYC`, or
    `Intel(R) Xeon(R) Processor`, of which one is twice as fast as another."""
    found = {}
    if Path("/proc/cpuinfo").exists():
        pairs = re.findall(
            r"^(model name|cpu family|model)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
        found = dict(pairs)
    name = found.get("model name") or platform.processor() or platform.machine()
    if {"cpu family", "model"} <= found.keys():
        name += f" (family {found['cpu family']}, model {found['model']})"
    return name


@functools.cache
def commit() -> str:
    """The commit, marked if the package has changed since; empty outside a repository."""
    git = ["git", "-C", str(RESULTS.parents[1])]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "src"], check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("-dirty" if changed else "")


def origin(device: str, dtype: str, threads: int) -> dict:
    """The first columns of every row."""
    import torch

    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "processor": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "threads": threads if device == "cpu" else "",
        "dtype": dtype,
    }


def versions() -> dict:
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


# ---- CSV --------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def with_range(values: list[float], digits: int) -> str:
    """The mean, and what lies between the lowest and the highest seed."""
    if not values:
        return "–"
    spread = f" ± {(max(values) - min(values)) / 2:.{digits}f}" if len(values) > 1 else ""
    return f"{sum(values) / len(values):.{digits}f}{spread}"


def append(path: Path, rows: list[dict]) -> None:
    """Rows that were measured earlier stay; what they lack of today's columns stays empty."""
    rows = read(path) + rows
    columns = list(dict.fromkeys(column for row in rows for column in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}")
    with aside.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(aside, path)


# ---- time, memory and FLOPs -------------------------------------------------------------------------------------


def quantiles(values: list[float], percents: Iterable[int] = (20, 50, 80)) -> list[float]:
    if len(values) == 1:
        return values * len(list(percents))
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return [cuts[percent - 1] for percent in percents]


def significant(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


def synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def seconds(call: Callable, device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def interleave(calls: dict[str, Callable], device: str, budget: float, fewest: int, most: int = 20) -> dict:
    """Seconds of each call, turn by turn, after one warm-up of each, until the budget is spent."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    for turn in range(most):
        if turn >= fewest and time.perf_counter() - start > budget:
            break
        for name, call in calls.items():
            times[name].append(seconds(call, device))
    return times


def resident_mib() -> float:
    """Memory of this process now."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0.0
    return int(re.search(r"VmRSS:\s+(\d+)", status.read_text())[1]) / 1024


def reset_peak(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    elif Path("/proc/self/clear_refs").exists():
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            # glibc keeps what was freed, and would not need to ask for it again.
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def peak_mib(device: str) -> float:
    """The most memory since `reset_peak`: of the allocator on a GPU, of the whole process on a CPU."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def torch_dtype(name: str):
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def matmul_peak(device: str, dtype: str) -> float:
    """FLOP/s of a large square product, the best of several: what model FLOPs utilisation is a share of.

    On a CPU by either of the libraries that torch carries, MKL and oneDNN: which one is faster depends on the maker.
    """
    import torch

    size, repeats = (8192, 30) if device == "cuda" else (2048, 5)
    a, b = (torch.randn(size, size, device=device).to(torch_dtype(dtype)) for _ in range(2))
    products = [lambda: a @ b]
    if device == "cpu" and torch.backends.mkldnn.is_available():
        products.append(lambda: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], ""))
    fastest = float("inf")
    for product in products:
        product()
        fastest = min(fastest, *(seconds(product, device) for _ in range(repeats)))
    return 2 * size**3 / fastest


FLOP_FORMULA = """\
FLOPs of a token, forward: twice the multiply-adds of the matrix products that the model needs, whoever computes it.
  n_layer × [ 2·D·(4·H·Dh + 2·d_inner)         projections and feed-forward
            + 4·H·Dh·(m + (L+1)/2)             visible pairs; content, value
            + 2·H·Dh·(m + (L+1)/2)             position, of clamp_len + 1 distances at most; without positions none
            + 4·D·H·Dh·m/L                     keys and values of a memory that is given as states (training)
            + 2·D·H·Dh·(m+L)/(B·L) ]           W_R R (training; otherwise it is projected once)
  + 2·d_embed·(D + head)                       head of the softmax; no D without a projection
  + Σ share_i·2·d_i·(D + size_i)               clusters, for the share of targets in each; in decoding all
Training: three times that, twice where no gradient flows to the input (memory, W_R R)."""


def flops_per_token(
    config: dict, segment: int, memory: int, batch: int, task: str, shares: list[float], relative: bool = True
) -> float:
    """See `FLOP_FORMULA`. `shares`: of the targets, those in each bin; `relative`: positions are."""
    D, width = config["d_model"], config["n_head"] * config["d_head"]
    layer = 2 * D * (4 * width + 2 * config["d_inner"])
    pairs = memory + (segment + 1) / 2
    distances = min(pairs, config["clamp_len"] + 1) if config["clamp_len"] > 0 else pairs
    layer += 2 * width * (2 * pairs + (distances if relative else 0))
    fixed = 0.0
    if task == "train":
        fixed = 4 * D * width * memory / segment
        if relative:
            fixed += 2 * D * width * (memory + segment) / (batch * segment)
    ends = [0, *config["cutoffs"], config["vocab_size"]]
    softmax = 0.0
    for i, (start, end) in enumerate(itertools.pairwise(ends)):
        embed = config["d_embed"] // config["div_val"] ** i
        projection = D if embed != D or config["div_val"] > 1 else 0
        size = end - start + (len(config["cutoffs"]) if i == 0 else 0)
        share = 1.0 if i == 0 or task == "decode" else shares[i]
        softmax += share * 2 * embed * (projection + size)
    forward = config["n_layer"] * layer + softmax
    return 3 * forward + 2 * config["n_layer"] * fixed if task == "train" else forward


def token_frequencies(vocab_size: int):
    """How frequent tokens are, (vocab_size,) in fp64: as words (Zipf–Mandelbrot), sorted as vocabularies are."""
    import torch

    frequency = (torch.arange(vocab_size, dtype=torch.float64) + ZIPF_SHIFT) ** -ZIPF_EXPONENT
    return frequency / frequency.sum()


def draw_ids(vocab_size: int, shape: tuple[int, ...], seed: int = 1):
    """Tokens as frequent as `token_frequencies` says."""
    import torch

    edges = token_frequencies(vocab_size).cumsum(0).clamp(max=1)
    uniform = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.searchsorted(edges, uniform).clamp(max=vocab_size - 1)


def bin_shares(ids, cutoffs: list[int], vocab_size: int) -> list[float]:
    ends = [0, *cutoffs, vocab_size]
    return [((ids >= start) & (ids < end)).double().mean().item() for start, end in itertools.pairwise(ends)]


def meets(found: float, published: float) -> bool:
    """Whether a figure is the published one, or below it, to the digits that were published."""
    return round(found, len(str(published).partition(".")[2])) <= published


# ---- contenders as processes ------------------------------------------------------------------------------------


class ContenderError(RuntimeError):
    """A contender's process ended; the message holds the end of what it said."""


class Contender:
    """A process that answers one request after the other, each a line of JSON, and waits in between."""

    def __init__(self, command: list[str]):
        self.command = command
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )

    def ask(self, request: str) -> dict:
        """
        Raises:
            ContenderError: the process ends without an answer.
        """
        answer = ""
        try:
            self.process.stdin.write(request + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            pass
        if not answer:
            self.errors.seek(0)
            said = self.errors.read().strip().rpartition("\n")[2]
            raise ContenderError(f"stopped at {request!r}: {said}\n    {' '.join(self.command)}")
        return json.loads(answer)

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.errors.close()


def serve(answers: dict[str, Callable[[], dict]]) -> None:
    """A contender's side: answer the requests on standard input."""
    # Whatever else prints would be taken for an answer.
    channel, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(answers[line.strip()]()), file=channel, flush=True)


def ask_all(contenders: dict[str, Contender], request: str) -> dict[str, dict]:
    """Everybody's answer, in turn; who stops is left out from then on, and said."""
    answers = {}
    for name, contender in list(contenders.items()):
        try:
            answers[name] = contender.ask(request)
        except ContenderError as error:
            print(f"{name} {error}", flush=True)
            contenders.pop(name).stop()
    return answers


def take_turns(contenders: dict[str, Contender], budget: float, fewest: int, most: int) -> dict[str, list[dict]]:
    """Answers to "turn": each contender once in every round, until the budget of seconds is spent."""
    turns: dict[str, list[dict]] = {name: [] for name in contenders}
    start = time.perf_counter()
    for turn in range(most):
        if turn >= fewest and time.perf_counter() - start > budget:
            break
        for name, answer in ask_all(contenders, "turn").items():
            turns[name].append(answer)
    return {name: turns[name] for name in contenders}


def add_arguments(parser, results: str, budget: float) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="default: fp32 on a CPU, bf16 on a GPU")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="(%(default)s)")
    parser.add_argument("--seconds", type=float, default=budget, help="for the turns of one workload (%(default)s)")
    parser.add_argument("--repeats", type=int, nargs=2, default=(5, 20), metavar=("FEWEST", "MOST"))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, two turns: try the script itself")
    parser.add_argument("--output", type=Path, default=RESULTS / results, help="rows are appended to it")


def complete(arguments) -> None:
    """Defaults that depend on one another; and how threads wait, in the contenders' processes too.

    GNU's OpenMP, which PyTorch's wheels for Linux bring, spins 300,000 turns while a thread waits for another. That
    takes the processor from the contender whose turn it is; without any, threads have to be woken for every product,
    which on some hosts takes a third of a decoded token's time. OpenMP reads the variable when torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    import torch

    arguments.device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    arguments.dtype = arguments.dtype or ("bf16" if arguments.device == "cuda" else "fp32")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: --device cuda, but torch sees no GPU")
    if arguments.smoke:
        arguments.seconds, arguments.repeats = 0.0, (2, 2)
        keep_smoke_out(arguments.output)
    prepare(arguments)


def keep_smoke_out(output: Path) -> None:
    if output.parent == RESULTS:
        raise SystemExit("error: --smoke measures nothing worth keeping: name another file with --output")


def prepare(arguments) -> None:
    import torch

    torch.set_num_threads(arguments.threads)
    torch.backends.cuda.matmul.allow_tf32 = True
