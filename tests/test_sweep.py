"""One file is a sweep for W&B and a grid without it."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from eagle3.commands.sweep import main, read_grid
from eagle3.config import TrainConfig, UserError
from eagle3.config_file import CONFIG_ROOT, find_config, load_config

FILES = sorted((CONFIG_ROOT / "sweep").glob("*.yaml"))


def test_every_point_of_every_file_is_a_training() -> None:
    assert [path.name for path in FILES] == ["demo.yaml"]
    points = read_grid(FILES[0])
    configs = [load_config(TrainConfig, find_config("demo.yaml", "train"), each.command[6:]) for each in points]
    assert [(each.optimizer.learning_rate, each.objective.ttt_steps) for each in configs] == [
        (3e-4, 4), (3e-4, 7), (1e-3, 4), (1e-3, 7),
    ]  # fmt: skip
    assert len({each.run.dir for each in configs}) == 4
    assert {each.run.resume for each in configs} == {"auto"}
    command = points[0].command
    assert command[:6] == ["/usr/bin/env", "accelerate", "launch", "train.py", "--config", "demo.yaml"]


def test_wandbs_agent_makes_the_same_command_of_the_file() -> None:
    sweep = yaml.safe_load(FILES[0].read_text())
    chosen = {"run.dir": "r", "optimizer.learning_rate": 0.001, "objective.ttt_steps": 7}
    arguments = create_sweep_command_args({"args": {name: {"value": value} for name, value in chosen.items()}})
    assert create_sweep_command(sweep["command"])[1:3] == ["accelerate", "launch"]
    config = load_config(TrainConfig, find_config("demo.yaml", "train"), arguments["args_no_hyphens"])
    assert (config.run.dir, config.optimizer.learning_rate, config.objective.ttt_steps) == ("r", 0.001, 7)


def write(path: Path, **changes: object) -> Path:
    sweep = {
        "program": "x.py",
        "command": ["${interpreter}", "${program}", "${args_no_hyphens}"],
        "method": "grid",
        "parameters": {"run.dir": {"value": str(path.parent / "runs")}, "a.b": {"values": [1, 2, 3]}},
    }
    path.write_text(yaml.safe_dump(sweep | changes, sort_keys=False))
    return path


def test_a_training_that_fails_does_not_stop_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('ran', *sys.argv[1:]); sys.exit('a.b=2' in sys.argv)"
    path = write(tmp_path / "s.yaml", command=["${interpreter}", "-c", code, "${args_no_hyphens}"])
    assert main([str(path)]) == 1
    ran = [line for line in capfd.readouterr().out.splitlines() if line.startswith("ran")]
    runs = tmp_path / "runs"
    assert ran == [f"ran run.dir={runs}/a.b={value} a.b={value} run.resume=auto" for value in (1, 2, 3)]
    assert main([str(path), "--dry-run"]) == 0
    assert "ran run.dir" not in capfd.readouterr().out


def test_a_file_that_is_no_grid_is_refused_with_all_reasons(tmp_path: Path) -> None:
    path = write(tmp_path / "s.yaml", method="bayes", command=["x"], parameters={"a.b": {"min": 0}})
    with pytest.raises(UserError) as error:
        read_grid(path)
    message = str(error.value)
    for part in (
        "a sweep's file must be a grid of trainings",
        "method must be 'grid', got 'bayes'",
        "command must be a list with ${args_no_hyphens}, got ['x']",
        "parameters.a.b must have a value or a list of values, got {'min': 0}",
        "parameters.run.dir must have one value",
    ):
        assert part in message, part
    write(path, program=None, parameters={"run.dir": {"value": None}, "a.b": {"values": []}})
    with pytest.raises(UserError) as error:
        read_grid(path)
    for part in (
        "program must be a file's name, as command has ${program}, got None",
        "parameters.run.dir must have one value, the name of the directory",
        "parameters.a.b must have a value or a list of values, got {'values': []}",
    ):
        assert part in str(error.value), part
    path.write_text("- 1")
    with pytest.raises(UserError, match=r"a sweep's file must be a mapping, got list"):
        read_grid(path)
    path.write_text("[")
    with pytest.raises(UserError, match=r"a sweep's file must be YAML in UTF-8, got"):
        read_grid(path)
    for path in (tmp_path, tmp_path / "none.yaml"):
        with pytest.raises(UserError, match=r"a sweep must be a YAML file, got no file at .*; see configs/sweep/"):
            main([str(path)])


def test_the_command_is_among_eagle3s() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "eagle3", "sweep", str(FILES[0]), "--dry-run"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.count("accelerate launch train.py --config demo.yaml run.dir=") == 4
