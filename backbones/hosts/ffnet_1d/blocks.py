"""Parts of FFNet_1D: feed-forward networks over variables and channels, and its two mixers.

Source: Yun et al., "FFNet: MetaMixer-based Efficient Convolutional Mixer Design",
https://arxiv.org/abs/2406.02021, App. F.4, Algorithms 1 and 2, Fig. 12; dropout, norms and the
fixed ratio of the token mixer are those of the authors' code (github.com/ysj9909/FFNet).

Axes: B series, M variables, D channels, N tokens, e expansion ratio. Maps are (B, D, M, N).
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from backbones.hosts.scaffolds.series import mix_variables
from backbones.layers.reparam import BranchedConv
from backbones.layers.row_conv import row_conv
from backbones.mixer_calls import NormedMixer
from backbones.slots import MixerFactory, Slot, factory_at, fill

TOKEN_RATIO = 2  # of every CVIFFN in the authors' code, whatever the expansion ratio
TOKEN_DROPS = (0.3, 0.15)
CHANNEL_DROP = 0.15  # the second; the first is an option


class CVIFFN(nn.Module):
    """Feed-forward network that mixes the variables first, then each variable's rows of them.

    h[d, r] = GELU(sum_m W1[d, r, m] x[m, d] + b1), r < e M, and
    y[m, o] = sum_{j < e, d} W2[m, o, j, d] h[d, m e + j] + b2.

    Args:
        dim: D.
        ratio: e.
        variables: M.
        drops: Dropout after the first layer, before GELU, and after the second one.

    Shape: (B, D, M, N) -> (B, D, M, N). Parameters: e D M^2 + e D M + e D^2 M + D M.

    Source: FFNet, Algorithm 1.
    """

    def __init__(self, dim: int, ratio: int, variables: int, drops: tuple[float, float]) -> None:
        super().__init__()
        self.ratio = ratio
        hidden = dim * ratio * variables
        self.fc1 = nn.Conv1d(dim * variables, hidden, 1, groups=dim)
        self.fc2 = nn.Conv1d(hidden, dim * variables, 1, groups=variables)
        self.drop1, self.drop2 = map(nn.Dropout, drops)

    def forward(self, x: Tensor) -> Tensor:
        """Mix variables, then channels within each: (B, D, M, N) -> (B, D, M, N)."""
        dim, variables = x.shape[1:3]
        hidden = F.gelu(self.drop1(self.fc1(x.flatten(1, 2))))
        by_variable = hidden.unflatten(1, (dim, variables, self.ratio)).permute(0, 2, 3, 1, 4)
        y = self.drop2(self.fc2(by_variable.flatten(1, 3)))
        return y.unflatten(1, (variables, dim)).transpose(1, 2)


class CIFFN(nn.Module):
    """Feed-forward network that mixes the channels first, then each channel's rows of them.

    h[m, r] = GELU(sum_d W1[m, r, d] x[m, d] + b1), r < e D, and
    y[m', d] = sum_{j < e, m} W2[d, m', j, m] h[m, d e + j] + b2.

    Args:
        dim: D.
        ratio: e.
        variables: M.
        drops: Dropout after the first layer, before GELU, and after the second one.

    Shape: (B, D, M, N) -> (B, D, M, N). Parameters: e M D^2 + e M D + e D M^2 + D M.

    Source: FFNet, Algorithm 2.
    """

    def __init__(self, dim: int, ratio: int, variables: int, drops: tuple[float, float]) -> None:
        super().__init__()
        self.ratio = ratio
        hidden = dim * ratio * variables
        self.fc1 = nn.Conv1d(variables * dim, hidden, 1, groups=variables)
        self.fc2 = nn.Conv1d(hidden, variables * dim, 1, groups=dim)
        self.drop1, self.drop2 = map(nn.Dropout, drops)

    def forward(self, x: Tensor) -> Tensor:
        """Mix channels, then variables within each: (B, D, M, N) -> (B, D, M, N)."""
        dim, variables = x.shape[1:3]
        hidden = F.gelu(self.drop1(self.fc1(x.transpose(1, 2).flatten(1, 2))))
        by_channel = hidden.unflatten(1, (variables, dim, self.ratio)).permute(0, 2, 3, 1, 4)
        y = self.drop2(self.fc2(by_channel.flatten(1, 3)))
        return y.unflatten(1, (dim, variables))


class AlongTime(nn.Module):
    """A convolution with a kernel per variable and channel: (B, D, M, N) -> (B, D, M, N)."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        """Convolve each variable and channel along time: (B, D, M, N) -> (B, D, M, N)."""
        variables, dim = x.shape[2], x.shape[1]
        y = self.conv(x.transpose(1, 2).flatten(1, 2).unsqueeze(2))  # (B, M * D, 1, N)
        return y.squeeze(2).unflatten(1, (variables, dim)).transpose(1, 2)


class TokenMixer(nn.Module):
    """V(GELU(K(BN(CVIFFN(x))))), with depthwise K and V along time.

    Shape: (B, D, M, N) -> (B, D, M, N).
    """

    def __init__(self, dim: int, variables: int, kernel_size: int) -> None:
        super().__init__()
        self.ffn = CVIFFN(dim, TOKEN_RATIO, variables, TOKEN_DROPS)
        self.norm = nn.BatchNorm2d(dim)
        channels = variables * dim
        self.key, self.value = (AlongTime(row_conv(channels, kernel_size)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Mix variables and time: (B, D, M, N) -> (B, D, M, N)."""
        return self.value(F.gelu(self.key(self.norm(self.ffn(x)))))


