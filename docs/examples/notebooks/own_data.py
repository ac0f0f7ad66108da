# %% [markdown]
# # Own data
#
# The simplest layout is a folder per class. The handwritten digits of scikit-learn, written as
# 1,797 images, stand for yours here.

# %%
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

digits = load_digits()
for index, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
    folder = Path("digits", str(label))
    folder.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray((pixels * 15).astype("uint8"))
    image.resize((32, 32)).save(folder / f"{index:04d}.png")
print(sorted(path.name for path in Path("digits").iterdir()))

# %% [markdown]
# ## Train
#
# `data=folder` draws a tenth of each class for validation, the same images in every run. It
# chooses rate, batch and length by the number of images and prints why; typed values override
# them. Digits are neither mirrored nor cropped, which the usual augmentation does.

# %%
import mixerlab
from tools import run

words = [
    "task=classification",
    "backbone=resnet18",
    "backbone.patch_size=2",
    "data=folder",
    "data.root=digits",
    "data.image_size=32",
    "data.num_workers=0",
    "data.augmentation.auto_augment=null",
    "data.augmentation.flip=0",
    "data.augmentation.crop_scale=[0.8,1]",
    "data.augmentation.crop_pct=1.0",
    "trainer.max_epochs=5",
]
status = run.main(words)

# %% [markdown]
# ## Look at each class
#
# `classes.csv` has precision, recall and F1 of each class. Against class imbalance, the word
# `task.loss.class_weights=balanced` weights each class by the inverse of its number of images.

# %%
run_folder = Path("outputs/classification/resnet18/latest")
print((run_folder / "classes.csv").read_text())

# %%
Image.open(run_folder / "preview/00.png")

# %% [markdown]
# ## Predict a folder
#
# `predict` with `out=` writes the files of `mode=predict`: a table of the five best classes, and
# every answer as JSON.

# %%
task = mixerlab.load(run_folder)
rows = task.predict("digits/7", batch_size=64, out="predictions")
print(len(rows), "images, the first one:", task.answer(rows[0]))
print(*Path("predictions/predictions.csv").read_text().splitlines()[:4], sep="\n")

# %% [markdown]
# ## A broken file
#
# Files are checked before training. A mistake ends a command in one line.

# %%
broken = Path("digits/3/broken.png")
broken.write_bytes(b"an upload that broke off")
try:
    run.main(words)
except SystemExit as ended:
    print("exit status", ended.code)
broken.unlink()

# %% [markdown]
# Boxes, outlines and masks are read as your annotation tool exports them: Roboflow, CVAT, Label
# Studio, LabelMe, FiftyOne, YOLO and COCO. For example, `task=detection data=coco data.root=<the
# unpacked export>`.
