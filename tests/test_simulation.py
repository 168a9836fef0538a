"""`eagle3 simulate`: several drafters and ways of serving side by side, by domain, on what training left out."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from target_stores import LAYERS, write_target_store
from tiny_drafters import random_drafter
from transformers import AutoModelForCausalLM

from eagle3.commands.simulate import main
from eagle3.config import UserError
from eagle3.draft.export import export_drafter
from eagle3.draft.target_weights import load_target_config
from eagle3.evaluation.simulation import read_domains
from eagle3.evaluation.target import LocalTarget
from eagle3.features.record import FeatureSample, is_held_out
from eagle3.features.store import FeatureStore
from eagle3.features.writer import FeatureWriter


@pytest.fixture(scope="module")
def store(
    tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, make_sample: Callable[..., FeatureSample]
) -> Path:
    directory = tmp_path_factory.mktemp("simulation")
    samples = [make_sample(f"s{i}", [0] * 3 + [1] * (6 + i), seed=i) for i in range(10)]
    write_target_store(directory / "store", tiny_target, samples)
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    for seed in (0, 1):
        drafter = random_drafter(LocalTarget(model, LAYERS, frozenset()), 320, seed=seed)
        config = load_target_config(tiny_target)
        export_drafter(drafter, directory / f"drafter-{seed}", target_config=config, card="", dtype=torch.float32)
    return directory / "store"


def test_every_drafter_setting_and_domain_has_a_row(
    tmp_path: Path, tiny_target: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [
        {"id": f"s{i}", "domain": ["maths", "code"][i % 2], "messages": [{"role": "user", "content": "?"}]}
        for i in range(9)  # the last sample has no domain
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = [
        str(store),
        "--target",
        str(tiny_target),
        "--prompts",
        str(prompts),
        "--out",
        str(tmp_path / "a" / "o.json"),
    ]
    argv += ["--dtype", "float32", "--speculation", "3", "--speculation", "2/2/4", "--held-out-share", "0.5"]
    for seed in (0, 1):
        argv += ["--drafter", str(store.parent / f"drafter-{seed}")]
    assert main(argv) == 0
    figures = json.loads((tmp_path / "a" / "o.json").read_text())
    keys = [(Path(row["drafter"]).name, row["speculation"], row["domain"]) for row in figures["rows"]]
    names, domains = ["drafter-0", "drafter-1"], ["all", "code", "maths"]
    assert keys == [(name, setting, domain) for name in names for setting in ("3", "2/2/4") for domain in domains]
    held_out = [i for i in range(10) if is_held_out(f"s{i}", 0.5)]
    assert 0 < len(held_out) < 10
    assert figures["rows"][0]["acceptance"]["num_tokens"] == sum(6 + i for i in held_out)
    assert figures["rows"][2]["acceptance"]["num_answers"] == len([i for i in held_out if i < 9 and i % 2 == 0])
    assert figures["num_tokens"] == sum(9 + i for i in held_out)
    assert "2/2/4" in capsys.readouterr().out


def test_drafters_are_told_apart_and_numbers_are_whole_on_80_columns(
    tmp_path: Path,
    tiny_target: Path,
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = tmp_path / "o.json"
    argv = [str(store), "--target", str(tiny_target), "--out", str(out), "--speculation", "7"]
    names = ["a-run-of-a-week", "a-run-of-a-month"]
    for seed, name in enumerate(names):
        drafter = shutil.copytree(store.parent / f"drafter-{seed}", tmp_path / "ckpts" / name / "drafter")
        argv += ["--drafter", str(drafter)]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    folded = "".join(line.split()[0] for line in lines if line[:1].strip())
    for name, row in zip(names, json.loads(out.read_text())["rows"], strict=True):
        found = row["acceptance"]
        assert name in folded, lines
        for number in (f"{found['tau']:.3f}", f"{found['low']:.2f}-{found['high']:.2f}", f"{found['num_answers']}"):
            assert any(number in line.split() for line in lines), (number, lines)


@pytest.mark.parametrize("share", ["2", "0", "-1", "nan"])
def test_a_share_that_is_none_is_refused(share: str) -> None:
    with pytest.raises(UserError, match=r"--held-out-share must be above 0 and at most 1, got .*; leave it away"):
        main(["s", "--target", "t", "--drafter", "d", "--held-out-share", share])


def test_a_store_without_samples_is_refused(tmp_path: Path, tiny_target: Path, store: Path) -> None:
    empty = tmp_path / "empty"
    with FeatureWriter(empty, FeatureStore(store).manifest, shard_bytes=2**30):
        pass
    with pytest.raises(UserError, match=rf"a store must hold samples to simulate on, got none \({empty}\); capture"):
        main([str(empty), "--target", str(tiny_target), "--drafter", str(store.parent / "drafter-0")])


def test_a_share_that_leaves_nothing_is_refused(tiny_target: Path, store: Path) -> None:
    argv = [str(store), "--target", str(tiny_target), "--drafter", str(store.parent / "drafter-0")]
    with pytest.raises(UserError, match="--held-out-share must leave samples of the store, got none of 10 with 1e-09"):
        main([*argv, "--held-out-share", "1e-9"])


def test_rows_without_a_domain_for_want_of_a_row_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a", "prompt": "Hi?", "domain": "chat"}\n{"id": "b", "prompt": "Ho?"}\noops\n')
    with caplog.at_level(logging.WARNING):
        assert read_domains(path) == {"a": "chat"}
    assert "1 row cannot be read, so without a domain; the first is line 3: row must be JSON" in caplog.text
