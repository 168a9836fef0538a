"""What is compared: runs with their settings, curves and questions, read from directories or from W&B.

Either way a run is what its provenance, its metric lines and its questions say; nothing is taken from a file name.
"""

import dataclasses
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.board import Identity, curves
from eagle3.config import UserError
from eagle3.draft.questions import QUESTIONS_NAME, Question, read_questions
from eagle3.tracking import METRICS_NAME, PROVENANCE_NAME, read_provenance
from eagle3.words import counted

RESULT_NAME = "result.json"
# What each kind of run says of itself beside its config.
SAID: dict[str, type] = {"git": dict, "versions": dict, "hardware": dict}
NEEDED: dict[str, dict[str, type]] = {
    "extract": SAID,
    "train": SAID | {"store": dict, "device": str, "num_draft_tokens": int, "num_parameters": int},
    "evaluate": SAID,
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """One training or one evaluation."""

    source: str  # as the user named it, or where it was found
    identity: Identity
    provenance: dict[str, Any]  # the newest session of run.json, without its config
    config: dict[str, Any]
    lines: list[dict[str, float]]  # one per logged step, with a "step"; of an evaluation one, its headlines
    questions: dict[str, list[Question]]  # by measure

    @property
    def num_draft_tokens(self) -> int | None:
        """K of its questions; None where the run did not get so far."""
        if self.identity.job_type == "train":
            return int(self.provenance["num_draft_tokens"])
        return int(self.lines[-1]["num_draft_tokens"]) if self.lines and "num_draft_tokens" in self.lines[-1] else None

    def curve(self, name: str) -> dict[int, float]:
        """Returns a metric by step."""
        return {int(line["step"]): line[name] for line in self.lines if name in line}

    def total(self, name: str) -> float | None:
        """Returns the sum of a metric that each line has its share of; None where no line has one."""
        shares = [line[name] for line in self.lines if name in line]
        return sum(shares) if shares else None


@dataclass(frozen=True)
class Contender:
    """A column of the comparison: a training, the evaluation of its drafter, or both."""

    name: str
    training: Run | None
    evaluation: Run | None

    def runs(self) -> list[Run]:
        """Returns what there is of both."""
        return [run for run in (self.training, self.evaluation) if run is not None]

    def questions(self, measure: str) -> list[Question]:
        """Returns the counters of a measure; none if it was not taken."""
        return next((run.questions[measure] for run in self.runs() if measure in run.questions), [])

    def num_draft_tokens(self, measure: str) -> int | None:
        """K of a measure."""
        return next((run.num_draft_tokens for run in self.runs() if measure in run.questions), None)


def read_directory(directory: Path) -> list[Run]:
    """Reads the run in a directory, or those in its sub-directories; an evaluation comes with the training it names.

    Raises:
        UserError: there is none, or one of its files is damaged.
    """
    if (directory / PROVENANCE_NAME).is_file():
        run = read_run(directory)
        if run.identity.job_type == "extract":
            raise UserError(
                f"a run to compare must be a training or an evaluation, got an extraction ({directory}); "
                f"name another run"
            )
        drafter = run.config.get("drafter")
        trained_in = Path(drafter).parent if drafter is not None else None
        if run.identity.job_type == "evaluate" and trained_in is not None and _is_of(trained_in, run.identity.inputs):
            return [run, read_run(trained_in)]
        return [run]
    runs = [read_run(path.parent) for path in sorted(directory.glob(f"*/{PROVENANCE_NAME}"))]
    runs = [run for run in runs if run.identity.job_type != "extract"]
    if not runs:
        raise UserError(
            f"a run to compare must be a directory with a {PROVENANCE_NAME}, got none in it or below ({directory}); "
            f"name what train.py or evaluate.py wrote, a wandb directory, or entity/project/run"
        )
    return runs


def read_run(directory: Path) -> Run:
    """Reads one run's directory.

    Raises:
        UserError: a file of it is damaged.
    """
    sessions = read_provenance(directory)["sessions"]
    if not sessions:
        raise UserError(f"{PROVENANCE_NAME} must hold a session, got none ({directory}); name another run")
    questions = directory / QUESTIONS_NAME
    metrics, result = directory / METRICS_NAME, directory / RESULT_NAME
    lines: list[dict[str, float]] = []
    if metrics.is_file():
        lines = _metric_lines(metrics)
    elif result.is_file():
        lines = [_headlines(result)]
    return make_run(
        str(directory),
        sessions[-1],
        sessions[-1].get("config"),
        lines,
        read_questions(questions) if questions.is_file() else {},
    )


def _metric_lines(path: Path) -> list[dict[str, float]]:
    *whole, rest = path.read_bytes().split(b"\n")
    if rest:
        logger.warning("the last line of %s is left out: its process was killed before it was whole", path)
    found, num_left_out = [], 0
    for number, line in enumerate(whole, start=1):
        try:
            values = {name: float(value) for name, value in curves(json.loads(line)).items()}
            values["step"] = int(values["step"])
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError):
            raise UserError(
                f"every line of {METRICS_NAME} must be a JSON object with a step and numbers, got {line[:60]!r} "
                f"({path}, line {number}); restore the file, or name another run"
            ) from None
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        num_left_out += len(values) - len(finite)
        found.append(finite)
    if num_left_out:
        logger.warning("%s of %s left out: no finite number", counted(num_left_out, "value"), path)
    return found


