"""Everything for one GPU in one call of under ten minutes, the most important rows first.

    python benchmarks/gpu.py --output FOLDER [--minutes 9] [--skip 3] [--peer-python OTHER_ENVIRONMENT/bin/python]

It needs torch with CUDA, triton, transformers and accelerate; with pytorch_optimizer the NVIDIA recipes train with
their LAMB, otherwise with AdamW, and the rows say so. Rows are written as they are measured, so that a call that is
cut short loses one step only; it says how to go on. `python benchmarks/report.py --add FOLDER` takes them over.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = FOLDER.parent / "src"
SHORT = ["--seconds", "8", "--repeats", "3", "20"]
TRAIN = ["--contenders", "ours", "ours-txl_triton"]
COMPILED = ["--contenders", "ours", "ours-compile"]
# What hangs or compiles for too long takes no more than this from the others.
STEP_SECONDS = 240
# Script and its options.
STEPS = [
    ("model", ["--workloads", "train-nvidia-base", *TRAIN]),
    ("model", ["--workloads", "train-nvidia-large", *TRAIN]),
    ("attention_kernel", ["--sweep"]),
    ("attention_kernel", ["--seconds", "0.5"]),
    ("sliding_window", ["--model", "enwik8-large", "--seconds", "6", "--repeats", "3", "20"]),
    ("model", ["--workloads", "train-nvidia-base", *COMPILED]),
    ("model", ["--workloads", "train-enwik8-b22", "train-wt103-large-b16"]),
    ("model", ["--workloads", "evaluate-nvidia-base-640-b1", "evaluate-nvidia-base-640-b32"]),
    ("model", ["--workloads", "evaluate-nvidia-large-1600-b1", "evaluate-nvidia-large-1600-b32"]),
    ("model", ["--workloads", "decode-wt103-large-1600", "decode-nvidia-base-640-b32"]),
    ("softmax", ["--seconds", "4"]),
    ("growth", ["--seconds", "1"]),
    ("model", ["--workloads", "train-enwik8-large-b8", "evaluate-enwik8-large-3800", "decode-enwik8-large-3800"]),
    ("model", ["--workloads", "evaluate-nvidia-base-640-b16", "evaluate-nvidia-large-1600-b16"]),
    ("model", ["--workloads", "decode-nvidia-base-640-b1", "decode-nvidia-base-640-b16", "evaluate-wt103-large-1600"]),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # A machine that lends its GPU may name the folder that it hands back.
    output = Path(os.environ.get("OUT") or FOLDER / "results")
    parser.add_argument("--output", type=Path, default=output, help="folder for the CSV files (%(default)s)")
    parser.add_argument("--minutes", type=float, default=9.0, help="when to stop (%(default)s)")
    parser.add_argument("--skip", type=int, default=0, help="steps that are done already")
    parser.add_argument("--peer-python", help="interpreter with transformers 4.35.2 and torch for this GPU")
    parser.add_argument("--smoke", action="store_true", help="each script at tiny sizes, on any device")
    arguments = parser.parse_args()
    started, failed = time.monotonic(), []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SOURCES), os.environ.get("PYTHONPATH", "")])}
    steps = [("model", []), ("softmax", []), ("growth", []), ("sliding_window", [])] if arguments.smoke else STEPS
    for number, (script, options) in list(enumerate(steps))[arguments.skip :]:
        left = 60 * arguments.minutes - (time.monotonic() - started)
        if left < 20:
            print(f"out of time; go on with --skip {number}", flush=True)
            return 3
        results = "attention_tiles" if "--sweep" in options else script
        command = [sys.executable, str(FOLDER / f"{script}.py"), "--output", str(arguments.output / f"{results}.csv")]
        if arguments.smoke:
            command += ["--smoke"]
        elif script == "model":
            command += ["--device", "cuda", *SHORT]
        else:
            command += ["--device", "cuda"]
        if arguments.peer_python and script in ("model", "softmax"):
            command += ["--peer-python", arguments.peer_python]
        print(f"\n== step {number}, {left:.0f} s left: {script} {' '.join(options)}", flush=True)
        limit = min(left, STEP_SECONDS)
        status = run([*command, *options], environment, limit)
        if status is None and limit == left:
            print(f"out of time in step {number}; go on with --skip {number}", flush=True)
            return 3
        if status is None:
            print(f"step {number} was stopped after {limit} s", flush=True)
        if status != 0:
            failed.append(number)
    print(f"\n{len(steps) - len(failed)} of {len(steps)} steps done; failed: {failed or 'none'}")
    return int(bool(failed))


def run(command: list[str], environment: dict[str, str], limit: float) -> int | None:
    """The exit status of a command; None if it ran for longer than `limit` seconds and was stopped."""
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Also the processes that it has started: they hold memory of the GPU.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
