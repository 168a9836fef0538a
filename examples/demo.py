"""The whole road on a small real model: extract, train, evaluate, and one table at the end.

Runs the three commands as a user types them, and writes `ckpts/demo/result.json`. A demo that was stopped goes on
where it was; a finished one is moved aside and done anew. With --engine sglang the target runs in an SGLang server,
on fewer prompts, and another one serves the drafter at the end (`ckpts/demo-sglang`).
"""

import argparse
import json
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from eagle3.loading import loading

with loading():
    import psutil
    import torch

    from eagle3.capture.server import running_server
    from eagle3.cli import run_command
    from eagle3.config import ServerConfig

PROMPTS = Path("examples/prompts.jsonl")
SAMPLE_SECONDS = 0.5  # between two looks at the memory of a stage's processes
NEXT_COMMANDS = (
    "python extract.py --prompts examples/prompts.jsonl engine=transformers",
    "accelerate launch train.py --config configs/train/demo.yaml run.deepspeed=zero2",
    "python evaluate.py --config configs/evaluate/demo.yaml drafter=ckpts/demo-train/drafter out=ckpts/evaluation",
)
# Through SGLang on two CPU cores, which decodes 30 tokens a second there: a quarter of the prompts, half the length.
SGLANG_PROMPTS = 90
SGLANG_TOKENS = 64
SGLANG_MINUTES = 20
NUM_DRAFT_TOKENS = 3
CPU_FLAGS: dict[str, Any] = {
    "device": "cpu",
    "cuda-graph-backend-decode": "disabled",
    "cuda-graph-backend-prefill": "disabled",
    "mem-fraction-static": 0.3,
    "max-total-tokens": 16384,
    "skip-server-warmup": True,
}
CPU_ENV = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="the target, a Hugging Face directory")
    parser.add_argument("--engine", choices=["transformers", "sglang"], default="transformers")
    parser.add_argument("--serving-python", default=".venv-sglang/bin/python", help="an interpreter that has sglang")
    arguments = parser.parse_args()
    demo = Path("ckpts/demo" if arguments.engine == "transformers" else "ckpts/demo-sglang")
    move_finished_demo_aside(demo)
    demo.mkdir(parents=True, exist_ok=True)
    target = f"target.path={arguments.model}"
    stages = stages_of(demo, target)
    seconds, peak_bytes = {}, 0
    with ExitStack() as stack:
        if arguments.engine == "sglang":
            print(f"this takes about {SGLANG_MINUTES} minutes on two CPU cores", flush=True)
            change_to_sglang(stages, demo, arguments.serving_python)
        for name, command in stages.items():
            if name == "evaluate" and arguments.engine == "sglang":
                server = stack.enter_context(serving(demo, arguments.model, arguments.serving_python))
                command = [*command, f"server={server}"]
            seconds[name], stage_bytes = run_stage(name, [sys.executable, *command])
            peak_bytes = max(peak_bytes, stage_bytes)
    result = collect(demo, seconds, peak_bytes)
    (demo / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    show(demo, result, target)


def stages_of(demo: Path, target: str) -> dict[str, list[str]]:
    """Returns the commands, name by name, in their order."""
    extract = ["extract.py", "--prompts", str(PROMPTS), "--config", "configs/extract/demo.yaml", target]
    # accelerate gives a process one thread unless it is told otherwise.
    threads = ["--num_cpu_threads_per_process", str(psutil.cpu_count(logical=False) or 1)]
    launch = ["-m", "accelerate.commands.accelerate_cli", "launch", *threads]
    train = ["train.py", "--config", "configs/train/demo.yaml", target, f"run.dir={demo / 'train'}", "run.resume=auto"]
    evaluate = ["evaluate.py", "--config", "configs/evaluate/demo.yaml", target]
    return {"extract": extract, "train": [*launch, *train], "evaluate": evaluate}


def change_to_sglang(stages: dict[str, list[str]], demo: Path, serving_python: str) -> None:
    """Has SGLang run the target, on the first prompts of the file."""
    prompts = demo / "prompts.jsonl"
    prompts.write_text("".join(PROMPTS.read_text(encoding="utf-8").splitlines(keepends=True)[:SGLANG_PROMPTS]))
    store = demo / "features"
    flags = {} if torch.cuda.is_available() else CPU_FLAGS | {"attention-backend": "torch_native"}
    env = {} if torch.cuda.is_available() else CPU_ENV
    server = [f"server.python={serving_python}", f"server.log={demo / 'capture.log'}"]
    server += [f"server.flags.{name}={value}" for name, value in flags.items()]
    server += [f"server.env.{name}={value}" for name, value in env.items()]
    tokens = f"regenerate.max_new_tokens={SGLANG_TOKENS}"
    stages["extract"] += [f"store.path={store}", "engine=sglang", tokens, *server]
    stages["extract"][stages["extract"].index(str(PROMPTS))] = str(prompts)
    stages["train"].append(f"data.path={store}")
    stages["evaluate"] += [f"prompts.path={prompts}", f"store={store}", f"max_new_tokens={SGLANG_TOKENS}"]
    stages["evaluate"] += [f"drafter={demo / 'train' / 'drafter'}", f"out={demo / 'evaluation'}", "batch_size=4"]
    stages["evaluate"] += ["compare_untrained=false", "timed_prompts=0"]


@contextmanager
def serving(demo: Path, model: str, serving_python: str) -> Iterator[str]:
    """Serves target and drafter as in production, and returns the URL once it answers."""
    flags: dict[str, Any] = {
        "dtype": "bfloat16",
        "speculative-algorithm": "EAGLE3",
        "speculative-draft-model-path": str(demo / "train" / "drafter"),
        "speculative-num-steps": NUM_DRAFT_TOKENS,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": NUM_DRAFT_TOKENS + 1,
    }
    env: dict[str, str] = {}
    if not torch.cuda.is_available():
        # Of SGLang's backends for CPUs the one that verifies drafts, with its ops in plain torch.
        flags |= CPU_FLAGS | {"attention-backend": "intel_amx"}
        env = CPU_ENV | {"EAGLE3_CPU_KERNELS": "1"}
    print(f"\n[serve] {serving_python} -m sglang.launch_server (log: {demo / 'serving.log'})", flush=True)
    config = ServerConfig(python=serving_python, log=str(demo / "serving.log"))
    with running_server(config, model, flags, env) as server:
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
        server.wait_until(lambda: server.post("/generate", body, 600), timeout_seconds=1800)
        yield server.url


def move_finished_demo_aside(demo: Path) -> None:
    """Renames a demo that has its result, so that its figures stay."""
    if not (demo / "result.json").exists():
        return
    number = 1
    while (old := demo.with_name(f"{demo.name}-{number}")).exists():
        number += 1
    demo.rename(old)
    print(f"the finished demo is now {old}; this one starts anew", flush=True)


def run_stage(name: str, command: list[str]) -> tuple[float, int]:
    """Runs one command; returns its wall seconds and the peak of its processes' resident bytes."""
    print(f"\n[{name}] {' '.join(['python', *command[1:]])}", flush=True)
    started = time.monotonic()
    process = psutil.Popen(command)
    peak = [0]
    watcher = threading.Thread(target=watch_memory, args=(process, peak), daemon=True)
    watcher.start()
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.wait()  # the signal is its own, too: it saves what it has
        print(f"the demo's {name} stage was interrupted; the same command goes on where it stopped", file=sys.stderr)
        sys.exit(130)
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


def collect(demo: Path, seconds: dict[str, float], peak_bytes: int) -> dict[str, Any]:
    """Returns the demo's figures, from what the stages left behind."""
    evaluation = json.loads((demo / "evaluation" / "result.json").read_text())
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "command": "make demo" if demo.name == "demo" else "make demo ENGINE=sglang",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        **evaluation,
        "wall_seconds": {**{name: round(value, 1) for name, value in seconds.items()}, "all": sum(seconds.values())},
        "peak_memory_bytes": peak_bytes,
    }


def show(demo: Path, result: dict[str, Any], target: str) -> None:
    """Prints the demo's figures, and what to try next on the same target."""
    trained = result["trained"]["all_answers"]
    name = "untrained" if result["untrained"] else "simulated_store"
    beside = result[name]["all_answers"]
    stages = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result["wall_seconds"].items())
    print(f"\nTrained {trained['tau']:.2f} ({trained['low']:.2f} to {trained['high']:.2f}), ", end="")
    title = "untrained" if name == "untrained" else "simulated on the held-out part of the store"
    print(f"{title} {beside['tau']:.2f} ({beside['low']:.2f} to {beside['high']:.2f}) tokens a round.")
    print(f"Time: {stages}. Peak memory: {result['peak_memory_bytes'] / 2**30:.1f} GiB.")
    print(f"All figures: {demo / 'result.json'}\n\nNext, in this environment (source .venv/bin/activate):")
    for command in NEXT_COMMANDS:
        print(f"  {command} {target}")


def hardware() -> str:
    """Names what the stages ran on."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return f"{psutil.cpu_count()} CPU cores, {psutil.virtual_memory().total / 2**30:.0f} GiB"


if __name__ == "__main__":
    run_command(main)
