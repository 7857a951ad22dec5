"""Score a text with a Transformer-XL: every token once, at any memory length, as JSON.

    python examples/evaluate_lm.py --model wt103 --data data/wikitext-103 --segment_length 64 --memory_length 640 \
        --clamp_len 400 --same_length true
    python examples/evaluate_lm.py --model demo-output --data book.txt --memory_length 0 64 128 --output result.json
    python examples/evaluate_lm.py --model wt103 --data data/wikitext-103 --memory_length 640 --sliding_window 640 \
        --max_tokens 1000

`--data` is a folder of `prepare_corpus.py`, of which `--split` is read, or a UTF-8 text file, which is tokenised with
the model's tokenizer or with `--tokenizer`. Several values of `--memory_length` are scored one after the other.
`--sliding_window N` scores the text in the vanilla way beside them: the last N tokens are read anew for every token,
without memory.

The result, on standard output and in `--output`, holds for each of them the negative log-likelihood, perplexity and
bits of a token, perplexity per word and bits per character of the text (words and characters as `prepare_corpus.py`
counts them), and all settings that these figures depend on. An infinite perplexity, for which JSON has no number, is
null.
"""

import argparse
import dataclasses
import datetime
import json
import math
import platform
import sys
import time
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import DatasetDict
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from prepare_corpus import INFORMATION, CorpusError, count_batch, count_stream, encode_lines, ends_lines, look_up
from txl_hf import TransfoXLConfig, TransfoXLForCausalLM, evaluate_language_model
from txl_hf.evaluation import LanguageModelEvaluation


@dataclasses.dataclass(frozen=True)
class Text:
    """A tokenised text; `words` and `characters` are those of the whole, None where they are not known."""

    token_ids: Any
    tokenizer: PreTrainedTokenizerBase
    corpus: str | None = None
    words: int | None = None
    characters: int | None = None


