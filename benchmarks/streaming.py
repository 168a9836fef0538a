"""Training on states that a server makes meanwhile, beside the same training on a store of them.

    python benchmarks/streaming.py --dir DIR --python SERVING [--serving 1] [--training 1] [--out FILE]

The first GPUs serve a random Llama-shaped target with SGLang, the next ones train, both through the commands that
people use. The store lies in DIR and has just been written, so it is read from the page cache.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM

from eagle3.capture.client import SGLangEngine
from eagle3.capture.server import capturing_servers
from eagle3.config import ServerConfig

ROOT = Path(__file__).resolve().parent.parent
WARM_UP_STEPS = 3
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 320},
    "d4096": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 12, "num_attention_heads": 32,
              "num_key_value_heads": 8, "vocab_size": 32000},
    "d7168": {"hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 12, "num_attention_heads": 56,
              "num_key_value_heads": 8, "vocab_size": 32000},
}  # fmt: skip


def write_target(path: Path, shape: dict[str, int], dtype: torch.dtype) -> None:
    """Writes a random target, and a tokenizer of as many words as it has tokens."""
    torch.manual_seed(0)
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    known = {**shape, **ids, "max_position_embeddings": 16384, "tie_word_embeddings": False}
    config = AutoConfig.for_model("llama", **known)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(path)
    words = {f"w{number}": number for number in range(shape["vocab_size"])}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w1", "eos_token": "w2", "unk_token": "w0"}
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))


def write_rows(path: Path, num_rows: int, num_tokens: int, vocab_size: int) -> None:
    """Writes rows of random tokens, all but the first supervised."""
    generator = torch.Generator().manual_seed(0)
    with path.open("w") as file:
        for number in range(num_rows):
            ids = torch.randint(3, vocab_size, (num_tokens,), generator=generator).tolist()
            mask = [0] + [1] * (num_tokens - 1)
            file.write(json.dumps({"id": f"row-{number}", "input_ids": ids, "loss_mask": mask}) + "\n")


def run(command: list[str], log: Path, gpus: list[int]) -> None:
    """Runs one of our commands on some GPUs."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "WANDB_MODE": "disabled"}
    env["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    with log.open("w") as file:
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{log.read_text()[-4000:]}"


def steps_of(run_dir: Path) -> dict[str, float]:
    """Returns the speed of a training's steps after the first ones, and the share that they waited for data."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "tokens_per_second" in line and line["step"] > WARM_UP_STEPS]
    seconds = [line["num_tokens"] / line["tokens_per_second"] for line in steps]
    waited = sum(line["time/data"] * each for line, each in zip(steps, seconds, strict=True))
    return {
        "num_steps": len(steps),
        "tokens_per_second": sum(line["num_tokens"] for line in steps) / sum(seconds),
        "data_wait_share": waited / sum(seconds),
        "memory_bytes": max(line["memory_bytes"] for line in steps),
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Writes target and prompts, serves, extracts, and trains twice."""
    root: Path = arguments.dir.absolute()
    root.mkdir(parents=True, exist_ok=True)
    shape, on_gpu = SHAPES[arguments.shape], torch.cuda.is_available()
    dtype = "bfloat16" if on_gpu else "float32"
    target = root / "target"
    write_target(target, shape, getattr(torch, dtype))
    if on_gpu:
        torch.cuda.empty_cache()
    samples_per_step = arguments.samples * arguments.training
    num_rows = round((arguments.steps + WARM_UP_STEPS) * samples_per_step * 1.1) + 8  # a tenth is held out
    write_rows(root / "rows.jsonl", num_rows, arguments.tokens, shape["vocab_size"])
    num_layers = shape["num_hidden_layers"]
    layers = [2, num_layers // 2, num_layers - 3]
    serving = list(range(arguments.serving))
    training = list(range(arguments.serving, arguments.serving + arguments.training))
    flags = dict(flag.split("=", 1) for flag in arguments.flag)
    server = ServerConfig(
        python=arguments.python,
        tensor_parallel_size=arguments.serving,
        flags={"dtype": dtype, **flags},
        env={"CUDA_VISIBLE_DEVICES": ",".join(map(str, serving))},
        log=str(root / "server.log"),
    )
    with capturing_servers(server, str(target), layers) as (servers, area):
        facts = SGLangEngine(servers, area, server, layers).facts  # it records
        attached = replace(ServerConfig(), urls=[servers[0].url], staging_dir=str(area.directory))
        extraction = {
            "target": {"path": str(target), "capture_layers": layers, "dtype": dtype},
            "prompts": {"path": str(root / "rows.jsonl")},
            "regenerate": {"enabled": False},
            "server": {"urls": attached.urls, "staging_dir": attached.staging_dir},
            "store": {"path": str(root / "store")},
            "tracking": {"backend": "none"},
        }
        (root / "live.yaml").write_text(yaml.safe_dump(extraction))
        run([sys.executable, "extract.py", "--config", str(root / "live.yaml")], root / "extract.log", training[:1])
        rows = {}
        for name, path in (("store", root / "store"), ("stream", root / "live.yaml")):
            settings = [
                f"data.path={path}", f"target.path={target}", f"target.capture_layers={layers}",
                f"target.dtype={dtype}", f"run.dir={root / f'on-{name}'}", "run.epochs=1", "data.held_out_share=0.05",
                f"data.samples_per_step={samples_per_step}", f"data.batch_tokens={arguments.batch_tokens}",
                f"run.max_steps={arguments.steps + WARM_UP_STEPS}", "run.log_every=1",
                "run.validate_every=1000000", "run.save_every=1000000", "tracking.backend=none",
                f"draft.draft_vocab_size={shape['vocab_size']}",
                f"run.deepspeed={'null' if arguments.zero is None else f'zero{arguments.zero}'}",
                f"run.mixed_precision={'bf16' if on_gpu else 'no'}",
            ]  # fmt: skip
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*launcher, f"--nproc_per_node={arguments.training}", "train.py", "--config", "drafter.yaml"]
            run([*command, *settings], root / f"{name}.log", training)
            rows[name] = steps_of(root / f"on-{name}")
            print(name, rows[name], flush=True)
    return {
        "command": "python " + " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "commit": arguments.commit,
        "hardware": torch.cuda.get_device_name(0) if on_gpu else platform.processor(),
        "num_cpus": os.cpu_count(),
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "sglang": facts.version},
        "shape": arguments.shape,
        "target": shape,
        "num_serving": arguments.serving,
        "num_training": arguments.training,
        "sample_tokens": arguments.tokens,
        "samples_per_step": samples_per_step,
        "rows": rows,
        "share_of_store": rows["stream"]["tokens_per_second"] / rows["store"]["tokens_per_second"],
    }


