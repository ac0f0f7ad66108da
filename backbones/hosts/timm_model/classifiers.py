"""timm's classifiers, folded to one linear layer on its pooled features.

Two classifiers (of a class and a distillation token, or of several branches) are averaged in
evaluation, and a BatchNorm before a linear layer is affine there, so that one layer gives the same
logits. A hidden layer stays with the backbone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

EPSILON = 1e-5  # of BatchNorm
Linear = tuple[Tensor, Tensor]  # weight (K, C) and bias (K)
MEMBER = re.compile(r"\d+\.")


def convert_classifier(
    state_dict: Mapping[str, Tensor], names: Sequence[str], model: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split timm's tensors into those of the network and ``classifier.weight`` and ``.bias``.

    Args:
        state_dict: By timm's names.
        names: Names of its classifiers.
        model: Name of its class.
    """
    rest = dict(state_dict)
    folded = []
    for name in names:
        below = {k.removeprefix(f"{name}."): v for k, v in rest.items() if k.startswith(f"{name}.")}
        linear, used = _fold_all(below, state_dict, name)
        if linear is not None:
            folded.append(linear)
            rest = {key: value for key, value in rest.items() if key not in used}
    if not folded:
        return rest, {}
    weight = torch.stack([one[0] for one in folded]).mean(0)
    bias = torch.stack([one[1] for one in folded]).mean(0)
    return rest, {"classifier.weight": weight, "classifier.bias": bias}


def _fold_all(
    below: Mapping[str, Tensor], state_dict: Mapping[str, Tensor], name: str
) -> tuple[Linear | None, Collection[str]]:
    """Return a classifier as one linear layer, and the names of its tensors."""
    members = sorted({found[0] for key in below if (found := MEMBER.match(key))}, key=len)
    if not members:
        return _fold(below, name)
    layers, used = [], set()
    for member in sorted(members, key=lambda one: int(one[:-1])):
        inside = {k.removeprefix(member): v for k, v in below.items() if k.startswith(member)}
        linear, keys = _fold(inside, f"{name}.{member[:-1]}")
        if linear is None:
            return None, ()
        layers.append(linear)
        used |= set(keys)
    shares = state_dict.get(name.replace("heads", "weights"))
    if shares is None or shares.numel() != len(layers):
        shares = torch.full((len(layers),), 1 / len(layers), dtype=layers[0][0].dtype)
    else:
        shares = shares.softmax(-1)
    weight = torch.cat([share * one[0] for share, one in zip(shares, layers, strict=True)], dim=1)
    bias = sum(
        (share * one[1] for share, one in zip(shares, layers, strict=True)), start=shares[0] * 0
    )
    return (weight, bias), used


def _fold(below: Mapping[str, Tensor], name: str) -> tuple[Linear | None, Collection[str]]:
    """Return one linear layer, with a BatchNorm before it or without, as weight and bias."""
    if "head.bn.weight" in below or "head_dist.bn.weight" in below:
        return _fold_pair(below, name)
    part = next(
        (
            p
            for p in ("", "linear.", "fc2.", "fc.", "l.")
            if f"{p}weight" in below and below[f"{p}weight"].ndim in (2, 4)
        ),
        None,
    )
    if part is None:
        return None, ()
    weight = below[f"{part}weight"].flatten(1)
    bias = below.get(f"{part}bias", weight.new_zeros(len(weight)))
    used = {f"{name}.{part}weight", f"{name}.{part}bias"}
    if "bn.weight" in below:
        scale = below["bn.weight"] * (below["bn.running_var"] + EPSILON).rsqrt()
        shift = below["bn.bias"] - below["bn.running_mean"] * scale
        bias = bias + weight @ shift
        weight = weight * scale
        used |= {f"{name}.{key}" for key in below if key.startswith("bn.")}
    return (weight, bias), used


def _fold_pair(below: Mapping[str, Tensor], name: str) -> tuple[Linear | None, Collection[str]]:
    """Return the mean of a classifier ``head`` and, if there is one, ``head_dist``."""
    folded, used = [], set()
    for part in ("head", "head_dist"):
        inside = {
            k.removeprefix(f"{part}."): v for k, v in below.items() if k.startswith(f"{part}.")
        }
        linear, keys = _fold(inside, f"{name}.{part}")
        if linear is not None:
            folded.append(linear)
            used |= set(keys)
    weight = torch.stack([one[0] for one in folded]).mean(0)
    bias = torch.stack([one[1] for one in folded]).mean(0)
    return (weight, bias), used
