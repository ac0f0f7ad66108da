"""EdgeViT-XXS: local aggregation by convolutions, then attention between sampled tokens.

Source: Pan et al., "EdgeViTs: Competing Light-weight CNNs on Mobile Devices with Vision
Transformers", ECCV 2022, https://arxiv.org/abs/2205.03436; the authors' code
(github.com/saic-fi/edgevit) for widths, positional convolutions and norms. That code runs at its
build resolution only. Here maps are padded for the embeddings and cropped after spreading, with
equal results at multiples of 32.

AFBO (Table 16) cites another network of this name, but lists the parameters and accuracy of this.

Axes: B images, H W map, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from timm.layers import DropPath, LayerNorm2d
from torch import Tensor, nn

from backbones.checkpoints.keys import rename
from backbones.hosts.scaffolds.hierarchical import HierarchicalBackbone, drop_path_rates
from backbones.hosts.scaffolds.timm_source import refuse_pretrained
from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.init import init_linear
from backbones.layers.patch_embed import PatchEmbed
from backbones.mixer import Mixer
from backbones.mixers.attentions.local_global import LocalConv, SampledAttention
from backbones.mixers.conv_ffn import ConvFFN
from backbones.mixers.ffn import FFN
from backbones.registry import register_host
from backbones.slots import HostConfig, MixerFactory, Slot, fill

RATIO = 4
# The authors' names, as patterns, and ours; their stages count from 1.
RENAMES = (
    *(
        (rf"^{authors_name}{stage + 1}\.", f"stages.{stage}.{ours}.")
        for authors_name, ours in (("patch_embed", "embed"), ("blocks", "blocks"))
        for stage in range(4)
    ),
    (r"\.LocalAgg\.(conv1|attn|conv2)\.", r".local.token_mixer.\1."),
    (r"\.LocalAgg\.", ".local."),
    (r"\.SelfAttn\.", ".sparse."),
    (r"\.attn\.LocalProp\.", ".attn.spread."),
    (r"^head\.", "classifier."),
)


@dataclass(frozen=True)
class EdgeViTStageSpec:
    """Configuration of a stage.

    Attributes:
        dim: C.
        depth: Number of blocks.
        sampling: Distance in rows and columns between tokens that attend. With 1 all attend, and
            the local aggregation is left out.
    """

    dim: int
    depth: int
    sampling: int


XXS = (
    EdgeViTStageSpec(36, 1, 4),
    EdgeViTStageSpec(72, 1, 2),
    EdgeViTStageSpec(144, 3, 2),
    EdgeViTStageSpec(288, 2, 1),
)


class EdgeViT(HierarchicalBackbone):
    """Four maps at strides 4, 8, 16, 32; NHWC inside the stages.

    Classification ends in a BatchNorm and the mean over the map. Dense prediction has a LayerNorm
    on each map, as its batches are small.

    A channel mixer replaces both FFNs of a block. A token mixer replaces the convolutions of its
    local aggregation and its attention; their slots have even and odd block indices.

    Args:
        config: See ``HostConfig``.
        specs: The stages.

    Source: EdgeViTs, https://arxiv.org/abs/2205.03436.
    """

    channels_first = True
    token_slots = ("local.token_mixer", "sparse.attn")
    channel_slots = ("local.mlp", "sparse.mlp")

    def __init__(self, config: HostConfig, specs: tuple[EdgeViTStageSpec, ...]) -> None:
        super().__init__()
        widths = [spec.dim for spec in specs]
        rates = drop_path_rates(config.drop_path_rate, sum(spec.depth for spec in specs))
        self.stages = nn.ModuleList()
        for stage, (width, spec) in enumerate(zip((3, *widths), specs, strict=False)):
            drop_paths, rates = rates[: spec.depth], rates[spec.depth :]
            side = 2 if stage else config.patch_size
            embed = PatchEmbed(width, spec.dim, side, side)
            blocks = nn.Sequential(*(EdgeViTBlock(spec, rate) for rate in drop_paths))
            self.stages.append(nn.ModuleDict({"embed": embed, "blocks": blocks}))
        self.set_maps(config, widths, LayerNorm2d if config.dense else nn.BatchNorm2d)
        self.apply(init_linear)
        for stage, layer in enumerate(self.stages):
            grid = config.grid(self.feature_info[stage].stride)
            halves = [
                h for h in layer.modules() if isinstance(h, LocalAggregation | SparseAttention)
            ]
            for index, half in enumerate(halves):
                slot = Slot(widths[stage], RATIO, grid, stage, index, dense=config.dense)
                half.fill_slots(slot, config.channel_mixer, config.token_mixer)

    def stage_maps(self, images: Tensor) -> list[Tensor]:
        """Return the four stage outputs (B, C, h, w) of images (B, 3, H, W), before any norm."""
        x = images.contiguous(memory_format=torch.channels_last)
        maps = []
        for stage in self.stages:
            x = to_nchw(stage.get_submodule("blocks")(stage.get_submodule("embed")(x)))
            maps.append(x)
        return maps

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename the authors' tensors to ours."""
        return rename(state_dict, RENAMES)


