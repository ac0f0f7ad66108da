"""COCO: mmdet's inputs from a valid dataset, and an error message for each fault."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("mmdet")
pytest.importorskip("pycocotools")

from datamodules import CocoDataModule
from datamodules.layouts import coco_checks
from tasks.detection.coco_metric import CocoMetric

cv2 = pytest.importorskip("cv2")

SQUARE = [[10, 10, 30, 10, 30, 30, 10, 30]]
CATEGORIES = [{"id": 3, "name": "cat"}, {"id": 8, "name": "dog"}]


def annotation(number, image_id, category_id=3, **changes):
    entry = {
        "id": number,
        "image_id": image_id,
        "category_id": category_id,
        "bbox": [10, 10, 20, 20],
        "area": 400,
        "iscrowd": 0,
        "segmentation": SQUARE,
    }
    return {**entry, **changes}


def content(count=4):
    return {
        "images": [
            {"id": 10 + i, "file_name": f"{i}.jpg", "width": 60, "height": 40} for i in range(count)
        ],
        "annotations": [annotation(100 + i, 10 + i, (3, 8)[i % 2]) for i in range(count)],
        "categories": [dict(category) for category in CATEGORIES],
    }


@pytest.fixture
def root(tmp_path):
    (tmp_path / "annotations").mkdir()
    generator = np.random.default_rng(0)
    for split in ("train2017", "val2017"):
        (tmp_path / split).mkdir()
        for i in range(4):
            pixels = generator.integers(0, 255, (40, 60, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / split / f"{i}.jpg")
        save(tmp_path, content(), split)
    return tmp_path


def save(root, entry, split="train2017"):
    text = entry if isinstance(entry, str) else json.dumps(entry)
    (root / f"annotations/instances_{split}.json").write_text(text)


def module(root, **options):
    defaults = {"scale": (120, 80), "batch_size": 2, "num_workers": 0, "flip": 0.0}
    return CocoDataModule(root, **{**defaults, **options})


def first(loader):
    batch = next(iter(loader))
    return batch["inputs"][0], batch["data_samples"][0]


def test_train_batches(root):
    data = module(root)
    data.setup()
    assert data.class_names == ("cat", "dog")
    assert data.category_ids == (3, 8)
    batches = list(data.train_dataloader())
    assert len(batches) == 2
    inputs, sample = first(data.train_dataloader())
    assert isinstance(batches[0]["inputs"], list)
    assert inputs.shape == (3, 80, 120)
    assert inputs.dtype == torch.uint8
    assert sample.gt_instances.bboxes.tensor.tolist() == [[20, 20, 60, 60]]
    masks = sample.gt_instances.masks.masks
    assert masks.shape == (1, 80, 120)
    assert masks[0, 20:60, 20:60].all()
    assert masks.sum() == 1600
    assert sample.gt_instances.labels.item() == (sample.img_id - 10) % 2


def test_val_batches(root):
    data = module(root)
    data.setup()
    inputs, sample = first(data.val_dataloader())
    assert inputs.shape == (3, 80, 120)
    assert sample.ori_shape == (40, 60)
    assert sample.scale_factor == (2.0, 2.0)
    assert sample.gt_instances.bboxes.tensor.tolist() == [[10, 10, 30, 30]]
    written = json.loads((root / "annotations/instances_val2017.json").read_text())
    assert [entry["id"] for entry in data.annotations["annotations"]] == [
        entry["id"] for entry in written["annotations"]
    ]


def test_each_file_is_parsed_once(root, monkeypatch):
    """The checks, mmdet and evaluation share one parsed copy."""
    parsed = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda raw: parsed.append(len(raw)) or loads(raw))
    monkeypatch.setattr(json, "load", lambda file: pytest.fail(f"{file.name} must be read once"))
    data = module(root)
    data.setup()
    _, figure = perfect_detections(data)
    sizes = [
        (root / f"annotations/instances_{split}2017.json").stat().st_size
        for split in ("train", "val")
    ]
    assert [size for size in parsed if size in sizes] == sizes  # libraries read small files too
    assert figure == pytest.approx(1)


def test_images_are_bgr(root):
    Image.new("RGB", (60, 40), (250, 0, 0)).save(root / "val2017/0.jpg")
    data = module(root)
    data.setup()
    inputs, _ = first(data.val_dataloader())
    assert inputs[2].min() > 240
    assert inputs[0].max() < 10


@pytest.mark.parametrize(
    "options",
    [{"scale_jitter": (0.5, 0.9)}, {"train_sizes": [(90, 60), (60, 40)]}, {"flip": 1.0}],
)
def test_augmented_boxes_follow_masks(root, options):
    entry = content()
    runs = {"size": [40, 60], "counts": [5 * 40 + 6, 10] + [30, 10] * 19 + [36 * 40 - 16 + 0]}
    runs["counts"][-1] = 2400 - sum(runs["counts"][:-1])
    for one in entry["annotations"]:
        one.update(segmentation=runs, bbox=[5, 6, 20, 10], area=200)
    save(root, entry)
    data = module(root, photometric=True, **options)
    data.setup()
    for batch in data.train_dataloader():
        for image, sample in zip(batch["inputs"], batch["data_samples"], strict=True):
            x1, y1, x2, y2 = sample.gt_instances.bboxes.tensor[0].tolist()
            mask = sample.gt_instances.masks.masks[0]
            assert mask.shape == image.shape[1:] == sample.img_shape
            rows, columns = np.nonzero(mask)
            found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert np.abs(np.array(found) - [x1, y1, x2, y2]).max() <= 1


def test_half_of_the_training_images_are_crops(root):
    """Whole 60x40 images keep the ratio 3:2; crops of up to 600 pixels from 900x600 change it."""
    ratios = []
    for seed in range(4):
        data = module(root, train_sizes=[(90, 60)], train_crops=True, seed=seed)
        data.setup()
        for batch in data.train_dataloader():
            for image, sample in zip(batch["inputs"], batch["data_samples"], strict=True):
                assert image.shape[1:] == sample.img_shape
                assert sample.gt_instances.masks.masks.shape[1:] == sample.img_shape
                assert max(sample.img_shape) <= 90
                assert min(sample.img_shape) <= 60
                boxes = sample.gt_instances.bboxes.tensor
                assert (boxes[:, 2] <= sample.img_shape[1] + 1).all()
                ratios.append(sample.img_shape == (60, 90))
    assert 0.2 < sum(ratios) / len(ratios) < 0.8
    again = [image for batch in data.train_dataloader() for image in batch["inputs"]]
    both = [image for batch in data.train_dataloader() for image in batch["inputs"]]
    assert all(torch.equal(a, b) for a, b in zip(again, both, strict=True))


def test_samples_do_not_depend_on_workers(root):
    def train(workers):
        data = module(root, num_workers=workers, scale_jitter=(0.5, 2.0), flip=0.5)
        data.setup()
        return [image for batch in data.train_dataloader() for image in batch["inputs"]]

    assert all(torch.equal(a, b) for a, b in zip(train(0), train(2), strict=True))


def test_classes_restrict_the_dataset(root):
    data = module(root, classes=["dog"])
    data.setup()
    assert data.class_names == ("dog",)
    assert data.category_ids == (8,)
    samples = [s for batch in data.train_dataloader() for s in batch["data_samples"]]
    assert {sample.img_id for sample in samples} == {11, 13}
    assert all(sample.gt_instances.labels.tolist() == [0] for sample in samples)


def test_labels_follow_the_order_of_the_file(root):
    for split in ("train2017", "val2017"):
        save(root, {**content(), "categories": CATEGORIES[::-1]}, split)
    data = module(root)
    data.setup()
    assert data.class_names == ("dog", "cat")
    assert data.category_ids == (8, 3)
    assert first(data.val_dataloader())[1].gt_instances.labels.tolist() == [1]


def test_annotations_without_masks(root):
    entry = content()
    for one in entry["annotations"]:
        del one["segmentation"]
    save(root, entry)
    with pytest.raises(ValueError, match=r"annotation 100 .* lacks a seg.*with_mask=false"):
        module(root).setup()
    data = module(root, with_mask=False)
    data.setup()
    assert "masks" not in first(data.train_dataloader())[1].gt_instances


def test_prediction_inputs(root):
    data = module(root, predict_path=root / "train2017")
    assert getattr(data, "annotations", None) is None
    data.setup()
    samples = [s for batch in data.predict_dataloader() for s in batch["data_samples"]]
    assert [sample.img_path for sample in samples] == [
        str(root / f"train2017/{i}.jpg") for i in range(4)
    ]
    assert samples[0].ori_shape == (40, 60)
    default = module(root)
    default.setup()
    assert "val2017" in first(default.predict_dataloader())[1].img_path


def test_images_without_annotations_are_predicted_only(root):
    """COCO's image_info_test-dev2017.json is such a file."""
    info = {key: value for key, value in content().items() if key != "annotations"}
    save(root, info, "val2017")
    data = module(root)
    data.setup()
    samples = [s for batch in data.predict_dataloader() for s in batch["data_samples"]]
    assert [sample.img_id for sample in samples] == [10, 11, 12, 13]
    assert data.category_ids == (3, 8)
    with pytest.raises(
        ValueError, match=r"has no annotations: .*mode=predict.* to test or validate"
    ):
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
    entry = content()
    entry["annotations"] = [{**annotation(i, 10), key: value} for i in range(7)]
    return entry


