"""Training speed: whole optimizer steps of the real training code on random features that lie on the GPU.

    python benchmarks/train.py [--work NAME ...] [--out benchmarks/results/train.json]

A step is forward, backward, clipping and AdamW. FLOPs are those of `Shape.flops_per_token`, with every row active;
where rows are skipped the share of the limit is left out, for the work is then less than the formula says. The formula
is that of any engine; "multiplied" is the share that counts only what this one multiplies.
"""

import argparse
import dataclasses
import json
import platform
import subprocess
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from profiling import LIMIT_FLOPS, profile_step
from rich.console import Console
from rich.table import Table

from eagle3.config import DataConfig, DraftConfig, ObjectiveConfig, RunConfig, TargetConfig, TrainConfig
from eagle3.draft.context_attention import Documents, context_backward, context_forward
from eagle3.draft.draft_vocab import DraftVocab
from eagle3.draft.initial import init_drafter
from eagle3.draft.model import DrafterConfig, Eagle3Drafter
from eagle3.draft.target_weights import TargetWeights
from eagle3.draft.ttt import PackedSequences
from eagle3.training.batches import Position, StepBatch
from eagle3.training.distributed import start
from eagle3.training.engine import Engine, TTTModule
from eagle3.training.optimizer_step import take_step
from eagle3.training.packs import CodedPack

TTT_STEPS = 7


@dataclass(frozen=True)
class Shape:
    """Sizes of a drafter and its target."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    draft_vocab_size: int
    vocab_size: int

    def flops_per_token(self, document_tokens: int) -> float:
        """Forward and backward of all K steps with every row active, in documents of this many tokens."""
        d_model, query_size = self.hidden_size, self.num_heads * self.head_dim
        layer = 2 * d_model * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        layer += query_size * d_model + 3 * d_model * self.intermediate_size
        head = d_model * self.draft_vocab_size
        per_step = 6 * layer + 6 * head + 7 * document_tokens * query_size
        return TTT_STEPS * per_step + 12 * d_model**2 + 2 * head

    def spared_flops_per_token(self) -> float:
        """What the formula counts and is not multiplied: embeddings' part of queries, keys and values, but for once."""
        return (TTT_STEPS - 1) * 6 * self.hidden_size * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


D4096 = Shape(4096, 14336, 32, 8, 128, 32000, 128256)
D7168 = Shape(7168, 18432, 64, 8, 128, 32000, 163840)
D576 = Shape(576, 1536, 9, 3, 64, 16384, 49152)


@dataclass(frozen=True)
class Work:
    """One row of the table."""

    shape: Shape
    document_lengths: tuple[int, ...]  # of one micro-batch, which is one optimizer step
    prompt_share: float = 0.0  # of each document, unsupervised
    accepted_share: float | None = None  # rejected chains leave; a seeded mask says which, this share of rows goes on


