"""`make demo` says what is wrong with its variables and with its interpreter before anything long begins."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

from examples import ready

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is what is tested")


def make(*arguments: str) -> tuple[int, str, str]:
    """Returns make's exit code, what it printed and its errors, as in a shell of its own."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    done = subprocess.run(
        ["make", *arguments, f"PYTHON={sys.executable}"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("model", ["/nope", "Qwen/Qwen3-0.6B"])
@pytest.mark.parametrize("setup", [[], ["SETUP=0"]])
def test_a_model_that_is_not_there_is_refused_before_the_set_up(model: str, setup: list[str]) -> None:
    code, printed, errors = make("demo", f"MODEL={model}", *setup)
    assert (code, printed) == (2, "")  # no command is begun
    assert errors.startswith(
        f"error: MODEL must be a Hugging Face directory with a config.json, got '{model}'; hubs are"
    )


def test_an_engine_that_does_not_exist_is_refused() -> None:
    code, printed, errors = make("demo", "ENGINE=vllm", "SETUP=0")
    assert (code, printed) == (2, "")
    assert "error: ENGINE must be transformers or sglang, got 'vllm'; correct it, or leave it out\n" in errors


def test_a_model_that_is_there_needs_no_conversion(tiny_target: Path) -> None:
    code, printed, errors = make("--dry-run", "demo", f"MODEL={tiny_target}", "SETUP=0")
    assert (code, errors) == (0, "")
    assert f"examples/demo.py --model {tiny_target} --engine transformers" in printed
    assert "smollm2.py" not in printed


def test_the_small_model_is_made_where_no_other_is_named() -> None:
    # From nothing, as on a new machine: what is there already would not be made.
    code, printed, errors = make("--dry-run", "--always-make", "demo", "SETUP=0")
    assert (code, errors) == (0, "")
    assert "examples/smollm2.py ckpts/models/SmolLM2-135M-Instruct" in printed


def bare(*arguments: str) -> tuple[int, str]:
    """Returns the exit code and the errors of an interpreter that has no packages at all."""
    command = [sys.executable, "-S", "-E", "examples/ready.py", "--engine", "transformers", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_an_interpreter_without_the_packages_is_told_what_to_install(tiny_target: Path) -> None:
    code, errors = bare("--model", str(tiny_target), "--extras", "demo")
    assert code == 2
    assert errors.count("\n") == 1
    assert f"since SETUP=0 installs none, got {sys.executable} without accelerate, " in errors
    assert "'torch>=2.11'" in errors
    assert "psutil" in errors
    assert "gguf" not in errors  # the model is there
    assert "deepspeed" not in errors  # one device
    code, errors = bare("--model", "none", "--is-made", "--extras", "demo", "dev")
    assert code == 2
    assert all(name in errors for name in ("gguf", "deepspeed", "pytest"))
    assert bare("--model", "none", "--is-made") == (0, "")  # they are yet to be installed


def test_every_requirement_of_the_project_has_a_name_that_can_be_looked_up() -> None:
    found = dict(ready.packages(["demo", "dev"]))
    assert all(name.replace("-", "").isalnum() for name in found)
    assert found["triton"] == "triton>=3.6"  # without its marker
    assert {name for name in found if not ready.is_installed(name)} <= ready.SKIPPED_WITHOUT  # they run these tests
