"""What asks a run to end, and what it says it was."""

import dataclasses
import os
import signal

import pytest

from eagle3.training.checkpoints import TrainState
from eagle3.training.stopping import StopSignal, has_ended


def test_the_first_ctrl_c_is_noted_and_the_second_interrupts() -> None:
    before = signal.getsignal(signal.SIGINT)  # ignored where the tests run in a shell's background
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        assert stop.reason == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_time_that_is_up_asks_to_stop_once_there_are_steps() -> None:
    late = StopSignal(stop_after=1e-9)
    assert not late.requested
    late.step_begins()
    assert late.requested
    assert late.reason == "run.stop_after=1e-09 minutes"
    waiting = StopSignal(stop_after=60.0)
    waiting.step_begins()
    assert not waiting.requested
    assert waiting.reason == "another rank has to"
    assert not StopSignal().requested


def test_a_run_ends_at_its_last_step_or_when_it_is_no_better() -> None:
    state = TrainState(maths={}, store_digest="d", step=9, num_worse=2)
    assert not has_ended(state, num_steps=10, patience=None)
    assert not has_ended(state, num_steps=10, patience=3)
    assert has_ended(state, num_steps=10, patience=2)
    assert has_ended(dataclasses.replace(state, step=10), num_steps=10, patience=None)
