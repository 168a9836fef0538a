"""Lets torchvision from PyPI, built for CUDA, import beside a CPU build of torch; SGLang imports it.

Its compiled library does not load there, and its Python code then misses the ops' declarations: they are made when
torchvision is first looked for. A .pth file imports this module in every process of the environment.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

SIZES = "float spatial_scale, SymInt pooled_height, SymInt pooled_width"
INPUT_SIZES = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
DEFORMED = (
    "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, SymInt stride_w, "
    "SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, SymInt offset_groups, "
    "bool use_mask"
)
SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align(Tensor input, Tensor rois, {SIZES}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward(Tensor grad, Tensor rois, {SIZES}, {INPUT_SIZES}, int sampling_ratio, bool aligned)"
    " -> Tensor",
    f"ps_roi_align(Tensor input, Tensor rois, {SIZES}, int sampling_ratio) -> (Tensor, Tensor)",
    f"_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor mapping, {SIZES}, int sampling_ratio, {INPUT_SIZES})"
    " -> Tensor",
    f"roi_pool(Tensor input, Tensor rois, {SIZES}) -> (Tensor, Tensor)",
    f"_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, {SIZES}, {INPUT_SIZES}) -> Tensor",
    f"ps_roi_pool(Tensor input, Tensor rois, {SIZES}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor mapping, {SIZES}, {INPUT_SIZES}) -> Tensor",
    f"deform_conv2d({DEFORMED}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, {DEFORMED}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "_interpolate_bilinear2d_aa(Tensor input, SymInt[] output_size, bool align_corners) -> Tensor",
)


class Preparer(importlib.abc.MetaPathFinder):
    """Finds nothing; acts before torchvision and SGLang are imported."""

    def __init__(self) -> None:
        self._library: Any = None  # declarations live as long as it does

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision" and self._library is None:
            import torch  # too much for processes that import no torchvision

            if torch.version.cuda is None:  # beside a CUDA build the library loads and declares its ops itself
                self._library = torch.library.Library("torchvision", "DEF")
                for schema in SCHEMAS:
                    self._library.define(schema)
        if name == "sglang" and os.environ.get("EAGLE3_CPU_KERNELS") == "1":
            import torch

            # The ops of sgl_kernel/kernels.py stand for AMX kernels and run on any CPU.
            torch.cpu._is_amx_tile_supported = lambda: True
        return None


sys.meta_path.insert(0, Preparer())
