"""Memory of the host that a device's state is copied to again and again, at the speed of the bus.

Pinned where the state is on a GPU: from pageable memory the copy is ten times slower. torch's own pinned allocator
rounds up to powers of two, which for the state of a large head is some ten gigabytes too many, so pages are registered.
"""

import logging
import re
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

PINNED_SHARE = 0.8  # of the memory that is left: pages that cannot be moved or written out are taken from everybody


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Returns how much memory programs can still have, by Linux's own estimate."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
    assert match is not None, f"{meminfo} must say what is available"
    return 1024 * int(match[1])


class HostCopy:
    """Slots for tensors by name; what `copy` returned is overwritten when its name is copied again."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Reserves memory for tensors of `num_bytes` in all, which come from `device`."""
        self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        self._taken = 0
        self._slots: dict[str, Tensor] = {}
        self._is_pinned = False
        if device.type == "cuda" and num_bytes > PINNED_SHARE * available_bytes():
            # A call that failed would be reported by whatever CUDA call comes next, so it is not tried.
            logger.warning(
                "saves will hold the steps up: %.1f GB are too much to pin of the %.1f GB that this machine has left",
                num_bytes / 1e9, available_bytes() / 1e9,
            )  # fmt: skip
        elif device.type == "cuda" and num_bytes:
            started = time.perf_counter()
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), num_bytes, 0))
            self._is_pinned = True
            logger.info("pinned %.1f GB for saves in %.1f s", num_bytes / 1e9, time.perf_counter() - started)

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """Begins to copy a tensor, and returns its slot; from a GPU it is there once that is synchronised."""
        slot = self._slots.get(name)
        if slot is None:
            end = self._taken + tensor.nbytes
            assert end <= self._memory.numel(), (name, end, self._memory.numel())
            slot = self._slots[name] = self._memory[self._taken : end].view(tensor.dtype).view(tensor.shape)
            self._taken = end
        return slot.copy_(tensor.detach(), non_blocking=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._slots.clear()
        if self._is_pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr()))
            self._is_pinned = False
