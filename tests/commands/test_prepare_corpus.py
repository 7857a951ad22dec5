"""Corpora in miniature, laid out as they are distributed, and the real ones where they are at hand."""

import bz2
import gzip
import io
import json
import lzma
import os
import re
import shutil
import signal
import tarfile
import time
import zipfile
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest
from datasets import Dataset, DatasetDict, load_from_disk
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import prepare_corpus
from goldens import golden
from scripts import run_script, start_script
from txl_hf import TokenStream, TransfoXLTokenizer
from txl_hf.data.corpora import count_batch, split_of
from txl_hf.data.texts import read_prepared, read_raw

SHARED = Path(__file__).parents[3] / "shared"
EXAMPLES = Path(__file__).parents[2] / "examples"
SPLITS = ("train", "validation", "test")
LINES = {
    "train": " = The House = \n\n It was <unk> , and the Wolf was at the door . \n The door @-@ bell N rang . \n" * 5,
    "validation": " The Wolf rang the bell . \n",
    "test": " It was a Wolf , café N . \n\n The end . \n",
}
NAMES = {
    "wikitext-103": "wiki.{}.tokens",
    "wikitext-2": "wiki.{}.tokens",
    "ptb": "ptb.{}.txt",
}


def write(folder: Path, pattern: str, texts: dict[str, str] = LINES) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for split, text in texts.items():
        name = {"validation": "valid"}.get(split, split)
        (folder / pattern.format(name)).write_text(text, encoding="utf-8", newline="\n")
    return folder


def prepare(tmp_path: Path, corpus: str, *arguments: str | Path) -> Path:
    output = tmp_path / "output"
    prepare_corpus.main(["--corpus", corpus, "--output", str(output), "--num_proc", "1", *map(str, arguments)])
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [], "nothing else is left"
    return output


def load(folder: Path) -> tuple[dict[str, list[int]], TransfoXLTokenizer, dict]:
    splits = DatasetDict.load_from_disk(folder)
    assert tuple(splits) == SPLITS
    assert {split.features["token_ids"].dtype for split in splits.values()} == {"int32"}
    assert {tuple(split.column_names) for split in splits.values()} == {("token_ids",)}
    information = json.loads((folder / "corpus.json").read_text())
    tokens = {name: list(split["token_ids"]) for name, split in splits.items()}
    assert {name: counts["tokens"] for name, counts in information["splits"].items()} == {
        name: len(ids) for name, ids in tokens.items()
    }
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert information["vocab_size"] == len(tokenizer)
    return tokens, tokenizer, information


def by_frequency(words: list[str], first: tuple[str, ...] = ()) -> list[str]:
    """The originals' order: counts descending, ties as they first occur."""
    return list(dict.fromkeys([*first, *(word for word, _ in Counter(words).most_common())]))


def words_of(text: str) -> list[str]:
    return [word for line in text.splitlines() for word in [*line.split(), "<eos>"]]


@pytest.mark.parametrize("renamed", [False, True], ids=["distributed", "renamed"])
@pytest.mark.parametrize("corpus", NAMES)
def test_words(tmp_path, corpus, renamed):
    folder = write(tmp_path / "input", "{}.txt" if renamed else NAMES[corpus])
    tokens, tokenizer, information = load(prepare(tmp_path, corpus, "--input", folder))
    texts = {split: text.lower() if corpus == "ptb" else text for split, text in LINES.items()}
    counted = texts["train"] if corpus == "wikitext-103" else "".join(texts.values())
    symbols = by_frequency(counted.split(), first=("<eos>",))
    assert tokenizer.symbols == symbols
    for split, text in texts.items():
        expected = [word if word in symbols else "<unk>" for word in words_of(text)]
        assert tokenizer.convert_ids_to_tokens(tokens[split]) == expected
        counts = information["splits"][split]
        assert counts["words"] == len(expected)
        assert (counts["characters"], counts["bytes"]) == (len(text), len(text.encode()))
    assert information["line_end"] == "<eos>"


def test_archive_as_distributed(tmp_path):
    folder = write(tmp_path / "files" / "wikitext-2", "wiki.{}.tokens")
    with zipfile.ZipFile(tmp_path / "wikitext-2-v1.zip", "w") as archive:
        for path in folder.iterdir():
            archive.write(path, f"wikitext-2/{path.name}")
    direct, *_ = load(prepare(tmp_path, "wikitext-2", "--input", folder))
    (tmp_path / "output").rename(tmp_path / "direct")
    assert load(prepare(tmp_path, "wikitext-2", "--input", tmp_path / "wikitext-2-v1.zip"))[0] == direct


def lm1b(folder: Path) -> Path:
    training = folder / "training-monolingual.tokenized.shuffled"
    held_out = folder / "heldout-monolingual.tokenized.shuffled"
    training.mkdir(parents=True)
    held_out.mkdir()
    for number in range(1, 4):
        (training / f"news.en-0000{number}-of-00100").write_text(f"The cat sat .\nThe dog{number} ran .\n")
    for number in range(2):
        (held_out / f"news.en.heldout-0000{number}-of-00050").write_text(f"The cat {number} ran .\n")
    return folder


def test_lm1b_of_many_files(tmp_path):
    folder = lm1b(tmp_path / "1-billion-word-language-modeling-benchmark-r13output")
    tokens, tokenizer, information = load(prepare(tmp_path, "lm1b", "--input", folder))
    # Words that occur three times.
    assert sorted(tokenizer.symbols) == sorted(["<S>", "<UNK>", "The", ".", "cat", "sat", "ran"])
    decoded = {split: tokenizer.convert_ids_to_tokens(ids) for split, ids in tokens.items()}
    assert decoded["train"] == "<S> The cat sat . <S> <S> The <UNK> ran . <S>".split() * 3
    assert decoded["validation"] == decoded["test"] == "<S> The cat <UNK> ran . <S>".split()
    assert information["splits"]["test"]["words"] == 6, "the sentence's end counts, its beginning does not"


def test_lm1b_with_its_vocabulary(tmp_path):
    folder = lm1b(tmp_path / "one-billion-words")
    symbols = ["<S>", "The", ".", "dog1", "<UNK>", "0"]
    (folder / "1b_word_vocab.txt").write_text("".join(f"{symbol} 7\n" for symbol in symbols))
    tokens, tokenizer, _ = load(prepare(tmp_path, "lm1b", "--input", folder))
    assert tokenizer.symbols == symbols
    assert tokenizer.convert_ids_to_tokens(tokens["test"]) == "<S> The <UNK> 0 <UNK> . <S>".split()


def original_bytes(data: bytes) -> list[str]:
    """The symbols of enwik8 as the original's preparation writes them: decimal numbers, lines without ends."""
    return " ".join("\n" if byte == 10 else str(byte) for byte in data).split()


