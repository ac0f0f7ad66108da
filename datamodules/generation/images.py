"""Images or latents in class folders, scaled to [-1, 1], and requests of images to generate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from datamodules.base import BaseDataModule, Split, check_minimum
from datamodules.files.decoding import load_rgb
from datamodules.files.folders import IMAGE_SUFFIXES, VALIDATION, list_folders
from datamodules.files.values import check_option, refuse
from datamodules.loading.pixels import is_bytes, scale_bytes
from datamodules.loading.sampling import NamedDataset, SeededDataset, TolerantDataset

MODES = {1: "L", 3: "RGB"}
LATENTS = ".npy"
LATENT_SCALE = 0.18215  # of Stable Diffusion's VAE
KNOWN = IMAGE_SUFFIXES | {LATENTS}


class GenerationDataModule(BaseDataModule):
    """Folders train/<class> and val/<class> of images, or of latents as .npy arrays.

    Images are resized and cropped to a square, and scaled to [-1, 1]. Latents (C, H, W) are used as
    they are. Means and deviations of a VAE (2 C, H, W), from which training draws, are multiplied
    by ``latent_scale``; (2, 2 C, H, W) are those of an image and of its mirror image.

    Args:
        root: Folder of train and val.
        image_size: Side of the images.
        channels: Channels of the images, 1 or 3.
        latent_channels: Channels that the network sees with a VAE or latents; None without.
        factor: Pixels per latent along a side; 1 without a VAE.
        flip: Mirror half of the training images; of latents, those with a mirror image.
        latents: Folder for the latents of the images, which a run with ``head.vae`` computes once;
            None computes them in each step.
        latent_scale: Factor of means and deviations; None for that of the VAE that made
            ``latents``, or else 0.18215.
        draw_classes: Names or numbers of the classes to generate in mode=predict and in pictures;
            None for all.
        draw_count: Images per class.
        draw_seed: Seed of the first of them.
        batch_size: Images per training batch and process.
        **options: Of ``BaseDataModule``.

    Attributes:
        class_names: Names of the classes, in label order: the sorted names of the folders.
    """

    unit = "images"
    fixed_size = True
    layout = "folders train and val with a folder of images or latents (.npy) per class"
    example = "data=image_generation data.root=/data/imagenet"

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        image_size: int = 256,
        channels: int = 3,
        latent_channels: int | None = 4,
        factor: int = 8,
        flip: bool = True,
        latents: str | Path | None = None,
        latent_scale: float | None = None,
        draw_classes: Sequence[str | int] | None = None,
        draw_count: int = 4,
        draw_seed: int = 0,
        batch_size: int = 256,
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size=batch_size, **options)
        check_option("channels", channels, channels in MODES, "1 or 3")
        pixels = latent_channels is None
        check_minimum("latent_channels", 1 if latent_channels is None else latent_channels, 1)
        rule = "1 without data.latent_channels"
        check_option("factor", factor, not pixels or factor == 1, rule)
        rule = "null without data.latent_channels, such as 4"
        check_option("latents", latents, not pixels or latents is None, rule)
        self.latents = None if latents is None else Path(latents).expanduser()
        self.typed_scale = latent_scale
        self.set_latent_scale(None)
        self.image_size = check_minimum("image_size", image_size, 8)
        self.factor = check_minimum("factor", factor, 1)
        self.channels, self.latent_channels, self.flip = channels, latent_channels, flip
        self.draw_classes, self.draw_seed = draw_classes, draw_seed
        self.draw_count = check_minimum("draw_count", draw_count, 1)
        self.class_names: tuple[str, ...] = ()

    @property
    def seen_channels(self) -> int:
        """Channels of the network's input."""
        return self.channels if self.latent_channels is None else self.latent_channels

    @property
    def input_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Shape (C, H, W) of the network's input."""
        side = self.image_size // self.factor
        return (self.seen_channels, side, side)

    @property
    def backbone_arguments(self) -> dict[str, Any]:
        """Channels and size of the input, and number of classes."""
        if not self.class_names:
            self.prepare_data()
            self._read_classes()
        return {
            "channels": self.seen_channels, "num_classes": len(self.class_names),
            "img_size": self.image_size // self.factor,
        }  # fmt: skip

    @property
    def task_arguments(self) -> dict[str, Any]:
        """Names of the classes."""
        return {"class_names": self.class_names}

    def target_facts(self) -> dict[str, Any]:
        """Return the number of classes."""
        return {"classes": len(self.class_names)}

    def target_identity(self) -> dict[str, Any]:
        """Return the names of the classes."""
        return {"classes": list(self.class_names)}

    def predict_only(self, class_names: Sequence[str], **facts: Any) -> None:
        """Serve prediction alone, with the classes of a checkpoint."""
        self.class_names = tuple(class_names)
        super().predict_only()

    def _read_classes(self) -> None:
        folder = self.folder / "train"
        class_folders = sorted(
            path.name for path in folder.glob("*/") if not path.name.startswith(".")
        )
        rule = f"holds {len(class_folders)} class folders; it needs {self.layout}"
        refuse(folder, {rule: len(class_folders) < 2})
        self.class_names = tuple(class_folders)

    def _list(self, split: str) -> list[tuple[Path, int]]:
        names = VALIDATION if split == "val" else (split,)
        base = next(filter(Path.is_dir, (self.folder / name for name in names)), None)
        samples: list[tuple[Path, int]] = []
        if base is not None:
            strays = sorted({*list_folders(base)} - {*self.class_names})
            rule = f"has class folders that {self.folder / 'train'} lacks"
            refuse(base, {rule: strays})
        for label, name in enumerate(self.class_names if base else ()):
            assert base is not None
            files = sorted((base / name).glob("*")) if (base / name).is_dir() else []
            samples += [
                (file, label)
                for file in files
                if file.suffix.lower() in KNOWN and not file.name.startswith(".")
            ]
        refuse(self.folder, {f"has no {split} images; it needs {self.layout}": not samples})
        return samples

    def set_latent_scale(self, scale: tuple[float, float] | None) -> None:
        """Set factor and shift of means and deviations where the options leave them open."""
        if self.typed_scale is not None:
            scale = self.typed_scale, 0.0
        self.latent_scale, self.latent_shift = scale or (LATENT_SCALE, 0.0)

    def check_latents(self) -> None:
        """Check after ``setup`` that the network's inputs need no VAE.

        Raises:
            ValueError: A file is an image, and latents are expected.
        """
        if self.latent_channels is None or self.latents is not None:
            return
        for dataset in self._datasets.values():
            images: Any = dataset.dataset
            for file, _ in images.files:
                rule = (
                    f"is an image, but data.latent_channels={self.latent_channels} expects "
                    "latents; pass head.vae=<folder of a diffusers AutoencoderKL>, or "
                    "data.latent_channels=null data.factor=1 to denoise pixels"
                )
                refuse(file, {rule: file.suffix != LATENTS})

    def latent_file(self, image: Path) -> Path | None:
        """Return the file of an image's latents; None without ``latents``."""
        if self.latents is None:
            return None
        inner = image.relative_to(self.folder)
        return self.latents / inner.with_name(f"{inner.name}{LATENTS}")

    def images(self) -> list[Path]:
        """Return the image files of both splits; files of latents are left out."""
        names = ("train", "val")
        files = [file for split in names for file, _ in self._list(split)]
        return [file for file in files if file.suffix != LATENTS]

    def real_images(self) -> Iterator[Tensor] | None:
        """Yield the validation images as uint8 (C, H, W); None if they are latents."""
        files = [file for file, _ in self._list("val")]
        if files[0].suffix == LATENTS:
            return None
        return (torch.from_numpy(self.pixels(file)) for file in files)

    def pixels(self, file: Path) -> NDArray[np.uint8]:
        """Read an image, resized and cropped to a square: (C, H, W)."""
        size = self.image_size
        image = load_rgb(file, upright=False).convert(MODES[self.channels])
        scale = size / min(image.size)
        if scale != 1:
            width, height = (max(size, round(scale * side)) for side in image.size)
            image = image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3)
        x_min, top = ((side - size) // 2 for side in image.size)
        pixels = np.asarray(image.crop((x_min, top, x_min + size, top + size)))
        return np.array(pixels.reshape(size, size, -1).transpose(2, 0, 1), order="C")

    def values(self, file: Path) -> NDArray[np.float32]:
        """Read an image as values from -1 to 1: (C, H, W)."""
        return (self.pixels(file) / np.float32(127.5) - 1).astype(np.float32)

    def normalise(self, batch: Any) -> Any:
        """Return a batch with floats from -1 to 1 in place of bytes."""
        if not is_bytes(batch.get("images")):
            return batch
        return {**batch, "images": scale_bytes(batch["images"], 127.5, (1.0,))}

    def build(self) -> dict[Split, SeededDataset]:
        """List the files of both splits."""
        self._read_classes()
        built: dict[Split, SeededDataset] = {}
        splits: tuple[Split, ...] = ("train", "val")
        for split in splits:
            images = LabelledImages(self, self._list(split), training=split == "train")
            built[split] = self.seeded(images, images.name)
        return built

    def unlabelled_dataset(self, inputs: Any) -> NamedDataset:
        """Return requests of images by classes.

        Args:
            inputs: One class or several, by name or number; each gets ``draw_count`` images.
        """
        classes = inputs if isinstance(inputs, list | tuple) else [inputs]
        return self._requests(classes)

    def _requests(self, classes: Sequence[str | int] | None) -> NamedDataset:
        labels = range(len(self.class_names)) if classes is None else map(self._label, classes)
        requests = Requests(self, list(labels))
        return TolerantDataset(requests, requests.name)

    def _label(self, name: str | int) -> int:
        if str(name) in self.class_names:
            return self.class_names.index(str(name))
        if isinstance(name, int) and 0 <= name < len(self.class_names):
            return name
        examples = ", ".join(self.class_names[:10]) + ", ..." * (len(self.class_names) > 10)
        raise ValueError(f"{name!r} is not a class of these data; known are {examples}")

    def predict_dataloader(self) -> Any:
        """Return the requests of ``draw_classes``, or those of ``predict_path``."""
        return self._eval_loader_of(self._to_predict())

    def _to_predict(self) -> NamedDataset:
        if "predict" not in self._datasets:
            self._datasets["predict"] = self._requests(self.draw_classes)
        return self._datasets["predict"]

    def set_predict_inputs(self, inputs: Any) -> None:
        """Set the classes to generate: one, or several with commas between them."""
        names = str(inputs).split(",") if isinstance(inputs, str | Path) else inputs
        super().set_predict_inputs(names)


class LabelledImages:
    """Images or latents as tensors with labels."""

    def __init__(
        self, data: GenerationDataModule, files: Sequence[tuple[Path, int]], *, training: bool
    ) -> None:
        self.data, self.files, self.training = data, files, training

    def __len__(self) -> int:
        return len(self.files)

    def name(self, index: int) -> str:
        """Return the file of an image."""
        return str(self.files[index][0])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``images`` (C, H, W), ``labels`` and ``sample_id``."""
        file, label = self.files[index]
        latents = file if file.suffix == LATENTS else self.data.latent_file(file)
        images: Any = self._image(file) if latents is None else self._latents(latents)
        return {
            "images": torch.from_numpy(images),
            "labels": torch.tensor(label),
            "sample_id": torch.tensor(index),
        }

    def _mirrored(self) -> bool:
        return self.training and self.data.flip and bool(np.random.random() < 0.5)

    def _image(self, file: Path) -> NDArray[np.uint8]:
        pixels = self.data.pixels(file)
        return np.ascontiguousarray(pixels[:, :, ::-1]) if self._mirrored() else pixels

    def _latents(self, file: Path) -> NDArray[np.float32]:
        values = read_latents(file)
        channels, *sides = self.data.input_shape
        moments = (2 * channels, *sides)
        if values.shape == (2, *moments):
            values = values[int(self._mirrored())]
        if values.shape == moments:
            mean, deviation = np.split(values, 2)
            noise = np.random.normal(size=mean.shape) if self.training else 0.0
            scale, shift = self.data.latent_scale, self.data.latent_shift
            values = np.asarray(scale * (mean + deviation * noise - shift), np.float32)
        rule = (
            f"is {values.shape}; latents must be {(channels, *sides)}, or means and deviations "
            f"{moments}"
        )
        faults = {
            rule: values.shape != (channels, *sides),
            "holds NaN or Inf; make it again, or remove it": not np.isfinite(values).all(),
        }
        refuse(file, faults)
        return values


def read_latents(file: Path) -> NDArray[np.float32]:
    """Read an array of latents as float32.

    Raises:
        ValueError: The file is missing or damaged.
    """
    needs = "pass head.vae=<folder of a diffusers AutoencoderKL> once, which computes the latents"
    refuse(file, {f"is missing; {needs}": not file.is_file()})
    try:
        return np.asarray(np.load(file, allow_pickle=False), dtype=np.float32)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{file} is no array of latents ({error}); remove it") from error


class Requests:
    """Images to generate: ``images`` of zeros, ``labels``, ``seeds`` and ``sample_id``."""

    def __init__(self, data: GenerationDataModule, labels: Sequence[int]) -> None:
        self.shape, self.names = data.input_shape, data.class_names
        self.wanted = [
            (label, data.draw_seed + number)
            for label in labels
            for number in range(data.draw_count)
        ]

    def __len__(self) -> int:
        return len(self.wanted)

    def name(self, index: int) -> str:
        """Return class and seed."""
        label, seed = self.wanted[index]
        return f"{self.names[label]} {seed}"

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return the tensors of a request."""
        label, seed = self.wanted[index]
        return {
            "images": torch.zeros(self.shape), "labels": torch.tensor(label),
            "seeds": torch.tensor(seed), "sample_id": torch.tensor(index),
        }  # fmt: skip
