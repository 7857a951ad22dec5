"""The vocabularies that the originals pickle: in the corpus (`cache.pt`, `cache.pkl`) or in NVIDIA's checkpoint."""

from pathlib import Path

from txl_hf.legacy.unpickle import StandIn
from txl_hf.legacy.vocabulary import repair_symbols

from . import torch_file
from .files import describe, read_json
from .layout import ConversionError, Vocabulary

# How the text of each of the originals' data sets is split into symbols: a mode of TransfoXLTokenizer.
MODES = {
    "ptb": "whitespace",
    "wt2": "whitespace",
    "wt103": "whitespace",
    "lm1b": "lm1b",
    "enwik8": "bytes",
    "text8": "characters",
}
# Files that the originals write beside their data.
CORPORA, INFORMATION = ("cache.pt", "cache.pkl"), "corpus-info.json"


def is_described_alone(folder: Path) -> bool:
    """Whether a folder has corpus-info.json, which lists no symbols, and no pickled corpus."""
    return (folder / INFORMATION).is_file() and not any((folder / name).is_file() for name in CORPORA)


def read_corpus(path: Path, dataset: str | None = None) -> tuple[Vocabulary, str | None]:
    """Return (Vocabulary, data set) of a pickled corpus or its folder. `dataset` is for one that does not say. Raises
    ConversionError.
    """
    path = Path(path)
    if path.is_dir():
        found = [path / name for name in CORPORA if (path / name).is_file()]
        if not found:
            raise ConversionError(f"{path} is a folder without cache.pt or cache.pkl; expected the pickled corpus")
        path = found[0]
    if not path.is_file():
        raise ConversionError(f"{path} does not exist; expected the pickled corpus, cache.pt or cache.pkl")
    corpus = torch_file.load(path)
    attributes = corpus.attributes if isinstance(corpus, StandIn) else {}
    if "vocab" not in attributes:
        raise ConversionError(f"{path} holds {describe(corpus)}; expected a pickled corpus with a vocabulary")
    if isinstance(attributes.get("dataset"), str):
        dataset = attributes["dataset"]
    return from_stand_in(attributes["vocab"], dataset, path.name), dataset


def from_stand_in(vocab: object, dataset: str | None, where: str) -> Vocabulary:
    """Return the Vocabulary of an unpickled `Vocab` object; its delimiter, or else `dataset`, decides the mode. Raises
    ConversionError, which names `where`, also for a delimiter that no mode splits at.
    """
    attributes = vocab.attributes if isinstance(vocab, StandIn) else {}
    symbols = attributes.get("idx2sym")
    if not isinstance(symbols, list) or not symbols or not all(isinstance(symbol, str) for symbol in symbols):
        raise ConversionError(f"{where} holds a vocabulary without a list of symbols (idx2sym)")
    if len(set(symbols)) != len(symbols):
        raise ConversionError(f"{where} holds a vocabulary with the same symbol twice")
    mode = MODES.get(dataset or "", "whitespace")
    delimiter = attributes.get("delimiter")
    if delimiter == "":
        # "Empty delimiter", as the originals say: each character is a symbol.
        mode = "characters"
    elif delimiter is not None:
        raise ConversionError(
            f"{where} holds a vocabulary of text that is split at {delimiter!r:.40}; a tokenizer here splits at white "
            "space or into characters: build one with TransfoXLTokenizer.from_symbols, or any other of transformers"
        )
    # The originals' default is True; of enwik8 they read the decimal numbers of bytes, which have no case.
    lower_case = mode != "bytes" and attributes.get("lower_case") is True
    return Vocabulary(repair_symbols(symbols), mode, lower_case)


def read_corpus_info(folders: list[Path]) -> dict:
    """Return the first corpus-info.json in `folders` as a dict, {} where there is none."""
    paths = (Path(folder) / INFORMATION for folder in folders)
    return next((read_json(path) for path in paths if path.is_file()), {})
