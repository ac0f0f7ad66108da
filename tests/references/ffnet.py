"""FFNet written plainly from its equations, over tensors under the authors' names.

Convolutions are sums over kernel offsets, BatchNorm is its formula; nothing here is shared with the
package. A spec is a dict: widths, depths, token and channel kernels, expansion, scale, seg.
"""

import torch

EPS = 1e-5
SPECS = {
    "ffnet_1": {"widths": (80, 160, 320, 640), "depths": (2, 2, 8, 2), "channel": 3},
    "ffnet_2": {"widths": (88, 176, 352, 704), "depths": (3, 3, 15, 3)},
    "ffnet_3": {"widths": (96, 192, 384, 768), "depths": (4, 4, 22, 5), "scale": True},
    "ffnet_4": {"widths": (128, 256, 512, 1024), "depths": (4, 4, 27, 3), "scale": True},
    "ffnet_seg": {
        "widths": (96, 192, 384, 768), "depths": (3, 4, 18, 5), "token": (3, 3, 9, 9), "channel": 3,
        "expansion": 4, "scale": True, "seg": True,
    },
}  # fmt: skip
USUAL = {"token": (3, 3, 7, 7), "channel": 7, "expansion": 3, "scale": False, "seg": False}


def shifted(x, kernel, stride):
    """What lies under each offset of a centred kernel, zero outside the map."""
    (k_h, k_w), (height, width) = kernel, x.shape[-2:]
    padded = x.new_zeros(*x.shape[:-2], height + k_h - 1, width + k_w - 1)
    padded[..., k_h // 2 : k_h // 2 + height, k_w // 2 : k_w // 2 + width] = x
    for i in range(k_h):
        for j in range(k_w):
            yield i, j, padded[..., i : i + height : stride, j : j + width : stride]


def conv(x, weight, bias=None, stride=1):
    """Dense convolution."""
    total = 0
    for i, j, part in shifted(x, weight.shape[-2:], stride):
        total = total + torch.einsum("oc,bchw->bohw", weight[:, :, i, j], part)
    return total if bias is None else total + bias[:, None, None]


def depthwise(x, weight, bias=None, stride=1):
    """One group per input channel; each of them gives as many outputs as there are weights for."""
    each = len(weight) // x.shape[1]
    x = x.repeat_interleave(each, dim=1)
    total = 0
    for i, j, part in shifted(x, weight.shape[-2:], stride):
        total = total + weight[:, 0, i, j, None, None] * part
    return total if bias is None else total + bias[:, None, None]


def batch_norm(x, tensors, name, training):
    mean, var = tensors[f"{name}.running_mean"], tensors[f"{name}.running_var"]
    if training:
        mean = x.mean(dim=(0, 2, 3))
        var = (x - mean[:, None, None]).square().mean(dim=(0, 2, 3))
    normal = (x - mean[:, None, None]) / (var[:, None, None] + EPS).sqrt()
    scale, shift = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
    return normal * scale[:, None, None] + shift[:, None, None]


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / 2**0.5))


def hardswish(x):
    return x * (x + 3).clamp(0, 6) / 6


