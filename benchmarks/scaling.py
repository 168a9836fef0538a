"""Training over GPUs: tokens/s from a store on the disk, ZeRO-1 and ZeRO-2, warm and cold, and the largest head.

    python benchmarks/scaling.py --dir DIR [--gpus 1 2 4] [--out benchmarks/results/scaling.json]

DIR is a folder on the disk in question. It is removed, unless --gpus comes without a number: then the stores are
written there, and that is all. Samples are 8,192 random tokens, all but the first supervised; a GPU takes two of them
in a step. One GPU is measured on as many GPUs at the same time as there are shapes.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from scaling_rank import COLD_WARM_UP_STEPS, SHAPES, Case
from store import fill_store, make_manifest

from eagle3.features.codec import EXACT_CODECS
from eagle3.features.record import FeatureSample, supervised_rows
from eagle3.features.stored import encode_sample

HERE = Path(__file__).resolve().parent
RANK_LIMIT_SECONDS = 400


def write_store(path: Path, shape_name: str, num_tokens: int, num_samples: int, dtype: torch.dtype) -> float:
    """Writes samples of so many tokens; returns GB/s down to the disk."""
    shape = SHAPES[shape_name]
    generator = torch.Generator().manual_seed(0)
    loss_mask = torch.arange(num_tokens) >= 1
    rows = supervised_rows(loss_mask)
    states = torch.randn(num_tokens, shape.hidden_size, generator=generator).to(dtype)
    sample = FeatureSample(
        sample_id="0",
        input_ids=torch.randint(min(1000, shape.vocab_size), (num_tokens,), generator=generator, dtype=torch.int32),
        loss_mask=loss_mask,
        aux_hidden_states=torch.cat([states.roll(number, 0) for number in range(3)], dim=1),
        last_hidden_states=states[: rows.numel()],
        last_rows=rows,
        target_logz=torch.full((rows.numel(),), 12.0),
    )
    codec = EXACT_CODECS[dtype]
    manifest = dataclasses.replace(
        make_manifest(shape.hidden_size, codec), dtype=str(dtype).removeprefix("torch."), vocab_size=shape.vocab_size
    )
    stored = encode_sample(sample, shape.hidden_size, codec)
    seconds = fill_store(path, [stored], manifest, num_samples * stored.num_bytes)
    return sum(shard.stat().st_size for shard in path.glob("shard-*")) / seconds / 1e9


class Launch:
    """A torchrun that works on a plan."""

    def __init__(self, root: Path, name: str, cases: list[Case], stores: dict[str, str], devices: list[int]) -> None:
        self._out = root / f"{name}.json"
        self._log = root / f"{name}.log"
        plan = {"cases": [dataclasses.asdict(case) for case in cases], "stores": stores, "out": str(self._out)}
        path = root / f"{name}.plan.json"
        path.write_text(json.dumps(plan))
        env = os.environ | {
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)),
            "PYTHONPATH": f"{HERE.parent}:{os.environ.get('PYTHONPATH', '')}",
            # cuBLAS asks for it before CUDA starts; the price of determinism is measured against steps with it.
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4"),
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={len(devices)}"]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, str(HERE / "scaling_rank.py"), str(path)], env=env, stdout=log, stderr=subprocess.STDOUT
            )

    def figures(self) -> list[dict[str, Any]]:
        """Waits for the ranks; what they had written stays if they fail, with the end of their log."""
        try:
            code: int | None = self._process.wait(RANK_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = None
        found: list[dict[str, Any]] = json.loads(self._out.read_text()) if self._out.exists() else []
        if code != 0:
            print(f"{self._log.name} ended with {code}:\n{self._log.read_text()[-3000:]}", file=sys.stderr)
        return found


def cases_for(shapes: list[str], num_tokens: int, num_steps: int) -> list[Case]:
    """Returns the trainings that are timed on every number of GPUs."""
    return [Case(shape, zero, 2 * num_tokens, num_steps) for shape in shapes for zero in (1, 2)]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Writes the stores, and trains on them."""
    root: Path = arguments.dir
    root.mkdir(parents=True, exist_ok=True)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    stores = {name: str(root / name) for name in arguments.shapes}
    written = root / "written.json"
    write_speeds: dict[str, float] = json.loads(written.read_text()) if written.exists() else {}
    for name, path in stores.items():
        if name not in write_speeds:
            write_speeds[name] = write_store(Path(path), name, arguments.tokens, arguments.samples, dtype)
            written.write_text(json.dumps(write_speeds))
    rows: list[dict[str, Any]] = []
    if 1 in arguments.gpus:  # side by side, as far as there are GPUs
        width = max(1, torch.cuda.device_count())
        for begin in range(0, len(arguments.shapes), width):
            some = arguments.shapes[begin : begin + width]
            launches = [
                Launch(root, f"one-{name}", cases_for([name], arguments.tokens, arguments.steps), stores, [device])
                for device, name in enumerate(some)
            ]
            rows += [row for launch in launches for row in launch.figures()]
    for number in arguments.gpus:
        if number == 1:
            continue
        cases = cases_for(arguments.shapes, arguments.tokens, arguments.steps)
        cold_steps = arguments.samples // (2 * number) - COLD_WARM_UP_STEPS
        cases += [Case(name, 2, 2 * arguments.tokens, cold_steps, cold=True) for name in arguments.shapes]
        cases += [Case(arguments.shapes[0], 2, 2 * arguments.tokens, arguments.steps, deterministic=True)]
        if number == max(arguments.gpus) and arguments.largest:
            cases.append(Case(arguments.largest, 2, 2 * arguments.tokens, arguments.steps, save=True))
        rows += Launch(root, f"{number}", cases, stores, list(range(number))).figures()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "command": "python " + " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "commit": arguments.commit or commit,
        "hardware": torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.processor(),
        "num_cpus": os.cpu_count(),
        "versions": {
            "torch": torch.__version__,
            "deepspeed": importlib.metadata.version("deepspeed"),
            "python": platform.python_version(),
        },
        "sample_tokens": arguments.tokens,
        "store_write_gb_per_second": write_speeds,
        "rows": rows,
    }


