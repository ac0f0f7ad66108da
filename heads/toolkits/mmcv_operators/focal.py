"""Focal losses of N rows with C classes, and their derivatives.

Source: Focal Loss for Dense Object Detection, ICCV 2017, Eq. 5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.toolkits.mmcv_operators.precision import upcast

SMALLEST = torch.finfo(torch.float32).tiny  # smallest argument of the logarithm


def sigmoid_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    """Write the focal loss per logit (N, C) to ``output``; the label C is the background."""
    chance, is_target, share = _focal_parts(input, target, weight, alpha)
    surprise = torch.where(is_target, 1 - chance, chance).pow(gamma)
    output.copy_(
        -share * surprise * torch.where(is_target, chance, 1 - chance).clamp(SMALLEST).log()
    )


def sigmoid_focal_loss_backward(
    input: Tensor, target: Tensor, weight: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> None:
    """Write the derivative of each loss by its logit to ``grad_input`` (N, C)."""
    chance, is_target, share = _focal_parts(input, target, weight, alpha)
    right = torch.where(is_target, chance, 1 - chance)
    slope = (1 - right).pow(gamma) * (1 - right - gamma * right * right.clamp(SMALLEST).log())
    grad_input.copy_(share * slope * torch.where(is_target, -1.0, 1.0))


def _focal_parts(
    logits: Tensor, target: Tensor, weight: Tensor, alpha: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return probabilities, a mask of the labels' entries, and loss weights."""
    is_target = target[:, None] == torch.arange(logits.shape[1], device=logits.device)
    share = torch.where(is_target, alpha, 1 - alpha)
    if weight.numel():  # one per class; the background has weight 1
        share = share * torch.cat([weight, weight.new_ones(1)])[target][:, None]
    return upcast(logits).sigmoid(), is_target, share


def softmax_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    """Write the focal loss per row of probabilities (N, C) to ``output``; 0 for labels below 0."""
    chance, share = _own_chance(input, target, weight, alpha)
    output.copy_(-share * (1 - chance).pow(gamma) * chance.clamp(SMALLEST).log())


def softmax_focal_loss_backward(
    input: Tensor,
    target: Tensor,
    weight: Tensor,
    buff: Tensor,
    grad_input: Tensor,
    gamma: float,
    alpha: float,
) -> None:
    """Write the derivative of each row's loss by its logits to ``grad_input`` (N, C)."""
    chance, share = _own_chance(input, target, weight, alpha)
    rest = 1 - chance
    slope = gamma * rest.pow(gamma - 1) * chance * chance.clamp(SMALLEST).log() - rest.pow(gamma)
    is_target = target[:, None] == torch.arange(input.shape[1], device=input.device)
    grad_input.copy_((share * slope)[:, None] * (is_target.to(chance) - upcast(input)))


def _own_chance(
    chances: Tensor, target: Tensor, weight: Tensor, alpha: float
) -> tuple[Tensor, Tensor]:
    """Return the probability of each row's label, and the row's loss weight."""
    label = target.clamp(min=0)
    share = alpha * (target >= 0)
    return upcast(chances).gather(1, label[:, None])[:, 0], (
        share * weight[label] if weight.numel() else share
    )
