"""What a run of `txl-train` is made of. What cannot be is refused with a ValueError or an OSError."""

import copy
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedType, GradientAccumulationPlugin
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_scheduler

from ..data.loading import check_symbols_of, load_config, load_language_model, load_tokenizer
from ..data.midi import EVENTS
from ..data.streams import TokenStream, as_item, read_tokens
from ..data.texts import load_splits, read_document_end
from ..kernels.attention_triton import fastest_attention
from ..kernels.operators import bf16_is_faster
from ..transfo_xl.configuration_transfo_xl import TransfoXLConfig
from ..transfo_xl.memory_transfo_xl import MemoryLengths
from ..transfo_xl.modeling_transfo_xl import TransfoXLForCausalLM
from ..transfo_xl.tokenization_transfo_xl_backend import WORD_MODES
from .arguments import (
    SPLITS,
    ArchitectureArguments,
    Arguments,
    DataArguments,
    EvaluationArguments,
    ModelArguments,
    OptimizationArguments,
    RunArguments,
    check_data,
)

# In glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3

# --- text and streams ------------------------------------------------------------------------------------------------


def load_data(folder: Path) -> tuple[Any, datasets.DatasetDict]:
    """What txl-prepare wrote, with a tokenizer of transformers or of MidiTok; token ids stay on the disk."""
    check_data(folder)
    corpus = load_splits(folder)
    for split in SPLITS:
        if split not in corpus:
            raise ValueError(f"--data {folder} has no split {split!r}, only {', '.join(map(repr, corpus))}")
        if EVENTS in corpus[split].column_names:
            raise ValueError(f"--data {folder} has compound tokens, which examples/music/compound.py trains on")
        if "token_ids" not in corpus[split].column_names:
            raise ValueError(f"--data {folder}: the split {split!r} has no column 'token_ids'")
    return load_tokenizer(folder), corpus


def check_texts(corpus: datasets.DatasetDict, config: TransfoXLConfig, arguments: Arguments):
    """Raise a ValueError for what training or evaluation would stumble over hours later."""
    evaluation = arguments.evaluation
    batch_size = evaluation.eval_batch_size
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
    # The text of an evaluation may well be shorter than a recipe's memory.
    tokens = max(len(corpus[split]) for split in SPLITS)
    for name in ("eval_mem_len", "eval_memory_lengths"):
        given = getattr(evaluation, name) or 0
        if (longest := max(given) if isinstance(given, list) else given) > tokens:
            raise ValueError(
                f"--{name} {longest} is longer than any text of --data {arguments.data.data}, of at most {tokens} "
                "tokens: give a shorter memory"
            )


def check_memory(config: TransfoXLConfig, data: DataArguments):
    """Raise a ValueError for a memory that is to grow where there is none."""
    if data.mem_warmup_ratio and not config.mem_len:
        raise ValueError(
            f"--mem_warmup_ratio {data.mem_warmup_ratio:g} grows no memory, as mem_len is 0: leave it out"
        )


def check_evaluation(config: TransfoXLConfig, evaluation: EvaluationArguments):
    """Raise a ValueError for lengths with which the first validation, hours later, or the last would end."""
    for memory_length in [evaluation.eval_mem_len, *evaluation.eval_memory_lengths]:
        lengths = MemoryLengths(
            memory_length, evaluation.eval_ext_len, evaluation.eval_clamp_len, evaluation.eval_same_length
        )
        try:
            filled = lengths.of(config)
        except ValueError as error:
            raise ValueError(f"--eval_mem_len or --eval_memory_lengths: {error}") from error
        read = filled.ext_len + (evaluation.eval_tgt_len or config.tgt_len)
        config.positions.check_segment(read, config, given="--eval_tgt_len, with --eval_ext_len,")


