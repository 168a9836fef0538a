"""What a training would take, found without a GPU."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle3.board import check_backend
from eagle3.config import DataConfig, TrainConfig, UserError
from eagle3.draft.model import DrafterConfig
from eagle3.draft.ttt import PackedSequences
from eagle3.features.samples import Samples
from eagle3.files import existing_parent
from eagle3.training.batches import deal, epoch_order
from eagle3.training.distributed import Setup, read_deepspeed_config
from eagle3.training.engine import state_kinds
from eagle3.training.inputs import device_weights, largest_micro_batch, read_basis
from eagle3.training.memory import BF16, FP32, GIB, MemoryEstimate, parameter_sizes, plan_for
from eagle3.training.optimizer_step import count_attended, count_rows
from eagle3.training.settings import num_steps_of
from eagle3.training.work import LIMITS, limit_of, step_flops
from eagle3.words import counted, duration, readable_bytes

COUNTED_SAMPLES = 2000  # whose rows are counted; a second's work, and the others are taken to be like them
COUNTED_STEPS = 500  # whose samples are dealt to the ranks
LIMIT_SHARE = 0.6  # of a GPU's data-sheet limit; README, "How fast it trains", has what is measured
MAX_GPUS = 4096


@dataclass(frozen=True)
class TrainingPlan:
    """What a new training will do, and what it will take of its machine."""

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
    slowest: float  # tokens of the rank that has most in a step, in those of a mean rank
    micro_batch_tokens: int
    memory: MemoryEstimate  # of each GPU, with the store's share of supervised tokens
    all_supervised: MemoryEstimate  # where all tokens of a micro-batch are
    least_memory: MemoryEstimate  # with gate and up of all draft steps made again besides
    flops: float  # of the run
    gpu: str
    limit: float  # FLOP/s of its data sheet
    checkpoint_bytes: int
    num_checkpoints: int  # there at once, at most
    drafter_bytes: int
    run_dir: Path
    free_bytes: int  # where that is

    @property
    def seconds(self) -> float:
        """Of the steps alone, on GPUs that reach LIMIT_SHARE of their limit and wait for the slowest in each step."""
        return self.flops * self.slowest / (self.limit * LIMIT_SHARE * self.setup.num_ranks)

    @property
    def disk_bytes(self) -> int:
        """Of all that is there at once, at most."""
        return self.checkpoint_bytes * self.num_checkpoints + self.drafter_bytes

    def __str__(self) -> str:
        on_each = self.num_tokens / self.steps_per_epoch / self.setup.num_ranks
        return "\n".join(
            [
                f"plan: {counted(self.num_samples, 'sample')} of {counted(self.num_tokens, 'token')}, "
                f"{self.num_supervised / self.num_tokens:.0%} supervised; {self.num_held_out:,} held out",
                f"steps: {self.num_steps:,} in {self.num_steps / self.steps_per_epoch:.3g} epochs, each with "
                f"{counted(round(on_each), 'token')} on a GPU, {round(on_each * self.slowest):,} on the one with most",
                f"drafter: {self.num_parameters / 1e6:,.0f} M parameters, drafts {self.draft_vocab_size:,} tokens, "
                f"{self.coverage:.2%} of the supervised ones",
                f"memory of each GPU: {self.memory} for {counted(self.micro_batch_tokens, 'token')} at once in bf16, "
                f"{self.setup}; {self.all_supervised.total / GIB:.1f} GiB if all of them are supervised, "
                f"{self.least_memory.total / GIB:.1f} with gate and up made again",
                f"time: at least {duration(self.seconds)} of steps, if {self.gpu} reaches {LIMIT_SHARE:.0%} of its "
                f"limit, as heads of D 4096 do with 16,384 tokens on a GPU; {self.flops:.3g} FLOP",
                f"disk: at most {readable_bytes(self.disk_bytes)} in {self.run_dir}, "
                f"{counted(self.num_checkpoints, 'checkpoint')} of {readable_bytes(self.checkpoint_bytes)} and the "
                f"drafter; free disk {readable_bytes(self.free_bytes)}",
            ]
        )

    def check(self) -> None:
        """Refuses what the disk cannot take.

        Raises:
            UserError: checkpoints and drafter would fill it.
        """
        if self.disk_bytes > self.free_bytes:
            raise UserError(
                f"checkpoints must fit the free {readable_bytes(self.free_bytes)} of the disk, got "
                f"{readable_bytes(self.disk_bytes)} for {counted(self.num_checkpoints, 'checkpoint')} and the drafter "
                f"({self.run_dir}); lower run.keep_last or run.keep_best, or choose another run.dir"
            )


def read_training_plan(config: TrainConfig, *, num_gpus: int, gpu: str) -> TrainingPlan:
    """Reads store and target, and adds up what a new run on so many GPUs will take; `gpu` is a name or a part of it.

    Raises:
        UserError: as the training would, before it makes a drafter; or states are to be made while it runs.
    """
    limit = _checked_limit(config, num_gpus, gpu)
    check_backend(config.tracking)
    basis = read_basis(config)
    store, indices, drafter = basis.store, basis.train_indices, basis.drafter_config
    entries = [store.entries[index] for index in indices]
    steps_per_epoch = -(-len(indices) // config.data.samples_per_step)
    num_steps = num_steps_of(config.run, steps_per_epoch)
    zero_stage = None
    if config.run.deepspeed is not None:
        zero_stage = read_deepspeed_config(config)["zero_optimization"]["stage"]
    shapes = basis.target.to("meta", getattr(torch, config.target.dtype))
    target = device_weights(shapes, basis.draft_vocab.target_ids, config.data.embeddings)
    micro_batch, share = largest_micro_batch(
        store, indices, config.data, num_gpus if config.data.split_sequences else 1
    )
    has_average = config.optimizer.ema_decay is not None
    setup, ttt_steps, sizes = Setup(zero_stage, num_gpus), config.objective.ttt_steps, parameter_sizes(drafter)
    memory = plan_for(drafter, setup, target, ttt_steps, capacity=0, has_average=has_average)
    num_saves = num_steps // config.run.save_every + num_steps // config.run.validate_every + 1
    num_kept = config.run.keep_last + config.run.keep_best
    num_tokens, run_dir = sum(entry.num_tokens for entry in entries), Path(config.run.dir)
    return TrainingPlan(
        num_samples=len(indices),
        num_held_out=len(basis.held_out_indices),
        num_tokens=num_tokens,
        num_supervised=sum(entry.num_supervised for entry in entries),
        steps_per_epoch=steps_per_epoch,
        num_steps=num_steps,
        num_parameters=sizes.total,
        draft_vocab_size=drafter.draft_vocab_size,
        coverage=basis.draft_vocab.coverage(basis.token_counts),
        setup=setup,
        slowest=_slowest(store, indices, config.data, num_gpus),
        micro_batch_tokens=micro_batch,
        memory=memory.estimate(micro_batch, round(micro_batch * share)),
        all_supervised=memory.estimate(micro_batch, micro_batch),
        least_memory=memory.estimate(micro_batch, micro_batch, num_recomputed=ttt_steps),
        flops=_flops_per_token(store, indices, drafter, ttt_steps) * num_tokens * num_steps / steps_per_epoch,
        gpu=gpu,
        limit=limit,
        checkpoint_bytes=FP32 * len(state_kinds(has_average=has_average)) * sizes.total,
        num_checkpoints=min(num_kept + 1, num_saves),  # the next one is there before the oldest goes
        drafter_bytes=BF16 * sizes.total,
        run_dir=run_dir,
        free_bytes=shutil.disk_usage(existing_parent(run_dir)).free,
    )


def _checked_limit(config: TrainConfig, num_gpus: int, gpu: str) -> float:
    """Returns the FLOP/s of a GPU, if so many of them can be planned for.

    Raises:
        UserError: names all that cannot.
    """
    problems = []
    if not 1 <= num_gpus <= MAX_GPUS:
        problems.append(f"  --gpus must be from 1 to {MAX_GPUS}, got {num_gpus}")
    limit = limit_of(gpu)
    if limit is None:
        problems.append(f"  --gpu must have one of {', '.join(LIMITS)} in its name, got {gpu!r}")
    if config.data.is_streamed:
        problems.append(
            f"  data.path must be a store, got {config.data.path}, whose states are made while a training runs: plan "
            f"those with `python -m eagle3 plan --config {config.data.path}`"
        )
    parent = existing_parent(Path(config.run.dir))
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        problems.append(f"  run.dir must be in a directory that can be written, got {config.run.dir} below {parent}")
    if problems or limit is None:
        raise UserError("some of this cannot be planned for:\n" + "\n".join(problems) + "\nchange it")
    return limit


def _slowest(store: Samples, indices: Sequence[int], data: DataConfig, num_ranks: int) -> float:
    """Returns how many times a mean rank's tokens that rank has, step by step, which has most of them."""
    lengths = [store.entries[index].num_tokens for index in indices]
    order = epoch_order([store.entries[index].shard for index in indices], data.seed, 0, data.shuffle_shards)
    starts = range(0, len(order), data.samples_per_step)
    most = total = 0.0
    for start in starts[:: -(-len(starts) // COUNTED_STEPS)]:
        step = [lengths[place] for place in order[start : start + data.samples_per_step]]
        whole = [length for length in step if not data.split_sequences or length <= data.batch_tokens]
        packs = [sum(whole[place] for place in members) for members in deal(whole, data.batch_tokens, num_ranks)]
        most += max(sum(packs[rank::num_ranks]) for rank in range(num_ranks)) if whole else 0
        most += (sum(step) - sum(whole)) / num_ranks  # what the ranks split among them
        total += sum(step)
    return most * num_ranks / total


def _flops_per_token(store: Samples, indices: Sequence[int], drafter: DrafterConfig, ttt_steps: int) -> float:
    """Returns the arithmetic of a token that is trained on; rejected chains that may leave count as if they stayed."""
    some = indices[:: -(-len(indices) // COUNTED_SAMPLES)]
    tokens = [_without_states(store, index) for index in some]
    num_counted = sum(each.loss_mask.numel() for each in tokens)
    num_rows, num_attended = count_rows(tokens, ttt_steps), count_attended(tokens, ttt_steps)
    return step_flops(drafter, num_counted, num_rows.tolist(), float(num_attended.sum())) / num_counted


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
