"""The process beside an SGLang server that writes its samples.

A process of its own, since a thread in the scheduler would take turns with it at Python's lock: thousands of times a
second, each a wait. It imports the standard library alone and ends with the server, whose pipe it reads. A sample's
file is laid out when its first part comes and each part is written at its place, so a prompt of many chunks needs no
memory here. Several threads write: one alone fills memory pages more slowly than a small target computes them.
"""

import json
import mmap
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.capture.staging import Part, error_path, partial_path, sample_path, write_json

# A server keeps one request in chunked prefill at a time; samples that stay unfinished beside it were aborted.
MAX_UNFINISHED = 64
THREADS = 4
FILES_AT_ONCE = 64  # that are open beside those; a forward may hold thousands of short prompts


@dataclass(frozen=True)
class Rows:
    """One tensor of a forward, in the shared memory."""

    name: str
    dtype: str  # as safetensors calls it
    dims: list[int]  # of one row
    row_bytes: int
    data: memoryview


class SampleWriter:
    """Turns parts into files, in the order of the forwards."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._unfinished: dict[str, _PartialSample] = {}
        self._threads = ThreadPoolExecutor(THREADS)

    def write(self, parts: Sequence[Part], tensors: list[Rows], metadata: dict[str, str] | None = None) -> None:
        """Writes a forward's rows, each request's to its own file; what is wrong with one goes to its error file.

        `metadata` go into a file with its first part.
        """
        for first in range(0, len(parts), FILES_AT_ONCE):
            some = [part for part in parts[first : first + FILES_AT_ONCE] if self._is_ready(part, tensors, metadata)]
            errors = self._threads.map(lambda part: self._append(part, tensors), some)
            for part, error in zip(some, errors, strict=True):
                if error is not None:
                    self._refuse(part.request_id, error)
        while len(self._unfinished) > MAX_UNFINISHED:
            oldest = next(iter(self._unfinished))
            self._refuse(oldest, f"the rest of the request never came, {MAX_UNFINISHED} others began after it")

    def _is_ready(self, part: Part, tensors: list[Rows], metadata: dict[str, str] | None) -> bool:
        """Makes the file of a first part; returns whether the part can be written."""
        problem = self._problem(part)
        if problem is None and part.start == 0:
            problem = self._begin(part, tensors, metadata)
        if problem is not None:
            self._refuse(part.request_id, problem)
        return problem is None

    def _append(self, part: Part, tensors: list[Rows]) -> str | None:
        """Writes a part, and gives a whole sample its name; returns what went wrong."""
        sample = self._unfinished[part.request_id]
        try:
            sample.append(part, tensors)
            if sample.num_rows == part.num_tokens:
                del self._unfinished[part.request_id]
                sample.finish(sample_path(self._directory, part.request_id))
        except OSError as error:
            return self._disk_error(error)
        return None

    def _disk_error(self, error: OSError) -> str:
        # Most likely a full disk, which the client can drain and try again.
        return f"the staging directory {self._directory} must take the sample, got {error}"

    def _problem(self, part: Part) -> str | None:
        """Returns why a part cannot be appended: a hole before it, or more rows than announced."""
        sample = self._unfinished.get(part.request_id)
        num_rows = sample.num_rows if sample is not None else 0
        if part.start and sample is None:
            return (
                f"the first part must begin at token 0, got token {part.start}: the prefix came from the server's "
                f"prefix cache; start it with --disable-radix-cache, or send a new extra_key with each request"
            )
        if part.start and part.start != num_rows:
            return f"the next part must begin at token {num_rows}, got token {part.start}"
        if part.start + part.num_rows > part.num_tokens:
            return (
                f"a request must have the {part.num_tokens} tokens that its id announces, "
                f"got {part.start + part.num_rows}"
            )
        return None

    def _refuse(self, request_id: str, reason: str) -> None:
        """Writes why a sample cannot be whole, once, and drops its rows."""
        unfinished = self._unfinished.pop(request_id, None)
        if unfinished is not None:
            unfinished.abandon()
        path = error_path(self._directory, request_id)
        if not path.exists():
            write_json(path, {"error": reason})

    def _begin(self, part: Part, tensors: list[Rows], metadata: dict[str, str] | None) -> str | None:
        restarted = self._unfinished.pop(part.request_id, None)  # the scheduler took it back and runs it again
        if restarted is not None:
            restarted.abandon()
        path = partial_path(self._directory, part.request_id)
        try:
            self._unfinished[part.request_id] = _PartialSample(path, part.num_tokens, tensors, metadata)
        except OSError as error:
            return self._disk_error(error)
        return None


class _PartialSample:
    """A safetensors file whose rows arrive in parts."""

    def __init__(self, path: Path, num_tokens: int, tensors: list[Rows], metadata: dict[str, str] | None) -> None:
        header: dict[str, Any] = {}
        begin = 0
        for rows in tensors:
            end = begin + num_tokens * rows.row_bytes
            header[rows.name] = {"dtype": rows.dtype, "shape": [num_tokens, *rows.dims], "data_offsets": [begin, end]}
            begin = end
        told = {} if metadata is None else {"__metadata__": metadata}
        header_bytes = json.dumps({**told, **header}).encode()
        header_bytes += b" " * (-len(header_bytes) % 8)  # the format aligns the data to eight bytes
        self._path = path
        self._header = len(header_bytes).to_bytes(8, "little") + header_bytes
        self._begins = {name: len(self._header) + entry["data_offsets"][0] for name, entry in header.items()}
        self.num_rows = 0
        self._descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)

    def append(self, part: Part, tensors: list[Rows]) -> None:
        if part.start == 0:
            os.pwrite(self._descriptor, self._header, 0)
        for rows in tensors:
            data = rows.data[part.first_row * rows.row_bytes : (part.first_row + part.num_rows) * rows.row_bytes]
            place = self._begins[rows.name] + part.start * rows.row_bytes
            while data:  # one call writes 2 GiB at most
                num_written = os.pwrite(self._descriptor, data, place)
                data, place = data[num_written:], place + num_written
        self.num_rows += part.num_rows

    def finish(self, path: Path) -> None:
        os.close(self._descriptor)
        self._path.rename(path)

    def abandon(self) -> None:
        os.close(self._descriptor)
        self._path.unlink()


def main(directory: Path, descriptor: int) -> None:
    """Writes what is announced on standard input, line by line, and says on standard output what is written."""
    writer = SampleWriter(directory)
    memory = memoryview(b"")
    for line in sys.stdin:
        message = json.loads(line)
        if len(memory) != message["memory_bytes"]:  # it grows with the largest forward
            memory = memoryview(mmap.mmap(descriptor, message["memory_bytes"], prot=mmap.PROT_READ))
        tensors = [
            Rows(name, dtype, dims, row_bytes, memory[begin : begin + num_rows * row_bytes])
            for name, dtype, dims, row_bytes, begin, num_rows in message["tensors"]
        ]
        writer.write([Part(**part) for part in message["parts"]], tensors, message.get("metadata"))
        print(message["end"], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
