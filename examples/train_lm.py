"""Train a Transformer-XL language model: the loop of `TransfoXLTrainer` written out with accelerate.

    python examples/train_lm.py examples/recipes/wikitext2.yaml --data DIR --output DIR
    python examples/train_lm.py examples/recipes/wikitext2.yaml --data DIR --output DIR --resume
    accelerate launch --config_file examples/launch/eight_gpus.yaml examples/train_lm.py RECIPE --data … --output …
    python examples/train_lm.py examples/recipes/ptb.yaml --smoke

DIR of --data is what `prepare_corpus.py` writes. A recipe sets any argument of `lm_arguments.py`; the command line
wins.

--output then holds the model that was best in validation, with its tokenizer (for `AutoModelForCausalLM` and
`AutoTokenizer`), `results.json`, the run's log (`log.jsonl`, TensorBoard's, `training.png`), the settings it ran with
(`recipe.yaml`), and checkpoints, which are complete or absent. Killed at any moment and resumed, a run goes on as if
it had never stopped.
"""

import dataclasses
import json
import logging
import math
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import matplotlib
import numpy as np
import pyarrow.compute
import torch
import transformers
import yaml
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DistributedType, GradientAccumulationPlugin, broadcast_object_list, set_seed
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, get_scheduler
from transformers.trainer_utils import rotate_checkpoints

from lm_arguments import (
    CHANGEABLE,
    SPLITS,
    Arguments,
    EvaluationArguments,
    ModelArguments,
    OptimizationArguments,
    RunArguments,
    parse_arguments,
    shrink,
)
from txl_hf import TokenStream, TransfoXLConfig, TransfoXLForCausalLM, evaluate_language_model
from txl_hf.evaluation import LanguageModelEvaluation
from txl_hf.regularization import regularize
from txl_hf.streams import check_loader, read_tokens
from txl_hf.trainer import MEMS_NAME, UNFINISHED_PREFIX, finish_checkpoint, last_checkpoint

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402 -- after the choice of what draws.

RECIPE, LOG, PLOT, RESULTS, BEST = "recipe.yaml", "log.jsonl", "training.png", "results.json", "best"


def main(argv: list[str] | None = None):
    arguments = parse_arguments(argv)
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    # It warns of tied tables at every checkpoint.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    if arguments.run.smoke and arguments.run.output is None and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        sys.exit("error: --smoke with several processes needs an --output that they share")
    with tempfile.TemporaryDirectory(prefix="train_lm-") as scratch:
        try:
            if arguments.run.smoke:
                shrink(arguments, Path(scratch))
            training = Training(arguments)
        except (ValueError, OSError) as error:
            sys.exit(f"error: {' '.join(str(error).split())}")
        training.run()


