"""A prompts file as samples whose states running servers make while a drafter trains on them."""

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from eagle3.capture.answering import unstored_problems
from eagle3.capture.answers import AnswerLog
from eagle3.capture.engine import Captured, CodedCapture, Engine, SetAside
from eagle3.capture.extraction import build_manifest, check_settings
from eagle3.capture.faults import find_fault
from eagle3.capture.parity import GATE_SAMPLES, check_parity
from eagle3.capture.regenerate import Answered
from eagle3.capture.running_engine import running_engine
from eagle3.capture.selection import select_rows
from eagle3.capture.target import open_target
from eagle3.config import ExtractConfig, UserError
from eagle3.features.manifest import ANSWERS_NAME, Manifest, check_same_capture, read_manifest
from eagle3.features.record import FeatureSample, supervised_rows
from eagle3.features.stream import SampleStream, TokenSample
from eagle3.features.writer import side_path
from eagle3.prompts.conversations import Conversation
from eagle3.prompts.lengths import render_row
from eagle3.prompts.rendering import Rendered

logger = logging.getLogger(__name__)


@contextmanager
def streamed_samples(config: ExtractConfig, path: str) -> Iterator[SampleStream]:
    """Yields the samples of an extraction that stores nothing; `path`, of its config, names it in messages.

    Each rank of a training calls it and asks the servers for its own samples. The first one compares what they record
    with the target's files.

    Raises:
        UserError: settings, prompts, target or servers do not allow it.
    """
    check_settings(config)
    check_stream_settings(config, path)
    target = open_target(config)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))  # where engine=transformers puts the target
    with running_engine(with_share_of_staging(config), target) as engine:
        max_tokens = min(config.prompts.max_tokens, target.facts.max_tokens, engine.max_tokens)
        rows = select_rows(config.prompts, target.renderer, config.regenerate, max_tokens=max_tokens).rows
        # A commit of ours changes nothing about the samples: a run goes on after an upgrade.
        manifest = replace(build_manifest(config, target), git_commit=None)
        conversations = [row.conversation for row in rows]
        if config.regenerate.enabled:
            tokens = answered_tokens(config, conversations, manifest, path)
        else:
            tokens = [token_sample(each.id, render_row(target.renderer, each)) for each in conversations]
        if os.environ.get("RANK", "0") == "0":
            first = [each.input_ids.tolist() for each in tokens[:GATE_SAMPLES]]
            report = check_parity(engine, config.target, first, None)
            logger.info("parity: greedy tokens agree on %.1f %% of %d", 100 * report.agreement, report.num_clear)
        logger.info("%d samples come from %s while they are trained on", len(tokens), config.engine)
        max_blank = int(config.max_quarantined_share * len(tokens))
        yield SampleStream(path, manifest, tokens, StateMaker(engine, max_blank))


def check_stream_settings(config: ExtractConfig, path: str) -> None:
    """Compares settings with what can be streamed.

    Raises:
        UserError: names all that cannot.
    """
    problems = unstored_problems(config)
    if config.engine == "sglang" and not config.server.urls:
        problems.append("  server.urls must name servers that run, got none: a training starts none")
    if problems:
        raise UserError(f"some settings of {path} cannot be trained from:\n" + "\n".join(problems) + "\nchange them")


def within_timeout(config: ExtractConfig, timeout: float) -> ExtractConfig:
    """Has a server count as hung while the ranks, which give each other `timeout` minutes, still wait for samples.

    A third of it is for a request, one for asking once more whether the server is there, and one for what is sent
    again. Otherwise they would end for a rank that is late, with a word that names no server and nothing saved.
    """
    longest = max(1, int(60 * timeout / 3))
    if config.engine != "sglang" or config.server.request_timeout_seconds <= longest:
        return config
    return replace(config, server=replace(config.server, request_timeout_seconds=longest))


def token_sample(sample_id: str, known: Rendered | Answered) -> TokenSample:
    """Returns a sample without states."""
    return TokenSample(sample_id, torch.tensor(known.input_ids, dtype=torch.int32), torch.tensor(known.loss_mask))


