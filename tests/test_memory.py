"""What a GPU would hold at full size, counted without one: the GPU path on tensors of the meta device.

Kernels are replaced by what they allocate. A tensor that is left on another device is an error here, as it is there.
"""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from eagle3.draft import head
from eagle3.draft.model import DrafterConfig, Eagle3Drafter
from eagle3.draft.objective import ttt_sums
from eagle3.draft.target_weights import TargetWeights
from eagle3.draft.ttt import PackedSequences

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
    monkeypatch.setattr("eagle3.draft.context_attention.kernel_for", lambda query, documents: "cudnn")
    monkeypatch.setattr("eagle3.draft.model.Eagle3Drafter.compute_dtype", lambda drafter: torch.bfloat16)
    monkeypatch.setattr("torch.autocast", lambda *args, **kwargs: contextlib.nullcontext())
    monkeypatch.setattr("eagle3.draft.head.CHUNK_ELEMENTS", {"meta": head.CHUNK_ELEMENTS["cuda"]})


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


def peak_gib(config: DrafterConfig, num_tokens: int, ttt_steps: int = 7) -> float:
    """Returns the peak of forward and backward over one document in bf16, fp32 masters and moments included."""

    def states(*shape: int) -> Tensor:
        return torch.empty(*shape, device=META, dtype=torch.bfloat16)

    with _LiveBytes() as live:
        with META:
            drafter = Eagle3Drafter(config).bfloat16()
        masters = [torch.empty(3, parameter.numel(), device=META) for parameter in drafter.parameters()]
        target = TargetWeights(
            embed_tokens=states(config.vocab_size, config.hidden_size),
            lm_head=states(config.vocab_size, config.hidden_size),
            norm=states(config.hidden_size),
            rms_norm_eps=config.rms_norm_eps,
        )
        packed = PackedSequences(
            input_ids=torch.empty(num_tokens, dtype=torch.int64, device=META),
            positions=torch.empty(num_tokens, dtype=torch.int64, device=META),
            loss_mask=torch.ones(num_tokens, dtype=torch.bool),
            document_lengths=(num_tokens,),
            aux_hidden_states=states(num_tokens, config.num_aux * config.hidden_size),
            target_rows=torch.arange(num_tokens - 1),
            last_hidden_states=states(num_tokens - 1, config.hidden_size),
            target_logz=torch.empty(num_tokens - 1, device=META),
            sample_ids=("long",),
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
        )
        sums.loss.backward()
        assert len(masters) == len(list(drafter.parameters()))
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


def test_one_row_of_32_k_tokens_at_7168_fits_70_gib() -> None:
    assert peak_gib(config_of(7168, 18432, 64, 163840), 32768) < 70


def test_memory_is_linear_in_tokens() -> None:
    config = config_of(1024, 4096, 8, 40000)
    at_once = peak_gib(config, 65536)
    assert at_once < 2.1 * peak_gib(config, 32768)
