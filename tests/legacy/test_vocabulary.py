"""Legacy vocabularies: text and pickles, read as the legacy tokenizer read them; nothing in a pickle runs."""

import json
import os
import pickle
import subprocess
import zipfile
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from goldens import golden
from peak_memory import bounded_memory
from scripts import run_script
from txl_hf import TransfoXLTokenizer
from txl_hf.legacy.vocabulary import read_vocab_pickle
from txl_hf.transfo_xl.tokenization_transfo_xl_backend import read_vocab_text

GOLDENS = golden("tokenizer")
SENTENCE = "Mr. Smith said: \"It's 1,234.5 km (well-known).\" <unk> didn't <formula> agree ...\n"


def test_legacy_text_vocabulary():
    pickled = TransfoXLTokenizer.from_pretrained(GOLDENS / "cased")
    tokenizer = TransfoXLTokenizer(vocab_file=GOLDENS / "vocab.txt")
    assert tokenizer.symbols == pickled.symbols == read_vocab_text(GOLDENS / "vocab.txt")
    assert tokenizer(SENTENCE)["input_ids"] == pickled(SENTENCE)["input_ids"]


def test_words_that_are_not_ascii_in_python_2s_first_protocol(tmp_path):
    """Which writes a string as Python writes it: the bytes of UTF-8, in quotes, by their numbers."""
    path = tmp_path / "vocab.pkl"
    lines = ["(dp0", "S'idx2sym'", "p1", "(lp2", r"S'Enqu\xc3\xaates'", "p3", 'aS"it\'s\\n"', "p4", "as."]
    path.write_text("\n".join(lines))
    assert read_vocab_pickle(path) == ["Enquêtes", "it's\n"]


def test_a_byte_order_mark_is_no_part_of_the_first_symbol(tmp_path):
    (tmp_path / "vocab.txt").write_text("\ufeff<eos>\nthe\n", encoding="utf-8")
    tokenizer = TransfoXLTokenizer.from_pretrained(tmp_path)
    assert tokenizer.symbols == ["<eos>", "the"] and tokenizer.eos_token_id == 0


def legacy_folder(folder: Path, added: dict[str, int], decoder: bool = False, more=(), **config) -> Path:
    """A vocabulary of five words and more; what was added to it is in a file of its own or in the configuration."""
    config["tokenizer_class"] = "TransfoXLTokenizer"
    if decoder:
        flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
        config["added_tokens_decoder"] = {
            str(index): {"content": token, "special": token.startswith("<"), **flags} for token, index in added.items()
        }
    else:
        (folder / "added_tokens.json").write_text(json.dumps(added))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "vocab.pkl").write_bytes(pickle.dumps({"idx2sym": ["<eos>", "<unk>", "the", "cat", "sat", *more]}))
    return folder


@pytest.mark.parametrize("decoder", [False, True], ids=["added_tokens.json", "added_tokens_decoder"])
@pytest.mark.parametrize(
    "added, ids",
    [
        ({"foo": 5, "<formula>": 6}, [2, 3, 5, 6]),
        ({"<formula>": 5, "foo": 6}, [2, 3, 6, 5]),
        ({"foo": 5}, [2, 3, 5, 6]),
        ({"<pad>": 5, "<unk>": 1, "foo": 6}, [2, 3, 6, 7]),
    ],
    ids=str,
)
def test_tokens_that_were_added_to_a_legacy_vocabulary_keep_their_ids(tmp_path, decoder, added, ids):
    named = {"pad_token": "<pad>"} if "<pad>" in added else {}
    tokenizer = AutoTokenizer.from_pretrained(legacy_folder(tmp_path, added, decoder, **named))
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in added} == added
    assert tokenizer("the cat foo <formula>")["input_ids"] == ids
    assert tokenizer.decode(ids) == "the cat foo <formula>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the cat foo"
    tokenizer.save_pretrained(tmp_path / "new")
    assert AutoTokenizer.from_pretrained(tmp_path / "new")("the cat foo <formula>")["input_ids"] == ids


@pytest.mark.parametrize("decoder", [False, True], ids=["added_tokens.json", "added_tokens_decoder"])
def test_added_tokens_are_no_words_to_the_detokeniser(tmp_path, decoder):
    """The texts are the legacy tokenizer's, which wrote what is between them piece by piece; padding is none."""
    added = {"<formula>": 8, "<pad>": 9, "(foo)": 10, "cat": 3}
    folder = legacy_folder(tmp_path, added, decoder, more=["(", ")", ","], pad_token="<pad>")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for token, text in {
        "the": "the (the), sat",
        "<pad>": "the (<pad>), sat",
        "<formula>": "the ( <formula> ), sat",
        "(foo)": "the ( (foo) ), sat",
        "cat": "the ( cat ), sat",
    }.items():
        assert tokenizer.decode([2, 5, tokenizer.convert_tokens_to_ids(token), 6, 7, 4]) == text


