"""Feed-forward network of Monarch matrices, a control for AFBO's factorisation at equal size.

    y = M2 GELU(M1 x + b1) + b2,  M = P^T L P R

R and L are block-diagonal; P orders channels so that each block of L reads from every block of R.

Source: Dao et al., "Monarch: Expressive Structured Matrices for Efficient and Accurate Training",
ICML 2022, https://arxiv.org/abs/2204.00595. Four blocks and the inner width, the smaller of both
widths, are the authors'. Blocks are drawn so that the entries of M have the deviation of the dense
matrices, 0.02; the authors project dense ones.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backbones.layers.activations import create_activation
from backbones.layers.bounds import check_divisor
from backbones.mixer import PointwiseMixer
from backbones.registry import register_mixer
from backbones.slots import hidden_width

DEVIATION = 0.02


@register_mixer("monarch", kind="channel", source="Monarch (ICML 2022)")
class MonarchFFN(PointwiseMixer):
    """M2 GELU(M1 x + b1) + b2, class tokens among the tokens.

    Args:
        dim: Channels C, a multiple of the blocks.
        hidden_ratio: M, hidden width over C.
        blocks: G, blocks of R and of L.
        act: Activation, such as "gelu"; see ``layers.activations.create_activation``.

    Shape: (..., C) -> (..., C). Parameters with M >= 1: 2 (M + 1) C^2 / G + (M + 1) C.

    Raises:
        ValueError: Blocks that do not divide C and the hidden width.

    Source: Monarch (ICML 2022), https://arxiv.org/abs/2204.00595.
    """

    value_layer = "fc2"
    channel_mappings = ("fc1",)

    def __init__(
        self, dim: int, *, hidden_ratio: float = 4.0, blocks: int = 4, act: str = "gelu"
    ) -> None:
        super().__init__()
        self.act = create_activation(act)
        hidden = hidden_width(dim, hidden_ratio)
        self.fc1 = MonarchLinear(dim, hidden, blocks)
        self.fc2 = MonarchLinear(hidden, dim, blocks)

    def mix(self, x: Tensor) -> Tensor:
        """Return M2 GELU(M1 x + b1) + b2: (..., C) -> (..., C)."""
        return self.fc2(self.act(self.fc1(x)))


class MonarchLinear(nn.Module):
    """P^T L P R x + b: (..., in) -> (..., out), with channels i, i + G, ... in a block of L.

    Raises:
        ValueError: Blocks that do not divide both widths.
    """

    def __init__(self, in_features: int, out_features: int, blocks: int) -> None:
        super().__init__()
        check_divisor("blocks", blocks, in_features, out_features)
        self.blocks = blocks
        widths = [width // blocks for width in (in_features, out_features)]
        inner = min(widths)
        self.right = nn.Parameter(torch.empty(blocks, inner, widths[0]))
        self.left = nn.Parameter(torch.empty(blocks, widths[1], inner))
        self.bias = nn.Parameter(torch.zeros(out_features))
        paths = max(1.0, inner / blocks)  # from an input to an output
        for factor in (self.right, self.left):
            nn.init.trunc_normal_(factor, std=(DEVIATION * paths**-0.5) ** 0.5)

    def dense_weight(self) -> Tensor:
        """Return P^T L P R (out, in)."""
        width = self.blocks * self.right.shape[-1]
        return (self(torch.eye(width).to(self.right)) - self.bias).mT

    def forward(self, x: Tensor) -> Tensor:
        """Return P^T L P R x + b: (..., in) -> (..., out)."""
        parts = x.unflatten(-1, (self.blocks, -1))
        inner = torch.einsum("...kp,kqp->...kq", parts, self.right).flatten(-2)
        ordered = inner.unflatten(-1, (-1, self.blocks))
        return torch.einsum("...rl,lsr->...sl", ordered, self.left).flatten(-2) + self.bias
