"""Class activation maps: locations in an image with evidence for a class.

With a layer's map A (C, h, w) and the gradients G of a score in it, the map is sum_c w_c A_c or:

    gradcam     w_c = mean of G_c;  the positive part of the sum
    gradcam++   w_c = sum of alpha_c relu(G_c),  alpha = G^2 / (2 G^2 + G^3 sum A)
    xgradcam    w_c = sum of G_c A_c / sum of A_c
    hirescam    sum_c G_c A_c, position by position
    layercam    sum_c relu(G_c) A_c
    eigencam    the first principal component of A over its positions, equal for all classes

Source: Selvaraju et al., "Grad-CAM", ICCV 2017, https://arxiv.org/abs/1610.02391, Eq. 1 and 2;
Chattopadhay et al., "Grad-CAM++", WACV 2018, https://arxiv.org/abs/1710.11063, Eq. 10 and 19; Fu et
al., "XGrad-CAM", BMVC 2020, https://arxiv.org/abs/2008.02312, Eq. 8; Draelos and Carin, "HiResCAM",
2020, https://arxiv.org/abs/2011.08891; Jiang et al., "LayerCAM", TIP 2021; Muhammad and Yeasin,
"Eigen-CAM", IJCNN 2020, https://arxiv.org/abs/2008.00299. AFBO shows Grad-CAM (Fig. 3, 4).

Axes: B images, C channels, (h, w) the layer's map.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from backbones.analysis.capturing import choose_blocks, evaluating, watch
from backbones.base import Backbone
from backbones.options import check_value

Method = Literal["gradcam", "gradcam++", "xgradcam", "hirescam", "layercam", "eigencam"]
METHODS: tuple[str, ...] = get_args(Method)
TINY = 1e-12


def class_activation(
    model: Callable[[Tensor], Tensor],
    backbone: Backbone,
    images: Tensor,
    classes: Tensor | None = None,
    *,
    block: str = "-1",
    method: Method = "gradcam",
) -> tuple[Tensor, Tensor]:
    """Return class activation maps at any block.

    The host chooses the layer of a block and converts its output to a map.

    Args:
        model: Function from images to scores (B, K) that contains ``backbone``.
        backbone: Backbone of any host.
        images: (B, 3, H, W).
        classes: (B,) the class of each image; None for the class of the greatest score.
        block: See ``choose_blocks``.
        method: One of ``METHODS``.

    Returns:
        Maps (B, h, w), non-negative and unscaled, and the classes (B,).

    Raises:
        ValueError: Unknown block, method or class, or a layer without influence on the score.
    """
    check_value("method", method, Method)
    (name,) = choose_blocks(backbone, [block])
    layer = backbone.cam_layer(name)
    images = images.detach().clone().requires_grad_()
    network = model if isinstance(model, nn.Module) else backbone
    with evaluating(network), torch.enable_grad(), watch(backbone, [name, layer]) as calls:
        scores = model(images)
        tensor = backbone.block_tensor(calls[layer][0].output)
        inputs = calls[name][0].inputs
        if classes is None:
            classes = scores.argmax(1)
        if int(classes.max()) >= scores.shape[1] or int(classes.min()) < 0:
            raise ValueError(
                f"the network has classes 0 to {scores.shape[1] - 1}, got {classes.tolist()}"
            )
        score = scores.gather(1, classes[:, None].to(scores.device)).sum()
        gradient = None
        if score.requires_grad:
            (gradient,) = torch.autograd.grad(score, tensor, allow_unused=True)
    if gradient is None:
        raise ValueError(f"the score does not depend on the output of {layer} of {backbone.name}")
    features, gradients = (
        backbone.block_map(part.detach(), *inputs).double() for part in (tensor, gradient)
    )
    return weighted(features, gradients, method), classes


def weighted(features: Tensor, gradients: Tensor, method: Method) -> Tensor:
    """Return the positive part of the weighted sum over channels: (B, C, h, w) -> (B, h, w)."""
    if method == "eigencam":
        return _first_component(features)
    if method == "hirescam":
        summed = (gradients * features).sum(1)
    elif method == "layercam":
        summed = (gradients.relu() * features).sum(1)
    else:
        summed = (_weights(features, gradients, method)[:, :, None, None] * features).sum(1)
    return summed.relu()


def _weights(features: Tensor, gradients: Tensor, method: Method) -> Tensor:
    """Return the weights (B, C) of the channels."""
    if method == "gradcam":
        return gradients.mean((2, 3))
    total = features.sum((2, 3))
    if method == "xgradcam":
        return (gradients * features).sum((2, 3)) / (total + TINY)
    square = gradients.square()
    below = 2 * square + total[:, :, None, None] * gradients * square
    alpha = torch.where(gradients != 0, square / (below + TINY), torch.zeros_like(square))
    return (alpha * gradients.relu()).sum((2, 3))


def _first_component(features: Tensor) -> Tensor:
    """Project each position on the first principal axis of the channels: (B, h, w).

    The free sign is chosen so that the larger part is positive.
    """
    positions = features.flatten(2).transpose(1, 2)  # (B, h w, C)
    centred = positions - positions.mean(1, keepdim=True)
    axis = torch.linalg.svd(centred, full_matrices=False)[2][:, 0]
    projected = (centred @ axis[:, :, None]).squeeze(-1)
    sign = torch.where(projected.relu().sum(1) >= (-projected).relu().sum(1), 1.0, -1.0)
    return (projected * sign[:, None]).relu().unflatten(1, features.shape[2:])
