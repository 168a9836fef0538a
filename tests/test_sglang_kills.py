"""kill -9 of extract.py or of its server loses and doubles nothing, whatever either was doing."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY
from sglang_servers import server_config
from tiny_extractions import contents, prompt_rows, write_prompts

from eagle3.capture.client import SGLangEngine
from eagle3.capture.server import capturing_servers
from eagle3.config import ServerConfig
from eagle3.features.record import FeatureSample

LAYERS = [2, 4, 5]
NUM_ROWS = 36
SETTINGS = [
    "target.dtype=float32",
    "store.shard_bytes=300000",
    "regenerate.max_new_tokens=8",
    "regenerate.cut_loops=false",
    "server.max_requests=4",  # answers are logged 16 rows at a time
]
EXTRACT_PHASES = ["extract waiting", "extract answering", "extract writing", "extract renaming", "extract indexing"]
SERVER_PHASES = ["server waiting", "writer writing", "writer renaming"]
SOAK_KILLS = 20
FP32_NOISE = 1e-5  # of a row's norm: other batch mates, other summation order


@dataclass(frozen=True)
class Scene:
    """A target, its prompts, a server that is attached to, and the settings of one that is started."""

    target: Path
    prompts: Path
    attached: list[str]
    own: list[str]


@pytest.fixture(scope="module")
def scene(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    directory = tmp_path_factory.mktemp("kills")
    prompts = write_prompts(directory / "prompts.jsonl", prompt_rows(NUM_ROWS))
    config = server_config(directory, flags={"max-total-tokens": 4096})
    with capturing_servers(config, str(tiny_target), LAYERS) as (servers, area):
        SGLangEngine(servers, area, config, LAYERS)
        attached = [f"server.urls=[{servers[0].url}]", f"server.staging_dir={area.directory}"]
        yield Scene(tiny_target, prompts, attached, own_server(config))


def own_server(config: ServerConfig) -> list[str]:
    settings = [f"server.flags.{name}={value}" for name, value in config.flags.items() if name != "dtype"]
    settings += [f"server.env.{name}={value}" for name, value in config.env.items()]
    return [*settings, f"server.python={config.python}"]


def extract(scene: Scene, directory: Path, server: list[str], kill: str | None = None) -> int:
    """Runs extract.py; returns its exit code. `kill` is `VICTIM PHASE COUNT`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    if kill is not None:
        environment["PYTHONPATH"] = f"{REPOSITORY / 'tests' / 'kills'}{os.pathsep}{REPOSITORY}"
        environment["EAGLE3_KILL"] = f"{kill} {directory / kill.replace(' ', '-')}"
    command = [sys.executable, "extract.py", "--prompts", str(scene.prompts), f"target.path={scene.target}", *SETTINGS]
    command += [f"store.path={directory / 'store'}", f"server.log={directory / 'server.log'}", *server]
    with (directory / "log").open("a") as log:
        return subprocess.run(command, cwd=REPOSITORY, env=environment, stderr=log, check=False).returncode


def was_hit(directory: Path, kill: str) -> bool:
    return (directory / kill.replace(" ", "-")).exists()


@pytest.fixture(scope="module")
def undisturbed(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> dict[str, FeatureSample]:
    directory = tmp_path_factory.mktemp("undisturbed")
    assert extract(scene, directory, scene.attached) == 0, (directory / "log").read_text()
    return contents(directory / "store")


@pytest.fixture(scope="module")
def noise(scene: Scene, undisturbed: dict[str, FeatureSample], tmp_path_factory: pytest.TempPathFactory) -> float:
    """How far two undisturbed runs are apart."""
    directory = tmp_path_factory.mktemp("undisturbed-again")
    assert extract(scene, directory, scene.attached) == 0, (directory / "log").read_text()
    return max(FP32_NOISE, largest_difference(contents(directory / "store"), undisturbed))


def largest_difference(seen: dict[str, FeatureSample], wanted: dict[str, FeatureSample]) -> float:
    """Compares ids, masks and counts bit for bit; returns the largest difference of a state, of its row's norm."""
    assert seen.keys() == wanted.keys()
    largest = 0.0
    for sample_id, sample in wanted.items():
        for name in ("input_ids", "loss_mask", "last_rows"):
            assert torch.equal(getattr(seen[sample_id], name), getattr(sample, name)), (sample_id, name)
        for name in ("aux_hidden_states", "last_hidden_states"):
            ours, theirs = getattr(seen[sample_id], name), getattr(sample, name)
            assert ours.shape == theirs.shape, (sample_id, name)
            largest = max(largest, float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).max()))
    return largest


def test_killed_in_each_phase_the_same_command_goes_on(
    scene: Scene, undisturbed: dict[str, FeatureSample], noise: float, tmp_path: Path
) -> None:
    # In this order each run has enough left to do.
    for kill in ("writing 1", "renaming 1", "indexing 1", "answering 2", "waiting 2"):
        code = extract(scene, tmp_path, scene.attached, f"extract {kill}")
        assert (code, was_hit(tmp_path, f"extract {kill}")) == (-signal.SIGKILL, True), (
            kill,
            (tmp_path / "log").read_text(),
        )
    assert extract(scene, tmp_path, scene.attached) == 0, (tmp_path / "log").read_text()
    assert largest_difference(contents(tmp_path / "store"), undisturbed) <= noise


def test_server_that_is_killed_is_started_again(
    scene: Scene, undisturbed: dict[str, FeatureSample], noise: float, tmp_path: Path
) -> None:
    kill = "writer writing 98"
    assert extract(scene, tmp_path, scene.own, kill) == 0, (tmp_path / "log").read_text()
    assert was_hit(tmp_path, kill)
    assert largest_difference(contents(tmp_path / "store"), undisturbed) <= noise


@pytest.mark.soak
def test_many_kills_at_random(
    scene: Scene, undisturbed: dict[str, FeatureSample], noise: float, tmp_path: Path
) -> None:
    chance = random.Random(0)
    phases = EXTRACT_PHASES + SERVER_PHASES
    to_come = [*phases, *phases, *chance.choices(phases, k=SOAK_KILLS - 2 * len(phases))]
    chance.shuffle(to_come)
    num_runs = 0
    while to_come:
        num_runs += 1
        directory = tmp_path / str(num_runs)
        directory.mkdir()
        code = -signal.SIGKILL
        while code != 0:
            # A server that dies on its first sample does not start, which is an error of its own.
            count = chance.randint(1, 3) if to_come and to_come[0] in EXTRACT_PHASES else chance.randint(6, 12)
            kill = f"{to_come[0]} {count}" if to_come else None
            # With a server of ours now and then, whose processes must end with extract.py's.
            is_own = kill is not None and (to_come[0] in SERVER_PHASES or chance.random() < 0.2)
            code = extract(scene, directory, scene.own if is_own else scene.attached, kill)
            assert code in (0, -signal.SIGKILL), (kill, (directory / "log").read_text())
            if kill is not None and was_hit(directory, kill):
                print(f"hit: {kill}", flush=True)
                (directory / kill.replace(" ", "-")).unlink()
                to_come.pop(0)
        assert largest_difference(contents(directory / "store"), undisturbed) <= noise
    print(f"{SOAK_KILLS} kills, {num_runs} runs to the end")
