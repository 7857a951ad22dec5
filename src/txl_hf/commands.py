"""Where the installed commands begin: a package that is missing, or Ctrl-C while one is imported, is one line."""

from importlib import import_module

from .command_line import one_line_errors


def evaluate(argv: list[str] | None = None) -> None:
    """`txl-evaluate`."""
    _run("evaluation.score", argv)


def export(argv: list[str] | None = None) -> None:
    """`txl-export`."""
    _run("integrations.onnx_export", argv)


def generate(argv: list[str] | None = None) -> None:
    """`txl-generate`."""
    _run("integrations.generate", argv)


def prepare(argv: list[str] | None = None) -> None:
    """`txl-prepare`."""
    _run("data.prepare", argv)


def serve(argv: list[str] | None = None) -> None:
    """`txl-serve`."""
    _run("integrations.serve", argv)


def train(argv: list[str] | None = None) -> None:
    """`txl-train`."""
    _run("training.command", argv)


def _run(module: str, argv: list[str] | None) -> None:
    with one_line_errors():
        import_module(f".{module}", __package__).main(argv)
