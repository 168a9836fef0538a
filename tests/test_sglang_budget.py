"""Features that are many times the staging budget pass through it, within it, whole."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import write_tiny_target
from sglang_servers import server_config
from tiny_extractions import write_prompts

from eagle3.capture.extraction import run_extraction
from eagle3.config import ExtractConfig, PromptsConfig, RegenerateConfig, StoreConfig, TargetConfig
from eagle3.features.store import FeatureStore

LAYERS = [1, 2, 3]
HIDDEN_SIZE = 4096  # much to write and little to compute
BYTES_PER_TOKEN = (len(LAYERS) + 1) * HIDDEN_SIZE * 4 + 8
MIB = 2**20


@contextmanager
def watched(directory: Path) -> Iterator[list[int]]:
    """Looks all the time how many bytes of samples lie in a directory; yields the most."""
    most, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.001):
            total = 0
            for path in directory.glob("*/eagle3-*"):
                try:
                    total += path.stat().st_size
                except FileNotFoundError:
                    continue
            most[0] = max(most[0], total)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(
    ("budget_bytes", "feature_bytes"),
    [(8 * MIB, 200 * 10**6), pytest.param(64 * MIB, 2 * 10**9, marks=pytest.mark.soak)],
    ids=["200MB", "2GB"],
)
def test_budget_is_kept_and_nothing_is_lost(tmp_path: Path, budget_bytes: int, feature_bytes: int) -> None:
    target = write_tiny_target(
        tmp_path / "target",
        hidden_size=HIDDEN_SIZE,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    generator = torch.Generator().manual_seed(0)
    rows, num_tokens = [], 0
    while num_tokens * BYTES_PER_TOKEN < feature_bytes:
        # Bytes that no merge joins, and a token each for what the template writes around them.
        length = int(torch.randint(5, 60, (), generator=generator))
        text = "".join(chr(48 + i) for i in torch.randint(10, (length,), generator=generator).tolist())
        rows.append({"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "1234"}]})
        num_tokens += length
    (tmp_path / "staging").mkdir()
    config = ExtractConfig(
        target=TargetConfig(str(target), dtype="float32", capture_layers=LAYERS),
        store=StoreConfig(str(tmp_path / "store"), last_rows="all"),
        server=server_config(
            tmp_path,
            flags={"chunked-prefill-size": 1024, "max-total-tokens": 8192},
            staging_dir=str(tmp_path / "staging"),
            staging_bytes=budget_bytes,
        ),
        prompts=PromptsConfig(str(write_prompts(tmp_path / "prompts.jsonl", rows))),
        regenerate=RegenerateConfig(enabled=False),
    )
    started = time.monotonic()
    with watched(tmp_path / "staging") as most:
        report = run_extraction(config)
    print(f"{report.num_tokens} tokens, {most[0] / MIB:.1f} MiB at most, {time.monotonic() - started:.0f} s")
    assert report.num_stored == len(rows)
    assert report.num_tokens >= num_tokens
    assert report.num_bytes >= feature_bytes
    store = FeatureStore(tmp_path / "store")
    assert store.verify() == []
    assert store.num_tokens == report.num_tokens
    largest = max(entry.num_tokens for entry in store.entries) * BYTES_PER_TOKEN
    assert budget_bytes // 2 < most[0] <= budget_bytes + largest + 100_000  # and headers
