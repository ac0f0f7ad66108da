"""Channels of a network's images: its first convolution for another number of them."""

from __future__ import annotations

import copy
from typing import cast

from timm.models import adapt_input_conv
from torch import Tensor, nn

from backbones.replace import replace

COLOURS = 3


def input_layers(network: nn.Module, in_chans: int = COLOURS) -> list[str]:
    """Return the names of the convolutions that read the images.

    Those are the first one for images of ``in_chans`` channels, and others of the same shape beside
    it, as branches of one layer have.
    """
    layers = {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, nn.Conv2d) and module.in_channels == in_chans and module.groups == 1
    }
    first = next(iter(layers), None)
    if first is None:
        return []
    parent = first.rpartition(".")[0]
    return [name for name in layers if name.rpartition(".")[0] == parent]


def adapt_input(network: nn.Module, in_chans: int, *, keep_weights: bool) -> tuple[str, ...]:
    """Replace the first convolution for images of 3 channels by one for another number.

    Args:
        network: Changed in place.
        in_chans: Its new number of channels.
        keep_weights: Adapt the weights, as timm does; False draws new ones of the same variance of
            the outputs.

    Returns:
        The names of the new weights.

    Raises:
        ValueError: The network lacks a convolution that reads images.
    """
    names = input_layers(network)
    if not names:
        raise ValueError(
            f"{type(network).__name__} lacks a convolution that reads 3 channels; leave in_chans "
            "out"
        )
    for name in names:
        conv = cast("nn.Conv2d", network.get_submodule(name))
        adapted_conv = copy.deepcopy(conv)
        adapted_conv.in_channels = in_chans
        adapted_conv.weight = nn.Parameter(adapted(conv.weight.detach(), in_chans))
        if not keep_weights:
            scale = conv.weight.detach().std() * (COLOURS / in_chans) ** 0.5
            nn.init.normal_(adapted_conv.weight)
            adapted_conv.weight.data.mul_(scale)
        replace(network, name, adapted_conv)
    return tuple(f"{name}.weight" for name in names)


def adapted(weight: Tensor, in_chans: int) -> Tensor:
    """Return the weights (O, 3, h, w) of a convolution for images of other channels.

    Source: ``timm.models.adapt_input_conv``.
    """
    weights: Tensor = adapt_input_conv(in_chans, weight)
    return weights.contiguous()


def adapt_tensors(
    tensors: dict[str, Tensor], keys: tuple[str, ...], in_chans: int
) -> dict[str, Tensor]:
    """Return a checkpoint's tensors with input weights of 3 channels adapted."""
    adapted_tensors = {}
    for key in keys:
        weight = tensors.get(key)
        if weight is not None and weight.ndim == 4 and weight.shape[1] == COLOURS != in_chans:
            adapted_tensors[key] = adapted(weight, in_chans)
    return tensors | adapted_tensors