def foreign_metric(tokenizer: Any, evaluation: EvaluationArguments) -> str | None:
    """A line for who took a recipe of words for characters, or the other way round; None where nothing is strange."""
    shown, mode = evaluation.metric, getattr(tokenizer, "mode", None)
    if mode in ("characters", "bytes") and shown == "perplexity":
        return (
            f"--data is a text of {mode}, but the figures shown are perplexities, as of words: --metric "
            f"bits_per_token shows bits per {mode[:-1]}"
        )
    if mode in WORD_MODES and shown == "bits_per_token":
        return "--data is a text of words, but the figures shown are bits, as of characters: try --metric perplexity"
    return None


class RolledStream(TokenStream):
    """In every epoch each stream begins at a place of its own, drawn anew, and wraps around (NVIDIA's --roll)."""

    def __init__(self, *args, roll_seed: int, **kwargs):
        super().__init__(*args, **kwargs)
        self.roll_seed = roll_seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int):
        self.length = self.steps * self.segment_length
        self.shifts = np.random.default_rng([self.roll_seed, epoch]).integers(self.length, size=self.batch_size)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        step, row = divmod(index, self.batch_size)
        begin = (step * self.segment_length + int(self.shifts[row])) % self.length
        end = begin + self.segment_length + 1
        start = row * self.length
        tokens = read_tokens(self.token_ids, start + begin, start + min(end, self.length))
        if end > self.length:
            tokens = torch.cat([tokens, read_tokens(self.token_ids, start, start + end - self.length)])
        return as_item(tokens, self.segment_length)


def find_document_end(arguments: Arguments, tokenizer: Any, config: TransfoXLConfig) -> int | None:
    """The token that ends documents; a ValueError where the model cannot begin one inside a segment."""
    given, folder = arguments.data.document_end, arguments.data.data
    document_end = read_document_end(Path(folder or ""), tokenizer, given)
    if document_end is not None:
        try:
            config.check_documents("documents in --data" if given is None else f"--document_end {given} and --data")
        except ValueError as error:
            raise ValueError(f"{error}, or read the text as one with --document_end none") from None
    return document_end


def make_stream(token_ids, config: TransfoXLConfig, arguments: Arguments, document_end: int | None) -> TokenStream:
    """The training text; where it is of documents, each is read without what came before it."""
    data, seed = arguments.data, arguments.run.seed
    if data.roll:
        if document_end is not None:
            raise ValueError(
                f"--roll wraps around one text, but --data {data.data} is of documents: leave it out, or read them as "
                "one with --document_end none"
            )
        if data.varlen or config.ext_len:
            raise ValueError("--roll goes together with neither --varlen nor --ext_len")
        return RolledStream(token_ids, config.tgt_len, data.batch_size, roll_seed=seed)
    varlen_seed = seed if data.varlen else None
    return TokenStream(
        token_ids,
        config.tgt_len,
        data.batch_size,
        loss=data.loss,
        ext_len=config.ext_len,
        varlen_seed=varlen_seed,
        document_end=document_end,
    )


def make_loader(stream: TokenStream, accelerator: Accelerator, batch_chunk: int) -> DataLoader:
    rows, left = divmod(stream.batch_size, accelerator.num_processes * batch_chunk)
    if left:
        raise ValueError(
            f"--batch_size {stream.batch_size} must be a multiple of {accelerator.num_processes} process(es) × "
            f"--batch_chunk {batch_chunk}"
        )
    # A device that computes on its own need not wait for the text: a process reads ahead, into memory from which it is
    # copied meanwhile. On a CPU that process would take the place of the one that computes.
    ahead: dict[str, Any] = {}
    if accelerator.device.type != "cpu":
        ahead = {"num_workers": 1, "prefetch_factor": 8, "pin_memory": True, "worker_init_fn": _leave_interrupts}
    # With a generator of its own it leaves the one of dropout alone.
    return DataLoader(stream, batch_size=rows * batch_chunk, generator=torch.Generator(), **ahead)


