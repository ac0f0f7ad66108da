"""SwinIR-light: residual groups of shifted-window attention, a baseline of super-resolution.

Images are mirrored at right and bottom to a multiple of the window by the head, as in the authors'
code. Parts of an image start at multiples of the window, so that they have its windows.

Source: Liang et al., "SwinIR: Image Restoration Using Swin Transformer", ICCVW 2021,
https://arxiv.org/abs/2108.10257, Sec. 3 and Table 3 (lightweight). The authors train with
``drop_path_rate=0.1``. Their checkpoints load.
"""

from __future__ import annotations

from typing import Any

from timm.models.swin_transformer import SwinTransformerBlock
from torch import Tensor, nn

from backbones.hosts.scaffolds.hierarchical import drop_path_rates
from backbones.hosts.scaffolds.super_resolution import (
    PATCH,
    DirectUpsampler,
    SuperResolutionBackbone,
    mean_colour,
    register_enlarger,
    rename_released,
)
from backbones.hosts.scaffolds.timm_source import extend, extend_all, refuse_pretrained
from backbones.hosts.swin import TABLE, SwinBlock
from backbones.layers.axes import to_nchw, to_nhwc
from backbones.mixers.attentions.window_attention import AnyWindowAttention
from backbones.parameters.layer_ids import LayerNames, Rule
from backbones.slots import HostConfig, Slot, fill

WIDTH, HEADS, WINDOW, RATIO = 60, 6, 8, 2.0
DEPTHS = (6, 6, 6, 6)
RELEASED = [
    (r".*\.(attn_mask|relative_position_index)", ""),
    (r"conv_first\.(.+)", r"stem.\1"),
    (r"patch_embed\.norm\.(.+)", r"embed_norm.\1"),
    (r"layers\.(\d+)\.residual_group\.blocks\.(.+)", r"layers.\1.blocks.\2"),
    (r"conv_after_body\.(.+)", r"conv_after.\1"),
    (r"upsample\.0\.(.+)", r"upsampler.conv.\1"),
]


class SwinIR(SuperResolutionBackbone):
    """One map at stride 1: x + conv(norm(groups(norm(x)))) of x = conv(image - mean).

    Source: SwinIR, https://arxiv.org/abs/2108.10257.
    """

    size_divisor = WINDOW
    layer_names = LayerNames(ends=(Rule(r"layers\.(\d+)\.conv\."),), stem=("stem.", "embed_norm."))

    def __init__(self, config: HostConfig) -> None:
        super().__init__()
        self.dense = config.dense
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.embed_norm = nn.LayerNorm(WIDTH)
        rates = iter(drop_path_rates(config.drop_path_rate, sum(DEPTHS)))
        self.layers = nn.ModuleList(
            ResidualGroup([next(rates) for _ in range(depth)]) for depth in DEPTHS
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.conv_after = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.set_width(WIDTH)
        blocks = [b for layer in self.layers for b in layer.get_submodule("blocks").children()]
        for index, block in enumerate(blocks):  # of one stage, as width and map stay the same
            slot = Slot(WIDTH, RATIO, config.grid(1), 0, index, dense=config.dense)
            fill(block, "mlp", config.channel_mixer, slot)
            fill(block, "attn", config.token_mixer, slot)
        # A window reaches one pixel less than its side; convolutions are one per group and four.
        self.set_radius(sum(DEPTHS) * (WINDOW - 1) + len(DEPTHS) + 4)
        self.no_weight_decay = frozenset(
            name for name, _ in self.named_parameters() if name.endswith(TABLE)
        )

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the map (B, 60, H, W) of images (B, 3, H, W)."""
        x = self.stem(images - mean_colour(images))
        y = self.embed_norm(to_nhwc(x))
        for layer in self.layers:
            y = layer(y)
        return ((x + self.conv_after(to_nchw(self.norm(y)))).contiguous(),)

    def upsampler(self, scale: int) -> DirectUpsampler:
        """Build one convolution and a pixel shuffle."""
        return DirectUpsampler(self.num_features, self.check_scale(scale))

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename the authors' tensors; masks and tables of indices are computed anew."""
        if "conv_first.weight" not in state_dict:
            return state_dict
        return rename_released(state_dict, RELEASED)


class ResidualGroup(nn.Module):
    """x + conv(blocks(x)) on (B, H, W, C); every second block shifts its windows."""

    def __init__(self, drop_paths: list[float]) -> None:
        super().__init__()
        make: Any = SwinTransformerBlock
        self.blocks = nn.Sequential(
            *(
                make(
                    WIDTH, (PATCH, PATCH), HEADS, window_size=WINDOW,
                    shift_size=WINDOW // 2 * (index % 2), always_partition=True, dynamic_mask=True,
                    mlp_ratio=RATIO, drop_path=drop_path,
                )
                for index, drop_path in enumerate(drop_paths)
            )
        )  # fmt: skip
        for block in extend_all(self.blocks, SwinBlock):
            block.shift_single_window = True  # as the authors, who decide by the training size
            extend(block, "attn", AnyWindowAttention)
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the blocks and a convolution with its shortcut: (B, H, W, C) -> the same."""
        return x + to_nhwc(self.conv(to_nchw(self.blocks(x))))


@register_enlarger("swinir_light", source="SwinIR, Table 3")
def swinir_light(config: HostConfig) -> SwinIR:
    """Width 60, 4 groups of 6 blocks, 6 heads, windows of 8."""
    refuse_pretrained("swinir_light", config)
    return SwinIR(config)
