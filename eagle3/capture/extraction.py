"""The loop: resume, quarantine, progress.

What is stored, logged or set aside is not done again, so the same command goes on wherever it was stopped.
"""

import dataclasses
import json
import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from eagle3.board import check_backend, feature_store
from eagle3.capture.client import SGLangEngine
from eagle3.capture.engine import Engine
from eagle3.capture.interrupts import Interrupts
from eagle3.capture.parity import TargetFacts
from eagle3.capture.pipeline import QUARANTINE_NAME, REJECTED_NAME, Pipeline
from eagle3.capture.progress import ExtractionReport
from eagle3.capture.running_engine import engine_version, running_engine
from eagle3.capture.selection import Selection, TooLong, select_rows
from eagle3.capture.target import Target, open_target
from eagle3.config import ExtractConfig, UserError
from eagle3.features.codec import Codec, codec_named
from eagle3.features.index import write_atomically
from eagle3.features.manifest import (
    ANSWERS_NAME,
    DTYPES,
    MANIFEST_NAME,
    Manifest,
    check_same_capture,
    digest_target_config,
    digest_target_weights,
    read_manifest,
)
from eagle3.features.store import FeatureStore, digest_store
from eagle3.features.writer import FeatureWriter, side_path
from eagle3.plan import ExtractionPlan, SampleSize, plan_extraction
from eagle3.prompts.conversations import BadRow
from eagle3.prompts.rendering import ChatRenderer
from eagle3.prompts.server_rendering import compare_with_server
from eagle3.prompts.sources import digest_sources, find_sources
from eagle3.prompts.tokenizers import tokenizer_digest
from eagle3.tracking import git_state, identify, open_board, write_provenance
from eagle3.words import counted, readable_bytes

logger = logging.getLogger(__name__)

RENDERED_ROWS = 20  # compared with the server: a few show another template, and cost a second


def run_extraction(config: ExtractConfig) -> ExtractionReport:
    """Captures every usable row of a prompts file that its store does not have yet.

    Raises:
        UserError: settings, prompts, target or store do not allow it, a gate failed, the disk or the quota is full, or
            too many samples had no usable features. What was captured before is kept.
    """
    check_settings(config)
    check_backend(config.tracking)
    if config.prompts.path is None:
        raise UserError("prompts.path must be a file, got none; name one with --prompts")
    target = open_target(config)
    max_tokens = min(config.prompts.max_tokens, target.facts.max_tokens)
    selection = select_rows(config.prompts, target.renderer, config.regenerate, max_tokens=max_tokens)
    selection = selection.share(config.store.writer, config.store.num_writers)
    manifest = build_manifest(config, target)
    store, store_path = config.store, Path(config.store.path)
    side = side_path(store_path, store.writer)
    stored_ids, quarantined_ids = _stored(store_path, manifest), _quarantined(side)
    done = stored_ids | quarantined_ids
    todo = [row.size for row in selection.rows if row.conversation.id not in done]
    plan = plan_of(config, target.facts, todo, len(stored_ids))
    logger.info("%s", plan)
    plan.check()
    report = ExtractionReport(num_stored_before=len(stored_ids), num_quarantined=len(quarantined_ids))
    with (
        Interrupts() as interrupts,
        FeatureWriter(
            store_path,
            manifest,
            store.shard_bytes,
            store.quota_bytes,
            writer=store.writer,
            device=coding_device(config),
        ) as writer,
        ExitStack() as stack,
    ):
        bytes_before = writer.num_bytes
        if todo:
            identity = identify(writer.side_path, config.tracking, "extract", resumes=True)
            digests = {"prompts": manifest.prompts_digest, "target": manifest.target_revision}
            write_provenance(
                side, identity, config, {"seeds": {"regenerate": config.regenerate.seed}, "digests": digests}
            )
            engine = stack.enter_context(running_engine(config, target))
            if engine.max_tokens < max_tokens:
                logger.warning("the engine takes %d tokens, fewer than the %d asked for", engine.max_tokens, max_tokens)
                max_tokens = engine.max_tokens
                selection = select_rows(config.prompts, target.renderer, config.regenerate, max_tokens=max_tokens)
                selection = selection.share(store.writer, store.num_writers)
            _compare_rendering(engine, selection, target.renderer)
        _write_rejected(writer.side_path, selection.rejected)
        report.num_bad_rows, report.num_too_long = len(selection.bad_rows), len(selection.too_long)
        if todo:
            pipeline = Pipeline(
                config, engine, target, writer, report=report, interrupts=interrupts, max_tokens=max_tokens
            )
            try:
                pipeline.run(selection.rows, quarantined_ids)
            except KeyboardInterrupt:
                writer.flush()
                log_path, num_answers = writer.side_path / ANSWERS_NAME, 0
                if log_path.exists():
                    with log_path.open("rb") as log:
                        num_answers = sum(1 for _ in log)  # line by line: it may be larger than the memory
                logger.info(
                    "stopped: %s and %s are in %s; the same command goes on from there",
                    counted(len(writer.stored_ids), "sample"),
                    counted(num_answers, "answer"),
                    store_path,
                )
                raise
        report.num_bytes = writer.num_bytes - bytes_before
    _log_report(report, store_path)
    if todo:
        _show(config, report, manifest)
    return report


