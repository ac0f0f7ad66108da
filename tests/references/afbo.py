"""AFBO written out from its equations with explicit matrices and loops; slow, and nothing shared.

Source: Wu et al., ICLR 2025, Eq. 4 (the operation), 6 (GCCM), 7 (OCCM with a window of K groups).
Axes: B images, H W map, d input channels, h hidden channels; groups are numbered from 0.
"""

import torch
from torch import Tensor


def gccm_matrix(weights: Tensor, rounds: int, pairing: str) -> Tensor:
    """(G, h / (G rounds), d / G) -> (h, d): block s G + w has W[w] in its group's columns."""
    num_groups, rows, columns = weights.shape
    matrix = torch.zeros(num_groups * rounds * rows, num_groups * columns, dtype=weights.dtype)
    for s in range(rounds):
        for w in range(num_groups):
            if pairing == "cyclic":
                group = (w + s) % num_groups
            else:
                group = [w, num_groups - 1 - w][s]
            for r in range(rows):
                for c in range(columns):
                    matrix[(s * num_groups + w) * rows + r, group * columns + c] = weights[w, r, c]
    return matrix


def occm_matrix(weights: list[Tensor], dim: int, hidden: int, window: int) -> Tensor:
    """Run g of the h rows holds W[g], whose columns follow the groups g, g + 1, ... cyclically."""
    num_groups = len(weights)
    runs_in, runs_out = cut(dim, num_groups), cut(hidden, num_groups)
    matrix = torch.zeros(hidden, dim, dtype=weights[0].dtype)
    for g, weight in enumerate(weights):
        read = [c for k in range(window) for c in runs_in[(g + k) % num_groups]]
        assert weight.shape == (len(runs_out[g]), len(read))
        for r, row in enumerate(runs_out[g]):
            for c, column in enumerate(read):
                matrix[row, column] = weight[r, c]
    return matrix


def cut(width: int, num_groups: int) -> list[list[int]]:
    """Channels of each group: runs that differ by at most one, the longer ones first."""
    sizes = [width // num_groups + (g < width % num_groups) for g in range(num_groups)]
    runs, channels = [], list(range(width))
    for size in sizes:
        runs.append(channels[:size])
        channels = channels[size:]
    return runs


def around(x: Tensor, i: int, j: int, half: int) -> list[tuple[int, int, Tensor]]:
    """Offsets and values (B, C) of the neighbours of one position that lie inside the map."""
    height, width = x.shape[1:3]
    return [
        (u, v, x[:, i + u, j + v])
        for u in range(-half, half + 1)
        for v in range(-half, half + 1)
        if 0 <= i + u < height and 0 <= j + v < width
    ]


def spatial(x: Tensor, name: str, kernel_size: int, weight: Tensor, bias: Tensor) -> Tensor:
    """One spatial model on (B, H, W, C), position by position."""
    half = kernel_size // 2
    statistics = torch.stack([x.max(dim=-1).values, x.mean(dim=-1)], dim=-1)
    rows = []
    for i in range(x.shape[1]):
        row = []
        for j in range(x.shape[2]):
            if name == "none":
                value = x[:, i, j]
            elif name == "dw":
                value = bias + sum(
                    z * weight[:, 0, u + half, v + half] for u, v, z in around(x, i, j, half)
                )
            elif name == "conv":
                value = bias + sum(
                    z @ weight[:, :, u + half, v + half].T for u, v, z in around(x, i, j, half)
                )
            elif name == "max":
                value = torch.stack([z for _, _, z in around(x, i, j, half)]).max(dim=0).values
            elif name == "avg":
                value = torch.stack([z for _, _, z in around(x, i, j, half)]).mean(dim=0)
            else:
                assert name == "sa"
                logit = sum(
                    z @ weight[0, :, u + 3, v + 3] for u, v, z in around(statistics, i, j, 3)
                )
                value = x[:, i, j] / (1 + torch.exp(-logit))[:, None]
            row.append(value)
        rows.append(torch.stack(row, dim=1))
    return torch.stack(rows, dim=1)


def depthwise(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """(B, H, W, h) with kernels (h, 1, k, k), zeros around the map."""
    return spatial(x, "dw", kernel.shape[-1], kernel, bias)


ACTIVATIONS = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    "relu": lambda x: x * (x > 0),
}


def scfbo(
    x: Tensor,
    prefix: Tensor,
    tensors: dict[str, Tensor],
    *,
    cm_a: str,
    cm_b: str,
    window: int | None = None,
    rounds: int = 2,
    pairing: str = "anti",
    sm: str = "dw",
    kernel_size: int = 3,
    order: str = "cs",
    act: str = "silu",
    act_on: str = "a",
) -> tuple[Tensor, Tensor]:
    """The mixer with the parameters of ours; prefix tokens skip the spatial models."""

    def affine(branch: str) -> tuple[Tensor, Tensor]:
        kind = {"a": cm_a, "b": cm_b}[branch]
        if kind == "shared":
            return affine("a")
        name, bias = f"cm_{branch}.weight", tensors.get(f"cm_{branch}.bias", 0)
        if kind == "dense":
            return tensors[name], bias
        if kind == "block":
            return gccm_matrix(tensors[name], 1, "anti"), bias
        if kind == "gccm":
            return gccm_matrix(tensors[name], rounds, pairing), bias
        weights = [tensors[f"{name}s.{g}"] for g in range(9) if f"{name}s.{g}" in tensors]
        width = max(1, len(weights) - 1) if window is None else window
        hidden = sum(len(weight) for weight in weights)
        return occm_matrix(weights, x.shape[-1], hidden, width), bias

    def branch_map(branch: str) -> Tensor:
        matrix, bias = affine(branch)
        name = f"sm_{branch}"
        weight = tensors.get(f"{name}.weight", tensors.get(f"{name}.conv.weight"))
        model = (sm, kernel_size, weight, tensors.get(f"{name}.bias", 0))
        if order == "sc":
            return spatial(x, *model) @ matrix.T + bias
        return spatial(x @ matrix.T + bias, *model)

    def combine(a: Tensor, b: Tensor) -> Tensor:
        function = ACTIVATIONS[act]
        product = {
            "a": lambda: function(a) * b,
            "b": lambda: a * function(b),
            "ab": lambda: function(a) * function(b),
            "post": lambda: function(a * b),
        }[act_on]()
        return product @ tensors["proj.weight"].T + tensors.get("proj.bias", 0)

    (matrix_a, bias_a), (matrix_b, bias_b) = affine("a"), affine("b")
    prefixes = (prefix @ matrix_a.T + bias_a, prefix @ matrix_b.T + bias_b)
    return combine(branch_map("a"), branch_map("b")), combine(*prefixes)
