"""Settings that can be trained with, or all that is wrong with them at once.

Types are the config's business; here are the numbers that no run survives, and what does not go together.
"""

import math

from eagle3.config import RunConfig, TrainConfig, UserError

DRAFT_SIZES = ("draft_vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
MAX_LEARNING_RATE = 1e3  # far above any that trains; the first step's of AdamW, ten times this, must fit fp32
MAX_MINUTES = 1e6  # two years; what torch counts a timeout in has an end
# Step 64 weighs 0.8 ** 63, next to nothing; and by then 8,192 supervised tokens at D 7168 take 110 GiB of a GPU.
MAX_TTT_STEPS = 64
MAX_SEED = 2**32  # times the stride between epochs, it is within torch's 64 bits


def num_steps_of(run: RunConfig, steps_per_epoch: int) -> int:
    """Returns the optimizer steps of a whole run."""
    num_steps = run.epochs * steps_per_epoch
    return num_steps if run.max_steps is None else min(num_steps, run.max_steps)


def check_settings(config: TrainConfig) -> None:
    """Compares settings with what can be trained.

    Raises:
        UserError: names all that cannot.
    """
    problems = _too_small(config) + _too_large(config) + _out_of_range(config) + _unfit(config)
    if problems:
        raise UserError("some settings cannot be trained with:\n" + "\n".join(problems) + "\nchange them")


def _too_small(config: TrainConfig) -> list[str]:
    data, run = config.data, config.run
    at_least_one: dict[str, int | None] = {
        "data.samples_per_step": data.samples_per_step,
        "data.batch_tokens": data.batch_tokens,
        "data.max_tokens": data.max_tokens,
        "data.shuffle_shards": data.shuffle_shards,
        "data.read_threads": data.read_threads,
        "data.prefetch_steps": data.prefetch_steps,
        **{f"draft.{name}": getattr(config.draft, name) for name in DRAFT_SIZES},
        "objective.ttt_steps": config.objective.ttt_steps,
        "run.epochs": run.epochs,
        "run.max_steps": run.max_steps,
        "run.save_every": run.save_every,
        "run.validate_every": run.validate_every,
        "run.log_every": run.log_every,
        "run.keep_last": run.keep_last,
        "run.keep_best": run.keep_best,
        "run.patience": run.patience,
    }
    above_zero: dict[str, float | None] = {
        "objective.ttt_decay": config.objective.ttt_decay,
        "optimizer.learning_rate": config.optimizer.learning_rate,
        "optimizer.max_grad_norm": config.optimizer.max_grad_norm,
        "run.timeout": run.timeout,
        "run.stop_after": run.stop_after,
    }
    # `not above` finds nan, too.
    return [
        f"  {name} must be at least 1, got {value}"
        for name, value in at_least_one.items()
        if value is not None and value < 1
    ] + [
        f"  {name} must be above 0, got {number}"
        for name, number in above_zero.items()
        if number is not None and not number > 0
    ]


def _too_large(config: TrainConfig) -> list[str]:
    at_most = {
        "objective.ttt_steps": (config.objective.ttt_steps, MAX_TTT_STEPS),
        "objective.ttt_decay": (config.objective.ttt_decay, 1),
        "optimizer.learning_rate": (config.optimizer.learning_rate, MAX_LEARNING_RATE),
        "run.timeout": (config.run.timeout, MAX_MINUTES),
    }
    return [
        f"  {name} must be at most {limit:g}, got {value}" for name, (value, limit) in at_most.items() if value > limit
    ]


def _out_of_range(config: TrainConfig) -> list[str]:
    optimizer = config.optimizer
    shares = {
        "data.held_out_share": config.data.held_out_share,
        "optimizer.min_learning_rate_ratio": optimizer.min_learning_rate_ratio,
        "optimizer.warmup_ratio": optimizer.warmup_ratio,
    }
    problems = [f"  {name} must be from 0 to 1, got {value}" for name, value in shares.items() if not 0 <= value <= 1]
    if not 0 <= optimizer.weight_decay < math.inf:
        problems.append(f"  optimizer.weight_decay must be 0 or more, got {optimizer.weight_decay}")
    if optimizer.ema_decay is not None and not 0 < optimizer.ema_decay < 1:
        problems.append(f"  optimizer.ema_decay must be between 0 and 1, or null, got {optimizer.ema_decay}")
    if len(optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in optimizer.betas):
        problems.append(f"  optimizer.betas must be two numbers from 0 to below 1, got {optimizer.betas}")
    seeds = {"data.seed": config.data.seed, "run.seed": config.run.seed}
    return problems + [
        f"  {name} must be from 0 to {MAX_SEED}, got {value}"
        for name, value in seeds.items()
        if not 0 <= value <= MAX_SEED
    ]


def _unfit(config: TrainConfig) -> list[str]:
    problems = []
    if (config.draft.head_dim or 0) % 2:
        problems.append(f"  draft.head_dim must be even, as RoPE turns pairs, got {config.draft.head_dim}")
    if config.objective.drop_rejected and config.objective.count == "per_step":
        # How many rows are left is known when all micro-batches are done, and what to divide by before the first one.
        problems.append("  objective.count must be step0 with objective.drop_rejected=true, got 'per_step'")
    return problems
