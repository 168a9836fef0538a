"""Files that appear whole or not at all."""

import os
from pathlib import Path

PRIVATE = 0o600


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


def sync(path: Path) -> None:
    """Makes a file's contents, or a rename in a directory, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
