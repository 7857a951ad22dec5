"""The miniature's text, sizes and options: words of long Wikipedia articles, of WikiText-103, or of Python's sources.

    python examples/paper/miniature.py      # fetch WikiText-103 from the Hub if no other text is there

The text is that of the first folder with `train.txt.xz`, `valid.txt.xz` and `test.txt.xz`, a paragraph a line: the one
that the environment variable TXL_WIKIPEDIA names, or `build/paper/wikitext-103`, which this script fills. Without one
it is the source of Python's standard library. Results of another text than wikipedia-long go to `build/paper/results`,
not beside the committed ones.
"""

import itertools
import json
import lzma
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

sys.path.append(str(Path(__file__).resolve().parents[1]))

from study import StudyParser
from txl_hf import TransfoXLTokenizer
from txl_hf.data.loading import check_vocabulary
from txl_hf.data.texts import TokenisedText, read_prepared
from txl_hf.files import whole_folder

__all__ = [
    "MINIATURE",
    "RESULTS",
    "SHUFFLED",
    "SMOKE",
    "SPLITS",
    "WORK",
    "results_folder",
    "Corpus",
    "MiniatureParser",
    "Sizes",
    "load_given",
    "prepare",
    "shuffle_sentences",
]

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "examples" / "results" / "paper"
WORK = ROOT / "build" / "paper"
SPLITS = ("train", "validation", "test")
FETCHED = WORK / "wikitext-103"
HUB = ("Salesforce/wikitext", "wikitext-103-raw-v1")
FILES = ("train.txt.xz", "valid.txt.xz", "test.txt.xz")
COMMITTED_TEXT = "wikipedia-long"
SHUFFLED = "sentences shuffled"
SENTENCE_ENDS = (".", "?", "!", "<eos>")


@dataclass(frozen=True)
class Sizes:
    """The columns that every row of a table has.

    Attributes:
        characters: how much of the training text is read, and how much of the two others, at most.
        vocabulary: the most frequent words; the others are one unknown word. cutoff: where the softmax's head ends.
        segment: L, tokens of a segment, and of its memory where there is one.
        streams: B. steps: optimiser steps. learning_rate: at the end of the warm-up, a tenth of the steps.
        lengths: attention lengths that are evaluated, in segments.
        evaluation_streams: streams that the validation and the test text are cut into.
    """

    characters: tuple[int, int] = (16_000_000, 60_000)
    vocabulary: int = 5000
    cutoff: int = 1000
    layers: int = 3
    width: int = 128
    heads: int = 4
    segment: int = 16
    streams: int = 16
    steps: int = 3000
    learning_rate: float = 2e-3
    lengths: tuple[float, ...] = (0.25, 0.5, 1, 1.5, 2, 3, 4, 5)
    evaluation_streams: int = 16

    @property
    def longest(self) -> int:
        """The longest attention length, in tokens."""
        return round(max(self.lengths) * self.segment)


MINIATURE = Sizes()
SMOKE = Sizes((60_000, 3_000), 200, 100, 2, 16, 2, 8, 4, 3, lengths=(0.5, 1, 2), evaluation_streams=8)


class MiniatureParser(StudyParser):
    """Options of a study of the miniature, and `sizes` among them."""

    def __init__(self, description: str | None, output: Path, **smoke: Any):
        super().__init__(description, output, WORK, sizes=SMOKE, **smoke)
        self.set_defaults(sizes=MINIATURE)
        if output == RESULTS:
            self.set_defaults(output=results_folder())


def load_given(models: list[str], data: Path, split: str) -> tuple[list[PreTrainedModel], TokenisedText]:
    """Models of somebody's own in the place of the miniature's, in fp32, and a prepared text of their vocabulary.

    Raises:
        ValueError: the text has another vocabulary than a model.
    """
    text, found = read_prepared(data, split), []
    for name in models:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        check_vocabulary(text.tokenizer, data, name, model.config)
        found.append(model)
    return found, text


@dataclass(frozen=True)
class Corpus:
    """Token ids of the three texts, (N,) int64 each, their tokenizer, and what they are.

    Attributes:
        files: bytes of each file that was read, which tell two folders of one name apart.
    """

    texts: dict[str, np.ndarray]
    tokenizer: TransfoXLTokenizer
    name: str
    files: dict[str, int]


