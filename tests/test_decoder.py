"""The reference decoder emits exactly the target's greedy tokens, and drafts as a drafter without a cache would."""

import ast
import copy
from pathlib import Path

import pytest
import torch
from target_stores import LAYERS
from tiny_drafters import captured_states, dense_attention, fit_drafter, random_drafter
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from eagle3.draft.model import Eagle3Drafter
from eagle3.evaluation import decoder as decoder_module
from eagle3.evaluation.decoder import Answer, decode
from eagle3.evaluation.target import LocalTarget

MAX_NEW_TOKENS = 24


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> LocalTarget:
    return LocalTarget(AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32), LAYERS, frozenset([2]))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 320, (n,), generator=generator).tolist() for n in (5, 17, 1, 9, 30, 12)]


@pytest.fixture(scope="module")
def greedy(target: LocalTarget, prompts: list[list[int]]) -> list[list[int]]:
    """The answers by transformers' own generate."""
    answers = []
    for prompt in prompts:
        output = target.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers


@pytest.fixture(scope="module", params=[False, True], ids=["eagle-3", "eagle-3.1"])
def drafter(
    request: pytest.FixtureRequest, target: LocalTarget, prompts: list[list[int]], greedy: list[list[int]]
) -> Eagle3Drafter:
    """Right often enough for rounds of every length, and never about a fifth of the vocabulary."""
    drafter = random_drafter(target, 256, eagle_3_1=request.param)
    fit_drafter(drafter, target, [p + a for p, a in zip(prompts, greedy, strict=True)], num_steps=60)
    return drafter


def run(target: LocalTarget, drafter: Eagle3Drafter | None, prompts: list[list[int]], k: int, b: int) -> list[Answer]:
    return decode(
        target, drafter, prompts, num_draft_tokens=k, max_new_tokens=MAX_NEW_TOKENS, batch_size=b, on_answer=None
    )


@pytest.mark.parametrize("batch_size", [1, 4, 9])
@pytest.mark.parametrize("num_draft_tokens", [1, 3, 7])
def test_answers_are_the_targets_greedy_tokens(
    target: LocalTarget,
    drafter: Eagle3Drafter,
    prompts: list[list[int]],
    greedy: list[list[int]],
    num_draft_tokens: int,
    batch_size: int,
) -> None:
    answers = run(target, drafter, prompts, num_draft_tokens, batch_size)
    assert [answer.token_ids for answer in answers] == greedy
    accepted = [count for answer in answers for count in answer.accepted]
    assert min(accepted) == 0, accepted
    assert max(accepted) == num_draft_tokens, accepted


def test_without_a_drafter_each_round_emits_one_token(
    target: LocalTarget, prompts: list[list[int]], greedy: list[list[int]]
) -> None:
    answers = run(target, None, prompts, 3, 4)
    assert [answer.token_ids for answer in answers] == greedy
    assert [answer.accepted for answer in answers] == [[0] * (len(ids) - 1) for ids in greedy]


def drafts_without_a_cache(
    drafter: Eagle3Drafter, target: LocalTarget, ids: list[int], anchor: int, num_draft_tokens: int
) -> list[int]:
    """Drafts after x[anchor + 1], everything computed anew: true features up to the anchor, then its own output."""
    tokens = torch.tensor(ids[: anchor + 2])
    hidden = drafter.fuse(captured_states(target, ids[: anchor + 1]))
    positions = torch.arange(anchor + 1)
    query, keys, values = drafter.qkv(F.embedding(tokens[1:], target.embed_tokens), hidden, positions)
    output = drafter.finish(hidden, dense_attention(query, keys, values))[-1:]
    drafts = [int(drafter.target_ids[drafter.logits(output).argmax()])]
    for step in range(1, num_draft_tokens):
        hidden = drafter.feedback(output)
        embeds = target.embed_tokens[drafts[-1]][None]
        query, key, value = drafter.qkv(embeds, hidden, torch.tensor([anchor + step]))
        keys, values = torch.cat([keys, key]), torch.cat([values, value])
        output = drafter.finish(hidden, dense_attention(query, keys, values))
        drafts.append(int(drafter.target_ids[drafter.logits(output).argmax()]))
    return drafts


@torch.no_grad()
def test_rounds_are_those_of_a_drafter_without_a_cache(
    target: LocalTarget, drafter: Eagle3Drafter, prompts: list[list[int]]
) -> None:
    num_draft_tokens = 4
    for prompt, answer in zip(prompts, run(target, drafter, prompts, num_draft_tokens, 3), strict=True):
        ids = prompt + answer.token_ids
        newest, accepted = len(prompt), []
        while newest < len(ids) - 1:
            drafts = drafts_without_a_cache(drafter, target, ids, newest - 1, num_draft_tokens)
            right = 0
            while right < num_draft_tokens and ids[newest + 1 + right : newest + 2 + right] == [drafts[right]]:
                right += 1
            accepted.append(right)
            newest += right + 1
        # The last round may accept drafts past the end, which the walk above cannot see.
        assert answer.accepted[:-1] == accepted[:-1]
        assert len(answer.accepted) == len(accepted)
        assert answer.accepted[-1] >= accepted[-1]


def test_a_drafter_that_is_always_right_needs_the_fewest_rounds(target: LocalTarget) -> None:
    assert rounds_when_every_token_is_zero(target, draft=0) == [3] * 6  # 1 + 23 tokens in rounds of 4


def test_a_drafter_that_is_never_right_needs_one_round_per_token(target: LocalTarget) -> None:
    assert rounds_when_every_token_is_zero(target, draft=5) == [0] * 23


def rounds_when_every_token_is_zero(target: LocalTarget, draft: int) -> list[int]:
    """Decodes with a drafter of one token, against a target whose logits are all equal: it says token 0 always."""
    model = copy.deepcopy(target.model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    drafter = random_drafter(target, 1)
    drafter.set_draft_vocab(torch.tensor([draft]), torch.arange(320) == draft)
    (answer,) = run(LocalTarget(model, LAYERS, frozenset()), drafter, [[7, 8, 9]], 3, 1)
    assert answer.token_ids == [0] * MAX_NEW_TOKENS
    return answer.accepted


def test_an_answer_stops_at_the_end_token_inside_a_round(
    target: LocalTarget, drafter: Eagle3Drafter, prompts: list[list[int]], greedy: list[list[int]]
) -> None:
    end_token = greedy[0][11]
    ending = LocalTarget(copy.deepcopy(target.model), LAYERS, frozenset([end_token, 2]))
    expected = [ids[: ids.index(end_token) + 1] if end_token in ids else ids for ids in greedy]
    assert any(len(short) < len(whole) for short, whole in zip(expected, greedy, strict=True))
    for batch_size in (1, 6):
        answers = run(ending, drafter, prompts, 4, batch_size)
        assert [answer.token_ids for answer in answers] == expected
        seen: list[Answer] = []
        decode(ending, drafter, prompts, num_draft_tokens=4, max_new_tokens=24, batch_size=6, on_answer=seen.append)
        assert sorted(a.token_ids for a in seen) == sorted(expected)


def test_the_decoder_shares_only_the_drafters_step_with_training() -> None:
    tree = ast.parse(Path(decoder_module.__file__).read_text())
    ours = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "eagle3" in str(node.module)}
    assert ours == {"eagle3.draft.model", "eagle3.evaluation.target"}
