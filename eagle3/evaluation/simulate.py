"""Exact served acceptance over stores and recorded answers, no server.

A served round drafts from true features and stops where the target would have said something else. Both are known of a
recorded answer, so rounds can be counted without decoding: in fp32 they equal a real decoder's, answer by answer.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor

from eagle3.config import EvaluateConfig, TargetConfig, UserError
from eagle3.draft.acceptance import AnswerRounds, answer_rounds, summarise
from eagle3.draft.model import DrafterConfig, Eagle3Drafter
from eagle3.draft.questions import of_samples
from eagle3.draft.ttt import chain_matches, pack
from eagle3.evaluation.report import Measured, progress_bar
from eagle3.features.manifest import check_same_target
from eagle3.features.record import FeatureSample
from eagle3.features.store import FeatureStore
from eagle3.prompts.rendering import load_tokenizer, tokenizer_digest

BATCH_TOKENS = 8192  # of one pack: at D = 7168 and three captured states 350 MB in bf16


def simulate(
    drafter: Eagle3Drafter,
    embed_tokens: Tensor,  # (V, D) the target's, on the drafter's device
    samples: Iterable[FeatureSample],
    *,
    num_draft_tokens: int,
    batch_tokens: int = BATCH_TOKENS,
    advance: Callable[[int], None] | None = None,
) -> list[AnswerRounds]:
    """Returns the rounds of every answer in `samples`, in order; `advance` is told of samples as they are done."""
    rounds: list[AnswerRounds] = []
    for group in _groups(samples, batch_tokens):
        packed = pack(group).to(embed_tokens.device)
        chains = chain_matches(drafter, embed_tokens, packed, num_draft_tokens)
        rounds += answer_rounds(packed, chains)
        if advance is not None:
            advance(len(group))
    return rounds


def simulate_store(
    drafter: Eagle3Drafter, embed_tokens: Tensor, store: FeatureStore, config: EvaluateConfig
) -> Measured:
    """Measures the drafter on the store's samples that were kept out of training; on all if the config says no share.

    Raises:
        UserError: there is none.
    """
    indices = list(range(len(store)))
    if config.held_out_share is not None:
        indices = store.split(config.held_out_share)[1]
    if not indices:
        raise UserError(
            f"held_out_share must leave samples of the store, got none of {len(store)} with {config.held_out_share} "
            f"({store.path}); use the share of the training run"
        )
    with progress_bar("simulating the store", len(indices), "samples") as advance:
        rounds = simulate(
            drafter,
            embed_tokens,
            (store[index] for index in indices),
            num_draft_tokens=config.speculation.num_draft_tokens,
            advance=advance,
        )
    # Which answers of a store loop is not asked: capture cuts its own at the first repetition.
    questions = of_samples((store[index] for index in indices), rounds)
    return Measured(summarise(rounds, config.seed), without_loops=None, questions=questions)


def open_store(path: Path, drafter: DrafterConfig, target: TargetConfig) -> FeatureStore:
    """Opens a store of the target's features that the drafter reads.

    Raises:
        UserError: there is no store, or its features are others; every difference is named with both values.
    """
    store = FeatureStore(path)
    tokenizer = load_tokenizer(target.path, target.trust_remote_code)
    check_same_target(
        store.manifest,
        path,
        Path(target.path),
        expected={
            "tokenizer_digest": tokenizer_digest(tokenizer),
            "capture_layers": drafter.capture_layers,
            "hidden_size": drafter.hidden_size,
            "vocab_size": drafter.vocab_size,
        },
        advice="change target.path, evaluate a drafter that was trained on the store, or capture a new store",
    )
    return store


def _groups(samples: Iterable[FeatureSample], batch_tokens: int) -> Iterable[list[FeatureSample]]:
    """Yields runs of samples within `batch_tokens` tokens; a longer sample is a group of its own."""
    group: list[FeatureSample] = []
    num_tokens = 0
    for sample in samples:
        if group and num_tokens + sample.input_ids.numel() > batch_tokens:
            yield group
            group, num_tokens = [], 0
        group.append(sample)
        num_tokens += sample.input_ids.numel()
    if group:
        yield group
