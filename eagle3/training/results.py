"""What a training run leaves on its board: the store it reads, its questions, its charts and its drafter."""

import dataclasses
from pathlib import Path

from eagle3.board import drafter_files, feature_store
from eagle3.draft.questions import COLUMNS, QUESTIONS_NAME, read_questions, rows
from eagle3.features.store import FeatureStore
from eagle3.tracking import Tracker
from eagle3.training.checkpoints import TrainState

HELD_OUT = "held_out"  # the measure in questions.jsonl


def show_inputs(tracker: Tracker, store: FeatureStore, digest: str) -> None:
    """Shows what the run reads."""
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
