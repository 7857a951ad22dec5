"""Write text with a Transformer-XL language model.

    txl-generate runs/book --prompt "The sea" --max_new_tokens 300
    txl-generate runs/book --prompt_file chapter.txt --temperature 0.8 --top_p 0.95 --seed 1
    echo "The sea" | txl-generate runs/book --no-do_sample

The prompt and what the model writes behind it appear on standard output, word by word as they are generated. A prompt
from a file or from standard input loses the line feed at its end, and is read in segments of the model's tgt_len,
however long it is. The text ends after --max_new_tokens, or at the model's eos_token_id.

The same --seed gives the same text on the same machine. Options that are left out are as the model's
generation_config.json has them, or else as in transformers' `GenerationConfig`.
"""

import argparse
import functools
import sys

import transformers

from ..command_line import (
    CommandParser,
    at_least_one,
    at_least_zero,
    existing_file,
    hub_or_folder,
    one_line_errors,
    positive,
)
from ..data.loading import check_writes_text, find_device, load_config, load_language_model, load_tokenizer
from ..integrations.conversations import Conversations, Reply

SAMPLING = ("temperature", "top_k", "top_p")


@one_line_errors()
def main(argv: list[str] | None = None) -> None:
    transformers.logging.disable_progress_bar()
    generate(parse_arguments(argv))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, prompt = parser.add_argument, parser.add_mutually_exclusive_group()
    add("model", type=hub_or_folder, help="folder or Hub name")
    prompt.add_argument("--prompt", metavar="TEXT", help="beginning of the text (standard input)")
    prompt.add_argument("--prompt_file", type=existing_file, metavar="FILE", help="UTF-8 text file to go on from")
    add("--max_new_tokens", type=at_least_one, default=100, help="tokens to write at most (%(default)s)")
    add("--do_sample", action=argparse.BooleanOptionalAction, default=True, help="draw tokens, or take the likeliest")
    add("--temperature", type=positive, help="of sampling: below 1 likely tokens are drawn more often")
    add("--top_k", type=at_least_one, help="of sampling: draw from so many of the likeliest tokens")
    add("--top_p", type=positive, help="of sampling: draw from the likeliest tokens of this probability together")
    add("--repetition_penalty", type=positive, help="above 1: make tokens that the text has less likely")
    add("--seed", type=at_least_zero, help="of the random numbers (another one each time)")
    add("--device", help="(cuda where there is one, otherwise cpu)")
    options = parser.parse_args(argv)
    given = [f"--{name}" for name in SAMPLING if getattr(options, name) is not None]
    if given and not options.do_sample:
        parser.error(f"{given[0]} does nothing with --no-do_sample")
    return options


def read_prompt(options: argparse.Namespace) -> str:
    """The beginning of the text, from the option, the file or standard input."""
    if options.prompt is not None:
        return options.prompt
    if options.prompt_file is not None:
        return options.prompt_file.read_text(encoding="utf-8").removesuffix("\n")
    if sys.stdin.isatty():
        print("type the beginning of the text, then Ctrl-D on a line of its own", file=sys.stderr)
    return sys.stdin.read().removesuffix("\n")


def generate(options: argparse.Namespace) -> None:
    """Print the prompt and the text that the model generates."""
    load_config(options.model, "model")
    check_writes_text(options.model)
    # With `add_eos_token` a model of sentences would read the token that ends a sentence behind the prompt.
    tokenizer = load_tokenizer(options.model, add_eos_token=False)
    prompt = read_prompt(options)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"].long()
    if ids.shape[1] == 0:
        raise ValueError("the prompt has no token: give the beginning of a text, with --prompt or --prompt_file")
    device = find_device(options.device)
    model = load_language_model(options.model, dtype="auto").to(device).eval()
    names = ("max_new_tokens", "do_sample", "repetition_penalty", *SAMPLING)
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    ends, write = model.generation_config.eos_token_id, functools.partial(print, end="", flush=True)
    # The spacing of the first word depends on few tokens before it, which are decoded again with each new one.
    reply = Reply(tokenizer, write, options.max_new_tokens, ends, prompt=ids[0, -20:].tolist())
    given |= {"stopping_criteria": [reply], "num_beams": 1, "use_cache": True}
    write(prompt)
    Conversations(model, limit=0).generate(ids.to(device), seed=options.seed, **given)
    reply.end()
    write("\n")


if __name__ == "__main__":
    main()
