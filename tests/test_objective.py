"""Losses and counts against a loop over rows and steps that shares no code with them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from dense_oracle import dense_sums
from draft_oracle import CachedDrafter, tiny_drafter
from loop_oracle import loop_sums
from tiny_objective import DECAY, NEEDS_GPU, STEPS, gradients, masked_samples, random_target, sums_of, with_normalisers
from torch import Tensor

from eagle3.draft import context_attention
from eagle3.draft.head import LossKind
from eagle3.draft.model import Eagle3Drafter
from eagle3.draft.objective import _pack_targets, _Survivors, ttt_sums
from eagle3.draft.target_weights import TargetWeights
from eagle3.draft.ttt import PackedSequences, pack, unroll
from eagle3.features.record import FeatureSample


@pytest.fixture(scope="module")
def samples() -> list[FeatureSample]:
    return masked_samples()


@pytest.fixture(scope="module")
def target() -> TargetWeights:
    return random_target()


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("switches", [{}, {"fc_norm": True, "norm_output": True}])
def test_the_dense_definition_has_the_same_values_and_gradients(
    switches: dict[str, Any], renormalise: bool, samples: list[FeatureSample], target: TargetWeights
) -> None:
    """It is what `record_loss_curves` trains with, beside the engine."""
    drafter, packed = tiny_drafter(**switches), pack(samples)
    ours = sums_of(drafter, target, packed, renormalise)
    dense = dense_sums(drafter, target, packed, ttt_steps=STEPS, ttt_decay=DECAY, renormalise=renormalise)
    for name in ("loss", "step_loss", "num_counted", "num_top1", "acceptance"):
        torch.testing.assert_close(getattr(ours, name), getattr(dense, name), rtol=1e-5, atol=1e-6, msg=name)
    expected = gradients(drafter, dense.loss)
    for name, gradient in gradients(drafter, ours.loss).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5, msg=name)  # fp32, other order


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        pytest.param("cuda", torch.float32, marks=NEEDS_GPU),
        pytest.param("cuda", torch.bfloat16, marks=NEEDS_GPU),
    ],
)
@pytest.mark.parametrize("drop_rejected", [False, True])
def test_prompts_need_no_queries(
    drop_rejected: bool,
    device: str,
    dtype: torch.dtype,
    samples: list[FeatureSample],
    target: TargetWeights,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, where tokens before a document's first counted row do not attend."""
    drafter = tiny_drafter(head_dim=8, dtype=dtype).to(device)
    packed, on_device = pack(samples).to(device), target.to(device, dtype)
    results = []
    queries: list[int] = []
    forward = context_attention.context_forward

    def noted(query: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        queries.append(query.shape[0])
        return forward(query, *args)

    monkeypatch.setattr("eagle3.draft.attention.context_forward", noted)
    # Which rows are right at a near-tie is not for two kernels to say.
    monkeypatch.setattr(
        "eagle3.draft.objective._is_right",
        lambda chosen, recorded: torch.arange(len(chosen), device=device) % 3 > 0,
    )
    # Rows are counted from tokens 1 and 0 of the first two documents on; of the others one token is left.
    for all_queries, num_queries in ((True, 7 + 10 + 3 + 2), (False, 6 + 10 + 1 + 1)):
        answer = partial(lambda lengths, device, all_queries: all_queries, all_queries=all_queries)
        monkeypatch.setattr("eagle3.draft.ttt.wants_all_queries", answer)
        queries.clear()
        sums = sums_of(drafter, on_device, packed, drop_rejected=drop_rejected)
        assert set(queries) == {num_queries}
        results.append({"loss": sums.loss, **gradients(drafter, sums.loss)})
    for name, expected in results[0].items():
        error = (results[1][name] - expected).norm() / expected.norm()
        assert error < (1e-5 if dtype == torch.float32 else 0.02), (name, float(error))  # other order; 8 bits


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(
    ("kind", "switches"),
    [
        ("cross_entropy", {}),
        ("cross_entropy", {"fc_norm": True, "norm_output": True}),
        ("kl", {}),
        ("tv", {}),
        ("lk", {}),
    ],
)
def test_values_and_gradients_are_those_of_the_loop(
    kind: LossKind,
    switches: dict[str, Any],
    renormalise: bool,
    samples: list[FeatureSample],
    target: TargetWeights,
) -> None:
    drafter = tiny_drafter(**switches)
    ours = sums_of(drafter, target, pack(samples), renormalise, kind=kind)
    loop = loop_sums(drafter, target, samples, ttt_steps=STEPS, renormalise=renormalise, kind=kind)
    torch.testing.assert_close(ours.step_loss.tolist(), [s.item() for s in loop.step_loss], rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.acceptance.tolist(), loop.acceptance, rtol=1e-5, atol=0)
    assert ours.num_counted.tolist() == loop.num_counted == [8, 5, 3, 1]
    assert ours.num_top1.tolist() == loop.num_top1
    loop_loss = torch.stack([DECAY**step * total for step, total in enumerate(loop.step_loss)]).sum()
    torch.testing.assert_close(ours.loss.float(), loop_loss, rtol=1e-5, atol=0)
    expected = gradients(drafter, loop_loss)
    for name, gradient in gradients(drafter, ours.loss).items():
        scale = float(expected[name].abs().max())
        assert scale > 0, name
        # fp32 in another summation order: each element to 1e-5 of the tensor's largest
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5 * scale, msg=name)


