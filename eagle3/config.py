"""Every setting of every run: typed, validated, printable.

A setting that is not a field here does not exist: a YAML file or an override that names another one is refused
(`config_file`).
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NewType


class UserError(ValueError):
    """Wrong input, config or environment: commands print the message alone and exit with code 2."""


Written = Annotated[str, "a directory that is written"]  # of this machine or a mounted one: no URL
DeepSpeedFile = NewType("DeepSpeedFile", str)  # the stem or name of a JSON under configs/deepspeed/, or a path


@dataclass(frozen=True)
class TargetConfig:
    """The model that is served, and that the drafter drafts for."""

    path: str  # a Hugging Face directory
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # in which the target runs, here or in a server of ours
    device: Literal["auto", "cpu", "cuda"] = "auto"  # when it runs in this process; auto: the GPU if there is one
    capture_layers: list[int] | None = None  # boundaries (0-based layer that the state enters); null: [2, L//2, L-3]
    trust_remote_code: bool = False


@dataclass(frozen=True)
class TrackingConfig:
    """Where a run's numbers are shown; they lie in its directory in any case."""

    backend: Literal["wandb", "tensorboard", "trackio", "none"] = "wandb"  # wandb: online with a login, else offline
    project: str = "eagle3"
    name: str | None = None  # null: the run directory's name
    group: str | None = None  # the experiment; null: that of the store or drafter which the run reads, else a new one
    tags: list[str] = field(default_factory=list)
    upload: bool = False  # W&B gets the weights and features themselves; false: their manifests, and where they lie


@dataclass(frozen=True)
class PromptsConfig:
    """Which conversations go in, and how the target's template renders them."""

    path: str | None = None  # a file, a glob, a folder, or hf:OWNER/NAME[:CONFIG][@SPLIT]; --prompts sets it
    max_tokens: int = 4096  # rows whose rendered ids are longer are too long, and counted
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # as sent to the server, e.g. enable_thinking
    chat_template: str | None = None  # a file with a template that replaces the tokenizer's
    too_long: Literal["drop", "truncate", "split"] = "drop"  # of given answers: truncate and split cut between turns
    train_on: Literal["all", "last"] = "all"  # which assistant turns are supervised, where answers are given
    near_duplicates: Literal["keep", "drop"] = "keep"  # rows whose questions are almost those of an earlier row
    exclude: list[str] = field(default_factory=list)  # question sets, as path; rows with their questions are dropped
    num_workers: int | None = None  # processes that render; 0: none; null: the cores, for files above 16 MB
    max_row_bytes: int = 4 * 2**20  # larger rows are not tokenized but refused and counted
    fail_on_bad_row: bool = False  # true: the first malformed row ends the run


@dataclass(frozen=True)
class RegenerateConfig:
    """The target writes the answers itself, so that the drafter trains on what it will see."""

    enabled: bool = True  # false: the answers of the prompts file are kept
    max_new_tokens: int = 512  # per assistant turn
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    seed: int = 0
    batch_size: int = 32  # answers that are generated together, with engine=transformers
    cut_loops: bool = True  # an answer that repeats itself is kept up to its first repetition


@dataclass(frozen=True)
class ServerConfig:
    """The SGLang server that runs the target: started on this machine, or already running on it."""

    urls: list[str] = field(default_factory=list)  # running servers, which share the work; empty: one is started
    python: str | None = None  # interpreter of the serving environment; null: this one
    tensor_parallel_size: int = 1
    flags: dict[str, Any] = field(default_factory=dict)  # SGLang's, as `dtype: float32`; true: bare; false: not passed
    env: dict[str, Any] = field(default_factory=dict)  # of the server that is started, NCCL's variables among others
    log: str = "ckpts/sglang.log"  # of the server that is started
    staging_dir: str = "/dev/shm"  # samples pass through it; with urls it is the servers' EAGLE3_CAPTURE_DIR
    staging_bytes: int | None = None  # samples wait rather than fill more of it; null: half of what is free
    max_requests: int = 128  # in flight, per server
    startup_timeout_seconds: int = 3600  # a terabyte of weights takes ten minutes to load
    request_timeout_seconds: int = 600  # a server that answers nothing for so long counts as hung


