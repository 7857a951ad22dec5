"""The tokenizer: equal to the legacy one, safe with its pickles, the same after saving, at home in transformers."""

import json
import os
import pickle
import subprocess
import sys
import time
import zipfile
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast, pipeline

from txl_hf import TransfoXLConfig, TransfoXLForCausalLM, TransfoXLTokenizer
from txl_hf.tokenization_transfo_xl import MODES, read_vocab_pickle, read_vocab_text

FIXTURES = Path(__file__).parent / "fixtures" / "tokenizer"
DATA = Path(__file__).parents[2] / "shared" / "data"
SENTENCE = "Mr. Smith said: \"It's 1,234.5 km (well-known).\" <unk> didn't <formula> agree ...\n"


def needs(path: str) -> Path:
    if not (DATA / path).exists():
        pytest.skip(f"needs {path} in ../shared/data")
    return DATA / path


@pytest.fixture(scope="module", params=["cased", "lower"])
def golden(request):
    folder = FIXTURES / request.param
    return TransfoXLTokenizer.from_pretrained(folder), json.loads((folder / "expected.json").read_text("utf-8"))


def small(mode: str, **kwargs) -> TransfoXLTokenizer:
    return TransfoXLTokenizer.train_from_iterator([SENTENCE, "the cat 's 5 , the end\n"], mode=mode, **kwargs)


# ---- the legacy tokenizer -------------------------------------------------------------------------------------------


def test_golden_lines_have_equal_symbols_ids_and_text(golden):
    tokenizer, lines = golden
    for line in lines:
        assert tokenizer.tokenize(line["text"]) == line["tokens"], line["text"]
        assert tokenizer(line["text"])["input_ids"] == line["ids"], line["text"]
        assert tokenizer.decode(line["ids"]) == line["decoded"], line["text"]


def test_golden_lines_in_one_batch(golden):
    tokenizer, lines = golden
    assert tokenizer([line["text"] for line in lines])["input_ids"] == [line["ids"] for line in lines]
    assert tokenizer.batch_decode([line["ids"] for line in lines]) == [line["decoded"] for line in lines]


def test_tokenizer_json_alone_is_enough(golden, tmp_path):
    tokenizer, lines = golden
    tokenizer.save_pretrained(tmp_path)
    plain = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert not isinstance(plain, TransfoXLTokenizer)
    assert plain([line["text"] for line in lines])["input_ids"] == [line["ids"] for line in lines]
    assert [plain.decode(line["ids"]) for line in lines] == [line["decoded"] for line in lines]


@pytest.mark.parametrize(
    "text, symbols",
    [
        ("1,234 and 3.14", "1 @,@ 234 and 3 @.@ 14"),
        ("a well-known -x- word--dash", "a well @-@ known -x- word--dash"),
        ("written @-@ and @,@", "written @ - @ and @ , @"),
        ('"Yes", he said. "No."', '" Yes , " he said . " No . "'),
        ("“l’été” – «ça» — et…", '" l \'été " - " ça " - et ...'),
        ("5,,5 a,,5 5,,,5 ,5", "5 , , 5 a , ,5 5 , , ,5 , 5"),
        (",5 starts", ",5 starts"),
        ("Mr. X. met U.S. No. 5 No. six etc. and v3.14. End.", None),
        ("rock'n'roll dogs' 5's 5'clock 'tis", "rock 'n'roll dogs ' 5 's 5'clock ' tis"),
        ("the end.'", "the end . '"),
        ("10\xa0000 1\xa02\xa03", "10 @.@ 000 1 @.@ 2 3"),
        ("so....what a..b", "so .... what a .. b"),
        ("<UNK> stays, <unk> too", "<UNK> stays , <unk> too"),
        ("14'<UNK> <Eos>St. <UNK>,5 a-<UNK> pp.<UNK>", "14'<UNK> <Eos>St . <UNK>,5 a @-@ <UNK> pp.<UNK>"),
        ("control\x01 char\tand\x1fspace", "control char and space"),
    ],
)
def test_moses_rules(text, symbols):
    expected = symbols or "Mr. X. met U.S. No. 5 No. six etc. and v3 @.@ 14. End ."
    assert small("moses").tokenize(text) == expected.split(" ")


@pytest.mark.parametrize(
    "symbols, text",
    [
        ('" Yes , " he said .', '"Yes," he said.'),
        ('\' a \' and " b " and " c', '\'a\' and "b" and "c'),
        ("the dogs ' house ' s", "the dogs' house's"),
        ("costs $ 5 @,@ 000 ( or less )", "costs $5,000 (or less)"),
        ("well @-@ known", "well-known"),
        ("東 京 is", "東京 is"),
        ("she did n't", "she didn't"),
    ],
)
def test_detokenisation(symbols, text):
    symbols = symbols.split(" ")
    tokenizer = TransfoXLTokenizer.from_symbols(list(dict.fromkeys(symbols)))
    assert tokenizer.decode(tokenizer.convert_tokens_to_ids(symbols)) == text
    assert tokenizer.convert_tokens_to_string(symbols) == text


