"""What detection and segmentation share: strict image reading for the MM toolkits' pipelines.

Batches are what mmengine's ``pseudo_collate`` makes: ``inputs``, a list of uint8 (3, H, W) tensors
in OpenCV's channel order BGR, and ``data_samples``; the model normalises and pads them.
"""

from __future__ import annotations

import colorsys
import contextlib
import importlib
import io
import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from PIL import Image
from torch.utils.data import DataLoader

from datamodules.dense.bgr import load_bgr, to_bgr, to_planes
from datamodules.files.whole_numbers import whole_list
from datamodules.images.base import ImageDataModule
from datamodules.loading.memory import FLOAT, refuse_larger
from datamodules.loading.sampling import SeededDataset

# A step of an MM pipeline: the toolkits hand one dict from step to step.
Results = dict[str, Any]
Step = Callable[[Results], Results | None]
Size = tuple[int, int]
MMCV_OPERATORS = "mmcv._ext"  # mmcv without them has ours once heads is imported
META_KEYS = ("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")


class StrictImage:
    """First step of a pipeline: decodes ``img_path`` into BGR, or raises naming the file.

    An RGB ``image`` that is given is taken instead.

    Args:
        scale: The smallest longest and shortest edge that the image is resized into.
        maps: How many maps of numbers a prediction has at the size of the image.
    """

    def __init__(self, scale: Size, maps: int = 0) -> None:
        self.scale, self.maps = scale, maps

    def __call__(self, results: Results) -> Results:
        """Add ``img`` (H, W, 3) and its shapes, which must be the annotated ones, if there are."""
        image, path = results.pop("image", None), results["img_path"]
        pixels = load_bgr(path, upright=True) if image is None else to_bgr(image)
        height, width = pixels.shape[:2]
        annotated = (results.get("width", width), results.get("height", height))
        refuse_other_size(path, (width, height), annotated)
        refuse_thin(path, (width, height), self.scale)
        refuse_larger(
            f"{path}: a prediction of {self.maps} classes for {width:,}x{height:,} pixels",
            self.maps * width * height * FLOAT,
            "cut the image into pieces",
        )
        results["img"] = pixels
        results["img_shape"] = results["ori_shape"] = (height, width)
        return results


class Packed:
    """Last step of a pipeline: a toolkit's own packing, which is spared its slowest part.

    Args:
        pack: The toolkit's step.
    """

    def __init__(self, pack: Step) -> None:
        self.pack = pack

    def __call__(self, results: Results) -> Results | None:
        """Make a sample of the image and its annotations."""
        results["img"] = to_planes(results["img"])
        return self.pack(results)


class Flip:
    """Flips an image from left to right, or notes that it stays as it is.

    mmcv's ``RandomFlip`` with a probability of 1 or 0 gives the same, but draws from numpy's global
    generator, which threads share.

    Args:
        flip: Flip it.
    """

    def __init__(self, flip: bool) -> None:
        self.flip = flip

    def __call__(self, results: Results) -> Results:
        """Flip ``img`` and add ``flip`` and ``flip_direction``, which merging reads."""
        results["flip"] = self.flip
        results["flip_direction"] = "horizontal" if self.flip else None
        if self.flip:
            results["img"] = results["img"][:, ::-1]
        return results


def refuse_other_size(path: object, size: Size, annotated: Size) -> None:
    """Raise an error unless an image has the width and height that its annotation says."""
    if size != annotated:
        raise ValueError(
            f"{path} is {size[0]}x{size[1]} pixels, upright by "
            f"its EXIF data, but annotated as {annotated[0]}x{annotated[1]}; correct either"
        )


def refuse_thin(path: object, size: Size, scale: Size) -> None:
    """Raise an error for an image of which less than a pixel would be left by resizing.

    Args:
        path: The image, for the message.
        size: Its width and height.
        scale: Longest and shortest edge that it is resized into, its shape kept.
    """
    factor = min(max(scale) / max(size), min(scale) / min(size))
    if min(size) * factor < 0.5:
        raise ValueError(
            f"{path} is {size[0]}x{size[1]} pixels, too thin to be resized into {max(scale)}x"
            f"{min(scale)} (data.scale): less than one pixel of its short side would be left; "
            "remove it or cut it into pieces"
        )


