"""Compare pieces of music with a corpus: what they are made of, in a table.

    python examples/music/measures.py --pieces pieces --corpus chorales/midi --output pieces/README.md

Every MIDI file of --pieces must be read by music21 and by pretty_midi, without a warning. The table has the pieces
beside the corpus: shares of pitch classes above the tonic (of the major key with the same signature), of note lengths,
bars that are empty or as one before them, notes sounding at once, and the range of each instrument. Files of the
corpus that cannot be read are named and left out, as by txl-prepare.
"""

import argparse
import os
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pieces import bar_lines
from txl_hf.command_line import CommandParser, one_line_errors
from txl_hf.data.corpora import files_below
from txl_hf.files import write_text
from txl_hf.midi.pieces import MIDI_SUFFIXES, read_score

with one_line_errors():
    import symusic

# Above the tonic of the major key.
CLASSES = ("1", "♯1", "2", "♭3", "3", "4", "♯4", "5", "♭6", "6", "♭7", "7")
LENGTHS = {
    0.25: "sixteenth",
    0.5: "eighth",
    1.0: "quarter",
    1.5: "dotted quarter",
    2.0: "half",
    3.0: "dotted half",
    4.0: "whole",
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pieces", type=Path, required=True, help="folder of MIDI files")
    parser.add_argument("--corpus", type=Path, required=True, help="folder of MIDI files to compare them with")
    parser.add_argument("--output", type=Path, help="a Markdown file to write, with the pictures of the pieces")
    return parser.parse_args(arguments)


@dataclass
class Measures:
    """Counts over pieces.

    Attributes:
        pieces, notes, bars: how many.
        empty, repeated: bars without a note, and bars with notes that are those of an earlier bar of the piece.
        classes: notes by pitch class above the tonic, but for drums, which have none.
        lengths: notes by length in quarter notes, rounded to sixteenths.
        sounding: sixteenths by how many notes sound.
        pitches: pitches of the notes of each instrument.
        left_out: files that cannot be read, and why.
    """

    pieces: int = 0
    notes: int = 0
    bars: int = 0
    empty: int = 0
    repeated: int = 0
    classes: Counter = field(default_factory=Counter)
    lengths: Counter = field(default_factory=Counter)
    sounding: Counter = field(default_factory=Counter)
    pitches: dict[str, list[int]] = field(default_factory=dict)
    left_out: dict[Path, str] = field(default_factory=dict)

    def add(self, score: symusic.Score):
        self.pieces += 1
        # C major until another key is said.
        keys = [0, *(signature.key for signature in score.key_signatures)]
        begins = [signature.time for signature in score.key_signatures]
        sixteenth = score.ticks_per_quarter / 4
        rows = []
        lines, sounding = bar_lines(score), set()
        contents: dict[int, set] = {}
        for track in score.tracks:
            for note in track.notes:
                start, length = round(note.time / sixteenth), max(1, round(note.duration / sixteenth))
                rows.append((start, length))
                # A bar may begin between two sixteenths: what is rounded is how far a note is behind that.
                bar = int(np.searchsorted(lines, note.time, side="right")) - 1
                place = round((note.time - lines[bar]) / sixteenth), length, note.pitch, instrument(track)
                contents.setdefault(bar, set()).add(place)
                sounding |= set(range(bar, max(bar + 1, int(np.searchsorted(lines, note.end)))))
                if not track.is_drum:
                    key = keys[int(np.searchsorted(begins, note.time, side="right"))]
                    self.classes[(note.pitch - 7 * key) % 12] += 1
                self.lengths[length / 4] += 1
                self.pitches.setdefault(instrument(track), []).append(note.pitch)
        self.notes += len(rows)
        bars = max(sounding) + 1
        self.bars += bars
        self.empty += bars - len(sounding)
        self.repeated += len(contents) - len({frozenset(content) for content in contents.values()})
        sounds = np.zeros(max(start + length for start, length in rows), dtype=int)
        for start, length in rows:
            sounds[start : start + length] += 1
        self.sounding.update(sounds.tolist())


def instrument(track: symusic.Track) -> str:
    return "drums" if track.is_drum else str(track.program)


def measure(paths: list[Path]) -> Measures:
    """
    Raises:
        ValueError: none of the files can be read.
    """
    measures = Measures()
    for path in paths:
        try:
            score = read_score(path)
        except ValueError as error:
            measures.left_out[path] = str(error)
        else:
            measures.add(score)
    if measures.pieces == 0:
        path, reason = next(iter(measures.left_out.items()))
        raise ValueError(f"none of {len(paths)} MIDI file(s) can be read, for instance {path}: {reason}")
    return measures


def midi_files(folder: Path) -> list[Path]:
    """
    Raises:
        ValueError: there are none.
    """
    paths = [path for path in files_below(folder) if path.suffix.lower() in MIDI_SUFFIXES]
    if not paths:
        raise ValueError(f"{folder} has no MIDI file")
    return paths


def check_readers(paths: list[Path]):
    """Raise a ValueError for a file that music21 or pretty_midi does not read, or complains about."""
    import music21
    import pretty_midi

    for path in paths:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                # How many notes it finds is not compared: one that lasts into another bar is two, and tied, there.
                parts = music21.converter.parse(path, forceSource=True, quantizePost=False)
                read = [len(part.notes) for part in pretty_midi.PrettyMIDI(str(path)).instruments]
                expected = read_score(path).note_num()
            except Exception as error:
                # Each has errors of its own.
                raise ValueError(f"{path} is not read without complaint: {error!r}") from error
        if sum(read) != expected or not parts.flatten().notes:
            raise ValueError(f"{path} has {expected} notes, of which pretty_midi read {sum(read)}")


# --- table -----------------------------------------------------------------------------------------------------------


def share(counts: Counter, key) -> float:
    return 100 * counts[key] / max(1, counts.total())


def difference(one: Counter, other: Counter) -> float:
    """How much of one distribution would have to be elsewhere to be the other: 0 to 100 %."""
    return sum(abs(share(one, key) - share(other, key)) for key in {*one, *other}) / 2


def pitch_range(measures: Measures, name: str) -> str:
    pitches = measures.pitches.get(name)
    if not pitches:
        return "–"
    low, middle, high = np.percentile(pitches, [5, 50, 95]).round().astype(int)
    return f"{min(pitches)} · {low}–{middle}–{high} · {max(pitches)}"


def table(pieces: Measures, corpus: Measures) -> str:
    """The two side by side, as Markdown."""

    def row(name: str, value) -> str:
        return f"| {name} | {value(pieces)} | {value(corpus)} |"

    lines = ["| | pieces | corpus |", "|---|---|---|"]
    lines.append(row("pieces, bars, notes", lambda m: f"{m.pieces}, {m.bars:,}, {m.notes:,}"))
    lines.append(row("notes in a bar", lambda m: f"{m.notes / m.bars:.1f}"))
    lines.append(row("bars without a sound", lambda m: f"{100 * m.empty / m.bars:.1f} %"))
    lines.append(row("bars as an earlier one", lambda m: f"{100 * m.repeated / m.bars:.1f} %"))
    for index, name in enumerate(CLASSES):
        lines.append(row(f"pitch class {name}", lambda m, i=index: f"{share(m.classes, i):.1f} %"))
    for length, name in LENGTHS.items():
        lines.append(row(f"{name} notes", lambda m, n=length: f"{share(m.lengths, n):.1f} %"))
    for voices in range(6):
        lines.append(row(f"{voices} sounding at once", lambda m, v=voices: f"{share(m.sounding, v):.1f} %"))
    for name in sorted({*pieces.pitches, *corpus.pitches}, key=lambda name: (name == "drums", name)):
        lines.append(row(f"instrument {name}: lowest · 5–50–95 % · highest", lambda m, n=name: pitch_range(m, n)))
    apart = {
        "pitch classes": difference(pieces.classes, corpus.classes),
        "note lengths": difference(pieces.lengths, corpus.lengths),
        "notes at once": difference(pieces.sounding, corpus.sounding),
    }
    told = ", ".join(f"{name} {value:.1f} %" for name, value in apart.items())
    return "\n".join([*lines, "", f"What would have to be elsewhere to make the distributions one: {told}.", ""])


def main(arguments: list[str] | None = None):
    options = parse_arguments(arguments)
    with one_line_errors():
        paths = midi_files(options.pieces)
        check_readers(paths)
        pieces, corpus = measure(paths), measure(midi_files(options.corpus))
        text = table(pieces, corpus)
        if options.output is not None:
            pages = (os.path.relpath(path.with_suffix(".png"), options.output.parent) for path in paths)
            pictures = (f"![{path.stem}]({Path(page).as_posix()})" for path, page in zip(paths, pages, strict=True))
            options.output.parent.mkdir(parents=True, exist_ok=True)
            write_text(options.output, "\n\n".join(["# Pieces beside their corpus", text, *pictures]) + "\n")
    print(f"music21 and pretty_midi read {len(paths)} file(s) of {options.pieces} without complaint.")
    if corpus.left_out:
        print(f"{len(corpus.left_out)} file(s) of {options.corpus} left out:")
        for path, reason in corpus.left_out.items():
            print(f"  {path.relative_to(options.corpus)}: {reason}")
    print(text)


if __name__ == "__main__":
    main()
