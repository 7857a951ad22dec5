"""Tokenise a corpus into Arrow, with the conventions of the published results.

    python examples/prepare_corpus.py --corpus wikitext-103 --input wikitext-103-v1.zip --output data/wikitext-103
    python examples/prepare_corpus.py --corpus wikitext-2 --output data/wikitext-2       # from the Hub
    python examples/prepare_corpus.py --corpus text --input book.txt --mode characters --output data/book
    python examples/prepare_corpus.py --corpus wikitext-2 --input wikitext-2 --tokenizer gpt2 --output data/gpt2

| corpus | as distributed | symbols | vocabulary |
|---|---|---|---|
| `wikitext-103` | `wiki.{train,valid,test}.tokens` | words, `<eos>` ends each line | of the training text |
| `wikitext-2` | the same | the same | of all three texts |
| `ptb` | `ptb.{train,valid,test}.txt` | the same, in lower case | of all three texts |
| `lm1b` | `news.en-*`, `news.en.heldout-00000-of-00050` | words, `<S>` begins and ends each line | see below |
| `enwik8` | the file `enwik8`, 100,000,000 bytes | bytes without line feeds | of all three texts |
| `text8` | the file `text8`, 100,000,000 characters | letters, and `_` for a space | of all three texts |
| `text` | one file; or `train*.txt`, `valid*.txt`, `test*.txt`; or other `*.txt` | `--mode` | of the training text |

Symbols are numbered by frequency, the most frequent first, after `<eos>`. lm1b comes with a vocabulary of its own,
`1b_word_vocab.txt`, read where it lies beside the text; otherwise it is the words that occur three times in the
training text. enwik8 and text8, in one file, are cut into 90, 5 and 5 % of their bytes. A text of your own that is not
in three parts is cut into 90, 5 and 5 % of its lines, several files in the order of their names. Its characters and
bytes are numbered over all three texts; lines keep their ends.

`--input` is a folder with these files, the archive they come in, or the one file that it is. The names that the
originals' getdata.sh gives the files (`train.txt`, `valid.txt`, `test.txt`) will do too. As in the originals, lm1b is
validated on its test text.

The folder written holds a `datasets.DatasetDict` with the splits train, validation and test and one column,
`token_ids`, one token a row; the tokenizer; and `corpus.json`, which counts each split:

* `tokens`;
* `words`: parted by white space, and one more for the end of each line, as perplexities per word are published;
* `characters`: those that bits per character are published for: of enwik8 bytes without line feeds, otherwise all;
* `bytes`, as they were read.

    DatasetDict.load_from_disk(folder)["train"].with_format("numpy")["token_ids"]    # for TokenStream
    AutoTokenizer.from_pretrained(folder)

It appears when all of it is complete, or not at all.
"""

import argparse
import dataclasses
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
from datasets import Dataset, DatasetDict, Features, Value, load_dataset
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from txl_hf import TransfoXLTokenizer

SPLITS = ("train", "validation", "test")
WORD_MODES = ("moses", "whitespace", "lm1b")
INFORMATION = "corpus.json"
LINE_FEED = 10
# Lines, and characters of a piece, that are tokenised together.
LINES = 4096
PIECE = 4096
TOKENS = Features({"token_ids": Value("int32")})


@dataclasses.dataclass(frozen=True)
class Convention:
    """How a corpus is distributed and read.

    Attributes:
        layouts: patterns of the file names of train, validation and test; the first layout that is complete is read.
        whole: pattern of the one file that the corpus may be instead, which is then cut 90 : 5 : 5.
        stream: the corpus is one stream of symbols, not lines.
        mode, lower_case: as for TransfoXLTokenizer.
        counted: the splits whose symbols make the vocabulary.
        min_freq: leave out symbols that occur less often.
        vocabulary: name of a file with the vocabulary beside the text.
        hub: data set and configuration on the Hub.
    """

    layouts: tuple[tuple[str, str, str], ...]
    whole: str | None = None
    stream: bool = False
    mode: str = "whitespace"
    lower_case: bool = False
    counted: tuple[str, ...] = SPLITS
    min_freq: int = 0
    vocabulary: str | None = None
    hub: tuple[str, str] | None = None


