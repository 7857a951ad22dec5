"""The tokenizer: equal to the legacy one, safe with its pickles, the same after saving, at home in transformers."""

import hashlib
import json
import pickle
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, TextStreamer, pipeline
from transformers.utils import logging

from goldens import golden
from scripts import run_script
from txl_hf import (
    TransfoXLConfig,
    TransfoXLForCausalLM,
    TransfoXLForSequenceClassification,
    TransfoXLTokenizer,
)
from txl_hf.data.texts import encode_text
from txl_hf.transfo_xl import tokenization_transfo_xl_moses
from txl_hf.transfo_xl.tokenization_transfo_xl_backend import LINE_END_MODES, MODES

GOLDENS = golden("tokenizer")
DATA = Path(__file__).parents[3] / "shared" / "data"
SENTENCE = "Mr. Smith said: \"It's 1,234.5 km (well-known).\" <unk> didn't <formula> agree ...\n"


def needs(path: str) -> Path:
    if not (DATA / path).exists():
        pytest.skip(f"needs {path} in ../shared/data")
    return DATA / path


@pytest.fixture(scope="module", params=["cased", "lower"])
def legacy(request):
    folder = GOLDENS / request.param
    return TransfoXLTokenizer.from_pretrained(folder), json.loads((folder / "expected.json").read_text("utf-8"))


def small(mode: str, **kwargs) -> TransfoXLTokenizer:
    return TransfoXLTokenizer.train_from_iterator([SENTENCE, "the cat 's 5 , the end\n"], mode=mode, **kwargs)


# ---- the legacy tokenizer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), [("mode", "whitespace"), ("lower_case", True)])
def test_steps_are_not_changed_by_an_assignment(name, value):
    """Which changed nothing but what was saved: a folder that claimed other steps than it held."""
    tokenizer = TransfoXLTokenizer.from_symbols(["<eos>", "<unk>", "the"], mode="moses")
    before = getattr(tokenizer, name)
    with pytest.raises(AttributeError, match=f"{name}.* has no setter"):
        setattr(tokenizer, name, value)
    assert getattr(tokenizer, name) == before


def test_golden_lines_have_equal_symbols_ids_and_text(legacy):
    tokenizer, lines = legacy
    for line in lines:
        assert tokenizer.tokenize(line["text"]) == line["tokens"], line["text"]
        assert tokenizer(line["text"])["input_ids"] == line["ids"], line["text"]
        assert tokenizer.decode(line["ids"]) == line["decoded"], line["text"]


def test_golden_lines_in_one_batch(legacy):
    tokenizer, lines = legacy
    assert tokenizer([line["text"] for line in lines])["input_ids"] == [line["ids"] for line in lines]
    assert tokenizer.batch_decode([line["ids"] for line in lines]) == [line["decoded"] for line in lines]


@pytest.mark.parametrize(
    "name, count, digest",
    [
        ("_A", 10_348, "bf8c98467ed595a1"),
        ("_D", 423, "f7a93f0db248f687"),
        ("_L", 2_253, "019683dff4a32df0"),
        ("_CURRENCY", 52, "64770105d4a72e41"),
    ],
)
def test_classes_of_characters_are_those_of_the_tables_of_moses(name, count, digest):
    """As they were listed, range by range."""
    members = pre_tokenizers.Split(Regex(f"[{getattr(tokenization_transfo_xl_moses, name)}]"), "removed", invert=True)
    text = "".join(chr(code) for code in range(0x30000) if not 0xD800 <= code < 0xE000)
    found = sorted(ord(character) for character, _ in members.pre_tokenize_str(text))
    assert (len(found), hashlib.sha256(str(found).encode()).hexdigest()[:16]) == (count, digest)


def test_tokenizer_json_alone_is_enough(legacy, tmp_path):
    tokenizer, lines = legacy
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


MIXED = st.lists(
    st.sampled_from([*"aA5.,'-<> \n", "zz", "Zoë", "the ", "cat", "<eos>", "<unk>", "<EOS>", "<a>", "New", "…"]),
    max_size=9,
)