def with_right_chain(
    sample: FeatureSample, drafter: Eagle3Drafter, target: TargetWeights, row: int, length: int
) -> FeatureSample:
    """Returns the sample with the drafter's own choices as the tokens that follow row + 1."""
    oracle, input_ids = CachedDrafter(drafter, target.embed_tokens), sample.input_ids.clone()
    for step in range(length):
        drafted = oracle.chain(input_ids, sample.aux_hidden_states, row, step + 1)[step]
        input_ids[row + 2 + step] = drafter.target_ids[drafted.logits.argmax()]
    return replace(sample, input_ids=input_ids)


@pytest.mark.parametrize("chunk_elements", [2**21, 30])
def test_rows_that_are_rejected_leave_as_if_they_weighed_nothing(
    chunk_elements: int,
    make_sample: Callable[..., FeatureSample],
    target: TargetWeights,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("eagle3.draft.head.CHUNK_ELEMENTS", {"cpu": chunk_elements})
    drafter = tiny_drafter()
    samples = [
        make_sample(f"s{i}", mask, seed=i, hidden_size=16, vocab_size=40)
        for i, mask in enumerate([[0, 0] + [1] * 9, [0, 1, 1, 1, 1, 0, 0, 1, 1, 1], [0, 0, 0]])
    ]
    samples[0] = with_right_chain(samples[0], drafter, target, row=1, length=4)
    samples[0] = with_right_chain(samples[0], drafter, target, row=5, length=2)
    # Right to the last token of their turns: there is nothing to go on with, in the document or behind it.
    samples[1] = with_right_chain(samples[1], drafter, target, row=0, length=3)
    samples[1] = with_right_chain(samples[1], drafter, target, row=6, length=2)
    ours = sums_of(drafter, target, pack(samples), drop_rejected=True)
    loop = loop_sums(drafter, target, samples, ttt_steps=STEPS, renormalise=True, drop_rejected=True)
    assert ours.num_counted.tolist() == loop.num_counted
    assert loop.num_counted[0] > loop.num_counted[1] > loop.num_counted[2] >= loop.num_counted[3] > 0
    assert ours.num_top1.tolist() == loop.num_top1
    torch.testing.assert_close(ours.step_loss.tolist(), [s.item() for s in loop.step_loss], rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.acceptance.tolist(), loop.acceptance, rtol=1e-5, atol=0)
    loop_loss = torch.stack([DECAY**step * total for step, total in enumerate(loop.step_loss)]).sum()
    expected = gradients(drafter, loop_loss)
    for name, gradient in gradients(drafter, ours.loss).items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5 * scale, msg=name)


def test_survivors_keep_their_order() -> None:
    kept = torch.rand(200, generator=torch.Generator().manual_seed(0)) < 0.6
    rows = torch.arange(7, 607, 3)
    assert _Survivors(rows, kept).get().tolist() == rows[kept].tolist()


