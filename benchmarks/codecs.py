"""What a codec costs in acceptance: drafters trained from each, same samples, seeds and steps.

    python benchmarks/codecs.py --target DIR --store STORE --dir DIR [--out benchmarks/results/codecs.json]

STORE is an exact store of the target's features; where there is none it is captured first, from --prompts. A drafter
is measured on the exact features of the same held-out samples, since a server's are exact. A difference is that of a
codec's drafters and the exact store's of the same seeds; its interval resamples samples, with all seeds together.
"""

import argparse
import json
import platform
import subprocess
import time
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from eagle3.capture.extraction import run_extraction
from eagle3.config import (
    DataConfig,
    DraftConfig,
    ExtractConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PromptsConfig,
    RegenerateConfig,
    RunConfig,
    StoreConfig,
    TargetConfig,
    TrackingConfig,
    TrainConfig,
)
from eagle3.draft.acceptance import NUM_RESAMPLES, AnswerRounds, answer_rounds, summarise
from eagle3.draft.export import load_drafter
from eagle3.draft.target_weights import TargetWeights, load_target_config, load_target_weights
from eagle3.draft.ttt import chain_matches
from eagle3.features.codec import EXACT_CODECS, Codec, CodecName, decode, encode
from eagle3.features.manifest import MANIFEST_NAME
from eagle3.features.rewrite import combined_manifest, select, write_selection
from eagle3.features.statistics import state_errors
from eagle3.features.store import FeatureStore
from eagle3.training.batches import deal, usable_samples
from eagle3.training.packs import PackReader, on_device
from eagle3.training.trainer import DRAFTER_NAME, train

LOSSY: tuple[Literal["int8", "fp8"], ...] = ("int8", "fp8")


def capture(arguments: argparse.Namespace) -> None:
    """Captures the exact store from prompts, as extract.py does."""
    run_extraction(
        ExtractConfig(
            target=TargetConfig(path=str(arguments.target)),
            store=StoreConfig(path=str(arguments.store)),
            engine="transformers",
            prompts=PromptsConfig(path=str(arguments.prompts)),
            regenerate=RegenerateConfig(max_new_tokens=arguments.max_new_tokens, batch_size=128),
        )
    )


def converted(source: Path, path: Path, codec: CodecName) -> FeatureStore:
    """Returns a store's samples in another codec, made once."""
    store = FeatureStore(source)
    write_selection(select([store]), path, combined_manifest([store], codec), shard_bytes=2**28)
    return FeatureStore(path)


def train_config(arguments: argparse.Namespace, store: Path, run_dir: Path, seed: int) -> TrainConfig:
    """Returns the settings of one run; the last drafter counts, so nothing is chosen by a held-out tau."""
    steps = arguments.steps
    return TrainConfig(
        target=TargetConfig(path=str(arguments.target)),
        data=DataConfig(path=str(store), held_out_share=arguments.held_out_share, seed=seed),
        draft=DraftConfig(draft_vocab_size=arguments.draft_vocab_size),
        objective=ObjectiveConfig(ttt_steps=arguments.ttt_steps),
        optimizer=OptimizerConfig(learning_rate=arguments.learning_rate),
        run=RunConfig(
            dir=str(run_dir), resume="auto", epochs=10**6, max_steps=steps, save_every=steps, validate_every=steps,
            log_every=50, keep_last=1, seed=seed,
        ),
        tracking=TrackingConfig(backend="none"),
    )  # fmt: skip


