"""A two-layer network and its task, for runs compared number by number."""

import lightning.pytorch as lightning
import torch
import torch.nn.functional as F
from torch import nn

from datamodules import SampleClassification
from tasks.classification.task import ClassificationTask
from tools.config.run_config import compose_config
from tools.runs import trainer as trainers
from tools.runs.resume import find_start

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
        cache, digits_per_class=digits, train_copies=1, picture_size=32,
        **{"num_workers": 0, "batch_size": 6, **options},
    )  # fmt: skip
    data.setup()
    return data


def train_on_digits(folder, cache, make_task, *, resume=False, first=(), **options):
    """Train on images of 32 pixels, with ``first`` before other callbacks; return last.ckpt."""
    folder.mkdir(exist_ok=True)
    data = tiny_data(cache)
    task, usual = make_task(), dict(compose_config(["trainer=cpu"]).trainer)
    options = {**usual, "max_epochs": 2, "limit_val_batches": 1, **options}
    trainer = trainers.make_trainer(
        options, folder, task.monitor, task.mode, training=True, checkpoint_every=None
    )
    trainer.callbacks[:0] = first
    start = find_start(folder, None, task, options) if resume else None
    trainers.fit(trainer, task, data, start=start)
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
