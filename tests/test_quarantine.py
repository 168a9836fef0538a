"""Samples whose states are not finite are set aside, counted and named; too many of them fail the run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_extractions import contents, make_config

from eagle3.capture import pipeline
from eagle3.capture.extraction import run_extraction
from eagle3.capture.faults import find_coded_fault, find_fault
from eagle3.config import UserError
from eagle3.features.codec import Codec, encode
from eagle3.features.record import FeatureSample
from eagle3.features.stored import join_columns


def poison(monkeypatch: pytest.MonkeyPatch, sample_ids: set[str]) -> None:
    def find_in_poisoned(sample: FeatureSample) -> str | None:
        aux = sample.aux_hidden_states.clone()
        if sample.sample_id in sample_ids:
            aux[3, 5] = float("nan")
            aux[4, 0] = float("inf")
        return find_fault(replace(sample, aux_hidden_states=aux))

    monkeypatch.setattr(pipeline, "find_fault", find_in_poisoned)


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
        assert find_coded_fault(stored) == find_fault(sample)
        assert (find_fault(sample) is None) == (places == [])


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
