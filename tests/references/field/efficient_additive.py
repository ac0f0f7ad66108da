"""timm's EfficientAdditiveAttention of SwiftFormer, on a map of one column."""

from timm.models.swiftformer import EfficientAdditiveAttention

from tests.references.field import joint_through, through


def sequence(mixer, tokens):
    c = tokens.shape[-1]
    layer = EfficientAdditiveAttention(c, c)
    return through(layer, mixer, tokens.mT[..., None])[..., 0].mT


def reference(mixer, x):
    return sequence(mixer, x.flatten(1, 2)).reshape(x.shape)


def joint(mixer, x, prefix):
    return joint_through(sequence, mixer, x, prefix)


def macs(mixer, c, h, w):
    return h * w * (4 * c * c + c)
