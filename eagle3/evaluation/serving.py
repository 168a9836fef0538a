"""Servers of ours with the drafter and without, same flags: acceptance, speed, latency, and whether answers agree.

The plain server comes last: where a greedy answer parts from it, it is asked how sure it was.
"""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eagle3.capture.server import Server, running_server
from eagle3.config import EvaluateConfig, ServeConfig, UserError
from eagle3.draft.acceptance import Acceptance, AnswerRounds, summarise
from eagle3.draft.export import load_drafter
from eagle3.draft.target_weights import load_target_config, load_target_weights
from eagle3.evaluation.report import progress_bar
from eagle3.evaluation.served import ServedAnswer, ServerFacts, SGLangClient, findings, served_rounds
from eagle3.evaluation.simulate import Speculation, batch_tokens_of, packs_of, parse_speculation, simulate_all
from eagle3.evaluation.target import load_local_target
from eagle3.evaluation.turns import ask_all, select_conversations
from eagle3.prompts.loops import is_looping
from eagle3.prompts.tokenizers import end_token_ids, load_tokenizer

PLAIN = "plain"
# In bf16 two tokens this close change places with the batch; nats between their log-probabilities.
NEAR_TIE = 0.1
CONTEXT_EDGES = (512, 2048, 8192, 32768)  # tokens of a prompt


@dataclass(frozen=True)
class Cell:
    """One server at one temperature and concurrency."""

    server: str  # PLAIN or the speculation
    temperature: float
    concurrency: int
    num_answers: int
    num_looping: int
    num_tokens: int
    seconds: float  # of all requests together
    latency_mean: float  # seconds of one request
    latency_median: float
    latency_95: float  # 95 % of the requests are faster
    acceptance: Acceptance | None = None  # None: plain
    without_loops: Acceptance | None = None  # None: plain, or nothing is left
    histogram: list[int] = field(default_factory=list)  # index: drafts accepted in a round
    by_context: dict[str, Acceptance] = field(default_factory=dict)  # by tokens of the prompt
    by_set: dict[str, Acceptance] = field(default_factory=dict)  # by domain of the question, where rows have one
    simulated: Acceptance | None = None  # of the very answers, at the first concurrency

    @property
    def tokens_per_second(self) -> float:
        """Over all requests in flight."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class Agreement:
    """Greedy answers of a server with the drafter against the plain server's."""

    server: str
    num_answers: int
    num_equal: int
    num_near_ties: int  # of the others, those whose first difference is between two tokens that are almost as likely


@dataclass(frozen=True)
class ServingReport:
    """What the servers did."""

    cells: list[Cell]
    agreements: list[Agreement]
    facts: dict[str, ServerFacts]  # by server
    findings: list[str]
    num_prompts: int


def evaluate_serving(config: EvaluateConfig) -> ServingReport:
    """Starts one server after the other and asks each the same prompts.

    Raises:
        UserError: a server does not start or stops, or target, drafter and prompts do not fit each other.
    """
    serve, target = config.serve, config.target
    assert serve is not None, "the caller checks that servers are asked for"
    assert target is not None, "the config was checked"
    assert config.drafter is not None, "the config was checked"
    load_drafter(Path(config.drafter), load_target_config(Path(target.path)))  # what is wrong with it shows now
    asking: _Asking | None = None
    cells: list[Cell] = []
    facts: dict[str, ServerFacts] = {}
    found: set[str] = set()
    kept: dict[tuple[str, float], list[ServedAnswer]] = {}  # at the first concurrency, by server and temperature
    agreements: list[Agreement] = []
    ways: list[Speculation | None] = [*map(parse_speculation, serve.speculations), None]
    for speculation in ways:
        name = PLAIN if speculation is None else speculation.name
        with started(serve, config, name, speculation) as server:
            facts[name] = SGLangClient(server.url, config.max_new_tokens).facts()
            # The first server's answers are the history of later turns, for all servers.
            asking = asking or _ask_turns(config, server.url)
            _warm_up(config, server.url, asking, is_speculative=speculation is not None)
            for temperature in serve.temperatures:
                for concurrency in serve.concurrency:
                    cell, answers = _measure(config, server.url, speculation, asking, temperature, concurrency)
                    cells.append(cell)
                    if speculation is not None:
                        found |= {f"{name}: {finding}" for finding in findings(answers, facts[name])}
                    if concurrency == serve.concurrency[0]:
                        kept[name, temperature] = answers
            if speculation is None and (PLAIN, 0) in kept:
                plain = SGLangClient(server.url, config.max_new_tokens, is_speculative=False)
                agreements = [
                    compare_answers(other, answers, kept[PLAIN, 0], asking.prompts, plain)
                    for (other, temperature), answers in kept.items()
                    if other != PLAIN and temperature == 0
                ]
    assert asking is not None, ways
    if serve.simulate:
        cells = _with_simulated(config, cells, kept, asking)
    return ServingReport(cells, agreements, facts, sorted(found), len(asking.prompts))