class Pipeline:
    """Calls the steps one after the other."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)

    def __call__(self, results: Results) -> Results:
        """Turn the description of a sample into the sample."""
        for step in self.steps:
            after = step(results)
            assert after is not None, f"{step} dropped a sample"
            results = after
        return results


class DenseDataModule(ImageDataModule):
    """Base of the datamodules that stand on the MM toolkits' datasets.

    Attributes:
        package: What they need from the toolkits.
        background: The class, if any, whose pixels are shown as they are in pictures of labels.

    Args:
        root: Folder of the dataset.
        test_scales: In tests and predictions each image is seen at ``scale`` times each of these
            factors, and the predictions are merged; None for once, at ``scale``.
        test_flip: In tests and predictions each image is seen flipped as well.
        **options: Of ``BaseDataModule``.
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
        if min(self.test_scales) <= 0:
            raise ValueError(
                f"data.test_scales={list(self.test_scales)} must be factors above 0, such as "
                "[0.5,1.0,1.5]"
            )

    def check_scales(self, *sizes: Size, factors: Sequence[float] = ()) -> None:
        """Refuse batches of the largest resized images that are larger than the machine's memory.

        Args:
            sizes: Longest and shortest edges.
            factors: By which images are scaled besides.

        Raises:
            ValueError: Names the size of a batch.
        """
        factor = max(1.0, *self.test_scales, *factors)
        long, short = max(sizes, key=math.prod)
        self.check_memory((round(short * factor), round(long * factor)), "data.scale")

    @property
    def maps(self) -> int:
        """How many maps of numbers a prediction has at the size of an image."""
        return 0

    @property
    def smallest_scale(self) -> Size:
        """The smallest longest and shortest edge that tests resize images into."""
        factor = min(1.0, *self.test_scales)
        return round(self.scale[0] * factor), round(self.scale[1] * factor)

    @property
    def has_views(self) -> bool:
        """Whether tests see each image several times, resized and flipped."""
        return len(self.test_scales) > 1 or self.test_scales[0] != 1 or self.test_flip

    @property
    def metainfo(self) -> dict[str, Any]:
        """The classes and their colours, as the toolkits' datasets and metrics take them."""
        return {"classes": self.class_names, "palette": palette(self.num_classes)}

    def collate(self) -> Callable[[list[Any]], Any]:
        """Mmengine's collation: lists of samples, nothing stacked."""
        from mmengine.dataset import pseudo_collate

        return pseudo_collate

    def setup(self, stage: str | None = None) -> None:
        """Check everything on disk and build the datasets; later calls do nothing."""
        require_package(self.package)
        super().setup(stage)

    def predict_only(self, class_names: Sequence[str], category_ids: Sequence[int] = ()) -> None:
        """Know the classes from elsewhere and serve prediction, so that no data set is needed."""
        require_package(self.package)
        super().predict_only(class_names, category_ids)

    def wrap(self, dataset: Any) -> SeededDataset:
        """Make the samples of a toolkit's dataset depend on the run's seed only."""
        return self.seeded(dataset, partial(image_path, dataset))

    def test_steps(self, *, annotated: bool = True) -> list[Step]:
        """The evaluation pipeline; annotations keep the original size, as in the toolkits."""
        resize, masks = self.resized(self.scale), self.masks(annotated=annotated)
        return [StrictImage(self.scale, self.maps), resize, *masks, self.packed()]

    def view_steps(self, *, annotated: bool = True) -> list[Step]:
        """The pipeline of tests: ``test_steps``, or with views each field as a list of them."""
        from mmcv.transforms import TestTimeAug

        if not self.has_views:
            return self.test_steps(annotated=annotated)
        long, short = self.scale
        sizes = [(round(long * f), round(short * f)) for f in self.test_scales]
        choices: list[list[Step]] = [[self.resized(size) for size in sizes]]
        choices.append([self.flipped(False), self.flipped(True)][: 1 + self.test_flip])
        choices += [[step] for step in self.masks(annotated=annotated)]
        first = StrictImage(self.smallest_scale, self.maps)
        return [first, TestTimeAug([*choices, [self.packed()]])]

    def resized(self, scale: Size) -> Step:
        """The step that resizes an image into a longest and a shortest edge."""
        raise NotImplementedError

    def flipped(self, flip: bool) -> Step:
        """Return the step that flips an image, or notes that it does not."""
        return Flip(flip)

    def masks(self, *, annotated: bool) -> list[Step]:
        """The step of an evaluation that reads the annotations, if there are any."""
        raise NotImplementedError

    def packed(self) -> Step:
        """The last step."""
        raise NotImplementedError

    def test_dataloader(self) -> DataLoader[Any]:
        """The validation batches, with several views of each image if tests are to have them."""
        return self._viewed_loader() if self.has_views else super().test_dataloader()

    def predict_dataloader(self) -> DataLoader[Any]:
        """Batches of ``predict_path``, or those of a test."""
        if self.has_views and "predict" not in self._datasets:
            return self._viewed_loader()
        return super().predict_dataloader()

    def preview_batch(self, count: int) -> Any:
        """A batch of up to ``count`` samples to draw, of several views the first one."""
        batch = super().preview_batch(count)
        several = isinstance(batch["inputs"][0], Sequence)
        return {key: value[0] for key, value in batch.items()} if several else batch

    def _viewed_loader(self) -> DataLoader[Any]:
        dataset: Any = self.dataset("val").dataset
        return self._eval_loader_of(self.wrap(Viewed(dataset, self.view_steps())))

    def unlabelled(self, image: Image.Image, name: str, index: int) -> Results:
        """The sample of an image to predict, by the evaluation pipeline."""
        return self._unlabelled({"image": image, "img_path": name, "img_id": index})

    @cached_property
    def _unlabelled(self) -> Pipeline:
        return Pipeline(self.view_steps(annotated=False))