def _headlines(path: Path) -> dict[str, float]:
    try:
        values = json.loads(path.read_bytes())
        return {"step": 0, **{name: float(value) for name, value in values.items() if _is_finite(value)}}
    except (ValueError, AttributeError, OverflowError):
        raise UserError(
            f"{RESULT_NAME} must be the JSON object that an evaluation wrote, got something else ({path}); "
            f"evaluate again, or restore the file"
        ) from None


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def make_run(
    source: str,
    provenance: Mapping[str, Any],
    config: Mapping[str, Any] | None,
    lines: Sequence[dict[str, float]],
    questions: dict[str, list[Question]],
) -> Run:
    """Returns a run, wherever its parts were read.

    Raises:
        UserError: it does not say of itself what a comparison needs.
    """
    identity = Identity(**provenance["run"])
    named = [identity.id, identity.name, identity.group, identity.job_type]
    if not isinstance(identity.inputs, list) or not all(isinstance(each, str) for each in [*named, *identity.inputs]):
        raise UserError(f"a run's identity must be text, got {provenance['run']} ({source}); name another run")
    if identity.job_type not in NEEDED:
        raise UserError(
            f"a run's job type must be one of {', '.join(NEEDED)}, got {identity.job_type!r} ({source}); "
            f"name another run"
        )
    missing = [name for name, kind in NEEDED[identity.job_type].items() if not isinstance(provenance.get(name), kind)]
    if missing or not isinstance(config, Mapping):
        names = ", ".join(missing if isinstance(config, Mapping) else ["config", *missing])
        raise UserError(
            f"a run to compare must say its {', '.join(NEEDED[identity.job_type])} and config, got none or another "
            f"kind of {names} ({source}); name a run that this version wrote"
        )
    if wrong := _other_kinds(identity.job_type, provenance, config):
        raise UserError(
            f"a run to compare must say what it read and made in the form that this version writes, got "
            f"{', '.join(wrong)} ({source}); restore its files, or name another run"
        )
    rest = {name: value for name, value in provenance.items() if name not in ("config", "run")}
    return Run(source, identity, rest, dict(config), list(lines), questions)


def _other_kinds(job_type: str, provenance: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Returns the values that are not of the kind that a comparison reads, by name; what is not said is unknown."""
    prompts, store = config.get("prompts"), provenance.get("store") or {}
    path = prompts.get("path") if isinstance(prompts, Mapping) else None
    checked: dict[str, tuple[Any, bool]] = {
        "digests": (provenance.get("digests"), isinstance(provenance.get("digests", {}), Mapping)),
        "config.drafter": (config.get("drafter"), isinstance(config.get("drafter"), str | None)),
        "config.prompts": (prompts, isinstance(prompts, Mapping | None)),
        "config.prompts.path": (path, isinstance(path, str | None)),
    }
    if job_type == "evaluate":
        seed = config.get("seed")
        checked["config.seed"] = (seed, type(seed) is int and 0 <= seed < 2**63)
    if job_type == "train":
        for name in ("num_tokens", "num_bytes"):
            is_right = store.get(name) is None or (type(store[name]) is int and 0 <= store[name] < 2**63)
            checked[f"store.{name}"] = (store.get(name), is_right)
        for name in ("num_draft_tokens", "num_parameters"):
            checked[name] = (provenance[name], 0 <= provenance[name] < 2**63)
    return [f"{name}={str(value)[:40]}" for name, (value, is_right) in checked.items() if not is_right]


def line_up(runs: Iterable[Run]) -> list[Contender]:
    """Makes one column of a training and the evaluation of its drafter, in the order in which they were named.

    A run that was named twice is one column; of two evaluations of one training each is a column.
    """
    runs = list({run.identity.id: run for run in runs}.values())
    trainings = {run.identity.id: run for run in runs if run.identity.job_type == "train"}
    contenders: list[Contender] = []
    joined: set[str] = set()
    for run in runs:
        if run.identity.job_type == "evaluate":
            trained_by = next((trainings[each] for each in run.identity.inputs if each in trainings), None)
            contenders.append(Contender(run.identity.name, trained_by, run))
            joined |= {trained_by.identity.id} if trained_by is not None else set()
    alone = [run for run in trainings.values() if run.identity.id not in joined]
    contenders += [Contender(run.identity.name, run, None) for run in alone]
    order = [run.identity.id for run in runs]
    contenders.sort(key=lambda contender: min(order.index(run.identity.id) for run in contender.runs()))
    return _named(contenders)


def _named(contenders: list[Contender]) -> list[Contender]:
    """Names columns after their training, which says more than that of an evaluation; of one name, with their ids."""
    names = [contender.runs()[0].identity.name for contender in contenders]
    return [
        dataclasses.replace(each, name=f"{name} {each.runs()[-1].identity.id}" if names.count(name) > 1 else name)
        for name, each in zip(names, contenders, strict=True)
    ]


def _is_of(directory: Path, ids: Sequence[str]) -> bool:
    """Tells whether a directory still holds one of these runs, and not a later one."""
    sessions = read_provenance(directory)["sessions"]
    return bool(sessions) and sessions[-1]["run"]["id"] in ids
