"""`txl-prepare --corpus midi`: which piece goes where, what its tokens are, and which files are left out."""

import json
import sys
from itertools import pairwise
from time import process_time

import miditok
import mido
import numpy as np
import pytest
import symusic
from datasets import DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st

from midi_files import QUARTER, write_folder, write_piece
from txl_hf import TransfoXLConfig
from txl_hf.commands import evaluate_lm as evaluate
from txl_hf.commands import prepare_corpus as prepare
from txl_hf.commands import train_lm as command
from txl_hf.data.loading import load_midi_tokenizer
from txl_hf.midi.pieces import _programs_may_be_elsewhere, make_midi_tokenizer, read_score, transpose

SPLITS = ("train", "validation", "test")


def prepared(folder, tmp_path, *options: str):
    """The columns of tokens, the tokenizer and what corpus.json holds."""
    output = tmp_path / "output"
    prepare.main(
        ["--corpus", "midi", "--input", str(folder), "--output", str(output), "--num_proc", "1", *map(str, options)]
    )
    splits = DatasetDict.load_from_disk(output)
    assert tuple(splits) == SPLITS
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == [], "nothing else is left"
    information = json.loads((output / "corpus.json").read_text())
    assert {name: len(split) for name, split in splits.items()} == {
        name: counts["tokens"] for name, counts in information["splits"].items()
    }
    [[column]] = {tuple(split.column_names) for split in splits.values()}
    return {name: split[column][:] for name, split in splits.items()}, load_midi_tokenizer(output), information


def documents(ids: list, begin, end) -> list[list]:
    """The tokens between each begin and end; none is outside."""
    starts = [i for i, token in enumerate(ids) if token == begin]
    ends = [i for i, token in enumerate(ids) if token == end]
    assert [0, *(i + 1 for i in ends[:-1])] == starts and ends[-1] == len(ids) - 1
    return [ids[start + 1 : stop] for start, stop in zip(starts, ends, strict=True)]


def test_pieces_are_the_tokens_of_midi_tok_between_bos_and_eos(tmp_path):
    folder = write_folder(tmp_path / "midi")
    tokens, tokenizer, information = prepared(folder, tmp_path)
    assert {name: counts["pieces"] for name, counts in information["splits"].items()} == {
        "train": 28,
        "validation": 1,
        "test": 1,
    }
    for split in SPLITS:
        found = documents(tokens[split], information["document_start"], information["document_end"])
        names = information["files"][split]
        assert found == [tokenizer.encode(folder / name).ids for name in names]
        assert information["splits"][split]["notes"] == 8 * 6 * len(names)
    assert len(set(sum(information["files"].values(), []))) == 30
    assert information["vocab_size"] == len(tokenizer) and information["left_out"] == {}


def test_the_tokens_give_the_notes_back(tmp_path):
    tokens, tokenizer, information = prepared(write_folder(tmp_path / "midi"), tmp_path)
    [piece] = documents(tokens["test"], information["document_start"], information["document_end"])
    [name] = information["files"]["test"]
    expected, found = symusic.Score(tmp_path / "midi" / name), tokenizer.decode(piece)
    for score in (expected, found):
        score.tracks.sort(key=lambda track: (track.is_drum, track.program))
    for track, back in zip(expected.tracks, found.tracks, strict=True):
        places = [(note.time / expected.tpq, note.duration / expected.tpq, note.pitch) for note in track.notes]
        assert places == [(note.time / found.tpq, note.duration / found.tpq, note.pitch) for note in back.notes]


def test_what_is_said_behind_the_last_note_makes_no_bars(tmp_path):
    path, tokenizer = write_piece(tmp_path / "piece.mid", 3, bars=4), make_midi_tokenizer("remi")
    expected = tokenizer.encode(read_score(path)).ids
    score = symusic.Score(path)
    for bar in (4, 20, 200_000):
        score.tempos.append(symusic.Tempo(4 * 480 * bar, 60))
        score.time_signatures.append(symusic.TimeSignature(4 * 480 * bar, 3, 4))
        score.key_signatures.append(symusic.KeySignature(4 * 480 * bar, 2, 0))
    score.dump_midi(path)
    assert tokenizer.encode(read_score(path)).ids == expected


