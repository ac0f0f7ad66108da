"""timm as the source of host networks and of their published weights."""

from __future__ import annotations

from typing import Any

import timm
from torch import nn

from backbones.base import HostConfig


def create_timm_model(name: str, config: HostConfig, **options: Any) -> nn.Module:
    """Build a timm network without classifier, with its published weights if the config asks.

    Raises:
        ValueError: The weights cannot be downloaded; says which file to fetch.
    """
    options = {"num_classes": 0, "drop_path_rate": config.drop_path_rate, **options}
    if not config.pretrained:
        return timm.create_model(name, **options)
    try:
        return timm.create_model(name, pretrained=True, **options)
    except (OSError, RuntimeError, ValueError) as error:
        source = timm.get_pretrained_cfg(name)
        assert source is not None, f"timm publishes no weights for {name}"
        where = f"huggingface.co/{source.hf_hub_id or f'timm/{name}.{source.tag}'}"
        raise ValueError(
            f"timm could not fetch its weights for {name} ({type(error).__name__}); download "
            f"model.safetensors from {where} on a machine with network and pass "
            "pretrained=<its path>"
        ) from error


def refuse_timm_weights(name: str, config: HostConfig) -> None:
    """Refuse ``pretrained=True`` for a network that timm does not have.

    Raises:
        ValueError: The config asks for weights.
    """
    if config.pretrained:
        raise ValueError(
            f"timm has no weights of {name}; download those of its authors and pass "
            "pretrained=<their path>"
        )
