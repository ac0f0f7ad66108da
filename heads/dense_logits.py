"""Logits of a classifier at each position of its last map, to annotate label maps.

The classifier's own norm, pooling and linear layers are applied to each position as if it were the
whole map.

Axes: B images, C channels, K classes, h w positions of the last map, P prefix tokens.

Source: Jiang et al., "All Tokens Matter: Token Labeling for Training Better Vision Transformers",
NeurIPS 2021, https://arxiv.org/abs/2104.10858, Sec. 3.1. The authors apply the linear layer alone
to the map; here a norm after the pooling is applied as well.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from backbones.hosts.lvt.token_classifier import TokenClassifier
from backbones.layers.graph_sizes import ceil_div
from heads.linear import LinearClassifier


@torch.no_grad()
def dense_logits(network: Any, images: Tensor) -> Tensor:
    """Return the logits at each position of the last map: (B, 3, H, W) -> (B, K, h, w).

    Args:
        network: A ``LinearClassifier``, or a timm network with ``forward_features`` and
            ``forward_head``, in evaluation mode.
        images: (B, 3, H, W), preprocessed for the network.

    Raises:
        ValueError: The network's features are not a map.
    """
    if isinstance(network, LinearClassifier):
        return _linear_classifier_logits(network, images)
    features = network.forward_features(images)
    width = network.num_features
    is_map = isinstance(features, Tensor) and width in features.shape[1:]
    prefix = getattr(network, "num_prefix_tokens", 0)
    side = math.isqrt(features.shape[1] - prefix) if is_map and features.ndim == 3 else 0
    if not is_map or (features.ndim == 3 and side**2 != features.shape[1] - prefix):
        raise ValueError(
            f"{type(network).__name__} lacks a map of features or a square one of tokens; take "
            "another network"
        )
    if features.ndim == 3:
        places = features[:, prefix:]
        # The position fills the prefix tokens too, since the pooling may read any token.
        rows = places.flatten(0, 1)[:, None].expand(-1, 1 + prefix, -1)
        return _as_map(network.forward_head(rows), len(images), (side, side))
    channels_first = features.shape[1] == width
    rows = features.permute(0, 2, 3, 1) if channels_first else features
    size = rows.shape[1], rows.shape[2]
    rows = rows.reshape(-1, width, 1, 1) if channels_first else rows.reshape(-1, 1, 1, width)
    return _as_map(network.forward_head(rows), len(images), size)


def _linear_classifier_logits(network: LinearClassifier, images: Tensor) -> Tensor:
    backbone, classifier = network.backbone, network.classifier
    stride = backbone.feature_info[-1].stride
    size = ceil_div(images.shape[2], stride), ceil_div(images.shape[3], stride)
    if isinstance(classifier, TokenClassifier):
        _, tokens = classifier.outputs(backbone.features(images))
        return _as_map(tokens.flatten(0, 1), len(images), size)
    maps = getattr(backbone, "stage_maps", None)
    if maps is None:  # this backbone's forward returns the normalised map
        rows = backbone(images)[-1].permute(0, 2, 3, 1).flatten(0, 2)
        return _as_map(classifier(rows), len(images), size)
    last = maps(images)[-1]
    channels_first = getattr(backbone, "channels_first", False)
    rows = last.permute(0, 2, 3, 1) if channels_first else last
    shape = (-1, rows.shape[3], 1, 1) if channels_first else (-1, 1, 1, rows.shape[3])
    places = rows.reshape(shape)
    one_place: Any = copy.copy(backbone)
    one_place.stage_maps = lambda images: [images]
    return _as_map(classifier(one_place.embed(places)), len(images), size)


def _as_map(logits: Tensor, count: int, size: tuple[int, int]) -> Tensor:
    return logits.reshape(count, *size, logits.shape[-1]).permute(0, 3, 1, 2)
