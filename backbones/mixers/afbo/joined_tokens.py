"""Map and class tokens of the operation in joint products, where no gradient is recorded.

One token by itself costs a product as much time as several dozen do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def mix_joined(
    x: Tensor,
    prefix: Tensor,
    mappings: tuple[nn.Module, nn.Module],
    spatial: tuple[nn.Module, nn.Module],
    activate: Callable[[Tensor, str], Tensor],
    project: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """W3 (act(SM_a(CM_a(x))) * SM_b(CM_b(x))) + b3 of a map, without SM of the tokens beside it.

    Args:
        x: (B, H, W, C).
        prefix: (B, P, C).
        mappings: CM_a and CM_b, each with weights of its own.
        spatial: SM_a and SM_b.
        activate: The activation in a place, "a" or "b"; may overwrite.
        project: What follows the product.

    Returns:
        (B, H, W, C) and (B, P, C).
    """
    size = x.shape[:-1]
    count = size.numel()
    rows = torch.cat([x.flatten(0, 2), prefix.flatten(0, 1)])
    product = mappings[0](rows)
    a = activate(spatial[0](product[:count].unflatten(0, size)), "a")
    prefix_a = activate(product[count:].clone(), "a")
    product = mappings[1](rows)
    b = activate(spatial[1](product[:count].unflatten(0, size)), "b")
    prefix_b = activate(product[count:], "b")
    torch.mul(a.flatten(0, 2), b.flatten(0, 2), out=product[:count])
    torch.mul(prefix_a, prefix_b, out=product[count:])
    y = project(product)
    return y[:count].unflatten(0, size), y[count:].view(prefix.shape)
