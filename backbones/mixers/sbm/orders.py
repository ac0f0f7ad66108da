"""The products of a bilinear mapping, in the order of the paper or in the cheaper one.

W_s = write^T read acts on tokens, W_c on channels, so that the two may change places.

Axes: B images, n tokens, C channels, m rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.autocast_mode import is_autocast_available

from backbones.layers.graph_sizes import is_any_size


def map_tokens(
    x: Tensor, read: Tensor, write: Tensor, proj: nn.Linear, size: tuple[int, int]
) -> Tensor:
    """write^T read x W_c + b, in the order that takes less.

    Args:
        x: (B, n, C).
        read: (B, m, n).
        write: (B, m, n).
        proj: W_c and b.
        size: (h, w) of the map, maybe symbols.

    Returns:
        (B, n, C).
    """
    # An exported graph serves any size, where the second order is never much worse.
    few = not is_any_size(size) and size[0] * size[1] <= read.shape[1]
    order = paper_order if few or is_counted(x) else latent_order
    return order(x, read, write, proj)


def paper_order(x: Tensor, read: Tensor, write: Tensor, proj: nn.Linear) -> Tensor:
    """Eq. 2 as it is written: W_c on all n tokens."""
    return proj(torch.bmm(write.mT, torch.bmm(read, x)))


def latent_order(x: Tensor, read: Tensor, write: Tensor, proj: nn.Linear) -> Tensor:
    """W_c on the m latent tokens, before they are written to all."""
    latent = F.linear(torch.bmm(read, x), proj.weight)
    return torch.baddbmm(proj.bias, write.mT, latent)


def is_counted(x: Tensor) -> bool:
    """Whether shapes or a trace stand for a run: multiply-adds are then those of the paper's order.

    W_c on n tokens is what Eq. 3 and Table 1 count.
    """
    return x.is_meta or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def product_type(tensor: Tensor) -> torch.dtype:
    """Type that matrix products take a tensor in."""
    device = tensor.device.type
    if tensor.dtype == torch.float64 or not is_autocast_available(device):
        return tensor.dtype
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype
