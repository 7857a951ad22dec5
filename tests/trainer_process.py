"""Small trainings with `TransfoXLTrainer`, in processes of their own too: to kill them, and to have two of them."""

import json
import os
from dataclasses import fields
from pathlib import Path

import torch
from accelerate.state import DistributedType, PartialState
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import set_seed
from transformers.utils import logging

import launcher
from models import SMALL, small_config
from txl_hf import (
    RegularizationArguments,
    TextStream,
    TokenStream,
    TransfoXLForCausalLM,
    TransfoXLForSequenceClassification,
    TransfoXLTokenizer,
)
from txl_hf.training.arguments import TransfoXLTrainingArguments
from txl_hf.training.trainer import TransfoXLTrainer


class UnevenStream(TokenStream):
    """Half of the streams lose most of their targets, and no target is in the last bin in every other step."""

    def __getitem__(self, index):
        item = super().__getitem__(index)
        if index % self.batch_size < self.batch_size // 2:
            item["shift_labels"][1:] = -100
        if index // self.batch_size % 2:
            item["shift_labels"][item["shift_labels"] >= 30] = -100
        return item


class DocumentStream(TokenStream):
    """Each token 0 ends a document."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, document_end=0, **kwargs)


class LabelledStream(TokenStream):
    """A label for the whole sequence in every row of the last step, and none before: -100, as a number or a class."""

    def __init__(self, *args, classes: int):
        super().__init__(*args)
        self.classes = classes

    def __getitem__(self, index):
        ids = super().__getitem__(index)["input_ids"]
        label = ids[-1] % 3 if index // self.batch_size == self.steps - 1 else torch.tensor(-100)
        labels = label if self.classes > 1 else label.float()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def text_stream(tokens: torch.Tensor, segment_length: int, batch_size: int, **options) -> TextStream:
    """The tokens as documents of seven, in what has no length."""
    symbols = [f"word{token}" for token in range(SMALL["vocab_size"])]
    tokenizer = TransfoXLTokenizer.from_symbols(symbols, mode="whitespace")
    texts = [" ".join(symbols[token] for token in document) for document in tokens.split(7)]
    return TextStream(texts, tokenizer, segment_length, batch_size, **options)


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
    return TransfoXLForCausalLM(small_config(**changes))


def make_text(length: int, seed: int = 0) -> torch.Tensor:
    """Tokens that depend on those before, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(7, (length,), generator=generator).cumsum(0) % SMALL["vocab_size"]


ADDED = {entry.name for entry in fields(TransfoXLTrainingArguments)} - {
    entry.name for entry in fields(TrainingArguments)
}


def make_arguments(path, **changes) -> TrainingArguments:
    """Plain ones, unless something of this package's is set."""
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
    kind = TransfoXLTrainingArguments if ADDED & changes.keys() else TrainingArguments
    return kind(**(defaults | changes))


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
    """Train and write the losses to output/losses.jsonl; kill the process at operation number `kill_at`."""
    logging.disable_progress_bar()
    # DeepSpeed would look for a GPU.
    os.environ["DS_ACCELERATOR"] = "cpu"
    # Not in the folder of the user: a compilation that was killed leaves a lock there, which torch waits for for ever.
    os.environ["TORCH_EXTENSIONS_DIR"] = f"{output}-extensions"
    if kill_at is not None:
        launcher.kill_at(kill_at)
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
        torch.distributed.barrier()


def predict_sequences(output: Path, classes: int, **arguments):
    """Train a classifier a little and write what it predicts for sequences of several steps."""
    set_seed(0)
    model = TransfoXLForSequenceClassification(small_config(num_labels=classes, pad_token_id=0))
    stream = LabelledStream(make_text(81), 5, 4, classes=classes)
    trainer = TransfoXLTrainer(model, make_arguments(output, max_steps=2, **arguments), train_dataset=stream)
    trainer.train()
    found = trainer.predict(stream)
    if trainer.is_world_process_zero():
        torch.save([found.predictions, found.label_ids, found.metrics, trainer.state.log_history], output / "found.pt")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def be_refused(output: Path, **arguments):
    """Write what `train(output, **arguments)` is refused with to a file of each process."""
    try:
        train(output, **arguments)
    except ValueError as error:
        (output / f"refused-{os.environ['RANK']}").write_text(str(error))


def start(processes: int = 1, **arguments) -> list:
    """Start `train(**arguments)` in so many processes."""
    return launcher.start(train, processes, **arguments)


def run(processes: int = 1, **arguments) -> list[int]:
    """`train(**arguments)` in so many processes, to the end; their exit codes."""
    return launcher.join(start(processes, **arguments))


def read_losses(output: Path) -> list[list]:
    return [json.loads(line) for line in (output / "losses.jsonl").read_text().splitlines()]
