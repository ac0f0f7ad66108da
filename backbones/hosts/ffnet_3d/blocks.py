"""Parts of FFNet_3D: its two mixers, and changes of resolution.

Source: Yun et al., "FFNet: MetaMixer-based Efficient Convolutional Mixer Design",
https://arxiv.org/abs/2406.02021, Sec. 4.3 and App. F.3; norms, pooling and residual paths are those
of the authors' code (github.com/ysj9909/FFNet).

Axes: P voxels, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from timm.layers import DropPath
from torch import Tensor, nn

from backbones.hosts.scaffolds.point_mixers import fit_to_voxels, mix_voxels
from backbones.layers.activations import FUNCTIONS
from backbones.layers.sparse import SubmanifoldConv3d, VoxelLevel, cell_max
from backbones.mixer import Mixer
from backbones.mixers.ffn import FFN
from backbones.slots import HostConfig, Slot, SlotMixers, factory_at, fill

RATIO = 4.0  # hidden width of the FFN over C
EPS, MOMENTUM = 1e-3, 0.01  # of every BatchNorm
Activation = Literal["gelu", "relu"]
Function = Callable[[Tensor], Tensor]


def batch_norm(dim: int) -> nn.BatchNorm1d:
    """Build the BatchNorm of voxels (P, C)."""
    return nn.BatchNorm1d(dim, eps=EPS, momentum=MOMENTUM)


class SparseConvNorm(nn.Module):
    """BN(S(x)) with a submanifold convolution S: (P, C) -> (P, C)."""

    def __init__(self, dim: int, kernel_size: int) -> None:
        super().__init__()
        self.conv = SubmanifoldConv3d(dim, dim, kernel_size)
        self.norm = batch_norm(dim)

    def forward(self, x: Tensor, level: VoxelLevel) -> Tensor:
        """Convolve and norm: (P, C) -> (P, C)."""
        return self.norm(self.conv(x, level))


class PointTokenMixer(nn.Module):
    """V(act(K(W x))), with K and V submanifold convolutions and their BatchNorms.

    Shape: (P, C) -> (P, C).
    """

    def __init__(self, dim: int, kernel_size: int, act: Activation) -> None:
        super().__init__()
        self.query = nn.Linear(dim, dim)
        self.key = SparseConvNorm(dim, kernel_size)
        self.value = SparseConvNorm(dim, kernel_size)
        self.act: Function = FUNCTIONS[act]

    def forward(self, x: Tensor, level: VoxelLevel) -> Tensor:
        """Mix each voxel with its neighbours: (P, C) -> (P, C)."""
        return self.value(self.act(self.key(self.query(x), level)), level)


class PointChannelMixer(nn.Module):
    """FFN(D(x)), with D a submanifold convolution and its BatchNorm.

    Shape: (P, C) -> (P, C).
    """

    def __init__(self, dim: int, kernel_size: int, act: Activation) -> None:
        super().__init__()
        self.query = SparseConvNorm(dim, kernel_size)
        ffn = FFN(dim, hidden_ratio=RATIO, act=act)
        for layer in (ffn.fc1, ffn.fc2):
            layer.reset_parameters()  # the authors keep torch's initialisation
        self.ffn: nn.Module = ffn

    def forward(self, x: Tensor, level: VoxelLevel) -> Tensor:
        """Mix neighbours, then channels: (P, C) -> (P, C)."""
        return mix_voxels(self.ffn, self.query(x, level), level)


class PointBlock(nn.Module):
    """x + drop_path(token(LN x)), then x + drop_path(channel(LN x)).

    Stochastic depth drops single voxels, as in the authors' code.

    Shape: (P, C) -> (P, C).
    """

    def __init__(self, dim: int, kernel_size: int, act: Activation, drop_path: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.token_mixer: nn.Module = PointTokenMixer(dim, kernel_size, act)
        self.channel_mixer = PointChannelMixer(dim, kernel_size, act)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, level: VoxelLevel) -> Tensor:
        """Apply token and channel mixer, each with its shortcut: (P, C) -> (P, C)."""
        y, mixer = self.norm1(x), self.token_mixer
        y = mix_voxels(mixer, y, level) if isinstance(mixer, Mixer) else mixer(y, level)
        x = x + self.drop_path(y)
        return x + self.drop_path(self.channel_mixer(self.norm2(x), level))

    def fill_slots(self, slot: Slot, config: HostConfig) -> None:
        """Replace the FFN behind D by a channel mixer, K and V with all around them by a token one.

        Kernels of k x k become submanifold kernels of k x k x k.
        """
        for parent, name, factory in (
            (self.channel_mixer, "ffn", config.channel_mixer),
            (self, "token_mixer", config.token_mixer),
        ):
            fill(parent, name, factory, slot)
            if factory_at(factory, slot) is not None:
                first = slot.stage == slot.block == 0 or isinstance(factory, SlotMixers)
                fit_to_voxels(parent.get_submodule(name), slot.dim, check=first)  # type: ignore[arg-type]


class PointDown(nn.Module):
    """Linear layer, maximum over 2 x 2 x 2 voxels, BatchNorm, activation: (P, C) -> (P', O)."""

    def __init__(self, dim: int, out_dim: int, act: Activation) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, out_dim)
        self.norm = batch_norm(out_dim)
        self.act: Function = FUNCTIONS[act]

    def forward(self, x: Tensor, coarse: VoxelLevel) -> Tensor:
        """Project and pool to the coarser level: (P, C) -> (P', O)."""
        return self.act(self.norm(cell_max(self.linear(x), coarse)))


class PointProjection(nn.Module):
    """act(BN(W x + b)): (P, C) -> (P, O)."""

    def __init__(self, dim: int, out_dim: int, act: Activation) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, out_dim)
        self.norm = batch_norm(out_dim)
        self.act: Function = FUNCTIONS[act]

    def forward(self, x: Tensor) -> Tensor:
        """Project each voxel: (P, C) -> (P, O)."""
        return self.act(self.norm(self.linear(x)))


class PointUp(nn.Module):
    """Sum of projected skip and of the projected coarser voxel: (P, S) and (P', C) -> (P, O)."""

    def __init__(self, dim: int, skip_dim: int, out_dim: int, act: Activation) -> None:
        super().__init__()
        self.proj = PointProjection(dim, out_dim, act)
        self.skip = PointProjection(skip_dim, out_dim, act)

    def forward(self, x: Tensor, skip: Tensor, coarse: VoxelLevel) -> Tensor:
        """Project both levels and add them: (P', C) and (P, S) -> (P, O)."""
        return self.skip(skip) + self.proj(x)[coarse.inverse]


class PointStage(nn.Module):
    """A change of resolution, if any, and blocks."""

    def __init__(
        self,
        embed: nn.Module | None,
        dim: int,
        rates: Sequence[float],
        kernel_size: int,
        act: Activation,
    ) -> None:
        super().__init__()
        self.embed = embed
        self.blocks = nn.ModuleList(PointBlock(dim, kernel_size, act, rate) for rate in rates)

    def run_blocks(self, x: Tensor, level: VoxelLevel) -> Tensor:
        """Apply all blocks: (P, C) -> (P, C)."""
        for block in self.blocks:
            x = block(x, level)
        return x
