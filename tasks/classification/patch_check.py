"""Check before a classification training: the embedding depends on every patch of the image.

A class token that ignores the feature map trains silently, at the accuracy of chance.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from backbones import Backbone
from backbones.analysis.patch_reach import blocking_zeros, reached_by_any, tells_images_apart
from tasks.engine.checkpoints.exact_resume import random_state, set_random_state

OPTION = "task.check_patches"
SHOWN = 3  # positions and names in a message

warn = rank_zero_only(logging.getLogger(__name__).warning)


def unseen_patches(backbone: Backbone, size: tuple[int, int], like: Tensor) -> str | None:
    """Describe the patches of an image that the embedding ignores; None if it sees all of them.

    The network runs in evaluation mode on an image of noise, or a few where patches are missing.
    A warning lists zero-initialised parameters that block the gradient but are trained, such as a
    layer scale. The network, its gradients and the random state stay unchanged.

    Args:
        backbone: Backbone with its weights at the start of the training.
        size: (H, W) of the training images.
        like: Tensor with the type and device of the images.
    """
    with undisturbed(backbone):
        reached = reached_by_any(backbone, size, like)
        if reached.all():
            return None
        frozen = any(not parameter.requires_grad for parameter in backbone.parameters())
        if frozen and not reached.any() and tells_images_apart(backbone, size, like):
            return None  # frozen modules may compute without gradient
        zeros = blocking_zeros(backbone, lambda: bool(reached_by_any(backbone, size, like).all()))
    problem = _description(backbone, reached)
    names = [name for group in zeros.values() for name in group]
    examples = ", ".join(list(zeros)[:SHOWN])
    if names and all(backbone.get_parameter(name).requires_grad for name in names):
        warn(f"{problem} while these parameters are 0, as they are at the start: {examples}")
        return None
    if names:
        return f"{problem}, because these parameters are 0 and frozen: {examples}; unfreeze them"
    return f"{problem}. {_advice(backbone)}, or pass {OPTION}=false to train anyway"


def _description(backbone: Backbone, reached: Tensor) -> str:
    side, missing = backbone.feature_info[-1].stride, (~reached).nonzero().tolist()
    name = backbone.name or type(backbone).__name__
    text = f"the gradient of {name}'s embedding is 0 in "
    patches = f"{reached.numel()} patches of {side} x {side} pixels"
    if not reached.any():
        by = f"its {backbone.pooling}" if backbone.num_prefix_tokens else "it"
        return f"{text}all {patches}: {by} never sees the image"
    places = ", ".join(f"row {row} column {column}" for row, column in missing[:SHOWN])
    more = ", ..." * (len(missing) > SHOWN)
    return f"{text}{len(missing)} of {patches} (from 0: {places}{more})"


def _advice(backbone: Backbone) -> str:
    parts = [getattr(part, "mixer", part) for part in backbone.mixers().values()]  # unwrapped
    mixers = {type(mixer).__name__: mixer for mixer in parts}
    joint = [name for name, mixer in mixers.items() if mixer.prefix_mixing == "joint"]
    if backbone.num_prefix_tokens and joint:
        return (
            f"Let the class tokens read the map in mix_joint of {', '.join(joint)}, or declare "
            "prefix_mixing='pooled' or 'none' there"
        )
    return f"Look at how tokens are mixed in {', '.join(mixers) or type(backbone).__name__}"


@contextmanager
def undisturbed(network: nn.Module) -> Iterator[None]:
    """Set a network to evaluation mode, uncompiled, and restore it at the end.

    The random state, buffers and attributes of all modules are restored.
    """
    random = random_state()
    states = [(module, dict(vars(module)), _containers(module)) for module in network.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in network.buffers()]
    for module in network.modules():
        # Set the attribute, since a module's train() may do more.
        module.training, module._compiled_call_impl = False, None
    try:
        yield
    finally:
        for module, attributes, containers in states:
            vars(module).clear()
            vars(module).update(attributes)
            for container, content in containers:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(content)
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
        set_random_state(random)


def _containers(module: nn.Module) -> list[tuple[Any, Any]]:
    """Return the lists, dicts and sets of a module, each with a copy."""
    values = [item for item in vars(module).values() if isinstance(item, dict | list | set)]
    return [(value, value.copy()) for value in values]
