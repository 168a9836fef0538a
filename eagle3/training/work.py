"""The arithmetic of a step, and the share of what its GPUs could do."""

from collections.abc import Sequence

from eagle3.draft.model import DrafterConfig

# Dense bf16 FLOP/s by a part of the GPU's name; NVIDIA's data sheets, of the SXM boards.
LIMITS = {"H200": 989e12, "H100 80GB HBM3": 989e12, "A100-SXM": 312e12, "B200": 2250e12}


def limit_of(gpu_name: str) -> float | None:
    """Returns the FLOP/s that a GPU's data sheet promises; None for one that is not in the table."""
    return next((limit for part, limit in LIMITS.items() if part in gpu_name), None)


def step_flops(
    config: DrafterConfig,
    num_tokens: int,
    num_rows: Sequence[float],  # (K,) at each draft step
    num_attended: float,  # keys that rows see, added up over rows and draft steps
) -> float:
    """Returns the FLOPs of forward and backward: a multiplication and an addition are two.

    What is made again to save memory does not count, nor does what no result needs: of tokens without a row keys and
    values alone, of frozen matrices no gradient.
    """
    hidden, queries = config.hidden_size, config.num_attention_heads * config.head_dim
    keys_values = 2 * config.num_key_value_heads * config.head_dim
    fuse = 4 * config.num_aux * hidden**2  # the captured states get no gradient
    token = fuse + 6 * hidden * (queries + keys_values) + 6 * hidden * keys_values  # embeddings' part, step-0 keys
    layer = 6 * (queries * hidden + 3 * hidden * config.intermediate_size)
    head = 6 * hidden * config.draft_vocab_size
    row = layer + head + 6 * hidden * (queries + keys_values)
    first, later = num_rows[0], sum(num_rows[1:])
    target_logits = 2 * hidden * config.draft_vocab_size * first  # about: made once for all rows that share them
    own = num_tokens * token + first * (row - 6 * hidden * keys_values) + later * row + target_logits
    return own + 14 * queries * num_attended  # two products forward, five backward
