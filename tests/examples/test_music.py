"""The path of examples/music in miniature: MIDI files in, a model, MIDI files out that are valid and can be seen."""

import argparse
import json
import math
import os
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import miditok
import numpy as np
import pytest
import symusic
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from miditok import TokSequence

import compound
import generate
import jsb
import measures
from midi_files import write_folder, write_piece
from models import small_model
from pieces import MusicGrammar, bar_lines
from txl_hf.commands import prepare_corpus as prepare
from txl_hf.commands import train_lm as command
from txl_hf.data.loading import load_midi_tokenizer
from txl_hf.midi.pieces import make_midi_tokenizer, tokenise_batch


def make_tokenizer(folder, joined: int | None = None) -> miditok.REMI:
    """Of a few pieces; with joined tokens if a size is given."""
    config = miditok.TokenizerConfig(
        beat_res={(0, 4): 4},
        num_velocities=2,
        special_tokens=["PAD", "BOS", "EOS"],
        use_programs=True,
        programs=[-1, 0, 32],
        use_tempos=True,
        use_time_signatures=True,
        use_key_signatures=True,
        time_signature_range={4: [3, 4], 8: [6]},
        drums_pitch_range=(35, 38),
    )
    tokenizer = miditok.REMI(config)
    if joined:
        tokenizer.train(vocab_size=joined, files_paths=sorted(write_folder(folder, 6).rglob("*.mid")))
    return tokenizer


def save_model(folder: Path, joined: int | None = None) -> Path:
    """The folder of a model that has learned nothing, so that only the grammar makes music of what it says."""
    tokenizer = make_tokenizer(folder / "midi", joined)
    torch.manual_seed(0)
    small_model(vocab_size=len(tokenizer), cutoffs=[], div_val=1, mem_len=16, tgt_len=8).save_pretrained(
        folder / "model"
    )
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    """The same with joined tokens."""
    return save_model(tmp_path_factory.mktemp("joined"), 400)


def generated(saved, output, *options: str) -> list[symusic.Score]:
    generate.main(["--model", str(saved), "--output", str(output), *map(str, options)])
    return [symusic.Score(path) for path in sorted(output.glob("*.mid"))]


def check_notes(score: symusic.Score):
    """No note begins before the one before it with the same pitch has ended, and none is empty."""
    for track in score.tracks:
        for pitch in {note.pitch for note in track.notes}:
            notes = sorted((note.time, note.time + note.duration) for note in track.notes if note.pitch == pitch)
            assert all(start < end for start, end in notes)
            assert all(end <= start for (_, end), (start, _) in pairwise(notes))


# --- what may follow what --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("joined", [None, 400])
def test_what_is_allowed_is_without_error_for_midi_tok(tmp_path, joined):
    tokenizer = make_tokenizer(tmp_path, joined)
    tokenizer.config.remove_duplicated_notes = True  # So that it counts notes that begin twice too.
    grammar = MusicGrammar(tokenizer, bars=2)
    generator = torch.Generator().manual_seed(0)
    rows = torch.full((4, 1), tokenizer["BOS_None"])
    for _ in range(250):
        scores = grammar(rows, torch.rand(4, len(tokenizer), generator=generator).log())
        assert scores.isfinite().any(1).all(), "something may always follow"
        rows = torch.cat([rows, torch.multinomial(scores.softmax(1), 1, generator=generator)], dim=1)
    for row in rows[:, 1:].tolist():
        end = row.index(tokenizer["EOS_None"])
        assert set(row[end + 1 :]) <= {tokenizer["PAD_None"]}
        sequence = TokSequence(ids=row[:end], are_ids_encoded=joined is not None)
        assert grammar.whole(row[:end]) == row[:end]
        assert tokenizer.tokens_errors(sequence) == 0
        assert sequence.tokens.count("Bar_None") == 2


def test_there_are_no_more_instruments_than_channels_of_midi():
    """In a file the sixteenth would be played by the first one's channel, and the first by the sixteenth's sounds."""
    tokenizer = make_midi_tokenizer("remi")
    grammar = MusicGrammar(tokenizer)
    note = "Program_{} Pitch_60 Velocity_63 Duration_1.0.8"
    names = ["BOS_None", "Bar_None", "TimeSig_4/4", "Position_0", *(note.format(i) for i in range(15))]
    place = grammar.read([tokenizer[name] for name in " ".join(names).split()])

    def programs(place) -> set[str]:
        allowed = {tokenizer[int(index)] for index in grammar.mask(place).nonzero()}
        return {name for name in allowed if name.startswith("Program")}

    assert programs(place) == {f"Program_{i}" for i in range(-1, 15)}
    assert len(programs(replace(place, programs=place.programs - {"3"}))) == 129


def test_an_instrument_whose_pitches_all_begin_now_begins_no_other(tmp_path):
    """Nothing could follow."""
    config = miditok.TokenizerConfig(
        pitch_range=(60, 62), use_programs=True, programs=[0, 1], special_tokens=["PAD", "BOS", "EOS"]
    )
    tokenizer = miditok.REMI(config)
    grammar = MusicGrammar(tokenizer)
    place = grammar.read([tokenizer[name] for name in ("BOS_None", "Bar_None", "Position_0")])
    for pitch in (60, 61, 62):
        for name in ("Program_0", f"Pitch_{pitch}", "Velocity_63", "Duration_1.0.8"):
            assert grammar.mask(place)[tokenizer[name]]
            place = grammar.read([tokenizer[name]], place)
    assert not grammar.mask(place)[tokenizer["Program_0"]] and grammar.mask(place)[tokenizer["Program_1"]]


