"""The star with bilinear mapping: Eq. 2 of SBM.

Source: Peng et al., "Star with Bilinear Mapping", CVPR 2025, Sec. 4.2.

https://openaccess.thecvf.com/content/CVPR2025/html/Peng_Star_with_Bilinear_Mapping_CVPR_2025_paper.html
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.init import init_linear
from backbones.mixer import Mixer
from backbones.mixers.sbm.bilinear_mapping import BilinearMapping, Resample, Size
from backbones.options import check_odd
from backbones.registry import register_mixer


@register_mixer("sbm", kind="token", source="SBM (CVPR 2025), Eq. 2")
class StarBilinearMapping(Mixer):
    """SiLU(x W_G) * LayerNorm(SiLU(U) * V), with U mixed over all tokens and V over neighbours.

    Args:
        dim: Channels C.
        grid: Map size (h, w) that the factors are stored for; other maps run too.
        rank: m, of the spatial matrix.
        kernel_size: Side of the depthwise convolution, odd.
        x_width: Width of the input projection over C. With 1 both branches read the same
            projection, unless ``pre_proj`` splits it.
        pre_proj: Add a matrix C -> 2C (from x_width * C) between the convolution and the branches.
        out_proj: Add a matrix C -> C after the last product.
        use_bilinear: Keep the branch U; without it LayerNorm sees V (Table 5).
        use_linear: Keep the branch V; without it LayerNorm sees SiLU(U) (Table 5).
        use_gate: Keep the factor SiLU(x W_G) (Table 5).
        norm: Keep LayerNorm (Table 6).
        resample: Interpolation of the factors to other map sizes, always antialiased.

    Shape: (B, h, w, C) -> (B, h, w, C). Parameters by default: 5 C^2 + 27 C + 2 m gh gw.
        Multiply-adds: n (5 C^2 + 18 C + 2 m C).

    Raises:
        ValueError: A rank below 1, an even kernel, or neither of the two branches.

    Source: SBM (CVPR 2025), Eq. 2,
    https://openaccess.thecvf.com/content/CVPR2025/html/Peng_Star_with_Bilinear_Mapping_CVPR_2025_paper.html
    """

    def __init__(
        self,
        dim: int,
        *,
        grid: Size = (14, 14),
        rank: int = 64,
        kernel_size: int = 3,
        x_width: Literal[1, 2] = 2,
        pre_proj: bool = False,
        out_proj: bool = False,
        use_bilinear: bool = True,
        use_linear: bool = True,
        use_gate: bool = True,
        norm: bool = True,
        resample: Resample = "bicubic",
    ) -> None:
        super().__init__()
        check_odd(kernel_size)
        if not (use_bilinear or use_linear):
            raise ValueError("use_bilinear and use_linear are both false; SBM needs one branch")
        self.dim = dim
        # A branch that is left out takes its part of the projection with it.
        branches = dim * (use_bilinear + use_linear)
        width = dim if x_width == 1 else 2 * dim if pre_proj else branches
        self.in_proj = nn.Linear(dim, width)
        self.conv = nn.Conv2d(width, width, kernel_size, padding=kernel_size // 2, groups=width)
        self.pre_proj = nn.Linear(width, branches) if pre_proj else nn.Identity()
        self.bilinear = BilinearMapping(dim, grid, rank, resample) if use_bilinear else None
        self.lin_proj = nn.Linear(dim, dim) if use_linear else None
        self.norm = nn.LayerNorm(dim) if norm else nn.Identity()
        self.gate_proj = nn.Linear(dim, dim) if use_gate else None
        self.out_proj = nn.Linear(dim, dim) if out_proj else nn.Identity()
        self.apply(init_linear)

    def mix(self, x: Tensor) -> Tensor:
        """Return SiLU(x W_G) * LN(SiLU(U) * V): (B, h, w, C) -> (B, h, w, C)."""
        p = self.pre_proj(to_nhwc(self.conv(to_nchw(self.in_proj(x)))))
        mixed = self._normalise(self._star(p[..., : self.dim], p[..., -self.dim :]))
        if self.gate_proj is not None:
            mixed = mixed * F.silu(self.gate_proj(x))
        return self.out_proj(mixed)

    def _star(self, for_bilinear: Tensor, for_linear: Tensor) -> Tensor:
        """Return SiLU(U) * V, or the branch that there is."""
        if self.bilinear is None:
            assert self.lin_proj is not None
            return self.lin_proj(for_linear)
        mapped = self.bilinear(for_bilinear)
        if self.lin_proj is None:
            return F.silu(mapped)
        # As one matrix, some channels of a map need no copy.
        value = self.lin_proj(for_linear.flatten(0, 2)).unflatten(0, for_linear.shape[:3])
        if value.dtype == torch.float16:
            # At the start the product is about 1e-4, where float16 has few digits left.
            mapped, value = mapped.float(), value.float()
        return F.silu(mapped) * value

    def _normalise(self, star: Tensor) -> Tensor:
        """Apply LayerNorm, in single precision if the weights are float16."""
        weights = self.in_proj.weight.dtype
        if weights != torch.float16:
            return self.norm(star)
        if isinstance(self.norm, nn.LayerNorm):
            weight, bias = self.norm.weight.float(), self.norm.bias.float()
            star = F.layer_norm(star, (self.dim,), weight, bias, self.norm.eps)
        return star.to(weights)

    def set_grid(self, grid: Size) -> None:
        """Store the factors for another map; see ``BilinearMapping.set_grid``."""
        if self.bilinear is not None:
            self.bilinear.set_grid(grid)

    def convert_state_dict(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Resample factors stored for another map to this one; other tensors pass unchanged."""
        if self.bilinear is None:
            return tensors
        return self.bilinear.to_own_grid(tensors, "bilinear.")
