"""Learnt relations of token mixers: matrices over tokens that are equal for all images.

A part of a mixer with such a matrix has a method ``token_matrix() -> ((s, N, N), (h, w))``: for s
groups of channels or heads, the weights of each of the N = h w tokens (rows) for each other one.
Position terms of window attention are logits that are added before the softmax. An MLP over tokens
(MLP-Mixer, ``spatial_mlp``) lacks one: its activation lies between two matrices.

Source: PosMLP (Wang et al., MM 2022, https://doi.org/10.1145/3503161.3547953), Fig. 1 (weights of
a token), Fig. 5 (the bias as a map), Fig. 7 (parts of the matrix), Fig. 8 and Eq. 16 (g).

Axes: s groups or heads, N = h w tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import Tensor, nn

from backbones.analysis.capturing import Size, evaluating, watch
from backbones.layers.windows import Pattern, corner_of_matrix
from backbones.mixer import class_name
from backbones.mixers.posmlp.relations import (
    SINGULAR,
    LookupRelation,
    QuadraticRelation,
    TokenRelation,
)

Kind = Literal["weights", "position logits"]


@dataclass(frozen=True)
class Relation:
    """Matrix over the tokens of a map or window.

    Attributes:
        kind: "weights", or "position logits" that are added to those of attention.
        matrix: (s, N, N), rows the tokens written.
        size: (h, w).
        parts: Terms by name if the matrix is a sum, (s, N, N) or (1, N, N) each.
        bias: Bias added per token, (h, w), or None.
        non_locality: g of Eq. 16 for a Gaussian of the offset, else None; smaller reaches further.
            NaN if all groups are left out.
        left_out: Number of groups with nearly singular matrices, which g leaves out.
    """

    kind: Kind
    matrix: Tensor
    size: Size
    parts: dict[str, Tensor] = field(default_factory=dict)
    bias: Tensor | None = None
    non_locality: float | None = None
    left_out: int = 0

    def centre_maps(self) -> Tensor:
        """Return the weights of the middle token (h // 2, w // 2): (s, h, w)."""
        return token_row(self.matrix, self.size)

    def mean_distance(self) -> Tensor:
        """Return the mean distance in tokens, (s,), for logits after the softmax."""
        weights = self.matrix.softmax(-1) if self.kind == "position logits" else self.matrix
        return mean_distance(weights, places(self.size), places(self.size))


def middle(size: Size) -> int:
    """Return the row-major index of the middle token (h // 2, w // 2)."""
    return size[0] // 2 * size[1] + size[1] // 2


def token_row(matrix: Tensor, size: Size, token: int | None = None) -> Tensor:
    """Return the weights of a token as a map: (s, N, N) -> (s, h, w).

    Args:
        matrix: Matrix over the tokens.
        size: (h, w).
        token: Row-major index from 0; the middle token by default.
    """
    return matrix[:, middle(size) if token is None else token].unflatten(1, size)


def places(size: Size, step: float = 1.0) -> Tensor:
    """Return row and column of every token of a map times ``step``, (N, 2), in row-major order."""
    rows, columns = (torch.arange(side, dtype=torch.float64) * step for side in size)
    return torch.cartesian_prod(rows, columns).view(-1, 2)


def mean_distance(weights: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return the mean over queries of sum_n |w_mn| |p_m - p_n| / sum_n |w_mn|.

    Queries with weights of zero only are left out. The result is NaN if all are.

    Args:
        weights: Weights (..., N, K) of queries for keys.
        queries: Places (N, 2).
        keys: Places (K, 2).

    Source: Dosovitskiy et al., ViT, ICLR 2021, Fig. 7 (mean attention distance); |w| extends it to
        negative weights.
    """
    distances = torch.cdist(queries, keys).to(weights.device)
    sizes = weights.detach().double().abs()
    total = sizes.sum(-1)
    means = (sizes * distances).sum(-1) / total
    return torch.where(total > 0, means, torch.nan).nanmean(-1)


@torch.no_grad()
def token_relations(
    network: nn.Module, image_size: Size | None = None, *, singular: float = SINGULAR
) -> dict[str, Relation]:
    """Return the matrices over tokens of a network, by the name of their part.

    Args:
        network: A backbone, or a mixer.
        image_size: (H, W) of the images of a backbone. If their map is smaller than PosMLP's
            window, the matrix is reduced to the map.
        singular: The non-locality leaves out groups with an eigenvalue below this share of the
            layer's largest.

    Raises:
        ValueError: The network lacks them.
    """
    windows = {} if image_size is None else _windows(network, image_size)
    matrices: dict[str, Relation] = {}
    for name, module in network.named_modules():
        relation = _relation(module, windows.get(name), singular)
        if relation is not None:
            matrices[name] = relation
    if not matrices:
        network_name = getattr(network, "name", "") or type(network).__name__
        raise ValueError(
            f"{network_name} lacks a matrix over tokens that is equal for all images; use PosMLP, "
            "gMLP, SBM, random, global_filter, s_mlp or attention with position terms, and the "
            "analysis attention for attention of images"
        )
    return matrices


def _windows(network: nn.Module, image_size: Size) -> dict[str, Size]:
    """Return the size (h, w) of the windows of PosMLP's relations in images, by their names."""
    relations = {n: m for n, m in network.named_modules() if isinstance(m, TokenRelation)}
    units = {name: name.rpartition(".")[0] for name in relations}
    if not relations:
        return {}
    like = next(network.parameters())
    with evaluating(network), watch(network, list(units.values())) as calls:
        network(like.new_zeros(1, getattr(network, "in_chans", 3), *image_size))
    sizes = {}
    for name, relation in relations.items():
        height, width = calls[units[name]][0].inputs[0].shape[1:3]
        sizes[name] = min(relation.window, height), min(relation.window, width)
    return sizes


def _relation(module: nn.Module, size: Size | None, singular: float) -> Relation | None:
    if isinstance(module, TokenRelation):
        return _posmlp_relation(module, size or (module.window, module.window), singular)
    if callable(getattr(module, "token_matrix", None)):
        matrix, size = cast("TokenRelation", module).token_matrix()
        projection = getattr(module, "proj", None)
        bias = getattr(projection, "bias", None)
        square = isinstance(bias, Tensor) and bias.numel() == size[0] * size[1]
        bias_map = bias.detach().reshape(size) if square and isinstance(bias, Tensor) else None
        return Relation("weights", matrix.detach(), size, bias=bias_map)
    if isinstance(getattr(module, "relative_position_bias_table", None), Tensor):
        read = getattr(module, "_get_rel_pos_bias", None) or getattr(module, "get_bias", None)
        if read is not None:
            logits = read().detach()[0]
            window = _window(module, logits.shape[-1])
            return Relation("position logits", logits, window)
    return None


def _posmlp_relation(module: TokenRelation, size: Size, singular: float) -> Relation:
    height, width = size
    rows, columns = Pattern(height, height), Pattern(width, width)
    matrix = module.matrix(rows, columns).detach()
    parts, non_locality, left_out = {}, None, 0
    if isinstance(module, LookupRelation) and module.weight is not None:
        free_matrix = corner_of_matrix(module.weight.detach(), module.window, rows, columns)[None]
        parts = {"free": free_matrix, "offsets": matrix - free_matrix}
    if isinstance(module, QuadraticRelation):
        non_locality = float(module.non_locality(singular))
        left_out = int(module.singular(singular).sum())
    bias = None
    if module.bias is not None:
        bias = module.bias.detach().reshape(module.window, module.window)[:height, :width]
    return Relation("weights", matrix, size, parts, bias, non_locality, left_out)


def _window(module: nn.Module, tokens: int) -> Size:
    """Return the size (h, w) of a window of attention."""
    window = getattr(module, "window_size", None)
    if isinstance(window, tuple) and len(window) == 2 and window[0] * window[1] == tokens:
        return window
    side = round(tokens**0.5)
    if side * side != tokens:
        raise ValueError(f"{class_name(module)} has windows of {tokens} tokens, not a square")
    return side, side