def test_no_row_is_left_after_the_first_step(samples: list[FeatureSample], target: TargetWeights) -> None:
    """No draft token is a recorded one: later steps have nothing to do, and the loss is that of the first."""
    drafter, packed = tiny_drafter(), pack(samples)
    drafted = set(drafter.target_ids.tolist())
    other = next(token for token in range(40) if token not in drafted)
    packed = replace(packed, input_ids=torch.full_like(packed.input_ids, other))
    sums = sums_of(drafter, target, packed, drop_rejected=True)
    assert sums.num_counted.tolist() == [8, 0, 0, 0]
    first = sums_of(drafter, target, packed, step_weights=torch.tensor([1.0, 0, 0, 0]))
    torch.testing.assert_close(sums.loss, first.loss, rtol=1e-6, atol=0)
    expected = gradients(drafter, first.loss)
    for name, gradient in gradients(drafter, sums.loss).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5, msg=name)


def test_top1_counts_the_recorded_token(samples: list[FeatureSample], target: TargetWeights) -> None:
    """Each draft token in turn made the first choice everywhere: the counts add up to the drafted tokens recorded."""
    packed = pack(samples)
    total = torch.zeros(STEPS, dtype=torch.float64)
    drafter = tiny_drafter()
    with torch.no_grad():
        drafter.midlayer.mlp.down_proj.weight.zero_()
        drafter.midlayer.self_attn.o_proj.weight.zero_()
        drafter.norm.weight.zero_()  # all logits equal: the first token is chosen
    for first in drafter.target_ids.tolist():
        drafter.d2t[0] = first
        total += sums_of(drafter, target, packed).num_top1
    drafted = set(drafter.target_ids.tolist()[1:]) | {int(tiny_drafter().d2t[0])}
    recorded = [packed.input_ids[rows + 2 + step] for step, rows in enumerate(packed.counted(STEPS))]
    assert total.tolist() == [sum(int(token) in drafted for token in tokens) for tokens in recorded]
    assert total.sum() > 0


def test_each_row_is_scored_against_the_target_of_its_token(target: TargetWeights) -> None:
    """Last states that are their token's number; only supervised ones are kept."""
    packed = PackedSequences(
        input_ids=torch.tensor([10, 11, 12, 13, 20, 21, 22, 23, 24, 25]),
        positions=torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 5]),
        loss_mask=torch.tensor([0, 1, 1, 1, 0, 0, 1, 1, 1, 1], dtype=torch.bool),
        document_lengths=(4, 6),
        aux_hidden_states=torch.zeros(10, 48),
        target_rows=torch.tensor([0, 1, 2, 5, 6, 7, 8]),
        last_hidden_states=torch.tensor([10.0, 11, 12, 21, 22, 23, 24])[:, None].expand(7, 16),
        target_logz=torch.zeros(7),
        sample_ids=("a", "b"),
    )
    drafter = tiny_drafter()
    pack_targets = _pack_targets(drafter, target, packed, renormalise=True)
    scored = [pack_targets.scored(k, step) for k, step in enumerate(unroll(drafter, target.embed_tokens, packed, 3))]
    assert [pack_targets.targets.last[rows.index][:, 0].int().tolist() for rows in scored] == [
        [11, 12, 22, 23, 24],  # rows at tokens 10, 11, 21, 22, 23
        [12, 23, 24],  # rows at tokens 10, 21, 22
        [24],  # the row at token 21
    ]
    assert [rows.recorded.tolist() for rows in scored] == [[12, 13, 23, 24, 25], [13, 24, 25], [25]]


def test_loss_does_not_depend_on_packing(samples: list[FeatureSample], target: TargetWeights) -> None:
    drafter = tiny_drafter()
    together = sums_of(drafter, target, pack(samples))
    apart = [sums_of(drafter, target, pack([sample])) for sample in reversed(samples)]
    for name in ("loss", "step_loss", "num_counted", "num_top1", "acceptance"):
        total = torch.stack([getattr(sums, name) for sums in apart]).sum(0)
        torch.testing.assert_close(getattr(together, name), total, rtol=1e-6, atol=1e-6)  # fp32 kernels
    expected = gradients(drafter, together.loss)
    for name, gradient in gradients(drafter, torch.stack([sums.loss for sums in apart]).sum()).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5, msg=name)


