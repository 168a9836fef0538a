"""Tables for people, and the same figures as JSON.

Every tau is a sum of tokens over a sum of verify rounds, the token of prefill and the bonus token of each round
included, as SGLang counts; beside it stands the one without prefill's token.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from eagle3.draft.acceptance import Acceptance, summarise
from eagle3.draft.questions import Question
from eagle3.evaluation.served import ServerFacts
from eagle3.words import counted

logger = logging.getLogger(__name__)

LINE_SECONDS = 30.0  # between two lines where there is no bar


@dataclass(frozen=True)
class Measured:
    """One drafter's acceptance, with and without the answers that loop, which are drafted too easily."""

    all_answers: Acceptance
    without_loops: Acceptance | None  # None: nothing is left, or the answers are not at hand
    questions: list[Question]  # what `all_answers` adds up


@dataclass(frozen=True)
class Speed:
    """One stream, end to end: prefill included, one prompt at a time."""

    num_prompts: int
    tokens_per_second_plain: float
    tokens_per_second_speculative: float
    num_equal_answers: int  # of num_prompts; in bf16 near-ties part plain and speculative answers, in fp32 nothing does

    @property
    def speed_up(self) -> float:
        """Speculative over plain."""
        return self.tokens_per_second_speculative / self.tokens_per_second_plain


@dataclass(frozen=True)
class Report:
    """Everything that an evaluation found."""

    num_draft_tokens: int  # K
    max_new_tokens: int
    num_conversations: int
    num_answers: int
    num_looping: int  # answers that end in repetitions
    trained: Measured  # the drafter that was asked about; of a server, the one that it serves
    untrained: Measured | None = None  # the same shape with the target's head and norm
    simulated: Measured | None = None  # on the very tokens of `trained`
    simulated_store: Measured | None = None  # on a feature store's held-out samples
    speed: Speed | None = None
    tokens_per_second_served: float | None = None  # over all requests in flight together
    server: ServerFacts | None = None
    findings: list[str] = dataclasses.field(default_factory=list)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # by stage
    peak_memory_bytes: int = 0  # of this process

    def to_dict(self) -> dict[str, Any]:
        """Returns the report for JSON, with the headline figures at the top."""
        headlines = {f"tau_{name}": measured.all_answers.tau for name, measured in self.measured().items()}
        if self.speed is not None:
            headlines["tokens_per_second_plain"] = self.speed.tokens_per_second_plain
            headlines["tokens_per_second_speculative"] = self.speed.tokens_per_second_speculative
            headlines["speed_up"] = self.speed.speed_up
        values = headlines | dataclasses.asdict(self)
        for name in self.measured():
            del values[name]["questions"]  # they have a file of their own
        return values

    def print(self, console: Console) -> None:
        """Prints the table, and what it leaves open in sentences."""
        console.print(self._acceptance_table())
        lines = [
            f"{counted(self.num_answers, 'answer')} of up to {counted(self.max_new_tokens, 'token')}, "
            f"{self.num_looping} of them looping. Intervals are bootstrapped over conversations."
        ]
        if self.simulated is not None:
            lines.append("simulated: the drafter on the same answers, without decoding.")
        if self.simulated_store is not None:
            lines.append("store: the drafter on samples of the feature store, without decoding.")
        if self.speed is not None:
            lines.append(
                f"One stream, {counted(self.speed.num_prompts, 'prompt')}: {self.speed.tokens_per_second_plain:.1f} "
                f"tokens/s plain, {self.speed.tokens_per_second_speculative:.1f} speculative, "
                f"{self.speed.speed_up:.2f}x; equal token for token: {self.speed.num_equal_answers} of "
                f"{counted(self.speed.num_prompts, 'answer')}."
            )
            if self.speed.num_equal_answers < self.speed.num_prompts:
                lines.append(
                    "The others part at near-ties, which bfloat16 rounds differently for one token and for several; "
                    "with target.dtype=float32 all are equal."
                )
        if self.server is not None:
            lines.append(
                f"{self.server.engine} {self.server.version} at {self.server.url}: "
                f"{self.tokens_per_second_served:.1f} tokens/s over all requests."
            )
        for line in [*lines, *(f"Warning: {finding}." for finding in self.findings)]:
            console.print(line, highlight=False, markup=False)

    def measured(self) -> dict[str, Measured]:
        """Returns what was measured, by name."""
        found = {
            "untrained": self.untrained,
            "trained": self.trained,
            "simulated": self.simulated,
            "simulated_store": self.simulated_store,
        }
        return {name: measured for name, measured in found.items() if measured is not None}

    def _acceptance_table(self) -> Table:
        titles = {
            "untrained": "untrained",
            "trained": "drafter" if self.server is None else "served",
            "simulated": "simulated",
            "simulated_store": "store",
        }
        table = Table(title=f"Acceptance length tau, {counted(self.num_draft_tokens, 'draft')} a round")
        table.add_column("")
        for heading in ("tau", "95 %", "(N-1)/R", "no loops", "by position"):
            table.add_column(heading, justify="right")
        for name, measured in self.measured().items():
            table.add_row(titles[name], *_cells(measured))
        return table


