"""The context's attention in the kernels that a GPU has for it, side by side.

    python benchmarks/attention.py [--out FILE]

Forward and backward of one draft step in bf16, 32 query and 8 key heads of 128. FLOPs are those of a causal mask; the
limit is 989 TFLOP/s. The error is that of all results together against the first kernel's.
"""

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from profiling import LIMIT_FLOPS
from rich.console import Console
from rich.table import Table
from torch import Tensor

from eagle3.draft.context_attention import Documents, Kernel, context_backward, context_forward, kernel_for

DOCUMENTS = ((2048,) * 8, (8192,) * 2, (16384,))
KERNELS: tuple[Kernel, ...] = ("flash", "cudnn")
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
REPEATS = 20


def milliseconds(function: Any) -> float:
    """Returns the median time of a call."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
    for start, end in events:
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[REPEATS // 2]


def measure(lengths: tuple[int, ...], kernel: Kernel, inputs: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
    """Times one kernel; returns its row, and what it computed."""
    query, keys, values, grad = inputs
    documents = Documents.of(lengths, query.device)
    chosen = kernel_for(query, documents)
    with mock.patch("eagle3.draft.context_attention.kernel_for", return_value=kernel):

        def forward() -> tuple[Tensor, Tensor]:
            return context_forward(query, keys, values, documents)

        started = time.perf_counter()
        output, lse = forward()

        def backward() -> tuple[Tensor, Tensor, Tensor]:
            return context_backward(grad, query, output, lse, keys, values, documents)

        results = [output, lse, *backward()]
        torch.cuda.synchronize()
        first = time.perf_counter() - started
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        times = {"forward_ms": milliseconds(forward), "backward_ms": milliseconds(backward)}
    flops = sum(7 * length**2 for length in lengths) * HEADS * HEAD_DIM
    row = {
        "documents": f"{len(lengths)} x {lengths[0]}",
        "kernel": kernel,
        "chosen": kernel == chosen,
        **times,
        "share_of_limit": flops / (sum(times.values()) / 1e3) / LIMIT_FLOPS,
        "extra_mib": (torch.cuda.max_memory_allocated() - before) / 2**20,
        "first_call_seconds": first,
    }
    return row, results


def compare(lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    """Measures all kernels on the same random tensors."""
    num_tokens = sum(lengths)
    torch.manual_seed(0)
    query, grad = torch.randn(2, num_tokens, HEADS, HEAD_DIM, device="cuda").bfloat16()
    keys, values = torch.randn(num_tokens, 2 * KV_HEADS, HEAD_DIM, device="cuda").bfloat16().chunk(2, dim=1)
    rows: list[dict[str, Any]] = []
    reference: list[Tensor] = []
    for kernel in KERNELS:
        try:
            row, results = measure(lengths, kernel, [query, keys, values, grad])
        except RuntimeError as error:  # a kernel that this GPU does not have is a row, too
            rows.append({"documents": f"{len(lengths)} x {lengths[0]}", "kernel": kernel, "failed": str(error)})
            continue
        reference = reference or results
        differences = [
            float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(results, reference, strict=True)
        ]
        rows.append({**row, "largest_error": max(differences)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    arguments = parser.parse_args()
    rows = [row for lengths in DOCUMENTS for row in compare(lengths)]
    table = Table("documents", "kernel", "forward ms", "backward ms", "share of limit", "MiB", "first call s", "error")
    for row in rows:
        if "failed" in row:
            table.add_row(row["documents"], row["kernel"], row["failed"])
            continue
        table.add_row(
            row["documents"],
            row["kernel"] + (" (chosen)" if row["chosen"] else ""),
            f"{row['forward_ms']:.2f}",
            f"{row['backward_ms']:.2f}",
            f"{row['share_of_limit']:.1%}",
            f"{row['extra_mib']:.0f}",
            f"{row['first_call_seconds']:.1f}",
            f"{row['largest_error']:.4f}",
        )
    Console(width=120).print(table)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        report = {
            "command": "python benchmarks/attention.py",
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit.stdout.strip(),
            "hardware": torch.cuda.get_device_name(0),
            "versions": {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()},
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