# Of four beats, before which the track of the notes says what it is.
SAID = {"with the notes": (0, 2), "in both": (0, 2), "in the first track": (), "in the first track and then": (2,)}


@pytest.mark.parametrize("place", SAID)
def test_instruments_are_of_channels_whichever_track_sets_them(tmp_path, place):
    """Format 1: a flute whose program changes to an oboe's after two beats, and drums."""
    file = mido.MidiFile(ticks_per_beat=QUARTER)
    setup, flute, drums = mido.MidiTrack(), mido.MidiTrack(), mido.MidiTrack()
    file.tracks += [setup, flute, drums]
    setup.append(mido.MetaMessage("set_tempo", tempo=600_000))
    for i in range(4):
        for track, channel in ((flute, 0), (drums, 9)):
            if track is flute and i in SAID[place]:
                track.append(mido.Message("program_change", channel=channel, program=73 if i == 0 else 68))
            track.append(mido.Message("note_on", channel=channel, note=60 + i, velocity=80))
            track.append(mido.Message("note_off", channel=channel, note=60 + i, time=QUARTER))
    if place.startswith("in the first track"):
        setup.append(mido.Message("program_change", channel=0, program=73))
    if place == "in the first track":
        setup.append(mido.Message("program_change", channel=0, program=68, time=2 * QUARTER))
    if place == "in both":
        setup.append(mido.Message("program_change", channel=0, program=1))
    file.save(tmp_path / "piece.mid")
    notes = {
        (track.program, track.is_drum, note.pitch, note.time)
        for track in read_score(tmp_path / "piece.mid").tracks
        for note in track.notes
    }
    expected = {(73 if i < 2 else 68, False, 60 + i, i * QUARTER) for i in range(4)}
    assert notes == expected | {(0, True, 60 + i, i * QUARTER) for i in range(4)}


def save_tracks(path, *tracks, ticks_per_beat=QUARTER):
    """Each of `tracks` is a list of (time in ticks, message)."""
    file = mido.MidiFile(ticks_per_beat=ticks_per_beat)
    for track in tracks:
        begins = [0, *(time for time, _ in track)]
        file.tracks.append(
            mido.MidiTrack(
                message.copy(time=time - begin) for (time, message), begin in zip(track, begins, strict=False)
            )
        )
    file.save(path)
    return path


def program(time, number):
    return [(time, mido.Message("program_change", program=number))]


def sound(time, pitch):
    return [(time, mido.Message("note_on", note=pitch)), (time + QUARTER, mido.Message("note_off", note=pitch))]


TEMPO = [(0, mido.MetaMessage("set_tempo", tempo=600_000))]
# Tracks, all of one channel, and the program of each note.
STAVES = {
    "two staves": ([TEMPO, program(0, 6) + sound(0, 72), sound(0, 48)], {72: 6, 48: 6}),
    "a track of programs behind the first": ([TEMPO, program(0, 40), sound(0, 60)], {60: 40}),
    "no track of tempi": ([program(0, 6) + sound(0, 72), sound(0, 48)], {72: 6, 48: 6}),
    "each its own": ([program(0, 6) + sound(0, 72), program(0, 7) + sound(0, 48)], {72: 6, 48: 7}),
    "a later change": (
        [program(0, 6) + sound(0, 72) + program(960, 20), program(0, 6) + sound(0, 48) + sound(960, 50)],
        {72: 6, 48: 6, 50: 20},
    ),
}


@pytest.mark.parametrize("name", STAVES)
def test_a_channel_has_one_instrument_whichever_track_has_its_notes(tmp_path, name):
    tracks, expected = STAVES[name]
    score = read_score(save_tracks(tmp_path / "piece.mid", *tracks))
    assert {note.pitch: track.program for track in score.tracks for note in track.notes} == expected


def test_a_key_that_is_none_hides_no_instrument(tmp_path):
    key = [(0, mido.MetaMessage("key_signature", key="C"))]
    path = save_tracks(tmp_path / "piece.mid", TEMPO + key + program(0, 40), sound(0, 60))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"\xff\x59\x02\x00", b"\xff\x59\x02\x09"))
    assert path.read_bytes() != data and read_score(path).tracks[0].program == 40


