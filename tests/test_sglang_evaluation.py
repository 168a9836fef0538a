"""A real SGLang serves a drafter of the demo's recipe, and its counters say what the simulator says of its tokens."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from sglang_servers import server_config

from eagle3.capture.server import Server, running_server
from eagle3.config import EvaluateConfig, ServeConfig, ServerConfig, TargetConfig
from eagle3.config_file import load_config
from eagle3.draft.export import load_drafter
from eagle3.draft.target_weights import load_target_config
from eagle3.evaluation import serving
from eagle3.evaluation.run import evaluate
from eagle3.evaluation.served import ServedAnswer, SGLangClient
from eagle3.evaluation.simulate import simulate
from eagle3.evaluation.target import load_local_target
from eagle3.prompts.tokenizers import load_tokenizer

EVERY = 15  # of the demo's prompts one is taken; the second of them has two turns
TRAINED_TOKENS, EPOCHS = 40, 16  # of an answer; a minute of training
NEVER = 10_000  # steps: the last one validates and saves in any case
NUM_ASKED, MAX_NEW_TOKENS = 6, 24
NUM_DRAFT_TOKENS = 3
SPECULATION: dict[str, Any] = {
    "speculative-algorithm": "EAGLE3",
    "speculative-num-steps": NUM_DRAFT_TOKENS,
    "speculative-eagle-topk": 1,
    "speculative-num-draft-tokens": NUM_DRAFT_TOKENS + 1,
}
CPU_FLAGS: dict[str, Any] = {
    # Of the CPU's backends the one that verifies drafts; the stand-in has its ops in plain torch.
    "attention-backend": "intel_amx",
    "skip-server-warmup": True,
    "enable-mixed-chunk": False,
}


@dataclass(frozen=True)
class Served:
    """A server of SmolLM2 with a drafter that was trained on its answers to the prompts, and how to start others."""

    server: Server
    config: ServerConfig
    target: Path
    drafter: Path
    prompts: Path


def run_command(*arguments: object) -> None:
    """Runs one of the three commands, as `make demo` does."""
    command = [sys.executable, *map(str, arguments), "tracking.backend=none"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.fixture(scope="module")
def served(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("served")
    config = server_config(directory, flags=CPU_FLAGS)
    config = dataclasses.replace(config, env={**config.env, "EAGLE3_CPU_KERNELS": 1})
    prompts, store, run = directory / "prompts.jsonl", directory / "features", directory / "train"
    lines = (REPOSITORY / "examples" / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    prompts.write_text("".join(lines[2 * EVERY :: EVERY]), encoding="utf-8")
    target = f"target.path={smollm2_dir}"
    length = f"regenerate.max_new_tokens={TRAINED_TOKENS}"
    run_command("extract.py", "--prompts", prompts, "--config", "demo.yaml", target, f"store.path={store}", length)
    lasts = [f"run.{name}={NEVER}" for name in ("validate_every", "save_every")]
    settings = [target, f"data.path={store}", f"run.dir={run}", f"run.epochs={EPOCHS}", *lasts]
    run_command("train.py", "--config", "configs/train/demo.yaml", *settings)
    flags = {**SPECULATION, "speculative-draft-model-path": str(run / "drafter")}
    with running_server(config, str(smollm2_dir), flags, {}) as server:
        body = {"input_ids": [3, 4, 5], "sampling_params": {"max_new_tokens": 2}}
        server.wait_until(lambda: server.post("/generate", body, 600), timeout_seconds=900)
        yield Served(server, config, smollm2_dir, run / "drafter", prompts)


def settings_of(served: Served, out: Path, **changes: Any) -> EvaluateConfig:
    """Returns settings under which both sides compute in fp32, so that their rounds are the very same."""
    settings = {
        "target.path": served.target,
        "target.dtype": "float32",
        "prompts.path": served.prompts,
        "drafter": served.drafter,
        "out": out,
        "max_prompts": NUM_ASKED,
        "max_new_tokens": MAX_NEW_TOKENS,
        "batch_size": 4,
        "tracking.backend": "none",
    }
    return load_config(EvaluateConfig, None, [f"{name}={value}" for name, value in (settings | changes).items()])


def test_the_servers_acceptance_is_the_simulators(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned: list[tuple[list[int], ServedAnswer]] = []
    whole = SGLangClient.answer_all

    def answer_all(
        client: SGLangClient, prompts: list[list[int]], concurrency: int, on_answer: Callable[[ServedAnswer], None]
    ) -> list[ServedAnswer]:
        answers = whole(client, prompts, concurrency, on_answer)
        returned.extend(zip(prompts, answers, strict=True))
        return answers

    monkeypatch.setattr(SGLangClient, "answer_all", answer_all)  # only to see what passes
    result = evaluate(settings_of(served, tmp_path, server=served.server.url))
    drafter = load_drafter(served.drafter, load_target_config(served.target)).float().eval()
    tokenizer = load_tokenizer(str(served.target), trust_remote_code=False)
    target_config = TargetConfig(path=str(served.target), dtype="float32", device="cpu")
    target = load_local_target(target_config, drafter.config.capture_layers, tokenizer)
    samples = [target.features(str(i), prompt, answer.token_ids) for i, (prompt, answer) in enumerate(returned)]
    simulated = simulate(drafter, target.embed_tokens, samples, num_draft_tokens=NUM_DRAFT_TOKENS)
    assert len(returned) > NUM_ASKED  # later turns follow the answers to earlier ones
    assert [answer.rounds for _, answer in returned] == [each.rounds for each in simulated]
    assert [answer.num_tokens for _, answer in returned] == [each.num_tokens for each in simulated]
    tau = sum(each.num_tokens for each in simulated) / sum(each.rounds for each in simulated)
    assert result["tau_trained"] == pytest.approx(tau)
    assert 1.2 < tau < 4  # some drafts were right and some were not
    assert result["findings"] == []
    assert result["server"]["flags"]["speculative_algorithm"] == "EAGLE3"


def test_servers_with_the_drafter_and_without_answer_the_same(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="the pictures need it")

    @contextmanager
    def one_is_there(
        config: ServerConfig, model_path: str, flags: Mapping[str, Any], env: Mapping[str, str]
    ) -> Iterator[Server]:
        """Takes the server that runs already for the one with the drafter; the plain one is started."""
        if flags:
            yield served.server
            return
        with running_server(config, model_path, flags, env) as server:
            yield server

    monkeypatch.setattr(serving, "running_server", one_is_there)
    serve = ServeConfig(served.config, [str(NUM_DRAFT_TOKENS)], concurrency=[4, 1], prompts_per_slot=1)
    result = evaluate(dataclasses.replace(settings_of(served, tmp_path), serve=serve))
    asked, alone = result["cells"][:2]
    assert [cell["server"] for cell in result["cells"]] == ["3", "3", "plain", "plain"]
    assert (alone["concurrency"], alone["num_answers"]) == (1, 1)
    assert asked["simulated"]["rounds"] == asked["acceptance"]["rounds"]
    assert asked["simulated"]["tau"] == pytest.approx(asked["acceptance"]["tau"])
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    drafted = [line for line in lines if line["server"] == "3"]
    assert [line["rounds"] for line in drafted] == [line["simulated_rounds"] for line in drafted]
    (agreement,) = result["agreements"]
    assert agreement["num_equal"] == agreement["num_answers"] == len(drafted)
    # Accepted drafts at every position, those past an answer's end among them.
    histogram = asked["histogram"]
    assert sum(histogram) == asked["acceptance"]["rounds"]
    assert sum((index + 1) * count for index, count in enumerate(histogram)) >= asked["num_tokens"] - len(drafted)
