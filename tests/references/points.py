"""FFNet_3D over a dictionary of voxels, one voxel at a time, from its description alone."""

import itertools

import torch
import torch.nn.functional as F


def norm(x, weights, name):
    mean, var = weights[f"{name}.running_mean"], weights[f"{name}.running_var"]
    scale = weights[f"{name}.weight"] / (var + 1e-3).sqrt()
    return (x - mean) * scale + weights[f"{name}.bias"]


def linear(x, weights, name):
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def layer_norm(x, weights, name):
    own = weights[f"{name}.weight"], weights[f"{name}.bias"]
    return F.layer_norm(x, x.shape[-1:], *own)


def convolve(voxels, x, weights, name):
    """Submanifold convolution: voxels are tuples (batch, x, y, z), x their features in order."""
    kernel = weights[f"{name}.weight"]  # (O, k, k, k, C)
    radius = kernel.shape[1] // 2
    place = {voxel: index for index, voxel in enumerate(voxels)}
    rows = []
    for batch, *centre in voxels:
        total = weights.get(f"{name}.bias", torch.zeros(len(kernel), dtype=x.dtype))
        for step in itertools.product(range(-radius, radius + 1), repeat=3):
            other = (batch, *(a + b for a, b in zip(centre, step, strict=True)))
            if other in place:
                tap = kernel[:, step[0] + radius, step[1] + radius, step[2] + radius]
                total = total + tap @ x[place[other]]
        rows.append(total)
    return torch.stack(rows)


def block(voxels, x, weights, name):
    token, channel = f"{name}.token_mixer", f"{name}.channel_mixer"
    y = linear(layer_norm(x, weights, f"{name}.norm1"), weights, f"{token}.query")
    y = norm(convolve(voxels, y, weights, f"{token}.key.conv"), weights, f"{token}.key.norm")
    y = convolve(voxels, F.gelu(y), weights, f"{token}.value.conv")
    x = x + norm(y, weights, f"{token}.value.norm")
    y = layer_norm(x, weights, f"{name}.norm2")
    y = convolve(voxels, y, weights, f"{channel}.query.conv")
    y = norm(y, weights, f"{channel}.query.norm")
    y = F.gelu(linear(y, weights, f"{channel}.ffn.fc1"))
    return x + linear(y, weights, f"{channel}.ffn.fc2")


def halve(voxels):
    """The coarser voxels, and for each voxel the index of its own."""
    above = [(batch, *(side // 2 for side in place)) for batch, *place in voxels]
    coarse = sorted(set(above))
    return coarse, [coarse.index(one) for one in above]


def project(x, weights, name):
    return F.gelu(norm(linear(x, weights, f"{name}.linear"), weights, f"{name}.norm"))


def encode(voxels, x, weights, depths, decoder_depths):
    """Features of the voxels: (P, F) -> (P, C)."""
    x = F.gelu(norm(convolve(voxels, x, weights, "stem.conv"), weights, "stem.norm"))
    levels, skips = [], []
    for stage, depth in enumerate(depths):
        if stage:
            coarse, index = halve(voxels)
            levels.append((voxels, index))
            skips.append(x)
            y = linear(x, weights, f"stages.{stage}.embed.linear")
            cells = [
                [i for i, own in enumerate(index) if own == cell] for cell in range(len(coarse))
            ]
            y = torch.stack([y[cell].amax(0) for cell in cells])
            x, voxels = F.gelu(norm(y, weights, f"stages.{stage}.embed.norm")), coarse
        for number in range(depth):
            x = block(voxels, x, weights, f"stages.{stage}.blocks.{number}")
    for step, depth in enumerate(reversed(decoder_depths)):
        name = f"stages.{len(depths) + step}"
        voxels, index = levels.pop()
        below = project(x, weights, f"{name}.embed.proj")
        x = project(skips.pop(), weights, f"{name}.embed.skip") + below[index]
        for number in range(depth):
            x = block(voxels, x, weights, f"{name}.blocks.{number}")
    return x
