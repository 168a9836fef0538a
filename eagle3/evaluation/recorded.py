"""Answers that servers gave, simulated: by one more prefill of their tokens, without a server."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from eagle3.config import TargetConfig, UserError
from eagle3.draft.acceptance import Acceptance, AnswerRounds, summarise
from eagle3.draft.export import load_drafter
from eagle3.draft.target_weights import load_target_config, load_target_weights
from eagle3.evaluation.cells import PLAIN, Asking, Served, by_group
from eagle3.evaluation.report import names_apart, narrow_table, progress_bar
from eagle3.evaluation.served import ServedAnswer, served_rounds
from eagle3.evaluation.simulate import Speculation, batch_tokens_of, packs_of, parse_speculation, simulate_all
from eagle3.evaluation.target import load_local_target
from eagle3.prompts.tokenizers import load_tokenizer

ANSWERS_NAME = "answers.jsonl"
EVERYTHING = "all"
NEEDED: dict[str, type | tuple[type, ...]] = {
    "server": str,
    "temperature": (int, float),
    "sample_id": str,
    "prompt_ids": list,
    "token_ids": list,
    "rounds": int,
}


@dataclass(frozen=True)
class Beside:
    """What a drafter does on some answers of a server, beside what the server counted."""

    drafter: str
    server: str
    temperature: float
    speculation: str
    set: str  # a question set's name, or EVERYTHING
    served: Acceptance | None  # None: the server drafted in another way, or not at all
    simulated: Acceptance


def simulate_served(
    config: TargetConfig, drafter_path: Path, asked: Sequence[tuple[Served, Sequence[Speculation]]]
) -> list[dict[Speculation, list[AnswerRounds]]]:
    """Returns the rounds of each server's answers, if the drafter were served in those ways, with one pass over them.

    The target is loaded into this process, and freed with the return.

    Raises:
        UserError: target or drafter cannot be loaded, or do not fit each other.
    """
    drafter = load_drafter(drafter_path, load_target_config(Path(config.path)))
    tokenizer = load_tokenizer(config.path, config.trust_remote_code)
    target = load_local_target(config, drafter.config.capture_layers, tokenizer)
    drafter.to(target.device, target.dtype).eval()
    weights = load_target_weights(Path(config.path)).to(target.device, target.dtype)
    limit = batch_tokens_of(drafter.config, weights.embed_tokens)
    found = []
    for served, ways in asked:
        turns = zip(served.asking.sample_ids, served.asking.prompts, served.answers, strict=True)
        title = f"simulating {served.server}, T={served.temperature:g}"
        with progress_bar(title, len(served.answers), "answer") as advance:
            samples = (target.features(name, prompt, answer.token_ids) for name, prompt, answer in turns)
            packs = packs_of(samples, limit, target.device)
            rounds = simulate_all({"": drafter}, weights, packs, ways, advance=advance)
        found.append({way: rounds["", way] for way in ways})
    return found


def read_answers(path: Path) -> list[Served]:
    """Reads what `evaluate.py` wrote of its servers' answers.

    Raises:
        UserError: a line is something else, or there is none.
    """
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            values = json.loads(line)
            is_right = all(isinstance(values[name], kind) for name, kind in NEEDED.items())
            ids = [*values["prompt_ids"], *values["token_ids"]]
            is_right &= bool(values["prompt_ids"]) and all(type(each) is int and each >= 0 for each in ids)
        except (ValueError, TypeError, KeyError):
            is_right = False
        if not is_right:
            raise UserError(
                f"every line of answers must be a JSON object with {', '.join(NEEDED)}, got {line[:60]!r} "
                f"({path}, line {number}); name the {ANSWERS_NAME} of an evaluation with `serve`, or a feature store"
            )
        groups.setdefault((values["server"], float(values["temperature"])), []).append(values)
    if not groups:
        raise UserError(f"a file of answers must have a line, got none ({path}); evaluate again")
    return [_served(server, temperature, lines) for (server, temperature), lines in groups.items()]


def _served(server: str, temperature: float, lines: Sequence[dict[str, Any]]) -> Served:
    names = [line["sample_id"] for line in lines]
    sets = [line["set"] if isinstance(line.get("set"), str) else None for line in lines]
    asking = Asking(names, [line["prompt_ids"] for line in lines], sets)
    answers = [ServedAnswer(line["token_ids"], len(line["token_ids"]), line["rounds"], []) for line in lines]
    rounds = served_rounds(names, answers, 0) if server != PLAIN else []
    return Served(server, temperature, asking, answers, rounds, [])


def beside(
    target: TargetConfig, drafters: Sequence[Path], answers: Sequence[Served], ways: Sequence[Speculation], seed: int
) -> list[Beside]:
    """Simulates all answers in each way of serving, or those of each server in its own way if none is named.

    Raises:
        UserError: nothing is left to simulate, or target and drafters do not fit.
    """
    asked = [(each, list(ways)) for each in answers]
    if not ways:
        asked = [(each, [parse_speculation(each.server)]) for each in answers if each.server != PLAIN]
    if not asked:
        raise UserError("--speculation must be given for answers of a plain server, got none; name a way of serving")
    rows = []
    for drafter in drafters:
        simulated_ways = zip(asked, simulate_served(target, drafter, asked), strict=True)
        for served, way, rounds in ((each, *one) for (each, _), found in simulated_ways for one in found.items()):
            counted = served.rounds if _is_its_own(way, served.server) else []
            groups = {EVERYTHING: summarise(rounds, seed)} | by_group(rounds, served.asking.sets, seed)
            known = by_group(counted, served.asking.sets, seed) if counted else {}
            known |= {EVERYTHING: summarise(counted, seed)} if counted else {}
            rows += [
                Beside(str(drafter), served.server, served.temperature, way.name, name, known.get(name), simulated)
                for name, simulated in groups.items()
            ]
    return rows


def _is_its_own(way: Speculation, server: str) -> bool:
    """Tells whether a server drafted so; by which rule it accepted, its name does not say."""
    if server == PLAIN:
        return False
    own = parse_speculation(server)
    return (way.num_steps, way.topk, way.num_draft_tokens) == (own.num_steps, own.topk, own.num_draft_tokens)


def as_table(rows: Sequence[Beside]) -> Table:
    """Lays the rows out for people."""
    drafters = names_apart(list(dict.fromkeys(row.drafter for row in rows)))
    several = len(drafters) > 1
    table = narrow_table(
        "Acceptance length tau, counted and simulated on the same answers",
        [*(["drafter"] if several else []), "server", "T", "speculation", "set"],
        ["answers", "tokens", "served", "simulated", "differs"],
    )
    for row in rows:
        served, simulated = row.served, row.simulated
        counted = ["-", f"{simulated.tau:.3f}", "-"]
        if served is not None:
            counted = [f"{served.tau:.3f}", f"{simulated.tau:.3f}", f"{simulated.tau / served.tau - 1:+.2%}"]
        names = [*([drafters[row.drafter]] if several else []), row.server, f"{row.temperature:g}"]
        names += [row.speculation, row.set]
        table.add_row(*names, str(simulated.num_answers), str(simulated.num_tokens), *counted)
    return table
