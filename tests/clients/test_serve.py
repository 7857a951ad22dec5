"""transformers' server, started by `txl-serve`, asked as OpenAI's clients ask."""

import json
import math
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import openai
import pytest
import torch
from openai import OpenAI

from models import small_model
from txl_hf import TransfoXLTokenizer, commands

LETTERS = "abcdefghijklmnopqrstuvwxyz .:\n"
TEMPLATE = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"

# txl-serve, which leaves beside its model how many tokens each forward pass read.
COUNTED = """
import functools, sys
from txl_hf import TransfoXLModel
from txl_hf.commands import serve

forward = TransfoXLModel.forward

@functools.wraps(forward)
def counted(self, input_ids=None, *args, **kwargs):
    with open(sys.argv[1] + ".read", "a") as file:
        print(input_ids.shape[1], file=file)
    return forward(self, input_ids, *args, **kwargs)

TransfoXLModel.forward = counted
serve(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve") / "model"
    tokenizer = TransfoXLTokenizer.from_symbols(["<eos>", "<unk>", *LETTERS], mode="characters")
    tokenizer.chat_template = TEMPLATE
    small_model(vocab_size=len(tokenizer), cutoffs=[], div_val=1, mem_len=300, tgt_len=20).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def client(model):
    with served(model) as client:
        yield client


@contextmanager
def served(model):
    """A client of a server of the model."""
    command = [sys.executable, "-c", COUNTED, str(model), "--port", "0"]
    process = subprocess.Popen(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdout=subprocess.PIPE, text=True)
    try:
        # This line is said when it answers, with the port that it has found.
        said = next(line for line in process.stdout if line.startswith(f"serving {model} at http://localhost:"))
        url = said.split()[-1]
        assert urllib.request.urlopen(url.removesuffix("/v1") + "/health", timeout=20).status == 200
        yield OpenAI(base_url=url, api_key="none")
    finally:
        process.terminate()
        process.wait(30)


def reply(model, text: str, count: int) -> str:
    """What generate writes after a text, without a server and without anything kept."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    written = loaded.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)


def test_the_model_that_is_listed_is_the_one_that_requests_may_name(client, model):
    [listed] = client.models.list().data
    assert (listed.id, listed.object) == (str(model), "model") and isinstance(listed.created, int)
    assert client.completions.create(model=listed.id, prompt="hello", max_tokens=1).usage.completion_tokens == 1
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="another", prompt="hello", max_tokens=1)


def test_a_completion(client, model):
    asked = {"model": str(model), "prompt": "hello world. ", "max_tokens": 12, "temperature": 0}
    found = client.completions.create(**asked)
    assert found.choices[0].text == reply(model, "hello world. ", 12)
    assert found.usage.prompt_tokens == 13
    streamed = [part.choices[0].text for part in client.completions.create(**asked, stream=True)]
    assert "".join(streamed) == found.choices[0].text and len(streamed) > 3


def test_a_reply_is_drawn_with_the_seed_of_its_request(client, model):
    """Also while others are: they are drawn one after the other, by one thread, and set when they come."""

    def ask(seed, **changes):
        asked = {"model": str(model), "prompt": "hello world. ", "max_tokens": 12, "temperature": 3.0}
        return client.completions.create(**asked | changes, seed=seed).choices[0].text

    alone = [ask(seed) for seed in range(6)]
    assert len(set(alone)) > 3, "at such a temperature they differ"
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6))) == alone
    assert len({ask(seed, temperature=0) for seed in range(3)}) == 1
    assert ask(1, temperature=None, top_p=0.99) != ask(2, temperature=None, top_p=0.99)


def test_a_conversation_goes_on_with_its_memory(client, model):
    messages, text, known = [], "", 0
    read = model.with_name("model.read")
    for said in ("good morning", "who are you", "and then"):
        messages.append({"role": "user", "content": said})
        text += f"user: {said}\n"
        asked = {"model": str(model), "messages": messages, "max_tokens": 10, "temperature": 0}
        read.write_text("")
        found = client.chat.completions.create(**asked).choices[0].message.content
        assert found == reply(model, text, 10)
        # What this template puts before a reply was not written by the model: the memory of the prompt before goes on.
        assert sum(map(int, read.read_text().split())) == len(text) - known + 9, "all of the reply but its last token"
        known = len(text) - 1
        streamed = client.chat.completions.create(**asked, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in streamed) == found
        messages.append({"role": "assistant", "content": found})
        text += f"assistant: {found}\n"


