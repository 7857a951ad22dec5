"""Folders of the legacy `transformers` model: config.json, weights in one file or several, a vocabulary, and
generation_config.json where there is one.
"""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from txl_hf import TransfoXLConfig

from . import torch_file
from .files import code_span, find_file, read_json, state_dict_sources
from .layout import Checkpoint, ConversionError, Family, Source, drop_copies, fields_from_shapes, map_names

# The names in the state dict are those of the layout. With shared biases (untie_r false) every layer repeats the pair.
TABLE = [
    ("transformer.pos_emb.inv_freq", None, None),
    ("transformer.{name}", "transformer.{name}", None),
    ("crit.{name}", "crit.{name}", None),
    ("score.weight", "score.weight", None),
]
EXPECTED = "expected a folder with config.json and pytorch_model.bin or model.safetensors"
WEIGHTS_FILES = ("model.safetensors", "pytorch_model.bin")
TOKENIZER_FILES = ("vocab.pkl", "vocab.bin", "vocab.txt", "tokenizer.json")


def read(checkpoint: Path, corpus: Path | None = None) -> Checkpoint:
    """Return the `Checkpoint` in a folder, or of its tokenizer alone, which TransfoXLTokenizer reads. `corpus` must be
    None. Raises ConversionError or UnsafePickleError.
    """
    folder = Path(checkpoint)
    if corpus is not None:
        raise ConversionError("--corpus is for the other families: a transformers folder holds its own vocabulary")
    if folder.is_file():
        raise ConversionError(f"{folder} is a file; {EXPECTED}")
    if not folder.is_dir():
        raise ConversionError(f"{folder} does not exist; {EXPECTED}")
    tokenizer_files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    files = _weights(folder)
    if tokenizer_files and not files and not (folder / "config.json").is_file():
        return Checkpoint({}, {}, origin=f"the tokenizer {code_span(folder.resolve().name)}", tokenizer=folder)
    written, fields = _read_config(folder)
    sources = [source for file in files or [find_file(folder, WEIGHTS_FILES, EXPECTED)] for source in _sources(file)]
    if all(not source.name.startswith("transformer.") for source in sources):  # saved by TransfoXLModel
        sources = [replace(source, name=f"transformer.{source.name}") for source in sources]
    tensors = map_names(sources, TABLE)
    sizes = fields_from_shapes(tensors)
    if fields["n_layer"] != sizes["n_layer"]:
        raise ConversionError(f"config.json says {fields['n_layer']} layers, the weights have {sizes['n_layer']}")
    drop_copies(tensors, fields)
    return Checkpoint(
        fields,
        tensors,
        origin=f"the legacy transformers checkpoint {code_span(folder.resolve().name)} ({files[0].name})",
        tokenizer=folder if tokenizer_files else None,
        head=_head(tensors),
        generation=_read_generation(folder / GENERATION_CONFIG_NAME, written | fields),
    )


def _head(tensors: dict[str, Source]) -> str:
    if "score.weight" in tensors:
        return "classifier"
    return "softmax" if any(name.startswith("crit.") for name in tensors) else "none"


def _read_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content of config.json, and the fields of the configuration. Raises ConversionError."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConversionError(f"{folder} has no config.json; {EXPECTED}")
    written = read_json(path)
    if written.get("model_type", "transfo-xl") != "transfo-xl":
        raise ConversionError(f"{path} is of another model; expected model_type transfo-xl")
    # Not copied: fields on the code and library of the old folder, which are written anew.
    for name in ("auto_map", "quantization_config", "architectures", "transformers_version", "trainer_compatible"):
        written.pop(name, None)
    try:
        return written, TransfoXLConfig.from_dict(dict(written)).to_dict()
    except Exception as error:  # the configuration's validators raise errors of several kinds
        raise ConversionError(f"{path} describes no model: {error}") from None


def _read_generation(path: Path, fields: dict[str, Any]) -> GenerationConfig:
    """The GenerationConfig of generation_config.json or, in older folders, of config.json. Raises ConversionError."""
    try:
        if path.is_file():
            return GenerationConfig.from_pretrained(path.parent, path.name)
        path = path.with_name("config.json")
        return GenerationConfig.from_model_config(fields)
    except Exception as error:  # its reader and its validators raise errors of several kinds
        raise ConversionError(f"{path} cannot be used, mend it: {error}") from None


def _weights(folder: Path) -> list[Path]:
    """Return the file of weights, or the files of its parts, in the order of `from_pretrained`."""
    for name in WEIGHTS_FILES:
        stem, kind = name.split(".")
        if (folder / name).is_file():
            return [folder / name]
        if parts := sorted(folder.glob(f"{stem}-*-of-*.{kind}")):
            return parts
    return []


def _sources(path: Path) -> list[Source]:
    if path.suffix != ".safetensors":
        # `place` names the file, because storages of several files have the same keys.
        sources = state_dict_sources(torch_file.load(path), path)
        return [replace(source, place=(path, source.place)) for source in sources]
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    except SafetensorError as error:
        raise ConversionError(f"{path} is no safetensors file: {error}") from None
    return [Source(name, shape, functools.partial(_read_safetensor, path, name)) for name, shape in shapes.items()]


def _read_safetensor(path: Path, name: str) -> torch.Tensor:
    # Opened anew for each tensor, because the pages of a mapping that stays open count as memory.
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


FAMILY = Family("transformers", read)
