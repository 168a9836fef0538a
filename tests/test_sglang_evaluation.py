"""A real SGLang serves an exported drafter, and its counters say what the simulator says of the tokens it returned."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_servers import server_config
from test_extraction import prompt_rows, write_prompts
from tiny_drafters import LAYERS, fit_drafter, random_drafter
from transformers import AutoModelForCausalLM

from eagle3.capture.server import Server, running_server
from eagle3.config import EvaluateConfig, load_config
from eagle3.draft.export import export_drafter, load_drafter
from eagle3.draft.target_weights import load_target_config
from eagle3.evaluation.decoder import decode
from eagle3.evaluation.run import evaluate
from eagle3.evaluation.served import ServedAnswer, SGLangClient
from eagle3.evaluation.simulate import simulate
from eagle3.evaluation.target import LocalTarget
from eagle3.prompts.rendering import ChatRenderer
from eagle3.prompts.tokenizers import load_tokenizer

NUM_PROMPTS = 9
NUM_DRAFT_TOKENS = 3
MAX_NEW_TOKENS = 24
SPECULATION: dict[str, Any] = {
    "speculative-algorithm": "EAGLE3",
    "speculative-num-steps": NUM_DRAFT_TOKENS,
    "speculative-eagle-topk": 1,
    "speculative-num-draft-tokens": NUM_DRAFT_TOKENS + 1,
    # Of the CPU's backends the one that verifies drafts; the stand-in has its ops in plain torch.
    "attention-backend": "intel_amx",
    "skip-server-warmup": True,
    "enable-mixed-chunk": False,
}


@dataclass(frozen=True)
class Served:
    """A server with a drafter that is right now and then, and the same two models here."""

    server: Server
    target: LocalTarget
    drafter: Path
    prompts: Path


@pytest.fixture(scope="module")
def served(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("served")
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    target = LocalTarget(model, LAYERS, frozenset({2}))
    renderer = ChatRenderer(load_tokenizer(str(tiny_target), False), {})
    rows = prompt_rows(NUM_PROMPTS)
    prompt_ids = [renderer.prompt_ids(row["messages"][:1]) for row in rows]
    drafter = random_drafter(target, 300)
    answers = decode(target, None, prompt_ids, num_draft_tokens=1, max_new_tokens=MAX_NEW_TOKENS, batch_size=9)
    sequences = [ids + answer.token_ids for ids, answer in zip(prompt_ids, answers, strict=True)]
    fit_drafter(drafter, target, sequences, num_steps=60)  # first turns alone: it knows some answers
    target_config = load_target_config(tiny_target)
    export_drafter(drafter, directory / "drafter", target_config=target_config, card="", dtype=torch.float32)
    flags = {**SPECULATION, "speculative-draft-model-path": str(directory / "drafter")}
    config = server_config(directory, flags=flags)
    with running_server(config, str(tiny_target), {}, {"EAGLE3_CPU_KERNELS": "1"}) as server:
        body = {"input_ids": [3, 4, 5], "sampling_params": {"max_new_tokens": 2}}
        server.wait_until(lambda: server.post("/generate", body, 600), timeout_seconds=900)
        yield Served(server, target, directory / "drafter", write_prompts(directory / "prompts.jsonl", rows))


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
    settings = {"prompts.path": served.prompts, "out": tmp_path, "server": served.server.url, "drafter": served.drafter}
    settings |= {"max_new_tokens": MAX_NEW_TOKENS, "batch_size": 4}
    result = evaluate(load_config(EvaluateConfig, None, [f"{name}={value}" for name, value in settings.items()]))

    drafter = load_drafter(served.drafter, load_target_config(Path(served.target.model.config.name_or_path)))
    samples = [served.target.features(str(i), prompt, answer.token_ids) for i, (prompt, answer) in enumerate(returned)]
    simulated = simulate(drafter.eval(), served.target.embed_tokens, samples, num_draft_tokens=NUM_DRAFT_TOKENS)
    assert len(returned) == sum(1 + number % 3 for number in range(NUM_PROMPTS))
    # fp32 on both sides: the very rounds, answer by answer.
    assert [answer.rounds for _, answer in returned] == [each.rounds for each in simulated]
    assert [answer.num_tokens for _, answer in returned] == [each.num_tokens for each in simulated]
    tau = sum(each.num_tokens for each in simulated) / sum(each.rounds for each in simulated)
    assert result["tau_trained"] == pytest.approx(tau)
    assert 1.2 < tau < 4  # some drafts were right and some were not
    assert result["findings"] == []
    assert result["server"]["flags"]["speculative_algorithm"] == "EAGLE3"
