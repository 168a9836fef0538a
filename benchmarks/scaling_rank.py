"""One rank of benchmarks/scaling.py: trains from a store, case after case, and writes down what it saw.

torchrun starts it with a plan: a JSON file with cases, the stores, and where the figures go.
"""

import dataclasses
import gc
import itertools
import json
import shutil
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from store import drop_caches, measured, read_plain

from eagle3.config import DataConfig, DeepSpeedFile, DraftConfig, ObjectiveConfig, RunConfig, TargetConfig, TrainConfig
from eagle3.draft.model import Eagle3Drafter
from eagle3.features.store import FeatureStore
from eagle3.training.batches import Batches, Position
from eagle3.training.checkpoints import TrainState
from eagle3.training.distributed import gather, start
from eagle3.training.engine import Engine, TTTModule
from eagle3.training.memory import plan_memory
from eagle3.training.optimizer_step import StepResult, take_step
from eagle3.training.prefetch import prefetched
from eagle3.training.saves import Saver
from eagle3.training.sequence_split import Ranks
from train import D4096, D7168, TTT_STEPS, Shape, drafter_config, random_target

WARM_UP_STEPS = 3
COLD_WARM_UP_STEPS = 1  # of a pass over a store that is read once; kernels are compiled by then
SHAPES = {
    "tiny": Shape(64, 128, 4, 2, 16, 256, 512),
    "d4096": D4096,
    "d7168": D7168,
    "d7168-full": dataclasses.replace(D7168, draft_vocab_size=D7168.vocab_size),
}


@dataclass(frozen=True)
class Case:
    """One training that is timed."""

    shape: str
    zero: int  # stage
    batch_tokens: int  # of each rank's micro-batch, of which a step has one
    num_steps: int  # timed
    cold: bool = False  # the store is not in the page cache
    deterministic: bool = False
    save: bool = False  # also a checkpoint, in the middle of steps


def make_engine(case: Case) -> Engine:
    """Makes the engine as the trainer does, of a random drafter."""
    shape = SHAPES[case.shape]
    on_gpu = torch.cuda.is_available()
    config = TrainConfig(
        target=TargetConfig(path="random"),
        data=DataConfig(path="random"),
        draft=DraftConfig(draft_vocab_size=shape.draft_vocab_size),
        objective=ObjectiveConfig(ttt_steps=TTT_STEPS),
        run=RunConfig(
            mixed_precision="bf16" if on_gpu else "no",
            deepspeed=DeepSpeedFile(f"zero{case.zero}"),
            deterministic=case.deterministic,
        ),
    )
    accelerator, world = start(config)
    torch.manual_seed(0)
    with world.device:
        drafter = Eagle3Drafter(drafter_config(shape))
    drafter.set_draft_vocab(
        torch.zeros(shape.draft_vocab_size, dtype=torch.int64),
        torch.arange(shape.vocab_size) < shape.draft_vocab_size,
    )
    # The stores have normalisers.
    target = random_target(shape, world.device, torch.bfloat16 if on_gpu else torch.float32).drafted(drafter.target_ids)
    engine = Engine(config, accelerator, world, TTTModule(drafter, target, config.objective, bf16=on_gpu))
    if on_gpu:
        engine.module.memory_plan = plan_memory(drafter.config, engine.setup, target, TTT_STEPS, world.device)
    return engine


def measure(case: Case, store_path: Path) -> dict[str, Any]:
    """Makes an engine, times its steps, and lets go of it."""
    begin_bytes = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    engine = make_engine(case)
    try:
        return measure_steps(case, engine, store_path) | {"begin_bytes": gather(begin_bytes)}  # of each rank
    finally:
        # ZeRO hangs hooks on the parameters that hold the whole engine where Python's collector does not look.
        engine.model.destroy()


