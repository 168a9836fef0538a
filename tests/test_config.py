"""Settings: strict, typed, every problem at once."""

import math
from pathlib import Path
from typing import Any

import pytest

from eagle3.config import EvaluateConfig, ExtractConfig, TrainConfig, UserError, config_to_dict
from eagle3.config_file import CONFIG_ROOT, find_config, load_config

COMMANDS = {"extract": ExtractConfig, "train": TrainConfig, "evaluate": EvaluateConfig}
MINIMAL_TRAIN = ["target.path=target", "data.path=store"]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_every_shipped_config_loads() -> None:
    paths = sorted(path for path in CONFIG_ROOT.glob("*/*.yaml") if path.parent.name in COMMANDS)
    for path in paths:
        load_config(COMMANDS[path.parent.name], path)
    names = [f"{path.parent.name}/{path.name}" for path in paths]
    assert names == [
        "evaluate/default.yaml",
        "evaluate/demo.yaml",
        "evaluate/sglang.yaml",
        "extract/default.yaml",
        "extract/demo.yaml",
        "extract/kimi_k2_5.yaml",
        "train/demo.yaml",
        "train/drafter.yaml",
        "train/kimi_k2_5.yaml",
    ]


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "target: {path: a}\ndata: {path: b, seed: 1}\n")
    config = load_config(TrainConfig, path, ["data.seed=7", "optimizer.learning_rate=1e-3", "run.mixed_precision=no"])
    assert (config.target.path, config.data.seed) == ("a", 7)
    assert config.optimizer.learning_rate == 1e-3
    assert config.run.mixed_precision == "no"


def test_all_problems_are_reported_at_once_with_suggestions(tmp_path: Path) -> None:
    text = "target: {path: a, dtpye: bfloat16}\ndata: {path: b, seed: soon}\noptimiser: {}\n"
    path = write(tmp_path / "a.yaml", text)
    with pytest.raises(UserError) as error:
        load_config(TrainConfig, path, ["run.mixed_precision=fp16", "noequals", "optimizer.betas=[0.9, x]"])
    message = str(error.value)
    assert message.startswith(f"6 problems in the settings ({path} and the command line):")
    assert "target.dtpye is not a setting; did you mean target.dtype?" in message
    assert "data.seed must be a whole number, got 'soon'" in message
    assert "optimiser is not a setting; did you mean optimizer?" in message
    assert "run.mixed_precision must be one of 'no', 'bf16', got 'fp16'" in message
    assert "an override must be section.field=value, got 'noequals'" in message
    assert "optimizer.betas[1] must be a number, got 'x'" in message


def test_a_deepspeed_file_that_is_not_there_is_refused_as_other_names_are() -> None:
    with pytest.raises(UserError) as error:
        load_config(TrainConfig, None, [*MINIMAL_TRAIN, "run.deepspeed=zero3", "run.mixed_precision=fp16"])
    assert str(error.value).splitlines()[1:] == [
        "  run.mixed_precision must be one of 'no', 'bf16', got 'fp16'",
        "  run.deepspeed must be 'zero1', 'zero2' or the path of a DeepSpeed JSON, got 'zero3'",
    ]
    for name in ("zero1", "zero2.json", str(CONFIG_ROOT / "deepspeed" / "zero1.json")):
        assert load_config(TrainConfig, None, [*MINIMAL_TRAIN, f"run.deepspeed={name}"]).run.deepspeed == name


def test_required_settings_are_named() -> None:
    with pytest.raises(UserError, match=r"target is required \(a mapping\)[\s\S]*data is required"):
        load_config(TrainConfig, None)


def test_a_section_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(UserError, match=r"target must be a mapping of settings, got 'x'; known here: target\.path, "):
        load_config(TrainConfig, None, ["target=x", "data.path=store"])


@pytest.mark.parametrize("override", ["data.seed=true", "data.seed=1.5", "run.dir=null", "run.deterministic=1"])
def test_kinds_are_not_mixed_up(override: str) -> None:
    with pytest.raises(UserError, match="1 problem"):
        load_config(TrainConfig, None, [*MINIMAL_TRAIN, override])


