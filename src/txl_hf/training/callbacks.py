"""Callbacks between training steps: the memory grows, the learning rate follows the segment's length."""

from typing import Any

from transformers import TrainerCallback


class MemoryLength(TrainerCallback):
    """A memory that grows from 1 state to `mem_len` over a part of all steps.

    Args:
        trainer: a `TransfoXLTrainer`, whose `memory_length` it sets. ratio: the part, from 0 to 1.
    """

    def __init__(self, trainer: Any, ratio: float):
        if not trainer.model.config.mem_len:
            raise ValueError(f"--mem_warmup_ratio {ratio:g} grows no memory, as mem_len is 0: leave it out")
        self.trainer, self.ratio = trainer, ratio

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        growing = self.ratio * state.max_steps
        mem_len = model.config.mem_len
        # At least 1, because a step without memory would begin a new text, with zeros if `initial_memory` is "zeros".
        grown = max(1, int(mem_len * state.global_step / growing)) if state.global_step < growing else None
        self.trainer.memory_length = grown


class ScaledByLength(TrainerCallback):
    """The learning rate of each step times its segment's length over the stream's `segment_length`."""

    def __init__(self, stream: Any):
        self.stream = stream

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        # The length is the stream's, because counting labels would make the host wait for the device.
        begin, end = self.stream.segment(state.global_step % self.stream.steps)
        for group in optimizer.param_groups:
            # After the step the schedule replaces this rate.
            group["lr"] *= (end - begin) / self.stream.segment_length
