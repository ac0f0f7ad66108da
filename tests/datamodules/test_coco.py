"""COCO: what mmdet gets from a sound set, and a message for every fault of another."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("mmdet")
pytest.importorskip("pycocotools")

from datamodules import CocoDataModule, coco_checks
from tasks.coco_metric import CocoMetric

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
    """Checked, served to mmdet and kept for evaluation from one reading."""
    parsed = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda raw: parsed.append(len(raw)) or loads(raw))
    monkeypatch.setattr(json, "load", lambda file: pytest.fail(f"{file.name} is read again"))
    data = module(root)
    data.setup()
    metric = CocoMetric(data.annotations, data.category_ids, with_masks=True)
    sizes = [
        (root / f"annotations/instances_{split}2017.json").stat().st_size
        for split in ("train", "val")
    ]
    assert parsed == sizes
    metric.update([])
    assert metric.compute()


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
    """Of 60x40 images the whole ones have the ratio 3:2, the crops of up to 600 of 900x600 not."""
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


def test_classes_restrict_the_set(root):
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


def test_boxes_alone(root):
    entry = content()
    for one in entry["annotations"]:
        del one["segmentation"]
    save(root, entry)
    with pytest.raises(ValueError, match=r"annotation 100 .* has no segmentation.*with_mask=false"):
        module(root).setup()
    data = module(root, with_mask=False)
    data.setup()
    assert "masks" not in first(data.train_dataloader())[1].gt_instances


def test_predict(root):
    data = module(root, predict_path=root / "train2017")
    data.setup()
    samples = [s for batch in data.predict_dataloader() for s in batch["data_samples"]]
    assert [sample.img_path for sample in samples] == [
        str(root / f"train2017/{i}.jpg") for i in range(4)
    ]
    assert samples[0].ori_shape == (40, 60)
    default = module(root)
    default.setup()
    assert "val2017" in first(default.predict_dataloader())[1].img_path


def test_images_of_a_server_are_predicted_by_their_ids_and_not_tested(root):
    """As COCO's image_info_test-dev2017.json, which has no list of annotations."""
    info = {key: value for key, value in content().items() if key != "annotations"}
    save(root, info, "val2017")
    data = module(root)
    data.setup()
    samples = [s for batch in data.predict_dataloader() for s in batch["data_samples"]]
    assert [sample.img_id for sample in samples] == [10, 11, 12, 13]
    assert data.category_ids == (3, 8)
    with pytest.raises(ValueError, match=r"has no annotations: .*mode=predict.* neither tested"):
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


def strays(key, value):
    entry = content()
    entry["annotations"] = [{**annotation(i, 10), key: value} for i in range(7)]
    return entry


FAULTS = [
    (json.dumps(content())[:200], r"no valid JSON at byte \d+ of 200"),
    ('{"é": ', r"no valid JSON at byte 7 of 7"),
    (json.dumps([1]), "has no list 'categories'.*found list"),
    (changed(["images"], None), "has no list 'images'.*found .*'annotations', 'categories'"),
    (changed(["annotations"], None), "has no list 'annotations'"),
    (changed(["categories"], None), "has no list 'categories'"),
    (changed(["categories"], []), "no categories"),
    (changed(["images", 2, "file_name"], None), r"entry 2 of 'images' .* lacks \['file_name'\]"),
    (changed(["annotations", 1, "area"], None), r"entry 1 of 'annotations' .* lacks \['area'\]"),
    (strays("image_id", 99), "7 annotations .* unknown image_id.*: 0, 1, 2, 3, 4, ... .7 in all"),
    (strays("category_id", 99), "7 annotations .* unknown category_id"),
    (changed(["annotations", 1, "id"], 100), "duplicates among its annotations: 100"),
    (changed(["images", 1, "id"], 10), "duplicates among its images: 10"),
    (changed(["categories", 1], {"id": 8, "name": "cat"}), "duplicates among its category names"),
    (strays("bbox", [1, 2, 3]), "7 annotations .* not four finite numbers"),
    (strays("bbox", [0, 0, float("inf"), 3]), "not four finite numbers"),
    (strays("bbox", [10, 10, -5, 5]), "7 of 7 boxes .*must be .* in pixels"),
    (strays("bbox", [0.1, 0.1, 0.4, 0.5]), "smaller than a pixel"),
    (strays("bbox", [70, 10, 5, 5]), "outside their image"),
    (strays("segmentation", [[1, 2, 3, 4]]), "annotation 0 .* polygon of 4 numbers"),
    (
        strays("segmentation", {"size": [60, 40], "counts": [2400]}),
        r"run-length mask of \[60, 40\]",
    ),
    (strays("segmentation", {"size": [40, 60], "counts": [2399]}), "run lengths of 2399 pixels"),
    (strays("segmentation", [[1, 2, 3, float("nan"), 5, 6]]), "polygon with the coordinate nan"),
    (strays("segmentation", [[1, 2, 3, float("inf"), 5, 6]]), "the coordinate inf"),
    (strays("segmentation", [[1, 2, 3, 1e9, 5, 6]]), "annotation 0 .* coordinate 1000000000.0"),
    (strays("segmentation", [[1, 2, 3, None, 5, 6]]), "the coordinate None"),
    (strays("segmentation", ["ab"]), "polygon that is no list of numbers but 'ab'"),
    (strays("segmentation", {"size": [40, 60], "counts": [2401, -1]}), "cannot be read"),
    (strays("segmentation", {"size": [40, 60], "counts": None}), "cannot be read: None"),
    (strays("segmentation", {"size": [40, 60], "counts": "P_oooo"}), "cannot be read"),
    (strays("segmentation", {"size": [40, 60], "counts": "ZZ"}), "cannot be read|pixels in an"),
    (strays("segmentation", {"size": "40x60", "counts": [2400]}), "mask of '40x60'"),
    (strays("id", None), "entry 0 of 'annotations' .* id None, which is no whole number"),
    (strays("image_id", "7"), "image_id '7', which is no whole number"),
    (strays("area", "12"), "area '12', which is no number"),
    (strays("iscrowd", []), r"iscrowd \[\], which is no 0 or 1"),
    (changed(["images", 1, "id"], [1]), r"entry 1 of 'images' .* id \[1\], which is no whole"),
    (changed(["images", 1, "height"], "40"), "height '40', which is no number of pixels from 1"),
    (changed(["images", 1, "width"], 10**7), "no number of pixels from 1 to 100000"),
    (changed(["images", 1, "file_name"], 5), "file_name 5, which is no file name"),
    (changed(["categories", 0, "name"], ["cat"]), r"name \['cat'\], which is no name"),
    (changed(["images"], []), "has no images"),
    ("[" * 100_000, "nested too deeply|no valid JSON"),
    ('{"categories": ' + "9" * 5000 + "}", "cannot be read"),
    (changed(["annotations"], []), "no image of .* is left .* of 4 images 4 have no box"),
]