@pytest.mark.parametrize("name", ["12:30", "2026-11-30", "2026-02-30", "0o17", "010", "0x10", "1" * 5000])
def test_a_name_stays_as_it_was_typed(tmp_path: Path, name: str) -> None:
    """YAML 1.1 makes 750, a date, a ValueError, 8 and 16 of them."""
    overrides = ["target.path=t", "data.path=s"]
    if len(name) < 100:
        assert load_config(TrainConfig, None, [*overrides, f"tracking.name={name}"]).tracking.name == name
        path = tmp_path / "c.yaml"
        path.write_text(f"tracking:\n  name: {name}\n")
        assert load_config(TrainConfig, path, overrides).tracking.name == name
    with pytest.raises(UserError, match=r"run\.epochs must be a whole number, got"):
        load_config(TrainConfig, None, [*overrides, f"run.epochs={name}"])


@pytest.mark.parametrize(
    ("text", "value"), [("1e-4", 1e-4), ("1.5e-3", 1.5e-3), (".5", 0.5), ("3", 3.0), (".inf", math.inf)]
)
def test_numbers_are_read_as_before(text: str, value: float) -> None:
    overrides = ["target.path=t", "data.path=s", f"optimizer.learning_rate={text}", "run.epochs=12", "data.seed=-3"]
    config = load_config(TrainConfig, None, overrides)
    assert (config.optimizer.learning_rate, config.run.epochs, config.data.seed) == (value, 12, -3)


def test_a_file_that_is_not_yaml_or_no_mapping_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="config must be YAML in UTF-8"):
        load_config(TrainConfig, write(tmp_path / "a.yaml", "a: [1"))
    with pytest.raises(UserError, match="config must be a mapping of settings, got list"):
        load_config(TrainConfig, write(tmp_path / "b.yaml", "- 1\n"))


def test_a_setting_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="1 problem") as error_info:
        load_config(TrainConfig, None, [*MINIMAL_TRAIN, "data.seed=1", "data.seed=2"])
    assert "data.seed must be given once, got 'data.seed=1' and 'data.seed=2'; leave one away" in str(error_info.value)
    path = write(tmp_path / "a.yaml", "data:\n  seed: 1\n  path: a\n  seed: 2\n")
    with pytest.raises(UserError, match=rf"config must be YAML in UTF-8, got {path}: seed comes twice\n.*line 2"):
        load_config(TrainConfig, path)


def test_a_list_says_what_its_entries_are() -> None:
    with pytest.raises(UserError, match=r"target.capture_layers must be a list, each a whole number, got 3"):
        load_config(TrainConfig, None, [*MINIMAL_TRAIN, "target.capture_layers=3"])


@pytest.mark.parametrize(
    ("config", "others", "name"),
    [
        (ExtractConfig, ["target.path=t"], "store.path"),
        (TrainConfig, MINIMAL_TRAIN, "run.dir"),
        (EvaluateConfig, [], "out"),
    ],
)
def test_nothing_is_written_to_urls(config: Any, others: list[str], name: str) -> None:
    load_config(config, None, [*others, f"{name}=a/b"])
    with pytest.raises(UserError, match=rf"{name} must be a directory: nothing is written to URLs, got 's3://a/b'"):
        load_config(config, None, [*others, f"{name}=s3://a/b"])


def test_a_config_is_found_as_typed_or_among_the_shipped_ones(tmp_path: Path) -> None:
    typed = write(tmp_path / "mine.yaml", "")
    assert find_config(str(typed), "train") == typed
    assert find_config("drafter.yaml", "train") == CONFIG_ROOT / "train" / "drafter.yaml"
    assert find_config("drafter", "train") == CONFIG_ROOT / "train" / "drafter.yaml"
    with pytest.raises(UserError, match=r"--config must be a file, got 'nope.yaml' .*drafter.yaml"):
        find_config("nope.yaml", "train")


def test_a_config_prints_as_plain_values() -> None:
    printed = config_to_dict(load_config(TrainConfig, None, MINIMAL_TRAIN))
    assert printed["objective"] == {
        "loss": "cross_entropy",
        "ttt_steps": 7,
        "ttt_decay": 0.8,
        "renormalise": True,
        "count": "step0",
        "drop_rejected": False,
    }
