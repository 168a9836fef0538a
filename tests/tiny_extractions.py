"""Prompts for a tiny target, settings to extract them with, and what a store of them holds."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import extract
from eagle3.cli import run_command
from eagle3.config import ExtractConfig, PromptsConfig, RegenerateConfig, StoreConfig, TargetConfig
from eagle3.features.record import FeatureSample
from eagle3.features.store import FeatureStore

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


def run_command_line(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["extract.py", *arguments])
    run_command(extract.main)
