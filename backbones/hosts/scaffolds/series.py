"""Base class of hosts for multivariate time series.

A series (B, L, M) has L steps of M variables. A map (B, C, M, N) has a row per variable and a
column per token in time, as an image has rows and columns.

Axes: B series, L look-back steps, M variables, N tokens, C channels, T horizon.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from backbones.base import Backbone
from backbones.layers.axes import to_nchw, to_nhwc
from backbones.mixer import Mixer

Normalisation = Literal["revin", "last", "none"]
LOOKBACK = 96  # steps of all hosts unless img_size says otherwise
VARIABLES = 7  # of the ETT sets; data modules pass their own number


class SeriesBackbone(Backbone, ABC):
    """Backbone from series (B, L, M) to one map (B, C, M, N). A subclass defines ``maps``.

    Attributes:
        normalisation: What its authors do to each series before the network and undo after it:
            "revin" takes mean and deviation out, "last" the last value, "none" nothing.
        any_variables: True if one network takes any number of variables.
    """

    modality = "series"
    size_divisor = 1
    block_layout = "nchw"
    token_slots: tuple[str, ...] = ("token_mixer",)
    channel_slots: tuple[str, ...] = ("channel_mixer",)
    pooling = "mean over variables and time"
    normalisation: Normalisation = "revin"
    any_variables: bool = False

    def example_inputs(self) -> tuple[Tensor, ...]:
        """Return series of the look-back that the network was built for."""
        variables = self.record["options"].get("variables", VARIABLES)
        return (torch.rand(2, self.img_size[1], variables),)

    def num_tokens(self, length: int) -> int:
        """Return N for a series of L steps."""
        return -(-length // self.feature_info[0].stride)

    def is_official(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return True for the tensors of a whole network under its authors' names."""
        return False

    def map_shapes(self, images: Tensor) -> list[tuple[int, ...]]:
        """Return the shape (B, C, M, N) of the map for series (B, L, M)."""
        batch, length, variables = images.shape
        return [(batch, self.feature_info[0].channels, variables, self.num_tokens(length))]

    @abstractmethod
    def last_map(self, series: Tensor) -> Tensor:
        """Return the map of series: (B, L, M) -> (B, C, M, N)."""

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the map of series: (B, L, M) -> (B, C, M, N)."""
        return (self.last_map(images).contiguous(),)

    def embed(self, images: Tensor) -> Tensor:
        """Return the mean of the map over variables and time: (B, L, M) -> (B, C)."""
        return self.last_map(images).mean(dim=(2, 3))

    def forecaster(self, horizon: int, drop: float = 0.0) -> nn.Module:
        """Build the published layer from a map (B, C, M, N) to a forecast (B, M, T)."""
        info = self.feature_info[0]
        return FlatLinear(info.channels * self.num_tokens(self.img_size[1]), horizon, drop)


class FlatLinear(nn.Module):
    """One linear layer over channels and time, shared by the variables, then dropout.

    Shape: (B, C, M, N) -> (B, M, T).
    """

    def __init__(self, features: int, horizon: int, drop: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(features, horizon)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        """Return the forecast of each variable: (B, C, M, N) -> (B, M, T)."""
        return self.drop(self.linear(x.transpose(1, 2).flatten(2)))


def mix_variables(mixer: nn.Module, x: Tensor) -> Tensor:
    """Apply a mixer to each variable as a map of one row: (B, C, M, N) -> the same."""
    if not isinstance(mixer, Mixer):
        return mixer(x)
    batch, _, variables, _ = x.shape
    rows = to_nhwc(x).flatten(0, 1).unsqueeze(1)  # (B * M, 1, N, C)
    return to_nchw(mixer(rows).squeeze(1).unflatten(0, (batch, variables)))
