"""vLLM's counters become acceptance, in the forms of its 0.32.0; its faults become one sentence."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from json_servers import Reply, json_server

from eagle3.config import EvaluateConfig, UserError
from eagle3.config_file import load_config
from eagle3.evaluation.run import evaluate
from eagle3.evaluation.served import ServedAnswer, ServerFacts
from eagle3.evaluation.vllm import VLLMClient, findings, is_vllm, read_answer

MODELS: dict[str, Any] = {"object": "list", "data": [{"id": "target", "object": "model", "owned_by": "vllm"}]}
Answer = Callable[[dict[str, Any]], tuple[int, Any] | None]  # None closes the connection without an answer


def counters(histogram: list[int], **changes: Any) -> dict[str, Any]:
    """Writes what a request's rounds look like; index of the histogram: drafts accepted in a round."""
    steps, accepted = sum(histogram), sum(index * count for index, count in enumerate(histogram))
    drafts = len(histogram) - 1
    return {
        "mean_acceptance_length": 1 + accepted / max(steps, 1),
        "draft_acceptance_rate": accepted / max(steps * drafts, 1),
        "acceptance_histogram": histogram,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": steps * drafts,
        "num_spec_tokens": drafts,
        "per_step_accepted": None,
        "per_step_drafted": None,
    } | changes


def completion(token_ids: Any, speculation: Any) -> dict[str, Any]:
    """Writes an answer as /v1/completions gives it, here without the fields that have no number of ours in them."""
    return {
        "object": "text_completion",
        "model": "target",
        "choices": [{"index": 0, "text": "", "finish_reason": "stop", "token_ids": token_ids}],
        "usage": {"prompt_tokens": 1, "total_tokens": 1, "completion_tokens": 1},
        "metrics": {"time_to_first_token_ms": None, "speculative_decoding": speculation},
    }


def counted(body: dict[str, Any]) -> tuple[int, Any]:
    """Answers a prompt [n] with n tokens, in the fewest rounds of 4; the probe's with as many as it asks for."""
    num_tokens = body["max_tokens"] if body.get("ignore_eos") else body["prompt"][0]
    full, rest = divmod(num_tokens - 1, 4)
    histogram = [int(rest == 1), int(rest == 2), int(rest == 3), full]
    return 200, completion(list(range(num_tokens)), counters(histogram))


@contextmanager
def vllm_server(answer: Answer = counted, models: Any = MODELS, version: Any = "0.32.0") -> Iterator[str]:
    """Serves /version, /v1/models and /v1/completions on a free local port; yields the URL."""

    known = {"/version": {"version": version}, "/v1/models": models}

    def post(path: str, body: dict[str, Any]) -> Reply:
        assert path == "/v1/completions"
        return answer(body) or (200, None)

    def get(path: str) -> Reply:
        return (200, known[path]) if path in known else (404, {"detail": "Not Found"})

    with json_server(post, get) as url:
        yield url


def test_answers_come_with_their_rounds() -> None:
    bodies: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        bodies.append(body)
        return counted(body)

    told: list[ServedAnswer] = []
    with vllm_server(answer) as url:
        client = VLLMClient(url + "/", max_new_tokens=64)
        facts = client.facts()
        answers = client.answer_all([[9], [1], [12]], 3, told.append)
    assert facts == ServerFacts(url, "0.32.0", "target", {"model_path": "target", "speculative_num_steps": 3}, "vLLM")
    assert answers == [
        ServedAnswer(list(range(9)), 9, 2, [0, 0, 0, 2]),
        ServedAnswer([0], 1, 0, [0, 0, 0, 0]),  # prefill's token alone
        ServedAnswer(list(range(12)), 12, 3, [0, 0, 1, 2]),
    ]
    assert len(told) == 3
    assert bodies[0]["ignore_eos"]  # a model that ends at once would have no rounds to tell of
    for body in bodies[1:]:  # the model's generation_config.json sets whatever is left out
        assert body | {"prompt": None} == {
            "model": "target", "prompt": None, "max_tokens": 64, "return_token_ids": True,
            "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
        }  # fmt: skip


def test_vllm_is_told_from_others() -> None:
    with vllm_server() as url:
        assert is_vllm(url + "/")
    assert not is_vllm(url)  # it is gone
    bodies: list[Any] = [{"data": [{"id": "a", "owned_by": "sglang"}]}, {"data": "x"}, [], {"data": [1]}]
    for others in bodies:
        with vllm_server(models=others) as url:
            assert not is_vllm(url)


