"""What `txl-serve` does: transformers' server with this package's classes; memories kept between requests."""

import argparse
import copy
import functools
import inspect
import time
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerationMode

from .cache_transfo_xl import CACHE_NAME, MemoryCache, text_length
from .inputs_transfo_xl import DOCUMENT_KEYWORDS
from .loading import find_device, load_config
from .modeling_transfo_xl import TransfoXLForCausalLM

__all__ = ["Conversations", "serve"]

# By which configurations know it, those of old checkpoints too.
LANGUAGE_MODELS = ("TransfoXLForCausalLM", "TransfoXLLMHeadModel")
# Where a `GenerationConfig` of a request has the seed that its reply is drawn with.
SEED = "reply_seed"


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


def names_no_device(name: str | None) -> bool:
    """Whether the server itself understands a device of this name: `auto`, or the number of a GPU."""
    return name is not None and (name == "auto" or name.isdigit())


def serve(options: argparse.Namespace) -> None:
    """Start transformers' server and stay in it. Raises ValueError for what is no Transformer-XL."""
    import uvicorn
    from fastapi import HTTPException
    from tokenizers.decoders import DecodeStream
    from transformers.cli.serve import Serve
    from transformers.cli.serving import model_manager, utils

    config = load_config(options.model, "model")
    if (known := config.architectures) and not {*known} & {*LANGUAGE_MODELS}:
        raise ValueError(f"model {options.model} is a {known[0]}, and no language model, which alone writes")
    line_feed: int | None = None

    class Manager(model_manager.ModelManager):
        def _load_model(self, *args, **kwargs):
            model = super()._load_model(*args, **kwargs)
            model.generate = refusing(Conversations(model, options.texts).generate)
            return model

        def _load_processor(self, *args, **kwargs):
            processor = super()._load_processor(*args, **kwargs)
            nonlocal line_feed
            line_feed = getattr(processor, "line_feed_id", None)
            if processor.chat_template is None:
                processor.apply_chat_template = refuse_chat
            return processor

        @staticmethod
        def get_gen_models(cache_dir: str | None = None) -> list[dict]:
            """What `/v1/models` lists: the one model that requests may name, in place of the Hub's cache."""
            return [{"id": options.model, "object": "model", "created": started, "owned_by": "txl-serve"}]

    def refusing(function):
        """The function, whose refusals are answers to the request, and no failures of the server."""

        @functools.wraps(function)
        def call(*args, **kwargs):
            try:
                return function(*args, **kwargs)
            except (ValueError, TypeError) as error:
                raise HTTPException(400, str(error)) from error

        return call

    def refuse_chat(*args, **kwargs):
        raise HTTPException(400, f"the tokenizer of {options.model} has no chat_template: use /v1/completions")

    @refusing
    def chosen(handler, body: dict, *args, **kwargs) -> GenerationConfig:
        """As the server has it, which sets a seed when a request comes, not when its reply is drawn, and takes the
        likeliest token at every temperature unless the model's own configuration draws."""
        config = as_usual(handler, body | {"seed": None}, *args, **kwargs)
        temperature, seed = body.get("temperature"), body.get("seed")
        asks = body.get("top_p") is not None if temperature is None else float(temperature) > 0
        if asks and body.get("generation_config") is None:
            config.do_sample = True
        if seed is not None:
            # What is no seed is refused now, not when an answer has begun.
            try:
                torch.Generator().manual_seed(seed)
            except RuntimeError:
                raise ValueError(f"seed is {seed!r}, but has to be an integer of 64 bits") from None
        setattr(config, SEED, options.default_seed if seed is None else seed)
        return config

    class Streamer(utils.DirectStreamer):
        """What decodes as the tokenizer does, line by line."""

        def put(self, value):
            if self._first or self._parser is not None or line_feed is None:
                return super().put(value)
            for token in value.tolist():
                super().put(value.new_tensor([token]))
                if token == line_feed:
                    self._enqueue("\n")
                    self._decode_stream = DecodeStream([], skip_special_tokens=True)

    class Server(uvicorn.Server):
        async def startup(self, *args, **kwargs):
            await super().startup(*args, **kwargs)
            # Requests are answered from here on. Uvicorn has ended the process where it cannot listen.
            port = self.servers[0].sockets[0].getsockname()[1]
            print(f"serving {options.model} at http://{options.host}:{port}/v1", flush=True)

    started = int(time.time())
    # The server looks classes up in what its module takes for transformers (there may be two), its manager there, and
    # uvicorn's server in uvicorn.
    for name in LANGUAGE_MODELS:
        setattr(model_manager.transformers, name, TransfoXLForCausalLM)
    model_manager.ModelManager = Manager
    as_usual, utils.BaseHandler._build_generation_config = utils.BaseHandler._build_generation_config, chosen
    uvicorn.Server = Server
    utils.DirectStreamer = Streamer
    Serve(
        force_model=options.model,
        host=options.host,
        port=options.port,
        device=options.device if names_no_device(options.device) else find_device(options.device),
        dtype=options.dtype,
        default_seed=options.default_seed,
        enable_cors=options.enable_cors,
    )
