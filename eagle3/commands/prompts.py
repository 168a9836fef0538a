"""`eagle3 prompts`: what prompts hold, what of them is dropped and why, and what is supervised."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from eagle3.cli import check_given_once, file_to_write
from eagle3.config import InspectConfig
from eagle3.config_file import load_config
from eagle3.loading import loading


def main(argv: Sequence[str]) -> int:
    """Prints the report; returns 0 if every row can be used and 1 otherwise.

    Raises:
        UserError: there are no rows, or a setting, the target or the server does not allow the report.
    """
    parser = argparse.ArgumentParser(prog="python -m eagle3 prompts", description=__doc__)
    parser.add_argument("prompts", help="a file, a glob, a folder, or hf:OWNER/NAME[:CONFIG][@SPLIT]")
    parser.add_argument(
        "--target", help="the target's directory; without it nothing is rendered, and lengths are in characters"
    )
    parser.add_argument("--server", metavar="URL", help="an SGLang server of the target: does it render the same?")
    parser.add_argument("--show", type=int, default=3, metavar="N", help="rows that are shown (default: 3)")
    parser.add_argument(
        "--rejected", type=file_to_write, help="where dropped rows go (default: ckpts/NAME.rejected.jsonl)"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="settings of extract and train")
    arguments = parser.parse_intermixed_args(argv)
    config = load_config(InspectConfig, None, arguments.overrides)
    check_given_once(arguments.overrides, "prompts.path", "a file before it")
    config = replace(config, prompts=replace(config.prompts, path=arguments.prompts))
    if arguments.target is not None:
        check_given_once(arguments.overrides, "target.path", "--target")
        config = replace(config, target=replace(config.target, path=arguments.target))
    name = re.sub(r"[^\w.@-]+", "_", Path(arguments.prompts).name) or "prompts"
    rejected = arguments.rejected or Path("ckpts") / f"{name}.rejected.jsonl"
    with loading():
        from eagle3.evaluation.prompt_report import report
    findings = report(config, arguments.server, arguments.show, rejected)
    return 0 if not findings.dropped else 1
