"""Files between an SGLang server and the extraction: one per sample, whole or not there.

Both sides import this module, so it needs the standard library, torch and safetensors alone: no numpy, nothing of ours.
"""

import ctypes
import json
import logging
import os
import queue
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

logger = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "EAGLE3_CAPTURE_DIR"  # names the staging directory and switches the plugin on
LAYERS_VARIABLE = "EAGLE3_CAPTURE_LAYERS"  # boundaries, such as 3,31,59
REQUEST_ID = re.compile(r"eagle3-([1-9][0-9]*)-[A-Za-z0-9_.-]+")
# A server keeps one request in chunked prefill at a time; samples that stay unfinished beside it were aborted.
MAX_UNFINISHED = 64
# Rows that were copied and not written yet. Eight prefill chunks of 8,192 tokens at D = 7168, A = 3.
MAX_PENDING_BYTES = 4 * 2**30
SAFETENSORS_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.int64: "I64",
}


@dataclass(frozen=True)
class Part:
    """Rows of one request in one forward."""

    request_id: str
    num_tokens: int  # T of the whole sample
    start: int  # place of the first row in the sample
    first_row: int  # place of the first row in the forward
    num_rows: int


@dataclass(frozen=True)
class Forward:
    """What one prefill forward recorded, on the host once `copied` has passed."""

    parts: list[Part]
    tensors: dict[str, Tensor]  # name -> (rows, ...), all of the same number of rows
    copied: torch.cuda.Event | None  # None: they are there already


@dataclass(frozen=True)
class StagedSample:
    """The content of one file."""

    input_ids: Tensor  # (T,)
    aux_hidden_states: Tensor  # (T, A*D)
    last_hidden_states: Tensor  # (T, D)


def request_id(num_tokens: int, name: str) -> str:
    """Returns the id of a request that is to be recorded; it tells the writer when a sample is whole."""
    made = f"eagle3-{num_tokens}-{name}"
    assert REQUEST_ID.fullmatch(made), made
    return made


def tokens_of(request_id: str) -> int | None:
    """Returns the number of tokens that a request's id announces, None for a request of somebody else."""
    match = REQUEST_ID.fullmatch(request_id)
    return int(match[1]) if match else None


def sample_path(directory: Path, request_id: str) -> Path:
    """Returns where a sample appears once it is whole."""
    return directory / f"{request_id}.safetensors"


def error_path(directory: Path, request_id: str) -> Path:
    """Returns where the reason appears if a sample cannot be whole."""
    return directory / f"{request_id}.error.json"


def partial_path(directory: Path, request_id: str) -> Path:
    """Returns where a sample lies while its parts arrive."""
    return directory / f"{request_id}.partial"