class Training:
    """One run. Everything that can be wrong with it is found out in `__init__`, as a ValueError or an OSError.

    Attributes:
        step: optimiser steps done; with it, the place in the stream is known.
        tokens: targets that were learned from until the last line of the log.
        best: the lowest validation loss, in nats.
        mems: for each chunk of this process's streams what they remember, or None at the beginning of the text.
        nll, targets: sums since the last line of the log, on the device.
    """

    def __init__(self, arguments: Arguments):
        self.arguments = arguments
        model_arguments, data, _, optimization, regularization, run = arguments
        self.tokenizer, corpus = load_data(Path(data.data))
        config = make_config(model_arguments, len(self.tokenizer), data.data)
        check_texts(corpus, config, arguments)
        # Columns that are read where they are sliced.
        self.texts = {split: corpus[split].with_format("numpy")["token_ids"] for split in SPLITS}
        self.stream = make_stream(self.texts["train"], config, arguments)
        self.max_steps = optimization.max_steps or max(1, round(optimization.max_epochs * self.stream.steps))

        self.accelerator = make_accelerator(arguments)
        self.output = Path(run.output)
        check_output(self.output, run)
        # Before any process writes what another one would find there.
        self.accelerator.wait_for_everyone()
        loader = make_loader(self.stream, self.accelerator, data.batch_chunk)

        set_seed(run.seed)
        model = make_model(config, model_arguments, run)
        self.averaged = make_average(model, optimization, self.accelerator)
        self.regularizer = regularize(model, regularization) if any(vars(regularization).values()) else None
        optimizer = make_optimizer(model, optimization)
        # Not prepared: a prepared one takes a step for each process.
        self.scheduler = make_scheduler(optimizer, optimization, self.max_steps)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        check_loader(
            self.loader,
            num_processes=self.accelerator.num_processes,
            process_index=self.accelerator.process_index,
        )
        self.accelerator.register_for_checkpointing(self, self.scheduler)
        if self.averaged is not None:
            self.accelerator.register_for_checkpointing(self.averaged)

        self.step, self.tokens, self.best = 0, 0, math.inf
        self.mems: list[tuple[Tensor, ...] | None] = [None] * data.batch_chunk
        self.nll = torch.zeros((), dtype=torch.float64, device=self.accelerator.device)
        self.targets = torch.zeros((), dtype=torch.int64, device=self.accelerator.device)
        checkpoint = last_checkpoint(self.output) if run.resume else None
        if checkpoint is not None:
            self.load_checkpoint(Path(checkpoint))
        # All processes have looked; what is refused has changed nothing.
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            open_output(self.output, arguments)
            cut_log(self.output / LOG, self.step)
        self.accelerator.wait_for_everyone()
        self.accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": {"purge_step": self.step + 1}})

    def run(self):
        evaluation, run = self.arguments.evaluation, self.arguments.run
        main = self.accelerator.is_main_process
        self.bar = tqdm(total=self.max_steps, initial=self.step, unit="step", desc="train", disable=not main)
        self.since = time.perf_counter()
        self.model.train()
        for batch in self.batches():
            self.grad_norm = self.train_step(batch)
            self.step += 1
            self.bar.update()
            last = self.step == self.max_steps
            validating, saving = (last or self.step % n == 0 for n in (evaluation.eval_every, run.save_every))
            if validating or saving or self.step % run.log_every == 0:
                self.log_training()
            if validating:
                self.validate()
            if saving:
                self.save_checkpoint()
            if validating or saving:
                self.since = time.perf_counter()
        self.bar.close()
        self.accelerator.end_training()
        if main:
            finish(self.output, self.texts, self.arguments)

    # --- steps -------------------------------------------------------------------------------------------------------

    def batches(self):
        """From the present step to the last, epoch after epoch."""
        while self.step < self.max_steps:
            epoch, done = divmod(self.step, self.stream.steps)
            if done == 0:
                # The text begins anew.
                self.mems = [None] * len(self.mems)
            loader = skip_first_batches(self.loader, done) if done else self.loader
            loader.set_epoch(epoch)
            for batch in loader:
                yield batch
                if self.step == self.max_steps:
                    return

    def train_step(self, batch: dict[str, Tensor]) -> Tensor:
        """One optimiser step on the next segment of each stream; returns the norm of the gradient."""
        optimization, chunks = self.arguments.optimization, len(self.mems)
        targets = self.accelerator.reduce((batch["shift_labels"] != -100).sum(), "sum")
        if optimization.scale_lr_by_length:
            length = int((batch["shift_labels"][0] != -100).sum())
            for group, rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
                group["lr"] = rate * length / self.stream.segment_length
        parts = {name: tensor.chunk(chunks) for name, tensor in batch.items()}
        for i in range(chunks):
            with self.accelerator.accumulate(self.model):
                outputs = self.model(
                    input_ids=parts["input_ids"][i], shift_labels=parts["shift_labels"][i], mems=self.mems[i]
                )
                # The mean over all targets of the step. What is backpropagated will be divided by the number of
                # chunks, and gradients are averaged over processes.
                loss = outputs.losses.sum() * (chunks * self.accelerator.num_processes / targets)
                if self.regularizer is not None:
                    loss = loss + self.regularizer.penalty(parts["shift_labels"][i])
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    grad_norm = self.accelerator.clip_grad_norm_(
                        self.model.parameters(), optimization.max_grad_norm or math.inf
                    )
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.mems[i] = outputs.mems
            self.nll += outputs.losses.detach().sum()
        self.scheduler.step()
        self.targets += targets
        if self.averaged is not None and self.step >= optimization.average_start:
            self.averaged.update_parameters(self.plain_model())
        return grad_norm

    def evaluated_model(self) -> TransfoXLForCausalLM:
        """The average of the weights, once there is one."""
        if self.averaged is not None and self.averaged.n_averaged > 0:
            return self.averaged.module
        return self.plain_model()

    def plain_model(self) -> TransfoXLForCausalLM:
        """The model as it was before it was compiled and distributed, with the weights of now."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def validate(self):
        """Score the validation text, on every process alike, and keep the best model."""
        model = self.evaluated_model()
        result = evaluate(model, self.texts["validation"], self.arguments.evaluation)
        # One decision for all, though their arithmetic may differ.
        [nll] = broadcast_object_list([result.nll])
        if not math.isfinite(nll):
            raise FloatingPointError(f"the validation loss is {nll} after step {self.step}: lower --learning_rate")
        self.log({"validation_loss": nll, **figures(nll, "validation_")})
        if self.accelerator.is_main_process:
            plot(read_log(self.output / LOG), self.output / PLOT, self.arguments.evaluation.metric)
        if nll < self.best:
            self.best = nll
            self.save_model(model)

    # --- log ---------------------------------------------------------------------------------------------------------

    def log_training(self):
        targets, nll = int(self.targets), float(self.accelerator.reduce(self.nll, "sum"))
        now, loss = time.perf_counter(), nll / targets
        self.tokens += targets
        values = {"loss": loss, **figures(loss), "learning_rate": self.optimizer.param_groups[0]["lr"]}
        values |= {"grad_norm": float(self.grad_norm), "tokens_per_second": targets / (now - self.since)}
        self.log(values)
        metric = self.arguments.evaluation.metric
        self.bar.set_postfix_str(f"{metric} {values[metric]:.2f}, {values['tokens_per_second']:.0f} tokens/s")
        self.nll.zero_()
        self.targets.zero_()
        self.since = now

    def log(self, values: dict[str, float]):
        """To TensorBoard, and as a line of the log."""
        self.accelerator.log(values, step=self.step)
        if self.accelerator.is_main_process:
            with (self.output / LOG).open("a") as file:
                file.write(json.dumps({"step": self.step, "tokens": self.tokens, **values}) + "\n")

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def save_model(self, model: TransfoXLForCausalLM):
        """Put a model into the place of the best one."""
        state_dict = self.accelerator.get_state_dict(model, unwrap=False)
        if self.accelerator.is_main_process:
            aside = self.output / f"{UNFINISHED_PREFIX}-{BEST}"
            shutil.rmtree(aside, ignore_errors=True)
            model.save_pretrained(aside, state_dict=state_dict, repo_id=self.output.name)
            self.tokenizer.save_pretrained(aside)
            shutil.rmtree(self.output / BEST, ignore_errors=True)
            os.replace(aside, self.output / BEST)
        self.accelerator.wait_for_everyone()

    def save_checkpoint(self):
        """Write aside, rename when complete, and only then let go of older checkpoints."""
        accelerator, name = self.accelerator, f"checkpoint-{self.step}"
        aside = self.output / f"{UNFINISHED_PREFIX}-{self.step}"
        if accelerator.is_main_process:
            shutil.rmtree(aside, ignore_errors=True)
            (aside / name).mkdir(parents=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(aside / name))
        mems = self.gather_memory()
        if accelerator.is_main_process:
            save_file(mems, aside / name / MEMS_NAME, metadata={"position": json.dumps(self.position())})
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            finish_checkpoint(aside / name, self.output / name)
            rotate_checkpoints(str(self.output), self.arguments.run.save_total_limit)
            for leftover in self.output.glob(f"{UNFINISHED_PREFIX}-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        accelerator.wait_for_everyone()

    def load_checkpoint(self, folder: Path):
        try:
            self.accelerator.load_state(str(folder))
        except RuntimeError as error:
            if "loading state_dict" not in str(error):
                raise
            raise ValueError(f"{folder} has another model: resume with the recipe and options of the run") from error
        with safe_open(folder / MEMS_NAME, "pt") as file:
            saved = json.loads(file.metadata()["position"])
            if saved != self.position():
                raise ValueError(
                    f"{folder} is from a stream at {saved}, but this run would go on at {self.position()}: resume "
                    "with the same text, --batch_size and lengths"
                )
            rows = self.stream.batch_size // self.accelerator.num_processes
            first = self.accelerator.process_index * rows
            layers = [file.get_slice(str(layer))[first : first + rows] for layer in range(len(file.keys()))]
        if layers:
            chunks = [states.to(self.accelerator.device).chunk(len(self.mems)) for states in layers]
            self.mems = list(zip(*chunks, strict=True))

    def gather_memory(self) -> dict[str, Tensor]:
        """What all streams remember: (G, m, D) for each layer, row g that of stream g; nothing without memory."""
        if self.mems[0] is None:
            return {}
        return {
            str(layer): self.accelerator.gather(torch.cat(states).contiguous()).cpu()
            for layer, states in enumerate(zip(*self.mems, strict=True))
        }

    def position(self) -> dict[str, int]:
        """Where the run is in the stream that it reads."""
        names = ("batch_size", "segment_length", "ext_len", "varlen_seed", "steps")
        return {"step": self.step, **{name: getattr(self.stream, name) for name in names}}

    def state_dict(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("step", "tokens", "best")}

    def load_state_dict(self, state: dict[str, float]):
        vars(self).update(state)


# --- what a run is made of -------------------------------------------------------------------------------------------


def load_data(folder: Path) -> tuple[PreTrainedTokenizerBase, datasets.DatasetDict]:
    """What prepare_corpus.py wrote; token ids stay on the disk."""
    if not folder.is_dir():
        problem = "is a file, not a folder" if folder.exists() else "does not exist"
        raise FileNotFoundError(f"--data {folder} {problem}: write one with examples/prepare_corpus.py")
    try:
        corpus = datasets.load_from_disk(str(folder))
    except IndexError as error:
        # This is how it meets a split without rows.
        raise ValueError(f"--data {folder}: the text of a split is empty") from error
    for split in SPLITS:
        if split not in corpus:
            raise ValueError(f"--data {folder} has no split {split!r}, only {', '.join(map(repr, corpus))}")
        if "token_ids" not in corpus[split].column_names:
            raise ValueError(f"--data {folder}: the split {split!r} has no column 'token_ids'")
    return AutoTokenizer.from_pretrained(folder), corpus


def make_config(arguments: ModelArguments, vocab_size: int, data: str) -> TransfoXLConfig:
    """Of a new model, or of a checkpoint with the settings that may change."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    source = given.pop("model_name_or_path", None)
    if source is None:
        if given["cutoffs"] and given["cutoffs"][-1] >= vocab_size:
            raise ValueError(
                f"the vocabulary of --data {data} has {vocab_size} tokens, fewer than the recipe's cutoffs "
                f"{given['cutoffs']}: give smaller ones with --cutoffs, or none with --cutoffs alone"
            )
        return TransfoXLConfig(vocab_size=vocab_size, eos_token_id=None, **{"d_embed": arguments.d_model, **given})
    config = AutoConfig.from_pretrained(source)
    if not isinstance(config, TransfoXLConfig):
        raise ValueError(f"--model_name_or_path {source} is no Transformer-XL, but a {config.model_type} model")
    if vocab_size > config.vocab_size:
        raise ValueError(
            f"the vocabulary of --data {data} has {vocab_size} tokens, but --model_name_or_path {source} has "
            f"{config.vocab_size}: prepare the text with the tokenizer of the model"
        )
    for name, value in given.items():
        if name in CHANGEABLE:
            setattr(config, name, value)
        elif value not in ([], getattr(config, name)):
            raise ValueError(f"--{name} is {value}, but {getattr(config, name)} in {source}: leave it out")
    return config


