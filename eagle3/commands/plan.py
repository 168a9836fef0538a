"""`eagle3 plan`: what an extraction would cost, and nothing is run."""

from collections.abc import Sequence
from dataclasses import replace

from eagle3.cli import command_parser, parse_arguments
from eagle3.config import ExtractConfig
from eagle3.config_file import find_config, load_config
from eagle3.loading import loading


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
    with loading():
        from eagle3.capture.planning import read_plan
    plan = read_plan(config)
    print(plan)
    plan.check()
    return 0
