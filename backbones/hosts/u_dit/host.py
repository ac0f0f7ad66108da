"""U-DiT, a U-shaped diffusion transformer, and U-FFNet, which has FFNified attention outside.

Source: Tian et al., "U-DiTs: Downsample Tokens in U-Shaped Diffusion Transformers", NeurIPS 2024,
https://arxiv.org/abs/2405.02730, and the authors' code (github.com/YuchuanTian/U-DiT); Yun et al.,
"FFNet: MetaMixer-based Efficient Convolutional Mixer Design", https://arxiv.org/abs/2406.02021,
Sec. 4.4 and Table 7 (U-FFNet). U-FFNet's code is not published: kernel, projections and BatchNorm
are options, and its printed 19.6 G fits no plain reading; see configs/published/ffnet.yaml.

Names in checkpoints may be the authors'.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, cast

import torch.nn.functional as F
from torch import Tensor, nn

from backbones.hosts.scaffolds.denoising import (
    CHANNELS,
    CLASSES,
    DENOISING_HOST,
    DenoisingBackbone,
    LabelEmbedder,
    TimeEmbedder,
    init_denoiser,
    zero,
)
from backbones.hosts.scaffolds.hierarchical import drop_path_rates
from backbones.hosts.scaffolds.timm_source import refuse_pretrained
from backbones.hosts.u_dit.blocks import (
    RATIO,
    DownsampledAttention,
    FFNifiedAttention,
    PixelDown,
    PixelUp,
    UDiTBlock,
    UDiTFinalLayer,
)
from backbones.layers.bounds import check_multiple
from backbones.layers.reparam import fuse
from backbones.options import check_odd
from backbones.parameters.layer_ids import LayerNames
from backbones.registry import register_host
from backbones.slots import HostConfig, Slot

Projections = Literal[1, 2, 3]
WIDTHS = (1, 2, 4, 2, 2)  # of the stages over the first
LEVELS = (0, 1, 2, 1, 1)  # index of the embedder of each stage
BOTTLENECK = 2
EMBEDDERS = ("t_embedders.", "y_embedders.")
LEAST = 8  # the coarsest map has two rows for the four maps of attention
AUTHORS = ("encoder_level_1", "encoder_level_2", "latent", "decoder_level_2", "decoder_level_1")
PARTS = {
    "attn{}.to_qkv": "attn.qkv", "attn{}.to_out": "attn.proj",
    "attn{}.logit_scale": "attn.logit_scale", "attn{}.downsampler.layer": "attn.dwconv",
    "mlp{}.project_in.0": "mlp.project_in.first", "mlp{}.project_in.1": "mlp.project_in.second",
    "mlp{}.project_out.0": "mlp.project_out.first",
    "mlp{}.project_out.1": "mlp.project_out.second",
    "mlp{}.dwconv": "mlp.dwconv.convs", "adaLN_modulation{}": "adaLN_modulation",
}  # fmt: skip
OUTER = {
    "down1_2.body.0": "stages.1.embed.conv", "down2_3.body.0": "stages.2.embed.conv",
    "up3_2.body.0": "stages.3.embed.conv", "up2_1.body.0": "stages.4.embed.conv",
    "reduce_chan_level2": "stages.3.embed.reduce", "reduce_chan_level1": "stages.4.embed.reduce",
    "x_embedder.proj": "stem",
    **{
        f"{kind}_embedder_{level}": f"{kind}_embedders.{level - 1}"
        for kind in "ty"
        for level in (1, 2, 3)
    },
}  # fmt: skip


class UDiTStage(nn.Module):
    """A change of resolution, if any, and blocks."""

    def __init__(self, embed: nn.Module | None, blocks: Sequence[UDiTBlock]) -> None:
        super().__init__()
        self.embed = embed
        self.blocks = nn.ModuleList(blocks)


class UDiT(DenoisingBackbone):
    """U-DiT or U-FFNet, with slots for token and channel mixers in all stages.

    Args:
        config: See ``HostConfig``; with a patch size above 1 patches become channels first.
        channels: C.
        num_classes: K.
        learn_sigma: Predict variances as well.
        dim: Width of the first stage.
        depths: Blocks per stage, two for each of the authors'.
        heads: Heads of the attention.
        ffnified: Kernel, projections and BatchNorm of U-FFNet; None for attention everywhere.

    Source: U-DiT (2024), https://arxiv.org/abs/2405.02730.
    """

    layer_names = LayerNames(stem=("stem.", *EMBEDDERS), tail=EMBEDDERS)

    def __init__(
        self, config: HostConfig, *, channels: int, num_classes: int, learn_sigma: bool, dim: int,
        depths: Sequence[int], heads: int, ffnified: tuple[int, int, bool] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(channels, num_classes, learn_sigma)
        self.patch, self.img_size = config.patch_size, config.img_size
        self.size_divisor = LEAST * self.patch
        area = self.patch**2
        dims = [dim * width for width in WIDTHS]
        self.stem = nn.Conv2d(channels * area, dim, 3, padding=1)
        widths = [dim, 2 * dim, 4 * dim]
        self.t_embedders = nn.ModuleList(TimeEmbedder(width) for width in widths)
        self.y_embedders = nn.ModuleList(LabelEmbedder(num_classes, width) for width in widths)
        embeds = [
            None, PixelDown(dims[0]), PixelDown(dims[1]), PixelUp(dims[2], dims[1], dims[3]),
            PixelUp(dims[3], dims[0], dims[4]),
        ]  # fmt: skip
        rates = iter(drop_path_rates(config.drop_path_rate, sum(depths)))
        stages = []
        for number, (embed, stage_dim, depth) in enumerate(zip(embeds, dims, depths, strict=True)):
            blocks = []
            for _ in range(depth):
                attn: nn.Module = DownsampledAttention(stage_dim, heads)
                if ffnified is not None and number != BOTTLENECK:
                    attn = FFNifiedAttention(stage_dim, *ffnified)
                blocks.append(UDiTBlock(stage_dim, attn, RATIO, next(rates)))
            stages.append(UDiTStage(embed, blocks))
        self.stages = nn.ModuleList(stages)
        self.output = nn.Conv2d(dims[-1], dims[-1], 3, padding=1)
        self.final_layer = UDiTFinalLayer(dims[-1], self.out_channels * area)
        init_denoiser(self)
        zero(self.final_layer.out_proj, self.final_layer.adaLN_modulation[1])
        for number, (stage, stage_dim) in enumerate(zip(stages, dims, strict=True)):
            grid = config.grid(
                self.patch * stage_dim // dim if number <= BOTTLENECK else self.patch
            )
            if number == BOTTLENECK + 1:
                grid = config.grid(2 * self.patch)
            for index, block in enumerate(stage.blocks):
                slot = Slot(stage_dim, RATIO, grid, number, index, dense=config.dense)
                cast("UDiTBlock", block).finish(slot, config)

    def denoise(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Return the prediction: (B, C, H, W), times (B,), labels (B,) -> (B, C or 2 C, H, W).

        Raises:
            ValueError: A side is not a multiple of 8 patches.
        """
        for side in x.shape[2:]:
            check_multiple("data.image_size", side, self.size_divisor)
        conditions = [
            embed_time(times) + embed_label(labels)
            for embed_time, embed_label in zip(self.t_embedders, self.y_embedders, strict=True)
        ]
        x = self.stem(F.pixel_unshuffle(x, self.patch) if self.patch > 1 else x)
        skips = []
        for number, stage_module in enumerate(self.stages):
            stage = cast("UDiTStage", stage_module)
            if 0 < number <= BOTTLENECK:
                skips.append(x)
                x = cast("PixelDown", stage.embed)(x)
            elif number:
                x = cast("PixelUp", stage.embed)(x, skips.pop())
            for block in stage.blocks:
                x = block(x, conditions[LEVELS[number]])
        x = self.final_layer(self.output(x), conditions[1])
        return F.pixel_shuffle(x, self.patch) if self.patch > 1 else x

    def fuse(self) -> UDiT:
        """Fold the branches of the FFNs into single convolutions, in place: for inference."""
        return fuse(self)

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename the authors' tensors; ours pass unchanged."""
        if not any(key.startswith(AUTHORS) for key in state_dict):
            return state_dict
        return {_ours(key): value for key, value in state_dict.items()}


