"""A model by the name that a command was given, and the device to put it on; errors are of one line."""

import sys
from pathlib import Path

import torch
from huggingface_hub.constants import CONFIG_NAME
from transformers import AutoConfig, AutoModelForCausalLM

from ..files import MANIFEST_NAME, is_repo_id
from ..transfo_xl.configuration_transfo_xl import TransfoXLConfig
from ..transfo_xl.modeling_transfo_xl import TransfoXLForCausalLM

__all__ = ["check_model_folder", "find_device", "load_config", "load_language_model"]


def load_config(name: str, option: str = "--model") -> TransfoXLConfig:
    """That of a model. Where that is no folder, it says so first: without a network, asking the Hub ends late.

    Args:
        option: by which a command was given the name.

    Raises:
        ValueError: it does not load, or is of another model.
    """
    if not Path(name).exists() and is_repo_id(name):
        print(f"{name} is no folder here: looking for it on the Hub", file=sys.stderr)
    check_model_folder(name)
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        where = "" if Path(name).exists() else "there is no such folder here, and as a name on the Hub "
        raise ValueError(f"{option} {name} does not load: {where}{error}") from None
    if not isinstance(config, TransfoXLConfig):
        raise ValueError(f"{option} {name} is a {config.model_type}, not a Transformer-XL")
    return config


def load_language_model(name: str, **options) -> TransfoXLForCausalLM:
    """The model of a folder or on the Hub.

    Args:
        options: of `from_pretrained`.

    Raises:
        ValueError: its weights lack something, such as the softmax, which would be made anew.
    """
    model, report = AutoModelForCausalLM.from_pretrained(name, output_loading_info=True, **options)
    if missing := sorted(report["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{name} is no whole language model: its weights lack {missing[0]}{more}")
    return model


def check_model_folder(name: str):
    """Refuse what may be taken for the folder of a model; any other, and a name on the Hub, is left to transformers.

    Raises:
        ValueError: it is an adapter, or a checkpoint of a run.
    """
    folder = Path(name)
    if (folder / CONFIG_NAME).exists():
        return
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{name} is an adapter: give a whole model, for instance what "
            f"peft.PeftModel.from_pretrained(model, {name!r}).merge_and_unload() saves"
        )
    if (folder / MANIFEST_NAME).exists():
        raise ValueError(
            f"{name} is a checkpoint of a run, to --resume it: give the folder of the run, {folder.parent}"
        )


def find_device(name: str | None) -> str:
    """The device of this name; without one the GPU, or the CPU where there is none.

    Raises:
        ValueError: there is no such device here.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return name
