"""Several activations of one narrow hidden layer, with learned coefficients: Eq. 5 and Fig. 4."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor, nn

from backbones.base import Mixer, hidden_width
from backbones.layers.init import init_linear
from backbones.layers.norms import can_merge, normalise, scale_and_shift
from backbones.mixers.iffn.activations import Arb, Base, RPReLU, affine
from backbones.mixers.iffn.depthwise import DepthwiseBlock, Order
from backbones.registry import register_mixer

ArbName = Literal["on", "off", "rprelu"]
Init = Literal["ones", "mirror"]
CACHE_BYTES = 2**22  # of the hidden map per thread
NO_CLASS_TOKEN = {"deit_*": {"class_token": False}}


@register_mixer(
    "iffn",
    kind="channel",
    source="IFFN (ICML 2024), Eq. 5, Sec. 4.3, Fig. 4b",
    # "*" in Table 1.
    options_on={
        "deit_b": {"kernel_size": 5},
        "swin_b": {"kernel_size": 5},
        "poolformer_m48": {"kernel_size": 5},
        "lvt_*": {"kernel_size": 5},
    },
    host_overrides=NO_CLASS_TOKEN,
    published_on=("deit_*", "swin_*", "poolformer_*", "lvt_*"),
)
class IFFN(Mixer):
    """BN(W2 GELU(BN(DW(BN(concat_i Arb_i(W1 x + b1))))) + b2).

    Args:
        dim: Channels C.
        hidden_ratio: M, hidden width over C.
        channel: Whether the hidden channels are N readings of h / N (Eq. 5); False gives h channels
            and the plain activation, as an FFN has.
        spatial: Whether the depthwise block is there (Sec. 4.3). Without both parts it is an FFN.
            None: unless the map is a single token.
        n_branches: N, a divisor of the hidden width.
        act: phi, one of gelu, softplus, elu, silu, relu, prelu (Table 3).
        arb: "on" for beta phi(alpha x + gamma) + theta, "off" for phi in each branch, "rprelu" for
            RPReLU (Fig. 3), whatever ``act`` is. True and False are on and off.
        kernel_size: Side of the depthwise convolution, odd (Table 6).
        bn_mid: Batch norm after the concatenation; by default with the channel part.
        bn_out: Batch norm after W2; by default with the channel part.
        dw_residual: Add the convolution's input to its output, as CMT does.
        dw_order: "bn_act" for GELU(BN(.)), "act_bn" for BN(GELU(.)) after the convolution.
        init: Coefficients of Arb at the start: "ones" for phi itself in all branches, "mirror" for
            phi(-x) in every second one.
        drop: Dropout before and after W2.
        grid: Size of the map at the build resolution.

    Shape: (B, H, W, C) -> (B, H, W, C). Parameters, for M = 4 and kernel k:
        (4 / N + 4) C^2 + (4 / N + 1 + 38 + 4 k^2) C.

    Raises:
        ValueError: N that does not divide, an even kernel, or an unknown name.
    """

    def __init__(
        self,
        dim: int,
        *,
        hidden_ratio: float = 4.0,
        channel: bool = True,
        spatial: bool | None = None,
        n_branches: int = 2,
        act: str = "gelu",
        arb: ArbName | bool = "on",
        kernel_size: int = 3,
        bn_mid: bool | None = None,
        bn_out: bool | None = None,
        dw_residual: bool = False,
        dw_order: Order = "bn_act",
        init: Init = "ones",
        drop: float = 0.0,
        grid: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(arb, bool):  # as which YAML reads the words on and off
            arb = "on" if arb else "off"
        hidden = hidden_width(dim, hidden_ratio)
        if n_branches < 1 or hidden % n_branches:
            raise ValueError(
                f"n_branches must divide the hidden width {hidden}: one of "
                f"{[n for n in range(1, hidden + 1) if hidden % n == 0]}, got {n_branches}"
            )
        if not channel:
            n_branches, arb = 1, "off"
        width = hidden // n_branches
        self.fc1 = nn.Linear(dim, width)
        self.branches = nn.ModuleList(
            _branch(width, act, arb, mirror=init == "mirror" and index % 2 == 1)
            for index in range(n_branches)
        )
        self.bn_mid = _batch_norm(hidden, channel if bn_mid is None else bn_mid)
        self.dw = None
        if grid != (1, 1) if spatial is None else spatial:
            self.dw = DepthwiseBlock(hidden, kernel_size, dw_residual, dw_order)
        self.fc2 = nn.Linear(hidden, dim)
        self.bn_out = _batch_norm(dim, channel if bn_out is None else bn_out)
        self.drop = nn.Dropout(drop)
        self.apply(init_linear)

    def forward(self, x: Tensor, prefix: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Mix the map (B, H, W, C) and, when given, the prefix tokens (B, P, C) beside it.

        Prefix tokens skip the depthwise block; the batch norms see them among all tokens.
        """
        if prefix is None:
            return self.mix(x)
        size, num_prefix_tokens = x.shape[1:3], prefix.shape[1]
        t = self._expand(torch.cat([prefix, x.flatten(1, 2)], dim=1))
        if self.dw is not None:
            patches = self.dw(t[:, num_prefix_tokens:].unflatten(1, size)).flatten(1, 2)
            t = torch.cat([t[:, :num_prefix_tokens], patches], dim=1)
        y = self._project(t)
        return y[:, num_prefix_tokens:].unflatten(1, size), y[:, :num_prefix_tokens]

    def mix(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, H, W, C)."""
        # In training mode the batch norms need the statistics of the whole batch.
        if x.device.type != "cpu" or self.training or not can_merge(x, self.bn_mid):
            return self._mix(x)
        # A few images at a time: what lies between W1 and W2 is passed over six times and should
        # stay in the cache.
        hidden_bytes = self.fc2.in_features * x.shape[1] * x.shape[2] * x.element_size()
        num_images = max(1, CACHE_BYTES * torch.get_num_threads() // hidden_bytes)
        pieces = [self._mix(images) for images in x.split(num_images)]
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def _mix(self, x: Tensor) -> Tensor:
        t = self._expand(x)
        return self._project(t if self.dw is None else self.dw(t))

    def mix_prefix(self, prefix: Tensor) -> Tensor:
        """(B, P, C) -> (B, P, C): everything but the depthwise block."""
        return self._project(self._expand(prefix))

    def _expand(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., h): W1, the branches side by side, batch norm."""
        z = self.fc1(x)
        if len(self.branches) == 1 and self.bn_mid is None:
            return self.branches[0](z)
        if not can_merge(z, self.bn_mid):
            return normalise(torch.cat([branch(z) for branch in self.branches], -1), self.bn_mid)
        # In one pass: what is left of each branch after its inner function, the batch norm and
        # the concatenation.
        width = z.shape[-1]
        t = z.new_empty(*z.shape[:-1], width * len(self.branches))
        scale, shift = scale_and_shift(self.bn_mid, t)
        for index, module in enumerate(self.branches):
            branch = cast("Base | Arb | RPReLU", module)
            part = slice(index * width, (index + 1) * width)
            part_scale, part_shift = scale[part], shift[part]
            own_scale, own_shift = branch.outer()
            if own_shift is not None:
                part_shift = affine(own_shift, part_scale, part_shift)
            if own_scale is not None:
                part_scale = own_scale * part_scale
            affine(branch.inner(z), part_scale, part_shift, out=t[..., part])
        return t

    def _project(self, t: Tensor) -> Tensor:
        """(..., h) -> (..., C): W2 and batch norm."""
        y = self.fc2(self.drop(t))
        if self.bn_out is not None and can_merge(y, self.bn_out):
            return self.drop(affine(y, *scale_and_shift(self.bn_out, y), out=y))
        return self.drop(normalise(y, self.bn_out))


def _branch(width: int, act: str, arb: str, *, mirror: bool) -> Base | Arb | RPReLU:
    base = Base(width, act)  # refuses an unknown name
    if arb == "rprelu":
        return RPReLU(width)
    return Arb(width, act, mirror=mirror) if arb == "on" else base


def _batch_norm(channels: int, wanted: bool) -> nn.BatchNorm1d | None:
    return nn.BatchNorm1d(channels) if wanted else None
