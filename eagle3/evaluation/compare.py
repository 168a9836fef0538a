"""Runs side by side, local and W&B: the command `eagle3 compare`."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from eagle3.config import UserError
from eagle3.evaluation.comparison import compare
from eagle3.evaluation.page import write_page
from eagle3.evaluation.runs import Run, line_up, read_directory
from eagle3.evaluation.tables import TextTable, sentences, tables
from eagle3.evaluation.verify import verify
from eagle3.evaluation.wandb_runs import REMOTE, read_remote, read_wandb_files, wandb_files

HELP = "Runs side by side: settings, acceptance, cost, and whether a difference is more than luck."


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code, 1 where a figure cannot be derived again.

    Raises:
        UserError: a run cannot be read, or there are not two to compare.
    """
    arguments = _parse(argv)
    runs = [run for name in arguments.runs for run in read(name)]
    console = Console()
    if arguments.verify:
        return _verify(list({run.identity.id: run for run in runs}.values()), console)
    spread = arguments.seed_spread
    if spread is not None and not 0 <= spread < 1:
        raise UserError(f"--seed-spread must be from 0 to below 1, got {spread}; 0.01 is one percent of tau")
    comparison = compare(line_up(runs), spread)
    show(tables(comparison), sentences(comparison), console)
    if arguments.out is not None:
        for path in write_page(comparison, arguments.out, ["eagle3", "compare", *argv]):
            console.print(f"Written: {path}", highlight=False, markup=False)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="eagle3 compare", description=HELP)
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a run's directory (or one that holds a training and its evaluation), a wandb directory or .wandb file, "
        "entity/project/run, or entity/project?group=NAME; the first one is what the others are tested against",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="also writes comparison.html, .png and .json there")
    parser.add_argument("--verify", action="store_true", help="derives the reported figures again from raw counters")
    parser.add_argument(
        "--seed-spread", type=float, metavar="SHARE", help="standard deviation of tau by the training's seed, over tau"
    )
    return parser.parse_intermixed_args(argv)


def read(name: str) -> list[Run]:
    """Reads what a name on the command line means; a path that exists wins.

    Raises:
        UserError: it means nothing, or cannot be read.
    """
    path = Path(name)
    if path.exists():
        files = wandb_files(path)
        return read_wandb_files(files) if files else read_directory(path)
    if REMOTE.fullmatch(name):
        return read_remote(name)
    raise UserError(
        f"a run to compare must be a directory, a .wandb file, entity/project/run or entity/project?group=NAME, "
        f"got {name!r}; correct it"
    )


def show(found: Sequence[TextTable], answer: Sequence[str], console: Console) -> None:
    """Prints the tables, then the answer in words."""
    for text in found:
        table = Table(title=text.title, title_justify="left", box=box.MARKDOWN)  # can be pasted anywhere
        for index, heading in enumerate(text.headings):
            table.add_column(heading, justify="left" if index == 0 else "right", overflow="fold")
        for row in text.rows:
            table.add_row(*row)
        console.print(table)
    for sentence in answer:
        console.print(sentence, highlight=False, markup=False)


def _verify(runs: Sequence[Run], console: Console) -> int:
    num_failed = 0
    for each in runs:
        console.print(f"{each.identity.name} ({each.identity.job_type}, {each.source})", highlight=False, markup=False)
        for check in verify(each):
            num_failed += not check.holds
            verdict = "ok  " if check.holds else "NOT "
            seen = "" if check.holds else f", derived {json.dumps(check.derived)}"
            line = f"  {verdict}{check.name}: reported {json.dumps(check.reported)}{seen}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(f"{num_failed} figures cannot be derived again." if num_failed else "All figures hold.")
    return int(num_failed > 0)
