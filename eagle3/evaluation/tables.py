"""A comparison as tables of text, for the terminal and for the page alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3.evaluation.comparison import MEASURES, Best, Comparison, Verdict
from eagle3.words import counted


@dataclass(frozen=True)
class TextTable:
    """Rows of cells under headings."""

    title: str
    headings: list[str]
    rows: list[list[str]]


def tables(comparison: Comparison) -> list[TextTable]:
    """Returns all that a comparison found; what no run has gets no row."""
    names = [contender.name for contender in comparison.contenders]
    found = [
        TextTable("What differs", ["", *names], [
            [name, *(_shown(value) for value in row)] for name, row in comparison.differences.items()
        ]),
        TextTable("Acceptance length tau, 95 % interval over questions", ["", *names], _acceptance_rows(comparison)),
        TextTable("Best checkpoint, by held-out tau", ["", *names], _best_rows(comparison)),
        TextTable("Speed, one stream", ["", *names], _number_rows(comparison.speed, lambda value: f"{value:.2f}")),
        TextTable("Cost", ["", *names], _number_rows(comparison.cost, _amount)),
        TextTable(
            f"Against {names[0]}, question by question",
            ["", "questions", "tau", "these drafters, 95 %", "p", "the recipes, 95 %", "p", ""],
            [_verdict_row(verdict) for verdict in comparison.verdicts],
        ),
    ]  # fmt: skip
    return [table for table in found if table.rows]


def sentences(comparison: Comparison) -> list[str]:
    """Returns the answer in words, and how far to trust it."""
    spoken = [_sentence(verdict) for verdict in comparison.verdicts]
    spoken += [f"{remark}." for remark in comparison.remarks]
    if comparison.verdicts:
        spoken.append(
            f"The recipes' interval reckons with {comparison.spread:.1%} of tau, the standard deviation between "
            f"trainings that differ by their seed alone; name several seeds of one recipe to have it measured."
        )
    if len({verdict.contender for verdict in comparison.verdicts}) > 1:
        spoken.append(
            "One in twenty tests is an alarm by chance: of many contenders the best one looks better than it is."
        )
    return spoken


def _acceptance_rows(comparison: Comparison) -> list[list[str]]:
    rows = []
    for measure, column in comparison.acceptance.items():
        drafts = sorted({each for each in comparison.num_draft_tokens[measure] if each is not None})
        numbers = " or ".join([*map(str, drafts[:-1]), *(counted(each, "draft") for each in drafts[-1:])])
        title = f"{MEASURES[measure]}, {numbers or 'unknown drafts'} a round"
        rows.append([title, *("-" if a is None else f"{a.tau:.3f} ({a.low:.3f}-{a.high:.3f})" for a in column)])
        rows.append([
            "  (N-1)/R; by position",
            *(
                "-" if a is None else f"{a.tau_without_prefill:.3f}; " + " ".join(
                    "-" if share is None else f"{share:.0%}" for share in a.conditional
                )
                for a in column
            ),
        ])  # fmt: skip
    return rows


def _best_rows(comparison: Comparison) -> list[list[str]]:
    if not any(comparison.best):
        return []
    return [
        ["step", *("-" if best is None else str(best.step) for best in comparison.best)],
        ["tau", *("-" if best is None else _best_tau(best) for best in comparison.best)],
    ]


def _best_tau(best: Best) -> str:
    interval = "unknown" if best.low is None or best.high is None else f"{best.low:.3f}-{best.high:.3f}"
    return f"{best.tau:.3f} ({interval})"


def _number_rows(rows: dict[str, list[float | None]], show: Callable[[float], str]) -> list[list[str]]:
    return [
        [name, *("-" if value is None else show(value) for value in row)]
        for name, row in rows.items()
        if any(value is not None for value in row)
    ]


def _verdict_row(verdict: Verdict) -> list[str]:
    drafters, recipes = verdict.drafters, verdict.recipes
    pairs = str(drafters.num_pairs) + (f" ({drafters.num_unpaired} unpaired)" if drafters.num_unpaired else "")
    return [
        f"{verdict.contender}, {MEASURES[verdict.measure]}",
        pairs,
        f"{drafters.difference:+.3f}",
        f"{drafters.low:+.3f} to {drafters.high:+.3f}",
        f"{drafters.p_value:.4f}",
        f"{recipes.low:+.3f} to {recipes.high:+.3f}",
        f"{recipes.p_value:.4f}",
        _word(verdict),
    ]


def _word(verdict: Verdict) -> str:
    if not verdict.recipes.is_real:
        return "may be luck"
    return "better" if verdict.drafters.difference > 0 else "worse"


def _sentence(verdict: Verdict) -> str:
    drafters, recipes = verdict.drafters, verdict.recipes
    what = f"{MEASURES[verdict.measure]}, {counted(drafters.num_pairs, 'question')}"
    if recipes.is_real:
        better, worse = (verdict.contender, verdict.baseline)[:: 1 if drafters.difference > 0 else -1]
        low, high = sorted([abs(recipes.low), abs(recipes.high)])
        return (
            f"{better} is better than {worse} by {abs(drafters.difference):.3f} tokens a round ({low:.3f} to "
            f"{high:.3f}; {what})."
        )
    if drafters.is_real:
        return (
            f"{verdict.contender} and {verdict.baseline} differ by {drafters.difference:+.3f} tokens a round on "
            f"questions like these ({what}), but no more than another seed would make them: the recipes may be equal."
        )
    return (
        f"{verdict.contender} and {verdict.baseline} differ by {drafters.difference:+.3f} tokens a round, which other "
        f"questions might turn around ({what})."
    )


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}"  # W&B makes 1 of 1.0
    return str(value)


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3f}"
