"""timm's LocallyGroupedAttn and GlobalSubSampleAttn of Twins."""

from timm.models.twins import GlobalSubSampleAttn, LocallyGroupedAttn

from tests.references.field import through
from tests.references.field.sra import macs as reduced_macs
from tests.references.field.window_attention import whole

CASES = [
    {},
    {"window": 4, "num_heads": 3},
    {"block": 1},
    {"block": 3, "reduction": 2, "num_heads": 3},
]


def reference(mixer, x):
    (_, h, w, c), attn = x.shape, mixer.attn
    if hasattr(attn, "window"):
        layer = LocallyGroupedAttn(c, attn.num_heads, ws=attn.window[0])
    else:
        layer = GlobalSubSampleAttn(c, attn.num_heads, sr_ratio=attn.reduce.sr.kernel_size[0])
    names = {"attn.": "", "reduce.": ""}
    return through(layer, mixer, x.flatten(1, 2), (h, w), names=names).reshape(x.shape)


def macs(mixer, c, h, w):
    if not hasattr(mixer.attn, "window"):
        return reduced_macs(mixer.attn, c, h, w)
    side = mixer.attn.window[0]
    padded = whole(h, side) * whole(w, side)
    return padded * (3 * c * c + 2 * side * side * c) + h * w * c * c
