"""SBM: star with bilinear mapping, a token mixer whose cost is linear in the number of tokens.

    p_u, p_v = DWConv(x W_i),  U = W_s p_u W_c,  V = p_v W_v
    h(x) = SiLU(x W_G) * LayerNorm(SiLU(U) * V),  W_s = write^T read of rank m

Source: Peng et al., "Star with Bilinear Mapping", CVPR 2025, Eq. 2, Sec. 4.2. The authors published
no code. Where the paper leaves a choice:

* The kind and size of the convolution and the shapes of W_i are not given. Tables 1 and 5 fit only
  if each branch has its own d x d part of W_i, so W_i is d -> 2d; the convolution is depthwise 3x3.
* Eq. 2 has no matrix after the last product; ``out_proj`` adds one, ``pre_proj`` and ``x_width``
  move the split into branches behind the convolution.
* W_s belongs to a fixed number of tokens. At another map size its factors are resampled as images
  (bicubic, antialiased), and the reads are scaled so that a sum over tokens keeps its size.
* Where LayerNorm stands is taken from Sec. 4.2.2 (after the star); initialisation is ours.

Axes: C = d channels, m rank, (h, w) map, n = h * w tokens, (gh, gw) the stored map.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.autocast_mode import is_autocast_available

from backbones.base import Mixer
from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.eval_cache import EvalCache
from backbones.layers.graph_sizes import is_any_size, same_size
from backbones.layers.init import init_linear
from backbones.options import check_odd
from backbones.registry import register_mixer

Size = tuple[int, int]
Resample = Literal["bicubic", "bilinear"]
FACTORS = ("space_read", "space_write")


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
        resample: How factors are brought to other maps, always antialiased.

    Shape: (B, h, w, C) -> (B, h, w, C). Parameters by default: 5 C^2 + 27 C + 2 m gh gw.
        Multiply-adds: n (5 C^2 + 18 C + 2 m C).

    Raises:
        ValueError: A rank below 1, an even kernel, or neither of the two branches.
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
        """(B, h, w, C) -> (B, h, w, C)."""
        projected = to_nhwc(self.conv(to_nchw(self.in_proj(x))))
        projected = self.pre_proj(projected)
        mixed = self._normalise(self._star(projected[..., : self.dim], projected[..., -self.dim :]))
        if self.gate_proj is not None:
            mixed = _product(mixed, _silu(self.gate_proj(x)))
        return cast("Tensor", self.out_proj(mixed))

    def _star(self, for_bilinear: Tensor, for_linear: Tensor) -> Tensor:
        """SiLU(U) * V, or what is left of it."""
        if self.bilinear is None:
            assert self.lin_proj is not None
            return _linear(self.lin_proj, for_linear)
        mapped = self.bilinear(for_bilinear)
        if self.lin_proj is None:
            return _silu(mapped)
        value = _linear(self.lin_proj, for_linear)
        if value.dtype == torch.float16:
            # At the start the product is about 1e-4, where float16 has few digits left.
            mapped, value = mapped.float(), value.float()
        return _product(_silu(mapped), value)

    def _normalise(self, star: Tensor) -> Tensor:
        weights = self.in_proj.weight.dtype
        if weights != torch.float16:
            return cast("Tensor", self.norm(star))
        if isinstance(self.norm, nn.LayerNorm):
            weight, bias = self.norm.weight.float(), self.norm.bias.float()
            star = F.layer_norm(star, (self.dim,), weight, bias, self.norm.eps)
        return star.to(weights)

    def set_grid(self, grid: Size) -> None:
        """Store the factors for another map; see ``BilinearMapping.set_grid``."""
        if self.bilinear is not None:
            self.bilinear.set_grid(grid)

    def convert_state_dict(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Factors stored for another map at this one's; other tensors unchanged."""
        if self.bilinear is None:
            return tensors
        return self.bilinear.to_own_grid(tensors, "bilinear.")


