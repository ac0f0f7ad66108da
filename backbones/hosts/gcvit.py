"""GC ViT XXT/XT/T on timm's network, at any image size.

Windows of 7x7 tokens (14x14 in the third stage) and the global queries belong to 224 pixels, the
only size in timm. As in the authors' detector, other maps are padded with zeros at the right and
bottom to whole windows, where padding attends. The global query, a map pooled from the stage's
input, is resized to the window (bicubic).

timm's weights have a licence of their own, CC BY-NC-SA 4.0 (no commercial use).

Source: Hatamizadeh et al., "Global Context Vision Transformers", ICML 2023,
https://arxiv.org/abs/2206.09959, Table 1 and Sec. 2.
"""

from __future__ import annotations

from typing import cast

import torch
from timm.models.gcvit import GlobalContextVit, GlobalContextVitBlock, GlobalContextVitStage
from torch import Tensor, nn

from backbones.checkpoints.keys import rename
from backbones.hosts.scaffolds.hierarchical import HierarchicalBackbone, restride
from backbones.hosts.scaffolds.timm_source import create_timm_model, extend_all, read_source
from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.graph_sizes import is_any_size, same_size
from backbones.layers.shifted_windows import pad_to_windows
from backbones.mixer import Mixer
from backbones.mixers.attentions.global_window import resize_query
from backbones.registry import register_host
from backbones.slots import HostConfig, Slot, factory_at, fill


class GCViT(HierarchicalBackbone):
    """Four maps at strides 4, 8, 16, 32; NHWC in the blocks, NCHW between stages.

    With another token mixer the global queries are unused and left out.

    Source: GC ViT, https://arxiv.org/abs/2206.09959.
    """

    def __init__(self, model: GlobalContextVit, config: HostConfig) -> None:
        super().__init__()
        self.pretrained_cfg = read_source(model)
        self.stem = model.stem
        restride(self.stem, config)
        self.stages = model.stages
        self.set_maps(config, [info["num_chs"] for info in model.feature_info])
        last = cast("GlobalContextVitStage", self.stages[-1])
        if not config.dense:
            self.norm = last.norm
        last.norm = nn.Identity()
        self._fill_slots(config)
        self.no_weight_decay = frozenset(
            name
            for name, _ in self.named_parameters()
            if name.endswith("relative_position_bias_table")
        )

    def _fill_slots(self, config: HostConfig) -> None:
        for stage, layer in enumerate(extend_all(self.stages, AnySizeStage)):
            width, stride = self.feature_info[stage].channels, self.feature_info[stage].stride
            grid, keeps_attention = config.grid(stride), False
            for index, block in enumerate(extend_all(layer.get_submodule("blocks"), AnySizeBlock)):
                hidden_ratio = cast("int", block.mlp.fc1.out_features) / width
                slot = Slot(width, hidden_ratio, grid, stage, index, dense=config.dense)
                fill(block, "mlp", config.channel_mixer, slot)
                fill(block, "attn", config.token_mixer, slot)
                # Every second block reads the stage's global query.
                keeps_attention = keeps_attention or (
                    index % 2 == 1 and factory_at(config.token_mixer, slot) is None
                )
            if not keeps_attention:
                layer.global_block = None
                self.classification_keys += (f"stages.{stage}.global_block.",)

    def stage_maps(self, images: Tensor) -> list[Tensor]:
        """Return the four stage outputs (B, h, w, C) of images (B, 3, H, W), before any norm."""
        if same_size(images.shape[:1], (0,)):
            return self.empty_maps(images)
        x = self.stem(images)
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(to_nhwc(x))
        return maps

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename timm's last norm and classifier."""
        return rename(state_dict, RENAMES)


class AnySizeStage(GlobalContextVitStage):
    """timm's stage with the global query resized to a window."""

    global_block: nn.Module | None  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        """Apply downsampling and blocks with a global query: (B, C', H, W) -> (B, C, h, w)."""
        x = self.downsample(x)
        query = None if self.global_block is None else self._global_query(self.global_block(x))
        x = to_nhwc(x)
        for block in self.blocks:
            x = block(x, query)
        return to_nchw(self.norm(x)).contiguous()

    def _global_query(self, pooled: Tensor) -> Tensor:
        """Return the query at the window's size: (B, C, h', w') -> (B, w, w, C)."""
        window = cast("AnySizeBlock", self.blocks[0]).window()
        return self.global_norm(to_nhwc(resize_query(pooled, window)))


class AnySizeBlock(GlobalContextVitBlock):
    """timm's block with slots for mixers, and padding to whole windows."""

    def window(self) -> tuple[int, int]:
        """Return height and width of a window."""
        return cast("tuple[int, int]", self.window_size)

    def _window_attn(self, x: Tensor, q_global: Tensor | None = None) -> Tensor:
        """Apply attention within windows of a padded map: (B, H, W, C) -> (B, H, W, C)."""
        if isinstance(self.attn, Mixer):
            return self.attn(x)
        any_size = is_any_size(x.shape[1:3])
        x, crop = pad_to_windows(x, self.window())
        if any_size and q_global is not None:
            # timm repeats the query per window, which ONNX cannot do a symbolic number of times.
            (height, width), (window_h, window_w) = x.shape[1:3], self.window()
            count = (height // window_h) * (width // window_w)
            image = torch.arange(x.shape[0] * count, device=x.device) // count
            q_global = q_global.index_select(0, image)
        return crop(super()._window_attn(x, q_global))


# In timm the last norm belongs to the last stage, and the classifier to the head.
RENAMES = ((r"^stages\.3\.norm\.", "norm."), (r"^head\.(fc\.)?", "classifier."))


def _build(variant: str, config: HostConfig) -> GCViT:
    # Always built at 224, so that all sizes share one table of offsets.
    return GCViT(cast("GlobalContextVit", create_timm_model(variant, config)), config)


@register_host("gcvit_xxt", source="GC ViT, Table 1")
def gcvit_xxt(config: HostConfig) -> GCViT:
    """Widths 64 to 512, depths 2, 2, 6, 2."""
    return _build("gcvit_xxtiny", config)


@register_host("gcvit_xt", source="GC ViT, Table 1")
def gcvit_xt(config: HostConfig) -> GCViT:
    """Widths 64 to 512, depths 3, 4, 6, 5."""
    return _build("gcvit_xtiny", config)


@register_host("gcvit_t", source="GC ViT, Table 1")
def gcvit_t(config: HostConfig) -> GCViT:
    """Widths 64 to 512, depths 3, 4, 19, 5."""
    return _build("gcvit_tiny", config)
