"""DiT: a vision transformer that denoises, with norms modulated by time and class (adaLN-Zero).

    x <- x + g1 attn(s1 norm(x) + t1);  x <- x + g2 mlp(s2 norm(x) + t2)

Source: Peebles and Xie, "Scalable Diffusion Models with Transformers", ICCV 2023,
https://arxiv.org/abs/2212.09748, Sec. 3, Table 1, and the authors' code
(github.com/facebookresearch/DiT). Checkpoints may have the authors' names or those of diffusers.

Axes: B inputs, C channels, N tokens, D width, p patch size.
"""

from __future__ import annotations

import re
from typing import Literal, cast

import torch
from timm.layers import Attention, DropPath, Mlp
from torch import Tensor, nn

from backbones.hosts.scaffolds.denoising import (
    CHANNELS,
    CLASSES,
    DENOISING_HOST,
    DenoisingBackbone,
    LabelEmbedder,
    TimeEmbedder,
    init_denoiser,
    modulation,
    zero,
)
from backbones.hosts.scaffolds.hierarchical import drop_path_rates
from backbones.hosts.scaffolds.timm_source import refuse_pretrained
from backbones.layers.bounds import check_multiple
from backbones.mixer_calls import mix_tokens
from backbones.parameters.layer_ids import LayerNames
from backbones.registry import register_host
from backbones.slots import HostConfig, Slot, fill

EPS = 1e-6
RATIO = 4.0
EMBEDDERS = ("x_embedder.", "t_embedder.", "y_embedder.")
PERIOD = 10_000.0
BLOCK = r"transformer_blocks\.(\d+)\."
EMBEDDER = "norm1.emb."
# Names in diffusers' blocks, by the authors'.
NAMES = {
    "norm1.linear.": "adaLN_modulation.1.",
    "attn1.to_out.0.": "attn.proj.",
    "ff.net.0.proj.": "mlp.fc1.",
    "ff.net.2.": "mlp.fc2.",
}
OUTER = {
    "pos_embed.proj.": "x_embedder.proj.",
    "proj_out_1.": "final_layer.adaLN_modulation.1.",
    "proj_out_2.": "final_layer.linear.",
}
SHARED = {
    "timestep_embedder.linear_1.": "t_embedder.mlp.0.",
    "timestep_embedder.linear_2.": "t_embedder.mlp.2.",
    "class_embedder.": "y_embedder.",
}


