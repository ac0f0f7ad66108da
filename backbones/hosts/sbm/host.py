"""SBM-T/S/B: four stages of star with bilinear mapping and feed-forward networks.

Source: Peng et al., "Star with Bilinear Mapping", CVPR 2025, Sec. 4.1 and 4.3. The authors'
code is unpublished, and the text leaves much of the network open. Choices made here:

* Tables 1 and 5 require 15 d^2 parameters per block (14 and 16 are far off), with a convolutional
  stem and inverted bottlenecks between the stages, both as in MLLA (Han et al., "Demystify Mamba in
  Vision", NeurIPS 2024). With "non-overlapping patches" (Sec. 4.1) SBM-T is 0.5 G too small.
* Counts leave the shares of FFN and mixer in the 15 d^2 open, so there are three presets. "fit"
  agrees with Eq. 2, Eq. 3 (5 d^2 in the mixer) and Tables 1 and 5, and has an FFN ratio of 5.
  "alt" has MLLA's ratio of 4 and 7 d^2 in the mixer, against Eq. 3. "eq2" is the literal reading
  with a ratio of 4; it misses Table 1 by 10 to 12 %.
* A conditional positional encoding precedes both sublayers; Sec. 4.1 mentions one (``num_cpe``).
* The factors of the 224 grid miss Tables 3 and 4, and all networks that meet Tables 1 and 5 miss
  Table 6; configs/published/sbm.yaml lists the differences.

Axes: B images, (h, w) map, d channels.

https://openaccess.thecvf.com/content/CVPR2025/html/Peng_Star_with_Bilinear_Mapping_CVPR_2025_paper.html
"""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.hosts.sbm.blocks import SBMBlock, Stem, downsampling
from backbones.hosts.scaffolds.hierarchical import HierarchicalBackbone, drop_path_rates, restride
from backbones.hosts.scaffolds.timm_source import refuse_pretrained
from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.graph_sizes import same_size
from backbones.mixers.ffn import FFN
from backbones.mixers.sbm import Resample, Size, StarBilinearMapping
from backbones.registry import register_host
from backbones.slots import HostConfig, Slot, fill

PRESETS: dict[str, dict[str, Any]] = {
    "fit": {"x_width": 2, "pre_proj": False, "out_proj": False, "mlp_ratio": 5.0},
    "alt": {"x_width": 1, "pre_proj": True, "out_proj": True, "mlp_ratio": 4.0},
    "eq2": {"x_width": 1, "pre_proj": False, "out_proj": True, "mlp_ratio": 4.0},
}


