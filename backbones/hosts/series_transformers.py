"""PatchTST and iTransformer: encoders over patches of time, and over variables.

Source: Nie et al., "A Time Series is Worth 64 Words", ICLR 2023, https://arxiv.org/abs/2211.14730,
Sec. 3.1 (PatchTST); Liu et al., "iTransformer", ICLR 2024, https://arxiv.org/abs/2310.06625,
Sec. 3.

* PatchTST's authors add the attention scores of the layer before (RealFormer) in their code; the
  paper does not name it, and it is left out here as in transformers' PatchTST.
* iTransformer's code can append time stamps as further variables; they are left out here.

Axes: B series, L look-back, M variables, N tokens, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention, DropPath
from torch import Tensor, nn

from backbones.base import FeatureInfo
from backbones.hosts.scaffolds.hierarchical import drop_path_rates
from backbones.hosts.scaffolds.series import LOOKBACK, SeriesBackbone
from backbones.hosts.scaffolds.timm_source import refuse_pretrained
from backbones.mixer_calls import mix_tokens
from backbones.mixers.ffn import FFN
from backbones.registry import register_host
from backbones.slots import HostConfig, Slot, fill


class TokenNorm(nn.BatchNorm1d):
    """BatchNorm of the channels of tokens (B, N, C)."""

    def forward(self, x: Tensor) -> Tensor:
        """Norm each channel over batch and tokens: (B, N, C) -> (B, N, C)."""
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class EncoderBlock(nn.Module):
    """norm(x + attention(x)), then norm(x + FFN(x)): norms come after the sums.

    Shape: (B, N, C) -> (B, N, C).
    """

    def __init__(
        self, dim: int, *, heads: int, ratio: float, drop: float, attn_drop: float,
        norm: type[nn.Module], rate: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.attn: nn.Module = Attention(dim, heads, qkv_bias=True, attn_drop=attn_drop)
        ffn = FFN(dim, hidden_ratio=ratio, drop=drop)
        for layer in (ffn.fc1, ffn.fc2):
            layer.reset_parameters()  # both authors keep torch's initialisation
        self.mlp: nn.Module = ffn
        self.norm1, self.norm2 = norm(dim), norm(dim)
        self.drop = nn.Dropout(drop)
        self.drop_path = DropPath(rate) if rate else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention and FFN, each with its shortcut: (B, N, C) -> (B, N, C)."""
        grid = (1, x.shape[1])
        x = self.norm1(x + self.drop_path(self.drop(mix_tokens(self.attn, x, grid, 0))))
        y = mix_tokens(self.mlp, x, grid, 0)
        return self.norm2(x + self.drop_path(y))


class Encoder(SeriesBackbone):
    """Base of both: a list of ``EncoderBlock`` with slots.

    Args:
        config: See ``HostConfig``.
        dim: C.
        stride: Steps per token.
    """

    any_variables = True
    token_slots, channel_slots = ("attn",), ("mlp",)
    blocks: nn.ModuleList

    def __init__(self, config: HostConfig, dim: int, stride: int) -> None:
        super().__init__()
        self.img_size, self.num_features = config.img_size, dim
        self.feature_info = (FeatureInfo(dim, stride),)

    def add_blocks(
        self, config: HostConfig, depth: int, ratio: float, grid: tuple[int, int], **options: Any
    ) -> None:
        """Add the blocks, and fill their slots for tokens of ``grid``."""
        self.blocks = nn.ModuleList(
            EncoderBlock(self.num_features, ratio=ratio, rate=rate, **options)
            for rate in drop_path_rates(config.drop_path_rate, depth)
        )
        for index, block in enumerate(self.blocks):
            slot = Slot(self.num_features, ratio, grid, 0, index, dense=config.dense)
            fill(block, "mlp", config.channel_mixer, slot)
            fill(block, "attn", config.token_mixer, slot)

    def encode(self, tokens: Tensor) -> Tensor:
        """Apply all blocks: (B, N, C) -> (B, N, C)."""
        for block in self.blocks:
            tokens = block(tokens)
        return tokens


