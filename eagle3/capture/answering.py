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
from eagle3.capture.regenerate import answer_conversations
from eagle3.capture.running_engine import running_engine
from eagle3.capture.selection import select_rows
from eagle3.config import ExtractConfig, UserError
from eagle3.features.writer import FeatureWriter
from eagle3.prompts.rendering import make_renderer
from eagle3.prompts.tokenizers import load_tokenizer

logger = logging.getLogger(__name__)


def write_answers(config: ExtractConfig) -> ExtractionReport:
    """Has every usable row answered whose answer is not logged yet; an extraction into the same store uses them too.

    Raises:
        UserError: settings, prompts, target or store do not allow it. What was answered before is kept.
    """
    check_settings(config)
    if not config.regenerate.enabled:
        raise UserError(
            "regenerate.enabled must be true where the target writes the answers, got false; train on the prompts file"
        )
    if config.prompts.path is None:
        raise UserError("prompts.path must be a file, got none; name one with --prompts")
    tokenizer = load_tokenizer(config.target.path, config.target.trust_remote_code)
    facts = read_target(config.target)
    renderer = make_renderer(tokenizer, config.prompts)
    store, manifest = config.store, build_manifest(config, facts, renderer, tokenizer)
    report = ExtractionReport()
    with (
        Interrupts() as interrupts,
        FeatureWriter(Path(store.path), manifest, store.shard_bytes, writer=store.writer) as writer,
        running_engine(config, facts, tokenizer) as engine,
    ):
        max_tokens = min(config.prompts.max_tokens, facts.max_tokens, engine.max_tokens)
        selection = select_rows(config.prompts, renderer, config.regenerate, max_tokens=max_tokens)
        conversations = [row.conversation for row in selection.share(store.writer, store.num_writers).rows]
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
        finally:
            log.close()
    logger.info("%d conversations are answered in %s; %s", len(conversations), store.path, report.rates())
    return report
