"""Train a Transformer-XL language model from a recipe.

    txl-train RECIPE --data DIR --output DIR
    txl-train RECIPE --data DIR --output DIR --resume
    txl-train RECIPE --smoke

RECIPE is a YAML file, or the name of one that comes with the package (examples/recipes has those of published
results). It sets any of the options below; the command line wins. DIR of --data is what `txl-prepare`
(examples/prepare_corpus.py) wrote. What is not listed here is in --help-all: all options of transformers'
TrainingArguments.

--output then holds the model that was best in validation, with its tokenizer (for `AutoModelForCausalLM` and
`AutoTokenizer`), `results.json`, the run's log (`log.jsonl`, `training.png`), the settings it ran with
(`recipe.yaml`), and checkpoints, which are complete or absent. Killed at any moment and resumed, a run goes on as if
it had never stopped; on SIGTERM it saves a checkpoint and stops.
"""

import ctypes
import functools
import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow.compute
import torch
import transformers
from accelerate import PartialState
from accelerate.utils import set_seed
from transformers import AutoModelForCausalLM, SchedulerType, get_scheduler

from ..command_line import hub_or_folder, one_line_errors
from ..data.corpora import SPLITS
from ..data.loading import (
    EVENTS,
    check_vocabulary,
    fill_special_tokens,
    load_config,
    load_language_model,
    load_tokenizer,
)
from ..data.streams import RolledStream, TokenStream, open_tokens
from ..data.texts import load_splits, read_document_end
from ..evaluation.cards import RESULTS
from ..evaluation.language_model import evaluate_language_model
from ..evaluation.reading import Reading
from ..files import LOCK_NAME, locked_folder
from ..training.arguments import FREE, TransfoXLTrainingArguments
from ..training.checkpoints import list_checkpoints, remove_unfinished
from ..training.trainer import TransfoXLTrainer
from ..transfo_xl.configuration_transfo_xl import TransfoXLConfig
from ..transfo_xl.modeling_transfo_xl import TransfoXLForCausalLM
from .recipe import RECIPE, Arguments, DataArguments, parse_arguments
from .report import RunReport, finish, save_best

# Constants of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def main(argv: list[str] | None = None):
    with one_line_errors(), tempfile.TemporaryDirectory(prefix="txl-train-") as scratch:
        transformers.logging.disable_progress_bar()
        datasets.disable_progress_bars()
        arguments = parse_arguments(argv, description=__doc__, scratch=Path(scratch))
        is_removed = Path(scratch) in Path(arguments.training.output_dir).parents
        if is_removed and arguments.training.world_size > 1:
            sys.exit("error: --smoke with several processes needs an --output that they share")
        if torch.cuda.is_available():
            # TF32, whose ten bits are enough for a softmax over a vocabulary.
            torch.set_float32_matmul_precision("high")
        if not torch.accelerator.is_available():
            keep_freed_memory()
        try:
            train(arguments)
        except FloatingPointError as error:
            sys.exit(f"error: {error}")
        except KeyboardInterrupt:
            sys.exit("stopped: the same command with --resume goes on from the last checkpoint")
        if is_removed:
            print("this was a trial: its folder is removed now; name one with --output to keep it")


class Prepared(NamedTuple):
    """The texts that a run reads, and the model that it trains.

    Attributes:
        texts: token ids of each split. document_end: token that ends documents; None: each text is one.
        stream: the training text. readings: of validations, and of the finished model with other memory lengths.
        max_steps: steps that all of the training takes.
    """

    tokenizer: Any
    texts: dict[str, Any]
    document_end: int | None
    stream: TokenStream
    readings: list[Reading]
    config: TransfoXLConfig
    max_steps: int


def prepare(arguments: Arguments) -> Prepared:
    """Read the text and the configuration of a run. Raises a ValueError or an OSError for what is invalid."""
    data, args = arguments.data, arguments.training
    tokenizer, corpus = load_data(Path(data.data or ""))
    config = make_config(arguments, tokenizer)
    check_texts(corpus, config, data)
    texts = {split: open_tokens(corpus[split]["token_ids"]) for split in SPLITS}
    document_end = read_document_end(Path(data.data or ""), tokenizer, given := data.document_end)
    if document_end is not None:
        try:
            config.check_documents("documents in --data" if given is None else f"--document_end {given} and --data")
        except ValueError as error:
            raise ValueError(f"{error}, or read the text as one with --document_end none") from None
    readings = make_readings(config, data, document_end)
    fill_special_tokens(config, tokenizer, document_end)
    stream = make_stream(texts["train"], config, arguments, document_end)
    # A remainder is refused with the loader.
    args.per_device_train_batch_size = data.batch_size // (args.world_size * args.gradient_accumulation_steps) or 1
    max_steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * stream.steps)
    check_schedule(args, max_steps)
    return Prepared(tokenizer, texts, document_end, stream, readings, config, max_steps)


