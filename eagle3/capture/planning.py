"""What an extraction would cost, found without running the target."""

from pathlib import Path

from eagle3.capture.extraction import check_settings, plan_of
from eagle3.capture.selection import select_rows
from eagle3.capture.target import open_target
from eagle3.config import ExtractConfig, UserError
from eagle3.features.manifest import MANIFEST_NAME
from eagle3.features.store import FeatureStore
from eagle3.plan import ExtractionPlan


def read_plan(config: ExtractConfig) -> ExtractionPlan:
    """Reads prompts and store, and adds up what is missing.

    Raises:
        UserError: as the extraction would, before it runs the target.
    """
    check_settings(config)
    if config.prompts.path is None:
        raise UserError("prompts.path must be a file, got none; name one with --prompts")
    target = open_target(config)
    max_tokens = min(config.prompts.max_tokens, target.facts.max_tokens)
    selection = select_rows(config.prompts, target.renderer, config.regenerate, max_tokens=max_tokens)
    stored = set()
    if (Path(config.store.path) / MANIFEST_NAME).exists():
        stored = {entry.sample_id for entry in FeatureStore(config.store.path).entries}
    rows = selection.share(config.store.writer, config.store.num_writers).rows
    todo = [row.size for row in rows if row.conversation.id not in stored]
    return plan_of(config, target.facts, todo, len(stored))