class ChannelMixer(nn.Module):
    """CIFFN(BN(D(x))), with D a large and a small depthwise kernel along time.

    Shape: (B, D, M, N) -> (B, D, M, N).
    """

    def __init__(
        self, dim: int, ratio: int, variables: int, kernels: tuple[int, ...], drop: float
    ) -> None:
        super().__init__()
        channels = variables * dim
        query = BranchedConv(channels, channels, [(1, side) for side in kernels])
        for side, branch in zip(kernels, query.branches.values(), strict=True):
            branch.conv = row_conv(channels, side, bias=False)
        self.query = AlongTime(query)
        self.norm = nn.BatchNorm2d(dim)
        self.ffn: nn.Module = CIFFN(dim, ratio, variables, (drop, CHANNEL_DROP))

    def forward(self, x: Tensor) -> Tensor:
        """Mix time, then channels and variables: (B, D, M, N) -> (B, D, M, N)."""
        return mix_variables(self.ffn, self.norm(self.query(x)))


class SeriesBlock(nn.Module):
    """x + drop_path(token(x)), then x + drop_path(channel(x)).

    Shape: (B, D, M, N) -> (B, D, M, N).
    """

    def __init__(self, drop_path: float, **sizes: Any) -> None:
        super().__init__()
        dim, variables, kernels = sizes["dim"], sizes["variables"], sizes["kernels"]
        self.token_mixer: nn.Module = TokenMixer(dim, variables, kernels[0])
        self.channel_mixer = ChannelMixer(dim, sizes["ratio"], variables, kernels, sizes["drop"])
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Apply token and channel mixer, each with its shortcut: (B, D, M, N) -> the same."""
        x = x + self.drop_path(mix_variables(self.token_mixer, x))
        return x + self.drop_path(self.channel_mixer(x))

    def fill_slots(
        self, slot: Slot, channel_mixer: MixerFactory | None, token_mixer: MixerFactory | None
    ) -> None:
        """Replace CIFFN by a channel mixer after D, and the token mixer by BatchNorm and another.

        The mixers see one variable at a time.
        """
        fill(self.channel_mixer, "ffn", channel_mixer, slot)
        make = factory_at(token_mixer, slot)
        if make is not None:
            fill(self, "token_mixer", lambda slot: NormedMixer(slot.dim, make(slot)), slot)