def test_a_model_of_words_writes_lines_and_goes_on_with_them(tmp_path):
    """What a client sends back is what was written, so that it need not be read again."""
    words = ["<eos>", "<unk>", "<pad>", *"the old prince said well".split()]
    given = {"mode": "whitespace", "line_ends": True, "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    tokenizer, folder = TransfoXLTokenizer.from_symbols(words, **given), tmp_path / "model"
    small_model(vocab_size=len(words), cutoffs=[], div_val=1, mem_len=300, tgt_len=20).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    read = folder.with_name("model.read")
    with served(folder) as client:
        text, known = "the old prince\nsaid well\n", 0
        for seed in range(3):
            read.write_text("")
            asked = {"model": str(folder), "prompt": text, "max_tokens": 20, "temperature": 3.0, "seed": seed}
            found = client.completions.create(**asked).choices[0].text
            # All that is new, and all of the reply but its last token.
            assert sum(map(int, read.read_text().split())) <= len(tokenizer(text)["input_ids"]) - known + 20
            known = len(tokenizer(text + found)["input_ids"]) - 2
            streamed = [part.choices[0].text for part in client.completions.create(**asked, stream=True)]
            assert "".join(streamed) == found and "\n" in found
            text += found + "\n"


MARKS = ["<eos>", "<unk>", *"\"'!,.", "&quot;", "&apos;", "@-@", "&apos;s", *"the prince said no yes".split()]


@pytest.mark.parametrize("mode", ["moses", "bytes"])
def test_a_stream_is_the_reply(mode, tmp_path):
    """Which side a quotation mark is of depends on all before it in its line; a character may end in its middle."""
    symbols, line_ends = (MARKS, True) if mode == "moses" else ([*map(str, "o\u00e9\u2603 ".encode()), "10"], None)
    tokenizer = TransfoXLTokenizer.from_symbols(symbols, mode=mode, line_ends=line_ends)
    small_model(
        vocab_size=len(tokenizer), cutoffs=[], div_val=1, mem_len=300, tgt_len=20, eos_token_id=None
    ).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    prompt, differ = "the prince said " if mode == "moses" else "o", 0
    with served(tmp_path / "model") as client:
        for seed in range(12):
            asked = {"model": str(tmp_path / "model"), "prompt": prompt, "max_tokens": 24, "seed": seed}
            found = client.completions.create(**asked, temperature=5.0).choices[0].text
            streamed = [
                part.choices[0].text for part in client.completions.create(**asked, temperature=5.0, stream=True)
            ]
            assert "".join(streamed) == found and len(streamed) > 3
            differ += '"' in found or "\ufffd" in found[-1:]
    assert differ > 1


def test_no_other_model_is_loaded(client, model, tmp_path):
    """Any client could fill the server's memory."""
    other = shutil.copytree(model, tmp_path / "other")
    assert "loads no other model, such as" in refused_at(client, "load_model", {"model": str(other)})
    ready = ask(client, "load_model", {"model": str(model)}).read().decode()
    assert '"status": "ready"' in ready


def test_a_symbol_that_the_vocabulary_lacks_is_named(tmp_path):
    tokenizer = TransfoXLTokenizer.from_symbols([*" abcdefghijklmnopqrstuvwxyz"], mode="characters")
    tokenizer.chat_template = TEMPLATE
    small_model(vocab_size=len(tokenizer), cutoffs=[], div_val=1).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with served(tmp_path) as client:
        for stream in (False, True):
            body = {"model": str(tmp_path), "prompt": "Hello", "max_tokens": 3, "stream": stream}
            assert "'H' is not in the vocabulary of 27 symbols" in refused_at(client, "v1/completions", body)
            body = {"model": str(tmp_path), "messages": [{"role": "user", "content": "hi"}], "stream": stream}
            assert "':' is not in the vocabulary" in refused_at(client, "v1/chat/completions", body)


def test_chat_without_a_template_is_refused_in_one_sentence(model, tmp_path):
    """So are the models of `txl-train`."""
    plain = shutil.copytree(model, tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    with served(plain) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=str(plain), messages=[{"role": "user", "content": "hi"}])
        detail = f"the tokenizer of {plain} has no chat_template: use /v1/completions"
        assert refused.value.response.json() == {"detail": detail}
        assert client.completions.create(model=str(plain), prompt="hello", max_tokens=1).usage.completion_tokens == 1


def ask(client, path: str, body: dict):
    url = str(client.base_url).removesuffix("v1/") + path
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=60)


