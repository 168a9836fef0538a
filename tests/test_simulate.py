"""The simulator's rounds are a real decoder's, answer by answer."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from target_stores import LAYERS, write_target_store
from tiny_drafters import captured_states, fit_drafter, random_drafter
from transformers import AutoModelForCausalLM
from tree_oracle import Drafting, chain_probs, tree_rounds

from eagle3.config import EvaluateConfig, SpeculationConfig, TargetConfig, UserError
from eagle3.draft.acceptance import expected_rounds
from eagle3.draft.model import Eagle3Drafter
from eagle3.draft.target_weights import TargetWeights
from eagle3.draft.ttt import PackedSequences, pack
from eagle3.evaluation.chains import compared_chains
from eagle3.evaluation.decoder import Answer, decode
from eagle3.evaluation.local import decoded_rounds
from eagle3.evaluation.simulate import (
    Speculation,
    held_out_indices,
    open_store,
    packs_of,
    parse_speculation,
    simulate,
    simulate_all,
    simulate_store,
)
from eagle3.evaluation.target import LocalTarget
from eagle3.evaluation.trees import draft_trees, tree_chains
from eagle3.features.manifest import digest_target_config
from eagle3.features.record import FeatureSample, is_held_out
from eagle3.prompts.tokenizers import load_tokenizer, tokenizer_digest


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> LocalTarget:
    return LocalTarget(AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32), LAYERS, frozenset([2]))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 320, (n,), generator=generator).tolist() for n in (4, 1, 11, 25, 8, 14, 6)]


@pytest.fixture(scope="module", params=[False, True], ids=["eagle-3", "eagle-3.1"])
def drafter(request: pytest.FixtureRequest, target: LocalTarget, prompts: list[list[int]]) -> Eagle3Drafter:
    """Fitted to half of the answers, so that chains of every length occur."""
    answers = answer_all(target, None, prompts, 0)
    drafter = random_drafter(target, 256, eagle_3_1=request.param)
    sequences = [prompt + answer.token_ids for prompt, answer in zip(prompts, answers, strict=True)]
    fit_drafter(drafter, target, sequences[:4], num_steps=60)
    return drafter


def answer_all(
    target: LocalTarget, drafter: Eagle3Drafter | None, prompts: list[list[int]], num_draft_tokens: int
) -> list[Answer]:
    return decode(target, drafter, prompts, num_draft_tokens=num_draft_tokens, max_new_tokens=30, batch_size=3)


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 6])
@pytest.mark.parametrize("ends_early", [False, True])
def test_rounds_equal_the_decoders_answer_by_answer(
    target: LocalTarget, drafter: Eagle3Drafter, prompts: list[list[int]], num_draft_tokens: int, ends_early: bool
) -> None:
    answers = answer_all(target, drafter, prompts, num_draft_tokens)
    if ends_early:
        # Tokens from the middle of answers end them: some in the middle of a round, one with its first token.
        end_ids = frozenset([answers[0].token_ids[13], answers[2].token_ids[20], answers[4].token_ids[0]])
        target = LocalTarget(copy.deepcopy(target.model), LAYERS, end_ids)
        answers = answer_all(target, drafter, prompts, num_draft_tokens)
        assert min(answer.num_tokens for answer in answers) == 1
    samples = [
        target.features(f"prompt {i}", prompt, answer.token_ids)
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    decoded = [decoded_rounds(f"prompt {i}", answer, num_draft_tokens) for i, answer in enumerate(answers)]
    told: list[int] = []
    for batch_tokens in (1, 100, 8192):
        simulated = simulate(
            drafter,
            target.embed_tokens,
            samples,
            num_draft_tokens=num_draft_tokens,
            batch_tokens=batch_tokens,
            advance=told.append,
        )
        # Equal to the last bit: rounds and counts are sums of zeros and ones.
        assert simulated == decoded
    assert sum(told) == 3 * len(samples)
    assert sum(sum(answer.accepted) for answer in answers) > 0


@pytest.fixture(scope="module")
def samples(target: LocalTarget, drafter: Eagle3Drafter, prompts: list[list[int]]) -> list[FeatureSample]:
    answers = answer_all(target, None, prompts, 0)
    return [
        target.features(f"prompt {i}", prompt, answer.token_ids)
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def packed(samples: list[FeatureSample], batch_tokens: int = 8192) -> Iterator[PackedSequences]:
    return packs_of(iter(samples), batch_tokens, torch.device("cpu"))


@pytest.mark.parametrize("sizes", [(3, 2, 6), (4, 3, 9), (1, 3, 4)])
def test_trees_count_the_rounds_of_one_built_path_by_path(
    target: LocalTarget, drafter: Eagle3Drafter, samples: list[FeatureSample], sizes: tuple[int, int, int]
) -> None:
    setting = Speculation(*sizes)
    weights = TargetWeights(target.embed_tokens, target.model.lm_head.weight, target.model.model.norm.weight, 1e-5)
    for batch_tokens in (1, 8192):
        found = simulate_all({"a": drafter}, weights, packed(samples, batch_tokens), [setting])["a", setting]
        for sample, answer in zip(samples, found, strict=True):
            ids, first = sample.input_ids.tolist(), int(sample.loss_mask.nonzero()[0])
            expected = tree_rounds(drafter, target.embed_tokens, captured_states(target, ids), ids, first, sizes)
            assert answer.rounds == expected, sample.sample_id
    assert any(answer.rounds < answer.num_tokens - 1 for answer in found)


def test_a_tree_of_one_path_is_a_chain(
    target: LocalTarget, drafter: Eagle3Drafter, samples: list[FeatureSample]
) -> None:
    for sample in samples:
        alone = pack([sample])
        as_tree = tree_chains(draft_trees(drafter, target.embed_tokens, alone, 4, 1), alone, 4, 5)
        # A chain that was left is False in both.
        chain = compared_chains(drafter, target.embed_tokens, alone, 4)
        assert torch.equal(as_tree.matches, chain.matches.cumprod(1).bool())


def test_many_drafters_and_settings_in_one_pass_are_each_on_its_own(
    target: LocalTarget, drafter: Eagle3Drafter, samples: list[FeatureSample]
) -> None:
    weights = TargetWeights(target.embed_tokens, target.model.lm_head.weight, target.model.model.norm.weight, 1e-5)
    drafters = {"fitted": drafter, "random": random_drafter(target, 256)}
    settings = [parse_speculation(text) for text in ("3", "7", "1", "3/2/6", "3/2/4", "2/2/4", "3@1", "2@1", "2@0.5")]
    together = simulate_all(drafters, weights, packed(samples, 40), settings)
    for (name, setting), rounds in together.items():
        alone = simulate_all({name: drafters[name]}, weights, packed(samples), [setting])[name, setting]
        assert [answer.rounds for answer in rounds] == pytest.approx([answer.rounds for answer in alone], abs=1e-4)
        if setting.topk == 1 and setting.temperature is None:
            plain = simulate(drafters[name], target.embed_tokens, samples, num_draft_tokens=setting.num_steps)
            assert rounds == plain
    chains = [sum(a.rounds for a in together["fitted", parse_speculation(text)]) for text in ("1", "3", "7")]
    assert chains[0] > chains[1] >= chains[2]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_rejection_sampling_accepts_by_the_ratio_of_probabilities(
    target: LocalTarget, drafter: Eagle3Drafter, samples: list[FeatureSample], temperature: float
) -> None:
    weights = TargetWeights(target.embed_tokens, target.model.lm_head.weight, target.model.model.norm.weight, 1e-5)
    sample = samples[2]
    ids, first = sample.input_ids.tolist(), int(sample.loss_mask.nonzero()[0])
    aux = captured_states(target, ids)
    with torch.no_grad():
        p = (target.model(torch.tensor([ids])).logits[0] / temperature).softmax(-1)
    accepted = torch.zeros(len(ids) - first - 1, 3)
    for anchor in range(first - 1, len(ids) - 2):
        tokens = ids[anchor + 2 : anchor + 5]
        q = chain_probs(Drafting(drafter, target.embed_tokens, aux, ids, anchor), tokens, temperature)
        for step, token in enumerate(tokens):
            accepted[anchor - first + 1, step] = min(1.0, q[step] / float(p[anchor + 1 + step, token]))
    setting = Speculation(3, temperature=temperature)
    (answer,) = simulate_all({"a": drafter}, weights, packed([sample]), [setting])["a", setting]
    assert 0.1 < float(accepted.mean()) < 0.9
    # fp32, products in another order
    assert answer.rounds == pytest.approx(expected_rounds(accepted), rel=1e-4)


def test_ways_of_serving_are_read_from_text() -> None:
    assert parse_speculation("3") == Speculation(3)
    assert parse_speculation("7@0.7") == Speculation(7, temperature=0.7)
    assert parse_speculation("3/2/6") == Speculation(3, 2, 6)
    assert [parse_speculation(text).name for text in ("3", "7@1.0", "3/2/6")] == ["3", "7@1", "3/2/6"]
    for text in ("", "0", "3@0", "3/1/4", "3/2/12", "3/2/1", "x", "3/2", "-1"):
        with pytest.raises(UserError, match="a speculation must be STEPS, STEPS@TEMPERATURE or STEPS/TOPK/TOKENS"):
            parse_speculation(text)


def test_features_are_transformers_hidden_states(target: LocalTarget) -> None:
    ids = list(range(40, 60))
    sample = target.features("a", ids[:12], ids[12:])
    with torch.no_grad():
        output = target.model(torch.tensor([ids]), output_hidden_states=True)
        logits = target.model.lm_head(sample.last_hidden_states)
    expected = torch.cat([output.hidden_states[k][0] for k in LAYERS], dim=-1)
    # fp32, another attention kernel
    torch.testing.assert_close(sample.aux_hidden_states, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, output.logits[0, 11:19], rtol=1e-4, atol=1e-4)
    assert sample.input_ids.tolist() == ids
    assert sample.loss_mask.tolist() == [False] * 12 + [True] * 8
    assert sample.last_rows.tolist() == list(range(11, 19))


def test_a_store_is_simulated_on_its_held_out_samples(
    tmp_path: Path, tiny_target: Path, target: LocalTarget, make_sample: Callable[..., FeatureSample]
) -> None:
    samples = [make_sample(f"sample {i}", [0] * 3 + [1] * (5 + i), seed=i) for i in range(12)]
    write_target_store(tmp_path / "store", tiny_target, samples)
    drafter = random_drafter(target, 320)
    store = open_store(tmp_path / "store", drafter.config, TargetConfig(str(tiny_target)))
    config = EvaluateConfig(speculation=SpeculationConfig(num_draft_tokens=2))
    held_out = [sample for sample in samples if is_held_out(sample.sample_id, 0.5)]
    assert 0 < len(held_out) < 12
    indices = held_out_indices(store, 0.5)
    measured = simulate_store(drafter, target.embed_tokens, store, indices, config)
    assert measured.all_answers.num_tokens == sum(int(sample.loss_mask.sum()) for sample in held_out)
    everything = simulate_store(drafter, target.embed_tokens, store, held_out_indices(store, None), config)
    assert everything.all_answers.num_tokens == sum(int(sample.loss_mask.sum()) for sample in samples)
    with pytest.raises(UserError, match="held_out_share must leave samples of the store, got none of 12 with 1e-09"):
        held_out_indices(store, 1e-9)


def test_a_store_of_another_capture_is_refused_with_every_difference(
    tmp_path: Path, tiny_target: Path, target: LocalTarget, make_sample: Callable[..., FeatureSample]
) -> None:
    others: dict[str, Any] = {"capture_layers": (1, 4, 5), "vocab_size": 400}
    others |= {"tokenizer_digest": "t0", "target_config_digest": "c0"}
    write_target_store(tmp_path / "store", tiny_target, [make_sample("a", [0, 1, 1])], **others)
    with pytest.raises(UserError) as error:
        open_store(tmp_path / "store", random_drafter(target, 320).config, TargetConfig(str(tiny_target)))
    first, *differences, advice = str(error.value).splitlines()
    assert first.startswith(f"the features in {tmp_path / 'store'} must be those of the target and layers at hand, got")
    here = {
        "target_config_digest": digest_target_config(tiny_target),
        "tokenizer_digest": tokenizer_digest(load_tokenizer(str(tiny_target), False)),
        "capture_layers": (2, 4, 5),
        "vocab_size": 320,
    }
    assert differences == [
        f"  {name} must be {others[name]!r}, as captured from {tiny_target}, got {value!r}"
        for name, value in here.items()
    ]
    assert advice.startswith("change target.path, evaluate a drafter that was trained on the store, or")


def test_a_store_of_other_weights_is_refused(
    tmp_path: Path, make_target: Callable[..., Path], target: LocalTarget, make_sample: Callable[..., FeatureSample]
) -> None:
    one, other = make_target(tmp_path / "one", seed=0), make_target(tmp_path / "other", seed=1)
    write_target_store(tmp_path / "store", one, [make_sample("a", [0, 1, 1])])
    drafter = random_drafter(target, 320).config
    assert len(open_store(tmp_path / "store", drafter, TargetConfig(str(one)))) == 1
    with pytest.raises(UserError, match=r"target_revision must be '\w+', as captured from .*/one, got '\w+'"):
        open_store(tmp_path / "store", drafter, TargetConfig(str(other)))
