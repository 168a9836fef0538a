"""Trains the demo's drafter with the engine and with the dense definition, from one seed, and writes both losses.

python tests/record_loss_curves.py STORE TARGET [--steps 60]: benchmarks/results/loss_curves.json and
docs/loss_curves.png; some minutes on two CPU cores. PYTHONPATH names the repository.
"""

import argparse
import json
import os
import platform
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from dense_oracle import dense_sums
from matplotlib.figure import Figure

from eagle3.config import TrainConfig
from eagle3.config_file import find_config, load_config
from eagle3.training.trainer import train

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks/results/loss_curves.json"
PICTURE = ROOT / "docs/loss_curves.png"
# Name -> numbers that the parameters are multiplied in, and whether by the dense definition.
RUNS = {"dense, fp32": ("no", True), "engine, fp32": ("no", False), "engine, bf16": ("bf16", False)}


def run(store: Path, target: Path, directory: Path, num_steps: int, precision: str, is_dense: bool) -> dict[str, Any]:
    """Trains once; returns the loss of each step, the held-out tau before and after, and the seconds it took."""
    overrides = [
        f"data.path={store}",
        f"target.path={target}",
        "target.device=cpu",
        "data.held_out_share=0.1",
        f"run.dir={directory}",
        f"run.max_steps={num_steps}",
        f"run.mixed_precision={precision}",
        "run.log_every=1",
        "run.validate_every=100000",
        "run.save_every=100000",
        "tracking.backend=none",
    ]
    config = load_config(TrainConfig, find_config("demo.yaml", "train"), overrides)
    started = time.perf_counter()
    with ExitStack() as stack:
        if is_dense:
            stack.enter_context(mock.patch("eagle3.training.engine.ttt_sums", dense_sums))
            # Its softmax is over the whole head.
            whole = mock.patch("eagle3.training.trainer.device_weights", lambda target, target_ids, embeddings: target)
            stack.enter_context(whole)
        run_dir = train(config)
    seconds = time.perf_counter() - started
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    taus = [line["held_out/tau"] for line in lines if "held_out/tau" in line]
    return {"loss": [line["loss"] for line in lines if "loss" in line], "tau": taus[-1], "seconds": round(seconds, 1)}


def largest_difference(loss: list[float], other: list[float]) -> float:
    """Returns by what share of itself a step's loss differs at most."""
    return max(abs(a - b) / b for a, b in zip(loss, other, strict=True))


def draw(runs: dict[str, dict[str, Any]]) -> None:
    """Writes the curves on common axes, and by how much they differ from the dense one."""
    figure = Figure(figsize=(11, 4), dpi=110, layout="constrained")
    curves, differences = figure.subplots(1, 2)
    dense = runs["dense, fp32"]["loss"]
    for index, (name, one) in enumerate(runs.items()):
        steps = range(1, len(one["loss"]) + 1)
        curves.plot(steps, one["loss"], color=f"C{index}", linewidth=5 - 2 * index, label=name)
        if one["loss"] != dense:
            shares = [abs(a - b) / b for a, b in zip(one["loss"], dense, strict=True)]
            differences.semilogy(steps, shares, color=f"C{index}", label=name)
    curves.set(title="loss", xlabel="step")
    differences.set(title="difference from the dense one, as a share of it", xlabel="step")
    for axes in (curves, differences):
        axes.legend(fontsize="small")
    figure.savefig(PICTURE)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as name:
        runs = {
            title: run(arguments.store, arguments.target, Path(name) / str(number), arguments.steps, *settings)
            for number, (title, settings) in enumerate(RUNS.items())
        }
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT)
    dense = runs["dense, fp32"]["loss"]
    result = {
        "command": f"python tests/record_loss_curves.py STORE TARGET --steps {arguments.steps}",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "hardware": f"{os.cpu_count()} CPU cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "largest_difference": {
            name: largest_difference(one["loss"], dense) for name, one in runs.items() if name != "dense, fp32"
        },
        "runs": runs,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draw(runs)


if __name__ == "__main__":
    main()