def main(argv: list[str] | None = None):
    options = parse_arguments(argv)
    if not options.progress:
        transformers.logging.disable_progress_bar()
    try:
        if options.output is not None and options.output.exists():
            raise CorpusError(f"{options.output} exists: choose another file with --output, or remove it")
        result = run(options)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    text = json.dumps(result, indent=2, allow_nan=False)
    print(text)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        partial = options.output.with_name(f".{options.output.name}.partial")
        partial.write_text(text + "\n", encoding="utf-8")
        partial.rename(options.output)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or Hub name")
    parser.add_argument("--data", type=Path, required=True, help="folder of prepare_corpus.py, or a text file")
    parser.add_argument("--split", choices=["train", "validation", "test"], default="test", help="(%(default)s)")
    parser.add_argument("--tokenizer", help="folder or Hub name, for a text file (the model's)")
    parser.add_argument("--segment_length", type=int, help="tokens in one pass (the model's tgt_len)")
    parser.add_argument("--memory_length", type=int, nargs="+", help="one or more (the model's mem_len)")
    parser.add_argument(
        "--sliding_window", type=int, nargs="+", default=[], help="window lengths to score beside them"
    )
    parser.add_argument("--ext_len", type=int, help="tokens read again with each segment (the model's)")
    parser.add_argument("--clamp_len", type=int, help="(the model's)")
    parser.add_argument("--same_length", choices=["true", "false"], help="(the model's)")
    parser.add_argument("--batch_size", type=int, default=1, help="streams that the text is cut into (%(default)s)")
    parser.add_argument(
        "--warm_up", type=int, default=0, help="tokens of each stream read but not scored (%(default)s)"
    )
    parser.add_argument("--max_tokens", type=int, help="score the beginning of the text only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="(%(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--progress", action="store_true", help="show a progress bar")
    options = parser.parse_args(argv)
    for name in ("sliding_window", "max_tokens"):
        if min(np.atleast_1d(getattr(options, name) or 1)) < 1:
            parser.error(f"--{name} must be at least 1")
    return options


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Score the text with each memory length and each sliding window; returns what is written."""
    config = load_config(options.model)
    text = read_text(options)
    if len(text.token_ids) == 0:
        raise CorpusError(f"{options.data} is empty: it has no token")
    check_vocabulary(text, config, options)
    if options.max_tokens is not None and options.max_tokens < len(text.token_ids):
        text = dataclasses.replace(text, token_ids=text.token_ids[: options.max_tokens], words=None, characters=None)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    model.to(options.device)
    return {
        "model": options.model,
        "parameters": model.num_parameters(),
        "initial_memory": config.initial_memory,
        "same_length_counts_self": config.same_length_counts_self,
        "attn_type": config.attn_type,
        "attn_implementation": model.config._attn_implementation,
        "data": str(options.data),
        "corpus": text.corpus,
        "split": options.split if text.corpus else None,
        "words": text.words,
        "characters": text.characters,
        "device": torch.cuda.get_device_name() if model.device.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "dtype": options.dtype,
        "versions": {name: version(name) for name in ("txl-hf", "transformers", "torch")},
        "date": datetime.date.today().isoformat(),
        "results": [score(model, text, options, **settings) for settings in protocols(options, config)],
    }


def protocols(options: argparse.Namespace, config: TransfoXLConfig) -> list[dict[str, Any]]:
    """What each evaluation sets."""
    same_length = None if options.same_length is None else options.same_length == "true"
    with_memory = [
        {
            "protocol": "memory",
            "segment_length": options.segment_length or config.tgt_len,
            "memory_length": memory_length,
            "ext_len": options.ext_len,
            "same_length": same_length,
        }
        for memory_length in options.memory_length or [None]
    ]
    # What a query sees is the window itself: same_length would take it away.
    windows = [
        {
            "protocol": "sliding window",
            "segment_length": 1,
            "memory_length": 0,
            "ext_len": window - 1,
            "same_length": False,
        }
        for window in options.sliding_window
    ]
    return with_memory + windows


def score(
    model: TransfoXLForCausalLM, text: Text, options: argparse.Namespace, protocol: str, **settings
) -> dict[str, Any]:
    started = time.perf_counter()
    result = evaluate_language_model(
        model,
        text.token_ids,
        batch_size=options.batch_size,
        warm_up=options.warm_up,
        clamp_len=options.clamp_len,
        progress=options.progress,
        **settings,
    )
    seconds = time.perf_counter() - started
    speed = {"seconds": seconds, "tokens_per_second": result.tokens / seconds}
    figures = {"protocol": protocol} | measures(result, text) | dataclasses.asdict(result) | speed
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in figures.items()
    }


def measures(result: LanguageModelEvaluation, text: Text) -> dict[str, float | None]:
    return {
        "nll": result.nll,
        "perplexity": result.perplexity,
        "bits_per_token": result.bits_per_token,
        "perplexity_per_word": result.perplexity_per_word(text.words) if text.words else None,
        "bits_per_character": result.bits_per_character(text.characters) if text.characters else None,
    }


# ---- what is scored ---------------------------------------------------------------------------------------------


def load_config(name: str) -> TransfoXLConfig:
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        where = "" if Path(name).exists() else "there is no such folder here, and as a name on the Hub "
        raise CorpusError(f"--model {name} does not load: {where}{error}") from None
    if not isinstance(config, TransfoXLConfig):
        raise CorpusError(f"--model {name} is a {config.model_type}, not a Transformer-XL")
    return config


def read_text(options: argparse.Namespace) -> Text:
    if not options.data.exists():
        raise CorpusError(f"--data {options.data} does not exist")
    if options.data.is_dir():
        if options.tokenizer is not None:
            raise CorpusError(f"--tokenizer is for a text file: {options.data} has been tokenised")
        return read_prepared(options.data, options.split)
    tokenizer = load_tokenizer(options.tokenizer or options.model)
    if tokenizer is None:
        raise CorpusError(f"{options.tokenizer or options.model} has no tokenizer: name one with --tokenizer")
    return read_raw(options.data, tokenizer)


def read_prepared(folder: Path, split: str) -> Text:
    if not (folder / INFORMATION).is_file():
        raise CorpusError(f"{folder} has no {INFORMATION}: it is no folder of prepare_corpus.py")
    information = json.loads((folder / INFORMATION).read_text(encoding="utf-8"))
    counts = information["splits"][split]
    return Text(
        token_ids=DatasetDict.load_from_disk(folder)[split].with_format("numpy")["token_ids"],
        tokenizer=AutoTokenizer.from_pretrained(folder),
        corpus=information["corpus"],
        words=counts["words"],
        characters=counts["characters"],
    )


def read_raw(path: Path, tokenizer: PreTrainedTokenizerBase) -> Text:
    """A file as prepare_corpus.py would read it for this tokenizer."""
    mode, line_feed = getattr(tokenizer, "mode", None), {"bytes": "10", "characters": "\n"}
    if mode in line_feed and line_feed[mode] not in tokenizer.symbols:
        # enwik8 and text8.
        stream = path.read_bytes() if mode == "bytes" else path.read_bytes().strip()
        counts, token_ids = count_stream(stream), look_up(stream, tokenizer).with_format("numpy")["token_ids"]
        return Text(token_ids, tokenizer, words=counts["words"], characters=counts["characters"])
    try:
        # Without a byte-order mark, as prepare_corpus.py reads it.
        with path.open(encoding="utf-8-sig") as file:
            lines = file.readlines()
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path} is not UTF-8 text: {error}") from None
    [words], [characters], _ = count_batch(lines).values()
    if words == 0:
        raise CorpusError(f"{path} is empty: it has no word")
    token_ids = encode_lines(tokenizer, lines, ends_lines(tokenizer))
    return Text(token_ids, tokenizer, words=words + len(lines), characters=characters)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """None where there is none."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, TypeError):
        return None


def check_vocabulary(text: Text, config: TransfoXLConfig, options: argparse.Namespace):
    """The text's symbols must be the model's."""
    if len(text.tokenizer) > config.vocab_size:
        raise CorpusError(
            f"{options.data} has a vocabulary of {len(text.tokenizer)}, which does not fit {options.model} with one "
            f"of {config.vocab_size}"
        )
    trained_with = load_tokenizer(options.model)
    if trained_with is None or trained_with.get_vocab() == text.tokenizer.get_vocab():
        return
    symbols, expected = (list_symbols(tokenizer) for tokenizer in (text.tokenizer, trained_with))
    pairs = zip_longest(symbols, expected)
    index, (found, wanted) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    raise CorpusError(
        f"{options.data} has another vocabulary than {options.model}: {len(symbols)} symbols instead of "
        f"{len(expected)}, and id {index} is {found!r} instead of {wanted!r}"
    )


def list_symbols(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return tokenizer.convert_ids_to_tokens(range(len(tokenizer)))


if __name__ == "__main__":
    main()
