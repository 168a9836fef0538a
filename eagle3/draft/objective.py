"""Losses and counts.

Sums and counts leave here undivided: the caller adds them over micro-steps and ranks and divides once. What is easy to
get wrong: the loss may renormalise the target over the W draft tokens, the acceptance never does (the mass outside is
lost to the drafter however good it is).
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eagle3.draft.model import Eagle3Drafter
from eagle3.draft.target_weights import TargetWeights, log_normaliser
from eagle3.draft.ttt import DraftStep, PackedSequences, unroll

# Elements of one (rows, W) tensor. On two CPU cores (W 4,096), where about six exist at one time, 2**21 is fastest:
# larger blocks cost page faults. On a GPU there is one, in bf16; 8,192 rows at W 32,000 fill the matrix units.
CHUNK_ELEMENTS = {"cpu": 2**21, "cuda": 2**28}


@dataclass(frozen=True)
class TTTSums:
    """Sums over the counted rows of one pack, each step apart; only `loss` carries a gradient."""

    loss: Tensor  # () fp64: sum over k of weight_k * cross_entropy_k, not divided by anything
    cross_entropy: Tensor  # (K,) fp64, nats
    num_counted: Tensor  # (K,) fp64
    num_top1: Tensor  # (K,) fp64: the drafter's first choice is the recorded token (of a greedy target, its argmax)
    acceptance: Tensor  # (K,) fp64: sum of 1 - TV(target over V, drafter)


def ttt_sums(
    drafter: Eagle3Drafter,
    target: TargetWeights,
    packed: PackedSequences,
    *,
    ttt_steps: int,
    ttt_decay: float,
    renormalise: bool,  # True: target softmax over the W draft tokens; False: exp(z - logZ over V), the rest lost
    step_weights: Tensor | None = None,  # (K,) in place of ttt_decay ** k
) -> TTTSums:
    """Unrolls the drafter and scores every counted row with soft cross-entropy against the target.

    A pack without counted rows gives zeros, and a loss that still reaches every parameter, so that ranks with and
    without work run the same collectives.
    """
    steps = list(unroll(drafter, target.embed_tokens, packed, ttt_steps))
    num_counted = torch.tensor(
        [step.rows.numel() for step in steps], dtype=torch.float64, device=packed.input_ids.device
    )
    if steps[0].rows.numel() == 0:
        zeros = torch.zeros_like(num_counted)
        nothing = sum((_wide(parameter).sum() for parameter in drafter.parameters()), start=zeros.new_zeros(())) * 0.0
        return TTTSums(loss=nothing, cross_entropy=zeros, num_counted=zeros, num_top1=zeros, acceptance=zeros)
    if step_weights is None:
        step_weights = ttt_decay ** torch.arange(ttt_steps, dtype=torch.float64)
    targets = _targets(drafter, target, packed, steps, renormalise)
    normed = [drafter.norm(step.hidden) for step in steps]  # K of (R_k, D)
    loss, sums = _HeadLoss.apply(
        drafter.lm_head.weight, targets, step_weights.to(num_counted), torch.is_grad_enabled(), *normed
    )
    return TTTSums(loss=loss, cross_entropy=sums[0], num_counted=num_counted, num_top1=sums[1], acceptance=sums[2])


@dataclass(frozen=True)
class _Targets:
    """What the counted rows are scored against, on the target's token axis S."""

    head: Tensor  # (W, D) the drafted rows of the target's head, in the compute dtype
    last: Tensor  # (S, D)
    logz: Tensor  # (S,) over V
    renormalise: bool
    indices: tuple[Tensor, ...]  # K of (R_k,), ascending: which of S each row is scored against
    recorded: tuple[Tensor, ...]  # K of (R_k,): the recorded token that each row predicts
    token_ids: Tensor  # (W,) the target token of each draft token

    def logits(self, start: int, end: int) -> Tensor:  # (n, W)
        """Returns the target's logits on the draft vocabulary at target rows start..end."""
        return self.last[start:end].to(self.head.dtype) @ self.head.T


def _targets(
    drafter: Eagle3Drafter, target: TargetWeights, packed: PackedSequences, steps: list[DraftStep], renormalise: bool
) -> _Targets:
    token_ids = drafter.target_ids
    logz = packed.target_logz
    return _Targets(
        head=target.lm_head[token_ids].to(drafter.compute_dtype()),
        last=packed.last_hidden_states,
        logz=log_normaliser(target, packed.last_hidden_states) if logz is None else logz,
        renormalise=renormalise,
        indices=tuple(torch.searchsorted(packed.target_rows, step.rows + 1 + k) for k, step in enumerate(steps)),
        recorded=tuple(packed.input_ids[step.rows + 2 + k] for k, step in enumerate(steps)),
        token_ids=token_ids,
    )


