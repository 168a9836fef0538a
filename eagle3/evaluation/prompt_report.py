"""`python -m eagle3 prompts FILE`: what prompts hold, what of them is dropped and why, and what is supervised."""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eagle3.config import DraftConfig, InspectConfig, PromptsConfig, load_config
from eagle3.draft.draft_vocab import build_draft_vocab, coverage_by_domain, draft_vocab_size, tau_ceiling
from eagle3.draft.target_weights import load_target_config
from eagle3.features.record import is_held_out
from eagle3.prompts.answers import RenderingError
from eagle3.prompts.conversations import Conversation, read_conversations
from eagle3.prompts.inspection import Findings, RowFacts, examine_characters, make_examine
from eagle3.prompts.lengths import render_row
from eagle3.prompts.rendering import ChatRenderer, make_renderer
from eagle3.prompts.server_rendering import ServerRendering, compare_with_server
from eagle3.prompts.tokenizers import kept_token_ids, load_tokenizer
from eagle3.prompts.workers import examine_rows, settings_for

BAR_CHARS = 40
SHOWN_CHARS = 1200  # of one row
CEILING_ANSWERS = 500  # in file order: enough for two digits of tau, in a second
CEILING_DRAFTS = 7
COVERAGES = (0.95, 0.98, 0.99, 0.995)
SERVER_ROWS = 50


@dataclass
class TokenCounts:
    """Supervised tokens of the training split, by domain; filled in as rows come."""

    by_domain: dict[str, np.ndarray] = field(default_factory=dict)  # each (V,) int64
    answers: list[torch.Tensor] = field(default_factory=list)
    num_held_out: int = 0


def main(argv: Sequence[str]) -> int:
    """Prints the report; returns 0 if every row can be used and 1 otherwise.

    Raises:
        UserError: there are no rows, or a setting, the target or the server does not allow the report.
    """
    parser = argparse.ArgumentParser(prog="python -m eagle3 prompts", description=__doc__)
    parser.add_argument("prompts", help="a file, a glob, a folder, or hf:OWNER/NAME[:CONFIG][@SPLIT]")
    parser.add_argument("--target", help="the target's directory; without it lengths are in characters")
    parser.add_argument("--server", metavar="URL", help="an SGLang server of the target: does it render the same?")
    parser.add_argument("--show", type=int, default=3, metavar="N", help="rows that are shown (default: 3)")
    parser.add_argument("--rejected", type=Path, help="where dropped rows go (default: ckpts/NAME.rejected.jsonl)")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="settings of extract and train")
    arguments = parser.parse_intermixed_args(argv)
    config = load_config(InspectConfig, None, arguments.overrides)
    config = replace(config, prompts=replace(config.prompts, path=arguments.prompts))
    if arguments.target is not None:
        config = replace(config, target=replace(config.target, path=arguments.target))
    rejected = arguments.rejected or Path("ckpts") / f"{Path(arguments.prompts).name or 'prompts'}.rejected.jsonl"
    # Rows are no markup, and a line is a line.
    console = Console(markup=False, highlight=False, soft_wrap=True)
    renderer = tokenizer = None
    if config.target.path:
        tokenizer = load_tokenizer(config.target.path, config.target.trust_remote_code)
        renderer = make_renderer(tokenizer, config.prompts)
        config = replace(config, prompts=settings_for(config.prompts, renderer))
    counts = TokenCounts()
    findings = look_through(config, renderer, rejected, counts)
    show_findings(console, config.prompts, findings, "tokens" if renderer else "characters", rejected)
    if tokenizer is not None and counts.by_domain:
        must_keep = kept_token_ids(Path(config.target.path), tokenizer)
        vocab_size = int(load_target_config(Path(config.target.path))["vocab_size"])
        show_draft_vocabulary(console, config.draft, counts, vocab_size, must_keep)
    if renderer is not None and arguments.server is not None:
        show_server(
            console, compare_with_server(arguments.server, _usable(config.prompts, renderer, SERVER_ROWS), renderer)
        )
    for row in _usable(config.prompts, renderer, arguments.show):
        show_row(console, row, renderer)
    return 0 if not findings.dropped else 1


def look_through(config: InspectConfig, renderer: ChatRenderer | None, rejected: Path, counts: TokenCounts) -> Findings:
    """Counts all rows, and writes those that are dropped to `rejected` as they come."""
    make: Callable[[], Callable[[Conversation], RowFacts]] = examine_characters
    max_tokens = 2**62
    if renderer is not None:
        make, max_tokens = partial(make_examine, renderer, config.prompts), config.prompts.max_tokens
    findings, file = Findings(), None
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
    seen = counts.by_domain.get(row.domain or "-", np.zeros(0, dtype=np.int64))
    if seen.size < size:
        seen = np.concatenate([seen, np.zeros(size - seen.size, dtype=np.int64)])
    np.add.at(seen, ids, 1)
    counts.by_domain[row.domain or "-"] = seen
    if len(counts.answers) < CEILING_ANSWERS:
        counts.answers.append(torch.tensor(ids))