@dataclass(frozen=True)
class StoreConfig:
    """Where captured features go."""

    path: Written
    codec: Literal["exact", "int8", "fp8"] = "exact"  # exact: the target's dtype; the others take a byte a number
    shard_bytes: int = 256 * 2**20  # a shard is written when its samples reach this size; a kill loses at most four
    quota_bytes: int | None = None  # stop cleanly, resumable, before the store grows past it; null: free disk only
    num_writers: int = 1  # extractions that fill the store together, each with a share of the same prompts
    writer: int = 0  # which of them this one is, from 0; its logs lie in writer-N/ of the store
    last_rows: Literal["supervised", "all"] = "supervised"  # which rows keep their last hidden state


@dataclass(frozen=True)
class ExtractConfig:
    """`extract.py`: prompts -> feature store."""

    target: TargetConfig
    store: StoreConfig
    engine: Literal["sglang", "transformers"] = "sglang"  # transformers: the target runs in this process
    server: ServerConfig = field(default_factory=ServerConfig)  # with engine=sglang
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    batch_tokens: int = 8192  # padded tokens per capture forward, with engine=transformers
    max_quarantined_share: float = 0.01  # of samples without usable features; more than this fails the run
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


@dataclass(frozen=True)
class DraftConfig:
    """The draft head; sizes left null are the target's."""

    draft_vocab_size: int = 32000  # W: target tokens that the drafter can propose
    draft_vocab_coverage: float | None = None  # W is the smallest that covers this share of the supervised tokens
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

    path: str  # the feature store; or an extraction's config (.yaml), whose servers make the states meanwhile
    held_out_share: float = 1 / 6  # chosen by a hash of the sample id, never trained on
    samples_per_step: int = 8  # samples of one optimizer step, over all ranks and micro-steps
    batch_tokens: int = 8192  # tokens of one micro-batch on one rank; longer samples get a micro-batch of their own
    # Samples longer than batch_tokens are split over all ranks, each with some of the rows.
    split_sequences: bool = False
    max_tokens: int = 16384  # samples longer than this are left out and counted
    shuffle_shards: int = 64  # shards that samples are drawn from at one time; all, if the store has no more
    read_threads: int = 4  # on each rank
    prefetch_steps: int = 2  # optimizer steps that wait in memory, on each rank
    # Where the target's embedding lies: V x D on each GPU, or once in the host's memory, its rows coming with batches.
    embeddings: Literal["device", "host"] = "device"
    cache_bytes: int = 0  # samples kept in memory, on each rank, for stores whose disk has no page cache
    seed: int = 0

    @property
    def is_streamed(self) -> bool:
        """Tells whether `path` is an extraction's config, whose states are made while a training runs."""
        return self.path.endswith((".yaml", ".yml"))


