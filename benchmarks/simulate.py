"""How fast acceptance is simulated: tokens of a store per second, reading, decoding and packing included.

    python benchmarks/simulate.py --out benchmarks/results/simulate.json

A store of random states of SmolLM2's sizes (D 576, V 49,152, documents of 700 tokens, the second half supervised) is
read once, so that its checksums are known, and then timed once for each way of serving. Random drafters are never
right, and rows that are not right leave early: so a seeded mask says that a draft is right in 60 % of the cases.
"""

import argparse
import json
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from eagle3.draft.model import DrafterConfig, Eagle3Drafter
from eagle3.draft.target_weights import TargetWeights
from eagle3.evaluation.simulate import batch_tokens_of, packs_of_store, parse_speculation, simulate_all
from eagle3.features.manifest import Manifest
from eagle3.features.record import FeatureSample, supervised_rows
from eagle3.features.store import FeatureStore
from eagle3.features.writer import FeatureWriter

HIDDEN_SIZE, VOCAB_SIZE, DOCUMENT_TOKENS = 576, 49152, 700
ACCEPTED_SHARE = 0.6
SETTINGS = ("3", "7", "7@1", "3/2/6", "5/4/16")


def write_random_store(path: Path, num_tokens: int) -> FeatureStore:
    manifest = Manifest(
        target_path="random", target_config_digest="0", target_revision="0", target_quantization=None,
        engine="transformers", engine_version="0", capture_layers=(2, 15, 27), dtype="bfloat16", codec="bf16",
        hidden_size=HIDDEN_SIZE, vocab_size=VOCAB_SIZE, tokenizer_digest="0", chat_template_digest="0",
        prompts_digest="0", last_rows="supervised",
    )  # fmt: skip
    with FeatureWriter(path, manifest, shard_bytes=2**28) as writer:
        for sample in random_samples(num_tokens // DOCUMENT_TOKENS):
            writer.write(sample)
    return FeatureStore(path)


def random_samples(count: int) -> Iterator[FeatureSample]:
    generator = torch.Generator().manual_seed(0)
    loss_mask = torch.arange(DOCUMENT_TOKENS) >= DOCUMENT_TOKENS // 2
    last_rows = supervised_rows(loss_mask)
    for number in range(count):
        yield FeatureSample(
            sample_id=str(number),
            input_ids=torch.randint(VOCAB_SIZE, (DOCUMENT_TOKENS,), generator=generator, dtype=torch.int32),
            loss_mask=loss_mask,
            aux_hidden_states=torch.randn(DOCUMENT_TOKENS, 3 * HIDDEN_SIZE, generator=generator).bfloat16(),
            last_hidden_states=torch.randn(last_rows.numel(), HIDDEN_SIZE, generator=generator).bfloat16(),
            last_rows=last_rows,
        )


def random_drafter(draft_vocab_size: int) -> Eagle3Drafter:
    """Returns a drafter of the sizes that SmolLM2 gives."""
    return Eagle3Drafter(
        DrafterConfig(
            hidden_size=HIDDEN_SIZE, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
            vocab_size=VOCAB_SIZE, draft_vocab_size=draft_vocab_size, capture_layers=(2, 15, 27), rms_norm_eps=1e-5,
            max_position_embeddings=8192, rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        )
    )  # fmt: skip


def imposed_mask(drafted: Tensor, recorded: Tensor) -> Tensor:
    """Says at random which drafts are right; of several drafts for one token the first is, if any."""
    generator = torch.Generator(drafted.device).manual_seed(drafted.numel())
    is_right = torch.rand(drafted.shape, device=drafted.device, generator=generator) < ACCEPTED_SHARE
    if drafted.ndim > 1:
        is_right[:, 1:] = False
    return is_right


def measure(store: FeatureStore, drafter: Eagle3Drafter, target: TargetWeights, setting: str) -> dict[str, Any]:
    speculation = parse_speculation(setting)
    limit = batch_tokens_of(drafter.config, target.embed_tokens)
    synchronize()
    started = time.perf_counter()
    packs = packs_of_store(store, range(len(store)), limit, target.embed_tokens.device)
    with (
        mock.patch("eagle3.evaluation.chains.is_right", imposed_mask),
        mock.patch("eagle3.evaluation.trees.is_right", imposed_mask),
    ):
        simulate_all({"random": drafter}, target, packs, [speculation])
    synchronize()
    seconds = time.perf_counter() - started
    return {"setting": setting, "seconds": seconds, "tokens_per_second": store.num_tokens / seconds}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_400_000, help="of the store, 3.5 kB each")
    parser.add_argument("--draft-vocab-size", type=int, default=32000)
    parser.add_argument("--setting", nargs="+", default=list(SETTINGS), help="ways of serving")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    drafter = random_drafter(arguments.draft_vocab_size).to(device, torch.bfloat16).eval()
    embed_tokens = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, device=device).bfloat16()
    target = TargetWeights(embed_tokens, embed_tokens, torch.ones(HIDDEN_SIZE, device=device), 1e-5)
    with tempfile.TemporaryDirectory() as directory:
        store = write_random_store(Path(directory) / "store", arguments.tokens)
        for setting in arguments.setting:  # reads every sample once, and compiles
            measure(store, drafter, target, setting)
        rows = [measure(store, drafter, target, setting) for setting in arguments.setting]
        num_tokens = store.num_tokens
    table = Table("setting", "seconds", "tokens/s")
    for row in rows:
        table.add_row(row["setting"], f"{row['seconds']:.2f}", f"{row['tokens_per_second']:,.0f}")
    Console(width=100).print(table)
    if arguments.out is not None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        report = {
            "command": f"python benchmarks/simulate.py --tokens {arguments.tokens} "
            f"--draft-vocab-size {arguments.draft_vocab_size} --setting {' '.join(arguments.setting)}",
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit.stdout.strip(),
            "hardware": torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.processor(),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "tokens": num_tokens,
            "accepted_share": ACCEPTED_SHARE,
            "rows": rows,
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
