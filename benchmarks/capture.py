"""What recording costs: prefill speed of two SGLang servers, one that records and one that does not, turn by turn.

    python benchmarks/capture.py --shape smollm2 [--python SERVING] [--out benchmarks/results/capture.json]

Both servers have the same flags and hold the same model; a round sends the same requests to one of them and ends when
the last answer is there and, where states are recorded, when the last file is whole. Which server goes first changes
with each pair, so that neither has the warmer machine. A small target is prefilled as fast as one thread of Python
starts its kernels, whose speed changes by half for seconds at a time on a machine that others use too: many pairs tell
more there.
"""

import argparse
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table

from eagle3.capture.launch import capture_flags, installed_version
from eagle3.capture.server import Server, capturing_servers, running_server
from eagle3.capture.staging import request_id, sample_path
from eagle3.config import ServerConfig
from eagle3.features.codec import Codec, CodecName, state_bytes

BOOTSTRAP = 10_000
MIN_PAIRS = 7
WARM_UP_PAIRS = 2  # Triton compiles, clocks rise
POLL_SECONDS = 0.002
FLAGS: dict[str, Any] = {
    "load-format": "dummy",  # random weights: speed does not depend on them
    "skip-tokenizer-init": True,
    # The rest of what was free at the start stays free. A server counts what is free again when its weights are there:
    # on 139 GiB of a GPU, with 31 of weights and 5.5 of tokens for each of two, the last one still finds 16 to take.
    "mem-fraction-static": 0.6,
    "sleep-on-idle": True,  # else the server whose turn it is not keeps a core busy
    "max-total-tokens": 300_000,  # of what is found to take; so both take the same, in whatever order they load
}
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# DeepSeek-V3 with 16 of its 61 layers and of its 256 experts, so that two of them fit on one GPU. As many experts work
# on a token as in the real model, so a layer's work is the real one's, and the model's a quarter of it.
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "ep_size": 1,
    "seq_aux": True,
    "num_nextn_predict_layers": 0,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 129280,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SHAPES = {"smollm2": SMOLLM2, "deepseek-v3": DEEPSEEK_V3}


@dataclass(frozen=True)
class Load:
    """The requests of one round."""

    sequences: list[list[int]]
    posts: int  # HTTP requests that carry them, all at once

    @property
    def num_tokens(self) -> int:
        """All of them."""
        return sum(len(sequence) for sequence in self.sequences)


@dataclass(frozen=True)
class Round:
    """What one round took, and left."""

    seconds: float
    num_files: int
    num_bytes: int  # of states in them


def run_round(server: Server, load: Load, staging: Path | None, name: str) -> Round:
    """Sends all requests at once; with `staging` they are recorded, and the round lasts until their files are whole."""
    num_tokens = [len(sequence) for sequence in load.sequences]
    if staging is None:
        ids = [f"plain-{name}-{i}" for i in range(len(num_tokens))]
    else:
        ids = [request_id(length, f"{name}-{i}") for i, length in enumerate(num_tokens)]
    bodies = [
        {
            "input_ids": load.sequences[first :: load.posts],
            "rid": ids[first :: load.posts],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        }
        for first in range(load.posts)
    ]
    started = time.perf_counter()
    with ThreadPoolExecutor(load.posts) as pool:
        list(pool.map(lambda body: server.post("/generate", body, timeout_seconds=600), bodies))
    if staging is None:
        return Round(time.perf_counter() - started, 0, 0)
    paths = [sample_path(staging, each) for each in ids]
    for path in paths:
        while not path.exists():
            assert time.perf_counter() - started < 600, path
            time.sleep(POLL_SECONDS)
    seconds = time.perf_counter() - started
    num_bytes = sum(num_state_bytes(path) for path in paths)
    for path in paths:
        path.unlink()
    return Round(seconds, len(paths), num_bytes)