RENAMED = ("train.txt", "valid.txt", "test.txt")
RAW = ("train.txt.raw", "valid.txt.raw", "test.txt.raw")
WIKITEXT = (("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"), RENAMED)
HELD_OUT = "news.en.heldout-00000-of-00050"

CORPORA = {
    "wikitext-103": Convention(WIKITEXT, counted=("train",), hub=("Salesforce/wikitext", "wikitext-103-v1")),
    "wikitext-2": Convention(WIKITEXT, hub=("Salesforce/wikitext", "wikitext-2-v1")),
    "ptb": Convention((("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"), RENAMED), lower_case=True),
    "enwik8": Convention((RAW,), whole="enwik8", stream=True, mode="bytes"),
    "text8": Convention((RAW,), whole="text8", stream=True, mode="characters"),
    "lm1b": Convention(
        (("news.en-*", HELD_OUT, HELD_OUT),),
        mode="lm1b",
        counted=("train",),
        min_freq=3,
        vocabulary="1b_word_vocab.txt",
    ),
    "text": Convention((("train*.txt", "valid*.txt", "test*.txt"),), whole="*", counted=("train",)),
}


class CorpusError(ValueError):
    """What was given is not the corpus that it should be; the message names it."""


def main(argv: list[str] | None = None):
    options = parse_arguments(argv)
    output: Path = options.output
    try:
        if output.exists():
            raise CorpusError(f"{output} exists: choose another folder with --output, or remove it")
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
            information = prepare(options, Path(scratch))
            (Path(scratch) / "output").rename(output)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    for split, counts in information["splits"].items():
        print(f"{split:<10}", ", ".join(f"{count:>11,} {name}" for name, count in counts.items()))
    print(f"{output} holds {information['corpus']} with a vocabulary of {information['vocab_size']:,}.")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", choices=CORPORA, required=True, help="the conventions to follow")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--input", type=Path, help="folder, archive or file")
    source.add_argument("--dataset", help="a data set on the Hub, or a folder of one; a row is a line")
    parser.add_argument("--config", help="configuration of the data set")
    parser.add_argument("--column", default="text", help="column of the data set with the text (%(default)s)")
    parser.add_argument("--tokenizer", help="folder or Hub name of a tokenizer to use instead of the text's symbols")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--num_proc", type=int, default=os.cpu_count(), help="processes (%(default)s)")
    text = parser.add_argument_group("symbols of --corpus text")
    text.add_argument("--mode", choices=["whitespace", "moses", "characters", "bytes"], help="(whitespace)")
    text.add_argument("--lower_case", action="store_true", default=None)
    text.add_argument("--min_freq", type=int, help="rarer symbols become <unk> (0)")
    options = parser.parse_args(argv)
    chosen = [name for name in ("mode", "lower_case", "min_freq") if getattr(options, name) is not None]
    if chosen and (options.corpus != "text" or options.tokenizer):
        parser.error(f"--{chosen[0]} is for --corpus text without --tokenizer, which otherwise decide")
    if options.num_proc < 1:
        parser.error(f"--num_proc {options.num_proc} must be at least 1")
    return options


