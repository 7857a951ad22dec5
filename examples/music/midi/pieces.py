"""MIDI files as tokens of MidiTok: read, split, transposed, tokenised.

Functions import MidiTok, symusic and mido, so that one that is missing is an error where it is needed.
"""

import hashlib
import io
import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from txl_hf.data.corpora import SPLITS, files_below, group_by_split, some_names, unpacked, useful_processes
from txl_hf.data.loading import EVENTS

if TYPE_CHECKING:
    from datasets import Dataset
    from miditok import MusicTokenizer
    from symusic import Score

MIDI_SUFFIXES = (".mid", ".midi", ".kar")
DRUM_CHANNEL = 9
COMPARED = 24  # time steps of a quarter note in fingerprints: triplets and 32nd notes take a whole number of them
# Longest piece, in quarter notes: a damaged time is read as centuries, and MidiTok would write a token for each bar.
LONGEST = 100_000
FILES = 64  # for each process that is started
MOST_JOINED = 1_000_000  # program changes that are copied into other tracks, which takes a second
# First bytes of a program change and of a note, on any channel except that of drums.
PROGRAM_CHANGE = re.compile(rb"[\xc0-\xc8\xca-\xcf](?=[\x00-\x7f])")
NOTE = re.compile(rb"[\x90-\x98\x9a-\x9f](?=[\x00-\x7f])")
# A key signature with more sharps or flats than there are, which mido refuses and symusic reads.
NO_KEY, C_MAJOR = re.compile(rb"\xff\x59\x02(?![\x00-\x07\xf9-\xff][\x00\x01])..", re.DOTALL), b"\xff\x59\x02\0\0"

# Changes that MidiTok makes to a piece without a warning.
OTHER_METRE = "with a time signature that the tokenizer lacks, and passes over"
OTHER_TEMPO = "with a tempo beyond the tokenizer's, which takes its nearest"
KEYLESS = "that begin without a key signature, which the tokenizer reads as C major"


class Piece(NamedTuple):
    """A MIDI file.

    Attributes:
        name: its path relative to the folder that was given.
        fingerprint: equal only for copies and transpositions of the piece.
        notes, lost: number of notes in its tokens, and of those left out, because the tokenizer lacks their pitch or
            instrument, or has them already.
        remarks: those of `OTHER_METRE`, `OTHER_TEMPO` and `KEYLESS` that apply.
    """

    path: Path
    name: str
    fingerprint: str
    notes: int
    lost: int
    remarks: str


def make_midi_tokenizer(tokens: str) -> "MusicTokenizer":
    """MidiTok's REMI, or its compound words, for any pitches, instruments, keys, metres and tempos. Longer notes are
    shortened to 12 beats."""
    import miditok

    config = miditok.TokenizerConfig(
        pitch_range=(0, 127),
        drums_pitch_range=(0, 127),
        num_velocities=16,
        special_tokens=["PAD", "BOS", "EOS"],
        use_programs=True,
        use_tempos=True,
        use_time_signatures=True,
        use_key_signatures=tokens == "remi",
        time_signature_range={2: [2, 3, 4], 4: [1, 2, 3, 4, 5, 6, 7], 8: [3, 5, 6, 7, 9, 12]},
    )
    return {"remi": miditok.REMI, "compound": miditok.CPWord}[tokens](config)


def boundary_tokens(tokenizer: "MusicTokenizer") -> tuple[Any, Any]:
    """The tokens BOS and EOS around each piece: two ids, or two events of compound tokens. Raises a ValueError for a
    tokenizer without them, or that makes a sequence of each track."""
    vocabularies = tokenizer.vocab if tokenizer.is_multi_voc else [tokenizer.vocab]
    if any(token not in vocabulary for token in ("BOS_None", "EOS_None") for vocabulary in vocabularies):
        raise ValueError("the tokenizer must have the special tokens BOS and EOS, between which each piece lies")
    if not tokenizer.one_token_stream:
        raise ValueError("the tokenizer makes a sequence of each track: it must have use_programs=True")
    begin, end = ([vocabulary[token] for vocabulary in vocabularies] for token in ("BOS_None", "EOS_None"))
    return (begin, end) if tokenizer.is_multi_voc else (begin[0], end[0])