def test_offsets_point_into_the_text():
    text = 'Über 1,234 well-known "naïve" … – <unk> don’t'
    encoding = small("moses")(text, return_offsets_mapping=True)
    spans = [text[start:end] for start, end in encoding["offset_mapping"]]
    assert spans == ["Über", "1", ",", "234", "well", "-", "known", '"', "naïve", '"', "…", "–", "<unk>", "don", "’t"]


@pytest.mark.parametrize(
    "text", ["a" * 50_000 + ".", "a." * 20_000, "," * 20_000 + "5", "'" * 20_000, "1.1. " * 9_000]
)
def test_hostile_lengths_take_no_time(text):
    assert small("moses")(text)["input_ids"]


def test_long_texts_are_decoded_in_no_time():
    tokenizer = small("moses")
    ids = tokenizer(SENTENCE)["input_ids"]
    start = time.process_time()
    text = tokenizer.decode(ids * (30_000 // len(ids)))
    assert time.process_time() - start < 5
    assert text.startswith(tokenizer.decode(ids))


# ---- legacy vocabularies --------------------------------------------------------------------------------------------


def test_legacy_text_vocabulary():
    pickled = TransfoXLTokenizer.from_pretrained(FIXTURES / "cased")
    tokenizer = TransfoXLTokenizer(vocab_file=FIXTURES / "vocab.txt")
    assert tokenizer.symbols == pickled.symbols == read_vocab_text(FIXTURES / "vocab.txt")
    assert tokenizer(SENTENCE)["input_ids"] == pickled(SENTENCE)["input_ids"]


@pytest.mark.parametrize("protocol", range(6))
def test_containers_are_read_at_every_protocol(tmp_path, protocol):
    state = {"idx2sym": ["<unk>", "a"], "counter": Counter("aab"), "sym2idx": OrderedDict(a=1), "d": defaultdict(int)}
    path = tmp_path / "vocab.pkl"
    path.write_bytes(pickle.dumps(state, protocol))
    assert read_vocab_pickle(path) == ["<unk>", "a"]


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


def test_compressed_archives_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "vocab.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**6))
    with pytest.raises(ValueError, match="zip archive"):
        read_vocab_pickle(tmp_path / "vocab.bin")


@given(data=st.one_of(st.binary(max_size=200), st.tuples(st.integers(0, 3000), st.binary(min_size=1, max_size=9))))
@settings(max_examples=300, deadline=None)
def test_300_random_and_damaged_pickles_raise_value_errors_or_load(tmp_path_factory, data):
    if isinstance(data, tuple):
        valid = (FIXTURES / "cased" / "vocab.pkl").read_bytes()[:4000]
        data = valid[: data[0]] + data[1] + valid[data[0] + len(data[1]) :]
    path = tmp_path_factory.mktemp("fuzz") / "vocab.pkl"
    path.write_bytes(data)
    try:
        assert read_vocab_pickle(path)
    except ValueError as error:
        assert "\n" not in str(error)


# ---- modes and vocabularies -----------------------------------------------------------------------------------------


def state_of(tokenizer: TransfoXLTokenizer) -> list:
    streams = [tokenizer.encode_lines([SENTENCE], add_eos).tolist() for add_eos in (None, False)]
    described = [tokenizer.mode, tokenizer.lower_case, tokenizer.symbols, tokenizer.special_tokens_map, len(tokenizer)]
    return [*described, tokenizer(SENTENCE)["input_ids"], *streams, tokenizer.add_eos_token]


def test_saved_tokenizers_give_the_same_ids_in_another_process(tmp_path):
    expected = []
    for mode in MODES:
        for name, options in {"plain": {}, "lower": {"lower_case": True}, "unk": {"unk_token": "<oov>"}}.items():
            tokenizer = small(mode, **options)
            tokenizer.save_pretrained(tmp_path / f"{mode}-{name}")
            expected.append([f"{mode}-{name}", *state_of(tokenizer)])
    script = (
        "import json, sys; from transformers import AutoTokenizer; from test_tokenization import state_of\n"
        "for name in sys.argv[2:]:\n"
        "    print(json.dumps([name, *state_of(AutoTokenizer.from_pretrained(f'{sys.argv[1]}/{name}'))]))"
    )
    command = [sys.executable, "-c", script, str(tmp_path), *(name for name, *_ in expected)]
    output = subprocess.run(command, capture_output=True, check=True, cwd=Path(__file__).parent)
    assert [json.loads(line) for line in output.stdout.splitlines()] == json.loads(json.dumps(expected))


@pytest.mark.parametrize("mode", ["characters", "bytes"])
@given(text=st.text(min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_characters_and_bytes_give_back_every_text(mode, text):
    tokenizer = TransfoXLTokenizer.train_from_iterator([text], mode=mode)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text if mode == "characters" else text.encode())


def test_text8_writes_space_as_underscore_and_enwik8_skips_line_ends():
    characters = TransfoXLTokenizer.from_symbols(["_", "e", "a"], mode="characters")
    assert characters("a e")["input_ids"] == [2, 0, 1]
    assert characters.decode([2, 0, 1]) == "a e"
    numbers = TransfoXLTokenizer.from_symbols(["32", "97"], mode="bytes")
    assert numbers("a\n a")["input_ids"] == [1, 0, 1]
    assert numbers.symbols == ["32", "97"]


def test_one_billion_word_has_its_mark_on_both_sides():
    tokenizer = TransfoXLTokenizer.from_symbols(["<S>", "<UNK>", "the", "cat"], mode="lm1b")
    assert tokenizer("the dog cat")["input_ids"] == [0, 2, 1, 3, 0]
    assert tokenizer.encode_lines(["the cat", "dog"]).tolist() == [0, 2, 3, 0, 0, 1, 0]
    assert tokenizer.encode_lines(["the cat"], add_eos=False).tolist() == [2, 3]


def test_end_of_line_where_asked():
    tokenizer = small("whitespace")
    the, eos = tokenizer.convert_tokens_to_ids(["the", "<eos>"])
    assert tokenizer("the")["input_ids"] == [the]
    assert tokenizer.encode_lines(["the", "", "the"], add_eos=True).tolist() == [the, eos, eos, the, eos]
    assert tokenizer.encode_lines(["the", "the"]).tolist() == [the, the]
    always = small("whitespace", add_eos_token=True)
    assert always(["the", ""])["input_ids"] == [[the, eos], [eos]]
    assert always.encode_lines(["the"]).tolist() == [the, eos]


def test_encode_lines_minds_no_padding_left_by_an_earlier_call():
    tokenizer = small("whitespace")
    tokenizer(["the", "the the the"], padding="max_length", truncation=True, max_length=2)
    assert len(tokenizer.encode_lines(["the the the", "the"])) == 4


def test_training_order_is_by_frequency_then_first_occurrence():
    lines = ["b a c", "a b d <unk>"]
    assert TransfoXLTokenizer.train_from_iterator(lines, "whitespace").symbols == ["<eos>", *"bacd", "<unk>"]
    without = TransfoXLTokenizer.train_from_iterator(lines, "whitespace", min_freq=2)
    assert without.symbols == ["<eos>", "<unk>", "b", "a"]
    largest = TransfoXLTokenizer.train_from_iterator([lines], "whitespace", max_size=3)
    assert largest.symbols == ["<eos>", "<unk>", *"bac"]
    specials = TransfoXLTokenizer.train_from_iterator(lines, "whitespace", extra_special_tokens=["<pad>"])
    assert specials.symbols == ["<eos>", "<pad>", *"bacd", "<unk>"]


def test_train_new_from_iterator_keeps_mode_and_specials():
    tokenizer = small("moses", lower_case=True, add_eos_token=True)
    new = tokenizer.train_new_from_iterator(
        [["One, two. ONE"], ["two-four"]], vocab_size=5, new_special_tokens=["<x>"]
    )
    assert new.symbols == ["<eos>", "<unk>", "<x>", "one", ","]
    assert new("One <x> three")["input_ids"] == [3, 2, 1, 0]


@pytest.mark.parametrize("mode, text", [("characters", "Б"), ("bytes", "Б")])
def test_unknown_symbols_without_unk_are_named(mode, text):
    tokenizer = small(mode)
    named = {"characters": "'Б'", "bytes": "byte 208"}[mode]
    for encode in (tokenizer, lambda text: tokenizer.encode_lines([text])):
        with pytest.raises(ValueError, match=f"{named} is not in the vocabulary.*unk_token"):
            encode(text)
    tokenizer = small(mode, unk_token="<oov>")
    assert tokenizer.symbols[0] == "<oov>" and tokenizer(text)["input_ids"][0] == 0


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: TransfoXLTokenizer(), "needs a vocabulary"),
        (lambda: TransfoXLTokenizer.from_symbols(["a"], mode="words"), "mode='words'.*'moses'"),
        (lambda: TransfoXLTokenizer.from_symbols(["a", "a"]), "'a' occurs 2 times"),
        (lambda: TransfoXLTokenizer.from_symbols([]), "empty"),
        (lambda: TransfoXLTokenizer.from_symbols(["a"], eos_token="</s>"), "'</s>' is not one of the 1 symbols"),
        (lambda: TransfoXLTokenizer.from_symbols(["300"], mode="bytes"), "'300' is no byte"),
        (lambda: TransfoXLTokenizer.from_symbols(["a"], language="fr"), "language='fr'"),
        (lambda: TransfoXLTokenizer.train_from_iterator("text"), "one string"),
        (lambda: TransfoXLTokenizer.train_from_iterator([""]), "nothing to train on"),
        (lambda: TransfoXLTokenizer.train_from_iterator(["a"], max_size=0), "max_size=0"),
        (lambda: small("moses").train_new_from_iterator(["a"], vocab_size=2), "vocab_size=2"),
        (lambda: TransfoXLTokenizer.from_symbols(["a"]).encode_lines(["a"], add_eos=True), "needs an eos_token"),
        (lambda: small("characters").save_vocabulary("."), "cannot hold the symbol"),
    ],
)
def test_errors_say_what_was_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---- with transformers ----------------------------------------------------------------------------------------------