FAULTS = [
    (json.dumps(content())[:200], r"not valid JSON at byte \d+ of 200"),
    ('{"é": ', r"not valid JSON at byte 7 of 7"),
    (json.dumps([1]), "lacks the list 'categories'.*found a list"),
    (changed(["images"], None), "lacks the list 'images'.*found .*'annotations', 'categories'"),
    (changed(["annotations"], None), "lacks the list 'annotations'"),
    (changed(["categories"], None), "lacks the list 'categories'"),
    (changed(["categories"], []), "the list 'categories' is empty"),
    (changed(["images", 2, "file_name"], None), r"images\[2\] lacks \['file_name'\]"),
    (changed(["annotations", 1, "area"], None), r"annotations\[1\] lacks \['area'\]"),
    (edited("image_id", 99), "7 annotations .* unknown image_id.*: 0, 1, 2, 3, 4, ... .7 in all"),
    (edited("category_id", 99), "7 annotations .* unknown category_id"),
    (changed(["annotations", 1, "id"], 100), "duplicates among its annotations: 100"),
    (changed(["images", 1, "id"], 10), "duplicates among its images: 10"),
    (changed(["categories", 1], {"id": 8, "name": "cat"}), "duplicates among its category names"),
    (edited("bbox", [1, 2, 3]), "7 annotations .* not four finite numbers"),
    (edited("bbox", [0, 0, float("inf"), 3]), "not four finite numbers"),
    (edited("bbox", [10, 10, -5, 5]), "7 of 7 boxes .*must be .* in pixels"),
    (edited("bbox", [0.1, 0.1, 0.4, 0.5]), "smaller than a pixel"),
    (edited("bbox", [70, 10, 5, 5]), "outside their image"),
    (edited("segmentation", [[1, 2, 3, 4]]), "annotation 0 .* polygon of 4 numbers"),
    (
        edited("segmentation", {"size": [60, 40], "counts": [2400]}),
        r"run-length mask of \[60, 40\]",
    ),
    (edited("segmentation", {"size": [40, 60], "counts": [2399]}), "run lengths of 2399 pixels"),
    (edited("segmentation", [[1, 2, 3, float("nan"), 5, 6]]), "polygon with the coordinate nan"),
    (edited("segmentation", [[1, 2, 3, float("inf"), 5, 6]]), "the coordinate inf"),
    (edited("segmentation", [[1, 2, 3, 1e9, 5, 6]]), "annotation 0 .* coordinate 1000000000.0"),
    (edited("segmentation", [[1, 2, 3, None, 5, 6]]), "the coordinate None"),
    (edited("segmentation", ["ab"]), "polygons that are lists of numbers, got 'ab'"),
    (edited("segmentation", {"size": [40, 60], "counts": [2401, -1]}), "malformed run lengths"),
    (edited("segmentation", {"size": [40, 60], "counts": None}), "malformed run lengths: None"),
    (edited("segmentation", {"size": [40, 60], "counts": "P_oooo"}), "malformed run lengths"),
    (
        edited("segmentation", {"size": [40, 60], "counts": "ZZ"}),
        "malformed run|pixels in an",
    ),
    (edited("segmentation", {"size": "40x60", "counts": [2400]}), "mask of '40x60'"),
    (edited("id", None), r"json: annotations\[0\]: id must be an integer, got None$"),
    (changed(["annotations", 3, "id"], "a"), r'annotations\[3\]: id must be an integer, got "a"$'),
    (changed(["images", 2, "id"], "2"), r'images\[2\]: id must be an integer, got "2"$'),
    (changed(["categories", 1, "id"], "8"), r'categories\[1\]: id must be an integer, got "8"$'),
    (changed(["annotations", 2, "id"], 7.5), r"annotations\[2\]: id must be an integer, got 7\.5$"),
    (changed(["annotations", 2, "id"], True), r"annotations\[2\]: id must be .*, got True$"),
    (changed(["annotations", 2, "id"], 2.0**60), "got 1.15.*e.18; .* write the digits"),
    (changed(["images", 1, "width"], 59.5), r"images\[1\]: width must be an integer, got 59\.5$"),
    (edited("image_id", "7"), r'annotations\[0\]: image_id must be an integer, got "7"$'),
    (edited("category_id", 3.5), r"annotations\[0\]: category_id must be an integer, got 3\.5$"),
    (edited("area", "12"), r'annotations\[0\]: area must be a finite number, got "12"$'),
    (edited("iscrowd", []), r"annotations\[0\]: iscrowd must be 0 or 1, got \[\]$"),
    (edited("ignore", "0"), r'annotations\[0\]: ignore must be 0 or 1, got "0"$'),
    (edited("iscrowd", 0.5), r"annotations\[0\]: iscrowd must be 0 or 1, got 0\.5$"),
    (
        edited("segmentation", {"size": [40, 60], "counts": [2399.5, 0.5]}),
        r"annotation 0 .*annotations\[0\].* a run length that must be an integer, got 2399\.5",
    ),
    (changed(["images", 1, "id"], [1]), r"images\[1\]: id must be an integer, got \[1\]$"),
    (changed(["images", 1, "height"], "40"), r'images\[1\]: height must be an integer, got "40"$'),
    (changed(["images", 1, "width"], 10**7), "a number of pixels from 1 to 100000, got 10000000"),
    (changed(["images", 1, "file_name"], 5), "file_name must be a non-empty string, got 5"),
    (
        changed(["categories", 0, "name"], ["cat"]),
        r"categories\[0\]: name must be a non-empty string.*\['cat'\]",
    ),
    (changed(["images"], []), "the list 'images' is empty"),
    ("[" * 100_000, "nested too deeply|not valid JSON"),
    ('{"categories": ' + "9" * 5000 + "}", "cannot be read"),
    (changed(["annotations"], []), "zero images left .* of 4 images 4 lack a box"),
]


