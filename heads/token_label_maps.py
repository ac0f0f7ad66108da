"""Labels of the tokens of a training image, cut out of the label map that an annotator made of it.

Axes: B images, T classes that a label map keeps of each place, K classes, h w places of a map.

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
    """Shares of the classes in the whole crop, and in each of its tokens.

    Scores of classes that a place does not keep count as 0; what RoIAlign makes of all goes through
    a softmax over the classes.

    Args:
        scores: (B, T, h, w), before any softmax.
        classes: (B, T, h, w), whose scores these are.
        boxes: (B, 4), left, top, right and bottom of the crop as shares of the image.
        num_classes: K.
        size: Tokens (H, W).

    Returns:
        (B, K, 1 + H * W).
    """
    count, _, height, width = scores.shape
    maps = scores.new_zeros(count, num_classes, height, width).scatter_(1, classes, scores)
    # Positions are counted from the centre of the first place, as in the authors' code.
    corners = boxes * boxes.new_tensor([width, height, width, height]) - 0.5
    rois = torch.cat([torch.arange(count).to(corners)[:, None], corners], dim=1)
    whole = roi_align(maps, rois, (1, 1)).flatten(2)
    each = roi_align(maps, rois, size).flatten(2)
    return torch.cat([whole, each], dim=2).softmax(dim=1)