def corpus_lengths(num_tokens: int, mean: int, seed: int) -> tuple[int, ...]:
    """Lengths like those of a chat corpus: log-normal with a standard deviation of 0.8 in the logarithm."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while (rest := num_tokens - sum(lengths)) > 64:
        draw = float(torch.randn((), generator=generator)) * 0.8 - 0.32  # exp has mean 1
        lengths.append(min(rest, max(64, round(mean * 2.718281828**draw))))
    return tuple(lengths)


WORKS = {
    "d4096-8x2048": Work(D4096, (2048,) * 8),
    "d4096-2x8192": Work(D4096, (8192,) * 2),
    "d4096-1x16384": Work(D4096, (16384,)),
    "d4096-corpus": Work(D4096, corpus_lengths(32768, 700, seed=0), prompt_share=0.5),
    "d4096-corpus-70-accepted": Work(D4096, corpus_lengths(32768, 700, seed=0), prompt_share=0.5, accepted_share=0.7),
    "d7168-2x8192": Work(D7168, (8192,) * 2),
    "d7168-1x32768": Work(D7168, (32768,)),
    "d576-corpus": Work(D576, corpus_lengths(32768, 700, seed=0), prompt_share=0.5),
    "tiny": Work(Shape(64, 128, 4, 2, 16, 256, 512), (32, 48), prompt_share=0.5),
    "tiny-70-accepted": Work(Shape(64, 128, 4, 2, 16, 256, 512), (32, 48), prompt_share=0.5, accepted_share=0.7),
}


def random_pack(work: Work, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> PackedSequences:
    shape, lengths = work.shape, work.document_lengths
    num_tokens = sum(lengths)
    mask = torch.cat([torch.arange(length) >= int(length * work.prompt_share) for length in lengths])
    positions = torch.cat([torch.arange(length) for length in lengths])
    target_rows = (mask.roll(-1) & (positions.roll(-1) > 0)).nonzero().flatten()

    def states(rows: int, width: int) -> torch.Tensor:
        return torch.randn(rows, width, device=device, generator=generator, dtype=torch.float32).to(dtype)

    return PackedSequences(
        input_ids=torch.randint(shape.vocab_size, (num_tokens,), device=device, generator=generator),
        positions=positions.to(device),
        loss_mask=mask,
        document_lengths=lengths,
        aux_hidden_states=states(num_tokens, 3 * shape.hidden_size),
        target_rows=target_rows,
        last_hidden_states=states(target_rows.numel(), shape.hidden_size),
        # What a store keeps; of random states and heads it is near log V + D * 0.02**2 / 2.
        target_logz=torch.full((target_rows.numel(),), 12.0, device=device),
        sample_ids=tuple(f"random-{index}" for index in range(len(lengths))),
    )


def random_target(shape: Shape, device: torch.device, dtype: torch.dtype) -> TargetWeights:
    generator = torch.Generator(device).manual_seed(0)

    def weights(*sizes: int) -> torch.Tensor:
        return (torch.randn(*sizes, device=device, generator=generator) * 0.02).to(dtype)

    return TargetWeights(
        embed_tokens=weights(shape.vocab_size, shape.hidden_size),
        lm_head=weights(shape.vocab_size, shape.hidden_size),
        norm=torch.ones(shape.hidden_size, device=device, dtype=dtype),
        rms_norm_eps=1e-5,
    )


def drafter_config(shape: Shape) -> DrafterConfig:
    return DrafterConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        draft_vocab_size=shape.draft_vocab_size,
        capture_layers=(2, 16, 29),
        rms_norm_eps=1e-5,
        max_position_embeddings=65536,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )


def make_engine(work: Work, dtype: torch.dtype) -> Engine:
    shape = work.shape
    config = TrainConfig(
        target=TargetConfig(path="random"),
        data=DataConfig(path="random"),
        draft=DraftConfig(draft_vocab_size=shape.draft_vocab_size),
        objective=ObjectiveConfig(ttt_steps=TTT_STEPS, drop_rejected=work.accepted_share is not None),
        run=RunConfig(mixed_precision="bf16" if dtype == torch.bfloat16 else "no"),
    )
    accelerator, world = start(config)
    target = random_target(shape, world.device, dtype)
    with world.device:
        drafter = Eagle3Drafter(drafter_config(shape))
    kept = torch.arange(shape.draft_vocab_size)
    vocab = DraftVocab(d2t=torch.zeros_like(kept), t2d=torch.arange(shape.vocab_size) < shape.draft_vocab_size)
    init_drafter(drafter, target, vocab, seed=0, init_from_target=False)
    module = TTTModule(drafter, target, config.objective, bf16=dtype == torch.bfloat16)
    return Engine(config, accelerator, world, module)


def measure(name: str, work: Work, num_steps: int, trace: Path | None) -> dict[str, Any]:
    """Times optimizer steps after warm-up; the figure is the median step."""
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    engine = make_engine(work, dtype)
    device = engine.world.device
    generator = torch.Generator(device).manual_seed(1)
    packed = random_pack(work, device, dtype, generator)
    num_tokens = packed.input_ids.numel()
    num_supervised = packed.counted(1)[0].numel()
    batch = StepBatch(
        packs=[CodedPack.of(packed)],
        has_filler=False,
        sample_ids=[list(packed.sample_ids)],
        num_tokens=num_tokens,
        num_supervised=num_supervised,
        next_position=Position(),
    )

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    started = time.perf_counter()
    take_step(engine, batch, learning_rate=1e-5)
    synchronize()
    first_seconds = time.perf_counter() - started
    for _ in range(2):
        result = take_step(engine, batch, learning_rate=1e-5)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(num_steps):
        synchronize()
        started = time.perf_counter()
        result = take_step(engine, batch, learning_rate=1e-5)
        synchronize()
        seconds.append(time.perf_counter() - started)
    peak_gib = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    stages = None
    if trace is not None:
        stages = profile_step(lambda: take_step(engine, batch, learning_rate=1e-5), device, trace, name)
    median = sorted(seconds)[len(seconds) // 2]
    flops = sum(length * work.shape.flops_per_token(length) for length in work.document_lengths)
    spared = num_tokens * work.shape.spared_flops_per_token()
    on_limit = work.prompt_share == 0 and device.type == "cuda"
    return {
        "work": name,
        "tokens": num_tokens,
        "documents": len(work.document_lengths),
        "rows_per_step": [int(count) for count in result.sums.num_counted],
        "ms_per_step": median * 1e3,
        "ms_spread": [min(seconds) * 1e3, max(seconds) * 1e3],
        "tokens_per_second": num_tokens / median,
        "supervised_rows_per_second": num_supervised / median,
        "share_of_limit": flops / median / LIMIT_FLOPS if on_limit else None,
        "multiplied_share_of_limit": (flops - spared) / median / LIMIT_FLOPS if on_limit else None,
        "attention_share_of_limit": attention_share(work, packed) if device.type == "cuda" else None,
        "peak_gib": peak_gib,
        "first_step_seconds": first_seconds,
        "stages_ms": stages,
        "shape": dataclasses.asdict(work.shape),
    }


def imposed_mask(accepted_share: float) -> AbstractContextManager[Any]:
    """Has a seeded mask say which rows are right: random drafters never are."""
    generators: dict[str, torch.Generator] = {}

    def is_right(number: int, chosen: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
        device = str(chosen.device)
        generator = generators.setdefault(device, torch.Generator(chosen.device)).manual_seed(number)
        return torch.rand(chosen.shape, device=chosen.device, generator=generator) < accepted_share

    return mock.patch("eagle3.draft.objective._is_right", is_right)


def attention_share(work: Work, packed: PackedSequences) -> float:
    """Returns the share of the limit at which the context's attention runs alone, forward and backward."""
    shape = work.shape
    device, num_tokens = packed.input_ids.device, packed.input_ids.numel()
    documents = Documents.of(work.document_lengths, device)
    query, grad = torch.randn(2, num_tokens, shape.num_heads, shape.head_dim, device=device).bfloat16()
    context = torch.randn(num_tokens, 2 * shape.num_kv_heads, shape.head_dim, device=device).bfloat16()
    keys, values = context.chunk(2, dim=1)

    def run() -> None:
        output, lse = context_forward(query, keys, values, documents)
        context_backward(grad, query, output, lse, keys, values, documents)

    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(5):
        run()
    end.record()
    torch.cuda.synchronize()
    query_size = shape.num_heads * shape.head_dim
    flops = sum(7 * length**2 * query_size for length in work.document_lengths)  # causal, forward and backward
    return flops / (start.elapsed_time(end) / 5e3) / LIMIT_FLOPS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", nargs="+", choices=WORKS, default=[name for name in WORKS if "tiny" not in name])
    parser.add_argument("--steps", type=int, default=7, help="timed optimizer steps")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="also write where a step's time goes")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.work:
        share = WORKS[name].accepted_share
        try:
            with nullcontext() if share is None else imposed_mask(share):
                rows.append(measure(name, WORKS[name], arguments.steps, arguments.profile))
        except torch.OutOfMemoryError as error:
            rows.append({"work": name, "out_of_memory": str(error)})
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    show(rows)
    if arguments.out is not None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        profiled = " --profile DIR" if arguments.profile is not None else ""
        command = f"python benchmarks/train.py --work {' '.join(arguments.work)} --steps {arguments.steps}{profiled}"
        report = {
            "command": command,
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit.stdout.strip(),
            "hardware": torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.processor(),
            "versions": {
                "torch": torch.__version__,
                "cudnn": torch.backends.cudnn.version(),
                "triton": metadata.version("triton") if torch.cuda.is_available() else None,
            },
            "rows": rows,
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


def show(rows: list[dict[str, Any]]) -> None:
    columns = ("work", "tokens", "ms/step", "tokens/s", "share of limit", "multiplied", "attention alone", "peak GiB")
    table = Table(*columns, "first step s")
    for row in rows:
        if "out_of_memory" in row:
            table.add_row(row["work"], "out of memory")
            continue
        shares = ("share_of_limit", "multiplied_share_of_limit", "attention_share_of_limit")
        share, multiplied, attention = ("-" if row[key] is None else f"{row[key]:.1%}" for key in shares)
        peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
        table.add_row(
            row["work"],
            f"{row['tokens']:,}",
            f"{row['ms_per_step']:.1f}",
            f"{row['tokens_per_second']:,.0f}",
            share,
            multiplied,
            attention,
            peak,
            f"{row['first_step_seconds']:.1f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
