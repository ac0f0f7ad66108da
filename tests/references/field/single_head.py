"""timm's SHSA."""

from timm.models.shvit import SHSA

from tests.references.field import as_nchw, as_nhwc, through

CASES = [{}, {"ratio": 0.5, "qk_dim": 6}]
NAMES = {
    f"{part}.{ours}.": f"{theirs}.{name}."
    for part, theirs in (("qkv", "qkv"), ("proj", "proj.1"))
    for ours, name in (("conv", "c"), ("norm", "bn"))
}


def reference(mixer, x):
    layer = SHSA(x.shape[-1], mixer.widths[0], mixer.parts[0])
    return as_nhwc(through(layer, mixer, as_nchw(x), names=NAMES))


def macs(mixer, c, h, w):
    n, (d, _, part) = h * w, mixer.widths
    return n * (part * (2 * d + part) + n * (d + part) + c * c)
