"""Files and folders that are whole or not there, whenever the process dies and wherever the power fails.

What is written is written aside, brought to the disk, and given its name last: a rename is done or not done, and what
it names is on the disk by then. Where an error ends the writing nothing is left; where the process is killed, a name
that begins with `UNFINISHED_PREFIX` is.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["UNFINISHED_PREFIX", "move_into_place", "sync", "whole_file", "whole_folder", "write_text"]

# Uploads of an output directory leave out what begins so.
UNFINISHED_PREFIX = "_unfinished"


@contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[Path]:
    """A path to write a file to, which takes the place of `path` at the end.

    Its name ends as that of `path` does, for writers that choose a format by the suffix.
    """
    path = Path(path)
    aside = path.with_name(f"{UNFINISHED_PREFIX}-{os.getpid()}-{path.name}")
    try:
        yield aside
        move_into_place(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a text file in UTF-8 as a whole or not at all."""
    with whole_file(path) as aside:
        aside.write_text(text, encoding="utf-8")


@contextmanager
def whole_folder(path: str | os.PathLike) -> Iterator[Path]:
    """An empty folder to fill, which takes the place of `path`, if there is one, at the end."""
    path = Path(path)
    aside = path.with_name(f"{UNFINISHED_PREFIX}-{os.getpid()}-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        move_into_place(aside, path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def move_into_place(written: Path, final: Path) -> None:
    """Bring a file or folder to the disk and rename it, in place of what has that name.

    A folder cannot take the place of another in one go: for a moment neither has the name. Both are there, the old one
    beside the new one, until the new one has it.
    """
    sync(written)
    if written.is_dir() and final.is_dir():
        replaced = Path(tempfile.mkdtemp(prefix=f"{UNFINISHED_PREFIX}-replaced-", dir=final.parent))
        os.replace(final, replaced)
        os.replace(written, final)
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        os.replace(written, final)
    _sync_one(final.parent)


def sync(path: Path) -> None:
    """Bring a file, or a folder with all that is in it, to the disk."""
    if path.is_dir():
        for child in path.iterdir():
            if not child.is_symlink():
                sync(child)
    _sync_one(path)


def _sync_one(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders.
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems know no such thing for a folder.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