@pytest.mark.parametrize("options", [{}, {"lower_case": True, "add_bos_token": True}, {"line_ends": True}], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_symbols_of_a_text_are_those_that_a_call_encodes(mode, options):
    """And what the vocabulary lacks is shown as it is written."""
    if "line_ends" in options and mode not in LINE_END_MODES:
        return
    options = {"unk_token": "<unk>", "eos_token": "<eos>", "bos_token": "<s>", **options}
    tokenizer = small(mode, **options)
    tokenizer.add_tokens([AddedToken("<a>", lstrip=True), AddedToken("cat", single_word=True), "New"])

    @given(text=MIXED.map("".join), pair=st.none() | MIXED.map("".join))
    @settings(max_examples=60, deadline=None)
    def check(text, pair):
        for extra in (
            {"add_special_tokens": True},
            {"add_special_tokens": False},
            {"add_special_tokens": False, "split_special_tokens": True},
            {"add_special_tokens": True, "truncation": True, "max_length": 4},
        ):
            symbols = tokenizer.tokenize(text, pair, **extra)
            encoded = tokenizer(text, pair, **extra)
            ids = encoded["input_ids"]
            assert tokenizer.convert_tokens_to_ids(symbols) == ids
            unknown = [symbol for symbol, index in zip(symbols, ids, strict=True) if index == tokenizer.unk_token_id]
            assert not {*unknown} & ({*tokenizer.get_vocab()} - {"<unk>"})

    check()


def test_unknown_symbols_are_shown_as_the_steps_leave_them():
    tokenizer = small("moses", lower_case=True)
    assert tokenizer.tokenize("Dogs’ 7,8 …") == ["dogs", "'", "7", "@,@", "8", "..."]
    assert small("characters").tokenize("Бa") == ["Б", "a"]
    tokenizer.add_tokens([AddedToken("dog", single_word=True)])
    assert tokenizer.tokenize("hotdog dog <unk>") == ["hotdog", "dog", "<unk>"]


def test_offsets_point_into_the_text():
    text = 'Über 1,234 well-known "naïve" … – <unk> don’t'
    encoding = small("moses")(text, return_offsets_mapping=True)
    spans = [text[start:end] for start, end in encoding["offset_mapping"]]
    assert spans == ["Über", "1", ",", "234", "well", "-", "known", '"', "naïve", '"', "…", "–", "<unk>", "don", "’t"]


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
    process = run_script("-c", script, tmp_path, *(name for name, *_ in expected))
    assert process.returncode == 0, process.stderr
    assert [json.loads(line) for line in process.stdout.splitlines()] == json.loads(json.dumps(expected))


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


@pytest.mark.parametrize(
    "mode, symbols, text", [("characters", ["_", "e", "a"], "a e"), ("bytes", ["32", "97", "98"], "a a")]
)
def test_a_published_alphabet_is_read_as_such_from_any_file(tmp_path, mode, symbols, text):
    given = TransfoXLTokenizer.from_symbols(symbols, mode=mode)
    [path] = given.save_vocabulary(tmp_path)
    (tmp_path / "legacy").mkdir()
    (tmp_path / "legacy" / "vocab.pkl").write_bytes(pickle.dumps({"idx2sym": symbols}))
    pickled = TransfoXLTokenizer.from_pretrained(tmp_path / "legacy", mode=mode)
    for tokenizer in (TransfoXLTokenizer(vocab_file=path, mode=mode), pickled):
        assert tokenizer.symbols == symbols
        assert tokenizer(text + "\n" * (mode == "bytes"))["input_ids"] == given(text)["input_ids"]
        assert tokenizer.decode(given(text)["input_ids"]) == text


def test_one_billion_word_has_its_mark_on_both_sides():
    tokenizer = TransfoXLTokenizer.from_symbols(["<S>", "<UNK>", "the", "cat"], mode="lm1b")
    assert tokenizer("the dog cat")["input_ids"] == [0, 2, 1, 3, 0]
    assert tokenizer.encode_lines(["the cat", "dog"]).tolist() == [0, 2, 3, 0, 0, 1, 0]
    assert tokenizer.encode_lines(["the cat"], add_eos=False).tolist() == [2, 3]


def test_a_line_begins_with_the_beginning_of_a_text():
    symbols = ["<s>", "</s>", "<UNK>", "the"]
    options = {"mode": "lm1b", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = TransfoXLTokenizer.from_symbols(symbols, **options)
    assert tokenizer("the")["input_ids"] == tokenizer.encode_lines(["the"]).tolist() == [0, 3, 1]
    ending = TransfoXLTokenizer.from_symbols(symbols, add_bos_token=False, **options)
    assert ending("the")["input_ids"] == ending.encode_lines(["the"]).tolist() == [3, 1]
    assert ending.encode_lines(["the"], add_eos=True).tolist() == [0, 3, 1]
    assert ending.encode_lines(["the"], add_eos=False).tolist() == [3]


@pytest.mark.parametrize("mode", ["lm1b", "whitespace"])
def test_what_is_not_said_of_the_beginning_of_texts_is_as_it_was_saved(tmp_path, mode):
    said = {"mode": mode, "bos_token": "<s>"}
    saved = TransfoXLTokenizer.from_symbols(["<s>", "<eos>", "the"], **said, add_bos_token=None, add_eos_token=True)
    assert saved("the")["input_ids"] == ([0, 2, 1] if mode == "lm1b" else [2, 1])
    saved.add_bos_token = True
    saved.save_pretrained(tmp_path)
    for read in (
        TransfoXLTokenizer(tokenizer_object=saved.backend_tokenizer, **said, add_bos_token=None),
        AutoTokenizer.from_pretrained(tmp_path, add_bos_token=None),
    ):
        assert (read.add_bos_token, read.add_eos_token, read("the")["input_ids"]) == (True, True, [0, 2, 1])


def test_end_of_line_where_asked():
    tokenizer = small("whitespace")
    the, eos = tokenizer.convert_tokens_to_ids(["the", "<eos>"])
    assert tokenizer("the")["input_ids"] == [the]
    assert tokenizer.encode_lines(["the", "", "the"], add_eos=True).tolist() == [the, eos, eos, the, eos]
    assert tokenizer.encode_lines(["the", "the"]).tolist() == [the, the]
    always = small("whitespace", add_eos_token=True)
    assert always(["the", ""])["input_ids"] == [[the, eos], [eos]]
    assert always.encode_lines(["the"]).tolist() == [the, eos]


LINE = st.lists(
    st.sampled_from([*"aA5.,'-\"`…<@ \xa0\u3000\x1c", "'s", "No.", "etc.", "<unk>", "<UNK>", ". ", "b"]), max_size=12
)


@pytest.mark.parametrize("lower_case", [False, True])
@pytest.mark.parametrize("mode", ["moses", "whitespace"])
def test_a_call_reads_line_ends_as_the_evaluation_does(mode, lower_case):
    tokenizer = small(mode, lower_case=lower_case, line_ends=True)
    dropping = small(mode, lower_case=lower_case)

    @given(lines=st.lists(LINE.map("".join), min_size=1, max_size=4))
    @settings(max_examples=100, deadline=None)
    def check(lines):
        ids = [index for line in lines for index in dropping.encode_lines([line], add_eos=True)]
        text = "".join(f"{line}\n" for line in lines)
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.encode_lines(f"{line}\n" for line in lines).tolist() == ids
        assert tokenizer.encode_lines(lines).tolist() == ids
        assert dropping(text)["input_ids"] == dropping(text.replace("\n", " "))["input_ids"]

    check()


@pytest.mark.parametrize("mode", ["moses", "whitespace"])
def test_line_ends_are_written_as_line_feeds_where_special_tokens_are_skipped(mode):
    """Unless texts are padded with what ends a line."""
    tokenizer = small(mode, line_ends=True, pad_token="<unk>")
    text = "\nthe cat\n\nthe cat the\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.batch_decode([ids, ids[:3], []], skip_special_tokens=True) == [text, "\nthe cat", ""]
    assert tokenizer.decode(tokenizer.eos_token_id, skip_special_tokens=True) == "\n"
    assert tokenizer.decode(np.array(ids), skip_special_tokens=True) == text
    assert tokenizer.decode(ids).count("<eos>") == 4 and "\n" not in tokenizer.decode(ids)
    padded = small(mode, line_ends=True, pad_token="<eos>")
    assert padded.decode(ids, skip_special_tokens=True) == "the cat the cat the"


def test_line_ends_are_saved_and_can_be_chosen_on_loading(tmp_path):
    small("moses", line_ends=True).save_pretrained(tmp_path / "with")
    small("moses").save_pretrained(tmp_path / "without")
    ids = {}
    for folder in ("with", "without"):
        for choice in (None, True, False):
            tokenizer = AutoTokenizer.from_pretrained(tmp_path / folder, line_ends=choice)
            assert tokenizer.line_ends == (folder == "with" if choice is None else choice)
            ids[folder, choice] = tokenizer("the cat\nthe end")["input_ids"]
    assert ids["with", None] == ids["with", True] == ids["without", True]
    assert ids["without", None] == ids["without", False] == ids["with", False]
    with pytest.raises(
        ValueError, match="line_ends=True needs an eos_token among the symbols, which .*'<new>' is not"
    ):
        TransfoXLTokenizer.from_pretrained(tmp_path / "without", eos_token="<new>", line_ends=True)
    plain = PreTrainedTokenizerFast.from_pretrained(tmp_path / "with")
    assert plain("the cat\nthe end")["input_ids"] == ids["with", True]
    the, cat, end, eos = tokenizer.convert_tokens_to_ids(["the", "cat", "end", "<eos>"])
    assert ids["with", True] == [the, cat, eos, the, end]


@pytest.mark.parametrize("mode, end", [("whitespace", "dog"), ("moses", "<end>")])
def test_lines_end_as_was_chosen_whatever_the_eos_is_later(tmp_path, mode, end):
    """In calls and `encode_lines` alike."""
    symbols = ["<eos>", "<unk>", "the", "cat", end]
    TransfoXLTokenizer.from_symbols(symbols, mode=mode, line_ends=True).save_pretrained(tmp_path)
    assigned = TransfoXLTokenizer.from_pretrained(tmp_path)
    assigned.eos_token = end
    numbered = TransfoXLTokenizer.from_pretrained(tmp_path)
    numbered.eos_token_id = 4
    others = [AutoTokenizer.from_pretrained(tmp_path, eos_token=other) for other in (end, "<new>", None)]
    chosen = AutoTokenizer.from_pretrained(tmp_path, eos_token=end, line_ends=True)
    for tokenizer in (assigned, numbered, *others, chosen):
        eos = 4 if tokenizer is chosen else 0
        assert tokenizer.line_ends
        assert tokenizer("the\ncat\n")["input_ids"] == [2, eos, 3, eos]
        assert tokenizer.encode_lines(["the\n", "cat\n"]).tolist() == [2, eos, 3, eos]
        assert encode_text(tokenizer, "the\ncat\n").tolist() == [2, eos, 3, eos]
    assert {tokenizer.eos_token for tokenizer in (assigned, numbered, chosen)} == {end}
    without = AutoTokenizer.from_pretrained(tmp_path, eos_token=end, line_ends=False)
    assert not without.line_ends and without("the\ncat\n")["input_ids"] == [2, 3]


def test_a_tokenizer_that_is_made_from_the_backend_of_another_leaves_it_as_it_was():
    given = small("whitespace").backend_tokenizer
    before = given.to_str()
    others = {"line_ends": True, "unk_token": None, "mask_token": "<m>", "add_eos_token": True}
    made = TransfoXLTokenizer(tokenizer_object=given, mode="whitespace", **others)
    assert given.to_str() == before
    assert made("the\n<m>").tokens() == ["the", "<eos>", "<m>", "<eos>"] and made.unk_token is None


def test_batches_of_any_kind_are_read():
    lines = ["the cat\n", "the end\n"]
    batches = (lines, [lines], [tuple(lines)], iter([np.array(lines)]), ((line for line in lines) for _ in range(1)))
    trained = [TransfoXLTokenizer.train_from_iterator(given, mode="whitespace").symbols for given in batches]
    assert all(symbols == ["<eos>", "<unk>", "the", "cat", "end"] for symbols in trained)


def test_tokenize_takes_one_text():
    with pytest.raises(ValueError, match="text is a list, not a string"):
        small("whitespace").tokenize(["the", "cat"])


def test_keywords_of_transformers_are_known():
    tokenizer = TransfoXLTokenizer.from_symbols(["a"], mode="whitespace", max_len=7, processor_class="Processor")
    assert tokenizer.model_max_length == 7


def test_line_ends_are_not_assigned():
    """Which changed `encode_lines` and no call."""
    with pytest.raises(AttributeError, match="line_ends"):
        small("whitespace").line_ends = True


def test_what_is_saved_says_nothing_of_where_it_was_loaded_from(tmp_path):
    small("moses").save_pretrained(tmp_path / "new")
    AutoTokenizer.from_pretrained(tmp_path / "new").save_pretrained(tmp_path / "again")
    saved = [json.loads((tmp_path / name / "tokenizer_config.json").read_text()) for name in ("new", "again")]
    assert saved[0] == saved[1]
    assert not {"is_local", "local_files_only"} & set(saved[1])


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


@pytest.mark.parametrize("special", ["<pad>", "<unk>", "<eos>"])
def test_words_with_special_tokens_in_other_letters_are_counted_as_they_are_cut(special):
    text = f"St.{special.upper()}, 14'{special.upper()}"
    for options in ({"pad_token": "<pad>"}, {"unk_token": None, "eos_token": None}):
        tokenizer = TransfoXLTokenizer.train_from_iterator([text], **options)
        assert set(tokenizer.tokenize(text)) <= set(tokenizer.symbols)


def test_special_tokens_with_names_are_symbols_and_their_names_are_none(tmp_path):
    named = {"extra_special_tokens": {"image_token": "<img>"}}
    trained = TransfoXLTokenizer.train_from_iterator(["a b a"], mode="whitespace", **named)
    assert trained.symbols == ["<eos>", "<unk>", "<img>", "a", "b"]
    (tmp_path / "vocab.txt").write_text("".join(f"{symbol}\n" for symbol in trained.symbols))
    read = TransfoXLTokenizer(vocab_file=tmp_path / "vocab.txt", **named)
    for tokenizer in (trained, TransfoXLTokenizer.from_symbols(trained.symbols, **named), read):
        assert tokenizer.image_token == "<img>" and tokenizer.image_token_id == 2
        assert tokenizer("a <img> b")["input_ids"] == [3, 2, 4]
        assert len(tokenizer) == 5


def test_train_new_from_iterator_keeps_mode_and_specials():
    tokenizer = small("moses", lower_case=True, add_eos_token=True)
    new = tokenizer.train_new_from_iterator(
        [["One, two. ONE"], ["two-four"]], vocab_size=5, new_special_tokens=["<x>"]
    )
    assert new.symbols == ["<eos>", "<unk>", "<x>", "one", ","]
    assert new("One <x> three")["input_ids"] == [3, 2, 1, 0]


def test_vocab_size_counts_special_tokens_once():
    """Those that the text has, too."""
    for size in (3, 4, 5, 7):
        lines = ["a b c <unk> <unk> d e f g"]
        trained = TransfoXLTokenizer.train_from_iterator(lines, mode="whitespace", vocab_size=size)
        assert trained.symbols == ["<eos>", "<unk>", *"abcdefg"[: size - 2]]
        assert trained.train_new_from_iterator(lines, vocab_size=size).symbols == trained.symbols


@pytest.mark.parametrize("mode", ["whitespace", "lm1b"])
@pytest.mark.parametrize("begins", [False, True])
def test_train_new_from_iterator_keeps_how_texts_begin(mode, begins):
    tokenizer = small(mode, bos_token="<s>", add_bos_token=begins)
    new = tokenizer.train_new_from_iterator(["x y"])
    for each in (tokenizer, new):
        assert each.add_bos_token == begins
        assert (each.bos_token_id in each("x y")["input_ids"]) == begins


def test_train_new_from_iterator_takes_what_is_to_be_another():
    new = small("whitespace").train_new_from_iterator(
        ["Ab-c"], mode="moses", lower_case=True, eos_token="<end>", min_freq=1, show_progress=False
    )
    assert (new.mode, new.lower_case, new.eos_token) == ("moses", True, "<end>")
    assert new.tokenize("AB-C") == ["ab", "@-@", "c"]


def test_train_new_from_iterator_keeps_named_and_added_specials(tmp_path):
    named = {"image_token": "<img>", "sound_token": "<snd>"}
    tokenizer = small("whitespace", extra_special_tokens=named, mask_token="<mask>")
    tokenizer.add_tokens(["<a>"], special_tokens=True)
    new = tokenizer.train_new_from_iterator(["dog ran"], special_tokens_map={"<snd>": "<noise>"})
    new.save_pretrained(tmp_path)
    for kept in (new, AutoTokenizer.from_pretrained(tmp_path)):
        assert kept.tokenize("dog <img> <noise> <mask> <a> ran") == ["dog", "<img>", "<noise>", "<mask>", "<a>", "ran"]
        assert kept.unk_token_id not in kept("<img> <noise> <mask> <a>")["input_ids"]
        assert (kept.image_token, kept.sound_token, kept.mask_token) == ("<img>", "<noise>", "<mask>")
        assert len(kept) == len(new.symbols) == 8


def test_train_new_from_iterator_keeps_what_is_said_of_calls_and_chats(tmp_path):
    settings = {
        "chat_template": "{{ messages[0].content }}",
        "padding_side": "right",
        "truncation_side": "left",
        "model_max_length": 7,
    }
    new = small("whitespace", **settings).train_new_from_iterator(["a b"])
    new.save_pretrained(tmp_path)
    for tokenizer in (new, AutoTokenizer.from_pretrained(tmp_path)):
        assert {name: getattr(tokenizer, name) for name in settings} == settings
    assert new.apply_chat_template([{"role": "user", "content": "b a"}], tokenize=False) == "b a"
    other = new.train_new_from_iterator(["a b"], model_max_length=9)
    assert other.model_max_length == 9 and other.padding_side == "right"
    assert small("whitespace").train_new_from_iterator(["a b"]).chat_template is None


@pytest.mark.parametrize("mode, text", [("characters", "Б"), ("bytes", "Б")])
def test_unknown_symbols_without_unk_are_named(mode, text):
    tokenizer = small(mode)
    named = {"characters": "'Б'", "bytes": "byte 208"}[mode]
    for encode in (tokenizer, lambda text: tokenizer.encode_lines([text])):
        with pytest.raises(ValueError, match=f"{named} is not in the vocabulary.*unk_token.*--corpus text"):
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
        (lambda: TransfoXLTokenizer.from_pretrained(GOLDENS / "cased", language="fr"), "language='fr'"),
        (lambda: TransfoXLTokenizer.train_from_iterator("text"), "one string"),
        (lambda: TransfoXLTokenizer.train_from_iterator([""]), "nothing to train on"),
        (lambda: TransfoXLTokenizer.train_from_iterator(["a"], max_size=0), "max_size=0"),
        (lambda: small("moses").train_new_from_iterator(["a"], vocab_size=2), "vocab_size=2"),
        (lambda: TransfoXLTokenizer.train_from_iterator(["a"], vocab_size=2), "vocab_size=2"),
        (lambda: TransfoXLTokenizer.train_from_iterator(["a"], lowercase=True), "no keyword lowercase; .* lower_case"),
        (lambda: TransfoXLTokenizer.from_symbols(["a"], eos_tokn="a"), "no keyword eos_tokn; did you mean eos_token"),
        (lambda: TransfoXLTokenizer.from_symbols(["a"]).encode_lines(["a"], add_eos=True), "needs an eos_token"),
        (lambda: small("characters").save_vocabulary("."), "cannot hold the symbol"),
        (lambda: small("characters", line_ends=True), "line_ends is for .* a line feed is a symbol"),
        (lambda: small("lm1b", line_ends=True), "line_ends is for .* one sentence"),
        (lambda: small("moses", eos_token="</s>", line_ends=True), "'<eos>', not '</s>'"),
        (lambda: TransfoXLTokenizer.from_symbols(["a"], line_ends=True), "needs an eos_token .*eos_token=None is not"),
    ],
)
def test_errors_say_what_was_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "lines, message",
    [
        ([{"text": "a b"}], r"\{'text': 'a b'\} of type dict is not; .*dataset\['text'\]"),
        ([["a", 1]], "1 of type int"),
        ([None], "None of type NoneType"),
        ([b"abc"], "b'abc' of type bytes"),
        ({"text": ["a b"]}, r"a dict with the keys \['text'\]"),
        (Dataset.from_dict({"text": ["a b"]}), "of type dict is not"),
    ],
)
def test_a_vocabulary_is_of_strings_and_batches_of_strings(lines, message):
    with pytest.raises(ValueError, match=message):
        TransfoXLTokenizer.train_from_iterator(lines, mode="whitespace")


