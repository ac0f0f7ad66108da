"""Enlarging head: the host's layers behind its map, losses, and tiles for large images.

Images are RGB from 0 to 1, low resolution (B, 3, H, W) and high resolution (B, 3, r H, r W).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones import Backbone
from backbones.hosts.scaffolds.super_resolution import UPSAMPLER, SuperResolutionBackbone
from backbones.layers.bicubic import reflect
from backbones.layers.bounds import check_range
from backbones.layers.graph_sizes import crop, missing
from backbones.options import Remembering, check_value
from heads.host_check import check_host

TARGETS = ("SuperResolver",)
Loss = Literal["l1", "charbonnier"]
SEAM = 8  # most overlap of parts in a network that cannot be cut exactly


class SuperResolver(Remembering, nn.Module):
    """Backbone with the layers that enlarge its map by a whole factor.

    Args:
        backbone: A host for low-resolution images.
        scale: Factor r.
        loss: "l1", or "charbonnier": the mean of sqrt(difference^2 + eps^2).
        charbonnier_eps: eps.
        fft_weight: Weight w of the L1 distance of the Fourier transforms; 0 omits it.
        tile: Side of the parts of large images in low-resolution pixels, overlap included. A
            network that cannot be cut exactly takes parts of its build resolution instead.

    Attributes:
        outputs: Names of what an exported model returns.

    Shape: (B, 3, H, W) -> (B, 3, r H, r W).

    Source: FFNet, App. F.2: L1 and w times the L1 of the Fourier transforms, without normalisation.
    """

    outputs = ("enlarged",)

    def __init__(
        self,
        backbone: Backbone,
        scale: int,
        *,
        loss: Loss = "l1",
        charbonnier_eps: float = 1e-3,
        fft_weight: float = 0.0,
        tile: int = 640,
    ) -> None:
        super().__init__()
        check_value("head.loss", loss, Loss)
        for name, value in (("charbonnier_eps", charbonnier_eps), ("fft_weight", fft_weight)):
            check_range(f"head.{name}", value, 0)
        self.scale, self.loss_name, self.fft_weight = scale, loss, fft_weight
        self.charbonnier_eps, self.tile = charbonnier_eps, tile
        check_host(backbone, SuperResolutionBackbone, "enlarge images", "ffnet_sr_light")
        self.backbone = backbone
        self.upsampler = self.host.upsampler(scale)
        least = 2 * self.margin + self.host.size_divisor
        if self.host.radius is not None:  # else the network sees all at once
            check_range(f"head.tile (parts overlap by {self.margin} pixels)", tile, least)

    @property
    def host(self) -> SuperResolutionBackbone:
        """The backbone, by its class."""
        return cast("SuperResolutionBackbone", self.backbone)

    @property
    def margin(self) -> int:
        """Overlap of parts at each side: the radius in whole windows, or a share of the part."""
        radius, divisor = self.host.radius, self.host.size_divisor
        if radius is None:
            side = min(self._part())
            return min(SEAM, side // 4, (side - divisor) // 2)
        return radius + missing(radius, divisor)

    def _part(self) -> tuple[int, ...]:
        """Return rows and columns of the parts of large images."""
        if self.host.radius is not None:
            return self.tile, self.tile
        return tuple(side + missing(side, self.host.size_divisor) for side in self.host.img_size)

    def forward(self, images: Tensor) -> Tensor:
        """Enlarge whole images: (B, 3, H, W) -> (B, 3, r H, r W)."""
        padded = self._padded(images)
        enlarged = self.upsampler(self.backbone(padded)[0], padded)
        if self.host.size_divisor == 1:
            return enlarged
        height, width = images.shape[2:]
        return crop(enlarged, self.scale * height, self.scale * width)

    def _padded(self, images: Tensor) -> Tensor:
        """Mirror images at right and bottom to a multiple of the host's windows."""
        divisor = self.host.size_divisor
        if divisor > 1:
            for axis in (2, 3):
                images = reflect(images, axis, missing(images.shape[axis], divisor))
        return images

    def loss(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the losses of ``low`` with ``high``."""
        enlarged, truth = self(batch["low"]), batch["high"]
        if self.loss_name == "l1":
            losses = {"loss_l1": F.l1_loss(enlarged, truth)}
        else:
            losses = {"loss_charbonnier": charbonnier(enlarged, truth, self.charbonnier_eps)}
        if self.fft_weight:
            losses["loss_fft"] = self.fft_weight * fourier_distance(enlarged, truth)
        return losses

    def predict(self, batch: Mapping[str, Any]) -> list[Tensor]:
        """Return each image of ``low``, a tensor or a list, enlarged: (3, r H, r W)."""
        low = batch["low"]
        if isinstance(low, Tensor) and self._runs_whole(low):
            return list(self(low))
        return [torch.cat(list(self.enlarge_rows(image)), dim=1) for image in low]

    def _runs_whole(self, images: Tensor) -> bool:
        sides = images.shape[-2:]
        if self.host.radius is None:
            return tuple(sides) == tuple(self.host.img_size)
        return max(sides) <= self.tile

    def enlarge_rows(self, image: Tensor) -> Iterator[Tensor]:
        """Enlarge an image (3, H, W) part by part; yield stripes (3, h, r W) from top to bottom.

        Parts overlap by the receptive radius, so that they equal the whole image. A network whose
        outputs depend on all positions takes parts of its build resolution.
        """
        images = image[None]
        if self._runs_whole(images):
            yield self(images)[0]
            return
        height, width = image.shape[1:]
        size, padded = self._part(), self._padded(images)
        if self.host.radius is None:  # an image below the build resolution is mirrored up to it
            for axis in (2, 3):
                lack = max(size[axis - 2] - padded.shape[axis], 0)
                padded = reflect(padded, axis, lack)
        rows = spans(padded.shape[2], size[0], self.margin, self.host.size_divisor)
        columns = spans(padded.shape[3], size[1], self.margin, self.host.size_divisor)
        for row in rows:
            count = min(row.last, height) - row.first
            if count <= 0:  # mirrored rows alone
                break
            stripe = padded.new_empty(3, self.scale * count, self.scale * padded.shape[3])
            for column in columns:
                part = padded[:, :, row.start : row.stop, column.start : column.stop]
                enlarged = self.upsampler(self.backbone(part)[0], part)
                inner = enlarged[0, :, row.inner(self.scale), column.inner(self.scale)]
                at = slice(self.scale * column.first, self.scale * column.last)
                stripe[:, :, at] = inner[:, : stripe.shape[1]]
            yield stripe[:, :, : self.scale * width]

    def convert_state_dict(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Map the authors' names to those of this model; its own pass unchanged."""
        if any(key.startswith("backbone.") for key in tensors):
            return dict(tensors)
        converted = self.backbone.convert_state_dict(dict(tensors))
        return {
            key if key.startswith(UPSAMPLER) else f"backbone.{key}": value
            for key, value in converted.items()
        }

    def scale_of(self, tensors: Mapping[str, Tensor]) -> int | None:
        """Return the scale of converted tensors by the shapes of their last layers, if known."""
        file_shapes = {
            key: value.shape for key, value in tensors.items() if key.startswith(UPSAMPLER)
        }
        for scale in self.host.scales if file_shapes else ():
            with torch.device("meta"):
                state = self.host.upsampler(scale).state_dict()
            if file_shapes == {f"{UPSAMPLER}{key}": value.shape for key, value in state.items()}:
                return scale
        return None


class Span:
    """Part of an axis: what goes into the network, and what is kept of its output.

    Args:
        start: First position of the input.
        stop: End of the input.
        first: First kept position.
        last: End of the kept positions.
    """

    def __init__(self, start: int, stop: int, first: int, last: int) -> None:
        self.start, self.stop, self.first, self.last = start, stop, first, last

    def inner(self, scale: int) -> slice:
        """Return the kept positions within the enlarged output."""
        return slice(scale * (self.first - self.start), scale * (self.last - self.start))


def spans(length: int, size: int, margin: int, divisor: int = 1) -> list[Span]:
    """Cut an axis into parts of ``size`` that overlap by ``margin`` at both sides.

    Args:
        length: Of the axis, a multiple of ``divisor``.
        size: Of a part; the last one may be shifted, so that all have this size.
        margin: Positions at a cut that are dropped.
        divisor: Starts of parts are multiples of it.
    """
    if length <= size:
        return [Span(0, length, 0, length)]
    assert size >= 2 * margin + divisor, "parts would not move on"
    ranges, first = [], 0
    while first < length:
        start = max(0, first - margin)
        start = min(start, length - size) // divisor * divisor
        stop = min(start + size, length)
        last = length if stop == length else stop - margin
        ranges.append(Span(start, stop, first, last))
        first = last
    return ranges


def charbonnier(enlarged: Tensor, truth: Tensor, eps: float) -> Tensor:
    """Return the mean of sqrt((x - y)^2 + eps^2).

    Source: Lai et al., "Deep Laplacian Pyramid Networks", CVPR 2017.
    """
    return ((enlarged - truth).square() + eps**2).sqrt().mean()


def fourier_distance(enlarged: Tensor, truth: Tensor) -> Tensor:
    """Return the mean absolute difference of real and imaginary parts of the 2-D transforms."""
    enlarged_spectrum, true_spectrum = (
        torch.fft.rfft2(x.to(torch.promote_types(x.dtype, torch.float32)))
        for x in (enlarged, truth)
    )
    return F.l1_loss(torch.view_as_real(enlarged_spectrum), torch.view_as_real(true_spectrum))
