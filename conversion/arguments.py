"""The options of `txl-convert`, and what can be refused of them, before anything slow is imported."""

import argparse
import glob
from pathlib import Path

from txl_hf.command_line import CommandParser

# --from: the module that reads the family.
FAMILIES = {
    "transformers": "transformers_legacy",
    "kimiyoung-pytorch": "kimiyoung_pytorch",
    "kimiyoung-tf": "kimiyoung_tf",
    "nvidia": "nvidia_pytorch",
    "remi": "pop_music_tf",
}
# What each takes for a checkpoint; remi's are TensorFlow's too.
EXPECTED = {
    "transformers": "expected a folder with config.json and pytorch_model.bin or model.safetensors",
    "kimiyoung-pytorch": "expected model.pt, the module pickled by the original's train.py",
    "kimiyoung-tf": "expected model.ckpt-N (its .index and .data files) or the folder that holds it",
    "nvidia": "expected checkpoint_best.pt or checkpoint_last.pt, a dictionary with model_config and model_state",
}
EXPECTED["remi"] = EXPECTED["kimiyoung-tf"]
# How a model is evaluated: fields of its configuration that are options, and all that are shown.
OPTIONS = ("mem_len", "clamp_len", "same_length")
SETTINGS = (*OPTIONS, "tgt_len")
TOKENIZER_MODES = ("moses", "whitespace", "characters", "bytes", "lm1b")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
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
    parser.add_argument("--tokenizer-mode", choices=TOKENIZER_MODES, help="how text is split; default: as the corpus")
    parser.add_argument(
        "--allow-non-finite", action="store_true", help="convert weights that are NaN or infinite, with a warning"
    )
    parser.add_argument("--push-to-hub", metavar="REPO", help="also upload the finished folder to this repository")
    return parser.parse_args(argv)


def path_problem(arguments: argparse.Namespace) -> str | None:
    """What is wrong with --output or --checkpoint as names on this disk, in one line; None where nothing is."""
    output, checkpoint = arguments.output, arguments.checkpoint
    if output.is_symlink():
        return f"{output} is a link to {output.readlink()}; give a folder itself"
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        return f"{output} exists and is not empty; expected a new folder"
    # TensorFlow's are named by what their files begin with.
    if not checkpoint.exists() and not any(checkpoint.parent.glob(f"{glob.escape(checkpoint.name)}.*")):
        return f"{checkpoint} does not exist; {EXPECTED[arguments.family]}"
    return None