def test_a_vocabulary_may_be_of_a_column_a_tuple_or_nested_batches():
    column = Dataset.from_dict({"text": ["a b", "a c"]})["text"]
    for lines in (column, [("a b", "a c")], [["a b"], [["a c"]]], iter(["a b", "a c"])):
        assert TransfoXLTokenizer.train_from_iterator(lines, "whitespace").symbols == ["<eos>", "<unk>", *"abc"]


@pytest.mark.parametrize("text", ["the cat\n", {"text": ["the cat"]}], ids=type)
def test_a_text_is_not_taken_for_its_lines(text):
    with pytest.raises(ValueError, match="lines is one string; pass its lines|lines is a dict"):
        small("whitespace").encode_lines(text)


# ---- with transformers ----------------------------------------------------------------------------------------------


def test_padding_and_truncation():
    tokenizer = small("whitespace")
    batch = tokenizer(["the cat", "the"], padding=True, return_tensors="pt")
    assert batch["attention_mask"].tolist() == [[1, 1], [0, 1]]
    assert set(batch) == {"input_ids", "attention_mask"}
    assert len(tokenizer("the cat 's 5", truncation=True, max_length=2)["input_ids"]) == 2


def test_other_files_may_have_token_in_their_names(tmp_path):
    small("whitespace").save_pretrained(tmp_path)
    (tmp_path / "stop_tokens.json").write_text('["a"]')
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == small("whitespace").get_vocab()


