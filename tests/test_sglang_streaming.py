"""Trainings ask a real SGLang server for the states of their samples, and for answers before; some do not survive."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from sglang_servers import server_config
from tiny_extractions import make_config, prompt_rows, write_prompts
from tiny_training import tiny_config
from training_runs import ROOT, STEPS, TWO_RANKS, launch, metrics_of, with_run

from eagle3.capture.client import SGLangEngine
from eagle3.capture.extraction import run_extraction
from eagle3.capture.server import capturing_servers
from eagle3.config import ExtractConfig, RegenerateConfig, ServerConfig, TrainConfig, config_to_dict
from eagle3.features.store import FeatureStore
from eagle3.training.trainer import train

LAYERS = [2, 4, 5]
GIVEN = RegenerateConfig(enabled=False)
# States are rounded otherwise from forward to forward, and AdamW's first steps make more of it.
LOSS_TOLERANCE = 1e-3
ENDLESS = 1_000_000  # steps: a test ends the run


@dataclass(frozen=True)
class Served:
    """A server that records, as somebody else's would be attached to."""

    target: Path
    config: ServerConfig
    group: int  # of its processes

    def extraction(self, directory: Path, num_rows: int = 24, **changes: Any) -> ExtractConfig:
        settings = {"engine": "sglang", "server": self.config} | changes
        return make_config(self.target, directory, prompt_rows(num_rows), **settings)

    def left_behind(self) -> list[str]:
        """Returns what trainings left in the staging directory; the plugin's own marker stays."""
        return [each.name for each in Path(self.config.staging_dir).iterdir() if not each.name.startswith("plugin-")]


@pytest.fixture(scope="module")
def served(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    own = server_config(tmp_path_factory.mktemp("server"), flags={"max-total-tokens": 4096})
    with capturing_servers(own, str(tiny_target), LAYERS) as (servers, area):
        SGLangEngine(servers, area, own, LAYERS)  # waits until it records
        # The run that started it holds a lock there as long as it lives.
        area_config = ServerConfig(urls=[servers[0].url], staging_dir=str(area.directory), max_requests=4)
        assert servers[0].process is not None
        yield Served(tiny_target, area_config, servers[0].process.pid)


def train_config(extraction: ExtractConfig, directory: Path) -> TrainConfig:
    """Writes the extraction's settings as live.yaml; returns settings of a training on it."""
    path = directory / "live.yaml"
    path.write_text(yaml.safe_dump(config_to_dict(extraction)))
    config = tiny_config(path, Path(extraction.target.path), directory / "streamed")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, batch_tokens=400))
    return with_run(config, max_steps=STEPS, save_every=3, validate_every=3)


@dataclass(frozen=True)
class Launched:
    """A command that runs, and what it says."""

    process: subprocess.Popen[bytes]
    log: Path

    def wait_for(self, happens: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 240
        while not happens():
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.05)

    def wait_for_step(self, config: TrainConfig, step: int) -> None:
        path = Path(config.run.dir) / "metrics.jsonl"
        self.wait_for(lambda: path.exists() and any(line["step"] >= step for line in metrics_of(path.parent)))

    def ends(self) -> str:
        """Waits for its end with an error; returns what it said."""
        assert self.process.wait(timeout=240) == 1, self.log.read_text()[-4000:]
        return self.log.read_text()

    def pid_of_rank(self, rank: int) -> int:
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                parent = re.search(r"^PPid:\t(\d+)$", path.with_name("status").read_text(), re.MULTILINE)
                is_child = parent is not None and int(parent[1]) == self.process.pid
                if is_child and f"RANK={rank}".encode() in path.read_bytes().split(b"\0"):
                    return int(path.parent.name)
            except OSError:
                continue  # another process, which has ended
        raise AssertionError(rank)


def start(command: list[str], directory: Path) -> Launched:
    log = directory / "log"
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        return Launched(subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file), log)


def start_training(config: TrainConfig, directory: Path) -> Launched:
    path = directory / "train.yaml"
    path.write_text(yaml.safe_dump(config_to_dict(config)))
    return start([*TWO_RANKS, "train.py", "--config", str(path)], directory)


def test_a_training_on_a_servers_stream_is_the_one_on_its_store(served: Served, tmp_path: Path) -> None:
    extraction = served.extraction(tmp_path, regenerate=GIVEN)
    run_extraction(extraction)
    # A store has its samples as they came; in a file of that order the stream's have the same numbers.
    order = [entry.sample_id for entry in FeatureStore(extraction.store.path).entries]
    write_prompts(tmp_path / "prompts.jsonl", sorted(prompt_rows(24), key=lambda row: order.index(row["id"])))
    config = train_config(extraction, tmp_path)
    done = launch([*TWO_RANKS, "train.py"], config, tmp_path, "--config", "CONFIG")
    assert done.returncode == 0, done.stderr[-4000:]
    assert served.left_behind() == []
    on_store = dataclasses.replace(config, data=dataclasses.replace(config.data, path=extraction.store.path))
    reference = metrics_of(train(with_run(on_store, dir=str(tmp_path / "on-store"))))
    for line, wanted in zip(metrics_of(tmp_path / "streamed"), reference, strict=True):
        for name in ("step", "loss", "held_out/loss", "held_out/tau"):
            if name in wanted:
                assert line[name] == pytest.approx(wanted[name], rel=LOSS_TOLERANCE), (line["step"], name)


