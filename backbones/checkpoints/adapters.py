"""Names of the weights of low-rank adapters (``backbones.lora``) in checkpoints, and merging."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

BASE = ".base_layer."
LOW, HIGH = ".lora_A.default.weight", ".lora_B.default.weight"


def split_adapters(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a file's tensors under the names of plain layers, and those of adapters."""
    weights, adapters = {}, {}
    for key, value in tensors.items():
        if key.endswith((LOW, HIGH)):
            adapters[key] = value
        else:
            weights[key.replace(BASE, ".")] = value
    return weights, adapters


def merge(
    weights: Mapping[str, Tensor], adapters: Mapping[str, Tensor], record: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the plain layers with the adapters' products added.

    Args:
        weights: Weights of the layers by their plain names.
        adapters: Weights of the adapters.
        record: Options that the file's network was built with, with those of its adapters.

    Raises:
        ValueError: The record lacks the scale.
    """
    if not adapters:
        return dict(weights)
    options = record.get("lora")
    if not options:
        raise ValueError(
            "the checkpoint has low-rank adapters, but not their scale; pass a file that "
            "this project wrote"
        )
    scale = (options.get("alpha") or options["rank"]) / options["rank"]
    merged = dict(weights)
    for key, low in adapters.items():
        if key.endswith(LOW):
            name = key.removesuffix(LOW)
            high, weight = adapters[f"{name}{HIGH}"], weights[f"{name}.weight"]
            product = high.flatten(1).double() @ low.flatten(1).double()
            adapted = weight.double() + scale * product.reshape(weight.shape)
            merged[f"{name}.weight"] = adapted.to(weight.dtype)
    return merged


def to_adapted(
    weights: Mapping[str, Tensor], adapters: Mapping[str, Tensor], adapted: Collection[str]
) -> dict[str, Tensor]:
    """Return tensors under the names of a network whose layers ``adapted`` have adapters."""
    layers = set(adapted)
    renamed = {}
    for key, value in weights.items():
        name, _, last = key.rpartition(".")
        renamed[f"{name}{BASE}{last}" if name in layers else key] = value
    return {**renamed, **adapters}
