"""Label maps of training images, which follow the augmentation of the image.

A label map is a file ``<folder>/<class>/<image>.pt`` with a tensor (2, T, h, w), float16 or
float32. For each cell of an h x w grid over the image it has the scores of the T best classes and
their numbers. This is the format of the published maps (``label_top5_train_nfnet``: T = 5,
18 x 18). ``tools/annotate.py`` makes others and lists their classes in ``classes.json``.

Source: Jiang et al., "All Tokens Matter: Token Labeling for Training Better Vision Transformers",
NeurIPS 2021, https://arxiv.org/abs/2104.10858.
"""

from __future__ import annotations

import functools
import json
import math
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from PIL import Image
from pydantic import TypeAdapter
from timm.data import auto_augment
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch import Tensor
from torchvision.transforms import RandomHorizontalFlip

from datamodules.files.decoding import load_rgb, plain_file
from datamodules.files.folders import require_folder, require_names
from datamodules.files.text_files import FolderNames, nfc, read_json
from datamodules.files.values import check_option, file_errors, refuse
from datamodules.images.classification import Boxes, ImageFiles, Sample, make_sample
from datamodules.images.transforms import PaperAugmentation, augment_ops
from datamodules.loading.memory import format_bytes

NAMES = TypeAdapter(list[str])
CLASSES = "classes.json"  # beside label maps: the class names in label order
DTYPES = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int16,
    torch.int32, torch.int64,
}  # fmt: skip
MOST_BYTES = 100_000_000  # of an unpacked label map; the published ones take 6,480
Matrix = tuple[float, float, float, float, float, float]  # x = a x' + b y' + c, y = d x' + e y' + f


