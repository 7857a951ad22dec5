"""What `txl-train` can be told: in a recipe (YAML), and on the command line, which wins.

To read options imports nothing slow; what needs torch or datasets imports them itself.
"""

import argparse
import ast
import difflib
import json
import math
import sys
import threading
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

import yaml  # type: ignore[import-untyped]
from transformers import HfArgumentParser

from ..command_line import CommandParser, hub_or_folder
from ..files import LOCK_NAME
from .regularization_arguments import RegularizationArguments

SPLITS = ("train", "validation", "test")
# What a run leaves in its folder of its settings.
RECIPE = "recipe.yaml"
# Whole numbers are at least 1, but for these.
OrZero = Annotated[int, 0]
OrNegative = Annotated[int, None]


def option(text: str, default: Any = None) -> Any:
    """A field of an argument class with its line in --help."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": text})
    return field(default=default, metadata={"help": text})


@dataclass
class ArchitectureArguments:
    """What weights are made for, so that fine-tuning cannot change it."""

    _argument_group_name = "model"

    n_layer: int | None = option("Layers.")
    d_model: int | None = option("Width of the hidden states.")
    d_embed: int | None = option("Width of the embeddings of bin 0.")
    n_head: int | None = option("Attention heads.")
    d_head: int | None = option("Width of a head.")
    d_inner: int | None = option("Width of the feed-forward layer.")
    cutoffs: list[int] = option("Where the bins of the adaptive input and softmax end; none: one bin.", [])
    div_val: int | None = option("By what the width of the embeddings shrinks from bin to bin.")
    pre_lnorm: bool | None = option("Layer normalisation before each sub-layer.")
    gating: Literal["gru"] | None = option("Gates of GTrXL in place of sums; it normalises before each sub-layer too.")
    gate_bias: float | None = option("How nearly shut the gates begin.")
    untie_r: bool | None = option("Biases u and v for each layer.")
    tie_word_embeddings: bool | None = option("The softmax uses the embeddings as its weights.")
    proj_share_all_but_first: bool | None = option("The softmax shares the projections of the tail bins.")
    proj_same_dim: bool | None = option("With div_val > 1, project a bin of width d_model too.")
    layer_norm_epsilon: float | None = option("Epsilon of the layer normalisation.")
    init: Literal["normal", "uniform"] | None = option("Distribution of initial weights.")
    init_range: float | None = option("Bound of initial weights, where uniform.")
    init_std: float | None = option("Deviation of initial weights, where normal.")
    proj_init_std: float | None = option("Deviation of initial projections of the embeddings.")
    initial_memory: Literal["zeros", "empty"] | None = option("What precedes the first segment.")
    same_length_counts_self: bool | None = option("With same_length: whether a query is one of its mem_len keys.")
    attn_type: OrZero | None = option("0: relative (Transformer-XL), 1: Shaw, 2: Vaswani, 3: Al-Rfou.")


@dataclass
class ModelArguments(ArchitectureArguments):
    """`TransfoXLConfig` says what its fields mean. What is not given is as it has it, or as the checkpoint has it."""

    model_name_or_path: str | None = option("Checkpoint to fine-tune; without one a new model is trained.")
    dropout: float | None = option("Dropout.")
    dropatt: float | None = option("Dropout of attention probabilities.")
    tgt_len: int | None = option("Segment length.")
    mem_len: OrZero | None = option("Memory length.")
    ext_len: OrZero | None = option("Extended context: so many tokens before each segment are read again.")
    clamp_len: OrNegative | None = option("Distances beyond it share one position; -1: no clamping.")
    same_length: bool | None = option("Every query sees the same number of keys.")


@dataclass
class DataArguments:
    _argument_group_name = "data"

    data: str | None = option("Folder that txl-prepare wrote.")
    batch_size: int = option("Streams of one step, of all processes together.", 16)
    batch_chunk: int = option(
        "Parts in which a process computes its streams, to need less memory. With documents --tar is the mean of the "
        "means of parts and processes, which is nearly that of all.",
        1,
    )
    varlen: bool = option("Segment lengths that vary from step to step, around tgt_len.", False)
    mem_warmup_ratio: float = option("Part of all steps over which the memory grows from 1 to mem_len.", 0.0)
    loss: Literal["full", "half"] = option(
        "full: each token of a segment is predicted; half: those of its second half, after tgt_len tokens that are "
        "read again (ext_len = tgt_len), as the paper's baselines need.",
        "full",
    )
    document_end: str | None = option(
        "Token that ends each document, from within which nothing before it is seen; none: the text is one. As the "
        "data was prepared, if not given."
    )
    roll: bool = option("In every epoch each stream begins at another place of its text, and wraps around.", False)


@dataclass
class EvaluationArguments:
    _argument_group_name = "evaluation"

    eval_every: int = option("Steps between two validations; there is one at the end, too.", 4000)
    eval_batch_size: int = option("Streams of an evaluation.", 10)
    eval_tgt_len: int | None = option("Tokens scored in one pass.")
    eval_mem_len: OrZero | None = option("Memory length.")
    eval_ext_len: OrZero | None = option("Extended context.")
    eval_clamp_len: OrNegative | None = option("Distances beyond it share one position.")
    eval_same_length: bool | None = option("Every query sees the same number of keys.")
    eval_memory_lengths: list[int] = option("Also evaluate the finished model with these memory lengths.", [])
    metric: Literal["perplexity", "bits_per_token"] = option("What is shown; both are logged.", "perplexity")


@dataclass
class OptimizationArguments:
    _argument_group_name = "optimisation"

    max_steps: int | None = option("Steps to train for.")
    max_epochs: float | None = option("Epochs to train for, instead of max_steps.")
    optimizer: Literal["adam", "adamw", "lamb", "muon"] = option(
        "adam has its weight decay in the gradient (L2); muon is for the layers' matrices, with adamw for the rest.",
        "adam",
    )
    learning_rate: float = option("Learning rate at its highest.", 2.5e-4)
    embedding_lr_factor: float = option("By what the learning rate of the embeddings is multiplied.", 1.0)
    muon_lr_factor: float = option("By what the learning rate of the matrices is multiplied under muon.", 1.0)
    weight_decay: float = option("Weight decay.", 0.0)
    beta1: float = option("Decay of the first moment.", 0.9)
    beta2: float = option("Decay of the second moment.", 0.999)
    epsilon: float | None = option("Added to the root of the second moment; by default 1e-8, for LAMB 1e-6.")
    scheduler: Literal["cosine", "inverse_sqrt", "constant", "stable_decay"] = option(
        "What follows the warm-up; stable_decay: constant, and at the end a straight line.", "cosine"
    )
    decay_steps: OrZero | None = option("With stable_decay, steps of the line; by default a fifth of all.")
    warmup_steps: OrZero = option("Steps over which the learning rate rises from 0.", 0)
    min_learning_rate: float = option("Where the cosine, or the line of stable_decay, ends (eta_min).", 0.0)
    scale_lr_by_length: bool = option("Scale the learning rate by the segment's length over tgt_len.", False)
    max_grad_norm: float = option("Clip gradients to this norm; 0: do not.", 0.25)
    average: Literal["none", "ema", "equal"] = option("Evaluate and save an average of the weights.", "none")
    average_start: OrZero = option("Step after which the average begins.", 0)
    ema_decay: float = option("Decay of the average, where it is exponential.", 0.9999)


@dataclass
class RunArguments:
    _argument_group_name = "run"

    output: str | None = option("Folder to write.")
    resume: bool = option("Go on from the last complete checkpoint in output, if there is one.", False)
    overwrite: bool = option("Delete what an earlier run has written to output.", False)
    smoke: bool = option("A few steps of a shrunken model on a small text, else as in the recipe.", False)
    seed: OrZero = option("Seed of weights, dropout and orders.", 1111)
    log_every: int = option("Steps between two lines of the log.", 200)
    save_every: int = option("Steps between two checkpoints.", 4000)
    save_total_limit: int = option("Checkpoints to keep.", 2)
    attn_implementation: str | None = option("Attention backend. By default txl_triton on a GPU that can take it.")
    gradient_checkpointing: bool = option("Compute activations twice, to need less memory.", False)
    mixed_precision: Literal["no", "fp16", "bf16"] | None = option(
        "By default what accelerate launch says; if nothing, bf16 on a GPU that has it, a CPU with AMX, or one of "
        "AMD's with AVX512_BF16."
    )
    dynamo_backend: str | None = option(
        "Compile the whole model, e.g. with inductor. By default what accelerate launch says."
    )
    compile_layers: bool | None = option(
        "Compile each layer, one graph for all of them. By default on a GPU, where the whole model is not compiled "
        "and no dropout is put around layers."
    )
    cuda_graphs: bool | None = option(
        "Launch the kernels of a step together, on one GPU and for a vocabulary without cutoffs and a text that is "
        "one. By default where the steps are small, and can be captured."
    )


class Arguments(NamedTuple):
    model: ModelArguments
    data: DataArguments
    evaluation: EvaluationArguments
    optimization: OptimizationArguments
    regularization: RegularizationArguments
    run: RunArguments

    def as_dict(self) -> dict[str, Any]:
        """What was chosen, as in a recipe: without what is None or empty."""
        values = {name: value for group in self for name, value in vars(group).items()}
        return {name: value for name, value in values.items() if value not in (None, [])}


class Formatter(argparse.RawDescriptionHelpFormatter):
    """The description as it stands, and behind each option the value that will hold."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, value = action.help or "", action.default
        if value in (None, argparse.SUPPRESS) or not action.option_strings:
            # The text says what holds, or there is nothing.
            return text
        shown = "none" if value == [] else " ".join(map(str, value)) if isinstance(value, list) else value
        return f"{text} (default: {str(shown).replace('%', '%%')})"


