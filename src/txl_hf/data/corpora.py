"""Corpora as they are distributed: which files are which split, and their texts."""

import bz2
import dataclasses
import glob
import gzip
import lzma
import os
import re
import shutil
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..transfo_xl.tokenization_transfo_xl_backend import lines_of, open_lines

# pyarrow and datasets are in the extra `train`, so functions that read a text import them.
if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

SPLITS = ("train", "validation", "test")
# Number of lines that are read, counted or tokenised at once.
LINES = 4096

# Suffixes of plain text, packed files, archives and records (with their reader in datasets), and words for splits.
TEXT_SUFFIXES = (".txt", ".text", ".tokens", ".raw")
OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
ARCHIVES = (".zip", ".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz")
# zipfile raises RuntimeError for an encrypted file and for a compression that Python does not support.
DAMAGED = (shutil.ReadError, zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, RuntimeError)
RECORDS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("valid", "validation", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}


@dataclasses.dataclass(frozen=True)
class Convention:
    """How a corpus is distributed and read.

    Attributes:
        layouts: patterns of the file names of train, validation and test; the first layout that is complete is read.
            Without any it is a user's text, and words in the file names decide.
        whole: pattern of the one file that may hold the whole corpus, which is then cut 90 : 5 : 5.
        stream: the corpus is one stream of symbols, not lines.
        mode, lower_case, min_freq, max_size: as for `TransfoXLTokenizer.train_from_iterator`.
        counted: the splits whose symbols make the vocabulary.
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
    max_size: int | None = None
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
    "text": Convention((), whole="*", counted=("train",)),
}


@dataclasses.dataclass
class Source:
    """The files of each split of a corpus, of "train" alone where it is one text, to be cut; the folder that names are
    relative to; the file with the vocabulary, if there is one; and other texts in the folder."""

    splits: dict[str, list[Path]]
    root: Path
    vocabulary: Path | None = None
    unread: list[Path] = dataclasses.field(default_factory=list)


def find_files(path: Path, corpus: str, convention: Convention, scratch: Path) -> Source:
    """The files of a corpus: of a folder, of an archive (unpacked into `scratch`), or the one file. Raises a
    ValueError if their names match no layout of the corpus, or the split of one is ambiguous."""
    folder = unpacked(path, scratch)
    if folder.is_file():
        if convention.whole is None:
            raise ValueError(f"{path} is one file, but {corpus} is {wanted(convention)}: give their folder or archive")
        check_is_plain(path, path)
        return Source({"train": [folder]}, folder.parent)
    if not convention.layouts:
        return own_text(folder, path)
    for layout in convention.layouts:
        files = {split: matches(folder, pattern) for split, pattern in zip(SPLITS, layout, strict=True)}
        if all(files.values()):
            vocabulary = convention.vocabulary and next(iter(matches(folder, convention.vocabulary)), None)
            return Source(files, folder, vocabulary or None)
    if convention.whole and (whole := matches(folder, convention.whole)):
        return Source({"train": whole}, folder)
    raise ValueError(f"{path} is not laid out as {corpus}, which is {wanted(convention)}; it has {some_names(folder)}")


def own_text(folder: Path, path: Path) -> Source:
    """The texts in a folder, by the word in their name that names a split. Beside them, a text without such a word is
    not read, because it may be held out."""
    everything = matches(folder, "*")
    texts = [file for file in everything if suffix_of(file) in TEXT_SUFFIXES]
    if not texts and (records := [file for file in everything if suffix_of(file) in RECORDS]):
        check_is_plain(records[0], path)
    texts = texts or (everything if len(everything) == 1 else [])
    if not texts:
        raise ValueError(f"{path} has no text, a file that ends in {', '.join(TEXT_SUFFIXES)}; {some_names(folder)}")
    for file in texts:
        check_is_plain(file, file)
    splits, unsplit = group_by_split(texts, folder, path)
    return Source(splits, folder, unread=unsplit) if splits else Source({"train": unsplit}, folder)


def group_by_split(files: Iterable[Path], folder: Path, given: Path | str) -> tuple[dict[str, list[Path]], list[Path]]:
    """Files by the split that their names name (`split_of`), and those that name none. Raises a ValueError, with the
    folder as it was `given`, if only some splits are named."""
    found: dict[str | None, list[Path]] = {}
    for file in files:
        found.setdefault(split_of(file, folder), []).append(file)
    unsplit = found.pop(None, [])
    if found and (missing := [split for split in SPLITS if split not in found]):
        told = "; ".join(f"{split}: {paths[0].relative_to(folder)}" for split, paths in found.items())
        raise ValueError(
            f"{given} has no file for {' and '.join(missing)} (by their names, {told}): name files of all three after "
            "train, valid and test, or none"
        )
    return {split: found[split] for split in SPLITS if found}, unsplit


def suffix_of(file: Path) -> str:
    """The suffix of a file in lower case, without one of `OPENERS` behind it."""
    name = Path(file.stem) if file.suffix.lower() in OPENERS else file
    return name.suffix.lower()


def check_is_plain(file: Path, given: Path) -> None:
    """Refuse a file whose suffix is not of plain text; the error has the command that reads it, from `given`."""
    if suffix_of(file) in RECORDS:
        problem = "holds records, not plain text"
        cure = f"give --dataset {given} --column NAME in place of --input, NAME being what the texts are called"
    elif suffix_of(file) in (".html", ".htm", ".xhtml"):
        problem = "is HTML, not plain text"
        cure = f"give what `pandoc --to plain --wrap none {file} --output {file.stem}.txt` writes"
    else:
        return
    raise ValueError(f"{file} {problem}: {cure}; or rename it to end in .txt to read it as it is")


def split_of(file: Path, folder: Path) -> str | None:
    """The split named by a word in a file's name, or else in the names of its folders, the innermost first."""
    *folders, name = file.relative_to(folder).parts
    for part in (name, *reversed(folders)):
        words = [word.lower() for word in re.findall("[A-Z]+(?![a-z])|[A-Z]?[a-z]+", part)]
        if splits := {SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS}:
            if len(splits) > 1:
                raise ValueError(f"{file.relative_to(folder)} is named after {' and '.join(sorted(splits))}: which?")
            return splits.pop()
    return None


