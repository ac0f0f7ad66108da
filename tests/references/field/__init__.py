"""A reference of each of the field's mixers, computed with the mixer's own tensors.

A file is called as the mixer is registered and has:

    reference(mixer, x)   the output for a map (B, H, W, C), by timm's layer or by a second
                          implementation from the paper's equations
    macs(mixer, c, h, w)  multiply-adds of one map, worked out by hand
    joint(mixer, x, p)    both outputs with prefix tokens p, where map and prefix mix jointly
    DIM, CASES            channels (24 by default) and options of ``create_mixer`` ([{}])
"""

import torch
from torch.func import functional_call


def through(layer, tensors, *inputs, names=None):
    """Call another implementation with the mixer's tensors, so that gradients reach them.

    Args:
        layer: A module of torch, timm or a toolkit.
        tensors: A mixer, or tensors by name.
        inputs: Its inputs.
        names: Beginnings of the mixer's names -> those of the layer.
    """
    tensors = tensors if isinstance(tensors, dict) else tensors.state_dict(keep_vars=True)
    for ours, theirs in (names or {}).items():
        tensors = {
            theirs + name.removeprefix(ours) if name.startswith(ours) else name: tensor
            for name, tensor in tensors.items()
        }
    own = {name: like.shape for name, like in layer.state_dict().items()}
    assert own.keys() == tensors.keys(), own.keys() ^ tensors.keys()
    given = {name: tensor.reshape(own[name]) for name, tensor in tensors.items()}
    return functional_call(layer.double().eval(), given, inputs)


def joint_through(sequence, mixer, x, prefix):
    """Outputs of a map and prefix tokens by ``sequence(mixer, tokens)``, prefix tokens first."""
    mixed = sequence(mixer, torch.cat([prefix, x.flatten(1, 2)], 1))
    return mixed[:, prefix.shape[1] :].reshape(x.shape), mixed[:, : prefix.shape[1]]


def as_nchw(x):
    """(B, H, W, C) -> (B, C, H, W)."""
    return x.permute(0, 3, 1, 2)


def as_nhwc(x):
    """(B, C, H, W) -> (B, H, W, C)."""
    return x.permute(0, 2, 3, 1)


def shifted(x, rows, columns):
    """Map whose token (i, j) is token (i + rows, j + columns) of x, or zero outside of it."""
    h, w = x.shape[1:3]
    out = torch.zeros_like(x)
    top, left = max(0, -rows), max(0, -columns)
    bottom, right = min(h, h - rows), min(w, w - columns)
    if top < bottom and left < right:
        out[:, top:bottom, left:right] = x[
            :, top + rows : bottom + rows, left + columns : right + columns
        ]
    return out


def depthwise(conv, x, dilation=1):
    """Sum of shifted maps (B, H, W, C), by the weights of a depthwise ``nn.Conv2d``."""
    weight, reach = conv.weight[:, 0], conv.weight.shape[-1] // 2
    y = sum(
        weight[:, i, j] * shifted(x, (i - reach) * dilation, (j - reach) * dilation)
        for i in range(weight.shape[1])
        for j in range(weight.shape[2])
    )
    return y if conv.bias is None else y + conv.bias


def pointwise(layer, x):
    """Linear map of the channels (..., C) by the weights of a linear layer or 1x1 convolution."""
    y = x @ layer.weight.flatten(1).T
    return y if layer.bias is None else y + layer.bias


def attention(q, k, v, bias=0.0):
    """Softmax attention (..., N, d) written out."""
    logits = q @ k.mT * q.shape[-1] ** -0.5 + bias
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    return weights @ v / weights.sum(-1, keepdim=True)
