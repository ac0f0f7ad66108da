"""Train a task with a plain Trainer, and open its checkpoint."""

import lightning
import numpy
import torch
from torch.utils.data import DataLoader

from backbones import create_backbone
from heads.linear import LinearClassifier
from tasks import ClassificationTask, load

samples = [{"image": torch.randn(3, 64, 64), "label": i % 3} for i in range(8)]

model = LinearClassifier(create_backbone("deit_t_afbo", img_size=64), num_classes=3)
task = ClassificationTask(model, ["cat", "dog", "fox"], optimizer={"lr": 1e-3})
trainer = lightning.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False
)
trainer.fit(task, DataLoader(samples, batch_size=4))  # or a datamodule of datamodules/
trainer.save_checkpoint("pets.ckpt")

photo = numpy.zeros((48, 64, 3), dtype=numpy.uint8)
task.predict(photo)  # or a path, a grey array (H, W), a float tensor (3, H, W) in [0, 1], ...
load("pets.ckpt")  # to predict with
ClassificationTask.load_from_checkpoint("pets.ckpt")  # to train on
