"""The Moses rules, as steps of the `tokenizers` library: how prose becomes words, and words prose again.

The rules are those of the Moses scripts normalize-punctuation.perl, tokenizer.perl (English, aggressive dashes) and
detokenizer.perl as the legacy tokenizer ran them. A `Replace` writes a constant, where Moses writes groups, so that
each rule finds with look-arounds (or `\\K`, which keeps the match so far) where a space is inserted. Rules that tidy
spaces are left out, because spaces only separate symbols.

Differences from Moses: with `lower_case`, Moses splits the text at a special token in other letters (`<UNK>`), which
is punctuation here. Look-behinds read five single letters between apostrophes at most, and a hundred digits and signs
before a word's penultimate full stop.

Every rule takes time proportional to the text's length, because a call cannot be interrupted: look-behinds are
bounded; repetitions are possessive (`*+`), and start at a run's beginning alone or end where the next match may begin.
Rules start with the character that they change, which the library finds fastest.
"""

import re
from itertools import groupby

from tokenizers import Regex, decoders, normalizers, pre_tokenizers


def _parse_class(ranges: str) -> str:
    """Hexadecimal characters and ranges `a-b` as the inside of a regex class."""
    return "".join("-".join(chr(int(end, 16)) for end in part.split("-")) for part in ranges.split())


# Moses' character classes: Unicode's properties without what Perl's tables of its time lacked, most of East Asia's
# writing among it, and with the signs that Moses counts as letters.
_NO_LETTER = """
363-36f 560 588 5ef 860-897 8b3-8e3 9fc af9-afc c04 c5a-c5d c80 cdd cf3-d00 d04 d54-d56 d5f d81 e86 e89 e8c e8e-e93
e98 ea0 ea8-ea9 eac f82-f83 1063-1064 1069-106d 1087-108d 108f-109b 13f5-13fd 170d 171f 1878 1abf-1ace 1b4c 1c36
1c80-1cbf 1cfa 1dd3-1de6 2c2f 2c5f 3005 3007-3029 3038-303b 312e-312f 31bb-31bf 3400-9fff a69e a78f a7ae-a7af
a7b2-a7f6 a802 a80b a8c5 a8fd-a8ff a9e5 aa7b-aa7d ab60-ab63 ab66-abbf ac00-d7a3 f900-fad9 10000-10ffff
"""
_VIRAMA = """
93c 94d 9bc 9cd a3c a4d abc acd afd-aff b3c b4d bcd c4d cbc ccd d3b-d3c d4d dca eba 1039 1714 1bab 1c37 a8c4
a953 aaf6 10a3f 11046 110b9-110ba 11133 11173 111c0 111ca 11235-11236 112e9-112ea 1133c 1134d 11442 11446
114c2-114c3 115bf-115c0 1163f 116b6-116b7 11839-1183a 119e0 11a34 11c3f 11d42 11d45 11d97 1e94a
"""
_NOT_LOWER = "560 588-10ff 1c8a 2c5f a7af a7b9-a7f6 ab66-ab69 10597-107ba 10d70-10d85 16e60-16e7f 1df00-1e06d"
_ALPHA = rf"[\p{{Alphabetic}}&&[^{_parse_class(_NO_LETTER)}]]\x{{135f}}\x{{25cc}}"
_CURRENCY = rf"[\p{{Sc}}&&[^{_parse_class('7fe-7ff 20be-20c0 10000-10ffff')}]]"

# Noncharacters: no text has them, so they can mark places between two rules.
_MARK = "\ufdd0"
_BORDER = "\ufdd1"
_OPEN, _CLOSE = "\ufdd2", "\ufdd3"

_A = _ALPHA + _parse_class(_VIRAMA) + _OPEN
_D = rf"[\p{{Nd}}\p{{Nl}}&&[^{_parse_class('3007-303a 10000-10ffff')}]]" + _CLOSE
_AN = _A + _D
_L = rf"[\p{{Lowercase}}&&[^{_parse_class(_NOT_LOWER)}]]\x{{25cc}}"
_WORD = _AN + r"'.,\-"

