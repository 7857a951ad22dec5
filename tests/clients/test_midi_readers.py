"""music21 and pretty_midi read the MIDI files of this package without a warning and with every note."""

import sys

import miditok
import pytest
import symusic
import torch

import chorales
import generate
import measures
from midi_files import write_piece
from models import small_model
from txl_hf.data.loading import load_midi_tokenizer
from txl_hf.midi.pieces import make_midi_tokenizer, read_score


@pytest.mark.parametrize(
    "make", [lambda: make_midi_tokenizer("remi"), chorales.make_tokenizer], ids=["any", "chorales"]
)
def test_pieces_of_a_model_that_has_learned_nothing(tmp_path, make):
    """Only the grammar makes music of what it says."""
    tokenizer = make()
    torch.manual_seed(0)
    model = small_model(vocab_size=len(tokenizer), cutoffs=[], div_val=1, mem_len=16, tgt_len=8)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    options = ["--output", str(tmp_path / "pieces"), "--count", "2", "--bars", "1"]
    generate.main(["--model", str(tmp_path / "model"), *options])
    paths = measures.midi_files(tmp_path / "pieces")
    assert len(paths) == 2
    measures.check_readers(paths)


def test_a_file_that_is_not_read_whole_is_named(tmp_path):
    path = write_piece(tmp_path / "a.mid", 1)
    measures.check_readers([path])
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="a.mid is not read without complaint"):
        measures.check_readers([path])


def test_chorales_of_the_package(tmp_path, capsys, monkeypatch):
    """Four voices, with the upbeat before the first bar, as tokens that say the same."""
    monkeypatch.setattr(sys, "argv", ["chorales.py"])
    path = next(path for path in chorales.chorale_paths() if path.stem == "bwv253")
    assert chorales.write_chorale(path, tmp_path / "a.mid")
    score = read_score(tmp_path / "a.mid")
    assert [(track.name, track.program) for track in score.tracks] == list(chorales.VOICES.items())
    chorales.make_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_midi_tokenizer(tmp_path)
    back = tokenizer.decode(tokenizer.encode(score))
    assert isinstance(tokenizer, miditok.REMI) and back.note_num() == score.note_num()
    first = min(note.time for track in score.tracks for note in track.notes)
    assert first == 3 * score.ticks_per_quarter, "a quarter before the second bar"
    assert isinstance(score, symusic.core.ScoreTick)
