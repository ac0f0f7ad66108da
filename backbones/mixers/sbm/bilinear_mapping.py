"""The bilinear mapping W_s x W_c of SBM, whose spatial factors serve a map of any size.

Source: Peng et al., "Star with Bilinear Mapping", CVPR 2025, Sec. 4.2.1.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.bounds import check_range
from backbones.layers.graph_sizes import same_size
from backbones.layers.precision import product_dtype
from backbones.options.values import check_value

Size = tuple[int, int]
Resample = Literal["bicubic", "bilinear"]
FACTORS = ("space_read", "space_write")


class BilinearMapping(nn.Module):
    """W_s x W_c + b: every token from m latent ones, which are sums over all tokens.

    Args:
        dim: Channels C.
        grid: Map size (gh, gw) that the factors are stored for.
        rank: m.
        resample: Interpolation of the factors to other map sizes.

    Shape: (B, h, w, C) -> (B, h, w, C). Parameters: 2 m gh gw + C^2 + C.

    Source: SBM (CVPR 2025), Eq. 2 and Sec. 4.2.1; at other maps than the stored one, ours.
    """

    def __init__(self, dim: int, grid: Size, rank: int, resample: Resample = "bicubic") -> None:
        super().__init__()
        check_range("rank", rank, 1)
        self.rank, self.resample = rank, resample
        self.space_read = nn.Parameter(torch.empty(rank, *grid))
        self.space_write = nn.Parameter(torch.empty(rank, *grid))
        self.proj = nn.Linear(dim, dim)
        # Both keep the size of a signal; 0.02 would make U depend on the size of the map.
        nn.init.trunc_normal_(self.space_read, std=(grid[0] * grid[1]) ** -0.5)
        nn.init.trunc_normal_(self.space_write, std=rank**-0.5)

    @property
    def grid(self) -> Size:
        """Return the map size that the factors are stored for."""
        return self.space_read.shape[1], self.space_read.shape[2]

    def forward(self, x: Tensor) -> Tensor:
        """Return W_s x W_c + b: (B, h, w, C) -> (B, h, w, C)."""
        read, write = self.expanded_factors(x)
        mixed = torch.bmm(write.mT, torch.bmm(read, x.flatten(1, 2)))
        return self.proj(mixed).unflatten(1, (x.shape[1], x.shape[2]))

    def expanded_factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return read and write factors (B, m, h w) for maps x (B, h, w, C), without copies."""
        read, write = self.factors((x.shape[1], x.shape[2]))
        batch = x.shape[0]
        # Matrix products of all images with one matrix would copy the images' tokens instead.
        return read.flatten(1).expand(batch, -1, -1), write.flatten(1).expand(batch, -1, -1)

    def token_matrix(self) -> tuple[Tensor, Size]:
        """Return W_s (1, h w, h w) of the map that the factors are stored for, and (h, w)."""
        read, write = self.space_read.flatten(1), self.space_write.flatten(1)
        return (write.T @ read)[None], self.grid

    def factors(self, size: Size) -> tuple[Tensor, Tensor]:
        """Return read and write factors (m, h, w) for a map of ``size``.

        They have the type of matrix products: autocast would cast expanded factors once per image.
        """
        factors: tuple[Tensor, Tensor] = (self.space_read, self.space_write)
        if not same_size(size, self.grid):
            factors = resample_factors(*factors, size, self.resample)
        dtype = product_dtype(factors[0])
        return factors[0].to(dtype), factors[1].to(dtype)

    @torch.no_grad()
    def set_grid(self, grid: Size) -> None:
        """Store the factors for another map, on which the results stay the same.

        The parameters are new ones; make the optimiser after this call.
        """
        factors = resample_factors(self.space_read, self.space_write, grid, self.resample)
        for name, factor in zip(FACTORS, factors, strict=True):
            trained = getattr(self, name).requires_grad
            setattr(self, name, nn.Parameter(factor.clone(), requires_grad=trained))

    def to_own_grid(self, tensors: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
        """Bring factors among ``tensors`` (by name with ``prefix``) from their map to the own."""
        read, write = (tensors.get(prefix + name) for name in FACTORS)
        if read is None or write is None or not read.shape == write.shape:
            return tensors
        if read.ndim != 3 or len(read) != self.rank or read.shape[1:] == self.grid:
            return tensors
        factors = resample_factors(read, write, self.grid, self.resample)
        pairs = zip(FACTORS, factors, strict=True)
        return tensors | {prefix + name: factor for name, factor in pairs}

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        state_dict.update(self.to_own_grid(dict(state_dict), prefix))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def resample_factors(
    read: Tensor, write: Tensor, size: Size, mode: Resample = "bicubic"
) -> tuple[Tensor, Tensor]:
    """Resample factors (m, gh, gw) of one map to another, (m, h, w).

    A read is a sum over tokens: with h w tokens in place of gh gw its weights shrink by the ratio,
    so that the latents of the same picture stay what they are.
    """
    gh, gw = read.shape[1], read.shape[2]
    if same_size(size, (gh, gw)):
        return read, write
    check_value("resample", mode, Resample)
    scale = gh * gw / (size[0] * size[1])
    stacked = torch.stack([read * scale, write])
    precise = stacked if stacked.dtype == torch.float64 else stacked.float()
    precise = F.interpolate(precise, size, mode=mode, antialias=True, align_corners=False)
    new_read, new_write = precise.to(stacked.dtype)
    return new_read, new_write
