"""COCO: detection and instance segmentation from a json and folders of images."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from datamodules.annotation_formats.box_exports import AUTO, OWN, Export, Layout, open_export
from datamodules.annotation_formats.coco_boxes import OPTION
from datamodules.annotation_formats.coco_checks import MIN_SIDE, CocoFacts, check_coco, read_coco
from datamodules.annotation_formats.coco_files import WHOLE
from datamodules.annotation_formats.coco_records import Part
from datamodules.annotation_formats.splits import SplitOptions, choose, divide, draw_notice
from datamodules.base import Split, check_range, check_share
from datamodules.dense.toolkit_data import (
    META_KEYS,
    DenseDataModule,
    Packed,
    Size,
    Step,
    StrictImage,
    check_annotated_size,
    check_not_thin,
    parse_size,
)
from datamodules.files.console import log
from datamodules.files.decoding import UPRIGHT
from datamodules.files.folders import first_few, require_folder, require_names
from datamodules.files.headers import read_header
from datamodules.files.values import check_option, refuse
from datamodules.loading.sampling import SeededDataset

TRAIN_ANNOTATIONS = "annotations/instances_train2017.json"
# DETR's sizes for ``train_crops``: longest and shortest edges before cropping, then the smallest
# and largest side of a crop.
BEFORE_CROP = ((1333, 400), (1333, 500), (1333, 600))
CROP = (384, 600)
# ``augmentation=own``: factors of ``scale``, and the least share of a side that a crop keeps.
AUGMENTED, JITTER, LEAST_CROP = "own", (0.6, 1.4), 0.6


class CocoDataModule(DenseDataModule):
    """COCO, or any dataset in its format; the classes are the json's categories, in its order.

    Layout: ``annotations/instances_{train,val}2017.json``, ``train2017/*.jpg`` and
    ``val2017/*.jpg``, or the export of an annotation tool.

    Source: https://cocodataset.org/#format-data

    Args:
        root: Folder that holds annotations and images.
        layout: "coco" for the four paths below, a tool's name for its export (``LAYOUTS``), or
            "auto" to recognise exports where the training json is missing.
        train_split: Split of an export to train with; None for the usual name.
        val_split: Split of an export to validate with; None for the usual name.
        val_share: Share of the training images to validate with, if an export has one split.
        split_seed: Seed of the draw of these images.
        train_annotations: Training json, relative to ``root``.
        train_images: Folder of the training images, relative to ``root``.
        val_annotations: Validation json, relative to ``root``; None draws training images.
        val_images: Folder of the validation images, relative to ``root``.
        scale: Longest and shortest edge after resizing; the aspect ratio is kept.
        train_sizes: Several such sizes; one is drawn per training image.
        train_crops: Crop half of the training images to sides from 384 to 600 before resizing, at a
            short side of 400, 500 or 600. DETR, Sparse R-CNN and Swin train so.
        scale_jitter: Smallest and largest factor of ``scale`` in training.
        flip: Probability of a horizontal flip; digits and letters need 0.
        photometric: Distort brightness, contrast and colour in training.
        augmentation: "own" for small sets of one's own: half of the training images are cropped to
            60 to 100 % of each side, sizes vary by ``JITTER`` unless ``scale_jitter`` is given,
            and colours are distorted. None for the other options alone.
        with_mask: Load instance masks.
        skip_unusable_boxes: Exclude from evaluation the boxes that training excludes, which
            pycocotools counts: without area, smaller than a pixel, outside their image or marked
            ``ignore``. Crowds are unaffected.
        classes: Restrict the dataset to these category names.
        batch_size: Samples per training batch and process.
        **options: Options of ``DenseDataModule``.
    """

    layout = "annotations/instances_train2017.json, instances_val2017.json, train2017/ and val2017/"
    example = "data=coco data.root=/data/coco"
    package = "mmdet.datasets"

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        layout: Layout = AUTO,
        train_split: str | None = None,
        val_split: str | None = None,
        val_share: float = 0.1,
        split_seed: int = 0,
        train_annotations: str = TRAIN_ANNOTATIONS,
        train_images: str = "train2017",
        val_annotations: str | None = "annotations/instances_val2017.json",
        val_images: str = "val2017",
        scale: int | Sequence[int] = (1333, 800),
        train_sizes: Sequence[Sequence[int]] | None = None,
        train_crops: bool = False,
        scale_jitter: Sequence[float] | None = None,
        flip: float = 0.5,
        photometric: bool = False,
        augmentation: Literal["own"] | None = None,
        with_mask: bool = True,
        skip_unusable_boxes: bool = False,
        classes: Sequence[str] | None = None,
        batch_size: int = 2,
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size=batch_size, **options)
        self.chosen_layout = layout
        self.splits = SplitOptions(train_split, val_split, val_share, split_seed)
        self.train_annotations, self.train_images = train_annotations, train_images
        self.val_annotations, self.val_images = val_annotations, val_images
        self.scale = parse_size("scale", scale)
        self.train_sizes = [parse_size("train_sizes", size) for size in train_sizes or []]
        self.train_crops = train_crops
        self.crops = augmentation == AUGMENTED
        rule = "null beside data.train_sizes, which have their own crops: data.train_crops"
        check_option("augmentation", augmentation, not (self.crops and train_sizes), rule)
        scale_jitter = scale_jitter or (JITTER if self.crops else None)
        self.scale_jitter = check_range("scale_jitter", scale_jitter) if scale_jitter else None
        self.flip = check_share("flip", flip)
        self.photometric, self.with_mask = photometric or self.crops, with_mask
        self.skip_unusable_boxes = skip_unusable_boxes
        self._facts: dict[Split, CocoFacts] = {}
        self._rotated: dict[Split, set[str]] = {}
        self._annotations_of_val: Mapping[str, Any] = {}
        self._train: Part | None = None
        self._val: Part | None = None
        self.classes = None if classes is None else tuple(classes)
        self.check_scales(self.scale, *self.train_sizes, factors=self.scale_jitter or ())
        rule = "null beside data.train_sizes"
        check_option("scale_jitter", scale_jitter, not (train_sizes and scale_jitter), rule)
        rule = "false without data.train_sizes=[[1333,640],[1333,800]] or other sizes"
        check_option("train_crops", train_crops, not train_crops or train_sizes, rule)

    @property
    def annotations(self) -> Mapping[str, Any]:
        """Content of the validation json, for evaluators; known after ``setup``.

        Raises:
            AttributeError: The validation set is missing, as in prediction.
            ValueError: No box counts in AP, as with test-dev's file.
        """
        if "val" not in self._facts or self._val is None:
            raise AttributeError("annotations are known after setup()")
        if len(self._facts["val"].absent) == self.num_classes:
            count_empty = not self._annotations_of_val["annotations"]
            content = (
                "no annotations"
                if count_empty
                else f"no box of {first_few(self.class_names)} in AP"
            )
            skipped = f" without {self.left_out}" if self.left_out else ""
            rule = (
                f"has {content}{skipped}: its images can only be predicted (mode=predict), such as "
                "for a benchmark's server; pass annotated images to test or validate"
            )
            raise ValueError(f"{self._val.source} {rule}")
        return self._annotations_of_val

    def build(self) -> dict[Any, SeededDataset]:
        """Check both annotation files and wrap mmdet's datasets."""
        self._train, self._val = self._parts()
        self._drop_supercategory()
        train_content, val_content = self._train.content, self._val.content
        train = self._check(self._train, training=True)
        val = self._check(self._val, training=False)
        names = [part.source.relative_to(self.folder) for part in (self._train, self._val)]
        rule = (
            f"{names[0]} and {names[1]} must have the same categories in the same order, got "
            f"{list(train.class_names)} and {list(val.class_names)}"
        )
        refuse(f"{self.folder}:", {rule: train.class_names != val.class_names})
        self.class_names, self.category_ids = val.class_names, val.category_ids
        self._facts = {"train": train, "val": val}
        if self.skip_unusable_boxes and val_content["annotations"]:
            val_content = drop_annotations(val_content, val.unusable)
            skipped = f"{len(val.unusable):,} of {val.num_boxes:,} validation boxes"
            self.left_out = f"{skipped} ({OPTION})"
        self._annotations_of_val = val_content
        train_content = mark_ignored(train_content, train.unusable)
        return {
            "train": self.wrap(
                self._coco(train_content, self._train.images, self.train_steps(), False)
            ),
            "val": self.wrap(self._coco(val_content, self._val.images, self.test_steps(), True)),
        }

    def image_sizes(self) -> list[Size]:
        """Return widths and heights of the training images, from the annotations."""
        assert self._train is not None, "call setup() first"
        return [(image["width"], image["height"]) for image in self._train.content["images"]]

    def predict_only(self, class_names: Sequence[str], category_ids: Sequence[int] = ()) -> None:
        """Set the classes and serve prediction alone, without reading a dataset."""
        if not category_ids:
            log("The checkpoint lacks category ids; results number the classes from 1")
            category_ids = range(1, len(class_names) + 1)
        super().predict_only(class_names, category_ids)

    def file_check(self, split: Split) -> Callable[[int], None]:
        """Return a check of an image's header, end and annotated size."""
        dataset: Any = self.dataset(split).dataset
        self._rotated[split] = set()

        def check(index: int) -> None:
            info = dataset.get_data_info(index)
            header = read_header(info["img_path"], upright=True)
            size = (header.width, header.height)
            if header.orientation != UPRIGHT:
                self._rotated[split].add(info["img_path"])
            check_annotated_size(info["img_path"], size, (info["width"], info["height"]))
            scale = self.smallest_train_scale if split == "train" else self.scale
            check_not_thin(info["img_path"], size, scale)

        return check

    def notices(self, checked: Mapping[Split, int]) -> list[str]:
        """Return notices of excluded, shared or rotated images, and of classes without boxes."""
        lines = super().notices(checked)
        train, val = self._facts["train"], self._facts["val"]
        count_empty = train.num_images - train.num_boxed
        if count_empty:
            lines.append(
                f"{count_empty:,} of {train.num_images:,} training images lack boxes of these "
                "classes and are excluded"
            )
        if train.num_small:
            lines.append(
                f"{train.num_small:,} of {train.num_images:,} training images have a side below "
                f"{MIN_SIDE} pixels and are excluded; validation keeps such images"
            )
        for facts, split, effect in (
            (train, "training", "are excluded from training"),
            (val, "validation", "are ignored in AP"),
        ):
            if facts.num_crowds:
                lines.append(
                    f"{facts.num_crowds:,} of {facts.num_boxes:,} {split} boxes are crowds "
                    f"(iscrowd=1) and {effect}"
                )
        shared = sorted(train.files & val.files)
        if shared:
            lines.append(
                f"{len(shared):,} of {val.num_images:,} validation images are also training "
                f"images, which raises AP: {first_few(shared, 2)}"
            )
        rotated = sorted(name for names in self._rotated.values() for name in names)
        if rotated:
            lines.append(
                f"{len(rotated):,} of {sum(checked.values()):,} images are rotated by their EXIF "
                f"data ({first_few(rotated, 3)}), and boxes must fit the rotated images; if they "
                "fit the pixels as stored, remove the orientation (exiftool -Orientation= FILE)"
            )
        return lines + self.absent_notice(val.absent)

    @property
    def smallest_train_scale(self) -> Size:
        """Smallest longest and shortest edge of training images after resizing."""
        if self.train_sizes:
            longs, shorts = zip(*((max(size), min(size)) for size in self.train_sizes), strict=True)
            return min(longs), min(shorts)
        factor = min(self.scale_jitter or (1.0,))
        return round(self.scale[0] * factor), round(self.scale[1] * factor)

    def train_steps(self) -> list[Step]:
        """Return the steps of the training pipeline."""
        from mmcv.transforms import RandomApply, RandomChoice, RandomChoiceResize, RandomResize
        from mmdet.datasets import transforms

        # A class is passed because the name "Resize" builds mmcv's, which skips masks.
        keep: dict[str, Any] = {"resize_type": transforms.Resize, "keep_ratio": True}
        resize: Step = transforms.Resize(scale=self.scale, keep_ratio=True)
        if self.train_sizes:
            resize = RandomChoiceResize(scales=self.train_sizes, **keep)
            if self.train_crops:
                smaller = RandomChoiceResize(scales=list(BEFORE_CROP), **keep)
                crop = transforms.RandomCrop(CROP, "absolute_range", allow_negative_crop=True)
                resize = RandomChoice([[resize], [smaller, crop, resize]])
        elif self.scale_jitter:
            resize = RandomResize(scale=self.scale, ratio_range=self.scale_jitter, **keep)
        steps: list[Step] = [StrictImage(self.smallest_train_scale), self._annotations()]
        if self.crops:
            shares = (LEAST_CROP, LEAST_CROP)
            crop = transforms.RandomCrop(shares, "relative_range", allow_negative_crop=True)
            steps.append(RandomApply([crop], prob=0.5))
        steps.append(resize)
        if self.flip:
            steps.append(transforms.RandomFlip(prob=self.flip))
        if self.photometric:
            steps.append(transforms.PhotoMetricDistortion())
        return [*steps, Packed(transforms.PackDetInputs())]

    def resize_step(self, scale: Size) -> Step:
        """Return the step that resizes an image to a longest and a shortest edge."""
        from mmdet.datasets import transforms

        step: Step = transforms.Resize(scale=scale, keep_ratio=True)
        return step

    def annotation_steps(self, *, annotated: bool) -> list[Step]:
        """Return the step of evaluation that reads boxes and masks; [] if not ``annotated``."""
        return [self._annotations()] if annotated else []

    def pack_step(self) -> Step:
        """Return the last step, which packs a sample."""
        from mmdet.datasets import transforms

        flips = ("flip", "flip_direction") if self.has_views else ()
        return Packed(transforms.PackDetInputs(meta_keys=(*META_KEYS, *flips)))

    def _annotations(self) -> Step:
        from mmdet.datasets.transforms import LoadAnnotations

        step: Step = LoadAnnotations(with_bbox=True, with_mask=self.with_mask)
        return step

    @property
    def annotations_digest(self) -> str | None:
        """Hash of the validation annotations: of the file, or of an export's content."""
        if self._val is None:
            return None
        if self._val.source == self.folder / str(self.val_annotations):
            return hashlib.sha256(self._val.source.read_bytes()).hexdigest()
        return self._val.digest()

    @property
    def train_annotations_digest(self) -> str | None:
        """Hash of the training annotations' content."""
        return None if self._train is None else self._train.digest()

    def _parts(self) -> tuple[Part, Part]:
        """Return the training and the validation part, from COCO's own paths or an export."""
        export = self._export()
        if export is not None:
            return self._export_parts(export)
        rule = (
            "data.train_split and data.val_split need an export; pass data.train_annotations and "
            "data.val_annotations"
        )
        refuse("data.layout=coco:", {rule: bool(self.splits.train or self.splits.val)})
        train = self._read_part(self.train_annotations, self.train_images)
        if self.val_annotations is None:
            return self._draw_val(train, str(self.folder / self.train_annotations))
        return train, self._read_part(self.val_annotations, self.val_images, annotated=False)

    def _export(self) -> Export | None:
        """Return the export in the folder; None for COCO's own paths."""
        if self.chosen_layout == OWN:
            return None
        paths = (self.train_annotations, str(self.val_annotations))
        has_name = self.train_annotations != TRAIN_ANNOTATIONS
        if self.chosen_layout == AUTO and (
            has_name or any((self.folder / name).is_file() for name in paths)
        ):
            return None
        return open_export(self.folder, self.chosen_layout)

    def _export_parts(self, export: Export) -> tuple[Part, Part]:
        choice = choose(list(export.parts), self.splits, export.title)
        unused = first_few(choice.unused)
        remark = f"; unused: {unused} (data.val_split=<name> validates with it)" if unused else ""
        train = export.parts[choice.train]()
        if choice.val is None:
            name = "" if choice.train == WHOLE else f", {choice.train}"
            return self._draw_val(train, f"{export.title}{name}", remark)
        val = export.parts[choice.val]()
        log(
            f"{export.title}: {len(train.content['images'])} training images in {choice.train}, "
            f"{len(val.content['images'])} validation images in {choice.val}{remark}"
        )
        return train, val

    def _draw_val(self, part: Part, title: str, remark: str = "") -> tuple[Part, Part]:
        train, val = divide(part.content, self.splits, title)
        notice = draw_notice(len(val["images"]), len(part.content["images"]), self.splits)
        log(f"{title}: {notice}{remark}")
        return replace(part, content=train), replace(part, content=val)

    def _drop_supercategory(self) -> None:
        """Drop category 0, which Roboflow sets as the parent of all others and leaves unused."""
        assert self._train is not None
        assert self._val is not None
        contents = [self._train.content, self._val.content]
        name = unused_supercategory(contents)
        if name is None or name in (self.classes or ()):
            return
        categories = [[entry for entry in c["categories"] if entry["id"] != 0] for c in contents]
        self._train = replace(self._train, content={**contents[0], "categories": categories[0]})
        self._val = replace(self._val, content={**contents[1], "categories": categories[1]})
        log(
            f"Category 0, {name!r}, is skipped: it lacks annotations and is the supercategory of "
            "all others"
        )

    def _read_part(self, annotations: str, images: str, *, annotated: bool = True) -> Part:
        require_folder(self.folder / images, f"a COCO folder has {self.layout}")
        source = self.folder / annotations
        require_names(
            [] if source.is_file() else [str(source)],
            "annotation file does not exist",
            "set data.train_annotations and data.val_annotations relative to data.root",
        )
        return Part(source, self.folder / images, read_coco(source, annotated=annotated))

    def _check(self, part: Part, *, training: bool) -> CocoFacts:
        return check_coco(
            part.content,
            part.source,
            part.images,
            self.classes,
            with_mask=self.with_mask,
            training=training,
            skip_unusable=self.skip_unusable_boxes,
            labels=part.labels,
        )

    def _coco(
        self, content: Mapping[str, Any], images: Path, steps: list[Step], test_mode: bool
    ) -> Any:
        from mmdet.datasets import CocoDataset

        dataset = CocoDataset(
            data_prefix={"img": str(images)},
            metainfo=self.metainfo,
            filter_cfg={"filter_empty_gt": True, "min_size": MIN_SIDE},
            pipeline=steps,
            test_mode=test_mode,
            lazy_init=True,
        )
        # Avoids that mmdet reads the file a second time.
        dataset.COCOAPI = lambda path: build_index(content)
        dataset.full_init()
        del dataset.COCOAPI
        return dataset


def unused_supercategory(contents: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the name of an unused category 0 that is the parent of all others; else None."""
    names = set()
    for content in contents:
        roots = [entry for entry in content["categories"] if entry["id"] == 0]
        rest = [entry for entry in content["categories"] if entry["id"] != 0]
        used = any(entry["category_id"] == 0 for entry in content["annotations"])
        if len(roots) != 1 or not rest or used:
            return None
        name = str(roots[0]["name"])
        if not all(entry.get("supercategory") == name for entry in rest):
            return None
        names.add(name)
    return names.pop() if len(names) == 1 else None


def drop_annotations(content: Mapping[str, Any], unusable: Collection[int]) -> dict[str, Any]:
    """Return the content of a json without the annotations at some positions."""
    annotations = content["annotations"]
    categories = [entry for place, entry in enumerate(annotations) if place not in unusable]
    return {**content, "annotations": categories}


def mark_ignored(content: Mapping[str, Any], unusable: Collection[int]) -> dict[str, Any]:
    """Return the content of a json with some annotations marked as ignored for mmdet."""
    annotations = [
        {**entry, "ignore": 1} if place in unusable else entry
        for place, entry in enumerate(content["annotations"])
    ]
    return {**content, "annotations": annotations}


def build_index(content: Mapping[str, Any]) -> Any:
    """Return annotations as mmdet's ``COCO`` reads them from a file."""
    from mmdet.datasets.api_wrappers import COCO

    coco = COCO()
    coco.dataset = content
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        coco.createIndex()
    coco.img_ann_map, coco.cat_img_map = coco.imgToAnns, coco.catToImgs
    return coco