_PREFIXES = (
    "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z Adj Adm Adv Asst Bart Bldg Brig Bros Capt Cmdr Col Comdr Con "
    "Corp Cpl DR Dr Drs Ens Gen Gov Hon Hr Hosp Insp Lt MM MR MRS MS Maj Messrs Mlle Mme Mr Mrs Ms Msgr Op Ord Pfc Ph "
    "Prof Pvt Rep Reps Res Rev Rt Sen Sens Sfc Sgt Sr St Supt Surg v vs i.e rev e.g Rs Nos Nr Jan Feb Mar Apr Jun Jul "
    "Aug Sep Oct Nov Dec"
)
_NUMERIC_PREFIXES = "No|Art|pp"

# Steps are (pattern, replacement). Each line is a text of its own: `^` and `$` are its ends, and no pattern reads
# beyond a line feed.
_BLANK = r"[^\S\n]"
_SPACES = [
    # A no-break space between digits is a decimal point, unless the digit before it belongs to the match before.
    ("[\x1c-\x1f]|\xa0(?<=[0-9]\xa0[0-9]\xa0)(?<![0-9]\xa0[0-9]\xa0[0-9]\xa0)(?=[0-9])", " "),
    (r"(?<=\d)\x{a0}(?=\d)", "."),
]
_STRIPPED_LINES = [(rf"^{_BLANK}++|(?<!{_BLANK}){_BLANK}++$", "")]
_PUNCTUATION = [
    # Two plain apostrophes become a quote that stays in place, other pairs a quote that a later rule may move.
    ("[`']{2}", ' " '),
    ("´|‘|‚|’|`", "'"),
    ("''|„|“|”|«\xa0?|\xa0»\xa0|»", '"'),
    ("–", "-"),
    ("—", " - "),
    ("…", "..."),
    # A quote moves behind the commas and full stops that follow it.
    ('"(?=[,.])', _MARK),
    (_MARK + r"[,.]+\K", '"'),
    (f"[\x00-\x08\r\x0e-\x1b]|{_MARK}", ""),
]
_JOINERS = [
    # Split first, because a `@-@` in the text is no joiner.
    ("@(?=[-,.]@)", "@ "),
    (f"(?<=[{_AN}])-(?=[{_AN}])", " @-@ "),
]
_ELLIPSES = [
    (r"\.(?<!\.\.)(?=\.)", " ."),
    (r"\.(?<=\.\.)(?!\.)", ". "),
]
COMMAS = [
    # A comma between digits stays. Of a run of commas Moses takes two at a time, so that the last one may stay too.
    (rf",(?:(?<=[{_D}],)|(?<=^,)|(?<=[^{_D},\n],),)(?:,,)*+(?=[{_D}])\K", _MARK),
    (f",(?!{_MARK})", " , "),
    (_MARK, ""),
]
_X = f"[{_A}]'"
_APOSTROPHES = [
    (
        rf"'(?:(?<=[^{_A}\n]')(?=[^{_A}\n])(?<![^{_A}\n]'(?:[{_D}.\-&&[^{_A}]]|{_BLANK}{{1,9}})?')"
        rf"|(?<=[^{_AN}\n]')(?=[{_A}])|(?<=[{_A}]')(?=[^{_A}\n]))",
        " ' ",
    ),
    # In `x'y'z` Moses splits at the first apostrophe alone, because the match consumes `y`.
    (
        rf"'(?:(?<=[{_A}]')(?=[{_A}])(?:(?<!{_X}{_X})|(?<={_X}{_X}{_X})(?<!{_X}{_X}{_X}{_X})|(?<={_X}{_X}{_X}{_X}{_X}))"
        rf"|(?<=[{_D}]')(?=s))",
        " '",
    ),
]
# A full stop ends a word, but not a word with a letter and another full stop in it …
INNER_STOPS = [
    (
        rf"\.(?=[{_WORD}&&[^.]]*+\.(?![{_WORD}]))(?:(?=[{_WORD}&&[^.{_A}]]*+[{_A}])|(?<=[{_A}][{_WORD}]{{0,99}}\.))"
        rf"[{_WORD}&&[^.]]*+\K\.",
        _MARK,
    ),
]
# A known abbreviation keeps its full stop; a look-behind takes alternatives of one length.
_ABBREVIATIONS = "".join(
    rf"(?<!(?<![{_WORD}])(?:{'|'.join(map(re.escape, group))})\.)"
    for _, group in groupby(sorted(_PREFIXES.split(), key=len), len)
)
# A full stop before lower case stays, too.
_FULL_STOPS = [
    *INNER_STOPS,
    (
        rf"\.(?![{_WORD}])(?!{_BLANK}*[{_L}])(?<=[{_WORD}>]\.)(?<!\.\.){_ABBREVIATIONS}"
        rf"(?:(?!{_BLANK}+[0-9])|(?<!(?:\A|[^{_WORD}])(?:{_NUMERIC_PREFIXES})\.))",
        " .",
    ),
    (_MARK, "."),
    (rf"\.(?<!\.\.)(?='{_BLANK}*$)", " . "),
]
_NUMBERS = [
    (rf"(?<=[{_D}&&\d]),(?=[{_D}&&\d])", " @,@ "),
    (rf"(?<=[{_D}&&\d])\.(?=[{_D}&&\d])", " @.@ "),
]