def test_instruments_that_cannot_be_found_are_not_made_pianos(tmp_path):
    """mido raises on a text that is longer than its track; symusic leaves it out."""
    path = save_tracks(tmp_path / "piece.mid", TEMPO + program(0, 40), sound(0, 60))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"\xff\x51\x03", b"\xff\x51\x02"))
    with pytest.raises(
        ValueError, match="the instruments of some tracks may be set in others, and it cannot be taken"
    ):
        read_score(path)


def test_a_file_of_many_tracks_takes_one_pass(tmp_path):
    """All pairs of tracks were compared: 20 s for 8,000 tracks, twice, and 23 minutes for 65,535 (1.8 MB)."""

    def save(*bodies):
        ended = [body + b"\x00\xff\x2f\x00" for body in bodies]
        tracks = (b"MTrk" + len(body).to_bytes(4, "big") + body for body in ended)
        path = tmp_path / "many.mid"
        header = b"\x00\x01" + len(ended).to_bytes(2, "big") + b"\x01\xe0"
        path.write_bytes(b"MThd\x00\x00\x00\x06" + header + b"".join(tracks))
        return path

    note, other = b"\x00\x90\x3c\x40\x30\x80\x3c\x40", b"\x00\xc1\x28"
    began = process_time()
    assert not _programs_may_be_elsewhere(save(*[note, other] * 16_000).read_bytes())
    score = read_score(save(b"\x00\xc0\x28", *[note] * 3_000))
    assert {track.program for track in score.tracks if len(track.notes)} == {40}
    # Distinct times, all in one channel.
    changes = [bytes([0x80 | i >> 7, i & 127]) + b"\xc0\x28" + note for i in range(128, 1500)]
    with pytest.raises(ValueError, match="its 1,372 tracks set each other's instruments too often"):
        read_score(save(*changes))
    assert process_time() - began < 10


