"""Tokenise a corpus into Arrow, with the conventions of the published results.

    txl-prepare --corpus wikitext-103 --input wikitext-103-v1.zip --output data/wikitext-103
    txl-prepare --corpus wikitext-2 --output data/wikitext-2       # from the Hub
    txl-prepare --corpus text --input book.txt --mode characters --output data/book
    txl-prepare --corpus wikitext-2 --input wikitext-2 --tokenizer gpt2 --output data/gpt2
    txl-prepare --corpus midi --input midi-files --transpose 5 --output data/music

    corpus        as distributed                             symbols                      vocabulary
    wikitext-103  wiki.{train,valid,test}.tokens             words, <eos> ends each line  of the training text
    wikitext-2    the same                                   the same                     of all three texts
    ptb           ptb.{train,valid,test}.txt                 the same, in lower case      of all three texts
    lm1b          news.en-*, news.en.heldout-00000-of-00050  words, <S> around each line  see below
    enwik8        a file of 100,000,000 bytes                bytes without line feeds     of all three texts
    text8         a file of 100,000,000 characters           letters, and _ for a space   of all three texts
    text          one file, or files for train, valid, test  as --mode says               of the training text

Symbols are numbered by frequency, the most frequent first, after `<eos>`. lm1b comes with a vocabulary,
`1b_word_vocab.txt`, which is read if it lies beside the text; otherwise it is the words that occur three times in the
training text. As in the originals, its validation text is the test text. enwik8 and text8, in one file, are cut into
90, 5 and 5 % of their bytes; their vocabularies have the published 204 and 27 symbols, no `<eos>`, `<unk>` or `<pad>`,
and another symbol is an error: for those, and for another tokenizer, give `--corpus text`.

`--input` is a folder with these files, the archive they come in, or the one file; `train.txt`, `valid.txt`,
`test.txt`, the names that the originals' getdata.sh gives, are accepted. Hidden files are passed over.

`--corpus text` reads files that end in `.txt`, `.text`, `.tokens` or `.raw`, alone or packed (`.gz`, `.bz2`, `.xz`). A
word in their names or their folders' names says which part they are: train or training; valid, validation, val or dev;
test. Where none has such a word, all are one text, in the order of their names, of which 90, 5 and 5 % of the lines
are taken. Its characters and bytes are numbered over all three parts; lines keep their ends. With `--mode bytes`
carriage returns and a byte-order mark are bytes like others; otherwise `\\r\\n` and `\\r` are read as `\\n`, and the
mark is no part of the text. Its vocabulary begins with `<eos>`, `<unk>` and `<pad>`.

`--dataset` is a data set on the Hub, a folder of one, or a file of records (`.jsonl`, `.csv`, `.tsv`, `.parquet`), and
`--column` the name of its texts. A word in the names of its splits says which part they are, as in names of files; a
data set that has `train` alone is cut.

`--corpus midi` is a folder with MIDI files, however nested, as tokens of MidiTok: REMI, or with `--tokens compound`
compound words, each an event of several attributes. `--bpe SIZE` joins tokens that often follow one another, and
`--tokenizer FOLDER` has another tokenizer of MidiTok. A piece goes into a split as a text does, or 5 % of the pieces
go into validation and test each, and with it whatever has the same notes in another key. `--transpose N` adds each
piece of the training split in the keys up to N semitones above and below in which the tokenizer has all of its notes.
Each piece begins with BOS and ends with EOS. Files that cannot be read are named, counted and left out; of files with
notes that the tokenizer lacks the number of these is printed.

The folder written holds a `datasets.DatasetDict` with the splits train, validation and test and one column,
`token_ids`, one token a row; the tokenizer, which reads line ends as the corpus does; and `corpus.json`, with the
files of each split and its counts:

* `tokens`;
* `words`: parted by white space, and one more for the end of each line, as perplexities per word are published, but
  for enwik8 and text8, whose tokens leave line feeds out;
* `characters`, as bits per character are published for: of enwik8 bytes without line feeds, otherwise all;
* `characters_without_token`, `characters_unknown`, where the tokenizer lacks some: those that it passes over, and
  those that its unknown token stands for;
* `bytes`, as they were read;
* `documents`, with `--document_end`, which names the token that ends each of them. `txl-train` and `txl-evaluate` then
  read each document without what was before it.

    DatasetDict.load_from_disk(folder)["train"].with_format("numpy")["token_ids"]    # for TokenStream
    AutoTokenizer.from_pretrained(folder)

The folder appears when it is complete, or not at all.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..command_line import CommandParser, at_least_one, hub_or_folder, interrupted_by_signals, one_line_errors
from ..data import corpora
from ..data.corpora import CORPORA, LINES, SPLITS, Convention, some, wanted
from ..data.loading import ends_lines, load_tokenizer
from ..data.texts import (
    INFORMATION,
    LINE_FEED,
    count_passed,
    document_end_token,
    encode_bytes,
    encode_lines,
    reads_streams,
)
from ..files import disk_errors, name_of, sync
from ..transfo_xl.tokenization_transfo_xl import TransfoXLTokenizer
from ..transfo_xl.tokenization_transfo_xl_backend import LINE_END_MODES, MODES

if TYPE_CHECKING:
    from datasets import Dataset

MIDI = "midi"
# Corpora of other things than text, by the module whose `prepare` is called instead of `prepare_text`.
PROGRAMS = {MIDI: "txl_hf.midi.corpus"}
# Options of the command line about the symbols of a text.
SYMBOLS = ("mode", "lower_case", "min_freq", "max_size")


@one_line_errors()
@interrupted_by_signals()
def main(argv: list[str] | None = None) -> None:
    options = parse_arguments(argv)
    output: Path = options.output
    if os.path.lexists(output):
        raise ValueError(f"{output} exists: choose another folder with --output, or remove it")
    if "::" in str(output.absolute()):
        raise ValueError(f"{output}: datasets takes '::' for a chain of file systems: choose another --output")
    output.parent.mkdir(parents=True, exist_ok=True)
    beside = tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-")
    with beside as scratch, disk_errors(output), no_bars_in_logs():
        information = prepare(options, Path(scratch))
        written = Path(scratch) / "output"
        sync(written)
        # `rename` fails if somebody has filled a folder of this name meanwhile.
        written.rename(output)
    for split, counts in information["splits"].items():
        print(f"{split:<10}", ", ".join(f"{count:>11,} {name}" for name, count in counts.items()))
    size = information["vocab_size"]
    sizes = f"{size:,}" if isinstance(size, int) else " × ".join(map(str, size))
    print(f"{output} holds {information['corpus']} with a vocabulary of {sizes}.")


@contextlib.contextmanager
def no_bars_in_logs() -> Iterator[None]:
    """No bars of datasets if standard error is no terminal, because a log would get a line for each state."""
    import datasets

    silenced = not sys.stderr.isatty() and not datasets.are_progress_bars_disabled()
    if silenced:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if silenced:
            datasets.enable_progress_bars()


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, source = parser.add_argument, parser.add_mutually_exclusive_group()
    add("--corpus", choices=[*CORPORA, *PROGRAMS], required=True, help="the conventions to follow")
    source.add_argument("--input", type=Path, help="folder, archive or file")
    rows = "data set on the Hub, folder or file of one; a row is a line or more"
    source.add_argument("--dataset", type=hub_or_folder, help=rows)
    add("--config", help="of --dataset: its configuration")
    add("--column", help="of --dataset: its column with the text (text)")
    other = "folder or Hub name of a tokenizer to use instead of the text's symbols"
    add("--tokenizer", type=hub_or_folder, help=other)
    add("--output", type=Path, required=True, help="folder to write")
    add("--document_end", metavar="TOKEN", help="token that ends each document (the text is one)")
    add("--num_proc", type=at_least_one, default=os.cpu_count(), help="processes (%(default)s)")
    text = parser.add_argument_group("symbols of --corpus text")
    text.add_argument("--mode", choices=[mode for mode in MODES if mode != "lm1b"], help="(whitespace)")
    text.add_argument("--lower_case", action="store_true", default=None)
    text.add_argument("--min_freq", type=int, help="rarer symbols become <unk> (0)")
    text.add_argument("--max_size", type=int, help="so many of the most frequent symbols are kept (all)")
    music = parser.add_argument_group("tokens of --corpus midi")
    music.add_argument("--tokens", choices=["remi", "compound"], help="(remi)")
    music.add_argument("--bpe", type=int, metavar="SIZE", help="size of a vocabulary with joined tokens (none are)")
    music.add_argument("--transpose", type=int, metavar="SEMITONES", help="up and down, training split only (0)")
    options = parser.parse_args(argv)
    for names, fits, otherwise in (
        (("config", "column"), options.dataset is not None, "of a data set: name it too, with --dataset"),
        (("tokens", "bpe", "transpose"), options.corpus == MIDI, f"for --corpus {MIDI}"),
        (("document_end",), options.corpus != MIDI, "for a text: pieces of music end with a token of their own"),
        (("tokens",), not options.tokenizer, "for a tokenizer that is made, not for the one of --tokenizer"),
        (("bpe",), options.tokens != "compound", "for --tokens remi: events of compound tokens are not joined"),
        (
            SYMBOLS,
            options.corpus == "text" and not options.tokenizer,
            "for --corpus text without --tokenizer, which otherwise decide",
        ),
    ):
        if not fits and (given := [name for name in names if getattr(options, name) is not None]):
            parser.error(f"--{given[0]} is {otherwise}")
    if options.corpus == MIDI and options.input is None:
        parser.error(f"--corpus {MIDI} needs --input, a folder of MIDI files or its archive")
    if not 0 <= (options.transpose or 0) <= 11:
        parser.error(f"--transpose {options.transpose} must be 0 to 11 semitones")
    return options


def prepare(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Write the corpus to scratch/output; returns the contents of corpus.json."""
    from datasets import DatasetDict

    make = import_module(PROGRAMS[options.corpus]).prepare if options.corpus in PROGRAMS else prepare_text
    tokens, tokenizer, information = make(options, scratch)
    folder = scratch / "output"
    DatasetDict(tokens).save_to_disk(folder)
    tokenizer.save_pretrained(folder)
    (folder / INFORMATION).write_text(json.dumps(information, indent=2) + "\n", encoding="utf-8")
    return information