def test_nothing_lies_behind_its_bar(tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    grammar = MusicGrammar(tokenizer)
    for metre, positions in (("3/4", 12), ("4/4", 16), ("6/8", 24)):
        place = grammar.read([tokenizer[name] for name in ("BOS_None", "Bar_None", f"TimeSig_{metre}")])
        allowed = [tokenizer[int(index)] for index in grammar.mask(place).nonzero()]
        assert [name for name in allowed if name.startswith("Position")] == [f"Position_{i}" for i in range(positions)]


def test_a_metre_does_not_change_within_its_bar(tmp_path):
    """A shorter one would end the bar before what has been said in it."""
    tokenizer = make_tokenizer(tmp_path)
    names = ["Bar_None", "TimeSig_4/4", "Position_15", f"Tempo_{tokenizer.default_tempo}", "TimeSig_3/4"]
    ids = [tokenizer[name] for name in names]
    assert "TimeSig" in tokenizer.tokens_types_graph["Tempo"]
    grammar = MusicGrammar(tokenizer)
    assert not grammar.mask(grammar.read(ids[:4]))[ids[4]]
    assert grammar.mask(grammar.read([*ids[:4], ids[0]]))[ids[4]], "but in the next bar"


def test_the_first_position_is_where_its_bar_begins(tmp_path):
    """Position 0 is the bar's own time: no note begins a second time there, and the key stays."""
    tokenizer = make_tokenizer(tmp_path)
    names = "Bar_None TimeSig_4/4 KeySig_0:0 Program_0 Pitch_60 Velocity_63 Duration_1.0.4 Position_{} Program_0"
    grammar = MusicGrammar(tokenizer)
    for position, is_free in ((0, False), (1, True)):
        ids = [tokenizer[name] for name in names.format(position).split()]
        note, key = grammar.mask(grammar.read(ids)), grammar.mask(grammar.read(ids[:-1]))
        assert (note[tokenizer["Pitch_60"]], key[tokenizer["KeySig_2:0"]]) == (is_free, is_free)
        assert note[tokenizer["Pitch_62"]]


def test_a_piece_ends_where_a_bar_could_begin_and_after_all_its_bars(tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    names = ["Bar_None", "TimeSig_4/4", "Position_0", "Program_0", "Pitch_60", "Velocity_63", "Duration_1.0.4"]
    end, bar = tokenizer["EOS_None"], tokenizer["Bar_None"]
    for bars, ends, goes_on in ((None, True, True), (1, True, False), (2, False, True)):
        grammar = MusicGrammar(tokenizer, bars)
        ids = [tokenizer[name] for name in names]
        mask = grammar.mask(grammar.read(ids))
        assert (bool(mask[end]), bool(mask[bar])) == (ends, goes_on)
        for cut in range(3, len(ids)):
            assert not grammar.mask(grammar.read(ids[:cut]))[end], "an event that is not whole"
            assert grammar.whole(ids[:cut]) == ids[:2]


def test_what_would_begin_a_bar_too_many_ends_the_piece(tmp_path):
    """The model's chance of another bar is that of the end, so that the last bar is not filled up."""
    tokenizer = make_tokenizer(tmp_path)
    names = "BOS_None Bar_None TimeSig_4/4 Position_0 Program_0 Pitch_60 Velocity_63 Duration_1.0.4".split()
    rows, scores = torch.tensor([[tokenizer[name] for name in names]]), torch.zeros(1, len(tokenizer))
    bar, end = tokenizer["Bar_None"], tokenizer["EOS_None"]
    scores[0, bar], scores[0, end] = 3.0, -1.0
    found = MusicGrammar(tokenizer, bars=1)(rows, scores)
    assert found[0, bar] == -math.inf
    assert float(found[0, end].exp()) == pytest.approx(math.exp(3) + math.exp(-1))
    assert torch.equal(MusicGrammar(tokenizer)(rows, scores)[0, [bar, end]], torch.tensor([3.0, -1.0]))


def test_the_processor_follows_rows_that_change_places(tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    grammar, scores = MusicGrammar(tokenizer), torch.zeros(2, len(tokenizer))
    first = [tokenizer[name] for name in ("BOS_None", "Bar_None", "TimeSig_3/4")]
    other = [tokenizer[name] for name in ("BOS_None", "Bar_None", "TimeSig_6/8")]
    both = grammar(torch.tensor([first, other]), scores)
    assert not torch.equal(both[0], both[1])
    assert torch.equal(grammar(torch.tensor([other, first]), scores), both.flip(0))


def test_tokens_without_bars_are_refused():
    config = miditok.TokenizerConfig(use_programs=True)
    for kind in (miditok.TSD, miditok.CPWord):
        with pytest.raises(ValueError, match=f"{kind.__name__} has compound tokens or none for bars: use REMI"):
            MusicGrammar(kind(config))


@pytest.mark.parametrize("option", ["use_rests", "use_bar_end_tokens", "use_pitch_intervals"])
def test_tokens_of_which_not_each_bar_begins_with_one_are_refused(option):
    tokenizer = miditok.REMI(
        miditok.TokenizerConfig(use_programs=True, special_tokens=["PAD", "BOS", "EOS"], **{option: True})
    )
    with pytest.raises(ValueError, match=f"must have .*{option}=False"):
        MusicGrammar(tokenizer)


# --- writing pieces --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["saved", "joined"])
def test_pieces_have_their_notes_and_pictures(kind, request, tmp_path, capsys):
    scores = generated(request.getfixturevalue(kind), tmp_path / "pieces", "--count", 2, "--bars", 2)
    assert len(scores) == 2
    assert {path.suffix for path in (tmp_path / "pieces").iterdir()} == {".mid", ".png"}
    for i, score in enumerate(scores, start=1):
        check_notes(score)
        picture = plt.imread(tmp_path / "pieces" / f"piece-{i}.png")
        assert picture.shape[0] > 100 and picture.std() > 0.01
    assert "the model remembered 16 tokens" in capsys.readouterr().out


@pytest.mark.slow
def test_the_same_seed_writes_the_same(saved, tmp_path):
    one, same, other = (
        [
            track.notes.numpy()["pitch"].tolist()
            for track in generated(saved, tmp_path / name, "--bars", 2, *seed)[0].tracks
        ]
        for name, seed in (("one", ()), ("same", ()), ("other", ("--seed", 1)))
    )
    assert one == same != other


def test_temperature_0_writes_the_likeliest(saved, tmp_path, capsys):
    options = ("--bars", 1, "--temperature", 0)
    one, other = (generated(saved, tmp_path / seed, *options, "--seed", seed) for seed in ("1", "2"))
    assert one == other
    capsys.readouterr()
    with pytest.raises(SystemExit):
        generate.parse_arguments(["--model", "model", "--output", "pieces", "--temperature", "-1"])
    assert "--temperature: '-1' has to be a number, at least 0, and finite" in capsys.readouterr().err


def test_what_becomes_of_a_tempo_a_metre_and_a_length_is_said(saved, tmp_path, capsys):
    generated(saved, tmp_path / "slow", "--bars", 1, "--tempo", 70)
    assert "The model's tempo that is nearest to 70 is 67.1" in capsys.readouterr().out
    path = write_piece(tmp_path / "odd.mid", 3, bars=2)
    score = symusic.Score(path)
    score.time_signatures[0].numerator = 15
    score.dump_midi(path)
    generated(saved, tmp_path / "odd", "--prompt", path, "--max_tokens", 5)
    said = capsys.readouterr().out
    assert "odd.mid has a time signature that the model lacks" in said
    assert "piece 1 is cut short, as it has no end within --max_tokens 5." in said


def test_what_begins_a_piece_is_asked_for_or_said(tmp_path, capsys):
    tokenizer = make_tokenizer(tmp_path)

    def begin(key: str | None, tempo: float | None) -> list[str]:
        ids = generate.heading(tokenizer, key and generate.key_signature(key), tempo)
        return [tokenizer[index].split("_")[0] for index in ids]

    assert begin(None, None) == [] and capsys.readouterr().out == ""
    assert begin(None, float(tokenizer.tempos[3])) == ["Bar", "TimeSig", "Position", "Tempo"]
    assert capsys.readouterr().out == "The music begins in 4/4, too.\n"
    assert begin("Dm", None) == ["Bar", "TimeSig", "Position", "Tempo", "KeySig"]
    default = f"{tokenizer.default_tempo:g}"
    assert capsys.readouterr().out == f"The music begins in 4/4 at {default} quarter notes a minute, too.\n"
    with pytest.raises(ValueError, match="--tempo 0 is outside the model's"):
        begin(None, 0.0)
    with pytest.raises(SystemExit):
        generate.parse_arguments(["--model", "model", "--output", "pieces", "--prompt", "a.mid", "--tempo", "0"])
    assert "leave them out with --prompt" in capsys.readouterr().err


def test_key_and_tempo_begin_the_piece(saved, tmp_path):
    # As on a fresh machine, not even the folder around it is there.
    [score] = generated(saved, tmp_path / "build" / "pieces", "--bars", 1, "--key", "Bbm", "--tempo", 80)
    assert (score.key_signatures[0].time, score.key_signatures[0].key, score.key_signatures[0].tonality) == (0, -5, 1)
    assert score.tempos[0].time == 0 and abs(score.tempos[0].tempo - 80) < 4


@pytest.mark.parametrize(
    ("name", "sharps", "minor"), [("C", 0, 0), ("F#", 6, 0), ("Cb", 5, 0), ("Am", 0, 1), ("G#m", 5, 1), ("Ebm", 6, 1)]
)
def test_names_of_keys(name, sharps, minor):
    signature = generate.key_signature(name)
    assert (signature.key, signature.tonality) == (sharps, minor)


def test_pieces_and_prompts_begin_in_keys_that_were_learned(tmp_path):
    """Training has one name for keys that sound alike, and every other one is a token that it has never seen."""
    tokenizer = make_tokenizer(tmp_path)
    score = symusic.Score(write_piece(tmp_path / "prompt.mid", 3, bars=1))
    for name, fifths, tonality in (("Ebm", -6, 1), ("Cb", -7, 0), ("C#", 7, 0)):
        score.key_signatures[0].key, score.key_signatures[0].tonality = fifths, tonality
        score.dump_midi(tmp_path / "prompt.mid")
        row = {"path": [str(tmp_path / "prompt.mid")], "semitones": [0]}
        [learned] = {index for index in tokenise_batch(row, tokenizer, "ids", 0, 0)["ids"] if is_key(tokenizer, index)}
        for ids in (
            generate.heading(tokenizer, generate.key_signature(name), None),
            generate.prompt_tokens(tokenizer, tmp_path / "prompt.mid", None),
        ):
            assert [index for index in ids if is_key(tokenizer, index)] == [learned]


def is_key(tokenizer: miditok.REMI, index: int) -> bool:
    return tokenizer[index].startswith("KeySig")


def test_notes_that_are_said_twice_or_begin_anew(tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    note = "Program_0 Pitch_60 Velocity_63 Duration_{}.0.4"
    text = f"Bar_None TimeSig_4/4 Position_0 {note.format(1)} {note.format(3)} Position_8 {note.format(1)}"
    score = generate.to_score(tokenizer, [tokenizer[name] for name in text.split()])
    beat = score.ticks_per_quarter
    assert [(n.time, n.duration) for n in score.tracks[0].notes] == [(0, 2 * beat), (2 * beat, beat)]


@pytest.mark.parametrize("kind", ["saved", "joined"])
def test_a_prompt_is_gone_on_from(kind, request, tmp_path):
    saved = request.getfixturevalue(kind)
    path = write_piece(tmp_path / "prompt.mid", 3, bars=5)
    [score] = generated(saved, tmp_path / "pieces", "--prompt", path, "--prompt_bars", 3, "--bars", 1)
    prompt = symusic.Score(path)
    notes = {}
    for name, music in (("prompt", prompt), ("piece", score)):
        bar = 4 * music.ticks_per_quarter
        notes[name] = {
            (4 * note.time / bar, note.pitch, track.program, track.is_drum)
            for track in music.tracks
            for note in track.notes
            if note.time < 3 * bar
        }
    assert notes["piece"] == notes["prompt"]
    last = max(note.time for track in score.tracks for note in track.notes)
    assert last < 4 * 4 * score.ticks_per_quarter


def test_notes_of_a_prompt_that_the_tokenizer_lacks_are_told(saved, tmp_path, capsys):
    score = symusic.Score(write_piece(tmp_path / "prompt.mid", 3, bars=2))
    assert [track.name for track in score.tracks] == ["melody", "bass", "drums"]
    score.tracks[1].program = 40
    score.dump_midi(tmp_path / "viola.mid")
    generated(saved, tmp_path / "pieces", "--prompt", tmp_path / "viola.mid", "--bars", 1)
    said = capsys.readouterr().out
    assert "viola.mid: 2 of 12 notes are left out, which the model lacks or has already." in said
    del score.tracks[2], score.tracks[0]
    score.dump_midi(tmp_path / "alone.mid")
    with pytest.raises(SystemExit, match="alone.mid cannot be read: the tokenizer has none of its 2 note"):
        generated(saved, tmp_path / "none", "--prompt", tmp_path / "alone.mid", "--bars", 1)
    assert not (tmp_path / "none").exists()


def test_a_prompt_of_more_instruments_than_channels_is_told(tmp_path, capsys):
    score = symusic.Score(480)
    for program in range(16):
        score.tracks.append(symusic.Track("", program))
        score.tracks[-1].notes.append(symusic.Note(0, 480, 60, 80))
    score.dump_midi(tmp_path / "many.mid")
    generate.prompt_tokens(make_midi_tokenizer("remi"), tmp_path / "many.mid", None)
    assert "many.mid has 16 instruments, and MIDI 15 channels: players mix some up." in capsys.readouterr().out


def test_a_long_piece_is_written_in_the_memory_of_the_model(saved, tmp_path, monkeypatch):
    """However long the piece: what decoding keeps is never longer than the memory and the token that is read."""
    kept = []
    original = generate.TransfoXLForCausalLM.forward

    def forward(self, *args, **kwargs):
        outputs = original(self, *args, **kwargs)
        kept.append(max(layer.keys.shape[-2] for layer in outputs.past_key_values.layers))
        return outputs

    monkeypatch.setattr(generate.TransfoXLForCausalLM, "forward", forward)
    [score] = generated(saved, tmp_path / "pieces", "--bars", 20, "--tempo", 40, "--max_tokens", 300)
    assert len(kept) > 200
    assert max(kept) <= 16 + 1 and kept[-1] >= 16
    assert score.to("second").end() > 20


@pytest.mark.slow
def test_a_piece_that_is_cut_off_ends_with_a_whole_event(saved, tmp_path):
    for length in range(20, 24):
        [score] = generated(saved, tmp_path / str(length), "--max_tokens", length)
        check_notes(score)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tempo", "1"], "--tempo 1 is outside the model's 40 to 250"),
        (["--prompt", "none.mid"], "--prompt none.mid cannot be read"),
        (["--wav"], "--wav needs the program fluidsynth: apt install fluidsynth"),
        (["--output", "."], "--output . exists"),
    ],
)
def test_what_cannot_be_written_is_refused_in_one_line(saved, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as refused:
        generate.main(["--model", str(saved), "--output", "pieces", *options])
    assert message in refused.value.code and "\n" not in refused.value.code
    assert list(tmp_path.iterdir()) == []


def test_a_piece_is_not_written_without_memory(saved, tmp_path, capsys):
    """`generate` reads the whole piece for each token then: the longest memory there is, which was called none."""
    with pytest.raises(SystemExit):
        generate.parse_arguments(["--model", "model", "--output", "pieces", "--memory_length", "0"])
    assert "--memory_length must be at least 1" in capsys.readouterr().err
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mem_len": 0}))
    with pytest.raises(SystemExit, match="model has mem_len=0: say by --memory_length how much of a piece"):
        generate.main(["--model", str(folder), "--output", str(tmp_path / "pieces")])
    generated(folder, tmp_path / "pieces", "--memory_length", 8, "--bars", 1)


@pytest.mark.parametrize("key", ["H", "D#", ""])
def test_what_is_no_key_is_refused_before_anything_is_read(capsys, key):
    with pytest.raises(SystemExit):
        generate.parse_arguments(["--model", "model", "--output", "pieces", "--key", key])
    assert f"--key: {key} must be a letter from A to G" in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 12, 33])
def test_a_picture_of_many_instruments_has_all_their_names_and_keeps_its_notes(tmp_path, monkeypatch, count):
    score = symusic.Score(480)
    for i in range(count):
        score.tracks.append(symusic.Track(f"Instrument {i}", i))
        score.tracks[i].notes.append(symusic.Note(480 * i, 480, 40 + i, 80))
    figures = []
    monkeypatch.setattr(generate.plt, "close", figures.append)
    generate.draw(score, tmp_path / "roll.png", "a piece")
    [figure] = figures
    [axes] = figure.axes
    picture, names = figure.bbox, axes.get_legend().get_window_extent()
    assert len({bars.patches[0].get_facecolor() for bars in axes.containers}) == count
    assert picture.y0 <= names.y0 and names.y1 <= picture.y1 and names.x1 <= picture.x1
    assert axes.get_window_extent().height > 0.6 * picture.height


@pytest.mark.parametrize("option", ["--count", "--bars", "--prompt_bars"])
def test_of_no_bars_and_pieces_nothing_is_made(capsys, option):
    with pytest.raises(SystemExit):
        generate.parse_arguments(["--model", "model", "--output", "pieces", "--prompt", "none.mid", option, "0"])
    assert f"{option} must be at least 1" in capsys.readouterr().err


SOUNDS = b"RIFF\4\0\0\0sfbk"


def test_a_recording_is_that_of_fluidsynth(saved, tmp_path, monkeypatch):
    """By a stand-in, which writes down what it was asked for."""
    program = tmp_path / "bin" / "fluidsynth"
    program.parent.mkdir()
    script = '#!/bin/sh\nfor a; do last=$a; [ "$before" = -F ] && out=$a; before=$a; done; echo "$@" > "$out"\n'
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    options = ["--model", str(saved), "--output", str(tmp_path / "pieces"), "--bars", "1", "--wav", "--soundfont"]
    with pytest.raises(SystemExit, match="--soundfont .*none.sf2 does not exist"):
        generate.main([*options, str(tmp_path / "none.sf2")])
    (tmp_path / "text.sf2").write_text("no sounds")
    with pytest.raises(SystemExit, match="--soundfont .*text.sf2 is none: one begins with RIFF and sfbk"):
        generate.main([*options, str(tmp_path / "text.sf2")])
    (tmp_path / "sounds.sf2").write_bytes(SOUNDS)
    # What it says of a soundfont that it could not load; it then plays silence, and ends well.
    program.write_text(f"{script}echo 'fluidsynth: error: Failed to load SoundFont' >&2\n")
    with pytest.raises(SystemExit, match="made no sound of piece-1.mid with .*sounds.sf2: .*Failed to load SoundFont"):
        generate.main([*options, str(tmp_path / "sounds.sf2")])
    program.write_text(script)
    generate.main([*options, str(tmp_path / "sounds.sf2")])
    asked = (tmp_path / "pieces" / "piece-1.wav").read_text().split()
    assert asked[-2] == str(tmp_path / "sounds.sf2") and asked[-1].endswith("piece-1.mid")


# --- what pieces are made of -----------------------------------------------------------------------------------------


def test_measures_of_a_piece_that_is_known(tmp_path):
    score = symusic.Score(480)
    score.time_signatures.append(symusic.TimeSignature(0, 3, 4))
    score.key_signatures.append(symusic.KeySignature(0, 2, 0))
    score.tracks.append(symusic.Track("one", 7))
    # Bars of three quarters in D major: D and F sharp; the same; nothing; a dotted half, A.
    for beat, quarters, pitch in ((0, 1, 62), (1, 2, 66), (3, 1, 62), (4, 2, 66), (9, 3, 69)):
        score.tracks[0].notes.append(symusic.Note(480 * beat, 480 * quarters, pitch, 64))
    score.dump_midi(tmp_path / "a.mid")
    found = measures.measure([tmp_path / "a.mid"])
    assert (found.pieces, found.notes, found.bars, found.empty, found.repeated) == (1, 5, 4, 1, 1)
    assert found.classes == {0: 2, 4: 2, 7: 1} and found.lengths == {1.0: 2, 2.0: 2, 3.0: 1}
    assert found.sounding == {0: 12, 1: 36} and found.pitches == {"7": [62, 66, 62, 66, 69]}
    text = measures.table(found, found)
    assert "| bars without a sound | 25.0 % | 25.0 % |" in text and "| pitch class 3 | 40.0 % | 40.0 % |" in text
    assert "pitch classes 0.0 %, note lengths 0.0 %, notes at once 0.0 %" in text


@pytest.mark.parametrize(("numerator", "denominator", "bars"), [(1, 32, 8), (3, 32, 3), (3, 4, 1)])
def test_bars_may_be_shorter_than_a_sixteenth(tmp_path, numerator, denominator, bars):
    """A sixteenth sounds in two bars of a thirty-second each."""
    score = symusic.Score(480)
    score.time_signatures.append(symusic.TimeSignature(0, numerator, denominator))
    score.tracks.append(symusic.Track("one", 7))
    score.tracks[0].notes.append(symusic.Note(0, 480, 62, 64))
    score.dump_midi(tmp_path / "a.mid")
    found = measures.measure([tmp_path / "a.mid"])
    assert (found.bars, found.empty) == (bars, 0)


def changing_metres() -> symusic.Score:
    """A bar of two quarters, and eight of four, in each a note that lasts through it."""
    score = symusic.Score(480)
    score.time_signatures.append(symusic.TimeSignature(0, 2, 4))
    score.time_signatures.append(symusic.TimeSignature(960, 4, 4))
    score.tracks.append(symusic.Track("a", 0))
    score.tracks[0].notes.append(symusic.Note(0, 960, 60, 80))
    for bar in range(8):
        score.tracks[0].notes.append(symusic.Note(960 + 1920 * bar, 1920, 61 + bar, 80))
    return score


def test_bars_are_those_of_the_metre_that_holds(tmp_path, monkeypatch):
    score = changing_metres()
    assert bar_lines(score).tolist() == [0, *range(960, 960 + 9 * 1920, 1920)]
    changing_metres().dump_midi(tmp_path / "a.mid")
    found = measures.measure([tmp_path / "a.mid"])
    assert (found.bars, found.empty, found.repeated) == (9, 0, 0)
    figures = []
    monkeypatch.setattr(generate.plt, "close", figures.append)
    generate.draw(score, tmp_path / "a.png", "a")
    bars = [(patch.get_x(), patch.get_width()) for patch in figures[0].axes[0].patches]
    np.testing.assert_allclose(bars, [(bar, 0.93) for bar in range(1, 10)], rtol=1e-6)


def test_until_the_first_metre_it_is_four_quarters(tmp_path):
    """As MIDI has it, and MidiTok's tokens."""
    score = symusic.Score(480)
    score.time_signatures.append(symusic.TimeSignature(4 * 1920, 3, 4))
    score.tracks.append(symusic.Track("a", 0))
    score.tracks[0].notes.extend([symusic.Note(480 * beat, 480, 60, 80) for beat in range(28)])
    assert bar_lines(score).tolist() == [*range(0, 4 * 1920, 1920), *range(4 * 1920, 28 * 480 + 1, 1440)]


@pytest.mark.parametrize("says_first", [True, False])
def test_notes_are_counted_from_the_tonic_of_their_own_key(tmp_path, says_first):
    score = symusic.Score(480)
    for time, sharps in ((0, 0), (16 * 480, 2)) if says_first else ((16 * 480, 2),):
        score.key_signatures.append(symusic.KeySignature(time, sharps, 0))
    score.tracks.append(symusic.Track("a", 0))
    pitches = [60] * 16 + [62] * 16
    score.tracks[0].notes.extend([symusic.Note(480 * beat, 480, pitch, 80) for beat, pitch in enumerate(pitches)])
    score.dump_midi(tmp_path / "a.mid")
    assert measures.measure([tmp_path / "a.mid"]).classes == {0: 32}


@pytest.mark.parametrize(("time", "first"), [(640, 0), (1880, 1880), (1930, 1930)])
def test_bars_that_begin_between_two_sixteenths_are_alike_where_they_are(tmp_path, time, first):
    """Behind a metre that is said again within a bar."""
    score = symusic.Score(480)
    score.time_signatures.append(symusic.TimeSignature(0, 4, 4))
    score.time_signatures.append(symusic.TimeSignature(time, 4, 4))
    score.tracks.append(symusic.Track("a", 0))
    for bar in range(8):
        score.tracks[0].notes.append(symusic.Note(time + 1920 * bar, 1920, 60, 80))
    score.dump_midi(tmp_path / "a.mid")
    found = measures.measure([tmp_path / "a.mid"])
    upbeat = len(bar_lines(score)) - 1 - 8
    assert upbeat == (2 if time > 1920 else 1)
    assert (found.bars, found.empty, found.repeated) == (8 + upbeat, upbeat, 7)


def test_a_metre_of_no_length_says_nothing(tmp_path):
    piece = changing_metres()
    piece.dump_midi(tmp_path / "a.mid")
    data = (tmp_path / "a.mid").read_bytes()
    # A half as the unit, 2 to the power of 8.
    broken = data.replace(b"\xff\x58\x04\x02\x02", b"\xff\x58\x04\x02\x08", 1)
    assert broken != data
    (tmp_path / "a.mid").write_bytes(broken)
    assert measures.measure([tmp_path / "a.mid"]).bars == 9


@settings(max_examples=30, deadline=None)
@given(
    metres=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 7), st.sampled_from([2, 4, 8, 16])), max_size=4),
    length=st.integers(1, 9000),
)
def test_bars_follow_one_another_without_a_gap(metres, length):
    """As many as are said to be of each metre, and as many as it takes behind them."""
    score, time, expected = symusic.Score(480), 0, [0]
    for count, numerator, denominator in metres:
        score.time_signatures.append(symusic.TimeSignature(time, numerator, denominator))
        bar = 4 * 480 * numerator // denominator
        expected += [time + bar * i for i in range(1, count + 1)]
        time += count * bar
    bar = bar if metres else 1920
    score.tracks.append(symusic.Track("a", 0))
    score.tracks[0].notes.append(symusic.Note(0, length, 60, 80))
    found = bar_lines(score).tolist()
    while expected[-1] < length:
        expected.append(expected[-1] + bar)
    assert found == [line for before, line in zip([-1, *expected], expected, strict=False) if before < length]


