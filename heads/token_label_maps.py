"""Token labels of training images, cropped from the label maps that an annotator made.

Axes: B images, T classes per position of a label map, K classes, h w positions of a map.

Source: Jiang et al., "All Tokens Matter: Token Labeling for Training Better Vision Transformers",
NeurIPS 2021, https://arxiv.org/abs/2104.10858; Yun et al., "Re-labeling ImageNet", CVPR 2021,
https://arxiv.org/abs/2101.05022 (how a crop is cut out).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.ops import roi_align


def token_labels(
    scores: Tensor, classes: Tensor, boxes: Tensor, num_classes: int, size: tuple[int, int]
) -> Tensor:
    """Return the shares of the classes in the whole crop and in each of its tokens.

    Classes that a position lacks score 0. The scores after RoIAlign pass a softmax over all
    classes.

    Args:
        scores: (B, T, h, w), before any softmax.
        classes: (B, T, h, w), the classes of these scores.
        boxes: (B, 4), left, top, right and bottom of the crop as shares of the image.
        num_classes: Number of classes K.
        size: Tokens (H, W).

    Returns:
        (B, K, 1 + H * W).
    """
    count, _, height, width = scores.shape
    maps = scores.new_zeros(count, num_classes, height, width).scatter_(1, classes, scores)
    # Coordinates start at the centre of the first position, as in the authors' code.
    corners = boxes * boxes.new_tensor([width, height, width, height]) - 0.5
    rois = torch.cat([torch.arange(count).to(corners)[:, None], corners], dim=1)
    image_share = roi_align(maps, rois, (1, 1)).flatten(2)
    token_shares = roi_align(maps, rois, size).flatten(2)
    return torch.cat([image_share, token_shares], dim=2).softmax(dim=1)
