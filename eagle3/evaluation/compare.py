"""Runs that names mean, local and in W&B, side by side or derived again."""

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
from eagle3.words import counted


def compare_runs(names: Sequence[str], spread: float | None, out: Path | None, argv: Sequence[str]) -> None:
    """Prints runs side by side, and writes them as a page if a directory is given; `argv` is what the page names.

    Raises:
        UserError: a run cannot be read, or there are not two to compare.
    """
    console = Console()
    comparison = compare(line_up([run for name in names for run in read(name)]), spread)
    show(tables(comparison), sentences(comparison), console)
    if out is not None:
        for path in write_page(comparison, out, argv):
            console.print(f"Written: {path}", highlight=False, markup=False)


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


def verify_runs(names: Sequence[str]) -> int:
    """Prints each reported figure beside what is derived from raw counters; returns how many cannot be derived.

    Raises:
        UserError: a run cannot be read.
    """
    console = Console()
    num_failed = 0
    for each in {run.identity.id: run for name in names for run in read(name)}.values():
        console.print(f"{each.identity.name} ({each.identity.job_type}, {each.source})", highlight=False, markup=False)
        for check in verify(each):
            num_failed += not check.holds
            verdict = "ok  " if check.holds else "NOT "
            seen = "" if check.holds else f", derived {json.dumps(check.derived)}"
            line = f"  {verdict}{check.name}: reported {json.dumps(check.reported)}{seen}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(f"{counted(num_failed, 'figure')} cannot be derived again." if num_failed else "All figures hold.")
    return num_failed