def prepare_text(options: argparse.Namespace, scratch: Path) -> tuple[dict[str, "Dataset"], Any, dict[str, Any]]:
    """The tokens of each split of a text, their tokenizer, and the contents of corpus.json."""
    import pyarrow as pa
    from datasets import Dataset

    convention = chosen_convention(options)
    tokenizer = None if options.tokenizer is None else text_tokenizer(options, convention)
    mode = convention.mode if tokenizer is None else getattr(tokenizer, "mode", None)
    texts, files, vocabulary = read(options, convention, mode, scratch)
    if len(texts) == 1:
        texts = corpora.cut(texts["train"], convention)
    if convention.stream:
        if convention.mode == "characters":
            texts = {split: text.strip() for split, text in texts.items()}
        counts = {split: corpora.count_stream(text) for split, text in texts.items()}
    else:
        counts = {split: count_lines(lines, options.num_proc) for split, lines in texts.items()}
    for split, count in counts.items():
        if count["characters"] == 0 or count["words"] == 0:
            raise ValueError(f"the {split} text of {source_name(options)} is empty")
    if convention.stream:
        tokenizer = tokenizer or stream_tokenizer(texts, convention)
        # pyarrow tables, because `from_dict` would look at every token.
        ids = {split: encode_bytes(tokenizer, text) for split, text in texts.items()}
        tokens = {split: Dataset(pa.table({"token_ids": found})) for split, found in ids.items()}
    else:
        tokenizer = tokenizer or word_tokenizer(texts, convention, vocabulary)
        tokens = {
            split: tokenise(lines, tokenizer, options.num_proc, scratch / f"{split}.arrow")
            for split, lines in texts.items()
        }
        # Counted for the held-out texts, because a model's figures are of them.
        for split in SPLITS[1:]:
            counts[split] |= count_passed(tokenizer, texts[split]["text"], f"the {split} text")
    for split, found in tokens.items():
        if len(found) == 0:
            raise ValueError(f"the {split} text of {source_name(options)} has no token: the tokenizer lacks all of it")
    document_end = None
    if options.document_end is not None:
        document_end = document_end_token(tokenizer, options.document_end)
        for split, ends in count_documents(tokens, document_end).items():
            if ends == 0:
                raise ValueError(f"--document_end {options.document_end} is not in the {split} text")
            counts[split]["documents"] = ends
    information = {
        "corpus": options.corpus,
        "source": source_name(options),
        "files": files,
        "tokenizer": options.tokenizer or "vocabulary of the text",
        "mode": getattr(tokenizer, "mode", None),
        "lower_case": getattr(tokenizer, "lower_case", None),
        "line_end": tokenizer.eos_token if ends_lines(tokenizer) and not convention.stream else None,
        "document_end": document_end,
        "vocab_size": len(tokenizer),
        "splits": {split: {"tokens": len(tokens[split])} | counts[split] for split in SPLITS},
        "versions": {name: version(name) for name in ("txl-hf", "transformers", "datasets")},
    }
    return tokens, tokenizer, information


