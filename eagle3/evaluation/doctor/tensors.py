"""The numbers in a drafter's tensors: its vocabulary map, what is not finite, a head that is none."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from eagle3.draft.export import WEIGHT_NAMES
from eagle3.evaluation.doctor.files import DrafterFiles, Finding

# A largest singular value beyond that of independent numbers by this much is structure; the demo's drafter has 9.6.
RANDOM_RATIO = 1.1
FP16_MAX = 65504.0


def check_tensors(files: DrafterFiles, target_config: Mapping[str, Any] | None) -> list[Finding]:
    """Returns what is wrong with the numbers themselves."""
    return _check_d2t(files) + _check_numbers(files, target_config) + _check_head(files)


def _check_d2t(files: DrafterFiles) -> list[Finding]:
    d2t = files.tensors.get("d2t")
    if d2t is None:
        return []
    d2t = d2t.long()
    vocab_size = int(files.config.get("vocab_size") or d2t.max() + 1)
    as_offsets = d2t + torch.arange(d2t.numel())  # (W,)
    t2d = files.tensors.get("t2d")
    if _is_map(as_offsets, vocab_size) and (t2d is None or _same_tokens(as_offsets, t2d)):
        return []
    remedy = "store offsets: d2t - arange(len(d2t))"
    if _is_map(d2t, vocab_size):
        what = "d2t holds target tokens and SGLang adds it to draft tokens: nearly every draft becomes another token"
        return [Finding("d2t-absolute", what, remedy)]
    what = (
        f"d2t + draft token gives {as_offsets.unique().numel()} tokens in {int(as_offsets.min())}.."
        f"{int(as_offsets.max())} for {d2t.numel()} draft tokens of a vocabulary of {vocab_size}"
        + ("" if t2d is None else ", and t2d names others")
    )
    return [Finding("d2t", what, "make d2t again from the map that the drafter was trained with, as offsets")]


def _is_map(target_ids: Tensor, vocab_size: int) -> bool:
    """Tells whether these (W,) are different tokens of the vocabulary."""
    within = bool((target_ids >= 0).all()) and bool((target_ids < vocab_size).all())
    return within and target_ids.unique().numel() == target_ids.numel()


def _same_tokens(target_ids: Tensor, t2d: Tensor) -> bool:
    return torch.equal(target_ids.sort().values, t2d.nonzero().flatten())


def _check_numbers(files: DrafterFiles, target_config: Mapping[str, Any] | None) -> list[Finding]:
    findings = []
    weights = {name: tensor for name, tensor in files.tensors.items() if tensor.is_floating_point()}
    overflown = [name for name, t in weights.items() if t.dtype == torch.float16 and bool(t.isinf().any())]
    broken = [name for name, t in weights.items() if name not in overflown and not bool(t.isfinite().all())]
    if broken:
        what = f"{', '.join(broken)} has NaN or Inf: every draft is made of them"
        findings.append(Finding("non-finite", what, "take an earlier checkpoint; training diverged"))
    dtypes = [config.get("torch_dtype") or config.get("dtype") for config in (files.config, target_config or {})]
    if "float16" in dtypes:  # SGLang runs the drafter in the target's dtype
        overflown += [
            name
            for name, t in weights.items()
            if t.dtype != torch.float16 and bool(t.isfinite().all()) and float(t.abs().max()) > FP16_MAX
        ]
    if overflown:
        what = f"{', '.join(overflown)} has values beyond {FP16_MAX:.0f}, which are infinite in float16"
        findings.append(Finding("fp16-overflow", what, "export in bfloat16 (torch_dtype too), and serve in bfloat16"))
    quantised = sorted(name for name, t in files.tensors.items() if name in WEIGHT_NAMES and name not in weights)
    if quantised:
        what = f"{', '.join(quantised)} is stored in {files.tensors[quantised[0]].dtype}"
        findings.append(Finding("quantised", what, "export the drafter in bfloat16; it is read as it is stored"))
    return findings


def _check_head(files: DrafterFiles) -> list[Finding]:
    """Tells a head of random numbers from a trained one, whose rows have much in common."""
    head = files.tensors.get("lm_head.weight")
    if head is None or head.ndim != 2 or not head.is_floating_point() or not bool(head.isfinite().all()):
        return []
    if singular_ratio(head) > RANDOM_RATIO:
        return []
    what = (
        "lm_head.weight is independent random numbers (its largest singular value is theirs, where a trained head's "
        "is several times as large): drafts are drawn at random"
    )
    remedy = "find the head that was trained: a trainer may keep it apart from the layer, or under another name"
    return [Finding("random-head", what, remedy)]


def singular_ratio(matrix: Tensor) -> float:
    """Returns the largest singular value over that of independent numbers with the same spread; about 1 for those.

    Source: Marchenko and Pastur 1967, the edge sigma * (sqrt(rows) + sqrt(columns)).
    """
    matrix = matrix.float()
    rows, columns = matrix.shape
    spread = float(matrix.std())
    if spread == 0:
        return 0.0
    vector = torch.ones(columns) / columns**0.5
    # Power iteration from the common direction, in which heads differ most from chance; from below, so never too much.
    for _ in range(20):
        vector = torch.nn.functional.normalize(matrix.T @ (matrix @ vector), dim=0)
    return float((matrix @ vector).norm()) / (spread * (rows**0.5 + columns**0.5))
