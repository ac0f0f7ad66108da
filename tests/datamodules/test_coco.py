"""COCO: mmdet's inputs from a valid dataset, and an error message for each fault."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("mmdet")
pytest.importorskip("pycocotools")

pytest.importorskip("cv2")

from datamodules import CocoDataModule
from datamodules.annotation_formats import coco_checks
from tasks.detection.coco_metric import CocoMetric
from tests.datamodules import loading
from tests.datamodules.loading import check_both, dense_samples

SQUARE = [[10, 10, 30, 10, 30, 30, 10, 30]]
SPLITS = ("train2017", "val2017")
CATEGORIES = [{"id": 3, "name": "cat"}, {"id": 8, "name": "dog"}]
module, ready, rejected, not_found = loading.bound(
    CocoDataModule, scale=(120, 80), batch_size=2, num_workers=0, flip=0.0
)


def annotation(number, image_id, category_id=3, **changes):
    entry = {"id": number, "image_id": image_id, "category_id": category_id, "iscrowd": 0}
    return {**entry, "bbox": [10, 10, 20, 20], "area": 400, "segmentation": SQUARE, **changes}


def enlarged(data):
    """Return the sizes (H, W) of the images that a datamodule validates with."""
    return {sample.img_shape for sample in dense_samples(data.val_dataloader())}


def content(*more, **changes):
    """Return a file of four images with a box each, and further annotations."""
    images = [{"id": 10 + i, "file_name": f"{i}.jpg", "width": 60, "height": 40} for i in range(4)]
    boxes = [annotation(100 + i, 10 + i, (3, 8)[i % 2]) for i in range(4)]
    categories = [dict(category) for category in CATEGORIES]
    return {"images": images, "annotations": [*boxes, *more], "categories": categories, **changes}


@pytest.fixture
def root(tmp_path):
    (tmp_path / "annotations").mkdir()
    generator = np.random.default_rng(0)
    for split in SPLITS:
        (tmp_path / split).mkdir()
        for i in range(4):
            pixels = generator.integers(0, 255, (40, 60, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / split / f"{i}.jpg")
    save(tmp_path, content(), *SPLITS)
    return tmp_path


def save(root, entry, *splits):
    """Write the json file of the splits, of training alone by default."""
    text = entry if isinstance(entry, str) else json.dumps(entry)
    for split in splits or SPLITS[:1]:
        (root / f"annotations/instances_{split}.json").write_text(text)


def first(loader):
    batch = next(iter(loader))
    return batch["inputs"][0], batch["data_samples"][0]


def test_batches(root):
    data = ready(root)
    assert data.class_names == ("cat", "dog")
    assert data.category_ids == (3, 8)
    batches = list(data.train_dataloader())
    assert len(batches) == 2
    assert isinstance(batches[0]["inputs"], list)
    inputs, sample = first(data.train_dataloader())
    assert (inputs.shape, inputs.dtype) == ((3, 80, 120), torch.uint8)
    assert sample.gt_instances.bboxes.tensor.tolist() == [[20, 20, 60, 60]]
    masks = sample.gt_instances.masks.masks
    assert masks.shape == (1, 80, 120)
    assert masks[0, 20:60, 20:60].all()
    assert masks.sum() == 1600
    assert sample.gt_instances.labels.item() == (sample.img_id - 10) % 2
    inputs, sample = first(data.val_dataloader())
    assert inputs.shape == (3, 80, 120)
    assert (sample.ori_shape, sample.scale_factor) == ((40, 60), (2.0, 2.0))
    assert sample.gt_instances.bboxes.tensor.tolist() == [[10, 10, 30, 30]]
    assert [one["id"] for one in data.annotations["annotations"]] == [100, 101, 102, 103]


@pytest.mark.parametrize(
    "options", [{"scale_jitter": (0.5, 0.9)}, {"train_sizes": [(90, 60), (60, 40)]}, {"flip": 1.0}]
)
def test_augmented_boxes_follow_masks(root, options):
    counts = [5 * 40 + 6, 10] + [30, 10] * 19
    runs = {"size": [40, 60], "counts": [*counts, 2400 - sum(counts)]}
    entry = content()
    for one in entry["annotations"]:
        one.update(segmentation=runs, bbox=[5, 6, 20, 10], area=200)
    save(root, entry)
    for batch in ready(root, photometric=True, **options).train_dataloader():
        for image, sample in zip(batch["inputs"], batch["data_samples"], strict=True):
            mask = sample.gt_instances.masks.masks[0]
            assert mask.shape == image.shape[1:] == sample.img_shape
            rows, columns = np.nonzero(mask)
            found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert sample.gt_instances.bboxes.tensor[0].tolist() == pytest.approx(found, abs=1)


def test_half_of_the_training_images_are_crops(root):
    """Whole 60x40 images keep the ratio 3:2; crops of up to 600 pixels from 900x600 change it."""
    ratios = []
    for seed in range(4):
        data = ready(root, train_sizes=[(90, 60)], train_crops=True, seed=seed)
        for batch in data.train_dataloader():
            for image, sample in zip(batch["inputs"], batch["data_samples"], strict=True):
                masks = sample.gt_instances.masks.masks
                assert image.shape[1:] == sample.img_shape == masks.shape[1:]
                assert max(sample.img_shape) <= 90
                assert min(sample.img_shape) <= 60
                boxes = sample.gt_instances.bboxes.tensor
                assert (boxes[:, 2] <= sample.img_shape[1] + 1).all()
                ratios.append(sample.img_shape == (60, 90))
    assert 0.2 < sum(ratios) / len(ratios) < 0.8
    again, both = (
        [image for batch in data.train_dataloader() for image in batch["inputs"]] for _ in range(2)
    )
    torch.testing.assert_close(again, both, rtol=0, atol=0)


def test_classes_restrict_the_dataset_and_follow_the_order_of_the_file(root):
    data = ready(root, classes=["dog"])
    assert (data.class_names, data.category_ids) == (("dog",), (8,))
    samples = dense_samples(data.train_dataloader())
    assert {sample.img_id for sample in samples} == {11, 13}
    assert all(sample.gt_instances.labels.tolist() == [0] for sample in samples)
    save(root, content(categories=CATEGORIES[::-1]), *SPLITS)
    data = ready(root)
    assert (data.class_names, data.category_ids) == (("dog", "cat"), (8, 3))
    assert first(data.val_dataloader())[1].gt_instances.labels.tolist() == [1]


def test_images_of_a_file_without_annotations_are_predicted(root):
    """COCO's image_info_test-dev2017.json is such a file."""
    save(root, changed(["annotations"], None), "val2017")
    data = ready(root)
    assert [one.img_id for one in dense_samples(data.predict_dataloader())] == [10, 11, 12, 13]
    assert data.category_ids == (3, 8)
    message = r"has no annotations: .*mode=predict.* to test or validate"
    with pytest.raises(ValueError, match=message):
        _ = data.annotations


