"""Losses and counts against a loop over rows and steps that shares no code with them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from dense_oracle import dense_sums
from draft_oracle import CachedDrafter, tiny_drafter
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagle3.draft import context_attention
from eagle3.draft.head import HeadSums, LossKind, chunks
from eagle3.draft.model import Eagle3Drafter
from eagle3.draft.objective import TTTSums, _pack_targets, ttt_sums
from eagle3.draft.target_weights import TargetWeights, log_normaliser
from eagle3.draft.ttt import PackedSequences, pack, unroll
from eagle3.features.record import FeatureSample

# A prompt and an answer; two turns, the last one to the very end; nothing supervised; too short to count.
MASKS = [[0, 0, 1, 1, 1, 1, 0], [0, 1, 1, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0], [0, 1]]
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
STEPS = 4
DECAY = 0.7


@pytest.fixture(scope="module")
def samples(make_sample: Callable[..., FeatureSample]) -> list[FeatureSample]:
    return [make_sample(f"s{i}", mask, seed=i, hidden_size=16, vocab_size=40) for i, mask in enumerate(MASKS)]


@pytest.fixture(scope="module")
def target() -> TargetWeights:
    generator = torch.Generator().manual_seed(9)
    return TargetWeights(
        embed_tokens=torch.randn(40, 16, generator=generator),
        lm_head=torch.randn(40, 16, generator=generator),
        norm=torch.ones(16),
        rms_norm_eps=1e-5,
    )


def sums_of(
    drafter: Eagle3Drafter, target: TargetWeights, packed: PackedSequences, renormalise: bool = True, **changes: Any
) -> TTTSums:
    settings: dict[str, Any] = {"ttt_steps": STEPS, "ttt_decay": DECAY, "renormalise": renormalise}
    return ttt_sums(drafter, target, packed, **(settings | changes))


def gradients(drafter: Eagle3Drafter, loss: Tensor) -> dict[str, Tensor]:
    names = [name for name, _ in drafter.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(drafter.parameters())), strict=True))


@dataclass
class LoopSums:
    """What the loop adds up, per step."""

    step_loss: list[Tensor]
    num_counted: list[int]
    num_top1: list[int]
    acceptance: list[float]


def row_loss(kind: LossKind, wanted: Tensor, served: Tensor, log_drafted: Tensor) -> Tensor:  # (W,) each
    """Returns the loss of one row, written as it is defined; autograd makes its gradient."""
    cross_entropy = -(wanted * log_drafted).sum()
    kl = cross_entropy + (wanted * (wanted / wanted.sum()).log()).sum()
    acceptance = torch.minimum(served, log_drafted.exp()).sum()
    share_of_kl = torch.exp(-3 * acceptance.detach())
    hybrid = share_of_kl * kl + (1 - share_of_kl) * (1 - acceptance)
    return {"cross_entropy": cross_entropy, "kl": kl, "tv": 1 - acceptance, "lk": hybrid}[kind]


def loop_sums(
    drafter: Eagle3Drafter,
    target: TargetWeights,
    samples: list[FeatureSample],
    renormalise: bool,
    drop_rejected: bool = False,
    kind: LossKind = "cross_entropy",
) -> LoopSums:
    """Row by row, step by step, token by token, one document at a time."""
    sums = LoopSums([torch.zeros(()) for _ in range(STEPS)], [0] * STEPS, [0] * STEPS, [0.0] * STEPS)
    oracle = CachedDrafter(drafter, target.embed_tokens)
    target_ids = [int(offset) + i for i, offset in enumerate(drafter.d2t)]
    for sample in samples:
        mask = sample.loss_mask.tolist()
        for row in range(len(mask)):
            length = 0
            while row + 2 + length < len(mask) and all(mask[row + 1 : row + 3 + length]) and length < STEPS:
                length += 1
            if length == 0:
                continue
            chain = oracle.chain(sample.input_ids, sample.aux_hidden_states, row, length)
            for step, drafted in enumerate(chain):
                [last] = sample.last_at(torch.tensor([row + 1 + step]))
                served = torch.softmax(target.lm_head @ last, dim=0)[target_ids]  # (W,) of the softmax over V
                wanted = served / served.sum() if renormalise else served
                log_drafted = torch.log_softmax(drafted.logits, dim=0)
                sums.step_loss[step] = sums.step_loss[step] + row_loss(kind, wanted, served, log_drafted)
                sums.num_counted[step] += 1
                recorded = int(sample.input_ids[row + 2 + step])
                sums.num_top1[step] += target_ids[int(drafted.logits.argmax())] == recorded
                sums.acceptance[step] += float(torch.minimum(served, log_drafted.detach().exp()).sum())
                if drop_rejected and target_ids[int(drafted.logits.argmax())] != recorded:
                    break
    return sums


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
        lambda number, chosen, recorded: torch.arange(len(chosen), device=device) % 3 > 0,
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
    loop = loop_sums(drafter, target, samples, renormalise, kind=kind)
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
    samples[1] = with_right_chain(samples[1], drafter, target, row=0, length=1)
    ours = sums_of(drafter, target, pack(samples), drop_rejected=True)
    loop = loop_sums(drafter, target, samples, renormalise=True, drop_rejected=True)
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
    drafter, packed = tiny_drafter(), pack(samples)
    computed = sums_of(drafter, target, packed, renormalise=False)
    logz = log_normaliser(target, packed.last_hidden_states)
    stored = sums_of(drafter, target, replace(packed, target_logz=logz), renormalise=False)
    assert torch.equal(stored.loss, computed.loss)
    halved = sums_of(drafter, target, replace(packed, target_logz=logz + torch.tensor(2.0).log()), renormalise=False)
    torch.testing.assert_close(halved.loss, computed.loss / 2, rtol=1e-5, atol=0)  # fp32 inside


def test_with_a_stored_normaliser_the_drafted_rows_of_the_head_are_enough(
    samples: list[FeatureSample], target: TargetWeights
) -> None:
    drafter, packed = tiny_drafter(), pack(samples)
    drafted = target.drafted(drafter.target_ids)
    assert drafted.lm_head.shape[0] < target.lm_head.shape[0]
    stored = replace(packed, target_logz=log_normaliser(target, packed.last_hidden_states))
    for renormalise in (True, False):
        found, wanted = (sums_of(drafter, each, stored, renormalise) for each in (drafted, target))
        assert torch.equal(found.loss, wanted.loss)
        assert torch.equal(found.acceptance, wanted.acceptance)
        expected = gradients(drafter, wanted.loss)
        assert all(torch.equal(grad, expected[name]) for name, grad in gradients(drafter, found.loss).items())
    with pytest.raises(AssertionError, match=r"a normaliser is over 40 tokens, got a head of \d+"):
        sums_of(drafter, drafted, packed)


@pytest.mark.parametrize("renormalise", [True, False])
def test_head_gradient_is_that_of_finite_differences(
    renormalise: bool, samples: list[FeatureSample], target: TargetWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3.draft.head.CHUNK_ELEMENTS", {"cpu": 3 * STEPS * 12})  # 3 target rows at a time
    drafter, packed = tiny_drafter(dtype=torch.float64), pack(samples)
    steps = list(unroll(drafter, target.embed_tokens, packed, STEPS))
    pack_targets = _pack_targets(drafter, target, packed, renormalise)
    weights = DECAY ** torch.arange(STEPS, dtype=torch.float64)

    def loss(weight: Tensor, *normed: Tensor) -> Tensor:
        head = HeadSums(weight, weights, weight.dtype, "cross_entropy", with_gradient=True)
        scored = [
            pack_targets.scored(k, replace(step, normed=own))
            for k, (step, own) in enumerate(zip(steps, normed, strict=True))
        ]
        indices = [rows.index for rows in scored]
        cuts = chunks(packed.target_rows.numel(), indices, weight.shape[0], weight.device)
        list(head.score(pack_targets.targets, scored, cuts))
        return head.loss()

    inputs = [drafter.lm_head.weight, *(step.normed.detach().requires_grad_() for step in steps)]
    grads = torch.autograd.grad(loss(*inputs), inputs)
    for number, (tensor, grad) in enumerate(zip(inputs, grads, strict=True)):
        for seed in range(5):
            direction = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            ahead, behind = (
                loss(*inputs[:number], tensor + step * direction, *inputs[number + 1 :]) for step in (1e-5, -1e-5)
            )
            # The error of a central difference is of the order of the step squared.
            torch.testing.assert_close((ahead - behind) / 2e-5, (grad * direction).sum(), rtol=1e-7, atol=1e-7)


def test_gradients_are_handed_out_once(samples: list[FeatureSample], target: TargetWeights) -> None:
    """They are scaled in place, so a second backward must not come by with the wrong ones."""
    loss = sums_of(tiny_drafter(), target, pack(samples)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_chunks_do_not_change_the_sums(
    samples: list[FeatureSample], target: TargetWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, packed = tiny_drafter(), pack(samples)
    whole = sums_of(drafter, target, packed)
    expected = gradients(drafter, whole.loss)
    monkeypatch.setattr("eagle3.draft.head.CHUNK_ELEMENTS", {"cpu": 1})  # one target row at a time
    chunked = sums_of(drafter, target, packed)
    torch.testing.assert_close(chunked.loss, whole.loss)
    assert torch.equal(chunked.num_top1, whole.num_top1)
    torch.testing.assert_close(chunked.acceptance, whole.acceptance)
    for name, gradient in gradients(drafter, chunked.loss).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("cast", ["autocast", "weights"])
def test_bf16_is_near_fp32(cast: str, samples: list[FeatureSample], target: TargetWeights) -> None:
    """Autocast over fp32 parameters, and bf16 parameters as DeepSpeed has them."""
    packed = pack(samples)
    exact = sums_of(tiny_drafter(), target, packed)
    drafter = tiny_drafter(dtype=torch.bfloat16 if cast == "weights" else torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast == "autocast"):
        rough = sums_of(drafter, target, packed)
    torch.testing.assert_close(rough.loss, exact.loss, rtol=0.03, atol=0)  # some dozen roundings to 8 bits
    torch.testing.assert_close(rough.acceptance, exact.acceptance, rtol=0.05, atol=0)
    expected = gradients(tiny := tiny_drafter(), sums_of(tiny, target, packed).loss)
    for name, gradient in gradients(drafter, rough.loss).items():
        assert gradient.dtype == dict(drafter.named_parameters())[name].dtype
        angle = torch.cosine_similarity(gradient.float().flatten(), expected[name].flatten(), dim=0)
        assert angle > 0.99, (name, float(angle))


@NEEDS_GPU
def test_gpu_gives_the_sums_and_gradients_of_the_cpu(samples: list[FeatureSample], target: TargetWeights) -> None:
    drafter, packed = tiny_drafter(head_dim=8), pack(samples)
    expected = sums_of(drafter, target, packed)
    expected_gradients = gradients(drafter, expected.loss)
    drafter.cuda()
    sums = sums_of(drafter, target.to("cuda", torch.float32), packed.to("cuda"))
    for name in ("loss", "step_loss", "num_counted", "num_top1", "acceptance"):
        torch.testing.assert_close(getattr(sums, name).cpu(), getattr(expected, name), rtol=1e-5, atol=1e-5)
    for name, gradient in gradients(drafter, sums.loss).items():
        torch.testing.assert_close(gradient.cpu(), expected_gradients[name], rtol=1e-4, atol=1e-4, msg=name)


def test_no_tensor_of_tokens_by_vocabulary(
    make_sample: Callable[..., FeatureSample], target: TargetWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither (S, V), nor (S, W), nor (T, T), whatever the number of tokens."""
    monkeypatch.setattr("eagle3.draft.head.CHUNK_ELEMENTS", {"cpu": 1024})
    num_tokens = 1200
    sample = make_sample("long", [0] + [1] * (num_tokens - 1), hidden_size=16, vocab_size=40)
    sample = replace(sample, target_logz=torch.full((num_tokens - 1,), 5.0))
    drafter = tiny_drafter(draft_vocab_size=40, head_dim=4, intermediate_size=8)
    with _LargestRows(40) as seen:
        sums_of(drafter, target, pack([sample])).loss.backward()
    assert 0 < seen.rows <= 40, seen.rows  # the (W, D) and (V, D) tables have 40 rows themselves


class _LargestRows(TorchDispatchMode):
    """Notes the most rows of any tensor whose last dimension is the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size, self.rows = vocab_size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == self.vocab_size:
                self.rows = max(self.rows, value.shape[0])
        return result