def check_texts(corpus: datasets.DatasetDict, config: TransfoXLConfig, arguments: Arguments):
    """Raise a ValueError for what training or evaluation would stumble over hours later."""
    batch_size = arguments.evaluation.eval_batch_size
    for split in SPLITS:
        tokens = len(corpus[split])
        if split != "train" and tokens <= batch_size:
            raise ValueError(f"the {split} text has {tokens} tokens, too few for --eval_batch_size {batch_size}")
        ids = pyarrow.compute.min_max(corpus[split].data.column("token_ids")).as_py()
        if ids["min"] < 0 or ids["max"] >= config.vocab_size:
            raise ValueError(
                f"the {split} text holds token ids from {ids['min']} to {ids['max']}, outside the vocabulary "
                f"[0, {config.vocab_size})"
            )


class RolledStream(TokenStream):
    """In every epoch each stream begins at a place of its own, drawn anew, and wraps around (NVIDIA's --roll)."""

    def __init__(self, *args, seed: int, **kwargs):
        super().__init__(*args, **kwargs)
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int):
        self.length = self.steps * self.segment_length
        self.shifts = np.random.default_rng([self.seed, epoch]).integers(self.length, size=self.batch_size)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        step, row = divmod(index, self.batch_size)
        begin = (step * self.segment_length + int(self.shifts[row])) % self.length
        end = begin + self.segment_length + 1
        start = row * self.length
        tokens = read_tokens(self.token_ids, start + begin, start + min(end, self.length))
        if end > self.length:
            tokens = torch.cat([tokens, read_tokens(self.token_ids, start, start + end - self.length)])
        return {"input_ids": tokens[:-1], "shift_labels": tokens[1:].clone()}


