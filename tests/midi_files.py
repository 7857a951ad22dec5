"""Small MIDI files for tests, written by symusic."""

from pathlib import Path

import numpy as np
from symusic import KeySignature, Note, Score, Tempo, TimeSignature, Track

QUARTER = 480
SCALE = (0, 2, 4, 5, 7, 9, 11, 12)


def write_piece(path: Path, seed: int, bars: int = 8, key: int = 0, transposed: int = 0) -> Path:
    """A melody of quarter notes and a bass of whole notes with a drum, in a major key with so many sharps."""
    generator = np.random.default_rng(seed)
    score = Score(QUARTER)
    score.tempos.append(Tempo(0, 100))
    score.time_signatures.append(TimeSignature(0, 4, 4))
    score.key_signatures.append(KeySignature(0, key, 0))
    melody, bass, drums = Track("melody", 0), Track("bass", 32), Track("drums", 0, True)
    for beat in range(4 * bars):
        pitch = 60 + SCALE[generator.integers(8)] + transposed
        melody.notes.append(Note(beat * QUARTER, QUARTER, int(pitch), 80))
        if beat % 4 == 0:
            bass.notes.append(
                Note(beat * QUARTER, 4 * QUARTER, int(36 + SCALE[generator.integers(8)] + transposed), 64)
            )
            drums.notes.append(Note(beat * QUARTER, QUARTER, 36, 100))
    for track in (melody, bass, drums):
        score.tracks.append(track)
    path.parent.mkdir(parents=True, exist_ok=True)
    score.dump_midi(path)
    return path


def write_folder(folder: Path, pieces: int = 30, bars: int = 8) -> Path:
    """Pieces in folders within the folder."""
    for seed in range(pieces):
        write_piece(folder / f"book {seed % 3}" / f"piece-{seed}.mid", seed, bars)
    return folder
