"""A name's slot is its own, and is overwritten when it is copied again."""

from pathlib import Path

import pytest
import torch

from eagle3.training import host_copy
from eagle3.training.host_copy import HostCopy, available_bytes


def test_a_name_keeps_its_slot() -> None:
    with HostCopy(2 * 6 * 4, torch.device("cpu")) as host:
        first = host.copy("a", torch.arange(6.0).view(2, 3))
        other = host.copy("b", torch.full((6,), 5.0))
        assert torch.equal(first, torch.arange(6.0).view(2, 3))
        again = host.copy("a", torch.full((2, 3), 7.0))
        assert again is first
        assert first.tolist() == [[7.0] * 3] * 2
        assert other.tolist() == [5.0] * 6


def test_more_than_was_reserved_is_refused() -> None:
    with HostCopy(8, torch.device("cpu")) as host, pytest.raises(AssertionError, match=r"'a', 12, 8"):
        host.copy("a", torch.zeros(3))


def test_memory_that_the_machine_lacks_is_not_pinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_copy, "available_bytes", lambda: 100)
    with HostCopy(96, torch.device("cuda")) as host:  # nothing of a GPU is touched
        assert host.copy("a", torch.ones(3)).tolist() == [1.0] * 3
    assert caplog.messages == [
        "saves will hold the steps up: 0.0 GB are too much to pin of the 0.0 GB that this machine has left"
    ]


def test_available_memory_is_linuxs_estimate(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       24689764 kB\nMemFree: 1 kB\nMemAvailable:   20480 kB\n")
    assert available_bytes(tmp_path / "meminfo") == 20 * 2**20
    assert available_bytes() > 0
