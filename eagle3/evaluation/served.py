"""Acceptance and speed against a live SGLang server.

Tokens and verify rounds are the server's own counters, which only its /generate reports; chat completions leave them
out, so prompts are rendered here and sent as token ids.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import requests

from eagle3.config import UserError
from eagle3.draft.acceptance import AnswerRounds
from eagle3.words import counted

SGLANG = "SGLang"
DRAFTER_FLAGS = "--speculative-algorithm EAGLE3 --speculative-draft-model-path DRAFTER"
ANSWER_TIMEOUT_SECONDS = 1800  # a long answer of a large model behind a full queue
INFO_TIMEOUT_SECONDS = 60
MOST_STEPS = 999  # drafts of a round; no drafter is worth a tenth of it
LARGEST_COUNT = 2**31  # of tokens or rounds of an answer

# What a figure depends on besides the drafter; the server's other settings are left out of the result.
RECORDED_FLAGS = (
    "model_path",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "attention_backend",
    "tp_size",
    "dp_size",
    "page_size",
    "max_running_requests",
    "context_length",
    "disable_overlap_schedule",
    "enable_mixed_chunk",
    "sampling_backend",
    "random_seed",
    "launch_command",
)


@dataclass(frozen=True)
class ServedAnswer:
    """What one prompt got, by the server's counters."""

    token_ids: list[int]
    num_tokens: int  # completion_tokens
    rounds: int  # spec_verify_ct
    histogram: list[int]  # index: drafts accepted in a round; empty from versions that do not report it
    seconds: float = field(default=0.0, compare=False)  # from the request to its whole answer


@dataclass(frozen=True)
class ServerFacts:
    """What the server says of itself."""

    url: str
    version: str
    tokenizer_path: str
    flags: dict[str, Any]  # RECORDED_FLAGS, and all whose names begin with speculative_
    engine: str = SGLANG


@dataclass(frozen=True)
class TopTwo:
    """The two likeliest next tokens after a prompt."""

    token_ids: tuple[int, int]
    margin: float  # between their log-probabilities


