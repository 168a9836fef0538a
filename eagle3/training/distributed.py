"""Ranks, and what DDP or DeepSpeed wraps around the module.

accelerate calls every rank 0 of 1 under DeepSpeed on a CPU, so rank and world size are read from torch.distributed,
here and nowhere else.
"""

import contextlib
import datetime
import json
import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import DeepSpeedPlugin, DistributedType
from torch.nn.parallel import DistributedDataParallel

from eagle3.config import TrainConfig, UserError
from eagle3.config_file import find_deepspeed
from eagle3.words import counted

T = TypeVar("T")

# What the step in optimizer_step.py relies on; a DeepSpeed file that says otherwise is refused.
OWNED_SETTINGS = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
REFUSED_SECTIONS = ("optimizer", "scheduler", "fp16", "torch_autocast")


@dataclass(frozen=True)
class World:
    """This process among the ranks."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """True on the rank that writes files and logs."""
        return self.rank == 0


@dataclass(frozen=True)
class Setup:
    """What runs the steps: one process, DDP, or DeepSpeed at a ZeRO stage."""

    zero_stage: int | None  # null: no DeepSpeed
    num_ranks: int

    def __str__(self) -> str:
        ranks = counted(self.num_ranks, "rank")
        if self.zero_stage is not None:
            return f"DeepSpeed ZeRO-{self.zero_stage} over {ranks}"
        return f"DDP over {ranks}" if self.num_ranks > 1 else "one process"


def quiet_other_ranks() -> None:
    """Lets the main rank alone log; before there is a process group the launcher's word is all there is."""
    if os.environ.get("RANK", "0") != "0":
        logging.getLogger("eagle3").setLevel(logging.ERROR)


def start(config: TrainConfig) -> tuple[Accelerator, World]:
    """Joins the other ranks and picks the device.

    Raises:
        UserError: the launcher cannot give what `run.deepspeed` asks for.
    """
    use_cpu = config.target.device == "cpu" or not torch.cuda.is_available()
    if config.target.device == "cuda" and use_cpu:
        raise UserError("target.device must be a device of this machine, got 'cuda' without a GPU; use auto or cpu")
    _check_launcher(config, use_cpu)
    deepspeed = None if config.run.deepspeed is None else read_deepspeed_config(config)
    if deepspeed is not None:
        _prepare_for_deepspeed(use_cpu)
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it, before CUDA starts
        torch.use_deterministic_algorithms(True)
        # Nothing here reads such memory, and to fill it costs a pass; torch has no types for it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    handlers: list[Any] = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    if "LOCAL_RANK" in os.environ:
        # A collective's own end, which names no rank, comes after that of watch.py, which does.
        timeout = datetime.timedelta(minutes=2 * config.run.timeout)
        handlers.append(InitProcessGroupKwargs(backend="gloo" if use_cpu else "nccl", timeout=timeout))
    accelerator = Accelerator(
        # With cpu=True accelerate drops DeepSpeed without a word; DS_ACCELERATOR says it there.
        cpu=use_cpu and deepspeed is None,
        # Autocast is the module's own, so that training and validation share it.
        mixed_precision="no" if deepspeed is None else config.run.mixed_precision,
        deepspeed_plugin=None if deepspeed is None else DeepSpeedPlugin(hf_ds_config=deepspeed),
        kwargs_handlers=handlers,
    )
    if dist.is_initialized():
        return accelerator, World(dist.get_rank(), dist.get_world_size(), accelerator.device)
    return accelerator, World(0, 1, accelerator.device)


def read_deepspeed_config(config: TrainConfig) -> dict[str, Any]:
    """Reads the DeepSpeed settings that `run.deepspeed` names, completed with what the run's own settings say.

    Raises:
        UserError: the file asks for ZeRO-3, or it contradicts the run.
    """
    assert config.run.deepspeed is not None
    path = find_deepspeed(config.run.deepspeed)
    assert path is not None, f"a config names a DeepSpeed file that exists, got {config.run.deepspeed!r}"
    try:
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"a DeepSpeed config must be JSON, got {error} ({path}); correct it") from None
    _check_sections(settings, path)
    zero: dict[str, Any] = settings.get("zero_optimization", {})
    stage = zero.get("stage")
    if stage not in (1, 2):
        reason = "; draft heads are under 2 B parameters, so sharding the weights gains nothing" if stage == 3 else ""
        raise UserError(
            f"zero_optimization.stage must be 1 or 2, got {stage!r} ({path}){reason}; "
            f"use run.deepspeed=zero1 or run.deepspeed=zero2"
        )
    problems = [f"  {name} must not be there" for name in REFUSED_SECTIONS if name in settings]
    problems += [f"  zero_optimization.{name} must not be there" for name in zero if name.startswith("offload_")]
    owned = OWNED_SETTINGS | {"gradient_clipping": config.optimizer.max_grad_norm}
    for name, value in owned.items():
        if settings.get(name, "auto") not in ("auto", value):
            problems.append(f"  {name} must be {value!r}, as this run sets it, got {settings[name]!r}")
    bf16 = config.run.mixed_precision == "bf16"
    if settings.get("bf16", {}).get("enabled", "auto") not in ("auto", bf16):
        problems.append(f"  bf16.enabled must be {bf16}, as run.mixed_precision says, got {not bf16}")
    if problems:
        raise UserError(f"a DeepSpeed config must leave to the run what the run sets ({path}):\n" + "\n".join(problems))
    return settings | owned | {"bf16": settings.get("bf16", {}) | {"enabled": bf16}}


