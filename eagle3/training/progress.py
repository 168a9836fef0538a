"""What a training run says while it runs: one line per log_every, the same numbers as metrics, a progress bar."""

import logging
import resource
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn

from eagle3.board import Metrics
from eagle3.config import TrainConfig
from eagle3.draft.model import DrafterConfig
from eagle3.tracking import Tracker
from eagle3.training.batches import StepBatch
from eagle3.training.distributed import World, gather
from eagle3.training.optimizer_step import MetricSums, StepResult
from eagle3.training.timing import StepMarks, StepSeconds, find_stragglers, seconds_of
from eagle3.training.validation import Validation
from eagle3.training.work import limit_of, step_flops
from eagle3.words import duration

logger = logging.getLogger(__name__)


class StepLog:
    """Adds up the steps between two log lines; its clock runs in steps alone, not in validation and saves."""

    def __init__(
        self,
        config: TrainConfig,
        drafter: DrafterConfig,
        world: World,
        tracker: Tracker | None,  # None on every rank but the main one
        *,
        num_steps: int,
        steps_per_epoch: int,
    ) -> None:
        self._objective = config.objective
        self._drafter = drafter
        self._world = world
        self._tracker = tracker
        self._num_steps = num_steps
        self._steps_per_epoch = steps_per_epoch
        self._limit = limit_of(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None
        self._held_since = time.perf_counter()  # the devices, by what was not written down yet
        self._all_seconds = 0.0
        self._all_steps = 0
        self._tau: tuple[int, float] | None = None  # the last validation's step and tau
        self._forget()

    def _forget(self) -> None:
        """Begins to add up anew."""
        self._sums: MetricSums | None = None
        self._num_tokens = self._num_supervised = 0
        self._seconds = self._data_seconds = self._grad_norm = self._flops = 0.0
        self._marks: list[StepMarks] = []

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Counts the time of the block as step time."""
        started = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - started

    @contextmanager
    def data_clock(self) -> Iterator[None]:
        """Counts the time of the block, within that of a step, as waiting for data."""
        started = time.perf_counter()
        yield
        self._data_seconds += time.perf_counter() - started

    def add(self, result: StepResult, batch: StepBatch) -> None:
        """Adds a step."""
        self._sums = result.sums if self._sums is None else self._sums + result.sums
        self._num_tokens += batch.num_tokens
        self._num_supervised += batch.num_supervised
        self._grad_norm = result.grad_norm
        self._flops += step_flops(
            self._drafter, batch.num_tokens, result.sums.num_counted.tolist(), result.num_attended
        )
        self._marks.append(result.marks)
        self._all_steps += 1

    def write(self, step: int, learning_rate: float) -> None:
        """Writes the line of the steps since the last one; every rank must call it."""
        assert self._sums is not None, "a log line needs a step"
        parts = sum((seconds_of(0.0, marks) for marks in self._marks), start=StepSeconds(data=self._data_seconds))
        ranks = gather(RankFacts(socket.gethostname(), parts, memory_bytes(self._world.device)))
        self._all_seconds += self._seconds
        seconds_left = (self._num_steps - step) * self._all_seconds / self._all_steps
        loss, positions = self._sums.loss(self._objective), self._sums.per_position()
        tokens_per_second = self._num_tokens / self._seconds
        supervised_per_second = self._num_supervised / self._seconds
        shares = parts.shares(self._seconds)
        memory = max(rank.memory_bytes for rank in ranks)
        limit_share = None if self._limit is None else self._flops / self._seconds / self._limit / self._world.size
        tau = "" if self._tau is None else f"tau {self._tau[1]:.3f} at {self._tau[0]}  "
        limit = "" if limit_share is None else f", {limit_share:.1%} of the limit"
        logger.info(
            "%s  loss %.4f  %stop1 %s  acceptance %s  grad %.4f  lr %.2e  %.0f tokens/s (%.0f supervised%s)  %s  "
            "%.1f GiB  %s left",
            self._at(step), loss, tau, _digits(positions["top1"]), _digits(positions["acceptance"]), self._grad_norm,
            learning_rate, tokens_per_second, supervised_per_second, limit,
            " ".join(f"{name} {share:.1%}" for name, share in shares.items()), memory / 2**30, duration(seconds_left),
        )  # fmt: skip
        for rank, ratio in find_stragglers([facts.seconds.forward for facts in ranks]).items():
            logger.warning(
                "%s  straggler: rank %d on %s took %.2f times the median rank's time for its own work",
                self._at(step), rank, ranks[rank].host, ratio,
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
                    **({} if limit_share is None else {"share_of_limit": limit_share}),
                    **{f"time/{name}": share for name, share in shares.items()},
                    "time/slowest_rank": max(facts.seconds.forward for facts in ranks) / self._seconds,
                    "memory_bytes": memory,
                },
            )
        self._forget()

    def write_validation(self, step: int, validation: Validation, *, is_best: bool) -> None:
        """Writes the line of a validation."""
        acceptance, positions = validation.acceptance, validation.sums.per_position()
        self._tau = (step, acceptance.tau)
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
        return seconds * self._world.size

    def _at(self, step: int) -> str:
        return f"step {step:06d}/{self._num_steps:06d}"


@dataclass(frozen=True)
class RankFacts:
    """What a rank tells the others when a line is written."""

    host: str
    seconds: StepSeconds  # since the last line
    memory_bytes: int


def memory_bytes(device: torch.device) -> int:
    """Returns the most that was ever held: of the GPU by tensors, without one of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in KiB on Linux


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
