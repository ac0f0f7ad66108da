"""COCO: detection and instance segmentation from a json and folders of images."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from datamodules.base import Split, probability, range_of
from datamodules.dense.toolkit_data import (
    META_KEYS,
    DenseDataModule,
    Packed,
    Size,
    Step,
    StrictImage,
    refuse_other_size,
    refuse_thin,
    size_of,
)
from datamodules.files import UPRIGHT, first_few, require_folder
from datamodules.files.console import say
from datamodules.files.headers import read_header
from datamodules.layouts import checked_layout
from datamodules.layouts.box_exports import AUTO, LAYOUTS, OWN, Export, open_export
from datamodules.layouts.coco_boxes import OPTION
from datamodules.layouts.coco_checks import MIN_SIDE, CocoFacts, check_coco, read_coco
from datamodules.layouts.coco_files import WHOLE
from datamodules.layouts.coco_records import Part
from datamodules.layouts.splits import SplitOptions, choose, divided, drawn_notice
from datamodules.loading.sampling import SeededDataset

TRAIN_ANNOTATIONS = "annotations/instances_train2017.json"
# DETR's, for ``train_crops``: longest and shortest edges before cropping, least and largest side of
# a crop.
BEFORE_CROP = ((1333, 400), (1333, 500), (1333, 600))
CROP = (384, 600)


class CocoDataModule(DenseDataModule):
    """Any set in COCO's format; its classes are the json's categories, in the file's order.

    Args:
        root: Folder that holds annotations and images.
        layout: "coco" for the four places below, a tool's name for its export (``LAYOUTS``), or
            "auto" to recognise exports where the training json is missing.
        train_split: Split of an export that trains; None for the one that is called so.
        val_split: Split of an export that validates; None for the one that is called so.
        val_share: Share of the training images that validate in an export without such a split.
        split_seed: Draws other images.
        train_annotations: Training json, relative to ``root``.
        train_images: Folder of the training images, relative to ``root``.
        val_annotations: Validation json, relative to ``root``; None draws training images.
        val_images: Folder of the validation images, relative to ``root``.
        scale: Longest and shortest edge an image is resized into, its shape kept.
        train_sizes: Several such sizes, one of which is drawn for each training image.
        train_crops: Half of the training images are first resized to a short side of 400, 500 or
            600 and cropped to sides from 384 to 600, as in DETR, Sparse R-CNN and Swin.
        scale_jitter: Smallest and largest factor by which ``scale`` is scaled in training.
        flip: Probability of a horizontal flip; digits and letters want 0.
        photometric: Distort brightness, contrast and colour in training.
        with_mask: Load instance masks.
        skip_unusable_boxes: Leave boxes that training leaves out (without area, smaller than a
            pixel, outside their image or marked ``ignore``) out of evaluation, too, where
            pycocotools counts them. Crowds stay what they are.
        classes: Restrict the set to these category names.
        batch_size: Samples per training batch and process.
        **options: Of ``DenseDataModule``.
    """

    layout = "annotations/instances_train2017.json, instances_val2017.json, train2017/ and val2017/"
    example = "data=coco data.root=/data/coco"
    package = "mmdet.datasets"

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        layout: str = AUTO,
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
        with_mask: bool = True,
        skip_unusable_boxes: bool = False,
        classes: Sequence[str] | None = None,
        batch_size: int = 2,
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size=batch_size, **options)
        self.chosen_layout = checked_layout(layout, LAYOUTS)
        self.splits = SplitOptions(train_split, val_split, val_share, split_seed)
        self.train_annotations, self.train_images = train_annotations, train_images
        self.val_annotations, self.val_images = val_annotations, val_images
        self.scale = size_of("scale", scale)
        self.train_sizes = [size_of("train_sizes", size) for size in train_sizes or []]
        self.train_crops = train_crops
        self.scale_jitter = range_of("scale_jitter", scale_jitter) if scale_jitter else None
        self.flip = probability("flip", flip)
        self.photometric, self.with_mask = photometric, with_mask
        self.skip_unusable_boxes = skip_unusable_boxes
        self._facts: dict[Split, CocoFacts] = {}
        self._turned: dict[Split, set[str]] = {}
        self._annotations_of_val: Mapping[str, Any] = {}
        self._train: Part | None = None
        self._val: Part | None = None
        self.classes = None if classes is None else tuple(classes)
        self.check_scales(self.scale, *self.train_sizes, factors=self.scale_jitter or ())
        if self.train_sizes and self.scale_jitter:
            raise ValueError(
                "data.train_sizes and data.scale_jitter exclude each other; set one to null"
            )
        if train_crops and not self.train_sizes:
            raise ValueError(
                "data.train_crops=true resizes crops to one of data.train_sizes, which is null; "
                "pass both, such as data.train_sizes=[[1333,640],[1333,800]]"
            )

    @property
    def annotations(self) -> Mapping[str, Any]:
        """The content of the validation json, for evaluators; known after ``setup``.

        Raises:
            AttributeError: There is no validation set, as when images of your own are predicted.
            ValueError: No box counts in AP; there is none at all in test-dev's file.
        """
        if "val" not in self._facts or self._val is None:
            raise AttributeError("annotations are known after setup()")
        if len(self._facts["val"].absent) == self.num_classes:
            empty = not self._annotations_of_val["annotations"]
            found = "no annotations" if empty else f"no box of {first_few(self.class_names)} in AP"
            skipped = f" left without {self.left_out}" if self.left_out else ""
            raise ValueError(
                f"{self._val.source} has {found}{skipped}: its images can "
                "be predicted, for a server to judge (mode=predict), but neither tested nor "
                "validated here"
            )
        return self._annotations_of_val

    def build(self) -> dict[Any, SeededDataset]:
        """Check both annotation files and wrap mmdet's datasets."""
        self._train, self._val = self._parts()
        self._leave_out_supercategory()
        train_content, val_content = self._train.content, self._val.content
        train = self._check(self._train, training=True)
        val = self._check(self._val, training=False)
        if train.class_names != val.class_names:
            difference = sorted(set(train.class_names) ^ set(val.class_names))
            names = [part.source.relative_to(self.folder) for part in (self._train, self._val)]
            raise ValueError(
                f"{names[0]} and {names[1]} in {self.folder} differ in "
                f"their categories or the order of them: {list(train.class_names)} against "
                f"{list(val.class_names)}; only in one: {difference}"
            )
        self.class_names, self.category_ids = val.class_names, val.category_ids
        self._facts = {"train": train, "val": val}
        if self.skip_unusable_boxes and val_content["annotations"]:
            val_content = without(val_content, val.unusable)
            skipped = f"{len(val.unusable):,} of {val.num_boxes:,} validation boxes"
            self.left_out = f"{skipped} ({OPTION})"
        self._annotations_of_val = val_content
        train_content = marked(train_content, train.unusable)
        return {
            "train": self.wrap(
                self._coco(train_content, self._train.images, self.train_steps(), False)
            ),
            "val": self.wrap(self._coco(val_content, self._val.images, self.test_steps(), True)),
        }

    def predict_only(self, class_names: Sequence[str], category_ids: Sequence[int] = ()) -> None:
        """Know the classes from elsewhere and serve prediction, so that no data set is needed."""
        if not category_ids:
            say("The checkpoint has no category ids; results number the classes from 1 on")
            category_ids = range(1, len(class_names) + 1)
        super().predict_only(class_names, category_ids)

    def file_check(self, split: Split) -> Callable[[int], None]:
        """The header and the end of an image, and its size against the annotated one."""
        dataset: Any = self.dataset(split).dataset
        self._turned[split] = set()

        def check(index: int) -> None:
            info = dataset.get_data_info(index)
            header = read_header(info["img_path"], upright=True)
            size = (header.width, header.height)
            if header.orientation != UPRIGHT:
                self._turned[split].add(info["img_path"])
            refuse_other_size(info["img_path"], size, (info["width"], info["height"]))
            scale = self.smallest_train_scale if split == "train" else self.scale
            refuse_thin(info["img_path"], size, scale)

        return check

    def notices(self, looked: Mapping[Split, int]) -> list[str]:
        """Training images that are left out or validate, too, and classes without a box there."""
        lines = super().notices(looked)
        train, val = self._facts["train"], self._facts["val"]
        empty = train.num_images - train.num_boxed
        if empty:
            lines.append(
                f"{empty:,} of {train.num_images:,} training images have no box of these classes "
                "and are left out"
            )
        if train.num_small:
            lines.append(
                f"{train.num_small:,} of {train.num_images:,} training images have a side below "
                f"{MIN_SIDE} pixels and are left out; validation keeps such images"
            )
        for facts, split, effect in (
            (train, "training", "are not learnt"),
            (val, "validation", "do not count in AP"),
        ):
            if facts.num_crowds:
                lines.append(
                    f"{facts.num_crowds:,} of {facts.num_boxes:,} {split} boxes are crowds "
                    f"(iscrowd=1) and {effect}"
                )
        shared = sorted(train.files & val.files)
        if shared:
            lines.append(
                f"{len(shared):,} of {val.num_images:,} validation images are training images, "
                f"too, which raises AP: {first_few(shared, 2)}"
            )
        turned = sorted(name for names in self._turned.values() for name in names)
        if turned:
            lines.append(
                f"{len(turned):,} of {sum(looked.values()):,} images are turned by their EXIF data "
                f"({first_few(turned, 3)}), and boxes must fit the turned images; if they fit the "
                "pixels as stored, remove the orientation (exiftool -Orientation= FILE)"
            )
        return lines + self.absent_notice(val.absent)

    @property
    def smallest_train_scale(self) -> Size:
        """The smallest longest and shortest edge that training images are resized into."""
        if self.train_sizes:
            longs, shorts = zip(*((max(size), min(size)) for size in self.train_sizes), strict=True)
            return min(longs), min(shorts)
        factor = min(self.scale_jitter or (1.0,))
        return round(self.scale[0] * factor), round(self.scale[1] * factor)

    def train_steps(self) -> list[Step]:
        """The training pipeline."""
        from mmcv.transforms import RandomChoice, RandomChoiceResize, RandomResize
        from mmdet.datasets import transforms

        # Passed as a class: by the name "Resize" mmcv's is built, which leaves masks alone.
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
        steps: list[Step] = [StrictImage(self.smallest_train_scale), self._annotations(), resize]
        if self.flip:
            steps.append(transforms.RandomFlip(prob=self.flip))
        if self.photometric:
            steps.append(transforms.PhotoMetricDistortion())
        return [*steps, Packed(transforms.PackDetInputs())]

    def resized(self, scale: Size) -> Step:
        """The step that resizes an image into a longest and a shortest edge."""
        from mmdet.datasets import transforms

        step: Step = transforms.Resize(scale=scale, keep_ratio=True)
        return step

    def masks(self, *, annotated: bool) -> list[Step]:
        """The step of an evaluation that reads boxes and masks, if there are any."""
        return [self._annotations()] if annotated else []

    def packed(self) -> Step:
        """The last step."""
        from mmdet.datasets import transforms

        flips = ("flip", "flip_direction") if self.has_views else ()
        return Packed(transforms.PackDetInputs(meta_keys=(*META_KEYS, *flips)))

    def _annotations(self) -> Step:
        from mmdet.datasets.transforms import LoadAnnotations

        step: Step = LoadAnnotations(with_bbox=True, with_mask=self.with_mask)
        return step

    @property
    def annotations_digest(self) -> str | None:
        """Hash of the validation annotations: of the file, or of what an export gave."""
        if self._val is None:
            return None
        if self._val.source == self.folder / str(self.val_annotations):
            return hashlib.sha256(self._val.source.read_bytes()).hexdigest()
        return hashlib.sha256(json.dumps(self._val.content).encode()).hexdigest()

    def _parts(self) -> tuple[Part, Part]:
        """Return what trains and what validates, from COCO's own places or an export."""
        export = self._export()
        if export is not None:
            return self._of_export(export)
        if self.splits.train or self.splits.val:
            raise ValueError(
                "data.train_split and data.val_split name splits of an export; data.layout=coco "
                "takes data.train_annotations and data.val_annotations"
            )
        train = self._own(self.train_annotations, self.train_images)
        if self.val_annotations is None:
            return self._divided(train, str(self.folder / self.train_annotations))
        return train, self._own(self.val_annotations, self.val_images, annotated=False)

    def _export(self) -> Export | None:
        """Return the export in the folder; None for COCO's own places."""
        if self.chosen_layout == OWN:
            return None
        own = (self.train_annotations, str(self.val_annotations))
        named = self.train_annotations != TRAIN_ANNOTATIONS
        if self.chosen_layout == AUTO and (
            named or any((self.folder / name).is_file() for name in own)
        ):
            return None
        return open_export(self.folder, self.chosen_layout)

    def _of_export(self, export: Export) -> tuple[Part, Part]:
        chosen = choose(list(export.parts), self.splits, export.title)
        unused = first_few(chosen.unused)
        left = f"; left out: {unused} (data.val_split=<name> validates it)" if unused else ""
        train = export.parts[chosen.train]()
        if chosen.val is None:
            name = "" if chosen.train == WHOLE else f", {chosen.train}"
            return self._divided(train, f"{export.title}{name}", left)
        val = export.parts[chosen.val]()
        say(
            f"{export.title}: {len(train.content['images'])} training images in {chosen.train}, "
            f"{len(val.content['images'])} validation images in {chosen.val}{left}"
        )
        return train, val

    def _divided(self, whole: Part, title: str, left: str = "") -> tuple[Part, Part]:
        train, val = divided(whole.content, self.splits, title)
        notice = drawn_notice(len(val["images"]), len(whole.content["images"]), self.splits)
        say(f"{title}: {notice}{left}")
        return replace(whole, content=train), replace(whole, content=val)

    def _leave_out_supercategory(self) -> None:
        """Leave out the category 0 that Roboflow puts above the others and uses for no box."""
        assert self._train is not None
        assert self._val is not None
        contents = [self._train.content, self._val.content]
        name = unused_supercategory(contents)
        if name is None or name in (self.classes or ()):
            return
        kept = [[one for one in c["categories"] if one["id"] != 0] for c in contents]
        self._train = replace(self._train, content={**contents[0], "categories": kept[0]})
        self._val = replace(self._val, content={**contents[1], "categories": kept[1]})
        say(
            f"Category 0, {name!r}, is left out: it has no annotations and is the supercategory of "
            "all others"
        )

    def _own(self, annotations: str, images: str, *, annotated: bool = True) -> Part:
        require_folder(self.folder / images, f"a COCO folder has {self.layout}")
        source = self.folder / annotations
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
        # mmdet would read the file a second time.
        dataset.COCOAPI = lambda path: indexed(content)
        dataset.full_init()
        del dataset.COCOAPI
        return dataset