def num_state_bytes(path: Path) -> int:
    """Returns the bytes of a whole safetensors file without its header and its token ids."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(header_bytes))["input_ids"]["data_offsets"]
    return path.stat().st_size - 8 - header_bytes - (end - begin)


def interval_of_median(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Returns the bootstrapped 95 % interval of a median."""
    generator = random.Random(seed)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(BOOTSTRAP))
    return medians[round(0.025 * BOOTSTRAP)], medians[round(0.975 * BOOTSTRAP) - 1]


def bus_speeds(directory: Path) -> dict[str, float]:
    """Returns bytes per second that could not be passed: one plain copy to pinned memory, one plain write of a file."""
    num_bytes = 2**29
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    speeds = {}
    if torch.cuda.is_available():
        device = torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
        host.copy_(device)
        torch.cuda.synchronize()
        started = time.perf_counter()
        host.copy_(device, non_blocking=True)
        torch.cuda.synchronize()
        speeds["device_to_host"] = num_bytes / (time.perf_counter() - started)
    block = bytes(host.numpy())
    path = directory / "plain-write"
    started = time.perf_counter()
    path.write_bytes(block)
    speeds["file"] = num_bytes / (time.perf_counter() - started)
    path.unlink()
    return speeds


@contextmanager
def both_servers(
    config: ServerConfig, model: Path, layers: list[int], codec: Codec | None
) -> Iterator[tuple[Server, Server, Path]]:
    """Starts a plain server and one that records, with the same flags; yields them with the staging path."""
    with ExitStack() as stack:
        # The flags that recording needs, prefill graphs and the prefix cache off among them, on both.
        flags = capture_flags(installed_version(str(config.python)))
        plain = stack.enter_context(running_server(replace(config, log=config.log + ".plain"), str(model), flags, {}))
        servers, area = stack.enter_context(capturing_servers(config, str(model), layers, codec))
        for server in (plain, servers[0]):  # they load at the same time
            wait_until_ready(server, config)
        yield plain, servers[0], area.directory


def wait_until_ready(server: Server, config: ServerConfig) -> None:
    """Returns once a server has answered."""
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 1}}
    server.wait_until(lambda: server.post("/generate", body, 600), config.startup_timeout_seconds)


def measure_pairs(
    plain: Server, recording: Server, staging: Path, load: Load, expected_bytes: int, seconds: float
) -> list[tuple[float, float]]:
    """Returns the seconds of rounds without and with recording, in pairs, as many as fit into `seconds`."""
    pairs: list[tuple[float, float]] = []
    started = time.perf_counter()
    turns = [(plain, None), (recording, staging)]
    while len(pairs) < WARM_UP_PAIRS + MIN_PAIRS or time.perf_counter() - started < seconds:
        rounds = {}
        for server, directory in turns:
            rounds[directory] = run_round(server, load, directory, f"{len(pairs)}")
        recorded = rounds[staging]
        assert recorded.num_files == len(load.sequences), (recorded.num_files, len(load.sequences))
        assert recorded.num_bytes == expected_bytes, (recorded.num_bytes, expected_bytes)
        pairs.append((rounds[None].seconds, recorded.seconds))
        print("pair {}: {:.3f} s, recorded {:.3f} s".format(len(pairs), *pairs[-1]), file=sys.stderr)
        turns.reverse()
    return pairs[WARM_UP_PAIRS:]