def some_names(folder: Path) -> str:
    return some(sorted(file.name for file in files_below(folder))) or "no files"


def some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def files_below(folder: Path, pattern: str = "*") -> list[Path]:
    """The files below a folder, except hidden files and those that macOS adds to an archive. Links to folders are
    followed; each folder is read once. Raises a ValueError for a link whose target does not exist."""
    hidden = (".", "__MACOSX")
    found: list[Path] = []
    seen: set[str] = set()
    for root, folders, names in os.walk(folder, followlinks=True):
        if (place := os.path.realpath(root)) in seen:
            folders.clear()
            continue
        seen.add(place)
        folders[:] = sorted(name for name in folders if not name.startswith(hidden))
        for file in (Path(root, name) for name in names if not name.startswith(hidden)):
            if not file.exists():
                raise ValueError(f"{file} is a link that leads nowhere: remove it, or bring back what it led to")
            if file.is_file() and file.match(pattern):
                found.append(file)
    return sorted(found)


def matches(folder: Path, pattern: str) -> list[Path]:
    files = files_below(folder, pattern)
    if len(files) > 1 and "*" not in pattern:
        raise ValueError(f"{files[0]} and {files[1]}: which of them? Give a folder with one {pattern}")
    return files


def wanted(convention: Convention) -> str:
    """The files in which a corpus is distributed, for an error."""
    forms = [", ".join(dict.fromkeys(layout)) for layout in convention.layouts]
    if convention.whole == "*":
        forms = ["one text file", "a folder of them"]
    elif convention.whole is not None:
        forms.insert(0, f"the one file {convention.whole}")
    return " or ".join(forms)


def unpacked(path: Path, scratch: Path) -> Path:
    """The path itself, or the folder in `scratch` that an archive is unpacked into. Raises a ValueError for a path
    that does not exist, and an archive that is damaged or has a file for a place outside of the folder."""
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    if not path.name.lower().endswith(ARCHIVES):
        return path
    folder, is_zip = scratch / "unpacked", path.suffix.lower() == ".zip"
    if not (is_zip or hasattr(tarfile, "data_filter")):
        raise ValueError(f"Python before 3.11.4 unpacks no {path.suffix} safely: unpack {path} and give the folder")
    with unpacking(path):
        # Neither unpacker writes outside of the folder; tarfile's filter refuses links and devices that would.
        if is_zip:
            shutil.unpack_archive(path, folder, "zip")
        else:
            with tarfile.open(path) as archive:
                archive.extractall(folder, filter="data")
    return folder