@pytest.mark.parametrize("layout", ["file", "folder", "zip", "raw"])
def test_enwik8(tmp_path, layout, capsys):
    # 5 % from the end is within a character: bytes know nothing of characters.
    data = ("<page>\n  <title>Äé€</title>\n</page>\n" * 30).encode()
    data = data[: len(data) // 20 * 20]
    part = len(data) // 20
    parts = {"train": data[: -2 * part], "validation": data[-2 * part : -part], "test": data[-part:]}
    folder = tmp_path / "enwik8"
    folder.mkdir()
    path = {"file": folder / "enwik8", "folder": folder, "zip": folder / "enwik8.zip", "raw": folder}[layout]
    if layout == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("enwik8", data)
    elif layout == "raw":
        for name, split in zip(("train", "valid", "test"), SPLITS, strict=True):
            (folder / f"{name}.txt").write_text(" ".join(original_bytes(parts[split])))
            (folder / f"{name}.txt.raw").write_bytes(parts[split])
    else:
        (folder / "enwik8").write_bytes(data)

    tokens, tokenizer, information = load(prepare(tmp_path, "enwik8", "--input", path))
    assert tokenizer.symbols == by_frequency([symbol for split in SPLITS for symbol in original_bytes(parts[split])])
    for split, ids in tokens.items():
        assert [tokenizer.symbols[index] for index in ids] == original_bytes(parts[split])
        counts = information["splits"][split]
        assert (counts["characters"], counts["bytes"]) == (len(ids), len(parts[split]))
    encoded = tokenizer.encode(parts["train"].decode(errors="ignore"))
    assert len(encoded) > 800 and encoded == tokens["train"][: len(encoded)], "the tokenizer reads text as it was read"
    assert ("not the whole corpus" in capsys.readouterr().err) == (layout != "raw")


def test_text8(tmp_path):
    text = " " + "anarchism originated as a term of abuse " * 20
    (tmp_path / "text8").write_text(text)
    tokens, tokenizer, information = load(prepare(tmp_path, "text8", "--input", tmp_path / "text8"))
    part = len(text) // 20
    parts = {"train": text[: -2 * part], "validation": text[-2 * part : -part], "test": text[-part:]}
    parts = {split: part.strip() for split, part in parts.items()}
    assert tokenizer.symbols == by_frequency(list("".join(parts.values()).replace(" ", "_"))), "none of ours beside"
    with pytest.raises(ValueError, match="'É' is not in the vocabulary.*txl-prepare --corpus text does .--mode char"):
        tokenizer("É")
    for split, ids in tokens.items():
        assert tokenizer.decode(ids) == parts[split]
        assert tokenizer.encode(parts[split]) == ids
        assert information["splits"][split]["characters"] == len(ids)


@pytest.mark.parametrize("mode", ["whitespace", "moses", "characters", "bytes"])
def test_text_in_one_file(tmp_path, mode):
    lines = [f"Line {number} of Zoë's text.\n" for number in range(60)]
    (tmp_path / "book.txt").write_text("".join(lines), encoding="utf-8")
    tokens, tokenizer, information = load(prepare(tmp_path, "text", "--input", tmp_path / "book.txt", "--mode", mode))
    parts = {"train": lines[:54], "validation": lines[54:57], "test": lines[57:]}
    closed = mode in ("characters", "bytes")
    for split, ids in tokens.items():
        assert ids == tokenizer.encode_lines(parts[split], add_eos=not closed).tolist()
        assert information["splits"][split]["words"] == 6 * len(parts[split])
    if closed:
        assert tokenizer.decode(tokens["test"]) == "".join(parts["test"])
    else:
        assert tokenizer.unk_token_id in tokens["test"], "57 is not in the training text"


def test_text_in_a_folder_of_files(tmp_path):
    letters = {f"letter-{number}": f"Dear Zoë, this is letter {number}.\n" * 20 for number in range(3)}
    folder = write(tmp_path / "letters", "{}.txt", letters)
    (folder / "stamp.png").write_bytes(b"\x89PNG")
    tokens, tokenizer, _ = load(prepare(tmp_path, "text", "--input", folder, "--mode", "characters"))
    assert tokenizer.decode(sum(tokens.values(), [])) == "".join(letters.values())
    assert [len(tokens[split]) for split in SPLITS] == [54 * 28, 3 * 28, 3 * 28]


def test_hidden_files_are_no_text(tmp_path):
    folder = write(tmp_path / "books", "{}.txt", {"book": "The end .\n" * 40})
    write(folder / ".ipynb_checkpoints", "{}-checkpoint.txt", {"book": "The end .\n" * 40})
    archive = tmp_path / "books.zip"
    with zipfile.ZipFile(archive, "w") as files:
        files.write(folder / "book.txt", "books/book.txt")
        files.writestr("__MACOSX/books/._book.txt", b"\x00\x05\x16\x07\xff")
    for number, given in enumerate([folder, archive]):
        (tmp_path / str(number)).mkdir()
        tokens, _, information = load(prepare(tmp_path / str(number), "text", "--input", given))
        assert [name.rpartition("/")[2] for name in information["files"]["train"]] == ["book.txt"]
        assert len(tokens["train"]) == 36 * 4


def test_text_options(tmp_path):
    folder = write(tmp_path / "input", "{}.txt")
    _, tokenizer, _ = load(prepare(tmp_path, "text", "--input", folder, "--lower_case", "--min_freq", "6"))
    assert tokenizer.symbols == ["<eos>", "<unk>", "<pad>", "the", "=", "was", "door", "."]
    _, tokenizer, _ = load(prepare(tmp_path / "small", "text", "--input", folder, "--lower_case", "--max_size", "3"))
    assert tokenizer.symbols == ["<eos>", "<unk>", "<pad>", "the", "=", "was"]


def test_a_file_is_the_split_that_its_name_tells(tmp_path, capsys):
    """A folder of ptb.train.txt and so on was once taken for one text, and the test text trained on."""
    expected = None
    layouts = ["ptb.{}.txt", "my.{}.txt", "{}-00000-of-00001.txt", "{}/text.txt", "wiki.{}.tokens", "WIKI.{}.RAW"]
    for number, layout in enumerate(layouts):
        folder = tmp_path / str(number) / "input"
        for split, text in LINES.items():
            name = layout.format({"validation": ["valid", "validation", "val", "dev"][number % 4]}.get(split, split))
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        (folder / "README.txt").write_text("What the files are.")
        tokens, tokenizer, information = load(prepare(tmp_path / str(number), "text", "--input", folder))
        assert tokenizer.decode(tokens["test"]).startswith("It was <unk> Wolf")
        expected = expected or tokens
        assert tokens == expected
        assert list(information["files"]) == list(SPLITS) and len(information["files"]["test"]) == 1
        printed = capsys.readouterr().out
        assert f"test: {information['files']['test'][0]}\n" in printed and "not read: README.txt\n" in printed


@pytest.mark.parametrize(
    "name, split",
    [
        ("PTBTrain.txt", "train"),
        ("ptbTest2.txt", "test"),
        ("TRAIN-01.TXT", "train"),
        ("bookDev.txt", "validation"),
        ("testing/a.txt", "test"),
        ("contest.txt", None),
        ("latest.txt", None),
    ],
)
def test_words_of_a_name_tell_its_split(tmp_path, name, split):
    assert split_of(tmp_path / name, tmp_path) == split


def test_files_that_are_one_text_are_told(tmp_path, capsys):
    folder = write(tmp_path / "letters", "{}.txt", {f"letter-{number}": f"Letter {number}.\n" * 20 for number in "ab"})
    _, _, information = load(prepare(tmp_path, "text", "--input", folder))
    assert information["files"] == {"train": ["letter-a.txt", "letter-b.txt"]}
    assert "to be cut into train, validation and test: letter-a.txt, letter-b.txt\n" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["whitespace", "moses", "characters", "bytes"])
