"""Trains as train.py does, in a process that a test launches, and tells what it saw.

FACTS is a directory that gets one JSON file from each rank; --send sends this process a signal before a step.
"""

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

from eagle3.cli import run_command
from eagle3.config import TrainConfig, load_config
from eagle3.training import trainer
from eagle3.training.batches import StepBatch
from eagle3.training.engine import Engine
from eagle3.training.optimizer_step import StepResult, take_step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("facts", type=Path)
    parser.add_argument("--send", type=int, nargs=3, metavar=("SIGNAL", "RANK", "STEP"), default=(0, 0, 0))
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    number, signalled_rank, step = arguments.send
    engines: list[Engine] = []

    def take_noted_step(engine: Engine, batch: StepBatch, **settings: Any) -> StepResult:
        engines.append(engine)
        if number and len(engines) == step and engine.world.rank == signalled_rank:
            os.kill(os.getpid(), signal.Signals(number))
        return take_step(engine, batch, **settings)

    with mock.patch.object(trainer, "take_step", take_noted_step):
        trainer.train(load_config(TrainConfig, arguments.config, arguments.overrides))
    engine = engines[-1]
    facts = {
        "setup": str(engine.setup),
        "world_size": engine.world.size,
        "num_steps": len(engines),
        "global_steps": engine.model.global_steps if engine.uses_deepspeed else None,
        "wrapper": type(engine.model).__name__,
        "dtypes": sorted({str(parameter.dtype) for parameter in engine.module.parameters()}),
    }
    (arguments.facts / f"rank{engine.world.rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    run_command(main)
