"""What every command shares."""

import pytest

from eagle3.cli import command_parser, parse_arguments, run_command
from eagle3.config import UserError


def test_options_and_overrides_come_in_any_order() -> None:
    parser = command_parser("x", "default.yaml")
    arguments = parse_arguments(parser, ["a.b=1", "--config", "mine.yaml", "c=2"])
    assert (arguments.config, arguments.overrides) == ("mine.yaml", ["a.b=1", "c=2"])


def test_a_users_mistake_prints_its_message_alone(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise UserError("path must be a file, got 'x'")

    with pytest.raises(SystemExit) as exit_info:
        run_command(main)
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == "error: path must be a file, got 'x'\n"


def test_an_interrupt_ends_with_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as exit_info:
        run_command(main)
    assert exit_info.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"