class Network:
    """Callable: images -> (logits, four maps)."""

    def __init__(self, tensors, spec, training=False):
        self.t, self.spec, self.training = tensors, USUAL | spec, training

    def conv_bn(self, x, name, operation=conv, stride=1):
        if f"{name}.weight" in self.t:
            return operation(x, self.t[f"{name}.weight"], self.t[f"{name}.bias"], stride)
        x = operation(x, self.t[f"{name}.c.weight"], None, stride)
        return batch_norm(x, self.t, f"{name}.bn", self.training)

    def branched(self, x, name, stride=1):
        if f"{name}.weight" in self.t:
            return depthwise(x, self.t[f"{name}.weight"], self.t.get(f"{name}.bias"), stride)
        names = sorted(
            {key[len(name) + 1 :].split(".")[0] for key in self.t if key.startswith(f"{name}.")}
        )
        if names == ["bn", "c"]:
            return self.conv_bn(x, name, depthwise, stride)
        return sum(self.conv_bn(x, f"{name}.{branch}", depthwise, stride) for branch in names)

    def pointwise(self, x, name):
        return conv(x, self.t[f"{name}.weight"], self.t[f"{name}.bias"])

    def scaled(self, x, name):
        return x * self.t[f"{name}.layer_scale"] if self.spec["scale"] else x

    def token_mixer(self, x, name):
        coefficients = gelu(self.branched(self.conv_bn(x, f"{name}.fc"), f"{name}.conv1"))
        return self.branched(coefficients, f"{name}.conv2")

    def channel_mixer(self, x, name):
        x = self.pointwise(self.branched(x, f"{name}.conv"), f"{name}.fc1")
        return self.pointwise(gelu(x), f"{name}.fc2")

    def block(self, x, name):
        token, channel = f"{name}.token_mixer.0", f"{name}.channel_mixer"
        x = x + self.scaled(self.token_mixer(x, f"{token}.main"), token)
        return x + self.scaled(self.channel_mixer(x, f"{channel}.main"), channel)

    def stem(self, x):
        x = gelu(self.conv_bn(x, "patch_embed.0", stride=2))
        if not self.spec["seg"]:
            return self.conv_bn(x, "patch_embed.2", stride=2)
        x = gelu(self.conv_bn(x, "patch_embed.2"))
        x = self.conv_bn(x, "patch_embed.4")
        return self.conv_bn(x, "patch_embed.5", stride=2)

    def downsample(self, x, name):
        if self.spec["seg"]:
            return self.conv_bn(gelu(self.conv_bn(x, f"{name}.0", stride=2)), f"{name}.2")
        x = self.branched(x, f"{name}.0", stride=2)
        if f"{name}.1.weight" in self.t:
            return self.pointwise(x, f"{name}.1")
        normed = batch_norm(x, self.t, f"{name}.1.conv.bn", self.training)
        return x + conv(normed, self.t[f"{name}.1.conv.c.weight"])

    def logits(self, x):
        if not self.spec["seg"]:
            x = batch_norm(x, self.t, "norm", self.training).mean(dim=(2, 3))
            return x @ self.t["head.weight"].T + self.t["head.bias"]
        x = hardswish(self.conv_bn(x, "head1.0")).mean(dim=(2, 3))
        x = x @ self.t["head2.0.weight"].T + self.t["head2.0.bias"]
        centred = x - x.mean(dim=1, keepdim=True)
        x = centred / (centred.square().mean(dim=1, keepdim=True) + 1e-6).sqrt()
        x = hardswish(x * self.t["head2.1.weight"] + self.t["head2.1.bias"])
        return x @ self.t["head2.3.weight"].T + self.t["head2.3.bias"]

    def __call__(self, images):
        x, maps = self.stem(images), []
        for stage, depth in enumerate(self.spec["depths"]):
            first = 0
            if stage:
                x, first = self.downsample(x, f"stages.{stage}.0.proj"), 1
            for block in range(first, first + depth):
                x = self.block(x, f"stages.{stage}.{block}")
            maps.append(x)
        return self.logits(x), maps


