"""Serve a Transformer-XL over HTTP, as OpenAI's clients ask: transformers' own server, which this command starts.

    txl-serve demo-output --port 8000
    curl http://localhost:8000/v1/completions -H "Content-Type: application/json" \\
        -d '{"model": "demo-output", "prompt": "def main(", "max_tokens": 50, "stream": true}'
    curl http://localhost:8000/v1/chat/completions -H "Content-Type: application/json" \\
        -d '{"model": "demo-output", "messages": [{"role": "user", "content": "def main("}], "max_tokens": 50}'

What the model remembers of a text is kept, for the last few texts: where a request goes on from one of them, as the
next turn of a conversation does, only what is new is read. A long prompt is read in segments of the model's tgt_len,
as it was trained. Chat needs a chat template in the tokenizer. A temperature above 0, or a top_p, draws the reply,
with the request's seed if it has one; other fields are transformers'. Requests are answered one after the other: there
is no continuous batching.
"""

import argparse
import errno
import socket
from importlib import import_module

from ..command_line import CommandParser, hub_or_folder, one_line_errors

__all__ = ["main"]

# What transformers' server imports, some of it only when it is started.
NEEDED = ("fastapi", "uvicorn", "openai", "pydantic", "typer", "accelerate")


def main(argv: list[str] | None = None):
    with one_line_errors():
        options = parse_arguments(argv)
        check_address(options.host, options.port)
        # Here, so that nothing slow is loaded to refuse an option.
        for module in NEEDED:
            import_module(module)
        from .conversations import serve

        serve(options)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=hub_or_folder, help="folder or Hub name")
    parser.add_argument("--host", default="localhost", help="address to listen at (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 for any that is free (%(default)s)")
    parser.add_argument("--device", help="(cuda where there is one, otherwise cpu)")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, …; auto: as the weights are (%(default)s)")
    parser.add_argument("--texts", type=int, default=16, help="how many texts are remembered (%(default)s)")
    parser.add_argument("--default_seed", type=int, help="seed of requests without one")
    parser.add_argument("--enable_cors", action="store_true", help="let pages from anywhere ask")
    parser.add_argument("--continuous_batching", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.continuous_batching:
        parser.error("--continuous_batching is not supported: Transformer-XL decodes with a memory, not with pages")
    if not 0 <= options.port < 2**16:
        parser.error(f"--port {options.port} must be between 0 (any that is free) and 65535")
    if options.texts < 0:
        parser.error(f"--texts {options.texts} must be at least 0")
    return options


def check_address(host: str, port: int) -> None:
    """Raise an OSError for an address where nothing can listen: found now, not when the model has been loaded."""
    try:
        for family, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                socket.create_server(address[:2], family=family).close()
            except OSError as error:
                # A name may stand for addresses of a protocol that this machine is without.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) or family == socket.AF_INET:
                    raise
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise OSError(f"--port {port} of {host} is in use: choose another, or 0 for any that is free") from None
        raise OSError(f"--host {host} --port {port}: {error.strerror}") from None


if __name__ == "__main__":
    main()
