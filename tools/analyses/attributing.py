"""Contribution of each pixel to a class score, computed by Captum.

    saliency               |d logit / d x|
    smoothgrad             its mean over images with noise
    input_x_gradient       x d logit / d x
    integrated_gradients   (x - b) times the mean of d logit / d x on the straight line from b to x
    gradient_shap          its expectation at random points of the line, with noise
    occlusion              the drop of the logit when b covers a window

The baseline b is an image of the normalisation's mean colour, which the network sees as 0.
Integrated gradients are complete: they sum to the logit of x minus that of b.

Source: Simonyan et al., 2013, https://arxiv.org/abs/1312.6034; Smilkov et al., "SmoothGrad", 2017,
https://arxiv.org/abs/1706.03825, Sec. 2.2 and 3.2 (noise of 10 to 20 % of the range); Sundararajan
et al., ICML 2017, https://arxiv.org/abs/1703.01365, Eq. 1 and Sec. 3; Lundberg and Lee, NeurIPS
2017, https://arxiv.org/abs/1705.07874; Zeiler and Fergus, ECCV 2014,
https://arxiv.org/abs/1311.2901, Sec. 4.2.

Axes: B images of size (H, W).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from backbones.options import check_value
from datamodules.loading.sampling import restored_generators, seed_generators

Method = Literal[
    "integrated_gradients", "gradient_shap", "input_x_gradient", "saliency", "smoothgrad",
    "occlusion",
]  # fmt: skip
METHODS: tuple[str, ...] = get_args(Method)
SIGNED = ("integrated_gradients", "gradient_shap", "input_x_gradient", "occlusion")
COMPLETE = ("integrated_gradients", "gradient_shap")  # the latter for many steps
AT_ONCE = 16  # images per forward pass
NOISE = 0.15  # standard deviation, relative to the range of an image


def attributions(
    model: Callable[[Tensor], Tensor],
    images: Tensor,
    classes: Tensor,
    *,
    method: Method = "integrated_gradients",
    steps: int = 50,
    window: int = 0,
) -> Tensor:
    """Return the contribution of each pixel to a class, summed over the colours: (B, H, W).

    Args:
        model: Images to logits (B, K), in evaluation mode.
        images: (B, 3, H, W), normalised.
        classes: (B,).
        method: One of ``METHODS``.
        steps: Number of images on the line from b, or with noise, per image.
        window: Side of the covered window in pixels, moved by half of it; 0 is an eighth of the
            images' shorter side.

    Raises:
        ValueError: Captum is not installed, the method is unknown, or the window exceeds the
            images.
    """
    check_value("method", method, Method)
    if importlib.util.find_spec("captum") is None:
        raise ValueError(
            'attributions need the package captum: pip install "mixerlab[attributions]"'
        )
    images, classes = images.detach(), classes.to(images.device)
    if method == "occlusion":
        return _compute_occlusion(model, images, classes, window)
    maps = []
    with restored_generators(), torch.enable_grad():
        for i in range(len(images)):
            seed_generators([0, 0, 0])  # the noise of an image is independent of the batch
            place = slice(i, i + 1)
            maps.append(_compute_gradients(model, images[place], classes[place], method, steps))
    return torch.cat(maps).detach().sum(1)


def _compute_gradients(
    model: Callable[[Tensor], Tensor], image: Tensor, label: Tensor, method: Method, steps: int
) -> Tensor:
    from captum import attr

    if method == "integrated_gradients":
        return attr.IntegratedGradients(model).attribute(
            image, target=label, n_steps=steps, internal_batch_size=AT_ONCE
        )
    if method == "input_x_gradient":
        return attr.InputXGradient(model).attribute(image.requires_grad_(), target=label)
    if method == "saliency":
        return attr.Saliency(model).attribute(image.requires_grad_(), target=label)
    noise = NOISE * float(image.max() - image.min())
    if method == "smoothgrad":
        return attr.NoiseTunnel(attr.Saliency(model)).attribute(
            image, nt_type="smoothgrad", nt_samples=steps, nt_samples_batch_size=AT_ONCE,
            stdevs=noise, target=label,
        )  # fmt: skip
    return attr.GradientShap(model).attribute(
        image, baselines=torch.zeros_like(image), n_samples=steps, stdevs=noise, target=label
    )


def _compute_occlusion(
    model: Callable[[Tensor], Tensor], images: Tensor, classes: Tensor, window: int
) -> Tensor:
    from captum.attr import Occlusion

    channels, height, width = images.shape[1:]
    side = window or max(1, min(height, width) // 8)
    if side > min(height, width):
        raise ValueError(
            f"window={side} is larger than the images ({height}x{width}); pass a smaller one"
        )
    step = max(1, side // 2)
    options: dict[str, Any] = {"sliding_window_shapes": (channels, side, side)}
    drops: Tensor = Occlusion(model).attribute(
        images, target=classes, strides=(channels, step, step), baselines=0, **options
    )
    return drops[:, 0]  # the colours are covered together, so each channel has the full drop
