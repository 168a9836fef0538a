"""Servers of ours with the drafter and without, same flags: acceptance, speed, latency, and whether answers agree.

The plain server comes last: where a greedy answer parts from it, it is asked how sure it was.
"""

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from eagle3.capture.server import Server, running_server
from eagle3.config import EvaluateConfig, ServeConfig, ServerConfig, UserError
from eagle3.draft.acceptance import AnswerRounds
from eagle3.draft.export import load_drafter
from eagle3.draft.target_weights import load_target_config
from eagle3.evaluation.cells import (
    PLAIN,
    Agreement,
    Asking,
    Cell,
    Served,
    ServingReport,
    plain_cell,
    with_acceptance,
    with_simulated,
)
from eagle3.evaluation.recorded import simulate_served
from eagle3.evaluation.report import progress_bar
from eagle3.evaluation.served import ServedAnswer, ServerFacts, SGLangClient, check_counters, findings, served_rounds
from eagle3.evaluation.simulate import Speculation, parse_speculation
from eagle3.evaluation.turns import ask_all, select_conversations
from eagle3.prompts.conversations import Conversation
from eagle3.prompts.tokenizers import end_token_ids, load_tokenizer

# In bf16 two tokens this close change places with the batch: two steps of logits between 16 and 32, in nats.
NEAR_TIE = 0.25
WARM_UP_TOKENS = 32  # of an answer: enough for every kernel to run
FIND_SGLANG = "import importlib.metadata; importlib.metadata.version('sglang')"
Kept = dict[tuple[str, float], Served]  # at the first concurrency, by server and temperature


def prepare_serving(config: EvaluateConfig) -> Iterator[ServingReport]:
    """Reads what can be wrong; returns what measures the servers.

    Raises:
        UserError: target, drafter and prompts do not fit each other, or one of them cannot be read.
    """
    assert config.target is not None, "the config was checked"
    assert config.drafter is not None, "the config was checked"
    load_drafter(Path(config.drafter), load_target_config(Path(config.target.path)))
    conversations = select_conversations(config)
    tokenizer = load_tokenizer(config.target.path, config.target.trust_remote_code)
    return _evaluate(config, conversations, tokenizer)


def _evaluate(
    config: EvaluateConfig, conversations: list[Conversation], tokenizer: PreTrainedTokenizerBase
) -> Iterator[ServingReport]:
    """Starts one server after the other and asks each the same prompts; yields all that is known after each cell.

    Raises:
        UserError: a server does not start or stops.
    """
    serve = config.serve
    assert serve is not None, "the caller checks that servers are asked for"
    asking: Asking | None = None
    cells: list[Cell] = []
    facts: dict[str, ServerFacts] = {}
    found: set[str] = set()
    kept: Kept = {}
    for speculation in map(parse_speculation, serve.speculations):
        name = speculation.name
        with started(serve, config, name, speculation) as server:
            facts[name] = SGLangClient(server.url, config.max_new_tokens).facts()
            check_counters(facts[name])
            # The first server's answers are the history of later turns, for all servers.
            asking = asking or _ask_turns(config, server.url, conversations, tokenizer)
            for cell, answers in _measure(config, server.url, speculation, asking, kept):
                cells.append(cell)
                found |= {f"{name}: {finding}" for finding in findings(answers, facts[name])}
                yield ServingReport(list(cells), [], facts, sorted(found), list(kept.values()))
    assert asking is not None, serve.speculations
    if serve.simulate:
        cells = _simulate(config, cells, kept, facts, asking)
        yield ServingReport(cells, [], facts, sorted(found), list(kept.values()))
    with started(serve, config, PLAIN, None) as server:
        facts[PLAIN] = SGLangClient(server.url, config.max_new_tokens).facts()
        cells += [cell for cell, _ in _measure(config, server.url, None, asking, kept)]
        plain = SGLangClient(server.url, config.max_new_tokens, is_speculative=False)
        agreements = [
            compare_answers(each.server, each.answers, kept[PLAIN, 0].answers, asking.prompts, plain)
            for each in kept.values()
            if each.server != PLAIN and each.temperature == 0
        ]
    yield ServingReport(cells, agreements, facts, sorted(found), list(kept.values()))


