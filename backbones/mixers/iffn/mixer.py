"""IFFN: several activations of one narrow hidden layer, with learned coefficients.

Source: Xu et al., ICML 2024, Eq. 5 and Fig. 4, https://proceedings.mlr.press/v235/xu24n.html.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from backbones.layers.bounds import check_divisor
from backbones.layers.init import init_linear
from backbones.layers.norms import normalise
from backbones.mixer import Mixer
from backbones.mixers.iffn.activations import Arb, Base, RPReLU
from backbones.mixers.iffn.checkpoint_conversion import from_released, is_released
from backbones.mixers.iffn.depthwise import DepthwiseBlock, Order, Residual
from backbones.registry import register_mixer
from backbones.slots import hidden_width

ArbName = Literal["on", "off", "rprelu"]
Init = Literal["ones", "mirror"]
Norm = Literal["batch", "layer"]
NO_CLASS_TOKEN = {"deit_*": {"class_token": False}}


@register_mixer(
    "iffn",
    kind="channel",
    source="IFFN (ICML 2024), Eq. 5, Sec. 4.3, Fig. 4b",
    # Marked with "*" in Table 1.
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
    """LN(W2 (t + GELU(BN(DW(t)))) + b2), t = LN(concat_i Arb_i(W1 x + b1)).

    The defaults are those of the authors' code, which is public for DeiT alone. Whether other hosts
    had the same form is unknown, since counts cannot tell it from ``iffn_bn``.

    Args:
        dim: Channels C.
        hidden_ratio: M, the hidden width h divided by C.
        channel: True activates h / N channels in N branches (Eq. 5); False has h channels and the
            plain activation, as in an FFN.
        spatial: True adds the depthwise block (Sec. 4.3). The default adds it to maps of more than
            one token. With ``channel`` and ``spatial`` off, the mixer is an FFN.
        n_branches: N, a divisor of the hidden width.
        act: phi: gelu, softplus, elu, silu, relu, prelu (Table 3) or another activation; see
            ``layers.activations.create_activation``.
        arb: "on" for beta phi(alpha x + gamma) + theta, "off" for phi in each branch, "rprelu" for
            RPReLU (Fig. 3), which ignores ``act``. True means "on" and False "off".
        kernel_size: Side of the depthwise convolution, odd (Table 6).
        norm: Type of ``bn_mid`` and ``bn_out``: "layer" as released, or "batch". With "layer" alpha
            and beta get weight decay and the convolution torch's initialisation, as released.
        bn_mid: Add a norm after the concatenation; by default the value of ``channel``.
        bn_out: Add a norm after W2; by default the value of ``channel``.
        dw_residual: "outside" adds t to the output of the block, after norm and GELU, as released.
            True adds t to the convolution's output, as CMT does. False adds it nowhere.
        dw_order: "bn_act" for GELU(BN(.)), "act_bn" for BN(GELU(.)) after the convolution.
        init: Initial coefficients of Arb: "ones" for phi(x) in all branches, "mirror" for phi(-x)
            in every second branch.
        drop: Dropout before and after W2. With layer norms, the first dropout precedes the
            depthwise block and the second follows the last norm, as released.
        grid: Size of the map at the build resolution.

    Shape: (B, H, W, C) -> (B, H, W, C). Parameters, for M = 4 and kernel k:
        (4 / N + 4) C^2 + (4 / N + 1 + 38 + 4 k^2) C.

    Raises:
        ValueError: N must divide h, the kernel size must be odd, and all names must be known.

    Source: IFFN (ICML 2024), Eq. 5, https://proceedings.mlr.press/v235/xu24n.html.
    """

    value_layer = "fc2"
    channel_mappings = ("fc1",)

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
        norm: Norm = "layer",
        bn_mid: bool | None = None,
        bn_out: bool | None = None,
        dw_residual: Residual = "outside",
        dw_order: Order = "bn_act",
        init: Init = "ones",
        drop: float = 0.0,
        grid: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(arb, bool):  # YAML reads on and off as booleans
            arb = "on" if arb else "off"
        hidden = hidden_width(dim, hidden_ratio)
        check_divisor("n_branches", n_branches, hidden)
        if not channel:
            n_branches, arb = 1, "off"
        width = hidden // n_branches
        self.fc1 = nn.Linear(dim, width)
        self.branches = nn.ModuleList(
            _branch(
                width, act, arb, mirror=init == "mirror" and index % 2 == 1, decay=norm == "layer"
            )
            for index in range(n_branches)
        )
        mid, out = (channel if choice is None else choice for choice in (bn_mid, bn_out))
        self.bn_mid = nn.BatchNorm1d(hidden) if mid and norm == "batch" else None
        self.ln_mid = nn.LayerNorm(hidden) if mid and norm == "layer" else None
        self.dw = None
        if grid != (1, 1) if spatial is None else spatial:
            self.dw = DepthwiseBlock(
                hidden, kernel_size, dw_residual, dw_order, "torch" if norm == "layer" else "he"
            )
        self.fc2 = nn.Linear(hidden, dim)
        self.bn_out = nn.BatchNorm1d(dim) if out and norm == "batch" else None
        self.ln_out = nn.LayerNorm(dim) if out and norm == "layer" else None
        self.drop = nn.Dropout(drop)
        self.drops_before_dw = norm == "layer"
        self.options: dict[str, Any] = {
            "channel": channel,
            "spatial": self.dw is not None,
            "n_branches": n_branches,
            "act": act,
            "arb": arb,
            "kernel_size": kernel_size,
            "norm": norm,
            "bn_mid": mid,
            "bn_out": out,
            "dw_residual": dw_residual,
            "dw_order": dw_order,
        }
        self.apply(init_linear)

    def forward(self, x: Tensor, prefix: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Mix the map (B, H, W, C) and, if given, the prefix tokens (B, P, C).

        Prefix tokens skip the depthwise block; the statistics of the batch norms include them.
        """
        if prefix is None:
            return self.mix(x)
        size, num_prefix_tokens = x.shape[1:3], prefix.shape[1]
        t = self.expand(torch.cat([prefix, x.flatten(1, 2)], dim=1))
        if self.dw is not None:
            patches = self.spatial(t[:, num_prefix_tokens:].unflatten(1, size)).flatten(1, 2)
            t = torch.cat([t[:, :num_prefix_tokens], patches], dim=1)
        y = self.project(t)
        return y[:, num_prefix_tokens:].unflatten(1, size), y[:, :num_prefix_tokens]

    def mix(self, x: Tensor) -> Tensor:
        """Apply W1, branches, depthwise block and W2: (B, H, W, C) -> (B, H, W, C)."""
        return self.project(self.spatial(self.expand(x)))

    def mix_prefix(self, prefix: Tensor) -> Tensor:
        """Mix prefix tokens without the depthwise block: (B, P, C) -> (B, P, C)."""
        return self.project(self.expand(prefix))

    def expand(self, x: Tensor) -> Tensor:
        """Return the norm of concat_i Arb_i(W1 x + b1): (..., C) -> (..., h)."""
        z = self.fc1(x)
        t = normalise(torch.cat([branch(z) for branch in self.branches], dim=-1), self.bn_mid)
        if self.ln_mid is not None:
            t = self.ln_mid(t)
        return self.drop(t) if self.drops_before_dw else t

    def spatial(self, t: Tensor) -> Tensor:
        """Return t + GELU(BN(DW(t))), or t without depthwise block: (B, H, W, h) -> the same."""
        return t if self.dw is None else self.dw(t)

    def project(self, t: Tensor) -> Tensor:
        """Return the norm of W2 t + b2: (..., h) -> (..., C)."""
        y = normalise(self.fc2(t if self.drops_before_dw else self.drop(t)), self.bn_out)
        return self.drop(y if self.ln_out is None else self.ln_out(y))

    def convert_state_dict(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Map the released names to ours; ours pass unchanged.

        Args:
            tensors: Tensors by name in the mixer; the authors' names or ours.

        Raises:
            ValueError: Released weights, or those of the earlier default, need a mixer with their
                options.
        """
        if not is_released(tensors):
            self._refuse_other_norms(tensors)
            return tensors
        return from_released(tensors, self.options)

    def _refuse_other_norms(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse weights with batch norms in a mixer with layer norms."""
        if self.options["norm"] == "layer" and {"bn_mid.weight", "bn_out.weight"} & tensors.keys():
            residual = " backbone.mixer.dw_residual=false" * (self.dw is not None)
            raise ValueError(
                "these weights of IFFN have batch norms, the default of earlier versions, and this "
                f"mixer has layer norms; build it with backbone.mixer.norm=batch{residual}, or use "
                "iffn_bn"
            )

    def take_earlier_form(
        self, tensors: Mapping[str, Tensor], export_options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Change to the form of ``iffn_bn``, the default until the authors' code decided."""
        has_batch_norms = {"bn_mid.weight", "bn_out.weight"} & tensors.keys()
        if "norm" in export_options or self.options["norm"] == "batch" or not has_batch_norms:
            return {}
        for place in ("mid", "out"):
            norm = getattr(self, f"ln_{place}")
            if norm is not None:
                like = {"device": norm.weight.device, "dtype": norm.weight.dtype}
                setattr(self, f"bn_{place}", nn.BatchNorm1d(len(norm.weight), **like))
                setattr(self, f"ln_{place}", None)
        self.drops_before_dw = False
        changes: dict[str, Any] = {"norm": "batch"}
        if self.dw is not None and "dw_residual" not in export_options:
            self.dw.shortcut, changes["dw_residual"] = False, False
        self.options |= changes
        return changes


def _branch(width: int, act: str, arb: str, *, mirror: bool, decay: bool) -> Base | Arb | RPReLU:
    base = Base(width, act)  # raises for an unknown name
    if arb == "rprelu":
        return RPReLU(width)
    return Arb(width, act, mirror=mirror, decay=decay) if arb == "on" else base
