"""What servers did with the drafter and without, as pictures: one PNG for each question that people ask."""

import importlib.util
import io
from collections.abc import Callable, Sequence
from typing import Any

from eagle3.draft.acceptance import Acceptance
from eagle3.evaluation.cells import CONTEXT_EDGES, PLAIN, Cell, ServingReport, context_bucket

WANTED = 0.02  # how far served and simulated tau may be apart, of the served one


def check_pictures() -> list[str]:
    """Returns what keeps pictures from being drawn; asked before any server is started."""
    if importlib.util.find_spec("matplotlib") is not None:
        return []
    return ["the report must have matplotlib for its pictures, got none installed; pip install matplotlib"]


def draw(report: ServingReport) -> dict[str, bytes]:
    """Returns a PNG for each name of NAMES."""
    from matplotlib import rc_context  # an extra: check_pictures asks for it
    from matplotlib.figure import Figure

    pictures = {}
    for name, draw_one in _DRAWN.items():
        with rc_context({"text.parse_math": False}):  # a question set may be called $x$
            figure = Figure(figsize=(7.5, 4.2), dpi=110, layout="constrained")
            axes = figure.subplots()
            draw_one(axes, report)
            if axes.get_legend_handles_labels()[1]:
                axes.legend(fontsize="small")
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png")
        pictures[name] = buffer.getvalue()
    return pictures


def _draw_sets(axes: Any, report: ServingReport) -> None:
    """Served tau of every set with its interval, and the simulated one as a cross."""
    cells = _first_cells(report)
    names = list(dict.fromkeys(name for cell in cells for name in cell.by_set))
    _draw_groups(axes, cells, names, [cell.by_set for cell in cells])
    for index, cell in enumerate(cells):
        for row, name in enumerate(names):
            if name in cell.simulated_by_set:
                tau = cell.simulated_by_set[name].tau
                axes.plot(_beside(row, index, len(cells)), tau, "x", color="black", markersize=5)
    axes.set(title="tau by question set, 95 % over questions; x: simulated", ylabel="tokens a round")


def _draw_positions(axes: Any, report: ServingReport) -> None:
    for cell in _first_cells(report):
        assert cell.acceptance is not None, cell
        points = [(i, share) for i, share in enumerate(cell.acceptance.conditional, start=1) if share is not None]
        axes.plot([i for i, _ in points], [share for _, share in points], "-o", label=_name(cell), markersize=4)
    axes.set(title="accepted, of the drafts at a position that were reached", xlabel="draft position", ylim=(0, 1))


def _draw_speed_up(axes: Any, report: ServingReport) -> None:
    for server, temperature in dict.fromkeys((cell.server, cell.temperature) for cell in report.cells):
        cells = [c for c in report.cells if (c.server, c.temperature) == (server, temperature)]
        points = sorted((cell.concurrency, up) for cell in cells if (up := report.speed_up(cell)) is not None)
        if points:
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, "-o", label=_name(cells[0]), markersize=4)
    axes.axhline(1, color="grey", linewidth=1, linestyle="--")
    axes.set_xscale("log", base=2)
    counts = sorted({cell.concurrency for cell in report.cells})
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set(title="speed-up over the target alone", xlabel="requests in flight")


def _draw_contexts(axes: Any, report: ServingReport) -> None:
    cells = _first_cells(report)
    ordered = [context_bucket(edge) for edge in (0, *CONTEXT_EDGES)]
    names = [name for name in ordered if any(name in cell.by_context for cell in cells)]
    _draw_groups(axes, cells, names, [cell.by_context for cell in cells])
    axes.set(title="tau by tokens of the prompt, 95 % over questions", ylabel="tokens a round")


def _draw_simulated(axes: Any, report: ServingReport) -> None:
    taus: list[float] = []
    for cell in _first_cells(report):
        pairs = [(cell.by_set[name].tau, each.tau) for name, each in cell.simulated_by_set.items()]
        if cell.acceptance is not None and cell.simulated is not None:
            pairs.append((cell.acceptance.tau, cell.simulated.tau))
        if pairs:
            served, simulated = zip(*pairs, strict=True)
            axes.plot(served, simulated, "o", label=_name(cell), markersize=5, fillstyle="none")
            taus += served
    if taus:
        ends = [min(taus) * 0.98, max(taus) * 1.02]
        axes.plot(ends, ends, color="grey", linewidth=1)
        low, high = ([end * (1 + side) for end in ends] for side in (-WANTED, WANTED))
        axes.fill_between(ends, low, high, color="grey", alpha=0.15, linewidth=0)
    axes.set(title=f"the same answers; grey: within {WANTED:.0%}", xlabel="served tau", ylabel="simulated tau")


_DRAWN: dict[str, Callable[[Any, ServingReport], None]] = {
    "tau-by-set": _draw_sets,
    "acceptance-by-position": _draw_positions,
    "speed-up": _draw_speed_up,
    "tau-by-prompt-length": _draw_contexts,
    "simulated-against-served": _draw_simulated,
}
NAMES = tuple(_DRAWN)


def _draw_groups(
    axes: Any, cells: Sequence[Cell], names: Sequence[str], groups: Sequence[dict[str, Acceptance]]
) -> None:
    """Draws each cell's tau of each group, side by side."""
    for index, (cell, some) in enumerate(zip(cells, groups, strict=True)):
        rows = [row for row, name in enumerate(names) if name in some]
        found = [some[names[row]] for row in rows]
        sides = [[each.tau - each.low for each in found], [each.high - each.tau for each in found]]
        xs = [_beside(row, index, len(cells)) for row in rows]
        if rows:
            axes.errorbar(xs, [each.tau for each in found], yerr=sides, fmt="o", label=_name(cell), capsize=3)
    axes.set_xticks(range(len(names)), names)


def _beside(row: int, index: int, count: int) -> float:
    return row + (index - (count - 1) / 2) * min(0.18, 0.8 / count)


def _first_cells(report: ServingReport) -> list[Cell]:
    """Returns, of each way of serving and temperature, the cell that asked all prompts."""
    found: dict[tuple[str, float], Cell] = {}
    for cell in report.cells:
        if cell.server != PLAIN:
            found.setdefault((cell.server, cell.temperature), cell)
    return list(found.values())


def _name(cell: Cell) -> str:
    return f"{cell.server}, T={cell.temperature:g}"
