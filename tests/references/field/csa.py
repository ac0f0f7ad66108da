"""The plain reference of LVT."""

from tests.references.field import as_nchw, as_nhwc
from tests.references.lvt import Network

DIM = 64
NAMES = {"coefficients": "m.attn", "values": "m.weight", "proj": "m.proj"}


def reference(mixer, x):
    tensors = {
        f"{theirs}.{key}": tensor
        for ours, theirs in NAMES.items()
        for key, tensor in getattr(mixer, ours).named_parameters()
    }
    return as_nhwc(Network(tensors, 1).csa(as_nchw(x), "m"))


def macs(mixer, c, h, w):
    windows, heads = -(-h // 2) * -(-w // 2), c // 32
    return windows * (9 * c * c + 81 * heads * c + 81 * c) + h * w * c * c
