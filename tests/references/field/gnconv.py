"""MMPretrain's gnConv of HorNet; its global filter by a Fourier transform that is written out."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.references.field import as_nchw, as_nhwc, depthwise, pointwise, through

CASES = [{}, {"order": 4, "kernel_size": 3, "scale": 0.5}, {"order": 3, "conv": "global_filter"}]


def reference(mixer, x):
    if mixer.grid_axes:
        return filtering(mixer, x)
    hornet = pytest.importorskip("mmpretrain.models.backbones.hornet")
    conv = {"type": "DW", "kernel_size": mixer.dwconv.kernel_size[0]}
    layer = hornet.gnConv(x.shape[-1], len(mixer.widths), conv, mixer.scale)
    return as_nhwc(through(layer, mixer, as_nchw(x)))


def filtering(mixer, x):
    """MMPretrain computes its filter in single precision."""
    parts, (h, w) = mixer.dwconv, x.shape[1:3]
    p, *q = pointwise(mixer.proj_in, x).split([mixer.widths[0], *mixer.widths], -1)
    q = torch.cat(q, -1)
    norms = [(norm.weight, norm.bias, 1e-6) for norm in (parts.pre_norm, parts.post_norm)]
    near, whole = F.layer_norm(q, q.shape[-1:], *norms[0]).chunk(2, -1)
    weights = mixer.at_size("dwconv.filter", (h, w))
    turned = torch.stack([depthwise(parts.dw, near), by_matrices(whole, weights)], -1).flatten(-2)
    factors = mixer.scale * F.layer_norm(turned, q.shape[-1:], *norms[1])
    for index, factor in enumerate(factors.split(mixer.widths, -1)):
        p = (pointwise(mixer.projs[index - 1], p) if index else p) * factor
    return pointwise(mixer.proj_out, p)


def by_matrices(x, weights):
    """Multiply the spectrum by the weights of its first half and their conjugates in the rest."""
    h, w = x.shape[1:3]
    rows, columns = (
        torch.exp(-2j * math.pi * torch.outer(torch.arange(n), torch.arange(n)).double() / n)
        for n in (h, w)
    )
    spectrum = torch.einsum("ki,lj,bijc->bklc", rows, columns, x + 0j) / math.sqrt(h * w)
    kept = spectrum[:, :, : w // 2 + 1] * torch.complex(weights[..., 0], weights[..., 1])
    # Columns of the half spectrum that stand for two count twice; the map is the real part.
    twice = torch.tensor([1.0 if n == 0 or 2 * n == w else 2.0 for n in range(w // 2 + 1)])
    back = columns[:, : w // 2 + 1].conj() * twice
    y = torch.einsum("ki,jl,bklc->bijc", rows.conj(), back, kept)
    return y.real / math.sqrt(h * w)


def macs(mixer, c, h, w):
    order = len(mixer.projs) + 1
    widths = [c // 2**i for i in range(order)]
    between = sum(wide * wide // 2 for wide in widths[:-1])
    linear = h * w * (c * (widths[-1] + sum(widths)) + between + c * c)
    if not mixer.grid_axes:
        return linear + h * w * mixer.dwconv.kernel_size[0] ** 2 * sum(widths)
    half = sum(widths) // 2
    products = 4 * h * (w // 2 + 1) * half  # of complex numbers
    transforms = 2 * h * w * half * math.log2(h * w)
    return round(linear + h * w * 9 * half + products + transforms)
