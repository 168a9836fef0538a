"""The texts that have figures, and what holds them to their JSON."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def experiments() -> str:
    return (ROOT / "docs/EXPERIMENTS.md").read_text(encoding="utf-8")


def training() -> str:
    return (ROOT / "docs/TRAINING.md").read_text(encoding="utf-8")


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}".replace("%", " %")


def result_named_in(text: str, name: str) -> dict[str, Any]:
    """Returns the JSON of that name in the tree, which the text must name with its commit."""
    result: dict[str, Any] = json.loads((ROOT / name).read_text(encoding="utf-8"))
    assert name in text
    assert f"commit {result['commit'][:7]}" in text, name
    return result


def assert_holds(text: str, lines: Iterable[str]) -> None:
    for line in lines:
        assert line in text, f"the text must have the line {line!r}"
