"""One optimizer step over micro-batches and ranks.

The loss is a sum over counted rows divided by a count over the whole step, so the result does not depend on how the
samples were split: one large batch, four micro-steps and two ranks take the same step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.config import ObjectiveConfig, OptimizerConfig, UserError
from eagle3.draft.ttt import PackedSequences
from eagle3.training.batches import StepBatch
from eagle3.training.distributed import reduce_sum
from eagle3.training.engine import Engine
from eagle3.training.faults import out_of_memory_message
from eagle3.training.packs import on_device
from eagle3.training.timing import Mark, StepMarks


@dataclass(frozen=True)
class MetricSums:
    """Sums over counted rows, each draft step apart, over all ranks; divided when they are printed."""

    step_loss: Tensor  # (K,) fp64
    num_counted: Tensor  # (K,) fp64
    num_top1: Tensor  # (K,) fp64
    acceptance: Tensor  # (K,) fp64

    def __add__(self, other: "MetricSums") -> "MetricSums":
        return MetricSums(
            self.step_loss + other.step_loss,
            self.num_counted + other.num_counted,
            self.num_top1 + other.num_top1,
            self.acceptance + other.acceptance,
        )

    def loss(self, objective: ObjectiveConfig) -> float:
        """Returns the objective of all these rows together."""
        return float((loss_weights(objective, self.num_counted) * self.step_loss).sum())

    def per_position(self) -> dict[str, list[float]]:
        """Returns top-1 agreement and acceptance (1 - TV) at each draft step, averaged over its counted rows."""
        counts = self.num_counted.clamp(min=1)
        return {"top1": (self.num_top1 / counts).tolist(), "acceptance": (self.acceptance / counts).tolist()}


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    sums: MetricSums
    grad_norm: float  # before clipping
    stop_requested: bool  # by any rank
    num_attended: float  # step-0 keys that rows saw, added up over rows, draft steps and ranks
    marks: StepMarks  # of this rank


def loss_weights(objective: ObjectiveConfig, num_counted: Tensor) -> Tensor:  # (K,) -> (K,)
    """Returns what each draft step's summed cross-entropy is multiplied by: decay ** k / N0, or / its own count."""
    decay = objective.ttt_decay ** torch.arange(objective.ttt_steps, dtype=torch.float64, device=num_counted.device)
    if objective.count == "step0":
        return decay / num_counted[0].clamp(min=1)  # none, if no sample of a step has states
    return torch.where(num_counted > 0, decay / num_counted.clamp(min=1), 0)


