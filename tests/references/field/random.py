"""Every token is a weighted mean of all tokens, with weights from resized random logits."""

import torch
import torch.nn.functional as F

CASES = [{}, {"learnt": True}]


def reference(mixer, x):
    b, h, w, c = x.shape
    logits = mixer.logits.reshape(*mixer.built_for, *mixer.built_for)
    for _ in range(2):  # columns of the matrix, then its rows
        flat = logits.flatten(0, 1)[None]
        if (h, w) != mixer.built_for:
            flat = F.interpolate(flat, (h, w), mode="bicubic", antialias=True)
        logits = flat[0].unflatten(0, logits.shape[:2]).permute(2, 3, 0, 1)
    weights = logits.reshape(h * w, h * w).exp()
    tokens = x.reshape(b, h * w, c)
    mixed = [(row[:, None] * tokens).sum(1) / row.sum() for row in weights]
    return torch.stack(mixed, 1).reshape(x.shape)


def macs(mixer, c, h, w):
    return (h * w) ** 2 * c
