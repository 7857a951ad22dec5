"""A model, a tokenizer and a device by the names that a command was given."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import CONFIG_NAME
from huggingface_hub.utils import HFValidationError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig

from ..files import MANIFEST_NAME, is_repo_id
from ..transfo_xl.configuration_transfo_xl import TransfoXLConfig
from ..transfo_xl.modeling_transfo_xl import TransfoXLForCausalLM
from ..transfo_xl.tokenization_transfo_xl import TransfoXLTokenizer
from ..transfo_xl.tokenization_transfo_xl_backend import WORD_MODES

if TYPE_CHECKING:
    from miditok import MusicTokenizer

TOKENIZER_FILE = "tokenizer.json"
# The column of MidiTok's compound tokens in a folder of txl-prepare; all other tokens are in `token_ids`.
EVENTS = "events"


def load_config(name: str, option: str = "--model") -> TransfoXLConfig:
    """The configuration of a model that an option names. A name that is no folder is printed before the Hub is
    contacted, because an error without a network takes long. Raises a ValueError that names the option if it does not
    load, is of another model type, or the folder holds an adapter or a checkpoint instead."""
    folder = Path(name)
    if not folder.exists() and is_repo_id(name):
        print(f"{name} is no folder here: looking for it on the Hub", file=sys.stderr)
    if not (folder / CONFIG_NAME).exists():
        if (folder / "adapter_config.json").exists():
            raise ValueError(
                f"{name} is an adapter: give a whole model, for instance what "
                f"peft.PeftModel.from_pretrained(model, {name!r}).merge_and_unload() saves"
            )
        if (folder / MANIFEST_NAME).exists():
            raise ValueError(
                f"{name} is a checkpoint of a run, to --resume it: give the folder of the run, {folder.parent}"
            )
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        where = "" if folder.exists() else "there is no such folder here, and as a name on the Hub "
        raise ValueError(f"{option} {name} does not load: {where}{error}") from None
    if not isinstance(config, TransfoXLConfig):
        raise ValueError(f"{option} {name} is a {config.model_type}, not a Transformer-XL")
    return config


def load_language_model(name: str, **options) -> TransfoXLForCausalLM:
    """The model of a folder or on the Hub, with options of `from_pretrained`. Raises a ValueError if its weights lack
    tensors, such as the softmax, which would be random."""
    model, report = AutoModelForCausalLM.from_pretrained(name, output_loading_info=True, **options)
    if missing := sorted(report["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{name} is no whole language model: its weights lack {missing[0]}{more}")
    return model


def find_device(name: str | None) -> str:
    """The device of this name; None: the GPU, or else the CPU. Raises a ValueError for one that does not exist."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return name


def load_tokenizer(name: str | Path, **options) -> Any:
    """The tokenizer of a folder or on the Hub, of MidiTok or, with options of `from_pretrained`, of transformers.
    Raises a ValueError if there is none that can be read."""
    if is_midi_tokenizer(name):
        return load_midi_tokenizer(name)
    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"the tokenizer of {name} cannot be read: {' '.join(str(error).split())}") from error


