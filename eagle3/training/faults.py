"""What stops a run, or should be looked at: samples that do not fit, numbers that are not finite, losses that jump."""

import json
import logging
import math
from collections import deque
from pathlib import Path

from eagle3.files import write_whole
from eagle3.training.batches import StepBatch
from eagle3.training.memory import MemoryPlan
from eagle3.training.packs import CodedPack
from eagle3.words import counted

logger = logging.getLogger(__name__)

STOPPED_NAME = "stopped.json"  # in the run's directory: the step that could not be taken, with its samples
SPIKES_NAME = "spikes.jsonl"
SMALLER = 0.75  # of what did not fit, where the estimate says that it should have
# Losses of one step differ by their samples; ten times what they usually do, and by more than half, is another thing.
SPIKE_DEVIATIONS, SPIKE_RATIO = 10.0, 1.5
NUM_COMPARED = 50  # steps before
FEWEST_COMPARED = 10


def out_of_memory_message(pack: CodedPack, plan: MemoryPlan | None, batch_tokens: int, reason: str) -> str:
    """Says which samples did not fit, what they were estimated to take, and what to try."""
    tokens = pack.tokens
    num_tokens, num_rows = tokens.loss_mask.numel(), int(tokens.loss_mask.sum())
    names = ", ".join(repr(name) for name in dict.fromkeys(tokens.sample_ids))
    expected = "no estimate here"
    if plan is not None:
        again = plan.num_recomputed(num_tokens, num_rows)
        estimate = plan.estimate(num_tokens, num_rows, num_recomputed=again)
        expected = f"estimated at {estimate} of {plan.capacity / 2**30:.1f} GiB"
    if num_tokens > batch_tokens and len(tokens.sample_ids) == 1:
        advice = "a sample this long has a micro-batch of its own: use more GPUs and data.split_sequences=true"
    else:
        advice = f"data.batch_tokens={tokens_to_try(num_tokens, num_rows, plan)}"
    return (
        f"a micro-batch must fit the GPU's memory, got {num_tokens} tokens in "
        f"{counted(len(tokens.document_lengths), 'document')} that do not, {expected} (samples {names}; "
        f"{reason.splitlines()[0]}); go on from the last checkpoint with run.resume=auto and {advice}"
    )


def tokens_to_try(num_tokens: int, num_rows: int, plan: MemoryPlan | None) -> int:
    """Returns a size that should fit: three quarters of what did not, or less if the estimate of that is too much."""
    tried = int(SMALLER * num_tokens)
    while plan is not None and tried > 1:
        rows = math.ceil(tried * num_rows / num_tokens)
        if plan.estimate(tried, rows, num_recomputed=plan.ttt_steps).total <= plan.capacity:
            break
        tried = int(SMALLER * tried)
    return max(1, tried)


def keep_stopped(run_dir: Path, step: int, batch: StepBatch, error: Exception) -> None:
    """Writes down the step that stopped a run."""
    record = {"step": step, "error": str(error), "sample_ids": batch.sample_ids}
    write_whole(run_dir / STOPPED_NAME, json.dumps(record, indent=1) + "\n")


class LossSpikes:
    """Notices a loss that lies far above those of the steps before."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / SPIKES_NAME
        self._before: deque[float] = deque(maxlen=NUM_COMPARED)

    def add(self, step: int, loss: float, batch: StepBatch) -> bool:
        """Tells whether a step's loss is one, after logging it and writing down its samples."""
        before = self._before
        is_spike = False
        if len(before) >= FEWEST_COMPARED:
            mean = sum(before) / len(before)
            deviation = math.sqrt(sum((value - mean) ** 2 for value in before) / len(before))
            is_spike = loss > mean + SPIKE_DEVIATIONS * deviation and loss > SPIKE_RATIO * mean
            if is_spike:
                logger.warning(
                    "step %06d  the loss is %.4f, after %.4f (deviation %.4f) in %d steps before; its samples: %s",
                    step, loss, mean, deviation, len(before), self._path,
                )  # fmt: skip
                record = {"step": step, "loss": loss, "mean_before": mean, "sample_ids": batch.sample_ids}
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
        if not is_spike:
            before.append(loss)
        return is_spike
