"""Low-rank adaptation of a backbone's linear layers by peft.

Each adapted layer computes W x + b + (alpha / rank) B A x. Only A (rank, C_in), B (C_out, rank),
B starting at 0, and the parts of ``train`` get a gradient; all other weights stay.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022,
https://arxiv.org/abs/2106.09685, section 4.1.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from backbones.base import Backbone
from backbones.layers.bounds import check_positive, check_range, check_share
from backbones.layers.pointwise import PointwiseConv2d
from backbones.options import unknown
from backbones.replace import replace, share_state

logger = logging.getLogger(__name__)

RANDOM = "lora trains adapters of frozen weights, which are random without pretrained ones"
LINEAR = "linear"  # all linear layers
Parts = str | Sequence[str] | None


class Lora:
    """Options of ``backbone.lora``.

    Args:
        rank: Rank of the products B A.
        alpha: Their scale is alpha / rank; None means ``rank``.
        targets: "linear" for all linear layers, 1 x 1 convolutions among them, or parts of their
            names, such as ``[qkv, proj]`` or ``[blocks.11]``.
        dropout: Dropout before A.
        train: Parts of the names of parameters that are trained as a whole, such as a new mixer's
            ``[mlp]``; their layers are not adapted.

    Raises:
        ValueError: An option is out of range.
    """

    def __init__(
        self,
        rank: int = 8,
        alpha: float | None = None,
        targets: Parts = LINEAR,
        dropout: float = 0.0,
        train: Parts = None,
    ) -> None:
        check_range("backbone.lora.rank", rank, 1)
        if alpha is not None:
            check_positive("backbone.lora.alpha", alpha)
        check_share("backbone.lora.dropout", dropout)
        self.rank, self.dropout = rank, dropout
        self.alpha = float(rank if alpha is None else alpha)
        self.targets, self.train = _parts(targets), _parts(train)
        if not self.targets:
            raise ValueError("backbone.lora.targets is empty; pass linear, or parts of names")


def add_adapters(backbone: Backbone, options: Lora, untrained: Collection[str] = ()) -> None:
    """Freeze a backbone, and adapt its linear layers.

    Args:
        backbone: The backbone, with its weights, changed in place.
        options: Rank, layers and parts that are trained as a whole.
        untrained: Parameters that the pretrained weights lack, or prefixes of their names. Those
            of dense prediction alone are trained as a whole.

    Raises:
        ValueError: peft is missing, a target matches no layer that the network calls, or an
            untrained parameter would be frozen.
    """
    require_peft()
    from peft import LoraConfig, inject_adapter_in_model

    map_parts = backbone.map_keys if backbone.dense else ()
    trained = {
        name
        for name, _ in backbone.named_parameters()
        if is_part(name, options.train) or name.startswith(map_parts)
    }
    _check_train(backbone, options, trained)
    frozen = [
        name
        for name, _ in backbone.named_parameters()
        if name.startswith(tuple(untrained)) and name not in trained
    ]
    if frozen:
        raise ValueError(
            f"backbone.pretrained lacks {len(frozen)} weights that backbone.lora would freeze at "
            f"random values ({', '.join(frozen[:3])}{', ...' * (len(frozen) > 3)}); train them "
            f"whole, such as backbone.lora.train=[{_word(frozen[0])}]"
        )
    names = [
        name
        for name in _linear_layers(backbone)
        if _is_target(name, options) and f"{name}.weight" not in trained
    ]
    called = _called(backbone, names)
    if len(called) < len(names):
        silent = [name for name in names if name not in called]
        logger.info(
            "LoRA leaves out %d layers, whose weights the network reads itself: %s%s",
            len(silent), ", ".join(silent[:3]), ", ..." * (len(silent) > 3),
        )  # fmt: skip
    names = [name for name in names if name in called]
    _check_targets(backbone, options, names)
    for name in names:
        layer = backbone.get_submodule(name)
        if isinstance(layer, PointwiseConv2d):  # peft builds layers of the same class
            replace(backbone, name, share_state(layer, nn.Conv2d))
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules="|".join(map(re.escape, names)),
    )
    inject_adapter_in_model(config, backbone)
    for name, parameter in backbone.named_parameters():
        if name in trained:
            parameter.requires_grad_(True)
    backbone.adapted = tuple(names)
    logger.info("LoRA of rank %d in %d layers", options.rank, len(names))


def merge_adapters(backbone: Backbone) -> Backbone:
    """Add the adapters' products to the weights, and restore the plain layers, in place."""
    for name in backbone.adapted:
        layer: Any = backbone.get_submodule(name)
        layer.merge(safe_merge=True)
        replace(backbone, name, layer.get_base_layer())
    backbone.adapted = ()
    return backbone


