"""A running server: what its flags say of the drafter, and what it accepts of the first drafts."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from eagle3.draft.serving_config import IDS_ARE_BOUNDARIES, target_architecture
from eagle3.evaluation.doctor.evidence import Share
from eagle3.evaluation.doctor.files import DrafterFiles, Finding
from eagle3.evaluation.doctor.settings import Target, layer_ids
from eagle3.evaluation.served import ServedAnswer, ServerFacts, SGLangClient
from eagle3.features.record import FeatureSample
from eagle3.words import counted

ANSWER_TOKENS = 64
NUM_PROMPTS = 16
CONCURRENCY = 4
# Served and offline look at different answers to the same prompts; beyond chance this much is let pass.
MARGIN = 0.05
# The last version in which DeepSeek's classes always add 1.
ALWAYS_ADDS_ONE = (0, 5, 12)


def check_flags(files: DrafterFiles, target: Target | None, facts: ServerFacts) -> list[Finding]:
    """Returns which of the server's settings keep this drafter from working as it was trained."""
    flags, findings = facts.flags, []
    algorithm = flags.get("speculative_algorithm")
    if algorithm is None:
        what = f"{facts.url} runs without speculation"
        findings.append(Finding("speculation-off", what, "start it with --speculative-algorithm EAGLE3"))
    elif algorithm != "EAGLE3":
        what = f"{facts.url} runs --speculative-algorithm {algorithm}: the drafter gets one state instead of three"
        findings.append(Finding("eagle-algorithm", what, "start it with --speculative-algorithm EAGLE3"))
    served = flags.get("speculative_draft_model_path")
    if served is not None and Path(served).resolve() != files.directory.resolve():
        what = f"{facts.url} serves the drafter {served}, not {files.directory}"
        findings.append(Finding("other-drafter", what, "start it with --speculative-draft-model-path of this one"))
    quantised_draft = flags.get("speculative_draft_model_quantization")
    if flags.get("quantization") is not None and quantised_draft != "unquant":
        what = f"the target is served with quantization={flags['quantization']}, and the drafter with {quantised_draft}"
        findings.append(Finding("draft-quantization", what, "add --speculative-draft-model-quantization unquant"))
    return findings + (_check_version(files, target, facts) if target is not None else [])


def _check_version(files: DrafterFiles, target: Target, facts: ServerFacts) -> list[Finding]:
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", facts.version)
    ids = layer_ids(files)
    if numbers is None or ids is None or target_architecture(target.config) not in IDS_ARE_BOUNDARIES:
        return []
    if tuple(int(number) for number in numbers.groups()) > ALWAYS_ADDS_ONE or ids[:1] == [1]:
        return []
    what = (
        f"SGLang {facts.version} adds 1 to the layer ids {ids} of this class and captures {[i + 1 for i in ids]}; "
        f"newer versions take them as they are"
    )
    return [Finding("layer-ids", what, f"serve with SGLang 0.5.17 or newer, or write {[i - 1 for i in ids]} for it")]


def check_served(url: str, samples: Sequence[FeatureSample], offline: Share) -> list[Finding]:
    """Asks the server the samples' first questions, and compares how often first drafts are right.

    Raises:
        UserError: the server does not answer, or has speculation off.
    """
    asked = [turn for turn in map(_first_turn, samples) if turn.prompt_ids]
    if not asked:
        return []
    # No further than the recorded answers go: what comes after may be drafted worse.
    num_tokens = max(2, min(ANSWER_TOKENS, int(median(turn.num_tokens for turn in asked))))
    prompts = [turn.prompt_ids for turn in asked if turn.num_tokens >= num_tokens][:NUM_PROMPTS]
    answers = SGLangClient(url, num_tokens).answer_all(prompts, CONCURRENCY, lambda answer: None)
    served = _served_position_0(answers)
    num_accepted = sum(answer.num_tokens - 1 - answer.rounds for answer in answers)
    if num_accepted <= 0:
        what = (
            f"the server accepted no draft in {counted(sum(answer.rounds for answer in answers), 'round')}, and "
            f"offline the first draft is right {offline} of the time: it does not run these weights on these states"
        )
        remedy = "see the other findings; then the server's log for the drafter's loading, and its version for EAGLE3"
        return [Finding("nothing-accepted", what, remedy)]
    if served is None:
        return []
    chance = sum(share.value * (1 - share.value) / share.count for share in (served, offline)) ** 0.5
    if offline.value - served.value < MARGIN + 3 * chance:
        return []
    what = (
        f"first drafts are right {served} of the time on the server and {offline} offline, on the same prompts; more "
        f"than {MARGIN:.0%} and chance apart"
    )
    remedy = "compare layer ids, template, dtype and quantisation of the server with those of the features"
    return [Finding("served-below-offline", what, remedy)]


@dataclass(frozen=True)
class _Turn:
    """A sample's first question, and how long its recorded answer is."""

    prompt_ids: list[int]
    num_tokens: int


def _first_turn(sample: FeatureSample) -> _Turn:
    supervised = sample.loss_mask.tolist()
    first = supervised.index(True) if any(supervised) else 0
    end = supervised.index(False, first) if False in supervised[first:] else len(supervised)
    return _Turn(sample.input_ids[:first].tolist(), end - first)


def _served_position_0(answers: Sequence[ServedAnswer]) -> Share | None:
    """Returns the share of rounds that accepted a draft or more; None where the server counts no histogram."""
    rounds = sum(sum(answer.histogram) for answer in answers)
    none_accepted = sum(answer.histogram[0] for answer in answers if answer.histogram)
    return Share(rounds - none_accepted, rounds) if rounds else None