def changed(path, value):
    entry = content()
    *parents, key = path
    target = entry
    for parent in parents:
        target = target[parent]
    if value is None:
        del target[key]
    else:
        target[key] = value
    return entry


def edited(key, value):
    return content(annotations=[{**annotation(i, 10), key: value} for i in range(7)])


OUTLINES = [
    ([[1, 2, 3, 4]], "annotation 0 .* polygon of 4 numbers"),
    ({"size": [60, 40], "counts": [2400]}, r"run-length mask of \[60, 40\]"),
    ({"size": [40, 60], "counts": [2399]}, "run lengths of 2399 pixels"),
    ([[1, 2, 3, float("nan"), 5, 6]], "polygon with the coordinate nan"),
    ([[1, 2, 3, 1e9, 5, 6]], "annotation 0 .* coordinate 1000000000.0"),
    (["ab"], "polygons that are lists of numbers, got 'ab'"),
    ({"size": [40, 60], "counts": [2401, -1]}, "malformed run lengths"),
    ({"size": [40, 60], "counts": "ZZ"}, "malformed run|pixels in an"),
    ({"size": "40x60", "counts": [2400]}, "mask of '40x60'"),
    (
        {"size": [40, 60], "counts": [2399.5, 0.5]},
        r"annotation 0 .*annotations\[0\].* a run length that must be an integer, got 2399\.5",
    ),
]


