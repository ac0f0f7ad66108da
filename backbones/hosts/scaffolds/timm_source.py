"""Host networks and published weights from timm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import timm
from torch import Tensor, nn

from backbones.checkpoints.hub import quick_offline
from backbones.replace import replace, share_state
from backbones.slots import HostConfig

PREPROCESSING = ("mean", "std", "interpolation", "crop_pct")
M = TypeVar("M", bound=nn.Module)


def create_timm_model(name: str, config: HostConfig, **options: Any) -> nn.Module:
    """Build a timm network without classifier, with published weights if ``config.pretrained``.

    Raises:
        ValueError: timm publishes no weights, or the download fails; names the file to fetch.
    """
    options = {"num_classes": 0, "drop_path_rate": config.drop_path_rate, **options}
    if not config.pretrained:
        return timm.create_model(name, **options)
    return create_pretrained(name, options)


def create_pretrained(name: str, options: Mapping[str, Any]) -> nn.Module:
    """Build a timm network with published weights.

    Raises:
        ValueError: timm publishes no weights, or the download fails; names the file to fetch.
    """
    source = timm.get_pretrained_cfg(name)
    if source is None or not source.has_weights:
        raise ValueError(
            f"timm publishes no weights for {name}; pass pretrained=<path of a checkpoint> or "
            "pretrained=false"
        )
    try:
        with quick_offline():
            return timm.create_model(name, pretrained=True, **options)
    except (OSError, RuntimeError, ValueError) as error:
        hub = f"model.safetensors from huggingface.co/{source.hf_hub_id}"
        where = hub if source.hf_hub_id else source.url
        raise ValueError(
            f"timm could not fetch its weights for {name} ({type(error).__name__}); download "
            f"{where} on a machine with network and pass pretrained=<its path>"
        ) from error


def read_source(network: Any) -> dict[str, Any]:
    """Return the preprocessing that timm declares for the published weights of its network."""
    source = dict(network.pretrained_cfg or {})
    return {key: source[key] for key in PREPROCESSING if source.get(key) is not None}


def extend(parent: nn.Module, name: str, kind: type[M]) -> M:
    """Replace a module of timm's by an instance of our subclass with the same parts; return it.

    timm's constructor has drawn the weights, so that at one seed they are timm's own.

    Args:
        parent: Contains the module.
        name: Its name below ``parent``.
        kind: Subclass of its class that adds methods only.
    """
    timms = parent.get_submodule(name)
    assert issubclass(kind, type(timms)), (kind, type(timms))
    ours = share_state(timms, kind)
    replace(parent, name, ours)
    return ours


def extend_all(container: nn.Module, kind: type[M]) -> list[M]:
    """Extend every module in a list of timm's, such as the blocks of a stage; see ``extend``."""
    names = [name for name, _ in container.named_children()]
    return [extend(container, name, kind) for name in names]


def create_patch_conv(side: int, conv: nn.Conv2d, init: Callable[[Tensor], Any]) -> nn.Conv2d:
    """Return timm's patch convolution with another patch size and new weights.

    Args:
        side: Side of a patch in pixels.
        conv: timm's convolution.
        init: timm's initialisation of the weights; biases are 0.
    """
    patch_conv = nn.Conv2d(conv.in_channels, conv.out_channels, side, side)
    init(patch_conv.weight)
    nn.init.zeros_(cast("Tensor", patch_conv.bias))
    return patch_conv


def refuse_pretrained(name: str, config: HostConfig) -> None:
    """Check that ``config.pretrained`` is False for a host that timm lacks.

    Raises:
        ValueError: It is True.
    """
    if config.pretrained:
        raise ValueError(
            f"timm publishes no weights of {name}; download its authors' and pass "
            "pretrained=<their path>"
        )