@given(
    tracks=st.lists(
        st.lists(
            st.tuples(
                st.integers(0, 40_000),
                st.sampled_from(["note_on", "program_change", "control_change", "pitchwheel"]),
                st.integers(0, 15),
            ),
            max_size=6,
        ),
        max_size=4,
    )
)
@settings(max_examples=60, deadline=None)
def test_no_file_with_programs_elsewhere_is_passed_by(tracks, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.mid"
    timed = [
        [(time, mido.Message(kind, channel=channel)) for time, kind, channel in sorted(track)] for track in tracks
    ]
    save_tracks(path, *timed)
    kinds = [
        {
            kind: {channel for _, which, channel in track if which == kind} - {9}
            for kind in ("note_on", "program_change")
        }
        for track in tracks
    ]
    elsewhere = any(one["note_on"] & other["program_change"] for one in kinds for other in kinds if one is not other)
    assert _programs_may_be_elsewhere(path.read_bytes()) or not elsewhere


def test_files_that_cannot_be_used_are_named_counted_and_left_out(tmp_path, capsys):
    folder = write_folder(tmp_path / "midi", 6)
    whole = (folder / "book 0" / "piece-0.mid").read_bytes()
    (folder / "torn.mid").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.mid").write_bytes(b"")
    (folder / "words.MID").write_text("no music")
    (folder / "several.mid").write_bytes(whole[:8] + b"\x00\x02" + whole[10:])
    symusic.Score(480).dump_midi(folder / "silent.midi")
    endless = symusic.Score(480)
    endless.tracks.append(symusic.Track("one", 0))
    endless.tracks[0].notes.append(symusic.Note(2**27, 480, 60, 80))
    endless.dump_midi(folder / "endless.mid")
    (folder / "readme.txt").write_text("not a MIDI file at all")
    (folder / "._piece-0.mid").write_bytes(b"what macOS writes beside a file")
    _, _, information = prepared(folder, tmp_path)
    printed = capsys.readouterr().out
    names = ["empty.mid", "endless.mid", "several.mid", "silent.midi", "torn.mid", "words.MID"]
    assert sorted(information["left_out"]) == names
    assert information["left_out"]["several.mid"].startswith("it is of format 2")
    assert information["left_out"]["silent.midi"] == "it has no notes"
    assert "quarter notes, more than 100,000" in information["left_out"]["endless.mid"]
    assert "6 file(s) left out:" in printed
    assert all(f"{name}: {reason}" in printed for name, reason in information["left_out"].items())
    assert sum(counts["pieces"] for counts in information["splits"].values()) == 6


def test_no_piece_and_no_transposition_of_it_is_in_two_splits(tmp_path):
    folder = write_folder(tmp_path / "midi", 24)
    for seed in range(24):
        write_piece(folder / "moved" / f"up-{seed}.mid", seed, key=2, transposed=2)
    _, _, information = prepared(folder, tmp_path)
    places = {}
    for split, names in information["files"].items():
        for name in names:
            places.setdefault(name.rpartition("-")[2], set()).add(split)
    assert len(places) == 24 and all(len(splits) == 1 for splits in places.values())
    assert {split for splits in places.values() for split in splits} == set(SPLITS)


def test_no_piece_of_another_resolution_is_in_two_splits(tmp_path):
    """Of triplets, which are whole numbers of ticks at one of them alone; a copy of each begins later."""
    for seed in range(20):
        pitches = np.random.default_rng(seed).integers(55, 80, 24)
        for name, resolution, silence in (("a", 480, 0), ("b", 1024, 0), ("c", 256, 100)):
            track = []
            for i, pitch in enumerate(pitches):
                times = (silence + round(end * resolution / 3) for end in (i, i + 1))
                for kind, time in zip(("note_on", "note_off"), times, strict=True):
                    track.append((time, mido.Message(kind, note=int(pitch))))
            (tmp_path / "midi").mkdir(exist_ok=True)
            save_tracks(tmp_path / "midi" / f"{seed}-{name}.mid", track, ticks_per_beat=resolution)
    _, _, information = prepared(tmp_path / "midi", tmp_path)
    splits = {}
    for split, names in information["files"].items():
        for name in names:
            splits.setdefault(name.split("-")[0], []).append(split)
    assert len(splits) == 20 and all(len(each) == 3 and len(set(each)) == 1 for each in splits.values())


def test_the_split_does_not_depend_on_names(tmp_path):
    first, *_, information = prepared(write_folder(tmp_path / "midi", 24), tmp_path)
    (tmp_path / "output").rename(tmp_path / "first")
    for seed in range(24):
        write_piece(tmp_path / "others" / f"{97 * seed % 89}.mid", seed)
    again, *_ = prepared(tmp_path / "others", tmp_path)
    assert (again["validation"], again["test"]) == (first["validation"], first["test"])


def test_names_decide_and_what_is_held_out_is_not_trained_on(tmp_path, capsys):
    for seed in range(6):
        write_piece(tmp_path / "midi" / "train" / f"{seed}.mid", seed)
    write_piece(tmp_path / "midi" / "valid" / "a.mid", 10)
    write_piece(tmp_path / "midi" / "test" / "b.mid", 11)
    write_piece(tmp_path / "midi" / "train" / "copy.mid", 11, key=1, transposed=-5)
    _, _, information = prepared(tmp_path / "midi", tmp_path)
    assert information["files"] == {
        "train": [f"train/{seed}.mid" for seed in range(6)],
        "validation": ["valid/a.mid"],
        "test": ["test/b.mid"],
    }
    assert list(information["left_out"]) == ["train/copy.mid"]
    assert "1 file(s) left out that are held out in another split, or named after none: train/copy.mid" in (
        capsys.readouterr().out
    )


def test_only_the_training_split_is_transposed(tmp_path):
    folder = write_folder(tmp_path / "midi", 12)
    plain, tokenizer, information = prepared(folder, tmp_path)
    (tmp_path / "output").rename(tmp_path / "plain")
    moved, _, _ = prepared(folder, tmp_path, "--transpose", 2)
    boundaries = information["document_start"], information["document_end"]
    assert (moved["validation"], moved["test"]) == (plain["validation"], plain["test"])
    found = documents(moved["train"], *boundaries)
    expected = [
        tokenizer.encode(transpose(read_score(folder / name), move, (0, 127))).ids
        for name in information["files"]["train"]
        for move in range(-2, 3)
    ]
    assert sorted(found) == sorted(expected) and found != expected
    assert len({tuple(piece) for piece in found}) == 5 * 10


@pytest.mark.parametrize(("semitones", "key"), [(0, 3), (1, -2), (2, 5), (-3, 6), (-6, -3), (11, -4)])
def test_transposition_moves_notes_and_keys_but_no_drums(tmp_path, semitones, key):
    # Of A major: A, B flat, B, F sharp, E flat and A flat major.
    score = read_score(write_piece(tmp_path / "a.mid", 1, key=3))
    moved = transpose(score, semitones, (0, 127))
    for before, after in zip(score.tracks, moved.tracks, strict=True):
        steps = {a.pitch - b.pitch for a, b in zip(after.notes, before.notes, strict=True)}
        assert steps == {0 if before.is_drum else semitones}
    assert (moved.key_signatures[0].key, score.key_signatures[0].key) == (key, 3)


def test_a_piece_without_a_key_moves_from_where_the_tokenizer_takes_it_to_be(tmp_path, capsys):
    """C major, for want of anything else: all keys would have that name otherwise."""
    for seed in range(12):
        score = read_score(write_piece(tmp_path / "midi" / f"{seed}.mid", seed))
        if seed % 2:
            score.key_signatures.clear()
        else:
            # What comes later says nothing of the beginning.
            score.key_signatures[0].time = 4 * 480
        if seed == 0:
            score.tempos.append(symusic.Tempo(0, 500))
        score.dump_midi(tmp_path / "midi" / f"{seed}.mid")
    moved, tokenizer, information = prepared(tmp_path / "midi", tmp_path, "--transpose", 2)
    names = {index: token for token, index in tokenizer.vocab.items()}
    pieces = documents(moved["train"], information["document_start"], information["document_end"])
    keys = [next(names[index] for index in piece if names[index].startswith("KeySig")) for piece in pieces]
    # B flat, B, C, C sharp and D major.
    assert {key: keys.count(key) for key in keys} == dict.fromkeys(
        ("KeySig_-2:0", "KeySig_5:0", "KeySig_0:0", "KeySig_-5:0", "KeySig_2:0"), 10
    )
    said = capsys.readouterr().out
    assert "12 file(s) that begin without a key signature, which the tokenizer reads as C major" in said
    assert "1 file(s) with a tempo beyond the tokenizer's, which takes its nearest: 0.mid" in said


@pytest.mark.parametrize("pitch_range", [(0, 127), (10, 120), (61, 62)])
def test_what_would_leave_the_pitches_of_the_tokenizer_is_not_transposed(tmp_path, pitch_range):
    score = read_score(write_piece(tmp_path / "a.mid", 1))
    pitches = [note.pitch for track in score.tracks if not track.is_drum for note in track.notes]
    down, up = pitch_range[0] - min(pitches), pitch_range[1] - max(pitches)
    for semitones in (down - 1, down, up, up + 1):
        assert (transpose(score, semitones, pitch_range) is None) == (not down <= semitones <= up)
    assert transpose(score, 0, pitch_range) == score


def test_only_keys_in_which_the_tokenizer_has_all_notes_are_added(tmp_path):
    """MidiTok leaves out what is outside of its pitches, 21 to 109 by default, and says nothing."""
    miditok.REMI(miditok.TokenizerConfig(use_programs=True, special_tokens=["PAD", "BOS", "EOS"])).save_pretrained(
        tmp_path / "own"
    )
    for seed in range(4):
        # The lowest note is the tokenizer's second.
        score = symusic.Score(480)
        score.tracks.append(symusic.Track("low", 0))
        for beat, pitch in enumerate((22, *np.random.default_rng(seed).integers(22, 50, size=20))):
            score.tracks[0].notes.append(symusic.Note(480 * beat, 480, int(pitch), 80))
        (tmp_path / "midi").mkdir(exist_ok=True)
        score.dump_midi(tmp_path / "midi" / f"{seed}.mid")
    own = ("--tokenizer", tmp_path / "own")
    tokens, tokenizer, information = prepared(tmp_path / "midi", tmp_path, *own, "--transpose", 5)
    found = documents(tokens["train"], information["document_start"], information["document_end"])
    lowest = []
    for piece in found:
        pitches = [note.pitch for note in tokenizer.decode(piece).tracks[0].notes]
        assert len(pitches) == 21
        lowest.append(min(pitches))
    assert sorted(lowest) == sorted(2 * list(range(21, 28)))


@pytest.mark.parametrize("tokens", ["remi", "compound"])
def test_the_tokenizer_that_is_made_has_every_pitch_of_drums_and_others(tmp_path, tokens):
    score = symusic.Score(480)
    for is_drum in (False, True):
        score.tracks.append(symusic.Track("all", 0, is_drum))
        for pitch in range(128):
            score.tracks[-1].notes.append(symusic.Note(480 * pitch, 480, pitch, 80))
    tokenizer = make_midi_tokenizer(tokens)
    back = tokenizer.decode(tokenizer.encode(score))
    assert {track.is_drum: [note.pitch for note in track.notes] for track in back.tracks} == {
        False: list(range(128)),
        True: list(range(128)),
    }


def test_notes_that_the_tokenizer_lacks_are_told_and_not_counted(tmp_path, capsys):
    tokens = ["PAD", "BOS", "EOS"]
    config = miditok.TokenizerConfig(use_programs=True, programs=[-1, 0], pitch_range=(60, 72), special_tokens=tokens)
    miditok.REMI(config).save_pretrained(tmp_path / "own")
    # All lack the bass; one has a single note of its melody, and one has nothing but the bass.
    folder = write_folder(tmp_path / "midi", 4)
    score = symusic.Score(folder / "book 0" / "piece-0.mid")
    for beat, note in enumerate(score.tracks[0].notes):
        note.pitch = 72 if beat == 5 else 73
    score.dump_midi(folder / "high.mid")
    del score.tracks[2], score.tracks[0]
    score.dump_midi(folder / "bass.mid")
    _, _, information = prepared(folder, tmp_path, "--tokenizer", tmp_path / "own")
    assert information["notes_lost"] == {f"book {i % 3}/piece-{i}.mid": 8 for i in range(4)} | {"high.mid": 31 + 8}
    assert information["left_out"] == {"bass.mid": "the tokenizer has none of its 8 note(s)"}
    notes = {name: 32 + 8 for name in information["notes_lost"]} | {"high.mid": 1 + 8}
    for split in SPLITS:
        assert information["splits"][split]["notes"] == sum(notes[name] for name in information["files"][split])
    printed = capsys.readouterr().out
    assert "5 file(s) with notes that the tokenizer lacks or has already, and leaves out: " in printed
    assert "high.mid (39 of 48)" in printed and "book 1/piece-1.mid (8 of 48)" in printed


def test_notes_that_begin_twice_are_not_told_as_ones_that_the_tokenizer_lacks(tmp_path, capsys):
    config = miditok.TokenizerConfig(
        pitch_range=(0, 127), use_programs=True, special_tokens=["PAD", "BOS", "EOS"], remove_duplicated_notes=True
    )
    miditok.REMI(config).save_pretrained(tmp_path / "own")
    folder = write_folder(tmp_path / "midi", 4)
    score = symusic.Score(folder / "book 0" / "piece-0.mid")
    score.tracks[0].notes.append(score.tracks[0].notes[0])
    score.dump_midi(folder / "book 0" / "piece-0.mid")
    _, _, information = prepared(folder, tmp_path, "--tokenizer", tmp_path / "own")
    assert information["notes_lost"] == {"book 0/piece-0.mid": 1}
    assert (
        "1 file(s) with notes that the tokenizer lacks or has already, and leaves out: book 0/piece-0.mid (1 of 49)"
        in capsys.readouterr().out
    )


def test_joined_tokens_say_the_same_in_fewer(tmp_path):
    folder = write_folder(tmp_path / "midi", 12)
    plain, _, _ = prepared(folder, tmp_path)
    (tmp_path / "output").rename(tmp_path / "plain")
    size = 700
    joined, tokenizer, information = prepared(folder, tmp_path, "--bpe", size)
    assert information["vocab_size"] == len(tokenizer) == size
    assert len(joined["train"]) < 0.7 * len(plain["train"])
    [piece] = documents(joined["test"], information["document_start"], information["document_end"])
    sequence = miditok.TokSequence(ids=piece, are_ids_encoded=True)
    tokenizer.decode_token_ids(sequence)
    assert sequence.ids == documents(plain["test"], information["document_start"], information["document_end"])[0]


def test_compound_tokens_are_events_of_several_attributes(tmp_path):
    events, tokenizer, information = prepared(write_folder(tmp_path / "midi", 12), tmp_path, "--tokens", "compound")
    assert information["vocab_size"] == tokenizer.len and len(tokenizer.len) > 5
    for split in SPLITS:
        assert (np.array(events[split]) < np.array(tokenizer.len)).all()
    [piece] = documents(events["test"], information["document_start"], information["document_end"])
    assert piece == tokenizer.encode(tmp_path / "midi" / information["files"]["test"][0]).ids


def test_a_tokenizer_of_ones_own(tmp_path):
    config = miditok.TokenizerConfig(use_programs=True, use_velocities=False, special_tokens=["PAD", "BOS", "EOS"])
    own = miditok.TSD(config)
    own.save_pretrained(tmp_path / "own")
    tokens, tokenizer, _ = prepared(write_folder(tmp_path / "midi", 4), tmp_path, "--tokenizer", tmp_path / "own")
    assert tokenizer == own and isinstance(tokenizer, miditok.TSD)
    types = [tokenizer.token_id_type(token) for token in tokens["test"]]
    assert "Velocity" not in types and all(
        after == "Duration" for before, after in pairwise(types) if before == "Pitch"
    )


def test_a_time_signature_that_the_tokenizer_lacks_is_told(tmp_path, capsys):
    folder = write_folder(tmp_path / "midi", 4)
    score = symusic.Score(folder / "book 0" / "piece-0.mid")
    score.time_signatures[0].numerator = 11
    score.dump_midi(folder / "odd.mid")
    prepared(folder, tmp_path)
    assert (
        "1 file(s) with a time signature that the tokenizer lacks, and passes over: odd.mid" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--input", "none"], "none does not exist"),
        (["--input", "empty"], "empty has no MIDI file, which ends in .mid, .midi, .kar;"),
        (["--input", "broken"], "none of 1 MIDI file(s) in broken can be used, for instance a.mid: "),
        (["--input", "two"], "2 piece(s), copies and transpositions aside, are too few"),
        (["--input", "two/a.mid"], "is one file: give a folder of MIDI files"),
        (["--input", "half"], "no file for validation and test (by their names, train: train/a.mid)"),
        (["--input", "two", "--tokenizer", "empty"], "--tokenizer empty has no tokenizer of MidiTok"),
        (["--input", "two", "--tokenizer", "strange"], "names the tokenization 'MusicTokenizer2'"),
        (["--input", "two", "--tokenizer", "tracks"], "the tokenizer makes a sequence of each track"),
        (["--input", "two", "--tokenizer", "bare"], "must have the special tokens BOS and EOS"),
        (["--input", "three", "--bpe", "100"], "--bpe 100 must be more than the "),
    ],
)
def test_what_cannot_be_prepared_is_refused_in_one_line(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    for name, pieces in {"two": 2, "three": 3}.items():
        for seed in range(pieces):
            write_piece(tmp_path / name / f"{'abc'[seed]}.mid", seed)
    write_piece(tmp_path / "half" / "train" / "a.mid", 0)
    for name in ("empty", "broken", "strange"):
        (tmp_path / name).mkdir()
    (tmp_path / "broken" / "a.mid").write_bytes(b"MThd")
    (tmp_path / "strange" / "tokenizer.json").write_text('{"tokenization": "MusicTokenizer2"}')
    tokens = ["PAD", "BOS", "EOS"]
    miditok.REMI(miditok.TokenizerConfig(special_tokens=tokens)).save_pretrained("tracks")
    miditok.REMI(miditok.TokenizerConfig(use_programs=True, special_tokens=["PAD"])).save_pretrained("bare")
    with pytest.raises(SystemExit) as refused:
        prepare.main(["--corpus", "midi", "--output", "output", "--num_proc", "1", *options])
    assert message in refused.value.code and "\n" not in refused.value.code
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--corpus", "text", "--bpe", "100"], "--bpe is for --corpus midi"),
        (["--corpus", "midi"], "needs --input"),
        (["--corpus", "midi", "--input", "a", "--transpose", "12"], "must be 0 to 11 semitones"),
        (["--corpus", "midi", "--input", "a", "--tokens", "compound", "--bpe", "9"], "events of compound tokens"),
        (
            ["--corpus", "midi", "--input", "a", "--tokens", "remi", "--tokenizer", "b"],
            "not for the one of --tokenizer",
        ),
    ],
)
def test_options_that_do_not_go_together(capsys, options, message):
    with pytest.raises(SystemExit):
        prepare.main([*options, "--output", "output"])
    assert message in capsys.readouterr().err