@pytest.mark.parametrize(("entry", "message"), FAULTS)
def test_faults_of_the_json(root, entry, message):
    save(root, entry)
    with pytest.raises(ValueError, match=message) as caught:
        module(root).setup()
    assert "instances_train2017.json" in str(caught.value)


def test_run_lengths_as_text_equal_those_of_pycocotools(root):
    from pycocotools import mask as toolkit

    generator = np.random.default_rng(0)
    for share in (0.0, 0.02, 0.5, 1.0):
        pixels = np.asfortranarray(generator.random((40, 60)) < share).astype(np.uint8)
        text = toolkit.encode(np.asfortranarray(pixels))["counts"].decode()
        lengths = coco_checks._run_lengths(text)
        runs = np.repeat(np.arange(len(lengths)) % 2, lengths).reshape(60, 40).T
        assert (runs == pixels).all()
    save(root, edited("segmentation", {"size": [40, 60], "counts": text}))
    module(root).setup()


def with_floats(value):
    """Return a copy with all integers as floats, including run lengths."""
    if isinstance(value, dict):
        return {key: with_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_floats(item) for item in value]
    return float(value) if isinstance(value, int) else value


def test_integers_may_be_written_as_floats(root):
    entry = content()
    runs = {"size": [40, 60], "counts": [410, 10, 1980]}
    entry["annotations"][0].update(segmentation=runs, iscrowd=1)
    for split in ("train2017", "val2017"):
        save(root, with_floats(entry), split)
    data = module(root)
    data.setup()
    assert data.category_ids == (3, 8)
    for kind, keys in {
        "images": ("id", "width", "height"),
        "annotations": ("id", "image_id", "category_id", "iscrowd"),
        "categories": ("id",),
    }.items():
        found = [{key: one[key] for key in keys} for one in data.annotations[kind]]
        wanted = [{key: one[key] for key in keys} for one in entry[kind]]
        assert json.dumps(found) == json.dumps(wanted)
    assert repr(data.annotations["annotations"][0]["segmentation"]) == repr(runs)
    samples = [s for batch in data.val_dataloader() for s in batch["data_samples"]]
    assert [repr(sample.img_id) for sample in samples] == ["10", "11", "12", "13"]
    assert len(list(data.train_dataloader())) == 2


