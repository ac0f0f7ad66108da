"""Predictions and figures per image are independent of batches and threads."""

import json
import random

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from PIL import Image

from datamodules.dense.coco import CocoDataModule
from datamodules.dense.segmentation_folder import SegmentationFolderDataModule
from datamodules.images.classification import ClassificationDataModule
from heads.linear import LinearClassifier
from tasks.classification.task import ClassificationTask
from tasks.detection.task import DetectionTask
from tasks.segmentation.task import SegmentationTask
from tests.dense_heads import CLASSES, pictures, serving_data, small_model
from tests.families import rest_slow, rest_slow_pairs, short
from tests.runs import QUIET, RECIPE
from tests.threads import in_threads

VIEWS = {"test_scales": [0.75, 1.0], "test_flip": True}
CASES = {
    "classification": {}, "mask_rcnn": {}, "retinanet": VIEWS, "dino": {}, "upernet": VIEWS,
    "semantic_fpn": {}, "mask2former": {},
}  # fmt: skip


def loaded(case):
    """Build a task like ``tasks.load``, with random weights."""
    if case == "classification":
        torch.manual_seed(0)
        model = LinearClassifier(short("posmlp_t"), len(CLASSES)).eval()
        data = ClassificationDataModule(image_size=64, num_workers=0, batch_size=3)
        data.predict_only(CLASSES)
        kind = ClassificationTask
    else:
        model = small_model(case, "resnet18")
        kind = SegmentationTask if hasattr(model.model, "decode_head") else DetectionTask
        task = "segmentation" if kind is SegmentationTask else "detection"
        data = serving_data(task, 3, **CASES[case])
    task = kind(model, CLASSES, **RECIPE)
    task.data = data
    return task.eval().requires_grad_(False)


@pytest.fixture
def files(tmp_path):
    """Create images of several sizes."""
    for number, picture in enumerate(pictures()):
        picture.save(tmp_path / f"{number}.png")
    return sorted(tmp_path.iterdir())


def plain(rows):
    return json.dumps(rows, default=lambda labels: labels.tolist())


def generators():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@pytest.mark.parametrize("case", rest_slow(CASES, ("classification", "semantic_fpn")))
def test_several_threads_predict_like_one(case, files, one_thread):
    """The threads pass lists of different lengths, orders and sizes."""
    task = loaded(case)
    lists = [tuple(files[:1]), tuple(files[1:]), tuple(files[::-1]), (files[3], files[0])]
    expected = {given: plain(task.predict(list(given))) for given in lists}
    assert len(set(expected.values())) == len(lists)
    task = loaded(case)
    before = generators()
    for given, found in in_threads(lambda given: plain(task.predict(list(given))), lists):
        assert found == expected[given]
    assert generators() == before


@pytest.mark.parametrize("case", rest_slow(CASES, ("classification",)))
def test_predictions_of_a_list_equal_those_of_single_images(case, files, one_thread):
    task = loaded(case)
    rows = task.predict(files)
    assert [row["input"] for row in rows] == [str(file) for file in files]
    for file, row in zip(files, rows, strict=True):
        (alone,) = task.predict(file)
        check_close(row, alone)


def check_boxes(found, expected):
    assert len(found) == len(expected) > 9
    for pair in zip(found, expected, strict=True):
        one, other = map(dict, pair)
        numbers = [[row.pop("score"), *row.pop("bbox")] for row in (one, other)]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-3)
        assert one == other


def check_close(row, alone):
    row, alone = ({k: v for k, v in one.items() if k != "image_id"} for one in (row, alone))
    assert row.keys() == alone.keys()
    for key, value in alone.items():
        if key == "detections":
            check_boxes(row[key], value)
        elif key == "labels":
            assert (row[key] == value).mean() > 0.999
        else:
            assert row[key] == pytest.approx(value, abs=1e-4)


def coco_of_several_sizes(root, **more):
    """Create a set with a box per image and descending ids."""
    (root / "images").mkdir()
    images, boxes = [], []
    for number, picture in enumerate(pictures()):
        width, height = picture.size
        name, own = f"{number}.png", 100 - number
        picture.save(root / "images" / name)
        images.append({"id": own, "file_name": name, "width": width, "height": height})
        box = [2, 3, width / 2, height / 2]
        boxes.append({"id": number + 1, "image_id": own, "category_id": 1, "bbox": box,
                      "area": width * height / 4, "iscrowd": 0, "segmentation": []})  # fmt: skip
    categories = [{"id": i + 1, "name": name} for i, name in enumerate(CLASSES)]
    content = {"images": images, "annotations": boxes, "categories": categories}
    (root / "all.json").write_text(json.dumps(content))
    files = {f"{split}_{part}": name for split in ("train", "val")
             for part, name in (("annotations", "all.json"), ("images", "images"))}  # fmt: skip
    return lambda size: CocoDataModule(
        root, scale=64, num_workers=0, eval_batch_size=size, with_mask=False, **files, **more
    )


def masks_of_several_sizes(root, **more):
    generator = np.random.default_rng(1)
    for split in ("train", "val"):
        for number, picture in enumerate(pictures()):
            mask = generator.integers(0, len(CLASSES), picture.size[::-1], dtype=np.uint8)
            for kind, image in (("images", picture), ("masks", Image.fromarray(mask))):
                (root / kind / split).mkdir(parents=True, exist_ok=True)
                image.save(root / kind / split / f"{number}.png")
    return lambda size: SegmentationFolderDataModule(
        root, classes=CLASSES, scale=64, num_workers=0, eval_batch_size=size, **more
    )


class Noting(DetectionTask):
    """Records the detections, since random weights rarely hit a box."""

    def compute_metrics(self):
        self.found = dict(sorted(self.metric.detections.items()))
        return super().compute_metrics()


SETS = {"retinanet": (coco_of_several_sizes, Noting), "dino": (coco_of_several_sizes, Noting),
        "upernet": (masks_of_several_sizes, SegmentationTask),
        "mask2former": (masks_of_several_sizes, SegmentationTask)}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "views"),
    rest_slow_pairs([("retinanet", {}), *((case, VIEWS) for case in SETS)], [("retinanet", {})]),
)
def test_figures_do_not_depend_on_the_size_of_batches(case, views, tmp_path, one_thread):
    """The last batch is short, and images of different sizes are padded together.

    With several views, tests and mode=predict as well.
    """
    make, kind = SETS[case]
    build, found = make(tmp_path, **views), {}
    for size in (1, 3):
        task, data = kind(small_model(case, "resnet18"), CLASSES, **RECIPE), build(size)
        trainer = Trainer(default_root_dir=tmp_path, **QUIET)
        data.setup()
        task.category_ids = data.category_ids
        figures, boxes = [], []
        for evaluate in (trainer.validate, trainer.test)[: 1 + bool(views)]:
            figures += evaluate(task, datamodule=data, verbose=False)
            boxes.append(getattr(task, "found", {}))
        batches = trainer.predict(task, datamodule=data) if views else []
        found[size] = figures, boxes, [row for batch in batches for row in batch]
    for one, other in zip(found[1][0], found[3][0], strict=True):
        assert one == pytest.approx(other, rel=1e-4)
        assert len(one) > 2
    if kind is not Noting:
        return
    for one, other in zip(found[1][1], found[3][1], strict=True):
        assert list(one) == list(other) == [97, 98, 99, 100]
        for image in one:
            check_boxes(one[image], other[image])
    for one, other in zip(found[1][2], found[3][2], strict=True):
        assert one["input"] == other["input"]
        check_close(one, other)
