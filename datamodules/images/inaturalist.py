"""iNaturalist 2019 from its json files, which define the classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datamodules.base import Split
from datamodules.files.folders import first_few, require_names
from datamodules.files.integers import integer_value
from datamodules.files.json_entries import Values, check_entries, name_value, text_value
from datamodules.files.text_files import FolderNames, normalise_path, read_json
from datamodules.images.classification import ImageFiles
from datamodules.images.image_folder import ImageFolderDataModule
from datamodules.images.transforms import Transform
from datamodules.loading.sampling import SeededDataset

FILES = {"train": "train2019.json", "val": "val2019.json"}
REQUIRED = {
    "categories": ("id", "name"),
    "images": ("id", "file_name"),
    "annotations": ("image_id", "category_id"),
}
VALUES: Values = {
    "categories": {"id": integer_value, "name": name_value},
    "images": {"id": integer_value, "file_name": text_value},
    "annotations": {"image_id": integer_value, "category_id": integer_value},
}


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
        if self.train_share != 1:
            raise ValueError("data.train_share needs class folders; leave it out")
        if self.class_order != "text":
            raise ValueError("data.class_order needs class folders; leave it out")
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
        found = {image: on_disk.find(files[image]) for image in images}
        require_names(
            [files[image] for image in images if found[image] is None],
            "images of the json file do not exist",
            "unpack the whole archive of the images beside it",
        )
        dataset = ImageFiles(
            self.folder,
            [name for name in found.values() if name is not None],
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
    if not path.is_file():
        raise FileNotFoundError(
            f"file {path} does not exist; iNaturalist 2019 has {INaturalist2019DataModule.layout}"
        )
    content = check_entries(path, read_json(path), REQUIRED, VALUES, "iNaturalist's files")
    category_ids, image_ids, labelled, given = (
        [one[key] for one in content[kind]]
        for kind, key in (
            ("categories", "id"),
            ("images", "id"),
            ("annotations", "image_id"),
            ("annotations", "category_id"),
        )
    )
    names = [one["name"] for one in content["categories"]]
    photographs = [one["file_name"] for one in content["images"]]
    for kind, numbers in (("categories", category_ids), ("images", image_ids)):
        if len(set(numbers)) < len(numbers):
            twice = first_few(number for number, count in Counter(numbers).items() if count > 1)
            raise ValueError(f"{path} has duplicate ids of {kind}: {twice}")
    categories = dict(zip(category_ids, names, strict=True))
    files = dict(zip(image_ids, photographs, strict=True))
    _check_repeated_files(path, files)
    pairs = list(zip(labelled, given, strict=True))
    labels = dict(pairs)
    wrong = [image for image, category in pairs if image not in files or category not in categories]
    wrong += [image for image in files if image not in labels]
    if wrong or len(labels) != len(pairs):
        named = first_few(wrong) if wrong else "some have two"
        raise ValueError(f"{path}: each image needs one annotation of a known category: {named}")
    if not files:
        raise ValueError(f"{path} lacks images; test files lack labels, pass {FILES}")
    outside = [name for name in files.values() if normalise_path(name).split("/")[0] in ("", "..")]
    if outside:
        raise ValueError(f"{path} names files outside its folder: {first_few(outside)}")
    return {"categories": categories, "files": files, "labels": labels}


def _check_repeated_files(path: Path, files: Mapping[int, str]) -> None:
    ids: dict[str, int] = {}
    for number, name in files.items():
        first = ids.setdefault(normalise_path(name), number)
        if first != number:
            raise ValueError(
                f"{path} lists the same file under two image ids: {name} (ids {first} and "
                f"{number}); keep one of them"
            )
