"""Acceptance and speed against a live vLLM server.

Rounds come with each answer if the server was started to count them so; its Prometheus counters are of all requests
together. Source of the fields: vLLM 0.32.0 and 0.33.0, entrypoints/generate/base/protocol.py (experimental, it says).
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeGuard

import requests

from eagle3.config import UserError
from eagle3.evaluation.served import (
    ANSWER_TIMEOUT_SECONDS,
    INFO_TIMEOUT_SECONDS,
    LARGEST_COUNT,
    MOST_STEPS,
    ServedAnswer,
    ServerFacts,
    answer_all,
    json_object,
)
from eagle3.words import counted

ENGINE = "vLLM"
FLAGS = (
    """--per-request-spec-decode-metrics summary --speculative-config '{"method": "eagle3", "model": DRAFTER, """
    """"num_speculative_tokens": 3}'"""
)
PROBE_TOKENS = 8


def is_vllm(url: str) -> bool:
    """Returns whether the server at a URL says that it is vLLM; False where nothing answers."""
    try:
        response = requests.get(f"{url.rstrip('/')}/v1/models", timeout=INFO_TIMEOUT_SECONDS)
    except requests.RequestException:
        return False
    return any(model.get("owned_by") == "vllm" for model in _models(response))


class VLLMClient:
    """Asks one server for greedy answers."""

    def __init__(self, url: str, max_new_tokens: int) -> None:
        self.url = url.rstrip("/")
        self._max_new_tokens = max_new_tokens
        self._model: str | None = None  # as requests name it, once the server was asked

    def facts(self) -> ServerFacts:
        """Returns version, model, and the drafts of a round, which only an answer says: so one is asked for.

        Raises:
            UserError: the server does not answer, or has speculation or its counters off.
        """
        try:
            models = _models(requests.get(f"{self.url}/v1/models", timeout=INFO_TIMEOUT_SECONDS))
            version = json_object(requests.get(f"{self.url}/version", timeout=INFO_TIMEOUT_SECONDS)).get("version")
            if not models or not isinstance(models[0].get("id"), str) or not isinstance(version, str):
                raise UserError(
                    f"--server must be the URL of a vLLM server, got no version or no model from {self.url}; check it"
                )
            self._model = models[0]["id"]
            # Two tokens at least: the first takes no round.
            body = self._ask([0, 1, 2], {"max_tokens": PROBE_TOKENS, "ignore_eos": True})
        except requests.RequestException as error:
            raise UserError(
                f"--server must be the URL of a running vLLM server, got {type(error).__name__} from {self.url}; "
                f"see its log"
            ) from None
        path = str(models[0].get("root") or self._model)
        flags = {"model_path": path, "speculative_num_steps": _counters(body, self.url)["num_spec_tokens"]}
        return ServerFacts(self.url, version, path, flags, ENGINE)

    def answer_all(
        self, prompts: list[list[int]], concurrency: int, on_answer: Callable[[ServedAnswer], None]
    ) -> list[ServedAnswer]:
        """Returns the answers in the order of `prompts`, with at most `concurrency` requests in flight.

        Raises:
            UserError: a request fails, or an answer comes without its rounds.
        """
        return answer_all(self._generate, self.url, prompts, concurrency, on_answer)

    def _generate(self, prompt_ids: list[int]) -> ServedAnswer:
        started = time.perf_counter()
        body = self._ask(prompt_ids, {"max_tokens": self._max_new_tokens})
        seconds = time.perf_counter() - started
        return replace(read_answer(body, self.url), seconds=seconds)

    def _ask(self, prompt_ids: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        assert self._model is not None, "facts() comes first"
        # All that a model's generation_config.json would set otherwise.
        greedy = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        request = {"model": self._model, "prompt": prompt_ids, "return_token_ids": True, **greedy, **sampling}
        response = requests.post(f"{self.url}/v1/completions", json=request, timeout=ANSWER_TIMEOUT_SECONDS)
        if not response.ok:
            raise UserError(
                f"the server must answer every prompt, got status {response.status_code} from {self.url}: "
                f"{response.text[:300]!r} for a prompt of {counted(len(prompt_ids), 'token')}"
            )
        return json_object(response)


def read_answer(body: dict[str, Any], url: str) -> ServedAnswer:
    """Returns what the answer of /v1/completions says of its tokens and rounds.

    Raises:
        UserError: it lacks them, or they are no counts.
    """
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    token_ids = choice.get("token_ids")
    if not _are_counts(token_ids) or not token_ids:
        raise UserError(
            f"/v1/completions must return the token_ids of an answer, got {str(token_ids)[:60]} ({url}); "
            f"vLLM 0.32.0 and newer do"
        )
    counters = _counters(body, url)
    return ServedAnswer(token_ids, len(token_ids), counters["num_spec_steps"], counters["acceptance_histogram"])


def findings(answers: list[ServedAnswer]) -> list[str]:
    """Returns what a reader of these figures must know: that the drafter did nothing, or that rounds are missing."""
    found = []
    num_rounds = sum(answer.rounds for answer in answers)
    if num_rounds > 0 and not any(sum(answer.histogram[1:]) for answer in answers):
        found.append(
            f"no draft was accepted in {counted(num_rounds, 'round')}: the server does not run the drafter as it was "
            f"trained, or it was not trained. Usual causes: no eagle_aux_hidden_state_layer_ids beside eagle_config in "
            f"its config.json (vLLM then captures other layers); weights that are missing in the file, which vLLM "
            f"leaves random; a drafter of another target"
        )
    unverified = sum(
        max(0, answer.num_tokens - 1 - sum((index + 1) * count for index, count in enumerate(answer.histogram)))
        for answer in answers
    )
    if unverified > 0:
        found.append(
            f"{counted(unverified, 'token')} came without a verify round, as vLLM decodes where it has no drafts (at "
            f"the end of its context, say): tau is too high by them"
        )
    return found


def _counters(body: dict[str, Any], url: str) -> dict[str, Any]:
    metrics = body.get("metrics")
    counters = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if not isinstance(counters, dict):
        raise UserError(
            f"the server must count verify rounds by answer, got no metrics.speculative_decoding ({url}); start vLLM "
            f"(0.32.0 or newer) with {FLAGS}"
        )
    wanted = {"num_spec_steps": 1, "num_spec_tokens": 1, "acceptance_histogram": MOST_STEPS + 1}
    for name, most in wanted.items():
        value = counters.get(name)
        values = value if name == "acceptance_histogram" else [value]
        if not _are_counts(values) or len(values) > most:
            raise UserError(f"/v1/completions must return whole numbers as {name}, got {str(value)[:60]} ({url})")
    steps, counted = counters["num_spec_steps"], sum(counters["acceptance_histogram"])
    if steps != counted:
        raise UserError(f"num_spec_steps must be the sum of acceptance_histogram, got {steps} and {counted} ({url})")
    return counters


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(each) is int and 0 <= each < LARGEST_COUNT for each in values)


def _models(response: requests.Response) -> list[dict[str, Any]]:
    data = json_object(response).get("data")
    return [model for model in data if isinstance(model, dict)] if isinstance(data, list) else []
