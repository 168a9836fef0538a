"""A real SGLang server on the CPU serves a drafter: its rounds are the simulator's, and the guard watches its start."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY
from sglang_servers import server_config
from target_stores import LAYERS
from tiny_drafters import Fitted, write_fitted_drafter
from transformers import AutoModelForCausalLM

from eagle3.capture.launch import ServerError
from eagle3.capture.server import Server, running_server
from eagle3.config import ServerConfig
from eagle3.draft.export import load_drafter
from eagle3.draft.target_weights import load_target_config, load_target_weights
from eagle3.evaluation.doctor.examination import examine
from eagle3.evaluation.served import ServedAnswer, SGLangClient
from eagle3.evaluation.simulate import packs_of, parse_speculation, simulate_all
from eagle3.evaluation.target import LocalTarget

TREE = {"num-steps": 3, "eagle-topk": 2, "num-draft-tokens": 6}


def drafting_server(log_directory: Path, drafter: Path) -> ServerConfig:
    flags = {
        "attention-backend": "intel_amx",  # the one that runs EAGLE-3 on a CPU
        "cuda-graph-backend-prefill": "disabled",
        "skip-server-warmup": True,
        "enable-mixed-chunk": False,  # a token of a mixed batch is decoded without a round
        "max-total-tokens": 4096,
        "speculative-algorithm": "EAGLE3",
        "speculative-draft-model-path": str(drafter),
        **{f"speculative-{name}": value for name, value in TREE.items()},
    }
    config = server_config(log_directory, flags=flags)
    # This checkout's plugin, and the stand-in for the attention ops.
    return replace(config, env={**config.env, "EAGLE3_CPU_KERNELS": 1, "PYTHONPATH": str(REPOSITORY)})


def wait_until_ready(server: Server) -> None:
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    server.wait_until(lambda: server.post("/generate", body, 300), 300)


@dataclass(frozen=True)
class Running:
    """A server, what it serves, and where it logs."""

    url: str
    fitted: Fitted
    target_path: Path
    target: LocalTarget
    log: Path


@pytest.fixture(scope="module")
def running(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    target = LocalTarget(model, LAYERS, frozenset([2]))
    directory = tmp_path_factory.mktemp("drafter")
    fitted = write_fitted_drafter(directory, tiny_target, target)
    config = drafting_server(directory, fitted.drafter)
    with running_server(config, str(tiny_target), {}, {}) as server:
        wait_until_ready(server)
        yield Running(server.url, fitted, tiny_target, target, Path(config.log))


def ask(running: Running) -> list[ServedAnswer]:
    client = SGLangClient(running.url, max_new_tokens=40)
    return client.answer_all(running.fitted.prompts, 4, lambda answer: None)


def test_rounds_of_served_trees_are_the_simulators(running: Running) -> None:
    answers = ask(running)
    samples = [
        running.target.features(str(i), prompt, answer.token_ids)
        for i, (prompt, answer) in enumerate(zip(running.fitted.prompts, answers, strict=True))
    ]
    drafter = load_drafter(running.fitted.drafter, load_target_config(running.target_path)).eval()
    setting = parse_speculation("3/2/6")
    packs = packs_of(iter(samples), 8192, torch.device("cpu"))
    simulated = simulate_all({"a": drafter}, load_target_weights(running.target_path), packs, [setting])["a", setting]
    # fp32 on both sides: not one round apart.
    assert [answer.rounds for answer in answers] == [rounds.rounds for rounds in simulated]
    assert sum(answer.num_tokens for answer in answers) > 1.5 * sum(answer.rounds for answer in answers)


def test_the_doctor_finds_nothing_on_the_server(running: Running) -> None:
    examination = examine(
        running.fitted.drafter,
        target_path=running.target_path,
        store_path=running.fitted.store,
        server=running.url,
        tries_layers=False,
        chat_template_kwargs={},
    )
    assert examination.findings == []
    assert examination.skipped == []


def test_the_guard_has_seen_weights_and_boundaries(running: Running) -> None:
    log = running.log.read_text()
    assert "eagle3 guard: the drafter's 13 tensors are all used, and fill it" in log
    assert "eagle3 guard: the drafter gets the boundaries that it was trained on, [2, 4, 5]" in log


def test_a_drafter_of_other_layers_is_not_served(running: Running, tmp_path: Path) -> None:
    drafter = Path(shutil.copytree(running.fitted.drafter, tmp_path / "drafter"))
    config: dict[str, Any] = json.loads((drafter / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(LAYERS)
    (drafter / "config.json").write_text(json.dumps(config))
    with running_server(drafting_server(tmp_path, drafter), str(running.target_path), {}, {}) as server:
        with pytest.raises(ServerError, match="must keep running, got exit code"):
            wait_until_ready(server)
        log = (tmp_path / "sglang.log").read_text()
    said = "LlamaForCausalLM captures must be [2, 4, 5], which the drafter was trained on, got [3, 5, 6]"
    assert said in log
