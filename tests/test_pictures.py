"""Pictures of predictions: what is drawn, and where."""

import torch
from PIL import Image
from torch import nn

from tasks import classification
from tasks.classification import ClassificationTask
from tasks.drawing import CAPTION_COLOURS, contact_sheet

RECIPE = {"optimizer": {"name": "sgd", "lr": 0.1}, "schedule": {"name": "constant"}}


class Guess(nn.Linear):
    """Predicts what it is told."""

    def __init__(self, predictions):
        super().__init__(1, 1)
        self.predictions = predictions

    def predict(self, batch):
        return self.predictions


def test_pictures_without_a_label_are_neither_right_nor_wrong(monkeypatch):
    drawn = []
    monkeypatch.setattr(classification, "contact_sheet", drawn.extend)
    task = ClassificationTask(Guess(torch.eye(3)), "abc", **RECIPE)
    task.preview({"image": torch.zeros(3, 3, 8, 8), "label": torch.tensor([-1, 1, 0])})
    assert [tile[1:] for tile in drawn] == [("a", None), ("b", True), ("c (is a)", False)]


def test_the_colour_of_a_caption_says_whether_it_is_right():
    for right, colour in CAPTION_COLOURS.items():
        sheet = contact_sheet([(Image.new("RGB", (8, 8)), "HHHH", right)])
        found = {pixel for _, pixel in sheet.getcolors(1 << 16)}
        assert found & set(CAPTION_COLOURS.values()) == {colour}
