"""The texts that have figures."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def experiments() -> str:
    return (ROOT / "docs/EXPERIMENTS.md").read_text(encoding="utf-8")


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}".replace("%", " %")
