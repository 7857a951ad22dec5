"""The HTTP application of `txl-serve`: the part of OpenAI's API that a language model can answer.

A request is read on the event loop; its prompt is tokenised, and its reply is generated, in other threads.
"""

import argparse
import asyncio
import contextlib
import copy
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from txl_hf import MemoryCache, TransfoXLForCausalLM
from txl_hf.integrations.conversations import Conversations, Reply

from .fields import ChatRequest, CompletionRequest, ModelRequest, TextRequest

# Requests that are answered at a time, by turns.
REPLIES = 4
# Prompts of requests with more bytes are tokenised one at a time.
LONG = 20_000
# Most tokens of a reply if the request sets no number.
USUAL_TOKENS = 1024
# Most tokens of a prompt for a model without memory, which reads the whole text for each new token.
WITHOUT_MEMORY = 4096
# Below this, scores divided by the temperature overflow fp32, and sampling only draws the likeliest token anyway.
LOWEST_TEMPERATURE = 1e-30
# Seconds between two checks of whether a client is still connected.
CHECK_EVERY = 0.1

Kind = TypeVar("Kind", bound=ModelRequest)


def error_body(error: StarletteHTTPException) -> dict:
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return {"error": {"message": error.detail, "type": kind, "param": None, "code": None}}


async def _refused(request: Request, error: Any) -> Response:
    return JSONResponse(error_body(error), error.status_code)


async def _disconnected(request: Request, error: Any) -> Response:
    return Response(status_code=400)


# Coroutines, because Starlette calls functions in a pool of threads.
HANDLERS = {StarletteHTTPException: _refused, ClientDisconnect: _disconnected}


def refusal(error: ValidationError) -> HTTPException:
    """The first of the errors: the field, its value and what would be right."""
    first = error.errors(include_url=False, include_context=False)[0]
    name, value = ".".join(map(str, first["loc"])) or "the body", f"{first['input']!r:.99}"
    details = {
        "missing": f"{name} is missing",
        "extra_forbidden": f"{name} is {value}, which this server does not do: leave it out",
        "json_invalid": f"{name} is no JSON: {first['msg']}",
    }
    return HTTPException(400, details.get(first["type"], f"{name} is {value}: {first['msg']}"))