def test_pictures_are_linked_from_where_the_page_is(tmp_path, monkeypatch):
    monkeypatch.setattr(measures, "check_readers", lambda paths: None)
    for folder in ("pieces", "pieces/sub", "corpus"):
        (tmp_path / folder).mkdir()
        write_piece(tmp_path / folder / "piece-1.mid", 0)
    page = tmp_path / "reports" / "README.md"
    measures.main(["--pieces", str(tmp_path / "pieces"), "--corpus", str(tmp_path / "corpus"), "--output", str(page)])
    text = page.read_text()
    assert "](../pieces/piece-1.png)" in text and "](../pieces/sub/piece-1.png)" in text


def test_drums_have_no_pitch_class_and_are_no_piano(tmp_path):
    score = symusic.Score(480)
    for beat, is_drum in ((0, False), (4, True)):
        score.tracks.append(symusic.Track("", 0, is_drum))
        score.tracks[-1].notes.append(symusic.Note(480 * beat, 480, 40, 64))
    score.dump_midi(tmp_path / "a.mid")
    found = measures.measure([tmp_path / "a.mid"])
    assert found.classes == {4: 1} and (found.notes, found.bars, found.repeated) == (2, 2, 0)


def test_broken_files_of_the_corpus_are_named_and_left_out(tmp_path, capsys, monkeypatch):
    """The folder is the one that txl-prepare was given, which leaves them out too."""
    monkeypatch.setattr(measures, "check_readers", lambda paths: None)
    write_piece(tmp_path / "pieces" / "a.mid", 0)
    for seed in (1, 2):
        write_piece(tmp_path / "midi" / "book" / f"{seed}.mid", seed)
    (tmp_path / "midi" / "book" / "torn.mid").write_bytes(b"MThd")
    symusic.Score(480).dump_midi(tmp_path / "midi" / "silent.mid")
    folders = ["--pieces", str(tmp_path / "pieces"), "--corpus", str(tmp_path / "midi")]
    measures.main(folders)
    printed = capsys.readouterr().out
    assert f"2 file(s) of {tmp_path / 'midi'} left out:" in printed
    assert f"  {Path('book', 'torn.mid')}: " in printed and "  silent.mid: it has no notes" in printed
    assert "| pieces, bars, notes | 1, 8, 48 | 2, 16, 96 |" in printed
    for seed in (1, 2):
        (tmp_path / "midi" / "book" / f"{seed}.mid").unlink()
    with pytest.raises(SystemExit, match=r"none of 2 MIDI file\(s\) can be read, for instance .*torn.mid: "):
        measures.main(folders)


