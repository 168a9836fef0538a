"""A store captured through a real SGLang server is the store that transformers captures, and goes on after a stop."""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import write_tiny_target
from sglang_servers import server_config
from tiny_extractions import contents, make_config, prompt_rows, run_command_line, write_prompts

from eagle3.capture.asking import prefill_body
from eagle3.capture.client import SGLangEngine
from eagle3.capture.extraction import run_extraction
from eagle3.capture.launch import ServerError
from eagle3.capture.server import capturing_servers
from eagle3.config import ExtractConfig, RegenerateConfig, ServerConfig, UserError
from eagle3.features.record import FeatureSample
from eagle3.features.store import FeatureStore
from eagle3.features.stored import StoredSample, encode_sample
from eagle3.features.writer import FeatureWriter
from eagle3.prompts.rendering import ChatRenderer
from eagle3.prompts.tokenizers import load_tokenizer

LAYERS = [2, 4, 5]
HIDDEN = 64


@dataclass(frozen=True)
class Running:
    """A server that records, and the settings with which a run attaches to it."""

    target: Path
    attached: ServerConfig
    engine: SGLangEngine


@pytest.fixture(scope="module")
def running(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config = server_config(tmp_path_factory.mktemp("server"), flags={"max-total-tokens": 4096})
    with capturing_servers(config, str(tiny_target), LAYERS) as (servers, area):
        engine = SGLangEngine(servers, area, config, LAYERS)
        attached = ServerConfig(urls=[servers[0].url], staging_dir=str(area.directory), max_requests=4)
        yield Running(tiny_target, attached, engine)


def config_for(running: Running, tmp_path: Path, **changes: Any) -> ExtractConfig:
    return make_config(running.target, tmp_path, engine="sglang", server=running.attached, **changes)


def assert_same_store(seen: dict[str, FeatureSample], wanted: dict[str, FeatureSample]) -> None:
    """Ids and masks bit for bit, features within fp32's rounding."""
    assert seen.keys() == wanted.keys()
    for sample_id, sample in wanted.items():
        assert torch.equal(seen[sample_id].input_ids, sample.input_ids)
        assert torch.equal(seen[sample_id].loss_mask, sample.loss_mask)
        assert torch.equal(seen[sample_id].last_rows, sample.last_rows)
        for name in ("aux_hidden_states", "last_hidden_states"):
            ours, theirs = getattr(seen[sample_id], name), getattr(sample, name)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)  # other summation order