# transformers' parser writes into the fields of the groups while it reads them, and threads share these.
_READING_FIELDS = threading.Lock()


class Parser(HfArgumentParser, CommandParser):
    """Options in groups."""

    def __init__(self, groups: list[type], **settings):
        usage = "%(prog)s RECIPE [options]"
        settings |= {"formatter_class": Formatter, "allow_abbrev": False, "usage": usage}
        with _READING_FIELDS:
            super().__init__(groups, **settings)  # type: ignore[arg-type]  # HfArgumentParser's, which mypy skips.
        for action in self._actions:
            if action.option_strings != ["-h", "--help"]:
                # The other spelling is understood, and not shown.
                action.option_strings = action.option_strings[:1]
            # `--cutoffs` alone takes back a recipe's cutoffs.
            if action.nargs == "+":
                action.nargs = "*"

    def error(self, message: str):
        self.exit(2, f"error: {message}\n")


def parse_arguments(argv: list[str] | None = None, description: str | None = None) -> Arguments:
    """The recipe's settings, and over them those of the command line.

    Raises:
        SystemExit: with a one-line message, for a setting that does not exist or cannot be read.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(list(Arguments.__annotations__.values()), description=description)
    parser.add_argument("recipe", type=Path, help="YAML file; examples/recipes has the published ones")
    if {"-h", "--help"} & {*argv}:
        explain(parser, argv)
    settings = read_settings(parser, parser.parse_args(argv).recipe, argv)
    try:
        arguments = Arguments(*parser.parse_dict(vars(settings), allow_extra_keys=True))
        check_arguments(arguments)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def read_settings(parser: Parser, recipe: Path, argv: list[str]) -> argparse.Namespace:
    """A recipe's settings, and over them those of the command line, without what these leave no use for."""
    settings = parser.parse_args([str(recipe), *recipe_options(recipe)])
    settings = parser.parse_args(argv, namespace=settings)
    typed = {argument.partition("=")[0].replace("-", "_")[2:] for argument in argv if argument.startswith("--")}
    forget_length(settings, typed)
    forget_decay(settings, typed)
    forget_memory(settings, typed)
    return settings


