"""iNaturalist 2019 from its json files: classes are categories, whatever folders are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datamodules.base import Split
from datamodules.files import first_few, require_names
from datamodules.files.json_entries import Values, check_entries, name_value, text_value
from datamodules.files.text_files import FolderNames, read_json, same_file
from datamodules.files.whole_numbers import whole_number
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
    "categories": {"id": whole_number, "name": name_value},
    "images": {"id": whole_number, "file_name": text_value},
    "annotations": {"image_id": whole_number, "category_id": whole_number},
}


class INaturalist2019DataModule(ImageFolderDataModule):
    """The species of iNaturalist 2019, in the order of the json files' category ids.

    The ids are not the alphabetical order of the folders, so the json decides. Names of classes are
    the categories', or their ids where several share a name.

    Args:
        root: Folder that holds train2019.json, val2019.json and train_val2019.
        num_classes: Expected number of categories; None accepts any.
        **options: Of ``ClassificationDataModule``.
    """

    layout = (
        "train2019.json, val2019.json and the images that they name, train_val2019/<kingdom>/<id>/*"
    )
    takes_maps = False
    example = "data=inaturalist2019 data.root=/data/inaturalist2019"
    _shared: Sequence[str] = ()

    def build(self) -> dict[Any, SeededDataset]:
        """Read both files, check them against each other and against the images' folders."""
        if self.train_share != 1:
            raise ValueError("data.train_share is for class folders; leave it out")
        if self.class_order != "text":
            raise ValueError("data.class_order is for class folders; leave it out")
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
        if self.expected_classes not in (None, len(ids)):
            raise ValueError(
                f"{self.folder / FILES['train']} has {len(ids)} categories but data.num_classes is "
                f"{self.expected_classes}; iNaturalist 2019 has 1010, null accepts any number"
            )
        train, val = (map(same_file, content[split]["files"].values()) for split in FILES)
        self._shared = sorted(set(train) & set(val))
        label_of = {number: label for label, number in enumerate(ids)}
        make = self.augmentation
        transforms: dict[Split, Transform] = {
            "train": make.train(self.image_size),
            "val": make.eval(self.image_size),
        }
        return {
            split: self._listed(content[split], label_of, transform)
            for split, transform in transforms.items()
        }

    def notices(self, looked: Mapping[Split, int]) -> list[str]:
        """Training images that validate, too."""
        lines = super().notices(looked)
        if self._shared:
            lines.append(
                f"{len(self._shared):,} of {len(self.dataset('val')):,} validation images are "
                f"training images, too, which raises accuracy: {first_few(self._shared, 2)}"
            )
        return lines

    def _listed(
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
    """What a json file says.

    Returns:
        ``categories``, names by id; ``files``, names of images by id; ``labels``, the category of
        each image by its id.

    Raises:
        ValueError: No json, keys are missing, or images without exactly one known category.
        FileNotFoundError: There is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"no file {path}; iNaturalist 2019 has {INaturalist2019DataModule.layout}"
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
            raise ValueError(f"{path} has duplicates among the ids of {kind}: {twice}")
    categories = dict(zip(category_ids, names, strict=True))
    files = dict(zip(image_ids, photographs, strict=True))
    _refuse_repeated_photographs(path, files)
    pairs = list(zip(labelled, given, strict=True))
    labels = dict(pairs)
    wrong = [image for image, category in pairs if image not in files or category not in categories]
    wrong += [image for image in files if image not in labels]
    if wrong or len(labels) != len(pairs):
        named = first_few(wrong) if wrong else "some have two"
        raise ValueError(f"{path}: each image needs one annotation of a known category: {named}")
    if not files:
        raise ValueError(f"{path} names no images; the test file has no labels, take {FILES}")
    outside = [name for name in files.values() if same_file(name).split("/")[0] in ("", "..")]
    if outside:
        raise ValueError(f"{path} names files outside of its folder: {first_few(outside)}")
    return {"categories": categories, "files": files, "labels": labels}


def _refuse_repeated_photographs(path: Path, files: Mapping[int, str]) -> None:
    ids: dict[str, int] = {}
    for number, name in files.items():
        first = ids.setdefault(same_file(name), number)
        if first != number:
            raise ValueError(
                f"{path} lists the same photograph under two image ids: {name} (ids {first} and "
                f"{number}); keep one of them"
            )
