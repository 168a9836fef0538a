"""Losses and counts by a loop over rows and steps that shares no code with the objective."""

from dataclasses import dataclass

import torch
from draft_oracle import CachedDrafter
from torch import Tensor

from eagle3.draft.head import LossKind
from eagle3.draft.model import Eagle3Drafter
from eagle3.draft.target_weights import TargetWeights
from eagle3.features.record import FeatureSample


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
    *,
    ttt_steps: int,
    renormalise: bool,
    drop_rejected: bool = False,
    kind: LossKind = "cross_entropy",
) -> LoopSums:
    """Row by row, step by step, token by token, one document at a time."""
    sums = LoopSums([torch.zeros(()) for _ in range(ttt_steps)], [0] * ttt_steps, [0] * ttt_steps, [0.0] * ttt_steps)
    oracle = CachedDrafter(drafter, target.embed_tokens)
    target_ids = [int(offset) + i for i, offset in enumerate(drafter.d2t)]
    for sample in samples:
        mask = sample.loss_mask.tolist()
        for row in range(len(mask)):
            length = 0
            while row + 2 + length < len(mask) and all(mask[row + 1 : row + 3 + length]) and length < ttt_steps:
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