class EdgeViTBlock(nn.Module):
    """Local aggregation if attention samples, then attention: (B, H, W, C) -> the same."""

    def __init__(self, spec: EdgeViTStageSpec, drop_path: float) -> None:
        super().__init__()
        self.local = LocalAggregation(spec.dim, drop_path) if spec.sampling > 1 else None
        self.sparse = SparseAttention(spec, drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both halves, the local one if attention samples: (B, H, W, C) -> the same."""
        return self.sparse(x if self.local is None else self.local(x))


class Half(nn.Module):
    """Base class of both halves of a block: x + P(x), x + mixer(norm(x)), x + mlp(norm(x)).

    P is a depthwise 3x3 convolution for positions. A subclass names the attribute of its token
    mixer, and sets the layout of its norms.
    """

    token_slot: str

    def __init__(self, dim: int, drop_path: float) -> None:
        super().__init__()
        self.pos_embed = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Apply position, token mixer and FFN with shortcuts: (B, H, W, C) -> the same."""
        x = x + to_nhwc(self.pos_embed(to_nchw(x)))
        x = x + self.drop_path(self.get_submodule(self.token_slot)(self._normed(x, "norm1")))
        return x + self.drop_path(self.get_submodule("mlp")(self._normed(x, "norm2")))

    def _normed(self, x: Tensor, norm: str) -> Tensor:
        return self.get_submodule(norm)(x)

    def fill_slots(
        self, slot: Slot, channel_mixer: MixerFactory | None, token_mixer: MixerFactory | None
    ) -> None:
        """Replace the FFN and the token mixer if factories are given."""
        fill(self, "mlp", channel_mixer, slot)
        fill(self, self.token_slot, token_mixer, slot)


class LocalAggregation(Half):
    """Mixing of neighbours after BatchNorm: 1x1, depthwise 5x5 and 1x1 convolution.

    Shape: (B, H, W, C) -> (B, H, W, C).
    """

    token_slot = "token_mixer"

    def __init__(self, dim: int, drop_path: float) -> None:
        super().__init__(dim, drop_path)
        self.norm1, self.norm2 = nn.BatchNorm2d(dim), nn.BatchNorm2d(dim)
        self.token_mixer: Mixer = LocalConv(dim)
        self.mlp: Mixer = ConvFFN(dim, RATIO * dim)

    def _normed(self, x: Tensor, norm: str) -> Tensor:
        return to_nhwc(super()._normed(to_nchw(x), norm))


class SparseAttention(Half):
    """Attention between sampled tokens, spread over the others, after LayerNorm.

    Shape: (B, H, W, C) -> (B, H, W, C).
    """

    token_slot = "attn"

    def __init__(self, spec: EdgeViTStageSpec, drop_path: float) -> None:
        super().__init__(spec.dim, drop_path)
        self.norm1, self.norm2 = (nn.LayerNorm(spec.dim, eps=1e-6) for _ in range(2))
        self.attn: Mixer = SampledAttention(spec.dim, spec.sampling)
        self.mlp: Mixer = FFN(spec.dim, hidden_ratio=RATIO)


@register_host("edgevit_xxs", source="EdgeViTs (ECCV 2022)")
def edgevit_xxs(config: HostConfig) -> EdgeViT:
    """Widths 36 to 288, depths 1, 1, 3, 2."""
    refuse_pretrained("edgevit_xxs", config)
    return EdgeViT(config, XXS)
