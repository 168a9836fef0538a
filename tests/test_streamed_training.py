"""A training whose states the target makes meanwhile is the training on a store of the same prompts."""

import dataclasses
import functools
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from conftest import write_tiny_target
from tiny_extractions import contents, make_config, prompt_rows, run_command_line
from tiny_training import tiny_config
from training_runs import (
    LAUNCH,
    ROOT,
    STEPS,
    TWO_RANKS,
    assert_same_bits,
    assert_same_training,
    launch,
    metrics_of,
    with_run,
)

import train as train_command
from eagle3.capture.answering import write_answers
from eagle3.capture.engine import SetAside
from eagle3.capture.extraction import run_extraction
from eagle3.capture.inprocess import TransformersEngine
from eagle3.capture.launch import ServerError
from eagle3.capture.progress import LiveProgress
from eagle3.capture.streaming import StateMaker, streamed_samples
from eagle3.cli import run_command
from eagle3.config import ExtractConfig, RegenerateConfig, StoreConfig, TrainConfig, UserError, config_to_dict
from eagle3.features.store import FeatureStore
from eagle3.features.stream import SampleStream, TokenSample
from eagle3.training import prefetch, trainer
from eagle3.training.engine import Engine
from eagle3.training.optimizer_step import take_step
from eagle3.training.packs import StreamReader
from eagle3.training.trainer import train
from eagle3.training.validation import validate


@pytest.fixture(scope="module")
def extraction(tmp_path_factory: pytest.TempPathFactory) -> ExtractConfig:
    """Settings of an extraction with the answers of the file, which has been run."""
    directory = tmp_path_factory.mktemp("extraction")
    target = write_tiny_target(directory / "target")
    given = RegenerateConfig(enabled=False)
    rows = prompt_rows(24)
    for name in ("any-order", "store"):
        # One at a time: batched with others, states are rounded otherwise, and six steps make 1e-4 of that.
        config = make_config(target, directory, rows, regenerate=given, batch_tokens=1)
        config = dataclasses.replace(config, store=StoreConfig(str(directory / name)))
        run_extraction(config)
        # A store has samples as they were captured, by length: in a file of that order both have the same numbers.
        order = [entry.sample_id for entry in FeatureStore(directory / name).entries]
        rows.sort(key=lambda row: order.index(row["id"]))
    return config


def stream_path(extraction: ExtractConfig) -> str:
    """Writes the settings beside the prompts, as train.py's data.path."""
    path = Path(extraction.store.path).with_name("live.yaml")
    path.write_text(yaml.safe_dump(config_to_dict(extraction)))
    return str(path)


def train_config(extraction: ExtractConfig, data_path: str, run_dir: Path) -> TrainConfig:
    config = tiny_config(Path(data_path), Path(extraction.target.path), run_dir)
    target = dataclasses.replace(config.target, capture_layers=None)
    data = dataclasses.replace(config.data, batch_tokens=400)
    config = dataclasses.replace(config, target=target, data=data)
    return with_run(config, max_steps=STEPS, save_every=3, validate_every=3, keep_last=9)


