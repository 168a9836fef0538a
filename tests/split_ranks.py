"""Scores a document whole and split over the ranks that a test launches, and tells how much they differ.

The first argument is a file that gets JSON: relative differences of loss, counts and gradients, by case. The second is
the device, the others name cases.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from conftest import random_sample
from draft_oracle import tiny_drafter
from torch import Tensor

from eagle3.draft.objective import ttt_sums
from eagle3.draft.target_weights import TargetWeights, log_normaliser
from eagle3.draft.ttt import PackedSequences, pack
from eagle3.training.packs import CodedPack
from eagle3.training.sequence_split import Ranks, share_of

STEPS = 4
MASKS = {
    "one answer": [0] * 9 + [1] * 30,
    "a long prompt": [0] * 60 + [1] * 6 + [0] * 5,
    "three answers": [0] * 3 + [1] * 11 + [0] * 20 + [1] * 3 + [0] * 2 + [1] * 16,
    "as few rows as pieces": [0] * 5 + [1] * 7,
    "a long answer": [0] * 700 + [1] * 1300,
}
CASES: dict[str, dict[str, Any]] = {
    **{name: {} for name in MASKS},
    "one answer, rejected rows leave": {"drop_rejected": True},
    "one answer, feedback after the norm": {"norm_output": True},
}
SIZES: dict[str, dict[str, Any]] = {
    "cpu": {"hidden_size": 16, "vocab_size": 40},
    # As the kernels of a GPU need them.
    "cuda": {
        "hidden_size": 256, "vocab_size": 512, "draft_vocab_size": 128, "intermediate_size": 512, "head_dim": 64,
        "max_position_embeddings": 4096,
    },
}  # fmt: skip


def evaluate(
    changes: dict[str, Any], packed: PackedSequences, device: torch.device, *, bf16: bool = False
) -> list[Tensor]:
    """Returns this rank's loss, counts, and gradients by parameter; in fp64 on a CPU, in fp32 or bf16 on a GPU."""
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    sizes = SIZES[device.type]
    drafter = tiny_drafter(dtype=dtype, norm_output=changes.get("norm_output", False), **sizes).to(device)
    if device.type == "cuda":  # at 0.3, as a tiny one starts, nothing of this width stays in bf16's range
        for parameter in drafter.parameters():
            parameter.data.copy_(parameter.data / 4 if parameter.dim() > 1 else parameter.data)
    generator = torch.Generator().manual_seed(9)
    shape = (2, sizes["vocab_size"], sizes["hidden_size"])
    embed_tokens, lm_head = torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)
    target = TargetWeights(embed_tokens, lm_head / 4, torch.ones(shape[2], dtype=dtype, device=device), 1e-5)
    packed = dataclasses.replace(packed, target_logz=log_normaliser(target, packed.last_hidden_states))
    settings = {name: value for name, value in changes.items() if name != "norm_output"}
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        sums = ttt_sums(drafter, target, packed, ttt_steps=STEPS, ttt_decay=0.8, renormalise=False, **settings)
    sums.loss.backward()
    grads = [each.grad for each in drafter.parameters() if each.grad is not None]
    return [sums.loss.detach(), sums.num_counted, sums.acceptance, *grads]


def differences(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    """Returns the relative difference of each tensor, in the norm."""
    return [float((mine - theirs).norm() / theirs.norm()) for mine, theirs in zip(found, wanted, strict=True)]


def main() -> None:
    kind, names = sys.argv[2], sys.argv[3:] or list(CASES)
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    ranks = Ranks.of(dist.get_rank(), dist.get_world_size())
    facts = {}
    for name in names:
        changes = CASES[name]
        sizes = SIZES[kind]
        sample = random_sample(
            "s", MASKS[name.split(",")[0]], hidden_size=sizes["hidden_size"], vocab_size=sizes["vocab_size"]
        )
        wide = torch.float64 if kind == "cpu" else torch.float32
        sample = dataclasses.replace(
            sample,
            aux_hidden_states=sample.aux_hidden_states.to(wide),
            last_hidden_states=sample.last_hidden_states.to(wide),
        )
        whole = CodedPack.of(pack([sample]))
        share = share_of(whole, ranks, STEPS)
        wanted = evaluate(changes, whole.to(device).decoded(), device)
        for bf16 in (False, True) if kind == "cuda" else (False,):
            found = evaluate(changes, share.to(device).decoded(), device, bf16=bf16)
            for tensor in found:
                dist.all_reduce(tensor)
            facts[f"{name}, bf16" if bf16 else name] = differences(found, wanted)
        if kind == "cuda":
            unsplit = evaluate(changes, whole.to(device).decoded(), device, bf16=True)
            facts[f"{name}, bf16, whole"] = differences(unsplit, wanted)
    if ranks.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
