"""`python -m eagle3 SUBCOMMAND`: the commands beside extract, train and evaluate."""

import sys
from collections.abc import Callable, Sequence

from eagle3.cli import run_command
from eagle3.config import UserError
from eagle3.evaluation import compare, prompt_report, question_sets, simulation
from eagle3.evaluation.doctor import command as doctor
from eagle3.features import commands as features
from eagle3.training import sweep

# Each takes its arguments and returns the exit code.
SUBCOMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "compare": compare.main,
    "doctor": doctor.main,
    "features": features.main,
    "questions": question_sets.main,
    "simulate": simulation.main,
    "sweep": sweep.main,
    "prompts": prompt_report.main,
}


_USAGE = f"""usage: python -m eagle3 SUBCOMMAND [ARGUMENTS]

SUBCOMMAND is one of {", ".join(sorted(SUBCOMMANDS))}; each says with --help what it takes.
extract.py, train.py and evaluate.py are commands of their own."""


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
        raise UserError(f"a subcommand must be one of {', '.join(sorted(SUBCOMMANDS))}, got {name}")
    sys.exit(SUBCOMMANDS[name](argv[1:]))


if __name__ == "__main__":
    main()
