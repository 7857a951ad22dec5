"""Tokenizer of Transformer-XL on the Rust `tokenizers` library: `tokenizer.json` alone carries the whole behaviour.

Its *mode*, saved with it, says how text becomes symbols:

| mode | symbols | the originals' use |
|---|---|---|
| `"moses"` | Moses tokenisation, `1,234` → `1 @,@ 234`; decoding detokenises | wt103 as Hugging Face had it |
| `"whitespace"` | split at white space; decoding joins with spaces | PTB, WikiText, already tokenised |
| `"lm1b"` | as `"whitespace"`, with `<S>` on both sides | One Billion Word |
| `"characters"` | one symbol a character | text8 |
| `"bytes"` | one symbol a UTF-8 byte | enwik8 |

`from_pretrained` reads a folder saved by this class, or a legacy one with `vocab.pkl`, `vocab.bin` or `vocab.txt`,
whose pickles are never executed and whose added tokens (`added_tokens.json`, `added_tokens_decoder`) keep their ids;
`<formula>` of mode `"moses"` follows them. `from_symbols` and `train_from_iterator` make new ones; `encode_lines` and
`encode_file` give one long array of ids for training.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from difflib import get_close_matches
from inspect import signature
from itertools import chain, islice
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from .tokenization_transfo_xl_backend import (
    BYTE_SYMBOLS,
    LINE_END_MODES,
    MODES,
    as_written,
    build_backend,
    check_lines,
    check_mode,
    check_symbols,
    count_symbols,
    flatten,
    modes_of,
    open_lines,
    read_vocabulary,
    set_steps,
    spelling_backend,
    split_symbols,
)

logger = logging.get_logger(__name__)

# Special tokens of a vocabulary trained from text, per mode. A closed alphabet has no unknown and no end token.
_TRAINING_SPECIALS: dict[str, dict[str, str | None]] = {
    "moses": {"eos_token": "<eos>", "unk_token": "<unk>"},
    "whitespace": {"eos_token": "<eos>", "unk_token": "<unk>"},
    "lm1b": {"bos_token": "<S>", "eos_token": "<S>", "unk_token": "<UNK>"},
    "characters": {"eos_token": None, "unk_token": None},
    "bytes": {"eos_token": None, "unk_token": None},
}

# Arguments in files of the legacy tokenizer that are ignored here.
_LEGACY_ARGUMENTS = ("special", "min_freq", "max_size", "do_lower_case", "never_split")
# Joiners of text that was tokenised before, by the Moses rules or as WikiText.
_JOINED = re.compile(" @[-,.]@ ")


class TransfoXLTokenizer(PreTrainedTokenizerFast):
    """Tokenizer of Transformer-XL. See the module's table of modes and the ways to construct one.

    Args:
        vocab_file (`str`, *optional*): a text file with one symbol a line, in the order of the ids.
        pretrained_vocab_file (`str`, *optional*): the legacy `vocab.pkl` or `vocab.bin`.
        mode (`str`, *optional*): one of the table's. Defaults to that of a `tokenizer_file` or `tokenizer_object`,
            else to `"moses"`. Of `"whitespace"` and `"lm1b"`, which split alike, a given tokenizer has the second if
            it puts a token on both sides of a text.
        lower_case (`bool`, *optional*): lower-case all but special tokens. Defaults like `mode`, else to `False`.
        unk_token (`str`, *optional*, defaults to `"<unk>"`): stands for symbols that the vocabulary lacks. The default
            becomes `"<UNK>"` if the vocabulary has that instead, else none; without one, unknown text is an error.
        eos_token (`str`, *optional*, defaults to `"<eos>"`): end of a line; none where the vocabulary lacks the
            default.
        line_ends (`bool`, *optional*): in the modes `"moses"` and `"whitespace"`, read a line feed as `eos_token` and
            each line by itself, so that a text's ids are those of `encode_lines` over its lines. Defaults to what was
            saved, else to `False`: the legacy tokenizer drops line feeds.
        add_bos_token, add_eos_token (`bool`, *optional*): begin and end every encoded text with `bos_token` and
            `eos_token`. Default to what was saved, else to `True` in mode `"lm1b"` (`add_bos_token` there to
            `add_eos_token`) and `False` in others.
        vocab (`list[str]`, *optional*): the symbols in the order of the ids, as for `from_symbols`.
        as_published (`bool`, *optional*, defaults to `True`): an alphabet with `_` and no space (text8) reads and
            writes a space as `_`; one of bytes without byte 10 (enwik8) skips line ends.
        kwargs: as for any fast tokenizer, among them `tokenizer_file`, a tokenizer.json, and `tokenizer_object`, a
            tokenizer of the `tokenizers` library, which is copied. `pad_token` defaults to `eos_token`,
            `padding_side` to `"left"`, for generation, and `model_max_length` to no limit, because the memory carries
            on a text of any length. `decode`'s `clean_up_tokenization_spaces` changes nothing in mode `"moses"`, whose
            text is always detokenised.

    Raises:
        ValueError: an unknown mode or language; another `mode` or `lower_case` than a given tokenizer's, or no `mode`
            where its steps are of none; no vocabulary, or a damaged file; a pickle with more than data; added tokens
            whose ids leave a gap after the vocabulary or differ from those in it; `line_ends` without an `eos_token`
            among the symbols; or an `unk_token` that a saved tokenizer's symbols lack.
    """

    vocab_files_names = {
        "vocab_file": "vocab.txt",
        "pretrained_vocab_file": "vocab.pkl",
        "pretrained_vocab_file_torch": "vocab.bin",
        "tokenizer_file": "tokenizer.json",
    }
    model_input_names = ["input_ids", "attention_mask"]
    padding_side = "left"

    def __init__(
        self,
        vocab_file: str | None = None,
        pretrained_vocab_file: str | None = None,
        mode: str | None = None,
        lower_case: bool | None = None,
        unk_token: str | AddedToken | None = "<unk>",
        eos_token: str | AddedToken | None = "<eos>",
        line_ends: bool | None = None,
        add_eos_token: bool | None = None,
        add_bos_token: bool | None = None,
        vocab: list[str] | None = None,
        as_published: bool = True,
        **kwargs,
    ):
        if mode is not None:
            check_mode(mode)
        given, tokenizer_file = kwargs.pop("tokenizer_object", None), kwargs.pop("tokenizer_file", None)
        is_new, added = given is None and tokenizer_file is None, {}
        if is_new:
            mode, lower_case = mode or "moses", bool(lower_case)
            files = (pretrained_vocab_file, vocab_file)
            symbols = read_vocabulary(*files) if vocab is None else check_symbols(vocab, "symbols")
            unk_token, eos_token = _defaults(unk_token, eos_token, mode, set(symbols))
            if mode == "moses" and (vocab is None or "<formula>" in symbols) and not _extra_tokens(kwargs):
                kwargs["extra_special_tokens"] = ["<formula>"]
            specials = _specials(eos_token, unk_token, kwargs, None if vocab is None else symbols)
            added = _added_tokens(kwargs.get("added_tokens_decoder"), specials, mode)
            kwargs["added_tokens_decoder"] = added
            words = [token for token in added.values() if not token.special]
            backend = build_backend(symbols, mode, lower_case, unk_token, specials, words, as_published)
        else:
            # A copy of `tokenizer_object`, because steps are set below.
            backend = Tokenizer.from_file(str(tokenizer_file)) if given is None else deepcopy(given)
            mode, lower_case = _steps_of(backend, mode, lower_case, tokenizer_file or "tokenizer_object")
            unk_token, eos_token = _defaults(unk_token, eos_token, mode, backend.get_vocab())
            specials = [str(token) for token in backend.get_added_tokens_decoder().values() if token.special]
            _set_unknown(backend, unk_token)
        _set_line_ends(backend, mode, lower_case, specials, eos_token, line_ends)
        if mode == "lm1b":
            kwargs.setdefault("bos_token", eos_token)
        kwargs.setdefault("pad_token", eos_token)
        # Set explicitly, so that it is saved for other classes too.
        kwargs.setdefault("padding_side", self.padding_side)
        begins, ends = (mode == "lm1b",) * 2 if is_new else _added_around(backend)
        kwargs["add_eos_token"] = ends if add_eos_token is None else add_eos_token
        # lm1b's sentences have a mark on both sides or, without one at the end, on none.
        begins = kwargs["add_eos_token"] if begins and is_new else begins
        kwargs["add_bos_token"] = begins if add_bos_token is None else add_bos_token
        # The decoder in tokenizer.json cleans up, so that every reader of the file decodes alike.
        kwargs["clean_up_tokenization_spaces"] = False
        # Not passed on as `tokenizer_object`, because a copy takes as long as reading a large vocabulary.
        self._tokenizer = backend
        super().__init__(mode=mode, lower_case=lower_case, unk_token=unk_token, eos_token=eos_token, **kwargs)
        _check_added(backend, added)
        # Where it was loaded from is not saved.
        for name in ("is_local", "local_files_only"):
            self.init_kwargs.pop(name, None)

    @property
    def mode(self) -> str:
        """How text is split. For another mode on the same vocabulary: `from_symbols(tokenizer.symbols, mode=…)`."""
        return self.init_kwargs["mode"]

    @property
    def lower_case(self) -> bool:
        """Whether text is lower-cased."""
        return self.init_kwargs["lower_case"]

    @property
    def idx2sym(self) -> list[str]:
        """`symbols`, under the legacy tokenizer's name."""
        return self.symbols

    @property
    def sym2idx(self) -> dict[str, int]:
        """The id of each of the `symbols`, under the legacy tokenizer's name."""
        return {symbol: index for index, symbol in enumerate(self.symbols)}

    def add_tokens(self, new_tokens, special_tokens: bool = False) -> int:
        """As for any tokenizer; in mode `"moses"`, strings match words as they are written."""
        new_tokens = new_tokens if isinstance(new_tokens, list | tuple) else [new_tokens]
        if not special_tokens:
            # An AddedToken stays as it is, because its `normalized` decides the match.
            new_tokens = [as_written(token, self.mode) if isinstance(token, str) else token for token in new_tokens]
        return super().add_tokens(new_tokens, special_tokens=special_tokens)

    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs) -> dict:
        """The arguments of `__init__` for a saved tokenizer's, legacy ones too.

        Raises:
            ValueError: the legacy tokenizer's rules were those of another language than English.
        """
        for name in _LEGACY_ARGUMENTS:
            kwargs.pop(name, None)
        if kwargs.pop("delimiter", None) == "":
            kwargs["mode"] = "characters"
        if (language := kwargs.pop("language", "en")) != "en":
            raise ValueError(
                f"language={language!r} is not supported: the Moses rules here are English, language='en'"
            )
        torch_file = kwargs.pop("pretrained_vocab_file_torch", None)
        return kwargs | {"pretrained_vocab_file": kwargs.get("pretrained_vocab_file") or torch_file}

    @classmethod
    def from_symbols(
        cls, symbols: Iterable[str], mode: str = "moses", lower_case: bool = False, **kwargs
    ) -> "TransfoXLTokenizer":
        """A tokenizer whose symbol `symbols[i]` has id `i`.

        Args:
            symbols (`Iterable[str]`): the vocabulary. In mode `"bytes"` a symbol is a byte's decimal number, `"0"` …
                `"255"`.
            mode, lower_case, kwargs: as for the class.

        Raises:
            ValueError: a symbol occurs twice, or is no string or no byte's number; a special token other than the
                defaults is none of them; or a keyword is misspelt.
        """
        _check_keywords(cls.from_symbols, kwargs)
        return cls(vocab=list(symbols), mode=mode, lower_case=lower_case, **kwargs)

    @classmethod
    def train_from_iterator(
        cls,
        lines: Iterable[str | list[str]],
        mode: str = "moses",
        min_freq: int = 0,
        max_size: int | None = None,
        lower_case: bool = False,
        vocab_size: int | None = None,
        **kwargs,
    ) -> "TransfoXLTokenizer":
        """A tokenizer with the symbols of a text in the originals' order: `eos_token` and the special tokens that the
        text lacks, then its symbols (in PTB also `<unk>`), the most frequent first, ties by first occurrence.

        Args:
            lines (`Iterable[str | list[str]]`): the text, line by line or in batches of lines. Line ends are symbols
                in the modes `"characters"` and `"bytes"` alone.
            mode, lower_case: as for the class.
            min_freq (`int`, defaults to 0): leave out symbols that occur less often.
            max_size (`int`, *optional*): most symbols of the text, special tokens in it included.
            vocab_size (`int`, *optional*): the vocabulary's largest size, special tokens included.
            kwargs: as for the class. `unk_token` and `eos_token` default to `<unk>` and `<eos>` (`<UNK>` and `<S>` in
                mode `"lm1b"`, none in the modes `"characters"` and `"bytes"`).

        Raises:
            ValueError: an unknown mode, lines that are no strings, a text without symbols, a negative size, a
                `vocab_size` that leaves no room beside the special tokens, or a misspelt keyword.
        """
        check_mode(mode)
        check_lines(lines)
        _check_keywords(cls.train_from_iterator, kwargs)
        if min_freq < 0 or (max_size is not None and max_size < 1):
            raise ValueError(f"min_freq={min_freq} must be at least 0 and max_size={max_size} at least 1 (or None)")
        kwargs = {**_TRAINING_SPECIALS[mode], **kwargs}
        named = [kwargs.get(name) for name in ("eos_token", "bos_token", "unk_token", "pad_token")]
        extra = _extra_tokens(kwargs)
        specials = list(dict.fromkeys(str(token) for token in (*named, *extra) if token is not None))
        if vocab_size is not None and vocab_size <= len(specials):
            raise ValueError(f"vocab_size={vocab_size} leaves no room beside the special tokens {specials}")

        counter = count_symbols(lines, mode, lower_case, specials)
        frequent = [symbol for symbol, count in counter.most_common(max_size) if count >= min_freq]
        if not frequent:
            raise ValueError(f"no symbol occurs at least min_freq={min_freq} times in the text: nothing to train on")
        if vocab_size is not None:
            words = (symbol for symbol in frequent if symbol not in specials)
            kept = {*specials, *islice(words, vocab_size - len(specials))}
            frequent = [symbol for symbol in frequent if symbol in kept]
        counted = set(frequent)
        eos_token = str(kwargs["eos_token"])
        first = [token for token in specials if token not in counted or token == eos_token]
        symbols = list(dict.fromkeys([*first, *frequent]))
        return cls(vocab=symbols, mode=mode, lower_case=lower_case, as_published=False, **kwargs)

    def train_new_from_iterator(
        self,
        text_iterator: Iterable[str | list[str]],
        vocab_size: int | None = None,
        length: int | None = None,
        new_special_tokens: list[str | AddedToken] | None = None,
        special_tokens_map: dict[str, str] | None = None,
        **kwargs,
    ) -> "TransfoXLTokenizer":
        """A tokenizer with the symbols of another text and this one's mode, case, special tokens, chat template,
        sides of padding and truncation and greatest length.

        Args:
            text_iterator, vocab_size: as `lines` and `vocab_size` of `train_from_iterator`, with its errors.
            length, new_special_tokens, special_tokens_map: as in transformers; `length` is not needed.
            kwargs: of `train_from_iterator`, in place of this tokenizer's settings.
        """
        rename = special_tokens_map or {}
        named = {name: rename.get(token, token) for name, token in self.special_tokens_map.items()}
        specials = {name: named.pop(name, None) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        added = [str(token) for token in self.added_tokens_decoder.values() if token.special]
        extra = [rename.get(token, token) for token in added] + [str(token) for token in new_special_tokens or ()]
        extra = [token for token in extra if token not in specials.values()]
        kept = "mode lower_case line_ends add_bos_token add_eos_token chat_template padding_side truncation_side"
        options = {name: getattr(self, name) for name in (*kept.split(), "model_max_length")}
        options |= {"extra_special_tokens": extra, "model_specific_special_tokens": named, **specials}
        return type(self).train_from_iterator(text_iterator, vocab_size=vocab_size, **options | kwargs)

    @property
    def line_ends(self) -> bool:
        """Whether a call reads a line feed as a token: the `eos_token` when `line_ends` was set or loaded."""
        return _line_end(self._tokenizer) is not None

    def _decode(self, token_ids: int | list[int], skip_special_tokens: bool = False, **kwargs) -> str:
        """As in `transformers`, except that with `skip_special_tokens` the token of a line feed is written as a line
        feed, unless texts are padded with it."""
        line_end = _line_end(self._tokenizer)
        if not skip_special_tokens or line_end in (None, self.pad_token):
            return super()._decode(token_ids, skip_special_tokens, **kwargs)
        line_feed = self.convert_tokens_to_ids(line_end)
        lines: list[list[int]] = [[]]
        for token in [token_ids] if isinstance(token_ids, int) else token_ids:
            if token == line_feed:
                lines.append([])
            else:
                lines[-1].append(token)
        return "\n".join(super(TransfoXLTokenizer, self)._decode(line, True, **kwargs) for line in lines)

    @property
    def symbols(self) -> list[str]:
        """The vocabulary in the order of the ids (the originals' `idx2sym`), added tokens not included."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        ordered = sorted(vocabulary, key=vocabulary.__getitem__)
        return [BYTE_SYMBOLS.get(symbol, symbol) for symbol in ordered] if self.mode == "bytes" else ordered

    def tokenize(self, text: str, pair: str | None = None, add_special_tokens: bool = False, **kwargs) -> list[str]:
        """The symbols of a text as they are written, in the vocabulary or not; arguments as in a call. Raises a
        ValueError where `text` is no string."""
        if not isinstance(text, str):
            raise ValueError(f"text is a {type(text).__name__}, not a string: tokenize one text at a time")
        speller = copy(self)
        speller._tokenizer = spelling_backend(self._tokenizer)
        added = {index: str(token) for index, token in speller.added_tokens_decoder.items()}
        found = speller(text, pair, add_special_tokens=add_special_tokens, **kwargs).encodings[0]
        # Added tokens by id, because their pieces may be in lower case or have white space around them; but pieces
        # around a text have this tokenizer's ids, not the speller's.
        pieces = zip(found.tokens, found.ids, found.special_tokens_mask, strict=True)
        return [piece if is_put else added.get(index, piece) for piece, index, is_put in pieces]

    def encode_lines(self, lines: Iterable[str], add_eos: bool | None = None) -> np.ndarray:
        """The ids of many lines, one after the other, (N,) int64: the stream a language model is trained on.

        Args:
            lines (`Iterable[str]`): the lines, with their ends or, in the modes of words, without.
            add_eos (`bool`, *optional*): end each line as a call does, or with `eos_token` (and start it with
                `bos_token` in mode `"lm1b"`). Defaults to `line_ends` or `add_eos_token` (and `add_bos_token`).

        Raises:
            ValueError: `lines` is one string, `add_eos` without an `eos_token`, or a symbol the vocabulary lacks while
                there is no `unk_token`.
        """
        check_lines(lines)
        add_bos = self.mode == "lm1b" and (self.add_bos_token if add_eos is None else add_eos)
        if add_eos is None:
            add_eos = self.line_ends or self.add_eos_token
        line_end = _line_end(self._tokenizer) or self.eos_token
        if add_eos and line_end is None:
            raise ValueError("add_eos=True needs an eos_token and this tokenizer has none")
        start = [self.bos_token_id] if add_bos and self.bos_token_id is not None else []
        end = [self.convert_tokens_to_ids(line_end)] if add_eos else []
        # Earlier calls leave padding and truncation in the backend.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        chunks = []
        lines = iter(lines)
        while batch := list(islice(lines, 4096)):
            if self.line_ends:
                batch = [line.removesuffix("\n") for line in batch]
            with self._reading(batch):
                encodings = self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            ids = chain.from_iterable(chain(start, encoding.ids, end) for encoding in encodings)
            chunks.append(np.fromiter(ids, dtype=np.int64))
        return np.concatenate(chunks) if chunks else np.empty(0, dtype=np.int64)

    def encode_file(self, path, add_eos: bool | None = None) -> np.ndarray:
        """The ids of a text file, as `encode_lines` over its lines: (N,) int64. A byte-order mark is skipped, and a
        carriage return ends a line like a line feed, but mode `"bytes"` keeps all bytes.

        Raises:
            ValueError: as for `encode_lines`, or the file is not UTF-8.
        """
        with open_lines(path, self.mode) as lines:
            try:
                return self.encode_lines(lines, add_eos)
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} is no text in UTF-8: {error}") from None

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        """Write the symbols to `vocab.txt`, one a line in the order of the ids. Raises a ValueError for a symbol with
        white space."""
        if blank := [symbol for symbol in self.symbols if symbol.split() != [symbol]]:
            raise ValueError(f"vocab.txt cannot hold the symbol {blank[0]!r}; save_pretrained writes tokenizer.json")
        name = (filename_prefix + "-" if filename_prefix else "") + self.vocab_files_names["vocab_file"]
        path = Path(save_directory) / name
        path.write_text("".join(f"{symbol}\n" for symbol in self.symbols), encoding="utf-8")
        return (str(path),)

    def _encode_plus(self, text, *args, **kwargs):
        with self._reading(text):
            return super()._encode_plus(text, *args, **kwargs)

    @contextmanager
    def _reading(self, text) -> Iterator[None]:
        """Warn of text that was split before; raise a ValueError that names a symbol that the vocabulary lacks."""
        lines = [text] if isinstance(text, str) else text
        if self.mode == "moses" and any(isinstance(line, str) and _JOINED.search(line) for line in lines):
            logger.warning_once(
                "This text has been tokenised before, as ' @-@ ', ' @,@ ' or ' @.@ ' shows, which mode='moses' takes "
                "apart: load a legacy vocabulary with from_pretrained(…, mode='whitespace', line_ends=True), or make "
                "TransfoXLTokenizer.from_symbols(tokenizer.symbols, mode='whitespace', line_ends=True)"
            )
        try:
            yield
        except Exception as error:  # the library raises no other type
            if "Missing [UNK] token" not in str(error):
                raise
            known = self._tokenizer.get_vocab()
            symbols = (symbol for line in flatten(text) for symbol in split_symbols(self._tokenizer, line))
            symbol = next(symbol for symbol in symbols if symbol not in known)
            shown = f"byte {BYTE_SYMBOLS[symbol]}" if self.mode == "bytes" else repr(symbol)
            raise ValueError(
                f"{shown} is not in the vocabulary of {len(known)} symbols, which has no unk_token to stand for it: "
                "leave it out of the text, or train a vocabulary with unk_token='<unk>', as txl-prepare --corpus text "
                "does (--mode characters or bytes for an alphabet)"
            ) from error


def _check_keywords(call: Callable, keywords: Iterable[str]) -> None:
    """Raises ValueError for a keyword that is nearly one of ours. Others go to transformers, which keeps any name."""
    own = signature(call).parameters.keys() | signature(TransfoXLTokenizer.__init__).parameters.keys()
    for name in keywords:
        # Any `…_token` is allowed, because it may name a special token (`image_token`).
        if name not in own and not name.endswith("_token") and (near := get_close_matches(name, own, 1, 0.85)):
            raise ValueError(f"TransfoXLTokenizer.{call.__name__} has no keyword {name}; did you mean {near[0]}?")


def _specials(eos_token, unk_token, kwargs: dict, symbols: list[str] | None) -> list[str]:
    """The special tokens of a new tokenizer, which have to be `symbols`; None: those of a legacy file."""
    named = [eos_token, unk_token]
    if symbols is not None:
        # Those of a legacy vocabulary may be outside of it, and were words to its detokeniser.
        named += [kwargs.get("bos_token"), kwargs.get("pad_token")]
    specials = [str(token) for token in named if token is not None]
    if symbols is not None and (strange := [token for token in specials if token not in symbols]):
        raise ValueError(f"special token {strange[0]!r} is not one of the {len(symbols)} symbols")
    return [*specials, *map(str, _extra_tokens(kwargs))]


def _added_tokens(given: dict[int, AddedToken] | None, specials: list[str], mode: str) -> dict[int, AddedToken]:
    """Tokens that were added to a legacy vocabulary, by their ids, as they are looked for in a text."""
    return {
        index: AddedToken(str(token), special=True) if str(token) in specials else as_written(token, mode)
        for index, token in (given or {}).items()
    }


def _check_added(backend: Tokenizer, added: dict[int, AddedToken]) -> None:
    for index, token in added.items():
        if (found := backend.token_to_id(str(token))) != index:
            raise ValueError(
                f"the added token {str(token)!r} has id {index} in added_tokens.json or added_tokens_decoder but "
                f"would get {found}: a symbol of the vocabulary keeps its id, others follow its "
                f"{backend.get_vocab_size(with_added_tokens=False)} without a gap; without that entry in the file, "
                f"{str(token)!r} is {found}"
            )


def _steps_of(backend: Tokenizer, mode: str | None, lower_case: bool | None, source) -> tuple[str, bool]:
    """The mode and case of a given tokenizer, by its steps. Raises a ValueError, which names its `source`, where the
    steps are of no mode, or differ from the `mode` or `lower_case` that was asked for."""
    modes = modes_of(backend)
    is_marked = all(_added_around(backend)) and _line_end(backend) is None
    found = "lm1b" if is_marked and "lm1b" in modes else next(iter(modes), mode)
    if found is None:
        raise ValueError(
            f"the steps in {source} are of none of the modes {', '.join(MODES)}: PreTrainedTokenizerFast takes any "
            "tokenizer, and mode= says which mode to take this one for"
        )
    if mode is None or mode in modes:
        found = mode or found
    lowers = backend.normalizer is not None and backend.normalizer.normalize_str("A") == "a"
    for name, given, is_so in (("mode", mode, found), ("lower_case", lower_case, lowers)):
        if given not in (None, is_so):
            raise ValueError(
                f"{name}={given!r}, but the steps in {source} are those of {name}={is_so!r}: for others on the same "
                f"vocabulary load it as it is, and make TransfoXLTokenizer.from_symbols(tokenizer.symbols, "
                f"{name}={given!r})"
            )
    return found, lowers


def _set_unknown(backend: Tokenizer, unk_token) -> None:
    """Set `unk_token` to stand for symbols that the vocabulary lacks; None: such symbols are an error."""
    name = "" if unk_token is None else str(unk_token)
    if name == (backend.model.unk_token or ""):
        return
    if name and backend.model.token_to_id(name) is None:
        raise ValueError(
            f"unk_token={name!r} is none of the symbols and so cannot stand for what they lack: "
            "make the vocabulary with it, as train_from_iterator and from_symbols take unk_token"
        )
    backend.model.unk_token = name


def _line_end(backend: Tokenizer) -> str | None:
    """The token that a line feed becomes; None: a line feed is white space, or a symbol like others."""
    if backend.normalizer is None:
        return None
    return backend.normalizer.normalize_str("a\na").removeprefix("a").removesuffix("a").strip() or None


def _set_line_ends(
    backend: Tokenizer, mode: str, lower_case: bool, specials: list[str], eos_token, line_ends: bool | None
) -> None:
    """Set whether line feeds become `eos_token`; None: unchanged."""
    line_end = str(eos_token) if line_ends else None
    if line_ends is None or _line_end(backend) == line_end:
        return
    # Added tokens are matched in the raw text, which has the line feed, so that `eos_token` must be a symbol.
    known = eos_token is not None and backend.model.token_to_id(str(eos_token)) is not None
    if line_ends and mode in LINE_END_MODES and not known:
        given = None if eos_token is None else str(eos_token)
        raise ValueError(f"line_ends=True needs an eos_token among the symbols, which eos_token={given!r} is not")
    if line_end is not None and line_end not in specials:
        specials = [*specials, line_end]
    set_steps(backend, mode, lower_case, specials, line_end)


def _added_around(backend: Tokenizer) -> tuple[bool, bool]:
    """Whether a tokenizer puts a token before a text, and whether it puts one after it."""
    processor = backend.post_processor
    parts = [] if processor is None else json.loads(processor.__getstate__()).get("single", [])
    before, behind = parts[:1], parts[1:][-1:]
    return any("SpecialToken" in part for part in before), any("SpecialToken" in part for part in behind)


def _extra_tokens(kwargs: dict) -> list:
    extra = kwargs.get("extra_special_tokens") or kwargs.get("additional_special_tokens")
    # A dict gives each token a name, `{"image_token": "<img>"}`.
    return list(extra.values()) if isinstance(extra, dict) else list(extra or ())


def _defaults(unk_token, eos_token, mode: str, vocabulary) -> tuple:
    """`unk_token` and `eos_token`; where the vocabulary lacks a default name, another name that it has, or None."""

    def default(token, names: tuple[str, ...]):
        if token is None or str(token) in vocabulary or str(token) != names[0]:
            return token
        return next((name for name in names if name in vocabulary), None)

    ends = ("<eos>", "<S>") if mode == "lm1b" else ("<eos>",)
    return default(unk_token, ("<unk>", "<UNK>")), default(eos_token, ends)
