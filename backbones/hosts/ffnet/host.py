"""FFNet-1 to 4 and the backbone of FFNet_seg: FFNified attention and ConvNeXt blocks.

    x <- x + drop_path(ls1 * V(GELU(K(BN(W x)))));  x <- x + drop_path(ls2 * W2 GELU(W1 D(x)))

The residual branches start without norm; W and the depthwise convolution D have a BatchNorm each.
Large kernels train together with small ones, which ``fuse`` folds in.

Source: Yun et al., "FFNet: MetaMixer-based Efficient Convolutional Mixer Design",
https://arxiv.org/abs/2406.02021, Table 9, App. E and F.1. The published parameters, FLOPs and
checkpoints come from the authors' code (github.com/ysj9909/FFNet), which differs from the text:

* The stem omits the GELU after its last convolution.
* Only FFNet-3, FFNet-4 and FFNet_seg have a LayerScale, each scale of shape (C, 1, 1).
* Downsampling adds a skip around a BatchNorm and a 1x1 convolution, in this order. FFNet_seg has
  dense 3x3 convolutions instead of the 7x7 depthwise ones.
* FFNet_seg adds strips to its 3x3 kernels as well.

The paper's parameters and FLOPs are those of the fused form for classification, and of the training
form for FFNet_seg. Drop path in the published training: 0.1, 0.15, 0.35, 0.4 for FFNet-1 to 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from timm.layers import LayerNorm2d
from torch import Tensor, nn

from backbones.hosts.ffnet.blocks import VARIANTS, FFNetBlock, FFNetStage, SegHead, Variant, stem
from backbones.hosts.ffnet.checkpoint_conversion import convert_official_state_dict, official_form
from backbones.hosts.scaffolds.hierarchical import HierarchicalBackbone, drop_path_rates, restride
from backbones.hosts.scaffolds.timm_source import refuse_pretrained
from backbones.layers.init import init_all
from backbones.layers.reparam import NO_WAY_BACK, fuse, is_fused
from backbones.options import variant_of
from backbones.registry import register_host
from backbones.slots import HostConfig, Slot


class FFNet(HierarchicalBackbone):
    """Four maps at strides 4, 8, 16, 32; NCHW in channels_last memory inside.

    A channel mixer replaces W1 and W2 and is normed by the BatchNorm of D. A token mixer replaces
    the whole FFNified attention and gets a BatchNorm before it.

    Classification ends in a BatchNorm and the mean over the map (FFNet_seg: in two more layers).
    Dense prediction has a LayerNorm on each map, except in FFNet_seg.

    Args:
        variant: Name of the network, "ffnet_1" to "ffnet_4" or "ffnet_seg".
        config: See ``HostConfig``.
        branches: False leaves out the small kernels.

    Source: FFNet, https://arxiv.org/abs/2406.02021.
    """

    classification_keys = ("norm.", "head.")
    channels_first = True
    block_layout = "nchw"
    token_slots = ("token_mixer",)
    channel_slots = ("channel_mixer",)

    def __init__(self, variant: str, config: HostConfig, branches: bool = True) -> None:
        super().__init__()
        self.variant, self.branches = variant, branches
        sizes = VARIANTS[variant]
        self.stem = stem(sizes)
        restride(self.stem, config)
        rates = drop_path_rates(config.drop_path_rate, sum(sizes.depths))
        self.stages = nn.ModuleList()
        for stage, depth in enumerate(sizes.depths):
            self.stages.append(FFNetStage(sizes, stage, rates[:depth], branches))
            rates = rates[depth:]
        self.set_maps(config, sizes.widths, self._norm(sizes, config))
        if sizes.seg and not config.dense:
            self.head, self.num_features = SegHead(self.num_features), SegHead.width
        init_all(self)
        self._fill_slots(sizes, config)

    @staticmethod
    def _norm(variant: Variant, config: HostConfig) -> Callable[[int], nn.Module]:
        if variant.seg:
            return nn.Identity
        return LayerNorm2d if config.dense else nn.BatchNorm2d

    def _fill_slots(self, variant: Variant, config: HostConfig) -> None:
        for stage, layer in enumerate(self.stages):
            grid = config.grid(self.feature_info[stage].stride)
            for index, block in enumerate(cast("FFNetStage", layer).blocks):
                width = variant.widths[stage]
                slot = Slot(width, variant.expansion, grid, stage, index, dense=config.dense)
                cast("FFNetBlock", block).fill_slots(slot, config.channel_mixer, config.token_mixer)

    def fuse(self) -> FFNet:
        """Fold branches and BatchNorm into plain convolutions, in place: for inference.

        Outputs in evaluation mode stay equal up to rounding. The parameters are new, so build an
        optimiser afterwards.
        """
        return fuse(self)

    def stage_maps(self, images: Tensor) -> list[Tensor]:
        """Return the four stage outputs (B, C, h, w) of images (B, 3, H, W), before any norm."""
        x = self.stem(images.contiguous(memory_format=torch.channels_last))
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps

    def embed(self, images: Tensor) -> Tensor:
        """Return the mean over the normed last map: (B, 3, H, W) -> (B, num_features).

        FFNet_seg ends in two other layers; see ``SegHead``.
        """
        if not hasattr(self, "head"):
            return super().embed(images)
        self.check_embeds()
        return self.head(self.stage_maps(images)[-1])

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename the authors' tensors, and fold weights of the training form if fused.

        Raises:
            ValueError: Fused weights for the training form, which cannot be unfolded, or weights of
                the training form that lack a replaced mixer.
        """
        form = official_form(state_dict)
        if form is not None:
            state_dict = convert_official_state_dict(state_dict, self.variant, form)
        return self.fold_state_dict(state_dict)

    def fold_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Fold weights of the training form for a fused backbone; see ``convert_state_dict``."""
        if "stem.0.weight" in state_dict and not is_fused(self):
            raise ValueError(NO_WAY_BACK.format(part="backbone", option="fused=True"))
        if "stem.0.conv.weight" in state_dict and is_fused(self):
            return self._folded(state_dict)
        return state_dict

    def _folded(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return weights of the training form, folded."""
        config = HostConfig((64, 64), dense=self.dense, patch_size=self.patch_size)
        twin = FFNet(self.variant, config, self.branches)
        twin = twin.to(state_dict["stem.0.conv.weight"].dtype)
        state = twin.state_dict()
        absent = {key for key in state if key not in state_dict}
        if not all(key.startswith(self.map_keys) for key in absent):
            raise ValueError(
                "these weights of the training form differ from a plain "
                f"{self.variant}: load them into a backbone with fused=False, then call its fuse()"
            )
        twin.load_state_dict({k: v for k, v in state_dict.items() if k in state}, strict=False)
        folded = {k: v for k, v in fuse(twin).state_dict().items() if k not in absent}
        return folded | {k: v for k, v in state_dict.items() if k not in state}


