"""EfficientViT's attention with a weight per pair of tokens, head by head."""

import torch

from tests.references.field import depthwise, pointwise

CASES = [{}, {"num_heads": 3, "scales": [3, 5]}, {"scales": []}]


def grouped(conv, x):
    """A 1x1 convolution in groups."""
    parts = zip(x.chunk(conv.groups, -1), conv.weight.flatten(1).chunk(conv.groups), strict=True)
    return torch.cat([part @ weight.T for part, weight in parts], -1)


def both(mixer, x, prefix):
    base, of_prefix = pointwise(mixer.qkv, x), pointwise(mixer.qkv, prefix)
    scales = [base] + [grouped(g, depthwise(d, base)) for d, g in mixer.aggreg]
    heads = []
    for scale in scales:
        tokens = torch.cat([of_prefix, scale.flatten(1, 2)], 1)
        for head in tokens.chunk(mixer.num_heads, -1):
            q, k, v = head.chunk(3, -1)
            weights = q.clamp(min=0) @ k.clamp(min=0).mT
            heads.append(weights @ v / (weights.sum(-1, keepdim=True) + 1e-15))
    y, norm = pointwise(mixer.proj, torch.cat(heads, -1)), mixer.norm
    y = (y - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias
    return y[:, prefix.shape[1] :].reshape(x.shape), y[:, : prefix.shape[1]]


def reference(mixer, x):
    return both(mixer, x, x.new_empty(len(x), 0, x.shape[-1]))[0]


joint = both


def macs(mixer, c, h, w):
    n, d, scales = h * w, c // mixer.num_heads, 1 + len(mixer.aggreg)
    convolved = sum(part[0].kernel_size[0] ** 2 * 3 * c + 3 * c * d for part in mixer.aggreg)
    return n * (3 * c * c + convolved + scales * (2 * c * (d + 1) + c * c))
