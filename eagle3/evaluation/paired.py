"""Two drafters on the same questions: by how much their tau differs, and whether that is more than luck."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.draft.questions import Question

NUM_RESAMPLES = 10_000  # a p-value of 0.05 then moves by 0.002 with the seed
CHUNK = 250  # resamples drawn at a time: 10,000 questions take 80 MB


@dataclass(frozen=True)
class PairedTest:
    """What a paired bootstrap over questions says of b against a; by chance, one test in twenty leaves zero out."""

    num_pairs: int
    num_unpaired: int  # questions that one of them was not asked, or was asked otherwise
    difference: float  # tau of b minus tau of a, over the pairs
    low: float  # 95 % interval
    high: float
    p_value: float  # two-sided

    @property
    def is_real(self) -> bool:
        """True where the interval leaves zero out."""
        return self.low > 0 or self.high < 0


def paired_test(a: Sequence[Question], b: Sequence[Question], spread: float = 0.0, seed: int = 0) -> PairedTest | None:
    """Resamples the questions that both answered, both sides together; None where fewer than two pair or no round was.

    Answers of one sample stay together, for they are alike. Both taus are sums of tokens over sums of rounds.
    `spread` is the standard deviation of tau over tau between trainings that differ by their seed alone: with it the
    test is of two recipes, trained once each, without it of the two drafters that came of them. Many questions make
    the second as sharp as one likes, and never the first.
    """
    sums_a, sums_b = _per_sample(a), _per_sample(b)
    shared = sorted(sums_a.keys() & sums_b.keys())
    num_unpaired = len(sums_a.keys() | sums_b.keys()) - len(shared)
    counts = torch.tensor([[*sums_a[key], *sums_b[key]] for key in shared], dtype=torch.float64)  # (Q, 4)
    if len(shared) < 2 or not bool((counts.sum(0) > 0).all()):
        return None
    generator = torch.Generator().manual_seed(seed)
    sums = _resampled(counts, generator)
    luck = torch.randn(2, NUM_RESAMPLES, generator=generator, dtype=torch.float64) * spread  # of the two trainings
    differences = sums[:, 2] / sums[:, 3] * (1 + luck[1]) - sums[:, 0] / sums[:, 1] * (1 + luck[0])
    differences = differences[differences.isfinite()]  # a draw of one-token answers alone has no tau
    low, high = differences.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    # The observed sample counts as one more draw, so that no p-value is zero.
    smaller = min(int((differences <= 0).sum()), int((differences >= 0).sum()))
    p_value = min(1.0, 2 * (smaller + 1) / (differences.numel() + 1))
    return PairedTest(len(shared), num_unpaired, _difference(counts.sum(0)), low, high, p_value)


def num_shared_questions(a: Sequence[Question], b: Sequence[Question]) -> int:
    """Returns how many questions were asked of both, in the same words."""
    return len(_per_sample(a).keys() & _per_sample(b).keys())


def _per_sample(questions: Sequence[Question]) -> dict[tuple[str, str], tuple[float, float]]:
    """Returns tokens and rounds of each sample, by its id and what was asked."""
    sums: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for question in questions:
        total = sums[question.answer.sample_id, question.prompt]
        total[0] += question.answer.num_tokens
        total[1] += question.answer.rounds
    return {key: (tokens, rounds) for key, (tokens, rounds) in sums.items()}


def _resampled(counts: Tensor, generator: torch.Generator) -> Tensor:  # (Q, 4) -> (NUM_RESAMPLES, 4)
    draws = [
        counts[torch.randint(len(counts), (CHUNK, len(counts)), generator=generator)].sum(1)
        for _ in range(NUM_RESAMPLES // CHUNK)
    ]
    return torch.cat(draws)


def _difference(sums: Tensor) -> float:  # (4,) tokens and rounds of a, then of b
    return float(sums[2] / sums[3] - sums[0] / sums[1])
