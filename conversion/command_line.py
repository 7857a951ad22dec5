"""The command `txl-convert`: a checkpoint to a folder that `AutoModelForCausalLM.from_pretrained` loads.

The folder gets config.json, model.safetensors, the tokenizer where a vocabulary is at hand, and a model card; where
there is a vocabulary alone (a pickled corpus, a folder with vocab.pkl), only the tokenizer. The exit status is 0 on
success; otherwise the reason is one line on standard error and no folder is left behind.
"""

import argparse
import functools
import sys
from pathlib import Path

import torch
from huggingface_hub import HfApi
from tqdm import tqdm
from transformers.utils import logging

from txl_hf import TransfoXLConfig, TransfoXLTokenizer
from txl_hf import TransfoXLPreTrainedModel as Model
from txl_hf.command_line import CommandParser, interrupted_by_signals
from txl_hf.evaluation.cards import write_model_card
from txl_hf.files import whole_folder
from txl_hf.transfo_xl.tokenization_transfo_xl_backend import MODES

from . import kimiyoung_pytorch, kimiyoung_tf, nvidia_pytorch, pop_music_tf, transformers_legacy
from .layout import MODELS, Checkpoint, ConversionError, Family, check_complete

READERS = (transformers_legacy, kimiyoung_pytorch, kimiyoung_tf, nvidia_pytorch, pop_music_tf)
FAMILIES: dict[str, Family] = {reader.FAMILY.name: reader.FAMILY for reader in READERS}
# Fields of the configuration that change an evaluation: those that are options, and those that the card shows.
OPTIONS = ("mem_len", "clamp_len", "same_length")
SETTINGS = (*OPTIONS, "tgt_len")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(
        prog="txl-convert",
        description="Convert an original Transformer-XL checkpoint to a folder that "
        "`AutoModelForCausalLM.from_pretrained` loads.",
        epilog="Nothing in a pickle is executed.",
    )
    parser.add_argument("--from", dest="family", required=True, choices=FAMILIES, help="who wrote the checkpoint")
    parser.add_argument("--checkpoint", type=Path, required=True, help="the checkpoint, or the folder that holds it")
    parser.add_argument("--output", type=Path, required=True, help="folder to write; must not exist or be empty")
    parser.add_argument("--corpus", type=Path, help="the vocabulary: cache.pt, cache.pkl, dictionary.pkl")
    parser.add_argument("--mem-len", type=int, help="states remembered")
    parser.add_argument("--clamp-len", type=int, help="distances beyond it share one position; -1: no limit")
    parser.add_argument(
        "--same-length", action=argparse.BooleanOptionalAction, help="the same context for every token"
    )
    parser.add_argument("--tokenizer-mode", choices=MODES, help="how text is split; default: as the corpus")
    parser.add_argument(
        "--allow-non-finite", action="store_true", help="convert weights that are NaN or infinite, with a warning"
    )
    parser.add_argument("--push-to-hub", metavar="REPO", help="also upload the finished folder to this repository")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    arguments = parse_arguments(argv)
    try:
        with interrupted_by_signals():
            convert(arguments)
        return 0
    except KeyboardInterrupt:
        reason = "interrupted"
    # A damaged or hostile file ends in one line, without a traceback, whatever the error is.
    except Exception as error:
        known = isinstance(error, ConversionError | ValueError | OSError)
        reason = str(error) if known else f"{type(error).__name__}: {error}"
    say(f"txl-convert: {reason}"[:600])
    return 1


def say(text: str) -> None:
    """Print one line on standard error, with "?" for unprintable characters, such as terminal commands in a file."""
    line = " ".join(text.split())
    print("".join(letter if letter.isprintable() else "?" for letter in line), file=sys.stderr)


def convert(arguments: argparse.Namespace) -> None:
    """Convert by the `arguments` of `parse_arguments`. Raises ConversionError and errors of reading and writing."""
    check_output(arguments.output)
    checkpoint = FAMILIES[arguments.family].read(arguments.checkpoint, arguments.corpus)
    config = None
    if not checkpoint.tensors:
        check_vocabulary_alone(arguments)
    else:
        config = build_config(checkpoint, arguments)
        check_complete(checkpoint.tensors, config, checkpoint.head)
        print_settings(config, checkpoint)
    arguments.output.absolute().parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(arguments.output.absolute()) as folder:
        has_tokenizer = write_tokenizer(folder, checkpoint, arguments)
        if config is not None:
            model = write_model(folder, config, checkpoint, arguments.allow_non_finite)
            write_card(folder, arguments, checkpoint, model, has_tokenizer)
    alone = "" if checkpoint.tensors else ", a tokenizer: there was a vocabulary alone, and no model"
    print(f"wrote {arguments.output}{alone}")
    if arguments.push_to_hub:
        push(arguments.output, arguments.push_to_hub)


def check_output(output: Path) -> None:
    """Raise ConversionError for an output that is in use."""
    if output.is_symlink():
        raise ConversionError(f"{output} is a link to {output.readlink()}; give a folder itself")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConversionError(f"{output} exists and is not empty; expected a new folder")


def check_vocabulary_alone(arguments: argparse.Namespace) -> None:
    """Raise ConversionError for options of a model where there is a vocabulary and no weights."""
    for name in ("corpus", *OPTIONS):
        if getattr(arguments, name) is not None:
            raise ConversionError(
                f"--{name.replace('_', '-')} is for a model, and {arguments.checkpoint} holds a vocabulary alone: "
                "give the file or folder of the weights with --checkpoint"
            )