def refused_at(client, path: str, body: dict) -> str:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(client, path, body)
    assert refused.value.code == 400
    return json.load(refused.value)["detail"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"prompt": ""}, "input_ids are (1, 0)"),
        ({"max_tokens": 0}, "max_tokens is 0, but has to be an integer above 0"),
        ({"max_tokens": "x"}, "max_tokens is 'x', but has to be an integer above 0"),
        ({"seed": "x"}, "seed is 'x', but has to be an integer of 64 bits"),
        ({"seed": 2**70}, f"seed is {2**70}, but has to be an integer of 64 bits"),
        ({"temperature": -1}, "temperature is -1, but has to be a number of at least 0"),
        ({"temperature": math.nan}, "temperature is nan, but has to be a number of at least 0"),
        ({"top_p": 7}, "top_p is 7, but has to be a number of at least 0, and at most 1"),
        ({"frequency_penalty": -2}, "frequency_penalty is -2, but has to be a number above -1"),
        ({"n": 3}, "n is 3, which this server does not do: leave it out"),
        ({"echo": True}, "echo is True, which this server does not do: leave it out"),
        ({"generation_config": '{"max_new_tokens": -1}'}, "max_new_tokens"),
    ],
    ids=str,
)
def test_a_request_that_will_not_do_is_told_why(client, model, changes, detail, stream):
    body = {"model": str(model), "prompt": "hello", "max_tokens": 2, "stream": stream} | changes
    if "generation_config" in changes:
        del body["max_tokens"]
    assert detail in refused_at(client, "v1/completions", body)


@pytest.mark.parametrize(
    ("messages", "detail"),
    [
        ([], "messages is [], but has to be a list of messages, at least one"),
        (None, "messages is None, but has to be a list of messages"),
        ("hello", "messages is 'hello', but has to be a list of messages"),
        ([{"content": "x"}], "messages[0] is {'content': 'x'}, but has to have a role and a content"),
        ([{"role": "user", "content": 5}], "the content of messages[0] is 5, but has to be a text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "the request lacks 'text'"),
    ],
    ids=str,
)
def test_messages_that_are_none_are_named(client, model, messages, detail):
    assert detail in refused_at(client, "v1/chat/completions", {"model": str(model), "messages": messages})


def test_what_asks_for_nothing_is_no_reason_to_refuse(client, model):
    asked = {"model": str(model), "prompt": "hello", "max_tokens": 2, "temperature": 1e-45, "n": 1, "echo": False}
    found = client.completions.create(**asked, presence_penalty=0, logprobs=None)
    assert found.choices[0].text == reply(model, "hello", 2)


def test_transformers_chat_talks_to_it(client, model, tmp_path):
    """As it is typed, but for the keys; after each reply it asks whether to go on, since the tokens are used up."""
    command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()"]
    chat = [*command, "chat", model, str(client.base_url).rstrip("/")]
    settings = ["max_new_tokens=10", "do_sample=False"]
    process = subprocess.run(
        [*chat, *settings],
        input="good morning\nn\nwho are you\nn\n!exit\n",
        env={**os.environ, "HF_HUB_OFFLINE": "0", "COLUMNS": "300"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    first = reply(model, "user: good morning\n", 10)
    second = reply(model, f"user: good morning\nassistant: {first}\nuser: who are you\n", 10)
    # It draws what is written as Markdown, line by line.
    shown = "".join(process.stdout.split())
    for written in (first, second):
        assert "".join(written.split()) in shown, process.stdout


def test_what_cannot_be_served_is_said_at_once(model, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        commands.serve([str(model), "--continuous-batching"])
    assert end.value.code == 2 and "--continuous_batching is not supported" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(SystemExit) as end:
        commands.serve([str(tmp_path)])
    assert "is a gpt2, not a Transformer-XL" in end.value.code
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["TransfoXLForSequenceClassification"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit) as end:
        commands.serve([str(tmp_path)])
    assert (
        end.value.code
        == f"error: model {tmp_path} is a {config['architectures'][0]}, and no language model, which alone writes"
    )


def test_generate_batch_is_refused_in_one_sentence(model):
    from transformers import AutoModelForCausalLM

    with pytest.raises(NotImplementedError, match="continuous batching pages .* call generate with a padded batch"):
        AutoModelForCausalLM.from_pretrained(model).generate_batch([[1, 2, 3]])