def _leave_interrupts(worker: int):
    """Ctrl-C, which reaches all processes, is for the one that started this worker, and asks for what it has read."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


# --- model and accelerator -------------------------------------------------------------------------------------------


def make_config(arguments: ModelArguments, tokenizer: Any, data: DataArguments) -> TransfoXLConfig:
    """Of a new model, or of a checkpoint, whose vocabulary must be the text's, with the settings that may change. With
    `loss="half"` as many tokens are read again as a segment has."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    source, vocab_size = given.pop("model_name_or_path", None), len(tokenizer)
    config = TransfoXLConfig() if source is None else load_config(source, "--model_name_or_path")
    if data.loss == "half":
        tgt_len = given.get("tgt_len", config.tgt_len)
        if given.setdefault("ext_len", tgt_len) != tgt_len:
            raise ValueError(f"--loss half reads {tgt_len=} tokens again: leave out --ext_len {arguments.ext_len}")
    if source is None:
        if given["cutoffs"] and given["cutoffs"][-1] >= vocab_size:
            raise ValueError(
                f"the vocabulary of --data {data.data} has {vocab_size} tokens, fewer than the recipe's cutoffs "
                f"{given['cutoffs']}: give smaller ones with --cutoffs, or none with --cutoffs alone"
            )
        given.setdefault("d_embed", given.get("d_model", config.d_model))
        return TransfoXLConfig(vocab_size=vocab_size, eos_token_id=None, **given)
    if vocab_size > config.vocab_size:
        raise ValueError(
            f"the vocabulary of --data {data.data} has {vocab_size} tokens, but --model_name_or_path {source} has "
            f"{config.vocab_size}: prepare the text with the tokenizer of the model"
        )
    check_symbols_of(source, tokenizer, f"--data {data.data}")
    fixed = {entry.name for entry in fields(ArchitectureArguments)}
    for name, value in given.items():
        if name not in fixed:
            setattr(config, name, value)
        elif value not in ([], getattr(config, name)):
            raise ValueError(f"--{name} is {value}, but {getattr(config, name)} in {source}: leave it out")
    return config