def perfect_detections(data):
    """Return the detections of a perfect detector and their AP."""
    from mmengine.structures import InstanceData

    metric = CocoMetric(data.annotations, data.category_ids, with_masks=False)
    samples = [s for batch in data.val_dataloader() for s in batch["data_samples"]]
    for sample in samples:
        truth = sample.gt_instances
        sample.pred_instances = InstanceData(
            bboxes=truth.bboxes.tensor, labels=truth.labels, scores=torch.ones(len(truth))
        )
    metric.update(samples)
    return metric, metric.compute()["AP"].item()


@pytest.mark.parametrize("ids", [range(4), range(-3, 1), [2**53 + 3, 0, -(2**70), 2**64]])
def test_any_integers_may_be_ids(root, ids):
    entry = content()
    categories = {3: ids[1], 8: ids[0]}
    for number, image, one in zip(ids, entry["images"], entry["annotations"], strict=True):
        image["id"] = one["image_id"] = one["id"] = number
        one["category_id"] = categories[one["category_id"]]
    for category in entry["categories"]:
        category["id"] = categories[category["id"]]
    for split in ("train2017", "val2017"):
        save(root, entry, split)
    data = module(root)
    data.setup()
    assert data.category_ids == tuple(categories.values())
    labels = [
        s.gt_instances.labels.item() for b in data.train_dataloader() for s in b["data_samples"]
    ]
    assert sorted(labels) == [0, 0, 1, 1]
    metric, figure = perfect_detections(data)
    assert figure == pytest.approx(1)
    found = [row for rows in metric.detections.values() for row in rows]
    written = json.loads(json.dumps(found))  # as coco_results.json
    assert [row["image_id"] for row in written] == list(ids)
    assert {row["category_id"] for row in written} == {*categories.values()}


