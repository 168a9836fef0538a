"""metrics.jsonl, provenance of a run.

metrics.jsonl always holds everything; a board (W&B and the like) gets the same numbers. Only the main rank tracks.
"""

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import torch
import xxhash

from eagle3.board import Board, Identity, Metrics
from eagle3.config import RunConfig, TrackingConfig, UserError, config_to_dict
from eagle3.files import take_lock, write_whole

METRICS_NAME = "metrics.jsonl"
PROVENANCE_NAME = "run.json"
LOCK_NAME = "lock"
PACKAGES = ("eagle3", "torch", "transformers", "accelerate", "deepspeed", "safetensors", "wandb")
REPOSITORY = Path(__file__).resolve().parent.parent


def new_run_dir(base: Path) -> Path:
    """Makes a directory for a run: `base`, or the first of base-2, base-3, ... whose name is free.

    Raises:
        UserError: `base` has no name that numbers could follow.
    """
    if base.name in ("", ".."):
        raise UserError(f"run.dir must end in a name for the run, got {str(base)!r}; use a path such as ckpts/run")
    base.parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
            continue
        return path


def run_dir_to_resume(config: RunConfig) -> Path | None:
    """Returns the run that `run.resume` means, or None for a new one.

    Raises:
        UserError: it names a directory that is no run.
    """
    if config.resume == "never":
        return None
    if config.resume != "auto":
        path = Path(config.resume)
        if not (path / PROVENANCE_NAME).is_file():
            raise UserError(
                f"run.resume must be never, auto or a run's directory, got {config.resume!r}, "
                f"which holds no {PROVENANCE_NAME}; correct the path"
            )
        return path
    base = Path(config.dir)
    pattern = re.compile(re.escape(base.name) + r"(-\d+)?")
    siblings = [path for path in base.parent.glob(f"{base.name}*") if pattern.fullmatch(path.name)]
    runs = [path for path in siblings if (path / PROVENANCE_NAME).is_file()]
    return max(runs, key=lambda path: _number(path, base), default=None)


def lock_run(run_dir: Path) -> TextIO:
    """Returns the open file whose lock keeps a run from other processes until it is closed.

    Raises:
        UserError: another process trains it.
    """
    return take_lock(
        run_dir / LOCK_NAME,
        lambda holder: UserError(
            f"a run must be trained by one command at a time, got a second one while process {holder} trains it "
            f"({run_dir}); wait for it, stop it with SIGTERM, or begin another one with run.resume=never"
        ),
    )


def identify(
    run_dir: Path, config: TrackingConfig, job_type: str, *, inputs: Sequence[Path] = (), resumes: bool = False
) -> Identity:
    """Returns who the run in `run_dir` is: of the experiment whose files it reads, and after a crash who it was.

    `inputs` are directories that it reads; those that hold a run.json are runs of ours.

    Raises:
        UserError: a run.json is none.
    """
    runs = [read_provenance(path)["sessions"][-1]["run"] for path in inputs if (path / PROVENANCE_NAME).is_file()]
    name = config.name or run_dir.absolute().name
    before = read_provenance(run_dir)["sessions"] if resumes else []
    # The agent of a W&B sweep chooses the id itself.
    new_id = os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8]
    run_id = before[-1]["run"]["id"] if before else new_id
    inherited = before[-1]["run"]["group"] if before else runs[0]["group"] if runs else f"{name}-{run_id}"
    return Identity(run_id, name, config.group or inherited, job_type, [run["id"] for run in runs])


def write_provenance(run_dir: Path, identity: Identity, config: Any, facts: Mapping[str, Any]) -> None:
    """Adds a session to run.json: `facts` of the run, with command line, config, commit, versions and hardware.

    Changes that are not committed are written beside it, as a patch of the commit.

    Raises:
        UserError: run.json is there already, and is none.
    """
    record = read_provenance(run_dir)
    git = git_state()
    if git["dirty"]:
        patch = _git("diff", "HEAD") or ""
        git["patch"] = f"code-{xxhash.xxh3_128_hexdigest(patch.encode())[:8]}.patch"
        git["untracked"] = (_git("ls-files", "--others", "--exclude-standard") or "").splitlines()  # not in the patch
        write_whole(run_dir / git["patch"], patch + "\n")
    session = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "run": dataclasses.asdict(identity),
        "argv": sys.argv,
        "git": git,
        "versions": {"python": platform.python_version()} | _versions(),
        "hardware": _hardware(),
        "config": config_to_dict(config),
        **facts,
    }
    record["sessions"].append(session)
    write_whole(run_dir / PROVENANCE_NAME, json.dumps(record, indent=1) + "\n")


def read_provenance(run_dir: Path) -> dict[str, Any]:
    """Returns what run.json holds; without the file, no sessions.

    Raises:
        UserError: it holds something else.
    """
    path = run_dir / PROVENANCE_NAME
    if not path.exists():
        return {"sessions": []}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(record["sessions"], list) and all(Identity(**each["run"]).id for each in record["sessions"]):
            return dict(record)
    except (ValueError, TypeError, KeyError):
        pass
    raise UserError(
        f"{PROVENANCE_NAME} must be JSON with a list of sessions, got something else ({path}); move it away"
    )


def git_state() -> dict[str, Any]:
    """Returns the commit of this code and whether files differ from it; nulls where the code is no git checkout."""
    commit = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain") if commit else None
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def digest_file(path: Path) -> str:
    """Returns the xxh3_128 of a file's bytes."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


class Tracker:
    """Where a run's numbers go; opened by the main rank alone."""

    def __init__(self, run_dir: Path, board: Board, *, step: int, is_validated: bool = True) -> None:
        """Opens metrics.jsonl for a run that goes on after `step`: later lines of a killed run go.

        Where the step is still to be validated, so does a validation that was not saved.
        """
        self.board = board
        self._path = run_dir / METRICS_NAME
        _keep_lines_until(self._path, step, is_validated)
        self._file = self._path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Metrics) -> None:
        """Writes one line, and a point of each curve."""
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        self.board.log(step, metrics)

    def lines(self) -> list[dict[str, Any]]:
        """Returns all lines so far, those before a resume included."""
        return [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]

    def __enter__(self) -> Self:
        self.board.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        self.board.__exit__(kind, error, at)


def open_board(run_dir: Path, config: TrackingConfig) -> Board:
    """Shows the run whose newest session run.json holds.

    Raises:
        UserError: the backend cannot start.
    """
    session = read_provenance(run_dir)["sessions"][-1]
    provenance = {name: value for name, value in session.items() if name != "config"}
    return Board(run_dir, config, Identity(**session["run"]), {**session["config"], "provenance": provenance})


def _keep_lines_until(path: Path, step: int, is_validated: bool) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue  # cut short by a kill
        comes_again = values["step"] == step and not is_validated and "held_out/tau" in values
        if values["step"] <= step and not comes_again:
            kept.append(line + "\n")
    write_whole(path, "".join(kept))


def _number(path: Path, base: Path) -> int:
    return int(path.name.removeprefix(base.name).removeprefix("-") or 1)


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None  # run from a checkout, or not needed here
    return versions


def _hardware() -> dict[str, Any]:
    return {
        "host": platform.node(),
        "machine": platform.machine(),
        "num_cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    env = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # the index is not written: somebody may be committing
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip("\n") if done.returncode == 0 else None
