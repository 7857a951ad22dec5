"""The Moses rules, as steps of the `tokenizers` library: how prose becomes words, and words prose again.

The rules are those of the Moses scripts normalize-punctuation.perl, tokenizer.perl (English, aggressive dashes) and
detokenizer.perl as the legacy tokenizer ran them. Moses rewrites the text dozens of times with captured groups; a
`Replace` writes a constant, so each rule here finds with look-arounds (or `\\K`, which keeps the match so far) where a
space is inserted. Rules that tidy spaces are left out, because spaces only separate symbols.

Differences from Moses: with `lower_case`, Moses splits the text at a special token in other letters (`<UNK>`), which
is punctuation here. Look-behinds read five single letters between apostrophes at most, and a hundred digits and signs
before a word's penultimate full stop.

Every rule takes time proportional to the text's length, because a call cannot be interrupted: look-behinds are
bounded; repetitions are possessive (`*+`), and start at a run's beginning alone or end where the next match may begin.
Rules start with the character that they change, because the library finds that fastest.
"""

import re
from collections import defaultdict

from tokenizers import Regex, decoders, normalizers, pre_tokenizers

__all__ = ["COMMAS", "INNER_STOPS", "moses_decoder", "moses_normalizers", "moses_pre_tokenizer"]


def _parse_class(ranges: str) -> str:
    """Hexadecimal ranges `a-b`, or `a-b:2` for every other character, as the inside of a regex class."""
    members: list[str] = []
    for part in ranges.split():
        span, _, step = part.partition(":")
        start, _, end = span.partition("-")
        first, last = int(start, 16), int(end or start, 16)
        if step:
            members += map(chr, range(first, last + 1, int(step)))
        else:
            members.append(chr(first) if first == last else f"{chr(first)}-{chr(last)}")
    return "".join(members)