def test_padding_and_truncation():
    tokenizer = small("whitespace")
    batch = tokenizer(["the cat", "the"], padding=True, return_tensors="pt")
    assert batch["attention_mask"].tolist() == [[1, 1], [0, 1]]
    assert set(batch) == {"input_ids", "attention_mask"}
    assert len(tokenizer("the cat 's 5", truncation=True, max_length=2)["input_ids"]) == 2


def test_text_generation_pipeline():
    tokenizer = small("moses")
    sizes = {"d_model": 8, "d_embed": 8, "n_head": 2, "d_head": 4, "d_inner": 8, "n_layer": 1, "mem_len": 4}
    config = TransfoXLConfig(vocab_size=len(tokenizer), cutoffs=[], div_val=1, eos_token_id=0, **sizes)
    generator = pipeline("text-generation", model=TransfoXLForCausalLM(config), tokenizer=tokenizer)
    results = generator(["the cat", "the end of the cat"], max_new_tokens=3, batch_size=2, do_sample=False)
    assert results[0][0]["generated_text"].startswith("the cat")


def test_remote_code_needs_no_package(tmp_path):
    tokenizer = small("moses")
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": [None, "tokenization_transfo_xl.TransfoXLTokenizer"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    source = Path(sys.modules[TransfoXLTokenizer.__module__].__file__)
    (tmp_path / source.name).write_text(source.read_text("utf-8"), "utf-8")
    script = (
        "import json, sys; sys.modules['txl_hf'] = None; from transformers import AutoTokenizer\n"
        "t = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "print(json.dumps([type(t).__name__, t.mode, t.tokenize(sys.argv[2])]))"
    )
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, "-c", script, str(tmp_path), SENTENCE]
    output = subprocess.run(command, capture_output=True, check=True, env=environment).stdout.decode()
    assert json.loads(output.splitlines()[-1]) == ["TransfoXLTokenizer", "moses", tokenizer.tokenize(SENTENCE)]


