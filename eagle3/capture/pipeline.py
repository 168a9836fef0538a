"""Answers, captures and stores, chunk after chunk."""

import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from eagle3.capture.answers import AnswerLog
from eagle3.capture.generation import Generation
from eagle3.capture.inprocess import Captured, TransformersEngine
from eagle3.capture.interrupts import Interrupts
from eagle3.capture.parity import check_parity
from eagle3.capture.regenerate import Answered, answer_conversations
from eagle3.capture.selection import Row
from eagle3.config import ExtractConfig, UserError
from eagle3.features.index import write_atomically
from eagle3.features.record import FeatureSample, supervised_rows
from eagle3.features.writer import FeatureWriter
from eagle3.prompts.conversations import BadRow
from eagle3.prompts.lengths import render_row
from eagle3.prompts.rendering import ChatRenderer

logger = logging.getLogger(__name__)

REJECTED_NAME = "rejected.jsonl"  # rows that were not captured, of the latest run
QUARANTINE_NAME = "quarantine.jsonl"  # samples with features that are not finite, of all runs
PARITY_NAME = "parity.json"  # what the gates saw, of the latest run
CHUNK_BATCHES = 4  # of answers, between two writes of the log: a kill loses at most these


@dataclass
class ExtractionReport:
    """What one run did; filled in as it goes."""

    num_stored_before: int = 0
    num_stored: int = 0  # samples, by this run
    num_tokens: int = 0
    num_supervised: int = 0
    num_bad_rows: int = 0
    num_too_long: int = 0
    num_quarantined: int = 0  # by all runs
    num_generated: int = 0  # tokens, those of cut loops included
    num_unfinished: int = 0  # answers that ended at a token limit
    num_looped: int = 0  # answers that were cut where they began to repeat themselves
    num_reencoded: int = 0  # answers that lost their supervision, since their text encodes to other ids
    num_turns_dropped: int = 0  # user turns that found no room under the token limit
    generation_seconds: float = 0.0
    capture_seconds: float = 0.0

    def rates(self) -> str:
        """Returns tokens per second of both stages."""
        stages = [
            ("answers", self.num_generated, self.generation_seconds),
            ("capture", self.num_tokens, self.capture_seconds),
        ]
        return ", ".join(f"{name} {tokens / seconds:,.0f} tokens/s" for name, tokens, seconds in stages if seconds)


@dataclass(frozen=True)
class _Tokens:
    """One conversation, ready to be captured."""

    row: Row
    input_ids: list[int]  # (T,)
    loss_mask: list[bool]  # (T,)


