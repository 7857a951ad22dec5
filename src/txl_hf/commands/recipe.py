"""A recipe, a YAML file of options, and a command line that overrides it, read into the classes of `GROUPS`."""

import argparse
import dataclasses
import difflib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import yaml
from datasets import Dataset, DatasetDict
from transformers import HfArgumentParser, TrainingArguments

from ..command_line import CommandParser, option
from ..data.corpora import SPLITS
from ..kernels.operators import bf16_is_faster
from ..training.arguments import CONFIG, TransfoXLTrainingArguments
from ..training.regularization import RegularizationArguments
from ..transfo_xl.positions_transfo_xl import POSITIONS
from ..transfo_xl.tokenization_transfo_xl import TransfoXLTokenizer

# The settings of a run, in its folder.
RECIPE = "recipe.yaml"
# Former names of options, and transformers' names, which took their place.
RENAMED = {
    "eval_every": "eval_steps",
    "save_every": "save_steps",
    "log_every": "logging_steps",
    "mixed_precision": "bf16 or --fp16",
}


@dataclass
class ModelArguments:
    """The model that is trained. Every field of `TransfoXLConfig` is an option too."""

    model_name_or_path: str | None = option("Checkpoint to fine-tune; without one a new model is trained.")
    attn_implementation: str | None = option("Attention backend. By default txl_triton on a GPU that can take it.")


@dataclass
class DataArguments:
    """Options for the texts, how they are cut into segments, and how the finished model is scored."""

    data: str | None = option("Folder that txl-prepare wrote.")
    batch_size: int = option("Streams of one step, of all processes together.", 16)
    varlen: bool = option("Segment lengths that vary from step to step, around tgt_len.", False)
    roll: bool = option("In every epoch each stream begins at another place of its text, and wraps around.", False)
    loss: Literal["full", "half"] = option(
        "full: each token of a segment is predicted; half: those of its second half, after tgt_len tokens that are "
        "read again (ext_len = tgt_len), as the paper's baselines need.",
        "full",
    )
    document_end: str | None = option(
        "Token that ends each document, from within which nothing before it is seen; none: the text is one. As the "
        "data was prepared, if not given."
    )
    eval_batch_size: int = option("Streams of an evaluation.", 10)
    eval_tgt_len: int | None = option("Tokens scored in one pass.")
    eval_mem_len: int | None = option("Memory length of an evaluation.")
    eval_ext_len: int | None = option("Extended context of an evaluation.")
    eval_clamp_len: int | None = option("Distances beyond it share one position in an evaluation.")
    eval_same_length: bool | None = option("Every query of an evaluation sees the same number of keys.")
    eval_memory_lengths: list[int] = option("Also evaluate the finished model with these memory lengths.", [])
    metric: Literal["perplexity", "bits_per_token"] = option("What is shown; both are logged.", "perplexity")
    resume: bool = option("Go on from the last complete checkpoint in output, if there is one.", False)
    smoke: bool = option("A few steps of a shrunken model on a small text, else as in the recipe.", False)

    def __post_init__(self):
        for name, least in {"batch_size": 1, "eval_batch_size": 1, "eval_tgt_len": 1, "eval_mem_len": 0}.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"--{name} is {value}, but must be at least {least}")


GROUPS = (ModelArguments, DataArguments, RegularizationArguments, TransfoXLTrainingArguments)


class Arguments(NamedTuple):
    """All settings of a run of `txl-train`.

    Attributes:
        config: given fields of `TransfoXLConfig`. settings: all that is given, as in a recipe.
    """

    model: ModelArguments
    data: DataArguments
    regularization: RegularizationArguments
    training: TransfoXLTrainingArguments
    config: dict[str, Any]
    settings: dict[str, Any]


