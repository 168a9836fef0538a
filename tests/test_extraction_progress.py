"""What an extraction says while it runs: the time left covers answers and samples, or says that it does not."""

import logging
from types import SimpleNamespace

import pytest

from eagle3.capture import progress
from eagle3.capture.progress import LINE_SECONDS, ExtractionReport, LiveProgress

NUM_ROWS, CHUNK = 100, 20
ANSWER_SECONDS, CAPTURE_SECONDS = 2.0, 0.5  # a row
CHUNK_SECONDS = CHUNK * (ANSWER_SECONDS + CAPTURE_SECONDS)


class Run:
    """An extraction whose clock is told how late it is; it says a line whenever it is asked to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self.now = 1000.0
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
        caplog.set_level(logging.INFO)
        self._caplog = caplog
        self.report = ExtractionReport()
        self.live = LiveProgress(self.report, lambda: None)

    def answer(self, num_rows: int) -> str:
        """Writes answers, a token at a time; returns the last line."""
        for _ in range(num_rows * 4):
            self.now += ANSWER_SECONDS / 4
            self.report.generation_seconds += ANSWER_SECONDS / 4
            self.report.num_generated += 1
            self.live.show()
        return self._caplog.messages[-1]

    def capture(self, num_rows: int) -> str:
        """Captures rows; returns the last line."""
        for _ in range(num_rows):
            self.now += CAPTURE_SECONDS
            self.report.capture_seconds += CAPTURE_SECONDS
            self.report.num_tokens += 10
            self.live.show(advance=1)
        return self._caplog.messages[-1]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Run:
    return Run(monkeypatch, caplog)


def left_at(seconds: float) -> str:
    """What is left of the whole, whose every chunk takes as long, after so many seconds."""
    minutes, rest = divmod(round(NUM_ROWS / CHUNK * CHUNK_SECONDS - seconds), 60)
    return f", 0:{minutes:02d}:{rest:02d} left"


def test_the_time_left_covers_the_answers_that_are_still_to_be_written(run: Run) -> None:
    run.live.begin(NUM_ROWS, 0)
    assert "left" not in run.answer(CHUNK)  # nothing is done that could tell
    # The answers of these are written; of how many more, nobody has said.
    assert run.capture(CHUNK // 2).endswith(", 0:00:45 left, answers to come not counted")
    run.capture(CHUNK // 2)
    assert run.answer(CHUNK // 2).endswith(left_at(CHUNK_SECONDS + CHUNK // 2 * ANSWER_SECONDS))
    run.answer(CHUNK // 2)
    assert run.capture(CHUNK // 2).endswith(left_at(2 * CHUNK_SECONDS - CHUNK // 2 * CAPTURE_SECONDS))
    run.capture(CHUNK // 2)
    for _ in range(2):
        run.answer(CHUNK)
        run.capture(CHUNK)
    run.answer(CHUNK)
    assert run.capture(CHUNK).endswith(", 0:00:00 left")


def test_a_slow_chunk_leaves_at_least_the_time_of_its_samples(run: Run) -> None:
    run.live.begin(2 * CHUNK, 0)
    run.answer(CHUNK)
    run.capture(CHUNK)
    run.answer(3 * CHUNK)  # longer than the first chunk took in all
    assert run.capture(1).endswith(f", 0:00:{round((CHUNK - 1) * CAPTURE_SECONDS):02d} left")


def test_rows_whose_answers_are_there_tell_nothing_of_answers(run: Run) -> None:
    """A run that was stopped: of 20 rows the answers are in the log, of 60 more they are to be written."""
    run.live.begin(NUM_ROWS, 20)
    run.capture(CHUNK)
    assert "left" not in run.answer(CHUNK)
    run.capture(CHUNK)
    assert run.answer(CHUNK // 2).endswith(left_at(3 * CHUNK_SECONDS + CHUNK // 2 * ANSWER_SECONDS))


@pytest.mark.parametrize("stage", ["answer", "capture"])
def test_one_stage_alone_takes_its_own_pace(run: Run, stage: str) -> None:
    run.live.begin(NUM_ROWS, 10)
    if stage == "capture":
        assert run.capture(30).endswith(", 0:00:30 left")
        return
    for _ in range(2):  # as where answers are all that is written
        run.now += 30 * ANSWER_SECONDS
        run.report.generation_seconds += 30 * ANSWER_SECONDS
        run.live.show(advance=30)
    assert run.live.state() == "answers 0 tokens/s, 0 bytes written"
    assert run.answer(0).endswith(", 0:01:00 left")


def test_a_line_is_said_now_and_then(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(monkeypatch, caplog)
    monkeypatch.setattr(progress, "LINE_SECONDS", LINE_SECONDS)
    run.live.begin(NUM_ROWS, 0)
    run.capture(100)
    assert len(caplog.messages) == 100 * CAPTURE_SECONDS // LINE_SECONDS
