"""The target answers a prompts file and no states are stored, for a training that has them made meanwhile."""

import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from eagle3.capture.answers import Answerer, AnswerLog
from eagle3.capture.extraction import build_manifest, check_settings
from eagle3.capture.interrupts import Interrupts
from eagle3.capture.progress import ExtractionReport, LiveProgress
from eagle3.capture.running_engine import running_engine
from eagle3.capture.selection import select_rows
from eagle3.capture.target import open_target
from eagle3.config import ExtractConfig, UserError
from eagle3.features.writer import FeatureWriter
from eagle3.prompts.conversations import BadRow, Conversation
from eagle3.words import counted

logger = logging.getLogger(__name__)


def write_answers(config: ExtractConfig) -> ExtractionReport:
    """Has every usable row answered whose answer is not logged yet; an extraction into the same store uses them too.

    Raises:
        UserError: settings, prompts, target or store do not allow it. What was answered before is kept.
    """
    check_settings(config)
    problems = unstored_problems(config)
    if not config.regenerate.enabled:
        problems.append(
            "  regenerate.enabled must be true, got false: a training takes the answers of the prompts file"
        )
    if problems:
        raise UserError("answers cannot be written for a training with:\n" + "\n".join(problems) + "\nchange them")
    target, store = open_target(config), config.store
    report = ExtractionReport()
    bad_rows: list[BadRow] = []
    with (
        Interrupts() as interrupts,
        FeatureWriter(Path(store.path), build_manifest(config, target), store.shard_bytes) as writer,
        running_engine(config, target) as engine,
        closing(AnswerLog(writer.side_path)) as log,
    ):
        max_tokens = min(config.prompts.max_tokens, target.facts.max_tokens, engine.max_tokens)
        selection = select_rows(config.prompts, target.renderer, config.regenerate, max_tokens=max_tokens)
        conversations = [row.conversation for row in selection.rows]
        progress = LiveProgress(report, lambda: engine.staging)
        answerer = Answerer(
            config.regenerate,
            engine,
            target,
            log,
            report=report,
            progress=progress,
            interrupts=interrupts,
            max_tokens=max_tokens,
        )
        progress.begin(len(conversations), num_logged(conversations, log))
        try:
            with progress:
                # As an extraction takes them, which may go on from here.
                for start in range(0, len(conversations), answerer.chunk_size):
                    chunk = conversations[start : start + answerer.chunk_size]
                    num_before = num_logged(chunk, log)
                    bad_rows += [each for each in answerer.answers(chunk) if isinstance(each, BadRow)]
                    progress.show(advance=len(chunk) - num_before)
        except KeyboardInterrupt:
            logger.info(
                "stopped: %d of %d conversations are answered in %s; the same command goes on from there",
                num_logged(conversations, log), len(conversations), store.path,
            )  # fmt: skip
            raise
    logger.info(
        "%d of %d conversations are answered in %s; %s%s",
        len(conversations) - len(bad_rows), len(conversations), store.path, report.answers(),
        f"; {report.rates()}" if report.rates() else "",
    )  # fmt: skip
    if bad_rows:
        num_bad, first = counted(len(bad_rows), "conversation"), bad_rows[0]
        logger.warning("left out: %s without an answer, the first on line %d, %s", num_bad, first.line, first.reason)
    return report


def num_logged(conversations: Sequence[Conversation], log: AnswerLog) -> int:
    """Returns how many of the conversations were answered, well or not."""
    return sum(each.id in log for each in conversations)


def unstored_problems(config: ExtractConfig) -> list[str]:
    """Returns what of the settings cannot be where no states are stored, a line each."""
    problems = []
    if config.prompts.path is None:
        problems.append("  prompts.path must be a file, got none")
    if config.store.codec != "exact":
        problems.append(f"  store.codec must be exact where nothing is stored, got {config.store.codec!r}")
    if config.store.num_writers != 1:
        problems.append(f"  store.num_writers must be 1 where nothing is stored, got {config.store.num_writers}")
    return problems