def chosen_convention(options: argparse.Namespace) -> Convention:
    """The convention of the corpus, with the options of the command line about symbols."""
    changes: dict[str, Any] = {name: value for name in SYMBOLS if (value := getattr(options, name)) is not None}
    if changes.get("mode") in ("characters", "bytes"):
        # Held-out texts count too, because an alphabet should lack none of their symbols.
        changes["counted"] = SPLITS
    return dataclasses.replace(CORPORA[options.corpus], **changes)


def read(
    options: argparse.Namespace, convention: Convention, mode: str | None, scratch: Path
) -> tuple[dict[str, Any], dict[str, list[str]] | None, Path | None]:
    """The text of each split, or one text to be cut; the names of the files; the vocabulary's file, if any."""
    if options.input is not None:
        source = corpora.find_files(options.input, options.corpus, convention, scratch)
        root, splits = source.root, source.splits.items()
        names = {split: [str(path.relative_to(root)) for path in paths] for split, paths in splits}
        for split, files in names.items():
            part = "to be cut into train, validation and test" if len(names) == 1 else split
            print(f"{part}: {some(files)}")
        if source.unread:
            print(f"not read: {some([path.name for path in source.unread])}")
        return corpora.read_files(source, options.input, convention, mode, scratch), names, source.vocabulary
    if options.dataset is None:
        if convention.hub is None:
            raise ValueError(
                f"--corpus {options.corpus} needs a text: give {wanted(convention)} with --input, or a data set with "
                "--dataset"
            )
        options.dataset, options.config = convention.hub
    column = options.column or "text"
    return corpora.read_rows(options.dataset, options.config, column, convention, mode, scratch), None, None