UNUSABLE = [
    {"bbox": [5, 5, 0, 5]},
    {"bbox": [5, 5, 9, -5]},
    {"area": 0},
    {"bbox": [5, 5, 0.5, 5]},
    {"bbox": [60, 5, 9, 5]},
    {"bbox": [5, -9, 9, 9]},
    {"ignore": 1},
]


def check_files_log(monkeypatch, data):
    notes = []
    monkeypatch.setattr("datamodules.layouts.coco_checks.log", notes.append)
    data.setup()
    return notes


@pytest.mark.parametrize("change", UNUSABLE)
def test_unusable_boxes_are_excluded_from_training_and_count_as_missed(root, change, monkeypatch):
    """Training and AP agree with the message; the option excludes the boxes from both."""
    entry = content()
    entry["annotations"] += [annotation(i, 10) for i in range(16)]
    unusable = [annotation(i, 11, **change) for i in (500, 501)]
    crowd = annotation(502, 11, iscrowd=1, **change)
    for split in ("train2017", "val2017"):
        save(root, {**entry, "annotations": [*entry["annotations"], *unusable, crowd]}, split)
    found = {}
    for skip in (False, True):
        data = module(root, skip_unusable_boxes=skip)
        notes = check_files_log(monkeypatch, data)
        for note, split in zip(notes, ("train2017", "val2017"), strict=True):
            assert "2 of 23 boxes" in note
            assert f"instances_{split}.json" in note
            assert "500, 501; they are excluded" in note
            counted = "count as missed in evaluation unless found, as in pycocotools" in note
            assert counted is not skip
            assert "data.skip_unusable_boxes=true" in note
        assert (data.left_out != "") is skip
        instances = [
            one
            for i in range(4)
            for one in data.dataset("train").dataset.get_data_info(i)["instances"]
        ]
        learnt = [one for one in instances if not one["ignore_flag"]]
        assert len(learnt) == 20
        found[skip] = perfect_detections(data)[1]
    assert data.left_out == "2 of 23 validation boxes (data.skip_unusable_boxes=true)"
    # With 18 of 20 cats found, 91 of 101 recall levels are reached; all dogs are found.
    assert found == {False: pytest.approx((91 / 101 + 1) / 2), True: pytest.approx(1)}


