"""Attention weights as computed, their mean distance, and their rollout over layers.

The weights are recorded when the attention function runs (``F.scaled_dot_product_attention``, or
a softmax of square matrices), so this works for all hosts. Mixers with ``shows_attention=False``
are left out. LVT's convolutional attention works in
overlapping windows of 3x3 tokens.

Source: Abnar and Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020,
https://arxiv.org/abs/2005.00928, Sec. 3.1 (rollout); Dosovitskiy et al., ViT, ICLR 2021, Fig. 7 and
App. D.7 (mean attention distance).

Axes: B images, V windows of an image, h heads, N queries, K keys, P prefix tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from backbones.analysis.capturing import evaluating, watch
from backbones.analysis.relations import mean_distance, places
from backbones.base import Backbone

Size = tuple[int, int]
SOFTMAX = {torch.softmax, F.softmax, Tensor.softmax}


@dataclass(frozen=True)
class Attention:
    """Attention of one block.

    Attributes:
        weights: (B, V, h, N, K), rows summing to 1; with one window V is 1.
        num_prefix_tokens: P; prefix tokens precede the other queries and keys.
        query_size: Map or window of the queries after the prefix.
        key_size: Map or window of the keys after the prefix.
        step: Distance of neighbouring queries in tokens of the block's map.
        key_step: Distance of neighbouring keys in tokens of the block's map.
        stride: Pixels between neighbouring tokens of the block's map.

    Padding tokens are included where they attend, as in gcvit, lvt and visionllama.
    """

    weights: Tensor
    num_prefix_tokens: int
    query_size: Size
    key_size: Size
    step: float
    key_step: float
    stride: float

    def distances(self) -> Tensor:
        """Return the mean attention distance in pixels, (B, h), between map tokens."""
        prefix = self.num_prefix_tokens
        queries, keys = (
            # The centre of the tokens that a query or key represents.
            (places(size, step) + (step - 1) / 2) * self.stride
            for size, step in ((self.query_size, self.step), (self.key_size, self.key_step))
        )
        return mean_distance(self.weights[..., prefix:, prefix:], queries, keys).mean(1)

    def maps(self) -> Tensor:
        """Return the weights of one query: (B, h, *key_size).

        The query is the first prefix token, or else the middle token of the middle window.
        """
        prefix, (rows, columns) = self.num_prefix_tokens, self.query_size
        query = 0 if prefix else rows // 2 * columns + columns // 2
        window = self.weights.shape[1] // 2
        return self.weights[:, window, :, query, prefix:].unflatten(-1, self.key_size)


class _Recorder(TorchFunctionMode):
    """Recorder of the weights of every attention computed in a token mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.current = ""
        self.weights: dict[str, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # records the first call if attention is applied repeatedly
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.current or self.current in self.weights:
            return result
        if func is F.scaled_dot_product_attention:
            self.weights[self.current] = _compute_weights(*args, **kwargs).detach()
        elif func in SOFTMAX and result.ndim in (4, 6) and result.shape[-1] == result.shape[-2] > 1:
            # LVT's shape has the windows before the heads: (B, rows, columns, h, N, N).
            self.weights[self.current] = result.detach().flatten(0, result.ndim - 4)
        return result


def _compute_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute the weights (B', h, N, K) that the fused kernel applies."""
    assert not is_causal
    assert not enable_gqa
    logits = query @ key.mT * (scale or query.shape[-1] ** -0.5)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            logits = logits.masked_fill(~attn_mask, -math.inf)
        else:
            logits = logits + attn_mask
    return logits.softmax(-1)


@torch.no_grad()
def record_attention(backbone: Backbone, images: Tensor) -> dict[str, Attention]:
    """Return the attention of every block with attention, by the name of the token mixer.

    Args:
        backbone: Backbone of any host with any token mixer.
        images: (B, 3, H, W).

    Raises:
        ValueError: The network lacks attention.
    """
    mixers, blocks = backbone.token_mixers(), backbone.block_names()
    recorder = _Recorder()
    handles = []
    for name, mixer in mixers.items():
        if not all(getattr(part, "shows_attention", True) for part in mixer.modules()):
            continue

        def begin(module: nn.Module, inputs: Any, name: str = name) -> None:
            recorder.current = name

        def end(module: nn.Module, inputs: Any, output: Any) -> None:
            recorder.current = ""

        handles += [mixer.register_forward_pre_hook(begin), mixer.register_forward_hook(end)]
    try:
        with evaluating(backbone), watch(backbone, blocks) as calls, recorder:
            backbone(images)
    finally:
        for handle in handles:
            handle.remove()
    maps = {}
    for name, weights in recorder.weights.items():
        block = next(block for block in blocks if name.startswith(f"{block}."))
        call = calls[block][0]
        height, width = backbone.block_map(call.output, *call.inputs).shape[2:]
        stride = 2 ** round(math.log2(images.shape[2] / height))
        placed = backbone.place_attention(name, weights, len(images))
        if placed is not None:
            weights, step, prefix = placed
            size = (height, width)
            maps[name] = _locate(weights, len(images), size, prefix, float(stride), step)
    if not maps:
        raise ValueError(
            f"{backbone.name or type(backbone).__name__} lacks attention between tokens; use deit, "
            "swin, pvt_v2, gcvit, visionllama, edgevit, lvt, or any host with "
            "backbone.token_mixer=attention"
        )
    return maps


def _locate(
    weights: Tensor, batch: int, map_size: Size, prefix: int, stride: float, step: float
) -> Attention:
    """Locate queries and keys: on the whole map, on every s-th row and column, or in windows.

    Args:
        weights: (B * windows, heads, N, K).
        batch: B.
        map_size: (h, w) of the block's map.
        prefix: Number of prefix tokens.
        stride: Pixels between neighbouring places of the map.
        step: Places of the map between neighbouring tokens of a window.
    """
    windows = weights.shape[0] // batch
    if windows > 1 or _sampling(map_size, weights.shape[2] - prefix) is None:
        prefix = 0 if windows > 1 else prefix
        size = _window_size(map_size, weights.shape[2] - prefix)
        joined = weights.unflatten(0, (batch, windows))
        return Attention(joined, prefix, size, size, step, step, stride)
    grids = []
    for tokens in (weights.shape[2] - prefix, weights.shape[3] - prefix):
        sampled = _sampling(map_size, tokens)
        if sampled is None:
            raise ValueError(
                f"{tokens} tokens must form a regular grid of a map of {map_size[0]}x{map_size[1]}"
            )
        grids.append((sampled, _reduced(map_size, sampled, tokens)))
    (query_distance, size), (key_apart, key_size) = grids
    return Attention(
        weights[:, None], prefix, size, key_size, float(query_distance), float(key_apart), stride
    )


def _sampling(size: Size, tokens: int) -> int | None:
    """Return the step s that samples ``tokens`` tokens from a map, or None.

    The tokens are every s-th row and column, or s x s patches. If several steps fit, return the
    one nearest to the square root of the ratio of token counts.
    """
    steps = [
        step
        for step in range(1, max(size) + 1)
        if tokens in (_count(size, step, True), _count(size, step, False))
    ]
    ideal = math.sqrt(size[0] * size[1] / tokens) if tokens else 0.0
    return min(steps, key=lambda step: abs(step - ideal), default=None)


def _count(size: Size, step: int, up: bool) -> int:
    rows, columns = (-(-side // step) if up else side // step for side in size)
    return rows * columns


def _reduced(size: Size, step: int, tokens: int) -> Size:
    up = _count(size, step, True) == tokens
    rows, columns = (-(-side // step) if up else side // step for side in size)
    return rows, columns


def _window_size(map_size: Size, tokens: int) -> Size:
    """Return the size (h, w) of windows; each side is at most the map's."""
    side = math.isqrt(tokens)
    if side * side == tokens:
        return side, side
    for rows, columns in (
        (map_size[0], tokens // map_size[0]),
        (tokens // map_size[1], map_size[1]),
    ):
        if rows * columns == tokens:
            return rows, columns
    raise ValueError(f"windows of {tokens} tokens do not fit a map of {map_size}")


def rollout(attention: Mapping[str, Attention] | Sequence[Attention]) -> Tensor:
    """Return the product of (A + I) / 2 over blocks, where A is the mean over heads.

    The rows of each factor are divided by their sums.

    Args:
        attention: Attention of all blocks, first to last, each over the whole map.

    Returns:
        (B, N, N).

    Raises:
        ValueError: The network has windows, reduced keys or several map sizes.
    """
    layers = list(attention.values() if isinstance(attention, Mapping) else attention)
    shapes = {tuple(layer.weights.shape[-2:]) for layer in layers}
    (rows, columns), *more_shapes = shapes
    if more_shapes or rows != columns or any(layer.weights.shape[1] > 1 for layer in layers):
        raise ValueError(
            "rollout needs attention over one whole map, as in DeiT; this network has windows, "
            "reduced keys or maps of several sizes"
        )
    total: Tensor | None = None
    for layer in layers:
        mixed = layer.weights[:, 0].double().mean(1)
        mixed = (mixed + torch.eye(rows, dtype=mixed.dtype, device=mixed.device)) / 2
        mixed = mixed / mixed.sum(-1, keepdim=True)
        total = mixed if total is None else mixed @ total
    assert total is not None
    return total