def test_clients_find_the_special_tokens_that_they_ask_for(tmp_path, mode):
    """An unknown character, a batch to pad, an end of text, line ends in a call as in the corpus."""
    folder = write(tmp_path / "input", "{}.txt")
    tokens, tokenizer, _ = load(prepare(tmp_path, "text", "--input", folder, "--mode", mode))
    assert (tokenizer.eos_token, tokenizer.unk_token, tokenizer.pad_token) == ("<eos>", "<unk>", "<pad>")
    assert tokenizer.symbols[:2] == ["<eos>", "<unk>"] or tokenizer.symbols[:2] == ["<eos>", "<pad>"]
    assert tokenizer("☃")["input_ids"][0] == tokenizer.unk_token_id
    batch = tokenizer(["The", "The House ☃"], padding=True)
    assert batch["attention_mask"][0][0] == 0 and batch["input_ids"][0][0] == tokenizer.pad_token_id
    assert tokenizer(LINES["test"])["input_ids"] == tokens["test"]


def test_published_corpora_keep_their_vocabularies_and_read_line_ends(tmp_path):
    folder = write(tmp_path / "input", "wiki.{}.tokens")
    tokens, tokenizer, _ = load(prepare(tmp_path, "wikitext-2", "--input", folder))
    assert "<pad>" not in tokenizer.symbols and tokenizer.pad_token == "<eos>"
    assert tokenizer(LINES["train"])["input_ids"] == tokens["train"]


@pytest.mark.parametrize("name", ["My Books [2021]/book.txt", "x::y/book.txt", "a*b?{c}/book.txt", "file:/book.txt"])
def test_no_name_is_taken_for_a_pattern(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir()
    path.write_text("The end .\n" * 40)
    for number, given in enumerate([path, path.parent]):
        (tmp_path / str(number)).mkdir()
        tokens, *_ = load(prepare(tmp_path / str(number), "text", "--input", given))
        assert len(tokens["train"]) == 36 * 4


def test_a_folder_whose_name_is_a_pattern_to_datasets_is_explained(tmp_path):
    folder = tmp_path / "a text [v2]"
    folder.mkdir()
    for split in SPLITS:
        (folder / f"{split}.jsonl").write_text('{"text": "a b c"}')
    options = ["--corpus", "text", "--dataset", str(folder), "--output", str(tmp_path / "output")]
    with pytest.raises(SystemExit, match="takes brackets, asterisks and question marks in a folder's name for pat"):
        prepare_corpus.main(options)


def test_an_output_that_could_not_be_read_again_is_refused(tmp_path):
    folder = write(tmp_path / "input", "{}.txt")
    with pytest.raises(SystemExit, match="chain of file systems"):
        prepare_corpus.main(["--corpus", "text", "--input", str(folder), "--output", str(tmp_path / "a::b" / "c")])
    assert not (tmp_path / "a::b").exists()
    brackets = tmp_path / "data [2]"
    brackets.mkdir()
    load(prepare(brackets, "text", "--input", folder))


WITHOUT = """
import sys
for name in sys.argv.pop(1).split(","):
    sys.modules[name] = None
from txl_hf.commands.prepare_corpus import main
main(sys.argv[1:])
"""


def test_what_is_not_installed_is_said_and_help_needs_nothing(tmp_path):
    folder = write(tmp_path / "input", "{}.txt")
    command = ["-c", WITHOUT, "datasets,pyarrow"]
    helped = run_script(*command, "--help", only_torch=True)
    assert helped.returncode == 0 and "--num_proc" in helped.stdout
    command += ["--corpus", "text", "--input", folder, "--output", tmp_path / "output"]
    refused = run_script(*command, only_torch=True)
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1
    assert 'is not installed: pip install "txl-hf[train]"' in refused.stderr


def test_a_log_has_no_progress_bars(tmp_path):
    folder = write(tmp_path / "input", "{}.txt", dict.fromkeys(LINES, LINES["train"]))
    command = [prepare_corpus.__file__, "--corpus", "text", "--num_proc", "1"]
    run = run_script(*command, "--input", folder, "--output", tmp_path / "output")
    assert (run.returncode, run.stderr) == (0, "") and "holds text with a vocabulary of" in run.stdout


def test_a_program_that_prepares_keeps_its_bars_and_handlers(tmp_path):
    before = datasets.are_progress_bars_disabled(), signal.getsignal(signal.SIGTERM)
    prepare(tmp_path, "text", "--input", write(tmp_path / "input", "{}.txt"))
    assert (datasets.are_progress_bars_disabled(), signal.getsignal(signal.SIGTERM)) == before


def test_hyphens_stand_for_underscores(tmp_path):
    folder = write(tmp_path / "input", "{}.txt")
    arguments = ["--corpus", "text", "--input", str(folder), "--lower-case", "--min-freq=6", "--num-proc", "1"]
    prepare_corpus.main([*arguments, "--output", str(tmp_path / "output")])
    assert load(tmp_path / "output")[1].symbols[3:] == ["the", "=", "was", "door", "."]


@pytest.mark.parametrize("held_out", ["NNNNN\nn n\nACGT\n", "NNN\n"], ids=["some", "all"])
def test_characters_without_a_token_are_told_and_divide_no_figure(tmp_path, capsys, held_out):
    """A sub-word tokenizer without `unk_token` passes over what it lacks, and 4 of 12 characters had all the bits."""
    bases = {"<pad>": 0, "A": 1, "C": 2, "G": 3, "T": 4}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(bases, [])), pad_token="<pad>")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    folder = tmp_path / "input"
    folder.mkdir()
    for split, text in {"train": "ACGT\n" * 20, "valid": "GATTACA\n", "test": held_out}.items():
        (folder / f"{split}.txt").write_text(text)
    options = ["--input", folder, "--tokenizer", tmp_path / "tokenizer"]
    if held_out == "NNN\n":
        with pytest.raises(SystemExit, match="the test text of input has no token: the tokenizer lacks all of it"):
            prepare(tmp_path, "text", *options)
        return
    splits = load(prepare(tmp_path, "text", *options))[2]["splits"]
    assert "the test text: 7 characters have no token and are passed over: 'N' (5), 'n' (2)" in capsys.readouterr().err
    assert splits["test"]["characters_without_token"] == 7 and "characters_without_token" not in splits["validation"]
    held, whole = (read_prepared(tmp_path / "output", split) for split in ("test", "validation"))
    assert (len(held.token_ids), held.words, held.characters) == (4, None, None)
    assert (len(whole.token_ids), whole.words, whole.characters) == (7, 2, 8)
    raw = read_raw(folder / "test.txt", tokenizer)
    assert (len(raw.token_ids), raw.words, raw.characters) == (4, None, None)