# --- from files to files ---------------------------------------------------------------------------------------------


def test_from_midi_files_to_midi_files(tmp_path):
    """Prepared, trained by the recipe's kind of options, and written anew, with what was learned in it."""
    make_tokenizer(tmp_path).save_pretrained(tmp_path / "tokenizer")
    source, data, run = write_folder(tmp_path / "midi", 20, bars=4), tmp_path / "data", tmp_path / "run"
    options = ["--input", source, "--output", data, "--tokenizer", tmp_path / "tokenizer", "--num_proc", 1]
    prepare.main(["--corpus", "midi", "--transpose", "1", *map(str, options)])
    sizes = "--n_layer 2 --d_model 32 --n_head 2 --d_head 16 --d_inner 64 --tgt_len 32 --mem_len 32 --batch_size 8"
    steps = (
        "--max_steps 60 --eval_steps 60 --eval_batch_size 1 --warmup_steps 5 --learning_rate 1e-2 --optimizer adamw"
    )
    (tmp_path / "recipe.yaml").write_text(
        "initial_memory: empty\npre_lnorm: true\nsame_length: false\nclamp_len: -1\n"
    )
    folders = ["--data", str(data), "--output", str(run)]
    command.main([str(tmp_path / "recipe.yaml"), *folders, *sizes.split(), *steps.split()])
    perplexity = json.loads((run / "results.json").read_text())["test"]["perplexity"]
    assert perplexity < len(load_midi_tokenizer(run)) / 10
    [score] = generated(run, tmp_path / "pieces", "--bars", 4, "--temperature", 0.7)
    check_notes(score)
    written = measures.measure([tmp_path / "pieces" / "piece-1.mid"])
    assert set(written.pitches) <= {"0", "32", "drums"}
    assert written.lengths[1.0] / written.notes > 0.5, "it has heard that most notes are quarters"


