"""A drafter at work on recorded features: what it gets right, and whether other settings would do better.

A setting that differs from the usual is no fault by itself; here the drafter's own choices decide.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.config import TargetConfig, UserError
from eagle3.draft.export import load_drafter
from eagle3.draft.model import DrafterConfig, Eagle3Drafter
from eagle3.draft.serving_config import RECORD_KEY, target_architecture
from eagle3.draft.target_weights import load_target_weights, rope_parameters
from eagle3.draft.ttt import chain_matches, pack
from eagle3.evaluation.doctor.files import DrafterFiles, Finding
from eagle3.evaluation.doctor.settings import Target, compare_template, layer_ids, layers_differ, rope_difference
from eagle3.evaluation.simulate import simulate
from eagle3.evaluation.target import load_local_target
from eagle3.features.manifest import check_same_target
from eagle3.features.record import FeatureSample
from eagle3.features.store import FeatureStore
from eagle3.prompts.tokenizers import end_token_ids, tokenizer_digest

MAX_TOKENS = 8192  # of the samples that are looked at: 2,000 supervised ones tell 30 % from 33 %
ENOUGH_COVERAGE = 0.9  # of the answers' tokens; each one outside is a certain miss


@dataclass(frozen=True)
class Share:
    """How often first drafts are right."""

    right: float
    count: float

    @property
    def value(self) -> float:
        """Right over all."""
        return self.right / self.count

    def __str__(self) -> str:
        return f"{self.value:.1%}"


@dataclass(frozen=True)
class Evidence:
    """What the drafter did on a store's samples."""

    findings: list[Finding]
    position_0: Share | None = None  # first drafts of rounds, as served; None: it could not be run
    samples: Sequence[FeatureSample] = ()


def check_loadable(files: DrafterFiles, target: Target) -> list[Finding]:
    """Loads the drafter as it would be served, and returns why that fails."""
    try:
        load_drafter(files.directory, target.config)
    except UserError as error:
        return [Finding("not-loadable", str(error), "correct what is named, or export the drafter again")]
    return []


def check_on_store(files: DrafterFiles, target: Target, store_path: Path, num_draft_tokens: int) -> Evidence:
    """Runs the drafter on the first samples of a store, in rounds of `num_draft_tokens` drafts.

    Raises:
        UserError: there is no such store.
    """
    store = FeatureStore(store_path)
    try:
        check_same_target(
            store.manifest,
            store_path,
            target.path,
            expected={"tokenizer_digest": tokenizer_digest(target.tokenizer)},
            advice="give the store of this target",
        )
    except UserError as error:
        return Evidence([Finding("other-store", str(error), "capture a store of this target with extract.py")])
    if unloadable := check_loadable(files, target):
        return Evidence(unloadable)
    drafter = load_drafter(files.directory, target.config)
    findings = []
    if "chat_template_digest" not in files.config.get(RECORD_KEY, {}):
        findings += compare_template(target, store.manifest.chat_template_digest, "the store's text has")
    boundaries = list(store.manifest.capture_layers)
    if len(boundaries) != drafter.config.num_aux:
        what = f"the drafter reads {drafter.config.num_aux} states and the store has those of {boundaries}"
        return Evidence([*findings, Finding("other-store", what, "capture the layers that the drafter reads")])
    samples = _first_samples(store)
    embed_tokens = load_target_weights(target.path).embed_tokens.float()
    rounds = simulate(drafter, embed_tokens, samples, num_draft_tokens=num_draft_tokens)
    position_0 = Share(sum(each.accepted[0] for each in rounds), max(1.0, sum(each.reached[0] for each in rounds)))
    findings += _check_coverage(drafter, target, samples)
    is_right = _first_drafts(drafter, embed_tokens, samples)
    if not _is_better(is_right, _commonest_token(samples)):
        what = (
            f"at every place of the store's answers, where a round starts or not, first drafts are right "
            f"{_share(is_right)} of the time, and always drafting the answers' commonest token would be "
            f"{_share(_commonest_token(samples))}: the drafter has learned nothing that holds here"
        )
        remedy = "train a drafter on this store; if this one is good elsewhere, it reads other layers or another target"
        findings.append(Finding("no-skill", what, remedy))
    elif list(drafter.config.capture_layers) != boundaries and RECORD_KEY not in files.config:
        why = f"on a store of other boundaries its first drafts are right at {_share(is_right)} of all places:"
        architecture = target_architecture(target.config)
        served = list(drafter.config.capture_layers)
        findings.append(layers_differ(layer_ids(files), served, boundaries, architecture, why))
    findings += _try_rope(files, target, drafter, embed_tokens, samples)
    return Evidence(findings, position_0, samples)


def _first_samples(store: FeatureStore) -> list[FeatureSample]:
    samples: list[FeatureSample] = []
    num_tokens = 0
    for index in range(len(store)):
        if samples and num_tokens + store.entries[index].num_tokens > MAX_TOKENS:
            break
        samples.append(store[index])
        num_tokens += samples[-1].input_ids.numel()
    return [_in_fp32(sample) for sample in samples]


def _in_fp32(sample: FeatureSample) -> FeatureSample:
    return dataclasses.replace(
        sample,
        aux_hidden_states=sample.aux_hidden_states.float(),
        last_hidden_states=sample.last_hidden_states.float(),
    )


