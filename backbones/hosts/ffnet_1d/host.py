"""FFNet_1D: FFNet for multivariate time series, also called FFNet_TD.

    x <- x + V(GELU(K(BN(CVIFFN(x)))));  x <- x + CIFFN(BN(D(x)))

Each variable is cut into patches of 4 steps, every 2 steps, by one convolution that all share. K, V
and D have a kernel of 51 per variable and channel, longer than the 48 tokens of 96 steps.

Source: Yun et al., "FFNet: MetaMixer-based Efficient Convolutional Mixer Design",
https://arxiv.org/abs/2406.02021, Sec. 4.3, App. F.4, Fig. 12, Algorithms 1 and 2. The published
figures come from the authors' code (github.com/ysj9909/FFNet), which differs from the text:

* The expansion ratio (12; Exchange 1, ETTh1 2, ETTh2 8) holds for CIFFN; that of CVIFFN is always
  2.
* K and V are plain convolutions with bias; only D has a small kernel beside the large one.
* Its weights folded for inference cannot be made (the function fails); ``fuse`` folds them here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from backbones.base import FeatureInfo
from backbones.hosts.ffnet_1d.blocks import SeriesBlock
from backbones.hosts.scaffolds.hierarchical import drop_path_rates
from backbones.hosts.scaffolds.series import LOOKBACK, VARIABLES, SeriesBackbone
from backbones.hosts.scaffolds.timm_source import refuse_pretrained
from backbones.layers.reparam import fuse
from backbones.registry import register_host
from backbones.slots import HostConfig, Slot

PATCH, STRIDE = 4, 2


class PatchStem(nn.Module):
    """Repeat the last value, cut each variable into patches, embed them, BatchNorm.

    Shape: (B, L, M) -> (B, D, M, N).
    """

    def __init__(self, dim: int, patch: int, stride: int) -> None:
        super().__init__()
        self.padding = patch - stride
        self.conv = nn.Conv1d(1, dim, patch, stride)
        self.norm = nn.BatchNorm1d(dim)

    def forward(self, series: Tensor) -> Tensor:
        """Embed patches of each variable: (B, L, M) -> (B, D, M, N)."""
        variables = series.shape[2]
        rows = series.transpose(1, 2).flatten(0, 1).unsqueeze(1)  # (B * M, 1, L)
        x = self.norm(self.conv(F.pad(rows, (0, self.padding), mode="replicate")))
        return x.unflatten(0, (-1, variables)).transpose(1, 2)


class FFNet1D(SeriesBackbone):
    """FFNet_1D; its parameters depend on the number of variables.

    A channel mixer replaces CIFFN and a token mixer the whole token mixer, with a BatchNorm before
    it. Both see one variable at a time, as a map of one row.

    Args:
        config: See ``HostConfig``.
        variables: M.
        dim: Channels D.
        depth: Blocks.
        expansion: e of CIFFN.
        kernels: Sides of the large kernel and of the small one that D trains beside it.
        drop: Dropout after the first layer of CIFFN.

    Source: FFNet, App. F.4, https://arxiv.org/abs/2406.02021.
    """

    classification_keys = ("forecaster.",)  # in files of the authors, beside the backbone

    def __init__(
        self, config: HostConfig, *, variables: int, dim: int, depth: int, expansion: int,
        kernels: tuple[int, ...], drop: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.variables, self.kernels, self.num_features = variables, kernels, dim
        self.feature_info = (FeatureInfo(dim, STRIDE),)
        self.img_size = config.img_size
        self.stem = PatchStem(dim, PATCH, STRIDE)
        self.blocks = nn.ModuleList(
            SeriesBlock(
                rate, dim=dim, variables=variables, ratio=expansion, kernels=kernels, drop=drop
            )
            for rate in drop_path_rates(config.drop_path_rate, depth)
        )
        for index, block in enumerate(self.blocks):
            grid = (1, self.num_tokens(config.img_size[1]))
            slot = Slot(dim, expansion, grid, 0, index, dense=config.dense)
            cast("SeriesBlock", block).fill_slots(slot, config.channel_mixer, config.token_mixer)

    def num_tokens(self, length: int) -> int:
        """Return N: one token for every second step."""
        return (length - STRIDE) // STRIDE + 1

    def last_map(self, series: Tensor) -> Tensor:
        """Return the last block's output: (B, L, M) -> (B, D, M, N).

        Raises:
            ValueError: The series have another number of variables than the network.
        """
        if series.shape[2] != self.variables:
            raise ValueError(
                f"{self.name or 'ffnet_1d'} was built for {self.variables} variables, got "
                f"{series.shape[2]}; pass backbone.variables={series.shape[2]}"
            )
        x = self.stem(series)
        for block in self.blocks:
            x = block(x)
        return x

    def fuse(self) -> FFNet1D:
        """Fold the branches of D and their BatchNorm into one kernel, in place: for inference."""
        return fuse(self)

    def is_official(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return True for tensors under the authors' names."""
        from backbones.hosts.ffnet_1d.checkpoint_conversion import is_official

        return is_official(tensors)

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename the authors' tensors, and leave out those that their code never uses."""
        from backbones.hosts.ffnet_1d.checkpoint_conversion import convert_official_state_dict

        if self.is_official(state_dict):
            return convert_official_state_dict(state_dict, self.kernels)
        return state_dict


@register_host(
    "ffnet_1d", source="FFNet, App. F.4", plain_ffn=False, patch_size=STRIDE, modality="series",
    img_size=LOOKBACK,
)  # fmt: skip
def ffnet_1d(
    config: HostConfig,
    *,
    variables: int = VARIABLES,
    dim: int = 64,
    depth: int = 1,
    expansion: int = 12,
    kernel_size: int = 51,
    small_kernel: int | None = 5,
    drop: float = 0.6,
    fused: bool = False,
) -> FFNet1D:
    """One block of width 64 with kernels of 51.

    Args:
        config: See ``HostConfig``.
        variables: Number of variables; data modules pass their own.
        dim: Width.
        depth: Number of blocks.
        expansion: Expansion ratio of CIFFN.
        kernel_size: Side of the kernels along time, odd.
        small_kernel: Side of the small kernel trained beside the large one; null leaves it out.
        drop: Dropout after the first layer of CIFFN.
        fused: Build the fused form for inference.
    """
    refuse_pretrained("ffnet_1d", config)
    kernels = (kernel_size,) if small_kernel is None else (kernel_size, small_kernel)
    backbone = FFNet1D(
        config, variables=variables, dim=dim, depth=depth, expansion=expansion, kernels=kernels,
        drop=drop,
    )  # fmt: skip
    return backbone.fuse() if fused else backbone