class LabelledTransform:
    """Training transform of an image and its label map.

    Flip and policy come first and move the map as well, by nearest neighbour. The crop comes last
    and is returned as a box, which the loss cuts out of the map.

    Args:
        augmentation: Augmentation of the images.
        size: Side of the images in pixels.
        folder: Folder of the label maps.
        boxes: "image" is the true box of the crop. "released" swaps rows and columns of the box,
            as the code that LVT and others were trained with does.

    Raises:
        ValueError: The augmentation makes changes that a map cannot follow.
    """

    def __init__(
        self, augmentation: Any, size: int, folder: str | Path, boxes: Boxes = "image"
    ) -> None:
        policy = getattr(augmentation, "auto_augment", None) or ""
        fits = isinstance(augmentation, PaperAugmentation) and not policy.startswith("augmix")
        rule = (
            "PaperAugmentation without augmix for label maps, which follow random crops, flips, "
            "RandAugment and AutoAugment only: pass "
            "data.augmentation._target_=datamodules.images.transforms.PaperAugmentation, or "
            "data.token_labels=null"
        )
        check_option("augmentation", type(augmentation).__name__, fits, rule)
        self.folder, self.boxes = Path(folder).expanduser(), boxes
        self.flip = augmentation.flip
        self.crop: Any = None
        self.policy: list[Any] = []
        self.rest: list[Any] = []
        tensor: Any = augmentation.train(size)
        for part in tensor.transforms:
            if isinstance(part, RandomResizedCropAndInterpolation):
                self.crop = part
            elif isinstance(part, RandomHorizontalFlip):
                continue
            elif self.crop is not None and not self.rest and any(True for _ in augment_ops(part)):
                self.policy.append(part)
            else:
                self.rest.append(part)
        for part in self.policy:
            op: Any
            for op in augment_ops(part):
                if op.aug_fn in MOVES:
                    op.aug_fn = functools.partial(self._record_move, op.aug_fn)
        self.crop.get_params = self._record_crop
        self._moves: list[Matrix] = []
        self._box: tuple[float, float, float, float] = (0, 0, 1, 1)

    def __call__(self, image: Image.Image, label_map: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the image (3, size, size), its label map (2, T, h, w) and the crop's box (4,)."""
        if self.flip and torch.rand(1) < self.flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            label_map = label_map.flip(-1)
        self._moves = []
        for part in self.policy:
            image = part(image)
        for matrix in self._moves:
            label_map = move_map(label_map, matrix)
        tensor: Any = self.crop(image)
        for part in self.rest:
            tensor = part(tensor)
        return tensor, label_map, torch.tensor(self._box)

    def _record_move(
        self, function: Callable[..., Any], image: Image.Image, *args: Any, **more: Any
    ) -> Any:
        self._moves.append(MOVES[function](*image.size, *args))
        return function(image, *args, **more)

    def _record_crop(self, image: Image.Image, *ranges: Any) -> tuple[int, int, int, int]:
        params: tuple[int, int, int, int] = type(self.crop).get_params(image, *ranges)
        top, x_min, height, width = params
        box = (
            x_min / image.width,
            top / image.height,
            (x_min + width) / image.width,
            (top + height) / image.height,
        )
        self._box = (box[1], box[0], box[3], box[2]) if self.boxes == "released" else box
        return params


def _shear_x(width: int, height: int, factor: float) -> Matrix:
    return (1, factor * height / width, 0, 0, 1, 0)


def _shear_y(width: int, height: int, factor: float) -> Matrix:
    return (1, 0, 0, factor * width / height, 1, 0)


def _translate_x(width: int, height: int, share: float) -> Matrix:
    return (1, 0, share, 0, 1, 0)


def _translate_y(width: int, height: int, share: float) -> Matrix:
    return (1, 0, 0, 0, 1, share)


def _rotate(width: int, height: int, degrees: float) -> Matrix:
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    a, b, d, e = cos, -sin * height / width, sin * width / height, cos
    return (a, b, (1 - a - b) / 2, d, e, (1 - d - e) / 2)


# Source position of each position in the changed image, both as shares of width and height.
MOVES: dict[Any, Callable[..., Matrix]] = {
    auto_augment.shear_x: _shear_x,
    auto_augment.shear_y: _shear_y,
    auto_augment.translate_x_rel: _translate_x,
    auto_augment.translate_y_rel: _translate_y,
    auto_augment.translate_x_abs: lambda w, h, pixels: _translate_x(w, h, pixels / w),
    auto_augment.translate_y_abs: lambda w, h, pixels: _translate_y(w, h, pixels / h),
    auto_augment.rotate: _rotate,
}


def move_map(label_map: Tensor, matrix: Matrix) -> Tensor:
    """Move a label map (2, T, h, w) like its image; cells from outside get scores of 0."""
    a, b, c, d, e, f = matrix
    height, width = label_map.shape[-2:]
    y, x = torch.meshgrid(
        (torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width, indexing="ij"
    )
    columns = ((a * x + b * y + c) * width).floor().long()
    rows = ((d * x + e * y + f) * height).floor().long()
    inside = (columns >= 0) & (columns < width) & (rows >= 0) & (rows < height)
    moved = label_map[..., rows.clamp(0, height - 1), columns.clamp(0, width - 1)]
    return torch.stack([moved[0] * inside, moved[1]])


def write_classes(folder: Path, names: Sequence[str]) -> None:
    """Write the classes of a folder of label maps, in label order.

    Raises:
        ValueError: The folder has label maps of other classes or another order.
    """
    check_map_classes(folder, names)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CLASSES).write_text(json.dumps(list(names), indent=0) + "\n", encoding="utf-8")


def check_map_classes(folder: Path, names: Sequence[str]) -> None:
    """Compare the classes of label maps with the data's, if the folder lists them.

    Raises:
        ValueError: They differ in names or order.
    """
    file = folder / CLASSES
    if not file.is_file():
        return
    with file_errors(file):
        maps = [nfc(name) for name in NAMES.validate_python(read_json(file))]
    faults = {
        f"lists {len(maps)} classes, not the {len(names)} of the data; make label maps with an "
        "annotator of these classes": sorted(maps) != sorted(names),
        "has label maps of these classes in another order; pass the class_order they were made "
        "with, or make them again with tools/annotate.py": maps != list(names),
    }
    refuse(file, faults)


class TokenLabelledFiles(ImageFiles):
    """Dataset of image files with labels and label maps, read on demand.

    Args:
        root: Folder that the names are relative to.
        names: File names, ``<class>/<image>``.
        labels: Label per image.
        transform: Transform of images and label maps.
        class_names: Class names of the data.
    """

    transform: Any

    def __init__(
        self,
        root: Path,
        names: Sequence[str],
        labels: Sequence[int],
        transform: LabelledTransform,
        class_names: Sequence[str],
    ) -> None:
        super().__init__(root, names, labels, cast("Any", transform))
        self.class_names, self.num_classes = tuple(class_names), len(class_names)

    def check(self) -> None:
        """Check that all label maps exist, and read the first.

        Raises:
            FileNotFoundError: The folder or some label maps are missing.
            ValueError: The first label map is invalid, or the classes differ.
        """
        folder = self.transform.folder
        require_folder(folder, "data.token_labels=<folder> holds <class>/<image>.pt")
        check_map_classes(folder, self.class_names)
        on_disk = FolderNames(folder)
        names = [self._map_name(index) for index in range(len(self))]
        missing = [name for name in names if on_disk.find(name) is None]
        require_names(
            missing,
            f"label maps are missing in {folder}",
            "make them with python tools/annotate.py, or pass data.token_labels=null",
        )
        self.label_map(0)

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first label map, which all others must have."""
        return tuple(self._read(self.map_file(0)).shape)

    def map_file(self, index: int) -> Path:
        """Return the file of a sample's label map."""
        folder: Path = self.transform.folder
        name = self._map_name(index)
        return folder / (name if name.isascii() else FolderNames(folder).on_disk(name))

    def _map_name(self, index: int) -> str:
        return str(Path(self.path(index)).relative_to(self.root).with_suffix(".pt"))

    def label_map(self, index: int) -> Tensor:
        """Return the label map (2, T, h, w) of a sample.

        Raises:
            ValueError: The map is invalid, has another shape than the first, or other classes.
        """
        file = self.map_file(index)
        label_map = self._read(file)
        low, high = label_map[1].min().item(), label_map[1].max().item()
        faults = {
            f"is a label map of {tuple(label_map.shape)}, the first one of {self.shape}; make all "
            "with the same annotator and size": tuple(label_map.shape) != self.shape,
            f"has the classes {low:g} to {high:g}, but the data have {self.num_classes}; make "
            "label maps with an annotator of these classes": (
                not 0 <= low <= high < self.num_classes
            ),
        }
        refuse(file, faults)
        return label_map.float()

    @staticmethod
    def _read(file: Path) -> Tensor:
        try:
            size = _unpacked_size(plain_file(file))
            label_map: Any = torch.load(file, weights_only=True) if size <= MOST_BYTES else None
            is_tensor = type(label_map) is Tensor and label_map.layout == torch.strided
            form = f"{size} bytes"
            if is_tensor and label_map.dtype in DTYPES and not label_map.is_meta:
                form = f"{tuple(label_map.shape)} of {label_map.dtype}"
                # A view may repeat one number 10^12 times.
                numbers = label_map.numel() * label_map.element_size()
                if label_map.ndim == 4 and len(label_map) == 2 and numbers:
                    if numbers <= label_map.untyped_storage().nbytes():
                        return label_map
        except Exception as error:  # torch raises all kinds over foreign bytes
            form = type(error).__name__
        raise ValueError(
            f"{file} is not a label map: it must hold a dense tensor (2, T, h, w) of floats or "
            f"integers in at most {format_bytes(MOST_BYTES)}, got {form}; make it again with "
            "tools/annotate.py"
        )

    def __getitem__(self, index: int, /) -> Sample:
        """Return ``image``, ``label``, ``sample_id``, and the label map's part of the loss."""
        image = load_rgb(self.path(index), upright=False)
        tensor, label_map, box = self.transform(image, self.label_map(index))
        return make_sample(tensor, int(self.labels[index]), index) | {
            "token_scores": label_map[0],
            "token_classes": label_map[1].long(),
            "token_box": box,
        }


def _unpacked_size(file: Path) -> int:
    """Return the bytes of a file after unpacking: torch's files are zips, and may be bombs."""
    if not zipfile.is_zipfile(file):
        return file.stat().st_size
    with zipfile.ZipFile(file) as archive:
        return sum(entry.file_size for entry in archive.infolist())
