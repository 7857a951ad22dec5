"""The training: `TransfoXLTrainer`'s loop, written out with accelerate."""

import json
import logging
import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from accelerate import skip_first_batches
from accelerate.utils import set_seed
from torch import Tensor
from transformers import AutoModelForCausalLM

from ..data.loading import fill_special_tokens
from ..data.streams import check_loader, describe_stream, open_tokens
from ..evaluation.cards import base_model_of
from ..evaluation.language_model import figures
from ..files import disk_errors, move_into_place, name_of, options_that_differ, whole_folder, write_text
from ..transfo_xl.memory_transfo_xl import cloned_states, latest_states, mask_overflow, real_states
from ..transfo_xl.modeling_transfo_xl import TransfoXLForCausalLM
from .arguments import RECIPE, SPLITS, Arguments
from .checkpoints import (
    UNFINISHED_PREFIX,
    begin_run,
    data_only,
    finish_checkpoint,
    last_checkpoint,
    list_checkpoints,
    load_mems,
    remove_old_checkpoints,
    remove_unfinished,
    save_mems,
)
from .compilation import compile_layers, is_compiled, should_compile_layers, uncompiled
from .progress import Progress
from .regularization import regularize
from .results import (
    BEST,
    BEST_SCORE,
    LOG,
    PLOT,
    TRACKED,
    best_folder,
    changed_settings,
    cut_log,
    evaluate,
    evaluate_alike,
    finish,
    lock_output,
    open_output,
    plot,
    read_best,
    read_log,
    read_recipe,
    score_of,
    settle_best,
)
from .setup import (
    PRECISIONS,
    check_evaluation,
    check_memory,
    check_texts,
    find_document_end,
    foreign_metric,
    load_data,
    make_accelerator,
    make_average,
    make_config,
    make_loader,
    make_model,
    make_optimizer,
    make_scheduler,
    make_stream,
    take_autocast,
)
from .steps import CapturedSteps, Forward, should_capture_steps

# How far a run is, with the types in a checkpoint's JSON; the rest is accelerate's.
STATE = {"step": int, "tokens": int}
STATE_NAME, AVERAGE_NAME = "training_state.json", "average.pt"


def quiet():
    """The run has a progress bar of its own."""
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    # It warns of tied tables at every checkpoint.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)