def read_pieces(
    folder: Path, tokenizer: "MusicTokenizer", num_proc: int, scratch: Path
) -> tuple[list[Piece], dict[str, str], Path]:
    """The pieces of a folder or an archive, {name: reason} for files that cannot be used, and the folder. Raises a
    ValueError if no file can be used."""
    from datasets import Dataset

    root = unpacked(folder, scratch)
    if not root.is_dir():
        raise ValueError(f"{folder} is one file: give a folder of MIDI files, or its archive")
    paths = [path for path in files_below(root) if path.suffix.lower() in MIDI_SUFFIXES]
    if not paths:
        raise ValueError(f"{folder} has no MIDI file, which ends in {', '.join(MIDI_SUFFIXES)}; {some_names(root)}")
    found = Dataset.from_dict({"path": [str(path) for path in paths]}).map(
        inspect,
        input_columns="path",
        fn_kwargs={"tokenizer": tokenizer},
        num_proc=useful_processes(len(paths) // FILES, num_proc),
        cache_file_name=str(scratch / "pieces.arrow"),
        desc="read",
    )
    pieces, left_out = [], {}
    for row in found:
        path = Path(row["path"])
        name = str(path.relative_to(root))
        if row["problem"]:
            left_out[name] = row["problem"]
        else:
            pieces.append(Piece(path, name, *(row[key] for key in Piece._fields[2:])))
    if not pieces:
        name, reason = next(iter(left_out.items()))
        raise ValueError(
            f"none of {len(left_out)} MIDI file(s) in {folder} can be used, for instance {name}: {reason}"
        )
    return pieces, left_out, root


def inspect(path: str, tokenizer: "MusicTokenizer") -> dict[str, Any]:
    """The fields of a `Piece`, or the problem with the file."""
    row: dict[str, Any] = {"fingerprint": "", "notes": 0, "lost": 0, "remarks": "", "problem": ""}
    try:
        score = read_score(Path(path))
        kept, lost = preprocess(score, tokenizer)
        row |= {"fingerprint": fingerprint(score), "notes": kept.note_num(), "lost": lost}
        # The tokenizer's tempos have a tolerance, because a file rounds to whole microseconds of a quarter note.
        low, high = tokenizer.tempos.min() - 0.01, tokenizer.tempos.max() + 0.01
        remarks = {
            OTHER_METRE: tokenizer.score_has_time_signatures_not_in_vocab(score),
            OTHER_TEMPO: tokenizer.config.use_tempos and not all(low <= tempo.qpm <= high for tempo in score.tempos),
            KEYLESS: tokenizer.config.use_key_signatures and not begins_in_a_key(score),
        }
        row["remarks"] = "; ".join(remark for remark, applies in remarks.items() if applies)
        if len(tokenizer.encode(kept, encode_ids=False, no_preprocess_score=True)) == 0:
            row["problem"] = "the tokenizer makes no token of it"
    except ValueError as error:
        row["problem"] = str(error)
    except ImportError:
        raise
    except Exception as error:
        # MidiTok raises errors of any kind where a file is damaged.
        row["problem"] = f"MidiTok cannot tokenise it: {error!r}"
    return row


def preprocess(score: "Score", tokenizer: "MusicTokenizer") -> tuple["Score", int]:
    """A score as the tokenizer reads it, and the number of notes that it leaves out; a ValueError if it leaves out
    all."""
    kept = tokenizer.preprocess_score(score)
    if kept.note_num() == 0:
        raise ValueError(f"the tokenizer has none of its {score.note_num()} note(s)")
    return kept, score.note_num() - kept.note_num()


def begins_in_a_key(score: "Score") -> bool:
    """Whether a key signature is at time 0."""
    return any(signature.time == 0 for signature in score.key_signatures)


def read_score(path: Path) -> "Score":
    """The score of a MIDI file, without tempos, time signatures and keys after its last note. Raises a ValueError for
    a file that is damaged, of format 2, without notes or without an end."""
    import symusic

    try:
        data = path.read_bytes()
        # Format 2 is refused, because symusic reads its sequences as tracks that sound together.
        if data[8:10] == b"\x00\x02":
            raise ValueError("it is of format 2, several sequences that are not one piece: save each in a file")
        score = symusic.Score.from_midi(with_programs(data))
    except ImportError:
        # A missing package is not reported as a damaged file.
        raise
    except Exception as error:
        # symusic raises RuntimeError, ValueError and errors that its C++ binding translates.
        raise ValueError(" ".join(str(error).split())) from None
    if score.ticks_per_quarter <= 0:
        raise ValueError(f"it has {score.ticks_per_quarter} ticks per quarter note")
    if score.note_num() == 0:
        raise ValueError("it has no notes")
    # Events after the last note are removed, because MidiTok would write empty bars up to them.
    end = last_end(score)
    for said in (score.tempos, score.time_signatures, score.key_signatures):
        said.filter(lambda event: event.time < end)
    if score.end() > LONGEST * score.ticks_per_quarter:
        raise ValueError(f"it lasts {score.end() // score.ticks_per_quarter:,} quarter notes, more than {LONGEST:,}")
    return score


def with_programs(data: bytes) -> bytes:
    """A MIDI file in which each track has the program changes of its channels.

    A program change is of a channel, in whichever track it is. symusic reads only those in the track of the notes, and
    without one assigns a piano. Raises a ValueError for a file that may need this and that mido cannot read.
    """
    if not _programs_may_be_elsewhere(data):
        return data
    import mido

    try:
        file = mido.MidiFile(file=io.BytesIO(NO_KEY.sub(C_MAJOR, data)), clip=True)
    except Exception as error:
        raise ValueError(
            f"the instruments of some tracks may be set in others, and it cannot be taken to pieces: {error!r}"
        ) from None
    timed = []
    for track in file.tracks:
        times = np.cumsum([message.time for message in track])
        timed.append([message.copy(time=int(time)) for message, time in zip(track, times, strict=True)])
    # By channel and time: of program changes at one time, the last counts.
    programs: dict[int, dict[int, tuple[int, Any]]] = defaultdict(dict)
    for i, track in enumerate(timed):
        for message in track:
            if message.type == "program_change":
                programs[message.channel][message.time] = (i, message)
    for i, track in enumerate(timed):
        sounding = {message.channel for message in track if message.type == "note_on"} - {DRUM_CHANNEL}
        elsewhere = [message for channel in sounding for j, message in programs[channel].values() if j != i]
        if len(elsewhere) * len(timed) > MOST_JOINED:
            raise ValueError(f"its {len(timed):,} tracks set each other's instruments too often to be told apart")
        # Of program changes at one time, the track's own comes last, so it counts.
        ordered = sorted([*elsewhere, *track], key=lambda message: message.time)
        begins = [0, *(message.time for message in ordered)]
        file.tracks[i] = mido.MidiTrack(
            message.copy(time=message.time - begin) for message, begin in zip(ordered, begins, strict=False)
        )
    written = io.BytesIO()
    file.save(file=written)
    return written.getvalue()


def _programs_may_be_elsewhere(data: bytes) -> bool:
    """Whether some channel may have notes in one track and program changes in another, without mido, which is slow. A
    time or a text may contain the bytes of a message, so there are false positives, but no false negatives."""
    if data[8:10] != b"\x00\x01":
        return False
    notes: dict[int, set[int]] = defaultdict(set)
    programs: dict[int, set[int]] = defaultdict(set)
    position = 8 + int.from_bytes(data[4:8], "big")
    while position < len(data):
        length = int.from_bytes(data[position + 4 : position + 8], "big")
        if data[position : position + 4] == b"MTrk":
            track = data[position + 8 : position + 8 + length]
            for tracks, pattern in ((notes, NOTE), (programs, PROGRAM_CHANGE)):
                for status in pattern.findall(track):
                    tracks[status[0] & 15].add(position)
        position += 8 + length
    return any(len(notes[channel] | tracks) > 1 for channel, tracks in programs.items() if notes[channel])


def last_end(score: "Score") -> int:
    """The time at which the last note ends, in ticks, at least 1."""
    return max([1, *(note.end for track in score.tracks for note in track.notes)])


def fingerprint(score: "Score") -> str:
    """A hash of when notes begin, relative to the first, and of their pitches, relative to the lowest, which
    transposition and another resolution of time do not change."""
    first = min(note.time for track in score.tracks for note in track.notes)
    drums: list[np.ndarray] = []
    others: list[np.ndarray] = []
    for track in score.tracks:
        notes = track.notes.numpy()
        times = (notes["time"].astype(np.int64) - first) * COMPARED
        # Rounded, because a triplet's ticks are not whole numbers at every resolution.
        times = (times + score.ticks_per_quarter // 2) // score.ticks_per_quarter
        (drums if track.is_drum else others).append(np.stack([times, notes["pitch"].astype(np.int64)], axis=1))
    digest = hashlib.blake2b(digest_size=16)
    for parts, moves in ((others, True), (drums, False)):
        found = np.unique(np.concatenate(parts), axis=0) if any(len(part) for part in parts) else np.zeros((0, 2))
        if len(found) and moves:
            found = found - [0, found[:, 1].min()]
        digest.update(found.astype("<i8").tobytes() + b"|")
    return digest.hexdigest()


def split_pieces(pieces: list[Piece], root: Path) -> tuple[dict[str, list[Piece]], list[Piece]]:
    """The pieces of each split, and those left out because another split has the same ones, or none is named.

    Names with the word of a split (`split_of`) decide. Without any, 5 % of the pieces are for validation and 5 % for
    the test, chosen by their fingerprints, so that copies and transpositions of a piece stay together. Raises a
    ValueError if names give only some splits, or a split is empty.
    """
    by_path = {piece.path: piece for piece in pieces}
    named, unnamed = group_by_split(by_path, root, "the folder")
    if not named:
        return cut_pieces(pieces), []
    splits: dict[str, list[Piece]] = {}
    taken: dict[str, str] = {}
    left_out = [by_path[path] for path in unnamed]
    for split in reversed(SPLITS):
        splits[split] = []
        for piece in map(by_path.__getitem__, named[split]):
            kept = taken.setdefault(piece.fingerprint, split) == split
            (splits[split] if kept else left_out).append(piece)
    if empty := [split for split in SPLITS if not splits[split]]:
        raise ValueError(f"all pieces for {' and '.join(empty)} are held out in another split too")
    return {split: splits[split] for split in SPLITS}, left_out


def cut_pieces(pieces: list[Piece]) -> dict[str, list[Piece]]:
    groups: dict[str, list[Piece]] = {}
    for piece in pieces:
        groups.setdefault(piece.fingerprint, []).append(piece)
    if len(groups) < len(SPLITS):
        raise ValueError(
            f"{len(groups)} piece(s), copies and transpositions aside, are too few to train on and to hold out two"
        )
    held_out = max(1, len(groups) // 20)
    order = sorted(groups)
    parts = {"test": order[:held_out], "validation": order[held_out : 2 * held_out], "train": order[2 * held_out :]}
    return {split: sorted(chain.from_iterable(groups[name] for name in parts[split])) for split in SPLITS}


def transpose(score: "Score", semitones: int, pitch_range: tuple[int, int]) -> "Score | None":
    """A copy with notes, except drums, and key signatures (without any, C major) moved; None if a pitch would be
    outside of the tokenizer's `pitch_range` (both ends included), because MidiTok would leave out the note; never None
    with 0 semitones."""
    import symusic

    low, high = pitch_range
    moved = score.copy()
    for track in moved.tracks:
        if track.is_drum or len(track.notes) == 0:
            continue
        pitches = track.notes.numpy()["pitch"].astype(np.int64) + semitones
        if semitones and (pitches.min() < low or pitches.max() > high):
            return None
        track.shift_pitch(semitones, inplace=True)
    if semitones and not begins_in_a_key(moved):
        # MidiTok assumes C major where there is no key signature, so the moved copy needs one.
        moved.key_signatures.insert(0, symusic.KeySignature(0, 0, 0))
    for signature in moved.key_signatures:
        # A semitone up is seven fifths up.
        signature.key = spelled(signature.key + 7 * semitones)
    return moved


def spelled(fifths: int) -> int:
    """Of enharmonic keys the one with the fewest accidentals, from -5 to 6 fifths from C."""
    return (fifths + 5) % 12 - 5


def tokenise_pieces(
    pieces: Iterable[Piece], tokenizer: "MusicTokenizer", semitones: int, num_proc: int, cache: Path
) -> "Dataset":
    """The tokens of pieces, each between BOS and EOS, one token a row, in the Arrow file `cache`; of compound words in
    the column `EVENTS`, an id for each attribute. With `semitones` each piece is in its key and in those so far above
    and below, all in random order."""
    from datasets import Dataset, Features, List, Value

    begin, end = boundary_tokens(tokenizer)
    moves = sorted(range(-semitones, semitones + 1), key=abs)
    rows = [{"path": str(piece.path), "semitones": move} for piece in pieces for move in moves]
    if semitones:
        rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    column = EVENTS if tokenizer.is_multi_voc else "token_ids"
    kind = List(Value("int32")) if tokenizer.is_multi_voc else Value("int32")
    return Dataset.from_list(rows).map(
        tokenise_batch,
        batched=True,
        batch_size=8,
        remove_columns=["path", "semitones"],
        features=Features({column: kind}),
        fn_kwargs={"tokenizer": tokenizer, "column": column, "begin": begin, "end": end},
        num_proc=useful_processes(len(rows) // FILES, num_proc),
        cache_file_name=str(cache),
        desc="tokenise",
    )


def tokenise_batch(
    rows: dict[str, list], tokenizer: "MusicTokenizer", column: str, begin: Any, end: Any
) -> dict[str, list]:
    pitches = tokenizer.config.pitch_range
    scores = (transpose(read_score(Path(path)), move, pitches) for path, move in zip(*rows.values(), strict=True))
    ids = (tokenizer.encode(score).ids for score in scores if score is not None)
    return {column: [token for piece in ids for token in (begin, *piece, end)]}
