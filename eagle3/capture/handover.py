"""Hands the rows of each forward to the process that writes them, through shared memory.

A forward pays for starting its copies and for one message: the copies run on a stream of their own, straight into
pinned memory that both processes see, and threads wait for their end.
"""

import json
import logging
import mmap
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.capture.staging import Part

logger = logging.getLogger(__name__)

# Forwards that fit the memory side by side; the model computes while they are copied and written.
FORWARDS = 4
MAX_MEMORY_BYTES = 4 * 2**30  # unless one forward alone is larger: 8,192 tokens at D = 7168, A = 3 are 0.5 GB
ALIGNMENT = 64  # bytes, of a tensor's beginning
SAFETENSORS_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
}


@dataclass(frozen=True)
class _Message:
    """What the writing process is told of one forward, once `copied` has passed."""

    line: str
    copied: torch.cuda.Event | None  # None: the rows are there already


class Handover:
    """Owns the shared memory, which is used as a ring, and the writing process."""

    def __init__(self, directory: Path) -> None:
        """Starts the process, which writes into `directory` and ends with this one."""
        self._descriptor = os.memfd_create("eagle3-capture", os.MFD_CLOEXEC)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._copy_stream: torch.cuda.Stream | None = None
        self._is_registered = False
        # Places in the ring, counted on over its end: what lies between them is in use.
        self._begin = 0
        self._end = 0
        self._changed = threading.Condition()
        self._failure: str | None = None
        self._messages: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        command = [sys.executable, "-m", "eagle3.capture.sample_writer", str(directory), str(self._descriptor)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[self._descriptor]
        )
        for target in (self._announce, self._free):
            threading.Thread(target=target, name=f"eagle3-{target.__name__}", daemon=True).start()

    def submit(self, parts: Sequence[Part], tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
        """Takes a forward's rows, name -> (rows, ...); waits only while the writing process is too far behind.

        `metadata` go into the header of each sample's file.

        Raises:
            RuntimeError: the writing process has died.
        """
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors.values()]
        begin = self._claim(sum(sizes))
        rows, described = {}, []
        for (name, tensor), size in zip(tensors.items(), sizes, strict=True):
            rows[name] = self._memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            row_bytes = tensor.shape[1:].numel() * tensor.element_size()
            dtype = SAFETENSORS_DTYPES[tensor.dtype]
            described.append([name, dtype, list(tensor.shape[1:]), row_bytes, begin, len(tensor)])
            begin += size
        message: dict[str, Any] = {
            "memory_bytes": self._memory.numel(),
            "tensors": described,
            "parts": [vars(part) for part in parts],
            "end": self._end,
        }
        if metadata is not None:
            message["metadata"] = metadata
        self._messages.put(_Message(json.dumps(message) + "\n", self._copy(tensors, rows)))

    def _claim(self, num_bytes: int) -> int:
        """Returns where in the memory that many bytes are free, as soon as they are."""
        wanted = FORWARDS * 2 ** (num_bytes - 1).bit_length()  # powers of two, so that it grows a few times only
        wanted = max(num_bytes, min(wanted, MAX_MEMORY_BYTES))
        if wanted > self._memory.numel():
            self._wait_for_room(self._memory.numel())
            self._grow(wanted)
        size = self._memory.numel()
        place = self._end % size
        if place + num_bytes > size:  # the rest of this round stays empty
            num_bytes += size - place
            place = 0
            if num_bytes > size:  # too much for what is in use and the rest: begin again
                num_bytes -= size - self._end % size
                self._wait_for_room(size)
                self._begin = self._end = 0
        self._wait_for_room(num_bytes)
        self._end += num_bytes
        return place

    def _wait_for_room(self, num_bytes: int) -> None:
        size = self._memory.numel()
        with self._changed:
            while self._failure is None and self._end - self._begin + num_bytes > size:
                self._changed.wait()
            if self._failure is not None:
                raise RuntimeError(f"the process that writes captured states died ({self._failure}); see this log")

    def _grow(self, num_bytes: int) -> None:
        """Takes larger memory; nothing may be in use."""
        if self._is_registered:
            _check(torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr()))
        os.ftruncate(self._descriptor, num_bytes)
        self._memory = torch.frombuffer(mmap.mmap(self._descriptor, num_bytes), dtype=torch.uint8)
        self._begin = self._end = 0
        if torch.cuda.is_available():  # copies into memory that is not pinned would wait for the device
            _check(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), num_bytes, 0))
            self._is_registered = True

    def _copy(self, tensors: dict[str, Tensor], rows: dict[str, Tensor]) -> torch.cuda.Event | None:
        """Starts the copies; returns what passes when they are done."""
        if not next(iter(tensors.values())).is_cuda:
            for name, tensor in tensors.items():
                rows[name].copy_(tensor)
            return None
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream()
        self._copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copy_stream):
            for name, tensor in tensors.items():
                rows[name].copy_(tensor, non_blocking=True)
                tensor.record_stream(self._copy_stream)  # the model may free it before the copy has run
            copied = torch.cuda.Event(blocking=True)  # the thread sleeps until then instead of spinning
            copied.record()
        return copied

    def _announce(self) -> None:
        """Tells the process of each forward whose copies are done."""
        assert self._process.stdin is not None
        while True:
            message = self._messages.get()
            if message.copied is not None:
                message.copied.synchronize()
            try:
                self._process.stdin.write(message.line)
                self._process.stdin.flush()
            except BrokenPipeError:
                return  # the other thread sees the end too, and says so

    def _free(self) -> None:
        """Gives back the memory of what is written, until the process ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self._begin = int(line)
                self._changed.notify_all()
        code = self._process.wait()
        with self._changed:
            self._failure = f"exit code {code}"  # the next forward raises it and ends the server
            self._changed.notify_all()
        logger.error("the process that writes captured states died, exit code %d", code)


def _check(error: object) -> None:
    assert int(error) == 0, f"CUDA must take the capture memory as pinned, got {error}"  # type: ignore[call-overload]