class SBM(HierarchicalBackbone):
    """Four maps at strides 4, 8, 16, 32; NHWC inside. A subclass sets ``width`` and ``depths``.

    Args:
        config: See ``HostConfig``; spatial factors are stored for the maps of ``img_size`` and
            resampled for others.
        preset: "fit", "alt" or "eq2"; default of the next four options.
        mlp_ratio: Hidden width of the FFN over d.
        x_width: See ``StarBilinearMapping``.
        pre_proj: See ``StarBilinearMapping``.
        out_proj: See ``StarBilinearMapping``.
        rank: m; 64 in the paper (Sec. 4.3).
        kernel_size: Side of the depthwise convolution in the mixer.
        pos: "cpe" for a depthwise 3x3 convolution with shortcut before the sublayers, "ape" for a
            learned map added after the stem, or "none" (Table 6).
        num_cpe: 2 for a "cpe" before each sublayer, 1 before the mixer only.
        shortcut: Keep the shortcuts of the sublayers; without them drop path is 0 (Table 6).
        block_norm: Keep LayerNorm in blocks and mixers (Table 6).
        use_bilinear: Keep the branch U (Table 5).
        use_linear: Keep the branch V (Table 5).
        use_gate: Keep the mapping control (Table 5).
        resample: Interpolation of the factors for other maps.

    Source: SBM, see the top of the file.
    """

    token_slots = ("mixer",)
    width: int
    depths: tuple[int, ...]

    def __init__(
        self,
        config: HostConfig,
        *,
        preset: Literal["fit", "alt", "eq2"] = "fit",
        mlp_ratio: float | None = None,
        x_width: Literal[1, 2] | None = None,
        pre_proj: bool | None = None,
        out_proj: bool | None = None,
        rank: int = 64,
        kernel_size: int = 3,
        pos: Literal["none", "ape", "cpe"] = "cpe",
        num_cpe: Literal[1, 2] = 2,
        shortcut: bool = True,
        block_norm: bool = True,
        use_bilinear: bool = True,
        use_linear: bool = True,
        use_gate: bool = True,
        resample: Resample = "bicubic",
    ) -> None:
        super().__init__()
        refuse_pretrained("SBM", config)
        set_options = {
            "mlp_ratio": mlp_ratio, "x_width": x_width, "pre_proj": pre_proj, "out_proj": out_proj
        }  # fmt: skip
        options = PRESETS[preset] | {
            key: value for key, value in set_options.items() if value is not None
        }
        ratio = options.pop("mlp_ratio")
        options |= {
            "rank": rank, "kernel_size": kernel_size, "norm": block_norm, "resample": resample,
            "use_bilinear": use_bilinear, "use_linear": use_linear, "use_gate": use_gate,
        }  # fmt: skip

        widths = [self.width * 2**stage for stage in range(len(self.depths))]
        self.set_maps(config, widths)
        grids = [config.grid(info.stride) for info in self.feature_info]
        self.stem = Stem(self.width)
        restride(self.stem, config)
        self.pos_embed = None
        if pos == "ape":
            self.pos_embed = nn.Parameter(torch.empty(1, self.width, *grids[0]))
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
            self.no_weight_decay = frozenset({"pos_embed"})
        self.downsamples = nn.ModuleList(downsampling(d) for d in widths[:-1])
        num_encodings = num_cpe if pos == "cpe" else 0
        rates = drop_path_rates(config.drop_path_rate if shortcut else 0.0, sum(self.depths))
        self.stages = nn.ModuleList()
        places: list[tuple[SBMBlock, Slot]] = []
        for stage, (d, depth, grid) in enumerate(zip(widths, self.depths, grids, strict=True)):
            blocks = nn.ModuleList()
            for _ in range(depth):
                mixer = StarBilinearMapping(d, grid=grid, **options)
                ffn = FFN(d, hidden_ratio=ratio, act="silu")
                block = SBMBlock(mixer, ffn, rates.pop(0), num_encodings, shortcut, block_norm)
                slot = Slot(d, ratio, grid, stage, len(blocks), dense=config.dense)
                places.append((block, slot))
                blocks.append(block)
            self.stages.append(blocks)
        for block, slot in places:  # last, so that the host's weights are those without mixers
            fill(block, "mlp", config.channel_mixer, slot)
            fill(block, "mixer", config.token_mixer, slot)

    def set_grid(self, grid: Size) -> None:
        """Resample all tables that depend on the map to stage-1 maps of ``grid`` = (h, w).

        Outputs at that size stay equal, and the factors can be trained there, such as (128, 128)
        for crops of 512 pixels. The parameters are new, so build the optimiser afterwards.
        """
        for stage, blocks in enumerate(self.stages):
            size = (math.ceil(grid[0] / 2**stage), math.ceil(grid[1] / 2**stage))
            for block in cast("nn.ModuleList", blocks):
                if isinstance(block.mixer, StarBilinearMapping):
                    block.mixer.set_grid(size)
        if self.pos_embed is not None:
            self.pos_embed = nn.Parameter(_resized(self.pos_embed.detach(), grid))

    def stage_maps(self, images: Tensor) -> list[Tensor]:
        """Return the four stage outputs (B, h, w, d) of images (B, 3, H, W), before any norm."""
        x = to_nhwc(self.stem(images.contiguous(memory_format=torch.channels_last)))
        if self.pos_embed is not None:
            x = x + to_nhwc(_resized(self.pos_embed, (x.shape[1], x.shape[2])))
        maps: list[Tensor] = []
        for stage, blocks in enumerate(self.stages):
            if stage > 0:
                x = to_nhwc(self.downsamples[stage - 1](to_nchw(x)))
            for block in cast("nn.ModuleList", blocks):
                x = block(x)
            maps.append(x)
        return maps

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Resample a position map of another grid."""
        table = state_dict.get("pos_embed")
        if table is not None and self.pos_embed is not None and table.ndim == 4:
            size = (self.pos_embed.shape[2], self.pos_embed.shape[3])
            state_dict["pos_embed"] = _resized(table, size)
        return state_dict


def _resized(table: Tensor, size: Size) -> Tensor:
    """Resample a position map (1, d, h, w)."""
    if same_size(size, table.shape[2:]):
        return table
    precise = table if table.dtype == torch.float64 else table.float()
    precise = F.interpolate(precise, size, mode="bicubic", antialias=True, align_corners=False)
    return precise.to(table.dtype)


@register_host("sbm_t", source="SBM (CVPR 2025), Sec. 4.3")
class SBMTiny(SBM):
    """Widths 64 to 512, depths 3, 3, 8, 3."""

    width, depths = 64, (3, 3, 8, 3)


@register_host("sbm_s", source="SBM (CVPR 2025), Sec. 4.3")
class SBMSmall(SBM):
    """Widths 64 to 512, depths 3, 8, 20, 4."""

    width, depths = 64, (3, 8, 20, 4)


@register_host("sbm_b", source="SBM (CVPR 2025), Sec. 4.3")
class SBMBase(SBM):
    """Widths 96 to 768, depths 3, 8, 20, 4."""

    width, depths = 96, (3, 8, 20, 4)