FAULTS = [
    (json.dumps(content())[:200], r"not valid JSON: .* at byte \d+ of 200"),
    (changed(["images"], None), "the content lacks 'images', found .*'annotations', 'categories'"),
    (changed(["categories"], []), "categories list should have at least 1 item"),
    (changed(["images", 2, "file_name"], None), r"images\[2\] lacks 'file_name', found \['height'"),
    (edited("image_id", 99), "7 annotations .* unknown image_id.*: 0, 1, 2, 3, 4, ... .7 in all"),
    (changed(["annotations", 1, "id"], 100), "duplicates among its annotations.*: 100"),
    (changed(["categories", 1], {"id": 8, "name": "cat"}), "duplicates among its category names"),
    *((changed(["images", 2, "file_name"], name), r"two image ids .*1\.jpg \(ids 11 and 12\)")
      for name in ("1.jpg", "..//train2017/./1.jpg")),
    (edited("bbox", [1, 2, 3]), r"annotations\[0\]: bbox list should have at least 4 items"),
    (edited("bbox", [0, 0, float("inf"), 3]), r"\[0\]: bbox\[2\] must be a finite number, got inf"),
    (edited("bbox", [10, 10, -5, 5]), "7 of 7 boxes .*must be .* in pixels"),
    (edited("bbox", [70, 10, 5, 5]), "outside their image"),
    *((edited("segmentation", value), message) for value, message in OUTLINES),
    (edited("segmentation", None), r"annotation 0 .* lacks a seg.*with_mask=false"),
    *((changed(["annotations", 3, "id"], value), rf"annotations\[3\]: id must be an .* got {said}$")
      for value, said in ((7.5, r"7\.5"), (True, "True"))),
    (changed(["annotations", 2, "id"], 2.0**60), "got 1.15.*e.18; .* write the digits"),
    (edited("ignore", 2), r"annotations\[0\]: ignore must be less than or equal to 1, got 2$"),
    (changed(["images", 1, "width"], 10**7), "less than or equal to 100000, got 10000000"),
    (changed(["images", 1, "file_name"], ""), "file_name string should have at least 1 character"),
    ("[" * 100_000, "nested too deeply|not valid JSON"),
    ('{"categories": ' + "9" * 5000 + "}", "4300 digits"),
    (changed(["annotations"], []), "zero images left .* of 4 images 4 lack a box"),
    (changed(["categories", 1, "name"], "fox"), r"must have the same categories.*'fox'"),
    (content(categories=CATEGORIES[::-1]), "same order"),
]  # fmt: skip


@pytest.mark.parametrize(("entry", "message"), FAULTS)
def test_faults_of_the_json(root, entry, message):
    save(root, entry)
    assert "instances_train2017.json" in rejected(root, message)


