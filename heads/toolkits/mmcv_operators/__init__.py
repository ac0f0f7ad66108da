"""mmcv's operators on torchvision's, in place of ``mmcv._ext`` in an uncompiled mmcv.

Names, arguments and results match the calls in mmcv's Python code; most operators write into given
tensors. They run on every device of torchvision's, in float32 and float64; other precisions are
computed in float32. The operators cover the heads of MMDetection and MMSegmentation; any other
raises an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from heads.toolkits.mmcv_operators.deformable import (
    deform_conv_backward_input,
    deform_conv_backward_parameters,
    deform_conv_forward,
    modulated_deform_conv_backward,
    modulated_deform_conv_forward,
    ms_deform_attn_backward,
    ms_deform_attn_forward,
)
from heads.toolkits.mmcv_operators.focal import (
    sigmoid_focal_loss_backward,
    sigmoid_focal_loss_forward,
    softmax_focal_loss_backward,
    softmax_focal_loss_forward,
)
from heads.toolkits.mmcv_operators.precision import COMPILE
from heads.toolkits.mmcv_operators.regions import roi_align_backward, roi_align_forward
from heads.toolkits.mmcv_operators.suppression import nms, nms_match, softnms

__all__ = [
    "deform_conv_backward_input",
    "deform_conv_backward_parameters",
    "deform_conv_forward",
    "get_compiler_version",
    "get_compiling_cuda_version",
    "modulated_deform_conv_backward",
    "modulated_deform_conv_forward",
    "ms_deform_attn_backward",
    "ms_deform_attn_forward",
    "nms",
    "nms_match",
    "roi_align_backward",
    "roi_align_forward",
    "sigmoid_focal_loss_backward",
    "sigmoid_focal_loss_forward",
    "softmax_focal_loss_backward",
    "softmax_focal_loss_forward",
    "softnms",
]


def __getattr__(name: str) -> Callable[..., Any]:
    """Return a stand-in for any other operator, which raises an error when called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def raise_missing(*arguments: object, **options: object) -> None:
        raise ValueError(
            f"mmcv's operator {name} is missing, as torchvision lacks it; compile mmcv with a C++ "
            f"compiler (and nvcc for CUDA): {COMPILE}"
        )

    return raise_missing


def get_compiler_version() -> str:
    """Return the compiler of the operators, for the toolkits' reports on the environment."""
    return "torchvision's, not compiled"


def get_compiling_cuda_version() -> str:
    """Return the CUDA version of torch, for the toolkits' reports on the environment."""
    return torch.version.cuda or "not available"
