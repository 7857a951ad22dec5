"""Code that the commands share: the spelling of options, the options that several commands have, one-line errors."""

import argparse
import contextlib
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import field
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

# The extra of this package, or the package, that installs a module.
_TRAIN = "accelerate datasets evaluate matplotlib pandas pyarrow pytorch_optimizer tensorboard yaml"
REQUIREMENTS = {
    **dict.fromkeys(_TRAIN.split(), "txl-hf[train]"),
    **dict.fromkeys(("mido", "miditok", "symusic", "music21", "pretty_midi"), "txl-hf[music]"),
    **dict.fromkeys(("onnx", "onnx_ir", "onnxruntime", "onnxscript"), "txl-hf[export]"),
    **dict.fromkeys(("fastapi", "uvicorn"), "txl-hf[serve]"),
    "lm_eval": "txl-hf[lm-eval]",
    "trl": "txl-hf[trl]",
    "triton": "txl-hf[triton]",
    "gradio": "gradio",
    "peft": "peft",
    "popgym": "popgym",
    **dict.fromkeys(("gymnasium", "sb3_contrib", "stable_baselines3"), "sb3-contrib"),
    **dict.fromkeys(("tensordict", "torchrl"), "torchrl"),
}


class CommandParser(argparse.ArgumentParser):
    """An `ArgumentParser` whose options may be typed with hyphens or with underscores, however they are declared. An
    OSError of an option's type ends the command in one line."""

    def parse_known_args(self, args=None, namespace=None):
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._as_declared(arg) for arg in given], namespace)

    def _get_value(self, action, arg_string):
        try:
            return super()._get_value(action, arg_string)
        except OSError as error:
            sys.exit(f"error: {(action.option_strings or [action.dest])[0]} {error}")

    def _as_declared(self, argument: str) -> str:
        """An option, or the beginning of one, in the spelling in which it is declared."""
        if not argument.startswith("--"):
            return argument
        name, equals, value = argument.partition("=")
        alike = (option for option in self._option_string_actions if _plain(option).startswith(_plain(name)))
        return next(alike, name)[: len(name)] + equals + value


def option(text: str, default: Any = None) -> Any:
    """A field of an argument class with its line in --help."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": text})
    return field(default=default, metadata={"help": text})


def _plain(option: str) -> str:
    return option.replace("_", "-")


@contextlib.contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """A context in which SIGTERM (batch systems) and SIGHUP (a lost terminal) end the command as Ctrl-C does."""
    handlers = {}
    for name in ("SIGTERM", "SIGHUP"):
        # Windows has no SIGHUP, nohup ignores it, and only the main thread may set a handler.
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            with contextlib.suppress(ValueError):
                handlers[number] = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """End the command with one line and status 1 for errors that a user can mend: values, files, missing packages."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit("stopped")
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, KeyboardInterrupt):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            # datasets turns Ctrl-C in its processes into an error of its own.
            sys.exit("stopped")
        if isinstance(error, BrokenPipeError):
            # The program that reads the output has ended (`| head`). What is still in the buffer is discarded at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        if isinstance(error, ModuleNotFoundError):
            sys.exit(f"error: {error.name} is not installed{_how_to_install(str(error.name))}")
        if isinstance(error, OSError) and error.strerror:
            sys.exit(f"error: {'' if error.filename is None else f'{error.filename}: '}{error.strerror}")
        if isinstance(error, ValueError | OSError):
            sys.exit(f"error: {' '.join(str(error).split())}")
        raise


def _how_to_install(module: str) -> str:
    if module.startswith("txl_hf."):
        # A program of examples/: missing if only `src` is on the path, or if the editable install is older than it.
        return ": pip install -e . in the folder of the clone"
    requirement = REQUIREMENTS.get(module.partition(".")[0])
    if requirement is None:
        return ""
    if "[" not in requirement:
        return f": pip install {requirement}"
    try:
        # pip adds an extra to an installed package, even to one that is not published.
        distribution("txl-hf")
    except PackageNotFoundError:
        return f': pip install "{requirement.replace("txl-hf", ".")}" in the folder of the clone'
    return f': pip install "{requirement}"'