def test_auto_tokenizer_loads_a_legacy_folder():
    assert isinstance(AutoTokenizer.from_pretrained(FIXTURES / "cased"), TransfoXLTokenizer)


# ---- the originals' vocabularies ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path, size, tokens",
    [("ptb/ptb.train.txt", 10_000, 929_589), ("wikitext-2/wiki.train.tokens", 33_278, 2_088_628)],
    ids=["ptb", "wikitext-2"],
)
def test_vocabulary_and_length_of(path, size, tokens):
    path = needs(path)
    with open(path, encoding="utf-8") as lines:
        tokenizer = TransfoXLTokenizer.train_from_iterator(lines, mode="whitespace")
    words = Counter(path.read_text("utf-8").split())
    assert tokenizer.symbols == ["<eos>", *(word for word, _ in words.most_common())]
    assert len(tokenizer) == size
    assert len(tokenizer.encode_file(path, add_eos=True)) == tokens


NESTED = b"N" + b"\x85" * 200_000  # a tuple in a tuple in a tuple …
DEEP_KEYS = {
    "item": b"}" + NESTED + b"K\x01s.",
    "items": b"}(" + NESTED + b"K\x01u.",
    "dict": b"(" + NESTED + b"K\x01d.",
    "set": b"\x8f(" + NESTED + b"\x90.",
    "frozenset": b"(" + NESTED + b"\x91.",
    "OrderedDict": b"ccollections\nOrderedDict\n((" + NESTED + b"K\x01\x86l\x85R.",
    "Counter": b"ccollections\nCounter\n((" + NESTED + b"K\x01\x86t\x85R.",
}


@pytest.mark.parametrize("program", DEEP_KEYS.values(), ids=DEEP_KEYS)
def test_deep_keys_do_not_overflow_the_stack(tmp_path, program):
    path = tmp_path / "vocab.pkl"
    path.write_bytes(b"\x80\x04" + program)
    with pytest.raises(ValueError, match="tuples for keys"):
        read_vocab_pickle(path)