def test_without_midi_tok_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "miditok", None)
    with pytest.raises(SystemExit) as refused:
        prepare.main(["--corpus", "midi", "--input", str(tmp_path), "--output", str(tmp_path / "output")])
    assert refused.value.code == 'error: miditok is not installed: pip install "txl-hf[music]"'


def test_what_a_file_needs_and_is_not_installed_is_no_fault_of_the_file(tmp_path, monkeypatch):
    """Its first track sets a program, which another reader than symusic has to look at."""
    file = mido.MidiFile()
    file.tracks.append(mido.MidiTrack([mido.Message("program_change", program=73)]))
    file.tracks.append(mido.MidiTrack([mido.Message("note_on"), mido.Message("note_off", time=480)]))
    (tmp_path / "midi").mkdir()
    file.save(tmp_path / "midi" / "piece.mid")
    monkeypatch.setitem(sys.modules, "mido", None)
    with pytest.raises(SystemExit) as refused:
        prepared(tmp_path / "midi", tmp_path)
    assert refused.value.code == 'error: mido is not installed: pip install "txl-hf[music]"'


def test_a_model_of_music_is_trained_and_evaluated_and_has_its_tokenizer(tmp_path):
    _, tokenizer, information = prepared(write_folder(tmp_path / "midi", 12), tmp_path)
    sizes = "--n_layer 1 --d_model 16 --n_head 2 --d_head 8 --d_inner 16 --tgt_len 16 --mem_len 16 --batch_size 4"
    steps = "--max_steps 2 --eval_batch_size 1 --warmup_steps 0 --logging_steps 1 --eval_memory_lengths 0"
    (tmp_path / "recipe.yaml").write_text("initial_memory: empty\n")
    run = tmp_path / "run"
    folders = ["--data", str(tmp_path / "output"), "--output", str(run)]
    command.main([str(tmp_path / "recipe.yaml"), *folders, *sizes.split(), *steps.split()])
    assert load_midi_tokenizer(run) == tokenizer
    assert miditok.REMI.from_pretrained(run) == tokenizer, "as MidiTok's users load it"
    figures = tmp_path / "figures.json"
    evaluate.main(["--model", str(run), "--data", folders[1], "--memory_length", "16", "--output", str(figures)])
    [found] = json.loads(figures.read_text())["results"]
    assert found["tokens"] == information["splits"]["test"]["tokens"] - 1
    (tmp_path / "output").rename(tmp_path / "first")
    config = miditok.TokenizerConfig(use_programs=True, special_tokens=["PAD", "BOS", "EOS"], num_velocities=4)
    miditok.REMI(config).save_pretrained(tmp_path / "own")
    prepared(tmp_path / "midi", tmp_path, "--tokenizer", tmp_path / "own")
    with pytest.raises(SystemExit, match="has another vocabulary than .*run: "):
        evaluate.main(["--model", str(run), "--data", folders[1]])
    (tmp_path / "words.txt").write_text("no music")
    with pytest.raises(SystemExit, match="reads music: --data .*words.txt must be a folder of txl-prepare"):
        evaluate.main(["--model", str(run), "--data", str(tmp_path / "words.txt")])


def test_compound_tokens_are_not_for_txl_train(tmp_path):
    prepared(write_folder(tmp_path / "midi", 4), tmp_path, "--tokens", "compound")
    (tmp_path / "recipe.yaml").write_text("max_steps: 1\n")
    folders = ["--data", str(tmp_path / "output"), "--output", str(tmp_path / "run")]
    with pytest.raises(SystemExit, match="compound tokens, which examples/music/compound.py trains on"):
        command.main([str(tmp_path / "recipe.yaml"), *folders])
    TransfoXLConfig(vocab_size=400, cutoffs=[], div_val=1).save_pretrained(tmp_path / "model")
    with pytest.raises(SystemExit, match="compound tokens, which are no one text: see examples/music/compound.py"):
        evaluate.main(["--model", str(tmp_path / "model"), "--data", str(tmp_path / "output")])
