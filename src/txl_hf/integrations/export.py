"""Write a Transformer-XL as ONNX graphs with its memory in and out, and check them against torch.

    txl-export --model runs/wikitext-2 --output wikitext-2-onnx

The folder holds, beside config.json and the tokenizer, two graphs and `weights.data`, the weights of both, which stays
beside them:

* `segment.onnx`: `input_ids` (batch, length) and `mems.0` … (batch, memory, d_model), one for each layer, give
  `logits` (batch, length, vocabulary), which are log-probabilities, and `new_mems.0` …, which the next call takes as
  `mems.0` ….
* `step.onnx`: the same for one token a row, `input_ids` (batch, 1), with `logits` (batch, 1, vocabulary).

Batch, length and memory have any size, a memory none to mem_len states. A text begins with an empty memory, or, where
config.json says `"initial_memory": "zeros"`, with mem_len states of zeros. Every token is remembered, whatever ext_len
the model was trained with; that of config.json is 0. Both graphs are run by onnxruntime at
several sizes and compared with torch before the folder appears; a difference is an error.
"""

import argparse
import sys
from pathlib import Path

from ..command_line import CommandParser, hub_or_folder, one_line_errors

__all__ = ["main"]


def main(argv: list[str] | None = None):
    with one_line_errors():
        options = parse_arguments(argv)
        if options.output.exists():
            raise FileExistsError(f"{options.output} exists: choose another folder, or remove it")
        # Here, so that nothing slow is loaded to refuse an option.
        from ..data.loading import has_tokenizer
        from .graphs import export

        for name, difference in export(options.model, options.output).items():
            print(f"{options.output / name}: at most {difference:.1e} from torch")
        if not has_tokenizer(options.output):
            print(f"no tokenizer was found with {options.model}: put its files into {options.output}", file=sys.stderr)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=hub_or_folder, required=True, help="folder or Hub name")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
