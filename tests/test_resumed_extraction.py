"""A run that is killed, stopped or out of room goes on, and stores each sample once."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_extractions import contents, make_config, prompt_rows

from eagle3.capture import running_engine
from eagle3.capture.engine import Captured
from eagle3.capture.extraction import run_extraction
from eagle3.capture.inprocess import TransformersEngine
from eagle3.config import UserError
from eagle3.features.record import FeatureSample
from eagle3.features.store import FeatureStore
from eagle3.features.writer import QuotaReached


def assert_equal_runs(seen: dict[str, FeatureSample], wanted: dict[str, FeatureSample]) -> None:
    """Ids and masks bit for bit; features within fp32's rounding, since a resumed batch has other mates."""
    assert seen.keys() == wanted.keys()
    for sample_id, sample in wanted.items():
        assert torch.equal(seen[sample_id].input_ids, sample.input_ids)
        assert torch.equal(seen[sample_id].loss_mask, sample.loss_mask)
        torch.testing.assert_close(seen[sample_id].aux_hidden_states, sample.aux_hidden_states, rtol=1e-4, atol=1e-4)


KILLED_RUN = """
import os, signal, sys
from pathlib import Path
from eagle3.capture import extraction
from eagle3.capture.inprocess import TransformersEngine
from tiny_extractions import make_config

whole, calls = TransformersEngine.capture, iter(range(int(sys.argv[3])))

def capture(self, sequences):
    if next(calls, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(self, sequences)

TransformersEngine.capture = capture
extraction.run_extraction(make_config(Path(sys.argv[1]), Path(sys.argv[2])))
"""


def test_a_killed_run_goes_on_to_the_same_ids_and_masks(tiny_target: Path, tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    run_extraction(make_config(tiny_target, tmp_path / "whole"))
    here = Path(__file__).resolve().parent
    environment = os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
    # The gate and a few batches: some samples are in a shard, some are lost with the buffer.
    command = [sys.executable, "-c", KILLED_RUN, str(tiny_target), str(tmp_path / "killed"), "5"]
    killed = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    stored = set(contents(tmp_path / "killed" / "store"))
    assert 0 < len(stored) < 10
    answers_before = (tmp_path / "killed" / "store" / "answers.jsonl").read_bytes()
    report = run_extraction(make_config(tiny_target, tmp_path / "killed"))
    assert (report.num_stored_before, report.num_stored) == (len(stored), 10 - len(stored))
    # What was answered before the kill was not answered again.
    answers = (tmp_path / "killed" / "store" / "answers.jsonl").read_bytes()
    assert answers.startswith(answers_before)
    assert len(answers.splitlines()) == 10
    assert_equal_runs(contents(tmp_path / "killed" / "store"), contents(tmp_path / "whole" / "store"))


def call_before(monkeypatch: pytest.MonkeyPatch, count: int, action: Callable[[], None]) -> None:
    """Does `action` before the capture number `count`, the gate's included."""
    whole, calls = TransformersEngine.capture, iter(range(count))

    def capture(engine: TransformersEngine, sequences: Sequence[Sequence[int]]) -> list[Captured]:
        if next(calls, None) is None:
            action()
        return whole(engine, sequences)

    monkeypatch.setattr(TransformersEngine, "capture", capture)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_writes_what_was_captured_and_says_so(
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: signal.Signals,
) -> None:
    caplog.set_level(logging.INFO)
    config = make_config(tiny_target, tmp_path)
    with monkeypatch.context() as patch:
        call_before(patch, 3, lambda: os.kill(os.getpid(), number))
        with pytest.raises(KeyboardInterrupt):
            run_extraction(config)
    stored = len(contents(tmp_path / "store"))
    assert 0 < stored < 10
    answered = (tmp_path / "store" / "answers.jsonl").read_text().count("\n")
    assert answered >= stored
    said = f"stopped: {stored} samples and {answered} answers are in {tmp_path / 'store'}; the same command goes on"
    assert said in caplog.text
    assert run_extraction(config).num_stored == 10 - stored
    assert len(contents(tmp_path / "store")) == 10


def test_a_finished_run_is_done_again_without_the_target(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = make_config(tiny_target, tmp_path)
    run_extraction(config)
    before = {path.name: path.read_bytes() for path in (tmp_path / "store").glob("shard-*")}
    monkeypatch.setattr(running_engine, "TransformersEngine", None)
    caplog.clear()
    report = run_extraction(config)
    assert (report.num_stored_before, report.num_stored) == (10, 0)
    assert "plan: 0 samples (stored already: 10 more), 0 tokens, 0 bytes" in caplog.text
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "store").glob("shard-*")}


def test_another_prompts_file_or_setting_is_refused_with_both_values(tiny_target: Path, tmp_path: Path) -> None:
    config = make_config(tiny_target, tmp_path)
    run_extraction(config)
    digest = FeatureStore(tmp_path / "store").manifest.prompts_digest
    warmer = replace(config, regenerate=replace(config.regenerate, temperature=0.7))
    with pytest.raises(UserError, match=r"generation.temperature must be 0.0, as stored, got 0.7"):
        run_extraction(warmer)
    # As many rows, with the same ids.
    rows = prompt_rows(10)
    rows[3]["messages"][0]["content"] = "Something else?"
    with pytest.raises(UserError, match=rf"prompts_digest must be '{digest}', as stored, got '\w+'"):
        run_extraction(make_config(tiny_target, tmp_path, rows))


def test_the_quota_ends_a_run_cleanly_and_more_of_it_goes_on(tiny_target: Path, tmp_path: Path) -> None:
    config = make_config(tiny_target, tmp_path)
    with pytest.raises(QuotaReached, match=r"must stay within store.quota_bytes=300000"):
        run_extraction(replace(config, store=replace(config.store, quota_bytes=300_000)))
    stored = contents(tmp_path / "store")
    assert 0 < len(stored) < 10
    assert sum(path.stat().st_size for path in (tmp_path / "store").glob("shard-*")) <= 300_000
    run_extraction(config)
    assert len(contents(tmp_path / "store")) == 10
