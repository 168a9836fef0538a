"""Settings that no run survives are named all at once."""

import dataclasses
import math
from pathlib import Path

import pytest
from tiny_training import tiny_config

from eagle3.config import UserError
from eagle3.training.settings import check_settings

BASE = tiny_config(Path("store"), Path("target"), Path("run"))


def test_settings_that_make_sense_are_accepted() -> None:
    check_settings(BASE)
    rejected = dataclasses.replace(BASE.objective, drop_rejected=True, ttt_steps=64, ttt_decay=1.0)
    check_settings(dataclasses.replace(BASE, objective=rejected))


def test_settings_that_cannot_be_trained_are_named_all_at_once() -> None:
    wrong = dataclasses.replace(
        BASE,
        data=dataclasses.replace(BASE.data, samples_per_step=0, held_out_share=1.5),
        optimizer=dataclasses.replace(BASE.optimizer, learning_rate=0.0, betas=[0.9], ema_decay=1.0),
        run=dataclasses.replace(BASE.run, max_steps=0),
    )
    with pytest.raises(UserError) as caught:
        check_settings(wrong)
    assert str(caught.value).splitlines()[1:-1] == [
        "  data.samples_per_step must be at least 1, got 0",
        "  run.max_steps must be at least 1, got 0",
        "  optimizer.learning_rate must be above 0, got 0.0",
        "  data.held_out_share must be from 0 to 1, got 1.5",
        "  optimizer.ema_decay must be between 0 and 1, or null, got 1.0",
        "  optimizer.betas must be two numbers from 0 to below 1, got [0.9]",
    ]


def test_numbers_that_no_run_survives_are_named_all_at_once() -> None:
    """Infinite, negative, beyond torch's 64 bits, or of no size; a 0 must not mean the target's own size."""
    wrong = dataclasses.replace(
        BASE,
        data=dataclasses.replace(BASE.data, seed=-1, max_tokens=0),
        draft=dataclasses.replace(BASE.draft, intermediate_size=0, num_attention_heads=-4, head_dim=7),
        objective=dataclasses.replace(
            BASE.objective, ttt_decay=math.inf, ttt_steps=65, count="per_step", drop_rejected=True
        ),
        optimizer=dataclasses.replace(BASE.optimizer, learning_rate=math.inf, weight_decay=-1.0),
        run=dataclasses.replace(BASE.run, seed=10**30, timeout=math.inf),
    )
    with pytest.raises(UserError) as caught:
        check_settings(wrong)
    assert str(caught.value).splitlines()[1:-1] == [
        "  data.max_tokens must be at least 1, got 0",
        "  draft.intermediate_size must be at least 1, got 0",
        "  draft.num_attention_heads must be at least 1, got -4",
        "  objective.ttt_steps must be at most 64, got 65",
        "  objective.ttt_decay must be at most 1, got inf",
        "  optimizer.learning_rate must be at most 1000, got inf",
        "  run.timeout must be at most 1e+06, got inf",
        "  optimizer.weight_decay must be 0 or more, got -1.0",
        "  data.seed must be from 0 to 4294967296, got -1",
        f"  run.seed must be from 0 to 4294967296, got {10**30}",
        "  draft.head_dim must be even, as RoPE turns pairs, got 7",
        "  objective.count must be step0 with objective.drop_rejected=true, got 'per_step'",
    ]
