"""`eagle3 simulate`: the acceptance of several drafters, each served in several ways, in one pass."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from eagle3.cli import file_to_write
from eagle3.config import UserError
from eagle3.loading import loading


def main(argv: Sequence[str]) -> int:
    """Simulates, prints the table, writes the figures if asked to.

    Raises:
        UserError: store, target and drafters do not fit each other, or an argument is none.
    """
    parser = argparse.ArgumentParser(prog="python -m eagle3 simulate", description=__doc__)
    parser.add_argument("store", type=Path, help="a feature store of the target, or the answers.jsonl of an evaluation")
    parser.add_argument("--target", type=Path, required=True, help="the target's directory")
    parser.add_argument("--drafter", type=Path, action="append", required=True, help="may be given several times")
    parser.add_argument(
        "--speculation",
        action="append",
        metavar="K|K@T|K/TOPK/TOKENS",
        help="a chain of K, one with rejection sampling at temperature T, or a tree; several times (default: 3)",
    )
    parser.add_argument("--held-out-share", type=float, help="as in training: only samples that it left out")
    parser.add_argument("--prompts", type=Path, help="the prompts file: its rows' domains get lines of their own")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: bfloat16")
    parser.add_argument("--seed", type=int, default=0, help="of the intervals (default: 0)")
    parser.add_argument("--out", type=file_to_write, help="a JSON file for the figures")
    arguments = parser.parse_args(argv)
    is_answers = arguments.store.is_file()
    if is_answers and (arguments.held_out_share is not None or arguments.prompts is not None):
        raise UserError("--held-out-share and --prompts must be left out with a file of answers, which names its sets")
    share = arguments.held_out_share
    if share is not None and not 0 < share <= 1:
        raise UserError(f"--held-out-share must be above 0 and at most 1, got {share}; leave it away for all samples")
    with loading():
        from eagle3.evaluation.simulation import report_on_answers, report_on_store
    report = report_on_answers if is_answers else report_on_store
    report(arguments)
    return 0
