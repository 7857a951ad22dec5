"""Bach's chorales for four voices from the corpus in music21's package, as MIDI files with a track for each voice.

    python examples/music/chorales.py --output chorales

--output has the folder `midi` and the folder `tokenizer`, with a tokenizer of MidiTok for this music: sixteenth notes,
without loudness, which the scores do not have. Each voice has an instrument, so that the tokens tell voices apart.
"""

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tqdm import tqdm

from txl_hf.command_line import CommandParser, at_least_one, one_line_errors
from txl_hf.files import whole_folder

with one_line_errors():
    import miditok
    import symusic

# Oboe, English horn, clarinet and bassoon of General MIDI, for soprano to bass.
VOICES = {"soprano": 68, "alto": 69, "tenor": 71, "bass": 70}
TICKS = 480


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a new folder")
    parser.add_argument("--count", type=at_least_one, help="chorales, from the first on (all)")
    parser.add_argument("--num_proc", type=at_least_one, default=os.cpu_count(), help="processes (%(default)s)")
    return parser.parse_args(arguments)


def chorale_paths() -> list[Path]:
    """Each chorale once; of some there are files in two formats."""
    from music21 import corpus

    paths = {path.stem: path for path in map(Path, corpus.getComposer("bach")) if path.name.startswith("bwv")}
    return [paths[name] for name in sorted(paths)]


def write_chorale(path: Path, target: Path) -> bool:
    """Write a chorale as MIDI, its first whole bar where a bar begins; False for what is none for four voices."""
    from music21 import converter
    from music21.repeat import ExpanderException

    score = converter.parse(path)
    if len(score.parts) != len(VOICES):
        return False
    aside = target.with_suffix(".unaligned.mid")
    try:
        score.write("midi", aside)
    except ExpanderException:
        # Of a few scores, the repeats do not say where they begin.
        return False
    music = symusic.Score(aside).resample(TICKS)
    aside.unlink()
    # A track that music21 writes for signatures alone has no notes.
    music.tracks = [track for track in music.tracks if len(track.notes)]
    if len(music.tracks) != len(VOICES):
        return False
    first = score.parts[0].getElementsByClass("Measure").first()
    missing = max(0, round((first.barDuration.quarterLength - first.duration.quarterLength) * TICKS))
    for track, (name, program) in zip(music.tracks, VOICES.items(), strict=True):
        track.name, track.program = name, program
        track.shift_time(missing, inplace=True)
    for event in (*music.tempos, *music.time_signatures, *music.key_signatures):
        # What holds from the beginning holds for all of the first bar.
        event.time += missing if event.time else 0
    music.dump_midi(target)
    return True


def make_tokenizer() -> miditok.REMI:
    config = miditok.TokenizerConfig(
        pitch_range=(21, 108),
        beat_res={(0, 4): 4, (4, 12): 2},
        special_tokens=["PAD", "BOS", "EOS"],
        use_velocities=False,
        use_programs=True,
        programs=list(VOICES.values()),
        use_time_signatures=True,
        use_key_signatures=True,
        time_signature_range={4: [2, 3, 4, 6], 2: [2, 3, 4], 8: [3, 6, 9, 12]},
    )
    return miditok.REMI(config)


def main(arguments: list[str] | None = None):
    options = parse_arguments(arguments)
    with one_line_errors():
        if options.output.exists():
            raise ValueError(f"--output {options.output} exists: choose another folder")
        paths = chorale_paths()[: options.count]
        with whole_folder(options.output) as folder, ProcessPoolExecutor(options.num_proc) as pool:
            (folder / "midi").mkdir()
            targets = [folder / "midi" / f"{path.stem}.mid" for path in paths]
            written = sum(tqdm(pool.map(write_chorale, paths, targets), total=len(paths), desc="chorales"))
            make_tokenizer().save_pretrained(folder / "tokenizer")
    print(f"{options.output} has {written} chorales; {len(paths) - written} others are not for four voices, or odd.")


if __name__ == "__main__":
    main()
