"""The draft head: scores of its logits against the target's, and their gradient, chunk by chunk.

No (rows, W) tensor outlives its chunk, so gradients are made in the forward and handed out in the backward. The target
distribution may be renormalised over the W draft tokens for the loss; the acceptance never is (the mass outside is
lost to the drafter however good it is).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eagle3.draft.fusion import has_kernels

# Elements of one (rows, W) tensor. On two CPU cores (W 4,096), where about six exist at one time, 2**21 is fastest:
# larger blocks cost page faults. On a GPU there is one, in bf16, of 1 GiB: each chunk reads and writes the head's
# gradient once, so few large ones pay.
CHUNK_ELEMENTS = {"cpu": 2**21, "cuda": 2**29}
LossKind = Literal["cross_entropy", "kl", "tv", "lk"]
# lk: KL weighs exp(-3 * acceptance) in a row, 1 - acceptance the rest. Source: LK losses, arXiv 2602.23881 (its eta).
LK_DECAY = 3.0


@dataclass(frozen=True)
class Targets:
    """What rows are scored against, on the target's token axis S."""

    head: Tensor  # (W, D) the drafted rows of the target's head, in the compute dtype
    last: Tensor  # (S, D)
    logz: Tensor  # (S,) over V
    renormalise: bool
    token_ids: Tensor  # (W,) the target token of each draft token


@dataclass(frozen=True)
class ScoredRows:
    """The rows of one draft step."""

    step: int  # k
    normed: Tensor  # (R_k, D) the drafter's output after its final norm
    index: Tensor  # (R_k,) int64, ascending: which of S each row is scored against
    recorded: Tensor  # (R_k,) int64: the recorded token that each row predicts


@dataclass(frozen=True)
class Chunk:
    """Target rows start..end, and for each draft step the slice of its rows that are scored against them."""

    start: int
    end: int
    rows: list[slice]


def chunks(num_targets: int, indices: list[Tensor], draft_vocab_size: int, device: torch.device) -> list[Chunk]:
    """Cuts target rows so that up to `len(indices)` rows scored against each fill one (rows, W) tensor.

    `indices` say what each step's rows are scored against, ascending, on the CPU: their cuts are asked of no device.
    """
    size = max(1, CHUNK_ELEMENTS[device.type] // (len(indices) * draft_vocab_size))
    bounds = [*range(0, num_targets, size), num_targets]
    at = torch.tensor(bounds)
    cuts = torch.stack([torch.searchsorted(index, at) for index in indices], dim=1).tolist()  # (bounds, steps)
    return [
        Chunk(start, end, [slice(low, high) for low, high in zip(lows, highs, strict=True)])
        for (start, end), (lows, highs) in zip(pairwise(bounds), pairwise(cuts), strict=True)
        if lows != highs
    ]


class HeadSums:
    """Adds up the scores of rows, draft steps apart, and their gradient."""

    def __init__(
        self,
        weight: Tensor,  # (W, D) of the draft head
        step_weights: Tensor,  # (K,) fp64: what each draft step weighs in the loss
        dtype: torch.dtype,  # of the head's products
        kind: LossKind,
        *,
        with_gradient: bool,
    ) -> None:
        num_steps = step_weights.numel()
        self._weight = weight
        self._draft_head = weight.detach().to(dtype)
        self._step_weights = step_weights
        self._kind = kind
        self._grad_weight = torch.zeros_like(weight, dtype=_wide_dtype(weight.dtype)) if with_gradient else None
        self._normed: list[Tensor] = []
        self._grad_normed: list[Tensor] = []
        # (3, K): loss, rows whose choice is the recorded token, acceptance (1 - TV against all of V)
        self.sums = torch.zeros(3, num_steps, dtype=torch.float64, device=weight.device)

    @torch.no_grad()
    def score(self, targets: Targets, steps: list[ScoredRows], chunks: list[Chunk]) -> Iterator[Tensor]:
        """Scores the rows of successive draft steps.

        Yields the choice of each row of a chunk, a draft token, step after step. What the caller does with it is done
        on the device before the chunk's gradients are.
        """
        columns = slice(steps[0].step, steps[-1].step + 1)
        grads = [] if self._grad_weight is None else [torch.empty_like(step.normed) for step in steps]
        self._normed += [step.normed for step in steps]
        self._grad_normed += grads
        for chunk in chunks:
            parts = list(zip(steps, chunk.rows, strict=True))
            sizes = [rows.stop - rows.start for rows in chunk.rows]
            hidden = torch.cat([step.normed[rows] for step, rows in parts]).to(self._draft_head.dtype)  # (N, D)
            at = torch.cat([step.index[rows] for step, rows in parts]) - chunk.start  # (N,)
            recorded = torch.cat([step.recorded[rows] for step, rows in parts])
            target_logits = targets.last[chunk.start : chunk.end].to(self._draft_head.dtype) @ targets.head.T  # (n, W)
            target_lse = _log_sum_exp(target_logits)  # (n,)
            share = (target_lse - targets.logz[chunk.start : chunk.end]).exp()  # (n,) of the target's whole mass
            # What the target distribution sums to.
            mass = torch.ones_like(share)[at] if targets.renormalise else share[at]  # (N,)
            grad_scale = None
            if self._grad_weight is not None:
                step_weights = zip(self._step_weights[columns].to(mass), sizes, strict=True)
                grad_scale = torch.cat([weight.expand(size) for weight, size in step_weights])
            scores = _score_rows(
                hidden @ self._draft_head.T, target_logits, target_lse, share, at, mass, grad_scale, self._kind
            )
            right = (targets.token_ids[scores.choice] == recorded).to(mass)
            rows_of = torch.stack([scores.loss, right, scores.acceptance])  # (3, N)
            self.sums[:, columns] += torch.stack(
                [part.sum(-1, dtype=torch.float64) for part in rows_of.split(sizes, dim=1)], dim=1
            )
            yield scores.choice
            if self._grad_weight is not None:
                _add_product(self._grad_weight, scores.grad_logits.T, hidden)
                grad_hidden = (scores.grad_logits @ self._draft_head).split(sizes)
                for grad, rows, part in zip(grads, chunk.rows, grad_hidden, strict=True):
                    grad[rows] = part.to(grad.dtype)
            del scores  # or a chunk's logits would be there beside the next one's

    def loss(self) -> Tensor:
        """Returns the weighted sum of the steps' losses, () fp64, with the gradients that were made on the way."""
        loss = (self._step_weights * self.sums[0]).sum()
        if self._grad_weight is None:
            return loss
        grads = (self._grad_weight.to(self._weight.dtype), *self._grad_normed)
        known: Tensor = _KnownGradients.apply(loss, grads, self._weight, *self._normed)
        return known


class _KnownGradients(torch.autograd.Function):
    """A value whose gradients are there already."""

    @staticmethod
    def forward(
        ctx: Any,  # torch leaves it untyped: it holds whatever is put there
        value: Tensor,  # ()
        grads: tuple[Tensor, ...],
        *inputs: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*grads)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_value: Tensor) -> tuple[Tensor | None, ...]:
        # In place, for they are as large as the activations; autograd refuses a second backward then.
        return (None, None, *(grad.mul_(grad_value) for grad in ctx.saved_tensors))


