"""timm's MultiQueryAttention2d."""

from timm.layers.attention2d import MultiQueryAttention2d

from tests.references.field import as_nchw, as_nhwc, through

CASES = [{}, {"num_heads": 2, "key_dim": 5, "stride": 1}, {"stride": 2, "kernel_size": 5}]


def reference(mixer, x):
    key_dim, side, stride = mixer.key[-1].out_channels, 3, 1
    names = {"query.": "query.proj.", "proj.": "output.proj."}
    names |= {f"{part}.{len(mixer.key) - 1}.": f"{part}.proj." for part in ("key", "value")}
    if len(mixer.key) > 1:
        conv = mixer.key[0].conv
        side, stride = conv.kernel_size[0], conv.stride[0]
        names |= {f"{part}.0.conv.": f"{part}.down_conv." for part in ("key", "value")}
        names |= {f"{part}.0.norm.": f"{part}.norm." for part in ("key", "value")}
    layer = MultiQueryAttention2d(
        x.shape[-1],
        num_heads=mixer.num_heads,
        key_dim=key_dim,
        value_dim=key_dim,
        kv_stride=stride,
        dw_kernel_size=side,
    )
    return as_nhwc(through(layer, mixer, as_nchw(x), names=names))


def macs(mixer, c, h, w):
    n, m, wide = h * w, h * w, mixer.query.out_channels
    reducing = 0
    if len(mixer.key) > 1:
        side, stride = mixer.key[0].conv.kernel_size[0], mixer.key[0].conv.stride[0]
        m = -(-h // stride) * -(-w // stride)
        reducing = 2 * m * side * side * c
    keys = mixer.key[-1].out_channels
    return 2 * n * c * wide + reducing + 2 * m * c * keys + 2 * n * m * wide
