"""Deformable convolution of B maps with C channels, and multi-scale deformable attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
import torchvision  # noqa: F401 - registers torch.ops.torchvision
from torch import Tensor

from heads.toolkits.mmcv_operators.precision import upcast

Place = tuple[int, int, int, int, int, int, int, int]  # stride, padding, dilation: (H, W); groups


def deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    output: Tensor,
    columns: Tensor,
    ones: Tensor,
    **place: int,
) -> None:
    """Write the deformable convolution without modulation to ``output`` (B, C', h, w)."""
    output.copy_(_convolve(input, weight, offset, None, None, _plain_place(place)))


def deform_conv_backward_input(
    input: Tensor,
    offset: Tensor,
    gradOutput: Tensor,
    gradInput: Tensor,
    gradOffset: Tensor,
    weight: Tensor,
    columns: Tensor,
    **place: int,
) -> None:
    """Add the gradients of the maps and of the offsets."""
    grads = _gradients(gradOutput, input, weight, offset, None, None, _plain_place(place))
    gradInput += grads[0]
    gradOffset += grads[2]


def deform_conv_backward_parameters(
    input: Tensor,
    offset: Tensor,
    gradOutput: Tensor,
    gradWeight: Tensor,
    columns: Tensor,
    ones: Tensor,
    scale: float,
    **place: int,
) -> None:
    """Add the gradient of the weight times ``scale``; it is independent of the weight itself."""
    grads = _gradients(gradOutput, input, gradWeight, offset, None, None, _plain_place(place))
    gradWeight += scale * grads[1]


def modulated_deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    output: Tensor,
    columns: Tensor,
    with_bias: bool,
    **place: int,
) -> None:
    """Write the deformable convolution with a factor per sample to ``output`` (B, C', h, w)."""
    shift = bias if with_bias else None
    output.copy_(_convolve(input, weight, offset, mask, shift, _modulated_place(place)))


def modulated_deform_conv_backward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    columns: Tensor,
    grad_input: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    grad_offset: Tensor,
    grad_mask: Tensor,
    grad_output: Tensor,
    with_bias: bool,
    **place: int,
) -> None:
    """Add all gradients."""
    shift = bias if with_bias else None
    grads = _gradients(grad_output, input, weight, offset, mask, shift, _modulated_place(place))
    sums = [grad_input, grad_weight, grad_offset, grad_mask, *([grad_bias] if with_bias else [])]
    for total, grad in zip(sums, grads, strict=False):
        total += grad


def _plain_place(sizes: Mapping[str, int]) -> Place:
    names = ("dH", "dW", "padH", "padW", "dilationH", "dilationW", "group", "deformable_group")
    return cast(Place, tuple(sizes[name] for name in names))


def _modulated_place(sizes: Mapping[str, int]) -> Place:
    sides = [f"{name}_{axis}" for name in ("stride", "pad", "dilation") for axis in "hw"]
    return cast(Place, tuple(sizes[name] for name in (*sides, "group", "deformable_group")))


def _convolve(
    maps: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    place: Place,
) -> Tensor:
    tensors = _convolution_inputs(maps, weight, offset, mask, bias)
    return torch.ops.torchvision.deform_conv2d(*tensors, *place, mask is not None)


def _gradients(
    grad: Tensor,
    maps: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    place: Place,
) -> tuple[Tensor, ...]:
    """Return the gradients of maps, weight, offsets, mask and bias."""
    tensors = _convolution_inputs(maps, weight, offset, mask, bias)
    backward = torch.ops.torchvision._deform_conv2d_backward
    return backward(upcast(grad), *tensors, *place, mask is not None)


def _convolution_inputs(
    maps: Tensor, weight: Tensor, offset: Tensor, mask: Tensor | None, bias: Tensor | None
) -> list[Tensor]:
    """Return the inputs of torchvision's operator, which always needs a mask and a bias."""
    mask = maps.new_zeros(len(maps), 1) if mask is None else mask
    bias = maps.new_zeros(len(weight)) if bias is None else bias
    return [upcast(tensor) for tensor in (maps, weight, offset, mask, bias)]


def ms_deform_attn_forward(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    im2col_step: int,
) -> Tensor:
    """Return multi-scale deformable attention, by mmcv's own version for any device."""
    from mmcv.ops.multi_scale_deform_attn import multi_scale_deformable_attn_pytorch

    return multi_scale_deformable_attn_pytorch(
        value, value_spatial_shapes, sampling_locations, attention_weights
    )


def ms_deform_attn_backward(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    grad_output: Tensor,
    grad_value: Tensor,
    grad_sampling_loc: Tensor,
    grad_attn_weight: Tensor,
    im2col_step: int,
) -> None:
    """Add the gradients of values, positions and weights, after repeating the forward pass."""
    inputs = value, sampling_locations, attention_weights
    values, places, weights = (tensor.detach().requires_grad_() for tensor in inputs)
    with torch.enable_grad():
        output = ms_deform_attn_forward(
            values, value_spatial_shapes, value_level_start_index, places, weights, im2col_step
        )
    grads = torch.autograd.grad(output, (values, places, weights), grad_output)
    for total, grad in zip((grad_value, grad_sampling_loc, grad_attn_weight), grads, strict=True):
        total += grad
