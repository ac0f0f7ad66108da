"""timm as the source of host networks and of their published weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import timm
from torch import Tensor, nn

from backbones.base import HostConfig

M = TypeVar("M", bound=nn.Module)


def create_timm_model(name: str, config: HostConfig, **options: Any) -> nn.Module:
    """Build a timm network without classifier, with its published weights if the config asks.

    Raises:
        ValueError: There are no weights, or they cannot be downloaded; says which file to fetch.
    """
    options = {"num_classes": 0, "drop_path_rate": config.drop_path_rate, **options}
    if not config.pretrained:
        return timm.create_model(name, **options)
    source = timm.get_pretrained_cfg(name)
    if source is None or not source.has_weights:
        raise ValueError(
            f"timm publishes no weights for {name}; pass pretrained=<path of a checkpoint> or "
            "pretrained=false"
        )
    try:
        return timm.create_model(name, pretrained=True, **options)
    except (OSError, RuntimeError, ValueError) as error:
        hub = f"model.safetensors from huggingface.co/{source.hf_hub_id}"
        where = hub if source.hf_hub_id else source.url
        raise ValueError(
            f"timm could not fetch its weights for {name} ({type(error).__name__}); download "
            f"{where} on a machine with network and pass pretrained=<its path>"
        ) from error


def become(module: nn.Module, kind: type[M]) -> M:
    """Give a module of timm's a subclass that adds methods only, and return it.

    What timm built keeps its tensors, their names and their start; what it computes becomes ours. A
    module of our own in its place would have to repeat timm's constructor and take every tensor.
    """
    assert issubclass(kind, type(module)), (kind, type(module))
    module.__class__ = kind
    assert isinstance(module, kind)
    return module


def patches_of(side: int, conv: nn.Conv2d, init: Callable[[Tensor], Any]) -> nn.Conv2d:
    """A new convolution over patches of another size in the place of one of timm's.

    Args:
        side: Of a patch.
        conv: The one to replace.
        init: Fills the weights as timm does; biases are 0.
    """
    new = nn.Conv2d(conv.in_channels, conv.out_channels, side, side)
    init(new.weight)
    nn.init.zeros_(cast("Tensor", new.bias))
    return new


def refuse_pretrained(name: str, config: HostConfig) -> None:
    """Refuse to fetch weights of a host that timm does not have.

    Raises:
        ValueError: The config asks for them.
    """
    if config.pretrained:
        raise ValueError(
            f"timm has no weights of {name}; download those of its authors and pass "
            "pretrained=<their path>"
        )