def _simulate(
    config: EvaluateConfig, cells: Sequence[Cell], kept: Kept, facts: Mapping[str, ServerFacts], asking: Asking
) -> list[Cell]:
    """Simulates the answers that servers gave, from states of one more prefill of them in this process.

    The rounds are added to `kept`.
    """
    assert config.target is not None, "the config was checked"
    assert config.drafter is not None, "the config was checked"
    assert config.serve is not None, "the caller checks that servers are asked for"
    asked = [each for each in kept.values() if each.server != PLAIN]
    ways = [rule_of(parse_speculation(each.server), each.temperature, facts[each.server]) for each in asked]
    pairs = [(served, [way]) for served, way in zip(asked, ways, strict=True)]
    simulated = simulate_served(config.target, Path(config.drafter), pairs)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the plain server counts the memory that it finds free
    for served, way, rounds in zip(asked, ways, simulated, strict=True):
        kept[served.server, served.temperature] = replace(served, simulated=rounds[way])
    found = []
    for cell in cells:
        if cell.concurrency == config.serve.concurrency[0]:
            cell = with_simulated(cell, kept[cell.server, cell.temperature].simulated, asking, config.seed)
        found.append(cell)
    return found


def rule_of(speculation: Speculation, temperature: float, facts: ServerFacts) -> Speculation:
    """Returns by which rule a server accepts drafts at a temperature.

    By default that is the same at every temperature: a draft is accepted with the target's probability of it, and
    where it is not another token is sampled. So it is accepted where it is the token that was returned.
    Source: SGLang 0.5.16, srt/speculative/eagle_utils.py (`eagle_sample`).
    """
    rejects = bool(facts.flags.get("speculative_use_rejection_sampling")) and temperature > 0
    return replace(speculation, temperature=temperature) if rejects else speculation


def _ask_turns(
    config: EvaluateConfig, url: str, conversations: list[Conversation], tokenizer: PreTrainedTokenizerBase
) -> Asking:
    """Asks the conversations turn by turn, greedily, and keeps the prompts."""
    assert config.target is not None, "the config was checked"
    client = SGLangClient(url, config.max_new_tokens)

    def answer_all(prompts: list[list[int]]) -> list[ServedAnswer]:
        with progress_bar("asking turn by turn", len(prompts), "answer") as advance:
            return client.answer_all(prompts, config.batch_size, lambda answer: advance(1))

    end_ids = end_token_ids(Path(config.target.path), tokenizer)
    turns = ask_all(conversations, tokenizer, config, answer_all, end_ids)
    domains = {each.id: each.domain for each in conversations}
    sample_ids = [turn.sample_id for turn in turns]
    return Asking(sample_ids, [turn.prompt_ids for turn in turns], [domains[name] for name in sample_ids])


def _measure(
    config: EvaluateConfig, url: str, speculation: Speculation | None, asking: Asking, kept: Kept
) -> Iterator[tuple[Cell, list[ServedAnswer]]]:
    """Asks one server at every temperature and concurrency; the answers of the first concurrency are kept."""
    serve = config.serve
    assert serve is not None, "the caller checks that servers are asked for"
    name = PLAIN if speculation is None else speculation.name
    _warm_up(config, url, asking, is_speculative=speculation is not None)
    for temperature in serve.temperatures:
        for concurrency in serve.concurrency:
            is_first = concurrency == serve.concurrency[0]
            some = asking
            if serve.prompts_per_slot is not None and not is_first:
                some = asking.thinned(serve.prompts_per_slot * concurrency)
            answers, seconds = _ask(config, url, speculation, some, temperature, concurrency)
            cell = plain_cell(name, temperature, concurrency, answers, seconds)
            rounds: list[AnswerRounds] = []
            if speculation is not None:
                rounds = served_rounds(some.sample_ids, answers, speculation.num_steps)
                cell = with_acceptance(cell, answers, rounds, some, config.seed)
            if is_first:
                kept[name, temperature] = Served(name, temperature, some, answers, rounds, [])
            yield cell, answers


def _warm_up(config: EvaluateConfig, url: str, asking: Asking, *, is_speculative: bool) -> None:
    """Has a server compile what it compiles at its first batches, before anything is timed."""
    assert config.serve is not None, "the caller checks that servers are asked for"
    for temperature in sorted({float(each > 0) for each in config.serve.temperatures}):
        client = SGLangClient(
            url,
            min(config.max_new_tokens, WARM_UP_TOKENS),
            temperature=temperature,
            is_speculative=is_speculative,
            cache_name="warm-up",
        )
        most = max(config.serve.concurrency)
        client.answer_all(asking.prompts[:most], most, lambda answer: None)


