"""Inputs, and networks in which every part matters; drawn from fixed seeds, in float64."""

import math

import torch

from backbones import create_mixer


def tokens(*shape, seed=1):
    """Standard normal values of a shape such as (B, H, W, C)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def images(*size, batch=1):
    """(B, 3, H, W)."""
    return tokens(batch, 3, *size)


def randomise(module, seed=0, scale=0.3):
    """Move parameters and statistics away from zeros, ones and symmetry; for single layers."""
    generator = torch.Generator().manual_seed(seed)
    module.double().eval()
    for name, tensor in _parameters_and_statistics(module).items():
        noise = torch.randn(tensor.shape, dtype=torch.float64, generator=generator)
        if name.endswith("running_var"):
            tensor.data = 0.5 + noise.square()
        else:
            tensor.data = tensor.data + scale * noise
    return module


def randomise_network(network, seed=0):
    """Draw parameters and statistics anew; activations keep their size at any depth."""
    generator = torch.Generator().manual_seed(seed)
    network.double().eval()
    for name, tensor in _parameters_and_statistics(network).items():
        noise = torch.randn(tensor.shape, dtype=torch.float64, generator=generator)
        if name.endswith("running_var"):
            tensor.data = 0.5 + noise.square()
        elif tensor.numel() > len(tensor):
            is_table = tensor.ndim not in (2, 4) and "weight" not in name
            fan_in = 1 if is_table else tensor[0].numel()
            tensor.data = noise / math.sqrt(fan_in)
        else:
            tensor.data = 0.8 + 0.2 * noise if name.endswith("weight") else 0.3 * noise
    return network


def _parameters_and_statistics(module):
    statistics = ("running_mean", "running_var")
    buffers = {name: b for name, b in module.named_buffers() if name.endswith(statistics)}
    return dict(module.named_parameters()) | buffers


def build_mixer(name, dim=8, seed=0, **options):
    """A registered mixer, initialised by a fixed seed and then randomised."""
    torch.manual_seed(seed)
    return randomise(create_mixer(name, dim, **options), seed)
