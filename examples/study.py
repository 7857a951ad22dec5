"""Shared by scripts that train several models and keep results: the command line, and the options of a run."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from txl_hf.command_line import CommandParser
from txl_hf.files import write_text

__all__ = ["StudyParser", "keep_options", "options_that_differ"]


class StudyParser(CommandParser):
    """Where a study's results and models go, and `--smoke`, which never goes where results are kept. What an option
    lists is made once, so that nothing may stand in it twice.

    Args:
        output: folder of the results unless told otherwise. work: folder of models and texts unless told otherwise.
        smoke: the values that options have with `--smoke`, whatever else is given.
    """

    def __init__(self, description: str | None, output: Path, work: Path, **smoke: Any):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.kept, self.work, self.smoke = output, work, smoke
        self.add_argument("--output", type=Path, default=output, help="folder of the results (%(default)s)")
        self.add_argument("--work", type=Path, help=f"folder of models and texts ({work}; with --smoke in --output)")
        self.add_argument("--smoke", action="store_true", help="tiny sizes, to try the script itself")

    def parse_study(self, argv: list[str] | None) -> argparse.Namespace:
        options = self.parse_args(argv)
        for name, values in vars(options).items():
            if isinstance(values, list) and (again := [each for each in values if values.count(each) > 1]):
                self.error(f"--{name} has {again[0]} twice: name each once")
        if options.smoke:
            self.keep_out(options.output, "--smoke measures nothing worth keeping")
        options.work = options.work or (options.output / "work" if options.smoke else self.work)
        vars(options).update(self.smoke if options.smoke else {})
        return options

    def keep_out(self, output: Path, why: str):
        """End with an error if results would go where others are kept, however that folder is spelled."""
        if output.resolve() in (self.kept.resolve(), self.get_default("output").resolve()):
            self.error(f"{why}: name another folder with --output")


def keep_options(path: Path, options: Mapping[str, Any]) -> None:
    """Write the options that a run begins with as JSON; a file that is there must hold the same.

    Raises:
        ValueError: with the options that differ.
    """
    today = json.loads(json.dumps(options, default=str))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(today, indent=1) + "\n")
    elif changed := options_that_differ(json.loads(path.read_text(encoding="utf-8")), today):
        raise ValueError(f"{path.parent} was begun with other options: {changed}; keep to those, or begin elsewhere")


def options_that_differ(before: Mapping[str, Any], today: Mapping[str, Any]) -> str:
    """The options that differ, each with both values, in the order of their names; "" where none does."""
    pairs = ((name, before.get(name), today.get(name)) for name in sorted(before.keys() | today.keys()))
    return ", ".join(f"{name} was {old} and is {new}" for name, old, new in pairs if old != new)