def make_model(config: TransfoXLConfig, arguments: ModelArguments, run: RunArguments) -> TransfoXLForCausalLM:
    implementation = run.attn_implementation or fastest_attention(config.n_head, config.d_head)
    settings = {} if implementation is None else {"attn_implementation": implementation}
    if arguments.model_name_or_path is not None:
        model = load_language_model(arguments.model_name_or_path, config=config, dtype=torch.float32, **settings)
    else:
        model = AutoModelForCausalLM.from_config(config, **settings)
    if run.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def keep_freed_memory():
    """Tell glibc, if it is there, to give tensors the memory of earlier ones.

    Otherwise it asks the system anew for each that is large, and gets it page by page: 76,000 pages in a step of
    `wikipedia_small.yaml`, a tenth of its seconds.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        for parameter in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            mallopt(parameter, 2**31 - 1)


def make_accelerator(arguments: Arguments) -> Accelerator:
    run = arguments.run
    if torch.cuda.is_available():
        # What is computed in fp32 beside it; ten bits of the factors are enough for a softmax over a vocabulary.
        torch.set_float32_matmul_precision("high")
    if not torch.accelerator.is_available():
        keep_freed_memory()
    accelerator = Accelerator(
        # accelerate's launcher does not tell its processes that they are to train together without an accelerator.
        cpu=not torch.accelerator.is_available(),
        mixed_precision=precision_of(run),
        dynamo_backend=run.dynamo_backend,
        # The last step of an epoch is like all others.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            arguments.data.batch_chunk, sync_with_dataloader=False
        ),
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
        log_with="tensorboard",
        project_dir=run.output,
    )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        # It clips by itself.
        clip = arguments.optimization.max_grad_norm
        accelerator.state.deepspeed_plugin.deepspeed_config["gradient_clipping"] = clip
    if accelerator.distributed_type == DistributedType.FSDP and arguments.optimization.optimizer == "lamb":
        # It clamps a norm in place, which PyTorch has not for a sharded weight.
        raise ValueError("--optimizer lamb needs whole weights, which FSDP does not keep: use adam, adamw or muon")
    return accelerator


def take_autocast(accelerator: Accelerator, model: TransfoXLForCausalLM) -> Callable[[], AbstractContextManager]:
    """What the caller is to put around the calls of a prepared model, in the place of what accelerate has.

    Accelerate also brings all that the model returns to fp32: its memory too, which the next step would round again.

    Args:
        model: as it is behind its wrappers.
    """
    if accelerator.mixed_precision not in ("bf16", "fp16") or model.__dict__.pop("forward", None) is None:
        return nullcontext
    return accelerator.autocast


# Accelerate's names of precisions, and everyone's.
PRECISIONS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}


def precision_of(run: RunArguments) -> str:
    """As asked for, here or of `accelerate launch`; else bf16 on a GPU that has it, on a CPU if it is faster."""
    if precision := run.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION"):
        return precision
    if torch.cuda.is_available():
        # GPUs before Ampere emulate it, at a fraction of the speed of fp32.
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_bf16 = not torch.accelerator.is_available() and bf16_is_faster()
    return "bf16" if has_bf16 else "no"


# --- optimiser -------------------------------------------------------------------------------------------------------


def make_optimizer(model: TransfoXLForCausalLM, arguments: OptimizationArguments) -> torch.optim.Optimizer:
    """Adam with L2 regularisation, AdamW, NVIDIA's LAMB or Muon. Tables of embeddings can have a rate of their own."""
    # A model of vectors has none.
    tables = list(model.get_input_embeddings().emb_layers.parameters()) if model.config.vocab_size else []
    others = [parameter for parameter in model.parameters() if all(parameter is not table for table in tables)]
    groups: list[dict[str, Any]] = [{"params": others}]
    if tables:
        groups.append({"params": tables, "lr": arguments.learning_rate * arguments.embedding_lr_factor})
    settings: dict[str, Any] = {
        "lr": arguments.learning_rate,
        "betas": (arguments.beta1, arguments.beta2),
        "weight_decay": arguments.weight_decay,
        "eps": epsilon_of(arguments),
    }
    if arguments.optimizer == "muon":
        return make_muon(model, groups, arguments)
    if arguments.optimizer == "lamb":
        return make_lamb(groups, **settings)
    kind = torch.optim.AdamW if arguments.optimizer == "adamw" else torch.optim.Adam
    # One pass over the weights in place of one for each operation.
    return kind(groups, fused=True, **settings)


def epsilon_of(arguments: OptimizationArguments) -> float:
    """What is added to the root of the second moment."""
    if arguments.epsilon is not None:
        return arguments.epsilon
    return 1e-6 if arguments.optimizer == "lamb" else 1e-8


def make_lamb(groups: list[dict], **settings) -> torch.optim.Optimizer:
    """LAMB (You et al., 2019, https://arxiv.org/abs/1904.00962) as NVIDIA trained: the moments are not corrected for
    their bias, the norm of the weights counts up to 10, and the trust ratio applies without weight decay too.
    """
    from pytorch_optimizer import Lamb

    return Lamb(groups, adam_debias=True, weight_decouple=False, **settings)


def make_muon(
    model: TransfoXLForCausalLM, groups: list[dict], arguments: OptimizationArguments
) -> torch.optim.Optimizer:
    """Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon) for the matrices of the layers, whose
    momentum it makes orthogonal, and AdamW for the rest. A step of Muon is made as long as AdamW's are (Liu et al.,
    2025, https://arxiv.org/abs/2502.16982, Section 2.2), so that one learning rate does for both.
    """
    from pytorch_optimizer import Muon

    transformer: Any = getattr(model, "transformer", model)
    layers = {id(parameter) for parameter in transformer.layers.parameters() if parameter.dim() == 2}
    # The biases u and v are no matrices, though they have two dimensions.
    layers -= {id(parameter) for name, parameter in model.named_parameters() if name.endswith("_bias")}
    matrices = [parameter for group in groups for parameter in group["params"] if id(parameter) in layers]
    rest = [group | {"params": [p for p in group["params"] if id(p) not in layers]} for group in groups]
    rate, decay = arguments.learning_rate, arguments.weight_decay
    optimizer = Muon(
        [{"params": matrices, "use_muon": True}, *(group | {"use_muon": False} for group in rest)],
        lr=rate * arguments.muon_lr_factor,
        weight_decay=decay,
        use_adjusted_lr=True,
        adamw_lr=rate,
        adamw_betas=(arguments.beta1, arguments.beta2),
        adamw_wd=decay,
        adamw_eps=epsilon_of(arguments),
    )
    # Where the cosine looks for the rate that its smallest is a part of.
    optimizer.defaults["lr"] = rate
    return optimizer


