"""Linear attention, which no model here has: names that SGLang imports."""

from typing import Any, NoReturn


def causal_conv1d_fn_cpu(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError("causal_conv1d_fn_cpu: linear attention needs the real sgl_kernel")


def causal_conv1d_update_cpu(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError("causal_conv1d_update_cpu: linear attention needs the real sgl_kernel")


def chunk_gated_delta_rule_cpu(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError("chunk_gated_delta_rule_cpu: linear attention needs the real sgl_kernel")
