"""`python -m eagle3 SUBCOMMAND` finds its subcommand."""

import sys
from importlib import import_module
from types import SimpleNamespace

import pytest

from eagle3 import __main__ as entry
from eagle3.config import UserError


def test_an_unknown_subcommand_names_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"a subcommand must be one of .*doctor.*, got doktor"):
        entry.run_subcommand(["doktor"])
    with pytest.raises(UserError, match="got none"):
        entry.run_subcommand([])


@pytest.mark.parametrize("module", entry.SUBCOMMANDS.values())
def test_every_subcommand_is_there_and_says_what_it_takes(module: str) -> None:
    with pytest.raises(SystemExit, match="0"):
        import_module(module).main(["--help"])


def test_a_subcommands_answer_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "count", SimpleNamespace(main=len))
    monkeypatch.setitem(entry.SUBCOMMANDS, "count", "count")
    with pytest.raises(SystemExit) as exit_info:
        entry.run_subcommand(["count", "a", "b"])
    assert exit_info.value.code == 2


@pytest.mark.parametrize("name", ["-h", "--help"])
def test_help_names_the_subcommands(capsys: pytest.CaptureFixture[str], name: str) -> None:
    entry.run_subcommand([name])
    said = capsys.readouterr().out
    assert "usage: python -m eagle3 SUBCOMMAND" in said
    assert all(subcommand in said for subcommand in entry.SUBCOMMANDS)