@pytest.mark.parametrize("form", [normalizers.NFC, normalizers.NFKC])
def test_what_a_tokenizer_joins_to_one_character_has_a_token(form, tmp_path, capsys):
    """An accent behind its letter: the token is of the letter's place alone."""
    backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    backend.normalizer, backend.pre_tokenizer = form(), pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = tmp_path / "text.txt"
    text.write_text("un cafe\u0301 noir\n\u1112\u1161\u11ab\n", encoding="utf-8")
    read = read_raw(text, PreTrainedTokenizerFast(tokenizer_object=backend))
    assert (read.words, read.characters) == (6, 18) and not capsys.readouterr().err


def of_bytes(folder: Path) -> Path:
    """A tokenizer of transformers whose symbols are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    return folder


def test_another_tokenizer(tmp_path):
    """A tokenizer of sub-words reads the text itself, line feeds too."""
    path = write(tmp_path / "input", "wiki.{}.tokens")
    folder = prepare(tmp_path, "wikitext-2", "--input", path, "--tokenizer", of_bytes(tmp_path / "tokenizer"))
    tokens, tokenizer, information = load(folder)
    assert {split: tokenizer.decode(ids) for split, ids in tokens.items()} == LINES
    assert information["line_end"] is None
    # A file of the same text has the same words and characters, and so the same figures.
    read, raw = read_prepared(folder, "test"), read_raw(path / "wiki.test.tokens", tokenizer)
    assert (read.words, read.characters) == (raw.words, raw.characters) == (counts_of(LINES["test"]))


@pytest.mark.parametrize("corpus", ["enwik8", "text8"])
def test_a_stream_has_its_own_symbols(tmp_path, corpus):
    """Another tokenizer is refused, with what reads the file for it; that of the corpus passes."""
    (tmp_path / corpus).write_text("all the world is a stage " * 500)
    options = ["--input", tmp_path / corpus, "--tokenizer"]
    with pytest.raises(SystemExit, match=f"--corpus {corpus} is one stream of .* with --corpus text"):
        prepare(tmp_path, corpus, *options, of_bytes(tmp_path / "tokenizer"))
    own = prepare(tmp_path, corpus, "--input", tmp_path / corpus).rename(tmp_path / "own")
    assert load(prepare(tmp_path, corpus, *options, own))[0] == load(own)[0]


def counts_of(text):
    """Words, with one more for the end of each line, and characters."""
    return len(text.split()) + len(text.splitlines()), len(text)


@pytest.mark.parametrize("mode", ["characters", "bytes", "whitespace"])
def test_lines_of_two_files_are_two(tmp_path, mode):
    """A file without a line feed at its end was gone on with by the next one's first word."""
    folder = tmp_path / "input"
    (folder / "train").mkdir(parents=True)
    for name, text in {"train/a": "one\nlast", "train/b": "first\ntwo", "test": "two", "valid": "two"}.items():
        (folder / f"{name}.txt").write_text(text)
    tokens, tokenizer, information = load(prepare(tmp_path, "text", "--input", folder, "--mode", mode))
    text = tokenizer.decode(tokens["train"], skip_special_tokens=True)
    assert text.rstrip("\n") == "one\nlast\nfirst\ntwo"
    assert information["splits"]["train"]["characters"] == len("one\nlast\nfirst\ntwo")


def test_linked_folders_are_read_and_links_that_lead_nowhere_named(tmp_path):
    """Half of a text was left out, and nothing said."""
    folder, store = tmp_path / "input", tmp_path / "store"
    (store / "more").mkdir(parents=True)
    folder.mkdir()
    (folder / "a.txt").write_text("one two\n" * 40)
    (store / "more" / "b.txt").write_text("three four\n" * 40)
    (store / "more" / "back").symlink_to(store)
    (folder / "books").symlink_to(store / "more")
    _, _, information = load(prepare(tmp_path, "text", "--input", folder, "--mode", "whitespace"))
    assert information["files"] == {"train": ["a.txt", "books/b.txt"]} and information["vocab_size"] == 3 + 4
    (folder / "c.txt").symlink_to(store / "gone.txt")
    with pytest.raises(SystemExit, match="c.txt is a link that leads nowhere"):
        prepare_corpus.main(["--corpus", "text", "--input", str(folder), "--output", str(tmp_path / "another")])


@pytest.mark.parametrize("packed", ["tar", "TGZ", "tar.xz", "ZIP"])
def test_splits_in_an_archive_stay_splits(tmp_path, packed):
    """A tar file was read as one text, headers and all, and cut anew: test text was trained on."""
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text(f"{split} text\n" * 30)
    path = tmp_path / f"corpus.{packed}"
    if packed == "ZIP":
        with zipfile.ZipFile(path, "w") as archive:
            for split in ("train", "valid", "test"):
                archive.write(tmp_path / f"{split}.txt", f"{split}.txt")
    else:
        with tarfile.open(path, {"tar": "w", "TGZ": "w:gz", "tar.xz": "w:xz"}[packed]) as archive:
            for split in ("train", "valid", "test"):
                archive.add(tmp_path / f"{split}.txt", f"{split}.txt")
    tokens, tokenizer, information = load(prepare(tmp_path, "text", "--input", path, "--mode", "whitespace"))
    assert information["files"]["test"] == ["test.txt"]
    assert tokenizer.decode(tokens["train"][:2]) == "train text"


def test_zero_bytes_are_no_text(tmp_path):
    (tmp_path / "input.txt").write_bytes(("a b c\n" * 60).encode("utf-16-le"))
    options = ["--corpus", "text", "--input", str(tmp_path / "input.txt"), "--output", str(tmp_path / "output")]
    with pytest.raises(SystemExit, match="input.txt is no text: it has zero bytes"):
        prepare_corpus.main(options)
    tokenizer = TransfoXLTokenizer.from_symbols(["<unk>", "a"], mode="whitespace")
    with pytest.raises(ValueError, match="input.txt is no text: it has zero bytes"):
        read_raw(tmp_path / "input.txt", tokenizer)
    tokens, _, _ = load(prepare(tmp_path, "text", "--input", tmp_path / "input.txt", "--mode", "bytes"))
    assert sum(map(len, tokens.values())) == 60 * 12