def check_setup(config: TrainConfig, accelerator: Accelerator, engine: Any, world: World) -> Setup:
    """Returns what `prepare` made of the module, after comparing it with what the config asks for.

    Raises:
        UserError: they differ.
    """
    stage = None if config.run.deepspeed is None else read_deepspeed_config(config)["zero_optimization"]["stage"]
    wanted = Setup(stage, int(os.environ.get("WORLD_SIZE", "1")))
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        seen = Setup(engine.zero_optimization_stage(), dist.get_world_size())
    else:
        seen = Setup(None, world.size if isinstance(engine, DistributedDataParallel) else 1)
    compare_setups(wanted, seen)
    return seen


def compare_setups(wanted: Setup, seen: Setup) -> None:
    """Refuses to train with anything else than what was asked for.

    Raises:
        UserError: they differ.
    """
    if wanted != seen:
        raise UserError(
            f"the run must be {wanted}, as run.deepspeed and the launcher say, got {seen}; "
            f"start it with `accelerate launch train.py` without --cpu or --use_deepspeed, or with torchrun"
        )


def reduce_sum(values: torch.Tensor) -> torch.Tensor:
    """Returns the sum over ranks."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def on_every_rank(condition: bool, world: World) -> bool:
    """Tells whether something is so on every rank, on every rank."""
    if world.size == 1:
        return condition  # without a wait for the device
    return float(reduce_sum(torch.tensor(float(not condition), device=world.device))) == 0


def gather(value: T) -> list[T]:
    """Returns every rank's value, in rank order, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_main(value: T) -> T:
    """Returns the main rank's value on every rank."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """Ends all ranks if one of them cannot do what is in the block, which may be another thing on each.

    Raises:
        ChildProcessError: on the ranks that could; in the block there must be no collective.
    """
    error: UserError | OSError | None = None
    try:
        yield
    except (UserError, OSError) as raised:
        error = raised
    errors = [f"rank {rank} stopped: {said}" for rank, said in enumerate(gather(error and str(error))) if said]
    if error is not None:
        raise error
    if errors:
        raise ChildProcessError(errors[0])


def check_same(what: str, value: str) -> None:
    """Refuses to train with ranks that see different data.

    Raises:
        UserError: the ranks' values differ.
    """
    values = gather(value)
    if len(set(values)) > 1:
        raise UserError(f"{what} must be the same on every rank, got {values} in rank order; give all the same files")


def _check_launcher(config: TrainConfig, use_cpu: bool) -> None:
    env = os.environ
    if use_cpu and "LOCAL_RANK" not in env and "ACCELERATE_USE_CPU" in env and "MASTER_PORT" in env:
        raise UserError(
            "accelerate must start the processes it was asked for, got one: without a GPU --num_processes alone "
            "starts no second one; add --multi_gpu, which means several processes also on a CPU, or use torchrun"
        )
    num_here, num_gpus = int(env.get("LOCAL_WORLD_SIZE", "1")), 0 if use_cpu else torch.cuda.device_count()
    hidden = num_gpus == 1 and "CUDA_VISIBLE_DEVICES" in env  # a launcher may show each process its own
    if not use_cpu and num_here > num_gpus and not hidden:
        raise UserError(
            f"every process must have a GPU of its own, got {num_here} processes on a machine with {num_gpus}; "
            f"start {num_gpus}, with --num_processes or a file of configs/accelerate/"
        )
    if config.run.deepspeed is not None and env.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true"):
        raise UserError(
            f"run.deepspeed must be null under `accelerate launch --cpu`, got {config.run.deepspeed!r}: accelerate "
            f"drops DeepSpeed there; leave --cpu away, a machine without a GPU is noticed by itself"
        )
    if config.run.deepspeed is None and env.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise UserError(
            "run.deepspeed must be set under `accelerate launch --use_deepspeed`, got null; "
            "set run.deepspeed=zero2, or leave --use_deepspeed away"
        )


def _prepare_for_deepspeed(use_cpu: bool) -> None:
    """Gives DeepSpeed the process group and the device that a launcher without ranks does not give it.

    deepspeed picks its device when it is imported, so that happens here and not at the top.
    """
    if "LOCAL_RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if use_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed.ops

        # DeepSpeed would spend a minute compiling a shared-memory all-reduce; gloo's is enough for a head.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _check_sections(settings: Any, path: Path) -> None:
    """Compares the kinds of what is read here.

    Raises:
        UserError: they are others.
    """
    problems = [] if isinstance(settings, dict) else [f"  the file must be a mapping, got {settings!r}"]
    for name in () if problems else ("zero_optimization", "bf16"):
        if not isinstance(settings.get(name, {}), dict):
            problems.append(f"  {name} must be a mapping, got {settings[name]!r}")
    if problems:
        raise UserError(f"a DeepSpeed config must have sections of settings ({path}):\n" + "\n".join(problems))
