"""Results of a fast module by its operators and without them; importing this loads none."""

import contextlib
import copy

import torch

from backbones.fast import switched_off


@torch.enable_grad()
def both_ways(module, *inputs, call=lambda module, *inputs: module(*inputs)):
    """Return outputs, all gradients and buffers, by the operators and without them."""
    results = []
    for is_off in (False, True):
        own = copy.deepcopy(module)
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        with switched_off() if is_off else contextlib.nullcontext():
            x = leaves[0] if leaves[0].ndim == 4 else leaves[0][:, :1, None]
            assert own.is_fast(x) is not is_off
            found = call(own, *leaves)
        outputs = found if isinstance(found, tuple) else (found,)
        generator = torch.Generator().manual_seed(1)
        probes = [torch.randn(y.shape, generator=generator).to(y) for y in outputs]
        gradients = torch.autograd.grad(outputs, [*leaves, *own.parameters()], probes)
        results.append([*outputs, *gradients, *own.buffers()])
    return results
