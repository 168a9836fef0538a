"""What a GPU would hold at full size, counted without one: the GPU path on tensors of the meta device.

Kernels are replaced by what they allocate. A tensor that is left on another device is an error here, as it is there.
"""

import contextlib
import dataclasses
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_oracle import tiny_drafter
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from eagle3.draft import head
from eagle3.draft.context_attention import Documents, has_plan
from eagle3.draft.model import DrafterConfig, Eagle3Drafter
from eagle3.draft.objective import ttt_sums
from eagle3.draft.target_weights import TargetWeights
from eagle3.draft.ttt import PackedSequences
from eagle3.training.distributed import Setup
from eagle3.training.memory import ZERO_BUCKET_BYTES, MemoryPlan, log_plan, parameter_sizes

META = torch.device("meta")
ROW_KERNELS = SimpleNamespace(
    norm=lambda *args, **kwargs: None,
    norm_backward=lambda states, weight, eps, grad, **kwargs: torch.empty(grad.shape[1], device=META),
    swiglu=lambda *args: None,
    swiglu_backward=lambda *args: None,
    rotate=lambda *args, **kwargs: None,
    take=lambda *args: None,
)
CHAIN_KERNELS = SimpleNamespace(
    merge_chain=lambda query, chain, rows, *args: query.new_empty(rows.numel(), *query.shape[1:]),
    merge_chain_backward=lambda grad, query, chain, rows, *args: query.new_empty(
        rows.numel(), query.shape[1] + chain.shape[2], query.shape[2]
    ),
)
SCORE_KERNELS = SimpleNamespace(
    log_sum_exp=lambda logits: torch.empty(logits.shape[0], device=META),
    score_rows=lambda logits, *args: (
        *torch.empty(2, logits.shape[0], device=META),
        torch.empty(logits.shape[0], dtype=torch.int64, device=META),
    ),
)


@pytest.fixture(autouse=True)
def _meta_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, kernels in (("fusion", ROW_KERNELS), ("attention", CHAIN_KERNELS), ("head", SCORE_KERNELS)):
        monkeypatch.setattr(f"eagle3.draft.{module}.has_kernels", lambda tensor: True)
        monkeypatch.setattr(f"eagle3.draft.{module}._kernels", lambda kernels=kernels: kernels)
    monkeypatch.setattr("eagle3.draft.context_attention.kernel_for", lambda query, documents: _kernel_for(documents))
    monkeypatch.setattr("eagle3.draft.model.Eagle3Drafter.compute_dtype", lambda drafter: torch.bfloat16)
    monkeypatch.setattr("torch.autocast", lambda *args, **kwargs: contextlib.nullcontext())
    monkeypatch.setitem(head.CHUNK_ELEMENTS, "meta", head.CHUNK_ELEMENTS["cuda"])


def _kernel_for(documents: Documents) -> str:
    is_square = documents.lengths == documents.key_lengths
    return "cudnn" if is_square and has_plan(documents.lengths) else "flash"


