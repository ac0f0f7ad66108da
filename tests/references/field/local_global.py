"""EdgeViT's three steps, with convolutions as sums of shifted maps and a loop over offsets."""

import torch.nn.functional as F

from tests.references.field import attention, depthwise, pointwise

DIM = 36
CASES = [{}, {"sampling": 2, "num_heads": 3}, {"sampling": 1}]


def reference(mixer, x):
    near = 0.0
    if mixer.local is not None:
        local = mixer.local
        near = pointwise(local.conv2, depthwise(local.attn, pointwise(local.conv1, x)))
    return near + sampled(mixer.attn, x + near)


def sampled(attn, x):
    (b, h, w, c), step, heads = x.shape, attn.sampling, attn.num_heads
    y = x[:, ::step, ::step]
    rows, columns = y.shape[1:3]
    qkv = pointwise(attn.qkv, y.flatten(1, 2)).reshape(b, -1, 3, heads, c // heads)
    y = attention(*qkv.permute(2, 0, 3, 1, 4)).transpose(1, 2).reshape(b, rows, columns, c)
    if step > 1:
        spread = x.new_zeros(b, rows * step, columns * step, c)
        for i in range(step):
            for j in range(step):
                spread[:, i::step, j::step] = y * attn.spread.weight[:, 0, i, j]
        spread = (spread + attn.spread.bias)[:, :h, :w]
        y = F.layer_norm(spread, (c,), attn.norm.weight, attn.norm.bias)
    return pointwise(attn.proj, y)


def macs(mixer, c, h, w):
    n, step = h * w, mixer.attn.sampling
    m = -(-h // step) * -(-w // step)
    local = n * (2 * c * c + 25 * c) if step > 1 else 0
    spread = m * step * step * c if step > 1 else 0
    return local + 3 * m * c * c + 2 * m * m * c + spread + n * c * c
