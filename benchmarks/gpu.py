"""Everything for one GPU, in calls of under ten minutes: first whether it is right, then the most important rows.

    python benchmarks/gpu.py --output FOLDER [--minutes 9] [--skip 0 1 2] [--peer-python OTHER_ENVIRONMENT/bin/python]

It needs torch with CUDA, triton, transformers, accelerate and pytest; with pytest-xdist the tests share the GPU, with
pytest-timeout one that hangs takes no other with it. The NVIDIA recipes train with the LAMB of pytorch_optimizer: a
wheel of it in the folder `.whl` beside the sources does, as do other wheels of pure Python. With --without-lamb they
train with AdamW; the rows say so, and meet no bar.

Behind the quick tests, cuDNN's probe and a profile of a step comes what has a figure to reach; tests that compile
are last. Each contender has processes of its own, in training and decoding a step too, and rows are written as they
are measured: a crash takes one row, and a limit those of one step. A call runs the steps that it has time for, and
says with which --skip the next one goes on; the first one has time for the tests, the probe, the profile and the
base model, should every step take all that it may. `python benchmarks/report.py --add FOLDER` takes the rows over,
and `--bars` says which bars they meet.
"""

import argparse
import ast
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = FOLDER.parent / "src"
TESTS = FOLDER.parent / "tests"
WHEELS = FOLDER.parent / ".whl"
PACKAGES = ("torch", "transformers", "accelerate", "pytest")
# Processes that share the GPU.
TESTERS = 14
# What the GPU is for: where time is short, these have been run.
FIRST = ("test_no_sync.py", "test_triton.py")
# Each process of the tests would start a pool of compilers as large as the machine.
ONE_COMPILER = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
# Seconds that a step may take to say where it was when it was stopped.
GRACE = 5
SHORT = ["--seconds", "8", "--repeats", "3", "20"]
WINDOW = ("--model", "enwik8-large", "--segments", "128", "1024", "4096", "--seconds", "3")


@dataclass(frozen=True)
class Step:
    """A script with its options, and after how many seconds it is stopped, however it hangs or compiles."""

    script: str
    options: tuple[str, ...] = ()
    limit: int = 60


def model(workload: str, *contenders: str, limit: int = 60) -> Step:
    """Contenders in one step share its start and the losses that they are held to, and each has its process."""
    return Step("model", ("--workloads", workload, "--contenders", *contenders), limit)


def each(workload: str, limits: dict[str, int]) -> list[Step]:
    """A step for each contender, given what it may take: one that compiles for too long leaves the others theirs."""
    return [model(workload, contender, limit=limit) for contender, limit in limits.items()]


def attention(contender: str, limit: int, *others: str) -> Step:
    return Step("attention_kernel", ("--seconds", "0.5", "--contenders", contender, *others), limit)


def tests(marks: str, names: str, limit: int) -> Step:
    """Those with these marks and names; what compiles for a GPU that is not there has been run without one."""
    names = f"not sm_90 and {names}" if names else "not sm_90"
    return Step("pytest", ("-m", marks, "-k", names), limit)


