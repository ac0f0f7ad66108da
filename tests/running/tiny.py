"""A two-layer network and its task, for runs compared number by number."""

import lightning.pytorch as lightning
import torch.nn.functional as F
from torch import nn

from datamodules import SampleClassification
from tasks.classification.task import ClassificationTask

ADAMW = {"name": "adamw", "lr": 1e-2}
CONSTANT = {"name": "constant"}


class Tiny(nn.Module):
    """Classifier with dropout and running statistics, which resuming must restore."""

    def __init__(self, classes=10):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 4, 8, 8), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3),
            nn.Linear(64, classes),
        )  # fmt: skip
        self.seen = []

    def loss(self, batch):
        self.seen.append(batch["sample_id"].tolist())
        logits = self.net(batch["image"])
        return {"loss_cls": F.cross_entropy(logits, batch["label"]), "logit": logits.mean()}

    def predict(self, batch):
        return self.net(batch["image"])


def tiny_task(classes=10, model=Tiny, **options):
    names = [str(i) for i in range(classes)]
    options = {"optimizer": ADAMW, "schedule": CONSTANT} | options
    return ClassificationTask(model(classes), names, **options)


def tiny_data(cache, digits=4, **options):
    """Return six batches of six images of 32 pixels, and seed the process."""
    lightning.seed_everything(0, verbose=False)
    data = SampleClassification(
        cache, digits_per_class=digits, train_copies=1, picture_size=32, batch_size=6,
        **{"num_workers": 0, **options},
    )  # fmt: skip
    data.setup()
    return data
