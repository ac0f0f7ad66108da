"""The plain reference of LVT."""

from tests.references.field import as_nchw, as_nhwc
from tests.references.lvt import Network

DIM = 64
CASES = [{}, {"reduction": 2, "steps": 1}, {"reduction": 1, "steps": 3}]
NAMES = {"atrous": "ds", "reduce": "sr"}


def reference(mixer, x):
    tensors = {}
    for name, tensor in mixer.named_parameters():
        part, _, key = name.partition(".")
        tensors[f"m.{NAMES.get(part, part)}.{key}"] = tensor
    reduction = 1 if mixer.reduce is None else mixer.reduce.kernel_size[0]
    return as_nhwc(Network(tensors, mixer.steps).rasa(as_nchw(x), "m", reduction))


def macs(mixer, c, h, w):
    side = 1 if mixer.reduce is None else mixer.reduce.kernel_size[0]
    n, m = h * w, (h // side) * (w // side)
    reducing = m * side * side * c * c if side > 1 else 0
    once = 2 * n * c * c + 3 * 9 * n * c + reducing + 2 * m * c * c + 2 * n * m * c
    return mixer.steps * once
