"""`Trainer` with memory: what each stream remembers is carried from step to step, evaluated apart, and saved."""

import copy
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler
from transformers import PreTrainedModel, Trainer, TrainingArguments, default_data_collator
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, SaveStrategy, default_compute_objective
from transformers.utils import logging

from ..data.streams import check_loader, describe_stream
from ..data.text_stream import TextStream
from ..evaluation.cards import METRICS, RESULTS, results_of_folder, to_results
from ..evaluation.language_model import figures
from ..transfo_xl.configuration_transfo_xl import TransfoXLConfig
from ..transfo_xl.memory_transfo_xl import cloned_states, latest_states, mask_overflow, memory_of, real_states
from ..transfo_xl.modeling_transfo_xl import without_padding
from .checkpoints import (
    UNFINISHED_PREFIX,
    begin_run,
    checkpoint_problem,
    data_only,
    finish_checkpoint,
    last_checkpoint,
    load_mems,
    read_position,
    remove_old_checkpoints,
    save_mems,
)
from .regularization import Regularizer, regularize
from .regularization_arguments import RegularizationArguments

__all__ = ["TransfoXLTrainer"]

logger = logging.get_logger(__name__)

# What a card calls the split and the data set of an evaluation that nobody has named.
HELD_OUT, TRAINING = ("validation", "held-out text"), ("train", "training text")


@dataclass
class _Memory:
    """The mems of each micro-batch of a step, and where in the text they are from.

    Args:
        memories: for each micro-batch `mems` and `mems_mask` of its rows on this process, neither at the beginning of
            the text.
        micro_batch: which of them is next.
        epoch: the one that is read.
        step: how many of its steps were read.
    """

    memories: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    micro_batch: int = 0
    epoch: int = 0
    step: int = 0

    def replace(self, memory: dict[str, Any]):
        """Keep the memory of the current micro-batch and go on to the next one."""
        self.memories[self.micro_batch] = memory
        self.micro_batch = (self.micro_batch + 1) % len(self.memories)
        self.step += self.micro_batch == 0


@dataclass
class _Sums:
    """What an evaluation has read on this process, a number on the device for each step: nats, and targets."""

    nll: list[Tensor] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)

    def total(self) -> Tensor:
        """Nats and targets of all steps, (2,) fp64 on the CPU."""
        parts = [torch.stack(part).cpu().double().sum() for part in (self.nll, self.targets) if part]
        return torch.stack(parts) if parts else torch.zeros(2, dtype=torch.float64)