def make_stream(token_ids, config: TransfoXLConfig, arguments: Arguments) -> TokenStream:
    data, seed = arguments.data, arguments.run.seed
    if data.roll:
        if data.varlen or config.ext_len:
            raise ValueError("--roll goes together with neither --varlen nor --ext_len")
        return RolledStream(token_ids, config.tgt_len, data.batch_size, seed=seed)
    varlen_seed = seed if data.varlen else None
    return TokenStream(token_ids, config.tgt_len, data.batch_size, ext_len=config.ext_len, varlen_seed=varlen_seed)


def make_accelerator(arguments: Arguments) -> Accelerator:
    run = arguments.run
    accelerator = Accelerator(
        # accelerate's launcher does not tell its processes that they are to train together without an accelerator.
        cpu=not torch.accelerator.is_available(),
        mixed_precision=run.mixed_precision,
        dynamo_backend=run.dynamo_backend,
        # The last step of an epoch is like all others.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            arguments.data.batch_chunk, sync_with_dataloader=False
        ),
        log_with="tensorboard",
        project_dir=run.output,
    )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        # It clips by itself.
        clip = arguments.optimization.max_grad_norm
        accelerator.state.deepspeed_plugin.deepspeed_config["gradient_clipping"] = clip
    return accelerator


def check_output(output: Path, run: RunArguments):
    """Raise a FileExistsError if something would be lost."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / RECIPE).is_file():
        raise FileExistsError(f"--output {output} exists and is not from train_lm.py: choose another folder")
    if not (run.resume or run.overwrite):
        raise FileExistsError(f"--output {output} is in use: go on with --resume, or start again with --overwrite")


def open_output(output: Path, arguments: Arguments):
    """Make the folder of the run, or write the settings that it goes on with."""
    if arguments.run.overwrite:
        shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in arguments.as_dict().items() if name not in ("resume", "overwrite")}
    replace_text(output / RECIPE, yaml.safe_dump(settings, sort_keys=False))


def make_loader(stream: TokenStream, accelerator: Accelerator, batch_chunk: int) -> DataLoader:
    rows, left = divmod(stream.batch_size, accelerator.num_processes * batch_chunk)
    if left:
        raise ValueError(
            f"--batch_size {stream.batch_size} must be a multiple of {accelerator.num_processes} process(es) × "
            f"--batch_chunk {batch_chunk}"
        )
    # With a generator of its own it leaves the one of dropout alone.
    return DataLoader(stream, batch_size=rows * batch_chunk, generator=torch.Generator())


def make_model(config: TransfoXLConfig, arguments: ModelArguments, run: RunArguments) -> TransfoXLForCausalLM:
    settings = {} if run.attn_implementation is None else {"attn_implementation": run.attn_implementation}
    if arguments.model_name_or_path is not None:
        name = arguments.model_name_or_path
        model = AutoModelForCausalLM.from_pretrained(name, config=config, dtype=torch.float32, **settings)
    else:
        model = AutoModelForCausalLM.from_config(config, **settings)
    if run.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def make_optimizer(model: TransfoXLForCausalLM, arguments: OptimizationArguments) -> torch.optim.Optimizer:
    """Adam with L2 regularisation, AdamW, or NVIDIA's LAMB. Tables of embeddings can have a rate of their own."""
    tables = list(model.get_input_embeddings().emb_layers.parameters())
    others = [parameter for parameter in model.parameters() if all(parameter is not table for table in tables)]
    groups = [
        {"params": others},
        {"params": tables, "lr": arguments.learning_rate * arguments.embedding_lr_factor},
    ]
    settings = {
        "lr": arguments.learning_rate,
        "betas": (arguments.beta1, arguments.beta2),
        "weight_decay": arguments.weight_decay,
    }
    if arguments.optimizer == "lamb":
        return make_lamb(groups, eps=arguments.epsilon or 1e-6, **settings)
    kind = torch.optim.AdamW if arguments.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, eps=arguments.epsilon or 1e-8, **settings)


