"""timm's WindowAttention on windows that are gathered by their tokens."""

import torch
from timm.models.swin_transformer import WindowAttention

from tests.references.field import through

CASES = [{}, {"window": 3, "num_heads": 4}]


def whole(length, side):
    """Length up to the next multiple of a side."""
    return -(-length // side) * side


def reference(mixer, x):
    (b, h, w, c), side = x.shape, mixer.attn.window_size[0]
    height, width = whole(h, side), whole(w, side)
    padded = x.new_zeros(b, height, width, c)
    padded[:, :h, :w] = x
    layer = WindowAttention(c, mixer.attn.num_heads, window_size=side)
    out = torch.zeros_like(padded)
    down, right = (mixer.shift if length > side else 0 for length in (h, w))
    for top in range(down, height + down, side):
        for left in range(right, width + right, side):
            rows, columns = torch.arange(top, top + side), torch.arange(left, left + side)
            # Tokens of both ends of an axis do not see each other.
            ends = 2 * (rows >= height)[:, None] + (columns >= width)
            mask = -100.0 * (ends.flatten()[:, None] != ends.flatten())
            place = (slice(None), rows[:, None] % height, columns % width)
            mixed = through(layer, mixer.attn, padded[place].flatten(1, 2), mask[None].double())
            out[place] = mixed.unflatten(1, (side, side))
    return out[:, :h, :w]


def macs(mixer, c, h, w):
    side = mixer.attn.window_size[0]
    tokens = whole(h, side) * whole(w, side)
    return tokens * (4 * c * c + 2 * side * side * c)