class Pipeline:
    """Takes rows through answering, capture and the store, and counts what becomes of them."""

    def __init__(
        self,
        config: ExtractConfig,
        engine: TransformersEngine,
        renderer: ChatRenderer,
        writer: FeatureWriter,
        *,
        report: ExtractionReport,
        interrupts: Interrupts,
        max_tokens: int,
    ) -> None:
        self._config = config
        self._engine = engine
        self._renderer = renderer
        self._writer = writer
        self._report = report
        self._interrupts = interrupts
        self._max_tokens = max_tokens
        self._is_gated = False
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("samples {task.description}"))
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        self._progress = Progress(*columns, *times, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task("")

    def run(self, rows: Sequence[Row], quarantined_ids: set[str]) -> None:
        """Takes every row that is neither stored nor quarantined through all stages.

        Raises:
            UserError: a gate failed, nothing was captured, too much was quarantined, or the disk or quota is full.
        """
        # Chunks are those of the file, whatever is done already: an answer keeps its batch mates, and with them its
        # rounding, when a run is resumed.
        chunk_size = CHUNK_BATCHES * self._config.regenerate.batch_size
        self._progress.update(self._task, total=len(rows))
        answers = AnswerLog(self._writer.path)
        try:
            with self._progress:
                for start in range(0, len(rows), chunk_size):
                    chunk = rows[start : start + chunk_size]
                    missing = {row.conversation.id for row in chunk} - self._writer.stored_ids - quarantined_ids
                    if missing:
                        is_answered = self._config.regenerate.enabled
                        tokens = self._answered(chunk, answers) if is_answered else self._given(chunk)
                        self._capture([each for each in tokens if each.row.conversation.id in missing])
                        self._check_quarantine(len(rows))
                    self._progress.advance(self._task, len(chunk))
                    if self._progress.disable:
                        logger.info("%d/%d samples %s", start + len(chunk), len(rows), self._report.rates())
                with self._interrupts.held():
                    self._writer.flush()
        finally:
            answers.close()
        if not self._writer.stored_ids:
            raise UserError(
                f"at least one sample must be stored, got none of {len(rows)} ({self._writer.path}); "
                f"{REJECTED_NAME} and {QUARANTINE_NAME} say why"
            )

    def _given(self, chunk: Sequence[Row]) -> list[_Tokens]:
        rendered = [render_row(self._renderer, row.conversation) for row in chunk]
        return [_Tokens(row, each.input_ids, each.loss_mask) for row, each in zip(chunk, rendered, strict=True)]

    def _answered(self, chunk: Sequence[Row], log: AnswerLog) -> list[_Tokens]:
        conversations = [row.conversation for row in chunk]
        if not all(conversation.id in log for conversation in conversations):
            answered = answer_conversations(
                conversations, self._renderer, self._engine.tokenizer, self._generate, self._max_tokens
            )
            with self._interrupts.held():
                log.append(conversations, answered)
        tokens = []
        for row in chunk:
            result = log.read(row.conversation)
            if isinstance(result, BadRow):
                self._report.num_bad_rows += 1
                _append_line(self._writer.path / REJECTED_NAME, asdict(result))
                continue
            self._count(result)
            tokens.append(_Tokens(row, result.input_ids, result.loss_mask))
        return tokens

    def _generate(self, prompts: list[list[int]]) -> list[Generation]:
        def count(num_tokens: int) -> None:
            self._report.num_generated += num_tokens
            self._report.generation_seconds = before + time.monotonic() - started
            self._progress.update(self._task, description=self._report.rates())

        before, started = self._report.generation_seconds, time.monotonic()
        return self._engine.generate(prompts, self._config.regenerate, max_tokens=self._max_tokens, on_tokens=count)

    def _capture(self, tokens: list[_Tokens]) -> None:
        if not tokens:
            return
        if not self._is_gated:
            self._gate(tokens)
        for batch in batches_by_length([len(each.input_ids) for each in tokens], self._config.batch_tokens):
            self._capture_batch([tokens[i] for i in batch])

    def _gate(self, tokens: list[_Tokens]) -> None:
        regenerate = self._config.regenerate
        is_greedy = regenerate.enabled and regenerate.temperature == 0
        report = check_parity(
            self._engine,
            self._config.target,
            [each.input_ids for each in tokens],
            [each.loss_mask for each in tokens] if is_greedy else None,
        )
        write_atomically(self._writer.path / PARITY_NAME, json.dumps(asdict(report), indent=2) + "\n")
        self._progress.stop()  # a log line would land in the middle of the bar
        logger.info(
            "parity: states of layers %s are within %.2g of transformers' own, greedy tokens agree on %.1f %% of %d",
            report.capture_layers,
            max(report.relative_error),
            100 * report.agreement,
            report.num_clear,
        )
        self._progress.start()
        self._is_gated = True

    def _capture_batch(self, batch: list[_Tokens]) -> None:
        started = time.monotonic()
        captured = self._engine.capture([each.input_ids for each in batch])
        samples = [self._sample(tokens, states) for tokens, states in zip(batch, captured, strict=True)]
        last = torch.cat([sample.last_hidden_states for sample in samples])  # (R of all, D)
        logz = self._engine.log_normaliser(last).split([sample.last_rows.numel() for sample in samples])
        for tokens, sample, sample_logz in zip(batch, samples, logz, strict=True):
            fault = find_fault(sample)
            with self._interrupts.held():
                if fault is None:
                    self._writer.write(replace(sample, target_logz=sample_logz))
                    self._report.num_stored += 1
                else:
                    line = {"sample_id": sample.sample_id, "line": tokens.row.conversation.line, "reason": fault}
                    _append_line(self._writer.path / QUARANTINE_NAME, line)
                    self._report.num_quarantined += 1
            self._report.num_tokens += len(tokens.input_ids)
            self._report.num_supervised += sum(tokens.loss_mask)
        self._report.capture_seconds += time.monotonic() - started
        self._progress.update(self._task, description=self._report.rates())

    def _sample(self, tokens: _Tokens, states: Captured) -> FeatureSample:
        loss_mask = torch.tensor(tokens.loss_mask)
        every_row = torch.arange(len(tokens.input_ids), dtype=torch.int32)
        last_rows = every_row if self._config.store.last_rows == "all" else supervised_rows(loss_mask)
        return FeatureSample(
            sample_id=tokens.row.conversation.id,
            input_ids=torch.tensor(tokens.input_ids, dtype=torch.int32),
            loss_mask=loss_mask,
            aux_hidden_states=states.aux_hidden_states,
            last_hidden_states=states.last_hidden_states[last_rows],
            last_rows=last_rows,
        )

    def _count(self, answered: Answered) -> None:
        self._report.num_unfinished += answered.num_unfinished
        self._report.num_looped += answered.num_looped
        self._report.num_reencoded += answered.num_reencoded
        self._report.num_turns_dropped += answered.num_turns_dropped

    def _check_quarantine(self, num_rows: int) -> None:
        allowed = self._config.max_quarantined_share
        if self._report.num_quarantined > allowed * num_rows:
            raise UserError(
                f"samples with features that are not finite must be at most max_quarantined_share={allowed} of "
                f"{num_rows}, got {self._report.num_quarantined} ({self._writer.path / QUARANTINE_NAME}); "
                f"run the target in another dtype, or raise the share"
            )


def batches_by_length(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Groups indices, longest first, so that each batch has at most `batch_tokens` tokens with its padding.

    A sequence that is longer than that gets a batch of its own.
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def find_fault(sample: FeatureSample) -> str | None:
    """Says what keeps a sample out of the store: values that are not finite."""
    for name, states, rows in (
        ("aux_hidden_states", sample.aux_hidden_states, torch.arange(sample.input_ids.numel())),
        ("last_hidden_states", sample.last_hidden_states, sample.last_rows),
    ):
        is_finite = states.isfinite().all(dim=1)  # (T,) or (R,)
        if not is_finite.all():
            first = int(rows[~is_finite][0])
            return f"{name} must be finite, got {int((~is_finite).sum())} rows that are not, first at token {first}"
    return None


def _append_line(path: Path, values: dict[str, Any]) -> None:
    with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), "w") as file:
        file.write(json.dumps(values) + "\n")