def test_few_degenerate_boxes_are_dropped(root, capsys):
    entry = content()
    entry["annotations"] += [annotation(i, 10) for i in range(20)]
    entry["annotations"] += [
        annotation(500, 10, bbox=[5, 5, 0, 5]),
        annotation(501, 10, bbox=[float("nan"), 5, 9, 5]),
    ]
    save(root, entry)
    data = module(root)
    with pytest.MonkeyPatch.context() as patch:
        notes = []
        patch.setattr("datamodules.layouts.coco_checks.log", notes.append)
        data.setup()
    assert len(notes) == 1
    assert "2 of 26 boxes" in notes[0]
    assert "500, 501; they are excluded" in notes[0]
    counts = [
        len(sample.gt_instances)
        for batch in data.train_dataloader()
        for sample in batch["data_samples"]
    ]
    assert sum(counts) == 24
    assert "loading annotations" not in capsys.readouterr().out


@pytest.mark.parametrize("change", [{"bbox": [float("nan"), 5, 9, 5]}, {"area": float("nan")}])
def test_nan_boxes_are_not_evaluated(root, change, monkeypatch):
    entry = content()
    entry["annotations"] += [annotation(i, 10) for i in range(16)]
    entry["annotations"].append(annotation(500, 11, **change))
    save(root, entry)
    (note,) = check_files_log(monkeypatch, data := module(root))
    assert "1 of 21 boxes" in note
    samples = [s for batch in data.train_dataloader() for s in batch["data_samples"]]
    assert sum(len(sample.gt_instances) for sample in samples) == 20
    save(root, entry, "val2017")
    with pytest.raises(ValueError, match=r"val2017\.json: annotations\[20\]: bbox and area must"):
        module(root).setup()
    data = module(root, skip_unusable_boxes=True)
    data.setup()
    assert perfect_detections(data)[1] == pytest.approx(1)


def test_mmdet_drops_the_unusable_boxes(root, monkeypatch):
    generator = np.random.default_rng(0)
    entry = content()
    values = [-30, -10, -1, 0, 0.5, 1, 20, 39.5, 60]
    entry["annotations"] = [
        annotation(i, 10 + i % 4, bbox=generator.choice(values, 4).tolist(), area=a, iscrowd=i % 2)
        for i, a in enumerate(generator.choice([-1, 0, 0.1, 9], 400))
    ]
    save(root, entry)
    data = module(root, skip_unusable_boxes=True, with_mask=False)
    monkeypatch.setattr("datamodules.dense.coco.mark_ignored", lambda content, unusable: content)
    (note, *_) = check_files_log(monkeypatch, data)
    infos = [data.dataset("train").dataset.get_data_info(i) for i in range(4)]
    kept = sum(not one["ignore_flag"] for info in infos for one in info["instances"])
    assert 10 < kept < 100
    assert note.startswith(f"{200 - kept} of 400 boxes")


