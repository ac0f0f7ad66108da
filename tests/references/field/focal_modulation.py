"""timm's FocalModulation."""

from timm.models.focalnet import FocalModulation

from tests.references.field import as_nchw, as_nhwc, through

CASES = [{}, {"levels": 3, "kernel_size": 5, "normalise": True}]


def reference(mixer, x):
    sides = [conv.kernel_size[0] for conv in mixer.focal_layers]
    layer = FocalModulation(x.shape[-1], sides[0], len(sides), normalize_modulator=mixer.normalise)
    names = {f"focal_layers.{level}.": f"focal_layers.{level}.0." for level in range(len(sides))}
    return as_nhwc(through(layer, mixer, as_nchw(x), names=names))


def macs(mixer, c, h, w):
    levels, k = len(mixer.focal_layers), mixer.focal_layers[0].kernel_size[0]
    kernels = sum((k + 2 * level) ** 2 for level in range(levels))
    return h * w * (c * (2 * c + levels + 1) + kernels * c + c * c + c * c)
