"""Articles as in Appendix E: a context of the test text, the model's continuation, and what really follows.

    python examples/paper/article.py                              # the miniature's model with recurrence
    python examples/paper/article.py --model wt103 --data data/wikitext-103 --memory_length 1600 --new_tokens 1000
    python examples/paper/article.py --smoke --output build/articles

The contexts begin at random places of the test text (`--seed`); the first ones are written, none is picked. Words are
sampled from the 40 most probable ones, as in the paper. `articles.md` has them all.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import transformers

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import ablation
from miniature import WORK, MiniatureParser, load_given
from txl_hf import TransfoXLForCausalLM
from txl_hf.command_line import at_least_one, hub_or_folder, one_line_errors


def main(argv: list[str] | None = None):
    options = parse_arguments(argv)
    transformers.logging.disable_progress_bar()
    with one_line_errors():
        model, token_ids, tokenizer, name = load(options)
        text = f"Model: {name}, with a memory of {model.config.mem_len}.\n"
        for number, start in enumerate(places(len(token_ids), options), start=1):
            text += article(model, token_ids, tokenizer, start, number, options)
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "articles.md").write_text(text, encoding="utf-8")
        print(text)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = MiniatureParser(__doc__, WORK)
    parser.add_argument(
        "--model", type=hub_or_folder, help="folder or Hub name (the miniature's model with recurrence)"
    )
    parser.add_argument("--data", type=Path, help="folder of prepare_corpus.py, with --model")
    parser.add_argument("--memory_length", type=int, help="(the model's mem_len)")
    parser.add_argument("--context", type=at_least_one, help="tokens read first (512; miniature: 80)")
    parser.add_argument("--new_tokens", type=at_least_one, help="tokens written (500; miniature: 80)")
    parser.add_argument("--top_k", type=int, default=40, help="(%(default)s)")
    parser.add_argument("--articles", type=at_least_one, default=3, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the places and of the words (%(default)s)")
    options = parser.parse_study(argv)
    if bool(options.model) != bool(options.data):
        parser.error("--model and --data go together")
    if options.context is None:
        options.context = 80 if options.model is None else 512
    if options.new_tokens is None:
        options.new_tokens = 80 if options.model is None else 500
    return options


def load(options: argparse.Namespace) -> tuple[TransfoXLForCausalLM, Any, Any, str]:
    """The model, the test text as token ids, its tokenizer, and what it is called."""
    if options.model is None:
        model, corpus, name = ablation.trained("recurrence-ours-full", options)
        token_ids, tokenizer = corpus.texts["test"], corpus.tokenizer
        model.reset_memory_length(options.sizes.longest)
    else:
        [model], text = load_given([options.model], options.data, "test")
        token_ids, tokenizer, name = text.token_ids, text.tokenizer, options.model
    if options.memory_length is not None:
        model.reset_memory_length(options.memory_length)
    return model.eval(), token_ids, tokenizer, name


def places(tokens: int, options: argparse.Namespace) -> list[int]:
    """Where the contexts begin.

    Raises:
        ValueError: the text is shorter than a context and what follows it.
    """
    room = tokens - options.context - options.new_tokens
    if room < 1:
        raise ValueError(
            f"a text of {tokens} tokens has no room for --context {options.context} and --new_tokens "
            f"{options.new_tokens}"
        )
    return np.random.default_rng(options.seed).integers(room, size=options.articles).tolist()


def article(model, token_ids, tokenizer, start: int, number: int, options: argparse.Namespace) -> str:
    """One article as a section of Markdown: context, generated text, reference."""
    middle = start + options.context
    context = torch.as_tensor(np.asarray(token_ids[start:middle]).astype(np.int64))[None].to(model.device)
    torch.manual_seed(options.seed + number)
    written = model.generate(
        context,
        # No token is padding, not even one that the tokenizer would pad by.
        attention_mask=torch.ones_like(context),
        do_sample=True,
        top_k=options.top_k,
        max_new_tokens=options.new_tokens,
        eos_token_id=None,
    )[0, options.context :]
    reference = token_ids[middle : middle + options.new_tokens]
    parts = {"Context": context[0], "Generated": written, "Reference": reference}
    sections = (f"**{name}.** {quote(tokenizer, ids)}" for name, ids in parts.items())
    return f"\n### Article {number}, from token {start} of the test text\n\n" + "\n\n".join(sections) + "\n"


def quote(tokenizer, ids) -> str:
    """A text as one paragraph of Markdown, in which nothing is markup."""
    text = tokenizer.decode([int(i) for i in ids]).replace("\n", " ")
    return "".join(f"\\{character}" if character in "\\`*_<>#|[]" else character for character in text)


if __name__ == "__main__":
    main()
