"""The whole road on a small real model: extract, train, evaluate, and one table at the end.

Runs the three commands as a user types them, and writes `ckpts/demo/result.json`. A demo that was stopped goes on
where it was; a finished one is moved aside and done anew.
"""

import argparse
import json
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch

DEMO = Path("ckpts/demo")
SAMPLE_SECONDS = 0.5  # between two looks at the memory of a stage's processes
NEXT_COMMANDS = (
    "python extract.py --prompts examples/prompts.jsonl engine=transformers",
    "accelerate launch train.py --config configs/train/demo.yaml run.deepspeed=zero2",
    "python evaluate.py --config configs/evaluate/demo.yaml drafter=ckpts/demo-train/drafter out=ckpts/evaluation",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="the target, a Hugging Face directory")
    model = parser.parse_args().model
    move_finished_demo_aside()
    DEMO.mkdir(parents=True, exist_ok=True)
    target = f"target.path={model}"
    extract = ["extract.py", "--prompts", "examples/prompts.jsonl", "--config", "configs/extract/demo.yaml", target]
    # accelerate gives a process one thread unless it is told otherwise.
    threads = ["--num_cpu_threads_per_process", str(psutil.cpu_count(logical=False) or 1)]
    launch = ["-m", "accelerate.commands.accelerate_cli", "launch", *threads]
    train = ["train.py", "--config", "configs/train/demo.yaml", target, f"run.dir={DEMO / 'train'}", "run.resume=auto"]
    evaluate = ["evaluate.py", "--config", "configs/evaluate/demo.yaml", target]
    stages = {"extract": extract, "train": [*launch, *train], "evaluate": evaluate}
    seconds, peak_bytes = {}, 0
    for name, command in stages.items():
        seconds[name], stage_bytes = run_stage(name, [sys.executable, *command])
        peak_bytes = max(peak_bytes, stage_bytes)
    result = collect(seconds, peak_bytes)
    (DEMO / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    show(result, target)


def move_finished_demo_aside() -> None:
    """Renames a demo that has its result, so that its figures stay."""
    if not (DEMO / "result.json").exists():
        return
    number = 1
    while (old := DEMO.with_name(f"demo-{number}")).exists():
        number += 1
    DEMO.rename(old)
    print(f"the finished demo is now {old}; this one starts anew", flush=True)


def run_stage(name: str, command: list[str]) -> tuple[float, int]:
    """Runs one command; returns its wall seconds and the peak of its processes' resident bytes."""
    print(f"\n[{name}] {' '.join(['python', *command[1:]])}", flush=True)
    started = time.monotonic()
    process = psutil.Popen(command)
    peak = [0]
    watcher = threading.Thread(target=watch_memory, args=(process, peak), daemon=True)
    watcher.start()
    code = process.wait()
    watcher.join()
    if code != 0:
        sys.exit(f"the demo's {name} stage ended with exit code {code}; the same command goes on where it stopped")
    return time.monotonic() - started, peak[0]


def watch_memory(process: psutil.Popen, peak: list[int]) -> None:
    """Keeps the largest sum of resident bytes over a process and its descendants in `peak[0]`, until it ends."""
    while process.poll() is None:
        total = 0
        for member in [process, *process.children(recursive=True)]:
            try:
                total += member.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        peak[0] = max(peak[0], total)
        time.sleep(SAMPLE_SECONDS)


def collect(seconds: dict[str, float], peak_bytes: int) -> dict[str, Any]:
    """Returns the demo's figures, from what the stages left behind."""
    evaluation = json.loads((DEMO / "evaluation" / "result.json").read_text())
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "command": "make demo",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        **evaluation,
        "wall_seconds": {**{name: round(value, 1) for name, value in seconds.items()}, "all": sum(seconds.values())},
        "peak_memory_bytes": peak_bytes,
    }


def show(result: dict[str, Any], target: str) -> None:
    """Prints the demo's figures, and what to try next on the same target."""
    trained, untrained = result["trained"]["all_answers"], result["untrained"]["all_answers"]
    stages = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result["wall_seconds"].items())
    gain = trained["tau"] - untrained["tau"]
    print(f"\nTrained {trained['tau']:.2f} ({trained['low']:.2f} to {trained['high']:.2f}), ", end="")
    print(f"untrained {untrained['tau']:.2f} ({untrained['low']:.2f} to {untrained['high']:.2f}): ", end="")
    print(f"a gain of {gain:.2f} tokens a round.")
    print(f"Time: {stages}. Peak memory: {result['peak_memory_bytes'] / 2**30:.1f} GiB.")
    print(f"All figures: {DEMO / 'result.json'}\n\nNext, in this environment (source .venv/bin/activate):")
    for command in NEXT_COMMANDS:
        print(f"  {command} {target}")


def hardware() -> str:
    """Names what the stages ran on."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return f"{psutil.cpu_count()} CPU cores, {psutil.virtual_memory().total / 2**30:.0f} GiB"


if __name__ == "__main__":
    main()
