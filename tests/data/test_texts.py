"""The ids of a text, whatever the tokenizer."""

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from txl_hf import TransfoXLConfig, TransfoXLTokenizer
from txl_hf.data.loading import ends_lines, fill_special_tokens, find_tokenizer
from txl_hf.data.texts import document_end_token, encode_bytes, encode_lines, encode_text, reads_streams


def test_a_tokenizer_of_pieces_gets_every_character_and_no_other_symbol():
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    text = "Dear Zoë,\n\nit rains.\r\n  Yours, A."
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pieces.train_from_iterator([text], trainers.BpeTrainer(special_tokens=["<end>"], initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="<end>", bos_token="<end>")
    ids = encode_text(tokenizer, text)
    assert ids.ndim == 1 and ids.dtype == np.int64
    assert tokenizer.decode(ids) == text
    assert encode_text(tokenizer, "").shape == (0,)


def test_a_text_is_not_taken_for_its_lines():
    pieces = Tokenizer(models.BPE())
    trained = TransfoXLTokenizer.train_from_iterator(["a b"], mode="whitespace")
    for tokenizer in (PreTrainedTokenizerFast(tokenizer_object=pieces), trained):
        with pytest.raises(ValueError, match="lines is one string; pass its lines"):
            encode_lines(tokenizer, "a b\n")


@pytest.mark.parametrize("mode", ["whitespace", "moses", "characters", "bytes"])
def test_words_end_a_line_in_eos_and_characters_in_its_line_feed(mode):
    """An end of text that a vocabulary of characters has, too, is no end of a line."""
    text = "a b\n\nc\u2028d\n"
    tokenizer = TransfoXLTokenizer.train_from_iterator([text], mode=mode, eos_token="<eos>", unk_token="<unk>")
    ids = encode_text(tokenizer, text).tolist()
    assert ids == encode_lines(tokenizer, ["a b\n", "\n", "c\u2028d\n"]).tolist()
    assert ends_lines(tokenizer) == (mode in ("whitespace", "moses"))
    assert ids.count(tokenizer.eos_token_id) == (3 if ends_lines(tokenizer) else 0)


def test_a_stream_of_bytes_has_no_line_feeds_and_no_special_tokens():
    numbers = TransfoXLTokenizer.from_symbols(["<eos>", "32", "97"], mode="bytes", eos_token="<eos>")
    assert encode_bytes(numbers, b"a\n a").tolist() == [2, 1, 2]
    with pytest.raises(ValueError, match="byte 98 is not in the vocabulary of 3 .*--corpus text --mode bytes"):
        encode_bytes(numbers, b"ab")


@pytest.mark.parametrize(
    ("alphabet", "lower_case", "text"),
    [
        ("ab_", False, "a b_a"),
        ("ab _", False, "a b_a"),
        ("ab_ ", False, "a b_a"),
        ("ab ", True, "A bA"),
        ("ab_", True, "A b_A"),
    ],
)
def test_a_stream_has_the_ids_of_the_tokenizer(alphabet, lower_case, text):
    """A space is `_` in the vocabulary of text8, which has no other, and letters are lower-cased where it says so."""
    tokenizer = TransfoXLTokenizer.from_symbols(list(alphabet), mode="characters", lower_case=lower_case)
    assert reads_streams(tokenizer)
    assert encode_bytes(tokenizer, text.encode()).tolist() == tokenizer(text)["input_ids"]
    # Where "_" was in the text that the vocabulary is of, it is no space.
    counted = TransfoXLTokenizer.train_from_iterator(["ab_"], mode="characters")
    assert encode_bytes(counted, b"a_b").tolist() == counted("a_b")["input_ids"]
    with pytest.raises(ValueError, match="byte 32 is not in the vocabulary"):
        encode_bytes(counted, b"a b")


def test_a_stream_of_lower_cased_bytes_is_read_by_letters():
    tokenizer = TransfoXLTokenizer.from_symbols([str(i) for i in range(256) if i != 10], mode="bytes", lower_case=True)
    assert not reads_streams(tokenizer)
    assert tokenizer.decode(encode_text(tokenizer, "AÉ\nb")) == "aéb"


@pytest.mark.parametrize("mode", ["whitespace", "characters"])
@pytest.mark.parametrize("document_end", [None, 3])
@pytest.mark.parametrize("make", [TransfoXLConfig, GenerationConfig])
def test_a_model_stops_where_texts_end_and_not_where_lines_do(mode, document_end, make):
    specials = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    tokenizer = TransfoXLTokenizer.train_from_iterator(["a b c d"], mode=mode, **specials)
    config, said = make(eos_token_id=None), make(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    for filled in (config, said):
        fill_special_tokens(filled, tokenizer, document_end)
    end = document_end if document_end is not None or mode == "whitespace" else tokenizer.eos_token_id
    expected = (tokenizer.bos_token_id, end, tokenizer.pad_token_id)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == expected
    assert (said.bos_token_id, said.eos_token_id, said.pad_token_id) == (0, 0, 0)


@pytest.mark.parametrize("mode", ["whitespace", "lm1b"])
def test_a_line_end_of_a_prompt_is_no_padding_to_a_model(mode, make_model):
    """In vocabularies of the published corpora, where one token is both; rows of a batch are padded by a mask."""
    symbols, line_ends = (["<S>", "<UNK>"], None) if mode == "lm1b" else (["<eos>", "<unk>"], True)
    tokenizer = TransfoXLTokenizer.from_symbols([*symbols, *"abcdefgh"], mode=mode, line_ends=line_ends)
    model = make_model(vocab_size=10, cutoffs=[], div_val=1, mem_len=20, eos_token_id=None)
    for filled in (model.config, model.generation_config):
        fill_special_tokens(filled, tokenizer)
    batch = tokenizer(["a b\nc\n\nd e f", "g h\n"], padding=True, return_tensors="pt")
    ids, options = batch["input_ids"], {"max_new_tokens": 4, "do_sample": False}
    assert tokenizer.pad_token_id == 0 and (ids[0] == 0).any()
    scores = {"return_dict_in_generate": True, "output_scores": True}
    seen = model.generate(ids[:1], attention_mask=torch.ones_like(ids[:1]), **options, **scores)
    assert torch.equal(model.generate(ids[:1], **options, **scores).scores[0], seen.scores[0])
    alone = [
        model.generate(row[mask == 1][None], **options)[0, -4:] for row, mask in zip(*batch.values(), strict=True)
    ]
    assert torch.equal(model.generate(**batch, **options)[:, -4:], torch.stack(alone))


@pytest.mark.parametrize("where", ["on the Hub", "in a folder"])
def test_a_tokenizer_that_cannot_be_read_is_not_none(tmp_path, monkeypatch, where):
    """Where there is one; a model without is nothing unusual."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("broken", "bare"):
        repository = tmp_path / f"models--user--{name}"
        TransfoXLConfig().save_pretrained(repository / "snapshots" / "1")
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("1")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "models--user--broken" / "snapshots" / "1" / file).write_text("{")
    names = {name: f"user/{name}" for name in ("broken", "bare")}
    if where == "in a folder":
        names = {name: str(tmp_path / f"models--user--{name}" / "snapshots" / "1") for name in names}
    assert find_tokenizer(names["bare"]) is None
    with pytest.raises(ValueError, match=f"the tokenizer of {names['broken']} cannot be read"):
        find_tokenizer(names["broken"])


@pytest.mark.parametrize("token", ["10", "\n"])
def test_a_byte_ends_documents_by_its_number_or_as_it_is(token):
    tokenizer = TransfoXLTokenizer.train_from_iterator(["ab\n"], mode="bytes")
    assert document_end_token(tokenizer, token) == tokenizer.symbols.index("10")
    with pytest.raises(ValueError, match="--document_end '\\\\t' is no token of the vocabulary"):
        document_end_token(tokenizer, "\t")
