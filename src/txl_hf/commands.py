"""Where the installed commands begin: a package that is missing, or Ctrl-C while one is imported, is one line."""

from functools import partial
from importlib import import_module

from .command_line import one_line_errors


@one_line_errors()
def _run(module: str, argv: list[str] | None = None) -> None:
    import_module(f".{module}", __package__).main(argv)


evaluate = partial(_run, "evaluation.score")
export = partial(_run, "integrations.onnx_export")
generate = partial(_run, "integrations.generate")
prepare = partial(_run, "data.prepare")
serve = partial(_run, "serve.command")
train = partial(_run, "training.command")
