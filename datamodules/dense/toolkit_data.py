"""Base of detection and segmentation data: strict image reading for the MM toolkits' pipelines.

Batches come from mmengine's ``pseudo_collate``: ``inputs``, a list of uint8 (3, H, W) tensors in
OpenCV's channel order BGR, and ``data_samples``. The model normalises and pads them. Images of
bands are float32 (C, H, W) in the order of ``data.bands``, in the units of their files.
"""

from __future__ import annotations

import colorsys
import contextlib
import importlib
import io
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from torch.utils.data import DataLoader

from datamodules.base import Split
from datamodules.dense.bgr import load_bgr, to_bgr, to_planes
from datamodules.files.bands import Bands, read_bands
from datamodules.files.values import check_option, integer_list, refuse
from datamodules.images.base import ImageDataModule
from datamodules.loading.memory import FLOAT, check_fits_memory
from datamodules.loading.sampling import NamedDataset, SeededDataset

# A step of an MM pipeline; the toolkits pass one dict from step to step.
Results = dict[str, Any]
Step = Callable[[Results], Results | None]
Size = tuple[int, int]
MMCV_OPERATORS = "mmcv._ext"  # our substitute exists once heads is imported
# Colours that most eyes can distinguish (Paul Tol's "muted" and "bright" sets).
DISTINCT = (
    (68, 119, 170), (238, 102, 119), (34, 136, 51), (204, 187, 68), (102, 204, 238), (170, 51, 119),
    (136, 34, 85), (68, 170, 153), (153, 153, 51), (221, 204, 119), (51, 34, 136), (204, 102, 119),
)  # fmt: skip
META_KEYS = ("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")


class StrictImage:
    """First step of a pipeline: decodes ``img_path`` into BGR, or raises an error naming the file.

    An RGB ``image``, or bands (H, W, C), in the dict replace the file.

    Args:
        scale: Smallest longest and shortest edge that the image is resized to.
        maps: Number of maps in a prediction, each of the image's size.
        bands: Bands to read instead of BGR.
    """

    def __init__(self, scale: Size, maps: int = 0, bands: Bands | None = None) -> None:
        self.scale, self.maps, self.bands = scale, maps, bands

    def __call__(self, results: Results) -> Results:
        """Add ``img`` (H, W, C) and its shapes, after a check against annotated ones."""
        image, path = results.pop("image", None), results["img_path"]
        pixels: Any = image
        if self.bands is None:
            pixels = load_bgr(path, upright=True) if image is None else to_bgr(image)
        elif image is None:
            pixels = read_bands(path, self.bands)
        height, width = pixels.shape[:2]
        annotated = (results.get("width", width), results.get("height", height))
        check_annotated_size(path, (width, height), annotated)
        check_not_thin(path, (width, height), self.scale)
        check_fits_memory(
            f"{path}: a prediction of {self.maps} classes for {width:,}x{height:,} pixels",
            self.maps * width * height * FLOAT,
            "cut the image into pieces",
        )
        results["img"] = pixels
        results["img_shape"] = results["ori_shape"] = (height, width)
        return results


class Packed:
    """Last step of a pipeline: a toolkit's own packing without its slowest part.

    Args:
        pack: The toolkit's step.
    """

    def __init__(self, pack: Step) -> None:
        self.pack = pack

    def __call__(self, results: Results) -> Results | None:
        """Return a packed sample of the image and its annotations."""
        results["img"] = to_planes(results["img"])
        return self.pack(results)


class Flip:
    """Step that flips an image horizontally, or records that it is unflipped.

    mmcv's ``RandomFlip`` with probability 1 or 0 has the same result, but draws from numpy's global
    generator, which threads share.

    Args:
        flip: True to flip.
    """

    def __init__(self, flip: bool) -> None:
        self.flip = flip

    def __call__(self, results: Results) -> Results:
        """Flip ``img`` and add ``flip`` and ``flip_direction``, which merging needs."""
        results["flip"] = self.flip
        results["flip_direction"] = "horizontal" if self.flip else None
        if self.flip:
            results["img"] = results["img"][:, ::-1]
        return results


def check_annotated_size(path: object, size: Size, annotated: Size) -> None:
    """Raise an error if an image's width and height differ from its annotation's."""
    rule = (
        f"is {size[0]}x{size[1]} pixels, upright by its EXIF data, but annotated as "
        f"{annotated[0]}x{annotated[1]}; correct either"
    )
    refuse(path, {rule: size != annotated})


