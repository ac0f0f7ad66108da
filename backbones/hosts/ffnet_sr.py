"""FFNet_sr and FFNet_sr-light: FFNified attention and ConvNeXt blocks that enlarge images.

    x <- x + V(GELU(K(W x)));  x <- x + W2 GELU(W1 D(x));  y = PixelShuffle(conv(x) + repeat(image))

K, V and D are 3x3 depthwise convolutions. All convolutions have a bias; norms and LayerScale are
left out.

Source: Yun et al., "FFNet: MetaMixer-based Efficient Convolutional Mixer Design",
https://arxiv.org/abs/2406.02021, Sec. 4.2, App. F.2 and Fig. 11. The authors' code and checkpoints
(github.com/ysj9909/FFNet, super_resolution) are for x2; the paper reports x4.
"""

from __future__ import annotations

from typing import cast

import torch
from timm.layers import DropPath, LayerNorm2d
from torch import Tensor, nn

from backbones.hosts.scaffolds.hierarchical import drop_path_rates
from backbones.hosts.scaffolds.super_resolution import (
    AnchoredUpsampler,
    SuperResolutionBackbone,
    register_enlarger,
    rename_released,
)
from backbones.hosts.scaffolds.timm_source import refuse_pretrained
from backbones.layers.pointwise import PointwiseConv2d
from backbones.layers.reparam import depthwise
from backbones.mixer import Mixer
from backbones.mixer_calls import mix_nchw
from backbones.mixers.metamixer.instances import convnext_block, convolutional
from backbones.options import variant_of
from backbones.slots import HostConfig, MixerFactory, Slot, factory_at, fill

WIDTH, EXPANSION = 96, 2
# The authors' names: 0, 1 and 3 are W, K, V of a token mixer, and D, W1, W2 of a channel mixer.
PARTS = {"0": "query", "1": "memory.key", "3": "memory.value"}
RELEASED = [
    (r"proj\.(weight|bias)", r"stem.\1"),
    *(
        (rf"body\.(\d+)\.(token|channel)_mixer\.{number}\.(.+)", rf"blocks.\1.\2_mixer.{part}.\3")
        for number, part in PARTS.items()
    ),
    (r"conv_bef_up\.(weight|bias)", r"upsampler.conv.\1"),
]


class FFNetSR(SuperResolutionBackbone):
    """One map at stride 1; NCHW in channels_last memory inside.

    A channel mixer replaces W1 and W2 behind D, a token mixer the whole FFNified attention. As the
    network is without norms, a replaced mixer gets a LayerNorm before it.

    Args:
        config: See ``HostConfig``.
        depth: Number of blocks.

    Source: FFNet, https://arxiv.org/abs/2406.02021.
    """

    block_layout = "nchw"
    token_slots = ("token_mixer",)
    channel_slots = ("channel_mixer",)

    def __init__(self, config: HostConfig, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        rates = drop_path_rates(config.drop_path_rate, depth)
        self.blocks = nn.ModuleList(FFNetSRBlock(WIDTH, rate) for rate in rates)
        self.set_width(WIDTH)
        self.dense = config.dense
        for index, block in enumerate(self.blocks):
            slot = Slot(WIDTH, EXPANSION, config.grid(1), 0, index, dense=config.dense)
            cast("FFNetSRBlock", block).fill_slots(slot, config.channel_mixer, config.token_mixer)
        self.set_radius(2 + 3 * depth)  # of the first and last convolution, and of K, V and D

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the map of the last block: (B, 3, H, W) -> (B, 96, H, W)."""
        x = self.stem(images.contiguous(memory_format=torch.channels_last))
        for block in self.blocks:
            x = block(x)
        return (x.contiguous(),)

    def upsampler(self, scale: int) -> AnchoredUpsampler:
        """Build one convolution, the repeated input and a pixel shuffle."""
        return AnchoredUpsampler(self.num_features, self.check_scale(scale))

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename the authors' tensors; the last convolution becomes ``upsampler.conv``."""
        if "proj.weight" not in state_dict:
            return state_dict
        return rename_released(state_dict, RELEASED)


class FFNetSRBlock(nn.Module):
    """x + drop_path(token(x)), then x + drop_path(channel(x)).

    Shape: (B, C, H, W) -> (B, C, H, W).
    """

    def __init__(self, dim: int, drop_path: float) -> None:
        super().__init__()
        key, value, query = (depthwise(dim, 3) for _ in range(3))
        self.token_mixer: nn.Module = convolutional(PointwiseConv2d(dim, dim), key, value)
        self.channel_mixer: nn.Module = convnext_block(query, dim, EXPANSION * dim)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Apply token and channel mixer, each with its shortcut: (B, C, H, W) -> the same."""
        x = x + self.drop_path(mix_nchw(self.token_mixer, x))
        return x + self.drop_path(mix_nchw(self.channel_mixer, x))

    def fill_slots(
        self, slot: Slot, channel_mixer: MixerFactory | None, token_mixer: MixerFactory | None
    ) -> None:
        """Replace W1 and W2 by a channel mixer after D, and FFNified attention by a token mixer."""
        if factory_at(channel_mixer, slot) is not None:
            self.channel_mixer = NormedChannelMixer(self.channel_mixer, slot.dim)
        fill(self.channel_mixer, "memory", channel_mixer, slot)
        make = factory_at(token_mixer, slot)
        if make is not None:
            fill(self, "token_mixer", lambda slot: NormedTokenMixer(slot.dim, make(slot)), slot)


class NormedChannelMixer(nn.Module):
    """ConvNeXt block whose keys and values are replaced by a LayerNorm and a mixer.

    Shape: (B, C, H, W) -> (B, C, H, W).
    """

    def __init__(self, block: nn.Module, dim: int) -> None:
        super().__init__()
        self.query = block.get_submodule("query")
        self.norm = LayerNorm2d(dim)
        self.memory = block.get_submodule("memory")

    def forward(self, x: Tensor) -> Tensor:
        """Mix the normed output of the query convolution: (B, C, H, W) -> (B, C, H, W)."""
        return mix_nchw(self.memory, self.norm(self.query(x)))


class NormedTokenMixer(Mixer):
    """LayerNorm and a mixer, for a block without norm."""

    def __init__(self, dim: int, mixer: Mixer) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.mixer = mixer

    def mix(self, x: Tensor) -> Tensor:
        """Return mixer(norm(x)): (B, H, W, C) -> (B, H, W, C)."""
        return self.mixer(self.norm(x))


def build(config: HostConfig, *, name: str, depth: int) -> FFNetSR:
    """Build an FFNet_sr.

    Args:
        config: See ``HostConfig``.
        name: Its name.
        depth: Number of blocks.
    """
    refuse_pretrained(name, config)
    return FFNetSR(config, depth)


@register_enlarger("ffnet_sr_light", source="FFNet, Table 4 and App. F.2")
@variant_of(build, fixed={"name": "ffnet_sr_light", "depth": 36})
def ffnet_sr_light() -> None:
    """Width 96, 36 blocks; trained on DIV2K."""


@register_enlarger("ffnet_sr", source="FFNet, Table 4 and App. F.2")
@variant_of(build, fixed={"name": "ffnet_sr", "depth": 48})
def ffnet_sr() -> None:
    """Width 96, 48 blocks; trained on DF2K."""
