"""LVT-R1 to R4, light transformers of convolutional and recursive atrous self-attention.

The four networks have equal parameters; R2 applies its attentions twice, and so on. For
classification two class blocks update a class token after the stages, and a second classifier reads
all other tokens; a plain head (``class_blocks=False``) omits both.

Source: Yang et al., "Lite Vision Transformer with Enhanced Self-Attention", CVPR 2022,
https://arxiv.org/abs/2112.10809. Choices left open by the text and the released checkpoints:

* The released network ignores its drop path rate; here ``drop_path_rate`` applies, 0 by default,
  except in class blocks.
* The pooling of the plain head is unpublished: here LayerNorm, then the mean over the map.
* Token labels for training come with the data; their loss is in ``heads.losses``.
* The FLOPs in papers (0.76 to 1.00 G) seem to omit the products of attention.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from backbones.checkpoints.keys import rename
from backbones.hosts.lvt.blocks import SPECS, ClassBlock, LVTStage
from backbones.hosts.lvt.mix_token import Box, Tokens, draw_box, own_share, swap
from backbones.hosts.lvt.token_classifier import TokenClassifier
from backbones.hosts.scaffolds.hierarchical import HierarchicalBackbone, drop_path_rates, restride
from backbones.hosts.scaffolds.timm_source import refuse_pretrained
from backbones.layers.axes import to_nchw
from backbones.layers.classifier import Classifier
from backbones.layers.graph_sizes import ceil_div
from backbones.layers.init import init_linear
from backbones.options import variant_of
from backbones.registry import register_host
from backbones.slots import HostConfig, Slot, fill

DEPTH = 2  # blocks of every stage
NUM_CLASS_BLOCKS = 2
MIX_UNIT = 8  # positions of the first map in one of the last

# The authors' names, as patterns, and ours.
RENAMES = (
    (r"^backbone\.(\d)\.0\.", r"stages.\1.embed."),
    (r"^backbone\.(\d)\.1\.", r"stages.\1.blocks."),
    (r"^post_network\.", "class_blocks."),
    (r"\.attn\.attn\.", ".attn.coefficients."),
    (r"\.attn\.weight\.weight$", ".attn.values.weight"),
    (r"\.attn\.ds\.", ".attn.atrous."),
    (r"\.attn\.sr\.", ".attn.reduce."),
    (r"\.mlp\.depconv\.", ".mlp.dwconv."),
    (r"^downsample_norms\.(\d)\.", r"norm\1."),
    (r"^head\.", "classifier."),
    (r"^aux_head\.", "classifier.aux."),
)


class LVT(HierarchicalBackbone):
    """Four maps at strides 4, 8, 16, 32; NHWC inside.

    Args:
        config: See ``HostConfig``.
        steps: Recursion count of the attentions, 1 to 4 in LVT-R1 to R4.
        class_blocks: False builds the plain head.
        mix_token: Train classification with MixToken.
        swap_class_ffn: Replace the FFNs of the class blocks by the channel mixer as well.

    Source: LVT, https://arxiv.org/abs/2112.10809.
    """

    classification_keys = ("norm.", "cls_token", "class_blocks.")

    def __init__(
        self,
        config: HostConfig,
        *,
        steps: int,
        class_blocks: bool = True,
        mix_token: bool = True,
        swap_class_ffn: bool = True,
    ) -> None:
        super().__init__()
        refuse_pretrained(f"lvt_r{steps}", config)
        widths = [spec.dim for spec in SPECS]
        self.mix_token = mix_token
        rates = drop_path_rates(config.drop_path_rate, DEPTH * len(SPECS))
        self.stages = nn.ModuleList()
        for stage, (width, spec) in enumerate(zip((3, *widths), SPECS, strict=False)):
            drop_paths = rates[DEPTH * stage : DEPTH * (stage + 1)]
            self.stages.append(LVTStage(width, spec, steps, drop_paths))
        restride(self.stages[0].get_submodule("embed"), config)
        self.set_maps(config, widths)
        self.cls_token: nn.Parameter | None = None
        if class_blocks and not config.dense:
            self.cls_token = nn.Parameter(torch.empty(1, 1, self.num_features))
            nn.init.trunc_normal_(self.cls_token, std=0.02)
            self.no_weight_decay = frozenset({"cls_token"})
            self.pooling = "class token"
            blocks = (ClassBlock(self.num_features) for _ in range(NUM_CLASS_BLOCKS))
            self.class_blocks = nn.ModuleList(blocks)
        self.apply(init_linear)
        self._fill_slots(config, swap_class_ffn)

    def _fill_slots(self, config: HostConfig, swap_class_ffn: bool) -> None:
        for stage, (layer, spec) in enumerate(zip(self.stages, SPECS, strict=True)):
            grid = config.grid(self.feature_info[stage].stride)
            for index, block in enumerate(layer.get_submodule("blocks").children()):
                slot = Slot(spec.dim, spec.ratio, grid, stage, index, dense=config.dense)
                fill(block, "mlp", config.channel_mixer, slot)
                fill(block, "attn", config.token_mixer, slot)
        if self.cls_token is not None and swap_class_ffn:
            for index, block in enumerate(self.class_blocks):
                cast("ClassBlock", block).fill_slot(config.channel_mixer, index)

    def stage_maps(self, images: Tensor) -> list[Tensor]:
        """Return the four stage outputs (B, h, w, C) of images (B, 3, H, W), before any norm."""
        return self._stage_maps(images, None)

    def _stage_maps(self, images: Tensor, box: Box | None) -> list[Tensor]:
        x = images.contiguous(memory_format=torch.channels_last)
        maps: list[Tensor] = []
        for stage in self.stages:
            x = stage.get_submodule("embed")(x)
            if box is not None and not maps:
                x = swap(x, box, MIX_UNIT)
            x = stage.get_submodule("blocks")(x)
            maps.append(x)
            x = to_nchw(x)
        return maps

    def _tokens(self, images: Tensor, box: Box | None = None) -> Tensor:
        """Return normed tokens (B, 1 + h * w, C) of images (B, 3, H, W), the class token first."""
        x = self._stage_maps(images, box)[-1]
        assert self.cls_token is not None
        token = self.cls_token.repeat(x.shape[0], 1, 1)
        for block in self.class_blocks:
            token = block(token, x.flatten(1, 2))
        if box is not None:
            x = swap(x, box)
        return self.norm(torch.cat([token, x.flatten(1, 2)], dim=1))

    def embed(self, images: Tensor) -> Tensor:
        """Return the normed class token or mean over the map: (B, 3, H, W) -> (B, 256)."""
        if self.dense or self.cls_token is None:
            return super().embed(images)
        return self._tokens(images)[:, 0]

    def features(self, images: Tensor) -> Any:
        """Return all normed tokens of images (B, 3, H, W), in training mixed across the batch.

        MixToken (``mix_token``) exchanges a box of the first map with the image in the mirrored
        place of the batch, in units of positions of the last map, and exchanges it back there.
        """
        if self.dense or self.cls_token is None:
            return super().features(images)
        if not (self.training and self.mix_token):
            return Tokens(self._tokens(images))
        stride = self.feature_info[-1].stride
        size = ceil_div(images.shape[2], stride), ceil_div(images.shape[3], stride)
        box = draw_box(size)
        return Tokens(self._tokens(images, box), own_share(box, size))

    def classifier(self, num_classes: int, drop: float = 0.0) -> Classifier:
        """Build a class-token and a token classifier, or one linear layer for the plain head."""
        if self.cls_token is None:
            return super().classifier(num_classes, drop)
        return TokenClassifier(self.num_features, num_classes, drop)

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename the authors' tensors, of classification and of dense prediction, to ours."""
        return rename(state_dict, RENAMES)


@register_host("lvt_r1", source="LVT (CVPR 2022)", plain_ffn=False)
@variant_of(LVT, fixed={"steps": 1})
def lvt_r1() -> None:
    """Widths 64, 64, 160, 256, depths 2, 1 step."""


@register_host("lvt_r2", source="LVT (CVPR 2022)", plain_ffn=False)
@variant_of(LVT, fixed={"steps": 2})
def lvt_r2() -> None:
    """Widths 64, 64, 160, 256, depths 2, 2 steps."""


@register_host("lvt_r3", source="LVT (CVPR 2022)", plain_ffn=False)
@variant_of(LVT, fixed={"steps": 3})
def lvt_r3() -> None:
    """Widths 64, 64, 160, 256, depths 2, 3 steps."""


@register_host("lvt_r4", source="LVT (CVPR 2022)", plain_ffn=False)
@variant_of(LVT, fixed={"steps": 4})
def lvt_r4() -> None:
    """Widths 64, 64, 160, 256, depths 2, 4 steps."""