def make_lamb(groups: list[dict], **settings) -> torch.optim.Optimizer:
    """LAMB (You et al., 2019, https://arxiv.org/abs/1904.00962) as NVIDIA trained: the moments are not corrected for
    their bias, the norm of the weights counts up to 10, and the trust ratio applies without weight decay too.
    """
    from pytorch_optimizer import Lamb

    return Lamb(groups, adam_debias=True, weight_decouple=False, **settings)


def make_scheduler(optimizer: torch.optim.Optimizer, arguments: OptimizationArguments, max_steps: int) -> LRScheduler:
    names = {"cosine": "cosine_with_min_lr", "constant": "constant_with_warmup", "inverse_sqrt": "inverse_sqrt"}
    return get_scheduler(
        names[arguments.scheduler],
        optimizer,
        num_warmup_steps=arguments.warmup_steps,
        num_training_steps=max_steps,
        scheduler_specific_kwargs={"min_lr": arguments.min_learning_rate} if arguments.scheduler == "cosine" else {},
    )


def make_average(
    model: TransfoXLForCausalLM, arguments: OptimizationArguments, accelerator: Accelerator
) -> AveragedModel | None:
    if arguments.average == "none":
        return None
    if accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError(f"--average {arguments.average} needs whole weights, which FSDP does not keep: use none")
    average = get_ema_multi_avg_fn(arguments.ema_decay) if arguments.average == "ema" else None
    return AveragedModel(model, device=accelerator.device, multi_avg_fn=average)


