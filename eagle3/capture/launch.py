"""What a server of ours is started with, and its processes: one group, which never outlives us."""

import json
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from eagle3.capture.recordable import version_numbers
from eagle3.config import UserError

logger = logging.getLogger(__name__)

OLDEST_VERSION = (0, 5, 11)  # the first with plugins
PREFILL_BACKEND_VERSION = (0, 5, 14)  # before it, the flag for prefill graphs has another name
LAST_LINES, LINE_CHARACTERS = 15, 400  # of a dead server's log, in an error
STOP_SECONDS = 10  # between the request to stop and the end
# Linux ends the server when this process dies, however it dies; SGLang's own processes follow their launcher.
START_WITH_US = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or sys.exit('its parent is gone'); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)
INSTALLED = (
    "import importlib.metadata as m, json; "
    "print(json.dumps([m.version('sglang'), [e.name for e in m.entry_points(group='sglang.srt.plugins')]]))"
)


class ServerError(UserError):
    """A server did not start, died or stopped answering."""


class ServerProcess:
    """A server's processes: one group, which is ended whole."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
        self._command = command
        self._env = env
        self._log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_path.write_bytes(b"")
        self.num_starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The launcher's process id, which is the group's too."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the launcher runs."""
        process = self._process  # which another thread may replace meanwhile
        return process is not None and process.poll() is None

    def start(self) -> None:
        """Starts the server; its output goes to the end of the log file."""
        python, *arguments = self._command
        command = [python, "-c", START_WITH_US, str(os.getpid()), *arguments]
        self.num_starts += 1
        logger.info("starting %s (log: %s)", " ".join(self._command), self._log_path)
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=dict(self._env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self) -> None:
        """Ends the whole group; members that outlive the launcher would hold the GPUs' memory."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()  # the launcher then ends the others, which take their shared memory along
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def check_alive(self) -> None:
        """Raises a ServerError with the last lines of the log if the server has ended."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise ServerError(
                f"the server must keep running, got exit code {code} ({self._log_path}); its log ends with\n"
                f"{self.last_lines(LAST_LINES)}"
            )

    def last_lines(self, count: int) -> str:
        """Returns the end of the log."""
        with self._log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - count * 4 * LINE_CHARACTERS))
            lines = log.read().decode(errors="replace").splitlines()
        lines = [line[:LINE_CHARACTERS] for line in lines if line.strip()]
        return "\n".join(lines[-count:])


def installed_version(python: str) -> str:
    """Returns the version of SGLang that an interpreter has.

    Raises:
        UserError: it has none, one without plugins, or not ours.
    """
    advice = "name a serving environment in server.python, or use engine=transformers"
    try:
        answer = subprocess.run([python, "-c", INSTALLED], capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"server.python must be an interpreter, got {python!r} ({error}); {advice}") from error
    if answer.returncode != 0:
        reason = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"server.python must have sglang installed, got {python!r} ({reason}); {advice}")
    version, plugins = json.loads(answer.stdout)
    if version_numbers(version) < OLDEST_VERSION:
        oldest = ".".join(map(str, OLDEST_VERSION))
        raise UserError(f"sglang must be {oldest} or newer, got {version} ({python}); upgrade it, or {advice}")
    if "eagle3" not in plugins:
        root = Path(__file__).resolve().parent.parent.parent
        raise UserError(
            f"server.python must have eagle3 installed beside sglang, got the plugins {plugins} ({python}); "
            f"run: {python} -m pip install --no-deps {root}"
        )
    return str(version)


def capture_flags(version: str) -> dict[str, Any]:
    """Returns the flags without which a server does not record each token of each prompt."""
    # Python does not run when a prefill is replayed from a CUDA graph, and a cached prefix is not run at all.
    graphs: dict[str, Any] = {"cuda-graph-backend-prefill": "disabled"}
    if version_numbers(version) < PREFILL_BACKEND_VERSION:
        graphs = {"disable-piecewise-cuda-graph": True}
    # The warm-up request would come before our own, which waits just as well.
    return {**graphs, "disable-radix-cache": True, "skip-server-warmup": True}


def flag_arguments(flags: Mapping[str, Any]) -> list[str]:
    """Returns command-line arguments; true is a bare flag, false and null are left out."""
    arguments = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        arguments.append(f"--{name}")
        if value is not True:
            arguments += [str(entry) for entry in value] if isinstance(value, list) else [str(value)]
    return arguments


def free_port() -> int:
    """Returns a port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
