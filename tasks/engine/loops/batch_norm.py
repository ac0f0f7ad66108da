"""Running statistics of batch norms over several processes that each normalise by their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@torch.no_grad()
def share_statistics(model: nn.Module, reduce: Callable[..., Tensor]) -> None:
    """Give all processes the mean of their running means and variances.

    It is asked after every step: being linear in what the batches add, the statistics are then
    those of timm's ``distribute_bn``, which takes the mean when an epoch ends, and a checkpoint of
    one process holds those of all.

    Args:
        model: Its synchronised batch norms, and those that keep no statistics, are left alone.
        reduce: ``Strategy.reduce`` of Lightning.
    """
    statistics = [
        value
        for module in model.modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
        for value in (module.running_mean, module.running_var)
        if value is not None
    ]
    if not statistics:
        return
    # One message for all of them, in float32 at least.
    tensors = [value.to(torch.promote_types(value.dtype, torch.float32)) for value in statistics]
    flat = torch.cat([value.flatten() for value in tensors])
    mean = reduce(flat, reduce_op="mean")
    for value, part in zip(statistics, mean.split([v.numel() for v in statistics]), strict=True):
        value.copy_(part.view_as(value))
