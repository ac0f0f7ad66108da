"""Uniform B-splines by truncated powers, one pair of layer and spline at a time."""

import math

import torch
import torch.nn.functional as F

CASES = [{}, {"intervals": 3, "degree": 2, "expansion": 0.5}]


def spline(x, start, step, degree):
    """The B-spline of this degree that begins at ``start``."""
    u, total = (x - start) / step, torch.zeros_like(x)
    for i in range(degree + 2):
        total = total + (-1) ** i * math.comb(degree + 1, i) * (u - i).clamp(min=0) ** degree
    return torch.where(u < degree + 1, total / math.factorial(degree), 0.0)


def reference(mixer, x):
    for layer in mixer.layers:
        step, y = 2 / layer.intervals, F.silu(x) @ layer.base_weight.T
        for m in range(layer.intervals + layer.degree):
            values = spline(x, -1 + (m - layer.degree) * step, step, layer.degree)
            y = y + values @ (layer.spline_scaler * layer.spline_weight[..., m]).T
        x = y
    return x


def macs(mixer, c, h, w):
    return (
        h
        * w
        * sum(
            layer.base_weight.numel() * (1 + layer.intervals + layer.degree)
            for layer in mixer.layers
        )
    )
