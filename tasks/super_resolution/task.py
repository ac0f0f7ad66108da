"""Super-resolution, measured by PSNR and SSIM of the Y channel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torchmetrics import MeanMetric, SumMetric

from backbones.checkpoints.adoption import adopt
from backbones.checkpoints.opening import Checkpoint, in_memory, open_checkpoint
from backbones.layers.bicubic import MARGIN, enlarge, mirror
from tasks.engine.base import BaseTask
from tasks.engine.batches import Batch, Row, Summed, input_names
from tasks.engine.run_folder.atomic_writes import whole_file
from tasks.engine.run_folder.predictions import OutputFiles
from tasks.super_resolution.family import FAMILY
from tasks.super_resolution.pictures import Panel, caption, centre, draw_panels, to_picture
from tasks.super_resolution.png import write_png
from tasks.super_resolution.quality import compared, psnr, ssim

ENLARGED = "enlarged"  # folder of the enlarged images
STRIPE = 32  # low-resolution rows that are rounded and written at once
DRAWN = 60  # low-resolution pixels of a picture's sides


class SuperResolutionTask(BaseTask):
    """Enlargement of images by a whole factor.

    PSNR and SSIM are the means of the images' figures, see ``quality``. An image without any
    error, such as a black one, is left out of the mean PSNR and counted. The validation loss is the
    mean absolute difference, see ``evaluation_loss``.
    """

    family = FAMILY
    headline = ("psnr", "ssim")
    metric_stores = ("psnr", "ssim", "exact")
    preview_images = 6

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Mapping[str, Any] | None = None,
        schedule: Mapping[str, Any] | None = None,
        ema: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(model, optimizer=optimizer, schedule=schedule, ema=ema)
        self.psnr, self.ssim = (MeanMetric().set_dtype(torch.float64) for _ in range(2))
        self.exact = SumMetric()

    @property
    def scale(self) -> int:
        """Factor of the enlargement."""
        return int(self.model.scale)

    def update_metrics(self, batch: Batch, predictions: list[Tensor]) -> None:
        """Add the figures of each image."""
        for enlarged, truth in zip(predictions, batch["high"], strict=True):
            figures = self._figures_of(enlarged, truth)
            self.ssim.update(figures["ssim"])
            exact = figures["psnr"] == math.inf
            self.exact.update(exact)
            if not exact:
                self.psnr.update(figures["psnr"])

    def _figures_of(self, enlarged: Tensor, truth: Tensor) -> dict[str, float]:
        image, target = compared(enlarged, truth, self.scale)
        return {"psnr": psnr(image, target).item(), "ssim": ssim(image, target).item()}

    def sample_values(self, batch: Batch, predictions: list[Tensor]) -> Tensor:
        """Return the PSNR of each image in dB (B,), infinite for one that equals its true one."""
        pairs = zip(predictions, batch["high"], strict=True)
        return torch.stack([psnr(*compared(*pair, self.scale)) for pair in pairs])

    def compute_metrics(self) -> dict[str, Tensor]:
        """Return the means over all images; PSNR over those with an error, if there are any."""
        exact = int(self.exact.compute())
        figures = {name: getattr(self, name).compute().float() for name in self.headline}
        if exact:
            rank_zero_warn(
                f"{exact} images equal their true ones, as black images do: their PSNR is infinite "
                "and left out of the mean"
            )
            figures["psnr"] = figures["psnr"].nan_to_num(math.inf)
        return figures

    def reset_metrics(self) -> None:
        """Reset the means."""
        for name in self.metric_stores:
            getattr(self, name).reset()

    def evaluation_loss(self, batch: Batch, predictions: list[Tensor]) -> Summed:
        """Return the sum of absolute differences and the number of values."""
        pairs = list(zip(predictions, batch["high"], strict=True))
        total = torch.stack([(image.double() - truth).abs().sum() for image, truth in pairs]).sum()
        return total, torch.tensor(sum(image.numel() for image, _ in pairs), device=total.device)

    def target_state(self) -> dict[str, Any]:
        """Return the scale."""
        return {"scale": self.scale}

    def target_arguments(self) -> dict[str, Any]:
        """Return the scale."""
        return {"scale": self.scale}

    @classmethod
    def targets_of(cls, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return the scale of a checkpoint; files of authors lack it."""
        return {"scale": checkpoint.values.get("scale")}

    def check_targets(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint of another scale."""
        scale = checkpoint.values.get("scale")
        if scale not in (None, self.scale):
            raise ValueError(self._other_scale(checkpoint.path, scale))

    def _other_scale(self, path: str, scale: int) -> str:
        return f"{path} enlarges {scale} times; pass data.scale={scale} instead of {self.scale}"

    def load_weights(self, checkpoint: Checkpoint | str | Path, *, converted: bool = False) -> None:
        """Load a checkpoint of this task, or a file of the network's authors.

        Raises:
            ValueError: The weights belong to another model or scale.
        """
        opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
        self.check_targets(opened)
        if not opened.is_of_task:
            tensors = self.model.convert_state_dict(opened.tensors)
            scale = self.model.scale_of(tensors)
            if scale not in (None, self.scale):
                raise ValueError(self._other_scale(opened.path, scale))
            opened = in_memory(tensors, opened.path)
        adopt(self.model, opened)

    def describe(self, batch: Batch, datamodule: Any) -> list[Row]:
        """Return per image ``input``, its name, ``enlarged`` (H, W, C), and figures if known."""
        rows = []
        for index, row in enumerate(self._rows(batch, datamodule)):
            stripes = list(self._stripes(batch, index))
            rows.append(row | {"enlarged": np.concatenate(stripes)})
        return rows

    def _rows(self, batch: Batch, datamodule: Any) -> list[Row]:
        names = input_names(batch, datamodule, "image")
        sizes = [[self.scale * side for side in image.shape[:0:-1]] for image in batch["low"]]
        return [
            {"input": name, "size": size} for name, size in zip(names, sizes, strict=True)
        ]  # fmt: skip

    @torch.no_grad()
    def _stripes(self, batch: Batch, index: int) -> Iterator[NDArray[Any]]:
        """Yield stripes (h, W, C) of an enlarged image, in the depth and channels of its file.

        Colours are enlarged times alpha where that varies, since transparent pixels have any.
        """
        low = batch["low"][index]
        alpha = batch["alpha"][index] if "alpha" in batch else low[:0]
        is_grey = "grey" in batch and bool(batch["grey"][index])
        bits = int(batch["bits"][index]) if "bits" in batch else 8
        most = 2**bits - 1
        varies = bool((alpha != alpha[:, :1, :1]).any())
        low = low * alpha if varies else low
        plane = mirror(alpha[None], 2, MARGIN, MARGIN)
        top = 0
        for band in self.model.enlarge_rows(low):
            for stripe in band.split(STRIPE * self.scale, dim=1):
                stripe = stripe.float()
                if is_grey:
                    stripe = stripe.mean(0, keepdim=True)
                if len(alpha):
                    rows = stripe.shape[1] // self.scale
                    part = enlarge(plane[:, :, top : top + rows + 2 * MARGIN], self.scale)
                    cut = self.scale * MARGIN
                    opacity = part[0, :, cut:-cut].float()
                    if varies:
                        stripe = stripe / opacity.clamp(min=0.5 / most)
                    stripe = torch.cat([stripe, opacity])
                    top += rows
                values = (stripe.clamp(0, 1) * most).round().permute(1, 2, 0).cpu().numpy()
                yield values.astype(np.uint8 if bits == 8 else np.uint16)

    def describe_to(self, batch: Batch, datamodule: Any, files: OutputFiles) -> list[Row]:
        """Enlarge the images of a batch, and write each stripe by stripe."""
        rows = self._rows(batch, datamodule)
        for index, row in enumerate(rows):
            target = files.path(ENLARGED, row["input"], f"_x{self.scale}.png")
            with whole_file(target) as file:
                write_png(file, self._stripes(batch, index), row["size"][1])
            row[ENLARGED] = files.relative(target)
        return rows

    def answer(self, row: Row) -> str:
        """Return the size and the file of an enlarged image."""
        width, height = row["size"]
        return f"{width}x{height} pixels, {row[ENLARGED]}"

    @torch.no_grad()
    def preview(self, batch: Batch, datamodule: Any) -> list[Image.Image]:
        """Draw the middle of each image: low resolution, bicubic, ours and, if known, the truth."""
        weights = next(self.model.parameters(), None)
        pictures = []
        for index, picture in enumerate(batch["low"]):
            low = picture if weights is None else picture.to(weights)
            low = centre(low, DRAWN)
            ours = self.model.predict({"low": low[None]})[0].cpu()
            small = low.float().cpu()
            pixels = small.repeat_interleave(self.scale, 1).repeat_interleave(self.scale, 2)
            tensors = {
                f"low resolution, x{self.scale}": pixels,
                "bicubic": enlarge(small[None], self.scale)[0],
                "ours": ours,
            }
            truth = None
            if "high" in batch:
                truth = _same_middle(batch["high"][index], picture, low, self.scale)
            panels = []
            for title, image in tensors.items():
                figures = {} if truth is None else self._figures_of(image, truth)
                panels.append(Panel(to_picture(image), title, caption(figures)))
            if truth is not None:
                panels.append(Panel(to_picture(truth), "truth", "PSNR and SSIM of Y"))
            pictures.append(draw_panels(panels))
        return pictures


def _same_middle(high: Tensor, target: Tensor, low: Tensor, scale: int) -> Tensor:
    """Crop the true image to the part that the cropped small image shows."""
    top, x = (
        (outer - inner) // 2 for outer, inner in zip(target.shape[1:], low.shape[1:], strict=True)
    )
    rows, columns = low.shape[1:]
    return high[:, scale * top : scale * (top + rows), scale * x : scale * (x + columns)].cpu()
