# %% [markdown]
# # First steps
#
# A network is a host, such as DeiT, with mixers in its blocks. `import mixerlab` comes first: it
# makes `tasks`, `tools` and the other packages importable, in a checkout and from a wheel.

# %%
import mixerlab

print(len(mixerlab.list_backbones()), "networks, among them", mixerlab.list_backbones("deit_t_a*"))

# %% [markdown]
# `deit_t_afbo` is DeiT-Ti with AFBO in place of its feed-forward networks. It is a module of
# plain PyTorch.

# %%
import torch

backbone = mixerlab.create_backbone("deit_t_afbo", img_size=64)
images = torch.rand(2, 3, 64, 64)
print([tuple(features.shape) for features in backbone(images)], backbone.embed(images).shape)

# %% [markdown]
# ## Train
#
# A command is a function that takes its words as a list; `mixerlab run` and `python tools/run.py`
# take the same words. Without `data=` a run makes sample data on this machine: digits on
# photographs, in ImageNet's layout.

# %%
from tools import run

status = run.main(["task=classification", "backbone=deit_t_afbo", "data.train_copies=2"])

# %% [markdown]
# The run folder holds everything that the run was: its config, its metrics, its checkpoints and
# pictures.

# %%
from pathlib import Path

from PIL import Image

folder = Path("outputs/classification/deit_t_afbo/latest")
Image.open(folder / "curves.png")

# %%
Image.open(folder / "preview/00.png")

# %% [markdown]
# ## Predict
#
# `mixerlab.load` opens a run folder of any task. `predict` takes files, folders, PIL images,
# arrays and tensors.

# %%
from datamodules.sample.datamodules import SampleClassification

task = mixerlab.load(folder)
data = SampleClassification(train_copies=2)
data.setup()
photos = sorted(data.root.glob("val/*/*"))[::80]
for row in task.predict(photos):
    print(task.answer(row))

# %% [markdown]
# ## Test
#
# `mode=test` takes the run folder, reports calibration as well, and writes a value per image.

# %%
status = run.main(["mode=test", f"ckpt={folder}"])
