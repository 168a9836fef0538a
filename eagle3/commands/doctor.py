"""`eagle3 doctor`: what keeps a drafter's acceptance low, each with its remedy."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3.config import UserError
from eagle3.loading import loading


def main(argv: Sequence[str]) -> int:
    """Prints the findings; returns 0 if there are none and 1 otherwise.

    Raises:
        UserError: an argument names nothing that can be looked at.
    """
    parser = argparse.ArgumentParser(prog="python -m eagle3 doctor", description=__doc__)
    parser.add_argument("drafter", type=Path, help="a directory with config.json and weights, whoever trained it")
    parser.add_argument("--target", type=Path, help="the target's directory; without it only the files are looked at")
    parser.add_argument("--store", type=Path, help="a feature store of the target: the drafter is run on it")
    parser.add_argument("--server", metavar="URL", help="a running SGLang server that serves the drafter")
    parser.add_argument(
        "--try-layers", action="store_true", help="run the target too, and the drafter on the layers beside its own"
    )
    parser.add_argument(
        "--chat-template-kwargs", default="{}", metavar="JSON", help='as requests have them: {"enable_thinking": false}'
    )
    arguments = parser.parse_args(argv)
    chat_template_kwargs = _json_object(arguments.chat_template_kwargs)
    with loading():
        from rich.console import Console

        from eagle3.evaluation.doctor.examination import examine, show
    examination = examine(
        arguments.drafter,
        target_path=arguments.target,
        store_path=arguments.store,
        server=arguments.server,
        tries_layers=arguments.try_layers,
        chat_template_kwargs=chat_template_kwargs,
    )
    show(examination, arguments.drafter, Console())
    return 1 if examination.findings else 0


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UserError(f"--chat-template-kwargs must be a JSON object, got {text!r}")
    return value
