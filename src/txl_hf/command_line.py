"""What the commands share: how options are spelt, which of them mean the same everywhere, and errors in one line.

It imports nothing slow.
"""

import argparse
import contextlib
import difflib
import math
import os
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

__all__ = [
    "CommandParser",
    "add_scoring_options",
    "at_least_one",
    "check_files",
    "existing_file",
    "hub_or_folder",
    "new_path",
    "one_line_errors",
    "positive",
    "wait_briefly",
]

# Turns of a loop, some tenths of a millisecond: longer than a thread waits for the others' part of a product, shorter
# than it waits for one whose core another program has.
SPIN_COUNT = 10_000

# What brings a module: an extra of this package, or a package of its own.
_TRAIN = "accelerate datasets evaluate matplotlib pandas pyarrow pytorch_optimizer tensorboard yaml"
REQUIREMENTS = {
    **dict.fromkeys(_TRAIN.split(), "txl-hf[train]"),
    **dict.fromkeys(("mido", "miditok", "symusic", "music21", "pretty_midi"), "txl-hf[music]"),
    **dict.fromkeys(("onnx", "onnxruntime", "onnxscript"), "txl-hf[export]"),
    **dict.fromkeys(("fastapi", "uvicorn"), "txl-hf[serve]"),
    "lm_eval": "txl-hf[lm-eval]",
    "trl": "txl-hf[trl]",
    "triton": "txl-hf[triton]",
    "gradio": "gradio",
    "peft": "peft",
    "popgym": "popgym",
    **dict.fromkeys(("gymnasium", "sb3_contrib", "stable_baselines3"), "sb3-contrib"),
}


class CommandParser(argparse.ArgumentParser):
    """An `ArgumentParser` whose options may be typed with hyphens or with underscores, however they are declared. In
    the place of one that does not exist it names the closest. An OSError of an option's type is said in one line."""

    def parse_args(self, args=None, namespace=None):
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._meant(unknown)}")
        return options

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

    def _meant(self, unknown: list[str]) -> str:
        shown = [option for action in self._actions for option in action.option_strings]
        for argument in unknown:
            name = _plain(argument.partition("=")[0])
            if argument.startswith("--") and (closest := difflib.get_close_matches(name, map(_plain, shown), n=1)):
                return f" (did you mean {next(option for option in shown if _plain(option) == closest[0])}?)"
        return ""


def _plain(option: str) -> str:
    return option.replace("_", "-")


def wait_briefly() -> None:
    """Let threads that wait for one another give up their cores soon. To be called before torch is imported.

    GNU's OpenMP, which PyTorch's wheels for Linux bring, spins for milliseconds, and where other programs want the
    cores too it takes one from whom it waits for. Who has set OMP_WAIT_POLICY or GOMP_SPINCOUNT is left what he chose.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """End the command with one line and status 1 for what its user can mend: values, files, a package to install."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit("stopped")
    except Exception as error:
        if _follows_interrupt(error):
            # Libraries that wait for processes of theirs meet it first, and end in an error of their own.
            sys.exit("stopped")
        if isinstance(error, ModuleNotFoundError):
            sys.exit(f"error: {error.name} is not installed{_how_to_install(str(error.name))}")
        if isinstance(error, ValueError | OSError):
            sys.exit(f"error: {_in_words(error)}")
        raise


