"""`TransfoXLTrainer`, transformers' `Trainer` whose steps take the memory of the step before."""

import copy
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, SaveStrategy
from transformers.utils import logging

from ..data.streams import check_loader, describe_stream
from ..data.text_stream import TextStream
from ..evaluation.cards import METRICS
from ..evaluation.language_model import figures
from ..files import disk_errors
from ..kernels.steps import CapturedSteps, Forward, compile_layers, uncompiled
from ..memories import (
    cast_states,
    cloned_states,
    dtype_between_calls,
    hide_overflow,
    latest_states,
    map_memory,
    memory_of,
)
from ..transfo_xl.configuration_transfo_xl import TransfoXLConfig
from ..transfo_xl.layout_transfo_xl import TransfoXLLayoutModel
from ..transfo_xl.masks_transfo_xl import without_padding
from .arguments import FIXED, TransfoXLTrainingArguments
from .cards import complete_push, create_model_card
from .checkpoints import (
    UNFINISHED_PREFIX,
    begin_run,
    checkpoint_problem,
    data_only,
    finish_checkpoint,
    last_checkpoint,
    remove_old_checkpoints,
)
from .memory import MemoryLength, StreamMemory, check_settings, read_position
from .optimizers import Averaging, ScaledByLength, make_optimizer
from .regularization import RegularizationArguments, Regularizer, regularize
from .steps import should_capture_steps, should_compile_layers

logger = logging.get_logger(__name__)


class _WholeSteps(JITCheckpointCallback):
    """A checkpoint on SIGTERM, at the end of a step: within one the memory is ahead of the weights by a segment."""

    def on_step_begin(self, args, state, control, **kwargs):
        pass

    on_pre_optimizer_step = on_epoch_end = on_step_begin

    def on_step_end(self, args, state, control, **kwargs):
        if self.jit_manager is not None and self.jit_manager.is_checkpoint_requested:
            self.jit_manager.is_checkpoint_requested = False
            control.should_log = control.should_save = control.should_training_stop = True


class _Events(TrainerCallback):
    """Functions of a trainer, called by events that Trainer has no method for."""

    def __init__(self, **functions: Callable[..., None]):
        self.__dict__.update(functions)


