"""FFNet_3D: FFNet for point clouds, a U-Net of submanifold convolutions.

    x <- x + BN(V(GELU(BN(K(W LN(x))))));  x <- x + FFN(BN(D(LN(x))))

Source: Yun et al., "FFNet: MetaMixer-based Efficient Convolutional Mixer Design",
https://arxiv.org/abs/2406.02021, Sec. 4.3, App. F.3. The published figures come from the authors'
code (github.com/ysj9909/FFNet), which differs from the text:

* The encoder has five stages from 32 channels. The text names four from 64; with ``form="paper"``
  they follow an embedding of 32 channels without blocks, as their four stages of the decoder need.
* The decoder has two blocks per stage, the text names one.
* Padding in the authors' submanifold convolutions changes nothing, so it is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, cast

from torch import Tensor, nn

from backbones.base import FeatureInfo
from backbones.hosts.ffnet_3d.blocks import (
    RATIO,
    Activation,
    Function,
    PointBlock,
    PointDown,
    PointStage,
    PointUp,
    batch_norm,
)
from backbones.hosts.scaffolds.hierarchical import drop_path_rates
from backbones.hosts.scaffolds.points import FEATURES, POINT_HOST, PointBackbone
from backbones.hosts.scaffolds.timm_source import refuse_pretrained
from backbones.layers.activations import FUNCTIONS
from backbones.layers.sparse import SubmanifoldConv3d, VoxelLevel
from backbones.registry import register_host
from backbones.slots import HostConfig, Slot

STEM = 5  # side of the first kernel
Form = Literal["code", "paper"]


class PointStem(nn.Module):
    """Submanifold convolution without bias, BatchNorm, activation: (P, F) -> (P, C)."""

    def __init__(self, channels: int, dim: int, act: Activation) -> None:
        super().__init__()
        self.conv = SubmanifoldConv3d(channels, dim, STEM, bias=False)
        self.norm = batch_norm(dim)
        self.act: Function = FUNCTIONS[act]

    def forward(self, x: Tensor, level: VoxelLevel) -> Tensor:
        """Embed the voxels: (P, F) -> (P, C)."""
        return self.act(self.norm(self.conv(x, level)))


class FFNet3D(PointBackbone):
    """FFNet_3D; ``stages`` holds the encoder's stages, then the decoder's from coarse to fine.

    A channel mixer replaces the FFN behind the convolution D of each block, a token mixer the part
    from W to V.

    Args:
        config: See ``HostConfig``.
        channels: Features F of a point.
        depths: Blocks of the encoder's stages.
        dims: Channels of the encoder's stages.
        decoder_depths: Blocks of the decoder's stages, fine to coarse.
        decoder_dims: Channels of the decoder's stages, fine to coarse.
        kernel_size: Side of the kernels, odd.
        act: "gelu" or "relu".

    Raises:
        ValueError: The stages of depths and widths differ.

    Source: FFNet, App. F.3, https://arxiv.org/abs/2406.02021.
    """

    def __init__(
        self, config: HostConfig, *, channels: int, depths: Sequence[int], dims: Sequence[int],
        decoder_depths: Sequence[int], decoder_dims: Sequence[int], kernel_size: int,
        act: Activation,
    ) -> None:  # fmt: skip
        super().__init__()
        counts = len(dims), len(decoder_depths), len(decoder_dims)
        if counts != (len(depths), len(depths) - 1, len(depths) - 1):
            raise ValueError(
                f"{len(depths)} stages of the encoder need as many widths, and {len(depths) - 1} "
                f"depths and widths of the decoder; got {', '.join(map(str, counts))}"
            )
        self.channels, self.num_encoder = channels, len(depths)
        self.img_size = config.img_size
        rates, decoder_rates = (
            _split(drop_path_rates(config.drop_path_rate, sum(counts_of_part)), counts_of_part)
            for counts_of_part in (depths, decoder_depths)
        )
        self.stem = PointStem(channels, dims[0], act)
        downs = [None, *(PointDown(*pair, act) for pair in itertools.pairwise(dims))]
        stages = [
            PointStage(down, dim, stage_rates, kernel_size, act)
            for down, dim, stage_rates in zip(downs, dims, rates, strict=True)
        ]
        below = [*decoder_dims[1:], dims[-1]]
        for index in reversed(range(len(decoder_dims))):
            dim = decoder_dims[index]
            up = PointUp(below[index], dims[index], dim, act)
            # The authors' decoder drops most in its first blocks.
            stages.append(PointStage(up, dim, decoder_rates[index][::-1], kernel_size, act))
        self.stages = nn.ModuleList(stages)
        self.num_features = decoder_dims[0] if decoder_dims else dims[-1]
        self.feature_info = (FeatureInfo(self.num_features, 1),)
        widths = [*dims, *reversed(decoder_dims)]
        for number, (stage, dim) in enumerate(zip(stages, widths, strict=True)):
            for index, block in enumerate(stage.blocks):
                slot = Slot(dim, RATIO, (1, 1), number, index, dense=config.dense)
                cast("PointBlock", block).fill_slots(slot, config)

    def encode(self, features: Tensor, level: VoxelLevel) -> Tensor:
        """Return the features of voxels at full resolution: (P, F) -> (P, C).

        Raises:
            ValueError: The points have another number of features than the network takes.
        """
        if features.shape[1] != self.channels:
            raise ValueError(
                f"{self.name or 'ffnet_3d'} takes {self.channels} features per point, got "
                f"{features.shape[1]}; pass backbone.channels={features.shape[1]}"
            )
        x, levels, skips = self.stem(features, level), [level], []
        for index, stage_module in enumerate(self.stages):
            stage = cast("PointStage", stage_module)
            if 0 < index < self.num_encoder:
                skips.append(x)
                levels.append(levels[-1].coarser())
                x = cast("PointDown", stage.embed)(x, levels[-1])
            elif index:
                coarse = levels.pop()
                x = cast("PointUp", stage.embed)(x, skips.pop(), coarse)
            x = stage.run_blocks(x, levels[-1])
        return x


def _split(rates: Sequence[float], counts: Sequence[int]) -> list[list[float]]:
    """Cut rates of blocks into those of stages."""
    rest = iter(rates)
    return [list(itertools.islice(rest, count)) for count in counts]


@register_host("ffnet_3d", source="FFNet, App. F.3, Table 5", **POINT_HOST)
def ffnet_3d(
    config: HostConfig,
    *,
    channels: int = FEATURES,
    form: Form = "code",
    act: Activation = "gelu",
    kernel_size: int = 3,
) -> FFNet3D:
    """Five stages of 2, 2, 2, 6 and 2 blocks, 32 to 512 channels, and a decoder of two per stage.

    Args:
        config: See ``HostConfig``.
        channels: Features of a point; data modules pass their own number.
        form: "code" builds the published network of the authors' code, "paper" that of the text.
        act: "gelu", or "relu" as for S3DIS.
        kernel_size: Side of the kernels in blocks, odd.
    """
    refuse_pretrained("ffnet_3d", config)
    sizes = {
        "code": ((2, 2, 2, 6, 2), (32, 64, 128, 256, 512), (2, 2, 2, 2), (64, 64, 128, 256)),
        "paper": ((0, 2, 2, 6, 2), (32, 64, 128, 256, 512), (1, 1, 1, 1), (64, 64, 128, 256)),
    }
    depths, dims, decoder_depths, decoder_dims = sizes[form]
    return FFNet3D(
        config, channels=channels, depths=depths, dims=dims, decoder_depths=decoder_depths,
        decoder_dims=decoder_dims, kernel_size=kernel_size, act=act,
    )  # fmt: skip


@register_host("ffnet_3d_tiny", source="as ffnet_3d, for small data", **POINT_HOST)
def ffnet_3d_tiny(
    config: HostConfig,
    *,
    channels: int = FEATURES,
    act: Activation = "gelu",
    kernel_size: int = 3,
) -> FFNet3D:
    """Four stages of one block, 16 to 96 channels, and a decoder of one per stage.

    Args:
        config: See ``HostConfig``.
        channels: Features of a point; data modules pass their own number.
        act: "gelu" or "relu".
        kernel_size: Side of the kernels in blocks, odd.
    """
    refuse_pretrained("ffnet_3d_tiny", config)
    return FFNet3D(
        config, channels=channels, depths=(1, 1, 1, 1), dims=(16, 32, 64, 96),
        decoder_depths=(1, 1, 1), decoder_dims=(16, 32, 64), kernel_size=kernel_size, act=act,
    )  # fmt: skip