@pytest.mark.parametrize("added, would_get", [({"foo": 9}, 5), ({"the": 5}, 2), ({"foo": -1}, 5)], ids=str)
def test_ids_of_added_tokens_that_cannot_be_kept_are_named(tmp_path, added, would_get):
    [(token, index)] = added.items()
    with pytest.raises(ValueError, match=f"'{token}' has id {index} in added_tokens.json .* would get {would_get}:"):
        AutoTokenizer.from_pretrained(legacy_folder(tmp_path, added))


def test_ids_that_legacy_gave_to_two_symbols_come_with_a_remedy(tmp_path):
    """It numbered the special tokens of a vocabulary that it built itself before there was one."""
    message = "'the' has id 0 in .* would get 2: .*; without that entry in the file, 'the' is 2$"
    with pytest.raises(ValueError, match=message):
        AutoTokenizer.from_pretrained(legacy_folder(tmp_path, {"the": 0}))


@pytest.mark.parametrize("protocol", range(6))
def test_containers_are_read_at_every_protocol(tmp_path, protocol):
    state = {"idx2sym": ["<unk>", "a"], "counter": Counter("aab"), "sym2idx": OrderedDict(a=1), "d": defaultdict(int)}
    path = tmp_path / "vocab.pkl"
    path.write_bytes(pickle.dumps(state, protocol))
    assert read_vocab_pickle(path) == ["<unk>", "a"]


def test_symbols_without_a_list_are_in_the_order_of_their_ids(tmp_path):
    (tmp_path / "vocab.pkl").write_bytes(pickle.dumps({"sym2idx": {"b": 2, "<eos>": 0, "a": 1, "<unk>": 3}}))
    tokenizer = TransfoXLTokenizer.from_pretrained(tmp_path, mode="whitespace")
    assert tokenizer.symbols == ["<eos>", "a", "b", "<unk>"]
    assert tokenizer("a b <eos>")["input_ids"] == [1, 2, 0]


@pytest.mark.parametrize("new_format", [True, False], ids=["zip", "legacy"])
def test_both_formats_of_torch_save(tmp_path, new_format):
    state = {"idx2sym": ["<unk>", "a"], "sym2idx": OrderedDict([("<unk>", 0), ("a", 1)])}
    torch.save(state, tmp_path / "vocab.bin", _use_new_zipfile_serialization=new_format)
    assert TransfoXLTokenizer.from_pretrained(tmp_path).symbols == ["<unk>", "a"]