def test_text_generation_pipeline():
    tokenizer = small("whitespace")
    sizes = {"d_model": 8, "d_embed": 8, "n_head": 2, "d_head": 4, "d_inner": 8, "n_layer": 1, "mem_len": 4}
    config = TransfoXLConfig(vocab_size=len(tokenizer), cutoffs=[], div_val=1, eos_token_id=0, **sizes)
    generator = pipeline("text-generation", model=TransfoXLForCausalLM(config).eval(), tokenizer=tokenizer)
    results = generator(["the cat ", "the end the cat "], max_new_tokens=3, batch_size=2, do_sample=False)
    for prompt, [result] in zip(("the cat", "the end the cat"), results, strict=True):
        written = generator.model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=3, do_sample=False)
        assert result["generated_text"] == tokenizer.decode(written[0])
    # transformers joins the prompt and what follows: words are apart where the prompt ends in a space.
    [result] = generator("the cat", max_new_tokens=1, do_sample=False)
    assert result["generated_text"].startswith("the cat") and not result["generated_text"].startswith("the cat ")


def test_a_pipeline_of_more_rows_than_layers():
    """It deals out what a model returned by rows; mems are by layers."""
    tokenizer = small("whitespace")
    sizes = {"d_model": 8, "d_embed": 8, "n_head": 2, "d_head": 4, "d_inner": 8, "n_layer": 2, "mem_len": 4}
    config = TransfoXLConfig(vocab_size=len(tokenizer), cutoffs=[], div_val=1, pad_token_id=0, **sizes)
    model = TransfoXLForSequenceClassification(config).eval()
    read = pipeline("text-classification", model=model, tokenizer=tokenizer)
    texts = ["the cat", "the end", "of the", "cat the", "end of"]
    together, alone = (read(texts, batch_size=size) for size in (5, 1))
    assert [result["label"] for result in together] == [result["label"] for result in alone]
    together, alone = ([result["score"] for result in results] for results in (together, alone))
    torch.testing.assert_close(torch.tensor(together), torch.tensor(alone))


