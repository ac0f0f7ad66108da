"""GC ViT's global attention, window by window, with offsets looked up for each pair of tokens."""

import torch
import torch.nn.functional as F
from timm.models.gcvit import FeatureBlock

from tests.references.field import as_nchw, as_nhwc, attention, pointwise, through
from tests.references.field.window_attention import whole

CASES = [{}, {"window": 4, "num_heads": 3}, {"window": 2}]


def poolings(mixer):
    return sum(name.startswith("pool") for name, _ in mixer.global_block.blocks.named_children())


def reference(mixer, x):
    (b, h, w, c), side, heads = x.shape, mixer.window[0], mixer.attn.num_heads
    tensors = {
        name.removeprefix("global_block."): tensor
        for name, tensor in mixer.state_dict(keep_vars=True).items()
        if name.startswith("global_block.")
    }
    pooled = through(FeatureBlock(c, poolings(mixer)), tensors, as_nchw(x))
    if pooled.shape[-2:] != (side, side):
        pooled = F.interpolate(pooled, (side, side), mode="bicubic")
    query = as_nhwc(pooled).reshape(b, side * side, heads, c // heads).transpose(1, 2)
    padded = x.new_zeros(b, whole(h, side), whole(w, side), c)
    padded[:, :h, :w] = x
    rows, columns = (torch.arange(side * side) // side, torch.arange(side * side) % side)
    down, right = rows[:, None] - rows + side - 1, columns[:, None] - columns + side - 1
    table = mixer.attn.rel_pos.relative_position_bias_table
    bias = table[down * (2 * side - 1) + right].permute(2, 0, 1)
    out = torch.zeros_like(padded)
    for top in range(0, padded.shape[1], side):
        for left in range(0, padded.shape[2], side):
            place = (slice(None), slice(top, top + side), slice(left, left + side))
            kv = pointwise(mixer.attn.qkv, padded[place].flatten(1, 2))
            k, v = kv.reshape(b, -1, 2, heads, c // heads).permute(2, 0, 3, 1, 4)
            mixed = attention(query, k, v, bias).transpose(1, 2).flatten(2)
            out[place] = pointwise(mixer.attn.proj, mixed).unflatten(1, (side, side))
    return out[:, :h, :w]


def macs(mixer, c, h, w):
    side, query = mixer.window[0], 0
    tokens = whole(h, side) * whole(w, side)
    squeezed = mixer.global_block.blocks.conv1.se.fc1.out_channels
    for _ in range(max(1, poolings(mixer))):
        query += h * w * (9 * c + c * c) + 2 * c * squeezed
        if poolings(mixer):
            h, w = -(-h // 2), -(-w // 2)
    return query + tokens * (3 * c * c + 2 * side * side * c)