def learning_rate_at(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """Returns the rate of optimizer step 1..num_steps: linear warm-up, then a cosine down to the minimum."""
    num_warmup = round(num_steps * config.warmup_ratio)
    if step <= num_warmup:
        return config.learning_rate * step / num_warmup
    progress = (step - num_warmup) / max(1, num_steps - num_warmup)
    ratio = config.min_learning_rate_ratio
    return config.learning_rate * (ratio + (1 - ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


def take_step(
    engine: Engine, batch: StepBatch, *, learning_rate: float, batch_tokens: int = 0, stop_requested: bool = False
) -> StepResult:
    """Forward and backward over this rank's micro-batches, then one update.

    `batch_tokens` is the size that they were made for, which is named if one does not fit.

    Raises:
        FloatingPointError: loss or gradient is not finite; the weights are as they were before the step.
        UserError: a micro-batch does not fit the GPU's memory; the other ranks wait for this one.
    """
    objective, device, size = engine.module.objective, engine.world.device, engine.world.size
    real = [pack for pack in batch.packs[: len(batch.packs) - batch.has_filler] if not pack.is_blank]
    tokens = [pack.tokens for pack in real]
    own = [count(tokens, objective.ttt_steps) for count in (count_rows, count_attended)]
    num_counted, num_attended = reduce_sum(torch.cat(own).to(device)).chunk(2)  # (K,) each
    met = Mark(device)
    # Both wrappers average gradients over the ranks; the factor makes that a sum.
    step_weights = loss_weights(objective, num_counted) * size

    losses, sums, forward_done = _run_micro_batches(engine, batch, step_weights, batch_tokens)
    backward_done = Mark(device)

    engine.at("sums")
    # One collective and one wait for the device: sums, losses and whether somebody was asked to stop.
    flag = torch.tensor([float(stop_requested)], dtype=torch.float64, device=device)
    summed = reduce_sum(torch.cat([sums.flatten(), losses.flatten(), flag]))
    # Rows leave wherever they are: those that stayed are taken to see as many keys as the others would have.
    share_left = summed[: sums.numel()].view_as(sums)[1] / num_counted.clamp(min=1)  # (K,); all are 1 if none leaves
    total = torch.cat([summed, (num_attended * share_left).sum()[None]]).cpu()
    check_losses(total[sums.numel() : -2].tolist(), batch.sample_ids)
    engine.at("update")
    try:
        grad_norm = engine.update(learning_rate)
    except torch.OutOfMemoryError as error:
        raise UserError(f"the optimizer's state must fit the GPU, got {error}; use run.deepspeed=zero2") from None
    if not math.isfinite(grad_norm):
        raise FloatingPointError(
            f"the gradient must be finite, got a norm of {grad_norm} though every loss is; no update was made "
            f"(samples {', '.join(repr(name) for members in batch.sample_ids for name in members)})"
        )
    marks = StepMarks(met, forward_done, engine.own_done, backward_done, update_done=Mark(device))
    metrics = MetricSums(*total[: sums.numel()].view_as(sums))
    return StepResult(metrics, grad_norm, bool(total[-2] > 0), float(total[-1]), marks)


def _run_micro_batches(
    engine: Engine, batch: StepBatch, step_weights: Tensor, batch_tokens: int
) -> tuple[Tensor, Tensor, Mark]:
    """Runs forward and backward; returns losses (packs, ranks), zero for other ranks, sums (4, K), the last forward."""
    device, num_real = engine.world.device, len(batch.packs) - batch.has_filler
    losses = torch.zeros(len(batch.packs), engine.world.size, dtype=torch.float64, device=device)
    sums = torch.zeros(4, step_weights.numel(), dtype=torch.float64, device=device)
    index = 0
    try:
        for index, packed in enumerate(on_device(batch.packs, device)):
            with engine.accumulating(is_last=index == len(batch.packs) - 1):
                engine.at(f"forward of micro-batch {index + 1}")
                is_real = index < num_real and not batch.packs[index].is_blank
                loss, pack_sums = engine.model(packed, step_weights if is_real else 0 * step_weights)
                forward_done = Mark(device)
                engine.at(f"backward of micro-batch {index + 1}")
                engine.backward(loss)
            if is_real:
                losses[index, engine.world.rank] = loss.detach()
                sums += pack_sums
    except torch.OutOfMemoryError as error:
        plan = engine.module.memory_plan
        raise UserError(out_of_memory_message(batch.packs[index], plan, batch_tokens, str(error))) from None
    return losses, sums, forward_done


def count_rows(packs: Sequence[PackedSequences], ttt_steps: int) -> Tensor:  # (K,) fp64
    """Returns how many rows the packs count at each draft step."""
    counts = torch.zeros(ttt_steps, dtype=torch.float64)
    for packed in packs:
        counts += torch.tensor([rows.numel() for rows in packed.counted(ttt_steps)], dtype=torch.float64)
    return counts


def count_attended(packs: Sequence[PackedSequences], ttt_steps: int) -> Tensor:  # (K,) fp64
    """Returns how many step-0 keys the packs' rows see at each draft step, added up over rows."""
    counts = torch.zeros(ttt_steps, dtype=torch.float64)
    for packed in packs:
        keys = packed.positions.cpu().double() + 1  # (T,) that a row sees
        # (K + 1,) of the rows that are counted at 0..K steps, then of those at so many or more.
        by_steps = torch.bincount(packed.steps_per_row(ttt_steps), weights=keys, minlength=ttt_steps + 1)
        counts += by_steps.flip(0).cumsum(0).flip(0)[1:]
    return counts


def check_losses(losses: list[float], sample_ids: list[list[str]]) -> None:
    """Names the samples of every pack whose loss is not finite.

    Raises:
        FloatingPointError: there are some.
    """
    bad = [index for index, loss in enumerate(losses) if not math.isfinite(loss)]
    if bad:
        names = ", ".join(repr(name) for index in bad for name in sample_ids[index])
        raise FloatingPointError(
            f"the loss must be finite, got {losses[bad[0]]} in {len(bad)} of {len(losses)} micro-batches; "
            f"no update was made (samples {names}); capture them again, or lower optimizer.learning_rate"
        )