def _first_drafts(drafter: Eagle3Drafter, embed_tokens: Tensor, samples: Sequence[FeatureSample]) -> Tensor:
    """Returns where the first draft is the recorded token, (N,) bool over all places where a round could start."""
    packs = (pack([sample]) for sample in samples)
    return torch.cat([chain_matches(drafter, embed_tokens, packed, 1).matches[:, 0] for packed in packs])


def _is_better(one: Tensor, other: Tensor) -> bool:
    """Whether the first (N,) bool is right more often than the second by more than chance.

    Only places where they differ say anything (McNemar's test); three standard deviations are asked for.
    """
    gained, lost = int((one & ~other).sum()), int((other & ~one).sum())
    return gained - lost > 3 * (gained + lost) ** 0.5


def _share(is_right: Tensor) -> Share:  # (N,) bool
    return Share(float(is_right.sum()), float(is_right.numel()))


def _answer_tokens(samples: Sequence[FeatureSample]) -> Tensor:  # (N,)
    return torch.cat([sample.input_ids[sample.loss_mask] for sample in samples]).long()


def _commonest_token(samples: Sequence[FeatureSample]) -> Tensor:
    """Returns where the answers' commonest token would have been right, at the places of `_first_drafts`."""
    commonest = _answer_tokens(samples).bincount().argmax()
    packed = pack(list(samples))
    return packed.input_ids[packed.counted(1)[0] + 2] == commonest


def _check_coverage(drafter: Eagle3Drafter, target: Target, samples: Sequence[FeatureSample]) -> list[Finding]:
    t2d = drafter.t2d
    covered = float(t2d[_answer_tokens(samples)].float().mean())
    ends = sorted(end_token_ids(target.path, target.tokenizer))
    missing_ends = [token for token in ends if token < t2d.numel() and not t2d[token]]
    if covered >= ENOUGH_COVERAGE and len(missing_ends) < len(ends):
        return []
    what = (
        f"{covered:.1%} of the answers' tokens are in the draft vocabulary of {drafter.config.draft_vocab_size}, "
        f"end tokens outside it: {len(missing_ends)} of {len(ends)}; each token outside is a certain miss"
    )
    remedy = "train with a vocabulary counted on your own answers (draft.draft_vocab_size), which keeps end tokens"
    return [Finding("vocabulary-coverage", what, remedy)]


def _try_rope(
    files: DrafterFiles, target: Target, drafter: Eagle3Drafter, embed_tokens: Tensor, samples: Sequence[FeatureSample]
) -> list[Finding]:
    """Runs the drafter with the target's RoPE, if that is another; a contradiction within its files stands."""
    difference = rope_difference(files, target.config)
    if difference is None or difference.name != "rope":
        return [] if difference is None else [difference]
    own = _first_drafts(drafter, embed_tokens, samples)
    changed = _with_config(drafter, {"rope_parameters": rope_parameters(target.config)})
    with_targets = _first_drafts(changed, embed_tokens, samples)
    if not _is_better(with_targets, own):
        return []
    shares = f"{_share(with_targets)} with the target's and {_share(own)} with its own"
    rates = f"at all places first drafts are right {shares}"
    return [dataclasses.replace(difference, what=f"{difference.what}; {rates}")]


def _with_config(drafter: Eagle3Drafter, changes: Mapping[str, Any]) -> Eagle3Drafter:
    config: DrafterConfig = dataclasses.replace(drafter.config, **changes)
    other = Eagle3Drafter(config)
    other.load_state_dict(drafter.state_dict())
    return other


def try_layers(files: DrafterFiles, target: Target, samples: Sequence[FeatureSample]) -> list[Finding]:
    """Runs the target on the samples' tokens, and the drafter on the states one layer before and after its own.

    Costs the target's memory in this process and one forward of each sample.

    Raises:
        UserError: transformers cannot load the target.
    """
    drafter = load_drafter(files.directory, target.config)
    served = list(drafter.config.capture_layers)
    num_layers = target.config["num_hidden_layers"]
    shifts = [shift for shift in (0, -1, 1) if served[0] + shift >= 0 and served[-1] + shift < num_layers]
    union = sorted({boundary + shift for boundary in served for shift in shifts})
    local = load_local_target(TargetConfig(str(target.path), dtype="float32", device="cpu"), union, target.tokenizer)
    hidden_size = drafter.config.hidden_size
    states = []
    for sample in samples:
        features = local.features(sample.sample_id, [], sample.input_ids.tolist())
        states.append(features.aux_hidden_states.unflatten(-1, (len(union), hidden_size)))  # (T, U, D)
    is_right = {}
    for shift in shifts:
        columns = [union.index(boundary + shift) for boundary in served]
        shifted = [
            dataclasses.replace(sample, aux_hidden_states=aux[:, columns].flatten(1))
            for sample, aux in zip(samples, states, strict=True)
        ]
        is_right[shift] = _first_drafts(drafter, local.embed_tokens, shifted)
    best = max(shifts, key=lambda shift: int(is_right[shift].sum()))
    if not _is_better(is_right[best], is_right[0]):
        return []
    seen = ", ".join(f"{_share(is_right[shift])} at {[b + shift for b in served]}" for shift in shifts)
    wanted = [boundary + best for boundary in served]
    why = f"at all places first drafts are right {seen}: the drafter reads"
    return [layers_differ(layer_ids(files), served, wanted, target_architecture(target.config), why)]
