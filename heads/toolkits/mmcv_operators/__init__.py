"""mmcv's operators by torchvision's: what ``mmcv._ext`` is where mmcv was not compiled.

Names, arguments and results are those that the Python part of mmcv calls; most operators write into
tensors that they are given. They run on every device that torchvision's run on, in float32 and
float64; other precisions are computed in float32. Served is what MMDetection's and MMSegmentation's
heads need; any other operator is refused by name.
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
    """Any other operator of mmcv: it can be imported, and says what is missing when called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*arguments: object, **options: object) -> None:
        raise ValueError(
            f"mmcv's operator {name} is not among those that torchvision serves here; compile "
            f"mmcv with a C++ compiler (and nvcc for CUDA) at hand: {COMPILE}"
        )

    return refuse


def get_compiler_version() -> str:
    """The compiler of the operators, as the toolkits' reports on an environment show it."""
    return "torchvision's, not compiled"


def get_compiling_cuda_version() -> str:
    """CUDA's version that torch was built with, shown by the toolkits' reports as well."""
    return torch.version.cuda or "not available"