@dataclass(frozen=True)
class _RowScores:
    """What N rows of draft logits are worth."""

    loss: Tensor  # (N,)
    acceptance: Tensor  # (N,) 1 - TV against the target over V
    choice: Tensor  # (N,) int64, the first choice among the draft tokens
    grad_logits: Tensor  # (N, W) scaled; meaningless where no scale was given


def _score_rows(
    logits: Tensor,  # (N, W), may be overwritten
    target_logits: Tensor,  # (n, W)
    target_lse: Tensor,  # (n,)
    share: Tensor,  # (n,)
    at: Tensor,  # (N,) which target row each row is scored against
    mass: Tensor,  # (N,) what the target distribution of cross-entropy and KL sums to
    grad_scale: Tensor | None,  # (N,) what each row's gradient is multiplied by
    kind: LossKind,
) -> _RowScores:
    if has_kernels(logits):
        loss, acceptance, choice = _kernels().score_rows(
            logits, target_logits, target_lse, share, at, mass, grad_scale, kind, LK_DECAY
        )
        return _RowScores(loss, acceptance, choice, grad_logits=logits)
    target_log_probs = _wide(target_logits) - target_lse[:, None]  # (n, W)
    target_probs = target_log_probs.exp()  # once for all rows that are scored against it
    probs = target_probs[at]  # (N, W)
    wide = _wide(logits)  # (N, W)
    drafted = wide.softmax(-1)
    served = probs * share[at][:, None]
    acceptance = torch.minimum(served, drafted).sum(-1)
    loss = mass * (wide.logsumexp(-1) - (probs * wide).sum(-1))
    divergence_weight = torch.ones_like(loss)  # of cross-entropy or KL; the rest is 1 - acceptance's
    if kind != "cross_entropy":
        divergence_weight = _divergence_weight(kind, acceptance)
        negative_entropy = (target_probs * target_log_probs).nan_to_num(nan=0.0).sum(-1)  # (n,)
        kl = loss + mass * negative_entropy[at]
        loss = divergence_weight * kl + (1 - divergence_weight) * (1 - acceptance)
    choice = wide.argmax(-1)
    if grad_scale is None:
        return _RowScores(loss, acceptance, choice, logits)
    grad_of_tv: Tensor | None = None
    if kind in ("tv", "lk"):
        is_below = drafted < served
        pull = (drafted * is_below).sum(-1, keepdim=True)  # (N, 1) what moves a row's drafted mass to where it lacks
        grad_of_tv = drafted * (pull - is_below.to(drafted)) * ((1 - divergence_weight) * grad_scale)[:, None]
    grad = drafted.sub_(probs).mul_((mass * divergence_weight * grad_scale)[:, None])
    if grad_of_tv is not None:
        grad += grad_of_tv
    return _RowScores(loss, acceptance, choice, grad.to(logits.dtype))


def _divergence_weight(kind: LossKind, acceptance: Tensor) -> Tensor:  # (N,) -> (N,)
    """Returns what KL weighs in each row; no gradient passes through it."""
    if kind == "lk":
        return (-LK_DECAY * acceptance).exp()
    return torch.full_like(acceptance, 0.0 if kind == "tv" else 1.0)


def _log_sum_exp(logits: Tensor) -> Tensor:  # (n, W) -> (n,) fp32 or wider
    if has_kernels(logits):
        lse: Tensor = _kernels().log_sum_exp(logits)
        return lse
    return _wide(logits).logsumexp(-1)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds `left @ right` to `total`, which may be wider."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:  # the CPU has no such product
        total += left @ right


def _kernels() -> ModuleType:
    # triton comes with the CUDA builds of torch alone.
    from eagle3.draft import score_kernels

    return score_kernels


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _wide(tensor: Tensor) -> Tensor:
    """Widens bf16 and fp16 to fp32: sums over a vocabulary are not taken in less."""
    return tensor.to(_wide_dtype(tensor.dtype))
