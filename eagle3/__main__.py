"""`python -m eagle3 SUBCOMMAND`: the commands beside extract, train and evaluate."""

import sys
from collections.abc import Sequence
from importlib import import_module

from eagle3.loading import loading

with loading():
    from eagle3.cli import run_command
    from eagle3.config import UserError

# Each is a module of eagle3.commands; its `main` takes the arguments and returns the exit code.
SUBCOMMANDS = ("compare", "doctor", "export", "features", "plan", "prompts", "questions", "simulate", "sweep")

_SCRIPTS = "extract.py, train.py and evaluate.py are commands of their own"
_USAGE = f"""usage: python -m eagle3 SUBCOMMAND [ARGUMENTS]

SUBCOMMAND is one of {", ".join(SUBCOMMANDS)}; each says with --help what it takes.
{_SCRIPTS}."""


def main() -> None:
    """Runs the subcommand that the command line names."""
    run_command(lambda: run_subcommand(sys.argv[1:]))


def run_subcommand(argv: Sequence[str]) -> None:
    """Runs a subcommand, and exits with its code.

    Raises:
        UserError: there is none of that name.
    """
    name = argv[0] if argv else "none"
    if name in ("-h", "--help"):
        print(f"{__doc__}\n\n{_USAGE}")
        return
    if name not in SUBCOMMANDS:
        raise UserError(f"a subcommand must be one of {', '.join(SUBCOMMANDS)}, got {name}; {_SCRIPTS}")
    with loading():
        subcommand = import_module(f"eagle3.commands.{name}")
    sys.exit(subcommand.main(argv[1:]))


if __name__ == "__main__":
    main()
