"""Encoder layers of iTransformer and PatchTST, DLinear and NLinear, from the equations."""

import math

import torch


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def attention(x, qkv, qkv_bias, out, out_bias, heads):
    """(B, N, C); heads one by one."""
    queries, keys, values = (
        x @ weight.T + bias for weight, bias in zip(qkv.chunk(3), qkv_bias.chunk(3), strict=True)
    )
    width = x.shape[-1] // heads
    results = []
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        scores = queries[..., part] @ keys[..., part].transpose(1, 2) / math.sqrt(width)
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        results.append(weights @ values[..., part])
    return torch.cat(results, dim=-1) @ out.T + out_bias


def layer_norm(x, weight, bias):
    mean = x.mean(-1, keepdim=True)
    var = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / (var + 1e-5).sqrt() * weight + bias


def encoder_layer(x, tensors, heads, norm):
    """norm(x + attention(x)), then norm(x + FFN(x))."""
    y = attention(
        x, tensors["attn.qkv.weight"], tensors["attn.qkv.bias"], tensors["attn.proj.weight"],
        tensors["attn.proj.bias"], heads,
    )  # fmt: skip
    x = norm(x + y, tensors, "norm1")
    h = gelu(x @ tensors["mlp.fc1.weight"].T + tensors["mlp.fc1.bias"])
    y = h @ tensors["mlp.fc2.weight"].T + tensors["mlp.fc2.bias"]
    return norm(x + y, tensors, "norm2")


def by_layer(x, tensors, name):
    return layer_norm(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])


def by_running(x, tensors, name):
    scale = tensors[f"{name}.weight"] / (tensors[f"{name}.running_var"] + 1e-5).sqrt()
    return (x - tensors[f"{name}.running_mean"]) * scale + tensors[f"{name}.bias"]


def dlinear(x, seasonal, trend, kernel=25):
    """(B, L, M), two pairs of weight and bias -> (B, T, M)."""
    side = kernel // 2
    padded = torch.cat([x[:, :1]] * side + [x] + [x[:, -1:]] * side, dim=1)
    average = torch.stack([padded[:, t : t + kernel].mean(1) for t in range(x.shape[1])], dim=1)
    parts = [
        torch.einsum("tl,blm->btm", weight, part) + bias[None, :, None]
        for part, (weight, bias) in ((x - average, seasonal), (average, trend))
    ]
    return parts[0] + parts[1]


def nlinear(x, weight, bias):
    last = x[:, -1:]
    return torch.einsum("tl,blm->btm", weight, x - last) + bias[None, :, None] + last
