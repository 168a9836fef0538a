"""Start, attach to, watch, restart an SGLang server.

A server is up long before it can work, and one that records nothing answers like one that does: it is ready when a
real request was answered and its sample has arrived.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from eagle3.capture.launch import (
    LAST_LINES,
    ServerError,
    ServerProcess,
    capture_flags,
    flag_arguments,
    free_port,
    installed_version,
)
from eagle3.capture.staging import CODEC_VARIABLE, DIRECTORY_VARIABLE, LAYERS_VARIABLE
from eagle3.capture.staging_area import StagingArea
from eagle3.config import ServerConfig
from eagle3.features.codec import Codec

logger = logging.getLogger(__name__)

LINE_SECONDS = 30.0  # between two lines about a server that is waited for, where there is no terminal
ABORT_SECONDS = 5


@dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself."""

    version: str
    model_path: str
    max_tokens: int  # of the longest prompt
    settings: dict[str, Any]  # all of its arguments


class Server:
    """One SGLang server, on this machine: of ours if it has a process."""

    def __init__(self, url: str, process: ServerProcess | None = None) -> None:
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

    def abort(self, request_id: str) -> bool:
        """Asks the server to drop a request; returns whether it is still there to do so."""
        try:
            with self._session() as session:
                session.post(f"{self.url}/abort_request", json={"rid": request_id}, timeout=ABORT_SECONDS)
        except requests.RequestException:
            return False
        return True

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
        except (requests.ConnectionError, requests.Timeout) as error:
            raise ServerError(
                f"{self.url} must be a running SGLang server, got no answer ({type(error).__name__}); "
                f"start it, wait until it is ready, and check server.urls"
            ) from error
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
        started = told_at = time.monotonic()
        deadline = started + timeout_seconds
        columns = (SpinnerColumn(), TextColumn("waiting for {task.description}"), TimeElapsedColumn())
        says = TextColumn("{task.fields[line]}", markup=False)  # what a server logs has brackets of its own
        console = Console(stderr=True)
        with Progress(*columns, says, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task(self.url, total=None, line="")
            while True:
                self.check_alive()
                try:
                    works()
                    return
                except requests.RequestException as error:
                    if time.monotonic() > deadline:
                        remedy = "raise server.startup_timeout_seconds" if self.is_ours else "start it again"
                        raise ServerError(
                            f"the server must answer within {timeout_seconds:.0f} s, got {type(error).__name__} "
                            f"({self.url}); {remedy}{self._last_lines()}"
                        ) from error
                progress.update(task, line=self._last_line())
                if progress.disable and time.monotonic() - told_at >= LINE_SECONDS:
                    told_at = time.monotonic()
                    logger.info("waiting for %s for %.0f s: %s", self.url, told_at - started, self._last_line())
                time.sleep(0.5)

    def restart(self) -> None:
        """Starts a server of ours again, on the same port."""
        assert self.process is not None, self.url
        self.process.stop()
        self.process.start()

    @property
    def life(self) -> int:
        """Which of its lives a server of ours is in; 0 for others."""
        return self.process.num_starts if self.process is not None else 0

    def lives(self, life: int) -> bool:
        """Whether a server is still in that life, as far as can be seen without asking it."""
        return self.process is None or (self.process.num_starts == life and self.process.is_alive)

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
    config: ServerConfig, model_path: str, capture_layers: Sequence[int], codec: Codec | None = None
) -> Iterator[tuple[list[Server], StagingArea]]:
    """Starts a server that records, or attaches to the running ones, and claims the staging directory.

    A server of ours codes what it records in `codec`, if there is one.

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
        env = {DIRECTORY_VARIABLE: str(area.directory), LAYERS_VARIABLE: layers, CODEC_VARIABLE: codec or ""}
        flags = capture_flags(installed_version(config.python or sys.executable))
        server = stack.enter_context(running_server(config, model_path, flags, env))
        yield [server], area
