"""The text of a file -> raw rows: lines of JSONL, or the elements of one JSON list, in constant memory.

A row is not parsed further than its place asks: it stays bytes, so that parsing can be done elsewhere. What is no row,
such as a line that never ends, is an answer with its place and reason.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from eagle3.config import UserError

READ_BYTES = 2**18
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class RawRow:
    """One row as its file has it; `problem` says why there is no content."""

    line: int  # 1-based; in a file without lines the number of the row
    content: bytes | dict[str, Any] | None  # JSON as bytes, or the columns of a table
    file: str | None = None  # which of several; None where there is one
    problem: str | None = None


def text_rows(
    stream: IO[bytes], *, name: str, may_be_a_list: bool, file: str | None, max_row_bytes: int
) -> Iterator[RawRow]:
    """Yields the rows of a stream; `name` is that of its file, for messages, and `file` what the rows say of it.

    Raises:
        UserError: it is one JSON value over several lines, and no list of rows.
    """
    reader = _Reader(stream)
    if may_be_a_list and reader.opens_a_list():
        yield from _list_rows(reader, name, file, max_row_bytes)
        return
    for num_before, row in enumerate(_line_rows(reader, file, max_row_bytes)):
        if row.content == b"{" and num_before == 0:
            raise UserError(
                f"{name} must be a JSON list of rows, or have a row on each line, got one object over several lines; "
                f"write the rows in it as a list"
            )
        yield row


def _line_rows(reader: "_Reader", file: str | None, max_row_bytes: int) -> Iterator[RawRow]:
    line = 0
    while (raw := reader.line(max_row_bytes)) is not None:
        line += 1
        if raw.num_bytes > max_row_bytes:
            yield RawRow(line, None, file, too_large(max_row_bytes, raw.num_bytes))
        elif stripped := raw.content.strip():
            yield RawRow(line, stripped, file)


def _list_rows(reader: "_Reader", name: str, file: str | None, max_row_bytes: int) -> Iterator[RawRow]:
    """Yields the elements of one JSON list, holding no more than one of them."""
    decoder = json.JSONDecoder()
    row, is_open = 0, reader.skip_blank() != b"]"
    while is_open:
        row += 1
        size = reader.element(decoder, max_row_bytes)
        if size is None:
            raise UserError(
                f"{name} must be a JSON list of rows of at most {max_row_bytes} bytes, got no JSON value that ends "
                f"within them behind row {row - 1}; correct the file, or raise prompts.max_row_bytes"
            )
        yield RawRow(row, reader.take(size), file)
        found = reader.skip_blank()
        if found not in (b",", b"]"):
            what = repr(found) if found else "its end"
            raise UserError(f"{name} must be a JSON list of rows, got {what} behind row {row}; correct the file")
        is_open = found == b","
        if is_open:
            reader.take(1)
    reader.take(1)
    rest = reader.skip_blank()
    if rest:
        raise UserError(f"{name} must end with its list of rows, got {rest!r} behind it; correct the file")


@dataclass(frozen=True)
class _Line:
    content: bytes  # nothing where it is too long
    num_bytes: int


class _Reader:
    """A stream of bytes with a look ahead; it holds one row and one read."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._buffer = bytearray()
        self._start = 0  # what lies before it has been taken
        self._is_at_end = False

    def line(self, max_bytes: int) -> _Line | None:
        """Takes one line, None at the end; one of more than `max_bytes` is read past and not kept."""
        num_dropped, searched = 0, self._start
        while True:
            end = self._buffer.find(b"\n", searched)
            if end >= 0:
                size = end - self._start
                content = b"" if num_dropped + size > max_bytes else bytes(self._buffer[self._start : end])
                self._start = end + 1
                return _Line(content, num_dropped + size)
            waiting = len(self._buffer) - self._start
            if num_dropped + waiting > max_bytes:
                num_dropped += waiting
                self._start = len(self._buffer)
            searched_bytes = len(self._buffer) - self._start
            if not self._fill():
                content = self.take(len(self._buffer) - self._start)
                if not content and not num_dropped:
                    return None
                return _Line(content if not num_dropped else b"", num_dropped + len(content))
            searched = self._start + searched_bytes

    def opens_a_list(self) -> bool:
        """Takes the bracket that opens a list, a byte order mark before it as well; False if there is none."""
        while not (beginning := bytes(self._buffer).removeprefix(BYTE_ORDER_MARK).lstrip()) and self._fill():
            pass
        if not beginning.startswith(b"["):
            return False
        self._start = self._buffer.index(b"[") + 1
        return True

    def skip_blank(self) -> bytes:
        """Takes white space, and returns the byte behind it without taking it; nothing at the end."""
        while True:
            while self._start < len(self._buffer):
                byte = self._buffer[self._start : self._start + 1]
                if not byte.isspace():
                    return bytes(byte)
                self._start += 1
            if not self._fill():
                return b""

    def element(self, decoder: json.JSONDecoder, max_bytes: int) -> int | None:
        """Returns the bytes of the JSON value that comes next; None if it does not end within `max_bytes`."""
        self.skip_blank()
        wanted = 4096
        while True:
            while len(self._buffer) - self._start < wanted and self._fill():
                pass
            text = self._buffer[self._start : self._start + wanted].decode("utf-8", errors="surrogateescape")
            try:
                _, end = decoder.raw_decode(text)
            except (ValueError, RecursionError):
                end = None
            # A number at the end of what was read may go on.
            if end is not None and (end < len(text) or self._is_at_end):
                size = len(text[:end].encode("utf-8", errors="surrogateescape"))
                return size if size <= max_bytes else None
            if wanted > max_bytes or (self._is_at_end and len(self._buffer) - self._start <= wanted):
                return None
            wanted *= 2

    def take(self, size: int) -> bytes:
        taken = bytes(self._buffer[self._start : self._start + size])
        self._start += size
        return taken

    def _fill(self) -> bool:
        """Reads on; False at the end."""
        if self._start:
            del self._buffer[: self._start]
            self._start = 0
        block = b"" if self._is_at_end else self._stream.read(READ_BYTES)
        self._is_at_end = not block
        self._buffer += block
        return bool(block)


def too_large(max_row_bytes: int, num_bytes: int) -> str:
    """Says that a row has more bytes than are read."""
    return (
        f"row must have at most {max_row_bytes} bytes, got {num_bytes}; cut it, or raise prompts.max_row_bytes "
        f"(tokenizing a megabyte takes about a second)"
    )
