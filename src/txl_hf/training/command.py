"""Train a Transformer-XL language model from a recipe.

    txl-train RECIPE --data DIR --output DIR
    txl-train RECIPE --data DIR --output DIR --resume
    txl-train RECIPE --smoke

DIR of --data is what `txl-prepare` (examples/prepare_corpus.py) wrote. A recipe, a YAML file, sets any of the options
below; the command line wins. examples/recipes has those of published results.

--output then holds the model that was best in validation, with its tokenizer (for `AutoModelForCausalLM` and
`AutoTokenizer`) and its step (`best.json`), `results.json`, the run's log (`log.jsonl`, TensorBoard's,
`training.png`), the settings it ran with (`recipe.yaml`), and checkpoints, which are complete or absent. Killed at any
moment and resumed, a run goes on as if it had never stopped.
"""

import os
import sys
import tempfile
from pathlib import Path

from ..command_line import one_line_errors


def main(argv: list[str] | None = None):
    with one_line_errors():
        # Here, so that what is not installed is named in one line, and nothing slow is loaded to refuse an option.
        from .arguments import check_folders, parse_arguments, shrink

        arguments = parse_arguments(argv, description=__doc__)
        check_folders(arguments)
        if arguments.run.smoke and arguments.run.output is None and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            sys.exit("error: --smoke with several processes needs an --output that they share")
        from .loop import Training, quiet

        quiet()
        with tempfile.TemporaryDirectory(prefix="txl-train-") as scratch:
            is_removed = arguments.run.smoke and arguments.run.output is None
            if arguments.run.smoke:
                shrink(arguments, Path(scratch))
            training = Training(arguments)
            try:
                training.run()
            except FloatingPointError as error:
                sys.exit(f"error: {error}")
            except KeyboardInterrupt:
                sys.exit("stopped: the same command with --resume goes on from the last checkpoint")
            if is_removed:
                print("this was a trial: its folder is removed now; name one with --output to keep it")