def warn_of_random_weights() -> None:
    """Warn that a network without pretrained weights keeps random ones."""
    warnings.warn(f"{RANDOM}; pass pretrained=<file>, or load its weights", stacklevel=3)


@contextmanager
def weights_follow() -> Iterator[None]:
    """Suppress that warning where a checkpoint is loaded next."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=re.escape(RANDOM))
        yield


def require_peft() -> None:
    """Raise an error with a remedy unless peft is installed.

    Raises:
        ValueError: It is missing.
    """
    if importlib.util.find_spec("peft") is None:
        raise ValueError('backbone.lora needs peft; type: pip install "mixerlab[lora]"')


def is_part(name: str, parts: Sequence[str]) -> bool:
    """Return True if a dotted name has one of these parts, whole words between dots."""
    return any(f".{part}." in f".{name}." for part in parts)


def _parts(parts: Parts) -> tuple[str, ...]:
    return (parts,) if isinstance(parts, str) else tuple(parts or ())


def _word(name: str) -> str:
    """Return the first part of a parameter's name after the number of its block."""
    words = name.split(".")
    last = max((place for place, word in enumerate(words) if word.isdigit()), default=-1)
    return words[last + 1] if last + 2 < len(words) else words[0]


def _linear_layers(backbone: Backbone) -> list[str]:
    return [
        name
        for name, module in backbone.named_modules()
        if isinstance(module, nn.Linear)
        or (
            type(module) in (nn.Conv2d, PointwiseConv2d)
            and module.kernel_size == (1, 1)
            and module.groups == 1
        )
    ]


def _is_target(name: str, options: Lora) -> bool:
    if is_part(name, options.train):
        return False
    return options.targets == (LINEAR,) or is_part(name, options.targets)


def _check_train(backbone: Backbone, options: Lora, trained: Collection[str]) -> None:
    for part in options.train:
        if not any(is_part(name, [part]) for name in trained):
            words = {word for name, _ in backbone.named_parameters() for word in name.split(".")}
            raise ValueError(unknown("part in backbone.lora.train", part, sorted(words)))


def _check_targets(backbone: Backbone, options: Lora, names: Sequence[str]) -> None:
    for target in options.targets:
        if target != LINEAR and not any(is_part(name, [target]) for name in names):
            called = _called(backbone, _linear_layers(backbone))
            words = {word for name in called for word in name.split(".")}
            raise ValueError(unknown("layer in backbone.lora.targets", target, sorted(words)))
    if not names:
        raise ValueError(
            f"{backbone.name} has no linear layer for backbone.lora; leave backbone.lora out"
        )


@torch.no_grad()
def _called(backbone: Backbone, names: Sequence[str]) -> set[str]:
    """Return the layers that a pass calls; mixers may read the weight of a layer instead."""
    if backbone.modality != "image":
        return set(names)
    called: set[str] = set()
    hooks = [
        backbone.get_submodule(name).register_forward_hook(lambda *_, name=name: called.add(name))
        for name in names
    ]
    weights = next(backbone.parameters())
    image = torch.zeros(1, backbone.in_chans, *backbone.img_size).to(weights)
    training = backbone.training
    backbone.eval()
    if not backbone.dense:
        backbone.features(image)
    backbone(image)
    backbone.train(training)
    for hook in hooks:
        hook.remove()
    return called
