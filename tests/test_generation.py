"""Batched answers are those of each prompt alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.capture.generation import grouped_attention, sample
from eagle3.capture.inprocess import TransformersEngine
from eagle3.config import RegenerateConfig, TargetConfig
from eagle3.prompts.tokenizers import load_tokenizer

# Lengths repeat and do not ascend; the last is one token.
PROMPT_LENGTHS = [9, 3, 30, 3, 17, 24, 5, 11, 1]
END_IDS = frozenset({2, 7, 31, 100, 101, 150, 151, 200, 201, 300})  # so that answers end after a dozen tokens or so


@pytest.fixture(scope="module")
def engine(tiny_target: Path) -> TransformersEngine:
    path = str(tiny_target)
    loaded = TransformersEngine(TargetConfig(path, dtype="float32"), [2, 4, 5], load_tokenizer(path, False))
    loaded.end_ids = END_IDS
    return loaded


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 300, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def settings(**changes: Any) -> RegenerateConfig:
    return RegenerateConfig(**{"max_new_tokens": 24, "cut_loops": False, "batch_size": 3, **changes})


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_greedy_answers_are_those_of_transformers_for_each_prompt_alone(
    engine: TransformersEngine, batch_size: int
) -> None:
    num_tokens: list[int] = []
    answers = engine.generate(make_prompts(), settings(batch_size=batch_size), on_tokens=num_tokens.append)
    for prompt, answer in zip(make_prompts(), answers, strict=True):
        alone = engine.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=24,
            eos_token_id=sorted(END_IDS),
            pad_token_id=2,
        )[0, len(prompt) :].tolist()
        assert answer.ids == alone
        assert answer.finished == (alone[-1] in END_IDS)
        assert answer.finished or len(answer.ids) == 24
    assert sum(num_tokens) == sum(len(answer.ids) for answer in answers)
    assert {answer.finished for answer in answers} == {True, False}


def test_sampled_answers_do_not_depend_on_their_batch_mates(engine: TransformersEngine) -> None:
    prompts = make_prompts()
    together = engine.generate(prompts, settings(temperature=1.0, top_p=0.9, seed=5, batch_size=4))
    alone = [engine.generate([p], settings(temperature=1.0, top_p=0.9, seed=5))[0] for p in prompts]
    assert together == alone
    greedy = engine.generate(prompts, settings())
    other_seed = engine.generate(prompts, settings(temperature=1.0, top_p=0.9, seed=6))
    assert greedy != together != other_seed


def test_looping_answers_are_cut_and_stop_early(engine: TransformersEngine) -> None:
    engine.end_ids = frozenset()
    prompts = make_prompts()
    whole = engine.generate(prompts, settings(max_new_tokens=200))
    num_tokens: list[int] = []
    cut = engine.generate(prompts, settings(max_new_tokens=200, cut_loops=True), on_tokens=num_tokens.append)
    engine.end_ids = END_IDS
    assert any(answer.looped for answer in cut), "greedy random models loop"
    for full, answer in zip(whole, cut, strict=True):
        assert answer.ids == full.ids[: len(answer.ids)]
        assert answer.looped == (len(answer.ids) < 200)
        assert not answer.finished
    assert sum(num_tokens) < sum(len(answer.ids) for answer in whole)


def test_no_prompts_give_no_answers(engine: TransformersEngine) -> None:
    assert engine.generate([], settings()) == []


@pytest.mark.parametrize("masked", [True, False])
def test_grouped_attention_is_attention_with_repeated_keys(masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, key, value = randn(3, 6, 1, 8), randn(3, 2, 11, 8), randn(3, 2, 11, 8)
    mask = None
    if masked:
        columns = torch.arange(11)
        mask = torch.zeros(3, 1, 1, 11, dtype=torch.float64)
        mask.masked_fill_((columns > torch.tensor([[3], [10], [0]]))[:, None, None], float("-inf"))
    output, _ = grouped_attention(torch.nn.Module(), query, key, value, mask, scaling=0.3, dropout=0.0)
    wanted = F.scaled_dot_product_attention(
        query, key.repeat_interleave(3, dim=1), value.repeat_interleave(3, dim=1), attn_mask=mask, scale=0.3
    )
    assert output.shape == (3, 1, 6, 8)
    torch.testing.assert_close(output, wanted.transpose(1, 2))


def nucleus(probabilities: list[float], top_p: float) -> list[float]:
    """The fewest most likely tokens that reach top_p, renormalised, slowly."""
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    kept: list[int] = []
    while len(kept) < len(order) and sum(probabilities[i] for i in kept) < top_p:
        kept.append(order[len(kept)])
    mass = sum(probabilities[i] for i in kept)
    return [p / mass if i in kept else 0.0 for i, p in enumerate(probabilities)]


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.7), (2.0, 0.55)])
def test_sampled_shares_are_the_probabilities(temperature: float, top_p: float) -> None:
    logits = torch.tensor([1.0, -0.5, 2.0, 0.3, 1.4, -3.0])
    uniforms = (torch.arange(10_000) + 0.5) / 10_000
    chosen = sample(logits.expand(10_000, -1), settings(temperature=temperature, top_p=top_p), uniforms)
    shares = torch.bincount(chosen, minlength=6) / 10_000
    wanted = torch.tensor(nucleus((logits / temperature).softmax(-1).tolist(), top_p))
    # A grid of uniforms lands within one of its points at each end of a token's interval.
    torch.testing.assert_close(shares, wanted, atol=3e-4, rtol=0)


@pytest.mark.parametrize("pick", [lambda: 0.0, lambda: 1 - 2**-24])
def test_the_ends_of_the_unit_interval_give_tokens_with_mass(pick: Callable[[], float]) -> None:
    logits = torch.tensor([[float("-inf"), 0.0, 1.0, float("-inf")]])
    for top_p in (1.0, 0.9):
        token = int(sample(logits, settings(temperature=1.0, top_p=top_p), torch.tensor([pick()])))
        assert token in (1, 2)