def train(arguments: Arguments):
    """Train a model by a recipe, and score it.

    Raises:
        ValueError, OSError: invalid paths, before anything is loaded, and settings, before a file of the run changes.
    """
    output, data, state = Path(arguments.training.output_dir), arguments.data, PartialState()
    check_output(output, data.resume)
    if arguments.model.model_name_or_path is not None:
        hub_or_folder(arguments.model.model_name_or_path)
    prepared = prepare(arguments)
    with locked_output(output, data.resume) if state.is_main_process else nullcontext():
        state.wait_for_everyone()
        steps = [step for step, _ in list_checkpoints(output)] if data.resume else []
        if steps[-1:] != [prepared.max_steps] or not (output / RESULTS).exists():
            trainer = make_trainer(arguments, prepared)
            trainer.train(resume_from_checkpoint=bool(steps))
            is_done = trainer.state.global_step >= prepared.max_steps
            if is_done:
                save_best(trainer, prepared.tokenizer)
            accelerator = trainer.accelerator
            # Before the process group, because DDP's reducer could wait for gloo's threads for ever.
            del trainer
            accelerator.free_memory()
            accelerator.end_training()
            if not is_done:
                sys.exit("stopped: the same command with --resume goes on from the last checkpoint")
        if state.is_main_process:
            progress = not arguments.training.disable_tqdm
            readings = [replace(reading, progress=progress) for reading in prepared.readings]
            finish(output, prepared.texts, readings, data)


def make_trainer(arguments: Arguments, prepared: Prepared) -> TransfoXLTrainer:
    """The trainer of a run with its model, which ends with the weights that were best in validation."""
    args, regularization = arguments.training, arguments.regularization
    model = make_model(arguments, prepared)
    # TrainingArguments would want each checkpoint validated; here each best model is saved.
    args.load_best_model_at_end, args.metric_for_best_model, args.greater_is_better = True, "loss", False
    if args.save_total_limit == 1:
        # Trainer would remove the last one at the end, from which a longer training goes on.
        args.save_total_limit = 2
    # Trainer's constructor sets the seed, but dropout draws after the weights.
    with torch.random.fork_rng():
        trainer = TransfoXLTrainer(
            model,
            args,
            train_dataset=prepared.stream,
            eval_dataset=functools.partial(
                evaluate_language_model, token_ids=prepared.texts["validation"], **vars(prepared.readings[0])
            ),
            regularization=regularization if any(vars(regularization).values()) else None,
        )
    if args.world_size > 1:
        # For dropout; weights are the same in all processes.
        set_seed(args.seed, device_specific=True)
    settings = {name: value for name, value in arguments.settings.items() if name != "resume"}
    trainer.add_callback(RunReport(trainer, settings, arguments.data.metric))
    return trainer


# --- text and streams ------------------------------------------------------------------------------------------------


def load_data(folder: Path) -> tuple[Any, datasets.DatasetDict]:
    """The output of txl-prepare, with a tokenizer of transformers or of MidiTok."""
    if not (folder / "dataset_dict.json").is_file():
        raise FileNotFoundError(f"--data {folder} is no folder of txl-prepare, which writes one")
    corpus = load_splits(folder)
    for split in SPLITS:
        if split not in corpus:
            raise ValueError(f"--data {folder} has no split {split!r}, only {', '.join(map(repr, corpus))}")
        if EVENTS in corpus[split].column_names:
            raise ValueError(f"--data {folder} has compound tokens, which examples/music/compound.py trains on")
        if "token_ids" not in corpus[split].column_names:
            raise ValueError(f"--data {folder}: the split {split!r} has no column 'token_ids'")
    return load_tokenizer(folder), corpus


def check_texts(corpus: datasets.DatasetDict, config: TransfoXLConfig, data: DataArguments):
    """Raise a ValueError for texts on which training or evaluation would fail hours later."""
    for split in SPLITS:
        tokens = len(corpus[split])
        if split != "train" and tokens <= data.eval_batch_size:
            raise ValueError(
                f"the {split} text has {tokens} tokens, too few for --eval_batch_size {data.eval_batch_size}"
            )
        ids = pyarrow.compute.min_max(corpus[split].data.column("token_ids")).as_py()
        if ids["min"] < 0 or ids["max"] >= config.vocab_size:
            raise ValueError(
                f"the {split} text holds token ids from {ids['min']} to {ids['max']}, outside the vocabulary "
                f"[0, {config.vocab_size})"
            )


def make_readings(config: TransfoXLConfig, data: DataArguments, document_end: int | None) -> list[Reading]:
    """How evaluations read a text: with the recipe's lengths, and with each of `eval_memory_lengths`. Raises a
    ValueError for lengths with which one would fail."""
    reading = Reading(
        data.eval_tgt_len or config.tgt_len,
        data.eval_mem_len,
        data.eval_batch_size,
        ext_len=data.eval_ext_len,
        clamp_len=data.eval_clamp_len,
        same_length=data.eval_same_length,
        document_end=document_end,
    )
    readings = [reading, *(replace(reading, memory_length=length) for length in data.eval_memory_lengths)]
    try:
        return [each.of(config) for each in readings]
    except ValueError as error:
        options = "--eval_tgt_len, --eval_ext_len, --eval_mem_len, --eval_memory_lengths"
        raise ValueError(f"an evaluation ({options}): {error}") from None