class TransfoXLTrainer(Trainer):
    """transformers' `Trainer` whose steps go on with the memory of the step before.

    Datasets, for training and for evaluation, are `TokenStream`s or others whose items are step-major and which say in
    `batch_size` how many streams G there are. An optimiser step of training reads one segment of every stream: rows
    per process × processes × accumulation steps = G; a batch of evaluation likewise, without accumulation. They are
    read in order, whatever `train_sampling_strategy` says. A loader that breaks continuity is refused.

    * Memory begins empty (see `initial_memory`) in every epoch and every evaluation; evaluation leaves that of the
      training as it was. It may be of `train_dataset` itself, of which it reads a copy, from the beginning.
    * The loss of a step is the mean over its targets in all micro-batches and processes, however many are -100.
      `eval_loss` is the mean over all targets likewise.
    * Logs gain `perplexity`, `bits_per_token` (bits per character of a character-level model) and
      `tokens_per_second`, without the time for evaluating and saving; evaluations gain the same and `tokens`. Of a
      classifier, of tokens or of sequences, `tokens` are its labels, and there is neither perplexity nor bits.
    * With a `compute_loss_func`, `loss` and `eval_loss` are what it gives (in an evaluation as `Trainer` averages it),
      and the other figures of an evaluation those of the text's likelihood; logs of training have none. The labels of
      a stream, which it gets, are those of the logits' own places, not to be shifted; a model with cutoffs has logits
      with `config.output_logits=True`, and `outputs.losses` always.
    * `regularization` puts the regularisers of small corpora around the model, as `regularize` does, and adds their
      penalty to what is minimised: its mean over micro-batches and processes. The losses that are logged are without.
    * Checkpoints hold the memory, in the order of the streams so that another number of processes or of accumulation
      steps can go on, and appear under their name when they are complete. Older ones go only after that.
      `train(resume_from_checkpoint=True)` takes the last complete one. A training is resumed in the epoch and at the
      step that the memory is from, whatever the step of the training.

    Raises:
        ValueError: settings under which memory cannot be carried, or the worst checkpoint would be the best; the
            message names the fix.
    """

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
        # A tokenizer is there to be saved with the model: segments are whole, and Trainer would have it pad them.
        super().__init__(model, args, data_collator or default_data_collator, *more, **kwargs)
        if not torch.accelerator.is_available():
            # As `use_cpu` has it: torch warns of memory that is pinned for no device.
            self.args.dataloader_pin_memory = False
        if regularization is not None and self._regularizer is None:
            self._regularizer = regularize(self.model, regularization)
        _check_arguments(self.args, self.model)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, JITCheckpointCallback):
                # The memory has read a segment then that the weights are yet to learn from. The step's end saves both.
                callback.on_pre_optimizer_step = super(JITCheckpointCallback, callback).on_pre_optimizer_step
        self._check_batch_size(
            "train_dataset",
            self.train_dataset,
            "per_device_train_batch_size",
            self.args.train_batch_size,
            self.args.gradient_accumulation_steps,
        )
        named = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"eval_dataset": self.eval_dataset}
        for name, dataset in named.items():
            self._check_batch_size(name, dataset, "per_device_eval_batch_size", self.args.eval_batch_size)
            _check_end(name, dataset)
        if self.args.label_names is None:
            self.label_names = ["shift_labels"]
        self._memory, self._sums = _Memory(), _Sums()
        # Whether the last losses were of other labels than the text's next tokens.
        self._classifies = False
        # Which evaluations read the text of the training: by the prefix of their figures, and the step.
        self._of_training: dict[tuple[str, int], bool] = {}
        # The training dataset, and its copy that evaluations read.
        self._copied: tuple[Any, Any] = None, None
        self._resumed_from: Path | None = None
        self._run: str | None = None
        self._trained_since = 0.0
        self._writing_to: Path | None = None
        self._tokens: Tensor | int = 0
        self._counted_since = time.perf_counter()

    def call_model_init(self, trial=None):
        model = super().call_model_init(trial)
        if self._regularization is not None:
            self._regularizer = regularize(model, self._regularization)
        return model

    def hyperparameter_search(self, hp_space=None, compute_objective=None, *args, **kwargs):
        """As `Trainer.hyperparameter_search`: for `eval_loss`, or the sum of what `compute_metrics` gives."""
        return super().hyperparameter_search(hp_space, compute_objective or default_objective, *args, **kwargs)

    def train(self, resume_from_checkpoint: str | os.PathLike | bool | None = None, *args, **kwargs):
        """As `Trainer.train`, but only a complete checkpoint is resumed; with True, the last complete one.

        Raises:
            ValueError: there is no complete checkpoint, or the one that is named is not complete, or of `txl-train`;
                or the model lacks a special token of `processing_class`.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(
                    f"{self.args.output_dir} holds no complete checkpoint of TransfoXLTrainer: train without "
                    "resume_from_checkpoint"
                )
        elif resume_from_checkpoint and (problem := checkpoint_problem(Path(resume_from_checkpoint))):
            raise ValueError(
                f"{resume_from_checkpoint} cannot be resumed: {problem}; resume_from_checkpoint=True takes the last "
                "complete one, from_pretrained its weights alone"
            )
        self._resumed_from = Path(resume_from_checkpoint) if resume_from_checkpoint else None
        # What txl-train writes counts steps alone.
        if self._resumed_from is not None and "epoch" not in read_position(self._resumed_from)[0]:
            raise ValueError(
                f"{self._resumed_from} is a checkpoint of txl-train, which goes on from it with --resume: train "
                "without resume_from_checkpoint, with its weights (from_pretrained) if you like"
            )
        self._run, self._trained_since = None, time.time()
        try:
            return super().train(str(self._resumed_from) if self._resumed_from else None, *args, **kwargs)
        finally:
            self._memory, self._resumed_from = _Memory(), None

    # --- data --------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        loader = super().get_train_dataloader()
        self._check_loader(loader, self.train_dataset, "train_dataset", self.args.gradient_accumulation_steps)
        return loader

    def get_eval_dataloader(self, eval_dataset=None) -> DataLoader:
        loader = super().get_eval_dataloader(eval_dataset)
        if eval_dataset is None:
            eval_dataset = self.eval_dataset
        elif isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        self._check_loader(loader, eval_dataset, "eval_dataset")
        _check_end("eval_dataset", eval_dataset)
        return loader

    def get_test_dataloader(self, test_dataset) -> DataLoader:
        loader = super().get_test_dataloader(test_dataset)
        self._check_loader(loader, test_dataset, "test_dataset")
        _check_end("test_dataset", test_dataset)
        return loader

    def _get_dataloader(self, dataset, *args, is_training=False, **kwargs) -> DataLoader:
        if dataset is self.train_dataset and not is_training:
            # An evaluation begins anew, in the first epoch, while the training stays where it is.
            if self._copied[0] is not dataset:
                self._copied = dataset, copy.copy(dataset)
            dataset = self._copied[1]
        return super()._get_dataloader(dataset, *args, is_training=is_training, **kwargs)

    def _get_train_sampler(self, train_dataset=None):
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return None if isinstance(dataset, IterableDataset) else SequentialSampler(dataset)

    def _check_batch_size(self, name: str, dataset, option: str, given: int, accumulation_steps: int | None = None):
        """Where a loader would tell hours later."""
        _check_whole(name, dataset)
        streams, processes = getattr(dataset, "batch_size", None), self.args.world_size
        if not isinstance(streams, int):
            return
        parts = processes * (accumulation_steps or 1)
        share, left = divmod(streams, parts)
        # With split_batches what is called per device is what all of them read.
        right = share * processes if self.args.accelerator_config.split_batches else share
        if left or given != right:
            layout = f"{processes} process(es)"
            if accumulation_steps is not None:
                layout += f" × {accumulation_steps} accumulation step(s)"
            cure = f"make the stream's a multiple of {parts}" if left else f"set it to {right}"
            raise ValueError(f"{name} has batch_size={streams}, but {option}={given} on {layout}: {cure}")

    def _check_loader(self, loader: DataLoader, dataset, name: str, accumulation_steps: int = 1):
        if not isinstance(getattr(dataset, "batch_size", None), int):
            raise ValueError(
                f"{name} is a {type(dataset).__name__} without batch_size, so that nothing says which items continue "
                "which: give a TokenStream of the tokens, or use Trainer to train without memory"
            )
        _check_whole(name, dataset)
        config, ext_len = self.model.config, getattr(dataset, "ext_len", None)
        if getattr(dataset, "document_end", None) is not None:
            config.check_documents(f"document_end and the text of {name}")
        if config.mem_len > 0 and ext_len not in (None, config.ext_len):
            raise ValueError(
                f"{name} reads ext_len={ext_len} tokens again, but the model keeps {config.ext_len} out of memory: "
                f"make the stream with ext_len={config.ext_len}, or set ext_len in the model's configuration"
            )
        try:
            check_loader(
                loader,
                num_processes=self.args.world_size,
                process_index=self.args.process_index,
                accumulation_steps=accumulation_steps,
                batch_size=dataset.batch_size,
            )
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    # --- steps -------------------------------------------------------------------------------------------------------

    def _init_training_state(self, *args, **kwargs) -> tuple[int, int]:
        """As in `Trainer`, but a training is resumed where its memory is from, however long its epochs were."""
        epoch, batches = super()._init_training_state(*args, **kwargs)
        self._memory = self._empty_memory(epoch)
        if self._resumed_from is not None:
            best = self._resumed_from.with_name(f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}")
            if self.state.best_model_checkpoint is None and best.is_dir():
                # Moved together with this one. Trainer would look for it in the folder that it writes to.
                self.state.best_model_checkpoint = str(best)
            if not self.args.ignore_data_skip:
                self._memory = self._load_memory(self._resumed_from)
                epoch, batches = self._memory.epoch, self._memory.step * self.args.gradient_accumulation_steps
        return epoch, batches

    def _run_epoch(self, **kwargs) -> None:
        """An epoch begins at the beginning of the text, but for one that is resumed."""
        if kwargs["epoch"] == kwargs["epochs_trained"]:
            self._begin_training(Path(self._get_output_dir(kwargs["trial"])))
        else:
            self._memory = self._empty_memory(kwargs["epoch"])
        # Trainer takes one step more when it resumes a run that is done.
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(**kwargs)
        else:
            self.control.should_training_stop = True

    def _begin_training(self, output_dir: Path):
        self._tokens, self._counted_since = 0, time.perf_counter()
        if self.args.should_save and self.args.save_strategy != SaveStrategy.NO:
            self._run = begin_run(output_dir, self._resumed_from)

    def _empty_memory(self, epoch: int) -> _Memory:
        return _Memory([{} for _ in range(self.args.gradient_accumulation_steps)], epoch=epoch)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        self._memory.micro_batch = 0
        batches, targets = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches and self._memory.step > 0:
            # The end of a text without a length.
            self._memory = self._empty_memory(self._memory.epoch + 1)
        self._tokens = self._tokens + (0 if targets is None else targets)
        return batches, targets

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device):
        # Trainer counts nothing in batches without `labels`, and then takes the mean of means.
        batches = []
        for batch in batch_samples:
            if (labels := batch.get("shift_labels")) is not None:
                # In the batch itself, so that the model counts the same.
                labels = batch["shift_labels"] = without_padding(labels, batch.get("attention_mask"), labels.shape[1])
                batch = {"labels": labels, "shift_labels": labels}
            batches.append(batch)
        targets = super()._get_num_items_in_batch(batches, device)
        return None if targets is None else targets.clamp(min=1)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """As in `Trainer`, with the memory of these rows, which the call replaces by what it returns."""
        # A callback, or who resumes, may have made the memory shorter.
        memory = latest_states(self._memory.memories[self._memory.micro_batch], self.model.config.mem_len)
        inputs = {**inputs, **memory}
        if not model.training and self.compute_loss_func is None:
            # Evaluations add up what follows; a loss of this batch alone is the mean over its own labels.
            num_items_in_batch = None
        with self._labels_for_own_loss(inputs):
            loss, outputs = super().compute_loss(
                model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
            )
        self._memory.replace(self._detach(memory_of(outputs, self.args.torch_compile)))
        if self._regularizer is not None and model.training:
            penalty = self._regularizer.penalty(inputs.get("shift_labels"), inputs.get("resets"))
            penalty = penalty / self.current_gradient_accumulation_steps
            # Its gradient alone: what is logged is the likelihood, so that its exponential is a perplexity.
            loss = loss + (penalty - penalty.detach())
        if (losses := outputs.get("losses")) is not None:
            targets = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"]
            # A language model's are of the labels after the first.
            self._classifies = "shift_labels" not in inputs and losses.shape == targets.shape
            if not model.training:
                self._sums.nll.append(losses.detach().sum())
                length = targets.shape[1]
                targets = targets[:, length - losses.shape[1] :]
                if not self._classifies:
                    targets = without_padding(targets, inputs.get("attention_mask"), length)
                self._sums.targets.append((targets != -100).sum())
        elif (labels := inputs.get("labels")) is not None:
            # Of whole sequences, of which most segments may have no label.
            self._classifies = True
            if not model.training:
                self._sums.targets.append((labels != -100).sum())
                self._sums.nll.append(outputs["loss"].detach() * self._sums.targets[-1])
        return (loss, outputs) if return_outputs else loss

    @contextmanager
    def _labels_for_own_loss(self, inputs: dict[str, Any]) -> Iterator[None]:
        """Gives `compute_loss_func` the labels of a stream, `shift_labels`: `Trainer` knows of `labels` alone."""
        own, labels = self.compute_loss_func, inputs.get("shift_labels")
        if own is not None and labels is not None:
            self.compute_loss_func = lambda outputs, _, **options: own(outputs, labels, **options)
        try:
            yield
        finally:
            self.compute_loss_func = own

    def _detach(self, memory: dict[str, Any]) -> dict[str, Any]:
        if not memory:
            return {}
        # Mixed precision returns everything in fp32, also what a model in bf16 wants back in bf16, and the memory that
        # autocast has rounded, as it does unless a layer normalisation reads it.
        dtype = self.model.first_parameter.dtype
        if self.accelerator.native_amp and not self.model.config.pre_lnorm:
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.accelerator.mixed_precision, dtype)
        memory = memory | {"mems": tuple(states.detach().to(dtype) for states in memory["mems"])}
        if self.args.torch_compile:
            memory = cloned_states(memory)
        if self.args.fp16 or dtype == torch.float16:
            # A stream whose states overflowed would go on from them until the text ends, whatever the scaler skips.
            memory["mems_mask"] = mask_overflow(**memory)
        return memory

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            seconds = time.perf_counter() - self._counted_since
            if self.compute_loss_func is None:
                logs |= self._figures(logs["loss"])
            logs["tokens_per_second"] = float(self._tokens) / seconds
            self._tokens, self._counted_since = 0, time.perf_counter()
        super().log(logs, start_time)

    def _figures(self, loss: float) -> dict[str, float]:
        """What a loss is told as besides, which is of a text's likelihood."""
        return {} if self._classifies else figures(loss)

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        """Time that does not count in tokens per second."""
        start = time.perf_counter()
        yield
        self._counted_since += time.perf_counter() - start

    # --- evaluation --------------------------------------------------------------------------------------------------

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ) -> EvalLoopOutput:
        training, self._memory, self._sums = self._memory, _Memory(), _Sums()
        self._of_training[metric_key_prefix, self.state.global_step] = self._is_of_training(dataloader.dataset)
        start = time.perf_counter()
        try:
            with self._uncounted():
                output = super().evaluation_loop(
                    dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
                )
            sums = self._sums.total()
        finally:
            self._memory = training
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

    def _is_of_training(self, dataset) -> bool:
        text = getattr(self.train_dataset, "fingerprint", None)
        same = text is not None and getattr(dataset, "fingerprint", None) == text
        return same or dataset is self.train_dataset or dataset is self._copied[1]

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        if self.args.label_names is None:
            self.label_names = [name for name in ("shift_labels", "labels") if name in inputs][:1]
        if missing := [name for name in self.label_names if inputs.get(name) is None]:
            # Trainer would leave out the loss, and with it the memory.
            raise ValueError(
                f"label_names={self.label_names}, but the items have {', '.join(inputs)}, and no "
                f"{', '.join(missing)}: an evaluation with memory needs labels"
            )
        if not self.label_names:
            raise ValueError("an evaluation with memory needs items with shift_labels or labels")
        self._set_signature_columns_if_needed()
        if not prediction_loss_only and "output_logits" in self._signature_columns:
            # With labels, a model with cutoffs would compute the loss alone.
            inputs = {**inputs, "output_logits": True}
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    # --- card --------------------------------------------------------------------------------------------------------

    def card_results(self, dataset: str | None) -> list[EvalResult]:
        """For a card: the figures of the model as it is now.

        Args:
            dataset: what it was evaluated on; by default that is said without a name.
        """
        folder = Path(self.args.output_dir)
        # What was written before this training began is of other weights.
        if self._trained_since < _modified(folder / RESULTS) and (
            found := results_of_folder(folder, dataset or HELD_OUT[1])
        ):
            return found
        splits: dict[str, list[EvalResult]] = {}
        for logs in evaluations_of_now(self):
            step = logs["step"]
            for name in filter(re.compile("eval_(.*_)?perplexity").fullmatch, logs):
                prefix = name.removesuffix("_perplexity")
                figures = {figure: logs[f"{prefix}_{figure}"] for figure in METRICS if f"{prefix}_{figure}" in logs}
                read = TRAINING if self._of_training.get((prefix, step)) else HELD_OUT
                split = prefix.removeprefix("eval").removeprefix("_") or read[0]
                splits[split] = to_results({split: figures}, dataset or read[1])
        return [result for found in splits.values() for result in found]

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial) -> str:
        return super()._get_output_dir(trial) if self._writing_to is None else str(self._writing_to)

    def _save_checkpoint(self, model, trial):
        """Write aside, rename when complete, and only then let go of older checkpoints."""
        with self._uncounted():
            run = Path(self._get_output_dir(trial))
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            aside = run / f"{UNFINISHED_PREFIX}-{self.state.global_step}"
            if self.args.should_save:
                shutil.rmtree(aside, ignore_errors=True)
            self.accelerator.wait_for_everyone()
            self._writing_to = aside
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._writing_to = None
            if not self.args.save_only_model:
                self._save_memory(aside / name)
            if self.state.best_model_checkpoint == str(aside / name):
                self.state.best_model_checkpoint = str(run / name)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self.state.save_to_json(str(aside / name / TRAINER_STATE_NAME))
                if self._run is None:
                    # A callback asked for it, without a strategy.
                    self._run = begin_run(run)
                finish_checkpoint(aside / name, run / name, self._run)
                if self.args.push_to_hub:
                    self._push_from_checkpoint(str(run / name))
                # Not by Trainer's way, which asks the clock which is the latest.
                keep = [run / name, self.state.best_model_checkpoint]
                remove_old_checkpoints(run, self.args.save_total_limit, keep)
            self.accelerator.wait_for_everyone()

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # An upload runs on while the folder would be renamed.
        if self._writing_to is None:
            with self._pickled_without_token():
                super()._push_from_checkpoint(checkpoint_folder)

    # Checkpoints go to others; the token that writes to the Hub does not.

    def _save(self, *args, **kwargs) -> None:
        with self._pickled_without_token():
            super()._save(*args, **kwargs)

    @contextmanager
    def _pickled_without_token(self) -> Iterator[None]:
        """Trainer writes its arguments into each checkpoint, and before each upload, which needs the token itself."""
        settings = {**vars(self.args), "hub_token": None}
        # pickle asks an object for its state, whatever its class says.
        self.args.__getstate__ = lambda: settings  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self.args.__getstate__  # type: ignore[method-assign]

    # Whatever loads them, sharded or not: nothing in a checkpoint is executed.

    def _prepare_for_training(self, *args, **kwargs):
        with data_only():
            return super()._prepare_for_training(*args, **kwargs)

    def _load_from_checkpoint(self, *args, **kwargs):
        with data_only():
            return super()._load_from_checkpoint(*args, **kwargs)

    def _load_best_model(self) -> None:
        with data_only():
            super()._load_best_model()

    def _issue_warnings_after_load(self, load_result) -> None:
        # Tied tensors are written once.
        missing = [name for name in load_result.missing_keys if name not in self.model.all_tied_weights_keys]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def _position(self, memory: _Memory) -> dict[str, Any]:
        """Where a memory is from: counted in steps that were learned from, because loaders read ahead."""
        position = {**describe_stream(self.train_dataset), "epoch": memory.epoch, "step": memory.step}
        if not isinstance(self.train_dataset, IterableDataset):
            position["steps"] = len(self.train_dataset) // self.train_dataset.batch_size
            if memory.step == position["steps"]:
                position |= {"epoch": memory.epoch + 1, "step": 0}
        return position

    def _save_memory(self, folder: Path):
        # Where a callback has ended the epoch, the next one begins.
        ended = self.control.should_epoch_stop
        memory = self._empty_memory(self._memory.epoch + 1) if ended else self._memory
        position, memories = self._position(memory), memory.memories
        layers, mask = [], None
        # At the end of an epoch nothing is remembered any more.
        if position["step"] > 0 and memories[0]:
            layers = [self._gather(states) for states in zip(*(memory["mems"] for memory in memories), strict=True)]
            mask = self._gather([real_states(**memory).byte() for memory in memories]).bool()
        if self.args.should_save:
            save_mems(folder, layers, mask, position)

    def _gather(self, parts: Iterable[Tensor]) -> Tensor:
        """What each micro-batch of each process has, in the order of the streams."""
        return torch.cat([self.accelerator.gather(part.contiguous()) for part in parts]).cpu()

    def _load_memory(self, folder: Path) -> _Memory:
        """That of the rows of this process."""
        memory, (saved, _) = self._empty_memory(0), read_position(folder)
        memory.epoch, memory.step = saved["epoch"], saved["step"]
        micro_batches, position = self.args.gradient_accumulation_steps, self._position(memory)
        rows = position["batch_size"] // (micro_batches * self.args.world_size)
        starts = [(a * self.args.world_size + self.args.process_index) * rows for a in range(micro_batches)]
        memory.memories = load_mems(folder, position, starts, rows, self.args.device)
        return memory