class Shapes:
    """Key -> shape of every tensor in a checkpoint, in ``found``."""

    def __init__(self, spec, form, classes):
        self.spec, self.train, self.found = USUAL | spec, form == "train", {}
        self.stem()
        below = None
        for stage, width in enumerate(self.spec["widths"]):
            if stage:
                self.downsample(f"stages.{stage}.0.proj", below, width)
            for block in range(self.spec["depths"][stage]):
                self.block(
                    f"stages.{stage}.{block + bool(stage)}", width, self.spec["token"][stage]
                )
            below = width
        self.end(below, classes)

    def norm(self, name, width):
        for part in ("weight", "bias", "running_mean", "running_var"):
            self.found[f"{name}.{part}"] = (width,)
        self.found[f"{name}.num_batches_tracked"] = ()

    def linear(self, name, *shape, bias=True):
        self.found[f"{name}.weight"] = shape
        if bias:
            self.found[f"{name}.bias"] = shape[:1]

    def conv_bn(self, name, *shape):
        if not self.train:
            self.linear(name, *shape)
            return
        self.linear(f"{name}.c", *shape, bias=False)
        self.norm(f"{name}.bn", shape[0])

    def depthwise(self, name, width, side, branches):
        if not (self.train and branches):
            self.linear(name, width, 1, side, side)
            return
        for branch, (k_h, k_w) in branches.items():
            self.conv_bn(f"{name}.{branch}", width, 1, k_h, k_w)

    def stem(self):
        first = self.spec["widths"][0]
        layers = [(0, 64, 3), (2, first, 64)]
        if self.spec["seg"]:
            layers = [(0, 64, 3), (2, 64, 64), (4, first, 64), (5, first, first)]
        for index, out, width in layers:
            self.conv_bn(f"patch_embed.{index}", out, width, 3, 3)

    def downsample(self, name, below, width):
        if self.spec["seg"]:
            self.conv_bn(f"{name}.0", 2 * width, below, 3, 3)
            self.conv_bn(f"{name}.2", width, 2 * width, 1, 1)
            return
        self.depthwise(f"{name}.0", width, 7, SQUARES)
        if self.train:
            self.norm(f"{name}.1.conv.bn", width)
            self.linear(f"{name}.1.conv.c", width, width, 1, 1, bias=False)
        else:
            self.linear(f"{name}.1", width, width, 1, 1)

    def block(self, name, width, side):
        token, channel = f"{name}.token_mixer.0", f"{name}.channel_mixer"
        if self.spec["scale"]:
            scales = (f"{token}.layer_scale", f"{channel}.layer_scale")
            self.found |= dict.fromkeys(scales, (width, 1, 1))
        self.conv_bn(f"{token}.main.fc", width, width, 1, 1)
        branches = strips(side) if self.spec["seg"] else SQUARES if side == 7 else {}
        self.depthwise(f"{token}.main.conv1", width, side, branches)
        self.depthwise(f"{token}.main.conv2", width, side, branches)
        side, hidden = self.spec["channel"], self.spec["expansion"] * width
        if side == 7:
            self.depthwise(f"{channel}.main.conv", width, side, SQUARES)
        else:
            self.conv_bn(f"{channel}.main.conv", width, 1, side, side)
        self.linear(f"{channel}.main.fc1", hidden, width, 1, 1)
        self.linear(f"{channel}.main.fc2", width, hidden, 1, 1)

    def end(self, width, classes):
        if not self.spec["seg"]:
            self.norm("norm", width)
            self.linear("head", classes, width)
            return
        self.conv_bn("head1.0", 1024, width, 1, 1)
        self.linear("head2.0", 1280, 1024)
        self.linear("head2.1", 1280)
        self.linear("head2.3", classes, 1280)


SQUARES = {"conv": (7, 7), "conv1": (3, 3)}


def strips(side):
    branches = {"conv1": (side, side), "strip_conv1": (1, side), "strip_conv2": (side, 1)}
    return branches | ({"conv2": (side - 4, side - 4)} if side > 3 else {})


def shapes(spec, form, classes=1000):
    """Key -> shape of every tensor in a checkpoint of the "train" or the "fused" form."""
    return Shapes(spec, form, classes).found


def random_tensors(spec, form, classes=1000, seed=0):
    """A checkpoint in float64 at which every part of the network matters."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, shape in shapes(spec, form, classes).items():
        noise = torch.randn(shape, dtype=torch.float64, generator=generator)
        if key.endswith("num_batches_tracked"):
            tensors[key] = torch.tensor(7)
        elif key.endswith("running_var"):
            tensors[key] = 0.5 + noise.square()
        elif key.endswith("layer_scale"):
            tensors[key] = 0.5 + 0.1 * noise
        elif len(shape) > 1:
            tensors[key] = noise / noise[0].numel() ** 0.5
        elif key.endswith("weight"):
            tensors[key] = 0.8 + 0.2 * noise
        else:
            tensors[key] = 0.3 * noise
    return tensors
