"""What an extraction would cost, and nothing is run: the command `eagle3 plan`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from eagle3.capture.extraction import check_settings, plan_of
from eagle3.capture.parity import read_target
from eagle3.capture.selection import select_rows
from eagle3.cli import command_parser, parse_arguments
from eagle3.config import ExtractConfig, UserError
from eagle3.config_file import find_config, load_config
from eagle3.features.manifest import MANIFEST_NAME
from eagle3.features.store import FeatureStore
from eagle3.plan import ExtractionPlan
from eagle3.prompts.rendering import make_renderer
from eagle3.prompts.tokenizers import load_tokenizer


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0.

    Raises:
        UserError: as the extraction would, before it runs the target: what cannot fit, too.
    """
    parser = command_parser("Says what extract.py would cost with the same arguments.", "default.yaml")
    parser.add_argument("--prompts", help="as of extract.py (default: prompts.path of the config)")
    arguments = parse_arguments(parser, argv)
    config = load_config(ExtractConfig, find_config(arguments.config, "extract"), arguments.overrides)
    if arguments.prompts is not None:
        config = replace(config, prompts=replace(config.prompts, path=arguments.prompts))
    plan = read_plan(config)
    print(plan)
    plan.check()
    return 0


def read_plan(config: ExtractConfig) -> ExtractionPlan:
    """Reads prompts and store, and adds up what is missing.

    Raises:
        UserError: settings, prompts, target or store cannot be read.
    """
    check_settings(config)
    if config.prompts.path is None:
        raise UserError("prompts.path must be a file, got none; name one with --prompts")
    renderer = make_renderer(load_tokenizer(config.target.path, config.target.trust_remote_code), config.prompts)
    facts = read_target(config.target)
    max_tokens = min(config.prompts.max_tokens, facts.max_tokens)
    selection = select_rows(config.prompts, renderer, config.regenerate, max_tokens=max_tokens)
    stored = set()
    if (Path(config.store.path) / MANIFEST_NAME).exists():
        stored = {entry.sample_id for entry in FeatureStore(config.store.path).entries}
    rows = selection.share(config.store.writer, config.store.num_writers).rows
    todo = [row.size for row in rows if row.conversation.id not in stored]
    return plan_of(config, facts, todo, len(stored))