@torch.no_grad()
def held_out_rounds(
    drafter_path: Path, arguments: argparse.Namespace, store: FeatureStore, target: TargetWeights
) -> list[AnswerRounds]:
    """Returns the rounds of every held-out answer, on exact features."""
    device = target.lm_head.device
    drafter = load_drafter(drafter_path, load_target_config(arguments.target)).to(device)
    indices = usable_samples(store, store.split(arguments.held_out_share)[1], max_tokens=16384).indices
    reader = PackReader(store, num_threads=4, pin=device.type == "cuda")
    rounds = []
    for members in deal([store.entries[index].num_tokens for index in indices], 8192, 1):
        (packed,) = on_device([reader.read([indices[i] for i in members])], device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            chains = chain_matches(drafter, target.embed_tokens, packed, arguments.ttt_steps)
        rounds += answer_rounds(packed, chains)
    return sorted(rounds, key=lambda each: each.sample_id)


def difference(codec: list[list[AnswerRounds]], exact: list[list[AnswerRounds]], seed: int = 0) -> dict[str, float]:
    """Returns tau of a codec's drafters less that of the exact store's, over all seeds, with its 95 % interval."""
    names = sorted({each.sample_id for each in exact[0]})
    place = {name: index for index, name in enumerate(names)}
    sums = torch.zeros(len(names), 3, dtype=torch.float64)  # tokens, rounds with the codec, rounds without
    for column, runs in ((1, codec), (2, exact)):
        for each in (one for run in runs for one in run):
            sums[place[each.sample_id], column] += each.rounds
            sums[place[each.sample_id], 0] += each.num_tokens / 2  # once for each column
    generator = torch.Generator().manual_seed(seed)

    def taus(totals: Tensor) -> Tensor:
        return totals[..., 0] / totals[..., 1] - totals[..., 0] / totals[..., 2]

    drawn = torch.randint(len(names), (NUM_RESAMPLES, len(names)), generator=generator)
    resampled = taus(sums[drawn].sum(1))
    low, high = resampled.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return {"difference": float(taus(sums.sum(0))), "low": low, "high": high}


def state_error(store: FeatureStore, codec: Codec, target: TargetWeights, num_samples: int) -> dict[str, Any]:
    """Returns what a codec does to each captured state, first tokens apart, and to the target's distribution."""
    hidden_size, layers = store.manifest.hidden_size, store.manifest.capture_layers
    parts: dict[str, list[Tensor]] = {}
    kl_sum = same_sum = num_rows = 0.0
    device = target.lm_head.device
    head = target.lm_head.float()
    for index in range(min(num_samples, len(store))):
        sample = store[index]
        states = dict(zip(map(str, layers), sample.aux_hidden_states.split(hidden_size, dim=1), strict=True))
        for name, exact in (states | {"last": sample.last_hidden_states}).items():
            coded = decode(encode(exact.to(device), hidden_size, codec), hidden_size, exact.dtype).cpu()
            by_length, by_typical = state_errors(exact, coded)
            parts.setdefault(f"{name}/of_length", []).append(by_length)
            parts.setdefault(f"{name}/of_typical", []).append(by_typical)
            if name != "last":
                parts.setdefault(f"{name}/of_typical_first_token", []).append(by_typical[:1])
                continue
            before = (exact.to(device).float() @ head.T).log_softmax(-1)  # (R, V)
            after = (coded.to(device).float() @ head.T).log_softmax(-1)
            kl_sum += float((before.exp() * (before - after)).sum())
            same_sum += float((before.argmax(-1) == after.argmax(-1)).sum())
            num_rows += exact.shape[0]
    return {name: float(torch.cat(values).mean()) for name, values in parts.items()} | {
        "kl": kl_sum / num_rows,
        "same_first_choice": same_sum / num_rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="a Hugging Face directory")
    parser.add_argument("--store", type=Path, required=True, help="an exact store; made from --prompts if missing")
    parser.add_argument("--prompts", type=Path, default=Path("examples/prompts.jsonl"))
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of an answer that is captured")
    parser.add_argument("--dir", type=Path, required=True, help="where converted stores and runs go; a rerun goes on")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of each run, 8 samples each")
    parser.add_argument("--ttt-steps", type=int, default=4)
    parser.add_argument("--draft-vocab-size", type=int, default=4096)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--held-out-share", type=float, default=1 / 4)
    parser.add_argument("--measured", type=int, default=200, help="samples whose states' errors are averaged")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    arguments = parser.parse_args()
    if not (arguments.store / MANIFEST_NAME).exists():
        capture(arguments)
    exact = FeatureStore(arguments.store)
    exact_codec = EXACT_CODECS[exact.dtype]
    paths = {exact_codec: arguments.store}
    for lossy in LOSSY:
        paths[lossy] = arguments.dir / lossy
        converted(arguments.store, paths[lossy], lossy)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = load_target_weights(arguments.target).to(device, torch.bfloat16)
    runs: dict[Codec, list[list[AnswerRounds]]] = {codec: [] for codec in paths}
    for seed in arguments.seeds:
        for codec, path in paths.items():
            config = train_config(arguments, path, arguments.dir / f"run-{codec}-{seed}", seed)
            run_dir = train(config)
            runs[codec].append(held_out_rounds(run_dir / DRAFTER_NAME, arguments, exact, target))
            print(f"{codec}, seed {seed}: tau {summarise(runs[codec][-1], 0).tau:.4f}", flush=True)
    rows = []
    for codec, path in paths.items():
        store = FeatureStore(path)
        summary = summarise([each for run in runs[codec] for each in run], 0)
        rows.append(
            {
                "codec": codec,
                "tau": summary.tau,
                "low": summary.low,
                "high": summary.high,
                "tau_by_seed": [summarise(run, 0).tau for run in runs[codec]],
                "bytes_per_token": store.num_bytes / store.num_tokens,
                "against_exact": difference(runs[codec], runs[exact_codec]) if codec != exact_codec else None,
                "state_error": state_error(exact, codec, target, arguments.measured) if codec != exact_codec else None,
            }
        )
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    report = {
        "command": f"python benchmarks/codecs.py --target DIR --store STORE --dir DIR --steps {arguments.steps} "
        f"--seeds {' '.join(map(str, arguments.seeds))}",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "hardware": torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.processor(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "target": arguments.target.name,
        "settings": {
            name: str(value) for name, value in vars(arguments).items() if name not in ("target", "store", "dir", "out")
        },
        "num_samples": len(exact),
        "num_tokens": exact.num_tokens,
        "num_held_out": len(runs[exact_codec][0]),
        "rows": rows,
    }
    show(rows)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("codec", "bytes a token", "tau", "95 %", "by seed", "against exact", "95 %")
    for row in rows:
        against = row["against_exact"]
        table.add_row(
            row["codec"],
            f"{row['bytes_per_token']:,.0f}",
            f"{row['tau']:.4f}",
            f"{row['low']:.4f} to {row['high']:.4f}",
            " ".join(f"{tau:.4f}" for tau in row["tau_by_seed"]),
            "-" if against is None else f"{against['difference']:+.4f}",
            "-" if against is None else f"{against['low']:+.4f} to {against['high']:+.4f}",
        )
    console = Console(width=140)
    console.print(table)
    for row in rows:
        if row["state_error"] is not None:
            console.print(row["codec"], {name: f"{value:.2e}" for name, value in row["state_error"].items()})


if __name__ == "__main__":
    main()