# --- evaluation ------------------------------------------------------------------------------------------------------


def evaluate(
    model: TransfoXLForCausalLM,
    token_ids,
    arguments: EvaluationArguments,
    memory_length: int | None = None,
    progress: bool = False,
) -> LanguageModelEvaluation:
    """With the lengths of the recipe, or another memory length."""
    return evaluate_language_model(
        model,
        token_ids,
        segment_length=arguments.eval_tgt_len or model.config.tgt_len,
        memory_length=arguments.eval_mem_len if memory_length is None else memory_length,
        batch_size=arguments.eval_batch_size,
        ext_len=arguments.eval_ext_len,
        clamp_len=arguments.eval_clamp_len,
        same_length=arguments.eval_same_length,
        progress=progress,
    )


def finish(output: Path, texts: dict, arguments: Arguments):
    """Put the best model into its place, and say and write what it scores."""
    if (output / BEST).exists():
        for path in (output / BEST).iterdir():
            os.replace(path, output / path.name)
        (output / RESULTS).unlink(missing_ok=True)
        (output / BEST).rmdir()
    if not (output / RESULTS).exists():
        replace_text(output / RESULTS, json.dumps(score(output, texts, arguments.evaluation), indent=1) + "\n")
    results, metric = json.loads((output / RESULTS).read_text()), arguments.evaluation.metric
    for split in ("validation", "test"):
        print(f"{split}: {metric} {results[split][metric]:.3f}")
    for result in results["memory_lengths"]:
        print(f"test with memory {result['memory_length']}: {metric} {result[metric]:.3f}")