def test_what_is_put_around_a_text_is_saved(tmp_path):
    symbols = ["<eos>", "<unk>", "<s>", "the", "cat"]
    for options, ids in (
        ({"add_bos_token": True}, [2, 3, 4]),
        ({"add_eos_token": True}, [3, 4, 0]),
        ({"add_bos_token": True, "add_eos_token": True}, [2, 3, 4, 0]),
        ({}, [3, 4]),
    ):
        made = TransfoXLTokenizer.from_symbols(symbols, mode="whitespace", bos_token="<s>", **options)
        later = TransfoXLTokenizer.from_symbols(symbols, mode="whitespace", bos_token="<s>")
        for name, value in options.items():
            setattr(later, name, value)
        for tokenizer in (made, later):
            tokenizer.save_pretrained(tmp_path)
            for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
                assert each("the cat")["input_ids"] == ids
                assert (each.add_bos_token, each.add_eos_token) == (2 in ids, 0 in ids)
                assert each.encode_lines(["the cat"]).tolist() == [3, 4] + [0] * (0 in ids)
        later = TransfoXLTokenizer.from_pretrained(tmp_path, add_bos_token=True)
        assert later("the cat")["input_ids"] == [2, *ids[2 in ids :]]


@pytest.mark.parametrize("words", ["1 @,@ 234 and 3 @.@ 5 the cat", "the cat 1 @,@ 2", "5 @.@ 1 @.@ 2"])
def test_a_streamer_shows_what_decoding_gives(words, capsys):
    """A number that goes on in the next word: what has been shown stays as it is."""
    tokenizer = TransfoXLTokenizer.from_symbols(["<eos>", "<unk>", *sorted(set(words.split()))], mode="moses")
    ids = tokenizer.convert_tokens_to_ids(words.split())
    streamer = TextStreamer(tokenizer)
    for index in ids:
        streamer.put(torch.tensor([index]))
    streamer.end()
    assert capsys.readouterr().out == tokenizer.decode(ids) + "\n"


