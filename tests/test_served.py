"""A server's counters become acceptance; its faults become one sentence."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from json_servers import Reply, json_server

from eagle3.config import UserError
from eagle3.draft.acceptance import summarise
from eagle3.evaluation.served import (
    ServedAnswer,
    ServerFacts,
    SGLangClient,
    check_counters,
    findings,
    num_steps_of,
    served_rounds,
)

INFO = {
    "version": "0.5.23",
    "model_path": "/models/target",
    "tokenizer_path": "/models/tokenizer",
    "dtype": "bfloat16",
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 3,
    "speculative_token_map": None,
    "random_seed": 1,
    "watchdog_timeout": 300,
}


@contextmanager
def running_server(generate: Callable[[dict[str, Any]], Reply], info: Reply = (200, INFO)) -> Iterator[str]:
    """Serves /server_info and /generate on a free local port; yields the URL."""

    def answer(path: str, body: dict[str, Any]) -> Reply:
        assert path == "/generate"
        return generate(body)

    with json_server(answer, lambda path: info if path == "/server_info" else (404, {})) as url:
        yield url


def counted(body: dict[str, Any]) -> Reply:
    """Answers a prompt [n] with n tokens in the fewest rounds of 4."""
    (num_tokens,) = body["input_ids"]
    full, rest = divmod(num_tokens - 1, 4)
    meta: dict[str, Any] = {"completion_tokens": num_tokens}
    if num_tokens > 1:
        meta["spec_verify_ct"] = full + (rest > 0)
        meta["spec_correct_drafts_histogram"] = [int(rest == 1), int(rest == 2), int(rest == 3), full]
    return 200, {"text": "", "output_ids": list(range(num_tokens)), "meta_info": meta}


def ask(url: str, prompts: list[list[int]], concurrency: int = 2) -> list[ServedAnswer]:
    return SGLangClient(url, max_new_tokens=64).answer_all(prompts, concurrency, lambda answer: None)


def test_answers_come_in_order_with_the_servers_counters() -> None:
    bodies: list[dict[str, Any]] = []

    def generate(body: dict[str, Any]) -> Reply:
        bodies.append(body)
        return counted(body)

    told: list[ServedAnswer] = []
    with running_server(generate) as url:
        answers = SGLangClient(url + "/", max_new_tokens=64).answer_all([[9], [1], [12]], 3, told.append)
    assert answers == [
        ServedAnswer(list(range(9)), 9, 2, [0, 0, 0, 2]),
        ServedAnswer([0], 1, 0, []),  # ended with prefill's token: the server reports no counters
        ServedAnswer(list(range(12)), 12, 3, [0, 0, 1, 2]),
    ]
    assert len(told) == 3
    assert all(body["sampling_params"] == {"temperature": 0.0, "max_new_tokens": 64} for body in bodies)


def test_requests_in_flight_are_bounded() -> None:
    lock, in_flight, most = threading.Lock(), 0, 0
    pair = threading.Barrier(2, timeout=10)

    def generate(body: dict[str, Any]) -> Reply:
        nonlocal in_flight, most
        with lock:
            in_flight += 1
            most = max(most, in_flight)
        pair.wait()
        with lock:
            in_flight -= 1
        return counted(body)

    with running_server(generate) as url:
        ask(url, [[5]] * 8, concurrency=2)
    assert most == 2


def test_acceptance_is_the_sum_of_tokens_over_the_sum_of_rounds() -> None:
    answers = [ServedAnswer([], 9, 2, [0, 0, 0, 2]), ServedAnswer([], 1, 0, []), ServedAnswer([], 6, 3, [2, 0, 1])]
    acceptance = summarise(served_rounds(["a", "b", "c"], answers, num_draft_tokens=3), seed=0)
    assert acceptance.tau == 16 / 5
    assert acceptance.tau_without_prefill == 13 / 5
    # Of 5 rounds 3 accepted a draft, all of these a second, 2 of these a third.
    assert acceptance.conditional == [3 / 5, 3 / 3, 2 / 3]


def test_positions_that_no_round_reached_are_reported() -> None:
    # The server's list ends with the most drafts that a round accepted.
    acceptance = summarise(served_rounds(["a"], [ServedAnswer([], 24, 23, [23])], num_draft_tokens=3), seed=0)
    assert acceptance.conditional == [0, None, None]


def test_versions_without_a_histogram_give_tau_alone() -> None:
    acceptance = summarise(served_rounds(["a"], [ServedAnswer([], 9, 4, [])], num_draft_tokens=3), seed=0)
    assert (acceptance.tau, acceptance.conditional) == (9 / 4, [])


def test_the_older_name_of_the_histogram_is_read() -> None:
    meta = {"completion_tokens": 5, "spec_verify_ct": 1, "spec_accept_histogram": [0, 0, 0, 1]}
    with running_server(lambda body: (200, {"output_ids": [1] * 5, "meta_info": meta})) as url:
        assert ask(url, [[1]])[0].histogram == [0, 0, 0, 1]


def test_version_and_flags_are_recorded() -> None:
    with running_server(counted) as url:
        facts = SGLangClient(url, 8).facts()
    assert facts == ServerFacts(
        url,
        "0.5.23",
        "/models/tokenizer",
        {
            "model_path": "/models/target",
            "dtype": "bfloat16",
            "speculative_algorithm": "EAGLE3",
            "speculative_num_steps": 3,
            "random_seed": 1,
        },
    )


def test_no_server_at_the_url() -> None:
    with running_server(counted) as url:
        pass
    with pytest.raises(UserError, match=f"--server must be the URL of a running server, got no answer .*{url}"):
        SGLangClient(url, 8).facts()


@pytest.mark.parametrize("info", [(200, {"name": "another"}), (404, {}), (200, [1]), (500, {"version": "1"})])
def test_something_else_at_the_url(info: Reply) -> None:
    with (
        running_server(counted, info) as url,
        pytest.raises(UserError, match=r"--server must be the URL of an SGLang server, got \d+ from"),
    ):
        SGLangClient(url, 8).facts()


def test_a_server_without_speculation() -> None:
    reply = (200, {"output_ids": [1, 2], "meta_info": {"completion_tokens": 2}})
    with (
        running_server(lambda body: reply) as url,
        pytest.raises(UserError, match="must have speculation on, got no spec_verify_ct for an answer of 2 tokens"),
    ):
        ask(url, [[1]])


def test_a_server_that_dies_midway() -> None:
    replies = iter([(200, counted({"input_ids": [5]})[1]), (200, None)])
    with (
        running_server(lambda body: next(replies)) as url,
        pytest.raises(UserError, match=r"must answer every prompt, got ConnectionError from .* after 1 of 3 answers"),
    ):
        ask(url, [[5], [5], [5]], concurrency=1)


def test_a_request_that_the_server_refuses() -> None:
    with (
        running_server(lambda body: (400, {"error": "too long"})) as url,
        pytest.raises(UserError, match=r"got status 400 from .*too long.* for a prompt of 2 tokens"),
    ):
        ask(url, [[5, 6]])


def test_a_reply_of_another_shape() -> None:
    with (
        running_server(lambda body: (200, {"text": "hi", "meta_info": {}})) as url,
        pytest.raises(UserError, match=r"/generate must return output_ids .* got the fields \['meta_info', 'text'\]"),
    ):
        ask(url, [[5]])


@pytest.mark.parametrize(
    ("change", "meta_change", "name"),
    [
        ({"output_ids": ["a", 2]}, {}, "output_ids"),
        ({}, {"completion_tokens": "x"}, "completion_tokens"),
        ({}, {"completion_tokens": None}, "completion_tokens"),
        ({}, {"completion_tokens": -4}, "completion_tokens"),
        ({}, {"spec_verify_ct": "q"}, "spec_verify_ct"),
        ({}, {"spec_accept_histogram": "abc"}, "the histogram"),
        ({}, {"spec_accept_histogram": 5}, "the histogram"),
    ],
)
def test_counters_that_are_no_numbers_are_named(change: dict[str, Any], meta_change: dict[str, Any], name: str) -> None:
    meta = {"completion_tokens": 2, "spec_verify_ct": 1} | meta_change
    reply = {"output_ids": [5, 6], "meta_info": meta} | change
    with (
        running_server(lambda body: (200, reply)) as url,
        pytest.raises(UserError, match=rf"/generate must return whole numbers as {name}, got"),
    ):
        ask(url, [[5]])


def test_a_drafter_that_does_nothing_is_a_finding() -> None:
    facts = ServerFacts("http://host", "0.5.23", "t", {"speculative_algorithm": "EAGLE"})
    idle = [ServedAnswer([], 24, 23, [23, 0, 0, 0]), ServedAnswer([], 1, 0, [])]
    (finding,) = findings(idle, facts)
    assert "no draft was accepted in 23 rounds" in finding
    assert "EAGLE instead of EAGLE3 (this server says EAGLE)" in finding
    assert findings([*idle, ServedAnswer([], 24, 22, [21, 1, 0, 0])], facts) == []
    assert findings([ServedAnswer([], 1, 0, [])], facts) == []


def test_a_server_that_decodes_beside_prefills_is_refused() -> None:
    flags = {"speculative_algorithm": "EAGLE3"}
    check_counters(ServerFacts("http://a", "0.5.23", "", flags | {"enable_mixed_chunk": False}))
    with pytest.raises(UserError, match=r"--enable-mixed-chunk must be off .* got it on \(http://a\)"):
        check_counters(ServerFacts("http://a", "0.5.23", "", flags | {"enable_mixed_chunk": True}))


def test_a_server_without_speculation_is_refused_before_it_is_asked() -> None:
    with (
        running_server(counted, (200, INFO | {"speculative_algorithm": None})) as url,
        pytest.raises(UserError, match=r"must have speculation on, got no speculative_algorithm in its settings"),
    ):
        check_counters(SGLangClient(url, 8).facts())
    check_counters(ServerFacts("http://a", "0.32.0", "", {}, "vLLM"))  # which says it with every answer


@pytest.mark.parametrize("steps", ["3", 0, 1000, True, [3]])
def test_a_number_of_steps_that_no_server_has_is_refused(steps: Any) -> None:
    facts = ServerFacts("http://a", "0.5.23", "", {"speculative_num_steps": steps})
    with pytest.raises(UserError, match=r"speculative_num_steps must be a number from 1 to 999, got .* \(http://a\)"):
        num_steps_of(facts, 3)
    assert num_steps_of(ServerFacts("", "", "", {}), 3) == 3


def test_counters_that_no_answer_has_are_refused() -> None:
    meta: dict[str, Any] = {"completion_tokens": 5, "spec_verify_ct": 10**400}
    with (
        running_server(lambda body: (200, {"output_ids": [1] * 5, "meta_info": meta})) as url,
        pytest.raises(UserError, match="/generate must return whole numbers as spec_verify_ct, got"),
    ):
        ask(url, [[1]])
    meta = {"completion_tokens": 5, "spec_verify_ct": 1, "spec_correct_drafts_histogram": [0] * 1001}
    with (
        running_server(lambda body: (200, {"output_ids": [1] * 5, "meta_info": meta})) as url,
        pytest.raises(UserError, match="a histogram of 1000 counts at most, got 1001"),
    ):
        ask(url, [[1]])


def test_a_server_whose_version_is_no_text_is_none() -> None:
    with (
        running_server(counted, (200, INFO | {"version": None})) as url,
        pytest.raises(UserError, match=r"must be the URL of an SGLang server, got 200 .* without a version"),
    ):
        SGLangClient(url, 8).facts()
