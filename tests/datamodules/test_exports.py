"""Exports of annotation tools, written by the tools' own packages."""

import json

import numpy as np
import pytest

pytest.importorskip("mmdet")
pytest.importorskip("pycocotools")

from PIL import Image
from pycocotools import mask as coco_mask

from datamodules import CocoDataModule, SegmentationFolderDataModule
from datamodules.annotation_formats.box_exports import FORMATS, open_export
from datamodules.annotation_formats.splits import SplitOptions, draw_names, draw_with_classes
from tasks.detection.coco_metric import CocoMetric
from tests.datamodules import loading
from tests.datamodules.exported import draw, stem, truth, unpack

# Name in ``exports``, value of data.layout, splits; names with outlines follow.
ONE = ("the export",)
BOXES = (
    ("cvat_images", "cvat", ONE),
    ("cvat_voc", "cvat", ("default",)),
    ("cvat_yolo", "cvat", ("train",)),
    ("cvat_ultralytics", "yolo", ("train", "val")),
    ("roboflow_coco", "roboflow", ("train", "valid")),
    ("roboflow_voc", "roboflow", ("train", "valid")),
    ("roboflow_yolo", "roboflow", ("train", "val")),
    *((f"label_studio_{kind}", "label_studio", ONE) for kind in ("json", "min", "coco", "yolo")),
    ("label_studio_voc", "label_studio", ONE),
    ("labelme", "labelme", ONE),
    ("darknet_roboflow", "roboflow", ("train", "valid")),
    ("fiftyone_coco", "fiftyone", ("train", "validation")),
)
BOTH = {"cvat_images", "label_studio_json", "label_studio_min", "label_studio_coco",
        "label_studio_yolo", "labelme", "fiftyone_coco"}  # fmt: skip
OUTLINES = (
    *((f"{name}_outlines", tool, ONE) for name, tool, _ in BOXES if name in BOTH),
    ("cvat_coco", "cvat", ("default",)),
    ("cvat_coco_splits", "cvat", ("train", "val")),
)
# Read as another tool's, which has the same form, where data.layout names it.
NAMED = tuple(("cvat_ultralytics", tool, ("train", "val")) for tool in ("cvat", "fiftyone"))
CASES = [
    *((*case, outlines, "auto")
      for outlines, cases in ((False, BOXES), (True, OUTLINES)) for case in cases),
    *((*case, False, case[1]) for case in NAMED),
]  # fmt: skip


module, ready, rejected, not_found = loading.bound(
    CocoDataModule, scale=(64, 64), num_workers=0, with_mask=False, val_share=0.34
)


def objects(content):
    names = {one["id"]: one["name"] for one in content["categories"]}
    images = {one["id"]: stem(one["file_name"]) for one in content["images"]}
    found = {image: [] for image in images.values()}
    for one in content["annotations"]:
        numbers = [*one["bbox"], *(one.get("segmentation") or [[]])[0]]
        found[images[one["image_id"]]].append((names[one["category_id"]], numbers))
    return {image: sorted(rows) for image, rows in found.items()}


def detections(content, outlines):
    """Return boxes and masks near the annotations, some wrong, by image and class."""
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
        ids = {"image_id": images[row["image"]], "category_id": categories[row["class"]]}
        own = {key: row[key] for key in row.keys() - {"image", "class"}}
        metric.detections[ids["image_id"]].append(ids | own)
    return {name: value.item() for name, value in metric.compute().items()}


def test_every_format_has_an_export(tmp_path):
    titles = set()
    for number, (name, *_, layout) in enumerate(CASES):
        titles.add(open_export(unpack(name, tmp_path / str(number)), layout).format.title)
    assert titles == {form.title for form in FORMATS}


@pytest.mark.parametrize(("name", "tool", "splits", "outlines", "layout"), CASES)
def test_an_export_is_recognised_and_has_the_ap_of_the_same_annotations_in_coco(
    tmp_path, name, tool, splits, outlines, layout
):
    export = open_export(unpack(name, tmp_path), layout)
    assert export.format.tool == tool
    assert tuple(export.parts) == splits
    found, expected = {}, {}
    for split in splits:
        content = export.parts[split]().content
        same = {"valid": "val", "validation": "val"}.get(split, split) if len(splits) > 1 else "all"
        found |= objects(content)
        expected |= objects(truth(outlines, same))
        rows = detections(truth(outlines, same), outlines)
        ours = figures(content, rows, outlines)
        reference = figures(truth(outlines, same), rows, outlines)
        assert 0.05 < reference["AP"] < 1
        assert ours == pytest.approx(reference, abs=1e-6)
    if name == "label_studio_voc":  # which the tool writes for images with a box alone
        expected = {image: rows for image, rows in expected.items() if rows}
    assert set(found) == set(expected)
    for image, rows in expected.items():
        assert [row[0] for row in found[image]] == [row[0] for row in rows]
        for (_, ours), (_, reference) in zip(found[image], rows, strict=True):
            assert ours == pytest.approx(reference, abs=0.01)


def test_an_unused_supercategory_is_skipped_and_logged(tmp_path, caplog):
    caplog.set_level("INFO")
    root = unpack("roboflow_coco", tmp_path)
    data = ready(root)
    assert data.class_names == ("dog", "cat", "bird")
    assert data.category_ids == (1, 2, 3)
    assert "Category 0, 'pets', is skipped" in caplog.text
    file = root / "train/_annotations.coco.json"
    content = json.loads(file.read_text())
    content["annotations"][0]["category_id"] = 0
    file.write_text(json.dumps(content))
    assert ready(root).class_names == ("pets", "dog", "cat", "bird")