class SGLangClient:
    """Asks one server for answers, greedy ones unless a temperature is given."""

    def __init__(
        self,
        url: str,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        is_speculative: bool = True,
        cache_name: str | None = None,
    ) -> None:
        """An answer without verify rounds is an error, unless the server is not `is_speculative`.

        Requests with a `cache_name` find only those of the same name in the server's prefix cache.
        """
        self.url = url.rstrip("/")
        self._sampling = {"temperature": temperature, "max_new_tokens": max_new_tokens}
        self._is_speculative = is_speculative
        self._cache_name = cache_name

    def top_two(self, prompt_ids: list[int]) -> TopTwo:
        """Returns what the target would say next, and how surely.

        Raises:
            UserError: the server does not say.
        """
        sampling = {"temperature": 0.0, "max_new_tokens": 1}
        body = {"input_ids": prompt_ids, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
        try:
            response = requests.post(f"{self.url}/generate", json=body, timeout=ANSWER_TIMEOUT_SECONDS)
            (first, first_id, _), (second, second_id, _) = response.json()["meta_info"]["output_top_logprobs"][0]
        except (requests.RequestException, KeyError, ValueError, IndexError, TypeError) as error:
            raise UserError(
                f"/generate must return output_top_logprobs, got {type(error).__name__} ({self.url}); see its log"
            ) from None
        return TopTwo((first_id, second_id), first - second)

    def facts(self) -> ServerFacts:
        """Returns engine version and flags.

        Raises:
            UserError: nothing answers at the URL, or it is no SGLang server.
        """
        for endpoint in ("/server_info", "/get_server_info"):  # the second is its older name
            try:
                response = requests.get(self.url + endpoint, timeout=INFO_TIMEOUT_SECONDS)
            except requests.RequestException as error:
                raise UserError(
                    f"--server must be the URL of a running server, got no answer from {self.url!r} "
                    f"({type(error).__name__}); start the server, wait until it is ready, and check the URL"
                ) from None
            if response.ok:
                break
        info = json_object(response)
        if not response.ok or not all(isinstance(info.get(name), str) for name in ("version", "model_path")):
            raise UserError(
                f"--server must be the URL of an SGLang server, got {response.status_code} from {self.url + endpoint} "
                f"without a version and a model_path; check the URL"
            )
        flags = {
            name: value
            for name, value in info.items()
            if (name in RECORDED_FLAGS or name.startswith("speculative_")) and value is not None
        }
        return ServerFacts(self.url, str(info["version"]), str(info.get("tokenizer_path") or info["model_path"]), flags)

    def answer_all(
        self, prompts: list[list[int]], concurrency: int, on_answer: Callable[[ServedAnswer], None]
    ) -> list[ServedAnswer]:
        """Returns the answers in the order of `prompts`, with at most `concurrency` requests in flight.

        Raises:
            UserError: a request fails, or an answer that must have taken verify rounds reports none.
        """
        return answer_all(self._generate, self.url, prompts, concurrency, on_answer)

    def _generate(self, prompt_ids: list[int]) -> ServedAnswer:
        body: dict[str, Any] = {"input_ids": prompt_ids, "sampling_params": self._sampling}
        if self._cache_name is not None:
            body["extra_key"] = self._cache_name
        started = time.perf_counter()
        response = requests.post(f"{self.url}/generate", json=body, timeout=ANSWER_TIMEOUT_SECONDS)
        seconds = time.perf_counter() - started
        if not response.ok:
            raise UserError(
                f"the server must answer every prompt, got status {response.status_code} from {self.url}: "
                f"{response.text[:300]!r} for a prompt of {counted(len(prompt_ids), 'token')}"
            )
        answer = _read_answer(json_object(response), self.url, is_speculative=self._is_speculative)
        return replace(answer, seconds=seconds)


def answer_all(
    generate: Callable[[list[int]], ServedAnswer],
    url: str,
    prompts: list[list[int]],
    concurrency: int,
    on_answer: Callable[[ServedAnswer], None],
) -> list[ServedAnswer]:
    """Returns what `generate` makes of each prompt, in their order, with at most `concurrency` of them at a time.

    Raises:
        UserError: a request fails.
    """
    answered: list[ServedAnswer] = []

    def ask(prompt_ids: list[int]) -> ServedAnswer:
        try:
            answer = generate(prompt_ids)
        except requests.RequestException as error:
            raise UserError(
                f"the server must answer every prompt, got {type(error).__name__} from {url} after "
                f"{len(answered)} of {counted(len(prompts), 'answer')}; see the server's log, start it again and repeat"
            ) from None
        answered.append(answer)
        on_answer(answer)
        return answer

    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        try:
            return list(pool.map(ask, prompts))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def served_rounds(sample_ids: list[str], answers: list[ServedAnswer], num_draft_tokens: int) -> list[AnswerRounds]:
    """Returns the answers' rounds as the simulator counts them; histograms give the draft positions, if there are any.

    The server counts drafts that the last round accepted past the end of an answer, the simulator does not.
    """
    longest = max((len(answer.histogram) - 1 for answer in answers), default=-1)
    num_positions = max(longest, num_draft_tokens) if longest >= 0 else 0
    rounds = []
    for sample_id, answer in zip(sample_ids, answers, strict=True):
        # The server's lists end with the most that was ever accepted.
        padded = answer.histogram + [0] * (num_positions + 1 - len(answer.histogram))
        # Position i was tried in the rounds that accepted i drafts or more, and right in those that accepted more.
        at_least = [sum(padded[count:]) for count in range(num_positions + 2)]
        rounds.append(
            AnswerRounds(
                sample_id=sample_id,
                num_tokens=answer.num_tokens,
                rounds=float(answer.rounds),
                reached=tuple(float(count) for count in at_least[:num_positions]),
                accepted=tuple(float(count) for count in at_least[1 : num_positions + 1]),
            )
        )
    return rounds


def check_counters(facts: ServerFacts) -> None:
    """Refuses a server that has no counters, or whose counters leave tokens out.

    Raises:
        UserError: it is SGLang without speculation, or decodes beside prefills, in forwards that verify nothing.
    """
    if facts.engine == SGLANG and "speculative_algorithm" not in facts.flags:
        raise UserError(
            f"the server must have speculation on, got no speculative_algorithm in its settings ({facts.url}); "
            f"start it with {DRAFTER_FLAGS}"
        )
    if facts.flags.get("enable_mixed_chunk"):
        raise UserError(
            f"--enable-mixed-chunk must be off where acceptance is counted, got it on ({facts.url}): tokens that are "
            f"decoded beside another request's prefill take no verify round, and tau comes out too high; start the "
            f"server without it"
        )


def num_steps_of(facts: ServerFacts, default: int) -> int:
    """Returns how many drafts the server makes a round; `default` where it does not say.

    Raises:
        UserError: it says something else.
    """
    steps = facts.flags.get("speculative_num_steps", default)
    if type(steps) is not int or not 1 <= steps <= MOST_STEPS:
        raise UserError(
            f"speculative_num_steps must be a number from 1 to {MOST_STEPS}, got {str(steps)[:40]} ({facts.url}); "
            f"check that the URL is an SGLang server's"
        )
    return steps


def findings(answers: list[ServedAnswer], facts: ServerFacts) -> list[str]:
    """Returns what a reader of these figures must know: here, that the drafter did nothing."""
    num_rounds = sum(answer.rounds for answer in answers)
    if num_rounds == 0 or sum(answer.num_tokens - 1 - answer.rounds for answer in answers) > 0:
        return []
    return [
        f"no draft was accepted in {counted(num_rounds, 'round')}: the server does not run the drafter as it was "
        f"trained, or it was not trained. Usual causes: --speculative-algorithm EAGLE instead of EAGLE3 (this server "
        f"says {facts.flags.get('speculative_algorithm')}); weights whose names SGLang skips without a word (compare "
        f"them with those of an export of this package); a drafter of another target or of other capture layers; a "
        f"quantised target without --speculative-draft-model-quantization unquant"
    ]


def _read_answer(body: dict[str, Any], url: str, *, is_speculative: bool) -> ServedAnswer:
    meta = body.get("meta_info")
    token_ids = body.get("output_ids")
    if not isinstance(meta, dict) or not isinstance(token_ids, list) or "completion_tokens" not in meta:
        raise UserError(
            f"/generate must return output_ids and meta_info.completion_tokens, got the fields {sorted(body)} ({url}); "
            f"SGLang 0.5.11 and later do"
        )
    # Renamed in SGLang; 0.5.23 has the first name.
    histogram = meta.get("spec_correct_drafts_histogram") or meta.get("spec_accept_histogram") or []
    counts = {
        "output_ids": token_ids,
        "completion_tokens": [meta["completion_tokens"]],
        "spec_verify_ct": [meta.get("spec_verify_ct", 0)],
        "the histogram": histogram,
    }
    for name, values in counts.items():
        if not isinstance(values, list) or not all(type(each) is int and 0 <= each < LARGEST_COUNT for each in values):
            raise UserError(f"/generate must return whole numbers as {name}, got {str(values)[:60]} ({url})")
    if len(histogram) > MOST_STEPS + 1:
        longest = MOST_STEPS + 1
        raise UserError(f"/generate must return a histogram of {longest} counts at most, got {len(histogram)} ({url})")
    num_tokens = int(meta["completion_tokens"])
    # An answer that ends with prefill's token has no rounds, and the server leaves the counters out.
    if is_speculative and "spec_verify_ct" not in meta and num_tokens > 1:
        raise UserError(
            f"the server must have speculation on, got no spec_verify_ct for an answer of "
            f"{counted(num_tokens, 'token')} ({url}); start it with {DRAFTER_FLAGS}"
        )
    return ServedAnswer(token_ids, num_tokens, int(meta.get("spec_verify_ct", 0)), [int(count) for count in histogram])


def json_object(response: requests.Response) -> dict[str, Any]:
    """Returns the object that a server answered with; {} where it is none."""
    try:
        body = response.json()
    except requests.JSONDecodeError:
        return {}
    return body if isinstance(body, dict) else {}