def test_remote_code_needs_no_package(tmp_path):
    tokenizer = small("moses")
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": [None, "tokenization_transfo_xl.TransfoXLTokenizer"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for source in Path(sys.modules[TransfoXLTokenizer.__module__].__file__).parent.glob("*_transfo_xl*.py"):
        shutil.copy(source, tmp_path)
    script = (
        "import json, sys; sys.modules['txl_hf'] = None; from transformers import AutoTokenizer\n"
        "t = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "print(json.dumps([type(t).__name__, t.mode, t.tokenize(sys.argv[2])]))"
    )
    modules = str(tmp_path / "modules")
    process = run_script("-c", script, tmp_path, SENTENCE, only_torch=True, HF_MODULES_CACHE=modules)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout.splitlines()[-1]) == ["TransfoXLTokenizer", "moses", tokenizer.tokenize(SENTENCE)]


@pytest.mark.parametrize("changed", [{"mode": "whitespace"}, {"lower_case": True}], ids=str)
def test_a_saved_tokenizer_keeps_its_steps(tmp_path, changed):
    """The attribute once changed, and nothing else."""
    TransfoXLTokenizer.train_from_iterator(["Tom's well-known dogs"]).save_pretrained(tmp_path)
    assert TransfoXLTokenizer.from_pretrained(tmp_path, mode="moses", lower_case=False).mode == "moses"
    for loader in (TransfoXLTokenizer, AutoTokenizer):
        with pytest.raises(ValueError, match=r"=.*, but the steps in .* are .*from_symbols\(tokenizer.symbols"):
            loader.from_pretrained(tmp_path, **changed)
    saved = TransfoXLTokenizer.from_pretrained(tmp_path)
    other = TransfoXLTokenizer.from_symbols(saved.symbols, **changed)
    assert other.tokenize("Tom 's well @-@ known") != saved.tokenize("Tom 's well @-@ known")


