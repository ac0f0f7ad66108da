"""DiT, U-DiT and steps of samplers, in plain operations from tensors by the authors' names."""

import math

import torch
import torch.nn.functional as F


def linear(x, w, name):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def norm(x):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-6).sqrt()


def embed(times, labels, w, suffix=""):
    """Condition (B, D) of times and labels."""
    rates = torch.exp(-math.log(10_000) * torch.arange(128, dtype=torch.float32) / 128)
    angles = times.float()[:, None] * rates
    waves = torch.cat([angles.cos(), angles.sin()], 1).to(w[f"t_embedder{suffix}.mlp.0.weight"])
    t = linear(
        F.silu(linear(waves, w, f"t_embedder{suffix}.mlp.0")), w, f"t_embedder{suffix}.mlp.2"
    )
    return t + w[f"y_embedder{suffix}.embedding_table.weight"][labels]


def modulated(x, condition, w, name, parts):
    return linear(F.silu(condition), w, name).unsqueeze(1).chunk(parts, 2)


def places(height, width, dim):
    rows = []
    for y in range(height):
        for x in range(width):
            row = []
            for place in (x, y):
                angles = [place / 10_000 ** (4 * i / dim) for i in range(dim // 4)]
                row += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
            rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def dit(x, times, labels, w, patch, depth, heads):
    """DiT's prediction: (B, C, H, W) -> (B, O, H, W)."""
    batch, _, height, width = x.shape
    size = (height // patch, width // patch)
    c = embed(times, labels, w)
    kernel = w["x_embedder.proj.weight"]
    t = F.conv2d(x, kernel, w["x_embedder.proj.bias"], stride=patch).flatten(2).transpose(1, 2)
    t = t + places(*size, t.shape[2]).to(t)
    for i in range(depth):
        name = f"blocks.{i}"
        s1, c1, g1, s2, c2, g2 = modulated(t, c, w, f"{name}.adaLN_modulation.1", 6)
        y = linear(norm(t) * (1 + c1) + s1, w, f"{name}.attn.qkv")
        q, k, v = y.reshape(batch, -1, 3, heads, t.shape[2] // heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        t = t + g1 * linear(y, w, f"{name}.attn.proj")
        y = F.gelu(linear(norm(t) * (1 + c2) + s2, w, f"{name}.mlp.fc1"), approximate="tanh")
        t = t + g2 * linear(y, w, f"{name}.mlp.fc2")
    shift, scale = modulated(t, c, w, "final_layer.adaLN_modulation.1", 2)
    t = linear(norm(t) * (1 + scale) + shift, w, "final_layer.linear")
    t = t.reshape(batch, *size, patch, patch, -1)
    return torch.einsum("nhwpqc->nchpwq", t).reshape(batch, -1, height, width)


def conv(x, w, name, **options):
    weight = w[f"{name}.weight"]
    side = weight.shape[-1]
    return F.conv2d(x, weight, w.get(f"{name}.bias"), padding=side // 2, **options)


def turn(x, height, width):
    """Rotary positions of (..., N, d): pairs turn by column, then by row, alternately."""
    dim = x.shape[-1]
    z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    angles = torch.zeros(height * width, dim // 2, dtype=torch.float64)
    for n in range(height * width):
        for m in range(dim // 4):
            rate = 10_000 ** (-4 * m / dim)
            angles[n, 2 * m], angles[n, 2 * m + 1] = n % width * rate, n // width * rate
    return torch.view_as_real(z * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def attend(x, w, name, heads):
    """U-DiT's attention: four maps of every second row and column."""
    x = x + conv(x, w, f"{name}.downsampler.layer", groups=x.shape[1])
    out = torch.zeros_like(x)
    for dy in range(2):
        for dx in range(2):
            part = x[:, :, dy::2, dx::2]
            batch, dim, height, width = part.shape
            tokens = part.flatten(2).transpose(1, 2)
            q, k, v = linear(tokens, w, f"{name}.to_qkv").chunk(3, -1)
            q, k, v = (
                one.reshape(batch, -1, heads, dim // heads).transpose(1, 2) for one in (q, k, v)
            )
            q, k = (F.normalize(turn(one, height, width), dim=-1) for one in (q, k))
            scale = w[f"{name}.logit_scale"].clamp(max=4.6052).exp()
            y = (q @ k.transpose(-1, -2) * scale).softmax(-1) @ v
            out[:, :, dy::2, dx::2] = y.transpose(2, 3).reshape(batch, dim, height, width)
    return conv(out, w, f"{name}.to_out")


def mix_channels(x, w, name):
    y = F.gelu(conv(conv(x, w, f"{name}.project_in.0"), w, f"{name}.project_in.1"))
    y = y + sum(conv(y, w, f"{name}.dwconv.{i}", groups=y.shape[1]) for i in range(3))
    return conv(conv(y, w, f"{name}.project_out.0"), w, f"{name}.project_out.1")


def channel_norm(x):
    return norm(x.movedim(1, -1)).movedim(-1, 1)


def u_blocks(x, c, w, name, depth, heads):
    for i in range(depth):
        for half in (1, 2):
            own = f"{name}.{i}"
            parts = linear(F.silu(c), w, f"{own}.adaLN_modulation{half}.1")[:, :, None, None]
            s1, c1, g1, s2, c2, g2 = parts.chunk(6, 1)
            x = x + g1 * attend(channel_norm(x) * (1 + c1) + s1, w, f"{own}.attn{half}", heads)
            x = x + g2 * mix_channels(channel_norm(x) * (1 + c2) + s2, w, f"{own}.mlp{half}")
    return x


def u_dit(x, times, labels, w, depths, heads):
    """U-DiT's prediction: (B, C, H, W) -> (B, O, H, W)."""
    c = [embed(times, labels, w, f"_{level}") for level in (1, 2, 3)]
    x = conv(x, w, "x_embedder.proj")
    one = u_blocks(x, c[0], w, "encoder_level_1", depths[0], heads)
    x = F.pixel_unshuffle(conv(one, w, "down1_2.body.0"), 2)
    two = u_blocks(x, c[1], w, "encoder_level_2", depths[1], heads)
    x = F.pixel_unshuffle(conv(two, w, "down2_3.body.0"), 2)
    x = u_blocks(x, c[2], w, "latent", depths[2], heads)
    x = torch.cat([F.pixel_shuffle(conv(x, w, "up3_2.body.0"), 2), two], 1)
    x = conv(x, w, "reduce_chan_level2")
    x = u_blocks(x, c[1], w, "decoder_level_2", depths[3], heads)
    x = torch.cat([F.pixel_shuffle(conv(x, w, "up2_1.body.0"), 2), one], 1)
    x = conv(x, w, "reduce_chan_level1")
    x = conv(u_blocks(x, c[1], w, "decoder_level_1", depths[4], heads), w, "output")
    parts = linear(F.silu(c[1]), w, "final_layer.adaLN_modulation.1")[:, :, None, None]
    shift, scale = parts.chunk(2, 1)
    return conv(channel_norm(x) * (1 + scale) + shift, w, "final_layer.out_proj")
