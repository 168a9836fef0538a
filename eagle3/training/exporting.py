"""The drafter of any checkpoint, as SGLang and vLLM load it.

A training exports the drafter with the best held-out tau by itself. Its config.json and vocabulary maps are those of
all drafters of the run, so that neither store nor target's weights are read.
"""

import json
import logging
from pathlib import Path

import torch

from eagle3.config import UserError
from eagle3.draft.export import TRAINED_ON, export_drafter, load_drafter
from eagle3.draft.serving_config import RECORD_KEY
from eagle3.draft.target_weights import load_target_config
from eagle3.tracking import read_provenance
from eagle3.training.checkpoints import STEP_PATTERN, UNREADABLE, Checkpoint, read_checkpoint
from eagle3.training.engine import EMA, MASTER
from eagle3.training.trainer import DRAFTER_NAME

logger = logging.getLogger(__name__)


def export_checkpoint(path: Path, out: Path, target: Path | None = None) -> None:
    """Writes the drafter of a checkpoint, of averaged weights where the run keeps them, as its validations use them.

    Raises:
        UserError: the checkpoint is damaged or of no run of ours, or the target is another.
    """
    run_dir = path.parent
    if not path.is_dir() or STEP_PATTERN.fullmatch(path.resolve().name) is None:
        own = ", ".join(sorted(each.name for each in path.glob("step-*")))
        remedy = f"name one of {own} in it" if own else "correct the path"
        raise UserError(f"a checkpoint must be a directory RUN/step-NNNNNN, got {str(path)!r}; {remedy}")
    best = run_dir / DRAFTER_NAME
    if not best.is_dir():
        raise UserError(
            f"a checkpoint must be RUN/step-NNNNNN of a run that has been validated once, got {str(path)!r} without "
            f"{best}; let the training go on to its first validation (run.validate_every)"
        )
    if out.resolve() == best.resolve():
        raise UserError(f"--out must leave the best drafter where it is, got {str(out)!r}; name another directory")
    try:
        checkpoint = read_checkpoint(path)
    except UNREADABLE as error:
        raise UserError(f"a checkpoint must be whole, got {error} ({path}); take another one of the run") from error
    sessions = read_provenance(run_dir)["sessions"]
    target_config = load_target_config(target or Path(sessions[-1]["config"]["target"]["path"]))
    drafter = load_drafter(best, target_config)
    with checkpoint.open_tensors() as tensors, torch.no_grad():
        stored = set(tensors.keys())
        for name, parameter in drafter.named_parameters():
            kind = EMA if f"{EMA}.{name}" in stored else MASTER
            parameter.copy_(tensors.get_tensor(f"{kind}.{name}"))
    record = json.loads((best / "config.json").read_text(encoding="utf-8")).get(RECORD_KEY, {})
    trained_on = {name: record[name] for name in TRAINED_ON if name in record}
    export_drafter(drafter, out, target_config=target_config, card=_card(checkpoint), trained_on=trained_on)
    logger.info("%s: the drafter of step %d, %s", out, checkpoint.state.step, _tau_text(checkpoint))


def _tau_text(checkpoint: Checkpoint) -> str:
    state = checkpoint.state
    if state.validated_step != state.step or state.tau is None:
        return "which was not validated"
    return f"with a held-out tau of {state.tau:.3f}"


def _card(checkpoint: Checkpoint) -> str:
    return (
        f"# EAGLE-3 drafter of a checkpoint\n\nStep {checkpoint.state.step} of {checkpoint.path.parent.name}, "
        f"{_tau_text(checkpoint)}.\n"
    )
