"""Answers, captures and stores, chunk after chunk."""

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.capture.answers import Answerer, AnswerLog
from eagle3.capture.engine import Captured, CodedCapture, Engine, SetAside
from eagle3.capture.faults import find_coded_fault, find_fault
from eagle3.capture.interrupts import Interrupts
from eagle3.capture.parity import GATE_SAMPLES, check_parity
from eagle3.capture.progress import ExtractionReport, LiveProgress
from eagle3.capture.selection import Row
from eagle3.capture.target import Target
from eagle3.config import ExtractConfig, UserError
from eagle3.features.index import write_atomically
from eagle3.features.record import FeatureSample, supervised_rows
from eagle3.features.stored import OPTIONAL_COLUMNS, ColumnKind, StoredSample, column_kinds, join_columns
from eagle3.features.writer import FeatureWriter
from eagle3.prompts.conversations import BadRow
from eagle3.prompts.lengths import render_row

logger = logging.getLogger(__name__)

REJECTED_NAME = "rejected.jsonl"  # rows that were not captured, of the latest run
QUARANTINE_NAME = "quarantine.jsonl"  # samples without usable features, of all runs
PARITY_NAME = "parity.json"  # what the gates saw, of the latest run
MAX_PROBED_SHARE = 0.01  # of the rows, prefilled twice more to learn the speed of plain prefill
MIN_PROBED = 8  # sequences, or that speed says nothing


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
        engine: Engine,
        target: Target,
        writer: FeatureWriter,
        *,
        report: ExtractionReport,
        interrupts: Interrupts,
        max_tokens: int,
    ) -> None:
        self._config = config
        self._engine = engine
        self._target = target
        self._writer = writer
        self._report = report
        self._interrupts = interrupts
        self._max_tokens = max_tokens
        self._is_gated = False
        self._num_rows = 0
        self._bytes_before = writer.num_bytes
        self._progress = LiveProgress(report, lambda: engine.staging)

    def run(self, rows: Sequence[Row], quarantined_ids: set[str]) -> None:
        """Takes every row that is neither stored nor quarantined through all stages.

        Raises:
            UserError: a gate failed, nothing was captured, too much was quarantined, or the disk or quota is full.
        """
        done = self._writer.stored_ids | quarantined_ids
        missing = {row.conversation.id for row in rows} - done
        self._num_rows = len(rows)
        self._progress.begin(len(rows), len(rows) - len(missing))
        log = AnswerLog(self._writer.side_path)
        try:
            with self._progress:
                if self._config.regenerate.enabled:
                    self._answer_and_capture(rows, missing, log)
                else:
                    self._capture(self._given([row for row in rows if row.conversation.id in missing]))
                with self._interrupts.held():
                    self._writer.flush()
        finally:
            log.close()
        if not self._writer.stored_ids:
            raise UserError(
                f"at least one sample must be stored, got none of {len(rows)} ({self._writer.path}); "
                f"{REJECTED_NAME} and {QUARANTINE_NAME} say why"
            )

    def _answer_and_capture(self, rows: Sequence[Row], missing: set[str], log: AnswerLog) -> None:
        answerer = Answerer(
            self._config.regenerate,
            self._engine,
            self._target,
            log,
            report=self._report,
            progress=self._progress,
            interrupts=self._interrupts,
            max_tokens=self._max_tokens,
        )
        for start in range(0, len(rows), answerer.chunk_size):
            chunk = rows[start : start + answerer.chunk_size]
            if any(row.conversation.id in missing for row in chunk):
                answered = self._answered(chunk, answerer)
                self._capture([each for each in answered if each.row.conversation.id in missing])

    def _given(self, rows: Sequence[Row]) -> Iterator[_Tokens]:
        for row in rows:
            rendered = render_row(self._target.renderer, row.conversation)
            yield _Tokens(row, rendered.input_ids, rendered.loss_mask)

    def _answered(self, chunk: Sequence[Row], answerer: Answerer) -> list[_Tokens]:
        tokens = []
        for row, result in zip(chunk, answerer.answers([row.conversation for row in chunk]), strict=True):
            if isinstance(result, BadRow):
                _append_line(self._writer.side_path / REJECTED_NAME, asdict(result))
                self._progress.show(advance=1)
            else:
                tokens.append(_Tokens(row, result.input_ids, result.loss_mask))
        return tokens

    def _capture(self, tokens: Iterable[_Tokens]) -> None:
        waiting = iter(tokens)
        if not self._is_gated:
            num_probed = self._num_probed()
            first = list(islice(waiting, max(GATE_SAMPLES, num_probed)))
            if not first:
                return
            self._gate(first[:GATE_SAMPLES])
            self._is_gated = True
            if num_probed:
                probes = [each.input_ids for each in first[:num_probed]]
                self._report.plain_tokens_per_second = self._engine.plain_tokens_per_second(probes)
            waiting = chain(first, waiting)
        under_way: dict[int, _Tokens] = {}

        def sequences() -> Iterator[list[int]]:
            for index, each in enumerate(waiting):
                under_way[index] = each
                yield each.input_ids

        before, started = self._report.capture_seconds, time.monotonic()
        with closing(self._engine.capture_each(sequences())) as results:
            for index, result in results:
                self._store(under_way.pop(index), result)
                self._report.capture_seconds = before + time.monotonic() - started
                self._progress.show(advance=1)

    def _num_probed(self) -> int:
        """Returns how many sequences tell the speed of plain prefill: as many as run together, if they cost little."""
        together = self._engine.num_answers_together(self._config.regenerate)
        num_probed = min(together, int(MAX_PROBED_SHARE * self._num_rows))
        return num_probed if num_probed >= MIN_PROBED else 0

    def _gate(self, tokens: list[_Tokens]) -> None:
        regenerate = self._config.regenerate
        is_greedy = regenerate.enabled and regenerate.temperature == 0
        report = check_parity(
            self._engine,
            self._config.target,
            [each.input_ids for each in tokens],
            [each.loss_mask for each in tokens] if is_greedy else None,
        )
        write_atomically(self._writer.side_path / PARITY_NAME, json.dumps(asdict(report), indent=2) + "\n")
        self._writer.describe({"logit_noise": report.logit_noise, **self._engine.facts.settings})
        states = f"not compared with transformers' own, since {report.states_skipped}"
        if report.states_skipped is None:
            states = f"within {max(report.relative_error):.2g} of transformers' own"
        with self._progress.paused():
            logger.info(
                "parity: states of layers %s are %s; greedy tokens agree on %.1f %% of %d",
                report.capture_layers,
                states,
                100 * report.agreement,
                report.num_clear,
            )

    def _store(self, tokens: _Tokens, result: Captured | CodedCapture | SetAside) -> None:
        if isinstance(result, SetAside):
            self._quarantine(tokens, result.reason)
            return
        if isinstance(result, CodedCapture):
            stored = self._stored_sample(tokens, result)
            self._write(tokens, find_coded_fault(stored), partial(self._writer.write_stored, stored))
            return
        sample = self._sample(tokens, result)
        fault = find_fault(sample)
        if fault is None:
            sample = replace(sample, target_logz=self._engine.log_normaliser(sample.last_hidden_states))
        self._write(tokens, fault, partial(self._writer.write, sample))

    def _write(self, tokens: _Tokens, fault: str | None, write: Callable[[], None]) -> None:
        if fault is not None:
            self._quarantine(tokens, fault)
            return
        with self._interrupts.held():
            write()
            self._report.num_stored += 1
            self._report.num_bytes = self._writer.num_bytes - self._bytes_before
        self._report.num_tokens += len(tokens.input_ids)
        self._report.num_supervised += sum(tokens.loss_mask)

    def _quarantine(self, tokens: _Tokens, reason: str) -> None:
        line = {"sample_id": tokens.row.conversation.id, "line": tokens.row.conversation.line, "reason": reason}
        with self._interrupts.held():
            _append_line(self._writer.side_path / QUARANTINE_NAME, line)
            self._report.num_quarantined += 1
        allowed = self._config.max_quarantined_share
        if self._report.num_quarantined > allowed * self._num_rows:
            raise UserError(
                f"samples without usable features must be at most max_quarantined_share={allowed} of "
                f"{self._num_rows}, got {self._report.num_quarantined} ({self._writer.side_path / QUARANTINE_NAME}); "
                f"see the reasons there, or raise the share"
            )

    def _sample(self, tokens: _Tokens, states: Captured) -> FeatureSample:
        loss_mask = torch.tensor(tokens.loss_mask)
        last_rows = self._last_rows(loss_mask)
        return FeatureSample(
            sample_id=tokens.row.conversation.id,
            input_ids=torch.tensor(tokens.input_ids, dtype=torch.int32),
            loss_mask=loss_mask,
            aux_hidden_states=states.aux_hidden_states,
            last_hidden_states=states.last_hidden_states[last_rows],
            last_rows=last_rows,
        )

    def _stored_sample(self, tokens: _Tokens, states: CodedCapture) -> StoredSample:
        """Returns the columns of states that came coded; whoever codes them has the head, so without `target_logz`."""
        loss_mask = torch.tensor(tokens.loss_mask)
        last_rows = self._last_rows(loss_mask)
        known = {
            "input_ids": torch.tensor(tokens.input_ids, dtype=torch.int32),
            "last_rows": last_rows,
            "loss_mask": loss_mask,
        }
        stored = join_columns(tokens.row.conversation.id, known, aux=states.aux, last=states.last.at(last_rows))
        manifest = self._writer.manifest
        kinds = column_kinds(manifest.codec, manifest.hidden_size, len(manifest.capture_layers))
        seen = {name: ColumnKind(tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in stored.columns.items()}
        wanted = {name: kind for name, kind in kinds.items() if name not in OPTIONAL_COLUMNS}
        assert seen == wanted, f"columns must be {wanted}, got {seen} (sample {stored.sample_id!r})"
        return stored

    def _last_rows(self, loss_mask: Tensor) -> Tensor:  # (T,) -> (R,)
        every_row = torch.arange(loss_mask.numel(), dtype=torch.int32)
        return every_row if self._config.store.last_rows == "all" else supervised_rows(loss_mask)


def _append_line(path: Path, values: dict[str, Any]) -> None:
    with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), "w") as file:
        file.write(json.dumps(values) + "\n")
