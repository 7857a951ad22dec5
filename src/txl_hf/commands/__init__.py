"""The commands: their options, and what they print and write, by the library's wings, all of which they may import.

All but `txl-convert` begin here: a package that is missing, or Ctrl-C while one is imported, is one line.
"""

from functools import partial
from importlib import import_module

from ..command_line import one_line_errors


@one_line_errors()
def _run(module: str, argv: list[str] | None = None) -> None:
    import_module(f"txl_hf.{module}").main(argv)


evaluate = partial(_run, "commands.evaluate_lm")
export = partial(_run, "integrations.onnx_export")
generate = partial(_run, "commands.generate_text")
prepare = partial(_run, "commands.prepare_corpus")
serve = partial(_run, "serve.command")
train = partial(_run, "commands.train_lm")