def measure(questions: list[Question], seed: int) -> Measured:
    """Summarises answers, and once more those that do not loop."""
    steady = [question.answer for question in questions if not question.loops]
    has_rounds = any(answer.rounds > 0 for answer in steady)
    everything = summarise([question.answer for question in questions], seed)
    return Measured(everything, summarise(steady, seed) if has_rounds else None, questions)


class Stopwatch:
    """Wall seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times the block."""
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started


@contextmanager
def progress_bar(description: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Shows a bar in a terminal, else a line now and then; yields what takes the number of units that are done.

    `unit` is the noun of one of them.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        with _logged(description, total, unit) as advance:
            yield advance
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _RateColumn(unit))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task_id = progress.add_task(description, total=total)
        yield lambda count: progress.advance(task_id, count)


@contextmanager
def _logged(description: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    done, started = 0, time.monotonic()
    told_at = started

    def tell(now: float) -> None:
        seconds = max(now - started, 1e-9)
        logger.info(
            "%s: %d/%s, %.1f s, %.3g %ss/s", description, done, counted(total, unit), seconds, done / seconds, unit
        )

    def advance(count: int) -> None:
        nonlocal done, told_at
        done += count
        now = time.monotonic()
        if now - told_at >= LINE_SECONDS and done < total:  # the end has a line of its own
            told_at = now
            tell(now)

    logger.info("%s: %s", description, counted(total, unit))
    yield advance
    tell(time.monotonic())


def names_apart(paths: Sequence[str]) -> dict[str, str]:
    """Returns the part of each path that tells it from the others: file names, or what is not common to all."""
    if len({Path(path).name for path in paths}) == len(set(paths)):
        return {path: Path(path).name or path for path in paths}
    parts = {path: list(Path(path).parts) for path in paths}
    for end in (0, -1):
        while all(len(each) > 1 for each in parts.values()) and len({each[end] for each in parts.values()}) == 1:
            for each in parts.values():
                del each[end]
    return {path: str(Path(*each)) for path, each in parts.items()}


def narrow_table(title: str, texts: Sequence[str], numbers: Sequence[str], lists: Sequence[str] = ()) -> Table:
    """Returns a table for 80 columns: texts are folded and lists wrapped, and a number is whole in any case.

    Its columns are texts, numbers, lists, in this order.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for heading in texts:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in lists:
        table.add_column(heading, justify="right")
    return table


class _RateColumn(ProgressColumn):
    """Units per second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        return Text(f"{task.completed / task.elapsed:.1f} {self._unit}s/s" if task.elapsed else "")


def _cells(measured: Measured) -> list[str]:
    acceptance = measured.all_answers
    conditional = " ".join("-" if share is None else f"{share:.0%}" for share in acceptance.conditional)
    without_loops = "-" if measured.without_loops is None else f"{measured.without_loops.tau:.2f}"
    return [
        f"{acceptance.tau:.3f}",
        f"{acceptance.low:.2f}-{acceptance.high:.2f}",
        f"{acceptance.tau_without_prefill:.3f}",
        without_loops,
        conditional,
    ]
