"""Train a classifier on a loader of your own."""

# %% Data: any data set of dictionaries
import torch
from torch.utils.data import DataLoader

samples = [{"image": torch.randn(3, 64, 64), "label": i % 3} for i in range(8)]
loader = DataLoader(samples, batch_size=4)

# %% Train, test and predict
import lightning

import tasks
from backbones import create_backbone
from heads.linear import LinearClassifier

model = LinearClassifier(create_backbone("deit_t_afbo", img_size=64), num_classes=3)
task = tasks.ClassificationTask(model, ["cat", "dog", "fox"])
trainer = lightning.Trainer(max_epochs=1)
trainer.fit(task, loader, loader)  # the second loader validates
trainer.test(task, loader)  # accuracy and calibration
best = tasks.load(trainer.checkpoint_callback.best_model_path)
print(best.predict(torch.rand(3, 80, 60)))  # or a path, a folder, a PIL image, an array
