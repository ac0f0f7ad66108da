"""The generated datasets: reproducible bytes, disjoint splits, correct annotations."""

import hashlib
import json
import sys
from functools import partial

import numpy as np
import pytest
from PIL import Image

from datamodules import SampleClassification, SampleDetection, SampleSegmentation, SampleTransfer
from datamodules.annotation_formats.outlines import run_lengths
from datamodules.sample import base as sample_base
from datamodules.sample.digits import PHOTO_COLUMNS, load_material
from datamodules.sample.outline_shapes import bounding_box, encode_mask
from datamodules.sample.scenes import generate_scenes, semantic_mask
from tests.datamodules import loading

DENSE_OPTIONS = {
    "num_train": 6, "num_val": 3, "scene_size": 128, "scale_jitter": (0.5, 2.0), "flip": 0.5,
}  # fmt: skip
SMALL = {
    SampleClassification: {"train_copies": 2, "val_copies": 1, "digits_per_class": 6},
    SampleTransfer: {"train_per_class": 2, "val_per_class": 1},
    SampleDetection: DENSE_OPTIONS,
    SampleSegmentation: DENSE_OPTIONS,
}
DENSE = (SampleDetection, SampleSegmentation)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def small(kind, root, **options):
    if kind in DENSE:
        pytest.importorskip("mmdet")
        pytest.importorskip("mmseg")
    return kind(root, **{**SMALL[kind], "num_workers": 0, "batch_size": 2, **options})


ready = partial(loading.ready, small)


def digests(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


@pytest.mark.parametrize("kind", SMALL)
def test_same_seed_same_bytes(kind, cache, tmp_path):
    first, second, other = (
        small(kind, cache),
        small(kind, tmp_path),
        small(kind, tmp_path, sample_seed=1),
    )
    for data in (first, second, other):
        data.prepare_data()
    assert digests(first.root)
    assert digests(first.root) == digests(second.root)
    assert other.root != second.root
    assert digests(other.root) != digests(second.root)


def test_splits_have_different_digits_and_photos():
    train, val = load_material("train"), load_material("val")
    assert len(train.digits) == 1400
    assert len(val.digits) == 397
    shared = {digit.tobytes() for digit in train.digits} & {digit.tobytes() for digit in val.digits}
    assert not shared
    assert PHOTO_COLUMNS["train"].stop < PHOTO_COLUMNS["val"].start
    assert set(train.labels.tolist()) == set(val.labels.tolist()) == set(range(10))


def test_toolkits_are_imported_late(cache, monkeypatch):
    for kind, package in ((SampleDetection, "mmdet"), (SampleSegmentation, "mmseg")):
        monkeypatch.setitem(sys.modules, f"{package}.datasets", None)
        with pytest.raises(ImportError, match=rf"needs {package}.*pip install"):
            small(kind, cache).setup()


def test_defaults(monkeypatch, tmp_path):
    monkeypatch.setenv("MIXERLAB_CACHE", str(tmp_path))
    data = SampleClassification(digits_per_class=2, train_copies=1)
    notes = []
    monkeypatch.setattr(sample_base, "log", notes.append)
    data.setup()
    data.setup()
    assert data.root.parent == tmp_path
    assert notes == [f"Sample data in {data.root}; for a real dataset pass {data.example}"]
    assert "data=imagenet data.root=" in data.example
    assert data.dataset("train")[(0, 0)]["image"].shape == (3, 64, 64)


def test_annotations_are_the_visible_pixels(cache):
    coco = pytest.importorskip("pycocotools.coco")
    data = small(SampleDetection, cache)
    data.prepare_data()
    file = data.root / "annotations/instances_train2017.json"
    annotations = json.loads(file.read_text())["annotations"]
    kinds = {type(entry["segmentation"]) for entry in annotations}
    assert kinds == {list, dict}
    api = coco.COCO(str(file))
    entries = iter(annotations)
    for scene in generate_scenes("train", 6, 128, 0):
        for mask, label in zip(scene.masks, scene.labels, strict=True):
            entry = next(entries)
            assert np.array_equal(api.annToMask(entry).astype(bool), mask)
            assert entry["bbox"] == list(bounding_box(mask))
            assert entry["area"] == mask.sum()
            assert api.cats[entry["category_id"]]["name"] == str(label)
    assert next(entries, None) is None


def test_masks_are_encoded_exactly():
    mask_api = pytest.importorskip("pycocotools.mask")
    rng = np.random.default_rng(0)
    for share in (0.1, 0.3, 0.5, 0.9, 1.0):
        mask = rng.random((12, 9)) < share
        for encoded in (encode_mask(mask), run_lengths(mask)):
            runs = mask_api.frPyObjects(encoded, 12, 9)
            decoded = mask_api.decode(mask_api.merge(runs) if isinstance(runs, list) else runs)
            assert np.array_equal(decoded.astype(bool), mask)
    ring = np.ones((5, 5), bool)
    ring[2, 2] = False
    assert isinstance(encode_mask(ring), dict)
    ring[2, 2] = True
    assert encode_mask(ring) == [[0, 0, 5, 0, 5, 5, 0, 5]]


def test_semantic_masks(cache):
    data = small(SampleSegmentation, cache)
    data.prepare_data()
    for index, scene in enumerate(generate_scenes("train", 6, 128, 0), start=1):
        name = f"ADE_train_{index:08d}"
        mask = Image.open(data.root / "annotations/training" / f"{name}.png")
        labels = np.asarray(mask)
        assert mask.mode == "L"
        assert np.array_equal(labels, semantic_mask(scene))
        assert {2 + label for label in scene.labels} <= set(np.unique(labels).tolist())
        assert (labels == 1).mean() > 0.3
        # The rim separates digits from the photo: no digit pixel touches a photo pixel.
        digit, photo = labels >= 2, labels == 1
        assert not (digit[1:] & photo[:-1]).any()
        assert not (digit[:, 1:] & photo[:, :-1]).any()


def test_classes_match_the_images(cache):
    data = ready(SampleClassification, cache, augmentation=None, image_size=32)
    assert len(data.dataset("train")) == 120
    val = data.dataset("val")
    assert len(val) == 60
    for i in range(60):
        number = int(val.describe(i).rsplit("/")[-1].split("_")[0])
        assert val[(0, i)]["label"] == load_material("val").labels[number]
