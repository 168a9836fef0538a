"""What a training step takes of a GPU, estimated before it is run, and what of it is made again if that is too much.

The estimate adds up the tensors at the moments when most of them are alive: while the head is scored, when its gradient
is handed out, and in the first operation of the backward. What the allocator loses between tensors is not in it.
"""

import logging
from dataclasses import dataclass

import torch

from eagle3.draft.head import CHUNK_ELEMENTS
from eagle3.draft.model import DrafterConfig
from eagle3.draft.target_weights import TargetWeights
from eagle3.training.distributed import Setup
from eagle3.words import counted

logger = logging.getLogger(__name__)

BF16, FP32, INT64 = 2, 4, 8  # bytes
MOMENTS_BYTES = 2 * FP32  # AdamW's
ZERO_BUCKET_BYTES = 500_000_000 * FP32  # DeepSpeed's default, in the dtype that gradients cross the ranks in
USABLE_SHARE = 0.95  # of what is free: fragments, and buffers of NCCL and cuBLAS, are in no estimate
GIB = 2**30


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the peak of a step, on each GPU."""

    target: int  # what is held of embedding, head and norm, frozen
    parameters: int  # as the optimizer or DeepSpeed keeps them, and the bf16 copies that a step multiplies with
    optimizer: int  # moments, and masters where they are apart
    gradients: int  # those that are there at the peak
    activations: int  # of one micro-batch, with its features and those of the next one

    @property
    def total(self) -> int:
        """The whole peak."""
        return self.target + self.parameters + self.optimizer + self.gradients + self.activations

    def __str__(self) -> str:
        parts = {
            "target": self.target,
            "parameters": self.parameters,
            "optimizer": self.optimizer,
            "gradients": self.gradients,
            "activations": self.activations,
        }
        named = ", ".join(f"{name} {num_bytes / GIB:.1f}" for name, num_bytes in parts.items())
        return f"{self.total / GIB:.1f} GiB ({named})"


@dataclass(frozen=True)
class MemoryPlan:
    """Estimates micro-batches of a run in bf16 with fp32 masters, and decides what of each is kept for the backward."""

    config: DrafterConfig
    setup: Setup
    ttt_steps: int
    target_bytes: int
    capacity: int  # bytes of a GPU that training may take
    has_average: bool = False  # of the weights, beside the moments
    copies_head: bool = True  # each micro-batch copies the drafted rows of the target's head

    def num_recomputed(self, num_tokens: int, num_rows: int) -> int:
        """Returns at how many of the first draft steps gate and up are made again: no more than has to be."""
        for number in range(self.ttt_steps):
            if self.estimate(num_tokens, num_rows, num_recomputed=number).total <= self.capacity:
                return number
        return self.ttt_steps

    def estimate(self, num_tokens: int, num_rows: int, *, num_recomputed: int = 0) -> MemoryEstimate:
        """Estimates a micro-batch of T tokens, at `num_rows` of which the drafter runs."""
        sizes = parameter_sizes(self.config)
        kept_bytes = MOMENTS_BYTES + (FP32 if self.has_average else 0)
        if self.setup.zero_stage is None:
            # Parameters are cast: all but the head for the whole of a step.
            parameters = FP32 * sizes.total + BF16 * (sizes.layer + sizes.fuse)
            optimizer = kept_bytes * sizes.total
            # DDP's buckets stay; one process has no gradients when a backward begins.
            kept_gradients = FP32 * sizes.total if self.setup.num_ranks > 1 else 0
            head_cast, head_gradient = BF16 * sizes.head, FP32 * sizes.head
        else:
            parameters = BF16 * (sizes.total + sizes.joined)
            optimizer = (FP32 + kept_bytes) * sizes.total // self.setup.num_ranks
            kept_gradients = ZERO_BUCKET_BYTES
            head_cast, head_gradient = 0, BF16 * sizes.head
        # While the head is scored its gradient is summed in fp32, and the target's drafted rows lie beside it where
        # they are copied; before they go, it is cast to what parameters are.
        target_rows = BF16 * sizes.head if self.copies_head else 0
        beside = head_cast + target_rows + BF16 * self.ttt_steps * num_rows * self.config.hidden_size
        final_cast = head_gradient if head_gradient < FP32 * sizes.head else 0
        # Of gradients and all else, as (bytes, bytes), the moment when both together are the most.
        peaks = [
            (FP32 * sizes.head, beside + self._chunk_bytes(num_rows)),
            (FP32 * sizes.head + final_cast, beside),
            (head_gradient + BF16 * sizes.layer, self._backward_bytes(num_rows, num_recomputed)),
        ]
        gradients, others = max(peaks, key=sum)
        return MemoryEstimate(
            target=self.target_bytes,
            parameters=parameters,
            optimizer=optimizer,
            gradients=kept_gradients + gradients,
            activations=self._kept_bytes(num_tokens, num_rows, num_recomputed) + others,
        )

    def _kept_bytes(self, num_tokens: int, num_rows: int, num_recomputed: int) -> int:
        """Returns what a forward keeps for the backward, features included."""
        config, steps = self.config, self.ttt_steps
        hidden, aux = config.hidden_size, config.num_aux * config.hidden_size
        queries = config.num_attention_heads * config.head_dim
        keys_values = 2 * config.num_key_value_heads * config.head_dim
        # Captured states of this micro-batch and the next one, and what norms make of this one's; fused ones; what
        # embeddings give; step-0 keys and values.
        per_token = (3 if config.fc_norm else 2) * aux + hidden + queries + 2 * keys_values
        # At each step: what the layer reads, its two sums, the head's gradient, queries, attention's output, own keys
        # and values; gate and up. The target's last states, of this micro-batch and the next one.
        per_row = steps * (4 * hidden + 2 * queries + keys_values) + 2 * hidden - keys_values
        per_row += (steps - num_recomputed) * 2 * config.intermediate_size
        per_row_and_step = FP32 * config.num_attention_heads + 4 * INT64  # log-sum-exp, and which rows there are
        return num_tokens * BF16 * per_token + num_rows * (BF16 * per_row + steps * per_row_and_step)

    def _chunk_bytes(self, num_rows: int) -> int:
        """Returns what one chunk of scores takes: its logits, its targets', and hidden states with their gradients."""
        width, hidden, steps = self.config.draft_vocab_size, self.config.hidden_size, self.ttt_steps
        chunk_rows = min(CHUNK_ELEMENTS["cuda"] // width, steps * num_rows)
        logits = chunk_rows * width
        return BF16 * (logits + logits // steps + 2 * chunk_rows * hidden)

    def _backward_bytes(self, num_rows: int, num_recomputed: int) -> int:
        """Returns what the last step's gated product takes besides, which comes first in the backward."""
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        # Only if all steps are made again is the last one among them; the others' time comes when there is room.
        again = 2 * inner + hidden if num_recomputed == self.ttt_steps else 0
        return BF16 * num_rows * (4 * inner + 2 * hidden + again)


def plan_memory(
    config: DrafterConfig,
    setup: Setup,
    target: TargetWeights,
    ttt_steps: int,
    device: torch.device,
    *,
    has_average: bool = False,
) -> MemoryPlan:
    """Plans for a GPU on which the target's weights are, and nothing else of ours that is not in the estimate."""
    num_free, _ = torch.cuda.mem_get_info(device)
    capacity = int(USABLE_SHARE * (num_free + torch.cuda.memory_reserved(device)))
    return plan_for(config, setup, target, ttt_steps, capacity, has_average=has_average)


def plan_for(
    config: DrafterConfig,
    setup: Setup,
    target: TargetWeights,
    ttt_steps: int,
    capacity: int,
    *,
    has_average: bool = False,
) -> MemoryPlan:
    """Plans for GPUs of which training may take `capacity` bytes, the `target`'s weights in their dtype there."""
    tensors = {id(tensor): tensor for tensor in (target.embed_tokens, target.lm_head, target.norm)}
    return MemoryPlan(
        config=config,
        setup=setup,
        ttt_steps=ttt_steps,
        target_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        has_average=has_average,
        copies_head=target.lm_head.shape[0] > config.draft_vocab_size or target.lm_head.dtype != torch.bfloat16,
        capacity=capacity,
    )


def log_plan(plan: MemoryPlan, num_tokens: int, supervised_share: float) -> None:
    """Logs what is expected of the largest micro-batch, with the store's share of supervised rows and with all rows."""
    for what, num_rows in (
        (f"{supervised_share:.0%} of them supervised, as in the store", round(num_tokens * supervised_share)),
        ("all of them supervised", num_tokens),
    ):
        again = plan.num_recomputed(num_tokens, num_rows)
        estimate = plan.estimate(num_tokens, num_rows, num_recomputed=again)
        logger.info(
            "memory of each GPU: %s of %.1f GiB for %d tokens at once, %s; %s",
            estimate,
            plan.capacity / GIB,
            num_tokens,
            what,
            f"gate and up of {again} of {counted(plan.ttt_steps, 'draft step')} made again"
            if again
            else "nothing is made again",
        )


@dataclass(frozen=True)
class ParameterSizes:
    """Parameters of the parts of a drafter."""

    layer: int  # with its norms
    joined: int  # of them, those that are copied side by side: what makes queries, keys and values; gate and up
    head: int
    fuse: int  # what comes before the layer

    @property
    def total(self) -> int:
        """All that are trained."""
        return self.layer + self.head + self.fuse


def parameter_sizes(config: DrafterConfig) -> ParameterSizes:
    """Counts the parameters of a drafter of these sizes, without making one."""
    hidden, queries = config.hidden_size, config.num_attention_heads * config.head_dim
    keys_values = 2 * config.num_key_value_heads * config.head_dim
    joined = 2 * hidden * (queries + keys_values) + 2 * hidden * config.intermediate_size
    return ParameterSizes(
        layer=joined + queries * hidden + hidden * config.intermediate_size + 4 * hidden,
        joined=joined,
        head=config.draft_vocab_size * hidden,
        fuse=config.num_aux * hidden * hidden + (config.num_aux * hidden if config.fc_norm else 0),
    )
