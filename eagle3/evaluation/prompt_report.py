"""What prompts hold, what of them is dropped and why, and what is supervised."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from eagle3.config import InspectConfig, PromptsConfig, UserError
from eagle3.draft.draft_vocab import build_draft_vocab, coverage_by_domain, draft_vocab_size, tau_ceiling
from eagle3.draft.target_weights import load_target_config
from eagle3.evaluation.shown_rows import show_row, usable_rows
from eagle3.features.record import is_held_out
from eagle3.prompts.conversations import BadRow, Conversation
from eagle3.prompts.inspection import Findings, RowFacts, examine_characters, make_examine
from eagle3.prompts.rendering import ChatRenderer, make_renderer
from eagle3.prompts.server_rendering import ServerRendering, compare_with_server
from eagle3.prompts.sources import find_sources, unread_files
from eagle3.prompts.tokenizers import kept_token_ids, load_tokenizer
from eagle3.prompts.workers import examine_rows, settings_for
from eagle3.words import counted

BAR_CHARS = 40
CEILING_ANSWERS = 500  # in file order: enough for two digits of tau, in a second
CEILING_DRAFTS = 7
COVERAGES = (0.95, 0.98, 0.99, 0.995)
SERVER_ROWS = 50
SHOWN_FILES = 20
NO_DOMAIN = "no domain"


@dataclass
class TokenCounts:
    """Supervised tokens of the training split, by domain; filled in as rows come."""

    by_domain: dict[str, np.ndarray] = field(default_factory=dict)  # each (V,) int64
    answers: list[torch.Tensor] = field(default_factory=list)
    num_held_out: int = 0


def report(config: InspectConfig, server: str | None, num_shown: int, rejected: Path) -> Findings:
    """Prints the report, with rows that a server renders and rows as they are; dropped rows go to `rejected`.

    Raises:
        UserError: there are no rows, or a setting, the target or the server does not allow the report.
    """
    _check(config, server, num_shown, rejected)
    # Rows are no markup, and a line is a line.
    console = Console(markup=False, highlight=False, soft_wrap=True)
    renderer = tokenizer = None
    if config.target.path:
        tokenizer = load_tokenizer(config.target.path, config.target.trust_remote_code)
        renderer = make_renderer(tokenizer, config.prompts)
        config = replace(config, prompts=settings_for(config.prompts, renderer))
    counts = TokenCounts()
    findings = look_through(config, renderer, rejected, counts)
    show_findings(console, config.prompts, findings, "token" if renderer else "character", rejected)
    if tokenizer is not None and findings.num_supervised:
        must_keep = kept_token_ids(Path(config.target.path), tokenizer)
        vocab_size = int(load_target_config(Path(config.target.path))["vocab_size"])
        show_draft_vocabulary(console, config, counts, vocab_size, must_keep)
    if renderer is not None and server is not None:
        rows = [shown.row for shown in usable_rows(config.prompts, renderer, SERVER_ROWS)]
        show_server(console, compare_with_server(server, rows, renderer))
    for shown in usable_rows(config.prompts, renderer, num_shown):
        show_row(console, shown)
    return findings


def _check(config: InspectConfig, server: str | None, num_shown: int, rejected: Path) -> None:
    """Refuses what cannot be reported, all at once."""
    problems = []
    if server is not None and not config.target.path:
        problems.append(
            "--server must come with --target DIRECTORY, got none; its rendering is compared with the target's here"
        )
    if num_shown < 0:
        problems.append(f"--show must be 0 or more, got {num_shown}")
    if not 0 <= config.held_out_share <= 1:
        problems.append(f"held_out_share must be from 0 to 1, got {config.held_out_share}")
    if config.prompts.max_tokens < 1:
        problems.append(f"prompts.max_tokens must be 1 or more, got {config.prompts.max_tokens}")
    if any(rejected.resolve() == Path(source.name).resolve() for source in find_sources(str(config.prompts.path))):
        problems.append(f"--rejected must be another file than the prompts, got {str(rejected)!r}; it is written anew")
    if problems:
        raise UserError("\n".join(problems))


def look_through(config: InspectConfig, renderer: ChatRenderer | None, rejected: Path, counts: TokenCounts) -> Findings:
    """Counts all rows, and writes those that are dropped to `rejected` as they come."""
    make: Callable[[], Callable[[Conversation], RowFacts]] = examine_characters
    max_tokens = 2**62
    if renderer is not None:
        make, max_tokens = partial(make_examine, renderer, config.prompts), config.prompts.max_tokens
    findings, file = Findings(), None
    if rejected.is_file():
        rejected.unlink()  # what an earlier look found must not be taken for what this one does
    try:
        for examined in examine_rows(config.prompts, make, keep_rows=False):
            dropped = findings.add(examined, max_tokens)
            if dropped is not None:
                if file is None:
                    rejected.parent.mkdir(parents=True, exist_ok=True)
                    file = rejected.open("w", encoding="utf-8")
                told = {name: value for name, value in asdict(dropped).items() if value is not None}
                file.write(json.dumps(told) + "\n")
            elif renderer is not None and isinstance(examined.row, Conversation) and examined.result is not None:
                _count_tokens(counts, examined.row, examined.result, config.held_out_share)
    finally:
        if file is not None:
            file.close()
    return findings


def _count_tokens(counts: TokenCounts, row: Conversation, facts: RowFacts, held_out_share: float) -> None:
    if is_held_out(row.id, held_out_share):
        counts.num_held_out += 1
        return
    ids = np.frombuffer(facts.supervised, dtype=np.int32)
    if not ids.size:
        return
    size = 1 << int(ids.max()).bit_length()
    seen = counts.by_domain.get(row.domain or NO_DOMAIN, np.zeros(0, dtype=np.int64))
    if seen.size < size:
        seen = np.concatenate([seen, np.zeros(size - seen.size, dtype=np.int64)])
    np.add.at(seen, ids, 1)
    counts.by_domain[row.domain or NO_DOMAIN] = seen
    if len(counts.answers) < CEILING_ANSWERS:
        counts.answers += torch.tensor(ids).split(list(facts.run_lengths))


def show_findings(console: Console, prompts: PromptsConfig, found: Findings, unit: str, rejected: Path) -> None:
    """Prints counts, what is dropped and why, and how long the rows are."""
    formats = ", ".join(f"{name} {count:,}" for name, count in found.formats.most_common())
    console.print(
        f"{prompts.path}: {counted(found.num_rows, 'row')}, {found.num_accepted:,} usable, "
        f"{found.dropped.total():,} dropped"
    )
    console.print(f"formats: {formats or 'none'}")
    for file, count in list(found.files.items())[:SHOWN_FILES]:
        console.print(f"  {file}: {counted(count, 'row')}")
    if len(found.files) > SHOWN_FILES:
        console.print(f"  and {counted(len(found.files) - SHOWN_FILES, 'file')} more")
    for file in unread_files(str(prompts.path)):
        console.print(f"  {file}: in no form that is read, left out")
    if found.dropped:
        console.print(f"dropped rows, all of them in {rejected}:")
    for kind, count in found.dropped.most_common():
        console.print(f"  {kind}: {counted(count, 'row')}")
        for example in found.examples[kind]:
            console.print(f"    {_place(example)}: {example.reason}")
    if found.num_accepted:
        share = found.num_supervised / max(1, found.num_tokens)
        console.print(
            f"{counted(found.num_tokens, unit)}, {found.num_supervised:,} of them supervised ({share:.0%}); prompts "
            f"only: {counted(found.num_prompts_only, 'row')}, with tool calls: {counted(found.num_with_calls, 'row')}"
        )
    if unit == "token":
        _show_samples(console, prompts, found)
    else:
        console.print("without --target nothing is rendered: rows that its chat template refuses are not found")
    most = max(found.lengths.values(), default=0)
    for length, count in sorted(found.lengths.items()):
        console.print(f"{length:>9,} {unit}s or fewer {count:>9,} {'#' * -(-BAR_CHARS * count // most)}")


def _show_samples(console: Console, prompts: PromptsConfig, found: Findings) -> None:
    """Prints what extraction makes of the rows: the target's own answers, or the given ones."""
    told = f"answered anew by the target (regenerate.enabled, the default): {counted(found.num_asked, 'row')}"
    if found.num_not_asked:
        (first,) = found.not_asked
        told += f", and {found.num_not_asked:,} not; the first is {_place(first)}: {first.reason}"
    console.print(told)
    num_given = found.num_samples - found.num_prompts_only
    told = f"with the answers given (regenerate.enabled=false): {counted(num_given, 'sample')} "
    told += f"of at most {prompts.max_tokens:,} tokens"
    if found.num_shortened:
        told += (
            f"; {counted(found.num_shortened, 'row')} shortened (prompts.too_long={prompts.too_long}), which leaves "
        )
        told += f"out {counted(found.num_lost, 'supervised token')}"
    if found.num_context:
        told += f"; context only, as the template rewrites it for later turns: {counted(found.num_context, 'answer')}"
    if found.num_thoughts_dropped:
        told += f"; left out by the template: {counted(found.num_thoughts_dropped, 'thought')}"
    console.print(told)


