"""Fine-tune a pretrained backbone with a datamodule."""

# %% Weights: any released file. Data: CIFAR100DataModule(root), or a LightningDataModule of yours
import torch

from backbones import create_backbone
from datamodules.sample.datamodules import SampleTransfer

torch.save(create_backbone("deit_t_afbo").state_dict(), "pretrained.pth")
data = SampleTransfer(train_per_class=1, val_per_class=1)
data.setup()

# %% Train, test and predict
import lightning

import tasks
from heads.linear import LinearClassifier

backbone = create_backbone("deit_t_afbo", pretrained="pretrained.pth", img_size=64)
model = LinearClassifier(backbone, data.num_classes)
rule = {"lr": 2e-4, "layer_decay": 0.75}
task = tasks.ClassificationTask(model, data.class_names, optimizer=rule)
trainer = lightning.Trainer(max_epochs=1)
trainer.fit(task, data)
trainer.test(task, data)  # accuracy and calibration
best = tasks.load(trainer.checkpoint_callback.best_model_path)
print(best.predict(torch.rand(3, 32, 32)))
