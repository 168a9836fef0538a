"""What `make demo` and `make test` need, looked at before anything long begins; it needs nothing but Python itself."""

import argparse
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
ENGINES = ("transformers", "sglang")
ON_SEVERAL_GPUS = {"deepspeed"}  # the demo imports it on none
TO_CONVERT = {"gguf"}  # a target that is there already needs no conversion
SKIPPED_WITHOUT = {"matplotlib", "tensorboard", "triton"}  # by the tests that need them


def main() -> int:
    """Prints all that is wrong, each in one sentence; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="the target, a Hugging Face directory")
    parser.add_argument("--is-made", action="store_true", help="the target is made from its package if it is not there")
    parser.add_argument("--engine", required=True, help="what runs the target")
    parser.add_argument("--extras", nargs="*", help="of pyproject.toml, whose packages must be installed already")
    arguments = parser.parse_args()
    found = problems(arguments.model, arguments.engine, is_made=arguments.is_made, extras=arguments.extras)
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    return 2 if found else 0


def problems(model: Path, engine: str, *, is_made: bool, extras: Sequence[str] | None) -> list[str]:
    """Returns what is wrong with make's variables; `extras` is None where the packages are yet to be installed."""
    found = []
    is_there = (model / "config.json").is_file()
    if not is_there and not is_made:
        found.append(
            f"MODEL must be a Hugging Face directory with a config.json, got {str(model)!r}; hubs are not asked here: "
            f"download the model first (hf download NAME --local-dir DIRECTORY) and say MODEL=DIRECTORY, or leave "
            f"MODEL out for a small one from its package"
        )
    if engine not in ENGINES:
        found.append(f"ENGINE must be {' or '.join(ENGINES)}, got {engine!r}; correct it, or leave it out")
    if extras is not None:
        unneeded = (TO_CONVERT if is_there else set()) | (SKIPPED_WITHOUT if "dev" in extras else ON_SEVERAL_GPUS)
        missing = {name: wanted for name, wanted in packages(extras) if name not in unneeded and not is_installed(name)}
        if missing:
            found.append(
                f"PYTHON must have the packages that are used, since SETUP=0 installs none, got {sys.executable} "
                f"without {', '.join(missing)}; run {sys.executable} -m pip install "
                f"{' '.join(map(repr, missing.values()))}, name another interpreter with PYTHON=..., or leave SETUP=0 "
                f"out, and an environment is made in .venv"
            )
    return found


def packages(extras: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields name and requirement, `torch` and `torch>=2.11`, of each package that the project and the extras want."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    texts = list(project["dependencies"])
    for extra in extras:
        texts += project["optional-dependencies"][extra]
    for text in texts:
        wanted = text.partition(";")[0].strip()
        yield re.split(r"[<>=!~\[ ]", wanted)[0], wanted


def is_installed(name: str) -> bool:
    """Tells whether this interpreter has a package, in any version."""
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
