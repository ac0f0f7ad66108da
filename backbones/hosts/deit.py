"""DeiT T/S/B on timm's network, at any image size, with a feature pyramid for dense prediction.

Source: Touvron et al., "Training data-efficient image transformers", ICML 2021,
https://arxiv.org/abs/2012.12877, Table 1.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any, cast

import torch
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from backbones.base import HostConfig, Slot, fill
from backbones.checkpoints.keys import rename
from backbones.hosts.scaffolds.isotropic import PATCH_SIZE, IsotropicBackbone
from backbones.hosts.scaffolds.timm_source import create_timm_model
from backbones.layers.axes import mix_tokens, to_nchw
from backbones.layers.classifier import Classifier
from backbones.layers.two_tokens import TwoTokenClassifier
from backbones.options import variant_of
from backbones.registry import register_host

GRID = "pos_grid"  # rows and columns of an oblong position table
POOLING = (
    "mean of the map",
    "class token",
    "class and distillation token",
)  # by the number of tokens
NO_TOKENS = {"class_token": False, "distilled": False}


class DeiT(IsotropicBackbone):
    """A plain ViT; its last map, of stride 16, or a pyramid made from it.

    The position table belongs to the build resolution; at others it is resampled (bicubic,
    antialiased). A table of n * n positions is one of n x n unless its file says otherwise, so
    files of oblong grids have the grid under ``pos_grid`` beside it. Without class token the table
    has no entry for one, and the embedding is the mean over the normed map, or with ``fc_norm``
    (timm's name for it) the norm of the map's mean. Weights with a class token load into such a
    network without it and its position, with a warning, since another embedding takes its place.
    A distilled network has a second token behind the class token, with a classifier of its own.
    """

    fc_norm: nn.Module  # where the final norm comes after the mean
    block_layout = "tokens"

    def __init__(
        self,
        model: VisionTransformer,
        config: HostConfig,
        class_token: bool = True,
        fc_norm: bool | None = None,
        distilled: bool = False,
    ) -> None:
        super().__init__()
        self.patch_embed = model.patch_embed
        self.cls_token: nn.Parameter | None
        self.pos_embed: nn.Parameter
        table = cast("nn.Parameter", model.pos_embed)
        if class_token:
            self.cls_token, self.pos_embed = cast("nn.Parameter", model.cls_token), table
            self.no_weight_decay = frozenset({"pos_embed", "cls_token"})
        else:
            self.cls_token, self.pos_embed = None, nn.Parameter(table.detach()[:, 1:].clone())
            self.no_weight_decay = frozenset({"pos_embed"})
            self.classification_keys = ("norm.", "fc_norm.", "cls_token")
        self.dist_token: nn.Parameter | None = None
        if distilled:
            if not class_token:
                raise ValueError("distilled=True needs the class token; pass class_token=True")
            self.dist_token = cast("nn.Parameter", model.dist_token)
            self.no_weight_decay |= {"dist_token"}
        if fc_norm and class_token:
            raise ValueError(
                "fc_norm=True norms the mean of the map, which a DeiT with class token does not "
                "read; add class_token=False"
            )
        self.norm_order_is_set = fc_norm is not None
        self.num_prefix_tokens = int(class_token) + int(distilled)
        self.pooling = POOLING[self.num_prefix_tokens]
        self.blocks = model.blocks
        self.grid: tuple[int, int] = self.patch_embed.grid_size
        self.set_map(config, model.num_features, model.norm)
        if fc_norm:
            self._norm_after_mean(True)
        for index, block in enumerate(cast("Iterable[DeiTBlock]", self.blocks)):
            block.num_prefix_tokens = self.num_prefix_tokens
            slot = Slot(
                self.num_features,
                4.0,
                self.grid,
                stage=0,
                block=index,
                dense=config.dense,
                num_prefix_tokens=self.num_prefix_tokens,
            )
            fill(block, "mlp", config.channel_mixer, slot)
            fill(block, "attn", config.token_mixer, slot)

    def _tokens(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """(B, 3, H, W) -> tokens (B, P + h * w, C) after the last block, and (h, w)."""
        x = self.patch_embed(images)  # (B, h, w, C)
        grid = (x.shape[1], x.shape[2])
        x = x.flatten(1, 2)
        tokens = [token for token in (self.cls_token, self.dist_token) if token is not None]
        if tokens:
            x = torch.cat([*(token.expand(x.shape[0], -1, -1) for token in tokens), x], dim=1)
        x = x.contiguous()  # without a token to join, it lies as the convolution left it
        x = x + resample_abs_pos_embed(self.pos_embed, grid, self.grid, self.num_prefix_tokens)
        for block in self.blocks:
            x = block(x, grid)
        return x, grid

    def last_map(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, h, w, C), prefix tokens left out."""
        tokens, grid = self._tokens(images)
        return tokens[:, self.num_prefix_tokens :].unflatten(1, grid)

    def cam_layer(self, block: str) -> str:
        """The block, or with a class token its first norm.

        Behind the last attention only the class token is read, so that the map has no gradient.
        """
        return block if self.cls_token is None else f"{block}.norm1"

    def embed(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, num_features): the class token, or the mean, with the final norm.

        Of a distilled network it is the mean of its two tokens.
        """
        if self.cls_token is None and not hasattr(self, "fc_norm"):
            return super().embed(images)
        self.check_embeds()
        if self.cls_token is None:
            return self.fc_norm(self.last_map(images).mean(dim=(1, 2)))
        if self.dist_token is not None:
            return self.features(images).mean(dim=1)
        tokens, _ = self._tokens(images)
        return self.norm(tokens[:, 0])

    def features(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> the embedding, or of a distilled network its two tokens (B, 2, C)."""
        if self.dist_token is None:
            return self.embed(images)
        self.check_embeds()
        tokens, _ = self._tokens(images)
        return self.norm(tokens[:, :2])

    def classifier(self, num_classes: int, drop: float = 0.0) -> Classifier:
        """One linear layer, or of a distilled network one for each of its two tokens."""
        if self.dist_token is None:
            return super().classifier(num_classes, drop)
        return TwoTokenClassifier(self.num_features, num_classes, drop)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """(B, 3, H, W) -> the map, normed token by token, or the pyramid's if dense."""
        if self.dense or not hasattr(self, "fc_norm"):
            return super().forward(images)
        return (to_nchw(self.fc_norm(self.last_map(images))).contiguous(),)

    def _norm_after_mean(self, after: bool) -> None:
        """Give the final norm the name that says whether it comes after the mean."""
        old, new = ("norm", "fc_norm") if after else ("fc_norm", "norm")
        if not self.dense and hasattr(self, old):
            norm = self.get_submodule(old)
            delattr(self, old)
            self.add_module(new, norm)

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Accept the authors' and timm's names (they agree) and tables of other grids.

        A network without class token takes over whether the norm comes after the mean
        (``fc_norm.*``), unless it was built with either.

        Raises:
            ValueError: A table of an oblong grid that its file does not state, or of a network
                without class token, or with a distillation token, for one with, or without.
        """
        has_dist_token = "dist_token" in state_dict
        if "pos_embed" in state_dict and has_dist_token != (self.dist_token is not None):
            have, lack = ("have a", "has none") if has_dist_token else ("have no", "has one")
            raise ValueError(
                f"these weights {have} distillation token and this DeiT {lack}; build it with "
                f"distilled={str(has_dist_token).lower()}"
            )
        after = "fc_norm.weight" in state_dict
        if self.cls_token is None and not self.norm_order_is_set:
            if after or "norm.weight" in state_dict:
                self._norm_after_mean(after)
        table, grid = state_dict.get("pos_embed"), state_dict.pop(GRID, None)
        if table is not None:
            state_dict["pos_embed"] = self._convert_table(table, grid, "cls_token" in state_dict)
        heads = [(r"^head\.", "classifier."), (r"^head_dist\.", "classifier.dist.")]
        return rename(state_dict, heads) | self._stated_grid()

    def _stated_grid(self) -> dict[str, Tensor]:
        height, width = self.grid
        return {} if height == width else {GRID: torch.tensor([height, width], device="cpu")}

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + key: grid for key, grid in self._stated_grid().items()})

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        state_dict.pop(prefix + GRID, None)  # it belongs to the file, the network has its own
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _convert_table(self, table: Tensor, grid: Tensor | None, has_class_token: bool) -> Tensor:
        """The positions of a file, on ``grid`` if it says so, for this network's tokens."""
        num_prefix_tokens = int(has_class_token) + (self.dist_token is not None)
        if has_class_token and self.cls_token is None:
            warnings.warn(
                "these weights have a class token and this DeiT has none: the token and its "
                "position are left out, and a classifier on them now reads the mean of all tokens; "
                "train it further, or build with class_token=True",
                stacklevel=2,
            )
            table, num_prefix_tokens = table[:, 1:], 0
        elif self.cls_token is not None and not has_class_token:
            raise ValueError(
                "these weights have no class token and this DeiT has one; build it with "
                "class_token=False"
            )
        positions = table.shape[1] - num_prefix_tokens
        side = math.isqrt(positions)
        if grid is not None:
            old = tuple(grid.tolist())
        else:
            old = (side, side) if side**2 == positions else self.grid
        if math.prod(old) != positions:
            token = "class token and " if has_class_token else ""
            count = positions + num_prefix_tokens
            raise ValueError(
                f"a pos_embed of {count} positions is no {token}square grid; "
                "build with the img_size (H, W) that the checkpoint was trained at"
            )
        if old == self.grid:
            return table
        return resample_abs_pos_embed(table, self.grid, old, num_prefix_tokens)


class DeiTBlock(Block):
    """timm's block, told the map size so that its mixers can see the map."""

    num_prefix_tokens: int

    # timm's takes masks, which nobody here has, and no map size.
    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:  # type: ignore[override]
        """Attention and MLP, with shortcuts: (B, P + h * w, C) and (h, w) -> (B, P + h * w, C)."""
        y = mix_tokens(self.attn, self.norm1(x), grid, self.num_prefix_tokens)
        x = x + self.drop_path1(self.ls1(y))
        y = mix_tokens(self.mlp, self.norm2(x), grid, self.num_prefix_tokens)
        return x + self.drop_path2(self.ls2(y))


def build(
    config: HostConfig,
    *,
    variant: str,
    class_token: bool = True,
    fc_norm: bool | None = None,
    distilled: bool = False,
) -> DeiT:
    """A DeiT around timm's network of the name ``variant``.

    Args:
        config: Of the host.
        variant: timm's name.
        class_token: Whether there is one.
        fc_norm: Without it, whether the final norm comes after the mean over the map, as in timm's
            networks with ``global_pool="avg"``; None: before it, or as in the weights loaded.
        distilled: Whether a second token and its classifier learn from a teacher (Sec. 4); tests
            read the mean of both.
    """
    patch = config.patch_size
    if distilled:
        variant = variant.replace("_patch16", "_distilled_patch16")
    model = create_timm_model(
        variant,
        config,
        img_size=tuple(patch * tokens for tokens in config.grid(patch)),
        patch_size=patch,
        dynamic_img_size=True,
        dynamic_img_pad=True,
        block_fn=DeiTBlock,
    )
    return DeiT(cast("VisionTransformer", model), config, class_token, fc_norm, distilled)


@register_host("deit_t", source="DeiT, Table 1", patch_size=PATCH_SIZE, without_prefix=NO_TOKENS)
@variant_of(build, fixed={"variant": "deit_tiny_patch16_224"})
def deit_t() -> None:
    """Width 192, 12 blocks, 3 heads."""


@register_host("deit_s", source="DeiT, Table 1", patch_size=PATCH_SIZE, without_prefix=NO_TOKENS)
@variant_of(build, fixed={"variant": "deit_small_patch16_224"})
def deit_s() -> None:
    """Width 384, 12 blocks, 6 heads."""


@register_host("deit_b", source="DeiT, Table 1", patch_size=PATCH_SIZE, without_prefix=NO_TOKENS)
@variant_of(build, fixed={"variant": "deit_base_patch16_224"})
def deit_b() -> None:
    """Width 768, 12 blocks, 12 heads."""