def answered_tokens(
    config: ExtractConfig, conversations: Sequence[Conversation], manifest: Manifest, path: str
) -> list[TokenSample]:
    """Returns what the target answered before, of each conversation that it could answer.

    Raises:
        UserError: something else was answered, or not all of it.
    """
    store_path = Path(config.store.path)
    answer = f"have it answered first: python extract.py --config {path} --answers-only"
    directory = side_path(store_path, writer=0)
    if not (directory / ANSWERS_NAME).is_file():
        raise UserError(f"store.path must be where the target's answers are, got none ({directory}); {answer}")
    check_same_capture(read_manifest(store_path), manifest, store_path)
    log = AnswerLog(directory, read_only=True)
    try:
        missing = [each.id for each in conversations if each.id not in log]
        if missing:
            raise UserError(
                f"every conversation must have been answered, got {len(missing)} of {len(conversations)} without an "
                f"answer, first {missing[0]!r} ({directory / ANSWERS_NAME}); {answer}"
            )
        results = [(each.id, log.read(each)) for each in conversations]
    finally:
        log.close()
    tokens = [token_sample(sample_id, result) for sample_id, result in results if isinstance(result, Answered)]
    if not tokens:
        raise UserError(
            f"at least one conversation must have an answer, got none of {len(conversations)} "
            f"({directory / ANSWERS_NAME}); {ANSWERS_NAME} has the reasons: change the prompts, and answer them anew"
        )
    if len(tokens) < len(conversations):
        logger.info("%d conversations had no answer and are left out", len(conversations) - len(tokens))
    return tokens


def with_share_of_staging(config: ExtractConfig) -> ExtractConfig:
    """Divides the staging directory's budget among the ranks of this machine, which share it."""
    num_sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_bytes = config.server.staging_bytes
    if num_bytes is None:
        if config.engine != "sglang" or not os.path.isdir(config.server.staging_dir):
            return config  # what is missing is said by who needs it
        num_bytes = shutil.disk_usage(config.server.staging_dir).free // 2
    return replace(config, server=replace(config.server, staging_bytes=max(1, num_bytes // num_sharing)))


class StateMaker:
    """Runs the target on samples; None stands for one without usable states."""

    def __init__(self, engine: Engine, max_blank: int) -> None:
        self._engine = engine
        self._max_blank = max_blank
        self._blank_ids: set[str] = set()

    def __call__(self, tokens: Sequence[TokenSample]) -> list[FeatureSample | None]:
        """Returns the samples in their order.

        Raises:
            UserError: a server stays away, or more samples than are allowed have no usable states.
        """
        made: dict[int, FeatureSample | None] = {}
        with closing(self._engine.capture_each(each.input_ids.tolist() for each in tokens)) as results:
            for index, result in results:
                made[index] = self._sample(tokens[index], result)
        return [made[index] for index in range(len(tokens))]

    def _sample(self, tokens: TokenSample, result: Captured | CodedCapture | SetAside) -> FeatureSample | None:
        assert not isinstance(result, CodedCapture), tokens.sample_id  # asked for as they are
        if isinstance(result, SetAside):
            self._note_blank(tokens, result.reason)
            return None
        rows = supervised_rows(tokens.loss_mask)
        last = result.last_hidden_states[rows]
        sample = FeatureSample(
            sample_id=tokens.sample_id,
            input_ids=tokens.input_ids,
            loss_mask=tokens.loss_mask,
            aux_hidden_states=result.aux_hidden_states,
            last_hidden_states=last,
            last_rows=rows,
        )
        fault = find_fault(sample)
        if fault is not None:
            self._note_blank(tokens, fault)
            return None
        return replace(sample, target_logz=self._engine.log_normaliser(last))

    def _note_blank(self, tokens: TokenSample, reason: str) -> None:
        if tokens.sample_id not in self._blank_ids:
            self._blank_ids.add(tokens.sample_id)
            # Of an error's level: other ranks than the first log no less.
            logger.error("sample %r is left out of the training: %s", tokens.sample_id, reason)
        if len(self._blank_ids) > self._max_blank:
            raise UserError(
                f"samples without usable states must be at most {self._max_blank} (max_quarantined_share), got "
                f"{len(self._blank_ids)}, the latest {tokens.sample_id!r}: {reason}; drop them, or raise the share"
            )
