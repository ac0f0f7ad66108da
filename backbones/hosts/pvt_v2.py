"""PVT v2 B1 to B5 on timm's network, which runs at any image size.

Every stage ends with its own LayerNorm, in classification as well as in dense prediction. The FFN
contains a depthwise 3x3 convolution; a channel mixer replaces both.

Source: Wang et al., "PVT v2: Improved Baselines with Pyramid Vision Transformer", CVMJ 2022,
https://arxiv.org/abs/2106.13797, Table 1.
"""

from __future__ import annotations

from typing import cast

from timm.models.pvt_v2 import Block, PyramidVisionTransformerV2, checkpoint_filter_fn
from torch import Tensor, nn

from backbones.checkpoints.keys import rename
from backbones.hosts.scaffolds.hierarchical import HierarchicalBackbone, restride
from backbones.hosts.scaffolds.timm_source import create_timm_model, extend_all, read_source
from backbones.layers.graph_sizes import same_size
from backbones.mixer import Mixer
from backbones.mixer_calls import mix_tokens
from backbones.registry import register_host
from backbones.slots import HostConfig, Slot, fill

Size = tuple[int, int]


class PVTv2(HierarchicalBackbone):
    """Four normed maps at strides 4, 8, 16, 32; tokens inside a stage, NCHW between stages.

    Source: PVT v2, https://arxiv.org/abs/2106.13797.
    """

    channels_first = True
    block_layout = "tokens"
    classification_keys = ()
    map_keys = ()

    def __init__(self, model: PyramidVisionTransformerV2, config: HostConfig) -> None:
        super().__init__()
        self.pretrained_cfg = read_source(model)
        self.patch_embed = model.patch_embed
        restride(self.patch_embed, config)
        self.stages = model.stages
        self.set_maps(config, [info["num_chs"] for info in model.feature_info], nn.Identity)
        self._fill_slots(config)

    def _fill_slots(self, config: HostConfig) -> None:
        for stage, layer in enumerate(self.stages):
            width, stride = self.feature_info[stage].channels, self.feature_info[stage].stride
            grid = config.grid(stride)
            for index, block in enumerate(extend_all(layer.get_submodule("blocks"), PVTv2Block)):
                hidden_ratio = block.mlp.fc1.out_features / width
                slot = Slot(width, hidden_ratio, grid, stage, index, dense=config.dense)
                fill(block, "mlp", config.channel_mixer, slot)
                fill(block, "attn", config.token_mixer, slot)

    def stage_maps(self, images: Tensor) -> list[Tensor]:
        """Return the four normed stage outputs (B, C, h, w) of images (B, 3, H, W)."""
        if same_size(images.shape[:1], (0,)):
            return self.empty_maps(images)
        x = self.patch_embed(images)
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename the authors' tensors (``block1.0``, ``dwconv.dwconv``) and timm's to ours."""
        state_dict = checkpoint_filter_fn(state_dict, self)  # type: ignore[no-untyped-call]
        return rename(state_dict, [(r"^head\.", "classifier.")])


class PVTv2Block(Block):
    """timm's block with slots for mixers."""

    def forward(self, x: Tensor, feat_size: Size) -> Tensor:  # type: ignore[override]
        """Apply attention and FFN with shortcuts: (B, h * w, C) and (h, w) -> (B, h * w, C)."""
        x = x + self.drop_path1(_apply(self.attn, self.norm1(x), feat_size))
        return x + self.drop_path2(_apply(self.mlp, self.norm2(x), feat_size))


def _apply(module: nn.Module, tokens: Tensor, grid: Size) -> Tensor:
    if isinstance(module, Mixer):
        return mix_tokens(module, tokens, grid, num_prefix_tokens=0)
    return module(tokens, grid)


def _build(variant: str, config: HostConfig) -> PVTv2:
    return PVTv2(cast("PyramidVisionTransformerV2", create_timm_model(variant, config)), config)


@register_host("pvt_v2_b1", source="PVT v2, Table 1", plain_ffn=False)
def pvt_v2_b1(config: HostConfig) -> PVTv2:
    """Widths 64 to 512, depths 2, 2, 2, 2."""
    return _build("pvt_v2_b1", config)


@register_host("pvt_v2_b2", source="PVT v2, Table 1", plain_ffn=False)
def pvt_v2_b2(config: HostConfig) -> PVTv2:
    """Widths 64 to 512, depths 3, 4, 6, 3."""
    return _build("pvt_v2_b2", config)


@register_host("pvt_v2_b3", source="PVT v2, Table 1", plain_ffn=False)
def pvt_v2_b3(config: HostConfig) -> PVTv2:
    """Widths 64 to 512, depths 3, 4, 18, 3."""
    return _build("pvt_v2_b3", config)


@register_host("pvt_v2_b4", source="PVT v2, Table 1", plain_ffn=False)
def pvt_v2_b4(config: HostConfig) -> PVTv2:
    """Widths 64 to 512, depths 3, 8, 27, 3."""
    return _build("pvt_v2_b4", config)


@register_host("pvt_v2_b5", source="PVT v2, Table 1", plain_ffn=False)
def pvt_v2_b5(config: HostConfig) -> PVTv2:
    """Widths 64 to 512, depths 3, 6, 40, 3; hidden widths of 4 C in all stages."""
    return _build("pvt_v2_b5", config)