@pytest.mark.parametrize("options", [{}, {"lower_case": True}, {"line_ends": True}], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_a_tokenizer_json_alone_says_which_mode_and_case_it_is_of(tmp_path, mode, options):
    if "line_ends" in options and mode not in LINE_END_MODES:
        return
    saved = small(mode, **options)
    saved.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    for read in (
        TransfoXLTokenizer(tokenizer_file=tmp_path / "tokenizer.json"),
        TransfoXLTokenizer(tokenizer_object=saved.backend_tokenizer),
        TransfoXLTokenizer(tokenizer_object=saved.backend_tokenizer, mode=mode, lower_case=saved.lower_case),
        TransfoXLTokenizer.from_pretrained(tmp_path, mode=None),
    ):
        assert (read.mode, read.lower_case, read.line_ends) == (mode, saved.lower_case, saved.line_ends)
        assert read.train_new_from_iterator([SENTENCE]).symbols == saved.train_new_from_iterator([SENTENCE]).symbols
        if mode in LINE_END_MODES:
            read = TransfoXLTokenizer(tokenizer_object=read.backend_tokenizer, line_ends=True)
            assert read.tokenize(SENTENCE) == [*saved.tokenize(SENTENCE.strip()), "<eos>"]
        read.save_pretrained(tmp_path / "again")
        assert AutoTokenizer.from_pretrained(tmp_path / "again").mode == mode


@pytest.mark.parametrize("asked", MODES)
@pytest.mark.parametrize("mode", MODES)
def test_a_given_backend_is_taken_for_no_other_mode_than_its_own(tmp_path, mode, asked):
    """Its steps cannot tell the two apart that split at white space."""
    path = tmp_path / "tokenizer.json"
    backend = small(mode).backend_tokenizer
    backend.save(str(path))
    if {mode, asked} <= {"whitespace", "lm1b"} or mode == asked:
        assert TransfoXLTokenizer(tokenizer_file=path, mode=asked).mode == asked
        return
    shown = f"'{mode}'"
    for source, named in ((path, {"tokenizer_file": path}), ("tokenizer_object", {"tokenizer_object": backend})):
        with pytest.raises(ValueError, match=f"mode='{asked}', but the steps in {source} are those of mode={shown}"):
            TransfoXLTokenizer(**named, mode=asked)


@pytest.mark.parametrize("line_ends, mode", [(False, "lm1b"), (True, "whitespace")])
def test_of_two_modes_that_split_alike_a_backend_has_the_one_with_marks_on_both_sides(line_ends, mode):
    """Unless a line feed is a mark by itself: a sentence has none."""
    marked = small("whitespace", bos_token="<s>", add_bos_token=True, add_eos_token=True, line_ends=line_ends)
    assert TransfoXLTokenizer(tokenizer_object=marked.backend_tokenizer).mode == mode


def test_a_given_backend_in_lower_case_is_not_taken_for_one_that_keeps_capitals():
    given = TransfoXLTokenizer.from_symbols(["<eos>", "<unk>", "the"], mode="whitespace", lower_case=True)
    with pytest.raises(ValueError, match="lower_case=False, but the steps in tokenizer_object are .* lower_case=True"):
        TransfoXLTokenizer(tokenizer_object=given.backend_tokenizer, lower_case=False)


def test_what_is_said_of_the_end_of_texts_leaves_their_beginning_as_it_was_saved(tmp_path):
    saved = TransfoXLTokenizer.from_symbols(
        ["<S>", "<UNK>", "cat"], mode="lm1b", add_bos_token=False, add_eos_token=True
    )
    saved.save_pretrained(tmp_path)
    for said in ({}, {"add_bos_token": None}):
        loaded = TransfoXLTokenizer.from_pretrained(tmp_path, add_eos_token=True, **said)
        assert loaded("cat").tokens() == saved("cat").tokens() == ["cat", "<S>"]


def test_a_given_backend_that_keeps_capitals_is_not_taken_for_one_in_lower_case():
    with pytest.raises(ValueError, match="lower_case=True, but the steps in tokenizer_object are .* lower_case=False"):
        TransfoXLTokenizer(tokenizer_object=small("moses").backend_tokenizer, lower_case=True)


@pytest.mark.parametrize("steps", [None, pre_tokenizers.Whitespace(), pre_tokenizers.Metaspace()], ids=str)
def test_a_backend_with_steps_of_its_own_is_taken_for_the_mode_that_is_named(tmp_path, steps):
    backend = small("whitespace").backend_tokenizer
    backend.pre_tokenizer = steps
    with pytest.raises(ValueError, match="the steps in tokenizer_object are of none of the modes moses, .*mode="):
        TransfoXLTokenizer(tokenizer_object=backend)
    TransfoXLTokenizer(tokenizer_object=backend, mode="whitespace").save_pretrained(tmp_path)
    read = AutoTokenizer.from_pretrained(tmp_path)
    assert read.mode == "whitespace" and read("the cat").tokens() == backend.encode("the cat").tokens


def test_what_stands_for_unknown_words_can_be_chosen_on_loading(tmp_path):
    small("whitespace", extra_special_tokens=["<oov>"]).save_pretrained(tmp_path / "saved")
    chosen = AutoTokenizer.from_pretrained(tmp_path / "saved", unk_token="<oov>")
    chosen.save_pretrained(tmp_path / "again")
    for tokenizer in (chosen, AutoTokenizer.from_pretrained(tmp_path / "again")):
        assert tokenizer("dog")["input_ids"] == [tokenizer.unk_token_id]
        assert tokenizer.unk_token == "<oov>"
    closed = AutoTokenizer.from_pretrained(tmp_path / "saved", unk_token=None)
    with pytest.raises(ValueError, match="'dog' is not in the vocabulary"):
        closed("dog")
    with pytest.raises(ValueError, match="unk_token='<new>' is none of the symbols"):
        AutoTokenizer.from_pretrained(tmp_path / "saved", unk_token="<new>")


def test_the_side_of_padding_is_saved_for_every_class(tmp_path):
    tokenizer = small("whitespace")
    for side in ("left", "right"):
        tokenizer.padding_side = side
        tokenizer.save_pretrained(tmp_path)
        for loader in (PreTrainedTokenizerFast, TransfoXLTokenizer):
            assert loader.from_pretrained(tmp_path).padding_side == side


def test_a_text_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"the\xff")
    for mode in ("bytes", "whitespace"):
        with pytest.raises(ValueError, match=r"text.txt is no text in UTF-8: .*0xff in position 3"):
            small(mode).encode_file(tmp_path / "text.txt")


def test_a_legacy_vocabulary_takes_any_steps(tmp_path):
    (tmp_path / "vocab.txt").write_text("a\n@-@\nb\n")
    tokenizer = TransfoXLTokenizer.from_pretrained(tmp_path, mode="whitespace")
    assert tokenizer.tokenize("a @-@ b") == ["a", "@-@", "b"]