# --- the chorales as frames ------------------------------------------------------------------------------------------


@pytest.fixture
def chorales(tmp_path):
    """The published file in miniature."""
    frames = [[60, 64, 67], [60, 64, 67, 72], [], [59, 62, 67, 74]]
    splits = {"train": [frames * 8] * 6, "valid": [frames * 2, frames[:3]], "test": [frames[1:] * 3, frames * 2]}
    (tmp_path / "jsb.json").write_text(json.dumps(splits))
    return tmp_path / "jsb.json"


def test_frames_as_symbols(chorales):
    [first, _] = jsb.read_chorales(chorales)["validation"]
    symbols = jsb.write_symbols(first[:3])
    assert symbols == [88 + 1 + 6, 39, 43, 46, 88, 39, 43, 46, 51, 88, 88]
    assert jsb.write_symbols(first[:1], -6) == [88 + 1, 33, 37, 40, 88]


def test_the_training_text_is_whole_chorales_in_all_keys(chorales):
    text, ends = jsb.training_text(jsb.read_chorales(chorales)["train"], 10_000, 0)
    assert len(text) >= 10_000 and ends[-1] == len(text)
    keys = text[[0, *ends[:-1]]] - 89
    assert set(keys) == set(range(12)) and 0.4 < (keys == 6).mean() < 0.7
    assert (text[ends - 1] == jsb.FRAME_END).all()