class _HeadLoss(torch.autograd.Function):
    """Draft head, soft cross-entropy and its gradient by chunks: no (rows, W) tensor outlives its chunk.

    Rows are taken by the target token they are scored against, since up to K of them share its distribution.
    """

    @staticmethod
    def forward(
        ctx: Any,  # torch leaves it untyped: it holds whatever is put there
        weight: Tensor,  # (W, D)
        targets: _Targets,
        step_weights: Tensor,  # (K,) fp64
        with_gradient: bool,
        *normed: Tensor,  # K of (R_k, D) the drafter's output after its final norm
    ) -> tuple[Tensor, Tensor]:  # loss (), sums (3, K): cross-entropy, top-1, acceptance
        draft_head = weight.to(targets.head.dtype)
        grad_weight = torch.zeros_like(weight, dtype=_wide_dtype(weight.dtype)) if with_gradient else None
        grad_normed = [torch.zeros_like(hidden) for hidden in normed] if with_gradient else []
        sums = torch.zeros(3, len(normed), dtype=torch.float64, device=weight.device)
        for chunk in _chunks(targets, len(normed), weight.shape[0]):
            hidden = torch.cat([hidden[rows] for hidden, rows in zip(normed, chunk.rows, strict=True)]).to(
                draft_head.dtype
            )
            of_chunk = torch.cat([index[rows] for index, rows in zip(targets.indices, chunk.rows, strict=True)])
            recorded = torch.cat([token[rows] for token, rows in zip(targets.recorded, chunk.rows, strict=True)])
            sizes = [rows.stop - rows.start for rows in chunk.rows]
            target_logits = targets.logits(chunk.start, chunk.end)  # (n, W)
            target_lse = _wide(target_logits).logsumexp(-1)  # (n,)
            share = (target_lse - targets.logz[chunk.start : chunk.end]).exp()  # (n,) of the target's whole mass
            at = of_chunk - chunk.start
            # What the target distribution sums to.
            mass = torch.ones_like(share)[at] if targets.renormalise else share[at]  # (N,)
            row_weights = torch.cat([w.expand(size) for w, size in zip(step_weights, sizes, strict=True)]).to(mass)
            grad_scale = mass * row_weights if with_gradient else None
            scores = _score_rows(hidden @ draft_head.T, target_logits, target_lse, share, at, grad_scale)
            top1 = targets.token_ids[scores.choice] == recorded
            rows_of = torch.stack([scores.cross_entropy * mass, top1.to(mass), scores.acceptance])  # (3, N)
            sums += torch.stack([part.sum(-1, dtype=torch.float64) for part in rows_of.split(sizes, dim=1)], dim=1)
            if grad_weight is not None:
                grad_weight += scores.grad_logits.T @ hidden
                grads = (scores.grad_logits @ draft_head).split(sizes)
                for grad, rows, part in zip(grad_normed, chunk.rows, grads, strict=True):
                    grad[rows] = part.to(grad.dtype)
        if grad_weight is not None:
            ctx.save_for_backward(grad_weight.to(weight.dtype), *grad_normed)
        ctx.mark_non_differentiable(sums)
        return (step_weights * sums[0]).sum(), sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_weight, *grad_normed = ((grad * grad_loss).to(grad.dtype) for grad in ctx.saved_tensors)
        return grad_weight, None, None, None, *grad_normed


@dataclass(frozen=True)
class _RowScores:
    """What N rows of draft logits are worth."""

    cross_entropy: Tensor  # (N,) against the target's softmax over W
    acceptance: Tensor  # (N,) 1 - TV against the target over V
    choice: Tensor  # (N,) int64, the first choice among the draft tokens
    grad_logits: Tensor  # (N, W) scaled; meaningless where no scale was given


def _score_rows(
    logits: Tensor,  # (N, W), may be overwritten
    target_logits: Tensor,  # (n, W)
    target_lse: Tensor,  # (n,)
    share: Tensor,  # (n,)
    at: Tensor,  # (N,) which target row each row is scored against
    grad_scale: Tensor | None,  # (N,) what each row's gradient is multiplied by
) -> _RowScores:
    if logits.is_cuda:
        # triton comes with the CUDA builds of torch alone.
        from eagle3.draft import kernels

        scores = kernels.score_rows(logits, target_logits, target_lse, share, at, grad_scale)
        return _RowScores(*scores, grad_logits=logits)
    probs = (_wide(target_logits) - target_lse[:, None]).exp()[at]  # (N, W)
    wide = _wide(logits)  # (N, W)
    drafted = wide.softmax(-1)
    cross_entropy = wide.logsumexp(-1) - (probs * wide).sum(-1)
    acceptance = torch.minimum(probs * share[at][:, None], drafted).sum(-1)
    choice = wide.argmax(-1)
    if grad_scale is not None:
        drafted.sub_(probs).mul_(grad_scale[:, None])
    return _RowScores(cross_entropy, acceptance, choice, drafted.to(logits.dtype))


@dataclass(frozen=True)
class _Chunk:
    """Target rows start..end, and for each step the slice of its rows that are scored against them."""

    start: int
    end: int
    rows: list[slice]


def _chunks(targets: _Targets, num_steps: int, draft_vocab_size: int) -> list[_Chunk]:
    num_targets = targets.last.shape[0]
    elements = CHUNK_ELEMENTS[targets.last.device.type]
    size = max(1, elements // (num_steps * draft_vocab_size))  # target rows, each with up to K drafted ones
    bounds = [*range(0, num_targets, size), num_targets]
    at = torch.tensor(bounds, device=targets.last.device)
    cuts = torch.stack([torch.searchsorted(index, at) for index in targets.indices], dim=1).tolist()  # (bounds, K)
    chunks = []
    for (start, end), (lows, highs) in zip(pairwise(bounds), pairwise(cuts), strict=True):
        if lows != highs:
            chunks.append(_Chunk(start, end, [slice(low, high) for low, high in zip(lows, highs, strict=True)]))
    return chunks


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _wide(tensor: Tensor) -> Tensor:
    """Widens bf16 and fp16 to fp32: sums over a vocabulary are not taken in less."""
    return tensor.to(_wide_dtype(tensor.dtype))
