"""Outer products of generated rows, one head and token at a time."""

import math

import torch
import torch.nn.functional as F

CASES = [{}, {"tied": True, "expansion": 0.5}, {"num_heads": 3}]


def mixed(mixer, tokens):
    n, c = tokens.shape[1:]
    wave = torch.zeros(n, c, dtype=torch.float64)
    for place in range(n):
        for channel in range(c):
            function = math.cos if channel % 2 else math.sin
            wave[place, channel] = function((place + 1) / 10000 ** (2 * channel / c))
    placed = tokens * c**0.5 + wave
    networks = (mixer.w1_gen, mixer.w2_gen or mixer.w1_gen)
    heads = len(mixer.w1_gen.fc1_weights)
    columns = []
    for head, (own, where) in enumerate(
        zip(tokens.chunk(heads, -1), placed.chunk(heads, -1), strict=True)
    ):
        w1, w2 = (
            F.gelu(where @ net.fc1_weights[head].T) @ net.fc2_weights[head].T for net in networks
        )
        hidden = F.gelu(sum(w1[:, i, :, None] * own[:, i, None, :] for i in range(n)))
        columns.append(torch.stack([(w2[:, i, :, None] * hidden).sum(1) for i in range(n)], 1))
    norm = mixer.layer_norm
    return F.layer_norm(torch.cat(columns, -1), (c,), norm.weight, norm.bias)


def reference(mixer, x):
    return mixed(mixer, x.flatten(1, 2)).reshape(x.shape)


def joint(mixer, x, prefix):
    y = mixed(mixer, torch.cat([prefix, x.flatten(1, 2)], 1))
    return y[:, prefix.shape[1] :].reshape(x.shape), y[:, : prefix.shape[1]]


def macs(mixer, c, h, w):
    heads, part, width = mixer.w1_gen.fc2_weights.shape
    networks = 1 if mixer.w2_gen is None else 2
    rows = networks * heads * (width * width + width * part)
    return h * w * (rows + 2 * c * part)