def prepare(options: argparse.Namespace, scratch: Path) -> dict:
    """Write the corpus to scratch/output; returns what corpus.json holds."""
    convention = chosen_convention(options)
    tokenizer = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
    texts, vocabulary = read(options, convention, scratch)
    if convention.stream:
        counts = {split: count_stream(text) for split, text in texts.items()}
    else:
        counts = {split: count_lines(text, options.num_proc) for split, text in texts.items()}
    for split, count in counts.items():
        if count["characters"] == 0 or count["words"] == 0:
            raise CorpusError(f"the {split} text of {source(options)} is empty")

    if tokenizer is None and convention.stream:
        tokenizer = stream_tokenizer(texts, convention)
        tokens = {split: look_up(text, tokenizer) for split, text in texts.items()}
    else:
        if tokenizer is None:
            tokenizer = word_tokenizer(texts, convention, vocabulary)
        if convention.stream:
            texts = {split: pieces(text) for split, text in texts.items()}
        add_eos = ends_lines(tokenizer) and not convention.stream
        tokens = {
            split: tokenise(text, tokenizer, add_eos, options.num_proc, scratch / f"{split}.arrow")
            for split, text in texts.items()
        }

    output = scratch / "output"
    # Rows written at once. A slice of a column takes time in proportion to how often that was: 68 ms with the default
    # for 100 M tokens, 0.1 ms with this.
    datasets.config.DEFAULT_MAX_BATCH_SIZE = 1 << 24
    DatasetDict(tokens).save_to_disk(output)
    tokenizer.save_pretrained(output)
    information = {
        "corpus": options.corpus,
        "source": source(options),
        "tokenizer": options.tokenizer or "vocabulary of the text",
        "mode": getattr(tokenizer, "mode", None),
        "lower_case": getattr(tokenizer, "lower_case", None),
        "line_end": tokenizer.eos_token if ends_lines(tokenizer) and not convention.stream else None,
        "vocab_size": len(tokenizer),
        "splits": {split: {"tokens": len(tokens[split])} | counts[split] for split in SPLITS},
        "versions": {name: version(name) for name in ("txl-hf", "transformers", "datasets")},
    }
    (output / INFORMATION).write_text(json.dumps(information, indent=2) + "\n", encoding="utf-8")
    return information


def chosen_convention(options: argparse.Namespace) -> Convention:
    """The corpus' convention with what the command line says about a text of one's own."""
    convention = CORPORA[options.corpus]
    chosen = {name: getattr(options, name) for name in ("mode", "lower_case", "min_freq")}
    convention = dataclasses.replace(
        convention, **{name: value for name, value in chosen.items() if value is not None}
    )
    if options.corpus == "text" and convention.mode in ("characters", "bytes"):
        # An alphabet is closed: no symbol of the held-out texts may be missing.
        convention = dataclasses.replace(convention, counted=SPLITS)
    return convention


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise CorpusError(f"--tokenizer {name} does not load: {error}") from None


def source(options: argparse.Namespace) -> str:
    if options.input is not None:
        return options.input.name
    return " ".join(map(str, filter(None, (options.dataset, options.config)))) or " ".join(CORPORA[options.corpus].hub)


# ---- reading ----------------------------------------------------------------------------------------------------


def read(options: argparse.Namespace, convention: Convention, scratch: Path) -> tuple[dict, Path | None]:
    """The text of each split, bytes of a stream or a Dataset of lines, and the file with the vocabulary if any."""
    vocabulary = None
    if options.input is not None:
        files, vocabulary = find_files(options.input, options.corpus, convention, scratch)
        if convention.stream:
            texts = {split: paths[0].read_bytes() for split, paths in files.items()}
        else:
            texts = read_lines(files, options.input, scratch)
    else:
        texts = load_rows(options, convention, scratch)
        if convention.stream:
            texts = {split: "".join(rows["text"]).encode() for split, rows in texts.items()}
    if len(texts) == 1:
        texts = cut(texts["train"], convention)
    if convention.mode == "characters" and convention.stream:
        texts = {split: text.strip() for split, text in texts.items()}
    return texts, vocabulary


