"""The target answers a prompts file and no states are stored, for a training that has them made meanwhile."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from eagle3.capture.answers import AnswerLog
from eagle3.capture.engine import SetAside
from eagle3.capture.extraction import build_manifest, check_settings
from eagle3.capture.generation import Generation
from eagle3.capture.interrupts import Interrupts
from eagle3.capture.parity import read_target
from eagle3.capture.pipeline import CHUNK_BATCHES
from eagle3.capture.progress import ExtractionReport, LiveProgress
from eagle3.capture.regenerate import Answered, answer_conversations
from eagle3.capture.running_engine import running_engine
from eagle3.capture.selection import select_rows
from eagle3.config import ExtractConfig, UserError
from eagle3.features.writer import FeatureWriter
from eagle3.prompts.conversations import BadRow, Conversation
from eagle3.prompts.rendering import make_renderer
from eagle3.prompts.tokenizers import load_tokenizer

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
    tokenizer = load_tokenizer(config.target.path, config.target.trust_remote_code)
    facts = read_target(config.target)
    renderer = make_renderer(tokenizer, config.prompts)
    store, manifest = config.store, build_manifest(config, facts, renderer, tokenizer)
    report = ExtractionReport()
    with (
        Interrupts() as interrupts,
        FeatureWriter(Path(store.path), manifest, store.shard_bytes) as writer,
        running_engine(config, facts, tokenizer) as engine,
    ):
        max_tokens = min(config.prompts.max_tokens, facts.max_tokens, engine.max_tokens)
        selection = select_rows(config.prompts, renderer, config.regenerate, max_tokens=max_tokens)
        conversations = [row.conversation for row in selection.rows]
        progress = LiveProgress(report, lambda: engine.staging)

        def generate(prompts: list[list[int]]) -> Sequence[Generation | SetAside]:
            started = time.monotonic()
            generated = engine.generate(prompts, config.regenerate, max_tokens=max_tokens)
            report.num_generated += sum(len(each.ids) for each in generated if isinstance(each, Generation))
            report.generation_seconds += time.monotonic() - started
            return generated

        log = AnswerLog(writer.side_path)
        try:
            progress.begin(len(conversations), 0)
            with progress:
                # As an extraction takes them, which may go on from here.
                size = CHUNK_BATCHES * engine.num_answers_together(config.regenerate)
                for start in range(0, len(conversations), size):
                    chunk = conversations[start : start + size]
                    if not all(conversation.id in log for conversation in chunk):
                        answered = answer_conversations(chunk, renderer, tokenizer, generate, max_tokens)
                        with interrupts.held():
                            log.append(chunk, answered)
                    progress.show(advance=len(chunk))
            _log_answers(conversations, log, Path(store.path))
        except KeyboardInterrupt:
            num_answered = sum(each.id in log for each in conversations)
            logger.info(
                "stopped: %d of %d conversations are answered in %s; the same command goes on from there",
                num_answered, len(conversations), store.path,
            )  # fmt: skip
            raise
        finally:
            log.close()
    if report.num_generated:
        logger.info("%s", report.rates())
    return report


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


def _log_answers(conversations: Sequence[Conversation], log: AnswerLog, store_path: Path) -> None:
    """Says what became of all conversations, also of those that were answered before."""
    results = [log.read(each) for each in conversations]
    answers = [each for each in results if isinstance(each, Answered)]
    bad_rows = [each for each in results if isinstance(each, BadRow)]
    logger.info(
        "%d of %d conversations are answered in %s; answers: %d reached a token limit, %d loops cut, %d encode "
        "otherwise and are not supervised, %d turns dropped",
        len(answers), len(results), store_path,
        sum(each.num_unfinished for each in answers), sum(each.num_looped for each in answers),
        sum(each.num_reencoded for each in answers), sum(each.num_turns_dropped for each in answers),
    )  # fmt: skip
    if bad_rows:
        first = f"line {bad_rows[0].line}, {bad_rows[0].reason}"
        logger.warning("%d conversations have no answer and are left out: %s", len(bad_rows), first)
