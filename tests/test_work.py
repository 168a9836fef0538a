"""The FLOPs of a step are those of the matrix products that it makes."""

import dataclasses

import torch
from conftest import random_sample
from draft_oracle import tiny_drafter
from torch.utils.flop_counter import FlopCounterMode

from eagle3.draft.objective import ttt_sums
from eagle3.draft.target_weights import TargetWeights
from eagle3.draft.ttt import pack
from eagle3.training.optimizer_step import count_attended
from eagle3.training.packs import CodedPack
from eagle3.training.work import limit_of, step_flops


def test_flops_are_those_of_the_products_that_torch_counts() -> None:
    drafter = tiny_drafter()
    target = TargetWeights(torch.randn(40, 16), torch.randn(40, 16), torch.ones(16), 1e-5)
    sample = random_sample("s", [0] * 30 + [1] * 41, hidden_size=16, vocab_size=40)
    packed = pack([dataclasses.replace(sample, target_logz=torch.full((sample.last_rows.numel(),), 3.0))])
    with FlopCounterMode(display=False) as counter:
        sums = ttt_sums(drafter, target, packed, ttt_steps=3, ttt_decay=0.8, renormalise=True)
        sums.loss.backward()
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    rows = sums.num_counted.tolist()
    head = 2 * 16 * 12
    products += sum(rows) * head  # the weight's gradient is added in place, which torch does not count
    products -= head  # one target row more than there are rows
    assert step_flops(drafter.config, 71, rows, 0.0) == products


def test_attention_is_counted_by_the_keys_that_rows_see() -> None:
    packed = CodedPack.of(pack([random_sample("s", [0] * 10 + [1] * 4)]))
    # Rows 9, 10, 11 are counted at 3, 2 and 1 steps and see 10, 11 and 12 keys.
    assert count_attended([packed.tokens], 3).tolist() == [10 + 11 + 12, 10 + 11, 10]
    assert count_attended([], 3).tolist() == [0.0, 0.0, 0.0]
    config = tiny_drafter().config
    assert step_flops(config, 0, [0.0], 64.0) == 14 * config.num_attention_heads * config.head_dim * 64


def test_limits_are_found_by_the_gpus_name() -> None:
    assert limit_of("NVIDIA H200") == 989e12
    assert limit_of("NVIDIA A100-SXM4-80GB") == 312e12
    assert limit_of("NVIDIA GeForce RTX 3090") is None
