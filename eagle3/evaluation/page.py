"""A comparison as one HTML file with its picture inside, the picture as a PNG, and the figures as JSON."""

import base64
import dataclasses
import html
import io
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3.config import UserError
from eagle3.evaluation.comparison import MEASURES, Comparison
from eagle3.evaluation.tables import TextTable, sentences, tables
from eagle3.files import write_whole
from eagle3.tracking import git_state

PAGE_NAME, PICTURE_NAME, FIGURES_NAME = "comparison.html", "comparison.png", "comparison.json"
STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:75em;padding:0 1em}"
    "table{border-collapse:collapse;margin:1em 0}caption{text-align:left;font-weight:600;padding:.3em 0}"
    "td,th{border-bottom:1px solid #ddd;padding:.25em .9em;text-align:right;font-variant-numeric:tabular-nums}"
    "td:first-child,th:first-child{text-align:left}img{max-width:100%}code{font-size:90%}"
)


def write_page(comparison: Comparison, directory: Path, command: Sequence[str]) -> list[Path]:
    """Writes page, picture and figures; returns their paths.

    Raises:
        UserError: matplotlib is not installed.
    """
    picture = draw(comparison)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / PICTURE_NAME).write_bytes(picture)
    write_whole(directory / PAGE_NAME, _page(comparison, picture, command))
    write_whole(directory / FIGURES_NAME, json.dumps(_figures(comparison, command), indent=1) + "\n")
    return [directory / name for name in (PAGE_NAME, PICTURE_NAME, FIGURES_NAME)]


def draw(comparison: Comparison) -> bytes:
    """Returns a PNG of the curves on common axes, of every tau with its interval, and of the paired differences.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context  # an extra: only whoever wants the picture needs it
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "a page must have matplotlib for its picture, got none installed; pip install matplotlib, "
            "or leave --out away for the tables alone"
        ) from None
    with rc_context({"text.parse_math": False}):  # a run may be called $x$
        figure = Figure(figsize=(11, 7.5), dpi=110, layout="constrained")
        (loss, tau), (intervals, paired) = figure.subplots(2, 2)
        loss.sharex(tau)
        _draw_curves(loss, comparison, [("loss", "-", "train"), ("held_out/loss", "--", "held-out")], "loss")
        _draw_curves(tau, comparison, [("held_out/tau", "-o", "")], "held-out tau, its best checkpoint ringed")
        for index, best in enumerate(comparison.best):
            if best is not None:
                tau.plot(best.step, best.tau, "o", color=f"C{index}", markersize=11, fillstyle="none")
        _draw_intervals(intervals, comparison)
        _draw_verdicts(paired, comparison)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_curves(axes: Any, comparison: Comparison, shown: Sequence[tuple[str, str, str]], title: str) -> None:
    for index, contender in enumerate(comparison.contenders):
        for metric, style, suffix in shown:
            points = contender.training.curve(metric) if contender.training is not None else {}
            if points:
                label = f"{contender.name} {suffix}".strip()
                axes.plot(list(points), list(points.values()), style, color=f"C{index}", label=label, markersize=4)
    axes.set(title=title, xlabel="step")
    if axes.lines:
        axes.legend(fontsize="small")


def _draw_intervals(axes: Any, comparison: Comparison) -> None:
    measures = [measure for measure in comparison.acceptance if measure != "untrained"]
    count = len(comparison.contenders)
    for row, measure in enumerate(measures):
        for index, acceptance in enumerate(comparison.acceptance[measure]):
            if acceptance is not None:
                middle = acceptance.tau
                sides = [[middle - acceptance.low], [acceptance.high - middle]]
                axes.errorbar(
                    middle, row + (index - (count - 1) / 2) * 0.18, xerr=sides, fmt="o", color=f"C{index}", capsize=3
                )
    axes.set_yticks(range(len(measures)), [MEASURES[measure].replace(",", "\n") for measure in measures])
    axes.set_ylim(max(1, len(measures)) - 0.5, -0.5)  # without a measure there are axes all the same
    axes.set(title="tau, 95 % over questions", xlabel="tokens a round")


def _draw_verdicts(axes: Any, comparison: Comparison) -> None:
    colours = {contender.name: f"C{index}" for index, contender in enumerate(comparison.contenders)}
    for row, verdict in enumerate(comparison.verdicts):
        colour = colours[verdict.contender]
        axes.plot([verdict.recipes.low, verdict.recipes.high], [row, row], color=colour, linewidth=1.5)
        axes.plot([verdict.drafters.low, verdict.drafters.high], [row, row], color=colour, linewidth=5)
        axes.plot(verdict.drafters.difference, row, "o", color="white", markeredgecolor=colour)
    axes.axvline(0, color="grey", linewidth=1)
    labels = [f"{verdict.contender}\n{MEASURES[verdict.measure].split(',')[0]}" for verdict in comparison.verdicts]
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(max(1, len(labels)) - 0.5, -0.5)
    label = "tokens a round; thick: these drafters, thin: the recipes"
    axes.set(title=f"tau against {comparison.contenders[0].name}", xlabel=label)


def _figures(comparison: Comparison, command: Sequence[str]) -> dict[str, Any]:
    """Returns the comparison for JSON, with how it was made and where the first of its runs ran."""
    provenance = comparison.contenders[0].runs()[0].provenance
    figures = {
        field.name: getattr(comparison, field.name)
        for field in dataclasses.fields(comparison)
        if field.name != "contenders"
    }
    return {
        "command": " ".join(command),
        "date": time.strftime("%Y-%m-%d"),
        "commit": git_state()["commit"],
        "hardware": provenance["hardware"],
        "versions": provenance["versions"],
        "runs": [[dataclasses.asdict(run.identity) for run in each.runs()] for each in comparison.contenders],
        **json.loads(json.dumps(figures, default=dataclasses.asdict)),
        "tables": [dataclasses.asdict(table) for table in tables(comparison)],
        "sentences": sentences(comparison),
    }


def _page(comparison: Comparison, picture: bytes, command: Sequence[str]) -> str:
    title = html.escape(" against ".join(contender.name for contender in comparison.contenders))
    encoded = base64.b64encode(picture).decode()
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>",
        *(f"<p>{html.escape(sentence)}</p>" for sentence in sentences(comparison)),
        f'<img alt="curves of loss and tau, intervals, paired differences" src="data:image/png;base64,{encoded}">',
        *(html_table(table) for table in tables(comparison)),
        f"<p><code>{html.escape(' '.join(command))}</code></p></body></html>",
    ]
    return "\n".join(parts) + "\n"


def html_table(table: TextTable) -> str:
    """Returns a table as HTML."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.headings)
    rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    return f"<table><caption>{html.escape(table.title)}</caption><tr>{head}</tr>{rows}</table>"
