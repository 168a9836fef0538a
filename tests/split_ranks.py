"""Scores a document whole and split over the ranks that a test launches, and tells how much they differ.

The first argument is a file that gets JSON: relative differences of loss, counts and gradients, by case.
The others name cases.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from conftest import random_sample
from draft_oracle import tiny_drafter
from torch import Tensor

from eagle3.draft.objective import ttt_sums
from eagle3.draft.target_weights import TargetWeights
from eagle3.draft.ttt import PackedSequences, pack
from eagle3.training.packs import CodedPack
from eagle3.training.sequence_split import Ranks, share_of

STEPS = 4
MASKS = {
    "one answer": [0] * 9 + [1] * 30,
    "a long prompt": [0] * 60 + [1] * 6 + [0] * 5,
    "three answers": [0] * 3 + [1] * 11 + [0] * 20 + [1] * 3 + [0] * 2 + [1] * 16,
    "as few rows as pieces": [0] * 5 + [1] * 7,
}
CASES: dict[str, dict[str, Any]] = {
    **{name: {} for name in MASKS},
    "one answer, rejected rows leave": {"drop_rejected": True},
    "one answer, feedback after the norm": {"norm_output": True},
}


def evaluate(changes: dict[str, Any], packed: PackedSequences) -> list[Tensor]:
    """Returns this rank's loss, counts, and gradients by parameter, in fp64."""
    norm_output = changes.get("norm_output", False)
    drafter = tiny_drafter(dtype=torch.float64, norm_output=norm_output)
    generator = torch.Generator().manual_seed(9)
    embed_tokens, lm_head = torch.randn(2, 40, 16, generator=generator, dtype=torch.float64)
    target = TargetWeights(embed_tokens, lm_head, torch.ones(16, dtype=torch.float64), 1e-5)
    settings = {name: value for name, value in changes.items() if name != "norm_output"}
    sums = ttt_sums(drafter, target, packed, ttt_steps=STEPS, ttt_decay=0.8, renormalise=False, **settings)
    sums.loss.backward()
    grads = [each.grad for each in drafter.parameters() if each.grad is not None]
    return [sums.loss.detach(), sums.num_counted, sums.acceptance, *grads]


def main() -> None:
    dist.init_process_group("gloo")
    ranks = Ranks.of(dist.get_rank(), dist.get_world_size())
    differences = {}
    for name in sys.argv[2:] or CASES:
        changes = CASES[name]
        sample = random_sample("s", MASKS[name.split(",")[0]], hidden_size=16, vocab_size=40)
        sample = dataclasses.replace(
            sample,
            aux_hidden_states=sample.aux_hidden_states.double(),
            last_hidden_states=sample.last_hidden_states.double(),
        )
        whole = CodedPack.of(pack([sample]))
        assert ranks.can_split(int(whole.tokens.counted(1)[0].numel())), name
        wanted = evaluate(changes, whole.decoded())
        found = evaluate(changes, share_of(whole, ranks, STEPS).decoded())
        for tensor in found:
            dist.all_reduce(tensor)
        differences[name] = [
            float((mine - theirs).abs().max() / theirs.abs().max()) for mine, theirs in zip(found, wanted, strict=True)
        ]
    if ranks.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(differences))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