def _compare_rendering(engine: Engine, selection: Selection, renderer: ChatRenderer) -> None:
    """Says whether a server renders prompts as they are rendered here.

    Captured are the ids that are sent, so the store is whole in any case; but another text will be served.
    """
    if isinstance(engine, SGLangEngine):
        rows = [row.conversation for row in selection.rows[:RENDERED_ROWS]]
        rendering = compare_with_server(engine.servers[0].url, rows, renderer)
        logger.log(logging.WARNING if rendering.differences else logging.INFO, "%s", rendering)


def check_settings(config: ExtractConfig) -> None:
    """Compares settings with what can be captured.

    Raises:
        UserError: names all that cannot.
    """
    regenerate, server = config.regenerate, config.server
    at_least_one = {
        "prompts.max_tokens": config.prompts.max_tokens,
        "regenerate.max_new_tokens": regenerate.max_new_tokens,
        "regenerate.batch_size": regenerate.batch_size,
        "store.shard_bytes": config.store.shard_bytes,
        "store.num_writers": config.store.num_writers,
        "batch_tokens": config.batch_tokens,
        "server.tensor_parallel_size": server.tensor_parallel_size,
        "server.max_requests": server.max_requests,
        "server.startup_timeout_seconds": server.startup_timeout_seconds,
        "server.request_timeout_seconds": server.request_timeout_seconds,
    }
    if server.staging_bytes is not None:
        at_least_one["server.staging_bytes"] = server.staging_bytes
    problems = [f"  {name} must be at least 1, got {value}" for name, value in at_least_one.items() if value < 1]
    if not 0 <= config.store.writer < max(1, config.store.num_writers):
        problems.append(
            f"  store.writer must be from 0 to below store.num_writers={config.store.num_writers}, "
            f"got {config.store.writer}"
        )
    if Path(config.store.path).exists() and not Path(config.store.path).is_dir():
        problems.append(f"  store.path must be a directory, got the file {config.store.path!r}")
    if not 0 <= regenerate.temperature < math.inf:
        problems.append(f"  regenerate.temperature must be 0 or more, got {regenerate.temperature}")
    if not 0 < regenerate.top_p <= 1:
        problems.append(f"  regenerate.top_p must be above 0 and at most 1, got {regenerate.top_p}")
    if not 0 <= config.max_quarantined_share <= 1:
        problems.append(f"  max_quarantined_share must be from 0 to 1, got {config.max_quarantined_share}")
    if problems:
        raise UserError("some settings cannot be captured with:\n" + "\n".join(problems) + "\nchange them")


