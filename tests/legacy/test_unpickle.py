"""Pickles that ask for much: every reader of them refuses in one line, soon, and within a bound of memory."""

import collections
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import bombs
from txl_hf import TransfoXLTokenizer
from txl_hf.legacy.unpickle import UnsafePickleError, load
from txl_hf.legacy.vocabulary import read_vocab_pickle

MIB = 1 << 20


def in_a_process(script, *arguments, timeout=300):
    """Run a script; return what it printed, and the most memory it had in bytes, beyond what PyTorch takes."""
    begin = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); import conftest, torch"
    begin += "\nfrom peak_memory import peak_memory; imported = peak_memory()"
    script = f"{begin}\n{script}\nprint(peak_memory() - imported)"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert result.returncode == 0, result.stderr[-2000:]
    *lines, peak = result.stdout.splitlines()
    return lines, int(peak)


READ_ALL = """
import time
from pathlib import Path
import bombs
from txl_hf.conversion import command_line
from txl_hf.legacy.vocabulary import read_vocab_pickle

def timed(name, read, *arguments):
    begin = time.process_time()
    read(*arguments)
    if time.process_time() - begin > 30:
        print(f"{name} took {time.process_time() - begin:.0f} s")

def vocabulary(path):
    try:
        read_vocab_pickle(path)
        print(f"{path} was read")
    except ValueError as error:
        assert str(path) in str(error) and "\\n" not in str(error) and len(str(error)) < 600, error

def converted(path):
    status = command_line.main(["--from", "kimiyoung-pytorch", "--checkpoint", str(path), "--output", f"{path}.out"])
    assert status == 1

for name, program in bombs.programs(slow=sys.argv[2] == "slow"):
    path = Path(sys.argv[1]) / "vocab.pkl"
    path.write_bytes(program)
    del program
    timed(name, vocabulary, path)
    if name != "empty sets":
        timed(name, converted, path)
"""


@pytest.mark.parametrize("speed", ["quick", pytest.param("slow", marks=pytest.mark.slow)])
def test_bombs_are_refused_soon_and_in_bounded_memory(speed, tmp_path):
    lines, peak = in_a_process(READ_ALL, tmp_path, speed)
    assert lines == []
    assert peak < (608 + 2 * (41 if speed == "slow" else 8)) * MIB


@pytest.mark.parametrize("name", bombs.CHANGES)
def test_nothing_is_set_and_nothing_called(name, tmp_path):
    before = dict(vars(collections.Counter))
    (tmp_path / "vocab.pkl").write_bytes(bombs.CHANGES[name])
    try:
        assert TransfoXLTokenizer.from_pretrained(tmp_path, mode="whitespace", unk_token=None).symbols == ["a"]
    except ValueError as error:
        assert f"{tmp_path / 'vocab.pkl'}: not loaded as a vocabulary: attributes set on" in str(error)
    assert dict(vars(collections.Counter)) == before


def test_a_symbol_that_is_no_text_is_named_by_its_type(tmp_path):
    """In full, the lists would be longer than memory; so would a text that is named as it is."""
    laughs = dict(bombs.programs())["billion laughs"]
    (tmp_path / "vocab.pkl").write_bytes(laughs)
    with pytest.raises(ValueError, match=r"vocab.pkl: a symbol must be a string, not a list\.$"):
        read_vocab_pickle(tmp_path / "vocab.pkl")


def test_control_characters_of_a_name_are_not_repeated(tmp_path):
    (tmp_path / "file.pkl").write_bytes(b"\x80\x04\x8c\x0ba\x1b[2J\x1b]0;b\x07\x8c\x01b\x93.")
    with pytest.raises(UnsafePickleError) as error:
        load(tmp_path / "file.pkl")
    assert str(error.value).isprintable()


@pytest.mark.slow
def test_a_vocabulary_of_a_million_words_is_read(tmp_path):
    """With all that the legacy tokenizer pickled: how often each word occurs, and two ways to its id."""
    words = ["<unk>", *map(str, range(1_000_000))]
    state = {
        "idx2sym": words,
        "sym2idx": dict(zip(words, range(len(words)), strict=True)),
        "counter": collections.Counter(words),
    }
    (tmp_path / "vocab.pkl").write_bytes(pickle.dumps(state, 2))
    assert read_vocab_pickle(tmp_path / "vocab.pkl") == words
