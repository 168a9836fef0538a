"""The draft head's gradient is that of its sums, chunks change neither, and no tensor is tokens by vocabulary."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from draft_oracle import tiny_drafter
from tiny_objective import DECAY, NEEDS_GPU, STEPS, gradients, masked_samples, random_target, sums_of, with_normalisers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagle3.draft.head import HeadSums, chunks
from eagle3.draft.objective import _pack_targets
from eagle3.draft.target_weights import TargetWeights
from eagle3.draft.ttt import pack, unroll
from eagle3.features.record import FeatureSample


@pytest.fixture(scope="module")
def samples() -> list[FeatureSample]:
    return masked_samples()


@pytest.fixture(scope="module")
def target() -> TargetWeights:
    return random_target()


@pytest.mark.parametrize("renormalise", [True, False])
def test_head_gradient_is_that_of_finite_differences(
    renormalise: bool, samples: list[FeatureSample], target: TargetWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3.draft.head.CHUNK_ELEMENTS", {"cpu": 3 * STEPS * 12})  # 3 target rows at a time
    drafter, packed = tiny_drafter(dtype=torch.float64), with_normalisers(pack(samples), target)
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


@pytest.mark.parametrize("draft_vocab_size", [100, 128])
@pytest.mark.parametrize("has_logz", [True, False])
def test_no_tensor_of_tokens_by_vocabulary(
    has_logz: bool, draft_vocab_size: int, make_sample: Callable[..., FeatureSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither (S, V), nor (S, W), nor their transposes, whatever the number of tokens; nor a flat one as large."""
    monkeypatch.setattr("eagle3.draft.head.CHUNK_ELEMENTS", {"cpu": 2048})
    monkeypatch.setattr("eagle3.draft.target_weights.LOGITS_PER_CHUNK", 2048)
    num_tokens, vocab_size = 600, 128
    sample = make_sample("long", [0] + [1] * (num_tokens - 1), hidden_size=16, vocab_size=vocab_size)
    if has_logz:
        sample = replace(sample, target_logz=torch.full((num_tokens - 1,), 5.0))
    drafter = tiny_drafter(vocab_size=vocab_size, draft_vocab_size=draft_vocab_size, head_dim=4, intermediate_size=8)
    target = TargetWeights(torch.randn(vocab_size, 16), torch.randn(vocab_size, 16), torch.ones(16), rms_norm_eps=1e-5)
    with _LargestTensors((vocab_size, draft_vocab_size)) as seen:
        sums_of(drafter, target, pack([sample])).loss.backward()
    assert 0 < seen.rows <= 2048 // draft_vocab_size, seen.rows
    assert seen.elements <= num_tokens * 48, seen.elements  # the captured states have T x 48, less than half of T x V


class _LargestTensors(TorchDispatchMode):
    """Notes the elements of the largest tensor, and the most rows of one with a vocabulary among its dimensions."""

    def __init__(self, vocab_sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.vocab_sizes, self.rows, self.elements = vocab_sizes, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
                self.rows = max([self.rows, *(value.numel() // n for n in self.vocab_sizes if n in value.shape)])
        return result
