"""Freezing of stages and of the statistics of BatchNorm."""

from __future__ import annotations

from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm


def freeze_stages(backbone: Any, frozen_stages: int) -> None:
    """Stop the gradients of the first stages, and keep them in evaluation mode from now on.

    Args:
        backbone: A ``Backbone``, changed in place.
        frozen_stages: -1 for none, 0 for the stem, 1 for the first stage with its norm as well, and
            so on; blocks in a host without stages. As in the MM toolkits.

    Raises:
        ValueError: The network has fewer stages.
    """
    if frozen_stages == -1:
        return
    last = len(backbone.layer_ids.depths)
    if not 0 <= frozen_stages <= last or not last:
        raise ValueError(
            f"backbone.frozen_stages={frozen_stages} must be from -1 to {last or -1}"
            + " for a network that declares no stages" * (not last)
        )
    backbone.frozen_stages = frozen_stages
    for name, parameter in backbone.named_parameters():
        if backbone.layer_ids.stage(name) <= frozen_stages:
            parameter.requires_grad_(False)


def keep_in_evaluation(backbone: Any) -> None:
    """Put frozen stages, and with ``norm_eval`` every BatchNorm, into evaluation mode."""
    if backbone.frozen_stages >= 0:
        for name, module in backbone.named_modules():
            if name and backbone.layer_ids.stage(f"{name}.") <= backbone.frozen_stages:
                module.eval()
    if backbone.norm_eval:
        for module in backbone.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
