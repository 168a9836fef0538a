"""A prompts file becomes a store, exactly once, however often the run is stopped."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import extract
from eagle3.capture import pipeline, running_engine
from eagle3.capture.engine import Captured
from eagle3.capture.extraction import run_extraction
from eagle3.capture.inprocess import TransformersEngine, batches_by_length
from eagle3.capture.parity import ParityError
from eagle3.cli import run_command
from eagle3.config import (
    ExtractConfig,
    PromptsConfig,
    RegenerateConfig,
    ServerConfig,
    StoreConfig,
    TargetConfig,
    UserError,
)
from eagle3.features.codec import Codec, encode
from eagle3.features.record import FeatureSample, supervised_rows
from eagle3.features.store import FeatureStore
from eagle3.features.stored import join_columns
from eagle3.features.writer import QuotaReached
from eagle3.prompts.rendering import ChatRenderer
from eagle3.prompts.tokenizers import load_tokenizer

LAYERS = [2, 4, 5]
QUESTIONS = ["What is ten?", "Is the list the last one?", "Why?", "Name the answer, and the question.", "And then?"]


def prompt_rows(num_rows: int) -> list[dict[str, Any]]:
    """Rows of one to three user turns, with answers of the file's own."""
    rows = []
    for number in range(num_rows):
        messages = []
        for turn in range(1 + number % 3):
            messages.append({"role": "user", "content": f"{QUESTIONS[(number + turn) % 5]} ({number})"})
            messages.append({"role": "assistant", "content": f"The answer is {number}."})
        rows.append({"id": f"row-{number}", "messages": messages})
    return rows


