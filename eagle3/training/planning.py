"""What a training would take, found without a GPU."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle3.config import TrainConfig, UserError
from eagle3.draft.model import DrafterConfig
from eagle3.draft.ttt import PackedSequences
from eagle3.features.samples import Samples
from eagle3.plan import existing_parent, readable_bytes
from eagle3.training.distributed import Setup, read_deepspeed_config
from eagle3.training.engine import state_kinds
from eagle3.training.inputs import device_weights, largest_micro_batch, read_basis
from eagle3.training.memory import FP32, MemoryEstimate, parameter_sizes, plan_for
from eagle3.training.optimizer_step import count_attended, count_rows
from eagle3.training.progress import duration
from eagle3.training.settings import num_steps_of
from eagle3.training.work import LIMITS, step_flops

COUNTED_SAMPLES = 2000  # whose rows are counted; a second's work, and the others are taken to be like them
LIMIT_SHARE = 0.6  # of a GPU's data-sheet limit that steps reach at D 4096 and more; README, "How fast it trains"


@dataclass(frozen=True)
class TrainingPlan:
    """What a training will do, and what it will take of its machine."""

    num_samples: int
    num_held_out: int
    num_tokens: int  # of the samples to train on, once
    num_supervised: int
    steps_per_epoch: int
    num_steps: int  # of the run
    num_parameters: int
    draft_vocab_size: int
    coverage: float  # share of the supervised tokens that can be drafted
    setup: Setup
    micro_batch_tokens: int
    memory: MemoryEstimate  # of each GPU
    least_memory: MemoryEstimate  # with gate and up of all draft steps made again
    flops: float  # of the run
    gpu: str
    checkpoint_bytes: int
    num_checkpoints: int  # that are kept at most
    run_dir: Path
    free_bytes: int  # where that is

    @property
    def seconds(self) -> float:
        """Of the steps alone, on GPUs that reach LIMIT_SHARE of their limit."""
        return self.flops / (LIMITS[self.gpu] * LIMIT_SHARE * self.setup.num_ranks)

    def __str__(self) -> str:
        epochs = self.num_steps / self.steps_per_epoch
        disk = self.checkpoint_bytes * self.num_checkpoints
        return "\n".join(
            [
                f"plan: {self.num_samples:,} samples of {self.num_tokens:,} tokens, "
                f"{self.num_supervised / self.num_tokens:.0%} supervised; {self.num_held_out:,} held out",
                f"steps: {self.num_steps:,}, {epochs:.3g} epochs",
                f"drafter: {self.num_parameters / 1e6:,.0f} M parameters, drafts {self.draft_vocab_size:,} tokens, "
                f"{self.coverage:.2%} of the supervised ones",
                f"memory of each GPU: {self.memory} for {self.micro_batch_tokens:,} tokens at once, {self.setup}; "
                f"{self.least_memory.total / 2**30:.1f} GiB where gate and up are made again for want of it",
                f"time: {duration(self.seconds)} of steps if {self.gpu}s reach {LIMIT_SHARE:.0%} of their limit, "
                f"as heads of D 4096 and more do; {self.flops:.3g} FLOP",
                f"disk: {readable_bytes(disk)} at most in {self.run_dir}, {self.num_checkpoints} checkpoints of "
                f"{readable_bytes(self.checkpoint_bytes)}; free disk {readable_bytes(self.free_bytes)}",
            ]
        )

    def check(self) -> None:
        """Refuses what cannot fit.

        Raises:
            UserError: checkpoints would fill the disk.
        """
        # One more than are kept: the oldest goes when the next one is whole.
        needed = self.checkpoint_bytes * (self.num_checkpoints + 1)
        if needed > self.free_bytes:
            raise UserError(
                f"checkpoints must fit the free {readable_bytes(self.free_bytes)} of the disk, got "
                f"{readable_bytes(needed)} for {self.num_checkpoints} and the next one ({self.run_dir}); lower "
                f"run.keep_last or run.keep_best, or choose another run.dir"
            )


def read_training_plan(config: TrainConfig, *, num_gpus: int, gpu: str) -> TrainingPlan:
    """Reads store and target, and adds up what a run on so many GPUs will take; `gpu` is a name of `LIMITS`.

    Raises:
        UserError: as the training would, before it makes a drafter; or states are to be made while it runs.
    """
    if config.data.path.endswith((".yaml", ".yml")):
        raise UserError(
            f"a training must have a store to be planned, got data.path={config.data.path}, whose states are made "
            f"while it runs; plan that with `eagle3 plan --config {config.data.path}`"
        )
    problems = [f"  --gpus must be at least 1, got {num_gpus}"] if num_gpus < 1 else []
    problems += [] if gpu in LIMITS else [f"  --gpu must be one of {', '.join(LIMITS)}, got {gpu!r}"]
    if problems:
        raise UserError("some GPUs cannot be planned for:\n" + "\n".join(problems) + "\nname others")
    basis = read_basis(config)
    store, indices, drafter = basis.store, basis.train_indices, basis.drafter_config
    entries = [store.entries[index] for index in indices]
    num_tokens = sum(entry.num_tokens for entry in entries)
    steps_per_epoch = -(-len(indices) // config.data.samples_per_step)
    num_steps = num_steps_of(config.run, steps_per_epoch)
    zero_stage = None
    if config.run.deepspeed is not None:
        zero_stage = read_deepspeed_config(config)["zero_optimization"]["stage"]
    shapes = basis.target.to("meta", getattr(torch, config.target.dtype))
    target = device_weights(shapes, basis.draft_vocab.target_ids, config.data.embeddings)
    num_sharing = num_gpus if config.data.split_sequences else 1
    micro_batch, share = largest_micro_batch(store, indices, config.data.batch_tokens, num_sharing)
    has_average = config.optimizer.ema_decay is not None
    setup = Setup(zero_stage, num_gpus)
    ttt_steps = config.objective.ttt_steps
    memory = plan_for(drafter, setup, target, ttt_steps, capacity=0, has_average=has_average)
    num_rows = round(micro_batch * share)
    sizes = parameter_sizes(drafter)
    counts = store.token_counts(indices)
    run_dir = Path(config.run.dir)
    return TrainingPlan(
        num_samples=len(indices),
        num_held_out=len(basis.held_out_indices),
        num_tokens=num_tokens,
        num_supervised=sum(entry.num_supervised for entry in entries),
        steps_per_epoch=steps_per_epoch,
        num_steps=num_steps,
        num_parameters=sizes.total,
        draft_vocab_size=drafter.draft_vocab_size,
        coverage=basis.draft_vocab.coverage(counts),
        setup=setup,
        micro_batch_tokens=micro_batch,
        memory=memory.estimate(micro_batch, num_rows),
        least_memory=memory.estimate(micro_batch, num_rows, num_recomputed=ttt_steps),
        flops=_epoch_flops(store, indices, drafter, ttt_steps) * num_steps / steps_per_epoch,
        gpu=gpu,
        checkpoint_bytes=FP32 * len(state_kinds(has_average=has_average)) * sizes.total,
        num_checkpoints=config.run.keep_last + config.run.keep_best,
        run_dir=run_dir,
        free_bytes=shutil.disk_usage(existing_parent(run_dir)).free,
    )


def _epoch_flops(store: Samples, indices: Sequence[int], drafter: DrafterConfig, ttt_steps: int) -> float:
    """Returns the arithmetic of all samples once; rejected chains that may leave count as if they stayed."""
    counted = indices[:: -(-len(indices) // COUNTED_SAMPLES)]
    tokens = [_without_states(store, index) for index in counted]
    num_counted = sum(each.loss_mask.numel() for each in tokens)
    num_rows, num_attended = count_rows(tokens, ttt_steps), count_attended(tokens, ttt_steps)
    flops = step_flops(drafter, num_counted, num_rows.tolist(), float(num_attended.sum()))
    return flops * sum(store.entries[index].num_tokens for index in indices) / num_counted


def _without_states(store: Samples, index: int) -> PackedSequences:
    loss_mask, nothing = store.loss_mask(index), torch.zeros(0)
    return PackedSequences(
        input_ids=nothing,
        positions=torch.arange(loss_mask.numel()),
        loss_mask=loss_mask,
        document_lengths=(loss_mask.numel(),),
        aux_hidden_states=nothing,
        target_rows=nothing,
        last_hidden_states=nothing,
        target_logz=None,
        sample_ids=(store.entries[index].sample_id,),
    )