def source_name(options: argparse.Namespace) -> str:
    if options.input is not None:
        return name_of(options.input)
    return f"{options.dataset} {options.config}" if options.config else options.dataset


def text_tokenizer(options: argparse.Namespace, convention: Convention) -> PreTrainedTokenizerBase:
    """The tokenizer of --tokenizer; an error or a warning where it does not read the corpus as published."""
    name = options.tokenizer
    try:
        tokenizer = load_tokenizer(name)
    except ValueError as error:
        raise ValueError(f"--tokenizer: {error}") from None
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError(f"--tokenizer {name} is of MidiTok and reads no text: use it with --corpus {MIDI}")
    if convention.stream and not reads_streams(tokenizer):
        raise ValueError(
            f"--corpus {options.corpus} is one stream of {convention.mode}, and --tokenizer {name} has other tokens: "
            "read the file as lines, with --corpus text"
        )
    if options.corpus.startswith("wikitext") and getattr(tokenizer, "mode", None) == "moses":
        print(
            f"warning: {options.corpus} is tokenised already, and --tokenizer {name} takes @-@ apart: to have the "
            f"corpus's ids, save TransfoXLTokenizer.from_pretrained({name!r}, mode='whitespace', line_ends=True) in a "
            "folder, and give that",
            file=sys.stderr,
        )
    return tokenizer