def check_not_thin(path: object, size: Size, scale: Size) -> None:
    """Raise an error for an image that resizing would leave with less than a pixel.

    Args:
        path: The image, for the message.
        size: Width and height of the image.
        scale: Longest and shortest edge after resizing; the aspect ratio is kept.
    """
    factor = min(max(scale) / max(size), min(scale) / min(size))
    rule = (
        f"is {size[0]}x{size[1]} pixels, too thin to be resized to {max(scale)}x{min(scale)} "
        "(data.scale): less than one pixel of its short side would remain; remove it or cut it "
        "into pieces"
    )
    refuse(path, {rule: min(size) * factor < 0.5})


class Pipeline:
    """Sequence of steps."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)

    def __call__(self, results: Results) -> Results:
        """Return the sample of a description, after all steps."""
        for step in self.steps:
            after = step(results)
            assert after is not None, f"{step} dropped a sample"
            results = after
        return results


class DenseDataModule(ImageDataModule):
    """Base of the datamodules that use the MM toolkits' datasets.

    Attributes:
        package: Required package of the toolkits.
        background: Class with pixels that stay uncoloured in previews of labels, if any.

    Args:
        root: Folder of the dataset.
        test_scales: Factors of ``scale`` for tests and predictions; each image is predicted at all
            of them and the results merged. None means once, at ``scale``.
        test_flip: Predict each image flipped as well.
        **options: Options of ``BaseDataModule``.
    """

    package: ClassVar[str] = ""
    background: ClassVar[str | None] = None
    upright = True
    scale: Size

    def __init__(
        self,
        root: str | Path | None,
        *,
        test_scales: Sequence[float] | None = None,
        test_flip: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        self.test_scales = tuple(float(factor) for factor in test_scales or (1.0,))
        self.test_flip = test_flip
        rule = "factors above 0, such as [0.5,1.0,1.5]"
        check_option("test_scales", [*self.test_scales], min(self.test_scales) > 0, rule)

    def check_scales(self, *sizes: Size, factors: Sequence[float] = ()) -> None:
        """Check that batches of the largest resized images fit into the machine's memory.

        Args:
            sizes: Longest and shortest edges.
            factors: Further factors that scale images.

        Raises:
            ValueError: A batch is larger than the memory; the message names its size.
        """
        factor = max(1.0, *self.test_scales, *factors)
        longest, shortest = max(sizes, key=math.prod)
        self.check_memory((round(shortest * factor), round(longest * factor)), "data.scale")

    @abstractmethod
    def image_sizes(self) -> list[Size]:
        """Return widths and heights of training images; known after ``setup``."""

    @abstractmethod
    def train_steps(self) -> list[Step]:
        """Return the training pipeline."""

    def set_scale(self, scale: Sequence[int]) -> None:
        """Set the longest and shortest edge after resizing, also of datasets that are built."""
        from mmengine.dataset import Compose

        self.scale = parse_size("scale", scale)
        self.made_by |= {"scale": list(self.scale)}
        vars(self).pop("_predict_pipeline", None)
        pipelines: dict[Split, list[Step]] = {"train": self.train_steps(), "val": self.test_steps()}
        for split, steps in pipelines.items():
            dataset: Any = self.dataset(split).dataset
            dataset.pipeline = Compose(steps)

    @property
    def maps(self) -> int:
        """Number of maps in a prediction, each of the image's size."""
        return 0

    @property
    def smallest_scale(self) -> Size:
        """Smallest longest and shortest edge of test images after resizing."""
        factor = min(1.0, *self.test_scales)
        return round(self.scale[0] * factor), round(self.scale[1] * factor)

    @property
    def has_views(self) -> bool:
        """True if tests see each image several times, resized and flipped."""
        return len(self.test_scales) > 1 or self.test_scales[0] != 1 or self.test_flip

    @property
    def metainfo(self) -> dict[str, Any]:
        """Classes and colours in the form of the toolkits' datasets and metrics."""
        return {"classes": self.class_names, "palette": palette(self.num_classes)}

    def collate(self) -> Callable[[list[Any]], Any]:
        """Return mmengine's collation into lists of samples."""
        from mmengine.dataset import pseudo_collate

        return pseudo_collate

    def setup(self, stage: str | None = None) -> None:
        """Check everything on disk and build the datasets; later calls return at once."""
        require_package(self.package)
        super().setup(stage)

    def predict_only(self, class_names: Sequence[str], category_ids: Sequence[int] = ()) -> None:
        """Set the classes and serve prediction alone, without reading a dataset."""
        require_package(self.package)
        super().predict_only(class_names, category_ids)

    def wrap(self, dataset: Any) -> SeededDataset:
        """Make the samples of a toolkit's dataset depend on the run's seed alone."""
        return self.seeded(dataset, partial(image_path, dataset))

    def test_steps(self, *, annotated: bool = True) -> list[Step]:
        """Return the evaluation pipeline; annotations keep the original size, as in mmdet."""
        resize, masks = self.resize_step(self.scale), self.annotation_steps(annotated=annotated)
        first = StrictImage(self.scale, self.maps, self.bands)
        return [first, resize, *masks, self.pack_step()]

    def plain_dataset(self, split: Split) -> NamedDataset:
        """Return the dataset of a split with the evaluation pipeline."""
        return self.wrap(Viewed(self.dataset(split).dataset, self.test_steps()))

    def view_steps(self, *, annotated: bool = True) -> list[Step]:
        """Return ``test_steps``; with several views, steps that return each field as a list."""
        from mmcv.transforms import TestTimeAug

        if not self.has_views:
            return self.test_steps(annotated=annotated)
        longest, shortest = self.scale
        sizes = [(round(longest * f), round(shortest * f)) for f in self.test_scales]
        choices: list[list[Step]] = [[self.resize_step(size) for size in sizes]]
        flips: list[Step] = [Flip(False), Flip(True)]
        choices.append(flips[: 1 + self.test_flip])
        choices += [[step] for step in self.annotation_steps(annotated=annotated)]
        first = StrictImage(self.smallest_scale, self.maps, self.bands)
        return [first, TestTimeAug([*choices, [self.pack_step()]])]

    @abstractmethod
    def resize_step(self, scale: Size) -> Step:
        """Return the step that resizes an image to a longest and a shortest edge."""

    @abstractmethod
    def annotation_steps(self, *, annotated: bool) -> list[Step]:
        """Return the steps of evaluation that read annotations; [] if not ``annotated``."""

    @abstractmethod
    def pack_step(self) -> Step:
        """Return the last step, which packs a sample."""

    def test_dataloader(self) -> DataLoader[Any]:
        """Return the validation batches, with several views per image if options ask for them."""
        return self._viewed_loader() if self.has_views else super().test_dataloader()

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return batches of ``predict_path``, or else those of a test."""
        if self.has_views and "predict" not in self._datasets:
            return self._viewed_loader()
        return super().predict_dataloader()

    def preview_batch(self, count: int) -> Any:
        """Return a batch of up to ``count`` samples to draw, each in its first view."""
        batch = super().preview_batch(count)
        several = isinstance(batch["inputs"][0], Sequence)
        return {key: value[0] for key, value in batch.items()} if several else batch

    def _viewed_loader(self) -> DataLoader[Any]:
        dataset: Any = self.dataset("val").dataset
        return self._eval_loader_of(self.wrap(Viewed(dataset, self.view_steps())))

    def predict_sample(self, image: Any, name: str, index: int) -> Results:
        """Return the sample of an image to predict, by the evaluation pipeline."""
        return self._predict_pipeline({"image": image, "img_path": name, "img_id": index})

    @cached_property
    def _predict_pipeline(self) -> Pipeline:
        return Pipeline(self.view_steps(annotated=False))


class Viewed:
    """Samples of a toolkit's dataset, made by another pipeline."""

    def __init__(self, dataset: Any, steps: Sequence[Step]) -> None:
        self.get_data_info = dataset.get_data_info
        self.length, self.pipeline = len(dataset), Pipeline(steps)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Results:
        """Return the sample of an index."""
        return self.pipeline(self.get_data_info(index))


