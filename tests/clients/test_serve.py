"""The server that `txl-serve` starts, asked as OpenAI's clients ask, and as clients do that it has to withstand."""

import json
import math
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import openai
import pytest
import torch
from openai import OpenAI

import txl_hf
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
def served(model, *options: str):
    """A client of a server of the model, of which no request may be an error of its own."""
    command = [sys.executable, "-c", COUNTED, str(model), "--port", "0", *options]
    with tempfile.TemporaryFile("w+") as errors:
        pipes = {"stdout": subprocess.PIPE, "stderr": errors}
        process = subprocess.Popen(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, text=True, **pipes)
        try:
            # This line is said when it answers, with the port that it has found.
            said = process.stdout.readline()
            assert said.startswith(f"serving {model} at http://127.0.0.1:")
            url = said.split()[-1]
            assert urllib.request.urlopen(url.removesuffix("/v1") + "/health", timeout=20).status == 200
            yield OpenAI(base_url=url, api_key="none", max_retries=0)
        finally:
            process.terminate()
            process.wait(30)
            errors.seek(0)
            printed = errors.read()
        assert "Traceback" not in printed and "ERROR" not in printed, printed[-3000:]


def reply(model, text: str, count: int) -> str:
    """The text that generate writes after another one, without a server and without anything kept."""
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


def test_completions_go_on_from_a_memory_that_is_served(model, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reader, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    read = reader(tokenizer("it was a dark night. ", return_tensors="pt")["input_ids"], use_cache=True)
    txl_hf.save_memory(tmp_path / "memory", reader, read)
    with served(model, "--memory", str(tmp_path / "memory")) as client:
        asked = {"model": str(model), "prompt": "hello world. ", "max_tokens": 12, "temperature": 0}
        found = client.completions.create(**asked)
    assert found.choices[0].text == reply(model, "it was a dark night. hello world. ", 12)
    assert found.usage.prompt_tokens == 13
    txl_hf.save_memory(tmp_path / "memory", reader, reader(torch.ones(1, 3, dtype=torch.long)))
    process = subprocess.run(
        [sys.executable, "-c", COUNTED, str(model), "--port", "0", "--memory", str(tmp_path / "memory")],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert process.stderr.splitlines()[-1] == (
        f"error: --memory {tmp_path / 'memory'} is no MemoryCache of one row for mem_len=300: save what a call of "
        "this model with use_cache=True returned"
    )


def test_a_reply_is_drawn_with_the_seed_of_its_request(client, model):
    """Also while others are: they are written by turns."""

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
    """A client sends back the reply as it was written, so that it need not be read again."""
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
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path)
    with served(tmp_path) as client:
        for stream in (False, True):
            body = {"model": str(tmp_path), "prompt": "Hello", "max_tokens": 3, "stream": stream}
            assert "'H' is not in the vocabulary of 28 symbols" in refused_at(client, "v1/completions", body)
            body["prompt"] = "ab<new>"
            assert "'<new>', a token of the tokenizer that the model has not" in refused_at(
                client, "v1/completions", body
            )
            body = {"model": str(tmp_path), "messages": [{"role": "user", "content": "hi"}], "stream": stream}
            assert "':' is not in the vocabulary" in refused_at(client, "v1/chat/completions", body)


def test_chat_without_a_template_is_refused_in_one_sentence(model, tmp_path):
    """So are the models of `txl-train`."""
    plain = shutil.copytree(model, tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    with served(plain) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=str(plain), messages=[{"role": "user", "content": "hi"}])
        error = refused.value.response.json()["error"]
        assert error["message"] == f"the tokenizer of {plain} has no chat_template: use /v1/completions"
        assert error["type"] == "invalid_request_error"
        assert client.completions.create(model=str(plain), prompt="hello", max_tokens=1).usage.completion_tokens == 1


def ask(client, path: str, body: dict):
    url = str(client.base_url).removesuffix("v1/") + path
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=60)


def refused_at(client, path: str, body: dict) -> str:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(client, path, body)
    assert refused.value.code == 400
    return json.load(refused.value)["error"]["message"]


