"""The branch with each group's channels side by side: the weights change their order, not the maps.

Channel c is of group c mod s, so the product with a group's matrix begins and ends with a copy of
the map that goes value by value. In the order of groups these copies go run by run. What it costs
is the order of both layers' weights, 1.5 gamma C^2 values in each pass, so it is taken where there
are many more tokens than channels.

By processor time on one thread a branch of PosMLP-T at 224 pixels, always in this form, takes 0.81,
0.95, 1.06 and 1.31 of the plain form's time in stages 1 to 4 at batch 1, and 0.72, 0.80, 0.98 and
1.05 at batch 8 (0.75, 0.90, 1.0 and 1.03 in training). Where it serves, the whole network takes
1.0 and 0.93. Most blocks are in stage 3, where products decide: by a profile of the plain form W1,
W2 and their biases take 0.59 of the network's time at batch 1 and the tokens' products 0.19, at
batch 8 0.52 and 0.13.

Axes: C channels, h hidden channels, s groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from backbones.layers.linear import linear, linear_act

if TYPE_CHECKING:
    from backbones.mixers.posmlp.gated_mlp import GatedMLP

TOKENS_PER_CHANNEL = 4  # from where on the order of weights costs less than that of maps


def suits(mixer: GatedMLP, x: Tensor) -> bool:
    """Whether this is the usual branch, and a large map on a CPU, where this was measured."""
    return (
        mixer.gate.relation.groups > 1
        and mixer.gate.structure == "gate"
        and type(mixer.gate.norm) is nn.Identity
        and x.device.type == "cpu"
        and x.shape[:-1].numel() >= TOKENS_PER_CHANNEL * x.shape[-1]
    )


def mix(mixer: GatedMLP, x: Tensor) -> Tensor:
    """W2 ((M u + b) * v) + b2: (B, H, W, C) -> (B, H, W, C)."""
    fc1, fc2, gate = mixer.fc1, mixer.fc2, mixer.gate
    groups = gate.relation.groups
    weight, bias = (
        _by_groups(tensor.unflatten(0, (2, -1)), groups).flatten(0, 1)
        for tensor in (fc1.weight, fc1.bias)
    )
    u, v = linear_act(x, weight, bias, "gelu").chunk(2, dim=-1)
    mixed = gate.relation.mix(u, shifted=gate.shifted, contiguous=True)
    return mixer.drop(linear(mixed * v, _by_groups(fc2.weight, groups), fc2.bias))


def _by_groups(tensor: Tensor, groups: int) -> Tensor:
    """Axis 1, channels that are dealt out to groups, in runs."""
    return tensor.unflatten(1, (-1, groups)).transpose(1, 2).flatten(1, 2)
