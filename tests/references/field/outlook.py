"""timm's OutlookAttention."""

from timm.models.volo import OutlookAttention

from tests.references.field import through

CASES = [{}, {"num_heads": 3, "kernel_size": 5, "stride": 3, "qkv_bias": True}, {"stride": 1}]


def reference(mixer, x):
    side, bias = mixer.side, mixer.v.bias is not None
    layer = OutlookAttention(
        x.shape[-1], mixer.num_heads, side, side // 2, mixer.stride, qkv_bias=bias
    )
    return through(layer, mixer, x)


def macs(mixer, c, h, w):
    places, heads = mixer.side**2, mixer.num_heads
    windows = -(-h // mixer.stride) * -(-w // mixer.stride)
    return 2 * h * w * c * c + windows * (places**2 * heads * c + places**2 * c)
