"""Exports of annotation tools, written by their own packages, read as they come out of the tool."""

import numpy as np
import pytest

pytest.importorskip("mmdet")
pytest.importorskip("pycocotools")

from pycocotools import mask as coco_mask

from datamodules import CocoDataModule
from datamodules.layouts.detection import open_export
from tasks.coco_metric import CocoMetric
from tests.datamodules.exported import stem, truth, unpack

# Name in ``exports``, value of data.layout, with outlines, the splits it has.
BOXES = (
    ("cvat_images", "cvat", ("the export",)),
    ("cvat_voc", "cvat", ("default",)),
    ("cvat_yolo", "cvat", ("train",)),
    ("cvat_ultralytics", "yolo", ("train", "val")),
    ("roboflow_coco", "roboflow", ("train", "valid")),
    ("roboflow_voc", "roboflow", ("train", "valid")),
    ("roboflow_yolo", "roboflow", ("train", "val")),
    ("label_studio_json", "label_studio", ("the export",)),
    ("label_studio_min", "label_studio", ("the export",)),
    ("label_studio_coco", "label_studio", ("the export",)),
    ("label_studio_yolo", "label_studio", ("the export",)),
    ("labelme", "labelme", ("the export",)),
)
OUTLINES = (
    ("cvat_images_outlines", "cvat", ("the export",)),
    ("cvat_coco", "cvat", ("default",)),
    ("cvat_coco_splits", "cvat", ("train", "val")),
    ("label_studio_json_outlines", "label_studio", ("the export",)),
    ("label_studio_min_outlines", "label_studio", ("the export",)),
    ("label_studio_coco_outlines", "label_studio", ("the export",)),
    ("label_studio_yolo_outlines", "label_studio", ("the export",)),
    ("labelme_outlines", "labelme", ("the export",)),
)
CASES = [(*case, False) for case in BOXES] + [(*case, True) for case in OUTLINES]


def module(root, **options):
    defaults = {"scale": (64, 64), "num_workers": 0, "with_mask": False, "val_share": 0.34}
    return CocoDataModule(root, **{**defaults, **options})


def objects(content):
    """Class, box, area and outline of each object, by image."""
    names = {one["id"]: one["name"] for one in content["categories"]}
    images = {one["id"]: stem(one["file_name"]) for one in content["images"]}
    found = {image: [] for image in images.values()}
    for one in content["annotations"]:
        numbers = [*one["bbox"], *(one["segmentation"] or [[]])[0]]
        found[images[one["image_id"]]].append((names[one["category_id"]], numbers))
    return {image: sorted(rows) for image, rows in found.items()}


def detections(content, outlines):
    """Boxes, and masks, near the annotated ones, and some that are wrong, by image and class."""
    generator = np.random.default_rng(0)
    names = {one["id"]: one["name"] for one in content["categories"]}
    sizes = {one["id"]: (one["height"], one["width"]) for one in content["images"]}
    images = {one["id"]: stem(one["file_name"]) for one in content["images"]}
    rows = []
    for number, one in enumerate(content["annotations"]):
        for shift in (generator.integers(0, 6), 15):
            x, y, width, height = one["bbox"]
            row = {
                "image": images[one["image_id"]],
                "class": names[one["category_id"]] if number % 4 else "dog",
                "bbox": [x + shift, y, width, height],
                "score": float(generator.random()),
            }
            if outlines:
                moved = [v + shift * (i % 2 == 0) for i, v in enumerate(one["segmentation"][0])]
                (run,) = coco_mask.frPyObjects([moved], *sizes[one["image_id"]])
                row["segmentation"] = {**run, "counts": run["counts"].decode()}
            rows.append(row)
    return rows


def figures(content, rows, outlines):
    images = {stem(one["file_name"]): one["id"] for one in content["images"]}
    categories = {one["name"]: one["id"] for one in content["categories"] if one["name"] != "pets"}
    metric = CocoMetric(content, sorted(categories.values()), with_masks=outlines)
    metric.detections = {number: [] for number in images.values()}
    for row in rows:
        number = images[row["image"]]
        entry = {"image_id": number, "category_id": categories[row["class"]]}
        metric.detections[number].append(
            {**entry, **{key: row[key] for key in row.keys() - {"image", "class"}}}
        )
    return {name: value.item() for name, value in metric.compute().items()}


@pytest.mark.parametrize(("name", "tool", "splits", "outlines"), CASES)
def test_an_export_is_recognised_and_has_the_ap_of_the_same_annotations_in_coco(
    tmp_path, name, tool, splits, outlines
):
    export = open_export(unpack(name, tmp_path), "auto")
    assert export.format.tool == tool
    assert tuple(export.parts) == splits
    found, expected = {}, {}
    for split in splits:
        content = export.parts[split]().content
        same = {"valid": "val"}.get(split, split) if len(splits) > 1 else "all"
        found |= objects(content)
        expected |= objects(truth(outlines, same))
        rows = detections(truth(outlines, same), outlines)
        ours = figures(content, rows, outlines)
        reference = figures(truth(outlines, same), rows, outlines)
        assert 0.05 < reference["AP"] < 1
        assert ours == pytest.approx(reference, abs=1e-6)
    assert set(found) == set(expected)
    for image, rows in expected.items():
        assert [row[0] for row in found[image]] == [row[0] for row in rows]
        for (_, ours), (_, reference) in zip(found[image], rows, strict=True):
            assert ours == pytest.approx(reference, abs=0.01)
