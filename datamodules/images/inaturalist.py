"""iNaturalist 2019 from its json files, which define the classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from datamodules.base import Split
from datamodules.files.folders import first_few, require_names
from datamodules.files.text_files import FolderNames, Name, normalise_path, read_json
from datamodules.files.values import Integer, Text, file_errors
from datamodules.images.classification import ImageFiles
from datamodules.images.image_folder import ImageFolderDataModule
from datamodules.images.transforms import Transform
from datamodules.loading.sampling import SeededDataset

FILES = {"train": "train2019.json", "val": "val2019.json"}


@with_config(extra="allow")
class Category(TypedDict):
    """Species of a json file."""

    id: Integer
    name: Name


@with_config(extra="allow")
class Photograph(TypedDict):
    """Image of a json file."""

    id: Integer
    file_name: Text


@with_config(extra="allow")
class Annotation(TypedDict):
    """Species of an image."""

    image_id: Integer
    category_id: Integer


@with_config(extra="allow")
class SplitFile(TypedDict):
    """Content of a json file; those of test images lack annotations."""

    categories: list[Category]
    images: Annotated[list[Photograph], Field(min_length=1)]
    annotations: list[Annotation]


SPLIT_FILE = TypeAdapter(SplitFile)


class INaturalist2019DataModule(ImageFolderDataModule):
    """The species of iNaturalist 2019, ordered by the json files' category ids.

    Layout: ``train2019.json``, ``val2019.json`` and ``train_val2019/<kingdom>/<id>/*.jpg``.

    Source: https://github.com/visipedia/inat_comp/tree/master/2019

    The ids differ from the alphabetical order of the folders, so the json decides. Class names are
    the categories', or their ids if several share a name.

    Args:
        root: Folder that holds train2019.json, val2019.json and train_val2019.
        num_classes: Expected number of categories; None accepts any.
        **options: Options of ``ClassificationDataModule``.
    """

    layout = (
        "train2019.json, val2019.json and the images that they name, train_val2019/<kingdom>/<id>/*"
    )
    takes_maps = False
    example = "data=inaturalist2019 data.root=/data/inaturalist2019"
    _shared: Sequence[str] = ()

    def build(self) -> dict[Any, SeededDataset]:
        """Read both files and check them against each other and the images' folders."""
        if self.train_share != 1 or self.class_order != "text":
            raise ValueError(
                "data.train_share and data.class_order need class folders; leave them out"
            )
        self.class_order = None
        content = {split: read_split(self.folder / name) for split, name in FILES.items()}
        categories = content["train"]["categories"]
        if content["val"]["categories"] != categories:
            raise ValueError(
                f"{self.folder}: {FILES['train']} and {FILES['val']} have different categories; "
                "take both from one release"
            )
        ids = sorted(categories)
        names = [categories[number] for number in ids]
        self.class_names = tuple(names if len(set(names)) == len(names) else map(str, ids))
        self.category_ids = tuple(ids)
        self.check_count(self.folder / FILES["train"], "categories")
        train, val = (map(normalise_path, content[split]["files"].values()) for split in FILES)
        self._shared = sorted(set(train) & set(val))
        label_of = {number: label for label, number in enumerate(ids)}
        make = self.augmentation
        transforms: dict[Split, Transform] = {
            "train": make.train(self.image_size),
            "val": make.eval(self.image_size),
        }
        return {
            split: self._labelled(content[split], label_of, transform)
            for split, transform in transforms.items()
        }

    def notices(self, checked: Mapping[Split, int]) -> list[str]:
        """Return the notices, including validation images that are training images."""
        lines = super().notices(checked)
        if self._shared:
            lines.append(
                f"{len(self._shared):,} of {len(self.dataset('val')):,} validation images are also "
                f"training images, which raises accuracy: {first_few(self._shared, 2)}"
            )
        return lines

    def _labelled(
        self, content: dict[str, Any], label_of: dict[int, int], transform: Transform
    ) -> SeededDataset:
        files, labels = content["files"], content["labels"]
        images = sorted(files)
        on_disk = FolderNames(self.folder)
        paths = {image: on_disk.find(files[image]) for image in images}
        require_names(
            [files[image] for image in images if paths[image] is None],
            "images of the json file do not exist",
            "unpack the whole archive of the images beside it",
        )
        dataset = ImageFiles(
            self.folder,
            [name for name in paths.values() if name is not None],
            [label_of[labels[image]] for image in images],
            transform,
        )
        return self.seeded(dataset, dataset.path)


def read_split(path: Path) -> dict[str, Any]:
    """Read a json file.

    Returns:
        ``categories``, names by id; ``files``, image names by id; ``labels``, the category of each
        image by the image's id.

    Raises:
        ValueError: The json is invalid, lacks keys, or has images without one known category.
        FileNotFoundError: The file does not exist.
    """
    with file_errors(path):
        content = SPLIT_FILE.validate_python(read_json(path))
    categories = {entry["id"]: entry["name"] for entry in content["categories"]}
    files = {entry["id"]: entry["file_name"] for entry in content["images"]}
    labels = {entry["image_id"]: entry["category_id"] for entry in content["annotations"]}
    names = {number: normalise_path(name) for number, name in files.items()}
    annotated = Counter(entry["image_id"] for entry in content["annotations"])
    faults = {
        "duplicate ids of categories": _repeated(entry["id"] for entry in content["categories"]),
        "duplicate ids of images": _repeated(entry["id"] for entry in content["images"]),
        "the same file under two image ids": _repeated(names.values()),
        "images without one annotation of a known category": [
            number
            for number in {**files, **labels}
            if annotated[number] != 1 or number not in files or labels[number] not in categories
        ],
        "files outside its folder": [
            name for name in names.values() if name.split("/")[0] in ("", "..")
        ],
    }
    for fault, places in faults.items():
        if places:
            raise ValueError(f"{path} has {fault}: {first_few(places)}; correct them")
    return {"categories": categories, "files": files, "labels": labels}


def _repeated(values: Iterable[Any]) -> list[Any]:
    return [value for value, count in Counter(values).items() if count > 1]
