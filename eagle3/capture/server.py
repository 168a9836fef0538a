"""Start, attach to, watch, restart an SGLang server.

A server is up long before it can work, and one that records nothing answers like one that does: it is ready when a
real request was answered and its sample has arrived.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from eagle3.capture.staging import DIRECTORY_VARIABLE, LAYERS_VARIABLE
from eagle3.capture.staging_area import StagingArea
from eagle3.config import ServerConfig, UserError

logger = logging.getLogger(__name__)

OLDEST_VERSION = (0, 5, 11)  # the first with plugins
PREFILL_BACKEND_VERSION = (0, 5, 14)  # before it, the flag for prefill graphs has another name
LAST_LINES, LINE_CHARACTERS = 15, 400  # of a dead server's log, in an error
STOP_SECONDS = 10  # between the request to stop and the end
ATTACHED_PATIENCE_SECONDS = 60  # for a running server to answer at all
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


@dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself."""

    version: str
    model_path: str
    max_tokens: int  # of the longest prompt
    settings: dict[str, Any]  # all of its arguments


class Server:
    """One SGLang server, on this machine: of ours if it has a process."""

    def __init__(self, url: str, process: "ServerProcess | None" = None) -> None:
        self.url = url.rstrip("/")
        self.process = process

    def post(self, path: str, body: dict[str, Any], timeout_seconds: float) -> Any:
        """Sends JSON, returns JSON.

        Raises:
            requests.RequestException: nobody answers in time.
            ServerError: the server refuses; the message has its words.
        """
        with self._session() as session:
            response = session.post(self.url + path, json=body, timeout=(10, timeout_seconds))
        if not response.ok:
            raise ServerError(f"the server must answer {path}, got {response.status_code}: {response.text[:500]}")
        return response.json()

    def abort(self, request_id: str) -> None:
        """Asks the server to drop a request, if it still can."""
        with suppress(requests.RequestException), self._session() as session:
            session.post(f"{self.url}/abort_request", json={"rid": request_id}, timeout=5)

    def facts(self) -> ServerFacts:
        """Asks the server what it is.

        Raises:
            ServerError: nobody answers, or not an SGLang server.
        """
        try:
            with self._session() as session:
                info = session.get(f"{self.url}/server_info", timeout=30).json()
            return ServerFacts(
                version=info["version"],
                model_path=info["model_path"],
                max_tokens=info["max_req_input_len"] - 1,  # SGLang takes prompts of fewer
                settings=info,
            )
        except (requests.RequestException, KeyError) as error:
            raise ServerError(f"{self.url} must be an SGLang server, got {error!r}; check server.urls") from error

    def check_alive(self) -> None:
        """Raises a ServerError with the last lines of its log if a server of ours has died."""
        if self.process is not None:
            self.process.check_alive()

    def wait_until(self, works: Callable[[], None], timeout_seconds: float) -> None:
        """Calls `works` until it is answered, and shows what the server says meanwhile.

        Raises:
            ServerError: it died, or had no answer in time.
        """
        deadline = time.monotonic() + timeout_seconds
        columns = (SpinnerColumn(), TextColumn("waiting for {task.description}"), TimeElapsedColumn())
        with Progress(*columns, TextColumn("{task.fields[line]}"), transient=True) as progress:
            task = progress.add_task(self.url, total=None, line="")
            while True:
                self.check_alive()
                try:
                    works()
                    return
                except requests.RequestException as error:
                    if time.monotonic() > deadline:
                        raise ServerError(
                            f"the server must answer within {timeout_seconds:.0f} s, got {type(error).__name__} "
                            f"({self.url}); raise server.startup_timeout_seconds{self._last_lines()}"
                        ) from error
                progress.update(task, line=self._last_line())
                time.sleep(0.5)

    def restart(self) -> None:
        """Starts a server of ours again, on the same port."""
        assert self.process is not None, self.url
        self.process.stop()
        self.process.start()

    @property
    def is_ours(self) -> bool:
        """Whether this process started it, and may restart it."""
        return self.process is not None

    @staticmethod
    def _session() -> requests.Session:
        """Returns a new one: threads may not share them, and connecting within a machine takes no time."""
        session = requests.Session()
        session.trust_env = False  # no proxy either
        return session

    def _last_line(self) -> str:
        return self.process.last_lines(1)[:100] if self.process is not None else ""

    def _last_lines(self) -> str:
        return f"; its log ends with\n{self.process.last_lines(LAST_LINES)}" if self.process is not None else ""


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


@contextmanager
def running_server(
    config: ServerConfig, model_path: str, flags: Mapping[str, Any], env: Mapping[str, str]
) -> Iterator[Server]:
    """Starts a server of `model_path`, not ready yet, and ends it whatever happens.

    `flags` and `env` are those that its purpose needs; the config's win.

    Raises:
        UserError: the serving interpreter has no usable SGLang.
    """
    python = config.python or sys.executable
    port = free_port()
    # The address is ours to choose: a server that answers elsewhere would answer to anybody.
    address = {"host": "127.0.0.1", "port": port}
    own = {name.replace("_", "-"): value for name, value in config.flags.items()}
    asked = {"model-path": model_path, "tp-size": config.tensor_parallel_size, **flags, **own, **address}
    command = [python, "-m", "sglang.launch_server", *flag_arguments(asked)]
    variables = {**os.environ, **{name: str(value) for name, value in config.env.items()}, **env}
    process = ServerProcess(command, variables, Path(config.log))
    try:
        process.start()
        yield Server(f"http://127.0.0.1:{port}", process)
    finally:
        process.stop()


@contextmanager
def capturing_servers(
    config: ServerConfig, model_path: str, capture_layers: Sequence[int]
) -> Iterator[tuple[list[Server], StagingArea]]:
    """Starts a server that records, or attaches to the running ones, and claims the staging directory.

    Raises:
        UserError: the serving interpreter or the staging directory is unusable.
    """
    staging_dir = Path(config.staging_dir)
    with ExitStack() as stack:
        area = stack.enter_context(StagingArea(staging_dir, config.staging_bytes, shared=bool(config.urls)))
        if config.urls:
            yield [Server(url) for url in config.urls], area
            return
        layers = ",".join(str(layer) for layer in capture_layers)
        env = {DIRECTORY_VARIABLE: str(area.directory), LAYERS_VARIABLE: layers}
        flags = capture_flags(installed_version(config.python or sys.executable))
        server = stack.enter_context(running_server(config, model_path, flags, env))
        yield [server], area


def installed_version(python: str) -> tuple[int, ...]:
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
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if numbers < OLDEST_VERSION:
        oldest = ".".join(map(str, OLDEST_VERSION))
        raise UserError(f"sglang must be {oldest} or newer, got {version} ({python}); upgrade it, or {advice}")
    if "eagle3" not in plugins:
        root = Path(__file__).resolve().parent.parent.parent
        raise UserError(
            f"server.python must have eagle3 installed beside sglang, got the plugins {plugins} ({python}); "
            f"run: {python} -m pip install --no-deps {root}"
        )
    return numbers


def capture_flags(version: tuple[int, ...]) -> dict[str, Any]:
    """Returns the flags without which a server does not record each token of each prompt."""
    # Python does not run when a prefill is replayed from a CUDA graph, and a cached prefix is not run at all.
    graphs: dict[str, Any] = {"cuda-graph-backend-prefill": "disabled"}
    if version < PREFILL_BACKEND_VERSION:
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
