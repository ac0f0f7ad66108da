"""What token mixers have learnt to relate: matrices over tokens that no image changes.

A part of a mixer that has such a matrix says it by a method ``token_matrix() -> ((s, N, N),
(h, w))``: for s groups of channels or heads, what each of the N = h w tokens (rows) takes from each
other one. Position terms of window attention are logits that are added before the softmax.

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
from backbones.mixers.posmlp.relations import (
    SINGULAR,
    LookupRelation,
    QuadraticRelation,
    TokenRelation,
)

Kind = Literal["weights", "position logits"]


@dataclass(frozen=True)
class Relation:
    """A matrix over the tokens of a map or window.

    Attributes:
        kind: "weights", or "position logits" that are added to those of attention.
        matrix: (s, N, N), rows the tokens written.
        size: (h, w).
        parts: Where the matrix is a sum, its terms by name, (s, N, N) or (1, N, N) each.
        bias: What is added to every token, (h, w), or None.
        non_locality: g of Eq. 16 for a Gaussian of the offset, else None; smaller reaches further.
            NaN where all groups are left out.
        left_out: How many groups g leaves out, whose matrices are nearly singular.
    """

    kind: Kind
    matrix: Tensor
    size: Size
    parts: dict[str, Tensor] = field(default_factory=dict)
    bias: Tensor | None = None
    non_locality: float | None = None
    left_out: int = 0

    def centre_maps(self) -> Tensor:
        """What the token in the middle, (h // 2, w // 2), takes from each: (s, h, w)."""
        return token_row(self.matrix, self.size)

    def mean_distance(self) -> Tensor:
        """How far tokens look, (s,) in tokens; see ``mean_distance``. Of logits, after softmax."""
        weights = self.matrix.softmax(-1) if self.kind == "position logits" else self.matrix
        return mean_distance(weights, places(self.size), places(self.size))


def middle(size: Size) -> int:
    """The token in the middle, (h // 2, w // 2), by its row-major index."""
    return size[0] // 2 * size[1] + size[1] // 2


def token_row(matrix: Tensor, size: Size, token: int | None = None) -> Tensor:
    """Return what a token takes from each as a map: (s, N, N) -> (s, h, w).

    Args:
        matrix: Over the tokens.
        size: (h, w).
        token: Row-major index from 0; the one in the middle by default.
    """
    return matrix[:, middle(size) if token is None else token].unflatten(1, size)


def places(size: Size, step: float = 1.0) -> Tensor:
    """Row and column of every token of a map, (N, 2), in row-major order, times ``step``."""
    rows, columns = (torch.arange(side, dtype=torch.float64) * step for side in size)
    return torch.cartesian_prod(rows, columns).view(-1, 2)


def mean_distance(weights: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """The mean over queries of sum_n |w_mn| |p_m - p_n| / sum_n |w_mn|: (..., N, K) -> (...).

    Queries with weights of zero only are left out; NaN where all are.

    Args:
        weights: Of each query for each key.
        queries: Places (N, 2).
        keys: Places (K, 2).

    Source: Dosovitskiy et al., ViT, ICLR 2021, Fig. 7 (mean attention distance); with |w| it holds
        for matrices of either sign.
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
    """The matrices over tokens of a network, by the name of the part that has them.

    Args:
        network: A backbone, or a mixer.
        image_size: (H, W) of the images of a backbone. Where their map is smaller than PosMLP's
            window, the matrix is that of the map: the window's other tokens are never read.
        singular: The non-locality leaves out groups with an eigenvalue below this share of the
            layer's largest.

    Raises:
        ValueError: It has none.
    """
    windows = {} if image_size is None else _windows(network, image_size)
    found: dict[str, Relation] = {}
    for name, module in network.named_modules():
        relation = _relation(module, windows.get(name), singular)
        if relation is not None:
            found[name] = relation
    if not found:
        own = getattr(network, "name", "") or type(network).__name__
        raise ValueError(
            f"{own} has no matrix over tokens that is the same for all images; PosMLP, gMLP, "
            "SBM and attention with position terms have one "
            "(for attention of images see the analysis attention)"
        )
    return found


def _windows(network: nn.Module, image_size: Size) -> dict[str, Size]:
    """(h, w) of the windows that PosMLP's relations see in images of a size, by their names."""
    relations = {n: m for n, m in network.named_modules() if isinstance(m, TokenRelation)}
    units = {name: name.rpartition(".")[0] for name in relations}
    if not relations:
        return {}
    like = next(network.parameters())
    with evaluating(network), watch(network, list(units.values())) as calls:
        network(like.new_zeros(1, 3, *image_size))
    sizes = {}
    for name, relation in relations.items():
        height, width = calls[units[name]][0].inputs[0].shape[1:3]
        sizes[name] = min(relation.window, height), min(relation.window, width)
    return sizes


def _relation(module: nn.Module, size: Size | None, singular: float) -> Relation | None:
    if isinstance(module, TokenRelation):
        return _of_posmlp(module, size or (module.window, module.window), singular)
    if callable(getattr(module, "token_matrix", None)):
        matrix, size = cast("TokenRelation", module).token_matrix()
        projection = getattr(module, "proj", None)
        bias = getattr(projection, "bias", None)
        square = isinstance(bias, Tensor) and bias.numel() == size[0] * size[1]
        own = bias.detach().reshape(size) if square and isinstance(bias, Tensor) else None
        return Relation("weights", matrix.detach(), size, bias=own)
    if isinstance(getattr(module, "relative_position_bias_table", None), Tensor):
        read = getattr(module, "_get_rel_pos_bias", None) or getattr(module, "get_bias", None)
        if read is not None:
            logits = read().detach()[0]
            window = _window(module, logits.shape[-1])
            return Relation("position logits", logits, window)
    return None


def _of_posmlp(module: TokenRelation, size: Size, singular: float) -> Relation:
    height, width = size
    rows, columns = Pattern(height, height), Pattern(width, width)
    matrix = module.matrix(rows, columns).detach()
    parts, non_locality, left_out = {}, None, 0
    if isinstance(module, LookupRelation) and module.weight is not None:
        free = corner_of_matrix(module.weight.detach(), module.window, rows, columns)[None]
        parts = {"free": free, "offsets": matrix - free}
    if isinstance(module, QuadraticRelation):
        non_locality = float(module.non_locality(singular))
        left_out = int(module.singular(singular).sum())
    bias = None
    if module.bias is not None:
        bias = module.bias.detach().reshape(module.window, module.window)[:height, :width]
    return Relation("weights", matrix, size, parts, bias, non_locality, left_out)


def _window(module: nn.Module, tokens: int) -> Size:
    """The (h, w) of a window of attention."""
    window = getattr(module, "window_size", None)
    if isinstance(window, tuple) and len(window) == 2 and window[0] * window[1] == tokens:
        return window
    side = round(tokens**0.5)
    if side * side != tokens:
        raise ValueError(f"{type(module).__name__} has windows of {tokens} tokens, not a square")
    return side, side
