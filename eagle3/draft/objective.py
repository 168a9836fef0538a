"""Losses and counts.

Sums and counts leave here undivided: the caller adds them over micro-steps and ranks and divides once. What is easy to
get wrong: at step k row t is scored against the target of token t+1+k, and a pack without counted rows must still
reach every parameter.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle3.draft.head import HeadSums, LossKind, ScoredRows, Targets, chunks
from eagle3.draft.model import Eagle3Drafter
from eagle3.draft.target_weights import TargetWeights
from eagle3.draft.ttt import Chains, DraftStep, PackedSequences, unroll


@dataclass(frozen=True)
class TTTSums:
    """Sums over the counted rows of one pack, each step apart; only `loss` carries a gradient."""

    loss: Tensor  # () fp64: sum over k of weight_k * step_loss_k, not divided by anything
    step_loss: Tensor  # (K,) fp64, of each step; nats, or for `tv` the rejected share
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
    kind: LossKind = "cross_entropy",
    drop_rejected: bool = False,  # a row leaves after the first step whose choice is not the recorded token
    step_weights: Tensor | None = None,  # (K,) in place of ttt_decay ** k
    num_recomputed: int = 0,  # of the first steps, whose gate and up are made again in the backward
) -> TTTSums:
    """Unrolls the drafter and scores every counted row against the target, whose normalisers the pack brings.

    With `drop_rejected` all sums are over the rows that are left: the loss is that of weights of zero for the others.
    A pack without counted rows gives zeros, and a loss that still reaches every parameter, so that ranks with and
    without work run the same collectives.
    """
    device = packed.input_ids.device
    counted = packed.counted(ttt_steps)  # on the CPU
    if counted[0].numel() == 0:
        zeros = torch.zeros(ttt_steps, dtype=torch.float64, device=device)
        nothing = sum(
            (parameter.sum(dtype=torch.float64) for parameter in drafter.parameters()), start=zeros.new_zeros(())
        )
        nothing = nothing * 0.0
        return TTTSums(loss=nothing, step_loss=zeros, num_counted=zeros, num_top1=zeros, acceptance=zeros)
    if step_weights is None:
        step_weights = ttt_decay ** torch.arange(ttt_steps, dtype=torch.float64)
    # What lies on the CPU is copied now, before there is work that the copy would wait for.
    head = HeadSums(
        drafter.lm_head.weight,
        step_weights.to(device, torch.float64),
        drafter.compute_dtype(),
        kind,
        with_gradient=torch.is_grad_enabled(),
    )
    pack_targets = _pack_targets(drafter, target, packed, renormalise)
    if drop_rejected:
        num_steps = packed.steps_per_row(ttt_steps).to(device)
        chains = Chains(drafter, target.embed_tokens, packed, ttt_steps, num_recomputed=num_recomputed)
        num_counted = _score_survivors(head, pack_targets, chains, counted[0].to(device), num_steps)
    else:
        steps = list(unroll(drafter, target.embed_tokens, packed, ttt_steps, num_recomputed=num_recomputed))
        num_counted = _score_all(head, pack_targets, steps, counted)
    loss = head.loss()
    return TTTSums(
        loss=loss,
        step_loss=head.sums[0],
        num_counted=torch.tensor(num_counted, dtype=torch.float64).to(device, non_blocking=True),
        num_top1=head.sums[1],
        acceptance=head.sums[2],
    )


@dataclass(frozen=True)
class _PackTargets:
    """What the rows of a pack are scored against."""

    targets: Targets
    rows_on_cpu: Tensor  # (S,) int64, ascending: the token of each target row
    rows: Tensor  # (S,) the same on the device
    input_ids: Tensor  # (T,)

    def scored(self, number: int, step: DraftStep) -> ScoredRows:
        """Says what the rows of draft step `number` are scored against."""
        return ScoredRows(
            step=number,
            normed=step.normed,
            index=torch.searchsorted(self.rows, step.rows + 1 + number),
            recorded=self.input_ids[step.rows + 2 + number],
        )


def _pack_targets(
    drafter: Eagle3Drafter, target: TargetWeights, packed: PackedSequences, renormalise: bool
) -> _PackTargets:
    token_ids = drafter.target_ids
    num_rows, logz = packed.last_hidden_states.shape[0], packed.target_logz
    assert logz is not None, f"{num_rows} last states must come with their log-normalisers, got none"
    targets = Targets(
        head=target.drafted(token_ids).lm_head.to(drafter.compute_dtype()),
        last=packed.last_hidden_states,
        logz=logz,
        renormalise=renormalise,
        token_ids=token_ids,
    )
    return _PackTargets(targets, packed.target_rows, packed.target_rows.to(packed.input_ids.device), packed.input_ids)


def _score_all(
    head: HeadSums, pack_targets: _PackTargets, steps: list[DraftStep], counted: list[Tensor]
) -> list[int]:  # rows of each step
    """Scores all draft steps together, by the target token that rows share, so that its logits are made once."""
    targets = pack_targets.targets
    indices = [torch.searchsorted(pack_targets.rows_on_cpu, rows + 1 + k) for k, rows in enumerate(counted)]
    cuts = chunks(targets.last.shape[0], indices, targets.head.shape[0], targets.last.device)
    for _ in head.score(targets, [pack_targets.scored(k, step) for k, step in enumerate(steps)], cuts):
        pass
    return [rows.numel() for rows in counted]


def _score_survivors(
    head: HeadSums,
    pack_targets: _PackTargets,
    chains: Chains,
    rows: Tensor,  # (R_0,) tokens, ascending, on the device
    num_steps: Tensor,  # (T,) at how many steps each row is counted, on the device
) -> list[int]:  # rows of each step
    """Scores one draft step after the other, each at the rows (R_k,) that have been right so far."""
    targets = pack_targets.targets
    num_rows = [0] * head.sums.shape[1]
    for number in range(len(num_rows)):
        if rows.numel() == 0:
            break
        num_rows[number] = rows.numel()
        scored = pack_targets.scored(number, chains.advance(rows))
        own = replace(targets, last=targets.last[scored.index], logz=targets.logz[scored.index])
        scored = replace(scored, index=torch.arange(rows.numel(), device=rows.device))
        cuts = chunks(rows.numel(), [torch.arange(rows.numel())], targets.head.shape[0], rows.device)
        choices: list[Tensor] = []
        for choice in head.score(own, [scored], cuts):
            choices.append(choice)
            if len(choices) == len(cuts):
                right = _is_right(targets.token_ids[torch.cat(choices)], scored.recorded)
                survivors = _Survivors(rows, right & (num_steps[rows] > number + 1))
        rows = survivors.get()
    return num_rows


def _is_right(chosen: Tensor, recorded: Tensor) -> Tensor:  # (R_k,) tokens each -> (R_k,) bool
    """Tells which rows chose the recorded token."""
    return chosen == recorded


class _Survivors:
    """The rows that a mask keeps, counted on the device while it has other work.

    Made before the last gradients of the head and asked for after them, it lets the device run on.
    """

    def __init__(self, rows: Tensor, kept: Tensor) -> None:  # (R,) tokens, (R,) bool
        self._rows = rows[kept.logical_not().argsort(stable=True)]  # those kept come first, in their order
        self._count = kept.sum().to("cpu", non_blocking=True)
        self._counted = torch.cuda.Event() if rows.is_cuda else None
        if self._counted is not None:
            self._counted.record()

    def get(self) -> Tensor:  # (survivors,) tokens, ascending
        """Returns the rows that are left."""
        if self._counted is not None:
            self._counted.synchronize()
        return self._rows[: int(self._count)]
