"""Held-out acceptance: the number that picks the checkpoint.

Training loss keeps falling while the acceptance length peaks and drops, so both are measured on held-out samples.
"""

from dataclasses import dataclass

import torch
from rich.progress import Progress

from eagle3.config import DataConfig, UserError
from eagle3.draft.acceptance import Acceptance, answer_rounds, summarise
from eagle3.draft.questions import Question, of_pack
from eagle3.draft.ttt import chain_matches
from eagle3.features.samples import Samples
from eagle3.training.batches import deal
from eagle3.training.distributed import gather, reduce_sum
from eagle3.training.engine import Engine
from eagle3.training.faults import out_of_memory_message
from eagle3.training.optimizer_step import MetricSums
from eagle3.training.packs import load_threads, on_device, pack_reader
from eagle3.training.prefetch import prefetched
from eagle3.training.stopping import StopSignal
from eagle3.training.watch import Watch
from eagle3.words import counted

BOOTSTRAP_SEED = 0  # of the interval alone: the same for every validation, so that two can be compared


@dataclass(frozen=True)
class Validation:
    """What a drafter does on held-out samples, over all ranks."""

    acceptance: Acceptance
    sums: MetricSums
    questions: list[Question]  # what `acceptance` adds up, by sample


@torch.no_grad()
def validate(
    engine: Engine,
    store: Samples,
    indices: list[int],
    *,
    data: DataConfig,
    bars: Progress,
    stop: StopSignal,
    watch: Watch,
    step: int,
) -> Validation | None:
    """Scores the samples at `indices`, dealt over the ranks; every rank gets the same result.

    None comes back if a rank is to stop: what is left may take longer than whoever asks will wait, or cannot be had.

    Raises:
        FloatingPointError: a loss is not finite, on all ranks: of choices among such scores no tau can be made.
        UserError: a micro-batch does not fit the GPU's memory.
    """
    module, world = engine.module, engine.world
    ttt_steps = module.objective.ttt_steps
    sums = torch.zeros(4, ttt_steps, dtype=torch.float64, device=world.device)
    questions: list[Question] = []
    not_finite: list[str] = []  # samples
    packs = deal([store.entries[index].num_tokens for index in indices], data.batch_tokens, world.size)
    bar = bars.add_task("held-out samples", total=len(indices) / world.size)
    reader = pack_reader(store, data.read_threads, pin=world.device.type == "cuda", embed_tokens=module.host_embeddings)
    mine = packs[world.rank :: world.size]
    wanted = ([indices[i] for i in members] for members in mine if members)
    loaded = prefetched(reader.read, wanted, depth=2, gives_up=lambda: stop.requested, num_threads=load_threads(store))
    while (coded := stop.next_of(loaded)) is not None:
        watch.at("validation", step)
        if stop.requested:
            break
        if coded.is_blank:
            continue
        try:
            (packed,) = on_device([coded], world.device)
            pack_sums = module(packed)[1]
            with module.autocast():
                chains = chain_matches(module.drafter, module.target.embed_tokens, packed, ttt_steps)
        except torch.OutOfMemoryError as error:
            message = out_of_memory_message(coded, module.memory_plan, data.batch_tokens, str(error))
            raise UserError(f"in a validation {message}") from None
        if not pack_sums.isfinite().all():
            not_finite += coded.tokens.sample_ids
        sums += pack_sums
        questions += of_pack(coded.tokens, answer_rounds(packed, chains))
        bars.advance(bar, len(packed.sample_ids))
    bars.remove_task(bar)
    if not mine[-1]:
        watch.at("validation", step)  # every rank begins as many parts, by which it is found who is behind
    if any(gather(stop.requested)):
        return None
    if names := [repr(name) for part in gather(not_finite) for name in part]:
        raise FloatingPointError(
            f"the held-out loss must be finite, got another in micro-batches of {counted(len(names), 'sample')} at "
            f"step {step} (samples {', '.join(names)}); capture them again, or lower optimizer.learning_rate"
        )
    # By sample, so that the resampling does not depend on how they were dealt; answers of one stay in order.
    everywhere = sorted((each for part in gather(questions) for each in part), key=lambda each: each.answer.sample_id)
    acceptance = summarise([question.answer for question in everywhere], BOOTSTRAP_SEED)
    return Validation(acceptance, MetricSums(*reduce_sum(sums).cpu()), everywhere)
