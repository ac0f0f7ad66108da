"""IFFN written out from its equations, token by token lists of channels; slow, and nothing shared.

Source: Xu et al., ICML 2024, Eq. 3 to 6 and 11, Sec. 4.3. Batch norms as torch's: biased variance
in training, running statistics in evaluation, eps 1e-5, momentum 0.1. Layer norms with that eps.
Axes: B images, H W map, C input channels, h hidden channels, N branches.
"""

import torch
from torch import Tensor

from tests.references.afbo import depthwise

EPS, MOMENTUM = 1e-5, 0.1


def phi(name: str, x: Tensor, slope: Tensor | None = None) -> Tensor:
    """The basic nonlinear functions by their formulas."""
    if name == "prelu":
        return x.clamp(min=0) + slope * x.clamp(max=0)
    return {
        "gelu": lambda: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
        "softplus": lambda: (1 + x.exp()).log(),
        "elu": lambda: torch.where(x > 0, x, x.exp() - 1),
        "silu": lambda: x / (1 + (-x).exp()),
        "relu": lambda: x.clamp(min=0),
    }[name]()


def branch(z: Tensor, tensors: dict[str, Tensor], index: int, act: str, arb: str) -> Tensor:
    """One reading of the hidden layer: Eq. 3, phi alone, or RPReLU."""

    def get(name: str) -> Tensor | None:
        return tensors.get(f"branches.{index}.{name}")

    if arb == "rprelu":
        return phi("prelu", z - get("g"), get("base.slope")) + get("z")
    if arb == "off":
        return phi(act, z, get("slope"))
    inner = phi(act, get("alpha") * z + get("gamma"), get("base.slope"))
    return get("beta") * inner + get("theta")


def batch_norm(t: Tensor, tensors: dict[str, Tensor], name: str, training: bool) -> Tensor:
    """Over (tokens, channels); in training it moves the running statistics in ``tensors``."""
    if f"{name}.weight" not in tensors:
        return t
    mean, var = tensors[f"{name}.running_mean"], tensors[f"{name}.running_var"]
    if training:
        count = len(t)
        old_mean, old_var = mean, var
        mean = t.sum(0) / count
        var = (t - mean).square().sum(0) / count
        new_var = var * count / (count - 1)
        tensors[f"{name}.running_mean"] = (1 - MOMENTUM) * old_mean + MOMENTUM * mean.detach()
        tensors[f"{name}.running_var"] = (1 - MOMENTUM) * old_var + MOMENTUM * new_var.detach()
    scale = tensors[f"{name}.weight"] / (var + EPS).sqrt()
    return (t - mean) * scale + tensors[f"{name}.bias"]


def layer_norm(t: Tensor, tensors: dict[str, Tensor], name: str) -> Tensor:
    """Over the channels of each token, (tokens, channels)."""
    if f"{name}.weight" not in tensors:
        return t
    centred = t - t.mean(1, keepdim=True)
    deviation = (centred.square().mean(1, keepdim=True) + EPS).sqrt()
    return centred / deviation * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]


def iffn(
    x: Tensor,
    prefix: Tensor,
    tensors: dict[str, Tensor],
    *,
    n_branches: int = 2,
    act: str = "gelu",
    arb: str = "on",
    residual: bool | str = False,
    order: str = "bn_act",
    training: bool = False,
) -> tuple[Tensor, Tensor]:
    """The mixer with the parameters and buffers of ours; what ``tensors`` lacks is left out."""
    num_images, height, width, dim = x.shape
    num_prefix_tokens = prefix.shape[1]
    tokens = torch.cat([prefix, x.reshape(num_images, -1, dim)], dim=1).reshape(-1, dim)
    z = tokens @ tensors["fc1.weight"].T + tensors["fc1.bias"]
    t = torch.cat([branch(z, tensors, i, act, arb) for i in range(n_branches)], dim=1)
    t = layer_norm(batch_norm(t, tensors, "bn_mid", training), tensors, "ln_mid")
    t = t.reshape(num_images, -1, t.shape[-1])
    class_tokens, patches = t[:, :num_prefix_tokens], t[:, num_prefix_tokens:]
    if "dw.conv.weight" in tensors:
        patches = patches.reshape(num_images, height, width, -1)
        u = depthwise(patches, tensors["dw.conv.weight"], tensors["dw.conv.bias"])
        u = (u + patches if residual is True else u).reshape(-1, t.shape[-1])
        if order == "bn_act":
            u = phi("gelu", batch_norm(u, tensors, "dw.bn", training))
        else:
            u = batch_norm(phi("gelu", u), tensors, "dw.bn", training)
        u = u.reshape(num_images, height * width, -1)
        patches = u + patches.flatten(1, 2) if residual == "outside" else u
    t = torch.cat([class_tokens, patches], dim=1).reshape(-1, t.shape[-1])
    y = t @ tensors["fc2.weight"].T + tensors["fc2.bias"]
    y = layer_norm(batch_norm(y, tensors, "bn_out", training), tensors, "ln_out")
    y = y.reshape(num_images, -1, dim)
    return y[:, num_prefix_tokens:].reshape(x.shape), y[:, :num_prefix_tokens]


def nonlinear_sum(x: Tensor, tensors: dict[str, Tensor], hidden: int, act: str) -> Tensor:
    """Eq. 11, one function after the other, without any factor before the sum."""
    total = torch.zeros_like(x)
    for j in range(hidden):
        if "alpha" not in tensors:
            total = total + phi(act, x)
            continue
        alpha, beta, gamma, theta = (tensors[n][j] for n in ("alpha", "beta", "gamma", "theta"))
        total = total + beta * phi(act, alpha * x + gamma) + theta
    return total
