"""Everything for one GPU in one call of under ten minutes: first whether it is right, then the most important rows.

    python benchmarks/gpu.py --output FOLDER [--minutes 9] [--skip 3] [--peer-python OTHER_ENVIRONMENT/bin/python]

It needs torch with CUDA, triton, transformers, accelerate and pytest. The NVIDIA recipes train with their LAMB where
there is pytorch_optimizer: a wheel of it in the folder `.whl` beside the sources does, as do other wheels of pure
Python. Otherwise they train with AdamW, and the rows say so. Each contender of the most important rows is a step of
its own, in processes of its own, and rows are written as they are measured: what a crash or a limit takes is one row.
A call that runs out of time says how to go on. `python benchmarks/report.py --add FOLDER` takes the rows over, and
`--bars` says which bars they meet.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = FOLDER.parent / "src"
WHEELS = FOLDER.parent / ".whl"
SHORT = ["--seconds", "8", "--repeats", "3", "20"]
FLEX = ["--contenders", "flex_attention"]


@dataclass(frozen=True)
class Step:
    """A script with its options, and after how many seconds it is stopped, however it hangs or compiles."""

    script: str
    options: tuple[str, ...] = ()
    limit: int = 60


def train(workload: str, contender: str, limit: int) -> Step:
    return Step("model", ("--workloads", workload, "--contenders", contender), limit)


def compare(*workloads: str, contenders: tuple[str, ...] = (), limit: int = 60) -> Step:
    chosen = ("--contenders", *contenders) if contenders else ()
    return Step("model", ("--workloads", *workloads, *chosen), limit)


STEPS = [
    Step("pytest", ("tests/test_no_sync.py", "tests/test_triton.py", "-k", "not sweep and not sm_90"), 120),
    Step("cudnn_probe", (), 30),
    Step("profile_step", ("--workload", "train-nvidia-base", "--contender", "ours-txl_triton"), 45),
    *(
        train(f"train-nvidia-{size}", contender, 75)
        for size in ("base", "large")
        for contender in ("ours-txl_triton-compile", "ours-txl_triton", "ours")
    ),
    Step("attention_kernel", ("--seconds", "0.5", "--contenders", "txl_triton", "sdpa_relative"), 75),
    Step("sliding_window", ("--model", "enwik8-large", "--segments", "128", "1024", *SHORT), 75),
    compare("decode-nvidia-base-640-b1", contenders=("ours", "ours-static")),
    compare("decode-nvidia-base-640-b32", contenders=("ours", "ours-static")),
    compare("evaluate-nvidia-base-640-b1", contenders=("ours", "ours-txl_triton")),
    compare("evaluate-nvidia-base-640-b32", contenders=("ours", "ours-txl_triton")),
    compare("evaluate-nvidia-large-1600-b1", contenders=("ours", "ours-txl_triton")),
    compare("evaluate-nvidia-large-1600-b32", contenders=("ours", "ours-txl_triton")),
    compare("decode-wt103-large-1600", contenders=("ours", "ours-static")),
    Step("attention_tiles", (), 100),
    Step("attention_kernel", ("--seconds", "0.3", *FLEX), 240),
    Step("softmax", ("--seconds", "4"), 90),
    Step("growth", ("--seconds", "1"), 60),
    compare("train-enwik8-b22", contenders=("ours-txl_triton-compile", "ours", "gpt2", "floor"), limit=90),
    compare("train-enwik8-large-b8", "evaluate-enwik8-large-3800", "decode-enwik8-large-3800", limit=120),
    compare("evaluate-nvidia-base-640-b16", "evaluate-nvidia-large-1600-b16", "decode-nvidia-base-640-b16", limit=120),
]
# Time enough for a processor that has other work.
SMOKE = [
    Step("pytest", ("tests/test_no_sync.py",)),
    *(Step(script, limit=1200) for script in ("cudnn_probe", "profile_step", "model", "attention_kernel")),
    *(Step(script, limit=1200) for script in ("sliding_window", "softmax", "growth")),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # A machine that lends its GPU may name the folder that it hands back.
    output = Path(os.environ.get("OUT") or FOLDER / "results")
    parser.add_argument("--output", type=Path, default=output, help="folder for the CSV files (%(default)s)")
    parser.add_argument("--minutes", type=float, help="when to stop (9; with --smoke 60)")
    parser.add_argument("--skip", type=int, default=0, help="steps that are done already")
    parser.add_argument("--peer-python", help="interpreter with transformers 4.35.2 and torch for this GPU")
    parser.add_argument("--smoke", action="store_true", help="each script at tiny sizes, on any device")
    arguments = parser.parse_args()
    started, failed = time.monotonic(), []
    steps = SMOKE if arguments.smoke else STEPS
    minutes = arguments.minutes or (60 if arguments.smoke else 9)
    for number, step in list(enumerate(steps))[arguments.skip :]:
        left = 60 * minutes - (time.monotonic() - started)
        if left < 20:
            print(f"out of time; go on with --skip {number}", flush=True)
            return 3
        print(f"\n== step {number}, {left:.0f} s left: {step.script} {' '.join(step.options)}", flush=True)
        limit = min(left, step.limit)
        status = run(command_of(step, arguments), environment(), limit)
        if status is None and limit == left:
            print(f"out of time in step {number}; go on with --skip {number}", flush=True)
            return 3
        if status is None:
            print(f"step {number} was stopped after {limit} s", flush=True)
        if status != 0:
            failed.append(number)
    print(f"\n{len(steps) - len(failed)} of {len(steps)} steps done; failed: {failed or 'none'}")
    return int(bool(failed))


def command_of(step: Step, arguments: argparse.Namespace) -> list[str]:
    if step.script == "pytest":
        tests = [str(FOLDER.parent / option) if option.startswith("tests/") else option for option in step.options]
        # Without a GPU each of these is skipped, which is no failure.
        return [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-rf", *tests]
    script, options = ("attention_kernel", ["--sweep"]) if step.script == "attention_tiles" else (step.script, [])
    suffix = "txt" if script in ("cudnn_probe", "profile_step") else "csv"
    command = [sys.executable, str(FOLDER / f"{script}.py")]
    command += ["--output", str(arguments.output / f"{step.script}.{suffix}"), *options]
    command += ["--smoke"] if arguments.smoke else ["--device", "cuda"]
    if arguments.peer_python and script in ("model", "softmax"):
        command += ["--peer-python", arguments.peer_python]
    short = SHORT if script == "model" and not arguments.smoke else []
    return [*command, *short, *step.options]


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
