"""Serve a Transformer-XL over HTTP, to OpenAI's clients, for one's own machine.

    txl-serve demo-output --port 8000
    curl http://localhost:8000/v1/completions -H "Content-Type: application/json" \\
        -d '{"model": "demo-output", "prompt": "def main(", "max_tokens": 50, "stream": true}'
    curl http://localhost:8000/v1/chat/completions -H "Content-Type: application/json" \\
        -d '{"model": "demo-output", "messages": [{"role": "user", "content": "def main("}], "max_tokens": 50}'

The memories of the latest texts are kept: where a request goes on from one of them, as the next turn of a conversation
does, only what is new is read. Chat needs a chat template in the tokenizer. A temperature above 0, or a top_p, draws
the reply, with the request's seed if it has one. Four requests are answered at a time.
"""

import argparse
import errno
import os
import socket
from typing import Any

from transformers import AutoTokenizer

from txl_hf import MemoryCache, TransfoXLForCausalLM, load_memory
from txl_hf.command_line import (
    CommandParser,
    at_least_one,
    existing_file,
    hub_or_folder,
    not_negative,
    one_line_errors,
    positive,
)
from txl_hf.data.loading import check_writes_text, find_device, load_config, load_language_model
from txl_hf.transfo_xl.cache_transfo_xl import CACHE_NAME

# Names of a language model in configurations, those of old checkpoints too.
LANGUAGE_MODELS = {"TransfoXLForCausalLM", "TransfoXLLMHeadModel"}
# Connections beyond these are answered 503.
CONNECTIONS = 64


@one_line_errors()
def main(argv: list[str] | None = None) -> None:
    options = parse_arguments(argv)
    with listen(options.host, options.port) as listener:
        serve(options, listener)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=hub_or_folder, help="folder or Hub name")
    add("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    add("--port", type=int, default=8000, help="0 for any that is free (%(default)s)")
    add("--device", help="(cuda where there is one, otherwise cpu)")
    dtypes = ["auto", "float32", "bfloat16", "float16"]
    add("--dtype", choices=dtypes, default="auto", help="auto: as the weights are (%(default)s)")
    add("--default_seed", type=int, help="seed of requests without one")
    add("--allowed_host", metavar="NAME", action="append", default=[], help="another name that a Host header may have")
    add("--enable_cors", action="store_true", help="allow requests from pages of any origin")
    add("--max_body", type=positive, default=1, metavar="MIB", help="bound of a request's size (%(default)s)")
    add("--max_prompt", type=at_least_one, default=100_000, metavar="TOKENS", help="bound of a prompt (%(default)s)")
    add("--max_tokens", type=at_least_one, default=4096, metavar="TOKENS", help="bound of a reply (%(default)s)")
    add("--max_seconds", type=positive, default=120, metavar="SECONDS", help="bound of an answer's time (%(default)s)")
    kept = "bound of what is kept between requests (%(default)s)"
    add("--max_memories", type=not_negative, default=2, metavar="GIB", help=kept)
    add("--memory", type=existing_file, metavar="FILE", help="of save_memory: what every text goes on from")
    options = parser.parse_args(argv)
    if not 0 <= options.port < 2**16:
        parser.error(f"--port {options.port} must be between 0 (any that is free) and 65535")
    return options


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises an OSError that names the option before a model is loaded."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise OSError(f"--port {port} of {host} is in use: choose another, or 0 for any that is free") from None
        raise OSError(f"--host {host} --port {port}: {error.strerror}") from None


def serve(options: argparse.Namespace, listener: socket.socket) -> None:
    """Answer requests until a signal ends it. Raises ValueError for any other model than a language model."""
    import uvicorn

    from .app import build_app

    config = load_config(options.model, "model")
    if (known := config.architectures) and not LANGUAGE_MODELS.intersection(known):
        raise ValueError(f"model {options.model} is a {known[0]}, and no language model, which alone writes")
    check_writes_text(options.model)
    device = find_device(options.device)
    model = load_language_model(options.model, dtype=options.dtype).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    start = None if options.memory is None else load_start(options.memory, model)
    app = build_app(model, tokenizer, options, lambda: server.should_exit, start)
    limits = {"limit_concurrency": CONNECTIONS, "timeout_graceful_shutdown": 10}
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", server_header=False, **limits))
    # Clients that connected while the model was loading wait in the listener's queue.
    host = f"[{options.host}]" if ":" in options.host else options.host
    print(f"serving {options.model} at http://{host}:{listener.getsockname()[1]}/v1", flush=True)
    server.run(sockets=[listener])


def load_start(path: str | os.PathLike, model: TransfoXLForCausalLM) -> MemoryCache:
    """The memory of a file. Raises a ValueError if texts cannot continue from it."""
    cache: Any = load_memory(path, model).get(CACHE_NAME)
    mem_len = model.config.mem_len
    layers = cache.layers if isinstance(cache, MemoryCache) else []
    if not layers or len(layers[0].keys) != 1 or layers[0].get_max_length() <= mem_len:
        raise ValueError(
            f"--memory {path} is no MemoryCache of one row for mem_len={mem_len}: save what a call of this model with "
            "use_cache=True returned"
        )
    return cache


if __name__ == "__main__":
    main()
