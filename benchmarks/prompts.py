"""Rows per second and memory of reading, rendering and checking a large prompts file.

    python benchmarks/prompts.py --model DIRECTORY --out benchmarks/results/prompts.json

Synthetic conversations, a question of 12 English words and an answer of 28, are rendered with the model's own tokenizer
and template, every mask verified. Memory is that of all processes, sampled after each tenth of the rows.
"""

import argparse
import json
import os
import platform
import random
import tempfile
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from eagle3.config import PromptsConfig
from eagle3.prompts.conversations import BadRow
from eagle3.prompts.inspection import make_examine
from eagle3.prompts.rendering import make_renderer
from eagle3.prompts.tokenizers import load_tokenizer
from eagle3.prompts.workers import examine_rows
from eagle3.tracking import git_state

MAX_GROWTH = 64 * 2**20  # of three processes: caches fill, allocators keep what is free
BYTES_PER_ROW = 65  # to find ids that come again, the old table while a new one is filled included


def main() -> None:
    """Writes the rows, reads them, and prints what it saw."""
    parser = argparse.ArgumentParser(description="Rows per second and memory of rendering a large prompts file.")
    parser.add_argument("--model", required=True, help="a directory with a tokenizer and its template")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    arguments = parser.parse_args()
    if arguments.rows < 10_000 * arguments.workers:  # the clock starts once each process has had a thousand
        parser.error(f"--rows must be at least 10,000 for each of {arguments.workers} workers, got {arguments.rows}")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rows.jsonl"
        num_bytes = write_rows(path, arguments.rows)
        figures = measure(path, arguments.model, arguments.rows, arguments.workers)
    figures |= {
        "file_mib": round(num_bytes / 2**20, 1),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "versions": {name: version(name) for name in ("tokenizers", "transformers")},
        "commit": git_state()["commit"],
        "command": f"python benchmarks/prompts.py --model DIRECTORY --rows {arguments.rows} "
        f"--workers {arguments.workers}",
    }
    print(json.dumps(figures, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n")


def write_rows(path: Path, num_rows: int) -> int:
    """Writes conversations of one exchange, and returns the file's size."""
    chance = random.Random(0)
    examples = Path(__file__).resolve().parent.parent / "examples" / "prompts.jsonl"
    words = " ".join(json.loads(line)["messages"][0]["content"] for line in examples.open()).split()
    with path.open("w") as file:
        for i in range(num_rows):
            question, answer = (" ".join(chance.choices(words, k=count)) for count in (12, 28))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"id": f"row-{i}", "messages": messages}) + "\n")
    return path.stat().st_size


def measure(path: Path, model: str, num_rows: int, num_workers: int) -> dict[str, Any]:
    """Reads the file once."""
    renderer = make_renderer(load_tokenizer(model, False), PromptsConfig())
    config = PromptsConfig(str(path), num_workers=num_workers)
    num_accepted = num_tokens = num_supervised = 0
    resident: list[float] = []
    started = time.monotonic()
    for count, examined in enumerate(
        examine_rows(config, partial(make_examine, renderer, config), keep_rows=False), start=1
    ):
        assert not isinstance(examined.row, BadRow), examined.row
        assert examined.result is not None
        num_accepted += 1
        num_tokens += examined.result.num_tokens
        num_supervised += examined.result.num_supervised
        if count == num_workers * 1000:
            started, first = time.monotonic(), count  # the processes have started
            cpu_started = cpu_seconds()
        if count % (num_rows // 10) == 0:
            resident.append(round(resident_mib(), 1))
            cpu = cpu_seconds() - cpu_started
    seconds = time.monotonic() - started
    assert num_accepted == num_rows, f"every row must be accepted, got {num_accepted} of {num_rows}"
    grown = (resident[-1] - resident[0]) * 2**20
    assert grown < MAX_GROWTH + BYTES_PER_ROW * num_rows, f"memory must stay, got {grown} bytes more: {resident}"
    return {
        "rows": num_rows,
        "workers": num_workers,
        "rows_per_second": round((num_rows - first) / seconds),
        "rows_per_cpu_second": round((num_rows - first) / cpu),  # what other programs leave aside
        "load_average": round(os.getloadavg()[0], 1),
        "tokens_per_second": round(num_tokens * (1 - first / num_rows) / seconds),
        "mean_tokens": round(num_tokens / num_rows, 1),
        "mean_supervised": round(num_supervised / num_rows, 1),
        "resident_mib_after_each_tenth": resident,
    }


def cpu_seconds() -> float:
    """Returns the processor time of this process and its children."""
    process = psutil.Process()
    times = [each.cpu_times() for each in [process, *process.children(recursive=True)]]
    return float(sum(each.user + each.system for each in times))


def resident_mib() -> float:
    """Returns the resident memory of this process and its children."""
    process = psutil.Process()
    total: int = sum(each.memory_info().rss for each in [process, *process.children(recursive=True)])
    return total / 2**20


if __name__ == "__main__":
    main()