def test_a_folder_is_named_that_is_given_as_the_present_one(tmp_path, monkeypatch):
    folder = tmp_path / "a book"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_text("a b c\n")
    monkeypatch.chdir(folder)
    _, _, information = load(prepare(tmp_path, "text", "--input", ".", "--mode", "characters"))
    assert information["source"] == "a book"


@pytest.mark.parametrize("given", [False, True], ids=["vocabulary of the text", "another tokenizer"])
def test_what_the_unknown_token_stands_for_is_told_and_divides_no_figure(tmp_path, capsys, given):
    """Half of a book was unknown to a vocabulary of 60 words, at 0.6 bits a character. What spells it is known."""
    folder, options = tmp_path / "input", ["--mode", "whitespace", "--min_freq", "2"]
    folder.mkdir()
    lines = {"train": "the cat sat\n" * 20, "valid": "the cat <unk>\n", "test": "the dog sat\n"}
    for split, text in lines.items():
        (folder / f"{split}.txt").write_text(text)
    if given:
        TransfoXLTokenizer.from_symbols(["<unk>", "<eos>", "the", "cat", "sat"], mode="whitespace").save_pretrained(
            tmp_path / "tokenizer"
        )
        options = ["--tokenizer", tmp_path / "tokenizer"]
    _, tokenizer, information = load(prepare(tmp_path, "text", "--input", folder, *options))
    assert "the test text: <unk> stands for 3 characters, of what the vocabulary lacks." in capsys.readouterr().err
    assert information["splits"]["test"]["characters_unknown"] == 3
    assert "characters_unknown" not in information["splits"]["validation"]
    test, validation = (read_prepared(tmp_path / "output", split) for split in ("test", "validation"))
    assert (test.words, test.characters) == (4, None) and (validation.words, validation.characters) == (4, 14)
    raw = read_raw(folder / "test.txt", tokenizer)
    assert (raw.words, raw.characters) == (4, None)


def test_dataset(tmp_path):
    """As the Hub has WikiText: a row a line, blank ones without their end."""
    direct, *_ = load(prepare(tmp_path, "wikitext-2", "--input", write(tmp_path / "input", "wiki.{}.tokens")))
    (tmp_path / "output").rename(tmp_path / "direct")
    for split, text in LINES.items():
        rows = [line if line.strip() else "" for line in text.splitlines(keepends=True)]
        Dataset.from_dict({"sentence": rows}).to_parquet(tmp_path / "dataset" / f"{split}.parquet")
    folder = prepare(tmp_path, "wikitext-2", "--dataset", tmp_path / "dataset", "--column", "sentence")
    assert load(folder)[0] == direct


@pytest.mark.parametrize("corpus", ["wikitext-2", "lm1b", "text"])
def test_a_row_of_several_lines_is_these_lines(tmp_path, corpus):
    """Its words are as many as in a file with the same text, whatever ends the lines."""
    pattern = {"lm1b": "news.en-{}", "text": "{}.txt", "wikitext-2": "wiki.{}.tokens"}[corpus]
    folder = write(tmp_path / "input", pattern)
    if corpus == "lm1b":
        (folder / "news.en-test").rename(folder / "news.en.heldout-00000-of-00050")
        (folder / "news.en-valid").unlink()
    direct, _, expected = load(prepare(tmp_path, corpus, "--input", folder))
    (tmp_path / "output").rename(tmp_path / "direct")
    texts = LINES | {"validation": LINES["test"]} if corpus == "lm1b" else LINES
    for split, text in texts.items():
        lines = text.splitlines()
        rows = ["\n".join(lines[:2]) + "\n", "\r\n".join(lines[2:])] if len(lines) > 2 else [text]
        Dataset.from_dict({"text": rows}).to_parquet(tmp_path / "dataset" / f"{split}.parquet")
    tokens, _, information = load(prepare(tmp_path, corpus, "--dataset", tmp_path / "dataset"))
    assert tokens == direct and information["splits"] == expected["splits"]


@pytest.mark.parametrize(
    ("corpus", "rows", "message"),
    [
        ("text", ["a", "b", None], "has no text in row 2, the first being 0: leave out"),
        ("enwik8", [None, "b"], "has no text in row 0, the first being 0: leave out"),
        ("text", [1, 2], "has rows of type int64, which are no text: choose another"),
    ],
)
def test_a_row_that_is_no_text_is_named(tmp_path, corpus, rows, message):
    for split in SPLITS:
        Dataset.from_dict({"text": rows}).to_parquet(tmp_path / "dataset" / f"{split}.parquet")
    with pytest.raises(SystemExit, match=f"column text of train of the data set .*dataset {message}") as refused:
        prepare(tmp_path, corpus, "--dataset", tmp_path / "dataset")
    assert "\n" not in refused.value.code


def write_splits(folder, *splits):
    """A data set whose splits are called so, each of 60 rows of its own."""
    files = "".join(f"  - split: {split}\n    path: {split}.parquet\n" for split in splits)
    folder.mkdir()
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}---\n")
    for split in splits:
        Dataset.from_dict({"text": [f"{split} {n}" for n in range(60)]}).to_parquet(folder / f"{split}.parquet")


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (["train", "test"], "has no split validation; it has train, test: give one with train, validation, test, or"),
        (["train", "validation"], "has no split test; it has train, validation: give one with"),
        (["train", "heldout"], "no split validation, test; it has train, heldout: give .* train alone, which is cut"),
        (
            ["train", "dev", "val", "test"],
            "dev and val, each of which is named after validation: give one with one of",
        ),
    ],
)
def test_a_text_that_may_be_held_out_is_not_left_out(tmp_path, splits, message):
    write_splits(tmp_path / "dataset", *splits)
    with pytest.raises(SystemExit, match=message):
        prepare(tmp_path, "text", "--dataset", tmp_path / "dataset", "--mode", "whitespace")


@pytest.mark.parametrize(
    ("splits", "unread"),
    [
        (["training", "dev", "testing"], None),
        (["train", "validation_matched", "test_matched", "unsupervised"], "unsupervised"),
        (["train_small", "train", "validation", "test"], "train_small"),
        (["train", "validation", "test", "dev_test"], "dev_test"),
    ],
)
def test_the_words_in_the_name_of_a_data_sets_split_tell_which_it_is(tmp_path, capsys, splits, unread):
    write_splits(tmp_path / "dataset", *splits)
    tokens, tokenizer, _ = load(prepare(tmp_path, "text", "--dataset", tmp_path / "dataset", "--mode", "characters"))
    read = ["".join(f"{split} {n}\n" for n in range(60)) for split in splits if split != unread]
    assert [tokenizer.decode(ids) for ids in tokens.values()] == read
    printed = capsys.readouterr().out
    assert f"not read: {unread}\n" in printed if unread else "not read" not in printed