def write_prompts(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_config(tiny_target: Path, tmp_path: Path, rows: list[Any] | None = None, **changes: Any) -> ExtractConfig:
    prompts = write_prompts(tmp_path / "prompts.jsonl", prompt_rows(10) if rows is None else rows)
    config = ExtractConfig(
        target=TargetConfig(str(tiny_target), dtype="float32"),
        store=StoreConfig(str(tmp_path / "store"), shard_bytes=150_000),
        engine="transformers",
        prompts=PromptsConfig(str(prompts)),
        # Chunks of four batches are four rows.
        regenerate=RegenerateConfig(max_new_tokens=12, batch_size=1, cut_loops=False),
        batch_tokens=150,
    )
    return replace(config, **changes)


def contents(path: Path) -> dict[str, FeatureSample]:
    store = FeatureStore(path)
    assert store.verify() == []
    samples = {store[i].sample_id: store[i] for i in range(len(store))}
    assert len(samples) == len(store)
    return samples


def assert_equal_runs(seen: dict[str, FeatureSample], wanted: dict[str, FeatureSample]) -> None:
    """Ids and masks bit for bit; features within fp32's rounding, since a resumed batch has other mates."""
    assert seen.keys() == wanted.keys()
    for sample_id, sample in wanted.items():
        assert torch.equal(seen[sample_id].input_ids, sample.input_ids)
        assert torch.equal(seen[sample_id].loss_mask, sample.loss_mask)
        torch.testing.assert_close(seen[sample_id].aux_hidden_states, sample.aux_hidden_states, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("last_rows", ["supervised", "all"])
def test_stored_samples_are_the_targets_answers_and_states(tiny_target: Path, tmp_path: Path, last_rows: Any) -> None:
    config = make_config(tiny_target, tmp_path)
    config = replace(config, store=replace(config.store, last_rows=last_rows))
    report = run_extraction(config)
    samples = contents(tmp_path / "store")
    assert len(samples) == report.num_stored == 10
    assert report.num_tokens == sum(sample.input_ids.numel() for sample in samples.values())
    assert report.num_supervised == sum(int(sample.loss_mask.sum()) for sample in samples.values())
    engine = TransformersEngine(config.target, LAYERS, load_tokenizer(str(tiny_target), False))
    renderer = ChatRenderer(engine.tokenizer, {})
    for row in prompt_rows(10):
        sample = samples[row["id"]]
        input_ids = sample.input_ids.tolist()
        prompt = renderer.prompt_ids(row["messages"][:1])
        (answer,) = engine.generate([prompt], config.regenerate)
        assert input_ids[: len(prompt)] == prompt
        if sample.loss_mask[len(prompt)]:  # a random model's bytes may encode otherwise in the next turn's prompt
            assert input_ids[len(prompt) : len(prompt) + len(answer.ids)] == answer.ids
        assert not sample.loss_mask[: len(prompt)].any()
        assert bool(sample.loss_mask[-1])
        hidden_states = engine.hidden_states(input_ids)
        # fp32 in another batch: other summation order.
        aux = torch.cat([hidden_states[layer] for layer in LAYERS], dim=1)
        torch.testing.assert_close(sample.aux_hidden_states, aux, rtol=1e-4, atol=1e-4)
        rows = supervised_rows(sample.loss_mask) if last_rows == "supervised" else torch.arange(len(input_ids)).int()
        assert torch.equal(sample.last_rows, rows)
        torch.testing.assert_close(sample.last_hidden_states, hidden_states[-1][rows], rtol=1e-4, atol=1e-4)
        (logits,) = engine.logits([input_ids])
        assert sample.target_logz is not None
        torch.testing.assert_close(sample.target_logz, logits[rows].logsumexp(-1), rtol=1e-4, atol=1e-4)
        # Greedy answers: each supervised token is the target's choice at the row before it.
        before = sample.loss_mask.nonzero().flatten() - 1
        assert logits[before].argmax(-1).tolist() == sample.input_ids[before + 1].tolist()


def test_given_answers_are_kept(tiny_target: Path, tmp_path: Path) -> None:
    config = make_config(tiny_target, tmp_path, regenerate=RegenerateConfig(enabled=False))
    run_extraction(config)
    samples = contents(tmp_path / "store")
    renderer = ChatRenderer(load_tokenizer(str(tiny_target), False), {})
    for row in prompt_rows(10):
        rendered = renderer.render(row["messages"])
        assert samples[row["id"]].input_ids.tolist() == rendered.input_ids
        assert samples[row["id"]].loss_mask.tolist() == rendered.loss_mask
    assert FeatureStore(tmp_path / "store").manifest.generation == {}
    assert not (tmp_path / "store" / "answers.jsonl").read_bytes()


def test_the_manifest_says_where_the_features_come_from(tiny_target: Path, tmp_path: Path) -> None:
    run_extraction(make_config(tiny_target, tmp_path))
    manifest = FeatureStore(tmp_path / "store").manifest
    assert manifest.target_path == str(tiny_target)
    assert (manifest.engine, manifest.dtype, manifest.codec) == ("transformers", "float32", "fp32")
    assert manifest.capture_layers == (2, 4, 5)
    assert (manifest.hidden_size, manifest.vocab_size) == (64, 320)
    assert manifest.generation["max_new_tokens"] == 12
    parity = json.loads((tmp_path / "store" / "parity.json").read_text())
    assert parity["agreement"] == parity["recorded_agreement"] == 1.0
    assert max(parity["relative_error"]) < 1e-4


def test_a_coded_store_has_the_states_of_an_exact_one_but_for_rounding(tiny_target: Path, tmp_path: Path) -> None:
    exact = make_config(tiny_target, tmp_path)
    run_extraction(exact)
    coded = replace(exact, store=replace(exact.store, path=str(tmp_path / "coded"), codec="int8"))
    run_extraction(coded)
    assert FeatureStore(tmp_path / "coded").manifest.codec == "int8"
    for name, sample in contents(tmp_path / "store").items():
        seen = contents(tmp_path / "coded")[name]
        assert torch.equal(seen.input_ids, sample.input_ids)
        error = (seen.aux_hidden_states - sample.aux_hidden_states).norm() / sample.aux_hidden_states.norm()
        assert 0 < error < 0.01, error
        assert seen.target_logz is not None
        assert sample.target_logz is not None
        assert torch.equal(seen.target_logz, sample.target_logz)  # of the states before they were coded


def test_several_writers_fill_one_store_with_a_share_each(tiny_target: Path, tmp_path: Path) -> None:
    alone = make_config(tiny_target, tmp_path, regenerate=RegenerateConfig(enabled=False))
    run_extraction(alone)
    together = replace(alone.store, path=str(tmp_path / "shared"), num_writers=2)
    for writer in (1, 0):
        run_extraction(replace(alone, store=replace(together, writer=writer)))
    store = FeatureStore(tmp_path / "shared")
    assert store.verify() == []
    wanted, seen = contents(tmp_path / "store"), contents(tmp_path / "shared")
    assert seen.keys() == wanted.keys()
    for name, sample in wanted.items():
        assert torch.equal(seen[name].input_ids, sample.input_ids)
    for name in ("answers.jsonl", "rejected.jsonl", "parity.json"):
        assert (tmp_path / "shared" / name).exists()
        assert (tmp_path / "shared" / "writer-1" / name).exists()


KILLED_RUN = """
import os, signal, sys
from pathlib import Path
from eagle3.capture import extraction
from eagle3.capture.inprocess import TransformersEngine
from test_extraction import make_config

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
    assert f"stopped: {stored} samples are in {tmp_path / 'store'}; the same command goes on from there" in caplog.text
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
    assert "plan: 0 samples (10 more are stored already), 0 tokens, 0 bytes" in caplog.text
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


def test_the_plan_comes_first_and_refuses_before_the_target_is_loaded(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(running_engine, "TransformersEngine", None)
    config = make_config(tiny_target, tmp_path, regenerate=RegenerateConfig(enabled=False))
    config = replace(config, store=replace(config.store, quota_bytes=1000))
    with pytest.raises(UserError, match=r"must stay within store.quota_bytes=1000, got a plan of \d+ bytes"):
        run_extraction(config)
    assert caplog.messages[0].startswith("plan: 10 samples, ")
    assert not (tmp_path / "store").exists()


def test_the_quota_ends_a_run_cleanly_and_more_of_it_goes_on(tiny_target: Path, tmp_path: Path) -> None:
    config = make_config(tiny_target, tmp_path)
    with pytest.raises(QuotaReached, match=r"must stay within store.quota_bytes=300000"):
        run_extraction(replace(config, store=replace(config.store, quota_bytes=300_000)))
    stored = contents(tmp_path / "store")
    assert 0 < len(stored) < 10
    assert sum(path.stat().st_size for path in (tmp_path / "store").glob("shard-*")) <= 300_000
    run_extraction(config)
    assert len(contents(tmp_path / "store")) == 10


def test_rows_that_are_left_out_are_counted_and_named(
    tiny_target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rows: list[Any] = prompt_rows(3)
    rows.insert(1, {"id": "broken"})
    rows.append({"id": "long", "messages": [{"role": "user", "content": "word " * 400}]})
    report = run_extraction(make_config(tiny_target, tmp_path, rows))
    assert (report.num_stored, report.num_bad_rows, report.num_too_long) == (3, 1, 1)
    lines = [json.loads(line) for line in (tmp_path / "store" / "rejected.jsonl").read_text().splitlines()]
    assert [(line["line"], line["kind"]) for line in lines] == [(2, "malformed"), (5, "too long")]
    # The target's own limit: prompts.max_tokens is larger.
    assert lines[1]["reason"].startswith("prompt must have fewer than 512 tokens, got ")
    assert "left out: 1 bad rows and 1 too long (rejected.jsonl)" in caplog.text
    assert "prompts: 2 rows are left out: malformed 1, too long 1" in caplog.text


def poison(monkeypatch: pytest.MonkeyPatch, sample_ids: set[str]) -> None:
    def find_fault(sample: FeatureSample) -> str | None:
        aux = sample.aux_hidden_states.clone()
        if sample.sample_id in sample_ids:
            aux[3, 5] = float("nan")
            aux[4, 0] = float("inf")
        return whole(replace(sample, aux_hidden_states=aux))

    whole = pipeline.find_fault
    monkeypatch.setattr(pipeline, "find_fault", find_fault)


def test_a_quarantine_line_that_a_kill_cut_short_is_written_again(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {"row-4"})
    config = make_config(tiny_target, tmp_path, max_quarantined_share=0.1)
    run_extraction(config)
    path = tmp_path / "store" / "quarantine.jsonl"
    path.write_bytes(path.read_bytes()[:30])
    for _ in range(3):  # the first line to come joins the one that was cut short, the second one is whole
        assert run_extraction(config).num_quarantined == 1
    assert json.loads(path.read_text().splitlines()[-1])["sample_id"] == "row-4"


def test_samples_that_are_not_finite_are_set_aside_once(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {"row-4"})
    config = make_config(tiny_target, tmp_path, max_quarantined_share=0.1)
    for num_stored in (9, 0):
        report = run_extraction(config)
        assert (report.num_stored, report.num_quarantined) == (num_stored, 1)
        (line,) = (tmp_path / "store" / "quarantine.jsonl").read_text().splitlines()
        assert json.loads(line) == {
            "sample_id": "row-4",
            "line": 5,
            "reason": "aux_hidden_states must be finite, got 2 rows that are not, first at token 3",
        }
    assert "row-4" not in contents(tmp_path / "store")


@pytest.mark.parametrize("codec", ["int8", "fp8"])
@pytest.mark.parametrize("part", ["aux", "last"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_states_that_are_not_finite_are_seen_when_they_are_coded(codec: Codec, part: str, value: str) -> None:
    name, rows = f"{part}_hidden_states", torch.tensor([2, 4, 5, 7], dtype=torch.int32)
    for places in ([], [(1, 3)], [(2, column) for column in range(32)], [(1, 0), (3, 5)]):
        states = torch.randn(9 if part == "aux" else 4, 64, generator=torch.Generator().manual_seed(0))
        for place in places:
            states[place] = float(value)
        whole = {"aux_hidden_states": torch.ones(9, 64), "last_hidden_states": torch.ones(4, 64), name: states}
        ids, mask = torch.arange(9, dtype=torch.int32), torch.ones(9, dtype=torch.bool)
        sample = FeatureSample("x", ids, mask, last_rows=rows, **whole)
        aux, last = (encode(whole[f"{each}_hidden_states"], 64, codec) for each in ("aux", "last"))
        stored = join_columns("x", {"input_ids": ids, "last_rows": rows, "loss_mask": mask}, aux=aux, last=last)
        assert pipeline.find_coded_fault(stored) == pipeline.find_fault(sample)
        assert (pipeline.find_fault(sample) is None) == (places == [])


def test_too_many_of_them_fail_the_run(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {"row-4", "row-5"})
    with pytest.raises(UserError, match=r"at most max_quarantined_share=0.1 of 10, got 2 \(.*quarantine.jsonl\)"):
        run_extraction(make_config(tiny_target, tmp_path, max_quarantined_share=0.1))
    assert len(contents(tmp_path / "store")) > 0


def test_a_run_that_stores_nothing_is_an_error(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {f"row-{number}" for number in range(10)})
    with pytest.raises(UserError, match=r"at least one sample must be stored, got none of 10"):
        run_extraction(make_config(tiny_target, tmp_path, max_quarantined_share=1.0))


def test_a_failed_gate_stores_nothing(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ParityError("the last hidden state must be another")

    monkeypatch.setattr(pipeline, "check_parity", fail)
    with pytest.raises(ParityError):
        run_extraction(make_config(tiny_target, tmp_path))
    assert list((tmp_path / "store").glob("shard-*")) == []


def test_an_engine_that_is_not_there_names_the_one_that_is(tiny_target: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"must have sglang installed, got .* or use engine=transformers$"):
        run_extraction(make_config(tiny_target, tmp_path, engine="sglang"))
    assert not (tmp_path / "store").exists()


def test_settings_that_cannot_work_are_named_all_at_once(tiny_target: Path, tmp_path: Path) -> None:
    config = make_config(tiny_target, tmp_path, batch_tokens=0, max_quarantined_share=-0.1)
    regenerate = RegenerateConfig(max_new_tokens=0, batch_size=0, temperature=-1.0, top_p=1.5)
    server = ServerConfig(tensor_parallel_size=0, max_requests=0, staging_bytes=0)
    wrong = replace(config, regenerate=regenerate, server=server, store=replace(config.store, shard_bytes=0, writer=1))
    wrong = replace(wrong, prompts=replace(config.prompts, max_tokens=0))
    with pytest.raises(UserError) as caught:
        run_extraction(wrong)
    assert str(caught.value).splitlines() == [
        "some settings cannot be captured with:",
        "  prompts.max_tokens must be at least 1, got 0",
        "  regenerate.max_new_tokens must be at least 1, got 0",
        "  regenerate.batch_size must be at least 1, got 0",
        "  store.shard_bytes must be at least 1, got 0",
        "  batch_tokens must be at least 1, got 0",
        "  server.tensor_parallel_size must be at least 1, got 0",
        "  server.max_requests must be at least 1, got 0",
        "  server.staging_bytes must be at least 1, got 0",
        "  store.writer must be from 0 to below store.num_writers=1, got 1",
        "  regenerate.temperature must be 0 or more, got -1.0",
        "  regenerate.top_p must be above 0 and at most 1, got 1.5",
        "  max_quarantined_share must be from 0 to 1, got -0.1",
        "change them",
    ]


def test_no_prompts_are_an_error(tiny_target: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"prompts.path must be a file, got none; name one with --prompts"):
        run_extraction(make_config(tiny_target, tmp_path, prompts=PromptsConfig()))


@pytest.mark.parametrize("batch_tokens", [1, 50, 1000])
def test_batches_hold_each_sequence_once_within_the_padded_limit(batch_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 60, (40,), generator=generator).tolist()
    batches = batches_by_length(lengths, batch_tokens)
    assert sorted(i for batch in batches for i in batch) == list(range(40))
    for batch in batches:
        padded = max(lengths[i] for i in batch) * len(batch)
        assert padded <= batch_tokens or len(batch) == 1
    assert len(batches) == 40 if batch_tokens == 1 else len(batches) < 40


def run_command_line(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["extract.py", *arguments])
    run_command(extract.main)


def test_the_command_takes_prompts_config_and_overrides(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", prompt_rows(2))
    overrides = [f"target.path={tiny_target}", "target.dtype=float32", f"store.path={tmp_path / 'store'}"]
    run_command_line(
        monkeypatch, "--prompts", str(prompts), *overrides, "engine=transformers", "regenerate.max_new_tokens=4"
    )
    assert len(contents(tmp_path / "store")) == 2


def test_the_command_prints_a_mistake_alone_and_exits_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command_line(monkeypatch, "--prompts", "p.jsonl", "engine=transformers", f"target.path={tmp_path / 'none'}")
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: target.path must be a Hugging Face directory, got no directory at ")
    assert error.count("\n") == 1
