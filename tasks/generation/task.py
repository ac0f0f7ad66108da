"""Class-conditional generation: training by denoising, evaluation by sets of samples."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torchmetrics import MeanMetric

from backbones.checkpoints.opening import Checkpoint
from tasks import load
from tasks.engine.base import BaseTask
from tasks.engine.batches import Batch, Row, Summed, input_names
from tasks.engine.callbacks.pace import duration
from tasks.engine.classes import check_classes, classes_of
from tasks.engine.run_folder.atomic_writes import whole_file
from tasks.engine.run_folder.predictions import OutputFiles
from tasks.generation.family import FAMILY
from tasks.generation.latents import EVERY, write_latents
from tasks.generation.quality import (
    Statistics,
    check_extractor,
    extract,
    fid,
    inception_score,
    load_extractor,
    pixel_kid,
    read_statistics,
    statistics,
)
from tasks.generation.records import differences, digest, recorded_scale, write_record

SAMPLES, IMAGES = "samples", "images"  # folders of a test's samples and of predicted images
SHOWN, PER_CLASS = 10, 4  # classes and images per class of the sheet
SIDE, MARGIN = 64, 2  # pixels
log = logging.getLogger(__name__).info


class GenerationTask(BaseTask):
    """Generation of images of classes.

    Validation measures the error of the predicted noise or velocity, at noise that depends on the
    inputs alone. A test draws samples with labels drawn uniformly, writes them as PNGs, and
    compares them with the test images.

    Args:
        model: See ``BaseTask``.
        class_names: Names of the classes, in label order.
        num_samples: Samples of a test; 0 for none.
        sample_batch: Samples of one pass.
        samples_folder: Folder of the samples; those that it has are not drawn again. None for a
            folder of the run.
        inception: Weights of torch-fidelity's Inception network, for FID and Inception score; None
            leaves both out.
        reference: Folder of images, or npz of ADM's evaluator, that FID compares with; None for the
            test images.
        classifier: Run folder of a classifier of the same classes, which a test gives the samples;
            None leaves it out.
        **options: Options of ``BaseTask``.
    """

    family = FAMILY
    metric_stores = ("errors",)
    headline = ("mse",)
    preview_images = SHOWN * PER_CLASS
    why_no_loss = "the error of the predicted noise is a metric"
    figures_file = "samples.csv"

    def __init__(
        self,
        model: nn.Module,
        class_names: Sequence[str],
        *,
        num_samples: int = 0,
        sample_batch: int = 64,
        samples_folder: str | None = None,
        inception: str | None = None,
        reference: str | None = None,
        classifier: str | None = None,
        optimizer: Mapping[str, Any] | None = None,
        schedule: Mapping[str, Any] | None = None,
        ema: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(model, optimizer=optimizer, schedule=schedule, ema=ema)
        if num_samples < 0 or num_samples == 1:
            raise ValueError(f"task.num_samples must be 0, or 2 and more, got {num_samples}")
        if sample_batch < 1:
            raise ValueError(f"task.sample_batch must be at least 1, got {sample_batch}")
        self.class_names = tuple(class_names)
        self.num_samples, self.sample_batch = num_samples, sample_batch
        self.samples_folder, self.inception, self.reference = samples_folder, inception, reference
        self.classifier = classifier
        self.errors = MeanMetric().set_dtype(torch.float64)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Return the names of the error and of what compares samples."""
        if not self.num_samples:
            return ("mse",)
        recognised = ("recognised",) if self.classifier else ()
        return ("mse", "kid", *recognised, *(("fid", "is") if self.inception else ()))

    def update_metrics(self, batch: Batch, predictions: Tensor) -> None:
        """Add the errors of a batch."""
        self.errors.update(predictions.double())

    def sample_values(self, batch: Batch, predictions: Tensor) -> Tensor:
        """Return the mean squared error of each image's prediction (B,)."""
        return predictions

    def compute_metrics(self) -> dict[str, Tensor]:
        """Return the mean error; in a test also what compares samples with the test images."""
        figures = {"mse": self.errors.compute().float()}
        trainer: Any = self._trainer
        if trainer is None or not trainer.testing:
            return figures
        if self._is_brief():
            log(
                f"The training had {trainer.global_step} steps, fewer than a sample's head.steps="
                f"{self.model.steps}: no samples are drawn; mode=test and mode=predict draw them"
            )
        elif self.num_samples:
            figures |= self._compare_samples(trainer)
        return figures

    def _is_brief(self) -> bool:
        """Return True after a training of fewer steps than a sample takes."""
        trainer: Any = self._trainer
        return trainer is not None and 0 < trainer.global_step < self.model.steps

    def shown_figures(self, mode: str) -> list[Row]:
        """Return the metrics of samples with what they are compared with."""
        return self.class_figures

    def reset_metrics(self) -> None:
        """Reset the mean."""
        self.errors.reset()

    def evaluation_loss(self, batch: Batch, predictions: Tensor) -> Summed:
        """Return the summed errors and their number."""
        return predictions.double().sum(), torch.tensor(len(predictions))

    def setup(self, stage: str) -> None:
        """Check what a test will need; compute the missing files of ``data.latents``."""
        super().setup(stage)
        trainer: Any = self.trainer
        if stage == "predict":
            self.model.check_images()
        if stage in ("fit", "test") and self.num_samples:
            self.model.check_images()
            if self.inception or self.reference:  # FID alone reads the reference
                check_extractor(self.inception)
            for name, path in (("reference", self.reference), ("classifier", self.classifier)):
                if path is not None and not Path(path).exists():
                    raise ValueError(f"task.{name}={path} does not exist")
        data: Any = getattr(trainer, "datamodule", None)
        if stage != "predict" and not self.model.has_vae and hasattr(data, "check_latents"):
            data.check_latents()
        if stage != "predict" and hasattr(data, "set_latent_scale"):
            scaling = self.model.latent_scale, self.model.latent_shift
            recorded = recorded_scale(data.latents or data.folder)
            data.set_latent_scale(scaling if self.model.has_vae else recorded)
        if stage != "predict" and getattr(data, "latents", None) is not None:
            device = trainer.strategy.root_device
            write_latents(self.model, data, device, trainer.global_rank, trainer.world_size)
            trainer.strategy.barrier("latents")

    def _compare_samples(self, trainer: Any) -> dict[str, Tensor]:
        run_samples = Path(trainer.default_root_dir) / SAMPLES
        folder = run_samples if self.samples_folder is None else Path(self.samples_folder)
        if trainer.is_global_zero:
            self.claim_samples(folder, is_run=folder == run_samples)
        trainer.strategy.barrier("record of the samples")
        files = self.draw_samples(folder, trainer.global_rank, trainer.world_size)
        trainer.strategy.barrier("samples")
        figures: dict[str, float] = {}
        data = trainer.datamodule
        compared = {"kid": "validation images", "recognised": self.classifier,
                    "fid": self.reference or "validation images"}  # fmt: skip
        real = data.real_images()
        if real is not None:
            figures["kid"] = pixel_kid(map(_read, files), real)
        if self.classifier:
            figures["recognised"] = self._recognised(files, self.classifier)
        if self.inception:
            extractor = load_extractor(Path(self.inception)).to(self.device)
            features, logits = extract(extractor, map(_read, files), self.device)
            figures["is"] = inception_score(logits)
            figures["fid"] = fid(statistics(features), self._reference(extractor, data))
        self.class_figures = [
            {"metric": name, "value": value, "samples": len(files),
             "compared with": compared.get(name) or "themselves"}
            for name, value in figures.items()
        ]  # fmt: skip
        return {name: torch.tensor(value) for name, value in figures.items()}

    def _recognised(self, files: Sequence[Path], run: str) -> float:
        """Return the share of samples, in percent, that a classifier assigns to their class."""
        classifier = load(run, device=self.device)
        names = getattr(classifier, "class_names", ())
        lacking = sorted(set(self.class_names) - set(names))
        if lacking:
            raise ValueError(
                f"task.classifier={run} lacks the class {lacking[0]}; pass a run of "
                "task=classification on the same classes"
            )
        class_names = [self.class_names[int(file.stem.rpartition("_")[2])] for file in files]
        rows = classifier.stream([str(file) for file in files])
        hits = [row["classes"][0] == name for row, name in zip(rows, class_names, strict=True)]
        return 100 * sum(hits) / len(hits)

    def _reference(self, extractor: Any, data: Any) -> Statistics:
        path = None if self.reference is None else Path(self.reference)
        if path is not None and path.suffix == ".npz":
            return read_statistics(path)
        images: Iterator[Tensor] | None
        if path is None:
            images = data.real_images()
        else:
            suffixes = Image.registered_extensions()
            files = sorted(file for file in path.rglob("*") if file.suffix.lower() in suffixes)
            if len(files) < 2:
                raise ValueError(f"task.reference={path} holds {len(files)} images; it needs many")
            images = map(_read, files)
        if images is None:
            raise ValueError("FID needs task.reference=<folder of images or npz of ADM>")
        return statistics(extract(extractor, images, self.device)[0])

    def claim_samples(self, folder: Path, *, is_run: bool) -> None:
        """Record what draws the samples of a folder, so that samples of two models never mix.

        Args:
            folder: Folder of the samples.
            is_run: True for that of the run, whose samples of other weights are removed.

        Raises:
            ValueError: Another folder holds samples of another model, or of other settings.
        """
        made_by = {**self.model.sampling, "weights": digest(self.model.state_dict())}
        change = differences(folder, made_by)
        if change and not is_run:
            raise ValueError(
                f"task.samples_folder={folder} holds other samples ({change}); pass another folder"
            )
        if change:
            shutil.rmtree(folder)
        write_record(folder, made_by)

    @torch.no_grad()
    def draw_samples(self, folder: Path, rank: int = 0, processes: int = 1) -> list[Path]:
        """Draw the missing ones of ``num_samples`` samples; sample i has seed i.

        Args:
            folder: Receives a PNG per sample.
            rank: Number of this process, which draws every ``processes``-th sample.
            processes: Number of processes.

        Returns:
            The files of all samples, in order.
        """
        folder.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(self.model.num_classes, (self.num_samples,), generator=generator)
        files = [folder / f"{index:06d}_{label}.png" for index, label in enumerate(labels.tolist())]
        indices = range(rank, self.num_samples, processes)
        missing = [index for index in indices if not files[index].is_file()]
        started = last_message = time.monotonic()
        for start in range(0, len(missing), self.sample_batch):
            batch = missing[start : start + self.sample_batch]
            for index, image in zip(batch, self.model.sample(labels[batch], batch), strict=True):
                _write(files[index], image)
            now, count = time.monotonic(), start + len(batch)
            if rank == 0 and now - last_message > EVERY:
                last_message, seconds = now, (len(missing) - count) * (now - started) / count
                log(f"{count:,} of {len(missing):,} samples drawn, {duration(seconds)} left")
        return files

    def target_state(self) -> dict[str, Any]:
        """Return the names of the classes."""
        return {"class_names": list(self.class_names)}

    def target_arguments(self) -> dict[str, Any]:
        """Return the names of the classes."""
        return {"class_names": self.class_names}

    @classmethod
    def targets_of(cls, checkpoint: Checkpoint) -> dict[str, Any] | None:
        """Return a checkpoint's class names; None if the file lacks them."""
        classes = classes_of(checkpoint)
        return None if classes is None else {"class_names": classes.names}

    def check_targets(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint of other classes."""
        check_classes(checkpoint.values, self.class_names, checkpoint.path)

    @torch.no_grad()
    def describe(self, batch: Batch, datamodule: Any) -> list[Row]:
        """Return per request ``input``, its class and seed, ``class``, ``seed``, ``pixels``."""
        labels, seeds = batch["labels"], batch["seeds"].tolist()
        images = self.model.sample(labels, seeds)
        return [
            {"input": name, "class": self.class_names[label], "seed": seed,
             "pixels": _to_array(image)}
            for name, label, seed, image in zip(
                input_names(batch, datamodule, "image"), labels.tolist(), seeds, images, strict=True
            )
        ]  # fmt: skip

    def describe_to(self, batch: Batch, datamodule: Any, files: OutputFiles) -> list[Row]:
        """Return rows with a file in the place of pixels: images/<class>_<seed>.png."""
        rows = []
        for row in self.describe(batch, datamodule):
            target = files.path(IMAGES, f"{row['class']}_{row['seed']:06d}", ".png")
            with whole_file(target) as file:
                Image.fromarray(row["pixels"]).save(file, "PNG")
            rows.append(row | {"pixels": files.relative(target)})
        return rows

    def answer(self, row: Row) -> str:
        """Return the file of an image."""
        return str(row["pixels"])

    def preview(self, batch: Batch, datamodule: Any) -> list[Image.Image]:
        """Draw one sheet with a row per class; latents without a VAE are skipped."""
        if not (self.model.has_vae or self.model.backbone.channels in (1, 3)):
            return []
        if self._is_brief():
            return []
        count = len(self.class_names)
        spaced = sorted({round(i * (count - 1) / (SHOWN - 1)) for i in range(SHOWN)})
        labels = torch.tensor(spaced).repeat_interleave(PER_CLASS)
        images = self.model.sample(labels, list(range(len(labels))))
        return [sheet([self.class_names[label] for label in spaced], images)]


def to_bytes(image: Tensor) -> Tensor:
    """Return an image from -1 to 1 as uint8: (C, H, W)."""
    return ((image.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def _to_array(image: Tensor) -> Any:
    pixels = to_bytes(image).permute(1, 2, 0).cpu().numpy()
    return pixels[:, :, 0] if pixels.shape[2] == 1 else pixels[:, :, :3]


def _write(file: Path, image: Tensor) -> None:
    with whole_file(file) as opened:
        Image.fromarray(_to_array(image)).save(opened, "PNG")


def _read(file: Path) -> Tensor:
    with Image.open(file) as image:
        pixels = np.array(image.convert("L" if image.mode == "L" else "RGB"))
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).permute(2, 0, 1)


def sheet(names: Sequence[str], images: Tensor) -> Image.Image:
    """Draw images in rows, one per class: (classes * n, C, H, W)."""
    columns = len(images) // len(names)
    margin = 8 + 7 * min(16, max(map(len, names)))
    step = SIDE + MARGIN
    canvas = Image.new("RGB", (margin + columns * step, len(names) * step), "white")
    draw = ImageDraw.Draw(canvas)
    for row, name in enumerate(names):
        draw.text((4, row * step + SIDE // 2 - 6), name[:16], fill="black")
        for column in range(columns):
            picture = Image.fromarray(_to_array(images[row * columns + column]))
            picture = picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
            canvas.paste(picture.convert("RGB"), (margin + column * step, row * step))
    return canvas