def test_a_server_that_hangs_is_waited_for_and_named_and_no_step_is_lost(served: Served, tmp_path: Path) -> None:
    extraction = served.extraction(tmp_path, regenerate=GIVEN)
    url = served.config.urls[0]
    # A server then counts as hung after ten seconds, and as gone after twenty.
    config = with_run(train_config(extraction, tmp_path), timeout=0.5, max_steps=None, epochs=ENDLESS)
    config = with_run(config, save_every=ENDLESS, validate_every=ENDLESS)
    training = start_training(config, tmp_path)
    try:
        training.wait_for_step(config, 3)
        os.killpg(served.group, signal.SIGSTOP)
        training.wait_for(lambda: f"{url} does not answer (ReadTimeout)" in training.log.read_text())
        os.killpg(served.group, signal.SIGCONT)
        hung_at = metrics_of(tmp_path / "streamed")[-1]["step"]
        training.wait_for_step(config, hung_at + 5)
        assert "left out of the training" not in training.log.read_text()
        os.killpg(served.group, signal.SIGSTOP)
        stopped = time.monotonic()
        said = training.ends()
        assert time.monotonic() - stopped < 60
    finally:
        os.killpg(served.group, signal.SIGCONT)
        training.process.kill()
    assert said.count(f"waiting until {url} records what it runs") == 1, "of the main rank, at the start"
    assert f"error: the server must answer within 10 s, got ReadTimeout ({url}); start it again\n" in said
    checkpoints = [path.name for path in (tmp_path / "streamed").glob("step-*")]
    assert checkpoints == [f"step-{metrics_of(tmp_path / 'streamed')[-1]['step']:06d}"]


def test_a_rank_that_is_killed_ends_the_other_and_the_next_run_cleans_up(served: Served, tmp_path: Path) -> None:
    config = train_config(served.extraction(tmp_path, regenerate=GIVEN), tmp_path)
    endless = with_run(config, max_steps=None, epochs=ENDLESS, validate_every=ENDLESS, resume="auto")
    training = start_training(endless, tmp_path)
    try:
        training.wait_for_step(endless, 5)
        os.kill(training.pid_of_rank(1), signal.SIGKILL)
        killed = time.monotonic()
        said = training.ends()
        assert time.monotonic() - killed < 60
    finally:
        training.process.kill()
    assert re.search(r"error: every rank must be alive, got no word from rank 1 on \S+, in the [\w -]+ of", said), said
    newest = max(int(path.name[5:]) for path in (tmp_path / "streamed").glob("step-*"))
    training = start_training(endless, tmp_path)
    try:
        training.wait_for_step(endless, newest + 3)
        training.process.terminate()
        said = training.ends()
    finally:
        training.process.kill()
    assert f"resumed {tmp_path}/streamed/step-{newest:06d}" in said
    assert "stopped (SIGTERM): saved" in said
    assert served.left_behind() == []


def test_answers_alone_are_the_same_after_a_kill_and_are_trained_on(served: Served, tmp_path: Path) -> None:
    logs = []
    for name in ("whole", "killed"):
        directory = tmp_path / name
        directory.mkdir()
        extraction = served.extraction(directory, num_rows=36)
        config = train_config(extraction, directory)
        log = Path(extraction.store.path) / "answers.jsonl"
        command = [sys.executable, "extract.py", "--config", config.data.path, "--answers-only"]
        answering = start(command, directory)
        if name == "killed":
            answering.wait_for(lambda log=log: log.exists() and log.read_bytes() != b"")  # type: ignore[misc]
            answering.process.kill()
            answering.process.wait()
            num_answered = log.read_bytes().count(b"\n")
            assert 0 < num_answered < 36
            answering = start(command, directory)
        assert answering.process.wait(timeout=240) == 0, answering.log.read_text()
        logs.append(log.read_bytes())
        assert logs[-1].count(b"\n") == 36
    assert logs[0] == logs[1]
    assert served.left_behind() == []
    done = launch([sys.executable, "train.py"], config, directory, "--config", "CONFIG")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "36 samples come from sglang while they are trained on" in done.stderr
    assert metrics_of(directory / "streamed")[-1]["step"] == STEPS
