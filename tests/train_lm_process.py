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
from accelerate.state import DistributedType, PartialState

import train_lm
from txl_hf import checkpoints

context = multiprocessing.get_context("forkserver")
FOLDERS = (Path(__file__).parent, Path(train_lm.__file__).parent)


def start(argv: list, processes: int = 1, kill_at: int | None = None, sharded: bool = False) -> list:
    """Start `train_lm.py *argv` in so many processes, under FSDP2 if `sharded`. They die before file operation number
    `kill_at`."""
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
        context.Process(target=_in_process, args=(rank, processes, port, argv, kill_at, sharded))
        for rank in range(processes)
    ]
    for process in started:
        process.start()
    return started


def run(argv: list, processes: int = 1, kill_at: int | None = None, sharded: bool = False) -> list[int]:
    """The same to the end; the exit codes."""
    started = start(argv, processes, kill_at, sharded)
    for process in started:
        process.join()
    return [process.exitcode for process in started]


def _in_process(rank: int, processes: int, port: int, argv: list[str], kill_at: int | None, sharded: bool):
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
    if sharded:
        os.environ |= {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_TRANSFORMER_CLS_TO_WRAP": "TransfoXLLayer",
            "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        }
        # accelerate shards on every device but the CPU, though torch can.
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
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
    checkpoints.save_file = counted(checkpoints.save_file)
    Path.write_text = counted(Path.write_text)