def test_nats_per_frame_count_every_symbol_of_a_chorale_and_nothing_else(chorales):
    arguments = jsb.parse_arguments(["--data", str(chorales), "--output", "run", "--width", "16", "--layers", "1"])
    torch.manual_seed(0)
    model = jsb.make_model(arguments).eval()
    held_out = jsb.read_chorales(chorales)["test"]
    found = jsb.nats_per_frame(model, held_out, 320)
    sums = []
    for chorale in held_out:
        ids = torch.tensor([jsb.write_symbols(chorale)])
        outputs = model(ids[:, :-1], shift_labels=ids[:, 1:])
        sums.append(outputs.losses.sum().item())
    assert found["frames"] == 9 + 8
    assert found["nats_per_frame"] == pytest.approx(sum(sums) / 17, rel=1e-5)
    assert found["mean_of_chorales"] == pytest.approx((sums[0] / 9 + sums[1] / 8) / 2, rel=1e-5)


@pytest.mark.slow
def test_a_run_on_chorales_learns_and_says_what_memory_is_worth(chorales, tmp_path):
    options = ["--data", str(chorales), "--output", str(tmp_path / "run"), "--width", "32", "--layers", "1"]
    jsb.main([*options, "--steps", "12", "--learning_rate", "1e-2", "--memory", "64"])
    lines = (tmp_path / "run" / "rows.csv").read_text().splitlines()
    rows = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
    assert [(row["split"], int(row["memory_length"])) for row in rows] == [
        (split, length) for split in ("validation", "test") for length in jsb.MEMORIES
    ]
    # Frames of at most five symbols, of which one would be guessed among 101.
    assert all(float(row["nats_per_frame"]) < 0.6 * 5 * math.log(101) for row in rows)
    with pytest.raises(SystemExit, match="exists: go on with --resume"):
        jsb.main(options)