def _ask(
    config: EvaluateConfig,
    url: str,
    speculation: Speculation | None,
    asking: Asking,
    temperature: float,
    concurrency: int,
) -> tuple[list[ServedAnswer], float]:
    """Sends the prompts with so many in flight; returns the answers and the seconds that they took together."""
    name = PLAIN if speculation is None else speculation.name
    client = SGLangClient(
        url,
        config.max_new_tokens,
        temperature=temperature,
        is_speculative=speculation is not None,
        cache_name=f"T={temperature:g} n={concurrency}",  # or later cells would find their prompts prefilled
    )
    with progress_bar(f"{name}, T={temperature:g}, {concurrency} in flight", len(asking.prompts), "answer") as advance:
        begun = time.perf_counter()
        answers = client.answer_all(asking.prompts, concurrency, lambda answer: advance(1))
        return answers, time.perf_counter() - begun


@contextmanager
def started(serve: ServeConfig, config: EvaluateConfig, name: str, speculation: Speculation | None) -> Iterator[Server]:
    """Starts a server and waits until it answers; its log lies beside the result."""
    assert config.target is not None, "the config was checked"
    server_config = replace(serve.server, log=str(Path(config.out) / f"sglang-{name.replace('/', '-')}.log"))
    with running_server(server_config, config.target.path, speculation_flags(config, speculation), {}) as server:
        body = {"input_ids": [0, 1, 2], "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
        patience = serve.server.startup_timeout_seconds
        server.wait_until(lambda: server.post("/generate", body, patience), patience)
        yield server


def speculation_flags(config: EvaluateConfig, speculation: Speculation | None) -> dict[str, Any]:
    """Returns the flags that a server with the drafter has besides those of the plain one."""
    if speculation is None:
        return {}
    return {
        "speculative-algorithm": "EAGLE3",
        "speculative-draft-model-path": config.drafter,
        "speculative-num-steps": speculation.num_steps,
        "speculative-eagle-topk": speculation.topk,
        "speculative-num-draft-tokens": speculation.num_draft_tokens or speculation.num_steps + 1,
    }


def check_serve(serve: ServeConfig) -> list[str]:
    """Returns what is wrong with the settings of such an evaluation."""
    problems = []
    for text in serve.speculations:
        try:
            if parse_speculation(text).temperature is not None:
                problems.append(f"serve.speculations must be chains or trees, got {text!r}; a flag makes SGLang reject")
        except UserError as error:
            problems.append(f"serve.speculations: {error}")
    if not serve.speculations or len(set(serve.speculations)) < len(serve.speculations):
        problems.append(f"serve.speculations must be different ways of serving, got {serve.speculations}")
    for name, values in (("concurrency", serve.concurrency), ("temperatures", serve.temperatures)):
        if len(set(values)) < len(values):
            problems.append(f"serve.{name} must be different numbers, got {values}")
    if not serve.concurrency or any(each < 1 for each in serve.concurrency):
        problems.append(f"serve.concurrency must be numbers of 1 or more, got {serve.concurrency}")
    if not serve.temperatures or any(each < 0 for each in serve.temperatures):
        problems.append(f"serve.temperatures must be numbers of 0 or more, got {serve.temperatures}")
    if serve.prompts_per_slot is not None and serve.prompts_per_slot < 1:
        problems.append(f"serve.prompts_per_slot must be 1 or more, got {serve.prompts_per_slot}; null: all prompts")
    if serve.server.urls:
        problems.append(f"serve.server.urls must be empty, since servers are started, got {serve.server.urls}")
    return problems


def check_sglang(server: ServerConfig) -> list[str]:
    """Returns what keeps an interpreter from starting servers; asked before any is started."""
    python = server.python or sys.executable
    advice = "name a serving environment in serve.server.python, or measure a running server with --server URL"
    try:
        answer = subprocess.run([python, "-c", FIND_SGLANG], capture_output=True, text=True, check=False)
    except OSError as error:
        return [f"serve.server.python must be an interpreter, got {python!r} ({error}); {advice}"]
    if answer.returncode != 0:
        reason = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        return [f"serve.server.python must have sglang installed, got {python!r} ({reason}); {advice}"]
    return []


def compare_answers(
    server: str,
    answers: Sequence[ServedAnswer],
    plain: Sequence[ServedAnswer],
    prompts: Sequence[list[int]],
    client: SGLangClient,
) -> Agreement:
    """Counts greedy answers that are the plain server's, and asks it how near the others' first differences are."""
    num_equal = num_near_ties = 0
    for answer, other, prompt in zip(answers, plain, prompts, strict=True):
        ours, theirs = answer.token_ids, other.token_ids
        if ours == theirs:
            num_equal += 1
            continue
        pairs = zip(ours, theirs, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
        top = client.top_two(prompt + theirs[:first])
        num_near_ties += first < len(ours) and ours[first] in top.token_ids and top.margin < NEAR_TIE
    return Agreement(server, len(answers), num_equal, num_near_ties)
