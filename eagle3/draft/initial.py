"""A new drafter: the target's sizes, head and norm.

A draft head need not look like a layer of its target: what a target of another kind (MLA, multimodal or partial RoPE)
has no counterpart for in a Llama layer is left out here, and not further on.
"""

from collections.abc import Sequence
from typing import Any

import torch

from eagle3.config import DraftConfig, UserError
from eagle3.draft.draft_vocab import DraftVocab
from eagle3.draft.model import DrafterConfig, Eagle3Drafter
from eagle3.draft.target_weights import TargetWeights, check_capture_layers, rms_norm_eps, rope_parameters

# Multimodal sections, MLA's own temperature of YaRN (which engine versions read differently), partial rotation.
ROPE_KEYS_LEFT_OUT = ("mrope_section", "mrope_interleaved", "mscale", "mscale_all_dim", "partial_rotary_factor")


def drafter_config_from_target(
    target_config: dict[str, Any], draft: DraftConfig, capture_layers: Sequence[int]
) -> DrafterConfig:
    """Returns the sizes of a drafter for a target: those of `draft`, and the target's where it leaves them null.

    `target_config` is what `load_target_config` returns.

    Raises:
        UserError: a size is neither given nor the target's, or the sizes do not fit each other or the target.
    """
    check_capture_layers(capture_layers, target_config["num_hidden_layers"])
    rope = {key: value for key, value in rope_parameters(target_config).items() if key not in ROPE_KEYS_LEFT_OUT}
    if rope["rope_type"] == "mrope":  # the older name for sections over plain RoPE
        rope["rope_type"] = "default"
    num_heads = target_config["num_attention_heads"]
    intermediate_size = draft.intermediate_size or target_config.get("intermediate_size")
    head_dim = draft.head_dim or _target_head_dim(target_config)
    if intermediate_size is None or head_dim is None:
        sizes = {"draft.intermediate_size": intermediate_size, "draft.head_dim": head_dim}
        raise UserError(
            f"{' and '.join(name for name, size in sizes.items() if size is None)} must be given for a target whose "
            f"config.json does not say it, got null; set a size"
        )
    return DrafterConfig(
        hidden_size=target_config["hidden_size"],
        intermediate_size=intermediate_size,
        num_attention_heads=draft.num_attention_heads or num_heads,
        num_key_value_heads=draft.num_key_value_heads or target_config.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        vocab_size=target_config["vocab_size"],
        draft_vocab_size=draft.draft_vocab_size,
        capture_layers=tuple(capture_layers),
        rms_norm_eps=rms_norm_eps(target_config),
        max_position_embeddings=target_config["max_position_embeddings"],
        rope_parameters=rope,
        num_aux=len(capture_layers),
        fc_norm=draft.fc_norm,
        norm_output=draft.norm_output,
    )


@torch.no_grad()
def init_drafter(
    drafter: Eagle3Drafter, target: TargetWeights, draft_vocab: DraftVocab, *, seed: int, init_from_target: bool
) -> None:
    """Sets every weight and buffer of a drafter, in place; the same numbers on every device.

    Matrices are uniform within 1 / sqrt(columns), norms are 1. With `init_from_target` the head starts as the target's
    rows of the drafted tokens, and the final norm as the target's: the drafter then knows words before it knows any
    context.

    Raises:
        UserError: the draft vocabulary is of another number of target tokens, as the manifest of its store may say.

    Source of the scale: torch's nn.Linear, with which EAGLE's own code trains (eagle/model/cnets.py).
    """
    if draft_vocab.t2d.numel() != drafter.config.vocab_size:
        raise UserError(
            f"a store's vocab_size must be the target's {drafter.config.vocab_size}, got {draft_vocab.t2d.numel()}; "
            f"restore its manifest.json from a copy"
        )
    drafter.set_draft_vocab(draft_vocab.d2t, draft_vocab.t2d)
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1)
        else:
            bound = parameter.shape[1] ** -0.5
            parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))
    if init_from_target:
        drafter.init_from_target(target.lm_head, target.norm)


def _target_head_dim(target_config: dict[str, Any]) -> int | None:
    if target_config.get("kv_lora_rank"):  # MLA: its head_dim, where there is one, is the rotated part alone
        return target_config.get("v_head_dim")
    if head_dim := target_config.get("head_dim"):
        return int(head_dim)
    head_dim, rest = divmod(target_config["hidden_size"], target_config["num_attention_heads"])
    return None if rest else head_dim
