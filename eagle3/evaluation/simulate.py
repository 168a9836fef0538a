"""Exact served acceptance over stores and recorded answers, no server.

A served round drafts from true features and stops where the target would have said something else. Both are known of a
recorded answer, so rounds can be counted without decoding: in fp32 they equal a real decoder's, answer by answer.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from eagle3.config import EvaluateConfig, TargetConfig, UserError
from eagle3.draft.acceptance import AnswerRounds, answer_rounds, summarise
from eagle3.draft.model import DrafterConfig, Eagle3Drafter
from eagle3.draft.questions import of_samples
from eagle3.draft.target_weights import TargetWeights
from eagle3.draft.ttt import ChainMatches, PackedSequences, pack
from eagle3.evaluation.chains import compared_chains, sampled_chains
from eagle3.evaluation.report import Measured, progress_bar
from eagle3.evaluation.trees import draft_trees, tree_chains
from eagle3.features.manifest import check_same_target
from eagle3.features.record import FeatureSample
from eagle3.features.store import FeatureStore
from eagle3.prompts.tokenizers import load_tokenizer, tokenizer_digest
from eagle3.training.packs import PackReader, on_device
from eagle3.training.prefetch import prefetched

Item = TypeVar("Item")

BATCH_TOKENS = 8192  # of one pack on a CPU
NUM_READERS = 8  # threads; one copies 8 GB/s at most, and a GPU counts several times that
PACKS_AHEAD = 2  # read before they are wanted
# Of one pack's captured states on a GPU. What comes beside them is several times as much, and a run of few packs waits
# for its first one: in packs of twice this size an H200 counted 1.4 M tokens of SmolLM2's states at 0.63 M/s.
BATCH_BYTES = 2**28


@dataclass(frozen=True)
class Speculation:
    """How a drafter is served: a chain, a chain with rejection sampling, or a tree."""

    num_steps: int  # K: --speculative-num-steps
    topk: int = 1  # --speculative-eagle-topk
    num_draft_tokens: int | None = None  # of a tree, its root included: --speculative-num-draft-tokens
    temperature: float | None = None  # of rejection sampling; None: a draft is right if it is what the target says

    @property
    def name(self) -> str:
        """What tables call it, and `parse_speculation` reads."""
        if self.topk > 1:
            return f"{self.num_steps}/{self.topk}/{self.num_draft_tokens}"
        return f"{self.num_steps}" if self.temperature is None else f"{self.num_steps}@{self.temperature:g}"


def parse_speculation(text: str) -> Speculation:
    """Reads `3` (a chain), `3@1` (with rejection sampling at temperature 1), `3/2/6` (a tree: steps, topk, tokens).

    Raises:
        UserError: it is none of these.
    """
    match = re.fullmatch(r"([1-9]\d?)(?:@(\d+(?:\.\d+)?)|/([1-9]\d?)/([1-9]\d{0,2}))?", text)
    steps, temperature, topk, budget = match.groups() if match is not None else (None,) * 4
    is_right = steps is not None and (temperature is None or float(temperature) > 0)
    if topk is not None and budget is not None and steps is not None:
        num_candidates = int(topk) + (int(steps) - 1) * int(topk) ** 2
        is_right = int(topk) > 1 and 2 <= int(budget) <= num_candidates + 1
    if not is_right or steps is None:
        raise UserError(
            f"a speculation must be STEPS, STEPS@TEMPERATURE or STEPS/TOPK/TOKENS such as 3, 3@1 and 3/2/6, got "
            f"{text!r}; TOPK is 2 or more, TOKENS count the tree's root and are at most TOPK + (STEPS-1) TOPK^2 + 1"
        )
    if topk is not None and budget is not None:
        return Speculation(int(steps), int(topk), int(budget))
    return Speculation(int(steps), temperature=None if temperature is None else float(temperature))


def simulate(
    drafter: Eagle3Drafter,
    embed_tokens: Tensor,  # (V, D) the target's, on the drafter's device
    samples: Iterable[FeatureSample],
    *,
    num_draft_tokens: int,
    batch_tokens: int | None = None,
    advance: Callable[[int], None] | None = None,
) -> list[AnswerRounds]:
    """Returns the rounds of every answer in `samples`, in order; `advance` is told of samples as they are done."""
    rounds: list[AnswerRounds] = []
    limit = batch_tokens or batch_tokens_of(drafter.config, embed_tokens)
    for packed in packs_of(samples, limit, embed_tokens.device):
        rounds += answer_rounds(packed, compared_chains(drafter, embed_tokens, packed, num_draft_tokens))
        if advance is not None:
            advance(len(packed.sample_ids))
    return rounds


def simulate_all(
    drafters: Mapping[str, Eagle3Drafter],
    target: TargetWeights,  # on the drafters' device
    packs: Iterable[PackedSequences],  # on that device, too
    speculations: Sequence[Speculation],
    *,
    advance: Callable[[int], None] | None = None,
) -> dict[tuple[str, Speculation], list[AnswerRounds]]:
    """Returns the rounds of every answer for each drafter served in each way, with one pass over the samples.

    All drafters read the states that the samples have. Chains of one kind are drafted once, as long as the longest.
    """
    found: dict[tuple[str, Speculation], list[AnswerRounds]] = {
        (name, speculation): [] for name in drafters for speculation in speculations
    }
    for packed in packs:
        for name, drafter in drafters.items():
            for group in _alike(speculations):
                for speculation, chains in _outcomes(drafter, target, packed, group):
                    found[name, speculation] += answer_rounds(packed, chains)
        if advance is not None:
            advance(len(packed.sample_ids))
    return found


def _alike(speculations: Sequence[Speculation]) -> list[list[Speculation]]:
    """Groups what can share its drafts: chains of every length, and trees that differ in their budgets alone."""
    groups: dict[tuple[float | int | None, ...], list[Speculation]] = {}
    for speculation in speculations:
        depth = speculation.num_steps if speculation.topk > 1 else 0
        groups.setdefault((speculation.topk, depth, speculation.temperature), []).append(speculation)
    return list(groups.values())


def _outcomes(
    drafter: Eagle3Drafter, target: TargetWeights, packed: PackedSequences, group: list[Speculation]
) -> Iterator[tuple[Speculation, ChainMatches]]:
    """Drafts once, and yields what becomes of it in each way of serving of a group."""
    first, longest = group[0], max(speculation.num_steps for speculation in group)
    if first.topk > 1:
        trees = draft_trees(drafter, target.embed_tokens, packed, longest, first.topk)
        for speculation in group:
            assert speculation.num_draft_tokens is not None, speculation
            yield speculation, tree_chains(trees, packed, longest, speculation.num_draft_tokens)
        return
    if first.temperature is None:
        chains = compared_chains(drafter, target.embed_tokens, packed, longest)
    else:
        chains = sampled_chains(drafter, target, packed, longest, first.temperature)
    for speculation in group:
        yield speculation, ChainMatches(chains.rows, chains.matches[:, : speculation.num_steps])


def batch_tokens_of(drafter: DrafterConfig, embed_tokens: Tensor) -> int:
    """Returns how many tokens of a pack keep a device busy and fit it."""
    if not embed_tokens.is_cuda:
        return BATCH_TOKENS
    return max(BATCH_TOKENS, BATCH_BYTES // (drafter.num_aux * drafter.hidden_size * embed_tokens.element_size()))


def packs_of(samples: Iterable[FeatureSample], batch_tokens: int, device: torch.device) -> Iterator[PackedSequences]:
    """Yields samples packed on the device; the next pack is read while the caller works on one."""
    groups = groups_of(samples, lambda sample: sample.input_ids.numel(), batch_tokens)

    def read() -> PackedSequences | None:
        group = next(groups, None)
        return None if group is None else pack(group)

    with ThreadPoolExecutor(max_workers=1) as reader:
        pending = reader.submit(read)
        while (packed := pending.result()) is not None:
            pending = reader.submit(read)
            yield packed.to(device)


def packs_of_store(
    store: FeatureStore, indices: Iterable[int], batch_tokens: int, device: torch.device
) -> Iterator[PackedSequences]:
    """Yields a store's samples packed on the device, in order; the next packs are read and copied meanwhile."""
    reader = PackReader(store, NUM_READERS, pin=device.type == "cuda")
    groups = groups_of(indices, lambda index: store.entries[index].num_tokens, batch_tokens)
    with closing(prefetched(reader.read, groups, PACKS_AHEAD)) as read:
        yield from on_device(read, device)


