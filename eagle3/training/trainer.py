"""Steps, validation, saves."""

import contextlib
import dataclasses
import itertools
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from rich.progress import Progress

from eagle3.board import check_backend
from eagle3.config import TrainConfig, UserError
from eagle3.draft.export import TRAINED_ON, export_drafter
from eagle3.draft.questions import QUESTIONS_NAME, write_questions
from eagle3.features.samples import Samples
from eagle3.tracking import Tracker
from eagle3.training.batches import Batches, StepBatch
from eagle3.training.beginning import begin_or_resume, open_tracker
from eagle3.training.checkpoints import TrainState
from eagle3.training.distributed import World, on_every_rank, quiet_other_ranks, start
from eagle3.training.engine import Engine, TTTModule
from eagle3.training.faults import LossSpikes, keep_stopped
from eagle3.training.inputs import Inputs, device_weights, largest_micro_batch, load_inputs
from eagle3.training.memory import log_plan, plan_memory
from eagle3.training.model_card import model_card
from eagle3.training.normalisers import add_normalisers
from eagle3.training.optimizer_step import StepResult, learning_rate_at, take_step
from eagle3.training.packs import load_threads
from eagle3.training.prefetch import prefetched
from eagle3.training.progress import StepLog, progress_bars
from eagle3.training.results import HELD_OUT, show_results
from eagle3.training.saves import Saver
from eagle3.training.sequence_split import Ranks
from eagle3.training.settings import num_steps_of
from eagle3.training.stopping import StopSignal, has_ended
from eagle3.training.validation import validate
from eagle3.training.watch import Watch
from eagle3.words import counted

logger = logging.getLogger(__name__)

TARGET_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
DRAFTER_NAME = "drafter"  # in the run's directory: the best drafter so far, as SGLang loads it


@dataclass(frozen=True)
class Run:
    """What stays the same from the first step to the last."""

    config: TrainConfig
    inputs: Inputs
    engine: Engine
    batches: Batches
    dir: Path
    num_steps: int  # optimizer steps, of the whole run


@dataclass(frozen=True)
class Session:
    """What one process has open while it takes steps of a run."""

    tracker: Tracker | None  # on the main rank
    stop: StopSignal
    saver: Saver
    watch: Watch


def train(config: TrainConfig, samples: Samples | None = None) -> Path:
    """Trains a drafter and returns the run's directory; the best drafter is in its `drafter/`.

    Without `samples` it trains on the store of `data.path`.

    Raises:
        UserError: store, target, config and launcher do not belong together, a micro-batch does not fit the GPU, or
            samples cannot be had, before which the steps so far are saved.
        ChildProcessError: another rank has stopped or died.
        FloatingPointError: loss or gradient is not finite; the last checkpoint is as good as before.
    """
    quiet_other_ranks()
    check_backend(config.tracking)
    inputs = load_inputs(config, samples)
    accelerator, world = start(config)
    stop = StopSignal(config.run.stop_after)
    run_dir = train_among_ranks(config, inputs, accelerator, world, stop)
    # Nothing of the run holds DDP any more. Its reducer must not be the last to hold the process group: it would end
    # gloo's threads with the GIL held, which one of them may be waiting for.
    accelerator.free_memory()
    accelerator.end_training()
    if stop.error is not None:
        raise stop.error
    return run_dir


