"""Runs of examples/train_lm.py in processes of their own: to kill them, and to have two of them."""

import multiprocessing
import multiprocessing.forkserver
import os
import shutil
import signal
import socket
from pathlib import Path

import pytest
import torch

import train_lm

context = multiprocessing.get_context("forkserver")
FOLDERS = (Path(__file__).parent, Path(train_lm.__file__).parent)


def start(argv: list, processes: int = 1, kill_at: int | None = None) -> list:
    """Start `train_lm.py *argv` in so many processes; they die at file operation number `kill_at` of a checkpoint."""
    # The server finds this module by the environment alone.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, FOLDERS)), prepend=os.pathsep)
        context.set_forkserver_preload([__name__])
        multiprocessing.forkserver.ensure_running()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [str(argument) for argument in argv]
    started = [
        context.Process(target=_in_process, args=(rank, processes, port, argv, kill_at)) for rank in range(processes)
    ]
    for process in started:
        process.start()
    return started


def run(argv: list, processes: int = 1, kill_at: int | None = None) -> list[int]:
    """The same to the end; the exit codes."""
    started = start(argv, processes, kill_at)
    for process in started:
        process.join()
    return [process.exitcode for process in started]


def _in_process(rank: int, processes: int, port: int, argv: list[str], kill_at: int | None):
    torch.set_num_threads(1)
    if processes > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "ACCELERATE_USE_CPU": "true",
        }
    if kill_at is not None:
        _kill_at(kill_at)
    train_lm.main(argv)


def _kill_at(operation: int):
    """Count what writes, renames and removes, and die before number `operation`."""
    left = operation

    def counted(function):
        def wrapper(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapper

    torch.save = counted(torch.save)
    os.replace = counted(os.replace)
    shutil.rmtree = counted(shutil.rmtree)
    os.unlink = counted(os.unlink)
    train_lm.save_file = counted(train_lm.save_file)
    Path.write_text = counted(Path.write_text)