def test_an_encrypted_archive_is_named(tmp_path):
    archive = tmp_path / "texts.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("train.txt", "a b\n")
    data = bytearray(archive.read_bytes())
    # The flag, in the file's own header and in the directory.
    for header, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(header) + place] |= 1
    archive.write_bytes(data)
    with pytest.raises(SystemExit, match=r"texts.zip cannot be unpacked: .*encrypted"):
        prepare(tmp_path, "text", "--input", archive)


def test_processes_and_a_stream_of_segments(tmp_path, monkeypatch):
    """The command as typed; several processes give the tokens of one, and TokenStream reads them from the disk."""
    text = {split: "".join(f"line {n % 7} of {split}\n" for n in range(9000)) for split in SPLITS}
    folder = write(tmp_path / "input", "wiki.{}.tokens", text)
    # On a terminal bars say what is done by how many.
    code = f"import sys; sys.stderr.isatty = lambda: True; sys.path.insert(0, {str(EXAMPLES)!r})\n"
    code += "import prepare_corpus; prepare_corpus.main(sys.argv[1:])"
    command = ["-c", code, "--corpus", "wikitext-2", "--input", folder, "--output", tmp_path / "two"]
    result = run_script(*command, "--num_proc", "2")
    assert result.returncode == 0, result.stderr
    assert "tokenise (num_proc=2)" in result.stderr
    assert "45,000 tokens" in result.stdout
    tokens, tokenizer, _ = load(tmp_path / "two")
    assert tokenizer.convert_ids_to_tokens(tokens["test"]) == words_of(text["test"])
    train = load_from_disk(tmp_path / "two")["train"]
    stream = TokenStream(train.with_format("numpy")["token_ids"], segment_length=8, batch_size=2)
    assert stream[2]["input_ids"].tolist() == tokens["train"][8:16]


def twice(folder: Path) -> Path:
    write(folder / "old", "ptb.{}.txt")
    write(folder / "new", "ptb.{}.txt")
    return folder


@pytest.mark.parametrize(
    ("corpus", "make", "message"),
    [
        ("ptb", lambda folder: folder / "nowhere", "nowhere does not exist"),
        ("ptb", lambda folder: write(folder, "wiki.{}.tokens"), "is not laid out as ptb, which is ptb.train.txt"),
        ("ptb", lambda folder: write(folder, "ptb.{}.txt", {"train": "a"}), "it has ptb.train.txt"),
        ("ptb", lambda folder: write(folder, "{}") / "train", "is one file, but ptb is ptb.train.txt"),
        ("ptb", lambda folder: write(folder, "ptb.{}.txt", LINES | {"test": "\n \n"}), "the test text of .* is empty"),
        ("ptb", lambda folder: twice(folder), "which of them"),
        ("text8", lambda folder: write(folder, "{}", {"text8": "Not lower case. " * 9}), "this text has 'N'"),
        ("text", lambda folder: write(folder, "{}", {"book": "one line"}) / "book", "too short to hold out"),
        (
            "text",
            lambda folder: write(folder, "{}.txt", {"train": "a", "test": "b"}),
            "no file for validation .*test: test.txt; train: train.txt",
        ),
        (
            "text",
            lambda folder: write(folder, "my.{}.txt", {"a": "a\n" * 40, "test": "b"}),
            "no file for train and val",
        ),
        (
            "text",
            lambda folder: write(folder, "{}.txt", {"train_test": "a"}),
            "train_test.txt is named after test and",
        ),
        ("text", lambda folder: write(folder, "{}.png", {"a": "a", "b": "b"}), r"has no text, .*\.txt"),
        ("enwik8", lambda folder: write(folder, "{}", {"enwik8": ""}), "too short"),
    ],
)
def test_bad_input_is_one_line(tmp_path, corpus, make, message):
    with pytest.raises(SystemExit, match=message) as error:
        prepare(tmp_path, corpus, "--input", make(tmp_path / "input"))
    assert str(error.value).startswith("error: ") and "\n" not in str(error.value)
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize("mode", ["whitespace", "characters"])
def test_byte_order_mark_and_line_ends_of_windows(tmp_path, mode):
    """They are no part of the text."""
    text = "It was a Wolf , café N .\n\nThe end .\n" * 20
    results = []
    for name, data in {"plain": text.encode(), "windows": text.replace("\n", "\r\n").encode("utf-8-sig")}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "book.txt").write_bytes(data)
        output = prepare(tmp_path / name, "text", "--input", tmp_path / name / "book.txt", "--mode", mode)
        tokens, tokenizer, information = load(output)
        results.append((tokens, tokenizer.get_vocab(), information["splits"]))
    assert results[0] == results[1]


@pytest.mark.parametrize("begun_from", ["its symbols", "a tokenizer", "a data set"])
def test_bytes_are_all_kept(tmp_path, begun_from):
    """Carriage returns and a byte-order mark too, as `encode_file` and `txl-evaluate` read them."""
    data = b"\xef\xbb\xbfIt was a Wolf ,\r\ncaf\xc3\xa9\rN .\n" * 2
    (tmp_path / "input").mkdir()
    for name in ("train", "valid", "test"):
        (tmp_path / "input" / f"{name}.txt").write_bytes(data)
    begun = ["--input", tmp_path / "input", "--mode", "bytes"]
    if begun_from == "a tokenizer":
        TransfoXLTokenizer.train_from_iterator([data.decode()], mode="bytes").save_pretrained(tmp_path / "tokenizer")
        begun = ["--input", tmp_path / "input", "--tokenizer", tmp_path / "tokenizer"]
    if begun_from == "a data set":
        (tmp_path / "rows").mkdir()
        for split in SPLITS:
            (tmp_path / "rows" / f"{split}.jsonl").write_text(json.dumps({"text": data.decode()}) + "\n")
        begun = ["--dataset", tmp_path / "rows", "--mode", "bytes"]
    tokens, tokenizer, information = load(prepare(tmp_path, "text", *begun))
    for split in SPLITS:
        assert bytes(int(tokenizer.symbols[token]) for token in tokens[split]) == data
        assert information["splits"][split]["bytes"] == information["splits"][split]["tokens"] == len(data)
    file = tmp_path / "input" / "test.txt"
    assert tokenizer.encode_file(file).tolist() == tokens["test"]
    assert read_raw(file, tokenizer).token_ids.tolist() == tokens["test"]


def test_an_empty_file(tmp_path):
    (tmp_path / "book.txt").write_bytes(b"")
    with pytest.raises(SystemExit, match="the train text of book.txt is empty"):
        prepare(tmp_path, "text", "--input", tmp_path / "book.txt")
    folder = write(tmp_path / "input", "ptb.{}.txt", LINES | {"test": ""})
    with pytest.raises(SystemExit, match="the test text of input is empty"):
        prepare(tmp_path, "ptb", "--input", folder)


