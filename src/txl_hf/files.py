"""Files and folders that are complete or absent, even if the process is killed or the power fails.

Contents are written under another name, synced to the disk, and renamed last, because a rename is atomic. After an
error nothing is left; after a kill, a name that begins with `UNFINISHED_PREFIX`.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from huggingface_hub.utils import HFValidationError, validate_repo_id

# Beginning of the names of unfinished files, which uploads of an output directory leave out.
UNFINISHED_PREFIX = "_unfinished"
LOCK_NAME = "run.lock"
# Written last into a checkpoint: the run that wrote it, and the list of its files.
MANIFEST_NAME = "checkpoint_files.json"
# Parts of errors of torch, safetensors and pyarrow where the system refuses to write.
_REFUSED_WRITES = (
    *("inline_container.cc", "iostream error", "PytorchStreamWriter", "I/O error", "IoError"),
    "Error writing bytes to file",
)


def name_of(path: str | os.PathLike) -> str:
    """The last name of an absolute path: `.` and `..` get the name of their folder."""
    return Path(os.path.abspath(path)).name


def is_repo_id(name: str) -> bool:
    """Whether something on the Hub may have this name."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


@contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[Path]:
    """A path to write a file to, renamed to `path` at the end; with its suffix, by which writers choose a format."""
    path = Path(path)
    aside = path.with_name(f"{UNFINISHED_PREFIX}-{os.getpid()}-{path.name}")
    try:
        yield aside
        move_into_place(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a text file in UTF-8 as a whole or not at all."""
    with whole_file(path) as aside, disk_errors(path):
        aside.write_text(text, encoding="utf-8")


@contextmanager
def whole_folder(path: str | os.PathLike) -> Iterator[Path]:
    """An empty folder to fill, which is renamed to `path` at the end and replaces it. Its parents are made. It has the
    name of `path`, which model cards write into files."""
    path = Path(path)
    aside = path.with_name(f"{UNFINISHED_PREFIX}-{os.getpid()}-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    folder = aside / path.name
    folder.mkdir(parents=True)
    try:
        yield folder
        move_into_place(folder, path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def move_into_place(written: Path, final: Path) -> None:
    """Sync a file or folder to the disk and rename it, in place of a file or folder of that name. An old folder stays
    beside the new one until that has the name, because one cannot replace another in one operation."""
    sync(written)
    if written.is_dir() and final.is_symlink():
        # The link is replaced, not its target.
        final.unlink()
    if written.is_dir() and final.is_dir():
        replaced = Path(tempfile.mkdtemp(prefix=f"{UNFINISHED_PREFIX}-replaced-", dir=final.parent))
        os.replace(final, replaced)
        os.replace(written, final)
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        os.replace(written, final)
    _sync_one(final.parent)


@contextmanager
def disk_errors(folder: str | os.PathLike) -> Iterator[None]:
    """Turn errors of writing, on a disk that is full or refuses, into OSErrors that name the folder or file."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            # The OSError of a failed write has no file name.
            error.filename = error.filename or os.fspath(folder)
            raise
        # A ValueError is raised for contents that were read, not for a write that failed.
        if isinstance(error, ValueError) or not any(words in str(error) for words in _REFUSED_WRITES):
            raise
        reason = " ".join(str(error).split())
        raise OSError(f"{folder} cannot be written, as on a disk that is full ({reason})") from error


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """A lock of a folder, which ends with the process. Raises a BlockingIOError if another process has it."""
    try:
        held = FileLock(folder / LOCK_NAME).acquire(timeout=0)
    except Timeout:
        raise BlockingIOError(
            f"another process is writing to {folder}: wait for its end, or choose another folder"
        ) from None
    with held:
        yield


def sync(path: Path) -> None:
    """Bring a file, or a folder with all that is in it, to the disk."""
    if path.is_dir():
        for child in path.iterdir():
            if not child.is_symlink():
                sync(child)
    _sync_one(path)


def _sync_one(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open folders.
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
