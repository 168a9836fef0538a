"""The target as a model of transformers, all of it, on its device."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from eagle3.config import TargetConfig, UserError
from eagle3.draft.target_weights import missing_weights
from eagle3.words import one_line


def load_whole_target(target: TargetConfig, *, advice: str) -> Any:
    """Loads the target from its directory.

    Raises:
        UserError: transformers cannot load it, and `advice` says what else there is to do; or there is no such device.
    """
    device = target.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("target.device must be a device of this machine, got 'cuda' without a GPU; use auto or cpu")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            target.path,
            dtype=getattr(torch, target.dtype),
            trust_remote_code=target.trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers, safetensors and a model's own code raise whatever they like
        raise UserError(
            f"target.path must be a model that transformers loads, got {target.path!r} ({one_line(error)}); "
            f"complete the directory, or {advice}"
        ) from error
    model, loading = loaded
    if loading["missing_keys"]:
        raise UserError(missing_weights(loading["missing_keys"], target.path))
    return model.to(device)
