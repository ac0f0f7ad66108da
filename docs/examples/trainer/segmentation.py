"""Train a segmentor on a loader of your own."""

# %% Data: any data set of dictionaries; images may differ in size
import torch
from torch.utils.data import DataLoader

from heads.toolkits.samples import collate_segmentation

image, mask = torch.randint(256, (3, 64, 96), dtype=torch.uint8), torch.randint(3, (64, 96))
loader = DataLoader([{"image": image, "mask": mask}] * 4, 2, collate_fn=collate_segmentation)

# %% Train, test and predict
import lightning

import tasks
from backbones import create_backbone
from heads.toolkits.segmentors import build_segmentor

backbone = create_backbone("pvt_v2_b1_afbo", dense=True, img_size=(64, 96))
model = build_segmentor(backbone, 3, channels=64, group_norm=True)
task = tasks.SegmentationTask(model, ["sky", "road", "tree"])
trainer = lightning.Trainer(max_epochs=1)
trainer.fit(task, loader, loader)
trainer.test(task, loader)  # mean IoU
print(tasks.load(trainer.checkpoint_callback.best_model_path).predict(image)[0]["shares"])