class LatentPatchEmbed(nn.Module):
    """Linear layer over patches: (B, C, H, W) -> (B, N, D)."""

    def __init__(self, channels: int, dim: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        """Embed patches in row-major order: (B, C, H, W) -> (B, N, D)."""
        return self.proj(x).flatten(2).transpose(1, 2)


class TanhGELU(nn.GELU):
    """GELU by a hyperbolic tangent."""

    def __init__(self) -> None:
        super().__init__(approximate="tanh")


class DiTBlock(nn.Module):
    """Attention and MLP, each between modulated norm and gate: (B, N, D) -> (B, N, D)."""

    def __init__(self, dim: int, heads: int, drop_path: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = (
            nn.LayerNorm(dim, eps=EPS, elementwise_affine=False) for _ in range(2)
        )
        self.attn: nn.Module = Attention(dim, heads, qkv_bias=True)
        self.mlp: nn.Module = Mlp(dim, int(RATIO * dim), act_layer=TanhGELU)
        self.adaLN_modulation = modulation(dim, 6)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, size: tuple[int, int], condition: Tensor) -> Tensor:
        """Apply token and channel mixer: tokens (B, N, D) of a map, condition (B, D)."""
        modulated = self.adaLN_modulation(condition).unsqueeze(1)
        shift1, scale1, gate1, shift2, scale2, gate2 = modulated.chunk(6, dim=2)
        y = mix_tokens(self.attn, self.norm1(x) * (1 + scale1) + shift1, size, 0)
        x = x + self.drop_path(gate1 * y)
        y = mix_tokens(self.mlp, self.norm2(x) * (1 + scale2) + shift2, size, 0)
        return x + self.drop_path(gate2 * y)


class DiTFinalLayer(nn.Module):
    """Modulated norm and linear layer: (B, N, D) -> (B, N, O)."""

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(dim, eps=EPS, elementwise_affine=False)
        self.linear = nn.Linear(dim, out)
        self.adaLN_modulation = modulation(dim, 2)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Project tokens to patches: (B, N, D) -> (B, N, O)."""
        shift, scale = self.adaLN_modulation(condition).unsqueeze(1).chunk(2, dim=2)
        return self.linear(self.norm_final(x) * (1 + scale) + shift)


def positions(size: tuple[int, int], dim: int, like: Tensor) -> Tensor:
    """Return sines and cosines of columns, then of rows: (N, D).

    Source: the authors' code, which begins with the columns.
    """
    quarter = dim // 4
    device = like.device
    rates = PERIOD ** (-torch.arange(quarter, device=device, dtype=torch.float64) / quarter)
    rows, columns = (torch.arange(side, device=device, dtype=torch.float64) for side in size)
    halves = []
    for places in (columns.repeat(size[0]), rows.repeat_interleave(size[1])):
        angles = places[:, None] * rates
        halves += [angles.sin(), angles.cos()]
    return torch.cat(halves, dim=1).to(like.dtype)


class DiT(DenoisingBackbone):
    """DiT with slots for token and channel mixers.

    Args:
        config: See ``HostConfig``.
        channels: C.
        num_classes: K.
        learn_sigma: Predict variances as well.
        dim: D.
        depth: Blocks.
        heads: Heads of the attention.
        frequency_shift: 0, or 1 for the frequencies of times in diffusers; see ``sinusoids``.

    Source: DiT (ICCV 2023), https://arxiv.org/abs/2212.09748.
    """

    block_layout = "tokens"
    layer_names = LayerNames(stem=EMBEDDERS, tail=EMBEDDERS)

    def __init__(
        self, config: HostConfig, *, channels: int, num_classes: int, learn_sigma: bool, dim: int,
        depth: int, heads: int, frequency_shift: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(channels, num_classes, learn_sigma)
        self.patch, self.dim, self.img_size = config.patch_size, dim, config.img_size
        self.size_divisor = self.patch
        self.x_embedder = LatentPatchEmbed(channels, dim, self.patch)
        self.t_embedder, self.y_embedder = (
            TimeEmbedder(dim, frequency_shift),
            LabelEmbedder(num_classes, dim),
        )
        self.blocks = nn.ModuleList(
            DiTBlock(dim, heads, rate) for rate in drop_path_rates(config.drop_path_rate, depth)
        )
        self.final_layer = DiTFinalLayer(dim, self.patch**2 * self.out_channels)
        init_denoiser(self)
        zero(self.final_layer.linear, self.final_layer.adaLN_modulation[1])
        grid = config.grid(self.patch)
        for index, block_module in enumerate(self.blocks):
            block = cast("DiTBlock", block_module)
            zero(block.adaLN_modulation[1])
            slot = Slot(dim, RATIO, grid, 0, index, dense=config.dense)
            fill(block, "mlp", config.channel_mixer, slot)
            fill(block, "attn", config.token_mixer, slot)

    def denoise(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Return the prediction: (B, C, H, W), times (B,), labels (B,) -> (B, C or 2 C, H, W).

        Raises:
            ValueError: A side is not a multiple of the patch size.
        """
        height, width = x.shape[2:]
        check_multiple("data.image_size", height, self.patch)
        check_multiple("data.image_size", width, self.patch)
        size = (height // self.patch, width // self.patch)
        condition = self.t_embedder(times) + self.y_embedder(labels)
        tokens = self.x_embedder(x)
        tokens = tokens + positions(size, self.dim, tokens)
        for block in self.blocks:
            tokens = block(tokens, size, condition)
        patches = self.final_layer(tokens, condition)  # (B, N, p * p * O), channels last
        patches = patches.unflatten(2, (self.patch, self.patch, -1)).unflatten(1, size)
        return patches.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename diffusers' tensors; leave out the authors' table of positions.

        Raises:
            ValueError: Blocks of a file of diffusers embed times differently.
        """
        learnt = {key: value for key, value in state_dict.items() if key != "pos_embed"}
        if not any(key.startswith("transformer_blocks.") for key in learnt):
            return learnt
        return from_diffusers(learnt)


def from_diffusers(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of diffusers' DiTTransformer2DModel to the authors'.

    diffusers keeps a copy of the embedders in each block, and separate queries, keys and values.
    """
    converted: dict[str, Tensor] = {}
    for key, value in state_dict.items():
        match = re.match(BLOCK, key)
        if match is None:
            prefix = next((name for name in OUTER if key.startswith(name)), None)
            if prefix is not None:
                converted[OUTER[prefix] + key.removeprefix(prefix)] = value
            elif not key.startswith("pos_embed."):
                converted[key] = value
            continue
        inner, block = key[match.end() :], f"blocks.{match[1]}."
        if inner.startswith(EMBEDDER):
            rest = inner.removeprefix(EMBEDDER)
            prefix = next(name for name in SHARED if rest.startswith(name))
            name = SHARED[prefix] + rest.removeprefix(prefix)
            if not torch.equal(converted.setdefault(name, value), value):
                raise ValueError(
                    f"{key} differs from that of an earlier block, but DiT has one embedder of "
                    "times and classes; pass a file that was converted from DiT's"
                )
        elif inner.startswith("attn1.to_q."):
            parts = [state_dict[key.replace("to_q", part)] for part in ("to_q", "to_k", "to_v")]
            converted[f"{block}attn.qkv.{inner.rpartition('.')[2]}"] = torch.cat(parts)
        elif not inner.startswith(("attn1.to_k.", "attn1.to_v.")):
            prefix = next((name for name in NAMES if inner.startswith(name)), "")
            converted[block + NAMES.get(prefix, "") + inner.removeprefix(prefix)] = value
    return converted


def _register(name: str, depth: int, dim: int, heads: int, learns: bool = True) -> None:
    @register_host(
        name, source="DiT (ICCV 2023), Table 1", plain_ffn=False,
        patch_size=2 if learns else 4, **DENOISING_HOST,
    )  # fmt: skip
    def build(
        config: HostConfig,
        *,
        channels: int = CHANNELS,
        num_classes: int = CLASSES,
        learn_sigma: bool = learns,
        frequency_shift: Literal[0, 1] = 0,
    ) -> DiT:
        refuse_pretrained(name, config)
        return DiT(
            config, channels=channels, num_classes=num_classes, learn_sigma=learn_sigma, dim=dim,
            depth=depth, heads=heads, frequency_shift=frequency_shift,
        )  # fmt: skip

    build.__doc__ = f"""{depth} blocks of width {dim} with {heads} heads.

    Args:
        config: See ``HostConfig``.
        channels: Channels of the input; data modules pass their own number.
        num_classes: Classes; data modules pass their own number.
        learn_sigma: Predict variances as well.
        frequency_shift: 1 for the frequencies of times in diffusers, 0 for the authors'.
    """


_register("dit_s", 12, 384, 6)
_register("dit_b", 12, 768, 12)
_register("dit_l", 24, 1024, 16)
_register("dit_xl", 28, 1152, 16)
_register("dit_tiny", 5, 96, 4, learns=False)