def read_sample(path: Path) -> StagedSample:
    """Copies a sample out of its file, which may be deleted then."""
    with safe_open(path, framework="pt") as file:
        num_pieces = len(file.keys()) - 2  # side by side (T, A*D), however the engine had them: A of D or one of A*D
        aux = [file.get_tensor(f"aux_hidden_states.{i}") for i in range(num_pieces)]
        return StagedSample(
            input_ids=file.get_tensor("input_ids").clone(),
            aux_hidden_states=torch.cat(aux, dim=1),
            last_hidden_states=file.get_tensor("last_hidden_states").clone(),
        )


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a small file whole or not at all, for its owner alone."""
    temporary = path.with_name(f".{path.name}")
    with os.fdopen(os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w") as file:
        json.dump(content, file)
    temporary.rename(path)


class StagingWriter:
    """Writes samples on its own thread, in the order of the forwards, so that no forward waits for a file.

    A sample's file is laid out when its first part comes and each part is written at its place, so a prompt of many
    chunks needs no memory here.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._unfinished: dict[str, _PartialSample] = {}
        self._forwards: queue.SimpleQueue[Forward] = queue.SimpleQueue()
        self._pending_bytes = 0
        self._drained = threading.Condition()
        self._failure: Exception | None = None
        threading.Thread(target=self._run, name="eagle3-capture", daemon=True).start()

    def submit(self, forward: Forward) -> None:
        """Queues a forward; waits, rather than fill the host's memory, while the writer is too far behind.

        Raises:
            RuntimeError: the writing thread has died.
        """
        num_bytes = _num_bytes(forward)
        with self._drained:
            while self._failure is None and self._pending_bytes and self._pending_bytes + num_bytes > MAX_PENDING_BYTES:
                self._drained.wait()
            if self._failure is not None:
                raise RuntimeError(f"the thread that writes captured states died ({self._failure!r})")
            self._pending_bytes += num_bytes
        self._forwards.put(forward)

    def refuse(self, request_id: str, reason: str) -> None:
        """Writes why a sample cannot be whole, once, and drops its rows."""
        unfinished = self._unfinished.pop(request_id, None)
        if unfinished is not None:
            unfinished.abandon()
        path = error_path(self._directory, request_id)
        if not path.exists():
            write_json(path, {"error": reason})

    def _run(self) -> None:
        try:
            while True:
                forward = self._forwards.get()
                if forward.copied is not None:
                    forward.copied.synchronize()
                for part in forward.parts:
                    self._write(part, forward.tensors)
                with self._drained:
                    self._pending_bytes -= _num_bytes(forward)
                    self._drained.notify_all()
                del forward  # its pinned memory goes back before the next wait
        except Exception as error:
            with self._drained:
                self._failure = error  # the next forward raises it and ends the server
                self._drained.notify_all()
            logger.exception("captured states cannot be written to %s", self._directory)

    def _write(self, part: Part, tensors: dict[str, Tensor]) -> None:
        problem = self._problem(part)
        if problem is not None:
            self.refuse(part.request_id, problem)
            return
        try:
            if part.start == 0:
                self._begin(part, tensors)
            sample = self._unfinished[part.request_id]
            sample.append(part, tensors)
            if sample.num_rows == part.num_tokens:
                del self._unfinished[part.request_id]
                sample.finish(sample_path(self._directory, part.request_id))
        except OSError as error:  # most likely a full disk, which the client can drain and try again
            self.refuse(part.request_id, f"the staging directory {self._directory} must take the sample, got {error}")

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

    def _begin(self, part: Part, tensors: dict[str, Tensor]) -> None:
        restarted = self._unfinished.pop(part.request_id, None)  # the scheduler took it back and runs it again
        if restarted is not None:
            restarted.abandon()
        path = partial_path(self._directory, part.request_id)
        self._unfinished[part.request_id] = _PartialSample(path, part.num_tokens, tensors)
        if len(self._unfinished) > MAX_UNFINISHED:
            oldest = next(iter(self._unfinished))
            self.refuse(oldest, f"the rest of the request never came, {MAX_UNFINISHED} others began after it")


class _PartialSample:
    """A safetensors file whose rows arrive in parts."""

    def __init__(self, path: Path, num_tokens: int, tensors: dict[str, Tensor]) -> None:
        header: dict[str, Any] = {}
        begin = 0
        for name, tensor in tensors.items():
            end = begin + num_tokens * _row_bytes(tensor)
            shape = [num_tokens, *tensor.shape[1:]]
            header[name] = {"dtype": SAFETENSORS_DTYPES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
            begin = end
        header_bytes = json.dumps(header).encode()
        header_bytes += b" " * (-len(header_bytes) % 8)  # the format aligns the data to eight bytes
        self._path = path
        self._header = len(header_bytes).to_bytes(8, "little") + header_bytes
        self._begins = {name: len(self._header) + entry["data_offsets"][0] for name, entry in header.items()}
        self.num_rows = 0
        self._descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)

    def append(self, part: Part, tensors: dict[str, Tensor]) -> None:
        if part.start == 0:
            os.pwrite(self._descriptor, self._header, 0)
        for name, tensor in tensors.items():
            rows = _buffer_of(tensor[part.first_row : part.first_row + part.num_rows])
            place = self._begins[name] + part.start * _row_bytes(tensor)
            while rows:  # one call writes 2 GiB at most
                num_written = os.pwrite(self._descriptor, rows, place)
                rows, place = rows[num_written:], place + num_written
        self.num_rows += part.num_rows

    def finish(self, path: Path) -> None:
        os.close(self._descriptor)
        self._path.rename(path)

    def abandon(self) -> None:
        os.close(self._descriptor)
        self._path.unlink()


def _row_bytes(tensor: Tensor) -> int:
    return tensor.shape[1:].numel() * tensor.element_size()


def _num_bytes(forward: Forward) -> int:
    return sum(tensor.nbytes for tensor in forward.tensors.values())


def _buffer_of(tensor: Tensor) -> memoryview:
    """Returns a tensor's bytes without a copy; it must outlive them. torch itself offers that through numpy only."""
    assert tensor.is_contiguous()
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))
