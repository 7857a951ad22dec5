"""`txl-prepare --corpus midi`, whose options and files are those of `txl_hf.commands.prepare_corpus`."""

import argparse
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from txl_hf.data.corpora import some
from txl_hf.data.loading import load_midi_tokenizer
from txl_hf.files import name_of

from .pieces import (
    KEYLESS,
    OTHER_METRE,
    OTHER_TEMPO,
    Piece,
    boundary_tokens,
    make_midi_tokenizer,
    read_pieces,
    split_pieces,
    tokenise_pieces,
)

if TYPE_CHECKING:
    from datasets import Dataset


def prepare(options: argparse.Namespace, scratch: Path) -> tuple[dict[str, "Dataset"], Any, dict[str, Any]]:
    """The tokens of each split of a folder of MIDI files, their tokenizer, and the contents of corpus.json. Prints the
    files of each split, those left out, and losses of notes."""
    tokenizer = midi_tokenizer(options)
    begin, end = boundary_tokens(tokenizer)
    pieces, left_out, root = read_pieces(options.input, tokenizer, options.num_proc, scratch)
    splits, repeated = split_pieces(pieces, root)
    tell_pieces(splits, left_out, repeated)
    if options.bpe is not None:
        # BPE joins frequent pairs of tokens until the vocabulary has `options.bpe` entries.
        tokenizer.train(vocab_size=options.bpe, files_paths=[piece.path for piece in splits["train"]])
    tokens, parts = {}, {}
    for split, chosen in splits.items():
        semitones = (options.transpose or 0) if split == "train" else 0
        cache = scratch / f"{split}.arrow"
        tokens[split] = tokenise_pieces(chosen, tokenizer, semitones, options.num_proc, cache)
        parts[split] = {"tokens": len(tokens[split]), "pieces": len(chosen), "notes": sum(p.notes for p in chosen)}
    information = {
        "corpus": options.corpus,
        "source": name_of(options.input),
        "files": {split: [piece.name for piece in chosen] for split, chosen in splits.items()},
        "left_out": left_out | {piece.name: "held out in another split, or in none" for piece in repeated},
        "notes_lost": {piece.name: piece.lost for piece in chain.from_iterable(splits.values()) if piece.lost},
        "tokenizer": type(tokenizer).__name__,
        "transpose": options.transpose or 0,
        "document_start": begin,
        "document_end": end,
        "vocab_size": tokenizer.len if tokenizer.is_multi_voc else len(tokenizer),
        "splits": parts,
        "versions": {name: version(name) for name in ("txl-hf", "miditok", "symusic", "datasets")},
    }
    return tokens, tokenizer, information


def midi_tokenizer(options: argparse.Namespace) -> Any:
    if options.tokenizer is None:
        tokenizer = make_midi_tokenizer(options.tokens or "remi")
    else:
        try:
            tokenizer = load_midi_tokenizer(options.tokenizer)
        except ValueError as error:
            raise ValueError(f"--tokenizer {error}") from None
    if options.bpe is not None:
        if tokenizer.is_trained or tokenizer.is_multi_voc:
            raise ValueError(
                f"--tokenizer {options.tokenizer} joins tokens already, or has compound ones: leave out --bpe"
            )
        if options.bpe <= len(tokenizer):
            raise ValueError(f"--bpe {options.bpe} must be more than the {len(tokenizer)} tokens that are joined")
    return tokenizer


def tell_pieces(splits: dict[str, list[Piece]], left_out: dict[str, str], repeated: list[Piece]):
    """Print the pieces of each split, the files left out, and notes that were lost or changed."""
    for split, pieces in splits.items():
        print(f"{split}: {some([piece.name for piece in pieces])}")
    if left_out:
        print(f"{len(left_out)} file(s) left out:")
        for name, reason in left_out.items():
            print(f"  {name}: {reason}")
    if repeated:
        names = some([piece.name for piece in repeated])
        print(f"{len(repeated)} file(s) left out that are held out in another split, or named after none: {names}")
    chosen = list(chain.from_iterable(splits.values()))
    if lost := [f"{piece.name} ({piece.lost} of {piece.lost + piece.notes})" for piece in chosen if piece.lost]:
        print(f"{len(lost)} file(s) with notes that the tokenizer lacks or has already, and leaves out: {some(lost)}")
    for remark in (OTHER_METRE, OTHER_TEMPO, KEYLESS):
        if remarked := [piece.name for piece in chosen if remark in piece.remarks]:
            print(f"{len(remarked)} file(s) {remark}: {some(remarked)}")
