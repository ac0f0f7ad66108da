"""Manhattan self-attention: softmax attention that decays with the distance of two tokens.

    y = W (A V + L V),  A = softmax(R(Q) R(K)^T / sqrt d + log D)
    D_nm = g^(|x_n - x_m| + |y_n - y_m|)

The decomposed form attends within rows and then within columns: A_H (A_W V), where A_W and A_H
decay with the distance along their axis. g differs between heads, L is a depthwise 5x5 convolution,
and R turns pairs of channels by the token's index in row-major order.

Source: Fan et al., "RMT: Retentive Networks Meet Vision Transformers", CVPR 2024,
https://arxiv.org/abs/2309.11523. The equation is that of the authors' code
(https://github.com/qhfan/RMT), which gave the published numbers; ``form="paper"`` is the text's
A = softmax(Q K^T / sqrt d) * D. The paper leaves g and the initialisation open; g = 1 - 2^(-2 - r
i / h) of head i, r = 4, 4, 6, 6 by stage, the full form in the fourth stage and truncated normal
weights of 0.02 are those of the released RMT-S.

Axes: B images, H W map, N tokens, C channels, h heads of d channels.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.bounds import check_multiple, check_range
from backbones.layers.heads import usual_heads
from backbones.layers.init import init_linear
from backbones.layers.rotary import rotate_by_index
from backbones.mixer import Mixer
from backbones.options import check_odd
from backbones.registry import register_mixer
from backbones.slots import Slot

Form = Literal["released", "paper"]

RANGES = (4.0, 4.0, 6.0, 6.0)  # by stage
FIRST = 2.0


@register_mixer("retention", kind="token", source="RMT (CVPR 2024), form of the released code")
class ManhattanAttention(Mixer):
    """W (A V + L V) with attention A that decays with the distance of two tokens.

    Decays are computed for each map size. The decomposed form takes N (H + W) products, the full
    one N^2. Class tokens are not mixed: the host pools its map.

    Args:
        dim: Channels C, even in the released form.
        slot: Place in the host; its stage sets the form and the decays.
        form: The released code's decay in the logits behind R ("released"), or the text's decay of
            the weights without R ("paper").
        num_heads: h, a divisor of C, and of C / 2 in the released form; by default as many as leave
            each 32 channels or more.
        decomposed: Attend within rows, then within columns; by default in all but the fourth stage.
        decay_range: r; by default 4, 4, 6 or 6 by stage.
        kernel_size: Side of L, odd.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 4 C^2 + 30 C.

    Raises:
        ValueError: An even kernel, negative r, or heads of a width that the form lacks.

    Source: RMT (CVPR 2024), https://arxiv.org/abs/2309.11523.
    """

    def __init__(
        self,
        dim: int,
        *,
        slot: Slot | None = None,
        form: Form = "released",
        num_heads: int | None = None,
        decomposed: bool | None = None,
        decay_range: float | None = None,
        kernel_size: int = 5,
    ) -> None:
        super().__init__()
        check_odd(kernel_size)
        stage = min(slot.stage if slot else 0, 3)
        spread = RANGES[stage] if decay_range is None else decay_range
        check_range("decay_range", spread, 0)
        self.form = form
        if form == "paper":
            self.num_heads = usual_heads(dim, num_heads)
        else:
            check_multiple("dim with form=released", dim, 2)
            self.num_heads = usual_heads(dim // 2, num_heads, 16)
        self.decomposed = stage < 3 if decomposed is None else decomposed
        self.decays = [
            1 - 2 ** (-FIRST - spread * head / self.num_heads) for head in range(self.num_heads)
        ]
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.lepe = nn.Conv2d(dim, dim, kernel_size, padding=kernel_size // 2, groups=dim)
        self.apply(init_linear)

    def mix(self, x: Tensor) -> Tensor:
        """Attend with decay: (B, H, W, C) -> (B, H, W, C)."""
        parts = self.qkv(x).chunk(3, dim=-1)
        # (B, h, H, W, d) each.
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).movedim(-2, 1) for part in parts)
        if self.form == "released":
            q, k = rotate_by_index(q, k)
        down, right = (self._log_decay(side, q) for side in x.shape[1:3])
        if self.decomposed:
            mixed = self._attend(q, k, v, right[:, None])
            q, k, mixed = (part.transpose(2, 3) for part in (q, k, mixed))
            mixed = self._attend(q, k, mixed, down[:, None]).transpose(2, 3)
        else:
            decay = down[:, :, None, :, None] + right[:, None, :, None, :]
            q, k, v = (part.flatten(2, 3) for part in (q, k, v))
            mixed = self._attend(q, k, v, decay.flatten(3).flatten(1, 2)).unflatten(2, x.shape[1:3])
        local = to_nhwc(self.lepe(to_nchw(parts[2])))
        return self.proj(mixed.movedim(1, -2).flatten(3) + local)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        """Return A v: three of (..., N, d) -> (..., N, d)."""
        logits = (q * q.shape[-1] ** -0.5) @ k.mT
        if self.form == "paper":
            return (logits.softmax(dim=-1) * log_decay.exp().to(q.dtype)) @ v
        return (logits + log_decay).softmax(dim=-1).to(v.dtype) @ v

    def _log_decay(self, length: int, like: Tensor) -> Tensor:
        """Return log D along an axis in float32 at least, (h, length, length)."""
        precise = torch.promote_types(like.dtype, torch.float32)
        place = torch.arange(length, device=like.device)
        distance = (place[:, None] - place).abs().to(precise)
        decays = torch.tensor(self.decays, device=like.device, dtype=precise)
        return decays.log()[:, None, None] * distance