def test_a_server_without_counters_is_told_how_to_have_them() -> None:
    without = completion([1, 2], None)
    for body in (without, without | {"metrics": None}):
        with (
            vllm_server(lambda request, body=body: (200, body)) as url,  # type: ignore[misc] # bound for the loop
            pytest.raises(UserError, match=r"must count verify rounds by answer, .* --per-request-spec-decode-metrics"),
        ):
            VLLMClient(url, 8).facts()


def test_no_server_at_the_url() -> None:
    with vllm_server() as url:
        pass
    with pytest.raises(UserError, match="--server must be the URL of a running vLLM server, got ConnectionError from"):
        VLLMClient(url, 8).facts()
    with (
        vllm_server(version=None) as url,
        pytest.raises(UserError, match="--server must be the URL of a vLLM server, got no version or no model from"),
    ):
        VLLMClient(url, 8).facts()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, r"must return the token_ids of an answer, got None \(URL\); vLLM 0.32.0 and newer do"),
        (completion([], counters([1, 0])), r"must return the token_ids of an answer, got \[\]"),
        (completion([1.5], counters([1, 0])), r"must return the token_ids of an answer, got \[1.5\]"),
        (
            completion([1, 2], counters([1, 0], num_spec_steps="1")),
            "must return whole numbers as num_spec_steps, got 1",
        ),
        (completion([1, 2], counters([1, 0], num_spec_tokens=-1)), "whole numbers as num_spec_tokens, got -1"),
        (completion([1, 2], counters([1, 0], acceptance_histogram=None)), "numbers as acceptance_histogram, got None"),
        (completion([1, 2], counters([0] * 1001)), r"numbers as acceptance_histogram, got \[0, 0"),
        (
            completion([1, 2], counters([1, 0], num_spec_steps=2)),
            "must be the sum of acceptance_histogram, got 2 and 1",
        ),
    ],
)
def test_an_answer_of_another_shape(body: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_answer(body, "URL")


def test_requests_that_fail() -> None:
    def refuse(body: dict[str, Any]) -> tuple[int, Any]:
        return counted(body) if body.get("ignore_eos") else (400, {"error": {"message": "too long"}})

    with vllm_server(refuse) as url:
        client = VLLMClient(url, 8)
        client.facts()
        with pytest.raises(UserError, match=r"got status 400 from .*too long.* for a prompt of 2 tokens"):
            client.answer_all([[1, 2]], 1, lambda answer: None)
    with vllm_server(lambda body: counted(body) if body.get("ignore_eos") else None) as url:
        client = VLLMClient(url, 8)
        client.facts()
        with pytest.raises(
            UserError, match=r"must answer every prompt, got ConnectionError from .* after 0 of 1 answer;"
        ):
            client.answer_all([[1]], 1, lambda answer: None)


def test_what_a_reader_must_know() -> None:
    assert findings([ServedAnswer([1] * 5, 5, 1, [0, 0, 0, 1]), ServedAnswer([1], 1, 0, [0])]) == []
    (idle,) = findings([ServedAnswer([1] * 3, 3, 2, [2, 0])])
    assert idle.startswith("no draft was accepted in 2 rounds")
    assert "eagle_aux_hidden_state_layer_ids beside eagle_config" in idle
    (missing,) = findings([ServedAnswer([1] * 9, 9, 2, [1, 0, 0, 1]), ServedAnswer([1] * 5, 5, 1, [0, 0, 0, 1])])
    assert missing.startswith("3 tokens came without a verify round")


def test_an_evaluation_finds_vllm_at_the_url(
    tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "what is it?"}]}))
    histogram = [1, 0, 2, 0]
    with vllm_server(lambda body: (200, completion([5] * 7 + [2], counters(histogram)))) as url:
        settings = [f"server={url}", f"out={tmp_path / 'out'}", f"prompts.path={tmp_path / 'prompts.jsonl'}",
                    f"target.path={tiny_target}", "max_new_tokens=8"]  # fmt: skip
        result = evaluate(load_config(EvaluateConfig, None, settings))
        assert result["tau_trained"] == 8 / 3
        assert result["num_draft_tokens"] == 3
        assert result["trained"]["all_answers"]["conditional"] == [2 / 3, 1.0, 0.0]
        assert result["server"]["engine"] == "vLLM"
        assert "vLLM 0.32.0 at http" in capsys.readouterr().out.replace("\n", " ")
        with pytest.raises(UserError, match="explain must be false with a vLLM server, got true"):
            evaluate(load_config(EvaluateConfig, None, [*settings, "explain=true", "drafter=x"]))