def unused_supercategory(contents: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the name of a category 0 without annotations that is above all others; else None."""
    names = set()
    for content in contents:
        roots = [one for one in content["categories"] if one["id"] == 0]
        others = [one for one in content["categories"] if one["id"] != 0]
        used = any(one["category_id"] == 0 for one in content["annotations"])
        if len(roots) != 1 or not others or used:
            return None
        name = str(roots[0]["name"])
        if not all(one.get("supercategory") == name for one in others):
            return None
        names.add(name)
    return names.pop() if len(names) == 1 else None


def without(content: Mapping[str, Any], unusable: Collection[int]) -> dict[str, Any]:
    """Return the content of a json without the annotations in some positions."""
    annotations = content["annotations"]
    kept = [one for place, one in enumerate(annotations) if place not in unusable]
    return {**content, "annotations": kept}


def marked(content: Mapping[str, Any], unusable: Collection[int]) -> dict[str, Any]:
    """Return the content of a json with the mark by which mmdet leaves annotations out."""
    annotations = [
        {**one, "ignore": 1} if place in unusable else one
        for place, one in enumerate(content["annotations"])
    ]
    return {**content, "annotations": annotations}


def indexed(content: Mapping[str, Any]) -> Any:
    """Annotations as mmdet's ``COCO`` that has read them from a file."""
    from mmdet.datasets.api_wrappers import COCO

    coco = COCO()
    coco.dataset = content
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints what it does
        coco.createIndex()
    coco.img_ann_map, coco.cat_img_map = coco.imgToAnns, coco.catToImgs
    return coco
