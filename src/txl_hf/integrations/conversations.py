"""What `txl-serve` does: transformers' server with this package's classes; memories kept between requests."""

import argparse
import copy
import inspect
import math
import time
from collections import OrderedDict
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerationMode

from ..data.loading import find_device, load_config
from ..transfo_xl.cache_transfo_xl import CACHE_NAME, MemoryCache, text_length
from ..transfo_xl.masks_transfo_xl import DOCUMENT_KEYWORDS
from ..transfo_xl.modeling_transfo_xl import TransfoXLForCausalLM
from ..transfo_xl.tokenization_transfo_xl_backend import WORD_MODES

__all__ = ["Conversations", "serve"]

# By which configurations know it, those of old checkpoints too.
LANGUAGE_MODELS = ("TransfoXLForCausalLM", "TransfoXLLMHeadModel")
# Where a `GenerationConfig` of a request has the seed that its reply is drawn with.
SEED = "reply_seed"
# Below it scores divided by the temperature are no numbers of 32 bits, and the likeliest token alone is drawn anyway.
LOWEST_TEMPERATURE = 1e-30
# What OpenAI's clients send of these where they ask for nothing; transformers' server passes over all else in silence.
NOTHING = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
}


class Conversations:
    """`generate` that goes on from what was read before: call it in place of the model's.

    The memory of a text is kept where its prompt ends and where the reply ends. A later text that begins with one of
    these, token for token, is read from there on. Nobody's text is handed to anybody else: a memory is only ever the
    beginning of the text that is asked about.
    """

    def __init__(self, model: TransfoXLForCausalLM, limit: int):
        """Args: limit: how many texts are remembered, the latest ones; each takes two caches at most."""
        self.model, self.limit = model, limit
        self.kept: OrderedDict[tuple[int, ...], MemoryCache] = OrderedDict()

    def generate(self, input_ids: Tensor, **kwargs) -> Any:
        """The model's `generate`, which see; where it reads one row of `input_ids` and nothing beside, and the reply
        token by token, what it reads is remembered."""
        kwargs["input_ids"] = input_ids
        for name in ("past_key_values", "cache"):
            if kwargs.get(name) is None:
                kwargs.pop(name, None)
        if self.limit == 0 or self.model.config.mem_len == 0 or not self.is_one_text(**kwargs):
            return self.generate_afresh(**kwargs)
        tokens = input_ids[0].tolist()
        cache = self.recall(tokens)
        self.read(input_ids, cache)
        # The last token is left to generate, which needs its logits.
        self.keep(tokens[:-1], copy.deepcopy(cache))
        output = self.generate_afresh(**{CACHE_NAME: cache}, **kwargs)
        alone = isinstance(output, Tensor)
        sequence = output if alone else output.sequences
        # The last token of the reply has not been read. Who gets the cache too may go on with it.
        self.keep(sequence[0, : text_length(cache)].tolist(), cache if alone else copy.deepcopy(cache))
        return output

    def is_one_text(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        **kwargs,
    ) -> bool:
        """Whether `generate` would read one text token by token, each once, and nothing beside."""
        beside = {*inspect.signature(self.model.forward).parameters, *DOCUMENT_KEYWORDS, "cache"} - {"use_cache"}
        if any(kwargs.get(name) is not None for name in beside):
            return False
        assistant = kwargs.pop("assistant_model", None)
        config, _ = self.model._prepare_generation_config(generation_config, **kwargs)
        # Without a mask generate looks for padding.
        real = input_ids != config.pad_token_id if attention_mask is None else attention_mask
        if len(input_ids) > 1 or not bool(torch.as_tensor(real).all()):
            return False
        by_token = config.get_generation_mode(assistant) in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        alone = (config.num_return_sequences or 1) == 1
        return alone and by_token and config.use_cache is not False and config.cache_implementation is None

    def generate_afresh(self, **kwargs) -> Any:
        seed = getattr(kwargs.get("generation_config"), SEED, None)
        if seed is None:
            return type(self.model).generate(self.model, **kwargs)
        # Nothing that other replies are drawn with changes.
        device = self.model.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            return type(self.model).generate(self.model, **kwargs)

    def recall(self, tokens: list[int]) -> MemoryCache:
        """The memory of the longest text that these tokens go on from; an empty one where there is none."""
        beginnings = (text for text in self.kept if len(text) < len(tokens) and text == tuple(tokens[: len(text)]))
        longest = max(beginnings, key=len, default=None)
        if longest is None:
            return MemoryCache(self.model.config)
        self.kept.move_to_end(longest)
        return copy.deepcopy(self.kept[longest])

    @torch.no_grad()
    def read(self, input_ids: Tensor, cache: MemoryCache) -> None:
        """All but the last token of a text, from where the cache ends, in segments as in training."""
        unread = input_ids[:, text_length(cache) : -1]
        if unread.shape[1] > 0:
            for segment in unread.split(self.model.config.tgt_len, dim=1):
                self.model(segment, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def keep(self, tokens: list[int], cache: MemoryCache) -> None:
        if tokens:
            self.kept[tuple(tokens)] = cache
            self.kept.move_to_end(tuple(tokens))
        while len(self.kept) > 2 * self.limit:
            self.kept.popitem(last=False)


def check_request(body: dict[str, Any], unused: set[str]) -> None:
    """Refuse what would fail when an answer has begun, or be read as something else.

    Args:
        body: of a request as OpenAI's clients send it.
        unused: the fields that the server does not read.

    Raises:
        ValueError: names the field, and what would be right.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if name in given and not (type(given[name]) is int and given[name] > 0):
            raise ValueError(f"{name} is {given[name]!r}, but has to be an integer above 0")
    for name, most in {"temperature": math.inf, "top_p": 1}.items():
        if name in given and not (_is_finite(given[name]) and 0 <= given[name] <= most):
            upper = "" if most == math.inf else f", and at most {most}"
            raise ValueError(f"{name} is {given[name]!r}, but has to be a number of at least 0{upper}")
    # The server adds 1 to it, and divides by that the scores of what was written.
    if not (_is_finite(penalty := given.get("frequency_penalty", 0)) and penalty > -1):
        raise ValueError(f"frequency_penalty is {penalty!r}, but has to be a number above -1")
    if "seed" in given and not (type(given["seed"]) is int and -(2**63) <= given["seed"] < 2**64):
        raise ValueError(f"seed is {given['seed']!r}, but has to be an integer of 64 bits")
    if "messages" in body:
        _check_messages(body["messages"])
    for name in given.keys() & unused & NOTHING.keys():
        if given[name] not in NOTHING[name]:
            raise ValueError(f"{name} is {given[name]!r}, which this server does not do: leave it out")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages is {messages!r:.99}, but has to be a list of messages, at least one")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{index}] is {message!r:.99}, but has to have a role and a content")
        if not isinstance(content := message.get("content"), str | list | None):
            raise ValueError(f"the content of messages[{index}] is {content!r:.99}, but has to be a text")


def names_no_device(name: str | None) -> bool:
    """Whether the server itself understands a device of this name: `auto`, or the number of a GPU."""
    return name is not None and (name == "auto" or name.isdigit())


def serve(options: argparse.Namespace) -> None:
    """Start transformers' server and stay in it. Raises ValueError for what is no Transformer-XL."""
    import uvicorn
    from fastapi.responses import JSONResponse
    from transformers.cli.serve import Serve
    from transformers.cli.serving import model_manager, server, utils

    config = load_config(options.model, "model")
    if (known := config.architectures) and not {*known} & {*LANGUAGE_MODELS}:
        raise ValueError(f"model {options.model} is a {known[0]}, and no language model, which alone writes")
    processor: Any = None

    class Manager(model_manager.ModelManager):
        def _load_model(self, *args, **kwargs):
            model = super()._load_model(*args, **kwargs)
            model.generate = Conversations(model, options.texts).generate
            return model

        def _load_processor(self, *args, **kwargs):
            nonlocal processor
            processor = super()._load_processor(*args, **kwargs)
            if processor.chat_template is None:
                processor.apply_chat_template = refuse_chat
            return processor

        @staticmethod
        def process_model_name(model_id: str) -> str:
            """Refuses other models than the server's in `/load_model`, as other requests are refused by now."""
            if model_id not in (options.model, f"{options.model}@main"):
                raise ValueError(f"this server has {options.model} and loads no other model, such as {model_id}")
            return with_revision(model_id)

        @staticmethod
        def get_gen_models(cache_dir: str | None = None) -> list[dict]:
            """What `/v1/models` lists: the one model that requests may name, in place of the Hub's cache."""
            return [{"id": options.model, "object": "model", "created": started, "owned_by": "txl-serve"}]

    def refuse_chat(*args, **kwargs):
        raise ValueError(f"the tokenizer of {options.model} has no chat_template: use /v1/completions")

    def validated(handler, body: dict) -> None:
        as_validated(handler, body)
        check_request(body, handler._unused_fields)

    def chosen(handler, body: dict, *args, **kwargs) -> GenerationConfig:
        """As the server has it, which sets a seed when a request comes, not when its reply is drawn, and takes the
        likeliest token at every temperature unless the model's own configuration draws."""
        temperature, seed = body.get("temperature"), body.get("seed")
        if temperature is not None and temperature < LOWEST_TEMPERATURE:
            temperature = 0
        config = as_usual(handler, body | {"seed": None, "temperature": temperature}, *args, **kwargs)
        asks = body.get("top_p") is not None if temperature is None else temperature > 0
        if asks and body.get("generation_config") is None:
            config.do_sample = True
        setattr(config, SEED, options.default_seed if seed is None else seed)
        return config

    class Writer(utils.GenerateManager):
        def generate_streaming(self, model, tokenizer, inputs, gen_config, *args, **kwargs):
            """Refuses now what `generate` would refuse when the answer has begun."""
            if inputs["input_ids"].shape[-1] == 0:
                raise ValueError("the prompt has no token that could be gone on from: input_ids are (1, 0)")
            gen_config.validate()
            return super().generate_streaming(model, tokenizer, inputs, gen_config, *args, **kwargs)

    class Streamer(utils.DirectStreamer):
        """What decodes as the tokenizer does. The server's decoder knows the last tokens alone: neither that a line
        ended nor which quotation marks a line has had."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            # Of the line that is being written, or of all where lines are nothing special.
            self.ids: list[int] = []
            self.text = self.sent = ""

        def _enqueue(self, item):
            self.sent += item if isinstance(item, str) else ""
            super()._enqueue(item)

        def put(self, value):
            if self._first or self._parser is not None or getattr(processor, "mode", None) is None:
                return super().put(value)
            if processor.mode not in WORD_MODES:
                self.ids += value.tolist()
                return super().put(value)
            # Whoever has gone is noticed without a token too.
            super().put(value[:0])
            for token in value.tolist():
                self.total_tokens += 1
                self.ids.append(token)
                text = processor.decode(self.ids, skip_special_tokens=True)
                if token == processor.line_feed_id:
                    self.send(text)
                    self.ids, self.text, self.sent = [], "", ""
                else:
                    # The last word may yet be joined to what comes next.
                    self.send(commonprefix([self.text, text]))
                    self.text = text

        def send(self, text: str):
            if rest := text[len(self.sent) :]:
                self._enqueue(rest)

        def end(self):
            if self.ids:
                self.send(processor.decode(self.ids, skip_special_tokens=True))
            super().end()

    class Server(uvicorn.Server):
        async def startup(self, *args, **kwargs):
            await super().startup(*args, **kwargs)
            # Requests are answered from here on. Uvicorn has ended the process where it cannot listen.
            port = self.servers[0].sockets[0].getsockname()[1]
            print(f"serving {options.model} at http://{options.host}:{port}/v1", flush=True)

    def built(*args, **kwargs):
        """The application, in which a request that will not do is answered so, and is no failure of the server."""
        app = as_built(*args, **kwargs)
        for kind in (ValueError, TypeError, KeyError):
            app.add_exception_handler(kind, refuse)
        return app

    def refuse(request, error: Exception) -> JSONResponse:
        detail = f"the request lacks {error}" if isinstance(error, KeyError) else str(error)
        return JSONResponse({"detail": detail}, status_code=400)

    started = int(time.time())
    # The server looks classes up in what its module takes for transformers (there may be two), its manager there, and
    # uvicorn's server in uvicorn.
    for name in LANGUAGE_MODELS:
        setattr(model_manager.transformers, name, TransfoXLForCausalLM)
    with_revision = model_manager.ModelManager.process_model_name
    model_manager.ModelManager = Manager
    as_usual, utils.BaseHandler._build_generation_config = utils.BaseHandler._build_generation_config, chosen
    as_validated, utils.BaseHandler._validate_request = utils.BaseHandler._validate_request, validated
    as_built, server.build_server = server.build_server, built
    uvicorn.Server = Server
    utils.DirectStreamer = Streamer
    utils.GenerateManager = Writer
    Serve(
        force_model=options.model,
        host=options.host,
        port=options.port,
        device=options.device if names_no_device(options.device) else find_device(options.device),
        dtype=options.dtype,
        default_seed=options.default_seed,
        enable_cors=options.enable_cors,
    )