def image_path(dataset: Any, index: int) -> str:
    """Return the file of a sample of one of mmengine's datasets."""
    return str(dataset.get_data_info(index)["img_path"])


def require_package(name: str) -> None:
    """Raise an ``ImportError`` with a remedy unless the package can be imported."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # hides notes on missing optional parts
            importlib.import_module(MMCV_OPERATORS)  # which MMDetection does without, silently
            importlib.import_module(name)
    except ImportError as error:
        remedy = 'type: pip install "mixerlab[dense]"'
        if error.name == MMCV_OPERATORS:
            remedy = "put `import heads` first, which provides mmcv's operators"
        raise ImportError(
            f"this task needs {name}, which cannot be imported ({error}); {remedy}"
        ) from error


def palette(count: int) -> list[tuple[int, int, int]]:
    """Return ``count`` distinct RGB colours; neighbours in the list differ in hue."""
    golden = 0.618034  # Steps of the golden ratio spread any number of hues evenly.
    colours = [
        colorsys.hsv_to_rgb(index * golden % 1, 0.75, 0.95 - 0.3 * (index % 2))
        for index in range(len(DISTINCT), count)
    ]
    return [
        *DISTINCT[:count],
        *(
            (round(255 * red), round(255 * green), round(255 * blue))
            for red, green, blue in colours
        ),
    ]


def parse_size(name: str, value: int | Sequence[int]) -> Size:
    """Return a size given as one number or as a pair."""
    edges = [value, value] if isinstance(value, int | float) else value
    pair = integer_list(f"data.{name}", edges)
    valid = len(pair) == 2 and min(pair) >= 1
    check_option(name, value, valid, "one positive number or two, such as [1333,800]")
    return pair[0], pair[1]
