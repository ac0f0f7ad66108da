"""Super-resolution written plainly: networks over released names, MATLAB's imresize, PSNR and SSIM.

Nothing here is shared with the package.
"""

import math

import numpy as np
import torch

# Networks


def conv(x, weight, bias):
    """A dense or depthwise convolution with zero padding, as a sum over the kernel's offsets."""
    height, width = x.shape[-2:]
    k = weight.shape[-1]
    padded = x.new_zeros(*x.shape[:2], height + k - 1, width + k - 1)
    padded[..., k // 2 : k // 2 + height, k // 2 : k // 2 + width] = x
    total = bias[:, None, None]
    for i in range(k):
        for j in range(k):
            part = padded[..., i : i + height, j : j + width]
            if weight.shape[1] == 1 < x.shape[1]:
                total = total + weight[:, 0, i, j, None, None] * part
            else:
                total = total + torch.einsum("oc,bchw->bohw", weight[:, :, i, j], part)
    return total


def gelu(x):
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def shuffle(x, scale):
    """Channel c r^2 + i r + j becomes the pixel (i, j) of colour c."""
    batch, channels, height, width = x.shape
    out = x.new_zeros(batch, channels // scale**2, scale * height, scale * width)
    for i in range(scale):
        for j in range(scale):
            out[..., i::scale, j::scale] = x[:, i * scale + j :: scale**2]
    return out


def ffnet_sr(tensors, x, scale):
    """FFNet_sr over tensors under the authors' names."""

    def layer(name, y):
        return conv(y, tensors[f"{name}.weight"], tensors[f"{name}.bias"])

    depth = 1 + max(int(key.split(".")[1]) for key in tensors if key.startswith("body."))
    y = layer("proj", x)
    for block in range(depth):
        token, channel = f"body.{block}.token_mixer", f"body.{block}.channel_mixer"
        y = y + layer(f"{token}.3", gelu(layer(f"{token}.1", layer(f"{token}.0", y))))
        y = y + layer(f"{channel}.3", gelu(layer(f"{channel}.1", layer(f"{channel}.0", y))))
    share = layer("conv_bef_up", y)
    for colour in range(3):
        for place in range(scale**2):
            share[:, colour * scale**2 + place] += x[:, colour]
    return shuffle(share, scale)


def ffnet_sr_tensors(depth, scale, dim=96, ratio=2):
    """Random tensors under the authors' names, none at zero or identity."""
    generator = torch.Generator().manual_seed(depth)
    shapes = {"proj": (dim, 3, 3), "conv_bef_up": (3 * scale**2, dim, 3)}
    for block in range(depth):
        token, channel = f"body.{block}.token_mixer", f"body.{block}.channel_mixer"
        shapes |= {
            f"{token}.0": (dim, dim, 1),
            f"{token}.1": (dim, 1, 3),
            f"{token}.3": (dim, 1, 3),
        }
        shapes |= {f"{channel}.0": (dim, 1, 3), f"{channel}.1": (ratio * dim, dim, 1)}
        shapes |= {f"{channel}.3": (dim, ratio * dim, 1)}
    tensors = {}
    for name, (out, inner, side) in shapes.items():
        scaled = (inner * side**2) ** -0.5
        weight = torch.randn(out, inner, side, side, generator=generator, dtype=torch.float64)
        bias = torch.randn(out, generator=generator, dtype=torch.float64)
        tensors |= {f"{name}.weight": weight * scaled, f"{name}.bias": bias * scaled}
    return tensors


def edsr(tensors, x, scale):
    """EDSR-baseline over tensors under the authors' names; colours from 0 to 1."""
    mean = torch.tensor([0.4488, 0.4371, 0.4040], dtype=x.dtype).view(1, 3, 1, 1)

    def layer(name, y):
        return conv(y, tensors[f"{name}.weight"], tensors[f"{name}.bias"])

    y = head = layer("head.0", 255 * (x - mean))
    for block in range(16):
        inner = layer(f"body.{block}.body.0", y).clamp(min=0)
        y = y + layer(f"body.{block}.body.2", inner)
    y = head + layer("body.16", y)
    for index, factor in enumerate({2: [2], 3: [3], 4: [2, 2]}[scale]):
        y = shuffle(layer(f"tail.0.{2 * index}", y), factor)
    return layer("tail.1", y) / 255 + mean


# MATLAB's imresize


def cubic(x):
    x = abs(x)
    if x <= 1:
        return 1.5 * x**3 - 2.5 * x**2 + 1
    return -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x <= 2 else 0.0


def imresize(image, factor):
    """imresize(image, factor) of floats (H, W, C), pixel by pixel."""
    for axis in (0, 1):
        image = np.moveaxis(image, axis, 0)
        length, shrink = len(image), min(factor, 1)
        rows = []
        for out in range(1, math.ceil(length * factor - 1e-9) + 1):
            centre = out / factor + 0.5 * (1 - 1 / factor)
            left = math.floor(centre - 2 / shrink)
            total, row = 0.0, 0.0
            for place in range(left, left + math.ceil(4 / shrink) + 2):
                weight = shrink * cubic(shrink * (centre - place))
                mirrored = (place - 1) % (2 * length)
                mirrored = mirrored if mirrored < length else 2 * length - 1 - mirrored
                total, row = total + weight, row + weight * image[mirrored]
            rows.append(row / total)
        image = np.moveaxis(np.stack(rows), 0, axis)
    return image


# Figures


def luma(image):
    """MATLAB's Y of (H, W, 3) from 0 to 255, not rounded."""
    return image @ np.array([65.481, 128.553, 24.966]) / 255 + 16


def psnr(one, other):
    return 20 * math.log10(255 / math.sqrt(((one - other) ** 2).mean()))


def ssim(one, other):
    """Mean over all positions of an 11x11 Gaussian window, one by one."""
    place = np.arange(11) - 5
    window = np.exp(-(place[:, None] ** 2 + place**2) / (2 * 1.5**2))
    window /= window.sum()
    c1, c2, values = (0.01 * 255) ** 2, (0.03 * 255) ** 2, []
    for i in range(one.shape[0] - 10):
        for j in range(one.shape[1] - 10):
            x, y = one[i : i + 11, j : j + 11], other[i : i + 11, j : j + 11]
            mx, my = (window * x).sum(), (window * y).sum()
            vx, vy = (window * (x - mx) ** 2).sum(), (window * (y - my) ** 2).sum()
            cov = (window * (x - mx) * (y - my)).sum()
            values.append(
                (2 * mx * my + c1) * (2 * cov + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2))
            )
    return float(np.mean(values))
