"""timm's classifiers, folded to one linear layer on its pooled features.

Several classifiers, of a class and a distillation token or of branches, are averaged in evaluation,
and a BatchNorm before a linear layer is affine there, so that one layer gives the same logits. A
hidden layer stays with the backbone.

Axes: K classes, C channels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

EPSILON = 1e-5  # of BatchNorm
Linear = tuple[Tensor, Tensor]  # weight (K, C) and bias (K)
LAYER = ("", "linear.", "fc2.", "fc.", "l.")  # names of the linear layer within a classifier


def convert_classifier(
    state_dict: Mapping[str, Tensor], names: Sequence[str], *, joint: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split timm's tensors into those of the network and ``classifier.weight`` and ``.bias``.

    Args:
        state_dict: By timm's names.
        names: Names of its classifiers.
        joint: True if each classifier reads its own part of the features.
    """
    rest, layers = dict(state_dict), []
    places = [re.sub(r"\.(linear|l)$", "", name) for name in names]
    for place in places:
        below = {k.removeprefix(f"{place}."): v for k, v in rest.items() if _is_in(k, place)}
        linear = _fold(below)
        if linear is not None:
            layers.append(linear)
            rest = {key: value for key, value in rest.items() if not _is_in(key, place)}
    if not layers:
        return rest, {}
    weight, bias = _joined(layers, _shares(places, state_dict, layers), joint=joint)
    return rest, {"classifier.weight": weight, "classifier.bias": bias}


def _is_in(key: str, place: str) -> bool:
    return key.startswith(f"{place}.")


def _shares(
    places: Sequence[str], state_dict: Mapping[str, Tensor], layers: Sequence[Linear]
) -> list[Tensor]:
    """Return the share of each classifier in the logits: learnt ones, or equal ones."""
    like = layers[0][1]
    groups = list(dict.fromkeys(place.rpartition(".")[0] for place in places))
    shares: list[Tensor] = []
    for group in groups:
        learnt = state_dict.get(group.replace("heads", "weights")) if group else None
        if learnt is None:
            return [like.new_tensor(1 / len(layers))] * len(layers)
        shares += list(learnt.to(like).softmax(-1) / len(groups))
    return shares


def _joined(layers: Sequence[Linear], shares: Sequence[Tensor], *, joint: bool) -> Linear:
    """Return one layer on the features: of all parts one after another, or of the same ones."""
    weights = [share * layer[0] for share, layer in zip(shares, layers, strict=True)]
    biases = [share * layer[1] for share, layer in zip(shares, layers, strict=True)]
    bias = torch.stack(biases).sum(0)
    if not joint:
        return torch.stack(weights).sum(0), bias
    return torch.cat(weights, dim=1), bias


def _fold(below: Mapping[str, Tensor]) -> Linear | None:
    """Return a linear layer, with a BatchNorm before it or without, as weight and bias."""
    part = next((prefix for prefix in LAYER if f"{prefix}weight" in below), None)
    if part is None or below[f"{part}weight"].ndim not in (2, 4):
        return None
    weight = below[f"{part}weight"].flatten(1)
    bias = below.get(f"{part}bias", weight.new_zeros(len(weight)))
    if "bn.weight" not in below:
        return weight, bias
    scale = below["bn.weight"] * (below["bn.running_var"] + EPSILON).rsqrt()
    shift = below["bn.bias"] - below["bn.running_mean"] * scale
    return weight * scale, bias + weight @ shift
