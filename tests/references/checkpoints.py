"""Made-up checkpoints of given names and shapes, in which every tensor matters."""

import math

import torch


def pair(name, *shape):
    """A weight and its bias."""
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def fill(shapes, seed=0):
    """Random tensors: z / sqrt(fan in), norms 1 + 0.1 z, variances about 1, vectors 0.3 z.

    In float32, as checkpoints are, so that a network of float64 holds the same numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        z = torch.randn(shape, generator=generator)
        if name.endswith("num_batches_tracked"):
            z = torch.tensor(7)
        elif name.endswith("running_var"):
            z = 1 + 0.1 * z.abs()
        elif "norm" in name and name.endswith(".weight"):
            z = 1 + 0.1 * z
        elif len(shape) > 1:
            z = z / math.sqrt(math.prod(shape[1:]))
        else:
            z = 0.3 * z
        tensors[name] = z
    return tensors


def in_float64(tensors):
    return {name: value.double() for name, value in tensors.items()}
