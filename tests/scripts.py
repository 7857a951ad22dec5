"""Scripts run as a user runs them, each in a process of its own, without importing torch anew each time."""

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import accelerate  # noqa: F401 - imported once, by the server that the processes are forked from
import datasets  # noqa: F401
import peft  # noqa: F401
import transformers.trainer  # noqa: F401

import launcher
import txl_hf.trainer  # noqa: F401


def run_script(
    script: str | Path, *arguments: object, cwd: str | Path | None = None, timeout: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`python script arguments`, forked from a process that has the libraries; what they read from the environment
    when they are imported, they have read before. The result is that of `subprocess.run`."""
    command = [str(word) for word in (script, *arguments)]
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder) / name for name in ("stdout", "stderr")]
        [process] = launcher.start(
            _run, command=command, cwd=str(cwd or os.getcwd()), environment=environment, streams=streams
        )
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout)
        printed = [path.read_text(encoding="utf-8") if path.exists() else "" for path in streams]
    return subprocess.CompletedProcess(command, process.exitcode, *printed)


def _run(command: list[str], cwd: str, environment: dict[str, str], streams: list[Path]):
    for number, path in enumerate(streams, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ |= environment
    # It was asked for before, and keeps the answer.
    tempfile.tempdir = None
    os.chdir(cwd)
    sys.argv, sys.path[:0] = command, [str(Path(command[0]).resolve().parent)]
    status: object = None
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as leaving:
        status = leaving.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)
