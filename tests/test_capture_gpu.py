"""On GPUs, in bf16: what real SGLang servers record is what transformers computes, for every shape of target.

SGLANG_PYTHON names the serving environment's interpreter. All GPUs that there are serve together, so that a machine of
two tests tensor parallelism.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from conftest import write_tokenizer
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from eagle3.capture.client import SGLangEngine
from eagle3.capture.inprocess import TransformersEngine
from eagle3.capture.launch import capture_flags, flag_arguments, free_port, installed_version
from eagle3.capture.server import capturing_servers
from eagle3.capture.staging import DIRECTORY_VARIABLE, LAYERS_VARIABLE
from eagle3.config import ServerConfig, TargetConfig
from eagle3.prompts.tokenizers import load_tokenizer

SERVING_PYTHON = os.environ.get("SGLANG_PYTHON", "")
NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(not (NUM_GPUS and SERVING_PYTHON), reason="needs a GPU, and SGLANG_PYTHON")

LAYERS = [1, 3, 5]
CHUNK = 512  # tokens of one prefill forward
LENGTHS = [1, 700, 33, CHUNK * 5 // 2, 90, 256, 512]
FLAGS: dict[str, Any] = {
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "skip-tokenizer-init": True,
    "max-total-tokens": 16384,
    "mem-fraction-static": 0.5,
    "chunked-prefill-size": CHUNK,
    "cuda-graph-max-bs": 4,  # graphs of decoding stay on
    "disable-custom-all-reduce": True,
}
# A bf16 state is 0.9995 of the one that transformers makes, but for rows whose router chose other experts at a near
# tie. Random routers tie often: after six layers with experts the mean over all rows was 0.979 on an H200.
MIN_MEDIAN_COSINE = 0.999
MIN_MEAN_COSINE = {"deepseek_v3": 0.97, "kimi_k25": 0.97}  # the rest: as the median
VOCAB_SIZE = 1024
# Starts a server whose pictures are nobody's business: a processor for them needs files of a real model.
TEXT_SERVER = (
    "import sys; from sglang.srt.plugins import load_plugins; load_plugins(); "
    "from sglang.srt.server_args import prepare_server_args; from sglang.launch_server import run_server; "
    "args = prepare_server_args(sys.argv[1:]); args.enable_multimodal = False; run_server(args)"
)
COMMON = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 4096, "hidden_size": 1024, "num_hidden_layers": 7}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 2048}
EXPERTS = {
    "moe_intermediate_size": 512,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 2048,
    # transformers knows these by heart, SGLang reads them from the file.
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "ep_size": 1,
    "seq_aux": True,
    "num_nextn_predict_layers": 0,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **COMMON, **HEADS},
    "qwen3": {"model_type": "qwen3", **COMMON, **HEADS},
    "deepseek_v3": {"model_type": "deepseek_v3", **COMMON, **EXPERTS},
}
VISION = {
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 128,
    "hidden_size": 128,
    "vt_hidden_size": 128,
    "mm_hidden_size": 128,
}


@dataclass(frozen=True)
class Served:
    """A target behind a server, and its text model for transformers."""

    engine: SGLangEngine
    reference: Path


def write_target(directory: Path, shape: dict[str, Any]) -> Path:
    """Writes a random target in bf16."""
    torch.manual_seed(0)
    # Twice the usual spread, so that layers change the stream enough to be told apart.
    known = {name: value for name, value in shape.items() if name != "model_type"}
    config = AutoConfig.for_model(shape["model_type"], **known, initializer_range=0.04)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    written = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**written, **shape}, indent=1))
    write_tokenizer(directory)
    return directory


def write_kimi(directory: Path, text_directory: Path) -> Path:
    """Writes Kimi-K2.5's wrapper around a DeepSeek-V3: same weights, under its nested names."""
    directory.mkdir()
    text_config = json.loads((text_directory / "config.json").read_text())
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "torch_dtype": "bfloat16",
        "text_config": text_config,
        "vision_config": {**VISION, "text_hidden_size": text_config["hidden_size"]},
        "media_placeholder_token_id": VOCAB_SIZE - 1,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    for path in text_directory.glob("*.safetensors"):
        weights = {f"language_model.{name}": tensor for name, tensor in load_file(path).items()}
        save_file(weights, directory / path.name, metadata={"format": "pt"})
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    """Starts all servers at once: each takes a minute or two."""
    root = tmp_path_factory.mktemp("targets")
    targets = {name: write_target(root / name, shape) for name, shape in SHAPES.items()}
    if "SMOLLM2" in os.environ:
        targets["smollm2"] = Path(os.environ["SMOLLM2"])
    staging = tmp_path_factory.mktemp("kimi_staging")
    with ExitStack() as stack:
        started = {}
        for name, target in targets.items():
            config = ServerConfig(
                python=SERVING_PYTHON, flags=FLAGS, log=str(root / f"{name}.log"), tensor_parallel_size=NUM_GPUS
            )
            started[name] = config, *stack.enter_context(capturing_servers(config, str(target), LAYERS))
        coded = replace(started["llama"][0], log=str(root / "llama_int8.log"))
        servers = capturing_servers(coded, str(targets["llama"]), LAYERS, "int8")
        started["llama as int8"] = coded, *stack.enter_context(servers)
        targets["llama as int8"] = targets["llama"]
        kimi = write_kimi(root / "kimi_k25", targets["deepseek_v3"])
        url = stack.enter_context(text_server(kimi, staging, root / "kimi_k25.log"))
        config = ServerConfig(urls=[url], staging_dir=str(staging))
        started["kimi_k25"] = config, *stack.enter_context(capturing_servers(config, str(kimi), LAYERS))
        targets["kimi_k25"] = targets["deepseek_v3"]
        yield {
            name: Served(
                SGLangEngine(servers, area, config, LAYERS, "int8" if name.endswith("int8") else None), targets[name]
            )
            for name, (config, servers, area) in started.items()
        }


