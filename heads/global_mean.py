"""Mean of a loss over all processes of a training, where each has another number of terms."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def global_mean(total: Tensor, count: Tensor) -> Tensor:
    """Return ``total / count``; in training times the processes over the count of all of them.

    DDP averages gradients over processes, so that two processes with half the batch train as one.
    All processes must call it in the same order, also with a count of 0, which gives 0. Without
    gradients, as in evaluation, nothing is exchanged, as processes evaluate different numbers of
    batches.

    Args:
        total: Sum of the terms of this process, a scalar.
        count: Their number, or the sum of their weights, a scalar.
    """
    if torch.is_grad_enabled() and dist.is_available() and dist.is_initialized():
        count = count.detach().to(total.dtype, copy=True)
        dist.all_reduce(count)
        count = count / dist.get_world_size()
    return total / torch.where(count > 0, count, 1)
