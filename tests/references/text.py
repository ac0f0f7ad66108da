"""BERT and GPT-1 in plain operations, from tensors by the names of transformers."""

import math

import torch
import torch.nn.functional as F


def linear(x, w, name):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def conv1d(x, w, name):
    """GPT's linear layer, whose matrix is transposed."""
    return x @ w[f"{name}.weight"] + w[f"{name}.bias"]


def norm(x, w, name, eps):
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)


def attend(q, k, v, heads, seen):
    batch, length, dim = q.shape
    q, k, v = (x.view(batch, length, heads, dim // heads).transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(dim // heads)
    shares = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return (shares @ v).transpose(1, 2).reshape(batch, length, dim)


def bert(tokens, segments, mask, w, depth, heads):
    """Features (B, L, C) and the pooled first token (B, C)."""
    x = w["embeddings.word_embeddings.weight"][tokens]
    x = x + w["embeddings.position_embeddings.weight"][: tokens.shape[1]]
    x = x + w["embeddings.token_type_embeddings.weight"][segments]
    x = norm(x, w, "embeddings.LayerNorm", 1e-12)
    for i in range(depth):
        name = f"encoder.layer.{i}"
        parts = (linear(x, w, f"{name}.attention.self.{n}") for n in ("query", "key", "value"))
        y = attend(*parts, heads, mask[:, None, None, :])
        y = linear(y, w, f"{name}.attention.output.dense")
        x = norm(x + y, w, f"{name}.attention.output.LayerNorm", 1e-12)
        y = F.gelu(linear(x, w, f"{name}.intermediate.dense"))
        x = norm(x + linear(y, w, f"{name}.output.dense"), w, f"{name}.output.LayerNorm", 1e-12)
    return x, torch.tanh(linear(x[:, 0], w, "pooler.dense"))


def gpt(tokens, w, depth, heads):
    """Features (B, L, C)."""
    length = tokens.shape[1]
    x = w["tokens_embed.weight"][tokens] + w["positions_embed.weight"][:length]
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    for i in range(depth):
        name = f"h.{i}"
        q, k, v = conv1d(x, w, f"{name}.attn.c_attn").chunk(3, -1)
        y = conv1d(attend(q, k, v, heads, seen), w, f"{name}.attn.c_proj")
        x = norm(x + y, w, f"{name}.ln_1", 1e-5)
        y = F.gelu(conv1d(x, w, f"{name}.mlp.c_fc"), approximate="tanh")
        x = norm(x + conv1d(y, w, f"{name}.mlp.c_proj"), w, f"{name}.ln_2", 1e-5)
    return x
