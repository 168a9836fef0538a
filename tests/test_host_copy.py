"""A name's slot is its own, and is overwritten when it is copied again."""

import pytest
import torch

from eagle3.training.host_copy import HostCopy


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
