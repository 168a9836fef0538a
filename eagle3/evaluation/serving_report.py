"""What servers did with the drafter and without, in tables and in words: terminal, Markdown, and a page of its own."""

import base64
import dataclasses
import html
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from eagle3.evaluation.cells import PLAIN, Cell, ServingReport
from eagle3.evaluation.page import STYLE, html_table
from eagle3.evaluation.report import measure
from eagle3.evaluation.serving import NEAR_TIE
from eagle3.evaluation.simulate import parse_speculation
from eagle3.evaluation.tables import TextTable
from eagle3.words import counted


def break_even(report: ServingReport) -> list[str]:
    """Says, for each way of serving, up to how many requests at a time the drafter makes this target faster here."""
    sentences = []
    for server, temperature in dict.fromkeys((c.server, c.temperature) for c in report.cells if c.server != PLAIN):
        cells = [c for c in report.cells if (c.server, c.temperature) == (server, temperature)]
        ups = [(c.concurrency, up) for c in cells if (up := report.speed_up(c)) is not None]
        ups.sort()
        where = f"Speculation {server} at T={temperature:g}"
        faster = [pair for pair in ups if pair[1] >= 1]
        first_slower = next((pair for pair in ups if pair[1] < 1), None)
        if not ups:
            continue
        if first_slower is None:
            low, high = min(up for _, up in ups), max(up for _, up in ups)
            sentences.append(f"{where}: faster at every concurrency that was measured ({low:.2f}x to {high:.2f}x).")
        elif not faster:
            sentences.append(f"{where}: slower at every concurrency that was measured; leave speculation off.")
        elif faster[0][0] > first_slower[0]:
            sentences.append(
                f"{where}: slower at {first_slower[0]} ({first_slower[1]:.2f}x) and faster beyond: repeat it."
            )
        else:
            last = max(pair for pair in faster if pair[0] < first_slower[0])
            sentences.append(
                f"{where}: faster up to {counted(last[0], 'request')} at a time ({last[1]:.2f}x), slower from "
                f"{first_slower[0]} ({first_slower[1]:.2f}x): switch speculation off above {last[0]}."
            )
    return sentences


def words(report: ServingReport) -> list[str]:
    """Returns what the tables leave open, in sentences."""
    lines = break_even(report)
    for each in report.agreements:
        differing = each.num_answers - each.num_equal
        lines.append(
            f"Speculation {each.server}, greedy: the plain server's token for token are {each.num_equal} of "
            f"{counted(each.num_answers, 'answer')}; {each.num_near_ties} of the other {differing} parted at a "
            f"near-tie ({NEAR_TIE} nats)."
        )
    versions = sorted({facts.version for facts in report.facts.values()})
    lines.append(
        f"SGLang {', '.join(versions)}; {counted(report.num_prompts, 'prompt')}; all servers with the same flags."
    )
    return [*lines, *(f"Warning: {finding}." for finding in report.findings)]


def text_tables(report: ServingReport) -> list[TextTable]:
    """Returns speed, acceptance, histograms, question sets, context lengths, and what is simulated beside it."""
    speed: list[list[str]] = []
    acceptance: list[list[str]] = []
    contexts: list[list[str]] = []
    sets: list[list[str]] = []
    simulations: list[list[str]] = []
    for cell in report.cells:
        up = report.speed_up(cell)
        key = [cell.server, f"{cell.temperature:g}", str(cell.concurrency)]
        latencies = [f"{value:.2f}" for value in (cell.latency_mean, cell.latency_median, cell.latency_95)]
        speed.append([*key, f"{cell.tokens_per_second:.1f}", *latencies, "-" if up is None else f"{up:.2f}x"])
        if cell.acceptance is None:
            continue
        found = cell.acceptance
        shares = " ".join("-" if share is None else f"{share:.0%}" for share in found.conditional)
        steady = "-" if cell.without_loops is None else f"{cell.without_loops.tau:.3f}"
        interval = f"{found.low:.2f}-{found.high:.2f}"
        taus = [f"{found.tau:.3f}", interval, f"{found.mean_answer_tau:.3f}", f"{found.tau_without_prefill:.3f}"]
        simulated = "-" if cell.simulated is None else f"{cell.simulated.tau:.3f}"
        acceptance.append([*key, *taus, simulated, steady, shares, " ".join(map(str, cell.histogram))])
        simulations += [[*key[:2], *row] for row in _beside_simulated(cell)]
        for rows, groups in ((contexts, cell.by_context), (sets, cell.by_set)):
            for group, some in groups.items():
                row = [group, f"{some.tau:.3f}", f"{some.low:.2f}-{some.high:.2f}", str(some.num_answers)]
                rows.append([*key, *row])
    key = ["server", "T", "in flight"]
    latency = ["s a request", "median", "95 %"]
    taus = [
        "tau",
        "95 %",
        "mean of answers",
        "(N-1)/R",
        "simulated",
        "no loops",
        "by position",
        "rounds that accepted 0, 1, ...",
    ]
    simulated_headings = ["answers", "tokens", "served tau", "simulated", "differs by"]
    return [
        TextTable("Speed", [*key, "tokens/s", *latency, "speed-up"], speed),
        TextTable("Acceptance length", [*key, *taus], acceptance),
        TextTable("The same answers, simulated", ["server", "T", "set", *simulated_headings], simulations),
        TextTable("By question set", [*key, "set", "tau", "95 %", "answers"], sets),
        TextTable("By prompt length in tokens", [*key, "tokens", "tau", "95 %", "answers"], contexts),
    ]


