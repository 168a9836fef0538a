"""A signal ends a run at once, or when a held block is through."""

import os
import signal
import threading

import pytest

from eagle3.capture.interrupts import Interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_at_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), Interrupts():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


def test_a_held_block_is_finished_first() -> None:
    steps: list[str] = []

    def run() -> None:
        with Interrupts() as interrupts:
            with interrupts.held():
                os.kill(os.getpid(), signal.SIGTERM)
                steps.append("in the block")
            steps.append("behind it")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert steps == ["in the block"]


def test_a_second_signal_does_not_disturb_the_way_out() -> None:
    steps: list[str] = []

    def run() -> None:
        with Interrupts():
            try:
                os.kill(os.getpid(), signal.SIGINT)
            finally:
                os.kill(os.getpid(), signal.SIGINT)
                steps.append("written")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert steps == ["written"]


def test_other_threads_leave_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def run() -> None:
        with Interrupts():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]
