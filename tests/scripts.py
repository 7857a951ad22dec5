"""Scripts run as a user runs them, each in a process of its own, without importing torch anew each time."""

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import launcher


def run_script(
    *command: object,
    cwd: str | Path | None = None,
    input: str = "",
    timeout: float = 120,
    only_torch: bool = False,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """`python *command`, a script with arguments or `-c` with code, as `start_script` runs it. The result is that of
    `subprocess.run`."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder) / name for name in ("stdin", "stdout", "stderr")]
        streams[0].write_text(input, encoding="utf-8")
        process = start_script(*command, streams=streams, cwd=cwd, only_torch=only_torch, **environment)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(list(command), timeout)
        printed = [path.read_text(encoding="utf-8") if path.exists() else "" for path in streams[1:]]
    return subprocess.CompletedProcess(list(command), process.exitcode, *printed)


def start_script(
    *command: object,
    streams: list[Path],
    cwd: str | Path | None = None,
    only_torch: bool = False,
    **environment: str,
):
    """Start `python *command`, forked from a process that has the libraries; what they read from the environment when
    they are imported, they have read before. With `only_torch` this process has that alone, and neither the Hub's
    settings nor the Auto classes are made. `streams` are files or named pipes: what it reads, what it prints, and its
    errors."""
    environment = os.environ | {"HF_HOME": launcher.home.name} | environment
    words = [str(word) for word in command]
    libraries = "libraries_torch" if only_torch else "libraries"
    [process] = launcher.start(
        _run,
        libraries=libraries,
        command=words,
        cwd=str(cwd or os.getcwd()),
        environment=environment,
        streams=streams,
    )
    return process


def _run(command: list[str], cwd: str, environment: dict[str, str], streams: list[Path]):
    os.dup2(os.open(streams[0], os.O_RDONLY), 0)
    for number, path in enumerate(streams[1:], start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdin = os.fdopen(0, encoding="utf-8")
    os.environ.clear()
    os.environ |= environment
    # It was asked for before, and keeps the answer.
    tempfile.tempdir = None
    os.chdir(cwd)
    status: object = None
    try:
        if command[0] == "-c":
            sys.argv, sys.path[:0] = ["-c", *command[2:]], [""]
            exec(command[1], {"__name__": "__main__"})
        else:
            sys.argv, sys.path[:0] = command, [str(Path(command[0]).resolve().parent)]
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
