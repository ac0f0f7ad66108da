"""How much each pixel counts for a class, by Captum.

    saliency               |d logit / d x|
    smoothgrad             the mean of it over images with noise
    input_x_gradient       x d logit / d x
    integrated_gradients   (x - b) times the mean of d logit / d x on the straight way from b to x
    gradient_shap          the same in expectation, at random places of the way, with noise
    occlusion              how much the logit falls when a window is covered by b

b is the image whose every pixel has the mean colour of the normalisation, 0 as the network sees it.
Integrated gradients are complete: they sum to the logit of x minus that of b.

Source: Simonyan et al., 2013, https://arxiv.org/abs/1312.6034; Smilkov et al., "SmoothGrad", 2017,
https://arxiv.org/abs/1706.03825, Sec. 2.2 and 3.2 (noise of 10 to 20 % of the range); Sundararajan
et al., ICML 2017, https://arxiv.org/abs/1703.01365, Eq. 1 and Sec. 3; Lundberg and Lee, NeurIPS
2017, https://arxiv.org/abs/1705.07874; Zeiler and Fergus, ECCV 2014,
https://arxiv.org/abs/1311.2901, Sec. 4.2.

Axes: B images, (H, W) their size.
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
COMPLETE = ("integrated_gradients", "gradient_shap")  # the latter over many steps
AT_ONCE = 16  # images that go through the network together
NOISE = 0.15  # deviation, of the range of an image


def attributions(
    model: Callable[[Tensor], Tensor],
    images: Tensor,
    classes: Tensor,
    *,
    method: Method = "integrated_gradients",
    steps: int = 50,
    window: int = 0,
) -> Tensor:
    """What each pixel counts for a class, summed over the colours: (B, H, W).

    Args:
        model: Images to logits (B, K), in evaluation mode.
        images: (B, 3, H, W), normalised.
        classes: (B,).
        method: One of ``METHODS``.
        steps: Images on the way from b, or with noise, for each of them.
        window: Side of what is covered, in pixels, moved by half of it; 0 is an eighth of the
            shorter side of the images.

    Raises:
        ValueError: Captum is not installed, an unknown method, or a window that is larger than the
            images.
    """
    check_value("method", method, Method)
    if importlib.util.find_spec("captum") is None:
        raise ValueError(
            "attributions need the package captum: pip install -c constraints.txt -e "
            "'.[attributions]'"
        )
    images, classes = images.detach(), classes.to(images.device)
    if method == "occlusion":
        return _occlusion(model, images, classes, window)
    found = []
    with restored_generators(), torch.enable_grad():
        for i in range(len(images)):
            seed_generators([0, 0, 0])  # an image has the noise that it has alone
            one = slice(i, i + 1)
            found.append(_by_gradients(model, images[one], classes[one], method, steps))
    return torch.cat(found).detach().sum(1)


def _by_gradients(
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


def _occlusion(
    model: Callable[[Tensor], Tensor], images: Tensor, classes: Tensor, window: int
) -> Tensor:
    from captum.attr import Occlusion

    channels, height, width = images.shape[1:]
    side = window or max(1, min(height, width) // 8)
    if side > min(height, width):
        raise ValueError(
            f"window={side} is larger than the images of {height}x{width} pixels; choose one below"
        )
    step = max(1, side // 2)
    options: dict[str, Any] = {"sliding_window_shapes": (channels, side, side)}
    found: Tensor = Occlusion(model).attribute(
        images, target=classes, strides=(channels, step, step), baselines=0, **options
    )
    return found[:, 0]  # the colours are covered together, and each has the whole of it
