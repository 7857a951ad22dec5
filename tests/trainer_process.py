"""Training in processes of their own: to kill them, and to have two of them. Imported once, by a fork server."""

import json
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
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import set_seed
from transformers.utils import logging

from conftest import SMALL
from txl_hf import RegularizationArguments, TokenStream, TransfoXLConfig, TransfoXLForCausalLM
from txl_hf.trainer import TransfoXLTrainer

context = multiprocessing.get_context("forkserver")


class UnevenStream(TokenStream):
    """Half of the streams lose most of their targets, and no target is in the last bin in every other step."""

    def __getitem__(self, index):
        item = super().__getitem__(index)
        if index % self.batch_size < self.batch_size // 2:
            item["shift_labels"][1:] = -100
        if index // self.batch_size % 2:
            item["shift_labels"][item["shift_labels"] >= 30] = -100
        return item


class LossFile(TrainerCallback):
    """Every logged loss as a line of a file, whatever happens next."""

    def __init__(self, path: Path):
        self.path = path

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and {"loss", "eval_loss"} & set(logs):
            name = "loss" if "loss" in logs else "eval_loss"
            with open(self.path, "a") as file:
                file.write(json.dumps([name, state.global_step, logs[name], logs.get("grad_norm")]) + "\n")


def make_model(**changes) -> TransfoXLForCausalLM:
    set_seed(0)
    return TransfoXLForCausalLM(TransfoXLConfig(**(SMALL | changes)))


def make_text(length: int, seed: int = 0) -> torch.Tensor:
    """Tokens that depend on those before, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(7, (length,), generator=generator).cumsum(0) % SMALL["vocab_size"]


def make_arguments(path, **changes) -> TrainingArguments:
    defaults = {
        "output_dir": str(path),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 20,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
    }
    return TrainingArguments(**(defaults | changes))


def train(
    output: Path,
    model=None,
    stream=TokenStream,
    resume=False,
    kill_at=None,
    tokens=501,
    batch_size=4,
    regularization=None,
    **arguments,
):
    """Train and write the losses to output/losses.jsonl; kill the process at file operation number `kill_at`."""
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    if kill_at is not None:
        _kill_at(kill_at)
    arguments = make_arguments(output, **arguments)
    if arguments.fsdp:
        # accelerate shards on every device but the CPU, though torch can.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer = TransfoXLTrainer(
        make_model(**(model or {})),
        arguments,
        train_dataset=stream(make_text(tokens), 5, batch_size),
        eval_dataset=stream(make_text(201, seed=1), 5, batch_size, keep_remainder=True),
        callbacks=[LossFile(output / "losses.jsonl")],
        regularization=RegularizationArguments(**regularization) if regularization else None,
    )
    trainer.train(resume_from_checkpoint=resume)
    assert bool(arguments.fsdp) == isinstance(trainer.model, FSDPModule)
    assert bool(arguments.deepspeed) == trainer.is_deepspeed_enabled
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _kill_at(operation: int):
    """Count what writes, renames and removes while a checkpoint is saved, and die before number `operation`."""
    left = operation

    def counted(function):
        def wrapper(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapper

    from txl_hf import checkpoints

    torch.save = counted(torch.save)
    os.replace = counted(os.replace)
    shutil.rmtree = counted(shutil.rmtree)
    os.unlink = counted(os.unlink)
    checkpoints.save_file = counted(checkpoints.save_file)
    Path.write_text = counted(Path.write_text)


def _in_process(rank: int, processes: int, port: int, arguments: dict):
    # DeepSpeed would look for a GPU.
    os.environ["DS_ACCELERATOR"] = "cpu"
    if processes > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    train(**arguments)


def start(processes: int = 1, **arguments) -> list:
    """Start `train(**arguments)` in so many processes."""
    # The server finds this module by the environment alone.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        context.set_forkserver_preload([__name__])
        multiprocessing.forkserver.ensure_running()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [
        context.Process(target=_in_process, args=(rank, processes, port, arguments)) for rank in range(processes)
    ]
    for process in started:
        process.start()
    return started


def run(processes: int = 1, **arguments) -> list[int]:
    """`train(**arguments)` in so many processes, to the end; their exit codes."""
    started = start(processes, **arguments)
    for process in started:
        process.join()
    return [process.exitcode for process in started]


def read_losses(output: Path) -> list[list]:
    return [json.loads(line) for line in (output / "losses.jsonl").read_text().splitlines()]