# Moses' character classes, from the tables of Perl's Unicode properties of its time, and the signs counted as letters.
_ALPHA = """
41-5a 61-7a aa b5 ba c0-d6 d8-f6 f8-2c1 2c6-2d1 2e0-2e4 2ec 2ee 345 370-374 376-377 37a-37d 37f 386 388-38a 38c
38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 559 561-587 5b0-5bd 5bf 5c1-5c2 5c4-5c5 5c7 5d0-5ea 5f0-5f2 610-61a
620-657 659-65f 66e-6d3 6d5-6dc 6e1-6e8 6ed-6ef 6fa-6fc 6ff 710-73f 74d-7b1 7ca-7ea 7f4-7f5 7fa 800-817 81a-82c
840-858 8a0-8b2 8e4-8e9 8f0-93b 93d-94c 94e-950 955-963 971-983 985-98c 98f-990 993-9a8 9aa-9b0 9b2 9b6-9b9
9bd-9c4 9c7-9c8 9cb-9cc 9ce 9d7 9dc-9dd 9df-9e3 9f0-9f1 a01-a03 a05-a0a a0f-a10 a13-a28 a2a-a30 a32-a33 a35-a36
a38-a39 a3e-a42 a47-a48 a4b-a4c a51 a59-a5c a5e a70-a75 a81-a83 a85-a8d a8f-a91 a93-aa8 aaa-ab0 ab2-ab3 ab5-ab9
abd-ac5 ac7-ac9 acb-acc ad0 ae0-ae3 b01-b03 b05-b0c b0f-b10 b13-b28 b2a-b30 b32-b33 b35-b39 b3d-b44 b47-b48
b4b-b4c b56-b57 b5c-b5d b5f-b63 b71 b82-b83 b85-b8a b8e-b90 b92-b95 b99-b9a b9c b9e-b9f ba3-ba4 ba8-baa bae-bb9
bbe-bc2 bc6-bc8 bca-bcc bd0 bd7 c00-c03 c05-c0c c0e-c10 c12-c28 c2a-c39 c3d-c44 c46-c48 c4a-c4c c55-c56 c58-c59
c60-c63 c81-c83 c85-c8c c8e-c90 c92-ca8 caa-cb3 cb5-cb9 cbd-cc4 cc6-cc8 cca-ccc cd5-cd6 cde ce0-ce3 cf1-cf2
d01-d03 d05-d0c d0e-d10 d12-d3a d3d-d44 d46-d48 d4a-d4c d4e d57 d60-d63 d7a-d7f d82-d83 d85-d96 d9a-db1 db3-dbb
dbd dc0-dc6 dcf-dd4 dd6 dd8-ddf df2-df3 e01-e3a e40-e46 e4d e81-e82 e84 e87-e88 e8a e8d e94-e97 e99-e9f ea1-ea3
ea5 ea7 eaa-eab ead-eb9 ebb-ebd ec0-ec4 ec6 ecd edc-edf f00 f40-f47 f49-f6c f71-f81 f88-f97 f99-fbc 1000-1036
1038 103b-103f 1050-1062 1065-1068 106e-1086 108e 109c-109d 10a0-10c5 10c7 10cd 10d0-10fa 10fc-1248 124a-124d
1250-1256 1258 125a-125d 1260-1288 128a-128d 1290-12b0 12b2-12b5 12b8-12be 12c0 12c2-12c5 12c8-12d6 12d8-1310
1312-1315 1318-135a 135f 1380-138f 13a0-13f4 1401-166c 166f-167f 1681-169a 16a0-16ea 16ee-16f8 1700-170c
170e-1713 1720-1733 1740-1753 1760-176c 176e-1770 1772-1773 1780-17b3 17b6-17c8 17d7 17dc 1820-1877 1880-18aa
18b0-18f5 1900-191e 1920-192b 1930-1938 1950-196d 1970-1974 1980-19ab 19b0-19c9 1a00-1a1b 1a20-1a5e 1a61-1a74
1aa7 1b00-1b33 1b35-1b43 1b45-1b4b 1b80-1ba9 1bac-1baf 1bba-1be5 1be7-1bf1 1c00-1c35 1c4d-1c4f 1c5a-1c7d
1ce9-1cec 1cee-1cf3 1cf5-1cf6 1d00-1dbf 1de7-1df4 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59-1f5d:2
1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2071
207f 2090-209c 2102 2107 210a-2113 2115 2119-211d 2124-2128:2 212a-212d 212f-2139 213c-213f 2145-2149 214e
2160-2188 24b6-24e9 25cc 2c00-2c2e 2c30-2c5e 2c60-2ce4 2ceb-2cee 2cf2-2cf3 2d00-2d25 2d27 2d2d 2d30-2d67 2d6f
2d80-2d96 2da0-2da6 2da8-2dae 2db0-2db6 2db8-2dbe 2dc0-2dc6 2dc8-2dce 2dd0-2dd6 2dd8-2dde 2de0-2dff 2e2f 3006
3031-3035 303c 3041-3096 309d-309f 30a1-30fa 30fc-30ff 3105-312d 3131-318e 31a0-31ba 31f0-31ff a000-a48c
a4d0-a4fd a500-a60c a610-a61f a62a-a62b a640-a66e a674-a67b a67f-a69d a69f-a6ef a717-a71f a722-a788 a78b-a78e
a790-a7ad a7b0-a7b1 a7f7-a801 a803-a805 a807-a80a a80c-a827 a840-a873 a880-a8c3 a8f2-a8f7 a8fb a90a-a92a
a930-a952 a960-a97c a980-a9b2 a9b4-a9bf a9cf a9e0-a9e4 a9e6-a9ef a9fa-a9fe aa00-aa36 aa40-aa4d aa60-aa76 aa7a
aa7e-aabe aac0 aac2 aadb-aadd aae0-aaef aaf2-aaf5 ab01-ab06 ab09-ab0e ab11-ab16 ab20-ab26 ab28-ab2e ab30-ab5a
ab5c-ab5f ab64-ab65 abc0-abea d7b0-d7c6 d7cb-d7fb fb00-fb06 fb13-fb17 fb1d-fb28 fb2a-fb36 fb38-fb3c fb3e
fb40-fb41 fb43-fb44 fb46-fbb1 fbd3-fd3d fd50-fd8f fd92-fdc7 fdf0-fdfb fe70-fe74 fe76-fefc ff21-ff3a ff41-ff5a
ff66-ffbe ffc2-ffc7 ffca-ffcf ffd2-ffd7 ffda-ffdc
"""
_VIRAMA = """
93c 94d 9bc 9cd a3c a4d abc acd afd-aff b3c b4d bcd c4d cbc ccd d3b-d3c d4d dca eba 1039 1714 1bab 1c37 a8c4
a953 aaf6 10a3f 11046 110b9-110ba 11133 11173 111c0 111ca 11235-11236 112e9-112ea 1133c 1134d 11442 11446
114c2-114c3 115bf-115c0 1163f 116b6-116b7 11839-1183a 119e0 11a34 11c3f 11d42 11d45 11d97 1e94a
"""
_DIGIT = """
30-39 660-669 6f0-6f9 7c0-7c9 966-96f 9e6-9ef a66-a6f ae6-aef b66-b6f be6-bef c66-c6f ce6-cef d66-d6f de6-def
e50-e59 ed0-ed9 f20-f29 1040-1049 1090-1099 16ee-16f0 17e0-17e9 1810-1819 1946-194f 19d0-19d9 1a80-1a89
1a90-1a99 1b50-1b59 1bb0-1bb9 1c40-1c49 1c50-1c59 2160-2182 2185-2188 a620-a629 a6e6-a6ef a8d0-a8d9 a900-a909
a9d0-a9d9 a9f0-a9f9 aa50-aa59 abf0-abf9 ff10-ff19
"""
_LOWER = """
61-7a aa b5 ba df-f6 f8-ff 101-135:2 137-138 13a-146:2 148-149 14b-177:2 17a 17c 17e-180 183 185 188 18c-18d 192
195 199-19b 19e 1a1-1a5:2 1a8 1aa-1ab 1ad 1b0 1b4 1b6 1b9-1ba 1bd-1bf 1c6 1c9 1cc-1da:2 1dc-1dd 1df-1ed:2
1ef-1f0 1f3 1f5 1f9-231:2 233-239 23c 23f-240 242 247-24d:2 24f-293 295-2b8 2c0-2c1 2e0-2e4 345 371 373 377
37a-37d 390 3ac-3ce 3d0-3d1 3d5-3d7 3d9-3ed:2 3ef-3f3 3f5 3f8 3fb-3fc 430-45f 461-481:2 48b-4bf:2 4c2-4cc:2
4ce-4cf 4d1-52f:2 561-587 13f8-13fd 1c80-1c88 1d00-1dbf 1e01-1e93:2 1e95-1e9d 1e9f-1efd:2 1eff-1f07 1f10-1f15
1f20-1f27 1f30-1f37 1f40-1f45 1f50-1f57 1f60-1f67 1f70-1f7d 1f80-1f87 1f90-1f97 1fa0-1fa7 1fb0-1fb4 1fb6-1fb7
1fbe 1fc2-1fc4 1fc6-1fc7 1fd0-1fd3 1fd6-1fd7 1fe0-1fe7 1ff2-1ff4 1ff6-1ff7 2071 207f 2090-209c 210a 210e-210f
2113 212f 2134 2139 213c-213d 2146-2149 214e 2170-217f 2184 24d0-24e9 25cc 2c30-2c5e 2c61 2c65-2c66 2c68-2c6c:2
2c71 2c73-2c74 2c76-2c7d 2c81-2ce1:2 2ce3-2ce4 2cec 2cee 2cf3 2d00-2d25 2d27 2d2d a641-a66d:2 a681-a699:2
a69b-a69d a723-a72d:2 a72f-a731 a733-a76d:2 a76f-a778 a77a a77c a77f-a787:2 a78c a78e a791 a793-a795 a797-a7a9:2
a7b5 a7b7 a7f8-a7fa ab30-ab5a ab5c-ab65 ab70-abbf fb00-fb06 fb13-fb17 ff41-ff5a 10428-1044f 104d8-104fb
10cc0-10cf2 118c0-118df 1d41a-1d433 1d44e-1d454 1d456-1d467 1d482-1d49b 1d4b6-1d4b9 1d4bb 1d4bd-1d4c3
1d4c5-1d4cf 1d4ea-1d503 1d51e-1d537 1d552-1d56b 1d586-1d59f 1d5ba-1d5d3 1d5ee-1d607 1d622-1d63b 1d656-1d66f
1d68a-1d6a5 1d6c2-1d6da 1d6dc-1d6e1 1d6fc-1d714 1d716-1d71b 1d736-1d74e 1d750-1d755 1d770-1d788 1d78a-1d78f
1d7aa-1d7c2 1d7c4-1d7c9 1d7cb 1e922-1e943
"""
_CURRENCY = "24 a2-a5 58f 60b 9f2-9f3 9fb af1 bf9 e3f 17db 20a0-20bd a838 fdfc fe69 ff04 ffe0-ffe1 ffe5-ffe6"