def _ours(key: str) -> str:
    """Return our name of a tensor of the authors' code."""
    for official, ours in OUTER.items():
        if key.startswith(f"{official}."):
            return ours + key.removeprefix(official)
    match = re.match(rf"({'|'.join(AUTHORS)})\.(\d+)\.(.+)", key)
    if match is None:
        return key
    stage, block, inner = AUTHORS.index(match[1]), 2 * int(match[2]), match[3]
    for half in (1, 2):
        for official, ours in PARTS.items():
            name = official.format(half)
            if inner == name or inner.startswith(f"{name}."):
                rest = inner.removeprefix(name)
                return f"stages.{stage}.blocks.{block + half - 1}.{ours}{rest}"
    return key


def _build(config: HostConfig, name: str, fused: bool, **sizes: object) -> UDiT:
    refuse_pretrained(name, config)
    backbone = UDiT(config, **sizes)  # type: ignore[arg-type]
    return backbone.fuse() if fused else backbone


BASE = {"dim": 192, "depths": (4, 10, 16, 10, 4), "heads": 8}
TINY = {"dim": 32, "depths": (1, 1, 2, 1, 1), "heads": 4}
U_DIT = "U-DiT (NeurIPS 2024)"


@register_host("u_dit_b", source=U_DIT, plain_ffn=False, patch_size=1, **DENOISING_HOST)
def u_dit_b(
    config: HostConfig,
    *,
    channels: int = CHANNELS,
    num_classes: int = CLASSES,
    learn_sigma: bool = True,
    fused: bool = False,
) -> UDiT:
    """Widths of 192, 384 and 768, and 4, 10, 16, 10 and 4 blocks.

    Args:
        config: See ``HostConfig``.
        channels: Channels of the input; data modules pass their own number.
        num_classes: Classes; data modules pass their own number.
        learn_sigma: Predict variances as well.
        fused: Build the fused form for inference, whose multiply-adds the paper reports.
    """
    return _build(
        config, "u_dit_b", fused, channels=channels, num_classes=num_classes,
        learn_sigma=learn_sigma, **BASE,
    )  # fmt: skip


