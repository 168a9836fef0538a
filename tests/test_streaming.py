"""Parts of a stream of samples that a whole training does not tell apart: order, turns, budget, faults."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_extractions import make_config

from eagle3.capture.answers import AnswerLog
from eagle3.capture.engine import Captured
from eagle3.capture.streaming import StateMaker, with_share_of_staging, within_timeout
from eagle3.config import UserError
from eagle3.features.stream import SampleStream, TokenSample

MASK = torch.tensor([False, True, True])
TOKENS = [TokenSample(f"s{number}", torch.full((3,), number, dtype=torch.int32), MASK) for number in range(3)]


def stream_of(make: Callable[[Sequence[TokenSample]], list[Any]]) -> SampleStream:
    manifest: Any = SimpleNamespace(dtype="float32")
    return SampleStream("live.yaml", manifest, TOKENS, make)


class Backwards:
    """An engine whose last sequence comes first, and whose states are its number; that of sequence 1 is none."""

    def capture_each(self, sequences: Iterator[Sequence[int]]) -> Iterator[tuple[int, Captured]]:
        for place, ids in reversed(list(enumerate(sequences))):
            value = float("nan") if ids[0] == 1 else float(ids[0])
            yield place, Captured(torch.full((3, 6), value), torch.full((3, 2), value))

    def log_normaliser(self, last_hidden_states: torch.Tensor) -> None:
        """Returns None, as servers do."""


def test_samples_come_in_the_order_asked_for_and_not_with_states_that_are_not_finite() -> None:
    engine: Any = Backwards()
    first, second, third = StateMaker(engine, max_blank=1)(TOKENS)
    assert first is not None
    assert third is not None
    assert second is None, "its states are not finite"
    assert (first.aux_hidden_states == 0).all()
    assert (third.aux_hidden_states == 2).all()
    assert third.last_hidden_states.shape == (2, 2), "of supervised tokens alone"


def test_threads_take_turns_at_the_target() -> None:
    under_way, most = [0], [0]
    guard = threading.Lock()

    def make(tokens: Sequence[TokenSample]) -> list[Any]:
        with guard:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        time.sleep(0.02)
        with guard:
            under_way[0] -= 1
        return [None for _ in tokens]

    stream = stream_of(make)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(stream.read, [[0], [1], [2], [0]]))
    assert most == [1]


def test_who_waits_for_a_turn_asks_no_target_that_has_failed() -> None:
    num_calls = [0]
    both = threading.Barrier(3)

    def fail(tokens: Sequence[TokenSample]) -> list[Any]:
        num_calls[0] += 1
        time.sleep(0.1)
        raise UserError("the server must answer within 60 s")

    def read(index: int) -> None:
        both.wait(timeout=10)
        with pytest.raises(UserError, match="must answer within 60 s"):
            stream.read([index])

    stream = stream_of(fail)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(read, range(3)))
    assert num_calls == [1]


def test_ranks_of_a_machine_share_the_staging_budget(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = make_config(tiny_target, tmp_path, engine="sglang")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    given = dataclasses.replace(config, server=dataclasses.replace(config.server, staging_bytes=1000))
    assert with_share_of_staging(given).server.staging_bytes == 250
    here = dataclasses.replace(config, server=dataclasses.replace(config.server, staging_dir=str(tmp_path)))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 8000}))
    assert with_share_of_staging(here).server.staging_bytes == 1000


def test_a_reader_leaves_the_line_that_a_writer_is_at(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_bytes(b'{"sample_id": "a", "reason": "x"}\n{"sample_id": "b"')
    before = path.read_bytes()
    log = AnswerLog(tmp_path, read_only=True)
    assert ("a" in log, "b" in log) == (True, False)
    log.close()
    assert path.read_bytes() == before


def test_a_server_counts_as_hung_while_the_ranks_still_wait(tiny_target: Path, tmp_path: Path) -> None:
    config = make_config(tiny_target, tmp_path, engine="sglang")
    assert config.server.request_timeout_seconds == 600
    assert within_timeout(config, 10.0).server.request_timeout_seconds == 200
    assert within_timeout(config, 30.0) == config
    assert within_timeout(dataclasses.replace(config, engine="transformers"), 1.0).server == config.server