class TransfoXLTrainer(Trainer):
    """transformers' `Trainer` whose steps take the memory of the step before.

    Datasets are `TokenStream`s, or others whose items are step-major and whose `batch_size` is the number of streams
    G. A step of training reads a segment of every stream: rows per process × processes × accumulation steps = G; a
    batch of evaluation likewise, without accumulation. They are read in order, whatever `train_sampling_strategy` is.

    * `args` are `TransfoXLTrainingArguments`, or `TrainingArguments`, which get the defaults of the added fields.
    * Memory begins empty (see `initial_memory`) in every epoch and every evaluation. An evaluation leaves the training
      as it was; of `train_dataset` itself it reads a copy, from the beginning.
    * `eval_dataset` may be a function of a model and an `accelerator`, such as
      `functools.partial(evaluate_language_model, token_ids=…, segment_length=…)`.
    * `loss` and `eval_loss` are means over all targets of a step (of all micro-batches and processes), or of a text.
    * Logs and evaluations gain `perplexity`, `bits_per_token`, `tokens` (targets so far) and `tokens_per_second`
      (without evaluating and saving). Of a classifier, `tokens` are labels, and perplexity and bits are left out.
    * With a `compute_loss_func`, `loss` and `eval_loss` are its results; logs of training have no other figures, those
      of an evaluation are of the text's likelihood. Labels of a stream are of the logits' own positions and must not
      be shifted; a model with cutoffs has logits with `config.output_logits=True`, and `outputs.losses` always.
    * `regularization` is that of `regularize`; its penalty, the mean over micro-batches and processes, is added to the
      loss, and left out of logs.
    * Checkpoints get their name when they are complete; older ones are removed after that. They hold the memory in the
      order of the streams, so that another number of processes or of accumulation steps can resume: in the epoch and
      at the step that the memory is from, with the optimizer's current settings.

    Attributes:
        memory_length: most states that a step of training passes to the next; a callback may change it.

    Raises:
        ValueError: settings or a loader that break the continuity of memory, or that take the worst checkpoint for the
            best; the message names the fix.
    """

    args: TransfoXLTrainingArguments
    optimizer: Any
    control: Any
    compute_loss_func: Callable[..., torch.Tensor] | None

    def __init__(
        self,
        model=None,
        args: TrainingArguments | None = None,
        data_collator=None,
        *more,
        regularization: RegularizationArguments | None = None,
        **kwargs,
    ):
        self._regularization = regularization
        self._regularizer: Regularizer | None = None
        args = TransfoXLTrainingArguments("tmp_trainer") if args is None else TransfoXLTrainingArguments.of(args)
        # With a tokenizer Trainer would pad segments, which are whole.
        super().__init__(model, args, data_collator or default_data_collator, *more, **kwargs)
        self.args.train_sampling_strategy = "sequential"
        if not torch.accelerator.is_available():
            # torch warns of memory that is pinned without a device.
            self.args.dataloader_pin_memory = False
        if regularization is not None and self._regularizer is None:
            self._regularizer = regularize(self.model, regularization)
        _check_arguments(self.args)
        others = {"ext_len": self.model.config.ext_len, "regularization": regularization}
        others["compute_loss_func"] = self.compute_loss_func
        if self.args.backprop_segments > 1 and (found := [name for name in others if others[name]]):
            raise ValueError(
                f"backprop_segments={self.args.backprop_segments} reads an item as several segments, which goes with "
                f"no {' or '.join(found)}: set it to 1"
            )
        self._add_callbacks()
        if self.args.label_names is None:
            self.label_names = ["shift_labels"]
        self.memory_length: int | None = None
        self._memory = StreamMemory()
        # Nats and targets of each step of an evaluation, on the device.
        self._sums: list[tuple[Tensor, Tensor]] = []
        self._captured: CapturedSteps | None = None
        self._compiled = False
        # Whether labels are next tokens, not classes.
        self._predicts_text = any(hasattr(module, "lm_head") for module in self.model.modules())
        self._resumed_from: Path | None = None
        self._run: str | None = None
        # The optimizer's settings by group, if this trainer made the optimizer.
        self._asked: list[dict[str, Any]] = []
        self._tokens: Tensor | int = 0
        self._tokens_logged = 0
        self._counted_since = time.perf_counter()

    def _add_callbacks(self):
        args = self.args
        events = {"on_train_begin": self._begin_training, "on_epoch_begin": self._begin_epoch}
        self.add_callback(_Events(**events, on_push_begin=self._begin_push))
        if (theirs := self.pop_callback(JITCheckpointCallback)) is not None:
            whole_steps = _WholeSteps()
            whole_steps.trainer, whole_steps.jit_manager = self, theirs.jit_manager
            self.add_callback(whole_steps)
        if args.mem_warmup_ratio:
            self.add_callback(MemoryLength(self, args.mem_warmup_ratio))
        if args.scale_lr_by_length:
            self.add_callback(ScaledByLength(self.train_dataset))
        self._averaging: Averaging | None = None
        if args.average != "none":
            if self.is_fsdp_enabled:
                raise ValueError("an average needs whole weights, which FSDP does not keep: use average='none'")
            self._averaging = Averaging(args.ema_decay if args.average == "ema" else None, args.average_start)
            self.add_callback(self._averaging)

    def call_model_init(self, trial=None):
        model = super().call_model_init(trial)
        model._keys_to_ignore_on_save = [*model.all_tied_weights_keys]
        if self._regularization is not None:
            self._regularizer = regularize(model, self._regularization)
        return model

    def hyperparameter_search(self, hp_space=None, compute_objective=None, *args, **kwargs):
        """As in `Trainer`, by default of `eval_loss`, which is a ValueError beside a `compute_metrics`."""
        if compute_objective is None and self.compute_metrics is not None:
            raise ValueError("compute_objective is missing: say which figures of compute_metrics are searched for")
        objective = compute_objective or itemgetter("eval_loss")
        return super().hyperparameter_search(hp_space, objective, *args, **kwargs)

    def train(self, resume_from_checkpoint: str | os.PathLike | bool | None = None, *args, **kwargs):
        """As in `Trainer`, from complete checkpoints alone; with True, from the last of them.

        Raises:
            ValueError: a checkpoint is missing or incomplete, or the model lacks a special token of
                `processing_class`.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(
                    f"{self.args.output_dir} holds no complete checkpoint of TransfoXLTrainer (warnings name others): "
                    "train without resume_from_checkpoint, in another folder"
                )
        elif resume_from_checkpoint and (problem := checkpoint_problem(Path(resume_from_checkpoint))):
            raise ValueError(
                f"{resume_from_checkpoint} cannot be resumed: {problem}; resume_from_checkpoint=True takes the last "
                "complete one, from_pretrained its weights alone"
            )
        self._resumed_from = Path(resume_from_checkpoint) if resume_from_checkpoint else None
        self._run = None
        if self._resumed_from is not None and not self.args.ignore_data_skip:
            check_settings(self._resumed_from, self._settings())
        if self.model_init is None:
            check_special_tokens(self.model.config, self.processing_class)
            # Tied tensors are saved once: their other names are missing in a checkpoint, which needs no warning.
            self.model._keys_to_ignore_on_save = [*self.model.all_tied_weights_keys]
            model = self.accelerator.unwrap_model(self.model)
            if not self._compiled and should_compile_layers(self.args, self.accelerator.device, model):
                compile_layers(model)
                self._compiled = True
        # Refused before hours of training.
        for dataset in self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]:
            if dataset is not None and not callable(dataset):
                self.get_eval_dataloader(dataset)
        try:
            if self._resumed_from is None:
                return super().train(None, *args, **kwargs)
            # accelerate and DeepSpeed execute what pickles name.
            with data_only():
                return super().train(str(self._resumed_from), *args, **kwargs)
        finally:
            self._memory, self._resumed_from, self._captured = StreamMemory(), None, None

    # --- data --------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        loader = super().get_train_dataloader()
        self._check_loader(loader, self.train_dataset, "train_dataset", self.args.gradient_accumulation_steps)
        return loader

    def get_eval_dataloader(self, eval_dataset=None) -> DataLoader:
        dataset = self._evaluated(eval_dataset)
        loader = super().get_eval_dataloader(dataset)
        self._check_loader(loader, dataset, "eval_dataset")
        return loader

    def get_test_dataloader(self, test_dataset) -> DataLoader:
        dataset = self._evaluated(test_dataset)
        loader = super().get_test_dataloader(dataset)
        self._check_loader(loader, dataset, "test_dataset")
        return loader

    def _evaluated(self, dataset):
        """The data set of an evaluation; of the training's a copy, because reading moves it."""
        dataset = self.eval_dataset if dataset is None else dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        return copy.copy(dataset) if dataset is not None and dataset is self.train_dataset else dataset

    def _check_loader(self, loader: DataLoader, dataset, name: str, accumulation_steps: int = 1):
        """Raise a ValueError for a data set or loader with which memory would not go on, or an evaluation not end."""
        if not isinstance(getattr(dataset, "batch_size", None), int):
            raise ValueError(
                f"{name} is a {type(dataset).__name__} without batch_size, so that nothing says which items continue "
                "which: give a TokenStream of the tokens, or use Trainer to train without memory"
            )
        config, ext_len = self.model.config, getattr(dataset, "ext_len", None)
        if getattr(dataset, "document_end", None) is not None:
            config.check_documents(f"document_end and the text of {name}")
        if config.mem_len > 0 and ext_len not in (None, config.ext_len):
            raise ValueError(
                f"{name} reads ext_len={ext_len} tokens again, but the model keeps {config.ext_len} out of memory: "
                f"make the stream with ext_len={config.ext_len}, or set ext_len in the model's configuration"
            )
        layout = {"num_processes": self.args.world_size, "process_index": self.args.process_index}
        try:
            check_loader(loader, **layout, accumulation_steps=accumulation_steps, batch_size=dataset.batch_size)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if name != "train_dataset" and getattr(dataset, "epochs", 1) is None:
            raise ValueError(f"{name} is a TextStream with epochs=None, which never ends: make it with epochs=1")
        if name != "train_dataset" and (left_out := getattr(dataset, "dropped_tokens", 0)):
            logger.warning_once(
                f"{name} leaves out {left_out:,} tokens at the end of its text, which the figures are not of: make it "
                "with keep_remainder=True"
            )

    # --- steps -------------------------------------------------------------------------------------------------------

    def _init_training_state(self, *args, **kwargs) -> tuple[int, int]:
        """As in `Trainer`, at the place in the text that the memory is from."""
        epoch, batches = super()._init_training_state(*args, **kwargs)
        self._memory = StreamMemory([{} for _ in range(self.args.gradient_accumulation_steps)], epoch)
        if self._resumed_from is not None:
            best = self._resumed_from.with_name(f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}")
            if self.state.best_model_checkpoint is None and best.is_dir():
                # It was moved together with this one.
                self.state.best_model_checkpoint = str(best)
            if not self.args.ignore_data_skip:
                steps, stream = self.args.gradient_accumulation_steps, self.train_dataset
                position = read_position(self._resumed_from)
                if isinstance(stream, TextStream) and "read" in position:
                    stream.expect(position["read"])
                self._memory = StreamMemory.load(self._resumed_from, self.accelerator, steps, stream.batch_size)
                epoch, batches = self._memory.epoch, self._memory.step * steps
        self._goes_on = True
        return epoch, batches

    def _begin_training(self, *event, **kwargs):
        """Called before the first step, after a checkpoint is loaded."""
        past = [logs["tokens"] for logs in self.state.log_history if "loss" in logs and "tokens" in logs]
        self._tokens, self._tokens_logged, self._counted_since = 0, past[-1] if past else 0, time.perf_counter()
        if self._resumed_from is not None:
            self._set_optimizer()
            if self._averaging is not None:
                self._averaging.load(self._resumed_from, self.model)
        stream, model = self.train_dataset, self.accelerator.unwrap_model(self.model)
        read = (getattr(stream, "segment_length", 0) + model.config.ext_len) * self.args.train_batch_size
        if should_capture_steps(self.args, self.accelerator, model, getattr(stream, "document_end", None), read):
            dtype = torch.bfloat16 if self.accelerator.mixed_precision == "bf16" else None
            self._captured = CapturedSteps(Forward(self.model, nullcontext, self._regularizer), dtype=dtype)
        if self._compiled or self._captured is not None:
            logger.info(
                f"layers compiled: {self._compiled} (compile_layers); steps of equal shapes launched as CUDA graphs: "
                f"{self._captured is not None} (cuda_graphs)"
            )
        if self.args.should_save and self.args.save_strategy != SaveStrategy.NO:
            self._run = begin_run(Path(self.args.output_dir), self._resumed_from)

    def _set_optimizer(self):
        """Set the current settings in place of those that a checkpoint brought."""
        bases = [asked["lr"] for asked in self._asked]
        factors = getattr(self.lr_scheduler, "lr_lambdas", None)
        if not bases or factors is None or len(bases) != len(self.optimizer.param_groups):
            return
        self.lr_scheduler.base_lrs = bases
        for group, asked, factor in zip(self.optimizer.param_groups, self._asked, factors, strict=True):
            rate = asked["lr"] * factor(self.lr_scheduler.last_epoch)
            group.update({**asked, "lr": rate, "initial_lr": asked["lr"]})

    def _begin_epoch(self, *event, **kwargs):
        """An epoch begins at the beginning of the text, except one that is resumed."""
        if not self._goes_on and self._memory.step > 0:
            self._memory = self._memory.next_epoch()
        self._goes_on = False

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        made = self.optimizer is None
        if made and self.args.optimizer is not None:
            if self.args.optimizer == "lamb" and self.is_fsdp_enabled:
                # LAMB clamps a norm in place, which PyTorch does not support for a sharded weight.
                raise ValueError("--optimizer lamb needs whole weights, which FSDP does not keep: use adam or muon")
            self.optimizer = make_optimizer(self.model if model is None else model, self.args, self._compiled)
        optimizer = super().create_optimizer(model)
        if made:
            self._asked = [
                {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
            ]
        return optimizer

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """As in `Trainer`, with a count of the targets of `shift_labels` too."""
        self._memory.micro_batch = 0
        if self.state.global_step >= self.state.max_steps:
            # Trainer would take one more step of a finished run.
            self.control.should_training_stop = True
            return [], None
        batches, targets = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches and self._memory.step > 0:
            # The end of a text without a length.
            self._memory = self._memory.next_epoch()
        if batches and batches[0].get("shift_labels") is not None:
            for batch in batches:
                labels = batch["shift_labels"]
                # In the batch itself, so that the model counts the same.
                batch["shift_labels"] = without_padding(labels, batch.get("attention_mask"), labels.shape[1])
            targets = sum((batch["shift_labels"] != -100).sum() for batch in batches).to(device)
            targets = self.accelerator.gather(targets).sum() if self.args.world_size > 1 else targets
        self._tokens = self._tokens + (0 if targets is None else targets)
        # None: Trainer takes the mean of the micro-batches' means.
        return batches, None if targets is None else targets.clamp(min=1)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """As in `Trainer`, with the memory of these rows, which that of the call replaces."""
        # A callback or a resumed training may have made `mem_len` shorter.
        memory = latest_states(self._memory.current, self.model.config.mem_len)
        # While the memory grows, shapes change.
        full = self.memory_length is None or self.memory_length >= self.model.config.mem_len
        usual = model.training and self.compute_loss_func is None and "shift_labels" in inputs
        if self._captured is not None and full and usual and num_items_in_batch is not None:
            nll, penalty, memory = self._captured(inputs, memory)
            self._memory.replace(self._carried(memory))
            return nll / num_items_in_batch + self._share_of(penalty)
        own = {}
        if self.compute_loss_func is not None and "shift_labels" in inputs:
            # Trainer gives the function `labels`.
            own["labels"] = inputs["shift_labels"]
        elif self.compute_loss_func is None and not model.training:
            # The mean over the batch's own labels; `_count` adds up the whole.
            num_items_in_batch = None
        losses, parts = [], self._segments(inputs, num_items_in_batch) if model.training else [inputs]
        for number, part in enumerate(parts, start=1):
            through = {} if len(parts) == 1 else {"detach_mems": False}
            loss, outputs = super().compute_loss(model, {**part, **own, **memory, **through}, True, num_items_in_batch)
            losses.append(loss)
            memory = self._carried(memory_of(outputs, self.args.torch_compile), detach=number == len(parts))
        self._memory.replace(memory)
        loss = sum(losses[1:], start=losses[0])
        if self._regularizer is not None and model.training:
            loss = loss + self._share_of(self._regularizer.penalty(inputs.get("shift_labels"), inputs.get("resets")))
        if not model.training:
            self._count(inputs, outputs)
        return (loss, outputs) if return_outputs else loss

    def _segments(self, inputs: dict[str, Any], num_items_in_batch: Tensor | None) -> list[dict[str, Any]]:
        """The items of a step in `backprop_segments` parts, one for each call; their losses add up."""
        segments = self.args.backprop_segments
        if segments == 1:
            return [inputs]
        divides = num_items_in_batch is not None and self.model_accepts_loss_kwargs
        given = {"shift_labels": "shift_labels" in inputs, "num_items_in_batch": divides}
        if missing := [name for name, is_given in given.items() if not is_given]:
            raise ValueError(
                f"backprop_segments={segments} cuts items with input_ids and shift_labels, and adds up losses that "
                f"num_items_in_batch divides, but a call has no {' and no '.join(missing)}: set it to 1"
            )
        parts = {name: value.chunk(segments, dim=1) for name, value in inputs.items() if value.dim() > 1}
        return [{**inputs, **dict(zip(parts, part, strict=True))} for part in zip(*parts.values(), strict=True)]

    def _share_of(self, penalty: Tensor) -> Tensor:
        """A penalty of value 0, with its gradient, because logged losses are without it."""
        penalty = penalty / self.current_gradient_accumulation_steps
        return penalty - penalty.detach()

    def _count(self, inputs: dict[str, Any], outputs):
        """Record the sum of an evaluation's losses, and the number of its targets."""
        labels = inputs.get("shift_labels", inputs.get("labels"))
        if labels is None:
            return
        if (losses := outputs.get("losses")) is None:
            # A classifier of sequences: most segments may have no label.
            targets, nll = labels, outputs["loss"].detach() * (labels != -100).sum()
        else:
            # With `labels`, losses are of those after the first.
            targets, nll = labels[:, labels.shape[1] - losses.shape[1] :], losses.detach().sum()
            if self._predicts_text:
                targets = without_padding(targets, inputs.get("attention_mask"), labels.shape[1])
        self._sums.append((nll, (targets != -100).sum()))

    def _carried(self, memory: dict[str, Any], detach: bool = True) -> dict[str, Any]:
        """The memory for the next call."""
        if not memory:
            return {}
        precision = self.accelerator.mixed_precision if self.accelerator.native_amp else "no"
        dtype = dtype_between_calls(self.model, precision)
        memory = cast_states(memory, dtype)
        if detach:
            memory = map_memory(memory, Tensor.detach)
        if self.args.torch_compile:
            memory = cloned_states(memory)
        if self.args.fp16 or dtype == torch.float16:
            # The scaler skips an overflowed step, but memory would keep its states.
            memory = hide_overflow(memory)
        if self.model.training and self.memory_length is not None:
            memory = latest_states(memory, self.memory_length)
        return memory

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            seconds = time.perf_counter() - self._counted_since
            if self.compute_loss_func is None:
                logs |= self._figures(logs["loss"])
            learned = int(self._tokens)
            self._tokens_logged += learned
            logs |= {"tokens": self._tokens_logged, "tokens_per_second": learned / seconds}
            self._tokens, self._counted_since = 0, time.perf_counter()
        super().log(logs, start_time)

    def _figures(self, loss: float) -> dict[str, float]:
        """Perplexity and bits of a loss, if it is of a text."""
        return figures(loss) if self._predicts_text else {}

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        """A context that tokens per second leave out."""
        start = time.perf_counter()
        yield
        self._counted_since += time.perf_counter() - start

    # --- evaluation --------------------------------------------------------------------------------------------------

    def averaged(self):
        """A context in which the model has the average of its weights, where there is one."""
        return nullcontext() if self._averaging is None else self._averaging.in_place(self.model)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval") -> dict[str, float]:
        """As in `Trainer`, of the weights' average where there is one; `eval_dataset` may be a function."""
        dataset = self._evaluated(eval_dataset)
        with self.averaged(), uncompiled() if self._compiled else nullcontext():
            if not callable(dataset):
                return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            start = time.perf_counter()
            with self._uncounted():
                model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
                found = dataset(model, accelerator=self.accelerator)
            metrics = {"loss": found.nll, **figures(found.nll), "tokens": found.tokens}
            metrics["runtime"] = time.perf_counter() - start
            metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ) -> EvalLoopOutput:
        training, self._memory, self._sums = self._memory, StreamMemory(), []
        start = time.perf_counter()
        try:
            with self._uncounted():
                output = super().evaluation_loop(
                    dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
                )
        finally:
            self._memory = training
        # Copied at the end alone, so that a GPU does not wait for the host.
        parts = [torch.stack(part).cpu().double().sum() for part in zip(*self._sums, strict=True)]
        sums = torch.stack(parts) if parts else torch.zeros(2, dtype=torch.float64)
        if self.args.world_size > 1:
            sums = self.accelerator.reduce(sums.to(self.args.device), "sum")
        nll, targets = sums.tolist()
        if targets > 0:
            loss = nll / targets
            metrics = {**self._figures(loss), "tokens": int(targets)}
            if self.compute_loss_func is None:
                metrics["loss"] = loss
            metrics["tokens_per_second"] = targets / (time.perf_counter() - start)
            output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        if self.args.label_names is None:
            self.label_names = ["labels" if "shift_labels" not in inputs else "shift_labels"]
        if missing := [name for name in self.label_names if inputs.get(name) is None]:
            # Trainer would compute no loss, and pass on no memory.
            raise ValueError(
                f"label_names={self.label_names}, but the items have {', '.join(inputs)}, and no "
                f"{', '.join(missing)}: an evaluation with memory needs labels"
            )
        self._set_signature_columns_if_needed()
        if "output_logits" in self._signature_columns:
            # Logits cost a product with the whole vocabulary.
            inputs = {**inputs, "output_logits": not prediction_loss_only}
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    # --- card --------------------------------------------------------------------------------------------------------

    def create_model_card(self, *args, **kwargs) -> None:
        """As in `Trainer`; of a model of this package, by `cards.create_model_card`."""
        if (model := self._model_of_card()) is not None:
            create_model_card(self, model, *args, **kwargs)
        else:
            super().create_model_card(*args, **kwargs)

    def _model_of_card(self) -> TransfoXLLayoutModel | None:
        """The model, unwrapped, if it is of this package and has no adapters; otherwise None."""
        model = self.accelerator.unwrap_model(self.model)
        is_own = isinstance(model, TransfoXLLayoutModel) and not getattr(model, "_hf_peft_config_loaded", False)
        return model if is_own else None

    def save_model(self, output_dir=None, _internal_call=False):
        """As in `Trainer`; outside checkpoints the average of the weights, where there is one."""
        with nullcontext() if _internal_call else self.averaged():
            super().save_model(output_dir, _internal_call)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model, trial):
        """As in `Trainer`, under an unfinished name until the checkpoint is complete."""
        args, run, step = self.args, Path(self._get_output_dir(trial)), self.state.global_step
        aside, final = run / f"{UNFINISHED_PREFIX}-{step}", run / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        with self._uncounted(), disk_errors(args.output_dir):
            if args.should_save:
                shutil.rmtree(aside, ignore_errors=True)
            self.accelerator.wait_for_everyone()
            # Nothing is pushed or removed before the checkpoint has its name.
            self.args = copy.copy(args)
            self.args.output_dir, self.args.push_to_hub, self.args.save_total_limit = str(aside), False, None
            try:
                super()._save_checkpoint(model, trial)
                written = Path(self._get_output_dir(trial), final.name)
            finally:
                self.args = args
            if not args.save_only_model:
                self._save_memory(written)
                if self._averaging is not None and args.should_save:
                    self._averaging.save(written)
            if self.state.best_model_checkpoint == str(written):
                self.state.best_model_checkpoint = str(final)
            self.accelerator.wait_for_everyone()
            if args.should_save:
                torch.save(args, written / TRAINING_ARGS_NAME)
                self.state.save_to_json(str(written / TRAINER_STATE_NAME))
                if self._run is None:
                    # A callback asked for it, without a `save_strategy`.
                    self._run = begin_run(run)
                finish_checkpoint(written, final, self._run)
                if args.push_to_hub:
                    self._push_from_checkpoint(str(final))
                # Trainer's own function orders checkpoints by time.
                remove_old_checkpoints(run, args.save_total_limit, keep=[final, self.state.best_model_checkpoint])
            self.accelerator.wait_for_everyone()

    def _begin_push(self, *event, **kwargs):
        """Called before a push copies files to the output directory."""
        if self.is_world_process_zero() and (model := self._model_of_card()) is not None:
            complete_push(self, model)

    def _settings(self) -> dict[str, Any]:
        """The settings of text, weights and optimizer that a resumed training must share."""
        settings = {name: getattr(self.model.config, name) for name in FIXED} | describe_stream(self.train_dataset)
        return settings | {"optimizer": self.args.optimizer, "average": self.args.average}

    def _save_memory(self, folder: Path):
        memory, dataset, position = self._memory, self.train_dataset, self._settings()
        ended = not isinstance(dataset, IterableDataset) and memory.step == len(dataset) // dataset.batch_size
        if ended or self.control.should_epoch_stop:
            memory = memory.next_epoch()
        elif isinstance(dataset, TextStream) and memory.step > 0:
            position["read"] = dataset.documents_read
        memory.save(folder, self.accelerator, position, writes=self.args.should_save)