def test_a_run_on_chorales_goes_on_with_its_own_options(chorales, tmp_path):
    given = ["--data", str(chorales), "--output", str(tmp_path / "run"), "--resume"]
    (tmp_path / "run").mkdir()
    begun = jsb.parse_arguments([*given, "--dropout", "0.1"])
    left_out = ("data", "output", "resume", "minutes")
    options = {name: value for name, value in vars(begun).items() if name not in left_out}
    (tmp_path / "run" / "options.json").write_text(json.dumps(options))
    with pytest.raises(
        SystemExit, match="run was begun with other options: dropout was 0.1 and is 0.9; keep to those"
    ):
        jsb.main([*given, "--dropout", "0.9"])


def test_a_run_on_chorales_that_has_no_checkpoint_begins_anew(chorales, tmp_path):
    given = ["--data", str(chorales), "--output", str(tmp_path / "run"), "--width", "32", "--layers", "1"]
    jsb.main([*given, "--steps", "3", "--memory", "64"])
    for path in [*(tmp_path / "run").glob("checkpoint-*"), tmp_path / "run" / "rows.csv"]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    jsb.main([*given, "--steps", "3", "--memory", "64", "--resume"])
    assert "steps_done" in (tmp_path / "run" / "rows.csv").read_text()


def test_chorales_that_are_none_are_refused(tmp_path):
    for text, message in (
        ("[]", "must hold lists of frames"),
        ('{"train": [[[20]]], "valid": [[[60]]], "test": [[[]]]}', "pitch 20"),
        ('{"train": [[[60]]], "valid": [[[104]]], "test": [[[60]]]}', "pitch 104: in all keys.* from 27 to 103"),
        ('{"train": [], "valid": [[[60]]], "test": [[[60]]]}', "no chorale under train"),
        ('{"train": [[[60]]], "valid": [], "test": [[[60]]]}', "no chorale under valid"),
        ('{"train": [[[60]]], "valid": [[[60]]], "test": [[[60]], []]}', "chorale 1 under test has no frame"),
        ('{"train": [[[60.7]]], "valid": [[[60]]], "test": [[[60]]]}', "chorale 0 under train has 60.7 as a pitch"),
        ('{"train": [[["64"]]], "valid": [[[60]]], "test": [[[60]]]}', "chorale 0 under train has '64' as a pitch"),
    ):
        (tmp_path / "jsb.json").write_text(text)
        with pytest.raises(SystemExit, match=message):
            jsb.main(["--data", str(tmp_path / "jsb.json"), "--output", str(tmp_path / "run")])


@pytest.mark.parametrize(
    "option",
    [
        ("--steps", "0"),
        ("--learning_rate", "nan"),
        ("--dropout", "3"),
        ("--memory", "-1"),
        ("--seed", "-1"),
        ("--minutes", "0"),
    ],
)
def test_what_is_refused_begins_no_run_on_chorales(chorales, tmp_path, option, capsys):
    with pytest.raises(SystemExit) as refused:
        jsb.main(["--data", str(chorales), "--output", str(tmp_path / "run"), "--width", "32", *option])
    assert refused.value.code and not (tmp_path / "run").exists()
    assert option[0][2:].replace("-", "_") in (str(refused.value.code) + capsys.readouterr().err).replace("-", "_")


@pytest.mark.slow
def test_chorales_that_are_too_short_begin_no_run(tmp_path):
    (tmp_path / "jsb.json").write_text('{"train": [[[60]]], "valid": [[[60]]], "test": [[[60]]]}')
    with pytest.raises(SystemExit, match="error: .*tokens.*streams"):
        jsb.main(["--data", str(tmp_path / "jsb.json"), "--output", str(tmp_path / "run"), "--width", "8"])
    assert not (tmp_path / "run").exists()


# --- events of several attributes ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    folder = tmp_path_factory.mktemp("events")
    options = ["--tokens", "compound", "--num_proc", "1", "--output", str(folder / "data")]
    prepare.main(["--corpus", "midi", "--input", str(write_folder(folder / "midi", 8, bars=4)), *options])
    return folder / "data"


def compound_model(events, *options: str):
    splits, tokenizer = compound.read_data(events)
    chosen = ["--data", str(events), "--output", "output", "--width", "16", "--layers", "1", *options]
    arguments = compound.parse_arguments([*chosen, "--memory_length", "64", "--segment_length", "16"])
    torch.manual_seed(0)
    return compound.make_model(tokenizer.len, arguments).eval(), splits, tokenizer, arguments