def find_files(
    path: Path, corpus: str, convention: Convention, scratch: Path
) -> tuple[dict[str, list[Path]], Path | None]:
    """The files of each split (of "train" alone where the corpus is one file), and that of the vocabulary if any."""
    if not path.exists():
        raise CorpusError(f"{path} does not exist")
    folder = unpack(path, scratch / "unpacked") if path.name.endswith((".zip", ".tgz", ".tar.gz")) else path
    if folder.is_file():
        if convention.whole is None:
            raise CorpusError(
                f"{path} is one file, but {corpus} is {wanted(convention)}: give their folder or archive"
            )
        return {"train": [folder]}, None
    for layout in convention.layouts:
        files = {split: matches(folder, pattern) for split, pattern in zip(SPLITS, layout, strict=True)}
        if all(files.values()):
            vocabulary = convention.vocabulary and next(iter(matches(folder, convention.vocabulary)), None)
            return files, vocabulary
    if convention.whole and (whole := whole_text(folder, convention)):
        return {"train": whole}, None
    found = sorted(file.name for file in folder.rglob("*") if file.is_file())
    listed = ", ".join(found[:6]) + (" …" if len(found) > 6 else "")
    raise CorpusError(
        f"{path} is not laid out as {corpus}, which is {wanted(convention)}; it has {listed or 'no files'}"
    )


def whole_text(folder: Path, convention: Convention) -> list[Path]:
    """The one file of a text that is not split yet; those of a text of one's own, in the order of their names."""
    files = matches(folder, convention.whole)
    if len(files) == 1 or convention.whole != "*":
        return files
    # Where some splits are there, the rest was forgotten.
    if any(matches(folder, pattern) for layout in convention.layouts for pattern in layout):
        return []
    return matches(folder, "*.txt")


def matches(folder: Path, pattern: str) -> list[Path]:
    files = sorted(file for file in folder.rglob(pattern) if file.is_file())
    if len(files) > 1 and "*" not in pattern:
        raise CorpusError(f"{files[0]} and {files[1]}: which of them? Give a folder with one {pattern}")
    return files


def wanted(convention: Convention) -> str:
    forms = [", ".join(dict.fromkeys(layout)) for layout in convention.layouts]
    if convention.whole is not None:
        forms.insert(0, "one file, *.txt" if convention.whole == "*" else f"the one file {convention.whole}")
    return " or ".join(forms)


def unpack(archive: Path, folder: Path) -> Path:
    try:
        # The data filter is for tar: zip archives are always read so that nothing leaves the folder.
        shutil.unpack_archive(archive, folder, **({} if archive.suffix == ".zip" else {"filter": "data"}))
    except (shutil.ReadError, zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error) as error:
        raise CorpusError(f"{archive} cannot be unpacked: {error}") from None
    return folder


def read_lines(files: dict[str, list[Path]], path: Path, scratch: Path) -> dict[str, Dataset]:
    for split, paths in files.items():
        if not any(file.stat().st_size for file in paths):
            raise CorpusError(f"the {split} text of {path.name} is empty")
    try:
        return load_dataset(
            "text",
            data_files={split: [str(file.absolute()) for file in paths] for split, paths in files.items()},
            cache_dir=str(scratch / "text"),
            keep_linebreaks=True,
            # A byte-order mark, which editors and Project Gutenberg put at the beginning, is no part of a text.
            encoding="utf-8-sig",
        )
    except datasets.exceptions.DatasetGenerationError as error:
        raise CorpusError(f"{path} is not UTF-8 text: {error.__cause__}") from None


def load_rows(options: argparse.Namespace, convention: Convention, scratch: Path) -> dict[str, Dataset]:
    """The splits of a data set, each with the column "text", a row a line with its end."""
    name, config = (options.dataset, options.config) if options.dataset else convention.hub or (None, None)
    if name is None:
        raise CorpusError(
            f"--corpus {options.corpus} needs a text: give {wanted(convention)} with --input, or a data set with "
            "--dataset"
        )
    try:
        found = load_dataset(name, config)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise CorpusError(f"the data set {name} does not load: {error}") from None
    splits = SPLITS if set(SPLITS) <= set(found) or convention.whole is None else SPLITS[:1]
    if missing := [split for split in splits if split not in found]:
        raise CorpusError(f"the data set {name} has no split {', '.join(missing)}; it has {', '.join(found)}")
    rows = {split: found[split] for split in splits}
    for split, texts in rows.items():
        if options.column not in texts.column_names:
            raise CorpusError(
                f"{split} of the data set {name} has no column {options.column}: choose one of "
                f"{', '.join(texts.column_names)} with --column"
            )
    if convention.stream:
        return {
            split: texts.select_columns(options.column).rename_columns({options.column: "text"})
            for split, texts in rows.items()
        }
    return {
        split: texts.map(
            end_lines,
            batched=True,
            input_columns=options.column,
            remove_columns=texts.column_names,
            features=Features({"text": Value("string")}),
            cache_file_name=str(scratch / f"{split}-text.arrow"),
            desc=f"read {split}",
        )
        for split, texts in rows.items()
    }