@pytest.mark.parametrize(("entry", "message"), FAULTS)
def test_faults_of_the_json(root, entry, message):
    save(root, entry)
    with pytest.raises(ValueError, match=message) as caught:
        module(root).setup()
    assert "instances_train2017.json" in str(caught.value)


def test_run_lengths_as_text_are_those_of_pycocotools(root):
    from pycocotools import mask as toolkit

    generator = np.random.default_rng(0)
    for share in (0.0, 0.02, 0.5, 1.0):
        pixels = np.asfortranarray(generator.random((40, 60)) < share).astype(np.uint8)
        text = toolkit.encode(np.asfortranarray(pixels))["counts"].decode()
        lengths = coco_checks._run_lengths(text)
        runs = np.repeat(np.arange(len(lengths)) % 2, lengths).reshape(60, 40).T
        assert (runs == pixels).all()
    save(root, strays("segmentation", {"size": [40, 60], "counts": text}))
    module(root).setup()


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
        patch.setattr("datamodules.coco_checks.say", notes.append)
        data.setup()
    assert len(notes) == 1
    assert "2 of 26 boxes" in notes[0]
    assert "500, 501; they are left out" in notes[0]
    counts = [
        len(sample.gt_instances)
        for batch in data.train_dataloader()
        for sample in batch["data_samples"]
    ]
    assert sum(counts) == 24
    assert "loading annotations" not in capsys.readouterr().out


def test_category_names(root):
    with pytest.raises(ValueError, match=r"\['bird', 'cat'\].*\['cat', 'dog'\].*file: \['bird'\]"):
        module(root, classes=["bird", "cat"]).setup()
    save(root, {**content(), "categories": [{"id": 3, "name": "cat"}, {"id": 8, "name": "fox"}]})
    with pytest.raises(ValueError, match=r"differ in their categories.*\['dog', 'fox'\]"):
        module(root).setup()
    save(root, {**content(), "categories": CATEGORIES[::-1]})
    with pytest.raises(ValueError, match="order of them"):
        module(root).setup()


def test_missing_files(root, tmp_path):
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
    with pytest.raises(FileNotFoundError, match=r"no annotation file .*data.train_annotations"):
        module(root).setup()
    with pytest.raises(FileNotFoundError, match=r"no folder .*elsewhere"):
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


def test_annotated_size_must_be_the_images(root):
    Image.new("RGB", (40, 60)).save(root / "val2017/1.jpg")
    data = module(root)
    data.setup()
    with pytest.raises(ValueError, match=r"1\.jpg is 40x60 pixels.* annotated as 60x40"):
        list(data.val_dataloader())
    with pytest.raises(ValueError, match=r"1\.jpg is 40x60 pixels.* annotated as 60x40"):
        data.check_files()


def test_options_are_checked(root):
    with pytest.raises(ValueError, match=r"data\.scale="):
        module(root, scale=(1, 2, 3))
    with pytest.raises(ValueError, match=r"data\.flip=2"):
        module(root, flip=2)
    with pytest.raises(ValueError, match=r"data\.scale_jitter=\[2.0, 1.0\]"):
        module(root, scale_jitter=(2.0, 1.0))
    with pytest.raises(ValueError, match=r"data\.train_crops=true resizes crops to one of"):
        module(root, train_crops=True)
    with pytest.raises(ValueError, match="exclude each other"):
        module(root, scale_jitter=(1.0, 2.0), train_sizes=[(90, 60)])


def test_what_may_not_be_meant_is_said(root, caplog):
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
        "1 of 4 training images have no box of these classes and are left out",
        "1 of 2 classes do not occur in validation: cat",
    ]