def build(config: HostConfig, *, variant: str, branches: bool = True, fused: bool = False) -> FFNet:
    """Build an FFNet in its training form, or in the fused form for inference.

    Args:
        config: See ``HostConfig``.
        variant: Its name.
        branches: Train with additional small kernels; False is Table 10's "plain".
        fused: Build the fused form for inference.
    """
    refuse_pretrained(variant, config)
    backbone = FFNet(variant, config, branches)
    return backbone.fuse() if fused else backbone


@register_host("ffnet_1", source="FFNet, Table 9")
@variant_of(build, fixed={"variant": "ffnet_1"})
def ffnet_1() -> None:
    """Widths 80 to 640, depths 2, 2, 8, 2."""


@register_host("ffnet_2", source="FFNet, Table 9")
@variant_of(build, fixed={"variant": "ffnet_2"})
def ffnet_2() -> None:
    """Widths 88 to 704, depths 3, 3, 15, 3."""


@register_host("ffnet_3", source="FFNet, Table 9")
@variant_of(build, fixed={"variant": "ffnet_3"})
def ffnet_3() -> None:
    """Widths 96 to 768, depths 4, 4, 22, 5, LayerScale."""


@register_host("ffnet_4", source="FFNet, Table 9")
@variant_of(build, fixed={"variant": "ffnet_4"})
def ffnet_4() -> None:
    """Widths 128 to 1024, depths 4, 4, 27, 3, LayerScale."""


@register_host("ffnet_seg", source="FFNet, Table 9 and App. F.1")
@variant_of(build, fixed={"variant": "ffnet_seg", "branches": True})
def ffnet_seg() -> None:
    """Widths 96 to 768, depths 3, 4, 18, 5, 9x9 kernels with strips, LayerScale.

    Its published decoder reads the last three maps.
    """