def build_config(checkpoint: Checkpoint, arguments: argparse.Namespace) -> TransfoXLConfig:
    """Return the configuration: the checkpoint's fields, then what the command line sets."""
    fields = dict(checkpoint.fields)
    if checkpoint.vocabulary is not None:
        found, size = len(checkpoint.vocabulary.symbols), fields["vocab_size"]
        if found > size:
            raise ConversionError(f"the vocabulary has {found} symbols, the model only {size}: it is another corpus'")
        if found < size:
            say(f"warning: the vocabulary has {found} symbols, the model {size}: another corpus?")
        fields["eos_token_id"] = checkpoint.vocabulary.eos_token_id
    # The originals' word corpora, which have cutoffs, begin with <eos>; symbol 0 of the others is a letter.
    fields.setdefault("eos_token_id", 0 if fields["cutoffs"] else None)
    for name in OPTIONS:
        value = getattr(arguments, name)
        if value is not None:
            fields[name] = value
            checkpoint.explained[name] = "by the option"
    try:
        return TransfoXLConfig.from_dict(fields)
    except Exception as error:  # the configuration's validators raise errors of several kinds
        raise ConversionError(f"the settings describe no model: {error}") from None


def print_settings(config: TransfoXLConfig, checkpoint: Checkpoint) -> None:
    print("settings (--mem-len, --clamp-len and --same-length change them):")
    for name in SETTINGS:
        print(f"  {name} = {getattr(config, name)} ({checkpoint.explained.get(name, 'as in config.json')})")


def check_weights(name: str, tensor: torch.Tensor, allow_non_finite: bool) -> None:
    """Raise ConversionError for a tensor that holds no weights, or some that are NaN or infinite."""
    if not tensor.is_floating_point():
        raise ConversionError(f"{name} holds {tensor.dtype}, which is no weight")
    # In parts, because `isfinite` makes a tensor of the same shape.
    wrong = sum(int((~part.isfinite()).sum()) for part in tensor.flatten().split(2**22))
    if wrong == 0:
        return
    found = f"{wrong} of the {tensor.numel()} numbers in {name} are NaN or infinite"
    if not allow_non_finite:
        raise ConversionError(f"{found}: the checkpoint is damaged, or its training diverged (--allow-non-finite)")
    say(f"warning: {found}")


def write_model(
    folder: Path, config: TransfoXLConfig, checkpoint: Checkpoint, allow_non_finite: bool = False
) -> Model:
    """Write the model's files to `folder`; return the model. `from_pretrained` reads the tensors, so that no
    weight can stay random unseen.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    state = {}
    for name, source in tqdm(checkpoint.tensors.items(), desc="reading", unit="tensor", disable=None):
        state[name] = source.read()
        check_weights(source.name, state[name], allow_non_finite)
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in state.values()))
    model, report = MODELS[checkpoint.head].from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[problem]:
            raise ConversionError(f"{problem.replace('_', ' ')} in the written model: {sorted(report[problem])[:4]}")
    del state
    if checkpoint.generation is not None and model.can_generate():
        model.generation_config = checkpoint.generation
    model.save_pretrained(folder, max_shard_size="1TB")
    # safetensors writes files that only the owner can read.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)
    return model


def write_tokenizer(folder: Path, checkpoint: Checkpoint, arguments: argparse.Namespace) -> bool:
    """Write the tokenizer's files to `folder` if there is a vocabulary; return whether there is."""
    vocabulary, mode = checkpoint.vocabulary, arguments.tokenizer_mode
    if vocabulary is None and checkpoint.tokenizer is None:
        # A folder of transformers holds its own vocabulary and takes no other.
        remedy = "" if arguments.family == "transformers" else ": give it with --corpus"
        if mode is not None:
            raise ConversionError(f"--tokenizer-mode {mode} is for a vocabulary, and there is none at hand{remedy}")
        print(f"no tokenizer: no vocabulary at hand{remedy}")
        return False
    if vocabulary is None:
        if mode is not None:
            raise ConversionError("--tokenizer-mode is for a vocabulary; this folder's tokenizer has its own mode")
        tokenizer = TransfoXLTokenizer.from_pretrained(checkpoint.tokenizer)
    else:
        tokenizer = TransfoXLTokenizer.from_symbols(
            vocabulary.symbols, mode or vocabulary.mode, vocabulary.lower_case, eos_token=vocabulary.eos_token
        )
    tokenizer.save_pretrained(folder)
    return True


def write_card(
    folder: Path, arguments: argparse.Namespace, checkpoint: Checkpoint, model: Model, has_tokenizer: bool
) -> None:
    """Write README.md: what the model is, its origin, and how to load it."""
    origin = (
        f"The weights are those of {checkpoint.origin}.\n"
        f"They were converted, values unchanged, by `txl-convert --from {arguments.family}` of `txl-hf`."
    )
    title = arguments.push_to_hub or arguments.output.absolute().name
    write_model_card(folder / "README.md", model, title, origin=origin, tokenizer=has_tokenizer, base_model=None)


def push(folder: Path, repository: str) -> None:
    """Upload the finished `folder` to the Hub's `repository` with the user's own login."""
    api = HfApi()
    try:
        api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder)
    except Exception as error:  # network, login, rights: the library has an error for each
        raise ConversionError(f"{folder} is complete, but was not uploaded: {error}") from None