def make_scheduler(optimizer: torch.optim.Optimizer, arguments: OptimizationArguments, max_steps: int) -> LRScheduler:
    """Learning rates as a function of the steps done, which is all that resuming needs to know of them."""
    if arguments.scheduler == "stable_decay":
        return LambdaLR(optimizer, stable_decay(arguments, max_steps))
    names = {"cosine": "cosine_with_min_lr", "constant": "constant_with_warmup", "inverse_sqrt": "inverse_sqrt"}
    return get_scheduler(
        names[arguments.scheduler],
        optimizer,
        num_warmup_steps=arguments.warmup_steps,
        num_training_steps=max_steps,
        scheduler_specific_kwargs={"min_lr": arguments.min_learning_rate} if arguments.scheduler == "cosine" else {},
    )


def stable_decay(arguments: OptimizationArguments, max_steps: int) -> Callable[[int], float]:
    """By what the learning rate is multiplied: up, constant, and down to the smallest rate in a straight line."""
    warmup, end = arguments.warmup_steps, arguments.min_learning_rate / arguments.learning_rate
    decay = max_steps // 5 if arguments.decay_steps is None else arguments.decay_steps
    if warmup + decay > max_steps:
        raise ValueError(f"--warmup_steps {warmup} and --decay_steps {decay} are more than all {max_steps} steps")

    def factor(step: int) -> float:
        left = max(0, max_steps - step) / max(1, decay)
        return min(step / warmup if warmup else 1.0, 1.0, end + (1 - end) * left)

    return factor


class AverageOfWeights(nn.Module):
    """The mean of a model's weights after each of some steps, or one in which older steps count less and less.

    `AveragedModel` has it too, with a count on the device, for which the host would wait two or three times a step.

    Args:
        decay: by which a step counts less with each that follows; None: all count alike.

    Attributes:
        module: a copy of the model, with the average once `steps` is not 0.
        steps: how many have been averaged.
    """

    def __init__(self, model: TransfoXLForCausalLM, decay: float | None):
        super().__init__()
        self.module, self.decay, self.steps = copy.deepcopy(model), decay, 0

    @torch.no_grad()
    def update(self, model: TransfoXLForCausalLM):
        """Take in the weights of now."""
        share = 1 / (self.steps + 1) if self.decay is None or self.steps == 0 else 1 - self.decay
        torch._foreach_lerp_(list(self.module.parameters()), list(model.parameters()), share)
        self.steps += 1

    def get_extra_state(self) -> int:
        return self.steps

    def set_extra_state(self, state: int):
        self.steps = state


def make_average(
    model: TransfoXLForCausalLM, arguments: OptimizationArguments, max_steps: int, accelerator: Accelerator
) -> AverageOfWeights | None:
    if arguments.average == "none":
        return None
    if arguments.average_start >= max_steps:
        raise ValueError(
            f"--average_start is {arguments.average_start}, but must be less than all {max_steps} steps, so that "
            "something is averaged"
        )
    if accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError(f"--average {arguments.average} needs whole weights, which FSDP does not keep: use none")
    decay = arguments.ema_decay if arguments.average == "ema" else None
    return AverageOfWeights(model, decay).to(accelerator.device)
