"""Pickles that would change or call something; and what their vocabularies hold."""

import collections
import copyreg
import os
import pickle

import pytest

from txl_hf import TransfoXLTokenizer
from txl_hf.legacy.unpickle import UnsafePickleError, load
from txl_hf.legacy.vocabulary import read_vocab_pickle

# No attribute is ever set and nothing is called. Python would change its own classes for all, or call `int`.
CHANGES = {
    "attributes of a class": b"ccollections\nCounter\nN}X\x06\x00\x00\x00updatec__builtin__\nint\ns\x86b0",
    "attributes of a dictionary": b"ccollections\nOrderedDict\n)R}X\x03\x00\x00\x00getc__builtin__\nint\nsb0",
    "attributes of attributes": b"ccollections\nOrderedDict\n)R(N}X\x09\x00\x00\x00__class__c__builtin__\nint\nstb0",
    "attributes of a stand-in": b"cargparse\nNamespace\n)R}X\x04\x00\x00\x00nameX\x02\x00\x00\x00ossb0",
}


@pytest.mark.parametrize("name", CHANGES)
def test_nothing_is_set_and_nothing_called(name, tmp_path):
    before = dict(vars(collections.Counter))
    vocabulary = b"}X\x07\x00\x00\x00idx2sym]X\x01\x00\x00\x00aas."
    (tmp_path / "vocab.pkl").write_bytes(b"\x80\x02" + CHANGES[name] + vocabulary)
    try:
        assert TransfoXLTokenizer.from_pretrained(tmp_path, mode="whitespace", unk_token=None).symbols == ["a"]
    except ValueError as error:
        assert f"{tmp_path / 'vocab.pkl'}: not loaded as a vocabulary: vocab.pkl cannot be read" in str(error)
    assert dict(vars(collections.Counter)) == before


def test_codes_that_the_process_gave_to_objects_lead_nowhere(tmp_path):
    """Nothing is read, and they keep their meaning for others."""
    path, codes = tmp_path / "file.pkl", [("os", "system", 0xF0), ("collections", "Counter", 0xF1)]
    programs = [b"\x80\x02\x82\xf0.", b"\x80\x02\x82\xf1."]
    for code in codes:
        copyreg.add_extension(*code)
    try:
        assert [pickle.loads(program) for program in programs] == [os.system, collections.Counter]
        for program in programs:
            path.write_bytes(program)
            with pytest.raises(UnsafePickleError, match="codes for classes .* read it in another process"):
                load(path)
        assert [pickle.loads(program) for program in programs] == [os.system, collections.Counter]
    finally:
        for code in codes:
            copyreg.remove_extension(*code)
    with pytest.raises(UnsafePickleError, match="unregistered extension code"):
        load(path)


def test_a_name_as_long_as_a_file_is_not_repeated(tmp_path):
    (tmp_path / "file.pkl").write_bytes(b"\x80\x02cutils\n" + b"a" * 1_000_000 + b"\n.")
    with pytest.raises(UnsafePickleError, match="it holds utils.aaa") as error:
        load(tmp_path / "file.pkl")
    assert len(str(error.value)) < 300


def test_a_symbol_that_is_no_text_is_named_by_its_type(tmp_path):
    """In full, the lists would be longer than memory; so would a text that is named as it is."""
    laughs = ["a"]
    for _ in range(27):
        laughs = [laughs, laughs]
    (tmp_path / "vocab.pkl").write_bytes(pickle.dumps({"idx2sym": laughs}))
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