class Server:
    """One model with its tokenizer, within the bounds of the options of `txl-serve`."""

    def __init__(
        self,
        model: TransfoXLForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        options: argparse.Namespace,
        is_closing: Callable[[], bool],
        start: MemoryCache | None,
    ):
        self.model, self.tokenizer, self.options, self.is_closing = model, tokenizer, options, is_closing
        one = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True}
        model.generation_config.update(**one, cache_implementation=None, max_length=None)
        self.max_prompt = options.max_prompt if model.config.mem_len > 0 else min(options.max_prompt, WITHOUT_MEMORY)
        self.conversations = Conversations(model, options.max_memories * 2**30, start)
        self.writers, self.long_prompt = ThreadPoolExecutor(REPLIES), asyncio.Lock()

    async def read(self, request: Request) -> bytes:
        """The body of a request. Raises HTTPException for one that is too long, too slow, or no JSON by its header."""
        # A page of another origin cannot send JSON unless CORS allows it.
        if "json" not in request.headers.get("content-type", ""):
            raise HTTPException(415, "the request needs the header Content-Type: application/json")
        body, most = bytearray(), self.options.max_body * 2**20
        try:
            async with asyncio.timeout(self.options.max_seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise HTTPException(413, f"the body is longer than {most:,.0f} bytes")
        except TimeoutError:
            raise HTTPException(408, f"the body did not come within {self.options.max_seconds:g} s") from None
        return bytes(body)

    def parse(self, body: bytes, kind: type[Kind]) -> Kind:
        """The fields of a body. Raises HTTPException for any other field, and for another model."""
        try:
            fields = kind.model_validate_json(body)
        except ValidationError as error:
            raise refusal(error) from None
        name = self.options.model
        if fields.model not in (None, name, f"{name}@main"):
            raise HTTPException(400, f"this server has {name} and loads no other model, such as {fields.model:.99}")
        return fields

    async def encode(self, request: Request, fields: CompletionRequest | ChatRequest, is_long: bool) -> Tensor:
        """(1, L) tokens of a prompt. Raises HTTPException for none, too many, and symbols outside the vocabulary."""
        async with self.long_prompt if is_long else contextlib.nullcontext():
            if await request.is_disconnected():
                raise ClientDisconnect
            try:
                ids = await asyncio.to_thread(fields.tokens, self.tokenizer)
            except Exception as error:  # Templates raise errors of any type.
                raise HTTPException(400, str(error)) from None
        if ids.shape[1] == 0:
            raise HTTPException(400, f"the prompt has no token to go on from: input_ids are {tuple(ids.shape)}")
        if ids.shape[1] > self.max_prompt:
            raise HTTPException(400, f"the prompt has {ids.shape[1]:,} tokens, but {self.max_prompt:,} may be read")
        if (highest := int(ids.max())) >= self.model.config.vocab_size:
            token = self.tokenizer.convert_ids_to_tokens(highest)
            raise HTTPException(400, f"the prompt has {token!r}, a token of the tokenizer that the model has not")
        return ids.to(self.model.device)

    def generation_config(self, fields: TextRequest) -> GenerationConfig:
        """The model's generation config, with the fields of a request. Raises HTTPException for too many tokens."""
        config, most = copy.deepcopy(self.model.generation_config), self.options.max_tokens
        config.max_new_tokens = min(USUAL_TOKENS, most)
        if fields.generation_config is not None:
            config.update(**fields.generation_config.model_dump(exclude_none=True))
        config.max_new_tokens = fields.max_completion_tokens or fields.max_tokens or config.max_new_tokens
        if config.max_new_tokens > most:
            raise HTTPException(400, f"max_tokens is {config.max_new_tokens:,}, but {most:,} may be written")
        if fields.temperature is not None:
            config.temperature, config.do_sample = fields.temperature, True
        elif fields.top_p is not None and fields.generation_config is None:
            config.do_sample = True
        if fields.top_p is not None:
            config.top_p = fields.top_p
        if fields.frequency_penalty:
            config.repetition_penalty = 1 + fields.frequency_penalty  # As transformers' server takes it.
        if config.temperature is not None and config.temperature < LOWEST_TEMPERATURE:
            config.temperature, config.do_sample = None, False
        return config

    async def answer(self, request: Request, kind: type[CompletionRequest] | type[ChatRequest]) -> Response:
        body = await self.read(request)
        fields = self.parse(body, kind)
        config = self.generation_config(fields)
        answer = Answer(self, fields, await self.encode(request, fields, len(body) > LONG), config)
        if fields.stream:
            return StreamingResponse(answer.events(request), media_type="text/event-stream")
        text = "".join([piece async for piece in answer.text(request)])
        return JSONResponse(answer.body(text, streamed=False))


class Answer:
    """The answer to one request."""

    def __init__(self, server: Server, fields: CompletionRequest | ChatRequest, ids: Tensor, config: GenerationConfig):
        self.server, self.fields, self.ids, self.config = server, fields, ids, config
        self.head = {"id": f"txl-{uuid.uuid4().hex}", "created": int(time.time()), "model": server.options.model}
        self.loop, self.pieces = asyncio.get_running_loop(), asyncio.Queue[str | None]()
        self.reply = Reply(server.tokenizer, self.send, config.max_new_tokens, config.eos_token_id, fields.stop)
        self.is_gone = threading.Event()

    async def text(self, request: Request) -> AsyncIterator[str]:
        """The reply, piece by piece, until it ends or its client disconnects."""
        writing = self.loop.run_in_executor(self.server.writers, self.write)
        watching = self.loop.create_task(self.watch(request))
        try:
            while (piece := await self.pieces.get()) is not None:
                yield piece
            await writing
            if not self.reply.tokens:
                seconds = f"{self.server.options.max_seconds:g} s"
                # 400, because OpenAI's client repeats a request after a 5xx.
                raise HTTPException(400, f"the prompt was not read within {seconds}, or before the server closed")
        finally:
            self.is_gone.set()
            watching.cancel()

    def send(self, piece: str | None) -> None:
        """From a thread: the next piece of the reply, or None behind the last."""
        self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)

    def write(self) -> None:
        """In a thread: generate the reply, and send its text."""
        options, end = self.server.options, time.monotonic() + self.server.options.max_seconds

        def is_over() -> bool:
            return self.is_gone.is_set() or self.server.is_closing() or time.monotonic() > end

        try:
            # The client may have gone while the request waited for a thread.
            if not is_over():
                seed = options.default_seed if self.fields.seed is None else self.fields.seed
                settings = {"stopping_criteria": [self.reply], "generation_config": self.config}
                self.server.conversations.generate(self.ids, is_over, seed, **settings)
                self.reply.end()
        finally:
            self.send(None)

    async def watch(self, request: Request) -> None:
        while not await request.is_disconnected():
            await asyncio.sleep(CHECK_EVERY)
        self.is_gone.set()

    def body(self, text: str, streamed: bool, is_last: bool = True) -> dict:
        body = self.head | self.fields.answer(text, streamed)
        body["choices"][0]["finish_reason"] = self.reply.finish_reason if is_last else None
        if is_last:
            read, written = self.ids.shape[1], len(self.reply.tokens)
            body["usage"] = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        return body

    async def events(self, request: Request) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        try:
            async for piece in self.text(request):
                yield event(self.body(piece, streamed=True, is_last=False))
        except HTTPException as error:
            yield event(error_body(error))
            return
        last = self.body("", streamed=True)
        yield event(last)
        if self.fields.stream_options.include_usage:
            yield event(last | {"choices": []})
        yield "data: [DONE]\n\n"


def event(body: dict) -> str:
    return f"data: {json.dumps(body)}\n\n"


def build_app(
    model: TransfoXLForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    options: argparse.Namespace,
    is_closing: Callable[[], bool],
    start: MemoryCache | None,
) -> FastAPI:
    """The application. Replies end when it is closing, and all texts go on from `start`."""
    server = Server(model, tokenizer, options, is_closing, start)
    app, started = FastAPI(openapi_url=None, exception_handlers=HANDLERS), int(time.time())
    hosts = ["localhost", "127.0.0.1", "[::1]", options.host, f"[{options.host}]", *options.allowed_host]
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    if options.enable_cors:
        app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/v1/models")
    async def models() -> Response:
        one = {"id": options.model, "object": "model", "created": started, "owned_by": "txl-serve"}
        return JSONResponse({"object": "list", "data": [one]})

    for path, kind in {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}.items():
        app.add_route(path, partial(server.answer, kind=kind), methods=["POST"])

    @app.post("/load_model")
    async def load_model(request: Request) -> Response:
        """The first request of `transformers chat`, to load a model, which is loaded already."""
        server.parse(await server.read(request), ModelRequest)
        ready = {"status": "ready", "model": options.model, "cached": True}
        return Response(event(ready), media_type="text/event-stream")

    return app