def held_out_indices(store: FeatureStore, share: float | None) -> list[int]:
    """Returns the indices of the store's samples that were kept out of training; of all where no share is named.

    Raises:
        UserError: there is none.
    """
    indices = list(range(len(store))) if share is None else store.split(share)[1]
    if not indices:
        raise UserError(
            f"held_out_share must leave samples of the store, got none of {len(store)} with {share} "
            f"({store.path}); use the share of the training run"
        )
    return indices


def simulate_store(
    drafter: Eagle3Drafter,
    embed_tokens: Tensor,  # (V, D) the target's, on the drafter's device
    store: FeatureStore,
    indices: Sequence[int],  # of the samples
    config: EvaluateConfig,
) -> Measured:
    """Measures the drafter on samples of a store."""
    with progress_bar("simulating the store", len(indices), "sample") as advance:
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


def groups_of(items: Iterable[Item], num_tokens_of: Callable[[Item], int], batch_tokens: int) -> Iterator[list[Item]]:
    """Yields runs of items within `batch_tokens` tokens; a longer item is a group of its own."""
    group: list[Item] = []
    num_tokens = 0
    for item in items:
        if group and num_tokens + num_tokens_of(item) > batch_tokens:
            yield group
            group, num_tokens = [], 0
        group.append(item)
        num_tokens += num_tokens_of(item)
    if group:
        yield group