def _with_simulated(
    config: EvaluateConfig,
    cells: Sequence[Cell],
    kept: Mapping[tuple[str, float], list[ServedAnswer]],
    asking: "_Asking",
) -> list[Cell]:
    """Simulates the answers that servers gave, from states of one more prefill of them in this process."""
    assert config.target is not None, "the config was checked"
    assert config.drafter is not None, "the config was checked"
    assert config.serve is not None, "the caller checks that servers are asked for"
    drafter = load_drafter(Path(config.drafter), load_target_config(Path(config.target.path)))
    tokenizer = load_tokenizer(config.target.path, config.target.trust_remote_code)
    target = load_local_target(config.target, drafter.config.capture_layers, tokenizer)
    drafter.to(target.device, target.dtype).eval()
    weights = load_target_weights(Path(config.target.path)).to(target.device, target.dtype)
    limit = batch_tokens_of(drafter.config, weights.embed_tokens)
    found = []
    for cell in cells:
        answers = kept.get((cell.server, cell.temperature), [])
        if cell.server == PLAIN or cell.concurrency != config.serve.concurrency[0]:
            found.append(cell)
            continue
        speculation = parse_speculation(cell.server)
        turns = zip(asking.sample_ids, asking.prompts, answers, strict=True)
        with progress_bar(f"simulating {cell.server}, T={cell.temperature:g}", len(answers), "answers") as advance:
            samples = (target.features(name, prompt, answer.token_ids) for name, prompt, answer in turns)
            packs = packs_of(samples, limit, target.device)
            rounds = simulate_all({"": drafter}, weights, packs, [speculation], advance=advance)["", speculation]
        found.append(replace(cell, simulated=summarise(rounds, config.seed)))
    return found


@dataclass(frozen=True)
class _Asking:
    """What every server is asked."""

    sample_ids: list[str]
    prompts: list[list[int]]
    domains: dict[str, str]  # by sample


def _ask_turns(config: EvaluateConfig, url: str) -> _Asking:
    """Asks the conversations turn by turn, greedily, and keeps the prompts."""
    assert config.target is not None, "the config was checked"
    client = SGLangClient(url, config.max_new_tokens)
    tokenizer = load_tokenizer(config.target.path, config.target.trust_remote_code)

    def answer_all(prompts: list[list[int]]) -> list[ServedAnswer]:
        with progress_bar("asking turn by turn", len(prompts), "answers") as advance:
            return client.answer_all(prompts, config.batch_size, lambda answer: advance(1))

    end_ids = end_token_ids(Path(config.target.path), tokenizer)
    conversations = select_conversations(config)
    turns = ask_all(conversations, tokenizer, config, answer_all, end_ids)
    domains = {each.id: each.domain for each in conversations if each.domain is not None}
    return _Asking([turn.sample_id for turn in turns], [turn.prompt_ids for turn in turns], domains)


def _warm_up(config: EvaluateConfig, url: str, asking: _Asking, *, is_speculative: bool) -> None:
    """Has a server compile what it compiles at its first batches, before anything is timed."""
    assert config.serve is not None, "the caller checks that servers are asked for"
    most = max(config.serve.concurrency)
    client = SGLangClient(url, config.max_new_tokens, is_speculative=is_speculative, cache_name="warm-up")
    client.answer_all(asking.prompts[:most], most, lambda answer: None)


