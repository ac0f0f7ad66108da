"""Base class and parts of hosts for diffusion: inputs are noisy images or latents.

Axes: B inputs, C channels of the input, H W its size, D width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, cast

import torch
from torch import Tensor, nn

from backbones.base import Backbone, FeatureInfo, Layout

MODALITY = "noisy_image"
CHANNELS, CLASSES, LATENT = 4, 1000, 32  # of the published latents of 256-pixel ImageNet
FREQUENCIES = 256
PERIOD = 10_000.0
# What every such host passes to register_host.
DENOISING_HOST: dict[str, Any] = {"modality": MODALITY, "img_size": (LATENT, LATENT)}


class DenoisingBackbone(Backbone, ABC):
    """Backbone from noisy inputs, times and labels to the prediction of a diffusion model.

    Label K, the number of classes, stands for an unknown class; it is the default, and time 0 is.

    Args:
        channels: C.
        num_classes: K.
        learn_sigma: Predict variances as well: 2 C channels instead of C.
    """

    modality = MODALITY
    block_layout: Layout = "nchw"
    pooling = "mean of the prediction"
    probed_side = 16

    def __init__(self, channels: int, num_classes: int, learn_sigma: bool) -> None:
        super().__init__()
        self.channels, self.num_classes = channels, num_classes
        self.out_channels = channels * (2 if learn_sigma else 1)
        self.feature_info = (FeatureInfo(self.out_channels, 1),)
        self.num_features = self.out_channels

    def example_inputs(self) -> tuple[Tensor, ...]:
        """Return noisy inputs, times and labels."""
        sides = (min(side, self.probed_side) for side in self.img_size)
        return torch.rand(2, self.channels, *sides), torch.tensor([40.0, 900.0]), torch.arange(2)

    @abstractmethod
    def denoise(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Return the prediction: (B, C, H, W), times (B,), labels (B,) -> (B, C or 2 C, H, W)."""

    def forward(
        self, images: Tensor, times: Tensor | None = None, labels: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return the prediction as the only map.

        Args:
            images: (B, C, H, W).
            times: From 0 to 1000 (B,).
            labels: Classes (B,); ``num_classes`` if unknown.
        """
        count = images.shape[0]  # len would fix the batch of a recorded graph
        if times is None:
            times = images.new_zeros(count)
        if labels is None:
            labels = torch.full((count,), self.num_classes, device=images.device)
        return (self.denoise(images, times, labels).contiguous(),)

    def embed(self, images: Tensor) -> Tensor:
        """Return the mean of the prediction: (B, C, H, W) -> (B, C or 2 C)."""
        return self(images)[0].mean(dim=(2, 3))


def sinusoids(times: Tensor, shift: int = 0, count: int = FREQUENCIES) -> Tensor:
    """Return cosines, then sines of times at ``count`` / 2 frequencies: (B,) -> (B, count).

    Frequency i is 10000^(-i / (count / 2 - shift)); the shift is 0, and 1 in diffusers' DiT.
    """
    half = count // 2
    steps = torch.arange(half, device=times.device, dtype=torch.float32)
    angles = times.float()[:, None] * torch.exp(-math.log(PERIOD) * steps / (half - shift))
    return torch.cat([angles.cos(), angles.sin()], dim=1)


class TimeEmbedder(nn.Module):
    """Two linear layers over the sinusoids of a time: (B,) -> (B, D)."""

    def __init__(self, dim: int, shift: int = 0) -> None:
        super().__init__()
        self.shift = shift
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, times: Tensor) -> Tensor:
        """Embed times: (B,) -> (B, D)."""
        first = cast("nn.Linear", self.mlp[0])
        return self.mlp(sinusoids(times, self.shift).to(first.weight.dtype))


class LabelEmbedder(nn.Module):
    """Table of classes, with a last row for an unknown one: (B,) -> (B, D)."""

    def __init__(self, num_classes: int, dim: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + 1, dim)

    def forward(self, labels: Tensor) -> Tensor:
        """Look labels up: (B,) -> (B, D)."""
        return self.embedding_table(labels)


def modulation(dim: int, parts: int) -> nn.Sequential:
    """Build the layers from a condition (B, D) to ``parts`` shifts, scales and gates."""
    return nn.Sequential(nn.SiLU(), nn.Linear(dim, parts * dim))


def init_denoiser(network: nn.Module) -> None:
    """Initialise as DiT's authors: Xavier, embeddings by 0.02, and zero modulations and output.

    Source: Peebles and Xie, "Scalable Diffusion Models with Transformers", ICCV 2023,
    https://arxiv.org/abs/2212.09748, Sec. 3 (adaLN-Zero), and the authors' code.
    """
    for part in network.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(part.weight.flatten(1) if part.weight.ndim > 2 else part.weight)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    for part in network.modules():
        if isinstance(part, LabelEmbedder):
            nn.init.normal_(part.embedding_table.weight, std=0.02)
        elif isinstance(part, TimeEmbedder):
            for layer in part.mlp:
                if isinstance(layer, nn.Linear):
                    nn.init.normal_(layer.weight, std=0.02)


def zero(*layers: Any) -> None:
    """Set weights and biases of layers to 0."""
    for layer in layers:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