def moses_normalizers(specials: list, line_end: str | None) -> list:
    """The steps that set a space between the symbols of a text.

    `specials` stay whole in any case (`<UNK>`); none are given where the text is lower-cased. A line feed becomes the
    symbol `line_end`, each line a text of its own; None: a space."""
    names = _protected_names(specials)
    # The rules see a special token in any case as a word: its brackets are written as a letter and a digit.
    opened = [(f"<(?=(?i:{names})>)", _OPEN), (f"{_OPEN}(?i:{names})\\K>", _CLOSE)]
    closed = [(_OPEN, "<"), (_CLOSE, ">")]
    words = [*opened, *_JOINERS, *_ELLIPSES, *COMMAS, *_APOSTROPHES, *_FULL_STOPS, *closed, *_NUMBERS]
    stripped: list[normalizers.Normalizer] = [normalizers.Strip()]
    last: list[tuple[str, str]] = []
    if line_end is None:
        spaces = [("\n|" + _SPACES[0][0], " "), *_SPACES[1:]]
    else:
        spaces, stripped, last = _SPACES, _replaces(_STRIPPED_LINES), [("\n", f" {line_end} ")]
    return [*_replaces(spaces), *stripped, *_replaces([*_PUNCTUATION, *words, *last])]


def _replaces(steps: list[tuple[str, str]]) -> list[normalizers.Normalizer]:
    return [normalizers.Replace(Regex(pattern), content) for pattern, content in steps]


def _protected_names(specials: list) -> str:
    names = [re.escape(str(token)[1:-1]) for token in specials if re.fullmatch(r"<\w+>", str(token))]
    return "|".join(names) or "(?!)"


def moses_pre_tokenizer(specials: list, lower_case: bool):
    """The step that splits a text whose spaces are set into symbols: words, joiners (`@-@`) and single signs. Special
    tokens stay whole in any case, with `lower_case` as words of their own."""
    protected = f"<(?i:{_protected_names(specials)})>"
    word = f"{protected}|[{_WORD}]+" if lower_case else f"(?:[{_WORD}]|{protected})+"
    return pre_tokenizers.Split(Regex(rf"@[-,.]@|{word}|[^{_WORD}\s]"), behavior="removed", invert=True)