def measure(arguments: argparse.Namespace, model: Path) -> None:
    """Runs the pairs and keeps the figures."""
    shape = json.loads((model / "config.json").read_text())
    num_layers, hidden_size = shape["num_hidden_layers"], shape["hidden_size"]
    layers = [1, num_layers // 2, num_layers - 1]
    flags = {**FLAGS, **dict(flag.split("=", 1) for flag in arguments.flag)}
    config = ServerConfig(
        python=arguments.python,
        flags=flags,
        log=str(model / "server.log"),
        tensor_parallel_size=arguments.tp,
        # Ranks compare what is free on their GPUs, while the other server loads.
        env={"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"},
    )
    generator = random.Random(0)
    vocab = range(10, shape["vocab_size"] - 10)
    sequences = [generator.choices(vocab, k=arguments.tokens) for _ in range(arguments.requests)]
    load = Load(sequences, posts=4)
    codec: Codec | None = None if arguments.codec == "exact" else arguments.codec
    expected_bytes = load.num_tokens * (len(layers) + 1) * state_bytes(codec or "bf16", hidden_size)
    with both_servers(config, model, layers, codec) as (plain, recording, staging):
        speeds = bus_speeds(staging)
        pairs = measure_pairs(plain, recording, staging, load, expected_bytes, arguments.seconds)
        overheads = [recorded / plain - 1 for plain, recorded in pairs]
        low, high = interval_of_median(overheads)
        plain_seconds, recorded_seconds = (statistics.median(each) for each in zip(*pairs, strict=True))
        row = {
            "work": arguments.shape,
            "codec": arguments.codec,
            "layers": layers,
            "hidden_size": hidden_size,
            "num_requests": len(sequences),
            "tokens_per_request": arguments.tokens,
            "tensor_parallel_size": arguments.tp,
            "num_pairs": len(pairs),
            "plain_tokens_per_second": load.num_tokens / plain_seconds,
            "recorded_tokens_per_second": load.num_tokens / recorded_seconds,
            "overhead": statistics.median(overheads),
            "overhead_low": low,
            "overhead_high": high,
            "pairs_seconds": pairs,
            "bytes_per_round": expected_bytes,
            "bytes_per_second": expected_bytes / recorded_seconds,
            "limits_bytes_per_second": speeds,
            "engine_version": recording.facts().version,
            "flags": flags,
        }
        keep(row, arguments.out)  # before the servers stop, which may take half a minute


def main() -> None:
    """Measures one target, and adds it to the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), required=True, help="of the target, which has random weights"
    )
    parser.add_argument("--python", help="interpreter of the serving environment")
    parser.add_argument("--flag", action="append", default=[], metavar="NAME=VALUE", help="of SGLang, for both servers")
    parser.add_argument("--codec", choices=get_args(CodecName), default="exact", help="of the recorded states")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512, help="of each request")
    parser.add_argument("--seconds", type=float, default=120, help="of measuring, with seven pairs at least")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--work-dir", type=Path, default=Path("ckpts/benchmark-capture"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    model = arguments.work_dir / arguments.shape
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(SHAPES[arguments.shape]))
    measure(arguments, model)


def _commit() -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()


def keep(row: dict[str, Any], out: Path | None) -> None:
    """Prints the figures, and puts them into the JSON in the place of older ones of the same work."""
    show(row)
    if out is None:
        return
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    key = ("work", "codec", "flags")
    rows = [each for each in rows if any(each[name] != row[name] for name in key)]
    made: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": os.environ.get("COMMIT") or _commit(),
    }
    report = {
        **made,
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores",
        "versions": {"python": platform.python_version(), "sglang": row["engine_version"]},
        "rows": [*rows, row | made],  # older ones say how they were made
    }
    out.write_text(json.dumps(report, indent=1) + "\n")


def show(row: dict[str, Any]) -> None:
    """Prints the figures as a table."""
    table = Table(
        title=f"Recording {row['work']} as {row['codec']}, SGLang {row['engine_version']}, {row['num_pairs']} pairs"
    )
    for column in ("plain tokens/s", "recorded tokens/s", "overhead", "95 %", "GB/s", "limits GB/s"):
        table.add_column(column, justify="right")
    limits = ", ".join(f"{name} {speed / 1e9:.1f}" for name, speed in row["limits_bytes_per_second"].items())
    table.add_row(
        f"{row['plain_tokens_per_second']:,.0f}",
        f"{row['recorded_tokens_per_second']:,.0f}",
        f"{row['overhead']:.1%}",
        f"{row['overhead_low']:.1%} to {row['overhead_high']:.1%}",
        f"{row['bytes_per_second'] / 1e9:.2f}",
        limits,
    )
    Console().print(table)


if __name__ == "__main__":
    main()