def test_many_unusable_boxes_are_rejected_unless_skipped(root, monkeypatch):
    entry = content()
    entry["annotations"] += [annotation(i, 10, area=0, segmentation=[]) for i in range(4)]
    for split in ("train2017", "val2017"):
        save(root, entry, split)
    with pytest.raises(ValueError, match=r"4 of 8 .*in pixels.* data\.skip_unusable_boxes=true"):
        module(root).setup()
    data = module(root, skip_unusable_boxes=True)
    data.setup()
    assert perfect_detections(data)[1] == pytest.approx(1)
    marked = [{**one, "ignore": 1} for one in entry["annotations"]]
    save(root, {**entry, "annotations": marked})
    with pytest.raises(ValueError, match=r"zero images left .* 4 images 4 lack a box"):
        module(root, skip_unusable_boxes=True).setup()
    for one in marked:
        one["segmentation"] = SQUARE
    save(root, entry | {"annotations": entry["annotations"][:4]})
    save(root, {**entry, "annotations": marked}, "val2017")
    data = module(root, skip_unusable_boxes=True)
    data.setup()
    with pytest.raises(ValueError, match="no annotations without 8 of 8 validation boxes"):
        _ = data.annotations


def test_the_error_for_an_unusable_box_without_a_mask_names_the_option(root):
    entry = content()
    entry["annotations"] += [annotation(i, 10) for i in range(7)]
    entry["annotations"].append(annotation(50, 10, bbox=[5, 5, 0, 0], segmentation=[]))
    save(root, entry)
    module(root).setup()
    save(root, entry, "val2017")
    with pytest.raises(ValueError, match=r"annotation 50 .*annotations\[11\].*skip_unusable_boxes"):
        module(root).setup()


def test_unusable_boxes_of_other_classes_are_not_counted(root, monkeypatch):
    entry = content()
    entry["annotations"] += [annotation(i, 10, area=0) for i in range(9)]
    save(root, entry)
    assert not check_files_log(monkeypatch, module(root, classes=["dog"]))


@pytest.mark.parametrize("name", ["1.jpg", "./1.jpg", "..//train2017/./1.jpg"])
def test_an_image_file_must_have_one_id(root, name):
    save(root, changed(["images", 2, "file_name"], name))
    with pytest.raises(ValueError, match=r"1\.jpg \(ids 11 and 12\); keep one entry"):
        module(root).setup()


def test_category_names_are_checked(root):
    with pytest.raises(ValueError, match=r"\['bird', 'cat'\].*\['cat', 'dog'\].*file: \['bird'\]"):
        module(root, classes=["bird", "cat"]).setup()
    save(root, {**content(), "categories": [{"id": 3, "name": "cat"}, {"id": 8, "name": "fox"}]})
    with pytest.raises(ValueError, match=r"must have the same categories.*\['dog', 'fox'\]"):
        module(root).setup()
    save(root, {**content(), "categories": CATEGORIES[::-1]})
    with pytest.raises(ValueError, match="same order"):
        module(root).setup()


def test_errors_for_missing_files(root, tmp_path):
    with pytest.raises(ValueError, match=r"data=coco data.root=/data/coco"):
        module(None).setup()
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        module(tmp_path / "absent").setup()
    entry = content()
    for i in range(6):
        entry["images"].append({"id": i, "file_name": f"lost{i}.jpg", "width": 9, "height": 9})
    save(root, entry)
    with pytest.raises(FileNotFoundError, match=r"^6 images .*lost4\.jpg, \.\.\. \(6 in all\)"):
        module(root).setup()
    (root / "annotations/instances_train2017.json").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"annotation file .* does not exist; set data.train_annotations"
    ):
        module(root).setup()
    with pytest.raises(FileNotFoundError, match=r"folder .*elsewhere does not exist"):
        module(root, train_images="elsewhere").setup()


def test_truncated_jpeg_is_named(root):
    file = root / "val2017/1.jpg"
    file.write_bytes(file.read_bytes()[:1500])
    data = module(root)
    data.setup()
    with pytest.raises(ValueError, match=r"val2017/1\.jpg is truncated"):
        list(data.val_dataloader())
    with pytest.raises(ValueError, match=r"val2017/1\.jpg is truncated"):
        data.check_files()