def test_run_without_a_terminal_says_how_it_goes(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("eagle3.capture.progress.LINE_SECONDS", 0.0)
    monkeypatch.setattr("eagle3.capture.pipeline.MIN_PROBED", 2)
    monkeypatch.setattr("eagle3.capture.pipeline.MAX_PROBED_SHARE", 0.2)
    report = run_extraction(config_for(running, tmp_path, regenerate=RegenerateConfig(enabled=False)))
    assert report.plain_tokens_per_second is not None
    assert report.plain_tokens_per_second > 0
    lines = [message for message in caplog.messages if re.match(r"[0-9]+/10 samples, ", message)]
    assert len(lines) == 10
    size = r"[0-9.,]+ (bytes|[KMG]iB)"
    assert re.fullmatch(
        rf"9/10 samples, capture [0-9,]+ tokens/s \([0-9]+% of plain prefill\), {size} written, "
        rf"staging {size} of {size}, 0:00:0[0-9] left",
        lines[8],
    ), lines[8]
    assert report.num_bytes == sum(path.stat().st_size for path in (tmp_path / "store").glob("shard-*"))


@pytest.mark.parametrize("is_regenerated", [False, True])
def test_store_is_the_one_that_transformers_captures(running: Running, tmp_path: Path, is_regenerated: bool) -> None:
    # SGLang samples greedily from the same logits, so answers agree too.
    regenerate = RegenerateConfig(enabled=is_regenerated, max_new_tokens=12, batch_size=1, cut_loops=False)
    (tmp_path / "transformers").mkdir()
    run_extraction(make_config(running.target, tmp_path / "transformers", regenerate=regenerate))
    report = run_extraction(config_for(running, tmp_path, regenerate=regenerate))
    seen, wanted = contents(tmp_path / "store"), contents(tmp_path / "transformers" / "store")
    assert len(seen) == report.num_stored == 10
    assert_same_store(seen, wanted)
    assert all(sample.target_logz is None for sample in seen.values())  # the trainer computes it
    parity = json.loads((tmp_path / "store" / "parity.json").read_text())
    assert parity["states_skipped"] is None
    assert max(parity["relative_error"]) < 1e-4
    assert parity["agreement"] == 1.0
    assert 0 < parity["logit_noise"] < 1e-4
    manifest = FeatureStore(tmp_path / "store").manifest
    assert (manifest.engine, manifest.engine_version) == ("sglang", running.engine.facts.version)
    assert (manifest.dtype, manifest.codec, manifest.capture_layers) == ("float32", "fp32", (2, 4, 5))
    assert manifest.engine_facts["logit_noise"] == parity["logit_noise"]
    assert manifest.engine_facts["attention_backend"] == "torch_native"


def test_quota_stops_a_run_and_more_of_it_goes_on(running: Running, tmp_path: Path) -> None:
    config = config_for(running, tmp_path)
    with pytest.raises(UserError, match=r"must stay within store.quota_bytes=300000"):
        run_extraction(replace(config, store=replace(config.store, quota_bytes=300_000)))
    stored = len(contents(tmp_path / "store"))
    assert 0 < stored < 10
    assert run_extraction(config).num_stored == 10 - stored
    assert len(contents(tmp_path / "store")) == 10
    directory = Path(running.attached.staging_dir)
    assert [path.name for path in directory.iterdir() if path.name.startswith("eagle3-")] == []


def test_sequence_that_the_server_cannot_run_is_set_aside(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(running, tmp_path, regenerate=RegenerateConfig(enabled=False), max_quarantined_share=0.1)
    renderer = ChatRenderer(load_tokenizer(str(running.target), False), {})
    poison = renderer.render(prompt_rows(10)[3]["messages"]).input_ids

    def body(input_ids: list[int], request_id: str) -> dict[str, Any]:
        whole = prefill_body(input_ids, request_id)
        return {**whole, "sampling_params": {"max_new_tokens": -1}} if input_ids == poison else whole

    with monkeypatch.context() as patch:
        patch.setattr("eagle3.capture.client.prefill_body", body)
        patch.setattr("eagle3.capture.parity.GATE_SAMPLES", 3)
        report = run_extraction(config)
    assert (report.num_stored, report.num_quarantined) == (9, 1)
    (line,) = (tmp_path / "store" / "quarantine.jsonl").read_text().splitlines()
    assert json.loads(line)["sample_id"] == "row-3"
    assert json.loads(line)["line"] == 4
    assert "must answer /generate" in json.loads(line)["reason"]
    assert run_extraction(config).num_stored == 0


def test_rows_beyond_the_servers_limit_are_left_out_and_counted(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(SGLangEngine, "max_tokens", 60)
    config = config_for(running, tmp_path, regenerate=RegenerateConfig(enabled=False))
    report = run_extraction(config)
    assert report.num_stored + report.num_too_long == 10
    assert 0 < report.num_too_long < 10
    assert "the engine takes 60 tokens, fewer than the 512 asked for" in caplog.text
    lines = [json.loads(line) for line in (tmp_path / "store" / "rejected.jsonl").read_text().splitlines()]
    assert all(line["reason"].startswith("row must have at most 60 tokens, got ") for line in lines)


def test_server_of_another_model_is_refused(running: Running, tmp_path: Path) -> None:
    for name, changes in (("weights", {"seed": 1}), ("config.json", {"rms_norm_eps": 1e-6})):
        (tmp_path / name).mkdir()
        other = write_tiny_target(tmp_path / name / "target", **changes)
        config = make_config(other, tmp_path / name, engine="sglang", server=running.attached)
        with pytest.raises(ServerError, match=rf"must serve the target '.*', got '.*' with another {name}; start it"):
            run_extraction(config)


def test_server_in_another_dtype_is_refused(running: Running, tmp_path: Path) -> None:
    config = config_for(running, tmp_path)
    config = replace(config, target=replace(config.target, dtype="bfloat16"))
    with pytest.raises(ServerError, match=r"target.dtype must be the servers', got 'bfloat16' and states in float32"):
        run_extraction(config)


def test_states_of_a_target_without_room_beside_the_server_are_not_compared(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("eagle3.capture.parity.available_memory", lambda: 1000)
    run_extraction(config_for(running, tmp_path, regenerate=RegenerateConfig(enabled=False)))
    parity = json.loads((tmp_path / "store" / "parity.json").read_text())
    assert parity["states_skipped"].startswith("transformers needs ")
    assert parity["states_skipped"].endswith("of memory for this target, 1.0 KiB are free")
    assert (parity["cosine"], parity["relative_error"], parity["agreement"]) == ([], [], 1.0)
    assert f"are not compared with transformers' own, since {parity['states_skipped']}" in caplog.text


def stored_samples(path: Path) -> dict[str, StoredSample]:
    """Returns the samples of a store as they are stored, by id."""
    store = FeatureStore(path)
    assert store.verify() == []
    return {entry.sample_id: store.read_stored(i) for i, entry in enumerate(store.entries)}


def test_command_starts_a_server_of_its_own_that_codes_what_it_records(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", prompt_rows(4))
    own = server_config(tmp_path, flags={"max-total-tokens": 4096})
    flags = [f"server.flags.{name}={value}" for name, value in own.flags.items() if name != "dtype"]
    env = [f"server.env.{name}={value}" for name, value in own.env.items()]
    settings = [f"target.path={running.target}", "target.dtype=float32", "regenerate.max_new_tokens=4"]
    settings.append("server.max_requests=1")  # a forward for each sequence: two servers then agree in every bit
    started = [f"server.python={own.python}", f"server.log={own.log}", *flags, *env]
    attached = [f"server.urls=[{running.attached.urls[0]}]", f"server.staging_dir={running.attached.staging_dir}"]
    with monkeypatch.context() as patch:  # nothing is left to be coded here
        patch.setattr(FeatureWriter, "write", None)
        run_command_line(
            patch, "--prompts", str(prompts), *settings, *started, f"store.path={tmp_path / 'own'}", "store.codec=int8"
        )
    assert Path(own.log).stat().st_size > 0
    assert "coded as int8" in Path(own.log).read_text()
    for name, codec in (("exact", "exact"), ("attached", "int8")):  # by a server that does not code
        store = [f"store.path={tmp_path / name}", f"store.codec={codec}"]
        run_command_line(monkeypatch, "--prompts", str(prompts), *settings, *attached, *store)
    exact = contents(tmp_path / "exact")
    assert len(exact) == 4
    wanted = {name: encode_sample(sample, HIDDEN, "int8") for name, sample in exact.items()}
    for name in ("own", "attached"):
        seen = stored_samples(tmp_path / name)
        assert seen.keys() == wanted.keys()
        for sample_id, sample in wanted.items():
            assert seen[sample_id].columns.keys() == sample.columns.keys()
            for column, tensor in sample.columns.items():
                assert torch.equal(seen[sample_id].columns[column], tensor), (name, sample_id, column)
    parity = json.loads((tmp_path / "own" / "parity.json").read_text())
    assert parity["states_skipped"] is None
    assert 1e-4 < max(parity["relative_error"]) < 0.01  # decoded
