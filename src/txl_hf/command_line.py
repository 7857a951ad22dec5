"""What the commands share: options with underscores or hyphens, and errors in one line. It imports nothing slow."""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence

__all__ = ["CommandParser", "one_line_errors"]

# Which extra has what another than `train` has.
EXTRAS = dict.fromkeys(("miditok", "symusic", "music21", "pretty_midi"), "music")


class CommandParser(argparse.ArgumentParser):
    """An `ArgumentParser` whose options are declared with underscores and may be typed with hyphens."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace=None):  # type: ignore[override]
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([_with_underscores(arg) for arg in given], namespace)


def _with_underscores(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """End the command with one line and status 1 for what its user can mend: values, files, a package to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(str(error.name).partition(".")[0], "train")
        sys.exit(f'error: {error.name} is not installed: pip install "txl-hf[{extra}]"')
    except (ValueError, OSError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        sys.exit("stopped")