class Training:
    """One run. What can be wrong with its arguments is found out in `__init__`, as a ValueError or an OSError.

    Attributes:
        step: optimiser steps done; with it, the place in the stream is known.
        tokens: targets that were learned from until the last line of the log.
        best: the validation loss of the best model, in nats.
        best_of: what that is of, `score_of`; {}: nobody knows; None: there is no best model.
        validated: whether there was a validation after the step that the run goes on from.
        memories: for each chunk of this process's streams the `mems` and `mems_mask` that they go on from, neither at
            the beginning of the text.
        model: as it is prepared. plain_model: as it was before, with the weights of now.
        forward: the forward pass of a step. captured: the same by graphs; None: without.
        nll, targets: sums since the last line of the log, on the device.
    """

    def __init__(self, arguments: Arguments):
        self.arguments = arguments
        model_arguments, data, _, optimization, regularization, run = arguments
        self.tokenizer, corpus = load_data(Path(data.data or ""))
        config = make_config(model_arguments, self.tokenizer, data)
        check_memory(config, data)
        check_evaluation(config, arguments.evaluation)
        check_texts(corpus, config, arguments)
        self.texts = {split: open_tokens(corpus[split]["token_ids"]) for split in SPLITS}
        self.document_end = find_document_end(arguments, self.tokenizer, config)
        fill_special_tokens(config, self.tokenizer, self.document_end)
        self.stream = make_stream(self.texts["train"], config, arguments, self.document_end)
        self.max_steps = optimization.max_steps or max(1, round((optimization.max_epochs or 0) * self.stream.steps))

        self.accelerator = make_accelerator(arguments)
        self.output = Path(run.output or "")
        # Before any process writes what another one would find there.
        self.accelerator.wait_for_everyone()
        loader = make_loader(self.stream, self.accelerator, data.batch_chunk)

        set_seed(run.seed)
        model = make_model(config, model_arguments, run)
        if self.accelerator.num_processes > 1:
            # The same weights everywhere, but a dropout of each process's own.
            set_seed(run.seed, device_specific=True)
        # A checkpoint brings its own.
        fill_special_tokens(model.generation_config, self.tokenizer, self.document_end)
        self.averaged = make_average(model, optimization, self.max_steps, self.accelerator)
        regularizer = regularize(model, regularization) if any(vars(regularization).values()) else None
        optimizer = make_optimizer(model, optimization)
        # Not prepared: a prepared one takes a step for each process.
        self.scheduler = make_scheduler(optimizer, optimization, self.max_steps)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.plain_model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        whole = is_compiled(self.accelerator)
        self.forward = Forward(self.model, take_autocast(self.accelerator, self.plain_model), regularizer, whole)
        if should_compile_layers(arguments, whole):
            compile_layers(self.plain_model)
        read_at_once = self.stream.segment_length + self.plain_model.config.ext_len
        tokens = self.stream.batch_size // data.batch_chunk * read_at_once
        captures = should_capture_steps(run, self.accelerator, self.plain_model, self.document_end, tokens)
        self.captured = CapturedSteps(self.forward) if captures else None
        check_loader(
            self.loader,
            num_processes=self.accelerator.num_processes,
            process_index=self.accelerator.process_index,
        )

        self.step, self.tokens, self.best, self.validated = 0, 0, math.inf, False
        self.best_of: dict[str, Any] | None = None
        # For the card: what the run that this one goes on from began as.
        self.began_as: dict[str, Any] = {}
        self.memories: list[dict[str, Any]] = [{} for _ in range(data.batch_chunk)]
        self.nll = torch.zeros((), dtype=torch.float64, device=self.accelerator.device)
        self.targets = torch.zeros((), dtype=torch.int64, device=self.accelerator.device)
        self.resume()

    def run(self):
        main = self.accelerator.is_main_process
        if main:
            print(self.describe(), file=sys.stderr)
            if not self.arguments.run.smoke and (note := foreign_metric(self.tokenizer, self.arguments.evaluation)):
                print(note, file=sys.stderr)
            if (warmup := self.arguments.optimization.warmup_steps) > self.max_steps:
                print(
                    f"--warmup_steps {warmup} are more than all {self.max_steps} steps: the learning rate stays below "
                    "its highest",
                    file=sys.stderr,
                )
        self.progress = self.begin_progress()
        self.since = time.perf_counter()
        if self.step > 0 and self.validating() and not self.validated:
            # It comes after its checkpoint.
            self.validate()
        self.model.train()
        for batch in self.batches():
            self.grad_norm = self.train_step(batch)
            self.step += 1
            self.progress.update(self.step, self.recent_loss)
            # Nothing that a validation meets takes with it what has been learned, least of all the first.
            saving = self.last() or self.step % self.arguments.run.save_every == 0
            saving = saving or (self.validating() and self.best == math.inf)
            if self.validating() or saving or self.step % self.arguments.run.log_every == 0:
                self.log_training()
            if saving:
                self.save_checkpoint()
            if self.validating():
                self.validate()
            if self.validating() or saving:
                self.since = time.perf_counter()
                self.progress.interrupted()
        self.progress.close()
        # DDP's reducer goes before the processes part: freed after them, it can wait for ever for gloo's threads.
        del self.model, self.plain_model, self.forward, self.captured, self.optimizer
        self.accelerator.free_memory()
        self.accelerator.end_training()
        if main:
            finish(self.output, self.texts, self.arguments, self.document_end)

    def describe(self) -> str:
        """The first line: what is trained, on what, how long. `Progress` adds the time when it has measured some."""
        stream, parameters = self.stream, self.plain_model.num_parameters()
        per_step = stream.batch_size * stream.segment_length
        begun = f" from step {self.step:,}" if self.step else ""
        precision = PRECISIONS[self.accelerator.mixed_precision]
        left_out = f", but for its last {stream.dropped_tokens:,}" if stream.dropped_tokens else ""
        return (
            f"training {parameters / 1e6:.1f} M parameters on {self.accelerator.num_processes} × "
            f"{self.accelerator.device.type} in {precision}{begun}: {self.max_steps:,} steps of {per_step:,} tokens, "
            f"{self.max_steps / stream.steps:.1f} epochs of a text of {len(stream.token_ids):,} tokens{left_out}"
        )

    def begin_progress(self) -> Progress:
        left_out = "without the validations"
        if self.arguments.data.mem_warmup_ratio:
            left_out += " and what a longer memory will cost"
        return Progress(
            self.step,
            self.max_steps,
            self.stream.batch_size * self.stream.segment_length,
            self.arguments.evaluation.metric,
            left_out,
            self.accelerator.is_main_process,
        )

    def recent_loss(self) -> float | None:
        """Of this process's streams since the last line of the log; None where nothing was learned from."""
        targets = int(self.targets)
        return float(self.nll) * self.accelerator.num_processes / targets if targets else None

    def last(self) -> bool:
        return self.step == self.max_steps

    def validating(self) -> bool:
        """Whether there is a validation after the present step."""
        return self.last() or self.step % self.arguments.evaluation.eval_every == 0

    # --- steps -------------------------------------------------------------------------------------------------------

    def batches(self):
        """From the present step to the last, epoch after epoch."""
        while self.step < self.max_steps:
            epoch, done = divmod(self.step, self.stream.steps)
            if done == 0:
                # The text begins anew.
                self.memories = [{} for _ in self.memories]
            loader = self.loader
            if done:
                loader = skip_first_batches(loader, done)
                # Accelerate does not hand it on, and the host would wait for every batch of the epoch.
                loader._non_blocking = self.loader._non_blocking
            loader.set_epoch(epoch)
            for batch in loader:
                yield batch
                if self.step == self.max_steps:
                    return

    def train_step(self, batch: dict[str, Tensor]) -> Tensor:
        """One optimiser step on the next segment of each stream; returns the norm of the gradient."""
        accelerator, chunks = self.accelerator, len(self.memories)
        targets = accelerator.reduce((batch["shift_labels"] != -100).sum(), "sum")
        # The mean over all targets of the step: what is backpropagated will be divided by the number of chunks, and
        # gradients are averaged over processes.
        scale = chunks * accelerator.num_processes / targets
        if self.arguments.optimization.scale_lr_by_length:
            self.scale_learning_rate()
        nll, mem_len, compiled = torch.zeros_like(self.nll), self.memory_length(), is_compiled(accelerator)
        forward: Forward | CapturedSteps = self.forward
        if self.captured is not None and mem_len == self.plain_model.config.mem_len:
            # Before, while it grows, no step is like the last one.
            forward = self.captured
        parts = zip(*(tensor.chunk(chunks) for tensor in batch.values()), strict=True)
        for i, part in enumerate(parts):
            inputs = dict(zip(batch, part, strict=True))
            with accelerator.accumulate(self.model):
                loss_sum, penalty, memory = forward(inputs, self.memories[i])
                self.memories[i] = latest_states(memory, mem_len)
                if compiled:
                    self.memories[i] = cloned_states(self.memories[i])
                if accelerator.mixed_precision == "fp16" and self.memories[i]:
                    # A stream would go on from what overflowed until the text ends, whatever the scaler skips.
                    self.memories[i]["mems_mask"] = mask_overflow(**self.memories[i])
                accelerator.backward(loss_sum * scale + penalty)
                if accelerator.sync_gradients:
                    limit = self.arguments.optimization.max_grad_norm or math.inf
                    grad_norm = accelerator.clip_grad_norm_(self.model.parameters(), limit)
                self.optimizer.step()
                self.optimizer.zero_grad()
            nll += loss_sum.detach()
        if accelerator.mixed_precision == "fp16":
            # The scaler has skipped a step that overflowed, and so does the log.
            finite = accelerator.reduce(nll, "sum").isfinite()
            nll, targets = nll.where(finite, 0), targets.where(finite, 0)
        self.nll += nll
        self.targets += targets
        self.scheduler.step()
        if self.averaged is not None and self.step >= self.arguments.optimization.average_start:
            self.averaged.update(self.plain_model)
        return grad_norm

    def memory_length(self) -> int:
        """How many states this step leaves the next, at most. Zeros that begin a text are as many as ever."""
        mem_len = self.plain_model.config.mem_len
        growing = self.arguments.data.mem_warmup_ratio * self.max_steps
        if self.step >= growing:
            return mem_len
        # One at least: without any, a step would begin the text anew, with zeros where the memory begins as zeros.
        return max(1, int(mem_len * self.step / growing))

    def scale_learning_rate(self):
        """A segment that is shorter than others counts less."""
        # Counting labels would be waiting for the device.
        begin, end = self.stream.segment(self.step % self.stream.steps)
        for group, rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate * (end - begin) / self.stream.segment_length

    # --- validation --------------------------------------------------------------------------------------------------

    def validate(self):
        """Score the validation text, which the processes share out among them, and keep the best model."""
        text, accelerator = self.texts["validation"], self.accelerator
        model = self.evaluated_model()
        with uncompiled():
            found = evaluate(model, text, self.arguments.evaluation, self.document_end, accelerator=accelerator)
            of = score_of(found, text)
            if self.best_of not in (None, of):
                # It was scored on another text, or read in another way.
                best = AutoModelForCausalLM.from_pretrained(best_folder(self.output)).to(accelerator.device)
                self.best = evaluate_alike(best, text, found, self.document_end, accelerator).nll
                self.best_of = of
        nll = found.nll
        if not math.isfinite(nll):
            raise FloatingPointError(f"the validation loss is {nll} after step {self.step}: lower --learning_rate")
        if nll < self.best:
            self.best, self.best_of = nll, of
            self.save_model(model)
        # A line of the log says that all of this is done.
        self.log({"validation_loss": nll, **figures(nll, "validation_")})
        if self.accelerator.is_main_process:
            plot(read_log(self.output / LOG), self.output / PLOT, self.arguments.evaluation.metric)

    def evaluated_model(self) -> TransfoXLForCausalLM:
        """The average of the weights, once there is one."""
        if self.averaged is not None and self.averaged.steps > 0:
            return self.averaged.module
        return self.plain_model

    def save_model(self, model: TransfoXLForCausalLM):
        """Put a model into the place of the best one."""
        state_dict = self.accelerator.get_state_dict(model, unwrap=False)
        if self.accelerator.is_main_process:
            with disk_errors(self.output), whole_folder(self.output / BEST) as aside:
                score = {"step": self.step, "validation_loss": self.best, "of": self.best_of}
                score["began_as"] = self.began_as or base_model_of(model, name_of(self.output))
                write_text(aside / BEST_SCORE, json.dumps(score, indent=1) + "\n")
                model.save_pretrained(aside, state_dict=state_dict, repo_id=name_of(self.output))
                self.tokenizer.save_pretrained(aside)
        self.accelerator.wait_for_everyone()

    # --- log ---------------------------------------------------------------------------------------------------------

    def log_training(self):
        targets, nll = int(self.targets), float(self.accelerator.reduce(self.nll, "sum"))
        now, loss = time.perf_counter(), nll / targets if targets else math.nan
        if not math.isfinite(loss):
            # Before it takes the place of a checkpoint that can be gone on from.
            raise FloatingPointError(f"the loss is {loss} before step {self.step}: lower --learning_rate")
        self.tokens += targets
        values = {"loss": loss, **figures(loss), "learning_rate": self.optimizer.param_groups[0]["lr"]}
        values |= {"grad_norm": float(self.grad_norm), "tokens_per_second": targets / (now - self.since)}
        self.log(values)
        self.progress.show(loss, values["tokens_per_second"])
        self.nll.zero_()
        self.targets.zero_()
        self.since = now

    def log(self, values: dict[str, float]):
        """To TensorBoard, and as a line of the log."""
        self.accelerator.log(values, step=self.step)
        if self.accelerator.is_main_process:
            with disk_errors(self.output), (self.output / LOG).open("a") as file:
                file.write(json.dumps({"step": self.step, "tokens": self.tokens, **values}) + "\n")

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def resume(self):
        """Go on from the last usable checkpoint, if that is wanted and there is one, and open the output."""
        checkpoint = last_checkpoint(self.output) if self.arguments.run.resume else None
        if checkpoint is not None:
            self.load_checkpoint(Path(checkpoint))
        elif self.arguments.run.resume and (unusable := list_checkpoints(self.output)):
            names = ", ".join(path.name for _, path in unusable)
            raise ValueError(
                f"no checkpoint in --output {self.output} can be resumed ({names}; the lines above say why): start "
                "again with --overwrite"
            )
        if checkpoint is not None:
            read_best(self.output)
        # All processes have looked; what is refused has changed nothing.
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            self.lock = lock_output(self.output, self.arguments.run)
            if checkpoint is not None and Path(checkpoint).parent != self.output:
                # It was complete when the run was killed, but for its name.
                named = self.output / Path(checkpoint).name
                move_into_place(Path(checkpoint), named)
                checkpoint = str(named)
            remove_unfinished(self.output, files=True)
            if checkpoint is not None:
                settle_best(self.output, self.step)
            open_output(self.output, self.arguments, self.step, self.max_steps - self.step)
            cut_log(self.output / LOG, self.step)
            self.run_id = begin_run(self.output, checkpoint)
        self.accelerator.wait_for_everyone()
        if checkpoint is not None:
            self.find_best()
        self.accelerator.init_trackers(TRACKED, init_kwargs={"tensorboard": {"purge_step": self.step + 1}})

    def save_checkpoint(self):
        """Write aside, rename when complete, and only then let go of older checkpoints."""
        with disk_errors(self.output):
            self.write_checkpoint(f"checkpoint-{self.step}")

    def write_checkpoint(self, name: str):
        accelerator = self.accelerator
        aside = self.output / f"{UNFINISHED_PREFIX}-{self.step}"
        if accelerator.is_main_process:
            shutil.rmtree(aside, ignore_errors=True)
            (aside / name).mkdir(parents=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(aside / name))
        layers, mask = [], None
        if self.memories[0]:
            mems = map(torch.cat, zip(*(memory["mems"] for memory in self.memories), strict=True))
            layers = [accelerator.gather(states.contiguous()).cpu() for states in mems]
            mask = accelerator.gather(torch.cat([real_states(**memory).byte() for memory in self.memories])).bool()
        if accelerator.is_main_process:
            save_mems(aside / name, layers, mask, self.position())
            state = {name: getattr(self, name) for name in STATE}
            (aside / name / STATE_NAME).write_text(json.dumps(state), encoding="utf-8")
            if self.averaged is not None:
                torch.save(self.averaged.state_dict(), aside / name / AVERAGE_NAME)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            finish_checkpoint(aside / name, self.output / name, self.run_id)
            remove_old_checkpoints(self.output, self.arguments.run.save_total_limit, keep=[self.output / name])
        accelerator.wait_for_everyone()

    def load_checkpoint(self, folder: Path):
        if changed := changed_settings(self.output, self.arguments):
            raise ValueError(
                f"{folder} has another model or optimiser: resume with the recipe and options of the run ({changed})"
            )
        # An optimiser takes its settings from its checkpoint too, but those of today are asked for.
        asked = [{name: group[name] for name in group if name != "params"} for group in self.optimizer.param_groups]
        try:
            with data_only():
                self.accelerator.load_state(str(folder))
                # Accelerate counts the parts of steps, and a step may be of more or fewer parts now.
                self.accelerator.step = 0
                self.load_average(folder / AVERAGE_NAME)
        except Exception as error:
            # Each of the libraries that read it has errors of its own for a model or an optimiser of another shape.
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{folder} has another model or optimiser: resume with the recipe and options of the run ({reason})"
            ) from error
        for group, settings in zip(self.optimizer.param_groups, asked, strict=True):
            group.update(settings)
        self.load_state(folder / STATE_NAME)
        if self.step > self.max_steps:
            raise ValueError(
                f"{self.max_steps} steps are fewer than the {self.step} that {folder} has done (--max_steps or "
                f"--max_epochs): give {self.step} or more"
            )
        start = self.arguments.optimization.average_start
        if self.averaged is not None and self.averaged.steps > 0 and self.step < start:
            raise ValueError(
                f"{folder} has begun an average of the weights, which --average_start {start} would begin later: give "
                f"{self.step} at most"
            )
        # The checkpoint was written before the validation after its step.
        log = [line for line in read_log(self.output / LOG) if line["step"] <= self.step]
        self.validated = any(line["step"] == self.step and "validation_loss" in line for line in log)
        self.go_on_with_schedule()
        share = self.stream.batch_size // self.accelerator.num_processes
        first, rows = self.accelerator.process_index * share, share // len(self.memories)
        starts = range(first, first + share, rows)
        memories = load_mems(folder, self.position(), starts, rows, self.accelerator.device)
        self.memories = [latest_states(memory, self.plain_model.config.mem_len) for memory in memories]

    def load_average(self, path: Path):
        """One that has begun goes on. The best so far is its loss, which that of no other is to be compared with."""
        saved = torch.load(path, map_location="cpu") if path.is_file() else None
        given = self.arguments.optimization.average
        if saved is not None and saved["_extra_state"] > 0:
            before = read_recipe(self.output / RECIPE).get("average", given)
            if before != given:
                raise ValueError(options_that_differ({"average": before}, {"average": given}))
        if self.averaged is not None:
            if saved is None:
                raise ValueError(f"average was none and is {given}")
            self.averaged.load_state_dict(saved)

    def find_best(self):
        """Go on with the best model, unless it is of a step that comes again."""
        known = read_best(self.output)
        self.began_as = (known or {}).get("began_as", {})
        if known is None or known.get("step", 0) > self.step:
            # At the end no other would be chosen.
            self.validated &= not self.last()
        else:
            self.best, self.best_of = known.get("validation_loss", math.inf), known.get("of", {})

    def load_state(self, path: Path):
        """How far the run is; nothing else that the file may hold is taken."""
        state = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        if not isinstance(state, dict) or not all(isinstance(state.get(name), kind) for name, kind in STATE.items()):
            raise ValueError(f"{path} is no state of a run of txl-train, with {', '.join(STATE)}")
        self.step, self.tokens = (state[name] for name in STATE)

    def go_on_with_schedule(self):
        """Learning rates are a function of the steps done, and of the recipe."""
        scheduler = self.scheduler
        scheduler.last_epoch, scheduler._step_count = self.step, self.step + 1
        pairs = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        scheduler._last_lr = [rate * factor(self.step) for rate, factor in pairs]
        for group, rate in zip(self.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def position(self) -> dict[str, Any]:
        """Where the run is in the stream that it reads."""
        return {"step": self.step, **describe_stream(self.stream)}
