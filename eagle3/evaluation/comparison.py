"""Runs side by side: what differs in them, what came of it, at which cost, and whether that is more than luck.

All taus are derived again from the counters of each question, in the same way for every run.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3.config import UserError, by_dotted_name
from eagle3.draft.acceptance import Acceptance, summarise
from eagle3.draft.questions import Question
from eagle3.evaluation.paired import PairedTest, num_shared_questions, paired_test
from eagle3.evaluation.runs import Contender, Run

# Measures by how close they are to serving, and what they are called in tables.
MEASURES = {
    "trained": "decoded or served",
    "simulated": "simulated on those answers",
    "simulated_store": "simulated on the store",
    "held_out": "held-out samples, in training",
    "untrained": "untrained drafter",
}
# Names and places: they differ between any two runs, and change no figure.
PLACES = {"run.dir", "run.resume", "out", "drafter", "tracking.name", "tracking.group", "tracking.tags"}
SEEDS = {"run.seed", "data.seed", "seed"}
RESAMPLING_SEED = 0  # the same for every comparison, so that two can be compared
# Two trainings that differ by their seed alone: standard deviation of tau over tau. See `seed_spread`.
ASSUMED_SPREAD = 0.016
ASSUMED_SPREAD_WEIGHT = 4  # as much as four differences of such runs


@dataclass(frozen=True)
class Best:
    """The checkpoint that a training exported."""

    step: int
    tau: float
    low: float | None  # None: the run does not say
    high: float | None


@dataclass(frozen=True)
class Verdict:
    """A contender against the first one, by one measure."""

    measure: str
    contender: str
    baseline: str
    drafters: PairedTest  # these two drafters on more questions like these
    recipes: PairedTest  # trained once more each, too


@dataclass(frozen=True)
class Comparison:
    """Everything that a comparison found."""

    contenders: list[Contender]
    differences: dict[str, list[Any]]  # setting or fact -> value per contender, where they are not all equal
    acceptance: dict[str, list[Acceptance | None]]  # measure -> per contender
    num_draft_tokens: dict[str, list[int | None]]  # measure -> K per contender
    best: list[Best | None]
    cost: dict[str, list[float | None]]  # what was spent -> per contender
    speed: dict[str, list[float | None]]
    verdicts: list[Verdict]
    spread: float  # by seed, of tau over tau, that the verdicts reckon with
    remarks: list[str]


def compare(contenders: Sequence[Contender], spread: float | None = None) -> Comparison:
    """Compares runs with the first of them; `spread` is the one by seed, estimated unless it is known.

    Raises:
        UserError: there are fewer than two.
    """
    if len(contenders) < 2:
        names = ", ".join(contender.name for contender in contenders)
        raise UserError(f"a comparison must have two runs or more, got {len(contenders)} ({names}); name another one")
    taken = {measure: [each.questions(measure) for each in contenders] for measure in MEASURES}
    taken = {measure: questions for measure, questions in taken.items() if any(questions)}
    acceptance = {
        measure: [
            summarise([each.answer for each in questions], RESAMPLING_SEED) if questions else None
            for questions in column
        ]
        for measure, column in taken.items()
    }
    by_position = {measure: [each.num_draft_tokens(measure) for each in contenders] for measure in taken}
    known_spread = seed_spread(contenders, acceptance) if spread is None else spread
    verdicts, remarks = _verdicts(contenders, taken, by_position, known_spread)
    return Comparison(
        contenders=list(contenders),
        differences=_differences(contenders),
        acceptance=acceptance,
        num_draft_tokens=by_position,
        best=[_best(each.training) for each in contenders],
        cost=_cost(contenders),
        speed={
            name: [_value(each.evaluation, key) for each in contenders]
            for name, key in {"tokens/s plain": "tokens_per_second_plain", "speed-up": "speed_up"}.items()
        },
        verdicts=verdicts,
        spread=known_spread,
        remarks=remarks,
    )


def settings(contender: Contender) -> dict[str, Any]:
    """Returns the settings of a contender's runs that could change its figures."""
    return {name: value for run in contender.runs() for name, value in _settings(run).items()}


def differences(columns: Sequence[Mapping[str, Any] | None]) -> dict[str, list[Any]]:
    """Returns the rows in which the columns are not all equal; None stands for what a column does not have.

    A column that is None has nothing, and makes no difference.
    """
    there = [column for column in columns if column is not None]
    names = list(dict.fromkeys(name for column in there for name in column))
    return {
        name: [None if column is None else column.get(name) for column in columns]
        for name in names
        if any(column.get(name) != there[0].get(name) for column in there)
    }


def seed_spread(contenders: Sequence[Contender], acceptance: Mapping[str, Sequence[Acceptance | None]]) -> float:
    """Returns how much tau moves between trainings that differ by their seed alone: standard deviation over tau.

    One training of each recipe says nothing of it, so that ASSUMED_SPREAD stands in; contenders that are such
    trainings of each other move the figure towards theirs.
    """
    recipes: dict[str, list[float]] = {}
    for index, contender in enumerate(contenders):
        taus = [column[index] for name, column in acceptance.items() if name in ("trained", "held_out")]
        tau = next((each.tau for each in taus if each is not None), None)
        if tau is not None and contender.training is not None:
            recipe = {name: value for name, value in settings(contender).items() if name.split(".", 1)[-1] not in SEEDS}
            recipe = {name: value for name, value in recipe.items() if name not in SEEDS}
            recipes.setdefault(repr(sorted(recipe.items(), key=lambda item: item[0])), []).append(tau)
    weight, total = float(ASSUMED_SPREAD_WEIGHT), ASSUMED_SPREAD_WEIGHT * ASSUMED_SPREAD**2
    for taus_of_one in recipes.values():
        if len(taus_of_one) > 1:
            mean = statistics.fmean(taus_of_one)
            total += sum((tau / mean - 1) ** 2 for tau in taus_of_one)
            weight += len(taus_of_one) - 1
    return float((total / weight) ** 0.5)


