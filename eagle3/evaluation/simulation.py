"""The acceptance of several drafters, each served in several ways, in one pass over a store or over answers."""

import argparse
import json
import logging
import platform
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from eagle3.config import TargetConfig, UserError
from eagle3.draft.acceptance import Acceptance, AnswerRounds, summarise
from eagle3.draft.export import load_drafter
from eagle3.draft.target_weights import load_target_config, load_target_weights
from eagle3.evaluation import recorded
from eagle3.evaluation.report import names_apart, narrow_table, progress_bar
from eagle3.evaluation.simulate import (
    Speculation,
    batch_tokens_of,
    open_store,
    packs_of_store,
    parse_speculation,
    simulate_all,
)
from eagle3.files import write_whole
from eagle3.prompts.conversations import BadRow, Conversation, read_conversations
from eagle3.tracking import digest_file, git_state
from eagle3.words import counted

logger = logging.getLogger(__name__)

EVERYTHING = "all"


@dataclass(frozen=True)
class Row:
    """One drafter, served in one way, on the answers of one domain."""

    drafter: str
    speculation: str
    domain: str
    acceptance: Acceptance


def report_on_store(arguments: argparse.Namespace) -> None:
    """Simulates over a store, as the command's arguments say.

    Raises:
        UserError: store, target and drafters do not fit each other, or an argument is none.
    """
    speculations = [parse_speculation(text) for text in arguments.speculation or ["3"]]
    domains = read_domains(arguments.prompts) if arguments.prompts is not None else {}
    started = time.perf_counter()
    simulated = run(
        arguments.store,
        arguments.target,
        arguments.drafter,
        speculations,
        held_out_share=arguments.held_out_share,
        dtype=getattr(torch, arguments.dtype),
    )
    seconds = time.perf_counter() - started
    table_rows = summarise_all(simulated.rounds, domains, arguments.seed)
    console = Console()
    console.print(as_table(table_rows))
    rate = f"{counted(simulated.num_tokens, 'token')} in {seconds:.1f} s, loading included."
    console.print(f"Speculation: steps, steps@temperature or steps/topk/tokens. {rate}", highlight=False, markup=False)
    if arguments.out is not None:
        figures = {
            "store": str(arguments.store),
            "target": str(arguments.target),
            "held_out_share": arguments.held_out_share,
            "dtype": arguments.dtype,
            "seed": arguments.seed,
            "num_tokens": simulated.num_tokens,
            "seconds": seconds,
            "git": git_state(),
            "rows": [asdict(row) for row in table_rows],
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(arguments.out, json.dumps(figures, indent=1) + "\n")


def report_on_answers(arguments: argparse.Namespace) -> None:
    """Does the same for answers that servers gave, whose counters stand beside what is simulated."""
    target = TargetConfig(path=str(arguments.target), dtype=arguments.dtype)
    ways = [parse_speculation(text) for text in arguments.speculation or []]
    rows = recorded.beside(target, arguments.drafter, recorded.read_answers(arguments.store), ways, arguments.seed)
    Console().print(recorded.as_table(rows))
    if arguments.out is not None:
        figures = {
            "answers": str(arguments.store),
            "answers_digest": digest_file(arguments.store),
            "target": str(arguments.target),
            "dtype": arguments.dtype,
            "seed": arguments.seed,
            "git": git_state(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "rows": [asdict(row) for row in rows],
        }
        write_whole(arguments.out, json.dumps(figures, indent=1) + "\n")


@dataclass(frozen=True)
class Simulated:
    """What one pass over a store's samples counted."""

    rounds: Mapping[tuple[str, Speculation], list[AnswerRounds]]
    num_tokens: int  # of the samples, prompts included


def run(
    store_path: Path,
    target_path: Path,
    drafter_paths: Sequence[Path],
    speculations: Sequence[Speculation],
    *,
    held_out_share: float | None,
    dtype: torch.dtype,
) -> Simulated:
    """Simulates on the GPU if there is one.

    Raises:
        UserError: the drafters read other layers, or not those of the store, or no sample is left.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target_config = load_target_config(target_path)
    drafters = {str(path): load_drafter(path, target_config).to(device, dtype).eval() for path in drafter_paths}
    for drafter in drafters.values():
        store = open_store(store_path, drafter.config, TargetConfig(str(target_path)))
    if len(store) == 0:
        raise UserError(f"a store must hold samples to simulate on, got none ({store_path}); capture some first")
    indices = list(range(len(store))) if held_out_share is None else store.split(held_out_share)[1]
    if not indices:
        raise UserError(
            f"--held-out-share must leave samples of the store, got none of {len(store)} with {held_out_share} "
            f"({store_path}); use the share of the training run"
        )
    target = load_target_weights(target_path).to(device, dtype)
    with progress_bar("simulating", len(indices), "sample") as advance:
        limit = batch_tokens_of(drafter.config, target.embed_tokens)
        packs = packs_of_store(store, indices, limit, target.embed_tokens.device)
        rounds = simulate_all(drafters, target, packs, speculations, advance=advance)
    return Simulated(rounds, sum(store.entries[index].num_tokens for index in indices))


def read_domains(path: Path) -> dict[str, str]:
    """Returns the domain of each conversation that has one, by id."""
    read = list(read_conversations(path))
    bad_rows = [row for row in read if isinstance(row, BadRow)]
    if bad_rows:
        logger.warning(
            "%s cannot be read, so without a domain; the first is line %d: %s",
            counted(len(bad_rows), "row"), bad_rows[0].line, bad_rows[0].reason,
        )  # fmt: skip
    return {row.id: row.domain for row in read if isinstance(row, Conversation) and row.domain is not None}


def summarise_all(
    rounds: Mapping[tuple[str, Speculation], list[AnswerRounds]], domains: Mapping[str, str], seed: int
) -> list[Row]:
    """Returns a row for all answers and one for each domain, of every drafter and way of serving."""
    table_rows = []
    for (drafter, speculation), answers in rounds.items():
        by_domain: defaultdict[str, list[AnswerRounds]] = defaultdict(list)
        for answer in answers:
            if answer.sample_id in domains:
                by_domain[domains[answer.sample_id]].append(answer)
        for domain, some in [(EVERYTHING, answers), *sorted(by_domain.items())]:
            if any(answer.rounds > 0 for answer in some):
                table_rows.append(Row(drafter, speculation.name, domain, summarise(some, seed)))
    return table_rows


def as_table(table_rows: Sequence[Row]) -> Table:
    """Lays the rows out for people."""
    names = names_apart(list(dict.fromkeys(row.drafter for row in table_rows)))
    texts, numbers = ("drafter", "speculation", "domain"), ("tau", "95 %", "(N-1)/R", "answers")
    table = narrow_table("Acceptance length tau, simulated", texts, numbers, ["by position"])
    for row in table_rows:
        found = row.acceptance
        conditional = " ".join("-" if share is None else f"{share:.0%}" for share in found.conditional)
        cells = [f"{found.tau:.3f}", f"{found.low:.2f}-{found.high:.2f}", f"{found.tau_without_prefill:.3f}"]
        cells += [str(found.num_answers), conditional]
        table.add_row(names[row.drafter], row.speculation, row.domain, *cells)
    return table