def score(folder: Path, texts: dict, arguments: EvaluationArguments) -> dict[str, Any]:
    """What the model in a folder scores on the validation and the test text, and with other memory lengths."""
    model = AutoModelForCausalLM.from_pretrained(folder).to("cuda" if torch.cuda.is_available() else "cpu")
    results: dict[str, Any] = {
        split: describe(evaluate(model, texts[split], arguments, progress=True)) for split in ("validation", "test")
    }
    results["memory_lengths"] = [
        describe(evaluate(model, texts["test"], arguments, memory_length, progress=True))
        for memory_length in arguments.eval_memory_lengths
    ]
    return results


def describe(evaluation: LanguageModelEvaluation) -> dict[str, float]:
    return {**dataclasses.asdict(evaluation), **figures(evaluation.nll)}


def figures(nll: float, prefix: str = "") -> dict[str, float]:
    """Other ways to say a mean negative log-likelihood in nats."""
    perplexity = math.exp(nll) if nll < 709 else math.inf
    return {f"{prefix}perplexity": perplexity, f"{prefix}bits_per_token": nll / math.log(2)}


# --- log -------------------------------------------------------------------------------------------------------------


def read_log(path: Path) -> list[dict[str, float]]:
    """The lines of a log; one that a killed process left half-written is none."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def cut_log(path: Path, step: int):
    """Forget what came after a step, because it will come again."""
    replace_text(path, "".join(json.dumps(line) + "\n" for line in read_log(path) if line["step"] <= step))


def replace_text(path: Path, text: str):
    """Write a file as a whole or not at all."""
    aside = path.with_name(f"{UNFINISHED_PREFIX}-{path.name}")
    aside.write_text(text)
    os.replace(aside, path)


def plot(log: list[dict[str, float]], path: Path, metric: str):
    """Training and validation against the tokens learned from."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, key, marker in (("training", metric, ""), ("validation", f"validation_{metric}", ".")):
        points = [(line["tokens"], line[key]) for line in log if key in line]
        if points:
            axes.plot(*zip(*points, strict=True), marker=marker, label=name)
    axes.set_xlabel("tokens learned from")
    axes.set_ylabel(metric.replace("_", " "))
    if metric == "perplexity":
        axes.set_yscale("log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    aside = path.with_name(f"{UNFINISHED_PREFIX}-{path.name}")
    figure.savefig(aside, dpi=150)
    os.replace(aside, path)
    plt.close(figure)


if __name__ == "__main__":
    main()