class Viewed:
    """The samples of a toolkit's dataset by another pipeline."""

    def __init__(self, dataset: Any, steps: Sequence[Step]) -> None:
        self.get_data_info = dataset.get_data_info
        self.length, self.pipeline = len(dataset), Pipeline(steps)

    def __len__(self) -> int:
        """Samples in the dataset."""
        return self.length

    def __getitem__(self, index: int) -> Results:
        """The sample of an index."""
        return self.pipeline(self.get_data_info(index))


def image_path(dataset: Any, index: int) -> str:
    """The file of a sample of one of mmengine's datasets."""
    return str(dataset.get_data_info(index)["img_path"])


def require_package(name: str) -> None:
    """Raise an ``ImportError`` that says what to do unless the package can be imported."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # Of optional parts that it does not find.
            importlib.import_module(name)
    except ImportError as error:
        if error.name == MMCV_OPERATORS:
            raise ImportError(
                f"{name} needs mmcv's operators; put `import heads` before this, which brings them"
            ) from error
        raise ImportError(
            f"this task needs {name}, which cannot be imported ({error}); "
            "`make install` installs it"
        ) from error


def palette(count: int) -> list[tuple[int, int, int]]:
    """That many distinct RGB colours; neighbours in the list differ in hue."""
    golden = 0.618034  # Steps of the golden ratio spread any number of hues.
    colours = [
        colorsys.hsv_to_rgb(index * golden % 1, 0.75, 0.95 - 0.3 * (index % 2))
        for index in range(count)
    ]
    return [
        (round(255 * red), round(255 * green), round(255 * blue)) for red, green, blue in colours
    ]


def size_of(name: str, value: int | Sequence[int]) -> Size:
    """A size given as one number or as a pair."""
    edges = [value, value] if isinstance(value, int | float) else value
    pair = whole_list(f"data.{name}", edges)
    if len(pair) != 2 or min(pair) < 1:
        raise ValueError(
            f"data.{name}={value} is no size; give one number or two, such as [1333,800]"
        )
    return pair
