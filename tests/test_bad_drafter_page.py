"""docs/BAD_DRAFTER.md lists what the doctor can find, all of it and nothing else."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_page_names_every_finding() -> None:
    sources = [path.read_text() for path in (ROOT / "eagle3" / "evaluation" / "doctor").glob("*.py")]
    named = {name for source in sources for name in re.findall(r'Finding\(\s*"([a-z0-9-]+)"', source)}
    page = (ROOT / "docs" / "BAD_DRAFTER.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`([a-z0-9-]+)`", row.split("|")[1])}
    assert listed == named
