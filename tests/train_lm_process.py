"""Runs of txl-train in processes of their own: to kill them, and to have two of them."""

import os

from accelerate.state import DistributedType, PartialState
from torch.distributed.fsdp import FSDPModule

import launcher
from txl_hf.commands import train_lm as command

# A small model, and a training of few steps.
MODEL = {
    "n_layer": 2,
    "d_model": 16,
    "n_head": 2,
    "d_head": 8,
    "d_inner": 24,
    "cutoffs": [100, 300],
    "div_val": 2,
    "initial_memory": "empty",
    "init_std": 0.1,
    "proj_init_std": 0.1,
    "dropout": 0.0,
    "tgt_len": 8,
    "mem_len": 12,
    "clamp_len": -1,
    "same_length": False,
}
RECIPE = MODEL | {
    "batch_size": 4,
    "learning_rate": 0.01,
    "warmup_steps": 2,
    "max_steps": 12,
    "eval_steps": 5,
    "eval_batch_size": 8,
    "eval_tgt_len": 64,
    "logging_steps": 1,
    "save_steps": 5,
}


def start(argv: list, processes: int = 1, kill_at: int | None = None, sharded: str | None = None) -> list:
    """Start `train_lm.py *argv` in so many processes, `sharded` by "fsdp2" or "deepspeed" (ZeRO-2). They die before
    file operation number `kill_at`."""
    argv = [str(argument) for argument in argv]
    return launcher.start(_train, processes, argv=argv, kill_at=kill_at, sharded=sharded)


def run(argv: list, processes: int = 1, kill_at: int | None = None, sharded: str | None = None) -> list[int]:
    """The same to the end; the exit codes."""
    return launcher.join(start(argv, processes, kill_at, sharded))


def _train(argv: list[str], kill_at: int | None, sharded: str | None):
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if sharded is not None:
        _shard(sharded, argv)
    if kill_at is not None:
        launcher.kill_at(kill_at)
    command.main(argv)


def _shard(by: str, argv: list[str]):
    """Have the run of this process shard its weights, as `accelerate launch` asks for it."""
    if by == "fsdp2":
        os.environ |= {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_TRANSFORMER_CLS_TO_WRAP": "TransfoXLLayer",
            "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        }
    else:
        os.environ |= {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
            "DS_ACCELERATOR": "cpu",
            # Not the user's folder, because torch waits for the lock of a compilation that was killed.
            "TORCH_EXTENSIONS_DIR": argv[argv.index("--output") + 1] + "-extensions",
        }
    make_trainer, save_best = command.make_trainer, command.save_best

    def make_sharded(*given):
        # accelerate shards on every device but the CPU, though torch and DeepSpeed can; `TrainingArguments`, which are
        # made by now, begin a state of their own.
        kind = DistributedType.MULTI_GPU if by == "fsdp2" else DistributedType.DEEPSPEED
        PartialState._shared_state["distributed_type"] = kind
        del os.environ["ACCELERATE_USE_CPU"]
        trainer = make_trainer(*given)
        assert trainer.is_fsdp_enabled if by == "fsdp2" else trainer.is_deepspeed_enabled
        return trainer

    def save_sharded(trainer, *given):
        assert by != "fsdp2" or isinstance(trainer.model_wrapped, FSDPModule)
        save_best(trainer, *given)

    command.make_trainer, command.save_best = make_sharded, save_sharded
