"""What servers did with the drafter and without, in tables and in words: terminal, Markdown, and a page of its own."""

import dataclasses
import html
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from eagle3.evaluation.page import STYLE
from eagle3.evaluation.serving import NEAR_TIE, PLAIN, Cell, ServingReport
from eagle3.evaluation.tables import TextTable

WIDTH, HEIGHT, MARGIN = 640, 300, 45  # of a chart, in pixels
COLOURS = ("#1f6fb4", "#d1581c", "#2a8c4a", "#8a4fbf", "#b8860b", "#444444")


def speed_up(report: ServingReport, cell: Cell) -> float | None:
    """Returns a cell's tokens per second over the plain server's at the same temperature and concurrency."""
    plain = [
        each
        for each in report.cells
        if (each.server, each.temperature, each.concurrency) == (PLAIN, cell.temperature, cell.concurrency)
    ]
    return cell.tokens_per_second / plain[0].tokens_per_second if plain and cell.server != PLAIN else None


def break_even(report: ServingReport) -> list[str]:
    """Says, for each way of serving, up to how many requests at a time the drafter makes this target faster here."""
    sentences = []
    for server, temperature in dict.fromkeys((c.server, c.temperature) for c in report.cells if c.server != PLAIN):
        cells = [c for c in report.cells if (c.server, c.temperature) == (server, temperature)]
        ups = [(c.concurrency, up) for c in cells if (up := speed_up(report, c)) is not None]
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
                f"{where}: faster up to {last[0]} requests at a time ({last[1]:.2f}x), slower from {first_slower[0]} "
                f"({first_slower[1]:.2f}x): switch speculation off above {last[0]}."
            )
    return sentences


def words(report: ServingReport) -> list[str]:
    """Returns what the tables leave open, in sentences."""
    lines = break_even(report)
    for each in report.agreements:
        differing = each.num_answers - each.num_equal
        lines.append(
            f"Speculation {each.server}, greedy: {each.num_equal} of {each.num_answers} answers are the plain server's "
            f"token for token; {each.num_near_ties} of the other {differing} part at a near-tie ({NEAR_TIE} nats)."
        )
    versions = sorted({facts.version for facts in report.facts.values()})
    lines.append(f"SGLang {', '.join(versions)}; {report.num_prompts} prompts; all servers with the same flags.")
    return [*lines, *(f"Warning: {finding}." for finding in report.findings)]


def text_tables(report: ServingReport) -> list[TextTable]:
    """Returns speed, acceptance, histograms and context lengths."""
    speed: list[list[str]] = []
    acceptance: list[list[str]] = []
    contexts: list[list[str]] = []
    sets: list[list[str]] = []
    for cell in report.cells:
        up = speed_up(report, cell)
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
    return [
        TextTable("Speed", [*key, "tokens/s", *latency, "speed-up"], speed),
        TextTable("Acceptance length", [*key, *taus], acceptance),
        TextTable("By question set", [*key, "set", "tau", "95 %", "answers"], sets),
        TextTable("By prompt length in tokens", [*key, "tokens", "tau", "95 %", "answers"], contexts),
    ]


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


def to_dict(report: ServingReport) -> dict[str, Any]:
    """Returns the report for JSON, with what follows from its figures."""
    values = dataclasses.asdict(report)
    for cell, entry in zip(report.cells, values["cells"], strict=True):
        entry |= {"tokens_per_second": cell.tokens_per_second, "speed_up": speed_up(report, cell)}
    return values | {"words": words(report)}


def markdown(report: ServingReport) -> str:
    """Returns the report as Markdown."""
    parts = ["# Served with the drafter and without", "", *words(report)]
    for table in text_tables(report):
        parts += ["", f"## {table.title}", "", f"| {' | '.join(table.headings)} |", "|" + "---|" * len(table.headings)]
        parts += [f"| {' | '.join(row)} |" for row in table.rows]
    return "\n".join(parts) + "\n"


def page(report: ServingReport) -> str:
    """Returns the report as one HTML file that needs no other."""
    title = "Served with the drafter and without"
    ups: dict[str, list[tuple[float, float]]] = {}
    positions: dict[str, list[tuple[float, float]]] = {}
    for cell in report.cells:
        name = f"{cell.server}, T={cell.temperature:g}"
        if (up := speed_up(report, cell)) is not None:
            ups.setdefault(name, []).append((cell.concurrency, up))
        if cell.acceptance is not None and name not in positions:
            shares = enumerate(cell.acceptance.conditional, start=1)
            positions[name] = [(index, share) for index, share in shares if share is not None]
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>",
        *(f"<p>{html.escape(sentence)}</p>" for sentence in words(report)),
        _chart("Speed-up by requests in flight", ups, level=1.0),
        _chart("Accepted, of the drafts at a position that were reached", positions, level=None),
    ]
    for table in text_tables(report):
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.headings)
        rows = "".join(f"<tr>{''.join(f'<td>{html.escape(c)}</td>' for c in row)}</tr>" for row in table.rows)
        parts.append(f"<table><caption>{html.escape(table.title)}</caption><tr>{head}</tr>{rows}</table>")
    return "\n".join([*parts, "</body></html>"]) + "\n"


def _chart(title: str, lines: dict[str, list[tuple[float, float]]], level: float | None) -> str:
    """Draws lines over evenly spaced x values as SVG, with a dashed line at `level`."""
    xs = sorted({x for points in lines.values() for x, _ in points})
    ys = [y for points in lines.values() for _, y in points] + ([level] if level is not None else [])
    if not xs:
        return ""
    top = max(ys) * 1.1 or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        step = (WIDTH - 2 * MARGIN) / max(1, len(xs) - 1)
        return MARGIN + xs.index(x) * step, HEIGHT - MARGIN - y / top * (HEIGHT - 2 * MARGIN)

    return "".join([f"<h2>{html.escape(title)}</h2>", _svg(lines, xs, top, level, at)])


def _svg(
    lines: dict[str, list[tuple[float, float]]], xs: Sequence[float], top: float, level: float | None, at: Any
) -> str:
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" font-size="12" font-family="sans-serif">']
    for x in xs:
        parts.append(f'<text x="{at(x, 0)[0]:.0f}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{x:g}</text>')
    for share in (0.0, 0.5, 1.0):
        y = at(xs[0], top * share)[1]
        parts.append(f'<text x="{MARGIN - 8}" y="{y + 4:.0f}" text-anchor="end">{top * share:.2f}</text>')
        parts.append(f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y:.0f}" y2="{y:.0f}" stroke="#ddd"/>')
    if level is not None:
        y = at(xs[0], level)[1]
        ends = f'x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y:.0f}" y2="{y:.0f}"'
        parts.append(f'<line {ends} stroke="#888" stroke-dasharray="5 4"/>')
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [at(*point) for point in sorted(points)]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        parts.append(f'<text x="{MARGIN + 5}" y="{16 + 15 * number}" fill="{colour}">{html.escape(name)}</text>')
    return "".join([*parts, "</svg>"])