class RecipeParser(HfArgumentParser, CommandParser):
    """Options of all groups, and the fields of the model's configuration."""

    def __init__(self, description: str | None = None):
        super().__init__(
            GROUPS,  # type: ignore[arg-type]  # mypy takes CommandParser's signature: it does not see HfArgumentParser's.
            description=description,
            formatter_class=_Formatter,
            allow_abbrev=False,
            usage="%(prog)s RECIPE [options]",
        )
        for action in self._actions:
            if "-h" not in action.option_strings:
                # One spelling in --help; the other is accepted too.
                action.option_strings = action.option_strings[:1]
            if action.nargs == "+":
                # An option without a value clears a recipe's list.
                action.nargs = "*"
        model = self.add_argument_group("model", "fields of TransfoXLConfig, which says what they mean:")
        for name, default in CONFIG.items():
            several = "*" if isinstance(default, list | tuple) else None
            shown = f"(default: {default})" if default is not None else ""
            model.add_argument(f"--{name}", type=_value, nargs=several, default=argparse.SUPPRESS, help=shown)
        self.add_argument("--output", dest="output_dir", default=argparse.SUPPRESS, help="Folder to write.")
        self.add_argument("--help-all", action="help", help="show all options of transformers' TrainingArguments too")
        self.add_argument("recipe", type=find_recipe, help="YAML file, or the name of one of examples/recipes")

    def error(self, message: str):
        options = (word.partition("=")[0] for word in message.split() if word.startswith("--"))
        renamed = next(filter(None, (RENAMED.get(option[2:].replace("-", "_")) for option in options)), None)
        self.exit(2, f"error: {message}{f' (it is --{renamed} now)' if renamed else ''}\n")

    def take_defaults(self, path: Path) -> dict[str, Any]:
        """Make a recipe's settings the defaults of their options, and return them. Raises a ValueError for an option
        that does not exist."""
        settings = {name: value for name, value in read_recipe(path).items() if value is not None}
        actions = {"output" if action.dest == "output_dir" else action.dest: action for action in self._actions[::-1]}
        for name, value in settings.items():
            if name not in actions:
                renamed = RENAMED.get(name)
                closest = difflib.get_close_matches(str(name), actions, n=1, cutoff=0.0)[0]
                reason = f"is --{renamed} now" if renamed else f"does not exist; the closest name is {closest!r}"
                raise ValueError(f"{path} sets {name!r}, which {reason}")
            self._check_value(actions[name], value)
            # As typed, so that the option's type reads it.
            one = [value] if actions[name].nargs == "*" else str(value)
            actions[name].default = value if isinstance(value, dict | list) else one
        return settings

    def hide_unused(self):
        """Hide in --help the options of transformers that no committed recipe sets."""
        used = {name for path in recipes_folder().glob("*.yaml") for name in read_recipe(path)}
        theirs = {entry.name for entry in dataclasses.fields(TrainingArguments)}
        for action in self._actions:
            if action.dest in theirs - used - {"output_dir"} or action.option_strings[:1] == ["--output_dir"]:
                action.help = argparse.SUPPRESS


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the description's lines, and shows the defaults of options that have one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, [], argparse.SUPPRESS) or not action.option_strings:
            return action.help
        return super()._get_help_string(action)


def _value(text: str) -> Any:
    """The value of an option: a number, true, false, none or a string."""
    try:
        return json.loads({"none": "null"}.get(text.lower(), text.lower()))
    except ValueError:
        return text


def recipes_folder() -> Path:
    """The recipes of the package, or of its clone."""
    package = Path(__file__).parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parents[1] / "examples" / "recipes"


def find_recipe(name: str) -> Path:
    """The path of a recipe, by itself or by the name of one of the package's."""
    known = recipes_folder() / f"{name}.yaml"
    return known if known.is_file() and not Path(name).exists() else Path(name)