# Options, the message, and the kind of error.
OPTIONS = [
    ({"scale": (1, 2, 3)}, r"data\.scale must be one positive"),
    ({"flip": 2}, r"data\.flip must be a share or probability from 0 to 1, got 2"),
    ({"scale_jitter": (2.0, 1.0)}, r"data\.scale_jitter must be two .* got \[2.0, 1.0\]"),
    ({"train_crops": True}, r"data\.train_crops must be false without data\.train_sizes="),
    ({"scale_jitter": (1.0, 2.0), "train_sizes": [(90, 60)]}, "must be null beside data.train_si"),
    ({"classes": ["bird", "cat"]}, r"categories \['cat', 'dog'\], .*\['bird', 'cat'\].*: bird"),
    ({"train_images": "elsewhere"}, "folder .*elsewhere does not exist"),
    ({"train_annotations": "a.json"}, "annotation file does not .*; set data.train_annotations"),
    ({"train_split": "a", "layout": "coco"}, r"data\.train_split and .* need an export"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_wrong_options_are_named(root, options, message):
    rejected(root, message, error=(ValueError, FileNotFoundError), **options)


def test_missing_images_are_counted(root):
    lost = [{"id": i, "file_name": f"lost{i}.jpg", "width": 9, "height": 9} for i in range(6)]
    save(root, content(images=[*content()["images"], *lost]))
    not_found(root, r"^6 images .*lost4\.jpg, \.\.\. \(6 in all\)")


def test_run_lengths_as_text_are_those_of_pycocotools(root):
    from pycocotools import mask as toolkit

    generator = np.random.default_rng(0)
    for share in (0.0, 0.02, 0.5, 1.0):
        pixels = np.asfortranarray(generator.random((40, 60)) < share).astype(np.uint8)
        runs = toolkit.encode(pixels)
        text = runs["counts"].decode()
        lengths = coco_checks._run_lengths(text)
        decoded = np.repeat(np.arange(len(lengths)) % 2, lengths).reshape(60, 40).T
        assert (decoded == pixels).all()
    save(root, edited("segmentation", {"size": [40, 60], "counts": text}))
    ready(root)


def perfect_detections(data):
    from mmengine.structures import InstanceData

    metric = CocoMetric(data.annotations, data.category_ids, with_masks=False)
    samples = dense_samples(data.val_dataloader())
    for sample in samples:
        truth = sample.gt_instances
        sample.pred_instances = InstanceData(
            bboxes=truth.bboxes.tensor, labels=truth.labels, scores=torch.ones(len(truth))
        )
    metric.update(samples)
    return metric, metric.compute()["AP"].item()


UNUSABLE = [
    {"bbox": [5, 5, 0, 5]},
    {"area": 0},
    {"bbox": [5, 5, 0.5, 5]},
    {"bbox": [60, 5, 9, 5]},
    {"ignore": 1},
]


@pytest.fixture
def log(monkeypatch):
    lines = []
    monkeypatch.setattr(coco_checks, "log", lines.append)
    return lines


@pytest.mark.parametrize("change", UNUSABLE)
def test_unusable_boxes_are_excluded_from_training_and_count_as_missed(root, change, log, capsys):
    """Training and AP agree with the message; the option excludes the boxes from both."""
    unusable = [annotation(i, 11, **change) for i in (500, 501)]
    crowd = annotation(502, 11, iscrowd=1, **change)
    save(root, content(*(annotation(i, 10) for i in range(16)), *unusable, crowd), *SPLITS)
    found = {}
    for skip in (False, True):
        log.clear()
        data = ready(root, skip_unusable_boxes=skip)
        for note, split in zip(log, SPLITS, strict=True):
            assert "2 of 23 boxes" in note
            assert f"instances_{split}.json" in note
            assert "500, 501; they are excluded" in note
            counted = "count as missed in evaluation unless found, as in pycocotools" in note
            assert counted is not skip
            assert "data.skip_unusable_boxes=true" in note
        assert (data.left_out != "") is skip
        infos = map(data.dataset("train").dataset.get_data_info, range(4))
        learnt = [one for info in infos for one in info["instances"] if not one["ignore_flag"]]
        assert len(learnt) == 20
        found[skip] = perfect_detections(data)[1]
    assert data.left_out == "2 of 23 validation boxes (data.skip_unusable_boxes=true)"
    # With 18 of 20 cats found, 91 of 101 recall levels are reached; all dogs are found.
    assert found == {False: pytest.approx((91 / 101 + 1) / 2), True: pytest.approx(1)}
    assert "loading annotations" not in capsys.readouterr().out


@pytest.mark.parametrize("change", [{"bbox": [float("nan"), 5, 9, 5]}, {"area": float("nan")}])
def test_nan_boxes_are_excluded_from_training_and_rejected_in_validation(root, change, log):
    entry = content(*(annotation(i, 10) for i in range(16)), annotation(500, 11, **change))
    save(root, entry)
    data = ready(root)
    (note,) = log
    assert "1 of 21 boxes" in note
    assert sum(len(s.gt_instances) for s in dense_samples(data.train_dataloader())) == 20
    save(root, entry, "val2017")
    rejected(root, r"val2017\.json has NaN .*annotations\[20\]: bbox and area must")
    assert perfect_detections(ready(root, skip_unusable_boxes=True))[1] == pytest.approx(1)


def test_many_unusable_boxes_are_rejected_unless_skipped(root):
    entry = content(*(annotation(i, 10, area=0, segmentation=[]) for i in range(4)))
    save(root, entry, *SPLITS)
    rejected(root, r"4 of 8 .*in pixels.* data\.skip_unusable_boxes=true")
    assert perfect_detections(ready(root, skip_unusable_boxes=True))[1] == pytest.approx(1)
    marked = [{**one, "ignore": 1} for one in entry["annotations"]]
    save(root, content(annotations=marked))
    rejected(root, r"zero images left .* 4 images 4 lack a box", skip_unusable_boxes=True)
    marked = [{**one, "segmentation": SQUARE} for one in marked]
    save(root, content())
    save(root, content(annotations=marked), "val2017")
    data = ready(root, skip_unusable_boxes=True)
    with pytest.raises(ValueError, match="no annotations without 8 of 8 validation boxes"):
        _ = data.annotations


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:1500]), r"val2017/1\.jpg is truncated"),
        (Image.new("RGB", (40, 60)).save, r"1\.jpg is 40x60 pixels.* annotated as 60x40"),
    ],
)
def test_faults_of_images_are_named(root, spoil, message):
    spoil(root / "val2017/1.jpg")
    check_both(ready(root), message)


