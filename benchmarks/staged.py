"""Speed of what an extraction's one thread does with each sample that a server left in the staging directory.

    python benchmarks/staged.py [--dir /dev/shm] [--out benchmarks/results/staged.json]

GB are 10^9 bytes of captured states, of a sample whose last states are all kept. A second thread writes the store
(benchmarks/store.py), so the slower of the two is an extraction's limit behind the servers.
"""

import argparse
import json
import operator
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from eagle3.capture.faults import find_fault
from eagle3.capture.staging import AUX_NAME, LAST_NAME
from eagle3.capture.staging_area import read_sample
from eagle3.features.record import FeatureSample, supervised_rows
from eagle3.features.stored import encode_sample

NUM_AUX = 3
RUNS, WARM_UP_RUNS = 9, 2
NUMBER_BY_NUMBER = "finite, number by number"  # as it was done once; beside the others, not among them


def finite_number_by_number(sample: FeatureSample) -> bool:
    """Does with several temporary tensors of the sample's size what `find_fault` does without."""
    return all(bool(each.isfinite().all()) for each in (sample.aux_hidden_states, sample.last_hidden_states))


def measure(directory: Path, hidden_size: int, num_tokens: int) -> dict[str, float]:
    """Returns the median seconds of each stage, which take turns."""
    generator = torch.Generator().manual_seed(0)
    names = [*(f"{AUX_NAME}.{number}" for number in range(NUM_AUX)), LAST_NAME]
    states = {name: torch.randn(num_tokens, hidden_size, generator=generator).bfloat16() for name in names}
    ids = torch.arange(num_tokens, dtype=torch.int32)
    path = directory / "sample.safetensors"
    save_file({"input_ids": ids, **states}, path)
    loss_mask = torch.ones(num_tokens, dtype=torch.bool)
    rows = supervised_rows(loss_mask)
    seconds: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[..., Any], *arguments: Any) -> Any:
        started = time.perf_counter()
        result = work(*arguments)
        seconds.setdefault(name, []).append(time.perf_counter() - started)
        return result

    for _ in range(WARM_UP_RUNS + RUNS):
        staged = timed("read", read_sample, path)
        last = timed("supervised rows", operator.getitem, staged.last.codes, rows)
        sample = FeatureSample("x", ids, loss_mask, staged.aux.codes, last, rows)
        assert timed("finite", find_fault, sample) is None
        assert timed(NUMBER_BY_NUMBER, finite_number_by_number, sample)
        stored = encode_sample(sample, hidden_size, "bf16")  # as they are: nothing to do
        timed("checksum", stored.checksum)
    return {name: statistics.median(each[WARM_UP_RUNS:]) for name, each in seconds.items()}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="where servers leave samples")
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=4096, help="of the sample")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:
        seconds = measure(Path(directory), arguments.hidden_size, arguments.tokens)
    num_bytes = arguments.tokens * (NUM_AUX + 1) * arguments.hidden_size * torch.bfloat16.itemsize
    all_stages = sum(each for name, each in seconds.items() if name != NUMBER_BY_NUMBER)
    with_it = all_stages - seconds["finite"] + seconds[NUMBER_BY_NUMBER]
    report = {
        "command": f"python benchmarks/staged.py --hidden-size {arguments.hidden_size} --tokens {arguments.tokens}",
        "date": time.strftime("%Y-%m-%d"),
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "hardware": {"cores": len(os.sched_getaffinity(0))},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "threads": torch.get_num_threads(),
        "gb_per_second": {name: num_bytes / each / 1e9 for name, each in seconds.items()},
        "all_gb_per_second": num_bytes / all_stages / 1e9,
        "number_by_number_gb_per_second": num_bytes / with_it / 1e9,
    }
    table = Table("stage", "GB/s", "ms")
    for name, each in seconds.items():
        table.add_row(name, f"{num_bytes / each / 1e9:.2f}", f"{1e3 * each:.1f}")
    table.add_row("all", f"{num_bytes / all_stages / 1e9:.2f}", f"{1e3 * all_stages:.1f}")
    table.add_row("all, number by number", f"{num_bytes / with_it / 1e9:.2f}", f"{1e3 * with_it:.1f}")
    Console(width=100).print(table)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
