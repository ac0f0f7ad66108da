"""Made-up checkpoints of given names and shapes, in which every tensor matters."""

import math

import numpy as np
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


def checkpoint(shapes):
    """Tensors at which every part of a network matters, tensor i drawn from RandomState(i).

    Matrices keep the size of their input, scales lie around 1, statistics away from 0 and 1.
    """
    state = {}
    for number, (name, shape) in enumerate(shapes):
        noise = torch.from_numpy(np.array(np.random.RandomState(number).standard_normal(shape)))
        if name.endswith("num_batches_tracked"):
            state[name] = torch.tensor(1)
        elif name.endswith("running_var"):
            state[name] = (0.5 + noise.abs()).float()
        elif name.endswith(".weight") and len(shape) > 1:
            state[name] = (noise / math.sqrt(math.prod(shape[1:]))).float()
        else:
            centre = 0.0 if name.endswith((".bias", "running_mean", ".offset")) else 1.0
            state[name] = (centre + 0.1 * noise).float()
    return state


def assert_equal(found, expected):
    """Within 1e-7 of the largest value, which float64 leaves far behind and a slip does not."""
    bound = 1e-7 * expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)