def test_bytes_that_are_no_text(tmp_path):
    folder = write(tmp_path / "input", "ptb.{}.txt")
    (folder / "ptb.test.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(SystemExit, match="is not UTF-8 text"):
        prepare(tmp_path, "ptb", "--input", folder)


def test_broken_archive(tmp_path):
    (tmp_path / "simple-examples.tgz").write_bytes(b"\x1f\x8b no archive")
    with pytest.raises(SystemExit, match="simple-examples.tgz cannot be unpacked"):
        prepare(tmp_path, "ptb", "--input", tmp_path / "simple-examples.tgz")


def tar_of(path: Path, test: tarfile.TarInfo):
    with tarfile.open(path, "w:gz") as archive:
        members = {"train": member("data/ptb.train.txt"), "validation": member("data/ptb.valid.txt"), "test": test}
        for split, info in members.items():
            content = LINES[split].encode() if info.isfile() else b""
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def member(name: str, kind: bytes = tarfile.REGTYPE, leads_to: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, leads_to
    return info


def test_a_link_within_an_archive_is_what_it_leads_to(tmp_path):
    link = member("data/ptb.test.txt", tarfile.SYMTYPE, "ptb.valid.txt")
    tar_of(tmp_path / "input.tgz", test=link)
    prepare(tmp_path, "ptb", "--input", tmp_path / "input.tgz")
    counts = json.loads((tmp_path / "output" / "corpus.json").read_text())["splits"]
    assert counts["test"] == counts["validation"]


@pytest.mark.parametrize(
    "bad",
    [
        member("../ptb.test.txt"),
        member("data/ptb.test.txt", tarfile.SYMTYPE, "/etc/hostname"),
        member("data/ptb.test.txt", tarfile.SYMTYPE, "../../outside.txt"),
        member("data/ptb.test.txt", tarfile.FIFOTYPE),
    ],
    ids=["above", "link elsewhere", "link above", "pipe"],
)
def test_nothing_of_an_archive_leaves_its_folder(tmp_path, bad):
    (tmp_path / "outside.txt").write_text("secret\n")
    tar_of(tmp_path / "input.tgz", test=bad)
    said = r"input.tgz cannot be unpacked: '.*ptb.test.txt' (would|is a (special|link))"
    with pytest.raises(SystemExit, match=said):
        prepare(tmp_path, "ptb", "--input", tmp_path / "input.tgz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["input.tgz", "outside.txt"]


def test_output_that_exists_is_kept(tmp_path):
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "thesis.txt").write_text("mine")
    with pytest.raises(SystemExit, match="output exists"):
        prepare(tmp_path, "ptb", "--input", write(tmp_path / "input", "ptb.{}.txt"))
    assert (tmp_path / "output" / "thesis.txt").read_text() == "mine"


def test_output_that_somebody_fills_meanwhile_is_kept(tmp_path, monkeypatch):
    def fill(written):
        (tmp_path / "output").mkdir()
        (tmp_path / "output" / "thesis.txt").write_text("mine")

    monkeypatch.setattr("txl_hf.commands.prepare_corpus.sync", fill)
    with pytest.raises(SystemExit):
        prepare(tmp_path, "ptb", "--input", write(tmp_path / "input", "ptb.{}.txt"))
    assert (tmp_path / "output" / "thesis.txt").read_text() == "mine"


def test_a_link_that_leads_nowhere_is_no_free_name(tmp_path):
    """All the work was done before it turned out."""
    (tmp_path / "output").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SystemExit, match="output exists: choose another folder"):
        prepare(tmp_path, "ptb", "--input", tmp_path)


@pytest.mark.parametrize("limit", [1000, 20_000], ids=["text", "tokens"])
def test_a_disk_that_is_full_is_named_and_nothing_left(tmp_path, limit):
    """A limit of this process's files stands in for it."""
    folder = write(tmp_path / "input", "ptb.{}.txt", {split: text * 400 for split, text in LINES.items()})
    code = f"import resource, sys, prepare_corpus; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
    code += "prepare_corpus.main(sys.argv[1:])"
    options = ["--corpus", "ptb", "--num_proc", "1", "--input", folder, "--output", tmp_path / "output"]
    process = run_script("-c", f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})\n" + code, *options)
    assert process.returncode == 1 and "File too large" in process.stderr
    assert process.stderr.splitlines()[-1].startswith(f"error: {tmp_path / 'output'}")
    assert [path.name for path in tmp_path.iterdir()] == ["input"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
def test_a_command_that_is_stopped_leaves_nothing(tmp_path, number):
    """As a batch system ends it at its limit: what it had written stayed, under a hidden name."""
    folder = write(tmp_path / "input", "ptb.{}.txt")
    code = "import signal, sys, time, txl_hf.commands.prepare_corpus as p"
    # Behind nohup a process ignores SIGHUP, and in the background SIGINT.
    code += "\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)"
    code += "\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
    code += "\np.sync = lambda path: time.sleep(100)\np.main(sys.argv[1:])"
    options = ["--corpus", "ptb", "--num_proc", "1", "--input", folder, "--output", tmp_path / "output"]
    streams = [tmp_path / name for name in ("in", "out", "err")]
    streams[0].touch()
    process = start_script("-c", code, *options, streams=streams)
    while not list(tmp_path.glob(".output-*/output/corpus.json")):
        assert process.exitcode is None
        time.sleep(0.05)
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == 1 and streams[2].read_text().splitlines()[-1] == "stopped"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["err", "in", "input", "out"]


@pytest.mark.parametrize("corpus", ["wikitext-2", "text"])
def test_a_tokenizer_of_plain_text_is_named_with_wikitext(tmp_path, capsys, corpus):
    """As the published vocabulary loads: each of its joiners becomes three tokens."""
    tokenizer = TransfoXLTokenizer.train_from_iterator([LINES["train"]], mode="moses", unk_token="<unk>")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    folder = write(tmp_path / "input", NAMES["wikitext-2"])
    prepare(tmp_path, corpus, "--input", folder, "--tokenizer", tmp_path / "tokenizer")
    said = capsys.readouterr().err
    assert ("warning: wikitext-2 is tokenised already" in said) == (corpus == "wikitext-2")
    assert ("mode='whitespace', line_ends=True) in a folder, and give that" in said) == (corpus == "wikitext-2")


ROWS = [line for line in LINES["train"].splitlines() if line] * 2
RECORDS = {
    "jsonl": "".join(json.dumps({"body": line, "label": 1}) + "\n" for line in ROWS),
    "csv": "body,label\n" + "".join(f'"{line}",1\n' for line in ROWS),
    "tsv": "body\tlabel\n" + "".join(f"{line}\t1\n" for line in ROWS),
    "parquet": None,
    "jsonl.gz": None,
}
RECORDS["ndjson"] = RECORDS["jsonl"]


@pytest.mark.parametrize("kind", RECORDS)
def test_records_are_no_plain_text_and_the_command_that_reads_them_does(tmp_path, kind):
    """A vocabulary had `{"text":` in it, and was trained on without a word."""
    folder = tmp_path / "My Books [2021]"
    folder.mkdir()
    file = folder / f"corpus.{kind}"
    if kind == "parquet":
        Dataset.from_dict({"body": ROWS, "label": [1] * 30}).to_parquet(file)
    elif kind == "jsonl.gz":
        file.write_bytes(gzip.compress(RECORDS["jsonl"].encode()))
    else:
        file.write_text(RECORDS[kind])
    for given in (file, folder):
        cure = re.escape("holds records, not plain text") + ".*" + re.escape(f"give --dataset {given} --column NAME")
        with pytest.raises(SystemExit, match=cure):
            prepare(tmp_path, "text", "--input", given)
    tokens, tokenizer, information = load(prepare(tmp_path, "text", "--dataset", file, "--column", "body"))
    assert information["source"] == str(file) and not {"body", '{"body":', "label"} & set(tokenizer.symbols)
    assert sum(map(len, tokens.values())) == sum(len(row.split()) + 1 for row in ROWS)


def test_html_is_no_plain_text(tmp_path):
    (tmp_path / "book.html").write_text("<p>It was the Wolf.</p>\n" * 40)
    with pytest.raises(SystemExit, match=r"book.html is HTML, .*pandoc --to plain .*--output book.txt"):
        prepare(tmp_path, "text", "--input", tmp_path / "book.html")


@pytest.mark.parametrize("end", ["gz", "bz2", "xz"])
def test_packed_texts_are_unpacked(tmp_path, end):
    """Alone or in a folder; as corpora of web pages are published."""
    pack = {"gz": gzip, "bz2": bz2, "xz": lzma}[end].compress
    (tmp_path / "folder").mkdir()
    (tmp_path / f"book.txt.{end}").write_bytes(pack(LINES["train"].encode()))
    for split, text in LINES.items():
        (tmp_path / "folder" / f"{split}.txt.{end}").write_bytes(pack(text.encode()))
    _, _, information = load(prepare(tmp_path, "text", "--input", tmp_path / f"book.txt.{end}"))
    assert information["splits"]["train"]["words"] > 0
    shutil.rmtree(tmp_path / "output")
    tokens, _, information = load(prepare(tmp_path, "text", "--input", tmp_path / "folder"))
    assert information["files"]["test"] == [f"test.txt.{end}"]
    assert {split: len(ids) for split, ids in tokens.items()} == {
        split: len(text.split()) + text.count("\n") for split, text in LINES.items()
    }
    shutil.rmtree(tmp_path / "output")
    (tmp_path / f"enwik8.{end}").write_bytes(pack(b"<page>" * 40))
    assert len(load(prepare(tmp_path, "enwik8", "--input", tmp_path / f"enwik8.{end}"))[0]["train"]) == 216
    shutil.rmtree(tmp_path / "output")
    (tmp_path / f"book.txt.{end}").write_bytes(pack(LINES["train"].encode() * 9)[:-20])
    with pytest.raises(SystemExit, match=rf"book.txt.{end} cannot be unpacked: "):
        prepare(tmp_path, "text", "--input", tmp_path / f"book.txt.{end}")


def test_tokenizer_and_data_set_that_are_not_there(tmp_path):
    folder = write(tmp_path / "input", "ptb.{}.txt")
    with pytest.raises(SystemExit, match="--tokenizer: the tokenizer of .*cannot be read"):
        prepare(tmp_path, "ptb", "--input", folder, "--tokenizer", folder)
    with pytest.raises(SystemExit, match="--tokenizer .*nowhere does not exist"):
        prepare(tmp_path, "ptb", "--input", folder, "--tokenizer", tmp_path / "nowhere")
    with pytest.raises(SystemExit, match="--dataset .*nowhere does not exist"):
        prepare(tmp_path, "ptb", "--dataset", tmp_path / "nowhere")
    with pytest.raises(SystemExit, match="the data set nowhere/nothing does not load"):
        prepare(tmp_path, "ptb", "--dataset", "nowhere/nothing")
    with pytest.raises(SystemExit, match="--corpus ptb needs a text: give ptb.train.txt"):
        prepare(tmp_path, "ptb")


@pytest.mark.parametrize("option", ["--config", "--column"])
@pytest.mark.parametrize("corpus", ["ptb", "wikitext-2", "midi"])
def test_what_is_said_of_no_data_set_is_refused(tmp_path, capsys, corpus, option):
    source = [] if corpus == "wikitext-2" else ["--input", tmp_path]
    with pytest.raises(SystemExit):
        prepare(tmp_path, corpus, *source, option, "other")
    assert f"error: {option} is of a data set: name it too, with --dataset" in capsys.readouterr().err


# ---- the real ones ----------------------------------------------------------------------------------------------


def shared(path: str) -> Path:
    if not (SHARED / path).exists():
        pytest.skip(f"needs shared/{path} beside the clone")
    return SHARED / path


@pytest.mark.parametrize(
    ("corpus", "vocab_size", "tokens"),
    [("wikitext-2", 33_278, (2_088_628, 217_646, 245_569)), ("ptb", 10_000, (929_589, 73_760, 82_430))],
)
def test_real_corpora_have_the_published_counts(tmp_path, corpus, vocab_size, tokens):
    folder = shared(f"data/{corpus}")
    output = prepare(tmp_path, corpus, "--input", folder)
    information = json.loads((output / "corpus.json").read_text())
    assert information["vocab_size"] == vocab_size
    assert tuple(information["splits"][split]["tokens"] for split in SPLITS) == tokens
    # The last line of the test text comes back from the disk.
    text = next(folder.glob("*test*")).read_text(encoding="utf-8")
    line = (text.lower() if corpus == "ptb" else text).splitlines()[-1].split() + ["<eos>"]
    ids = load_from_disk(output)["test"].with_format("numpy")["token_ids"][-len(line) :]
    assert AutoTokenizer.from_pretrained(output).convert_ids_to_tokens(ids.tolist()) == line


def test_the_vocabulary_of_the_original(tmp_path):
    """Its Corpus was built on the first lines of WikiText-2: 400, 60 and 60."""
    expected = json.loads(golden("kimiyoung_pytorch_corpus/expected.json").read_text())
    lines = {"train": 400, "valid": 60, "test": 60}
    texts = {}
    for name, count in lines.items():
        with shared(f"data/wikitext-2/wiki.{name}.tokens").open(encoding="utf-8") as file:
            texts[name] = "".join(line for line, _ in zip(file, range(count), strict=False))
    output = prepare(tmp_path, "wikitext-2", "--input", write(tmp_path / "input", "{}.txt", texts))
    tokens, tokenizer, _ = load(output)
    assert tokenizer.symbols == expected["idx2sym"]
    assert len(tokens["train"]) == expected["train_tokens"]
    assert np.array_equal(tokens["train"][:200], expected["train_first_200"])


def test_lines_without_ends_are_counted_apart():
    """Rows of a data set have none; joined, the words at their ends would be one."""
    assert count_batch(["a b", "c d"]) == {"words": [4], "characters": [6], "bytes": [6]}