def check_special_tokens(config: TransfoXLConfig, tokenizer):
    """Raise a ValueError for a special token outside a model's vocabulary: `Trainer.train` would write it into the
    configuration, which could not be saved.

    Args:
        tokenizer: or a processor that has one.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    for name in ("bos_token", "eos_token", "pad_token"):
        token = getattr(tokenizer, f"{name}_id", None)
        # Without a vocabulary a model reads vectors.
        if token is not None and 0 < config.vocab_size <= token:
            raise ValueError(
                f"{name}={getattr(tokenizer, name)!r} of the tokenizer is token {token}, but the model has the tokens "
                f"[0, {config.vocab_size}): call model.resize_token_embeddings(len(tokenizer)) before training"
            )


def _check_arguments(args: TrainingArguments):
    if args.n_gpu > 1:
        raise ValueError(
            f"DataParallel over {args.n_gpu} GPUs mixes the rows of streams: start one process per GPU with torchrun "
            "or accelerate launch, or show one GPU with CUDA_VISIBLE_DEVICES"
        )
    if args.world_size > 1 and not args.average_tokens_across_devices:
        raise ValueError(
            "average_tokens_across_devices=False takes the mean of the processes' means and counts the tokens of one: "
            "set it to True"
        )
    if args.label_smoothing_factor:
        raise ValueError(
            f"label_smoothing_factor={args.label_smoothing_factor} does not reach shift_labels: set it to 0"
        )
    # TrainingArguments takes True for names that do not end in "loss".
    if args.greater_is_better and re.fullmatch(f"(.*_)?({'|'.join(METRICS)})", args.metric_for_best_model or ""):
        raise ValueError(
            f"metric_for_best_model={args.metric_for_best_model!r} is the better the lower: set "
            "greater_is_better=False, because True would keep the worst checkpoint"
        )
