"""Patches of an image that an embedding depends on, by the gradient of the embedding.

Axes: B images, C channels, s the side of a patch, (h, w) the whole patches of an image.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.base import Backbone

SEED = 0
TRIES = 16  # images, since a network that selects tokens may ignore patches of one image
HALF_SCALE = 2.0**16  # as in mixed precision, since float16 is 0 below 6e-8


def reached_patches(backbone: Backbone, images: Tensor, side: int) -> Tensor:
    """Return True for every patch with a non-zero gradient of the embedding, (h, w).

    A patch is reached if any of its pixels is, in any of the images. Pixels after the last whole
    patch are ignored, since a host may crop them. Parameters keep their gradients.

    Args:
        backbone: Built with ``dense=False``; it runs in its present mode.
        images: (B, 3, H, W).
        side: s, in pixels.
    """
    leaf = images.detach().clone().requires_grad_()
    with torch.enable_grad():
        embeddings = classifier_inputs(backbone, leaf.clone())  # a host may write to its input
    reached = [_reached_by(embedding, leaf, side) for embedding in embeddings]
    return torch.stack(reached).all(0)


def classifier_inputs(backbone: Backbone, images: Tensor) -> Sequence[Tensor]:
    """Return the embedding (B, C), or both embeddings of a distilled network."""
    features: Any = backbone.features(images)
    if isinstance(features, Tensor) and features.ndim == 3:
        return features.unbind(1)
    return (features if isinstance(features, Tensor) else backbone.embed(images),)


def _reached_by(embedding: Tensor, leaf: Tensor, side: int) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    weights = torch.randn(embedding.shape, generator=generator).to(embedding)
    if _is_half(embedding, leaf):
        weights = weights * HALF_SCALE
    gradient = None
    if embedding.requires_grad:
        (gradient,) = torch.autograd.grad(
            embedding, leaf, weights, retain_graph=True, allow_unused=True
        )
    if gradient is None:
        gradient = torch.zeros_like(leaf)
    somewhere = (gradient != 0).any(1).any(0)  # NaN differs from 0
    return F.max_pool2d(somewhere[None, None].float(), side)[0, 0].bool()


def _is_half(embedding: Tensor, leaf: Tensor) -> bool:
    device = leaf.device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    return torch.float16 in (embedding.dtype, leaf.dtype, autocast)


def reached_by_any(backbone: Backbone, size: tuple[int, int], like: Tensor) -> Tensor:
    """Return the patches, of the host's stride, that are reached in any of several noise images.

    For most networks one image suffices.

    Args:
        backbone: Backbone of any host.
        size: (H, W) of the images.
        like: A tensor of their type and device.
    """
    side = min(backbone.feature_info[-1].stride, *size)
    generator = torch.Generator().manual_seed(SEED)
    reached = None
    for _ in range(TRIES):
        image = torch.randn(1, backbone.in_chans, *size, generator=generator).to(like)
        patches = reached_patches(backbone, image, side)
        reached = patches if reached is None else reached | patches
        if reached.all():
            break
    assert reached is not None
    return reached


def tells_images_apart(backbone: Backbone, size: tuple[int, int], like: Tensor) -> bool:
    """Return True if two noise images have different embeddings."""
    generator = torch.Generator().manual_seed(SEED)
    images = torch.randn(2, backbone.in_chans, *size, generator=generator).to(like)
    with torch.no_grad():
        read = classifier_inputs(backbone, images)
    return all(not torch.equal(pair[0], pair[1]) for pair in read)


def blocking_zeros(network: nn.Module, is_whole: Callable[[], bool]) -> dict[str, list[str]]:
    """Find the zeros among the parameters because of which a condition fails.

    Args:
        network: Its parameters are changed and restored.
        is_whole: Returns True if the condition holds.

    Returns:
        Names of parameters by their pattern, such as ``blocks.*.ls1.gamma``; empty if the condition
        fails for other values as well. Parameters of zeros only come before those with some zeros;
        biases are ignored.
    """
    parameters = {k: p for k, p in network.named_parameters() if not k.endswith("bias")}
    for share in ("all", "some"):
        groups: dict[str, list[str]] = {}
        for name, parameter in parameters.items():
            if not (parameter.any() if share == "all" else parameter.all()):
                groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), []).append(name)
        if not groups or not _is_whole_with(parameters, groups, is_whole):
            continue
        for pattern in list(groups):  # drop unnecessary groups
            rest = {key: names for key, names in groups.items() if key != pattern}
            if _is_whole_with(parameters, rest, is_whole):
                groups = rest
        return groups
    return {}


def _is_whole_with(
    parameters: dict[str, nn.Parameter],
    groups: dict[str, list[str]],
    is_whole: Callable[[], bool],
) -> bool:
    with _zeros_filled([parameters[name] for names in groups.values() for name in names]):
        return is_whole()


@contextmanager
def _zeros_filled(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Replace the zeros of parameters by small random numbers inside the context."""
    before = [parameter.detach().clone() for parameter in parameters]
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter, original in zip(parameters, before, strict=True):
            noise = torch.randn(original.shape, generator=generator).to(original)
            parameter.copy_(torch.where(original == 0, 0.1 * noise, original))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, original in zip(parameters, before, strict=True):
                parameter.copy_(original)
