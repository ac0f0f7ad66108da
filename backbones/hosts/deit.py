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

from backbones.checkpoints.keys import rename
from backbones.hosts.scaffolds.isotropic import PATCH_SIZE, IsotropicBackbone
from backbones.hosts.scaffolds.timm_source import create_timm_model, read_source
from backbones.layers.axes import to_nchw
from backbones.layers.classifier import Classifier
from backbones.layers.two_tokens import TwoTokenClassifier
from backbones.mixer_calls import mix_tokens
from backbones.options import variant_of
from backbones.parameters.layer_ids import USUAL, LayerNames
from backbones.registry import register_host
from backbones.slots import HostConfig, Slot, fill

GRID = "pos_grid"  # key of the rows and columns of an oblong position table
POOLING = (
    "mean of the map",
    "class token",
    "class and distillation token",
)  # by the number of tokens
NO_TOKENS = {"class_token": False, "distilled": False}


class DeiT(IsotropicBackbone):
    """Plain ViT; returns its last map, of stride 16, or a pyramid made from it.

    The position table belongs to the build resolution; at others it is resampled (bicubic,
    antialiased). Files of oblong grids store the grid as ``pos_grid``; other tables of n * n
    positions are n x n. Without class token the table lacks its entry, and the embedding is the
    mean over the normed map, or with ``fc_norm`` (timm's name) the norm of the map's mean. Weights
    with a class token load into such a network without the token and its position, with a warning,
    since the embedding differs. A distilled network has a second token after the class token, with
    its own classifier.

    Source: DeiT, https://arxiv.org/abs/2012.12877.
    """

    fc_norm: nn.Module  # where the final norm comes after the mean
    block_layout = "tokens"
    layer_names = LayerNames(stem=(*USUAL.stem, "dist_token"), tail=("dist_token",))

    def __init__(
        self,
        model: VisionTransformer,
        config: HostConfig,
        class_token: bool = True,
        fc_norm: bool | None = None,
        distilled: bool = False,
    ) -> None:
        super().__init__()
        if (distilled and not class_token) or (fc_norm and class_token):
            raise ValueError(
                "distilled=True needs class_token=True; fc_norm=True norms the mean of the map "
                "instead of the class token, so it needs class_token=False"
            )
        self.pretrained_cfg = read_source(model)
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
            self.dist_token = cast("nn.Parameter", model.dist_token)
            self.no_weight_decay |= {"dist_token"}
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
        """Return tokens (B, P + h * w, C) after the last block, and the map size (h, w)."""
        x = self.patch_embed(images)  # (B, h, w, C)
        grid = (x.shape[1], x.shape[2])
        x = x.flatten(1, 2)
        tokens = [token for token in (self.cls_token, self.dist_token) if token is not None]
        if tokens:
            x = torch.cat([*(token.expand(x.shape[0], -1, -1) for token in tokens), x], dim=1)
        x = x.contiguous()  # without tokens it still has the convolution's memory layout
        x = x + resample_abs_pos_embed(self.pos_embed, grid, self.grid, self.num_prefix_tokens)
        for block in self.blocks:
            x = block(x, grid)
        return x, grid

    def last_map(self, images: Tensor) -> Tensor:
        """Return the map without prefix tokens: (B, 3, H, W) -> (B, h, w, C)."""
        tokens, grid = self._tokens(images)
        return tokens[:, self.num_prefix_tokens :].unflatten(1, grid)

    def cam_layer(self, block: str) -> str:
        """Return the block, or with a class token its first norm.

        After the last attention only the class token is read, and the map's gradient is zero.
        """
        return block if self.cls_token is None else f"{block}.norm1"

    def embed(self, images: Tensor) -> Tensor:
        """Return the normed class token or mean of the map: (B, 3, H, W) -> (B, num_features).

        A distilled network returns the mean of its two tokens.
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
        """Return the embedding, or the two tokens (B, 2, C) of a distilled network."""
        if self.dist_token is None:
            return self.embed(images)
        self.check_embeds()
        tokens, _ = self._tokens(images)
        return self.norm(tokens[:, :2])

    def classifier(self, num_classes: int, drop: float = 0.0) -> Classifier:
        """Build one linear layer, or one for each token of a distilled network."""
        if self.dist_token is None:
            return super().classifier(num_classes, drop)
        return TwoTokenClassifier(self.num_features, num_classes, drop)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the map of images (B, 3, H, W), normed per token, or the pyramid if dense."""
        if self.dense or not hasattr(self, "fc_norm"):
            return super().forward(images)
        return (to_nchw(self.fc_norm(self.last_map(images))).contiguous(),)

    def _norm_after_mean(self, after: bool) -> None:
        """Name the final norm ``fc_norm`` if it comes after the mean, otherwise ``norm``."""
        source, target = ("norm", "fc_norm") if after else ("fc_norm", "norm")
        if not self.dense and hasattr(self, source):
            norm = self.get_submodule(source)
            delattr(self, source)
            self.add_module(target, norm)

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename the classifier and resample tables of other grids; authors and timm agree.

        A network without class token adopts the file's order of norm and mean (``fc_norm.*``),
        unless it was built with a given order.

        Raises:
            ValueError: The file has a table of an oblong grid without its size, lacks a class token
                that the network has, or differs in its distillation token.
        """
        has_dist_token = "dist_token" in state_dict
        if "pos_embed" in state_dict and has_dist_token != (self.dist_token is not None):
            file, network = ("contain", "lacks") if has_dist_token else ("lack", "has")
            raise ValueError(
                f"these weights {file} a distillation token, which this DeiT {network}; build it "
                f"with distilled={str(has_dist_token).lower()}"
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
        state_dict.pop(prefix + GRID, None)  # the file's grid; the network keeps its own
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _convert_table(self, table: Tensor, grid: Tensor | None, has_class_token: bool) -> Tensor:
        """Return a file's positions, on ``grid`` if it is stated, for this network's tokens."""
        num_prefix_tokens = int(has_class_token) + (self.dist_token is not None)
        if has_class_token and self.cls_token is None:
            warnings.warn(
                "these weights contain a class token, which this DeiT lacks: the token and its "
                "position are left out, and a classifier on them now reads the mean of all tokens; "
                "train it further, or build with class_token=True",
                stacklevel=2,
            )
            table, num_prefix_tokens = table[:, 1:], 0
        elif self.cls_token is not None and not has_class_token:
            raise ValueError(
                "these weights lack the class token of this DeiT; build it with class_token=False"
            )
        positions = table.shape[1] - num_prefix_tokens
        side = math.isqrt(positions)
        if grid is not None:
            source_grid = tuple(grid.tolist())
        else:
            source_grid = (side, side) if side**2 == positions else self.grid
        if math.prod(source_grid) != positions:
            token = "class token and " if has_class_token else ""
            count = positions + num_prefix_tokens
            raise ValueError(
                f"a pos_embed of {count} positions is not a {token}square grid; "
                "build with the img_size (H, W) that the checkpoint was trained at"
            )
        if source_grid == self.grid:
            return table
        return resample_abs_pos_embed(table, self.grid, source_grid, num_prefix_tokens)


class DeiTBlock(Block):
    """timm's block with the map size as an input, for mixers that work on the map."""

    num_prefix_tokens: int

    # timm's second argument is a mask.
    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:  # type: ignore[override]
        """Apply attention and MLP with shortcuts to tokens (B, P + h * w, C) of a map (h, w)."""
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
    """Build a DeiT from timm's network ``variant``.

    Args:
        config: Options of every host.
        variant: timm's name.
        class_token: True for a class token, False to pool the map.
        fc_norm: Without class token, True puts the final norm after the mean over the map, as in
            timm's networks with ``global_pool="avg"``; None: before it, or as in loaded weights.
        distilled: True adds a second token and classifier that learn from a teacher (Sec. 4); the
            prediction is the mean of both.
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
