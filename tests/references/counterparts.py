"""AFBO's counterparts written out from their equations with explicit matrices and loops.

Each takes a map (B, H, W, C) and our parameters by name and gives back a map; tokens are the same
with H = W = 1. Nothing here is shared with the mixers.
"""

import torch
from torch import Tensor

from tests.references.afbo import depthwise

Tensors = dict[str, Tensor]


def block_diagonal(weights: Tensor) -> Tensor:
    """(G, r, c) -> (G r, G c), block g at rows g r and columns g c."""
    num_groups, rows, columns = weights.shape
    matrix = torch.zeros(num_groups * rows, num_groups * columns, dtype=weights.dtype)
    for g in range(num_groups):
        for r in range(rows):
            for c in range(columns):
                matrix[g * rows + r, g * columns + c] = weights[g, r, c]
    return matrix


def affine(x: Tensor, tensors: Tensors, name: str) -> Tensor:
    """W x + b; a weight of three axes is block-diagonal."""
    weight = tensors[f"{name}.weight"]
    matrix = block_diagonal(weight) if weight.ndim == 3 else weight
    return x @ matrix.T + tensors[f"{name}.bias"]


def activation(x: Tensor, name: str) -> Tensor:
    sigmoid = 1 / (1 + torch.exp(-x))
    half = torch.full_like(x, 0.5)
    return {
        "sigmoid": sigmoid,
        "silu": x * sigmoid,
        "relu": torch.where(x > 0, x, torch.zeros_like(x)),
        "gelu": x * half * (1 + torch.erf(x / 2**0.5)),
    }[name]


def layer_norm(x: Tensor, tensors: Tensors, name: str) -> Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    variance = (centred**2).mean(dim=-1, keepdim=True)
    return centred / (variance + 1e-6) ** 0.5 * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]


def gated(x: Tensor, tensors: Tensors, act: str = "silu", norm: bool = False) -> Tensor:
    """GLU, SwiGLU and Group FFN."""
    hidden = activation(affine(x, tensors, "w1"), act) * affine(x, tensors, "w2")
    if norm:
        hidden = layer_norm(hidden, tensors, "norm")
    return affine(hidden, tensors, "w3")


def convglu(x: Tensor, tensors: Tensors, skip_conv: bool = False) -> Tensor:
    both = affine(x, tensors, "fc1")
    hidden = both.shape[-1] // 2
    a, value = both[..., :hidden], both[..., hidden:]
    if not skip_conv:
        a = depthwise(a, tensors["dwconv.weight"], tensors["dwconv.bias"])
    return affine(activation(a, "gelu") * value, tensors, "fc2")


def convnext(x: Tensor, tensors: Tensors, skip_conv: bool = False) -> Tensor:
    """Both versions: V2 has a response norm, V1 a layer scale."""
    if not skip_conv:
        x = depthwise(x, tensors["dwconv.weight"], tensors["dwconv.bias"])
    hidden = activation(affine(layer_norm(x, tensors, "norm"), tensors, "fc1"), "gelu")
    if "grn.weight" in tensors:
        hidden = response_norm(hidden, tensors["grn.weight"], tensors["grn.bias"])
    y = affine(hidden, tensors, "fc2")
    return y * tensors["gamma"] if "gamma" in tensors else y


def response_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    images = []
    for image in x:
        norms = []
        for channel in image.flatten(0, 1).T:
            norms.append((channel**2).sum() ** 0.5)
        mean = sum(norms) / len(norms)
        responses = torch.stack([norm / (mean + 1e-6) for norm in norms])
        images.append(weight * (image * responses) + bias + image)
    return torch.stack(images)


def scheme(x: Tensor, tensors: Tensors, with_attention: bool) -> Tensor:
    y = affine(activation(affine(x, tensors, "fc1"), "gelu"), tensors, "fc2")
    if not with_attention:
        return y
    exponentials = torch.exp(tensors["balance"])
    share = exponentials / exponentials.sum()
    return share[0] * y + share[1] * covariance_attention(x, hidden=len(tensors["fc1.bias"]))


def covariance_attention(x: Tensor, hidden: int) -> Tensor:
    """Output channel i is the mean of all channels j, weighted by how they correlate with i."""
    images = []
    for image in x:
        channels = [channel.flatten() for channel in image.unbind(-1)]
        mixed = []
        for i in range(len(channels)):
            weights = [torch.exp((channels[i] * other).sum() / hidden**0.5) for other in channels]
            total = sum(w * other for w, other in zip(weights, channels, strict=True))
            mixed.append((total / sum(weights)).view(image.shape[:2]))
        images.append(torch.stack(mixed, dim=-1))
    return torch.stack(images)


def cheby_kan(x: Tensor, tensors: Tensors) -> Tensor:
    """With T_d(t) = cos(d arccos t), which no recurrence enters."""
    coefficients = tensors["coefficients"]
    angle = torch.arccos(torch.tanh(x))
    outputs = []
    for j in range(coefficients.shape[2]):
        total = torch.zeros_like(x[..., 0])
        for degree in range(coefficients.shape[0]):
            for i in range(coefficients.shape[1]):
                total = total + coefficients[degree, i, j] * torch.cos(degree * angle[..., i])
        outputs.append(total)
    return torch.stack(outputs, dim=-1)
