"""``task.predict``: each image as it would be alone, from any thread."""

import json
import random

import numpy as np
import pytest
import torch

from datamodules.classification import ClassificationDataModule
from heads.linear import LinearClassifier
from tasks.classification import ClassificationTask
from tasks.detection import DetectionTask
from tasks.segmentation import SegmentationTask
from tests.dense_heads import CLASSES, pictures, serving_data, small_model
from tests.families import rest_slow, short
from tests.runs import RECIPE
from tests.threads import in_threads

VIEWS = {"test_scales": [0.75, 1.0], "test_flip": True}
CASES = {
    "classification": {},
    "mask_rcnn": {},
    "retinanet": VIEWS,
    "dino": {},
    "upernet": VIEWS,
    "semantic_fpn": {},
    "mask2former": {},
}


def loaded(case):
    """A task as ``tasks.load`` gives it, but for its weights."""
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
    """Images of several sizes."""
    for number, picture in enumerate(pictures()):
        picture.save(tmp_path / f"{number}.png")
    return sorted(tmp_path.iterdir())


def plain(rows):
    return json.dumps(rows, default=lambda labels: labels.tolist())


@pytest.mark.parametrize("case", rest_slow(CASES, ("classification", "semantic_fpn")))
def test_calls_of_several_threads_are_those_of_one(case, files, one_thread):
    """Lists of other lengths, orders and sizes, by turns."""
    task = loaded(case)
    lists = [tuple(files[:1]), tuple(files[1:]), tuple(files[::-1]), (files[3], files[0])]
    expected = {given: plain(task.predict(list(given))) for given in lists}
    assert len(set(expected.values())) == len(lists)
    task = loaded(case)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    for given, found in in_threads(lambda given: plain(task.predict(list(given))), lists):
        assert found == expected[given]
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert after == before


@pytest.mark.parametrize("case", rest_slow(CASES, ("classification", "retinanet")))
def test_a_list_gives_what_its_images_give_alone(case, files, one_thread):
    task = loaded(case)
    rows = task.predict(files)
    assert [row["image"] for row in rows] == [str(file) for file in files]
    for file, row in zip(files, rows, strict=True):
        (alone,) = task.predict(file)
        check_close(row, alone)


def check_close(row, alone):
    row, alone = ({k: v for k, v in one.items() if k != "image_id"} for one in (row, alone))
    assert row.keys() == alone.keys()
    for key, value in alone.items():
        if key == "detections":
            assert len(row[key]) == len(value) > 9
            for one, other in zip(row[key], value, strict=True):
                assert one["class"] == other["class"]
                assert one.get("segmentation") == other.get("segmentation")
                assert [one["score"], *one["bbox"]] == pytest.approx(
                    [other["score"], *other["bbox"]], abs=1e-3
                )
        elif key == "labels":
            assert (row[key] == value).mean() > 0.999
        else:
            assert row[key] == pytest.approx(value, abs=1e-4)
