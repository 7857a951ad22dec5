"""The options of `txl-convert`, read before anything slow is imported."""

import argparse
from pathlib import Path

# --from: the module that reads the family.
FAMILIES = {
    "transformers": "transformers_legacy",
    "kimiyoung-pytorch": "kimiyoung_pytorch",
    "kimiyoung-tf": "kimiyoung_tf",
    "nvidia": "nvidia_pytorch",
    "remi": "pop_music_tf",
}
TOKENIZER_MODES = ("moses", "whitespace", "characters", "bytes", "lm1b")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="convert.py",
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
