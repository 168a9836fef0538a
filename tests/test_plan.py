"""The plan says before a run what the store then weighs, and refuses what cannot fit."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.config import StoreConfig, UserError
from eagle3.features.manifest import Manifest
from eagle3.features.record import FeatureSample, supervised_rows
from eagle3.features.writer import FeatureWriter
from eagle3.plan import ExtractionPlan, SampleSize, plan_extraction


def plan(sizes: list[SampleSize], path: Path, *, is_bound: bool = False, **store: Any) -> ExtractionPlan:
    return plan_extraction(
        sizes,
        StoreConfig(path=str(path), **store),
        hidden_size=64,
        num_aux=3,
        codec="bf16",
        is_bound=is_bound,
        num_stored=3,
        stored_bytes=1000,
    )


def free_disk(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    usage = shutil.disk_usage("/")._replace(free=num_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


@pytest.mark.parametrize("last_rows", ["supervised", "all"])
def test_planned_bytes_are_those_of_the_store(tmp_path: Path, last_rows: Any) -> None:
    manifest = Manifest("t", "c", "r", None, "e", "v", (1, 2, 3), "bfloat16", "bf16", 64, 50, "t", "c", "p", last_rows)
    sizes = []
    with FeatureWriter(tmp_path, manifest, shard_bytes=60_000) as writer:
        for number in range(20):
            num_tokens = 20 + number
            mask = torch.arange(num_tokens) >= 15
            rows = torch.arange(num_tokens, dtype=torch.int32) if last_rows == "all" else supervised_rows(mask)
            states = torch.zeros(num_tokens, 64, dtype=torch.bfloat16)
            writer.write(
                FeatureSample(
                    sample_id=f"conversation-{number}",
                    input_ids=torch.zeros(num_tokens, dtype=torch.int32),
                    loss_mask=mask,
                    aux_hidden_states=states.repeat(1, 3),
                    last_hidden_states=states[rows],
                    last_rows=rows,
                    target_logz=torch.zeros(rows.numel()),
                )
            )
            sizes.append(SampleSize(num_tokens, int(mask.sum())))
    planned = plan(sizes, tmp_path, last_rows=last_rows, shard_bytes=60_000).num_bytes
    weight = sum(path.stat().st_size for path in tmp_path.glob("shard-*"))
    assert weight <= planned < 1.05 * weight, (weight, planned)


def test_the_line_says_samples_tokens_bytes_and_free_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_disk(monkeypatch, 3 * 2**30)
    sizes = [SampleSize(1000, 400)] * 1200
    exact, bound = plan(sizes, tmp_path / "new" / "store"), plan(sizes, tmp_path, is_bound=True, quota_bytes=2**30)
    assert str(exact) == (
        f"plan: 1,200 samples (stored already: 3 more), 1,200,000 tokens, 507.9 MiB into "
        f"{tmp_path / 'new' / 'store'}; free disk 3.0 GiB"
    )
    assert "at most 1,200,000 tokens, at most 507.9 MiB into" in str(bound)
    assert str(bound).endswith("free disk 3.0 GiB, quota 1.0 GiB")


def test_more_than_the_free_disk_is_refused_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_disk(monkeypatch, 100_000)
    too_much = plan([SampleSize(1000, 400)], tmp_path)
    message = f"must fit the free disk of 100000 bytes, got a plan of {too_much.num_bytes} bytes"
    with pytest.raises(UserError, match=re.escape(message)):
        too_much.check()
    with pytest.raises(UserError, match=r"got a plan of at most \d+ bytes .* set store.quota_bytes"):
        plan([SampleSize(1000, 400)], tmp_path, is_bound=True).check()
    plan([SampleSize(100, 40)], tmp_path).check()


def test_more_than_the_quota_is_refused_unless_it_is_only_a_bound(tmp_path: Path) -> None:
    sizes = [SampleSize(1000, 400)]
    num_bytes = plan(sizes, tmp_path).num_bytes
    message = f"within store.quota_bytes={num_bytes}, got a plan of {num_bytes + 1000} bytes"  # 1000 are stored
    with pytest.raises(UserError, match=re.escape(message)):
        plan(sizes, tmp_path, quota_bytes=num_bytes).check()
    plan(sizes, tmp_path, quota_bytes=num_bytes + 1000).check()
    plan(sizes, tmp_path, quota_bytes=num_bytes, is_bound=True).check()


def test_a_quota_within_the_free_disk_makes_a_bound_acceptable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_disk(monkeypatch, 100_000)
    plan([SampleSize(1000, 400)], tmp_path, is_bound=True, quota_bytes=101_000).check()
    with pytest.raises(UserError, match="must fit the free disk of 100000 bytes"):
        plan([SampleSize(1000, 400)], tmp_path, is_bound=True, quota_bytes=101_001).check()
