"""Runs of txl-train in processes of their own: to kill them, and to have two of them."""

import os

from accelerate.state import DistributedType, PartialState

import launcher
from txl_hf.training import command


def start(argv: list, processes: int = 1, kill_at: int | None = None, sharded: bool = False) -> list:
    """Start `train_lm.py *argv` in so many processes, under FSDP2 if `sharded`. They die before file operation number
    `kill_at`."""
    argv = [str(argument) for argument in argv]
    return launcher.start(_train, processes, argv=argv, kill_at=kill_at, sharded=sharded)


def run(argv: list, processes: int = 1, kill_at: int | None = None, sharded: bool = False) -> list[int]:
    """The same to the end; the exit codes."""
    return launcher.join(start(argv, processes, kill_at, sharded))


def _train(argv: list[str], kill_at: int | None, sharded: bool):
    os.environ["ACCELERATE_USE_CPU"] = "true"
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
        launcher.kill_at(kill_at)
    command.main(argv)
