"""The page of examples/space: gradio serves it, and its client gets what the model says."""

import html
import importlib.util
import math
import re
from pathlib import Path

import pytest
import torch
from gradio_client import Client
from gradio_client.exceptions import AppError

from models import small_model
from txl_hf import TransfoXLTokenizer, token_losses

APP = Path(__file__).parents[2] / "examples" / "space" / "app.py"
TEXT = "a text that is longer than a segment, and than the memory behind it. " * 3


def save(tokenizer, folder) -> str:
    sizes = {"cutoffs": [], "div_val": 1, "mem_len": 40, "tgt_len": 20, "eos_token_id": None}
    small_model(vocab_size=len(tokenizer), **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    letters = "abcdefghijklmnopqrstuvwxyz ,.\n"
    tokenizer = TransfoXLTokenizer.from_symbols(["<unk>", *letters], mode="characters", unk_token="<unk>")
    folder = save(tokenizer, tmp_path_factory.mktemp("space"))
    spec = importlib.util.spec_from_file_location("space_app", APP)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, module.Page(folder)


@pytest.fixture(scope="module")
def client(page):
    module, shown = page
    app = module.build(shown)
    _, url, _ = app.launch(prevent_thread_lock=True, quiet=True)
    yield Client(url, verbose=False)
    app.close()


def test_a_text_goes_on(page, client):
    _, shown = page
    found = client.predict(TEXT, 12, 0, api_name="/write")
    ids = torch.tensor([shown.tokenizer(TEXT)["input_ids"]])
    written = shown.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert found == TEXT + shown.tokenizer.decode(written[0, ids.shape[1] :])


def test_a_text_goes_on_as_one_types(page, client):
    written = client.predict(TEXT, 12, 0, api_name="/go_on")
    assert len(written) == 12 and client.predict(TEXT, 12, 0, api_name="/write") == TEXT + written


def test_a_text_that_cannot_go_on_is_an_error_and_the_next_one_does(page, client, monkeypatch):
    _, shown = page

    def fail(*args, **kwargs):
        raise RuntimeError("probability tensor contains inf")

    decode, calls = type(shown.tokenizer).decode, []

    def fail_later(*args, **kwargs):
        calls.append(1)
        return fail() if len(calls) > 2 else decode(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(type(shown.tokenizer), "decode", fail_later)
        with pytest.raises(AppError, match="contains inf"):
            client.submit(TEXT, 12, 0, api_name="/write").result(timeout=60)
    with monkeypatch.context() as patch:
        patch.setattr(shown.model, "generate", fail)
        for name in ("/write", "/go_on"):
            job = client.submit(TEXT, 12, 0, api_name=name)
            with pytest.raises(AppError, match="contains inf"):
                job.result(timeout=60)
    assert client.submit(TEXT, 12, 0, api_name="/write").result(timeout=60).startswith(TEXT)


def test_a_symbol_that_the_tokenizer_lacks_is_said(page, client, tmp_path, monkeypatch):
    module, shown = page
    tokenizer = TransfoXLTokenizer.from_symbols([*"abc \n"], mode="characters")
    monkeypatch.setattr(shown, "tokenizer", tokenizer)
    with pytest.raises(module.gr.Error, match="ß"):
        shown.read("abc ß")


def test_what_the_memory_is_worth(page, client):
    """Each token coloured by its bits, the text as it is, whatever it holds."""
    _, shown = page
    text = TEXT + "\n  a line. "
    said, *coloured = client.predict(text, api_name="/worth")
    ids = shown.tokenizer(text)["input_ids"]
    for page, length in zip(coloured, (40, 0), strict=True):
        expected = token_losses(shown.model, ids, 20, length) / math.log(2)
        found = re.findall(r'<span title="([\d.]+) bits" style="background: rgba\(220, 40, 40, ([\d.]+)\)">', page)
        assert torch.allclose(torch.tensor([float(bits) for bits, _ in found]), expected, atol=0.006)
        assert [float(alpha) for _, alpha in found] == pytest.approx(expected.div(8).clamp(max=1).tolist(), abs=0.006)
        assert html.unescape(re.sub("<[^>]*>", "", page.partition("</h4>")[2])) == text
        assert f"{expected.mean():.3f}" in said
    assert "&lt;unk&gt;" in client.predict("a text with < in it", api_name="/worth")[1]


@pytest.mark.parametrize("mode", ["whitespace", "moses", "bytes"])
def test_tokens_are_put_together_as_their_tokenizer_does(page, mode, tmp_path):
    """With spaces between words and none within a character."""
    module, _ = page
    text = " ".join(["the city was in the north , it said : “ é ” ( do go )"] * 4)
    tokenizer = TransfoXLTokenizer.train_from_iterator([text], mode=mode, unk_token="<unk>")
    shown = module.Page(save(tokenizer, tmp_path))
    ids = tokenizer(text)["input_ids"]
    *_, found = shown.write(text, 12, 0)
    given = torch.tensor([ids])
    written = shown.model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=12, do_sample=False)
    whole = tokenizer.decode(written[0])
    assert found == text + whole[len(tokenizer.decode(ids)) :]
    if mode == "whitespace":
        assert tokenizer(found)["input_ids"] == written[0].tolist()
    for coloured in shown.worth(text)[1:]:
        assert html.unescape(re.sub("<[^>]*>", "", coloured.partition("</h4>")[2])) == tokenizer.decode(ids)


def test_where_heads_look(page, client):
    _, shown = page
    assert client.predict(TEXT, 1, api_name="/look")["type"] == "matplotlib"
    figure = shown.look(TEXT, 0)
    assert len(figure.axes) == shown.config.n_head
    [image] = figure.axes[0].get_images()
    assert image.get_array().shape == (24, 64)


def test_heads_look_at_all_that_was_read_before(page):
    """Of a model, too, that reads some tokens again instead of remembering them."""
    module, shown = page
    kept = module.Page(shown.tokenizer.name_or_path)
    kept.config.ext_len = 20
    expected, found = (each.look(TEXT, 0).axes[0].get_images()[0].get_array() for each in (shown, kept))
    assert found.shape == expected.shape and (abs(found - expected) < 1e-6).all()


def test_too_little_text_is_said(client):
    with pytest.raises(Exception, match="nothing to go on from"):
        client.predict("a", api_name="/worth")
