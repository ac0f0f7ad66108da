"""Inputs, and networks in which every part matters; drawn from fixed seeds, in float64."""

import torch

from backbones import create_mixer
from backbones.checkpoints.behaviour import scaled


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
    network.double().eval()
    tensors = _parameters_and_statistics(network)
    for name, drawn in drawn_tensors(tensors, seed).items():
        tensors[name].data = drawn
    return network


def drawn_tensors(tensors, seed=0):
    """Values for the tensors of a network, by which activations keep their size at any depth."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _drawn(name, tensor, generator) for name, tensor in tensors.items()}


def _drawn(name, like, generator):
    if not like.is_floating_point():  # how many batches a norm has seen
        return torch.zeros_like(like, device="cpu")
    noise = torch.randn(like.shape, dtype=like.dtype, generator=generator)
    return scaled(name, noise)


def _parameters_and_statistics(module):
    statistics = ("running_mean", "running_var")
    buffers = {name: b for name, b in module.named_buffers() if name.endswith(statistics)}
    return dict(module.named_parameters()) | buffers


def build_mixer(name, dim=8, seed=0, **options):
    """A registered mixer, initialised by a fixed seed and then randomised."""
    torch.manual_seed(seed)
    return randomise(create_mixer(name, dim, **options), seed)