@register_host("u_dit_tiny", source=U_DIT, plain_ffn=False, patch_size=2, **DENOISING_HOST)
def u_dit_tiny(
    config: HostConfig,
    *,
    channels: int = CHANNELS,
    num_classes: int = CLASSES,
    learn_sigma: bool = False,
    fused: bool = False,
) -> UDiT:
    """Widths of 32, 64 and 128, six blocks, over patches of 2 x 2.

    Args:
        config: See ``HostConfig``.
        channels: Channels of the input; data modules pass their own number.
        num_classes: Classes; data modules pass their own number.
        learn_sigma: Predict variances as well.
        fused: Build the fused form for inference.
    """
    return _build(
        config, "u_dit_tiny", fused, channels=channels, num_classes=num_classes,
        learn_sigma=learn_sigma, **TINY,
    )  # fmt: skip


@register_host(
    "u_ffnet_b", source="FFNet, Table 7", plain_ffn=False, patch_size=1, **DENOISING_HOST
)
def u_ffnet_b(
    config: HostConfig,
    *,
    channels: int = CHANNELS,
    num_classes: int = CLASSES,
    learn_sigma: bool = True,
    kernel_size: int = 7,
    projections: Projections = 3,
    batch_norm: bool = False,
    fused: bool = False,
) -> UDiT:
    """U-DiT-B with FFNified attention in encoder and decoder, attention in the bottleneck.

    Args:
        config: See ``HostConfig``.
        channels: Channels of the input; data modules pass their own number.
        num_classes: Classes; data modules pass their own number.
        learn_sigma: Predict variances as well.
        kernel_size: Side of the kernels of FFNified attention, odd.
        projections: Its 1x1 convolutions: 1, 2 or 3.
        batch_norm: True for a BatchNorm behind the first of them.
        fused: Build the fused form for inference.
    """
    check_odd(kernel_size)
    return _build(
        config, "u_ffnet_b", fused, channels=channels, num_classes=num_classes,
        learn_sigma=learn_sigma, ffnified=(kernel_size, projections, batch_norm), **BASE,
    )  # fmt: skip


@register_host(
    "u_ffnet_tiny", source="FFNet, Table 7, for small data", plain_ffn=False, patch_size=2,
    **DENOISING_HOST,
)  # fmt: skip
def u_ffnet_tiny(
    config: HostConfig,
    *,
    channels: int = CHANNELS,
    num_classes: int = CLASSES,
    learn_sigma: bool = False,
    kernel_size: int = 7,
    projections: Projections = 2,
    batch_norm: bool = False,
    fused: bool = False,
) -> UDiT:
    """U-DiT-tiny with FFNified attention in encoder and decoder.

    Args:
        config: See ``HostConfig``.
        channels: Channels of the input; data modules pass their own number.
        num_classes: Classes; data modules pass their own number.
        learn_sigma: Predict variances as well.
        kernel_size: Side of the kernels of FFNified attention, odd.
        projections: Its 1x1 convolutions: 1, 2 or 3.
        batch_norm: True for a BatchNorm behind the first of them.
        fused: Build the fused form for inference.
    """
    check_odd(kernel_size)
    return _build(
        config, "u_ffnet_tiny", fused, channels=channels, num_classes=num_classes,
        learn_sigma=learn_sigma, ffnified=(kernel_size, projections, batch_norm), **TINY,
    )  # fmt: skip