@dataclass(frozen=True)
class ObjectiveConfig:
    """What training minimises: a distance between drafter and target, summed over the K draft steps."""

    # cross_entropy: soft, against the target; kl: the same less the target's entropy; tv: 1 - acceptance, which hardly
    # moves where acceptance is low; lk: from kl to tv as a row's acceptance grows
    loss: Literal["cross_entropy", "kl", "tv", "lk"] = "cross_entropy"
    ttt_steps: int = 7  # K: draft steps unrolled in training, at most 64
    ttt_decay: float = 0.8  # step k weighs ttt_decay ** k
    renormalise: bool = True  # true: target softmax over the W draft tokens; false: exp(z - logZ over V)
    count: Literal["step0", "per_step"] = "step0"  # divide every step by N0, or each by its own count
    drop_rejected: bool = False  # a row leaves after its first choice that is not the recorded token; with count=step0


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warm-up and cosine decay."""

    learning_rate: float = 1e-4
    min_learning_rate_ratio: float = 0.1  # of learning_rate, at the last step
    warmup_ratio: float = 0.03  # of all steps
    weight_decay: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    max_grad_norm: float = 1.0
    ema_decay: float | None = None  # of an average of the weights, which is what is validated and exported; null: none


@dataclass(frozen=True)
class RunConfig:
    """How long a run goes on, and what it leaves behind."""

    dir: Written = "ckpts/run"  # a taken name gets -2, -3, ...: a run never writes into another's directory
    resume: str = "never"  # never | auto (the newest run of this dir, if any) | a run directory
    epochs: int = 1
    max_steps: int | None = None  # optimizer steps; null: all of the epochs
    save_every: int = 500  # optimizer steps
    validate_every: int = 500  # optimizer steps; the last step always validates
    log_every: int = 10  # optimizer steps
    timeout: float = 10.0  # minutes that a rank may take for its part of a step before all stop and say which it was
    keep_last: int = 2  # checkpoints
    keep_best: int = 1  # besides: those with the highest held-out tau; a new best one is always saved
    patience: int | None = None  # validations in a row without a new best tau, after which training ends; null: never
    stop_after: float | None = None  # minutes of one session, after which it saves and ends, to be resumed; null: never
    seed: int = 0
    mixed_precision: Literal["no", "bf16"] = "bf16"
    deepspeed: DeepSpeedFile | None = None  # a DeepSpeed JSON under configs/deepspeed/ (or a path); null: DDP
    deterministic: bool = False  # bit-equal resume on a GPU


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
class ServeConfig:
    """Servers that an evaluation starts itself: the target with the drafter, then alone, with the same flags."""

    server: ServerConfig = field(default_factory=ServerConfig)
    speculations: list[str] = field(default_factory=lambda: ["3"])  # STEPS (a chain) or STEPS/TOPK/TOKENS (a tree)
    concurrency: list[int] = field(default_factory=lambda: [1, 4, 16, 64])  # requests in flight
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    # The first concurrency asks all prompts, the others so many for each request in flight, evenly over all; null: all.
    prompts_per_slot: int | None = None
    simulate: bool = True  # also simulate the served answers, with the target in this process; false: it does not fit


@dataclass(frozen=True)
class EvaluateConfig:
    """`evaluate.py`: drafter -> acceptance on a served target."""

    drafter: str | None = None  # a directory in SGLang's format; with `server`, null reads the server's own counters
    target: TargetConfig | None = None  # required unless `server` is set
    server: str | None = None  # URL of an SGLang or vLLM server with the drafter on; null: the target runs here
    serve: ServeConfig | None = None  # start servers instead, and measure speed with and without the drafter
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    held_out_share: float | None = None  # only prompts whose id hashes below it, as in training; null: all
    max_prompts: int | None = None  # the first ones; null: all
    max_new_tokens: int = 256
    batch_size: int = 8  # prompts decoded together; with `server`, requests in flight
    timed_prompts: int = 8  # decoded once more one at a time, plain and speculative, for tokens/s; 0: not timed
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    store: str | None = None  # also simulate over this store's held-out samples; null: do not
    explain: bool = False  # also look for what keeps acceptance low, as `python -m eagle3 doctor` does
    compare_untrained: bool = False  # also measure the drafter of the same shape with the target's head and norm
    out: Written = "ckpts/evaluation"  # directory for result.json and questions.jsonl
    seed: int = 0
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


@dataclass(frozen=True)
class InspectConfig:
    """`python -m eagle3 prompts`: prompts -> what they hold."""

    target: TargetConfig = field(default_factory=lambda: TargetConfig(path=""))  # path "": nothing is tokenized
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    held_out_share: float = 0.05  # as in training: a draft vocabulary counts the rest


def config_to_dict(config: Any) -> dict[str, Any]:
    """Returns a config as plain nested dicts, for printing and for a run's provenance."""
    return dataclasses.asdict(config)


def by_dotted_name(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings side by side, named as overrides name them."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= by_dotted_name(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found