def _measure(
    config: EvaluateConfig,
    url: str,
    speculation: Speculation | None,
    asking: _Asking,
    temperature: float,
    concurrency: int,
) -> tuple[Cell, list[ServedAnswer]]:
    """Sends all prompts with so many in flight."""
    name = PLAIN if speculation is None else speculation.name
    client = SGLangClient(
        url,
        config.max_new_tokens,
        temperature=temperature,
        is_speculative=speculation is not None,
        cache_name=f"T={temperature:g} n={concurrency}",  # or later cells would find their prompts prefilled
    )
    with progress_bar(f"{name}, T={temperature:g}, {concurrency} in flight", len(asking.prompts), "answers") as advance:
        begun = time.perf_counter()
        answers = client.answer_all(asking.prompts, concurrency, lambda answer: advance(1))
        seconds = time.perf_counter() - begun
    cell = Cell(name, temperature, concurrency, seconds=seconds, **_counts(answers))
    if speculation is not None:
        cell = _with_acceptance(cell, answers, asking, speculation.num_steps, config.seed)
    return cell, answers


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
    if not serve.concurrency or any(each < 1 for each in serve.concurrency):
        problems.append(f"serve.concurrency must be numbers of 1 or more, got {serve.concurrency}")
    if not serve.temperatures or any(each < 0 for each in serve.temperatures):
        problems.append(f"serve.temperatures must be numbers of 0 or more, got {serve.temperatures}")
    if serve.server.urls:
        problems.append(f"serve.server.urls must be empty, since servers are started, got {serve.server.urls}")
    return problems


def _counts(answers: Sequence[ServedAnswer]) -> Mapping[str, Any]:
    latencies = sorted(answer.seconds for answer in answers)
    return {
        "num_answers": len(answers),
        "num_looping": sum(is_looping(answer.token_ids) for answer in answers),
        "num_tokens": sum(answer.num_tokens for answer in answers),
        "latency_mean": statistics.fmean(latencies),
        "latency_median": statistics.median(latencies),
        "latency_95": latencies[min(len(latencies) - 1, int(0.95 * len(latencies)))],
    }


def _with_acceptance(cell: Cell, answers: Sequence[ServedAnswer], asking: _Asking, num_steps: int, seed: int) -> Cell:
    rounds = served_rounds(asking.sample_ids, list(answers), num_steps)
    steady = [each for each, answer in zip(rounds, answers, strict=True) if not is_looping(answer.token_ids)]
    contexts = [context_bucket(len(prompt)) for prompt in asking.prompts]
    sets = [asking.domains.get(sample_id) for sample_id in asking.sample_ids]
    longest = max((len(answer.histogram) for answer in answers), default=0)
    histogram = [sum(a.histogram[i] for a in answers if i < len(a.histogram)) for i in range(longest)]
    return replace(
        cell,
        acceptance=summarise(rounds, seed),
        without_loops=summarise(steady, seed) if any(each.rounds > 0 for each in steady) else None,
        histogram=histogram,
        by_context=_by_group(rounds, contexts, seed),
        by_set=_by_group(rounds, sets, seed),
    )


def _by_group(rounds: Sequence[AnswerRounds], groups: Sequence[str | None], seed: int) -> dict[str, Acceptance]:
    """Returns the acceptance of each group whose answers have rounds; those of no group are left out."""
    found: dict[str, list[AnswerRounds]] = {}
    for each, group in zip(rounds, groups, strict=True):
        if group is not None:
            found.setdefault(group, []).append(each)
    return {group: summarise(some, seed) for group, some in found.items() if any(each.rounds > 0 for each in some)}


def context_bucket(num_tokens: int) -> str:
    """Returns the name of the range that a prompt's length falls into."""
    edges = [0, *CONTEXT_EDGES]
    low = max(edge for edge in edges if edge <= num_tokens)
    high = next((edge for edge in edges if edge > num_tokens), None)
    return f"{low}+" if high is None else f"{low}-{high - 1}"


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
