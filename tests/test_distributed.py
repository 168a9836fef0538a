"""What was asked for is what runs, or an error says why not."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from tiny_training import tiny_config

from eagle3.config import DeepSpeedFile, TrainConfig, UserError
from eagle3.config_file import CONFIG_ROOT
from eagle3.training import distributed
from eagle3.training.distributed import (
    Setup,
    check_same,
    compare_setups,
    ending_together,
    gather,
    read_deepspeed_config,
    start,
)

SHIPPED = ["zero1", "zero2"]
LAUNCHER_VARIABLES = ("LOCAL_RANK", "ACCELERATE_USE_CPU", "ACCELERATE_USE_DEEPSPEED", "MASTER_PORT", "RANK")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def config_with(deepspeed: str | Path | None = None, device: str = "cpu") -> TrainConfig:
    config = tiny_config(Path("store"), Path("target"), Path("run"))
    run = dataclasses.replace(config.run, deepspeed=None if deepspeed is None else DeepSpeedFile(str(deepspeed)))
    target = dataclasses.replace(config.target, device=device)  # type: ignore[arg-type]
    return dataclasses.replace(config, run=run, target=target)


def write_settings(tmp_path: Path, **settings: object) -> Path:
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}} | settings))
    return path


def test_the_shipped_deepspeed_configs_are_those_tested_below() -> None:
    assert sorted(path.stem for path in (CONFIG_ROOT / "deepspeed").iterdir()) == SHIPPED


@pytest.mark.parametrize("stem", SHIPPED)
def test_every_shipped_deepspeed_config_is_accepted(stem: str) -> None:
    path = CONFIG_ROOT / "deepspeed" / f"{stem}.json"
    for name in (path, path.stem, path.name):
        settings = read_deepspeed_config(config_with(name))
        assert settings["zero_optimization"]["stage"] == int(path.stem[-1])
        assert settings["gradient_clipping"] == 1.0
        assert settings["gradient_accumulation_steps"] == 1
        assert settings["bf16"] == {"enabled": False}
        assert settings["data_types"]["grad_accum_dtype"] == "fp32"


def test_every_shipped_accelerate_config_starts_its_number_of_processes() -> None:
    shipped = sorted((CONFIG_ROOT / "accelerate").iterdir())
    launched = {}
    for path in shipped:
        typed = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
        arguments, *_ = _validate_launch_command(typed)
        assert not arguments.use_deepspeed, path  # which run.deepspeed switches on
        assert arguments.mixed_precision == "no", path  # which is run.mixed_precision's
        launched[path.stem] = (arguments.num_processes, arguments.num_machines, bool(arguments.multi_gpu))
    assert launched == {
        "1gpu": (1, 1, False),
        "2gpu": (2, 1, True),
        "2nodes": (16, 2, True),
        "4gpu": (4, 1, True),
        "8gpu": (8, 1, True),
    }


def test_zero_3_is_refused_with_a_reason(tmp_path: Path) -> None:
    path = write_settings(tmp_path, zero_optimization={"stage": 3})
    with pytest.raises(UserError, match=r"stage must be 1 or 2, got 3 .*under 2 B parameters.*run\.deepspeed=zero1"):
        read_deepspeed_config(config_with(path))


def test_a_deepspeed_config_must_be_json(tmp_path: Path) -> None:
    path = tmp_path / "deepspeed.json"
    path.write_text("{")
    with pytest.raises(UserError, match="a DeepSpeed config must be JSON"):
        read_deepspeed_config(config_with(path))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], r"the file must be a mapping, got \[\]"),
        ({"zero_optimization": 1, "bf16": True}, r"zero_optimization must be a mapping, got 1\n  bf16 .*, got True"),
        ({"zero_optimization": None}, "zero_optimization must be a mapping, got None"),
    ],
)
def test_sections_of_another_kind_are_named(tmp_path: Path, settings: object, said: str) -> None:
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps(settings))
    with pytest.raises(UserError, match=rf"a DeepSpeed config must have sections of settings \(.*\):\n  {said}"):
        read_deepspeed_config(config_with(path))


def test_contradictions_are_named_all_at_once(tmp_path: Path) -> None:
    path = write_settings(
        tmp_path,
        zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}},
        optimizer={"type": "Adam"},
        gradient_accumulation_steps=4,
        gradient_clipping=0.5,
        bf16={"enabled": True},
    )
    with pytest.raises(UserError) as caught:
        read_deepspeed_config(config_with(path))
    message = str(caught.value)
    for part in (
        "optimizer must not be there",
        "zero_optimization.offload_optimizer must not be there",
        "gradient_accumulation_steps must be 1, as this run sets it, got 4",
        "gradient_clipping must be 1.0, as this run sets it, got 0.5",
        "bf16.enabled must be False, as run.mixed_precision says, got True",
    ):
        assert part in message


def test_another_setup_than_asked_for_is_an_error() -> None:
    compare_setups(Setup(2, 8), Setup(2, 8))
    with pytest.raises(UserError, match=r"the run must be DeepSpeed ZeRO-2 over 2 ranks, .*, got one process"):
        compare_setups(Setup(2, 2), Setup(None, 1))
    with pytest.raises(UserError, match=r"the run must be DDP over 4 ranks, .*, got DeepSpeed ZeRO-2 over 4 ranks"):
        compare_setups(Setup(None, 4), Setup(2, 4))


def test_launchers_that_cannot_give_it_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    with pytest.raises(UserError, match=r"run\.deepspeed must be null under `accelerate launch --cpu`, got 'zero2'"):
        start(config_with("zero2"))
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(UserError, match=r"must start the processes it was asked for, got one: .*--multi_gpu"):
        start(config_with())
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(UserError, match=r"run\.deepspeed must be set under `accelerate launch --use_deepspeed`"):
        start(config_with())


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(UserError, match=r"a GPU of its own, got 8 processes on a machine with 1; start 1, with"):
        start(config_with(device="auto"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the error is that of a machine without a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match=r"target\.device must be a device of this machine, got 'cuda'"):
        start(config_with(device="cuda"))


def test_a_rank_that_cannot_go_on_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="mine"), ending_together():
        raise OSError("mine")
    with ending_together():
        pass
    monkeypatch.setattr(distributed, "gather", lambda value: ["no such run", value])
    with pytest.raises(ChildProcessError, match="rank 0 stopped: no such run"), ending_together():
        pass
    with pytest.raises(UserError, match="mine"), ending_together():
        raise UserError("mine")


def test_ranks_that_see_other_data_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gather("a") == ["a"]
    check_same("the store's digest", "a")
    monkeypatch.setattr(distributed, "gather", lambda value: [value, "b"])
    with pytest.raises(UserError, match=r"the store's digest must be the same on every rank, got \['a', 'b'\]"):
        check_same("the store's digest", "a")
