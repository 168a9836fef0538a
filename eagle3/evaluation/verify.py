"""The headline number of a run, derived again from its raw counters, and its digests from the files that are there."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from eagle3.draft.acceptance import Acceptance, summarise
from eagle3.draft.questions import QUESTIONS_NAME, Question
from eagle3.evaluation.report import measure as measured
from eagle3.evaluation.runs import RESULT_NAME, Run
from eagle3.tracking import digest_file

BOOTSTRAP_SEED_OF_VALIDATION = 0
TOLERANCE = 1e-9  # sums of the same numbers in the same order; a digit more would trip over JSON written by others
LARGEST = 2**63  # no counter gets there, and what a hand writes may not fit a float


@dataclass(frozen=True)
class Check:
    """One figure or digest: as it was reported, and as it is."""

    name: str
    reported: Any
    derived: Any

    @property
    def holds(self) -> bool:
        """True where both are the same."""
        return _same(self.reported, self.derived)


def verify(run: Run) -> list[Check]:
    """Compares what a run says of itself with its counters and files; of a run in W&B, what W&B holds."""
    checks = _training_checks(run) if run.identity.job_type == "train" else _evaluation_checks(run)
    return (
        checks
        + _digest_checks(run)
        + [each for name, questions in run.questions.items() for each in _sane(name, questions)]
    )


def _training_checks(run: Run) -> list[Check]:
    taus = {step: tau for step, tau in run.curve("held_out/tau").items() if step > 0}
    best = max(taus, key=lambda step: (taus[step], -step)) if taus else None
    questions = run.questions.get("held_out")
    if best is None or questions is None:
        return [
            Check(f"a validation and its {QUESTIONS_NAME}", "both", "neither" if not questions else "no validation")
        ]
    found = summarise([question.answer for question in questions], BOOTSTRAP_SEED_OF_VALIDATION)
    at_best = next(line for line in run.lines if line["step"] == best and "held_out/tau" in line)
    return [
        Check("held-out tau", at_best["held_out/tau"], found.tau),
        Check("held-out tau, low", at_best.get("held_out/tau_low"), found.low),
        Check("held-out tau, high", at_best.get("held_out/tau_high"), found.high),
        Check("held-out (N-1)/R", at_best.get("held_out/tau_without_prefill"), found.tau_without_prefill),
        *(
            Check(f"held-out acceptance at position {index}", at_best.get(f"held_out/conditional/{index}"), share)
            for index, share in enumerate(found.conditional)
        ),
    ]


def _evaluation_checks(run: Run) -> list[Check]:
    if not run.lines or "trained" not in run.questions:
        return [Check(f"{RESULT_NAME} and {QUESTIONS_NAME}", "both", "one of them is missing")]
    headlines = run.lines[-1]
    checks = []
    for measure, questions in run.questions.items():
        found = summarise([question.answer for question in questions], int(run.config["seed"]))
        checks.append(Check(f"tau {measure}", headlines.get(f"tau_{measure}"), found.tau))
    return checks + _written_checks(run)


def _written_checks(run: Run) -> list[Check]:
    """Returns all that result.json says of the answers, which W&B does not hold for every measure."""
    path = Path(run.source) / RESULT_NAME
    if not path.is_file():
        return []
    written: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    checks = []
    for measure, questions in run.questions.items():
        parts = written.get(measure)
        parts = parts if isinstance(parts, Mapping) else {}
        found = measured(questions, int(run.config["seed"]))
        checks += _figures(measure, parts.get("all_answers"), found.all_answers)
        if any(question.loops is not None for question in questions):  # else nobody asked which answers loop
            checks += _figures(f"{measure} without loops", parts.get("without_loops"), found.without_loops)
    return checks


def _figures(what: str, written: Any, found: Acceptance | None) -> list[Check]:
    if not isinstance(written, Mapping) or found is None:
        reported = "figures" if isinstance(written, Mapping) else "nothing" if written is None else written
        return [Check(what, reported, "nothing" if found is None else "figures")]
    return [Check(f"{what}, {each.name}", written.get(each.name), getattr(found, each.name)) for each in fields(found)]


def _digest_checks(run: Run) -> list[Check]:
    """Returns the digests of what is still on this machine; what has gone is not a contradiction."""
    digests = run.provenance.get("digests", {})
    prompts, drafter = (run.config.get("prompts") or {}).get("path"), run.config.get("drafter")
    files = {
        "prompts": Path(prompts) if prompts is not None else None,
        "drafter": Path(drafter) / "model.safetensors" if drafter is not None else None,
    }
    return [
        Check(f"digest of {path}", digests[name], digest_file(path))
        for name, path in files.items()
        if path is not None and name in digests and path.is_file()
    ]


def _sane(measure: str, questions: Sequence[Question]) -> list[Check]:
    """Returns how many answers have counters that no decoding can give.

    Each round emits its accepted drafts and a token of the target's, but for those past the end of the answer. A
    draft is looked at where the one before it was right, and only then right itself.
    """
    impossible = [
        question.answer.sample_id
        for question in questions
        if question.answer.num_tokens - 1 > question.answer.rounds + sum(question.answer.accepted) + 1e-6
        or question.answer.rounds > question.answer.num_tokens
        or not _falls(question)
    ]
    return [Check(f"{measure}: answers whose counters contradict each other", [], impossible)]


def _falls(question: Question) -> bool:
    pairs = zip(question.answer.reached, question.answer.accepted, strict=True)
    counters = [question.answer.rounds, *(count for pair in pairs for count in pair)]
    return all(later <= earlier + 1e-6 for earlier, later in itertools.pairwise(counters))


def _same(reported: Any, derived: Any) -> bool:
    if isinstance(reported, list) and isinstance(derived, list):
        return len(reported) == len(derived) and all(map(_same, reported, derived))
    if isinstance(reported, int) and abs(reported) >= LARGEST:
        return False
    if isinstance(reported, int | float) and isinstance(derived, float):
        return abs(reported - derived) <= TOLERANCE * max(1.0, abs(reported))
    return bool(reported == derived)
