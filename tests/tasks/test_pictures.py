"""Pictures of predictions: their content and its position."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from datamodules import ADE20KDataModule, CocoDataModule, ImageFolderDataModule, SampleSegmentation
from datamodules.dense.toolkit_data import palette
from datamodules.images.transforms import LightAugmentation, PaperAugmentation
from tasks.classification import task as classification
from tasks.classification.task import ClassificationTask
from tasks.detection.instance_drawing import draw_instances
from tasks.detection.task import DetectionTask
from tasks.segmentation.segment_drawing import draw_segments
from tasks.segmentation.task import IGNORED, SegmentationTask
from tests.runs import RECIPE

PALETTE = palette(14)


class Guess(nn.Linear):
    """Returns preset predictions."""

    def __init__(self, predictions):
        super().__init__(1, 1)
        self.predictions = predictions

    def predict(self, batch):
        return self.predictions


@pytest.fixture
def drawn(monkeypatch):
    """The tiles of contact sheets."""
    tiles = []
    monkeypatch.setattr(classification, "contact_sheet", tiles.extend)
    return tiles


@pytest.mark.parametrize("augmentation", [PaperAugmentation, LightAugmentation])
def test_pictures_keep_the_colours_of_the_files(augmentation, drawn):
    data = ImageFolderDataModule(augmentation=augmentation(mean=[0.5, 0.4, 0.3], std=[0.5] * 3))
    image = data.augmentation.eval(8)(Image.new("RGB", (8, 8), (10, 130, 250)))
    task = ClassificationTask(Guess(torch.eye(2)[:1]), "ab", **RECIPE)
    task.preview(data.normalise({"image": image[None], "label": torch.tensor([0])}), data)
    assert drawn[0][0].getpixel((4, 4)) == (10, 130, 250)


def named(data, names):
    """Return a data module with the names of its classes, as after its setup."""
    data.class_names = tuple(names)
    return data


@pytest.fixture
def turned(tmp_path):
    """Save a rotated JPEG with a white box; upright it is 40 wide and 60 high."""
    upright = Image.new("RGB", (40, 60))
    upright.paste("white", (10, 40, 30, 55))
    exif = upright.getexif()
    exif[274] = 6
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.jpg", exif=exif)
    return tmp_path / "turned.jpg"


def test_boxes_lie_on_a_turned_photograph(turned):
    pytest.importorskip("mmdet")
    from mmdet.structures import DetDataSample
    from mmengine.structures import InstanceData

    boxes = {"bboxes": torch.tensor([[10.0, 40, 30, 55]]), "labels": torch.tensor([0])}
    sample = DetDataSample(metainfo={"img_path": str(turned)})
    sample.gt_instances = InstanceData(**boxes)
    sample.pred_instances = InstanceData(**boxes, scores=torch.tensor([0.9]))
    task = DetectionTask(Guess([sample]), ["box"], **RECIPE)
    (pair,) = task.preview({"data_samples": [sample]}, named(CocoDataModule(), ["box"]))
    assert pair.size == (320 + 320 + 6, 480 + 20)  # eight times as large
    for left in (0, 326):
        assert pair.getpixel((left + 10 * 8, 20 + 48 * 8)) == PALETTE[0]
        assert min(pair.getpixel((left + 20 * 8, 20 + 48 * 8))) > 240
        assert max(pair.getpixel((left + 20 * 8, 20 + 20 * 8))) < 15


def segmented(photo, labels, data, classes):
    """Return the picture of labels on a photograph, which are prediction and truth."""
    pytest.importorskip("mmseg")
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample

    sample = SegDataSample(metainfo={"img_path": str(photo)})
    sample.gt_sem_seg = sample.pred_sem_seg = PixelData(data=labels)
    task = SegmentationTask(Guess([sample]), classes, **RECIPE)
    (picture,) = task.preview({"data_samples": [sample]}, data)
    return picture


def test_masks_lie_on_a_turned_photograph(turned):
    labels = torch.full((1, 60, 40), 255)
    labels[:, 40:55, 10:30] = 0
    pair = segmented(turned, labels, named(ADE20KDataModule(), ["", "other"]), ["", "other"])
    assert pair.size == (320 + 320 + 6, 480 + 20)
    tinted = np.array(PALETTE[0]) * 130 / 255 + 125
    for left in (0, 326):
        white = pair.getpixel((left + 20 * 8, 20 + 48 * 8))
        assert white == pytest.approx(tinted, abs=8)  # a JPEG's white
        assert max(pair.getpixel((left + 20 * 8, 20 + 20 * 8))) < 15


@pytest.mark.parametrize("kind", [ADE20KDataModule, SampleSegmentation])
def test_the_datamodule_defines_the_untinted_class(kind, turned):
    labels = torch.zeros(1, 60, 40, dtype=torch.long)
    picture = segmented(turned, labels, named(kind(), ["photo", "0"]), ["photo", "0"])
    assert (max(picture.getpixel((20 * 8, 20 * 8))) < 15) == (kind is SampleSegmentation)


def test_positions_of_boxes_masks_and_the_untinted_background():
    mask = np.zeros((1, 40, 80), bool)
    mask[0, 10:20, 30:50] = True
    drawn = draw_instances(Image.new("L", (80, 40)), [[30, 10, 50, 20]], [0], [""], PALETTE, mask)
    assert (drawn.mode, drawn.size) == ("RGB", (320, 160))  # four times as large
    assert draw_instances(Image.new("RGB", (80, 40)), [], [], [], PALETTE).size == (320, 160)
    assert drawn.getpixel((120, 60)) == drawn.getpixel((200, 80)) == PALETTE[0]
    assert drawn.getpixel((160, 60)) == tuple(c // 2 for c in PALETTE[0])
    assert drawn.getpixel((160, 90)) == drawn.getpixel((215, 60)) == (0, 0, 0)
    photo, labels = Image.new("RGB", (80, 40)), np.zeros((40, 80), int)
    drawn = draw_segments(photo, labels, ["photo"], PALETTE, background="photo")
    assert drawn.getpixel((10, 10)) == (0, 0, 0)
    assert draw_segments(photo, labels, ["photo"], PALETTE).getpixel((10, 10)) != (0, 0, 0)
    drawn = draw_segments(photo, np.full((40, 80), IGNORED), ["photo"], PALETTE)
    assert drawn.getpixel((10, 10)) == (0, 0, 0)


def test_only_the_surest_of_overlapping_detections_is_drawn():
    pytest.importorskip("mmdet")
    from mmengine.structures import InstanceData

    from tasks.detection.task import _to_draw

    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 11], [0, 0, 10, 30], [40, 0, 50, 10.0]])
    found = InstanceData(
        bboxes=boxes, labels=torch.tensor([0, 1, 0, 0]), scores=torch.tensor([0.4, 0.9, 0.8, 0.2])
    )
    # The first overlaps the second, of another class; the last has a low score.
    assert _to_draw(found, 0.3).scores.tolist() == pytest.approx([0.9, 0.8])