def test_validation_is_drawn_from_a_single_split(tmp_path, caplog):
    caplog.set_level("INFO")
    root = unpack("labelme", tmp_path)
    names = []
    for seed in (0, 0, 1):
        data = ready(root, split_seed=seed)
        assert data.sizes()["val"] == 2
        names.append(sorted(one["file_name"] for one in data.annotations["images"]))
    assert names[0] == names[1] != names[2]
    assert "2 of 6 images are drawn for validation (data.val_share=0.34" in caplog.text


def test_a_drawn_validation_set_holds_each_class(tmp_path):
    """Another image joins or replaces one of a drawn set that lacks a class of several images."""
    labels = {f"{i}.jpg": {0} for i in range(40)}
    labels |= {"3.jpg": {0, 1}, "7.jpg": {0, 1}, "9.jpg": {0, 2}, "11.jpg": {3}, "12.jpg": {3, 2}}
    changed = 0
    for seed in range(12):
        options = SplitOptions(share=0.1, seed=seed)
        drawn = draw_with_classes(list(labels), options, 5, labels.__getitem__)
        before = draw_names(list(labels), options)
        changed += drawn != before
        assert len(drawn) == 4
        for part in (drawn, labels.keys() - drawn):
            assert set().union(*(labels[name] for name in part)) == {0, 1, 2, 3}
        assert drawn == draw_with_classes(list(labels), options, 5, labels.__getitem__)
    assert changed
    alone = {"a": {0}, "b": {0}, "c": {1}}  # a class of one image is trained
    for seed in range(4):
        assert "c" not in draw_with_classes([*alone], SplitOptions(seed=seed), 2, alone.get)


def test_another_split_validates(tmp_path):
    root = unpack("roboflow_voc", tmp_path)
    (root / "valid").rename(root / "test")
    data = ready(root, val_split="test")
    assert {stem(one["file_name"]) for one in data.annotations["images"]} == {"e", "f"}
    rejected(root, r"lacks the split val.*data.val_split=<one of test, train>", val_split="val")


def val_labels(data):
    return np.unique(data.dataset("val")[0, 0]["data_samples"].gt_sem_seg.data).tolist()


MASKS = {"num_workers": 0, "scale": (64, 64), "crop_size": 32}


def test_masks_of_cvat_are_read_by_their_colours(tmp_path):
    root = unpack("cvat_masks", tmp_path)
    data = loading.ready(SegmentationFolderDataModule, root, **MASKS, val_share=0.3)
    assert data.class_names == ("background", "bird", "cat", "dog")
    assert data.sizes() == {"train": 3, "val": 2}
    assert set(val_labels(data)) <= {0, 1, 2, 3}


def test_masks_of_roboflow_are_read_by_their_list_of_classes(tmp_path):
    for split in ("train", "valid"):
        draw(tmp_path / split, {"a.jpg": (40, 30)})
        (tmp_path / split / "_classes.csv").write_text("Pixel Value, Class\n0, ground\n7, cat\n")
        Image.fromarray(np.full((30, 40), 7, np.uint8)).save(tmp_path / split / "a_mask.png")
    data = loading.ready(SegmentationFolderDataModule, tmp_path, **MASKS)
    assert data.class_names == ("ground", "cat")
    assert val_labels(data) == [1]


@pytest.mark.parametrize(
    ("name", "file", "old", "new", "message"),
    [
        (
            "roboflow_yolo",
            "train/labels/b.txt",
            "0 ",
            "9 ",
            r"b.txt, line 1: must hold a class from 0 to 2",
        ),
        ("roboflow_yolo", "train/labels/b.txt", "0.", "40.", r"b.txt, line 1: .* from 0 to 1, got"),
        ("roboflow_yolo", "data.yaml", "nc: 3", "nc: 4", r"data.yaml has nc 4, but 3 names"),
        ("roboflow_yolo", "data.yaml", "nc: 3", "kpt_shape: [4, 2]", r"describes key points"),
        ("roboflow_voc", "train/b.xml", "</annotation>", "", r"b.xml is not valid XML"),
        ("cvat_images", "annotations.xml", '"cat"', '"cow"', r"label 'cow' must be one of dog"),
        ("cvat_images", "annotations.xml", "<image id", "<track/><image id", r"CVAT for video 1.1"),
        ("labelme", "b.json", '"rectangle"', '"mask"', r"b.json: shapes\[0\]: its mask"),
    ],
)
def test_faults_are_named(tmp_path, name, file, old, new, message):
    root = unpack(name, tmp_path)
    text = (root / file).read_text()
    assert old in text
    (root / file).write_text(text.replace(old, new))
    rejected(root, message)


@pytest.mark.parametrize("name", ["roboflow_yolo", "labelme", "roboflow_voc"])
def test_files_without_masks_are_named(tmp_path, name):
    root = unpack(name, tmp_path)
    rejected(root, r"[abcdef](_jpg\S*)?\.(txt|json|xml) lacks a segmentation", with_mask=True)


@pytest.mark.parametrize(
    ("file", "message"),
    [("train/a.tfrecord", "TFRecord"), ("train/_annotations.createml.json", "CreateML"),
     ("gt/gt.txt", "MOT"), ("samples.json", "FiftyOneDataset")],
)  # fmt: skip
def test_other_formats_are_named_and_rejected(tmp_path, file, message):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("{}")
    rejected(tmp_path, f"{message}.*unsupported; export COCO or YOLO")