@contextmanager
def text_server(target: Path, staging: Path, log_path: Path) -> Iterator[str]:
    """Starts a server of a multimodal target that takes no pictures, as somebody else would; yields its address."""
    port = free_port()
    flags = {"model-path": target, "tp-size": NUM_GPUS, **capture_flags(installed_version(SERVING_PYTHON)), **FLAGS}
    arguments = flag_arguments({**flags, "host": "127.0.0.1", "port": port})
    variables = {DIRECTORY_VARIABLE: str(staging), LAYERS_VARIABLE: ",".join(map(str, LAYERS))}
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [SERVING_PYTHON, "-c", TEXT_SERVER, *arguments],
            env={**os.environ, **variables},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for_start(url, process, log_path)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for_start(url: str, process: "subprocess.Popen[bytes]", log_path: Path) -> None:
    """Returns once a server listens, which it does when its model is loaded."""
    deadline = time.monotonic() + 300
    while True:
        try:
            requests.get(f"{url}/server_info", timeout=5)
            return
        except requests.RequestException:
            assert process.poll() is None, log_path.read_text()[-2000:]
            assert time.monotonic() < deadline, url
            time.sleep(1)


def random_ids(*lengths: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("name", [*SHAPES, "llama as int8", "smollm2", "kimi_k25"])
def test_states_are_those_of_transformers_at_exactly_these_boundaries(served: dict[str, Served], name: str) -> None:
    if name not in served:
        pytest.skip("SMOLLM2 names no directory")
    engine, path = served[name].engine, served[name].reference
    target = TargetConfig(str(path), dtype="bfloat16", device="cuda")
    reference = TransformersEngine(target, LAYERS, load_tokenizer(str(path), False))
    sequences = random_ids(*LENGTHS, seed=1) * 2  # twice: what a prefix cache would serve the second time
    captured = engine.capture(sequences)
    own = [[state.cuda() for state in reference.hidden_states(sequence)] for sequence in sequences]
    boundaries = [torch.cat(states).float() for states in zip(*own, strict=True)]  # L+1 of (N, D)
    aux = torch.cat([each.aux_hidden_states for each in captured]).cuda().float()  # (N, A*D)
    last = torch.cat([each.last_hidden_states for each in captured]).cuda().float()  # (N, D)
    assert [len(each.last_hidden_states) for each in captured] == LENGTHS * 2
    for layer, state in zip([*LAYERS, -1], [*aux.split(last.shape[1], dim=1), last], strict=True):
        cosines = [torch.cosine_similarity(state, boundary, dim=1) for boundary in boundaries]
        wanted = cosines[layer]
        nearest = max(range(len(cosines)), key=lambda k: float(cosines[k].mean()))
        beside = max(float(c.mean()) for k, c in enumerate(cosines) if k != layer % len(cosines))
        print(f"{name} {layer}: mean {wanted.mean():.5f} median {wanted.median():.5f} beside {beside:.3f}")
        assert nearest == layer % len(cosines), (layer, nearest)
        assert wanted.median() >= MIN_MEDIAN_COSINE, (layer, float(wanted.median()))
        assert wanted.mean() >= MIN_MEAN_COSINE.get(name, MIN_MEDIAN_COSINE), (layer, float(wanted.mean()))
    assert engine.area.used_bytes == 0
    assert len(list(engine.area.directory.glob("plugin-*.json"))) == 1, "one writer per server"
    assert not list(engine.area.directory.glob("*.safetensors"))