def is_midi_tokenizer(folder: Path | str) -> bool:
    """Whether `tokenizer.json` in a folder is of MidiTok, not of transformers."""
    try:
        return "tokenization" in json.loads((Path(folder) / TOKENIZER_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def check_writes_text(name: str) -> None:
    """Raise a ValueError for a model whose tokenizer is of MidiTok."""
    if is_midi_tokenizer(name):
        raise ValueError(f"model {name} writes music: use examples/music/generate.py of the repository")


def load_midi_tokenizer(folder: Path | str) -> "MusicTokenizer":
    """The tokenizer in a folder, of any of MidiTok's classes. Raises a ValueError if there is none."""
    import miditok

    path = Path(folder) / TOKENIZER_FILE
    if not is_midi_tokenizer(folder):
        raise ValueError(f"{folder} has no tokenizer of MidiTok: {TOKENIZER_FILE} must name its tokenization")
    name = json.loads(path.read_text(encoding="utf-8"))["tokenization"]
    kind = getattr(miditok, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, miditok.MusicTokenizer)):
        raise ValueError(f"{path} names the tokenization {name!r}, which MidiTok does not have")
    try:
        return kind(params=path)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not as MidiTok writes it: {error!r}") from error


def find_tokenizer(name: str | Path) -> Any:
    """`load_tokenizer`, or None where there is no tokenizer. Raises a ValueError for one that cannot be read."""
    if Path(name).is_dir() and not has_tokenizer(name):
        return None
    try:
        return load_tokenizer(name)
    except ValueError:
        # `load_tokenizer` has put the Hub's files into the cache.
        if has_tokenizer(name):
            raise
        return None


def has_tokenizer(name: str | Path) -> bool:
    """Whether a folder, or the cache of a repository on the Hub, has a tokenizer file, of transformers or MidiTok."""
    files = ("tokenizer_config.json", TOKENIZER_FILE, *TransfoXLTokenizer.vocab_files_names.values())
    if Path(name).is_dir():
        return any(Path(name, file).exists() for file in files)
    try:
        return any(isinstance(try_to_load_from_cache(str(name), file), str) for file in files)
    except HFValidationError:
        return False


def check_vocabulary(tokenizer: Any, data: Any, model: str | Path, config: PreTrainedConfig) -> None:
    """Raise a ValueError unless the symbols of a text, `data`, are those of a model.

    Either tokenizer may have more symbols at its end. Of a model without one only the size is compared.
    """
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"{data} has a vocabulary of {len(tokenizer)}, which does not fit {model} with one of "
            f"{config.vocab_size}: prepare the text with the tokenizer of the model"
        )
    if (trained_with := find_tokenizer(model)) is None:
        return
    symbols, expected = _list_symbols(tokenizer), _list_symbols(trained_with)
    for index, (found, wanted) in enumerate(zip(symbols, expected, strict=False)):
        if found != wanted:
            raise ValueError(
                f"{data} has another vocabulary than {model}: {len(symbols)} symbols instead of {len(expected)}, and "
                f"id {index} is {found!r} instead of {wanted!r}"
            )


def _list_symbols(tokenizer: Any) -> list[str]:
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        return tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    # A tokenizer of MidiTok.
    vocabulary = tokenizer.vocab_model or tokenizer.vocab
    return sorted(vocabulary, key=vocabulary.get)


def ends_lines(tokenizer: Any) -> bool:
    """Whether a line ends in a token instead of its line feed: in word modes whose vocabulary has such a token."""
    if getattr(tokenizer, "mode", None) not in WORD_MODES:
        return False
    return tokenizer.line_ends or tokenizer.eos_token is not None


def fill_special_tokens(
    config: PreTrainedConfig | GenerationConfig, tokenizer: Any, document_end: int | None = None
) -> None:
    """Set `bos_token_id`, `eos_token_id` and `pad_token_id` where they are None in a configuration.

    `eos_token_id`, at which `generate` stops, is the token that ends the documents of the training text
    (`document_end`), otherwise the tokenizer's `eos_token`. If that ends each line, the field stays None, because
    `generate` would stop after a heading or an empty line. `pad_token_id` stays None if that token also begins texts
    or ends lines, because `generate` without an `attention_mask` would mask it in a prompt.
    """
    found = {name: getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    in_texts = {found["bos_token_id"], found["eos_token_id"]}
    if document_end is not None or ends_lines(tokenizer):
        found["eos_token_id"] = document_end
    # `generate` does not mask a pad token that is `eos_token_id` too.
    if found["pad_token_id"] in in_texts - {found["eos_token_id"]}:
        found["pad_token_id"] = None
    for name, token in found.items():
        if token is not None and getattr(config, name) is None:
            setattr(config, name, token)