@contextmanager
def unpacking(path: Path) -> Iterator[None]:
    """Turn an error about the contents of an archive or a packed file into a ValueError that names it."""
    try:
        yield
    except (OSError, *DAMAGED) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{path} cannot be unpacked: {error}") from None


def opener_of(path: Path) -> Callable[..., Any]:
    """`open`, or that of gzip, bzip2 or xz for a file packed so."""
    return OPENERS.get(path.suffix.lower(), open)


def read_files(source: Source, path: Path, convention: Convention, mode: str | None, scratch: Path) -> dict[str, Any]:
    """The text of each split: bytes of a stream, or a Dataset with lines, their ends included, in the column "text".
    `mode` is the tokenizer's, as in `open_lines`."""
    if convention.stream:
        return {split: read_stream(path) for split, [path, *_] in source.splits.items()}
    for split, paths in source.splits.items():
        if not any(file.stat().st_size for file in paths):
            raise ValueError(f"the {split} text of {path.name} is empty")
    return {split: read_lines(paths, mode, scratch, split) for split, paths in source.splits.items()}


def read_lines(paths: list[Path], mode: str | None, scratch: Path, split: str) -> "Dataset":
    """The lines of files, one after the other, as a Dataset on the disk."""
    # `load_dataset("text")` reads brackets, asterisks and double colons in a path as patterns, so it is not used.
    import pyarrow as pa
    from datasets import Dataset

    schema, arrow = pa.schema({"text": pa.string()}), scratch / f"{split}-lines.arrow"
    with pa.OSFile(str(arrow), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for path in paths:
            try:
                with unpacking(path), open_lines(path, mode, opener_of(path)) as file:
                    while lines := file.readlines(1 << 20):
                        check_is_text(path, lines, mode)
                        if path != paths[-1] and not lines[-1].endswith("\n"):
                            lines[-1] += "\n"  # Otherwise it would join the next file's first line.
                        writer.write_batch(pa.record_batch([pa.array(lines, pa.string())], schema))
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    return Dataset.from_file(str(arrow))


def read_stream(path: Path) -> bytes:
    with unpacking(path), opener_of(path)(path, "rb") as file:
        return file.read()


def check_is_text(path: Path, lines: Iterable[str], mode: str | None) -> None:
    """Refuse zero bytes, which are valid UTF-8 but not text. Mode `"bytes"` allows them."""
    if mode != "bytes" and any("\0" in line for line in lines):
        raise ValueError(f"{path} is no text: it has zero bytes, as archives and UTF-16 without its mark do")


def read_rows(
    name: str, config: str | None, column: str, convention: Convention, mode: str | None, scratch: Path
) -> dict[str, "Dataset | bytes"]:
    """The splits of a data set on the Hub, in a folder or in a file of `RECORDS`, in the form of `read_files`. A row
    holds lines; the end of the last may be missing."""
    from datasets import Features, Value

    found = load_rows(name, config)
    rows = {split: found[its_name] for split, its_name in choose_splits(name, list(found), convention).items()}
    for split, texts in rows.items():
        if column not in texts.column_names:
            raise ValueError(
                f"{split} of the data set {name} has no column {column}: choose one of "
                f"{', '.join(texts.column_names)} with --column"
            )
        check_texts(texts.data.column(column), f"column {column} of {split} of the data set {name}")
    if convention.stream:
        return {split: "".join(texts[column]).encode() for split, texts in rows.items()}
    return {
        split: texts.map(
            split_lines,
            batched=True,
            input_columns=column,
            fn_kwargs={"mode": mode},
            remove_columns=texts.column_names,
            features=Features({"text": Value("string")}),
            cache_file_name=str(scratch / f"{split}-text.arrow"),
            desc=f"read {split}",
        )
        for split, texts in rows.items()
    }


def load_rows(name: str, config: str | None) -> dict[str, "Dataset"]:
    import datasets

    file = Path(name)
    try:
        if (kind := RECORDS.get(suffix_of(file))) is not None and file.is_file():
            options = {"sep": "\t"} if suffix_of(file) == ".tsv" else {}
            return datasets.load_dataset(kind, data_files=glob.escape(name), **options)
        return datasets.load_dataset(name, config)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        reason = ""
        if file.is_dir() and glob.has_magic(name):
            reason = (
                "; datasets takes brackets, asterisks and question marks in a folder's name for patterns: rename it"
            )
        raise ValueError(f"the data set {name} does not load: {error}{reason}") from None


def choose_splits(name: str, found: list[str], convention: Convention) -> dict[str, str]:
    """The data set's split for each of `SPLITS`: that of the same name, or else one with a word of `SPLIT_WORDS`."""
    exact = set(found) & set(SPLITS)
    told: dict[str | None, list[str]] = {split: [split] for split in SPLITS if split in exact}
    for its_name in (name for name in found if name not in exact):
        # Where all exact names exist, words are not read, because a name such as `dev_test` has words of two splits.
        split = split_of(Path(its_name), Path()) if len(exact) < len(SPLITS) else None
        told.setdefault(None if split in exact else split, []).append(its_name)
    # Only a data set whose one split is `train` is cut, because any other split may be held out.
    splits = SPLITS[:1] if convention.whole is not None and set(told) == {"train"} else SPLITS
    if missing := [split for split in splits if split not in told]:
        alone = ", or with train alone, which is cut" if convention.whole is not None else ""
        raise ValueError(
            f"the data set {name} has no split {', '.join(missing)}; it has {', '.join(found)}: give one with "
            f"{', '.join(SPLITS)}{alone}"
        )
    for split in splits:
        if len(told[split]) > 1:
            raise ValueError(
                f"the data set {name} has {' and '.join(told[split])}, each of which is named after {split}: give one "
                f"with one of them, or with {split}"
            )
    if unread := told.get(None):
        print(f"not read: {', '.join(unread)}")
    return {split: told[split][0] for split in splits}


def check_texts(rows: "pa.ChunkedArray", place: str):
    """Raise a ValueError for rows that are not strings."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if rows.null_count:
        row = pc.index(rows.is_null(), True).as_py()
        raise ValueError(f"{place} has no text in row {row}, the first being 0: leave out rows without one")
    if not (pa.types.is_string(rows.type) or pa.types.is_large_string(rows.type)):
        raise ValueError(f"{place} has rows of type {rows.type}, which are no text: choose another with --column")


def split_lines(rows: list[str], mode: str | None) -> dict[str, list[str]]:
    """The lines of rows, each with its line end, split as `open_lines` splits a file."""
    texts = (row if row.endswith("\n") else row + "\n" for row in rows)
    return {"text": [line for text in texts for line in lines_of(text, mode)]}


def useful_processes(pieces: int, num_proc: int) -> int | None:
    """Processes for `Dataset.map`: at most one for each piece of work; None is this process."""
    useful = min(num_proc, pieces)
    return useful if useful > 1 else None


def cut(text, convention: Convention) -> dict:
    """A text cut into 90, 5 and 5 %: of 100,000,000 bytes 90 M, 5 M and 5 M."""
    held_out = len(text) // 20
    if held_out == 0:
        unit = "bytes" if convention.stream else "line(s)"
        raise ValueError(f"the text is too short to hold out 5 % of it twice: it has {len(text)} {unit}, not 20")
    bounds = [0, len(text) - 2 * held_out, len(text) - held_out, len(text)]
    parts = zip(SPLITS, bounds, bounds[1:], strict=False)
    if not convention.stream:
        return {split: text.select(range(start, stop)) for split, start, stop in parts}
    if len(text) != 100_000_000:
        print(f"warning: {len(text):,} bytes are not the whole corpus of 100,000,000", file=sys.stderr)
    return {split: text[start:stop] for split, start, stop in parts}


def count_batch(lines: list[str]) -> dict[str, list[int]]:
    return {
        "words": [sum(len(line.split()) for line in lines)],
        "characters": [sum(map(len, lines))],
        "bytes": [sum(len(line.encode()) for line in lines)],
    }


def count_stream(text: bytes) -> dict[str, int]:
    """Words, characters without line feeds and bytes."""
    return {"words": len(text.split()), "characters": len(text) - text.count(b"\n"), "bytes": len(text)}
