"""A feed-forward network whose Monarch matrices are written out, entry by entry."""

import torch
import torch.nn.functional as F

CASES = [{}, {"blocks": 2, "hidden_ratio": 2}, {"blocks": 3, "hidden_ratio": 0.5}]


def dense(layer):
    """Channel i of the inner map is of block i div q of R and of block i mod G of L."""
    blocks, q, p = layer.right.shape
    inner = blocks * q
    rows, columns = [], []
    for i in range(inner):
        block = i // q
        row = [torch.zeros(p, dtype=torch.float64)] * blocks
        row[block] = layer.right[block, i % q]
        rows.append(torch.cat(row))
        column = [torch.zeros_like(layer.left[0, :, 0])] * blocks
        column[i % blocks] = layer.left[i % blocks, :, i // blocks]
        columns.append(torch.stack(column, 1).flatten())  # output s G + l is of block l
    return torch.stack(columns, 1) @ torch.stack(rows)


def reference(mixer, x):
    hidden = F.gelu(x @ dense(mixer.fc1).T + mixer.fc1.bias)
    return hidden @ dense(mixer.fc2).T + mixer.fc2.bias


def macs(mixer, c, h, w):
    hidden, blocks = mixer.fc1.bias.numel(), mixer.fc1.blocks
    return h * w * 2 * (c + hidden) * min(c, hidden) // blocks
