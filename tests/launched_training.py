"""Trains as train.py does, in a process that a test launches, and tells what it saw.

FACTS is a directory that gets one JSON file from each rank; --send sends this process a signal before a step, or with
--micro-step before the backward of one of its micro-steps. The signal 0 stands for a GPU without memory left,
-1 for a rank that hangs.
"""

import argparse
import gc
import json
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from eagle3.cli import run_command
from eagle3.config import TrainConfig
from eagle3.config_file import load_config
from eagle3.training import trainer
from eagle3.training.batches import StepBatch
from eagle3.training.checkpoints import TrainState
from eagle3.training.engine import Engine
from eagle3.training.optimizer_step import StepResult, take_step
from eagle3.training.saves import Saver


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("facts", type=Path)
    parser.add_argument("--send", type=int, nargs=3, metavar=("SIGNAL", "RANK", "STEP"), default=(0, 0, 0))
    parser.add_argument("--micro-step", type=int, default=0)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    number, signalled_rank, step = arguments.send
    facts: dict[str, Any] = {"num_steps": 0}

    num_backward = [0]

    def send(engine: Engine) -> None:
        if facts["num_steps"] == step and engine.world.rank == signalled_rank:
            if number == 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            if number == -1:
                time.sleep(600)
            os.kill(os.getpid(), signal.Signals(number))

    backward = Engine.backward

    def noted_backward(engine: Engine, loss: Tensor) -> None:
        num_backward[0] += 1
        if arguments.micro_step and num_backward[0] == arguments.micro_step:
            send(engine)
        backward(engine, loss)

    def take_noted_step(engine: Engine, batch: StepBatch, **settings: Any) -> StepResult:
        facts["num_steps"] += 1
        if arguments.micro_step == 0:
            send(engine)
        num_backward[0] = 0
        result = take_step(engine, batch, **settings)
        facts.update(
            rank=engine.world.rank,
            setup=str(engine.setup),
            world_size=engine.world.size,
            global_steps=engine.model.global_steps if engine.uses_deepspeed else None,
            wrapper=type(engine.model).__name__,
            dtypes=sorted({str(parameter.dtype) for parameter in engine.module.parameters()}),
        )
        return result

    save = Saver.save

    def save_whole(saver: Saver, state: TrainState) -> Path:
        path = save(saver, state)
        if number == signal.SIGKILL:
            saver.wait()  # a disk may take longer than the steps to the kill
        return path

    end_training = Accelerator.end_training

    def end_noted_training(accelerator: Accelerator) -> None:
        # Through type(), for some of what lives is a proxy whose isinstance imports what it stands for.
        facts["num_ddp_at_end"] = sum(type(each) is DistributedDataParallel for each in gc.get_objects())
        end_training(accelerator)

    with (
        mock.patch.object(trainer, "take_step", take_noted_step),
        mock.patch.object(Engine, "backward", noted_backward),
        mock.patch.object(Saver, "save", save_whole),
        mock.patch.object(Accelerator, "end_training", end_noted_training),
    ):
        trainer.train(load_config(TrainConfig, arguments.config, arguments.overrides))
    (arguments.facts / f"rank{facts['rank']}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    run_command(main)