def test_loss_ignores_what_no_counted_row_reads(samples: list[FeatureSample], target: TargetWeights) -> None:
    """Features after the last counted row, other documents' tokens, the prompt's last states."""
    drafter = tiny_drafter()
    packed = pack(samples[:2])
    changed_aux = packed.aux_hidden_states.clone()
    changed_aux[[4, 5, 6, 15, 16]] = 1e3  # documents end at 7 and 17; their last counted rows are 3 and 14
    changed = replace(packed, aux_hidden_states=changed_aux)
    assert torch.equal(sums_of(drafter, target, packed).loss, sums_of(drafter, target, changed).loss)


@pytest.mark.parametrize("masks", [[], [[0, 0, 0]], [[0, 1], [0, 0]]])
def test_a_pack_without_work_still_reaches_every_parameter(
    masks: list[list[int]], make_sample: Callable[..., FeatureSample], target: TargetWeights
) -> None:
    drafter = tiny_drafter(fc_norm=True)
    packed = pack([make_sample(f"s{i}", mask, hidden_size=16, vocab_size=40) for i, mask in enumerate(masks)])
    sums = sums_of(drafter, target, packed)
    assert sums.loss == 0
    for name in ("step_loss", "num_counted", "num_top1", "acceptance"):
        assert getattr(sums, name).tolist() == [0.0] * STEPS
    for name, gradient in gradients(drafter, sums.loss).items():
        assert gradient.count_nonzero() == 0, name


def test_only_the_loss_carries_a_gradient(samples: list[FeatureSample], target: TargetWeights) -> None:
    sums = sums_of(tiny_drafter(), target, pack(samples))
    assert sums.loss.requires_grad
    assert not any(
        tensor.requires_grad for tensor in (sums.step_loss, sums.num_counted, sums.num_top1, sums.acceptance)
    )
    with torch.no_grad():
        assert torch.equal(sums_of(tiny_drafter(), target, pack(samples)).loss, sums.loss)


def test_step_weights_replace_the_decay(samples: list[FeatureSample], target: TargetWeights) -> None:
    drafter = tiny_drafter()
    weights = torch.tensor([0.5, 0.0, 2.0, 1.0])
    sums = sums_of(drafter, target, pack(samples), step_weights=weights)
    torch.testing.assert_close(sums.loss, (weights * sums.step_loss).sum())
    by_decay = sums_of(drafter, target, pack(samples), step_weights=DECAY ** torch.arange(4.0))
    expected = gradients(drafter, sums_of(drafter, target, pack(samples)).loss)
    for name, gradient in gradients(drafter, by_decay.loss).items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


def test_a_stored_normaliser_is_used(samples: list[FeatureSample], target: TargetWeights) -> None:
    drafter, packed = tiny_drafter(), with_normalisers(pack(samples), target)
    stored = sums_of(drafter, target, packed, renormalise=False)
    assert packed.target_logz is not None
    doubled = replace(packed, target_logz=packed.target_logz + torch.tensor(2.0).log())
    halved = sums_of(drafter, target, doubled, renormalise=False)
    torch.testing.assert_close(halved.loss, stored.loss / 2, rtol=1e-5, atol=0)  # fp32 inside


def test_the_drafted_rows_of_the_head_are_enough(samples: list[FeatureSample], target: TargetWeights) -> None:
    drafter, packed = tiny_drafter(), pack(samples)
    drafted = target.drafted(drafter.target_ids)
    assert drafted.lm_head.shape[0] < target.lm_head.shape[0]
    stored = with_normalisers(packed, target)
    for renormalise in (True, False):
        found, wanted = (sums_of(drafter, each, stored, renormalise) for each in (drafted, target))
        assert torch.equal(found.loss, wanted.loss)
        assert torch.equal(found.acceptance, wanted.acceptance)
        expected = gradients(drafter, wanted.loss)
        assert all(torch.equal(grad, expected[name]) for name, grad in gradients(drafter, found.loss).items())
    with pytest.raises(AssertionError, match=r"\d+ last states must come with their log-normalisers, got none"):
        ttt_sums(drafter, drafted, packed, ttt_steps=STEPS, ttt_decay=DECAY, renormalise=True)