def show(report: dict[str, Any]) -> None:
    """Prints the table; scaling is against one GPU with the same shape and stage."""
    rows = [row for row in report["rows"] if "out_of_memory" not in row]
    plain = [row for row in rows if not row["cold"] and not row["deterministic"]]
    alone = {(row["shape"], row["zero"]): row["tokens_per_second"] for row in plain if row["gpus"] == 1}
    titles = ["work", "GPUs", "ZeRO", "tokens/s", "x", "ms/step", "data wait"]
    table = Table(*titles, "begin GiB", "peak", "estimate", "disk GB/s")
    for row in rows:
        one = alone.get((row["shape"], row["zero"]))
        notes = [name for name in ("cold", "deterministic") if row[name]]
        table.add_row(
            " ".join([row["shape"], *notes]),
            str(row["gpus"]),
            str(row["zero"]),
            f"{row['tokens_per_second']:,.0f}",
            "-" if one is None else f"{row['tokens_per_second'] / one:.2f}",
            f"{row['ms_per_step']:.0f}",
            f"{max(row['data_wait_share']):.1%}",
            *(gib(max(row[name])) for name in ("begin_bytes", "peak_bytes")),
            gib(row["estimated_bytes"]),
            "-" if row["disk"] is None else f"{row['disk']['gb_per_second']:.2f}",
        )
    console = Console(width=120)
    console.print(table)
    for row in report["rows"]:
        if "out_of_memory" in row:
            console.print(f"{row['shape']} on {row.get('gpus')}: out of memory: {row['out_of_memory'][:300]}")
        elif "saved" in row:
            save = row["saved"]
            console.print(
                f"{row['shape']}: {row['num_parameters'] / 1e9:.2f} B parameters; a save of "
                f"{save['num_bytes'] / 1e9:.1f} GB held the steps up for {save['stall_seconds']:.2f} s and was written "
                f"in {save['written_seconds']:.1f} s; steps beside it: "
                f"{' '.join(f'{seconds:.2f}' for seconds in save['steps_beside_seconds'])} s"
            )


def gib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**30:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="a folder on the disk in question")
    parser.add_argument("--gpus", type=int, nargs="*", default=[1, 2], help="numbers of GPUs; none: write the stores")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["d4096", "d7168"])
    parser.add_argument("--largest", choices=SHAPES, default="d7168-full", help="the head whose memory is compared")
    parser.add_argument("--tokens", type=int, default=8192, help="of a sample")
    parser.add_argument("--steps", type=int, default=4, help="timed optimizer steps")
    parser.add_argument("--samples", type=int, default=16, help="of each store: 8 for each GPU last a cold run")
    parser.add_argument("--commit", default="", help="in the place of what git says")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    arguments = parser.parse_args()
    report = run(arguments)
    if not arguments.gpus:
        return
    show(report)
    shutil.rmtree(arguments.dir)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