def show_findings(console: Console, prompts: PromptsConfig, found: Findings, unit: str, rejected: Path) -> None:
    """Prints counts, what is dropped and why, and how long the rows are."""
    formats = ", ".join(f"{name} {count:,}" for name, count in found.formats.most_common())
    console.print(
        f"{prompts.path}: {found.num_rows:,} rows, {found.num_accepted:,} usable, {found.dropped.total():,} dropped"
    )
    console.print(f"formats: {formats or 'none'}")
    if found.num_accepted:
        share = found.num_supervised / max(1, found.num_tokens)
        console.print(
            f"{found.num_tokens:,} {unit}, {found.num_supervised:,} of them supervised ({share:.0%}); "
            f"{found.num_prompts_only:,} rows are prompts only, {found.num_with_calls:,} have tool calls"
        )
    if unit == "tokens":
        console.print(
            f"{found.num_samples:,} samples of at most {prompts.max_tokens:,} tokens, {found.num_shortened:,} rows "
            f"shortened (prompts.too_long={prompts.too_long}); {found.num_context:,} answers are context only, as the "
            f"template rewrites them for later turns; {found.num_thoughts_dropped:,} thoughts are left out by it"
        )
    if found.dropped:
        table = Table("dropped", "rows", "line", "reason", title=f"dropped rows, all of them in {rejected}")
        for kind, count in found.dropped.most_common():
            for i, example in enumerate(found.examples[kind]):
                place = f"{example.file}:{example.line}" if example.file else str(example.line)
                table.add_row(kind if i == 0 else "", f"{count:,}" if i == 0 else "", place, Text(example.reason))
        console.print(table)
    most = max(found.lengths.values(), default=0)
    for length, count in sorted(found.lengths.items()):
        console.print(f"{length:>9,} {unit} or fewer {count:>9,} {'#' * -(-BAR_CHARS * count // most)}")


def show_draft_vocabulary(
    console: Console, draft: DraftConfig, counts: TokenCounts, vocab_size: int, must_keep: Sequence[int]
) -> None:
    """Prints what a draft vocabulary of the training split's supervised tokens covers, and what it costs."""
    by_domain = {name: torch.from_numpy(_of_size(seen, vocab_size)) for name, seen in counts.by_domain.items()}
    total = torch.stack(list(by_domain.values())).sum(0)  # (V,)
    size = min(draft_vocab_size(draft, total, must_keep), vocab_size)
    vocab = build_draft_vocab(total, size, must_keep)
    sizes = ", ".join(
        f"{share:.1%} {draft_vocab_size(replace(draft, draft_vocab_coverage=share), total, must_keep):,}"
        for share in COVERAGES
    )
    console.print(
        f"draft vocabulary, over the given answers of the training split ({counts.num_held_out:,} rows held out): "
        f"{size:,} of {vocab_size:,} tokens cover {vocab.coverage(total):.2%}; sizes for a coverage of {sizes}"
    )
    ceiling = tau_ceiling(vocab, counts.answers, CEILING_DRAFTS)
    console.print(
        f"a drafter that is right wherever its vocabulary lets it be: tau {ceiling.tau:.2f} of {ceiling.full_tau:.2f} "
        f"with chains of {CEILING_DRAFTS}, {ceiling.lost:.1%} lost to the rest"
    )
    for domain, share in coverage_by_domain(vocab, by_domain).items():
        console.print(f"  {domain}: {share:.2%} of {int(by_domain[domain].sum()):,} tokens")


def show_server(console: Console, seen: ServerRendering) -> None:
    """Prints whether the server sends the same prompts, and each row where it does not."""
    console.print(str(seen))
    for line in [*seen.differences, *seen.refused]:
        console.print(f"  {line}")


def show_row(console: Console, row: Conversation, renderer: ChatRenderer | None) -> None:
    """Prints a row, what is supervised of it in green."""
    text = Text()
    for piece, is_supervised in _pieces(row, renderer):
        text.append(piece, style="green" if is_supervised else "dim")
    if len(text) > SHOWN_CHARS:
        text = text[: SHOWN_CHARS // 2] + Text(" [...] ", style="red") + text[-SHOWN_CHARS // 2 :]
    console.rule(f"line {row.line}, id {row.id}", style="dim")
    console.print(text)


def _pieces(row: Conversation, renderer: ChatRenderer | None) -> Iterator[tuple[str, bool]]:
    if renderer is None:
        for message in row.messages:
            yield f"{message['role']}: {message['content']}\n", message["role"] == "assistant"
        yield row.text or "", True
        return
    rendered = render_row(renderer, row)
    start = 0
    for t in range(1, len(rendered.input_ids) + 1):
        if t == len(rendered.input_ids) or rendered.loss_mask[t] != rendered.loss_mask[start]:
            yield renderer.decode(rendered.input_ids[start:t]), rendered.loss_mask[start]
            start = t


def _usable(prompts: PromptsConfig, renderer: ChatRenderer | None, num_rows: int) -> list[Conversation]:
    """Returns the first rows that can be rendered."""
    return list(islice(filter(partial(_is_usable, renderer), _conversations(prompts)), num_rows))


def _conversations(prompts: PromptsConfig) -> Iterator[Conversation]:
    for row in read_conversations(str(prompts.path), prompts.max_row_bytes):
        if isinstance(row, Conversation):
            yield row


def _is_usable(renderer: ChatRenderer | None, row: Conversation) -> bool:
    try:
        return renderer is None or bool(render_row(renderer, row).input_ids)
    except RenderingError:
        return False


def _of_size(seen: np.ndarray, vocab_size: int) -> Any:
    return np.pad(seen, (0, max(0, vocab_size - seen.size)))[:vocab_size]