def _modified(path: Path) -> float:
    """When a file was written, in seconds; before all others where there is none."""
    return path.stat().st_mtime if path.exists() else 0.0


def evaluations_of_now(trainer: Trainer) -> list[dict[str, Any]]:
    """What a Trainer has logged of the weights that its model has."""
    state, history = trainer.state, trainer.state.log_history
    # Only a training that came to its end has loaded the best model. It has logged its time, which all logs may hold
    # (include_num_input_tokens_seen), and its operations.
    ended = next((i for i, logs in enumerate(history) if "total_flos" in logs), None)
    if ended is None or not trainer.args.load_best_model_at_end or state.best_model_checkpoint is None:
        return [logs for logs in history if logs.get("step") == state.global_step]
    return [logs for logs in history[:ended] if logs.get("step") == state.best_global_step] + history[ended:]


def check_special_tokens(config: TransfoXLConfig, tokenizer):
    """Check that a model has the special tokens of a tokenizer, which `Trainer.train` writes into its configuration.

    Args:
        config: the model's.
        tokenizer: the `processing_class` of a Trainer, which may be a processor that has one.

    Raises:
        ValueError: a token lies beyond the vocabulary, so that the model could be trained and not saved.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    for name in ("bos_token", "eos_token", "pad_token"):
        token = getattr(tokenizer, f"{name}_id")
        # A model without a vocabulary reads vectors, whatever tokens its configuration names.
        if token is not None and 0 < config.vocab_size <= token:
            raise ValueError(
                f"{name}={getattr(tokenizer, name)!r} of the tokenizer is token {token}, but the model has the tokens "
                f"[0, {config.vocab_size}): call model.resize_token_embeddings(len(tokenizer)) before training"
            )


def _check_whole(name: str, dataset):
    """Refuse a stream that is one process's share: rows are shared out here, and would have the memory of others."""
    if isinstance(dataset, TextStream) and len(dataset.rows) < dataset.batch_size:
        raise ValueError(
            f"{name} is a TextStream of {len(dataset.rows)} of its {dataset.batch_size} rows, the share of one "
            "process: make it without num_processes and process_index, TransfoXLTrainer hands each process its rows"
        )