@pytest.fixture(scope="module")
def strict(model):
    """A client of a server with narrow bounds."""
    with served(model, "--max-prompt", "40", "--max-tokens", "60") as client:
        yield client


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"prompt": ""}, "input_ids are (1, 0)"),
        ({"prompt": None}, "prompt is missing"),
        ({"prompt": ["hello"]}, "prompt is ['hello']: Input should be a valid string"),
        ({"prompt": 50 * "x", "max_tokens": 9}, "the prompt has 50 tokens, but 40 may be read"),
        ({"max_tokens": 0}, "max_tokens is 0: Input should be greater than 0"),
        ({"max_tokens": True}, "max_tokens is True: Input should be a valid integer"),
        ({"max_tokens": 2.0}, "max_tokens is 2.0: Input should be a valid integer"),
        ({"max_tokens": "5"}, "max_tokens is '5': Input should be a valid integer"),
        ({"max_tokens": 10**9}, "max_tokens is 1,000,000,000, but 60 may be written"),
        ({"max_completion_tokens": 61}, "max_tokens is 61, but 60 may be written"),
        ({"seed": "x"}, "seed is 'x': Input should be a valid integer"),
        ({"seed": 1.0}, "seed is 1.0: Input should be a valid integer"),
        ({"seed": 2**70}, f"seed is {2**70}: Input should be less than {2**64}"),
        ({"temperature": -1}, "temperature is -1: Input should be greater than or equal to 0"),
        ({"temperature": "hot"}, "temperature is 'hot': Input should be a valid number"),
        ({"temperature": math.nan}, "temperature is nan: Input should be a finite number"),
        ({"temperature": math.inf}, "temperature is inf: Input should be a finite number"),
        ({"top_p": 7}, "top_p is 7: Input should be less than or equal to 1"),
        ({"top_p": math.nan}, "top_p is nan: Input should be a finite number"),
        ({"frequency_penalty": -1}, "frequency_penalty is -1: Input should be greater than -1"),
        ({"stop": [*"abcde"]}, "stop is ['a', 'b', 'c', 'd', 'e']: List should have at most 4 items"),
        ({"stop": ["a" * 257]}, "String should have at most 256 characters"),
        ({"stop": ""}, "stop.0 is '': String should have at least 1 character"),
        ({"stream": "yes"}, "stream is 'yes': Input should be a valid boolean"),
        ({"n": 3}, "n is 3, which this server does not do: leave it out"),
        ({"echo": True}, "echo is True, which this server does not do: leave it out"),
        ({"logprobs": 5}, "logprobs is 5, which this server does not do: leave it out"),
        ({"response_format": {"type": "json_object"}}, "response_format is {'type': 'json_object'}, which"),
        ({"num_beams": 50}, "num_beams is 50, which this server does not do: leave it out"),
        ({"generation_config": "{"}, "generation_config is no JSON"),
        ({"generation_config": {"max_new_tokens": 1}}, "generation_config is {'max_new_tokens': 1}: "),
        ({"generation_config": '{"max_new_tokens": -1}'}, "generation_config.max_new_tokens is -1: Input should be"),
        ({"generation_config": '{"num_beams": 50000}'}, "generation_config.num_beams is 50000, which this server"),
        ({"generation_config": '{"assistant_early_exit": 1}'}, "generation_config.assistant_early_exit is 1, which"),
        (
            {"generation_config": '{"bad_words_ids": [[1000000]]}'},
            "generation_config.bad_words_ids is [[1000000]], which",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_request_that_will_not_do_is_told_why(strict, model, changes, detail, stream):
    body = {"model": str(model), "prompt": "hello", "stream": stream} | changes
    assert detail in refused_at(strict, "v1/completions", body)


CHAT = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"messages": []}, "messages is []: List should have at least 1 item"),
        ({"messages": None}, "messages is missing"),
        ({"messages": "hello"}, "messages is 'hello': Input should be a valid array"),
        ({"messages": ["hi"]}, "messages.0 is 'hi': Input should be"),
        ({"messages": [{"content": "x"}]}, "messages.0.role is missing"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content is 5: Input should be a valid string"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content is [{'type': 'text'}]"),
        ({"messages": CHAT, "tools": [{"type": "function"}]}, "tools is [{'type': 'function'}], which this server"),
        # Rendering 300 MB of it ended the process.
        (
            {"messages": CHAT, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
            "chat_template_kwargs is {'chat_te",
        ),
        ({"messages": CHAT, "chat_template": "{{ 1 }}"}, "chat_template is '{{ 1 }}', which this server does not do"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_messages_that_are_none_are_named(strict, model, changes, detail):
    assert detail in refused_at(strict, "v1/chat/completions", {"model": str(model)} | changes)


@pytest.mark.parametrize(
    ("body", "headers", "status", "detail"),
    [
        (b"{", {}, 400, "the body is no JSON: Invalid JSON"),
        (b"", {}, 400, "the body is no JSON: Invalid JSON"),
        (b"[" * 900_000, {}, 400, "recursion limit exceeded"),
        (b"[1]", {}, 400, "the body is [1]: Input should be"),
        (b'{"prompt": "\xff"}', {}, 400, "the body is no JSON: Invalid JSON"),
        (b'{"prompt": "\\ud800"}', {}, 400, "the body is no JSON: Invalid JSON"),
        (b"{}", {"Content-Type": "text/plain"}, 415, "Content-Type: application/json"),
        (b" " * (2**20 + 1), {}, 413, "the body is longer than 1,048,576 bytes"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_body_that_is_no_request_is_told_why(strict, body, headers, status, detail):
    request = urllib.request.Request(
        f"{strict.base_url}completions", body, {"Content-Type": "application/json"} | headers
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    assert refused.value.code == status
    assert detail in json.load(refused.value)["error"]["message"]


def test_what_is_not_there_is_an_error_of_the_same_shape(client):
    with pytest.raises(openai.NotFoundError, match="Not Found"):
        client.embeddings.create(model="x", input="hello")


def test_what_asks_for_nothing_is_no_reason_to_refuse(client, model):
    asked = {"model": str(model), "prompt": "hello", "max_tokens": 2, "temperature": 1e-45, "n": 1, "echo": False}
    idle = {"presence_penalty": 0, "logprobs": None, "user": "me", "logit_bias": {}, "frequency_penalty": 0}
    found = client.completions.create(**asked, **idle)
    assert found.choices[0].text == reply(model, "hello", 2)
    message = {"role": "user", "content": [{"type": "text", "text": "good"}, {"type": "text", "text": "morning"}]}
    asked = {"model": str(model), "max_completion_tokens": 3, "temperature": 0, "metadata": {"a": "b"}, "tools": []}
    found = client.chat.completions.create(messages=[message], **asked).choices[0].message
    assert found.content == reply(model, "user: good morning\n", 3)
    answered = {"role": "assistant", "content": None, "tool_calls": [], "refusal": None}
    assert client.chat.completions.create(messages=[message, answered], **asked).usage.completion_tokens == 3


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
        commands.serve([str(model), "--max-tokens", "0"])
    assert end.value.code == 2 and "--max_tokens: '0' has to be a whole number, at least 1" in capsys.readouterr().err
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
    config["architectures"] = ["TransfoXLForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"tokenization": "REMI"}))
    with pytest.raises(SystemExit) as end:
        commands.serve([str(tmp_path)])
    assert end.value.code.startswith(f"error: model {tmp_path} writes music")


def test_generate_batch_is_refused_by_transformers(model):
    from transformers import AutoModelForCausalLM

    with pytest.raises(ValueError, match="not supported for continuous batching"):
        AutoModelForCausalLM.from_pretrained(model).generate_batch([[1, 2, 3]])


def test_stop_strings_end_a_reply_and_are_no_part_of_it(client, model):
    whole = reply(model, "hello", 30)
    stops = [whole[12:15], "never written"]
    text = whole[: whole.index(stops[0])]
    asked = {"model": str(model), "prompt": "hello", "max_tokens": 30, "temperature": 0}
    found = client.completions.create(**asked, stop=stops).choices[0]
    assert (found.text, found.finish_reason) == (text, "stop")
    parts = list(
        client.completions.create(**asked, stop=stops[0], stream=True, stream_options={"include_usage": True})
    )
    assert "".join(part.choices[0].text for part in parts[:-1]) == text
    assert parts[-2].choices[0].finish_reason == "stop"
    assert not parts[-1].choices and parts[-1].usage.completion_tokens <= 15
    assert client.completions.create(**asked).choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("127.0.0.1", 200), ("[::1]", 200), ("me.example", 200), ("evil.example", 400), ("", 400)],
)
def test_another_name_is_refused_as_a_host(model, host, status, named):
    """A page of that name may have been told that this machine is it."""
    assert status_of(named, f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()) == status


@pytest.fixture(scope="module")
def named(model):
    with served(model, "--allowed-host", "me.example", "--max-seconds", "1.5") as client:
        yield client


def test_time_ends_a_reply_and_a_prompt(named, model):
    """The first has what was written by then; a body that does not come is not waited for."""
    asked = {"model": str(model), "temperature": 0}
    found = named.completions.create(prompt="hello", max_tokens=4096, **asked)
    assert found.choices[0].finish_reason == "length" and 0 < found.usage.completion_tokens < 4096
    with pytest.raises(openai.BadRequestError, match="the prompt was not read within 1.5 s"):
        named.completions.create(prompt=LONG, max_tokens=1, **asked)
    with pytest.raises(openai.APIError, match="the prompt was not read within 1.5 s"):
        list(named.completions.create(prompt=LONG, max_tokens=1, stream=True, **asked))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    assert status_of(named, head + b"Content-Length: 1000\r\n\r\n{") == 408


def test_a_body_is_refused_before_it_has_come(client):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    announced = b"Content-Length: 1000000000000\r\n\r\n"
    assert status_of(client, head + announced + b" " * (2**20 + 1)) == 413


# Characters that the small model reads in ten seconds and more, segment by segment.
LONG = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz .", k=90_000))


def send(client, data: bytes) -> socket.socket:
    connection = socket.create_connection((client.base_url.host, client.base_url.port), timeout=60)
    connection.sendall(data)
    return connection


def status_of(client, data: bytes) -> int:
    with send(client, data) as connection:
        return int(connection.recv(1000).split()[1])


def post(body: dict) -> bytes:
    """A request for a completion, as it is sent."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + data


def wait_until(is_so, patience: float = 30):
    end = time.monotonic() + patience
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("changes", [{"prompt": LONG}, {"prompt": "hello", "max_tokens": 4096}], ids=["read", "write"])
def test_a_client_that_has_gone_ends_its_work(client, model, changes, stream):
    read = model.with_name("model.read")
    read.write_text("")
    body = {"model": str(model), "stream": stream, "temperature": 0} | changes
    connection = send(client, post(body))
    wait_until(lambda: read.read_text().count("\n") > 20)
    connection.close()
    wait_until(lambda: is_still(read), patience=20)
    assert read.read_text().count("\n") < 4000, "it would have read 4,500 segments, or written 4,096 tokens"


def is_still(read) -> bool:
    before = read.stat().st_size
    time.sleep(1)
    return read.stat().st_size == before


def test_others_are_answered_meanwhile(client, model):
    read = model.with_name("model.read")
    read.write_text("")
    asked = {"model": str(model), "max_tokens": 5, "temperature": 0}
    with send(client, post(asked | {"prompt": LONG})) as connection:
        wait_until(lambda: read.read_text().count("\n") > 20)
        assert urllib.request.urlopen(f"{client.base_url}models", timeout=5).status == 200
        assert client.completions.create(prompt="hello", **asked).choices[0].text == reply(model, "hello", 5)
        assert read.read_text().count("20\n") < 4000, "the long prompt is still being read"
        connection.settimeout(0.01)
        with pytest.raises(TimeoutError):
            connection.recv(1)


def test_a_short_prompt_does_not_wait_for_long_ones_to_be_tokenised(client, model):
    """They wait for each other."""
    expected = reply(model, "hello", 5)
    body = post({"model": str(model), "prompt": "a b" * 340_000})
    connections = [send(client, body) for _ in range(4)]
    asked = {"model": str(model), "prompt": "hello", "max_tokens": 5, "temperature": 0}
    assert client.completions.create(**asked).choices[0].text == expected
    connections[-1].settimeout(0.01)
    with pytest.raises(TimeoutError):
        connections[-1].recv(1)
    connections[0].settimeout(60)
    assert connections[0].recv(1000).split()[1] == b"400", "more tokens than are read"
    for connection in connections:
        connection.close()


def test_a_server_that_is_stopped_ends_its_replies(model):
    read = model.with_name("model.read")
    read.write_text("")
    body = {"model": str(model), "prompt": "hello", "max_tokens": 4096, "stream": True}
    with served(model) as client:
        connection = send(client, post(body))
        wait_until(lambda: read.read_text().count("\n") > 20)
    received = b""
    while part := connection.recv(2**16):
        received += part
    connection.close()
    assert b'"finish_reason": "length"' in received and b"[DONE]" in received


NONSENSE = [b"{", b"[]", b"\xff" * 1000, b'{"prompt": 5}', b'{"prompt": "a", "max_tokens": 1e9}', b"[" * 10_000, b""]


def test_many_clients_at_once_of_whom_a_third_leave(client, model):
    """None gets an error, or what was written for another; latencies are printed."""
    prompts = [f"text {letter} of many. " for letter in "abcdefgh"]
    expected = {prompt: reply(model, prompt, 24) for prompt in prompts}
    latencies, failures, guard = [], [], threading.Lock()

    def talk(number: int):
        choose = random.Random(number)
        prompt = prompts[number]
        for turn in range(6):
            body = {"model": str(model), "prompt": prompt, "max_tokens": 24, "temperature": 0}
            if choose.random() < 0.4:
                head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                wrong = choose.choice(NONSENSE)
                if status_of(client, head + b"Content-Length: %d\r\n\r\n" % len(wrong) + wrong) != 400:
                    failures.append((number, wrong))
            if number % 3 == 2:
                with send(client, post(body | {"prompt": choose.choice([prompt, LONG]), "stream": bool(turn % 2)})):
                    time.sleep(choose.random() / 2)
                continue
            start = time.monotonic()
            if turn % 2:
                text = "".join(part.choices[0].text for part in client.completions.create(**body, stream=True))
            else:
                text = client.completions.create(**body).choices[0].text
            with guard:
                latencies.append(time.monotonic() - start)
            if text != expected[prompt]:
                failures.append((number, text))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(talk, range(8)))
    assert not failures
    assert len(latencies) == 36
    print(f"seconds of {len(latencies)} requests: {statistics.median(latencies):.2f}, at most {max(latencies):.2f}")
    start = time.monotonic()
    wait_until(lambda: is_still(model.with_name("model.read")))
    assert time.monotonic() - start < 20, "those who left have left no work"
