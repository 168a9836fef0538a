"""Builds an environment with a real SGLang server that runs on a CPU, from PyPI alone: Linux, x86-64, 2.4 GB.

    python tests/sglang_cpu/build.py .venv-sglang

Nothing of SGLang is edited: `sgl_kernel/` stands in for its compiled ops, `torchvision_hook.py` lets it import
torchvision, and this checkout is installed beside it as on any serving machine, with --no-deps. A second call does
only what has changed since.
"""

import hashlib
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
STAND_IN, HOOK, REQUIREMENTS = HERE / "sgl_kernel", HERE / "torchvision_hook.py", HERE / "requirements.txt"
TORCH = "torch==2.13.0"  # as SGLang pins it; a CPU build where pip's settings offer one


def build(directory: Path) -> None:
    """Makes `directory` such an environment, or brings it up to date."""
    _unless_done(directory / "packages", [REQUIREMENTS], lambda: _install_packages(directory))
    _unless_done(directory / "stand-in", [HOOK, *sorted(STAND_IN.glob("*.py"))], lambda: _copy_stand_in(directory))
    _unless_done(directory / "eagle3", [REPOSITORY / "pyproject.toml"], lambda: _install_ours(directory))


def _unless_done(stamp: Path, inputs: list[Path], action: Callable[[], None]) -> None:
    digest = hashlib.sha256(sys.version.encode())
    for path in [Path(__file__), *inputs]:
        digest.update(path.read_bytes())
    if not stamp.is_file() or stamp.read_text() != digest.hexdigest():
        action()
        stamp.write_text(digest.hexdigest())


def _install_packages(directory: Path) -> None:
    print(f"building {directory}: SGLang for the CPU, 2.4 GB, about 3 minutes", flush=True)
    venv.create(directory, with_pip=True, clear=True)
    _pip_install(directory, TORCH)
    _pip_install(directory, "--no-deps", "--requirement", str(REQUIREMENTS))


def _copy_stand_in(directory: Path) -> None:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    answer = subprocess.run([_python(directory), "-c", code], check=True, capture_output=True, text=True)
    packages = Path(answer.stdout.strip())
    shutil.rmtree(packages / STAND_IN.name, ignore_errors=True)
    shutil.copytree(STAND_IN, packages / STAND_IN.name)
    shutil.copy(HOOK, packages)
    (packages / "torchvision_hook.pth").write_text(f"import {HOOK.stem}\n")


def _install_ours(directory: Path) -> None:
    _pip_install(directory, "--no-deps", "--editable", str(REPOSITORY))


def _pip_install(directory: Path, *arguments: str) -> None:
    subprocess.run([_python(directory), "-m", "pip", "install", "--quiet", *arguments], check=True)


def _python(directory: Path) -> str:
    return str(directory / "bin" / "python")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/sglang_cpu/build.py DIRECTORY")
    build(Path(sys.argv[1]).absolute())
