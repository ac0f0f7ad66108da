"""The spatial-channel factorized bilinear operation, which all variants share.

Source: AFBO (Wu et al., ICLR 2025, https://openreview.net/forum?id=MJyqwBVgMs), Eq. 4; Table 5
(order), Table 6 (activation).
"""

from __future__ import annotations

from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.base import Mixer
from backbones.layers.eager import is_eager
from backbones.layers.fused_forms import FUSED_FORMS
from backbones.layers.init import init_linear
from backbones.mixers.afbo.channel_mappings import ChannelMapping
from backbones.mixers.afbo.joined_tokens import mix_joined
from backbones.mixers.afbo.spatial_models import SameConv, SpatialName, create_spatial_model
from backbones.options import check_value

Order = Literal["cs", "sc"]
Act = Literal["silu", "gelu", "relu"]
ActOn = Literal["a", "b", "ab", "post"]
Init = Literal["ours", "timm"]


class SCFBO(Mixer):
    """W3 (act(SM_a(CM_a(x))) * SM_b(CM_b(x))) + b3, without any norm inside.

    Args:
        cm_a: Channel mapping of branch a, C to h.
        cm_b: That of branch b; None shares branch a's.
        sm: Spatial model, one on each branch: "dw" depthwise convolution, "max" or "avg" pooling,
            "sa" spatial attention, "conv" full convolution (order "sc" only), "none".
        kernel_size: Side of the spatial models, odd; spatial attention always has 7.
        order: "cs" maps first and models h channels, "sc" models C channels first.
        act: "silu", "gelu" or "relu".
        act_on: The branch that it acts on, "a", "b" or "ab" for both, or "post" for the product.
        init: "ours" or "timm", see ``reset_parameters``.
        bias: Whether mappings, convolutions and W3 add one.
        drop: Dropout after the product and after W3.

    Shape: (B, H, W, C) -> (B, H, W, C).

    Raises:
        ValueError: An unknown switch, an even kernel, or a full convolution after the mappings.
    """

    value_layer = "proj"
    channel_mappings = ("cm_a", "cm_b")

    def __init__(
        self,
        cm_a: ChannelMapping,
        cm_b: ChannelMapping | None,
        *,
        sm: SpatialName = "dw",
        kernel_size: int = 3,
        order: Order = "cs",
        act: Act = "silu",
        act_on: ActOn = "a",
        init: Init = "ours",
        bias: bool = True,
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        switches = (("order", order, Order), ("act", act, Act), ("act_on", act_on, ActOn))
        for name, value, choices in (*switches, ("init", init, Init)):
            check_value(name, value, choices)
        dim, hidden = cm_a.dim, cm_a.hidden
        if sm == "conv" and order == "cs":
            raise ValueError(
                f"sm=conv needs order=sc: between {hidden} hidden channels it would hold "
                f"{hidden**2 * kernel_size**2:,} weights; with order=cs sm must be one of dw, max, "
                "avg, sa, none"
            )
        channels = hidden if order == "cs" else dim
        self.order, self.act, self.act_on = order, act, act_on
        self.cm_a, self.cm_b = cm_a, cm_b
        for mapping in (cm_a, cm_b):
            if mapping is not None and not bias:
                mapping.leave_out_bias()
        self.sm_a = create_spatial_model(sm, channels, kernel_size, bias)
        self.sm_b = create_spatial_model(sm, channels, kernel_size, bias)
        self.proj = nn.Linear(hidden, dim, bias=bias)
        self.drop = nn.Dropout(drop)
        self.reset_parameters(init)

    def reset_parameters(self, init: Init = "ours") -> None:
        """Start near the plain bilinear product, at a scale that lets gradients through.

        The paper is silent. "timm" is ViT's recipe, a truncated normal of 0.02 for all linear
        weights and torch's own for convolutions; the output is then 4 to 7 times smaller than an
        FFN's, since three factors shrink it. "ours": mappings 1/sqrt(fan in), convolutions the
        identity plus 0.02, W3 0.02, biases 0.
        """
        for mapping in (self.cm_a, self.cm_b):
            if mapping is not None:
                mapping.reset_parameters(0.02 if init == "timm" else None)
        for model in (self.sm_a, self.sm_b):
            if isinstance(model, SameConv) and init == "ours":
                model.start_as_identity()
        init_linear(self.proj)

    def forward(self, x: Tensor, prefix: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Mix the map (B, H, W, C) and, when given, the prefix tokens (B, P, C) beside it."""
        fused = FUSED_FORMS.get(type(self))
        if fused is not None and fused.serves(self, x):
            return fused.mix(self, x, prefix)
        mapped_first = self.order == "cs" and self.cm_b is not None
        if prefix is None or not mapped_first or torch.is_grad_enabled() or not is_eager(x):
            return super().forward(x, prefix)
        maps = (self.cm_a, cast("ChannelMapping", self.cm_b))
        spatial = (self.sm_a, self.sm_b)
        return mix_joined(x, prefix, maps, spatial, self._activate, self._project)

    def mix(self, x: Tensor) -> Tensor:
        """Eq. 4, W3 (act(SM_a(CM_a(x))) * SM_b(CM_b(x))) + b3: (B, H, W, C) -> (B, H, W, C)."""
        # One branch after the other, so that the second finds the first one's memory free.
        if self.order == "sc":
            a = self._activate(self.cm_a(self.sm_a(x)), "a")
            b = self._activate((self.cm_b or self.cm_a)(self.sm_b(x)), "b")
        elif self.cm_b is not None:
            a = self._activate(self.sm_a(self.cm_a(x)), "a")
            b = self._activate(self.sm_b(self.cm_b(x)), "b")
        else:
            mapped = self.cm_a(x)
            a = self._activate(self.sm_a(mapped), "a")
            b = self._activate(self.sm_b(mapped), "b")
        return self._combine(a, b)

    def mix_prefix(self, prefix: Tensor) -> Tensor:
        """(B, P, C) -> (B, P, C): everything but the spatial models."""
        a = self.cm_a(prefix)
        b = a if self.cm_b is None else self.cm_b(prefix)
        return self._combine(self._activate(a, "a"), self._activate(b, "b"))

    def _combine(self, a: Tensor, b: Tensor) -> Tensor:
        return self._project(a.mul_(b) if self._in_place() else a * b)

    def _project(self, product: Tensor) -> Tensor:
        product = self._activate(product, "post")
        if not self.training:  # where calling a module that does nothing costs as much as a token
            return self.proj(product)
        return self.drop(self.proj(self.drop(product)))

    def _activate(self, x: Tensor, place: str) -> Tensor:
        """Apply the activation in one of its places "a", "b" and "post", if it acts there."""
        if place != self.act_on and not (self.act_on == "ab" and place in "ab"):
            return x
        if self.act == "gelu":
            return F.gelu(x)
        activation = F.silu if self.act == "silu" else F.relu
        return activation(x, self._in_place())

    def _in_place(self) -> bool:
        # With a shared mapping the two branches may be one tensor.
        return self.cm_b is not None and not torch.is_grad_enabled()