class Python2Pickler(pickle._Pickler):
    """Writes strings as Python 2 wrote its own: as bytes."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_str(self, text):
        self.write(pickle.SHORT_BINSTRING + bytes([len(text.encode())]) + text.encode())

    dispatch[str] = save_str


@pytest.mark.parametrize("python2", [True, False], ids=["pickled by Python 2", "as published"])
def test_bytes_that_were_taken_for_latin1_are_words_again(tmp_path, python2):
    words = ["<eos>", "<unk>", "'Enquêtes", "–", "Москва"]
    with (tmp_path / "vocab.pkl").open("wb") as file:
        published = [word.encode().decode("latin-1") for word in words]
        pickler = Python2Pickler if python2 else pickle.Pickler
        pickler(file, 2).dump({"idx2sym": words if python2 else published})
    tokenizer = TransfoXLTokenizer.from_pretrained(tmp_path, mode="whitespace")
    assert tokenizer.symbols == words
    assert tokenizer("'Enquêtes – Москва")["input_ids"] == [2, 3, 4]


def test_words_that_are_no_bytes_stay_as_they_are(tmp_path):
    words = ["<eos>", "<unk>", "é", "Ã©"]  # the last could be an é, the one before nothing else
    (tmp_path / "vocab.pkl").write_bytes(pickle.dumps({"idx2sym": words}))
    assert read_vocab_pickle(tmp_path / "vocab.pkl") == words


class Call:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


HOSTILE = {
    "posix.system": Call(os.system, "touch hacked"),
    "builtins.eval": Call(eval, "open('hacked', 'w')"),
    "builtins.getattr": Call(getattr, "x", "upper"),
    "builtins.bytearray": Call(bytearray, 10**10),
    "subprocess.Popen": Call(subprocess.Popen, ["touch", "hacked"]),
    "_pickle.loads": Call(pickle.loads, pickle.dumps(1)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused_by_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("vocab.pkl").write_bytes(pickle.dumps({"idx2sym": ["a"], "extra": HOSTILE[name]}))
    with pytest.raises(ValueError, match=f"vocab.pkl: .*{name}") as error:
        TransfoXLTokenizer.from_pretrained(tmp_path)
    assert "\n" not in str(error.value) and error.value.__cause__ is None
    assert [path.name for path in tmp_path.iterdir()] == ["vocab.pkl"]


def test_names_that_reach_through_a_known_module_are_refused(tmp_path):
    path = tmp_path / "vocab.pkl"
    path.write_bytes(b"\x80\x04\x8c\x02re\x8c\x0denum.sys.exit\x93)R.")
    with pytest.raises(ValueError, match="re.enum.sys.exit"):
        read_vocab_pickle(path)


@pytest.mark.parametrize(
    "data, reason",
    [
        (b"", "EOFError|Ran out|not loaded"),
        (b"hello", "not loaded"),
        (pickle.dumps(["a"]), "holds list"),
        (pickle.dumps({"idx2sym": []}), "empty"),
        (pickle.dumps({"idx2sym": ["a", "a"]}), "'a' occurs 2 times"),
        (pickle.dumps({"idx2sym": [1]}), "must be a string"),
        *(
            (pickle.dumps({"sym2idx": dict(zip("ab", ids, strict=True))}), "does not number its 2 symbols from 0 on")
            for ids in [(0, 2), (1, 2), (0, 0), (0, True), (0, "1"), (0, [])]
        ),
        (pickle.dumps({"sym2idx": {}}), "empty"),
        (pickle.dumps({"model": 1}), r"\['model'\]"),
        (b"r\xff\xff\xff\x7f.", "not loaded"),
        (b"P\x2e", "outside itself|not loaded"),
    ],
)
def test_what_is_no_vocabulary_is_said(tmp_path, data, reason):
    path = tmp_path / "vocab.pkl"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=reason) as error:
        read_vocab_pickle(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("read", [read_vocab_pickle, lambda path: TransfoXLTokenizer.from_symbols(["a", "\ud800b"])])
def test_a_symbol_that_no_file_can_hold_is_named(tmp_path, read):
    (tmp_path / "vocab.pkl").write_bytes(b"\x80\x02}U\x07idx2sym](U\x01aX\x04\x00\x00\x00\xed\xa0\x80bes.")
    with pytest.raises(ValueError, match=r"the symbol '\\ud800b' has half a character, which UTF-8 cannot hold"):
        read(tmp_path / "vocab.pkl")


def test_compressed_archives_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "vocab.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**6))
    with pytest.raises(ValueError, match="zip archive"):
        read_vocab_pickle(tmp_path / "vocab.bin")


@given(data=st.one_of(st.binary(max_size=200), st.tuples(st.integers(0, 3000), st.binary(min_size=1, max_size=9))))
@settings(max_examples=300, deadline=None)
def test_300_random_and_damaged_pickles_raise_value_errors_or_load(tmp_path_factory, data):
    if isinstance(data, tuple):
        valid = (GOLDENS / "cased" / "vocab.pkl").read_bytes()[:4000]
        data = valid[: data[0]] + data[1] + valid[data[0] + len(data[1]) :]
    path = tmp_path_factory.mktemp("fuzz") / "vocab.pkl"
    path.write_bytes(data)
    with bounded_memory(1 << 28):
        try:
            assert read_vocab_pickle(path)
        except ValueError as error:
            assert "\n" not in str(error)


def test_the_code_beside_a_model_reads_no_pickle_without_the_package(tmp_path):
    TransfoXLTokenizer.from_symbols(["<eos>", "<unk>", "a"]).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.pkl").write_bytes(pickle.dumps({"idx2sym": ["<eos>", "<unk>", "a"]}))
    script = (
        "import sys; sys.modules['txl_hf'] = None\n"
        "from transformers import AutoTokenizer\n"
        "AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)"
    )
    process = run_script("-c", script, tmp_path, only_torch=True, HF_HOME=str(tmp_path / "home"))
    assert "vocab.pkl is a pickle, which the code beside a model does not read: pip install txl-hf" in process.stderr
    assert AutoTokenizer.from_pretrained(tmp_path).symbols == ["<eos>", "<unk>", "a"]