def _check_end(name: str, dataset):
    """Refuse an evaluation of a text that is read again and again, and say what one leaves out."""
    if isinstance(dataset, TextStream) and dataset.epochs is None:
        raise ValueError(f"{name} is a TextStream with epochs=None, which never ends: make it with epochs=1")
    if left_out := getattr(dataset, "dropped_tokens", 0):
        logger.warning_once(
            f"{name} leaves out {left_out:,} tokens at the end of its text, which the figures are not of: make it "
            "with keep_remainder=True"
        )


def default_objective(metrics: dict[str, float]) -> float:
    """Of a search, as `default_compute_objective` has it, without the figures that an evaluation gains here."""
    prefixes = [name.removesuffix("_tokens_per_second") for name in metrics if name.endswith("_tokens_per_second")]
    gained = {f"{prefix}_{name}" for prefix in prefixes for name in (*METRICS, "tokens")}
    return default_compute_objective({name: value for name, value in metrics.items() if name not in gained})


def _check_arguments(args: TrainingArguments, model: PreTrainedModel):
    if args.train_sampling_strategy not in ("random", "sequential"):
        raise ValueError(
            f"train_sampling_strategy={str(args.train_sampling_strategy)!r} reorders segments that continue one "
            "another: use 'sequential'"
        )
    if args.dataloader_drop_last:
        raise ValueError("dataloader_drop_last=True would drop segments in the middle of a text: set it to False")
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size=True would change how many streams there are: set it to False, and where memory is "
            "short lower per_device_train_batch_size and raise gradient_accumulation_steps"
        )
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
    if getattr(model.config, "return_dict", True) is False:
        raise ValueError("config.return_dict=False leaves the memory without a name: set it to True")
    if args.label_smoothing_factor:
        raise ValueError(
            f"label_smoothing_factor={args.label_smoothing_factor} does not reach shift_labels: set it to 0"
        )
    # TrainingArguments takes whatever is not named a loss for the better the greater.
    if args.greater_is_better and re.fullmatch(f"(.*_)?({'|'.join(METRICS)})", args.metric_for_best_model or ""):
        raise ValueError(
            f"metric_for_best_model={args.metric_for_best_model!r} is the better the lower: set "
            "greater_is_better=False, because True would keep the worst checkpoint"
        )
