"""What a server did at one temperature with so many requests in flight: acceptance, speed and latency, as records."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from eagle3.draft.acceptance import Acceptance, AnswerRounds, summarise
from eagle3.draft.questions import Question, prompt_digest
from eagle3.evaluation.served import ServedAnswer, ServerFacts
from eagle3.prompts.loops import is_looping

PLAIN = "plain"
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
    simulated_by_set: dict[str, Acceptance] = field(default_factory=dict)

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
class Asking:
    """What every server is asked, turn by turn."""

    sample_ids: list[str]
    prompts: list[list[int]]
    sets: list[str | None]  # the question's domain

    def thinned(self, count: int) -> "Asking":
        """Returns at most `count` of the prompts, evenly over all."""
        total = len(self.prompts)
        if count >= total:
            return self
        kept = [index * total // count for index in range(count)]
        return Asking(
            [self.sample_ids[index] for index in kept],
            [self.prompts[index] for index in kept],
            [self.sets[index] for index in kept],
        )


@dataclass(frozen=True)
class Served:
    """The answers behind a cell, for whoever wants to count them again."""

    server: str
    temperature: float
    asking: Asking
    answers: list[ServedAnswer]
    rounds: list[AnswerRounds]  # empty: plain
    simulated: list[AnswerRounds]  # empty: plain, or not simulated

    def lines(self) -> list[dict[str, Any]]:
        """Returns what was asked and returned, token by token."""
        turns = zip(self.asking.sample_ids, self.asking.sets, self.asking.prompts, self.answers, strict=True)
        return [
            {
                "server": self.server,
                "temperature": self.temperature,
                "sample_id": name,
                "set": group,
                "prompt_ids": prompt,
                "token_ids": answer.token_ids,
                "rounds": answer.rounds,
                "simulated_rounds": self.simulated[index].rounds if self.simulated else None,
            }
            for index, (name, group, prompt, answer) in enumerate(turns)
        ]

    def questions(self, called: str, simulated_called: str) -> dict[str, list[Question]]:
        """Returns each answer's counters, under these names; those that there are."""
        firsts: dict[str, str] = {}  # a conversation goes by its first prompt
        for name, prompt in zip(self.asking.sample_ids, self.asking.prompts, strict=True):
            firsts.setdefault(name, prompt_digest(prompt))
        loops = [is_looping(answer.token_ids) for answer in self.answers]
        counted = {called: self.rounds, simulated_called: self.simulated}
        return {
            measure: [Question(firsts[each.sample_id], loop, each) for each, loop in zip(rounds, loops, strict=True)]
            for measure, rounds in counted.items()
            if rounds
        }


@dataclass(frozen=True)
class ServingReport:
    """What the servers did."""

    cells: list[Cell]
    agreements: list[Agreement]
    facts: dict[str, ServerFacts]  # by server
    findings: list[str]
    served: list[Served]  # at the first concurrency

    @property
    def num_prompts(self) -> int:
        """How many answers a server gives where it is asked everything."""
        return len(self.served[0].answers) if self.served else 0

    def questions(self) -> dict[str, list[Question]]:
        """Returns the counters of every answer, by server and temperature; the first ones are what runs compare."""
        found: dict[str, list[Question]] = {}
        for index, served in enumerate(self.served):
            name = f"{served.server}, T={served.temperature:g}"
            names = ("trained", "simulated") if index == 0 else (name, f"{name}, simulated")
            found |= served.questions(*names)
        return found

    def speed_up(self, cell: Cell) -> float | None:
        """Returns a cell's tokens per second over the plain server's at the same temperature and concurrency."""
        wanted = (PLAIN, cell.temperature, cell.concurrency)
        plain = [each for each in self.cells if (each.server, each.temperature, each.concurrency) == wanted]
        return cell.tokens_per_second / plain[0].tokens_per_second if plain and cell.server != PLAIN else None


def plain_cell(
    server: str, temperature: float, concurrency: int, answers: Sequence[ServedAnswer], seconds: float
) -> Cell:
    """Returns what the clock says of the answers."""
    latencies = sorted(answer.seconds for answer in answers)
    return Cell(
        server,
        temperature,
        concurrency,
        num_answers=len(answers),
        num_looping=sum(is_looping(answer.token_ids) for answer in answers),
        num_tokens=sum(answer.num_tokens for answer in answers),
        seconds=seconds,
        latency_mean=statistics.fmean(latencies),
        latency_median=statistics.median(latencies),
        latency_95=latencies[min(len(latencies) - 1, int(0.95 * len(latencies)))],
    )


def with_acceptance(
    cell: Cell, answers: Sequence[ServedAnswer], rounds: Sequence[AnswerRounds], asking: Asking, seed: int
) -> Cell:
    """Adds what the server's counters say."""
    steady = [each for each, answer in zip(rounds, answers, strict=True) if not is_looping(answer.token_ids)]
    contexts = [context_bucket(len(prompt)) for prompt in asking.prompts]
    longest = max((len(answer.histogram) for answer in answers), default=0)
    histogram = [sum(a.histogram[i] for a in answers if i < len(a.histogram)) for i in range(longest)]
    return replace(
        cell,
        acceptance=summarise(rounds, seed),
        without_loops=summarise(steady, seed) if any(each.rounds > 0 for each in steady) else None,
        histogram=histogram,
        by_context=by_group(rounds, contexts, seed),
        by_set=by_group(rounds, asking.sets, seed),
    )


def with_simulated(cell: Cell, rounds: Sequence[AnswerRounds], asking: Asking, seed: int) -> Cell:
    """Adds what the simulator says of the same answers."""
    by_set = by_group(rounds, asking.sets, seed)
    return replace(cell, simulated=summarise(rounds, seed), simulated_by_set=by_set)


def by_group(rounds: Sequence[AnswerRounds], groups: Sequence[str | None], seed: int) -> dict[str, Acceptance]:
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
