"""`eagle3 sweep`: a grid of trainings, from the file that W&B's sweeps read, without W&B."""

import argparse
import itertools
import logging
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eagle3.config import UserError
from eagle3.words import counted

logger = logging.getLogger(__name__)

HELP = "Runs every point of a grid, one after the other; a point that is done or half done goes on where it was."


@dataclass(frozen=True)
class Point:
    """One training of the grid."""

    settings: dict[str, Any]  # dotted name -> value
    command: list[str]


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 1 if a training failed, after the others have run.

    Raises:
        UserError: the file is no grid.
    """
    parser = argparse.ArgumentParser(prog="python -m eagle3 sweep", description=HELP)
    parser.add_argument("file", type=Path, help="a W&B sweep's YAML, with method grid, as configs/sweep/demo.yaml")
    parser.add_argument("--dry-run", action="store_true", help="print the commands alone")
    arguments = parser.parse_args(argv)
    points = read_grid(arguments.file)
    failed = []
    for number, point in enumerate(points, start=1):
        print(shlex.join(point.command), flush=True)
        if arguments.dry_run:
            continue
        logger.info("training %d of %d", number, len(points))
        if subprocess.run(point.command, check=False).returncode != 0:
            failed.append(number)
    if failed:
        logger.error("%d of %s failed: %s", len(failed), counted(len(points), "training"), ", ".join(map(str, failed)))
    return int(bool(failed))


def read_grid(path: Path) -> list[Point]:
    """Returns the points of a sweep's file in W&B's order; each has a directory of its own under its run.dir.

    Raises:
        UserError: names all that is not as a grid needs it.
    """
    sweep = _read(path)
    parameters, command = sweep.get("parameters"), sweep.get("command")
    problems = []
    if sweep.get("method") != "grid":
        problems.append(f"  method must be 'grid', got {sweep.get('method')!r}: other methods need W&B to choose")
    if not isinstance(command, list) or "${args_no_hyphens}" not in command:
        problems.append(f"  command must be a list with ${{args_no_hyphens}}, got {command!r}")
    choices: dict[str, list[Any]] = {}
    for name, choice in parameters.items() if isinstance(parameters, dict) else ():
        if isinstance(choice, dict) and isinstance(choice.get("values"), list) and choice["values"]:
            choices[name] = choice["values"]
        elif isinstance(choice, dict) and "value" in choice:
            choices[name] = [choice["value"]]
        else:
            problems.append(f"  parameters.{name} must have a value or a list of values, got {choice!r}")
    if isinstance(command, list) and "${program}" in command and not isinstance(sweep.get("program"), str):
        problems.append(f"  program must be a file's name, as command has ${{program}}, got {sweep.get('program')!r}")
    if len(choices.get("run.dir", [])) != 1 or not isinstance(choices["run.dir"][0], str):
        problems.append("  parameters.run.dir must have one value, the name of the directory that the runs go to")
    if problems:
        raise UserError("\n".join([f"a sweep's file must be a grid of trainings ({path}):", *problems, "correct it"]))
    varied = [name for name, values in choices.items() if len(values) > 1]
    points = []
    for values in itertools.product(*choices.values()):
        settings = dict(zip(choices, values, strict=True))
        name = ",".join(f"{key}={settings[key]}" for key in varied)
        settings |= {"run.dir": f"{settings['run.dir']}/{name or 'run'}", "run.resume": "auto"}
        points.append(Point(settings, _command(sweep, settings)))
    return points


def _read(path: Path) -> dict[str, Any]:
    try:
        sweep = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise UserError(f"a sweep must be a YAML file, got no file at {str(path)!r}; see configs/sweep/") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"a sweep's file must be YAML in UTF-8, got {path}: {error}") from error
    if not isinstance(sweep, dict):
        raise UserError(f"a sweep's file must be a mapping, got {type(sweep).__name__} ({path}); see configs/sweep/")
    return sweep


def _command(sweep: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Puts the settings where W&B would put them."""
    filled: list[str] = []
    for part in sweep["command"]:
        if part == "${args_no_hyphens}":
            filled += [f"{name}={value}" for name, value in settings.items()]
        elif part == "${program}":
            filled.append(str(sweep["program"]))
        elif part == "${interpreter}":
            filled.append(sys.executable)
        elif part == "${env}":
            filled.append("/usr/bin/env")
        else:
            filled.append(str(part))
    return filled