def build_manifest(config: ExtractConfig, target: Target) -> Manifest:
    """Returns what the store of an extraction says of itself."""
    facts, target_path, regenerate = target.facts, Path(config.target.path), config.regenerate
    generation = {
        "max_new_tokens": regenerate.max_new_tokens,
        "temperature": regenerate.temperature,
        "top_p": regenerate.top_p,
        "seed": regenerate.seed,
        "cut_loops": regenerate.cut_loops,
        "max_tokens": config.prompts.max_tokens,
    }
    git = git_state()
    return Manifest(
        target_path=str(target_path.absolute()),
        target_config_digest=digest_target_config(target_path),
        target_revision=digest_target_weights(target_path),
        target_quantization=facts.quantization,
        engine=config.engine,
        engine_version=engine_version(config),
        capture_layers=tuple(facts.capture_layers),
        dtype=config.target.dtype,
        codec=store_codec(config),
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        tokenizer_digest=tokenizer_digest(target.tokenizer),
        chat_template_digest=target.renderer.template_digest(),
        prompts_digest=digest_sources(find_sources(str(config.prompts.path))),
        last_rows=config.store.last_rows,
        generation=generation if regenerate.enabled else {},
        git_commit=f"{git['commit']}{'+changes' if git['dirty'] else ''}" if git["commit"] else None,
    )


def store_codec(config: ExtractConfig) -> Codec:
    """Returns the codec of an extraction's store."""
    return codec_named(config.store.codec, DTYPES[config.target.dtype])


def coding_device(config: ExtractConfig) -> torch.device | None:
    """Returns where states are coded that come as they are: beside a target in this process.

    A server leaves no room on its GPU for others, and codes them itself if it is ours.
    """
    is_on_gpu = config.engine == "transformers" and config.target.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda") if is_on_gpu else None


def plan_of(config: ExtractConfig, facts: TargetFacts, todo: Sequence[SampleSize], num_stored: int) -> ExtractionPlan:
    """Returns what an extraction of samples of these sizes will spend."""
    return plan_extraction(
        todo,
        config.store,
        hidden_size=facts.hidden_size,
        num_aux=len(facts.capture_layers),
        codec=store_codec(config),
        is_bound=config.regenerate.enabled and bool(todo),
        num_stored=num_stored,
        stored_bytes=_shard_bytes(Path(config.store.path)),
    )


def _stored(store_path: Path, manifest: Manifest) -> set[str]:
    """Returns the ids in a store, which may not exist yet."""
    if not (store_path / MANIFEST_NAME).exists():
        return set()
    check_same_capture(read_manifest(store_path), manifest, store_path)
    return {entry.sample_id for entry in FeatureStore(store_path).entries}


def _shard_bytes(store_path: Path) -> int:
    return sum(path.stat().st_size for path in store_path.glob("shard-*.safetensors"))


def _quarantined(store_path: Path) -> set[str]:
    path = store_path / QUARANTINE_NAME
    found = set()
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            found.add(str(json.loads(line)["sample_id"]))
        except (ValueError, TypeError, KeyError):
            continue  # cut short by a kill: the sample is looked at again
    return found


def _write_rejected(store_path: Path, rows: Sequence[BadRow | TooLong]) -> None:
    lines = []
    for row in rows:
        told = {"line": row.line, "reason": row.reason, "kind": row.kind}
        lines.append(json.dumps(told | ({"file": row.file} if row.file else {})) + "\n")
    write_atomically(store_path / REJECTED_NAME, "".join(lines))


def _show(config: ExtractConfig, report: ExtractionReport, manifest: Manifest) -> None:
    """Shows what was captured, and the store that the trainings of the experiment read."""
    path = Path(config.store.path)
    counts = {name: value for name, value in dataclasses.asdict(report).items() if isinstance(value, int | float)}
    with open_board(side_path(path, config.store.writer), config.tracking) as board:
        board.summarise(counts | {"store_bytes": _shard_bytes(path)})
        store = FeatureStore(path)
        board.makes(feature_store(path, store.location.sizes(), digest_store(store), dataclasses.asdict(manifest)))


def _log_report(report: ExtractionReport, store_path: Path) -> None:
    logger.info(
        "stored %s (%s before), %s, %s of them supervised; %s has %s%s",
        counted(report.num_stored, "sample"),
        f"{report.num_stored_before:,}",
        counted(report.num_tokens, "token"),
        f"{report.num_supervised:,}",
        store_path,
        readable_bytes(_shard_bytes(store_path)),
        f"; {report.rates()}" if report.rates() else "",
    )
    logger.info("%s", report.answers())
    logger.info(
        "left out: %s and %d too long (%s), %s without usable features (%s)",
        counted(report.num_bad_rows, "bad row"),
        report.num_too_long,
        REJECTED_NAME,
        counted(report.num_quarantined, "sample"),
        QUARANTINE_NAME,
    )