class BilinearMapping(nn.Module):
    """W_s x W_c + b: every token from m latent ones, which are sums over all tokens.

    Args:
        dim: Channels C.
        grid: Map size (gh, gw) that the factors are stored for.
        rank: m.
        resample: How factors are brought to other maps.

    Shape: (B, h, w, C) -> (B, h, w, C). Parameters: 2 m gh gw + C^2 + C.

    Source: SBM (CVPR 2025), Eq. 2 and Sec. 4.2.1; at other maps than the stored one, ours.
    """

    def __init__(self, dim: int, grid: Size, rank: int, resample: Resample = "bicubic") -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}")
        self.rank, self.resample = rank, resample
        self.space_read = nn.Parameter(torch.empty(rank, *grid))
        self.space_write = nn.Parameter(torch.empty(rank, *grid))
        self.proj = nn.Linear(dim, dim)
        self.cache = EvalCache()
        # Both keep the size of a signal; 0.02 would make U depend on the size of the map.
        nn.init.trunc_normal_(self.space_read, std=(grid[0] * grid[1]) ** -0.5)
        nn.init.trunc_normal_(self.space_write, std=rank**-0.5)

    @property
    def grid(self) -> Size:
        """Map size that the factors are stored for."""
        return self.space_read.shape[1], self.space_read.shape[2]

    def forward(self, x: Tensor) -> Tensor:
        """(B, h, w, C) -> (B, h, w, C)."""
        batch, size = x.shape[0], (x.shape[1], x.shape[2])
        # (B, m, n) without copies; plain matmul would copy the tokens of all images instead.
        read, write = (f.flatten(1).expand(batch, -1, -1) for f in self.factors(size))
        latent = torch.bmm(read, x.flatten(1, 2))
        # An exported graph serves any size, where the second form is never much worse.
        few = not is_any_size(size) and size[0] * size[1] <= self.rank
        if few or _is_counted(x):
            return cast("Tensor", self.proj(torch.bmm(write.mT, latent)).unflatten(1, size))
        # W_s and W_c act on different axes and may change places: W_c then sees m rows, not n.
        latent = F.linear(latent, self.proj.weight)
        return torch.baddbmm(self.proj.bias, write.mT, latent).unflatten(1, size)

    def factors(self, size: Size) -> tuple[Tensor, Tensor]:
        """Read and write factors (m, h, w) for a map of ``size``."""
        if same_size(size, self.grid):
            # Cast before they are expanded, or autocast would cast them once per image.
            dtype = _product_type(self.space_read)
            return self.space_read.to(dtype), self.space_write.to(dtype)
        sources = (self.space_read, self.space_write)
        both = self.cache.get(sources, size, lambda: self._resampled(size))
        return both[0], both[1]

    def _resampled(self, size: Size) -> Tensor:
        """Both factors (2, m, h, w), in the type that the products are taken in."""
        read, write = resample_factors(self.space_read, self.space_write, size, self.resample)
        return torch.stack([read, write]).to(_product_type(read))

    @torch.no_grad()
    def set_grid(self, grid: Size) -> None:
        """Store the factors for another map, where the results stay what they are.

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
        named = zip(FACTORS, factors, strict=True)
        return tensors | {prefix + name: factor for name, factor in named}

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        state_dict.update(self.to_own_grid(dict(state_dict), prefix))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def resample_factors(
    read: Tensor, write: Tensor, size: Size, mode: Resample = "bicubic"
) -> tuple[Tensor, Tensor]:
    """Factors (m, gh, gw) of one map brought to another, (m, h, w).

    A read is a sum over tokens: with h w tokens in place of gh gw its weights shrink by the ratio,
    so that the latents of the same picture stay what they are.
    """
    gh, gw = read.shape[1], read.shape[2]
    if same_size(size, (gh, gw)):
        return read, write
    if mode not in ("bicubic", "bilinear"):
        raise ValueError(f"resample must be 'bicubic' or 'bilinear', got {mode!r}")
    scale = gh * gw / (size[0] * size[1])
    both = torch.stack([read * scale, write])
    precise = both if both.dtype == torch.float64 else both.float()
    precise = F.interpolate(precise, size, mode=mode, antialias=True, align_corners=False)
    new_read, new_write = precise.to(both.dtype)
    return new_read, new_write


def _product_type(tensor: Tensor) -> torch.dtype:
    """Type that matrix products take a tensor in."""
    device = tensor.device.type
    if tensor.dtype == torch.float64 or not is_autocast_available(device):
        return tensor.dtype
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def _silu(x: Tensor) -> Tensor:
    """SiLU of a tensor that nobody else needs."""
    return F.silu(x, inplace=not torch.is_grad_enabled())


def _product(fresh: Tensor, other: Tensor) -> Tensor:
    """Product of two tensors, the first of which nobody else needs."""
    return fresh * other if torch.is_grad_enabled() else fresh.mul_(other)


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """A linear layer on some channels of (B, h, w, C), which as one matrix need not be copied."""
    return cast("Tensor", layer(x.flatten(0, 2)).unflatten(0, x.shape[:3]))


def _is_counted(x: Tensor) -> bool:
    """Whether shapes or a trace stand for a run: multiply-adds are then those of the paper's order.

    W_c on n tokens is what Eq. 3 and Table 1 count.
    """
    return x.is_meta or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
