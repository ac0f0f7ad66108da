"""Stand-ins for released checkpoints: the authors' names and shapes, random values in them."""

import math

import numpy as np
import torch


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


def double(state):
    return {name: value.double() for name, value in state.items()}


def assert_equal(found, expected):
    """Within 1e-7 of the largest value, which float64 leaves far behind and a slip does not."""
    bound = 1e-7 * expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)
