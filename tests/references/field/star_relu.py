"""timm's Mlp of MetaFormer with its StarReLU."""

from timm.layers import Mlp
from timm.models.metaformer import StarReLU

from tests.references.field import through


def reference(mixer, x):
    layer = Mlp(x.shape[-1], 4 * x.shape[-1], act_layer=StarReLU)
    return through(layer, mixer, x, names={"star.": "act."})


def macs(mixer, c, h, w):
    return h * w * 8 * c * c
