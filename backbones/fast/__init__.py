"""Fast forms of mixers and layers, applied to a built network from outside.

    network = fast(create_backbone("deit_t_afbo", fast=False))
    network = plain(network)

``fast`` replaces modules by subclasses that share their parameters and compute the same to
rounding, as torchtitan's model converters do. ``base`` has their one base class, which decides per
call. ``cpu`` has the forms that call compiled operators, ``torch.ops.mixerlab.<name>``, ``torch``
the forms in torch's operations, and ``triton`` kernels for GPUs.

`make install` compiles ``cpu/csrc`` if it finds a compiler (``build``); ``library`` loads the
result. ``MIXERLAB_KERNELS=off`` in the environment switches all operators off, ``with
switched_off():`` all fast forms in one thread. A file of a form states what it buys as a ratio of
times with and without it, on one thread of the machine that it names.
"""

from backbones.fast.base import FastModule, fast, operators_serve, plain
from backbones.fast.library import is_available, status
from backbones.layers.eager import switched_off

__all__ = [
    "FastModule",
    "fast",
    "is_available",
    "operators_serve",
    "plain",
    "status",
    "switched_off",
]
