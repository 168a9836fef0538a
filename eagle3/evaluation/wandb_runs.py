"""Runs in W&B: from the files that its client writes offline, through W&B's own reader, or from its API."""

import json
import logging
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from eagle3.config import UserError
from eagle3.draft.questions import COLUMNS, Question, add_row
from eagle3.evaluation.runs import Run, make_run
from eagle3.words import counted

logger = logging.getLogger(__name__)

FILTERS = {"group": "group", "job_type": "jobType", "tag": "tags", "name": "display_name", "state": "state"}
REMOTE = re.compile(r"(?P<project>[^/?]+/[^/?]+)(/(?P<run>[^/?]+)|\?(?P<filter>.+))")


def wandb_files(path: Path) -> list[Path]:
    """Returns the .wandb files that a path means: itself, those of a run's directory, or of a directory of runs."""
    if path.suffix == ".wandb":
        return [path]
    return sorted(path.glob("*.wandb")) or sorted(path.glob("*run-*/*.wandb"), key=lambda file: file.parent.name)


def read_wandb_files(files: Sequence[Path]) -> list[Run]:
    """Reads offline runs; the files of one run that was resumed become one.

    Raises:
        UserError: W&B cannot read a file, or it holds no run of ours.
    """
    by_id: dict[str, list[_Session]] = {}
    for file in files:
        session = _read_session(file)
        if session is None:
            logger.warning("%s is left out: its process was killed before W&B had written what run it is", file)
            continue
        if session.config.get("provenance", {}).get("run", {}).get("job_type") != "extract":
            by_id.setdefault(session.id, []).append(session)
    if not by_id:
        names = ", ".join(map(str, files))
        raise UserError(f"W&B's files must hold a training or an evaluation, got none in {names}; name another run")
    return [_join(sessions) for sessions in by_id.values()]


def read_remote(name: str, api: Any = None) -> list[Run]:
    """Reads `entity/project/run`, or all runs of `entity/project?group=NAME&job_type=train`; `api` is a wandb.Api.

    Raises:
        UserError: W&B refuses, there is no such run, or it is none of ours.
    """
    match = REMOTE.fullmatch(name)
    assert match is not None, name
    try:
        api = wandb.Api() if api is None else api
        if match["run"] is not None:
            found = [api.run(f"{match['project']}/{match['run']}")]
        else:
            found = list(api.runs(match["project"], filters=_filters(match["filter"]), order="+created_at"))
        runs = [_remote_run(run) for run in found if run.job_type != "extract"]
    except (wandb.errors.Error, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"a run in W&B must be one that this login can read, got {name!r} and from W&B: {error}; "
            f"see `wandb login`, or name a directory"
        ) from None
    if not runs:
        raise UserError(
            f"a filter must leave a training or an evaluation, got none of {counted(len(found), 'run')} ({name})"
        )
    return runs


class _Session:
    """What one .wandb file holds."""

    def __init__(self, file: Path, summary: Mapping[str, Any], records: Iterable[Mapping[str, Any]]) -> None:
        self.file = file
        self.id = str(summary["run_id"])
        self.config: dict[str, Any] = summary["config"]
        self.lines = [
            {"step": record["history"]["step"]["num"], **_numbers(record["history"]["item"])}
            for record in records
            if record["type"] == "history"
        ]
        table = summary["summary"].get("questions")
        self.table = file.parent / "files" / table["path"] if isinstance(table, Mapping) else None


def _read_session(file: Path) -> _Session | None:
    summary = json.loads(_inspect(file, "--summary", "--json"))
    if not summary["run_id"]:
        return None
    return _Session(file, summary, [json.loads(line) for line in _inspect(file, "--json").splitlines()])


def _inspect(file: Path, *options: str) -> str:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", *options, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not done.stdout:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise UserError(f"a .wandb file must be one that `wandb leet inspect` reads, got {last!r} from it ({file})")
    return done.stdout


def _join(sessions: list[_Session]) -> Run:
    """Makes one run of its sessions in order; a step that was taken again is as it was the last time."""
    newest = sessions[-1]
    by_step = {line["step"]: line for session in sessions for line in session.lines}
    tables = [session.table for session in sessions if session.table is not None]
    try:
        table = json.loads(tables[-1].read_bytes()) if tables else None
    except (ValueError, FileNotFoundError):
        raise UserError(
            f"the table of questions must be JSON beside its .wandb file, got none or another thing ({tables[-1]}); "
            f"copy the run's whole directory, or name the one that train.py or evaluate.py wrote"
        ) from None
    return _make_run(str(newest.file), newest.config, list(by_step.values()), table)


def _remote_run(run: Any) -> Run:
    lines = [{"step": row["_step"], **_numbers(row)} for row in run.scan_history()]
    reference = dict(run.summary).get("questions")
    table = None
    if isinstance(reference, Mapping):
        with (
            tempfile.TemporaryDirectory() as directory,
            run.file(reference["path"]).download(root=directory, replace=True) as file,
        ):
            table = json.load(file)
    return _make_run(f"{'/'.join(run.path)}", run.config, lines, table)


def _make_run(source: str, config: Mapping[str, Any], lines: list[dict[str, float]], table: Any) -> Run:
    provenance = config.get("provenance")
    if not isinstance(provenance, Mapping) or "run" not in provenance:
        raise UserError(f"a run in W&B must have been written by this package, got one without provenance ({source})")
    settings = {name: value for name, value in config.items() if name not in ("provenance", "_wandb")}
    return make_run(
        source, provenance, settings, sorted(lines, key=lambda line: line["step"]), _questions(table, source)
    )


def _questions(table: Any, source: str) -> dict[str, list[Question]]:
    found: dict[str, list[Question]] = {}
    if table is not None:
        for row in table["data"]:
            by_name = dict(zip(table["columns"], row, strict=True))
            add_row(found, [by_name.get(column) for column in COLUMNS], f"{source}, table questions")
    return found


def _numbers(item: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in item.items()
        if isinstance(value, int | float) and not name.startswith("_") and not isinstance(value, bool)
    }


def _filters(text: str) -> dict[str, str]:
    filters = {}
    for part in text.split("&"):
        name, equals, value = part.partition("=")
        if not equals or name not in FILTERS:
            raise UserError(
                f"a filter of runs must be NAME=VALUE with & between, NAME one of {', '.join(FILTERS)}, got {part!r}; "
                f"correct it"
            )
        filters[FILTERS[name]] = value
    return filters
