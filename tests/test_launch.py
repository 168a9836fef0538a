"""A server of ours never outlives us, and is started with what it needs to record."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPOSITORY

from eagle3.capture.launch import ServerProcess, capture_flags, flag_arguments, installed_version
from eagle3.config import UserError

# A launcher that starts a worker and waits, as SGLang's does.
FAMILY = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(100)
"""


PARENT = """
import os, pathlib, sys, time
from eagle3.capture.launch import ServerProcess
process = ServerProcess([sys.executable, "-c", "import time; time.sleep(100)"], os.environ, pathlib.Path(sys.argv[1]))
process.start()
print(process.pid, flush=True)
time.sleep(100)
"""


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] not in ("Z", "X")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def process_of(tmp_path: Path, code: str, *arguments: str) -> ServerProcess:
    return ServerProcess([sys.executable, "-c", code, *arguments], os.environ, tmp_path / "logs" / "server.log")


def test_stopping_ends_the_whole_group(tmp_path: Path) -> None:
    process = process_of(tmp_path, FAMILY, str(tmp_path / "child"))
    process.start()
    wait_until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text() != "")
    pids = [process.pid, int((tmp_path / "child").read_text())]
    assert all(is_alive(pid) for pid in pids)
    process.stop()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    process.stop()  # nothing is left to stop


def test_server_dies_with_its_parent_however_that_dies(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "server.log")]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_alive(pid))


def test_flags_become_arguments() -> None:
    flags = {"dtype": "float32", "a": True, "b": False, "c": None, "d": 0, "bs": [1, 2]}
    assert flag_arguments(flags) == ["--dtype", "float32", "--a", "--d", "0", "--bs", "1", "2"]


def test_prefill_graphs_and_prefix_cache_are_off() -> None:
    new, old = capture_flags("0.5.14"), capture_flags("0.5.13.post1")
    assert new["cuda-graph-backend-prefill"] == "disabled"
    assert old["disable-piecewise-cuda-graph"] is True
    assert "cuda-graph-backend-prefill" not in old
    assert new["disable-radix-cache"] is old["disable-radix-cache"] is True


def fake_python(tmp_path: Path, body: str) -> str:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o700)
    return str(path)


def test_unusable_interpreters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"must be an interpreter, got '/none/python'.*or use engine=transformers"):
        installed_version("/none/python")
    with pytest.raises(UserError, match=r"must have sglang installed, got .*No package metadata.*engine=transformers"):
        installed_version(sys.executable)
    with pytest.raises(UserError, match=r"sglang must be 0\.5\.11 or newer, got 0\.5\.9"):
        installed_version(fake_python(tmp_path, """echo '["0.5.9", ["eagle3"]]'"""))
    with pytest.raises(UserError, match=r"must have eagle3 installed beside sglang.*-m pip install --no-deps /"):
        installed_version(fake_python(tmp_path, """echo '["0.5.12.post1", []]'"""))
    assert installed_version(fake_python(tmp_path, """echo '["0.5.12.post1", ["eagle3"]]'""")) == "0.5.12.post1"
