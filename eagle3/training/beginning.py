"""A new run, or one that goes on: its directory, its state, and what shows its numbers."""

import contextlib
import logging
from pathlib import Path

from eagle3.config import TrainConfig
from eagle3.tracking import Tracker, identify, lock_run, new_run_dir, open_board, run_dir_to_resume, write_provenance
from eagle3.training.checkpoints import TrainState, check_same_run, initial_state, newest_checkpoint
from eagle3.training.distributed import check_same, ending_together, from_main
from eagle3.training.engine import Engine
from eagle3.training.inputs import Inputs
from eagle3.training.results import facts, show_inputs

logger = logging.getLogger(__name__)


def begin_or_resume(
    config: TrainConfig, inputs: Inputs, engine: Engine, locks: contextlib.ExitStack
) -> tuple[Path, TrainState]:
    """Returns the run's directory and where it stands, with the engine brought there; the main rank decides.

    It is this command's until `locks` are closed.

    Raises:
        UserError: the run to resume has other maths or another store, or another command trains it.
    """
    world = engine.world
    state = initial_state(config, inputs.store)
    check_same("the store's digest", state.store_digest)
    old_dir = checkpoint = None
    with ending_together():
        if world.is_main:
            old_dir = run_dir_to_resume(config.run)
            if old_dir is not None:
                locks.enter_context(lock_run(old_dir))
            checkpoint = None if old_dir is None else newest_checkpoint(old_dir)
    checkpoint = from_main(checkpoint)
    if checkpoint is not None:
        check_same_run(checkpoint, state)
        with checkpoint.open_tensors() as tensors:
            engine.load_state(tensors.get_tensor, checkpoint.state.step)
        logger.info("resumed %s", checkpoint.path)
        run_dir, state = checkpoint.path.parent, checkpoint.state
    else:
        run_dir = Path(config.run.dir)
        with ending_together():
            if world.is_main:
                run_dir = new_run_dir(run_dir)
                locks.enter_context(lock_run(run_dir))
        run_dir = from_main(run_dir)
        reason = "" if old_dir is None else f": {old_dir} has no whole checkpoint to go on from"
        logger.info("new run in %s%s", run_dir, reason)
    with ending_together():
        if world.is_main:
            identity = identify(
                run_dir, config.tracking, "train", inputs=[Path(config.data.path)], resumes=checkpoint is not None
            )
            write_provenance(run_dir, identity, config, facts(config, inputs, engine, state))
    return run_dir, state


def open_tracker(
    config: TrainConfig, inputs: Inputs, engine: Engine, run_dir: Path, state: TrainState
) -> contextlib.AbstractContextManager[Tracker | None]:
    """Opens the run's tracker on the main rank; the others get None."""
    tracker = None
    with ending_together():
        if engine.world.is_main:
            board = open_board(run_dir, config.tracking)
            tracker = Tracker(run_dir, board, step=state.step, is_validated=state.validated_step == state.step)
            show_inputs(tracker, inputs.store, state.store_digest)
    return contextlib.nullcontext() if tracker is None else tracker