def _beside_simulated(cell: Cell) -> list[list[str]]:
    """Returns a row for all answers of a cell, and one for each set, with tau as it was counted and simulated."""
    if cell.simulated is None or cell.acceptance is None:
        return []
    pairs = {name: (cell.by_set[name], simulated) for name, simulated in cell.simulated_by_set.items()}
    rows = []
    for name, (served, simulated) in ({"all": (cell.acceptance, cell.simulated)} | pairs).items():
        differs = f"{simulated.tau / served.tau - 1:+.2%}"
        counts = [str(served.num_answers), str(served.num_tokens)]
        rows.append([name, *counts, f"{served.tau:.3f}", f"{simulated.tau:.3f}", differs])
    return rows


def print_report(report: ServingReport, console: Console) -> None:
    """Prints the tables and the words."""
    for each in text_tables(report):
        table = Table(title=each.title)
        for index, heading in enumerate(each.headings):
            table.add_column(heading, justify="left" if index == 0 else "right")
        for row in each.rows:
            table.add_row(*row)
        console.print(table)
    for line in words(report):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def to_dict(report: ServingReport, seed: int) -> dict[str, Any]:
    """Returns the report for JSON, with what follows from its figures; the answers have files of their own."""
    cells = [
        dataclasses.asdict(cell) | {"tokens_per_second": cell.tokens_per_second, "speed_up": report.speed_up(cell)}
        for cell in report.cells
    ]
    measured = {name: measure(questions, seed) for name, questions in report.questions().items()}
    figures: dict[str, Any] = {f"tau_{name}": each.all_answers.tau for name, each in measured.items()}
    if "trained" in measured:
        figures["num_draft_tokens"] = parse_speculation(report.served[0].server).num_steps
    for name, each in measured.items():
        figures[name] = {"all_answers": dataclasses.asdict(each.all_answers), "without_loops": None}
        if each.without_loops is not None:
            figures[name]["without_loops"] = dataclasses.asdict(each.without_loops)
    return figures | {
        "cells": cells,
        "agreements": [dataclasses.asdict(each) for each in report.agreements],
        "facts": {name: dataclasses.asdict(facts) for name, facts in report.facts.items()},
        "findings": report.findings,
        "num_prompts": report.num_prompts,
        "words": words(report),
    }


def markdown(report: ServingReport) -> str:
    """Returns the report as Markdown."""
    parts = ["# Served with the drafter and without", "", *words(report)]
    for table in text_tables(report):
        parts += ["", f"## {table.title}", "", f"| {' | '.join(table.headings)} |", "|" + "---|" * len(table.headings)]
        parts += [f"| {' | '.join(row)} |" for row in table.rows]
    return "\n".join(parts) + "\n"


def page(report: ServingReport, pictures: Mapping[str, bytes]) -> str:
    """Returns the report as one HTML file that needs no other, its pictures (PNG, by name) inside."""
    title = "Served with the drafter and without"
    images = [
        f'<img alt="{html.escape(name)}" src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
        for name, picture in pictures.items()
    ]
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>",
        *(f"<p>{html.escape(sentence)}</p>" for sentence in words(report)),
        *images,
        *(html_table(table) for table in text_tables(report)),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"
