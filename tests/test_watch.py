"""A rank that is silent, or that all others wait for, is named; what ends a launched run is in test_ranks.py."""

import pytest
import torch

from eagle3.training.distributed import World
from eagle3.training.watch import Beat, Heard, Watch, find_fault


def heard(rank: int, *, number: int, part: str = "work", silent: float = 1.0, unmoved: float = 1.0) -> Heard:
    return Heard(Beat(rank, f"node{rank // 2}", 120, part, number), silent, unmoved)


def fault(*ranks: Heard) -> str | None:
    return find_fault(ranks, dead_after=60.0, timeout=600.0)


def test_ranks_that_get_on_have_no_fault() -> None:
    assert fault(heard(0, number=7), heard(1, number=8, unmoved=900.0)) is None  # one waits, the other one works


def test_a_silent_rank_is_named_with_its_host() -> None:
    message = fault(heard(0, number=7), heard(3, number=7, silent=61.0))
    assert message == (
        "every rank must be alive, got no word from rank 3 on node1, in the work of step 120, last heard of 61 s ago; "
        "look into its host's logs"
    )


def test_the_rank_that_the_others_wait_for_is_named() -> None:
    ranks = [heard(rank, number=241, unmoved=700.0) for rank in range(3)]
    message = fault(*ranks, heard(3, number=240, part="data", unmoved=701.0))
    assert message is not None
    assert "within run.timeout=10 minutes, got rank 3 on node1, in the data of step 120, for 701 s;" in message
    assert "waiting for it: 0 (work), 1 (work), 2 (work)" in message


def test_ranks_that_hang_together_are_all_named() -> None:
    message = fault(heard(0, number=7, unmoved=601.0), heard(1, number=7, unmoved=601.0))
    assert message is not None
    assert "rank 0 on node0" in message
    assert "rank 1 on node0" in message
    assert "nobody is further" in message


def test_a_single_process_watches_nobody() -> None:
    watch = Watch(World(0, 1, torch.device("cpu")), timeout=1.0)
    with pytest.raises(KeyError, match="mine"), watch:
        raise KeyError("mine")
    with watch:
        watch.at("work", 1)
