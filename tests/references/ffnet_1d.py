"""FFNet_1D and its parts written from their equations, over tensors under the authors' names.

Sums over indices are written out by einsum on tensors with one axis per index; nothing here is
shared with the package, and nothing flattens or permutes groups. Axes: b series, m variables, d and
o channels, n tokens, r rows of a hidden layer, j rows of a group.
"""

import math

import torch

EPS = 1e-5


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def cviffn(x, w1, b1, w2, b2):
    """x (b, m, d, n); W1 (d, eM, M), b1 (d, eM), W2 (M, o, e, d), b2 (M, o): variables first."""
    h = gelu(torch.einsum("drm,bmdn->bdrn", w1, x) + b1[None, :, :, None])
    e, outputs = w2.shape[2], []
    for m in range(x.shape[1]):
        own = h[:, :, m * e : m * e + e]  # rows m e .. m e + e - 1 of all channels
        outputs.append(torch.einsum("ojd,bdjn->bon", w2[m], own) + b2[m][None, :, None])
    return torch.stack(outputs, dim=1)


def ciffn(x, w1, b1, w2, b2):
    """x (b, m, d, n); W1 (m, eD, D), b1 (m, eD), W2 (D, M, e, m), b2 (D, M): channels first."""
    h = gelu(torch.einsum("mrd,bmdn->bmrn", w1, x) + b1[None, :, :, None])
    e, outputs = w2.shape[2], []
    for d in range(x.shape[2]):
        own = h[:, :, d * e : d * e + e]
        outputs.append(torch.einsum("pjm,bmjn->bpn", w2[d], own) + b2[d][None, :, None])
    return torch.stack(outputs, dim=2)


def revin(x):
    """(b, l, m) -> normalised, mean, deviation."""
    mean = x.sum(1, keepdim=True) / x.shape[1]
    deviation = (((x - mean) ** 2).sum(1, keepdim=True) / x.shape[1] + EPS).sqrt()
    return (x - mean) / deviation, mean, deviation