def end_lines(rows: list[str]) -> dict[str, list[str]]:
    return {"text": [row if row.endswith("\n") else row + "\n" for row in rows]}


def cut(text, convention: Convention) -> dict:
    """Hold out the last two times 5 % of a text: of 100,000,000 bytes 90 M, 5 M and 5 M."""
    held_out = len(text) // 20
    if held_out == 0:
        unit = "bytes" if convention.stream else "line(s)"
        raise CorpusError(f"the text is too short to hold out 5 % of it twice: it has {len(text)} {unit}, not 20")
    bounds = [0, len(text) - 2 * held_out, len(text) - held_out, len(text)]
    parts = zip(SPLITS, bounds, bounds[1:], strict=False)
    if not convention.stream:
        return {split: text.select(range(start, stop)) for split, start, stop in parts}
    if len(text) != 100_000_000:
        print(f"warning: {len(text):,} bytes are not the whole corpus of 100,000,000", file=sys.stderr)
    return {split: text[start:stop] for split, start, stop in parts}


# ---- counting ---------------------------------------------------------------------------------------------------


def count_lines(lines: Dataset, num_proc: int) -> dict[str, int]:
    """Words with one more for each line, characters and bytes."""
    batches = lines.map(
        count_batch,
        batched=True,
        batch_size=LINES,
        input_columns="text",
        remove_columns="text",
        num_proc=processes(lines, num_proc),
        keep_in_memory=True,
        desc="count",
    )
    counts = {name: int(np.sum(batches[name][:])) for name in batches.column_names}
    if counts["words"]:
        counts["words"] += len(lines)
    return counts


def count_batch(lines: list[str]) -> dict[str, list[int]]:
    return {
        "words": [sum(len(line.split()) for line in lines)],
        "characters": [sum(map(len, lines))],
        "bytes": [sum(len(line.encode()) for line in lines)],
    }


def count_stream(text: bytes) -> dict[str, int]:
    """Words, characters without line feeds and bytes."""
    return {"words": len(text.split()), "characters": len(text) - text.count(b"\n"), "bytes": len(text)}


# ---- tokens -----------------------------------------------------------------------------------------------------


