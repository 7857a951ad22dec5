"""A small part of `make fuzz`, from one seed; and that it would notice."""

import pickle
import time

import pytest

import fuzz

COUNTS = {"convert": 12, "unpickle": 150, "models": 15, "tokenizers": 15, "memories": 60, "planted": 4}


@pytest.mark.parametrize("target", fuzz.TARGETS)
@pytest.mark.parametrize("times", [1, pytest.param(25, marks=pytest.mark.slow)], ids=["few", "many"])
@pytest.mark.filterwarnings("ignore:invalid escape sequence")
def test_damaged_and_hostile_files(target, times, tmp_path):
    for case in range(COUNTS[target] * times):
        fuzz.run_case(target, 0, case, tmp_path / "case")


def run(draw, folder):
    pickle.loads(pickle.dumps(fuzz.Hostile(folder / "mark")))


def escape(draw, folder):
    raise KeyError("not for a user")


def advise(draw, folder):
    def load(path):
        raise ValueError("set weights_only=False")

    fuzz.refused(load, folder)


@pytest.mark.parametrize("target, found", [(run, "it did"), (escape, "not for a user"), (advise, "advises")])
def test_what_the_fuzzing_would_notice(target, found, tmp_path, monkeypatch):
    monkeypatch.setitem(fuzz.TARGETS, "broken", target)
    with pytest.raises(Exception, match=found):
        fuzz.run_case("broken", 0, 0, tmp_path / "case")


def test_a_case_is_the_same_again():
    one, other = (fuzz.random.Random("convert 3 5") for _ in range(2))
    assert fuzz.mutate(bytes(1000), one) == fuzz.mutate(bytes(1000), other)


def test_a_process_that_dies_is_reported_and_the_next_case_run(monkeypatch, tmp_path, capfd):
    script = tmp_path / "dies.py"
    script.write_text("import os, sys\nprint('case', sys.argv[-1], flush=True)\nsys.argv[-1] == '0' and os.abort()\n")
    monkeypatch.setattr(fuzz, "__file__", str(script))
    begin = time.monotonic()
    assert not fuzz.watch("convert", 0, 0.2)
    assert time.monotonic() - begin < 15
    out = capfd.readouterr().out
    assert "cases 0 to 0, exit status -6" in out and "cases 1 to 1, exit status 0" in out
