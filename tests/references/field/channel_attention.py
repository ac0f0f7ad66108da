"""timm's ChannelAttention of DaViT."""

from timm.models.davit import ChannelAttention

from tests.references.field import joint_through, through

CASES = [{}, {"num_heads": 3, "qkv_bias": False}]


def sequence(mixer, tokens):
    layer = ChannelAttention(tokens.shape[-1], mixer.num_heads, mixer.qkv.bias is not None)
    return through(layer, mixer, tokens)


def reference(mixer, x):
    return sequence(mixer, x.flatten(1, 2)).reshape(x.shape)


def joint(mixer, x, prefix):
    return joint_through(sequence, mixer, x, prefix)


def macs(mixer, c, h, w):
    return h * w * (4 * c * c + 2 * c * c // mixer.num_heads)
