# %% [markdown]
# # Export and serve
#
# A trained network leaves as one file for other software, as a model folder for a hub, or as a
# page. First a network, trained on sample data.

# %%
from pathlib import Path

import mixerlab  # makes tools importable
from tools import export, run

run.main(["task=classification", "backbone=resnet18", "data.train_copies=1"])
folder = Path("outputs/classification/resnet18/latest")

# %% [markdown]
# ## ONNX
#
# One graph from pixels to probabilities, compared with the checkpoint on validation images before
# the folder appears.

# %%
status = export.main([f"ckpt={folder}", "to=onnx", "out=resnet18-onnx"])

# %% [markdown]
# `infer.py` beside it needs numpy, Pillow and onnxruntime only.

# %%
import subprocess
import sys

from datamodules.sample.datamodules import SampleClassification

data = SampleClassification(train_copies=1)
data.setup()
photo = min(data.root.glob("val/7/*"))
command = [sys.executable, "resnet18-onnx/infer.py", photo]
print(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

# %% [markdown]
# ## A model folder
#
# `to=hub` writes weights, config and a card with data, metrics and licence. `repo=owner/name`
# would also push it to the Hugging Face hub. `mixerlab.load` opens it from there
# (`hf-hub:owner/name`) or from this disk.

# %%
status = export.main([f"ckpt={folder}", "to=hub", "out=resnet18-hub", "licence=cc-by-4.0"])
print(Path("resnet18-hub/README.md").read_text())

# %%
task = mixerlab.load("local-dir:resnet18-hub")
print(task.answer(task.predict(photo)[0]))

# %% [markdown]
# ## A page
#
# `serve` opens a page on this machine, which takes a file and shows the answer, where the network
# looked, and the values as JSON. It runs beside the notebook until the kernel stops; in a
# terminal the command is `mixerlab serve ckpt=...`.

# %%
import threading

from tools import serve

words = [f"ckpt={folder}", "port=8123"]
threading.Thread(target=serve.main, args=(words,), daemon=True).start()

# %% [markdown]
# Open http://127.0.0.1:8123/ in a browser. Programs use the same address:

# %%
import base64
import io
import json
import time
import urllib.error
import urllib.request

from PIL import Image

address = "http://127.0.0.1:8123/predict?name=seven.jpg&explain=1"
for _ in range(60):
    try:
        with urllib.request.urlopen(address, photo.read_bytes()) as response:
            answer = json.load(response)
        break
    except urllib.error.URLError:  # until the network is loaded
        time.sleep(1)
print(answer["answer"])

# %% [markdown]
# Where the network looked:

# %%
picture = base64.b64decode(answer["looked"].partition(",")[2])
Image.open(io.BytesIO(picture)).resize((256, 256))