def check_schedule(args: TransfoXLTrainingArguments, max_steps: int):
    """The default decay of a stable schedule, linear over the last fifth of the steps. Raises a ValueError where a
    schedule does not take its `lr_scheduler_kwargs`."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate)
    if args.lr_scheduler_type == SchedulerType.WARMUP_STABLE_DECAY:
        line = {"num_decay_steps": max_steps // 5, "decay_type": "linear"}
        args.lr_scheduler_kwargs = {**line, **(args.lr_scheduler_kwargs or {})}
    kind, details = args.lr_scheduler_type, args.lr_scheduler_kwargs
    try:
        get_scheduler(kind, optimizer, args.get_warmup_steps(max_steps), max_steps, details)
    except (TypeError, ZeroDivisionError) as error:
        name = getattr(kind, "value", kind)
        raise ValueError(f"--lr_scheduler_type {name} with --lr_scheduler_kwargs {details}: {error}") from error


def make_stream(
    token_ids: Any, config: TransfoXLConfig, arguments: Arguments, document_end: int | None
) -> TokenStream:
    """The training text."""
    data, seed = arguments.data, arguments.training.seed
    length = config.tgt_len * arguments.training.backprop_segments
    if data.roll:
        if document_end is not None or data.varlen or config.ext_len:
            raise ValueError(
                "--roll goes together with neither --varlen, nor --ext_len, nor documents, which --document_end none "
                "reads as one text"
            )
        return RolledStream(token_ids, length, data.batch_size, roll_seed=seed)
    return TokenStream(
        token_ids,
        length,
        data.batch_size,
        ext_len=config.ext_len,
        varlen_seed=seed if data.varlen else None,
        document_end=document_end,
    )


# --- model -----------------------------------------------------------------------------------------------------------


def make_config(arguments: Arguments, tokenizer: Any) -> TransfoXLConfig:
    """The configuration of a new model, or of a checkpoint with changed settings. Raises a ValueError for settings
    that do not fit the text or the checkpoint."""
    given, data = dict(arguments.config), arguments.data
    source, vocab_size = arguments.model.model_name_or_path, len(tokenizer)
    config = TransfoXLConfig() if source is None else load_config(source, "--model_name_or_path")
    if data.loss == "half":
        tgt_len = given.get("tgt_len", config.tgt_len)
        if given.setdefault("ext_len", tgt_len) != tgt_len:
            raise ValueError(f"--loss half reads {tgt_len=} tokens again: leave out --ext_len {given['ext_len']}")
    if source is None:
        if (cutoffs := given.setdefault("cutoffs", [])) and cutoffs[-1] >= vocab_size:
            raise ValueError(
                f"the vocabulary of --data {data.data} has {vocab_size} tokens, fewer than the recipe's cutoffs "
                f"{cutoffs}: give smaller ones with --cutoffs, or none with --cutoffs alone"
            )
        given.setdefault("d_embed", given.get("d_model", config.d_model))
        return TransfoXLConfig(vocab_size=vocab_size, eos_token_id=None, **given)
    check_vocabulary(tokenizer, f"--data {data.data}", source, config)
    for name, value in given.items():
        if name in FREE:
            setattr(config, name, value)
        elif value not in ([], getattr(config, name)):
            raise ValueError(f"--{name} is {value}, but {getattr(config, name)} in {source}: leave it out")
    return config


def make_model(arguments: Arguments, prepared: Prepared) -> TransfoXLForCausalLM:
    """A new model, or that of a checkpoint."""
    config, source = prepared.config, arguments.model.model_name_or_path
    settings = {"attn_implementation": arguments.model.attn_implementation or "auto"}
    set_seed(arguments.training.seed)
    if source is None:
        model = AutoModelForCausalLM.from_config(config, **settings)
    else:
        model = load_language_model(source, config=config, dtype=torch.float32, **settings)
    fill_special_tokens(model.generation_config, prepared.tokenizer, prepared.document_end)
    return model


def keep_freed_memory():
    """Let glibc, if it is there, reuse freed memory. Otherwise each large tensor is mapped anew, page by page, which
    takes a tenth of a step of `wikipedia_small.yaml`."""
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        for parameter in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            mallopt(parameter, 2**31 - 1)


# --- folders ---------------------------------------------------------------------------------------------------------


def check_output(output: Path, resume: bool):
    """Raise a FileExistsError if a file in the output folder would be lost."""
    if not output.exists() or (output.is_dir() and all(path.name == LOCK_NAME for path in output.iterdir())):
        return
    if not (output / RECIPE).is_file():
        raise FileExistsError(f"--output {output} exists and is not from txl-train: choose another folder")
    if not resume:
        raise FileExistsError(f"--output {output} is in use: go on with --resume, or remove it")


@contextmanager
def locked_output(output: Path, resume: bool) -> Iterator[None]:
    """A context that locks the folder of a run, made where it is missing, against other runs."""
    output.mkdir(parents=True, exist_ok=True)
    with locked_folder(output):
        # Another run may have ended there since the first check.
        check_output(output, resume)
        remove_unfinished(output, files=True)
        yield


if __name__ == "__main__":
    main()