def _place(row: BadRow) -> str:
    return f"{row.file}:{row.line}" if row.file else f"line {row.line}"


def show_draft_vocabulary(
    console: Console, config: InspectConfig, counts: TokenCounts, vocab_size: int, must_keep: Sequence[int]
) -> None:
    """Prints what a draft vocabulary of the training split's supervised tokens covers, and what it costs."""
    draft = config.draft
    if not counts.by_domain:
        console.print(
            f"draft vocabulary: no row is left to train on, {counted(counts.num_held_out, 'row')} held out "
            f"(held_out_share={config.held_out_share})"
        )
        return
    by_domain = {name: torch.from_numpy(_of_size(seen, vocab_size)) for name, seen in counts.by_domain.items()}
    total = torch.stack(list(by_domain.values())).sum(0)  # (V,)
    size = min(draft_vocab_size(draft, total, must_keep), vocab_size)
    vocab = build_draft_vocab(total, size, must_keep)
    sizes = ", ".join(
        f"{share:.1%} {draft_vocab_size(replace(draft, draft_vocab_coverage=share), total, must_keep):,}"
        for share in COVERAGES
    )
    console.print(
        f"draft vocabulary, over the given answers of the training split ({counted(counts.num_held_out, 'row')} held "
        f"out): {size:,} of {vocab_size:,} tokens cover {vocab.coverage(total):.2%}; sizes for a coverage of {sizes}"
    )
    if any(answer.numel() > 1 for answer in counts.answers):
        ceiling = tau_ceiling(vocab, counts.answers, CEILING_DRAFTS)
        console.print(
            f"a drafter that is right wherever its vocabulary lets it be: tau {ceiling.tau:.2f} of "
            f"{ceiling.full_tau:.2f} with chains of {CEILING_DRAFTS}, {ceiling.lost:.1%} lost to the rest"
        )
    for domain, share in coverage_by_domain(vocab, by_domain).items() if len(by_domain) > 1 else ():
        console.print(f"  {domain}: {share:.2%} of {counted(int(by_domain[domain].sum()), 'token')}")


def show_server(console: Console, seen: ServerRendering) -> None:
    """Prints whether the server sends the same prompts, and each row where it does not."""
    console.print(str(seen))
    for line in [*seen.differences, *seen.refused]:
        console.print(f"  {line}")


def _of_size(seen: np.ndarray, vocab_size: int) -> Any:
    return np.pad(seen, (0, max(0, vocab_size - seen.size)))[:vocab_size]
