"""`eagle3 compare`: runs side by side, local and W&B."""

import argparse
from collections.abc import Sequence

from eagle3.cli import directory_to_write
from eagle3.config import UserError
from eagle3.loading import loading

HELP = "Runs side by side: settings, acceptance, cost, and whether a difference is more than luck."


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code, 1 where a figure cannot be derived again.

    Raises:
        UserError: a run cannot be read, or there are not two to compare.
    """
    arguments = _parse(argv)
    spread = arguments.seed_spread
    if spread is not None and not 0 <= spread < 1:
        raise UserError(f"--seed-spread must be from 0 to below 1, got {spread}; 0.01 is one percent of tau")
    with loading():
        from eagle3.evaluation.compare import compare_runs, verify_runs
    if arguments.verify:
        return int(verify_runs(arguments.runs) > 0)
    compare_runs(arguments.runs, spread, arguments.out, ["eagle3", "compare", *argv])
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eagle3 compare", description=HELP)
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a run's directory (or one that holds a training and its evaluation), a wandb directory or .wandb file, "
        "entity/project/run, or entity/project?group=NAME; the first one is what the others are tested against",
    )
    parser.add_argument(
        "--out", type=directory_to_write, metavar="DIR", help="also writes comparison.html, .png and .json there"
    )
    parser.add_argument("--verify", action="store_true", help="derives the reported figures again from raw counters")
    parser.add_argument(
        "--seed-spread", type=float, metavar="SHARE", help="standard deviation of tau by the training's seed, over tau"
    )
    return parser.parse_intermixed_args(argv)