def _follows_interrupt(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _in_words(error: Exception) -> str:
    """One line; what the system refuses has its path first, and no number."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


def _how_to_install(module: str) -> str:
    requirement = REQUIREMENTS.get(module.partition(".")[0])
    if requirement is None:
        return ""
    if "[" not in requirement:
        return f": pip install {requirement}"
    try:
        # To a package that is there, wherever it came from, pip adds what its extra lacks: it need not be published.
        distribution("txl-hf")
    except PackageNotFoundError:
        return f': pip install "{requirement.replace("txl-hf", ".")}" in the folder of the clone'
    return f': pip install "{requirement}"'


def hub_or_folder(name: str) -> str:
    """The type of an option that takes a name on the Hub or a folder: of a model, a tokenizer, a data set.

    Raises:
        FileNotFoundError: it is a path that leads nowhere. Without a network, the Hub would be asked for it in vain
            for half a minute; so what begins as no name there does, has other separators, or would be beside a
            folder like it (`runs/a`, where there is `runs/b/config.json`), is not asked for.
    """
    path = Path(name)
    begins_as_path = name.startswith((".", "~")) or path.is_absolute()
    separated_as_path = len(path.parts) > 2 or "\\" in name or name.endswith("/")
    beside_another = len(path.parts) == 2 and any(path.parent.glob("*/*.json"))
    if (begins_as_path or separated_as_path or beside_another) and not path.exists():
        raise FileNotFoundError(f"{name} does not exist: give a folder, or a name on the Hub")
    return name


def at_least_one(text: str) -> int:
    """The type of an option that counts things. Raises an ArgumentTypeError for what is no number from 1 on."""
    return _at_least(1, text)


def at_least_zero(text: str) -> int:
    """The type of an option that may be none of something. Raises an ArgumentTypeError for what is no number from 0
    on."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r} has to be a whole number, at least {least}")
    return number


def positive(text: str) -> float:
    """The type of an option that is a rate or a share. Raises an ArgumentTypeError for what is no number above 0."""
    if (number := _finite(text)) is None or number <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} has to be a number above 0, and finite")
    return number


def not_negative(text: str) -> float:
    """The type of an option that may be 0. Raises an ArgumentTypeError for what is no number from 0 on."""
    if (number := _finite(text)) is None or number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} has to be a number, at least 0, and finite")
    return number


def _finite(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


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
    if path.exists():
        raise FileExistsError(f"{name} exists: choose another, or remove it")
    return path


def add_scoring_options(parser: argparse.ArgumentParser, data: str, plot: str) -> None:
    """The options of every command that scores a text with a model; `data` and `plot` say what these two are."""
    parser.add_argument("--model", type=hub_or_folder, required=True, help="folder or Hub name")
    parser.add_argument("--data", type=Path, required=True, help=data)
    parser.add_argument("--segment_length", type=int, help="tokens in one pass (the model's tgt_len)")
    parser.add_argument("--ext_len", type=int, help="tokens read again with each segment (the model's)")
    parser.add_argument("--clamp_len", type=int, help="(the model's)")
    parser.add_argument("--same_length", choices=["true", "false"], help="(the model's)")
    parser.add_argument(
        "--document_end", metavar="TOKEN", help="token that ends each document, or none (as the data was prepared)"
    )
    parser.add_argument("--batch_size", type=int, help="streams that the text is cut into (1)")
    parser.add_argument("--device", help="(cuda where there is one, otherwise cpu)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="(%(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--plot", type=Path, help=f"PNG file to write: {plot}")


def check_files(options: argparse.Namespace) -> None:
    """Refuse before any work a text that is not there, and what would stop it at its end: files that are there, or
    cannot be written, one file for both, a plot that nothing can draw.
    """
    if not options.data.exists():
        raise FileNotFoundError(f"--data {options.data} does not exist: write one with txl-prepare")
    for path in filter(None, (options.output, options.plot)):
        if path.exists():
            raise FileExistsError(f"{path} exists: choose another file, or remove it")
        folder = next(folder for folder in path.absolute().parents if folder.exists())
        if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            problem = "may not be written to" if folder.is_dir() else "is no folder"
            raise PermissionError(f"{path} cannot be written, as {folder} {problem}: choose another file")
    if options.plot is not None:
        if options.output is not None and options.output.resolve() == options.plot.resolve():
            raise ValueError(f"--output and --plot are the same file, {options.plot}: give each its own")
        import matplotlib.pyplot  # noqa: F401 -- where it is missing, here is the place to say so.
        from matplotlib.backend_bases import FigureCanvasBase

        drawn = FigureCanvasBase.get_supported_filetypes()
        if options.plot.suffix[1:].lower() not in drawn:
            raise ValueError(f"--plot {options.plot} must end in one of .{', .'.join(sorted(drawn))}")
