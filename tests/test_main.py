"""`python -m eagle3 SUBCOMMAND` finds its subcommand, and says what it takes before anything heavy is imported."""

import subprocess
import sys
from types import SimpleNamespace
from typing import get_args

import pytest
from conftest import REPOSITORY

from eagle3 import __main__ as entry
from eagle3.capture.importing import Last, LossMask
from eagle3.commands import features
from eagle3.config import UserError

SCRIPTS = ("extract.py", "train.py", "evaluate.py")
SUBCOMMANDS = [["eagle3/__main__.py", name] for name in entry.SUBCOMMANDS]
WITH_SETTINGS = [
    *([script] for script in SCRIPTS),
    ["eagle3/__main__.py", "plan"],
    ["eagle3/__main__.py", "prompts", "rows.jsonl"],
]

# Runs a command as Python does, and says last what it has imported.
PROBE = """
import atexit, runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, "")
atexit.register(lambda: print("imported:", *sorted({"torch", "transformers", "deepspeed"} & set(sys.modules))))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*arguments: str) -> tuple[int, str, str]:
    """Returns exit code, what a command printed before its end, and its errors; nothing heavy may be imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    said, _, imported = done.stdout.rpartition("imported:")
    assert imported == "\n", f"{arguments} imported{imported}{done.stderr}"
    return done.returncode, said, done.stderr


def test_an_unknown_subcommand_names_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"a subcommand must be one of .*doctor.*, got doktor; extract\.py, train\.py"):
        entry.run_subcommand(["doktor"])
    with pytest.raises(UserError, match="got none"):
        entry.run_subcommand([])


@pytest.mark.parametrize("command", [*([script] for script in SCRIPTS), ["eagle3/__main__.py"], *SUBCOMMANDS])
def test_every_command_says_what_it_takes_without_torch(command: list[str]) -> None:
    code, said, _ = run(*command, "--help")
    assert code == 0
    assert said.startswith(("usage: ", "`python -m eagle3 SUBCOMMAND`"))


@pytest.mark.parametrize("command", [*([script] for script in SCRIPTS), *SUBCOMMANDS])
def test_an_option_that_does_not_exist_is_refused_without_torch(command: list[str]) -> None:
    code, _, errors = run(*command, "--nonsense")
    assert code == 2
    assert "error: " in errors


@pytest.mark.parametrize("command", WITH_SETTINGS)
def test_a_setting_that_does_not_exist_is_refused_without_torch(command: list[str]) -> None:
    code, _, errors = run(*command, "target.pth=x")
    assert code == 2
    assert "target.pth is not a setting; did you mean target.path?" in errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["extract.py", "--prompts", "a", "prompts.path=b"],
            "prompts.path must be given once, got 'prompts.path=b' and",
        ),
        (["plan", "--prompts", "a", "prompts.path=b"], "prompts.path must be given once, got 'prompts.path=b' and"),
        (["prompts", "a", "prompts.path=b"], "prompts.path must be given once, got 'prompts.path=b' and a file"),
        (["prompts", "a", "--target", "t", "target.path=b"], "target.path must be given once, got 'target.path=b' and"),
        (
            ["evaluate.py", "--server", "a", "server=b"],
            "server must be given once, got 'server=b' and 'server=a'; leave",
        ),
    ],
)
def test_an_option_and_a_setting_that_say_the_same_are_refused_without_torch(arguments: list[str], said: str) -> None:
    code, _, errors = run(*([] if arguments[0] in SCRIPTS else ["eagle3/__main__.py"]), *arguments)
    assert code == 2
    assert said in errors


def test_what_features_lets_people_choose_is_what_an_import_takes() -> None:
    assert get_args(Last) == features.LAST
    assert get_args(LossMask) == features.LOSS_MASK


def test_a_subcommands_answer_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "eagle3.commands.export", SimpleNamespace(main=len))
    with pytest.raises(SystemExit) as exit_info:
        entry.run_subcommand(["export", "a", "b"])
    assert exit_info.value.code == 2


@pytest.mark.parametrize("name", ["-h", "--help"])
def test_help_names_the_subcommands(capsys: pytest.CaptureFixture[str], name: str) -> None:
    entry.run_subcommand([name])
    said = capsys.readouterr().out
    assert "usage: python -m eagle3 SUBCOMMAND" in said
    assert all(subcommand in said for subcommand in entry.SUBCOMMANDS)