def train_among_ranks(
    config: TrainConfig, inputs: Inputs, accelerator: Accelerator, world: World, stop: StopSignal
) -> Path:
    """Trains as one of the ranks, which have met, until it is done or is to `stop`; returns the run's directory."""
    dtype = TARGET_DTYPES[config.target.dtype]
    add_normalisers(inputs.store, inputs.train_indices + inputs.held_out_indices, inputs.target, world, dtype)
    target = device_weights(inputs.target, inputs.drafter.target_ids, config.data.embeddings).to(world.device, dtype)
    module = TTTModule(inputs.drafter, target, config.objective, bf16=config.run.mixed_precision == "bf16")
    # As the file has them they stay mapped, so that the ranks of a machine share them.
    module.host_embeddings = inputs.target.embed_tokens.to(dtype) if config.data.embeddings == "host" else None
    engine = Engine(config, accelerator, world, module)
    precision = "bf16 with fp32 master weights" if module.bf16 else "fp32"
    logger.info("%s on %s, %s", engine.setup, world.device, precision)
    if world.device.type == "cuda":
        module.memory_plan = plan_memory(
            inputs.drafter.config,
            engine.setup,
            target,
            config.objective.ttt_steps,
            world.device,
            has_average=config.optimizer.ema_decay is not None,
        )
        num_sharing = world.size if config.data.split_sequences else 1
        largest = largest_micro_batch(inputs.store, inputs.train_indices, config.data, num_sharing)
        log_plan(module.memory_plan, *largest)
    batches = Batches(
        inputs.store,
        inputs.train_indices,
        config.data,
        Ranks.of(world.rank, world.size),
        config.objective.ttt_steps,
        embed_tokens=module.host_embeddings,
        pin=world.device.type == "cuda",
    )
    num_steps = num_steps_of(config.run, batches.steps_per_epoch)

    with contextlib.ExitStack() as locks:
        run_dir, state = begin_or_resume(config, inputs, engine, locks)
        finish(Run(config, inputs, engine, batches, run_dir, num_steps), state, stop)
    return run_dir


def finish(run: Run, state: TrainState, stop: StopSignal) -> None:
    """Takes a run from `state` to its end, or until it is to `stop`, and says where its drafter is."""
    settings, world = run.config.run, run.engine.world
    if is_complete(run, state):
        logger.info("%s is complete: %d of %s", run.dir, state.step, counted(run.num_steps, "step"))
    else:
        with (
            open_tracker(run.config, run.inputs, run.engine, run.dir, state) as tracker,
            stop,
            Saver(run.engine, run.dir, settings) as saver,
            Watch(world, timeout=settings.timeout, before_end=saver.finish) as watch,
        ):
            state = take_steps(run, state, Session(tracker, stop, saver, watch))
            saver.wait()
            if tracker is not None and is_complete(run, state):
                show_results(tracker, run.dir, state, run.dir / DRAFTER_NAME)
    if is_complete(run, state) and state.best_step is not None:
        drafter = run.dir / DRAFTER_NAME
        logger.info(
            "%s is the drafter of step %d, with the best held-out tau: %.3f. Next: python evaluate.py drafter=%s "
            "target.path=%s",
            drafter, state.best_step, state.best_tau, drafter, run.config.target.path,
        )  # fmt: skip


def is_complete(run: Run, state: TrainState) -> bool:
    """Tells whether a run has ended, and its last step is validated."""
    return has_ended(state, run.num_steps, run.config.run.patience) and state.validated_step == state.step