def _verdicts(
    contenders: Sequence[Contender],
    taken: Mapping[str, Sequence[list[Question]]],
    by_position: Mapping[str, Sequence[int | None]],
    spread: float,
) -> tuple[list[Verdict], list[str]]:
    """Tests each contender against the first by the measure closest to serving that both have, and says what cannot."""
    verdicts: list[Verdict] = []
    remarks: list[str] = []
    for index, contender in enumerate(contenders[1:], start=1):
        reasons = []
        for measure in ("trained", "held_out"):
            column = taken.get(measure, [[]] * len(contenders))
            first, other = column[0], column[index]
            if not first or not other:
                continue
            drafts = by_position[measure]
            if drafts[0] != drafts[index]:
                told = ["unknown" if each is None else str(each) for each in (drafts[0], drafts[index])]
                reasons.append(f"{MEASURES[measure]}: drafts a round {told[0]} against {told[1]}")
                continue
            drafters = paired_test(first, other, seed=RESAMPLING_SEED)
            recipes = paired_test(first, other, spread, RESAMPLING_SEED)
            if drafters is None or recipes is None:
                reasons.append(f"{MEASURES[measure]}: {_too_few(first, other)}")
                continue
            verdicts.append(Verdict(measure, contender.name, contenders[0].name, drafters, recipes))
        if not any(verdict.contender == contender.name for verdict in verdicts):
            why = "; ".join(reasons) or "they share no measure"
            remarks.append(f"{contender.name} cannot be tested against {contenders[0].name} ({why})")
    return verdicts, remarks


def _too_few(a: Sequence[Question], b: Sequence[Question]) -> str:
    """Says why these cannot be tested question by question."""
    num_shared = num_shared_questions(a, b)
    if num_shared < 2:
        return f"fewer than two questions in common, got {num_shared}"
    return f"{num_shared} questions in common, for which one or both took no round"


def _best(training: Run | None) -> Best | None:
    taus = training.curve("held_out/tau") if training is not None else {}
    steps = [step for step in taus if step > 0]  # the untrained drafter is never exported
    if training is None or not steps:
        return None
    step = max(steps, key=lambda each: (taus[each], -each))
    lows, highs = training.curve("held_out/tau_low"), training.curve("held_out/tau_high")
    return Best(step, taus[step], lows.get(step), highs.get(step))


def _cost(contenders: Sequence[Contender]) -> dict[str, list[float | None]]:
    trainings = [each.training for each in contenders]
    on_gpu = any(run is not None and str(run.provenance["device"]).startswith("cuda") for run in trainings)
    hours = "training, GPU hours" if on_gpu else "training, device hours"
    return {
        hours: [None if run is None else _device_hours(run) for run in trainings],
        "tokens trained on": [None if run is None else run.total("num_tokens") for run in trainings],
        "store, tokens": [None if run is None else run.provenance["store"].get("num_tokens") for run in trainings],
        "store, bytes": [None if run is None else run.provenance["store"].get("num_bytes") for run in trainings],
        "parameters": [None if run is None else float(run.provenance["num_parameters"]) for run in trainings],
    }


def _device_hours(training: Run) -> float | None:
    totals = [training.total(name) for name in ("device_seconds", "held_out/device_seconds")]
    seconds = [total for total in totals if total is not None]
    return sum(seconds) / 3600 if seconds else None


def _differences(contenders: Sequence[Contender]) -> dict[str, list[Any]]:
    """Returns what differs in settings and facts; of a kind of run that some do not have, that is one row."""
    kinds = {"training": [each.training for each in contenders], "evaluation": [each.evaluation for each in contenders]}
    found: dict[str, list[Any]] = {}
    for kind, runs in kinds.items():
        found |= differences([{} if run is None else {f"has {kind}": "yes"} for run in runs])
    for rows in (_settings, _facts):
        for runs in kinds.values():
            found |= differences([None if run is None else rows(run) for run in runs])
    return found


def _settings(run: Run) -> dict[str, Any]:
    prefix = {"train": "", "evaluate": "evaluate."}[run.identity.job_type]
    return {prefix + name: value for name, value in by_dotted_name(run.config).items() if name not in PLACES}


def _facts(run: Run) -> dict[str, Any]:
    """Returns what else a figure may depend on: code, packages, machine, data."""
    prefix = {"train": "", "evaluate": "evaluate "}[run.identity.job_type]
    found: dict[str, Any] = {}
    for section in ("git", "versions", "hardware", "digests"):
        values = by_dotted_name(run.provenance.get(section, {}))
        found |= {f"{prefix}{section} {name}": value for name, value in values.items() if name != "drafter"}
    if "store" in run.provenance:
        found[f"{prefix}store digest"] = run.provenance["store"].get("digest")
    return found


def _value(run: Run | None, name: str) -> float | None:
    return run.lines[-1].get(name) if run is not None and run.lines else None
