"""The spatial-channel factorized bilinear operation, which all variants share.

Source: AFBO (Wu et al., ICLR 2025, https://openreview.net/forum?id=MJyqwBVgMs), Eq. 4; Table 5
(order), Table 6 (activation).
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from backbones.layers.activations import create_activation
from backbones.layers.init import init_linear
from backbones.mixer import Mixer
from backbones.mixers.afbo.channel_mappings import ChannelMapping
from backbones.mixers.afbo.spatial_models import SameConv, SpatialName, create_spatial_model

Order = Literal["cs", "sc"]
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
        act: Activation, such as "silu"; see ``layers.activations.create_activation``.
        act_on: The branch that it acts on, "a", "b" or "ab" for both, or "post" for the product.
        init: "ours" or "timm", see ``reset_parameters``.
        bias: Add a bias in mappings, convolutions and W3.
        drop: Dropout after the product and after W3.

    Shape: (B, H, W, C) -> (B, H, W, C).

    Raises:
        ValueError: An unknown switch, an even kernel, or a full convolution after the mappings.

    Source: AFBO (ICLR 2025), Eq. 4, https://openreview.net/forum?id=MJyqwBVgMs.
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
        act: str = "silu",
        act_on: ActOn = "a",
        init: Init = "ours",
        bias: bool = True,
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        dim, hidden = cm_a.dim, cm_a.hidden
        if sm == "conv" and order == "cs":
            raise ValueError(
                f"sm=conv needs order=sc: between {hidden} hidden channels it would hold "
                f"{hidden**2 * kernel_size**2:,} weights; with order=cs sm must be one of dw, max, "
                "avg, sa, none"
            )
        channels = hidden if order == "cs" else dim
        self.order, self.act, self.act_on = order, act, act_on
        self.activation = create_activation(act)
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
        """Initialise near the plain bilinear product, at a scale that lets gradients through.

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

    def mix(self, x: Tensor) -> Tensor:
        """Return W3 (act(SM_a(CM_a(x))) * SM_b(CM_b(x))) + b3, Eq. 4: (B, H, W, C) -> the same."""
        if self.order == "sc":
            a, b = self.cm_a(self.sm_a(x)), (self.cm_b or self.cm_a)(self.sm_b(x))
        else:
            mapped = self.cm_a(x)
            a, b = self.sm_a(mapped), self.sm_b(mapped if self.cm_b is None else self.cm_b(x))
        return self._combine(a, b)

    def mix_prefix(self, prefix: Tensor) -> Tensor:
        """Mix prefix tokens without the spatial models: (B, P, C) -> (B, P, C)."""
        a = self.cm_a(prefix)
        return self._combine(a, a if self.cm_b is None else self.cm_b(prefix))

    def _combine(self, a: Tensor, b: Tensor) -> Tensor:
        """Return W3 (act(a) * b) + b3, with the activation where ``act_on`` places it."""
        act = self.activation
        if self.act_on in ("a", "ab"):
            a = act(a)
        if self.act_on in ("b", "ab"):
            b = act(b)
        product = act(a * b) if self.act_on == "post" else a * b
        return self.drop(self.proj(self.drop(product)))