def take_steps(run: Run, state: TrainState, session: Session) -> TrainState:
    """Trains from `state` to the last step, or until the process is asked to stop; returns where that is."""
    config, settings, engine = run.config, run.config.run, run.engine
    log = StepLog(
        config,
        engine.module.drafter.config,
        engine.world,
        session.tracker,
        num_steps=run.num_steps,
        steps_per_epoch=run.batches.steps_per_epoch,
    )
    spikes = LossSpikes(run.dir)
    engine.at = session.watch.at
    first_step = saved_step = state.step
    saved_state = state
    positions = itertools.islice(run.batches.positions(state.position), run.num_steps - state.step)
    loaded = prefetched(
        run.batches.load,
        positions,
        config.data.prefetch_steps,
        gives_up=lambda: session.stop.requested,
        num_threads=load_threads(run.inputs.store),
    )
    with progress_bars(shown=engine.world.is_main) as bars, contextlib.closing(loaded):
        steps_bar = bars.add_task("steps", total=run.num_steps, completed=state.step)
        while True:
            # Validation comes first, so that a checkpoint knows the tau of its step; step 0 is the untrained drafter.
            is_last = state.step == run.num_steps
            if state.validated_step != state.step and (is_last or state.step % settings.validate_every == 0):
                validated = validate_and_export(run, state, log, bars, session)
                if validated is None:
                    return stop_here(session, state)
                state = validated
                if not is_last and has_ended(state, run.num_steps, settings.patience):
                    logger.info(
                        "no better tau in %s: training ends (run.patience)", counted(state.num_worse, "validation")
                    )
                    is_last = True
            is_due = is_last or state.step % settings.save_every == 0 or state.best_step == state.step
            # A run that was stopped at its last step comes back for that step's validation.
            if is_due and (state.step > saved_step or (is_last and state != saved_state)):
                session.watch.at("save", state.step)
                session.saver.save(state)
                saved_step = state.step
            if is_last:
                return state

            session.saver.check()
            with log.clock():
                session.watch.at("data", state.step + 1)
                with log.data_clock():
                    batch = session.stop.next_of(loaded)
                session.watch.at("begin", state.step + 1)
                if not on_every_rank(batch is not None, engine.world) or batch is None:
                    return stop_here(session, state)
                session.stop.step_begins()
                learning_rate = learning_rate_at(state.step + 1, run.num_steps, config.optimizer)
                result = step_or_keep(run, state, batch, learning_rate, stop_requested=session.stop.requested)
            state = dataclasses.replace(state, step=state.step + 1, position=batch.next_position)
            log.add(result, batch)
            if engine.world.is_main:
                spikes.add(state.step, result.sums.loss(config.objective), batch)
            bars.advance(steps_bar)
            is_end = state.step == run.num_steps or result.stop_requested
            if state.step % settings.log_every == 0 or state.step == first_step + 1 or is_end:
                log.write(state.step, learning_rate)

            if result.stop_requested:
                return stop_here(session, state)


def step_or_keep(
    run: Run, state: TrainState, batch: StepBatch, learning_rate: float, *, stop_requested: bool
) -> StepResult:
    """Takes a step; one that cannot be taken leaves its samples in the run's directory."""
    batch_tokens = run.config.data.batch_tokens
    try:
        return take_step(
            run.engine, batch, learning_rate=learning_rate, batch_tokens=batch_tokens, stop_requested=stop_requested
        )
    except (FloatingPointError, UserError) as error:
        if run.engine.world.is_main or isinstance(error, UserError):  # memory runs out on one rank alone
            keep_stopped(run.dir, state.step + 1, batch, error)
        raise


def stop_here(session: Session, state: TrainState) -> TrainState:
    """Saves and says how to go on; returns the state."""
    saver, stop = session.saver, session.stop
    if state.step == 0:
        logger.info("stopped (%s) before the first step; the same command begins anew", stop.reason)
        return state
    path = saver.save(state)
    saver.wait()
    logger.info("stopped (%s): saved %s; the same command with run.resume=auto goes on from it", stop.reason, path)
    return state


def validate_and_export(
    run: Run, state: TrainState, log: StepLog, bars: Progress, session: Session
) -> TrainState | None:
    """Measures the held-out tau; the best drafter so far becomes the exported one.

    Returns None if a rank was asked to stop before all samples were scored.
    """
    with run.engine.averaged_weights():
        validation = validate(
            run.engine,
            run.inputs.store,
            run.inputs.held_out_indices,
            data=run.config.data,
            bars=bars,
            stop=session.stop,
            watch=session.watch,
            step=state.step,
        )
        if validation is None:
            return None
        state = state.after_validation(validation.acceptance.tau)
        is_best = state.best_step == state.step
        log.write_validation(state.step, validation, is_best=is_best)
        if is_best and run.engine.world.is_main:
            # Before the checkpoint that calls it the best: a kill in between repeats the step, and this with it.
            manifest = run.inputs.store.manifest
            export_drafter(
                run.engine.module.drafter,
                run.dir / DRAFTER_NAME,
                target_config=run.inputs.target_config,
                card=model_card(run.config, run.inputs.store, state, validation),
                trained_on={name: getattr(manifest, name) for name in TRAINED_ON},
            )
            write_questions(run.dir / QUESTIONS_NAME, {HELD_OUT: validation.questions})
        return state