def test_the_annotated_size_must_equal_the_image_size(root):
    Image.new("RGB", (40, 60)).save(root / "val2017/1.jpg")
    data = module(root)
    data.setup()
    with pytest.raises(ValueError, match=r"1\.jpg is 40x60 pixels.* annotated as 60x40"):
        list(data.val_dataloader())
    with pytest.raises(ValueError, match=r"1\.jpg is 40x60 pixels.* annotated as 60x40"):
        data.check_files()


def test_options_are_checked(root):
    with pytest.raises(ValueError, match=r"data\.scale must be one positive"):
        module(root, scale=(1, 2, 3))
    with pytest.raises(ValueError, match=r"data\.flip must be a probability from 0 to 1, got 2"):
        module(root, flip=2)
    with pytest.raises(ValueError, match=r"data\.scale_jitter must be two .* got \[2.0, 1.0\]"):
        module(root, scale_jitter=(2.0, 1.0))
    with pytest.raises(ValueError, match=r"data\.train_crops=true resizes crops to one of"):
        module(root, train_crops=True)
    with pytest.raises(ValueError, match="exclude each other"):
        module(root, scale_jitter=(1.0, 2.0), train_sizes=[(90, 60)])


def test_shared_and_small_images_are_logged(root, caplog):
    entry = content()
    entry["images"][3].update(width=31, height=60)
    save(root, entry)
    (root / "linked").symlink_to(root / "train2017")
    data = module(root, val_images="linked")
    data.setup()
    assert len(data.dataset("train")) == 3
    with caplog.at_level("INFO"):
        data.check_files()
    assert [record.message for record in caplog.records][1:] == [
        "1 of 4 training images have a side below 32 pixels and are excluded; validation keeps "
        "such images",
        f"4 of 4 validation images are also training images, which raises AP: "
        f"{root}/train2017/0.jpg, {root}/train2017/1.jpg, ... (4 in all)",
    ]


def test_crowds_are_logged_and_ignored(root):
    entry = content()
    for one in entry["annotations"][1:]:
        one["iscrowd"] = 1
    for split in ("train2017", "val2017"):
        save(root, entry, split)
    data = module(root)
    data.setup()
    assert data.notices({}) == [
        "3 of 4 training boxes are crowds (iscrowd=1) and are excluded from training",
        "3 of 4 validation boxes are crowds (iscrowd=1) and are ignored in AP",
        "1 of 2 classes do not occur in validation: dog",
    ]
    samples = [s for batch in data.train_dataloader() for s in batch["data_samples"]]
    assert sum(len(sample.gt_instances) for sample in samples) == 1
    assert sum(len(sample.ignored_instances) for sample in samples) == 3
    assert perfect_detections(data)[1] == pytest.approx(1)
    entry["annotations"][0]["iscrowd"] = 1
    save(root, entry, "val2017")
    data = module(root)
    data.setup()
    with pytest.raises(
        ValueError, match="has no box of cat, dog in AP: its images can only be pred"
    ):
        _ = data.annotations
    save(root, entry)
    with pytest.raises(ValueError, match=r"zero images left .* 4 images 4 lack a box"):
        module(root).setup()


def test_unintended_data_are_logged(root, caplog):
    train, val = content(), content()
    train["annotations"] = train["annotations"][:3]
    val["annotations"] = [entry for entry in val["annotations"] if entry["category_id"] == 8]
    save(root, train, "train2017")
    save(root, val, "val2017")
    data = module(root)
    data.setup()
    assert len(data.dataset("train")) == 3
    with caplog.at_level("INFO"):
        data.check_files()
    assert [record.message for record in caplog.records][1:] == [
        "1 of 4 training images lack boxes of these classes and are excluded",
        "1 of 2 classes do not occur in validation: cat",
    ]


def test_rotated_images_are_counted(root, caplog):
    exif = Image.Exif()
    exif[0x0112] = 3
    Image.new("RGB", (60, 40)).save(root / "val2017/1.jpg", exif=exif)
    data = module(root)
    data.setup()
    with caplog.at_level("INFO"):
        data.check_files()
    assert "1 of 8 images are rotated by their EXIF data (" in caplog.text
    assert "val2017/1.jpg), and boxes must fit the rotated images" in caplog.text
