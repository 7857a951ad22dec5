"""Processes of their own for tests: to kill them at any operation, and to have several that train together."""

import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

TESTS = Path(__file__).parent
context = multiprocessing.get_context("forkserver")
# By what they have imported.
servers = defaultdict(forkserver.ForkServer)
starting = threading.Lock()
# Where these processes have their caches; it is asked for once, when the libraries are imported.
home = tempfile.TemporaryDirectory(prefix="hf-home-")


def start(target: Callable, processes: int = 1, libraries: str = "libraries", **arguments) -> list:
    """Start `target(**arguments)` in so many processes that find one another, forked from one that has imported the
    module `libraries`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [
        context.Process(target=_run, args=(target, arguments, rank, processes, port)) for rank in range(processes)
    ]
    # What is patched is the whole process's.
    with starting, pytest.MonkeyPatch.context() as patch:
        # The server finds modules by the environment alone.
        patch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
        patch.setenv("HF_HOME", home.name)
        server = servers[libraries]
        server.set_forkserver_preload([libraries])
        # multiprocessing itself has one server.
        patch.setattr(forkserver, "ensure_running", server.ensure_running)
        patch.setattr(forkserver, "connect_to_new_process", server.connect_to_new_process)
        for process in started:
            process.start()
    return started


def join(started: list) -> list[int]:
    """Wait for the end of processes; their exit codes."""
    for process in started:
        process.join()
    return [process.exitcode for process in started]


def kill_at(operation: int):
    """Count the steps of the optimiser and what writes, renames and removes in this process; die before number
    `operation`. A number, not a moment, so that a run that fails can be repeated."""
    from txl_hf.training import memory

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
    memory.save_file = counted(memory.save_file)
    Path.write_text = counted(Path.write_text)
    register_optimizer_step_pre_hook(counted(lambda *step: None))


def _run(target: Callable, arguments: dict, rank: int, processes: int, port: int):
    torch.set_num_threads(1)
    if processes > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    target(**arguments)
    if processes > 1:
        # Left at once: to free what gloo's threads hold can wait for ever on one of torch's locks.
        sys.stdout.flush()
        os._exit(0)
