"""Train a detector on a loader of your own."""

# %% Data: any data set of dictionaries; images may differ in size
import torch
from torch.utils.data import DataLoader

from heads.toolkits.samples import collate_detection

image = torch.randint(256, (3, 96, 128), dtype=torch.uint8)
sample = {"image": image, "boxes": torch.tensor([[8, 9, 50, 60]]), "labels": torch.tensor([1])}
loader = DataLoader([sample] * 4, batch_size=2, collate_fn=collate_detection)

# %% Train, test and predict
import lightning

import tasks
from backbones import create_backbone
from heads.toolkits.detectors import build_detector

backbone = create_backbone("swin_t_afbo", dense=True, img_size=(96, 128))
task = tasks.DetectionTask(build_detector(backbone, 2, name="retinanet"), ["cat", "dog"])
trainer = lightning.Trainer(max_epochs=1)
trainer.fit(task, loader, loader)
trainer.test(task, loader)  # COCO's average precisions
best = tasks.load(trainer.checkpoint_callback.best_model_path)
print(best.predict(image)[0]["detections"][0])