def ends_lines(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a line ends in `eos_token` instead of its line feed: so it does in vocabularies of words."""
    return getattr(tokenizer, "mode", None) in WORD_MODES and tokenizer.eos_token is not None


def encode_lines(tokenizer: PreTrainedTokenizerBase, lines: list[str], add_eos: bool) -> np.ndarray:
    """The ids of lines with their ends, one after the other: (N,) int64."""
    if isinstance(tokenizer, TransfoXLTokenizer):
        return tokenizer.encode_lines(lines, add_eos=add_eos)
    ids = tokenizer(lines, add_special_tokens=False, verbose=False)["input_ids"]
    return np.fromiter(chain.from_iterable(ids), dtype=np.int64)


def tokenise(lines: Dataset, tokenizer: PreTrainedTokenizerBase, add_eos: bool, num_proc: int, cache: Path) -> Dataset:
    """A Dataset with the column token_ids, one token a row."""
    return lines.map(
        tokenise_batch,
        batched=True,
        batch_size=LINES,
        input_columns="text",
        remove_columns="text",
        features=TOKENS,
        fn_kwargs={"tokenizer": tokenizer, "add_eos": add_eos},
        num_proc=processes(lines, num_proc),
        cache_file_name=str(cache),
        desc="tokenise",
    )


def tokenise_batch(lines: list[str], tokenizer: PreTrainedTokenizerBase, add_eos: bool) -> dict[str, np.ndarray]:
    return {"token_ids": encode_lines(tokenizer, lines, add_eos).astype(np.int32)}


def processes(lines: Dataset, num_proc: int) -> int | None:
    """As many as have something to do; None is this process."""
    useful = min(num_proc, len(lines) // LINES)
    return useful if useful > 1 else None


def word_tokenizer(texts: dict[str, Dataset], convention: Convention, vocabulary: Path | None) -> TransfoXLTokenizer:
    if vocabulary is not None:
        tokenizer = TransfoXLTokenizer(vocab_file=str(vocabulary), mode=convention.mode)
        if tokenizer.eos_token is None or tokenizer.unk_token is None:
            raise CorpusError(f"{vocabulary} is no vocabulary of the corpus: it has no <S> or no <UNK>")
        return tokenizer
    closed = convention.mode in ("characters", "bytes")
    return TransfoXLTokenizer.train_from_iterator(
        batches([texts[split] for split in convention.counted]),
        mode=convention.mode,
        lower_case=convention.lower_case,
        min_freq=convention.min_freq,
        **({"unk_token": "<unk>"} if closed and convention.min_freq > 1 else {}),
    )


def batches(texts: list[Dataset]) -> Iterator[list[str]]:
    with tqdm(total=sum(map(len, texts)), unit="line", desc="vocabulary") as bar:
        for batch in chain.from_iterable(lines.iter(LINES) for lines in texts):
            yield batch["text"]
            bar.update(len(batch["text"]))


def stream_tokenizer(texts: dict[str, bytes], convention: Convention) -> TransfoXLTokenizer:
    """The vocabulary of a stream of bytes: the most frequent first, ties in the order of first occurrence."""
    text = b"".join(texts[split] for split in SPLITS)
    counts = np.bincount(np.frombuffer(text, dtype=np.uint8), minlength=256)
    counts[LINE_FEED] = 0
    found = sorted(map(int, np.flatnonzero(counts)), key=lambda byte: (-counts[byte], text.find(byte)))
    if convention.mode == "bytes":
        return TransfoXLTokenizer.from_symbols(map(str, found), mode="bytes")
    symbols = bytes(found).decode("latin-1").replace(" ", "_")
    if strange := re.sub("[a-z_]", "", symbols):
        raise CorpusError(f"text8 is small letters and spaces, but this text has {strange[0]!r}")
    return TransfoXLTokenizer.from_symbols(symbols, mode="characters")


def look_up(text: bytes, tokenizer: TransfoXLTokenizer) -> Dataset:
    """The ids of a stream of bytes without its line feeds, as the originals read enwik8."""
    table = np.full(256, -1, dtype=np.int32)
    for index, symbol in enumerate(tokenizer.symbols):
        table[int(symbol) if tokenizer.mode == "bytes" else ord(symbol.replace("_", " "))] = index
    data = np.frombuffer(text, dtype=np.uint8)
    data = data[data != LINE_FEED]
    ids = table[data]
    if (ids < 0).any():
        raise CorpusError(f"byte {data[ids.argmin()]} is not in the vocabulary of {len(tokenizer)} symbols")
    # As a table: from_dict looks at every token.
    return Dataset(pa.table({"token_ids": ids}))


def pieces(text: bytes) -> Dataset:
    """A stream as pieces for any tokenizer, each cut before white space."""
    # A byte order may cut a character in two, of which nothing can be made.
    characters = text.decode("utf-8", errors="replace")
    return Dataset.from_dict({"text": re.findall(rf"(?s).{{1,{PIECE}}}(?=\s|\Z)|.{{1,{PIECE}}}", characters)})


if __name__ == "__main__":
    main()
