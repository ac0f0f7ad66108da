"""To timm: a folder that ``timm.create_model("local-dir:<folder>", pretrained=True)`` opens.

It holds what timm itself writes for the Hugging Face hub, ``config.json`` and
``model.safetensors``; the model's class comes from ``import backbones.timm_models``. Of a run
folder the config has the preprocessing that the run was validated with, and of a checkpoint of ours
the names of the classes (``label_names``).
"""

from __future__ import annotations

from pathlib import Path

import timm
import torch
from timm.models import save_for_hf

from backbones.timm_models import around
from heads.linear import LinearClassifier
from tools.exporters import ExportRequest, check_equal
from tools.exporters.networks import Maps, held_by
from tools.exporters.preprocessing import preprocessing_of

WEIGHTS, CONFIG, README = "model.safetensors", "config.json", "README.md"
TEXT = """# {name} for timm

```python
import timm
import backbones.timm_models  # of mixerlab: pip install -e <its checkout>

model = timm.create_model("local-dir:<this folder>", pretrained=True)  # {what}
maps = timm.create_model("local-dir:<this folder>", pretrained=True, features_only=True)
```

Uploaded to the Hugging Face hub as it is, it is opened as `hf-hub:<owner>/<name>`.
"""


def export(request: ExportRequest) -> list[Path]:
    """Write config, weights and README, and open them by timm.

    Raises:
        ValueError: Weights of another model, options that JSON cannot hold, other outputs.
    """
    held = held_by(request)
    network = held.network
    classes = network.classifier.out_features if isinstance(network, LinearClassifier) else 0
    arguments = {**request.options, "num_classes": classes}
    if held.content == "dense":
        arguments["dense"] = True
    model = around(network.backbone, arguments)
    if isinstance(network, LinearClassifier):
        model.classifier = network.classifier
    prepared = preprocessing_of(request.run)
    names = (request.checkpoint and request.checkpoint.class_names) or ()
    labels = {"label_names": list(names)} if len(names) == classes and classes else {}
    save_for_hf(
        model,
        str(request.folder),
        model_config=labels,
        model_args=arguments,
        safe_serialization=True,
        data_config=prepared.of_timm() if prepared else {"input_size": (3, *request.image_size)},
    )
    what = f"{classes} classes" if classes else "no classifier"
    text = TEXT.format(name=request.backbone, what=what)
    (request.folder / README).write_text(text, encoding="utf-8")
    _check(request, network, classes)
    return [request.folder / name for name in (CONFIG, WEIGHTS, README)]


def _check(request: ExportRequest, network: LinearClassifier | Maps, classes: int) -> None:
    """Open the folder by timm and compare logits and maps."""
    source, images = f"local-dir:{request.folder}", request.images()
    opened = timm.create_model(source, pretrained=True).eval()
    maps = timm.create_model(source, pretrained=True, features_only=True).eval()
    with torch.inference_mode():
        check_equal("the maps in timm", list(network.backbone(images)), maps(images))
        if classes:
            check_equal("the classifier in timm", [network(images)], [opened(images)])