def measure_steps(case: Case, engine: Engine, store_path: Path) -> dict[str, Any]:
    """Times steps whose batches come from the store."""
    world = engine.world
    store = FeatureStore(store_path)
    indices = list(range(len(store)))
    samples_per_rank = case.batch_tokens // store.entries[0].num_tokens
    config = DataConfig(
        path=str(store_path), samples_per_step=samples_per_rank * world.size, batch_tokens=case.batch_tokens
    )
    ranks = Ranks(world.rank, world.size, None)
    batches = Batches(store, indices, config, ranks, TTT_STEPS, pin=world.device.type == "cuda")
    disk = None
    if case.cold:
        if world.is_main:
            drop_caches(store_path)
            disk = measured(lambda: read_plain(store_path, pin=world.device.type == "cuda"))
            drop_caches(store_path)
        gather(None)
    warm_up = COLD_WARM_UP_STEPS if case.cold else WARM_UP_STEPS
    positions = itertools.islice(batches.positions(Position()), warm_up + case.num_steps)
    waits: list[float] = []
    seconds: list[float] = []
    tokens: list[int] = []
    for batch in prefetched_steps(batches, positions, waits):
        started = time.perf_counter()
        result = take_step(engine, batch, learning_rate=1e-5)
        seconds.append(time.perf_counter() - started)
        tokens.append(batch.num_tokens)
        if len(seconds) == warm_up and world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
    synchronize(world.device)
    figures = figures_of(case, engine, waits[warm_up:], seconds[warm_up:], tokens[warm_up:], result)
    figures["disk"] = disk
    if case.save:
        figures["saved"] = measure_save(engine, batches, store_path.parent / "run")
    return figures


def prefetched_steps(batches: Batches, positions: Any, waits: list[float]) -> Any:
    """Yields batches as the trainer gets them, and notes how long each was waited for."""
    loaded = prefetched(batches.load, positions, 2)
    while True:
        started = time.perf_counter()
        batch = next(loaded, None)
        if batch is None:
            return
        waits.append(time.perf_counter() - started)
        yield batch


def figures_of(
    case: Case, engine: Engine, waits: list[float], seconds: list[float], tokens: list[int], result: StepResult
) -> dict[str, Any]:
    """Adds up a case's steps, over all ranks."""
    on_gpu = engine.world.device.type == "cuda"
    peaks = gather(torch.cuda.max_memory_allocated() if on_gpu else 0)
    total = sum(waits) + sum(seconds)
    shares = gather(sum(waits) / total)
    num_parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    plan = engine.module.memory_plan
    estimate = None if plan is None else plan.estimate(case.batch_tokens, case.batch_tokens)
    return {
        **dataclasses.asdict(case),
        "gpus": engine.world.size,
        "setup": str(engine.setup),
        "num_parameters": num_parameters,
        "tokens_per_step": tokens[0],
        "tokens_per_second": sum(tokens) / total,
        "ms_per_step": 1e3 * statistics.median(wait + step for wait, step in zip(waits, seconds, strict=True)),
        "data_wait_share": shares,  # of each rank
        "peak_bytes": peaks,  # of each rank
        "estimated_bytes": None if estimate is None else estimate.total,
        "estimate": str(estimate),
        "grad_norm": result.grad_norm,
    }


def measure_save(engine: Engine, batches: Batches, run_dir: Path) -> dict[str, Any]:
    """Saves between steps: how long the steps wait, and how long they take while the checkpoint is written."""
    run_dir.mkdir(exist_ok=True)
    batch = batches.load(Position())
    with Saver(engine, run_dir, RunConfig()) as saver:
        engine_state = TrainState(maths={}, store_digest="none", step=1)
        started = time.perf_counter()
        saver.save(engine_state)
        stall = time.perf_counter() - started
        steps = []
        for _ in range(5):
            at = time.perf_counter()
            take_step(engine, batch, learning_rate=1e-5)
            steps.append(time.perf_counter() - at)
        saver.wait()
        written = time.perf_counter() - started
    synchronize(engine.world.device)
    gather(None)
    shutil.rmtree(run_dir, ignore_errors=True)
    return {"stall_seconds": stall, "steps_beside_seconds": steps, "written_seconds": written,
            "num_bytes": engine.state_bytes}  # fmt: skip


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    figures: list[dict[str, Any]] = []
    for values in plan["cases"]:
        case = Case(**values)
        # accelerate keeps one DeepSpeed setting for a process's life.
        AcceleratorState._reset_state()
        torch.use_deterministic_algorithms(False)
        GradientState._reset_state()
        try:
            figures.append(measure(case, Path(plan["stores"][case.shape.removesuffix("-full")])))
        except torch.OutOfMemoryError as error:
            figures.append({**values, "out_of_memory": str(error)})
        for _ in range(2):  # DeepSpeed's parameters outlive a first pass, which ends the engine
            gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if not dist.is_initialized() or dist.get_rank() == 0:
            Path(plan["out"]).write_text(json.dumps(figures, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