# Chinese, Japanese and Korean writing, between whose words no space is set.
_CJK = "\u1100-\u11ff\u2e80-\ua4cf\ua840-\ua87f\uac00-\ud7af\uf900-\ufaff\ufe30-\ufe4f\uff65-\uffdc"
_CJK += "\U00016fe0-\U00018aff\U0001b000-\U0001b12f\U0001b170-\U0001b2ff\U00020000-\U0002ffff"

_QUOTE = "'\"„“`"

# Entities of characters that are special to Moses. `&` is last, because `&amp;lt;` is the text `&lt;`.
_XML = {"|": "bar|#124", "<": "lt", ">": "gt", "[": "bra|#91", "]": "ket|#93", '"': "quot", "'": "apos", "&": "amp"}
# As `clean_up_tokenization` of transformers, which the legacy tokenizer called.
_CLEAN_UP = [(" (?=[.?!,])", ""), (" ' ", "'"), (" (?=n't|'(?:m|s|ve|re))", "")]


def moses_decoder(symbols: list[str], outside: list[str]):
    """The steps that make prose of symbols. A quote of several characters among them pairs with its own kind;
    `outside`: special and added tokens outside the vocabulary."""
    # The text is ` word word … word `. A token from outside the vocabulary stands between borders: the legacy
    # tokenizer detokenised the stretches between such tokens one by one.
    steps: list[decoders.Decoder] = [decoders.Replace(Regex(r"\A"), " ")]
    for token in outside:
        steps.append(decoders.Replace(Regex(rf"\A {re.escape(token)}\z"), f" {_BORDER}{token}{_BORDER}"))
    steps += [decoders.Fuse(), decoders.Replace(Regex(r"\z"), " "), decoders.Replace(" @-@ ", "-")]
    steps += [decoders.Replace(Regex(f"&(?:{names});"), character) for character, names in _XML.items()]

    # Every other quote of a kind closes and is marked; an apostrophe after an s at the start of a pair is a genitive.
    kinds = {'"': '(?:"|[„“]+)', "'": "'", "``": "``", "`": "`", "''": "''"}
    for symbol in symbols:
        if re.fullmatch(f"[{_QUOTE}]+", symbol) and not re.fullmatch("[„“]+", symbol):
            kinds.setdefault(symbol, re.escape(symbol))
    for kind in kinds.values():
        pair = rf"{kind}(?: (?!{kind} )[^ {_BORDER}]+)*? {kind}\K "
        if kind == "'":
            pair = rf"(?:(?<=s )'\K |{pair})"
        steps.append(decoders.Replace(Regex(f"(?<= ){pair}"), f"{_MARK} "))

    currency = _CURRENCY + r"(\[{¿¡"
    no_space = "|".join(
        [
            rf" (?=[,.?!:;\\%}}\])]+ |'[{_ALPHA}]|[{_QUOTE}]+{_MARK} )",
            # Bounded, because each look-behind would otherwise read to the text's beginning.
            rf"(?<= [{currency}]{{1,99}}| [{_QUOTE}]{{1,99}}) ",
            rf"(?<=[{_CJK}]) (?=[{_CJK}])",
        ]
    )
    steps += [
        decoders.Replace(Regex(no_space), ""),
        decoders.Replace(_MARK, ""),
        decoders.Replace(Regex(rf"(?<! ) *+{_BORDER}[ {_BORDER}]*+"), _BORDER),
        decoders.Replace(Regex(rf"\A[ {_BORDER}]+|(?<![ {_BORDER}])[ {_BORDER}]++\z"), ""),
        # At the end of a text too, so that the next word only adds to what a streamer has shown.
        decoders.Replace(Regex(r" @,@(?: |\z)"), ","),
        decoders.Replace(Regex(r" @\.@(?: |\z)"), "."),
        decoders.Replace(_BORDER, " "),
    ]
    steps += [decoders.Replace(Regex(pattern), content) for pattern, content in _CLEAN_UP]
    return decoders.Sequence(steps)