class PatchTST(Encoder):
    """PatchTST: each variable alone, its patches are the tokens.

    The last value is repeated to fill one more patch at the end. Each token has a learnt position.

    Source: PatchTST (ICLR 2023), Sec. 3.1, https://arxiv.org/abs/2211.14730.
    """

    def __init__(
        self, config: HostConfig, *, dim: int, depth: int, heads: int, hidden_ratio: float,
        patch: int, stride: int, drop: float,
    ) -> None:  # fmt: skip
        super().__init__(config, dim, stride)
        length = config.img_size[1]
        if length < patch:
            raise ValueError(
                f"a look-back of {length} steps is shorter than a patch of {patch}; pass "
                "data.lookback or backbone.patch"
            )
        self.patch, self.stride = patch, stride
        self.stem = nn.Linear(patch, dim)
        tokens = self.num_tokens(length)
        self.pos_embed = nn.Parameter(torch.empty(1, tokens, dim).uniform_(-0.02, 0.02))
        self.drop = nn.Dropout(drop)
        self.add_blocks(
            config, depth, hidden_ratio, (1, tokens), heads=heads, drop=drop, attn_drop=0.0,
            norm=TokenNorm,
        )  # fmt: skip

    def num_tokens(self, length: int) -> int:
        """Return N: the patches of the padded series."""
        return (length - self.patch) // self.stride + 2

    def last_map(self, series: Tensor) -> Tensor:
        """Encode patches of each variable: (B, L, M) -> (B, C, M, N)."""
        variables = series.shape[2]
        rows = F.pad(series.transpose(1, 2), (0, self.stride), mode="replicate")
        patches = rows.unfold(-1, self.patch, self.stride).flatten(0, 1)  # (B * M, N, P)
        tokens = self.encode(self.drop(self.stem(patches) + self.pos_embed))
        return tokens.unflatten(0, (-1, variables)).permute(0, 3, 1, 2)


class ITransformer(Encoder):
    """iTransformer: the tokens are the variables, each embedded by one linear layer over time.

    Tokens are unordered, so only mixers that ignore order fit.

    Source: iTransformer (ICLR 2024), Sec. 3, https://arxiv.org/abs/2310.06625.
    """

    def __init__(
        self, config: HostConfig, *, dim: int, depth: int, heads: int, hidden_ratio: float,
        drop: float, variables: int,
    ) -> None:  # fmt: skip
        length = config.img_size[1]
        super().__init__(config, dim, length)
        self.stem = nn.Linear(length, dim)
        self.drop = nn.Dropout(drop)
        self.norm = nn.LayerNorm(dim)
        self.add_blocks(
            config, depth, hidden_ratio, (1, variables), heads=heads, drop=drop, attn_drop=drop,
            norm=nn.LayerNorm,
        )  # fmt: skip

    def num_tokens(self, length: int) -> int:
        """Return 1: a variable is one token, whatever its length."""
        return 1

    def last_map(self, series: Tensor) -> Tensor:
        """Encode the variables: (B, L, M) -> (B, C, M, 1)."""
        tokens = self.encode(self.drop(self.stem(series.transpose(1, 2))))
        return self.norm(tokens).transpose(1, 2).unsqueeze(-1)


@register_host(
    "patchtst", source="PatchTST (ICLR 2023), Sec. 3.1", patch_size=8, modality="series",
    img_size=LOOKBACK,
)  # fmt: skip
def patchtst(
    config: HostConfig,
    *,
    dim: int = 128,
    depth: int = 3,
    heads: int = 16,
    hidden_ratio: float = 2.0,
    patch: int = 16,
    stride: int = 8,
    drop: float = 0.2,
) -> PatchTST:
    """Width 128, 3 blocks, 16 heads, patches of 16 steps every 8.

    ETTh1 and ETTh2 were published with width 16, 4 heads, ratio 8 and dropout 0.3.

    Args:
        config: See ``HostConfig``.
        dim: Width.
        depth: Number of blocks.
        heads: Heads of the attention.
        hidden_ratio: Hidden width of the FFN over the width.
        patch: Steps of a patch.
        stride: Steps from patch to patch.
        drop: Dropout.
    """
    refuse_pretrained("patchtst", config)
    return PatchTST(
        config, dim=dim, depth=depth, heads=heads, hidden_ratio=hidden_ratio, patch=patch,
        stride=stride, drop=drop,
    )  # fmt: skip


@register_host(
    "itransformer", source="iTransformer (ICLR 2024), Sec. 3", patch_size=1, modality="series",
    img_size=LOOKBACK, ordered=False,
)  # fmt: skip
def itransformer(
    config: HostConfig,
    *,
    dim: int = 512,
    depth: int = 3,
    heads: int = 8,
    hidden_ratio: float = 1.0,
    drop: float = 0.1,
    variables: int = 7,
) -> ITransformer:
    """Width 512, 3 blocks, 8 heads, as for ECL.

    The ETT sets were published with width 128 to 256 and 2 blocks, Traffic with 4 blocks.

    Args:
        config: See ``HostConfig``.
        dim: Width.
        depth: Number of blocks.
        heads: Heads of the attention.
        hidden_ratio: Hidden width of the FFN over the width.
        drop: Dropout.
        variables: Usual number of variables; any number runs.
    """
    refuse_pretrained("itransformer", config)
    return ITransformer(
        config, dim=dim, depth=depth, heads=heads, hidden_ratio=hidden_ratio, drop=drop,
        variables=variables,
    )  # fmt: skip
