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


def depthwise(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """(B, H, W, h) with kernels (h, 1, k, k), zeros around the map."""
    height, width = x.shape[1:3]
    half = kernel.shape[-1] // 2
    rows = []
    for i in range(height):
        row = []
        for j in range(width):
            total = bias.expand(len(x), -1)
            for u in range(-half, half + 1):
                for v in range(-half, half + 1):
                    if 0 <= i + u < height and 0 <= j + v < width:
                        total = total + x[:, i + u, j + v] * kernel[:, 0, u + half, v + half]
            row.append(total)
        rows.append(torch.stack(row, dim=1))
    return torch.stack(rows, dim=1)


def afbo(
    x: Tensor, prefix: Tensor, tensors: dict[str, Tensor], *, window: int, rounds: int, pairing: str
) -> tuple[Tensor, Tensor]:
    """The mixer with the parameters of ours; prefix tokens skip the convolutions.

    Args:
        x: (B, H, W, d).
        prefix: (B, P, d).
        tensors: Parameters by their names.
        window: K of OCCM.
        rounds: Blocks of GCCM that share a weight.
        pairing: Pairing of GCCM.
    """
    weights = [tensors[f"cm_a.weights.{g}"] for g in range(8) if f"cm_a.weights.{g}" in tensors]
    hidden, dim = len(tensors["cm_a.bias"]), x.shape[-1]
    matrix_a = occm_matrix(weights, dim, hidden, window)
    matrix_b = gccm_matrix(tensors["cm_b.weight"], rounds, pairing)

    def combine(a: Tensor, b: Tensor) -> Tensor:
        silu = a / (1 + torch.exp(-a))
        return (silu * b) @ tensors["proj.weight"].T + tensors["proj.bias"]

    def maps(tokens: Tensor) -> tuple[Tensor, Tensor]:
        a = tokens @ matrix_a.T + tensors["cm_a.bias"]
        return a, tokens @ matrix_b.T + tensors["cm_b.bias"]

    a, b = maps(x)
    a = depthwise(a, tensors["sm_a.weight"], tensors["sm_a.bias"])
    b = depthwise(b, tensors["sm_b.weight"], tensors["sm_b.bias"])
    return combine(a, b), combine(*maps(prefix))
