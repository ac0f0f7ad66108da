"""Complex numbers throughout, one block at a time, and transforms that are written out."""

import math

import torch
import torch.nn.functional as F

CASES = [{}, {"blocks": 3, "threshold": 0.1}, {"blocks": 1, "threshold": 0.0}]


def relu(z):
    return torch.complex(F.relu(z.real), F.relu(z.imag))


def reference(mixer, x):
    h, w = x.shape[1:3]
    rows, columns = (
        torch.exp(-2j * math.pi * torch.outer(torch.arange(n), torch.arange(n)).double() / n)
        for n in (h, w)
    )
    spectrum = torch.einsum("ki,lj,bijc->bklc", rows, columns, x + 0j) / math.sqrt(h * w)
    half, blocks = spectrum[:, :, : w // 2 + 1], []
    weights = [torch.view_as_complex(layer.weight) for layer in (mixer.fc1, mixer.fc2)]
    biases = [torch.view_as_complex(layer.bias) for layer in (mixer.fc1, mixer.fc2)]
    width = weights[0].shape[1]
    for block in range(len(weights[0])):
        z = half[..., block * width : (block + 1) * width]
        z = relu(z @ weights[0][block] + biases[0][block])
        z = z @ weights[1][block] + biases[1][block]
        cut = [F.softshrink(part, mixer.threshold) for part in (z.real, z.imag)]
        blocks.append(torch.complex(*cut))
    kept = torch.cat(blocks, -1)
    twice = torch.tensor([1.0 if n == 0 or 2 * n == w else 2.0 for n in range(w // 2 + 1)])
    back = columns[:, : w // 2 + 1].conj() * twice
    y = torch.einsum("ki,jl,bklc->bijc", rows.conj(), back, kept)
    return x + y.real / math.sqrt(h * w)


def macs(mixer, c, h, w):
    products = 2 * 4 * h * (w // 2 + 1) * c * c // len(mixer.fc1.weight)
    return round(products + 2 * h * w * c * math.log2(h * w))