EVALUATIONS = [f"evaluate-nvidia-{size}-b{rows}" for size in ("base-640", "large-1600") for rows in (1, 16, 32)]
DECODINGS = [f"decode-nvidia-base-640-b{rows}" for rows in (1, 32, 16)]
DECODINGS += ["decode-wt103-large-1600", "decode-enwik8-large-3800"]
# On an H200 beside 16 cores the tests took 100 s, a profile 30 to 45, a contender of training 55 to 75, its layers
# compiled or not, and two of an evaluation 35 to 45. What compiles the whole model, for a prompt and for a token,
# needs minutes.
STEPS = [
    tests("gpu and not slow", "not flex_attention", 150),
    # Ours leave cuDNN out, and it may fault.
    Step("cudnn_probe", ("--contenders", "sdpa", "auto"), 25),
    Step("cudnn_probe", ("--contenders", "cudnn"), 25),
    Step("profile_step", ("--workload", "train-nvidia-base", "--contender", "ours-txl_triton-compile"), 60),
    # What `report.BARS` are of.
    *each("train-nvidia-base", {"ours-txl_triton-compile": 100, "ours-txl_triton": 75, "ours": 75}),
    *each("train-nvidia-large", {"ours-txl_triton-compile": 120, "ours-txl_triton": 90, "ours": 90}),
    *each("train-nvidia-base", {"ours-txl_triton-compile-graphs": 120}),
    attention("txl_triton", 75, "sdpa"),
    *(Step("sliding_window", (*WINDOW, *other), 90) for other in ((), ("--implementation", "txl_triton"))),
    *(model(workload, "ours", "ours-txl_triton", limit=90) for workload in EVALUATIONS),
    # What is good to know. A small step takes as long as Python launches its kernels.
    *each("train-wikitext2-b32", {"ours-txl_triton-graphs": 75, "ours-txl_triton": 60}),
    *each("train-wikitext2-b32", {"ours-txl_triton-compile-graphs": 120, "ours-txl_triton-compile": 100}),
    *(model(workload, "ours") for workload in DECODINGS),
    Step("attention_tiles", (), 100),
    attention("sdpa_relative", 60),
    Step("softmax", ("--seconds", "4"), 90),
    Step("growth", ("--seconds", "1"), 60),
    *each("train-enwik8-b22", {"ours-txl_triton-compile": 120, "ours": 60, "gpt2": 60, "floor": 60}),
    *each("train-enwik8-large-b8", {"ours-txl_triton-compile": 120, "ours": 60, "gpt2": 60, "floor": 60}),
    model("evaluate-enwik8-large-3800", "ours", "ours-txl_triton", "floor", limit=120),
    *each("decode-enwik8-large-3800", {"gpt2": 60, "floor": 60}),
    *(model(workload, "ours-static", limit=240) for workload in DECODINGS),
    Step("conformer", ("--audio", "30", "300", "--seconds", "3"), 100),
    Step("conformer", ("--audio", "3600", "--repeats", "1", "2", "--contenders", "ours"), 120),
    attention("flex_attention", 240),
    tests("gpu and not slow", "flex_attention", 420),
    tests("gpu and slow", "", 300),
]
# Time enough for a processor that has other work.
SMOKE = [
    tests("gpu and not slow", "", 1200),
    *(Step(script, limit=1200) for script in ("cudnn_probe", "profile_step", "model", "attention_kernel")),
    *(Step(script, limit=1200) for script in ("sliding_window", "softmax", "growth", "conformer")),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # A machine that lends its GPU may name the folder that it hands back.
    output = Path(os.environ.get("OUT") or FOLDER / "results")
    parser.add_argument("--output", type=Path, default=output, help="folder for the CSV files (%(default)s)")
    parser.add_argument("--minutes", type=float, help="when to stop (9; with --smoke 80)")
    parser.add_argument("--skip", type=int, nargs="*", default=[], metavar="STEP", help="those that are done already")
    parser.add_argument("--peer-python", help="interpreter with transformers 4.35.2 and torch for this GPU")
    parser.add_argument("--without-lamb", action="store_true", help="train the recipes of NVIDIA with AdamW")
    parser.add_argument("--smoke", action="store_true", help="each script at tiny sizes, on any device")
    arguments = parser.parse_args()
    check_packages(parser, PACKAGES if arguments.smoke else (*PACKAGES, "triton"))
    if not arguments.smoke and not arguments.without_lamb:
        check_packages(parser, ["pytorch_optimizer"], ", or train with AdamW, which meets no bar (--without-lamb)")
    steps = SMOKE if arguments.smoke else STEPS
    end = time.monotonic() + 60 * (arguments.minutes or (80 if arguments.smoke else 9))
    done, failed = set(arguments.skip), []
    for number, step in enumerate(steps):
        left = end - time.monotonic()
        # What would be cut short is left to the next call, and the time to a step that takes less.
        if number in done or left < step.limit + GRACE:
            continue
        print(f"\n== step {number}, {left:.0f} s left: {step.script} {' '.join(step.options)}", flush=True)
        variables = environment() | (ONE_COMPILER if step.script == "pytest" else {})
        status = run(command_of(step, arguments), variables, step.limit, GRACE)
        if status is None:
            print(f"step {number} was stopped after {step.limit} s", flush=True)
        if status != 0:
            failed.append(number)
        done.add(number)
    waiting = [number for number in range(len(steps)) if number not in done]
    print(f"\n{len(steps) - len(waiting)} of {len(steps)} steps done; of this call failed: {failed or 'none'}")
    if waiting:
        print(f"out of time; go on with --skip {' '.join(map(str, sorted(done)))}")
        return 3
    return int(bool(failed))


def check_packages(parser: argparse.ArgumentParser, names: Iterable[str], otherwise: str = ""):
    """End with an error that names the packages that are neither installed nor brought along."""
    places = [*sys.path, *map(str, WHEELS.glob("*.whl"))]
    if missing := [name for name in names if PathFinder.find_spec(name, places) is None]:
        parser.error(f"{', '.join(missing)} cannot be imported: install it, or put wheels into {WHEELS}{otherwise}")


def command_of(step: Step, arguments: argparse.Namespace) -> list[str]:
    if step.script == "pytest":
        # One that hangs leaves as much time to the others.
        return [*tester(step.limit // 2), *step.options, *map(str, files_of_gpu_tests())]
    script, options = ("attention_kernel", ["--sweep"]) if step.script == "attention_tiles" else (step.script, [])
    # One file for the scripts whose output is read by people, so that few files have to be copied.
    output = "notes.txt" if script in ("cudnn_probe", "profile_step") else f"{step.script}.csv"
    command = [sys.executable, str(FOLDER / f"{script}.py"), "--output", str(arguments.output / output), *options]
    command += ["--smoke"] if arguments.smoke else ["--device", "cuda"]
    if arguments.peer_python and script in ("model", "softmax"):
        command += ["--peer-python", arguments.peer_python]
    short = SHORT if script == "model" and not arguments.smoke else []
    return [*command, *short, *step.options]


def tester(seconds: int) -> list[str]:
    """pytest as it does most in little time, a test in `seconds`: without a GPU each is skipped, which is no failure.

    Each test is a line when it is done, so that one can see what went wrong before all was stopped.
    """
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-rf", "-p", "no:cacheprovider"]
    # A file that needs what this machine lacks takes no other with it.
    command.append("--continue-on-collection-errors")
    # This process and the one that hands out tests need a core.
    count = min(TESTERS, (os.cpu_count() or 1) - 2)
    if count > 1 and importlib.util.find_spec("xdist"):
        command += ["-n", str(count)]
    if importlib.util.find_spec("pytest_timeout"):
        # No signal reaches Python while it waits for a kernel; the thread ends the process, and xdist starts another.
        command += ["--timeout", str(seconds), "--timeout-method", "thread"]
    return command


def files_of_gpu_tests() -> list[Path]:
    """Those with a test that is marked, or takes the fixture `device`, which marks it; `FIRST` ones first."""
    paths = sorted(TESTS.rglob("test_*.py"), key=lambda path: (path.name not in FIRST, path.name))
    return [path for path in paths if any(map(is_for_gpu, ast.walk(ast.parse(path.read_bytes()))))]


def is_for_gpu(node: ast.AST) -> bool:
    """Whether this is the mark, or a test that takes `device` and has no parameter of that name of its own."""
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
        own = any("'device'" in ast.unparse(decorator) for decorator in node.decorator_list)
        return not own and "device" in [argument.arg for argument in node.args.args]
    return isinstance(node, ast.Attribute) and ast.unparse(node).endswith("mark.gpu")


def environment() -> dict[str, str]:
    """With the sources and the wheels that were brought along."""
    folders = [str(SOURCES), *map(str, sorted(WHEELS.glob("*.whl"))), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}


def run(command: list[str], environment: dict[str, str], limit: float, grace: float = 0.0) -> int | None:
    """The exit status of a command; None if it ran for longer than `limit` seconds and was stopped.

    With `grace` it is asked first, as Ctrl-C asks, and has so many seconds to end.
    """
    # What is started from a script in the background would not hear of Ctrl-C.
    process = subprocess.Popen(
        command,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        if grace > 0:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace)
        return None
    finally:
        # Also the processes that it has started: they hold memory of the GPU.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