def test_an_attribute_is_told_those_before_it_and_none_after_it(events):
    model, splits, _, _ = compound_model(events)
    piece = splits["train"][None, :20]
    with torch.no_grad():
        states, _ = model.read(piece[:, :-1])
        before = model.losses(states, piece[:, 1:])
        for i, size in enumerate(model.tables):
            changed = piece[:, 1:].clone()
            changed[..., i] = (changed[..., i] + 1) % size.num_embeddings
            differs = model.losses(states, changed) != before
            assert not differs[:i].any() and differs[i + 1 :].all()


def test_the_loss_is_that_of_pieces_read_as_a_whole(events):
    """In segments with memory, or each piece at once, by a softmax written out."""
    model, splits, tokenizer, _ = compound_model(events)
    split = splits["test"]
    ends = compound.piece_ends(split, compound.boundary_tokens(tokenizer)[1])
    assert ends.tolist() == [len(split)]
    with torch.no_grad():
        states, _ = model.read(split[None, :-1])
        expected, told = torch.zeros(len(model.heads)), states[0]
        for i, (table, head) in enumerate(zip(model.tables, model.heads, strict=True)):
            chances = head(model.norm(told)).log_softmax(-1)
            expected[i] = -chances[range(len(split) - 1), split[1:, i]].mean() / math.log(2)
            told = told + table(split[1:, i])
    model.transformer.config.mem_len = 64
    found = compound.score(model, split, ends, 200)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (compound.score(model, split, ends, 0) - expected).abs().max() > 5e-5, "memory counts"


def test_events_are_written_that_midi_tok_finds_no_fault_with(events, tmp_path, capsys):
    sizes = ["--width", "32", "--layers", "1", "--segment_length", "16", "--memory_length", "32", "--batch_size", "4"]
    options = ["--steps", "10", "--pieces", "2", "--bars", "3", *sizes]
    compound.main(["--data", str(events), "--output", str(tmp_path / "run"), *options])
    assert "Pitch" in capsys.readouterr().out
    for path in sorted((tmp_path / "run").glob("piece-?.mid")):
        check_notes(symusic.Score(path))
    model, splits, tokenizer, arguments = compound_model(events, "--bars", "5")
    boundaries = compound.boundary_tokens(tokenizer)
    grammar = compound.EventGrammar(tokenizer, set())
    shapes = {grammar.shape(event) for event in splits["train"].tolist() if event not in boundaries}
    torch.manual_seed(1)
    likeliest = argparse.Namespace(**vars(arguments) | {"temperature": 0.0})
    first, second = (compound.write(model, tokenizer, shapes, likeliest, longest=30) for _ in range(2))
    assert first == second and first
    torch.manual_seed(1)
    written = compound.write(model, tokenizer, shapes, arguments, longest=300)
    assert {grammar.shape(event) for event in written} <= shapes
    assert tokenizer.tokens_errors(TokSequence(ids=written)) == 0
    bar = tokenizer.vocab[1]["Bar_None"]
    assert 0 < sum(event[1] == bar for event in written) <= 5


FAVOURED = ("Family_Note", "Pitch_60", "Program_0")


def test_no_note_is_said_twice_at_one_time(events, tmp_path, capsys, monkeypatch):
    """A model that would say the likeliest note for ever says the others, and comes to the next position."""
    model, splits, tokenizer, arguments = compound_model(events, "--bars", "3")
    boundaries = compound.boundary_tokens(tokenizer)
    grammar = compound.EventGrammar(tokenizer, set())
    shapes = {grammar.shape(event) for event in splits["train"].tolist() if event not in boundaries}
    likeliest = argparse.Namespace(**vars(arguments) | {"temperature": 0.0})
    names = compound.EventGrammar(tokenizer, set()).names
    # Notes, and of these one, are what it likes best.
    with torch.no_grad():
        for head, vocabulary in zip(model.heads, names, strict=True):
            head.weight.zero_(), head.bias.zero_()
            for place, name in enumerate(vocabulary):
                head.bias[place] = name.startswith("Position") + 3 * name.startswith(FAVOURED)
    begun, counts = set(), []
    for event in compound.write(model, tokenizer, shapes, likeliest, longest=400):
        note = tuple(vocabulary[i] for vocabulary, i in zip(names, event, strict=True))
        note = tuple(name for name in note if name.startswith(("Pitch", "Program")))
        if not note:
            counts.append(len(begun))
            begun = set()
            continue
        assert note not in begun
        begun.add(note)
    assert max([*counts, len(begun)]) > 1


def test_events_have_no_more_instruments_than_channels_of_midi(events):
    _, splits, tokenizer, _ = compound_model(events)
    grammar = compound.EventGrammar(tokenizer, set())
    event = next(event for event in splits["train"].tolist() if "Program" in grammar.shape(event))
    program = grammar.shape(event).index("Program")
    grammar.shapes = {grammar.shape(event)}

    def programs() -> set[str]:
        allowed = grammar.allowed(event[:program]).nonzero()
        return {grammar.names[program][int(index)] for index in allowed}

    for i in range(15):
        event[program] = tokenizer.vocab[program][f"Program_{i}"]
        grammar.advance(event)
        assert i == 14 or len(programs()) == 129 - (i + 1), "but not the same note again"
    event[grammar.shape(event).index("Pitch")] -= 1
    assert programs() == {f"Program_{i}" for i in range(-1, 15)}


def test_a_piece_that_is_cut_short_is_told(events, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compound, "LONGEST", 7)
    sizes = ["--width", "8", "--layers", "1", "--segment_length", "16", "--memory_length", "8", "--steps", "1"]
    compound.main(["--data", str(events), "--output", str(tmp_path / "run"), "--bars", "40", *sizes])
    assert "piece 1 is cut short, as 7 events have fewer than --bars 40" in capsys.readouterr().out


def test_plain_tokens_are_refused(tmp_path):
    plain = tmp_path / "plain"
    options = ["--num_proc", "1", "--output", str(plain)]
    prepare.main(["--corpus", "midi", "--input", str(write_folder(tmp_path / "midi", 4)), *options])
    for folder, message in (
        (plain, "has plain tokens, which txl-train trains on"),
        (tmp_path, "is no folder of txl-pr"),
    ):
        with pytest.raises(SystemExit, match=message):
            compound.main(["--data", str(folder), "--output", str(tmp_path / "run")])