def depthwise(x, weight, bias=None):
    """x (b, m, d, n), weight (m d, 1, k): zeros around, a kernel per variable and channel."""
    b, m, d, n = x.shape
    weight = weight.reshape(m, d, -1)
    k = weight.shape[-1]
    padded = torch.zeros(b, m, d, n + k - 1, dtype=x.dtype)
    padded[..., k // 2 : k // 2 + n] = x
    total = sum(weight[None, :, :, i, None] * padded[..., i : i + n] for i in range(k))
    return total if bias is None else total + bias.reshape(m, d)[None, :, :, None]


def norm(x, tensors, name, axes, training):
    """BatchNorm whose parameters lie on the axes of x that are not in ``axes``."""
    shape = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    if training:
        mean = x.mean(axes, keepdim=True)
        var = ((x - mean) ** 2).mean(axes, keepdim=True)
    else:
        mean = tensors[f"{name}.running_mean"].reshape(shape)
        var = tensors[f"{name}.running_var"].reshape(shape)
    scale, shift = (tensors[f"{name}.{one}"].reshape(shape) for one in ("weight", "bias"))
    return (x - mean) / (var + EPS).sqrt() * scale + shift


def views(tensors, name, first, second, e):
    """Weights of both layers with one axis per index; ``first`` groups of ``second`` inputs."""
    w1 = tensors[f"{name}.ffnpw1.weight"].reshape(first, e * second, second)
    b1 = tensors[f"{name}.ffnpw1.bias"].reshape(first, e * second)
    w2 = tensors[f"{name}.ffnpw2.weight"].reshape(second, first, e, first)
    b2 = tensors[f"{name}.ffnpw2.bias"].reshape(second, first)
    return w1, b1, w2, b2


def stem(x, tensors, training):
    """(b, l, m) -> (b, m, d, n): patches of 4 every 2, the last value twice more."""
    rows = x.permute(0, 2, 1)
    rows = torch.cat([rows, rows[..., -1:], rows[..., -1:]], dim=-1)
    patches = torch.stack([rows[..., i : i + 4] for i in range(0, rows.shape[-1] - 3, 2)], dim=-1)
    weight, bias = (tensors[f"downsample_layers.0.0.{one}"] for one in ("weight", "bias"))
    x = torch.einsum("dk,bmkn->bmdn", weight[:, 0], patches) + bias[None, None, :, None]
    return norm(x, tensors, "downsample_layers.0.1", (0, 1, 3), training)


def block(x, tensors, name, e, training):
    m, d = x.shape[1:3]
    token, channel = f"{name}.token_mixer", f"{name}.channel_mixer"
    y = cviffn(x, *views(tensors, token, d, m, 2))
    y = norm(y, tensors, f"{token}.norm", (0, 1, 3), training)
    y = gelu(depthwise(y, tensors[f"{token}.dw1.weight"], tensors[f"{token}.dw1.bias"]))
    x = x + depthwise(y, tensors[f"{token}.dw2.weight"], tensors[f"{token}.dw2.bias"])
    y = 0
    for branch in ("lkb_origin", "small_conv"):
        part = f"{channel}.dw.{branch}"
        y = y + norm(
            depthwise(x, tensors[f"{part}.conv.weight"]), tensors, f"{part}.bn", (0, 3), training
        )
    y = norm(y, tensors, f"{channel}.norm", (0, 1, 3), training)
    return x + ciffn(y, *views(tensors, channel, m, d, e))


def forecast(x, tensors, e, training=False, depth=1):
    """(b, l, m) -> (b, T, m), without dropout."""
    x, mean, deviation = revin(x)
    x = stem(x, tensors, training)
    for index in range(depth):
        x = block(x, tensors, f"stages.0.blocks.{index}", e, training)
    y = x.reshape(*x.shape[:2], -1) @ tensors["head.linear.weight"].T + tensors["head.linear.bias"]
    return y.permute(0, 2, 1) * deviation + mean


def shapes(m, d, e, horizon, lookback=96, depth=1, kernels=(51, 5)):
    """Shapes of the authors' state dict, unused parts among them."""
    found = {}

    def bn(name, size):
        found[f"{name}.num_batches_tracked"] = ()
        for one in ("weight", "bias", "running_mean", "running_var"):
            found[f"{name}.{one}"] = (size,)

    found["downsample_layers.0.0.weight"] = (d, 1, 4)
    found["downsample_layers.0.0.bias"] = (d,)
    bn("downsample_layers.0.1", d)
    bn("downsample_layers.1.0", d)  # built and never used
    found["downsample_layers.1.1.weight"] = (d, d, 2)
    found["te_patch.0.weight"] = (4, 1, 4)
    found["lat_layer.0.weight"] = (d, d, 1)
    for index in range(depth):
        name = f"stages.0.blocks.{index}"
        for mixer, ratio, first, second in (
            ("token_mixer", 2, d, m), ("channel_mixer", e, m, d),
        ):  # fmt: skip
            part = f"{name}.{mixer}"
            found[f"{part}.ffnpw1.weight"] = (m * d * ratio, second, 1)
            found[f"{part}.ffnpw1.bias"] = (m * d * ratio,)
            found[f"{part}.ffnpw2.weight"] = (m * d, ratio * first, 1)
            found[f"{part}.ffnpw2.bias"] = (m * d,)
            bn(f"{part}.norm", d)
        for conv in ("dw1", "dw2"):
            found[f"{name}.token_mixer.{conv}.weight"] = (m * d, 1, kernels[0])
            found[f"{name}.token_mixer.{conv}.bias"] = (m * d,)
        for branch, k in zip(("lkb_origin", "small_conv"), kernels, strict=True):
            found[f"{name}.channel_mixer.dw.{branch}.conv.weight"] = (m * d, 1, k)
            bn(f"{name}.channel_mixer.dw.{branch}.bn", m * d)
    found["head.linear.weight"] = (horizon, d * (lookback // 2))
    found["head.linear.bias"] = (horizon,)
    return found


def draw(seed=0, **sizes):
    """State dict in the authors' layout; every tensor is drawn, none is zero or identity."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes(**sizes).items():
        noise = torch.randn(shape, dtype=torch.float64, generator=generator)
        if name.endswith("num_batches_tracked"):
            tensors[name] = torch.tensor(3)
        elif name.endswith("running_var"):
            tensors[name] = 0.5 + noise**2
        elif len(shape) == 1:
            tensors[name] = 0.5 + 0.3 * noise
        else:
            tensors[name] = noise / math.sqrt(math.prod(shape[1:]))
    return tensors
