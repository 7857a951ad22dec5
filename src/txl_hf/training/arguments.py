"""The arguments of a training, `TransfoXLTrainingArguments`, and the fields of a configuration that it may change."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from transformers import TrainingArguments

from ..command_line import option
from ..transfo_xl.configuration_transfo_xl import TransfoXLConfig

# Fields of the configuration that are no options, because the text decides them, or training does not read them.
_OF_THE_TEXT = {"vocab_size", "eos_token_id", "adaptive", "sample_softmax", "tie_projs", "input_size", "output_logits"}
CONFIG = {
    entry.name: entry.default if entry.default is not dataclasses.MISSING else None
    for entry in dataclasses.fields(TransfoXLConfig)
    if entry.name in TransfoXLConfig.__annotations__ and entry.name not in _OF_THE_TEXT
}
# Fields that weights do not depend on, which a resumed or fine-tuned model may change.
FREE = {"dropout", "dropatt", "tgt_len", "mem_len", "ext_len", "clamp_len", "decay_len", "same_length"}
FIXED = CONFIG.keys() - FREE - {"init", "init_range", "init_std", "proj_init_std", "max_klen"}
# Values of `optimizer`; if it is None, transformers' `optim` chooses.
Optimizer = Literal["adam", "adamw", "lamb", "muon"]


@dataclass
class TransfoXLTrainingArguments(TrainingArguments):
    """`TrainingArguments` with options of memory, optimizers and averages. Some defaults are the paper's.

    Args:
        optimizer: one of `Optimizer`, in place of `optim`, or None.
        embedding_lr_factor: factor of the learning rate of the embeddings' tables.
        scale_lr_by_length: scale each step's learning rate by its segment's length over the stream's.
        average: "none", "ema" (exponential, with `ema_decay`) or "equal" (all steps alike): evaluate and save an
            average of the weights after each step from `average_start` on. Checkpoints keep both.
        mem_warmup_ratio: part of all steps over which the memory grows from 1 to `mem_len` states.
        backprop_segments: number k of segments that gradients flow back through, by the memory. An item of the stream,
            whose `segment_length` is k times that of a segment, makes one step.
        compile_layers: compile each layer, one graph for all, and LAMB's update. None: on a GPU on which Triton runs.
        cuda_graphs: launch the kernels of a step as CUDA graphs. None: where steps are small and can be captured.

    Raises:
        ValueError: values out of range, or an option without the one that reads it.
    """

    learning_rate: float = option("Learning rate at its highest.", 2.5e-4)
    lr_scheduler_type: str = option("Schedule of the learning rate, as `transformers.SchedulerType`.", "cosine")
    max_grad_norm: float = option("Clip gradients to this norm; 0: do not.", 0.25)
    logging_steps: float = option("Steps between two lines of the log.", 200)
    eval_steps: float | None = option("Steps between two validations; there is one at the end, too.", 4000)
    save_steps: float = option("Steps between two checkpoints.", 4000)
    save_total_limit: int | None = option("Checkpoints to keep.", 2)
    logging_nan_inf_filter: bool = option("Leave losses that are not finite out of the log; always with fp16.", False)
    seed: int = option("Seed of weights, dropout and orders.", 1111)

    optimizer: Optimizer | None = option(
        "adam has its weight decay in the gradient (L2); muon is for the layers' matrices, with adamw for the rest. "
        "None: --optim."
    )
    embedding_lr_factor: float = option("Factor of the learning rate of the embeddings.", 1.0)
    scale_lr_by_length: bool = option("Scale the learning rate by the segment's length over tgt_len.", False)
    average: Literal["none", "ema", "equal"] = option("Evaluate and save an average of the weights.", "none")
    average_start: int = option("Step after which the average begins.", 0)
    ema_decay: float = option("Decay of the average, where it is exponential.", 0.9999)
    mem_warmup_ratio: float = option("Part of all steps over which the memory grows from 1 to mem_len.", 0.0)
    backprop_segments: int = option("Segments of tgt_len that a step reads, with gradients through the memory.", 1)
    compile_layers: bool | None = option("Compile each layer. By default on a GPU.")
    cuda_graphs: bool | None = option(
        "Launch the kernels of a step together, on one GPU, for a text that is one. By default where steps are small."
    )

    def __post_init__(self):
        super().__post_init__()
        # The scaler skips a step that overflowed.
        self.logging_nan_inf_filter |= self.fp16
        # Optimizers check their other settings.
        for name, below in {"embedding_lr_factor": float("inf"), "ema_decay": 1.0}.items():
            if not 0 <= (value := getattr(self, name)) < below:
                raise ValueError(f"--{name} is {value:g}, but must be at least 0 and below {below:g}")
        if not 0 <= self.mem_warmup_ratio <= 1:
            raise ValueError(f"--mem_warmup_ratio is {self.mem_warmup_ratio:g}, but must be from 0 to 1")
        if self.backprop_segments < 1:
            raise ValueError(f"--backprop_segments is {self.backprop_segments}, but must be at least 1")
        if self.average_start and self.average == "none":
            raise ValueError(f"--average_start {self.average_start} is of --average ema and equal: set it to 0")
        if 0 < self.max_steps <= self.average_start:
            raise ValueError(
                f"--average_start is {self.average_start}, but must be less than all {self.max_steps} steps, so that "
                "something is averaged"
            )

    def __getstate__(self) -> dict[str, Any]:
        """The state without the Hub's token, because Trainer pickles its arguments into files that are shared."""
        return {**vars(self), "hub_token": None}

    @classmethod
    def of(cls, arguments: TrainingArguments) -> "TransfoXLTrainingArguments":
        """A copy of any `TrainingArguments` that has the fields of this class, with their defaults."""
        found = object.__new__(cls if type(arguments) is TrainingArguments else type(arguments))
        added = {entry.name: entry.default for entry in dataclasses.fields(cls)}
        found.__dict__.update({**added, **vars(arguments)})
        return found