@pytest.fixture(scope="module")
def on_the_store(extraction: ExtractConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(train_config(extraction, extraction.store.path, tmp_path_factory.mktemp("store") / "run"))


def test_it_is_the_same_training_also_after_a_resume(
    extraction: ExtractConfig, on_the_store: Path, tmp_path: Path
) -> None:
    config = train_config(extraction, stream_path(extraction), tmp_path / "run")
    with streamed_samples(extraction, config.data.path) as samples:
        assert samples.num_bytes == 0
        run_dir = train(config, samples)
    assert_same_training(run_dir, on_the_store)
    shutil.rmtree(run_dir / f"step-{STEPS:06d}")
    with streamed_samples(extraction, config.data.path) as samples:
        assert train(with_run(config, resume="auto"), samples) == run_dir
    assert_same_training(run_dir, on_the_store)


def test_two_ranks_ask_for_their_own_samples(extraction: ExtractConfig, tmp_path: Path) -> None:
    told = {}
    for name, path in (("store", extraction.store.path), ("stream", stream_path(extraction))):
        config = train_config(extraction, path, tmp_path / name)
        data = dataclasses.replace(config.data, embeddings="host")
        config = dataclasses.replace(config, data=data)
        done = launch([*TWO_RANKS, "train.py"], config, tmp_path, "--config", "CONFIG")
        assert done.returncode == 0, done.stderr[-4000:]
        told[name] = done.stderr
    assert told["stream"].count("samples come from transformers while they are trained on") == 1, "the main rank's"
    assert_same_bits(tmp_path / "stream", tmp_path / "store")


def test_samples_are_those_of_the_store_and_make_its_normalisers_where_nobody_else_does(
    extraction: ExtractConfig, monkeypatch: pytest.MonkeyPatch, on_the_store: Path, tmp_path: Path
) -> None:
    store = FeatureStore(extraction.store.path)
    with streamed_samples(extraction, "live.yaml") as samples:
        assert [entry.sample_id for entry in samples.entries] == [entry.sample_id for entry in store.entries]
        for name in ("offset", "num_tokens", "last_offset", "num_last", "num_supervised"):
            assert [getattr(e, name) for e in samples.entries] == [getattr(e, name) for e in store.entries], name
        for made, index in zip(samples.read([3, 0]), [3, 0], strict=True):
            stored = store[index]
            assert made is not None
            for name in (
                "input_ids",
                "loss_mask",
                "last_rows",
                "aux_hidden_states",
                "last_hidden_states",
                "target_logz",
            ):
                assert torch.equal(getattr(made, name), getattr(stored, name)), name
    monkeypatch.setattr(TransformersEngine, "log_normaliser", lambda engine, last: None)  # as servers do
    config = train_config(extraction, stream_path(extraction), tmp_path / "run")
    with streamed_samples(extraction, config.data.path) as samples:
        assert_same_training(train(config, samples), on_the_store)


def without(ids: Sequence[int]) -> object:
    """Returns TransformersEngine.capture_each that gives up the samples at these places of each call."""
    capture_each = TransformersEngine.capture_each

    def some(engine: TransformersEngine, sequences: Iterator[Sequence[int]]) -> Iterator[object]:
        for place, result in capture_each(engine, sequences):
            yield (place, SetAside("the server did not survive it")) if place in ids else (place, result)

    return some


def test_a_sample_without_states_teaches_nothing_and_is_named_once(
    extraction: ExtractConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    config = dataclasses.replace(extraction, max_quarantined_share=0.5)
    caplog.set_level(logging.WARNING)
    with streamed_samples(config, "live.yaml") as samples:
        monkeypatch.setattr(TransformersEngine, "capture_each", without([0]))
        for _ in range(2):
            lost, kept = samples.read([5, 6])
        assert lost is None
        assert kept is not None
        packed = StreamReader(samples, pin=False).read([5, 6])
        assert not packed.is_blank
        assert packed.tokens.loss_mask.tolist() == [False] * samples.entries[5].num_tokens + kept.loss_mask.tolist()
        alone = StreamReader(samples, pin=False).read([5])
        assert alone.is_blank
        assert torch.equal(alone.tokens.loss_mask, samples.loss_mask(5))
        name = samples.entries[5].sample_id
        assert caplog.text.count(f"sample {name!r} is left out of the training: the server did not survive it") == 1
        # A pack of it alone, too.
        run_dir = train(train_config(extraction, stream_path(extraction), tmp_path / "run"), samples)
    assert all(line["loss"] > 0 for line in metrics_of(run_dir) if "loss" in line)


def test_too_many_of_them_end_the_training(extraction: ExtractConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with streamed_samples(dataclasses.replace(extraction, max_quarantined_share=0.1), "live.yaml") as samples:
        monkeypatch.setattr(TransformersEngine, "capture_each", without([0, 1, 2]))
        with pytest.raises(UserError, match=r"at most 2 \(max_quarantined_share\), got 3, the latest .*survive it;"):
            samples.read([0, 1, 2])


def test_the_targets_own_answers_are_written_first(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tiny_target, tmp_path)
    path = stream_path(config)
    asked = f"have it answered first: python extract.py --config {path} --answers-only"

    def streamed(config: ExtractConfig) -> dict[str, TokenSample]:
        with streamed_samples(config, path) as samples:
            return {entry.sample_id: samples.tokens[number] for number, entry in enumerate(samples.entries)}

    with pytest.raises(UserError, match=f"must be where the target's answers are, got none .*; {asked}"):
        streamed(config)
    assert write_answers(config).num_generated > 0
    # As a kill leaves it, within a line.
    log = Path(config.store.path) / "answers.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole[: whole.index(b"row-4") + 100])
    with pytest.raises(UserError, match=f"got 6 of 10 without an answer, first 'row-4' .*; {asked}"):
        streamed(config)
    run_command_line(monkeypatch, "--config", path, "--answers-only")
    assert log.read_bytes() == whole
    assert not list(log.parent.glob("shard-*"))
    assert write_answers(config).num_generated == 0, "all of them are there"
    tokens = streamed(config)
    other = dataclasses.replace(config, regenerate=dataclasses.replace(config.regenerate, seed=1))
    with pytest.raises(UserError, match=r"(?s)only with the settings it was begun with .*generation.seed must be 0"):
        streamed(other)
    # An extraction into the same store keeps these answers.
    assert run_extraction(config).num_generated == 0
    stored = contents(Path(config.store.path))
    assert stored.keys() == tokens.keys()
    for name, sample in stored.items():
        assert torch.equal(sample.input_ids, tokens[name].input_ids)
        assert torch.equal(sample.loss_mask, tokens[name].loss_mask)
    given = dataclasses.replace(config, regenerate=RegenerateConfig(enabled=False))
    given = dataclasses.replace(given, store=dataclasses.replace(given.store, codec="int8", num_writers=2))
    with pytest.raises(UserError) as error:
        write_answers(given)
    assert str(error.value).splitlines() == [
        "answers cannot be written for a training with:",
        "  store.codec must be exact where nothing is stored, got 'int8'",
        "  store.num_writers must be 1 where nothing is stored, got 2",
        "  regenerate.enabled must be true, got false: a training takes the answers of the prompts file",
        "change them",
    ]


def test_what_has_no_answer_is_counted_and_nothing_but_that_is_an_error(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(tiny_target, tmp_path, prompt_rows(8))
    generate, num_calls = TransformersEngine.generate, [0]

    def refuse(engine: TransformersEngine, prompts: list[list[int]], *arguments: Any, **settings: Any) -> list[Any]:
        return [SetAside("the server refused it") for _ in prompts]

    def interrupt(engine: TransformersEngine, *arguments: Any, **settings: Any) -> Sequence[Any]:
        num_calls[0] += 1
        if num_calls[0] == 4:  # three turns of the first chunk
            os.kill(os.getpid(), signal.SIGINT)
        return generate(engine, *arguments, **settings)

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(TransformersEngine, "generate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_answers(config)
    assert f"stopped: 4 of 8 conversations are answered in {config.store.path}; the same command" in caplog.text
    monkeypatch.setattr(TransformersEngine, "generate", refuse)
    begin, begun = LiveProgress.begin, []

    def note(progress: LiveProgress, num_rows: int, num_done: int) -> None:
        begun.append((num_rows, num_done))
        begin(progress, num_rows, num_done)

    monkeypatch.setattr(LiveProgress, "begin", note)
    write_answers(config)
    assert begun == [(8, 4)], "rows of earlier runs tell nothing of the time left"
    assert f"4 of 8 conversations are answered in {config.store.path}; answers: " in caplog.text
    assert "left out: 4 conversations without an answer, the first on line 5, " in caplog.text
    (Path(config.store.path) / "answers.jsonl").unlink()
    write_answers(config)
    none = r"at least one conversation must have an answer, got none of 8 .*answer them"
    with pytest.raises(UserError, match=none), streamed_samples(config, "live.yaml"):
        pass


def test_what_cannot_be_streamed_is_refused_by_name(extraction: ExtractConfig) -> None:
    config = dataclasses.replace(
        extraction,
        engine="sglang",
        prompts=dataclasses.replace(extraction.prompts, path=None),
        store=dataclasses.replace(extraction.store, codec="int8", num_writers=2),
    )
    with pytest.raises(UserError) as error, streamed_samples(config, "live.yaml"):
        pass
    assert str(error.value).splitlines() == [
        "some settings of live.yaml cannot be trained from:",
        "  prompts.path must be a file, got none",
        "  store.codec must be exact where nothing is stored, got 'int8'",
        "  store.num_writers must be 1 where nothing is stored, got 2",
        "  server.urls must name servers that run, got none: a training starts none",
        "change them",
    ]


def test_a_missing_extraction_is_named_by_the_setting(
    extraction: ExtractConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = train_config(extraction, str(tmp_path / "none.yaml"), tmp_path / "run")
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(config_to_dict(config)))
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(path)])
    with pytest.raises(SystemExit) as ended:
        run_command(train_command.main)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: data.path must be a file, got '{tmp_path}/none.yaml' ")


def test_a_grid_of_trainings_is_trained_on_a_stream(extraction: ExtractConfig, tmp_path: Path) -> None:
    base, grid = tmp_path / "base.yaml", tmp_path / "grid.yaml"
    config = with_run(train_config(extraction, stream_path(extraction), tmp_path / "run"), max_steps=1)
    base.write_text(yaml.safe_dump(config_to_dict(config)))
    seeds = {"run.dir": {"value": str(tmp_path / "grid")}, "run.seed": {"values": [1, 2]}}
    command = ["${interpreter}", "train.py", "--config", str(base), "${args_no_hyphens}"]
    grid.write_text(yaml.safe_dump({"method": "grid", "command": command, "parameters": seeds}))
    done = launch([sys.executable, "-m", "eagle3"], config, tmp_path, "sweep", str(grid))
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [metrics_of(tmp_path / "grid" / f"run.seed={seed}")[-1]["held_out/loss"] for seed in (1, 2)]
    assert losses[0] != losses[1]


def test_another_target_is_refused_before_a_step(extraction: ExtractConfig, tmp_path: Path) -> None:
    other = write_tiny_target(tmp_path / "other", seed=1)
    config = train_config(extraction, stream_path(extraction), tmp_path / "run")
    config = dataclasses.replace(config, target=dataclasses.replace(config.target, path=str(other)))
    done = launch([sys.executable, "train.py"], config, tmp_path, "--config", "CONFIG")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "live.yaml" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("change target.path")
    assert not os.path.exists(tmp_path / "run")


READS_LONG = """
import time
from unittest import mock
import train
from eagle3.cli import run_command

def read(*arguments, **settings):
    print("reading", flush=True)
    time.sleep(100)
    print("read", flush=True)

with mock.patch("eagle3.capture.streaming.select_rows", read):
    run_command(train.main)
"""
FAILING = str(Path(__file__).with_name("failing_streams.py"))


def test_a_rank_without_servers_ends_all_with_a_checkpoint_of_the_last_step(
    extraction: ExtractConfig, tmp_path: Path
) -> None:
    config = train_config(extraction, stream_path(extraction), tmp_path / "run")
    config = with_run(config, deepspeed="zero2", validate_every=100, save_every=100)
    # Of rank 1 the first calls are a validation's; steps are loaded ahead.
    done = launch([*TWO_RANKS, FAILING, "1", "6", ""], config, tmp_path, "--config", "CONFIG")
    assert done.returncode == 1, "the launcher's"
    assert "error: the server must answer within 60 s, got ConnectionError; start it again\n" in done.stderr
    assert done.stderr.count("error: ") == 1, done.stderr[-3000:]
    checkpoints = sorted(tmp_path.glob("run/step-*"))
    lines = metrics_of(tmp_path / "run")
    assert [int(path.name[5:]) for path in checkpoints] == [lines[-1]["step"]], lines
    assert 0 < lines[-1]["step"] < STEPS, lines
    # It is as if there had been no fault.
    for name, resume in (("run", "auto"), ("whole", "never")):
        again = with_run(config, resume=resume, dir=str(tmp_path / name))
        done = launch([*TWO_RANKS, "train.py"], again, tmp_path, "--config", "CONFIG")
        assert done.returncode == 0, done.stderr[-4000:]
    assert_same_bits(tmp_path / "run", tmp_path / "whole")


def test_a_validation_without_servers_keeps_the_steps_before_it(
    extraction: ExtractConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = train_config(extraction, stream_path(extraction), tmp_path / "run")
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, ema_decay=0.6))
    away = ServerError("the server must answer within 60 s")

    def without_servers(engine: Engine, store: SampleStream, *arguments: Any, step: int, **settings: Any) -> Any:
        if step == 3:
            monkeypatch.setattr(store, "read", mock.Mock(side_effect=away))
        return validate(engine, store, *arguments, step=step, **settings)

    monkeypatch.setattr(trainer, "validate", without_servers)
    with streamed_samples(extraction, config.data.path) as samples, pytest.raises(ServerError) as error:
        train(config, samples)
    assert error.value is away
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-000003"]
    monkeypatch.setattr(trainer, "validate", validate)
    for settings in (with_run(config, resume="auto"), with_run(config, dir=str(tmp_path / "whole"))):
        with streamed_samples(extraction, config.data.path) as samples:
            train(settings, samples)
    assert_same_bits(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("waits_for", ["step", "validation"])
def test_who_is_stopped_while_servers_hang_saves_without_them(
    extraction: ExtractConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, waits_for: str
) -> None:
    config = with_run(train_config(extraction, stream_path(extraction), tmp_path / "run"), save_every=100)
    hangs, answered = threading.Event(), threading.Event()
    make = StateMaker.__call__

    def make_or_hang(maker: StateMaker, tokens: Sequence[TokenSample]) -> list[Any]:
        if hangs.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
            answered.wait(timeout=60)
        return make(maker, tokens)

    def hang_at(call: int, goes_on: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        num_calls[0] += 1
        if num_calls[0] == call:
            hangs.set()
        return goes_on(*arguments, **settings)

    num_calls = [0]
    monkeypatch.setattr(StateMaker, "__call__", make_or_hang)
    if waits_for == "step":  # of five, two are loaded ahead
        monkeypatch.setattr(trainer, "take_step", functools.partial(hang_at, 1, take_step))
    else:  # the second one, after the third step
        monkeypatch.setattr(trainer, "validate", functools.partial(hang_at, 2, validate))
    monkeypatch.setattr(prefetch, "GIVE_UP_SECONDS", 0.2)
    with streamed_samples(extraction, config.data.path) as samples:
        run_dir = train(config, samples)
        assert not answered.is_set()
        answered.set()
    monkeypatch.undo()
    (checkpoint,) = run_dir.glob("step-*")
    assert int(checkpoint.name[5:]) == max(line["step"] for line in metrics_of(run_dir))
    assert (checkpoint.name == "step-000003") == (waits_for == "validation")
    for settings in (with_run(config, resume="auto"), with_run(config, dir=str(tmp_path / "whole"))):
        with streamed_samples(extraction, config.data.path) as samples:
            train(settings, samples)
    assert_same_bits(tmp_path / "run", tmp_path / "whole")


def test_a_launcher_that_is_stopped_takes_along_who_reads_prompts(extraction: ExtractConfig, tmp_path: Path) -> None:
    config = train_config(extraction, stream_path(extraction), tmp_path / "run")
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(config_to_dict(config)))
    (tmp_path / "slow.py").write_text(READS_LONG)
    command = [*LAUNCH, "--cpu", "--num_processes", "1", str(tmp_path / "slow.py")]
    with subprocess.Popen(
        [*command, "--config", str(tmp_path / "train.yaml")],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
    ) as launcher:  # fmt: skip
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "reading\n"
        launcher.terminate()
        # The pipe's other end is the training's, too.
        assert launcher.communicate(timeout=30)[0] == ""


def test_samples_without_states_weigh_nothing_however_they_are_packed(
    extraction: ExtractConfig, tmp_path: Path
) -> None:
    refused = dataclasses.replace(extraction, max_quarantined_share=0.5)
    config = train_config(refused, stream_path(refused), tmp_path / "apart")
    names = ",".join(f"row-{number}" for number in (1, 6, 9, 14))  # some of these are held out
    # One sample in each micro-batch: a rank has nothing to learn from in some, and the other has.
    apart = dataclasses.replace(
        with_run(config, deepspeed="zero2"), data=dataclasses.replace(config.data, batch_tokens=1)
    )
    done = launch([*TWO_RANKS, FAILING, "0", "-1", names], apart, tmp_path, "--config", "CONFIG")
    assert done.returncode == 0, done.stderr[-4000:]
    assert all(f"sample {name!r} is left out of the training" in done.stderr for name in names.split(",")), done.stderr
    together = with_run(config, dir=str(tmp_path / "together"))
    done = launch([sys.executable, FAILING, "0", "-1", names], together, tmp_path, "--config", "CONFIG")
    assert done.returncode == 0, done.stderr[-4000:]
    for line, wanted in zip(metrics_of(tmp_path / "apart"), metrics_of(tmp_path / "together"), strict=True):
        for name in ("step", "loss", "grad_norm", "held_out/loss", "held_out/tau"):
            if name in wanted:
                # fp32 sums in another order: weights were seen to be 2e-5 apart.
                assert line[name] == pytest.approx(wanted[name], rel=1e-4), (line["step"], name)


def test_a_step_of_nothing_but_samples_without_states_goes_by(
    extraction: ExtractConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = train_config(extraction, stream_path(extraction), tmp_path / "run")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, samples_per_step=1))
    make, num_calls = StateMaker.__call__, [0]

    def none_at_the_third_step(maker: StateMaker, tokens: Sequence[TokenSample]) -> list[Any]:
        num_calls[0] += len(tokens) == 1
        return [None] if num_calls[0] == 3 and len(tokens) == 1 else make(maker, tokens)

    monkeypatch.setattr(StateMaker, "__call__", none_at_the_third_step)
    with streamed_samples(extraction, config.data.path) as samples:
        lines = metrics_of(train(config, samples))
    assert [line["step"] for line in lines if line.get("loss") == 0.0] == [3]
