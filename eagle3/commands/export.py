"""`eagle3 export`: the drafter of any checkpoint, as SGLang and vLLM load it."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from eagle3.cli import directory_to_write
from eagle3.loading import loading


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0.

    Raises:
        UserError: the checkpoint is damaged or of no run of ours, or the target is another.
    """
    parser = argparse.ArgumentParser(prog="python -m eagle3 export", description="Exports the drafter of a checkpoint.")
    parser.add_argument("checkpoint", type=Path, help="RUN/step-NNNNNN")
    parser.add_argument(
        "--out", type=directory_to_write, required=True, help="a directory; an earlier export there is replaced"
    )
    parser.add_argument("--target", type=Path, help="the target's directory (default: that of the training)")
    arguments = parser.parse_args(argv)
    with loading():
        from eagle3.training.exporting import export_checkpoint
    export_checkpoint(arguments.checkpoint, arguments.out, arguments.target)
    return 0
