"""Every setting of every run: typed, validated, printable.

A setting that is not a field here does not exist: a YAML file or an override that names another one is refused,
with all problems of the file in one message.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

CONFIG_ROOT = Path(__file__).resolve().parent.parent / "configs"


class UserError(ValueError):
    """Wrong input, config or environment: commands print the message alone and exit with code 2."""


@dataclass(frozen=True)
class TargetConfig:
    """The model that is served, and that the drafter drafts for."""

    path: str  # a Hugging Face directory
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of the weights when the target runs in this process
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPU if there is one
    capture_layers: list[int] | None = None  # boundaries (0-based layer that the state enters); null: [2, L//2, L-3]
    trust_remote_code: bool = False


@dataclass(frozen=True)
class PromptsConfig:
    """Which conversations go in, and how the target's template renders them."""

    path: str | None = None  # JSONL; --prompts sets it
    max_tokens: int = 4096  # rows whose rendered ids are longer are dropped and counted
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # as sent to the server, e.g. enable_thinking
    fail_on_bad_row: bool = False  # true: the first malformed row ends the run


@dataclass(frozen=True)
class RegenerateConfig:
    """The target writes the answers itself, so that the drafter trains on what it will see."""

    enabled: bool = True  # false: the answers of the prompts file are kept
    max_new_tokens: int = 512  # per assistant turn
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    seed: int = 0
    batch_size: int = 32  # answers that are generated together
    cut_loops: bool = True  # an answer that repeats itself is kept up to its first repetition


@dataclass(frozen=True)
class StoreConfig:
    """Where captured features go."""

    path: str  # a directory
    shard_bytes: int = 256 * 2**20  # a shard is written when its samples reach this size; a kill loses at most one
    quota_bytes: int | None = None  # stop cleanly, resumable, before the store grows past it; null: free disk only
    last_rows: Literal["supervised", "all"] = "supervised"  # which rows keep their last hidden state


@dataclass(frozen=True)
class ExtractConfig:
    """`extract.py`: prompts -> feature store."""

    target: TargetConfig
    store: StoreConfig
    engine: Literal["sglang", "transformers"] = "sglang"  # transformers: the target runs in this process
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    batch_tokens: int = 8192  # padded tokens per capture forward
    max_quarantined_share: float = 0.01  # of samples with non-finite features; more than this fails the run


@dataclass(frozen=True)
class DraftConfig:
    """The draft head; sizes left null are the target's."""

    draft_vocab_size: int = 32000  # W: target tokens that the drafter can propose
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    fc_norm: bool = False  # EAGLE-3.1: RMSNorm on each captured state before fc
    norm_output: bool = False  # EAGLE-3.1: the normed state is fed back
    init_from_target: bool = True  # lm_head rows and final norm start as the target's


@dataclass(frozen=True)
class DataConfig:
    """How a store becomes batches."""

    path: str  # the feature store
    held_out_share: float = 1 / 6  # chosen by a hash of the sample id, never trained on
    samples_per_step: int = 8  # samples of one optimizer step, over all ranks and micro-steps
    batch_tokens: int = 8192  # tokens of one micro-batch on one rank; longer samples get a micro-batch of their own
    max_tokens: int = 16384  # samples longer than this are left out and counted
    seed: int = 0


@dataclass(frozen=True)
class ObjectiveConfig:
    """DESIGN 4.6."""

    ttt_steps: int = 7  # K: draft steps unrolled in training
    ttt_decay: float = 0.8  # step k weighs ttt_decay ** k
    renormalise: bool = True  # true: target softmax over the W draft tokens; false: exp(z - logZ over V)
    count: Literal["step0", "per_step"] = "step0"  # divide every step by N0, or each by its own count


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warm-up and cosine decay."""

    learning_rate: float = 1e-4
    min_learning_rate_ratio: float = 0.1  # of learning_rate, at the last step
    warmup_ratio: float = 0.03  # of all steps
    weight_decay: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class RunConfig:
    """How long a run goes on, and what it leaves behind."""

    dir: str = "ckpts/run"  # a taken name gets -2, -3, ...: a run never writes into another's directory
    resume: str = "never"  # never | auto (the newest run of this dir, if any) | a run directory
    epochs: int = 1
    max_steps: int | None = None  # optimizer steps; null: all of the epochs
    save_every: int = 500  # optimizer steps
    validate_every: int = 500  # optimizer steps; the last step always validates
    log_every: int = 10  # optimizer steps
    keep_last: int = 2  # checkpoints; the best one is kept besides
    seed: int = 0
    mixed_precision: Literal["no", "bf16"] = "bf16"
    deepspeed: str | None = None  # a DeepSpeed JSON under configs/deepspeed/ (or a path); null: DDP
    deterministic: bool = False  # bit-equal resume on a GPU


@dataclass(frozen=True)
class TrackingConfig:
    """Where numbers go besides metrics.jsonl."""

    wandb: Literal["auto", "offline", "online", "disabled"] = "auto"  # auto: online with a login, else offline
    project: str = "eagle3"
    name: str | None = None  # null: the run directory's name
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TrainConfig:
    """`train.py`: feature store -> drafter."""

    target: TargetConfig
    data: DataConfig
    draft: DraftConfig = field(default_factory=DraftConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


@dataclass(frozen=True)
class SpeculationConfig:
    """How the drafter is served."""

    num_draft_tokens: int = 3  # K: drafted per round (SGLang's --speculative-num-steps)


@dataclass(frozen=True)
class EvaluateConfig:
    """`evaluate.py`: drafter -> acceptance on a served target."""

    drafter: str | None = None  # a directory in SGLang's format; with `server`, null reads the server's own counters
    target: TargetConfig | None = None  # required unless `server` is set
    server: str | None = None  # URL of an SGLang server with the drafter on; null: the target runs in this process
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    held_out_share: float | None = None  # only prompts whose id hashes below it, as in training; null: all
    max_prompts: int | None = None  # the first ones; null: all
    max_new_tokens: int = 256
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    store: str | None = None  # also simulate over this store's held-out samples; null: do not
    compare_untrained: bool = False  # also measure the drafter of the same shape with the target's head and norm
    out: str = "ckpts/evaluation"  # directory for result.json and the table
    seed: int = 0