def show(report: dict[str, Any]) -> None:
    """Prints the table."""
    table = Table("states from", "tokens/s", "data wait", "peak GiB")
    for name, row in report["rows"].items():
        memory = f"{row['memory_bytes'] / 2**30:.1f}"
        table.add_row(name, f"{row['tokens_per_second']:,.0f}", f"{row['data_wait_share']:.1%}", memory)
    console = Console(width=100)
    console.print(f"{report['shape']}: {report['num_serving']} GPUs serve, {report['num_training']} train")
    console.print(table)
    console.print(f"stream: {report['share_of_store']:.1%} of the store's speed")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--dir", type=Path, required=True, help="a folder with room for target and store; it is removed"
    )
    parser.add_argument("--python", help="interpreter of the serving environment")
    parser.add_argument("--flag", action="append", default=[], metavar="NAME=VALUE", help="of SGLang")
    parser.add_argument("--shape", choices=SHAPES, default="d4096")
    parser.add_argument("--serving", type=int, default=1, help="GPUs of the server, tensor parallel")
    parser.add_argument("--training", type=int, default=1, help="GPUs of the training")
    parser.add_argument("--zero", type=int, choices=[1, 2], help="ZeRO's stage; without it DDP")
    parser.add_argument("--tokens", type=int, default=4096, help="of a sample")
    parser.add_argument("--samples", type=int, default=4, help="of each GPU and step")
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=20, help="timed optimizer steps")
    parser.add_argument("--commit", default="", help="where there is no git")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    arguments = parser.parse_args()
    report = measure(arguments)
    show(report)
    shutil.rmtree(arguments.dir)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