def test_words_that_moses_should_not_split_have_to_be_special(tmp_path):
    symbols = ["<eos>", "<unk>", "a", "b", "foo", "@-@", "bar", "foo-bar"]
    (tmp_path / "vocab.txt").write_text("".join(f"{symbol}\n" for symbol in symbols))
    config = {"tokenizer_class": "TransfoXLTokenizer", "never_split": ["<eos>", "<unk>", "<formula>", "foo-bar"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert AutoTokenizer.from_pretrained(tmp_path).tokenize("a foo-bar") == ["a", "foo", "@-@", "bar"]
    special = AutoTokenizer.from_pretrained(tmp_path, extra_special_tokens=["foo-bar"])
    assert special("a foo-bar b")["input_ids"] == [2, 7, 3]
    for never_split in (None, [], ["<eos>", "<unk>", "<formula>"]):
        without = AutoTokenizer.from_pretrained(tmp_path, never_split=never_split)
        assert without.tokenize("a foo-bar b") == ["a", "foo", "@-@", "bar", "b"]
    assert AutoTokenizer.from_pretrained(tmp_path, mode="whitespace").tokenize("a foo-bar b") == ["a", "foo-bar", "b"]


def test_auto_tokenizer_loads_a_legacy_folder():
    assert isinstance(AutoTokenizer.from_pretrained(GOLDENS / "cased"), TransfoXLTokenizer)


@pytest.mark.parametrize("mode", ["whitespace", "lm1b"])
def test_words_are_counted_where_they_are_cut(mode):
    """Python's white space, at which the originals split, has four characters that Unicode's has not."""
    words = [
        f"{letter}{separator}" for letter, separator in zip("abcdefgh", " \x1c\x1d\x1e\x1f\x85\u2028\t", strict=True)
    ]
    tokenizer = TransfoXLTokenizer.train_from_iterator(["".join(words)], mode=mode)
    found = tokenizer.tokenize("".join(words))
    assert found == list("abcdefgh") and set(found) <= set(tokenizer.symbols)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode_lines(["".join(words)], add_eos=False)) == found


@pytest.mark.parametrize("mode", ["whitespace", "moses", "characters", "bytes"])
def test_a_file_is_read_as_txl_prepare_reads_it(tmp_path, mode):
    """Without a byte-order mark, and its lines may end in a carriage return; bytes are all there."""
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbfab\r\ncd\re\n")
    lines = ["\ufeffab\r\n", "cd\re\n"] if mode == "bytes" else ["ab\n", "cd\n", "e\n"]
    tokenizer = TransfoXLTokenizer.train_from_iterator(lines, mode=mode)
    assert tokenizer.encode_file(path).tolist() == tokenizer.encode_lines(lines).tolist()
    assert tokenizer.unk_token_id is None or tokenizer.unk_token_id not in tokenizer.encode_file(path)


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


# ---- words and special tokens that are added later ------------------------------------------------------------------


@pytest.mark.parametrize("lower_case", [False, True])
def test_added_words_are_looked_for_as_they_are_written(tmp_path, lower_case):
    """The Moses rules change a word differently by itself and in a sentence, where it was unknown."""
    tokenizer = TransfoXLTokenizer.train_from_iterator(
        ['the cat sat on a mat . say " a thing " is big'] * 3, mode="moses", lower_case=lower_case
    )
    tokenizer.add_tokens(["approx.", "co.", "''"])
    tokenizer.save_pretrained(tmp_path)
    for read in (
        tokenizer,
        AutoTokenizer.from_pretrained(tmp_path),
        Tokenizer.from_file(f"{tmp_path}/tokenizer.json"),
    ):

        def tokens(text, read=read):
            return read.encode(text).tokens if isinstance(read, Tokenizer) else read(text).tokens()

        assert tokens("approx. the big") == ["approx.", "the", "big"]
        assert tokens("the co. is big") == ["the", "co.", "is", "big"]
        assert tokens("say ''a thing'' is") == ["say", "''", "a", "thing", "''", "is"]
        assert tokens('say "a thing" is') == ["say", '"', "a", "thing", '"', "is"]


def test_added_words_of_a_legacy_folder_are_looked_for_as_they_are_written(tmp_path):
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["<eos>", "<unk>", "the", "is", "big", ".", "and", '"', "say", "co"])
    )
    added = {"<formula>": 10, "approx.": 11, "co.": 12, "''": 13}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 100}')
    tokenizer = TransfoXLTokenizer.from_pretrained(tmp_path)
    assert tokenizer("approx. the co. is big").tokens() == ["approx.", "the", "co.", "is", "big"]
    assert tokenizer('say " the big " and').tokens() == ["say", '"', "the", "big", '"', "and"]
    assert tokenizer.decode(tokenizer('say " the big " and')["input_ids"]) == 'say "the big" and'


# ---- the legacy class, and text that is tokenised already -----------------------------------------------------------


def test_names_of_the_legacy_tokenizer():
    tokenizer = TransfoXLTokenizer.from_symbols(["<eos>", "<unk>", "the", "cat"], mode="whitespace")
    assert tokenizer.idx2sym == ["<eos>", "<unk>", "the", "cat"] and tokenizer.sym2idx["cat"] == 3


TOKENISED = "60 @-@ 70 percent of 1 @,@ 234 and 5 @.@ 5"


@pytest.fixture
def warnings(monkeypatch):
    found = []
    monkeypatch.setattr(logging.get_logger(TransfoXLTokenizer.__module__), "warning_once", found.append)
    return found


@pytest.mark.parametrize("joiner", ["@-@", "@,@", "@.@"])
@pytest.mark.parametrize(
    "read",
    [
        lambda tokenizer, text: tokenizer(text),
        lambda tokenizer, text: tokenizer(["the cat", text]),
        lambda tokenizer, text: tokenizer.encode(text),
        lambda tokenizer, text: tokenizer.encode_lines(["the cat\n", f"{text}\n"]),
    ],
    ids=["call", "batch", "encode", "lines"],
)
def test_text_that_is_tokenised_already_is_warned_of(warnings, read, joiner):
    read(small("moses"), f"60 {joiner} 70")
    [warning] = warnings
    assert "from_pretrained(…, mode='whitespace', line_ends=True)" in warning
    for tokenizer, text in ((small("whitespace"), f"60 {joiner} 70"), (small("moses"), f"a{joiner}b, @-, well-known")):
        read(tokenizer, text)
    assert len(warnings) == 1


def test_the_cure_for_tokenised_text_gives_the_ids_of_the_corpus(tmp_path, warnings):
    symbols = ["<eos>", "<unk>", *dict.fromkeys(TOKENISED.split()), "@", "-"]
    (tmp_path / "vocab.txt").write_text("\n".join(symbols))
    moses = TransfoXLTokenizer.from_pretrained(tmp_path)
    assert len(moses(TOKENISED)["input_ids"]) > len(TOKENISED.split()) and len(warnings) == 1
    cured = TransfoXLTokenizer.from_pretrained(tmp_path, mode="whitespace", line_ends=True)
    assert cured(TOKENISED + "\n").tokens() == [*TOKENISED.split(), "<eos>"] and len(warnings) == 1
    moses.save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match="from_symbols"):
        TransfoXLTokenizer.from_pretrained(tmp_path / "saved", mode="whitespace")
    cured = TransfoXLTokenizer.from_symbols(moses.symbols, mode="whitespace", line_ends=True)
    assert cured(TOKENISED + "\n").tokens() == [*TOKENISED.split(), "<eos>"]