# Noncharacters: no text has them, so they can mark places between two rules.
_MARK = "\ufdd0"
_BORDER = "\ufdd1"
_OPEN, _CLOSE = "\ufdd2", "\ufdd3"

_A = _parse_class(_ALPHA) + _parse_class(_VIRAMA) + _OPEN
_D = _parse_class(_DIGIT) + _CLOSE
_AN = _A + _D
_L = _parse_class(_LOWER)
_WORD = _AN + r"'.,\-"

_PREFIXES = (
    "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z Adj Adm Adv Asst Bart Bldg Brig Bros Capt Cmdr Col Comdr Con "
    "Corp Cpl DR Dr Drs Ens Gen Gov Hon Hr Hosp Insp Lt MM MR MRS MS Maj Messrs Mlle Mme Mr Mrs Ms Msgr Op Ord Pfc Ph "
    "Prof Pvt Rep Reps Res Rev Rt Sen Sens Sfc Sgt Sr St Supt Surg v vs i.e rev e.g Rs Nos Nr Jan Feb Mar Apr Jun Jul "
    "Aug Sep Oct Nov Dec"
)
_NUMERIC_PREFIXES = "No Art pp"


def _by_length(words: str) -> list[list[str]]:
    groups = defaultdict(list)
    for word in words.split():
        groups[len(word)].append(word)
    return list(groups.values())


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
# A known abbreviation keeps its full stop.
_ABBREVIATIONS = "".join(
    rf"(?<!(?<![{_WORD}])(?:{'|'.join(map(re.escape, group))})\.)" for group in _by_length(_PREFIXES)
)
_BEFORE_NUMBER = "|".join(_NUMERIC_PREFIXES.split())
# A full stop before lower case stays, too.
_FULL_STOPS = [
    *INNER_STOPS,
    (
        rf"\.(?![{_WORD}])(?!{_BLANK}*[{_L}])(?<=[{_WORD}>]\.)(?<!\.\.){_ABBREVIATIONS}"
        rf"(?:(?!{_BLANK}+[0-9])|(?<!(?:\A|[^{_WORD}])(?:{_BEFORE_NUMBER})\.))",
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

    Args:
        specials: special tokens, which stay whole in other letters too (`<UNK>`); none where the text is lower-cased.
        line_end: the symbol that a line feed becomes, each line a text of its own; None: a line feed is a space.
    """
    names = _protected_names(specials)
    # To the rules, a special token in other letters is a word: its brackets count as letter and digit.
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
    """The step that splits a text whose spaces are set into symbols.

    Special tokens stay whole in any capitalisation; with `lower_case` they are words of their own. Any other character
    that is neither of a word nor white space is a symbol, except in the joiners made above.
    """
    protected = f"<(?i:{_protected_names(specials)})>"
    word = f"{protected}|[{_WORD}]+" if lower_case else f"(?:[{_WORD}]|{protected})+"
    return pre_tokenizers.Split(Regex(rf"@[-,.]@|{word}|[^{_WORD}\s]"), behavior="removed", invert=True)


# Chinese, Japanese and Korean writing, between whose words no space is set.
_CJK = "\u1100-\u11ff\u2e80-\ua4cf\ua840-\ua87f\uac00-\ud7af\uf900-\ufaff\ufe30-\ufe4f\uff65-\uffdc"
_CJK += "\U00016fe0-\U00018aff\U0001b000-\U0001b12f\U0001b170-\U0001b2ff\U00020000-\U0002ffff"

_QUOTE = "'\"„“`"

_XML = (
    ("&bar;", "|"),
    ("&#124;", "|"),
    ("&lt;", "<"),
    ("&gt;", ">"),
    ("&bra;", "["),
    ("&ket;", "]"),
    ("&quot;", '"'),
    ("&apos;", "'"),
    ("&#91;", "["),
    ("&#93;", "]"),
    ("&amp;", "&"),
)

_CLEAN_UP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def moses_decoder(symbols: list[str], outside: list[str]):
    """The steps that make prose of symbols.

    Args:
        symbols: the vocabulary; each of its quotes of several characters pairs with its own kind.
        outside: special and added tokens outside the vocabulary.
    """
    # The text is ` word word … word `. A token from outside the vocabulary stands between borders: the legacy
    # tokenizer detokenised the stretches between such tokens one by one.
    steps: list[decoders.Decoder] = [decoders.Replace(Regex(r"\A"), " ")]
    for token in outside:
        steps.append(decoders.Replace(Regex(rf"\A {re.escape(token)}\z"), f" {_BORDER}{token}{_BORDER}"))
    steps += [decoders.Fuse(), decoders.Replace(Regex(r"\z"), " "), decoders.Replace(" @-@ ", "-")]
    steps += [decoders.Replace(entity, character) for entity, character in _XML]

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

    letter = _parse_class(_ALPHA)
    currency = _parse_class(_CURRENCY) + r"(\[{¿¡"
    no_space = "|".join(
        [
            rf" (?=[,.?!:;\\%}}\])]+ |'[{letter}]|[{_QUOTE}]+{_MARK} )",
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
    steps += [decoders.Replace(before, after) for before, after in _CLEAN_UP]
    return decoders.Sequence(steps)