def test_shared_small_and_rotated_images_are_logged(root, caplog):
    exif = Image.Exif()
    exif[0x0112] = 3
    Image.new("RGB", (60, 40)).save(root / "val2017/1.jpg", exif=exif)
    (line, *_) = logged(ready(root), caplog)
    assert line.startswith("1 of 8 images are rotated by their EXIF data (")
    caplog.clear()
    entry = content()
    entry["images"][3].update(width=31, height=60)
    save(root, entry)
    (root / "linked").symlink_to(root / "train2017")
    data = ready(root, val_images="linked")
    assert len(data.dataset("train")) == 3
    assert logged(data, caplog) == [
        "1 of 4 training images have a side below 32 pixels and are excluded; validation keeps "
        "such images",
        f"4 of 4 validation images are also training images, which raises AP: "
        f"{root}/train2017/0.jpg, {root}/train2017/1.jpg, ... (4 in all)",
    ]


def logged(data, caplog):
    with caplog.at_level("INFO"):
        data.check_files()
    return [record.message for record in caplog.records][1:]


def test_crowds_are_logged_and_ignored(root):
    entry = content()
    for one in entry["annotations"][1:]:
        one["iscrowd"] = 1
    save(root, entry, *SPLITS)
    data = ready(root)
    boxes = content()["annotations"]
    save(root, content(annotations=boxes[:3]))
    save(root, content(annotations=boxes[1::2]), "val2017")
    assert ready(root).notices({}) == [
        "1 of 4 training images lack boxes of these classes and are excluded",
        "1 of 2 classes do not occur in validation: cat",
    ]
    save(root, entry, *SPLITS)
    assert data.notices({}) == [
        "3 of 4 training boxes are crowds (iscrowd=1) and are excluded from training",
        "3 of 4 validation boxes are crowds (iscrowd=1) and are ignored in AP",
        "1 of 2 classes do not occur in validation: dog",
    ]
    samples = dense_samples(data.train_dataloader())
    assert sum(len(sample.gt_instances) for sample in samples) == 1
    assert sum(len(sample.ignored_instances) for sample in samples) == 3
    assert perfect_detections(data)[1] == pytest.approx(1)
    entry["annotations"][0]["iscrowd"] = 1
    save(root, entry, "val2017")
    data = ready(root)
    message = "has no box of cat, dog in AP: its images can only be pred"
    with pytest.raises(ValueError, match=message):
        _ = data.annotations
    save(root, entry)
    rejected(root, r"zero images left .* 4 images 4 lack a box of .* besides 4 of crowds")


def test_boxes_and_masks_follow_the_augmentation_of_own_sets(root):
    """A white square on black stays the mask and the box, at other places and sizes."""
    for split in SPLITS:
        for i in range(4):
            pixels = np.zeros((40, 60, 3), np.uint8)
            pixels[10:30, 10:30] = 255
            Image.fromarray(pixels).save(root / split / f"{i}.jpg", quality=100)
    data = ready(root, augmentation="own", scale=(240, 160), flip=0.5)
    shapes, dark = set(), set()
    for epoch in range(8):
        for index in range(4):
            sample = data.dataset("train")[epoch, index]
            image = sample["inputs"].float().mean(0)
            shapes.add(sample["data_samples"].img_shape)
            truth = sample["data_samples"].gt_instances
            if not len(truth):
                continue
            (mask,) = truth.masks.to_ndarray().astype(bool)
            bright = image.numpy() > 64
            assert (bright == mask).mean() > 0.97
            dark.add(round(float(image[mask].mean())))
            rows, columns = np.nonzero(mask)
            bounds = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert np.abs(np.asarray(truth.bboxes.tensor[0]) - bounds).max() <= 3
    assert len(shapes) > 8
    assert len(dark) > 4
    rejected(root, "beside data.train_sizes", augmentation="own", train_sizes=[(90, 60)])


def test_a_new_scale_reaches_the_datasets(root):
    data = ready(root)
    assert enlarged(data) == {(80, 120)}
    assert data.image_sizes() == [(60, 40)] * 4
    data.set_scale([240, 160])
    assert enlarged(data) == {(160, 240)}
    assert data.dataset("train")[0, 0]["data_samples"].img_shape == (160, 240)