def explain(parser: Parser, argv: list[str]):
    """Print the help with the values that will hold: of the recipe, if it is on the command line, and of the model."""
    given = [argument for argument in argv if argument not in ("-h", "--help")]
    if given and not given[0].startswith("-"):
        parser.set_defaults(**vars(read_settings(parser, Path(given[0]), given)))
    holding = {action.dest: action.default for action in parser._actions}
    model = defaults_of_model(holding["model_name_or_path"])
    # As make_config has it.
    if holding["model_name_or_path"] is None:
        model["d_embed"] = holding["d_model"] or model["d_model"]
    for name, value in holding.items():
        if value is None:
            # Lengths of an evaluation are those of the training.
            length = holding.get(name.removeprefix("eval_"))
            parser.set_defaults(**{name: model.get(name.removeprefix("eval_")) if length is None else length})
    parser.print_help()
    parser.exit()


def defaults_of_model(checkpoint: str | None) -> dict[str, Any]:
    """The fields of a configuration with the values that they have if nobody gives any: those of `TransfoXLConfig`, or
    those of a checkpoint in a folder. They are read from the source, because the class would bring torch.
    """
    source = Path(__file__).parents[1] / "transfo_xl" / "configuration_transfo_xl.py"
    [config] = [node for node in ast.parse(source.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    found = {
        field.target.id: ast.literal_eval(field.value)
        for field in config.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value is not None
    }
    if checkpoint is None:
        return found
    try:
        saved = json.loads((Path(checkpoint) / "config.json").read_text(encoding="utf-8"))
        return {name: saved.get(name, value) for name, value in found.items()}
    except (OSError, ValueError, AttributeError):
        # Of the Hub, or none: only loading it will tell.
        return dict.fromkeys(found, "the checkpoint's")


def forget_length(settings: argparse.Namespace, typed: set[str]):
    """A number of steps on the command line replaces the recipe's number of epochs, and the other way round."""
    for name, other in (("max_steps", "max_epochs"), ("max_epochs", "max_steps")):
        if name in typed and other not in typed:
            setattr(settings, other, None)


def forget_decay(settings: argparse.Namespace, typed: set[str]):
    """A schedule without a line at its end, chosen on the command line, has no use for the length of the recipe's."""
    if "scheduler" in typed and "decay_steps" not in typed and settings.scheduler != "stable_decay":
        settings.decay_steps = None


def forget_memory(settings: argparse.Namespace, typed: set[str]):
    """An encoding without recurrence, chosen on the command line, has no use for the recipe's memory in evaluation."""
    if not settings.attn_type:
        # The paper's has; nothing slow is imported to know that.
        return
    from ..transfo_xl.positions_transfo_xl import POSITIONS

    if settings.attn_type in POSITIONS and not POSITIONS[settings.attn_type].recurrent:
        for name, without in (("eval_mem_len", 0), ("eval_memory_lengths", [])):
            if name not in typed and getattr(settings, name):
                setattr(settings, name, without)


def recipe_options(recipe: Path) -> list[str]:
    """A recipe as command-line options, so that its values are read as theirs are."""
    try:
        settings = yaml.safe_load(recipe.read_text(encoding="utf-8")) or {}
    except OSError as error:
        sys.exit(f"error: the recipe {recipe} cannot be read: {error.strerror}")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        sys.exit(f"error: the recipe {recipe} is no YAML: {' '.join(str(error).split())}")
    if not isinstance(settings, dict):
        sys.exit(f"error: the recipe {recipe} must hold lines 'name: value'")
    names = [entry.name for group in Arguments.__annotations__.values() for entry in fields(group)]
    options = []
    for name, value in settings.items():
        if name not in names:
            closest = difflib.get_close_matches(str(name), names, n=1, cutoff=0.0)[0]
            sys.exit(f"error: {recipe} sets {name!r}, which does not exist; the closest name is {closest!r}")
        if value is not None and value != []:
            options += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return options


def check_arguments(arguments: Arguments):
    """Raise a ValueError for settings that do not fit together."""
    for group in arguments:
        for name, kind in get_type_hints(type(group), include_extras=True).items():
            # The number with its bound, or one of None and such a number.
            bounds = [bound for part in (kind, *get_args(kind)) for bound in getattr(part, "__metadata__", ())]
            least = bounds[0] if bounds else 1
            value = getattr(group, name)
            if isinstance(value, int) and not isinstance(value, bool) and least is not None and value < least:
                raise ValueError(f"--{name} is {value}, but must be at least {least}")
    optimization, run = arguments.optimization, arguments.run
    if (optimization.max_steps is None) == (optimization.max_epochs is None):
        raise ValueError("set one of --max_steps and --max_epochs")
    if optimization.max_epochs is not None and not 0 < optimization.max_epochs < math.inf:
        raise ValueError(f"--max_epochs is {optimization.max_epochs:g}, but must be above 0, and finite")
    if not 0 <= arguments.data.mem_warmup_ratio <= 1:
        raise ValueError(f"--mem_warmup_ratio is {arguments.data.mem_warmup_ratio:g}, but must be from 0 to 1")
    check_rates(optimization)
    if (
        arguments.model.gate_bias is not None
        and arguments.model.gating is None
        and not arguments.model.model_name_or_path
    ):
        raise ValueError(f"--gate_bias {arguments.model.gate_bias:g} is of --gating gru: leave it out")
    if not run.smoke:
        for name, value in (("data", arguments.data.data), ("output", run.output)):
            if value is None:
                raise ValueError(f"--{name} is missing: name a folder, or try the recipe with --smoke")
    if run.resume and run.overwrite:
        raise ValueError("choose one of --resume and --overwrite")


def check_rates(optimization: OptimizationArguments):
    """Raise a ValueError for rates below 0 or out of order, and for what scheduler or optimiser do not read."""
    for name in ("learning_rate", "embedding_lr_factor", "muon_lr_factor", "weight_decay"):
        if not 0 <= (value := getattr(optimization, name)) < math.inf:
            raise ValueError(f"--{name} is {value:g}, but must be at least 0, and finite")
    for name in ("beta1", "beta2"):
        if not 0 <= (value := getattr(optimization, name)) < 1:
            raise ValueError(f"--{name} is {value:g}, but must be at least 0 and below 1")
    if (epsilon := optimization.epsilon) is not None and not 0 <= epsilon < math.inf:
        raise ValueError(f"--epsilon is {epsilon:g}, but must be at least 0, and finite")
    if not optimization.max_grad_norm >= 0:
        raise ValueError(f"--max_grad_norm is {optimization.max_grad_norm:g}, but must be above 0, or 0 not to clip")
    rate, least = optimization.learning_rate, optimization.min_learning_rate
    if not 0 <= least <= rate:
        raise ValueError(
            f"--min_learning_rate is {least:g}, but must be at least 0 and at most --learning_rate {rate:g}"
        )
    ends = ("cosine", "stable_decay")
    if rate == 0 and optimization.scheduler in ends:
        raise ValueError(f"--learning_rate 0 cannot fall as --scheduler {optimization.scheduler} has it: use constant")
    if least and optimization.scheduler not in ends:
        raise ValueError(f"--min_learning_rate {least:g} is of --scheduler {' and '.join(ends)}: set it to 0")
    if optimization.scheduler == "inverse_sqrt" and optimization.warmup_steps == 0:
        raise ValueError("--scheduler inverse_sqrt falls with the steps over --warmup_steps: give how many these are")
    if optimization.decay_steps is not None and optimization.scheduler != "stable_decay":
        raise ValueError(f"--decay_steps {optimization.decay_steps} is of --scheduler stable_decay: leave it out")
    if not 0 <= optimization.ema_decay < 1:
        raise ValueError(f"--ema_decay is {optimization.ema_decay:g}, but must be at least 0 and below 1")
    if optimization.average_start and optimization.average == "none":
        raise ValueError(f"--average_start {optimization.average_start} is of --average ema and equal: set it to 0")
    if optimization.muon_lr_factor != 1 and optimization.optimizer != "muon":
        raise ValueError(f"--muon_lr_factor {optimization.muon_lr_factor:g} is of --optimizer muon: set it to 1")


def check_folders(arguments: Arguments):
    """Refuse before anything slow is imported a text that is not there, and a folder in which something would be lost.

    Raises:
        OSError: with what would be right.
    """
    data, model, run = arguments.data.data, arguments.model.model_name_or_path, arguments.run
    if run.output is not None:
        check_output(Path(run.output), run)
    if run.smoke:
        return
    if model is not None:
        check_model(model)
    if data is not None:
        check_data(Path(data))
    if run.overwrite and run.output is not None:
        check_kept(Path(run.output), {"data": data, "model_name_or_path": model})


def check_data(folder: Path):
    """Raise a FileNotFoundError if there is no folder of a tokenised text."""
    if not (folder / "dataset_dict.json").is_file():
        problem = "does not exist"
        if folder.exists():
            problem = "is no tokenised text" if folder.is_dir() else "is a file, not a folder"
        raise FileNotFoundError(f"--data {folder} {problem}: write one with txl-prepare")


def check_model(name: str):
    """Raise a FileNotFoundError for a path that leads nowhere."""
    try:
        hub_or_folder(name)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"--model_name_or_path {error}") from None


def check_output(output: Path, run: RunArguments):
    """Raise a FileExistsError if something would be lost."""
    if not output.exists() or (output.is_dir() and all(path.name == LOCK_NAME for path in output.iterdir())):
        return
    # filelock may remove its file when a run ends.
    if not (output / RECIPE).is_file():
        raise FileExistsError(f"--output {output} exists and is not from txl-train: choose another folder")
    if not (run.resume or run.overwrite):
        raise FileExistsError(f"--output {output} is in use: go on with --resume, or start again with --overwrite")


def check_kept(output: Path, read: dict[str, str | None]):
    """Raise a FileExistsError if what a run reads, by the name of its option, would be deleted before."""
    folder = output.resolve()
    for name, given in read.items():
        if given is None or not (path := Path(given).resolve()).is_relative_to(folder):
            continue
        # Which names are a run's, libraries know that take seconds to import.
        from .results import is_written

        inside = path.relative_to(folder).parts
        if not inside or is_written(folder / inside[0]):
            raise FileExistsError(f"--overwrite would delete --{name} {given}: choose another --output")


def shrink(arguments: Arguments, scratch: Path):
    """For --smoke: a few steps of a small model on a small text, all else as it was. Lengths keep their ratios."""
    from ..transfo_xl.positions_transfo_xl import POSITIONS

    model, data, evaluation, optimization, _, run = arguments
    data.data = str(scratch / "data")
    vocab_size = write_smoke_data(scratch / "data")
    run.output = run.output or str(scratch / "output")

    scale = 16 / (model.tgt_len or 16)
    for group, prefix in ((model, ""), (evaluation, "eval_")):
        for name in ("tgt_len", "mem_len", "ext_len", "clamp_len"):
            length = getattr(group, prefix + name)
            if length is not None and length > 0:
                setattr(group, prefix + name, min(64, max(1, round(length * scale))))
    evaluation.eval_memory_lengths = [round(length * scale) for length in evaluation.eval_memory_lengths]

    bins = len(model.cutoffs) + 1
    model.model_name_or_path = None
    # Where what the heads learn of positions is added to the hidden states, they are as wide together.
    wide = model.attn_type in POSITIONS and POSITIONS[model.attn_type].spans_heads
    model.n_layer, model.n_head, model.d_head, model.d_inner = 2, 2, 32 if wide else 8, 32
    model.d_embed = 64 if model.d_embed in (None, model.d_model) else 32
    model.d_model = 64
    model.cutoffs = [vocab_size * i // bins for i in range(1, bins)]

    data.batch_size = 4 * data.batch_chunk
    evaluation.eval_batch_size, evaluation.eval_every = 8, 3
    optimization.max_steps, optimization.max_epochs = 6, None
    optimization.warmup_steps = min(optimization.warmup_steps, 2)
    if optimization.decay_steps is not None:
        optimization.decay_steps = min(optimization.decay_steps, 2)
    optimization.average_start = min(optimization.average_start, 2)
    run.log_every, run.save_every = 1, 3


def write_smoke_data(folder: Path) -> int:
    """Words of a module of the standard library, as txl-prepare would write them; returns how many there are."""
    import numpy as np
    from datasets import Dataset, DatasetDict

    from ..transfo_xl.tokenization_transfo_xl import TransfoXLTokenizer

    lines = Path(argparse.__file__).read_text(encoding="utf-8").splitlines()
    tokenizer = TransfoXLTokenizer.train_from_iterator(lines, mode="whitespace", max_size=500)
    token_ids = tokenizer.encode_lines(lines, add_eos=True).astype(np.int32)
    parts = np.split(token_ids, [len(token_ids) * 8 // 10, len(token_ids) * 9 // 10])
    splits = {name: Dataset.from_dict({"token_ids": part}) for name, part in zip(SPLITS, parts, strict=True)}
    DatasetDict(splits).save_to_disk(folder)
    tokenizer.save_pretrained(folder)
    return len(tokenizer)
