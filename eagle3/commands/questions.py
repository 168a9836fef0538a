"""`eagle3 questions`: benchmarks as people install them, as a file that evaluate.py asks."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from eagle3.cli import file_to_write
from eagle3.config import UserError
from eagle3.evaluation.question_sets import SETS, installed_file
from eagle3.files import write_whole
from eagle3.loading import loading
from eagle3.words import counted


def main(argv: Sequence[str]) -> int:
    """Writes the questions of one set, or of several one after another.

    Raises:
        UserError: a set has no file here, or the file is another one's.
    """
    parser = argparse.ArgumentParser(prog="python -m eagle3 questions", description=__doc__)
    parser.add_argument("set", nargs="+", choices=sorted(SETS), help="which benchmarks")
    parser.add_argument("--from", dest="source", type=Path, help="the one set's file or folder: JSONL, JSON or Parquet")
    parser.add_argument("--first", type=int, help="only so many of each")
    parser.add_argument("--out", type=file_to_write, required=True, help="a JSONL file, for prompts.path")
    arguments = parser.parse_args(argv)
    if arguments.source is not None and len(arguments.set) > 1:
        raise UserError(f"--from must go with one set, got {', '.join(arguments.set)}; write them one by one")
    if arguments.first is not None and arguments.first < 1:
        raise UserError(f"--first must be at least 1, got {arguments.first}; leave it away for all questions")
    if arguments.source is not None and not arguments.source.exists():
        raise UserError(f"--from must be a file or a folder, got nothing at {str(arguments.source)!r}; check the path")
    paths = {name: arguments.source or installed_file(name) for name in arguments.set}
    with loading():
        from eagle3.evaluation.question_files import read_questions
    rows = []
    for name, path in paths.items():
        some = list(read_questions(name, path))[: arguments.first]
        print(f"{name}: {counted(len(some), 'question')}")
        rows += some
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(arguments.out, "".join(json.dumps(row) + "\n" for row in rows))
    return 0