def read_recipe(path: Path) -> dict[str, Any]:
    """A recipe's settings. Raises a ValueError or an OSError for a file that is no recipe."""
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise OSError(f"the recipe {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"the recipe {path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"the recipe {path} must hold lines 'name: value'")
    return settings


def parse_arguments(
    argv: list[str] | None = None, description: str | None = None, scratch: Path | None = None
) -> Arguments:
    """The settings of a recipe and of the command line, which wins. Raises SystemExit with one line for a setting that
    does not exist or cannot be read.

    Args:
        scratch: folder for the text of --smoke; None: nothing is shrunken.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = RecipeParser(description)
    asks_for_help = not {"-h", "--help"}.isdisjoint(argv)
    if asks_for_help:
        parser.hide_unused()
    try:
        given = parser.parse_args([argument for argument in argv if argument not in ("-h", "--help")] or argv)
        recipe = parser.take_defaults(given.recipe)
        values = vars(parser.parse_args(argv))
        typed = {argument.partition("=")[0].replace("-", "_")[2:] for argument in argv if argument.startswith("--")}
        named = typed | recipe.keys()
        _check(values, named, typed)
        named -= _forget(values, typed)
        names = (*CONFIG, *(entry.name for group in GROUPS for entry in dataclasses.fields(group)))
        # YAML holds the values of enumerations, not their members.
        settings = {
            name: getattr(values[name], "value", values[name]) for name in names if name in named and name in values
        }
        if values["output_dir"] is not None:
            settings["output"] = values["output_dir"]
        if values["smoke"] and scratch is not None:
            shrink(values, scratch)
        _choose(values, named)
        model, data, regularization, training = parser.parse_dict(values, allow_extra_keys=True)
    except (ValueError, OSError, argparse.ArgumentError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    config = {name: values[name] for name in CONFIG if name in values}
    return Arguments(model, data, regularization, training, config, settings)


def _forget(values: dict[str, Any], typed: set[str]) -> set[str]:
    """Remove a recipe's settings that the command line replaces; returns their names."""
    gone = set()
    if "num_train_epochs" in typed and "max_steps" not in typed:
        values["max_steps"] = -1
        gone.add("max_steps")
    elif "max_steps" in typed:
        gone.add("num_train_epochs")
    if "lr_scheduler_type" in typed and "lr_scheduler_kwargs" not in typed:
        values["lr_scheduler_kwargs"] = None
        gone.add("lr_scheduler_kwargs")
    attn_type = values.get("attn_type", 0)
    if attn_type in POSITIONS and not POSITIONS[attn_type].recurrent:
        # Encodings without recurrence evaluate without memory.
        without = {"eval_mem_len": 0, "eval_memory_lengths": []}
        values |= {name: none for name, none in without.items() if name not in typed}
    return gone


def _check(values: dict[str, Any], named: set[str], typed: set[str]):
    """Refuse settings that do not fit together. Raises a ValueError."""
    if {"max_steps", "num_train_epochs"} <= typed or not {"max_steps", "num_train_epochs"} & named:
        raise ValueError("set one of --max_steps and --num_train_epochs")
    if "num_train_epochs" in named and not 0 < float(values["num_train_epochs"]) < float("inf"):
        raise ValueError(f"--num_train_epochs is {values['num_train_epochs']}, but must be above 0, and finite")
    if values.get("gate_bias") is not None and values.get("gating") is None and not values["model_name_or_path"]:
        raise ValueError(f"--gate_bias {values['gate_bias']:g} is of --gating gru: leave it out")
    if not values["smoke"]:
        for name, key in (("data", "data"), ("output", "output_dir")):
            if values[key] is None:
                raise ValueError(f"--{name} is missing: name a folder, or try the recipe with --smoke")


def _choose(values: dict[str, Any], named: set[str]):
    """Defaults for options that are not given: precision, device, optimizer, evaluations, checkpoints, loading."""
    on_gpu = torch.cuda.is_available()
    chosen: dict[str, Any] = {"use_cpu": not torch.accelerator.is_available(), "eval_strategy": "steps"}
    # In a file a bar would be a line for each step.
    chosen["disable_tqdm"] = not sys.stderr.isatty()
    if not {"bf16", "fp16"} & named and "ACCELERATE_MIXED_PRECISION" not in os.environ:
        # Emulated, as before Ampere, it is slower than fp32.
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if on_gpu else bf16_is_faster()
        chosen["bf16"] = has_bf16
    if "optimizer" not in named and "optim" not in named:
        chosen["optimizer"] = "adam"
    if values["optimizer"] == "lamb" and "adam_epsilon" not in named:
        chosen["adam_epsilon"] = 1e-6
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        chosen["enable_jit_checkpoint"] = True
    if on_gpu:
        # A process loads ahead, and batches are copied during a step.
        ahead = {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 8}
        chosen |= ahead | {"accelerator_config": {"non_blocking": True}}
    values |= {name: value for name, value in chosen.items() if name not in named}


def shrink(values: dict[str, Any], scratch: Path):
    """Shrink settings to a few steps of a small model on a small text; lengths keep their ratios."""
    values["data"] = str(scratch / "data")
    vocab_size = write_smoke_data(scratch / "data")
    values["output_dir"] = values["output_dir"] or str(scratch / "output")
    scale = 16 / values.get("tgt_len", 16)
    for name in ("tgt_len", "mem_len", "ext_len", "clamp_len", "decay_len"):
        for key in (name, f"eval_{name}"):
            if (length := values.get(key)) is not None and length > 0:
                values[key] = min(64, max(1, round(length * scale)))
    values["eval_memory_lengths"] = [round(length * scale) for length in values["eval_memory_lengths"]]
    bins = len(values.get("cutoffs", [])) + 1
    values["model_name_or_path"] = None
    # With attn_type 3 n_head · d_head is d_model.
    attn_type = values.get("attn_type", 0)
    wide = attn_type in POSITIONS and POSITIONS[attn_type].spans_heads
    embed = values.get("d_embed")
    values |= {
        "d_embed": 64 if embed in (None, values.get("d_model")) else 32,
        "d_model": 64,
        "n_layer": 2,
        "n_head": 2,
        "d_head": 32 if wide else 8,
        "d_inner": 32,
        "cutoffs": [vocab_size * i // bins for i in range(1, bins)],
        "batch_size": 4 * values["gradient_accumulation_steps"],
        "eval_batch_size": 8,
        "max_steps": 6,
        "warmup_steps": min(values["warmup_steps"], 2),
        "average_start": min(values["average_start"], 2),
        "eval_steps": 3,
        "save_steps": 3,
        "logging_steps": 1,
    }


def write_smoke_data(folder: Path) -> int:
    """Write words of a module of the standard library as txl-prepare would; returns the vocabulary's size."""
    lines = Path(argparse.__file__).read_text(encoding="utf-8").splitlines()
    tokenizer = TransfoXLTokenizer.train_from_iterator(lines, mode="whitespace", max_size=500)
    token_ids = tokenizer.encode_lines(lines, add_eos=True).astype(np.int32)
    parts = np.split(token_ids, [len(token_ids) * 8 // 10, len(token_ids) * 9 // 10])
    splits = {name: Dataset.from_dict({"token_ids": part}) for name, part in zip(SPLITS, parts, strict=True)}
    DatasetDict(splits).save_to_disk(folder)
    tokenizer.save_pretrained(folder)
    return len(tokenizer)
