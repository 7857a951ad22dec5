"""Score a text with a Transformer-XL: every token once, at any memory length.

    txl-evaluate --model wt103 --data data/wikitext-103 --segment_length 64 --memory_length 640 \\
        --clamp_len 400 --same_length true
    txl-evaluate --model demo-output --data book.txt --memory_length 0 64 128 --output result.json
    txl-evaluate --model wt103 --data data/wikitext-103 --memory_length 150 300 450 640 \\
        --clamp_len 400 --same_length true --plot curve.png
    txl-evaluate --model wt103 --data data/wikitext-103 --sliding_window 640 --max_tokens 1000

`--data` is a folder of `txl-prepare`, of which `--split` is read, or a UTF-8 text file, which is tokenised with
the model's tokenizer or with `--tokenizer`. Several values of `--memory_length` are scored one after the other.
Where the data was prepared with `--document_end`, each document is read without those before it, or `--document_end`
says it here, and `--document_end none` reads all as one text. `--dynamic RATE` lets the weights follow the text, and
`--cache` mixes in what followed similar states: `tune_lm.py` chooses both. `--sliding_window N` scores the text in the
vanilla way: the last N tokens are read anew for every token, without memory. It stands alone, or beside the memory
lengths that are given.

A model that `txl-train` has scored is scored likewise: lengths, `--batch_size` and `--document_end` that are not given
are those of its results.json, so that one model has one figure. With `--dynamic` or `--cache` it is one stream, which
these follow from end to end.

On a terminal the figures appear as a table, line by line as they are found; elsewhere, or with `--json`, the result is
JSON. `--output` holds the same JSON, from the first figure on. The result has for each length the negative
log-likelihood, perplexity and bits of a token, perplexity per word and bits per character of the text (words and
characters as `txl-prepare` counts them), and all settings that these figures depend on. An infinite perplexity,
for which JSON has no number, is null, and so are figures of words or characters where more than a thousandth of these
have no token.

`curves` are the columns of the paper's ablation (Tables 6 and 10), for memories and for windows: the perplexity `init`
at the attention length of training (`null` where that is not among the lengths), the `best` one, and
`attention_length`, the shortest length whose perplexity is the best one to the decimals that the paper prints.
"""

import argparse
import sys

from ..command_line import (
    CommandParser,
    add_scoring_options,
    at_least_one,
    check_files,
    hub_or_folder,
    one_line_errors,
)

__all__ = ["main"]


def main(argv: list[str] | None = None):
    with one_line_errors():
        options = parse_arguments(argv)
        check_files(options)
        # Here, so that nothing slow is loaded to refuse an option.
        from .scoring import run

        run(options)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_scoring_options(parser, "folder of txl-prepare, or a text file", "perplexity by attention length")
    parser.add_argument("--split", choices=["train", "validation", "test"], help="of a folder of txl-prepare (test)")
    parser.add_argument("--tokenizer", type=hub_or_folder, help="folder or Hub name, for a text file (the model's)")
    parser.add_argument(
        "--memory_length", type=int, nargs="+", help="one or more (the model's mem_len, without --sliding_window)"
    )
    parser.add_argument("--sliding_window", type=at_least_one, nargs="+", default=[], help="window lengths to score")
    parser.add_argument(
        "--warm_up", type=int, default=0, help="tokens of each stream read but not scored (%(default)s)"
    )
    parser.add_argument("--dynamic", type=float, metavar="RATE", help="let the weights follow the text at this rate")
    parser.add_argument("--decay", type=float, help="of --dynamic: draw them back (0.0)")
    parser.add_argument("--epsilon", type=float, help="of --dynamic with --statistics (1e-05)")
    parser.add_argument(
        "--statistics", type=at_least_one, help="of --dynamic: tokens of the training text to take them from"
    )
    parser.add_argument("--parameters", help="of --dynamic: names of the parameters that follow, a regular expression")
    parser.add_argument(
        "--cache",
        type=float,
        nargs=3,
        metavar=("SIZE", "WEIGHT", "TEMPERATURE"),
        help="mix in a continuous cache; see tune_lm.py",
    )
    parser.add_argument("--max_tokens", type=at_least_one, help="score the beginning of the text only")
    parser.add_argument("--json", action="store_true", help="print JSON on a terminal too")
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=sys.stderr.isatty(),
        help="show a progress bar (where standard error is a terminal)",
    )
    options = parser.parse_args(argv)
    for name in ("decay", "epsilon", "statistics", "parameters"):
        if options.dynamic is None and getattr(options, name) is not None:
            parser.error(f"--{name} is of dynamic evaluation: give its rate too, with --dynamic")
    if options.sliding_window and not options.memory_length:
        for name in ("segment_length", "ext_len", "same_length"):
            if getattr(options, name) is not None:
                parser.error(f"--{name} is of an evaluation with memory: name its lengths too, with --memory_length")
    if options.epsilon is not None and options.statistics is None:
        parser.error("--epsilon does nothing without --statistics")
    if options.split is not None and options.data.is_file():
        parser.error(f"--split is of a folder of txl-prepare: {options.data} is one text, which is scored as a whole")
    options.split = options.split or "test"
    options.json = options.json or not sys.stdout.isatty()
    return options


if __name__ == "__main__":
    main()
