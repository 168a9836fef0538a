"""A server is ready when it records, is started again, and says why it died."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from sglang_servers import server_config

from eagle3.capture.client import SGLangEngine
from eagle3.capture.engine import CodedCapture
from eagle3.capture.handover import Handover
from eagle3.capture.launch import ServerError, ServerProcess
from eagle3.capture.plugin import code_rows
from eagle3.capture.server import Server, ServerFacts, capturing_servers, running_server
from eagle3.capture.staging import AUX_NAME, LAST_NAME, Part, write_json
from eagle3.capture.staging_area import StagingArea
from eagle3.config import ServerConfig
from eagle3.features.codec import decode, encode, state_bytes


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def refused() -> None:
    raise requests.ConnectionError("refused")


def process_of(tmp_path: Path, code: str, *arguments: str) -> ServerProcess:
    return ServerProcess([sys.executable, "-c", code, *arguments], os.environ, tmp_path / "logs" / "server.log")


def test_dead_server_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    process = process_of(tmp_path, "import sys; print('\\n'.join(map(str, range(100)))); sys.exit('no memory')")
    process.start()
    server = Server("http://127.0.0.1:9", process)  # nothing listens on the discard port
    try:
        with pytest.raises(ServerError, match=r"must keep running, got exit code 1 \(.*server\.log\)(.|\n)*no memory"):
            server.wait_until(refused, timeout_seconds=60)
        assert process.last_lines(2) == "99\nno memory"
    finally:
        process.stop()


def test_restarted_server_keeps_its_log(tmp_path: Path) -> None:
    process = process_of(tmp_path, "import os, time; os.write(1, b'hello\\n'); time.sleep(100)")
    server = Server("http://127.0.0.1:9", process)
    try:
        for count in (1, 2):
            if count == 1:
                process.start()
            else:
                server.restart()
            wait_until(lambda count=count: process.last_lines(5) == "\n".join(["hello"] * count))  # type: ignore[misc]
        assert process.num_starts == 2
        assert server.lives(server.life)
        assert not server.lives(server.life - 1)
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not server.lives(server.life))
    finally:
        process.stop()


def test_server_that_dies_on_its_first_sample_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = process_of(tmp_path, "import time; time.sleep(100)")
    process.start()

    def answer_and_die(*_: object) -> dict[str, object]:
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not process.is_alive)
        return {}

    server = Server("http://127.0.0.1:9", process)
    monkeypatch.setattr(server, "post", answer_and_die)
    started = time.monotonic()
    with (
        StagingArea(tmp_path, 1000, shared=False) as area,
        pytest.raises(ServerError, match=r"must keep running, got exit code -9"),
    ):
        SGLangEngine([server], area, ServerConfig(), [1])
    process.stop()
    assert time.monotonic() - started < 10


def test_coded_states_are_taken_in_the_stores_codec_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, taker = Server("http://127.0.0.1:9"), Handover(tmp_path)
    write_json(tmp_path / "plugin-1.json", {"boundaries": [1]})
    states = torch.randn(3, 24, generator=torch.Generator().manual_seed(0)).bfloat16()

    def record(path: str, body: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
        tensors = {"input_ids": torch.tensor(body["input_ids"]), LAST_NAME: states, f"{AUX_NAME}.0": 2 * states}
        metadata = {"codec": "int8", "dtype": "bfloat16"}
        taker.submit([Part(body["rid"], 3, 0, 0, 3)], code_rows(tensors, "int8"), metadata)
        return {"meta_info": {"prompt_tokens": 3, "finish_reason": {"type": "length"}}}

    reserved = []

    def reserve(area: StagingArea, num_bytes: int) -> bool:
        reserved.append(num_bytes)
        return whole(area, num_bytes)

    whole = StagingArea.reserve
    monkeypatch.setattr(StagingArea, "reserve", reserve)
    monkeypatch.setattr(server, "post", record)
    monkeypatch.setattr(server, "facts", lambda: ServerFacts("0.5.23", "", 100, {}))
    with StagingArea(tmp_path, 1000, shared=True) as area:
        with pytest.raises(ServerError, match=r"must record states as they are, got int8; set store.codec to that, or"):
            SGLangEngine([server], area, ServerConfig(), [1])
        with pytest.raises(ServerError, match=r"or coded in the store's fp8, got int8; .* EAGLE3_CAPTURE_CODEC=fp8"):
            SGLangEngine([server], area, ServerConfig(), [1], "fp8")
        engine = SGLangEngine([server], area, ServerConfig(), [1], "int8")
        assert engine.facts.dtype == "bfloat16"
        ((_, coded),) = engine.capture_each([[4, 5, 6]])
        assert isinstance(coded, CodedCapture)
        (captured,) = engine.capture([[4, 5, 6]])
    assert reserved == 2 * [3 * (8 + 2 * state_bytes("int8", 24))]  # what the files take, not what was coded
    wanted = encode(states, 24, "int8")
    assert torch.equal(coded.last.codes, wanted.codes)
    assert torch.equal(captured.last_hidden_states, decode(wanted, 24, torch.bfloat16))
    assert torch.equal(captured.aux_hidden_states, decode(encode(2 * states, 24, "int8"), 24, torch.bfloat16))


def test_patience_with_a_silent_server_is_shown_and_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("eagle3.capture.server.LINE_SECONDS", 0.0)
    with pytest.raises(
        ServerError, match=r"must answer within 1 s, got ConnectionError \(http://127.0.0.1:9\); start it again"
    ):
        Server("http://127.0.0.1:9").wait_until(refused, timeout_seconds=1)
    assert caplog.messages[0] == "waiting for http://127.0.0.1:9 for 0 s: "


class Answers(BaseHTTPRequestHandler):
    """Refuses whatever is posted, and says little of itself."""

    def do_POST(self) -> None:
        self.send_error(400, "no such thing")

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"version": "1"}')

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_what_is_no_sglang_server_is_refused() -> None:
    with HTTPServer(("127.0.0.1", 0), Answers) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{http.server_port}/"
        server = Server(url)
        assert server.url == url[:-1]
        with pytest.raises(
            ServerError, match=r"must be an SGLang server, got KeyError\('model_path'\); check server.urls"
        ):
            server.facts()
        with pytest.raises(ServerError, match=r"must answer /generate, got 400: (.|\n)*no such thing"):
            server.post("/generate", {}, timeout_seconds=10)
        http.shutdown()
    with pytest.raises(
        ServerError, match=r"must be a running SGLang server, got no answer \(ConnectionError\); start it"
    ):
        server.facts()


def test_config_wins_over_our_flags_but_not_over_the_address(tmp_path: Path) -> None:
    # The interpreter prints its arguments and ends, instead of a server.
    script = tmp_path / "python"
    script.write_text(
        f'#!/bin/sh\nshift 3\necho "$@" "$NCCL_PROTO"\nexec {sys.executable} -c "import time; time.sleep(9)"\n'
    )
    script.chmod(0o700)
    config = ServerConfig(
        python=str(script),
        flags={"disable_radix_cache": False, "host": "0.0.0.0", "mem-fraction-static": 0.5},
        env={"NCCL_PROTO": "LL"},
        log=str(tmp_path / "log"),
        tensor_parallel_size=4,
    )
    with running_server(config, "model", {"disable-radix-cache": True, "skip-server-warmup": True}, {}) as server:
        assert server.process is not None
        wait_until(lambda: (tmp_path / "log").read_text().endswith("\n"))
        line = (tmp_path / "log").read_text().strip()
    port = server.url.rpartition(":")[2]
    assert line == (
        "-m sglang.launch_server --model-path model --tp-size 4 --skip-server-warmup --host 127.0.0.1 "
        f"--mem-fraction-static 0.5 --port {port} LL"
    )


def test_real_server_ends_with_the_sentence_that_says_why(tiny_target: Path, tmp_path: Path) -> None:
    config = server_config(tmp_path)
    with (
        capturing_servers(config, str(tiny_target), [2, 4, 8]) as (servers, area),
        pytest.raises(ServerError, match=r"boundaries that increase within 0\.\.7, such as 3,31,59, got '2,4,8'"),
    ):
        SGLangEngine(servers, area, config, [2, 4, 8])
    assert not area.directory.exists()
