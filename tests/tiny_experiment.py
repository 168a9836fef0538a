"""One experiment of real runs on a tiny target: features, two trainings on them, and their evaluations."""

import dataclasses
import json
from pathlib import Path

import pytest
from tiny_training import tiny_config

from eagle3.capture.extraction import run_extraction
from eagle3.config import (
    EvaluateConfig,
    ExtractConfig,
    PromptsConfig,
    RegenerateConfig,
    SpeculationConfig,
    StoreConfig,
    TargetConfig,
    TrackingConfig,
)
from eagle3.evaluation.run import evaluate
from eagle3.evaluation.runs import Run, read_directory
from eagle3.training.trainer import train

SHARE = 0.4  # held out
STEPS = {"long": 12, "short": 6}


def run_experiment(base: Path, tiny_target: Path) -> Path:
    """Leaves features/, long/ and short/, with train/ and evaluation/ in each, in `base`; W&B as without a login."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        target = TargetConfig(str(tiny_target), dtype="float32", device="cpu")
        prompts = base / "prompts.jsonl"
        rows = [{"id": f"p{i}", "messages": [{"role": "user", "content": f"Name {i} of ten."}]} for i in range(20)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        run_extraction(
            ExtractConfig(
                target=target,
                store=StoreConfig(str(base / "features")),
                engine="transformers",
                prompts=PromptsConfig(str(prompts)),
                regenerate=RegenerateConfig(max_new_tokens=12, cut_loops=False),
            )
        )
        config = tiny_config(base / "features", tiny_target, base)
        config = dataclasses.replace(
            config,
            target=target,
            data=dataclasses.replace(config.data, held_out_share=SHARE),
            tracking=TrackingConfig(),
        )
        for name, num_steps in STEPS.items():
            run = dataclasses.replace(config.run, dir=str(base / name / "train"), max_steps=num_steps, validate_every=6)
            run_dir = train(dataclasses.replace(config, run=run))
            evaluate(
                EvaluateConfig(
                    drafter=str(run_dir / "drafter"),
                    target=target,
                    prompts=PromptsConfig(str(prompts)),
                    held_out_share=SHARE,
                    max_new_tokens=12,
                    timed_prompts=0,
                    speculation=SpeculationConfig(num_draft_tokens=3),
                    out=str(base / name / "evaluation"),
                )
            )
    return base


def run_of(base: Path, name: str, kind: str) -> Run:
    return next(
        run
        for run in read_directory(base / name / kind)
        if run.identity.job_type == ("train" if kind == "train" else "evaluate")
    )