def map_lines(lines: "Dataset", function: Callable[..., dict], num_proc: int, **options: Any) -> "Dataset":
    """`lines.map` of a function of batches of lines."""
    columns = {"input_columns": "text", "remove_columns": "text"}
    processes = corpora.useful_processes(len(lines) // LINES, num_proc)
    return lines.map(function, batched=True, batch_size=LINES, num_proc=processes, **columns, **options)


def count_lines(lines: "Dataset", num_proc: int) -> dict[str, int]:
    """Counts of words (and one more for each line), characters and bytes."""
    batches = map_lines(lines, corpora.count_batch, num_proc, keep_in_memory=True, desc="count")
    counts = {name: int(np.sum(batches[name][:])) for name in batches.column_names}
    if counts["words"]:
        counts["words"] += len(lines)
    return counts


def count_documents(tokens: dict[str, "Dataset"], document_end: int) -> dict[str, int]:
    """The number of ended documents in each split."""
    import pyarrow.compute as pc

    columns = {split: data.data.column("token_ids") for split, data in tokens.items()}
    return {split: pc.sum(pc.equal(column, document_end)).as_py() or 0 for split, column in columns.items()}


def tokenise(lines: "Dataset", tokenizer: PreTrainedTokenizerBase, num_proc: int, cache: Path) -> "Dataset":
    """The column token_ids, one token a row, of lines."""
    from datasets import Features, Value

    options = {"fn_kwargs": {"tokenizer": tokenizer}, "cache_file_name": str(cache), "desc": "tokenise"}
    return map_lines(lines, tokenise_batch, num_proc, features=Features({"token_ids": Value("int32")}), **options)


def tokenise_batch(lines: list[str], tokenizer: PreTrainedTokenizerBase) -> dict[str, np.ndarray]:
    return {"token_ids": encode_lines(tokenizer, lines).astype(np.int32)}


def word_tokenizer(texts: dict[str, "Dataset"], convention: Convention, vocabulary: Path | None) -> TransfoXLTokenizer:
    """The tokenizer of a corpus of lines, with the symbols of the text."""
    if vocabulary is not None:
        tokenizer = TransfoXLTokenizer(vocab_file=str(vocabulary), mode=convention.mode)
        if tokenizer.eos_token is None or tokenizer.unk_token is None:
            raise ValueError(f"{vocabulary} is no vocabulary of the corpus: it has no <S> or no <UNK>")
        return tokenizer
    options: dict[str, Any] = {}
    if convention.mode in LINE_END_MODES:
        options["line_ends"] = True
    if not convention.layouts:
        # A user's vocabulary gets the tokens that other programs need; a published vocabulary keeps its size.
        options |= {"eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return TransfoXLTokenizer.train_from_iterator(
        batches([texts[split] for split in convention.counted]),
        mode=convention.mode,
        lower_case=convention.lower_case,
        min_freq=convention.min_freq,
        max_size=convention.max_size,
        **options,
    )


def batches(texts: list["Dataset"]) -> Iterator[list[str]]:
    with tqdm(total=sum(map(len, texts)), unit="line", desc="vocabulary", disable=None) as bar:
        for batch in chain.from_iterable(lines.iter(LINES) for lines in texts):
            yield batch["text"]
            bar.update(len(batch["text"]))


def stream_tokenizer(texts: dict[str, bytes], convention: Convention) -> TransfoXLTokenizer:
    """The tokenizer of a stream of bytes: the most frequent byte first, ties in the order of first occurrence."""
    counts = Counter(b"".join(texts[split] for split in SPLITS))
    found = [byte for byte, _ in counts.most_common() if byte != LINE_FEED]
    if convention.mode == "bytes":
        return TransfoXLTokenizer.from_symbols(map(str, found), mode="bytes")
    symbols = bytes(found).decode("latin-1").replace(" ", "_")
    if strange := re.sub("[a-z_]", "", symbols):
        raise ValueError(f"text8 is small letters and spaces, but this text has {strange[0]!r}")
    return TransfoXLTokenizer.from_symbols(symbols, mode="characters")


if __name__ == "__main__":
    main()
