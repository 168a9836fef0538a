"""Files that appear whole or not at all, and locks that die with their process."""

import errno
import fcntl
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from safetensors import SafetensorError

logger = logging.getLogger(__name__)

PRIVATE = 0o600
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # Lustre as it is often mounted, for one
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a disk, a quota, a limit on file sizes


def write_whole(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Replaces a small file, down to the disk; `mode` is before the umask.

    A kill leaves the file as it was, and beside it at most one of the same name that ends in .tmp.
    """
    temporary = path.with_suffix(".tmp")
    descriptor = os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def take_lock(path: Path, refusal: Callable[[str], Exception]) -> TextIO:
    """Returns the open file whose lock this process has until it is closed; it holds the process's number.

    Raises:
        Exception: another process has it; `refusal` makes the error of that one's number.
    """
    file = os.fdopen(os.open(path, os.O_CREAT | os.O_RDWR, PRIVATE), "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            logger.warning("no file locks at %s (%s): a second process would not be noticed", path, error)
            return file
        if not isinstance(error, BlockingIOError):
            raise
        holder = file.read().strip()
        file.close()
        raise refusal(holder) from error
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


@contextmanager
def system_errors(path: Path) -> Iterator[None]:
    """Raises what the system says of a file, which safetensors hides in an error of its own.

    Raises:
        OSError: the file could not be written.
    """
    try:
        yield
    except SafetensorError as error:
        said = re.search(r"os error (\d+)", str(error))
        if said is None:
            raise
        raise OSError(int(said[1]), os.strerror(int(said[1])), str(path)) from None


def sync(path: Path) -> None:
    """Makes a file's contents, or a rename in a directory, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def existing_parent(path: Path) -> Path:
    """Returns the nearest directory above a path, or itself, that is there."""
    return next(each for each in [path.absolute(), *path.absolute().parents] if each.exists())
