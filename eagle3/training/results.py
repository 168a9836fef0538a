"""What a training run leaves on its board: the store it reads, its questions, its charts and its drafter."""

import dataclasses
from pathlib import Path
from typing import Any

from eagle3.board import drafter_files, feature_store
from eagle3.config import TrainConfig
from eagle3.draft.questions import COLUMNS, QUESTIONS_NAME, read_questions, rows
from eagle3.features.samples import Samples
from eagle3.features.store import FeatureStore
from eagle3.tracking import Tracker
from eagle3.training.checkpoints import TrainState
from eagle3.training.engine import Engine
from eagle3.training.inputs import Inputs

HELD_OUT = "held_out"  # the measure in questions.jsonl


def facts(config: TrainConfig, inputs: Inputs, engine: Engine, state: TrainState) -> dict[str, Any]:
    """Returns what run.json says of a run besides machine and code."""
    return {
        "from_step": state.step,
        "seeds": {"run": config.run.seed, "data": config.data.seed},
        "setup": str(engine.setup),
        "device": str(engine.world.device),
        "num_devices": engine.world.size,
        "num_draft_tokens": config.objective.ttt_steps,
        "num_parameters": sum(parameter.numel() for parameter in engine.module.parameters()),
        "store": {
            "digest": state.store_digest,
            "num_bytes": inputs.store.num_bytes,
            "num_tokens": inputs.store.num_tokens,
            "manifest": dataclasses.asdict(inputs.store.manifest),
            "num_train_samples": len(inputs.train_indices),
            "num_held_out_samples": len(inputs.held_out_indices),
        },
    }


def show_inputs(tracker: Tracker, store: Samples, digest: str) -> None:
    """Shows what the run reads, if it is stored."""
    if not isinstance(store, FeatureStore):
        return
    manifest = dataclasses.asdict(store.manifest)
    tracker.board.reads(feature_store(store.path, store.location.sizes(), digest, manifest))


def show_results(tracker: Tracker, run_dir: Path, state: TrainState, drafter_dir: Path) -> None:
    """Shows what the finished run came to, of all its sessions."""
    validations = [line for line in tracker.lines() if "held_out/tau" in line]
    points = [(line["held_out/loss"], line["held_out/tau"]) for line in validations]
    tracker.board.scatter("charts/tau against loss", ("held-out loss", "tau"), points)
    if state.best_step is None:  # no validation but that of the untrained drafter
        return
    (best, *_) = [line for line in validations if line["step"] == state.best_step]
    bars = [(str(index + 1), share) for index, share in enumerate(best["held_out/conditional"]) if share is not None]
    tracker.board.bars("charts/acceptance per position", ("draft position", "accepted, of those reached"), bars)
    questions = read_questions(run_dir / QUESTIONS_NAME)[HELD_OUT]
    tracker.board.table("questions", COLUMNS, rows(HELD_OUT, questions))
    tracker.board.summarise({"best_tau": best["held_out/tau"], "best_step": state.best_step})
    metadata = {"held_out_tau": best["held_out/tau"], "step": state.best_step}
    tracker.board.makes(drafter_files(drafter_dir, tracker.board.run_id, metadata))
