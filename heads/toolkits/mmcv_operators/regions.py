"""RoIAlign: pools C channels of B maps in R regions."""

from __future__ import annotations

import torch
import torchvision  # noqa: F401 - registers torch.ops.torchvision
from torch import Tensor

from heads.toolkits.mmcv_operators.precision import COMPILE, upcast


def roi_align_forward(
    input: Tensor,
    rois: Tensor,
    output: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """Write the mean of samples per bin of regions (R, 5) of maps (B, C, H, W): (R, C, h, w).

    Raises:
        ValueError: Another pooling than the mean, which the toolkits' configs leave unused.
    """
    if pool_mode != 1:
        raise ValueError(
            "RoIAlign with pool_mode=max is missing, as torchvision lacks it; "
            f"use pool_mode=avg, or compile mmcv: {COMPILE}"
        )
    maps = upcast(input)
    place = (spatial_scale, aligned_height, aligned_width, sampling_ratio, aligned)
    output.copy_(torch.ops.torchvision.roi_align(maps, rois.to(maps), *place))


def roi_align_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    grad_input: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """Add the gradient of the maps to ``grad_input`` (B, C, H, W)."""
    grad = upcast(grad_output)
    place = (spatial_scale, aligned_height, aligned_width, *grad_input.shape)
    backward = torch.ops.torchvision._roi_align_backward
    grad_input += backward(grad, rois.to(grad), *place, sampling_ratio, aligned)
