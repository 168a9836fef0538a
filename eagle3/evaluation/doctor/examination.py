"""A drafter looked at: what keeps its acceptance low, each with its remedy."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from eagle3.config import UserError
from eagle3.evaluation.doctor.evidence import Evidence, Share, check_loadable, check_on_store, try_layers
from eagle3.evaluation.doctor.files import DrafterFiles, Finding, read_drafter_files
from eagle3.evaluation.doctor.names import check_kinds, check_names, check_shapes, other_algorithm
from eagle3.evaluation.doctor.serving import ANSWER_TOKENS, check_flags, check_served
from eagle3.evaluation.doctor.settings import Target, check_settings, read_target, rope_difference
from eagle3.evaluation.doctor.tensors import check_tensors
from eagle3.evaluation.served import SGLangClient, num_steps_of


@dataclass(frozen=True)
class Examination:
    """What was looked at, and what was found."""

    findings: list[Finding]
    position_0: Share | None  # first drafts of rounds that are right on the store's features; None: not run
    skipped: list[str]  # what was not looked at, and what it would take


@dataclass(frozen=True)
class Spelling:
    """How a command is given what the doctor looks at."""

    target: str
    store: str
    server: str


OPTIONS = Spelling("--target DIR", "--store DIR", "--server URL")
SETTINGS = Spelling("target.path=DIR", "store=DIR", "server=URL")


def examine(
    drafter: Path,
    *,
    target_path: Path | None,
    store_path: Path | None,
    server: str | None,
    tries_layers: bool,
    chat_template_kwargs: dict[str, Any],
    spelling: Spelling = OPTIONS,
) -> Examination:
    """Looks at everything that the arguments allow, the files first; `spelling` is what hints name the others by.

    Raises:
        UserError: an argument names nothing that can be looked at, or needs another one.
    """
    if target_path is None and (store_path is not None or tries_layers):
        raise UserError("--target must be given with --store and --try-layers, got none; name the target's directory")
    if tries_layers and store_path is None:
        raise UserError("--store must be given with --try-layers, got none; its tokens are what the target is run on")
    skipped = []
    client = SGLangClient(server, ANSWER_TOKENS) if server is not None else None
    facts = client.facts() if client is not None else None
    target = read_target(target_path, chat_template_kwargs) if target_path is not None else None
    if target is None:
        skipped.append(f"sizes, layers, RoPE, tokenizer and template ({spelling.target})")
    reading = read_drafter_files(drafter)
    files, findings = reading.files, list(reading.findings)
    if files is None:
        return Examination(findings, None, [*skipped, "everything else, since the files cannot be read"])
    findings += check_flags(files, target, facts) if facts is not None else []
    if (kinds := check_kinds(files)) is not None:
        return Examination([*findings, kinds], None, [*skipped, "everything else, which config.json decides"])
    if (other := other_algorithm(files)) is not None:
        # All that follows would be said of a file that is meant otherwise.
        return Examination([*findings, other], None, [*skipped, "everything else, since it is no EAGLE-3 drafter"])
    findings += check_names(files) + check_shapes(files)
    findings += check_tensors(files, target.config if target is not None else None)
    structural = bool(findings)
    if target is not None:
        findings += check_settings(files, target)
    position_0 = None
    if target is None or store_path is None or structural:
        rope = rope_difference(files, target.config) if target is not None else None
        findings += [rope] if rope is not None else []
        if target is not None and not findings:
            findings += check_loadable(files, target)
        reason = "the findings above first" if structural else f"{spelling.target} {spelling.store}"
        skipped.append(f"the drafter at work on recorded features ({reason})")
    else:
        evidence = _look_at_work(files, target, store_path, client, tries_layers=tries_layers)
        position_0 = evidence.position_0
        if tries_layers and position_0 is not None:
            findings = [finding for finding in findings if finding.name != "layer-ids"]
        # What keeps it from loading has a name already, if anything was found before.
        findings += [each for each in evidence.findings if each.name != "not-loadable" or not findings]
        if position_0 is None:
            skipped.append("the drafter at work on recorded features (the findings above first)")
    if client is None:
        skipped.append(f"what a server accepts ({spelling.server})")
    # Evidence speaks last, and its words replace a suspicion of the same name.
    return Examination(list({finding.name: finding for finding in findings}.values()), position_0, skipped)


def _look_at_work(
    files: DrafterFiles, target: Target, store_path: Path, client: SGLangClient | None, *, tries_layers: bool
) -> Evidence:
    """Runs the drafter on a store, with other layers and on a server, as far as that is asked for."""
    num_draft_tokens = 1
    if client is not None:
        num_draft_tokens = num_steps_of(client.facts(), 1)
    evidence = check_on_store(files, target, store_path, num_draft_tokens)
    if evidence.position_0 is None:
        return evidence
    findings = evidence.findings
    if tries_layers:
        findings = [each for each in findings if each.name != "layer-ids"]
        findings += try_layers(files, target, evidence.samples)
    if client is not None:
        findings = findings + check_served(client.url, evidence.samples, evidence.position_0)
    return replace(evidence, findings=findings)


def show(examination: Examination, drafter: Path, console: Console) -> None:
    """Prints what was found, and what was not looked at."""
    lines = []
    if examination.position_0 is not None:
        share = examination.position_0
        lines.append(f"Where rounds start, first drafts are right {share} of the time on the store's features.")
    for number, finding in enumerate(examination.findings, start=1):
        lines += [f"{number}. {finding.name}: {finding.what}.", f"   Remedy: {finding.remedy}."]
    if not examination.findings:
        lines.append(f"Nothing found in {drafter}.")
    lines += [f"Not looked at: {each}." for each in examination.skipped]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
