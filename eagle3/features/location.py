"""Where a store lies: a directory of this machine or of a network file system, or a URL that fsspec reads.

Writers need a directory; readers take both, with the same code.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from eagle3.config import UserError


@dataclass(frozen=True)
class Piece:
    """Bytes of a file, and where they go."""

    offset: int
    into: memoryview  # of bytes, writable


class Location:
    """The files of one store, for reading."""

    def __init__(self, where: Path | str) -> None:
        """Takes a path or a URL, as `s3://bucket/store`.

        Raises:
            UserError: no installed package reads such URLs.
        """
        self.where = where
        self._remote: AbstractFileSystem | None = None
        if isinstance(where, str) and "://" in where:
            try:
                self._remote, self._root = url_to_fs(where)
            except (ImportError, ValueError) as error:
                raise UserError(
                    f"a store's URL must be one that fsspec reads, got {where!r} ({error}); "
                    f"install the package for it, or copy the store to a directory"
                ) from error
        else:
            self._root = str(where)

    def __str__(self) -> str:
        return str(self.where)

    def is_directory(self, path: Path) -> bool:
        """Tells whether this is a directory of this machine, under whatever name."""
        is_local = self._remote is None or isinstance(self._remote, LocalFileSystem)
        return is_local and os.path.realpath(self._root) == os.path.realpath(path)

    def file(self, name: str) -> str:
        """Returns a file's whole name, for messages and for opening it."""
        return f"{self._root}/{name}" if self._remote is not None else os.path.join(self._root, name)

    def sizes(self) -> dict[str, int]:
        """Returns the bytes of each file, by name; of nothing if there is no such directory."""
        if self._remote is None:
            try:
                with os.scandir(self._root) as entries:
                    return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
            except (FileNotFoundError, NotADirectoryError):
                return {}
        try:
            listed = self._remote.ls(self._root, detail=True, refresh=True)
        except FileNotFoundError:
            return {}
        return {each["name"].rsplit("/", 1)[-1]: each["size"] for each in listed if each["type"] == "file"}

    def read(self, name: str) -> bytes:
        """Returns the whole of a small file."""
        if self._remote is None:
            return Path(self.file(name)).read_bytes()
        content: bytes = self._remote.cat_file(self.file(name))
        return content

    def read_into(self, name: str, pieces: Sequence[Piece]) -> None:
        """Copies parts of a file to where they are wanted: once, from the page cache, where the file is on a disk.

        Raises:
            EOFError: the file ends before a piece does.
        """
        if self._remote is not None:
            starts = [piece.offset for piece in pieces]
            ends = [piece.offset + piece.into.nbytes for piece in pieces]
            contents = self._remote.cat_ranges([self.file(name)] * len(pieces), starts, ends)
            for piece, content in zip(pieces, contents, strict=True):
                if len(content) != piece.into.nbytes:
                    raise EOFError(f"{len(content)} of {piece.into.nbytes} bytes at {piece.offset}")
                piece.into[:] = content
            return
        # Not mapped: a mapping reads 4 KiB at a fault, and a file cut short under it ends the process.
        descriptor = os.open(self.file(name), os.O_RDONLY)
        try:
            for piece in pieces:
                done = 0
                while done < piece.into.nbytes:  # one call reads at most 2 GiB
                    count = os.preadv(descriptor, [piece.into[done:]], piece.offset + done)
                    if count == 0:
                        raise EOFError(f"{done} of {piece.into.nbytes} bytes at {piece.offset}")
                    done += count
        finally:
            os.close(descriptor)
