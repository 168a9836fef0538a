"""metrics.jsonl, W&B, provenance of a run.

metrics.jsonl always holds everything; W&B gets the same numbers. Only the main rank tracks.
"""

import importlib.metadata
import json
import logging
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import wandb

from eagle3.config import RunConfig, TrackingConfig, UserError
from eagle3.files import write_whole

logger = logging.getLogger(__name__)

METRICS_NAME = "metrics.jsonl"
PROVENANCE_NAME = "run.json"
PACKAGES = ("eagle3", "torch", "transformers", "accelerate", "deepspeed", "safetensors", "wandb")
REPOSITORY = Path(__file__).resolve().parent.parent

Metrics = Mapping[str, float | Sequence[float | None]]


def new_run_dir(base: Path) -> Path:
    """Makes a directory for a run: `base`, or the first of base-2, base-3, ... whose name is free."""
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


def write_provenance(run_dir: Path, facts: Mapping[str, Any]) -> None:
    """Adds a session to run.json: `facts` of the run, with command line, commit, versions and hardware.

    Raises:
        UserError: run.json is there already, and is none.
    """
    path = run_dir / PROVENANCE_NAME
    session = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "argv": sys.argv,
        "git": git_state(),
        "versions": {"python": platform.python_version()} | _versions(),
        "hardware": _hardware(),
        **facts,
    }
    record = _read_provenance(path)
    record["sessions"].append(session)
    write_whole(path, json.dumps(record, indent=1) + "\n")


def _read_provenance(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"sessions": []}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(record["sessions"], list):
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


class Tracker:
    """Where a run's numbers go; opened by the main rank alone."""

    def __init__(self, run_dir: Path, config: TrackingConfig, settings: Mapping[str, Any], *, step: int) -> None:
        """Opens metrics.jsonl and W&B, for a run that goes on after `step`: later lines of a killed run go.

        Raises:
            UserError: W&B cannot be reached in the mode asked for.
        """
        self._path = run_dir / METRICS_NAME
        _keep_lines_until(self._path, step)
        self._file = self._path.open("a", encoding="utf-8")
        self._run = _start_wandb(run_dir, config, settings)

    def log(self, step: int, metrics: Metrics) -> None:
        """Writes one line; a list becomes one W&B curve per draft position."""
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        if self._run is not None:
            self._run.log(_curves(metrics), step=step)

    def close(self) -> None:
        """Ends the run in W&B."""
        self._file.close()
        if self._run is not None:
            self._run.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _start_wandb(run_dir: Path, config: TrackingConfig, settings: Mapping[str, Any]) -> Any:
    if config.wandb == "disabled":
        return None
    id_path = run_dir / "wandb-id"  # a resumed run goes on as the same one
    try:
        run = wandb.init(
            project=config.project,
            name=config.name or run_dir.name,
            tags=config.tags,
            dir=run_dir,
            id=id_path.read_text() if id_path.exists() else None,
            resume="allow",
            mode=_wandb_mode(config),
            config=dict(settings),
            settings=wandb.Settings(silent=True, console="off"),  # its lines would break the progress line
        )
    except wandb.errors.Error as error:
        raise UserError(
            f"tracking.wandb must be a mode that W&B can start in, got {config.wandb!r}: {error}; "
            f"use tracking.wandb=offline and `wandb sync` later"
        ) from None
    id_path.write_text(run.id)
    logger.info("W&B: %s", f"offline in {Path(run.dir).parent}" if run.offline else run.url)
    return run


def _wandb_mode(config: TrackingConfig) -> Any:
    if config.wandb != "auto":
        return config.wandb
    if "WANDB_MODE" in os.environ:
        return None  # W&B reads it itself
    return "online" if wandb.login(prompt=False) else "offline"


def _curves(metrics: Metrics) -> dict[str, float]:
    curves: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, int | float):
            curves[name] = value
        else:
            curves |= {f"{name}/{index}": part for index, part in enumerate(value) if part is not None}
    return curves


def _keep_lines_until(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue  # cut short by a kill
        if values["step"] <= step:
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
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