def prepare(folder: Path, sizes: Sizes) -> Corpus:
    """The texts as token ids; kept in `folder`, where a later call finds them, of the same files and sizes."""
    articles = find_articles()
    name = "the standard library" if articles is None else articles.name
    files = {} if articles is None else {path.name: path.stat().st_size for path in map(articles.joinpath, FILES)}
    wanted = {"text": name, "files": files, "characters": list(sizes.characters), "vocabulary": sizes.vocabulary}
    kept = folder / "corpus.json"
    if not kept.exists() or json.loads(kept.read_text()) != wanted:
        lines = {
            split: list(read_lines(articles, split, characters))
            for split, characters in zip(SPLITS, (*sizes.characters, sizes.characters[1]), strict=True)
        }
        tokenizer = TransfoXLTokenizer.train_from_iterator(
            lines["train"], mode="moses", max_size=sizes.vocabulary - 2, unk_token="<unk>", eos_token="<eos>"
        )
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(folder)
        for split in SPLITS:
            np.save(folder / f"{split}.npy", np.asarray(tokenizer.encode_lines(lines[split], add_eos=True)))
        kept.write_text(json.dumps(wanted))
    texts = {split: np.load(folder / f"{split}.npy") for split in SPLITS}
    return Corpus(texts, TransfoXLTokenizer.from_pretrained(folder), name, files)


def find_articles() -> Path | None:
    """
    Raises:
        FileNotFoundError: the folder that the environment names is not there.
    """
    named = os.environ.get("TXL_WIKIPEDIA")
    if named is not None:
        if not Path(named, FILES[0]).is_file():
            raise FileNotFoundError(f"TXL_WIKIPEDIA={named} is no folder with {', '.join(FILES)}")
        return Path(named)
    return FETCHED if (FETCHED / FILES[0]).is_file() else None


def results_folder() -> Path:
    """Where results go unless told otherwise: of another text than the committed ones to a folder of their own."""
    try:
        articles = find_articles()
    except FileNotFoundError:
        # Said when the text is read.
        articles = None
    return RESULTS if articles is not None and articles.name == COMMITTED_TEXT else WORK / "results"


def fetch(folder: Path, sizes: Sizes):
    """As much of WikiText-103 as is read, from the Hub.

    Raises:
        OSError: the Hub cannot be reached.
    """
    import datasets

    with whole_folder(folder) as aside:
        for split, file, characters in zip(SPLITS, FILES, (*sizes.characters, sizes.characters[1]), strict=True):
            rows = datasets.load_dataset(*HUB, split=split, streaming=True)
            with lzma.open(aside / file, "wt", encoding="utf-8") as written:
                written.writelines(first_lines((f"{row['text'].rstrip()}\n" for row in rows), characters))


def read_lines(articles: Path | None, split: str, characters: int) -> Iterator[str]:
    if articles is None:
        return first_lines(standard_library(split), characters)
    return first_lines(lzma.open(articles / FILES[SPLITS.index(split)], "rt", encoding="utf-8"), characters)


def first_lines(lines: Iterable[str], characters: int) -> Iterator[str]:
    """Lines that hold something, until they have so many characters."""
    read = 0
    for line in lines:
        if line.strip():
            yield line
            read += len(line)
        if read >= characters:
            return


def standard_library(split: str) -> Iterator[str]:
    """Of every twenty modules one is for validation and one for the test."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    held_out = {"validation": (8,), "test": (16,)}.get(split, set(range(20)) - {8, 16})
    chosen = (module for i, module in enumerate(modules) if i % 20 in held_out)
    return itertools.chain.from_iterable(module.read_text(encoding="utf-8").splitlines(True) for module in chosen)


def shuffle_sentences(corpus: Corpus, streams: int, segment: int, steps: int, seed: int = 0) -> Corpus:
    """The same sentences in another order: what a sentence says of the one before it is lost.

    Of the training text, those are shuffled among themselves that a run of `steps` segments reads in one of `streams`
    streams, so that it learns from the same sentences as one of the text in order. The other texts are shuffled whole.
    """
    ends = corpus.tokenizer.convert_tokens_to_ids(list(SENTENCE_ENDS))
    generator = np.random.default_rng(seed)

    def shuffle(ids: np.ndarray) -> np.ndarray:
        sentences = np.split(ids, np.flatnonzero(np.isin(ids, ends))[:-1] + 1)
        return np.concatenate([sentences[i] for i in generator.permutation(len(sentences))])

    texts = {split: ids.copy() if split == "train" else shuffle(ids) for split, ids in corpus.texts.items()}
    train = texts["train"]
    # As TokenStream cuts it.
    length = (len(train) - 1) // streams // segment * segment
    for start in range(0, streams * length, length):
        end = start + min(steps * segment, length)
        train[start:end] = shuffle(train[start:end])
    return replace(corpus, texts=texts, name=f"{corpus.name}, {SHUFFLED}")


def describe(sizes: Sizes) -> dict:
    """The columns that say what a row was computed with."""
    return {name: str(value) if isinstance(value, tuple) else value for name, value in asdict(sizes).items()}


def main():
    """A text that was read before stays the text, so that runs that were stopped go on."""
    if (WORK / "corpus").exists() or find_articles() is not None:
        return
    try:
        fetch(FETCHED, MINIATURE)
    except OSError as error:
        print(f"{error}; the text is the source of Python's standard library")


if __name__ == "__main__":
    main()
