"""A prompts file becomes a store of the target's answers and states, or is refused before the target is loaded."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_extractions import LAYERS, contents, make_config, prompt_rows, run_command_line, write_prompts

from eagle3.capture import pipeline, running_engine
from eagle3.capture.extraction import run_extraction
from eagle3.capture.inprocess import TransformersEngine
from eagle3.capture.parity import ParityError
from eagle3.commands.plan import main as plan
from eagle3.config import PromptsConfig, RegenerateConfig, ServerConfig, UserError, config_to_dict
from eagle3.features.record import supervised_rows
from eagle3.features.store import FeatureStore
from eagle3.prompts.rendering import ChatRenderer
from eagle3.prompts.tokenizers import load_tokenizer


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


def test_the_plan_alone_is_the_extractions_own(
    tiny_target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    config = make_config(tiny_target, tmp_path)
    path = tmp_path / "extract.yaml"
    unnamed = replace(config, prompts=replace(config.prompts, path=None))
    path.write_text(yaml.safe_dump(config_to_dict(unnamed)))
    arguments = ["--config", str(path), "--prompts", str(config.prompts.path)]
    for num_missing in (10, 0):
        assert plan(arguments) == 0
        said = capsys.readouterr().out.strip()
        assert said.startswith(f"plan: {num_missing} samples")
        assert num_missing == 0 or not (tmp_path / "store").exists()
        caplog.clear()
        run_extraction(config)
        (own,) = [message for message in caplog.messages if message.startswith("plan: ")]
        assert said.partition("; free disk")[0] == own.partition("; free disk")[0]
    with pytest.raises(UserError, match=r"store.num_writers must be at least 1, got 0"):
        plan([*arguments, "store.num_writers=0"])
    with pytest.raises(UserError, match=r"prompts.path must be a file, got none; name one with --prompts"):
        plan(["--config", str(path)])
    assert "plan: " not in capsys.readouterr().out
    with pytest.raises(UserError, match=r"must stay within store.quota_bytes=1000"):
        plan([*arguments, f"store.path={tmp_path / 'other'}", "store.quota_bytes=1000", "regenerate.enabled=false"])
    assert "plan: 10 samples" in capsys.readouterr().out


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
    assert "left out: 1 bad row and 1 too long (rejected.jsonl)" in caplog.text
    assert "prompts: 2 rows left out: malformed 1, too long 1" in caplog.text


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


def test_a_store_where_a_file_is_cannot_be_made(tiny_target: Path, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")
    with pytest.raises(
        UserError, match=rf"  store.path must be a directory, got the file '{tmp_path / 'store'}'\nchange"
    ):
        run_extraction(make_config(tiny_target, tmp_path))
    with pytest.raises(UserError, match=r"store.path must be a directory, got the file"):
        plan([f"target.path={tiny_target}", f"store.path={tmp_path / 'store'}", "--prompts", "none"])


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
