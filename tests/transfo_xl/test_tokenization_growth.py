"""The tokenizer takes time in proportion to a text's length, whatever the text, and splits as it did before.

A call cannot be interrupted, so that a quadratic rule is a way to stop a server: 16,000 full stops once took a minute.
"""

import gc
import time
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, normalizers

from txl_hf import TransfoXLTokenizer
from txl_hf.transfo_xl.tokenization_transfo_xl_moses import _A, _D, _MARK, _WORD, COMMAS, INNER_STOPS

SENTENCE = "Mr. Smith said: \"It's 1,234.5 km (well-known).\" <unk> didn't <formula> agree ...\n"

# What the rules look at, alone and with what stands beside it: each was, or could be, a run that is read again from
# each of its characters.
HOSTILE = [
    *(". .. 1. a. .a .1 a.. . . a.1 .' '. .\n 0.1234,0.5678, No.5. x.y. Mr. U.S. e.g.".split(" ")),
    *(", ,, 1, a, ,5 a,1 1,1 1,, a,1; a,,,1; a,a., ,. ,'".split(" ")),
    *("' a' 1' 's '1 '' ` `` \" \", '\" „ » « “’ n't".split(" ")),
    *("- a- -1 – — @ @-@ @,@ @.@ < <unk> <UNK> <unk > > $ ( ! ? &amp; …".split(" ")),
    *("a é 漢 ١ Ⅷ İ \u0301 \u200b \x01 \ufdd0 \ufdd2".split(" ")),
    *[" ", "\t", "\n", "\xa0", "1\xa0", "\u3000", "\x1c", "«\xa0", "\xa0»", ". ", ".  5", "a b", "' ", "\n' ", "a,1 "],
]
PIECES = [*HOSTILE, *"abAZ019.,-'\"<>@() \xa0\n", "...", ",,", ", ", "<formula>"]


def check_growth(call: Callable, make: Callable[[int], object]) -> None:
    """Eight times the length takes eight times as long, and not 64 times: in one of ten trials, each of both lengths,
    because a busy machine is slower for a while, above all for a text that its caches do not hold."""

    def seconds(length: int) -> float:
        text = make(length)
        # As `timeit` does: a search for garbage, for which many symbols call, takes as long as all that there is.
        gc.disable()
        start = time.process_time()
        call(text)
        took = time.process_time() - start
        gc.enable()
        return took

    call(make(100))
    assert min(seconds(2000) for _ in range(3)) < 0.5
    trials = []
    while len(trials) < 10 and (not trials or trials[-1] > 32):
        # A millisecond or two is what a clock is off by.
        short = max(seconds(6000), 0.002)
        trials.append(seconds(48_000) / short)
    assert min(trials) <= 32, trials


@pytest.fixture(scope="module", params=[False, True], ids=["cased", "lower"])
def tokenizer(request):
    return TransfoXLTokenizer.train_from_iterator([SENTENCE, "the cat"], mode="moses", lower_case=request.param)


@pytest.mark.parametrize("piece", HOSTILE, ids=ascii)
def test_a_run_of_anything_takes_time_in_proportion_to_its_length(tokenizer, piece):
    check_growth(tokenizer, lambda length: piece * (length // len(piece)))


@pytest.mark.parametrize("piece", [" ", "\n", " \n", "\u3000\n", ".'\n", ".' ", "'\n", "a\n", "\xa0"], ids=ascii)
def test_lines_take_time_in_proportion_to_their_length(piece):
    tokenizer = TransfoXLTokenizer.train_from_iterator([SENTENCE], mode="moses", line_ends=True)
    check_growth(tokenizer, lambda length: piece * (length // len(piece)))


runs = st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join), min_size=1, max_size=3)


def check_runs(tokenizer, pieces: list[str], ends: list[str]) -> None:
    def make(length: int) -> str:
        return ends[0] + "".join(piece * (length // len(piece) // len(pieces)) for piece in pieces) + ends[1]

    check_growth(tokenizer, make)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(pieces=runs, ends=st.lists(st.sampled_from(PIECES), min_size=2, max_size=2))
def test_runs_of_mixtures_take_time_in_proportion_to_their_length(tokenizer, pieces, ends):
    check_runs(tokenizer, pieces, ends)


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(pieces=runs, ends=st.lists(st.sampled_from(PIECES), min_size=2, max_size=2))
def test_600_runs_of_mixtures_take_time_in_proportion_to_their_length(tokenizer, pieces, ends):
    check_runs(tokenizer, pieces, ends)


SYMBOLS = [
    "<eos>",
    " ",
    "  ",
    "a",
    "'",
    '"',
    "„",
    "``",
    ".",
    ",",
    "@-@",
    "@,@",
    "(",
    "$",
    "漢",
    "s",
    "&amp;",
    "\ufdd1",
]


@pytest.mark.parametrize(
    "symbols", [[symbol] for symbol in SYMBOLS] + [["'", "a"], ["s", "'"], ["„", "a"], [" ", "a"]]
)
def test_decoding_takes_time_in_proportion_to_the_number_of_symbols(symbols):
    tokenizer = TransfoXLTokenizer.from_symbols(SYMBOLS, extra_special_tokens=["<pad>"])
    ids = tokenizer.convert_tokens_to_ids(symbols)
    check_growth(tokenizer.decode, lambda length: ids * (length // 2 // len(ids)))


# The rules as they are said shortest, which took quadratic time: looking back from each character, to any distance.
PLAIN = {
    "commas": [(rf",(?:(?![{_D}])|(?<!(?:[{_D}]|\A)(?:,,)*,|[^{_D},](?:,,)+))", " , ")],
    "inner full stops": [(rf"\.(?=[{_WORD}])[{_WORD}]*\K(?<=[{_A}][{_WORD}]{{0,99}})\.(?![{_WORD}])", _MARK)],
}
LINEAR = {"commas": COMMAS, "inner full stops": INNER_STOPS}


@cache
def replacing(pattern: str, content: str) -> normalizers.Normalizer:
    return normalizers.Replace(Regex(pattern), content)


def apply(steps: list[tuple[str, str]], text: str) -> str:
    for step in steps:
        text = replacing(*step).normalize_str(text)
    return text


@pytest.mark.parametrize("rule", PLAIN)
@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from("aZ09.,.,-' <>é١\n")) | st.lists(st.sampled_from(PIECES)).map("".join))
def test_linear_rules_are_the_plain_ones(rule, text):
    text = text.replace(_MARK, "")
    # A line is a text of its own, which the plain rules do not know.
    assert apply(LINEAR[rule], text) == "\n".join(apply(PLAIN[rule], line) for line in text.split("\n"))