class _LiveBytes(TorchDispatchMode):
    """Adds up the storages that are alive after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor) and value.is_meta:
                storage = value.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        return sum(num_bytes for _, num_bytes in self._storages.values())


def peak_gib(
    config: DrafterConfig,
    num_tokens: int,
    *,
    ttt_steps: int = 7,
    prompt_tokens: int = 0,
    num_recomputed: int = 0,
    whole_head: bool = True,
) -> float:
    """Returns the peak of forward and backward over one document in bf16, fp32 masters and moments included.

    The states of another document like it are there, too, as those of the next micro-batch are. Of the target's head
    there are all rows, or the drafted ones.
    """

    def states(*shape: int) -> Tensor:
        return torch.empty(*shape, device=META, dtype=torch.bfloat16)

    with _LiveBytes() as live:
        with META:
            drafter = Eagle3Drafter(config).bfloat16()
        masters = [torch.empty(3, parameter.numel(), device=META) for parameter in drafter.parameters()]
        target = TargetWeights(
            embed_tokens=states(config.vocab_size, config.hidden_size),
            lm_head=states(config.vocab_size if whole_head else config.draft_vocab_size, config.hidden_size),
            norm=states(config.hidden_size),
            rms_norm_eps=config.rms_norm_eps,
        )
        first_row = max(0, prompt_tokens - 1)
        packed, following = (
            PackedSequences(
                input_ids=torch.empty(num_tokens, dtype=torch.int64, device=META),
                positions=torch.empty(num_tokens, dtype=torch.int64, device=META),
                loss_mask=torch.arange(num_tokens) >= prompt_tokens,
                document_lengths=(num_tokens,),
                aux_hidden_states=states(num_tokens, config.num_aux * config.hidden_size),
                target_rows=torch.arange(first_row, num_tokens - 1),
                last_hidden_states=states(num_tokens - 1 - first_row, config.hidden_size),
                target_logz=torch.empty(num_tokens - 1 - first_row, device=META),
                sample_ids=(name,),
            )
            for name in ("long", "next")
        )
        weights = torch.empty(ttt_steps, dtype=torch.float64, device=META)
        sums = ttt_sums(
            drafter,
            target,
            packed,
            ttt_steps=ttt_steps,
            ttt_decay=0.8,
            renormalise=True,
            step_weights=weights,
            num_recomputed=num_recomputed,
        )
        sums.loss.backward()
        assert len(masters) == len(list(drafter.parameters()))
        assert following.sample_ids == ("next",)
    return live.peak / 2**30


def config_of(hidden_size: int, intermediate_size: int, num_heads: int, vocab_size: int) -> DrafterConfig:
    return DrafterConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_attention_heads=num_heads,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=vocab_size,
        draft_vocab_size=32000,
        capture_layers=(2, 16, 29),
        rms_norm_eps=1e-5,
        max_position_embeddings=65536,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )


D4096 = config_of(4096, 14336, 32, 128256)
D7168 = config_of(7168, 18432, 64, 163840)
D7168_FULL = dataclasses.replace(D7168, draft_vocab_size=163840)
ALONE = Setup(zero_stage=None, num_ranks=1)


def test_one_row_of_32_k_tokens_at_7168_fits_70_gib() -> None:
    assert peak_gib(D7168, 32768) < 70


def test_memory_is_linear_in_tokens() -> None:
    config = config_of(1024, 4096, 8, 40000)
    at_once = peak_gib(config, 65536)
    assert at_once < 2.1 * peak_gib(config, 32768)


def plan_of(config: DrafterConfig, *, setup: Setup = ALONE, capacity: int = 0, whole_head: bool = True) -> MemoryPlan:
    """Plans for a target with all rows of its head, or with the drafted ones."""
    num_rows = config.vocab_size if whole_head else config.draft_vocab_size
    target_bytes = 2 * (config.vocab_size + num_rows) * config.hidden_size
    copies_head = num_rows > config.draft_vocab_size
    return MemoryPlan(config, setup, 7, target_bytes, capacity, copies_head=copies_head)


@pytest.mark.parametrize("whole_head", [True, False])
@pytest.mark.parametrize(
    ("config", "num_tokens", "prompt_tokens", "num_recomputed"),
    [
        (D4096, 16384, 0, 0),
        (D4096, 16383, 8192, 0),  # of no planned length, so that prompts have no queries
        (D4096, 16384, 0, 3),
        (D4096, 16384, 0, 7),
        (D4096, 2048, 0, 0),
        (D7168_FULL, 16384, 0, 0),
        (D7168, 32768, 0, 0),
        (config_of(1024, 4096, 8, 40000), 32767, 16384, 0),
        (dataclasses.replace(D4096, fc_norm=True), 32767, 28672, 0),  # captured states are most of it
    ],
)
def test_the_estimate_is_what_tensors_add_up_to(
    config: DrafterConfig, num_tokens: int, prompt_tokens: int, num_recomputed: int, whole_head: bool
) -> None:
    counted = peak_gib(
        config, num_tokens, prompt_tokens=prompt_tokens, num_recomputed=num_recomputed, whole_head=whole_head
    )
    # Parameters in bf16, as DeepSpeed has them; its buckets are not among the tensors that were counted.
    plan = plan_of(config, setup=Setup(zero_stage=2, num_ranks=1), whole_head=whole_head)
    estimate = plan.estimate(num_tokens, num_tokens - prompt_tokens, num_recomputed=num_recomputed)
    total = estimate.total - ZERO_BUCKET_BYTES
    assert total / 2**30 == pytest.approx(counted, rel=0.03)  # small tensors and operations' own are left out


def test_the_estimate_is_near_what_a_gpu_took() -> None:
    """One micro-batch a step, so that no next one was there, and all rows supervised."""
    result = json.loads((Path(__file__).parent.parent / "benchmarks/results/train.json").read_text(encoding="utf-8"))
    configs = {"d4096": D4096, "d7168": D7168}
    measured = [row for row in result["rows"] if row["share_of_limit"] is not None]
    assert len(measured) >= 4
    for row in measured:
        estimate = plan_of(configs[row["work"].split("-")[0]]).estimate(row["tokens"], row["tokens"])
        assert estimate.total / 2**30 == pytest.approx(row["peak_gib"], rel=0.1), row["work"]


@pytest.mark.parametrize("fc_norm", [False, True])
def test_every_parameter_is_counted(fc_norm: bool) -> None:
    drafter = tiny_drafter(fc_norm=fc_norm)
    assert parameter_sizes(drafter.config).total == sum(parameter.numel() for parameter in drafter.parameters())


def test_zero_shares_masters_and_moments_among_ranks() -> None:
    alone, four = (
        plan_of(D7168, setup=setup).estimate(8192, 8192) for setup in (Setup(1, 1), Setup(zero_stage=2, num_ranks=4))
    )
    assert four.optimizer == alone.optimizer // 4
    assert dataclasses.replace(four, optimizer=alone.optimizer) == alone


def test_ddp_keeps_its_gradients() -> None:
    alone, two = (plan_of(D4096, setup=Setup(None, ranks)).estimate(8192, 8192) for ranks in (1, 2))
    assert two.gradients - alone.gradients == 4 * parameter_sizes(D4096).total


def test_no_more_is_made_again_than_has_to_be() -> None:
    sizes = [plan_of(D4096).estimate(16384, 16384, num_recomputed=number).total for number in range(8)]
    assert sizes[:7] == sorted(sizes[:7], reverse=True)
    for number, size in enumerate(sizes[:7]):
        assert plan_of(D4096, capacity=size).num_recomputed(16384, 16384) == number
    assert plan_of(D4096, capacity=sizes[6] - 1).num_recomputed(16384, 16384) == 7
    assert plan_of(D4096, capacity=sizes[6]).num_recomputed(16384, 8192) == 0


def test_the_log_says_what_is_expected(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_plan(plan_of(D4096, capacity=23 * 2**30), 16384, 0.5)
    half, whole = (record.getMessage() for record in caplog.records)
    assert half == (
        "memory of each GPU: 17.2 GiB (target 2.0, parameters 2.1, optimizer 3.2, gradients 0.5, activations 9.5) "
        "of 23.0 GiB for 16384 tokens at once, 50% of them supervised, as in the store; nothing is made again"
    )
    assert whole == (
        "memory of each GPU: 22.8 GiB (target 2.0, parameters 2.1, optimizer 3.2, gradients 0.5, activations 15.0) "
        "of 23.0 GiB for 16384 tokens at once, all of them supervised; gate and up of 1 of 7 draft steps made again"
    )


@pytest.mark.parametrize("setup", [ALONE, Setup(zero_stage=2, num_ranks=4)])
def test_an_average_of_the_weights_lies_where_the_moments_do(setup: Setup) -> None:
    plain = plan_of(D4096, setup=setup)
    averaged = dataclasses.replace(plain, has_average=True)
    added = averaged.estimate(100, 50).optimizer - plain.estimate(100, 50).optimizer
    assert added == 4 * parameter_sizes(D4096).total // setup.num_ranks  # fp32


def test_the_docs_say_what_the_targets_head_takes() -> None:
    docs = (Path(__file__).parent.parent / "docs/TRAINING.md").read_text(encoding="utf-8")
    drafted, whole = (2 * config.draft_vocab_size * 7168 for config in (D7168, D7168_FULL))
    assert f"{drafted / 1e9:.2f} GB in place of {whole / 1e9:.2f} GB" in docs
    plan = plan_of(D7168_FULL, setup=Setup(zero_stage=2, num_ranks=4))
    total = plan.estimate(8192, 8192).total
    # Sharded, a quarter stays, and all rows are there while the head is scored; its gradient's cast, the peak as it is
    # estimated, would come without them.
    cast = total - whole + whole // 4
    scoring = total - whole + plan._chunk_bytes(8192) + whole // 4
    assert scoring > cast
    said = re.search(
        r"Of the ([\d.]+) GiB .* are gathered for the scores alone would save ([\d.]+) GiB", docs, re.DOTALL
    )
    assert said is not None
    assert said.groups() == (f"{total / 2**30:.1f}", f"{(total - scoring) / 2**30:.1f}")


def test_the_docs_say_what_a_save_of_the_largest_head_takes() -> None:
    docs = (Path(__file__).parent.parent / "docs/TRAINING.md").read_text(encoding="utf-8")
    number = parameter_sizes(D7168_FULL).total
    # Master and two moments in fp32, and an average of the weights.
    assert f"{number / 1e9:.2f} B\nparameters {12 * number / 1e9:.0f} GB each ({16 * number / 1e9:.0f} GB with" in docs