def hub_or_folder(name: str) -> str:
    """The type of an option that takes a name on the Hub or a folder: of a model, a tokenizer, a data set.

    Raises:
        FileNotFoundError: it looks like a path, by its first character, its separators or a sibling (`runs/a` beside
            `runs/b/config.json`), and does not exist: without a network, the Hub answers after half a minute.
    """
    path = Path(name)
    begins_as_path = name.startswith((".", "~")) or path.is_absolute()
    separated_as_path = len(path.parts) > 2 or "\\" in name or name.endswith("/")
    beside_another = len(path.parts) == 2 and any(path.parent.glob("*/*.json"))
    if (begins_as_path or separated_as_path or beside_another) and not path.exists():
        raise FileNotFoundError(f"{name} does not exist: give a folder, or a name on the Hub")
    return name


def _number(kind: type, fits: Callable[[Any], bool], wanted: str, text: str) -> Any:
    with contextlib.suppress(ValueError):
        if fits(number := kind(text)):
            return number
    raise argparse.ArgumentTypeError(f"{text!r} has to be {wanted}")


# Types of options, which raise an ArgumentTypeError for other numbers.
at_least_one = partial(_number, int, lambda number: number >= 1, "a whole number, at least 1")
at_least_zero = partial(_number, int, lambda number: number >= 0, "a whole number, at least 0")
positive = partial(_number, float, lambda number: 0 < number < math.inf, "a number above 0, and finite")
not_negative = partial(_number, float, lambda number: 0 <= number < math.inf, "a number, at least 0, and finite")


def existing_file(name: str) -> Path:
    """The type of an option that takes a file to read. Raises an OSError unless there is one."""
    path = Path(name)
    if path.is_dir():
        raise IsADirectoryError(f"{name} is a folder, not a file")
    if not path.exists():
        raise FileNotFoundError(f"{name} does not exist")
    return path


def new_path(name: str) -> Path:
    """The type of an option that takes a file or folder to write. Raises a FileExistsError for one that is there."""
    path = Path(name)
    if os.path.lexists(path):
        raise FileExistsError(f"{name} exists: choose another, or remove it")
    return path


def add_scoring_options(parser: argparse.ArgumentParser, data: str, plot: str) -> None:
    """The options of every command that scores a text with a model; `data` and `plot` say what these two are."""
    add = parser.add_argument
    add("--model", type=hub_or_folder, required=True, help="folder or Hub name")
    add("--data", type=Path, required=True, help=data)
    add("--segment_length", type=int, help="tokens in one pass (the model's tgt_len)")
    add("--ext_len", type=int, help="tokens read again with each segment (the model's)")
    add("--clamp_len", type=int, help="(the model's)")
    add("--same_length", choices=["true", "false"], help="(the model's)")
    add("--document_end", metavar="TOKEN", help="token that ends each document, or none (as the data was prepared)")
    add("--batch_size", type=int, help="streams that the text is cut into (1)")
    add("--device", help="(cuda where there is one, otherwise cpu)")
    add("--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="(%(default)s)")
    add("--output", type=Path, help="JSON file to write")
    add("--plot", type=Path, help=f"PNG file to write: {plot}")


def check_files(options: argparse.Namespace) -> None:
    """Refuse, before any work, a text that does not exist, output files that exist or cannot be written, one file for
    both, and a plot in a format that cannot be drawn."""
    if not options.data.exists():
        raise FileNotFoundError(f"--data {options.data} does not exist: write one with txl-prepare")
    for path in filter(None, (options.output, options.plot)):
        if os.path.lexists(path):
            raise FileExistsError(f"{path} exists: choose another file, or remove it")
        folder = next(folder for folder in path.absolute().parents if folder.exists())
        if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            problem = "may not be written to" if folder.is_dir() else "is no folder"
            raise PermissionError(f"{path} cannot be written, as {folder} {problem}: choose another file")
    if options.plot is not None:
        if options.output is not None and options.output.resolve() == options.plot.resolve():
            raise ValueError(f"--output and --plot are the same file, {options.plot}: give each its own")
        import matplotlib.pyplot  # noqa: F401 -- a missing matplotlib is an error here.
        from matplotlib.backend_bases import FigureCanvasBase

        drawn = FigureCanvasBase.get_supported_filetypes()
        if options.plot.suffix[1:].lower() not in drawn:
            raise ValueError(f"--plot {options.plot} must end in one of .{', .'.join(sorted(drawn))}")
