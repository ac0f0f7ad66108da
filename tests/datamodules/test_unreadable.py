"""Predictions continue after a broken file; thin images are rejected by name."""

from pathlib import Path

import pytest
from PIL import Image
from torch import nn

from datamodules import ClassFoldersDataModule
from datamodules.loading.sampling import Unreadable
from tasks.classification.family import FAMILY
from tasks.engine.base import BaseTask
from tasks.engine.batches import UNREADABLE
from tests.errors import refuses

LONG = "é" * 125 + "x"  # 251 bytes


class Names(BaseTask):
    family = FAMILY
    is_spare = False

    def __init__(self):
        super().__init__(nn.Linear(1, 1))
        self._files = None

    def describe(self, batch, datamodule):
        return [{"input": datamodule.predict_name(sample)} for sample in batch["sample_id"]]


@pytest.fixture
def images(tmp_path):
    for name in ("a.png", "c.png", f"{LONG}.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    (tmp_path / "b.png").touch()
    (tmp_path / "d.jpg").write_bytes(b"\xff\xd8\xff\xe0none")
    return tmp_path


def module(images, **options):
    data = ClassFoldersDataModule(None, image_size=32, predict_path=images, **options)
    data.predict_only(["x", "y"])
    return data


@pytest.mark.parametrize("workers", [0, 1])
def test_intact_images_are_predicted(images, workers):
    data = module(images, batch_size=2, num_workers=workers)
    batches = list(data.predict_dataloader())
    assert [len(batch.get("image", ())) for batch in batches] == [1, 1, 1]
    broken = [one for batch in batches for one in batch.get("unreadable", ())]
    assert [Path(one.name).name for one in broken] == ["b.png", "d.jpg"]
    assert "b.png is empty (0 bytes)" in broken[0].reason
    assert "d.jpg is truncated or damaged" in broken[1].reason
    assert data.preview_batch(5)["sample_id"].tolist() == [0, 2, 4]


def test_a_step_names_the_broken_images(images):
    data = module(images, batch_size=2, num_workers=0)
    task = Names()
    task._trainer = type("Trainer", (), {"datamodule": data})()
    rows = task.predict_step(next(iter(data.predict_dataloader())), 0)
    assert [Path(row["input"]).name for row in rows] == ["a.png", "b.png"]
    assert "is empty" in rows[1][UNREADABLE]
    rows = task.predict_step({"unreadable": [Unreadable("e.png", "broken")]}, 0)
    assert rows == [{"input": "e.png", UNREADABLE: "broken"}]


def test_in_python_a_broken_image_is_an_error(images):
    task = Names()
    task.data, task.weights = module(images), nn.Linear(1, 1)
    refuses(r"b\.png is empty", task.predict, images)
    assert len(task.predict([images / "a.png", images / "c.png"])) == 2
