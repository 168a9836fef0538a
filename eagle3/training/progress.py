"""What a training run says while it runs: one line per log_every, the same numbers as metrics, a progress bar."""

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn

from eagle3.board import Metrics
from eagle3.config import ObjectiveConfig
from eagle3.tracking import Tracker
from eagle3.training.batches import StepBatch
from eagle3.training.optimizer_step import MetricSums, StepResult
from eagle3.training.validation import Validation

logger = logging.getLogger(__name__)


class StepLog:
    """Adds up the steps between two log lines; its clock runs in steps alone, not in validation and saves."""

    def __init__(
        self,
        objective: ObjectiveConfig,
        num_steps: int,
        steps_per_epoch: int,
        tracker: Tracker | None,
        num_devices: int,
    ) -> None:
        """`tracker` is None on every rank but the main one."""
        self._objective = objective
        self._num_steps = num_steps
        self._steps_per_epoch = steps_per_epoch
        self._tracker = tracker
        self._num_devices = num_devices
        self._held_since = time.perf_counter()  # the devices, by what was not written down yet
        self._all_seconds = 0.0
        self._all_steps = 0
        self._sums: MetricSums | None = None  # since the last line, like the rest
        self._num_tokens = 0
        self._num_supervised = 0
        self._seconds = 0.0
        self._grad_norm = 0.0

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Counts the time of the block as step time."""
        started = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - started

    def add(self, result: StepResult, batch: StepBatch) -> None:
        """Adds a step."""
        self._sums = result.sums if self._sums is None else self._sums + result.sums
        self._num_tokens += batch.num_tokens
        self._num_supervised += batch.num_supervised
        self._grad_norm = result.grad_norm
        self._all_steps += 1

    def write(self, step: int, learning_rate: float) -> None:
        """Writes the line of the steps since the last one."""
        assert self._sums is not None, "a log line needs a step"
        self._all_seconds += self._seconds
        seconds_left = (self._num_steps - step) * self._all_seconds / self._all_steps
        loss, positions = self._sums.loss(self._objective), self._sums.per_position()
        tokens_per_second = self._num_tokens / self._seconds
        supervised_per_second = self._num_supervised / self._seconds
        logger.info(
            "%s  loss %.4f  top1 %s  acceptance %s  grad %.4f  lr %.2e  %.0f tokens/s (%.0f supervised)  %s left",
            self._at(step), loss, _digits(positions["top1"]), _digits(positions["acceptance"]), self._grad_norm,
            learning_rate, tokens_per_second, supervised_per_second, _duration(seconds_left),
        )  # fmt: skip
        if self._tracker is not None:
            self._tracker.log(
                step,
                {
                    "loss": loss,
                    **positions,
                    "grad_norm": self._grad_norm,
                    "learning_rate": learning_rate,
                    "epoch": step / self._steps_per_epoch,
                    "tokens_per_second": tokens_per_second,
                    "supervised_tokens_per_second": supervised_per_second,
                    "num_tokens": self._num_tokens,  # since the last line
                    "device_seconds": self._device_seconds(),
                },
            )
        self._sums, self._num_tokens, self._num_supervised, self._seconds = None, 0, 0, 0.0

    def write_validation(self, step: int, validation: Validation, *, is_best: bool) -> None:
        """Writes the line of a validation."""
        acceptance, positions = validation.acceptance, validation.sums.per_position()
        loss = validation.sums.loss(self._objective)
        logger.info(
            "%s  held-out tau %.4f [%.4f, %.4f] (without prefill's token %.4f)%s  loss %.4f  acceptance %s",
            self._at(step), acceptance.tau, acceptance.low, acceptance.high, acceptance.tau_without_prefill,
            ", the best so far" if is_best else "", loss, _digits(positions["acceptance"]),
        )  # fmt: skip
        if self._tracker is not None:
            held_out: Metrics = {
                "tau": acceptance.tau,
                "tau_low": acceptance.low,
                "tau_high": acceptance.high,
                "tau_without_prefill": acceptance.tau_without_prefill,
                "conditional": acceptance.conditional,
                "loss": loss,
                **positions,
            }
            untrained: dict[str, float] = {"tau_untrained": acceptance.tau} if step == 0 else {}
            named = {f"held_out/{name}": value for name, value in held_out.items()}
            self._tracker.log(step, {**named, **untrained, "held_out/device_seconds": self._device_seconds()})

    def _device_seconds(self) -> float:
        """Returns for how long the devices were held since this was last asked, saves and waiting included."""
        now = time.perf_counter()
        seconds, self._held_since = now - self._held_since, now
        return seconds * self._num_devices

    def _at(self, step: int) -> str:
        return f"step {step:06d}/{self._num_steps:06d}"


@contextmanager
def progress_bars(*, shown: bool) -> Iterator[Progress]:
    """Opens a display of bars at the bottom of a terminal, log lines above it."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _RateColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bars:
        # The display stands in for sys.stderr; handlers that were made before hold the real one.
        handlers = [h for h in logging.getLogger().handlers if isinstance(h, logging.StreamHandler)]
        held = [handler for handler in handlers if handler.stream is sys.__stderr__]
        for handler in held:
            handler.setStream(sys.stderr)
        try:
            yield bars
        finally:
            for handler in held:
                handler.setStream(sys.__stderr__)


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> str:
        return "" if task.speed is None else f"{task.speed:.2f}/s"


def _digits(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
